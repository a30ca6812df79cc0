"""Check an answer: run it in a process of its own, compare what it returns with the library's, say what held.

The process receives inputs and returns tensors. What they should be, and the verdict, stay here.
"""

import atexit
import errno
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor

from course.errors import CourseError
from course.lab import blank, diagnosis, sandbox
from course.lab.cells import Piece, whole
from course.lab.child import BEGUN
from course.lab.exercise import UNKNOWN, Exercise, Mistake, Tensors, all_exercises, find, known_mistakes, right, wrong
from course.lab.scratch import read, remove
from course.lab.traffic import by_what
from course.meet import CELL

MOST = 200_000_000                                   # bytes of an outputs file
HEADER = 100_000                                     # bytes of its header
MOST_OUTPUTS = 20                                    # tensors in it, besides those that the exercise claims something of
LINE = 2000                                          # characters of a line of it that are compared with those of known mistakes
LONGEST = 8000                                       # characters of an error that are kept, the last ones
# of the system's reasons those that are no answer's fault, unless its own line met them
MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.ENFILE, errno.EMFILE, errno.EAGAIN, errno.ENOMEM, errno.EADDRINUSE)
SAID = {"The ranks did not start": 0, "can't start new thread": errno.EAGAIN, "the disk is full": errno.ENOSPC,
        "can't allocate memory": errno.ENOMEM}       # the same in other words
FEW = 8                                              # numbers that are shown one by one
COPY = "do not write into {}; work on a copy"
ENDED = ("look for a loop that does not end, for memory that grows, and for a call that ends the process (sys.exit, os._exit) or "
         "makes it crash")
EITHER = "; or: "                                    # between the hints of mistakes that stop in just the same way
ON_RANKS = f"{UNKNOWN}, printing what each rank has; is every call with async_op=True waited for?"
BY_CASE = "no known mistake gives these numbers: take the case that is named, and go through your code with it, line by line"
AGAIN = "run the cell, and check again"              # in a notebook
MISSING = "it calls what an earlier exercise asks for, which is not written yet"
UNWRITTEN = "it is not written yet"
TRAINED = ("losses", "trained", "weights")           # so end the names of outputs of a training
DISCREET = {                                         # what stopped an answer, where its own words are left out
    "Returned": "what your code returned cannot be used: compare its type and shape with what the docstring says",
    "ranks": "the ranks did not meet in the same collectives",
    "late": "it took too long",
    "ended": "it ended before it returned anything",
}
STOPPED = "it stopped with an error, which is left out: it could show hidden inputs"
RANK_SECONDS = 30.0                                  # that ranks wait for one another; the whole has twice that


@dataclass(frozen=True)
class Fact:
    """One thing that held, or did not, or was not even tried."""

    held: bool
    text: str
    tried: bool = True


@dataclass(frozen=True)
class Verdict:
    """What a check found. It passed if there are facts and all of them held."""

    exercise: str
    facts: tuple[Fact, ...]
    hint: str = ""
    output: str = ""                                 # what the answer printed
    seed: int = 0
    seconds: float = 0.0                             # that whoever called the check waited
    version: str = ""                                # of the check
    isolation: str = ""                              # what the answer was kept from
    late: bool = False                               # it took too long, which a busy machine can be the cause of
    of: int = 0                                      # facts that there are if nothing stops the check early
    unchecked: bool = False                          # this machine failed, so that nothing is known about the answer

    @property
    def passed(self) -> bool:
        """Whether all facts held; without any, nothing was checked, and it did not pass."""
        return bool(self.facts) and all(fact.held for fact in self.facts)


@dataclass(frozen=True)
class Run:
    """What came of one answer on so many ranks: tensors of each rank, or what stopped it."""

    outputs: tuple[Tensors, ...] = ()
    kind: str = ""                                   # of error: an exception's name, "ranks", "late" or "ended"
    error: str = ""
    cure: str = ""                                   # what to do about it, where that is plain
    discreet: str = ""                               # the error without a word that the answer can have chosen
    machine: str = ""                                # how this machine failed, in the system's words, as far as the process says
    doubtful: bool = False                           # that may as well be the answer's own doing


