"""Lesson 05: the bytes that a fused chain moves, what fuses with what, a modulated LayerNorm, and a graph without breaks.

The functions and the class here are the answers to the exercises written inside a cell of the lesson.
"""

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from course.lab.checks import random_inputs, return_values
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn
from course.lab.instruments import cpu_graph, kernel_counter
from course.lab.sandbox.limits import Limits

Operator = tuple[Sequence[str], str]                 # the names of the tensors that it reads, and of the one that it writes
KINDS = ("pointwise", "norm", "matmul", "attention")
QUICK = Limits(seconds=60)


def fused_bytes(chain: Sequence[Operator], sizes: Mapping[str, int], kept: Collection[str]) -> tuple[int, int]:
    """(bytes that the operators move one after another, bytes that one kernel in their place moves).

    chain: the operators in order, each with the names of the tensors that it reads and the name of the one that it writes.
    An operator that names a tensor twice, as x * x does, reads it once. sizes: {name of a tensor: its bytes}. kept: the names
    of the results that are needed afterwards.
    """
    apart = sum(sizes[name] for reads, written in chain for name in (*set(reads), written))
    made = {written for _, written in chain}
    read = {name for reads, _ in chain for name in reads} - made
    return apart, sum(sizes[name] for name in read | (made & set(kept)))


def kernels(operators: Sequence[str]) -> int:
    """How many kernels these operators become. Each "matmul" and each "attention" is one; neighbors of other kinds share one."""
    count, alone = 0, True
    for kind in operators:
        library = kind in ("matmul", "attention")
        if library or alone:                         # after a library's kernel a new one begins
            count += 1
        alone = library
    return count


class Modulate(torch.autograd.Function):
    """layer_norm(x) * (1 + scale) + shift in one function. It keeps only one tensor as large as x for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
        """(B, T, D), 2 x (B, D) -> (B, T, D). Mean and variance are over D; the variance divides by D."""
        mean = x.mean(-1, keepdim=True)                                 # (B, T, 1)
        rstd = (x.var(-1, correction=0, keepdim=True) + eps).rsqrt()    # (B, T, 1)
        ctx.save_for_backward(x, mean, rstd, scale)
        return (x - mean) * rstd * (1 + scale[:, None]) + shift[:, None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """The gradients of x, shift and scale, from the gradient of the output; eps has none."""
        x, mean, rstd, scale = ctx.saved_tensors
        n = (x - mean) * rstd                                           # (B, T, D) once more
        g = grad * (1 + scale[:, None])                                 # (B, T, D) the gradient of n
        dx = rstd * (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True))
        return dx, grad.sum(1), (grad * n).sum(1), None


def tame(x: Tensor, sample: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Scale x, (B, T, D), so that no number of a real sample is beyond `limit`; also return the largest before, ().

    Samples with the id -1 in `sample`, (B,), are padding. They may hold anything, even infinities. They do not count, but are
    scaled as well. The factor is 1 if the largest number is within the limit. For autograd the factor is a constant.
    """
    real = (sample >= 0)[:, None, None]                                 # (B, 1, 1)
    largest = x.detach().abs().where(real, 0.0).amax()                  # ()
    return x * torch.where(largest > limit, limit / largest, 1.0), largest


def draw_chains(seed: int, hidden: bool) -> Tensors:
    """Chains of operators: of each three tensors that it reads, -1 for none, by number; sizes; and what is kept.

    Numbers below 4 are the inputs'; the operators' results follow. Each reads the result before it, and others.
    """
    generator = random_inputs.generator(seed)
    cases, long = (8, 9) if hidden else (4, 5)

    def below(most: int) -> int:
        return int(torch.randint(0, most, (), generator=generator))

    reads = torch.full((cases, long, 3), -1)
    for case in range(cases):
        for i in range(long):
            last = 4 + i - 1 if i else 0
            second = (last, below(4), below(4 + i), -1)[(case + i) % 4]
            reads[case, i] = torch.tensor([last, second, below(4) if i == 2 else -1])
    sizes = 1000 * torch.randint(1, 100, (cases, 4 + long), generator=generator)
    sizes[::2] = sizes[::2, :1]                      # of every second chain all are of one size: a set of sizes loses some
    kept = torch.rand(cases, long, generator=generator) < 0.3
    kept[:, -1] = torch.arange(cases) % 4 < 3        # of some the last result is not what is needed
    kept[:, 1] = True
    return {"reads": reads, "sizes": sizes, "kept": kept}


