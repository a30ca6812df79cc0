"""cuBLASLt's matmul with GELU's gradient in its epilogue, through its C interface: what is behind `course.gelu` on a GPU.

PyTorch calls cuBLASLt for its linears, but of its epilogues offers to what is trained the bias alone. The one here is DGELU
(cuBLASLt's reference, `cublasLtEpilogue_t`): da = (dy V) · GELU'(a), of GELU through tanh; there is no other. DGELU_BGRAD, which
sums da over tokens besides, takes twice as long as matmul, GELU's gradient and sum apart (results/gelu_h200.json).

cuBLASLt computes by columns what is stored by rows here, D' = B' A': its first factor is the weight, its second the tokens.
"""

import ctypes
import functools
import operator
import os
import threading
from typing import Any

import torch
from torch import Tensor

from course.gelu import gelu_linear_backward_plain, summed

HOPPER = (9, 0)
KINDS = {torch.bfloat16: 14, torch.float16: 2}      # cudaDataType_t: CUDA_R_16BF, CUDA_R_16F
FLOAT, COMPUTE_FLOAT = 0, 68                        # cudaDataType_t: CUDA_R_32F; cublasComputeType_t: CUBLAS_COMPUTE_32F
EPILOGUE, AUX, AUX_LD, DGELU = 7, 11, 12, 192       # cublasLtMatmulDescAttributes_t, cublasLtEpilogue_t
WORKSPACE_LIMIT, ALIGNMENTS = 1, (5, 6, 7, 8)       # cublasLtMatmulPreferenceAttributes_t; of A, B, C and D
MUCH, WORKSPACE = 2**25, 1024                       # bytes that algorithms are asked for with, and may take
ALIGNED = 8                                         # numbers of 16 bits in 16 bytes, to which rows have to be aligned
LEAST, ENOUGH = 16, 256                             # bytes to which tensors are aligned: at least; more makes no difference
MOST = 8                                            # algorithms to ask for
LOCK = threading.Lock()                             # AUX is set, then used: by one thread at a time


class Found(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`: an algorithm, and what cuBLASLt thinks of it."""

    _fields_ = (("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
                ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4))


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
    """Products of one shape and format: (m, k) times a weight, (k, n), times GELU' of aux, (m, n) -> (m, n).

    aligned: all begin at multiples of so many bytes. cuBLASLt would suppose 256.
    """

    def __init__(self, m: int, n: int, k: int, kind: torch.dtype, aligned: int):
        self.aligned = aligned
        self.what = made("cublasLtMatmulDescCreate", COMPUTE_FLOAT, FLOAT)
        self.set(EPILOGUE, ctypes.c_uint32(DGELU))
        self.set(AUX_LD, ctypes.c_int64(n))
        self.layouts = [made("cublasLtMatrixLayoutCreate", KINDS[kind], ctypes.c_uint64(rows), ctypes.c_uint64(columns),
                             ctypes.c_int64(rows)) for rows, columns in ((n, k), (k, m), (n, m))]
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

    def run(self, by: Found, weight: Tensor, x: Tensor, aux: Tensor, out: Tensor) -> None:
        """out = the product, by one of the algorithms."""
        one, zero, (a, b, d) = ctypes.c_float(1), ctypes.c_float(0), self.layouts
        spare = torch.empty(WORKSPACE, dtype=torch.uint8, device=x.device)
        at = [ctypes.c_void_p(t.data_ptr()) for t in (weight, x, out, spare)]
        with LOCK:
            self.set(AUX, ctypes.c_void_p(aux.data_ptr()))
            call("cublasLtMatmul", library_handle(), self.what, ctypes.byref(one), at[0], a, at[1], b, ctypes.byref(zero), at[2],
                 d, at[2], d, ctypes.byref(by.algorithm), at[3], ctypes.c_size_t(WORKSPACE),
                 ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))


@functools.cache
def matmul(m: int, n: int, k: int, kind: torch.dtype, aligned: int, device: int) -> Matmul:
    """The products of a shape, described once."""
    return Matmul(m, n, k, kind, aligned)


def alignment(*tensors: Tensor) -> int:
    """A power of two, of which every tensor's first byte is a multiple: 256 or less."""
    bits = functools.reduce(operator.or_, (t.data_ptr() for t in tensors), ENOUGH)
    return bits & -bits


def suits(x: Tensor, *others: Tensor) -> bool:
    """Whether the epilogue is for these: all in one format of 16 bits, aligned and in aligned rows, on Hopper or later. Before,
    it costs more than the pass over memory that it spares (llm.c decides likewise)."""
    tensors = (x, *others)
    return (x.numel() > 0 and x.dtype in KINDS and all(t.dtype == x.dtype for t in tensors)
            and all(t.shape[-1] % ALIGNED == 0 for t in tensors) and alignment(*tensors) >= LEAST
            and torch.cuda.get_device_capability(x.device) >= HOPPER and library() is not None)


def gelu_linear_backward(dy: Tensor, weight: Tensor, a: Tensor, total: bool) -> tuple[Tensor, Tensor]:
    """`course.gelu.gelu_linear_backward_plain`; the matmul and GELU's gradient in one kernel, if there is a fast one for these.

    Fast algorithms keep all multiprocessors busy with one wave of programs, each of which takes tile after tile. Others, which
    cuBLASLt falls back to for some shapes, take longer than the matmul and GELU apart.
    """
    dy, weight, a = dy.contiguous(), weight.contiguous(), a.contiguous()
    if not suits(dy, weight, a):
        return gelu_linear_backward_plain(dy, weight, a, total)
    with torch.cuda.device(dy.device):
        product = matmul(dy.numel() // dy.shape[-1], a.shape[-1], dy.shape[-1], dy.dtype, alignment(dy, weight, a),
                         dy.device.index)
        if not product.offered or product.offered[0].waves > 1:
            return gelu_linear_backward_plain(dy, weight, a, total)
        da = torch.empty_like(a)
        product.run(product.offered[0], weight, dy, a, da)
    return da, summed(da, total)
