"""cuBLASLt's matmuls, through its C interface: what is behind `course.products` and `course.gelu` on a GPU.

For a product cuBLASLt offers a list of algorithms, the one first that it thinks fastest. PyTorch takes the first. An algorithm is
a family of kernels with a choice of tiles of the result, of clusters of programs that share factors, and of an option that is not
explained; cuBLASLt also accepts choices that it does not offer. Here those it offers and some others are timed (`trial.py`), once
for each shape, and of those that give the same bits the fastest is taken.

PyTorch also offers to what is trained none of its epilogues but the bias. The one here is DGELU (cuBLASLt's reference,
`cublasLtEpilogue_t`): da = (dy V) · GELU'(a), of GELU through tanh; there is no other. DGELU_BGRAD, which sums da over tokens
besides, takes twice as long as matmul, GELU's gradient and sum apart (results/gelu_h200.json).

cuBLASLt computes by columns what is stored by rows here, D' = B' A': its first factor is our second.
"""

import ctypes
import functools
import itertools
import math
import operator
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from course import trial
from course.gelu import gelu_linear_backward_plain, summed
from course.products import product_plain, weight_gradient_plain

HOPPER = (9, 0)
KINDS = {torch.bfloat16: 14, torch.float16: 2}      # cudaDataType_t: CUDA_R_16BF, CUDA_R_16F
FLOAT, COMPUTE_FLOAT = 0, 68                        # cudaDataType_t: CUDA_R_32F; cublasComputeType_t: CUBLAS_COMPUTE_32F
TURN = {"weight": 3, "x": 4}                        # cublasLtMatmulDescAttributes_t: TRANSA, TRANSB, of what is stored turned
EPILOGUE, BIAS_AT, AUX_AT, AUX_LD = 7, 8, 11, 12    # what follows the product; where its bias and its second factor are
NOTHING, BIAS, DGELU = 1, 4, 192                    # cublasLtEpilogue_t
WORKSPACE_LIMIT, ALIGNMENTS = 1, (5, 6, 7, 8)       # cublasLtMatmulPreferenceAttributes_t; of A, B, C and D
MUCH, WORKSPACE = 2**25, 1024                       # bytes that algorithms are asked for with, and may take
ALIGNED = 8                                         # numbers of 16 bits in 16 bytes, to which rows have to be aligned
LEAST, ENOUGH = 16, 256                             # bytes to which tensors are aligned: at least; more makes no difference
MOST = 16                                           # algorithms to ask for
TILE, OPTION, CLUSTER = 1, 5, 8                     # cublasLtMatmulAlgoConfigAttributes_t
# What else is tried. cublasLtMatmulTile_t: 128 x 128, 128 x 160, 160 x 128, 128 x 96. cublasLtClusterShape_t: 1 x 1, 2 x 1,
# 1 x 2. And options, fastest with these, of nine tiles, five clusters, eight options ("tiles" in results/products_h200.json).
TILES, CLUSTERS, OPTIONS = (20, 29, 30, 33), (2, 3, 5), (0, 1, 3)
USUAL = 65536, 3072, 768                            # m, n, k for which cuBLASLt offers fast ones with DGELU: GPT 124M's
WORK = 2e9                                          # multiplications from which on a choice is worth its trial: 6 us
Way = Callable[..., Tensor]                         # a product of (x, weight, and a bias or aux, if it has one)
LOCK = threading.Lock()                             # an address is set, then used: by one thread at a time


