"""Lesson 05's open task: a block that Dynamo records whole, for samples of different lengths."""

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from course.lab.checks import random_inputs, return_values
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.exercises.lesson05_compile_and_fuse import Looks
from course.lab.instruments import kernel_counter
from course.lab.sandbox.limits import Limits

DIM, HEADS, HIDDEN = 8, 2, 16
WARM = 100                                           # steps in which attention fades in
CALLS = 4
KERNELS = 5                                          # of matrix products and attention
SHAPES = {"q": (DIM, DIM), "k": (DIM, DIM), "v": (DIM, DIM), "out": (DIM, DIM), "gate": (DIM,), "up": (HIDDEN, DIM),
          "down": (DIM, HIDDEN)}
Arguments = tuple[Tensor, Tensor, Tensors, int]
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "_addmm_activation", "linear", "matmul", "einsum")


def block_with_breaks(x: Tensor, lengths: Tensor, weights: Tensors, step: int, log: list[float]) -> Tensor:
    """A transformer block for samples of different lengths: x (B, T, D), lengths (B,) -> (B, T, D), with padding of 0."""
    y = torch.zeros_like(x)
    fade = (step + 1) / WARM if step < WARM else 1.0
    for i, length in enumerate(lengths.tolist()):    # skip the padding
        tokens = x[i, :length]                       # (t, D)
        n = F.layer_norm(tokens, (DIM,))
        q, k, v = ((n @ weights[name].T).unflatten(-1, (HEADS, -1)).transpose(0, 1) for name in "qkv")
        attended = (q @ k.mT * q.shape[-1]**-0.5).softmax(-1) @ v       # (h, t, d)
        tokens = tokens + fade * (attended.transpose(0, 1).flatten(1) @ weights["out"].T)
        n = F.layer_norm(tokens, (DIM,))
        open_gate = n @ weights["gate"] > 0          # (t,) only these tokens go through the MLP
        if open_gate.any():
            chosen = n[open_gate]                    # (chosen, D)
            more = F.gelu(chosen @ weights["up"].T) @ weights["down"].T
            tokens = tokens.index_put((open_gate,), tokens[open_gate] + more)
        y[i, :length] = tokens
    log.append(y.abs().max().item())
    if log[-1] > 10:
        print(f"step {step}: the largest number is {log[-1]:.3g}")
    return y


def whole_block(x: Tensor, lengths: Tensor, weights: Tensors, step: int) -> tuple[Tensor, Tensor]:
    """Return what `block_with_breaks` returns, and its largest absolute value, (), without a gradient.

    x: (B, T, D); its padding may hold anything, even NaN. lengths: (B,) from 1 to T. weights: "q", "k", "v", "out", (D, D),
    "gate", (D,), "up", (F, D), "down", (D, F).
    """
    real = (torch.arange(x.shape[1], device=x.device) < lengths[:, None])[..., None]            # (B, T, 1)
    x = x.where(real, 0.0)
    n = F.layer_norm(x, x.shape[-1:])
    qkv = F.linear(n, torch.cat([weights[name] for name in "qkv"])).unflatten(-1, (3, HEADS, -1))
    q, k, v = qkv.permute(2, 0, 3, 1, 4)                                # (B, h, T, d) each
    attended = F.scaled_dot_product_attention(q, k, v, real.mT[:, None])            # (B, h, T, d)
    fade = ((x.new_zeros(()) + step + 1) / WARM).clamp(max=1.0)
    x = x + fade * F.linear(attended.transpose(1, 2).flatten(2), weights["out"])
    n = F.layer_norm(x, x.shape[-1:])
    more = F.linear(F.gelu(F.linear(n, weights["up"])), weights["down"])            # (B, T, D)
    open_gate = (n * weights["gate"]).sum(-1, keepdim=True) > 0
    y = (x + more.where(open_gate, 0.0)).where(real, 0.0)
    return y, y.detach().abs().amax()


