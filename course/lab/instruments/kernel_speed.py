"""The speed of lesson 19's kernels on a GPU, beside PyTorch's and the library's."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu, layer_norm, scaled_dot_product_attention

from course.bench import timing
from course.lab.exercises import lesson19_flash_attention as flash
from course.lab.exercises import lesson19_kernels as lesson
from course.lab.exercises import lesson19_open_task as task
from course.ops import fused_add_norm, fused_gelu, packed_attention  # noqa: F401 (importing them registers the operators)
from course.ops.triton_language import triton

EPS = 1e-5
BEST = {"forward": flash.Tiles(128, 64, 8, 3), "queries": flash.Tiles(128, 64, 8, 3), "keys": flash.Tiles(64, 64, 4, 3)}
"""The fastest configurations for heads of 64 on an H200."""
Call = Callable[[], tuple[Tensor, ...]]
Compile = Callable[[Callable[..., tuple[Tensor, ...]]], Callable[..., tuple[Tensor, ...]]]


@dataclass(frozen=True)
class Work:
    """One computation by several implementations, all with the same results up to rounding."""

    amount: float                                    # the fewest bytes to read and write, or FLOP
    unit: str                                        # GB/s or TFLOP/s
    calls: dict[str, Call]                           # by who computes it: lesson, PyTorch, compiled, library

    def rate(self, seconds: float) -> float:
        """The amount per second, in the unit."""
        return self.amount / seconds / {"GB/s": 1e9, "TFLOP/s": 1e12}[self.unit]


def both(function: Callable[..., tuple[Tensor, ...]], compiler: Compile | None, *inputs: Tensor) -> dict[str, Call]:
    """A function of PyTorch, and, with a compiler, the same compiled."""
    calls: dict[str, Call] = {"PyTorch": lambda: function(*inputs)}
    if compiler is not None:
        compiled = compiler(function)
        calls["compiled"] = lambda: compiled(*inputs)
    return calls


def into(launch: Callable[[], object], *outputs: Tensor) -> Call:
    """A call that launches a kernel of the lesson and returns what it has written."""
    def call() -> tuple[Tensor, ...]:
        launch()
        return outputs

    return call


def random(device: torch.device, *shape: int) -> Tensor:
    """Random numbers in bf16."""
    return torch.randn(shape, device=device).bfloat16()


def copy_work(R: int, C: int, device: torch.device, compiler: Compile | None = None) -> Work:
    """A copy of a matrix (R, C) in bf16."""
    x, y = random(device, R, C), random(device, R, C)
    calls = {"lesson": into(lambda: lesson.copy(x, y), y)} | both(lambda x: (x.clone(),), compiler, x)
    return Work(2 * x.nbytes, "GB/s", calls)


def gelu_work(R: int, C: int, device: torch.device, compiler: Compile | None = None) -> Work:
    """GELU(x + bias) of a matrix (R, C) in bf16. The library's operator leaves the bias to the matmul before it."""
    x, bias = random(device, R, C), random(device, C)
    y, z = torch.empty_like(x), x + bias
    return Work(2 * x.nbytes, "GB/s", {
        "lesson": into(lambda: lesson.bias_gelu(x, bias, y), y),
        **both(lambda x, bias: (gelu(x + bias, approximate="tanh"),), compiler, x, bias),
        "library": lambda: (fused_gelu.Gelu.apply(z, None, True),)})


def softmax_work(R: int, C: int, device: torch.device, compiler: Compile | None = None) -> Work:
    """The softmax of each row of a matrix (R, C) in bf16."""
    x, y = random(device, R, C), random(device, R, C)
    calls = {"lesson": into(lambda: lesson.softmax(x, y), y)} | both(lambda x: (x.softmax(-1),), compiler, x)
    return Work(2 * x.nbytes, "GB/s", calls)


def add_norm_work(R: int, C: int, device: torch.device, compiler: Compile | None = None) -> Work:
    """x + y and its LayerNorm, for matrices (R, C) in bf16."""
    x, y, weight, bias = random(device, R, C), random(device, R, C), random(device, C), random(device, C)
    z, n = torch.empty_like(x), torch.empty_like(x)
    mean, rstd = torch.empty(2, R, device=device)

    def plain(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        z = x + y
        return z, layer_norm(z, (C,), weight, bias, EPS)

    return Work(4 * x.nbytes, "GB/s", {
        "lesson": into(lambda: lesson.add_norm(x, y, weight, bias, z, n, mean, rstd, EPS), z, n),
        **both(plain, compiler, x, y, weight, bias),
        "library": lambda: fused_add_norm.add_norm(x[None], y[None], None, weight[None], bias[None], EPS, 0.0)})


def add_norm_backward_work(R: int, C: int, device: torch.device, compiler: Compile | None = None) -> Work:
    """The gradients of x, weight and bias, from those of x + y and of its LayerNorm, for matrices (R, C) in bf16."""
    z, dz, dn, weight = random(device, R, C), random(device, R, C), random(device, R, C), random(device, C)
    _, *saved = torch.native_layer_norm(z, (C,), weight, weight, EPS)                   # mean and 1 / std, 2 x (R, 1)
    mean, rstd = (x.flatten().float() for x in saved)                                   # 2 x (R,)
    dx = torch.empty_like(z)
    parts = torch.empty(2, triton.cdiv(R, 32), C, device=device)

    def plain(z: Tensor, dz: Tensor, dn: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, ...]:
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            dn, z, (C,), mean, rstd, weight, weight, (True, True, True))
        return dx + dz, torch.stack([dweight, dbias])

    def mine() -> tuple[Tensor, ...]:
        return dx, lesson.add_norm_backward(dz, dn, z, weight, mean, rstd, dx, parts)

    def library() -> tuple[Tensor, ...]:
        dx, _, sums = torch.ops.course.add_norm_backward(dz[None], dn[None], z[None], None, None, weight[None], mean[None],
                                                         rstd[None], 0.0, False, z.dtype, z.dtype)
        return dx[0], sums.flatten(1)

    calls = {"lesson": mine} | both(plain, compiler, z, dz, dn, weight, *saved)
    return Work(4 * z.nbytes, "GB/s", calls | {"library": library})


