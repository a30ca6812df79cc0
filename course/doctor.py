"""What this machine has, what it lacks, and the cure: `course doctor`, `course doctor --need fp8,dali`.

Every finding is a `Row`; a section is a function that returns rows; `examine` collects them, `report` draws
them. Packages that bring compiled code of their own are imported in a child process with a time limit, so
that their crash or hang is a row of the table and not the doctor's end.
"""

import difflib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from course.errors import CourseError
from course.files import sha256

if TYPE_CHECKING:
    from rich.table import Table

LIMIT = 60          # seconds that a child may import; Transformer Engine takes about 15 on a cold disk
ANSWER = "@doctor "  # marks the child's answer among whatever the package itself prints
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One finding. `ok`: True present, False broken, None informational or absent and perhaps not needed."""

    what: str
    found: str
    ok: bool | None = None
    cure: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU as PyTorch sees it: memory in GiB, compute capability (major, minor)."""

    name: str
    memory: float
    capability: tuple[int, int]


@dataclass(frozen=True)
class Package:
    """A package to try: `module` is imported by the child, `spec` only looked for, which must load nothing."""

    what: str
    module: str
    spec: str
    install: str


PACKAGES = [
    Package("Transformer Engine", "transformer_engine.pytorch", "transformer_engine",
            'pip install --no-build-isolation "transformer-engine[pytorch]"'),
    Package("DALI", "nvidia.dali", "nvidia.dali", "pip install nvidia-dali-cuda130"),
]
NEEDS = {"gpu": "GPU", "several-gpus": "GPU links", "nccl": "NCCL", "bf16": "bf16", "fp8": "FP8", "hdf5": "HDF5",
         "te": "Transformer Engine", "dali": "DALI", "slurm": "Slurm", "nsys": "Nsight Systems"}   # --need: row


# Sections

def python_rows() -> list[Row]:
    return [Row("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}, "
                          f"{sys.executable}", True)]


def torch_rows() -> list[Row]:
    """PyTorch and what it was built with: CUDA, cuDNN, NCCL."""
    import torch
    build = torch.version.cuda
    driver = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    cuda = f"{build or 'none in this PyTorch'} (build), driver {driver.splitlines()[0] if driver else 'none'}"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else ""
    return [Row("PyTorch", torch.__version__, True), Row("CUDA", cuda, True if build and driver else None), cudnn_row(),
            Row("NCCL", nccl or "none in this PyTorch; CPU ranks use gloo", bool(nccl) or None,
                "install a CUDA build of PyTorch (Linux): https://pytorch.org/get-started")]


def cudnn_row() -> Row:
    """The cuDNN that PyTorch loads, and whether it is the one installed with it."""
    import torch
    version = torch.backends.cudnn.version()        # raises, with the reason, where it does not fit PyTorch
    if version is None:
        return Row("cuDNN", "none in this PyTorch")
    home, loaded = cudnn_home(), loaded_cudnn()
    wrong = strangers(loaded, glob(f"{home}/lib/libcudnn.so*")) if home else []
    if wrong:
        return Row("cuDNN", f"{version} from {wrong[0]}, not the one installed with PyTorch", False, cudnn_cure(home))
    return Row("cuDNN", f"{version // 10000}.{version // 100 % 100}.{version % 100}", True)


def gpu_rows() -> list[Row]:
    """The GPUs, the links between them, and which precisions they and the CPU have."""
    import torch
    with warnings.catch_warnings(record=True) as caught:     # PyTorch says why CUDA does not start as a warning
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = []
    for index in range(count):
        seen = torch.cuda.get_device_properties(index)
        gpus.append(Gpu(seen.name, seen.total_memory / GIB, (seen.major, seen.minor)))
    complaint = " ".join(one_line(str(w.message)) for w in caught)
    rows = present(gpus) if gpus else [no_gpu(torch.version.cuda, said("nvidia-smi", "-L"), complaint)]
    if count > 1:
        links = parse_links(said("nvidia-smi", "topo", "-m"))
        rows.append(Row("GPU links", describe_links(links) or "nvidia-smi topo -m does not tell", True))
    return rows + precision_rows(gpus, cpu_bf16())


def package_rows() -> list[Row]:
    """Transformer Engine and DALI, each imported in a child, all children at once."""
    installed = [package for package in PACKAGES if is_installed(package)]
    answers = dict(zip(installed, probe(installed), strict=True))
    rows = []
    for package in PACKAGES:
        rows += import_rows(package, answers[package]) if package in answers else [
            Row(package.what, "not installed", None, package.install)]
    return rows


def hdf5_rows() -> list[Row]:
    try:
        import h5py
    except Exception as error:
        return [Row("HDF5", reason(error), False, "pip install --force-reinstall h5py")]
    return [Row("HDF5", f"h5py {h5py.version.version}, HDF5 {h5py.version.hdf5_version}", True)]


def tool_rows() -> list[Row]:
    return [tool_row("Slurm", "sinfo", "run on a cluster's login node; on one Debian machine: apt-get install slurm-wlm"),
            tool_row("Nsight Systems", "nsys", "https://developer.nvidia.com/nsight-systems/get-started")]


def machine_rows() -> list[Row]:
    """Disk, shared memory, cores, memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()    # macOS has none
    free = shutil.disk_usage(".").free / GIB
    return [Row("Disk", f"{free:.1f} GiB free in {Path.cwd()}", free > 5, "free some space, or work on another disk"),
            shared_memory_row(), Row("CPU cores", f"{cores} available", True), memory_row()]


# What the sections ask

def said(*command: str) -> str:
    """What a command prints, '' where it is not installed, fails, or takes longer than 20 seconds."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20,
                              stdin=subprocess.DEVNULL)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def tool_row(what: str, program: str, cure: str) -> Row:
    if shutil.which(program) is None:
        return Row(what, "not installed", None, cure)
    version = one_line(said(program, "--version"))
    return Row(what, version or f"installed, but `{program} --version` fails", bool(version), "" if version else cure)


