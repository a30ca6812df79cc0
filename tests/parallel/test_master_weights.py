"""16-bit weights with float32 masters on one data-parallel rank: the same training to the bit as with float32 weights."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from course import config
from course.checkpoint import checkpoint
from course.inference.diffusion_sampler import SamplerSettings, sample_latents
from course.inference.forecast_scores import load_model
from course.ops.ema import moving_average
from course.parallel import build_mesh, join
from course.parallel.data_parallel.gradients import NoSync
from course.parallel.data_parallel.master_weights import MasterWeights
from course.ranks.notebook_ranks import ranks
from course.training import trainer
from course.training.assemble import assemble as assemble_training
from course.training.run_log import read_metrics
from course.training.validation import Validation
from tests.ops import test_fused_adam as test_adam

SMALL = {"vit": ("vit-demo", ["model.grid=[16,32]", "model.residual=false"]),
         "gpt": ("gpt-demo", ["model.vocab=64", "model.context=16", "model.loss_chunk=16"]),
         "dit": ("dit-demo", ["model.latent=[3,6,6]", "model.classes=4"])}
KINDS = [("vit", []), ("gpt", []), ("gpt", ["model.tied=false"]), ("gpt", ["model.tied=false", "model.loss_chunk=0"]),
         ("dit", ["optim.ema=0.75"]), ("vit", ["train.recompute=full"]), ("vit", ["precision=fp16"]),
         ("vit", ["train.micro_batch=4"]), ("gpt", ["train.micro_batch=3", "precision=fp16"])]
COMPILED = ("dit", ["optim.ema=0.75", "compile=true"], True)     # half a minute of g++'s; the optimizer is not compiled


def settings(kind, *more):
    preset, tiny = SMALL[kind]
    return config.load(preset, [*tiny, "model.dim=32", "model.depth=2", "model.heads=4", "data.source=mock", "train.device=cpu",
                                "kernels=triton", "precision=bf16", "optim.lr=0.01", "optim.warmup=0", "optim.clip=0.5",
                                "train.global_batch=8", "train.micro_batch=0", "train.steps=20", *more])


def assemble(c, masters=True):
    with pytest.MonkeyPatch.context() as patch:
        if not masters:
            patch.setattr(config.Config, "masters", False)
        return assemble_training(c, build_mesh(c.parallel, join("cpu")))


def step(training, number, poison=0.0):
    batch = training.model.example(8, torch.device("cpu"), 8 * number)
    batch = {name: x + poison if x.is_floating_point() else x for name, x in batch.items()}
    return [x.item() for x in training.step(batch)]


def everything(training):
    """All that a checkpoint would have of a run, by name, and what it computes with."""
    training.gradients.wait_parameters()            # ZeRO's weights may still be under way
    average, masters = moving_average(training.optimizer), training.gradients.full_master_weights()
    at = training.layout.placements
    found = {f"{at[p].name} computed": p.detach().float() for p in training.model.parameters()}
    for p in training.gradients.optimizer_parameters:
        found |= {at[p].name: p.detach(), f"{at[p].name} ema": average.get(p, torch.zeros(0))}
        found |= {f"{at[p].name} {key}": value for key, value in training.optimizer.state[p].items()}
    found |= {f"{at[p].name} value": masters.get(p, p).detach() for p in training.model.parameters()}
    return {name: value.clone() for name, value in found.items()}


def assert_same(mine, other):
    """Equal to the bit, but that float32 weights are rounded as they are computed with."""
    assert mine.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(mine[name], value) or name.endswith("computed"), name


def assert_rounded(training, low):
    """Each copy is its master, rounded."""
    for copy, master in training.gradients.full_master_weights().items():
        assert copy.dtype == low and master.dtype == torch.float32 and torch.equal(copy, master.to(low))


@pytest.mark.parametrize(("kind", "more", "large"), [(*kind, large) for kind in KINDS for large in (False, True)] +
                         [pytest.param(*COMPILED, marks=pytest.mark.slow)])
def test_training_is_the_same_to_the_bit(kind, more, large, monkeypatch):
    """Ten steps; the parameters as small ones, which PyTorch updates, and by a kernel's stand-in."""
    monkeypatch.setitem(sys.modules, "course.ops.fused_adam_triton", SimpleNamespace(update=test_adam.update))
    monkeypatch.setattr("course.ops.fused_adam.has_own_kernel", lambda p: large and p.numel() > 500)
    c = settings(kind, *more)
    mine, other = assemble(c), assemble(c, masters=False)
    assert type(mine.gradients) is MasterWeights and type(other.gradients) is NoSync
    for number in range(10):
        assert step(mine, number) == step(other, number)
    assert_same(everything(mine), everything(other))
    assert_rounded(mine, torch.float16 if "precision=fp16" in more else torch.bfloat16)
    linear = {mine.layout.placements[p].name for p in mine.gradients.full_master_weights()}
    assert {"blocks.0.attn.qkv.weight", "blocks.1.mlp.down.weight"} <= linear
    assert not any(name.endswith(("bias", "norm1.weight")) or "embed.token" in name for name in linear)
    if kind == "gpt":                               # a chunked loss adds the head's gradient up in float32
        assert ("head.proj.weight" in linear) == (more == ["model.tied=false", "model.loss_chunk=0"])
    assert all(p.grad is None for p in [*mine.model.parameters(), *mine.gradients.optimizer_parameters])


