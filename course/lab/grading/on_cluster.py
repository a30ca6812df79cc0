"""Check exercises on the ranks of a real job, and judge the result file that learners submit with the notebook.

`submit/check.sh NOTEBOOK` runs `check_on_ranks` once for each exercise that needs several ranks. Each runs in a separate job
step, so that a hang or crash does not affect the others. Then one process calls `write_result`: it merges this with the
verdicts of `course check` and writes NOTEBOOK's `.result.json`. `course grade` calls `judge_result`, which trusts as little of
the file as possible.
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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from course.lab.checks import notebook_cells
from course.lab.checks.check import Fact, Verdict, claim_difference, claim_fact
from course.lab.checks.exercise import Exercise, find
from course.lab.checks.render import MARKS, outcome, quote_untrusted
from course.lab.grading import run_evidence
from course.lab.grading.platforms import Platform, normalize_path
from course.lab.grading.submissions import exercises_of_lesson, find_files, find_learner, lesson_of
from course.lab.sandbox import child
from course.lab.slurm.local_cluster import parse_fields
from course.parallel.mesh import World, abandon, join, leave
from course.ranks.collective_mismatch import lost
from course.utils.atomic_files import atomic, sha256, write_json
from course.utils.errors import CourseError

SCHEMA = 1
SUFFIX = ".result.json"
MAX_BYTES = 1_000_000                                # bytes of a result file
MAX_NAMED = 20                                       # exercises, and also runs, in one result file
REPEATS = 3                                          # timed repeats; the median counts
TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"                    # as Slurm writes times


def exercises_on_ranks(path: Path) -> list[str]:
    """The names of a notebook's exercises that run on several ranks. Raises `CourseError` if its lesson is unknown."""
    exercises = exercises_of_lesson(lesson_of(path, notebook_cells.read_contents(path)))
    if not exercises:
        raise CourseError(f"{path}: neither its name nor its metadata say which lesson this is, or it has no exercises")
    return [exercise.name for exercise in exercises if max(exercise.sizes) > 1]


def check_on_ranks(path: Path, name: str, folder: Path) -> None:
    """Check one exercise on all ranks of this job. Each rank calls it (srun, torchrun); rank 0 writes to `folder`.

    The learner's code runs as the learner, without a sandbox, REPEATS + 1 times. It records an exception and raises it again, so
    that the step ends. Raises `CourseError` if the exercise does not run on this number of ranks.
    """
    exercise, world = find(name), join()
    if world.size not in exercise.sizes:
        sizes = " or ".join(map(str, exercise.sizes))
        raise CourseError(f"{name} runs on {sizes} ranks, not on {world.size}: sbatch --ntasks={max(exercise.sizes)}")
    answer = notebook_cells.definitions(notebook_cells.read_contents(path).code, exercise.names)
    seed = broadcast_number(secrets.randbits(31))
    if answer.problem:
        result: dict[str, Any] = {"facts": [asdict(Fact(False, answer.problem))]}
    else:
        try:
            result = compare_on_ranks(exercise, [astuple(piece) for piece in answer.pieces], seed, world)
        except Exception as error:
            if not lost(error):
                with atomic(folder / f"{name}.{world.rank}.error") as temporary:           # several ranks may fail at once
                    temporary.write_text(f"rank {world.rank}: {child.describe_error(error)['text']}"[:4000], encoding="utf-8")
            abandon(world)
            raise
    passed = Verdict(name, tuple(Fact(**fact) for fact in result["facts"])).passed
    if world.rank == 0:
        record = {"exercise": name, "version": exercise.version, "seed": seed, "ranks": world.size, "passed": passed, **result}
        write_json(folder / f"{name}.json", record)
        print("\n".join([f"{name}, {world.size} ranks: {'passed' if passed else 'not yet'}",
                         *(f"  {MARKS[outcome(Fact(**fact))][0]} {fact['text']}" for fact in result["facts"])]), flush=True)
    leave()


