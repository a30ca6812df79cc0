"""Lesson 18, what Slurm asks for: a batch script from a blank page, and where ranks meet. What survives is in
lesson18_fault_tolerance.py.

Both are the answers to exercises written inside a cell of the lesson.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from course.lab.checks import random_inputs, return_values, transcript
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn
from course.lab.sandbox.limits import Limits
from course.lab.slurm import fake_slurm
from course.lab.slurm import lint as sbatch_lint
from course.lab.slurm.script_parser import Script, read_script

QUICK = Limits(seconds=90)


def batch_script(nodes: int, tasks: int, cpus: int, gpus: int) -> str:
    """A batch script for `nodes` nodes with so many tasks, CPUs of each task, and GPUs (0: none) on each node."""
    options = ["--job-name=mine", f"--nodes={nodes}", f"--ntasks-per-node={tasks}", f"--cpus-per-task={cpus}",
               *([f"--gpus-per-node={gpus}"] if gpus else []), "--time=00:20:00", "--signal=B:USR1@60", "--requeue",
               "--output=slurm-%x-%j.log", "--open-mode=append"]
    asked = "\n".join(f"#SBATCH {option}" for option in options)
    return f"""#!/usr/bin/env bash
{asked}
set -euo pipefail

MASTER_ADDR=$(hostname)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --cpu-bind=cores python -m course.cli train "$@" &
ranks=$!
trap 'kill -USR1 "$ranks"' USR1
status=0
wait "$ranks" || status=$?
if [ "$status" -gt 128 ]; then
    status=0
    wait "$ranks" || status=$?
