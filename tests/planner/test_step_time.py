import json
import random
import statistics
import time
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from course.bench import kernel_table as table
from course.bench import recorded_steps, results
from course.config import load
from course.models import build_model
from course.ops.number_formats import working_dtype
from course.parallel.pipeline_parallel import schedules
from course.planner import block_time, flops, hardware, kernel_efficiency, step_time
from course.planner.rank_workload import workload_of
from course.planner.step_time import predict
from course.utils.errors import CourseError

METHODS = ("gather", "ring", "all_to_all")
H200 = hardware.load("h200")
TINY = ["model.dim=1024", "model.depth=8", "model.heads=16", "train.global_batch=64", "train.micro_batch=4"]


pytestmark = pytest.mark.usefixtures("rules")


def gpt(*settings):
    return load("gpt-124m", [*TINY, *settings])


# ---- what the parts are ----

def test_the_parts_add_up():
    found = predict(gpt("parallel.tp=2", "parallel.pp=2", "parallel.dp=2", "compile=true"), H200)
    assert found.step == pytest.approx(sum(found.parts.values()))
    assert set(found.parts) == {"matmul", "attention", "memory", "recompute", "optimizer", "tensor", "dispatch", "context",
                                "data", "send", "bubble", "launch", "loading"}
    assert min(found.parts.values()) >= 0 and found.bubble > 0 and found.tensor > 0 and found.data > 0 and found.send > 0
    assert found.mfu == pytest.approx(flops.step(gpt().model, 64) / 8 / found.step / 989e12)
    assert found.samples_per_s == pytest.approx(64 / found.step)


@pytest.mark.parametrize("name", ["gpt-124m", "gpt-7b", "vit-short", "vit-mp", "dit-xl", "dit-3b"])
def test_one_gpu_communicates_with_nobody(name):
    found = predict(load(name, ["parallel.dp=1", "train.global_batch=32", "train.micro_batch=8", "data.source=mock"]), H200)
    assert found.tensor == found.context == found.data == found.send == found.bubble == found.hidden == found.loading == 0
    assert 0.02 < found.mfu < 0.7


def test_matmuls_are_the_model_flops_but_attentions():
    """Large ones at the rule's efficiency: the FLOPs of `flops.step` without the scores, exactly."""
    c = load("gpt-7b", ["train.global_batch=4", "train.micro_batch=4", "parallel.dp=1"])
    m = c.model
    scores = 4 * 3 * m.depth * 4 * m.context**2 * m.dim
    assert predict(c, H200).matmul == pytest.approx((flops.step(m, 4) - scores) / (0.68 * 989e12), rel=0.001)


def test_recomputation():
    none, selective, full = (predict(gpt(f"train.recompute={how}", "graphs=true"), H200) for how in ("none", "selective", "full"))
    assert none.recompute == 0 < selective.recompute < full.recompute
    assert none.step < selective.step < full.step < 1.4 * none.step


@pytest.mark.parametrize(("setting", "part"), [("compile=true", "memory"), ("attention=flash", "attention"),
                                               ("precision=fp8", "matmul"), ("optim.ema=0.999", "optimizer"),
                                               ("stream=narrow", "memory")])
def test_settings_change_their_part(setting, part):
    others = ["compile=true"] if setting == "stream=narrow" else []     # uncompiled, the casts eat what it saves
    before, after = predict(gpt(*others), H200), predict(gpt(setting, *others), H200)
    assert getattr(before, part) != pytest.approx(getattr(after, part), rel=0.02)


def test_a_graph_has_no_launches():
    small = ["model.dim=256", "model.heads=4", "train.global_batch=1", "train.micro_batch=1", "model.context=128"]
    assert predict(gpt(*small), H200).launch > predict(gpt(*small), H200).step / 2
    assert predict(gpt(*small, "graphs=true"), H200).launch == 0


