"""What claims to work on a GPU: run with `pytest tests/gpu` on a machine that has one."""

import subprocess
import sys

import pytest
import torch

from course import checkpoint, config, evaluate, train
from course.data import weather
from course.report import read_metrics
from tests.conftest import tiny_settings
from tests.test_train import assert_same_run, final_tensors, losses

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def settings(data, tmp_path, *more):
    return [*tiny_settings(data, tmp_path / "runs"), "train.device=cuda", *more]


def run(*arguments):
    return train.main(config.load("vit-demo", list(arguments)))


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("tf32", 5e-3), ("bf16", 2e-2), ("fp16", 5e-3)])
def test_every_precision_follows_float64_on_the_cpu(small_data, tmp_path, precision, bound):
    """The bound is on the loss over 12 steps, relative: about the format's rounding error times a few."""
    exact = losses(run(*tiny_settings(small_data, tmp_path / "runs"), "precision=fp64", "log.name=cpu"))
    found = losses(run(*settings(small_data, tmp_path, f"precision={precision}", "log.name=gpu")))
    assert found == pytest.approx(exact, rel=bound)
    assert found[-1] < 0.95 * found[0]


def test_weights_do_not_depend_on_the_device(small_data, tmp_path):
    folders = [run(*tiny_settings(small_data, tmp_path / "runs"), f"train.device={device}", "optim.lr=0", f"log.name={device}")
               for device in ("cpu", "cuda")]
    a, b = (final_tensors(folder) for folder in folders)
    for name in a:
        if not name.endswith(("exp_avg", "exp_avg_sq", "step")):
            torch.testing.assert_close(a[name], b[name], rtol=1e-6, atol=1e-9)


def test_resumed_on_the_gpu_equals_undisturbed(small_data, tmp_path):
    extra = ("model.dropout=0.1", "train.micro_batch=2", "precision=fp16")
    whole = run(*settings(small_data, tmp_path, *extra, "log.name=whole"))
    part = run(*settings(small_data, tmp_path, *extra, "log.name=part"))
    for newer in checkpoint.steps(part / "checkpoints")[1:]:
        for file in newer.iterdir():
            file.unlink()
        newer.rmdir()
    assert_same_run(run(*settings(small_data, tmp_path, *extra, "log.name=part")), whole)


def test_compiled_follows_eager(small_data, tmp_path):
    eager, compiled = (losses(run(*settings(small_data, tmp_path, "precision=bf16", f"compile={c}", f"log.name=compile-{c}")))
                       for c in ("false", "true"))
    assert compiled == pytest.approx(eager, rel=2e-2)


def test_no_step_waits_for_the_gpu(small_data, tmp_path):
    """PyTorch's own detector: an implicit synchronisation in a step is an error."""
    from tests import test_step

    parts = test_step.assemble("precision=bf16", "train.micro_batch=2", "optim.clip=1", device=torch.device("cuda"))
    batch = {name: value.cuda() for name, value in test_step.batches(1, torch.float32)[0].items()}
    parts[-1](batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        parts[-1](batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_evaluation_on_the_gpu_equals_the_cpu(small_data, tmp_path, monkeypatch):
    folder = run(*settings(small_data, tmp_path, "precision=fp32"))
    gpu = evaluate.main(folder, samples=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cpu = evaluate.main(folder, samples=2)
    for a, b in zip(gpu["rmse"]["model"], cpu["rmse"]["model"], strict=True):
        assert a == pytest.approx(b, rel=1e-3)


def test_the_atmosphere_runs_on_the_gpu(tmp_path):
    weather.make(config.build(weather.Weather, {"path": str(tmp_path), "train": 1, "valid": 0, "test": 0, "times": 8,
                                                "device": "cuda"}, "test"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_one(small_data, tmp_path):
    """fp32 matmuls on NCCL ranks: a sum in another order, so equal to rounding and not to the bit."""
    extra = ("precision=fp32", "optim.name=sgd", "optim.lr=0.1", "train.eval_every=6", "optim.clip=0.5")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "course.cli", "train",
               "vit-demo", *settings(small_data, tmp_path, *extra, "log.name=two")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    one = run(*settings(small_data, tmp_path, *extra, "log.name=one"))
    two = tmp_path / "runs" / "vit-demo" / "two"
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    for a, b in zip(read_metrics(one / "metrics.jsonl"), read_metrics(two / "metrics.jsonl"), strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    first, second = final_tensors(one), final_tensors(two)
    assert all((first[name] - second[name]).abs().max() < 1e-5 for name in first)
