"""Lesson 13: bytes of training, an optimizer in shares, and a forward pass done twice.

The functions and classes here are the answers to the exercises written inside a cell of the lesson.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course.config import Parallel
from course.lab.checks import random_inputs, return_values
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn
from course.lab.instruments.bytes_sent import Traffic, piece_bytes, within_budget
from course.lab.sandbox.limits import Limits
from course.parallel import Axis, build_mesh, join
from course.parallel.mappings import all_gather_single, reduce_scatter_single

QUICK = Limits(seconds=60)
PATIENT = Limits(seconds=180)                        # most of it for starting 4 ranks on a machine with 2 cores


def training_bytes(parameters: int, ranks: int, stage: int) -> tuple[float, float, float]:
    """Bytes on each rank of (weights, gradients, optimizer states), in float32 with Adam, at a ZeRO stage from 0 to 3."""
    weights, gradients, states = 4.0 * parameters, 4.0 * parameters, 8.0 * parameters
    if stage >= 1:
        states /= ranks
    if stage >= 2:
        gradients /= ranks
    if stage >= 3:
        weights /= ranks
    return weights, gradients, states


def draw_sizes(seed: int, hidden: bool) -> Tensors:
    """Models so small that a number which was rounded shows, numbers of ranks, and every stage."""
    generator = random_inputs.generator(seed)
    count = 4 * (6 if hidden else 3)
    parameters = torch.randint(10**3, 10**5, (count,), generator=generator)
    ranks = torch.randint(2, 65 if hidden else 17, (count,), generator=generator)
    return {"sizes": torch.stack([parameters, ranks, torch.arange(count) % 4], 1)}


def run_training_bytes(inputs: Tensors) -> Tensors:
    """The three numbers for each model."""
    found = [training_bytes(*size) for size in inputs["sizes"].tolist()]
    for value in found:
        if not isinstance(value, tuple | list) or len(value) != 3:
            raise InvalidReturn(f"`training_bytes` returned {return_values.describe_value(value)}; expected three numbers",
                                return_values.choose_cure(value, "return weights, gradients, states"))
    return {name: return_values.numbers((value[i] for value in found), "training_bytes")
            for i, name in enumerate(("weights", "gradients", "states"))}


class ZeroOptimizer:
    """ZeRO-1: every rank of an axis updates its share of the weights, and keeps the optimizer's states of that share alone.

    `weights` is one flat tensor, (n,), the same on every rank; `axis.size` divides n. `make` makes an optimizer for a list of
    parameters.
    """

    def __init__(self, weights: Tensor, axis: Axis, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]):
        share = len(weights) // axis.size
        mine = slice(axis.rank * share, (axis.rank + 1) * share)
        self.weights, self.axis = weights, axis
        self.mine = nn.Parameter(weights[mine].clone())                     # (n / size,)
        self.optimizer = make([self.mine])

    def step(self, gradient: Tensor) -> None:
        """Update `weights` in place with the mean of all ranks' gradients; `gradient`, (n,), is this rank's own.

        Gradients travel by a reduce-scatter, new weights by an all-gather.
        """
        total = torch.empty_like(self.mine)                                 # (n / size,)
        reduce_scatter_single(total, gradient, group=self.axis.group)
        self.mine.grad = total / self.axis.size
        self.optimizer.step()
        all_gather_single(self.weights, self.mine.detach(), group=self.axis.group)


def draw_bowls(seed: int, hidden: bool) -> Tensors:
    """For each of four ranks a loss, sum of a (w - b)^2 / 2, and the weights at the start."""
    generator = random_inputs.generator(seed)
    n = 4 * (11 if hidden else 6)
    a, b = 1 + torch.rand(4, n, generator=generator).double(), torch.randn(4, n, generator=generator).double()
    return {"a": a, "b": b, "start": torch.randn(n, generator=generator).double()}


def run_zero_optimizer(inputs: Tensors) -> Tensors:
    """Five steps with plain gradient descent over all ranks, and five with Adam in groups of two, which have to be named."""
    world = join("cpu")
    a, b = inputs["a"][world.rank], inputs["b"][world.rank]
    found: Tensors = {}
    sent = []
    for name, size, make in (("sgd", world.size, lambda p: torch.optim.SGD(p, 0.1)),
                             ("adam", 2, lambda p: torch.optim.Adam(p, 0.1))):
        axis = build_mesh(Parallel(dp=size, tp=world.size // size), world).dp
        weights, steps = inputs["start"].clone(), []
        zero = ZeroOptimizer(weights, axis, make)
        kept = 1.0
        for _ in range(5):
            gradient = a * (weights - b)
            before = gradient.clone()
            with Traffic() as traffic:
                zero.step(gradient)
            kept *= float(torch.equal(gradient, before))
            sent.append((traffic, 2.0 * piece_bytes(weights, 0, axis.size)))
            steps.append(weights.clone())
        found[name] = torch.stack(steps)
    found["states"] = torch.tensor(float(state_numbers(zero)))
    share = weights.nbytes // axis.size
    dist.barrier()
    return found | {"kept": torch.tensor(kept), "shares": within_budget(*sent),
                    "lean": torch.tensor(float(largest_kept(zero, weights) <= share))}


def largest_kept(holder: ZeroOptimizer, weights: Tensor) -> int:
    """Bytes of the largest piece of memory that is kept by a tensor which is an attribute of an object, or which its optimizer
    updates, or by a gradient of these; that of the weights that it was given aside."""
    mine = [value for value in vars(holder).values() if torch.is_tensor(value)]
    mine += [p for value in vars(holder).values() if isinstance(value, torch.optim.Optimizer)
             for group in value.param_groups for p in group["params"]]
    mine += [p.grad for p in mine if p.grad is not None]
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in mine}
    storages.pop(weights.untyped_storage().data_ptr(), None)
    return max(storages.values(), default=0)


def state_numbers(holder: Any) -> int:
    """How many numbers the optimizers that are attributes of an object keep, step counts aside."""
    optimizers = [value for value in vars(holder).values() if isinstance(value, torch.optim.Optimizer)]
    return sum(value.numel() for one in optimizers for state in one.state.values() for key, value in state.items()
               if torch.is_tensor(value) and key != "step")


class Recompute(torch.autograd.Function):
    """block(x), of which x alone is kept: the backward pass computes the block again, with a graph this time."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        """The block's output. PyTorch calls this without building a graph."""
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        """The gradient of x; those of the block's parameters are added to their `.grad`."""
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


