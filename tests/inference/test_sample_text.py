"""A GPT on token files, through the run that every model has: training, validation, resuming, and what it writes."""

import json
import shutil
from unittest import mock

import pytest
import tokenizers
import torch

from course import config
from course.convert import command, reshard
from course.data.text import bpe, end_tokens, jsonl, python_corpus
from course.inference import forecast_scores, sample_text
from course.inference.kv_cache_decoding import generate
from course.models import GPTConfig, build_model
from course.parallel import World, initialize_serial
from course.ranks.notebook_ranks import ranks
from course.training import trainer
from course.training.run_log import read_metrics
from course.utils.errors import CourseError

SMALL = ["model.vocab=300", "model.context=32", "model.dim=32", "model.depth=2", "model.heads=2", "train.global_batch=4",
         "train.device=cpu", "train.threads=1", "log.tensorboard=false", "log.every=1"]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Token files of a few small modules."""
    folder, library = tmp_path_factory.mktemp("words"), tmp_path_factory.mktemp("library")
    for i in range(40):
        (library / f"module{i}.py").write_text(f'"""Module {i}."""\n\n\ndef add{i}(a, b):\n    return a + b + {i}\n' * 4)
    texts = [(file.name, file.read_text()) for file in sorted(library.iterdir())]
    with mock.patch.object(python_corpus, "library_files", lambda folder: iter(texts)):
        python_corpus.make(python_corpus.PythonCorpus(path=str(folder), vocab=300, valid=0.2, test=0.1), lambda text: None)
    return folder


def settings(words, tmp_path, *more):
    return config.load("gpt-python", [*SMALL, f"data.path={words}", f"log.dir={tmp_path}", *more])


def test_data_without_validation_trains_without(words, tmp_path, capsys):
    whole = python_corpus.PythonCorpus(path=str(tmp_path / "all"), vocab=300, valid=0, test=0)
    with mock.patch.object(python_corpus, "library_files", lambda folder: iter([(f"{i}", f"def add{i}(a, b): return a + b\n" * 9)
                                                                   for i in range(40)])):
        python_corpus.make(whole, lambda text: None)
    run = trainer.main(settings(tmp_path / "all", tmp_path, "train.steps=2"))
    record = read_metrics(run / "metrics.jsonl")[-1]
    assert record["step"] == 2 and "valid_loss" not in record
    assert "/all has no validation data: this run trains without validation" in capsys.readouterr().out


def test_a_gpt_learns_from_token_files_and_goes_on_where_it_stopped(words, tmp_path):
    whole = read_metrics(trainer.main(settings(words, tmp_path, "train.steps=6", "train.eval_every=2", "optim.schedule=constant",
                                             "log.name=whole")) / "metrics.jsonl")
    for steps in (3, 6):
        run = trainer.main(settings(words, tmp_path, f"train.steps={steps}", "train.eval_every=2", "optim.schedule=constant",
                                  "log.name=parts"))
    parts = read_metrics(run / "metrics.jsonl")
    assert [record["loss"] for record in parts] == [record["loss"] for record in whole] and len(whole) == 6
    assert whole[-1]["loss"] < whole[0]["loss"] and 0 < whole[-1]["valid_loss"] < whole[1]["valid_loss"]
    assert "valid_rmse" not in whole[-1]


def test_it_writes_on_after_a_prompt(words, tmp_path):
    run = trainer.main(settings(words, tmp_path, "train.steps=2"))
    heard = []
    texts = sample_text.sample_run(run, "def add", 10, 0.8, 20, 0, 2, heard.append)
    assert len(texts) == 2 and all(text.startswith("def add") and len(text) > len("def add") for text in texts)
    assert texts[0] != texts[1] and texts == sample_text.sample_run(run, "def add", 10, 0.8, 20, 0, 2, heard.append)
    assert "step 2, sample 1 of 2" in heard[0]


def test_a_text_ends_where_the_document_does(words, tmp_path, monkeypatch):
    """What follows is another; the token in the prompt begins one, and ends nothing."""
    run = trainer.main(settings(words, tmp_path, "train.steps=1"))
    known = bpe.load(words / "tokenizer.json")
    end, more = known.token_to_id(bpe.END), known.encode("return x").ids
    monkeypatch.setattr(sample_text, "generate", lambda model, tokens, *how: torch.tensor([[*tokens[0], *more, end, *more]]))
    assert sample_text.sample_run(run, "def f(): ", 1, 1, 0, 0, 1, lambda text: None) == ["def f(): return x"]
    assert sample_text.sample_run(run, f"{bpe.END}a ", 1, 1, 0, 0, 1, lambda text: None) == ["a return x"]
    with pytest.raises(CourseError, match="the tokenizer cannot turn the prompt into tokens"):
        sample_text.sample_run(run, "a\udcff", 1, 1, 0, 0, 1)


def test_what_cannot_write_is_a_sentence(words, tmp_path, monkeypatch):
    other = trainer.main(config.load("dit-demo", ["train.steps=1", "train.device=cpu", f"log.dir={tmp_path}"]))
    with pytest.raises(CourseError, match="a run of a dit, which writes no text"):
        sample_text.sample_run(other, "x", 1, 1, 0, 0, 1)
    run = trainer.main(settings(words, tmp_path, "train.steps=1"))
    with pytest.raises(CourseError, match=r"more than model\.context=32"):
        sample_text.sample_run(run, "def add", 100, 1, 0, 0, 1)
    with pytest.raises(CourseError, match="forecasts no weather: let it write with `course sample"):
        forecast_scores.score_run(run)
    with monkeypatch.context() as patch:
        patch.setattr(sample_text, "load_model", lambda *_: (torch.nn.Linear(1, 1), 1))
        with pytest.raises(CourseError, match=r"has your own model, Linear, .* derive it from course\.models\.GPT"):
            sample_text.sample_run(run, "x", 1, 1, 0, 0, 1)
    plain = json.loads((words / "tokenizer.json").read_text())
    (words / "tokenizer.json").write_text("no")
    with pytest.raises(CourseError, match=r"tokenizer\.json cannot be read"):
        sample_text.sample_run(run, "x", 1, 1, 0, 0, 1)
    (words / "tokenizer.json").write_text(json.dumps(plain))


def test_more_words_than_the_model_knows_is_a_sentence(words, tmp_path):
    with pytest.raises(CourseError, match=r"set model\.vocab=300"):
        trainer.main(settings(words, tmp_path, "model.vocab=200", "train.steps=1"))


def on_ranks(words, folder, *more):
    """A run of two steps on these ranks."""
    from course.parallel import build_mesh, join
    from course.training.assemble import assemble
    from course.training.trainer import fit, run_folder

    c = settings(words, folder, "train.steps=2", "precision=fp64", "data.workers=0", *more)
    fit(assemble(c, build_mesh(c.parallel, join("cpu"))))
    return run_folder(c)


@pytest.mark.parametrize("layout", ["tp=2", *(pytest.param(layout, marks=pytest.mark.slow)
                                              for layout in ("cp=2", "pp=2", "dp=2 zero=true", "dp=2 zero=3"))])
def test_a_run_of_any_layout_writes_what_one_process_would(layout, words, tmp_path):
    """In float64, so that the layouts' weights differ by 1e-15 and no draw falls otherwise."""
    parallel = [f"parallel.{key}" for key in layout.split()] + ["train.micro_batch=2"]
    run, _ = ranks(2)(on_ranks, words, tmp_path / "two", *parallel)
    alone, = ranks(1)(on_ranks, words, tmp_path / "one")
    told = [sample_text.sample_run(folder, "def add", 20, 0.8, 20, 0, 2, lambda text: None) for folder in (run, alone)]
    assert told[0] == told[1]


