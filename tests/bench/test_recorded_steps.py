"""Rows of the recorded results and the configurations that they stand for."""

import statistics
from unittest import mock

import pytest

from course.bench import recorded_steps
from course.planner import block_time, peak_memory
from course.utils.errors import CourseError

STEPS = recorded_steps.steps()


def test_a_step_has_the_gpus_of_its_configuration():
    for step in STEPS:
        p = step.config.parallel
        assert p.pp * p.dp * p.cp * p.tp == step.gpus, step.name
        assert step.ms > 0 and step.memory_gb > 0 and step.time.step > 0


def test_rows_are_left_out_for_a_reason():
    """What is not there is of another library, or of code that has changed."""
    for file in ("tp_", "tp_vit_", "cp_", "pp_", "dp_"):
        rows = recorded_steps.rows(file)
        out = [row for row in rows if not any(step.file == file and step.ms == row["ms"] for step in STEPS)]
        assert all("PyTorch" in row["case"] or "DTensor" in row["case"] for row in out), out
        assert len(out) < len(rows)


def test_what_is_measured_without_an_update_is_predicted_without():
    for step in STEPS:
        assert (step.time.optimizer > 0) == (step.kind == "step"), step.name


def test_memory_of_models_on_one_gpu_is_predicted_too():
    off = {step.name: peak_memory.predict(step.config).allocated / 1e9 / step.memory_gb - 1 for step in STEPS
           if step.kind == "step" and step.gpus == 1 and not step.name.startswith(("zero", "tp_vit"))}
    assert len(off) > 30
    thin = off.pop("gpt: 124M: bf16, compiled, narrow stream, full recomputation")      # 5 GB, of which little is activations
    off.pop("gpt: 350M: fp8, compiled, narrow stream, Triton kernels, in a graph")     # looked at next
    assert not {name for name, error in off.items() if abs(error) > 0.03} and abs(thin) < 0.04


def test_where_the_first_step_is_the_fullest_its_peak_is_what_is_predicted():
    """With delayed scales it multiplies in 16 bits, and 350M's activations are more of its memory than Adam's states."""
    (step,) = [step for step in STEPS if step.name == "gpt: 350M: fp8, compiled, narrow stream, Triton kernels, in a graph"]
    (row,) = [row for row in recorded_steps.rows("gpt_") if row["ms"] == step.ms]
    found = peak_memory.predict(step.config)
    assert found.moment == "first" and step.memory_gb == row["first_gb"] > 1.05 * row["memory_gb"]
    assert found.allocated / 1e9 == pytest.approx(row["first_gb"], rel=0.005)


def test_what_is_hidden_costs_what_averaged_gradients_cost_four_h200s():
    """`BESIDE`, from steps with and without averaged gradients on one machine; on another they lost more, 85% in the mean.
    Overlapped linears and the ring, from which it was not taken, are off by 4% in the median with it; with the 0.25 that an
    engineer would guess (32 of 132 multiprocessors) by 9%."""
    found = {step.name.removeprefix("dp 4: "): step for step in recorded_steps.data() if step.gpus == 4}

    def shares(rows):
        ms = {f"{row['case']}, {row['bucket_mb']:.0f} MB": row["ms"] for row in rows if row["gpus"] == 4}
        for way, step in found.items():
            if way.startswith(("bucketed", "ddp")) and not way.startswith("ddp, compiled"):     # whose graph DDP cuts
                alone = ms[f"none{', compiled' * ('compiled' in way)}, 25 MB"]
                shown = step.time.data - block_time.BESIDE * step.time.hidden
                yield ((ms[way] - alone) / 1e3 - shown) / step.time.hidden

    first, later = (list(shares(recorded_steps.rows(file))) for file in ("beside_", "dp_"))
    assert len(first) == len(later) == 6 and min(first + later) > 0.5 and max(first) < 0.9 and max(later) < 1.2
    assert statistics.mean(first) == pytest.approx(block_time.BESIDE, abs=0.005)
    assert statistics.mean(later) == pytest.approx(0.85, abs=0.005)

    def others() -> dict[str, float]:
        return {step.name: abs(step.error) for part in (recorded_steps.tensor, recorded_steps.tensor_vit, recorded_steps.context)
                for step in part()
                if step.gpus > 1 and ("overlap" in step.name or "ring" in step.name)}

    taken = others()
    with mock.patch.object(block_time, "BESIDE", 0.25):
        guessed = others()
    even = [error for name, error in taken.items() if not name.startswith("tp_vit 4")]  # its tokens are uneven
    assert len(taken) == 22 and len(even) == 19 and statistics.median(even) < 0.04
    assert [f"{statistics.median(off.values()):.0%}" for off in (guessed, taken)] == ["9%", "4%"]


def test_a_missing_file_gets_a_sentence():
    with pytest.raises(CourseError, match=r"there is no recorded result nothing_h200.*; there are .*gpt_h200"):
        recorded_steps.rows("nothing_")


def test_most_recorded_steps_are_predicted_well():
    off = [abs(step.error) for step in STEPS]
    whole = [step for step in STEPS if step.kind == "step"]
    near = sum(abs(peak_memory.predict(step.config).allocated / 1e9 / step.memory_gb - 1) <= 0.05 for step in whole)
    assert (near, len(whole)) == (89, 93) and statistics.median(off) < 0.03 and sum(error > 0.25 for error in off) <= 3


def test_steps_of_one_sample_in_a_graph_are_predicted_within_20_percent():
    """They are hundreds of kernels of a few microseconds: what is not counted one by one shows here."""
    off = {step.name: step.error for step in STEPS if "one sample" in step.name and "in a graph" in step.name}
    assert len(off) == 4 and max(map(abs, off.values())) < 0.2, off
