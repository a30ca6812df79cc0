"""Open tasks: levels in verdicts, cards, gradebook and JUnit; hints that are opened one by one. test_answers.py runs answers."""

import csv
import errno
import random
import signal
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from course.lab import notebook
from course.lab.checks import check, notebook_cells, render
from course.lab.checks.exercise import all_exercises
from course.lab.checks.return_values import InvalidReturn
from course.lab.exercises import (
    lesson04_open_task,
    lesson05_open_task,
    lesson06_open_task,
    lesson07_open_task,
    lesson09_open_task,
    lesson10_open_task,
    lesson11_open_task,
    lesson14_open_task,
    lesson15_open_task,
    lesson16_open_task,
    lesson17_open_task,
    lesson20_open_task,
    lesson21_open_task,
)
from course.lab.grading import grade
from course.lab.grading.submissions import Submission
from course.lab.instruments import (
    expert_placement,
    failing_machine,
    faulty_training,
    foreign_model,
    gpu_paths,
    noisy_bowl,
    simulated_sharding,
    unknown_machine,
)
from course.lab.instruments.hidden_process import HiddenProcess
from course.lab.instruments.unknown_machine import Layout
from course.models import build_model, layers
from course.parallel import mesh
from course.ranks.notebook_ranks import ranks
from course.utils.errors import CourseError

TASKS = [exercise for exercise in all_exercises().values() if exercise.open]
TASK = all_exercises()["run-schedule"]


def verdict(*held: bool, name: str = TASK.name) -> check.Verdict:
    """A verdict with a fact for each level."""
    return check.Verdict(name, tuple(check.Fact(holds, "a claim", level=level) for level, holds in enumerate(held)))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_an_open_task_has_levels_and_three_hints(task):
    assert len(task.ladder) == 3 and len(task.level_names) >= 3 and task.levels.keys() <= task.claims.keys()
    assert task.level_names[0] == "correct" and task.level(next(iter(task.claims))) == 0


@pytest.mark.parametrize(("held", "reached"), [
    ((True, True, True, True), (0, 1, 2, 3)), ((True, False, True, False), (0, 2)), ((True, False, False, False), (0,)),
    ((False, True, True, True), ())])
def test_levels_count_once_the_answer_is_correct(held, reached):
    found = verdict(*held)
    assert found.reached == reached and found.points == len(reached) and found.passed == held[0]
    assert f"{len(reached)} of 4 levels" in render.headline(found)
    assert ("not correct yet" in render.text(found)) == (not held[0])


def test_a_level_must_hold_on_every_number_of_ranks():
    twice = check.Verdict(TASK.name, verdict(True, True).facts + verdict(True, False).facts)
    assert twice.passed and twice.reached == (0,)


def test_an_exercise_gives_all_its_points_or_none():
    gpipe = all_exercises()["gpipe"]
    assert check.Verdict("gpipe", (check.Fact(True, ""),) * 3).points == gpipe.points
    assert check.Verdict("gpipe", (check.Fact(True, ""), check.Fact(False, ""))).points == 0


def test_open_tasks_leave_the_mark_and_the_maximum_alone(tmp_path):
    learners = {"ann": verdict(True, True, False, True), "bob": verdict(False, False, False, False)}
    graded = [grade.Graded(Submission(name, "12", tmp_path), (verdict(True, name="gpipe"), verdict(True, name="1f1b"), one))
              for name, one in learners.items()]
    grade.write_gradebook(graded, tmp_path / "gradebook.csv")
    grade.write_junit(graded, tmp_path / "junit.xml")
    grade.write_feedback("ann", graded[:1], tmp_path / "ann.html")
    with open(tmp_path / "gradebook.csv", newline="") as file:
        rows = {row["learner"]: row for row in csv.DictReader(file)}
    for name, points in (("ann", "3"), ("bob", "0")):
        row = rows[name]
        assert (row["points"], row["out_of"], row["open_points"], row["12 run-schedule (open, 4)"]) == ("5", "5", points, points)
    assert [(suite.get("tests"), suite.get("failures")) for suite in ElementTree.parse(tmp_path / "junit.xml").getroot()] == \
        [("3", "0"), ("2", "0")]
    assert "5 of 5 points and 3 of open tasks" in (tmp_path / "ann.html").read_text()


