"""Exercises on the ranks of a real job, and the result file that `course grade` takes in beside the notebook.

`submit/check.sh NOTEBOOK` runs `on_ranks` once for each exercise that has ranks, each in a step of its own, so that one that
hangs or crashes leaves the others be; then `finish` in one process, which checks the rest as `course check` does and writes
NOTEBOOK's `.result.json`. `judge` is for whoever grades: it believes no more of the file than it must.
"""

import ast
import json
import os
import platform
import re
import secrets
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from course.errors import CourseError
from course.files import atomic, sha256
from course.lab import cells, child, evidence
from course.lab.check import Fact, Verdict, against, finding
from course.lab.cluster import fields
from course.lab.exercise import Exercise, find
from course.lab.platforms import Platform
from course.lab.present import MARKS, foreign, outcome
from course.lab.submissions import files, lesson_of, normal_path, of_lesson, owner
from course.meet import lost
from course.parallel.mesh import World, abandon, join, leave

SCHEMA = 1
SUFFIX = ".result.json"
LARGEST = 1_000_000                                  # bytes of a result file
MOST_NAMED = 20                                      # exercises, and runs, in one
LAPS = 3                                             # of which the median counts
FORGOTTEN = "no Slurm here knows the job"
ASKED = ", asked on "
CONFIRMED = ": confirmed: "                          # so begins what `evidence.judge` says of a run that Slurm knows
STAMP = "%Y-%m-%dT%H:%M:%S"                          # as Slurm writes times


def with_ranks(path: Path) -> list[str]:
    """The exercises of a notebook that run on several ranks."""
    exercises = of_lesson(lesson_of(path, cells.load(path)))
    if not exercises:
        raise CourseError(f"{path}: neither its name nor its metadata say which lesson this is, or it has no exercises")
    return [exercise.name for exercise in exercises if max(exercise.sizes) > 1]


def on_ranks(path: Path, name: str, folder: Path) -> None:
    """Check one exercise on all ranks of this job, each of which calls it (srun, torchrun); rank 0 writes to `folder`.

    The learner's code runs as the learner, without a sandbox, LAPS + 1 times. What it raises is noted, and raised, so that the
    step ends. Raises `CourseError` where the exercise is not for so many ranks.
    """
    exercise, world = find(name), join()
    if world.size not in exercise.sizes:
        sizes = " or ".join(map(str, exercise.sizes))
        raise CourseError(f"{name} runs on {sizes} ranks, not on {world.size}: sbatch --ntasks={max(exercise.sizes)}")
    notebook = cells.load(path)
    answer = cells.definitions(cells.code(notebook), exercise.names)
    seed = agreed(secrets.randbits(31))
    if answer.problem:
        found: dict[str, Any] = {"facts": [asdict(Fact(False, answer.problem))]}
    else:
        try:
            found = compared(exercise, [astuple(piece) for piece in answer.pieces], seed, world)
        except Exception as error:
            if not lost(error):
                with atomic(folder / f"{name}.{world.rank}.error") as temporary:           # several ranks may fail at once
                    temporary.write_text(f"rank {world.rank}: {child.complaint(error)['text']}"[:4000], encoding="utf-8")
            abandon(world)
            raise
    passed = bool(found["facts"]) and all(fact["held"] for fact in found["facts"])
    if world.rank == 0:
        record = {"exercise": name, "version": exercise.version, "seed": seed, "ranks": world.size, "passed": passed, **found}
        with atomic(folder / f"{name}.json") as temporary:
            temporary.write_text(json.dumps(record, indent=1), encoding="utf-8")
        print("\n".join([f"{name}, {world.size} ranks: {'passed' if passed else 'not yet'}",
                         *(f"  {MARKS[outcome(Fact(**fact))][0]} {fact['text']}" for fact in found["facts"])]), flush=True)
    leave()


def agreed(number: int) -> int:
    """Rank 0's number, on every rank."""
    sent = [number]
    if dist.is_initialized():
        dist.broadcast_object_list(sent, 0)
    return sent[0]