def examine(exercise: Exercise, answer: Sequence[Piece], seed: int, hidden: bool = False,
            layers: sandbox.Layers | None = None, again: str = AGAIN, looking: Callable[[], object] = lambda: None,
            believing: bool = False) -> Verdict:
    """Run the answer on every number of ranks that the exercise names, and judge; `again` says how one tries once more.

    looking: called before a wrong answer is compared with known mistakes, which takes several times as long as all else.
    believing: an answer's word that this machine failed is taken, since whoever calls tries once more.
    """
    begin, facts, hint, output, late = time.monotonic(), list[Fact](), "", "", False
    inputs = exercise.draw(seed, hidden)
    layers = layers or sandbox.layers()
    blanked(exercise.objects)                        # made once, before two ask for it
    with ThreadPoolExecutor(1) as beside:
        for size in exercise.sizes:
            expected = beside.submit(wanted, exercise.name, seed, hidden, size)        # kept, for when `judge` asks
            (run,), ended = execute(exercise, [(answer, inputs)], size, layers)
            output, late = output + ended.output, run.kind == "late"
            expected.result()                        # where ours does not run either, nothing is known about the answer
            if run.machine and (believing or not run.doubtful):
                return no_verdict(exercise, run.machine, seed, hidden)
            found, hint = judge(exercise, run, seed, hidden, size, looking)
            facts += found
            if not all(fact.held for fact in found):
                break
    return Verdict(exercise.name, tuple(facts), hint.replace(AGAIN, again), output, seed, time.monotonic() - begin,
                   exercise.version, isolation(layers), late, exercise.facts)


def unread(exercise: Exercise, problem: str, hint: str, seed: int = 0) -> Verdict:
    """The verdict on an answer that could not be run."""
    return Verdict(exercise.name, (Fact(False, problem),), hint, seed=seed, version=exercise.version, of=exercise.facts)


def no_verdict(exercise: Exercise, why: str, seed: int, hidden: bool) -> Verdict:
    """The verdict where this machine failed: no mark, and tried again by the next run."""
    fact = Fact(False, f"it could not be checked on this machine ({why})", tried=False)
    hint = "nothing for you to do: whoever grades runs it again" if hidden else f"mend that, and {AGAIN}"
    return Verdict(exercise.name, (fact,), hint, seed=seed, version=exercise.version, unchecked=True)


def isolation(layers: sandbox.Layers) -> str:
    """How an answer runs here, to go after "your code ran"."""
    if layers.namespaces:
        return "isolated from your files, processes and network"
    return "as an unprivileged user" if layers.user else "within limits on time, memory and disk"


def judge(exercise: Exercise, run: Run, seed: int, hidden: bool, size: int,
          looking: Callable[[], object] = lambda: None) -> tuple[list[Fact], str]:
    """The facts, and a hint if one of them did not hold."""
    where_run = f"on {size} ranks: " if size > 1 else ""
    if run.error:
        told = run.discreet if hidden else stopped(exercise, run)
        if hidden and missing(exercise, run):
            told = MISSING                           # without its name, which an answer can choose
        return [Fact(False, where_run + told)], hint_for_error(exercise, run, seed, hidden, size, looking)
    expected = wanted(exercise.name, seed, hidden, size)
    facts, inputs = [], exercise.draw(seed, hidden)
    for key, claim in exercise.claims.items():
        differences = [described(exercise, key, expected.outputs[rank][key], run.outputs[rank].get(key), inputs, hidden)
                       for rank in range(size)]
        facts.append(finding(where_run + claim, differences, exercise.untried.get(key, ""), hidden))
    if all(fact.held for fact in facts):
        return facts, ""
    looking()
    return facts, hint_for_numbers(exercise, run, expected, reference(exercise.name, seed, hidden, size)[1:], hidden)


def finding(claim: str, differences: Sequence[str], untried: str = "", hidden: bool = False) -> Fact:
    """Whether a claim holds, from what each rank has against it; a rank is named if not all say the same.

    Of hidden inputs none is named: an answer can choose which one."""
    if not any(differences):
        return Fact(True, claim)
    if untried and untried in differences:
        return Fact(False, f"{claim}: {untried}", tried=False)
    rank = next(rank for rank, text in enumerate(differences) if text)
    who = f"rank {rank}: " if len(set(differences)) > 1 and not hidden else ""
    return Fact(False, f"{claim}: no, {who}{differences[rank]}")