def test_a_check_of_an_open_task_stops_no_notebook(monkeypatch, capsys):
    answer = notebook_cells.Answer(notebook_cells.whole_answer("run_schedule = None"))
    monkeypatch.setattr(notebook_cells, "find_answer", lambda *_: answer)
    monkeypatch.setattr(notebook.checks, "check_answer", lambda *_, **how: verdict(False))
    notebook.check("run-schedule")
    assert "0 of 4 levels" in (said := capsys.readouterr().out) and 'lab.hint("run-schedule")' in said
    with pytest.raises(notebook.CheckFailed):
        notebook.check("gpipe")


def test_hints_are_opened_one_by_one(monkeypatch, capsys):
    monkeypatch.setattr(notebook, "_opened", {})
    for shown in (1, 2, 3, 3):
        notebook.hint("run-schedule")
        said = capsys.readouterr().out
        assert [text in said for text in TASK.ladder] == [number < shown for number in range(3)]
    with pytest.raises(CourseError, match="gpipe is no open task"):
        notebook.hint("gpipe")


def test_a_diagnosis_names_each_fault_in_three_steps():
    names = list(faulty_training.NAMES)
    with faulty_training.Trainings([(name, 7) for name in names], 3) as trainings:
        assert [lesson15_open_task.diagnose(trainings.starter(case)) for case in range(len(names))] == names
        assert {trainings.calls(case) for case in range(len(names))} == {3}
        latent, each = torch.zeros(2, 4, 4, 4), torch.zeros(2, dtype=torch.int64)
        run = trainings.starter(0)()
        with pytest.raises(InvalidReturn, match="more than 3 times"):
            run(latent, latent, each, each)
        with pytest.raises(InvalidReturn, match="`noise` of `run` has the shape"):
            run(latent, latent[0], each, each)


def test_no_placement_is_faster_than_the_librarys():
    """All placements of a machine whose GPUs are alike, so that rank 0 may have GPU 0, for axes that send more or less."""
    inputs = lesson09_open_task.draw(3, False)
    axes, paths, speeds = lesson09_open_task.unpacked(inputs)[1]
    slowest = {tuple(gpu_paths.slowest_paths(axes, paths, (0, *others))) for others in permutations(range(1, 8))}
    for sent in permutations((1e8, 1e9, 5e9)):
        changed = [replace(axis, bytes=each) for axis, each in zip(axes, sent, strict=True)]
        least = min(gpu_paths.step_seconds(changed, one, speeds) for one in slowest)
        assert lesson09_open_task.least_seconds((tuple(changed), tuple(map(tuple, paths)), tuple(speeds))) == pytest.approx(least)


@pytest.mark.parametrize("kind", lesson21_open_task.HIDDEN)
def test_each_case_of_experts_has_a_placement_without_a_busiest_rank(kind):
    """The best one has the mean on each rank, so that no other is better; the one before is valid, and few transfers away."""
    for seed in range(20):
        dice = random.Random(seed)
        if found := lesson21_open_task.draw_best(dice, kind, 9000):
            tokens, best = found
            before = lesson21_open_task.disturb(dice, kind, tokens, best)
            assert expert_placement.rank_tokens(tokens, best) == pytest.approx([9000] * kind[0])
            assert expert_placement.transfers(before, best) <= kind[0] * kind[1] * lesson21_open_task.MOVED
            for placement in (best, before):
                assert {expert for row in placement for expert in row} == set(range(len(tokens)))
                assert all(len(set(row)) == len(row) <= kind[1] for row in placement)