fi
if [ "$status" = 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60
fi
exit "$status"
"""


def rendezvous(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables of a task that srun has started."""
    names = re.sub(r"\[(\w+)[^\]]*\]", r"\1", environ["SLURM_JOB_NODELIST"])          # gpu[003-004,017],x1 -> gpu003,x1
    return {"RANK": environ["SLURM_PROCID"], "WORLD_SIZE": environ["SLURM_NTASKS"], "LOCAL_RANK": environ["SLURM_LOCALID"],
            "MASTER_ADDR": names.split(",")[0], "MASTER_PORT": str(20000 + int(environ["SLURM_JOB_ID"]) % 12000)}


# ---- the batch script, run with stand-ins for Slurm's programs

WORDS = ("log.name", "data.path", "log.note", "train.init")  # of arguments that are drawn
LATE = 40.0                                          # seconds after which a script that has not ended never will
NEVER = 1000.0                                       # the status of a script that does not end
OVERTIME = 3.0                                       # seconds that it may compute itself after its ranks have ended


def draw_jobs(seed: int, hidden: bool) -> Tensors:
    """What two jobs ask for, (nodes, tasks, CPUs, GPUs), one of them without GPUs; and their numbers, which are neighbors.

    Also the statuses of ranks that fail, one small, one as of ranks that were killed; and a number for the script's arguments.
    """
    dice = random.Random(seed)
    each, number = dice.choice([4, 8]), dice.randint(10**3, 10**7)
    jobs = [[dice.randint(5, 9) if hidden else 2, each, dice.randint(5, 16), each],
            [dice.choice([2, 3, 4]), dice.choice([2, 3]), dice.randint(2, 4), 0]]
    return {"jobs": torch.tensor(jobs), "number": torch.tensor(number), "failed": torch.tensor([dice.randint(2, 70),
            dice.randint(130, 190)]), "seed": torch.tensor(random_inputs.number(seed))}


def arguments(inputs: Tensors) -> list[str]:
    """What the script is called with: words, one with a space in it, one with a star."""
    dice = random.Random(int(inputs["seed"]))
    one, two = dice.sample(WORDS, 2)
    return ["gpt-demo", f"{one}={dice.randint(0, 10**6)} b", f"{two}=*", f"train.seed={dice.randint(0, 10**9)}"]


def srun_acts(inputs: Tensors) -> list[tuple[str, ...]]:
    """The parts that srun plays in the first job and in the second: what comes of the ranks."""
    small, killed = inputs["failed"].tolist()
    return [(f"end {small}",), ("end 0", f"end {killed}", "warned 75", "warned 0")]


def run_batch_script(inputs: Tensors) -> Tensors:
    """Lint the script, read what it asks for, and run it in two jobs, and in one of them in each way that ranks can end."""
    number, lint, asked = int(inputs["number"]), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        fake_slurm.write_programs(folder / "bin", fake_slurm.NO_RANKS)
        jobs = []
        for i, (nodes, tasks, cpus, gpus) in enumerate(inputs["jobs"].tolist()):
            script = checked_script(folder / f"mine{i}.sh", batch_script(nodes, tasks, cpus, gpus))
            rules = [finding.rule for finding in sbatch_lint.lint(script)]
            lint += [len(rules), sum(sum(map(ord, rule)) for rule in rules)]            # how many, and which
            asked += [script.nodes, script.tasks or 0, script.number("cpus-per-task") or 0, script.gpus or 0,
                      sbatch_lint.limit_seconds(script.options.get("time", "")), sbatch_lint.warning_seconds(script)]
            jobs += [Job(folder, script, number + i, act, arguments(inputs)) for act in srun_acts(inputs)[i]]
        wait_for(jobs)
    for job in jobs:
        if job.endless:
            raise InvalidReturn(f"the script never ends: its ranks have ended with {job.act.split()[1]}, and it has not",
                                    "`wait` gives the status of a process that is gone as often as you ask, and ranks that were "
                                    "killed end above 128, too (137): wait once more after a signal, or until `kill -0` says "
                                    "that srun is gone, and not until the status is small")
    first, second = jobs[0], jobs[1]
    ports = [job.told("MASTER_PORT") for job in (first, second)]
    good = [port.isdecimal() and 1024 <= int(port) < 32768 for port in ports]
    found = {
        "lint": lint, "asked": asked,
        "ranks": [value for job in (first, second) for value in (len(job.step["ranks"]), job.cpus, job.threads)],
        "command": [job.command() for job in (first, second)],
        "meet": [*(transcript.digest(job.told("MASTER_ADDR")) for job in (first, second)), float(all(good)),
                 float(ports[0] != ports[1])],
        "heard": [float(job.warned) for job in jobs if "warned" in job.act],
        "status": [float(job.status) if job.over else NEVER for job in jobs if job.act != "warned 75"],
        "requeued": [job.put_back() for job in jobs],
        "slept": [float(job.slept) for job in jobs if job.act == "warned 75"]}
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


def checked_script(path: Path, text: Any) -> Script:
    """The learner's script, read, if it is one that bash can run."""
    if not isinstance(text, str):
        raise InvalidReturn(f"`batch_script` returned {return_values.describe_value(text)}; expected the text of a script",
                                return_values.choose_cure(text, "return the script as one string"))
    path.write_text(text)
    checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    if checked.returncode:
        told = checked.stderr.strip().replace(f"{path}: ", "")
        raise InvalidReturn(f"bash cannot read the script that `batch_script` returned: {told}",
                                "in an f-string, { and } of the shell are written {{ and }}")
    return read_script(path)


class Job:
    """A script that runs with stand-ins for Slurm's programs, as Slurm would run it; and what came of it."""

    def __init__(self, folder: Path, script: Script, number: int, act: str, arguments: list[str]):
        self.folder, self.act, self.number, self.arguments = folder / f"{number}-{act}", act, number, arguments
        self.folder.mkdir()
        at = number % 900
        names = [f"gpu{at + i:03d}" for i in range(min(script.nodes, 99))]
        self.first, self.status, self.over = names[0], -1, False
        self.step: dict[str, Any] = {"ranks": [], "options": {}, "words": [], "environ": {}}
        self.warned, self.requeued = False, list[str]()              # the ranks heard; "JOB ended", what was put back, and when
        self.slept = False                           # after that, lest the job end before it is put back
        self.computed, self.endless = -1.0, False    # its own seconds when its ranks ended; whether it goes in circles since
        own = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "STANDIN": str(self.folder), "STANDIN_ACT": act,
               "HOME": str(folder), "USER": "learner", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        with open(self.folder / "log", "wb") as log:
            self.process = subprocess.Popen(["bash", str(script.path), *arguments], cwd=self.folder, stdin=subprocess.DEVNULL,
                                            stdout=log, stderr=log, start_new_session=True,
                                            env=own | fake_slurm.job_environment(script, number, names))
        self.warn = "warned" in act

    def look(self) -> bool:
        """Whether it has ended, or never will; if the ranks are up and the script waits for them, the warning is sent."""
        if self.warn and (self.folder / "step.json").exists() and is_sleeping(self.process.pid):
            self.warn = False
            self.process.send_signal(signal.SIGUSR1)
            (self.folder / "given").touch()
        if self.computed >= 0:
            self.endless = cpu_seconds(self.process.pid) > self.computed + OVERTIME
        elif (self.folder / "ended").exists():
            self.computed = cpu_seconds(self.process.pid)
        return self.process.poll() is not None or self.endless

    def end(self) -> None:
        """Take away what is left of it, and read what was noted."""
        self.over = self.process.poll() is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.status = self.process.wait()
        if (self.folder / "step.json").exists():
            self.step = json.loads((self.folder / "step.json").read_text())
        self.warned = (self.folder / "warned").exists()
        self.slept = (self.folder / "slept").exists()
        if (self.folder / "requeued").exists():
            self.requeued = (self.folder / "requeued").read_text().splitlines()

    def told(self, name: str) -> str:
        """What all ranks find in this variable."""
        return str(self.step["environ"].get(name, ""))

    @property
    def cpus(self) -> float:
        """CPUs of a task: srun's option, or its own variable; not what sbatch was asked for."""
        return whole_number(self.step["options"].get("cpus-per-task", self.told("SRUN_CPUS_PER_TASK") or "1"))

    @property
    def threads(self) -> float:
        """Threads that a rank computes with."""
        return whole_number(self.told("OMP_NUM_THREADS") or "0")

    def command(self) -> float:
        """What each rank is called with, if it is `python -m course.cli train` and words as they are; else 0.0."""
        words = self.step["words"]
        right = words[1:4] == ["-m", "course.cli", "train"] and Path(words[0]).name.startswith("python")
        return transcript.digest(*words[4:]) if right else 0.0

    def put_back(self) -> float:
        """The number of the job that was put back into the queue once its ranks had ended; 0.0 if none was, 0.5 if otherwise."""
        if not self.requeued:
            return 0.0
        return float(self.number) if self.requeued == [f"{self.number} ended"] else 0.5


def whole_number(text: str) -> float:
    """A whole number; -1 if it is none."""
    return float(text) if text.isdecimal() else -1.0


def is_sleeping(pid: int) -> bool:
    """Whether a process sleeps: it has come to its `wait`."""
    import psutil

    with suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_SLEEPING
    return False


def cpu_seconds(pid: int) -> float:
    """The seconds that a process has computed, without its children; 0 if it is gone."""
    import psutil

    with suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


def wait_for(jobs: list[Job]) -> None:
    """Look after jobs until all have ended, or never will."""
    end = time.monotonic() + LATE
    while left := [job for job in jobs if not job.look()]:
        if time.monotonic() > end:
            break
        time.sleep(0.01 * len(left))
    for job in jobs:
        job.end()


# ---- where ranks meet

LATER = (1, 2, 3, 10)                                # jobs after it that may run beside it
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def draw_seed(seed: int, hidden: bool) -> Tensors:
    """A seed for what is drawn when it runs, and how much of it."""
    return {"seed": torch.tensor(random_inputs.number(seed)), "count": torch.tensor(3 if hidden else 2)}


def node_lists(dice: random.Random) -> list[tuple[str, str, int]]:
    """(list of nodes as Slurm writes it, its first node, how many nodes): one of each kind."""
    head, digits = dice.choice(["gpu", "nid", "big-node", "a", "hpc-b"]), dice.choice([3, 4, 5, 6])
    a = dice.randint(2, 900 if digits > 3 else 59)   # such that zeros stand in front
    one, two, three, four = (f"{n:0{digits}d}" for n in (a, a + 2, a + 17, a + 40))
    return [(f"{head}{one}", f"{head}{one}", 1), (f"{head}[{one}-{two}]", f"{head}{one}", 3),
            (f"{head}[{one}-{two},{three}]", f"{head}{one}", 4), (f"{head}[{one},{three}-{four}]", f"{head}{one}", 25),
            (f"{head}{one},{head}{three}", f"{head}{one}", 2), (f"login{a},{head}[{one}-{two}]", f"login{a}", 4),
            (f"{head}[{a}-{a + 1}]", f"{head}{a}", 2), (f"rack{a}n[{one}-{two}]", f"rack{a}n{one}", 3)]


def tasks_of(nodes: str, first: str, count: int, each: int, cyclic: bool, job: int) -> Iterator[dict[str, str]]:
    """The variables of each task of a job, rank 0 first; `cyclic` deals ranks out to the nodes in turn (srun -m cyclic).

    Of two nodes and more the last has a task less than each of the others.
    """
    tasks = count * each - (count > 1)
    of_each = f"{each}(x{count - 1}),{each - 1}" if count > 2 else f"{each},{each - 1}" if count > 1 else str(each)
    for rank in range(tasks):
        node, local = (rank % count, rank // count) if cyclic else (rank // each, rank % each)
        yield {"SLURM_JOB_ID": str(job), "SLURM_JOBID": str(job), "SLURM_JOB_NODELIST": nodes, "SLURM_NODELIST": nodes,
               "SLURM_STEP_NODELIST": nodes, "SLURM_NNODES": str(count), "SLURM_JOB_NUM_NODES": str(count),
               "SLURM_NTASKS": str(tasks), "SLURM_NPROCS": str(tasks), "SLURM_STEP_NUM_TASKS": str(tasks),
               "SLURM_NTASKS_PER_NODE": str(each), "SLURM_TASKS_PER_NODE": of_each, "SLURM_PROCID": str(rank),
               "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node), "SLURM_CPUS_PER_TASK": "4",
               "SLURMD_NODENAME": first if node == 0 else f"other{node}", "SLURM_LAUNCH_NODE_IPADDR": f"10.1.{node}.7"}


def run_rendezvous(inputs: Tensors) -> Tensors:
    """What ranks of several jobs find out of their variables."""
    dice = random.Random(int(inputs["seed"]))
    found: dict[str, list[float]] = {name: [] for name in ("rank", "size", "local", "address", "port", "own", "later")}
    last, agreed = list[dict[str, str]](), list[str]()               # of each job the last task, and the port of all others
    for _ in range(int(inputs["count"])):
        numbers = [dice.randint(2, 1000), 32_767, *(dice.randint(2, 10**8) for _ in range(6))]
        for (nodes, first, count), job in zip(node_lists(dice), numbers, strict=True):
            each = dice.choice([2, 4])
            tasks = list(tasks_of(nodes, first, count, each, dice.random() < 0.5, job))
            told = [answered(environ) for environ in tasks]
            for name, key in (("rank", "RANK"), ("size", "WORLD_SIZE"), ("local", "LOCAL_RANK")):
                found[name] += [whole_number(one[key]) for one in told]
            port = told[0]["MASTER_PORT"]
            found["address"].append(transcript.digest(*dict.fromkeys(one["MASTER_ADDR"] for one in told)))
            found["port"].append(float(all(one["MASTER_PORT"] == port for one in told)))
            # of one job alone more than the next: a port that is a hash of the job's number may meet another's by chance
            after = [answered(next(tasks_of(nodes, first, count, each, False, job + later)))["MASTER_PORT"]
                     for later in (LATER[:1] if found["later"] else LATER)]
            found["own"].append(float(after[0] != port))
            found["later"] += [float(port not in after[1:])] if after[1:] else []
            last, agreed = [*last, tasks[-1]], [*agreed, port]
    same = [here == there for here, there in zip(agreed, ports_elsewhere(last), strict=True)]
    found["port"] = [float(one and other) for one, other in zip(found["port"], same, strict=True)]
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


ELSEWHERE = """
import json, pickle, sys
out, sys.stdout = sys.stdout, sys.stderr
function, tasks = pickle.load(sys.stdin.buffer)
json.dump([str(function(task)["MASTER_PORT"]) for task in tasks], out)
"""


def ports_elsewhere(tasks: list[dict[str, str]]) -> list[str]:
    """The ports that another process finds for these tasks: each rank is one, and Python's `hash` of a text differs in each."""
    if answer := sys.modules.get("answer"):
        cloudpickle.register_pickle_by_value(answer)                 # which no other process can import
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], input=cloudpickle.dumps((rendezvous, tasks)), check=True,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONHASHSEED": seed})
    return list(json.loads(done.stdout))


def answered(environ: dict[str, str]) -> dict[str, str]:
    """What `rendezvous` makes of a task's variables, as texts, if it is all there and the address can be one."""
    made: Any = rendezvous(dict(environ))
    if not isinstance(made, Mapping) or set(made) != set(NAMES):
        told = f"the names {', '.join(map(str, made))}" if isinstance(made, Mapping) else return_values.describe_value(made)
        raise InvalidReturn(f"`rendezvous` returned {told}; expected a dict with {', '.join(NAMES)}",
                                return_values.choose_cure(made, f"return a dict with {', '.join(NAMES)}"))
    found = {name: str(value) for name, value in made.items()}
    if not re.fullmatch(r"[\w.-]+", found["MASTER_ADDR"]):
        raise InvalidReturn(f"`rendezvous` returned {found['MASTER_ADDR']!r} as MASTER_ADDR of the nodes "
                            f"{environ['SLURM_JOB_NODELIST']}; expected the name of one node",
                                "commas inside brackets part numbers, those outside part names; the first number in the "
                                "brackets, with its zeros, goes where the brackets are")
    if not 1024 <= whole_number(found["MASTER_PORT"]) < 32_768:
        raise InvalidReturn(f"`rendezvous` returned {found['MASTER_PORT']!r} as MASTER_PORT of job {environ['SLURM_JOB_ID']}; "
                            "expected a number from 1024 to 32767",
                                "numbers of jobs go into the millions: take the number modulo as many ports as you use, and add "
                                "the first of them, so that the last is below 32,768: from there on the system gives ports to "
                                "anybody, and those below 1024 are root's")
    return found


EXERCISES = [
    Exercise("rendezvous", "18", (f"{__name__}.rendezvous",), draw_seed, run_rendezvous, {
        "rank": "each task has its own rank",
        "size": "all know how many ranks there are",
        "local": "each knows its number on its node, which is its GPU",
        "address": "all meet at the first node of the list, however Slurm writes it",
        "port": "at one port, between 1024 and 32767, which every rank finds in a process of its own",
        "own": "and the next job at another one",
        "later": "and so do the jobs after that"}, flags={
        "address": "some ranks go to another place", "port": "not all ranks go to the same port",
        "own": "it has the same port",
        "later": "one of them has the same port"}, limits=QUICK, points=2),
    Exercise("batch-script", "18", (f"{__name__}.batch_script",), draw_jobs, run_batch_script, {
        "lint": "`course lint-sbatch` finds nothing wrong with it",
        "asked": "it asks for the nodes, tasks, CPUs and GPUs of two jobs, for twenty minutes, and for a warning a minute before",
        "ranks": "srun starts one rank for each task, with its CPUs and as many threads",
        "command": "each rank is `python -m course.cli train` with the script's arguments, spaces and stars included",
        "meet": "all meet on the first node, at a port of the job's own",
        "heard": "a warning that Slurm gives the script reaches the ranks",
        "status": "the job ends when its ranks have, with their status",
        "requeued": "it goes back into the queue if its ranks ended with 75, once they have ended, and only then",
        "slept": "and then it sleeps, until Slurm has put it back"}, flags={
        "lint": "run the cell above, which shows what",
        "command": "srun was given other words",
        "meet": "the address is not the first node, the port is not valid, or the next job has the same port",
        "heard": "they were never told",
        "status": "its exit status differs from srun's, or it never ends",
        "requeued": "not then, too early, twice, another job, or without a reason",
        "slept": "the script ends at once, and Slurm may find a job that is over and not put it back"},
        unknown="no known mistake does this: run the script by hand, line by line, as srun would find it",
        limits=QUICK, points=4),
]
