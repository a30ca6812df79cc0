"""What a model from outside must keep to where samples are cut into tokens, and what it is told where it does not."""

import pytest
import torch
from torch import nn

from course.parallel.context_parallel.attention import GroupedAllToAllAttend
from course.parallel.mesh import Axis
from course.parallel.token_split import SplitTokens, enter_region, modules_at_seam, permute_tokens, replace_at_seam
from course.utils.errors import CourseError

TWO = Axis("cp", 2, 1, (0, 1))
PLAN = {"position": "context", "frames": "context", "target": "context"}


def split(zigzag=False, hides=True):
    tokens = SplitTokens(PLAN, TWO, Axis("tp"), zigzag)
    tokens.causal_only = hides
    return tokens


def batch(**lengths):
    return {name: torch.arange(length).expand(3, length) for name, length in lengths.items()}


def test_all_that_is_cut_has_the_tokens_of_position():
    cut = split().cut({**batch(position=12, frames=12), "image": torch.zeros(3, 16)})
    assert cut["frames"].tolist() == [list(range(6, 12))] * 3 and cut["image"].shape == (3, 16)
    with pytest.raises(CourseError, match=r"token_plan cuts frames of 16 tokens as position of 12.*leave it out of token_plan"):
        split().cut(batch(position=12, frames=16))


class Sum(nn.Module):
    seam = "sum_over_tokens"


def test_a_module_at_a_seam_has_a_name_for_each_place_in_which_it_stands():
    """As surgery needs it, which puts something in each of them; a module without a seam, or at another one, is none of them."""
    total = Sum()
    model = nn.ModuleDict({"one": nn.Sequential(nn.Linear(2, 2), total), "two": nn.Sequential(total)})
    assert modules_at_seam(model, "sum_over_tokens") == {"one.1": total, "two.0": total} and not modules_at_seam(model, "attend")
    replace_at_seam(model, "sum_over_tokens", lambda old: nn.Identity())
    assert not modules_at_seam(model, "sum_over_tokens") and model["one"][1] is model["two"][0]


def test_padding_is_for_causal_attention_alone():
    """A causal zigzag of 11 tokens over two ranks has one more, which attention to all tokens would see."""
    assert split(zigzag=True).cut(batch(position=11))["position"].tolist() == [[3, 4, 5, 6, 7, 8]] * 3
    assert split(zigzag=True, hides=False).cut(batch(position=12))["position"].shape == (3, 6)
    with pytest.raises(CourseError, match=r"11 tokens have to be padded to 12 .* would see the padding: take a multiple of 4"):
        split(zigzag=True, hides=False).cut(batch(position=11))


def test_what_is_gathered_are_tokens_of_samples():
    with pytest.raises(CourseError, match=r"\(B, T, D\), and here it meets \(5, 8\)"):
        enter_region(torch.zeros(5, 8), TWO, split())


@pytest.mark.parametrize(("queries", "keys"), [(3, 3), (4, 1)])
def test_heads_that_are_not_shared_out_are_refused_before_anything_is_sent(queries, keys):
    q, k = torch.zeros(1, queries, 6, 8), torch.zeros(1, keys, 6, 8)
    with pytest.raises(CourseError, match=f"does not divide {queries} of queries and {keys} of keys"):
        GroupedAllToAllAttend(True, split())(q, k, k)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_permutations_gradient_is_copied_back(dim):
    x = torch.arange(64, dtype=torch.float64).view(4, 4, 4).requires_grad_()
    order, weight = torch.tensor([2, 0, 3, 1]), torch.randn(4, 4, 4, dtype=torch.float64)
    y = permute_tokens(x, dim, order)
    assert torch.equal(y, x.index_select(dim, order))
    assert torch.equal(torch.autograd.grad(y, x, weight)[0], torch.autograd.grad(x.index_select(dim, order), x, weight)[0])
    assert "index_add" not in traced(lambda: torch.autograd.grad(permute_tokens(x, dim, order), x, weight))
    assert "index_add" in traced(lambda: torch.autograd.grad(x.index_select(dim, order), x, weight))


def traced(work) -> str:
    """The names of the operators that ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        work()
    return " ".join(event.name for event in found.events())
