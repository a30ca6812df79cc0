"""Whole runs: resumed, interrupted, poisoned, spread over ranks."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import h5py
import pytest
import torch

from course import config
from course.checkpoint import checkpoint
from course.checkpoint.shards import read_box
from course.config import Parallel
from course.ops.muon import orthogonal_update
from course.ops.number_formats import FIRST_SCALE
from course.parallel import Axis, World, build_mesh, join
from course.ranks.notebook_ranks import ranks
from course.resilience.preemption import GO_ON
from course.training import assemble, trainer
from course.training.run_log import read_metrics
from course.utils.errors import CourseError
from tests.conftest import tiny_settings

FIELDS = {"step", "samples", "global_batch", "loss", "lr", "grad_norm", "step_ms", "samples_per_s", "tflops_per_gpu", "mfu",
          "memory_gb", "loss_scale", "skipped_steps", "nan_steps"}


def run(settings: list[str]) -> Path:
    return trainer.main(config.load("vit-demo", settings))


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl")]


def final_tensors(folder: Path) -> dict[str, torch.Tensor]:
    path, index = checkpoint.newest(folder / "checkpoints", print)
    return {name: read_box(path, index, name, tuple((0, n) for n in found["shape"]))
            for name, found in index["tensors"].items()}


def assert_same_run(a: Path, b: Path) -> None:
    assert losses(a) == losses(b)                                       # bit for bit
    one, two = final_tensors(a), final_tensors(b)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_learns_and_leaves_what_it_promises(tiny):
    folder = run([*tiny, "train.eval_every=6", "log.tensorboard=true"])
    records = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 13))
    assert set(records[0]) == FIELDS and records[3]["samples"] == 16
    assert records[-1]["loss"] < 0.9 * records[0]["loss"]
    assert set(records[5]) - FIELDS == {"valid_loss", "valid_rmse"} and next(iter(records[5]["valid_rmse"])) == "u10"
    assert records[-1]["valid_loss"] < records[5]["valid_loss"]
    assert (folder / "config.yaml").is_file() and list((folder / "tensorboard").iterdir())
    assert [p.name for p in checkpoint.steps(folder / "checkpoints")] == ["step_000005", "step_000010", "step_000012"]


@pytest.mark.parametrize(("settings", "says"), [
    ([], ", fp32, 1 x CPU;"), (["kernels=triton"], ", fp32, kernels=triton in PyTorch's operators, 1 x CPU;"),
    (["precision=fp8"], ", fp8, emulated: the values of a GPU, but slow, 1 x CPU;"),
    (["precision=fp16"], ", fp16, by PyTorch's kernels for a CPU: the values of a GPU, but slow, 1 x CPU;"),
    (["precision=bf16"], ", bf16, 1 x CPU;")])
def test_a_run_says_what_this_machine_does_otherwise(tiny, capsys, settings, says):
    run([*tiny, *settings, "train.steps=1"])
    assert says in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(("stages", "settings", "says"), [
    (1, [], ""), (2, ["train.micro_batch=2"], ""),
    (4, ["train.global_batch=64"], "4 pipeline stages share 1 micro-batch .* 75% of it: set train.micro_batch=4$"),
    (4, ["train.global_batch=3", "train.micro_batch=1"], "3 micro-batches .* 50% .* a larger train.global_batch$")])
def test_a_pipeline_that_is_never_full_says_so(tiny, stages, settings, says):
    """The default, train.micro_batch=0, is one micro-batch."""
    mesh = build_mesh(Parallel(), World())
    mesh = replace(mesh, axes={**mesh.axes, "pp": Axis("pp", stages)})
    told = trainer.bubble_warning(config.load("vit-demo", [*tiny, *settings]), mesh)
    assert re.search(says, told) if says else told == ""


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_resumed_in_mid_epoch_gives_the_same_losses_bit_for_bit(tiny, name):
    extra = [f"optim.name={name}", "optim.momentum=0.9", "model.dropout=0.1", "train.micro_batch=2"]
    whole = run([*tiny, *extra, "log.name=whole"])
    part = run([*tiny, *extra, "log.name=part"])
    for newer in checkpoint.steps(part / "checkpoints")[1:]:            # as if killed after step 7 of 12, saved at 5
        for file in newer.iterdir():
            file.unlink()
        newer.rmdir()
    records = read_metrics(part / "metrics.jsonl")[:7]
    (part / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + '{"step": 8, "lo')
    assert_same_run(run([*tiny, *extra, "log.name=part"]), whole)


def test_metrics_with_lines_that_are_none_lose_nothing(tiny, capfd):
    """A user's edit, a disk's bytes: the run goes on, such lines stay, and the records around them too."""
    folder = run([*tiny, "train.steps=6", "checkpoint.every=2", "log.every=1"])
    file = folder / "metrics.jsonl"
    written = file.read_bytes().splitlines(keepends=True)
    strange = [written[1].replace(b",", b";", 1), b"\xff" + written[2], b"null\n", b"{\"loss\": 1}\n", b"[" * 100_000 + b"\n"]
    file.write_bytes(b"".join([written[0], *strange, *written[3:]]) + b'{"step": 7, "lo')
    run([*tiny, "train.steps=8", "checkpoint.every=2", "log.every=1"])
    assert [record["step"] for record in read_metrics(file)] == [1, 4, 5, 6, 7, 8]
    assert file.read_bytes().splitlines(keepends=True)[1:6] == strange
    assert f"{file}: lines that are no record of a step: 5; left as they are" in capfd.readouterr().out


def test_a_run_of_a_deeper_model_does_not_go_on_in_a_shallower_one(tiny):
    """Every parameter is in the checkpoint, and some of the checkpoint's are nowhere."""
    folder = run([*tiny, "model.depth=2", "train.steps=2", "optim.ema=0.9"])
    with pytest.raises(CourseError, match=r"belongs to another model: it has blocks\.1\.\S+, which this model lacks"):
        run([*tiny, "model.depth=1", "train.steps=4", "optim.ema=0.9"])
    assert len(losses(folder)) == 2


