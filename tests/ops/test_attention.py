"""Backends of attention: each computes the same, and one that is not to be had is a sentence."""

import pytest
import torch
import torch.nn.functional as F

from course import config
from course.ops import attention
from course.parallel import build_mesh, join
from course.training.assemble import assemble
from course.utils.errors import CourseError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def switched_back():
    yield
    attention.set_attention_backend("default", 8, "fp32", CPU)


def used(backend: str) -> set[str]:
    """The names of attention's operators in a call."""
    attention.set_attention_backend(backend, 8, "fp32", CPU)
    q = torch.randn(2, 2, 16, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        F.scaled_dot_product_attention(q, q, q)
    return {event.key for event in found.key_averages() if "scaled_dot_product" in event.key}


def test_the_chosen_one_is_used():
    assert "aten::_scaled_dot_product_attention_math" in used("math")
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in used("flash") & used("default")


def test_the_step_is_the_same_with_each():
    losses = []
    for backend in ("default", "flash", "math"):
        c = config.load("vit-demo", ["data.source=mock", "model.depth=2", "train.device=cpu", "train.global_batch=2",
                                     f"attention={backend}"])
        training = assemble(c, build_mesh(c.parallel, join("cpu")))
        losses.append(training.step(training.model.example(2, CPU))[0].item())
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_what_is_not_to_be_had_is_a_sentence_and_changes_nothing():
    with pytest.raises(CourseError, match="attention=cudnn does not run on this cpu device with heads of 8 in fp32"):
        attention.set_attention_backend("cudnn", 8, "fp32", CPU)
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
    with pytest.raises(CourseError, match="attention"):
        config.load("vit-demo", ["attention=flahs"])
