"""Validation has no more in memory than training has, and finds the same loss in every layout."""

from unittest import mock

import pytest
import torch

from course import config
from course.parallel import World, build_mesh
from course.ranks.notebook_ranks import ranks
from course.training.assemble import assemble
from course.training.validation import Validation, forward_only
from tests.models.test_gpt import Alive

SMALL = ["model.vocab=24", "model.context=11", "model.dim=16", "model.depth=4", "model.heads=4", "model.loss_chunk=7",
         "model.dropout=0.1", "precision=fp64", "data.workers=0", "train.device=cpu", "train.global_batch=8"]


class Texts:
    """Random samples of so many tokens; padding is zeros, as in `course.data.Sequences`."""

    def __init__(self, samples, tokens, vocab):
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(vocab, (samples, tokens), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitems__(self, samples):
        number = torch.tensor(samples)
        return {"tokens": self.tokens[number.clamp(min=0)] * (number >= 0)[:, None], "sample": number}


def test_no_more_than_a_chunks_logits_of_a_micro_batch_are_in_memory():
    """32 samples of 64 tokens are 16 MB of logits in float32; a micro-batch of 2 has 1 MB, and a chunk a quarter of one."""
    c = config.load("gpt-demo", ["model.vocab=2000", "model.depth=1", "model.dim=16", "model.loss_chunk=32", "data.workers=0",
                                 "train.device=cpu", "train.global_batch=32", "train.micro_batch=2"])
    mesh = build_mesh(c.parallel, World(0, 1, torch.device("cpu")))
    training, texts = assemble(c, mesh), Texts(32, 65, 2000)
    model = training.model
    with Alive() as alive:
        Validation(c, training.layout, texts, [], torch.empty(0)).run(model, None, 0)
    logits = 4 * 2000 * 32
    assert 2 * logits <= alive.peak <= 2 * logits + 2**20 / 2           # the rest: activations of 2 samples, 65 KB a tensor


def test_validation_goes_through_micro_batches_of_training(monkeypatch):
    """Ten samples in two batches of eight: the second is padded."""
    c = config.load("gpt-demo", [*SMALL, "train.micro_batch=3"])
    mesh = build_mesh(c.parallel, World(0, 1, torch.device("cpu")))
    training, seen = assemble(c, mesh), []
    model = training.model
    prepare = model.prepare
    monkeypatch.setattr(model, "prepare", lambda batch, step: seen.append(batch["sample"].tolist()) or prepare(batch, step))
    Validation(c, training.layout, Texts(10, 12, 24), [], torch.empty(0)).run(model, None, 0)
    assert seen == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9, -1], [-1] * 3, [-1] * 2]


@pytest.mark.parametrize("chunk", [0, 7])
def test_who_wants_logits_has_them(chunk):
    """Also after a validation, and after one that failed."""
    c = config.load("gpt-demo", [*SMALL, f"model.loss_chunk={chunk}"])
    mesh = build_mesh(c.parallel, World(0, 1, torch.device("cpu")))
    training = assemble(c, mesh)
    model, layout, batch = training.model.train(), training.layout, Texts(2, 12, 24).__getitems__([0, 1])
    for wanted in (True, False):
        assert forward_only(model, layout, "fp64", loss_alone=wanted)(batch)[0].shape == (() if chunk and wanted else (2, 11, 24))
    with pytest.raises(KeyError):
        forward_only(model, layout, "fp64", loss_alone=True)({"sample": batch["sample"]})
    assert model.training and not model.head.loss_alone


def validate(overrides):
    """The validation loss of a model that nobody has trained, with gains and biases that say something."""
    from course.parallel import join

    c = config.load("gpt-demo", [*SMALL, *overrides])
    mesh = build_mesh(c.parallel, join("cpu"))
    training = assemble(c, mesh)
    return Validation(c, training.layout, Texts(27, 12, 24), [], torch.empty(0)).run(training.model, None, 0)["valid_loss"]


@pytest.fixture(scope="module")
def whole():
    """The loss from all logits at once: of 27 samples in batches of 8, of which the last is padded."""
    return ranks(1)(validate, ["model.loss_chunk=0"])[0]


@pytest.mark.parametrize("spec", ["", "train.micro_batch=3", "kernels=triton",
                                  pytest.param("compile=true train.micro_batch=3", marks=pytest.mark.slow),
                                  "model.tied=false model.position=rotary"])
def test_the_loss_in_pieces_is_the_loss(whole, spec):
    if "model" in spec:
        whole, = ranks(1)(validate, ["model.loss_chunk=0", *spec.split()])
    assert ranks(1, 240)(validate, spec.split()) == pytest.approx([whole], rel=1e-12)         # compiling takes a minute


@pytest.mark.parametrize("size, spec", [(2, "tp=2 parallel.sp=true"), (2, "cp=2"), (2, "pp=2"), (2, "dp=2 parallel.zero=true"),
                                        (2, "dp=2 parallel.zero=3"),
                                        *(pytest.param(4, spec, marks=pytest.mark.slow) for spec in (
                                            "cp=2 parallel.tp=2", "pp=2 parallel.tp=2 parallel.sp=true",
                                            "pp=2 parallel.dp=2 parallel.schedule=interleaved parallel.chunks=2",
                                            "cp=2 parallel.pp=2"))])
def test_every_layout_finds_the_same_loss(whole, size, spec):
    overrides = [f"parallel.{spec.split()[0]}", *spec.split()[1:], "train.micro_batch=2"]
    assert ranks(size)(validate, overrides) == pytest.approx([whole] * size, rel=1e-12)


@pytest.mark.parametrize("how", ["root_of_mean", "mean_of_roots"])
def test_the_rmse_is_the_root_of_the_mean_or_the_references(how, small_data):
    c = config.load("vit-demo", [f"data.path={small_data}", "model.grid=[8,16]", "model.dim=16", "model.depth=1",
                                 "data.workers=0", "train.device=cpu", "precision=fp32", f"train.rmse={how}"])
    mesh = build_mesh(c.parallel, World(0, 1, torch.device("cpu")))
    training, quiet = assemble(c, mesh), mock.Mock(speaks=False)
    model = training.model
    validation = Validation.of(c, training.layout)
    found = validation.run(model, quiet, 0)["valid_rmse"]
    batch = validation.pairs.__getitems__(list(range(len(validation.pairs))))
    output = model.fields(forward_only(model, training.layout, "fp32")(batch)[0])
    squares = ((output - batch["target"]).square() * validation.weights[:, None]).mean((-2, -1))        # (B, C)
    expected = squares.mean(0).sqrt() if how == "root_of_mean" else squares.sqrt().mean(0)
    assert list(found.values()) == pytest.approx(expected.tolist(), rel=1e-4)
    assert not torch.allclose(squares.mean(0).sqrt(), squares.sqrt().mean(0), rtol=1e-5)
