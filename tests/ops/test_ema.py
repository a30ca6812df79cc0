"""The moving average of the weights: its formula, skipped steps, every layout, checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from course import config
from course.checkpoint import checkpoint
from course.inference.forecast_scores import load_model
from course.ops.ema import moving_average
from course.parallel import build_mesh, join, serial_placements
from course.ranks.notebook_ranks import ranks
from course.training.assemble import assemble
from course.utils.errors import CourseError

SMALL = ["model.latent=[3,6,6]", "model.classes=4", "model.dim=16", "model.depth=2", "model.heads=4", "data.source=mock",
         "optim.lr=0.1", "optim.warmup=0", "optim.clip=0", "optim.ema=0.75", "train.device=cpu", "train.global_batch=8",
         "train.steps=4", "parallel.bucket_mb=0.01"]
LAYOUTS = {"dp=2": ["parallel.dp=2"], "dp=2 zero": ["parallel.dp=2", "parallel.zero=true"],
           "dp=2 fsdp": ["parallel.dp=2", "parallel.zero=3"],
           "tp=2": ["parallel.tp=2", "parallel.sp=true"], "pp=2": ["parallel.pp=2", "train.micro_batch=4"]}


def build(*overrides: str) -> Any:
    c = config.load("dit-demo", [*SMALL, *overrides])
    return assemble(c, build_mesh(c.parallel, join("cpu")))


def one_step(training: Any, number: int, poison: float = 0.0) -> None:
    mesh, dtype = training.mesh, next(training.model.parameters()).dtype
    here = 8 // mesh.dp.size
    batch = training.model.example(here, torch.device("cpu"), 8 * number + here * mesh.dp.rank)
    batch["latent"] = batch["latent"].to(dtype) + poison
    training.step(batch)
    training.gradients.wait_parameters()


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_the_average_follows_the_weights_by_its_formula_and_not_in_a_skipped_step(name):
    training = build("precision=fp64", f"optim.name={name}", "optim.lr=0.01")
    average = moving_average(training.optimizer)
    expected = {p: p.detach().clone() for p in training.model.parameters()}
    for number, poison in enumerate([0.0, 0.0, float("nan"), 0.0]):
        before = [value.clone() for value in average.values()]
        one_step(training, number, poison)
        if poison == poison:
            expected = {p: 0.75 * value + 0.25 * p.detach() for p, value in expected.items()}
        moved = [not torch.equal(a, b) for a, b in zip(before, average.values(), strict=True)]
        assert any(moved) == (poison == poison)
        for p, value in expected.items():
            torch.testing.assert_close(average[p], value, rtol=1e-14, atol=1e-14)
    assert training.progress.skipped_steps == 1
    assert any((average[p] - p).abs().max() > 1e-4 for p in expected)


def test_following_leaves_weights_and_gradients_alone():
    """With the average and without: the same weights to the bit."""
    with_it, without = build(), build("optim.ema=0")
    for number in range(3):
        one_step(with_it, number)
        one_step(without, number)
    for a, b in zip(with_it.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert moving_average(without.optimizer) == {}


def train_and_save(folder: str, overrides: list[str], steps: int = 3) -> None:
    """Some steps in a layout, from its newest checkpoint if there is one; and a checkpoint."""
    training = build("precision=fp64", "optim.name=adam", "optim.lr=0.01", *overrides)
    found = checkpoint.newest(Path(folder), print)
    start = 0
    if found:
        checkpoint.load(*found, training.model, training.layout, training.optimizer)
        training.progress.restore(found[1]["state"])
        start = found[1]["state"]["step"]
    for number in range(start, start + steps):
        one_step(training, number)
    checkpoint.save(Path(folder), training.optimizer, training.progress.state() | {"samples": 0}, {}, training.layout)


def saved(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    """All averages of a checkpoint, whole."""
    at = folder / f"step_{steps:06d}"
    index = checkpoint.read_index(at)
    return checkpoint.read_named(at, index, [name for name in index["tensors"] if name.endswith(".ema")])


def assert_equal(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == other.keys() and mine
    for name, value in other.items():
        assert (mine[name] - value).abs().max().item() < 1e-12, name


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "dp=2 zero" else pytest.mark.slow) for name in LAYOUTS])
def test_every_layout_has_the_serial_average_and_goes_on_with_it(name, tmp_path):
    """Saved by each layout after three steps; and after three more in one process, and the other way round."""
    size = 2
    for folder, plan in {"serial": [(1, []), (1, [])], "apart": [(size, LAYOUTS[name]), (1, [])],
                         "together": [(1, []), (size, LAYOUTS[name])]}.items():
        for count, overrides in plan:
            ranks(count)(train_and_save, str(tmp_path / folder), overrides)
    serial = {steps: saved(tmp_path / "serial", steps) for steps in (3, 6)}
    assert len(serial[3]) == sum(1 for _ in build().model.parameters())
    assert max((serial[3][key] - value).abs().max().item() for key, value in serial[6].items()) > 1e-3
    for folder in ("apart", "together"):
        for steps in (3, 6):
            assert_equal(saved(tmp_path / folder, steps), serial[steps])


def test_zero_keeps_the_average_of_its_share_alone(tmp_path):
    def bytes_of_average(overrides: list[str]) -> int:
        training = build(*overrides)
        assert all(value.dtype == torch.float32 for value in moving_average(training.optimizer).values())
        return sum(value.nbytes for value in moving_average(training.optimizer).values())

    whole, = ranks(1)(bytes_of_average, [])
    parts = ranks(2)(bytes_of_average, ["parallel.dp=2", "parallel.zero=true", "precision=bf16"])
    assert sum(parts) == whole and max(parts) < 0.6 * whole


def test_a_run_resumes_its_average_and_is_evaluated_with_it(tmp_path):
    from course.training import trainer

    run = ["log.tensorboard=false", "log.every=1", "optim.lr=0.01", *(s for s in SMALL if "lr=" not in s)]
    for name, parts in {"whole": [4], "parts": [2, 4]}.items():
        for steps in parts:
            trainer.main(config.load("dit-demo", [*run, f"log.dir={tmp_path}", f"log.name={name}", "optim.schedule=constant",
                                                f"train.steps={steps}"]))
    whole, parts = (saved(tmp_path / "dit-demo" / name / "checkpoints", 4) for name in ("whole", "parts"))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    folder = tmp_path / "dit-demo" / "whole"
    settings = config.load(str(folder / "config.yaml"))
    last, average = (load_model(folder, settings, torch.device("cpu"), average)[0] for average in (False, True))
    for p, q in zip(last.parameters(), average.parameters(), strict=True):
        name = f"{serial_placements(average)[q].name}.ema"
        assert torch.equal(q.reshape(whole[name].shape), whole[name]) and not torch.equal(p, q)


def test_what_a_checkpoint_lacks_is_a_sentence_or_starts_at_the_weights(tmp_path):
    without = build("optim.ema=0")
    one_step(without, 0)
    path = checkpoint.save(tmp_path, without.optimizer, {**without.progress.state(), "samples": 8}, {}, without.layout)
    index = checkpoint.read_index(path)
    with pytest.raises(CourseError, match=r"has no moving average of the weights: train with optim.ema"):
        checkpoint.load(path, index, without.model, without.layout, average=True)
    follower = build()
    checkpoint.load(path, index, follower.model, follower.layout, follower.optimizer)
    assert all(torch.equal(p, value) for p, value in moving_average(follower.optimizer).items())


def test_an_average_nobody_follows_is_not_carried_on(tmp_path):
    """A run that goes on without optim.ema does not save an old average as if it were its own."""
    with_it = build()
    one_step(with_it, 0)
    path = checkpoint.save(tmp_path / "a", with_it.optimizer, {**with_it.progress.state(), "samples": 8}, {}, with_it.layout)
    without = build("optim.ema=0")
    checkpoint.load(path, checkpoint.read_index(path), without.model, without.layout, without.optimizer)
    again = checkpoint.save(tmp_path / "b", without.optimizer, {**without.progress.state(), "samples": 8}, {}, without.layout)
    assert not [name for name in checkpoint.read_index(again)["tensors"] if name.endswith(".ema")]
