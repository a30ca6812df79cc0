"""The output of a run: a progress bar or plain lines, metrics.jsonl, TensorBoard. Only rank 0 writes it."""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from course.training.trackers import Tracker
from course.utils.atomic_files import atomic, read_file
from course.utils.errors import CourseError
from course.utils.machine import in_notebook

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # importing it takes half a second


class Lines:
    """A file that grows by lines, without a buffer, so that a killed run keeps them.

    All lines are also kept in memory. Lines that a full disk does not take wait for free space, and lines that somebody removes
    while the file is open are written again.
    """

    def __init__(self, path: Path):
        self.path = path
        self.text = bytearray(b"".join(lines_of(path)))
        self.written = len(self.text)
        self.file = self._open()

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, text: str = "") -> None:
        """Write text, after any that waits. Raises `OSError` if it cannot write all."""
        self.text += text.encode()
        while self.written < len(self.text):
            self.written += os.write(self.file, self.text[self.written:])

    def restore(self) -> bool:
        """Write again the lines that the file has lost; returns whether it had lost any. A new file of that name gets the lines
        that it lacks."""
        with suppress(FileNotFoundError):
            there = self.path.stat()
            if os.path.samestat(there, os.fstat(self.file)) and there.st_size >= self.written:
                return False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = lines_of(self.path)
        new = self._open()
        os.close(self.file)
        there_now, known = b"".join(lines), set(lines)
        lacking = [line for line in bytes(self.text[:self.written]).splitlines(keepends=True) if line not in known]
        between = b"\n" if there_now and not there_now.endswith(b"\n") else b""
        waiting = self.text[self.written:]
        self.file, self.written = new, len(there_now)
        self.text = bytearray(there_now + between + b"".join(lacking)) + waiting
        self.add()
        return bool(lacking)

    def close(self) -> None:
        """Close the file."""
        os.close(self.file)


