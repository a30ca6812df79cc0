"""Bytes by counting, and bars of them; and the numbers that they count with are those of the library's blocks."""

import pytest
import torch

from course import config, models, parallel
from course.lab.exercises.lesson13_memory import training_bytes
from course.lab.figures import memory, profile
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


def test_a_lines_memory_has_its_color_and_the_peak_a_mark():
    """Also of a line whose name begins with _, which matplotlib would leave out of its legend."""
    events = [("alloc", 1, 4_000_000, "__call__: a"), ("alloc", 2, 1_000_000, "b"), ("free", 1, 4_000_000, ""),
              ("alloc", 3, 2_000_000, "b")]
    figure = profile.memory(events, most=1)
    axis, = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["__call__: a", "other lines"]
    assert axis.lines[0].get_xdata()[0] == 1         # after the second event, counted from 0
    assert max(axis.collections[0].get_paths()[0].vertices[:, 1]) == 4
    assert max(axis.collections[1].get_paths()[0].vertices[:, 1]) == 5


def test_a_timeline_tells_the_main_stream_from_others():
    def event(name, begin, end, stream, cat="kernel"):
        return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "args": {"stream": stream}}

    events = [event(name, *times, None, "user_annotation") for name, times in (
        ("data", (0, 10)), ("compute", (10, 80)), ("optimizer", (80, 100)))]
    events += [event("gemm", 10, 70, 7), event("normalize", 20, 30, 9), event("ncclDevKernel", 30, 99, 11),
               event("Memcpy HtoD", 5, 25, 9, "gpu_memcpy"), event("Memcpy DtoD", 70, 75, 7, "gpu_memcpy")]
    rows = profile.last_step(events)
    assert {name: lane for lane, name, *_ in rows if lane != "parts"} == {
        "gemm": "GPU", "normalize": "other streams", "ncclDevKernel": "communication", "Memcpy HtoD": "other streams",
        "Memcpy DtoD": "GPU"}
    axis, = profile.timeline(rows, until=60, since=20).axes
    assert axis.get_xlim() == (20, 60)
    assert all(bar.get_x() >= 20 and bar.get_x() + bar.get_width() <= 60 for bar in axis.patches)
