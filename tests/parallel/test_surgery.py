"""Models that are unlike the course's own: every layout trains them as one process does, or refuses with a sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from course.ranks.notebook_ranks import RankError, ranks
from course.training import assemble
from course.utils.errors import CourseError

SMALL = ["model.vocab=24", "model.context=8", "model.dim=16", "model.depth=3", "model.heads=4", "train.global_batch=4",
         "train.steps=2", "train.device=cpu", "parallel.bucket_mb=0.01"]
Change = Callable[[Any], None]                      # of a serial GPT on the meta device


def changed(change: Change) -> Callable[..., Any]:
    """What builds the model then."""
    from course.models import build_model

    def build(c: Any, seed: int = 0) -> Any:
        model = build_model(c, seed)
        with torch.device("meta"):
            change(model)
        return model

    return build


def wrong(change: Change, layouts: list[str]) -> dict[str, list[str]]:
    """For each layout what differs from one process: none, if all is well."""
    from unittest import mock

    from course import config
    from course.parallel import join
    from course.training import verify

    found = {}
    for layout in layouts:
        c = config.load("gpt-demo", [*verify.DEFAULTS, *SMALL, *layout.split()])
        with mock.patch("course.training.assemble.build_model", changed(change)):
            found[layout] = [gap.name for gap in verify.compare_in(c, join("cpu")) if gap.wrong]
    return found


def assert_right(change: Change, *layouts: str) -> None:
    found = ranks(2)(wrong, change, layouts)[0]
    assert list(found) == list(layouts) and not any(found.values()), found


def cut(change: Change, layout: str) -> None:
    """The surgery alone, as rank 0 of two."""
    from course import config
    from course.convert.reshard import pretended
    from course.parallel import World, build_mesh, parallelize

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
    with pytest.raises(CourseError, match=r"blocks.0.mlp.up.weight has several uses that need different parts of it"):
        cut(share_an_uncut_weight, TP)


def freeze(model: Any) -> None:
    """The embedding, which is the head's weight too, the first block, and parts of others, cut and whole."""
    for part in (model.embed, model.blocks["0"], model.blocks["1"].attn.qkv, model.blocks["2"].norm1):
        part.requires_grad_(False)


EACH = [f"parallel.dp=2 {more}" for more in ("", "parallel.data=naive", "parallel.data=ddp", "parallel.zero=true",
                                             "parallel.zero=true train.micro_batch=1 train.recompute=full", "parallel.zero=2",
                                             "parallel.zero=3 train.micro_batch=1 train.recompute=full")] + [
    f"{TP} optim.clip=0.05", f"{SP} optim.weight_decay=0.1", f"{SP} parallel.overlap=none train.recompute=selective", CP,
    "parallel.pp=2 train.micro_batch=2"]


def test_what_is_frozen_stays_frozen_in_every_layout():
    assert_right(freeze, *EACH)


def freeze_a_stage(model: Any) -> None:
    """All that the first of two ranks has; the head's weight is another."""
    for part in (model.embed, model.blocks["0"], model.blocks["1"]):
        part.requires_grad_(False)


def test_a_pipelines_stage_may_be_frozen():
    assert_right(freeze_a_stage, f"model.tied=false {EACH[-1]}")


def go_on(folder: Path, layout: str, steps: list[int]) -> tuple[list[float], dict[str, Any]]:
    """Train from the checkpoint that is there, if there is one, and save: losses, and values and averages of what is frozen."""
    from unittest import mock

    from course import config
    from course.checkpoint import checkpoint
    from course.ops.ema import moving_average
    from course.parallel import build_mesh, join
    from course.training import verify

    c = config.load("gpt-demo", [*verify.DEFAULTS, *SMALL, "optim.name=adam", "optim.lr=0.01", "optim.ema=0.5", *layout.split()])
    mesh = build_mesh(c.parallel, join("cpu"))
    with mock.patch("course.training.assemble.build_model", changed(freeze)):
        training = assemble.assemble(c, mesh)
    if found := checkpoint.newest(folder, print, mesh.all):
        checkpoint.load(*found, training.model, training.layout, training.optimizer)
        training.progress.restore(found[1]["state"])
    losses = [verify.one_step(training, number).item() for number in steps]
    checkpoint.save(folder, training.optimizer, training.progress.state() | {"samples": 0}, {}, training.layout)
    average = moving_average(training.optimizer)
    return losses, {training.layout.placements[p].name: (p.detach(), average[p]) for p in training.gradients.optimizer_parameters
                    if not p.requires_grad}


@pytest.mark.parametrize("layout", ["parallel.dp=2 parallel.zero=true", "parallel.dp=2 parallel.zero=3", SP])
def test_checkpoints_hold_what_is_frozen(layout, tmp_path):
    """Two steps in a layout and two in one process: as four in one process. The average of a frozen weight is the weight."""
    whole, _ = go_on(tmp_path / "whole", "", [1, 2, 3, 4])
    first, _ = ranks(2)(go_on, tmp_path / "cut", layout, [1, 2])[0]
    then, values = go_on(tmp_path / "cut", "", [3, 4])
    assert first + then == pytest.approx(whole, rel=1e-9)
    assert "embed.token.weight" in values and all(torch.equal(value, average) for value, average in values.values())