def test_zero_shares_the_update_out():
    plain, zero = predict(gpt("parallel.dp=8"), H200), predict(gpt("parallel.dp=8", "parallel.zero=true"), H200)
    fixed = step_time.STEP_TINY_KERNELS * kernel_efficiency.TINY_KERNEL      # on single numbers, on each rank
    assert plain.optimizer - fixed > 5 * (zero.optimizer - fixed) > 0


def test_buckets_hide_what_naive_shows():
    naive, bucketed, none = (predict(gpt("parallel.dp=8", f"parallel.data={how}"), H200) for how in ("naive", "bucketed", "none"))
    assert none.data == 0 < bucketed.data < naive.data and naive.hidden == 0 < bucketed.hidden


def test_tp_over_nodes_is_slow_and_the_order_says_where_it_is():
    near = predict(gpt("parallel.tp=8", "parallel.dp=8"), H200)
    far = predict(gpt("parallel.tp=8", "parallel.dp=8", "parallel.order=tp-pp-dp-cp"), H200)
    assert far.tensor > 4 * near.tensor and far.data < near.data


def test_auto_is_what_a_run_takes_symmetric_memory_in_a_node_nccl_beyond():
    """The order decides whether neighbors or ranks of different nodes share a tensor."""
    for order, how in (("pp-dp-cp-tp", "symmetric"), ("tp-pp-dp-cp", "nccl")):
        settings = ("parallel.tp=2", "parallel.dp=8", "parallel.sp=true", f"parallel.order={order}", "train.global_batch=32")
        auto, taken = (predict(gpt(*settings, f"parallel.overlap={overlap}"), H200, 16) for overlap in ("auto", how))
        other = predict(gpt(*settings, f"parallel.overlap={'nccl' if how == 'symmetric' else 'symmetric'}"), H200, 16)
        assert auto == taken != other
    assert workload_of(gpt("parallel.tp=2"), H200, 2).p.overlap == "auto"               # nothing to choose


def test_overlap_hides_collectives_beside_matmuls():
    none, nccl = (predict(gpt("parallel.tp=4", "parallel.sp=true", f"parallel.overlap={how}"), H200) for how in ("none", "nccl"))
    assert nccl.tensor < none.tensor and nccl.hidden > 0


def test_three_ways_of_context():
    found = {how: predict(gpt("model.context=16384", "parallel.cp=4", f"parallel.context={how}", "train.micro_batch=1",
                              "train.global_batch=4"), H200) for how in ("gather", "ring", "all_to_all")}
    assert found["ring"].hidden > found["gather"].hidden
    assert found["gather"].attention > found["ring"].attention          # no cuDNN kernel has its mask
    assert all(time.context > 0 for time in found.values())


@pytest.mark.parametrize(("name", "p", "m", "v"), [("gpipe", 4, 16, 1), ("1f1b", 4, 16, 1), ("1f1b", 8, 8, 1),
                                                   ("interleaved", 4, 16, 2)])
def test_the_bubble_is_that_of_the_schedule_played_through(name, p, m, v):
    """Layers alone, no ends: the formula beside schedule.timeline."""
    lists = [schedules.passes_of(name, p, rank, m, v) for rank in range(p)]
    played = max(end for _, end in schedules.timeline(lists, v, 1.0, 2.0).values())
    c = gpt(f"parallel.pp={p}", f"parallel.schedule={name}", f"parallel.chunks={v}", "model.depth=16", f"train.global_batch={m}",
            "train.micro_batch=1")
    rank = {"forward": 1.0, "backward": 2.0}
    _, bubble = step_time.pipeline_time(workload_of(c, H200, p), 3.0, [rank] * p)
    assert 3.0 * m + bubble == pytest.approx(played)


