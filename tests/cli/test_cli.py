"""The command line, as a user meets it: what it prints when something is wrong, and its exit status."""

import dataclasses
import importlib.metadata
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from course import config
from course.cli import main
from course.training import trainer
from tests.conftest import tiny_settings


def call(monkeypatch, capsys, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["course", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    code = ended.value.code
    out = capsys.readouterr()
    if isinstance(code, str):                                           # what Python prints, exiting with status 1
        return 1, code
    return code or 0, out.out + out.err


def truncate(data: Path) -> None:
    file = data / "train" / "1980.h5"
    with open(file, "r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def wrong_statistics(data: Path) -> None:
    np.save(data / "stats" / "global_means.npy", np.zeros((1, 7, 1, 1), "float32"))


def statistics_of_other_data(data: Path) -> None:
    np.save(data / "stats" / "global_stds.npy", np.full((1, 20, 1, 1), 1e6, "float32"))
    np.save(data / "stats" / "global_means.npy", np.full((1, 20, 1, 1), -3e9, "float32"))


def other_grid(data: Path) -> None:
    for year in ("1979", "1980"):
        (data / "train" / f"{year}.h5").unlink()
        with h5py.File(data / "train" / f"{year}.h5", "w") as file:
            file["fields"] = np.zeros((5, 20, 10, 20), "float32")


BAD_INPUT = {
    "unknown preset": (None, ["vit-dmeo"], ["did you mean 'vit-demo'"]),
    "unknown key": (None, ["vit-demo", "train.stps=5"], ["did you mean 'train.steps'"]),
    "wrong type": (None, ["vit-demo", "train.steps=many"], ["train.steps=many", "integer"]),
    "missing data folder": (None, ["vit-demo", "data.path=nowhere"],
                            ["nowhere/train does not exist", "data.source=mock",
                             "course data weather path=nowhere 'grid=[32,64]'`"]),
    "truncated HDF5": (truncate, [], ["1980.h5 cannot be read", "truncated", "move it away"]),
    "wrong channel count": (None, ["model.channels=19"], ["20 channels", "model.channels=20"]),
    "wrong grid": (other_grid, [], ["10x20", "model.grid=[10,20]"]),
    "statistics that do not match": (wrong_statistics, [], ["global_means.npy", "does not match", "course data stats"]),
    "statistics of other data": (statistics_of_other_data, [], ["stats does not match the data", "course data stats"]),
    "image not divisible by the patch": (None, ["vit-demo", "model.patch=7"], ["not divisible by model.patch=7"]),
    "more ranks than processes": (None, ["parallel.dp=2"],
                                 ["dp=2", "there is 1 process: ", "torchrun --standalone --nproc-per-node=2 -m"]),
    "a layout that no number of processes makes possible": (None, ["parallel.tp=3"], ["choose a divisor of 2"]),
    "an axis of a later version": (None, ["parallel.tp=2"], ["tp=2"]),
    "no GPU": (None, ["train.device=cuda"], ["no GPU"]),
    "global batch smaller than it may be": (None, ["train.global_batch=0"], ["at least 1"]),
    "not key=value": (None, ["vit-demo", "fast"], ["key=value"]),
    "as an option": (None, ["vit-demo", "--steps", "5"], ["'--steps' is not of the form key=value", "no option"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence_with_the_cure(monkeypatch, capsys, tmp_path, own_data, case):
    import torch

    if case == "no GPU":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    break_it, arguments, words = BAD_INPUT[case]
    if break_it:
        break_it(own_data)
    if not arguments or not arguments[0].startswith("vit-"):
        arguments = ["vit-demo", *tiny_settings(own_data, tmp_path / "runs"), *arguments]
    monkeypatch.chdir(tmp_path)
    status, text = call(monkeypatch, capsys, "train", *arguments)
    assert status == 1
    assert "Traceback" not in text and len(text.strip().splitlines()) == 1
    for word in words:
        assert word in text, text


@pytest.mark.parametrize(("options", "missing"), [([], "--gpus and --hardware"), (["--gpus", "8"], "--hardware"),
                                                  (["--hardware", "h100-80"], "--gpus")])
def test_plan_names_all_missing_options_in_an_example(monkeypatch, capsys, options, missing):
    status, text = call(monkeypatch, capsys, "plan", "gpt-7b", "parallel.tp=2", *options)
    assert status == 1 and text.strip() == (f"course: course plan needs {missing}, for example: course plan gpt-7b parallel.tp=2 "
                                            "--gpus 8 --hardware h100-80")


def test_an_unknown_exercise_is_answered_with_those_of_the_lesson(monkeypatch, capsys, tmp_path):
    from course.lab.grading.submissions import exercises_of_lesson

    for name in ("00_start_here.ipynb", "mine.ipynb"):
        (tmp_path / name).write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    status, text = call(monkeypatch, capsys, "check", tmp_path / "00_start_here.ipynb", "--exercise", "rooflin", "--trust")
    assert status == 1 and "there is no exercise 'rooflin' (did you mean 'roofline'?); lesson 00 has " in text
    assert text.strip().endswith("lesson 00 has " + ", ".join(exercise.name for exercise in exercises_of_lesson("00")))
    status, text = call(monkeypatch, capsys, "check", tmp_path / "mine.ipynb", "--exercise", "rooflin", "--trust")
    assert status == 1 and "; there are " in text and len(text) > 300


def test_a_checkpoint_of_another_model(monkeypatch, capsys, tmp_path, tiny):
    trainer.main(config.load("vit-demo", tiny))
    status, text = call(monkeypatch, capsys, "train", "vit-demo", *tiny, "model.dim=32")
    assert status == 1 and "another model" in text and "embed" in text


def test_a_full_disk_while_saving(monkeypatch, capsys, tiny):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("course.checkpoint.shards.stream", full)
    status, text = call(monkeypatch, capsys, "train", "vit-demo", *tiny)
    assert status == 1 and "the disk is full while writing" in text and "rank00000.safetensors" in text


def test_a_worker_that_fails_gives_the_sentence_alone(monkeypatch, capsys, tmp_path, own_data):
    from course.data.weather.pairs import Pairs

    original = Pairs._read

    def broken(self, sample, ahead):
        if sample > 10:
            (own_data / "train" / "1980.h5").unlink(missing_ok=True)
        return original(self, sample, ahead)

    monkeypatch.setattr(Pairs, "_read", broken)
    status, text = call(monkeypatch, capsys, "train", "vit-demo", *tiny_settings(own_data, tmp_path / "runs"), "data.workers=1")
    assert status == 1 and text.startswith("course: ") and "1980.h5 cannot be opened" in text and "Traceback" not in text


def test_train_and_evaluate(monkeypatch, capsys, tiny, tmp_path):
    assert call(monkeypatch, capsys, "train", "vit-demo", *tiny)[0] == 0
    status, text = call(monkeypatch, capsys, "evaluate", tmp_path / "runs" / "vit-demo" / "default", "--samples", "2")
    *_, result, proposed = text.splitlines()
    assert status == 0 and "u10 RMSE 6 h: model" in result
    assert proposed == f"next: course evaluate {tmp_path}/runs/vit-demo/default --split test --animate"
    assert call(monkeypatch, capsys, "evaluate", tmp_path, "--split", "tset")[1].startswith("course: --split tset")


def test_presets_say_what_they_are(monkeypatch, capsys):
    text = call(monkeypatch, capsys, "presets")[1]
    rows = text.split("\n\n")[0].splitlines()[1:]
    assert sorted(row.split()[0] for row in rows) == config.presets() and max(map(len, text.splitlines())) <= 130
    told = {row.split()[0]: row.replace("*", " ").split(maxsplit=5)[1:] for row in rows}
    assert {name for name, words in told.items() if words[0] != words[1]} == {name for name in told if "moe" in name}
    small = [float(words[2]) < 2 for words in told.values()]
    assert small == sorted(small, reverse=True) and sum(small) >= 5     # what a laptop trains comes first
    assert "*" in rows[0] and "*" not in next(row for row in rows if row.startswith("vit-bs2048"))      # what fits here
    assert told["gpt-moe-8x7b"][:2] == ["46.7B", "12.9B"]
    assert told["gpt-7b"][0] == "6.66B" and told["gpt-7b"][3:] == ["random", "GPT-3 6.7B"]
    assert 16 * 6.66 < float(told["gpt-7b"][2]) < 21 * 6.66             # weights, gradients, two moments: 16 bytes a parameter
    assert told["vit-demo"][3:] == ["data/weather-32x64", "A forecast on a laptop"] and float(told["vit-demo"][2]) < 1.5
    assert all(len(words) == 5 for words in told.values())


def test_a_preset_shows_its_settings_as_they_are_typed(monkeypatch, capsys, tmp_path):
    """With them the defaults are the preset again."""
    for preset in config.presets():
        *comment, lines, end = call(monkeypatch, capsys, "presets", preset)[1].split("\n\n")
        assert comment and end.rstrip().endswith(f"next: course train {preset}")
        mine = tmp_path / "mine.yaml"
        mine.write_text(f"model: {{kind: {config.load(preset).model.kind}}}\n")
        found = config.load(str(mine), lines.split())
        assert replace(found, preset=preset) == config.load(preset), preset
    assert call(monkeypatch, capsys, "presets", "vit-dmeo")[1].startswith("course: there is no preset 'vit-dmeo' (did you mean")


def test_settings_are_all_listed_with_default_type_and_a_line(monkeypatch, capsys):
    """From the dataclasses: each has a comment, a later one too."""
    from course.cli import settings
    from course.config.schema import as_text

    text = call(monkeypatch, capsys, "settings")[1]
    assert max(map(len, text.splitlines())) <= 130
    for name, section in settings.sections().items():
        said = settings.comments(section)
        for entry in dataclasses.fields(section):
            if kind := settings.choices(entry.type):
                key = f"{name.partition('.')[0]}.{entry.name}" if name != "run" else entry.name
                assert f"  {key}={as_text(entry.default)}" in text and said[entry.name], key
                assert kind.partition(" | ")[0] in text
    one = call(monkeypatch, capsys, "settings", "train")[1]
    assert "train.micro_batch=0" in one and "model.dim" not in one
    assert "(none | selective | full) what of the forward" in one
    assert "did you mean 'train'" in call(monkeypatch, capsys, "settings", "trian")[1]


def test_commands_end_with_one_that_can_be_pasted(monkeypatch, capsys, tmp_path):
    """Of several ranks the first says it; a run on random data has nothing to look at but its speed."""
    few = ["data.source=mock", "train.steps=1", "model.grid=[8,16]", "model.depth=1", "train.device=cpu", f"log.dir={tmp_path}",
           "log.tensorboard=false", "profile.after=1", "profile.steps=1"]
    text = call(monkeypatch, capsys, "train", "vit-demo", *few)[1]
    proposed = text.splitlines()[-1]
    assert proposed == f"next: course profile vit-demo {shlex.join(few)}"
    status, text = call(monkeypatch, capsys, *shlex.split(proposed)[2:])
    assert status == 0 and text.splitlines()[-1] == f"next: course profile vit-demo {shlex.join([*few, 'compile=true'])}"
    asked = ["plan", "gpt-124m", "--gpus", "2", "--hardware", "h200", "train.micro_batch=4"]
    proposed = call(monkeypatch, capsys, *asked)[1].splitlines()[-1]
    assert proposed == f"next: course {shlex.join(asked)} --launch"
    status, text = call(monkeypatch, capsys, *shlex.split(proposed)[2:])
    assert status == 0 and len(text.splitlines()) == 1 and text.startswith("torchrun ")
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert "next:" not in call(monkeypatch, capsys, *asked)[1]


@pytest.mark.parametrize("words", [("-h",), ("train", "-h"), ("data", "weather", "-h")])
def test_a_short_option_helps(monkeypatch, capsys, words):
    status, text = call(monkeypatch, capsys, *words)
    assert status == 0 and "Usage: " in text and "--help" in text


def test_outside_the_course_its_data_are_named(tmp_path, monkeypatch):
    from course.utils.errors import does_not_exist

    root = Path(main.__file__).parents[2]
    monkeypatch.chdir(tmp_path)
    said = f"course does not exist here, but in {root}: are you outside the course's folder? Go there, or else"
    assert does_not_exist(Path("course")) == said
    assert does_not_exist(Path("nowhere")) == "nowhere does not exist:"
    assert does_not_exist(tmp_path / "a") == f"{tmp_path}/a does not exist:"
    monkeypatch.chdir(root)
    assert does_not_exist(Path("nowhere")) == "nowhere does not exist:"


def test_the_package_is_a_command_and_has_a_version():
    done = subprocess.run([sys.executable, "-m", "course", "--version"], capture_output=True, text=True)
    assert done.stdout == f"course {importlib.metadata.version('course')}\n"


def test_statistics_are_made_again(monkeypatch, capsys, own_data):
    before = np.load(own_data / "stats" / "global_stds.npy")
    (own_data / "stats" / "global_stds.npy").unlink()
    assert call(monkeypatch, capsys, "data", "stats", own_data)[0] == 0
    np.testing.assert_array_equal(np.load(own_data / "stats" / "global_stds.npy"), before)


def test_help_is_quick_and_names_the_commands():
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "course.cli", "--help"], capture_output=True, text=True,
                          env={**os.environ, "COLUMNS": "100"})
    assert done.returncode == 0
    for command in ("train", "evaluate", "data", "doctor", "presets"):
        assert command in done.stdout
    assert "| torch" not in done.stderr.replace("|   ", "| ")            # imported only by the commands that need it


@pytest.mark.parametrize("command", ["weather", "era5"])
def test_help_names_every_setting(monkeypatch, capsys, command):
    """Their defaults stand in one place, but the terminal is where one asks for their names."""
    from dataclasses import fields

    from course.data.weather.era5 import Era5
    from course.data.weather.simulation import Weather

    status, text = call(monkeypatch, capsys, "data", command, "--help")
    assert status == 0
    for field in fields({"weather": Weather, "era5": Era5}[command]):
        assert f"{field.name}=" in text or field.name == "source", field.name


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_what_the_locale_has_no_letters_for_is_printed_all_the_same(tmp_path, encoding):
    """Learners' names, the marks of a verdict, a name of bytes that are no UTF-8."""
    code = (r"import sys; from course.cli import main as cli; text = 'M\u00fcller \u674e \u2713 \udcfc'; "
            "cli.app = lambda: print(text, file=sys.stderr) or print(text); cli.main()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=os.environ | {"PYTHONIOENCODING": encoding})
    assert done.returncode == 0, done.stderr
    for printed in (done.stdout, done.stderr):
        assert "ller" in printed.decode(encoding) and printed.decode(encoding).rstrip().endswith("\\udcfc")


def test_ranks_print_any_letters_in_any_locale(capsys, monkeypatch):
    from course.ranks.notebook_ranks import close, ranks

    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    close()

    def speak():
        print("Müller 李 ✓")

    ranks(1)(speak)
    close()
    assert "[rank 0] Müller 李 ✓" in capsys.readouterr().out
