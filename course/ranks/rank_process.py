"""A rank of `course/ranks/notebook_ranks.py`: a process that runs one call after another and sends back the results."""

import gc
import itertools
import linecache
import os
import pickle
import queue
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from io import TextIOWrapper
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import _rendezvous_handlers

from course.ranks.collective_mismatch import lost
from course.ranks.collective_trace import LIBRARIES, Trace, where
from course.ranks.fork_server import FORKS
from course.ranks.notebook_ranks import GRACE, Failure
from course.utils.machine import end_with_parent

FOREVER = timedelta(days=1)                          # gloo's timeout; the caller watches the time


def rank_forker(imports: str, news: int, first: int, *pipes: int) -> None:
    """Fork ranks from this process, which has imported PyTorch; report the start and end of each.

    Its only threads are OpenBLAS's, which cope with forks. imports: a module that the ranks will need, or "". pipes: for each
    rank one to talk through and one to print to. Without forks (macOS) each rank has its own forker, which becomes that rank.
    """
    if imports:
        import_module(imports)
    told, n = Connection(news, readable=False), int(os.environ["WORLD_SIZE"])
    born: dict[int, int] = {}                        # the rank of each process
    if not FORKS:
        told.send((first, {"pid": os.getpid()}))
        begin(first, n, (pipes[0], pipes[1]), set(pipes))            # `news` stays open while it lives
    for rank, ends in enumerate(zip(pipes[::2], pipes[1::2], strict=True), first):
        pid = os.fork()
        if not pid:
            begin(rank, n, ends, {news, *pipes})
        born[pid] = rank
        told.send((rank, {"pid": pid}))
    for end in pipes:
        os.close(end)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)     # a reader of the ranks' output waits until all writers have closed it
    os.dup2(1, 2)
    tend(told, born)


def tend(told: Connection, born: dict[int, int]) -> None:
    """Report each rank that ends. When the caller is gone, kill ranks that do not end by themselves, such as stopped ones.

    The kernel says so: the pipe `told` then has no reader.
    """
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)   # it only has to wake this process
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    watch, end = select.poll(), None
    watch.register(awake, select.POLLIN)
    watch.register(told, 0)                          # errors are reported unasked
    while born:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            with suppress(OSError):
                told.send((born.pop(pid), {"code": os.waitstatus_to_exitcode(status)}))
            continue
        if end is not None and time.monotonic() > end:
            for rank in born:
                with suppress(ProcessLookupError):
                    os.killpg(rank, signal.SIGKILL)
        for fd, _ in watch.poll(100 if end is not None else None):
            if fd == awake:
                os.read(awake, 4096)
            elif end is None:
                watch.unregister(told)
                end = time.monotonic() + GRACE


def begin(rank: int, n: int, ends: tuple[int, int], inherited: set[int]) -> None:
    """Become a rank with its own session, name and output."""
    control, out = ends
    if os.getsid(0) != os.getpid():
        os.setsid()                                  # its own children die with it
        end_with_parent()
    os.dup2(out, 1)
    os.dup2(out, 2)
    for fd in inherited - {control}:
        os.close(fd)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    work(control, rank, n)


def work(fd: int, rank: int, n: int) -> None:
    """A rank's loop: call after call, until its caller is gone."""
    control, lock, main = Connection(fd), threading.Lock(), threading.get_ident()
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    folder: Path | None = None

    def send(**change: Any) -> None:
        with lock:
            control.send(change)

    def listen() -> None:
        nonlocal folder
        with suppress(EOFError, OSError):
            while message := control.recv():
                if message == "where":
                    send(place=where(sys._current_frames()[main]))
                    continue
                if message != "forget":
                    folder = message["folder"].parent
                calls.put(message)
        if folder:                                   # the caller was killed, and cannot do it
            shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    for stream in (sys.stdout, sys.stderr):
        cast(TextIOWrapper, stream).reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    torch.set_num_threads(max(1, torch.get_num_threads() // n))
    threading.Thread(target=listen, daemon=True).start()
    send(state="ready")
    while True:
        job = calls.get()
        if job == "forget":
            forget_groups()
            continue
        change = answer(job, rank, n)
        sys.stdout.flush()
        send(**change)


def answer(job: dict[str, Any], rank: int, n: int) -> dict[str, Any]:
    """Run one call; return what it changes in the caller's `Worker`."""
    error = b""
    try:
        prepare(job, n)
        world = dist.group.WORLD
        function, args, kwargs = pickle.loads(job["call"])
        with Trace(job["folder"], rank):
            result = function(*args, **kwargs)
    except SystemExit:
        raise
    except BaseException as raised:
        with suppress(Exception):
            error = cloudpickle.dumps(raised)
        return {"state": "raised", "reply": Failure(lost(raised), time.time(), rank, f"raised: {account(raised)}", error)}
    try:
        return {"state": "returned", "reply": cloudpickle.dumps(result), "left": dist.group.WORLD is not world}
    except Exception as raised:
        text = f"returned what cannot be sent to another process: {type(raised).__name__}: {raised}"
        return {"state": "raised", "reply": Failure(False, time.time(), rank, text)}


def account(error: BaseException) -> str:
    """The traceback, without lines of this file and of PyTorch."""
    told = traceback.TracebackException.from_exception(error)
    told.stack = traceback.StackSummary.from_list(
        frame for frame in told.stack if not frame.filename.startswith((LIBRARIES, __file__)))
    return "".join(told.format())


def prepare(job: dict[str, Any], n: int) -> None:
    """Reset a rank that was used before, and connect it to the others."""
    os.chdir(job["cwd"])
    sys.path[:] = job["path"]
    linecache.cache.update({file: (len(lines), None, lines, file) for file, lines in job["cells"].items()})
    torch.manual_seed(0)
    number = itertools.count()

    def meet(*_: Any, **__: Any) -> Iterator[tuple[dist.Store, int, int]]:
        file = job["folder"].with_suffix(f".store{next(number)}")
        yield dist.FileStore(str(file), n), int(os.environ["RANK"]), n

    # ranks meet at a file, since a port may be taken; a new file each time, in case the function leaves and joins again
    _rendezvous_handlers["env"] = meet
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=FOREVER)


def forget_groups() -> None:
    """Leave the groups of a call that all ranks have ended: each has three gloo threads that wake up a hundred times a second.

    The world stays, since functions often have it as their default group.
    """
    for group in [group for group in distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    gc.collect()                                     # the call's reference cycles hold groups, too
