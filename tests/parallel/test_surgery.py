"""Models that are unlike the course's own: every layout trains them as one process does, or refuses with a sentence."""

from collections.abc import Callable
from typing import Any

import pytest

from course.errors import CourseError
from course.launch import ranks

SMALL = ["model.vocab=24", "model.context=8", "model.dim=16", "model.depth=3", "model.heads=4", "train.global_batch=4",
         "train.steps=2", "train.device=cpu", "parallel.bucket_mb=0.01"]
Change = Callable[[Any], None]                      # of a serial GPT on the meta device


def changed(change: Change) -> Callable[..., Any]:
    """What builds the model then."""
    from course.models import build_model

    def build(c: Any, seed: int = 0) -> Any:
        model = build_model(c, seed)
        change(model)
        return model

    return build


def wrong(change: Change, layouts: list[str]) -> dict[str, list[str]]:
    """For each layout what differs from one process: none, if all is well."""
    from unittest import mock

    from course import config, verify
    from course.parallel import join

    found = {}
    for layout in layouts:
        c = config.load("gpt-demo", [*verify.DEFAULTS, *SMALL, *layout.split()])
        with mock.patch("course.train.build_model", changed(change)):
            found[layout] = [gap.name for gap in verify.compare_in(c, join("cpu")) if gap.wrong]
    return found


def assert_right(change: Change, *layouts: str) -> None:
    found = ranks(2)(wrong, change, layouts)[0]
    assert list(found) == list(layouts) and not any(found.values()), found


def cut(change: Change, layout: str) -> None:
    """The surgery alone, as rank 0 of two."""
    from course import config
    from course.parallel import World, build_mesh, parallelize
    from course.reshard import pretended

    c = config.load("gpt-demo", [*SMALL, *layout.split()])
    with pretended(0, 2):
        parallelize(changed(change)(c.model), build_mesh(c.parallel, World(0, 2)), c.parallel)


TP, SP, CP = "parallel.tp=2", "parallel.tp=2 parallel.sp=true", "parallel.cp=2"


def share_linears(model: Any) -> None:
    """One linear in two blocks."""
    model.blocks["2"].mlp.up, model.blocks["2"].mlp.down = model.blocks["0"].mlp.up, model.blocks["0"].mlp.down


def share_attention(model: Any) -> None:
    """The seam, once in two blocks."""
    model.blocks["2"].attn.core = model.blocks["0"].attn.core


def test_what_two_blocks_share_is_replaced_in_both():
    assert_right(share_linears, TP, SP)
    assert_right(share_attention, CP)


def share_an_uncut_weight(model: Any) -> None:
    """The weight of a linear that the plan cuts, in one that it does not name."""
    model.head.more, model.head.more.weight = type(model.head.proj)(64, 16), model.blocks["0"].mlp.up.weight


def test_a_weight_of_which_two_uses_need_different_parts_is_refused():
    with pytest.raises(CourseError, match=r"blocks.0.mlp.up.weight has several uses, and head.more.weight needs another part of it"):
        cut(share_an_uncut_weight, TP)
