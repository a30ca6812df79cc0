"""What a GPU can do and how GPUs are joined, as data: presets with their sources in hardware.yaml, or a YAML file of your own.

    hardware = load("h100-80")
    hardware = load("mine.yaml")         # `base: h100-80` and what differs

Nothing here is measured on the machine that asks; see `course bench ceilings`, `kernels` and `host` for that.
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
RESULTS = Path(__file__).parents[1] / "bench" / "results"          # recorded tables of kernels and hosts among them
OPTIONAL = ("name", "table", "host", "storage", "capability")           # what a file of one's own may leave out
SLOW = 0.1                                          # seconds: no step of a collective takes as long, not even around the world
FORMATS = ("fp32", "tf32", "fp16", "bf16", "fp8")
AMPERE, HOPPER, BLACKWELL = 8.0, 9.0, 10.0          # compute capabilities
CHIPS = {AMPERE: "Ampere", HOPPER: "Hopper", BLACKWELL: "Blackwell"}
RECIPES = {"block": HOPPER, "mxfp8": BLACKWELL}     # Transformer Engine's that not all have that know FP8


@dataclass(frozen=True)
class Link:
    """What joins GPUs on one level: NVLink in a node, then the network."""

    name: str
    span: int                                       # GPUs that are joined, such as the 8 of a node; 0: any number
    latency: float                                  # seconds of one step of a collective
    bandwidth: float                                # bytes/s that one GPU sends, in one direction


@dataclass(frozen=True)
class Hardware:
    """A GPU, its node and its network."""

    name: str
    memory: float                                   # bytes of one GPU
    bandwidth: float                                # bytes/s to and from its memory
    peaks: dict[str, float] = field(hash=False)     # FLOP/s of its matmuls in each format, without sparsity
    links: tuple[Link, ...]                         # innermost first
    table: str = ""  # kernels measured on it, a file of `course bench kernels`; "": see kernel_efficiency.py
    host: str = ""                                  # what its host needs, a file of `course bench host`; "": as the H200's
    storage: float = math.inf                       # bytes/s that a node reads of its files; without it: from the page cache
    capability: float = math.inf                    # compute capability, such as 9.0 of Hopper; without it nothing is refused

    def peak(self, precision: str) -> float:
        """FLOP/s in a format. Raises `CourseError` if its tensor cores do not know it."""
        if precision not in self.peaks:
            raise CourseError(f"{self.name} has no matmuls in {precision}: what it has is {', '.join(self.peaks)}")
        return self.peaks[precision]

    def room(self, free: float) -> float:
        """Bytes of a GPU that a run may take which leaves a share of them free: a prediction may be off, and a run that lacks a
        byte ends."""
        return self.memory * (1 - free)


def presets() -> list[str]:
    """The names of the hardware that comes with the course."""
    return sorted(_presets())


def load(name: str) -> Hardware:
    """A preset, or a YAML file of the user's, whose `base` may be one. Raises `CourseError` for what is unknown or wrong."""
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
    """The plain values of a YAML file."""
    return read_yaml(path, "`key: value` lines")


def check(hardware: Hardware) -> Hardware:
    """Refuse what cannot be computed with."""
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
    """A table of `course bench KIND` that a hardware names: a path of the user's, or of one of the course's results."""
    for path in (Path(file), RESULTS / file):
        if path.exists():
            return path
    raise CourseError(f"hardware {hardware.name}: there is no table {file}: measure one with `course bench {kind} --out FILE` on "
                      "such a machine, or leave the key out")


def of_device(device: str) -> Hardware | None:
    """The preset of a GPU by PyTorch's name for it, such as "NVIDIA H100 80GB HBM3"; None if there is none.

    Where a chip comes with more or less memory the first is meant: they compute alike. H100s and H200s for PCIe do not, and
    have no preset.
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
    """Why a GPU does not do what a configuration asks for, in a sentence, as a run finds when it tries; "" if it does.

    PyTorch's flash and cuDNN attention are for 16 bits, from compute capability 8.0 (aten/src/ATen/native/transformers/cuda/
    sdp_utils.cpp); Transformer Engine scales blocks from 9.0, and in MX formats from 10.0 (its fp8.py, `check_*_support`).
    Triton supports GPUs from 8.0 (its README, "Compatibility"): on older ones nobody tried.
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
    """The sentence for a GPU that lacks something."""
    return (f"{what} needs a GPU of compute capability {least:.1f} ({CHIPS[least]}) or more, and {h.name} has "
            f"{h.capability:.1f}: set {instead}")