class Found(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`: an algorithm, and what cuBLASLt thinks of it."""

    _fields_ = (("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
                ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4))

    def set(self, attribute: int, value: Any) -> bool:
        """Change the algorithm; whether it knows such a value."""
        return not library().cublasLtMatmulAlgoConfigSetAttribute(ctypes.byref(self.algorithm), attribute, ctypes.byref(value),
                                                                  ctypes.c_size_t(ctypes.sizeof(value)))


@functools.cache
def library() -> Any:
    """cuBLASLt as PyTorch has loaded it; None if it is not there. No other: that would not know PyTorch's handle."""
    try:
        return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}", mode=os.RTLD_NOLOAD)
    except OSError:
        return None


def call(name: str, *given: Any) -> None:
    """Call a function of cuBLASLt. RuntimeError, with its cublasStatus_t, if it refuses."""
    if status := getattr(library(), name)(*given):
        raise RuntimeError(f"{name} of cuBLASLt says status {status} (its reference lists them under cublasStatus_t)")


def made(name: str, *given: Any) -> ctypes.c_void_p:
    """What a function of cuBLASLt creates."""
    handle = ctypes.c_void_p()
    call(name, ctypes.byref(handle), *given)
    return handle


def library_handle() -> ctypes.c_void_p:
    """PyTorch's own: a cublasHandle_t serves as a cublasLtHandle_t."""
    return ctypes.c_void_p(torch.cuda.current_blas_handle())


class Matmul:
    """Products of one shape and format, x (m, k) times weight (k, n) -> (m, n), and what follows in the same kernel: nothing, the
    sum with a bias, (n,), or the product with GELU' of aux, (m, n).

    aligned: all begin at multiples of so many bytes. cuBLASLt would suppose 256. turned: the factor that is stored as its
    transpose, "weight" as (n, k) or "x" as (k, m); "" if none is.
    """

    def __init__(self, m: int, n: int, k: int, kind: torch.dtype, aligned: int, turned: str = "", epilogue: int = NOTHING):
        self.aligned, self.kind, self.shape, self.address = aligned, kind, (m, n), {BIAS: BIAS_AT, DGELU: AUX_AT}.get(epilogue)
        self.chosen: tuple[Found | None] | None = None                  # once there was a trial, the algorithm that won
        self.what = made("cublasLtMatmulDescCreate", COMPUTE_FLOAT, FLOAT)
        self.set(EPILOGUE, ctypes.c_uint32(epilogue))
        if turned:
            self.set(TURN[turned], ctypes.c_int32(1))
        if epilogue == DGELU:
            self.set(AUX_LD, ctypes.c_int64(n))
        sizes = (k, n) if turned == "weight" else (n, k), (m, k) if turned == "x" else (k, m), (n, m)       # by columns
        self.layouts = [made("cublasLtMatrixLayoutCreate", KINDS[kind], ctypes.c_uint64(rows), ctypes.c_uint64(columns),
                             ctypes.c_int64(rows)) for rows, columns in sizes]
        self.offered = self.ask(MUCH) or self.ask(WORKSPACE)

    def set(self, attribute: int, value: Any) -> None:
        """An attribute of the product."""
        call("cublasLtMatmulDescSetAttribute", self.what, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def ask(self, limit: int) -> list[Found]:
        """The algorithms that cuBLASLt offers for this, the one that it thinks fastest first; none where it refuses.

        limit: bytes of workspace that they may take. Which it looks for depends on that, so they are asked for with much, and
        those that take little are kept: counters of tiles, but not sums over K that are cut in parts. So all add up in one order.
        """
        preference = made("cublasLtMatmulPreferenceCreate")
        found, count = (Found * MOST)(), ctypes.c_int()
        a, b, d = self.layouts
        for attribute, value in [(WORKSPACE_LIMIT, ctypes.c_uint64(limit)),
                                 *((which, ctypes.c_uint32(self.aligned)) for which in ALIGNMENTS)]:
            call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, ctypes.byref(value),
                 ctypes.c_size_t(ctypes.sizeof(value)))
        library().cublasLtMatmulAlgoGetHeuristic(library_handle(), self.what, a, b, d, d, preference, MOST, found,
                                                 ctypes.byref(count))
        call("cublasLtMatmulPreferenceDestroy", preference)
        return [by for by in found[:count.value] if by.state == 0 and by.workspace <= WORKSPACE]

    def others(self) -> list[Found]:
        """What cuBLASLt does not offer, but accepts: the first that it offers, with other tiles, clusters and options."""
        found = []
        for tile, cluster, option in itertools.product(TILES, CLUSTERS, OPTIONS) if self.offered else ():
            by = Found(algorithm=self.offered[0].algorithm)
            known = (by.set(TILE, ctypes.c_uint32(tile)) and by.set(CLUSTER, ctypes.c_uint16(cluster))
                     and by.set(OPTION, ctypes.c_uint32(option)))
            if known and (fit := self.fits(by)):
                found.append(fit)
        return found

    def fits(self, by: Found) -> Found | None:
        """An algorithm that was offered for another shape, and what cuBLASLt thinks of it for this; None if it refuses it."""
        found, (a, b, d) = Found(algorithm=by.algorithm), self.layouts
        status = library().cublasLtMatmulAlgoCheck(library_handle(), self.what, a, b, d, d, ctypes.byref(by.algorithm),
                                                   ctypes.byref(found))
        return None if status or found.workspace > WORKSPACE else found

    def run(self, by: Found, x: Tensor, weight: Tensor, extra: Tensor | None = None, *, out: Tensor) -> Tensor:
        """out = the product, by one of the algorithms; extra is the bias, or aux."""
        one, zero, (a, b, d) = ctypes.c_float(1), ctypes.c_float(0), self.layouts
        spare = torch.empty(WORKSPACE, dtype=torch.uint8, device=x.device)
        at = [ctypes.c_void_p(t.data_ptr()) for t in (weight, x, out, spare)]
        with LOCK:
            if self.address is not None and extra is not None:
                self.set(self.address, ctypes.c_void_p(extra.data_ptr()))
            call("cublasLtMatmul", library_handle(), self.what, ctypes.byref(one), at[0], a, at[1], b, ctypes.byref(zero), at[2],
                 d, at[2], d, ctypes.byref(by.algorithm), at[3], ctypes.c_size_t(WORKSPACE),
                 ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        return out


@functools.cache
def matmul(m: int, n: int, k: int, kind: torch.dtype, aligned: int, device: int, turned: str, epilogue: int) -> Matmul:
    """The products of a shape, described once."""
    return Matmul(m, n, k, kind, aligned, turned, epilogue)


def alignment(*tensors: Tensor) -> int:
    """A power of two, of which every tensor's first byte is a multiple: 256 or less."""
    bits = functools.reduce(operator.or_, (t.data_ptr() for t in tensors), ENOUGH)
    return bits & -bits


def suits(x: Tensor, *others: Tensor) -> bool:
    """Whether a choice is for these: all in one format of 16 bits, aligned and in aligned rows, on Hopper or later. Before, the
    epilogue costs more than the pass over memory that it spares (llm.c decides likewise)."""
    tensors = (x, *others)
    return (x.numel() > 0 and x.dtype in KINDS and all(t.dtype == x.dtype for t in tensors)
            and all(t.shape[-1] % ALIGNED == 0 for t in tensors) and alignment(*tensors) >= LEAST
            and torch.cuda.get_device_capability(x.device) >= HOPPER and library() is not None)


def product(x: Tensor, weight: Tensor, turned: bool, bias: Tensor | None) -> Tensor:
    """`course.products.product_plain`, by the fastest of the algorithms that give PyTorch's bits."""
    size = len(x), weight.shape[0 if turned else 1], x.shape[1]
    tensors = [t for t in (x, weight, bias) if t is not None]
    return tried(plain(turned), tensors, size, "weight" if turned else "", NOTHING if bias is None else BIAS)


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """`course.products.weight_gradient_plain`, likewise."""
    return tried(weight_gradient_plain, [dy, x], (dy.shape[1], x.shape[1], len(x)), "x")


def tried(way: Way, tensors: Sequence[Tensor], size: tuple[int, int, int], turned: str, epilogue: int = NOTHING) -> Tensor:
    """PyTorch's way to a product of the size (m, n, k), or the algorithm that won its trial, which is now if there was none."""
    tensors = [t.contiguous() for t in tensors]
    if math.prod(size) < WORK or not suits(*tensors):
        return way(*tensors)
    device = tensors[0].device
    with torch.cuda.device(device):
        one = matmul(*size, tensors[0].dtype, alignment(*tensors), device.index, turned, epilogue)
        if one.chosen is None and not torch.cuda.is_current_stream_capturing():
            one.chosen = choose(one, [*one.offered, *one.others()], tensors, way)
        by = one.chosen[0] if one.chosen else None
        return way(*tensors) if by is None else one.run(by, *tensors, out=tensors[0].new_empty(one.shape))


def plain(turned: bool) -> Way:
    """PyTorch's way to a product."""
    return lambda x, weight, bias=None: product_plain(x, weight, turned, bias)


def gelu_linear_backward(dy: Tensor, weight: Tensor, a: Tensor, total: bool) -> tuple[Tensor, Tensor]:
    """`course.gelu.gelu_linear_backward_plain`; the matmul and GELU's gradient in one kernel, if there is a fast one for these.

    Fast ones keep all multiprocessors busy with one wave of programs, each of which takes tile after tile. For some shapes, such
    as those of GPT 350M, cuBLASLt offers none of these, and what it offers takes longer than matmul and GELU's gradient apart;
    but those that it offers for another shape it accepts for these, too.
    """
    dy, weight, a = dy.contiguous(), weight.contiguous(), a.contiguous()
    if not suits(dy, weight, a):
        return gelu_linear_backward_plain(dy, weight, a, total)
    with torch.cuda.device(dy.device):
        m, n, k = dy.numel() // dy.shape[-1], a.shape[-1], dy.shape[-1]
        one = matmul(m, n, k, dy.dtype, alignment(dy, weight, a), dy.device.index, "", DGELU)
        fast = in_one_wave(one)
        if not fast:
            return gelu_linear_backward_plain(dy, weight, a, total)
        if one.chosen is None and len(fast) > 1 and not torch.cuda.is_current_stream_capturing():
            one.chosen = choose(one, fast, [dy.view(m, k), weight, a.view(m, n)])
        by = (one.chosen and one.chosen[0]) or fast[0]
        da = one.run(by, dy, weight, a, out=torch.empty_like(a))
    return da, summed(da, total)


@functools.cache                                    # of each product once: it asks the library eight times
def in_one_wave(one: Matmul) -> list[Found]:
    """The fast algorithms for a product with GELU's gradient, or, where cuBLASLt offers another first, those of another shape."""
    offered = one.offered
    if not offered or offered[0].waves > 1:
        usual = matmul(*USUAL, one.kind, one.aligned, torch.cuda.current_device(), "", DGELU)
        offered = [fit for by in usual.offered if (fit := one.fits(by))]
    return [by for by in offered if by.waves <= 1]


def choose(one: Matmul, algorithms: Sequence[Found], tensors: Sequence[Tensor], other: Way | None = None) -> tuple[Found | None]:
    """The fastest of the algorithms on tensors like these; None for another way, which is tried first.

    Only what gives the bits of the first way is taken: so a training is the same whatever was faster on its machine that day.
    Where there is no room for a trial it is the first.
    """
    ways: list[Found | None] = [*([None] if other else []), *algorithms]
    try:
        return (ways[trial.quickest(trial.compare(calls(one, algorithms, tensors, other)))],)
    except torch.cuda.OutOfMemoryError:
        return (ways[0],)


def calls(one: Matmul, algorithms: Sequence[Found], tensors: Sequence[Tensor], other: Way | None) -> list[Callable[[], Tensor]]:
    """What computes the product of random numbers, in the place of these tensors: another way, if there is one, and each
    algorithm. The first has a result of its own, the others share one: they are as large as what is computed."""
    generator = torch.Generator(tensors[0].device).manual_seed(0)       # none of the training's own
    x, weight, *more = (torch.empty_like(t).normal_(generator=generator) for t in tensors)
    out = x.new_empty(one.shape)
    found = [partial(one.run, by, x, weight, *more, out=out) for by in algorithms]
    if other:
        return [partial(other, x, weight, *more), *found]
    return [partial(one.run, algorithms[0], x, weight, *more, out=torch.empty_like(out)), *found[1:]]
