"""Lesson 10: tensor parallelism's mappings and linears, and those of sequence parallelism.

`qkv_rows` is the answer to the exercise written inside a cell of the lesson.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course.lab.checks import random_inputs, return_values, tiny_training
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.instruments.bytes_sent import Traffic, piece_bytes, within_budget
from course.lab.sandbox.limits import Limits
from course.ops.linear_op import Product
from course.parallel import mappings
from course.parallel.mesh import Axis

RANKS = Limits(seconds=120)                          # of which four have to start, on two cores perhaps
WRITES = "it wrote into what it was given"
MORE = "it sends more bytes"
HEADS = "model.heads=4"                              # which two ranks and four can share
MOVES = "model.residual=false"                       # so that all parameters move from the first step on


def qkv_rows(heads: int, head_dim: int, size: int, rank: int) -> Tensor:
    """Which rows of qkv.weight, (3 * heads * head_dim, dim), a rank has: those of its heads in q, in k and in v."""
    rows = torch.arange(3 * heads * head_dim).view(3, heads, head_dim)
    return rows.tensor_split(size, 1)[rank].flatten()


def draw_heads(seed: int, hidden: bool) -> Tensors:
    """Numbers of ranks, heads of each rank and rows of each head; the first has sizes that all differ, the second more than two
    ranks, since what is right for two alone has to show."""
    generator = random_inputs.generator(seed)
    cases = torch.randint(1, 6, (7 if hidden else 4, 3), generator=generator)
    cases[0] = torch.tensor([4, 3, 2] if hidden else [2, 3, 4])
    cases[1, 0] = 3 + cases[1, 0] % 3
    return {"cases": cases, "rank": torch.randint(0, 100, (len(cases),), generator=generator)}


def run_qkv_rows(inputs: Tensors) -> Tensors:
    """The rows of the first, the last and a drawn rank."""
    found = [return_values.tensor(qkv_rows(size * each, head_dim, size, rank), "qkv_rows", (3 * each * head_dim,), torch.int64)
             for (size, each, head_dim), drawn in zip(inputs["cases"].tolist(), inputs["rank"].tolist(), strict=True)
             for rank in (0, drawn % size, size - 1)]
    return {"rows": torch.cat(found).double()}


def rows_asked(inputs: Tensors) -> list[str]:
    """Each row as a call, and its place in what that returns."""
    return [f"qkv_rows(heads={size * each}, head_dim={head_dim}, size={size}, rank={rank})[{place}]"
            for (size, each, head_dim), drawn in zip(inputs["cases"].tolist(), inputs["rank"].tolist(), strict=True)
            for rank in (0, drawn % size, size - 1) for place in range(3 * each * head_dim)]


def draw(seed: int, hidden: bool) -> Tensors:
    """What training draws, and a tensor and a gradient for each of up to four ranks, whose rows no axis divides."""
    generator = random_inputs.generator(seed)
    shape = (4, 3, 13 if hidden else 9, 2)
    return tiny_training.draw_inputs(seed, samples=6 if hidden else 4) | {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in ("x", "grad")}


def world(c: list[str]) -> Axis:
    """All ranks, as the tensor-parallel axis."""
    return tiny_training.mesh(tiny_training.settings(f"parallel.tp={dist.get_world_size()}", *c)).tp


@dataclass(frozen=True)
class PassRecord:
    """A mapping's forward and backward pass: what came out, what was sent, and whether what it was given is as it was."""

    value: Tensor
    back: Tensor
    forward: Traffic
    backward: Traffic
    kept: float


