"""Linears with communication beside them: the numbers of the plain ones, for any number of tokens, samples and ranks."""

import copy
import json
import os
import sys
import tempfile
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy

from course.fp8 import native  # noqa: F401   its operator is asked for below
from course.models.layers import Linear
from course.parallel import mappings
from course.parallel.mesh import Axis
from course.parallel.tensor_parallel import overlapped_linear, symmetric_memory
from course.parallel.tensor_parallel.linear import OverlappedRow, RowParallel
from course.parallel.token_split import SplitTokens
from course.ranks.collective_mismatch import trace_file
from course.ranks.collective_trace import Trace
from course.ranks.notebook_ranks import ranks
from course.training.activation_checkpointing import checkpoint_activations, save_expensive_ops
from course.utils.errors import CourseError


def everyone():
    """All ranks as an axis."""
    size = dist.get_world_size()
    return Axis("tp", size, dist.get_rank(), tuple(range(size)), dist.group.WORLD)


def both_ways(tokens, samples, direct=False):
    """The largest difference of results and gradients between overlapped linears and plain ones."""
    size, rank = dist.get_world_size(), dist.get_rank()
    axis = everyone()
    random = torch.Generator().manual_seed(0)
    x, up, bias, down, end = (torch.randn(shape, generator=random, dtype=torch.float64)
                              for shape in ((samples, tokens, 5), (7, 5), (7,), (4, 7), (4,)))

    def overlapped(x, up, bias, down, end):
        inner = overlapped_linear.gather_linear(x, up, bias, axis, SimpleNamespace(local_len=tokens), direct).tanh()
        return overlapped_linear.linear_scatter(inner, down, end, axis, direct)

    def plain(x, up, bias, down, end):
        return mappings.scatter(F.linear(F.linear(mappings.gather(x, 1, axis, tokens), up, bias).tanh(), down), 1, axis) + end

    found = []
    for way in (overlapped, plain):
        given = [part.clone().requires_grad_() for part in (x.tensor_split(size, 1)[rank], up, bias, down, end)]
        y = way(*given)
        y.square().sum().backward()
        found.append([y, *(part.grad for part in given)])
    return max((a - b).abs().max().item() for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("tokens", [6, 7, 8])
@pytest.mark.parametrize("samples", [1, 3, 6])
def test_overlapped_linears_are_the_plain_ones(size, tokens, samples):
    assert max(ranks(size)(both_ways, tokens, samples)) < 1e-12


def written_into(tokens, samples):
    """Add to what linears of two ranks put out; its gradient."""
    axis = everyone()
    x = torch.ones(samples, mappings.lengths(tokens, 2)[axis.rank], 5, requires_grad=True)
    inner = overlapped_linear.gather_linear(x, torch.ones(7, 5), None, axis, SimpleNamespace(local_len=tokens))
    y = overlapped_linear.linear_scatter(inner, torch.ones(4, 7), None, axis)
    y.add_(1).sum().backward()
    return x.grad.unique().tolist()


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("tokens", [7, 8])
def test_one_may_write_into_what_linears_put_out(tokens, samples):
    """On every rank, also where one has a token more. A piece of a single sample's tokens is contiguous, and still a view."""
    assert ranks(2)(written_into, tokens, samples) == [[56.0]] * 2


def without_the_long_name(tokens, samples):
    """`both_ways`, where gathering by the collective with the long name is an error."""
    with mock.patch.object(dist.ProcessGroup, "allgather_into_tensor_coalesced", None):
        return both_ways(tokens, samples)


@pytest.mark.parametrize("tokens", [7, 8])
def test_on_a_cpu_nothing_is_gathered_by_a_collective_whose_name_gloo_frees_twice(tokens):
    """That needs two threads in the same few nanoseconds, which no test can wait for; see `overlap.begin_gather`."""
    assert max(ranks(2)(without_the_long_name, tokens, 3)) < 1e-12


def one_by_one(tokens, samples):
    """`both_ways`, where each sample is gathered and scattered by itself."""
    with mock.patch.object(overlapped_linear, "SMALL", 0):
        return both_ways(tokens, samples)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("tokens", [6, 7])
def test_overlapped_linears_are_the_plain_ones_where_samples_go_one_by_one(size, tokens):
    """As those of large batches do, and in a graph all, where each rank has as many tokens."""
    assert max(ranks(size)(one_by_one, tokens, 3)) < 1e-12


@pytest.mark.parametrize("width", [3, 16])
def test_rank_by_rank_puts_first_pieces_first(width):
    """Also of numbers of which 16 bytes are no whole number."""
    x = torch.arange(4 * 6 * width, dtype=torch.bfloat16).view(4, 6, width)
    assert torch.equal(overlapped_linear.rank_by_rank(x, [2, 2, 2]), torch.cat(x.chunk(3, 1)))
    assert torch.equal(overlapped_linear.rank_by_rank(x.transpose(0, 1), [2, 2]), torch.cat(x.transpose(0, 1).chunk(2, 1)))
    padded = F.pad(x, (0, 0, 0, 2))                 # pieces of 2, 2, 1 and 1, each in the place of two
    order = torch.tensor([0, 1, 2, 3, 4, 6, 5, 7])
    assert torch.equal(overlapped_linear.rank_by_rank(x, [2, 2, 1, 1]), torch.cat(padded[:, order].chunk(4, 1)))


@pytest.mark.parametrize("width", [3, 16])
@pytest.mark.parametrize("lengths", [[2, 2, 2], [2, 2, 1, 1], [2, 1, 1], [1, 1, 1, 0], [0, 0]])
def test_sample_by_sample_is_the_other_way(width, lengths):
    x = torch.arange(4 * sum(lengths) * width, dtype=torch.bfloat16).view(4, -1 if sum(lengths) else 0, width)
    assert torch.equal(overlapped_linear.sample_by_sample(overlapped_linear.rank_by_rank(x, lengths), lengths), x)


def test_what_begins_within_16_bytes_is_copied_as_well():
    """One number later in its memory; and a single sample, whose stride means nothing and may be anything."""
    later = torch.arange(1 + 4 * 6 * 16, dtype=torch.bfloat16)[1:].view(4, 6, 16)
    single = torch.arange(6 * 16, dtype=torch.bfloat16).as_strided((1, 6, 16), (3, 16, 1))
    for x in (later, single, later[:0], later[:, :, :0]):
        assert torch.equal(overlapped_linear.rank_by_rank(x, [3, 3]), torch.cat(x.chunk(2, 1)))
        assert torch.equal(overlapped_linear.sample_by_sample(overlapped_linear.rank_by_rank(x, [2, 2, 1, 1]), [2, 2, 1, 1]), x)


def test_what_is_added_up_is_rounded_once():
    """256 + 1 + 1 in bf16, whose numbers are 2 apart there: rounded after each it stays 256."""
    own, pieces = torch.full((1, 2, 3), 256.0, dtype=torch.bfloat16), torch.ones(3, 1, 2, 3, dtype=torch.bfloat16)
    pieces[1] = torch.nan                           # its own place, which nobody has written
    assert (torch.ops.course.add_up(own, pieces, 1) == 258).all()


def test_a_batch_of_64_mb_is_large_and_so_are_samples_of_4():
    """32 samples of 1,024 tokens of 1,024 features in 16 bits; 2 of 2,048 each. And a single one needs no order."""
    assert [overlapped_linear.small(32, 32 * 1024 * width * 2) for width in (1023, 1024)] == [True, False]
    assert [overlapped_linear.small(2, 2 * 2048 * width * 2) for width in (1023, 1024)] == [True, False]
    assert not overlapped_linear.small(1, 1024 * 1024 * 2)
    x, axis = torch.empty(32, 1, 1023, dtype=torch.bfloat16), Axis("tp", 2)
    assert overlapped_linear.as_one(x, 1024, axis) and not overlapped_linear.as_one(x, 1026, axis)
    assert not overlapped_linear.as_one(x[:1], 1024, axis)


def test_tokens_that_no_group_cuts_evenly_go_as_one_whatever_their_size():
    """They are padded, so copied, and a copy may as well put them in order."""
    x = torch.empty(32, 1, 4096, dtype=torch.bfloat16)
    assert overlapped_linear.as_one(x, 1025, Axis("tp", 2)) and not overlapped_linear.as_one(x, 1024, Axis("tp", 2))


def rows_in_16_bits():
    """Under autocast, of a linear, a row linear and an overlapped one: formats of output and gradients; differences."""
    size, rank = dist.get_world_size(), dist.get_rank()
    axis, random = everyone(), torch.Generator().manual_seed(0)
    whole = Linear(64, 5)
    values = torch.randn(5, 64, generator=random)
    torch.nn.init.constant_(whole.bias, 0.7)
    tokens = SplitTokens({}, Axis("cp"), axis, zigzag=False, overlap="nccl")
    x, formats, found = torch.randn(3, 4, 64, generator=random), [], []
    for kind in (None, RowParallel(axis), OverlappedRow(axis, tokens)):
        linear = copy.deepcopy(whole)
        linear.communication = kind or linear.communication
        linear.weight.data = values.tensor_split(size, 1)[rank].clone() if kind else values.clone()
        with torch.autocast("cpu", torch.bfloat16):
            y = linear(x.tensor_split(size, 2)[rank] if kind else x)
        y.float().sum().backward()
        formats.append((y.dtype, linear.weight.grad.dtype, linear.bias.grad.dtype))
        found.append(y.tensor_split(size, 1)[rank] if len(y[0]) == 4 else y)
    return formats, [(y.float() - found[0].float()).abs().max().item() for y in found]


def test_row_linears_put_out_the_format_of_a_linear_under_autocast():
    """The bias is added in it, too, and differences are a few roundings of bf16, 2^-9 of sums of 64 numbers of about 8."""
    formats, differences = ranks(2)(rows_in_16_bits)[1]
    assert formats == [(torch.bfloat16, torch.float32, torch.float32)] * 3
    assert max(differences) < 4 * 2**-9 * 32


def collectives(folder, samples, small):
    """How many of each kind a pass forward and backward starts, both ways."""
    with Trace(folder, dist.get_rank()), mock.patch.object(overlapped_linear, "SMALL", small):
        both_ways(8, samples)
    return dict(Counter(json.loads(line)["op"] for line in trace_file(folder, dist.get_rank()).read_text().splitlines()))


def selective(folder):
    """The collectives of a linear within selective recomputation."""
    rank, axis = dist.get_rank(), everyone()

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(7, 5))

        def forward(self, x):
            return overlapped_linear.gather_linear(x.sin(), self.weight, None, axis, SimpleNamespace(local_len=6)).tanh()

    block = Block()
    model = torch.nn.Module()
    model.blocks = {"0": block}
    checkpoint_activations(model, "selective")
    with Trace(folder, rank):
        block(torch.ones(4, 3, 5, requires_grad=True)).sum().backward()
    return dict(Counter(json.loads(line)["op"] for line in trace_file(folder, rank).read_text().splitlines()))


