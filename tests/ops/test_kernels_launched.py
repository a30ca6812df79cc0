"""What the kernels written here are launched with, on tensors without memory: no GPU is needed to see that it is too much."""

import importlib
import sys
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from course.utils.errors import CourseError

MOST = 65535                                        # programs of a launch in any dim but the first, which has 2^31 - 1


class Kernel:
    """In the place of one: notes how many programs it is launched with."""

    def __init__(self, function: Any):
        self.launched: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given, **how: self.launched.append(tuple(grid))


@pytest.fixture
def kernels():
    """`course.ops.fused_add_norm_triton` on a machine without Triton."""
    triton, language = ModuleType("triton"), mock.MagicMock()
    triton.jit, triton.language = Kernel, language                      # type: ignore[attr-defined]
    triton.cdiv = lambda x, by: -(-x // by)                             # type: ignore[attr-defined]
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()        # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"triton": triton, "triton.language": language}):
        sys.modules.pop("course.ops.fused_add_norm_triton", None)
        yield importlib.import_module("course.ops.fused_add_norm_triton")
        sys.modules.pop("course.ops.fused_add_norm_triton", None)


def fits(kernel: Kernel) -> bool:
    (first, *others), = kernel.launched
    return first < 2**31 and all(1 <= number <= MOST for number in others)


@pytest.mark.parametrize(("rows", "width"), [(5, 8), (4_194_305, 3072), (2**27, 256)])
def test_gelu_takes_any_number_of_tokens(rows, width, kernels):
    x = torch.empty(rows, width, device="meta", dtype=torch.bfloat16)
    dx, sums = kernels.gelu_backward(x, x, True)
    assert (dx.shape, sums.shape) == (x.shape, (width,)) and fits(kernels.gelu_gradient)
    assert kernels.gelu_gradient.launched == [(-(-rows // kernels.SPAN) * -(-width // kernels.COLUMNS),)]
    kernels.gelu(x, True)
    assert fits(kernels.gelu_forward)


def test_norms_refuse_a_sample_that_is_too_long(kernels):
    row = torch.empty(1, 8, device="meta")

    def both(tokens: int) -> None:
        x = torch.empty(2, tokens, 8, device="meta")
        _, n, mean, rstd = kernels.add_norm(x, None, None, row, row, 1e-5, 0.0, x.dtype)
        kernels.add_norm_backward(None, n, x, None, None, row, mean, rstd, 0.0, False, x.dtype, x.dtype)

    both(MOST * kernels.ROWS)
    assert fits(kernels.forward) and fits(kernels.backward)
    with pytest.raises(CourseError, match="a sample of 2097121 tokens"):
        both(MOST * kernels.ROWS + 1)


def test_few_rows_are_shared_by_more_programs(kernels):
    """A GPU with 132 multiprocessors: one program for each row of a small sample, 32 rows each for a large batch."""
    with mock.patch.object(torch.cuda, "get_device_properties", lambda device: mock.Mock(multi_processor_count=132)):
        def rows(samples: int, tokens: int, programs: int) -> int:
            return kernels.rows_each(samples, tokens, programs, torch.device("cuda"))

        assert [rows(1, 1024, 6), rows(1, 1024, 1), rows(8, 1024, 6), rows(8, 1024, 1)] == [1, 4, 8, 32]
        assert rows(64, 1024, 6) == rows(64, 1024, 1) == 32
        assert rows(1, 1, 6) == 1
    x = torch.empty(2, 100, 8, device="meta")
    kernels.add_norm(x, None, None, x[:1, 0], x[:1, 0], 1e-5, 0.0, x.dtype)
    assert kernels.forward.launched == [(2, 4)]      # without a GPU, 6 programs in all suffice
