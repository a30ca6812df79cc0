"""Operators that are a formula on a CPU and a Triton kernel on a GPU."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def register_operator(name: str, schema: str, plain: Callable[..., Any], module: str,
                      shapes: Callable[..., Any] | None = None) -> None:
    """Make `torch.ops.course.NAME`, an operator of PyTorch's, so that torch.compile takes it as it is.

    On a CPU it is `plain`, in plain operations; on a GPU the function of the same name in `course.MODULE`. `shapes`, or else
    `plain`, tells the compiler what comes out.
    """
    torch.library.define(f"course::{name}", schema)
    torch.library.impl(f"course::{name}", "cpu", plain)
    torch.library.impl(f"course::{name}", "cuda", with_kernel(name, plain, module))
    torch.library.register_fake(f"course::{name}", shapes or plain)


def with_kernel(name: str, plain: Callable[..., Any], module: str) -> Callable[..., Any]:
    """The same as `plain` in a kernel. float64, which kernels do not know, stays plain."""
    def run(*given: Any) -> Any:
        if any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in given):
            return plain(*given)
        # only now: it may import Triton, which only machines with GPUs have
        return getattr(importlib.import_module(f"course.{module}"), name)(*given)

    return run
