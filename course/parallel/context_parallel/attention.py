"""Context parallelism: attention over a sequence that is split across ranks. Three methods, one interface.

    gather     every rank gathers all keys and values                       simple; memory for all of them
    ring       keys and values circulate, one piece at a time               memory for two pieces; sending overlaps attention
    all_to_all each rank gets all tokens of some heads (Ulysses)            few bytes; cp must divide the heads

The ring is in `ring_attention.py`. Ulysses: Jacobs et al. 2023, arXiv:2309.14509.
"""

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from course.models.layers import Attention, GroupedAttention
from course.ops.attention import attend
from course.parallel import mappings
from course.parallel.context_parallel.ring_attention import RingAttend
from course.parallel.placement import Placements
from course.parallel.token_split import SplitTokens, modules_at_seam, permute_tokens, replace_at_seam
from course.utils.errors import CourseError


class GatherAttend(nn.Module):
    """Gather the keys and values of all ranks; each rank attends with its own queries."""

    def __init__(self, causal: bool, tokens: SplitTokens):
        super().__init__()
        self.causal, self.tokens = causal, tokens

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:       # (B, h, T / cp, d), 2 x (B, g, T / cp, d)
        k, v = gather_in_order(torch.stack([k, v]), self.tokens)        # 2 x (B, g, T, d)
        if not self.causal:
            return attend(q, k, v)
        return torch.cat([look_back(piece, k[:, :, :end], v[:, :, :end])                # front and back of a zigzag
                          for piece, end in zip(q.chunk(2, 2), self.ends(), strict=True)], 2)       # (B, h, T / cp, d)

    def ends(self) -> tuple[int, int]:
        """Where this rank's two pieces end: their queries see the keys up to there."""
        size, rank, width = self.tokens.cp.size, self.tokens.cp.rank, self.tokens.local_len // 2
        return (rank + 1) * width, (2 * size - rank) * width


def gather_in_order(pairs: Tensor, tokens: SplitTokens) -> Tensor:
    """The keys and values of all ranks, in time order: (2, B, h, T / cp, d) -> (2, B, h, T, d)."""
    order = torch.cat(tokens.order(pairs.device))                       # (T,) the positions, as gathered
    pairs = mappings.gather(pairs, 3, tokens.cp, len(order))
    return permute_tokens(pairs, 3, order.argsort()) if tokens.zigzag else pairs


@mappings.uncompiled                                 # the compiler cannot make this mask
def look_back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:               # (B, h, T, d), 2 x (B, g, S, d), S >= T
    """Attention in which the last query sees all keys and each one before it one key less; kernels need not build the mask."""
    from torch.nn.attention.bias import causal_lower_right  # imports the compiler, which takes a second

    with _disable_current_modes():                  # PyTorch cannot make the mask within a mode such as FlopCounterMode or Trace
        mask = causal_lower_right(q.shape[2], k.shape[2])
    return attend(q, k, v, mask=mask)


class AllToAllAttend(nn.Module):
    """Exchange tokens for heads, attend, and exchange them back."""

    def __init__(self, causal: bool, tokens: SplitTokens):
        super().__init__()
        self.causal, self.tokens = causal, tokens

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:       # 3 x (B, h, T / cp, d)
        cp, total = self.tokens.cp, self.tokens.seq_len
        q, k, v = mappings.all_to_all(torch.stack([q, k, v]), 2, 3, cp, total)          # 3 x (B, h / cp, T, d)
        y = attend(q, k, v, self.causal)
        return mappings.all_to_all(y, 2, 1, cp, q.shape[1] * cp.size)   # (B, h, T / cp, d)


class GroupedAllToAllAttend(AllToAllAttend):
    """The same for grouped queries: each key and value head travels with its group of query heads, in one exchange."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:       # (B, h, T / cp, d), 2 x (B, g, T / cp, d)
        if q.shape[1] % self.tokens.cp.size or k.shape[1] % self.tokens.cp.size:
            raise CourseError(f"parallel.context=all_to_all shares heads over parallel.cp={self.tokens.cp.size}, which does not "
                              f"divide {q.shape[1]} of queries and {k.shape[1]} of keys: use parallel.context=ring")
        if q.shape[1] == k.shape[1]:
            return super().forward(q, k, v)
        cp, total = self.tokens.cp, self.tokens.seq_len
        groups = torch.cat([q.unflatten(1, (k.shape[1], -1)), k[:, :, None], v[:, :, None]], 2)     # (B, g, h / g + 2, T / cp, d)
        groups = mappings.all_to_all(groups, 1, 3, cp, total)           # (B, g / cp, h / g + 2, T, d)
        q, k, v = groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]   # (B, h / cp, T, d), 2 x (B, g / cp, T, d)
        y = attend(q, k, v, self.causal)
        return mappings.all_to_all(y, 2, 1, cp, q.shape[1] * cp.size)   # (B, h, T / cp, d)


METHODS = {"gather": GatherAttend, "ring": RingAttend, "all_to_all": GroupedAllToAllAttend}


def apply_context_parallel(model: nn.Module, placements: Placements, tokens: SplitTokens, method: str) -> None:
    """Put the attention of `method` at the model's seams. Raises `CourseError` if all_to_all cannot split the heads evenly."""
    size = tokens.cp.size
    if size == 1:
        return
    if method == "all_to_all":
        for name, module in model.named_modules():
            if isinstance(module, (Attention, GroupedAttention)):
                start, stop = placements[module.qkv.weight].box[1]
                if (stop - start) % size:
                    raise CourseError(f"parallel.context=all_to_all gives each of parallel.cp={size} ranks a part of the "
                                      f"{stop - start} heads that tp leaves in {name}: choose a cp that divides them, "
                                      "or parallel.context=ring")
    replace_at_seam(model, "attend", lambda old: METHODS[method](old.causal, tokens))


def check_attention(model: nn.Module) -> None:
    """Raise `CourseError` if one of two similar modules has its attention at a seam and the other does not.

    Other attention without a seam is not detected: it may need none, for example if every rank has all its keys.
    """
    kinds = {kind_of(model.get_submodule(name.rpartition(".")[0])) for name in modules_at_seam(model, "attend")}
    for name, module in model.named_modules():
        if kind_of(module) in kinds and not modules_at_seam(module, "attend"):
            raise CourseError(f'{name} has no module whose `seam` is "attend", and others of its kind, {type(module).__name__}, '
                              "have: its queries would see the keys of one rank alone; attend in course.models.layers.Attend "
                              "there too, or use parallel.cp=1")


def kind_of(module: nn.Module) -> tuple[type, tuple[str, ...]]:
    """What similar modules have in common: their class and the names of their parameters."""
    return type(module), tuple(name for name, _ in module.named_parameters())


def needs_zigzag(model: nn.Module, method: str) -> bool:
    """Whether a zigzag must balance the work: for causal attention, unless all_to_all gives a rank all tokens of its heads."""
    return method != "all_to_all" and any(module.causal for module in modules_at_seam(model, "attend").values())
