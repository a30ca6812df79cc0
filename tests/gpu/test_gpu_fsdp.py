"""Fully sharded training on one GPU, as one rank of one: eager, compiled, in a CUDA graph, recomputed, in FP8."""

import gc

import pytest
import torch

from course import config as configuration
from course.ops.storage import has_memory
from course.parallel import build_mesh, join
from course.training.assemble import assemble

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SMALL = ["data.source=mock", "model.depth=6", "model.dim=1024", "model.heads=8", "model.vocab=8192", "model.context=512",
         "train.global_batch=4", "train.micro_batch=0", "precision=bf16", "optim.warmup=0"]
WAYS = {"eager": ["compile=false"], "compiled": ["compile=true"], "graph": ["compile=true", "graphs=true"],
        "Triton in a graph": ["compile=true", "graphs=true", "kernels=triton"],
        "recomputed": ["compile=true", "train.recompute=full"], "micro-batches": ["compile=true", "train.micro_batch=2"],
        "FP8": ["compile=true", "precision=fp8"], "FP8 in a graph": ["compile=true", "graphs=true", "precision=fp8"]}


def train(*settings: str) -> tuple[list[float], int, int, bool]:
    """Losses of eight steps, bytes in use after them, the most in the last two, and whether weights are in memory then."""
    c = configuration.load("gpt-124m", [*SMALL, *settings])
    gc.collect()                                    # graphs of other trainings
    before = torch.cuda.memory_allocated()
    training = assemble(c, build_mesh(c.parallel, join("cuda")))
    losses = []
    for number in range(8):
        if number == 6:
            torch.cuda.reset_peak_memory_stats()
        losses.append(training.step(training.model.example(4, torch.device("cuda"), 4 * number))[0].item())
    after, peak = (size - before for size in (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))
    held = any(has_memory(p) for p in training.model.parameters() if p.requires_grad)
    del training
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    return losses, after, peak, held


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("name", WAYS)
def test_one_rank_trains_as_without(name, zero):
    plain, *_ = train("parallel.zero=0", *WAYS[name])
    sharded, _, _, held = train(f"parallel.zero={zero}", *WAYS[name])
    assert sharded == pytest.approx(plain, rel=2e-3)
    assert held == (zero == 2)


def test_weights_take_no_memory_between_steps():
    """Six blocks of 12.6 million weights in 16 bits, and as much of the float32 rest as is not a master."""
    (_, two, most_two, _), (_, three, most_three, _) = (train(f"parallel.zero={zero}", "compile=true") for zero in (2, 3))
    assert two - three > 6 * 12 * 1024**2 * 2 * 0.95
    assert most_two - most_three > 3 * 12 * 1024**2 * 2