def compared(exercise: Exercise, pieces: Sequence[tuple[str, int, str]], seed: int, world: World) -> dict[str, Any]:
    """Facts, seconds and hardware of the learner's answer beside the library's, on this job's ranks."""
    device, expected, reference = trusted(exercise, seed, world.device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "answer.json")
        file.write_text(json.dumps(pieces), encoding="utf-8")
        with child.installed(exercise.objects, child.load(file, exercise.names)):
            got, seconds = timed(exercise, seed, device)
    host = {key: value.cpu() for key, value in got.items()}
    wrong = {key: against(exercise, key, value.cpu(), host.get(key)) for key, value in expected.items()}
    told: list[Any] = [None] * world.size
    dist.all_gather_object(told, (wrong, platform.node(), device_name(device)))
    facts = []
    for key, claim in exercise.claims.items():
        facts.append(asdict(finding(f"on {world.size} ranks: {claim}", [differences[key] for differences, *_ in told],
                                    exercise.untried.get(key, ""))))
    return {"facts": facts, "seconds": seconds, "reference_seconds": reference,
            "nodes": list(dict.fromkeys(node for _, node, _ in told)), "devices": [device for *_, device in told]}


def trusted(exercise: Exercise, seed: int, device: torch.device) -> tuple[torch.device, dict[str, torch.Tensor], float]:
    """What is right, and in what time: on GPUs if the exercise runs there, which the right answer tries; else on the CPU."""
    if device.type == "cuda":
        try:
            done = timed(exercise, seed, device)
        except Exception:                            # it makes tensors of its own on the host
            done = None
        works = torch.tensor(int(done is not None))
        dist.all_reduce(works, dist.ReduceOp.MIN)
        if works and done:
            return device, *done
    return torch.device("cpu"), *timed(exercise, seed, torch.device("cpu"))


def timed(exercise: Exercise, seed: int, device: torch.device) -> tuple[dict[str, torch.Tensor], float]:
    """The outputs of the exercise's program, and the median of its seconds."""
    seconds = []
    with torch.device(device):
        for _ in range(LAPS + 1):                    # the first lap meets the others and warms up
            inputs = {name: tensor.to(device) for name, tensor in exercise.draw(seed, False).items()}
            begin = time.perf_counter()
            outputs = exercise.program(inputs)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
    return outputs, statistics.median(seconds[1:])


def device_name(device: torch.device) -> str:
    """What computes: the GPU's name or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    about = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", about.read_text(encoding="utf-8", errors="replace") if about.exists() else "")
    return found[1] if found else platform.machine()


def finish(path: Path, folder: Path, verdicts: Sequence[Verdict]) -> Path:
    """Join what ranks and `course check` found into the notebook's result file; returns its path."""
    exercises: dict[str, dict[str, Any]] = {}
    for verdict in verdicts:
        exercises[verdict.exercise] = {"version": verdict.version, "seed": verdict.seed, "ranks": 1, "passed": verdict.passed,
                                       "facts": [asdict(fact) for fact in verdict.facts], "seconds": verdict.seconds}
    for name in with_ranks(path):
        file, stopped = folder / f"{name}.json", sorted(folder.glob(f"{name}.*.error"))
        why = "its step of the job ended without a result: the job's log says why"
        why = stopped[0].read_text(encoding="utf-8") if stopped else why
        missing = {"version": find(name).version, "passed": False, "facts": [asdict(Fact(False, why))]}
        exercises[name] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else missing
    result = {"schema": SCHEMA, "lesson": lesson_of(path, cells.load(path)), "notebook": sha256(path), "file": path.name,
              "checked": datetime.now().strftime(STAMP), "exercises": exercises, "measured": measured(path), "job": job(),
              "runs": evidence.gather(assigned(path, "report"), path.resolve().parent.parent),
              "hardware": {"devices": sorted({device for one in exercises.values() for device in one.get("devices", [])}),
                           "torch": torch.__version__, "python": platform.python_version()}}
    out = path.with_name(path.stem + SUFFIX)
    with atomic(out) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return out


def measured(path: Path) -> dict[str, Any]:
    """The learner's own numbers: the last `measured = {...}` of plain values in the notebook's code."""
    return plain(assigned(path, "measured"))