def test_the_fewest_bytes_of_a_step_are_those_of_all_sets_that_stay():
    """Every set of units that stays whole, played through without a gather ahead; none is faster than the bound."""
    for units, limit, bandwidth in lesson20_open_task.unpacked(lesson20_open_task.draw(3, False)):
        ups, steps = range(len(units)), []
        for kept in (set(some) for size in range(len(units) + 1) for some in combinations(ups, size)):
            events = [event for u in ups for event in (("gather", u), ("forward", u), ("free", u))[:2 if u in kept else 3]]
            for u in reversed(ups):
                events += [("gather", u), ("backward", u), ("free", u), ("reduce", u)][u in kept:]
            steps.append(simulated_sharding.simulate(units, limit, bandwidth, events))
        fitting = [step for step in steps if not step.wrong]
        assert min(step.gathered for step in fitting) == lesson20_open_task.least_gathered(units, limit)
        assert min(step.seconds for step in fitting) > lesson20_open_task.least_seconds(units, limit, bandwidth)
        assert {step.wrong for step in steps} <= {"", "limit"}


@pytest.mark.parametrize(("up", "down", "said"), [
    ("gather forward free", "gather reduce backward free", "which makes the gradients"),
    ("gather forward", "gather backward free reduce", "whole already"),
    ("forward gather free", "gather backward free reduce", "its gather comes before"),
    ("gather forward free", "backward free reduce", "has to be gathered again"),
    ("gather forward free", "gather backward free free reduce", "was it freed before"),
    ("gather forward free", "gather backward reduce", "gradients whose reduce"),
    ("gather forward free", "gather backward free reduce", "try all sets")])
def test_a_wrong_step_is_named_by_the_event_that_cannot_be(up, down, said, monkeypatch):
    """Units as numbers of NumPy are welcome."""
    def order_step(units, limit, bandwidth):
        ups = np.arange(len(units))
        return [(kind, u) for kinds, some in ((up, ups), (down, ups[::-1])) for u in some for kind in kinds.split()]

    task = lesson20_open_task
    inputs = task.draw(3, False)
    expected = task.weigh(inputs, task.run(inputs))
    monkeypatch.setattr(task, "order_step", order_step)
    assert said in task.explain(inputs, expected, task.weigh(inputs, task.run(inputs)))


def test_neighbors_are_those_of_the_mesh():
    axes = [gpu_paths.Axis(name, size, name != "pp", 1, 1.0) for name, size in (("pp", 3), ("dp", 2), ("cp", 1), ("tp", 4))]
    grid = mesh.lay_out({"pp": 3, "dp": 2, "cp": 1, "tp": 4}, "pp-dp-cp-tp")
    for dim, (axis, pairs) in enumerate(zip(axes, gpu_paths.neighbors(axes), strict=True)):
        rows = [[*row, row[0]] if axis.ring and axis.size > 2 else row for row in mesh.groups(grid, dim).tolist()]
        assert {frozenset(pair) for pair in pairs} == {frozenset(pair) for row in rows for pair in pairwise(row)}


