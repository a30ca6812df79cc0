"""Detect a stalled run and report where each rank is. Each rank records what it is doing; one reports when all are stuck.

    RUN/.ranks/00003            rank 3's record, which one of its threads rewrites every few seconds
    RUN/.ranks/00003.stack      its stacks, if Python's lock was held so long that the thread could not write

The files lie in the run's folder because every rank can reach it, whichever others are stopped or gone. The training thread notes
what it begins (`at`), in a plain tuple: no collective, no wait for the device. A run has stalled when every rank that answers has
been at one thing for longer than allowed. So a rank that compiles, validates or saves, which may take longer, excuses the ranks
that wait for it. PyTorch's flight recorder (gloo and NCCL) says which collective a rank waits in.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn

import psutil
import torch

from course.checkpoint.checkpoint import steps
from course.parallel.mesh import World, fail, node
from course.ranks.collective_mismatch import lost
from course.ranks.collective_trace import where
from course.resilience.folder_lock import has_ended, process_space
from course.utils.atomic_files import check_kind, read_file
from course.utils.errors import CourseError, rank_names
from course.utils.machine import in_notebook

SLOW, LEAST = 6.0, 60.0                              # starting, compiling, validating and saving may take SLOW times
                                                     # stall_s, and in any case LEAST seconds
BEAT = 2.0                                           # seconds between a rank's records, if there are few ranks
MISSED = 3                                           # records that a rank may miss before it counts as silent
GRACE = 2.0                                          # seconds for the rank that reports, before the others end
NEAR = 16                                            # ranks on either side that a rank checks: ranks of one node are adjacent
SIZE, SHORT = 16_384, 1024                           # bytes of a record, allocated at once, so that a full disk loses none;
                                                     # bytes that are written while there is no stack to report
PARTS = ("starting", "waiting for data", "in its step", "validating", "saving")      # parts of a step, in order


@dataclass(frozen=True)
class Record:
    """What a rank reports of itself."""

    rank: int
    host: str
    pid: int
    space: str = ""                                  # the namespace in which the pid is valid
    start: str = ""                                  # the name of this start of the run
    beat: int = 0                                    # counts its records
    time: float = 0.0                                # when it was written, by the rank's own clock
    step: int = 0
    doing: str = "starting"
    since: float = 0.0                               # when it began this
    stuck: bool = False                              # whether it has been at this for longer than allowed
    place: str = ""                                  # if stuck: the training thread's line,
    waits: str = ""                                  # its first incomplete collective,
    stack: str = ""                                  # and its stack
    end: str = ""                                    # how it ended, as a sentence

    @property
    def who(self) -> str:
        """"rank 3 (process 4711 of node n2)"."""
        return f"rank {self.rank} (process {self.pid} of {self.host})"


@dataclass
class Watchdog:
    """Watch a run for stalls, as a context around it; `at` notes what this rank begins.

    stall_s: seconds that a step may take; 0: no watch. start: the same on all ranks, different for each start. Records of other
    starts are ignored.

    If the run stalls, one rank reports on stderr which rank is late, where it is and who waits for it. Then all ranks end with
    status 1. If the block ends because another rank is gone, it raises a `CourseError` that names that rank.
    """

    run: Path
    world: World
    stall_s: float
    start: str = ""
    _now: tuple[float, float, int, str, bool] = (0.0, 0.0, 0, "starting", True)     # monotonic, clock, step, doing, slow
    _over: threading.Event = field(default_factory=threading.Event)
    _seen: dict[int, tuple[int, float]] = field(default_factory=dict)       # each rank's newest beat, and when it was seen first
    _dump: IO[str] = sys.stderr                      # until there is a file

    def __post_init__(self) -> None:
        self.record = Record(self.world.rank, node(), os.getpid(), process_space(), self.start)
        self.period = min(max(BEAT, self.world.size / 100), self.stall_s / 10) if self.stall_s else BEAT    # at most 100 a second
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.at(0, "starting", slow=True)

    def at(self, step: int, doing: str, slow: bool = False) -> None:
        """Note that this rank begins something; slow: it may take longer than a step."""
        self._now = time.monotonic(), time.time(), step, doing, slow

    def __enter__(self) -> "Watchdog":
        if self.watching():
            self._main = threading.get_ident()
            mine = record_path(self.run, self.world.rank)
            mine.parent.mkdir(parents=True, exist_ok=True)
            check_kind(mine)
            check_kind(Path(f"{mine}.stack"))
            self._write()
            if self.world.rank == 0:
                remove_old_records(self.run, self.world.size)
            self._dump = open(f"{mine}.stack", "a", encoding="utf-8")
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.watching():
            return
        self._over.set()
        self._thread.join(5)                         # else it might write once more
        faulthandler.cancel_dump_traceback_later()
        self._dump.close()
        refused = isinstance(error, CourseError) and self._now[2] == 0      # before its first step: leaves no trace
        if error is not None:
            self.end_silent()
        if error is None or refused or self.world.size == 1:
            self._remove_files()
        elif not lost(error):
            self._write(end=f"failed: {type(error).__name__}: {first_line(error)}")
        else:
            self._write(end="lost another rank")
            self._report_lost_rank(error)

    def watching(self) -> bool:
        """Whether to watch: never in a notebook's own process, which must not be ended."""
        return self.stall_s > 0 and not in_notebook()

    def _watch(self) -> None:
        """The thread's loop: write a record, decide if stuck, and check a neighbor."""
        while not self._over.wait(self.period):
            with suppress(OSError):                  # if the file system does not answer, the next beat tries again
                self._dump.truncate(0)
            faulthandler.dump_traceback_later(max(MISSED * self.period, 2.0), file=self._dump)  # unless the next beat comes first
            begun, *_, slow = self._now
            stuck = time.monotonic() - begun > (slow_step_seconds(self.stall_s) if slow else self.stall_s)
            self._write(**self._position() if stuck else {})
            if stuck:
                self._decide()
            self._check_neighbor()

    def _write(self, **more: Any) -> None:
        """Write the record in place, where a full disk still has space for it."""
        _, since, step, doing, _ = self._now
        plight: dict[str, Any] = {"stuck": False, "place": "", "waits": "", "stack": ""} | more
        short = self.record.beat > 0 and not self.record.stuck and not more         # the rest of the file is blank
        self.record = replace(self.record, beat=self.record.beat + 1, time=time.time(), step=step, doing=doing, since=since,
                              **plight)
        path = record_path(self.run, self.world.rank)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)              # somebody may have removed or renamed the run's folder
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as out:
                out.write(encode_record(self.record).ljust(SHORT if short else SIZE))

    def _position(self) -> dict[str, Any]:
        """The training thread's line, collective and stack."""
        frame = sys._current_frames().get(self._main)
        stack = "".join(traceback.format_stack(frame))
        return {"stuck": True, "place": where(frame), "waits": pending_collective(), "stack": stack[-9000:]}

    def _read(self, rank: int) -> Record | None:
        """A rank's record, if it is from this start."""
        found = read_record(self.run, rank)
        return found if found is not None and found.start == self.start else None

    def _check_rank(self, rank: int) -> tuple[Record | None, bool]:
        """A rank's record, and whether it still answers."""
        found, now = self._read(rank), time.monotonic()
        beat, when = self._seen.get(rank, (-1, now))
        if found is not None and found.beat != beat:
            beat, when = found.beat, now
        self._seen[rank] = beat, when
        return found, now - when < MISSED * self.period

    def _decide(self) -> None:
        """This rank is stuck. The lowest rank that answers decides whether all are, and reports; the others follow it."""
        for rank in range(self.world.rank):
            found, answers = self._check_rank(rank)
            if answers:
                if found is not None and found.end:
                    time.sleep(GRACE)
                    self.end_silent()
                    os._exit(1)
                return
        looks = {rank: self._check_rank(rank) for rank in range(self.world.size) if rank != self.world.rank}
        silent = {rank for rank, (_, answers) in looks.items() if not answers}
        records = {rank: found or Record(rank, "an unknown node", 0) for rank, (found, _) in looks.items()}
        if all(record.stuck or record.end for rank, record in records.items() if rank not in silent):
            records[self.world.rank] = self.record   # else a rank is at work, or may still be
            self._end("\n".join(stall_report(self.run, records, silent, self.stall_s)))

    def _check_neighbor(self) -> None:
        """Check whether the next rank, if on this machine, has died without a word: NCCL would let its peers wait for it. A
        stopped rank checks nobody, so this rank then checks the one after it."""
        found = None
        for step in range(1, min(NEAR, self.world.size - 1) + 1):
            rank = (self.world.rank + step) % self.world.size
            found = self._read(rank)
            if not (found and is_here(found) and is_stopped(found.pid)):
                break
        if found and is_dead(found) and not self._over.wait(GRACE):
            again = self._read(rank)
            if again and not again.end:
                self._end(describe_gone(self.run, again))

    def _end(self, text: str) -> None:
        """Report, and end this process, whatever its training thread is doing."""
        print(f"course: {text}", file=sys.stderr, flush=True)
        self._write(end="told that the run cannot go on")
        threading.Thread(target=fail, args=(self.world,), daemon=True).start()      # may hang on the rank that serves the store
        time.sleep(min(GRACE, self.period))
        self.end_silent()
        os._exit(1)

    def end_silent(self) -> None:
        """After a failure, kill ranks of this node that cannot end by themselves: stopped ones, and those long silent.

        They would hold the job until its launcher gives up. Each rank checks only its neighbors, up to NEAR on either side.
        """
        for rank in range(max(0, self.world.rank - NEAR), min(self.world.size, self.world.rank + NEAR + 1)):
            found, answers = self._check_rank(rank)
            if rank != self.world.rank and found and not found.end and is_here(found) and (not answers or is_stopped(found.pid)):
                with suppress(OSError):
                    os.kill(found.pid, signal.SIGKILL)

    def _report_lost_rank(self, error: BaseException) -> None:
        """Another rank is gone. The lowest remaining rank finds out which, and reports it; the others end without a word."""
        until = time.monotonic() + (MISSED + 1) * self.period
        self._wait_for_lower_rank(until)
        guilty = None
        while guilty is None:
            looks = [(rank, *self._check_rank(rank)) for rank in range(self.world.size) if rank != self.world.rank]
            if any(self._has_explained(rank, found) for rank, found, _ in looks):
                self._end_quietly()
            guilty = next((found for _, found, answers in looks
                           if found and not found.end and (is_dead(found) or not answers)), None)
            if guilty is None and time.monotonic() > until:
                raise CourseError(f"a connection between ranks has broken though all of them answer ({first_line(error)}): look "
                                  f"at the network. {resume_hint(self.run)}") from error
            time.sleep(self.period / 10)
        raise CourseError(describe_gone(self.run, guilty)) from error

    def _wait_for_lower_rank(self, until: float) -> None:
        """End if a lower rank remains, which then reports; return if this rank is the lowest.

        Each round checks twice as many ranks: if the lowest rank lives, the others hardly read more than its record.
        """
        looked, left, first = 0, self.world.rank > 0, dict[int, int]()
        while left and time.monotonic() < until:
            looked = min(2 * looked + 1, self.world.rank)
            left = looked < self.world.rank
            for rank in range(looked):
                found, answers = self._check_rank(rank)
                if self._has_explained(rank, found):
                    self._end_quietly()
                if found and (found.end or found.beat != first.setdefault(rank, found.beat)):
                    raise SystemExit(1) from None
                left = left or (answers and not (found and is_dead(found)))
            time.sleep(self.period / 10)

    def _has_explained(self, rank: int, found: Record | None) -> bool:
        """Whether a rank has ended by itself and said why."""
        return bool(found and found.end.startswith("failed")) or not record_path(self.run, rank).exists()

    def _end_quietly(self) -> NoReturn:
        """End, because another rank has said why."""
        print("another rank has failed: this one ends, too", file=sys.stderr, flush=True)
        raise SystemExit(1) from None

    def _remove_files(self) -> None:
        """Remove this rank's files, and the folder with the last of them."""
        path = record_path(self.run, self.world.rank)
        with suppress(OSError):
            Path(f"{path}.stack").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            path.parent.rmdir()
            self.run.rmdir()                         # removes only an empty folder
            self.run.parent.rmdir()


