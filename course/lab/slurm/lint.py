"""`course lint-sbatch`: find faults in a batch script before it waits in a queue for hours and fails in seconds.

script_parser.py parses the script; here are the rules, each with its reason. Faults that sbatch itself refuses at submission (an
unknown option or value, DOS line endings, no shell in the first line) need no rule.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from course.lab.slurm.script_parser import Script, launched_program, read_script

NAMES_A_PROGRAM = {"echo", "printf", "source", ".", "trap", "command", "which", "type", "[", "[[", "test",
                   "fail"}      # these may mention a program
BARE_ARGUMENTS = re.compile(r"\$(?:[@*]|\{[@*]\})")


class Finding(NamedTuple):
    """One fault in a script."""

    line: int
    rule: str
    text: str                                        # the fault, why it matters, and what to do


Rule = Callable[[Script], Iterator[Finding]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Register a rule, whose docstring is its reason."""
    RULES.append(function)
    return function


def lint(script: Script) -> list[Finding]:
    """All findings, ordered by line."""
    return sorted({finding for check in RULES for finding in check(script)})


@rule
def ignored_directives(script: Script) -> Iterator[Finding]:
    """sbatch reads #SBATCH lines only up to the first command, only in this exact spelling, and expands no variables."""
    for number in script.ignored_lines:
        yield Finding(number, "unread", "sbatch stops reading #SBATCH lines at the first command, so this one does nothing: move "
                      "it up")
    for number, line in script.comments:
        if re.match(r"#\s+SBATCH\s+-|#(?!SBATCH)(?i:SBATCH)\s+-", line):
            yield Finding(number, "unread", "this is a plain comment to sbatch: write #SBATCH, in capitals and without a space")
    for name, value in script.options.items():
        if "$" in value and script.option_lines[name]:
            yield Finding(script.option_lines[name], "unread", f"sbatch expands no variables, so --{name} is literally {value}: "
                          "use Slurm's patterns (%x, %j, %u), or give this option on the command line")


MIN_MEGABYTES = 1000                                 # a training process needs at least this


@rule
def memory_unit(script: Script) -> Iterator[Finding]:
    """sbatch reads memory without a unit as megabytes, so the job has almost none."""
    for name in ("mem", "mem-per-cpu", "mem-per-gpu"):
        value = script.options.get(name, "")
        if value.isdecimal() and 0 < float(value) < MIN_MEGABYTES:       # 0: all the node's memory
            yield Finding(script.option_lines[name], "memory", f"--{name}={value} is {value} megabytes, less than a process with "
                          f"PyTorch takes: write --{name}={value}G")


TIME = re.compile(r"[0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]*(:[0-9]+){0,2}|-1|infinite|unlimited", re.IGNORECASE)


@rule
def time_limit(script: Script) -> Iterator[Finding]:
    """Without a limit a job gets its partition's default, which may be too long to be scheduled soon or too short to finish.
    At the limit Slurm kills the job."""
    if "time" not in script.options:
        yield Finding(1, "time", "no --time: the job gets its partition's default, and the scheduler cannot fit it into a gap; "
                      "say how long it takes, #SBATCH --time=01:00:00")
    elif "signal" not in script.options and script.sruns:
        yield Finding(script.option_lines["time"], "signal", "at the time limit the job is killed and what it did since its last "
                      "checkpoint lost: have Slurm warn it, #SBATCH --signal=B:USR1@60 with a trap, or --signal=USR1@60 straight "
                      "to the ranks")
    elif "signal" in script.options and 0 < (most := limit_seconds(script.options["time"])) <= (lead := warning_seconds(script)):
        yield Finding(script.option_lines["signal"], "signal", f"the warning comes {lead} s before the limit, which is {most} s, "
                      "so that it comes as soon as the job has begun: ask for more time, or for the warning later")


def limit_seconds(time: str) -> int:
    """A time limit in seconds, as Slurm reads it; 0 if it sets none or cannot be read."""
    if not TIME.fullmatch(time) or not time[0].isdigit():
        return 0
    days, dash, rest = time.rpartition("-")
    parts = [int(part or 0) for part in rest.split(":")]
    if dash or len(parts) == 3:                      # hours first; else one part is minutes, two are minutes:seconds
        hours, minutes, left = [*parts, 0, 0][:3]
    else:
        hours, minutes, left = 0, *[*parts, 0][:2]
    return 86_400 * int(days or 0) + 3600 * hours + 60 * minutes + left


