"""Training on several processes in which one goes wrong, and what is left of it.

    python -m tests.faults FAULT RANK STEP [KEY=VALUE]...     in that step of that rank: loop, stop, hold, kill
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from course.training.run_log import read_metrics

ROOT = Path(__file__).parents[1]


def sequence(run: Path) -> dict[int, float]:
    """The loss of each logged step of a run. A resumed run cuts metrics.jsonl at its checkpoint; should a step stand there twice,
    the later line counts: it is the one that the weights went on from."""
    return {record["step"]: record["loss"] for record in read_metrics(run / "metrics.jsonl")}


def assert_same_losses(run: Path, whole: Path, rel: float = 0.0) -> None:
    """The two have the same steps and losses: bit for bit, or to a relative error."""
    one, other = sequence(run), sequence(whole)
    assert list(one) == list(other) == list(range(1, len(other) + 1))
    worst = max(abs(one[step] - other[step]) / abs(other[step]) for step in other)
    assert worst <= rel, f"the losses of {run} and {whole} differ by up to {worst:.2e} of their value"


def python_path(*first: object) -> str:
    """PYTHONPATH of a started process: these folders, then the user's own."""
    return os.pathsep.join([*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])])


def start(command: list[str], ranks: int, **environment: str) -> list[subprocess.Popen[str]]:
    """The command as so many ranks that find each other, with no launcher above them: who ends, ends by itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = os.environ | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
                           "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return [subprocess.Popen([sys.executable, "-m", *command], env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(ranks)]


def finish(processes: list[subprocess.Popen[str]], stopped: int | None = None) -> list[tuple[int, str]]:
    """(exit status, output) of each; a stopped one is killed when the others have ended, as a launcher does."""
    found: dict[int, tuple[int, str]] = {}
    for rank in sorted(range(len(processes)), key=lambda rank: rank == stopped):
        if rank == stopped:
            processes[rank].kill()
        text, _ = processes[rank].communicate(timeout=180)
        found[rank] = processes[rank].returncode, text
    return [found[rank] for rank in range(len(processes))]


def suffer(fault: str) -> None:
    """What befalls a rank. `fill` and `lose` are for others: a disk that is full, a data file that is gone."""
    if fault == "loop":
        while True:
            pass
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hold":
        re.match(r"(a+)+$", "a" * 60 + "b")          # for years, without letting go of Python's lock
    if fault == "lose":
        Path(os.environ["LOSE"]).unlink()
    if fault == "fill":
        with suppress(OSError), open(os.environ["FILL"], "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass


def afflict(fault: str, step: int, mine: bool = True) -> None:
    """A run in this process suffers in that step. A disk has room again four steps later; `pause` makes all later steps slow.

    A file is lost only when all ranks have begun to train: then every rank calls this, and `mine` says whether it is the one.
    """
    import torch.distributed as dist

    from course.training import trainer

    real: Any = trainer.train_loader

    def loader(*arguments: Any) -> Iterator[Any]:
        for number, batch in enumerate(real(*arguments), 1):
            if number == step and fault == "lose":
                dist.barrier()
            if number == step and mine:
                suffer(fault)
            if number >= step and fault == "pause":
                time.sleep(0.2)
            if number == step + 4 and fault == "fill":
                Path(os.environ["FILL"]).unlink()
            yield batch

    trainer.train_loader = loader


def main(fault: str, rank: str, step: str, *settings: str) -> None:
    from course import config
    from course.training import trainer

    if os.environ["RANK"] == rank:
        afflict(fault, int(step))
    trainer.main(config.load("vit-demo", list(settings)))


if __name__ == "__main__":
    from course.utils.errors import CourseError

    try:
        main(*sys.argv[1:])
    except CourseError as error:                     # as the command line does
        sys.exit(f"course: {error}")
