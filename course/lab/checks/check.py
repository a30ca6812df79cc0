"""Check an answer: run it in a separate process, compare its outputs with the library's, and say which claims hold.

The separate process receives inputs and returns tensors. The expected outputs and the verdict stay in this process.
"""

import atexit
import errno
import json
import math
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

from course.lab.authoring import stubs
from course.lab.checks import diagnosis
from course.lab.checks.exercise import UNKNOWN, Exercise, Mistake, Tensors, all_exercises, find, known_mistakes, right, wrong
from course.lab.checks.notebook_cells import Piece, whole_answer
from course.lab.instruments.bytes_sent import excess_kinds
from course.lab.sandbox import sandbox
from course.lab.sandbox.child import START_VARIABLE
from course.lab.sandbox.scratch_folder import read_untrusted, remove
from course.ops import triton_language
from course.ranks.collective_mismatch import CELL
from course.utils.errors import CourseError

MAX_OUTPUT_BYTES = 200_000_000                       # bytes of an outputs file
MAX_HEADER_BYTES = 100_000                           # bytes of its header
MAX_EXTRA_OUTPUTS = 20                               # tensors in it, besides those with a claim
MAX_COMPARED = 2000                                  # characters of an error's first line that are compared
MAX_ERROR = 8000                                     # characters kept of an error, from its end
# system errors that are not the answer's fault, unless a line of the answer caused them
MACHINE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.ENFILE, errno.EMFILE, errno.EAGAIN, errno.ENOMEM, errno.EADDRINUSE)
MACHINE_MESSAGES = {"The ranks did not start": 0, "can't start new thread": errno.EAGAIN, "the disk is full": errno.ENOSPC,
        "can't allocate memory": errno.ENOMEM}       # the same errors in other words
MAX_SHOWN = 8                                        # outputs of up to this many numbers are shown in full
WRITES_INPUT = "do not write into {}: work on a copy"
ENDED_HINT = ("look for a loop that does not end, for memory that grows, and for a call that ends the process (sys.exit, "
              "os._exit) or makes it crash")
LIMIT_HINTS = {                                      # by how the sentence on an exceeded limit begins
    "it printed": "print less, and not inside a loop", "it wrote": "write fewer and smaller files",
    "it opened": "close each file that you open, as `with open(...)` does"}
HINT_SEPARATOR = "; or: "                            # between hints of mistakes that stop with equally similar errors
UNKNOWN_ON_RANKS = f"{UNKNOWN}, printing what each rank has"
NOT_AWAITED = "; is every call with async_op=True waited for?"           # for an answer that has such calls
HIGHER_ORDER = ("a check looks at each operation, and torch.cond and its kin hide theirs: compute both outcomes, and choose with "
                "torch.where")
UNKNOWN_CASE = "no known mistake gives these numbers: take the case that is named, and go through your code with it, line by line"
TRY_AGAIN = "run the cell, and check again"          # in a notebook
EARLIER_UNWRITTEN = "it calls what an earlier exercise asks for, which is not written yet"
UNWRITTEN = "it is not written yet"
TRAINING_LOSSES = ("losses", "trained")              # suffixes of outputs that are the losses of a training
HIDDEN_ERRORS = {                                    # what stopped an answer, without quoting the answer
    "InvalidReturn": "what your code returned cannot be used: compare its type and shape with what the docstring says",
    "DoesNotCompile": "its kernel runs in the interpreter, but does not compile for a GPU",
    "ranks": "the ranks did not meet in the same collectives",
    "late": "it took too long",
    "ended": "it ended before it returned anything",
}
HIDDEN_ERROR = "it stopped with an error, which is left out: it could show hidden inputs"
RANK_SECONDS = 30.0                                  # how long ranks may take at least; else a tenth of the exercise's limit


@dataclass(frozen=True)
class Fact:
    """One claim: it held, failed, or was not tried."""

    held: bool
    text: str
    tried: bool = True
    level: int = 0                                   # 0: the answer is wrong without it; else the level of an open task