def warning_seconds(script: Script) -> int:
    """How many seconds before the limit the signal comes: 60 by default, 0 without a signal."""
    _, _, lead = script.options.get("signal", "@0").partition("@")
    return int(lead) if lead.isdecimal() else 60


@rule
def signal_trap(script: Script) -> Iterator[Finding]:
    """With `B:` only the script gets the signal, which kills it unless a trap forwards it to the ranks."""
    match = re.fullmatch(r"(?:[RB]+:)([A-Z]\w*|\d+)(?:@\d+)?", script.options.get("signal", ""))
    if match and "B" in script.options["signal"].split(":")[0]:
        traps = [word for command in script.commands if command.name == "trap" for word in command.words]
        if not {match[1], f"SIG{match[1]}", match[1].removeprefix("SIG")} & set(traps):
            yield Finding(script.option_lines["signal"], "trap", f"--signal=B: sends {match[1]} to the script alone, and no trap "
                          f"takes it: it kills the script before the ranks know; trap 'kill -{match[1]} $ranks' {match[1]}, with "
                          "srun in the background, or leave out B:")
        elif script.sruns and not any(command.name == "wait" for command in script.commands):
            yield Finding(script.option_lines["signal"], "trap", "bash runs a trap only when the command in the foreground has "
                          "ended, here srun at the time limit: start it in the background (srun ... &) and wait for it")


@rule
def log_files(script: Script) -> Iterator[Finding]:
    """The next job overwrites a log with a fixed name. A job that cannot open its log fails silently."""
    for name in ("output", "error"):
        value, line = script.options.get(name, ""), script.option_lines.get(name, 0)
        if value and value != "/dev/null" and not re.search(r"%\d*[jJA]", value):
            yield Finding(line, "output", f"--{name}={value} has no %j: the next job overwrites this one's log; write "
                          f"{add_job_number(value)}")
        elif value and "array" in script.options and "%A" in value and "%a" not in value:
            yield Finding(line, "output", f"--{name}={value} has no %a: all tasks of the array write over one another; add _%a")
        folder = Path(value.split("%")[0]).parent if "/" in value else Path()
        if "/" in value and not os.path.isdir(folder):
            yield Finding(line, "folder", f"{folder}/ does not exist, and Slurm does not make it: the job would fail without a "
                          f"log; mkdir -p {folder} before you submit")
    if "requeue" in script.options and script.options.get("open-mode", "truncate") != "append":
        yield Finding(script.option_lines["requeue"], "requeued", "a requeued job begins its log anew, and what led to the "
                      "requeue is lost: add #SBATCH --open-mode=append")


def add_job_number(value: str) -> str:
    """A log's file name with the job's number added."""
    path = Path(value)
    return str(path.with_name(f"{path.stem}-%j{path.suffix}")) if path.name else f"{value.rstrip('/')}/%j.log"


@rule
def kill_on_bad_exit(script: Script) -> Iterator[Finding]:
    """Without it, srun waits for all ranks. If one fails, the others hang, on all nodes, until the time limit."""
    if script.variables.get("SLURM_KILL_BAD_EXIT", (0, "0"))[1] == "1":
        return
    for command in script.sruns:
        if launched_program(command) and command.options.get("kill-on-bad-exit", "0") not in ("", "1"):
            yield Finding(command.line, "kill", "when one rank fails the others wait for it until the time limit: srun "
                          "--kill-on-bad-exit=1 ends them at once")


