"""Run measurements in separate processes, one per GPU at a time, in parallel on all GPUs of the machine."""

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

from course.utils.atomic_files import write_json
from course.utils.errors import CourseError

Row = dict[str, Any]


def gpus_of(command: str, small: bool) -> list[str]:
    """This machine's GPUs, as CUDA_VISIBLE_DEVICES names them; with --small one CPU slot. Raises `CourseError` without a GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    named = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    gpus = [""] if small else named[:torch.cuda.device_count()]
    if not gpus:
        raise CourseError(f"{command} needs a GPU, and this machine shows none: --small tries it on the CPU")
    return gpus


def side_by_side(jobs: Iterable[str], run: Callable[[str, str], Row], gpus: list[str], done: Callable[[Row], None]) -> None:
    """Run `run(job, gpu)` for all jobs, each on a free GPU. `done` receives each row when it is ready, one at a time."""
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
    """Run `python ARGUMENTS` on these GPUs and return its last line as JSON, or {"error": the last line of its output}."""
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
    """Parse a line as a JSON object; None if it is something else."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def end(pid: int) -> None:
    """Kill a process and all its descendants, also those in other sessions, such as torchrun's ranks."""
    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in [*parent.children(recursive=True), parent]:
            with suppress(psutil.Error):
                process.kill()


class Rows:
    """Rows in a JSON file, rewritten after each row, so that an interrupted run keeps its results. order: of the rows' `key`."""

    def __init__(self, file: Path, head: Row, order: Iterable[str], key: str):
        self.file, self.head, self.order, self.key = file, head, list(order), key
        self.rows: list[Row] = []

    def resume(self, measured: str) -> set[str]:
        """Keep the rows of an interrupted run's file that have the value `measured`, and return their keys."""
        if self.file.exists():
            for row in json.loads(self.file.read_text(encoding="utf-8"))["rows"]:
                if measured in row:
                    self.add(row)
        return {row[self.key] for row in self.rows}

    def add(self, row: Row) -> None:
        """Insert a row in order and rewrite the file. Raises `ValueError` if its key is not in `order`."""
        self.rows.append(row)
        self.rows.sort(key=lambda row: self.order.index(row[self.key]))
        write_json(self.file, {**self.head, "rows": self.rows})
