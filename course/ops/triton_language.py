"""Triton for code that also runs without a GPU: its interpreter runs the kernels where PyTorch finds no GPU.

    from course.ops.triton_language import tl, triton

Triton decides at each `@triton.jit` whether to interpret. So lessons, checks and tests import Triton from here, and this file
sets the environment variable TRITON_INTERPRET where it is not set. If it is 1, kernels are interpreted on a machine with a GPU
too. If it is 0, they are interpreted inside `interpreted()` alone, and the compiler can read them: checks of kernels run so. The
library's own dispatch does not change: it takes a kernel if a tensor is on a GPU.

Where Triton is not installed, `triton.jit` accepts a kernel, and launching it raises a `CourseError` that says what to do.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

import numpy as np
import torch

from course.utils.errors import CourseError

INTERPRET = "TRITON_INTERPRET"
INSTALLED = importlib.util.find_spec("triton") is not None
CURE = ('pip install "course[kernels]" (a CUDA build of PyTorch brings its own Triton)'
        if sys.platform == "linux" else "Triton is for Linux: use a Linux machine, a container or WSL")
if not torch.cuda.is_available():
    os.environ.setdefault(INTERPRET, "1")
INTERPRETED = os.environ.get(INTERPRET) == "1"


def missing(what: str) -> CourseError:
    """The error where Triton is not installed. what: what needs it."""
    return CourseError(f"{what} needs Triton, which is not installed; {CURE}")


class MissingKernel:
    """A kernel on a machine without Triton: it can be defined, and launching it raises `CourseError`."""

    def __init__(self, function: Callable[..., Any]):
        self.fn, self.__name__ = function, function.__name__

    def __getitem__(self, grid: Any) -> Callable[..., NoReturn]:
        def launch(*arguments: Any, **options: Any) -> NoReturn:
            raise missing(f"the kernel `{self.fn.__name__}`")

        return launch


class MissingTriton:
    """What a kernel's definition and its wrapper read from `triton` and `triton.language`, without Triton."""

    jit = MissingKernel
    constexpr = int

    @staticmethod
    def cdiv(x: int, y: int) -> int:
        """x / y, rounded up."""
        return -(-x // y)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        """The smallest power of two that is not less than n."""
        return 1 << (n - 1).bit_length()


@cache
def prepare_interpreter() -> None:
    """Mend what would make an interpreted kernel differ from a compiled one, or stop.

    Functions such as `tl.sum` are compiled functions if something imported Triton before TRITON_INTERPRET was set: interpreted
    kernels may call them. The interpreter multiplies the bits of bfloat16 matrices as integers, and cuts float32 off to bfloat16
    where a GPU rounds. Before Triton 3.9 it asks for the integer of an array with one dim, which NumPy 2.4 refuses.
    """
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    builder: Any = interpreter.InterpreterBuilder
    patch_tensor, dot, cast = interpreter._patch_lang_tensor, builder.create_dot, builder.cast_impl

    def patch_tensor_with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def rounding_cast(self: Any, source: Any, dtype: Any) -> Any:
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, dtype)
        rounded = torch.from_numpy(np.array(source.data)).to(torch.bfloat16)
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    def dot_of_numbers(self: Any, a: Any, b: Any, *others: Any) -> Any:
        a, b = (cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *others)

    def call_interpreted(self: Any, *arguments: Any, **options: Any) -> Any:
        scope = interpreter._patch_lang(self.fn)     # what it patches has to be as before, or nothing compiles afterwards
        try:
            return interpreter.InterpretedFunction(self.fn).rewrite()(*arguments, **options)
        finally:
            scope.restore()

    interpreter._patch_lang_tensor = patch_tensor_with_index
    builder.create_dot, builder.cast_impl = dot_of_numbers, rounding_cast
    JITFunction.__call__ = call_interpreted          # without an interpreter it only raises


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside the block, kernels are interpreted, also those that are compiled elsewhere. Their tensors are on the CPU."""
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    prepare_interpreter()
    run = JITFunction.run
    if hasattr(run, "interprets"):                   # a block inside such a block changes nothing
        yield
        return

    def run_interpreted(self: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        interpreter.InterpretedFunction(self.fn)[grid](*arguments, **options)

    run_interpreted.interprets = True                # type: ignore[attr-defined]
    JITFunction.run = run_interpreted
    try:
        yield
    finally:
        JITFunction.run = run


if INSTALLED:
    import triton
    import triton.language as tl

    if INTERPRETED:
        prepare_interpreter()
else:
    triton = tl = MissingTriton
