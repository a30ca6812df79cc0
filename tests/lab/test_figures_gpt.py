"""Samples cut from documents, bytes of logits, the grid in bars; and the sums of lesson 14 about the source's table."""

import pytest

from course import config, models
from course.bench.megatron_grid import CASES, Case
from course.data.text.sequences import Sequences
from course.lab.figures import gpt, style


def boxes(figure):
    return [(box.get_x(), box.get_width()) for box in figure.axes[0].patches]


@pytest.mark.parametrize(("lengths", "context"), [([7, 4, 13, 2, 9], 8), ([3, 0, 5], 4), ([9], 8), ([4], 8)])
def test_samples_are_cut_as_the_library_cuts_them(lengths, context, tmp_path):
    import numpy as np

    from course.data.text import indexed_files
    from course.utils.errors import CourseError

    with indexed_files.document_writer(tmp_path / "train", 300) as writer:
        for length in lengths:
            writer.add(np.zeros(length, np.int64))
    try:
        samples = len(Sequences(str(tmp_path), "train", context, 300))
    except CourseError:                              # too few tokens
        samples = 0
    found = boxes(gpt.packed_samples(lengths, context))
    assert found[:sum(lengths)] == [(token, 1) for token in range(sum(lengths))]
    assert found[sum(lengths):] == [box for i in range(samples) for box in ((i * context, context), ((i + 1) * context, 1))]


def test_bars_carry_their_numbers_and_kinds_their_colors():
    axis, = style.bars({"a": 1.0, "b": 20_000.0}, "GB", "title").axes
    assert [bar.get_width() for bar in axis.patches] == [1.0, 20_000.0]
    assert [text.get_text() for text in axis.texts] == ["1", "20,000"]
    assert [gpt.kind(layout) for layout in ((1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 4), (2, 8, 2))] == [
        "one GPU", "dp", "tp", "pp", "several"]


def test_the_grid_has_three_panels_of_all_cases():
    figure = gpt.grid(CASES, "all")
    assert [axis.get_xlabel() for axis in figure.axes] == ["ms an iteration", "MiB of a GPU", "TFLOP/s of a GPU"]
    assert all(len(axis.patches) == len(CASES) for axis in figure.axes)
    assert [bar.get_width() for bar in figure.axes[0].patches] == [case.ms for case in CASES]


def test_tflops_by_hand():
    """6 FLOPs a parameter and token, and attention's 12·T·D a token and block."""
    case = Case("1x1x1_2_1536x16", 2, 464, 14362)
    tokens = 2 * 2048
    by_hand = tokens * (6 * (12 * 16 * 1536**2 + 50304 * 1536) + 12 * 2048 * 1536 * 16) / 0.464 / 1e12
    assert gpt.tflops(case) == pytest.approx(by_hand) == pytest.approx(2 * gpt.tflops(case, 928))


@pytest.mark.parametrize("cases", gpt.GROUPS)
def test_the_widget_draws_every_group(cases):
    assert len(gpt.explore_cases(cases).axes[0].patches) == len(gpt.GROUPS[cases]) > 1


def test_measured_rows_have_a_panel_for_each_software_and_leave_errors_out():
    rows = [{"case": "1x4x1_16_1536x16", "by": by, "tflops": 100.0} for by in ("course", "megatron-core")]
    figure = gpt.measured([*rows, {"case": "1x8x1_16_1536x16", "by": "course", "error": "out of memory"}])
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["course", "megatron-core"]
    assert all(len(axis.patches) == 1 for axis in figure.axes)


def test_a_table_has_a_row_for_each_case_and_a_column_for_each_software():
    one = {"case": "1x4x1_16_1536x16", "source": "1x8x1_16_1536x16", "gpus": 4}
    rows = [{**one, "by": "course", "ms": 51.2, "mib": 9000.4, "tflops": 400.0},
            {**one, "by": "megatron-core", "error": "too large"},
            {"case": "1x1x1_2_1536x16", "source": "1x1x1_2_1536x16", "gpus": 1, "by": "course", "ms": 9.0, "mib": 1, "tflops": 2}]
    assert gpt.table(rows) == {
        "1x4x1_16_1536x16": {"stands for": "1x8x1_16_1536x16", "GPUs": "4", "course": "51 ms, 9,000 MiB, 400 TFLOP/s",
                             "megatron-core": "too large"},
        "1x1x1_2_1536x16": {"stands for": "", "GPUs": "1", "course": "9 ms, 1 MiB, 2 TFLOP/s", "megatron-core": ""}}


def test_bytes_of_logits():
    c = config.load("gpt-124m").model
    assert gpt.logits_bytes(64, c.context, c.vocab) == 64 * 1024 * 50304 * 4
    assert gpt.logits_bytes(64, c.context, c.vocab, tp=8, chunk=4096) == 4096 * 50304 // 8 * 4
    assert gpt.logits_bytes(1, 10, 16, chunk=4096) == 10 * 16 * 4          # fewer tokens than a chunk
    assert [bar.get_width() for bar in gpt.explore_logits(50304, 64, 8, 4096).axes[0].patches] == pytest.approx(
        [13.187, 0.103, 19.327], abs=1e-3)


def test_parameters_that_the_lesson_counts():
    llama = ["model.norm=rms", "model.mlp=swiglu", "model.position=rotary", "model.bias=false", "model.tied=false"]
    c = config.load("gpt-7b", [*llama, "model.vocab=32000", "model.mlp_width=11008", "model.context=4096"])
    assert sum(p.numel() for p in models.build_model(c.model).parameters()) == 6_738_415_616          # as published
