import re
from dataclasses import fields
from pathlib import Path

import pytest

from course.planner import hardware
from course.utils.errors import CourseError


@pytest.mark.parametrize("name", hardware.presets())
def test_every_preset_is_whole(name):
    found = hardware.load(name)
    assert found.name == name and found.links[-1].span == 0 and 10e9 < found.memory < 1e12
    assert max(found.peaks.values()) == found.peaks.get("fp8", found.peaks["fp16"])
    hash(found)
    assert ("bf16" in found.peaks) == (found.capability >= 8.0) and ("fp8" in found.peaks) == (found.capability >= 8.9)


def test_presets_that_share_a_chip_share_its_peaks():
    assert hardware.load("h200").peaks == hardware.load("h100-80").peaks
    assert [link.span for link in hardware.load("perlmutter").links] == [4, 0]


def test_an_own_file_changes_a_preset(tmp_path):
    file = tmp_path / "ours.yaml"
    file.write_text("base: h100-80\nlinks:\n- {name: NVLink, span: 8, latency: 2e-6, bandwidth: 450e9}\n"
                    "- {name: leaf, span: 256, latency: 5e-6, bandwidth: 50e9}\n- {name: spine, span: 0, latency: 8e-6, "
                    "bandwidth: 12.5e9}\n")
    found = hardware.load(str(file))
    assert found.name == "ours" and len(found.links) == 3 and found.links[2].bandwidth == 12.5e9
    assert found.peak("fp8") == 1979e12


def test_the_guides_example_is_hardware(tmp_path):
    """docs/using.md's file loads and means what its comments say; and the page names every key that a file may have."""
    page = (Path(__file__).parents[2] / "docs/using.md").read_text()
    (example,) = re.findall(r"```yaml\n(base: .*?)```", page, re.DOTALL)
    file = tmp_path / "ours.yaml"
    file.write_text(example)
    found, base = hardware.load(str(file)), hardware.load("h100-80")
    assert (found.memory, found.storage, found.peaks, found.capability) == (100e9, 20e9, base.peaks, base.capability)
    assert [link.span for link in found.links] == [4, 4 * 64, 0] and found.links[2].latency == 8e-6
    keys = {entry.name for kind in (hardware.Hardware, hardware.Link) for entry in fields(kind)}
    assert [key for key in keys if not re.search(rf"\b{key}:|`{key}`", page)] == []


@pytest.mark.parametrize(("text", "words"), [
    ("bass: h100-80", "'bass' (did you mean 'base'"),
    ("base: h100-80\nbandwith: 1e12", "there is no key 'bandwith' (did you mean 'bandwidth'?)"),
    ("memory: 8e+10", "does not say its bandwidth, peaks, links: add them"),
    ("base: h10", "there is no hardware 'h10'"),
    ("base: h100-80\npeaks: {bf61: 1e15}", "no format 'bf61' in peaks (did you mean 'bf16'?)"),
    ("base: h100-80\nmemory: -1", "memory=-1.0 must be a number above 0"),
    ("base: h100-80\nmemory: 80", "memory=80 is in bytes, bytes/s or FLOP/s, not in multiples of them: write 80e9 for 80 GB"),
    ("base: h100-80\nstorage: 0", "storage=0.0 must be a number above 0, in bytes/s of a node"),
    ("base: h100-80\nlaunch: 23e-6", "there is no key 'launch'"),
    ("base: h100-80\nlinks: [{name: a, span: 0, latency: -1.0, bandwidth: 1.0}]",
     "latency=-1 is in seconds, 0 or more and less than 0.1"),
    ("base: h100-80\nlinks: [{name: a, span: 0, latency: 5, bandwidth: 25e9}]",
     "links.a.latency=5 is in seconds, 0 or more and less than 0.1: write 5e-6 for 5 microseconds"),
    ("base: h100-80\ncapability: -9", "capability=-9.0 is a GPU's compute capability, such as 9.0 of an H100"),
    ("base: h100-80\nlinks: []", "at least one entry in links"),
    ("base: h100-80\nlinks: [{name: a, span: 0, latency: 0, bandwidth: 1.0}, {name: b, span: 8, latency: 0, bandwidth: 1.0}]",
     "from inside out"),
    ("base: h100-80\nlinks: [{name: a, span: 0, latency: 0, bandwith: 1.0}]", "bandwith"),
    ("[1, 2]", "holds a list"), ("a: [", "not readable YAML"),
])
def test_what_is_wrong_gets_a_sentence(tmp_path, text, words):
    file = tmp_path / "ours.yaml"
    file.write_text(text)
    with pytest.raises(CourseError) as error:
        hardware.load(str(file))
    assert words in str(error.value)


def test_unknown_names_and_formats():
    with pytest.raises(CourseError, match=r"did you mean 'h100-80'"):
        hardware.load("h100-8")
    with pytest.raises(CourseError, match=r"there is no file nowhere\.yaml"):
        hardware.load("nowhere.yaml")
    with pytest.raises(CourseError, match=r"v100-16 has no matmuls in bf16: it has fp16, fp32"):
        hardware.load("v100-16").peak("bf16")


@pytest.mark.parametrize(("device", "name"), [
    ("NVIDIA H200", "h200"), ("NVIDIA H20", "h20"), ("NVIDIA H100 80GB HBM3", "h100-80"), ("NVIDIA A100-SXM4-80GB", "a100-40"),
    ("Tesla V100-SXM2-16GB", "v100-16"), ("NVIDIA B200", "b200"), ("NVIDIA GeForce RTX 4090", None),
    ("NVIDIA H100 PCIe", None), ("NVIDIA H100 NVL", None), ("NVIDIA A100-PCIE-40GB", "a100-40")])
def test_a_device_is_known_by_its_name(device, name):
    found = hardware.of_device(device)
    assert (found and found.name) == name


def test_a_share_of_the_memory_stays_free():
    h = hardware.load("h100-80")
    assert h.room(0) == h.memory and h.room(0.25) == 0.75 * h.memory
