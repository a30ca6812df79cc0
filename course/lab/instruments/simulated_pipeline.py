"""A pipeline whose stages sleep instead of computing: real messages and waits even with fewer cores than stages."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from course.config import Parallel
from course.parallel import build_mesh, join
from course.parallel.pipeline_parallel.runtime import Pipeline
from course.parallel.pipeline_parallel.schedules import Pass

FORWARD, BACKWARD = 0.04, 0.08                       # seconds that a pass through all chunks of a rank takes
PassTimes = dict[tuple[int, Pass], tuple[float, float]]  # (rank, pass) -> (start, end), like `timeline`


class Sleep(Function):
    """identity | identity; forward and backward sleep and record their times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pause: Any, chunk: int, micro: int, forward: float, backward: float) -> Tensor:
        ctx.pause, ctx.of, ctx.seconds = pause, (chunk, micro), backward
        pause(Pass("F", chunk, micro), forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.pause(Pass("B", *ctx.of), ctx.seconds)
        return grad.clone(), None, None, None, None, None


def run_pipeline(schedule: str, m: int, v: int = 1) -> PassTimes:
    """Run the library's pipeline over all ranks; returns, on every rank, (start, end) in seconds of all ranks' passes."""
    world = join("cpu")
    mesh = build_mesh(Parallel(pp=world.size, chunks=v), world)
    mine: list[tuple[Pass, float, float]] = []

    def pause(work: Pass, seconds: float) -> None:
        begin = time.time()
        time.sleep(seconds)
        mine.append((work, begin, time.time()))

    def one(chunk: int, micro: int, x: Any) -> Tensor:
        x = torch.ones(1, 1, requires_grad=True) if x is None else x                # (1, 1)
        y: Tensor = Sleep.apply(x, pause, chunk, micro, FORWARD / v, BACKWARD / v)
        return y.sum() if chunk == v - 1 and mesh.pp.rank == mesh.pp.size - 1 else y

    pipeline = Pipeline(mesh, schedule, v)
    pipeline.train(one, [1] * m)                     # warm-up: opens the connections between ranks
    mine.clear()
    dist.barrier()
    pipeline.train(one, [1] * m)
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, mine)
    start = min(begin for passes in everyone for _, begin, _ in passes)
    return {(rank, work): (begin - start, end - start) for rank, passes in enumerate(everyone) for work, begin, end in passes}
