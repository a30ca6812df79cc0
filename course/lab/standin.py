"""srun, scontrol and others where there is no Slurm: a batch script runs as it is, and its ranks are processes of this machine.

    python -m course.lab.standin srun OPTION... COMMAND...       as `programs` puts it into a folder for the PATH

Everything is in the folder STANDIN: `step.json`, what srun was asked for and what each rank would be told; `ranks.json`, the
processes that it has started; `requeued`, what scontrol was asked to put back; `calls`, other programs that were called. With
STANDIN_ACT srun starts nothing and plays a part: "end 1" ends with that status at once; "warned 75" waits for USR1, which has to
arrive soon after a file `given` appears, then for as long as saving may take, and ends with that status.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from course.lab.sbatch import Script, options_of
from course.machine import end_with_parent

MINE = 'exec {python} -S -m course.lab.standin {name} "$@"'
REAL = """case " $* " in *" course.cli "*) echo "{name} $*" >> "$STANDIN/calls" ;; *) exec {python} "$@" ;; esac"""
SLEEP = '[ ! -e "$STANDIN/requeued" ] || echo "$1" >> "$STANDIN/slept"'     # nobody waits here, but what for is noted
STARTING = {"srun": MINE, "scontrol": MINE, "hostname": 'echo "$SLURMD_NODENAME"'}       # where ranks are to start
PRETENDING = STARTING | {"getent": 'shift; echo 10.0.0.1 "$1"', "sleep": SLEEP, "python": REAL, "python3": REAL}   # and where not
PATIENCE, HEARING, SAVING = 30.0, 2.5, 0.1           # seconds until a warning is given, until it arrives, that saving takes
GRACE = 15.0                                         # seconds between TERM and KILL, Slurm's KillWait


def programs(folder: Path, lines: Mapping[str, str]) -> None:
    """Write stand-ins to a folder, name -> what the shell does."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, line in lines.items():
        (folder / name).write_text(f"#!/bin/sh\n{line.format(name=name, python=shlex.quote(sys.executable))}\n", encoding="utf-8")
        (folder / name).chmod(0o755)


def allocation(script: Script, job: int, names: Sequence[str]) -> dict[str, str]:
    """The variables that Slurm sets for a batch script, of what its directives ask for, on nodes of these names."""
    tasks, cpus = script.number("ntasks-per-node"), script.number("cpus-per-task")
    every = script.number("ntasks") or (tasks and tasks * len(names))
    each = spread(every or len(names), len(names))
    found: dict[str, Any] = {
        "SLURM_JOB_ID": job, "SLURM_JOBID": job, "SLURM_JOB_NAME": script.options.get("job-name", script.path.name),
        "SLURM_JOB_NUM_NODES": len(names), "SLURM_NNODES": len(names), "SLURM_JOB_NODELIST": folded(names),
        "SLURM_NODELIST": folded(names), "SLURMD_NODENAME": names[0], "SLURM_NODEID": 0, "SLURM_PROCID": 0, "SLURM_LOCALID": 0,
        "SLURM_SUBMIT_DIR": os.getcwd(), "SLURM_NTASKS_PER_NODE": tasks, "SLURM_NTASKS": every, "SLURM_NPROCS": every,
        "SLURM_TASKS_PER_NODE": ",".join(f"{many}(x{each.count(many)})" for many in dict.fromkeys(each)),
        "SLURM_CPUS_PER_TASK": cpus, "SLURM_CPUS_ON_NODE": (cpus or 1) * each[0], "SLURM_GPUS_ON_NODE": script.gpus or None}
    return {name: str(value) for name, value in found.items() if value is not None}


