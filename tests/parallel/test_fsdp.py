"""Fully sharded data parallelism: what is in memory when, what is sent, and that 16 bits change nothing else."""

from typing import Any

import pytest

from course import config
from course.ranks.notebook_ranks import ranks
from course.utils.errors import CourseError
from tests.parallel.test_parity import MODELS, layout

DEPTH = 5                                            # blocks of the parity tests' models


def watched_step(spec: str, kind: str = "vit", more: tuple[str, ...] = ()) -> dict[str, Any]:
    """A step in a layout: the most units whole at once, those whole after it, and the bytes of each collective."""
    from unittest import mock

    import torch

    from course.data import order
    from course.parallel import build_mesh, join, mappings
    from course.parallel.data_parallel.fsdp import FlatParameters
    from course.training.assemble import assemble
    from tests.parallel.test_parity import draw

    preset, small = MODELS[kind]
    c = config.load(preset, [*small, *layout(spec)[1], *more])
    mesh = build_mesh(c.parallel, join("cpu"))
    training: Any = assemble(c, mesh)
    flats = training.gradients.flats
    found: dict[str, Any] = {"most": 0, "gather": 0, "scatter": 0, "gathers": 0, "whole": sum(f.whole.nbytes for f in flats),
                             "before": sum(f.whole.untyped_storage().nbytes() > 0 for f in flats)}
    start, gather, scatter = FlatParameters.start_gather, mappings.all_gather_single, mappings.reduce_scatter_single

    def started(flat: Any) -> None:
        start(flat)
        found["most"] = max(found["most"], sum(f.whole.untyped_storage().nbytes() for f in flats))

    def gathered(out: torch.Tensor, *given: Any, **how: Any) -> Any:
        found["gather"] += out.nbytes
        found["gathers"] += 1
        return gather(out, *given, **how)

    def scattered(out: torch.Tensor, whole: torch.Tensor, *given: Any, **how: Any) -> Any:
        found["scatter"] += whole.nbytes
        return scatter(out, whole, *given, **how)

    batch = {**draw(kind, torch.Generator().manual_seed(1)), "sample": torch.arange(8)}
    mine = order.my_slice(8, mesh.dp.size, mesh.dp.rank)
    with (mock.patch.object(FlatParameters, "start_gather", started), mock.patch.object(mappings, "all_gather_single", gathered),
          mock.patch.object(mappings, "reduce_scatter_single", scattered)):
        training.step({name: tensor[mine] for name, tensor in batch.items()})
    found["after"] = sum(f.whole.untyped_storage().nbytes() > 0 for f in flats)
    found["largest"] = max(f.whole.nbytes for f in flats)
    found["gradients"] = sum(p.grad is not None for p in training.model.parameters())
    return found


def test_at_most_two_units_are_whole_and_none_between_steps():
    for found in ranks(2)(watched_step, "dp=2 zero=3"):
        assert found["before"] == found["after"] == found["gradients"] == 0
        assert found["largest"] < found["most"] <= 2 * found["largest"] < found["whole"] / 2


def test_what_is_kept_until_the_backward_pass_or_the_step_ends_is_whole():
    for spec in ("dp=2 zero=3 reshard_after=backward", "dp=2 zero=3 reshard_after=step", "dp=2 zero=2"):
        for found in ranks(2)(watched_step, spec):
            assert found["most"] == found["whole"] and (found["after"] > 0) == ("zero=2" in spec)


@pytest.mark.parametrize(("spec", "gathers", "scatters"), [
    ("dp=2 zero=2", 1, 1), ("dp=2 zero=2 micro=1", 1, 4), ("dp=2 zero=3 reshard_after=backward", 1, 1),
    ("dp=2 zero=3 reshard_after=step micro=1", 1, 4)])
def test_weights_and_gradients_are_sent_as_often_as_the_stage_says(spec, gathers, scatters):
    """As a ring sends: once the weights and once the gradients are as much as an all-reduce."""
    for found in ranks(2)(watched_step, spec):
        assert (found["gather"], found["scatter"]) == (gathers * found["whole"], scatters * found["whole"])


