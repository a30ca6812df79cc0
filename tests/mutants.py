"""Right answers with one small change, and the checks that do not notice it.

    python -m tests.mutants MOST [EXERCISE]...

Of each exercise's right answer it draws up to MOST mutants: a comparison, an operator or a number changed, a condition that
always or never holds, a keyword argument, a call such as `.clone()` or a statement left out. Each runs as a learner's answer, on
inputs that are not hidden and on hidden ones, and those that pass both are printed. Look at each: either it computes the same in
another way, or the check has a hole, and the mutant becomes a known mistake. Without names it takes all but the kernels.
"""

import ast
import difflib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from course.lab.checks import check, notebook_cells
from course.lab.checks.exercise import Exercise, all_exercises, find, right
from course.lab.sandbox import sandbox

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div, ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult, ast.MatMult: ast.Mult}
NAMES = {"min": "max", "max": "min", "sum": "mean", "floor": "ceil", "ceil": "floor", "zeros_like": "ones_like"}
CALLS = ("clone", "detach", "contiguous", "clamp", "float", "to", "wait", "copy")        # which can be left out
STATEMENTS = (ast.Expr, ast.AugAssign, ast.If, ast.For)
BESIDE = 6                                           # answers in one process; one that hangs takes the others' time, too
SEED = 7


def changes(node: ast.AST) -> Iterator[Callable[[], object]]:
    """What can be changed at a node of a tree, each as a call that does it."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield lambda: node.ops.__setitem__(0, COMPARISONS[type(node.ops[0])]())
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        yield lambda: setattr(node, "op", OPERATORS[type(node.op)]())
    if isinstance(node, ast.BoolOp):
        yield lambda: setattr(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield lambda: setattr(node, "value", not node.value if isinstance(node.value, bool) else node.value + 1)
    if isinstance(node, ast.UnaryOp):
        yield lambda: become(node, node.operand)
    if isinstance(node, ast.If | ast.IfExp):
        for always in (True, False):
            yield lambda always=always: setattr(node, "test", ast.Constant(always))
    if isinstance(node, ast.Name) and node.id in NAMES:
        yield lambda: setattr(node, "id", NAMES[node.id])
    if isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield lambda: setattr(node, "attr", NAMES[node.attr])
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            yield lambda keyword=keyword: node.keywords.remove(keyword)
        if isinstance(node.func, ast.Attribute) and node.func.attr in CALLS:
            yield lambda: become(node, node.func.value)
    body = getattr(node, "body", None)
    for place, statement in enumerate(body if isinstance(body, list) else []):
        if isinstance(statement, STATEMENTS) and not isinstance(getattr(statement, "value", None), ast.Constant):
            yield lambda place=place: body.__setitem__(place, ast.Pass())


def become(node: ast.AST, other: ast.AST) -> None:
    """Make a node another one, wherever it stands."""
    node.__class__, node.__dict__ = other.__class__, other.__dict__


def mutants(source: str, most: int, chance: Random) -> list[str]:
    """Up to `most` different programs, each with one change."""
    def sites(tree: ast.AST) -> list[Callable[[], object]]:
        return [change for node in ast.walk(tree) for change in changes(node)]

    found: dict[str, None] = {}
    number = len(sites(ast.parse(source)))
    for which in chance.sample(range(number), min(number, most)):
        tree = ast.parse(source)
        sites(tree)[which]()
        found[ast.unparse(ast.fix_missing_locations(tree))] = None
    return [text for text in found if text != ast.unparse(ast.parse(source))]


def passing(exercise: Exercise, sources: list[str], hidden: bool, size: int, layers: sandbox.Layers) -> list[str]:
    """The answers that pass on so many ranks. If one takes all others with it, each runs alone."""
    inputs, beside = exercise.draw(SEED, hidden), BESIDE if size == 1 else 1
    found: list[str] = []
    for begin in range(0, len(sources), beside):
        part = sources[begin:begin + beside]
        runs, _ = check.run_answers(exercise, [(notebook_cells.whole_answer(one), inputs) for one in part], size, layers)
        if len(part) > 1 and all(run.error for run in runs):
            runs = [check.run_answers(exercise, [(notebook_cells.whole_answer(one), inputs)], size, layers)[0][0] for one in part]
        found += [one for one, run in zip(part, runs, strict=True)
                  if not run.error and check.is_correct(check.compare_run(exercise, run, SEED, hidden, size)[0])]
    return found


def main(most: int, names: list[str]) -> None:
    layers, total, passed = sandbox.layers(), 0, 0
    for name in names:
        exercise, begin = find(name), time.monotonic()
        exercise = replace(exercise, limits=replace(exercise.limits, seconds=12 if exercise.sizes == (1,) else 40))
        tried = mutants(right(exercise), most, Random(name))
        left = tried
        for hidden in (False, True):
            for size in exercise.sizes:
                left = passing(exercise, left, hidden, size, layers)
        total, passed = total + len(tried), passed + len(left)
        print(f"{name}: {len(left)} of {len(tried)} pass, {time.monotonic() - begin:.0f} s", flush=True)
        whole = ast.unparse(ast.parse(right(exercise)))
        for source in left:
            lines = difflib.unified_diff(whole.split("\n"), source.split("\n"), lineterm="", n=0)
            print(*(f"    {line}" for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")), sep="\n", flush=True)
    print(f"{passed} of {total} mutants pass")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] or [name for name, one in all_exercises().items() if not one.needs_triton])