def test_a_text_ends_with_the_token_of_its_data(tmp_path, monkeypatch):
    """Which meta.json says, whatever it is called; the run keeps it when the data are gone, and what is made of it has it."""
    known = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "stop": 2, "</s>": 3, "<|eot_id|>": 4}, "a"))
    known.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    known.add_special_tokens(["</s>"])
    known.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": "a b " * (1 + i % 3)}) + "\n" for i in range(99)))
    data = jsonl.Jsonl(files=[str(tmp_path / "text.jsonl")], path=str(tmp_path / "data"), jobs=1, end="stop",
                       tokenizer=str(tmp_path / "tokenizer.json"), valid=0.0, test=0.0)
    jsonl.make(data, lambda text: None)
    run = trainer.main(config.load("gpt-python", [*SMALL, f"data.path={tmp_path}/data", f"log.dir={tmp_path}", "train.steps=1",
                                                "model.context=8", "data.workers=0"]))
    assert json.loads((run / "generation_config.json").read_text()) == {"eos_token_id": 2}

    def written(last, *more):
        monkeypatch.setattr(sample_text, "generate", lambda model, tokens, *how: torch.tensor([[*tokens[0], 1, last, 0]]))
        return sample_text.sample_run(run, "a", 1, 1, 0, 0, 1, lambda text: None, *more)

    assert written(2) == ["a b"] and written(3) == ["a b"]               # the latter is special, and ends a text by its name
    assert written(4) == ["a b <|eot_id|> a"]                            # is an ordinary word here
    reshard.main(run, ["parallel.tp=2"], "cut", lambda text: None)
    assert json.loads((run.parent / "cut" / "generation_config.json").read_text()) == {"eos_token_id": 2}
    command.convert(World(), run, tmp_path / "out", to="hf")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == 2
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["eos_token"] == "stop"
    shutil.rmtree(tmp_path / "data")
    assert written(2, tmp_path / "tokenizer.json") == ["a b"]


