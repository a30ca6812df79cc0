"""What lesson 20 compares answers with is right: it agrees with serial training and with the order of the library."""

import pytest
import torch

from course.lab.exercises import lesson20_fully_sharded as lesson
from course.ranks.notebook_ranks import ranks


def serial(weights, x, steps=lesson.STEPS):
    """Outputs before each step of every rank's batch, and the weights after the last, of gradient descent on the mean loss."""
    blocks, outputs = lesson.chain_of(weights, x.shape[-1]), []
    parameters = [p for block in blocks for p in block.parameters()]
    for _ in range(steps):
        y = x
        for block in blocks:
            y = y + block(y)
        outputs.append(y.detach())
        gradients = torch.autograd.grad(y.square().sum() / 2 / len(x), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.data -= lesson.LEARNING_RATE * gradient
    return torch.stack(outputs), torch.cat([lesson.flat_weights(block) for block in blocks])


@pytest.mark.parametrize("hidden", [False, True])
def test_units_in_shares_train_as_whole_ones_do(hidden):
    inputs = lesson.draw_chain(3, hidden)
    outputs, weights = serial(inputs["weights"], inputs["x"])
    for rank, found in enumerate(ranks(4)(lesson.run_sharded_unit, inputs)):
        assert torch.allclose(found["all"], outputs[:, rank]) and torch.allclose(found["all_weights"], weights)
        assert (found["freed"], found["kept"], found["sent"]) == (1, 1, 1)


@pytest.mark.parametrize("hidden", [False, True])
def test_reduced_gradients_are_the_means_over_the_ranks(hidden):
    inputs = lesson.draw_gradients(3, hidden)
    gradients = inputs["gradients"].clone()          # (rank, micro-batch, number)
    second = slice(12, 12 + 5)                       # of the parameter without gradient
    gradients[1::2, :, second] = 0
    gradients[:, 1, second] = 0
    means = gradients.mean(0).cumsum(0)              # (micro-batch, number)
    found = ranks(4)(lesson.run_reduce_gradients, inputs)
    gathered = torch.cat([each["all"] for each in found], 1)
    assert torch.allclose(gathered[:, :means.shape[1]], means) and not gathered[:, means.shape[1]:].any()
    assert all((each["dropped"], each["kept"], each["sent"]) == (1, 2, 1) for each in found)


def test_the_order_of_events_trains_as_one_process_does():
    inputs = lesson.draw_counts(3, True)
    found = ranks(4)(lesson.run_step_events, inputs)
    losses = torch.stack([each["losses"] for each in found], 1)         # (units and steps, rank)
    expected = [serial(inputs["weights"][:count], inputs["x"])[0].square().sum((-1, -2)) / 2 for count in inputs["counts"]]
    assert torch.allclose(losses, torch.cat(expected))
    assert found[0]["most"].max() == 2 and not found[0]["left"].any()


def recorded(*settings):
    """The timeline of a second step on this rank."""
    from course import config, parallel
    from course.lab.instruments.fully_sharded_timeline import record_step
    from course.training.assemble import assemble

    chosen = config.load("vit-demo", ["data.source=mock", "train.device=cpu", "parallel.dp=4", "model.depth=3", *settings])
    training = assemble(chosen, parallel.build_mesh(chosen.parallel, parallel.join("cpu")))
    batch = training.model.example(2, torch.device("cpu"))
    training.step(batch)
    return record_step(training, batch)


def test_the_library_gathers_and_frees_in_the_order_of_the_exercise():
    for timeline in ranks(4)(recorded, "parallel.zero=3"):
        assert timeline.events == lesson.step_events(5) and max(timeline.whole) == 2
        assert [unit for unit, *_ in timeline.forward] == [0, 1, 2, 3, 4]
        assert [unit for unit, *_ in timeline.backward] == [4, 3, 2, 1, 0]
        assert len(timeline.gathers) == 9 and len(timeline.reduces) == 5
        assert all(begin < end for spans in (timeline.forward, timeline.gathers, timeline.reduces) for _, begin, end in spans)


def test_units_that_stay_whole_for_the_backward_pass_are_all_whole():
    for timeline in ranks(4)(recorded, "parallel.zero=3", "parallel.reshard_after=backward"):
        assert max(timeline.whole) == 5 and len(timeline.gathers) == 5
