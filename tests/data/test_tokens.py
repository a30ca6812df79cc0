import json
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from course import config
from course.data import has_validation, open_data, order
from course.data.loaders import native
from course.data.text import indexed_files
from course.data.text.sequences import Sequences
from course.training import trainer
from course.utils.errors import CourseError


@pytest.fixture
def folder(tmp_path):
    """Tokens 0 to 99 in train, in documents of 30, 0, 69 and 1; 5 in valid."""
    for split, documents in {"train": [range(30), [], range(30, 99), [99]], "valid": [range(5)]}.items():
        with indexed_files.document_writer(tmp_path / split, 100) as writer:
            for document in documents:
                writer.add(np.array(document, np.int64))
    (tmp_path / "meta.json").write_text(json.dumps({"vocab": 100}))
    return str(tmp_path)


@pytest.mark.parametrize(("context", "samples"), [(9, 11), (10, 9), (33, 3), (99, 1), (1, 99)])
def test_samples_follow_each_other_and_share_a_token(folder, context, samples):
    data = Sequences(folder, "train", context, 100)
    batch = data.__getitems__(list(range(samples)))
    assert len(data) == samples and batch["tokens"].dtype == batch["sample"].dtype == torch.int64
    assert batch["tokens"].tolist() == [list(range(i * context, (i + 1) * context + 1)) for i in range(samples)]
    assert batch["sample"].tolist() == list(range(samples))


def test_padding_is_zeros_and_a_limit_cuts(folder):
    batch = Sequences(folder, "train", 4, 100).__getitems__([3, -1, 0])
    assert batch["tokens"].tolist() == [[12, 13, 14, 15, 16], [0] * 5, [0, 1, 2, 3, 4]]
    assert batch["sample"].tolist() == [3, -1, 0]
    assert len(Sequences(folder, "train", 4, 100, limit=7)) == 7 and len(Sequences(folder, "train", 4, 100, limit=999)) == 24


def test_it_travels_without_its_tokens(folder):
    data = Sequences(folder, "train", 4, 100, 20)
    pickled = pickle.dumps(data)
    found = pickle.loads(pickled)
    assert len(pickled) < 1000 and len(found) == 20
    assert torch.equal(found.__getitems__([2, 5])["tokens"], data.__getitems__([2, 5])["tokens"])


@pytest.mark.parametrize("workers", [0, 2])
def test_the_native_loader_serves_it_the_same_in_every_layout(folder, workers):
    """Two ranks read what one reads, whatever the workers; an epoch has each sample once."""
    data = Sequences(folder, "train", 9, 100)

    def read(ranks, rank, batches=11, workers=workers):
        ids = partial(order.train_batches, 5, len(data), 4, ranks, rank, 0)
        loader = native.loader(data, ids(), workers, pin=False)
        found = [next(loader) for _ in range(batches)]
        loader.close()
        return {name: torch.stack([batch[name] for batch in found]) for name in found[0]}

    whole, halves = read(1, 0, workers=0), [read(2, 0), read(2, 1)]
    for name in ("tokens", "sample"):
        assert torch.equal(torch.cat([half[name] for half in halves], 1), whole[name])
    epochs = whole["sample"].flatten().reshape(4, 11)
    assert epochs.sort(1).values.tolist() == 4 * [list(range(11))] and epochs[0].tolist() != epochs[1].tolist()
    assert torch.equal(whole["tokens"][..., 0], whole["sample"] * 9)


@pytest.mark.parametrize(("split", "context", "vocab", "sentence"), [
    ("train", 4, 99, "has a vocabulary of 100 tokens but model.vocab=99: set model.vocab=100"),
    ("train", 100, 100, "train.bin has 100 tokens, and a sample takes 101"),
    ("valid", 5, 100, "valid.bin has 5 tokens, and a sample takes 6: use a smaller model.context .* with a larger valid="),
    ("test", 4, 100, "test.idx cannot be read"),
])
def test_bad_requests_are_sentences(folder, split, context, vocab, sentence):
    with pytest.raises(CourseError, match=sentence):
        Sequences(folder, split, context, vocab)
    with pytest.raises(CourseError, match="nowhere does not exist: make it with `course data tokens path="):
        Sequences(f"{folder}/nowhere", split, context, vocab)


@pytest.mark.parametrize("text", ["", "{\"vocab\": 1", "[]", "{}", "{\"vocab\": null}", "{\"vocab\": \"many\"}"])
def test_notes_that_are_damaged_or_of_others_are_a_sentence(folder, tmp_path, text):
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(CourseError, match=r"meta\.json is damaged, or of another program: move that file away"):
        Sequences(folder, "train", 4, 100)