MATRIX_WORK = {"copy": copy_work, "fused-gelu": gelu_work, "row-softmax": softmax_work, "add-norm": add_norm_work,
               "add-norm-backward": add_norm_backward_work}
"""Exercise -> its work on a matrix."""


def cross_entropy_work(T: int, V: int, device: torch.device) -> Work:
    """The mean cross-entropy of T tokens over V words in bf16, and the gradient of the logits, which may overwrite them.

    A second call of the lesson's or the library's function finds the gradients of the first: only its time means anything.
    """
    logits, targets = random(device, T, V), torch.randint(V, (T,), device=device)
    ours, theirs, leaf = logits.clone(), logits.clone(), logits.clone().requires_grad_()
    weights = torch.full((T,), 1 / T, device=device)

    def plain() -> tuple[Tensor, ...]:
        loss = cross_entropy(leaf.float(), targets)
        return loss.detach(), *torch.autograd.grad(loss, leaf)

    def library() -> tuple[Tensor, ...]:
        from course.ops.cross_entropy_triton import cross_entropy_  # Triton comes with PyTorch for GPUs alone

        return cross_entropy_(theirs, targets, weights).mean(), theirs

    return Work(2 * logits.nbytes, "GB/s", {
        "lesson": lambda: task.cross_entropy(ours, targets, -100, 1.0, 4096), "PyTorch": plain, "library": library})


class Heads:
    """Causal attention of B samples with H heads of D in bf16, q, k and v being views of a packed qkv; forward has run."""

    def __init__(self, B: int, H: int, T: int, D: int, device: torch.device):
        self.flop = 2 * B * H * T * T * D / 2                           # of one product with T x T scores, half of them seen
        self.qkv, self.dy = random(device, B, T, 3, H, D), random(device, B, T, H, D).transpose(1, 2)
        self.q, self.k, self.v = self.qkv.permute(2, 0, 3, 1, 4)        # 3 x (B, H, T, D)
        self.inputs = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        q, k, v = self.inputs
        self.plain = scaled_dot_product_attention(q, k, v, is_causal=True)
        self.y, self.lse = flash.flash_forward(self.q, self.k, self.v, True, BEST["forward"])


def flash_work(B: int, H: int, T: int, D: int, device: torch.device) -> Work:
    """Attention's forward pass. PyTorch chooses its own kernel."""
    heads = Heads(B, H, T, D, device)

    def plain() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (scaled_dot_product_attention(heads.q, heads.k, heads.v, is_causal=True),)

    return Work(2 * heads.flop, "TFLOP/s", {
        "lesson": lambda: flash.flash_forward(heads.q, heads.k, heads.v, True, BEST["forward"])[:1], "PyTorch": plain,
        "library": lambda: (torch.ops.course.attention(heads.qkv, True)[0].transpose(1, 2),)})


def flash_backward_work(B: int, H: int, T: int, D: int, device: torch.device) -> Work:
    """Attention's backward pass, counted as five products. PyTorch chooses its own kernel."""
    heads = Heads(B, H, T, D, device)
    y, lse = torch.ops.course.attention(heads.qkv, True)
    dy = heads.dy.transpose(1, 2).contiguous()
    return Work(5 * heads.flop, "TFLOP/s", {
        "lesson": lambda: flash.flash_backward(heads.q, heads.k, heads.v, heads.y, heads.lse, heads.dy, True, BEST["queries"],
                                               BEST["keys"]),
        "PyTorch": lambda: torch.autograd.grad(heads.plain, heads.inputs, heads.dy, retain_graph=True),
        "library": lambda: torch.ops.course.attention_backward(dy, heads.qkv, y, lse, True)[0].permute(2, 0, 3, 1, 4).unbind()})


def measure(work: Work, device: torch.device) -> dict[str, dict[str, float]]:
    """Milliseconds and rate of each implementation."""
    found = {}
    for who, call in work.calls.items():
        seconds = timing.seconds(call, device)
        found[who] = {"ms": 1e3 * seconds, work.unit: work.rate(seconds)}
    return found


def of_exercise(name: str, device: torch.device) -> dict[str, dict[str, float]]:
    """The speed of what the exercise asks for, at one size that no cache holds; {} for an exercise without a kernel of its own.

    Put the learner's functions into the library's place before.
    """
    if name in MATRIX_WORK:
        return measure(MATRIX_WORK[name](65536, 1152, device), device)
    if name == "cross-entropy":
        return measure(cross_entropy_work(8192, 50304, device), device)
    attention = {"flash-forward": flash_work, "flash-backward": flash_backward_work}
    return measure(attention[name](4, 16, 4096, 64, device), device) if name in attention else {}