def test_float16_trains_like_float32_where_nothing_overflows():
    """Half-precision training with its scale moves the weights like float32 training without one, as far as float16 is exact."""
    task = lesson04_open_task
    inputs = task.draw(3, False)
    network, momentum, clip = task.Network(inputs), float(inputs["momentum"]), float(inputs["clip"])
    velocities, found = {name: torch.zeros_like(weight) for name, weight in network.weights.items()}, []
    for kind, micros, rate in zip(inputs["kinds"].tolist(), task.batches(inputs), inputs["rates"].tolist(), strict=True):
        leaves = [weight.clone().requires_grad_() for weight in network.weights.values()]
        total = torch.zeros((), dtype=torch.float64)
        for micro in micros:
            x = micro["x"].float()
            for layer in range(task.LAYERS):
                x = (silu(x) if layer else x) @ leaves[2 * layer] + leaves[2 * layer + 1]
            loss = micro["y"] * x if micro["linear"] else (x - micro["y"]).square()
            spikes = sum(leaf.flatten()[-1] * spike for leaf, spike in zip(leaves, micro["spikes"], strict=True))
            total = total + (micro["strength"] * loss.mean() + spikes) / len(micros)
        gradients = torch.autograd.grad(total, leaves)
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        before = {name: weight.clone() for name, weight in network.weights.items()}
        for (name, weight), gradient in zip(network.weights.items(), gradients, strict=True):
            if task.KINDS[kind] not in task.BAD:
                velocities[name] = momentum * velocities[name] + gradient * min(1.0, clip / float(norm))
                weight -= rate * velocities[name]
        moves = {name: weight - before[name] for name, weight in network.weights.items()}
        moves["w0"][:task.FAINT] /= task.FAINTER
        found.append(torch.cat([move.flatten() for move in moves.values()]))
    assert check.difference(torch.stack(found), task.run(inputs)["moved"], task.TOLERANCE) == ""


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_float16_steps_are_of_every_kind(seed, hidden):
    """Whatever the seed: some steps are clipped and some not, and the scale grows after one that is not."""
    task = lesson04_open_task
    inputs = task.draw(seed, hidden)
    kinds = [task.KINDS[kind] for kind in inputs["kinds"].tolist()]
    assert {"", "clipped", "cancel", "norm", "loss", "overflow", "opposite"} == {*kinds} and kinds[0] == "clipped"
    scales = task.scales_of_steps(kinds, float(inputs["scale"]), int(inputs["grow_after"]))
    assert any(kind in ("", "loss", "cancel") and later == 2 * scale
               for kind, scale, later in zip(kinds, scales, scales[1:], strict=False))
    network, sizes = task.Network(inputs), []
    for micros in task.batches(inputs):
        halves = {name: weight.half().requires_grad_() for name, weight in network.weights.items()}
        scaled = [torch.autograd.grad(network.loss_of(halves, micro) * scales[len(sizes)], list(halves.values()))
                  for micro in micros]
        mean = [sum(each.double() for each in one) / scales[len(sizes)] / len(micros) for one in zip(*scaled, strict=True)]
        sizes.append((torch.cat([each.flatten() for each in mean]).norm() / inputs["clip"]).item())
    for kind, size in zip(kinds, sizes, strict=True):
        assert size < 0.95 if kind in ("", "cancel") else size > 1.5 if kind in ("clipped", "norm") else True, (kind, size)
        assert kind not in task.BAD or not np.isfinite(size)


def test_what_is_hidden_can_only_be_read_after_everything_else():
    """An answer finds the process behind `train` and `measure`; once it has asked, nothing else that it asks is answered."""
    knowledge = [noisy_bowl.Bowl(2.0, 0.05, 0.5)], [noisy_bowl.Job(0.01, 0.001, 10.0)], 0, 5.0
    with HiddenProcess(noisy_bowl.runs, knowledge) as hidden:
        assert len(hidden.ask(0, [noisy_bowl.Phase(2, 0.6, 7)])) == 1 and hidden.ask(0) > 0
        assert hidden.ask() == ([(2.0, 0.05, 0.5)], 0)
        for question in ((0, [noisy_bowl.Phase(2, 0.6, 7)]), (0,), ()):
            with pytest.raises(InvalidReturn, match="before the answer was complete"):
                hidden.ask(*question)


def test_the_machines_tables_are_the_last_thing_that_is_told():
    """So `measure` of plan-layout cannot tell an answer how near a layout is to the best."""
    table = [(Layout(2, 1, 1, 1), 3.0), (Layout(1, 2, 1, 1), float("inf"))]
    with HiddenProcess(unknown_machine.measurements, ([table], 1)) as hidden:
        assert hidden.ask(0, table[0][0]) == 3.0
        with pytest.raises(InvalidReturn, match="more than 1 times"):
            hidden.ask(0, table[1][0])
        assert hidden.ask() == ([dict(table)], [1])
        with pytest.raises(InvalidReturn, match="before the answer was complete"):
            hidden.ask(0, table[0][0])


@pytest.mark.parametrize(("layout", "found"), [(None, 0.0), (Layout(1, 1, 1, 1), 2.0), (Layout(2, 1, 1, 1), 2.0),
                                               (Layout(4, 1, 1, 1), 2.1), (Layout(8, 1, 1, 1), -1.0)])
def test_a_choice_counts_as_the_best_within_three_per_cent(layout, found):
    table = {Layout(dp, 1, 1, 1): seconds for dp, seconds in ((1, 2.0), (2, 2.05), (4, 2.1), (8, float("inf")))}
    assert lesson17_open_task.judged(layout, table) == found