def broadcast_number(number: int) -> int:
    """Broadcast rank 0's number; without ranks, return the number."""
    values = [number]
    if dist.is_initialized():
        dist.broadcast_object_list(values, 0)
    return values[0]


def compare_on_ranks(exercise: Exercise, pieces: Sequence[tuple[str, int, str]], seed: int, world: World) -> dict[str, Any]:
    """Run the learner's answer and the library's on this job's ranks; returns facts, seconds of both, nodes and devices."""
    device, expected, reference = run_reference(exercise, seed, world.device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "answer.json")
        file.write_text(json.dumps(pieces), encoding="utf-8")
        with child.installed_answers(exercise.objects, child.load_answer(file, exercise.names)):
            outputs, seconds = time_program(exercise, seed, device)
    cpu_outputs = {key: value.cpu() for key, value in outputs.items()}
    wrong = {key: claim_difference(exercise, key, value.cpu(), cpu_outputs.get(key)) for key, value in expected.items()}
    reports: list[Any] = [None] * world.size
    dist.all_gather_object(reports, (wrong, platform.node(), device_name(device)))
    facts = []
    for key, claim in exercise.claims.items():
        facts.append(asdict(claim_fact(f"on {world.size} ranks: {claim}", [differences[key] for differences, *_ in reports],
                                    exercise.untried.get(key, ""))))
    return {"facts": facts, "seconds": seconds, "reference_seconds": reference,
            "nodes": list(dict.fromkeys(node for _, node, _ in reports)), "devices": [device for *_, device in reports]}


def run_reference(exercise: Exercise, seed: int, device: torch.device) -> tuple[torch.device, dict[str, torch.Tensor], float]:
    """(device, expected outputs, seconds) of the right answer: on GPUs if it runs there on all ranks, else on the CPU."""
    if device.type == "cuda":
        try:
            result = time_program(exercise, seed, device)
        except Exception:                            # its program creates tensors on the CPU
            result = None
        works_everywhere = torch.tensor(int(result is not None))
        dist.all_reduce(works_everywhere, dist.ReduceOp.MIN)
        if works_everywhere and result:
            return device, *result
    return torch.device("cpu"), *time_program(exercise, seed, torch.device("cpu"))


def time_program(exercise: Exercise, seed: int, device: torch.device) -> tuple[dict[str, torch.Tensor], float]:
    """The outputs of the exercise's program, and its median time in seconds."""
    seconds = []
    with torch.device(device):
        for _ in range(REPEATS + 1):                    # the first repeat connects the ranks and warms up
            inputs = {name: tensor.to(device) for name, tensor in exercise.draw(seed, False).items()}
            begin = time.perf_counter()
            outputs = exercise.program(inputs)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
    return outputs, statistics.median(seconds[1:])


def device_name(device: torch.device) -> str:
    """The name of the GPU or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.+)", cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else "")
    return match[1] if match else platform.machine()


def write_result(path: Path, folder: Path, verdicts: Sequence[Verdict]) -> Path:
    """Merge the results from ranks and the verdicts of `course check` into the notebook's result file; returns its path."""
    exercises: dict[str, dict[str, Any]] = {}
    for verdict in verdicts:
        exercises[verdict.exercise] = {"version": verdict.version, "seed": verdict.seed, "ranks": 1, "passed": verdict.passed,
                                       "facts": [asdict(fact) for fact in verdict.facts], "seconds": verdict.seconds}
    for name in exercises_on_ranks(path):
        file, errors = folder / f"{name}.json", sorted(folder.glob(f"{name}.*.error"))
        reason = "its step of the job ended without a result: the job's log says why"
        reason = errors[0].read_text(encoding="utf-8") if errors else reason
        missing = {"version": find(name).version, "passed": False, "facts": [asdict(Fact(False, reason))]}
        exercises[name] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else missing
    result = {"schema": SCHEMA, "lesson": lesson_of(path, notebook_cells.read_contents(path)), "notebook": sha256(path),
              "file": path.name,
              "checked": datetime.now().strftime(TIME_FORMAT), "exercises": exercises,
              "measured": plain_values(assigned_dict(path, "measured")), "job": current_job(),
              "runs": run_evidence.gather_runs(assigned_dict(path, "report"), path.resolve().parent.parent),
              "hardware": {"devices": sorted({device for one in exercises.values() for device in one.get("devices", [])}),
                           "torch": torch.__version__, "python": platform.python_version()}}
    out = path.with_name(path.stem + SUFFIX)
    write_json(out, result)
    return out


