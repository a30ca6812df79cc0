"""Profile training steps: named parts of a step, and a window of steps under PyTorch's profiler.

    with part("compute"): ...                      in the step, always on; costs almost nothing without a profiler
    with Window(folder, rank, device) as window:   around some steps; writes a trace for perfetto.dev and `course profile`

    with NsysWindow(device):                       the same for `nsys profile --capture-range=cudaProfilerApi`

nsys shows the parts too: they are NVTX ranges on a GPU.
"""

import gzip
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, record_function

from course.utils.atomic_files import atomic, make_parent
from course.utils.errors import CourseError

if TYPE_CHECKING:
    from course.config import Profile

PARTS = ("data", "compute", "gradients", "optimizer")       # of a step: compute is forward and backward, gradients the averaging
os.environ.setdefault("KINETO_LOG_LEVEL", "99")     # else PyTorch's profiler prints its start and end on stderr
SNAPSHOT = 100_000                                   # allocations that a memory snapshot remembers


@contextmanager
def part(name: str) -> Iterator[None]:
    """A named part of the step, in traces of PyTorch's profiler and of nsys."""
    nvtx = torch.cuda.is_initialized()
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()


class Window:
    """Profile the block. Writes `trace-RANK.json.gz`, with `memory` on a GPU also `memory-RANK.pickle`.

    The latter is for pytorch.org/memory_viz: what was allocated where, and when. The device is idle at start and end, so
    that the trace has all work of the steps inside, and nothing else.
    """

    def __init__(self, folder: Path, rank: int, device: torch.device, memory: bool = False):
        self.trace, self.snapshot = folder / f"trace-{rank}.json.gz", folder / f"memory-{rank}.pickle"
        self.device, self.memory = device, memory and device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self.profiler: Any = torch.profiler.profile(activities=kinds)

    def __enter__(self) -> "Window":
        make_parent(self.trace)
        if self.memory:
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT)
        self._settle()
        self.profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._settle()
        self.profiler.__exit__(*error)
        try:
            if error[0] is None:
                self._write()
        finally:
            if self.memory:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self) -> None:
        with atomic(self.trace) as temporary:
            plain = temporary.with_suffix(".json")   # PyTorch looks at the extension
            self.profiler.export_chrome_trace(str(plain))
            with open(plain, "rb") as source, gzip.open(temporary, "wb", compresslevel=3) as target:
                shutil.copyfileobj(source, target)
            plain.unlink()
        if self.memory:
            with atomic(self.snapshot) as temporary:
                torch.cuda.memory._dump_snapshot(str(temporary))

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class NsysWindow:
    """The block that `nsys profile --capture-range=cudaProfilerApi` records; without nsys around the process, nobody does.

    Raises `CourseError` without a GPU.
    """

    def __init__(self, device: torch.device):
        if device.type != "cuda":
            raise CourseError("profile.tool=nsys records GPUs, and this run has none: use profile.tool=pytorch")
        self.device = device

    def __enter__(self) -> "NsysWindow":
        torch.cuda.synchronize(self.device)          # the device is idle at start and end, as in `Window`
        torch.cuda.profiler.start()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.profiler.stop()


def window_of(settings: "Profile", folder: Path, rank: int, device: torch.device) -> Window | NsysWindow:
    """The window for the configured tool. Raises `CourseError` for nsys without a GPU."""
    return NsysWindow(device) if settings.tool == "nsys" else Window(folder, rank, device, settings.memory)


class ProfileWindow:
    """The profiled window of a run: `steps` steps after the first `after` ones; none if `steps` is 0."""

    def __init__(self, settings: "Profile", start: int, folder: Path, rank: int, device: torch.device):
        self.first, self.last = start + settings.after + 1, start + settings.after + settings.steps
        self.window = window_of(settings, folder, rank, device) if settings.steps else None
        self.open = ExitStack()

    def before(self, step: int) -> None:
        """Start the profiler if this step is the first of the window."""
        if self.window and step == self.first:
            self.open.enter_context(self.window)

    def after(self, step: int) -> str:
        """Stop the profiler if this step was the last of the window. Returns a message then, else ""."""
        if not self.window or step != self.last:
            return ""
        self.open.close()
        steps = f"profiled steps {self.first} to {self.last}: "
        if isinstance(self.window, NsysWindow):
            return steps + "nsys writes its report when the run ends"
        return steps + f"`course profile {self.window.trace}` says where their time went"
