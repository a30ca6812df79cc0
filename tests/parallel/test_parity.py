"""Every layout trains as one process does: after several steps all losses and parameters are equal, in float64 with SGD."""

import pytest
import torch

from course.launch import ranks
from course.parallel import placement
from course.parallel.placement import Box

SMALL = ["model.grid=[8,16]", "model.channels=3", "model.patch=4", "model.dim=16", "model.depth=5", "model.heads=4",
         "model.residual=false", "data.source=mock", "optim.name=sgd", "optim.lr=0.1", "optim.warmup=2", "optim.clip=0.05",
         "precision=fp64", "train.device=cpu", "train.global_batch=8", "train.steps=4"]
# each model's preset, and what makes it small: 11 tokens and 9 patches divide by nothing
MODELS = {"vit": ("vit-demo", SMALL),
          "gpt": ("gpt-demo", ["model.vocab=24", "model.context=11", *SMALL[3:6], *SMALL[7:]]),
          "dit": ("dit-demo", ["model.latent=[3,6,6]", "model.classes=4", *SMALL[3:6], *SMALL[7:]])}
Pieces = dict[str, list[tuple[Box, torch.Tensor]]]


def draw(kind: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A loader's batch of 8 samples."""
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if kind == "gpt":
        return {"tokens": torch.randint(24, (8, 12), generator=generator)}
    if kind == "dit":
        return {"latent": normal(8, 3, 6, 6), "label": torch.randint(4, (8,), generator=generator)}
    return {name: normal(8, 3, 8, 16) for name in ("input", "target")}


def train(overrides: list[str], kind: str = "vit") -> tuple[list[float], list[float], Pieces]:
    """Three steps in a layout: losses, gradient norms, and every parameter's piece with its box."""
    from unittest import mock

    from course import config
    from course.data import order
    from course.parallel import build_mesh, join
    from course.train import assemble

    preset, small = MODELS[kind]
    c = config.load(preset, [*small, *overrides])
    mesh = build_mesh(c.parallel, join("cpu"))
    with mock.patch("course.models.DiT.init_plan", lambda model: {"*": 0.2}):       # its zeros let few gradients through
        training = assemble(c, mesh)
    generator, mine = torch.Generator().manual_seed(1), order.my_slice(8, mesh.dp.size, mesh.dp.rank)
    losses, norms = [], []
    for number in range(3):
        batch = draw(kind, generator)
        batch["sample"] = torch.arange(8) + 8 * number
        loss, norm = training.step({name: tensor[mine] for name, tensor in batch.items()})
        for axis in (mesh.dp, mesh.pp):
            if axis.size > 1:
                torch.distributed.all_reduce(loss, group=axis.group)
        losses.append(loss.item())
        norms.append(norm.item())
    training.gradients.settle()
    pieces: Pieces = {}
    for p in training.model.parameters():
        where = placement(p)
        pieces.setdefault(where.name, []).append((where.box, p.detach().reshape([b - a for a, b in where.box])))
    return losses, norms, pieces


SERIAL: dict[tuple[str, ...], tuple] = {}


def serial(extra: tuple[str, ...], kind: str = "vit") -> tuple:
    """The serial run, once for each setting."""
    if (kind, *extra) not in SERIAL:
        SERIAL[kind, *extra], = ranks(1)(train, list(extra), kind)
    return SERIAL[kind, *extra]


def assert_equal_to_serial(size: int, layout: list[str], extra: tuple[str, ...] = (), kind: str = "vit") -> None:
    """Losses, gradient norms and every element of every parameter, on every rank that has it; and together they are whole."""
    losses, norms, whole = serial(extra, kind)
    covered = {name: torch.zeros_like(pieces[0][1], dtype=torch.bool) for name, pieces in whole.items()}
    for rank, (own_losses, own_norms, pieces) in enumerate(ranks(size)(train, [*layout, *extra], kind)):
        assert own_losses == pytest.approx(losses, rel=1e-12), f"rank {rank}: losses"
        assert own_norms == pytest.approx(norms, rel=1e-6), f"rank {rank}: gradient norms"         # reported in float32
        for name, parts in pieces.items():
            for box, part in parts:
                here = tuple(slice(start, stop) for start, stop in box)
                error = (part - whole[name][0][1][here]).abs().max().item()
                assert error < 1e-12, f"rank {rank}: {name} differs by {error:.1e}"
                covered[name][here] = True
    assert all(seen.all() for seen in covered.values())


LAYOUTS = {"dp2": (2, ["parallel.dp=2", "parallel.bucket_mb=0.01"]), "tp2": (2, ["parallel.tp=2"]),
           "tp4": (4, ["parallel.tp=4"]), "dp2 tp2": (4, ["parallel.tp=2", "parallel.dp=2"]),
           "dp2 naive": (2, ["parallel.data=naive"]), "dp2 ddp": (2, ["parallel.data=ddp"]),
           "dp2 zero": (2, ["parallel.zero=true", "parallel.bucket_mb=0.01"]),
           "sp2": (2, ["parallel.tp=2", "parallel.sp=true"]),
           "cp2 gather": (2, ["parallel.cp=2", "parallel.context=gather"]), "cp2 ring": (2, ["parallel.cp=2"]),
           "cp2 all_to_all": (2, ["parallel.cp=2", "parallel.context=all_to_all"]),
           "pp2 gpipe": (2, ["parallel.pp=2", "parallel.schedule=gpipe", "train.micro_batch=3"]),
           "pp2 1f1b": (2, ["parallel.pp=2", "train.micro_batch=1"]),
           "pp2 interleaved": (2, ["parallel.pp=2", "parallel.schedule=interleaved", "parallel.chunks=2", "train.micro_batch=2"]),
           "cp2 sp2": (4, ["parallel.cp=2", "parallel.tp=2", "parallel.sp=true"]),
           "pp2 tp2": (4, ["parallel.pp=2", "parallel.tp=2", "train.micro_batch=2"]),
           "tp-dp order": (4, ["parallel.tp=2", "parallel.dp=2", "parallel.order=pp-tp-cp-dp"])}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if size == 2 else pytest.mark.slow)
                                  for name, (size, _) in LAYOUTS.items()])