@dataclass(frozen=True)
class Verdict:
    """The result of a check. It passed if there are facts and all of level 0 held."""

    exercise: str
    facts: tuple[Fact, ...]
    hint: str = ""
    output: str = ""                                 # what the answer printed
    seed: int = 0
    seconds: float = 0.0                             # wall-clock time of the whole check
    version: str = ""                                # of the check
    isolation: str = ""                              # how the answer was isolated, in words
    late: bool = False                               # it took too long, perhaps because the machine is busy
    of: int = 0                                      # number of facts if nothing stops the check early
    unchecked: bool = False                          # this machine failed, so nothing is known about the answer

    @property
    def passed(self) -> bool:
        """Whether there are facts and all of level 0 held."""
        return bool(self.facts) and is_correct(self.facts)

    @property
    def reached(self) -> tuple[int, ...]:
        """The levels whose claims all held: none unless it passed; (0,) for an exercise that passed."""
        levels = sorted({fact.level for fact in self.facts}) if self.passed else []
        return tuple(level for level in levels if all(fact.held for fact in self.facts if fact.level == level))

    @property
    def points(self) -> int:
        """The points for the levels reached."""
        return find(self.exercise).points * len(self.reached)


def is_correct(facts: Sequence[Fact]) -> bool:
    """Whether no fact says that the answer is wrong; an open task's further levels may be open."""
    return all(fact.held for fact in facts if fact.level == 0)


@dataclass(frozen=True)
class Run:
    """One run of an answer: each rank's output tensors, or the error that stopped it."""

    outputs: tuple[Tensors, ...] = ()
    kind: str = ""                                   # kind of error: an exception's name, "ranks", "late" or "ended"
    error: str = ""
    cure: str = ""                                   # what to do about it, if known
    hidden_error: str = ""                           # the error in words that the answer cannot have chosen
    machine_failure: str = ""                        # how this machine failed, in the system's words; the process reports it
    maybe_answer: bool = False                       # the answer itself may have caused that failure


def check_answer(exercise: Exercise, answer: Sequence[Piece], seed: int, hidden: bool = False,
            layers: sandbox.Layers | None = None, again: str = TRY_AGAIN, looking: Callable[[], object] = lambda: None,
            believing: bool = False) -> Verdict:
    """Run the answer on each number of ranks that the exercise names, and return the verdict.

    again: how the learner tries again, for the hint. looking: called before the slow part, comparing a wrong answer with known
    mistakes. believing: accept the answer's report of a machine failure, because the caller will retry.
    """
    if exercise.needs_triton and not triton_language.INSTALLED:
        return unchecked_verdict(exercise, f"it needs Triton, which is not installed: {triton_language.CURE}", seed, hidden)
    begin, facts, hint, output, late = time.monotonic(), list[Fact](), "", "", False
    inputs = exercise.draw(seed, hidden)
    layers = layers or sandbox.layers()
    blanked_package(exercise.objects)                        # build it before two threads ask for it
    with ThreadPoolExecutor(1) as beside:
        for size in exercise.sizes:
            expected = beside.submit(expected_run, exercise.name, seed, hidden, size)        # cached for `compare_run`
            (run,), ended = run_answers(exercise, [(answer, inputs)], size, layers)
            output, late = output + ended.output, run.kind == "late"
            expected.result()                        # raises if the right answer does not run here either
            if run.machine_failure and (believing or not run.maybe_answer):
                return unchecked_verdict(exercise, run.machine_failure, seed, hidden)
            new_facts, new_hint = compare_run(exercise, run, seed, hidden, size, looking)
            facts += new_facts
            hint = with_question(new_hint, answer) or hint
            if not is_correct(new_facts):
                break
    return Verdict(exercise.name, tuple(facts), hint.replace(TRY_AGAIN, again), output, seed, time.monotonic() - begin,
                   exercise.version, describe_isolation(layers), late, exercise.facts)


