"""Cut samples by tokens: over cp throughout the model, over tp between its linears (sequence parallelism).

Between a row linear and the next column linear, every tensor-parallel rank would compute the same norms, dropout and
residual sums of the same tokens. With sequence parallelism each rank computes them for its own tokens: a column linear
gathers all tokens, a row linear scatters its sum (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2). The
all-reduce that this replaces is a reduce-scatter and an all-gather, so the same bytes move.

The model's class says what is cut, in `token_plan`: "context" cuts over cp alone, "sequence" over cp and then tp.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from course.models.interface import Batch, Model
from course.ops.autograd import Context
from course.parallel import mappings
from course.parallel.mesh import Axis
from course.parallel.placement import Placements
from course.utils.errors import CourseError

PADDING = {"target": -1}                            # values of padding tokens: a target that weighs nothing, else 0


class WholeTokens:
    """This rank holds all tokens of a sample."""

    def cut(self, batch: Batch) -> Batch:
        """A prepared batch, cut to this rank's tokens."""
        return batch

    def whole(self, output: Tensor, of: str = "target") -> Tensor:
        """The output for all tokens, (B, T, ...), from the output for this rank's tokens."""
        return output


class SplitTokens(WholeTokens):
    """This rank holds some tokens of each sample. Uneven pieces are cut as by `torch.tensor_split`.

    zigzag: each context-parallel rank has a piece from the front and one from the back, so that with causal attention all
    ranks have the same work. Of 2·cp pieces, rank r has number r and number 2·cp - 1 - r. The pieces must be equal, so the
    tokens are padded at the end, where causal attention hides the padding.
    """

    def __init__(self, plan: Mapping[str, str], cp: Axis, tp: Axis, zigzag: bool, overlap: str = "none"):
        self.plan, self.cp, self.tp, self.zigzag = plan, cp, tp, zigzag
        self.overlap = overlap                      # how the linears gather and scatter over tp
        self.symmetric = overlap == "symmetric"     # whether through each other's memory
        self.causal_only = True                     # whether attention sees no later token, so no padding
        self.seq_len = 0                            # tokens of a sample, set by the batch that is cut
        self.local_len = 0                          # of these, on this context-parallel rank

    def cut(self, batch: Batch) -> Batch:
        """Cut the tensors that `plan` names to this rank's tokens: (B, T, ...) -> (B, T / cp, ...), or for "sequence"
        (B, T / (cp * tp), ...). Others stay whole. T is the length of `position`; from now on `lengths` and `order` refer to it.

        Raises `CourseError` if a planned tensor does not have T tokens, or if attention would see the padding."""
        self.seq_len = batch["position"].shape[1]
        self.local_len = self.lengths()[self.cp.rank]
        for name, x in batch.items():
            if name in self.plan and x.shape[1] != self.seq_len:
                raise CourseError(f"token_plan cuts {name} of {x.shape[1]} tokens as position of {self.seq_len}: layouts know "
                                  "one length of sequences; leave it out of token_plan, and every rank has it whole")
        return {name: self.piece(name, x) if name in self.plan else x for name, x in batch.items()}

    def piece(self, name: str, x: Tensor) -> Tensor:
        """This rank's tokens of x, (B, T, ...), cut like the named tensor of the batch."""
        x = self._padded(x, PADDING.get(name, 0))
        if self.zigzag:
            x = x.index_select(1, self.order(x.device)[self.cp.rank])
        else:
            x = mappings.shard(x, 1, self.cp)
        return mappings.shard(x, 1, self.tp) if self.plan[name] == "sequence" else x

    def _padded(self, x: Tensor, value: float) -> Tensor:
        missing = -x.shape[1] % (2 * self.cp.size) if self.zigzag else 0
        if missing and not self.causal_only:
            raise CourseError(f"{x.shape[1]} tokens have to be padded to {x.shape[1] + missing} for causal attention over "
                              f"parallel.cp={self.cp.size}, and attention that is not causal would see the padding: take a "
                              f"multiple of {2 * self.cp.size} tokens, or parallel.context=all_to_all")
        return torch.cat([x, x.new_full((len(x), missing, *x.shape[2:]), value)], 1) if missing else x

    def order(self, device: torch.device) -> tuple[Tensor, ...]:
        """The positions of each context-parallel rank's tokens, in the order in which it holds them."""
        if self.zigzag:
            return zigzag(self.seq_len + -self.seq_len % (2 * self.cp.size), self.cp.size, device)
        return torch.arange(self.seq_len, device=device).tensor_split(self.cp.size)

    def lengths(self) -> list[int]:
        """How many tokens each context-parallel rank has."""
        return [len(piece) for piece in self.order(torch.device("cpu"))]

    def whole(self, output: Tensor, of: str = "target") -> Tensor:
        """Gather the output for all tokens from all ranks, in order; without a gradient. of: what of the batch is cut like it."""
        with torch.no_grad():
            if self.plan[of] == "sequence":
                output = mappings.gather(output, 1, self.tp, self.local_len)
            order = torch.cat(self.order(output.device))
            return mappings.gather(output, 1, self.cp, len(order))[:, order.argsort()[:self.seq_len]]


def zigzag(total: int, size: int, device: torch.device) -> tuple[Tensor, ...]:
    """The positions of each rank's tokens: of 2 * size equal pieces, rank r has number r and number 2 * size - 1 - r."""
    pieces = torch.arange(total, device=device).chunk(2 * size)
    return tuple(torch.cat([pieces[rank], pieces[-1 - rank]]) for rank in range(size))