def leave_unused(model: Any) -> None:
    """A parameter that no sample needs, and a map that half of the samples skip."""
    embed, more = model.embed, torch.nn.Linear(16, 16, bias=False)
    embed.mask, embed.more = torch.nn.Parameter(torch.empty(3, 16)), more
    original = embed.forward

    def forward(batch: Any) -> Any:
        x, odd = original(batch), batch["sample"] % 4 == 3
        return x.index_add(0, odd.nonzero()[:, 0], more(x[odd])) if odd.any() else x

    embed.forward = forward


def test_what_got_no_gradient_counts_as_zero_in_every_layout():
    """One rank has the sample that needs the map, or one micro-batch."""
    sgd, adam = "optim.weight_decay=0.1 optim.momentum=0.9", "optim.name=adam optim.lr=0.01"
    assert_right(leave_unused, f"{EACH[0]} {adam}", f"{EACH[1]} {sgd}", f"{EACH[4]} {sgd}", f"{EACH[-1]} {sgd}")



def test_ddp_refuses_what_got_no_gradient():
    with pytest.raises(RankError, match=r"parallel.data=ddp needs a gradient of every parameter .* and embed.mask got none"):
        ranks(2)(wrong, leave_unused, [f"{EACH[2]} train.steps=1"])


def forget(*path: str) -> Change:
    """Another module, that does the same, at the end of a path: no seam."""
    def change(model: Any) -> None:
        for name in path:
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(name)
            bare = torch.nn.Module()
            bare.forward = module.forward
            setattr(model.get_submodule(owner), leaf, bare)

    return change


def plan(**entries: str | None) -> Change:
    """Entries of the plan changed, or left out."""
    def change(model: Any) -> None:
        named = {name.replace("_", ".", 1): style for name, style in entries.items()}
        model.tensor_plan = {name: style for name, style in {**model.tensor_plan, **named}.items() if style}

    return change


CORES = [f"blocks.{i}.attn.core" for i in range(3)]


@pytest.mark.parametrize(("change", "layout", "sentence"), [
    (forget("loss.sum_over_tokens"), CP,
     'GPT has no module whose `seam` is "sum_over_tokens": its loss would count the tokens of one rank alone'),
    (forget(*CORES), CP, 'GPT has no module whose `seam` is "attend": queries would see the keys of one rank alone'),
    (forget(CORES[1]), CP, 'blocks.1.attn has no module whose `seam` is "attend", and others of its kind, GroupedAttention'),
    (forget("head.enter"), TP, 'GPT has no module whose `seam` is "enter": the gradient'),
    (forget("loss.cross_entropy", "head.cross_entropy"), TP, 'GPT has no module whose `seam` is "cross_entropy": the loss'),
    (plan(attn_qvk="column"), TP, '"attn.qvk" in GPT.tensor_plan fits no nn.Linear or nn.Embedding of the model'),
    (plan(attn_qkv=None, attn_out=None), SP, 'calls no linear beside blocks.0.attn.core "column", so with parallel.sp=true'),
])
def test_what_surgery_needs_and_does_not_find_is_a_sentence(change, layout, sentence):
    with pytest.raises(CourseError, match=sentence):
        cut(change, layout)


def without_attention(model: Any) -> None:
    """A block that mixes no tokens, beside others that do."""
    model.blocks["1"].attn = torch.nn.Linear(16, 16)


@pytest.mark.parametrize(("change", "layout"), [
    (forget("loss.sum_over_tokens", *CORES), TP), (forget("loss.sum_over_tokens"), SP), (plan(attn_qkv=None, attn_out=None), TP),
    (without_attention, CP)])
def test_what_surgery_does_not_need_may_be_missing(change, layout):
    """Nothing is cut then that it is about."""
    cut(change, layout)


def untied_whole_head(model: Any) -> None:
    """A vocabulary of which the embedding alone is cut."""
    plan(head_proj=None)(model)
    model.head.proj.weight = torch.nn.Parameter(torch.empty_like(model.head.proj.weight))


def test_what_the_plan_leaves_out_is_computed_whole():
    assert_right(plan(attn_qkv=None, attn_out=None, mlp_up=None, mlp_down=None), TP)
    assert_right(untied_whole_head, TP)


def give_values(model: Any) -> None:
    model.blocks["1"].to_empty(device="cpu")


@pytest.mark.parametrize("layout", ["parallel.dp=2", TP])
def test_a_model_that_has_values_is_refused(layout):
    with pytest.raises(CourseError, match=r"blocks.1.norm1.weight has a value already, and parallelize would lose it: "):
        cut(give_values, layout)
