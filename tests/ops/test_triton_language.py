"""Triton where there is no GPU, and where it is not installed."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import torch

from course.ops import triton_language
from course.ops.triton_language import MissingTriton, tl, triton
from course.utils.errors import CourseError

needs_interpreter = pytest.mark.skipif(not (triton_language.INSTALLED and triton_language.INTERPRETED),
                                       reason="needs Triton and no GPU: pip install 'course[kernels]'")


def sum_of_rows(x, y, n, block: tl.constexpr):
    at = tl.arange(0, block)
    row = tl.load(x + tl.program_id(0) * n + at, mask=at < n, other=0.0)
    tl.store(y + tl.program_id(0), tl.sum(row, 0))


def round_numbers(x, y, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))


def multiply(x, y, z, n: tl.constexpr):
    at = tl.arange(0, n)[:, None] * n + tl.arange(0, n)[None, :]
    tl.store(z + at, tl.dot(tl.load(x + at), tl.load(y + at)))


@needs_interpreter
def test_interpreted_kernel_rounds_to_bf16_like_pytorch():
    x, y = torch.cat([torch.randn(60), torch.tensor([0.0, torch.inf, -torch.inf, 3e38])]), torch.empty(64, dtype=torch.bfloat16)
    triton.jit(round_numbers)[(1,)](x, y, 64)
    assert y.equal(x.bfloat16())


@needs_interpreter
def test_interpreted_kernel_multiplies_bf16_matrices():
    x, y = torch.randn(2, 16, 16).bfloat16()
    z = torch.empty(16, 16)
    triton.jit(multiply)[(1,)](x, y, z, 16)
    torch.testing.assert_close(z, x.float() @ y.float())


@pytest.mark.slow
@needs_interpreter
def test_kernels_run_if_triton_was_imported_before():
    """Then `tl.sum` is a compiled function."""
    code = ("import torch._dynamo, torch, triton.language as language\n"
            "from tests.ops.test_triton_language import sum_of_rows, triton\n"
            "assert type(language.sum).__name__ == 'JITFunction'\n"
            "y = torch.empty(3)\n"
            "triton.jit(sum_of_rows)[(3,)](torch.ones(3, 5), y, 5, 8)\n"
            "assert y.tolist() == [5, 5, 5]")
    subprocess.run([sys.executable, "-c", code], check=True, env={"PATH": "/usr/bin:/bin", "HOME": "/tmp"})


def test_a_kernel_without_triton_says_what_to_do_at_its_launch():
    kernel = MissingTriton.jit(sum_of_rows)
    assert kernel.__name__ == "sum_of_rows"
    with pytest.raises(CourseError, match="the kernel `sum_of_rows` needs Triton, which is not installed; "):
        kernel[(1,)](np.zeros(3))


def test_sizes_without_triton_are_those_with_it():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    import triton as installed

    for n in (1, 2, 3, 63, 64, 65):
        assert MissingTriton.next_power_of_2(n) == installed.next_power_of_2(n)
        assert MissingTriton.cdiv(n, 16) == installed.cdiv(n, 16)