def test_the_bubble_of_an_uneven_pipeline_counts_every_rank():
    """18 blocks over 8 ranks: two of them have three. The first waits for all others, once."""
    c = gpt("parallel.pp=8", "model.depth=18", "train.global_batch=16", "train.micro_batch=1")
    local = workload_of(c, H200, 8)
    block, ends = block_time.block_time(local), block_time.ends_time(local)
    each = [layers * (block["forward"] + block["backward"]) for layers in step_time.shares(18, 8, 1)]
    each[0] += ends[0]["forward"] + ends[0]["backward"]
    each[-1] += ends[1]["forward"] + ends[1]["backward"]
    assert step_time.time_of(local).bubble == pytest.approx(sum(each) - max(each))


def test_a_pipeline_over_nodes_waits_for_the_network():
    """Two ranks of tp: of a pipeline of eight on nodes of 8 every fourth border is one of nodes."""
    def send(bandwidth, order):
        h = replace(H200, links=(H200.links[0], replace(H200.links[1], bandwidth=bandwidth)))
        return predict(gpt("parallel.tp=2", "parallel.pp=8", f"parallel.order={order}", "train.global_batch=16",
                           "train.micro_batch=1", "model.depth=16"), h, 16).send

    assert send(1e9, "dp-pp-cp-tp") > 5 * send(50e9, "dp-pp-cp-tp")


def test_selective_recomputation_gathers_and_exchanges_again():
    """Keys of all ranks, heads for tokens: no such result is kept (`activation_checkpointing.EXPENSIVE_OPS`), a ring's is. Where
    attention leaves the compiler, a compiled block's linears are computed again, too."""
    def again(context, *settings):
        c = gpt("parallel.cp=2", f"parallel.context={context}", "train.recompute=selective", "train.global_batch=4", *settings)
        return predict(c, H200, 2).recompute

    plain = again("ring")
    for context in ("gather", "all_to_all"):
        none = predict(gpt("parallel.cp=2", f"parallel.context={context}", "train.global_batch=4"), H200, 2)
        assert plain < again(context) < plain + none.context
    full = predict(gpt("parallel.cp=2", "parallel.context=gather", "train.recompute=full", "compile=true",
                       "train.global_batch=4"), H200, 2)
    assert 0.5 * full.recompute < again("gather", "compile=true") < full.recompute


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("v", [2, 4])
def test_messages_that_are_seen_are_those_of_the_schedule_played_through(name, p, v):
    v, send = v if name == "interleaved" else 1, 2.0**-20
    for m in (1, p - 1, p, p + 1, 2 * p, 5 * p, 5 * p + 1):
        if m < p and v > 1:
            continue
        lists = [schedules.passes_of(name, p, rank, m, v) for rank in range(p)]
        alone, late = (max(end for _, end in schedules.timeline(lists, v, 1.0, 2.0, wait).values()) for wait in (0.0, send))
        seen = (late - alone) / send
        assert seen == pytest.approx(step_time.waits(name, p, m, v), abs=1.01 if m % p and v == 1 else 1e-3) or (
            m % p and v > 1 and seen < step_time.waits(name, p, m, v))


def test_blocks_are_shared_out_as_the_pipeline_does():
    assert step_time.shares(10, 4, 1) == [3, 3, 2, 2] and step_time.shares(16, 4, 2) == [4, 4, 4, 4]
    with pytest.raises(CourseError, match="16 blocks, but the model has 12"):
        step_time.shares(12, 8, 2)


def test_a_slow_loader_is_waited_for():
    fast, slow = (predict(load("vit-short", ["precision=bf16", "compile=true", f"data.loader={how}", f"data.workers={n}"]), H200)
                  for how, n in (("threads", 12), ("native", 1)))
    assert fast.loading == 0 < slow.loading


@pytest.mark.parametrize(("settings", "gpus", "words"), [
    (["parallel.tp=3"], 8, "change an axis, or predict for"), (["parallel.dp=7"], 0, "not divisible by parallel.dp=7"),
    (["parallel.pp=16"], 0, "16 blocks, but the model has 8")])
def test_layouts_that_do_not_fit_get_a_sentence(settings, gpus, words):
    with pytest.raises(CourseError, match=words):
        predict(gpt(*settings), H200, gpus)


