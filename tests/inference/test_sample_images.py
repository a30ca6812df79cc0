"""From digits on disk to a labeled picture: training with validation, `course generate`, and whether digits are recognized."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from typer.testing import CliRunner

from course import config
from course.cli.main import app
from course.data.latents import shards
from course.data.latents.digits import make_digits
from course.inference import sample_images
from course.inference.diffusion_sampler import SamplerSettings
from course.ranks.notebook_ranks import ranks
from course.training import trainer
from course.training.run_log import read_metrics
from course.utils.errors import CourseError

TINY = ["model.objective=epsilon", "model.dim=16", "model.depth=1", "model.heads=2", "train.steps=3", "train.global_batch=8",
        "train.eval_every=2", "train.device=cpu", "log.tensorboard=false", "log.every=1", "optim.ema=0.5", "optim.warmup=0",
        "optim.lr=0.05"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A DiT that has seen a few digits."""
    folder = tmp_path_factory.mktemp("digits")
    make_digits(folder / "data")
    return trainer.main(config.load("dit-digits", [*TINY, f"data.path={folder}/data", f"log.dir={folder}/runs"]))


def generate(*arguments):
    result = CliRunner().invoke(app, ["generate", *map(str, arguments)])
    return result.output, result.exception


def test_latents_are_decoded_with_the_numbers_that_they_were_packed_with(run, monkeypatch):
    """Those of the run's data; where that is gone, the VAE's own."""
    vae = SimpleNamespace(config=SimpleNamespace(scaling_factor=0.25, shift_factor=0.5), to=lambda device: None,
                          decode=lambda x: SimpleNamespace(sample=x))
    monkeypatch.setattr(sample_images, "load_vae", lambda name: vae)
    c, x = config.load(str(run / "config.yaml")), torch.full((1, 3, 2, 2), 0.1)
    assert sample_images.latent_scale_and_shift(c) == (1 / 8, 0.0)
    torch.testing.assert_close(sample_images.Decoder("a", *sample_images.latent_scale_and_shift(c))(x), (x * 8 + 1) / 2)
    gone = replace(c, data=replace(c.data, path="/nowhere"))
    assert sample_images.latent_scale_and_shift(gone) == (None, None)
    torch.testing.assert_close(sample_images.Decoder("a", *sample_images.latent_scale_and_shift(gone))(x),
                               ((x / 0.25 + 0.5 + 1) / 2).clamp(0, 1))


def test_validation_is_the_loss_alone(run):
    records = read_metrics(run / "metrics.jsonl")
    assert [record["step"] for record in records if "valid_loss" in record] == [2, 3]
    assert 0.3 < records[-1]["valid_loss"] < 3 and "valid_rmse" not in records[-1]


@pytest.mark.slow
def test_validation_is_the_same_mean_over_every_sample_in_any_layout(run):
    """299 samples in batches of 8: the last is padded."""
    from course.ranks.notebook_ranks import ranks

    def validate(overrides: list[str]) -> float:
        from unittest import mock

        from course.parallel import build_mesh, join
        from course.training.assemble import assemble
        from course.training.validation import Validation

        c = config.load("dit-digits", [*TINY, "precision=fp64", "model.depth=2", f"data.path={run.parents[2]}/data", *overrides])
        mesh = build_mesh(c.parallel, join("cpu"))
        with mock.patch("course.models.DiT.init_plan", lambda model: {"*": 0.2}):       # without zeros
            training = assemble(c, mesh)
        found = Validation.of(c, training.layout).run(training.model, None, 0)
        assert found.keys() == {"valid_loss"}
        return found["valid_loss"]

    alone, = ranks(1)(validate, [])
    for layout in (["parallel.dp=2"], ["parallel.tp=2", "parallel.sp=true"], ["parallel.pp=2", "train.micro_batch=4"]):
        assert ranks(2)(validate, layout) == pytest.approx([alone] * 2, rel=1e-12), layout
    assert alone > 0.3


def test_generate_draws_a_labeled_grid_and_keeps_the_samples(run):
    said, error = generate(run, "--labels", "3,0,7", "--each", 2, "--steps", 4, "--seed", 5)
    assert error is None and "6 samples of the model of step 3" in said
    samples, labels = (np.load(run / "samples" / f"{name}.npy") for name in ("samples", "labels"))
    assert samples.shape == (6, 1, 8, 8) and samples.dtype == np.float32 and labels.tolist() == [3, 3, 0, 0, 7, 7]
    assert (run / "samples" / "samples.png").read_bytes().startswith(b"\x89PNG")
    assert generate(run, "--labels", "3,0,7", "--each", 2, "--steps", 4, "--seed", 5, "--batch", 4)[1] is None
    np.testing.assert_allclose(np.load(run / "samples" / "samples.npy"), samples, rtol=0, atol=1e-4)
    for change in (["--seed", 6], ["--guidance", 1], ["--no-ema"], ["--eta", 1]):
        assert generate(run, "--labels", "3,0,7", "--each", 2, "--steps", 4, "--seed", 5, *change)[1] is None
        assert not np.allclose(np.load(run / "samples" / "samples.npy"), samples, atol=1e-3), change


def test_of_many_samples_the_picture_shows_some_and_says_so(run, monkeypatch):
    grids = []
    monkeypatch.setattr(sample_images, "grid", lambda images, labels, each: grids.append((len(images), labels, each)) or Figure())
    monkeypatch.setattr(sample_images, "ROWS", 2)
    said, error = generate(run, "--labels", "3,0,7", "--each", 20, "--steps", 1)
    *_, picture, proposed = said.splitlines()
    assert error is None and picture.endswith("samples.png, 16 of each of 2 labels")
    assert proposed == f"next: course generate {run} --seed 1 --guidance 1"
    assert grids == [(32, [3, 0], 16)] and np.load(run / "samples" / "samples.npy").shape[0] == 60