class Permute(Function):
    """x.index_select(dim, order) | the gradient's rows put back where they were: `order` has every index once."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, dim: int, order: Tensor) -> Tensor:    # (..., n, ...), (n,)
        ctx.save_for_backward(order)
        ctx.dim = dim
        return x.index_select(dim, order)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        order, = ctx.saved_tensors
        return torch.empty_like(grad).index_copy_(ctx.dim, order, grad), None, None


def permute_tokens(x: Tensor, dim: int, order: Tensor) -> Tensor:
    """x.index_select(dim, order) for an order that has every index once, such as (2, 0, 1): its backward copies the gradient.

    The backward of index_select, where an index may occur twice, adds: on a GPU atomically, one number after another.
    """
    return Permute.apply(x, dim, order)


class SumOverSplitTokens(nn.Module):
    """Complete a loss's sum over this rank's tokens: every rank that has tokens of the sample gets the same sum.

    Gradients are added up over tp, where each rank has its own part of the tokens (reduce | identity). They are averaged
    over cp, so there the gradient is multiplied by cp (all-reduce | all-reduce), which the average undoes.
    """

    def __init__(self, cp: Axis, tp: Axis):
        super().__init__()
        self.cp, self.tp = cp, tp

    def forward(self, x: Tensor) -> Tensor:
        x = mappings.reduce(x, self.tp)
        x = mappings.copy(mappings.reduce(x, self.cp), self.cp)
        return x.clone()                            # torch.compile leaves out the backward of a copy that a graph ends with


class SplitEarlierChoices(nn.Module):
    """`course.models.experts.EarlierChoices` where ranks hold parts of a sample's tokens: it counts those of all."""

    def __init__(self, serial: nn.Module, tokens: SplitTokens):
        super().__init__()
        self.serial, self.tokens = serial, tokens

    def forward(self, chosen: Tensor) -> Tensor:                        # (B, T / (cp * tp), k)
        return self.tokens.piece("real", self.serial(self.tokens.whole(chosen, "real")))


def split_tokens(model: Model, cp: Axis, tp: Axis, zigzag: bool, overlap: str) -> SplitTokens:
    """Return the cut of the model's `token_plan` over cp and tp, and put `SumOverSplitTokens` at the model's seams. An axis of
    one rank cuts nothing."""
    plan: Mapping[str, str] = model.token_plan
    tokens = SplitTokens(plan, cp, tp, zigzag, overlap)
    tokens.causal_only = all(module.causal for module in modules_at_seam(model, "attend").values())
    replace_at_seam(model, "sum_over_tokens", lambda old: SumOverSplitTokens(
        cp, tp if plan[old.of] == "sequence" else Axis("tp")))
    replace_at_seam(model, "earlier_choices", lambda old: SplitEarlierChoices(old, tokens))
    return tokens


def modules_at_seam(model: nn.Module, seam: str) -> dict[str, nn.Module]:
    """The modules at the named seam, by name; a module in several places has several names."""
    return {name: module for name, module in model.named_modules(remove_duplicate=False) if getattr(module, "seam", None) == seam}


def replace_at_seam(model: nn.Module, seam: str, make: Callable[[Any], nn.Module]) -> None:
    """Replace every module at the named seam by `make(module)`; a module in several places is made once."""
    made: dict[nn.Module, nn.Module] = {}
    for name, module in modules_at_seam(model, seam).items():
        owner, _, leaf = name.rpartition(".")
        if module not in made:
            made[module] = make(module)
        setattr(model.get_submodule(owner), leaf, made[module])


def require_seam(model: nn.Module, seam: str, why: str) -> None:
    """Raise `CourseError` if no module is at the named seam. why: the consequence, and what to do."""
    if not modules_at_seam(model, seam):
        raise CourseError(f'{type(model).__name__} has no module whose `seam` is "{seam}": {why}')


def enter_region(x: Tensor, axis: Axis, tokens: SplitTokens | None) -> Tensor: # (B, T / tp, ...) -> (B, T, ...)
    """Enter a tensor-parallel region, where each rank computes a part: with sequence parallelism (`tokens` given) gather the
    tokens of all ranks, else take x as it is (`mappings.copy`)."""
    return mappings.copy(x, axis) if tokens is None else mappings.gather(whole_samples(x), 1, axis, tokens.local_len)


def whole_samples(x: Tensor) -> Tensor:
    """x itself. Raises `CourseError` unless it is (B, T, D): with sequence parallelism a rank has some tokens of every sample."""
    if x.dim() != 3:
        raise CourseError("with sequence parallelism a column linear gathers the tokens of samples, (B, T, D), and here it "
                          f"meets {tuple(x.shape)}: give it all tokens of a sample, or set parallel.sp=false")
    return x


def leave_region(x: Tensor, axis: Axis, tokens: SplitTokens | None) -> Tensor: # (B, T, ...) -> (B, T / tp, ...)
    """Leave a tensor-parallel region: sum the parts, for all tokens, or with sequence parallelism for this rank's own."""
    return mappings.reduce(x, axis) if tokens is None else mappings.scatter(x, 1, axis)


def mark_partial(placements: Placements, tp: Axis) -> None:
    """With sequence parallelism every parameter that tp does not cut sees only its rank's tokens: its gradient is a part."""
    for parameter, where in placements.items():
        if where.axis is None:
            placements[parameter] = replace(where, partial_over=tp)
