"""How fast is lesson 19's FlashAttention? `python -m experiments.flash_attention FILE` on one GPU; --small tries it on a CPU.

Forward and backward in bf16, causal and not, with heads of 64 and 128: PyTorch's flash and cuDNN attention, the library's packed
attention, and the lesson's kernels in each of the configurations below. Beside the time of a kernel stands the compiler's
report: registers and spilled registers of a thread, shared memory of a program, and how many programs fit on a multiprocessor.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from course.bench import timing
from course.bench.command_line import command
from course.bench.gpu_clock import clock_and_power
from course.lab.exercises import lesson19_flash_attention as lesson
from course.lab.exercises.lesson19_flash_attention import Tiles
from course.lab.instruments import kernel_tuning
from course.ops.triton_language import triton
from course.parallel import joined
from course.utils.atomic_files import write_json

SHAPES = [(B, 16, T, D) for D in (64, 128) for B, T in ((4, 4096), (1, 16384))]         # samples, heads, tokens, head dim
CANDIDATES = {
    ("forward", 64): [Tiles(64, 64, 4, 3), Tiles(64, 128, 4, 3), Tiles(128, 64, 4, 3), Tiles(128, 64, 4, 2), Tiles(128, 64, 8, 3),
                      Tiles(128, 128, 4, 2), Tiles(128, 128, 8, 2), Tiles(128, 128, 8, 3)],
    ("forward", 128): [Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(64, 128, 4, 2), Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 2),
                       Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 2)],
    ("backward, queries", 64): [Tiles(64, 32, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(128, 64, 4, 3),
                                Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 2)],
    ("backward, queries", 128): [Tiles(64, 32, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(128, 32, 8, 3),
                                 Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 3)],
    ("backward, keys", 64): [Tiles(64, 32, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3, 168),
                             Tiles(128, 32, 8, 3), Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 3)],
    ("backward, keys", 128): [Tiles(64, 32, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 8, 2), Tiles(128, 32, 8, 2),
                              Tiles(128, 32, 8, 3), Tiles(128, 64, 8, 2)],
}
SMALL = {(kernel, 16): [Tiles(16, 16), Tiles(32, 16)] for kernel, _ in CANDIDATES}
PRODUCTS = {"forward": 2, "backward, queries": 3, "backward, keys": 4, "backward": 5}   # the fewest matmuls with T x T scores
Row = dict[str, Any]


class Attention:
    """The tensors of one measurement; q, k and v are views of a packed qkv."""

    def __init__(self, shape: tuple[int, int, int, int], causal: bool, device: torch.device):
        B, H, T, D = shape
        torch.manual_seed(0)
        self.shape, self.causal, self.device = shape, causal, device
        self.qkv = torch.randn(B, T, 3, H, D, dtype=torch.bfloat16, device=device)
        self.q, self.k, self.v = self.qkv.permute(2, 0, 3, 1, 4)        # 3 x (B, H, T, D)
        self.dy = torch.randn(B, T, H, D, dtype=torch.bfloat16, device=device).transpose(1, 2)
        self.y, self.dq, self.dk, self.dv = (torch.empty_like(self.dy) for _ in range(4))
        self.lse = torch.empty(B, H, T, device=device)
        self.delta = torch.empty_like(self.lse)

    def launch(self, kernel: str, tiles: Tiles) -> Any:
        """Run one of the lesson's kernels and return it compiled. Backward needs what forward and `queries` have written."""
        if kernel == "forward":
            return lesson.launch_forward(self.q, self.k, self.v, self.y, self.lse, self.causal, tiles)
        if kernel == "backward, queries":
            return lesson.launch_backward_queries(self.q, self.k, self.v, self.y, self.dy, self.lse, self.delta, self.dq,
                                                  self.causal, tiles)
        return lesson.launch_backward_keys(self.q, self.k, self.v, self.dy, self.lse, self.delta, self.dk, self.dv, self.causal,
                                           tiles)

    def row(self, who: str, kernel: str, seconds: float) -> Row:
        """A row of the results; rates count the fewest matmuls: 2 forward, 5 backward, half of each if causal."""
        B, H, T, D = self.shape
        flop = PRODUCTS[kernel] * 2 * B * H * T * T * D / (2 if self.causal else 1)
        row = {"who": who, "kernel": kernel, "samples": B, "heads": H, "tokens": T, "head_dim": D, "causal": self.causal,
               "ms": 1e3 * seconds, "tflops": flop / seconds / 1e12}
        print(f"{who:9s} {kernel:18s} {B} x {H} x {T} x {D} causal={self.causal!s:5s} {row['ms']:8.3f} ms "
              f"{row['tflops']:6.0f} TFLOP/s", flush=True)
        return row


