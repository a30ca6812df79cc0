"""Result files of jobs: what is taken in, what is refused, what is believed. tests/slurm/test_check.py makes one in a job."""

import json
import shutil
from dataclasses import asdict
from unittest import mock

import pytest

from course.lab.checks.check import Fact, Verdict
from course.lab.checks.exercise import find
from course.lab.grading import grade, on_cluster
from course.lab.grading.submissions import Submission, exercises_of_lesson
from course.utils.atomic_files import sha256
from course.utils.errors import CourseError
from tests.lab import classroom

JOB = {"id": 7, "cluster": "course", "user": "ann", "nodes": "n[1-2]", "tasks": 4}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of submissions: a notebook of lesson 10 and its result file, as `finish` writes it in a job."""
    tmp_path = tmp_path_factory.mktemp("made")
    notebook = classroom.hand_in(tmp_path / "in" / "ann" / "10_tensor_parallel.ipynb", classroom.notebook("10"))
    ranked = on_cluster.exercises_on_ranks(notebook)
    steps = tmp_path / "steps"
    steps.mkdir()
    record = {"exercise": ranked[0], "version": find(ranked[0]).version, "seed": 1, "ranks": 4, "passed": True,
              "facts": [asdict(Fact(True, "it holds"))], "seconds": 0.5, "reference_seconds": 0.25, "devices": ["GPU"] * 4}
    (steps / f"{ranked[0]}.json").write_text(json.dumps(record))
    (steps / f"{ranked[1]}.2.error").write_text("rank 2: ValueError: mine")
    alone = [Verdict(e.name, (Fact(False, "no"),), version=e.version) for e in exercises_of_lesson("10") if e.name not in ranked]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "course", "SLURM_JOB_USER": "ann",
                            "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "4"}.items():
            patch.setenv(name, value)
        on_cluster.write_result(notebook, steps, alone)
    return tmp_path / "in"


@pytest.fixture
def handed_in(made, tmp_path):
    """The notebook and its result file, to be changed: one exercise passed on ranks, one stopped, one left nothing."""
    ann = shutil.copytree(made, tmp_path / "in") / "ann"
    return ann / "10_tensor_parallel.ipynb", ann / "10_tensor_parallel.result.json"


def judged(handed_in, **changes) -> on_cluster.Claim:
    notebook, path = handed_in
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    passed = [Verdict(e.name, (Fact(e.name != "copy-reduce", "it"),)) for e in exercises_of_lesson("10")]
    with mock.patch.object(on_cluster, "confirm_job", lambda told: (True, f"job {told['id']}")):
        return on_cluster.judge_result(path, "ann", "10", notebook, passed)


def test_a_result_has_all_that_it_stands_for(handed_in):
    notebook, path = handed_in
    result = json.loads(path.read_text())
    assert result["notebook"] == sha256(notebook) and result["job"] == JOB and result["lesson"] == "10"
    versions = {name: one["version"] for name, one in result["exercises"].items()}
    assert versions == {exercise.name: exercise.version for exercise in exercises_of_lesson("10")}
    first, second, third, last = on_cluster.exercises_on_ranks(notebook)
    assert find(last).open and not result["exercises"][last]["passed"]
    assert result["exercises"][first]["passed"] and "mine" in result["exercises"][second]["facts"][0]["text"]
    assert "without a result" in result["exercises"][third]["facts"][0]["text"]
    claim = judged(handed_in)
    assert not claim.refused and claim.confirmed and claim.devices == "GPU"
    assert "0.5 s on 4 ranks, the library's 0.25" in claim.numbers


def test_what_grading_finds_counts_and_a_result_that_says_otherwise_is_named(handed_in):
    assert judged(handed_in).contradicted == ("copy-reduce",)


REFUSED = {"schema": ({"schema": 2}, "schema is 2"), "hash": ({"notebook": "0" * 64}, "hash is not that"),
           "lesson": ({"lesson": "11"}, "of lesson 11"), "version": ({"exercises": {}}, "another version of the course"),
           "job": ({"job": [1]}, "damaged"), "exercises": ({"exercises": 3}, "damaged"),
           "hardware": ({"hardware": {}}, "damaged"),
           "runs": ({"runs": {str(number): {} for number in range(21)}}, "more than 20 exercises or runs")}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_match_is_refused_with_a_reason(handed_in, case):
    changes, why = REFUSED[case]
    assert why in judged(handed_in, **changes).refused


def test_one_version_of_one_check_is_enough_to_refuse(handed_in):
    exercises = json.loads(handed_in[1].read_text())["exercises"]
    exercises["copy-reduce"]["version"] = "0" * 12
    assert "(copy-reduce)" in judged(handed_in, exercises=exercises).refused


def test_a_verdict_that_contradicts_its_facts_is_refused(handed_in):
    exercises = json.loads(handed_in[1].read_text())["exercises"]
    name = on_cluster.exercises_on_ranks(handed_in[0])[1]
    exercises[name]["passed"] = True                 # and the fact that held: false stays
    assert f"contradict its facts, so somebody changed it ({name})" in judged(handed_in, exercises=exercises).refused
    exercises[name]["facts"] = []
    assert "contradict" in judged(handed_in, exercises=exercises).refused


@pytest.mark.parametrize("content", ["", "[]", "{", '{"schema": 1}', "[" * 100_000, " " * 2_000_000])
def test_a_damaged_file_is_refused_and_does_no_harm(handed_in, content):
    notebook, path = handed_in
    path.write_text(content)
    assert on_cluster.judge_result(path, "ann", "10", notebook, []).refused


def test_a_notebook_too_large_to_be_one_is_not_hashed(handed_in, monkeypatch):
    with open(handed_in[0], "ab") as file:
        file.truncate(10**12)                        # takes no room
    monkeypatch.setattr(on_cluster, "sha256", lambda path: pytest.fail("a terabyte"))
    assert "another version of the notebook" in on_cluster.judge_result(handed_in[1], "ann", "10", handed_in[0], []).refused


def test_without_slurm_hardware_is_a_claim(handed_in, monkeypatch):
    notebook, path = handed_in
    monkeypatch.setenv("PATH", "/nowhere")
    claim = on_cluster.judge_result(path, "ann", "10", notebook, [])
    assert not claim.refused and not claim.confirmed and "no Slurm here" in claim.why
    assert "no job of Slurm" in judged(handed_in, job=None).why


def test_sacct_confirms_where_slurm_has_forgotten_the_job(handed_in, tmp_path, monkeypatch):
    notebook, path = handed_in
    checked = json.loads(path.read_text())["checked"]
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    for nodes, confirmed in (("n[1-2]", True), ("n3", False)):
        (programs / "sacct").write_text(f"#!/bin/sh\necho '{nodes}|ann|course|{checked}|Unknown'\n")
        for program in programs.iterdir():
            program.chmod(0o755)
        assert on_cluster.judge_result(path, "ann", "10", notebook, []).confirmed is confirmed


@pytest.mark.parametrize(("learner", "file", "user", "command", "sure"), [
    ("ann", "10_tensor_parallel.ipynb", "ann", "/x/check.sh notebooks/10_tensor_parallel.ipynb", True),
    ("Ann_ann", "my 10.ipynb", "ann", "/x y/submit/check.sh my 10.ipynb", True),
    ("Ann A", "10.ipynb", "aa12", "/x/check.sh 10.ipynb", True),                    # accounts.csv says so
    ("ann", "10.ipynb", "ann", "/x/check.sh 10.ipynb --trust", True),
    ("ann", "", "ann", "/x/check.sh 10.ipynb", False), ("ann", " ", "ann", "/x/check.sh 10.ipynb ", False),
    ("ann", "b", "ann", "/x/check.sh 10.ipynb", False), ("ann", ".ipynb", "ann", "/x/check.sh 10.ipynb", False),
    ("ann", "10.ipynb", "ann", "/x/train.sh check.sh 10.ipynb", False),
    ("ann", "10.ipynb", "ann", "/x/check.sh 110.ipynb", False),
    ("ann", "10.ipynb", "eve", "/x/check.sh 10.ipynb", False), ("ann", "10.ipynb", "", "/x/check.sh 10.ipynb", False),
])
def test_only_the_learners_own_job_with_this_notebook_is_confirmed(handed_in, monkeypatch, learner, file, user, command, sure):
    notebook, path = handed_in
    result = json.loads(path.read_text())
    path.write_text(json.dumps(result | {"file": file, "job": JOB | {"user": user},
                                         "hardware": {"devices": ["8 x NVIDIA H100"]}}))
    known = {"NodeList": "n[1-2]", "UserId": f"{user}(1)", "StartTime": result["checked"], "EndTime": "Unknown",
             "Command": command, "TRES": "cpu=8,node=2,gres/gpu=2,gres/gpu:t4=2"}
    monkeypatch.setattr(on_cluster, "describe_job", lambda number: known)
    claim = on_cluster.judge_result(path, learner, "10", notebook, [], accounts={"Ann A": {"aa12"}})
    assert claim.confirmed is sure and not claim.refused, claim.why
    assert grade.describe_hardware(claim) == "confirmed: n[1-2], 2 GPUs (t4); " * sure + "claimed: 8 x NVIDIA H100"


@pytest.mark.parametrize(("resources", "words"), [
    ("cpu=8,gres/gpu=8", "n1, 8 GPUs"), ("cpu=8,gres/gpu:a100=1", "n1, 1 GPU (a100)"), ("cpu=8", "n1, no GPUs"),
    ("", "n1, Slurm does not say which GPUs"), ("cpu=8,gres/gpu=4,gres/gpu:a=2,gres/gpu:b=2", "n1, 4 GPUs (a, b)")])
def test_slurm_says_which_gpus_a_job_had(resources, words):
    assert on_cluster.describe_resources({"NodeList": "n1", "AllocTRES": resources}) == words


def test_a_result_is_found_beside_its_notebook_however_a_platform_names_files(tmp_path):
    for name in ("ann/10_tensor_parallel_mine.result.json", "bob_4711_816_10_tensor_parallel.result.json",
                 "eve/09_mesh.result.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "ann" / "10_link.result.json").symlink_to(tmp_path / "eve" / "09_mesh.result.json")
    assert [path.name for path in on_cluster.result_files(tmp_path)["ann", "10"]] == ["10_tensor_parallel_mine.result.json"]
    (path,) = on_cluster.result_files(tmp_path)["bob_4711", "10"]
    assert path.name == "bob_4711_816_10_tensor_parallel.result.json"
    assert ("eve", "10") not in on_cluster.result_files(tmp_path)


def test_what_slurm_says_now_counts_and_a_job_of_two_learners_is_named(handed_in, tmp_path, monkeypatch):
    folder, out = handed_in[0].parents[1], tmp_path / "out"
    shutil.copytree(folder / "ann", folder / "bob")
    result = json.loads(handed_in[1].read_text()) | {"hardware": {"devices": []}}
    handed_in[1].write_text(json.dumps(result))
    graded = [grade.Graded(Submission(name, "10", folder / name / "10_tensor_parallel.ipynb"), ()) for name in ("ann", "bob")]

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "accounts.csv").write_text("learner,account\nann,ann\nbob,ann\n")      # a group's

    def rows(known: tuple[bool, str]) -> list[str]:
        monkeypatch.setattr(on_cluster, "confirm_job", lambda told: known)
        grade.take_in_result_files(folder, graded, out)
        return (out / "claims.csv").read_text().splitlines()[1:]

    ann, bob = rows((True, "Slurm knows job 7"))
    assert '"claimed","confirmed: the job, not its devices"' in ann and "Slurm knows job 7" in ann
    assert '"confirmed: the job, not its devices; claimed: GPU"' in bob
    assert "also claimed by bob" in ann and "also claimed by ann" in bob
    assert all('"confirmed' not in row for row in rows((False, "Slurm's job 7 is another one")))
    handed_in[1].write_text(json.dumps(result | {"job": JOB | {"user": "eve"}}))  # job 7 of another cluster, or of another user
    assert not any("also claimed" in row for row in rows((False, "no Slurm here knows the job")))


@pytest.mark.slow
def test_the_claims_are_listed_and_no_mark_changes(handed_in, tmp_path, monkeypatch):
    monkeypatch.setattr(grade, "judge_safely", lambda exercise, *_: Verdict(exercise.name, (Fact(False, "no"),)))
    monkeypatch.setattr(grade, "reference_runs", lambda *_: ())
    monkeypatch.setattr(on_cluster, "confirm_job", lambda told: (False, "nobody knows"))
    (graded,) = grade.main(handed_in[0].parents[1], tmp_path / "out", trust=True)
    assert graded.points == 0
    rows = (tmp_path / "out" / "claims.csv").read_text().splitlines()
    assert len(rows) == 2
    assert rows[1].startswith('"ann","10","10_tensor_parallel.result.json","taken","7","claimed","claimed: GPU"')
    assert "nobody knows" in rows[1] and "copy-reduce" in rows[1]
    handed_in[1].write_text("{}")
    grade.main(handed_in[0].parents[1], tmp_path / "out", trust=True)
    assert '"refused"' in (tmp_path / "out" / "claims.csv").read_text()


def test_claims_that_cannot_be_read_or_that_nobody_makes_any_more_are_left_out(handed_in, tmp_path, monkeypatch):
    monkeypatch.setattr(on_cluster, "confirm_job", lambda told: (False, "nobody knows"))
    folder, out = handed_in[0].parents[1], tmp_path / "out"
    graded = [grade.Graded(Submission("ann", "10", handed_in[0]), ())]
    (claim,) = grade.take_in_result_files(folder, graded, out)
    for name, text in (("a", "{"), ("b", json.dumps({**asdict(claim), "color": "red"})), ("c", "[]")):
        (out / "claims" / f"{name}.json").write_text(text)
    assert grade.take_in_result_files(folder, graded, out) == [claim]
    handed_in[1].unlink()                            # handed in again, without a result
    assert grade.take_in_result_files(folder, graded, out) == [] and not (out / "claims.csv").exists()


def test_the_numbers_are_the_last_plain_ones(tmp_path):
    content = classroom.notebook("09")
    for source in ("measured = {'a': 1}", "%time measured = {'a': 2}", "measured = {'b': 2.5, 'c': 'GPU', 'd': [1]}",
                   "measured = f()"):
        content.cells.append(classroom.nbformat.v4.new_code_cell(source))
    measured = on_cluster.assigned_dict(classroom.hand_in(tmp_path / "09_mesh.ipynb", content), "measured")
    assert on_cluster.plain_values(measured) == {"b": 2.5, "c": "GPU"}


def test_a_notebook_of_no_lesson_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(CourseError, match="which lesson"):
        on_cluster.exercises_on_ranks(classroom.hand_in(tmp_path / "my.ipynb", classroom.nbformat.v4.new_notebook()))


def test_of_reported_runs_slurm_confirms_the_job_and_nobody_the_losses(handed_in, monkeypatch):
    job = {"id": 12, "state": "COMPLETED", "restarts": 1, "nodes": "n[1-2]", "user": "ann", "by": "Slurm"}
    runs = {"undisturbed": {"folder": "runs/a", "losses": [[1, 2.0]], "job": None},
            "preempted": {"folder": "runs/b", "losses": [[1, 2.0]], "job": job}}
    known = {"NodeList": "n[1-2]", "UserId": "ann(1000)", "Restarts": "1"}
    monkeypatch.setattr(on_cluster, "describe_job", lambda number: known)
    told = judged(handed_in, runs=runs).runs
    assert "preempted: confirmed: job 12 of ann ran on n[1-2]" in told and "preempted: claimed: its 1 losses" in told
    assert judged(handed_in, runs={}).runs == "" and "damaged" in judged(handed_in, runs={"a": 3}).refused


@pytest.mark.parametrize(("scontrol", "sacct", "count"), [
    ("echo 'JobId=7 Restarts=3 UserId=ann(1)'", "exit 1", "3"), ("exit 1", "printf 'n1|ann|c|a|b\\nn2|ann|c|a|b\\n'", "1"),
    ("exit 1", "exit 1", None)])
def test_how_often_a_job_was_requeued_slurm_counts_or_its_records_do(tmp_path, monkeypatch, scontrol, sacct, count):
    for name, line in (("scontrol", scontrol), ("sacct", sacct)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    known = on_cluster.describe_job(7)
    assert known.get("Restarts") == count and known.get("NodeList") in (None, "n2")          # the last record is of the last time


def test_a_report_names_runs_and_is_read_not_run(tmp_path):
    content = classroom.notebook("09")
    content.cells.append(classroom.nbformat.v4.new_code_cell("report = {'undisturbed': 'runs/a', 'share': 0.1}\nreport = f()"))
    path = classroom.hand_in(tmp_path / "notebooks" / "09_mesh.ipynb", content)
    assert on_cluster.assigned_dict(path, "report") == {"undisturbed": "runs/a", "share": 0.1}
