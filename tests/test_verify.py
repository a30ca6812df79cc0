"""`course verify`: equal layouts pass, a mistake is named with its first step and parameter."""

from unittest import mock

import pytest
import torch

from course import config, verify
from course.errors import CourseError
from course.launch import ranks

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


@pytest.mark.parametrize("settings", ["precision=fp64", "precision=bf16", "optim.lr=1e-3"])
def test_a_mistake_is_named(settings, capsys):
    settings = config.load("vit-demo", [*verify.DEFAULTS, *SMALL, "parallel.tp=2", "parallel.sp=true", settings])

    def forgetful(settings):                        # with sequence parallelism norms and the head see a rank's own tokens
        with mock.patch("course.parallel.data.add_partial_gradients", lambda parameters: None):
            return verify.compare(settings)

    assert not verify.tell(settings, ranks(2)(forgetful, settings)[0])
    assert "DIFFERENT from step 1 on" in (said := capsys.readouterr().out) and "first head.proj.weight" in said


@pytest.mark.parametrize(("setting", "words"), [("parallel.tp=3", "parallel.tp=3 does not divide the 4 heads"),
                                                ("train.global_batch=3 parallel.dp=2", "train.global_batch=3 is not divisible")])
def test_a_layout_that_is_refused_is_a_sentence(setting, words):
    with pytest.raises(CourseError, match=words):
        verify.main("vit-demo", [*SMALL, *setting.split()])


def test_one_process_is_not_compared_with_itself():
    with pytest.raises(CourseError, match=r"name a layout, such as parallel.tp=2"):
        verify.main("vit-demo", SMALL)


def test_a_nan_is_different():
    assert verify.Gap(1, "x", float("nan"), 1.0).wrong and not verify.Gap(1, "x", 0.5, 1.0).wrong
    assert not verify.Gap(1, "x", 0.1, 0.2).wrong and verify.Gap(1, "x", 0.2, 0.1).wrong


def test_what_rounding_may_have_done_alone_is_not_judged(capsys):
    """Neither right nor wrong; and where that is most of it, there is no verdict, which is not "equal"."""
    settings = config.load("vit-demo", [*verify.DEFAULTS, "precision=fp16", "parallel.tp=2", "train.steps=1"])
    fine, vague = [verify.Gap(1, name, 1e-3, 1e-2) for name in ("loss", "a", "b")], verify.Gap(1, "c", 0.4, 0.3)
    assert not vague.wrong and verify.tell(settings, [*fine, vague])
    assert "not judged: 1 of 4 values" in (said := capsys.readouterr().out) and "such as c" in said and "equal" in said
    assert not verify.tell(settings, [*fine[:2], vague, vague, vague])
    assert "equal" not in (said := capsys.readouterr().out) and "no verdict" in said and "precision=fp64" in said
    assert not verify.tell(settings, [*fine, vague, verify.Gap(1, "d", 0.2, 0.1)])
    assert "first d (2.0e-01)" in capsys.readouterr().out


@pytest.mark.parametrize(("preset", "precision", "layout", "what"), [
    pytest.param(preset, precision, layout, what,
                 marks=[] if (precision, layout) in (("fp8", "dp"), ("fp16", "tp")) else [pytest.mark.slow])
    for preset in ("vit-demo", "gpt-demo", "dit-demo") for precision in ("bf16", "fp16", "fp8")
    for layout, what in (("dp", "data.divide"), ("tp", "mappings.copy"))
    if (preset, precision, layout) != ("vit-demo", "fp8", "tp")])
def test_a_mistake_does_not_hide_in_rounding(preset, precision, layout, what, capsys):
    """Of biases and of what is behind zeros rounding may be all that moves them: that tells nothing of the others."""
    size = {"vit-demo": ["model.dim=32", "model.depth=2", "model.grid=[16,32]"], "gpt-demo": ["model.dim=32", "model.depth=2"]}
    settings = config.load(preset, [*verify.DEFAULTS, *size.get(preset, []), "train.device=cpu", f"precision={precision}",
                                    f"parallel.{layout}=2", "parallel.overlap=none"])

    def forgetful(settings, what):                  # a sum for the mean; or ranks whose gradients stay parts
        with mock.patch(f"course.parallel.{what}", lambda x, *of: x):
            return verify.compare(settings)

    assert verify.tell(settings, ranks(2)(verify.compare, settings)[0]) or "no verdict" in capsys.readouterr().out
    assert not verify.tell(settings, ranks(2)(forgetful, settings, what)[0]) and "DIFFERENT" in capsys.readouterr().out
