"""One optimizer step, the same for every model, layout and precision.

Layouts differ in `compute(batch) -> loss`, which runs forward and backward. It leaves the gradients of
this rank's share of the loss in `.grad`, times `loss_scale` and the number of data-parallel ranks.
`train_step` completes the gradients, clips and updates. The host decides nothing in a step, so it never
waits for the device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course.config import Config
from course.config.validation import num_microbatches
from course.data import Batch
from course.fp8.native import Scaling
from course.models import Model
from course.ops.number_formats import FIRST_SCALE, autocast, next_scale
from course.parallel import Axis, Layout
from course.parallel.data_parallel.gradients import GradientSync
from course.parallel.pipeline_parallel.runtime import Pipeline
from course.training.optimizer import clip_factor, gradient_norm, learning_rate
from course.training.profiler import part

Compute = Callable[[Batch], Tensor]
Step = Callable[[Batch], tuple[Tensor, Tensor]]


@dataclass
class Progress:
    """What changes from step to step besides the weights, as device tensors: a host that reads one waits for the device."""

    step: Tensor
    lr: Tensor
    loss_scale: Tensor
    good_steps: Tensor                               # since the loss scale last changed
    skipped_steps: Tensor                            # updates left out because a gradient was not finite
    nan_steps: Tensor                                # steps whose loss was not finite
    streak: Tensor                                   # skipped steps in a row, up to now
    longest_streak: Tensor                           # and the most so far

    @classmethod
    def start(cls, config: Config, device: torch.device) -> "Progress":
        def count() -> Tensor:
            return torch.zeros((), dtype=torch.int64, device=device)

        def number(value: float) -> Tensor:
            return torch.tensor(value, dtype=torch.float32, device=device)

        scale = FIRST_SCALE.get(config.precision, 1.0)
        return cls(count(), number(config.optim.lr), number(scale), count(), count(), count(), count(), count())

    def state(self) -> dict[str, float]:
        """The values, on the host."""
        return {entry.name: getattr(self, entry.name).item() for entry in fields(self)}

    def restore(self, state: dict[str, float], same_precision: bool = True) -> None:
        """Take the values of a checkpoint, in place. The streak of skipped steps ends. In another precision the loss scale
        starts again: bf16's scale of 1 would let fp16's small gradients vanish for a long time."""
        for entry in fields(self):
            if same_precision or entry.name not in ("loss_scale", "good_steps"):
                getattr(self, entry.name).fill_(state[entry.name])
        self.streak.zero_()
        self.longest_streak.zero_()


def eager(model: Model, progress: Progress, config: Config, layout: Layout) -> Compute:
    """Forward and backward through the whole model on this rank, one micro-batch after another.

    The loss of the global batch is sum / W over all its samples. Each rank back-propagates its own
    sum times dp / W, so that the average over the data-parallel ranks is the gradient of that mean.
    """
    mesh = layout.mesh

    def compute(batch: Batch) -> Tensor:
        weight = global_weight(model, batch, mesh.dp)
        loss = torch.zeros((), device=weight.device, dtype=weight.dtype)
        for micro in split_microbatches(batch, config.train.micro_batch):
            micro = layout.tokens.cut(micro)
            with autocast(config.precision, weight.device):
                output = model(micro)
            total, _ = model.loss(output, micro)
            (total * (mesh.dp.size / weight) * progress.loss_scale).backward()
            loss += total.detach() / weight
        return loss                                   # this rank's share of the global mean

    return compute


def build_compute(model: Model, progress: Progress, config: Config, layout: Layout) -> Compute:
    """The forward and backward passes of this layout."""
    if layout.pipeline is None:
        return eager(model, progress, config, layout)
    return pipelined(model, layout.pipeline, progress, config, layout)


def pipelined(model: Model, pipeline: Pipeline, progress: Progress, config: Config, layout: Layout) -> Compute:
    """The same as `eager`, with the model's stages on the ranks along pp; micro-batches pass from stage to stage."""
    mesh = layout.mesh
    last = config.parallel.chunks - 1 if mesh.pp.rank == mesh.pp.size - 1 else None         # the chunk that ends in the loss

    def compute(batch: Batch) -> Tensor:
        micros = [layout.tokens.cut(micro) for micro in split_microbatches(batch, config.train.micro_batch)]
        weight = global_weight(model, batch, mesh.dp)

        def forward(chunk: int, micro: int, x: Any) -> Any:
            with autocast(config.precision, weight.device):
                output = layout.stages[chunk](micros[micro], x)
            if chunk != last:
                return output
            total, _ = model.loss(output, micros[micro])
            return total * (mesh.dp.size / weight) * progress.loss_scale

        losses = pipeline.train(forward, [len(micro["sample"]) for micro in micros])
        total = torch.stack(losses).sum() if losses else torch.zeros_like(weight)
        return total / (mesh.dp.size * progress.loss_scale)             # this share of the global mean; 0 before the last stage

    return compute


