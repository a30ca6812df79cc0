"""What a pipeline cannot share out is refused before anything is trained."""

import pytest
import torch
from torch import nn

from course.config import Parallel
from course.errors import CourseError
from course.models import ViTConfig, build_model
from course.parallel import World, build_mesh, parallelize
from course.reshard import pretended


def cut(change, **settings):
    """A ViT of five blocks that `change` has changed, cut for a pipeline's first rank of two."""
    model = build_model(ViTConfig(grid=(8, 16), channels=3, patch=4, dim=16, depth=5, heads=4))
    change(model)
    with pretended(0, 2):
        layout = Parallel(pp=2, dp=1, **settings)
        return parallelize(model, build_mesh(layout, World(0, 2, torch.device("cpu"))), layout)


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
