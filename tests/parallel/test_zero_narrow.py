"""ZeRO-1 with 16-bit copies of the weights: the same training to the bit as with float32 parameters, for fewer bytes."""

from typing import Any

import pytest

from course.ranks.notebook_ranks import ranks

SMALL = ["data.source=mock", "train.device=cpu", "model.grid=[16,32]", "model.dim=32", "model.depth=3", "model.heads=4",
         "model.residual=false", "train.global_batch=8", "train.steps=20", "optim.lr=0.01", "optim.warmup=0", "optim.clip=1",
         "parallel.zero=true", "parallel.bucket_mb=0.05"]
LAYOUTS = {"dp=2": [], "dp=2, accumulated": ["train.micro_batch=2"], "dp=2, fp16": ["precision=fp16"],
           "cp=2": ["parallel.cp=2"], "dp=2 tp=2 sp": ["parallel.tp=2", "parallel.sp=true", "parallel.dp=2"],
           "dp=2 pp=2": ["parallel.pp=2", "parallel.dp=2", "train.micro_batch=1"]}
LLAMA = ["model.tied=false", "model.vocab=64", "model.context=32", "model.loss_chunk=16"]      # a head of its own, in chunks


def train(settings: list[str], narrow: bool, folder: str = "", preset: str = "vit-demo") -> dict[str, Any]:
    """Losses, updated values, bytes of the parameters and of the linears' weights after some steps, of this rank."""
    from pathlib import Path
    from unittest import mock

    import torch

    from course import config
    from course.checkpoint import checkpoint
    from course.parallel import build_mesh, join
    from course.training import assemble as training_module

    small = [key for key in SMALL if preset == "vit-demo" or not key.startswith(("model.grid", "model.residual"))]
    c = config.load(preset, ["precision=bf16", *small, *settings])
    mesh = build_mesh(c.parallel, join("cpu"))
    real = training_module.working_dtype
    with mock.patch.object(training_module, "working_dtype", lambda precision: real(precision) if narrow else None):
        training = training_module.assemble(c, mesh)
    here = len(range(8)) // mesh.dp.size
    found: dict[str, Any] = {"losses": []}
    if folder:
        at = checkpoint.steps(Path(folder))[-1]
        checkpoint.load(at, checkpoint.read_index(at), training.model, training.layout, training.optimizer)
    for number in range(4):
        batch = training.model.example(here, torch.device("cpu"), 8 * number + here * mesh.dp.rank)      # type: ignore[operator]
        found["losses"].append(training.step(batch)[0].item())
        training.gradients.wait_parameters()
    masters = training.gradients.full_master_weights()
    at = training.layout.placements
    found["values"] = {at[p].name: masters.get(p, p).detach().clone() for p in training.model.parameters()}
    found["formats"] = {at[p].name: p.dtype for p in training.model.parameters()}
    found["updated"] = {p.dtype for p in training.gradients.optimizer_parameters}
    found["bytes"] = sum(p.nbytes for p in training.model.parameters())
    if not folder:
        found["folder"] = Path(c.log.dir) / "checkpoints"
        checkpoint.save(found["folder"], training.optimizer, {**training.progress.state(), "samples": 0}, {}, training.layout)
    return found


def left_out() -> tuple[int, int]:
    """How many buckets are being gathered after a step, and still before the next update, in whose step no part is computed."""
    import torch

    from course import config
    from course.parallel import build_mesh, join
    from course.training.assemble import assemble

    c = config.load("vit-demo", [*SMALL, "parallel.dp=2"])
    training: Any = assemble(c, build_mesh(c.parallel, join("cpu")))
    training.step(training.model.example(4, torch.device("cpu")))
    gradients = training.gradients
    first = sum(bucket.coming is not None for bucket in gradients.buckets)
    gradients.begin(1)
    gradients.finish()
    return first, sum(bucket.coming is not None for bucket in gradients.buckets)


def test_no_update_begins_while_the_last_ones_weights_are_still_sent():
    """What waits for them is a forward pass; a part that a step leaves out has none, and its share would be written meanwhile."""
    for under_way, later in ranks(2)(left_out):
        assert under_way > 1 and later == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_parity_of_narrow_copies_with_wide_parameters_to_the_bit(name, tmp_path):
    import torch

    settings = LAYOUTS[name]
    world = 2 if " pp" not in name and " tp" not in name else 4
    narrow, wide = (ranks(world, timeout=300)(train, [*settings, f"log.dir={tmp_path}/{kind}"], kind == "narrow")
                    for kind in ("narrow", "wide"))
    for mine, other in zip(narrow, wide, strict=True):
        assert mine["losses"] == other["losses"]
        assert all(torch.equal(value, other["values"][key]) for key, value in mine["values"].items())
        assert mine["updated"] == {torch.float32} == set(other["formats"].values())
        linear = {key for key, dtype in mine["formats"].items() if dtype != torch.float32}
        assert linear and all(key.endswith((".qkv.weight", ".out.weight", ".up.weight", ".down.weight", ".proj.weight"))
                              for key in linear)
        assert other["bytes"] - mine["bytes"] == 2 * sum(mine["values"][key].numel() for key in linear)


def test_parity_of_a_gradient_that_is_added_up_in_float32(tmp_path):
    """GPT's head adds its weight's gradient up over chunks in 32 bits: rounding the sum to 16 would lose what that was for."""
    import torch

    narrow, wide = (ranks(2, timeout=120)(train, [*LLAMA, f"log.dir={tmp_path}/{kind}"], kind, "", "gpt-demo")
                    for kind in (True, False))
    for mine, other in zip(narrow, wide, strict=True):
        assert mine["losses"] == other["losses"]
        assert all(torch.equal(value, other["values"][key]) for key, value in mine["values"].items())
        assert mine["formats"]["head.proj.weight"] == torch.float32 != mine["formats"]["blocks.0.attn.qkv.weight"]


def test_checkpoints_hold_master_weights_and_go_on_in_either_way(tmp_path):
    """From the narrow run's checkpoint both train on alike, and it has no 16-bit number."""
    import torch

    from course.checkpoint import checkpoint

    first = ranks(2, timeout=120)(train, [f"log.dir={tmp_path}"], True)
    folder = first[0]["folder"]
    index = checkpoint.read_index(checkpoint.steps(folder)[-1])
    assert {found["dtype"] for found in index["tensors"].values()} == {"float32"}
    narrow, wide = (ranks(2, timeout=120)(train, [f"log.dir={tmp_path}"], kind, str(folder)) for kind in (True, False))
    for mine, other in zip(narrow, wide, strict=True):
        assert mine["losses"] == other["losses"] and mine["losses"] != first[0]["losses"]
        assert all(torch.equal(value, other["values"][key]) for key, value in mine["values"].items())


def test_verify_compares_the_master_weights():
    from course import config
    from course.training import verify

    c = config.load("vit-demo", [*verify.DEFAULTS, *SMALL[1:7], "precision=bf16", "parallel.zero=true", "parallel.dp=2"])
    gaps = ranks(2, timeout=120)(verify.compare, c)[0]
    assert gaps and not any(gap.wrong for gap in gaps)
