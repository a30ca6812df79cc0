"""A process that has imported PyTorch, and forks: what it forks is ready at once. `course/launch.py` starts it and asks it.

It imports nothing else of this library: whoever it forks does that, and so has the files as they are by then.
"""

import gc
import json
import os
import signal
import socket
import sys
from typing import Any

MOST = 250                                           # descriptors in a message: the kernel takes 253


def ask(seed: socket.socket, job: dict[str, Any], fds: list[int]) -> int:
    """The pid of a fork of the process at the other end that calls `course.worker.nursery`.

    job: `environment`, `path` (for sys.path), and `imports` and `first`, arguments of `nursery`. fds: descriptors for its `news`,
    for what it prints, then its `pipes`. Raises OSError or EOFError if that process is gone.
    """
    text = json.dumps(job).encode()
    seed.sendall(len(text).to_bytes(8, "big") + len(fds).to_bytes(8, "big") + text)
    for start in range(0, len(fds), MOST):
        socket.send_fds(seed, [b"+"], fds[start:start + MOST])
    return int.from_bytes(read(seed, 8), "big")


def read(source: socket.socket, size: int) -> bytes:
    """So many bytes; EOFError if the other end is gone."""
    found = b""
    while len(found) < size:
        if not (more := source.recv(size - len(found))):
            raise EOFError
        found += more
    return found


def serve(fd: int) -> None:
    """Fork for each job until whoever asks is gone."""
    gc.disable()                                     # a fifth of an import goes into looking for garbage, of which it makes none
    import torch._dynamo  # takes a second, and every process that makes an optimizer needs it
    import torch.distributed.distributed_c10d  # noqa: F401

    gc.freeze()                                      # what is here stays: forks need not look through it, and share its memory
    seed = socket.socket(fileno=fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)    # nobody waits for what it forks
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)     # who reads what ranks print waits for all who could
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
    """The life of a fork."""
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.path[:] = job["path"]
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    from course.worker import nursery

    nursery(job["imports"], news, job["first"], *pipes)
    os._exit(0)                                      # at once: an interpreter with PyTorch takes its time to end


if __name__ == "__main__":
    serve(int(sys.argv[1]))
