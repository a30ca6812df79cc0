"""The tape has the semantics of CUDA graphs: fixed addresses, Python once, nothing computed while capturing, nothing read."""

import pytest
import torch
from torch import nn

from course import config, parallel
from course.lab.exercises import lesson06_cuda_graphs
from course.lab.instruments import cpu_graph
from course.training.assemble import Training, assemble
from course.utils.errors import CourseError

CPU = torch.device("cpu")
SMALL = ["data.source=mock", "model.grid=[16,32]", "model.depth=2", "model.dim=32", "model.heads=2", "train.global_batch=4",
         "train.device=cpu", "train.steps=12", "optim.warmup=4"]
CASES = {"plain": [], "dropout": ["model.dropout=0.2", "model.drop_path=0.2"], "accumulation": ["train.micro_batch=2"],
         "clipping": ["optim.clip=0.05"], "bf16": ["precision=bf16"], "sgd": ["optim.name=sgd", "optim.momentum=0.9"],
         "recompute": ["train.recompute=full", "model.dropout=0.2"]}


def prepare(*settings: str) -> Training:
    c = config.load("vit-demo", [*SMALL, *settings])
    return assemble(c, parallel.build_mesh(c.parallel, parallel.World(device=CPU)))


@pytest.mark.parametrize("name", CASES)
def test_the_librarys_step_replays_as_it_would_have_run(name):
    """Bit for bit: the learning rate warms up, a step is skipped, dropout differs from step to step. As tests/gpu does."""
    def trained(on_tape: bool) -> tuple[list[str], list[torch.Tensor], int]:
        training, losses = prepare(*CASES[name]), []
        step = lesson06_cuda_graphs.Captured(training.step, CPU) if on_tape else training.step
        for number in range(1, 8):
            batch = training.model.example(4, CPU, 4 * number)
            if number == 6:
                batch["input"][0, 0, 0, 0] = float("inf")
            losses.append(step(batch)[0])
        return [str(loss.item()) for loss in losses], [p.detach().clone() for p in training.model.parameters()], \
            int(training.progress.skipped_steps)

    eager, replayed = trained(False), trained(True)
    assert replayed[0] == eager[0] and len(set(eager[0])) == 7
    assert all(torch.equal(a, b) for a, b in zip(replayed[1], eager[1], strict=True))
    assert replayed[2] == eager[2] == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(),
                                                                                         reason="needs a GPU"))])
def test_the_learners_class_is_right_on_a_tape_and_on_a_gpu(device):
    def steps(wrap) -> list[tuple[torch.Tensor, ...]]:
        torch.manual_seed(0)
        share = 0.5 if device == "cpu" else 0.0     # on a GPU a replay's random numbers are new, not those of eager steps
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(share), nn.Linear(16, 1)).to(device)
        adam = torch.optim.Adam(model.parameters(), torch.tensor(0.01, device=device), fused=True, capturable=device == "cuda")

        def step(batch):
            adam.zero_grad()
            loss = ((model(batch["x"]) - batch["y"])**2).mean()
            loss.backward()
            adam.step()
            return loss.detach(), model[0].weight.detach().norm()

        one = wrap(step)
        generator = torch.Generator().manual_seed(1)
        batches = [{name: torch.randn(4, width, generator=generator).to(device) for name, width in (("x", 8), ("y", 1))}
                   for _ in range(9)]
        return [one(batch) for batch in batches]

    eager = steps(lambda step: step)
    captured = steps(lambda step: lesson06_cuda_graphs.Captured(step, torch.device(device)))
    for (a, b), (c, d) in zip(eager, captured, strict=True):
        assert torch.allclose(a, c, 1e-6) and torch.allclose(b, d, 1e-6)


def test_capturing_computes_nothing():
    weight, x, graph = torch.ones(3), torch.full((3,), 2.0), cpu_graph.Graph()
    before = torch.get_rng_state()
    with cpu_graph.capturing(graph):
        weight[1:].add_(x[1:])
        weight.mul_(3)
        result = weight + torch.rand(3)
    assert weight.tolist() == [1, 1, 1] and result.isnan().all() and torch.equal(torch.get_rng_state(), before)
    graph.replay()
    assert weight.tolist() == [3, 9, 9] and (result >= weight).all()


