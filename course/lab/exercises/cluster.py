"""Lesson 18: a batch script from a blank page, where ranks meet, a loop that loses nothing, and how often to save.

All are the answers to exercises written inside a cell of the lesson.
"""

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import cloudpickle
import torch

from course.lab import returned, sbatch, standin
from course.lab.exercise import Exercise, Tensors
from course.lab.watchdog import Limits

QUICK = Limits(seconds=90)
GO_ON = 75                                           # status of a run that was stopped and can go on (course/stop.py)


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


def go_on(last: int, every: int, load: Callable[[], int], step: Callable[[int], None], save: Callable[[int], None]) -> int:
    """Train up to step `last` from the newest checkpoint on; returns 0 when it is done, and 75 when it was asked to stop."""
    asked = False

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGUSR1, hear)
    done = saved = load()
    while done < last and not asked:
        step(done + 1)
        done += 1
        if done % every == 0:
            save(done)
            saved = done
    if saved < done:
        save(done)
    return 0 if done == last else 75


def checkpoint_interval(save: float, restart: float, mtbf: float, nodes: int) -> tuple[float, float]:
    """(seconds of training between two checkpoints that lose the least, the share of the time that is then lost)."""
    between = mtbf / nodes                           # seconds between two failures of the job
    interval = math.sqrt(2 * save * between)
    return interval, save / interval + (interval / 2 + restart) / between


# ---- the batch script, run with stand-ins for Slurm's programs

ENDS = ("end 0", "end 137", "warned 75", "warned 0")    # parts that srun plays: what comes of the ranks
ARGUMENTS = ["gpt-demo", "log.name=a b", "data.path=*"]
LATE = 40.0                                          # seconds after which a script that has not ended never will
OVERTIME = 3.0                                       # seconds that it may compute itself after its ranks have ended


def draw_jobs(seed: int, hidden: bool) -> Tensors:
    """What two jobs ask for, (nodes, tasks, CPUs, GPUs), one of them without GPUs; and their numbers, which are neighbours."""
    dice = random.Random(seed)
    each, number = dice.choice([4, 8]), dice.randint(10**3, 10**7)
    jobs = [[dice.randint(5, 9) if hidden else 2, each, dice.randint(5, 16), each],
            [dice.choice([2, 3, 4]), dice.choice([2, 3]), dice.randint(2, 4), 0]]
    return {"jobs": torch.tensor(jobs), "number": torch.tensor(number)}


def run_script(inputs: Tensors) -> Tensors:
    """Lint the script, read what it asks for, and run it in two jobs, and in one of them in each way that ranks can end."""
    number, lint, asked = int(inputs["number"]), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        standin.programs(folder / "bin", standin.PRETENDING)
        jobs = []
        for i, (nodes, tasks, cpus, gpus) in enumerate(inputs["jobs"].tolist()):
            script = written(folder / f"mine{i}.sh", batch_script(nodes, tasks, cpus, gpus))
            rules = [finding.rule for finding in sbatch.lint(script)]
            lint += [len(rules), sum(sum(map(ord, rule)) for rule in rules)]            # how many, and which
            asked += [script.nodes, script.tasks or 0, script.number("cpus-per-task") or 0, script.gpus or 0,
                      sbatch.seconds(script.options.get("time", "")), sbatch.warned(script)]
            jobs += [Job(folder, script, number + i, act) for act in (ENDS if i else ENDS[:1])]
        wait_for(jobs)
    for job in jobs:
        if job.endless:
            raise returned.Returned(f"the script never ends: its ranks have ended with {job.act.split()[1]}, and it has not",
                                    "`wait` gives the status of a process that is gone as often as you ask, and ranks that were "
                                    "killed end above 128, too (137): wait once more after a signal, or until `kill -0` says "
                                    "that srun is gone, and not until the status is small")
    first, second = jobs[0], jobs[1]
    ports = [job.told("MASTER_PORT") for job in (first, second)]
    good = [port.isdecimal() and 1024 <= int(port) < 32768 for port in ports]
    found = {
        "lint": lint, "asked": asked,
        "ranks": [value for job in (first, second) for value in (len(job.step["ranks"]), job.cpus, job.threads)],
        "command": [float(job.words_are_right()) for job in (first, second)],
        "meet": [*(float(job.told("MASTER_ADDR") == job.first) for job in (first, second)), float(all(good)),
                 float(ports[0] != ports[1])],
        "heard": [float(job.warned) for job in jobs if "warned" in job.act],
        "status": [float(job.over and (job.status == 0) == job.act.endswith(" 0")) for job in jobs if job.act != "warned 75"],
        "requeued": [float(job.requeued == ([f"{job.number} ended"] if job.act == "warned 75" else [])) for job in jobs]}
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