def test_formats_that_hardware_lacks_get_a_sentence():
    with pytest.raises(CourseError, match="no matmuls in fp8"):
        predict(gpt("precision=fp8"), hardware.load("a100-80"))


def test_ten_thousands_of_gpus_take_a_millisecond():
    c = load("gpt-7b", ["parallel.tp=8", "parallel.sp=true", "parallel.pp=8", "parallel.overlap=nccl", "train.global_batch=2048",
                        "train.micro_batch=1"])
    predict(c, H200, 16384)
    begin = time.process_time()
    for _ in range(50):
        found = predict(c, H200, 16384)
    assert (time.process_time() - begin) / 50 < 5e-3 and 0.05 < found.mfu < 0.6


# ---- beside what was recorded on H200s ----

# of those that are 25% off or more, and why
KNOWN = {
    "cp_: cp 4: 16k causal ring": "10 ms of 4 ranks that wait for each other's hosts; it was 8.7 on another machine",
}


def test_recorded_steps_of_h200s():
    """Nothing is fitted to these steps but `BESIDE`; the rules' rates are of kernels. `pytest -s` shows the list."""
    errors = {}
    for step in recorded_steps.steps():
        name = f"{step.file}: {step.name}"
        errors[name] = step.error
        parts = " ".join(f"{part} {seconds * 1e3:.1f}" for part, seconds in step.time.parts.items() if seconds > 5e-5)
        print(f"{name:72s} {step.ms:8.1f} ms, predicted {step.time.step * 1e3:8.1f} {step.error:+4.0%}  {parts}")
    off = sorted(abs(error) for error in errors.values())
    print(f"{len(off)} steps: median {statistics.median(off):.1%}, worst {off[-1]:.0%}")
    assert len(off) > 120 and statistics.median(off) < 0.08
    assert {name for name, error in errors.items() if abs(error) >= 0.25} == set(KNOWN)


def test_symmetric_memory_costs_what_ranks_write():
    """Against H200s, two and four, whose pieces are 5 to 101 MB, and the two H100s from which the barrier was taken: these
    scattered by two barriers, of which the library has one, and added up by PyTorch."""
    two = results.load("symmetric_2xh100")["rows"]
    files = {"h200": recorded_steps.rows("exchange_"), "h100-80": [row | {"gpus": 2} for row in two]}
    off: dict[str, list[float]] = {name: [] for name in files}
    sizes = ((32, 256, 1152), (16, 1024, 1024), (4, 2048, 2048), (16, 2048, 3072))
    for (name, tp), (samples, tokens, width) in product((("h200", 2), ("h200", 4), ("h100-80", 2)), sizes):
        c = load("gpt-124m", [f"model.dim={width}", f"model.heads={width // 64}", f"model.context={tokens}", "precision=bf16",
                              f"train.global_batch={samples}", "train.micro_batch=0", "parallel.dp=1", f"parallel.tp={tp}",
                              "parallel.sp=true", "parallel.overlap=symmetric"])
        forward, _, _ = block_time.symmetric_time(workload_of(c, hardware.load(name), tp), [(0.0, 1.0, 1.0, 0.0)] * 4)
        rows = {row["case"]: row["ms"] for row in files[name] if row["size"] == [samples, tokens, width] and row["gpus"] == tp}
        measured = rows["gather, through memory"] + rows["scatter, through memory"]
        off[name].append(forward * 1e3 / 2 / measured - 1)
    print(off)
    assert max(map(abs, off["h200"])) < 0.07 and max(map(abs, off["h100-80"])) < 0.2


# ---- with a table ----

