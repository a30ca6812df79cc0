"""Recorded results: each file says how it was measured, text takes its numbers from them, and what pages conclude holds."""

import re
import runpy
import shutil
import statistics
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from course import config
from course.bench import results
from course.bench.results import load, pages, tables, value
from course.cli.bench import bench
from course.parallel.tensor_parallel import overlapped_linear
from course.utils.errors import CourseError
from tests import test_docs

ROOT = Path(__file__).parents[2]
ABOUT = ("command", "hardware", "torch", "python", "date")        # what every file says of how it was measured
GAPS = {"beginning_h200": ({"command"}, "measured before the course had benchmarks; its own measure the like"),
        "foundation_h200": ({"command"}, "eight runs of `course train` on the first day, whose settings are in its rows"),
        "heldout": (set(ABOUT), "configurations that wait for their measurement; nothing in it was measured"),
        "heldout_2": (set(ABOUT), "the same"),
        "heldout_3": (set(ABOUT), "the same"), "heldout_4": (set(ABOUT), "the same"),
        "heldout_5": (set(ABOUT), "the same")}
BENCHMARKS = {one.name or one.callback.__name__ for one in bench.registered_commands}
FILES = sorted(path.stem for path in results.FOLDER.glob("*.json"))


# ---- files ----

@pytest.mark.parametrize("name", FILES)
def test_a_file_says_how_it_was_measured(name):
    """With these gaps and no others."""
    found = load(name)
    assert {key for key in ABOUT if not found.get(key)} == GAPS.get(name, (set(), ""))[0]
    assert "date" not in found or re.fullmatch(r"20\d\d-\d\d-\d\d", found["date"])


def commands(found: Any) -> Iterator[str]:
    """The commands in a file, its parts' among them."""
    for key, inner in found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ():
        yield from [inner] if key == "command" else commands(inner)


@pytest.mark.parametrize("name", FILES)
def test_the_command_that_measured_is_there_or_its_commit_is_named(name):
    for command in commands(load(name)):
        if command.startswith("at commit "):
            continue
        for module in re.findall(r"python -m ([\w.]+)", command):
            assert find_spec(module), f"{name}.json: {command}"
        assert set(re.findall(r"course bench (\w+)", command)) <= BENCHMARKS
        assert all((ROOT / file).is_file() for file in re.findall(r"[\w/]+\.(?:py|sh)\b", command)), f"{name}.json: {command}"


def test_no_comparison_with_one_process_is_wrong():
    files = [name for name in FILES if name.startswith("parity_")]
    assert len(files) == 4 and not [row for name in files for row in tables.comparisons(name) if tables.wrong(row)]
    assert {re.sub(r"\d.*", "", row["layout"]) for row in load("parity_h200")["rows"]} == {"dp", "tp", "sp", "cp", "pp"}


def test_repeats_on_other_machines_agree_within_3_percent():
    """But for steps that wait for their host, and those that read files beside another job."""
    host = {"one sample: eager", "one sample: compiled", "256 px: fp8, compiled, narrow stream",
            "256 px: fp8 by Transformer Engine"}
    for kind, count in (("vit_h200", 14), ("gpt_h200", 7), ("dit_h200", 7)):
        rows = [row for row in load(kind)["again"]["rows"][:16] if row["configuration"] not in host]
        assert len(rows) == count
        assert max(abs(row["ms"] / value(kind, row["configuration"]) - 1) for row in rows) < 0.03


def test_formats_stay_near_bf16_and_mistakes_do_not():
    for name in ("curves_cpu", "curves_h200"):
        gaps = dict(load(name)["gap"])
        mistakes = [gaps.pop(run) for run in ("native fp8, gradients in E4M3", "native fp8, scales frozen")]
        assert max(gaps.values()) < 0.06 and min(mistakes) > 1


def test_the_demo_beats_persistence_and_climatology_for_two_days():
    scores = load("demo_cpu")["scores"]
    model, persistence, climatology = ([lead[0] for lead in scores["rmse"][who]]
                                       for who in ("model", "persistence", "climatology"))
    assert all(ours < theirs for ours, theirs in zip(model, persistence, strict=True))
    better = [hour for hour, ours, theirs in zip(scores["hours"], model, climatology, strict=True) if ours < theirs]
    assert better == [*range(6, 49, 6)]


def test_gpt_python_trains_as_long_as_its_recorded_loss():
    found = load("gpt_python_cpu")
    assert config.load("gpt-python").train.steps == found["steps"] == max(map(int, found["valid_loss"]))


