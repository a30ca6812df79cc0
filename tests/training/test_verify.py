"""`course verify`: equal layouts pass, a mistake is named with its first step and the parameter that differs most."""

import re
from dataclasses import replace
from unittest import mock

import pytest
import torch

from course import config
from course.parallel import World, build_mesh
from course.ranks.notebook_ranks import ranks
from course.training import verify
from course.training.step import split_microbatches
from course.utils.errors import CourseError

SMALL = ["model.grid=[8,16]", "model.channels=3", "model.patch=4", "model.dim=16", "model.depth=2", "model.heads=4",
         "train.device=cpu"]


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_an_equal_layout(precision, capsys):
    assert verify.main("vit-demo", [*SMALL, "parallel.tp=2", "parallel.sp=true", f"precision={precision}"])
    said = capsys.readouterr().out
    assert "equal: this layout trains as one process does" in said and "step 3:" in said


def test_the_last_digit_of_what_hardly_moved():
    start = torch.tensor([0.5, -0.1], dtype=torch.float64)
    assert verify.resolution(start + 0.1, start) == verify.EXACT == verify.resolution(start, start)
    here = start + 1e-8                             # a head that starts at 0 hardly moves the blocks at first
    there = torch.nextafter(here, start)            # a sum that rounded the other way: one of a million weights does
    bound, size = verify.resolution(here, start), verify.gap(there, here, verify.change(here, start))
    assert verify.EXACT < size < bound < 10 * size


@pytest.mark.parametrize(("settings", "worst"), [("precision=fp64", "head.proj.bias"), ("optim.lr=1e-3", "head.proj.bias"),
                                                 ("precision=bf16", "blocks.1.norm1.weight")])
def test_a_mistake_is_named_by_what_differs_most(settings, worst, capsys):
    settings = config.load("vit-demo", [*verify.DEFAULTS, *SMALL, "parallel.tp=2", "parallel.sp=true", settings])

    def forgetful(settings):                        # with sequence parallelism norms and the head see a rank's own tokens
        with mock.patch("course.parallel.data_parallel.gradients.add_partial_gradients", lambda *_: None):
            return verify.compare(settings)

    assert not verify.tell(settings, ranks(2)(forgetful, settings)[0])
    said = capsys.readouterr().out
    assert "DIFFERENT from step 1 on" in said and f"worst {worst}" in said
    sizes = [float(size) for size in re.findall(r"\((\d\.\de[+-]\d+)\)", said.partition("worst ")[2])]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("setting", "words"), [("parallel.tp=3", "parallel.tp=3 does not divide the 4 heads"),
                                                ("train.global_batch=3 parallel.dp=2", "train.global_batch=3 is not divisible")])
def test_a_layout_that_is_refused_is_a_sentence(setting, words):
    with pytest.raises(CourseError, match=words):
        verify.main("vit-demo", [*SMALL, *setting.split()])


def test_one_process_is_not_compared_with_itself():
    with pytest.raises(CourseError, match=r"name a layout, such as parallel.tp=2"):
        verify.main("vit-demo", SMALL)


@pytest.mark.parametrize(("settings", "said"), [(["parallel.zero=2"], "cp=1 tp=1 zero=2 against"), ([], "cp=1 tp=1 against")])
def test_the_layout_that_was_compared_is_named(settings, said, capsys):
    settings = config.load("vit-demo", [*verify.DEFAULTS, "parallel.dp=2", *settings])
    assert verify.tell(settings, [verify.Gap(1, name, 0.0, 1e-2) for name in ("loss", "a")])
    assert said in capsys.readouterr().out


def test_a_nan_is_different():
    assert verify.Gap(1, "x", float("nan"), 1.0).wrong and not verify.Gap(1, "x", 0.5, 1.0).wrong
    assert not verify.Gap(1, "x", 0.1, 0.2).wrong and verify.Gap(1, "x", 0.2, 0.1).wrong


def test_what_rounding_may_have_done_alone_is_not_judged(capsys):
    """Neither right nor wrong; and where that is most of it, there is no verdict, which is not "equal"."""
    settings = config.load("vit-demo", [*verify.DEFAULTS, "precision=fp16", "parallel.tp=2", "train.steps=1"])
    fine, vague = [verify.Gap(1, name, 1e-3, 1e-2) for name in ("loss", "a", "b")], verify.Gap(1, "c", 0.7, 0.6)
    assert not vague.wrong and verify.tell(settings, [*fine, vague])
    assert "not judged: 1 of 4 values" in (said := capsys.readouterr().out) and "such as c" in said and "equal" in said
    assert not verify.tell(settings, [*fine[:2], vague, vague, vague])
    assert "equal" not in (said := capsys.readouterr().out) and "no verdict" in said and "precision=fp64" in said
    assert not verify.tell(settings, [*fine, vague, verify.Gap(1, "d", 0.2, 0.1)])
    assert "worst d (2.0e-01)" in capsys.readouterr().out


@pytest.mark.parametrize(("preset", "precision", "layout", "what"), [
    pytest.param(preset, precision, layout, what,
                 marks=[] if (preset, precision, layout) == ("vit-demo", "fp8", "dp") else [pytest.mark.slow])
    for preset in ("vit-demo", "gpt-demo", "dit-demo") for precision in ("bf16", "fp16", "fp8")
    for layout, what in (("dp", "data_parallel.gradients.divide_by_size"), ("tp", "mappings.copy"))
    if (preset, precision, layout) != ("vit-demo", "fp8", "tp")])