def assigned_dict(path: Path, name: str) -> dict[Any, Any]:
    """The last literal dict assigned to `name` in the notebook's code: `measured`, the learner's numbers, or `report`."""
    values: dict[Any, Any] = {}
    for source in notebook_cells.read_contents(path).code:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # such as IPython magics; skip the cell
            continue
        for node in tree.body:
            if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == [name]:
                try:
                    value = ast.literal_eval(node.value)
                except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):     # not a literal
                    continue
                values = value if isinstance(value, dict) else values
    return values


def plain_values(values: Mapping[Any, Any]) -> dict[str, Any]:
    """The numbers and short strings of a dict, by name."""
    return {str(name): value for name, value in values.items() if is_short(name) and is_short(value)}


def is_short(value: Any) -> bool:
    """Whether a value is a number or string of at most 200 characters."""
    try:
        return isinstance(value, (int, float, str)) and len(str(value)) <= 200
    except ValueError:                               # an integer of thousands of digits
        return False


def current_job() -> dict[str, Any] | None:
    """The Slurm job that this process runs in; None outside a job."""
    env = os.environ
    if "SLURM_JOB_ID" not in env:
        return None
    return {"id": int(env["SLURM_JOB_ID"]), "cluster": env.get("SLURM_CLUSTER_NAME", ""), "user": env.get("SLURM_JOB_USER", ""),
            "nodes": env.get("SLURM_JOB_NODELIST", ""), "tasks": int(env.get("SLURM_NTASKS", 1))}


@dataclass(frozen=True)
class Claim:
    """A judged result file: why it is refused, or its numbers and whether Slurm confirms the job."""

    learner: str
    lesson: str
    file: str
    refused: str = ""
    contradicted: tuple[str, ...] = ()               # exercises that pass in the file but not in grading
    confirmed: bool = False
    why: str = ""                                    # how the job was confirmed, or why not
    job: str = ""
    devices: str = ""
    numbers: str = ""                                # seconds on ranks, and the learner's measurements
    runs: str = ""                                   # which facts about reported runs are confirmed, which only claimed
    place: str = ""                                  # cluster, user and nodes: a job number alone is not unique
    slurm: str = ""                                  # the nodes and GPUs that Slurm says the job had


def result_files(folder: Path) -> dict[tuple[str, str], list[Path]]:
    """The result files below the folder of submissions, by (learner, lesson), the latest last."""
    found: dict[tuple[str, str], list[tuple[Any, Path]]] = {}
    platform = Platform.of(folder, lesson_of)
    for path in find_files(folder, []):                   # `collect_submissions` has noted what this leaves out
        if path.name.endswith(SUFFIX) and path.is_file() and not path.is_symlink():
            notebook = path.with_name(path.name.removesuffix(SUFFIX) + ".ipynb").relative_to(folder)
            attempt = platform.attempt(normalize_path(notebook))
            key = (attempt.submitted_at, attempt.number, path.stat().st_mtime)
            found.setdefault((find_learner(notebook, platform), lesson_of(notebook)), []).append((key, path))
    return {whose: [path for _, path in sorted(dated)] for whose, dated in found.items()}