def tune(attention: Attention, kernel: str, candidates: list[Tiles]) -> tuple[Tiles, list[Row]]:
    """(the fastest of these configurations, a row for each)."""
    tried = kernel_tuning.tune(lambda tiles: attention.launch(kernel, tiles), candidates, attention.device)
    best, rows = kernel_tuning.fastest(tried), []
    for tiles, report in tried.items():
        row = {"who": "lesson", "kernel": kernel}
        if "seconds" in report:
            row = attention.row("lesson", kernel, report.pop("seconds"))
        rows.append(row | {"rows": tiles.rows, "columns": tiles.columns, "warps": tiles.warps, "stages": tiles.stages,
                           "most_registers": tiles.registers, "fastest": tiles == best} | report)
        print(f"    {tiles} {report}", flush=True)
    return best, rows


def measure_lesson(attention: Attention, candidates: dict[tuple[str, int], list[Tiles]]) -> Iterator[Row]:
    """Each of the lesson's kernels in each configuration, then forward and the whole backward pass in the fastest ones."""
    best = {}
    for kernel in ("forward", "backward, queries", "backward, keys"):
        best[kernel], rows = tune(attention, kernel, candidates[kernel, attention.shape[3]])
        yield from rows

    def backward() -> None:
        for kernel in ("backward, queries", "backward, keys"):
            attention.launch(kernel, best[kernel])

    errors = relative_errors(attention)
    yield attention.row("lesson", "forward", run(lambda: attention.launch("forward", best["forward"]), attention)) | {
        "best": True, "error": errors["y"]}
    yield attention.row("lesson", "backward", run(backward, attention)) | {
        "best": True, "error": max(errors[name] for name in ("dq", "dk", "dv"))}


def relative_errors(attention: Attention) -> dict[str, float]:
    """How far y, dq, dk and dv of the first sample's first head are from float32 attention with all scores in memory."""
    inputs = [x[:1, :1].float().requires_grad_() for x in (attention.q, attention.k, attention.v)]
    with sdpa_kernel(SDPBackend.MATH):
        y = scaled_dot_product_attention(*inputs, is_causal=attention.causal)
    wanted = dict(zip(("y", "dq", "dk", "dv"), (y, *torch.autograd.grad(y, inputs, attention.dy[:1, :1].float())), strict=True))
    return {name: ((getattr(attention, name)[:1, :1] - want).norm() / want.norm()).item() for name, want in wanted.items()}


def measure_pytorch(attention: Attention, who: str, backend: SDPBackend) -> Iterator[Row]:
    """PyTorch's attention with one backend."""
    inputs = [x.detach().requires_grad_() for x in (attention.q, attention.k, attention.v)]
    with sdpa_kernel(backend):
        y = scaled_dot_product_attention(*inputs, is_causal=attention.causal)
        with torch.no_grad():
            forward = run(lambda: scaled_dot_product_attention(*inputs, is_causal=attention.causal), attention)
    yield attention.row(who, "forward", forward)
    yield attention.row(who, "backward", run(lambda: torch.autograd.grad(y, inputs, attention.dy, retain_graph=True), attention))


def measure_library(attention: Attention) -> Iterator[Row]:
    """The library's packed attention; its backward also sums the gradient over tokens, for a bias."""
    from course.ops import packed_attention_triton as packed  # late: it is for GPUs only

    y, lse = packed.attention(attention.qkv, attention.causal)
    dy = attention.dy.transpose(1, 2).contiguous()
    yield attention.row("library", "forward", run(lambda: packed.attention(attention.qkv, attention.causal), attention))
    yield attention.row("library", "backward", run(
        lambda: packed.attention_backward(dy, attention.qkv, y, lse, attention.causal), attention))


def run(call: Callable[[], object], attention: Attention) -> float:
    """Seconds of one call."""
    return timing.seconds(call, attention.device)


def measure(device: torch.device, small: bool) -> list[Row]:
    """Measure every shape, causal and not."""
    rows: list[Row] = []
    for shape in ((1, 2, 40, 16),) if small else SHAPES:
        for causal in (False, True):
            attention = Attention(shape, causal, device)
            rows += measure_lesson(attention, SMALL if small else CANDIDATES)
            rows += measure_pytorch(attention, "flash", SDPBackend.FLASH_ATTENTION)
            if device.type == "cuda":
                rows += measure_pytorch(attention, "cuDNN", SDPBackend.CUDNN_ATTENTION)
                rows += measure_library(attention)
    return rows


def main(file: Path, small: bool) -> None:
    """Measure and write the rows as JSON."""
    with joined("cpu" if small else "auto") as world:
        with clock_and_power(world.device) as clock:
            rows = measure(world.device, small)
        found = {**timing.machine(world.device), "triton": triton.__version__, **clock,
                 "command": "python -m experiments.flash_attention FILE" + " --small" * small,
                 "meaning": "attention of bf16 views of a packed qkv; tflops count 2 matmuls with T x T scores forward and 5 "
                            "backward (kernels that recompute: queries 3, keys 4), half of them if causal; error: relative, of "
                            "one head against float32; who: lesson (rows with `best`: the fastest configurations), flash and "
                            "cuDNN (PyTorch's), library (course.ops.packed_attention_triton)",
                 "rows": rows}
    write_json(file, found)


if __name__ == "__main__":
    with command("FILE [--small]") as words:
        main(Path(words[0]), "--small" in sys.argv)