def draw_rows(seed: int, hidden: bool) -> Tensors:
    """Inputs of a small network, the gradient of its output, and the seed of its weights and first gradients."""
    generator = random_inputs.generator(seed)
    shape = (7, 10) if hidden else (5, 6)
    return {"x": torch.randn(shape, generator=generator).double(), "grad": torch.randn(shape, generator=generator).double(),
            "seed": torch.tensor(random_inputs.number(seed))}


def run_recompute(inputs: Tensors) -> Tensors:
    """Two blocks with residual sums, forward and backward, with what autograd keeps and how often the blocks run."""
    torch.set_rng_state(random_inputs.generator(int(inputs["seed"])).get_state())
    width = inputs["x"].shape[1]
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).double() for _ in range(2)]
    calls: list[float] = []                          # of each the mean of what the block was given
    parameters = [p for block in blocks for p in block.parameters()]
    for p in parameters:
        p.grad = torch.randn_like(p)                 # of the micro-batch before
    for block in blocks:
        block.register_forward_pre_hook(lambda module, given: calls.append(float(given[0].detach().mean())))
    saved: list[int] = []
    x = inputs["x"].clone().requires_grad_()

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = x
        for block in blocks:
            of_block = return_values.tensor(Recompute.apply(block, y), "forward", tuple(x.shape), torch.float64)
            saved += return_values.on_ctx(of_block)
            y = y + of_block
    excess = max(0, sum(saved) - len(blocks) * x.numel())
    if y.requires_grad:
        y.backward(inputs["grad"])
    return {"output": y.detach(), "gradient": torch.zeros_like(x) if x.grad is None else x.grad,
            "parameters": torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]),
            "excess": torch.tensor(float(excess)), "calls": torch.tensor(calls, dtype=torch.float64)}


def training_bytes_cases(inputs: Tensors) -> list[str]:
    """What `training_bytes` is called with."""
    return ["training_bytes(parameters={}, ranks={}, stage={})".format(*size) for size in inputs["sizes"].tolist()]


EXERCISES = [
    Exercise("training-bytes", "13", (f"{__name__}.training_bytes",), draw_sizes, run_training_bytes, {
        "weights": "the bytes of the weights are right at every stage",
        "gradients": "so are those of the gradients",
        "states": "and those of the optimizer's states"}, cases=training_bytes_cases, limits=QUICK),
    Exercise("zero-optimizer", "13", (f"{__name__}.ZeroOptimizer",), draw_bowls, run_zero_optimizer, {
        "sgd": "after each of five steps of gradient descent every rank has the weights of serial training",
        "adam": "and after each of five steps of Adam, in groups of two",
        "states": "a rank keeps the states of its own share alone",
        "lean": "besides the weights that it is given, it keeps nothing larger than a share",
        "shares": "it sends gradients as a reduce-scatter does, no more than each rank needs",
        "kept": "it does not change the gradient that it is given"}, flags={
            "lean": "it does: a tensor of all weights or gradients, or a piece of one, which keeps all of it",
            "shares": "whole gradients are all-reduced or gathered",
            "kept": "it changes numbers in it"},
        sizes=(2, 4), points=3, limits=PATIENT),
    Exercise("recompute", "13", (f"{__name__}.Recompute",), draw_rows, run_recompute, {
        "output": "the output is that of two blocks, with residual sums around them",
        "gradient": "the gradient of the input is right",
        "parameters": "those of the blocks' parameters are right, added to what was in `.grad`",
        "excess": "it keeps no numbers beyond the blocks' inputs, saved or on ctx",
        "calls": "each block runs once forward and once more in the backward pass, on the same numbers (mean in each call)"},
        points=2, limits=QUICK),
]
