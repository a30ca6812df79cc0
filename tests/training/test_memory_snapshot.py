"""What holds memory at its peak, by line: on snapshots whose answer is known."""

import gzip
import pickle

import pytest
import torch

from course.lab.instruments.tensor_memory import MemoryHistory
from course.lab.notebook import recording
from course.training import memory_snapshot, profile_run
from course.utils.errors import CourseError


def event(action, address, size, *lines):
    frames = [{"filename": file, "line": line, "name": name} for file, line, name in lines]
    return {"action": action, "addr": address, "size": size, "frames": frames, "stream": 0}


TORCH = ("/site/torch/nn/functional.py", 5, "linear")
EVENTS = [event("segment_alloc", 0, 2**20), event("free_requested", 9, 50), event("free_completed", 9, 50),
          event("alloc", 1, 100, TORCH, ("/home/me/course/models/gpt.py", 128, "forward")),
          event("alloc", 2, 300, TORCH, ("/home/me/course/models/gpt.py", 130, "forward")),
          event("free_requested", 1, 100), event("free_completed", 1, 100),
          event("alloc", 1, 40), event("alloc", 3, 70, ("/home/me/course/models/gpt.py", 130, "forward")),
          event("free_completed", 2, 300), event("alloc", 2, 200, TORCH)]


@pytest.mark.parametrize("ending", [".pickle", ".pickle.gz"])
def test_a_snapshot_says_which_lines_hold_the_peak(tmp_path, ending, capsys):
    file = tmp_path / f"memory-0{ending}"
    with (gzip.open if ending.endswith("gz") else open)(file, "wb") as out:
        pickle.dump({"device_traces": [[], EVENTS], "segments": []}, out)
    events = memory_snapshot.read(file)
    assert len(events) == 8                          # segments are no blocks, and a request is no free yet
    assert memory_snapshot.alive_at_peak(events) == {"course/models/gpt.py:130 forward": 370, memory_snapshot.NO_FRAMES: 40}
    assert memory_snapshot.peak(events) == (360, 6)  # 50 bytes from before the recording are gone
    assert profile_run.main(str(file), []) == file
    assert "course/models/gpt.py:130 forward" in capsys.readouterr().out


def test_memory_over_time_adds_up():
    events = [("alloc", 1, 5, "a"), ("alloc", 2, 7, "b"), ("free", 9, 3, ""), ("free", 1, 5, ""), ("alloc", 1, 2, "b")]
    assert memory_snapshot.over_time(events, ["b"]) == [[0, 7, 7, 7, 9], [5, 5, 5, 0, 0]]


@pytest.mark.parametrize(("content", "words"), [
    (b"no pickle", "is no memory snapshot"), (pickle.dumps({"segments": []}), "is no memory snapshot"),
    (pickle.dumps(print), "it asks for builtins.print"), (None, "there is no file")])
def test_what_is_no_snapshot_is_a_sentence(tmp_path, content, words):
    file = tmp_path / "memory-0.pickle"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CourseError, match=words):
        memory_snapshot.read(file)


def test_the_recorded_snapshots_show_attentions_scores():
    """Of one layer 403 MB in fp32, in 12 layers; PyTorch's attention has none of them."""
    lines = {name: memory_snapshot.alive_at_peak(memory_snapshot.read(recording(f"traces/memory_{name}.pickle.gz")))
             for name in ("library", "changed")}
    most = max(lines["changed"], key=lambda line: lines["changed"][line])
    assert most.endswith(" attend") and lines["changed"][most] == pytest.approx(12 * 8 * 12 * 1024**2 * 4, rel=0.01)
    assert sum(lines["library"].values()) < 0.4 * sum(lines["changed"].values())


def test_the_history_of_a_cpu_names_the_line_and_ends_where_it_began():
    with MemoryHistory() as history:
        kept = torch.ones(1000)
        wide = kept.repeat(4)
        del wide
    lines = memory_snapshot.alive_at_peak(history.events)
    assert {line.split(": ")[1]: size for line, size in lines.items()} == {
        "kept = torch.ones(1000)": 4000, "wide = kept.repeat(4)": 16000}
    assert memory_snapshot.peak(history.events)[0] == history.peak == 20000
    assert memory_snapshot.over_time(history.events, [])[-1][-1] == 4000
