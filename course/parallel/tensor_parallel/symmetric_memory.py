"""Tokens gathered and scattered through each other's memory: each rank writes into the others' over NVLink.

    gather     a rank writes its tokens into every other's whole; once all have, a matmul reads it
    scatter    a rank writes the part of its sums that is another's into that rank's memory; once all have, each adds up

NCCL does both in kernels of its own, which need multiprocessors: with matmuls that fill a GPU they take turns, so that what is
beside a matmul is not hidden at all, on two H100s (bench/results/symmetric_2xh100.json). What is to be hidden here is written by
a GPU's copy engines, which need none; all else by kernels, which are faster there up to 34 MB. The group must share a node.

What ranks write into are *rooms*, memory that PyTorch's symmetric memory maps into all of them, with a barrier. A room has two
places, used by turns: who has passed a use's barrier knows that all others have begun it, so are done with the use before, in
whose place the next one is. That holds as long as what reads from a place is on the GPU's list before the next use begins: so an
operator (`overlapped_linear.py`) puts out nothing that lies there.
"""

import ctypes
import functools
import importlib
import itertools
import os
from typing import Any

import torch
from torch import Tensor

from course.ops.custom_op import register_operator
from course.parallel.mesh import Axis, group_of
from course.utils.errors import CourseError

BETWEEN_DEVICES = 4                                 # cudaMemcpyKind: cudaMemcpyDefault, whatever the addresses say
BEFORE = 2                                          # channel of the barrier before a graph's first use; 0 and 1: of the places

GRAPHS = itertools.count()                          # numbers of graphs
graph = next(GRAPHS)                                # of the one that is captured next, or now


def new_graph() -> None:
    """To be called before a CUDA graph is captured, of which each room's first use then begins with a barrier."""
    global graph
    graph = next(GRAPHS)


class DoubleBuffer:
    """Two places of one shape and format on each rank of an axis, into which all write. `CourseError` where they cannot.

    A CUDA graph has its places for good, and what is replayed before and after it is nobody's to know: so a graph's first use,
    and any outside once there is a graph, begins with a barrier more. Ranks of which one is a use behind, because a step broke
    off, wait for each other for ever, as they would with NCCL: each place has a barrier of its own.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, axis: Axis):
        memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
        torch.cuda.synchronize()                    # an error of what was before is none of this
        try:
            self.own = memory.empty(2, *shape, dtype=dtype, device=torch.device("cuda", torch.cuda.current_device()))
            torch.cuda.synchronize()                # zeros are written after what the GPU has to do: later than a faster rank
            self.handle = memory.rendezvous(self.own, group_of(axis).group_name)
            self.places = [self.handle.get_buffer(rank, self.own.shape, dtype) for rank in range(axis.size)]
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CourseError(f"parallel.overlap=symmetric: these GPUs do not reach each other's memory "
                              f"({str(error).splitlines()[0]}): set parallel.overlap=nccl") from error
        self.uses, self.graph = 0, -1               # the last graph that has it

    def enter(self) -> list[Tensor]:
        """This use's place on each rank."""
        if torch.cuda.is_current_stream_capturing():
            if self.graph != graph:
                self.handle.barrier(channel=BEFORE)
            self.graph = graph
        elif self.graph >= 0:
            self.handle.barrier(channel=BEFORE)
        self.uses += 1
        return [place[self.uses % 2] for place in self.places]

    def barrier(self) -> None:
        """Wait, on the GPU, until all ranks are here in this use, and what they have written is."""
        self.handle.barrier(channel=self.uses % 2)


@functools.cache
def double_buffer(name: str, shape: tuple[int, ...], dtype: torch.dtype, axis: Axis) -> DoubleBuffer:
    """The room of a name and shape, which all ranks of the axis make together in its first use. It stays: graphs have its
    address."""
    return DoubleBuffer(shape, dtype, axis)


@functools.cache
def side_stream(device: int) -> torch.cuda.Stream:
    """The stream of what is hidden. Its barriers go before the programs of a matmul that wait for a multiprocessor."""
    return torch.cuda.Stream(device, priority=-1)


