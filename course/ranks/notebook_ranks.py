"""Run a function on several ranks of this machine, even one that is defined in a cell of a notebook.

    def total(x):
        x = torch.tensor(x * dist.get_rank())
        dist.all_reduce(x)
        return x.item()

    ranks(4)(total, 10)                              # [60, 60, 60, 60]

The ranks are separate processes, forked from a fresh interpreter that imports PyTorch once for all of them
(`course/ranks/fork_server.py`). They are not forks of this process: a notebook's kernel has threads, and a fork would lose them
in the middle of their work. The ranks stay for the next call until one fails. Then all are stopped, and a `RankError` says what
happened.
"""

import atexit
import linecache
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle

from course.parallel.rendezvous import telling_after
from course.ranks import fork_server
from course.ranks.collective_mismatch import DISAGREE, explain
from course.ranks.fork_server import FORKS, START
from course.utils.errors import describe_exit, rank_names
from course.utils.machine import machine_load

LONG = 20.0                                          # seconds until it reports that ranks take long to start
GRACE = 2.0                                          # seconds for the other ranks after one has failed
COMMAND = "import sys; from course.ranks.rank_process import rank_forker; rank_forker(sys.argv[1], *map(int, sys.argv[2:]))"


class Failure(NamedTuple):
    """A rank's failure; the smallest of several is the first cause."""

    lost: bool                                       # whether it only lost another rank
    when: float
    rank: int
    text: str
    error: bytes = b""                               # the exception, if it could be pickled


class RankError(Exception):
    """A call failed. `text` says what happened; `rank` failed first, None if the ranks failed to meet.

    `unmet` is the part of the text that says how their collectives differ, if that is what went wrong. It is empty if a rank
    raised or died of something else, or took too long.
    """

    def __init__(self, text: str, rank: int | None = None, unmet: str = ""):
        super().__init__(text)
        self.text, self.rank, self.unmet = text, rank, unmet


def ranks(n: int, timeout: float = 60.0, imports: str = "") -> Callable[..., list[Any]]:
    """`ranks(n)(function, ...)` calls the function on n ranks, joined by gloo, and returns their results in order.

    As a decorator, `@ranks(n)`, it calls the function at once and leaves the results under its name. What a rank prints appears
    here. A rank imports a module once: after you change a file, `close()` makes the next call start afresh. imports: a module to
    import once for all new ranks, before they start.

    Raises `RankError` if a rank raises or dies, if the ranks cannot meet in a collective, or if they are not done after `timeout`
    seconds.
    """
    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        __tracebackhide__ = True                     # IPython and pytest show only the caller's line
        call = cloudpickle.dumps((function, args, kwargs))
        with _lock:
            try:
                if n not in _pools:
                    _pools[n] = Pool(n, imports)
                return _pools[n].run(call, timeout)
            except BaseException:                    # Ctrl-C too: the ranks may be anywhere
                close(n)
                raise

    return run


def close(n: int | None = None) -> None:
    """Stop the ranks that wait for the next `ranks(n)`; without n, stop all ranks."""
    with _lock:
        for size in list(_pools) if n is None else [n]:
            if size in _pools:
                _pools.pop(size).stop()


_pools: dict[int, "Pool"] = {}
_lock = threading.RLock()                            # one call at a time
atexit.register(close)


class Worker:
    """A rank, seen from its caller."""

    def __init__(self, rank: int):
        self.rank = rank
        self.state = "starting"                      # then "ready", "running", and "returned", "raised" or "died"
        self.reply: Any = None                       # its result, pickled, or its Failure
        self.left = False                            # whether it left the process group that imported modules may know
        self.place = ""                              # its current line, if asked
        self.line = b""                              # printed, but not a whole line yet
        self.pid = 0                                 # 0: not forked yet
        self.code: int | None = None                 # its exit code
        self.control, self.theirs = Pipe()
        self.printed, self.out = Pipe(duplex=False)  # a pipe; ranks write to it without a Connection

    def listen(self) -> bool:
        """Take a message; False if there will be no more."""
        try:
            vars(self).update(self.control.recv())   # what has changed
        except (EOFError, OSError):
            return False
        return True

    def echo(self) -> bool:
        """Read and print what the rank printed; False if there will be no more."""
        data = os.read(self.printed.fileno(), 1 << 16)
        self.say(data)
        return bool(data)

    def say(self, text: bytes) -> None:
        """Print whole lines, and keep the rest."""
        *lines, self.line = (self.line + text).split(b"\n")
        for line in lines:
            print(f"[rank {self.rank}] {line.decode(errors='replace')}", flush=True)

    def send(self, message: Any) -> None:
        """Send to the rank; if it is dead, `hear` notices."""
        with suppress(OSError):
            self.control.send(message)


