"""Mappings: exact integer answers, transposed pairs, uneven pieces, no writes into inputs, no graph breaks."""

import pytest
import torch
import torch.distributed as dist

from course.parallel import Axis, mappings
from course.ranks.notebook_ranks import ranks

SIZES = [2, pytest.param(4, marks=pytest.mark.slow)]


def world() -> Axis:
    """All ranks as an axis."""
    size = dist.get_world_size()
    return Axis("tp", size, dist.get_rank(), tuple(range(size)), dist.group.WORLD)


@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 4050])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_pieces_are_those_of_tensor_split(n, size):
    pieces = torch.arange(n).tensor_split(size)
    assert mappings.lengths(n, size) == [len(piece) for piece in pieces]
    for rank, piece in enumerate(pieces):
        start, stop = mappings.bounds(n, size, rank)
        assert torch.arange(n)[start:stop].equal(piece)


def test_an_axis_of_one_is_the_identity():
    x, one = torch.ones(3), Axis("tp")
    assert all(y is x for y in (mappings.copy(x, one), mappings.reduce(x, one), mappings.gather(x, 0, one),
                                mappings.scatter(x, 0, one), mappings.shard(x, 0, one), mappings.all_to_all(x, 0, 0, one)))


def known_answers() -> dict[str, list]:
    """What each mapping makes of numbers that one can add up in one's head, and its gradient."""
    axis, found = world(), {}
    rank, size = axis.rank, axis.size
    mine = torch.full((2,), float(rank), requires_grad=True)
    for name, out in (("copy", mappings.copy(mine, axis)), ("reduce", mappings.reduce(mine, axis))):
        grad, = torch.autograd.grad((out * (rank + 1)).sum(), mine)
        found[name] = [out.tolist(), grad.tolist()]
    piece = torch.arange(3.)[:mappings.lengths(3 * size - 1, size)[rank]] + 10 * rank       # the last rank has one less
    piece.requires_grad_()
    whole = mappings.gather(piece, 0, axis, 3 * size - 1)
    found["gather"] = [whole.tolist(), torch.autograd.grad((whole * (rank + 1)).sum(), piece)[0].tolist()]
    rows = (torch.arange(2. * size - 1) + 100 * rank).requires_grad_()
    part = mappings.scatter(rows, 0, axis)
    found["scatter"] = [part.tolist(), torch.autograd.grad((part * (rank + 1)).sum(), rows)[0].tolist()]
    part = mappings.shard(rows, 0, axis)
    found["shard"] = [part.tolist(), torch.autograd.grad(part.sum(), rows)[0].tolist()]
    return found


@pytest.mark.parametrize("size", SIZES)
def test_known_answers(size):
    everyone, total = range(size), sum(range(size))
    grads = sum(rank + 1 for rank in everyone)
    lengths = mappings.lengths(3 * size - 1, size)
    whole = [10. * rank + i for rank in everyone for i in range(lengths[rank])]
    sums = [float(size * i + 100 * total) for i in range(2 * size - 1)]
    cut = [list(part) for part in torch.arange(2 * size - 1).tensor_split(size)]
    for rank, found in enumerate(ranks(size)(known_answers)):
        assert found["copy"] == [[rank] * 2, [grads] * 2]
        assert found["reduce"] == [[total] * 2, [rank + 1.] * 2]
        assert found["gather"] == [whole, [float(grads)] * lengths[rank]]
        assert found["scatter"][0] == [sums[i] for i in cut[rank]]
        assert found["scatter"][1] == [float(r + 1) for r in everyone for _ in cut[r]]
        assert found["shard"] == [[100. * rank + i for i in cut[rank]], [float(i in cut[rank]) for i in range(2 * size - 1)]]


def transposes() -> list[float]:
    """<A x, y> - <x, A' y> over all ranks, for every mapping, on every dim, even and uneven.

    What every rank has the same of is one vector, not one for each: copy's x, reduce's y and A x.
    """
    axis, gaps = world(), []
    torch.manual_seed(axis.rank)

    def gap(mapping, x, same_x=False, same_y=False):
        x = x.detach().clone()
        if same_x:
            dist.broadcast(x, 0)
        out = mapping(x.requires_grad_())
        y = torch.randn(out.shape, dtype=torch.float64)
        if same_y:
            dist.broadcast(y, 0)
        back, = torch.autograd.grad(out, x, y)
        counts = torch.tensor([not same_y or axis.rank == 0, not same_x or axis.rank == 0])
        pair = torch.stack([(out * y).sum(), (x * back).sum()]).detach() * counts
        dist.all_reduce(pair)
        return (pair[0] - pair[1]).abs().item()

    for n in (8, 4 * axis.size + 1):
        mine = mappings.lengths(n, axis.size)[axis.rank]
        whole, heads = torch.randn(n, n, n, dtype=torch.float64), torch.randn(mine, 8, 3, dtype=torch.float64)
        gaps.append(gap(lambda x: mappings.copy(x, axis) * (axis.rank + 1), whole, same_x=True))
        gaps.append(gap(lambda x: mappings.reduce(x, axis), whole, same_y=True))
        for dim in (0, 1, 2, -1):
            gaps.append(gap(lambda x, dim=dim: mappings.scatter(x, dim, axis), whole))
            gaps.append(gap(lambda x, dim=dim, n=n: mappings.gather(x, dim, axis, n), mappings.shard(whole, dim, axis)))
            gaps.append(gap(lambda x, dim=dim: mappings.shard(x, dim, axis), whole.transpose(0, 2)))
        gaps.append(gap(lambda x, n=n: mappings.all_to_all(x, 1, 0, axis, n), heads))
        gaps.append(gap(lambda x, n=n: mappings.all_to_all(x, -2, -3, axis, n), heads))
    return gaps


@pytest.mark.parametrize("size", SIZES)
def test_every_backward_is_the_transpose(size):
    for gaps in ranks(size)(transposes):
        assert len(gaps) == 32 and max(gaps) < 1e-9


def there_and_back() -> bool:
    """all-to-all moves the cut from tokens to heads, and back; the pieces are those of the whole."""
    axis, tokens = world(), 7
    whole = torch.arange(tokens * 8 * 2.).view(1, tokens, 8, 2)
    mine = mappings.shard(whole, 1, axis)
    by_heads = mappings.all_to_all(mine, 2, 1, axis, tokens)
    again = mappings.all_to_all(by_heads, 1, 2, axis)
    return by_heads.equal(mappings.shard(whole, 2, axis)) and again.equal(mine)


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_changes_which_dim_is_cut(size):
    assert all(ranks(size)(there_and_back))


def leaves_alone() -> bool:
    """No mapping writes into its input, nor its backward into its gradient; non-contiguous input works."""
    axis = world()
    for mapping in (mappings.copy, mappings.reduce, lambda x, a: mappings.gather(x, 1, a), lambda x, a: mappings.scatter(x, 1, a),
                    lambda x, a: mappings.all_to_all(x, 1, 0, a)):
        x = torch.randn(4, 8).t().contiguous().t()
        assert not x.is_contiguous()
        before = x.clone()
        x.requires_grad_()
        out = mapping(x, axis)
        grad = torch.ones(out.shape[::-1]).t()
        out.backward(grad)
        if not (x.detach().equal(before) and grad.equal(torch.ones(out.shape))):
            return False
    return True


def test_inputs_and_gradients_are_left_alone():
    assert all(ranks(2)(leaves_alone))


def compiled() -> list[bool]:
    """A chain of all of them, compiled in one graph, forward and backward, against the eager one."""
    axis = world()

    def chain(x):
        x = mappings.reduce(mappings.copy(x, axis) ** 2, axis)
        x = mappings.gather(mappings.shard(x, 1, axis).sin(), 1, axis, 5)
        x = mappings.scatter(x * 2, 1, axis)
        return mappings.all_to_all(x, 0, 1, axis, 5).cos()

    found = []
    for function in (chain, torch.compile(chain, fullgraph=True, backend="aot_eager")):
        x = torch.arange(20., dtype=torch.float64).view(4, 5).requires_grad_()
        out = function(x)
        found.append((out.detach(), torch.autograd.grad(out.sum(), x)[0]))
    return [torch.allclose(a, b, rtol=1e-12) for a, b in zip(*found, strict=True)]


@pytest.mark.slow
def test_they_compile_without_a_graph_break():
    assert ranks(2)(compiled) == [[True, True]] * 2


def sent_and_returned() -> list:
    """Rank r sends s + 1 rows to each rank s and gets them back; what arrives, what returns, and the gradient of each."""
    axis = world()
    sent, received = [rank + 1 for rank in range(axis.size)], [axis.rank + 1] * axis.size
    rows = (torch.arange(float(sum(sent))) + 100 * axis.rank)[:, None].requires_grad_()
    there = mappings.dispatch(rows, sent, received, axis)
    back = mappings.combine(there * (axis.rank + 1), sent, received, axis)
    grad, = torch.autograd.grad((back * back.detach()).sum(), rows)
    return [there.flatten().tolist(), back.flatten().tolist(), grad.flatten().tolist()]


@pytest.mark.parametrize("size", SIZES)
def test_rows_travel_to_ranks_and_return(size):
    starts = [sum(range(1, rank + 1)) for rank in range(size)]
    for rank, (there, back, grad) in enumerate(ranks(size)(sent_and_returned)):
        assert there == [100. * source + starts[rank] + i for source in range(size) for i in range(rank + 1)]
        owner = [other for other in range(size) for _ in range(other + 1)]
        assert back == [(100. * rank + i) * (owner[i] + 1) for i in range(len(owner))]
        assert grad == [(owner[i] + 1) * value for i, value in enumerate(back)]
