"""Describe GPUs and the links between them: presets with their sources in hardware.yaml, or a YAML file of your own.

    hardware = load("h100-80")
    hardware = load("mine.yaml")         # `base: h100-80` and the differences

This module measures nothing; `course bench ceilings`, `kernels` and `host` do.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from course.config import Config
from course.config.schema import build, merge, read_yaml
from course.utils.errors import CourseError, did_you_mean

PRESETS = Path(__file__).with_name("hardware.yaml")
RESULTS = Path(__file__).parents[1] / "bench" / "results"          # with recorded tables of kernels and hosts
OPTIONAL = ("name", "table", "host", "storage", "capability")           # keys that a YAML file may leave out
SLOW = 0.1                                          # seconds, an upper limit for latency: longer than around the world
FORMATS = ("fp32", "tf32", "fp16", "bf16", "fp8")
AMPERE, HOPPER, BLACKWELL = 8.0, 9.0, 10.0          # compute capabilities
CHIPS = {AMPERE: "Ampere", HOPPER: "Hopper", BLACKWELL: "Blackwell"}
RECIPES = {"block": HOPPER, "mxfp8": BLACKWELL}     # Transformer Engine recipes that need more than FP8 support


@dataclass(frozen=True)
class Link:
    """The link between GPUs on one level: NVLink in a node, then the network."""

    name: str
    span: int                                       # number of GPUs that it joins, such as 8 in a node; 0: any
    latency: float                                  # seconds per step of a collective
    bandwidth: float                                # bytes/s per GPU and direction


@dataclass(frozen=True)
class Hardware:
    """A GPU, its node and its network."""

    name: str
    memory: float                                   # bytes per GPU
    bandwidth: float                                # bytes/s of GPU memory
    peaks: dict[str, float] = field(hash=False)     # format -> FLOP/s of matmuls, without sparsity
    links: tuple[Link, ...]                         # innermost first
    table: str = ""                                 # measured kernels (`course bench kernels`); "": see kernel_efficiency.py
    host: str = ""                                  # measured host overhead (`course bench host`); "": the H200's
    storage: float = math.inf                       # bytes/s that a node reads from files; default: page cache
    capability: float = math.inf                    # compute capability, such as 9.0 for Hopper; default: any

    def peak(self, precision: str) -> float:
        """Peak FLOP/s in a format. Raises `CourseError` if the GPU does not support it."""
        if precision not in self.peaks:
            raise CourseError(f"{self.name} has no matmuls in {precision}: it has {', '.join(self.peaks)}")
        return self.peaks[precision]

    def room(self, free: float) -> float:
        """Bytes that a run may use on a GPU if a share `free` of the memory stays free, as a margin for wrong predictions."""
        return self.memory * (1 - free)


def presets() -> list[str]:
    """The names of the course's hardware presets."""
    return sorted(_presets())


def load(name: str) -> Hardware:
    """Load a preset, or a YAML file whose `base` may be one. Raises `CourseError` for unknown names and wrong values."""
    if not name.endswith((".yaml", ".yml")):
        return check(build(Hardware, {"name": name, **preset(name)}, f"hardware {name}"))
    path = Path(name)
    if not path.is_file():
        raise CourseError(f"there is no file {name}: give the path of a YAML file, or a preset ({', '.join(presets())})")
    values = read(path)
    keys = [entry.name for entry in fields(Hardware)]
    for key in values:
        if key not in [*keys, "base"]:
            raise CourseError(f"hardware {path}: there is no key {key!r}{did_you_mean(str(key), [*keys, 'base'])}")
    base = values.pop("base", None)
    if base is not None:
        values = merge(preset(str(base)), values)
    missing = [key for key in keys if key not in (*OPTIONAL, *values)]
    if missing:
        raise CourseError(f"hardware {path} does not say its {', '.join(missing)}: add them, or `base:` and the name of a preset")
    return check(build(Hardware, {"name": path.stem, **values}, f"hardware {path}"))


def preset(name: str) -> dict[str, Any]:
    """The values of a preset."""
    if name not in _presets():
        raise CourseError(f"there is no hardware {name!r}{did_you_mean(name, presets())}; it is one of {', '.join(presets())}, "
                          "or a YAML file of your own")
    return dict(_presets()[name])


def read(path: Path) -> dict[str, Any]:
    """Read the plain values of a YAML file."""
    return read_yaml(path, "`key: value` lines")