def hint_for_numbers(exercise: Exercise, run: Run, expected: Run, slips: Sequence[Run], hidden: bool = False) -> str:
    """The hint of the mistake that gives just these outputs; or else of one that gives those which it is known by; or else of one
    that gives those which it makes wrong, for who made two mistakes, each with outputs of its own.

    Of hidden inputs nothing is said that depends on the numbers: an answer can choose them.
    """
    def same(one: Run, other: Run, keys: Collection[str]) -> bool:
        return not any(differ(a[key], b.get(key), exercise.tolerance)
                       for a, b in zip(one.outputs, other.outputs, strict=True) for key in keys)

    known = [(mistake, slip) for mistake, slip in zip(comparable(exercise), slips, strict=True) if slip.outputs]
    for mistake, slip in known:
        if same(slip, run, exercise.claims):
            return mistake.hint
    for mistake, slip in known:
        if mistake.by and same(slip, run, mistake.by) and not same(expected, run, mistake.by):
            return mistake.hint
    for mistake, slip in known:
        changed = [key for key in exercise.claims if not same(expected, slip, [key])]
        if changed and same(slip, run, changed):
            return mistake.hint
    if "kept" in exercise.claims and not same(expected, run, ["kept"]):
        return COPY.format("`batch`" if "the batch" in exercise.claims["kept"] else "what you are given")
    return generally(exercise, len(run.outputs)) if hidden else unexplained(exercise, run, expected)


def unexplained(exercise: Exercise, run: Run, expected: Run) -> str:
    """What to say of outputs that no known mistake gives."""
    ranks = list(zip(expected.outputs, run.outputs, strict=True))
    wrong = {key: [apart(exercise, one.get(key), other.get(key)) for one, other in ranks] for key in exercise.claims}
    broken = {key: pairs for key, pairs in wrong.items() if any(pairs)}
    codes = [pair[1].amin().item() for key, pairs in broken.items() if key in exercise.flags for pair in pairs if pair]
    values = [key for key in broken if key not in exercise.flags]
    if not values:
        return diagnosis.of_flags(codes) if broken else generally(exercise, len(run.outputs))
    fewer = exercise.sizes[0] if len(run.outputs) > exercise.sizes[0] else 0       # on which it was right, or nobody had got here
    look = diagnosis.of_training if values[0].endswith(TRAINED) else diagnosis.of_numbers
    said = [look(broken[values[0]], fewer), diagnosis.of_flags(codes) if min(codes, default=0) < 0 else ""]
    return "; besides, ".join(filter(None, said)) or generally(exercise, len(run.outputs))


