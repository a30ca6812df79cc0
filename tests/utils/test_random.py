from dataclasses import replace

import numpy as np
import pytest
import torch

from course.lab.instruments.tensor_memory import MemoryMeter
from course.models import ViTConfig, build_model
from course.parallel import Placement, initialize_serial
from course.parallel.initialize import first_value
from course.utils import random
from course.utils.errors import CourseError


def test_uniform_is_uniform_and_open():
    for dtype in (torch.float32, torch.float64):
        u = random.uniform(random.key(1, "u"), torch.arange(200_000), dtype)
        assert u.min() > 0 and u.max() < 1
        counts = torch.histc(u.double(), 50, 0, 1)
        assert ((counts - 4000).square() / 4000).sum() < 49 + 5 * 98**0.5          # chi-square, five sigma


def test_uniform_reaches_neither_end_even_for_extreme_bits():
    whole = torch.tensor([0, 2**23 - 1])
    assert ((whole.float() + 0.5) * 2.0**-23 < 1).all()


def test_normal_has_the_right_moments():
    x = random.normal(random.key(2, "n"), torch.arange(400_000), torch.float64)
    assert abs(x.mean()) < 0.01 and abs(x.var() - 1) < 0.01 and abs(x.pow(4).mean() - 3) < 0.1


def test_neighboring_keys_and_counters_are_unrelated():
    n = torch.arange(50_000)
    streams = [random.normal(random.key(seed, "w"), n) for seed in range(4)] + [random.normal(random.key(0, "w"), n + 1)]
    assert (torch.corrcoef(torch.stack(streams)) - torch.eye(5)).abs().max() < 0.025


def test_known_values_never_change():
    """A run of last year resumes only if these stay."""
    assert random.key(0, "weights", "a") == random.key(0, "weights", "a") != random.key(0, "weights", "b")
    assert random.fold(5, torch.arange(3)).tolist() == KNOWN


KNOWN = [-5278393320434088484, 7134611160154358618, -4569129087685675272]


def test_key_distinguishes_how_its_parts_are_cut():
    assert random.key("ab", "c") != random.key("a", "bc") != random.key("a", 1) != random.key("a", "1")


def test_permutation_is_one():
    order = random.permutation(random.key(3, "epoch", 0), 1000)
    assert sorted(order) == list(range(1000)) and not np.array_equal(order, np.arange(1000))


def test_a_box_draws_what_the_whole_has_there():
    whole = random.element_index((5, 4, 3), ((0, 5), (0, 4), (0, 3)), torch.device("cpu"))
    assert torch.equal(whole.flatten(), torch.arange(60))
    part = random.element_index((5, 4, 3), ((1, 4), (2, 4), (0, 2)), torch.device("cpu"))
    assert torch.equal(part, whole[1:4, 2:4, 0:2])


def make(seed=7, depth=2):
    made = build_model(ViTConfig(grid=(8, 16), patch=2, dim=32, depth=depth, heads=4))
    return initialize_serial(made, seed, torch.device("cpu"))


@pytest.fixture
def model():
    return make()


def test_initialize_follows_the_plan(model):
    parameters = dict(model.named_parameters())
    assert not any(p.is_meta for p in parameters.values())
    assert (parameters["blocks.0.norm1.weight"] == 1).all() and (parameters["blocks.1.mlp.up.bias"] == 0).all()
    assert parameters["blocks.0.mlp.up.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(parameters["blocks.0.mlp.up.weight"], parameters["blocks.1.mlp.up.weight"])


def test_initialize_is_a_function_of_seed_and_name(model):
    deeper = dict(model.named_parameters())
    for name, p in make(depth=1).named_parameters():                            # another depth: the same weights by name
        assert torch.equal(p, deeper[name])
    assert not torch.equal(make(seed=8).embed.proj.weight, model.embed.proj.weight)


def test_parameters_stay_the_objects_that_they_were():
    """So that whoever knows one by its identity, such as a layout, knows it before and after."""
    model = build_model(ViTConfig(grid=(8, 16), patch=2, dim=32, depth=1, heads=4))
    before = list(model.parameters())
    initialize_serial(model, 7, torch.device("cpu"))
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert not any(p.is_meta for p in before)


@pytest.mark.parametrize("flat", [(0, 5), (7, 100), (100, 100), (0, 384)])
def test_a_flat_range_of_a_box_is_drawn_alone(flat):
    """What a rank of fully sharded training has: the same numbers, and no more memory than for these."""
    box = ((0, 3), (1, 3), (0, 8), (4, 12))
    where = Placement("blocks.0.attn.qkv.weight", (3, 4, 8, 16), box)
    whole = first_value(0.02, random.key(7, "weights", where.name), where, torch.device("cpu"))
    with MemoryMeter() as meter:
        part = first_value(0.02, random.key(7, "weights", where.name), replace(where, flat=flat), torch.device("cpu"))
    assert torch.equal(part, whole.flatten()[slice(*flat)])
    assert meter.peak <= 200 * max(1, flat[1] - flat[0])


def test_what_cannot_be_given_a_first_value_is_named():
    """No layout cuts a buffer and no checkpoint has it; a parameter needs a rule."""
    model = build_model(ViTConfig(depth=1))
    model.embed.register_buffer("scale", torch.ones(3))
    with pytest.raises(CourseError, match=r"ViT has a buffer, embed\.scale.* compute it in forward, or make it a parameter"):
        initialize_serial(model, 0, torch.device("cpu"))
    bare = build_model(ViTConfig(depth=1))
    bare.init_plan = lambda: {"head*": 0.02}
    with pytest.raises(CourseError, match=r"no rule in ViT\.init_plan\(\) fits parameter embed\..*: add one, such as 'embed\."):
        initialize_serial(bare, 0, torch.device("cpu"))


def test_a_model_that_is_none_of_the_courses_is_not_taken_for_a_vit():
    class DuoConfig:
        kind = "duo"

    with pytest.raises(CourseError, match=r"build_model knows no DuoConfig: register its model .*contributors\.md"):
        build_model(DuoConfig())