def written(path: Path, text: Any) -> sbatch.Script:
    """The learner's script, read, if it is one that bash can run."""
    if not isinstance(text, str):
        raise returned.Returned(f"`batch_script` returned {returned.told(text)}; the text of a script is wanted",
                                returned.cure(text, "return the script as one string"))
    path.write_text(text)
    checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    if checked.returncode:
        told = checked.stderr.strip().replace(f"{path}: ", "")
        raise returned.Returned(f"bash cannot read the script that `batch_script` returned: {told}",
                                "in an f-string, { and } of the shell are written {{ and }}")
    return sbatch.read(path)


class Job:
    """A script that runs with stand-ins for Slurm's programs, as Slurm would run it; and what came of it."""

    def __init__(self, folder: Path, script: sbatch.Script, number: int, act: str):
        self.folder, self.act, self.number = folder / f"{number}-{act}", act, number
        self.folder.mkdir()
        at = number % 900
        names = [f"gpu{at + i:03d}" for i in range(min(script.nodes, 99))]
        self.first, self.status, self.over = names[0], -1, False
        self.step: dict[str, Any] = {"ranks": [], "options": {}, "words": [], "environ": {}}
        self.warned, self.requeued = False, list[str]()              # the ranks heard; "JOB ended", what was put back, and when
        self.computed, self.endless = -1.0, False    # its own seconds when its ranks ended; whether it goes in circles since
        own = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "STANDIN": str(self.folder), "STANDIN_ACT": act,
               "HOME": str(folder), "USER": "learner", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        with open(self.folder / "log", "wb") as log:
            self.process = subprocess.Popen(["bash", str(script.path), *ARGUMENTS], cwd=self.folder, stdin=subprocess.DEVNULL,
                                            stdout=log, stderr=log, start_new_session=True,
                                            env=own | standin.allocation(script, number, names))
        self.warn = "warned" in act

    def look(self) -> bool:
        """Whether it has ended, or never will; if the ranks are up and the script waits for them, the warning is sent."""
        if self.warn and (self.folder / "step.json").exists() and waits(self.process.pid):
            self.warn = False
            self.process.send_signal(signal.SIGUSR1)
            (self.folder / "given").touch()
        if self.computed >= 0:
            self.endless = computing(self.process.pid) > self.computed + OVERTIME
        elif (self.folder / "ended").exists():
            self.computed = computing(self.process.pid)
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
        if (self.folder / "requeued").exists():
            self.requeued = (self.folder / "requeued").read_text().splitlines()

    def told(self, name: str) -> str:
        """What all ranks find in this variable."""
        return str(self.step["environ"].get(name, ""))

    @property
    def cpus(self) -> float:
        """CPUs of a task: srun's option, or its own variable; not what sbatch was asked for."""
        return number_of(self.step["options"].get("cpus-per-task", self.told("SRUN_CPUS_PER_TASK") or "1"))

    @property
    def threads(self) -> float:
        """Threads that a rank computes with."""
        return number_of(self.told("OMP_NUM_THREADS") or "0")

    def words_are_right(self) -> bool:
        """Whether each rank is `python -m course.cli train` with the arguments of the script, as they are."""
        words = self.step["words"]
        return words[1:] == ["-m", "course.cli", "train", *ARGUMENTS] and Path(words[0]).name.startswith("python")


def number_of(text: str) -> float:
    """A whole number; -1 if it is none."""
    return float(text) if text.isdecimal() else -1.0


