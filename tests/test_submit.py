"""Scripts for machines with GPUs, run here with stand-ins for the programs that they start."""

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "submit" / "profile.sh"


def profiled(tmp_path, *arguments, programs, **environment):
    """What the script started, one line each, with words in brackets."""
    for name in programs:
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\nprintf '[%s] ' {name} \"$@\" >> {tmp_path}/calls\necho >> {tmp_path}/calls\n")
        file.chmod(0o755)
    done = subprocess.run(["bash", SCRIPT, *arguments], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PATH": f"{tmp_path}/bin:/usr/bin:/bin", **environment})
    assert done.returncode == 0, done.stderr
    return (tmp_path / "calls").read_text().splitlines(), done.stdout


def test_nsys_is_given_the_run_with_its_settings_as_they_are(tmp_path):
    calls, _ = profiled(tmp_path, "vit-opt", "log.dir=a b", programs=["nsys"])
    assert calls[0].startswith("[nsys] [profile] [-s] [none] [-t] [nvtx,cuda]") and "[runs/nsys/vit-opt]" in calls[0]
    assert "[course] [train] [vit-opt]" in calls[0] and calls[0].strip().endswith("[log.dir=a b]")
    assert calls[1].startswith("[nsys] [stats]")


def test_without_nsys_pytorch_looks_on_all_gpus(tmp_path):
    (call,), told = profiled(tmp_path, "vit-opt", "parallel.tp=2", programs=["torchrun"], GPUS="2")
    assert call.split() == ["[torchrun]", "[--standalone]", "[--nproc-per-node]", "[2]", "[-m]", "[course.cli]", "[profile]",
                            "[vit-opt]", "[parallel.tp=2]"]
    assert "nsys is not installed" in told


def test_everything_of_one_gpu_is_measured_and_a_failure_named(tmp_path):
    """`python` fails here, so that two parts do; the others go on."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, status in {"course": 0, "python": 3}.items():
        (programs / name).write_text(f"#!/bin/bash\necho {name} \"$@\"\nexit {status}\n")
        (programs / name).chmod(0o755)
    done = subprocess.run(["bash", SCRIPT.with_name("bench_one_gpu.sh"), "out", "fp8", "ladder", "curves"], cwd=tmp_path,
                          capture_output=True, text=True, env={**os.environ, "PATH": f"{programs}:/usr/bin:/bin"})
    assert done.returncode == 0 and "fp8 failed:" in done.stdout and "curves failed:" in done.stdout
    assert (tmp_path / "out" / "ladder.log").read_text() == "course bench vit --out out/ladder.json\n"
    assert (tmp_path / "out" / "fp8.log").read_text() == "python -m course.perf.fp8 out/fp8.json\n"