def measure(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> PassRecord:
    """The function's value at x, and what it makes of a gradient."""
    given, came = x.clone().requires_grad_(), grad.clone()
    with Traffic() as forward:
        value = return_values.some(function(given), "forward", x.dtype)
    result = value.detach().clone()
    with Traffic() as backward:
        back, = torch.autograd.grad(value, given, came)
    return PassRecord(result, back.clone(), forward, backward, float(torch.equal(given.detach(), x) and torch.equal(came, grad)))


def train(inputs: Tensors, *overrides: str) -> Tensors:
    """The library's training on all ranks as one tensor-parallel axis: losses, and this rank's part of the weights."""
    c = [HEADS, MOVES, f"parallel.tp={dist.get_world_size()}", "parallel.overlap=none", *overrides]
    trained = tiny_training.train(tiny_training.batches_of(inputs), int(inputs["seed"]), *c)
    return {name: trained[name] for name in ("losses", "weights")}


def run_copy_reduce(inputs: Tensors) -> Tensors:
    """Copy and Reduce of drawn tensors, and a model trained with them."""
    axis = world([HEADS])
    x, grad = inputs["x"][axis.rank], inputs["grad"][axis.rank]
    copied = measure(lambda t: mappings.copy(t, axis), x, grad)
    reduced = measure(lambda t: mappings.reduce(t, axis), x, grad)
    most = 2 * piece_bytes(x, 1, axis.size)               # of an all-reduce
    return {"copied": copied.value, "back_copy": copied.back, "reduced": reduced.value, "back_reduce": reduced.back,
            "sent": within_budget((copied.forward, 0), (copied.backward, most), (reduced.forward, most), (reduced.backward, 0)),
            "kept": torch.tensor([copied.kept, reduced.kept]), "axes": along_two_axes(inputs), **train(inputs)}


def along_two_axes(inputs: Tensors) -> Tensor:
    """Copy's gradients and Reduce's sums along tp and along dp; all go forward before anything comes back."""
    over = tiny_training.mesh(tiny_training.settings(HEADS, "parallel.tp=2", f"parallel.dp={dist.get_world_size() // 2}"))
    x, grad = inputs["x"][over.world.rank].clone().requires_grad_(), inputs["grad"][over.world.rank]
    axes = over.tp, over.dp
    copied, reduced = [mappings.copy(x, axis) for axis in axes], [mappings.reduce(x, axis) for axis in axes]
    return torch.stack([*(torch.autograd.grad(value, x, grad)[0] for value in copied), *(value.detach() for value in reduced)])


def run_gather_scatter(inputs: Tensors) -> Tensors:
    """Gather and Scatter of drawn tensors along the dim 1, and a model trained with sequence parallelism."""
    axis = world([HEADS])
    x, grad = inputs["x"][axis.rank], inputs["grad"][axis.rank]
    n = x.shape[1]
    start, stop = mappings.bounds(n, axis.size, axis.rank)
    gathered = measure(lambda t: mappings.gather(t, 1, axis, n), x[:, start:stop], grad)
    scattered = measure(lambda t: mappings.scatter(t, 1, axis), x, grad[:, start:stop])
    most = piece_bytes(x, 1, axis.size)
    return {"gathered": gathered.value, "back_gather": gathered.back,
            "scattered": scattered.value, "back_scatter": scattered.back,
            "sent_whole": within_budget((gathered.forward, most), (scattered.backward, most)),
            "sent_sum": within_budget((gathered.backward, most), (scattered.forward, most)),
            "kept": torch.tensor([gathered.kept, scattered.kept]), "dims": along_two_dims(axis, x, grad),
            **train(inputs, "parallel.sp=true")}


def along_two_dims(axis: Axis, x: Tensor, grad: Tensor) -> Tensor:
    """Gather's and Scatter's values and gradients along the dims 1 and 0; both go forward before anything comes back."""
    start, stop = mappings.bounds(x.shape[1], axis.size, axis.rank)
    piece, part = x[:, start:stop].clone().requires_grad_(), x.clone().requires_grad_()
    gathered = [mappings.gather(piece.movedim(1, dim), dim, axis, x.shape[1]) for dim in (1, 0)]
    scattered = [mappings.scatter(part.movedim(1, dim), dim, axis) for dim in (1, 0)]
    backs = [torch.autograd.grad(value, given, whole.movedim(1, dim))[0]
             for values, given, whole in ((gathered, piece, grad), (scattered, part, grad[:, start:stop]))
             for dim, value in zip((1, 0), values, strict=True)]
    return torch.cat([value.detach().flatten() for value in [*gathered, *scattered, *backs]])


def run_column_row(inputs: Tensors) -> Tensors:
    """A model trained with the learner's linears, without and with sequence parallelism; and linears with another product."""
    found = {f"sp_{name}": value for name, value in train(inputs, "parallel.sp=true").items()}
    mlp, x = mlp_of(inputs)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):        # which lets float64 be
        out = mlp.float()(x.float())
    found["format"] = torch.tensor(float(out.dtype == torch.bfloat16))
    return train(inputs) | found | {"product": with_another_product(mlp.double(), x), **without_gathering(inputs)}


def without_gathering(inputs: Tensors) -> Tensors:
    """What an MLP sends forward and backward, without and with sequence parallelism, and whether a tensor in it is whole."""
    sent, lean = [], True
    for sp in ("false", "true"):
        c = tiny_training.settings(HEADS, f"parallel.tp={dist.get_world_size()}", f"parallel.sp={sp}", "parallel.overlap=none")
        model, layout = tiny_training.model(c, over := tiny_training.mesh(c), int(inputs["seed"]))
        layout.tokens.cut(tiny_training.prepare_batch(model, tiny_training.batches_of(inputs)[0]))
        mlp, tokens = model.get_submodule("blocks.0.mlp"), c.model.tokens
        whole = torch.zeros(2, tokens, c.model.dim, dtype=torch.float64)
        x = mappings.shard(whole, 1, over.tp) if c.parallel.sp else whole
        with Traffic() as traffic:
            mlp.down(mlp.up(x.clone().requires_grad_())).sum().backward()
        sent.append((traffic, 4.0 * piece_bytes(whole, 1, over.tp.size)))
        hidden = whole.numel() // c.model.dim * mlp.up.weight.shape[0]
        lean = lean and traffic.largest <= max(mlp.up.weight.numel(), hidden, whole.numel())
    return {"sent": within_budget(*sent), "lean": torch.tensor(float(lean))}