def check(hardware: Hardware) -> Hardware:
    """Raise `CourseError` for wrong or implausible values; returns the hardware."""
    h = hardware
    for name in h.peaks:
        if name not in FORMATS:
            raise CourseError(f"hardware {h.name}: there is no format {name!r} in peaks{did_you_mean(name, FORMATS)}; the "
                              f"formats are {', '.join(FORMATS)}")
    if not h.links or not h.peaks:
        raise CourseError(f"hardware {h.name} needs at least one entry in links and one in peaks, such as those of h100-80")
    numbers = {"memory": h.memory, "bandwidth": h.bandwidth, **{f"peaks.{name}": value for name, value in h.peaks.items()},
               **{f"links.{link.name}.bandwidth": link.bandwidth for link in h.links}}
    for key, value in numbers.items():
        if not 0 < value < float("inf"):
            raise CourseError(f"hardware {h.name}: {key}={value} must be a number above 0, in bytes, bytes/s or FLOP/s")
    if not h.storage > 0:
        raise CourseError(f"hardware {h.name}: storage={h.storage} must be a number above 0, in bytes/s of a node; leave it out "
                          "for files in the page cache")
    for link in h.links:
        if not 0 <= link.latency < SLOW:
            raise CourseError(f"hardware {h.name}: links.{link.name}.latency={link.latency:g} is in seconds, 0 or more and less "
                              f"than {SLOW}: write 5e-6 for 5 microseconds")
    if not h.capability > 0:
        raise CourseError(f"hardware {h.name}: capability={h.capability} is a GPU's compute capability, such as 9.0 of an H100")
    spans = [link.span or float("inf") for link in h.links]
    if min(spans) < 1 or spans != sorted(set(spans)):
        raise CourseError(f"hardware {h.name}: links go from inside out, each span larger than the one before, such as 8, 256 "
                          f"and 0 for any number; these are {', '.join(str(link.span) for link in h.links)}")
    for key, value in numbers.items():
        if value < 1e6:
            raise CourseError(f"hardware {h.name}: {key}={value:g} is in bytes, bytes/s or FLOP/s, not in multiples of them: "
                              "write 80e9 for 80 GB")
    return hardware


def table_file(hardware: Hardware, file: str, kind: str) -> Path:
    """The path of a `course bench KIND` table: the user's file, or one of the course's. Raises `CourseError` if there is none."""
    for path in (Path(file), RESULTS / file):
        if path.exists():
            return path
    raise CourseError(f"hardware {hardware.name}: there is no table {file}: measure one with `course bench {kind} --out FILE` on "
                      "such a machine, or leave the key out")


def of_device(device: str) -> Hardware | None:
    """The preset for PyTorch's name of a GPU, such as "NVIDIA H100 80GB HBM3"; None if there is none.

    If presets differ only in memory, the first one counts: they compute alike. PCIe versions of H100 and H200 differ and have
    no preset.
    """
    chips = {name.split("-")[0].upper(): name for name in reversed(list(_presets())) if name != "perlmutter"}
    words = device.replace("-", " ").upper().split()
    if {"PCIE", "NVL"} & {*words} and {"H100", "H200"} & {*words}:
        return None
    return next((load(name) for chip, name in chips.items() if chip in words), None)


@cache
def _presets() -> Mapping[str, dict[str, Any]]:
    return read(PRESETS)


def unsupported(c: Config, h: Hardware) -> str:
    """A sentence that says why a GPU does not support a configuration, or "" if it does.

    PyTorch's flash and cuDNN attention need 16 bits and compute capability 8.0 (aten/src/ATen/native/transformers/cuda/
    sdp_utils.cpp). Transformer Engine's block scaling needs 9.0, and MX formats need 10.0 (its fp8.py, `check_*_support`).
    Triton supports 8.0 and newer (its README, "Compatibility"); the course is not tested on older GPUs.
    """
    if c.attention in ("flash", "cudnn"):
        if c.precision in ("fp32", "tf32"):
            return (f"attention={c.attention} multiplies in 16 bits on a GPU, and with precision={c.precision} attention is in "
                    "32: set attention=default, or precision=bf16")
        if h.capability < AMPERE:
            return too_old(f"attention={c.attention}", AMPERE, h, "attention=default or efficient")
    if c.kernels == "triton" and h.capability < AMPERE:
        return too_old("kernels=triton", AMPERE, h, "kernels=pytorch")
    least = RECIPES.get(c.fp8.recipe, 0.0)
    if c.precision == "fp8" and c.fp8.by == "te" and h.capability < least:
        return too_old(f"fp8.recipe={c.fp8.recipe}", least, h, "fp8.recipe=delayed or current")
    return ""


def too_old(what: str, least: float, h: Hardware, instead: str) -> str:
    """The error message for a GPU whose compute capability is too low."""
    return (f"{what} needs a GPU of compute capability {least:.1f} ({CHIPS[least]}) or more, and {h.name} has "
            f"{h.capability:.1f}: set {instead}")
