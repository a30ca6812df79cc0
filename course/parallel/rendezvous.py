"""Name the missing ranks while the others wait for them: PyTorch's rendezvous waits half an hour in silence."""

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from course.utils.errors import CourseError, rank_names

HERE, FIRST, AGAIN = 2.0, 5.0, 60.0                  # seconds until a waiting rank registers, until one of them names the missing
                                                     # ranks, and between two such messages


@contextmanager
def telling(rank: int, size: int, launcher: str) -> Iterator[None]:
    """Inside the block, print now and then which ranks are missing, where they should meet, and what to do.

    launcher: torchrun, slurm, pty (a shell of `srun --pty`), or "" for variables set manually. If PyTorch gives up, raises
    `CourseError` with its message.
    """
    meeting, over = Meeting(rank, size, launcher), threading.Event()
    thread = threading.Thread(target=meeting.watch, args=(over,), name="meeting", daemon=True)
    thread.start()
    try:
        yield
    except (dist.DistStoreError, dist.DistNetworkError, ValueError) as error:          # the latter: missing variables
        first = str(error).strip().split("\n")[0][:200]
        raise CourseError(f"{meeting.sentence() or 'the ranks did not meet'}. PyTorch says: {first}") from error
    finally:
        over.set()
        thread.join(2 * HERE)                        # a thread at the store would abort an interpreter that exits


class Meeting:
    """The store where the ranks meet, as seen from one of them."""

    def __init__(self, rank: int, size: int, launcher: str):
        self.rank, self.size, self.launcher = rank, size, launcher
        self.address, self.port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        self.attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")       # torchrun's store outlives an attempt
        self.store: dist.Store | None = None

    def watch(self, over: threading.Event) -> None:
        """The thread's loop: register, and print the message whenever it is due."""
        if over.wait(HERE):
            return
        self.register()
        wait = FIRST - HERE
        while not over.wait(wait):
            self.register()
            if sentence := self.sentence():
                print(sentence, file=sys.stderr, flush=True)            # without "course: ", which begins what ends a run
            wait = AGAIN

    def register(self) -> None:
        """Note in the store that this rank is here; do nothing if there is no store yet."""
        if self.store is None and not self.unreachable():
            with suppress(RuntimeError, ValueError):
                self.store = dist.TCPStore(self.address, int(self.port), is_master=False, wait_for_workers=False,
                                           timeout=timedelta(seconds=HERE))
                self.store.set(self.key(self.rank), "here")

    def key(self, rank: int) -> str:
        """The store's key for a rank."""
        return f"course/here/{self.attempt}/{rank}"

    def unreachable(self) -> str:
        """Why the store cannot be reached; "" if somebody listens at its address."""
        try:
            socket.create_connection((self.address, int(self.port)), HERE).close()
        except socket.gaierror:
            return f"the name {self.address} is not known on this node"
        except (OSError, ValueError):
            return "nobody listens there"
        return ""

    def missing(self) -> list[int] | None:
        """The ranks that have not registered; None if this cannot be known."""
        if self.store is not None:
            with suppress(RuntimeError):
                return [rank for rank in range(self.size) if rank != self.rank and not self.store.check([self.key(rank)])]
        return None

    def sentence(self) -> str:
        """The message: which ranks are missing, where, and what to do; "" if a lower rank is here and prints it."""
        missing = self.missing()
        if missing is not None and self.rank and min(set(range(self.size)) - {*missing}) < self.rank:
            return ""
        others = missing if missing is not None else [rank for rank in range(self.size) if rank != self.rank]
        whom = f"{rank_names(others[:20])}{' and more' if len(others) > 20 else ''} of {self.size}"
        where = f" at {self.address}:{self.port}" if self.address else ""
        why = self.unreachable() if missing is None else ""
        if missing == []:
            return (f"all {self.size} ranks have come{where}, and wait for the connections between them: look at the network, "
                    "and at GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME")
        return f"rank {self.rank} waits{where} for {whom}{f' ({why})' if why else ''}. {CURES[self.launcher]}"


CURES = {
    "": "RANK and WORLD_SIZE are set: start the others with the same MASTER_ADDR and MASTER_PORT; to run alone, "
        "`env -u RANK -u WORLD_SIZE course ...`",
    "torchrun": "If they are on other nodes, start the same torchrun there; to run alone, leave out torchrun",
    "slurm": "They are tasks of the same Slurm step: see that they run the same command; to run alone, `srun -n 1 course ...`, "
             "or `env -u SLURM_STEP_NUM_TASKS course ...` in a shell of the step",
    "pty": "They are tasks of the same Slurm step, and in the shell of `srun --pty` only task 0 runs what you type: to run alone "
           "here, `env -u SLURM_STEP_NUM_TASKS course ...`, or ask for a shell with `srun -n 1 --pty`; for all tasks, "
           "`srun course ...` from the job's own shell",
}


@contextmanager
def telling_after(seconds: float, sentence: Callable[[], str]) -> Iterator[None]:
    """Print a sentence if the block lasts longer than `seconds`."""
    timer = threading.Timer(seconds, lambda: print(sentence(), file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