def waits(pid: int) -> bool:
    """Whether a process sleeps: it has come to its `wait`."""
    import psutil

    with suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_SLEEPING
    return False


def computing(pid: int) -> float:
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

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def draw_seed(seed: int, hidden: bool) -> Tensors:
    """A seed for what is drawn when it runs, and how much of it."""
    return {"seed": torch.tensor(seed), "count": torch.tensor(3 if hidden else 2)}


def node_lists(dice: random.Random) -> list[tuple[str, str, int]]:
    """(list of nodes as Slurm writes it, its first node, how many nodes): one of each kind."""
    head, digits, a = dice.choice(["gpu", "nid", "big-node"]), dice.choice([3, 4, 6]), dice.randint(2, 60)
    one, two, three, four = (f"{n:0{digits}d}" for n in (a, a + 2, a + 17, a + 40))
    return [(f"{head}{one}", f"{head}{one}", 1), (f"{head}[{one}-{two}]", f"{head}{one}", 3),
            (f"{head}[{one}-{two},{three}]", f"{head}{one}", 4), (f"{head}[{one},{three}-{four}]", f"{head}{one}", 25),
            (f"{head}{one},{head}{three}", f"{head}{one}", 2), (f"login{a},{head}[{one}-{two}]", f"login{a}", 4),
            (f"{head}[{a}-{a + 1}]", f"{head}{a}", 2), (f"rack{a}n[{one}-{two}]", f"rack{a}n{one}", 3)]


def tasks_of(nodes: str, first: str, count: int, each: int, cyclic: bool, job: int) -> Iterator[dict[str, str]]:
    """The variables of each task of a job, rank 0 first; `cyclic` deals ranks out to the nodes in turn (srun -m cyclic)."""
    for rank in range(count * each):
        node, local = (rank % count, rank // count) if cyclic else (rank // each, rank % each)
        yield {"SLURM_JOB_ID": str(job), "SLURM_JOBID": str(job), "SLURM_JOB_NODELIST": nodes, "SLURM_NODELIST": nodes,
               "SLURM_STEP_NODELIST": nodes, "SLURM_NNODES": str(count), "SLURM_JOB_NUM_NODES": str(count),
               "SLURM_NTASKS": str(count * each), "SLURM_NPROCS": str(count * each), "SLURM_STEP_NUM_TASKS": str(count * each),
               "SLURM_NTASKS_PER_NODE": str(each), "SLURM_TASKS_PER_NODE": f"{each}(x{count})", "SLURM_PROCID": str(rank),
               "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node), "SLURM_CPUS_PER_TASK": "4",
               "SLURMD_NODENAME": first if node == 0 else f"other{node}", "SLURM_LAUNCH_NODE_IPADDR": f"10.1.{node}.7"}


def meet(inputs: Tensors) -> Tensors:
    """What ranks of several jobs find out of their variables."""
    dice = random.Random(int(inputs["seed"]))
    found: dict[str, list[float]] = {name: [] for name in ("rank", "size", "local", "address", "port", "own")}
    last, agreed = list[dict[str, str]](), list[str]()               # of each job the last task, and the port of all others
    for _ in range(int(inputs["count"])):
        numbers = [dice.randint(2, 1000), 32_767, *(dice.randint(2, 10**8) for _ in range(6))]
        for (nodes, first, count), job in zip(node_lists(dice), numbers, strict=True):
            each = dice.choice([2, 4])
            tasks = list(tasks_of(nodes, first, count, each, dice.random() < 0.5, job))
            told = [answered(environ) for environ in tasks]
            other = answered(next(tasks_of(nodes, first, count, each, False, job + 1)))
            for name, key in (("rank", "RANK"), ("size", "WORLD_SIZE"), ("local", "LOCAL_RANK")):
                found[name] += [number_of(one[key]) for one in told]
            port = told[0]["MASTER_PORT"]
            found["address"].append(float(all(one["MASTER_ADDR"] == first for one in told)))
            found["port"].append(float(all(one["MASTER_PORT"] == port for one in told)))
            found["own"].append(float(other["MASTER_PORT"] != port))
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
        told = f"the names {', '.join(map(str, made))}" if isinstance(made, Mapping) else returned.told(made)
        raise returned.Returned(f"`rendezvous` returned {told}; a dict with {', '.join(NAMES)} is wanted",
                                returned.cure(made, f"return a dict with {', '.join(NAMES)}"))
    found = {name: str(value) for name, value in made.items()}
    if not re.fullmatch(r"[\w.-]+", found["MASTER_ADDR"]):
        raise returned.Returned(f"`rendezvous` returned {found['MASTER_ADDR']!r} as MASTER_ADDR of the nodes "
                                f"{environ['SLURM_JOB_NODELIST']}; the name of one node is wanted",
                                "commas inside brackets part numbers, those outside part names; the first number in the "
                                "brackets, with its zeros, goes where the brackets are")
    if not 1024 <= number_of(found["MASTER_PORT"]) < 32_768:
        raise returned.Returned(f"`rendezvous` returned {found['MASTER_PORT']!r} as MASTER_PORT of job "
                                f"{environ['SLURM_JOB_ID']}; a number from 1024 to 32767 is wanted",
                                "numbers of jobs go into the millions: take the number modulo as many ports as you use, and add "
                                "the first of them, so that the last is below 32,768: from there on the system gives ports to "
                                "anybody, and those below 1024 are root's")
    return found


# ---- a loop that loses nothing

class Killed(BaseException):
    """The end of a process that nobody can catch; whoever does finds that nothing happens any more."""


class World:
    """A training, its disk and its log, over several lives of the process; things befall it at given moments.

    befalls: (life, "load" | "step" | "save", step) -> "warn", "warn twice" or "kill", which happens in the middle of it.
    """

    def __init__(self, every: int, last: int, befalls: Mapping[tuple[int, str, int], str]):
        self.every, self.last, self.befalls = every, last, dict(befalls)
        self.disk, self.log = (0, 1), dict[int, int]()               # (step, state) of the checkpoint; step -> loss
        self.counts = dict.fromkeys(("again", "late", "needless", "torn", "status"), 0)
        self.allowed = 0                             # steps that a kill makes anybody do again
        self.thrown = ""                             # what the handler raised, and in the middle of what
        self.born(0)

    def born(self, life: int) -> None:
        """A new process."""
        self.life, self.state, self.busy, self.dead, self.asked, self.after = life, 1, False, False, False, 0

    @contextmanager
    def doing(self, kind: str, number: int) -> Iterator[None]:
        """One of the three at work; what befalls it does so after the block."""
        if self.dead:
            raise Killed
        self.counts["torn"] += self.busy             # one inside another: in a signal's handler
        self.busy = True
        try:
            yield
            what = self.befalls.pop((self.life, kind, number), "")   # once: a handler may save, too
            for _ in range(("", "warn", "warn twice", "kill").index(what) % 3):
                self.asked = True
                try:
                    os.kill(os.getpid(), signal.SIGUSR1)
                    time.sleep(0)                    # Python's handler runs at once
                except BaseException as error:
                    if not isinstance(error, Killed):
                        self.thrown = self.thrown or f"{type(error).__name__} in the middle of {kind}({number or ''}): {error}"
                    raise
            if what == "kill":
                self.allowed += max(self.log, default=0) - max(self.disk[0], (number - 1) // self.every * self.every)
                self.die()
        finally:
            self.busy = False

    def die(self) -> NoReturn:
        """The end of this process."""
        self.dead = True
        raise Killed

    def unheard(self, number: int, frame: FrameType | None) -> NoReturn:
        """What a signal does that nobody listens for."""
        self.counts["status"] += 1
        self.die()

    def load(self) -> int:
        with self.doing("load", 0):
            number, self.state = self.disk
        return number

    def step(self, number: int) -> None:
        self.after += self.asked
        self.counts["late"] += self.after > 1        # one more may have begun
        self.counts["again"] += number in self.log
        if number > 2 * self.last or self.counts["again"] > 4 * self.last:
            raise returned.Returned("`go_on` goes on and on", "leave the loop after step `last`")
        with self.doing("step", number):
            self.state = following(self.state, number)
        self.log[number] = self.state

    def save(self, number: int) -> None:
        due = number % self.every == 0 or number == self.last or self.asked
        self.counts["needless"] += not due or number == self.disk[0]
        with self.doing("save", number):
            state = self.state
        self.disk = (number, state)


def following(state: int, number: int) -> int:
    """The state after a step, which all steps before it have a part in; it is the loss, too."""
    return (state * 6364136223846793005 + number) % 2**61


def live(world: World) -> None:
    """One life of the process after another, until the training is done."""
    for life in range(8):
        world.born(life)
        before = signal.signal(signal.SIGUSR1, world.unheard)
        try:
            status: Any = go_on(world.last, world.every, world.load, world.step, world.save)
        except Killed:
            continue
        except SystemExit as error:
            status = error.code
        except BaseException:
            if world.thrown:
                return
            raise
        finally:
            signal.signal(signal.SIGUSR1, before)
        if world.dead:                               # it has caught what nobody can
            continue
        if isinstance(status, bool) or not isinstance(status, int):
            raise returned.Returned(f"`go_on` returned {returned.told(status)}; 0 or {GO_ON} is wanted",
                                    returned.cure(status, f"return 0 if step `last` is done, else {GO_ON}"))
        done = max(world.log, default=0) >= world.last
        world.counts["status"] += status != (0 if done else GO_ON)
        if status == 0 or done:
            return


def draw_fates(seed: int, hidden: bool) -> Tensors:
    """How often to save, and up to which step to train; moments are drawn from them."""
    dice = random.Random(seed)
    every = dice.randint(5, 7) if hidden else dice.randint(3, 4)
    return {"seed": torch.tensor(seed), "every": torch.tensor(every), "last": torch.tensor(every * dice.randint(4, 6) + 2)}


def fates(inputs: Tensors) -> dict[str, dict[tuple[int, str, int], str]]:
    """What befalls a training, in words, and as `World` takes it."""
    every, last = int(inputs["every"]), int(inputs["last"])
    dice = random.Random(int(inputs["seed"]))
    due = every * dice.randint(2, 3)                 # a step after which a checkpoint is due
    odd = due + dice.randint(1, every - 2)           # and one after which none is
    return {"nothing happens": {},
            f"a signal in step {odd}": {(0, "step", odd): "warn"},
            f"a signal in step {due}": {(0, "step", due): "warn"},
            f"a signal while step {due} is saved": {(0, "save", due): "warn"},
            "a signal while it loads": {(0, "load", 0): "warn"},
            f"a signal in step {last}, the last": {(0, "step", last): "warn"},
            f"two signals in step {odd}": {(0, "step", odd): "warn twice"},
            f"a signal in step {odd}, and one while it loads again": {(0, "step", odd): "warn", (1, "load", 0): "warn"},
            f"killed in step {odd + 1}": {(0, "step", odd + 1): "kill"},
            f"killed while step {due} is saved": {(0, "save", due): "kill"},
            f"a signal in step {odd}, then killed in step {odd + 1}": {(0, "step", odd): "warn", (1, "step", odd + 1): "kill"}}


def survive(inputs: Tensors) -> Tensors:
    """Train through each fate, and count what went wrong."""
    every, last = int(inputs["every"]), int(inputs["last"])
    found: dict[str, list[int]] = {name: [] for name in ("losses", "again", "late", "needless", "torn", "status")}
    alone = dict(enumerate(accumulate(range(1, last + 1), following, initial=1)))      # step -> loss
    for befalls in fates(inputs).values():
        world = World(every, last, befalls)
        live(world)
        if world.thrown:
            raise returned.Returned(f"what USR1 calls raised {world.thrown}".removesuffix(": "),
                                    "a handler that raises leaves the loop in the middle of a step, a save or a load, and what "
                                    "was being done is half done: let it set a flag, and look at the flag between two steps")
        world.counts["again"] = max(0, world.counts["again"] - world.allowed)
        found["losses"].append(sum(world.log.get(number) != alone[number] for number in range(1, last + 1)))
        for name, count in world.counts.items():
            found[name].append(count)
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


# ---- how often to save

def draw_costs(seed: int, hidden: bool) -> Tensors:
    """Seconds of a save and of a restart, hours between failures of a node, and nodes."""
    generator = torch.Generator().manual_seed(seed)
    count = 8 if hidden else 5
    drawn = torch.rand(4, count, generator=generator, dtype=torch.float64)
    return {"save": 1 + 120 * drawn[0] ** 2, "restart": 30 + 900 * drawn[1], "mtbf": 3600 * (500 + 20_000 * drawn[2]),
            "nodes": (2 ** (1 + 10 * drawn[3])).round()}


GIVEN = ("save", "restart", "mtbf", "nodes")


def intervals(inputs: Tensors) -> Tensors:
    """The interval and the share that is lost in each case."""
    pairs = []
    for save, restart, mtbf, nodes in torch.stack([inputs[name] for name in GIVEN], 1).tolist():
        made = returned.pair(checkpoint_interval(save, restart, mtbf, int(nodes)), "checkpoint_interval", "(seconds, share)")
        pairs.append([returned.number(part, "checkpoint_interval") for part in made])
    interval, share = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    return {"interval": interval, "share": share}


def costs(inputs: Tensors) -> list[str]:
    """The cases in words."""
    rows = torch.stack([inputs[name] for name in GIVEN], 1).tolist()
    return [", ".join(f"{name}={value:.6g}" for name, value in zip(GIVEN, row, strict=True)) for row in rows]


EXERCISES = [
    Exercise("rendezvous", "18", (f"{__name__}.rendezvous",), draw_seed, meet, {
        "rank": "each task has its own rank",
        "size": "all know how many ranks there are",
        "local": "each knows its number on its node, which is its GPU",
        "address": "all meet at the first node of the list, however Slurm writes it",
        "port": "at one port, between 1024 and 32767, which every rank finds in a process of its own",
        "own": "and the next job at another one"}, flags={
        "address": "some ranks go to another place", "port": "not all ranks go to the same port",
        "own": "it has the same port"}, limits=QUICK, points=2),
    Exercise("batch-script", "18", (f"{__name__}.batch_script",), draw_jobs, run_script, {
        "lint": "`course lint-sbatch` finds nothing wrong with it",
        "asked": "it asks for the nodes, tasks, CPUs and GPUs of two jobs, for twenty minutes, and for a warning a minute before",
        "ranks": "srun starts one rank for each task, with its CPUs and as many threads",
        "command": "each rank is `python -m course.cli train` with the script's arguments, spaces and stars included",
        "meet": "all meet on the first node, at a port of the job's own",
        "heard": "a warning that Slurm gives the script reaches the ranks",
        "status": "the job ends when its ranks have, and fails if and only if they do",
        "requeued": "it goes back into the queue if its ranks ended with 75, once they have ended, and only then"}, flags={
        "lint": "run the cell above, which shows what",
        "command": "the words that srun was given are others",
        "meet": "the address is not the first node, or the port is none, or the next job has the same",
        "heard": "they were never told",
        "status": "its exit status says something else than that of srun, or it never ends",
        "requeued": "not then, too early, twice, another job, or without a reason"}, limits=QUICK, points=4),
    Exercise("go-on", "18", (f"{__name__}.go_on",), draw_fates, survive, {
        "losses": "whatever happens, in the end each step has the loss of a training that was left alone",
        "again": "no step is done again but those that a kill takes away",
        "late": "after a signal at most one more step begins",
        "needless": "a checkpoint is written when one is due or the run stops, and none twice",
        "torn": "nothing else happens while one is written",
        "status": "it returns 0 when step `last` is done, else 75"}, cases=lambda inputs: list(fates(inputs)), limits=QUICK,
        points=3),
    Exercise("checkpoint-interval", "18", (f"{__name__}.checkpoint_interval",), draw_costs, intervals, {
        "interval": "this interval loses the least", "share": "and it loses this share of the time"}, cases=costs, limits=QUICK),
]
