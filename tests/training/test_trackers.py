"""A run's numbers also go to Weights & Biases and MLflow. Stand-ins of their modules write down what they are told."""

import json
import sys

import pytest

from course import config
from course.training import trackers, trainer
from course.training.run_log import read_metrics, scalars
from course.utils.errors import CourseError

STAND_IN = """
import json, types
from pathlib import Path
TOLD = Path({told!r})
def tell(*words):
    with TOLD.open("a") as file:
        file.write(json.dumps(words) + "\\n")
"""
WANDB = STAND_IN + """
class Run:
    id = "w1"
    def log(self, values, step):
        tell("log", step, values)
    def finish(self):
        tell("finish")
def init(**how):
    tell("init", how["name"], how["id"], how["resume"], how["config"]["train"]["steps"])
    return Run()
"""
MLFLOW = STAND_IN + """
def set_tracking_uri(uri):
    tell("uri", uri)
def start_run(run_id, run_name):
    tell("start", run_id, run_name)
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id="m1"))
def log_dict(values, name):
    tell("dict", name, values["train"]["steps"])
def log_metrics(values, step):
    if step > 4:
        raise ConnectionError("the server is gone")
    tell("log", step, values)
def end_run():
    tell("end")
"""


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Reads what a stand-in was told since the last reading."""
    for name, source in (("wandb", WANDB), ("mlflow", MLFLOW)):
        (tmp_path / f"{name}.py").write_text(source.format(told=str(tmp_path / f"{name}.told")))
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))

    def read(name):
        lines = [json.loads(line) for line in (tmp_path / f"{name}.told").read_text().splitlines()]
        (tmp_path / f"{name}.told").unlink()
        return lines

    yield read
    for name in ("wandb", "mlflow"):
        sys.modules.pop(name, None)


def test_a_resumed_run_goes_on_in_its_record(tiny, told, capsys):
    settings = [*tiny, "log.wandb=true", "log.mlflow=file:here"]
    run = trainer.main(config.load("vit-demo", [*settings, "train.steps=4"]))
    records = read_metrics(run / "metrics.jsonl")
    sent = [["log", record["step"], dict(scalars(record))] for record in records]
    assert told("wandb") == [["init", "vit-demo/default", None, "allow", 4], *sent, ["finish"]]
    assert told("mlflow") == [["uri", "file:here"], ["start", None, "vit-demo/default"], ["dict", "config.yaml", 4], *sent,
                              ["end"]]
    trainer.main(config.load("vit-demo", [*settings, "train.steps=6"]))
    begin, *more = told("wandb")
    assert begin[2] == "w1" and [entry[1] for entry in more[:-1]] == [5, 6]
    assert told("mlflow") == [["uri", "file:here"], ["start", "m1", "vit-demo/default"]]        # it fails at step 5
    assert capsys.readouterr().out.count("WARNING: log.mlflow failed (ConnectionError: the server is gone)") == 1


def test_a_missing_package_is_a_sentence(tiny, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    for setting in ("log.wandb=true", "log.mlflow=file:here"):
        with pytest.raises(CourseError, match=r"needs the package (wandb|mlflow), which is not installed: pip install"):
            trainer.main(config.load("vit-demo", [*tiny, setting]))


def test_a_service_that_refuses_is_a_sentence(tiny, told, tmp_path):
    (tmp_path / "wandb.py").write_text("def init(**how):\n    raise OSError('no key')\n")
    with pytest.raises(CourseError, match=r"log.wandb cannot begin \(OSError: no key\)"):
        trainer.main(config.load("vit-demo", [*tiny, "log.wandb=true"]))