def test_stage_three_sends_half_as_much_again_as_an_all_reduce():
    """Two gathers and a scatter. The last unit is gathered once: its backward pass follows at once."""
    for found in ranks(2)(watched_step, "dp=2 zero=3"):
        assert found["scatter"] == found["whole"]
        assert 2 * found["whole"] - found["largest"] <= found["gather"] < 2 * found["whole"]


def test_a_pipelines_rank_gathers_for_each_micro_batch_or_once():
    often, once = (ranks(4)(watched_step, f"dp=2 pp=2 zero=3 micro=1 {more}")[0] for more in ("", "reshard_after=step"))
    assert often["gathers"] > 6 * once["gathers"]


def build(spec: str) -> tuple[int, int, int]:
    """Bytes at the peak of building a model on this rank, those of its share, and those of a unit."""
    from unittest import mock

    import torch

    from course.lab.instruments.tensor_memory import MemoryMeter
    from course.parallel import build_gradient_sync, build_mesh, initialize, join, parallelize
    from course.parallel.initialize import initial_values

    c = config.load("gpt-demo", ["model.depth=8", "model.dim=256", "model.vocab=64", "model.context=64", *layout(spec)[1]])
    mesh = build_mesh(c.parallel, join("cpu"))
    with MemoryMeter() as meter, mock.patch("course.parallel.data_parallel.fsdp.PIECE", 4096):
        from course.models import build_model

        model = build_model(c.model)
        cut = parallelize(model, mesh, c.parallel)
        initialize(model, cut.placements, 0, torch.device("cpu"), later=True)
        gradients: Any = build_gradient_sync(model, cut, c.parallel, draw=lambda where: initial_values(
            model, where, 0, torch.device("cpu")))
    return meter.peak, sum(f.master.nbytes for f in gradients.flats), max(f.whole.nbytes for f in gradients.flats)


def test_no_rank_ever_has_the_whole_model_while_it_is_built():
    """Its share, one unit, and what some values need while they are drawn, here of a few thousand numbers."""
    for peak, share, unit in ranks(4)(build, "dp=4 zero=3"):
        assert share < peak < share + 1.3 * unit < 2 * share


def losses(settings: list[str]) -> tuple[list[float], list[Any]]:
    """Losses of four steps in bf16, and the updated values."""
    import torch

    from course.parallel import build_mesh, join
    from course.training.assemble import assemble

    c = config.load("vit-demo", ["data.source=mock", "train.device=cpu", "model.grid=[16,32]", "model.dim=32", "model.depth=3",
                                 "model.heads=4", "model.residual=false", "train.global_batch=8", "train.steps=20",
                                 "optim.lr=0.01", "optim.warmup=0", "precision=bf16", "parallel.dp=2", *settings])
    mesh = build_mesh(c.parallel, join("cpu"))
    training: Any = assemble(c, mesh)
    found = [training.step(training.model.example(4, torch.device("cpu"), 8 * number + 4 * mesh.dp.rank))[0].item()
             for number in range(4)]
    training.gradients.wait_parameters()
    masters = training.gradients.full_master_weights()
    return found, [masters.get(p, p).detach().clone() for p in training.model.parameters()]


@pytest.mark.parametrize("stage", [2, 3])
def test_sixteen_bit_weights_train_to_the_bit_as_with_zero_1(stage):
    """With several micro-batches the sums have another order: over ranks first."""
    import torch

    one, other = (ranks(2)(losses, [f"parallel.zero={zero}"])[0] for zero in (1, stage))
    assert one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
    one, other = (ranks(2)(losses, [f"parallel.zero={zero}", "train.micro_batch=2"])[0] for zero in (1, stage))
    assert one[0] == pytest.approx(other[0], rel=1e-4)


EIGHT = ["precision=fp8", "fp8.recipe=delayed"]


