"""torch.compile in every layout: the same numbers as without, and no graph break but where a layout declares one."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from course.parallel.context_parallel import block_attention
from course.ranks.notebook_ranks import ranks
from tests.parallel.test_parity import INTERLEAVED, MODELS, ZEROS, draw, layout

# where a layout leaves the compiler: functions whose communication runs beside their computation and is no operator, and a mask
# that the compiler cannot make; and GPT's loss, whose chunks it would put into an order of its own. All others: nowhere
BOUNDARIES = {("vit", f"dp=2 {ZEROS}"): {"wait_for_gather"}, ("gpt", "cp=2 context=gather"): {"look_back"}}
LAYOUTS = [("vit", spec) for spec in (
    "dp=2", f"dp=2 {ZEROS}", "dp=2 zero=3", "tp=2", "tp=2 sp=true overlap=none", "tp=2 sp=true", "tp=2 sp=true overlap=symmetric",
    "cp=2 context=gather", "cp=2 context=all_to_all", "cp=2 context=ring", f"pp=2 {INTERLEAVED}")]
OTHERS = [(kind, spec) for kind in ("gpt", "dit")
          for spec in ("tp=2 sp=true overlap=none", "tp=2 sp=true", "cp=2 context=gather", "cp=2 context=ring")]
OTHERS += [("llama", spec) for spec in ("dp=2", "tp=2 sp=true overlap=none", "cp=2 context=all_to_all")]


def train(overrides: list[str], kind: str) -> tuple[list[list[float]], list[str]]:
    """Losses of two steps, eager and compiled, and what the compiler says of each break."""
    from torch._dynamo.utils import counters

    losses = [two_steps(kind, [*overrides, f"compile={compiled}"]) for compiled in (False, True)]
    assert counters["stats"]["unique_graphs"] > 0
    return losses, list(counters["graph_break"])


def recomputed(overrides: list[str], kind: str) -> list[tuple[list[float], int]]:
    """Losses of two compiled steps and how many graphs they have, with each kind of recomputation."""
    from torch._dynamo.utils import counters

    return [(two_steps(kind, [*overrides, "compile=true", f"train.recompute={how}"]), counters["stats"]["unique_graphs"])
            for how in ("none", "full", "selective")]


def two_steps(kind: str, overrides: list[str]) -> list[float]:
    """Losses of two steps; graphs are recorded and differentiated, but no kernels are written."""
    from unittest import mock

    import torch
    from torch._dynamo.utils import counters
    from torch.utils._python_dispatch import _disable_current_modes

    from course import config
    from course.data import order
    from course.parallel import build_mesh, join
    from course.training.assemble import assemble
    from tests.training.test_compile import compile_chunk_quickly, compile_quickly, compile_within_quickly

    with (_disable_current_modes(), mock.patch("torch.nn.Module.compile", compile_quickly),      # no trace of collectives
          mock.patch("course.models.gpt.Chunk.compile", compile_chunk_quickly),
          mock.patch("course.training.assemble.compile_within", compile_within_quickly)):
        preset, small = MODELS[kind]
        c = config.load(preset, [*small, *overrides])
        mesh = build_mesh(c.parallel, join("cpu"))
        training = assemble(c, mesh)
        torch._dynamo.reset()
        counters.clear()
        batch = {**draw(kind, torch.Generator().manual_seed(1)), "sample": torch.arange(8)}
        mine = order.my_slice(8, mesh.dp.size, mesh.dp.rank)
        part = {name: tensor[mine] for name, tensor in batch.items()}
        losses = [training.step(part)[0].item() for _ in range(2)]
        training.gradients.wait_parameters()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "spec", "more"), [
    *((kind, spec, "") for kind, spec in [*LAYOUTS, *OTHERS]), ("gpt", "tp=2 sp=true", "kernels=triton model.mlp=gelu_tanh"),
    ("dit", "tp=2 sp=true", "kernels=triton"), ("dit", "tp=2", "kernels=triton"),
    ("llama", "tp=2", "model.qk_norm=true model.head_dim=6")])
def test_compiled_is_equal_and_leaves_the_compiler_only_where_declared(kind, spec, more):
    size, overrides = layout(spec)
    declared: Any = BOUNDARIES.get((kind, spec), set()) | ({"chunked_loss"} if kind in ("gpt", "llama") else set())
    for (eager, compiled), breaks in ranks(size, timeout=300)(train, [*overrides, *more.split()], kind):
        assert compiled == pytest.approx(eager, rel=1e-12)
        assert {name for name in declared if any(f"`{name}`" in text for text in breaks)} == declared
        assert all(any(f"`{name}`" in text for name in declared) for text in breaks), breaks


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "spec"), [*BOUNDARIES, *(("vit", spec) for spec in (
    "tp=2 sp=true overlap=none", "tp=2 sp=true", "cp=2 context=ring"))])
def test_recomputation_leaves_no_block_uncompiled(kind, spec):
    """A block that leaves the compiler within a checkpoint would run uncompiled without a word: then there are fewer graphs."""
    size, overrides = layout(spec)
    for (losses, graphs), *others in ranks(size, timeout=300)(recomputed, overrides, kind):
        for again, found in others:
            assert again == pytest.approx(losses, rel=1e-12)
            assert found >= graphs


def padding(forward):
    """A kernel of blocks whose log-sum-exp is a part of a longer one, as PyTorch's memory-efficient attention has it."""
    def run(*given):
        out, lse = forward(*given)
        return out, F.pad(lse, (0, -lse.shape[-1] % 32))[..., :lse.shape[-1]]

    return run


def strides_of_a_ring():
    """Of what it puts out, forward and backward, as computed and as promised."""
    name, (q, k, v) = dist.group.WORLD.group_name, (torch.randn(2, 2, 45, 8) for _ in range(3))

    def both(function, *given):
        how = (False, name, [45])
        with _disable_current_modes():              # `Trace`, which knows no device without memory
            promised = function(*(x.to("meta") for x in given), *how)
        found = function(*given, *how)
        return found, [(mine.stride(), theirs.stride()) for mine, theirs in zip(found, promised, strict=True)]

    with mock.patch.object(block_attention, "forward", padding(block_attention.forward)):
        (out, lse), forward = both(torch.ops.course.ring, q, k, v)
    return forward + both(torch.ops.course.ring_backward, torch.ones_like(out), q, k, v, out, lse)[1]


def test_what_a_ring_puts_out_lies_as_the_compiler_is_told():
    """Whatever its kernels put out: the compiler's code fails with other strides."""
    (strides,) = ranks(1)(strides_of_a_ring)
    assert len(strides) == 5 and all(found == promised for found, promised in strides), strides
