"""Measurements in processes of their own, one on each GPU of the machine at a time: as many side by side as it has GPUs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

import psutil
import torch

from course.utils.atomic_files import atomic
from course.utils.errors import CourseError

Row = dict[str, Any]


def gpus_of(command: str, small: bool) -> list[str]:
    """This machine's GPUs, as CUDA_VISIBLE_DEVICES names them; with --small one place on the CPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    named = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    gpus = [""] if small else named[:torch.cuda.device_count()]
    if not gpus:
        raise CourseError(f"{command} needs a GPU, and this machine shows none: --small tries it on the CPU")
    return gpus


def side_by_side(jobs: Iterable[str], run: Callable[[str, str], Row], gpus: list[str], done: Callable[[Row], None]) -> None:
    """Do all jobs, `run(job, gpu)` each, on whatever GPU is free; `done` gets the rows, one at a time, as they come."""
    free: SimpleQueue[str] = SimpleQueue()
    for gpu in gpus:
        free.put(gpu)
    one_at_a_time = Lock()

    def work(job: str) -> None:
        gpu = free.get()
        try:
            row = run(job, gpu)
        finally:
            free.put(gpu)
        with one_at_a_time:
            done(row)

    with ThreadPoolExecutor(len(gpus)) as pool:
        list(pool.map(work, jobs))


def start(arguments: list[str], gpus: str, timeout: float = 600, **environment: str) -> Row:
    """What `python ARGUMENTS`, seeing these GPUs, printed as its last line of JSON; or {"error": the last of what it said}."""
    with subprocess.Popen([sys.executable, *arguments], env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus, **environment},
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace") as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {timeout:.0f} s"}
        finally:
            if process.poll() is None:
                end(process.pid)
    last = ((err if process.returncode else out).strip().splitlines() or [f"exit status {process.returncode}"])[-1]
    row = row_of(last) if process.returncode == 0 else None
    return {"error": last[:300]} if row is None else row


def row_of(line: str) -> Row | None:
    """A line of JSON as a row; None if it is another line."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def end(pid: int) -> None:
    """Kill a process with all that it has started, also in sessions of their own, as torchrun's ranks are."""
    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in [*parent.children(recursive=True), parent]:
            with suppress(psutil.Error):
                process.kill()


class Rows:
    """Rows in a JSON file, written after each: whoever has to stop keeps what there is. `order`: of the rows, by `key`."""

    def __init__(self, file: Path, head: Row, order: Iterable[str], key: str):
        self.file, self.head, self.order, self.key = file, head, list(order), key
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Put a row in its place and write the file anew. Raises `ValueError` if its key is none of `order`."""
        self.rows.append(row)
        self.rows.sort(key=lambda row: self.order.index(row[self.key]))
        with atomic(self.file) as temporary:
            temporary.write_text(json.dumps({**self.head, "rows": self.rows}, indent=1), encoding="utf-8")
