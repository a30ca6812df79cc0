"""Experts on a GPU: grouped matmuls and permutations are those of plain PyTorch, and a graph trains as steps do."""

import pytest
import torch

from course import config as configuration
from course.bench import baselines
from course.models.experts import grouped_linear
from course.ops.permutation import sum_rows_backward_plain, sum_rows_plain
from course.parallel import build_mesh, join
from course.training.assemble import assemble

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SMALL = ["data.source=mock", "model.depth=4", "model.dim=256", "model.heads=4", "model.vocab=8192", "model.context=256",
         "model.expert_width=512", "train.global_batch=4", "train.micro_batch=0", "precision=bf16", "optim.warmup=0"]
WAYS = {"compiled": ["compile=true"], "recomputed": ["train.recompute=full"], "fully sharded": ["parallel.zero=3"],
        "FP8": ["precision=fp8", "fp8.keep=[]"], "Muon": ["optim.name=muon"], "biases": ["model.balance_rate=0.001"],
        "capacity": ["model.capacity_factor=1.25"], "shared": ["model.shared_experts=1"]}


@pytest.mark.parametrize("counts", [[3, 0, 200, 53], [256, 0, 0, 0], [0, 0, 0, 0], [100, 20, 30, 50]])
def test_grouped_matmuls_and_their_gradients(counts):
    """Also where rows belong to no expert: they are not read."""
    x, weight = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((256, 64), (4, 96, 64)))
    n, sizes = sum(counts), torch.tensor(counts, device="cuda")
    x[n:] = torch.nan
    found = [part.requires_grad_() for part in (x.clone(), weight.clone())]
    y = grouped_linear(*found, sizes)
    dy = torch.randn_like(y)
    dy[n:] = torch.nan
    y.backward(dy)
    its = [part.double().cpu().requires_grad_() for part in (x[:n], weight)]
    wanted = grouped_linear(*its, sizes.cpu())
    wanted.backward(dy[:n].double().cpu())
    for mine, other in ((y[:n], wanted), (found[0].grad[:n], its[0].grad), (found[1].grad, its[1].grad)):
        assert (mine.double().cpu() - other).norm() <= 2**-7 * other.norm()


@pytest.mark.parametrize("width", [64, 1000, 4096])
@pytest.mark.parametrize("k", [1, 2, 8])
def test_permutations(k, width):
    order = torch.randperm(100 * k, device="cuda").view(100, k)
    order = order.masked_fill(torch.rand(100, k, device="cuda") < 0.1, -1)
    rows, dy = (torch.randn(n, width, device="cuda", dtype=torch.bfloat16) for n in (100 * k, 100))
    gates, used = torch.rand(100, k, device="cuda"), order[order >= 0]
    for given in (gates, None):
        found = torch.ops.course.sum_rows(rows, order, given)
        wanted = sum_rows_plain(rows.double(), order, None if given is None else given.double())
        assert (found.double() - wanted).norm() <= 2**-8 * wanted.norm()
    drows, dgates = torch.ops.course.sum_rows_backward(dy, rows, order, gates)
    its = sum_rows_backward_plain(dy.double(), rows.double(), order, gates.double())
    assert (drows[used].double() - its[0][used]).norm() <= 2**-8 * its[0].norm()
    assert (dgates.double() - its[1]).norm() <= 1e-5 * its[1].norm()


def train(*settings: str, plain: bool = False, steps: int = 6) -> list[float]:
    """Losses of steps on one batch."""
    c = configuration.load("gpt-moe-demo", [*SMALL, *settings])
    training = assemble(c, build_mesh(c.parallel, join("cuda")))
    if plain:
        baselines.plain_experts(training.model)
    example = training.model.example(4, torch.device("cuda"))
    losses = [training.step(example)[0].item() for _ in range(steps)]
    torch._dynamo.reset()
    return losses


def test_losses_are_those_of_experts_in_plain_pytorch():
    mine = train()
    assert mine == pytest.approx(train(plain=True), rel=1e-2) and mine[-1] < 0.9 * mine[0]


@pytest.mark.parametrize("name", WAYS)
def test_every_way_trains(name):
    losses, eager = train(*WAYS[name]), train() if name in ("compiled", "recomputed", "fully sharded") else None
    assert losses[-1] < 0.95 * losses[0]
    assert eager is None or losses == pytest.approx(eager, rel=5e-3)


@pytest.mark.parametrize("more", [[], ["compile=true"], ["model.balance_rate=0.001"], ["model.capacity_factor=1.25"]])
def test_a_graph_trains_as_steps_do(more):
    assert train(*more, "graphs=true") == pytest.approx(train(*more), rel=5e-3)