def test_a_token_that_the_model_does_not_know(folder, tmp_path):
    (tmp_path / "meta.json").unlink()                # as in files of Megatron's own
    data = Sequences(folder, "train", 9, 95)
    assert data.__getitems__([0])["tokens"].max() == 9
    with pytest.raises(CourseError, match=r"train.bin has tokens from 0 to 99 but model.vocab=95: set model.vocab=100"):
        list(native.loader(data, [[0, 10]], 0, pin=False))


def test_padding_of_the_vocabulary_is_no_token(folder):
    """A model of 128 rows of which 96 are tokens would learn rows that it never writes, and that no other library gets."""
    settings = [f"data.path={folder}", "data.source=files", "model.context=9", "model.vocab=128"]
    assert len(open_data(config.load("gpt-demo", [*settings, "model.vocab_used=100"]), "train")) == 11
    with pytest.raises(CourseError, match=r"100 tokens but model.vocab_used=96: set model.vocab_used=100"):
        open_data(config.load("gpt-demo", [*settings, "model.vocab_used=96"]), "train")


def test_no_tokens_at_all(folder, tmp_path):
    with indexed_files.document_writer(tmp_path / "test", 100):
        pass
    with pytest.raises(CourseError, match=r"test\.bin has 0 tokens"):
        Sequences(folder, "test", 4, 100)


def test_a_pair_alone_trains_without_validation(folder, tmp_path, capfd):
    """As Megatron's own preparation leaves it: no valid.bin and .idx, and no notes of ours."""
    data = tmp_path / "pair"
    data.mkdir()
    for ending in ("bin", "idx"):
        (data / f"train.{ending}").write_bytes(Path(folder, f"train.{ending}").read_bytes())
    trainer.main(config.load("gpt-demo",
                             [f"data.path={data}", "model.context=8", "model.dim=16", "model.depth=1", "model.heads=2",
                                        "train.steps=1", "train.global_batch=2", "train.device=cpu", f"log.dir={tmp_path}"]))
    assert f"{data} has no validation data: this run trains without validation" in capfd.readouterr().out
    (data / "valid.bin").write_bytes(b"")
    with pytest.raises(CourseError, match=r"valid.idx cannot be read"):
        has_validation(config.load("gpt-demo", [f"data.path={data}"]))


# ---- files that are cut off, or were never written ----

@pytest.fixture
def long(tmp_path):
    """Enough tokens, 40,000 of 2 bytes, that a system may end a process that reads what is no longer there."""
    for split in ("train", "valid"):
        with indexed_files.document_writer(tmp_path / split, 100) as writer:
            writer.add(np.arange(40_000) % 99 + 1)
    return tmp_path


@pytest.mark.parametrize("workers", [0, 1])
def test_a_token_file_cut_off_while_training_is_a_sentence(long, workers):
    data = Sequences(str(long), "train", 99, 100)
    batches = native.loader(data, [[0, 1], *([i, i + 1] for i in range(200, 400, 10))], workers, False)
    next(batches)
    with open(long / "train.bin", "r+b") as file:
        file.truncate(10_000)
    with pytest.raises(CourseError, match=r"train\.bin is truncated: it had 80000 bytes when it was opened and has 10000"):
        list(batches)


def test_a_token_file_removed_while_training_is_read_to_the_end(long):
    data = Sequences(str(long), "train", 99, 100)
    data.__getitems__([0])
    (long / "train.bin").unlink()
    assert data.__getitems__([5])["tokens"][0, 0] == 99 * 5 % 99 + 1


def hole(file):
    raw = file.read_bytes()
    with open(file, "wb") as out:
        out.write(raw[:20_480])
        out.seek(49_152)
        out.write(raw[49_152:])


def zeros(file):
    raw = file.read_bytes()
    file.write_bytes(raw[:60_000] + bytes(len(raw) - 60_000))


@pytest.mark.parametrize(("spoil", "byte"), [(hole, "[23][0-9]{4}"), (zeros, "[67][0-9]{4}")])
@pytest.mark.parametrize("split", ["train", "valid"])
def test_parts_of_a_token_file_that_were_never_written_are_refused(long, spoil, byte, split):
    spoil(long / f"{split}.bin")
    with pytest.raises(CourseError, match=rf"{split}\.bin was never written from byte {byte} to .*reads as token 0"):
        Sequences(str(long), split, 99, 100)


def test_reading_gives_the_mapped_tokens(long):
    documents = indexed_files.Documents(long / "train")
    for begin, count in ((0, 10), (39_990, 10), (123, 4567)):
        assert np.array_equal(documents.read(begin, count), documents.tokens[begin:begin + count])