def present(gpus: list[Gpu]) -> list[Row]:
    """One row for each kind of GPU."""
    kinds = Counter((g.name, round(g.memory, 1), g.capability) for g in gpus)
    return [Row("GPU", f"{count} x {name}, {memory} GiB, compute capability {capability[0]}.{capability[1]}: "
                       + ", ".join(precisions(capability)), True)
            for (name, memory, capability), count in kinds.items()]


def no_gpu(build: str | None, listed: str, complaint: str) -> Row:
    """Why PyTorch sees no GPU: its CUDA build (None for a CPU build), `nvidia-smi -L`, PyTorch's own warning."""
    if not listed:
        return Row("GPU", complaint or "none", None, "run on a machine with an NVIDIA GPU and its driver")
    if build is None:
        return Row("GPU", f"{listed.splitlines()[0]}, but this PyTorch is a CPU build", False,
                   "install a CUDA build of PyTorch: https://pytorch.org/get-started")
    why = complaint or f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
    return Row("GPU", f"{listed.splitlines()[0]}, but PyTorch does not see it: {why}", False,
               f"unset CUDA_VISIBLE_DEVICES, or update the driver to one that serves CUDA {build}")


def precisions(capability: tuple[int, int]) -> list[str]:
    """The tensor-core precisions of a compute capability, as (major, minor) [CUDA C++ Programming Guide]."""
    since = {"fp16": (7, 0), "TF32": (8, 0), "bf16": (8, 0), "FP8": (8, 9), "MXFP8": (10, 0), "NVFP4": (10, 0)}
    return [name for name, first in since.items() if capability >= first]


def cpu_bf16() -> bool | None:
    """Whether the CPU computes in bf16 itself; None where PyTorch does not tell."""
    import torch
    tell = getattr(torch.cpu, "get_capabilities", None)      # newer than the oldest PyTorch that the course supports
    if tell is None:
        return None
    return any(tell().get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def precision_rows(gpus: list[Gpu], native: bool | None) -> list[Row]:
    """bf16 and FP8: on every GPU; without GPUs bf16 is the CPU's, native or emulated (None: unknown)."""
    cpu = {True: "native", False: "emulated: right, but slow", None: "works; native or emulated, PyTorch does not tell"}
    fp8 = "a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell)"
    if not gpus:
        return [Row("bf16", f"on this CPU {cpu[native]}", native or None, "a GPU from Ampere on has it"),
                Row("FP8", "no GPU", None, f"use {fp8}")]
    weakest = min(gpus, key=lambda gpu: gpu.capability)
    has = precisions(weakest.capability)
    kinds = [name for name in has if name in ("FP8", "MXFP8", "NVFP4")]
    return [Row("bf16", "on every GPU" if "bf16" in has else f"not on {weakest.name}", "bf16" in has or None,
                "use a GPU of compute capability 8.0 or later (Ampere)"),
            Row("FP8", ", ".join(kinds) or f"not on {weakest.name}", bool(kinds) or None, f"use {fp8}"),
            Row("CPU bf16", cpu[native])]


def parse_links(topology: str) -> dict[tuple[int, int], str]:
    """The link of each pair of GPUs from what `nvidia-smi topo -m` prints: {(0, 1): 'NV18', ...}."""
    table = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", topology).splitlines()]   # the header is underlined
    header: list[str] = next((cells for cells in table if cells and cells[0] == "GPU0"), [])
    links = {}
    for cells in table:
        for name, link in zip(header, cells[1:], strict=False):      # NICs and affinities follow, in no need of names
            pair = re.fullmatch(r"GPU(\d+) GPU(\d+)", f"{cells[0]} {name}")
            if pair and cells is not header and int(pair[1]) < int(pair[2]):
                links[int(pair[1]), int(pair[2])] = link
    return links


def describe_links(links: dict[tuple[int, int], str]) -> str:
    """'every pair NV18 (NVLink)', or the pairs of each kind of link, in nvidia-smi's numbering."""
    kinds: dict[str, list[str]] = {}
    for (first, second), link in links.items():
        kinds.setdefault(f"{link} ({'NVLink' if link.startswith('NV') else 'PCIe'})", []).append(f"{first}-{second}")
    if len(kinds) == 1:
        return f"every pair {next(iter(kinds))}"
    return "; ".join(f"{kind}: {' '.join(pairs)}" for kind, pairs in kinds.items())


def shared_memory_row(folder: str = "/dev/shm") -> Row:
    if not Path(folder).is_dir():
        return Row("Shared memory", f"no {folder} on this system")
    usage = shutil.disk_usage(folder)
    return Row("Shared memory", f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {folder}",
               usage.free > GIB, "data loader workers need it: docker run --shm-size=8g, or fewer workers")


def memory_row() -> Row:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        sizes = parse_meminfo(meminfo.read_text())
        return Row("Memory", f"{sizes['MemAvailable']:.1f} of {sizes['MemTotal']:.1f} GiB available", True)
    try:
        return Row("Memory", f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / GIB:.1f} GiB", True)
    except (ValueError, OSError, AttributeError):
        return Row("Memory", "this system does not tell")


def parse_meminfo(text: str) -> dict[str, float]:
    """/proc/meminfo in GiB: {'MemTotal': 31.3, ...}."""
    return {name: int(kib) / 2**20 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