class RankForker:
    """The process that ranks are forked from. It reports when they start and end."""

    def __init__(self, workers: list[Worker], n: int, imports: str):
        self.workers = workers
        self.news, theirs = Pipe(duplex=False)
        self.process: subprocess.Popen[bytes] | None = None      # a fork of the server is not our child
        environment = os.environ | {"WORLD_SIZE": str(n), "PYTHONPATH": os.pathsep.join(sys.path),
                                    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}    # needs no network
        pipes = [end.fileno() for worker in workers for end in (worker.theirs, worker.out)]
        out = workers[0].out.fileno()
        if FORKS:
            job = {"imports": imports, "first": workers[0].rank, "environment": environment, "path": sys.path}
            self.pid = fork_server.fork(job, [theirs.fileno(), out, *pipes], out)
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, imports, str(theirs.fileno()), str(workers[0].rank), *map(str, pipes)],
                pass_fds=[theirs.fileno(), *pipes], env=environment, start_new_session=True,      # Ctrl-C is for the caller
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
            self.pid = self.process.pid
        for end in (theirs, *(end for worker in workers for end in (worker.theirs, worker.out))):
            end.close()

    def listen(self) -> bool:
        """Take news of a rank: first its pid, then its exit code. False if there will be no more."""
        try:
            rank, change = self.news.recv()
        except (EOFError, OSError):
            code = self.process.wait() if self.process else 1
            for worker in self.workers:              # those without news
                worker.code = code if worker.code is None else worker.code
            return False
        vars(next(worker for worker in self.workers if worker.rank == rank)).update(change)
        return True

    def stop(self) -> None:
        """Kill the ranks, the processes that they started, and the process that they were forked from."""
        for worker in self.workers:
            if worker.pid and worker.code is None:
                with suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
            worker.control.close()                   # a rank whose pid is not known yet then ends by itself
        end = time.monotonic() + GRACE
        while not self.news.closed:                  # the forker ends when all of its ranks have
            if not self.news.poll(max(0.0, end - time.monotonic())):
                if self.pid:                         # 0 would be our own process group
                    with suppress(ProcessLookupError):
                        os.kill(self.pid, signal.SIGKILL)
                return
            if not self.listen():
                self.news.close()


