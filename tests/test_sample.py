"""A GPT on token files, through the run that every model has: training, validation, resuming, and what it writes."""

import json
from unittest import mock

import pytest
import torch

from course import config, evaluate, sample, train
from course.data import bpe, corpus
from course.errors import CourseError
from course.launch import ranks
from course.report import read_metrics

SMALL = ["model.vocab=300", "model.context=32", "model.dim=32", "model.depth=2", "model.heads=2", "train.global_batch=4",
         "train.device=cpu", "train.threads=1", "log.tensorboard=false", "log.every=1"]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Token files of a few small modules."""
    folder, library = tmp_path_factory.mktemp("words"), tmp_path_factory.mktemp("library")
    for i in range(40):
        (library / f"module{i}.py").write_text(f'"""Module {i}."""\n\n\ndef add{i}(a, b):\n    return a + b + {i}\n' * 4)
    texts = [(file.name, file.read_text()) for file in sorted(library.iterdir())]
    with mock.patch.object(corpus, "library", lambda folder: iter(texts)):
        corpus.make(corpus.Python(path=str(folder), vocab=300, valid=0.2, test=0.1), lambda text: None)
    return folder


def settings(words, tmp_path, *more):
    return config.load("gpt-python", [*SMALL, f"data.path={words}", f"log.dir={tmp_path}", *more])


def test_data_without_validation_trains_without(words, tmp_path, capsys):
    whole = corpus.Python(path=str(tmp_path / "all"), vocab=300, valid=0, test=0)
    with mock.patch.object(corpus, "library", lambda folder: iter([(f"{i}", f"def add{i}(a, b): return a + b\n" * 9)
                                                                   for i in range(40)])):
        corpus.make(whole, lambda text: None)
    run = train.main(settings(tmp_path / "all", tmp_path, "train.steps=2"))
    record = read_metrics(run / "metrics.jsonl")[-1]
    assert record["step"] == 2 and "valid_loss" not in record
    assert "/all has no validation data: this run trains without validation" in capsys.readouterr().out


def test_a_gpt_learns_from_token_files_and_goes_on_where_it_stopped(words, tmp_path):
    whole = read_metrics(train.main(settings(words, tmp_path, "train.steps=6", "train.eval_every=2", "optim.schedule=constant",
                                             "log.name=whole")) / "metrics.jsonl")
    for steps in (3, 6):
        run = train.main(settings(words, tmp_path, f"train.steps={steps}", "train.eval_every=2", "optim.schedule=constant",
                                  "log.name=parts"))
    parts = read_metrics(run / "metrics.jsonl")
    assert [record["loss"] for record in parts] == [record["loss"] for record in whole] and len(whole) == 6
    assert whole[-1]["loss"] < whole[0]["loss"] and 0 < whole[-1]["valid_loss"] < whole[1]["valid_loss"]
    assert "valid_rmse" not in whole[-1]


def test_it_writes_on_after_a_prompt(words, tmp_path):
    run = train.main(settings(words, tmp_path, "train.steps=2"))
    heard = []
    texts = sample.main(run, "def add", 10, 0.8, 20, 0, 2, heard.append)
    assert len(texts) == 2 and all(text.startswith("def add") and len(text) > len("def add") for text in texts)
    assert texts[0] != texts[1] and texts == sample.main(run, "def add", 10, 0.8, 20, 0, 2, heard.append)
    assert "step 2, sample 1 of 2" in heard[0]


def test_a_text_ends_where_the_document_does(words, tmp_path, monkeypatch):
    """What follows is another; the token in the prompt begins one, and ends nothing."""
    run = train.main(settings(words, tmp_path, "train.steps=1"))
    known = bpe.load(words / "tokenizer.json")
    end, more = known.token_to_id(bpe.END), known.encode("return x").ids
    monkeypatch.setattr(sample, "generate", lambda model, tokens, *how: torch.tensor([[*tokens[0], *more, end, *more]]))
    assert sample.main(run, "def f(): ", 1, 1, 0, 0, 1, lambda text: None) == ["def f(): return x"]
    assert sample.main(run, f"{bpe.END}a ", 1, 1, 0, 0, 1, lambda text: None) == ["a return x"]
    with pytest.raises(CourseError, match="the prompt is no text in UTF-8"):
        sample.main(run, "a\udcff", 1, 1, 0, 0, 1)


def test_what_cannot_write_is_a_sentence(words, tmp_path):
    other = train.main(config.load("dit-demo", ["train.steps=1", "train.device=cpu", f"log.dir={tmp_path}"]))
    with pytest.raises(CourseError, match="a run of a dit, which writes no text"):
        sample.main(other, "x", 1, 1, 0, 0, 1)
    run = train.main(settings(words, tmp_path, "train.steps=1"))
    with pytest.raises(CourseError, match=r"more than model\.context=32"):
        sample.main(run, "def add", 100, 1, 0, 0, 1)
    with pytest.raises(CourseError, match="forecasts no weather: let it write with `course sample"):
        evaluate.main(run)
    plain = json.loads((words / "tokenizer.json").read_text())
    (words / "tokenizer.json").write_text("no")
    with pytest.raises(CourseError, match=r"tokenizer\.json cannot be read"):
        sample.main(run, "x", 1, 1, 0, 0, 1)
    (words / "tokenizer.json").write_text(json.dumps(plain))


def test_more_words_than_the_model_knows_is_a_sentence(words, tmp_path):
    with pytest.raises(CourseError, match=r"set model\.vocab=300"):
        train.main(settings(words, tmp_path, "model.vocab=200", "train.steps=1"))


def on_ranks(words, folder, *more):
    """A run of two steps on these ranks."""
    from course.parallel import build_mesh, join
    from course.train import assemble, fit, run_folder

    c = settings(words, folder, "train.steps=2", "precision=fp64", "data.workers=0", *more)
    fit(assemble(c, build_mesh(c.parallel, join("cpu"))))
    return run_folder(c)


@pytest.mark.parametrize("layout", ["tp=2", "cp=2", "pp=2", "dp=2 zero=true"])
def test_a_run_of_any_layout_writes_what_one_process_would(layout, words, tmp_path):
    """In float64, so that the layouts' weights differ by 1e-15 and no draw falls otherwise."""
    parallel = [f"parallel.{key}" for key in layout.split()] + ["train.micro_batch=2"]
    run, _ = ranks(2)(on_ranks, words, tmp_path / "two", *parallel)
    alone, = ranks(1)(on_ranks, words, tmp_path / "one")
    told = [sample.main(folder, "def add", 20, 0.8, 20, 0, 2, lambda text: None) for folder in (run, alone)]
    assert told[0] == told[1]