@pytest.mark.parametrize("large", [False, True])
def test_an_overflow_changes_nothing(large, monkeypatch):
    monkeypatch.setitem(sys.modules, "course.ops.fused_adam_triton", SimpleNamespace(update=test_adam.update))
    monkeypatch.setattr("course.ops.fused_adam.has_own_kernel", lambda p: large and p.numel() > 500)
    training = assemble(settings("vit", "precision=fp16", "optim.ema=0.75"))
    step(training, 0)
    before, scale = everything(training), training.progress.loss_scale.item()
    step(training, 1, poison=float("inf"))
    after = everything(training)
    assert training.progress.skipped_steps == 1 and training.progress.loss_scale.item() == scale / 2
    assert all(torch.equal(after[name], value) for name, value in before.items())
    step(training, 2)
    assert not torch.equal(everything(training)["blocks.0.mlp.up.weight computed"], before["blocks.0.mlp.up.weight computed"])


def test_a_gradient_is_not_copied_and_stays_in_16_bits():
    training = assemble(settings("vit"))
    model, gradients = training.model, training.gradients
    weight = model.blocks["0"].mlp.up.weight
    weight.grad = given = torch.ones_like(weight)
    gradients.finish()
    master = next(p for p in gradients.optimizer_parameters if training.layout.placements[p].name == "blocks.0.mlp.up.weight")
    assert master.grad.dtype == torch.bfloat16 and master.grad.data_ptr() == given.data_ptr() and weight.grad is None


def test_without_pytorchs_gradients_in_other_formats_they_are_cast(monkeypatch):
    monkeypatch.setattr("course.parallel.data_parallel.master_weights.AS_IT_IS", False)
    c = settings("vit")
    mine, other = assemble(c), assemble(c, masters=False)
    for number in range(3):
        assert step(mine, number) == step(other, number)
    assert_same(everything(mine), everything(other))


@pytest.mark.parametrize("more", [["kernels=pytorch"], ["optim.name=sgd"], ["precision=fp32"],
                                  ["precision=fp8", "fp8.recipe=current"]])
def test_other_runs_keep_float32_weights(more):
    training = assemble(settings("vit", *more))
    assert type(training.gradients) is NoSync and not training.gradients.full_master_weights()
    assert {p.dtype for p in training.model.parameters()} == {torch.float32}


def test_several_passes_add_up_in_float32():
    """3 and 2^-9 are 3 in 16 bits. One without a gradient counts as zero."""
    training = assemble(settings("vit", "train.micro_batch=4"))
    gradients, block = training.gradients, training.model.blocks["0"]
    gradients.begin(2)
    for value in (3.0, 2**-9):
        (block.mlp.up.weight.float() * value).sum().backward()
        assert block.mlp.up.weight.grad is None
    gradients.finish()
    found = {training.layout.placements[p].name: p.grad for p in gradients.optimizer_parameters}
    assert found["blocks.0.mlp.up.weight"].dtype == torch.float32 and (found["blocks.0.mlp.up.weight"] == 3 + 2**-9).all()
    assert not found["blocks.0.mlp.down.weight"].any()
    gradients.clear()
    assert all(p.grad is None for p in [*training.model.parameters(), *gradients.optimizer_parameters])


