"""Tools for layout benchmarks: a stack of blocks to measure, and timing as the median over the slowest rank's laps."""

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course.bench import gpu_clock, timing
from course.bench.command_line import reason
from course.config import Config, Parallel, Train
from course.models.interface import Loss, Model
from course.models.layers import MLP, TENSOR_PLAN, TOKEN_PLAN, Block, SumOverTokens
from course.parallel import Layout, Mesh, World, parallelize, serial_layout
from course.parallel.initialize import give_memory
from course.training import fuse_blocks, trace_breakdown
from course.training.step import Progress, build_compute

Row = dict[str, Any]
K = TypeVar("K", bound=Hashable)
LAPS, WARM = 10, 4
ENERGY_S = 2.0                                       # seconds over which energy is counted, after the laps
PROFILE = "--profile"                                # flag: also print kernel tables


class Pick(nn.Module):
    """The embedding of a stack: passes the input through."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:              # (B, T, D)
        return batch["input"]


class MeanSquare(Loss):
    """A nearly free loss: the mean square of each rank's own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.total = SumOverTokens()                # surgery requires it; unused here, to keep the loss cheap

    def forward(self, output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:   # (B, T, D) -> () twice
        return output.float().square().mean(), self.weight(batch).sum()

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """(B,): 1.0 for each sample, 0.0 for padding."""
        return (batch["sample"] >= 0).float()


class Stack(Model):
    """A stack of transformer blocks, (B, T, D) -> (B, T, D)."""

    tensor_plan = TENSOR_PLAN
    token_plan = TOKEN_PLAN

    def __init__(self, dim: int, depth: int, heads: int, causal: bool, tanh: bool = False):
        super().__init__(None)                      # no configuration is needed
        self.embed = Pick()
        self.blocks = nn.ModuleDict({str(i): Block(dim, heads, 4 * dim, f"blocks.{i}", causal=causal) for i in range(depth)})
        if tanh:
            for block in self.blocks.values():
                block.mlp = MLP(dim, 4 * dim, approximate="tanh")
        self.head = nn.Identity()
        self.loss = MeanSquare()

    def forward(self, batch: dict[str, Tensor], x: Any = None) -> Any:
        if self.embed is not None:
            x = self.embed(batch)
        for block in self.blocks.values():
            x = block(x, batch)
        return x


def stack(mesh: Mesh, settings: Parallel, dtype: torch.dtype, size: tuple[int, int, int], causal: bool, cut: bool = True,
          triton: bool = False) -> Layout:
    """Build a stack of size (width, depth, heads) with random weights in a layout, whose `stages` hold it.

    triton: use the kernels of kernels=triton, with the tanh approximation of GELU."""
    with torch.device("meta"):
        model = Stack(*size, causal, triton)
    layout = parallelize(model, mesh, settings) if cut else serial_layout(model, mesh.world)
    for parameter in model.parameters():
        give_memory(parameter, torch.randn(parameter.shape, device=mesh.world.device, dtype=dtype) * 0.02)
    if triton:
        fuse_blocks.fuse_blocks(model)
    return layout


def batch_of(samples: int, tokens: int, dim: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """A batch of random activations, as a stack takes it."""
    return {"input": torch.randn(samples, tokens, dim, device=device, dtype=dtype),
            "sample": torch.arange(samples, device=device),
            "position": torch.arange(tokens, device=device).expand(samples, tokens)}


def forward_backward(layout: Layout, batch: dict[str, Tensor], micro: int = 0, settings: Parallel | None = None,
                     precision: Any = "fp32") -> Callable[[], object]:
    """A function that runs the library's forward and backward pass once and drops the gradients."""
    config = Config(train=Train(micro_batch=micro, global_batch=len(batch["sample"])), precision=precision,
                    parallel=settings or Parallel())
    compute = build_compute(layout.stages[-1], Progress.start(config, layout.mesh.world.device), config, layout)

    def run() -> None:
        compute(batch)
        for stage in layout.stages:
            stage.zero_grad()

    return run


def milliseconds(run: Callable[[], object], world: World, laps: int = LAPS) -> float:
    """Median over the laps of the slowest rank's time, after at most `laps` warmup calls."""
    for _ in range(min(WARM, laps)):
        run()
    return statistics.median(lap(run, world) for _ in range(laps)) * 1e3


def lap(run: Callable[[], object], world: World) -> float:
    """Seconds of a call that starts on all ranks together, on the slowest rank."""
    timing.wait(world.device)
    if world.size > 1:
        dist.barrier()
    begin = time.perf_counter()
    run()
    timing.wait(world.device)
    seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=world.device)
    if world.size > 1:
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def by_turns(runs: Mapping[K, Callable[[], object]], world: World, laps: int, least: float = 0.06) -> dict[K, list[float]]:
    """Seconds per call of each run, lap by lap. A lap alternates over all runs, so that all see the same drift.

    A lap repeats a run for at least `least` seconds without waiting between calls: the host may run ahead, as in training.
    """
    calls = {name: max(1, math.ceil(1e3 * least / milliseconds(run, world, 3))) for name, run in runs.items()}
    seconds: dict[K, list[float]] = {name: [] for name in runs}
    for _ in range(laps):
        for name, run in runs.items():
            seconds[name].append(lap(partial(repeat, run, calls[name]), world) / calls[name])
    return seconds


def repeat(run: Callable[[], object], calls: int) -> None:
    """Call `run` so many times."""
    for _ in range(calls):
        run()


def measure(case: str, run: Callable[[], object], world: World, laps: int = LAPS, **more: Any) -> Row:
    """Measure time, peak memory and energy of a call, as a row; an error becomes a row too.

    joules: of one call, on all GPUs together; only where all of them count.
    """
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        ms = milliseconds(run, world, laps)
    except Exception as error:                      # raised on all ranks alike; other rows still count
        print(f"{case}: {reason(error)}", flush=True)
        return {"case": case, "gpus": world.size, "error": reason(error)}
    memory = torch.cuda.max_memory_allocated() / 1e9 if world.device.type == "cuda" else 0.0
    energy = joules_per_call(run, world, ms)
    row = {"case": case, "gpus": world.size, "ms": ms, "memory_gb": memory, **energy, **more}
    if PROFILE in sys.argv:
        row["communication_ms"], row["exposed_ms"] = profile(case if world.rank == 0 else "", run)
    if world.rank == 0:
        told = ", ".join(f"{name} {value:.4g}" for name, value in energy.items())
        told += ", " * bool(energy and more) + ", ".join(f"{name} {value}" for name, value in more.items())
        print(f"{case:40s} {world.size} GPUs  {ms:9.2f} ms  {memory:6.2f} GB  {told}", flush=True)
    return row


def joules_per_call(run: Callable[[], object], world: World, ms: float) -> Row:
    """{"joules": of one call, on all GPUs together}, over `ENERGY_S` seconds of calls that take `ms` each; {} if a GPU of a rank
    does not count. All ranks must call it."""
    if world.device.type != "cuda":
        return {}
    calls = max(1, math.ceil(1e3 * ENERGY_S / ms))   # alike on all ranks, as ms is
    with gpu_clock.energy_used(world.device) as used:
        lap(partial(repeat, run, calls), world)
    total = torch.tensor(used.get("joules", math.nan), dtype=torch.float64, device=world.device)
    if world.size > 1:
        dist.all_reduce(total)
    return {} if math.isnan(total.item()) else {"joules": total.item() / calls}


def profile(case: str, run: Callable[[], object]) -> tuple[float, float]:
    """Profile a call: (milliseconds in which the GPU communicates, the part of them in which it computes nothing). If the case
    has a name, also print the GPU time by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA,
                                            torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
        timing.wait(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if case:
        print(case, profiler.key_averages().table(sort_by="self_device_time_total", row_limit=14, max_name_column_width=60),
              flush=True)
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        return trace_breakdown.communication(trace_breakdown.read(Path(f"{folder}/trace.json")))
