"""What lesson 02 shows of a recorded step, and its pictures."""

import pytest

from course.bench.results import load
from course.lab.figures import profile
from course.training import trace_breakdown
from tests.training.test_trace_breakdown import STEP, event


def test_a_timeline_is_the_last_step_in_lanes():
    earlier = [{**one, "ts": one["ts"] - 10_000} for one in STEP]
    rows = profile.last_step([*earlier, *STEP, event("other thread", 50, 60, "cpu_op"),
                                       event("python", 0, 700, "python_function")])
    lanes = {lane: [row[1] for row in rows if row[0] == lane] for lane in {row[0] for row in rows}}
    assert lanes["parts"] == ["data", "compute", "gradients", "optimizer"]
    assert len(lanes["launches"]) == 5 and len(lanes["GPU"]) == 6            # copies are launched by another call
    assert lanes["communication"] == ["ncclDevKernel_AllReduce"] and set(lanes) == {"parts", "launches", "GPU", "communication"}
    first = next(row for row in rows if row[1].startswith("nvjet"))
    assert first == ["GPU", "nvjet_tst_128x256", "matmul", 150.0, 250.0]


def test_on_a_cpu_the_operators_have_a_lane():
    host = [event("data", 0, 10, "user_annotation"), event("optimizer", 80, 100, "user_annotation"),
            event("aten::mm", 20, 60, "cpu_op"), event("MmBackward0", 60, 80, "cpu_op")]
    assert [row[:3] for row in profile.last_step(host) if row[0] == "operators"] == [["operators", "aten::mm", "matmul"]]


def test_pictures_of_a_step():
    rows = profile.last_step(STEP)
    axis, = profile.timeline(rows, "a step").axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["parts", "launches", "GPU", "communication"]
    assert len(axis.patches) == len(rows) and {"compute", "optimizer"} <= {text.get_text() for text in axis.texts}
    short, = profile.timeline(rows, until=200).axes
    assert short.get_xlim()[1] == 200 and len(short.patches) < len(rows)
    found = trace_breakdown.account(STEP)
    bars, = profile.shares({"one": found.time, "half": {"forward": 1.0, "data": 1.0}}).axes
    widths = [patch.get_width() for patch in bars.patches]
    assert sum(widths) == pytest.approx(200) and "half: 2 ms" in [label.get_text() for label in bars.get_yticklabels()]


def test_blocks_are_drawn_from_attention_to_attention():
    rows = [["parts", "compute", "", 0, 100]] + [["GPU", "kernel", kind, start, start + 4] for kind, start in (
        ("matmul", 5), ("attention", 10), ("other", 15), ("attention", 20), ("matmul", 30), ("other", 26), ("attention", 40))]
    assert profile.one_block(rows) == [("attention", 0, 4), ("other", 6, 10), ("matmul", 10, 14)]
    axis, = profile.blocks({"a": rows, "b": rows}).axes
    assert [text.get_text() for text in axis.texts] == 2 * [" 3 kernels"]
    assert [patch.get_width() for patch in axis.patches] == 6 * [4]


def test_a_compiled_block_has_fewer_kernels_and_takes_less_time():
    timelines = load("profile_compiled_h200")["timelines"]
    eager, compiled = (profile.one_block(timelines[f"16 samples, bf16{more}"]) for more in ("", ", compiled"))
    assert len(compiled) < len(eager) and compiled[-1][2] < eager[-1][2]
