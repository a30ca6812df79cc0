"""Lesson 13's open task: an Adam that shards its state."""

import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from course.lab.checks import random_inputs, tiny_training
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.instruments.bytes_sent import Traffic
from course.lab.instruments.tensor_memory import MemoryMeter
from course.lab.sandbox.limits import Limits
from course.parallel.mappings import all_gather_single, reduce_scatter_single
from course.parallel.mesh import Axis

STEPS, ABSENT = 3, 1                                 # ABSENT: the parameter that gets no gradient in the second step
SPARE = 256                                          # bytes for padding, step counters and the like


class ShardedAdam:
    """Adam with betas (0.9, 0.999) and eps 1e-8, whose state is shared out over the axis."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, axis: Axis):
        """parameters: float64, the same on all ranks, with unequal shapes. axis: `size`, `rank`, `group`."""
        self.parameters, self.lr, self.axis, self.steps = list(parameters), lr, axis, 0
        self.share = -(-sum(p.numel() for p in self.parameters) // axis.size)
        self.mean, self.square = torch.zeros(2, self.share, dtype=torch.float64)

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters by the mean of the ranks' gradients; no gradient (None) counts as zero."""
        self.steps += 1
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        gradient = torch.empty_like(self.mean)
        reduce_scatter_single(gradient, self.joined(grads), group=self.axis.group)
        gradient /= self.axis.size
        self.mean.lerp_(gradient, 0.1)
        self.square.lerp_(gradient**2, 0.001)
        mean, square = self.mean / (1 - 0.9**self.steps), self.square / (1 - 0.999**self.steps)
        whole = self.joined(self.parameters)
        mine = whole.view(self.axis.size, -1)[self.axis.rank] - self.lr * mean / (square.sqrt() + 1e-8)
        all_gather_single(whole, mine, group=self.axis.group)
        for p, new in zip(self.parameters, whole.split([p.numel() for p in self.parameters] + [self.padding]), strict=False):
            p.copy_(new.view_as(p))

    @property
    def padding(self) -> int:
        """The elements beyond the last parameter that make all shares equal."""
        return self.share * self.axis.size - sum(p.numel() for p in self.parameters)

    def joined(self, tensors: Iterable[Tensor]) -> Tensor:
        """Tensors end to end, with zeros up to the last share's end."""
        return F.pad(torch.cat([tensor.flatten() for tensor in tensors]), (0, self.padding))


def draw(seed: int, hidden: bool) -> Tensors:
    """Parameters that no number of ranks divides, and each rank's gradients in each step."""
    generator = random_inputs.generator(seed)
    shapes = [(17, 19), (11,), (5, 7, 3), (1,)] if hidden else [(13, 17), (9,), (3, 11)]
    return {f"p{i}": random_inputs.normal(generator, *shape) for i, shape in enumerate(shapes)} | {
        f"g{i}": random_inputs.normal(generator, STEPS, 4, *shape) for i, shape in enumerate(shapes)}


def run(inputs: Tensors) -> Tensors:
    """The parameters after each step, over all ranks and over two of them; what a step sends, and what is kept between steps."""
    found, sent, kept = [], True, True
    for size in (dist.get_world_size(), 2):
        axis = tiny_training.mesh(tiny_training.settings(f"parallel.dp={size}", f"parallel.tp={dist.get_world_size() // size}",
                                                         "model.heads=4")).dp
        parameters = [nn.Parameter(inputs[f"p{i}"].clone()) for i in range(len(inputs) // 2)]
        first = [p.untyped_storage()._cdata for p in parameters]
        total = sum(p.nbytes for p in parameters)
        share = -(-total // 8 // size) * 8
        gradients = [[inputs[f"g{i}"][step, dist.get_rank()].clone() for i in range(len(parameters))] for step in range(STEPS)]
        with MemoryMeter() as meter:
            optimizer = ShardedAdam(parameters, 0.1, axis)
        for step in range(STEPS):
            for i, p in enumerate(parameters):
                p.grad = None if (step, i) == (1, ABSENT) else gradients[step][i]
            with Traffic() as traffic, meter:
                optimizer.step()
            sent = sent and traffic.sent <= 2 * (size - 1) * share
            for p in parameters:
                p.grad = None
            old = sum(p.nbytes for p, name in zip(parameters, first, strict=True) if p.untyped_storage()._cdata == name)
            until = time.monotonic() + 1              # gloo's threads free a message's tensors a little later
            while old + meter.now > total + 2 * share + SPARE and time.monotonic() < until:
                time.sleep(0.02)
            kept = kept and old + meter.now <= total + 2 * share + SPARE
            found += [p.detach().flatten().clone() for p in parameters]
    return {"weights": torch.cat(found), "sent": torch.tensor(float(sent)), "kept": torch.tensor(float(kept))}


EXERCISES = [
    Exercise("sharded-adam", "13", (f"{__name__}.ShardedAdam",), draw, run, {
        "weights": "after each step every rank has the parameters of Adam on the mean gradients, along two axes",
        "sent": "a step sends one reduce-scatter of the gradients and one all-gather of the parameters",
        "kept": "between steps a rank keeps the parameters and its share of the two moments"},
        flags={"sent": "it sends more", "kept": "it keeps more"},
        levels={"sent": "byte budget", "kept": "memory budget"},
        ladder=("Begin with Adam on one rank: two moments, their bias corrections, the update. Then average the gradients with "
                "an all-reduce first. That is correct, and the first level.",
                "Lay all gradients end to end in one tensor, and pad it until the number of ranks divides it. Rank r is "
                "responsible for the r-th piece: only its moments exist there. `F.pad` and `torch.cat` do it.",
                "`reduce_scatter_single` gives a rank just its piece of the summed gradients. After the update, "
                "`all_gather_single` gives everyone all pieces of the parameters; `split` and `copy_` put them back. Both "
                "take `group=axis.group`."),
        sizes=(2, 4), limits=Limits(seconds=120)),
]