def apart(exercise: Exercise, expected: Tensor | None, got: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Both, if they differ and there is something to compare."""
    if expected is None or got is None or not got.numel() or not differ(expected, got, exercise.tolerance):
        return None
    return expected, got


def generally(exercise: Exercise, size: int) -> str:
    """What to say of outputs on so many ranks of which nothing else can be said."""
    if exercise.unknown != UNKNOWN:
        return exercise.unknown
    return BY_CASE if exercise.cases else ON_RANKS if size > 1 else UNKNOWN


def stopped(exercise: Exercise, run: Run) -> str:
    """What stopped an answer, as a sentence."""
    if name := missing(exercise, run):
        return f"it calls `{name}`, which is not written yet"
    if unwritten(run.kind, run.error):
        return UNWRITTEN
    return run.error if run.kind in ("Returned", "ranks") else f"it stopped: {run.error}"


def missing(exercise: Exercise, run: Run) -> str:
    """What another exercise asks for and this answer calls, where that is still blank; "" if it did not stop there."""
    found = re.match(r"(?:ranks? [^:]*: )?NotImplementedError: `(\w+)`: not implemented yet", run.error)
    theirs = {name for other in all_exercises().values() for name in other.names} - {*exercise.names}
    return found[1] if found and found[1] in theirs else ""


def unwritten(kind: str, text: str) -> bool:
    """Whether an answer stopped at the blank itself."""
    return kind == "NotImplementedError" and "not implemented yet" in text


def hint_for_error(exercise: Exercise, run: Run, seed: int, hidden: bool, size: int, looking: Callable[[], object]) -> str:
    """The hint of a known mistake that stops in the same way, or a general one."""
    if name := missing(exercise, run):
        return f"write {'that' if hidden else f'`{name}`'} first, in the earlier exercise that asks for it: {AGAIN}"
    if run.kind == "NotImplementedError":
        return f"replace the line that raises NotImplementedError by your code, {AGAIN}"
    if run.kind in ("ended", "late"):
        seen = "; ".join(mistake.hint for mistake in known_mistakes(exercise) if mistake.waits)
        return f"seen here before: {seen}. Else {ENDED}" if seen and run.kind == "late" else ENDED
    looking()
    slips = reference(exercise.name, seed, hidden, size)[1:]
    alike = {mistake.hint: SequenceMatcher(None, slip.error, run.error).ratio()             # of the lines that they stopped at
             for mistake, slip in zip(comparable(exercise), slips, strict=True)
             if slip.error and opening(slip.error) == opening(run.error)}
    if alike:
        return EITHER.join(hint for hint, ratio in alike.items() if ratio == max(alike.values()))
    if run.kind == "ranks":
        return diagnosis.of_ranks(run.error)
    return (not hidden and run.cure) or "read the error first; then the line of your code that it names"


def opening(error: str) -> str:
    """The first line of an error without what is another each time: folders of this run, gloo's clock, lines of the answer."""
    return re.sub(rf"\[rank\d+\]:\s*\[[^]]*\]|(/[\w.-]+)+/|line \d+ of {CELL}.*?(?=; rank|$)", "",
                  (error.splitlines() or [""])[0][:LINE])


def comparable(exercise: Exercise) -> list[Mistake]:
    """The known mistakes that yield something to compare with."""
    return [mistake for mistake in known_mistakes(exercise) if not mistake.silent]


@lru_cache(maxsize=64)
def wanted(name: str, seed: int, hidden: bool, size: int) -> Run:
    """What the right answer gives on these inputs: all that whoever passes waits for."""
    return trusted(name, [right(find(name))], seed, hidden, size)[0]


@lru_cache(maxsize=64)
def reference(name: str, seed: int, hidden: bool, size: int) -> tuple[Run, ...]:
    """What the right answer gives on these inputs, then what each comparable mistake gives."""
    exercise = find(name)
    sources = [right(exercise), *(wrong(exercise, mistake) for mistake in comparable(exercise))]
    return trusted(name, sources, seed, hidden, size)


def trusted(name: str, sources: Sequence[str], seed: int, hidden: bool, size: int) -> tuple[Run, ...]:
    """Runs of sources of ours, the first of which has to work."""
    exercise = find(name)
    inputs = exercise.draw(seed, hidden)
    runs, ended = execute(exercise, [(whole(source), inputs) for source in sources], size, None)
    if runs[0].error:
        raise CourseError(f"{name}: the check itself does not run here\n{runs[0].error}\n{ended.output[-2000:]}")
    return tuple(runs)


def differ(expected: Tensor, got: Tensor | None, tolerance: float) -> str:
    """How two tensors differ, in words; nothing if they agree to `tolerance`, relative, in the 2-norm."""
    if got is None:
        return "nothing was returned"
    if got.shape != expected.shape:
        return f"its shape is {tuple(got.shape)}, it should be {tuple(expected.shape)}"
    if got.dtype != expected.dtype:
        return f"its type is {got.dtype}, it should be {expected.dtype}"
    a, b = expected.double(), got.double()
    if not b.isfinite().all():
        return "" if torch.allclose(a, b, tolerance, 0, equal_nan=True) else "it has numbers that are not finite"
    error = ((a - b).norm() / a.norm().clamp(min=1e-300)).item() if a.any() else b.norm().item()
    return "" if error <= tolerance else f"relative difference {error:.2g}"


def against(exercise: Exercise, key: str, expected: Tensor, got: Tensor | None) -> str:
    """What there is against a claim: how its output differs, or that it was not tried."""
    if key in exercise.untried and got is not None and not got.numel():
        return exercise.untried[key]
    return differ(expected, got, exercise.tolerance)


def described(exercise: Exercise, key: str, expected: Tensor, got: Tensor | None, inputs: Tensors, hidden: bool) -> str:
    """As `differ`, in words that help: a flag as a sentence, few numbers as what came and what is right.

    Of hidden inputs no number is shown, nor any that the answer has chosen: whoever hands in again is graded on the same.
    """
    difference = against(exercise, key, expected, got)
    if not difference or got is None or difference == exercise.untried.get(key):
        return difference
    if key in exercise.flags and got.dtype == expected.dtype:
        kinds = [] if hidden or not got.numel() else by_what(got.amin().item())
        return exercise.flags[key] + (f", by {' and '.join(kinds)}" if kinds else "")
    if hidden:
        return unlike(expected, got)
    if got.dtype != expected.dtype:
        return difference
    if exercise.cases and got.shape == expected.shape:
        wrong = wrong_cases(expected, got, exercise.tolerance)
        first, asked = wrong[0], exercise.cases(inputs)
        came, correct = told_apart(got[first], expected[first], exercise.read_as)
        return (f"{(asked[key] if isinstance(asked, dict) else asked)[first]} gave {came}; {correct} is right "
                f"({len(wrong)} of {len(expected)} cases are wrong)")
    if max(expected.numel(), got.numel()) <= FEW and expected.ndim <= 1:
        return "it is {}; it should be {}".format(*told_apart(got, expected, exercise.read_as))
    return difference


def unlike(expected: Tensor, got: Tensor) -> str:
    """In what two tensors differ, without how."""
    if got.shape != expected.shape:
        return "its shape is not what it should be"
    return "its type is not what it should be" if got.dtype != expected.dtype else "its numbers are not what they should be"


def wrong_cases(expected: Tensor, got: Tensor, tolerance: float) -> list[int]:
    """Which of several numbers differ, at least one if they do as a whole: not those next to zero, by what others round off."""
    least = tolerance * expected.double().norm().item() / len(expected)**0.5
    found = [i for i in range(len(expected)) if differ(expected[i], got[i], tolerance)]      # each within it: so are all
    large = [i for i in found if not (expected[i].double() - got[i].double()).norm() <= least]        # nan is, too
    return large or found


def told_apart(got: Tensor, expected: Tensor, read_as: Mapping[float, str] | None = None) -> tuple[str, str]:
    """Both in numbers for people, with as many digits as tell them apart."""
    digits = next((digits for digits in (6, 9) if said(got, digits) != said(expected, digits)), 17)
    return said(got, digits, read_as), said(expected, digits, read_as)


def said(values: Tensor, digits: int = 6, read_as: Mapping[float, str] | None = None) -> str:
    """Numbers for people: whole ones with all digits, others with so many; those of `read_as` in its words."""
    def one(x: float) -> str:
        return (read_as or {}).get(x) or (f"{x:.0f}" if abs(x) < 1e15 and x == int(x) else f"{x:.{digits}g}")

    return ", ".join(map(one, values.double().flatten().tolist())) or "nothing"


def execute(exercise: Exercise, answers: Sequence[tuple[Sequence[Piece], Tensors]], size: int,
            layers: sandbox.Layers | None) -> tuple[list[Run], sandbox.Outcome]:
    """Run answers, each on inputs of its own, one after another in one process of their own on `size` ranks."""
    limits = replace(exercise.limits, seconds=exercise.limits.seconds * len(answers))
    with workspace() as folder:
        job = {"exercise": exercise.name, "module": exercise.program.__module__, "answers": len(answers), "ranks": size,
               "seconds": RANK_SECONDS}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        for number, (pieces, inputs) in enumerate(answers):
            save_file({name: tensor.contiguous() for name, tensor in inputs.items()}, folder / f"inputs-{number}.safetensors")
            (folder / f"answer-{number}.json").write_text(json.dumps(list(map(astuple, pieces))), encoding="utf-8")
        package = blanked(exercise.objects)
        ended = sandbox.run([sys.executable, "-m", "course.lab.child", str(folder)], folder, [package],
                            {"PYTHONPATH": str(package)}, limits, layers, BEGUN)
        runs = [weighed(exercise, inputs, collect(folder, number, size, ended, exercise))
                for number, (_, inputs) in enumerate(answers)]
        return [replace(run, error=run.error.replace(f"{package}/", "")) for run in runs], ended


def collect(folder: Path, number: int, size: int, ended: sandbox.Outcome, exercise: Exercise) -> Run:
    """Read what an answer left behind, trusting none of it."""
    if not ended.ok and ended.ended:
        chosen = ended.ended.startswith(("it ended by itself", "it crashed"))          # with a status or a signal of its choice
        return Run(kind="late" if ended.late else "ended", error=ended.ended,
                   discreet=DISCREET["ended"] if chosen else ended.ended, **stopped_by_machine(ended))
    outputs = []
    for rank in range(size):
        try:
            outputs.append(tensors(read(folder, f"out-{number}-{rank}.safetensors", MOST), exercise))
        except Exception:                            # absent, or not what it should be
            return complaint(folder, number)
    return Run(outputs=tuple(outputs))


def tensors(content: bytes, exercise: Exercise) -> Tensors:
    """The tensors of an outputs file; ValueError if its header is longer than those of so many outputs, before it is parsed."""
    length = int.from_bytes(content[:8], "little")
    if length > HEADER:
        raise ValueError(f"its header has more than {HEADER} bytes")
    names = json.loads(content[8:8 + length]).keys() - {"__metadata__"}
    if len(names) > MOST_OUTPUTS + len(exercise.claims):
        raise ValueError("it has more tensors than the exercise")
    return load_tensors(content)


def weighed(exercise: Exercise, inputs: Tensors, run: Run) -> Run:
    """The run with the outputs that are claimed, where the program returns a transcript; what is none is an error."""
    try:
        return replace(run, outputs=tuple(exercise.weighed(inputs, outputs) for outputs in run.outputs))
    except Exception:                                # whatever an answer put in its place
        told = "what was written down of its run cannot be read"
        return Run(kind="ended", error=told, discreet=told)


def complaint(folder: Path, number: int) -> Run:
    """What an answer that returned nothing says of itself."""
    try:
        told = json.loads(read(folder, f"error-{number}.json", 100_000))
        kind, text = str(told["kind"])[:100], (str(told["text"]) or str(told["kind"]))[-LONGEST:]
        machine = of_machine(text)
        return Run(kind=kind, error=text, cure=str(told["cure"])[:LONGEST], discreet=discreetly(kind, text), machine=machine,
                   doubtful=f"of {CELL}" in text or machine == os.strerror(errno.EMFILE))
    except Exception:
        ended = "it ended before it returned anything (does it call sys.exit or os._exit?)"
        return Run(kind="ended", error=ended, discreet=ended)


def stopped_by_machine(ended: sandbox.Outcome) -> dict[str, Any]:
    """How this machine stopped a run, if it may have: it did not begin, the kernel killed it, or its last words say so.

    All but the first may be the answer's own doing.
    """
    if ended.late:
        return {"machine": "it did not start in time" * ended.ended.startswith("it had not started")}
    if f"(signal {int(signal.SIGKILL)})" in ended.ended:
        return {"machine": "it was killed, perhaps since memory ran out", "doubtful": True}
    if not ended.ended.startswith("it ended by itself"):
        return {}
    first, said = ended.output.lstrip()[:20], ended.output[-2000:]
    began = not first.startswith(("bwrap: ", "Traceback")) or CELL in ended.output
    return {"machine": of_machine(said) or "the sandbox did not start" * first.startswith("bwrap: "), "doubtful": began}


def of_machine(text: str) -> str:
    """How this machine failed, in the system's words, as far as an error's text says so; "" if it does not."""
    for number in MACHINE:
        words = re.escape(os.strerror(number))
        if re.search(rf"\berrno(?: =)? {number}\b|\bcode: -?{number}\b|{words}", text, re.IGNORECASE):
            return os.strerror(number)
    return next((os.strerror(number) if number else words for words, number in SAID.items() if words in text), "")


def discreetly(kind: str, text: str) -> str:
    """What stopped an answer on hidden inputs, in words of ours: its error, its kind and its lines could tell of the inputs."""
    return UNWRITTEN if unwritten(kind, text) else DISCREET.get(kind, STOPPED)


@contextmanager
def workspace() -> Iterator[Path]:
    """A scratch folder, removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="course-check-"))
    try:
        yield folder
    finally:
        remove(folder)


@lru_cache(maxsize=32)
def blanked(objects: tuple[str, ...]) -> Path:
    """A copy of the package with these objects blank, made once in this process, readable to whoever runs answers."""
    folder = Path(tempfile.mkdtemp(prefix="course-blank-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    blank.build(objects, folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder
