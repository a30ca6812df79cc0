"""What a pipeline cannot share out is refused before anything is trained; what a stage leaves unused has a gradient of zeros."""

import pytest
import torch
from torch import nn

from course.config import Parallel
from course.convert.reshard import pretended
from course.models import GPTConfig, ViTConfig, build_model
from course.models.gpt import TENSOR_PLAN
from course.parallel import World, build_mesh, parallelize
from course.parallel.pipeline_parallel.runtime import Message, Pipeline
from course.utils.errors import CourseError


def cut(change, **settings):
    """A ViT of five blocks that `change` has changed, cut for a pipeline's first rank of two."""
    model = build_model(ViTConfig(grid=(8, 16), channels=3, patch=4, dim=16, depth=5, heads=4))
    change(model)
    with pretended(0, 2):
        settings = Parallel(pp=2, dp=1, **settings)
        parallelize(model, build_mesh(settings, World(0, 2, torch.device("cpu"))), settings)
        return model


def a_norm_beside(model):
    model.final = nn.LayerNorm(16, device="meta")


def a_loss_that_learns(model):
    model.loss.temperature = nn.Parameter(torch.empty((), device="meta"))


def a_parameter_of_the_model_itself(model):
    model.position = nn.Parameter(torch.empty(16, device="meta"))


def the_embedding_under_a_second_name(model):
    model.encoder = model.embed


def a_block_used_twice(model):
    model.blocks["4"] = model.blocks["2"]


def a_weight_in_two_blocks(model):
    model.blocks["3"].mlp.up.weight = model.blocks["0"].mlp.up.weight


def a_weight_of_block_and_head(model):
    model.head.norm.weight = model.blocks["1"].norm1.weight


def a_weight_of_embedding_and_block(model):
    model.blocks["4"].norm1.weight = model.embed.pos


REFUSED = {a_norm_beside: r"final\.weight is in none of model\.embed.*parallel\.pp=1",
           a_loss_that_learns: r"loss\.temperature is in none of",
           a_parameter_of_the_model_itself: r"position is in none of",
           the_embedding_under_a_second_name: r"encoder\.\S+ is in none of",
           a_block_used_twice: r"blocks\.2\.norm1\.weight is shared by blocks\.2 and blocks\.4.*stages 0 and 1.*parallel\.pp=1",
           a_weight_in_two_blocks: r"blocks\.0\.mlp\.up\.weight is shared by blocks\.0 and blocks\.3",
           a_weight_of_block_and_head: r"blocks\.1\.norm1\.weight is shared by blocks\.1 and head",
           a_weight_of_embedding_and_block: r"embed\.pos is shared by embed and blocks\.4"}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_what_two_stages_would_each_train_is_refused(change):
    with pytest.raises(CourseError, match=REFUSED[change]):
        cut(change)


def test_two_chunks_of_a_rank_do_not_share_either():
    """Blocks 2 and 4 are on rank 1, on stages 1 and 3: data parallelism expects one gradient of each micro-batch."""
    with pytest.raises(CourseError, match=r"stages 1 and 3"):
        cut(a_block_used_twice, schedule="interleaved", chunks=2)


def test_what_one_stage_shares_and_modules_without_parameters_stay():
    def change(model):
        model.blocks["1"].mlp = model.blocks["0"].mlp
        model.noise = nn.Identity()

    model = cut(change)
    assert list(model.blocks) == ["0", "1", "2"] and model.blocks["1"].mlp is model.blocks["0"].mlp
    assert isinstance(model.noise, nn.Identity) and model.head is None


@pytest.mark.parametrize(("out", "words"), [
    ((torch.ones(3, 2), torch.ones(12, 16)), r"a tensor of shape \(12, 16\) for 3 samples"),
    (torch.ones(()), r"a tensor of shape \(\)"), ((torch.ones(3), None), "a NoneType"), ({"x": torch.ones(3)}, "a dict")])
def test_a_message_that_is_of_no_samples_is_refused(out, words):
    with pytest.raises(CourseError, match=words):
        Message.of(out, 3)


def test_a_stage_may_leave_a_part_of_what_it_is_given(monkeypatch):
    """The last of two stages is given three tensors of ones and uses the second: its rank sends a gradient of each."""
    sent = []
    monkeypatch.setattr(torch.distributed, "irecv", lambda part, *_: Arrived(part.fill_(1)))
    monkeypatch.setattr(torch.distributed, "isend", lambda part, *_: sent.append(part.tolist()) or Arrived())
    weight = torch.tensor(2.0, requires_grad=True)
    with pretended(1, 2):
        pipeline = Pipeline(build_mesh(Parallel(pp=2, dp=1), World(1, 2, torch.device("cpu"))), "1f1b", 1)
        pipeline.messages[0] = Message(((1,),) * 3, (torch.float32,) * 3, (True,) * 3, False)
        losses = pipeline.train(lambda chunk, micro, x: (x[1] * weight).sum(), [2, 1])
    assert [loss.item() for loss in losses] == [4, 2] and weight.grad.item() == 3
    assert sent == [[[0], [0]], [[2], [2]], [[0], [0]], [[0]], [[2]], [[0]]]


class Arrived:
    """A message that is there."""

    def __init__(self, part=None):
        self.part = part

    def wait(self):
        pass

    def is_completed(self):
        return True


def test_a_tied_weight_of_which_tp_has_parts_too_is_refused():
    """Its gradient would be added up over the two stages and not over tp: each rank would train a copy of its own."""
    p = Parallel(pp=2, tp=2, sp=True)
    with pretended(0, 4):
        mesh = build_mesh(p, World(0, 4))
        with torch.device("meta"):
            model = build_model(GPTConfig(vocab=24, context=8, dim=16, depth=2, heads=4))
        model.tensor_plan = TENSOR_PLAN
        with pytest.raises(CourseError, match=r"share embed.token.weight, and tp has parts .*: cut it in .* tensor_plan"):
            parallelize(model, mesh, p)