class RunLog:
    """Use as a context: `log` writes one record of scalars, `say` a line of text, `picture` a figure.

    speaks: whether this rank writes. every: steps between two records. configure: writes the run's configuration.
    open_trackers: begins the run's record at tracking services.
    """

    def __init__(self, folder: Path, steps: int, start: int, speaks: bool, tensorboard: bool, every: int = 1,
                 configure: Callable[[], None] | None = None, open_trackers: Callable[[], list[Tracker]] = list):
        self.folder, self.steps, self.start, self.speaks = folder, steps, start, speaks
        self.tensorboard, self.configure = tensorboard, configure
        self._bar: Any = None
        self._told = 0                               # number of records printed
        self._lines: Lines | None = None             # of metrics.jsonl
        self._board: Any = None
        self._trackers: list[Tracker] = []
        self.saved: Path | None = None               # the newest checkpoint since this start
        if not speaks:
            return
        folder.mkdir(parents=True, exist_ok=True)
        strange, last = drop_after(folder / "metrics.jsonl", start)
        self._lines = Lines(folder / "metrics.jsonl")
        if configure:
            configure()
        if tensorboard:
            self._board = self._new_board()
        self._trackers = open_trackers()
        if interactive():
            self._bar = tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True)
        if strange:
            self.say(f"{folder / 'metrics.jsonl'}: lines that are no record of a step: {strange}; left as they are, and out of "
                     "what is read")
        if start and (not last or 0 < every <= start - last):
            self.say(f"{folder / 'metrics.jsonl'} has no record of the steps {last + 1} to {start}, which are done: it goes on "
                     f"with step {start + 1}")

    def _new_board(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter  # slow to import: only where wanted

        return SummaryWriter(str(self.folder / "tensorboard"), purge_step=self.start + 1, flush_secs=10)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._lines is None:
            return
        failed = " and ".join(filter(None, [self._restore(), self._write()]))    # there may be free space by now
        self._lines.close()
        if self._board is not None:
            with suppress(OSError):
                self._board.close()
        for tracker in self._trackers:
            self._track(tracker, tracker.close)
        if failed and error is None:
            raise CourseError(f"{failed}: the same command resumes from what is still there")

    def restore(self) -> None:
        """Write again the run's files that somebody has removed or renamed since the last call."""
        if self._lines is not None and (failed := self._restore()):
            self.say(f"WARNING: {failed}: the next checkpoint, or the next line, makes up for it")

    def _restore(self) -> str:
        """Do so; returns what cannot be written and why, or ""."""
        assert self._lines is not None
        gone = []
        try:
            if self.configure and not (self.folder / "config.yaml").is_file():
                self.configure()
                gone.append("config.yaml")
            if self._lines.restore():
                gone.append("metrics.jsonl")
            if self.tensorboard and not any((self.folder / "tensorboard").glob("events*")):
                self._draw_again()
                gone.append("tensorboard")
        except (OSError, CourseError) as error:
            return f"{self.folder} was removed or renamed, and cannot be written again ({getattr(error, 'strerror', error)})"
        if gone:
            self.say(f"WARNING: removed or renamed while training, and written again in {self.folder}: {', '.join(gone)}")
        if self.saved is not None and not self.saved.exists():
            lost, self.saved = self.saved, None
            return f"{lost} was removed or renamed while training, and is the newest checkpoint"
        return ""

    def _draw_again(self) -> None:
        """Make a new TensorBoard folder with all scalars of this run."""
        (self.folder / "tensorboard").mkdir(parents=True, exist_ok=True)        # else the old one ends with a traceback
        if self._board is not None:                  # it may have failed since
            with suppress(OSError):
                self._board.close()
        self._board = self._new_board()
        for record in read_metrics(self.folder / "metrics.jsonl"):
            self._draw(record)

    def say(self, text: str) -> None:
        """Print a line of text, if there is any, without breaking the progress bar."""
        if self.speaks and text:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def log(self, record: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl; send its numbers to TensorBoard and a few of them to the terminal."""
        if self._lines is None:
            return
        if failed := self._write(json.dumps(finite(record)) + "\n"):
            self.say(f"WARNING: {failed}: its lines wait until it can")
        self._draw(record)
        for tracker in self._trackers:
            self._track(tracker, partial(tracker.send, dict(scalars(record)), record["step"]))
        if self._bar is None:
            self.say(line(record, self.steps))
            self._told += 1
            if self._told == 2 and (left := time_left(record, self.steps)):         # the first includes one-time work
                self.say(left)
        else:
            self._bar.update(record["step"] - self._bar.n)
            self._bar.set_postfix_str(f"loss {record['loss']:.4f}, {record['samples_per_s']:.1f} samples/s")
            if "valid_loss" in record:
                self.say(line(record, self.steps))

    def _track(self, tracker: Tracker, action: Callable[[], object]) -> None:
        """Use a tracking service. If it fails, in whatever way, training goes on without it."""
        try:
            action()
        except Exception as error:
            self.say(f"WARNING: {tracker.setting} failed ({type(error).__name__}: {error}): nothing more is sent until a new "
                     "start; metrics.jsonl has all")
            self._trackers = [other for other in self._trackers if other is not tracker]

    def _write(self, text: str = "") -> str:
        """Add to metrics.jsonl; returns what cannot be written and why, or "". Unwritten text goes before the next line."""
        assert self._lines is not None
        try:
            self._lines.add(text)
        except OSError as error:
            return f"{self.folder}/metrics.jsonl cannot be written ({error.strerror})"
        return ""

    def _draw(self, record: dict[str, Any]) -> None:
        """Send the numbers to TensorBoard."""
        self._to_board(lambda board: [board.add_scalar(name, value, record["step"]) for name, value in scalars(record)])

    def picture(self, name: str, figure: "Figure", step: int) -> None:
        """Add a figure to TensorBoard's image tab."""
        self._to_board(lambda board: board.add_figure(name, figure, step))

    def _to_board(self, add: Callable[[Any], object]) -> None:
        """Write to TensorBoard. It does not recover from a full disk or a lost folder, so it is closed and training goes on."""
        if self._board is None:
            return
        try:
            add(self._board)
        except OSError as error:
            self.say(f"WARNING: {self.folder}/tensorboard cannot be written ({error.strerror}): no curves until a new start")
            self._board = None


def interactive() -> bool:
    """Whether a progress bar can be drawn: a terminal or a notebook, not a batch job's log file."""
    return sys.stderr.isatty() or in_notebook()


def line(record: dict[str, Any], steps: int) -> str:
    """A record as one line for a log file."""
    text = (f"step {record['step']:>{len(str(steps))}}/{steps}  loss {record['loss']:.4f}  lr {record['lr']:.2e}  "
            f"grad norm {record['grad_norm']:.3g}  {record['step_ms']:.0f} ms  {record['samples_per_s']:.1f} samples/s")
    if record["skipped_steps"]:
        text += f"  skipped {record['skipped_steps']}"
    if "valid_loss" in record:
        text += f"  | validation: loss {record['valid_loss']:.4f}"
        for name, value in list(record.get("valid_rmse", {}).items())[:1]:
            text += f", {name} RMSE {value:.4f} of its deviation"
    return text


def time_left(record: dict[str, Any], steps: int) -> str:
    """The approximate time for the remaining steps, if that is a minute or more, else ""."""
    seconds = (steps - record["step"]) * record["step_ms"] / 1e3
    if seconds < 60:
        return ""
    return f"about {seconds / 60:.0f} minutes left" if seconds < 5400 else f"about {seconds / 3600:.1f} hours left"


def scalars(record: dict[str, Any]) -> list[tuple[str, float]]:
    """(name, value) of every number of a record, nested ones as `group/name`."""
    found = []
    for name, value in record.items():
        if isinstance(value, dict):
            found += [(f"{name}/{inner}", number) for inner, number in scalars(value)]
        elif isinstance(value, (int, float)):
            found.append((name, float(value)))
    return found


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """The record with infinities and NaN as strings: JSON has no such numbers."""
    return {name: finite(value) if isinstance(value, dict)
            else str(value) if isinstance(value, float) and not abs(value) < float("inf") else value
            for name, value in record.items()}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, without lines that are no records, such as a last one cut off by a crash."""
    return [record for line in lines_of(path) if (record := record_of(line)) is not None]


def drop_after(path: Path, step: int) -> tuple[int, int]:
    """Remove the records of steps that a resumed run will repeat, and a last line that was cut off.

    Returns the number of lines that are no records (damaged ones, or a user's own; they stay), and the last recorded step, or 0.
    """
    there = lines_of(path)
    records = [record_of(line) for line in there]
    if there and records[-1] is None and not there[-1].endswith(b"\n"):
        del there[-1], records[-1]
    kept = [line.rstrip(b"\r\n") + b"\n" for line, record in zip(there, records, strict=True)
            if record is None or record["step"] <= step]
    if path.is_file():
        with atomic(path) as temporary:
            temporary.write_bytes(b"".join(kept))
    return records.count(None), max((record["step"] for record in records if record and record["step"] <= step), default=0)


def lines_of(path: Path) -> list[bytes]:
    """The lines of a file with their line ends; none if the file does not exist."""
    return read_file(path).splitlines(keepends=True) if path.is_file() else []


def record_of(line: bytes) -> dict[str, Any] | None:
    """The record of a step in a line; None if the line is something else."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and type(found.get("step")) is int else None


def memory_gb(device: torch.device) -> float:
    """The peak memory of this process so far, in GB: of the GPU if it uses one, else of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak * 1024 / 1e9    # bytes there, KiB on Linux


class Stopwatch:
    """Measures seconds per step; call `restart` after anything that is not training."""

    def __init__(self, device: torch.device):
        self.device = device
        self.restart()

    def restart(self) -> None:
        """Start the measurement anew."""
        self._begin, self._steps = time.perf_counter(), 0

    def tick(self) -> None:
        """Count one step."""
        self._steps += 1

    def lap(self) -> float:
        """Mean seconds of the steps since the last lap or restart; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = (time.perf_counter() - self._begin) / max(1, self._steps)
        self.restart()
        return seconds
