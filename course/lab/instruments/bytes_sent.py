"""Count what a rank sends and creates: collectives with their bytes, receivers, and the largest tensor.

Counts are the same on a laptop and on a cluster, whatever else the machine does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from course.ranks.collective_trace import WORDS, Seen, brought, called


@dataclass(frozen=True)
class Collective:
    """One rank's call of a collective: its name, the group's ranks, and the bytes of this rank's input."""

    op: str                                          # "all-reduce", "send to 1"
    ranks: tuple[int, ...]
    bytes: int

    @property
    def kind(self) -> str:
        """"all-reduce", "send"."""
        return self.op.split()[0]

    @property
    def sent(self) -> float:
        """The bytes that each rank sends in a ring, which keeps all links busy. If one rank has or gets everything, the mean over
        ranks."""
        n = len(self.ranks)
        factor = {"all-reduce": 2 * (n - 1) / n, "all-gather": n - 1, "send": 1, "recv": 0, "barrier": 0}
        return factor.get(self.kind, (n - 1) / n) * self.bytes


class Traffic(Seen):
    """Within this context, record this rank's collectives in order (`calls`), the number of elements of the largest tensor that
    an operator returned (`largest`), and that operator (`by`)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []
        self.largest, self.by = 0, ""

    def seen(self, word: str, given: dict[str, Any]) -> None:
        """Record a collective."""
        op, _, ranks, _ = called(word, given)
        self.calls.append(Collective(op, tuple(ranks), sum(tensor.nbytes for tensor in brought(word, given))))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for made in tree_iter(out):
            if isinstance(made, Tensor) and made.numel() > self.largest:
                self.largest, self.by = made.numel(), func.overloadpacket.__name__
        return out

    @property
    def kinds(self) -> list[str]:
        """The kinds of all calls, in order: "all-reduce", "send"."""
        return [call.kind for call in self.calls]

    @property
    def to(self) -> set[int]:
        """The ranks that received point-to-point sends."""
        return {int(call.op.split()[-1]) for call in self.calls if call.kind == "send"}

    @property
    def sent(self) -> float:
        """The bytes that this rank sent."""
        return sum(call.sent for call in self.calls)


def collectives(function: Callable[[], Any]) -> tuple[Any, list[Collective]]:
    """The function's result, and the collectives that it called on this rank, in order."""
    with Traffic() as traffic:
        result = function()
    return result, traffic.calls


def within_budget(*counted: tuple[Traffic, float]) -> Tensor:
    """1.0 if every traffic sent at most its number of bytes; else a negative code of the kinds above it, for `excess_kinds`."""
    excess = {kind for traffic, most in counted if traffic.sent > most for kind in traffic.kinds}
    return torch.tensor(-float(sum(2 ** WORDS.index(kind) for kind in excess)) or 1.0)


def excess_kinds(code: float) -> list[str]:
    """The kinds of collectives that sent too much, from a code of `within_budget`; empty if none did."""
    return [word for place, word in enumerate(WORDS) if code < 0 and int(-code) >> place & 1]


def piece_bytes(x: Tensor, dim: int, size: int) -> int:
    """Bytes of `size` - 1 pieces of x, cut along `dim` and padded to the longest: what a rank sends in an all-gather or a
    reduce-scatter over `size` ranks. An all-reduce sends twice that."""
    return (size - 1) * -(-x.shape[dim] // size) * (x.nbytes // x.shape[dim])
