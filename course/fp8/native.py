"""Native FP8: the three matmuls of a linear layer in 8 bits, everything else in bf16.

A linear y = x W' costs three matmuls: one forward and two backward.

    y  = x  W'      (M, K) · (K, N)        x, W in E4M3
    dx = dy W       (M, N) · (N, K)        dy in E5M2, W in E4M3
    dW = dy' x      (N, M) · (M, K)        dy in E5M2, x in E4M3

Hopper's tensor cores multiply FP8 twice as fast as bf16. But eight bits have little range and precision (Micikevicius et al.
2022, "FP8 formats for deep learning", arXiv:2209.05433):

    E4M3    4 bits of exponent, 3 of mantissa    largest 448        smallest 2^-9     weights and activations: precision
    E5M2    5 bits of exponent, 2 of mantissa    largest 57344      smallest 2^-16    gradients: range

So a tensor is multiplied by a *scale* before the cast. The scale moves the tensor's largest magnitude, its *amax*, close to
the largest number of the format. The matmul divides the scales out again. The *recipe* determines the scale:

    current    from the tensor's own amax: this costs one more pass over the tensor before the cast
    delayed    from the largest amax of the last `history` steps: the scale is known in advance, so one pass casts and records
               the amax for the next steps. Larger values saturate at the format's largest number. The first step has no
               history: it multiplies in bf16 and only records the amax

The casts limit the speed. Each reads 16 or 32 bits per number to write 8. On Hopper, cuBLAS only takes FP8 operands that are
contiguous along the summed dim: rows of A, columns of B ("TN"). Forward sums over K, dx over N and dW over M, so x, W and dy
are each needed in two memory layouts. `quantize` writes both and records the amax in one pass that reads the tensor once (a
Triton kernel, `course/ops/fp8_cast_triton.py`). Plain tensor operations would need about five passes and lose the gain.

On a CPU the same values are multiplied in float32. `quantize` gives the same bits, and the product of two FP8 numbers is exact
in float32, so only the order and precision of the sums differ. Hopper's tensor cores accumulate with about 14 bits (DeepSeek-AI
2024, arXiv:2412.19437, section 3.3.2): each of K products enters a sum with an error of up to 2^-13 of the largest number
added there. So `torch._scaled_mm` differs from the emulation by at most

    K · 2^-13 · M       M: the largest product or partial sum. With use_fast_accum (forward) it is over the whole sum;
                        without (backward) over 128 products, since their sums are accumulated in float32

For random matrices with K up to 16384 the difference stays below 2^-6 and 2^-8 of Σ|a·b| (`tests/gpu/test_gpu_fp8.py`).
Both results are then rounded to their dtype, 2^-9 relative for bf16.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from course.models.layers import Linear
from course.ops.autograd import Context
from course.ops.custom_op import register_operator
from course.ops.linear_op import Later, Product
from course.ops.number_formats import check_capability, matmul_dtype
from course.parallel.layout import Layout
from course.parallel.mesh import Axis, Mesh
from course.utils.errors import CourseError

if TYPE_CHECKING:
    from course.config import FP8, Config

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
LARGEST = {kind: torch.finfo(kind).max for kind in FORMATS.values()}            # 448 and 57344
ROLES = ("input", "weight", "gradient")             # the operands of a linear, in this order
MULTIPLE = 16                                       # cuBLAS requires every dim of a weight, and M in dW, to be a multiple
LEAST = (8, 9)                                      # minimum compute capability: Ada; Hopper has 9.0


def quantize(x: Tensor, scale: Tensor, amax: Tensor, kind: torch.dtype, both: bool, note: bool) -> tuple[Tensor, Tensor]:
    """Scale, cast and transpose in one pass: (M, K) -> (M, K) and (K, M padded to a multiple of 16 with zeros), FP8.

    scale, amax: float32 scalars. note: set `amax` to the maximum of itself and the largest magnitude of x. A maximum is
    idempotent, so a recomputed forward pass does not change it. both: if False, the second result is empty.
    """
    return torch.ops.course.quantize(x, scale, amax, kind, both, note)


def quantize_plain(x: Tensor, scale: Tensor, amax: Tensor, kind: torch.dtype, both: bool, note: bool) -> tuple[Tensor, Tensor]:
    """`quantize` in plain tensor operations. Tests compare the kernel with it, bit for bit."""
    if note:
        amax.copy_(torch.maximum(amax, amax_of(x)))
    scaled = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    cut = scaled.clamp(-LARGEST[kind], LARGEST[kind])                       # casts treat larger numbers differently
    q = cut.where(scaled.isfinite(), torch.nan).to(kind)                    # an infinity must not pass for a number
    if not both:
        return q, q.new_empty(0)
    padded = F.pad(q.view(torch.uint8), (0, 0, 0, -len(q) % MULTIPLE))
    return q, padded.t().contiguous().view(kind)


def quantize_shapes(x: Tensor, scale: Tensor, amax: Tensor, kind: torch.dtype, both: bool, note: bool) -> tuple[Tensor, Tensor]:
    """The results' shapes and dtypes for torch.compile."""
    rows, columns = x.shape
    q = x.new_empty(rows, columns, dtype=kind)
    return q, x.new_empty(columns, rows + -rows % MULTIPLE, dtype=kind) if both else q.new_empty(0)