def in_stages(settings):
    """What stopped a run in two stages, if anything did."""
    c = config.load("vit-demo", [*settings, "parallel.pp=2", "train.micro_batch=1", "optim.ema=0.9", "data.workers=0"])
    try:
        trainer.fit(assemble.assemble(c, build_mesh(c.parallel, join("cpu"))))
    except CourseError as error:
        return str(error)
    return ""


def test_what_the_other_stage_has_is_not_left_over(tiny):
    deep = [*tiny, "model.depth=4"]
    assert ranks(2)(in_stages, [*deep, "train.steps=1"]) == ranks(2)(in_stages, [*deep, "train.steps=2"]) == ["", ""]
    for said in ranks(2)(in_stages, [*tiny, "model.depth=2", "train.steps=3"]):
        assert "belongs to another model: it has blocks." in said


def test_histories_of_fp8_are_not_left_over(tiny):
    folder = run([*tiny, "precision=fp8", "train.steps=2"])
    run([*tiny, "precision=bf16", "train.steps=3"])
    assert len(losses(folder)) == 3


def test_another_precision_starts_with_a_loss_scale_of_its_own(tiny):
    """That of bf16 is 1: fp16's gradients would vanish until it had doubled, every 2000 steps."""
    folder = run([*tiny, "precision=bf16"])
    run([*tiny, "precision=fp16", "train.steps=13"])
    assert checkpoint.newest(folder / "checkpoints", print, Axis("all"))[1]["state"]["loss_scale"] == FIRST_SCALE["fp16"]


@pytest.mark.parametrize("name", ["adam", "sgd"])
@pytest.mark.parametrize(("first", "then"), [("fp64", "fp32"), ("fp32", "fp64")])
def test_the_optimizers_states_go_on_in_the_weights_format(tiny, first, then, name):
    """Training goes on as near to the undisturbed run as float32 is, and the states are saved in the new format."""
    kind = [f"optim.name={name}", "optim.momentum=0.9", "optim.schedule=constant", "optim.lr=0.01"]
    whole = run([*tiny, *kind, "log.name=whole", f"precision={first}"])
    run([*tiny, *kind, "log.name=part", f"precision={first}", "train.steps=6"])
    part = run([*tiny, *kind, "log.name=part", f"precision={then}"])
    ours, theirs = ([r["loss"] for r in read_metrics(folder / "metrics.jsonl")] for folder in (part, whole))
    assert ours == pytest.approx(theirs, rel=1e-4)
    wide = {"fp64": torch.float64, "fp32": torch.float32}[then]
    assert {x.dtype for key, x in final_tensors(part).items() if not key.endswith(".step")} == {wide}


