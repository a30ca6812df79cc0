"""The account of a step's time: every microsecond once, on traces whose answer is known."""

import json
from contextlib import nullcontext

import pytest
import torch

from course import config
from course.training import profile_run, profiler, trace_breakdown
from course.utils.errors import CourseError


def event(name, begin, end, cat="kernel", tid=1, correlation=None):
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "name": name, "cat": cat, "ts": begin, "dur": end - begin, "tid": tid, "args": args}


def launched(name, begin, end, number, at, tid=1):
    """A kernel, and the call on the host that launched it."""
    return [event(name, begin, end, "kernel", 7, number), event("cudaLaunchKernel", at, at + 1, "cuda_runtime", tid, number)]


STEP = [
    event("data", 0, 100, "user_annotation"), event("compute", 100, 500, "user_annotation"),
    event("gradients", 500, 600, "user_annotation"), event("optimizer", 600, 700, "user_annotation"),
    event(f"{trace_breakdown.BACKWARD}: Mm", 300, 480, "cpu_op", tid=2),
    event("Memcpy HtoD (Pinned -> Device)", 90, 120, "gpu_memcpy", 7, 1), event("cudaMemcpyAsync", 80, 81, "cuda_runtime", 1, 1),
    *launched("nvjet_tst_128x256", 150, 250, 2, 110),                       # forward
    *launched("cudnn_generated_fort_native_sdpa_sm90", 250, 350, 3, 120),
    *launched("sm90_xmma_gemm_e4m3bf16", 350, 450, 4, 310, tid=2),          # backward: launched within it, on its thread
    *launched("ncclDevKernel_AllReduce", 400, 650, 5, 320, tid=2),          # 50 hidden, 200 exposed, 40 of these beside a copy
    event("Memcpy DtoD (Device -> Device)", 560, 600, "gpu_memcpy", 7, 6),
    *launched("void at::native::multi_tensor_apply_kernel", 660, 760, 7, 620),
]


def test_every_microsecond_counts_once():
    found = trace_breakdown.account(STEP)
    assert found.steps == 1 and found.step == pytest.approx(0.76) and found.gpu
    assert {key: round(1000 * ms) for key, ms in found.time.items() if ms} == {
        "forward": 200, "backward": 100, "optimizer": 100, "communication": 200, "copy": 30, "data": 90, "launch": 40}
    assert sum(found.time.values()) == pytest.approx(found.step)
    assert {kind: round(1000 * ms) for kind, ms in found.kinds.items()} == {
        "attention": 100, "matmul": 200, "optimizer": 100, "other": 0}
    assert found.communication == pytest.approx(0.25) and found.hidden == pytest.approx(0.05)
    assert found.fp8 == pytest.approx(0.5)           # of the two matmuls' time


def test_communication_is_exposed_where_nothing_is_computed():
    assert trace_breakdown.communication(STEP) == pytest.approx((0.25, 0.2))
    assert trace_breakdown.communication([*STEP, event("gemm", 600, 640), event("gemm", 610, 630)])[1] == pytest.approx(0.16)
    assert trace_breakdown.communication([]) == (0, 0)


def test_its_words_and_picture():
    said = trace_breakdown.text(trace_breakdown.account(STEP))
    assert "a step takes 0.76 ms on the GPU" in said and "matmuls in FP8:    50%" in said and "idle: waiting for data" in said
    assert "0.05 ms hidden" in said
    drawn = trace_breakdown.picture(trace_breakdown.account(STEP), "a step")
    assert len(drawn.axes[0].patches) == 7 and drawn.axes[0].get_xlim()[1] == pytest.approx(0.76)


def test_what_is_no_trace_is_a_sentence(tmp_path):
    file = tmp_path / "trace.json"
    with pytest.raises(CourseError, match=r"there is no file .*trace.json: give a trace"):
        trace_breakdown.read(file)
    for content in ("{", "{}"):
        file.write_text(content)
        with pytest.raises(CourseError, match="no trace of PyTorch's profiler"):
            trace_breakdown.read(file)
    file.write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(CourseError, match="no whole step"):
        profile_run.main(str(file), [])


def test_a_preset_is_profiled(tmp_path, capsys):
    settings = ["data.source=mock", "train.device=cpu", "model.depth=2", "train.global_batch=2", f"log.dir={tmp_path}",
                "profile.after=1", "profile.steps=2"]
    trace = profile_run.main("vit-demo", settings)
    assert trace == tmp_path / "vit-demo/default/profile/trace-0.json.gz" and trace.with_name("trace-0.png").is_file()
    assert not (tmp_path / "vit-demo/default/checkpoints").exists()
    found = trace_breakdown.account(trace_breakdown.read(trace))
    assert found.steps == 2 and sum(found.time.values()) == pytest.approx(found.step)
    assert min(found.time["backward"], found.time["forward"]) > 0 and found.kinds["matmul"] > 0 and found.kinds["attention"] > 0
    assert f"a step takes {found.step:.2f} ms on the CPU, the mean of 2" in capsys.readouterr().out


def test_a_run_looks_into_its_steps(tmp_path, capsys):
    from course.training import trainer

    folder = trainer.main(config.load("vit-demo", [
        "data.source=mock", "train.device=cpu", "model.depth=1", "train.global_batch=2", "train.steps=5", "train.eval_every=0",
        "log.tensorboard=false", f"log.dir={tmp_path}", "profile.after=2", "profile.steps=2"]))
    assert trace_breakdown.account(trace_breakdown.read(folder / "profile/trace-0.json.gz")).steps == 2
    assert "profiled steps 3 to 4" in capsys.readouterr().out


NSYS = ["data.source=mock", "train.device=cpu", "model.depth=1", "train.global_batch=2", "profile.after=1", "profile.steps=2",
        "profile.tool=nsys", "log.tensorboard=false", "train.eval_every=0", "train.steps=4"]


@pytest.fixture
def called(monkeypatch) -> list[str]:
    """What is said to nsys, with parts of steps between, on a CPU that passes for a GPU."""
    calls: list[str] = []
    monkeypatch.setattr(profiler, "NsysWindow", type("NsysWindow", (profiler.NsysWindow,), {
        "__init__": lambda self, device: setattr(self, "device", device)}))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(profiler, "record_function", lambda name: calls.append(name) or nullcontext())
    return calls


ORDER = ["data", "compute", "gradients", "optimizer"]
RECORDED = ["wait", "start", *ORDER, *ORDER, "wait", "stop"]


def test_nsys_records_the_steps_of_the_window_alone(tmp_path, called):
    assert profile_run.main("vit-demo", [*NSYS, f"log.dir={tmp_path}"]) is None
    assert called == [*ORDER[1:], *RECORDED] and not (tmp_path / "vit-demo").exists()


def test_nsys_records_a_window_within_a_run(tmp_path, called, capsys):
    from course.training import trainer

    trainer.main(config.load("vit-demo", [*NSYS, f"log.dir={tmp_path}"]))
    assert called == [*ORDER, *RECORDED, *ORDER]
    assert "profiled steps 2 to 3: nsys writes its report when the run ends" in capsys.readouterr().out


def test_nsys_without_a_gpu_is_a_sentence(tmp_path):
    with pytest.raises(CourseError, match=r"profile.tool=nsys records GPUs.*profile.tool=pytorch"):
        profile_run.main("vit-demo", [*NSYS, f"log.dir={tmp_path}"])