@pytest.mark.parametrize("extra", [(), pytest.param(("train.micro_batch=3",), marks=pytest.mark.slow),
                                   pytest.param(("model.dropout=0.2", "model.drop_path=0.2"), marks=pytest.mark.slow)],
                         ids=["plain", "accumulation", "dropout"])
def test_parity(name, extra):
    size, layout = LAYOUTS[name]
    assert_equal_to_serial(size, layout, extra)


@pytest.mark.parametrize(("kind", "name", "extra"), [
    pytest.param(kind, name, extra, marks=[] if name == "sp2" and not extra else pytest.mark.slow)
    for kind, extras in (("gpt", [(), ("model.tied=false", "model.dropout=0.2", "train.micro_batch=3")]),
                         ("dit", [(), ("train.micro_batch=3",)]))
    for name in ("dp2", "dp2 zero", "tp2", "sp2", "cp2 gather", "cp2 ring", "cp2 all_to_all", "cp2 sp2", "pp2 1f1b",
                 "pp2 interleaved", "pp2 tp2") for extra in extras])
def test_parity_of_other_models(kind, name, extra):
    size, layout = LAYOUTS[name]
    assert_equal_to_serial(size, layout, extra, kind)


def test_parity_notices_a_missing_all_reduce():
    """The test itself can fail: without the all-reduce of a row linear, or of the gradients, something differs."""
    for broken in ("mappings.reduce", "mappings.copy"):
        def wrong(overrides, broken=broken):
            from unittest import mock
            with mock.patch(f"course.parallel.{broken}", lambda x, axis: x):
                return train(overrides)
        *_, whole = serial(())
        found = ranks(2)(wrong, ["parallel.tp=2"])
        gaps = [(part - whole[name][0][1][tuple(slice(a, b) for a, b in box)]).abs().max().item()
                for _, _, pieces in found for name, parts in pieces.items() for box, part in parts]
        assert max(gaps) > 1e-6


def test_indivisible_heads_are_a_sentence():
    from course.launch import RankError

    with pytest.raises(RankError, match=r"parallel.tp=2 does not divide the 3 heads or features of blocks.0.attn.qkv"):
        ranks(2)(train, ["parallel.tp=2", "model.heads=3", "model.dim=18"])


def run(overrides: list[str]) -> None:
    """`course train` on the ranks that there are."""
    from course import config
    from course import train as training

    training.main(config.load("vit-demo", [*SMALL, "train.eval_every=0", "log.every=1", "log.tensorboard=false", *overrides]))


OTHERS = {"tp": ["parallel.tp=2", "parallel.sp=true"], "pp": ["parallel.pp=2", "train.micro_batch=4"],
          "zero": ["parallel.zero=true", "parallel.bucket_mb=0.01"]}


@pytest.mark.parametrize("name", OTHERS)
def test_a_run_goes_on_in_another_layout(name, tmp_path):
    """Two steps in a layout and two in one process, or the other way round: the losses are those of the undisturbed run."""
    from course.report import read_metrics

    def losses(name: str, *parts: tuple[int, list[str]]) -> list[float]:
        for size, overrides in parts:
            ranks(size)(run, [f"log.dir={tmp_path}", f"log.name={name}", "optim.schedule=constant", "optim.name=adam",
                              "optim.lr=0.001", *overrides])
        return [record["loss"] for record in read_metrics(tmp_path / "vit-demo" / name / "metrics.jsonl")]

    whole = losses("whole", (1, []))
    assert len(whole) == 4
    assert losses("apart", (2, ["train.steps=2", *OTHERS[name]]), (1, [])) == pytest.approx(whole, rel=1e-9)
    assert losses("together", (1, ["train.steps=2"]), (2, OTHERS[name])) == pytest.approx(whole, rel=1e-9)