def test_selective_recomputation_keeps_what_an_overlapped_linear_puts_out(tmp_path):
    """Nothing is gathered a third time, to multiply it again."""
    assert ranks(2)(selective, str(tmp_path)) == [{"all-gather": 1 + 1, "reduce-scatter": 1}] * 2


def test_of_the_librarys_operators_selective_recomputation_keeps_those_that_are_dear():
    """FP8's cast is not: kept, it would cost a byte a number, twice, beside what it was made of."""
    dear = {name: save_expensive_ops(None, getattr(torch.ops.course, name).default) == CheckpointPolicy.MUST_SAVE
            for name in ("gather_linear", "linear_scatter", "ring", "quantize")}
    assert dear == {"gather_linear": True, "linear_scatter": True, "ring": True, "quantize": False}
    assert save_expensive_ops(None, torch.ops.aten.convolution.default) == CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("samples", [4, 16])
def test_a_small_batch_is_one_collective(tmp_path, samples):
    """Forward and in the row linear's backward one each, one to gather the column linear's input again and one to scatter its
    gradient; plain linears have two of each."""
    expected = {"all-gather": 1 + 1 + 1 + 2, "reduce-scatter": 1 + 1 + 2}
    assert ranks(2)(collectives, str(tmp_path), samples, 2**21) == [expected] * 2


