"""Bytes by counting, and bars of them; and the numbers that they count with are those of the library's blocks."""

import pytest
import torch

from course import config, models, parallel
from course.lab.exercises.lesson13_memory import training_bytes
from course.lab.figures import memory
from course.lab.instruments.tensor_memory import MemoryMeter
from course.training.activation_checkpointing import checkpoint_activations


@pytest.mark.parametrize("stage", range(4))
def test_footprint_of_parameters(stage):
    size, dp = "7 B", 8
    found = memory.footprint(size, "fp32", dp, stage, "none")
    width, depth = memory.SIZES[size]
    assert [found[kind] * 1e9 for kind in ("weights", "gradients", "optimizer states")] == pytest.approx(
        training_bytes(12 * depth * width**2, dp, stage))
    assert sum(memory.PRECISIONS["bf16"]) == sum(memory.PRECISIONS["fp32"]) == 16


@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_what_a_block_keeps(how):
    """In units of (B, T, D): the difference between five blocks and four."""
    def kept(depth: int) -> float:
        c = config.load("vit-demo", [f"model.depth={depth}"])
        model = parallel.initialize_serial(models.build_model(c.model), 0, torch.device("cpu"), torch.float32)
        checkpoint_activations(model, how)
        batch = model.prepare(model.example(2, torch.device("cpu")), torch.zeros((), dtype=torch.int64))
        with MemoryMeter() as meter:
            output = model(batch)
            assert output.requires_grad
            return meter.now / (2 * c.model.tokens * c.model.dim * 4)

    assert kept(5) - kept(4) == pytest.approx(memory.KEPT[how], abs=0.1)


@pytest.mark.parametrize("size", memory.SIZES)
def test_the_widget_draws_every_corner(size):
    for zero, how in ((0, "none"), (1, "selective"), (3, "full")):
        assert memory.explore_memory(size, "bf16", 8, zero, how).axes


def test_saving_more_never_needs_more():
    totals = [sum(memory.footprint("13 B", "bf16", 8, zero, how).values())
              for zero in range(4) for how in ("none", "selective", "full")]
    assert all(a > b for a, b in zip(totals[::3], totals[3::3], strict=False))
    assert all(totals[i] > totals[i + 1] > totals[i + 2] for i in range(0, 12, 3))
