"""`course doctor`: what this machine has, what it lacks, and the cure.

Transformer Engine and DALI are imported in separate processes: a crash or a hang there becomes a row of the table.
"""

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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from course.ops import triton_language
from course.utils.errors import CourseError, did_you_mean
from course.utils.machine import cores
from course.utils.tables import print_table

LIMIT = 60.0                                         # seconds that an import may take
TE_CURE = ('with an NVIDIA GPU: conda env create -f environment.yml, or '
           'pip install --no-build-isolation "transformer-engine[pytorch]"')
# format, the least compute capability that multiplies it in hardware, its name for --need
FORMATS = [("fp16", (7, 0), "fp16"), ("TF32", (8, 0), "tf32"), ("bf16", (8, 0), "bf16"), ("FP8", (8, 9), "fp8"),
           ("MXFP8, NVFP4", (10, 0), "mxfp8")]
ON_CPU = {"fp16": " to be fast; a CPU trains with the same values, slowly",
          "fp8": " to be fast; emulated on a CPU, which trains with the same values, slowly"}
DALI_CURE = "pip install nvidia-dali-cuda130"
# Runs in the child. The answer is marked, since packages print, too; if the import fails, it says why.
# os._exit, because a package that was imported may still crash while Python shuts down.
CHILD = r"""
import json, os, sys
def cudnns():
    lines = open('/proc/self/maps').read().splitlines() if os.path.exists('/proc/self/maps') else []
    return sorted({l.split(None, 5)[5] for l in lines if '/libcudnn.so' in l})
answer = {}
try:
    exec(sys.argv[1])
except BaseException as error:
    answer['error'] = ' '.join(f'{type(error).__name__}: {error}'.split())
print('\n@doctor ' + json.dumps(answer | {'cudnn': cudnns()}), flush=True)
os._exit(0)
"""


@dataclass(frozen=True)
class Row:
    """One line of the table. `ok` is None for a plain fact, or for something absent that nobody asked for."""

    what: str
    found: str
    ok: bool | None = None
    cure: str = ""
    need: str = ""                                   # its name for `--need`


def main(need: str = "") -> int:
    """Print the table; return exit status 1 if something in the comma-separated `need` is missing."""
    rows = examine()
    wanted = [name.strip() for name in need.split(",") if name.strip()]
    lacking = missing(rows, wanted)
    show(rows)
    for sentence in lacking:
        print(f"missing: {sentence}")
    return 1 if lacking else 0


def examine() -> list[Row]:
    """All rows; the slow ones are determined in parallel."""
    with ThreadPoolExecutor() as pool:
        slow = [pool.submit(part) for part in (package_rows, gpu_rows, tool_rows)]
        quick = python_rows() + host_rows()
        packages, gpus, tools = (task.result() for task in slow)
    return [*quick[:5], *gpus, *precision_rows(), *packages, *quick[5:], *tools]


def missing(rows: list[Row], wanted: list[str]) -> list[str]:
    """A sentence for each wanted thing that is missing. Raises `CourseError` for an unknown name."""
    known = {row.need: row for row in rows if row.need}
    for name in wanted:
        if name not in known:
            raise CourseError(f"--need {name} is unknown{did_you_mean(name, known)}; "
                              f"it is one of {', '.join(sorted(known))}")
    lacking = [known[name] for name in wanted if known[name].ok is not True]
    return [f"{row.what}: {row.found}" + (f"; cure: {row.cure}" if row.cure else "") for row in lacking]


def show(rows: list[Row]) -> None:
    """Print the table, with problems marked by color and by a word."""
    table = Table(title="course doctor")
    for head in ("what", "", "found"):
        table.add_column(head, overflow="fold")
    for row in rows:
        mark = {True: "[green]ok[/]", False: "[red]no[/]", None: ""}[row.ok]
        table.add_row(row.what, mark, (row.found + (f"\ncure: {row.cure}" if row.cure else "")).replace("[", r"\["))
    print_table(table, Console())