register_operator("quantize",
                  "(Tensor x, Tensor scale, Tensor(a!) amax, ScalarType kind, bool both, bool note) -> (Tensor, Tensor)",
                  quantize_plain, "ops.fp8_cast_triton", quantize_shapes)


def amax_of(x: Tensor) -> Tensor:
    """The largest magnitude in x, of any shape, as a float32 scalar: one kernel, no copy of x."""
    return torch.linalg.vector_norm(x, float("inf")).float()


def scale_for(amax: Tensor, largest: float | Tensor, margin: int) -> Tensor:
    """The scale that maps `amax`, of any shape, to 2^-margin of the format's largest number; 1 where amax is 0."""
    top = torch.ones_like(amax) * (largest / 2**margin)                     # scalar / tensor would round twice
    scale = (top / amax).clamp(max=2.0**100)                                # a tiny amax would give an infinite one
    return scale.where(amax > 0, 1.0)


def multiply(a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, out: torch.dtype, bias: Tensor | None = None,
             fast: bool = False) -> Tensor:
    """a @ b with the scales divided out, plus bias: (M, K), (K, N), (N,) -> (M, N) in dtype `out`.

    a is row-major, b column-major. fast: let the tensor cores accumulate with fewer bits.
    """
    if a.is_cuda:
        late = bias if out == torch.float32 else None                       # cuBLAS only fuses a bias for 16-bit results
        y = torch._scaled_mm(
            a,                                      # (M, K)  row-major
            b,                                      # (K, N)  column-major
            scale_a=inverse_a,                      # ()      float32, dequantizes a
            scale_b=inverse_b,                      # ()      float32, dequantizes b
            bias=None if out == torch.float32 or bias is None else bias.to(out),            # (N,)
            out_dtype=out,
            use_fast_accum=fast)
        return y if late is None else y + late
    wide = torch.promote_types(out, torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        y = torch.mm(a.to(wide), b.to(wide)) * inverse_a * inverse_b
    return (y if bias is None else y + bias.to(out)).to(out)


@dataclass(frozen=True)
class CastSpec:
    """Settings that the three casts of a linear share."""

    margin: int
    gradients: torch.dtype                          # the format of dy: E5M2, or E4M3 for comparison
    out: torch.dtype                                # the dtype of y
    backward: bool                                  # whether a backward pass follows; it needs the transposes
    note: bool                                      # whether this is a training pass, which records the amax
    axis: Axis | None                               # current recipe: the ranks over which a tensor has one scale
    later: Later | None                             # takes a deferred weight gradient; None: compute it at once


class FP8Linear(Function):
    """x W' + b in FP8: (M, K), (N, K), (N,) -> (M, N). slots: scale, inverse, amax of each role; None if current."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, spec: CastSpec, gathered: Tensor | None,
                *slots: Tensor | None) -> Tensor:
        x8, x8t, inverse_x = cast(x, E4M3, spec, spec.backward, *slots[0:3])            # (M, K), (K, M16)
        w8t: Tensor | None = None
        if gathered is None:
            w8, w8t, inverse_w = cast(weight, E4M3, spec, spec.backward, *slots[3:6])   # (N, K), (K, N)
        else:                                       # `parallel.zero=3`: gathered in 8 bits, and again before the backward pass
            assert slots[4] is not None
            w8, inverse_w = gathered, slots[4]
        ctx.save_for_backward(x8t, w8t, inverse_x, inverse_w, gathered)
        ctx.slot = slots[6:9]                       # not by save_for_backward: other passes change its amax meanwhile
        ctx.spec, ctx.dtypes = spec, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return multiply(x8, w8.t(), inverse_x, inverse_w, spec.out, bias, fast=True)    # (M, N)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x8t, w8t, inverse_x, inverse_w, gathered = ctx.saved_tensors
        if gathered is not None:
            w8t = gathered.view(torch.uint8).t().contiguous().view(E4M3)
        to_x, to_weight, to_bias = ctx.dtypes
        g8, g8t, inverse_g = cast(grad.contiguous(), ctx.spec.gradients, ctx.spec, True, *ctx.slot)     # (M, N), (N, M16)
        dx = multiply(g8, w8t.t(), inverse_g, inverse_w, to_x) if ctx.needs_input_grad[0] else None # (M, K)
        compute = partial(multiply, g8t, x8t.t(), inverse_g, inverse_x, to_weight)          # (N, K)
        dw = compute() if ctx.needs_input_grad[1] else None
        if ctx.spec.later is not None:
            ctx.spec.later(compute)
        db = grad.sum(0, dtype=to_bias) if ctx.needs_input_grad[2] else None                        # (N,)
        return dx, dw, db, None, None, *[None] * 9


class ObserveGradAmax(Function):
    """Forward: identity. Backward: identity, and record the gradient's amax."""

    @staticmethod
    def forward(ctx: Context, y: Tensor, amax: Tensor) -> Tensor:           # any shape, ()
        ctx.amax = amax                             # not via save_for_backward: other passes change it in the meantime
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        ctx.amax.copy_(torch.maximum(ctx.amax, amax_of(grad)))
        return grad, None


def cast(x: Tensor, kind: torch.dtype, spec: CastSpec, both: bool, scale: Tensor | None, inverse: Tensor | None,
         amax: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x (M, K): (x in FP8, its transpose, the inverse scale) of shapes (M, K), (K, M padded) as in `quantize`, ()."""
    if scale is None or inverse is None or amax is None:                    # current recipe
        amax = largest_over(amax_of(x), spec.axis)
        scale = scale_for(amax, LARGEST[kind], spec.margin)
        return *quantize(x, scale, amax, kind, both, False), scale.reciprocal()
    return *quantize(x, scale, amax, kind, both, spec.note), inverse


def largest_over(amax: Tensor, axis: Axis | None) -> Tensor:
    """All-reduce the maximum over an axis in place, any shape; no communication without an axis."""
    if axis is not None and axis.size > 1:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=axis.group)
    return amax


class Matmul(Product):
    """A linear's product in FP8, (..., K) -> (..., N).

    With the delayed recipe it keeps, for each role, a scale, its inverse and the amax of the current step so far, as
    separate tensors at fixed addresses. `Scaling` updates them between steps.
    """

    plain = False

    def __init__(self, name: str, settings: "FP8", device: torch.device):
        self.name, self.margin, self.gradients = name, settings.margin, FORMATS[settings.gradients]
        self.training_pass = True                   # whether passes with gradients record the amax
        self.known = settings.recipe == "current"   # whether scales exist: with delayed, after the first step
        self.axis: Axis | None = None
        delayed = settings.recipe == "delayed"
        self.scales = [torch.ones((), device=device) for _ in ROLES if delayed]
        self.inverses = [torch.ones((), device=device) for _ in ROLES if delayed]
        self.amaxes = [torch.zeros((), device=device) for _ in ROLES if delayed]
        self.small = E4M3 if delayed else None      # with current scales, no rank knows the amax of the whole weight

    def formats(self) -> tuple[torch.dtype, ...]:
        """The format of each role."""
        return E4M3, E4M3, self.gradients

    def split_over(self, axis: Axis) -> None:
        """Set the axis that shards the operands: with the current recipe, its ranks share one scale per tensor."""
        self.axis = axis

    def check(self, weight: Tensor) -> None:
        """Raise `CourseError` if a dim of a weight (N, K) is not a multiple of 16, which cuBLAS requires."""
        if any(side % MULTIPLE for side in weight.shape):
            rows, columns = weight.shape
            raise CourseError(f"precision=fp8 needs widths divisible by {MULTIPLE}, and {self.name} maps {columns} features to "
                              f"{rows} on each rank: change model.dim, model.mlp_ratio or parallel.tp, or leave it in bf16 by "
                              "adding it to fp8.keep")

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:    # (..., K), (N, K), (N,) -> (..., N)
        if not self.known:
            return self.observe(x, weight, bias)
        backward = torch.is_grad_enabled()
        spec = CastSpec(self.margin, self.gradients, matmul_dtype(x), backward, self.training_pass and backward, self.axis,
                        self.later)
        slots: list[Any] = [slot for three in zip(self.scales, self.inverses, self.amaxes, strict=True) for slot in three]
        rows = x.reshape(-1, x.shape[-1])                                   # (M, K)
        return FP8Linear.apply(rows, weight, bias, spec, self.gathered, *(slots or [None] * 9)).view(*x.shape[:-1], len(weight))

    def shrink(self, part: Tensor) -> Tensor:
        """Cast a part of the weight, of any shape, by the weight's scale, and record its amax: the histories get the maximum
        over all ranks."""
        at = ROLES.index("weight")
        rows = part.reshape(-1, math.gcd(part.numel(), 4096))               # whole tiles of the kernel, where the size allows
        return quantize(rows, self.scales[at], self.amaxes[at], E4M3, False, True)[0].view(part.shape)

    def observe(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the product in the surrounding dtype and record the amaxes."""
        y = super().__call__(x, weight, bias)
        if not (self.training_pass and torch.is_grad_enabled()):
            return y
        for amax, operand in zip(self.amaxes, (x, weight), strict=False):
            amax.copy_(torch.maximum(amax, amax_of(operand.detach())))
        return ObserveGradAmax.apply(y, self.amaxes[2])


class Scaling:
    """The amax histories of all FP8 matmuls of the serial model, and the scales derived from them.

    Every rank keeps the histories of all matmuls, including those of other pipeline stages. For a matmul sharded by tp, every
    rank keeps one history of the whole tensor. So one all-reduce of one small tensor per step gives the histories of a single
    process: the maximum over samples (dp), tokens (cp, sp), features (tp) and stages (pp). Replicated tensors do not change a
    maximum. Before they are averaged, gradients are dp x cp times those of a single process; the histories hold the latter.
    """

    def __init__(self, matmuls: dict[str, Matmul], settings: "FP8", mesh: Mesh):
        device = mesh.world.device
        self.matmuls, self.margin, self.amax, self.everyone = matmuls, settings.margin, settings.amax, mesh.all
        listed = list(matmuls.values())
        self.scales, self.inverses, self.amaxes = ([slot for m in listed for slot in getattr(m, kind)]
                                                   for kind in ("scales", "inverses", "amaxes"))
        self.delayed = bool(self.amaxes)
        self.history = torch.zeros(len(self.amaxes), settings.history, device=device)   # newest first
        self.largest = torch.tensor([LARGEST[kind] for m in listed for kind in m.formats()][:len(self.amaxes)], device=device)
        self.times = torch.tensor([1.0, 1.0, mesh.dp_cp.size] * len(listed), device=device)[:len(self.amaxes)]

    @torch.no_grad()
    def update(self, bad: Tensor) -> None:
        """Add a step's amaxes to the histories and compute the next step's scales.

        A skipped step (`bad`) changes only histories that are still empty: its finite amaxes are better than a scale of 1.
        """
        if not self.delayed:
            return
        seen = largest_over(torch.stack(self.amaxes).nan_to_num(0, 0, 0), self.everyone)            # (slots,)
        moved = torch.cat([(seen / self.times)[:, None], self.history[:, :-1]], 1)      # (slots, history)
        self.history.copy_(moved.where((bad == 0) | (self.history.amax(1, keepdim=True) == 0), self.history))
        self.rescale(self.matmuls)
        torch._foreach_zero_(self.amaxes)

    def rescale(self, names: Iterable[str]) -> None:
        """Compute the scales from the histories; the named matmuls use theirs from now on."""
        for name in names:
            self.matmuls[name].known = True
        deciding = self.history.amax(1) if self.amax == "max" else self.history[:, 0]
        scale = scale_for(deciding, self.largest, self.margin) / self.times             # (slots,)
        torch._foreach_copy_(self.scales, list(scale.unbind()))
        torch._foreach_copy_(self.inverses, list(scale.reciprocal().unbind()))

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside the block, forward passes do not record amaxes, even with gradients enabled."""
        for matmul in self.matmuls.values():
            matmul.training_pass = False
        try:
            yield
        finally:
            for matmul in self.matmuls.values():
                matmul.training_pass = True

    def state(self) -> dict[str, Tensor]:
        """The histories for a checkpoint, (3, history) per matmul: input, weight, gradient; newest first."""
        count, steps = self.history.shape
        each = self.history.view(count // len(ROLES), len(ROLES), steps)    # empty with the current recipe
        return {f"{name}.amax_history": part for name, part in zip(self.matmuls, each, strict=self.delayed)}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Copy the histories from a checkpoint, as far as it has them and their lengths allow."""
        mine = {name: part for name, part in self.state().items() if name in state}
        for name, part in mine.items():
            steps = min(part.shape[1], state[name].shape[1])
            part[:, :steps] = state[name][:, :steps].to(part.device)
        if mine:                                     # after a checkpoint without FP8, the first step finds the scales
            self.rescale([name for name in self.matmuls if f"{name}.amax_history" in mine])


def convert(model: nn.Module, config: "Config", mesh: Mesh) -> Scaling:
    """Give every `layers.Linear` of a serial model an FP8 product, except those in `fp8.keep`; tensor parallelism keeps it.

    Other linears, such as PyTorch's own, do not change. Without precision=fp8, or with Transformer Engine, the model does not
    change. Raises `CourseError` if the device cannot multiply FP8.
    """
    matmuls: dict[str, Matmul] = {}
    if config.precision == "fp8" and config.fp8.by == "native":
        check_device(mesh.world.device)
        for name, module in model.named_modules():
            if isinstance(module, Linear) and not config.fp8.keeps(name):
                module.product = matmuls[name] = Matmul(name, config.fp8, mesh.world.device)
    return Scaling(matmuls, config.fp8, mesh)


def check_device(device: torch.device) -> None:
    """Raise `CourseError` if a GPU cannot multiply FP8. A CPU emulates it."""
    check_capability(device, LEAST, "precision=fp8", "Ada, Hopper, Blackwell", "use precision=bf16")


def prepare(model: nn.Module, layout: Layout, scaling: Scaling) -> None:
    """Prepare a sharded model: the warm-up passes in which pipeline stages exchange shapes do not record amaxes.

    Raises `CourseError` if a linear, as sharded by tp, has a dim that cuBLAS does not take.
    """
    if layout.pipeline is not None:
        layout.pipeline.rehearsal = scaling.rehearsal
    for module in model.modules():
        if isinstance(module, Linear):
            module.product.check(module.weight)
