"""Where a step's time went: an account of a profiler trace that counts every microsecond once.

Time in which the device computes belongs to a phase (forward, backward, gradients or optimizer), whatever runs beside it.
Other time is exposed communication, else an exposed copy, else idle time: the host waits for data, is busy launching (the
step is launch-bound), or does something else.

A trace is in Chrome's format, as PyTorch's profiler writes it: events with a name, a category, and times in microseconds.
Without a GPU the operators on the host count as the device's work.
"""

import gzip
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course.training.profiler import PARTS
from course.utils.colors import STEP
from course.utils.errors import CourseError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Event = dict[str, Any]
Times = defaultdict[str, float]
# what a kernel or an operator does, by words in its name; the first match counts
KINDS = {"communication": ("nccl", "c10d::", "gloo:", "symm_mem", "one_shot", "two_shot"), "copy": ("memcpy", "memset"),
         "attention": ("fmha", "flash", "sdpa", "scaled_dot_product", "attention"),
         "matmul": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "gemv", "splitk", "_scaled_mm", "aten::mm", "aten::addmm",
                    "aten::bmm", "aten::baddbmm"),
         "optimizer": ("multi_tensor", "_fused_adam", "_fused_sgd")}
FP8 = ("e4m3", "e5m2", "fp8", "f8f8", "_qq", "float8")       # in the names of matmul kernels that multiply 8-bit numbers
ON_DEVICE, ON_HOST = ("kernel", "gpu_memcpy", "gpu_memset"), ("cpu_op",)
BACKWARD = "autograd::engine::evaluate_function"
WORK = ("attention", "matmul", "optimizer", "other")         # kinds that compute, in the order in which they claim an instant
PHASES = ("forward", "backward", "gradients", "optimizer")
LABELS = {"forward": "forward", "backward": "backward", "gradients": "averaging gradients", "optimizer": "optimizer",
          "communication": "communication, exposed", "copy": "copies, exposed", "data": "idle: waiting for data",
          "launch": "idle: launching", "idle": "idle: else"}


@dataclass(frozen=True)
class Account:
    """Milliseconds per step, averaged over the steps in the trace."""

    steps: int
    step: float                                      # from the first step's start to the last one's end, over steps
    time: dict[str, float]                           # by the keys of LABELS; their sum is `step`
    kinds: dict[str, float]                          # of the computing time: attention, matmul, optimizer, other
    communication: float                             # total; the part that is not exposed is hidden behind computation
    kernels: list[tuple[str, float, float]]          # name, calls per step, ms per step; the most expensive first
    fp8: float                                       # share of the matmuls' time in 8-bit kernels
    gpu: bool

    @property
    def hidden(self) -> float:
        """Milliseconds of communication beside computation, which the step does not wait for."""
        return max(0.0, self.communication - self.time["communication"])


def read(path: Path) -> list[Event]:
    """The events of a trace, .json or .json.gz."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
            return list(json.load(file)["traceEvents"])
    except FileNotFoundError as error:
        raise CourseError(f"there is no file {path}: give a trace, which `course profile PRESET` writes, or a preset") from error
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise CourseError(f"{path} is no trace of PyTorch's profiler ({type(error).__name__}): record one with "
                          "`course profile PRESET` or profile.steps=3") from error


def kind_of(name: str) -> str:
    """What a kernel or operator does: a key of KINDS, or "other"."""
    small = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in small for word in words)), "other")


def parts_of(events: Iterable[Event]) -> list[Event]:
    """The named parts of steps among a trace's events."""
    return [event for event in events if event.get("cat") == "user_annotation" and event["name"] in PARTS]


def account(events: list[Event]) -> Account:
    """The account of a trace. Raises `CourseError` if it has no steps, as `course train` and `course profile` record them."""
    events = [event for event in events if event.get("ph") == "X" and event.get("dur", 0) > 0]
    parts = parts_of(events)
    steps = sum(event["name"] == "optimizer" for event in parts)
    if not steps:
        raise CourseError("this trace holds no whole step: record one with `course profile PRESET` or profile.steps=3")
    gpu = any(event.get("cat") == "kernel" for event in events)
    work = [event for event in events if event.get("cat") in (ON_DEVICE if gpu else ON_HOST)]
    if not gpu:
        work = [event for event in work if "::" in event["name"] and not event["name"].startswith(BACKWARD)]   # these only call
    begin = min(event["ts"] for event in parts)
    end = max(event["ts"] + event["dur"] for event in [*parts, *work])
    time, kinds, communication = sweep(parts, list(phased(work, events, parts, gpu)), begin, end)
    per = 1e-3 / steps
    calls, spent = Counter[str](), Times(float)
    for event in work:
        calls[event["name"]] += 1
        spent[event["name"]] += event["dur"]
    matmuls = {name: total for name, total in spent.items() if kind_of(name) == "matmul"}
    eights = sum(total for name, total in matmuls.items() if any(word in name.lower() for word in FP8))
    longest = sorted(spent, key=lambda name: -spent[name])[:12]
    return Account(steps, (end - begin) * per, {key: time[key] * per for key in LABELS},
                   {kind: kinds[kind] * per for kind in WORK}, communication * per,
                   [(name, calls[name] / steps, spent[name] * per) for name in longest],
                   eights / max(1e-9, sum(matmuls.values())), gpu)


