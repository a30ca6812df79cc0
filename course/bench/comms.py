"""`course bench comms`: time collectives over message sizes, and fit them to latency + bytes / bandwidth.

Sizes and bandwidths are those of nccl-tests (its doc/PERFORMANCE.md), for n ranks and S bytes:

                      S is                          bus bandwidth over algorithm bandwidth
    all-reduce        each rank's tensor            2(n-1)/n
    all-gather        the gathered tensor            (n-1)/n
    reduce-scatter    each rank's input              (n-1)/n
    all-to-all        each rank's tensor             (n-1)/n
    send/recv         each rank's message to the     1
                      next rank, all at once

Algorithm bandwidth is S / time. Bus bandwidth counts what crosses each rank's link, so that it compares with the link's
speed, for every operation and number of ranks. `link_of` fits the two numbers that the planner needs
(course/planner/hardware.yaml).
"""

import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

from course.bench import timing
from course.bench.layout_harness import by_turns
from course.parallel import World, joined, mappings
from course.parallel.mesh import launched
from course.planner import collectives
from course.planner.collectives import CALL, REACHED, Group
from course.planner.hardware import Link
from course.utils.errors import CourseError
from course.utils.machine import cores

SMALLEST, GROWTH = 1024, 4                           # bytes; from one size to the next
LARGEST = {"cpu": 64, "cuda": 256}                   # MiB
LAPS, LEAST = 11, 0.03                               # laps, of which each goes through all messages; seconds for each message
SHARES = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0}      # x (n-1)/n: bytes through a link

Points = Sequence[tuple[float, float]]               # (bytes, seconds)


def main(world: World, largest: float, small: bool = False) -> dict[str, Any]:
    """Measure on the ranks of this job, at least two. Returns the same results on every rank; rank 0 prints them.

    largest: MiB of the largest message; 0: 64 on CPUs, 256 on GPUs. small: few and small messages, only to test it.
    """
    most = 16 * SMALLEST if small else int((largest or LARGEST[world.device.type]) * 2**20)
    laps, least = (2, 0.0) if small else (LAPS, LEAST)
    messages = sizes(most, world.size)
    runs = operations(messages, world)
    times = by_turns(runs, world, laps, least)
    measured = {name: [(size, statistics.median(times[name, size])) for size in messages] for name in (*SHARES, "send/recv")}
    results = {**timing.machine(world.device), "cores": cores(), "backend": "nccl" if world.device.type == "cuda" else "gloo",
               "ranks": world.size, "command": f"course bench comms --ranks={world.size}" + " --small" * small, **summary(
                   measured, world.size)}
    if world.rank == 0:
        show(results)
    return results


def sizes(most: int, ranks: int) -> list[int]:
    """Message sizes in bytes: 1 kB, 4 kB, ... up to `most`, rounded up to whole float32 numbers for each rank."""
    unit = 4 * ranks
    return [math.ceil(SMALLEST * GROWTH**i / unit) * unit for i in range(1 + int(math.log(max(1, most / SMALLEST), GROWTH)))]