def test_a_mistake_does_not_hide_in_rounding(preset, precision, layout, what, capsys):
    """Of biases and of what is behind zeros rounding may be all that moves them: that tells nothing of the others."""
    size = {"vit-demo": ["model.dim=32", "model.depth=2", "model.grid=[16,32]"], "gpt-demo": ["model.dim=32", "model.depth=2"]}
    settings = config.load(preset, [*verify.DEFAULTS, *size.get(preset, []), "train.device=cpu", f"precision={precision}",
                                    f"parallel.{layout}=2", "parallel.overlap=none"])

    def forgetful(settings, what):                  # a sum for the mean; or ranks whose gradients stay parts
        with mock.patch(f"course.parallel.{what}", lambda x, *of: x):
            return verify.compare(settings)

    assert verify.tell(settings, ranks(2)(verify.compare, settings)[0])
    assert not verify.tell(settings, ranks(2)(forgetful, settings, what)[0]) and "DIFFERENT" in capsys.readouterr().out


def test_what_was_not_tried_is_said(capsys):
    assert verify.main("vit-demo", [*SMALL, "parallel.dp=2"])
    said = capsys.readouterr().out.partition("not tried: ")[2]
    for what in ("model.dropout=0", "optim.clip=1, which no norm exceeded", "optim.ema=0", "optim.name=sgd", "micro-batches",
                 "padding and ignored targets", "overflows", "evaluation", "checkpoints", "--thorough tries more"):
        assert what in said
    assert verify.main("vit-demo", [*SMALL, "parallel.dp=2", "optim.ema=0.9", "optim.clip=1e-3", "model.dropout=0.1",
                                    "model.drop_path=0.1", "optim.momentum=0.5", "train.micro_batch=3"])
    said = capsys.readouterr().out.partition("not tried: ")[2]
    assert not any(what in said for what in ("dropout", "clip", "ema", "optim.name", "several", "smaller"))
    assert "train.micro_batch=3, which both runs have" in said


@pytest.mark.slow
def test_thorough_tries_all_of_it(capsys):
    assert verify.main("gpt-demo", ["model.dim=16", "model.depth=2", "parallel.dp=2", "train.device=cpu"], thorough=True)
    said = capsys.readouterr().out
    assert said.count("equal: ") == 2 and "steps of sgd" in said and "steps of adam" in said and "after an overflow" in said
    assert said.endswith("not tried: reading data, checkpoints\n")


def test_thorough_keeps_what_the_user_says():
    said = ["parallel.dp=2", "model.dropout=0", "optim.clip=3", "train.steps=2"]
    for (trial,), name in zip(verify.thorough_trials("vit-demo", [*SMALL, *said]), ("sgd", "adam"), strict=True):
        c = trial.config
        assert (c.optim.name, c.model.dropout, c.optim.clip, c.train.steps, trial.clipped) == (name, 0, 3, 2, False)
        assert c.train.global_batch // 2 % c.train.micro_batch == 1 and c.optim.ema == 0.5 and c.model.drop_path == 0.2


def test_thorough_compares_one_process_without_its_micro_batches(capsys):
    assert verify.main("vit-demo", [*SMALL, "train.recompute=full"], thorough=True)
    capsys.readouterr()
    with mock.patch("course.training.step.split_microbatches", lambda batch, size: [*split_microbatches(batch, size)][:1]):
        assert not verify.main("vit-demo", SMALL, thorough=True) and "DIFFERENT from step 1" in capsys.readouterr().out


def test_fp16_takes_a_loss_scale_that_does_not_overflow():
    """The default scale overflows here: a step left out by one run alone would make all that follows differ."""
    small = ["model.dim=16", "model.depth=2", "train.device=cpu"]
    c = config.load("gpt-demo", [*verify.DEFAULTS, *small, "precision=fp16", "parallel.dp=1"])
    c = replace(c, optim=replace(c.optim, lr=0.0))
    mesh = build_mesh(c.parallel, World())
    with mock.patch.dict(verify.FIRST_SCALE, fp16=2.0**40):
        scale = verify.finite_scale(verify.simple(c), mesh)
    assert 1 < scale < 2.0**30
    assert verify.serial_run(verify.simple(c), mesh, 0.0, 2.0**40)[-1][verify.SKIPPED] == 3
    assert verify.serial_run(verify.simple(c), mesh, 0.0, scale)[-1][verify.SKIPPED] == 0


def test_a_step_that_one_run_leaves_out_is_said(capsys):
    settings = config.load("vit-demo", [*verify.DEFAULTS, "parallel.tp=2"])
    gaps = [verify.Gap(1, name, size, 1e-10) for name, size in ((verify.LOSS, 0.3), (verify.SKIPPED, 1.0), ("a", 0.5))]
    assert not verify.tell(settings, gaps)
    said = capsys.readouterr().out
    assert "DIFFERENT in step 1: only one of the two runs left out a step" in said and "worst a (5.0e-01), the loss" in said


def test_numbers_that_no_rank_has_are_different():
    where = verify.Placement("a", (4,), ((0, 2),))
    part = verify.difference(torch.ones(2), torch.ones(2), where)
    assert verify.difference_of_parts([part, part], 4, 1.0, True) == (0.0, "no rank has 2 of its 4 numbers")
    other = verify.difference(torch.ones(2), torch.ones(2), replace(where, box=((2, 4),)))
    assert verify.difference_of_parts([part, other], 4, 1.0, True) == (0.0, "")
    assert verify.difference_of_parts([], 4, 1.0, False) == (0.0, "no rank has any of its 4 numbers")
    assert verify.Gap(1, "a", 0.0, 1.0, "no rank has any of its 4 numbers").wrong
