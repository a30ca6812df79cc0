"""CUDA graphs: replayed steps are those that would have been, bit for bit; what cannot be captured is a sentence."""

import pytest
import torch

from course import config
from course.ops.ema import moving_average
from course.parallel import build_mesh, join
from course.training.assemble import Training, assemble
from course.utils.errors import CourseError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SMALL = ["data.source=mock", "model.grid=[16,32]", "model.depth=3", "model.dim=64", "model.heads=4", "train.global_batch=4",
         "train.device=cuda", "train.steps=12", "optim.warmup=4"]
CASES = {"plain": [], "dropout": ["model.dropout=0.2", "model.drop_path=0.2"], "accumulation": ["train.micro_batch=2"],
         "clipping": ["optim.clip=0.05"], "bf16": ["precision=bf16"], "fp16, with skipped steps": ["precision=fp16"],
         "sgd": ["optim.name=sgd", "optim.momentum=0.9"], "recompute": ["train.recompute=full", "model.dropout=0.2"],
         "compiled": ["compile=true", "precision=bf16"], "fp8": ["precision=fp8"],
         "average": ["optim.ema=0.9"]}


def prepare(*settings: str) -> Training:
    c = config.load("vit-demo", [*SMALL, *settings])
    return assemble(c, build_mesh(c.parallel, join("cuda")))


def trained(*settings: str, steps: int = 10, bad: int = 7) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses, parameters and averages after some steps, of which one has an input that is not finite; how many were skipped."""
    training, losses = prepare(*settings), []
    for number in range(1, steps + 1):
        batch = training.model.example(4, torch.device("cuda"), 4 * number)
        if number == bad:
            batch["input"][0, 0, 0, 0] = float("inf")
        losses.append(training.step(batch)[0])
    kept = [*training.model.parameters(), *moving_average(training.optimizer).values()]
    return [loss.item() for loss in losses], [p.detach().clone() for p in kept], int(training.progress.skipped_steps.item())


@pytest.mark.parametrize("name", CASES)
def test_replayed_steps_are_those_that_would_have_been(name):
    """The learning rate warms up, a step is skipped, dropout differs from step to step."""
    eager, graphed = trained(*CASES[name]), trained(*CASES[name], "graphs=true")
    assert [str(x) for x in graphed[0]] == [str(x) for x in eager[0]]            # a NaN among them
    assert all(torch.equal(a, b) for a, b in zip(graphed[1], eager[1], strict=True))
    assert graphed[2] == eager[2] >= 1


def test_results_are_copies():
    """The bug of reading a stale buffer: the loss of an earlier step must not change with the next replay."""
    training = prepare("graphs=true")
    batches = [training.model.example(4, torch.device("cuda"), 4 * number) for number in range(6)]
    losses = [training.step(batch)[0] for batch in batches]
    assert len({loss.item() for loss in losses}) == 6


def test_another_shape_is_a_sentence():
    training = prepare("graphs=true")
    for _ in range(4):
        training.step(training.model.example(4, torch.device("cuda")))
    with pytest.raises(CourseError, match=r"captured with `\w+` of shape .* only be replayed on the shapes"):
        training.step(training.model.example(2, torch.device("cuda")))


def test_what_cannot_be_captured_is_a_sentence():
    training = prepare("graphs=true")
    training.model.head.register_forward_hook(lambda module, inputs, output: print(output.sum().item()) and None)
    with pytest.raises(CourseError, match=r"cannot be captured in a CUDA graph .* may wait for the GPU"):
        for _ in range(4):
            training.step(training.model.example(4, torch.device("cuda")))


def test_after_a_capture_that_failed_random_numbers_are_drawn_as_before():
    """In a notebook the process goes on."""
    training = prepare("graphs=true")
    training.model.head.register_forward_hook(lambda module, inputs, output: print(output.sum().item()) and None)
    batch = training.model.example(4, torch.device("cuda"))
    torch.manual_seed(3)
    wanted = torch.randn(5, device="cuda"), torch.randn(5, device="cuda")
    torch.manual_seed(3)
    assert torch.equal(torch.randn(5, device="cuda"), wanted[0])
    with pytest.raises(CourseError, match="cannot be captured"):
        for _ in range(4):
            training.step(batch)
    assert torch.equal(torch.randn(5, device="cuda"), wanted[1])
    torch.manual_seed(3)
    assert torch.equal(torch.randn(5, device="cuda"), wanted[0])