@pytest.mark.parametrize("kernels", ["pytorch", "triton"])
def test_who_goes_on_without_momentum_does_not_keep_the_old_one(tiny, kernels):
    """Saved on and on, it would come back, long out of date, to who goes on with momentum later."""
    kind = [f"kernels={kernels}", "optim.name=sgd", "optim.schedule=constant", "optim.warmup=0", "optim.lr=0.01"]
    folder = run([*tiny, *kind, "optim.momentum=0.9", "train.steps=6"])
    assert any(name.endswith(".momentum_buffer") for name in final_tensors(folder))
    run([*tiny, *kind, "optim.momentum=0", "train.steps=9"])
    assert not any(name.endswith(".momentum_buffer") for name in final_tensors(folder))


@pytest.mark.parametrize("kernels", ["pytorch", "triton"])
@pytest.mark.parametrize(("first", "then"), [("sgd", "adam"), ("adam", "sgd"), ("adamw", "muon"), ("muon", "adamw"),
                                             ("sgd", "muon"), ("muon", "sgd")])
def test_another_optimizer_goes_on_with_the_weights_and_starts_afresh(tiny, first, then, kernels, capsys):
    """Its first step there is a first one, and the other's states are not saved again."""
    kind = [f"kernels={kernels}", "optim.momentum=0.9", "optim.schedule=constant", "optim.warmup=0", "optim.lr=0.01"]
    folder = run([*tiny, *kind, f"optim.name={first}"])
    before = final_tensors(folder)
    run([*tiny, *kind, f"optim.name={then}", "train.steps=13"])
    out = capsys.readouterr().out
    assert f"optim.name: {first} -> {then}" in out and "of another kind and left out: this one starts afresh" in out
    after = final_tensors(folder)
    states = {name.rpartition(".")[2] for name in after} & {"step", "exp_avg", "exp_avg_sq", "momentum_buffer", "momentum"}
    adam = {"step", "exp_avg", "exp_avg_sq"}
    assert states == {"sgd": {"momentum_buffer"}, "muon": adam | {"momentum"}}.get(then, adam)
    for name in (name for name in before if f"{name}.exp_avg" in after):
        mean, square = after[f"{name}.exp_avg"] / 0.1, after[f"{name}.exp_avg_sq"] / 0.001
        assert after[f"{name}.step"] == 1
        torch.testing.assert_close(mean**2, square, rtol=1e-4, atol=1e-12)
    for name in (name for name in before if f"{name}.momentum_buffer" in after):
        torch.testing.assert_close(after[name], before[name] - 0.01 * after[f"{name}.momentum_buffer"])
    for name in (name for name in before if f"{name}.momentum" in after):           # which is the gradient, up to its size
        torch.testing.assert_close(after[name], before[name] - 0.01 * orthogonal_update(after[f"{name}.momentum"]))


def test_a_damaged_newest_checkpoint_costs_only_the_steps_since_the_one_before(tiny, capsys):
    whole, part = (run([*tiny, f"log.name={name}"]) for name in ("whole", "part"))
    newest = checkpoint.steps(part / "checkpoints")[-1]
    (newest / "rank00000.safetensors").write_bytes(b"damaged")
    assert_same_run(run([*tiny, "log.name=part"]), whole)
    out = capsys.readouterr().out
    assert "passing over a checkpoint" in out and "step_000012" in out and "at step 10" in out


def test_a_finished_run_is_left_alone_and_can_be_prolonged(tiny, capsys):
    folder = run([*tiny, "optim.schedule=constant"])
    before = losses(folder)
    assert run([*tiny, "optim.schedule=constant"]) == folder and losses(folder) == before
    assert "finished" in capsys.readouterr().out
    run([*tiny, "optim.schedule=constant", "train.steps=14"])
    assert len(losses(folder)) == 14
    assert "  changed since then: train.steps: 12 -> 14" in capsys.readouterr().out