def chains(inputs: Tensors) -> list[tuple[list[Operator], dict[str, int], list[str]]]:
    """What `fused_bytes` is called with."""
    found = []
    for reads, sizes, kept in zip(inputs["reads"].tolist(), inputs["sizes"].tolist(), inputs["kept"].tolist(), strict=True):
        names = [*"abcd", *(f"r{i}" for i in range(len(reads)))]
        chain: list[Operator] = [([names[at] for at in each if at >= 0], names[4 + i]) for i, each in enumerate(reads)]
        needed = [name for name, keep in zip(names[4:], kept, strict=True) if keep]
        found.append((chain, dict(zip(names, sizes, strict=True)), needed))
    return found


def run_fused_bytes(inputs: Tensors) -> Tensors:
    """The bytes of each chain, unfused and fused."""
    pairs = [return_values.pair(fused_bytes(*case), "fused_bytes", "(apart, fused)") for case in chains(inputs)]
    return {name: return_values.numbers((pair[i] for pair in pairs), "fused_bytes")
            for i, name in enumerate(("apart", "fused"))}


def draw_operators(seed: int, hidden: bool) -> Tensors:
    """Lists of operators by the numbers of their kinds, one that begins and one that ends with a library's."""
    generator = random_inputs.generator(seed)
    kinds = torch.randint(0, 4, (9, 17) if hidden else (5, 9), generator=generator)
    kinds[0, :3] = torch.tensor([2, 0, 1])
    kinds[1, -3:] = torch.tensor([0, 1, 3])
    kinds[2, :4] = torch.tensor([0, 2, 2, 0])
    kinds[3] %= 2
    return {"kinds": kinds}


def lists(inputs: Tensors) -> list[list[str]]:
    """What `kernels` is called with; also no operators, and one."""
    return [[KINDS[kind] for kind in case] for case in inputs["kinds"].tolist()] + [[], ["norm"], ["matmul"]]


def run_kernels(inputs: Tensors) -> Tensors:
    """The number of kernels of each list."""
    return {"kernels": return_values.numbers((kernels(case) for case in lists(inputs)), "kernels")}


def draw_modulation(seed: int, hidden: bool) -> Tensors:
    """Tokens, shift and scale, the gradient of the output, laid out in another order, and eps."""
    generator = random_inputs.generator(seed)
    B, T, D = (3, 7, 10) if hidden else (2, 5, 6)

    normal = partial(random_inputs.normal, generator)
    return {"x": 3 * normal(B, T, D) + 2, "shift": normal(B, D), "scale": normal(B, D), "grad": normal(B, D, T),
            "eps": 0.01 + 0.1 * torch.rand((), generator=generator, dtype=torch.float64)}


def run_fused_modulate(inputs: Tensors) -> Tensors:
    """Output and gradients, whether more is kept than is needed, and whether what was given is as it was."""
    given = {name: inputs[name].clone() for name in ("x", "shift", "scale")}
    x, shift, scale = (tensor.requires_grad_() for tensor in given.values())
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = Modulate.apply(x, shift, scale, float(inputs["eps"]))
    y = return_values.tensor(y, "forward", tuple(x.shape), torch.float64)
    saved += return_values.on_ctx(y)
    B, T, D = x.shape
    allowed = B * T * D + 2 * B * T + 2 * B * D      # one of x's size, two numbers a token, two vectors a sample
    grad = inputs["grad"].clone().transpose(1, 2)    # not contiguous
    if y.requires_grad:
        y.backward(grad)
    kept = all(given[name].equal(inputs[name]) for name in given) and grad.equal(inputs["grad"].transpose(1, 2))
    return {"output": y.detach(), **{f"d{name}": torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                                     for name, tensor in given.items()},
            "excess": torch.tensor(float(sum(saved) > allowed)), "kept": torch.tensor(float(kept))}


