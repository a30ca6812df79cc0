"""Number formats from their bits are PyTorch's, and the pictures count right."""

import numpy as np
import pytest
import torch

from course.lab.figures import number_formats as pictures

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "E5M2": torch.float8_e5m2,
         "E4M3": torch.float8_e4m3fn}


@pytest.mark.parametrize("name", TYPES)
def test_limits_are_those_of_pytorch(name):
    kind, info = pictures.FORMATS[name], torch.finfo(TYPES[name])
    assert (kind.largest, kind.normal) == (info.max, info.smallest_normal)
    assert 2.0**-kind.mantissa == info.eps
    tiny = torch.tensor(kind.smallest, dtype=torch.float64)
    assert tiny.to(TYPES[name]).double() == tiny and (0.4 * tiny).to(TYPES[name]) == 0


@pytest.mark.parametrize("name", ["E5M2", "E4M3"])
def test_all_numbers_of_an_8_bit_format(name):
    every = torch.arange(256, dtype=torch.uint8).view(TYPES[name]).double()
    positive = every[(every > 0) & every.isfinite()].sort().values
    assert pictures.numbers(pictures.FORMATS[name], 1e-9, 1e9).tolist() == positive.tolist()
    between = positive[(positive >= 1) & (positive <= 8)]
    assert pictures.numbers(pictures.FORMATS[name], 1, 8).tolist() == between.tolist()


def test_exponents_are_counted_in_percent():
    powers, percent = pictures.exponents(torch.tensor([1.0, -1.5, 2.0, 0.0, 2.0**-70]))
    found = {int(power): share for power, share in zip(powers, percent, strict=True) if share}
    assert found == {-60: 20, 0: 40, 1: 20}
    assert pictures.exponents(torch.zeros(4))[1].sum() == 0


def test_a_scale_moves_a_formats_bar():
    drawn = pictures.magnitudes({"x": torch.randn(100)}, {"E4M3": 1.0, "E4M3, scaled": 2.0**10}, "title")
    bars = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in drawn.axes[1].patches]
    assert bars == [(-6, pytest.approx(np.log2(448))), (-9, -6), (-16, pytest.approx(np.log2(448) - 10)), (-19, -16)]


def test_pictures_are_drawn():
    assert len(pictures.ranges().axes[0].patches) == 2 * len(pictures.FORMATS)
    ticks = [len(lines.get_segments()) for lines in pictures.steps().axes[0].collections]
    assert ticks == [3 * 128 + 1, 3 * 8 + 1, 3 * 4 + 1]
    assert len(pictures.amax_and_limits([1.0, 2.0], {"a": [1.0, 1.0], "b": [2.0, 2.0]}).axes[0].lines) == 3
