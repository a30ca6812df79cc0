"""The ladder of one GPU runs, on tiny models and the CPU; its numbers mean nothing here."""

import json

import pytest
import torch

from course import config
from course.errors import CourseError
from course.perf import ladder


@pytest.mark.slow
def test_rungs_run_in_processes_of_their_own(tmp_path, capsys):
    names = ["bf16, on the device", "one sample: in a graph"]
    ladder.main(tmp_path / "vit.json", names, small=True)
    done, refused = json.loads((tmp_path / "vit.json").read_text())["rows"]
    assert done["rung"] == names[0] and done["samples_per_s"] > 0 and 0 < done["first_s"] < 60
    assert done["ms"] == pytest.approx(2000 / done["samples_per_s"])
    assert done["settings"] == ["precision=bf16", "data.source=mock"]
    assert "graphs=true needs a GPU" in refused["error"] and "samples/s" in capsys.readouterr().out


def test_every_rung_is_a_configuration():
    for settings in ladder.RUNGS.values():
        assert config.load("vit-short", settings).model.tokens in (4050, 256)


def test_what_it_cannot_do_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(CourseError, match=r"course bench vit needs a GPU.*--small"):
        ladder.main(tmp_path / "vit.json", [], small=False)
    with pytest.raises(CourseError, match="no rung 'fp4'"):
        ladder.main(tmp_path / "vit.json", ["fp4"], small=True)
