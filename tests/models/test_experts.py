"""Mixture of experts: each token's output is the gated sum of its experts, and the balance terms have known values."""

import pytest
import torch
import torch.nn.functional as F

from course.models import GPTConfig
from course.models.experts import EarlierChoices, Experts, MoE, auxiliary_loss, grouped_linear
from course.models.gpt import GPT
from course.utils.errors import CourseError


def mixture(**settings):
    torch.manual_seed(0)
    made = MoE(GPTConfig(dim=16, heads=2, **{"experts": 4, "top_k": 2, "expert_width": 12} | settings)).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def inputs(B=3, T=5):
    torch.manual_seed(1)
    return torch.randn(B, T, 16, dtype=torch.float64), {"real": torch.ones(B, T, dtype=torch.bool)}


def by_hand(m, x, k):
    """Token by token: the mean of its k best experts, weighted by their scores."""
    out = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            logits = m.router.weight @ x[b, t]
            scores = logits.softmax(0) if m.c.routing == "softmax" else logits.sigmoid()
            best = scores.argsort(descending=True)[:k]
            for e in best:
                h = m.experts.up[e].flatten(0, 1) @ x[b, t]
                h = F.silu(h[:12]) * h[12:] if m.c.mlp == "swiglu" else F.gelu(h)
                out[b, t] += scores[e] / (scores[best].sum() if k > 1 else 1) * (m.experts.down[e] @ h)
    return out


@pytest.mark.parametrize("settings", [{}, {"routing": "sigmoid", "mlp": "swiglu"}, {"top_k": 1}, {"top_k": 4}])
def test_the_output_is_the_gated_sum_of_the_best_experts(settings):
    m, (x, batch) = mixture(**settings), inputs()
    assert torch.allclose(m(x, batch)[0], by_hand(m, x, settings.get("top_k", 2)), atol=1e-12)


def test_shared_experts_take_every_token():
    m, (x, batch) = mixture(shared_experts=2), inputs()
    assert m.shared.up.weight.shape == (24, 16)
    assert torch.allclose(m(x, batch)[0] - m.shared(x), by_hand(m, x, 2), atol=1e-12)


def test_a_bias_changes_the_choice_and_not_the_gates():
    m, (x, batch) = mixture(balance_rate=0.1, top_k=1), inputs()
    m.router.bias.data = torch.tensor([9., 0, 0, 0], dtype=torch.float64)
    gate = (x @ m.router.weight.T).softmax(-1)[..., :1]
    h = F.gelu(x @ m.experts.up[0, 0].T) @ m.experts.down[0].T
    assert torch.allclose(m(x, batch)[0], gate * h, atol=1e-12)


def test_padding_reaches_no_expert_and_no_statistic():
    m, (x, batch) = mixture(), inputs()
    short = m(x[:, :3], {"real": batch["real"][:, :3]})
    batch["real"][:, 3:] = False
    y, penalty = m(x, batch)
    assert torch.allclose(y[:, :3], short[0]) and not y[:, 3:].any()
    assert torch.allclose(penalty, short[1])


def test_the_balance_loss_is_1_for_balanced_experts_and_more_for_others():
    c = GPTConfig(experts=4, top_k=2, balance_loss=1.0, z_loss=0.5)
    tokens, zero = torch.tensor([8.]), torch.zeros(1)
    even = auxiliary_loss(c, torch.full((1, 4), 4.), torch.full((1, 4), 2.), zero, tokens)
    one = auxiliary_loss(c, torch.tensor([[8., 8, 0, 0]]), torch.tensor([[4., 4, 0, 0]]), zero, tokens)
    assert (even.item(), one.item()) == (1, 2)
    assert auxiliary_loss(c, torch.zeros(1, 4), torch.zeros(1, 4), torch.tensor([16.]), tokens).item() == 1


def test_capacity_keeps_the_first_tokens_of_an_expert():
    chosen = torch.tensor([[[0], [1], [0], [0], [1], [2]]])
    assert EarlierChoices(2)(chosen).flatten().tolist() == [0, 0, 1, 2, 1, 0]
    m, (x, batch) = mixture(top_k=1, capacity_factor=0.8), inputs()     # one token of a sample for each expert
    taken = m(x, batch)[0].abs().sum(-1) > 0
    best = (x @ m.router.weight.T).argmax(-1)
    for sample, row in zip(best.tolist(), taken.tolist(), strict=True):
        assert row == [sample.index(expert) == t for t, expert in enumerate(sample)]
    assert (m.eval()(x, batch)[0].abs().sum(-1) > 0).all()              # evaluation drops none


def test_groups_may_be_empty():
    x, weight = torch.randn(3, 2, requires_grad=True), torch.randn(3, 4, 2, requires_grad=True)
    y = grouped_linear(x, weight, torch.tensor([0, 3, 0]))
    y.sum().backward()
    assert torch.equal(y, F.linear(x, weight[1])) and not weight.grad[0].any() and weight.grad[1].any()


def test_every_other_block_may_be_dense():
    model = GPT(GPTConfig(dim=16, heads=2, depth=5, experts=4, moe_every=2, vocab=32, context=8))
    assert [isinstance(block.mlp, MoE) for block in model.blocks.values()] == [False, True, False, True, False]
    assert isinstance(model.blocks["1"].mlp.experts, Experts) and "mlp.up" in model.tensor_plan


def test_evaluation_returns_logits_alone():
    from course.parallel import initialize_serial

    model = initialize_serial(GPT(GPTConfig(dim=16, heads=2, depth=2, experts=4, vocab=32, context=8)), 0, torch.device("cpu"))
    batch = model.prepare(model.example(2, torch.device("cpu")), torch.zeros((), dtype=torch.long))
    with_loss, weight = model.loss(model(batch), batch)
    alone, _ = model.loss(model.eval()(batch), batch)
    assert weight == 16 and 0.01 * 16 < with_loss - alone < 0.1 * 16    # two blocks, each about 0.01 a token
    with pytest.raises(CourseError, match="longer"):
        model.prepare({"sample": torch.arange(1), "tokens": torch.zeros(1, 10, dtype=torch.long)}, torch.zeros(()))
