"""submit/check.sh on a notebook of lesson 09, its result file, and what `course grade` makes of it while Slurm knows the job."""

import csv
import json

from course.lab.grading import grade, on_cluster
from course.lab.grading.submissions import exercises_of_lesson
from tests.lab import classroom


def test_a_notebook_is_checked_on_four_ranks_of_two_nodes_and_its_result_handed_in(cluster, submit, tmp_path, monkeypatch):
    ann = tmp_path / "in" / "ann"
    exercises = exercises_of_lesson("09")
    name, = [exercise.name for exercise in exercises if max(exercise.sizes) > 1]
    content = classroom.notebook("09", **{name.replace("-", "_"): classroom.answer(name)})
    content.cells.append(classroom.nbformat.v4.new_code_cell('measured = {"tokens_per_s": 1234.5, "net": [1]}'))
    notebook = classroom.hand_in(ann / "09_mesh.ipynb", content)
    job = submit("--nodes=2", "--ntasks-per-node=2", "submit/check.sh", notebook, "--trust")
    assert cluster.wait(job, seconds=280) == "COMPLETED", cluster.log(job)
    path = ann / "09_mesh.result.json"
    result = json.loads(path.read_text())
    found = result["exercises"]
    assert set(found) == {exercise.name for exercise in exercises}
    assert found[name]["passed"] and found[name]["ranks"] == 4 and len(found[name]["devices"]) == 4, cluster.log(job)
    assert found[name]["reference_seconds"] > 0 and result["measured"] == {"tokens_per_s": 1234.5}
    assert result["job"]["id"] == job and result["job"]["nodes"] == "n[1-2]" and not list(ann.glob(".check-*"))

    for variable, value in cluster.environment().items():        # whoever grades has this Slurm
        monkeypatch.setenv(variable, value)

    def judged(**changes) -> on_cluster.Claim:
        path.write_text(json.dumps(result | changes))
        return on_cluster.judge_result(path, "ann", "09", notebook, [], accounts={"ann": {result["job"]["user"]}})

    claim = judged()
    assert claim.confirmed and f"job {job}: n[1-2]" in claim.why and not claim.refused
    assert f"{name} " in claim.numbers and "4 ranks" in claim.numbers and "tokens_per_s = 1234.5" in claim.numbers
    assert not judged(job=result["job"] | {"nodes": "n[1-4]"}).confirmed
    assert not judged(checked="2020-01-01T00:00:00").confirmed
    assert "no Slurm here knows" in judged(job=result["job"] | {"id": 10_000_000}).why

    blank = next(other.name for other in exercises if other.name != name)
    assert "contradict its facts" in judged(exercises=found | {blank: found[blank] | {"passed": True}}).refused
    judged(exercises=found | {blank: found[blank] | {"passed": True, "facts": found[name]["facts"]}})
    monkeypatch.setattr(grade, "reference_runs",
                        lambda *_: ())       # known mistakes, for hints that a blank answer does not need
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "accounts.csv").write_text(f"ann,{result['job']['user']}\n")
    grade.main(tmp_path / "in", tmp_path / "out", trust=True)
    (row,) = csv.DictReader((tmp_path / "out" / "claims.csv").read_text().splitlines())
    assert row["taken"] == "taken" and row["speed"] == "claimed" and row["hardware"].startswith("confirmed: ")
    assert f"it calls passed what is not: {blank}" in row["note"]
    (page,) = (tmp_path / "out" / "feedback").glob("*.html")
    assert "Result file 09_mesh.result.json: taken in" in page.read_text()
