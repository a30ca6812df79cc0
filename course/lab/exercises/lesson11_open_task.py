"""Lesson 11's open task: causal attention over pieces of a sequence, with its backward pass."""

import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import _disable_current_modes

from course.lab.checks import random_inputs, return_values, tiny_training
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.instruments.bytes_sent import Traffic
from course.lab.instruments.tensor_memory import MemoryMeter
from course.lab.sandbox.limits import Limits
from course.parallel import mappings
from course.parallel.mesh import Axis

HEAD_DIM = 4
KEPT = 5                                             # pieces of one tensor that a rank may keep for its backward pass
SPARE = 512                                          # bytes for a mask and the like


class CausalAttention(Function):
    """Causal attention of a sequence that is cut over an axis: rank 0 has the first tokens."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, lengths: list[int]) -> Tensor:
        """The attention output for this rank's queries.

        q, k, v: this rank's tokens, (B, h, t, d), float64. lengths: the number of tokens of each rank. axis: `size`, `rank`,
        `ranks`, `group`.
        """
        (left, right), pair = (axis.ranks[axis.rank - 1], axis.ranks[(axis.rank + 1) % axis.size]), torch.stack([k, v])
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
        for source in range(axis.rank, -1, -1):
            works: list[Any] = [dist.isend(pair, right, axis.group)] if axis.rank + 1 < axis.size else []
            if source > 0:                           # the next keys and values travel while these are used
                coming = pair.new_empty(*pair.shape[:3], lengths[source - 1], pair.shape[4])
                works.append(dist.irecv(coming, left, axis.group))
            scores = q @ pair[0].mT * q.shape[-1]**-0.5                         # (B, h, t, t of the source)
            if source == axis.rank:
                scores += torch.full_like(scores, -torch.inf).triu(1)
            both = torch.logaddexp(lse, scores.logsumexp(-1))                   # (B, h, t)
            out = out * (lse - both).exp()[..., None] + (scores - both[..., None]).exp() @ pair[1]
            lse = both
            for work in works:
                work.wait()
            if source > 0:
                pair = coming
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.axis, ctx.lengths = axis, lengths
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The gradients of q, k, v, and None for the others. grad: of this rank's output, (B, h, t, d)."""
        (q, k, v, out, lse), axis, lengths = ctx.saved_tensors, ctx.axis, ctx.lengths
        (left, right), pair = (axis.ranks[axis.rank - 1], axis.ranks[(axis.rank + 1) % axis.size]), torch.stack([k, v])
        scale, delta = q.shape[-1]**-0.5, (grad * out).sum(-1, keepdim=True)
        dq, own = torch.zeros_like(q), torch.zeros_like(pair)
        for turn in range(axis.size):
            source, user, works = axis.rank - turn, axis.rank + turn, list[Any]()
            if source >= 0:
                if axis.rank + 1 < axis.size:
                    works.append(dist.isend(pair, right, axis.group))
                if source > 0:
                    coming = pair.new_empty(*pair.shape[:3], lengths[source - 1], pair.shape[4])
                    works.append(dist.irecv(coming, left, axis.group))
                scores = q @ pair[0].mT * scale
                if turn == 0:
                    scores += torch.full_like(scores, -torch.inf).triu(1)
                weights = (scores - lse[..., None]).exp()
                of_scores = weights * (grad @ pair[1].mT - delta) * scale
                dq += of_scores @ pair[0]
                part = torch.stack([of_scores.mT @ q, weights.mT @ grad])       # gradients of the source's keys and values
                if turn == 0:
                    own += part
                else:
                    works.append(dist.isend(part, axis.ranks[source], axis.group))
            if turn > 0 and user < axis.size:        # it has used my keys and values in this turn
                theirs = torch.empty_like(own)
                dist.recv(theirs, axis.ranks[user], axis.group)
                own += theirs
            for work in works:
                work.wait()
            if source > 0:
                pair = coming
        return dq, own[0], own[1], None, None


class Receiving:
    """A receive under way: what comes is there when one has waited for it, and not before."""

    def __init__(self, work: Any, tensors: list[Tensor], coming: list[Tensor], events: list[tuple[str, int]]):
        self.work, self.tensors, self.coming, self.events, self.number = work, tensors, coming, events, len(events)
        self.waited = False
        events.append(("posted", self.number))

    def wait(self, *timeout: Any) -> bool:
        self.events.append(("waited", self.number))
        if not self.waited:
            self.work.wait()
            for tensor, came in zip(self.tensors, self.coming, strict=True):
                tensor.copy_(came)
        self.waited, self.tensors, self.coming = True, [], []           # they are freed when the answer drops them
        return True