def with_question(hint: str, answer: Sequence[Piece]) -> str:
    """The hint; the general one on ranks asks an answer that communicates asynchronously whether it waits."""
    asks = hint == UNKNOWN_ON_RANKS and any("async_op" in piece.text for piece in answer)
    return hint + NOT_AWAITED if asks else hint


def unreadable_verdict(exercise: Exercise, problem: str, hint: str, seed: int = 0) -> Verdict:
    """The verdict on an answer that could not be run."""
    return Verdict(exercise.name, (Fact(False, problem),), hint, seed=seed, version=exercise.version, of=exercise.facts)


def unchecked_verdict(exercise: Exercise, why: str, seed: int, hidden: bool) -> Verdict:
    """The verdict when this machine failed: no mark; the next run tries again."""
    fact = Fact(False, f"it could not be checked on this machine ({why})", tried=False)
    hint = "nothing for you to do: whoever grades runs it again" if hidden else f"fix that, and {TRY_AGAIN}"
    return Verdict(exercise.name, (fact,), hint, seed=seed, version=exercise.version, unchecked=True)


def describe_isolation(layers: sandbox.Layers) -> str:
    """How an answer runs here, to complete "your code ran ..."."""
    if layers.namespaces:
        return "isolated from your files, processes and network"
    return "as an unprivileged user" if layers.user else "within limits on time, memory and disk"


def compare_run(exercise: Exercise, run: Run, seed: int, hidden: bool, size: int,
          looking: Callable[[], object] = lambda: None) -> tuple[list[Fact], str]:
    """The facts of a run, and a hint if one of them did not hold."""
    where_run = f"on {size} ranks: " if size > 1 else ""
    if run.error:
        message = run.hidden_error if hidden else describe_stop(exercise, run)
        if hidden and earlier_unwritten(exercise, run):
            message = EARLIER_UNWRITTEN                           # without the name: an answer can choose it
        return [Fact(False, where_run + message)], hint_for_error(exercise, run, seed, hidden, size, looking)
    expected = expected_run(exercise.name, seed, hidden, size)
    facts, inputs = [], exercise.draw(seed, hidden)
    for key in exercise.claims:
        differences = [describe_difference(exercise, key, expected.outputs[rank][key], run.outputs[rank].get(key), inputs, hidden)
                       for rank in range(size)]
        level = exercise.level(key)
        named = f"{exercise.level_names[level]}: " if exercise.open else ""
        claim = named + where_run + with_numbers(exercise, key, run)
        fact = claim_fact(claim, differences, exercise.untried.get(key, ""), hidden)
        facts.append(replace(fact, level=level))
    if all(fact.held for fact in facts):
        return facts, ""
    looking()
    return facts, hint_for_numbers(exercise, run, expected, reference_runs(exercise.name, seed, hidden, size)[1:], hidden, inputs)


def with_numbers(exercise: Exercise, key: str, run: Run) -> str:
    """A claim, with the numbers that the run measured for it."""
    claim = exercise.claims[key]
    if key not in exercise.measured:
        return claim
    found, wanted = run.outputs[0].get(exercise.measured[key]), claim.count("{")
    numbers = found.flatten().tolist() if isinstance(found, Tensor) and found.numel() == wanted else [math.nan] * wanted
    return claim.format(*map(float, numbers))


def claim_fact(claim: str, differences: Sequence[str], untried: str = "", hidden: bool = False) -> Fact:
    """The fact for a claim, from each rank's difference ("" if none). It names a rank if the ranks differ.

    On hidden inputs it names no rank: an answer can choose which one fails."""
    if not any(differences):
        return Fact(True, claim)
    if untried and untried in differences:
        return Fact(False, f"{claim}: {untried}", tried=False)
    rank = next(rank for rank, text in enumerate(differences) if text)
    who = f"rank {rank}: " if len(set(differences)) > 1 and not hidden else ""
    return Fact(False, f"{claim}: no, {who}{differences[rank]}")