def assigned(path: Path, name: str) -> dict[Any, Any]:
    """The last `name = {...}` of literals in the notebook's code."""
    found: dict[Any, Any] = {}
    for source in cells.code(cells.load(path)):
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # such as IPython's magic; numbers stand in plain cells
            continue
        for node in tree.body:
            if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == [name]:
                try:
                    value = ast.literal_eval(node.value)
                except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):     # no plain values
                    continue
                found = value if isinstance(value, dict) else found
    return found


def plain(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Numbers and short texts of a dict, by name."""
    return {str(name): value for name, value in values.items() if short(name) and short(value)}


def short(value: Any) -> bool:
    """Whether it is a number or text of at most 200 characters."""
    try:
        return isinstance(value, (int, float, str)) and len(str(value)) <= 200
    except ValueError:                               # thousands of digits
        return False


def job() -> dict[str, Any] | None:
    """Which job of Slurm this is; None outside of one."""
    env = os.environ
    if "SLURM_JOB_ID" not in env:
        return None
    return {"id": int(env["SLURM_JOB_ID"]), "cluster": env.get("SLURM_CLUSTER_NAME", ""), "user": env.get("SLURM_JOB_USER", ""),
            "nodes": env.get("SLURM_JOB_NODELIST", ""), "tasks": int(env.get("SLURM_NTASKS", 1))}


@dataclass(frozen=True)
class Claim:
    """What a result file is good for: why it counts for nothing, or its numbers and whether Slurm confirms the job."""

    learner: str
    lesson: str
    file: str
    refused: str = ""
    contradicted: tuple[str, ...] = ()               # exercises that it calls passed and grading does not
    confirmed: bool = False
    why: str = ""                                    # how, or why not
    job: str = ""
    devices: str = ""
    numbers: str = ""                                # seconds on ranks, and what the learner measured
    runs: str = ""                                   # what is confirmed and what is claimed of the runs that a report names
    sha: str = ""                                    # of the result file
    day: str = ""                                    # on which it was judged so
    place: str = ""                                  # cluster, user and nodes: numbers of jobs are a cluster's own
    slurm: str = ""                                  # the nodes and GPUs that Slurm says the job had


def result_files(folder: Path) -> dict[tuple[str, str], list[Path]]:
    """The result files below the folder of submissions, of each learner and lesson, the last one last."""
    found: dict[tuple[str, str], list[tuple[Any, Path]]] = {}
    platform = Platform.of(folder, lesson_of)
    for path in files(folder, []):                   # what it leaves out, collecting has noted
        if path.name.endswith(SUFFIX) and path.is_file() and not path.is_symlink():
            named = path.with_name(path.name.removesuffix(SUFFIX) + ".ipynb").relative_to(folder)
            told = platform.attempt(normal_path(named))
            when = (told.moment, told.number, path.stat().st_mtime)
            found.setdefault((owner(named, platform), lesson_of(named)), []).append((when, path))
    return {whose: [path for _, path in sorted(dated)] for whose, dated in found.items()}


def judge(path: Path, learner: str, lesson: str, notebook: Path, verdicts: Sequence[Verdict],
          ask: Callable[[dict[str, Any]], tuple[bool, str]] | None = None,
          accounts: Mapping[str, Collection[str]] = MappingProxyType({})) -> Claim:
    """Take a result file in, or refuse it; `verdicts` are those of grading itself, `ask` asks Slurm about the job.

    accounts: of learners on the cluster; whoever is not in it has the account of their name or of a part of it (`owns`). Of the
    jobs that wrote a learner's runs Slurm itself is asked.
    """
    def refused(why: str) -> Claim:
        return Claim(learner, lesson, path.name, refused=why)

    try:
        if path.stat().st_size > LARGEST:
            return refused(f"it has more than {LARGEST // 1000} kB")
        result = json.loads(path.read_bytes())       # in whatever encoding a tool on the way has saved it
        if result["schema"] != SCHEMA:
            return refused(f"its schema is {str(result['schema'])[:20]}, not {SCHEMA}: check the notebook again with this course")
        if notebook.stat().st_size > cells.LARGEST or result["notebook"] != sha256(notebook):
            return refused("it is of another version of the notebook: its hash is not that of the one handed in")
        if str(result["lesson"]) != lesson:
            return refused(f"it is of lesson {str(result['lesson'])[:20]}")
        if len(result["exercises"]) > MOST_NAMED or len(result.get("runs", {})) > MOST_NAMED:
            return refused(f"it names more than {MOST_NAMED} exercises or runs")      # Slurm is asked about the job of each run
        found = {name: dict(result["exercises"][name]) for name in result["exercises"]}
        if stale := [e.name for e in of_lesson(lesson) if e.name not in found or found[e.name].get("version") != e.version]:
            return refused(f"its checks are of another version of the course ({', '.join(stale)}): check the notebook again")
        if odd := [name for name, one in found.items() if one["passed"] != Verdict(name, held(one["facts"])).passed]:
            return refused(f"its verdicts contradict its facts, so somebody changed it ({', '.join(odd)[:200]})")
        told, about = dict(result["job"] or {}), dict(result["hardware"])
        user = str(told.get("user", ""))
        mine = owns(learner, user, accounts)
        passed = {verdict.exercise: verdict.passed for verdict in verdicts}
        wrong = tuple(name for name, one in found.items() if one.get("passed") is True and passed.get(name) is False)
        confirmed, why = (ask or confirm)({**told, "checked": result["checked"], "file": result["file"]}) if told else (
            False, "it was no job of Slurm")
        if confirmed and not mine:
            confirmed, why = False, (f"nothing says that the account {user[:40]} is this learner's: if it is, write them as "
                                     "learner,account into accounts.csv beside the gradebook")
        return Claim(learner, lesson, path.name, "", wrong, confirmed, why, f"{told.get('id', '')}"[:20],
                     "; ".join(map(str, about["devices"]))[:300], numbers(found, dict(result["measured"])),
                     evidence.judge(result.get("runs", {}), user if mine else learner,
                                    lambda number: (described(number), restarts(number)))[:4000],
                     sha256(path), f"{datetime.now():%Y-%m-%d}",
                     " ".join(str(told.get(name, "")) for name in ("cluster", "user", "nodes"))[:300],
                     allocated(described(int(told["id"]))) if confirmed else "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ArithmeticError, MemoryError):
        return refused("it is damaged: it is no result file of submit/check.sh")


def owns(learner: str, user: str, accounts: Mapping[str, Collection[str]]) -> bool:
    """Whether an account is known to be a learner's: the list says so, or, without an entry, their name or a part of it does."""
    known = accounts.get(learner) or {learner, *learner.split("_")}
    return bool(user) and user.casefold() in {name.casefold() for name in known}


def allocated(known: Mapping[str, str]) -> str:
    """The nodes and GPUs of a job, from what Slurm says of it: n[1-2], 8 GPUs (h100)."""
    resources = known.get("AllocTRES") or known.get("TRES") or ""
    counts = {kind: int(number) for kind, number in re.findall(r"gres/gpu(?::([\w.-]+))?=(\d{1,6})(?=,|$)", resources)}
    gpus = counts.get("", sum(counts.values()))
    kinds = ", ".join(sorted(filter(None, counts)))
    said = f"{gpus or 'no'} GPU{'s' * (gpus != 1)}{f' ({kinds})' * bool(kinds)}" if resources else "Slurm does not say which GPUs"
    return f"{known['NodeList']}, {said}" if known.get("NodeList") else ""


def held(facts: Sequence[Mapping[str, Any]]) -> tuple[Fact, ...]:
    """The facts of a result file."""
    return tuple(Fact(fact["held"] is True, str(fact["text"])) for fact in facts)


def lasting(new: Claim, kept: Claim | None) -> Claim:
    """A claim with what Slurm confirmed of this very file before it forgot the job."""
    if new.refused or not kept or not new.sha or new.sha != kept.sha:
        return new
    if kept.confirmed and not new.confirmed and new.why == FORGOTTEN:
        new = replace(new, confirmed=True, day=kept.day, slurm=kept.slurm,
                      why=f"{kept.why.removesuffix(ASKED + kept.day)}{ASKED}{kept.day}")
    if kept.runs.count(CONFIRMED) > new.runs.count(CONFIRMED):
        new = replace(new, runs=kept.runs)
    return new


def numbers(exercises: Mapping[str, Mapping[str, Any]], own: Mapping[Any, Any]) -> str:
    """The speeds of a result in a line."""
    parts = [f"{name} {float(one['seconds']):.3g} s on {int(one['ranks'])} ranks, "
             f"the library's {float(one['reference_seconds']):.3g}"
             for name, one in exercises.items() if "reference_seconds" in one]
    told = (f"{foreign(name)} = {foreign(str(value))}" for name, value in plain(own).items())
    return "; ".join([*parts, *told])[:1000]


def confirm(told: dict[str, Any]) -> tuple[bool, str]:
    """Whether Slurm here knows such a job, on these nodes, that checked this notebook at that time; and how it is known.

    Slurm says what ran where and when, never how fast it was: of a confirmed job the hardware is what its nodes have.
    """
    number, checked = int(told["id"]), datetime.strptime(str(told["checked"]), STAMP)
    known = described(number)
    if not known:
        return False, FORGOTTEN
    begin, end = (datetime.strptime(known[key], STAMP) if known.get(key, "")[:1].isdigit() else None
                  for key in ("StartTime", "EndTime"))
    same = [known.get("NodeList") == told.get("nodes"), known.get("UserId", "").split("(")[0] == told.get("user"),
            not known.get("ClusterName") or known["ClusterName"] == told.get("cluster"),
            begin is not None and begin <= checked and (end is None or checked <= end)]
    file, command = str(told["file"]), known.get("Command", "").removesuffix(" --trust")
    same.append(bool(file.strip()) and Path(file).name == file and Path(file).suffix.lower() in (".ipynb", ".py"))
    if "Command" in known:                           # the script's path, a space, the notebook's path; either may have spaces
        same.append(re.search(r"(?:^|/)check\.sh ", command) is not None and command.endswith((f" {file}", f"/{file}")))
    if not all(same):
        return False, f"Slurm's job {number} is another one: nodes, user, time or command differ"
    return True, f"Slurm knows job {number}: {known['NodeList']}, {known['UserId'].split('(')[0]}, {known['StartTime']}"


def described(number: int) -> dict[str, str]:
    """What Slurm says of a job, from its memory (scontrol) or from its records (sacct); nothing if it says nothing."""
    line = said("scontrol", "--oneliner", "show", "job", str(number))
    if line:                                         # two users in it: somebody has written one of them
        return fields(line) if line.count(" UserId=") == 1 else {}
    names = ["NodeList", "User", "Cluster", "Start", "End", "AllocTRES"]
    if line := said("sacct", "-X", "-n", "-P", "-j", str(number), "-o", ",".join(names)):
        values = dict(zip(names, line.split("|"), strict=False))
        return {"NodeList": values["NodeList"], "UserId": values["User"], "ClusterName": values["Cluster"],
                "StartTime": values["Start"], "EndTime": values["End"], "AllocTRES": values.get("AllocTRES", "")}
    return {}


def restarts(number: int) -> int | None:
    """How often a job went back into the queue: Slurm's count, or its records less one; None if it says nothing."""
    if line := said("scontrol", "--oneliner", "show", "job", str(number)):
        count = fields(line).get("Restarts", "")
        return int(count) if count.isdecimal() else None
    records = lines("sacct", "-X", "-D", "-n", "-P", "-j", str(number), "-o", "JobIDRaw")
    return len(records) - 1 if records else None


def said(*command: str) -> str:
    """The first line that a command prints; "" if there is no such command, it fails or it hangs."""
    return next(iter(lines(*command)), "")


def lines(*command: str) -> list[str]:
    """All lines that it prints, or none."""
    try:
        asked = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.SubprocessError):
        return []
    return asked.stdout.strip().splitlines() if asked.returncode == 0 else []