def test_overlapped_linears_say_what_was_recorded_of_their_ways():
    models = [*dict.fromkeys(row["case"].split(", in a graph")[0] for row in load("sp_2xh100")["rows"]
                             if re.fullmatch(r"[^,]+(, \d+ px)?, \d+ samples, in a graph", row["case"]))]
    assert len(models) == 5
    library = " ".join(overlapped_linear.__doc__.split())
    for model, words in ((models[0], "take {:.1f} ms for a DiT-XL/2 as it is here and {:.1f} in two parts"),
                         (models[-1], "GPT 1.3B {:.1f} and {:.1f}, both in a graph")):
        assert words.format(*(value("sp_2xh100", f"{model}, {way}in a graph") for way in ("", "in two parts, "))) in library
    shorter = {part: [round(100 * (1 - value("sp_2xh100", f"{model}, as one", part=part) / value(
        "sp_2xh100", f"{model}, one by one", part=part))) for model in models] for part in ("rows", "again/rows")}
    short = [percent for found in shorter.values() for percent in found[:-1]]
    once, otherwise = (found[-1] for found in shorter.values())
    comment = " ".join(Path(overlapped_linear.__file__).read_text().replace("\n#", " ").split())
    assert f"up to {max(short)}% shorter as one, in one case of eight {-min(short)}% longer" in comment
    assert len(short) == 8 and sum(percent < 0 for percent in short) == 1
    assert f"by {once}% shorter or {-otherwise}% longer" in comment


# ---- what reads them ----

def test_a_wrong_name_label_or_field_gets_a_sentence():
    with pytest.raises(CourseError, match=r"no recorded result nothing; there are .*gpt_h200"):
        load("nothing")
    with pytest.raises(CourseError, match=r"gpt_h200.json has 0 rows '124M' with nothing else: one is needed"):
        value("gpt_h200", "124M")
    with pytest.raises(CourseError, match=r"tp_h200.json has 2 rows 'plain'"):
        value("tp_h200", "plain")
    with pytest.raises(CourseError, match=r"the row '124M: bf16' of gpt_h200.json has no speed; it has .*tokens_per_s"):
        value("gpt_h200", "124M: bf16", "speed")
    assert value("tp_h200", "plain", gpus=4) < value("tp_h200", "plain", gpus=2)


def test_a_wrong_table_row_or_column_gets_a_sentence():
    with pytest.raises(CourseError, match=r"no table nothing; there are readme, vit"):
        tables.table("nothing")
    with pytest.raises(CourseError, match=r"no table nothing; there are readme, vit"):
        pages.filled("<!-- table: nothing -->\n<!-- end of table -->\n")
    with pytest.raises(CourseError, match=r"the table vit has no column 'speed' with rows ''"):
        tables.column("vit", "speed")
    with pytest.raises(CourseError, match=r"the table vit has no row 'bf32' with a column 'GB'"):
        tables.cell("vit", "bf32", "GB")


@pytest.mark.parametrize("expression", ["nothing", 'value("gpt_h200", "124M")', "1 +", '"words"'])
def test_an_expression_that_gives_no_number_gets_a_sentence(expression):
    with pytest.raises(CourseError, match=r"\{result: .* \| \.1f\} cannot be filled in: "):
        results.fill(f"It takes {{result: {expression} | .1f}} ms.", vars(tables))


def test_numbers_in_text_are_filled_in():
    names = {"value": lambda word: len(word) / 2}
    assert results.fill('{result: value("abc") | .1f} ms, {result: value(\n"ab") | .0%}', names) == "1.5 ms, 100%"
    page = 'Takes <!-- result: cell("vit", "bf16", "samples/s") | .0f -->7<!-- --> and <!-- result: 1 + 1 | d --><!-- -->.'
    assert re.sub("<!--.*?-->", "", pages.filled(page)) == "Takes 154 and 2."
    assert pages.filled(pages.filled(page)) == pages.filled(page)


def test_a_table_has_a_dash_where_there_is_no_number():
    small = tables.Table([tables.Column("GB", ".1f", lambda gb: gb), tables.Column("who", "", lambda gb: "us")],
                         {"a": (1.25,), "b": (None,)})
    absent = tables.Column("J", ".1f", lambda gb: None)
    assert tables.markdown(replace(small, columns=[*small.columns, absent])) == tables.markdown(small)   # nobody measured it
    assert tables.markdown(small).splitlines() == ["| | GB | who |", "|---|---|---|", "| a | 1.2 | us |", "| b | – | us |"]


