"""A process that imports PyTorch once and forks: its forks are ready at once. `fork` starts it, and asks it for a fork.

The process imports nothing else of this library. Its forks do, so they see the files as they are by then.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any

FORKS = sys.platform == "linux"                      # elsewhere a forked process may not use all libraries
START = 120.0                                        # seconds that it may take to import PyTorch
MOST = 250                                           # descriptors in a message: the kernel takes 253
ON_IMPORT = ("CUDA", "LD_", "MKL_", "OMP_", "PYTHON", "PYTORCH", "TORCH")      # variables that PyTorch reads at import


class ForkServer:
    """The process, seen from its caller. It imports PyTorch once, however often ranks restart."""

    def __init__(self, out: int):
        self.environment = read_on_import()
        self.answered = True
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(START)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "course.ranks.fork_server", str(theirs.fileno())], pass_fds=[theirs.fileno()],
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT)
        theirs.close()

    def usable(self) -> bool:
        """Whether it lives, owes no answer, and has the variables that a new interpreter would have."""
        return self.process.poll() is None and self.answered and self.environment == read_on_import()

    def fork(self, job: dict[str, Any], fds: list[int]) -> int:
        """The pid of a fork that becomes a `rank_forker`; 0 if there is none, and the reason goes to the first `out`."""
        self.answered = False                        # stays so after a Ctrl-C
        with suppress(OSError, EOFError):
            pid = ask(self.socket, job, fds)
            self.answered = True
            return pid
        return 0

    def end(self) -> None:
        """Stop it; its forks live on."""
        self.socket.close()
        self.process.kill()
        self.process.wait()


def read_on_import() -> dict[str, str]:
    """The variables of the environment that PyTorch reads when it is imported."""
    return {key: value for key, value in os.environ.items() if key.startswith(ON_IMPORT)}


_seed: ForkServer | None = None


def fork(job: dict[str, Any], fds: list[int], out: int) -> int:
    """`ForkServer.fork` of the server that runs, or of a new one, which prints to `out` until it has PyTorch."""
    global _seed
    if _seed and not _seed.usable():
        _seed.end()
        _seed = None
    _seed = _seed or ForkServer(out)
    return _seed.fork(job, fds)


def ask(seed: socket.socket, job: dict[str, Any], fds: list[int]) -> int:
    """The pid of a fork of the process at the other end, which calls `course.ranks.rank_process.rank_forker`.

    job: `environment`, `path` (for sys.path), and `imports` and `first`, arguments of `rank_forker`. fds: descriptors for its
    `news`, for what it prints, then its `pipes`. Raises OSError or EOFError if that process is gone.
    """
    text = json.dumps(job).encode()
    seed.sendall(len(text).to_bytes(8, "big") + len(fds).to_bytes(8, "big") + text)
    for start in range(0, len(fds), MOST):
        socket.send_fds(seed, [b"+"], fds[start:start + MOST])
    return int.from_bytes(read(seed, 8), "big")


def read(source: socket.socket, size: int) -> bytes:
    """Read `size` bytes. Raises EOFError if the other end is gone."""
    found = b""
    while len(found) < size:
        if not (more := source.recv(size - len(found))):
            raise EOFError
        found += more
    return found


def serve(fd: int) -> None:
    """Fork for each job until the caller is gone."""
    gc.disable()                                     # garbage collection takes a fifth of an import, which makes no garbage
    import torch._dynamo  # takes a second, and every process that makes an optimizer needs it
    import torch.distributed.distributed_c10d  # noqa: F401

    gc.freeze()                                      # forks need not scan these objects, and share their memory
    seed = socket.socket(fileno=fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)    # nobody waits for the forks
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)     # a reader of the ranks' output waits until all writers have closed it
    os.dup2(1, 2)
    while True:
        try:
            length, many = (int.from_bytes(read(seed, 8), "big") for _ in range(2))
        except EOFError:
            return
        job = json.loads(read(seed, length))
        fds: list[int] = []
        while len(fds) < many:
            mark, some, *_ = socket.recv_fds(seed, 1, MOST)
            if not mark:
                return
            fds += some
        if not (pid := os.fork()):
            seed.close()
            become(job, *fds)
        for each in fds:
            os.close(each)
        seed.sendall(pid.to_bytes(8, "big"))


def become(job: dict[str, Any], news: int, out: int, *pipes: int) -> None:
    """Become a rank forker: the rest of a fork's life."""
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.path[:] = job["path"]
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    from course.ranks.rank_process import rank_forker

    rank_forker(job["imports"], news, job["first"], *pipes)
    os._exit(0)                                      # at once: an interpreter with PyTorch ends slowly


if __name__ == "__main__":
    serve(int(sys.argv[1]))