def judge_result(path: Path, learner: str, lesson: str, notebook: Path, verdicts: Sequence[Verdict],
          accounts: Mapping[str, Collection[str]] = MappingProxyType({})) -> Claim:
    """Accept a result file or refuse it; `verdicts` are grading's own.

    accounts: learner -> accounts on the cluster. For others, the account has to match their name or a part of it
    (`owns_account`). It asks Slurm about the jobs that wrote a learner's runs.
    """
    def refused(why: str) -> Claim:
        return Claim(learner, lesson, path.name, refused=why)

    try:
        if path.stat().st_size > MAX_BYTES:
            return refused(f"it has more than {MAX_BYTES // 1000} kB")
        result = json.loads(path.read_bytes())       # bytes: json detects the encoding
        if result["schema"] != SCHEMA:
            return refused(f"its schema is {str(result['schema'])[:20]}, not {SCHEMA}: check the notebook again with this course")
        if notebook.stat().st_size > notebook_cells.MAX_BYTES or result["notebook"] != sha256(notebook):
            return refused("it is of another version of the notebook: its hash is not that of the one handed in")
        if str(result["lesson"]) != lesson:
            return refused(f"it is of lesson {str(result['lesson'])[:20]}")
        if len(result["exercises"]) > MAX_NAMED or len(result.get("runs", {})) > MAX_NAMED:
            return refused(f"it names more than {MAX_NAMED} exercises or runs")      # each run costs a query to Slurm
        exercises = {name: dict(result["exercises"][name]) for name in result["exercises"]}
        if stale := [e.name for e in exercises_of_lesson(lesson) if e.name not in exercises
                     or exercises[e.name].get("version") != e.version]:
            return refused(f"its checks are of another version of the course ({', '.join(stale)}): check the notebook again")
        if odd := [name for name, one in exercises.items() if one["passed"] != Verdict(name, parse_facts(one["facts"])).passed]:
            return refused(f"its verdicts contradict its facts, so somebody changed it ({', '.join(odd)[:200]})")
        job, hardware = dict(result["job"] or {}), dict(result["hardware"])
        user = str(job.get("user", ""))
        is_owner = owns_account(learner, user, accounts)
        passed = {verdict.exercise: verdict.passed for verdict in verdicts}
        wrong = tuple(name for name, one in exercises.items() if one.get("passed") is True and passed.get(name) is False)
        confirmed, why = confirm_job({**job, "checked": result["checked"], "file": result["file"]}) if job else (
            False, "it was no job of Slurm")
        if confirmed and not is_owner:
            confirmed, why = False, (f"nothing says that the account {user[:40]} is this learner's: if it is, write them as "
                                     "learner,account into accounts.csv beside the gradebook")
        return Claim(learner, lesson, path.name, "", wrong, confirmed, why, f"{job.get('id', '')}"[:20],
                     "; ".join(map(str, hardware["devices"]))[:300], describe_numbers(exercises, dict(result["measured"])),
                     run_evidence.judge_runs(result.get("runs", {}), user if is_owner else learner, describe_job)[:4000],
                     " ".join(str(job.get(name, "")) for name in ("cluster", "user", "nodes"))[:300],
                     describe_resources(describe_job(int(job["id"]))) if confirmed else "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ArithmeticError, MemoryError):
        return refused("it is damaged: it is no result file of submit/check.sh")


def owns_account(learner: str, user: str, accounts: Mapping[str, Collection[str]]) -> bool:
    """Whether an account is a learner's: by the list, or without an entry by the learner's name or a part of it."""
    known = accounts.get(learner) or {learner, *learner.split("_")}
    return bool(user) and user.casefold() in {name.casefold() for name in known}


def describe_resources(known: Mapping[str, str]) -> str:
    """The nodes and GPUs of a job from Slurm's record: n[1-2], 8 GPUs (h100)."""
    resources = known.get("AllocTRES") or known.get("TRES") or ""
    counts = {kind: int(number) for kind, number in re.findall(r"gres/gpu(?::([\w.-]+))?=(\d{1,6})(?=,|$)", resources)}
    gpus = counts.get("", sum(counts.values()))
    kinds = ", ".join(sorted(filter(None, counts)))
    said = f"{gpus or 'no'} GPU{'s' * (gpus != 1)}{f' ({kinds})' * bool(kinds)}" if resources else "Slurm does not say which GPUs"
    return f"{known['NodeList']}, {said}" if known.get("NodeList") else ""


def parse_facts(facts: Sequence[Mapping[str, Any]]) -> tuple[Fact, ...]:
    """The facts of a result file."""
    return tuple(Fact(fact["held"] is True, str(fact["text"]), level=int(fact.get("level", 0))) for fact in facts)


def describe_numbers(exercises: Mapping[str, Mapping[str, Any]], own: Mapping[Any, Any]) -> str:
    """The timings and measurements of a result in one line."""
    parts = [f"{name} {float(one['seconds']):.3g} s on {int(one['ranks'])} ranks, "
             f"the library's {float(one['reference_seconds']):.3g}"
             for name, one in exercises.items() if "reference_seconds" in one]
    measurements = (f"{quote_untrusted(name)} = {quote_untrusted(str(value))}" for name, value in plain_values(own).items())
    return "; ".join([*parts, *measurements])[:1000]


def confirm_job(claim: dict[str, Any]) -> tuple[bool, str]:
    """Whether Slurm here knows a job on these nodes that checked this notebook at that time; and the reason in words.

    Slurm knows what ran where and when, but not how fast: it confirms a job's nodes, not its measurements.
    """
    number, checked = int(claim["id"]), datetime.strptime(str(claim["checked"]), TIME_FORMAT)
    record = describe_job(number)
    if not record:
        return False, "no Slurm here knows the job"
    begin, end = (datetime.strptime(record[key], TIME_FORMAT) if record.get(key, "")[:1].isdigit() else None
                  for key in ("StartTime", "EndTime"))
    matches = [record.get("NodeList") == claim.get("nodes"), record.get("UserId", "").split("(")[0] == claim.get("user"),
            not record.get("ClusterName") or record["ClusterName"] == claim.get("cluster"),
            begin is not None and begin <= checked and (end is None or checked <= end)]
    file, command = str(claim["file"]), record.get("Command", "").removesuffix(" --trust")
    matches.append(bool(file.strip()) and Path(file).name == file and Path(file).suffix.lower() in (".ipynb", ".py"))
    if "Command" in record:                           # script path, space, notebook path; both may contain spaces
        matches.append(re.search(r"(?:^|/)check\.sh ", command) is not None and command.endswith((f" {file}", f"/{file}")))
    if not all(matches):
        return False, f"Slurm's job {number} is another one: nodes, user, time or command differ"
    return True, f"Slurm knows job {number}: {record['NodeList']}, {record['UserId'].split('(')[0]}, {record['StartTime']}"


def describe_job(number: int) -> dict[str, str]:
    """Slurm's fields for a job, from the controller (scontrol) or the accounting records (sacct); empty if it knows none.

    `Restarts` counts how often the job was requeued: sacct has a record for each start.
    """
    if lines := output_lines("scontrol", "--oneliner", "show", "job", str(number)):
        return parse_fields(lines[0]) if lines[0].count(" UserId=") == 1 else {}     # two: the user forged one of them
    names = ["NodeList", "User", "Cluster", "Start", "End", "AllocTRES"]
    if lines := output_lines("sacct", "-X", "-D", "-n", "-P", "-j", str(number), "-o", ",".join(names)):
        values = dict(zip(names, lines[-1].split("|"), strict=False))
        return {"NodeList": values["NodeList"], "UserId": values["User"], "ClusterName": values["Cluster"],
                "StartTime": values["Start"], "EndTime": values["End"], "AllocTRES": values.get("AllocTRES", ""),
                "Restarts": str(len(lines) - 1)}
    return {}


def output_lines(*command: str) -> list[str]:
    """The lines that a command prints; none if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []
