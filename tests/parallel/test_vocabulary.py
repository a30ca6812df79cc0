"""A vocabulary over ranks: the numbers of the whole one, and never its logits in one place."""

import pytest
import torch
import torch.nn.functional as F

from course.ranks.notebook_ranks import RankError, ranks
from course.training.optimizer import build_optimizer, gradient_norm

VOCAB, SHAPE = 12, (2, 5)


def drawn(dtype=torch.float64, scale=3.0):
    """Logits of all tokens, targets in every rank's part, and a gradient for each loss."""
    generator = torch.Generator().manual_seed(3)
    logits = (scale * torch.randn(*SHAPE, VOCAB, generator=generator, dtype=torch.float64)).to(dtype)
    target = torch.tensor([[0, 5, 6, 11, 3], [7, 7, 1, 8, 10]])
    return logits.requires_grad_(), target, torch.rand(SHAPE, generator=generator, dtype=torch.float64)


def my_axis():
    from course.config import Parallel
    from course.parallel import build_mesh, join

    world = join("cpu")
    return build_mesh(Parallel(tp=world.size), world).tp


def split_loss(dtype=torch.float64, scale=3.0):
    """Losses, and the gradient of this rank's columns of the logits."""
    from course.parallel import mappings
    from course.parallel.tensor_parallel.vocabulary import VocabularyCrossEntropy

    axis = my_axis()
    logits, target, grad = drawn(dtype, scale)
    mine = mappings.shard(logits, -1, axis).detach().requires_grad_()
    before = mine.detach().clone()
    loss = VocabularyCrossEntropy(axis)(mine, target)
    loss.backward(grad.to(loss.dtype))
    assert torch.equal(mine, before)                                    # the logits themselves are left alone
    return loss.detach(), mine.grad


def whole_loss(dtype=torch.float64, scale=3.0):
    logits, target, grad = drawn(dtype, scale)
    loss = F.cross_entropy(logits.to(torch.promote_types(dtype, torch.float32)).flatten(0, 1), target.flatten(),
                           reduction="none").view(SHAPE)
    loss.backward(grad.to(loss.dtype))
    return loss.detach(), logits.grad


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "scale", "tolerance"), [
    (torch.float64, 3.0, 1e-14),
    (torch.float64, 1e4, 1e-11),                                        # exp of these overflows; they are 1e4, so 1e4 x epsilon
    (torch.bfloat16, 3.0, 2e-7),                                        # of float32, which the loss is taken in
])
def test_loss_and_gradient_equal_those_of_the_whole_vocabulary(size, dtype, scale, tolerance):
    loss, grad = whole_loss(dtype, scale)
    found = ranks(size)(split_loss, dtype, scale)
    for own, _ in found:
        assert own.dtype == loss.dtype
        torch.testing.assert_close(own, loss, rtol=tolerance, atol=tolerance)
    parts = torch.cat([part for _, part in found], -1)
    assert parts.dtype == dtype                                         # gradients of bf16 logits are rounded to bf16
    rounding = 2**-8 if dtype == torch.bfloat16 else tolerance
    torch.testing.assert_close(parts, grad, rtol=rounding, atol=tolerance)


def split_in_chunks(size):
    """The loss of tokens in chunks, its gradients, and the most logits that this rank had at a time."""
    from unittest import mock

    from course.models import gpt
    from course.parallel import mappings
    from course.parallel.tensor_parallel.vocabulary import VocabularyCrossEntropy

    axis = my_axis()
    x, weight, target = drawn_features()
    x, mine = x.requires_grad_(), mappings.shard(weight, 0, axis).detach().requires_grad_()
    seen, linear = [], gpt.F.linear
    with mock.patch.object(gpt.F, "linear", lambda *given: (seen.append(linear(*given)), seen[-1])[1]):
        loss = gpt.ChunkedLoss.apply(mappings.copy(x, axis), mine, target, torch.full((10,), 0.5, dtype=torch.float64),
                                     VocabularyCrossEntropy(axis), size)
    loss.backward()
    return loss.detach(), x.grad, mine.grad, max(logits.numel() for logits in seen)


def drawn_features():
    generator = torch.Generator().manual_seed(4)
    x, weight = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (10, VOCAB))
    return x, weight, torch.randint(VOCAB, (10,), generator=generator)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_chunks_of_a_vocabulary_in_pieces(size):
    x, weight, target = drawn_features()
    x.requires_grad_(), weight.requires_grad_()
    loss = 0.5 * F.cross_entropy(x @ weight.T, target, reduction="sum")
    loss.backward()
    found = ranks(size)(split_in_chunks, 4)
    for own, dx, _, most in found:
        torch.testing.assert_close(own, loss.detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(dx, x.grad, rtol=1e-13, atol=1e-13)
        assert most == 4 * VOCAB // size
    torch.testing.assert_close(torch.cat([dw for _, _, dw, _ in found]), weight.grad, rtol=1e-13, atol=1e-13)


def twice():
    from course.parallel.tensor_parallel.vocabulary import VocabularyCrossEntropy

    axis = my_axis()
    logits = torch.zeros(1, 1, 2, requires_grad=True)
    loss = VocabularyCrossEntropy(axis)(logits, torch.zeros(1, 1, dtype=torch.int64)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def test_a_second_backward_is_an_error_not_a_wrong_number():
    with pytest.raises(RankError, match="modified by an inplace operation"):
        ranks(2)(twice)


def biggest_message():
    """The most numbers that a collective of the loss carries."""
    from unittest import mock

    import torch.distributed as dist

    sizes, original = [], dist.all_reduce
    with mock.patch.object(dist, "all_reduce", lambda x, *a, **k: (sizes.append(x.numel()), original(x, *a, **k))[1]):
        split_loss()
    return sizes


def test_three_numbers_a_token_are_exchanged():
    assert ranks(2)(biggest_message) == [[10, 20], [10, 20]]


def cut_model(overrides):
    """What a rank holds of GPT's token embedding and head, what its optimizer has, and the norm of gradients that are 1."""
    from course import config
    from course.models import build_model
    from course.parallel import build_mesh, initialize, join, parallelize
    from course.training import step

    c = config.load("gpt-demo", [f"model.vocab={VOCAB}", "model.context=5", "model.dim=8", "model.heads=2", "precision=fp64",
                                 *overrides])
    mesh = build_mesh(c.parallel, join("cpu"))
    model = build_model(c.model)
    layout = parallelize(model, mesh, c.parallel)
    placements = layout.placements
    one = model.embed.token.weight is model.head.proj.weight
    initialize(model, placements, 0, torch.device("cpu"), torch.float64)
    embedding, head = model.embed.token.weight, model.head.proj.weight
    optimizer = build_optimizer(list(model.parameters()), step.Progress.start(c, torch.device("cpu")).lr, c)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    norm = gradient_norm(list(model.parameters()), layout).item()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return {"one": one and embedding is head, "box": placements[embedding].box, "name": placements[head].name, "norm": norm**2,
            "weight": embedding.detach(), "head": head.detach(),
            "in optimizer": sum(p is embedding for p in held), "partial": placements[embedding].partial_over is not None}


@pytest.mark.parametrize("sp", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_tied_weight_stays_one_and_counts_once(sp):
    whole, = ranks(1)(cut_model, [])
    found = ranks(2)(cut_model, ["parallel.tp=2", f"parallel.sp={sp}"])
    for rank, held in enumerate(found):
        assert held["one"] and held["in optimizer"] == 1 and held["name"] == "embed.token.weight" and not held["partial"]
        assert held["box"] == ((6 * rank, 6 * rank + 6), (0, 8))
        assert torch.equal(held["weight"], whole["weight"][6 * rank:6 * rank + 6])
        assert held["norm"] == pytest.approx(whole["norm"], rel=1e-6)   # a count of all elements; reported in float32


@pytest.mark.slow
def test_weights_that_are_not_tied_are_two():
    whole, = ranks(1)(cut_model, ["model.tied=false"])
    for rank, held in enumerate(ranks(2)(cut_model, ["model.tied=false", "parallel.tp=2"])):
        assert not held["one"] and held["name"] == "head.proj.weight"
        assert torch.equal(held["head"], whole["head"][6 * rank:6 * rank + 6])


def test_an_indivisible_vocabulary_is_a_sentence():
    with pytest.raises(RankError, match=r"parallel.tp=2 does not divide the vocabulary of 13 tokens: .* model.vocab=14"):
        ranks(2)(cut_model, ["model.vocab=13", "parallel.tp=2"])


def evaluated(overrides):
    """The loss and weight of a batch with padding in evaluation, as each rank reports it."""
    from course import config
    from course.models import build_model
    from course.parallel import build_mesh, initialize, join, parallelize
    from course.training.validation import forward_only

    c = config.load("gpt-demo", [f"model.vocab={VOCAB}", "model.context=7", "model.dim=8", "model.heads=2", "precision=fp64",
                                 *overrides])
    model = build_model(c.model)
    layout = parallelize(model, build_mesh(c.parallel, join("cpu")), c.parallel)
    initialize(model, layout.placements, 0, torch.device("cpu"), torch.float64)
    tokens = torch.randint(VOCAB, (3, 8), generator=torch.Generator().manual_seed(1))
    output, batch = forward_only(model, layout, "fp64")({"tokens": tokens, "sample": torch.tensor([4, 5, -1])})
    loss, weight = model.loss(output, batch)
    return loss.item(), weight.item()


@pytest.mark.slow
def test_evaluation_gives_the_whole_loss_and_weight_on_every_rank():
    (loss, weight), = ranks(1)(evaluated, [])
    assert weight == 14
    tp, cp = ["parallel.tp=2", "parallel.sp=true"], ["parallel.cp=2"]
    for size, layout in ((2, tp[:1]), (2, cp), (4, cp + tp)):
        for own in ranks(size)(evaluated, layout):
            assert own == pytest.approx((loss, weight), rel=1e-12)
