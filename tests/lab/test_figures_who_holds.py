"""The pictures of who holds what show what real ranks hold and send."""

import numpy as np
import pytest

from course.lab.figures import who_holds
from course.lab.instruments.forward_trace import Part, trace
from course.ranks.notebook_ranks import ranks

SMALL = ("vit-demo", "model.depth=1", "train.global_batch=4")
MLP = {"norm": "blocks.0.norm2", "up": "blocks.0.mlp.up", "down": "blocks.0.mlp.down", "block": "blocks.0"}
UP, DOWN, QKV = "blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight", "blocks.0.attn.qkv.weight"


@pytest.fixture(scope="module")
def serial():
    return trace(*SMALL)


def found(rank, name, of="parameters"):
    return [part for part in getattr(rank, of) if part.name == name]


@pytest.mark.parametrize(("settings", "events"), [
    (["parallel.tp=2"], ["norm", "up", "all-reduce", "down", "block"]),
    (["parallel.tp=2", "parallel.sp=true"], ["norm", "all-gather", "up", "reduce-scatter", "down", "block"])])
def test_a_tensor_parallel_mlp_shows_its_collectives(serial, settings, events):
    two = ranks(2)(lambda: trace(*SMALL, *settings))
    for rank in two:
        assert [label for label, _ in who_holds.chosen(rank.events, MLP)] == events
    axis, = who_holds.forward(serial, two, MLP).axes
    words = [text.get_text() for text in axis.texts]
    assert "128 × 256" in words and ("64 × 128" in words) == ("parallel.sp=true" in settings)
    assert sum(word.startswith(("all-", "reduce-")) for word in words) == len(events) - 4
    halves = [patch for patch in axis.patches if patch.get_fill() and patch.get_width() == pytest.approx(0.36)
              and patch.get_height() == pytest.approx(0.72)]
    assert [(patch.get_x() - 0.14) % 1 for patch in halves] == pytest.approx([0, 0.36])      # left half and right half


def test_weights_are_cut_by_rows_and_columns_and_qkv_by_heads(serial):
    zero, one = ranks(2)(lambda: trace(*SMALL, "parallel.tp=2"))
    for name, dim in ((UP, 0), (DOWN, 1)):
        first, second = (who_holds.held_share(found(rank, name)) for rank in (zero, one))
        assert np.array_equal(first + second, np.ones_like(first))
        half = first.shape[dim] // 2
        assert first.take(range(half), dim).all() and not first.take(range(half, 2 * half), dim).any()
    rows = who_holds.held_share(found(zero, QKV))[:, 0]
    assert "".join(f"{share:.0f}" for share in rows) == 3 * (8 * "1" + 8 * "0")
    assert who_holds.held_share(found(serial, UP)).min() == 1


def test_optimizer_states_are_whole_on_each_rank_or_once_with_zero():
    def states(*settings):
        return [rank.states for rank in ranks(4)(lambda: trace(*SMALL, "parallel.dp=4", *settings))]

    for held, copies in ((states(), 4), (states("parallel.zero=1"), 1)):
        for name in (UP, DOWN, QKV, "blocks.0.norm1.bias"):
            shares = [who_holds.held_share(parts).mean() for rank in held if (parts := [p for p in rank if p.name == name])]
            assert sum(shares) == pytest.approx(copies)


def test_a_ring_sends_to_its_neighbor_in_every_round(serial):
    four = ranks(4)(lambda: trace(*SMALL, "parallel.cp=4", "parallel.context=ring"))
    names = {"qkv": "blocks.0.attn.qkv", "core": "blocks.0.attn.core"}
    for number, rank in enumerate(four):
        labels = [label for label, _ in who_holds.chosen(rank.events, names)]
        assert labels == ["qkv", *3 * [f"send to {(number + 1) % 4}"], "core"]
    assert len(who_holds.forward(serial, four, names).axes[0].patches) == 4 * 2 * 2          # two activations a rank


def test_a_flat_part_of_a_box_is_its_elements_in_order():
    part = Part("w", (4, 6), ((0, 4), (0, 3)), (4, 8))
    assert who_holds.held_share([part]).tolist() == [[0] * 6, [0, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0] * 6]


def test_a_large_tensor_becomes_a_small_picture_of_shares():
    share = who_holds.held_share([Part("w", (960, 30), ((0, 490), (0, 30)))])
    assert share.shape == (48, 30) and share.mean() == pytest.approx(490 / 960)


def test_parameters_have_a_row_for_each_rank():
    figure = who_holds.parameters(ranks(2)(lambda: trace(*SMALL, "parallel.tp=2")), {"up": UP, "down": DOWN}, title="t")
    assert [axis.get_xlabel() for axis in figure.axes] == 4 * ["50%"]
