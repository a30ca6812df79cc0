"""What flows between blocks in 16 bits. The other formats are tested with the training that they are for."""

import pytest
import torch

from course import config
from course.ops import number_formats
from course.parallel import build_mesh, join
from course.ranks.notebook_ranks import ranks
from course.training import verify
from course.training.assemble import assemble
from course.utils.errors import CourseError

SMALL = ["data.source=mock", "model.depth=3", "train.device=cpu", "precision=bf16"]
WIDE = {"vit-demo": torch.float32, "gpt-demo": torch.float32, "dit-demo": torch.bfloat16}     # DiT's positions are no parameters


def streams(preset, *settings):
    """Losses of three steps, and the formats of what each block was given."""
    c = config.load(preset, [*SMALL, *settings])
    training = assemble(c, build_mesh(c.parallel, join("cpu")))
    seen = []
    for block in training.model.blocks.values():
        block.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    batch = training.model.example(4, torch.device("cpu"))
    return [training.step(batch)[0].item() for _ in range(3)], set(seen)


@pytest.mark.parametrize("preset", WIDE)
def test_narrow_keeps_16_bits_from_block_to_block_and_trains_as_wide_does(preset):
    more = ["model.residual=false", "optim.lr=0.01"] if preset == "vit-demo" else []
    (wide, full), (narrow, low) = streams(preset, *more), streams(preset, *more, "stream=narrow")
    assert full == {WIDE[preset]} and low == {torch.bfloat16}
    assert narrow == pytest.approx(wide, rel=2e-2)
    assert (narrow != wide) == (full != low)


def test_narrow_stages_send_16_bits():
    alone, _ = streams("vit-demo", "stream=narrow", "train.micro_batch=1", "model.depth=4")
    found = ranks(2, timeout=120)(streams, "vit-demo", "stream=narrow", "train.micro_batch=1", "model.depth=4", "parallel.pp=2")
    assert found[0][1] == found[1][1] == {torch.bfloat16}
    assert [sum(pair) for pair in zip(found[0][0], found[1][0], strict=True)] == pytest.approx(alone, rel=1e-2)


@pytest.mark.parametrize("preset", WIDE)
@pytest.mark.parametrize("settings", ["", "parallel.sp=true"])
def test_narrow_stays_narrow_where_tp_adds_a_bias_in_32_bits(preset, settings):
    more = ["stream=narrow", "model.depth=2", "parallel.tp=2", *settings.split()]
    found = ranks(2, timeout=240)(streams, preset, *more)
    assert found[0][1] == found[1][1] == {torch.bfloat16}


@pytest.mark.slow
def test_narrow_layouts_can_be_verified():
    """The exact run beside it, in float64, has no 16 bits to be narrow in."""
    c = config.load("vit-demo", [*verify.DEFAULTS, *SMALL, "stream=narrow", "model.residual=false", "parallel.tp=2"])
    gaps = ranks(2, timeout=120)(verify.compare, c)[0]
    assert gaps and not any(gap.wrong for gap in gaps)


def test_narrow_without_16_bits_is_a_sentence():
    with pytest.raises(CourseError, match="stream=narrow is for 16-bit matmuls, and precision=tf32 has none"):
        config.load("vit-demo", ["stream=narrow", "precision=tf32"])


def test_narrow_takes_every_branch_of_a_block_whatever_it_is_called():
    """A block of another model may have more than attention and MLP; norms put out what autocast gives them."""
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.attn, self.cross = torch.nn.LayerNorm(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    model = torch.nn.Module()
    model.embed, model.blocks = torch.nn.Embedding(3, 4), torch.nn.ModuleDict({"0": Block()})
    number_formats.cast_residual_stream(model, "bf16")
    block, x = model.blocks["0"], torch.zeros(1, 2, 4)
    assert [block.norm(x).dtype, block.attn(x).dtype, block.cross(x).dtype, model.embed(torch.zeros(1, 2).long()).dtype] == [
        torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16]


def test_the_format_of_matmuls_is_that_of_a_linear_under_autocast():
    for kind in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.ones(2, 4, dtype=kind)
        assert number_formats.matmul_dtype(x) == kind
        with torch.autocast("cpu", torch.bfloat16):
            assert number_formats.matmul_dtype(x) == torch.nn.functional.linear(x, x).dtype
