"""`course bench loaders`, small."""

import json
import sys

import pytest
import torch

from course.bench import loaders
from course.cli import main
from course.utils.errors import CourseError

CPU = torch.device("cpu")


def test_it_makes_its_data_and_tells_every_speed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["course", "bench", "loaders", "--small", "--workers", "1,2", "--seconds", "0.02",
                                      "--loader", "threads", "--loader", "native", "--device", "cpu", "--out", "found.json"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert not ended.value.code
    found, out = json.loads((tmp_path / "found.json").read_text()), capsys.readouterr().out
    assert found["loaders"].keys() == {"threads", "native"} and found["loaders"]["native"].keys() == {"0", "1", "2"}
    speeds = [speed for row in (found["page cache to memory"], *found["loaders"].values()) for speed in row.values()]
    assert all(10 < speed < 1e7 for speed in speeds)
    assert found["pinned to GPU"] is None and "there is no GPU here" in out and "floor: page cache" in out
    assert {"hardware", "torch", "h5py", "date", "cores", "command"} <= found.keys()
    assert len(list((tmp_path / "data" / "bench-32x64" / "train" / "0001").iterdir())) == loaders.STATES


def test_other_data_is_read_where_it_lies_and_what_it_lacks_is_said(small_data, capsys):
    pytest.importorskip("nvidia.dali")
    settings = [f"data.path={small_data}", "model.grid=[8,16]", "train.global_batch=2"]
    found = loaders.main(settings, True, ["dali_numpy", "threads"], [1], 0.01, CPU)
    assert found["batch"] == 2 and found["pair_mb"] == pytest.approx(2 * 20 * 8 * 16 * 4 / 1e6)
    assert found["loaders"].keys() == {"threads"} and "course data numpy" in found["skipped"]["dali_numpy"]
    assert "dali_numpy left out: " in capsys.readouterr().out


@pytest.mark.parametrize(("cores", "counts"), [(1, [1]), (2, [1, 2]), (12, [1, 2, 4, 8]), (16, [1, 2, 4, 8, 16])])
def test_without_numbers_workers_double_up_to_the_cores(monkeypatch, cores, counts):
    monkeypatch.setattr(loaders, "cores", lambda: cores)
    assert loaders.doubling() == counts


def test_loaders_and_numbers_that_do_not_exist_are_refused(monkeypatch):
    with pytest.raises(CourseError, match="threds"):
        loaders.main([], True, ["threds"], [1], 0.01, CPU)
    for text in ("0", "one", "2,,4"):
        with pytest.raises(CourseError, match="--workers"):
            main.numbers(text, "--workers")
