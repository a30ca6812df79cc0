"""Whole weights from the parts that ranks hold: who works on which, and parts that do not make up a weight."""

from dataclasses import replace

import pytest
import torch

from course import config
from course.parallel import build_mesh, join
from course.parallel.whole_weights import Part, WholeWeights, assemble, check_complete, choose_workers, cut
from course.training import assemble as training
from course.utils.errors import CourseError

WHOLE = ((0, 6), (0, 4))
LEFT, RIGHT = ((0, 6), (0, 2)), ((0, 6), (2, 4))
COMPLETE = [[Part(WHOLE, 0, 24)], [Part(WHOLE, 0, 10), Part(WHOLE, 10, 24)], [Part(LEFT, 0, 12), Part(RIGHT, 0, 12)],
            [Part(LEFT, 0, 5), Part(LEFT, 5, 12), Part(RIGHT, 0, 12)]]
SENTENCE = r"optim.name=muon needs blocks.0.mlp.up.weight whole, and the ranks' parts do not make it up: use "


@pytest.mark.parametrize("parts", COMPLETE)
def test_a_weight_is_put_together_from_its_parts(parts):
    whole = torch.arange(24).view(6, 4)
    check_complete("weight", (6, 4), parts[::-1])
    assert torch.equal(assemble((6, 4), [(part, cut(whole, part)) for part in parts[::-1]]), whole)


@pytest.mark.parametrize("parts", [
    [], [Part(WHOLE, 0, 10)], [Part(WHOLE, 1, 24)], [Part(WHOLE, 0, 10), Part(WHOLE, 12, 24)],
    [Part(WHOLE, 0, 14), Part(WHOLE, 10, 20)], [Part(WHOLE, 0, 10), Part(WHOLE, 6, 20)], [Part(LEFT, 0, 12)],
    [Part(LEFT, 0, 12), Part(((0, 6), (1, 3)), 0, 12)], [Part(LEFT, 0, 12), Part(RIGHT, 0, 11)],
    [Part(WHOLE, 0, 24), Part(LEFT, 0, 12)]])
def test_parts_that_make_no_whole_weight_are_a_sentence(parts):
    with pytest.raises(CourseError, match=SENTENCE):
        check_complete("blocks.0.mlp.up.weight", (6, 4), parts)


def test_a_rank_without_the_rest_of_a_weight_is_a_sentence():
    c = config.load("vit-demo", ["model.depth=1", "data.source=mock", "train.device=cpu"])
    built = training.assemble(c, build_mesh(c.parallel, join("cpu")))
    weight, placements = built.model.get_parameter("blocks.0.mlp.up.weight"), built.layout.placements
    WholeWeights([weight], built.layout, torch.float32)
    placements[weight] = replace(placements[weight], flat=(0, 100))
    with pytest.raises(CourseError, match=SENTENCE):
        WholeWeights([weight], built.layout, torch.float32)


def test_who_alone_holds_weights_gets_fewer_of_the_shared_ones():
    """As with stage 3 on two ranks: one has QKV and the output, the other the MLP's end, both a part of its beginning."""
    shapes: dict[str, tuple[int, ...]] = {}
    holders: dict[str, dict[int, Part]] = {}
    held = (("qkv", (3, 2, 4, 8), [0]), ("out", (8, 8), [0]), ("up", (32, 8), [0, 1]), ("down", (8, 32), [1]))
    for block in range(4):
        for name, shape, ranks in held:
            shapes[f"{block}.{name}"] = shape
            holders[f"{block}.{name}"] = {rank: Part(((0, 1),), rank, rank + 1) for rank in ranks}
    workers = choose_workers(shapes, holders)
    assert all(workers[name] in holders[name] for name in shapes)
    elements = [sum(torch.Size(shapes[name]).numel() for name in shapes if workers[name] == rank) for rank in (0, 1)]
    assert elements == [4 * 6 * 8 * 8] * 2