def test_what_a_finished_run_does_not_take_is_said_so(tiny, capsys):
    run([*tiny, "train.steps=2"])
    capsys.readouterr()
    run([*tiny, "train.steps=1", "optim.lr=0.5"])
    out = capsys.readouterr().out
    for change in ("-> 0.5", "train.steps: 2 -> 1"):
        assert any(line.startswith("  not taken, since no step is left: ") and change in line for line in out.splitlines())
    assert "is finished (2 steps, and train.steps=1 asks for fewer): for a new run set log.name" in out
    assert "resuming" not in out and "changed since" not in out


def test_an_old_run_is_never_overwritten(tiny):
    folder = run(tiny)
    before = (folder / "config.yaml").read_text()
    with pytest.raises(CourseError, match=r"choose another log\.name"):
        run([*tiny, "checkpoint.resume=false"])
    with pytest.raises(CourseError, match="another model"):
        run([*tiny, "model.dim=32"])
    assert (folder / "config.yaml").read_text() == before


@pytest.mark.parametrize(("lost", "sentence"), [
    (("good_steps", "samples"), r"step_000012/index\.json lacks good_steps, samples, so another version wrote it"),
    ((), "every checkpoint in .* is damaged: restore one, or start again")])
def test_a_checkpoint_of_a_version_that_knew_less_is_not_gone_on_from(tiny, lost, sentence):
    """It has no checksum of its index, either. lost: what its state lacks; (): there is none."""
    folder = run([*tiny, "checkpoint.keep=1"])
    file = folder / "checkpoints" / "step_000012" / "index.json"
    index = json.loads(file.read_text())
    for name in lost or ("state",):
        del (index["state"] if lost else index)[name]
    file.write_text(json.dumps({key: value for key, value in index.items() if key != "sha256"}))
    with pytest.raises(CourseError, match=sentence):
        run([*tiny, "train.steps=14"])


def test_ten_bad_steps_in_a_row_stop_the_run(tiny, own_data):
    with h5py.File(own_data / "train" / "1979.h5", "r+") as file:
        file["fields"][:, 3] = float("nan")
    with h5py.File(own_data / "train" / "1980.h5", "r+") as file:
        file["fields"][:, 3] = float("nan")
    with pytest.raises(CourseError, match="10 steps in a row"):
        run([*tiny, f"data.path={own_data}"])


def test_a_few_bad_samples_are_skipped_and_counted(tiny, own_data):
    with h5py.File(own_data / "train" / "1979.h5", "r+") as file:
        file["fields"][10, 3, 2, 2] = float("nan")
    folder = run([*tiny, f"data.path={own_data}", "train.steps=9"])     # an epoch: 38 pairs, 2 of them bad
    last = read_metrics(folder / "metrics.jsonl")[-1]
    assert 1 <= last["skipped_steps"] == last["nan_steps"] <= 2
    assert all(tensor.isfinite().all() for tensor in final_tensors(folder).values())


def test_a_run_that_is_refused_leaves_nothing_and_changes_nothing(tiny, tmp_path):
    nowhere = [*tiny, f"data.path={tmp_path}/nowhere", "data.source=files"]
    with pytest.raises(CourseError, match="nowhere/train does not exist"):
        run(nowhere)
    folder = trainer.run_folder(config.load("vit-demo", tiny))
    assert not folder.exists()
    before = (run(tiny) / "config.yaml").read_bytes()
    with pytest.raises(CourseError, match="nowhere/train does not exist"):
        run([*nowhere, "train.steps=20"])
    assert (folder / "config.yaml").read_bytes() == before


def test_the_host_is_at_most_two_steps_ahead_of_a_gpu(monkeypatch):
    """With events that stand in for a GPU's."""
    seen = []

    class Event:
        def __init__(self, blocking):
            self.number = len([what for what, _ in seen if what == "launched"]) + 1

        def record(self):
            seen.append(("launched", self.number))

        def synchronize(self):
            seen.append(("done", self.number))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    pace = trainer.LaunchThrottle(torch.device("cuda", 0))
    for number in range(1, 6):
        pace.step()
        done = [number for what, number in seen if what == "done"]
        assert done == list(range(1, number - 1))
    trainer.LaunchThrottle(torch.device("cpu")).step()
    assert len(seen) == 5 + 3


