"""What do collectives cost over different links? `python -m experiments.comms_links FILE`, on Linux as root; --small tries it.

Runs `course bench comms` between two processes of this machine: through the loopback interface, and in two network namespaces
joined by a veth pair (a virtual cable), as it is and limited to 1 Gbit/s by `tc`. Needs `ip` and `tc` (the package iproute2).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from course.bench.command_line import command
from course.utils.atomic_files import atomic
from course.utils.errors import CourseError

# name -> tc's rate; None: loopback, without namespaces; "": a cable without a limit
LINKS = {"loopback": None, "veth": "", "veth, 1 Gbit/s": "1gbit"}
FIRST, PORT = "10.78.0.1", "29511"                  # in namespaces of their own, where every port is free


def main(file: Path, small: bool) -> None:
    """Measure every link, and write them to one file."""
    found = {name: loopback(small) if rate is None else namespaces(rate, small) for name, rate in LINKS.items()}
    parts = ("rows", "fits", "link")
    head = {key: value for key, value in found["loopback"].items() if key not in parts}
    head |= {"command": "python -m experiments.comms_links FILE", "load": "the machine also computed for others"}
    links = {name: {part: results[part] for part in parts} for name, results in found.items()}
    with atomic(file) as temporary:
        temporary.write_text(json.dumps(head | {"links": links}, indent=1) + "\n")


def bench(small: bool, out: Path) -> list[str]:
    """The words of `course bench comms` after `python -m`."""
    return ["course.cli", "bench", "comms", "--device=cpu", "--out", str(out), *(["--small"] if small else [])]


def loopback(small: bool) -> dict[str, Any]:
    """Results of two processes on one node."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "comms.json"
        run([[sys.executable, "-m", *bench(small, out)]], {})
        return dict(json.loads(out.read_text()))


def namespaces(rate: str, small: bool) -> dict[str, Any]:
    """Results of a process in each of two network namespaces."""
    with TemporaryDirectory() as folder, cable(rate) as names:
        out = Path(folder) / "comms.json"
        run([["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
              f"--master-addr={FIRST}", f"--master-port={PORT}", "--nproc-per-node=1", "-m", *bench(small, out)]
             for node, name in enumerate(names)], {"GLOO_SOCKET_IFNAME": "cable"})
        return dict(json.loads(out.read_text()))


@contextmanager
def cable(rate: str) -> Iterator[list[str]]:
    """Two network namespaces with nothing but a cable between them. Raises `CourseError` where they cannot be made."""
    a, b = names = [f"comms-{os.getpid()}-{node}" for node in "ab"]
    steps = [f"ip netns add {a}", f"ip netns add {b}", f"ip link add cable netns {a} type veth peer name cable netns {b}"]
    for name, address in ((a, FIRST), (b, "10.78.0.2")):
        steps += [f"ip -n {name} addr add {address}/24 dev cable", f"ip -n {name} link set cable up", f"ip -n {name} link set "
        f"lo up"]
        steps += [f"tc -n {name} qdisc add dev cable root tbf rate {rate} burst 256kb latency 50ms"] if rate else []
    try:
        for step in steps:
            try:
                subprocess.run(step.split(), check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                reason = getattr(error, "stderr", "") or error
                raise CourseError(f"`{step}` failed ({str(reason).strip()}): network namespaces need Linux, root, and "
                                  "iproute2") from error
        yield names
    finally:
        for name in names:
            with suppress(OSError):                  # there is no `ip`
                subprocess.run(["ip", "netns", "del", name], capture_output=True)


def run(commands: list[list[str]], environment: dict[str, str]) -> None:
    """Run these at once, to their ends. Raises `CourseError` if one fails."""
    running = [subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}) for words in commands]
    statuses = [process.wait() for process in running]
    if any(statuses):
        raise CourseError("course bench comms failed, and says why above")


if __name__ == "__main__":
    with command("FILE [--small]") as arguments:
        main(Path(arguments[0]), "--small" in sys.argv)