def hint_for_numbers(exercise: Exercise, run: Run, expected: Run, slips: Sequence[Run], hidden: bool = False,
                     inputs: Tensors | None = None) -> str:
    """The hint for wrong outputs, from the first known mistake that matches: on all outputs; on those in its `by`; or on the
    outputs that it makes wrong, for learners who made two mistakes in different outputs.

    If none matches on hidden inputs, the hint does not depend on the numbers: an answer can choose them.
    """
    def same(one: Run, other: Run, keys: Collection[str]) -> bool:
        return not any(difference(a[key], b.get(key), exercise.tolerance)
                       for a, b in zip(one.outputs, other.outputs, strict=True) for key in keys)

    first = [key for key in exercise.claims if not exercise.level(key)]
    wrong = not same(expected, run, first)           # then no hint about a budget: it would not make the answer right
    known = [(mistake, slip) for mistake, slip in zip(comparable_mistakes(exercise), slips, strict=True)
             if slip.outputs and not (wrong and same(expected, slip, first))]
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
    if "kept" in first and "kept" in exercise.flags and not same(expected, run, ["kept"]):
        return WRITES_INPUT.format("`batch`" if "the batch" in exercise.claims["kept"] else "the arguments")
    return general_hint(exercise, len(run.outputs)) if hidden else hint_for_unknown(exercise, run, expected, inputs)


def hint_for_unknown(exercise: Exercise, run: Run, expected: Run, inputs: Tensors | None = None) -> str:
    """The hint for outputs that match no known mistake."""
    ranks = list(zip(expected.outputs, run.outputs, strict=True))
    wrong = {key: [differing(exercise, one.get(key), other.get(key)) for one, other in ranks] for key in exercise.claims}
    broken = {key: pairs for key, pairs in wrong.items() if any(pairs)}
    codes = [pair[1].amin().item() for key, pairs in broken.items() if key in exercise.flags for pair in pairs if pair]
    values = [key for key in broken if key not in exercise.flags]
    if exercise.explain and (explained := exercise.explain(inputs or {}, expected.outputs[0], run.outputs[0])):
        return explained
    if exercise.unknown != UNKNOWN:
        return exercise.unknown
    if not values:
        return diagnosis.diagnose_flags(codes) if broken else general_hint(exercise, len(run.outputs))
    fewer = exercise.sizes[0] if len(run.outputs) > exercise.sizes[0] else 0       # it passed there, or the check had stopped
    trains = any(key.endswith(TRAINING_LOSSES) for key in exercise.claims)
    if trains and values[0].endswith((*TRAINING_LOSSES, "weights")):
        hint = diagnosis.diagnose_training(broken[values[0]], fewer, values[0].endswith("weights"), exercise.tolerance)
    else:
        hint = diagnosis.diagnose_numbers(broken[values[0]], fewer)
    hints = [hint, diagnosis.diagnose_flags(codes) if min(codes, default=0) < 0 else ""]
    return "; besides, ".join(filter(None, hints)) or general_hint(exercise, len(run.outputs))