class Pool:
    """n ranks that stay between calls."""

    def __init__(self, n: int, imports: str = ""):
        self.n, self.imports = n, imports
        self.calls = 0
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.workers: list[Worker] = []
        self.nurseries: list[RankForker] = []
        self.sources: dict[Any, Callable[[], bool]] = {}         # pipe -> what to call when it has data
        self.progress: Any = None                    # of the ranks at the last check
        self.still = 0                               # checks since there was any

    def run(self, call: bytes, timeout: float) -> list[Any]:
        """Run one call on all ranks."""
        if not self.workers:
            self.start()
        self.calls += 1
        self.progress = None
        folder = self.folder / str(self.calls)
        folder.mkdir()
        # for tracebacks: the source of notebook cells, which is in no file
        cells = {file: entry[2] for file, entry in list(linecache.cache.items()) if len(entry) > 1 and not os.path.exists(file)}
        for worker in self.workers:
            worker.state = "running"
            worker.send({"call": call, "folder": folder, "cells": cells, "path": sys.path, "cwd": os.getcwd()})
        late = not self.until(lambda: self.settled(folder), timeout)
        if self.failures():
            self.until(lambda: "running" not in self.states(), GRACE)
        self.drain()
        text, _ = explain(folder, self.states())
        if late or text or self.failures():
            raise self.error(f"Not done after {timeout:g} s." if late else "", text)
        shutil.rmtree(folder)
        for worker in self.workers:
            worker.send("forget")                    # all are done: leave this call's groups
        if any(worker.left for worker in self.workers):
            close(self.n)
        return [pickle.loads(worker.reply) for worker in self.workers]

    def start(self) -> None:
        """Start the processes and wait until they have imported PyTorch."""
        for rank in range(self.n):
            worker = Worker(rank)
            self.workers.append(worker)
            self.sources |= {worker.control: worker.listen, worker.printed: worker.echo}
        together = self.n if FORKS else 1
        with telling_after(LONG, lambda: f"starting {self.n} ranks takes more than {LONG:g} s: {machine_load()}"):
            for first in range(0, self.n, together):
                nursery = RankForker(self.workers[first:first + together], self.n, self.imports)
                self.nurseries.append(nursery)
                self.sources[nursery.news] = nursery.listen
            begun = self.until(lambda: "starting" not in self.states(), START)
        if not begun or self.failures():
            raise self.error(self.unstarted(), "")

    def unstarted(self) -> str:
        """Why ranks did not start, as far as known, and what to do."""
        late = [worker.rank for worker in self.workers if worker.state == "starting"]
        why = f": after {START:g} s {rank_names(late)} had not imported PyTorch" if late else ""
        if not all(nursery.pid for nursery in self.nurseries):
            why = f": the process that they are forked from did not answer within {START:g} s, or was killed"
        return (f"The ranks did not start{why}; {machine_load()}. What they printed stands above. If it says nothing, end other "
                "programs, or wait until the machine has less to do, and call again, or ask for fewer ranks.")

    def states(self) -> list[str]:
        """The state of each rank."""
        return [worker.state for worker in self.workers]

    def failures(self) -> list[Failure]:
        """The ranks' failures, the cause first."""
        return sorted(worker.reply for worker in self.workers if worker.state in ("raised", "died"))

    def until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Listen to the ranks until `done()`; False if that takes longer than `seconds`."""
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                return False
            self.hear(0.1)
        return True

    def settled(self, folder: Path) -> bool:
        """Whether all are done, or one has failed, or it is certain that they cannot meet."""
        if "running" not in self.states() or self.failures():
            return True
        progress = self.states(), [file.stat().st_size for file in folder.glob("*.jsonl")]
        self.still = self.still + 1 if progress == self.progress else 0
        self.progress = progress
        return self.still == 3 and explain(folder, self.states())[1]      # not at each check: a trace may be long

    def hear(self, seconds: float) -> bool:
        """Print output, take messages, note deaths; False if nothing came for `seconds`."""
        ended = [worker for worker in self.workers if worker.code is not None]
        ready = wait(list(self.sources), seconds)
        for source in ready:
            if not self.sources[source]():
                del self.sources[source]
                source.close()                       # type: ignore[union-attr]
        for worker in ended:                         # all that they sent has been taken by now
            if worker.state in ("starting", "running"):
                worker.state = "died"
                worker.reply = Failure(False, time.time(), worker.rank, f"{describe_exit(worker.code or 0)}.")
        return bool(ready)

    def drain(self) -> None:
        """Print all remaining output."""
        while self.hear(0):
            pass
        for worker in self.workers:
            worker.say(b"\n" if worker.line else b"")

    def error(self, headline: str, explanation: str) -> RankError:
        """The error with all that is known, and the first exception as its cause."""
        lost = [worker for worker in self.workers if worker.state == "running" and (headline or not explanation)]
        for worker in lost:
            worker.send("where")
        self.until(lambda: all(worker.place for worker in lost), 1.0)
        failures = self.failures()
        causes = [failure for failure in failures if not failure.lost] or failures
        told: dict[str, list[int]] = {}              # text -> the ranks that failed with it
        for failure in failures:
            text = failure.text if failure in causes else "lost the connection to another rank."
            told.setdefault(text, []).append(failure.rank)
        story = [headline, *(f"{rank_names(sorted(told[text])).capitalize()} {text}" for text in told)]
        story += [f"Rank {worker.rank} is at {worker.place or 'a place where it does not answer'}." for worker in lost]
        alone = bool(headline) or (any(not failure.lost for failure in failures) and not explanation.startswith(DISAGREE))
        error = RankError("\n".join(filter(None, [*story, explanation])), causes[0].rank if causes else None,
                          "" if alone else explanation)
        with suppress(Exception):                    # not every exception can be unpickled
            error.__cause__ = pickle.loads(causes[0].error)
        return error

    def stop(self) -> None:
        """Kill the ranks and the processes that they started."""
        for nursery in self.nurseries:
            for source in (nursery.news, *(worker.control for worker in nursery.workers)):
                self.sources.pop(source, None)
            nursery.stop()
        self.drain()                                 # print their last output
        shutil.rmtree(self.folder, ignore_errors=True)