def mlp_of(inputs: Tensors) -> tuple[Any, Tensor]:
    """The MLP of a tensor-parallel model, a column and a row linear, and an input."""
    c = tiny_training.settings(HEADS, f"parallel.tp={dist.get_world_size()}", "parallel.overlap=none")
    mlp: Any = tiny_training.model(c, tiny_training.mesh(c), int(inputs["seed"]))[0].get_submodule("blocks.0.mlp")
    return mlp, inputs["x"][0].flatten()[:2 * c.model.dim].view(1, 2, c.model.dim)


class Doubled(Product):
    """Twice the product, which stands for that of another number format."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return 2 * super().__call__(x, weight, bias)


def with_another_product(mlp: Any, x: Tensor) -> Tensor:
    """An MLP's column and row linear, where twice the product stands for that of another number format."""
    for linear in (mlp.up, mlp.down):
        linear.product = Doubled()
    with torch.no_grad():
        found: Tensor = mlp.down(mlp.up(x))
    return found


EXERCISES = [
    Exercise("qkv-rows", "10", (f"{__name__}.qkv_rows",), draw_heads, run_qkv_rows, {
        "rows": "a rank has the rows of its heads, in q, in k and in v, in order"}, cases=rows_asked,
        limits=Limits(seconds=30)),
    Exercise("copy-reduce", "10", ("course.parallel.mappings.Copy", "course.parallel.mappings.Reduce"), draw, run_copy_reduce, {
        "copied": "copy: every rank keeps its own tensor",
        "back_copy": "copy, backward: every rank gets the sum of all ranks' gradients",
        "reduced": "reduce: every rank gets the sum of all ranks' tensors",
        "back_reduce": "reduce, backward: the gradient passes unchanged",
        "sent": "they send no more than one all-reduce does, each in one of its passes and nothing in the other",
        "kept": "neither writes into its input or its gradient",
        "axes": "in a mesh of two axes each adds up along its own",
        "losses": "the library trains a tensor-parallel model with them: the losses are those of one process",
        "weights": "and so are the weights"}, flags={"kept": WRITES, "sent": MORE}, sizes=(2, 4), limits=RANKS, points=2),
    Exercise("column-row", "10", ("course.parallel.tensor_parallel.linear.ColumnParallel",
                                  "course.parallel.tensor_parallel.linear.RowParallel"), draw, run_column_row, {
        "losses": "the library trains with them: the losses of two steps are those of one process",
        "weights": "and so are the weights",
        "sp_losses": "with sequence parallelism too: the losses",
        "sp_weights": "and the weights",
        "product": "both multiply with `multiply`, which may be the product of another number format",
        "format": "the sum with the bias is in the format of the product, here bf16",
        "sent": "a pair of them sends the bytes of one all-reduce of the activation forward, and of one backward",
        "lean": "no tensor is larger than this rank's part of a weight"},
        flags={"format": "it is in another one: a float32 bias turns the whole sum into float32", "sent": MORE,
               "lean": "one is: it gathers what was cut on purpose"},
        sizes=(2, 4), limits=RANKS, points=3),
    Exercise("gather-scatter", "10", ("course.parallel.mappings.Gather", "course.parallel.mappings.Scatter"), draw,
             run_gather_scatter, {
        "gathered": "gather: every rank gets all ranks' pieces, in order, even if their lengths differ",
        "back_gather": "gather, backward: every rank gets its piece of the sum of all gradients",
        "scattered": "scatter: every rank gets its piece of the sum of all tensors",
        "back_scatter": "scatter, backward: the pieces of the gradient are put together",
        "sent_whole": "where pieces are put together, each rank sends its piece to the others and no more",
        "sent_sum": "where parts are added up, each rank receives the sum of its piece and no more",
        "kept": "neither writes into its input or its gradient",
        "dims": "both work along another dim too, and with a call along one dim between another's two passes",
        "losses": "the library trains with sequence parallelism: the losses are those of one process",
        "weights": "and so are the weights"}, flags={"kept": WRITES, "sent_whole": MORE, "sent_sum": MORE}, sizes=(2, 4),
        limits=RANKS, points=2),
]
