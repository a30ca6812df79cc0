"""`course bench comms`: what it computes from times, and that every operation sends what the bandwidth counts."""

import json
import sys

import pytest
import torch
import torch.distributed as dist
import yaml

from course.bench import comms
from course.cli import main
from course.lab.instruments.bytes_sent import collectives
from course.parallel import World
from course.planner import hardware
from course.planner.hardware import Link
from course.ranks.notebook_ranks import ranks
from course.utils.errors import CourseError

NAMES = [*comms.SHARES, "send/recv"]
SIZES = [2**k for k in range(10, 28, 2)]


def times(ranks: int, link: Link) -> dict[str, list[tuple[int, float]]]:
    """What would be measured if the planner's formulas were exact."""
    return {name: [(size, comms.predicted(name, size, ranks, link)) for size in SIZES] for name in NAMES}


@pytest.mark.parametrize("count", [2, 3, 8])
def test_the_fit_finds_the_link_that_the_times_came_from(count):
    found = comms.link_of(times(count, Link("", 0, 7e-6, 40e9)), count)
    assert found.latency == pytest.approx(7e-6) and found.bandwidth == pytest.approx(40e9) and found.span == count


def test_a_latency_below_zero_becomes_zero():
    latency, per_byte = comms.fit([(1, size, size * 1e-9 - 1e-7) for size in (1000, 2000, 1e5, 1e7)])
    assert latency == 0 and per_byte == pytest.approx(1e-9, rel=0.1)


def test_without_a_slope_the_bandwidth_is_the_highest_measured():
    latency, per_byte = comms.fit([(1, 1e3, 3e-3), (1, 1e6, 2e-3), (1, 4e6, 1e-3)])
    assert per_byte == 1e-3 / 4e6 and 1e-3 < latency < 3e-3


def test_bandwidths_are_those_of_nccl_tests():
    found = comms.summary({name: [(8000, 2e-6), (80000, 1.1e-5)] for name in NAMES}, 4)
    rows = {row["operation"]: row for row in found["rows"] if row["bytes"] == 8000}
    assert {name: row["algorithm_gb_s"] for name, row in rows.items()} == pytest.approx(dict.fromkeys(NAMES, 4.0))
    assert {name: row["bus_gb_s"] for name, row in rows.items()} == pytest.approx(
        {"all-reduce": 6, "all-gather": 3, "reduce-scatter": 3, "all-to-all": 3, "send/recv": 4})
    assert found["fits"]["send/recv"] == pytest.approx({"latency_us": 1.0, "bus_gb_s": 8.0})


def test_the_printed_link_is_one_of_a_hardware_file(tmp_path):
    link = Link("measured", 2, 3.21e-5, 1.234e9)
    (tmp_path / "mine.yaml").write_text(f"base: h200\n{comms.entry(vars(link))}\n")
    assert hardware.load(str(tmp_path / "mine.yaml")).links == (link,)
    assert yaml.safe_load(comms.entry(vars(link)))["links"][0]["bandwidth"] == 1.234e9


@pytest.mark.parametrize("count", [2, 3, 5])
def test_every_rank_has_a_whole_part_of_each_message(count):
    found = comms.sizes(2**20, count)
    assert len(found) == 6 and all(size % (4 * count) == 0 for size in found)
    assert all(0 <= size - 1024 * 4**i < 4 * count for i, size in enumerate(found))


def sent(size: int) -> dict[str, int]:
    """The bytes that this rank sends in each operation."""
    world = World(dist.get_rank(), dist.get_world_size())
    return {name: sum(call.sent for call in collectives(run)[1])
            for (name, bytes_), run in comms.operations([1024, size], world).items() if bytes_ == size}


def small() -> dict:
    return comms.main(World(dist.get_rank(), dist.get_world_size()), 0, small=True)


def test_ranks_measure_what_crosses_their_links():
    for found in ranks(2)(sent, 4096):
        assert found == {name: comms.share(name, 2) * 4096 for name in NAMES}
    first, second = ranks(2)(small)
    assert first == second and len(first["rows"]) == 15 and all(row["us"] > 0 for row in first["rows"])
    assert first["backend"] == "gloo" and first["ranks"] == 2 and first["link"]["bandwidth"] > 0


@pytest.mark.slow
def test_the_command_starts_its_processes(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["course", "bench", "comms", "--ranks=2", "--device=cpu", "--small", "--out",
                                      str(tmp_path / "comms.json")])
    with pytest.raises(SystemExit) as ended:
        main.main()
    found, out = json.loads((tmp_path / "comms.json").read_text()), capfd.readouterr().out
    assert not ended.value.code and found["command"] == "course bench comms --ranks=2 --small"
    assert "2 ranks, gloo" in out and comms.entry(found["link"]) in out


def test_one_process_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for count, device in ((1, "cpu"), (0, "cuda")):
        with pytest.raises(CourseError, match=r"one process sends none.*--ranks=2"):
            comms.command(count, device, 0, True, None, lambda found, out: None)