@pytest.mark.parametrize(("files", "expected"), [
    ({"config.json": {"eos_token_id": 2}}, [2]), ({"config.json": {"eos_token_id": [2, 4]}}, [2, 4]),
    ({"config.json": {"eos_token_id": 2}, "generation_config.json": {"eos_token_id": [1, 3, 1]}}, [1, 3]),
    ({"config.json": {"eos_token_id": 2}, "generation_config.json": {"eos_token_id": None}}, [2]),
    ({"config.json": {"eos_token_id": 2}, "tokenizer_config.json": {"eos_token": "<|eot_id|>"}}, [2, 4]),
    ({"config.json": {}, "special_tokens_map.json": {"eos_token": {"content": "</s>"}}}, [3]),
    ({"config.json": {"eos_token_id": 50256}}, []), ({"config.json": {"eos_token_id": "no", "x": 1}}, [])])
def test_the_end_tokens_of_a_hugging_face_folder_go_there_and_back(files, expected, tmp_path):
    from tests.convert.test_huggingface import write

    c = GPTConfig(vocab=8, context=8, dim=8, depth=1, heads=1)
    model = initialize_serial(build_model(c), 0, torch.device("cpu"))
    write(tmp_path / "in", model)
    known = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "stop": 2, "</s>": 3, "<|eot_id|>": 4}, "a"))
    known.save(str(tmp_path / "in" / "tokenizer.json"))
    assert json.loads((tmp_path / "in" / "config.json").read_text())["eos_token_id"] is None
    for name, values in files.items():
        old = json.loads((tmp_path / "in" / name).read_text()) if (tmp_path / "in" / name).is_file() else {}
        (tmp_path / "in" / name).write_text(json.dumps(old | values))
    run = tmp_path / "runs" / "gpt" / "mine"
    command.convert(World(), tmp_path / "in", run)
    assert end_tokens.of_run(run, forecast_scores.read_config(run)) == expected
    command.convert(World(), run, tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"]
    assert said == (None if not expected else expected[0] if len(expected) == 1 else expected)


def test_nothing_is_computed_after_the_end_of_all_texts(words, tmp_path):
    run = trainer.main(settings(words, tmp_path, "train.steps=1"))
    model, _ = forecast_scores.load_model(run, forecast_scores.read_config(run), torch.device("cpu"))
    prompts = torch.tensor([[5, 6], [7, 8]])
    whole = generate(model, prompts, 12, 1.0, 0, 3)
    first = whole[0, 4].item(), whole[1, 6].item()
    some = generate(model, prompts, 12, 1.0, 0, 3, True, first)
    assert 5 <= some.shape[1] <= 7 and torch.equal(some, whole[:, :some.shape[1]])
    assert all(set(row[2:]) & set(first) for row in some.tolist())
