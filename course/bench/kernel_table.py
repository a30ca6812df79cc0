"""`course bench kernels`: the table that a performance model of this GPU is made of, in less than five minutes.

Seconds of matmuls over (m, k, n), of attention, PyTorch's and packed, over (batch x heads, tokens, head_dim), of what memory
bounds over its bytes, of compiled norms over bytes and width. `planner/kernel_efficiency.py` reads it. A lap lasts at least 0.05
s: a GPU at full power lowers its clock within milliseconds, and a training step runs at what it then sustains, not at what a
short burst reaches. Short kernels are measured several to a CUDA graph, or the host's launches would be what is measured.
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
LONG, MOST = 2e-3, 20                                # seconds of a call beside which its launch is nothing; calls in a graph
# Log grids. The sides of matmuls have more points where efficiency changes, below 4096; tokens of a step are the largest.
SIDES = (64, 256, 1024, 2048, 4096, 16384)
HEADS, TOKENS, WIDTHS = (16, 256), (256, 1024, 4096, 16384), (48, 64, 72, 96, 128)
PACKED_WIDTHS = (48, 64, 72, 96)  # fuse_blocks leaves heads of 128 to PyTorch
TOKENS32, WIDTHS32 = (1024, 4096), (48, 64, 96, 128)                    # in 32 bits, which few train in
BYTES = (1e6, 8e6, 64e6, 512e6, 2e9)                 # that a kernel reads and writes together
MESSAGES = (1e5, 1e6, 8e6, 32e6, 128e6, 512e6)       # bytes of a collective
# Of norms: bytes forward, and numbers in a row. The compiler keeps short rows, padded to a power of two, in registers; of longer
# ones, such as DiT-XL's 1152, it makes loops that read them twice.
NORM_BYTES, NORM_WIDTHS = (64e6, 512e6), (768, 1024, 1152, 1536, 2048, 4096)
SMALL = {"SIDES": (16, 64), "HEADS": (2, 4), "TOKENS": (16, 32), "WIDTHS": (8, 16), "BYTES": (1e4, 1e5), "MESSAGES": (1e3, 1e4),
         "NORM_BYTES": (1e4, 1e5), "NORM_WIDTHS": (8, 12), "PACKED_WIDTHS": (8, 12)}
WIDTH = 1024                                         # of the rows in kernels that are bound by memory
SAMPLE = 256                                         # tokens of a sample, over which DiT's gradients of gate, scale and shift sum
# Bytes of each number of the stream that a residual sum with its norm moves at least, in 16 bits; as blocktime.norm_bytes says.
MOVED = {"forward": 8, "backward": 14, "forward ada": 8, "backward ada": 16}
E4M3 = torch.float8_e4m3fn


def main(device: torch.device, small: bool) -> dict[str, Any]:
    """The table of this device. small: tiny sizes, to see that it works, on a CPU in seconds."""
    begin = time.perf_counter()
    sizes, seconds, side = how(device, small)
    with side:
        # TF32 is as PyTorch's default once was, of interest beside the others: every second point has to do
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
    """(the sizes of the grids, what measures a call, the stream to measure on).

    All on one stream that is not the default one: a graph can capture backward passes of what was computed on its own stream.
    """
    sizes = {name: SMALL[name] if small else globals()[name] for name in SMALL}
    side = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
    return sizes, partial(stopwatch, device=device, least=1e-4 if small else 0.05), side


def stopwatch(run: Run, device: torch.device, least: float) -> float:
    """Seconds of a call; on a GPU those of its kernels alone, if they are short."""
    if device.type == "cpu":
        return timing.seconds(run, device, LAPS, least)
    for _ in range(timing.SETTLE):                    # also makes what only the first call makes, outside the graph
        run()
    timing.wait(device)
    begin = time.perf_counter()
    run()
    timing.wait(device)
    calls = min(MOST, math.ceil(LONG / max(time.perf_counter() - begin, 1e-7)))
    if calls == 1:
        return timing.seconds(run, device, LAPS, least)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()                            # `with torch.cuda.graph` empties caches first, which would take minutes here
    for _ in range(calls):
        run()
    graph.capture_end()
    return timing.seconds(graph.replay, device, LAPS, least) / calls


def formats(device: torch.device) -> list[str]:
    """What the device's matmuls know, fp32 and TF32 aside where there are tensor cores for 16 bits."""
    if device.type == "cpu":
        return ["fp32"]
    major, minor = torch.cuda.get_device_capability(device)
    return ["bf16", "tf32"][: 2 if major >= 8 else 0] + ["fp16"] * (major < 8) + ["fp8"] * ((major, minor) >= (8, 9))