def test_the_grid_has_a_row_for_each_label():
    images = np.linspace(0, 1, 6)[:, None, None, None] * np.ones((6, 1, 4, 4))
    axes = sample_images.grid(images, [5, 9], 3).axes
    assert [axis.get_ylabel() for axis in axes] == ["5", "", "", "9", "", ""]
    assert [axis.images[0].get_array().mean() for axis in axes] == pytest.approx(np.linspace(0, 1, 6).tolist())


def test_images_are_grey_for_one_channel_and_colors_for_more():
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0]).view(1, 4, 1, 1)
    assert sample_images.to_images(x).flatten().tolist() == [0, 0,
                                                             0.5] and sample_images.to_images(x[:, 3:]).flatten().tolist() == [1]


@pytest.mark.parametrize(("arguments", "words"), [
    (["--labels", "3,10"], "this model has the labels 0 to 9"), (["--labels", "x"], "give whole numbers from 0"),
    (["--sampler", "euler"], "euler does not fit"), (["--sampler", "dddim"], "sampler=dddim"),
    (["--steps", "0"], "takes 1 to 1000"), (["--guidance", "nan"], "guidance=nan would make"),
    (["--guidance", "inf"], "guidance=inf would make"),
    (["--channels", "2"], "guidance of 2 channels: the model has 1"), (["--vae", "x"], "needs the package diffusers")])
def test_what_cannot_be_drawn_is_a_sentence(run, arguments, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    _, error = generate(run, *arguments)
    assert isinstance(error, CourseError) and words in str(error)


def test_other_runs_are_a_sentence(tmp_path, run, monkeypatch):
    from course.inference import forecast_scores

    with monkeypatch.context() as patch:
        patch.setattr(sample_images, "load_model", lambda *_: (torch.nn.Linear(1, 1), 1))
        with pytest.raises(CourseError, match=r"has your own model, Linear, .* derive it from course\.models\.DiT"):
            sample_images.sample_run(run, [0], 1, SamplerSettings())

    config.save(config.load("vit-demo"), tmp_path / "config.yaml")
    with pytest.raises(CourseError, match="is of a model of kind vit: only a DiT draws"):
        sample_images.sample_run(tmp_path, [0], 1, SamplerSettings())
    with pytest.raises(CourseError, match="forecasts nothing: draw its samples with `course generate"):
        forecast_scores.score_run(run)


@pytest.mark.slow
def test_a_laptop_learns_digits_that_a_classifier_recognizes(tmp_path):
    """The preset at half its length. A support vector machine, trained on the real digits, recognizes the drawn ones."""
    from sklearn.svm import SVC

    make_digits(tmp_path / "data")
    run = trainer.main(config.load("dit-digits", [f"data.path={tmp_path}/data", f"log.dir={tmp_path}/runs", "train.device=cpu",
                                                "train.steps=750", "log.tensorboard=false"]))
    sample_images.sample_run(run, list(range(10)), 40, SamplerSettings(guidance=2.0))
    samples, labels = (np.load(run / "samples" / f"{name}.npy") for name in ("samples", "labels"))
    real = {split: shards.Latents(str(tmp_path / "data"), split, (1, 8, 8), 10) for split in ("train", "valid")}
    batches = {split: data.__getitems__(list(range(len(data)))) for split, data in real.items()}
    judge = SVC().fit(batches["train"]["latent"].flatten(1), batches["train"]["label"])
    assert judge.score(batches["valid"]["latent"].flatten(1), batches["valid"]["label"]) > 0.95
    share = judge.score(samples.reshape(len(samples), -1), labels)
    print(json.dumps({"recognized": share, "valid_loss": read_metrics(run / "metrics.jsonl")[-1]["valid_loss"]}))
    assert share >= 0.8
    spread = np.array([samples[labels == k].std(0).mean() for k in range(10)])
    truth = np.array([batches["train"]["latent"][batches["train"]["label"] == k].std(0).mean() for k in range(10)])
    assert (spread > 0.3 * truth).all()              # not one picture of each


def on_ranks(folder, *more):
    """A run of a tiny DiT on these ranks."""
    from course.parallel import build_mesh, join
    from course.training.assemble import assemble
    from course.training.trainer import fit, run_folder

    c = config.load("dit-demo", ["train.steps=2", "train.device=cpu", "train.global_batch=4", "log.tensorboard=false",
                                 "precision=fp64", "optim.ema=0.9", f"log.dir={folder}", *more])
    fit(assemble(c, build_mesh(c.parallel, join("cpu"))))
    return run_folder(c)


@pytest.mark.parametrize("layout", ["pp=2", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("tp=2", "cp=2"))])
def test_a_run_of_any_layout_draws_what_one_process_would(layout, tmp_path):
    run, _ = ranks(2)(on_ranks, tmp_path / "two", f"parallel.{layout}", "train.micro_batch=2")
    alone, = ranks(1)(on_ranks, tmp_path / "one")
    for folder in (run, alone):
        sample_images.sample_run(folder, [0, 1], 1, SamplerSettings(steps=3))
    two, one = (np.load(folder / "samples" / "samples.npy") for folder in (run, alone))
    np.testing.assert_allclose(two, one, rtol=1e-6, atol=1e-6)          # written in float32