def slow_step_seconds(stall_s: float) -> float:
    """Seconds that starting, compiling, validating and saving may take."""
    return max(SLOW * stall_s, LEAST)


def remove_old_records(run: Path, size: int) -> None:
    """Remove the records of an earlier, larger world."""
    for path in (run / ".ranks").glob("[0-9]*"):
        if int(path.name[:5]) >= size:
            path.unlink(missing_ok=True)


def record_path(run: Path, rank: int) -> Path:
    """The path of a rank's record."""
    return run / ".ranks" / f"{rank:05d}"


def read_record(run: Path, rank: int) -> Record | None:
    """A rank's record; None if there is none, or it is being written."""
    try:
        return Record(**json.loads(read_file(record_path(run, rank))))
    except (OSError, ValueError, TypeError):
        return None


def encode_record(record: Record) -> bytes:
    """A record as at most SIZE bytes: when a short record overwrites a longer one, the end of that would stay.

    The newest calls of a stack are kept. A non-ASCII letter takes up to twelve bytes.
    """
    record = replace(record, place=record.place[:500], waits=record.waits[:500], end=record.end[:500])
    while len(text := json.dumps(asdict(record)).encode()) > SIZE:
        record = replace(record, stack=record.stack[len(record.stack) // 2 + 1:])
    return text


def read_stacks(run: Path, rank: int) -> str:
    """The stacks that `faulthandler` wrote for a rank whose threads could not run; "" if there are none."""
    with suppress(OSError):
        return read_file(Path(f"{record_path(run, rank)}.stack")).decode(errors="replace").rstrip()
    return ""


def is_dead(record: Record) -> bool:
    """Whether a rank's process was on this node and has ended."""
    return is_here(record) and has_ended(record.pid)


def is_here(record: Record) -> bool:
    """Whether a rank's process is on this node, in our namespace of pids."""
    return (record.host, record.space) == (node(), process_space())


def is_stopped(pid: int) -> bool:
    """Whether a process of this node is stopped (SIGSTOP)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, short enough for one sentence."""
    return str(error).strip().split("\n")[0][:160]


def pending_collective() -> str:
    """This process's first incomplete collective, by PyTorch's flight recorder; "" if there is none."""
    entries: list[dict[str, Any]] = []
    for which in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):      # NCCL and gloo have separate recorders
        dump = getattr(torch._C._distributed_c10d, which, None)
        with suppress(RuntimeError, ValueError, TypeError):
            entries += json.loads(dump(True, True)).get("entries", []) if dump else []
    pending = next((entry for entry in entries if not entry["retired"] and entry["state"] != "completed"), None)
    if pending is None:
        return ""
    shapes = ", ".join(str(tuple(shape)) for shape in pending["input_sizes"][:4])
    backend, _, what = pending["profiling_name"].partition(":")
    number = pending["p2p_seq_id"] if pending["is_p2p"] else pending["collective_seq_id"]
    group = pending["process_group"][1] or pending["process_group"][0]
    return f"{what} of {shapes} ({backend}, number {number} of group {group})"


def stall_report(run: Path, records: Mapping[int, Record], silent: set[int], stall_s: float) -> list[str]:
    """The report of a stalled run: which ranks are late, where the others wait, and the stacks of the late ones."""
    answering = [record for rank, record in sorted(records.items()) if rank not in silent]
    late = [record for record in answering if not record.waits and not record.end]
    if len(late) in (0, len(answering)):             # nobody, or everybody
        late = ranks_behind(answering) or late
    lines = ["this run has stalled: "
             + "; ".join([describe_silent(run, records[rank]) for rank in sorted(silent) if rank in records]
                          + [describe_late(record) for record in late]
                          or ["all ranks wait, but not in the same collective"])]
    kinds: dict[tuple[int, str, str], list[int]] = {}
    for record in answering:
        if record not in late:
            kinds.setdefault((record.step, record.waits, record.place), []).append(record.rank)
    for (step, waits, place), ranks in kinds.items():
        lines.append(f"  {rank_names(ranks)} wait{'s' * (len(ranks) == 1)} at step {step} in {waits}, {place}")
    lines.append(f"  {resume_hint(run)} If a step may take longer than {stall_s:g} s, set train.stall_s higher")
    for rank in sorted(silent):
        if text := read_stacks(run, rank):
            lines += [f"the stacks of rank {rank}, the newest call first:", text[-9000:]]
    for record in late[:4] or answering[:0 if silent else 2]:
        lines += [f"the stack of rank {record.rank}:", record.stack.rstrip()]
    return lines


def ranks_behind(records: list[Record]) -> list[Record]:
    """The ranks behind others, by their own notes: the recorder never sees collectives in a CUDA graph complete."""
    order = [(record.step, PARTS.index(record.doing)) for record in records]
    return [record for record, place in zip(records, order, strict=True) if place == min(order) < max(order)]


def describe_silent(run: Path, record: Record) -> str:
    """A rank that does not answer, in a sentence."""
    held = "its training thread holds Python's lock" if read_stacks(run, record.rank) else "it is stopped, or its node is gone"
    what = "is dead" if is_dead(record) else f"does not answer: {held}"
    return (f"{record.who} {what}; it was last heard at {format_clock(record.time)}, at step {record.step}, {record.doing} since "
            f"{format_clock(record.since)}")


def describe_late(record: Record) -> str:
    """A rank that answers, but keeps the others waiting."""
    return f"{record.who} is at step {record.step}, {record.doing} since {format_clock(record.since)}, in {record.place}"


def describe_gone(run: Path, record: Record) -> str:
    """A rank that ended without a word."""
    return (f"{record.who} is gone: it was killed (by hand, for memory, or with its node). It was last heard at "
            f"{format_clock(record.time)}, at step {record.step}, {record.doing}. {resume_hint(run)}")


def resume_hint(run: Path) -> str:
    """Where the run goes on when it is started again."""
    saved = steps(run / "checkpoints")
    return f"Start it again: it goes on from {saved[-1]}." if saved else "It has no checkpoint yet: start it again."


def format_clock(seconds: float) -> str:
    """A time of day."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))
