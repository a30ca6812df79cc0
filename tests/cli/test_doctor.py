import sys
import time
from types import SimpleNamespace

import pytest

from course.cli import doctor
from course.cli.doctor import Row
from course.utils.errors import CourseError


def test_the_table_is_printed_and_nothing_is_needed(capsys):
    assert doctor.main() == 0
    out = capsys.readouterr().out
    for what in ("Python", "PyTorch", "CUDA", "cuDNN", "NCCL", "GPU", "FP8", "Triton", "Transformer Engine", "DALI", "HDF5",
                 "Slurm"):
        assert what in out


@pytest.mark.parametrize(("capability", "has"), [
    ((7, 0), {"fp16"}), ((8, 0), {"fp16", "tf32", "bf16"}), ((8, 9), {"fp16", "tf32", "bf16", "fp8"}),
    ((9, 0), {"fp16", "tf32", "bf16", "fp8"}), ((10, 0), {"fp16", "tf32", "bf16", "fp8", "mxfp8"})])
def test_formats_go_by_compute_capability(capability, has):
    assert {row.need for row in doctor.precisions(capability) if row.ok} == has


def test_the_same_formats_can_be_needed_with_and_without_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    without = doctor.precision_rows()
    assert [row.need for row in without] == [row.need for row in doctor.precisions((9, 0))]
    assert doctor.missing(without, ["tf32", "bf16"]) == ["TF32: needs a GPU of compute capability 8.0 or more"]
    found = {row.need: row.found for row in without}
    assert "not fast" not in found["bf16"]
    assert all("to be fast" in found[need] and "same values, slowly" in found[need] for need in ("fp16", "fp8"))


@pytest.mark.parametrize(("script", "told"), [("", "not installed"), ("echo slurm 99", "slurm 99"),
                                              ("exit 1", "installed, not configured")])
def test_slurm_without_a_cluster_is_not_called_missing(monkeypatch, tmp_path, script, told):
    """Its programs fail, whatever they are asked, where they find no slurm.conf."""
    if script:
        (tmp_path / "sinfo").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    row, *_ = doctor.tool_rows()
    assert row.found == told and row.ok is (True if "99" in told else None)
    assert ("cluster start" in row.cure) == ("exit" in script)


@pytest.mark.parametrize(("installed", "interpreted", "words"), [
    (True, True, "interprets kernels on the CPU"), (True, False, "compiles kernels for the GPU"), (False, True, "not installed")])
def test_triton_is_named_with_what_it_does_here(monkeypatch, installed, interpreted, words):
    monkeypatch.setattr(doctor.triton_language, "INSTALLED", installed)
    monkeypatch.setattr(doctor.triton_language, "INTERPRETED", interpreted)
    monkeypatch.setattr(doctor.triton_language, "triton", SimpleNamespace(__version__="3.9.0"))
    row = doctor.triton_row()
    assert words in row.found and row.ok is (True if installed else None) and bool(row.cure) is not installed


def test_only_what_is_asked_for_can_be_missing():
    rows = [Row("A", "there", True, need="a"), Row("B", "broken", False, "mend it", "b"), Row("C", "absent", None, need="c")]
    assert doctor.missing(rows, []) == [] == doctor.missing(rows, ["a"])
    assert doctor.missing(rows, ["a", "b", "c"]) == ["B: broken; cure: mend it", "C: absent"]
    with pytest.raises(CourseError, match="it is one of a, b, c"):
        doctor.missing(rows, ["d"])


def test_needs_decide_the_exit_status(monkeypatch, capsys):
    rows = [Row("FP8", "no", None, need="fp8"), Row("HDF5", "yes", True, need="hdf5")]
    monkeypatch.setattr(doctor, "examine", lambda: rows)
    assert doctor.main("hdf5") == 0 and doctor.main("hdf5, fp8") == 1
    assert "missing: FP8" in capsys.readouterr().out
    with pytest.raises(CourseError, match="did you mean 'fp8'"):
        doctor.main("fp9")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Write a package that does something on import, and examine it as if it were DALI."""
    def make(body: str) -> Row:
        (tmp_path / "fakepackage.py").write_text(body)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
        code = "import fakepackage\nanswer['x'] = fakepackage.x"
        return doctor.package_row("Fake", "fakepackage", "pip", code, "install it", "fake",
                                  lambda version, answer: Row("Fake", f"{version} x={answer['x']}", True, need="fake"))
    return make


@pytest.mark.parametrize(("body", "ok", "words"), [
    ("x = 3", True, "x=3"),
    ("print('noise'); x = 4", True, "x=4"),
    ("raise ImportError('libfoo.so: undefined symbol: bar')", False, "undefined symbol: bar"),
    ("import os; os.abort()", False, "crashed (signal 6)"),
    ("import os; os._exit(3)", False, "status 3"),
    ("import os; os._exit(0)", False, "status 0"),
    ("raise RuntimeError('no libfoo\\n\\nsee the manual')", False, "RuntimeError: no libfoo see the manual"),
    ("import sys; print('bad CUDA', file=sys.stderr, flush=True); __import__('os').abort()", False, "after: bad CUDA"),
    ("import sys; sys.stderr.buffer.write(bytes([255])); x = 5", True, "x=5"),
    ("import atexit, os; atexit.register(os.abort); x = 6", True, "x=6"),
    ("import time; time.sleep(30)", False, "takes more than"),
])
def test_a_package_that_fails_is_a_row_with_its_own_reason(fake, monkeypatch, body, ok, words):
    monkeypatch.setattr(doctor, "LIMIT", 2.0)
    row = fake(body)
    assert row.ok is ok and words in row.found
    assert ok or row.cure


def test_what_a_hanging_import_started_ends_with_it(fake, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "LIMIT", 1.0)
    assert fake(f"import subprocess; subprocess.run(['sh', '-c', 'sleep 3; touch {tmp_path}/late'])").ok is False
    time.sleep(3)
    assert not (tmp_path / "late").exists()


SYSTEM, OURS = "/usr/lib/x86_64-linux-gnu/libcudnn.so.9.14.0", "/env/site-packages/nvidia/cudnn/lib/libcudnn.so.9"


@pytest.mark.parametrize(("loaded", "te", "words"), [
    ([OURS], [9, 19, 0], ""),
    ([SYSTEM, OURS], [9, 19, 0], f"loads {SYSTEM} beside"),
    ([OURS], [9, 14, 0], "cuDNN 91400, PyTorch 91900")])
def test_a_cudnn_other_than_pytorchs_is_noticed(monkeypatch, loaded, te, words):
    monkeypatch.setattr(doctor, "cudnn_cure", lambda: "export CUDNN_HOME=there")
    answer = {"fp8": True, "reason": "", "cudnn": loaded, "torch_cudnn": [OURS], "torch_version": 91900, "te_version": te}
    row = doctor.judge_te("2.20", answer)
    assert row.ok is not bool(words) and words in row.found and row.cure == ("export CUDNN_HOME=there" if words else "")


def test_a_cudnn_that_does_not_fit_pytorch_is_a_row(monkeypatch):
    def refuse():
        raise RuntimeError("cuDNN version incompatibility")
    monkeypatch.setattr("torch.backends.cudnn.version", refuse)
    assert doctor.cudnn_row(True).ok is False and "incompatibility" in doctor.cudnn_row(True).found


def test_an_absent_package_says_how_to_get_it():
    row = doctor.package_row("No", "no_such.package", "no-such", "", "install it", "no", lambda *_: Row("", ""))
    assert row.ok is None and row.found == "not installed" and row.cure == "install it"


def test_a_missing_compiler_has_a_cure(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    row = doctor.compiler_row()
    assert row.ok is None and "compile=true needs one" in row.found and "g++" in row.cure and row.need == "compiler"