def matmul_grid(name: str, sides: Sequence[int], device: torch.device, seconds: Callable[[Run], float]) -> dict[str, Any]:
    """Seconds of (m, k) @ (k, n) on a grid; the second operand lies column after column, as a linear's weight does."""
    with timing.tf32():
        found = [seconds(matmul(name, m, k, n, device)) for m, k, n in product(sides, sides, sides)]
    return {"axes": [list(sides)] * 3, "seconds": found}


def matmul(name: str, m: int, k: int, n: int, device: torch.device) -> Run:
    """(m, k) @ (k, n) in the named format; FP8's sums are those of the library's forward pass, fast and less exact."""
    if name == "fp8":
        a8, b8 = (torch.randn(side, k, device=device).to(E4M3) for side in (m, n))
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)
    a, b = (torch.randn(side, k, device=device).to(dtype) for side in (m, n))
    return lambda: torch.mm(a, b.t())


def attention_grids(axes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device, seconds: Callable[[Run], float],
                    make: Callable[..., Iterator[Run]] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Seconds of attention, forward and backward, causal and not; by PyTorch's default backend, unless `make` makes another."""
    for causal in (False, True):
        pairs = [[seconds(run) for run in (make or attention)(h, t, d, causal, dtype, device)] for h, t, d in product(*axes)]
        for which, found in zip(("forward", "backward"), zip(*pairs, strict=True), strict=True):
            yield which + " causal" * causal, {"axes": [list(axis) for axis in axes], "seconds": list(found)}


def attention(heads: int, tokens: int, width: int, causal: bool, dtype: torch.dtype, device: torch.device) -> Iterator[Run]:
    """Forward, then backward. Queries, keys and values lie in memory as they come out of one linear."""
    batch = 8 if heads % 8 == 0 else 1
    q, k, v = (torch.randn(batch, tokens, heads // batch, width, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
               for _ in range(3))                                       # (B, h, T, d)
    yield torch.no_grad()(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    grad = torch.randn_like(out)
    yield lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


def packed(heads: int, tokens: int, width: int, causal: bool, dtype: torch.dtype, device: torch.device) -> Iterator[Run]:
    """The same by `course.ops.packed_attention`. Backward also puts the three gradients together and adds them up for a bias."""
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
    """What makes a kernel of each kind that is bound by memory; planner/kernel_efficiency.py says what they stand for."""
    makers: dict[str, Callable[[float, torch.device], Run]] = {
        "copy": copy, "elementwise": elementwise, "norm": norm, "norm_back": norm_back, "columns": columns,
        "shuffle": shuffle, "adam": adam, "fused": fused}
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        makers["cast"] = cast
    return makers


def rows(size: float, device: torch.device, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> Tensor:
    """So many bytes as rows of the usual width."""
    number = int(size / torch.empty((), dtype=dtype).element_size() / width)
    return torch.randn(max(1, number), width, device=device).to(dtype)


def half(device: torch.device) -> torch.dtype:
    """A format of 16 bits that the device computes in."""
    return torch.float16 if device.type == "cuda" and not torch.cuda.is_bf16_supported(False) else torch.bfloat16


def copy(size: float, device: torch.device) -> Run:
    """Float32 to other memory: read once, written once."""
    source = rows(size / 2, device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def elementwise(size: float, device: torch.device) -> Run:
    """A residual sum as autocast makes it: float32 plus 16 bits, 10 bytes a number."""
    x = rows(size * 0.4, device)
    y = x.to(half(device))
    return lambda: x + y


def norm(size: float, device: torch.device) -> Run:
    """A LayerNorm of float32 rows: read once, written once."""
    x, weight = rows(size / 2, device), torch.ones(WIDTH, device=device)
    return lambda: F.layer_norm(x, (WIDTH,), weight, weight)


def norm_back(size: float, device: torch.device) -> Run:
    """Gradient of a LayerNorm's input: x and dy read, dx written; its weights' gradients are sums over columns."""
    x, weight = rows(size / 3, device).requires_grad_(), torch.ones(WIDTH, device=device)
    y = F.layer_norm(x, (WIDTH,), weight, weight)
    grad = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, x, grad, retain_graph=True)


def columns(size: float, device: torch.device) -> Run:
    """Gradients of biases: the sum over tokens."""
    x = rows(size, device, half(device))
    return lambda: x.sum(0)


def shuffle(size: float, device: torch.device) -> Run:
    """Tokens and heads exchanged: (n, 8, 128) -> (8, n, 128), read and written."""
    x = rows(size / 2, device, half(device)).view(-1, 8, WIDTH // 8)
    return lambda: x.transpose(0, 1).contiguous()


def adam(size: float, device: torch.device) -> Run:
    """28 bytes a parameter, in pieces as a model has them."""
    pieces = max(1, min(64, int(size / 28 / WIDTH)))
    parameters = [nn.Parameter(rows(size / 28 * 4 / pieces, device)) for _ in range(pieces)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.Adam(parameters, fused=True, capturable=device.type == "cuda").step


def fused(size: float, device: torch.device) -> Run:
    """Sum and norm in one compiled kernel: stream and branch read, stream and the matmul's input written, 12 bytes a number."""
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
    """native FP8: 16 bits read, two times 8 written."""
    from course.fp8 import native  # defines the operator

    assert native.E4M3 == E4M3
    x, scale, amax = rows(size / 2, device, torch.bfloat16), torch.ones((), device=device), torch.zeros((), device=device)
    return lambda: torch.ops.course.quantize(x, scale, amax, E4M3, True, True)


# ---- compiled norms ----

def norm_grids(sides: dict[str, Any], device: torch.device, seconds: Callable[[Run], float]) -> dict[str, dict[str, Any]]:
    """Seconds of one of a compiled block's two residual sums and norms, over bytes and width of the rows: forward and backward,
    of LayerNorms with weights and, "ada", of DiT's modulation.

    Backward holds the sums over tokens: gradients of the weights, or of gate, scale and shift.
    """
    found: dict[str, dict[str, Any]] = {}
    sizes, widths = sides["NORM_BYTES"], sides["NORM_WIDTHS"]
    for names in (("forward", "backward"), ("forward ada", "backward ada")):
        pairs = []
        for size, width in product(sizes, widths):
            numbers = size / MOVED[names[0]]
            samples = max(1, round(numbers / SAMPLE / width))
            part = numbers / (samples * SAMPLE * width) / 2             # they are whole, and a block has two
            # else a compiled backward may write over what forward kept, and then refuses to run twice
            with functorch.patch(donated_buffer=False):
                pairs.append([part * seconds(run) for run in between(samples, width, "ada" in names[0], device)])
        for name, taken in zip(names, zip(*pairs, strict=True), strict=True):
            nominal = [size / MOVED[names[0]] * MOVED[name] for size in sizes]
            found[name] = {"axes": [nominal, list(widths)], "seconds": list(taken)}
    return found


def between(samples: int, width: int, ada: bool, device: torch.device) -> Iterator[Run]:
    """Forward, then backward of all that a block does between its matmuls, compiled as in training, with a 16-bit stream."""
    low, block = half(device), stripped(width, ada, device)
    x = torch.randn(samples, SAMPLE, width, device=device).to(low).requires_grad_()     # (B, T, D)
    c = torch.randn(samples, 6 * width, device=device).to(low).requires_grad_()         # (B, 6 D)
    inputs = [x, c] if ada else [x, *block.parameters()]
    if device.type == "cuda":
        torch._dynamo.reset()                        # each size by itself, without a limit to their number
        block = torch.compile(block, dynamic=False, fullgraph=True)

    def forward() -> Tensor:
        with torch.autocast(device.type, low):
            return block(x, c if ada else {})                           # (B, T, D)

    yield forward
    out = forward()
    grad = torch.randn_like(out)
    yield lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


def stripped(width: int, ada: bool, device: torch.device) -> Any:
    """A block of the ViT or DiT (ada) without its matmuls. DiT's condition is then the modulation itself, (B, 6 D)."""
    with torch.device("meta"):                       # whose weights need no memory
        block: Any = dit.AdaLNBlock(width, 1, width) if ada else layers.Block(width, 1, width, "")
    block.attn, block.mlp = CheapLayer(half(device)), CheapLayer(half(device))
    if ada:
        block.ada = nn.Identity()
    block.to_empty(device=device)
    for norm in (block.norm1, block.norm2):
        norm.reset_parameters()
    return block


def collectives(device: torch.device, small: bool) -> dict[str, list[list[float]]]:
    """Seconds of all-reduces among 2, 4, ... of the machine's GPUs by their bytes (small: two processes on the CPU)."""
    most = 2 if small or device.type == "cpu" else torch.cuda.device_count()
    seconds: dict[str, list[list[float]]] = {}
    if device.type == "cuda":
        torch.cuda.empty_cache()                     # the other processes use this GPU, too
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
    """Measure on the ranks that there are; the first writes a line `bytes seconds` for each size."""
    world = join("cpu" if small else "auto")
    lines = []
    for size in SMALL["MESSAGES"] if small else MESSAGES:
        x = torch.zeros(math.ceil(size / 4), device=world.device)
        calls = 5 if small else max(5, int(2e9 / size) if size > 1e7 else 200)
        laps = []
        for _ in range(LAPS + 1):                    # the first warms up
            dist.barrier()
            timing.wait(world.device)
            begin = time.perf_counter()
            for _ in range(calls):                   # as many on every rank: none may stop earlier
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