def test_the_bowls_expected_losses_are_means_of_its_runs():
    """Of many runs, and of steps that are computed one by one."""
    bowl = noisy_bowl.Bowl(2.0, 0.05, 0.5)
    plan = [noisy_bowl.Phase(2, 0.6, 7), noisy_bowl.Phase(5, 0.2, 20)]
    expected = noisy_bowl.expected_losses(bowl, plan)
    generator = np.random.default_rng(0)
    drawn = np.array([noisy_bowl.training_run(bowl, plan, generator) for _ in range(4000)])
    assert drawn.mean(0) == pytest.approx(expected, rel=0.03)

    curvature = np.array([2.0 * 0.025 ** (i / (noisy_bowl.DIRECTIONS - 1)) for i in range(noisy_bowl.DIRECTIONS)])
    square = 2 / noisy_bowl.DIRECTIONS / curvature   # of each weight
    for phase, loss in zip(plan, expected, strict=True):
        for _ in range(phase.steps):
            square = (1 - phase.rate * curvature) ** 2 * square + phase.rate**2 * bowl.noise * curvature / phase.batch
        assert (curvature * square).sum() / 2 == pytest.approx(loss)
    assert noisy_bowl.expected_losses(bowl, [plan[0], noisy_bowl.Phase(9, 1.0, 1), plan[1]])[1:] == [np.inf, np.inf]


def test_the_whole_block_is_the_block_with_breaks():
    """The check compares answers with our own, so our own has to match the block that the lesson shows."""
    inputs = lesson05_open_task.draw(3, False)
    found, calls, outputs, log = lesson05_open_task.run(inputs), lesson05_open_task.calls_of(inputs), [], list[float]()
    for call, (x, lengths, weights, step) in enumerate(calls):
        outputs.append(lesson05_open_task.block_with_breaks(x, lengths, weights, step, log))
        outputs[-1].backward(inputs[f"grad{call}"])
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in calls[0][2].values()]
    for name, expected in (("y", outputs), ("dx", [x.grad for x, *_ in calls]), ("dweights", gradients)):
        torch.testing.assert_close(found[name], lesson05_open_task.flat(expected).detach(), rtol=1e-10, atol=1e-12)
    assert found["largest"].tolist() == pytest.approx(log) and len(log) == len(calls)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(),
                                                                                         reason="needs a GPU"))])
def test_graphs_train_as_eager_steps_do(device):
    """The gradient of the mean over all micro-batches at once; some steps are clipped, and some not."""
    inputs, norms, losses, weights = lesson06_open_task.draw(3, False), list[float](), list[float](), []
    network = lesson06_open_task.Network(inputs, lesson06_open_task.CPU)
    velocities = [torch.zeros_like(p) for p in network.parameters]
    steps = lesson06_open_task.micros_of(inputs, lesson06_open_task.CPU)
    for number, (micros, rate) in enumerate(zip(steps, inputs["rates"].tolist(), strict=True)):
        if number == lesson06_open_task.LOADED:
            network.parameters[0].data.copy_(inputs["loaded"])
        loss = network.loss_of({name: torch.cat([micro[name] for micro in micros]) for name in "xy"})
        gradients = torch.autograd.grad(loss, network.parameters)
        norms.append(torch.cat([gradient.flatten() for gradient in gradients]).norm().item())
        for p, gradient, velocity in zip(network.parameters, gradients, velocities, strict=True):
            velocity.copy_(inputs["momentum"] * velocity + gradient * min(1.0, inputs["clip"].item() / norms[-1]))
            p.data -= rate * velocity
        losses.append(loss.item())
        weights.append(network.weights())
    found = lesson06_open_task.train(inputs, torch.device(device))
    assert min(norms) < inputs["clip"] < max(norms)
    torch.testing.assert_close(found["weights"], torch.stack(weights), rtol=1e-10, atol=1e-12)
    assert found["losses"].tolist() == pytest.approx(losses)
    assert all(found[name] == 1 for name in ("kept", "captured", "launches", "stall", "reads"))