def global_weight(model: Model, batch: Batch, dp: Axis) -> Tensor:
    """W: the total weight of the global batch's samples."""
    weight: Tensor = model.loss.weight(batch).sum()
    if dp.size > 1:
        dist.all_reduce(weight, group=dp.group)
    return weight


def split_microbatches(batch: Batch, size: int) -> Iterator[Batch]:
    """Split a batch into micro-batches of `size` samples; 0: one, the whole batch."""
    samples = len(batch["sample"])
    for start in range(0, samples, size or samples):
        yield {name: tensor[start:start + (size or samples)] for name, tensor in batch.items()}


def train_step(compute: Compute, model: Model, gradients: GradientSync, optimizer: torch.optim.Optimizer, progress: Progress,
               config: Config, layout: Layout, scaling: Scaling | None = None) -> Step:
    """Compute, finish the gradients, clip, update. The host decides nothing and waits for nothing.

    A loss or gradient that is not finite on any rank makes every rank keep its old state: the fused
    optimizers take the flag `found_inf`, and with `grad_scale` they undo loss scaling and clip in the
    same pass over the gradients. scaling: what FP8's matmuls noted in this step sets their scales for the next.
    """
    def step(batch: Batch) -> tuple[Tensor, Tensor]:
        batch = model.prepare(batch, progress.step)
        gradients.begin(num_microbatches(len(batch["sample"]), config.train.micro_batch))
        with part("compute"):
            loss = compute(batch)
        with part("gradients"):
            gradients.finish()
        norm = gradient_norm(gradients.optimizer_parameters, layout) / progress.loss_scale
        bad, nan = any_rank(torch.stack([~(loss.isfinite() & norm.isfinite()), ~loss.isfinite()]), layout.mesh.all)
        progress.lr.copy_(learning_rate(progress.step, config))
        optimizer.grad_scale = progress.loss_scale / clip_factor(norm, config.optim.clip)    # type: ignore[attr-defined]
        optimizer.found_inf = bad                     # type: ignore[attr-defined]  # neither is in PyTorch's stub of Optimizer
        with part("optimizer"):
            optimizer.step()
        gradients.clear()
        gradients.after_optimizer_step()
        if scaling is not None:
            scaling.update(bad)
        update_progress(progress, nan, bad, config.precision)
        return loss, norm

    return step


def any_rank(flags: Tensor, everyone: Axis) -> Tensor:
    """For each flag, of any shape, 1.0 if it is set on any rank, else 0.0, the same on all, in float32."""
    value = flags.float()
    if everyone.size > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX, group=everyone.group)
    return value


def update_progress(progress: Progress, nan: Tensor, bad: Tensor, precision: str) -> None:
    """Count the step; the flags say whether its loss was not finite, and whether it was skipped."""
    p, skipped = progress, (bad > 0).long()
    scale, good = next_scale(precision, p.loss_scale, p.good_steps, bad)
    p.loss_scale.copy_(scale)
    p.good_steps.copy_(good)
    p.step += 1
    p.skipped_steps += skipped
    p.nan_steps += (nan > 0).long()
    p.streak.copy_((p.streak + 1) * skipped)
    p.longest_streak.copy_(torch.maximum(p.longest_streak, p.streak))