@pytest.mark.parametrize("more", [[], ["train.recompute=full"], ["parallel.tp=2", "parallel.sp=true"]])
def test_eight_bit_weights_train_to_the_bit_as_with_zero_1(more):
    """Each rank casts its share by the scale of the whole weight; the first step finds the scales."""
    size = 4 if "parallel.tp=2" in more else 2
    one, other = (ranks(size)(losses, [f"parallel.zero={zero}", *EIGHT, *more])[0] for zero in (1, 3))
    assert one[0] == other[0] and len(set(other[0])) == 4


def sent_in_eight_bits() -> tuple[list[int], int, int]:
    """The bytes of the gathers of each of three steps, the numbers in the blocks' linears, and the bytes of all other weights."""
    from unittest import mock

    import torch

    from course.models.layers import Linear
    from course.parallel import build_mesh, join, mappings
    from course.training.assemble import assemble

    c = config.load("vit-demo", ["data.source=mock", "train.device=cpu", "model.dim=64", "model.depth=2", "train.global_batch=4",
                                 "parallel.dp=2", "parallel.zero=3", "parallel.reshard_after=step", *EIGHT])
    training: Any = assemble(c, build_mesh(c.parallel, join("cpu")))
    real, found = mappings.all_gather_single, [0, 0, 0]
    for number in range(3):
        def gathered(out: torch.Tensor, *given: Any, number: int = number, **how: Any) -> Any:
            found[number] += out.nbytes
            return real(out, *given, **how)

        with mock.patch.object(mappings, "all_gather_single", gathered):
            training.step(training.model.example(2, torch.device("cpu")))
    small = sum(m.weight.numel() for m in training.model.blocks.modules() if isinstance(m, Linear))
    return found, small, 4 * (sum(p.numel() for p in training.model.parameters()) - small)


def test_the_weights_of_eight_bit_matmuls_are_sent_in_eight_bits():
    """From the second step on, when there are scales. A flat tensor may end in padding."""
    for (first, *later), small, others in ranks(2)(sent_in_eight_bits):
        assert first == pytest.approx(4 * small + others, abs=64) and later == pytest.approx([small + others] * 2, abs=64)


def test_gradients_in_sixteen_bits_are_near_those_in_float32():
    exact, rounded = (ranks(2)(losses, ["parallel.zero=3", f"parallel.reduce_in={how}"])[0][0] for how in ("float32", "matmul"))
    assert rounded != exact and rounded == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize(("settings", "sentence"), [
    (["parallel.zero=4"], r"parallel.zero=4: ZeRO has stages 0 .* 3 \(weights, too\): use one of them"),
    (["parallel.zero=3", "parallel.dp=6", "parallel.shard=4"], "does not divide the 6 ranks of dp x cp: choose one of "
                                                               "1, 2, 3, 6, or 0 for all"),
    (["parallel.zero=1", "parallel.shard=2"], r"parallel.shard=2 is for sharded gradients and weights: set parallel.zero=2 or 3"),
    (["parallel.reduce_in=matmul"], r"parallel.reduce_in=matmul is for sharded"),
    (["parallel.zero=2", "parallel.reshard_after=step"], r"parallel.zero=2 keeps them: set parallel.zero=3"),
    (["parallel.zero=3", "parallel.data=ddp"], r"use parallel.data=bucketed"),
    (["parallel.zero=3", "precision=fp8", "fp8.by=te"], r"use parallel.zero=2, or fp8.by=native")])
def test_what_cannot_be_combined_is_a_sentence(settings, sentence):
    with pytest.raises(CourseError, match=sentence):
        config.load("gpt-demo", settings)


def test_a_shard_that_does_not_divide_the_ranks_there_are_is_a_sentence():
    from course.ranks.notebook_ranks import RankError

    with pytest.raises(RankError, match=r"parallel.shard=2 does not divide the 3 ranks of dp x cp: choose one of 1, 3, or 0"):
        ranks(3)(losses, ["parallel.dp=0", "parallel.zero=3", "parallel.shard=2"])