@pytest.mark.parametrize("samples", [4, 16])
def test_a_large_batch_is_one_collective_however_many_samples_it_has(tmp_path, samples):
    """As above; but where they are gathered, a CPU makes one of each sample, three times."""
    expected = {"all-gather": 3 * samples + 2, "reduce-scatter": 1 + 1 + 2}
    assert ranks(2)(collectives, str(tmp_path), samples, 0) == [expected] * 2


class SharedRoom(symmetric_memory.DoubleBuffer):
    """A room for processes on a CPU: files that all ranks have mapped, and a barrier of the group."""

    def __init__(self, shape, dtype, axis):
        name = f"{tempfile.gettempdir()}/room-{os.getppid()}-{axis.size}-{'-'.join(map(str, shape))}"
        size = 2 * torch.Size(shape).numel()
        self.places = [torch.from_file(f"{name}-{rank}", shared=True, size=size, dtype=dtype).view(2, *shape)
                       for rank in range(axis.size)]
        dist.barrier()                              # now all have mapped it, and it needs no name any more
        os.unlink(f"{name}-{axis.rank}")
        self.uses, self.graph, self.barriers = 0, -1, 0

    def barrier(self):
        self.barriers += 1
        dist.barrier()


def through_memory(tokens, samples):
    """`both_ways`, where ranks write into each other's memory; how many barriers that took."""
    rooms = {}

    def room(name, shape, *given):
        if (name, shape) not in rooms:
            rooms[name, shape] = SharedRoom(shape, *given)
        return rooms[name, shape]

    with (mock.patch.object(symmetric_memory, "double_buffer", room),
          mock.patch.object(symmetric_memory, "side_stream", lambda device: None),
          mock.patch.object(symmetric_memory, "is_supported", lambda x, axis, n: n % axis.size == 0),
          mock.patch("torch.cuda.is_current_stream_capturing", return_value=False)):
        difference = max(both_ways(tokens, samples, direct=True) for _ in range(2))
    return difference, sorted((name, shape[-1], room.barriers) for (name, shape), room in rooms.items())


@pytest.mark.parametrize(("size", "tokens"), [(2, 6), (3, 6), (3, 9)])
def test_overlapped_linears_are_the_plain_ones_through_each_others_memory(size, tokens):
    """Twice, so that each place is used again. Three gathers and two scatters each time."""
    for difference, barriers in ranks(size)(through_memory, tokens, 3):
        assert difference < 1e-12 and barriers == [("gather", 4, 2), ("gather", 5, 4), ("scatter", 4, 2), ("scatter", 5, 2)]


def test_a_graphs_first_use_of_a_room_begins_with_a_barrier_and_then_any_outside():
    """Two uses without a graph, two in one, one in the next, two without: places, and the channels of barriers."""
    room = symmetric_memory.DoubleBuffer.__new__(symmetric_memory.DoubleBuffer)
    room.handle, room.places, room.uses, room.graph = mock.Mock(), [torch.arange(2)], 0, -1

    def use(captured):
        with mock.patch("torch.cuda.is_current_stream_capturing", return_value=captured):
            place, = room.enter()
        room.barrier()
        channels = [call.kwargs["channel"] for call in room.handle.barrier.call_args_list]
        room.handle.barrier.reset_mock()
        return place.item(), channels

    assert [use(False), use(False)] == [(1, [1]), (0, [0])]
    symmetric_memory.new_graph()
    assert [use(True), use(True)] == [(1, [2, 1]), (0, [0])]
    symmetric_memory.new_graph()
    assert [use(True), use(False), use(False)] == [(1, [2, 1]), (0, [2, 0]), (1, [2, 1])]


def test_gpus_that_do_not_reach_each_others_memory_are_told_so():
    memory = mock.Mock()
    memory.rendezvous.side_effect = RuntimeError("peer access\nand more")
    with (mock.patch.dict(sys.modules, {"torch.distributed._symmetric_memory": memory}),
          mock.patch.object(torch.cuda, "current_device", return_value=0),
          mock.patch.object(torch.cuda, "synchronize", memory.synchronize),
          pytest.raises(CourseError, match=r"memory \(peer access\): set parallel.overlap=nccl")):
        symmetric_memory.DoubleBuffer((2, 3), torch.float32, Axis("tp", 2, 0, (0, 1), mock.Mock()))
    # none may write before all have their zeros there: see tests/gpu/test_gpu_symmetric.py
    assert [call[0] for call in memory.method_calls] == ["synchronize", "empty", "synchronize", "rendezvous"]