def communication(events: list[Event]) -> tuple[float, float]:
    """(total, exposed) milliseconds in which a trace's GPU communicates; exposed: it computes nothing meanwhile."""
    work = [(event["ts"], event["ts"] + event["dur"], kind_of(event["name"]), PHASES[0]) for event in events
            if event.get("cat") in ON_DEVICE and event.get("dur", 0) > 0]
    begin, end = min((start for start, *_ in work), default=0.0), max((stop for _, stop, *_ in work), default=0.0)
    time, _, total = sweep([], work, begin, end)
    return 1e-3 * total, 1e-3 * time["communication"]


def phased(work: list[Event], events: list[Event], parts: list[Event], gpu: bool) -> Iterable[tuple[float, float, str, str]]:
    """(begin, end, kind, phase) of each piece of work; the phase is the one in which the host launched it."""
    launches = {event["args"]["correlation"]: event for event in events
                if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})}
    later = [Ranges(event for event in parts if event["name"] == name) for name in ("optimizer", "gradients")]
    backward: dict[Any, Ranges] = {}
    for thread in {event.get("tid") for event in events if event["name"].startswith(BACKWARD)}:
        backward[thread] = Ranges(e for e in events if e.get("tid") == thread and e["name"].startswith(BACKWARD))
    for event in work:
        cause = launches.get(event.get("args", {}).get("correlation"), event) if gpu else event
        if later[0].hold(cause["ts"]):
            phase = "optimizer"
        elif later[1].hold(cause["ts"]):
            phase = "gradients"
        else:
            ranges = backward.get(cause.get("tid"))
            phase = "backward" if ranges and ranges.hold(cause["ts"]) else "forward"
        yield event["ts"], event["ts"] + event["dur"], kind_of(event["name"]), phase


class Ranges:
    """Time intervals, which may be nested."""

    def __init__(self, events: Iterable[Event]):
        self.begins: list[float] = []
        self.ends: list[float] = []
        for event in sorted(events, key=lambda event: event["ts"]):
            if not self.ends or event["ts"] > self.ends[-1]:
                self.begins.append(event["ts"])
                self.ends.append(event["ts"] + event["dur"])
            else:
                self.ends[-1] = max(self.ends[-1], event["ts"] + event["dur"])

    def hold(self, time: float) -> bool:
        """Whether a moment lies within one of them."""
        number = bisect_right(self.begins, time) - 1
        return number >= 0 and time <= self.ends[number]


def sweep(parts: list[Event], work: list[tuple[float, float, str, str]], begin: float,
          end: float) -> tuple[Times, Times, float]:
    """Sweep over the time once. Returns microseconds by the keys of LABELS, of computing by kind, and of all communication."""
    marks: list[tuple[float, int, tuple[str, str]]] = []
    for event in parts:
        marks += [(event["ts"], 1, ("part", event["name"])), (event["ts"] + event["dur"], -1, ("part", event["name"]))]
    for start, stop, kind, phase in work:
        marks += [(max(start, begin), 1, (kind, phase)), (max(stop, begin), -1, (kind, phase))]
    time, kinds, active = Times(float), Times(float), Counter[tuple[str, str]]()
    communication, now = 0.0, begin
    for moment, change, what in sorted(marks):
        span, now = moment - now, moment
        if span > 0:
            there = {key for key, count in active.items() if count > 0}
            communication += span * any(kind == "communication" for kind, _ in there)
            label, kind = claim(there)
            time[label] += span
            kinds[kind] += span
        active[what] += change
    time["idle"] += max(0.0, end - now)
    return time, kinds, communication


def claim(there: set[tuple[str, str]]) -> tuple[str, str]:
    """What an instant with all this under way counts as: a key of LABELS, and the kind of work if the device computes."""
    for kind in WORK:
        for phase in PHASES:
            if (kind, phase) in there:
                return phase, kind
    for kind in ("communication", "copy"):
        if any(other == kind for other, _ in there):
            return kind, ""
    if ("part", "data") in there:
        return "data", ""
    return ("launch" if any(kind == "part" for kind, _ in there) else "idle"), ""


def text(found: Account) -> str:
    """The account as a table."""
    lines = [f"a step takes {found.step:.2f} ms on the {'GPU' if found.gpu else 'CPU'}, the mean of {found.steps}", ""]
    lines += [f"  {label:24s} {found.time[key]:9.2f} ms  {found.time[key] / found.step:6.1%}"
              for key, label in LABELS.items() if found.time[key] > 0]
    lines += ["", "  of the computing:  " + ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in found.kinds.items() if ms > 0)]
    if found.communication:
        lines += [f"  communication:     {found.communication:.2f} ms, of which {found.hidden:.2f} ms hidden behind computation"]
    if found.gpu:
        lines += [f"  matmuls in FP8:    {found.fp8:.0%} of their time"]
    lines += ["", "  the most expensive " + ("kernels" if found.gpu else "operators, with those that they call") + ":"]
    lines += [f"  {ms:9.2f} ms {calls:7.1f} x  {name[:90]}" for name, calls, ms in found.kernels]
    return "\n".join(lines)


def picture(found: Account, title: str) -> "Figure":
    """The account as one bar, left to right in the order of the table."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.4), layout="constrained")
    axes = figure.subplots()
    left = 0.0
    for key, label in LABELS.items():
        ms = found.time[key]
        if ms > 0.002 * found.step:
            axes.barh(0, ms, left=left, color=STEP[key], edgecolor="white", label=f"{label}, {ms:.1f}")
            left += ms
    axes.set(xlabel="milliseconds of one step", yticks=[], xlim=(0, found.step), title=title)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    return figure