class Looks(TorchDispatchMode):
    """Counts how often the value of a tensor is asked for, and how often a shape depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.values = self.shapes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.values += cpu_graph.reads_value(func)
        self.shapes += cpu_graph.has_dynamic_shape(func, args)
        return func(*args, **(kwargs or {}))


def draw_samples(seed: int, hidden: bool) -> Tensors:
    """Samples, the last of them padding with numbers larger than all; the largest of the others is negative and in a sample whose
    id is 0; limit and gradient."""
    generator = random_inputs.generator(seed)
    shape = (5, 6, 7) if hidden else (3, 4, 5)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x[-1] *= 50
    x[0, 1, 2] = -1 - x[:-1].abs().max()
    sample = torch.randint(0, 1000, (shape[0],), generator=generator)
    sample[0], sample[-1] = 0, -1
    return {"x": x, "sample": sample, "limit": 0.5 * x[:-1].abs().max(),
            "grad": torch.randn(shape, generator=generator, dtype=torch.float64)}


def run_graph_break(inputs: Tensors) -> Tensors:
    """Values within the limit, beyond it and all zero, a gradient, and what stands in the compiler's way."""
    x, sample, limit = inputs["x"], inputs["sample"], float(inputs["limit"])
    found: Tensors = {}
    printed, looks = io.StringIO(), Looks()
    leaf = x.clone().requires_grad_()
    with redirect_stdout(printed), looks:
        y, largest = scaled(leaf, sample, limit)
    if y.requires_grad:
        y.backward(inputs["grad"])
    with redirect_stdout(printed):
        other, of_other = scaled(-x, sample, limit)
        _, of_infinite = scaled(x.where(sample[:, None, None] >= 0, torch.inf), sample, limit)      # padding holds anything
        _, of_tiny = scaled(x / 1000, sample, limit)                    # less than what may stand in the place of padding
    found |= {"large": torch.stack([y.detach(), other]),
              "largest": torch.stack([largest.detach(), of_other, of_infinite, of_tiny]),
              "dx": torch.zeros_like(x) if leaf.grad is None else leaf.grad}
    with redirect_stdout(io.StringIO()):
        found["small"] = scaled(x / 4, sample, limit)[0]
        found["zeros"] = scaled(0 * x, sample, limit)[0]
        recorded = recorded_graphs(lambda x: tame(x, sample, limit), x, x / 4, 0 * x)
    return {**found, "values": torch.tensor(float(looks.values > 0)), "shapes": torch.tensor(float(looks.shapes > 0)),
            "quiet": torch.tensor(float(not printed.getvalue())), "graphs": torch.tensor(float(recorded))}


def scaled(x: Tensor, sample: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """`tame`, looked at."""
    y, largest = return_values.pair(tame(x, sample, limit), "tame", "(x, largest)")
    return (return_values.tensor(y, "tame", tuple(x.shape), x.dtype, " as x"),
            return_values.tensor(largest, "tame", (), x.dtype, " as the largest number"))


def recorded_graphs(function: Callable[[Tensor], Any], *inputs: Tensor) -> int:
    """How many graphs Dynamo needs for these inputs of one shape."""
    try:
        return len(kernel_counter.graphs(function, *[(x,) for x in inputs]))
    except torch._dynamo.exc.TorchDynamoException as error:
        raise InvalidReturn(f"Dynamo cannot record `tame`: {str(error).splitlines()[0]}",
                            "use PyTorch's functions on tensors alone"
                       ) from None


EXERCISES = [
    Exercise("fused-bytes", "05", (f"{__name__}.fused_bytes",), draw_chains, run_fused_bytes, {
        "apart": "one after another: each operator reads and writes every tensor that it names",
        "fused": "fused: one kernel reads each outside tensor once, and writes once each result that is needed afterwards"},
        limits=QUICK,
        cases=lambda inputs: ["fused_bytes({}, {}, {})".format(*case) for case in chains(inputs)]),
    Exercise("kernels", "05", (f"{__name__}.kernels",), draw_operators, run_kernels, {
        "kernels": "each matmul and each attention is a kernel, and so is everything between two of them"}, limits=QUICK,
        cases=lambda inputs: [f"kernels({case})" for case in lists(inputs)]),
    Exercise("fused-modulate", "05", (f"{__name__}.Modulate",), draw_modulation, run_fused_modulate, {
        "output": "the output is the normalized x, scaled and shifted",
        "dx": "the gradient of x is right",
        "dshift": "the gradient of shift is right, one vector for each sample",
        "dscale": "the gradient of scale is right",
        "excess": "it keeps at most one tensor as large as x, two numbers per token and two vectors per sample",
        "kept": "it changes neither its inputs nor the gradient that it receives"}, flags={
            "excess": "it keeps more, saved or put on ctx", "kept": "it changes some numbers"},
        points=3, limits=QUICK),
    Exercise("graph-break", "05", (f"{__name__}.tame",), draw_samples, run_graph_break, {
        "large": "numbers beyond the limit are scaled down to it",
        "small": "an x within the limit does not change",
        "zeros": "an x of zeros does not change",
        "largest": "it returns the largest number of the real samples as a tensor",
        "dx": "the gradient matches that of the code with breaks",
        "values": "it never reads a tensor's value",
        "shapes": "no shape depends on the data",
        "quiet": "it prints nothing",
        "graphs": "Dynamo records it whole: one graph for all of these inputs"}, flags={
            "values": "an `if`, .item(), float() or print() asks for one, and the host waits for the device",
            "shapes": "indexing by a mask, x[mask], makes a tensor whose size only the device knows",
            "quiet": "it prints something"}, points=2, limits=QUICK),
]