def python_rows() -> list[Row]:
    """Python, PyTorch and the libraries that it brings."""
    cuda, new = torch.cuda.is_available(), torch_version() >= (2, 10)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda and torch.distributed.is_nccl_available() else None
    return [
        Row("Python", f"{platform.python_version()} at {sys.executable}", (3, 11) <= sys.version_info[:2] < (3, 14)),
        Row("PyTorch", torch.__version__, new, "" if new else "pip install 'torch>=2.10'"),
        Row("CUDA", f"built for {torch.version.cuda}" if torch.version.cuda else "this PyTorch is built for CPUs"),
        cudnn_row(cuda),
        Row("NCCL", nccl or "not in use (gloo serves CPUs)", bool(nccl) or None, need="nccl"),
    ]


def cudnn_row(cuda: bool) -> Row:
    """PyTorch's cuDNN. If another one comes first in LD_LIBRARY_PATH, PyTorch raises and says so."""
    try:
        version = torch.backends.cudnn.version() if cuda else None
    except RuntimeError as error:
        return Row("cuDNN", " ".join(str(error).split())[:400], False, cudnn_cure())
    return Row("cuDNN", str(version) if version else "not in use")


def cudnn_cure() -> str:
    """The environment in which everything loads the cuDNN that pip installed with PyTorch; "" if there is none."""
    package = importlib.util.find_spec("nvidia.cudnn") if importlib.util.find_spec("nvidia") else None
    if not package or not package.submodule_search_locations:
        return ""
    home = shlex.quote(next(iter(package.submodule_search_locations)))
    return f"export CUDNN_HOME={home} LD_LIBRARY_PATH={home}/lib:$LD_LIBRARY_PATH"


def torch_version() -> tuple[int, int]:
    """PyTorch's major and minor version."""
    major, minor = re.findall(r"\d+", torch.__version__)[:2]
    return int(major), int(minor)


def host_rows() -> list[Row]:
    """HDF5, processors, memory, disk."""
    import h5py

    rows = [Row("HDF5", f"{h5py.version.hdf5_version}, h5py {h5py.__version__}", True, need="hdf5"),
            Row("CPU", f"{cores()} cores for this process, {memory_gb():.0f} GB of memory"),
            disk_row("disk here", Path.cwd(), 5, "free some space, or work on another disk")]
    if Path("/dev/shm").is_dir():
        rows.append(disk_row("shared memory", Path("/dev/shm"), 1, "data.loader=threads, or in a container --shm-size=8g"))
    return rows


