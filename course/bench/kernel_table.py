"""`course bench kernels`: measure a table of kernel times for the performance model of this GPU, in less than five minutes.

The table holds seconds of matmuls over (m, k, n), of PyTorch's and packed attention over (batch x heads, tokens, head_dim), of
memory-bound kernels over bytes, and of compiled norms over bytes and width. `planner/kernel_efficiency.py` reads it. A lap lasts
at least 0.05 s, since a GPU at full power lowers its clock within milliseconds, and training runs at the sustained clock. A CUDA
graph holds several calls of a short kernel, so that launches do not dominate.
"""

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config as functorch

from course.bench import timing
from course.bench.cheap_layers import CheapLayer
from course.bench.command_line import command
from course.models import dit, layers
from course.ops.packed_attention import packed_attention
from course.parallel import join, leave

Run = Callable[[], object]
LAPS = 3
LONG, MOST = 2e-3, 20                                # seconds beside which a launch is negligible; most calls in a graph
# log grids. Matmul sides have more points below 4096, where efficiency changes; the largest: tokens per step
SIDES = (64, 256, 1024, 2048, 4096, 16384)
HEADS, TOKENS, WIDTHS = (16, 256), (256, 1024, 4096, 16384), (48, 64, 72, 96, 128)
PACKED_WIDTHS = (48, 64, 72, 96)  # fuse_blocks leaves heads of 128 to PyTorch
TOKENS32, WIDTHS32 = (1024, 4096), (48, 64, 96, 128)                    # 32 bits: a smaller grid, since few train in it
BYTES = (1e6, 8e6, 64e6, 512e6, 2e9)                 # that a kernel reads and writes in all
MESSAGES = (1e5, 1e6, 8e6, 32e6, 128e6, 512e6)       # bytes of a collective
# norms: bytes forward, numbers per row. The compiler keeps short rows, padded to a power of two, in registers; for longer ones,
# such as DiT-XL's 1152, it generates loops that read them twice
NORM_BYTES, NORM_WIDTHS = (64e6, 512e6), (768, 1024, 1152, 1536, 2048, 4096)
SMALL = {"SIDES": (16, 64), "HEADS": (2, 4), "TOKENS": (16, 32), "WIDTHS": (8, 16), "BYTES": (1e4, 1e5), "MESSAGES": (1e3, 1e4),
         "NORM_BYTES": (1e4, 1e5), "NORM_WIDTHS": (8, 12), "PACKED_WIDTHS": (8, 12)}
WIDTH = 1024                                         # of a row in memory-bound kernels
SAMPLE = 256                                         # tokens per sample: DiT sums gradients of gate, scale and shift over them
# least bytes per number of a 16-bit stream that a residual sum with its norm moves (planner/block_time.py, `norm_bytes`)
MOVED = {"forward": 8, "backward": 14, "forward ada": 8, "backward ada": 16}
E4M3 = torch.float8_e4m3fn


def main(device: torch.device, small: bool) -> dict[str, Any]:
    """Measure the table of this device. small: tiny sizes, as a test that takes seconds on a CPU."""
    begin = time.perf_counter()
    sizes, seconds, side = how(device, small)
    with side:
        # every second point is enough for TF32, which is only for comparison
        matmuls = {name: matmul_grid(name, sizes["SIDES"][::1 + (name == "tf32")], device, seconds) for name in formats(device)}
        dtype = half(device) if device.type == "cuda" else torch.float32
        attention = dict(attention_grids([sizes["HEADS"], sizes["TOKENS"], sizes["WIDTHS"]], dtype, device, seconds))
        if device.type == "cuda" and not small:
            grids = attention_grids([HEADS, TOKENS32, WIDTHS32], torch.float32, device, seconds)
            attention |= {f"{which} 32": grid for which, grid in grids}
        memory = {kind: {"axes": [list(sizes["BYTES"])], "seconds": [seconds(make(size, device)) for size in sizes["BYTES"]]}
                  for kind, make in kinds(device).items()}
        norms, packed_table = norm_grids(sizes, device, seconds), packed_grids(sizes, device, seconds)
    table = {**timing.machine(device), "command": "course bench kernels --out FILE",
             "unit": "seconds; matmul: of m, k, n; attention: of batch x heads, tokens, head_dim; memory: of bytes read and "
                     "written; norms: of bytes and width; packed: as attention; all_reduce: of bytes, by the number of GPUs",
             "matmul": matmuls, "attention": attention, "memory": memory, "norms": norms, "packed": packed_table,
             "all_reduce": collectives(device, small)}
    return table | {"took_s": round(time.perf_counter() - begin, 1)}


