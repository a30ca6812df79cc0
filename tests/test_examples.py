"""`examples/`: a model of one's own, registered by its own file."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from course import models
from course.models.layers import Block

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples/side_vit.py"


def course(*words, own=str(MODEL), folder=ROOT):
    return subprocess.run([sys.executable, "-m", "course.cli", *words], cwd=folder, text=True, capture_output=True, timeout=300,
                          env=os.environ | {"COURSE_MODELS": own, "PYTHONPATH": str(ROOT)})


def side_block():
    """The class, without registering its model in this process."""
    with mock.patch.object(models, "register"):
        return runpy.run_path(str(MODEL))["SideBlock"]


@pytest.mark.parametrize(("silent", "norm"), [("attn.out", "norm2"), ("mlp.down", "norm1")])
def test_with_one_half_silent_the_side_block_is_the_serial_one(silent, norm):
    torch.manual_seed(0)
    serial, side = Block(16, 4, 64, "b").double(), side_block()(16, 4, 64, "b").double()
    for block in (serial, side):
        torch.nn.init.zeros_(block.get_submodule(silent).weight)
        torch.nn.init.zeros_(block.get_submodule(silent).bias)
    torch.nn.init.normal_(serial.get_submodule(norm).weight)
    side.norm1.load_state_dict(serial.get_submodule(norm).state_dict())
    for half in ("attn", "mlp"):
        side.get_submodule(half).load_state_dict(serial.get_submodule(half).state_dict())
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(side(x, {}), serial(x, {}), rtol=0, atol=1e-14)


@pytest.mark.slow
def test_the_commands_of_the_guide_run(tmp_path):
    """Training in one process, layouts against it, and what is predicted."""
    lines, = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs/contributors.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(lines.splitlines()) == 3
    for line in lines.splitlines():
        variable, program, *words = shlex.split(line)
        assert (variable, program) == ("COURSE_MODELS=examples/side_vit.py", "course")
        words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
        done = course(*words, folder=tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


@pytest.mark.parametrize(("own", "said"), [
    ("", "there is no model.kind=side_vit (did you mean 'vit'?); the kinds are vit, gpt, dit"),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in (
        ("examples/none.py", "COURSE_MODELS=examples/none.py: there is no Python file"),
        (str(ROOT / "tests/__init__.py"), "there is no model.kind=side_vit"),
        (f"{MODEL},{MODEL}", "two models are of the kind side_vit: SideViTConfig and SideViTConfig")))])
def test_a_model_that_is_not_there_or_twice_is_named(own, said):
    done = course("plan", "examples/side_vit.yaml", "--gpus", "2", "--hardware", "h200", own=own)
    assert done.returncode == 1 and said in " ".join(done.stderr.split()), done.stderr