def memory_gb() -> float:
    """Physical memory in GB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def disk_row(what: str, path: Path, least: float, cure: str) -> Row:
    """Free space in GB; less than `least` is a problem."""
    free = shutil.disk_usage(path).free / 1e9
    return Row(what, f"{free:.1f} GB free in {path}", free >= least, "" if free >= least else cure)


def gpu_rows() -> list[Row]:
    """The GPUs, according to PyTorch and nvidia-smi."""
    driver = command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        cure = ("this PyTorch is built for CPUs: install one built for CUDA" if not torch.version.cuda else
                "the driver may be older than this PyTorch needs") if driver else ""
        found = f"none for PyTorch, but the driver {driver[0]} is there" if driver else "none: everything runs on the CPU"
        return [Row("GPU", found, False if driver else None, cure, need="gpu"),
                Row("GPU links", "none", None, need="several-gpus")]
    rows = [Row(f"GPU {i}", f"{p.name}, {p.total_memory / 1e9:.0f} GB, compute capability {p.major}.{p.minor}", True,
                need="gpu" if i == 0 else "") for i, p in enumerate(map(torch.cuda.get_device_properties, range(count)))]
    rows.append(Row("driver", driver[0] if driver else "nvidia-smi is not on the PATH"))
    links = f"among {count} GPUs; nvidia-smi topo -m shows them" if count > 1 else "one GPU"
    rows.append(Row("GPU links", links, count > 1 or None, need="several-gpus"))
    return rows


def precision_rows() -> list[Row]:
    """Which number formats the first GPU multiplies in hardware (the CPU where there is none)."""
    if not torch.cuda.is_available():
        return [Row(what, "on the CPU: correct, and fast if it has AVX512-BF16 or AMX", True, need=need) if need == "bf16" else
                Row(what, f"needs a GPU of compute capability {least[0]}.{least[1]} or more" + ON_CPU.get(need, ""), need=need)
                for what, least, need in FORMATS]
    return precisions(torch.cuda.get_device_capability(0))


def precisions(capability: tuple[int, int]) -> list[Row]:
    """The rows for a GPU of this compute capability."""
    has = f"compute capability {capability[0]}.{capability[1]}"
    return [Row(what, f"{has}, needs {least[0]}.{least[1]}", True if capability >= least else None, need=need)
            for what, least, need in FORMATS]


def package_rows() -> list[Row]:
    """Triton, Transformer Engine and DALI; the last two tried in parallel."""
    with ThreadPoolExecutor() as pool:
        tried = [pool.submit(transformer_engine_row), pool.submit(dali_row)]
        return [triton_row(), *(task.result() for task in tried)]


def triton_row() -> Row:
    """Triton, and whether kernels are interpreted or compiled here."""
    if not triton_language.INSTALLED:
        return Row("Triton", "not installed", None, triton_language.CURE, "triton")
    how = "interprets kernels on the CPU" if triton_language.INTERPRETED else "compiles kernels for the GPU"
    return Row("Triton", f"{triton_language.triton.__version__}, {how}", True, need="triton")


def transformer_engine_row() -> Row:
    """Transformer Engine, actually imported, and whether it uses PyTorch's cuDNN."""
    code = ("import contextlib, torch\n"
            "with contextlib.suppress(RuntimeError): answer['torch_version'] = torch.backends.cudnn.version()\n"
            "answer['torch_cudnn'] = cudnns()\n"                # before Transformer Engine has loaded its own
            "import transformer_engine.pytorch as te\n"
            "if hasattr(te, 'get_cudnn_version'): answer['te_version'] = list(te.get_cudnn_version())\n"
            "ok, reason = te.is_fp8_available(return_reason=True) if hasattr(te, 'is_fp8_available') else (False, 'too old')\n"
            "answer.update(fp8=ok, reason=str(reason))")
    return package_row("Transformer Engine", "transformer_engine", "transformer-engine", code, TE_CURE, "te", judge_te)


def judge_te(version: str, answer: dict) -> Row:
    """The row for a Transformer Engine that imports, from its answer."""
    fp8 = "FP8 available" if answer["fp8"] else f"no FP8: {answer['reason']}"
    wrong = wrong_cudnn(answer)
    if wrong:
        home = next((str(Path(p).parent) for p in answer.get("torch_cudnn", [])), "the folder of PyTorch's cuDNN")
        return Row("Transformer Engine", f"{version}, {fp8}; but {wrong}: it then falls back to unfused attention, "
                   "three times slower, without a word", False,
                   cudnn_cure() or f"export CUDNN_HOME={home} LD_LIBRARY_PATH={home}:$LD_LIBRARY_PATH", "te")
    return Row("Transformer Engine", f"{version}, {fp8}", True, need="te")


def wrong_cudnn(answer: dict) -> str:
    """The problem if Transformer Engine loaded a cuDNN that PyTorch had not, or reports another version; else ""."""
    other = sorted(set(answer["cudnn"]) - set(answer["torch_cudnn"])) if answer.get("torch_cudnn") else []
    if other:
        return f"it loads {', '.join(other)} beside PyTorch's {', '.join(answer['torch_cudnn'])}"
    ours, major_minor_patch = answer.get("torch_version"), answer.get("te_version")
    if ours and major_minor_patch:
        theirs = sum(part * scale for part, scale in zip(major_minor_patch, (10000, 100, 1), strict=True))
        return "" if theirs == ours else f"it uses cuDNN {theirs}, PyTorch {ours}"
    return ""


def dali_row() -> Row:
    """DALI, actually imported."""
    code = "import nvidia.dali, nvidia.dali.fn\nanswer['version'] = nvidia.dali.__version__"     # cuda120, cuda130: one name
    return package_row("DALI", "nvidia.dali", "nvidia-dali-cuda130", code, DALI_CURE, "dali",
                       lambda version, answer: Row("DALI", answer["version"], True, need="dali"))