class Work(Looks):
    """Also counts matrix products and attentions, and the numbers of the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.kernels += name in PRODUCTS or "attention" in name
        returned = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in returned if isinstance(returned, tuple | list) else [returned]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return returned


def draw(seed: int, hidden: bool) -> Tensors:
    """Calls with other numbers of samples and tokens, and steps before and after the warm-up.

    In the first call no sample is as long as x; later ones have a sample of full length.
    """
    generator = random_inputs.generator(seed)
    samples = 2 + torch.randperm(6, generator=generator)[:CALLS]
    tokens = (17 if hidden else 14) + torch.randperm(12, generator=generator)[:CALLS]
    steps = torch.cat([30 + torch.randperm(60, generator=generator)[:2], torch.tensor([WARM + 7, WARM - 1])])
    found = {"samples": samples, "tokens": tokens, "steps": steps}
    for call, (b, t) in enumerate(zip(samples.tolist(), tokens.tolist(), strict=True)):
        lengths = torch.randint(1, t, (b,), generator=generator)
        if call:
            lengths[-1] = t
        found |= {f"x{call}": 2 * random_inputs.normal(generator, b, t, DIM), f"lengths{call}": lengths,
                  f"grad{call}": random_inputs.normal(generator, b, t, DIM)}
    return found | {name: random_inputs.normal(generator, *shape) * shape[-1]**-0.5 for name, shape in SHAPES.items()}


def padded(inputs: Tensors, call: int) -> Tensor:
    """x of a call in new memory, (B, T, D), NaN in its padding."""
    x = inputs[f"x{call}"].clone()
    x[torch.arange(x.shape[1]) >= inputs[f"lengths{call}"][:, None]] = torch.nan
    return x


def calls_of(inputs: Tensors) -> list[Arguments]:
    """The arguments of each call, with tensors of their own."""
    weights = {name: inputs[name].clone().requires_grad_() for name in SHAPES}
    return [(padded(inputs, call).requires_grad_(), inputs[f"lengths{call}"].clone(), weights, step)
            for call, step in enumerate(inputs["steps"].tolist())]


def looked_at(block: Callable[..., Any], arguments: Arguments) -> tuple[Tensor, Tensor]:
    """What a block returns for these arguments."""
    y, largest = return_values.pair(block(*arguments), "whole_block", "(y, largest)")
    x = arguments[0]
    return (return_values.tensor(y, "whole_block", tuple(x.shape), x.dtype, " as y"),
            return_values.tensor(largest, "whole_block", (), x.dtype, " as the largest number"))


def run(inputs: Tensors) -> Tensors:
    """Values and gradients of all calls; then what Dynamo records of them, and what is computed."""
    works, printed, calls = [Work() for _ in inputs["steps"]], io.StringIO(), calls_of(inputs)
    outputs, largest = list[Tensor](), list[Tensor]()
    with redirect_stdout(printed):
        for call, (work, arguments) in enumerate(zip(works, calls, strict=True)):
            with work:
                y, most = looked_at(whole_block, arguments)
            outputs.append(y.detach().clone())
            largest.append(most.detach().clone())
            if y.requires_grad:
                y.backward(inputs[f"grad{call}"])
        free = not most.requires_grad
        waits = any(work.values or work.shapes for work in works)       # then it breaks, and recording would take long
        graphs, recorded = record([] if waits else calls_of(inputs), outputs)
    kernels = max(work.kernels for work in works + recorded)
    leaves = {"dx": [x for x, *_ in calls], "dweights": list(calls[0][2].values())}
    held = {
        "free": free, "quiet": not printed.getvalue(), "kept": all(
            torch.equal(lengths, inputs[f"lengths{call}"]) and torch.equal(x.nan_to_num(9), padded(inputs, call).nan_to_num(9))
            for call, (x, lengths, *_) in enumerate(calls)),
        "values": not any(work.values for work in works), "shapes": not any(work.shapes for work in works),
        "graph": graphs[:1] == [1], "again": 1 <= sum(graphs) <= 2,
        "kernels": kernels <= KERNELS,
        "largest_tensor": all(work.largest <= x.numel() // DIM * max(3 * DIM, HIDDEN) for work, (x, *_) in
                              zip(works + recorded, calls + calls, strict=False))}
    return {"y": flat(outputs), "largest": torch.stack(largest)} | {
        name: flat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in several])
        for name, several in leaves.items()} | {name: torch.tensor(float(holds)) for name, holds in held.items()} | {
        "graphs_count": torch.tensor(float(sum(graphs))), "kernels_count": torch.tensor(float(kernels))}


def record(calls: Sequence[Arguments], outputs: Sequence[Tensor]) -> tuple[list[int], list[Work]]:
    """How many graphs Dynamo records in each call, and what a call of them computes.

    No graphs if it breaks one, if it cannot go on, or if what it records computes something else than `outputs`.
    """
    graphs, works = [0 for _ in calls], [Work() for _ in calls]
    now, same = 0, True

    def backend(graph: torch.fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        graphs[now] += 1

        def replay(*arguments: Any) -> Any:
            with works[now]:
                return graph.forward(*arguments)

        return replay

    with kernel_counter.fresh_compilation():
        counters.clear()
        compiled = torch.compile(whole_block, backend=backend)
        try:
            for now, arguments in enumerate(calls):
                same &= torch.allclose(looked_at(compiled, arguments)[0], outputs[now], 1e-9, 1e-9, equal_nan=True)
        except torch._dynamo.exc.TorchDynamoException:
            return [], []
        broken = sum(counters["graph_break"].values()) > 0
    return ([], []) if broken or not same else (graphs, works)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All numbers as one tensor."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def explain(_: Tensors, expected: Tensors, got: Tensors) -> str:
    """What to say of NaN in y, or in gradients alone."""
    if any(got[key].shape != expected[key].shape for key in ("y", "dx", "dweights")):
        return ""
    if not got["y"].isfinite().all():
        return ("NaN of the padding comes through: 0 times NaN is NaN, in a mask that multiplies, in a norm, and in attention "
                "behind a weight of 0. Choose zeros with `where` before anything is computed")
    if not (got["dx"].isfinite().all() and got["dweights"].isfinite().all()):
        return ("y is finite, and gradients are not: `where` hid a NaN, and its gradient is 0 times NaN. It is "
                "the padding of x, or a softmax over -inf alone: no NaN may be computed in the first place")
    return ""


EXERCISES = [
    Exercise("whole-block", "05", (f"{__name__}.whole_block",), draw, run, {
        "y": "y is what the block with breaks returns, 0 in the padding",
        "largest": "it returns the largest absolute value as a tensor",
        "dx": "x has the gradient of the block with breaks, 0 in the padding",
        "dweights": "the weights have the gradients of the block with breaks",
        "free": "the largest value has no gradient",
        "quiet": "it prints nothing",
        "kept": "it does not change x and lengths",
        "values": "it never reads a tensor's value",
        "shapes": "no shape depends on values",
        "graph": "Dynamo records it whole: one graph, without a break",
        "again": "calls with other numbers of samples and tokens, and other steps, cause one recompilation and no more: "
                 "{:.0f} graphs in all",
        "kernels": f"at most {KERNELS} matrix products and attentions are computed: {{:.0f}}",
        "largest_tensor": "no tensor holds all scores: the largest has as many numbers as q, k and v"},
        flags={"free": "its requires_grad is True", "quiet": "it prints", "kept": "it changes some numbers",
               "values": "an `if`, .tolist(), .item() or a loop asks for one", "shapes": "a mask as an index makes one",
               "graph": "the graph breaks, or computes something else", "again": "it records more, or none",
               "kernels": "there are more", "largest_tensor": "there is a larger one"},
        levels={"values": "one graph", "shapes": "one graph", "graph": "one graph", "again": "one recompilation",
                "kernels": "few kernels", "largest_tensor": "few kernels"},
        ladder=("Go through the block, and ask of each line what Python wants to know: how many tokens, which of them, whether "
                "any, how large. For each, a tensor of fixed shape says the same. Begin with `real`, a bool for each token: "
                "`torch.arange(T) < lengths[:, None]`. Where padding is NaN, 0 times it is NaN too: choose with `where`.",
                "Attention takes a mask, `attn_mask` of shape (B, 1, 1, T). The MLP runs for all tokens, and `where` chooses. "
                "`step` is a Python number, and an `if` on it becomes a guard: Dynamo compiles again on the other side. Make it "
                "a tensor, and `clamp` it.",
                "`F.scaled_dot_product_attention` keeps no scores. The weights of q, k and v make one matrix, `torch.cat`, and "
                "one product. The gate is a sum over features, (n * gate).sum(-1), which fuses with its neighbors. Take sizes "
                "from `x.shape`, where they are symbols, and not from constants."),
        measured={"again": "graphs_count", "kernels": "kernels_count"}, explain=explain,
        tolerance=1e-6, limits=Limits(seconds=90)),       # a factor in float32 is as good as one in float64
]
