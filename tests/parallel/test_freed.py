"""A model that nobody holds any more is freed, in every kind of layout: a notebook trains several, one after the other."""

import gc
import weakref

import pytest

from course.config import load
from course.ranks.notebook_ranks import ranks

FEW = ["data.source=mock", "train.global_batch=4", "train.micro_batch=2", "model.dim=32"]


def left_over(settings):
    """What is alive of a training, after a step, when its last name is gone."""
    from course.parallel import World, build_mesh, join
    from course.training.assemble import assemble

    world: World = join("cpu")
    config = load("gpt-demo", [*FEW, *settings])
    training = assemble(config, build_mesh(config.parallel, world))
    training.step(training.model.example(4 // config.parallel.dp, world.device))
    parts = {"model": training.model, "a parameter": next(training.model.parameters()), "the optimizer": training.optimizer,
             "its gradients": training.gradients}
    watched = {name: weakref.ref(part) for name, part in parts.items()}
    del training, parts
    gc.collect()
    return [name for name, part in watched.items() if part() is not None]


@pytest.mark.parametrize("settings", [
    "parallel.dp=2", "parallel.dp=2 parallel.zero=true", "parallel.dp=2 parallel.zero=3",
    "parallel.dp=2 parallel.data=ddp", "parallel.dp=2 parallel.data=naive",
    "parallel.dp=1 parallel.tp=2 parallel.sp=true", "parallel.dp=1 parallel.cp=2", "parallel.dp=1 parallel.pp=2"])
def test_a_model_that_nobody_holds_is_freed(settings):
    assert ranks(2)(left_over, settings.split()) == [[], []]