def spread(tasks: int, nodes: int) -> list[int]:
    """How many tasks each node has: as evenly as can be, the first have more."""
    return [(tasks + nodes - 1 - node) // nodes for node in range(nodes)]


def folded(names: Sequence[str]) -> str:
    """gpu003, gpu004 -> gpu[003-004], if they are so many in a row."""
    head, digits = names[0].rstrip("0123456789"), names[0][len(names[0].rstrip("0123456789")):]
    if len(names) == 1 or not digits:
        return ",".join(names)
    return f"{head}[{digits}-{names[-1][len(head):]}]"


def unfolded(nodes: str) -> list[str]:
    """gpu[003-004] -> gpu003, gpu004: what `folded` makes."""
    head, _, rest = nodes.partition("[")
    if not rest:
        return nodes.split(",")
    first, last = rest.rstrip("]").split("-")
    return [f"{head}{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]


def ranks(options: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """What srun adds to the environment of each task, in the order of their numbers: its options, else the batch script's."""
    names = unfolded(environ["SLURM_JOB_NODELIST"])
    names = names[:int(options.get("nodes", len(names)))]
    each = options.get("ntasks-per-node", environ.get("SLURM_NTASKS_PER_NODE", ""))
    every = int(options.get("ntasks", int(each) * len(names) if each else environ.get("SLURM_NTASKS", len(names))))
    places = [(node, local) for node, many in enumerate(spread(every, len(names))) for local in range(many)]
    for rank, (node, local) in enumerate(places):
        yield {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node),
               "SLURM_NTASKS": str(every), "SLURM_STEP_NUM_TASKS": str(every), "SLURMD_NODENAME": names[node]}


def srun(folder: Path, arguments: Sequence[str]) -> int:
    """Start the ranks, pass USR1 and TERM on to them, wait; the highest of their statuses."""
    given, words = options_of(arguments)
    options, told = dict(given), Signals()
    mine = {name: value for name, value in os.environ.items() if name.startswith(("SLURM_", "SRUN_", "MASTER_", "OMP_"))}
    started = list(ranks(options, os.environ))
    step = {"options": options, "words": words, "environ": mine, "ranks": started}
    write(folder / "step.json", step)                # only now: signals are heard
    if act := os.environ.get("STANDIN_ACT"):
        return play(folder, act, told)
    kills = options.get("kill-on-bad-exit", os.environ.get("SLURM_KILL_BAD_EXIT", "0")) in ("", "1")
    processes = [subprocess.Popen(words, env=os.environ | own, preexec_fn=end_with_parent) for own in started]
    write(folder / "ranks.json", [[process.pid, own["SLURMD_NODENAME"]] for process, own in
                                  zip(processes, started, strict=True)])
    ends = 0.0                                       # when those that are left are killed
    while None in (codes := [process.poll() for process in processes]):
        failed = any(codes)
        if told.new or (failed and kills and not ends):
            ends = ends or (time.monotonic() + GRACE if failed and kills else 0)
            tell(processes, signal.SIGTERM if ends else told.new)
            told.new = 0
        if ends and time.monotonic() > ends:
            tell(processes, signal.SIGKILL)
        time.sleep(0.05)
    return max(code if code >= 0 else 128 - code for code in codes if code is not None)


class Signals:
    """Hears USR1 and TERM; `new` is the last one that nobody has looked at, or 0."""

    def __init__(self) -> None:
        self.new = 0
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self.hear)

    def hear(self, number: int, frame: object) -> None:
        """What Python calls for a signal. It only notes which: whoever waits for the ranks passes it on."""
        self.new = number


def tell(processes: Sequence["subprocess.Popen[bytes]"], number: int) -> None:
    """Send a signal to those that are left."""
    for process in processes:
        with suppress(ProcessLookupError):
            process.send_signal(number)


def play(folder: Path, act: str, told: Signals) -> int:
    """A part instead of ranks."""
    part, status = act.split()
    if part == "warned":
        end, given = time.monotonic() + PATIENCE, False
        while not told.new and time.monotonic() < end:
            if not given and (folder / "given").exists():
                given, end = True, time.monotonic() + HEARING
            time.sleep(0.01)
        if told.new == signal.SIGUSR1:
            (folder / "warned").touch()
            time.sleep(SAVING)
    (folder / "ended").touch()
    return int(status)


def scontrol(folder: Path, arguments: Sequence[str]) -> int:
    """`show hostnames`, `show node` and `requeue`; of the last is noted whether the ranks had ended by then."""
    words = [word for word in arguments if not word.startswith("-")]
    match words:
        case ["show", ("hostnames" | "hostname"), *rest]:
            print("\n".join(unfolded(rest[0] if rest else os.environ["SLURM_JOB_NODELIST"])))
        case ["show", "node", name]:
            print(f"NodeName={name} NodeAddr={name} NodeHostName={name}")
        case ["requeue", job]:
            append(folder / "requeued", f"{job} {'ended' if (folder / 'ended').exists() else 'running'}")
        case _:
            append(folder / "calls", " ".join(["scontrol", *arguments]))
    return 0


def append(path: Path, line: str) -> None:
    """Add a line to a file."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def write(path: Path, content: Any) -> None:
    """JSON under this name, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.rename(path)


def main(name: str, arguments: Sequence[str]) -> int:
    """The program of this name."""
    folder = Path(os.environ["STANDIN"])
    return (srun if name == "srun" else scontrol)(folder, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
