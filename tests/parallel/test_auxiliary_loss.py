"""An auxiliary loss flows with the stream, (B,): in every layout it has the gradient that it has in one process."""

from unittest import mock

import pytest
import torch

from course.models import MODELS, ViT, ViTConfig
from course.models.layers import SumOverTokens
from course.models.vit import RelativeL2
from course.ranks.notebook_ranks import ranks
from tests.parallel.test_parity import layout, serial, train


class Both(RelativeL2):
    """A ViT's loss, and what its blocks ask for."""

    def __init__(self):
        super().__init__()
        self.sum_over_tokens = SumOverTokens()

    def forward(self, output, batch):
        output, penalty = output
        total, weight = super().forward(output, batch)
        return total + 0.01 * (self.sum_over_tokens(penalty) * self.weight(batch)).sum(), weight


class Penalised(ViT):
    """A ViT whose blocks are to put out small numbers."""

    def __init__(self, c, seed=0):
        super().__init__(c, seed)
        self.loss = Both()

    def forward(self, batch, x=None):
        x, penalty = (self.embed(batch), 0.0) if self.embed is not None else x
        for block in self.blocks.values():
            x = block(x, batch)
            penalty = penalty + x.square().flatten(1).sum(1)            # (B,)
        return (x if self.head is None else self.head(x)), penalty


def penalised(overrides):
    """`train` of the parity tests with these blocks."""
    with mock.patch.dict(MODELS, {ViTConfig: Penalised}):
        return train(overrides)


@pytest.mark.parametrize("spec", ["dp=2 zero=1", "dp=2 zero=3", "tp=2", *(pytest.param(spec, marks=pytest.mark.slow) for spec in (
    "tp=2 sp=true", "cp=2", "pp=2 micro=2", "pp=2 tp=2 sp=true schedule=interleaved chunks=2 micro=2"))])
def test_every_layout_has_its_gradient(spec):
    count, overrides = layout(spec)
    (losses, norms, whole), = ranks(1)(penalised, [])
    assert norms != serial(())[1]                    # it counts
    for own_losses, own_norms, pieces in ranks(count)(penalised, overrides):
        assert own_losses == pytest.approx(losses, rel=1e-12) and own_norms == pytest.approx(norms, rel=1e-6)
        for name, held in pieces.items():
            for box, part in held:
                full = whole[name][0][1][tuple(slice(a, b) for a, b in box)]
                assert (part - full).abs().max().item() < 1e-12, name


@pytest.mark.slow
def test_it_is_recomputed_and_compiled_as_well():
    from course import config
    from course.parallel import build_mesh, join
    from course.training.assemble import assemble

    norms = []
    for more in ([], ["train.recompute=full"], ["compile=true"]):
        with mock.patch.dict(MODELS, {ViTConfig: Penalised}):
            c = config.load("vit-demo", ["model.depth=2", "model.dim=16", "model.grid=[8,16]", "data.source=mock", *more])
            training = assemble(c, build_mesh(c.parallel, join("cpu")))
        batch = training.model.example(c.train.global_batch, torch.device("cpu"))
        norms.append(training.step(batch)[1].item())
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