def test_pages_say_what_is_recorded():
    assert pages.stale(ROOT) == []


def check(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    """The exit status of `python -m course.bench.results`."""
    monkeypatch.setattr("sys.argv", ["course/bench/results/__main__.py", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("course.bench.results", run_name="__main__")
    return ended.value.code


def test_a_changed_result_makes_pages_stale(monkeypatch, capsys):
    assert not check(monkeypatch, "--check") and capsys.readouterr().out == ""
    (row,) = (row for row in load("tp_h200")["rows"] if row["case"] == "symmetric, compiled" and row["gpus"] == 4)
    monkeypatch.setitem(row, "ms", 1.0)
    assert check(monkeypatch, "--check") == 1
    said = capsys.readouterr().out
    assert "README.md is stale: run python -m course.bench.results" in said and "docs/results.md is stale" in said
    assert "usage: python -m course.bench.results [--check]" in str(check(monkeypatch, "--chekc"))


def test_stale_pages_are_written(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*.png", "api", "results.md"))
    (tmp_path / "README.md").write_text("It takes <!-- result: 1 + 1 | d -->1<!-- --> ms.\n")
    assert pages.write(tmp_path) == [tmp_path / "README.md", tmp_path / "docs/results.md"]
    assert "-->2<!-- -->" in (tmp_path / "README.md").read_text() and pages.write(tmp_path) == []


# ---- pages ----

def prose(text: str) -> list[str]:
    """The words of a page without tables."""
    return " ".join(line for line in text.splitlines() if not line.startswith("|")).split()


def test_pages_are_short():
    assert len(prose(tables.page())) <= 1500 and len((ROOT / "README.md").read_text().split()) <= 900


def test_the_page_names_commands_and_files_that_exist():
    page = tables.page()
    assert test_docs.unknown_commands(page) == []
    assert all((ROOT / "experiments" / f"{name}.py").is_file() for name in re.findall(r"-m experiments\.(\w+)", page))
    shown = set(re.findall(r"\{table: ([\w-]+)\}", (results.FOLDER / "page.md").read_text()))
    assert shown == set(tables.TABLES) - {"readme"} and "{" not in page


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_no_comment_with_a_number_begins_a_line(page):
    """There it would end the paragraph."""
    assert not re.search(r"^\s*<!-- result:", (ROOT / page).read_text(), re.MULTILINE)


def test_what_the_page_concludes_without_numbers():
    for model, _ in tables.ALIGNED:
        gaps = load("alignment_h200")["models"][model]["gap"]
        fp8 = [found for run, found in gaps.items() if run.startswith("fp8") and "frozen" not in run]
        assert len(fp8) == 4 and max(fp8) < load("alignment_h200")["models"][model]["spread"]
    *compiled, slowest = tables.column("tp_vit", "4 GPUs: compiled, ms")
    *graph, fastest = tables.column("tp_vit", "4 GPUs: in a graph, ms")
    assert slowest > max(compiled) and fastest < min(graph)
    assert 0 < statistics.mean(tables.matmul_gain(*words) for words in tables.MODELS.values()) < 0.02
    assert max(load("planned_2xh200")["verdict"].values()) == 1
    rows = [row for name in FILES for row in load(name).get("rows", []) if isinstance(row, dict)]
    assert max(row.get("gpus", 1) for row in rows if isinstance(row.get("gpus", 1), int)) == 4
    assert {row["power_limit_w"] for row in rows if "power_limit_w" in row} == {700}


def test_what_the_page_calls_slower_is_slower():
    for file, slow, fast, where in (
            ("vit_h200", "one sample: compiled", "one sample: eager", {}), ("vit_h200", "fp8, compiled", "bf16, compiled", {}),
            ("fp8_h200", "native, delayed", "TE, delayed", {}),
            ("vit_h200", "bf16, compiled, 8 loader processes", "bf16, compiled", {}),
            ("tp_h200", "overlap, compiled", "DTensor sequence parallel, compiled", {"gpus": 4}),
            ("cp_h200", "64k causal gather", "64k causal PyTorch context_parallel", {"gpus": 4})):
        assert value(file, slow, **where) > value(file, fast, **where), slow
    assert max(tables.layers("2x", tables.HAND, tables.ENGINE)) > max(tables.layers("4x", tables.HAND, tables.ENGINE)) > 1
    assert max(tables.layers("2x", tables.SEQUENCE, tables.PLAIN)) > max(tables.layers("4x", tables.SEQUENCE, tables.PLAIN))
