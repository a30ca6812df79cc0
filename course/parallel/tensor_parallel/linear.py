"""Tensor parallelism: the weights of a block cut over an axis, so that attention and MLP each need one all-reduce.

A *column* linear has a part of the output features on each rank, heads or hidden units; a *row* linear takes
that part as its input and adds the partial products up (Shoeybi et al. 2019, arXiv:1909.08053, section 3). A *gathered* one
has a part of the output features, too, and then all: it cuts weights, not what comes of them.
Which linear is which is data on the model's class, `tensor_plan`; a vocabulary is cut as `vocabulary.py` says.
"""

from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

from torch import Tensor, nn

from course.parallel import mappings
from course.parallel.mesh import Axis
from course.parallel.placement import cut, place, placement
from course.parallel.tensor_parallel import overlapped_linear
from course.parallel.tensor_parallel.sequence import (
    SplitTokens,
    enter_region,
    leave_region,
    matmul_of,
    modules_at_seam,
    replace_at_seam,
    require_seam,
)
from course.parallel.tensor_parallel.vocabulary import (
    VocabularyCrossEntropy,
    VocabularyEmbedding,
    VocabularyEnter,
    VocabularyHead,
)
from course.utils.errors import CourseError


class ColumnLinear(nn.Module):
    """y = x W' + b with the output features cut: each rank computes its own of y."""

    def __init__(self, linear: nn.Linear, axis: Axis, tokens: SplitTokens | None = None):
        super().__init__()
        self.axis, self.tokens, self.matmul = axis, tokens, matmul_of(linear, axis)
        heads = max(0, len(placement(linear.bias).global_shape) - 2)    # of (3, heads, head_dim), or the features of (F,)
        self.weight, self.bias = cut(linear.weight, heads, axis), cut(linear.bias, heads, axis)

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, D), sequence parallel (B, T / tp, D)
        x = enter_region(x, self.axis, self.tokens)                     # (B, T, D)
        return self.matmul(x, self.weight, self.bias)                   # (B, T, F / tp)


class RowLinear(nn.Module):
    """y = x W' + b with the input features cut: partial products are added up, then the bias, once, in their format."""

    def __init__(self, linear: nn.Linear, axis: Axis, tokens: SplitTokens | None = None):
        super().__init__()
        self.axis, self.tokens, self.matmul = axis, tokens, matmul_of(linear, axis)
        self.weight = cut(linear.weight, len(placement(linear.weight).global_shape) - 1, axis)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, F / tp)
        part = self.matmul(x, self.weight)                              # (B, T, D)
        return leave_region(part, self.axis, self.tokens) + self.bias.to(part.dtype)    # (B, T, D), with sp (B, T / tp, D)


class BareColumnLinear(ColumnLinear):
    """y = x W', a column linear that has no bias."""

    def __init__(self, linear: nn.Linear, axis: Axis, tokens: SplitTokens | None = None):
        nn.Module.__init__(self)
        self.axis, self.tokens, self.matmul = axis, tokens, matmul_of(linear, axis)
        heads = max(0, len(placement(linear.weight).global_shape) - 3)  # of (3, heads, head_dim, D), or the features of (F, D)
        self.weight = cut(linear.weight, heads, axis)
        self.register_parameter("bias", None)


class BareRowLinear(RowLinear):
    """y = x W', a row linear that has no bias."""

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, F / tp)
        return leave_region(self.matmul(x, self.weight), self.axis, self.tokens)        # (B, T, D) or (B, T / tp, D)


class OverlappedColumnLinear(BareColumnLinear):
    """A column linear with sequence parallelism, whose matmul communicates beside itself (`overlapped_linear.py`). There may be
    no bias."""

    def __init__(self, linear: nn.Linear, axis: Axis, tokens: SplitTokens):
        super().__init__(linear, axis, tokens)
        if linear.bias is not None:
            self.bias = cut(linear.bias, max(0, len(placement(linear.bias).global_shape) - 2), axis)
        self.matmul = partial(overlapped_linear.gather_linear, axis=axis, tokens=tokens, direct=uses_symmetric_memory(tokens))

    def forward(self, x: Tensor) -> Tensor:                             # (B, T / tp, D) -> (B, T, F / tp)
        return self.matmul(x, self.weight, self.bias)


class OverlappedRowLinear(RowLinear):
    """A row linear, likewise."""

    def __init__(self, linear: nn.Linear, axis: Axis, tokens: SplitTokens):
        super().__init__(linear, axis, tokens)
        self.matmul = partial(overlapped_linear.linear_scatter, axis=axis, direct=uses_symmetric_memory(tokens))

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, F / tp) -> (B, T / tp, D)
        return self.matmul(x, self.weight, self.bias)


def with_first_bias(linear: RowLinear, x: Tensor) -> Tensor:            # (B, T, F / tp)
    """`forward` of a row linear whose bias has its gradient from elsewhere: in the first rank's product it costs nothing."""
    part = linear.matmul(x, linear.weight, None if linear.axis.rank else linear.bias)   # (B, T, D)
    return leave_region(part, linear.axis, linear.tokens)               # (B, T, D) or (B, T / tp, D)


class GatheredLinear(nn.Module):
    """y = x W' + b with the output features cut, and gathered: for a small y that all ranks need whole, such as DiT's modulation,
    with the weights of a third of the model."""

    def __init__(self, linear: nn.Linear, axis: Axis, tokens: SplitTokens | None = None):
        super().__init__()
        self.axis, self.tokens, self.matmul = axis, tokens, matmul_of(linear, axis)
        self.weight = cut(linear.weight, 0, axis)
        self.register_parameter("bias", None if linear.bias is None else cut(linear.bias, 0, axis))

    def forward(self, x: Tensor) -> Tensor:                             # (B, D) -> (B, F)
        if self.tokens is not None:                 # y's gradient is a part, of this rank's tokens; x's will be one, too
            y = mappings.gather(self.matmul(x, self.weight, self.bias), -1, self.axis)
        else:
            y = mappings.collect(self.matmul(mappings.copy(x, self.axis), self.weight, self.bias), -1, self.axis)
        return y.contiguous()                       # a dim that is gathered is the outermost in memory


def overlaps(tokens: SplitTokens | None) -> TypeGuard[SplitTokens]:
    """Whether linears communicate beside their matmuls."""
    return tokens is not None and tokens.overlap != "none"


def uses_symmetric_memory(tokens: SplitTokens) -> bool:
    """Whether that is through each other's memory."""
    return tokens.overlap == "symmetric"


def linear_class(name: str, tokens: SplitTokens | None, bias: bool = True) -> Any:
    """The module of a style that a model's `tensor_plan` names."""
    if overlaps(tokens) and name in ("column", "row"):
        return OverlappedColumnLinear if name == "column" else OverlappedRowLinear
    if not bias and name in ("column", "row"):
        return BareColumnLinear if name == "column" else BareRowLinear
    return {"column": ColumnLinear, "row": RowLinear, "gathered": GatheredLinear, "vocabulary": VocabularyEmbedding,
            "vocabulary_head": VocabularyHead}[name]


def apply_tensor_parallel(model: nn.Module, axis: Axis, tokens: SplitTokens | None = None) -> nn.Module:
    """Replace the linears and embeddings that the model's `tensor_plan` names; all else is whole on every rank of the axis.

    tokens: with sequence parallelism, how they are cut between those linears.

    Takes a model on the meta device with its placements. Raises `CourseError` where heads, hidden units or the
    vocabulary are not divisible by the size of the axis, where two uses of one weight would be cut
    differently, and where the plan does not fit the model.
    """
    if axis.size == 1:
        return model
    check_plan(model, sp=tokens is not None)
    made: dict[tuple[nn.Module, str], nn.Module] = {}                   # one that several modules share stays one
    for name, module in list(model.named_modules(remove_duplicate=False)):
        style = planned_style(model, name)
        if style is not None and isinstance(module, (nn.Linear, nn.Embedding)):
            if (module, style) not in made:
                bias = getattr(module, "bias", None) is not None
                made[module, style] = linear_class(style, tokens, bias)(module, axis, tokens)
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, made[module, style])
    if "vocabulary_head" in model.tensor_plan.values():                 # type: ignore[operator]
        replace_at_seam(model, "cross_entropy", lambda old: VocabularyCrossEntropy(axis))
        replace_at_seam(model, "enter", lambda old: VocabularyEnter(axis, tokens))
    retie_parameters(model)
    for parameter in model.parameters():
        where = placement(parameter)
        if where.axis is None:                       # the same on all ranks: the first speaks for it
            place(parameter, replace(where, owner=where.owner and axis.rank == 0))
    return model


def planned_style(model: Any, name: str) -> str | None:
    """The style that the model's `tensor_plan` gives a module, by the end of its name."""
    return next((style for end, style in model.tensor_plan.items() if name.endswith(end)), None)


def check_plan(model: Any, sp: bool) -> None:
    """Raise `CourseError` if an entry of the `tensor_plan` fits nothing, or if what the entries need is missing in the model."""
    kind, plan = type(model).__name__, model.tensor_plan
    linears = {name: planned_style(model, name) for name, module in model.named_modules(remove_duplicate=False)
               if isinstance(module, (nn.Linear, nn.Embedding))}
    for end in plan:
        if not any(name.endswith(end) for name in linears):
            raise CourseError(f'"{end}" in {kind}.tensor_plan fits no nn.Linear or nn.Embedding of the model: correct the '
                              "name, or leave it out")
    if "vocabulary_head" in plan.values():
        require_seam(model, "enter",
                     "the gradient of what goes into the head would be of one rank's part of the vocabulary; pass it "
                "through course.models.gpt.Enter")
        require_seam(model, "cross_entropy", "the loss would see one rank's part of the vocabulary; compute it in "
                "course.models.gpt.CrossEntropy")
    for name in modules_at_seam(model, "attend") if sp else ():
        if "column" not in neighboring_styles(name, linears):
            raise CourseError(f'{kind}.tensor_plan calls no linear beside {name} "column", so with parallel.sp=true that would '
                              "see the tokens of one rank alone: name its linears in the plan, or use parallel.sp=false")


def neighboring_styles(name: str, linears: dict[str, str | None]) -> list[str | None]:
    """The styles of the linears in the innermost module around the named one that has any."""
    found: list[str | None] = []
    while name and not found:
        name = name.rpartition(".")[0]
        found = [style for linear, style in linears.items() if linear.startswith(f"{name}." if name else "")]
    return found


def retie_parameters(model: nn.Module) -> None:
    """Make parameters of one serial name one parameter again: weights that were tied before each use of them was cut.

    Raises `CourseError` where the uses need different parts of it.
    """
    kept: dict[str, nn.Parameter] = {}
    for path, module in model.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            where = placement(parameter)
            one = kept.setdefault(where.name, parameter)
            if placement(one).box != where.box:
                raise CourseError(f"{where.name} has several uses, and {path}.{leaf} needs another part of it than those before: "
                                  f"give all of them the same style in {type(model).__name__}.tensor_plan, or use parallel.tp=1")
            setattr(module, leaf, one)
