"""Stand-ins for srun, scontrol and others without Slurm: batch scripts run unchanged, with ranks as local processes.

    python -m course.lab.slurm.fake_slurm srun OPTION... COMMAND...       `write_programs` wraps this in scripts for the PATH

They write to the folder $STANDIN: `step.json`, srun's options and each rank's variables; `ranks.json`, the processes it started;
`requeued`, the jobs that scontrol requeued; `calls`, calls of other programs. With $STANDIN_ACT srun starts nothing and plays a
part. "end 1" exits with that status at once. "warned 75" waits for USR1, which has to arrive soon after a file `given` appears,
then for as long as a save takes, and exits with that status.
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

from course.lab.slurm.script_parser import Script, parse_options
from course.utils.machine import end_with_parent

STAND_IN_LINE = 'exec {python} -S -m course.lab.slurm.fake_slurm {name} "$@"'
LOGGING_LINE = """case " $* " in *" course.cli.main "*) echo "{name} $*" >> "$STANDIN/calls" ;; *) exec {python} "$@" ;; esac"""
SLEEP_LINE = '[ ! -e "$STANDIN/requeued" ] || echo "$1" >> "$STANDIN/slept"'  # does not wait, but records the time
REAL_RANKS = {"srun": STAND_IN_LINE, "scontrol": STAND_IN_LINE,
              "hostname": 'echo "$SLURMD_NODENAME"'}       # where ranks really start
NO_RANKS = REAL_RANKS | {"getent": 'shift; echo 10.0.0.1 "$1"', "sleep": SLEEP_LINE, "python": LOGGING_LINE,
                         "python3": LOGGING_LINE}   # where no ranks start
# seconds to wait for a warning to be sent, for it to arrive, and for a save
WARNING_TIMEOUT, DELIVERY_TIMEOUT, SAVING_SECONDS = 30.0, 2.5, 0.1
KILL_WAIT = 15.0                                     # seconds between TERM and KILL, Slurm's KillWait


def write_programs(folder: Path, lines: Mapping[str, str]) -> None:
    """Write stand-ins to a folder; lines: program name -> shell command."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, line in lines.items():
        (folder / name).write_text(f"#!/bin/sh\n{line.format(name=name, python=shlex.quote(sys.executable))}\n", encoding="utf-8")
        (folder / name).chmod(0o755)


def job_environment(script: Script, job: int, names: Sequence[str]) -> dict[str, str]:
    """The variables that Slurm would set for a batch script with these directives, on nodes with these names."""
    tasks, cpus = script.number("ntasks-per-node"), script.number("cpus-per-task")
    total = script.number("ntasks") or (tasks and tasks * len(names))
    tasks_of_nodes = tasks_per_node(total or len(names), len(names))
    variables: dict[str, Any] = {
        "SLURM_JOB_ID": job, "SLURM_JOBID": job, "SLURM_JOB_NAME": script.options.get("job-name", script.path.name),
        "SLURM_JOB_NUM_NODES": len(names), "SLURM_NNODES": len(names), "SLURM_JOB_NODELIST": compress_names(names),
        "SLURM_NODELIST": compress_names(names), "SLURMD_NODENAME": names[0], "SLURM_NODEID": 0, "SLURM_PROCID": 0,
        "SLURM_LOCALID": 0,
        "SLURM_SUBMIT_DIR": os.getcwd(), "SLURM_NTASKS_PER_NODE": tasks, "SLURM_NTASKS": total, "SLURM_NPROCS": total,
        "SLURM_TASKS_PER_NODE": ",".join(f"{many}(x{tasks_of_nodes.count(many)})" for many in dict.fromkeys(tasks_of_nodes)),
        "SLURM_CPUS_PER_TASK": cpus, "SLURM_CPUS_ON_NODE": (cpus or 1) * tasks_of_nodes[0],
        "SLURM_GPUS_ON_NODE": script.gpus or None}
    return {name: str(value) for name, value in variables.items() if value is not None}