def package_row(what: str, module: str, distribution: str, code: str, cure: str, need: str,
                judge: Callable[[str, dict], Row]) -> Row:
    """Import a package in a separate process, where `code` fills the dict `answer`, and judge that."""
    try:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError
    except ModuleNotFoundError:
        return Row(what, "not installed", None, cure, need)
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    status, out, err = in_child(code)
    answer = parse_answer(status, out, err)
    if "error" in answer:
        return Row(what, f"{version}, but importing it fails: {answer['error'][:400]}", False, cure_for(answer, cure), need)
    return judge(version, answer)


def in_child(code: str) -> tuple[int | None, str, str]:
    """Run `code`: (exit status or None if out of time, output, errors). Files, not pipes: a grandchild may keep a pipe open."""
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        child = subprocess.Popen([sys.executable, "-P", "-c", CHILD, code], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                 start_new_session=True)
        status: int | None
        try:
            status = child.wait(LIMIT)
        except subprocess.TimeoutExpired:
            status = None
            with suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)             # with all that the import started
            child.wait()
        out.seek(0)
        err.seek(0)
        return status, out.read(), err.read()


def parse_answer(status: int | None, out: str, err: str) -> dict:
    """The child's answer, or {'error': what ended it}."""
    marked = [line for line in out.splitlines() if line.startswith("@doctor ")]
    if marked:
        return json.loads(marked[-1].removeprefix("@doctor "))
    if status is None:
        return {"error": f"it takes more than {LIMIT:.0f} s"}
    how = f"it crashed (signal {-status})" if status < 0 else f"it ended Python with status {status}"
    last = err.strip().splitlines()[-1:]
    return {"error": f"{how} after: {last[0]}" if last else how}


def cure_for(answer: dict, otherwise: str) -> str:
    """The cure for well-known failures, else `otherwise`."""
    error, cudnn = answer["error"], cudnn_cure()
    if cudnn and ("cudnn" in error.lower() or "undefined symbol" in error):
        return f"let PyTorch's own cuDNN come first: {cudnn}; if that does not help, build it against this PyTorch: {otherwise}"
    if "undefined symbol" in error:
        return f"it was built for another PyTorch; build it for this one (pip: --force-reinstall --no-cache-dir): {otherwise}"
    if "libcuda.so" in error or not torch.cuda.is_available():
        return f"it may need an NVIDIA GPU and driver; without a GPU leave it out (otherwise: {otherwise})"
    return otherwise


def tool_rows() -> list[Row]:
    """Slurm, the profiler, the sandbox for learners' code, and the compiler for torch.compile."""
    slurm, nsys, bubblewrap = command("sinfo", "--version"), command("nsys", "--version"), command("bwrap", "--version")
    idle = not slurm and bool(shutil.which("sinfo"))             # its programs fail without a slurm.conf
    return [Row("Slurm", slurm or ("installed, not configured" if idle else "not installed"), bool(slurm) or None,
                'two nodes on this machine alone: eval "$(course cluster start)"' if idle else "", need="slurm"),
            Row("Nsight Systems", nsys.splitlines()[-1] if nsys else "not installed (the PyTorch profiler serves)",
                bool(nsys) or None, need="nsys"),
            Row("bubblewrap", bubblewrap or "not installed (checks run with limits alone; `course grade` wants it)",
                bool(bubblewrap) or None, need="bubblewrap"), compiler_row()]


def compiler_row() -> Row:
    """The C++ compiler: torch.compile writes C++ for a CPU, and for a GPU the code that launches its kernels."""
    there = next((name for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name and shutil.which(name)), "")
    version = command(there, "--version") if there else ""
    if not version:
        return Row("C++ compiler", "not installed (compile=true needs one)", None,
                   "apt-get install g++, or on a Mac xcode-select --install", need="compiler")
    return Row("C++ compiler", version.splitlines()[0], True, need="compiler")


def command(*words: str) -> str:
    """A command's output; "" if it does not exist, fails, or takes more than ten seconds."""
    try:
        done = subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace", timeout=10, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