def table_of(found):
    """The table that `course bench kernels` would write of a GPU that does what the rules say."""
    def grid(axes, seconds):
        return {"axes": [list(axis) for axis in axes], "seconds": [seconds(*point) for point in product(*axes)]}

    matmul = {kind: grid([table.SIDES] * 3, partial(found.matmul, precision=kind)) for kind in ("bf16", "fp8")}
    def attend(h, t, d, causal, back):
        return found.attention(h, t, t, d, causal, "bf16", backward=back)

    attention = {("backward" if back else "forward") + " causal" * causal: grid(
        [table.HEADS, table.TOKENS, table.WIDTHS], partial(attend, causal=causal, back=back))
        for causal in (False, True) for back in (False, True)}
    memory = {kind: grid([table.BYTES], partial(found.memory, kind)) for kind in kernel_efficiency.MEMORY}
    return {"matmul": matmul, "attention": attention, "memory": memory}


@pytest.mark.parametrize(("preset", "settings"), [
    ("gpt-124m", ["train.micro_batch=16", "train.global_batch=64"]), ("gpt-1.3b", ["train.global_batch=8", "parallel.tp=4"]),
    ("vit-short", ["precision=bf16", "data.source=mock"]), ("dit-xl", ["compile=true"]),
    ("gpt-7b", ["train.global_batch=8", "parallel.tp=2", "parallel.sp=true", "compile=true", "precision=fp8",
                "parallel.overlap=none"])])
def test_the_grid_is_fine_enough(preset, settings, tmp_path):
    """A table of rules gives the steps of the rules: what the grid loses between its points is little."""
    by_rules = kernel_efficiency.Kernels(H200, {})
    file = tmp_path / "table.json"
    file.write_text(json.dumps(table_of(by_rules)))
    by_table = replace(H200, table=str(file))
    c = load(preset, settings)
    assert predict(c, by_table).step == pytest.approx(predict(c, H200).step, rel=0.05)


def beside_norms(tmp_path, settings):
    """(block without norms in the table, block with, local): norms of width 1152 at a tenth of the bandwidth."""
    by_rules = table_of(kernel_efficiency.Kernels(H200, {}))
    shares = {1024: 0.55, 1152: 0.1, 2048: 0.55}
    grid = {"axes": [[1e6, 1e12], list(shares)], "seconds": [size / share / H200.bandwidth for size in (1e6, 1e12)
                                                             for share in shares.values()]}
    found = []
    for name, extra in (("without", {}), ("with", {"norms": dict.fromkeys(kernel_efficiency.NORMS, grid)})):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({**by_rules, **extra}))
        local = workload_of(load(settings[0], settings[1:]), replace(H200, table=str(file)), 1)
        found.append(block_time.block_time(local))
    return *found, local


SLOW = ["model.dim=1152", "model.heads=16", "train.micro_batch=16", "train.global_batch=16", "parallel.dp=1", "data.source=mock"]


@pytest.mark.parametrize(("preset", "settings"), [
    ("dit-xl", []), ("vit-mp", ["stream=narrow"]), ("gpt-124m", []), ("gpt-124m", ["model.norm=rms"]),
    ("gpt-124m", ["model.norm=rms", "kernels=triton"])])                  # between.fuse leaves RMSNorms to the compiler
def test_compiled_norms_take_what_was_measured_by_width(preset, settings, tmp_path):
    """In the place of two fused kernels forward, and of four backward: sums over tokens are measured with the norms."""
    before, after, local = beside_norms(tmp_path, [preset, *SLOW, "precision=bf16", "compile=true", *settings])
    ada, numbers = preset == "dit-xl", local.rest * 1152
    stream = 4 if preset == "gpt-124m" else 2
    forward = [numbers * (4 + 2 * stream)]
    backward = [numbers * (4 + 3 * stream), numbers * (stream + (4 if ada else 2))]
    for part, sizes in (("forward", forward), ("backward", backward)):
        more = 2 * (sum(sizes) / (0.1 * H200.bandwidth) - sum(local.kernels.memory("fused", size) for size in sizes))
        assert more > 0 and after[part] - before[part] == pytest.approx(more)
    for part in set(before) - {"forward", "backward", "memory"}:
        assert after[part] == before[part]
    assert after["memory"] - before["memory"] == pytest.approx(sum(after[w] - before[w] for w in ("forward", "backward")))