def tasks_per_node(tasks: int, nodes: int) -> list[int]:
    """Tasks per node: spread evenly, with the remainder on the first nodes."""
    return [(tasks + nodes - 1 - node) // nodes for node in range(nodes)]


def compress_names(names: Sequence[str]) -> str:
    """gpu003, gpu004 -> gpu[003-004], for consecutive numbers."""
    head, digits = names[0].rstrip("0123456789"), names[0][len(names[0].rstrip("0123456789")):]
    if len(names) == 1 or not digits:
        return ",".join(names)
    return f"{head}[{digits}-{names[-1][len(head):]}]"


def expand_names(nodes: str) -> list[str]:
    """gpu[003-004] -> gpu003, gpu004: the inverse of `compress_names`."""
    head, _, rest = nodes.partition("[")
    if not rest:
        return nodes.split(",")
    first, last = rest.rstrip("]").split("-")
    return [f"{head}{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]


def rank_environments(options: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The variables that srun adds for each task, by rank. srun's options take precedence over the batch script's."""
    names = expand_names(environ["SLURM_JOB_NODELIST"])
    names = names[:int(options.get("nodes", len(names)))]
    per_node = options.get("ntasks-per-node", environ.get("SLURM_NTASKS_PER_NODE", ""))
    total = int(options.get("ntasks", int(per_node) * len(names) if per_node else environ.get("SLURM_NTASKS", len(names))))
    places = [(node, local) for node, many in enumerate(tasks_per_node(total, len(names))) for local in range(many)]
    for rank, (node, local) in enumerate(places):
        yield {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node),
               "SLURM_NTASKS": str(total), "SLURM_STEP_NUM_TASKS": str(total), "SLURMD_NODENAME": names[node]}


def srun(folder: Path, arguments: Sequence[str]) -> int:
    """Start the ranks, forward USR1 and TERM to them, and wait; returns the highest exit status."""
    option_pairs, words = parse_options(arguments)
    options, signals = dict(option_pairs), Signals()
    environment = {name: value for name, value in os.environ.items() if name.startswith(("SLURM_", "SRUN_", "MASTER_", "OMP_"))}
    rank_variables = list(rank_environments(options, os.environ))
    step = {"options": options, "words": words, "environ": environment, "ranks": rank_variables}
    write_json(folder / "step.json", step)                # only after `Signals` has installed its handlers
    if act := os.environ.get("STANDIN_ACT"):
        return play_part(folder, act, signals)
    kills = options.get("kill-on-bad-exit", os.environ.get("SLURM_KILL_BAD_EXIT", "0")) in ("", "1")
    processes = [subprocess.Popen(words, env=os.environ | own, preexec_fn=end_with_parent) for own in rank_variables]
    write_json(folder / "ranks.json", [[process.pid, own["SLURMD_NODENAME"]] for process, own in
                                  zip(processes, rank_variables, strict=True)])
    ends = 0.0                                       # when to kill the remaining ranks; 0: never
    while None in (codes := [process.poll() for process in processes]):
        failed = any(codes)
        if signals.last or (failed and kills and not ends):
            ends = ends or (time.monotonic() + KILL_WAIT if failed and kills else 0)
            send_signal(processes, signal.SIGTERM if ends else signals.last)
            signals.last = 0
        if ends and time.monotonic() > ends:
            send_signal(processes, signal.SIGKILL)
        time.sleep(0.05)
    return max(code if code >= 0 else 128 - code for code in codes if code is not None)


class Signals:
    """Handlers for USR1 and TERM; `last` is the latest signal not yet forwarded, or 0."""

    def __init__(self) -> None:
        self.last = 0
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self.on_signal)

    def on_signal(self, number: int, frame: object) -> None:
        """Record the signal; the loop that waits for the ranks forwards it."""
        self.last = number


def send_signal(processes: Sequence["subprocess.Popen[bytes]"], number: int) -> None:
    """Send a signal to the processes that still run."""
    for process in processes:
        with suppress(ProcessLookupError):
            process.send_signal(number)


def play_part(folder: Path, act: str, signals: Signals) -> int:
    """Play the part $STANDIN_ACT instead of starting ranks; returns the exit status."""
    part, status = act.split()
    if part == "warned":
        end, warned = time.monotonic() + WARNING_TIMEOUT, False
        while not signals.last and time.monotonic() < end:
            if not warned and (folder / "given").exists():
                warned, end = True, time.monotonic() + DELIVERY_TIMEOUT
            time.sleep(0.01)
        if signals.last == signal.SIGUSR1:
            (folder / "warned").touch()
            time.sleep(SAVING_SECONDS)
    (folder / "ended").touch()
    return int(status)


def scontrol(folder: Path, arguments: Sequence[str]) -> int:
    """Handle `show hostnames`, `show node` and `requeue`; for a requeue, record whether the ranks had ended."""
    words = [word for word in arguments if not word.startswith("-")]
    match words:
        case ["show", ("hostnames" | "hostname"), *rest]:
            print("\n".join(expand_names(rest[0] if rest else os.environ["SLURM_JOB_NODELIST"])))
        case ["show", "node", name]:
            print(f"NodeName={name} NodeAddr={name} NodeHostName={name}")
        case ["requeue", job]:
            append_line(folder / "requeued", f"{job} {'ended' if (folder / 'ended').exists() else 'running'}")
        case _:
            append_line(folder / "calls", " ".join(["scontrol", *arguments]))
    return 0


def append_line(path: Path, line: str) -> None:
    """Append a line to a file."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def write_json(path: Path, content: Any) -> None:
    """Write JSON to a file atomically."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.rename(path)


def main(name: str, arguments: Sequence[str]) -> int:
    """Run the program of this name; returns its exit status."""
    folder = Path(os.environ["STANDIN"])
    return (srun if name == "srun" else scontrol)(folder, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
