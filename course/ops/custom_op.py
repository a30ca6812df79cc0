"""Custom operators: plain PyTorch on a CPU, a Triton kernel on a GPU."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def register_operator(name: str, schema: str, plain: Callable[..., Any], module: str,
                      shapes: Callable[..., Any] | None = None) -> None:
    """Register `torch.ops.course.NAME` as a PyTorch operator, so that torch.compile does not trace into it.

    On a CPU it calls `plain`; on a GPU, the function of the same name in `course.MODULE`. `shapes`, or else `plain`, is the fake
    (meta) implementation, which gives the compiler the results' shapes and dtypes.
    """
    torch.library.define(f"course::{name}", schema)
    torch.library.impl(f"course::{name}", "cpu", plain)
    torch.library.impl(f"course::{name}", "cuda", with_kernel(name, plain, module))
    torch.library.register_fake(f"course::{name}", shapes or plain)


def with_kernel(name: str, plain: Callable[..., Any], module: str) -> Callable[..., Any]:
    """The GPU implementation: the kernel, or `plain` for float64, which the kernels do not support."""
    def run(*given: Any) -> Any:
        if any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in given):
            return plain(*given)
        # import late: the module may need Triton, which only machines with GPUs have
        return getattr(importlib.import_module(f"course.{module}"), name)(*given)

    return run