def operations(messages: Sequence[int], world: World) -> dict[tuple[str, int], Callable[[], object]]:
    """(name, bytes) -> a function that runs this collective once over all ranks, on float32 numbers in shared buffers."""
    buffers = [torch.zeros(max(messages) // 4, device=world.device) for _ in range(2)]
    runs: dict[tuple[str, int], Callable[[], object]] = {}
    for size in messages:
        whole, other = (buffer[:size // 4] for buffer in buffers)
        part = other[:len(other) // world.size]
        runs["all-reduce", size] = partial(dist.all_reduce, whole)
        runs["all-gather", size] = partial(mappings.all_gather_single, whole, part)
        runs["reduce-scatter", size] = partial(mappings.reduce_scatter_single, part, whole)
        runs["all-to-all", size] = partial(dist.all_to_all_single, other, whole)
        runs["send/recv", size] = partial(shift, whole, other, world)
    return runs


def shift(message: Tensor, received: Tensor, world: World) -> None:
    """Send a message to the next rank, and receive the previous rank's."""
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, message, (world.rank + 1) % world.size),
                                        dist.P2POp(dist.irecv, received, (world.rank - 1) % world.size)]):
        work.wait()


def share(name: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: the share of a message that crosses each rank's link."""
    return SHARES[name] * (ranks - 1) / ranks if name in SHARES else 1.0


def summary(measured: Mapping[str, Points], ranks: int) -> dict[str, Any]:
    """Rows with bandwidths in GB/s, a fit for each operation, and the link that fits all operations best.

    measured: operation -> [(bytes, seconds)]. A fit is {"latency_us", "bus_gb_s"}: time = latency + bus bytes / bandwidth.
    """
    link = link_of(measured, ranks)
    rows = [{"operation": name, "bytes": size, "us": 1e6 * time, "algorithm_gb_s": 1e-9 * size / time,
             "bus_gb_s": 1e-9 * share(name, ranks) * size / time, "link_us": 1e6 * predicted(name, size, ranks, link)}
            for name, points in measured.items() for size, time in points]
    fits = {}
    for name, points in measured.items():
        latency, per_byte = fit([(1.0, share(name, ranks) * size, time) for size, time in points])
        fits[name] = {"latency_us": 1e6 * latency, "bus_gb_s": 1e-9 / per_byte}
    return {"meaning": "medians of 11 laps on the slowest rank; bandwidths as in nccl-tests; link: for a hardware file of "
                       "the planner, link_us: what the planner predicts with it", "rows": rows, "fits": fits, "link": vars(link)}


def link_of(measured: Mapping[str, Points], ranks: int) -> Link:
    """The link with which the planner's formulas fit all operations best, by relative error."""
    steps = partial(predicted, size=0, ranks=ranks, link=Link("", 0, 1.0, math.inf))       # a latency of 1 s counts the steps
    latency, per_byte = fit([(steps(name) - CALL, share(name, ranks) * size, time - CALL)
                             for name, points in measured.items() for size, time in points])
    return Link("measured", ranks, latency, 1 / (REACHED * per_byte))


def fit(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(latency, seconds per byte), at least 0, of the least squared relative error over (steps, bytes, seconds).

    If large messages take no longer than small ones, the bandwidth is the highest one measured: a link has at least that.
    """
    steps, moved, time = np.array(points).T
    time = np.maximum(time, 1e-9)                    # below the planner's time of a call
    columns = np.stack([steps / time, moved / time], 1)
    latency, per_byte = np.linalg.lstsq(columns, np.ones(len(time)), rcond=None)[0]
    if latency < 0:                                  # then the best one is 0
        latency, per_byte = 0.0, columns[:, 1].sum() / (columns[:, 1] ** 2).sum()
    if per_byte <= 0:
        latency, per_byte = 1 / columns[:, 0].mean(), (time / moved).min()
    return float(latency), float(per_byte)


def predicted(name: str, size: float, ranks: int, link: Link) -> float:
    """Seconds of an operation, by the planner's formulas with one link between all ranks."""
    if name == "send/recv":
        return collectives.send(size, link)
    width = REACHED * link.bandwidth
    group = Group(ranks, (ranks - 1) * link.latency, math.ceil(math.log2(ranks)) * link.latency, width, (ranks - 1) / width)
    least = 1e-30                                    # bytes: the formulas give no time at all to an empty message
    return float(getattr(collectives, name.replace("-", "_"))(max(size, least), group))


def show(results: Mapping[str, Any]) -> None:
    """Print the measurements, the fit of each operation, and the link as an entry of a hardware file."""
    table = Table(title=f"{results['ranks']} ranks, {results['backend']}, {results['hardware']}", box=SIMPLE)
    for head in ("operation", "bytes", "us", "algorithm GB/s", "bus GB/s", "planner us"):
        table.add_column(head, justify="left" if head == "operation" else "right", no_wrap=True)
    for row in results["rows"]:
        table.add_row(row["operation"], f"{row['bytes']:,}", f"{row['us']:,.1f}", f"{row['algorithm_gb_s']:.3g}",
                      f"{row['bus_gb_s']:.3g}", f"{row['link_us']:,.1f}")
    Console(width=100).print(table)
    for name, found in results["fits"].items():
        print(f"{name:14s} {found['latency_us']:9.1f} us + bus bytes / {found['bus_gb_s']:.3g} GB/s")
    print(f"\nfor a hardware file of the planner (docs/using.md):\n{entry(results['link'])}", flush=True)


def entry(link: Mapping[str, Any]) -> str:
    """The link as YAML, in the form of course/planner/hardware.yaml."""
    return (f"links:\n  - {{name: {link['name']}, span: {link['span']}, latency: {link['latency']:.2e}, "
            f"bandwidth: {link['bandwidth']:.3e}}}")


def command(ranks: int, device: str, largest: float, small: bool, out: Path | None,
            record: Callable[[dict[str, Any], Path | None], None]) -> None:
    """Measure among the processes of torchrun or srun. A process that is alone starts `ranks` of them (0: all GPUs, or 2).

    Raises `CourseError` for one process, and if one fails.
    """
    if launched():
        with joined(device) as world:
            results = main(world, largest, small)
            if world.rank == 0:
                record(results, out)
        return
    count = ranks or (torch.cuda.device_count() if device == "cuda" else 2)
    if count < 2:
        raise CourseError("course bench comms measures messages between processes, and one process sends none: give --ranks=2 "
                          "or more; on one GPU, add --device=cpu")
    words = ["bench", "comms", f"--device={device}", f"--largest={largest}", *(["--small"] if small else []),
             *(["--out", str(out)] if out else [])]
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m",
                           "course.cli", *words],
                          env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")})
    if done.returncode:
        raise CourseError(f"course bench comms: one of {count} processes failed, and says why above")
