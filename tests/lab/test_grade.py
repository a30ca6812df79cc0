"""Grading a class: the right marks, whatever the class tries."""

import csv
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from course.cli.main import app
from course.lab.checks import check, render
from course.lab.checks.exercise import all_exercises, find
from course.lab.grading import grade, submissions
from course.lab.grading.submissions import Submission, collect_submissions, find_learner
from course.lab.sandbox import sandbox
from course.utils.errors import CourseError
from tests.lab import classroom

isolated = pytest.mark.skipif(not sandbox.layers().isolates, reason=f"nothing isolates others' code here: {sandbox.layers().why}")


def marks(out: Path) -> dict[str, dict[str, str]]:
    with open(out / "gradebook.csv", newline="") as file:
        return {row["learner"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize(("path", "learner"), [
    ("bitdiddle/lesson01/01_baseline.ipynb", "bitdiddle"),                                       # nbgrader
    ("Ben Bitdiddle_123_assignsubmission_file_/01_baseline.ipynb", "Ben Bitdiddle_123"),          # Moodle
    ("bitdiddleben_4711_815_01_baseline.ipynb", "bitdiddleben_4711"),                             # Canvas
    ("bitdiddleben_LATE_4711_815_01_baseline-2.ipynb", "bitdiddleben_4711"),
    ("Ben Bitdiddle_123_assignsubmission_file_01_baseline.ipynb", "Ben Bitdiddle_123"),           # without folders
    ("ben/01_baseline.ipynb", "ben"), ("ben_01_baseline.ipynb", "ben"), ("ben.ipynb", "ben"),
    ("kurs_24_anna_00_start_here.ipynb", "kurs_24_anna"), ("team_07_x_00_start_here.ipynb", "team_07_x"),
    ("carla_00_Start_Here.ipynb", "carla"), ("dora_00_start_here-Copy1.ipynb", "dora"), ("ben_01_baseline_mine.ipynb", "ben"),
    ("ben_01_baseline_2024_05_03_final.ipynb", "ben"), ("ben_00_start_here_05_may.ipynb", "ben"),
    ("ben01_baseline.ipynb", "ben"),
    ("s2023_12_alice_01_baseline.ipynb", "s2023_12_alice"), ("04_mixed_precision_12_anna.ipynb", "04_mixed_precision_12_anna"),
    ("ben_97_something-1.ipynb", "ben"), ("emil_00_start_here - Kopie.ipynb", "emil"),
    ("emil_00_start_here - Copy (2).ipynb", "emil"),
    ("bitdiddleben_late_4711_815_01_baseline.ipynb", "bitdiddleben_4711"),
    ("anon_a1B2c_815_01_baseline.ipynb", "anon_a1B2c"), ("anon_LATE_a1B2c_816_01_baseline-1.ipynb", "anon_a1B2c"),
    ("Lab 1_bbitdiddle_attempt_2026-03-03-10-15-00_01_baseline.ipynb", "bbitdiddle"),
    ("11-22 - Ben Bitdiddle - 3 March, 2026 1015 AM/01_baseline.ipynb", "Ben Bitdiddle"),
    ("Zoe\u0308/00_start_here.ipynb", "Zo\u00eb"), ("01_baseline.ipynb", "01_baseline"),
])
def test_whose_a_file_is(path, learner):
    assert find_learner(Path(path)) == learner


def test_collect_takes_the_last_of_each_and_notes_the_rest(tmp_path):
    blank = classroom.notebook("00")
    for path in ("ann_1_7_00_start_here.ipynb", "ann_1_8_00_start_here-1.ipynb", "bob/.ipynb_checkpoints/00_start_here.ipynb",
                 "bob/work.ipynb"):
        classroom.hand_in(tmp_path / path, blank)
    classroom.hand_in(tmp_path / "bob/99_other.ipynb", classroom.nbformat.v4.new_notebook())
    for name in ("erin/essay", "Al Gore_12_assignsubmission_file_", ".git", "__MACOSX"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "erin/essay/work.pdf").write_text("")
    (tmp_path / "bob/notes.ipynb").write_text("{")
    (tmp_path / "bob/00_link.ipynb").symlink_to(tmp_path / "bob/work.ipynb")
    found, notes = collect_submissions(tmp_path)
    assert found == [Submission("ann_1", "00", tmp_path / "ann_1_8_00_start_here-1.ipynb"),
                     Submission("bob", "00", tmp_path / "bob/work.ipynb")]         # the lesson from its metadata
    text = "\n".join(notes)
    assert "replaced by the later" in text and "symbolic link" in text and "notes.ipynb cannot be read" in text
    assert "99_other.ipynb is of no lesson" in text and len(notes) == 6
    assert {"erin: no notebook of a lesson", "Al Gore_12: no notebook of a lesson"} < set(notes)
    with pytest.raises(CourseError, match="not a folder"):
        collect_submissions(tmp_path / "nowhere")


def test_a_class_in_one_folder_too_many_is_told_and_so_is_what_is_no_notebook(tmp_path):
    for learner in ("anna", "ben"):
        classroom.hand_in(tmp_path / "deep" / "Abgaben" / learner / "00_start_here.ipynb", classroom.notebook("00"))
    found, notes = collect_submissions(tmp_path / "deep")
    (one,) = found
    assert one.learner == "Abgaben" and len(notes) == 1 and "is replaced by the later Abgaben/" in notes[0]
    classroom.hand_in(tmp_path / "flat" / "ann" / "lesson00" / "00_start_here.ipynb", classroom.notebook("00"))
    classroom.hand_in(tmp_path / "flat" / "hugo_00_start_here.IPYNB", classroom.notebook("00"))
    for name in ("gero_00_start_here.zip", "frida_00_start_here.ipynb.txt", "ann_00_start_here.result.json"):
        (tmp_path / "flat" / name).write_text("")
    found, notes = collect_submissions(tmp_path / "flat")
    assert [one.learner for one in found] == ["ann", "hugo"]
    assert sorted(notes) == [f"{name} is no notebook: left out" for name in ("frida_00_start_here.ipynb.txt",
                                                                            "gero_00_start_here.zip")]


def test_a_kept_mark_of_an_exercise_that_has_moved_to_another_lesson_is_left_out(tmp_path):
    from dataclasses import asdict

    there, moved = (check.Verdict(name, (check.Fact(True, "it holds"),)) for name in ("roofline", "busy-time"))
    submission = Submission("ann", "00", tmp_path / "a.ipynb")
    kept = grade.result_path(submission, tmp_path)
    kept.parent.mkdir()
    kept.write_text(json.dumps({"learner": "ann", "lesson": "00", "verdicts": [asdict(there), asdict(moved)]}))
    found = grade.load_other_results(tmp_path, [])
    assert [verdict.exercise for one in found for verdict in one.verdicts] == ["roofline"]
    grade.write_gradebook(found, tmp_path / "gradebook.csv")
    assert marks(tmp_path)["ann"]["points"] == str(find("roofline").points)


def test_an_interrupt_leaves_the_rest_for_later_and_says_so(tmp_path, monkeypatch, capsys):
    begun = []

    def grade_one(submission, out, seed):
        begun.append(submission)
        if len(begun) == 2:
            raise KeyboardInterrupt                 # as Ctrl-C does to the thread that waits for this one
        time.sleep(0.3)
        return grade.Graded(submission, ())

    monkeypatch.setattr(grade, "reference_runs", lambda *_: None)
    monkeypatch.setattr(grade, "grade", grade_one)
    with pytest.raises(KeyboardInterrupt):
        grade.grade_all([Submission(f"s{i}", "00", tmp_path / "a.ipynb") for i in range(9)], tmp_path, 1, 0)
    assert len(begun) <= 4 and "the same command goes on" in capsys.readouterr().out


def test_learners_graded_at_once_never_share_a_line(tmp_path, monkeypatch):
    writes = []
    submission = Submission("alice", "00", tmp_path / "a.ipynb")
    monkeypatch.setattr(grade.sys, "stdout", mock.Mock(write=writes.append))
    monkeypatch.setattr(grade, "ensure_reading", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        grade.grade(submission, tmp_path, 0)                            # it stops after its first line
    grade.print_progress(grade.Graded(submission, ()), "1/2", {submission: None})
    assert writes == ["grading alice, lesson 00\n", "1/2 alice, lesson 00: 0 of 2 points\n"]


def test_the_end_of_a_jobs_time_is_an_interrupt(tmp_path, monkeypatch, interruptible):
    monkeypatch.setattr(grade, "main", lambda *_: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(9))
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert CliRunner().invoke(app, ["grade", str(tmp_path)]).exit_code == 130
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_notebook_that_is_nobodys_is_named(tmp_path):
    """As in the folder of one learner, given in the place of the one above."""
    for name in ("00_start_here_mine.ipynb", "ann_00_start_here.ipynb"):
        classroom.hand_in(tmp_path / name, classroom.notebook("00"))
    found, notes = collect_submissions(tmp_path)
    assert [one.learner for one in found] == ["00_start_here_mine", "ann"]
    assert len(notes) == 1 and notes[0].startswith("00_start_here_mine.ipynb names no learner") and "folder above" in notes[0]


def test_a_misnamed_notebook_is_of_the_lesson_that_is_in_it_and_a_damaged_one_is_named(tmp_path):
    classroom.hand_in(tmp_path / "eve/01_baseline_mine.ipynb", classroom.notebook("00"))
    both = classroom.notebook("00")
    both.cells += classroom.solved("01").cells                                    # what its name says is in it
    classroom.hand_in(tmp_path / "fay/01_baseline.ipynb", both)
    (tmp_path / "gil").mkdir()
    (tmp_path / "gil/01_baseline.ipynb").write_text("{")
    found, notes = collect_submissions(tmp_path)
    assert [(one.learner, one.lesson) for one in found] == [("eve", "00"), ("fay", "01"), ("gil", "01")]
    assert len(notes) == 2 and "01_baseline_mine.ipynb is of lesson 00, as its metadata say" in notes[0]
    assert "gil/01_baseline.ipynb cannot be read" in notes[1]


@pytest.mark.slow
def test_refuses_to_run_others_code_without_isolation(tmp_path, monkeypatch):
    classroom.hand_in(tmp_path / "in/ann/00_start_here.ipynb", classroom.notebook("00"))
    monkeypatch.setattr(sandbox, "layers", lambda: sandbox.Layers(False, False, {"namespaces": "no bubblewrap here"}))
    with pytest.raises(CourseError, match=r"no bubblewrap here.*--trust"):
        grade.main(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    grade.main(tmp_path / "in", tmp_path / "out", trust=True)
    assert marks(tmp_path / "out")["ann"]["points"] == "0"


@pytest.mark.slow
@isolated
def test_goes_on_where_it_stopped_and_grades_only_what_is_new(tmp_path, monkeypatch):
    classroom.hand_in(tmp_path / "in/ann/00_start_here.ipynb", classroom.solved("00"))
    path = classroom.hand_in(tmp_path / "in/bob/00_start_here.ipynb", classroom.notebook("00"))
    grade.main(tmp_path / "in", tmp_path / "out")
    first, seed = marks(tmp_path / "out"), (tmp_path / "out/seed").read_text()
    assert (first["ann"]["points"], first["bob"]["points"], first["ann"]["out_of"]) == ("2", "0", "2")
    judged, real = [], grade.judge_exercise
    monkeypatch.setattr(grade, "judge_exercise", lambda exercise, *a,
                        **how: judged.append(exercise.name) or real(exercise, *a, **how))
    classroom.hand_in(path, classroom.notebook("00", roofline=classroom.answer("roofline")))
    kept = tmp_path / "out/results" / f"{grade.slug('ann')}-00.json"
    grade.main(tmp_path / "in", tmp_path / "out")
    assert sorted(judged) == ["matmul-cost", "roofline"]                          # Bob's alone
    assert marks(tmp_path / "out")["bob"]["points"] == "1" and (tmp_path / "out/seed").read_text() == seed
    with monkeypatch.context() as still:                                          # nothing new: nothing is run
        for what in ("judge_exercise", "reference_runs"):
            still.setattr(grade, what, lambda *_: pytest.fail("there was nothing to grade"))
        still.setattr(sandbox, "layers", lambda: pytest.fail("and no need to know how answers are isolated"))
        grade.main(tmp_path / "in", tmp_path / "out")
    kept.write_text("{")                                                          # a damaged result is made again
    grade.main(tmp_path / "in", tmp_path / "out")
    assert len(judged) == 4 and marks(tmp_path / "out")["ann"]["points"] == "2"


def test_the_gradebook_of_one_lesson_grows_into_that_of_the_course(tmp_path, monkeypatch):
    """Lessons are handed in one after another, often as a folder each; no run forgets what an earlier one found."""
    monkeypatch.setattr(grade, "reference_runs", lambda *_: ())
    monkeypatch.setattr(sandbox, "layers", lambda: sandbox.Layers(True, False))
    monkeypatch.setattr(grade, "judge_exercise", lambda exercise, *_,
                        **how: grade.Verdict(exercise.name, (grade.Fact(True, "it holds"),)))
    out = tmp_path / "out"
    for lesson, learners in (("00_start_here", ("ann", "bob")), ("01_baseline", ("ann", "eve"))):
        for learner in learners:
            classroom.hand_in(tmp_path / lesson / learner / f"{lesson}.ipynb", classroom.notebook(lesson[:2]))
        grade.main(tmp_path / lesson, out)
    whole = marks(out)
    assert {name: (row["points"], row["out_of"]) for name, row in whole.items()} == \
        {"ann": ("9", "9"), "bob": ("2", "9"), "eve": ("7", "9")}
    assert whole["bob"]["01 accumulate (3)"] == "" and whole["eve"]["00 roofline (1)"] == ""
    grade.main(tmp_path / "00_start_here", out, only=["0"])
    with pytest.raises(CourseError, match="no notebook of lesson 09"):
        grade.main(tmp_path / "00_start_here", out, only=["9"])
    assert marks(out) == whole
    page = (out / "feedback" / f"{grade.slug('ann')}.html").read_text()
    assert "Lesson 00" in page and "Lesson 01" in page and len(ElementTree.parse(out / "junit.xml").getroot()) == 4
    (out / "results/old-07.json").write_text(json.dumps({"learner": "old", "lesson": "07", "verdicts": [
        {"exercise": "no longer there", "facts": []}]}))
    (out / f"results/{grade.slug('bob')}-00.json").unlink()                         # how to forget a mark
    grade.main(tmp_path / "01_baseline", out)
    assert set(marks(out)) == {"ann", "eve"}


def test_an_older_notebook_replaces_no_mark_and_a_newer_one_says_so(tmp_path, monkeypatch, capsys):
    """Between runs only dates tell which is the last; counters begin anew with every folder."""
    monkeypatch.setattr(grade, "reference_runs", lambda *_: ())
    monkeypatch.setattr(sandbox, "layers", lambda: sandbox.Layers(True, False))
    monkeypatch.setattr(grade, "judge_exercise", lambda exercise, notebook, *_, **how: grade.Verdict(
        exercise.name, (grade.Fact("max(" in str(notebook), "it holds"),)))
    right, blank, out = classroom.solved("00"), classroom.notebook("00"), tmp_path / "out"

    def graded(week: str, content, date: int) -> tuple[str, str]:
        os.utime(classroom.hand_in(tmp_path / week / "fay/00_start_here.ipynb", content), (date, date))
        grade.main(tmp_path / week, out)
        return marks(out)["fay"]["points"], capsys.readouterr().out

    assert graded("week1", right, 2_000_000_000) == ("2", mock.ANY)
    points, told = graded("week4", blank, 1_577_880_000)
    assert points == "2" and "00_start_here.ipynb of 2020-01-01" in told and "0 to grade" in told
    assert "-00.json" in told and "earlier run graded one of 2033-05-18" in told
    points, told = graded("week5", blank, 2_000_000_100)
    assert points == "0" and "fay, lesson 00: 0 of 2 points (replaces the notebook of 2033-05-18" in told and "2 -> 0)" in told


def passing(monkeypatch) -> None:
    """Every answer passes without being run."""
    monkeypatch.setattr(grade, "reference_runs", lambda *_: ())
    monkeypatch.setattr(sandbox, "layers", lambda: sandbox.Layers(True, False))
    monkeypatch.setattr(grade, "judge_exercise", lambda exercise, *_,
                        **how: grade.Verdict(exercise.name, (grade.Fact(True, "it holds"),)))


@pytest.fixture
def nested(tmp_path):
    """A function that makes folders in one another, and a notebook in the last: no path is long enough to open it."""
    def make(folder: Path, name: str, depth: int) -> None:
        folder.mkdir(parents=True)
        here = os.getcwd()
        try:
            os.chdir(folder)
            for _ in range(depth):
                os.mkdir(name)
                os.chdir(name)
            Path("00_start_here.ipynb").write_text("{}")
        finally:
            os.chdir(here)

    yield make
    subprocess.run(["rm", "-rf", tmp_path / "in"], check=True)                      # pytest recurses, and cannot


def test_a_hostile_folder_is_named_and_the_rest_is_graded(tmp_path, nested, monkeypatch, capsys):
    passing(monkeypatch)
    here, blank = tmp_path / "in", classroom.nbformat.writes(classroom.notebook("00"))
    classroom.hand_in(here / "ann/00_start_here.ipynb", classroom.notebook("00"))
    classroom.hand_in(here / "zoe/00_start_here.ipynb", classroom.notebook("00"))
    nested(here / "deep", "d", 1100)
    nested(here / "long", "d" * 150, 100)          # 20 of them are a path that a system takes, whatever tmp_path is
    for name in (b"submission_1/", b"\xff\x81/", b"file/\xe9"):                    # no UTF-8
        os.makedirs(os.path.dirname(os.fsencode(here) + b"/" + name), exist_ok=True)
        Path(os.fsdecode(os.fsencode(here) + b"/" + name + b"00_start_here.ipynb")).write_text(blank)
    (here / "submission_metadata.yml").write_text('submission_1:\n  :submitters:\n  - :name: "Eve \\uD800"\n')     # nor a letter
    (here / "many").mkdir()
    monkeypatch.setattr(submissions, "MAX_ENTRIES", 30)
    for number in range(40):
        (here / "many" / f"{number}.txt").touch()
    grade.main(here, tmp_path / "out")
    points = {name: row["points"] for name, row in marks(tmp_path / "out").items()}
    assert len(points) == 5 and set(points.values()) == {"2"} and {"ann", "zoe", "file", "Eve \ufffd"} < set(points)
    told = capsys.readouterr().out
    assert "deep has more than 20 folders" in told and "long has more than 20 folders" in told
    assert "deep: no notebook of a lesson" in told and "many has more than 30 files" in told
    assert len(ElementTree.parse(tmp_path / "out/junit.xml").getroot()) == 5
    assert len(list((tmp_path / "out/feedback").iterdir())) == 5


def test_a_notebook_that_may_not_be_read_is_no_mark_and_tried_again(tmp_path, monkeypatch, capsys):
    passing(monkeypatch)
    here, out, opens = tmp_path / "in", tmp_path / "out", open
    for name in ("ann", "bob"):
        classroom.hand_in(here / name / "00_start_here.ipynb", classroom.notebook("00"))

    def denied(path, *args, **named):                # as to who is not root
        if "/bob/" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return opens(path, *args, **named)

    with monkeypatch.context() as closed:
        closed.setattr("course.lab.grading.sandboxed_reading.open", denied, raising=False)
        closed.setattr("course.utils.atomic_files.open", denied, raising=False)
        grade.main(here, out)
    told = capsys.readouterr().out
    assert "see whether you may read it" in told and "reading bob" in told and "grading bob, lesson 00" in told
    assert "the next run tries again:\n  bob, lesson 00" in told
    row = marks(out)["bob"]
    assert row["points"] == "0" and row["00 roofline (1)"] == "could not be checked" and marks(out)["ann"]["points"] == "2"
    suites = {suite.get("name"): suite for suite in ElementTree.parse(out / "junit.xml").getroot()}
    bob = suites["bob, lesson 00"]
    assert (bob.get("failures"), bob.get("errors")) == ("0", "2") and bob[0][0].tag == "error"
    page = (out / "feedback" / f"{grade.slug('bob')}.html").read_text()
    assert "roofline: could not be checked" in page and "Permission denied" in page
    grade.main(here, out)
    assert marks(out)["bob"]["points"] == "2" and "1 to grade" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["users", "folder"])
def test_a_failure_of_the_machine_is_no_mark(tmp_path, monkeypatch, what):
    """All users of the sandbox taken by somebody on this machine; no room for temporary files, which others' answers may hold."""
    monkeypatch.setattr(sandbox, "layers", lambda: sandbox.Layers(True, False))
    classroom.hand_in(tmp_path / "in/ann/00_start_here.ipynb", classroom.solved("00"))
    with monkeypatch.context() as failing:
        if what == "users":
            def busy(*_, **how):
                raise CourseError("all of the users 60800 to 60863 are busy on this machine")

            failing.setattr(sandbox, "run", busy)
        else:
            failing.setattr(grade, "reference_runs", lambda *_: ())
            failing.setattr(grade, "judge_exercise", lambda exercise, *_,
                            **how: grade.Verdict(exercise.name, (grade.Fact(False, "no"),)))
            failing.setattr("shutil.disk_usage", lambda path: mock.Mock(free=5_000_000))
        grade.main(tmp_path / "in", tmp_path / "out")
    assert marks(tmp_path / "out")["ann"]["00 roofline (1)"] == "could not be checked"
    page = (tmp_path / "out/feedback" / f"{grade.slug('ann')}.html").read_text()
    assert ("users 60800" if what == "users" else "only 5 MB left") in page
    passing(monkeypatch)
    grade.main(tmp_path / "in", tmp_path / "out")
    assert marks(tmp_path / "out")["ann"]["points"] == "2"


@pytest.mark.parametrize("broken", ["judge_exercise", "write_feedback", "take_in_result_file"])
def test_whatever_fails_with_one_learner_is_theirs_alone(tmp_path, monkeypatch, capsys, broken):
    passing(monkeypatch)
    here, out, works = tmp_path / "in", tmp_path / "out", getattr(grade, broken)
    for name in ("ann", "bob"):
        content = classroom.notebook("00")
        content.metadata["whose"] = name
        classroom.hand_in(here / name / "00_start_here.ipynb", content)

    def fails(*args, **how):
        if "bob" in str(args):
            raise RecursionError("too deep")
        return works(*args, **how)

    monkeypatch.setattr(grade, broken, fails)
    grade.main(here, out)
    assert marks(out)["ann"]["points"] == "2" and (out / "junit.xml").exists()
    assert (marks(out)["bob"]["00 roofline (1)"] == "could not be checked") == (broken == "judge_exercise")
    assert "bob" in capsys.readouterr().out and (out / "feedback" / f"{grade.slug('ann')}.html").exists()


def test_a_file_too_large_to_be_a_notebook_is_not_read(tmp_path, monkeypatch):
    passing(monkeypatch)
    classroom.hand_in(tmp_path / "in/ann/00_start_here.ipynb", classroom.notebook("00"))
    (tmp_path / "in/bob").mkdir()
    with open(tmp_path / "in/bob/00_start_here.ipynb", "wb") as file:
        file.truncate(10**12)                        # takes no room
    grade.main(tmp_path / "in", tmp_path / "out")
    assert {name: row["points"] for name, row in marks(tmp_path / "out").items()} == {"ann": "2", "bob": "0"}


@pytest.mark.parametrize("name", ["a;=1+1", "a,=1+1", 'a; "=1+1', "a;\t+1", "a\n-1;@x", "=1", " =1", "a|=1", ";＝1"])
def test_no_separator_begins_a_formula(tmp_path, name):
    """A spreadsheet of a country with decimal commas splits at semicolons, within quotation marks of another field, too."""
    verdict = grade.Verdict("roofline", (grade.Fact(True, "it holds"),))
    grade.write_gradebook([grade.Graded(Submission(who, "00", tmp_path), (verdict,)) for who in ("ann", name)],
                          tmp_path / "book.csv")
    line = (tmp_path / "book.csv").read_text().splitlines()[2]
    for separator in ",;|\t":
        for row in (next(csv.reader([line], delimiter=separator)), line.split(separator)):
            assert not any(cell.strip(" \"'").startswith(tuple("=+-@＝")) and "'" not in cell for cell in row), row


def test_names_that_shared_the_digits_of_a_file_are_both_kept(tmp_path, monkeypatch):
    """Of 24 bits, as they were: two such names are found in a second."""
    import hashlib

    seen: dict[str, str] = {}
    for number in range(200_000):
        one = f"mia {number}"
        other = seen.setdefault(hashlib.sha256(one.encode()).hexdigest()[:6], one)
        if other != one:
            break
    assert other != one and grade.slug(one) != grade.slug(other)
    passing(monkeypatch)
    for folder, name in (("a", one), ("b", other), ("c", "ann")):
        classroom.hand_in(tmp_path / folder / name / "00_start_here.ipynb", classroom.notebook("00"))
        grade.main(tmp_path / folder, tmp_path / "out")
    assert set(marks(tmp_path / "out")) == {one, other, "ann"}


@pytest.mark.parametrize(("layers", "words"), [
    (sandbox.Layers(True, False, {"user": "it does not work here: PermissionError"}), "a network of its own (bubblewrap)"),
    (sandbox.Layers(False, True, {"namespaces": "bubblewrap is not installed"}), "would close it: bubblewrap is not ins"),
    (sandbox.Layers(False, False, {"namespaces": "", "user": ""}), "nothing else keeps it from your files"),
])
def test_it_says_calmly_what_keeps_answers_from_harm(monkeypatch, layers, words):
    monkeypatch.setattr(sandbox, "layers", lambda: layers)
    text = grade.describe_protection(trust=True)
    assert words in text and "limits on time" in text and "PermissionError" not in text and "\n" not in text


def test_names_are_harmless_in_tables_pages_and_paths(tmp_path):
    evil = ["=HYPERLINK(1)", "<script>alert(1)</script>", "../../up", "a\x1b[2J", "", "ü" * 300]
    slugs = {grade.slug(name) for name in evil}
    assert len(slugs) == len(evil) and all("/" not in s and not s.startswith(".") and len(s) < 80 for s in slugs)
    assert grade.escape_formula(evil[0]).startswith("'=") and "\x1b" not in grade.escape_formula(evil[3])
    graded = [grade.Graded(Submission(evil[1], "00", tmp_path), (grade.Verdict("roofline", (grade.Fact(False, "\x00<b>"),)),))]
    grade.write_feedback(evil[1], graded, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page and "<b>" not in page.split("</style>")[1].replace("<b style", "")
    grade.write_junit(graded, tmp_path / "junit.xml")
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().find("testsuite").get("failures") == "1"


def test_what_took_too_long_is_run_once_more(tmp_path, monkeypatch):
    """The machine may have been busy."""
    passed = grade.Verdict("roofline", (grade.Fact(True, "it holds"),))
    late = grade.Verdict("roofline", (grade.Fact(False, "it ran for more than 30 seconds"),), late=True)
    path = classroom.hand_in(tmp_path / "00_start_here.ipynb", classroom.notebook("00"))
    for verdicts, final in (([late, passed], passed), ([late, late], late), ([passed], passed)):
        monkeypatch.setattr(grade, "judge_exercise", lambda *_, left=verdicts, **how: left.pop(0))
        assert grade.judge_safely(find("roofline"), Submission("ann", "00", path), 5) == final and not verdicts


def test_pages_do_not_give_hidden_inputs_away(tmp_path):
    verdict = grade.Verdict("roofline", (grade.Fact(False, "no"),), "a hint", output="flops=12345", seed=987654)
    graded = [grade.Graded(Submission("ann", "00", tmp_path), (verdict,))]
    grade.write_feedback("ann", graded, tmp_path / "page.html")
    grade.write_junit(graded, tmp_path / "junit.xml")
    for name in ("page.html", "junit.xml"):
        text = (tmp_path / name).read_text()
        assert "12345" not in text and "987654" not in text and "output of graded runs is not shown" in text
    assert all("12345" in said and "987654" in said for said in (render.text(verdict), render.html(verdict)))


def test_every_exercise_has_a_seed_of_its_own_out_of_128_bits(tmp_path):
    seeds = [grade.choose_seed(tmp_path, None) for _ in range(4)]
    assert all(seed.bit_length() > 100 for seed in seeds) and len({*seeds}) == 4
    own = [grade.exercise_seed(exercise, seed) for exercise in all_exercises().values() for seed in (*seeds, 1)]
    assert len({*own}) == len(own) and max(own).bit_length() > 120
    assert own == [grade.exercise_seed(exercise, seed) for exercise in all_exercises().values() for seed in (*seeds, 1)]
    grade.save_seed(tmp_path, seeds[0])
    assert grade.choose_seed(tmp_path, None) == seeds[0] and grade.choose_seed(tmp_path, 7) == 7


@pytest.mark.parametrize("damaged", ["", "x", "²", "9" * 5000, "[" * 5000])
def test_a_damaged_seed_is_a_sentence(tmp_path, damaged):
    """A new one would grade the rest of a class on other inputs without a word."""
    (tmp_path / "seed").write_text(damaged, encoding="utf-8")
    with pytest.raises(CourseError, match="seed holds no number"):
        grade.choose_seed(tmp_path, None)


@pytest.mark.parametrize("damaged", [
    "[" * 100_000, '{"verdicts": [{"exercise": 7, "facts": []}], "learner": "a", "lesson": "00"}', "[]"])
def test_a_damaged_result_counts_for_nothing(tmp_path, damaged):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "ann-00.json").write_text(damaged)
    assert grade.graded_before(tmp_path, 1) == {} and grade.load_other_results(tmp_path, []) == []


@pytest.mark.slow
@pytest.mark.xdist_group("tests/lab/test_lessons.py")       # which take all cores, too: one after another
@isolated
@pytest.mark.filterwarnings("ignore::nbformat.warnings.DuplicateCellId")       # handed in by some of them
def test_a_class_of_thirty_some_of_them_hostile(tmp_path):
    """The right marks for all in one command, and nothing left running, written or sent."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.1)
    port = listener.getsockname()[1]
    here, expected = tmp_path / "in", {}
    cost = classroom.answer("matmul-cost")
    for number, name in enumerate(classroom.HOSTILE):                             # Moodle's folders
        learner = f"Mallory {number}_{number}"
        classroom.hand_in(here / f"{learner}_assignsubmission_file_/00_start_here.ipynb",
                          classroom.notebook("00", matmul_cost=cost, roofline=classroom.hostile(name, port)))
        expected[learner] = 1                                                     # for the exercise solved honestly
    for number in range(3):                                                       # nbgrader's, with a whole second lesson
        classroom.hand_in(here / f"solver{number}/start/00_start_here.ipynb", classroom.solved("00"))
        expected[f"solver{number}"] = 2
    classroom.hand_in(here / "solver0/base/01_baseline.ipynb", classroom.solved("01"))
    expected["solver0"] += 7
    for number in range(4):                                                       # Canvas's files
        classroom.hand_in(here / f"wrong_{number}_{number}_00_start_here.ipynb",
                          classroom.notebook("00", matmul_cost=classroom.mistaken("matmul-cost", number),
                                             roofline=classroom.answer("roofline")))
        expected[f"wrong_{number}"] = 1
    classroom.hand_in(here / "blank/00_start_here.ipynb", classroom.notebook("00"))
    classroom.hand_in(here / "half/01_baseline.ipynb",
                      classroom.notebook("01", relative_l2=classroom.answer("relative-l2"),
                                         accumulate=classroom.mistaken("accumulate", 5)))
    (here / "broken").mkdir()
    (here / "broken/00_start_here.ipynb").write_text("{not a notebook")
    grown = classroom.solved("00")                                                # cells added, moved and renamed
    grown.cells = [cell for cell in reversed(grown.cells) if cell.cell_type == "code"] + grown.cells
    classroom.hand_in(here / "mover/00_start_here.ipynb", grown)
    expected |= {"blank": 0, "half": 2, "broken": 0, "mover": 2}
    assert len(expected) == 30

    out = tmp_path / "out"
    grade.main(here, out, jobs=2)
    found = marks(out)
    assert {name: int(row["points"]) for name, row in found.items()} == expected
    assert {row["out_of"] for row in found.values()} == {"9"}
    with pytest.raises(TimeoutError):                                             # nobody called
        listener.accept()
    looked = (out / "feedback" / f"{grade.slug(next(iter(expected)))}.html").read_text()
    assert "1 of 2 points" in looked
    spy = list(classroom.HOSTILE).index("reads expected values")
    kept = json.loads((out / "results" / f"{grade.slug(f'Mallory {spy}_{spy}')}-00.json").read_text())
    told = kept["verdicts"][1]["facts"][0]["text"]
    assert "it stopped with an error, which is left out" in told and "found: " not in told
    suites = ElementTree.parse(out / "junit.xml").getroot()
    assert len(suites) == 31 and sum(int(suite.get("failures")) for suite in suites) == 19 + 4 + 2 + 2 + 2


def unsure(exercise, *_, **how) -> grade.Verdict:
    """A verdict that this machine did not allow."""
    return grade.Verdict(exercise.name, (grade.Fact(False, "it could not be checked"),), unchecked=True)


def test_what_could_not_be_checked_is_tried_again_at_the_end_and_alone(tmp_path, monkeypatch, capsys):
    passing(monkeypatch)
    for name in ("ann", "bob", "eve"):
        classroom.hand_in(tmp_path / "in" / name / "00_start_here.ipynb", classroom.notebook("00"))
    running, seen = [], []

    def judge(exercise, found, seed, hidden, believing):
        running.append(found.name)
        time.sleep(0.1)
        seen.append((found.name[:3], exercise.name, believing, len(running)))
        running.remove(found.name)
        first = believing and found.name.startswith("bob") and exercise.name == "roofline"
        return unsure(exercise) if first else grade.Verdict(exercise.name, (grade.Fact(True, "it holds"),))

    monkeypatch.setattr(grade, "judge_exercise", judge)
    grade.main(tmp_path / "in", tmp_path / "out", jobs=3)
    assert {row["points"] for row in marks(tmp_path / "out").values()} == {"2"}
    assert seen[-1] == ("bob", "roofline", False, 1) and [believing for *_, believing, _ in seen].count(False) == 1
    told = capsys.readouterr().out
    assert "some could not be checked" in told and "grading bob, lesson 00 again, alone" in told
    assert told.index("3/3") < told.index("again bob, lesson 00: 2 of 2") and "the next run tries again" not in told


def test_a_learner_delays_others_by_no_more_than_the_limit_and_keeps_no_mark(tmp_path, monkeypatch, capsys):
    passing(monkeypatch)
    asked = []
    monkeypatch.setattr(grade, "judge_exercise", lambda exercise, *_, **how: asked.append(exercise.name) or unsure(exercise))
    for lesson in ("00", "01"):
        name = f"{lesson}_start_here" if lesson == "00" else "01_baseline"
        classroom.hand_in(tmp_path / "in/ann" / f"{name}.ipynb", classroom.notebook(lesson))
    monkeypatch.setattr(grade, "MAX_RETRY_SECONDS", -1.0)                   # its time is over before it begins
    out = tmp_path / "out"
    grade.main(tmp_path / "in", out)
    every = sum(exercise.lesson in ("00", "01") for exercise in all_exercises().values())
    assert len(asked) == every and not list((out / "results").glob("*")) if (out / "results").exists() else True
    assert "the next run tries again:\n  ann, lesson 00\n  ann, lesson 01" in capsys.readouterr().out
    row, page = marks(out)["ann"], (out / "feedback" / f"{grade.slug('ann')}.html").read_text()
    assert row["points"] == "0" and row["00 roofline (1)"] == "could not be checked" and "roofline: could not be checked" in page
    assert {suite.get("failures") for suite in ElementTree.parse(out / "junit.xml").getroot()} == {"0"}
    asked.clear()
    monkeypatch.setattr(grade, "MAX_RETRY_SECONDS", 300.0)
    grade.main(tmp_path / "in", out)                                 # the next run: each once, and once more at its end
    assert len(asked) == 2 * every


def test_before_an_answer_starts_there_is_room_for_what_it_may_write(tmp_path, monkeypatch):
    from course.lab.grading import sandboxed_reading

    path = classroom.hand_in(tmp_path / "00_start_here.ipynb", classroom.solved("00"))
    submission = grade.ensure_reading(Submission("ann", "00", path))
    exercise = find("roofline")
    need = exercise.limits.disk * 1e9 + sandboxed_reading.RESERVED_BYTES
    monkeypatch.setattr(grade, "judge_exercise", lambda *_, **how: pytest.fail("there is no room"))
    monkeypatch.setattr("shutil.disk_usage", lambda path: mock.Mock(free=int(need) - 1))
    verdict = grade.judge_safely(exercise, submission, 5)
    assert verdict.unchecked and f"and {need // 1e6:.0f} MB are needed" in verdict.facts[0].text
    passed = grade.Verdict("roofline", (grade.Fact(True, "it holds"),))
    monkeypatch.setattr(grade, "judge_exercise", lambda *_, **how: passed)
    monkeypatch.setattr("shutil.disk_usage", lambda path: mock.Mock(free=int(need)))
    assert grade.judge_safely(exercise, submission, 5) == passed


@pytest.mark.parametrize(("error", "words"), [
    (ValueError("48.25"), "ValueError"), (RuntimeError("size 48.25"), "RuntimeError"),
    (OSError(28, "48.25", "48.25"), "No space left on device"), (MemoryError("48.25"), "no memory left"),
    (CourseError("roofline: the check itself does not run here\n48.25"), "the check itself does not run here")])
def test_what_went_wrong_is_said_in_words_that_no_answer_chooses(tmp_path, monkeypatch, error, words):
    def fails(*_, **how):
        raise error

    path = classroom.hand_in(tmp_path / "00_start_here.ipynb", classroom.notebook("00"))
    monkeypatch.setattr(grade, "judge_exercise", fails)
    graded = [grade.Graded(Submission("ann", "00", path),
                           (grade.judge_safely(find("roofline"), Submission("ann", "00", path), 5),))]
    grade.write_feedback("ann", graded, tmp_path / "page.html")
    grade.write_junit(graded, tmp_path / "junit.xml")
    for name in ("page.html", "junit.xml"):
        text = (tmp_path / name).read_text()
        assert words in text and "48.25" not in text


def test_no_time_that_an_answer_took_is_shown(tmp_path):
    verdict = grade.Verdict("roofline", (grade.Fact(False, "no"),), seconds=48.25)
    graded = [grade.Graded(Submission("ann", "00", tmp_path), (verdict,))]
    grade.write_feedback("ann", graded, tmp_path / "page.html")
    grade.write_junit(graded, tmp_path / "junit.xml")
    assert not any("48.2" in (tmp_path / name).read_text() for name in ("page.html", "junit.xml"))