@pytest.mark.parametrize("which", range(4))
def test_a_foreign_model_comes_back_from_its_files(which):
    """Its weights are found, and the library's own GPT gives its logits; the task's `logits` are those of this GPT."""
    with foreign_model.ForeignModels([(which, which, which > 1, 2)]) as models:
        checkpoint, run, c = models.checkpoint(0), models.runner(0), models.config(0)
        weights = lesson16_open_task.convert_foreign(checkpoint, run, c)
        text = torch.randint(c.vocab, (c.context,), generator=torch.Generator().manual_seed(which))
        model = build_model(c).to_empty(device="cpu").double().eval()
        model.load_state_dict({name: x.double() for name, x in weights.items()})
        batch = {"tokens": torch.cat([text, text[:1]])[None], "sample": torch.zeros(1, dtype=torch.int64)}
        expected = model(model.prepare(batch, torch.zeros((), dtype=torch.int64)))[0].detach()
        assert models.calls(0) == 1
        for found in (run(text), lesson16_open_task.logits(c, weights.__getitem__, text)):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        with pytest.raises(InvalidReturn, match="1 to 11 tokens"):
            run(torch.zeros(12, dtype=torch.int64))
        with pytest.raises(InvalidReturn, match="there is no tensor"):
            checkpoint.read("model.safetensors", "a")


def test_a_failing_machine_does_what_the_task_says():
    """A kill leaves half a file, a power cut what was flushed, a full disk an error; two seconds after a signal it ends."""
    plan, seen = failing_machine.Plan(1, 4, 2), []

    def survive(job):
        signal.signal(signal.SIGUSR1, lambda *_: seen.append("asked"))
        seen.append({name: len(job.disk.read(name)) for name in job.disk.names()})
        for number in range(1, 5):
            job.step(number)
            if len(seen) < 3:
                try:
                    job.disk.write("file", b"four")
                except OSError as error:
                    seen.append(error.errno)
        return 0

    def live(**fate):
        seen.clear()
        return failing_machine.live(survive, failing_machine.Fate(**fate), plan)

    whole = live()
    assert sorted(whole.losses) == [1, 2, 3, 4] and (whole.again, whole.wrong_status, whole.left, whole.most) == (0, 0, 4, 4)
    killed = live(kill_save=2, operation=1)
    assert killed.losses == whole.losses and killed.again == 2 and seen[1] == {"file": 2}
    live(kill_save=2, operation=1, power="late")
    assert seen[1] == {}
    live(full=1)
    assert errno.ENOSPC in seen
    short = failing_machine.Fate(damage="flip", place=-1)
    assert failing_machine.damaged(b"abc", short) == b"abg"
    assert failing_machine.damaged(b"abc", replace(short, damage="cut")) == b"ab"
    late = live(warn_step=2)                         # half a step, a write and a step; the next write takes too long
    assert late.losses == whole.losses and late.again == 3 and "asked" in seen


def test_the_newest_file_is_the_last_one_written_whatever_its_name():
    disk, state = failing_machine.QuietDisk(), bytes(failing_machine.STATE)
    for name in ("z", "a.partial", "b"):
        disk.write(name, state)
    assert disk.newest() == "b"
    disk.rename("a.partial", "a")
    disk.remove("b")
    disk.write("c", b"short")
    assert disk.newest() == "a"


def test_what_all_wrong_models_have_in_common_is_named():
    inputs = lesson16_open_task.draw(5, False)
    layouts = [foreign_model.in_words(foreign_model.draw_case(*case)[2]) for case in lesson16_open_task.cases(inputs)]
    expected = torch.ones(len(layouts), dtype=torch.float64)
    wrong = torch.tensor(["(2i, 2i + 1)" in layout for layout in layouts])
    told = lesson16_open_task.explain(inputs, {"logits": expected}, {"logits": expected.where(~wrong, 2)})
    assert told.endswith("rotary turns (2i, 2i + 1)")
    assert not lesson16_open_task.explain(inputs, {"logits": expected}, {"logits": 2 * expected})


@pytest.mark.parametrize(("first", "words"), [(2, "which Python runs"), (3, "what a replay cannot see"),
                                              (lesson06_open_task.LOADED + 1, "are loaded in place"), (99, "are right")])