def differing(exercise: Exercise, expected: Tensor | None, actual: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Both tensors if they differ and there is something to compare, else None."""
    if expected is None or actual is None or not actual.numel() or not difference(expected, actual, exercise.tolerance):
        return None
    return expected, actual


def general_hint(exercise: Exercise, size: int) -> str:
    """The fallback hint for outputs on `size` ranks."""
    if exercise.unknown != UNKNOWN:
        return exercise.unknown
    return UNKNOWN_CASE if exercise.cases else UNKNOWN_ON_RANKS if size > 1 else UNKNOWN


def describe_stop(exercise: Exercise, run: Run) -> str:
    """Describe what stopped an answer, as a sentence."""
    if name := earlier_unwritten(exercise, run):
        return f"it calls `{name}`, which is not written yet"
    if is_unwritten(run.kind, run.error):
        return UNWRITTEN
    return run.error if run.kind in ("InvalidReturn", "DoesNotCompile", "ranks") else f"it stopped: {run.error}"


def earlier_unwritten(exercise: Exercise, run: Run) -> str:
    """The still blank object of another exercise at which this answer stopped; "" if it stopped elsewhere."""
    found = re.match(r"(?:ranks? [^:]*: )?NotImplementedError: `(\w+)`: not implemented yet", run.error)
    theirs = {name for other in all_exercises().values() for name in other.names} - {*exercise.names}
    return found[1] if found and found[1] in theirs else ""


def is_unwritten(kind: str, text: str) -> bool:
    """Whether an answer stopped because it is still blank."""
    return kind == "NotImplementedError" and "not implemented yet" in text


def hint_for_error(exercise: Exercise, run: Run, seed: int, hidden: bool, size: int, looking: Callable[[], object]) -> str:
    """The hint for an answer that stopped: of a known mistake that stops in the same way, or a general one."""
    if name := earlier_unwritten(exercise, run):
        return f"write {'that' if hidden else f'`{name}`'} first, in the earlier exercise that asks for it: {TRY_AGAIN}"
    if "HigherOrderOperator" in run.error:
        return HIGHER_ORDER
    if is_unwritten(run.kind, run.error) or "raise NotImplementedError" in run.error:
        return f"replace the line that raises NotImplementedError by your code, {TRY_AGAIN}"
    if "SIGABRT" in run.error and size > 1:
        return diagnosis.TOO_LONG_MESSAGE
    if "SIGSEGV" in run.error:
        return diagnosis.FREED_MEMORY
    if exceeded := next((hint for begin, hint in LIMIT_HINTS.items() if run.kind == "ended" and run.error.startswith(begin)), ""):
        return exceeded
    if run.kind in ("ended", "late"):
        seen = "; ".join(mistake.hint for mistake in known_mistakes(exercise) if mistake.waits)
        return f"seen here before: {seen}. Else {ENDED_HINT}" if seen and run.kind == "late" else ENDED_HINT
    if hint := hint_for_known_stop(exercise, run, seed, hidden, size, looking):
        return hint
    if run.kind == "ranks":
        return diagnosis.diagnose_collectives(run.error)
    if hidden:
        return f'run check("{exercise.name}") in your notebook: if your code stops there too, it shows the error and its line'
    return run.cure or "read the error first; then the line of your code that it names"


def hint_for_known_stop(exercise: Exercise, run: Run, seed: int, hidden: bool, size: int, looking: Callable[[], object]) -> str:
    """The hints of the known mistakes that stop with the same error, at the most similar line; "" if there is none.

    Where no known mistake stops with this kind of error, it runs none: a misspelled name needs no search.
    """
    mistakes = comparable_mistakes(exercise, run.kind)
    if not mistakes:
        return ""
    looking()
    slips = reference_runs(exercise.name, seed, hidden, size, run.kind)[1:]
    alike = {mistake.hint: SequenceMatcher(None, slip.error, run.error).ratio()             # code lines included
             for mistake, slip in zip(mistakes, slips, strict=True)
             if slip.error and comparable_line(slip.error) == comparable_line(run.error)}
    return HINT_SEPARATOR.join(hint for hint, ratio in alike.items() if ratio == max(alike.values()))


def comparable_line(error: str) -> str:
    """The first line of an error without what differs between runs: temporary folders, gloo's clock, lines of the answer."""
    return re.sub(rf"\[rank\d+\]:\s*\[[^]]*\]|(/[\w.-]+)+/|line \d+ of {CELL}.*?(?=; rank|$)", "",
                  (error.splitlines() or [""])[0][:MAX_COMPARED])


def comparable_mistakes(exercise: Exercise, stops: str = "") -> list[Mistake]:
    """The known mistakes that an answer can be compared with, or those of them that stop with this kind of error."""
    return [mistake for mistake in known_mistakes(exercise) if not mistake.silent and stops in ("", mistake.stops)]


@lru_cache(maxsize=64)
def expected_run(name: str, seed: int, hidden: bool, size: int) -> Run:
    """The run of the right answer on these inputs; an answer that passes waits for no other."""
    return run_trusted(name, [right(find(name))], seed, hidden, size)[0]


@lru_cache(maxsize=64)
def reference_runs(name: str, seed: int, hidden: bool, size: int, stops: str = "") -> tuple[Run, ...]:
    """The runs of the right answer and then of each comparable mistake on these inputs. stops: see `comparable_mistakes`."""
    exercise = find(name)
    sources = [right(exercise), *(wrong(exercise, mistake) for mistake in comparable_mistakes(exercise, stops))]
    return run_trusted(name, sources, seed, hidden, size)


def run_trusted(name: str, sources: Sequence[str], seed: int, hidden: bool, size: int) -> tuple[Run, ...]:
    """Run our own sources. Raises `CourseError` if the first one, the right answer, fails."""
    exercise = find(name)
    inputs = exercise.draw(seed, hidden)
    runs, outcome = run_answers(exercise, [(whole_answer(source), inputs) for source in sources], size, None)
    if runs[0].error:
        raise CourseError(f"{name}: the check itself does not run here\n{runs[0].error}\n{outcome.output[-2000:]}")
    return tuple(runs)


def difference(expected: Tensor, got: Tensor | None, tolerance: float) -> str:
    """How two tensors differ, in words; "" if their relative difference in the 2-norm is at most `tolerance`."""
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


def claim_difference(exercise: Exercise, key: str, expected: Tensor, got: Tensor | None) -> str:
    """Why a claim does not hold: how its output differs, or why it was not tried; "" if it holds."""
    if key in exercise.untried and got is not None and not got.numel():
        return exercise.untried[key]
    return difference(expected, got, exercise.tolerance)


def describe_difference(exercise: Exercise, key: str, expected: Tensor, got: Tensor | None, inputs: Tensors, hidden: bool) -> str:
    """Like `difference`, in words that help: a flag as a sentence, a few numbers as returned and expected values.

    On hidden inputs it shows no numbers: a resubmission is graded on the same inputs.
    """
    difference = claim_difference(exercise, key, expected, got)
    if not difference or got is None or difference == exercise.untried.get(key):
        return difference
    if key in exercise.flags and got.dtype == expected.dtype:
        kinds = [] if hidden or not got.numel() else excess_kinds(got.amin().item())
        return exercise.flags[key] + (f", by {' and '.join(kinds)}" if kinds else "") + (
            "" if hidden else name_flagged_case(exercise, expected, got, inputs))
    if hidden:
        return describe_hidden_difference(expected, got)
    if got.dtype != expected.dtype:
        return difference
    if exercise.cases and got.shape == expected.shape:
        wrong = wrong_cases(expected, got, exercise.tolerance)
        first, asked = wrong[0], exercise.cases(inputs)
        came, correct = format_pair(got[first], expected[first], exercise.read_as)
        return (f"{(asked[key] if isinstance(asked, dict) else asked)[first]} gave {came}; {correct} is right "
                f"({len(wrong)} of {len(expected)} cases are wrong)")
    if max(expected.numel(), got.numel()) <= MAX_SHOWN and expected.ndim <= 1:
        return "it is {}; it should be {}".format(*format_pair(got, expected, exercise.read_as))
    return difference


def name_flagged_case(exercise: Exercise, expected: Tensor, got: Tensor, inputs: Tensors) -> str:
    """Which of an exercise's cases failed a flag with a value for each; "" for another flag."""
    asked = exercise.cases(inputs) if exercise.cases and got.shape == expected.shape else []
    if not isinstance(asked, list) or expected.shape != (len(asked),):
        return ""
    wrong = (got != expected).nonzero().flatten().tolist()
    return f": {asked[wrong[0]]} ({len(wrong)} of {len(asked)} cases are wrong)"


def describe_hidden_difference(expected: Tensor, got: Tensor) -> str:
    """Whether two tensors differ in shape, type or numbers, without saying how."""
    if got.shape != expected.shape:
        return "its shape is not what it should be"
    return "its type is not what it should be" if got.dtype != expected.dtype else "its numbers are not what they should be"


def wrong_cases(expected: Tensor, got: Tensor, tolerance: float) -> list[int]:
    """The cases that differ, at least one if the tensors do. Differences the size of rounding in larger cases do not count."""
    threshold = tolerance * expected.double().norm().item() / len(expected)**0.5
    wrong = [i for i in range(len(expected)) if difference(expected[i], got[i], tolerance)]      # not empty if they differ
    large = [i for i in wrong if not (expected[i].double() - got[i].double()).norm() <= threshold]  # `not <=` keeps nan
    return large or wrong


def format_pair(got: Tensor, expected: Tensor, read_as: Mapping[float, str] | None = None) -> tuple[str, str]:
    """Both formatted, with enough digits to tell them apart."""
    digits = next((digits for digits in (6, 9) if format_numbers(got, digits) != format_numbers(expected, digits)), 17)
    return format_numbers(got, digits, read_as), format_numbers(expected, digits, read_as)


def format_numbers(values: Tensor, digits: int = 6, read_as: Mapping[float, str] | None = None) -> str:
    """Format numbers: integers in full, others with `digits` significant digits, those in `read_as` in words."""
    def one(x: float) -> str:
        return (read_as or {}).get(x) or (f"{x:.0f}" if abs(x) < 1e15 and x == int(x) else f"{x:.{digits}g}")

    return ", ".join(map(one, values.double().flatten().tolist())) or "nothing"


def run_answers(exercise: Exercise, answers: Sequence[tuple[Sequence[Piece], Tensors]], size: int,
            layers: sandbox.Layers | None) -> tuple[list[Run], sandbox.Outcome]:
    """Run (answer, inputs) pairs one after another on `size` ranks, in one process separate from this one."""
    limits = replace(exercise.limits, seconds=exercise.limits.seconds * len(answers))
    with temporary_folder() as folder:
        kernels = exercise.needs_triton
        job = {"exercise": exercise.name, "module": exercise.program.__module__, "kernels": kernels, "answers": len(answers),
               "ranks": size, "seconds": max(RANK_SECONDS, exercise.limits.seconds / 10)}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        for number, (pieces, inputs) in enumerate(answers):
            save_file({name: tensor.contiguous() for name, tensor in inputs.items()}, folder / f"inputs-{number}.safetensors")
            (folder / f"answer-{number}.json").write_text(json.dumps(list(map(astuple, pieces))), encoding="utf-8")
        package = blanked_package(exercise.objects)
        environment = {"PYTHONPATH": str(package), triton_language.INTERPRET: "0" if kernels else "1"}
        outcome = sandbox.run([sys.executable, "-m", "course.lab.sandbox.child", str(folder)], folder, [package], environment,
                              limits, layers, START_VARIABLE)
        runs = [with_weighed_outputs(exercise, inputs, read_run(folder, number, size, outcome, exercise))
                for number, (_, inputs) in enumerate(answers)]
        return [replace(run, error=run.error.replace(f"{package}/", "")) for run in runs], outcome


def read_run(folder: Path, number: int, size: int, outcome: sandbox.Outcome, exercise: Exercise) -> Run:
    """Read the files that an answer left behind, trusting none of them."""
    if not outcome.ok and outcome.ended:
        by_answer = outcome.ended.startswith(("it ended by itself",
                                              "it crashed"))          # the answer can choose the status or signal
        return Run(kind="late" if outcome.late else "ended", error=outcome.ended,
                   hidden_error=HIDDEN_ERRORS["ended"] if by_answer else outcome.ended, **stopped_by_machine(outcome))
    outputs = []
    for rank in range(size):
        try:
            outputs.append(load_outputs(read_untrusted(folder, f"out-{number}-{rank}.safetensors", MAX_OUTPUT_BYTES), exercise))
        except Exception:                            # absent or malformed
            return read_error(folder, number)
    return Run(outputs=tuple(outputs))


def load_outputs(content: bytes, exercise: Exercise) -> Tensors:
    """The tensors of an outputs file. Raises ValueError if the header is too long, before parsing it, or names too many."""
    length = int.from_bytes(content[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header has more than {MAX_HEADER_BYTES} bytes")
    names = json.loads(content[8:8 + length]).keys() - {"__metadata__"}
    if len(names) > MAX_EXTRA_OUTPUTS + len(exercise.claims):
        raise ValueError("it has more tensors than the exercise")
    return load_tensors(content)


def with_weighed_outputs(exercise: Exercise, inputs: Tensors, run: Run) -> Run:
    """The run with the outputs that claims refer to, computed from a transcript if the exercise has one; or an error."""
    try:
        return replace(run, outputs=tuple(exercise.weighed(inputs, outputs) for outputs in run.outputs))
    except Exception:                                # the answer may have replaced the transcript by anything
        message = "what was written down of its run cannot be read"
        return Run(kind="ended", error=message, hidden_error=message)


def read_error(folder: Path, number: int) -> Run:
    """The error that an answer without outputs reported, or that it reported none."""
    try:
        report = json.loads(read_untrusted(folder, f"error-{number}.json", 100_000))
        kind, text = str(report["kind"])[:100], (str(report["text"]) or str(report["kind"]))[-MAX_ERROR:]
        machine = machine_failure(text)
        return Run(kind=kind, error=text, cure=str(report["cure"])[:MAX_ERROR], hidden_error=hidden_error(kind, text),
                   machine_failure=machine,
                   maybe_answer=f"of {CELL}" in text or machine == os.strerror(errno.EMFILE))
    except Exception:
        ended = "it ended before it returned anything (does it call sys.exit or os._exit?)"
        return Run(kind="ended", error=ended, hidden_error=ended)


def stopped_by_machine(outcome: sandbox.Outcome) -> dict[str, Any]:
    """How this machine may have stopped a run: it did not start, the kernel killed it, or its last output says so.

    The answer itself may have caused all but the first.
    """
    if outcome.late:
        return {"machine_failure": "it did not start in time" * outcome.ended.startswith("it had not started")}
    if f"(signal {int(signal.SIGKILL)})" in outcome.ended:
        return {"machine_failure": "it was killed, perhaps since memory ran out", "maybe_answer": True}
    if not outcome.ended.startswith("it ended by itself"):
        return {}
    first, last_output = outcome.output.lstrip()[:20], outcome.output[-2000:]
    began = not first.startswith(("bwrap: ", "Traceback")) or CELL in outcome.output
    return {"machine_failure": machine_failure(last_output) or "the sandbox did not start" * first.startswith("bwrap: "),
            "maybe_answer": began}


def machine_failure(text: str) -> str:
    """The machine failure that an error's text names, in the system's words; "" if it names none."""
    for number in MACHINE_ERRORS:
        words = re.escape(os.strerror(number))
        if re.search(rf"\berrno(?: =)? {number}\b|\bcode: -?{number}\b|{words}", text, re.IGNORECASE):
            return os.strerror(number)
    return next((os.strerror(number) if number else words for words, number in MACHINE_MESSAGES.items() if words in text), "")


def hidden_error(kind: str, text: str) -> str:
    """What stopped an answer on hidden inputs, in our own words: the answer's error could reveal the inputs."""
    return UNWRITTEN if is_unwritten(kind, text) else HIDDEN_ERRORS.get(kind, HIDDEN_ERROR)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A temporary folder, removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="course-check-"))
    try:
        yield folder
    finally:
        remove(folder)


@lru_cache(maxsize=32)
def blanked_package(objects: tuple[str, ...]) -> Path:
    """A copy of the package with these objects blank, made once per process and readable by every user."""
    folder = Path(tempfile.mkdtemp(prefix="course-blank-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    stubs.build_blanked_package(objects, folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder
