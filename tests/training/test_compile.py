"""Which parts torch.compile compiles, and how often."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

from course import config
from course.parallel import build_mesh, join
from course.training.assemble import assemble


def compile_quickly(module: torch.nn.Module) -> None:
    """In the place of `Module.compile`: graphs are recorded and differentiated as ever, but no kernels are written."""
    module.__dict__["_compiled_call_impl"] = torch.compile(module._call_impl, backend="aot_eager")


def compile_chunk_quickly(chunk: Any) -> None:
    """The same of a GPT's `Chunk`, which is no module."""
    chunk.run = torch.compile(chunk.run, backend="aot_eager")


def compile_within_quickly(model: Any) -> None:
    """The same of `compile_within`."""
    for block in model.blocks.values():
        block.forward = torch.compile(block.forward, backend="aot_eager")


def losses_and_graphs(*settings):
    """Losses of two steps, and how many graphs the compiler made for them."""
    torch._dynamo.reset()
    counters.clear()
    c = config.load("vit-demo", ["data.source=mock", "model.depth=10", "precision=fp64", "train.device=cpu", *settings])
    with (mock.patch("torch.nn.Module.compile", compile_quickly),
          mock.patch("course.models.gpt.Chunk.compile", compile_chunk_quickly)):
        training = assemble(c, build_mesh(c.parallel, join("cpu")))
    batch = {name: x.double() if x.is_floating_point() else x
             for name, x in training.model.example(2, torch.device("cpu")).items()}
    return [training.step(batch)[0].item() for _ in range(2)], counters["stats"]["unique_graphs"]


def test_all_blocks_run_the_code_of_the_first():
    """Ten blocks: one graph for all, and one each for embedding, head and loss."""
    (eager, _), (compiled, graphs) = losses_and_graphs(), losses_and_graphs("compile=true")
    assert compiled == pytest.approx(eager, rel=1e-12)
    assert graphs == 4


@pytest.mark.parametrize("how", ["full", "selective"])
def test_blocks_that_recompute_are_compiled_too(how):
    (eager, _), (compiled, graphs) = losses_and_graphs(), losses_and_graphs("compile=true", f"train.recompute={how}")
    assert compiled == pytest.approx(eager, rel=1e-12)
    assert graphs == 4


@pytest.mark.slow
def test_blocks_that_differ_are_compiled_one_by_one_and_never_left_out():
    """Ten versions of a block are more than PyTorch's limit, beyond which it would run the others uncompiled."""
    settings = ("model.dropout=0.1", "model.drop_path=0.2")
    (eager, _), (compiled, found) = losses_and_graphs(*settings), losses_and_graphs(*settings, "compile=true")
    assert compiled == pytest.approx(eager, rel=1e-12)
    assert found == 13


def test_another_attention_is_not_taken_from_the_cache_on_disk():
    """PyTorch's cache of differentiated graphs does not ask which backend was chosen."""
    with torch._functorch.config.patch(enable_autograd_cache=True):
        losses_and_graphs("compile=true")
        assert torch._functorch.config.enable_autograd_cache
        losses_and_graphs("compile=true", "attention=math")
        assert not torch._functorch.config.enable_autograd_cache
    losses_and_graphs("attention=default")           # all backends again


def largest_graph(tokens):
    """How many operations the largest graph of a compiled GPT has, with chunks of 8 tokens, and the losses without and with."""
    settings = ["data.source=mock", f"model.context={tokens}", "model.dim=16", "model.depth=1", "model.heads=2", "model.vocab=32",
                "model.loss_chunk=8", "precision=fp64", "train.device=cpu"]
    sizes, losses = [], []

    def backend(graph, _inputs):
        sizes.append(len(graph.graph.nodes))
        return graph.forward

    def record(module):
        module.__dict__["_compiled_call_impl"] = torch.compile(module._call_impl, backend=backend)

    for compiled in (False, True):
        torch._dynamo.reset()
        c = config.load("gpt-demo", [*settings, f"compile={compiled}"])
        with mock.patch("torch.nn.Module.compile", record):
            training = assemble(c, build_mesh(c.parallel, join("cpu")))
        losses.append(training.step(training.model.example(2, torch.device("cpu")))[0].item())
    return max(sizes), losses


def test_a_loss_in_many_chunks_is_no_larger_program():
    few, _ = largest_graph(16)
    many, (eager, compiled) = largest_graph(64)
    assert many == few
    assert compiled == pytest.approx(eager, rel=1e-12)