@pytest.mark.parametrize("settings", [["compile=false"], ["compile=true", "kernels=triton"], ["compile=false", "kernels=triton"]])
def test_other_norms_take_what_they_took(settings, tmp_path):
    """Uncompiled ones and those by hand."""
    before, after, _ = beside_norms(tmp_path, ["dit-xl", *SLOW, *settings])
    assert after == before


def test_recomputed_norms_are_as_slow(tmp_path):
    before, after, _ = beside_norms(tmp_path, ["dit-xl", *SLOW, "compile=true", "train.recompute=full"])
    assert after["recompute"] - before["recompute"] == pytest.approx(after["forward"] - before["forward"])


def test_parts_of_gradients_are_completed():
    assert predict(gpt("parallel.tp=2", "parallel.sp=true"), H200).data > 0 == predict(gpt("parallel.tp=2"), H200).data
    tied, free = (predict(gpt("parallel.pp=2", f"model.tied={word}"), H200).data for word in ("true", "false"))
    assert tied > free == 0


def test_any_configuration_has_a_finite_time():
    """Drawn ones, all axes and settings: every part is a number, none is negative, and one config is alike on all hardware."""
    pick = random.Random(0).choice
    for _ in range(100):
        model = pick([["model.dim=1024", "model.heads=16", "model.depth=16", "model.kv_heads=" + pick(["0", "8"]), pick(
            ["model.mlp=swiglu", "model.mlp=gelu"]), pick(["model.position=rotary", "model.position=learned"]), pick(
            ["model.norm=rms", "model.norm=layer"]), pick(["model.bias=false", "model.bias=true"])]])
        preset = pick(["gpt-124m", "vit-mp", "dit-xl"])
        settings = model if preset == "gpt-124m" else ["model.depth=16", "model.heads=16", "model.dim=1024", "data.source=mock"]
        schedule, chunks, pp = pick([("1f1b", 1, 1), ("1f1b", 1, 4), ("gpipe", 1, 2), ("interleaved", 2, 4)])
        how = [f"parallel.pp={pp}", f"parallel.schedule={schedule}", f"parallel.chunks={chunks}",
               f"parallel.tp={pick([1, 2, 4])}", f"parallel.cp={pick([1, 2])}", f"parallel.context={pick(METHODS)}",
               f"parallel.sp={pick(['true', 'false'])}", "parallel.overlap=none", f"parallel.zero={pick([0, 1, 2, 3])}",
               f"train.recompute={pick(['none', 'selective', 'full'])}", f"compile={pick(['true', 'false'])}",
               f"precision={pick(['bf16', 'fp8', 'fp16', 'tf32', 'fp32'])}", "train.global_batch=1024",
               f"train.micro_batch={pick([0, 1, 4])}", f"parallel.order={pick(['pp-dp-cp-tp', 'tp-cp-dp-pp'])}"]
        c = load(preset, [*settings, *how])
        for name in ("h200", "b200"):
            found = predict(c, hardware.load(name), 512)
            assert all(0 <= seconds < 1e4 for seconds in found.parts.values()), (settings, how)
            assert 0 < found.mfu < 0.8


@pytest.mark.parametrize("name", ["gpt-124m", "gpt-1.3b", "gpt-moe-8x350m", "vit-short", "vit-mp", "dit-xl", "dit-7b"])
def test_parameters_are_those_of_the_model(name):
    c = load(name, ["parallel.dp=1"])
    with torch.device("meta"):
        real = sum(p.numel() for p in build_model(c.model).parameters())
    local = workload_of(c, H200, 1)
    assert step_time.parameters_of_rank(local, c.model.depth, True) == pytest.approx(real, rel=2e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_weights_are_cast_unless_training_keeps_them_in_16_bits(precision):
    c = load("gpt-1.3b", [f"precision={precision}", "parallel.dp=2", "parallel.zero=1"])
    assert workload_of(c, H200, 2).casts == (working_dtype(precision) is None)