class Watched(Traffic):
    """Also records, in order, when a receive is posted and waited for, and when a matrix multiplication begins."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []      # ("posted" or "waited", number of the receive), ("matmul", 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm") or "dot_product" in func.__name__:
            self.events.append(("matmul", 0))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __enter__(self) -> Any:
        receive, self.receives = dist.ProcessGroup.recv, list[Receiving]()

        def receiving(group: Any, tensors: list[Tensor], *source: Any) -> Receiving:
            with _disable_current_modes():           # not the answer's memory
                coming = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
                for tensor in tensors:
                    tensor.zero_()
            self.receives.append(Receiving(receive(group, coming, *source), tensors, coming, self.events))
            return self.receives[-1]

        self.patch = mock.patch.object(dist.ProcessGroup, "recv", receiving)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.patch.stop()
        super().__exit__(*raised)
        for receive in self.receives:
            if raised[0] is None and not receive.waited:
                receive.work.wait()                  # so that it does not meet what comes next

    @property
    def overlaps(self) -> bool:
        """Whether something was multiplied between each receive and the wait for it."""
        posted = [place for place, (what, _) in enumerate(self.events) if what == "posted"]
        waits = [self.events.index(("waited", self.events[place][1])) if ("waited", self.events[place][1]) in self.events
                 else len(self.events) for place in posted]
        return all(("matmul", 0) in self.events[begin:end] for begin, end in zip(posted, waits, strict=True))


def draw(seed: int, hidden: bool) -> Tensors:
    """Queries, keys, values and the output's gradient of all tokens; no number of ranks divides them."""
    generator = random_inputs.generator(seed)
    shape = (2, 3, 27, HEAD_DIM) if hidden else (2, 2, 23, HEAD_DIM)
    return {name: random_inputs.normal(generator, *shape) * (1.5 if name in "qk" else 1) for name in ("q", "k", "v", "grad")}


def run(inputs: Tensors) -> Tensors:
    """Outputs and gradients on this rank, over all ranks and over two of them, and what was counted meanwhile."""
    found: dict[str, list[Tensor]] = {name: [] for name in ("out", "dq", "dk", "dv")}
    counts = dict.fromkeys(("sent", "small", "kept", "overlap"), True)
    world = dist.get_world_size()
    for size in dict.fromkeys((world, 2)):
        axis = tiny_training.mesh(tiny_training.settings("parallel.dp=1", f"parallel.cp={size}", f"parallel.tp={world // size}",
                                                         "model.heads=4")).cp
        for name, tensor in attend(inputs, axis, counts).items():
            found[name].append(tensor.flatten())
    return {name: torch.cat(parts) for name, parts in found.items()} | {
        name: torch.tensor(float(holds)) for name, holds in counts.items()}


def attend(inputs: Tensors, axis: Axis, counts: dict[str, bool]) -> Tensors:
    """The learner's output and gradients; `counts` becomes False where a budget is broken."""
    lengths = [len(part) for part in torch.arange(inputs["q"].shape[2]).tensor_split(axis.size)]
    q, k, v, grad = (mappings.shard(inputs[name], 2, axis).clone().requires_grad_(name != "grad")
                     for name in ("q", "k", "v", "grad"))
    piece = inputs["q"].nbytes // inputs["q"].shape[2] * max(lengths)
    forward, backward = Watched(), Watched()
    with forward, MemoryMeter() as meter:
        out = CausalAttention.apply(q, k, v, axis, list(lengths))
    out = return_values.tensor(out, "CausalAttention.forward", tuple(q.shape), q.dtype)
    until = time.monotonic() + 1                     # gloo's threads free a message's tensors a little later
    while meter.now > KEPT * piece + SPARE and time.monotonic() < until:
        time.sleep(0.02)
    counts["kept"] &= meter.now <= KEPT * piece + SPARE
    with backward:
        out.backward(grad)
    counts["small"] &= max(forward.largest, backward.largest) <= max(2 * piece // 8, piece // 8 // HEAD_DIM * max(lengths))
    counts["overlap"] &= forward.overlaps and ("recv" in forward.kinds or axis.rank == 0)
    sent = torch.tensor(forward.sent + backward.sent)
    dist.all_reduce(sent, group=axis.group)
    needed = 6 * piece // max(lengths) * sum((axis.size - 1 - rank) * length for rank, length in enumerate(lengths))
    counts["sent"] &= sent.item() <= needed
    return {"out": out.detach()} | {f"d{name}": torch.zeros_like(x) if x.grad is None else x.grad
                                    for name, x in (("q", q), ("k", k), ("v", v))}


EXERCISES = [
    Exercise("causal-attention", "11", (f"{__name__}.CausalAttention",), draw, run, {
        "out": "each query has its answer from all keys up to its own, along two axes",
        "dq": "queries have the gradients of one process",
        "dk": "so have keys, also from later ranks",
        "dv": "and so have values",
        "sent": "keys and values reach only ranks with later tokens, once forward and once backward, and gradients return once",
        "small": "no tensor holds the keys of all tokens, or all scores of a rank's queries",
        "kept": "between forward and backward, a rank keeps its own tokens only",
        "overlap": "in the forward pass, the next keys and values travel while a block is computed"},
        flags={"sent": "it sends more", "small": "it makes a larger one", "kept": "it keeps more",
               "overlap": "it waits for some receive before it multiplies anything, or receives nothing"},
        levels={"sent": "byte budget", "small": "memory budget", "kept": "memory budget", "overlap": "overlapped"},
        ladder=("Begin with a gather: `mappings.all_gather(k, 2, axis, sum(lengths))` gives all keys, and a mask hides the later "
                "ones. In the backward pass you need the formulas of attention: with weights p, dv = pᵀ g, and the gradient of "
                "the scores is p ∘ (g vᵀ − sum(g ∘ out)). Add up dk and dv over the ranks. That is correct, and the first level.",
                "Then work block by block. Rank r needs the pieces of ranks 0 to r; the mask is only for its own. Merge two "
                "answers with their log-sum-exps, as in the exercise `merge`. Keep out and the final log-sum-exp: with them, "
                "the backward pass computes the weights of each block again, exp(scores − lse).",
                "Each piece moves one rank to the right in each turn, and stops at the last rank. Post `isend` and `irecv` "
                "before a block is computed, and wait after it. In the backward pass the same happens again, and each rank "
                "sends the gradients of a block's keys and values straight to their owner."),
        sizes=(2, 4), limits=Limits(seconds=120)),
]