def broken_off(*more):
    """A step after one that broke off before its update, with these settings, has to be as if that had not been."""
    from tests.parallel import test_master_weights as t

    training, other = (t.assemble(t.settings("vit", *more)) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.optimizer, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            t.step(training, 7)
    assert t.step(training, 0) == t.step(other, 0)
    t.assert_same(t.everything(training), t.everything(other))


@pytest.mark.parametrize("kernels", ["triton", "pytorch"])
@pytest.mark.parametrize("micro", [4, 8])
def test_what_a_step_has_left_that_broke_off_is_forgotten(micro, kernels):
    broken_off(f"train.micro_batch={micro}", f"kernels={kernels}")


@pytest.mark.parametrize("way", ["data=naive", "data=bucketed", "data=ddp", "data=none", "zero=true"])
def test_also_where_ranks_share_a_step_out(way):
    ranks(2)(broken_off, "parallel.dp=2", f"parallel.{way}", "precision=fp32")


def test_a_step_may_have_another_number_of_passes_than_the_last():
    """So a batch that is larger than the settings say is no matter, as with float32 weights."""
    c = settings("vit", "train.micro_batch=8")
    mine, other = assemble(c), assemble(c, masters=False)
    for number, samples in enumerate([16, 8, 24, 4]):
        batch = mine.model.example(samples, torch.device("cpu"), 100 * number)
        assert [x.item() for x in mine.step(batch)] == [x.item() for x in other.step(batch)]
    assert_same(everything(mine), everything(other))


def losses_in_two(masters, kind, more):
    """The losses of a rank of two in some steps."""
    from tests.parallel import test_master_weights as t

    training = t.assemble(t.settings(kind, *more), masters)
    return [t.step(training, number) for number in range(4)], len(training.gradients.full_master_weights())


@pytest.mark.parametrize(("kind", "more"), [
    ("dit", ["parallel.tp=2", "parallel.sp=true"]), ("vit", ["parallel.pp=2", "train.micro_batch=2"]),
    ("gpt", ["parallel.pp=2", "train.micro_batch=2", "model.depth=4", "parallel.schedule=interleaved", "parallel.chunks=2"]),
    ("dit", ["parallel.pp=2", "train.micro_batch=4", "parallel.schedule=gpipe", "optim.ema=0.5"])])
def test_with_other_axes_it_is_the_same_to_the_bit(kind, more):
    for (mine, copies), (other, none) in zip(*(ranks(2)(losses_in_two, masters, kind, more) for masters in (True, False)),
                                             strict=True):
        assert mine == other and copies and not none


def saved(training, folder):
    path = checkpoint.save(folder, training.optimizer, {**training.progress.state(), "samples": 0}, {}, training.layout)
    return path, checkpoint.read_index(path)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("then", [True, False])
def test_either_kind_of_run_goes_on_with_a_checkpoint_of_either(first, then, tmp_path):
    c = settings("dit", "optim.ema=0.75", "optim.schedule=constant")
    straight = assemble(c, masters=False)
    for number in range(3):
        step(straight, number)
    begun = assemble(c, first)
    for number in range(3):
        step(begun, number)
    path, index = saved(begun, tmp_path)
    assert {found["dtype"] for found in index["tensors"].values()} == {"float32"}
    resumed = assemble(c, then)
    checkpoint.load(path, index, resumed.model, resumed.layout, resumed.optimizer)
    resumed.progress.restore(index["state"])
    if then:
        assert_rounded(resumed, torch.bfloat16)
    for number in range(3, 6):
        assert step(straight, number) == step(resumed, number)
    assert_same(everything(resumed), everything(straight))


def begun_in_two(folder):
    """Three steps of a pipeline with masters, saved."""
    from tests.parallel import test_master_weights as t

    training = t.assemble(t.settings("dit", "parallel.pp=2", "train.micro_batch=4", "optim.ema=0.75", "optim.schedule=constant"))
    for number in range(3):
        t.step(training, number)
    t.saved(training, Path(folder))
    return len(training.gradients.full_master_weights())


def test_a_checkpoint_of_a_pipeline_with_masters_goes_on_in_one_process(tmp_path):
    """To the bit as one that kept float32 weights."""
    assert all(ranks(2)(begun_in_two, str(tmp_path)))
    c = settings("dit", "train.micro_batch=4", "optim.ema=0.75", "optim.schedule=constant")
    straight, resumed = assemble(c, masters=False), assemble(c)
    for number in range(3):
        step(straight, number)
    path = checkpoint.steps(tmp_path)[-1]
    index = checkpoint.read_index(path)
    checkpoint.load(path, index, resumed.model, resumed.layout, resumed.optimizer)
    resumed.progress.restore(index["state"])
    assert_rounded(resumed, torch.bfloat16)
    for number in range(3, 6):
        assert step(straight, number) == step(resumed, number)
    assert_same(everything(resumed), everything(straight))


def test_a_run_resumes_and_is_evaluated_with_its_masters(small_data, tmp_path, monkeypatch):
    """As `course train` does it, with validation on the way, on the copies: in all as one with float32 weights."""
    run = ["data.source=files", f"data.path={small_data}", "model.grid=[8,16]", "log.tensorboard=false", "log.every=1",
           "optim.schedule=constant", "train.eval_every=2", f"log.dir={tmp_path}"]
    validated, validate = [], Validation.run
    monkeypatch.setattr(Validation, "run", lambda self, model, *more: (
        validated.append({p.dtype for p in model.parameters()}) or validate(self, model, *more)))
    for name, parts in {"whole": [4], "parts": [2, 4], "wide": [4]}.items():
        monkeypatch.setattr(config.Config, "masters", name != "wide")
        for steps in parts:
            trainer.main(settings("vit", *run, f"log.name={name}", f"train.steps={steps}"))
    assert validated == [{torch.bfloat16, torch.float32}] * 4 + [{torch.float32}] * 2
    folders = [tmp_path / "vit-demo" / name for name in ("whole", "parts", "wide")]
    logged = [[(line["loss"], line.get("valid_loss")) for line in read_metrics(folder / "metrics.jsonl")] for folder in folders]
    assert logged[0] == logged[1] == logged[2] and [valid is None for _, valid in logged[0]] == [True, False] * 2
    models = [load_model(folder, settings("vit", *run), torch.device("cpu"))[0] for folder in folders]
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        assert all(p.dtype == torch.float32 and torch.equal(p, parameters[0]) for p in parameters)
    assert any(not torch.equal(p, p.bfloat16().float()) for p in models[0].parameters())


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("objective", ["epsilon", "flow"])
def test_from_the_model_of_a_run_is_drawn_as_from_one_with_float32_weights(low, objective):
    """Whose matmuls are in 16 bits; what they lead from noise to samples stays in float32. Without being told so, too."""
    c = settings("dit", f"precision={low}", f"model.objective={objective}")
    mine, other = assemble(c), assemble(c, masters=False)
    how = SamplerSettings(steps=4, eta=0.5 * (objective == "epsilon"))
    for training in (mine, other):
        step(training, 0)
        training.model.eval()
    wanted = sample_latents(other.model, torch.arange(3), how, low)
    for precision in (low, "fp32", "tf32"):
        found = sample_latents(mine.model, torch.arange(3), how, precision)
        assert found.dtype == torch.float32 and torch.equal(found, wanted)


def test_verify_compares_the_masters():
    """Of the serial run, which has them; the layout has none."""
    from course.training import verify

    c = settings("vit", "train.steps=3", "parallel.dp=2", "optim.schedule=constant")
    gaps = ranks(2, timeout=120)(verify.compare, c)[0]
    assert gaps and not any(gap.wrong for gap in gaps)
    alone = settings("vit", "train.steps=1")
    serial = verify.serial_run(verify.Trial(alone), build_mesh(alone.parallel, join("cpu")))
    assert {value.dtype for name, value in serial[1].items() if name != verify.SKIPPED} == {torch.float32}