def is_supported(x: Tensor, axis: Axis, n: int) -> bool:
    """Whether n tokens, of which a rank has x, (B, any, D), can go so: on a GPU, in equal pieces."""
    return x.is_cuda and n % axis.size == 0


class Gather:
    """Begun when it is made: the n tokens of each sample, (B, n / tp, D) -> (B, n, D). Call it to have them, in a room."""

    def __init__(self, x: Tensor, axis: Axis, n: int, hidden: bool):
        room_ = double_buffer("gather", (len(x), n, x.shape[2]), x.dtype, axis)
        places = room_.enter()
        self.whole, self.stream = places[axis.rank], side_stream(x.device.index) if hidden else None
        self.x, t = x.contiguous(), n // axis.size  # kept, since it is read on another stream
        with on_stream(self.stream):
            for rank in ring_order(axis):           # itself last
                copy_to_peer(places[rank][:, axis.rank * t:(axis.rank + 1) * t], self.x, hidden)
            room_.barrier()

    def __call__(self) -> Tensor:
        wait_for_stream(self.stream)
        return self.whole


class Scatter:
    """Begun when it is made: this rank's tokens of the sum of all ranks' x, (B, T, D) -> (B, T / tp, D). Call it to have them."""

    def __init__(self, x: Tensor, axis: Axis, hidden: bool):
        parts = x.contiguous().chunk(axis.size, 1)  # (B, T / tp, D) of each rank
        room_ = double_buffer("scatter", (axis.size, *parts[0].shape), x.dtype, axis)
        places = room_.enter()
        self.own, self.pieces, self.rank = parts[axis.rank], places[axis.rank], axis.rank
        self.stream = side_stream(x.device.index) if hidden else None
        with on_stream(self.stream):
            for rank in ring_order(axis)[:-1]:
                copy_to_peer(places[rank][axis.rank], parts[rank], hidden)
            room_.barrier()

    def __call__(self) -> Tensor:
        wait_for_stream(self.stream)
        out: Tensor = torch.ops.course.add_up(self.own, self.pieces, self.rank)
        return out


def sum_pieces_plain(own: Tensor, pieces: Tensor, rank: int) -> Tensor:
    """own, (B, t, D), + the sum of pieces, (n, B, t, D), but that of `rank`: in float32 or 64, rounded once -> (B, t, D)."""
    others = [piece for other, piece in enumerate(pieces) if other != rank]
    return torch.stack([own, *others]).sum(0, dtype=torch.promote_types(own.dtype, torch.float32)).to(own.dtype)


register_operator("add_up", "(Tensor own, Tensor pieces, int rank) -> Tensor", sum_pieces_plain,
                  "parallel.tensor_parallel.symmetric_memory_triton")


def ring_order(axis: Axis) -> list[int]:
    """All ranks, from the one after this: so that no two write to one at the same time."""
    return [(axis.rank + step) % axis.size for step in range(1, axis.size + 1)]


def copy_to_peer(there: Tensor, x: Tensor, engine: bool) -> None:
    """Copy (B, t, D), each sample in one piece of memory, by a copy engine or by a kernel."""
    run = cuda_runtime()
    if not engine or run is None:
        there.copy_(x)
        return
    piece = x[0].nbytes
    apart = [max(t.stride(0) * t.element_size(), piece) for t in (there, x)]            # a single sample's stride means nothing
    status = run.cudaMemcpy2DAsync(
        ctypes.c_void_p(there.data_ptr()), ctypes.c_size_t(apart[0]), ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(apart[1]),
        ctypes.c_size_t(piece), ctypes.c_size_t(len(x)), ctypes.c_int(BETWEEN_DEVICES),
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
    if status:
        raise RuntimeError(f"cudaMemcpy2DAsync says {status} (CUDA's reference lists it under cudaError_t)")


@functools.cache
def cuda_runtime() -> Any:
    """CUDA's runtime as PyTorch has loaded it; None if it is not there. PyTorch's own copies of several pieces are kernels."""
    try:
        return ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}", mode=os.RTLD_NOLOAD)
    except OSError:
        return None


def on_stream(stream: torch.cuda.Stream | None) -> Any:
    """The context of a stream that goes on from here; without one, of this."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def wait_for_stream(stream: torch.cuda.Stream | None) -> None:
    """Go on when a stream is done so far."""
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