def test_mock_data_needs_no_files(tiny):
    folder = run([*tiny, "data.source=mock", "data.path=nowhere"])
    assert losses(folder)[-1] < losses(folder)[0]


@pytest.mark.parametrize("preset", ["gpt-demo", "dit-demo"])
def test_other_models_learn_and_go_on_from_a_checkpoint(tmp_path, preset):
    def losses_of(name: str, *runs: int) -> list[float]:
        for steps in runs:
            settings = [f"log.dir={tmp_path}", f"log.name={name}", "log.every=1", "log.tensorboard=false", "train.device=cpu",
                        f"train.steps={steps}", "optim.schedule=constant", "optim.warmup=0", "model.depth=1", "optim.lr=3e-3"]
            folder = trainer.main(config.load(preset, settings))
        return losses(folder)

    whole = losses_of("whole", 40)
    assert len(whole) == 40 and sum(whole[-5:]) < 0.9 * sum(whole[:5]) and losses_of("parts", 20, 40) == whole      # bit for bit
    records = read_metrics(tmp_path / preset / "parts" / "metrics.jsonl")
    assert set(records[0]) == FIELDS and records[0]["tflops_per_gpu"] > 0


@pytest.mark.slow
def test_compiled_gives_the_same(tiny):
    eager, compiled = (losses(run([*tiny, "train.steps=3", f"compile={c}", f"log.name=compile-{c}"])) for c in ("false", "true"))
    assert compiled == pytest.approx(eager, rel=1e-5)


