"""Each layout of the experiment fills the GPUs that it gets, and an interrupted run goes on with what is missing."""

import json

import pytest

from course.bench import gpu_pool, timing
from course.planner import peak_memory
from experiments import communicators


@pytest.mark.parametrize("layout", communicators.LAYOUTS)
def test_a_layout_is_of_one_gpu_or_of_two(layout):
    c = communicators.config_of(layout)
    p = c.parallel
    assert p.pp * p.dp * p.cp * p.tp == 1 + (layout != "alone")
    assert (peak_memory.communicators(c, 0) > 0) == (layout != "alone")


def test_an_interrupted_run_goes_on_with_what_is_missing(tmp_path, monkeypatch):
    started = []

    def start(program, gpus, timeout):
        started.append((program[-1], gpus))
        if len(started) == 3:
            raise KeyboardInterrupt
        return {"others_gb": float(len(started)), "groups": 1}

    monkeypatch.setattr(gpu_pool, "gpus_of", lambda *about: ["0", "1"])
    monkeypatch.setattr(gpu_pool, "start", start)
    monkeypatch.setattr(timing, "machine", lambda device: {"device": "a GPU"})
    with pytest.raises(KeyboardInterrupt):
        communicators.main(tmp_path / "found.json")
    communicators.main(tmp_path / "found.json")
    names = list(communicators.LAYOUTS)
    assert [name for name, _ in started] == [*names[:3], *names[2:]]
    assert [gpus for _, gpus in started[:2]] == ["0", "0,1"]
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["layout"] for row in rows] == names and rows[0]["others_gb"] == 1.0