def test_a_replay_reads_and_writes_where_the_capture_did():
    x, graph = torch.zeros(2), cpu_graph.Graph()
    with cpu_graph.capturing(graph):
        y = (x + 1).view(2, 1)
        z = torch.cat([y, y])
    for value in (5.0, 7.0):
        where = z.data_ptr()
        x.fill_(value)
        graph.replay()
        assert z.flatten().tolist() == [value + 1] * 4 and y.tolist() == [[value + 1]] * 2 and z.data_ptr() == where
    x = torch.full((2,), 9.0)                       # another tensor of the same name
    graph.replay()
    assert z[0].item() == 8.0


def test_python_is_decided_and_random_numbers_are_not():
    number, graph, results = 1, cpu_graph.Graph(), []
    with cpu_graph.capturing(graph):
        fixed = torch.zeros(2) + number
        drawn = torch.nn.functional.dropout(torch.ones(64))
    number = 2
    for _ in range(2):
        graph.replay()
        results.append(drawn.clone())
    assert fixed.tolist() == [1, 1] and number == 2 and not torch.equal(*results)


@pytest.mark.parametrize(("line", "words"), [
    (lambda x: x.sum().item(), "looked at the value"), (lambda x: bool(x.sum() > 0), "torch.where"),
    (lambda x: float(x[0]), "looked at"), (lambda x: torch.equal(x, x), "torch.equal"),
    (lambda x: x[x > 0], "shape of the result"), (lambda x: x.nonzero(), "depends on values"),
    (lambda x: x.tolist(), r"\.tolist\(\)"), (lambda x: x.numpy(), "numpy"),
    (lambda x: x.cpu(), r"\.cpu\(\)"), (lambda x: torch.tensor(3.0), "torch.full"),
    (lambda x: torch.rand(2, generator=torch.Generator()), "generator"),
])
def test_what_cannot_be_captured_is_a_sentence(line, words):
    x, state, graph = torch.ones(3), torch.zeros(()), cpu_graph.Graph()
    with pytest.raises(CourseError, match=words), cpu_graph.capturing(graph):
        state += 1
        line(x)
    assert state == 0 and not graph.calls
    with pytest.raises(CourseError, match="nothing to replay"):
        graph.replay()


def test_an_index_of_whole_numbers_is_fine():
    table, rows, graph = torch.arange(6.0).view(3, 2), torch.tensor([2, 0]), cpu_graph.Graph()
    with cpu_graph.capturing(graph):
        found = table[rows]
    rows.copy_(torch.tensor([1, 1]))
    graph.replay()
    assert found.tolist() == [[2, 3], [2, 3]]


def test_states_made_in_the_capture_are_made_anew_in_every_replay():
    graph, x = cpu_graph.Graph(), torch.ones(())
    with cpu_graph.capturing(graph):
        momentum = torch.zeros(())
        momentum += x
    for _ in range(3):
        graph.replay()
    assert momentum == 1


def test_bytes_and_names():
    graph, x = cpu_graph.Graph(), torch.ones(4)
    with cpu_graph.capturing(graph):
        ((x * 2).view(2, 2) @ torch.empty(2, 2).fill_(1)).add_(1)
    assert [call.name for call in graph.calls] == ["mul", "fill_", "mm", "add_"] and graph.bytes == 32


def test_a_call_again_is_its_prepared_form():
    """Where PyTorch has no variant that writes into given tensors, the results are copied."""
    graph, x = cpu_graph.Graph(), torch.randn(4, 4)
    with cpu_graph.capturing(graph):
        made = [x @ x, *torch.max(x, 1), x.double(), torch.zeros_like(x), torch.layer_norm(x, (4,))]
    graph.replay()
    quick = [tensor.clone() for tensor in made]
    for call in graph.calls:
        call.repeat()
    assert all(torch.equal(a, b) for a, b in zip(quick, made, strict=True))
