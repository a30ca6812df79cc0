"""`course verify --thorough` against mistakes planted in the library, each of which trains without an error.

Every one is of a kind that somebody has made: in a public codebase, in this one, or in a learner's answer. A patch acts on the
serial run as well, as a mistake in the library would; there it changes nothing, or what is compared with it.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from course import parallel
from course.models.layers import Dropout
from course.ops import ema
from course.parallel import Axis, mappings
from course.parallel.context_parallel import ring_attention
from course.parallel.data_parallel.zero1 import ShardedBucket, ZeRO1
from course.parallel.pipeline_parallel import runtime
from course.parallel.pipeline_parallel.runtime import Pipeline
from course.parallel.tensor_parallel.linear import RowParallel
from course.ranks.notebook_ranks import ranks
from course.training import optimizer, step, verify
from course.utils import random

SMALL = ["model.dim=16", "model.depth=2", "model.heads=4", "train.device=cpu"]
PRESETS = {"vit": ("vit-demo", ["model.grid=[8,16]", "model.channels=3", "model.patch=4", *SMALL]),
           "gpt": ("gpt-demo", ["model.vocab=24", "model.context=11", *SMALL]),
           "dit": ("dit-demo", ["model.latent=[3,8,8]", "model.classes=4", *SMALL])}
FAULTS: dict[str, tuple[str, str, Callable]] = {}


def fault(model: str, layout: str) -> Callable:
    """A mistake: what makes it, in a model and layout where it matters."""
    def keep(make: Callable) -> Callable:
        FAULTS[make.__name__] = model, layout, make
        return make

    return keep


def patch(where: str, new: Any) -> Any:
    return mock.patch(f"course.{where}", new)


@fault("vit", "parallel.dp=2")
def sums_gradients_for_the_mean():
    return patch("parallel.data_parallel.gradients.divide_by_size", lambda x, axis: x)


@fault("vit", "parallel.tp=2")
def leaves_out_the_all_reduce_of_copy():
    return patch("parallel.mappings.copy", lambda x, axis: x)


@fault("vit", "parallel.tp=2 parallel.sp=true")
def leaves_norm_gradients_partial():
    return patch("parallel.data_parallel.gradients.add_partial_gradients", lambda *_: None)


@fault("vit", "parallel.dp=2")
def communicates_after_the_first_micro_batch():
    return patch("training.step.num_microbatches", lambda samples, size: 1)


@fault("gpt", "parallel.dp=2")
def weighs_ranks_alike_whatever_they_ignore():
    def own_weight(model, batch, dp):
        return model.loss.weight(batch).sum() * dp.size

    return patch("training.step.global_weight", own_weight)


@fault("vit", "parallel.tp=2")
def counts_replicas_in_the_norm():
    def all_own(layout):
        return replace(layout, placements={p: replace(where, owner=True) for p, where in layout.placements.items()})

    real = optimizer.gradient_norm
    return patch("training.step.gradient_norm", lambda parameters, layout: real(parameters, all_own(layout)))


@fault("vit", "parallel.tp=2")
def clips_by_the_rank_s_own_norm():
    def own_norm(parameters, mesh):
        return torch.linalg.vector_norm(optimizer.tensor_norms([p.grad for p in parameters if p.grad is not None])).float()

    return patch("training.step.gradient_norm", own_norm)


@fault("vit", "parallel.cp=2 parallel.context=ring")
def draws_dropout_by_local_position():
    def forward(self, x, batch):
        if self.p == 0 or "keys" not in batch:
            return x
        unit = torch.arange(x.shape[1] * x.shape[2]).view(1, x.shape[1], x.shape[2])
        keep = random.uniform(random.fold(self.site, batch["keys"])[:, None, None], unit) >= self.p
        return x * keep / (1 - self.p)

    return patch("models.layers.Dropout.forward", forward)


@fault("vit", "parallel.dp=2")
def draws_dropped_paths_by_local_sample():
    real = random.sample_keys
    return patch("models.vit.random.sample_keys", lambda seed, step, sample: real(seed, step, torch.arange(len(sample))))


@fault("dit", "parallel.dp=2")
def draws_noise_by_rank():
    real = random.sample_keys

    def keys(seed, step, sample):
        return real(seed, step, sample - sample[0])

    return patch("models.dit.random.sample_keys", keys)


@fault("dit", "parallel.pp=2")
def forgets_the_gradient_of_the_condition_between_stages():
    def gradient(x):
        return torch.zeros_like(x) if x.grad is None or x.dim() == 2 else x.grad

    return patch("parallel.pipeline_parallel.runtime.gradient", gradient)


@fault("gpt", "parallel.pp=2")
def keeps_the_ends_of_a_pipeline_untied():
    return patch("parallel.pipeline_parallel.runtime.tie_ends", lambda model, tied, mesh: None)


@fault("gpt", "parallel.tp=2")
def looks_at_the_upper_bound_of_a_vocabulary_piece_alone():
    def own(tokens, rows, axis):
        row = tokens - axis.rank * rows
        here = row < rows
        return row.clamp(0).where(here, 0), here

    return patch("parallel.tensor_parallel.vocabulary.own", own)


@fault("gpt", "parallel.cp=2 parallel.context=ring")
def sees_one_key_too_few_in_the_ring():
    real = ring_attention.visible

    def visible(causal, rank, source, queries, keys):
        rows, columns = real(causal, rank, source, queries, keys)
        return rows, slice(columns.start, columns.stop - 1) if columns.stop and columns.stop > 1 else columns

    return patch("parallel.context_parallel.ring_attention.visible", visible)


@fault("vit", "parallel.cp=2 parallel.context=ring")
def merges_without_rescaling_what_was_there():
    def merge(out, lse, new_out, new_lse):
        both = torch.logaddexp(lse, new_lse)
        out.add_(new_out * (new_lse - both).exp()[..., None])
        lse.copy_(both)

    return patch("parallel.context_parallel.ring_attention.merge", merge)


@fault("gpt", "parallel.cp=2 parallel.context=ring")
def learns_the_padding_of_a_zigzag():
    return patch("parallel.token_split.PADDING", {"target": 0})


@fault("vit", "parallel.pp=2")
def drops_a_block_between_stages():
    real = runtime.part_of

    def part_of(model, names, first, last):
        return real(model, names[:-1] if first and not last else names, first, last)

    return mock.patch.multiple("course.parallel.pipeline_parallel.runtime", part_of=part_of)


@fault("vit", "parallel.dp=2 parallel.zero=true")
def averages_no_weights_of_shards():
    class Forgetful(ema.MovingAverage):
        def __init__(self, optimizer, decay):
            super().__init__(optimizer, decay)
            self.values = {p: value for p, value in self.values.items() if p.dim() > 1}      # a shard is flat

    return patch("training.optimizer.MovingAverage", Forgetful)


@fault("vit", "parallel.dp=2 parallel.zero=true")
def forgets_to_gather_the_first_bucket():
    def updated(self):
        for bucket in reversed(self.buckets[1:]):
            bucket.gather()

    return mock.patch.object(ZeRO1, "after_optimizer_step", updated)


@fault("vit", "parallel.tp=2")
def adds_a_row_bias_on_every_rank():
    def around(self, multiply, x, weight, bias):
        return mappings.reduce(multiply(x, weight) + bias, self.axis)

    return mock.patch.object(RowParallel, "__call__", around)


@fault("vit", "parallel.pp=2")
def leaves_out_the_smaller_last_micro_batch():
    real = step.split_microbatches

    def split(batch, size):
        return (micro for micro in real(batch, size) if not size or len(micro["sample"]) == size)

    return patch("training.step.split_microbatches", split)


@fault("vit", "parallel.pp=2 parallel.schedule=interleaved parallel.chunks=2 model.depth=4")
def evaluates_the_chunks_in_the_wrong_order():
    real = Pipeline.infer

    def infer(self, forward, samples):
        return real(self, lambda chunk, micro, x: forward(0 if 0 < chunk < self.chunks - 1 else chunk, micro, x)
                    if self.pp.rank else forward(chunk, micro, x if x is None else x.flip(0)), samples)

    return mock.patch.object(Pipeline, "infer", infer)


@fault("vit", "parallel.dp=2 train.recompute=full")
def draws_dropout_anew_when_it_recomputes():
    real, calls = Dropout.forward, [0]

    def forward(self, x, batch):
        calls[0] += 1
        if "keys" in batch:
            batch = batch | {"keys": batch["keys"] + calls[0]}
        return real(self, x, batch)

    return mock.patch.object(Dropout, "forward", forward)


@fault("vit", "parallel.dp=2")
def updates_although_a_gradient_overflowed():
    real = step.any_rank

    def anywhere(flags, everyone):
        found = real(flags, everyone)
        return found if everyone.rank == 0 or everyone.size == 1 else torch.zeros_like(found)

    return patch("training.step.any_rank", anywhere)


@fault("vit", "parallel.tp=2")
def starts_shards_from_numbers_of_their_own():
    real = random.element_index
    return patch("utils.random.element_index", lambda shape, box, device, flat=None: real(
        tuple(b - a for a, b in box), tuple((0, b - a) for a, b in box), device, flat))


@fault("vit", "parallel.cp=2 parallel.context=ring parallel.pp=2")
def averages_over_dp_alone_in_a_pipeline():
    real = parallel.serial_placements

    def serial_placements(model, owner=True, average_over=None):
        return real(model, owner, None if average_over.size == 1 else Axis("dp"))

    return patch("parallel.serial_placements", serial_placements)


@fault("gpt", "parallel.tp=2 precision=fp8 fp8.recipe=current model.dim=32")
def scales_fp8_by_the_rank_s_own_largest():
    return patch("fp8.native.largest_over", lambda amax, axis: amax / 64 if axis is not None and axis.rank else amax)


@fault("vit", "parallel.dp=2 parallel.zero=true precision=bf16")
def leaves_the_16_bit_copies_as_they_were():
    return mock.patch.object(ShardedBucket, "gather", lambda self: None if self.narrow else gather_of_all(self))


gather_of_all = ShardedBucket.gather


def compared(trials: list, name: str) -> list:
    with FAULTS[name][2]() if name else nullcontext():
        return verify.compare_all(trials)


def found_equal(name: str, model: str, layout: str, *more: str) -> bool:
    """The verdict of a thorough comparison with a mistake planted ("": none)."""
    preset, small = PRESETS[model]
    trials = verify.thorough_trials(preset, [*small, *layout.split(), *more])
    p = trials[0][0].config.parallel
    found = ranks(p.pp * p.dp * p.cp * p.tp, timeout=300)(compared, trials, name)[0]
    verdicts = [verify.tell(group[0].config, entry.gaps) for group, entry in zip(trials, found, strict=True)]
    return all(verdicts)


FAST = ("counts_replicas_in_the_norm", "drops_a_block_between_stages")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in FAULTS])
def test_a_planted_fault_is_caught(name, capsys):
    model, layout, _ = FAULTS[name]
    assert not found_equal(name, model, layout)
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.parametrize(("model", "layout"), [
    ("gpt", "parallel.dp=2 precision=fp16"),
    *[pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("gpt", "parallel.pp=2 precision=fp16"), ("vit", "parallel.tp=2 parallel.sp=true precision=fp16"),
        ("dit", "parallel.cp=2 parallel.context=ring precision=fp16"),
        ("dit", "parallel.dp=2 parallel.zero=true precision=fp16"), ("vit", "parallel.cp=2 parallel.context=ring precision=fp16"),
        ("gpt", "parallel.tp=2 parallel.dp=2 precision=bf16"), ("vit", "parallel.dp=2 precision=fp8"),
        ("gpt", "parallel.cp=2 parallel.context=ring precision=fp8 model.context=12"),
        ("dit", "parallel.tp=2 precision=fp8 model.dim=32"),
        ("vit", "parallel.dp=2 parallel.data=ddp"), ("gpt", "parallel.dp=2 parallel.data=naive optim.name=adam"),
        ("vit", "parallel.pp=2 parallel.schedule=interleaved parallel.chunks=2 model.depth=4"),
        ("gpt", "parallel.tp=2 parallel.sp=true parallel.cp=2 parallel.context=ring precision=fp16"))]])
def test_nobody_is_blamed(model, layout):
    assert found_equal("", model, layout)
