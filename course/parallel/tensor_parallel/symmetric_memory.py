"""Gather and scatter tokens through symmetric memory: each rank writes into the other ranks' memory over NVLink.

    gather     each rank writes its tokens into every rank's buffer; once all have, a matmul reads the whole
    scatter    each rank writes to every other rank that rank's part of its sums; once all have, each rank adds them up

NCCL does both in kernels, which need multiprocessors. They take turns with a matmul that fills the GPU, so that on two H100s a
collective beside a matmul is not hidden at all (bench/results/symmetric_2xh100.json). Here a GPU's copy engines, which need no
multiprocessors, do the transfers that are to be hidden. Kernels do the others; they are faster there up to 34 MB. The ranks of
the group must share a node.

Ranks write into a `DoubleBuffer`, which PyTorch's symmetric memory maps into all of them, with a barrier. It has two places, used
in turn. Passing the barrier of use k proves that every rank has begun use k, so has finished reading use k - 1, whose place use
k + 1 overwrites. This holds if all reads of a place are queued on the GPU before the next use begins. So no operator
(`overlapped_linear.py`) returns memory in a place.
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

BETWEEN_DEVICES = 4                                 # cudaMemcpyDefault: the addresses say from where to where
BEFORE = 2                                          # channel of the barrier before a graph's first use; 0 and 1: the places'

GRAPHS = itertools.count()                          # numbers of graphs
graph = next(GRAPHS)                                # number of the graph that is captured next, or now


def new_graph() -> None:
    """Call this before capturing a CUDA graph: each buffer's first use in the graph then begins with a barrier."""
    global graph
    graph = next(GRAPHS)


class DoubleBuffer:
    """Two places of one shape and dtype on each rank of an axis, into which all write. Raises `CourseError` if they cannot.

    A CUDA graph keeps its places, and nothing tells what runs before and after a replay. So a graph's first use, and every use
    outside once there is a graph, begins with an extra barrier. If an interrupted step leaves one rank a use behind, the ranks
    wait for each other forever, as with NCCL: each place has its own barrier.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, axis: Axis):
        memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
        torch.cuda.synchronize()                    # earlier errors do not count as errors of this
        try:
            self.own = memory.empty(2, *shape, dtype=dtype, device=torch.device("cuda", torch.cuda.current_device()))
            torch.cuda.synchronize()                # else the GPU could write its zeros after a faster rank's first tokens
            self.handle = memory.rendezvous(self.own, group_of(axis).group_name)
            self.places = [self.handle.get_buffer(rank, self.own.shape, dtype) for rank in range(axis.size)]
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CourseError(f"parallel.overlap=symmetric: these GPUs do not reach each other's memory "
                              f"({str(error).splitlines()[0]}): set parallel.overlap=nccl") from error
        self.uses, self.graph = 0, -1               # graph: the last one that uses this

    def enter(self) -> list[Tensor]:
        """Begin a use: its place on each rank."""
        if torch.cuda.is_current_stream_capturing():
            if self.graph != graph:
                self.handle.barrier(channel=BEFORE)
            self.graph = graph
        elif self.graph >= 0:
            self.handle.barrier(channel=BEFORE)
        self.uses += 1
        return [place[self.uses % 2] for place in self.places]

    def barrier(self) -> None:
        """Wait, on the GPU, until all ranks have reached this barrier in this use, and their writes have arrived."""
        self.handle.barrier(channel=self.uses % 2)


@functools.cache
def double_buffer(name: str, shape: tuple[int, ...], dtype: torch.dtype, axis: Axis) -> DoubleBuffer:
    """The buffer of a name and shape. All ranks of the axis make it together in its first use. It stays: graphs hold its
    address."""
    return DoubleBuffer(shape, dtype, axis)


@functools.cache
def side_stream(device: int) -> torch.cuda.Stream:
    """The stream of hidden transfers. Its priority puts their barriers before matmul blocks that wait for a multiprocessor."""
    return torch.cuda.Stream(device, priority=-1)


def is_supported(x: Tensor, axis: Axis, n: int) -> bool:
    """Whether symmetric memory can move n tokens per sample, of which this rank has x, (B, any, D): on a GPU, in equal pieces."""
    return x.is_cuda and n % axis.size == 0


class Gather:
    """An all-gather that begins when constructed, (B, n / tp, D) -> (B, n, D). Call it to get the n tokens, in the buffer."""

    def __init__(self, x: Tensor, axis: Axis, n: int, hidden: bool):
        room_ = double_buffer("gather", (len(x), n, x.shape[2]), x.dtype, axis)
        places = room_.enter()
        self.whole, self.stream = places[axis.rank], side_stream(x.device.index) if hidden else None
        self.x, t = x.contiguous(), n // axis.size  # kept, since it is read on another stream
        with on_stream(self.stream):
            for rank in ring_order(axis):           # this rank last
                copy_to_peer(places[rank][:, axis.rank * t:(axis.rank + 1) * t], self.x, hidden)
            room_.barrier()

    def __call__(self) -> Tensor:
        wait_for_stream(self.stream)
        return self.whole


class Scatter:
    """A reduce-scatter that begins when constructed, (B, T, D) -> (B, T / tp, D). Call it to get this rank's part of the sum."""

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
    """own, (B, t, D), plus all pieces, (n, B, t, D), except that of `rank`: in float32 or 64, rounded once -> (B, t, D)."""
    others = [piece for other, piece in enumerate(pieces) if other != rank]
    return torch.stack([own, *others]).sum(0, dtype=torch.promote_types(own.dtype, torch.float32)).to(own.dtype)


register_operator("add_up", "(Tensor own, Tensor pieces, int rank) -> Tensor", sum_pieces_plain,
                  "parallel.tensor_parallel.symmetric_memory_triton")


def ring_order(axis: Axis) -> list[int]:
    """All ranks, beginning with the one after this, so that no two ranks write to the same one at the same time."""
    return [(axis.rank + step) % axis.size for step in range(1, axis.size + 1)]


def copy_to_peer(there: Tensor, x: Tensor, engine: bool) -> None:
    """Copy x, (B, t, D) with contiguous samples, by a copy engine or by a kernel."""
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
    """The CUDA runtime that PyTorch has loaded, or None. It is needed because PyTorch copies several pieces with a kernel."""
    try:
        return ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}", mode=os.RTLD_NOLOAD)
    except OSError:
        return None


def on_stream(stream: torch.cuda.Stream | None) -> Any:
    """A context on a stream, which first waits for the current one; None: the current stream."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def wait_for_stream(stream: torch.cuda.Stream | None) -> None:
    """Make the current stream wait for the work so far on `stream`, if given."""
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