@rule
def tasks_per_gpu(script: Script) -> Iterator[Finding]:
    """srun starts one process per task, torchrun all processes of a node; submit/common.sh needs one task per GPU."""
    for command in script.commands:
        ours = command.name == "course_on_ranks" and len(command.words) > 1              # a single word is its definition
        kind = "python" if ours else launched_program(command) if command.name == "srun" else ""
        step = script.in_step(command)
        counts = [value for name, value in step.options.items() if name.startswith(("nodes", "ntasks", "gpus", "gres"))]
        if not kind or not step.gpus or any("$" in value for value in counts):
            continue
        if ours and step.tasks is None and {"exclusive", "cpus-per-gpu"} & set(step.options):        # then it uses one per GPU
            continue
        tasks = step.tasks or 1
        if kind == "python" and step.uneven:
            yield Finding(command.line, "tasks", f"{step.number('ntasks')} tasks do not divide over {step.nodes} nodes, of which "
                          f"each has {step.gpus} GPUs: ask for --ntasks-per-node={step.gpus}")
        elif kind == "python" and tasks != step.gpus:
            yield Finding(command.line, "tasks", f"{step.gpus} GPUs and {tasks} {'task' if tasks == 1 else 'tasks'} on a node: "
                          f"each GPU needs a process of its own; ask for --ntasks-per-node={step.gpus}")
        if kind == "torchrun" and tasks != 1:
            yield Finding(command.line, "tasks", f"srun starts torchrun {tasks} times on a node, and each starts all ranks: "
                          "--ntasks-per-node=1 with torchrun")


@rule
def visible_devices(script: Script) -> Iterator[Finding]:
    """Slurm decides which of a node's GPUs a job gets. Fixed numbers hide some of them, or are another job's."""
    line, value = script.variables.get("CUDA_VISIBLE_DEVICES", (0, ""))
    if value and "$" not in value:
        yield Finding(line, "devices", f"CUDA_VISIBLE_DEVICES={value} is written down, and the job gets whichever GPUs are free: "
                      "leave it to Slurm, and ask for as many as you need, --gpus-per-node=N")


@rule
def gpu_binding(script: Script) -> Iterator[Finding]:
    """A rank that is bound to its GPU sees no other, so NCCL cannot copy between GPUs directly and uses host memory."""
    for command in script.sruns:
        srun_options, step = command.options, script.in_step(command)
        if not launched_program(command) or step.gpus == 1:
            continue
        if "gpu-bind" not in srun_options and any("[@]" in word for word in command.words):         # an array may hold it
            continue
        bound = step.options.get("gpu-bind")
        line = command.line if {"gpu-bind", "gpus-per-task"} & set(srun_options) else script.option_lines.get("gpu-bind",
                                                                                                              command.line)
        if bound is not None and "$" not in bound and bound.split(",")[-1] != "none":
            yield Finding(line, "bind", f"--gpu-bind={bound} hides a node's other GPUs from a rank, and NCCL needs to reach "
                          "them: --gpu-bind=none; a rank takes the GPU of its number on the node, SLURM_LOCALID")
        elif bound is None and "gpus-per-task" in step.options:
            yield Finding(line, "bind", "--gpus-per-task binds each task to its own GPU, and NCCL needs to reach the others: add "
                          "--gpu-bind=none to srun, or ask for --gpus-per-node")


@rule
def missing_srun(script: Script) -> Iterator[Finding]:
    """The script itself runs on the first node only. A program without srun leaves the other tasks and nodes idle."""
    many = script.nodes > 1 or (script.tasks or 1) > 1
    if not many or any(launched_program(command) for command in script.sruns):
        return
    for command in script.commands:
        kind = launched_program(command)
        setup = {"-c", "venv", "pip", "-V", "--version"} & set(command.words)
        if kind and not setup and command.name not in NAMES_A_PROGRAM:
            if kind == "torchrun" and script.nodes == 1:
                continue
            yield Finding(command.line, "srun", f"{command.name} runs once, on the first node: the other tasks that this job "
                          "asks for do nothing, and are charged; start it with srun")


LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1", "")


