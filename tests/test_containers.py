"""Images, Binder and Colab: their commands, as far as they run without a container, and that all install in one way."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import unknown_commands

ROOT = Path(__file__).parent.parent
CONTAINER = ROOT / "container"
INSTALL = CONTAINER / "install.sh"


def instructions(name: str) -> list[str]:
    """The arguments of a Dockerfile's instruction, one for each time that it occurs."""
    return re.findall(rf"^{name} (.+)$", (CONTAINER / "Dockerfile").read_text(), re.MULTILINE)


def sections() -> dict[str, list[str]]:
    """The lines of each section of the Apptainer definition."""
    _, *parts = re.split(r"^%(\w+)\n", (CONTAINER / "course.def").read_text(), flags=re.MULTILINE)
    return {name: [line.strip() for line in lines.splitlines() if line.strip()]
            for name, lines in zip(parts[::2], parts[1::2], strict=True)}


def install(tmp_path: Path, torch: str) -> list[list[str]]:
    """What install.sh runs as python3, in an image that has this PyTorch, or none."""
    stand_in = tmp_path / "python3"
    stand_in.write_text(f"""#!/bin/bash
if [ "$1" = -c ]; then echo 'torch=={torch}'; exit {int(not torch)}; fi
for word; do case $word in /dev/fd/*) word="<$(cat "$word")>";; esac; printf '%s\\t' "$word"; done >> {tmp_path}/calls
echo >> {tmp_path}/calls
""")
    stand_in.chmod(0o755)
    subprocess.run(["bash", INSTALL, ROOT], check=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    return [line.rstrip("\t").split("\t") for line in (tmp_path / "calls").read_text().splitlines()]


def test_an_image_keeps_its_own_pytorch(tmp_path):
    assert install(tmp_path, "2.11.0a0+nv26.2") == [
        ["-m", "pip", "install", "--no-cache-dir", "-c", "<torch==2.11.0a0+nv26.2>", "-e", ".[lab,era5]"]]


def test_an_image_without_pytorch_gets_the_cpu_build_in_pinned_versions(tmp_path):
    calls = install(tmp_path, "")
    assert [call[:3] for call in calls] == [["-m", "pip", "install"], ["-m", "uv", "pip"], ["-m", "pip", "install"]]
    assert all(call[call.index("-c") + 1] == "constraints.txt" for call in calls)
    assert "--torch-backend=cpu" in calls[1] and calls[2][-1] == ".[lab,era5,kernels]"
    calls[1][calls[1].index("--python") + 1] = sys.executable
    done = subprocess.run([sys.executable, *calls[1], "--offline", "--dry-run"], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0 and "no changes" in done.stderr, done.stderr         # uv takes these words


def test_pip_takes_the_constraint_that_keeps_pytorch():
    """Of this environment's PyTorch, whose version has a local part as NVIDIA's has."""
    words = 'python3 -m pip install --dry-run --no-deps --no-index -c <(echo "$torch") "torch>=2.10"'
    import torch

    done = subprocess.run(["bash", "-c", words.replace("python3", sys.executable)], text=True, capture_output=True,
                          env={**os.environ, "torch": f"torch=={torch.__version__}"})
    assert done.returncode == 0 and "already satisfied" in done.stdout and "Would install" not in done.stdout, done.stderr


def test_docker_and_apptainer_run_the_same_commands():
    assert sections()["post"] == instructions("RUN")
    assert sections()["arguments"] == instructions("ARG") and instructions("FROM") == ["${BASE}"]
    assert sections()["files"] == instructions("COPY") == [". /course"]


@pytest.mark.parametrize("line", [*instructions("RUN"), (ROOT / ".binder/postBuild").read_text(), INSTALL.read_text()])
def test_bash_and_the_course_know_the_commands(line):
    assert subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True).stderr == ""
    assert unknown_commands(f"`{line}`") == []
    for path in re.findall(r"(?:/course/|bash )(container/\S+)", line):
        assert (ROOT / path).is_file()


def test_the_container_starts_a_program_that_it_installs():
    command = json.loads(instructions("CMD")[0])
    done = subprocess.run([Path(sys.executable).with_name(command[0]), *command[1:], "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and re.match(r"\d+\.\d+", done.stdout), done.stderr
    assert f"-p {instructions('EXPOSE')[0]}:" in (CONTAINER / "Dockerfile").read_text()


def test_binder_has_a_python_that_the_course_runs_on():
    assert (ROOT / ".binder/runtime.txt").read_text() == "python-3.12\n" and os.access(ROOT / ".binder/postBuild", os.X_OK)
    assert ">=3.11,<3.14" in (ROOT / "pyproject.toml").read_text()


def test_an_image_holds_no_data_runs_or_environments():
    ignored = set((CONTAINER / "Dockerfile.dockerignore").read_text().split())
    known = {line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()}
    assert {".venv", "runs", "data/*", "!data/README.md", "grades", "site"} <= ignored & known and ".git" in ignored
