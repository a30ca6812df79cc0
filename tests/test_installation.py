"""What make and conda install: the versions of constraints.txt, and PyTorch's CPU build if somebody asks for it."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PIP_NAMES = {"pytorch-gpu": "torch", "transformer-engine-torch": "transformer-engine"}     # of conda-forge's packages
UNPINNED = {"python", "pip", "cuda-version"}                                               # conda's own
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def commands(*words: str) -> list[list[str]]:
    """What make would run to install, from the start; nothing is run."""
    done = subprocess.run(["make", "--dry-run", "--assume-new=pyproject.toml", *words], cwd=ROOT, text=True, capture_output=True,
                          check=True)
    return [shlex.split(line) for line in done.stdout.splitlines() if " install " in line]


def wrong_pins(environment: str) -> list[str]:
    """The dependencies of a conda environment that have no version, or another one than constraints.txt."""
    conda = [entry for entry in yaml.safe_load(environment)["dependencies"] if isinstance(entry, str)]
    named = [entry.partition("=")[::2] for entry in conda]
    return [name for name, version in named if name not in UNPINNED and PINS[PIP_NAMES[name]] != version]


@pytest.mark.parametrize("target", ["lab", "demo", "test"])
def test_make_installs_pytorch_for_cpus_first_if_asked(target):
    uv, torch, rest = commands(target, "TORCH=cpu")
    assert uv[1:] == ["-m", "pip", "install", "-c", "constraints.txt", "uv"]
    assert "--torch-backend=cpu" in torch and torch[-1] == "torch" and torch[-3:-1] == ["-c", "constraints.txt"]
    assert [rest] == commands(target)                 # without TORCH that is all


def test_uv_takes_the_command_and_keeps_an_installed_pytorch():
    _, (_, *words), _ = commands("lab", "TORCH=cpu")
    words[words.index("--python") + 1] = sys.executable
    done = subprocess.run([sys.executable, "-m", "uv", *words, "--offline", "--dry-run"], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 0 and "no changes" in done.stderr, done.stderr


def test_the_makefile_names_no_address():
    assert "://" not in (ROOT / "Makefile").read_text()


def test_conda_installs_the_versions_of_constraints():
    text = (ROOT / "environment.yml").read_text()
    assert wrong_pins(text) == []
    assert wrong_pins(text.replace(f"={PINS['torch']} ", "=1.0 ")) == ["pytorch-gpu"]
    assert wrong_pins(re.sub(r"(engine-torch)=\S+", r"\1", text)) == ["transformer-engine-torch"]


def test_conda_installs_no_tools_of_developers():
    *_, of_pip = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    constraints, course = of_pip["pip"]
    assert constraints == "-c constraints.txt"
    assert set(re.fullmatch(r"-e \.\[(.+)\]", course)[1].split(",")) == {"lab", "era5", "dali"}