@rule
def fixed_rendezvous(script: Script) -> Iterator[Finding]:
    """The job may not get a fixed node, and two jobs on one node cannot use the same port."""
    places = [(line, name, value) for name, (line, value) in script.variables.items() if name in ("MASTER_ADDR", "MASTER_PORT")]
    for command in script.commands:
        text = " ".join(command.words)
        for option, name in (("addr", "MASTER_ADDR"), ("port", "MASTER_PORT")):
            places += [(command.line, name, value) for value in re.findall(rf"--master[-_]{option}[= ](\S+)", text)]
        for endpoint in re.findall(r"--rdzv[-_]endpoint[= ](\S+)", text):
            host, _, port = endpoint.rpartition(":")
            places += [(command.line, "MASTER_ADDR", host), (command.line, "MASTER_PORT", port)]
    for line, name, value in dict.fromkeys(places):
        if name == "MASTER_PORT" and value.isdecimal():
            yield Finding(line, "port", f"port {value} is written down: a second job on the node, yours or another's, cannot "
                          "have it; make it of the job's number, $((20000 + SLURM_JOB_ID % 12000))")
        if name == "MASTER_ADDR" and not re.search(r"[$`]", value) and (value not in LOCAL_HOSTS or script.nodes > 1):
            yield Finding(line, "host", f"the address {value or 'of no host'} is written down, and the job runs on whichever "
                                        "nodes it "
                                        'gets: MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')


@rule
def cpus_per_task(script: Script) -> Iterator[Finding]:
    """A task has one CPU unless it asks for more. Since Slurm 22.05 srun does not inherit --cpus-per-task from sbatch."""
    exported = "SRUN_CPUS_PER_TASK" in script.variables
    for command in filter(launched_program, script.sruns):
        options = command.options
        if options.get("cpu-bind", options.get("cpu_bind", "")) in ("none", "no"):
            yield Finding(command.line, "cores", "--cpu-bind=none lets ranks wander over all cores, and loaders with them: use "
                          "--cpu-bind=cores")
        if "cpus-per-task" in options or "exclusive" in options:
            continue
        if "cpus-per-task" not in script.options and "cpus-per-gpu" not in script.options:
            yield Finding(command.line, "cores", "no --cpus-per-task: each rank gets one CPU for itself, its loaders and its "
                          "threads; ask for the node's CPUs divided by its tasks, with sbatch and with srun")
        elif "cpus-per-task" in script.options and not exported:
            yield Finding(command.line, "cores", "since Slurm 22.05 srun does not take --cpus-per-task over from sbatch: add "
                                                 '--cpus-per-task="$SLURM_CPUS_PER_TASK" to srun, or export '
                                                 'SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK')


@rule
def exit_status(script: Script) -> Iterator[Finding]:
    """A shell continues after a failure, and a job has its last command's exit status, so a failed job looks complete."""
    set_words = " ".join(word for command in script.commands if command.name == "set" for word in command.words[1:])
    first = script.text.split("\n")[0]
    stops = re.search(r"(^|\s)-\w*e|errexit", set_words) or re.search(r"bash\s+-\w*e", first)
    if not stops and len(script.commands) > 1:
        yield Finding(1, "set", "the script goes on after a command that fails, such as a module or folder that is not there, "
                      "and ends as if all went well: set -euo pipefail after the #SBATCH lines")
    for command in script.commands:
        if command.piped and (command.name == "srun" or launched_program(command)) and "pipefail" not in set_words:
            yield Finding(command.line, "pipe", "the job's status is that of the last command of a pipe, so a failed run looks "
                          "complete: set -o pipefail")


@rule
def unquoted_arguments(script: Script) -> Iterator[Finding]:
    """The shell splits an unquoted $@ at spaces and expands its stars to file names."""
    for number, code in script.command_lines:
        plain = re.sub(r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"", "", code)            # the code outside quotes
        if BARE_ARGUMENTS.search(plain):
            yield Finding(number, "arguments", 'arguments with spaces or stars do not survive $@ without quotes: write "$@"')
        elif re.search(r"\b\w+=\"(?:\$[@*]|\$\{[@*]\})\"", code):
            yield Finding(number, "arguments", 'a variable that holds "$@" is one string, which falls apart at spaces: use an '
                          'array, args=("$@") and "${args[@]}", or "$@" itself')


def main(path: Path, options: Sequence[str]) -> bool:
    """Print all findings; returns whether there are none."""
    findings = lint(read_script(path, options))
    for finding in findings:
        where = f"{path}:{finding.line}" if finding.line else "command line"
        print(f"{where}: {finding.text} [{finding.rule}]")
    if not findings:
        print(f"{path}: nothing wrong that {len(RULES)} rules could see")
    return not findings
