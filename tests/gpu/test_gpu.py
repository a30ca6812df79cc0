"""What claims to work on a GPU: run with `pytest tests/gpu` on a machine that has one."""

import signal
import subprocess
import sys

import pytest
import torch

from course import config
from course.bench import loaders as benchmark
from course.checkpoint import checkpoint
from course.config import schema
from course.data import open_pairs, train_loader
from course.data.loaders import numpy_files
from course.data.weather import simulation
from course.inference import forecast_scores
from course.parallel import Axis
from course.training import trainer
from course.training.run_log import read_metrics
from tests.conftest import tiny_settings
from tests.data import test_loaders
from tests.data.test_dali import assert_normalized_to_the_bit
from tests.data.test_loaders import needs_dali
from tests.faults import finish, start
from tests.training.test_trainer import assert_same_run, final_tensors, job_that_fails, losses

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def settings(data, tmp_path, *more):
    return [*tiny_settings(data, tmp_path / "runs"), "train.device=cuda", *more]


def run(*arguments):
    return trainer.main(config.load("vit-demo", list(arguments)))


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
    """PyTorch's own detector: an implicit synchronization in a step is an error."""
    from tests.training import test_step

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
    gpu = forecast_scores.score_run(folder, samples=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cpu = forecast_scores.score_run(folder, samples=2)
    for a, b in zip(gpu["rmse"]["model"], cpu["rmse"]["model"], strict=True):
        assert a == pytest.approx(b, rel=1e-3)


def test_the_atmosphere_runs_on_the_gpu(tmp_path):
    simulation.make(schema.build(simulation.Weather, {"path": str(tmp_path), "train": 1, "valid": 0, "test": 0, "times": 8,
                                                "device": "cuda"}, "test"))


# ---- loaders ----

LOADERS = ["native", "threads", pytest.param("dali", marks=needs_dali), pytest.param("dali_numpy", marks=needs_dali)]
GPU = torch.device("cuda", 0)


@needs_dali
def test_dali_normalizes_on_the_gpu_as_numpy_does_to_the_bit():
    assert_normalized_to_the_bit(GPU)


@pytest.mark.parametrize("more", [(), ("precision=fp64", "data.lead=2", "data.ahead=1")], ids=str)
@pytest.mark.parametrize("loader", LOADERS)
def test_loaders_give_on_the_gpu_the_bits_that_native_gives_on_the_cpu(own_data, loader, more):
    """Also while the GPU is behind by many batches, all of which are held."""
    numpy_files.convert(own_data, lambda text: None)
    wanted = test_loaders.first(20, test_loaders.settings(own_data, "native", *more))
    torch.cuda._sleep(10**9)                         # about half a second
    found = test_loaders.first(20, test_loaders.settings(own_data, loader, *more), device=GPU)
    assert all(tensor.device == GPU for batch in found for tensor in batch.values())
    test_loaders.assert_equal([{name: tensor.cpu() for name, tensor in batch.items()} for batch in found], wanted)


@pytest.mark.parametrize("loader", LOADERS)
def test_batches_are_whole_when_the_gpu_takes_long_over_each(tmp_path, loader):
    """Batches of 40 MB, summed after a pause, when the loader has long been at the next ones; none is held."""
    benchmark.make_data(tmp_path, 20, (128, 256), states=24)
    overrides = [f"data.path={tmp_path}", f"data.loader={loader}", "data.workers=4", "train.global_batch=8", "train.device=cuda"]
    settings = config.load("vit-demo", [*overrides, "model.grid=[128,256]"])
    batches = train_loader(settings, Axis("dp"), GPU, 0, lambda n, device, start: {})
    sums, wanted, pairs = [], [], open_pairs(settings, "train")
    for _ in range(12):
        batch = next(batches)
        torch.cuda._sleep(10**8)
        sums.append(batch["input"].double().sum() + 3 * batch["target"].double().sum())
        expected = pairs.__getitems__(batch["sample"].tolist())
        wanted.append(expected["input"].double().sum() + 3 * expected["target"].double().sum())
        del batch
    batches.close()
    assert torch.stack(sums).cpu().tolist() == pytest.approx(torch.stack(wanted).tolist(), rel=1e-9)


@pytest.mark.parametrize("loader", LOADERS[1:])
def test_a_run_on_the_gpu_has_the_losses_of_native_bit_for_bit(own_data, tmp_path, loader):
    numpy_files.convert(own_data, lambda text: None)
    runs = [run(*settings(own_data, tmp_path, f"data.loader={kind}", f"log.name={kind}", "data.workers=2"))
            for kind in ("native", loader)]
    assert_same_run(*runs)


@pytest.mark.parametrize("loader", ["threads", pytest.param("dali", marks=needs_dali)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_on_the_gpu_leaves_nothing(own_data, tmp_path, loader, number):
    test_loaders.interrupt(own_data, tmp_path, loader, number, "train.device=cuda")


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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_that_fails_ends_one_that_waits_in_nccl(tmp_path):
    told = job_that_fails(tmp_path, "trains on", "cuda")
    assert told[0].startswith("[rank1]") and "[rank1]: ValueError: this rank has had enough" in told


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("fault", "found"), [("loop", "is at step 6, waiting for data since"), ("stop", "does not answer")])
def test_a_rank_that_stalls_while_another_waits_in_nccl_is_named(small_data, tmp_path, fault, found):
    """The one that waits sits in a call to CUDA, not to a collective: which one that waits for, NCCL's flight recorder tells."""
    more = ["train.steps=400", "data.workers=0", "checkpoint.every=3", "log.name=stall", "train.stall_s=2"]
    processes = start(["tests.faults", fault, "1", "6", *settings(small_data, tmp_path, *more)], 2)
    told = finish(processes, stopped=1 if fault == "stop" else None)
    lines = told[0][1][told[0][1].index("course: "):].splitlines()
    assert lines[0].startswith(f"course: this run has stalled: rank 1 (process {processes[1].pid} of ") and found in lines[0]
    assert lines[1].startswith("  rank 0 waits at step 6 in all_reduce of () (nccl, number ")
    assert "goes on from" in lines[2] and "step_000003" in lines[2]