def start(arguments: list[str], ranks: int = 1) -> subprocess.Popen:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return subprocess.Popen([sys.executable, *launcher, "-m", "course.cli", "train", "vit-demo", *arguments],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def wait_for_step(process: subprocess.Popen, folder: Path, step: int) -> None:
    limit = time.time() + 60
    while time.time() < limit:
        assert process.poll() is None, process.communicate()[0]
        if any(record["step"] >= step for record in read_metrics(folder / "metrics.jsonl")):
            return
        time.sleep(0.01)
    raise AssertionError(f"no step {step} within a minute")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_saves_and_ends_cleanly_and_nothing_is_lost(small_data, tmp_path, number):
    """The signal goes to every process of the job, the loader's workers too, as batch systems and Ctrl-C send it."""
    settings = [*tiny_settings(small_data, tmp_path / "runs"), "train.steps=400", "checkpoint.every=1000", "model.depth=1",
                "data.workers=1"]
    process = start([*settings, "log.name=stopped"])
    folder = tmp_path / "runs" / "vit-demo" / "stopped"
    wait_for_step(process, folder, 20)
    os.killpg(process.pid, number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == GO_ON and f"stopped by {number.name}" in out
    assert ("stopping after this step, and saving; Ctrl-C again" in out) == (number == signal.SIGINT)
    done = losses(folder)
    assert 20 <= len(done) < 400
    assert checkpoint.steps(folder / "checkpoints")[-1].name == f"step_{len(done):06d}"
    whole = run([*settings, "log.name=whole"])
    assert_same_run(run([*settings, "log.name=stopped"]), whole)


def pictures(folder: Path) -> list[bytes]:
    """The PNG files that a run gave to TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [image.encoded_image_string for tag in events.Tags()["images"] for image in events.Images(tag)]


@pytest.mark.parametrize("layout", ["parallel.dp=2", pytest.param("parallel.pp=2", marks=pytest.mark.slow)])
def test_two_ranks_train_as_one(small_data, tmp_path, layout):
    """float64 and SGD: the sum of gradients is exact to rounding, and SGD shows every wrong factor."""
    settings = [*tiny_settings(small_data, tmp_path / "runs"), "precision=fp64", "optim.name=sgd", "optim.lr=0.1",
                "train.eval_every=6", "model.dropout=0.1", "train.micro_batch=1", "optim.clip=0.5", "log.tensorboard=true"]
    process = start([*settings, "log.name=two", layout], ranks=2)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    one, two = run([*settings, "log.name=one"]), tmp_path / "runs" / "vit-demo" / "two"
    assert losses(two) == pytest.approx(losses(one), rel=1e-12)
    for a, b in zip(read_metrics(one / "metrics.jsonl"), read_metrics(two / "metrics.jsonl"), strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-10)
        if "valid_rmse" in a:
            assert a["valid_rmse"] == pytest.approx(b["valid_rmse"], rel=1e-10)
            assert a["valid_loss"] == pytest.approx(b["valid_loss"], rel=1e-10)
    first, second = final_tensors(one), final_tensors(two)
    assert all((first[name] - second[name]).abs().max() < 1e-12 for name in first)
    assert len(pictures(one)) == 2 and pictures(one) == pictures(two)


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_both_at_the_same_step(small_data, tmp_path):
    settings = [*tiny_settings(small_data, tmp_path / "runs"), "train.steps=2000", "checkpoint.every=10000"]
    process = start([*settings, "log.name=pair"], ranks=2)
    folder = tmp_path / "runs" / "vit-demo" / "pair"
    wait_for_step(process, folder, 5)
    children = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "course.cli"], capture_output=True, text=True).stdout
    os.kill(int(children.split()[-1]), signal.SIGUSR1)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert "stopped by" in out
    assert len(checkpoint.steps(folder / "checkpoints")) == 1


@pytest.mark.slow
def test_processes_that_the_axes_do_not_fill_are_refused_with_the_arithmetic(small_data, tmp_path):
    process = start([*tiny_settings(small_data, tmp_path), "train.global_batch=6", "parallel.dp=3"], ranks=2)
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "pp=1 x dp=3 x cp=1 x tp=1 = 3, but there are 2 processes" in out


def job_that_fails(tmp_path, other, device):
    """Two ranks train; the second fails in its fourth step, when the first trains on or is stuck in Python. What they told."""
    script = tmp_path / "job.py"
    script.write_text(f"""
import os, time
from course import config; from course.training import assemble, trainer as train
real = assemble.train_step

def failing(*arguments):
    step, done = real(*arguments), []
    def one(batch):
        done.append(1)
        if len(done) == 4 and os.environ["RANK"] == "1":
            print("failing at", time.time(), flush=True)
            raise ValueError("this rank has had enough")
        if len(done) == 4 and {other!r} == "is stuck":
            while True:
                time.sleep(100)
        return step(batch)
    return one

assemble.train_step = failing
train.main(config.load("vit-demo", ["data.source=mock", "train.device={device}", "model.depth=1", "train.global_batch=2",
                                    "train.steps=50", "train.eval_every=0", "log.tensorboard=false", "log.dir={tmp_path}"]))
""")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
                          capture_output=True, text=True, timeout=120)
    failed = float(re.search(r"failing at ([\d.]+)", done.stdout)[1])
    assert done.returncode != 0 and time.time() - failed < 10
    return [line for line in done.stderr.splitlines() if re.match(r"\[rank\d\]: |another rank has failed", line)]    # no warnings


@pytest.mark.slow
@pytest.mark.parametrize("other", ["trains on", "is stuck"])
def test_a_rank_that_fails_takes_the_job_down_in_seconds(tmp_path, other):
    """Its own traceback first; a rank that is stuck where no signal reaches it, as in a collective on a GPU, ends as well."""
    told = job_that_fails(tmp_path, other, "cpu")
    assert told[0].startswith("[rank1]") and "[rank1]: ValueError: this rank has had enough" in told
    assert other == "trains on" or told[-1] == "another rank has failed: this one ends, too"


def test_a_graph_without_a_gpu_is_a_sentence(tiny):
    with pytest.raises(CourseError, match="graphs=true needs a GPU"):
        run([*tiny, "graphs=true"])


def test_every_0_means_at_the_end_alone(tiny):
    """Of checkpoints, validations and lines alike; keep=0 keeps all."""
    folder = run([*tiny, "train.steps=6", "checkpoint.every=0", "train.eval_every=0", "log.every=0"])
    assert [path.name for path in checkpoint.steps(folder / "checkpoints")] == ["step_000006"]
    assert [record["step"] for record in read_metrics(folder / "metrics.jsonl")] == [6]
    run([*tiny, "train.steps=12", "checkpoint.every=1", "checkpoint.keep=0"])
    assert len(checkpoint.steps(folder / "checkpoints")) == 7