def how(device: torch.device, small: bool) -> tuple[dict[str, Any], Callable[[Run], float], Any]:
    """(sizes of the grids, function that measures a call, stream to measure on).

    Everything runs on one side stream, because a graph can only capture a backward pass whose forward ran on the graph's stream.
    """
    sizes = {name: SMALL[name] if small else globals()[name] for name in SMALL}
    side = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
    return sizes, partial(stopwatch, device=device, least=1e-4 if small else 0.05), side


def stopwatch(run: Run, device: torch.device, least: float) -> float:
    """Seconds of a call. Short GPU kernels are measured in a graph, without launches."""
    if device.type == "cpu":
        return timing.seconds(run, device, LAPS, least)
    for _ in range(timing.SETTLE):                    # also allocates, outside the graph, what the first call needs
        run()
    timing.wait(device)
    begin = time.perf_counter()
    run()
    timing.wait(device)
    calls = min(MOST, math.ceil(LONG / max(time.perf_counter() - begin, 1e-7)))
    if calls == 1:
        return timing.seconds(run, device, LAPS, least)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()                            # `with torch.cuda.graph` would empty caches each time, for minutes in all
    for _ in range(calls):
        run()
    graph.capture_end()
    return timing.seconds(graph.replay, device, LAPS, least) / calls


def formats(device: torch.device) -> list[str]:
    """The matmul formats to measure on the device."""
    if device.type == "cpu":
        return ["fp32"]
    major, minor = torch.cuda.get_device_capability(device)
    return ["bf16", "tf32"][: 2 if major >= 8 else 0] + ["fp16"] * (major < 8) + ["fp8"] * ((major, minor) >= (8, 9))


def matmul_grid(name: str, sides: Sequence[int], device: torch.device, seconds: Callable[[Run], float]) -> dict[str, Any]:
    """Seconds of (m, k) @ (k, n) on a grid. The second operand is column-major, as a linear's transposed weight is."""
    with timing.tf32():
        found = [seconds(matmul(name, m, k, n, device)) for m, k, n in product(sides, sides, sides)]
    return {"axes": [list(sides)] * 3, "seconds": found}


def matmul(name: str, m: int, k: int, n: int, device: torch.device) -> Run:
    """(m, k) @ (k, n) in the named format. FP8 accumulates as in the library's forward pass, fast and less exact."""
    if name == "fp8":
        a8, b8 = (torch.randn(side, k, device=device).to(E4M3) for side in (m, n))
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)
    a, b = (torch.randn(side, k, device=device).to(dtype) for side in (m, n))
    return lambda: torch.mm(a, b.t())


