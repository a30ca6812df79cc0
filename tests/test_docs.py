"""The guides are true: their links lead somewhere, their tables agree with the lessons, their changes apply and work."""

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from course import config
from course.cli.main import app
from tests import test_rooms

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "data/README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("submit/*.md")]
NOTEBOOKS = sorted(path for path in ROOT.glob("notebooks/[0-9][0-9]_*.ipynb") if "_mine" not in path.name)
MASTERS = sorted(ROOT.glob("solutions/[0-9][0-9]_*.py"))
LEARNERS = (ROOT / "docs/learners.md").read_text()
CONTRIBUTORS = (ROOT / "docs/contributors.md").read_text()
needs_git = pytest.mark.skipif(not shutil.which("git"), reason="git, which applies the changes, is not installed")


def markdown(path: Path) -> str:
    """The Markdown of a page or of a notebook's cells, without blocks of code."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The names that links give to the headings, as GitHub makes them."""
    headings = re.findall(r"^#{1,6} +(.*?) *$", markdown(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(path: Path) -> Iterator[str]:
    """The links of a page that lead nowhere in the repository; those into the Internet are not tried."""
    for link in re.findall(r"\]\(<?([^)\s>]+)>?\)", re.sub(r"`[^`\n]*`", "", markdown(path))):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.is_file():
            yield f"{path.relative_to(ROOT)}: {link}: there is no such file"
        elif anchor and anchor not in anchors(target):
            yield f"{path.relative_to(ROOT)}: {link}: there is no such heading, but {', '.join(sorted(anchors(target)))}"


def test_all_links_within_the_repository_lead_somewhere():
    assert len(PAGES) >= 8 and NOTEBOOKS
    assert [found for path in (*PAGES, *NOTEBOOKS) for found in broken(path)] == []


def test_a_broken_link_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "there.md").write_text("# A heading, with `code`\n")
    page = tmp_path / "page.md"
    page.write_text("[a](there.md) [b](there.md#a-heading-with-code) [c](#nowhere) [d](gone.md) `[e](not-a-link.md)`\n"
                    "```\n[f](code.md)\n# no heading\n```\n[g](https://example.org/x)\n")
    assert [line.split(": ")[1] for line in broken(page)] == ["#nowhere", "gone.md"]


def lessons() -> dict[str, tuple[list[str], int]]:
    """Of each lesson in learners.md: what comes before it, and its minutes."""
    rows = re.findall(r"^\| \[?(\d\d) .*?\| ([\d, ]*?) *\| (\d+) \|", LEARNERS, re.MULTILINE)
    return {number: (re.findall(r"\d\d", after), int(minutes)) for number, after, minutes in rows}


def test_learners_read_of_every_lesson_with_the_time_that_it_names():
    found = lessons()
    for master in MASTERS:
        text = master.read_text()
        amount, unit = re.search(r"^# \| reading and doing \| about (\w+) (minutes|hours) \|", text, re.MULTILINE).groups()
        count = int(amount) if amount.isdigit() else {"two": 2, "three": 3}[amount]
        assert found[master.stem[:2]][1] == count * (60 if unit == "hours" else 1), master.stem


def test_paths_have_what_their_lessons_stand_on_and_add_up():
    found = lessons()
    paths = re.findall(r"^\| .*? \| ((?:\d\d, )+\d\d) \| ([\d.]+) \|$", LEARNERS, re.MULTILINE)
    assert len(paths) >= 6
    for path, hours in paths:
        numbers = path.split(", ")
        for place, number in enumerate(numbers):
            assert set(found[number][0]) <= set(numbers[:place]), f"{number} in {path}"
        assert f"{sum(found[number][1] for number in numbers) / 60:.1f}" == hours, path


def test_timetables_have_lessons_in_order_and_add_up():
    found, done = lessons(), set()
    text = (ROOT / "docs/instructors.md").read_text()
    rows = re.findall(r"^\|([a-z ]*)\| (\d) \| ([\d, ]+) \| (\d+) \|$", text, re.MULTILINE)
    assert len(rows) == 7
    for course, _, named, minutes in rows:
        done = set() if course.strip() else done
        for number in named.split(", "):
            assert set(found[number][0]) <= done, f"{number}, {named}"
            done.add(number)
        assert sum(found[number][1] for number in named.split(", ")) == int(minutes) <= 330, named


def test_what_may_stand_in_a_timetables_place_has_its_lessons_and_adds_up():
    found, text = lessons(), (ROOT / "docs/instructors.md").read_text()
    before = {"00", "01", "02", "03", "04", "05", "06", "07", "09", "10"}         # days 1 to 3 of four
    swaps = re.findall(r"(\d\d) in place of\s+(\d\d)(?: and (\d\d))?(?: \((\d+) minutes\))?", text)
    days = [([*sorted({"12", "13", "17"} - {*gone} | {new})], minutes) for new, *gone, minutes in swaps]
    shorter = re.findall(r"((?:\d\d, )+\d\d) \((\d+) minutes\)", text)
    assert len(swaps) == len(shorter) == 2
    for named, minutes in [*days, *((named.split(", "), minutes) for named, minutes in shorter)]:
        assert all(set(found[number][0]) <= before | {*named[:place]} for place, number in enumerate(named)), named
        assert sum(found[number][1] for number in named) == int(minutes), named


def test_jobs_that_an_instructor_submits_one_after_another_are_runs_of_their_own():
    jobs = re.findall(r"^sbatch .*submit/train\.sh vit-demo.*$", (ROOT / "docs/instructors.md").read_text(), re.MULTILINE)
    assert len({re.search(r"log\.name=(\S+)", job)[1] for job in jobs}) == len(jobs) == 3


def test_the_glossary_is_sorted_and_names_modules_and_lessons_that_exist():
    terms = re.findall(r"^- \*\*(.+?)\*\* \((\d\d), `(.+?)`\): \S", LEARNERS, re.MULTILINE)
    assert 40 <= len(terms) == LEARNERS.partition("## Glossary")[2].count("\n- ")
    assert [name for name, *_ in terms] == sorted((name for name, *_ in terms), key=str.lower)
    assert all((ROOT / "course" / module).is_file() and number in lessons() for _, number, module in terms)


def missing_paths(page: str) -> list[str]:
    """The files and folders in backticks that do not exist; NAME, NN and name stand for any name."""
    page = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    quoted = [word for text in re.findall(r"`([^`]+)`", page) for word in text.split()]
    named = [word for word in quoted if re.match(r"(course|tests|docs|solutions|experiments|examples|\.ci)/|README", word)]
    assert len(named) > 40
    return [word for word in named if not any(ROOT.glob(re.sub(r"NAME|NN|(?<=_)name", "*", word)))]


def unknown_commands(page: str) -> list[str]:
    """The `course` commands in backticks that there are not."""
    commands = {command.name or command.callback.__name__: None for command in app.registered_commands}
    groups = {group.name: {each.name or each.callback.__name__ for each in group.typer_instance.registered_commands}
              for group in app.registered_groups}
    wrong = []
    for line in re.findall(r"`course ((?!--)[^`]+)`", page):
        first, *rest = line.split()
        if first not in commands and not (first in groups and (not rest or rest[0] in groups[first])):
            wrong.append(f"course {line}")
    return wrong


def test_the_contributors_page_names_files_and_commands_that_exist():
    if not MASTERS:
        pytest.skip("a release for learners has no solutions, which the page names")
    assert missing_paths(CONTRIBUTORS) == [] and unknown_commands(CONTRIBUTORS) == []
    assert re.findall(r"^\| `course/(\w+)` \|", CONTRIBUTORS, re.MULTILINE) == test_rooms.ROOMS       # in the map's order
    assert len(CONTRIBUTORS.splitlines()) <= 200


def test_the_questions_name_tests_and_commands_that_exist():
    page = (ROOT / "docs/faq.md").read_text()
    named = re.findall(r"`(tests/\S+\.py)(?:::(\w+))?`", page)
    assert len(named) >= 9 and unknown_commands(page) == []
    assert all(f"def {test or 'test_'}" in (ROOT / file).read_text() for file, test in named)
    lines = [line.split() for line in re.findall(r"`course (?:train|verify|profile) ([^`]+)`", page)]
    assert len(lines) >= 5 and all(config.load(preset, settings) for preset, *settings in lines)


# files that a page speaks of and that are not of the course: made by a user, of another project
OTHERS = {"NAME.py", "NAME_triton.py", "NAME.json", "NAME.sh", "NAME.yaml", "NAME.result.json", "NN_name.py", "lessonNN_name.py",
          "test_NAME.py", "config.yaml", "index.json", "dataset.json", "nbgrader_config.py", "train.py", "dist_training.py",
          "modules.sh"}


def strange_files(page: str) -> list[str]:
    """The code files in backticks that are nowhere in the course, by the end of their path."""
    folders = ("course", "docs", "submit", "tests", "solutions", "experiments", "examples")
    here = [str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.*")]
    named = re.findall(r"`([\w./-]+\.(?:py|yaml|sh|json))`", page)
    return [name for name in named if Path(name).name not in OTHERS and "_mine." not in name
            and not any(f"/{path}".endswith(f"/{name}") for path in here)]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "experiments/README.md", *MASTERS], ids=lambda path: path.stem)
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert strange_files(page.read_text()) == []


def test_a_file_or_a_command_that_does_not_exist_is_found():
    assert strange_files("`overlap.py`, `parallel/mesh.py`, `my/config.yaml`") == ["overlap.py"]
    assert missing_paths(f"{CONTRIBUTORS} `course/utils/gone.py`") == ["course/utils/gone.py"]
    assert unknown_commands("`course trian vit-demo` `course lessons bild 19` `course train vit-demo`") == [
        "course trian vit-demo", "course lessons bild 19"]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_without_answers(tmp_path):
    if importlib.util.find_spec("myst_nb") is None:
        pytest.skip("the site's extra is not installed: pip install -c constraints.txt -e '.[docs]', or make docs")
    done = subprocess.run([sys.executable, "-m", "sphinx", "-c", "docs", "-W", "--keep-going", "-q", "-j", "auto", "-d",
                           str(tmp_path / "trees"), ".", str(tmp_path / "site/html")], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "site/html/notebooks/00_start_here.html").read_text()
    assert "NotImplementedError" in page and "GFLOP/s" in page          # blanks, and what was measured
    assert "m * k + k * n + m * n" not in re.sub(r"<[^>]+>", "", page)
    assert (tmp_path / "site/html/index.html").is_file()
    linked = {name for lesson in (tmp_path / "site/html/notebooks").glob("*.html")
              for name in re.findall(r'href="\.\./(course/bench/results/\w+\.json)"', lesson.read_text())}
    assert len(linked) > 10 and all((tmp_path / "site/html" / name).is_file() for name in linked)
    pages = {path: path.read_text() for path in (tmp_path / "site/html").rglob("*.html")}
    assert {str(path.relative_to(tmp_path)): addresses for path, text in pages.items() if (addresses := loaded(text))} == {}
    formulas = [formula for text in pages.values() for formula in re.findall(r"<math.*?</math>", text, re.DOTALL)]
    assert len(formulas) > 100 and not [formula for formula in formulas if "\\" in formula or "&amp;" in formula]     # LaTeX
    index = (tmp_path / "site/html/docs/api/index.html").read_text()
    rows = dict(re.findall(r'href="[\w-]+\.html#([\w.]+)".*?<td><p>(.*?)</p></td>', index, re.DOTALL))
    assert rows["course.utils.errors.CourseError"].startswith("Bad input, explained in one sentence")
    assert len(rows) > 1000 and all(rows.values())


def loaded(page: str) -> list[str]:
    """What a page of HTML loads from the network: scripts, styles, fonts, pictures, frames. Links are only for a reader."""
    tags = re.findall(r"<(?:script|link|img|iframe|source|object|embed|video|audio|image|use)\b[^>]*>", page)
    styles = re.findall(r"url\([^)]*\)|@import[^;]*", page)
    return [address for text in tags + styles for address in re.findall(r"""[("'=\s]((?:https?:)?//[^"' )>]*)""", text)]


def test_what_a_page_loads_from_the_network_is_found():
    assert loaded('<a href="https://pytorch.org">PyTorch</a><script src="_static/a.js"></script>'
                  '<img src="data:image/png;base64,//9k.jg">') == []
    assert loaded('<script defer src="https://example.org/mathjax.js"></script><link rel="stylesheet" href="//example.org/a.css">'
                  "<style>@font-face { src: url(https://example.org/a.woff2) }</style>") == [
        "https://example.org/mathjax.js", "//example.org/a.css", "https://example.org/a.woff2"]


def test_every_public_name_says_what_it_is():
    """Functions and classes of all modules."""
    silent = []
    for file in sorted((ROOT / "course").rglob("*.py")):
        tree = ast.parse(file.read_text())
        named = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"]
        silent += [f"{file}: {getattr(node, 'name', '')}" for node in (tree, *named) if not ast.get_docstring(node)]
    assert not silent


# these mean what PyTorch means by them; shapes stand at the ends of their lines
KNOWN = {"forward", "backward"}
# answers of learners, whose docstrings are their tasks
TASKS = ("lab/exercises/", "lab/mistakes")


def shown() -> set[str]:
    """What lessons show: has to fit on a screen, and speaks through its own docstring and that of its module."""
    sources = "".join("".join(cell["source"]) for path in NOTEBOOKS for cell in json.loads(path.read_text())["cells"])
    return set(re.findall(r'\bshow\("([\w.]+)"\)', sources))


def test_every_public_method_says_what_its_caller_needs():
    """Methods and properties of public classes, also those that override others; not what `KNOWN`, `TASKS` and `shown` name."""
    silent, on_screen = [], shown()
    assert "course.parallel.data_parallel.gradients.Bucketed" in on_screen
    for file in sorted((ROOT / "course").rglob("*.py")):
        name = str(file.relative_to(ROOT / "course"))
        if name.startswith(TASKS):
            continue
        module = "course." + name.removesuffix(".py").replace("/", ".")
        for each in ast.parse(file.read_text()).body:
            if isinstance(each, ast.ClassDef) and each.name[0] != "_" and f"{module}.{each.name}" not in on_screen:
                silent += [f"{name}: {each.name}.{node.name}" for node in each.body
                           if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_"
                           and node.name not in KNOWN and not ast.get_docstring(node)]
    assert not silent


def test_readme_and_learners_read_the_same_minutes() -> None:
    row = r"^\| \[(\d\d) .*\]\(notebooks/(\w+)\.ipynb\) \| .* \| (\d+) \|$"
    rows = re.findall(row, (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [name for _, name, _ in rows] == [path.stem for path in NOTEBOOKS]
    assert {number: int(told) for number, _, told in rows} == {number: minutes for number, (_, minutes) in lessons().items()}


def test_whoever_cites_the_course_cites_its_version():
    versions = [re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)[1] for name, pattern in (
        ("pyproject.toml", r'^version = "(.+)"'), ("CITATION.cff", r"^version: (\S+)"), ("CHANGELOG.md", r"^## (\d\S+)"))]
    assert len(set(versions)) == 1
