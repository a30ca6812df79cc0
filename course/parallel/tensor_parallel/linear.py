"""Tensor parallelism: cut a block's weights over an axis, so that attention and MLP each need one all-reduce.

A *column* linear computes a part of the output features on each rank, heads or hidden units. A *row* linear takes that part as
its input and sums the partial products over the ranks (Shoeybi et al. 2019, arXiv:1909.08053, section 3). A *gathered* linear
also computes a part of the output features, then gathers all of them: only its weights are cut.
The model's class says which linear is which, in `tensor_plan`. `vocabulary.py` cuts a vocabulary.

A linear stays the same module: surgery cuts its parameters, and puts the ranks' communication into its slot `communication`.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from course.models import Model
from course.models.layers import as_linear
from course.ops.linear_op import Communication, Product
from course.parallel import mappings
from course.parallel.mesh import Axis
from course.parallel.placement import Placements, cut, owned_by_first, two_parts
from course.parallel.tensor_parallel import overlapped_linear
from course.parallel.tensor_parallel.vocabulary import (
    VocabularyCrossEntropy,
    VocabularyEmbedding,
    VocabularyEnter,
    cut_vocabulary,
)
from course.parallel.token_split import (
    SplitTokens,
    enter_region,
    leave_region,
    modules_at_seam,
    replace_at_seam,
    require_seam,
)
from course.utils.errors import CourseError


class TensorParallel(Communication):
    """The communication around a linear that is cut over an axis. tokens: with sequence parallelism, how tokens are cut."""

    def __init__(self, axis: Axis, tokens: SplitTokens | None = None):
        self.axis, self.tokens = axis, tokens


class ColumnParallel(TensorParallel):
    """y = x W' + b with the output features cut: each rank computes its own of y."""

    mode = "column"

    def __call__(self, multiply: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = enter_region(x, self.axis, self.tokens)                     # (B, T, D), of (B, T / tp, D) with sequence parallelism
        return multiply(x, weight, bias)                                # (B, T, F / tp)


class RowParallel(TensorParallel):
    """y = x W' + b with the input features cut: partial products are added up, then the bias, once, in their format."""

    mode = "row"

    def __call__(self, multiply: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:          # (B, T, F / tp)
        assert bias is not None
        part = multiply(x, weight)                                      # (B, T, D)
        return leave_region(part, self.axis, self.tokens) + bias.to(part.dtype)         # (B, T, D), with sp (B, T / tp, D)


class RowParallelNoBias(RowParallel):
    """y = x W', a row linear without a bias."""

    def __call__(self, multiply: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return leave_region(multiply(x, weight), self.axis, self.tokens)                # (B, T, D) or (B, T / tp, D)


class RowParallelFirstBias(RowParallel):
    """A row linear whose bias gradient is computed elsewhere: the first rank's product adds the bias, at no cost."""

    def __call__(self, multiply: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:          # (B, T, F / tp)
        part = multiply(x, weight, None if self.axis.rank else bias)                    # (B, T, D)
        return leave_region(part, self.axis, self.tokens)               # (B, T, D) or (B, T / tp, D)


class OverlappedColumn(ColumnParallel):
    """A column linear with sequence parallelism that communicates beside its matmuls (`overlapped_linear.py`)."""

    def __call__(self, multiply: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert self.tokens is not None
        return overlapped_linear.gather_linear(x, weight, bias, self.axis, self.tokens, self.tokens.symmetric, multiply.later)


class OverlappedRow(RowParallel):
    """The row linear of the same kind. The bias may be missing; its gradient is the one of this rank's tokens."""

    def __call__(self, multiply: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert self.tokens is not None
        return overlapped_linear.linear_scatter(x, weight, bias, self.axis, self.tokens.symmetric, multiply.later)


class GatheredColumn(ColumnParallel):
    """y = x W' + b with the output features cut, then gathered: for a small y that all ranks need whole, such as DiT's
    modulation, whose weights are a third of the model."""

    def __call__(self, multiply: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:          # (B, D) -> (B, F)
        if self.tokens is not None:                 # y's gradient is partial, of this rank's tokens; x's will be partial, too
            y = mappings.gather(multiply(x, weight, bias), -1, self.axis)
        else:
            y = mappings.collect(multiply(mappings.copy(x, self.axis), weight, bias), -1, self.axis)
        return y.contiguous()                       # the gathered dim is the outermost in memory


def communication(style: str, axis: Axis, tokens: SplitTokens | None, bias: bool) -> Communication:
    """The communication of a linear of a `tensor_plan` style. A vocabulary head needs none: its logits stay in parts."""
    overlapped = tokens is not None and tokens.overlap != "none"
    if style == "column":
        return (OverlappedColumn if overlapped else ColumnParallel)(axis, tokens)
    if style == "row" and overlapped:
        return OverlappedRow(axis, tokens)
    if style == "row":
        row = (RowParallel if bias else RowParallelNoBias)(axis, tokens)
        row.deferred = RowParallelFirstBias(axis, tokens)
        return row
    return {"gathered": GatheredColumn(axis, tokens), "vocabulary_head": Communication()}[style]


def cut_dims(style: str, rows: Sequence[int]) -> tuple[int, int | None]:
    """Along which dims of their logical shapes weight and bias are cut. rows: of the outputs, (3, heads, head_dim) or (F,)."""
    heads = max(0, len(rows) - 2)                   # the dim of the heads, or that of all features
    return {"column": (heads, heads), "row": (-1, None), "gathered": (0, 0)}[style]


def apply_tensor_parallel(model: Model, placements: Placements, axis: Axis, tokens: SplitTokens | None = None) -> None:
    """Cut the linears and embeddings named in the model's `tensor_plan`; all else stays whole on every rank of the axis.

    tokens: with sequence parallelism, how tokens are cut between those linears. Takes a model on the meta device.

    Raises `CourseError` if the axis size does not divide the heads, hidden units or vocabulary, if two uses of one weight would
    be cut differently, or if the plan does not fit the model.
    """
    if axis.size == 1:
        return
    check_plan(model, sp=tokens is not None)
    done: dict[nn.Module, nn.Module] = {}                               # a shared module stays shared
    styles: dict[nn.Module, str] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        style = planned_style(model, name)
        if style is not None and isinstance(module, (nn.Linear, nn.Embedding)):
            if styles.setdefault(module, style) != style:
                raise two_parts(placements[module.weight].name)
            if module not in done:
                done[module] = cut_module(placements, module, style, axis, tokens)
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, done[module])
    if "vocabulary_head" in model.tensor_plan.values():
        replace_at_seam(model, "cross_entropy", lambda old: VocabularyCrossEntropy(axis))
        replace_at_seam(model, "enter", lambda old: VocabularyEnter(axis, tokens))
    planned = set(done.values())
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if placements[parameter].axis is not None and module not in planned:
                raise two_parts(placements[parameter].name)             # this use needs it whole
    owned_by_first(placements, model.parameters(), axis)
    for norm in modules_at_seam(model, "head_norm").values():
        for parameter in norm.parameters():
            placements[parameter] = replace(placements[parameter], partial_over=axis)


def cut_module(placements: Placements, module: nn.Linear | nn.Embedding, style: str, axis: Axis,
               tokens: SplitTokens | None) -> nn.Module:
    """Cut a module in a `tensor_plan` style. Returns the linear with its parameters cut, or a `VocabularyEmbedding`."""
    if isinstance(module, nn.Embedding):
        cut_vocabulary(placements, module.weight, axis)
        return VocabularyEmbedding(module, axis, tokens)
    linear = as_linear(module)
    if style == "vocabulary_head":
        cut_vocabulary(placements, linear.weight, axis)
    else:
        of_weight, of_bias = cut_dims(style, linear.rows)
        cut(placements, linear.weight, of_weight, axis)
        if linear.bias is not None and of_bias is not None:
            cut(placements, linear.bias, of_bias, axis)
    linear.communication = communication(style, axis, tokens, linear.bias is not None)
    linear.product.split_over(axis)
    return linear


def planned_style(model: Model, name: str) -> str | None:
    """The style that the model's `tensor_plan` gives a module, by the end of its name; None if it gives none."""
    return next((style for end, style in model.tensor_plan.items() if name.endswith(end)), None)


def check_plan(model: Model, sp: bool) -> None:
    """Raise `CourseError` if an entry of the `tensor_plan` fits no module, or if the model lacks what the entries need."""
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
    """The styles of the linears in the innermost module that encloses the named one and has any."""
    found: list[str | None] = []
    while name and not found:
        name = name.rpartition(".")[0]
        found = [style for linear, style in linears.items() if linear.startswith(f"{name}." if name else "")]
    return found