def test_the_first_step_with_wrong_weights_says_where_to_look(first, words):
    weights = torch.ones(9, 4, dtype=torch.float64)
    got = weights + (torch.arange(1, 10) >= first)[:, None]
    assert words in lesson06_open_task.explain({}, {"weights": weights}, {"weights": got})


def test_nan_in_gradients_alone_is_told_from_nan_in_values():
    ones, nan = torch.ones(3), torch.full((3,), torch.nan)
    right = {"y": ones, "dx": ones, "dweights": ones}
    assert "comes through" in lesson05_open_task.explain({}, right, right | {"y": nan})
    assert "`where` hid a NaN" in lesson05_open_task.explain({}, right, right | {"dx": nan})
    assert not lesson05_open_task.explain({}, right, right)


@pytest.mark.slow
def test_the_parallel_block_is_the_librarys_serial_block():
    """The check compares answers with our own, so our own has to match one process."""
    inputs = lesson10_open_task.draw(3, False)

    def on_rank():
        outputs = lesson10_open_task.run(inputs)
        return {name: outputs[name] for name in ("value", "back", "shared")}

    block = layers.Block(lesson10_open_task.DIM, lesson10_open_task.HEADS, lesson10_open_task.HIDDEN, "block").double()
    where = {"qkv": block.attn.qkv, "out": block.attn.out, "up": block.mlp.up, "down": block.mlp.down,
             "norm1": block.norm1, "norm2": block.norm2}
    parameters = {name: getattr(where[name.split(".")[0]], name.split(".")[1]) for name in inputs.keys() - {"x", "grad"}}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(inputs[name].view_as(parameter))
    x = inputs["x"].clone().requires_grad_()
    y = block(x, {})
    y.backward(inputs["grad"])
    shared = torch.cat([parameters[name].grad.flatten() for name in lesson10_open_task.SHARED])
    found = ranks(2)(on_rank)
    torch.testing.assert_close(torch.cat([rank["value"] for rank in found], 1), y.detach(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(torch.cat([rank["back"] for rank in found], 1), x.grad, rtol=1e-11, atol=1e-11)
    for rank in found:
        torch.testing.assert_close(rank["shared"], shared, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
def test_data_parallel_gives_the_mean_of_the_ranks_gradients():
    inputs = lesson07_open_task.draw(3, False)
    parameters = [inputs[f"p{i}"].clone().requires_grad_(i != lesson07_open_task.FROZEN) for i in range(lesson07_open_task.MANY)]
    expected = []
    for step, micros in enumerate(lesson07_open_task.MICROS):
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        for rank in range(2):
            for micro in range(micros):
                order = lesson07_open_task.uses(step, micro, rank)
                (lesson07_open_task.loss_of(parameters, inputs["x"][step, micro, rank], order) / 2).backward()
        expected += [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for found in ranks(2)(lambda: lesson07_open_task.run(inputs)["gradients"]):
        torch.testing.assert_close(found, torch.cat([grad.flatten() for grad in expected]), rtol=1e-11, atol=1e-11)


@pytest.mark.slow
def test_a_text_written_over_ranks_is_that_of_one_process():
    inputs = lesson14_open_task.draw(3, False)
    words, seed = int(inputs["words"]), int(inputs["seed"])
    for found in ranks(2)(lambda: lesson14_open_task.run(inputs)):
        for name, temperature in (("greedy", 0.0), ("drawn", 1.5)):
            whole = lesson14_open_task.write_alone(inputs, inputs["prompt"], int(inputs["count"]), words, temperature, seed)
            assert torch.equal(found[name], whole[:, inputs["prompt"].shape[1]:].T.flatten())


@pytest.mark.slow
def test_causal_attention_over_ranks_is_that_of_one_process():
    inputs = lesson11_open_task.draw(3, False)
    q, k, v = (inputs[name].clone().requires_grad_() for name in "qkv")
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    out.backward(inputs["grad"])
    for rank, found in enumerate(ranks(2)(lambda: lesson11_open_task.run(inputs))):
        for name, whole in (("out", out.detach()), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad)):
            torch.testing.assert_close(found[name], whole.tensor_split(2, 2)[rank].flatten(), rtol=1e-11, atol=1e-11)
