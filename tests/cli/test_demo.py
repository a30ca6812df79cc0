"""`make demo`, as a newcomer runs it: minutes, so it runs in .ci/run."""

import json
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import worked

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo_beats_persistence_and_linear_regression(tmp_path):
    name, before = f"test-{int(time.time())}", worked()
    done = subprocess.run(["make", "demo", f"DATA={tmp_path}/data", f"RUNS={tmp_path}/runs", f"NAME={name}"], cwd=ROOT,
                          capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert worked() - before < 2 * 300, "the demo promises five minutes on two cores"
    folder = tmp_path / "runs" / "vit-demo" / name
    equal, untried = done.stdout.strip().splitlines()[-2:]
    assert equal == "equal: this layout trains as one process does" and untried.startswith("not tried: dropout ")
    found = re.search(r"^u10 RMSE 6 h: model ([\d.]+), persistence ([\d.]+), (\d+)% better$", done.stdout, re.MULTILINE)
    assert found and int(found[3]) >= 30, done.stdout[-3000:]
    scores = json.loads((folder / "evaluation" / "scores.json").read_text())
    model, linear, persistence = (scores["rmse"][method][0][0] for method in ("model", "regression", "persistence"))
    assert model < linear < persistence
    assert float(found[1]) == pytest.approx(model, rel=0.01)
    for path in (folder / "evaluation" / "forecast.png", folder / "evaluation" / "skill.png", folder / "tensorboard"):
        assert path.exists() and str(path) in done.stdout