def attention_grids(axes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device, seconds: Callable[[Run], float],
                    make: Callable[..., Iterator[Run]] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (grid name, seconds) of attention, forward and backward, full and causal. make: instead of PyTorch's attention."""
    for causal in (False, True):
        pairs = [[seconds(run) for run in (make or attention)(h, t, d, causal, dtype, device)] for h, t, d in product(*axes)]
        for which, found in zip(("forward", "backward"), zip(*pairs, strict=True), strict=True):
            yield which + " causal" * causal, {"axes": [list(axis) for axis in axes], "seconds": list(found)}


def attention(heads: int, tokens: int, width: int, causal: bool, dtype: torch.dtype, device: torch.device) -> Iterator[Run]:
    """Yield forward and backward of PyTorch's attention. Queries, keys and values have the strides of a qkv linear's output."""
    batch = 8 if heads % 8 == 0 else 1
    q, k, v = (torch.randn(batch, tokens, heads // batch, width, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
               for _ in range(3))                                       # (B, h, T, d)
    yield torch.no_grad()(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    grad = torch.randn_like(out)
    yield lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


def packed(heads: int, tokens: int, width: int, causal: bool, dtype: torch.dtype, device: torch.device) -> Iterator[Run]:
    """Yield forward and backward of `course.ops.packed_attention`. Backward also concatenates gradients and sums the bias's."""
    batch = 8 if heads % 8 == 0 else 1
    qkv = torch.randn(batch, tokens, 3, heads // batch, width, device=device).to(dtype).requires_grad_()    # (B, T, 3, h, d)
    yield torch.no_grad()(lambda: packed_attention(qkv, None, causal))
    out = packed_attention(qkv, None, causal)
    grad = torch.randn_like(out)
    yield lambda: torch.autograd.grad(out, qkv, grad, retain_graph=True)


def packed_grids(sizes: dict[str, Any], device: torch.device, seconds: Callable[[Run], float]) -> dict[str, dict[str, Any]]:
    """Seconds of packed attention."""
    axes, dtype = [sizes["HEADS"], sizes["TOKENS"], sizes["PACKED_WIDTHS"]], half(device)
    return dict(attention_grids(axes, dtype, device, seconds, packed))


def kinds(device: torch.device) -> dict[str, Callable[[float, torch.device], Run]]:
    """Kind -> function that makes a memory-bound kernel of it; planner/kernel_efficiency.py describes the kinds."""
    makers: dict[str, Callable[[float, torch.device], Run]] = {
        "copy": copy, "elementwise": elementwise, "norm": norm, "norm_back": norm_back, "columns": columns,
        "shuffle": shuffle, "adam": adam, "fused": fused}
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        makers["cast"] = cast
    return makers


def rows(size: float, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A random tensor of so many bytes, as rows of the usual width."""
    number = int(size / torch.empty((), dtype=dtype).element_size() / WIDTH)
    return torch.randn(max(1, number), WIDTH, device=device).to(dtype)


def half(device: torch.device) -> torch.dtype:
    """The 16-bit format that the device computes in."""
    return torch.float16 if device.type == "cuda" and not torch.cuda.is_bf16_supported(False) else torch.bfloat16


def copy(size: float, device: torch.device) -> Run:
    """A float32 copy: one read, one write."""
    source = rows(size / 2, device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def elementwise(size: float, device: torch.device) -> Run:
    """A residual sum under autocast: float32 plus 16 bits, 10 bytes per number."""
    x = rows(size * 0.4, device)
    y = x.to(half(device))
    return lambda: x + y


def norm(size: float, device: torch.device) -> Run:
    """A LayerNorm of float32 rows: one read, one write."""
    x, weight = rows(size / 2, device), torch.ones(WIDTH, device=device)
    return lambda: F.layer_norm(x, (WIDTH,), weight, weight)


def norm_back(size: float, device: torch.device) -> Run:
    """The gradient of a LayerNorm's input: reads x and dy, writes dx. `columns` covers the gradients of its weights."""
    x, weight = rows(size / 3, device).requires_grad_(), torch.ones(WIDTH, device=device)
    y = F.layer_norm(x, (WIDTH,), weight, weight)
    grad = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, x, grad, retain_graph=True)


def columns(size: float, device: torch.device) -> Run:
    """The gradient of a bias: a sum over tokens."""
    x = rows(size, device, half(device))
    return lambda: x.sum(0)


def shuffle(size: float, device: torch.device) -> Run:
    """A transposition of tokens and heads, (n, 8, 128) -> (8, n, 128): one read, one write."""
    x = rows(size / 2, device, half(device)).view(-1, 8, WIDTH // 8)
    return lambda: x.transpose(0, 1).contiguous()


def adam(size: float, device: torch.device) -> Run:
    """A step of fused Adam, 28 bytes per parameter, over up to 64 tensors."""
    pieces = max(1, min(64, int(size / 28 / WIDTH)))
    parameters = [nn.Parameter(rows(size / 28 * 4 / pieces, device)) for _ in range(pieces)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.Adam(parameters, fused=True, capturable=device.type == "cuda").step


def fused(size: float, device: torch.device) -> Run:
    """Residual sum and norm in one compiled kernel, 12 bytes per number: reads stream, branch; writes stream, matmul input."""
    x, weight, low = rows(size / 3, device), torch.ones(WIDTH, device=device), half(device)
    branch = x.to(low)

    def add_norm(x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        total = x + branch
        return total, F.layer_norm(total, (WIDTH,), weight, weight).to(low)

    compiled = torch.compile(add_norm, dynamic=False) if device.type == "cuda" else add_norm
    with torch.no_grad():
        compiled(x, branch)
    return torch.no_grad()(lambda: compiled(x, branch))


def cast(size: float, device: torch.device) -> Run:
    """Native FP8's cast: reads 16 bits, writes 8 bits twice."""
    from course.fp8 import native  # defines the operator

    assert native.E4M3 == E4M3
    x, scale, amax = rows(size / 2, device, torch.bfloat16), torch.ones((), device=device), torch.zeros((), device=device)
    return lambda: torch.ops.course.quantize(x, scale, amax, E4M3, True, True)


# ---- compiled norms ----

def norm_grids(sides: dict[str, Any], device: torch.device, seconds: Callable[[Run], float]) -> dict[str, dict[str, Any]]:
    """Seconds of one residual sum and norm of a compiled block, over bytes and row width: forward and backward, for LayerNorms
    with weights and, "ada", for DiT's modulation.

    Backward includes the sums over tokens for the gradients of the weights, or of gate, scale and shift.
    """
    found: dict[str, dict[str, Any]] = {}
    sizes, widths = sides["NORM_BYTES"], sides["NORM_WIDTHS"]
    for names in (("forward", "backward"), ("forward ada", "backward ada")):
        pairs = []
        for size, width in product(sizes, widths):
            numbers = size / MOVED[names[0]]
            samples = max(1, round(numbers / SAMPLE / width))
            part = numbers / (samples * SAMPLE * width) / 2             # samples are whole, and a block has two norms
            # else a compiled backward may overwrite saved tensors, and refuses to run twice
            with functorch.patch(donated_buffer=False):
                pairs.append([part * seconds(run) for run in between(samples, width, "ada" in names[0], device)])
        for name, taken in zip(names, zip(*pairs, strict=True), strict=True):
            nominal = [size / MOVED[names[0]] * MOVED[name] for size in sizes]
            found[name] = {"axes": [nominal, list(widths)], "seconds": list(taken)}
    return found


def between(samples: int, width: int, ada: bool, device: torch.device) -> Iterator[Run]:
    """Yield forward and backward of a block without its matmuls, compiled as in training, with a 16-bit stream."""
    low, block = half(device), stripped(width, ada, device)
    x = torch.randn(samples, SAMPLE, width, device=device).to(low).requires_grad_()     # (B, T, D)
    c = torch.randn(samples, 6 * width, device=device).to(low).requires_grad_()         # (B, 6 D)
    inputs = [x, c] if ada else [x, *block.parameters()]
    if device.type == "cuda":
        torch._dynamo.reset()                        # compile each size separately, without the recompilation limit
        block = torch.compile(block, dynamic=False, fullgraph=True)

    def forward() -> Tensor:
        with torch.autocast(device.type, low):
            return block(x, c if ada else {})                           # (B, T, D)

    yield forward
    out = forward()
    grad = torch.randn_like(out)
    yield lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


def stripped(width: int, ada: bool, device: torch.device) -> Any:
    """A block of the ViT or DiT (ada) without its matmuls. DiT's condition then is the modulation, (B, 6 D)."""
    with torch.device("meta"):                       # weights without memory
        block: Any = dit.AdaLNBlock(width, 1, width) if ada else layers.Block(width, 1, width, "")
    block.attn, block.mlp = CheapLayer(half(device)), CheapLayer(half(device))
    if ada:
        block.ada = nn.Identity()
    block.to_empty(device=device)
    for norm in (block.norm1, block.norm2):
        norm.reset_parameters()
    return block


def collectives(device: torch.device, small: bool) -> dict[str, list[list[float]]]:
    """Number of GPUs (2, 4, ...) -> [[bytes, seconds], ...] of all-reduces. small: two processes on the CPU."""
    most = 2 if small or device.type == "cpu" else torch.cuda.device_count()
    seconds: dict[str, list[list[float]]] = {}
    if device.type == "cuda":
        torch.cuda.empty_cache()                     # the ranks use this GPU too
    with TemporaryDirectory() as folder:
        for n in [2**i for i in range(1, most.bit_length())]:
            file = Path(folder) / f"{n}.txt"
            flags = ["--small"] * (small or device.type == "cpu")
            subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", "-m",
                            "course.bench.kernel_table", str(file), *flags], check=True,
                           env={**os.environ, "OMP_NUM_THREADS": "1"})
            seconds[str(n)] = [[float(x) for x in line.split()] for line in file.read_text(encoding="utf-8").splitlines()]
    return seconds


def all_reduces(file: Path, small: bool) -> None:
    """Measure all-reduces on the ranks of this job; rank 0 writes a line `bytes seconds` for each size."""
    world = join("cpu" if small else "auto")
    lines = []
    for size in SMALL["MESSAGES"] if small else MESSAGES:
        x = torch.zeros(math.ceil(size / 4), device=world.device)
        calls = 5 if small else max(5, int(2e9 / size) if size > 1e7 else 200)
        laps = []
        for _ in range(LAPS + 1):                    # the first lap is warmup
            dist.barrier()
            timing.wait(world.device)
            begin = time.perf_counter()
            for _ in range(calls):                   # the same number on every rank, or they would hang
                dist.all_reduce(x)
            timing.wait(world.device)
            laps.append((time.perf_counter() - begin) / calls)
        lines.append(f"{4 * len(x)} {sorted(laps[1:])[LAPS // 2]}\n")
    if world.rank == 0:
        file.write_text("".join(lines), encoding="utf-8")
    leave()


if __name__ == "__main__":
    with command("FILE [--small]") as words:
        all_reduces(Path(words[0]), "--small" in sys.argv)
