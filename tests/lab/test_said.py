"""What the lessons' prose and the pictures' text alternatives say of measured figures is what the files under
course/bench/results say: a row for each sentence, with the numbers left out, and what they are."""

import math
import re
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from course import config, models
from course.bench import published_steps, recorded_steps
from course.bench.megatron_grid import CASES
from course.lab.figures import data_parallel, performance_model
from course.lab.figures import gpt as figures_gpt
from course.lab.figures import memory as figures_memory
from course.lab.instruments import recorded_runs
from course.parallel.pipeline_parallel import schedules
from course.planner import block_time, collectives, flops, hardware, kernel_efficiency, memory, search, step_time
from experiments import heldout, loss_alignment
from tests.test_numbers import ROOT, results, steps_of

Numbers = Callable[[], Sequence[float | str]]


@cache
def prose(lesson: str) -> str:
    """A master's text: lines, quotes and neighbouring strings joined, each gap one space."""
    master, = ROOT.glob(f"solutions/{lesson}_*.py")
    lines = (line.removeprefix("# ").removeprefix("> ").strip() for line in master.read_text().splitlines())
    return re.sub(r'" f?"', "", re.sub(r"\s+", " ", " ".join(lines)))


def at(file: str, label: str, field: str = "ms", part: str = "rows", **more: Any) -> Any:
    """A field of the one row of a file with this label (its case, rung or name) and these other fields."""
    where = results(file)
    for key in part.split("/"):
        where = where[key]
    found = [row[field] for row in where if label in (row.get("case"), row.get("rung"), row.get("name"))
             and all(row.get(key) == value for key, value in more.items())]
    assert len(found) == 1, f"{file}.json has {len(found)} rows {label} {more}"
    return found[0]


def percent(part: float, whole: float) -> float:
    """By how many percent the part is less than the whole."""
    return 100 * (1 - part / whole)


def bus(gpus: int, *megabytes: int) -> list[float]:
    """GB/s of all-reduces among H200s."""
    return [results("beginning_h200")["all_reduce"][str(gpus)][str(size)] for size in megabytes]


def parameters(preset: str) -> int:
    return sum(p.numel() for p in models.build_model(config.load(preset).model).parameters())


def dp(case: str, gpus: int = 4, bucket: float = 25.0, field: str = "ms") -> float:
    return at("dp_h200", case, field, gpus=gpus, bucket_mb=bucket)


STACK = 24 * 12 * 1024**2                                       # weights of lesson 07's stack, as in GPT 350M


def stack_seconds(gigabytes_per_s: float) -> float:
    """Of an all-reduce of the stack's gradients, float32, over four GPUs."""
    return 1.5 * 4 * STACK / (1e9 * gigabytes_per_s)


def filled(bucket_mb: float) -> tuple[list[float], list[float]]:
    """When the stack's buckets are ready, and their bytes, as lesson 07 has it."""
    sizes = 24 * [4 * 1024**2, 4 * 1024**2, 1024**2, 3 * 1024**2]
    return data_parallel.fill_buckets([(0.062 * size / STACK, 4.0 * size) for size in sizes], 1e6 * bucket_mb)


def last_bucket(bucket_mb: float) -> float:
    """Megabytes of the last of the stack's buckets."""
    return filled(bucket_mb)[1][-1] / 1e6


def pipeline_takes(name: str, send: float) -> float:
    """Forward passes that 16 micro-batches take on 4 ranks, where each message takes as long as `send` of them."""
    made = [schedules.passes_of(name, 4, rank, 16) for rank in range(4)]
    return max(end for _, end in schedules.timeline(made, send=send).values())


def by_hand(**other: int) -> float:
    """Seconds of lesson 17's run that is small enough for paper, with other fields."""
    ones = dict.fromkeys(("micros", "tokens", "dim", "hidden", "depth", "vocab", "tp", "pp"), 1) | other
    run = recorded_runs.Run(samples=2, causal=False, moved=3, update=5, **ones)
    seconds: float = ours(*ANSWERS)["step_seconds"](run, recorded_runs.Rates(1, 1, 1, 0, 1))
    return seconds


def exposed(bucket_mb: float, gigabytes_per_s: float) -> float:
    """Milliseconds of the stack's averaging that nothing hides, with such buckets over four GPUs, as lesson 07 has it."""
    ready, loads = filled(bucket_mb)
    end = 0.0
    for begin, load in zip(ready, loads, strict=True):
        end = max(end, begin) + data_parallel.all_reduce_seconds(load, 4, 1e9 * gigabytes_per_s, 20e-6)
    return 1e3 * (end - ready[-1])


def tp(case: str, gpus: int, field: str = "ms") -> float:
    return at("tp_h200", case, field, gpus=gpus)


def tp_sent(gpus: int) -> float:
    """Milliseconds of the all-reduces of lesson 10's stack."""
    return 1e3 * 8 * 4 * 2 * (gpus - 1) / gpus * 4 * 4096 * 4096 * 2 / (1e9 * bus(gpus, 134)[0])


DIT, GPT350, GPT1B = "DiT-XL/2, 256 px, 32 samples", "GPT 350M, 16 samples", "GPT 1.3B, 4 samples"
SP_MODELS = (DIT, "GPT 124M, 32 samples", GPT350, "DiT-XL/2, 512 px, 16 samples", GPT1B)
HAND = "Triton kernels"
NO_SP, MEMORY = f"{HAND}, no sequence parallelism", f"{HAND}, through memory"


def sp(model: str, way: str, gpus: int = 4, field: str = "ms") -> float:
    """A step with sequence parallelism on H200s, in a graph."""
    return at(f"sp_{gpus}xh200", f"{model}, {way}, in a graph", field)


def symmetric(case: str) -> float:
    """Microseconds of an exchange of DiT's 32 samples on two H100s."""
    return 1e3 * at("symmetric_2xh100", case, size=[32, 256, 1152])


def symmetric_step(model: str, way: str) -> float:
    return at("symmetric_2xh100", f"{model}, {way}, in a graph", part="steps/rows")


def exchange(case: str, size: list[int]) -> float:
    """Microseconds on four H200s."""
    return 1e3 * at("exchange_h200", case, gpus=4, size=size)


def both_ways(size: list[int]) -> float:
    """Microseconds of a gather and a scatter through memory."""
    return exchange("gather, through memory", size) + exchange("scatter, through memory", size)


def shown(size: list[int]) -> float:
    """Microseconds that a gather through memory adds to the multiplication beside it."""
    return exchange("matmul beside gather, through memory", size) - exchange("matmul", size)


OF_DIT, OF_GPT1B = [32, 256, 1152], [4, 2048, 2048]


def over_graph(way: str) -> list[float]:
    """The time of a step on two H100s that is done so, over that of the step in a graph."""
    return [at("sp_2xh100", f"{model}, {way}") / at("sp_2xh100", f"{model}, in a graph") for model in SP_MODELS]


def by_host() -> list[float]:
    """How many times as long as in a graph steps of sequence parallelism take that are left to their hosts."""
    parts = ("rows", "again/rows")
    return [at("sp_2xh100", f"{model}, {way}", part=part) / at("sp_2xh100", f"{model}, in a graph", part=part)
            for part in parts for model in SP_MODELS for way in ("one by one", "as one")]


def as_one(models: Sequence[str]) -> list[float]:
    """The time of a step with samples gathered as one, over that with samples one by one, on two hosts."""
    return [at("sp_2xh100", f"{model}, as one", part=part) / at("sp_2xh100", f"{model}, one by one", part=part)
            for part in ("rows", "again/rows") for model in models]


def cp(case: str, field: str = "efficiency", gpus: int = 4) -> float:
    return at("cp_h200", case, field, gpus=gpus)


CP_WAYS = ("gather", "ring", "all_to_all")
CP_CASES = [f"{length} {mask}" for length in ("16k", "32k", "64k") for mask in ("causal", "full")]


def attention(shape: list[int], backend: str) -> float:
    """TFLOP/s of attention, forward and backward."""
    row, = (row for row in results("beginning_h200")["attention"] if row["shape"] == shape)
    return row[backend]


def lost(case: str) -> float:
    """Percent of four GPUs' time that a pipeline loses."""
    return percent(at("pp_h200", "one GPU", gpus=1), 4 * at("pp_h200", case, gpus=4))


def zero(case: str, field: str = "ms") -> float:
    return at("zero_h200", case, field, gpus=4)


@cache
def ours(*exercises: str) -> dict[str, Any]:
    """What the answers to these exercises of lesson 17, and its cells with rates, define."""
    text = next(ROOT.glob("solutions/17_*.py")).read_text()
    space: dict[str, Any] = {"Run": recorded_runs.Run, "Rates": recorded_runs.Rates, "Sequence": Sequence, "h200": H200}
    for name in exercises:
        exec(text.partition(f'# %% exercise="{name}"\n')[2].partition("\n# %%")[0], space)
    for rates in (r"^told = \{.*?\}$", r"^sheet = .*?\)$", r"^half = .*?\)"):
        exec(re.search(rates, text, re.MULTILINE | re.DOTALL)[0], space)     # type: ignore[index]
    return space


H200 = hardware.load("h200")
ANSWERS = ("block-flops", "activation-bytes", "all-reduce-seconds", "pipeline-seconds", "step-seconds")
FAST = ["compile=true", "stream=narrow"]


def off(run: str, rates: str) -> float:
    """Of lesson 17's own model with these of its rates: the error of a run."""
    space = ours(*ANSWERS)
    chosen = space[rates][run] if rates == "told" else space[rates]
    return 1e3 * space["step_seconds"](recorded_runs.runs()[run], chosen) / recorded_runs.recorded_run_steps()[run].ms - 1


def ring_error(megabytes: int) -> float:
    """Of lesson 17's own all-reduce over four H200s."""
    measured = 1.5e6 * megabytes / (1e9 * bus(4, megabytes)[0])
    return ours(*ANSWERS)["all_reduce_seconds"](1e6 * megabytes, 4, 2e-6, 0.78 * 450e9) / measured - 1


def attention_of_table(heads: int, tokens: int, width: int) -> float:
    """TFLOP/s of cuDNN's attention, forward and backward, in the table of kernels, to tens."""
    seconds = 0.0
    for table in (results("kernels_h200")["attention"][way] for way in ("forward", "backward")):
        a, b, c = table["axes"]
        seconds += table["seconds"][(a.index(heads) * len(b) + b.index(tokens)) * len(c) + c.index(width)]
    return round(14 * heads * tokens**2 * width / seconds / 1e12, -1)


def short_runs() -> list[tuple[str, list[float]]]:
    """Large matmuls of the course's beginning, each a fraction of a second: their shapes, TFLOP/s in bf16 and FP8."""
    found = results("beginning_h200")["matmul"]
    return [(shape, rates) for shape, rates in found.items() if min(map(int, shape.split("x"))) > 1000]


def layers() -> list[float]:
    """TFLOP/s of bf16 products of layers of width 4096."""
    return [part["tflops"] for part in results("fp8_h200")["parts"] if part["case"].endswith(", bf16")]


@cache
def memory_errors() -> list[float]:
    """How far off the predicted memory of recorded models is, but for FP8's, from the best to the worst."""
    steps = [step for step in recorded_steps.one_gpu() if step.config.precision != "fp8"]
    return sorted(abs(memory.predict(step.config).allocated / 1e9 / step.memory_gb - 1) for step in steps)


@cache
def step_errors() -> list[float]:
    return sorted(step.error for step in recorded_steps.steps())


def multiplying(name: str) -> float:
    """The share of a recorded step in which it multiplies matrices, as predicted."""
    step = recorded_step(name)
    return step.time.matmul / step.time.step


def recorded_step(name: str) -> recorded_steps.Step:
    found, = (step for step in recorded_steps.steps() if step.name == name)
    return found


@cache
def guessed(group: str) -> list[float]:
    """Percent by which predictions of others' H100s are too fast if what is hidden costs a quarter of its time."""
    with mock.patch.object(block_time, "BESIDE", 0.25), mock.patch.object(step_time, "BESIDE", 0.25):
        return [100 * published_steps.error(case) for case in published_steps.CASES if case.group == f"{group}, H100"]


def held(number: int, gpus: int) -> list[float]:
    """The errors of a held-out list's predictions, as they were made, in percent."""
    return [100 * (row["predicted_ms"] / row["ms"] - 1) for row in results(f"heldout_{number}_h200")["rows"]
            if row["name"].startswith(f"{gpus}-")]


def half_off(errors: Sequence[float]) -> float:
    return statistics.median(map(abs, errors))


def held_today() -> list[float]:
    """The errors of today's predictions of the third list on two GPUs, in percent."""
    drawn = {row["name"]: row for row in heldout.listed("heldout_3")}
    return [100 * (1e3 * heldout.predicted(drawn[row["name"]], row["plain_step"]).step / row["ms"] - 1)
            for row in results("heldout_3_h200")["rows"] if row["name"].startswith("2-")]


def plain_steps() -> list[float]:
    """Milliseconds of hosts' small steps."""
    return [1e3 * row["plain_step"] for number in (3, 4) for row in results(f"heldout_{number}_h200")["rows"]]


def study(tp: int, pp: int, *more: str) -> float:
    """Predicted seconds of the DiT of 3 billion parameters on 16 H20s."""
    c = config.load("dit-3b", ["model.latent=[4,512,512]", "train.micro_batch=1", "train.global_batch=8", f"parallel.tp={tp}",
                               f"parallel.pp={pp}", "parallel.dp=1", "parallel.sp=true", *more])
    return step_time.predict(c, hardware.load("h20")).step


CHUNKS = ("parallel.schedule=interleaved", "parallel.chunks=5")


@cache
def planned(chip: str, gpus: int) -> Sequence[Any]:
    return search.find_layouts(config.load("gpt-7b", FAST), hardware.load(chip), gpus).layouts


def days(gpus: int) -> float:
    c = config.load("gpt-7b", FAST)
    return 134e9 / (c.train.global_batch * c.model.context) * planned("h100-80", 64)[0].time.step / 86400 * 64 / gpus


def slid(tp: int, zero: bool) -> float:
    """Samples/s of GPT 1.3B, batch 8, on eight H200s, as the sliders have it."""
    c = performance_model.config_of("GPT 1.3B", batch=8, micro_batch=8, sequence=performance_model.OWN, gpus=8, tp=tp, sp="no",
                                    cp=1, pp=1,
                               zero=zero, recompute="none", precision="bf16")
    return performance_model.time_of(c, H200, "step").samples_per_s


def left(recompute: str, tokens: int) -> float:
    """The share of one H200 that stays free of GPT 7B with one sample of so many tokens."""
    c = config.load("gpt-7b", [*FAST, "parallel.dp=1", f"train.recompute={recompute}", f"model.context={tokens}",
                               "train.global_batch=1", "train.micro_batch=0"])
    return 1 - memory.predict(c).total / H200.memory


def longest(recompute: str) -> int:
    return max(2**n for n in range(10, 18) if left(recompute, 2**n) >= performance_model.FREE)


def dit(rung: str, field: str = "ms") -> float:
    return at("dit_h200", rung, field)


BF16, BY_HAND = "bf16, compiled, narrow stream", "compiled, narrow stream, Triton kernels, in a graph"


def flash_costs(pixels: str) -> float:
    """Percent of images a second."""
    return percent(dit(f"{pixels}: {BF16}, flash attention", "samples_per_s"), dit(f"{pixels}: {BF16}", "samples_per_s"))


def gap(model: str, run: str, file: str = "alignment_h200") -> float:
    """Percent by which a run's losses are off from those of bf16."""
    return 100 * results(file)["models"][model]["gap"][run]


FP8 = ("fp8 delayed, 1024 max", "fp8 delayed, 1 most_recent", "fp8 current", "fp8 Transformer Engine")


def seeds(*models: str) -> list[float]:
    return [gap(model, f"bf16, seed {seed}") for model in models for seed in (1, 2)]


def spread(model: str) -> float:
    return 100 * results("alignment_h200")["models"][model]["spread"]


def frozen_gpt() -> float:
    """Percent by which GPT 1.3B with frozen scales is off."""
    runs = results("alignment_h100")["models"]["gpt-1.3b"]["runs"]
    frozen, same = (loss_alignment.windows(torch.tensor(runs[name]["losses"]), 25)
                    for name in (loss_alignment.FROZEN, loss_alignment.REFERENCE))
    return 100 * loss_alignment.gap(frozen, same)


def losses(step: int) -> dict[str, float]:
    return {name: run["losses"][step] for name, run in results("alignment_h200")["models"]["gpt-1.3b"]["runs"].items()}


def gelu(kernel: str) -> float:
    """Microseconds in DiT-XL's MLP."""
    return results("gelu_h200")["kernels_us"]["dit-xl"][f"backward: {kernel}"]


APART = "matmul, then GELU's gradient and the sum"


def gelu_step(how: str) -> float:
    return at("gelu_h200", f"256 px: bf16, {BY_HAND}", gelu=how)


def clock() -> float:
    """The lowest of DiT's steps at 256 pixels, MHz."""
    rows = [row for file in ("power_h200", "gelu_h200", "dit_h200") for row in results(file)["rows"]]
    return min(row["clock_mhz"] for row in rows if row["rung"].startswith("256 px: bf16") and "clock_mhz" in row)


def gains() -> list[float]:
    """Percent of products' time that their best algorithms save."""
    return [percent(row["chosen_us"], row["pytorch_us"]) for row in results("products_h100")["products"]]


def third_step() -> list[float]:
    """TB/s of the compiled scale-add."""
    return [row["gb_per_s"] / 1e3 for row in results("dit_fused_h200")["rows"] if row["case"] == "gate, add"]


def sent(case: str) -> tuple[float, float]:
    """GB that a V100 sends in a step of a case: activations over tp, gradients over dp."""
    dp, tp, _, batch, width, depth = map(int, re.split(r"[x_]", case))
    activations = 4 * depth * batch / dp * 2048 * width * 2 * 2 * (tp - 1) / tp
    return activations / 1e9, (12 * depth * width**2 + 50304 * width) / tp * 2 * 2 * (dp - 1) / dp / 1e9


WITH_TP, WITH_DP = "1x8x1_16_1536x16", "8x1x1_16_1536x16"


def links() -> float:
    """GB/s that carried data parallelism's gradients, if nothing hid them."""
    return sent(WITH_DP)[1] / (v100("8x1x1") - v100("1x1x1_2")) * 1e3


def grid(case: str, field: str = "ms", file: str = "grid_h200", part: str = "rows", by: str = "course") -> float:
    return at(file, case, field, part, by=by)


def v100(name: str, field: str = "ms") -> float:
    """What others published of a case on V100s."""
    case, = (case for case in CASES if case.name.startswith(name))
    return figures_gpt.tflops(case) if field == "tflops" else getattr(case, field)


EIGHT = [f"{layout}_16_1536x16" for layout in ("8x1x1", "4x2x1", "2x4x1", "1x8x1")]


def beside_megatron(file: str, cases: Sequence[str], ours: str = "course", theirs: str = "megatron-core",
                    part: str = "rows") -> list[float]:
    """Percent of the time of megatron-core's layers that ours take."""
    return [100 * grid(f"{case}, layers", "ms", file, part, ours) / grid(f"{case}, layers", "ms", file, part, theirs)
            for case in cases]


SMALLEST = ("1x1x1_2_1536x16", "1x1x1_8_768x12")
ON_TWO = ("1x2x1_16_1536x16", "1x2x1_16_3072x16", "1x2x1_16_3072x32", "1x2x1_8_1536x16", "1x2x1_4_1536x16", "1x2x1_8_2304x24")


def wide(file: str, part: str = "rows") -> list[float]:
    """By how much the slowest layers of width 3072 take longer than the fastest, of each case of a file."""
    where = results(file)[part] if part == "rows" else results(file)[part.split("/")[0]]["rows"]
    rows = [row for row in where if "3072x" in row["case"] and row["case"].endswith("layers")]
    times = [[row["ms"] for row in rows if row["case"] == case] for case in {row["case"] for row in rows}]
    return [max(ms) / min(ms) - 1 for ms in times]


def gpt(rung: str, field: str = "ms") -> float:
    return at("gpt_h200", rung, field)


GPT_LOGITS = 64 * 1024 * 50304                                  # of GPT 124M's batch
GPT124M = f"124M: {BF16}"

PAIR = 2 * 20 * 360 * 720 * 4                                   # bytes of a sample of the reference data
SHORT = "vit-short"                                             # the reference model


def ceiling(name: str) -> float:
    return results("ceilings_h200")["ceilings"][name] / 1e12


def short_tflops() -> float:
    """Model FLOPs of a step of the reference model, 10^12."""
    return flops.step(config.load(SHORT, []).model, 16) / 1e12


def vit(rung: str, field: str = "samples_per_s") -> float:
    return at("vit_h200", rung, field)


def loaders(*path: str) -> float:
    found: Any = results("loaders_h200")
    for key in path:
        found = found[key]
    return found


def fp8_faster(shape: str) -> float:
    """How many times as fast a short run of matmuls was in FP8 as in bf16."""
    bf16, fp8 = results("beginning_h200")["matmul"][shape]
    return fp8 / bf16


def renewed() -> dict[str, float]:
    """Percent by which small models in FP8 with renewed scales are off, on an H200."""
    gaps = results("curves_h200")["gap"]
    return {name: 100 * off for name, off in gaps.items() if name.startswith("TE") or name in (
        "native fp8, delayed", "native fp8, current")}


def layer_ms(*kinds: str) -> float:
    """Of the four linears of a layer of width 4096."""
    return sum(at("fp8_h200", f"{linear}: {kind}", part="parts") for linear in ("qkv", "out", "up", "down") for kind in kinds)


def products_ms(more: str = "") -> float:
    return layer_ms(*(f"{product}{more}" for product in ("y", "dx", "dW")))


def in_fp8(width: int) -> float:
    """The time of a layer's linears with their casts in FP8 over that in bf16, by lesson 04's arithmetic."""
    share, sixteen = width / 4096, products_ms(", bf16")
    return products_ms() / sixteen + (layer_ms("cast x", "cast dy") / share + layer_ms("cast W")) / sixteen


def break_even(casts: float = 1.0) -> float:
    """The width from which FP8 pays, by lesson 04's arithmetic."""
    gain = products_ms(", bf16") - products_ms() - casts * layer_ms("cast W")
    return 4096 * casts * layer_ms("cast x", "cast dy") / gain


def share_of_linears(width: int) -> float:
    """Percent of a layer's FLOPs, of 4050 tokens."""
    return 100 * 24 * width**2 / (24 * width**2 + 4 * 4050 * width)


def account(name: str) -> dict[str, Any]:
    return results("profile_h200")["accounts"][name]


def waiting(name: str) -> float:
    """The share of a profiled step in which the GPU waits for its host."""
    time = account(name)["time"]
    return (time["launch"] + time["idle"] + time["data"]) / sum(time.values())


BATCHES, RATES = (4, 8, 16, 32, 64, 128), (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016)


def run_of(batch: int, lr: float, warmup: int = 20, schedule: str = "constant") -> dict[str, Any]:
    found, = (run for run in results("convergence")["runs"]
              if (run["batch"], run["lr"], run["warmup"], run["schedule"]) == (batch, lr, warmup, schedule))
    return found


def samples_to(batch: int, lr: float, target: float = 0.12) -> float:
    """Samples after which a run's validation loss first reaches the target, by a straight line between two validations."""
    run = run_of(batch, lr)
    for before, now, high, low in zip(run["step"], run["step"][1:], run["valid_loss"], run["valid_loss"][1:], strict=False):
        if low is not None and low <= target:
            return batch * (before + (now - before) * (high - target) / (high - low))
    return math.inf


def fewest(batch: int) -> float:
    return min(samples_to(batch, lr) for lr in RATES)


def good_rates(batch: int) -> list[float]:
    """Those that need at most a tenth more samples than the best."""
    return [lr for lr in RATES if samples_to(batch, lr) <= 1.1 * fewest(batch)]


def power() -> float:
    """With which power of the batch the middle of the good rates grows."""
    middles = [math.log(min(good_rates(batch)) * max(good_rates(batch))) / 2 for batch in BATCHES]
    return statistics.linear_regression([math.log(batch) for batch in BATCHES], middles).slope


def squared_norm(lr: float) -> float:
    """The mean squared norm of batch 4's gradient where the loss is within 5% of 0.14."""
    run = run_of(4, lr)
    return statistics.mean(norm**2 for loss, norm in zip(run["valid_loss"], run["grad_norm"], strict=True)
                           if abs(loss / 0.14 - 1) < 0.05)


def step_of(batch: int) -> float:
    """Milliseconds of a step."""
    return 1e3 * batch / results("convergence")["speed"][str(batch)]


def to_target(batch: int) -> float:
    """Seconds to the target."""
    return fewest(batch) * step_of(batch) / batch / 1e3


def sooner(devices: int) -> float:
    """How many times sooner than one such devices reach the target, four samples on each."""
    return devices * fewest(4) / fewest(4 * devices)


def last_loss(batch: int, lr: float, warmup: int = 20, schedule: str = "constant") -> float:
    return run_of(batch, lr, warmup, schedule)["valid_loss"][-1]


def cosine_gain(batch: int) -> float:
    """By how many percent the best loss with a cosine is lower than the best without."""
    return percent(*(min(last_loss(batch, lr, 20, schedule) for lr in RATES[-5:]) for schedule in ("cosine", "constant")))


SENDS = {"tp": 20 * 16 * 4 * 2 * 3 / 4 * 4096 * 5120 * 2, "cp": 20 * 16 * 2 * 1 / 2 * 2 * 2 * 4096 * 5120 * 2 / 4,
         "pp": 16 * 2 * 4096 * 5120 * 2, "dp": 2 * 7 / 8 * 12 * 40 * 5120**2 / 8 * 2}       # lesson 09's bytes a step, by axis


def sending(**links: float) -> float:
    """Seconds of lesson 09's step, one axis after the other; those not named go over the network."""
    return sum(size / (1e9 * links.get(axis, 50.0)) for axis, size in SENDS.items())


def demo(who: str) -> float:
    """The error of u10 after six hours on the CPU of `make demo`."""
    return results("demo_cpu")["scores"]["rmse"][who][0][0]


def needs(size: str, zero: int, *kinds: str) -> float:
    """GB of a GPT on each of 8 ranks, in bf16, nothing recomputed."""
    found = figures_memory.footprint(size, "bf16", 8, zero, "none")
    return sum(found[kind] for kind in kinds or ("weights", "gradients", "optimizer states"))


def beside() -> list[float]:
    """Which shares of its time what was hidden cost six steps of data parallelism."""
    found = {step.name.removeprefix("dp 4: "): step for step in recorded_steps.data() if step.gpus == 4}
    shares = []
    for way, step in found.items():
        if way.startswith(("bucketed", "ddp")) and not way.startswith("ddp, compiled"):
            alone = found[f"none{', compiled' * ('compiled' in way)}, 25 MB"].ms
            seen = step.time.data - block_time.BESIDE * step.time.hidden
            shares.append(((step.ms - alone) / 1e3 - seen) / step.time.hidden)
    return shares


def uneven(*stages: float) -> float:
    """By how many percent lesson 17's pipeline of four stages takes longer than one of equal ones."""
    seconds = ours(*ANSWERS)["pipeline_seconds"]
    return 100 * (seconds(list(stages), 16, 1) / seconds([1, 1, 1, 1], 16, 1) - 1)


def young(save: float) -> tuple[float, float, float]:
    """Percent of the time that 16,384 GPUs lose by saving, by doing steps again and by restarts, at the best interval."""
    between = 54 * 86400 / 419
    interval = math.sqrt(2 * save * between)
    return 100 * save / interval, 100 * interval / 2 / between, 100 * 300 / between


# --- the lesson, the sentence, the numbers in it
SAID: list[tuple[str, str, Numbers]] = [
    # 00
    ("00", "and moves {:.1f} MB: {:.0f} FLOPs a byte", lambda: [3 * 4 * 1024**2 / 1e6, 2 * 1024**3 / (3 * 4 * 1024**2)]),
    # 01
    ("01", "the hint gives 6 × {:,} × 128 = {:.2f} × 10⁹ FLOPs a sample.",
     lambda: [parameters("vit-demo"), 6 * parameters("vit-demo") * 128 / 1e9]),
    ("01", "One of its steps is {:.0f} × 10¹² FLOPs", lambda: [short_tflops()]),
    ("01", "An H200 did {:.0f} TFLOP/s in TF32 matmuls", lambda: [ceiling("matmul tf32")]),
    ("01", "{:.0f} TFLOP/s over {:.0f} TFLOPs are {:.0f} steps, {:.0f} samples a second. It did {:.0f}, one in fourteen.",
     lambda: [ceiling("matmul tf32"), short_tflops(), ceiling("matmul tf32") / short_tflops(),
              16 * ceiling("matmul tf32") / short_tflops(), vit("tf32, read by the training process")]),
    ("01", "the baseline uses **{:.0f}%** of it.", lambda: [100 * vit("tf32, read by the training process", "mfu")]),
    # 03
    ("03", "{:.0f} MB a sample is much", lambda: [PAIR / 1e6]),
    ("03", "10 years of this data are {:.0f} GB", lambda: [round(10 * 365 * 4 * PAIR / 2e9, -1)]),
    ("03", "12 passes in all, {:.1f} GB for a pair of {:.0f} MB.", lambda: [12 * PAIR / 1e9, PAIR / 1e6]),
    ("03", "{:.0f} GB/s, a good part of what", lambda: [180 * 12 * PAIR / 1e9]),
    ("03", "and a read by the GPU: {:.0f} GB/s.", lambda: [180 * 3 * PAIR / 1e9]),
    ("03", "A batch of 16 pairs is {:.1f} GB", lambda: [16 * PAIR / 1e9]),
    ("03", "which is {:.0f} GB for 16 workers.", lambda: [16 * 2 * 16 * PAIR / 1e9]),
    # 04
    ("04", "with bf16 {:.0f} samples a second, and with TF32 {:.0f}, there with",
     lambda: [vit("bf16, on the device"), vit("tf32, on the device")]),
    ("04", "with TF32 {:.0f}, there with", lambda: [vit("tf32, 8 loader processes")]),
    ("04", "FP8 is off by {:.0f} to {:.0f}%, farthest", lambda: [min(renewed().values()), max(renewed().values())]),
    ("04", "one of 64,800 × 384 × 1536 was {:.1f} times as fast in FP8 as in bf16; large ones are {:.1f} times as fast.",
     lambda: [fp8_faster("64800x384x1536"), fp8_faster("8192x8192x8192")]),
    ("04", "the linears' share is {:.0f}% at width 384, and {:.0f}% at a width of 1024.",
     lambda: [share_of_linears(384), share_of_linears(1024)]),
    # 05
    ("05", "Compiled you have met it before, at {:.0f} samples a second.", lambda: [vit("bf16, compiled")]),
    ("05", "does {:.0f} TFLOP/s with this model's heads (forward and backward); FlashAttention-2, `attention=flash`, "
     "does {:.0f}.",
     lambda: [attention([16, 8, 4050, 48], backend) for backend in ("cudnn", "flash")]),
    ("05", "Two thirds of the step take {:.0f}/{:.0f} as long: {:.0f}% more by this arithmetic, {:.0f}% when it was measured",
     lambda: [*(attention([16, 8, 4050, 48], backend) for backend in ("cudnn", "flash")),
              200 / 3 * (attention([16, 8, 4050, 48], "cudnn") / attention([16, 8, 4050, 48], "flash") - 1),
              -percent(vit("bf16, compiled, flash attention", "ms"), vit("bf16, compiled", "ms"))]),
    ("05", "How many of {} kernels are left when it is compiled", lambda: [vit("one sample: eager", "kernels")]),
    # 06
    ("06", "it ran the {} of lesson 05.)", lambda: [vit("one sample: eager", "kernels")]),
    # 07
    ("07", "The model of `vit-demo` has {:,} parameters, {:.2f} MB in float32.",
     lambda: [parameters("vit-demo"), 4e-6 * parameters("vit-demo")]),
    ("07", "With 64 ranks that is {:.0f} MB while 63 networks lie idle.", lambda: [63 * 4e-6 * parameters("vit-demo")]),
    ("07", "How many bytes does each of four ranks send for the {:.2f} MB?", lambda: [4e-6 * parameters("vit-demo")]),
    ("07", "the bus bandwidth was {:.0f} GB/s for 1 MB, {:.0f} for 25 MB, {:.0f} for 134 MB and {:.0f} for 512 MB",
     lambda: bus(4, 1, 25, 134, 512)),
    ("07", "how long would it have taken at {:.0f} GB/s?", lambda: bus(4, 512)),
    ("07", "1.5 MB / {:.0f} GB/s = {:.0f} microseconds instead of {:.0f}.",
     lambda: [bus(4, 1)[0], 1.5e3 / bus(4, 1)[0], 1.5e3 / bus(4, 512)[0]]),
    ("07", "In that time an all-reduce of {:.0f} MB more would be done.",
     lambda: [(1 / bus(4, 1)[0] - 1 / bus(4, 512)[0]) * bus(4, 512)[0]]),
    ("07", "a stack of 24 transformer blocks of width 1024, {:.0f} million parameters, as in GPT 350M. Their gradients "
     "are {:.1f} GB",
     lambda: [STACK / 1e6, 4 * STACK / 1e9]),
    ("07", "At {:.0f} GB/s (NVLink), which bucket is best", lambda: bus(4, 512)),
    ("07", "it exposes the whole {:.1f} ms", lambda: [1e3 * stack_seconds(bus(4, 512)[0])]),
    ("07", "At 12.5 GB/s all the all-reduces take {:.0f} ms", lambda: [1e3 * stack_seconds(12.5)]),
    ("07", "All links carry {:.0f} GB/s.", lambda: bus(4, 512)),
    ("07", "from the time of one, {:.0f} ms, and from what you know", lambda: [dp("none", 1)]),
    ("07", "What `naive` takes beyond it, {:.0f} ms, is the whole communication: {:.1f} ms at the full bandwidth",
     lambda: [dp("naive") - dp("none"), 1e3 * stack_seconds(bus(4, 512)[0])]),
    ("07", "even the best buckets leave {:.0f} ms exposed.", lambda: [min(exposed(size, 12.5) for size in (400, 100, 25, 5, 1))]),
    ("07", "(Matrices here are up to {:.0f} MB", lambda: [4 * 4 * 1024**2 / 1e6]),
    ("07", "that holds what is left over: {:.0f} MB in the one case and {:.0f} in the other.",
     lambda: [last_bucket(100), last_bucket(400)]),
    # 08
    ("08", "real runs, {} of them", lambda: [len(results("convergence")["runs"])]),
    ("08", "Each was validated {} times", lambda: [len(run_of(4, 0.001)["step"])]),
    # 09
    ("09", "| NVLink, all-reduce of 512 MB over 4 H200s | {:.0f} GB/s |", lambda: bus(4, 512)),
    ("09", "a GPT of 40 layers of width 5120, {:.1f} billion parameters", lambda: [12 * 40 * 5120**2 / 1e9]),
    ("09", "takes {:.1f} s.", lambda: [6 * 12 * 40 * 5120**2 * 8192 * 16 * 4 / 64 / 400e12]),
    ("09", "tensor parallelism sends {:.0f} GB", lambda: [SENDS["tp"] / 1e9]),
    ("09", "`tp` on the network alone takes {:.1f} s", lambda: [SENDS["tp"] / 50e9]),
    # 10
    ("10", "forward and backward in bf16, takes {:.0f} ms on one H200.", lambda: [tp("one GPU", 1)]),
    ("10", "× 2 bytes = {:.0f} MB, and an all-reduce of that size runs at {:.0f} GB/s over 2 GPUs and at {:.0f} GB/s over 4",
     lambda: [4 * 4096 * 4096 * 2 / 1e6, *bus(2, 134), *bus(4, 134)]),
    ("10", "{:.0f} and {:.0f} ms by arithmetic, {:.0f} and {:.0f} recorded.",
     lambda: [*(tp("one GPU", 1) / n + tp_sent(n) for n in (2, 4)), *(tp("DTensor sequence parallel", n) for n in (2, 4))]),
    ("10", "compiled it takes {:.0f}, as you will see, and this library's plain tensor parallelism {:.0f}.",
     lambda: [tp("DTensor sequence parallel, compiled", 4), tp("plain", 4)]),
    ("10", "saves memory ({:.1f} GB become {:.1f} on 4 GPUs), not time.",
     lambda: [tp("plain", 4, "memory_gb"), tp("sequence", 4, "memory_gb")]),
    ("10", "takes {:.0f} ms less than that on 2 GPUs, and {:.0f} if both are compiled; on 4, compiled, nothing.",
     lambda: [tp("sequence", 2) - tp("overlap", 2), tp("sequence, compiled", 2) - tp("overlap, compiled", 2)]),
    ("10", "takes {:.0f} ms on 4 GPUs, where plain tensor parallelism takes {:.0f}, and {:.0f} on 2, where that takes {:.0f}.",
     lambda: [tp(case, gpus) for gpus in (4, 2) for case in ("symmetric", "plain")]),
    ("10", "32 samples of {:.1f} MB, the whole step in a CUDA graph",
     lambda: [at("sp_2xh100", f"{DIT}, in a graph", "sample_mb")]),
    ("10", "In two parts it takes {:.1f} ms.", lambda: [at("sp_2xh100", f"{DIT}, in two parts, in a graph")]),
    ("10", "which need {:.1f} to {:.1f} times as long as the GPU", lambda: [min(by_host()), max(by_host())]),
    ("10", "samples of up to {:.1f} MB are mostly faster as one",
     lambda: [at("sp_2xh100", f"{SP_MODELS[3]}, as one", "sample_mb")]),
    ("10", "For samples of {:.1f} MB the results are mixed",
     lambda: [at("sp_2xh100", f"{GPT1B}, as one", "sample_mb")]),
    ("10", "the gather of that DiT's 32 samples takes {:.0f} µs, the multiplication beside which it is done backward {:.0f}.",
     lambda: [symmetric("gather, NCCL"), symmetric("matmul")]),
    ("10", "{:.0f}, the sum of both.", lambda: [symmetric("matmul beside gather, NCCL")]),
    ("10", "without a graph, cost {:.0f}% of their time.", lambda: [100 * block_time.BESIDE]),
    ("10", "An engine's gather takes {:.0f} µs, and adds {:.0f} to the multiplication beside it.",
     lambda: [symmetric("gather, through memory, by an engine"),
              symmetric("matmul beside gather, through memory") - symmetric("matmul")]),
    ("10", "by a kernel ({:.0f} µs) where nothing runs beside it", lambda: [symmetric("gather, through memory")]),
    ("10", "One barrier an exchange, {:.1f} µs, is enough.", lambda: [symmetric("barrier")]),
    ("10", "(By NCCL this DiT took {:.0f} ms above", lambda: [at("sp_2xh100", f"{DIT}, in a graph")]),
    ("10", "that DiT takes {:.1f} ms without.", lambda: [symmetric_step(DIT, NO_SP)]),
    ("10", "the DiT takes {:.0f}% longer than with none, the GPT of 1.3 billion {:.0f}% less, in {:.0f} and {:.0f}% less memory",
     lambda: [-percent(sp(DIT, MEMORY), sp(DIT, NO_SP)), percent(sp(GPT1B, MEMORY), sp(GPT1B, NO_SP)),
              *(percent(sp(model, MEMORY, 4, "memory_gb"), sp(model, NO_SP, 4, "memory_gb")) for model in (DIT, GPT1B))]),
    ("10", "this DiT's multiplications of {:.0f} µs are too short now to hide a gather of {:.0f}; those of the GPT take "
     "{:.0f}, and hide most of one of {:.0f}",
     lambda: [exchange(case, size) for size in (OF_DIT, OF_GPT1B) for case in ("matmul", "gather, through memory")]),
    ("10", "it takes {:.0f} to {:.0f}% less time than none.)",
     lambda: [pick(percent(sp(model, MEMORY, 2), sp(model, NO_SP, 2)) for model in SP_MODELS) for pick in (min, max)]),
    ("10", "(It needs {:.1f} GB more than the table says", lambda: [2 * 2 * 4 * 4096 * 4096 * 2 / 1e9]),
    # 11
    ("11", "n / (2 n − 1), so almost half of the machine waits. On 8 GPUs this rule says {:.0f}%, and",
     lambda: [100 * 8 / 15]),
    ("11", "This library's ring is {:.0f}% efficient at 16,384 tokens and {:.0f}% at 65,536.",
     lambda: [100 * cp("16k full ring"), 100 * cp("64k full ring")]),
    ("11", "the plain gather wins, {:.0f}% and {:.0f}%.", lambda: [100 * cp("16k full gather"), 100 * cp("64k full gather")]),
    ("11", "it is {:.0f}% efficient at 64k tokens, the ring {:.0f}%.",
     lambda: [100 * cp("64k causal gather"), 100 * cp("64k causal ring")]),
    # 12
    ("12", "here 3 / 11 = {:.0f}%.", lambda: [100 * schedules.bubble(4, 8)]),
    ("12", "in theory 3 / 19 = {:.0f}%, and seen it is farther above", lambda: [100 * schedules.bubble(4, 8, 2)]),
    ("12", "{:.0f}% idle against {:.0f}%, and {:.0f}% for the other two.",
     lambda: [100 * schedules.bubble(8, 8, v) for v in (4, 2, 1)]),
    ("12", "In theory 3 / 19 = {:.1f}% and 3 / 35 = {:.1f}%.", lambda: [100 * schedules.bubble(4, 16, v) for v in (1, 2)]),
    ("12", "Without messages both take {:.0f} forward passes.", lambda: [pipeline_takes("gpipe", 0)]),
    ("12", "Without messages both take {:.0f} forward passes.", lambda: [pipeline_takes("1f1b", 0)]),
    ("12", "2·(p − 1) messages in a step, {:.0f} here", lambda: [pipeline_takes("gpipe", 1) - pipeline_takes("gpipe", 0)]),
    ("12", "1F1B waits for {:.0f}.", lambda: [pipeline_takes("1f1b", 1) - pipeline_takes("1f1b", 0)]),
    ("12", "about {:.0f} ms: a third of {:.0f} ms over 64.", lambda: [
        at("pp_h200", "one GPU", gpus=1) / 64 / 3, at("pp_h200", "one GPU", gpus=1)]),
    ("12", "an activation of {:.0f} MB takes {:.1f} ms at 350 GB/s.", lambda: [2e-6 * 4096**2, 2e3 * 4096**2 / 350e9]),
    ("12", "GPipe and 1F1B lose {:.1f} and {:.1f}%", lambda: [lost("gpipe"), lost("1f1b")]),
    ("12", "Interleaving loses {:.0f}%", lambda: [lost("interleaved")]),
    ("12", "with two chunks the last rank keeps {:.1f}, with four {:.2f}.",
     lambda: [schedules.alive(schedules.interleaved(8, 7, 8, v)) / v for v in (2, 4)]),
    # 13
    ("13", "Bars of {:g}, {:g}, {:g} and {:g} GB for the stages 0 to 3.",
     lambda: [7 * (shared + kept / 8) for shared, kept in ((16, 0), (8, 8), (4, 12), (0, 16))]),
    ("13", "stage 0 barely: its {:.0f} GB leave little for activations.", lambda: [7 * 16]),
    ("13", "and a step that takes {:.0f}% less time than DDP's. Without the 16-bit copies of the section above it "
     "takes {:.0f}% more.",
     lambda: [percent(zero("ZeRO-1, 16-bit copies"), zero("ddp")), -percent(zero("ZeRO-1"), zero("ddp"))]),
    ("13", "12.6 billion need {:.0f} GB, plus activations. ZeRO-1 over 8 ranks brings that to {:.0f} GB, and with {:.0f} GB",
     lambda: [needs("13 B", 0), needs("13 B", 1), needs("13 B", 0, "activations")]),
    ("13", "weights and gradients in bf16 alone are {:.0f} GB", lambda: [needs("70 B", 0, "weights", "gradients")]),
    ("13", "ZeRO-3 over 8 needs {:.0f} GB", lambda: [needs("70 B", 3)]),
    # 14
    ("14", "One tensor of {:.0f} GB, as much as eight of the twelve blocks keep.", lambda: [4e-9 * GPT_LOGITS]),
    ("14", "`1x1x1_2_1536x16`: {:.0f} ms, {:,.0f} MiB.", lambda: [v100("1x1x1_2_1536x16"), v100("1x1x1_2_1536x16", "mib")]),
    ("14", "Milliseconds: {:.0f} on one GPU, {:.0f} for 8x1x1, then {:.0f}, {:.0f} and {:.0f} as tp grows. "
     "MiB: {:.0f}, {:.0f}, {:.0f}, {:.0f}, {:.0f}. TFLOP/s of a GPU: {:.0f}, {:.0f}, {:.0f}, {:.0f}, {:.0f}",
     lambda: [v100(name, field) for field in ("ms", "mib", "tflops") for name in ("1x1x1_2_1536x16", *EIGHT)]),
    ("14", "tensor parallelism costs {:.0f}% more.", lambda: [-percent(v100("1x8x1"), v100("8x1x1"))]),
    ("14", "Data parallelism took {:.0f} ms more than one GPU did", lambda: [v100("8x1x1") - v100("1x1x1_2")]),
    ("14", "most of the {:.0f} ms that 1x8x1 took more", lambda: [v100("1x8x1") - v100("1x1x1_2")]),
    ("14", "1x8x1 took {:.0f} ms at width 1536.", lambda: [v100("1x8x1")]),
    ("14", "TFLOP/s of a GPU: {:.0f} for 1x8x1, {:.0f} and {:.0f} with dp over nodes, but {:.0f} and {:.0f} where",
     lambda: [v100(name, "tflops") for name in ("1x8x1", "2x8x1", "4x8x1", "1x16x1", "1x32x1")]),
    ("14", "A cliff: {:.0f} ms, {:.1f} TFLOP/s of a GPU where there were {:.0f}.",
     lambda: [v100("1x16x1"), v100("1x16x1", "tflops"), v100("1x8x1", "tflops")]),
    ("14", "yet one takes {:.0f}% longer.", lambda: [-percent(v100("1x8x4"), v100("2x8x2"))]),
    ("14", "and the iterations, {:.1f} and {:.1f} s, are {:.1f} s",
     lambda: [v100("1x8x4") / 1e3, v100("2x8x2") / 1e3, (v100("1x8x4") - v100("2x8x2")) / 1e3]),
    ("14", "(lesson 07): {:.0f} and {:.0f} ms.", lambda: [v100("16x1x1"), v100("32x1x1")]),
    ("14", "On eight V100s 1x8x1 took {:.0f}% longer than 8x1x1.", lambda: [-percent(v100("1x8x1"), v100("8x1x1"))]),
    ("14", "takes the rate from {:.0f} to {:.0f} TFLOP/s",
     lambda: [grid("1x1x1_16_1536x16", "tflops"), grid("1x1x1_2_1536x16", "tflops")]),
    ("14", "beside it one H200 alone comes to {:.0f}. The rest, down to {:.0f}, is what data parallelism adds",
     lambda: [grid("1x1x1_2_1536x16", "tflops", part="again/rows"), grid("2x1x1_4_1536x16", "tflops", "grid_2xh200")]),
    ("14", "the smallest take {:.0f}% to {:.0f}% of the time of megatron-core's, and beside the slow host {:.0f}% to {:.0f}%.",
     lambda: [pick(beside_megatron("grid_h200", SMALLEST, part=part)) for part in ("rows", "again/rows") for pick in (min, max)]),
    ("14", "our two smallest take {:.0f}% and {:.0f}% of the time of megatron-core's.",
     lambda: beside_megatron("grid_2xh200", ("1x2x1_4_1536x16", "1x2x1_8_1536x16"))),
    ("14", "and ours, sequence parallel as well, take {:.0f}% to {:.0f}% of their time.",
     lambda: [pick(beside_megatron("grid_2xh200", ON_TWO, "course, sequence parallel", "megatron-core, Transformer Engine"))
              for pick in (min, max)]),
    ("14", "At width 1536, 16 layers, ours took {:.0f} ms", lambda: [grid("1x2x1_16_1536x16, layers", file="grid_2xh200")]),
    ("14", "the same layers take *longer*, {:.0f} ms, and with half as many samples only a fourth less, {:.0f}.",
     lambda: [grid(f"1x4x1_{samples}_1536x16, layers", file="grid_4xh200", by="course, sequence parallel")
              for samples in (16, 8)]),
    ("14", "leave it out, {:.0f} and {:.0f} ms, as long as the memory allows.",
     lambda: [grid(f"1x4x1_{samples}_1536x16, layers", file="grid_4xh200") for samples in (16, 8)]),
    ("14", "Chunks save {:.1f} GB: all logits and their gradient, {:.1f} GB each in 16 bits",
     lambda: [gpt(f"{GPT124M}, all logits", "memory_gb") - gpt(GPT124M, "memory_gb"), 2e-9 * GPT_LOGITS]),
    ("14", "And chunks are {:.0f}% *faster*.", lambda: [percent(gpt(GPT124M), gpt(f"{GPT124M}, all logits"))]),
    ("14", "is {:.0f}% slower than ours by the same compiler, and takes {:.0f} GB more.",
     lambda: [percent(gpt("124M: Hugging Face's GPT-2, bf16, compiled", "tokens_per_s"), gpt(GPT124M, "tokens_per_s")),
              gpt("124M: Hugging Face's GPT-2, bf16, compiled", "memory_gb") - gpt(GPT124M, "memory_gb")]),
    ("14", "{:.0f}% of the peak with 124M, {:.0f}% with 1.3B; with Triton kernels {:.0f}% and {:.0f}%.",
     lambda: [100 * gpt(f"{model}: bf16, {way}", "mfu") for way in ("compiled, narrow stream", BY_HAND)
              for model in ("124M", "1.3B")]),
    ("14", "{:.1f} GB against {:.1f}. Data parallelism took", lambda: [sent(WITH_TP)[0], sent(WITH_DP)[1]]),
    ("14", "the links carried {:.0f} GB/s, and less if something did. So {:.1f} GB take at least {:.0f} ms, and {:.0f} ms if",
     lambda: [links(), sent(WITH_TP)[0], 1e3 * sent(WITH_TP)[0] / links(), 1.5e3 * sent(WITH_TP)[0] / links()]),
    ("14", "That is {:.0f} MB a block, {:.0f} GB a sample with 16 blocks.",
     lambda: [(34 * 2048 * 1536 + 5 * 16 * 2048**2) * size for size in (1e-6, 16e-9)]),
    ("14", "At its full rate they would take {:.0f} s, or {:.0f} s with those of the recomputed blocks.",
     lambda: [factor * sent("1x16x1_16_3072x16")[0] / 12.5 for factor in (1, 1.5)]),
    ("14", "it sends {:.0f}% of the bytes that the other two do.",
     lambda: [100 * sent("2x4x4_512_2304x24")[0] / sent("1x8x4_512_2304x24")[0]]),
    ("14", "{:.0f} MB, from 8 GPUs, 32 times, in two directions: {:.0f} GB, {:.1f} s at 100 Gb/s.",
     lambda: [16 * 2048 * 2304 * 2e-6 * factor for factor in (1, 0.512, 0.512 / 12.5)]),
    ("14", "{:.1f} GB at 12.5 GB/s are {:.0f} ms, which nothing hid.",
     lambda: [sent("16x1x1_32_1536x16")[1], round(1e3 * sent("16x1x1_32_1536x16")[1] / 12.5, -1)]),
    # 15
    ("15", "they are off by {:.0f}% on 256 pixels, by {:.0f}% on 512.",
     lambda: [round(gap(model, "fp8 frozen scales"), -1) for model in ("dit-xl", "dit-xl-512")]),
    ("15", "makes {:.2f}%; FP8 {:.1f} to {:.1f}%; other seeds more than 1%.",
     lambda: [gap("gpt-1.3b", "bf16, flash attention"), *(pick(gap("gpt-1.3b", run) for run in FP8) for pick in (min, max))]),
    ("15", "rounding alone makes {:.1f}%. With 16 images a step (512 pixels) it makes {:.1f}%, and the seeds spread by {:.0f}%",
     lambda: [gap("dit-xl", "bf16, flash attention"), gap("dit-xl-512", "bf16, flash attention"), spread("dit-xl-512")]),
    ("15", "GPT's {:.2f}% is no more than another attention kernel makes. DiT's {:.0f}% is more than the {:.1f}% of another",
     lambda: [*(gap(model, "bf16, cp=2", "alignment_cp_h200") for model in ("gpt-1.3b", "dit-xl")),
              gap("dit-xl", "bf16, flash attention")]),
    ("15", "Transformer Engine's second loss is {:.2f}, all others' is {:.1f}.",
     lambda: [losses(1)["fp8 Transformer Engine"], losses(1)["bf16, seed 0"]]),
    ("15", "is {:.2f} times as fast as bf16 at 256 pixels and {:.2f} times at 512",
     lambda: [dit(f"{pixels}: {BF16}") / dit(f"{pixels}: fp8, compiled, narrow stream") for pixels in ("256 px", "512 px")]),
    ("15", "its {:,.0f} kernels a step", lambda: [round(dit("256 px: fp8 by Transformer Engine", "kernels"), -2)]),
    ("15", "Flash attention costs {:.0f}% at 256 tokens and {:.0f}% at 1024. And the average of the weights, a kernel more over "
     "all parameters, is {:.0f}%.",
     lambda: [flash_costs("256 px"), flash_costs("512 px"),
              percent(dit(f"256 px: {BF16}, no moving average"), dit(f"256 px: {BF16}"))]),
    ("15", "The third step compiled reaches {:.1f} to {:.1f}, near the {:.1f} of a copy on this GPU",
     lambda: [min(third_step()), max(third_step()), results("ceilings_h200")["ceilings"]["copy"] / 1e12]),
    ("15", "A step of DiT-XL/2 at 256 pixels took {:.0f} ms with the compiler's kernels.",
     lambda: [at("gelu_h200", f"256 px: bf16, {BY_HAND}", "compilers_ms", "before")]),
    ("15", "that matmul alone takes {:.0f} us, and with GELU's gradient and the sum in a kernel after it {:.0f} us. What is left "
     "of these {:.0f} us", lambda: [gelu("matmul alone"), gelu(APART), gelu(APART) - gelu("matmul alone")]),
    ("15", "a kernel of {:.0f} us for the sum, a step of {:.0f} ms, with 28 blocks, was shorter by {:.1f} ms",
     lambda: [gelu("sum over tokens"), gelu_step("apart"), gelu_step("apart") - gelu_step("in the matmul")]),
    ("15", "FP8 gains more now than the {:.2f} times from before", lambda: [
        dit(f"256 px: {BF16}") / dit("256 px: fp8, compiled, narrow stream")]),
    ("15", "An MFU of {:.0f}% in bf16", lambda: [100 * dit(f"256 px: bf16, {BY_HAND}", "mfu")]),
    ("15", "at {:.0f} MHz it would be a tenth less", lambda: [clock()]),
    ("15", "of {} products of GPT's and DiT's layers, each by itself, the best takes {:.0f}% less time than the one that the "
     "rule says, in the median, and {:.0f}% less at most", lambda: [len(gains()), statistics.median(gains()), max(gains())]),
    ("15", "DiT-XL's are {:.0f} to {:.0f}% apart above.", lambda: [pick(seeds("dit-xl", "dit-xl-512")) for pick in (min, max)]),
    ("15", "in the same notes, {:.1f}% at most above.", lambda: [gap("dit-xl-512", "bf16, flash attention")]),
    ("15", "Repeat one alone until the clock has settled, some 50 ms: then it draws the {:.0f} W",
     lambda: [at("power_h200", f"256 px: bf16, {BY_HAND}", "power_limit_w")]),
    # 16
    ("16", "A checkpoint of 70 billion parameters with Adam's states has {:.0f} GB.", lambda: [12 * 70]),
    # 17
    ("17", "GPT 350M with 32 × 1024 tokens needs {:.0f} TFLOPs a step.",
     lambda: [flops.step(config.load("gpt-350m", []).model, 32) / 1e12]),
    ("17", "At the peak that would take {:.0f} ms.",
     lambda: [1e3 * flops.step(config.load("gpt-350m", []).model, 32) / H200.peak("bf16")]),
    ("17", "takes {:.0f} seconds, of which linear maps in the block take {:.0f}.",
     lambda: [by_hand(), 2 * ours(*ANSWERS)["block_flops"](1, 1, 1, 1, False)[0]]),
    ("17", "With `tp=2` it takes {:.0f},", lambda: [by_hand(tp=2)]),
    ("17", "depth=2, micros=2`, on the other hand, it takes {:.0f}.", lambda: [by_hand(pp=2, depth=2, micros=2)]),
    ("17", "so an H20 has {:.0f} of them, and an H100 \"with 80 GB\" has {:.1f}.)",
     lambda: [hardware.load("h20").memory / 1e9, hardware.load("h100-80").memory / 1e9]),
    ("17", "{:,.0f} tokens: 72·D² = 7·T·D", lambda: [round(72 * 2048 / 7, -3)]),
    ("17", "{:.0f} and {:.0f} TFLOP/s up to 1024, then {:.0f}, {:.0f} and {:.0f}",
     lambda: [results("ceilings_h200")["matmul"][str(size)] / 1e12 for size in (512, 1024, 2048, 4096, 8192)]),
    ("17", "{:.0f} to {:.0f} TFLOP/s for the shapes of a real layer, {:.0f}% of the peak.",
     lambda: [round(min(layers()), -1), round(max(layers()), -1), statistics.mean(layers()) / 9.89]),
    ("17", "cuDNN's kernel reaches {:.0f} TFLOP/s with heads of 128 and many tokens, {:.0f} with heads of 64;",
     lambda: [attention_of_table(256, 16384, width) for width in (128, 64)]),
    ("17", "{:.0f} at 2048 tokens and, by the library's rule, {:.0f} at 4096.",
     lambda: [round(attention([8, 16, 2048, 128], "cudnn"), -1),
              round(989 * kernel_efficiency.attention_share(4096, 128, True), -1)]),
    ("17", "{:.1f} times, not 8: by tp = 8", lambda: [ours(*ANSWERS)["activation_bytes"](1, 1, 4, 8, False)
                                                     / ours(*ANSWERS)["activation_bytes"](1, 1, 4, 8, True)]),
    ("17", "All points but one lie within {:.0f} percent", lambda: [100 * memory_errors()[-2]]),
    ("17", "Within {:.0f}%, all but one", lambda: [100 * memory_errors()[-2]]),
    ("17", "{:.0f} GB/s for 1 MB, {:.0f} for 25 MB, {:.0f} for 134 MB, {:.0f} for 512 MB.", lambda: bus(4, 1, 25, 134, 512)),
    ("17", "Take 2 µs a step and {:.0f}% of the data sheet", lambda: [100 * collectives.REACHED]),
    ("17", "The smallest: {:.0f}% too short. From the call to the first byte {:.0f} µs pass once",
     lambda: [-100 * ring_error(1), 1e6 * collectives.CALL]),
    ("17", "An all-reduce takes {:.1f} ms.",
     lambda: [1e3 * collectives.all_reduce(25e6, collectives.group_of([(1, 16384)], H200))]),
    ("17", "{:.0f} ms: 14,336 steps within nodes",
     lambda: [1e3 * collectives.reduce_scatter(25e6, collectives.group_of([(1, 16384)], H200))]),
    ("17", "Without any communication a step takes {:.1f} ms; with one all-reduce of all gradients after it "
     "(\"naive\") {:.1f} ms.",
     lambda: [dp("none, compiled"), dp("naive, compiled")]),
    ("17", "{:.1f}: hidden is not free. Of {:.1f} ms the buckets hide only {:.1f}.",
     lambda: [dp("bucketed, compiled", 4, 100.0), dp("naive, compiled") - dp("none, compiled"),
              dp("naive, compiled") - dp("bucketed, compiled", 4, 100.0)]),
    ("17", "Now it lets what is hidden cost {:.0f}% of its time", lambda: [100 * block_time.BESIDE]),
    ("17", "An activation is {:.0f} MB on one GPU, {:.0f} MB with tensor parallelism, of which two GPUs' links carry {:.0f} "
     "GB/s, and {:.0f} MB in the pipeline.",
     lambda: [8 * 2048 * 2048 * 2e-6, 4 * 4096 * 4096 * 2e-6, *bus(2, 134), 4096 * 4096 * 2e-6]),
    ("17", "{:.0f}% too long for the pipeline: seven lines", lambda: [100 * off("pipeline", "told")]),
    ("17", "still {:.0f}% too long for the third.", lambda: [100 * recorded_runs.recorded_run_steps()["pipeline"].error]),
    ("17", "a median of about {:.1f}%", lambda: [100 * half_off(step_errors())]),
    ("17", "The median error of time was {:.1f}% above.", lambda: [100 * half_off(step_errors())]),
    ("17", "takes {:.0f} ms with communication overlapped where {:.0f} are predicted", lambda: [
        recorded_step("tp_vit 4: overlap, compiled").ms, 1e3 * recorded_step("tp_vit 4: overlap, compiled").time.step]),
    ("17", "Megatron-LM's three steps on H100s are up to {:.0f}% too fast, and torchtitan's {:.0f} to {:.0f}%.",
     lambda: [max(guessed("Megatron-LM")), min(guessed("torchtitan")), max(guessed("torchtitan"))]),
    ("17", "The model says {:.0f}%, all of it the bubble of 8 micro-batches", lambda: [100 * (study(4, 4) / study(8, 2) - 1)]),
    ("17", "The median error is {:.0f}%, not much more than the {:.1f}%",
     lambda: [half_off(held(3, 1) + held(3, 2)), 100 * half_off(step_errors())]),
    ("17", "all twelve are within {:.0f}%; on two the median is {:.0f}%",
     lambda: [max(map(abs, held(3, 1))), half_off(held(3, 2))]),
    ("17", "these eight are off by {:.0f}%.", lambda: [half_off(held_today())]),
    ("17", "Ten of twelve predictions are within {:.0f}%; two are a quarter too short, {:.0f}% at worst",
     lambda: [sorted(map(abs, held(4, 1)))[9], -min(held(4, 1))]),
    ("17", "Its eight for two GPUs were off by {:.0f}% in the median, {:.0f}% at worst, and its ten for four by {:.0f}%, {:.0f}% "
     "at worst", lambda: [half_off(held(4, 2)), -min(held(4, 2)), half_off(held(4, 4)), -min(held(4, 4))]),
    ("17", "that step took from {:.1f} to {:.1f} ms.", lambda: [min(plain_steps()), max(plain_steps())]),
    ("17", "A GPT in TF32 took {:.0f} GB instead of {:.0f}:", lambda: [
        at("heldout_h200", "1-04", "memory_gb"), *(memory.predict(config.load(row["preset"], row["settings"])).allocated / 1e9
                                                  for row in heldout.listed("heldout") if row["name"] == "1-04")]),
    ("17", "with that the step took {:.0f} ms instead of {:.0f}.", lambda: [
        at("heldout_h200", "2-01"), float(re.search(r"before that ([\d.]+)", results("heldout_h200")["note"])[1])]),
    ("17", "(3) {} tokens, then", lambda: [longest("none")]),
    ("17", "selective {:,}, full {:,} (twice that would leave {:.0f}% of the memory free",
     lambda: [longest("selective"), longest("full"), 100 * left("full", 2 * longest("full"))]),
    ("17", "With two blocks of the last rank given to the first two it is {:.0f}%.", lambda: [uneven(1.125, 1.125, 1, 1.05)]),
    ("17", "Of the same six here it was {:.0f}%", lambda: [100 * statistics.mean(beside())]),
    # 18
    ("18", "{:.1f}% saving, {:.1f}% doing again, {:.1f}% restarting.", lambda: young(30)),
    ("18", "makes {:.1f}% of each of the first two.", lambda: [young(3)[0]]),
]

# --- the lesson, the words, what they are about, and between which numbers that has to lie
WORDS: list[tuple[str, str, float, Callable[[], float], float]] = [
    # 00
    ("00", "whose balance is about 160", 155, lambda: ceiling("matmul bf16") / ceiling("copy"), 165),
    # 01
    ("01", "`make demo` takes 1200, and reaches almost a half.", 0.44, lambda: 1 - demo("model") / demo("persistence"), 0.5),
    ("01", "It did 17, one in fourteen.", 13.5, lambda: 16 * ceiling("matmul tf32") / short_tflops() / vit(
        "tf32, read by the training process"), 14.5),
    ("01", "Workers that read the data help by a third", 0.3, lambda: vit("tf32, 8 loader processes") / vit(
        "tf32, read by the training process") - 1, 0.36),
    # 02
    ("02", "matrices of 8192 x 8192, which take it more than a millisecond", 1000,
     lambda: results("profile_h200")["clock"]["and waiting"], 2000),
    ("02", "A launch every 40 microseconds or so", 35, lambda: 1e3 * account("small batch of 1, bf16")["step"] / vit(
        "one sample: eager", "kernels"), 45),
    ("02", "most of the first is idle while the host launches, of the last almost none", 0.8,
     lambda: waiting("small batch of 1, bf16"), 1),
    ("02", "of the last almost none", 0, lambda: waiting("small batch of 64, bf16"), 0.1),
    ("02", "All of it is exposed:", 0.98, lambda: account("tensor parallel")["time"]["communication"] / account(
        "tensor parallel")["communication"], 1.02),
    ("02", "nearly all of each is computing", 0.95, lambda: min(1 - waiting(name) for name in (
        "16 samples, tf32", "16 samples, bf16", "16 samples, bf16, compiled")), 1),
    # 03
    ("03", "trains about 180 samples a second on one H200.", 175, lambda: vit("bf16, compiled"), 185),
    ("03", "The model wants about 180 pairs a second.", 175, lambda: vit("bf16, compiled"), 185),
    ("03", "Eight threads read four times as much as the model wants", 3.7,
     lambda: loaders("page cache to memory", "8") / vit("bf16, compiled"), 4.7),
    ("03", "and the link carries seven times as much.", 6.7, lambda: loaders("pinned to GPU") / vit("bf16, compiled"), 7.3),
    ("03", "With one thread that reads, the way out of the page cache;", 0,
     lambda: loaders("page cache to memory", "1") / vit("bf16, compiled"), 1),
    # 04
    ("04", "fp16 is a few percent off", 2, lambda: 100 * results("curves_h200")["gap"]["fp16"], 6),
    ("04", "farthest where it is native and delayed", 1, lambda: renewed()["native fp8, delayed"] / max(renewed().values()), 1),
    ("04", "The products in FP8 take about half of bf16's time", 0.48, lambda: products_ms() / products_ms(", bf16"), 0.56),
    ("04", "at 384 the sum is about what bf16 takes", 0.9, lambda: in_fp8(384), 1.1),
    ("04", "a few hundred, for so many tokens", 200, break_even, 500),
    ("04", "it would lie beyond 2000", 2000, lambda: break_even(5), 3000),
    ("04", "fp16 and bf16 several times as long and equal.", 0.98,
     lambda: vit("fp16, on the device") / vit("bf16, on the device"), 1.02),
    ("04", "FP8 a little shorter than that.", 0.9, lambda: vit("fp8, compiled") / vit("bf16, compiled"), 0.98),
    ("04", "At width 1024 FP8 is a little longer than bf16", 1.03, lambda: vit("width 1024: fp8, compiled") / vit(
        "width 1024: bf16, compiled"), 1.15),
    # 05
    ("05", "Attention is two thirds of the compiled step.", 0.62,
     lambda: account("16 samples, bf16, compiled")["kinds"]["attention"]
     / account("16 samples, bf16, compiled")["step"], 0.69),
    # 06
    ("06", "a few percent on top of the eager step, or nothing.", 1, lambda: max(
        vit("bf16, compiled, in a graph", "memory_gb") / vit("bf16, compiled", "memory_gb"),
        vit("one sample: in a graph", "memory_gb") / vit("one sample: eager", "memory_gb")), 1.06),
    ("06", "tens of microseconds for each operation", 20, lambda: 1e3 * vit("one sample: eager", "ms") / vit(
        "one sample: eager", "kernels"), 60),
    ("06", "In the graph an operation takes a few microseconds", 3, lambda: 1e3 * vit("one sample: in a graph", "ms") / vit(
        "one sample: in a graph", "kernels"), 7),
    ("06", "Compiled, this step was slower (lesson 05)", 1.1, lambda: vit("one sample: compiled", "ms") / vit(
        "one sample: eager", "ms"), 2),
    ("06", "Next to nothing, as your `break_even` would have said", 0.98, lambda: vit("bf16, compiled, in a graph") / vit(
        "bf16, compiled"), 1.02),
    # 07
    ("07", "and backward takes about 62 ms on an H200.", 0.98 * 62, lambda: 2 / 3 * dp("none", 1), 1.02 * 62),
    ("07", "The other 20 are latency", 19, lambda: 1.5e3 * (1 / bus(4, 1)[0] - 1 / bus(4, 512)[0]), 21),
    ("07", "`bucketed` hides half of that.", 0.4, lambda: (dp("naive") - dp("bucketed")) / (dp("naive") - dp("none")), 0.6),
    ("07", "`ddp` with compiled blocks loses nearly a quarter with its usual buckets", 0.2,
     lambda: 1 - dp("none, compiled", 1) / dp("ddp, compiled"), 0.25),
    ("07", "and a fifth with larger ones.", 0.17, lambda: 1 - dp("none, compiled", 1) / dp("ddp, compiled", 4, 100.0), 0.22),
    ("07", "With 25 MB less than 0.1 ms is exposed", 0, lambda: exposed(25, bus(4, 512)[0]), 0.1),
    # 08
    ("08", "42 runs", 42, lambda: sum(run_of(batch, lr)["batch"] == batch for batch in BATCHES for lr in RATES), 42),
    ("08", "at 0.116 all that is left of batch 4 is one rate", 1,
     lambda: sum(samples_to(4, lr, 0.116) < math.inf for lr in RATES), 1),
    ("08", "At 0.12 every batch has at least two rates", 2, lambda: min(
        sum(samples_to(batch, lr) < math.inf for lr in RATES) for batch in BATCHES), 7),
    ("08", "At batch 4 four rates are within 7% of one another.", 1, lambda: sorted(
        samples_to(4, lr) for lr in RATES)[3] / fewest(4), 1.07),
    ("08", "The middle grows with about a quarter power here", 0.2, power, 0.32),
    ("08", "0.016 is too much at every one of them.", 0.008, lambda: max(max(good_rates(batch)) for batch in BATCHES), 0.008),
    ("08", "The *upper* end is the same for all batches", 0.008, lambda: min(max(good_rates(batch)) for batch in BATCHES), 0.008),
    ("08", "rises by a factor of four to eight while the batch grows by 32.", 4,
     lambda: min(good_rates(128)) / min(good_rates(4)), 8),
    ("08", "From 4 to 8 the samples stay and the steps halve", 0.9, lambda: fewest(8) / fewest(4), 1.1),
    ("08", "From 64 to 128 the samples almost double", 1.75, lambda: fewest(128) / fewest(64), 2),
    ("08", "sees each of the 5,744 samples ten times on its way", 9, lambda: fewest(128) / 5744, 11),
    ("08", "batch 4 twice.", 1.5, lambda: fewest(4) / 5744, 2.5),
    ("08", "falls by a factor of 60 from the rate 0.00025 to 0.004.", 55,
     lambda: squared_norm(0.00025) / squared_norm(0.004), 65),
    ("08", "a step takes 6 or 7 ms", 5.5, lambda: min(map(step_of, BATCHES)), 6.5),
    ("08", "a step takes 6 or 7 ms", 6.5, lambda: max(map(step_of, BATCHES)), 7.5),
    ("08", "Batch 128 is the first by the few percent", 0.9, lambda: to_target(128) / to_target(64), 1),
    ("08", "Batch 4 takes six times as long as 64 here.", 5.5, lambda: to_target(4) / to_target(64), 6.5),
    ("08", "Batch 4 needs about a third of the samples of 64", 0.28, lambda: fewest(4) / fewest(64), 0.38),
    ("08", "Two devices are worth two, eight are worth five", 1.85, lambda: sooner(2), 2.15),
    ("08", "eight are worth five", 4.5, lambda: sooner(8), 5.5),
    ("08", "the last sixteen are worth almost nothing.", 1, lambda: sooner(32) / sooner(16), 1.15),
    ("08", "at the best rate, 0.008?", 0, lambda: last_loss(64, 0.008) / min(last_loss(64, lr) for lr in RATES), 1),
    ("08", "the best constant run is as good, or a little better.", -3, lambda: cosine_gain(64), 0.1),
    # 09
    ("09", "A factor of seven.", 6.5, lambda: bus(4, 512)[0] / 50, 7.5),
    ("09", "six times as much as context parallelism", 5.5, lambda: SENDS["tp"] / SENDS["cp"], 6.5),
    ("09", "fifteen times as much as averaging the gradients", 14, lambda: SENDS["tp"] / SENDS["dp"], 16),
    ("09", "sixty times as much as the pipeline.", 58, lambda: SENDS["tp"] / SENDS["pp"], 62),
    ("09", "almost a factor of five from best to worst.", 4.5, lambda: max(
        sending(dp=347.0), sending(cp=347.0), sending(pp=347.0)) / sending(tp=347.0, cp=347.0), 5),
    ("09", "orders with tp within and cp across nodes about one and a half times as long", 1.3,
     lambda: sending(tp=347.0) / sending(tp=347.0, cp=347.0), 1.7),
    # 10
    ("10", "Communication alone is a fifth of that", 0.18, lambda: tp_sent(4) / tp("plain", 4), 0.22),
    ("10", "on 4, compiled, nothing.", 0.99, lambda: tp("overlap, compiled", 4) / tp("sequence, compiled", 4), 1.01),
    ("10", "And it needs fewer copies, too.", 0, lambda: tp("overlap", 4, "memory_gb") / tp("sequence", 4, "memory_gb"), 1),
    ("10", "and cost more than it saved, in every model.", 1.01, lambda: min(over_graph("in two parts, in a graph")), 2),
    ("10", "in a graph, one by one: calls that are replayed cost less than a copy.", 1.01,
     lambda: min(over_graph("as one, in a graph")), 2),
    ("10", "are mostly faster as one", 6, lambda: sum(ratio < 1 for ratio in as_one(SP_MODELS[:4])), 7),
    ("10", "the results are mixed: host times vary", 1, lambda: sum(ratio < 1 for ratio in as_one([GPT1B])), 1),
    ("10", "the sum of both.", 0.97, lambda: symmetric("matmul beside gather, NCCL") / (
        symmetric("matmul") + symmetric("gather, NCCL")), 1.03),
    ("10", "one step is a sixth shorter", 1 / 6.5, lambda: 1 - symmetric_step(DIT, MEMORY) / symmetric_step(DIT, HAND), 1 / 5.5),
    ("10", "the other a seventh:", 1 / 7.5, lambda: 1 - symmetric_step(GPT350, MEMORY) / symmetric_step(GPT350, HAND), 1 / 6.5),
    ("10", "even faster through memory than none", 0.9, lambda: symmetric_step(DIT, MEMORY) / symmetric_step(DIT, NO_SP), 0.99),
    ("10", "by NCCL they take a third", 0.3, lambda: sp(DIT, HAND) / sp(DIT, NO_SP) - 1, 0.36),
    ("10", "a third and a quarter longer.", 0.22, lambda: sp(GPT1B, HAND) / sp(GPT1B, NO_SP) - 1, 0.28),
    ("10", "with the scatter it takes as long as the all-reduce that both replace.", 0.95, lambda: statistics.mean(
        both_ways(size) / exchange("all-reduce, NCCL", size) for size in (OF_DIT, OF_GPT1B)), 1.05),
    ("10", "hide most of one of", 0.5, lambda: 1 - shown(OF_GPT1B) / exchange("gather, through memory", OF_GPT1B), 1),
    # 11
    ("11", "57%. In round 0 each rank has a triangle", 56.5, lambda: 100 * 4 / 7, 57.5),
    ("11", "all three gain with the length", 1, lambda: min(
        cp(f"{longer} {mask} {way}") / cp(f"{shorter} {mask} {way}") for shorter, longer in (("16k", "32k"), ("32k", "64k"))
        for mask in ("causal", "full") for way in CP_WAYS), 3),
    ("11", "all-to-all is the fastest in every row", 0, lambda: max(
        cp(f"{case} all_to_all", "ms") / min(cp(f"{case} {way}", "ms") for way in (*CP_WAYS[:2], "PyTorch context_parallel"))
        for case in CP_CASES), 1),
    ("11", "runs at about six tenths of cuDNN's rate", 0.57, lambda: attention([1, 32, 32768, 128], "flash") / attention(
        [1, 32, 32768, 128], "cudnn"), 0.63),
    ("11", "is ahead of PyTorch's in every row.", 0, lambda: max(
        cp(f"{case} ring", "ms") / cp(f"{case} PyTorch context_parallel", "ms") for case in CP_CASES), 1),
    ("11", "Of the three the ring has the largest peak here.", 0, lambda: max(
        max(cp(f"{case} {way}", "memory_gb") for way in ("gather", "all_to_all")) / cp(f"{case} ring", "memory_gb")
        for case in CP_CASES), 1),
    # 12
    ("12", "Nearly fifty times.", 47, lambda: 16 * 4 * 2 * 3 / 4 / 2, 50),
    ("12", "less than in theory", 0, lambda: max(lost("gpipe"), lost("1f1b")) / (100 * schedules.bubble(4, 16)), 1),
    ("12", "and differ in memory: a third for 1F1B.", 0.3, lambda: at("pp_h200", "1f1b", "memory_gb", gpus=4) / at(
        "pp_h200", "gpipe", "memory_gb", gpus=4), 0.36),
    ("12", "One that waits a sixth of the time", 1 / 6.5, lambda: schedules.bubble(4, 16), 1 / 5.5),
    ("12", "and it loses more than 1F1B.", 1, lambda: lost("PyTorch Interleaved1F1B") / lost("PyTorch 1F1B"), 2),
    ("12", "its bubble is half as large", 0.45, lambda: schedules.bubble(4, 16, 2) / schedules.bubble(4, 16), 0.55),
    # 13
    ("13", "a quarter of the states, 8 bytes a parameter over 4 ranks", 0.249,
     lambda: zero("ZeRO-1", "optimizer_gb") / zero("ddp", "optimizer_gb"), 0.251),
    ("13", "Stage 1 takes away nearly half", 0.4, lambda: 1 - 63 / 112, 0.5),
    # 14
    ("14", "as much as eight of the twelve blocks keep.", 7.5, lambda: 4 * GPT_LOGITS / (2 * 16 * 64 * 1024 * 768), 8.5),
    ("14", "Beside it 4x8x1 on *32* GPUs, tp within a node and dp between nodes, loses a third", 0.28,
     lambda: 1 - v100("4x8x1", "tflops") / v100("1x8x1", "tflops"), 0.36),
    ("14", "not four fifths.", 0.77, lambda: 1 - v100("1x16x1", "tflops") / v100("1x8x1", "tflops"), 0.83),
    ("14", "8 GPUs take hardly longer than one, 16 take 200 ms longer.", 195, lambda: v100("16x1x1") - v100("1x1x1_2"), 205),
    ("14", "all take the same time within 5%", 0, lambda: max(
        *wide("grid_h200"), *wide("grid_h200", "again/rows"), *wide("grid_2xh200")), 0.05),
    ("14", "more than half of the time that two took.", 0.55, lambda: grid("1x4x1_16_1536x16, layers", file="grid_4xh200") / grid(
        "1x2x1_16_1536x16, layers", file="grid_2xh200"), 0.8),
    ("14", "only a fourth less", 0.2, lambda: 1 - grid(
        "1x4x1_8_1536x16, layers", file="grid_4xh200", by="course, sequence parallel") / grid(
        "1x4x1_16_1536x16, layers", file="grid_4xh200", by="course, sequence parallel"), 0.28),
    ("14", "Those of width 3072 take a little less with it than without.", 0.97, lambda: statistics.mean(
        grid(f"1x4x1_16_3072x{depth}, layers", file="grid_4xh200", by="course, sequence parallel") / grid(
            f"1x4x1_16_3072x{depth}, layers", file="grid_4xh200") for depth in (16, 32)), 0.995),
    ("14", "would fill three quarters of an H200.", 0.7, lambda: 100 * 32 * 2 * 4096 * 2 * 2048 / H200.memory, 0.8),
    ("14", "4x2x1 sends a third of the activations that 2x4x1 does", 0.32,
     lambda: sent("4x2x1_16_1536x16")[0] / sent("2x4x1_16_1536x16")[0], 0.35),
    # 15
    ("15", "other seeds more than 1%.", 1, lambda: min(seeds("gpt-1.3b")), 2),
    ("15", "every recipe stays within what seeds do", 0, lambda: max(
        gap(model, run) / spread(model) for model in ("dit-xl", "dit-xl-512", "gpt-1.3b") for run in FP8), 1),
    ("15", "A tenth of a percent: nearer than any recipe.", 0.08, frozen_gpt, 0.12),
    ("15", "nearer than any recipe.", 0, lambda: frozen_gpt() / min(gap("gpt-1.3b", run) for run in FP8), 1),
    ("15", "is no more than another attention kernel makes.", 0, lambda: gap("gpt-1.3b", "bf16, cp=2", "alignment_cp_h200") / gap(
        "gpt-1.3b", "bf16, flash attention"), 1),
    ("15", "less than half of what its seeds spread by.", 0,
     lambda: gap("dit-xl", "bf16, cp=2", "alignment_cp_h200") / spread("dit-xl"),
     0.5),
    ("15", "all others' is 10.3.", 10.25,
     lambda: min(loss for name, loss in losses(1).items() if "Transformer" not in name), 10.35),
    ("15", "all others' is 10.3.", 10.25,
     lambda: max(loss for name, loss in losses(1).items() if "Transformer" not in name), 10.35),
    ("15", "Two steps later it has caught up.", 0.99,
     lambda: losses(3)["fp8 Transformer Engine"] / losses(3)["bf16, seed 0"], 1.01),
    ("15", "Transformer Engine is *slower* than compiled bf16 here.", 1.1, lambda: min(
        dit(f"{pixels}: fp8 by Transformer Engine") / dit(f"{pixels}: {BF16}") for pixels in ("256 px", "512 px")), 2),
    ("15", "by far the slowest, slower than all three apart", 1.5, lambda: gelu("DGELU_BGRAD") / gelu(APART), 3),
    ("15", "less than 28 times what the kernels say", 0, lambda: 1e3 * (gelu_step("apart") - gelu_step("in the matmul")) / (
        28 * (gelu(APART) - gelu("DGELU") - gelu("sum over tokens"))), 1),
    ("15", "At 512 pixels hardly", 0.98, lambda: dit(f"512 px: bf16, {BY_HAND}") / dit(f"512 px: fp8, {BY_HAND}") / (
        dit(f"512 px: {BF16}") / dit("512 px: fp8, compiled, narrow stream")), 1.02),
    ("15", "it would be a tenth less, whatever the code.", 0.09, lambda: 1 - clock() / 1830, 0.11),
    ("15", "GPT 1.3B became *slower*", 1, lambda: steps_of(results("products_h200")["by_turns"], "1.3B") / steps_of(
        results("products_h200")["steps"], "1.3B", chosen=False), 1.1),
    ("15", "The matrix multiplications are two thirds of that step", 0.63,
     lambda: multiplying(f"dit: 256 px: bf16, {BY_HAND}"), 0.7),
    # 17
    ("17", "Twice as long. The peak is", 1.9, lambda: at("gpt_h200", "350M: bf16, compiled, narrow stream") / (
        1e3 * flops.step(config.load("gpt-350m", []).model, 32) / H200.peak("bf16")), 2.1),
    ("17", "Large ones sustain about two thirds", 0.63, lambda: results("ceilings_h200")["matmul"]["8192"] / 989e12, 0.69),
    ("17", "Bars: under 1, 5, 36", 4.5, lambda: results("ceilings_h200")["matmul"]["256"] / 1e12, 5.5),
    ("17", "Bars: under 1", 0, lambda: results("ceilings_h200")["matmul"]["128"] / 1e12, 1),
    ("17", "the same matmuls give 750 to 800.", 750, lambda: min(row[0] for shape, row in short_runs()), 800),
    ("17", "the same matmuls give 750 to 800.", 750, lambda: max(row[0] for shape, row in short_runs()), 800),
    ("17", "from 1.5 to 50 GB", 1.4, lambda: min(step.memory_gb for step in recorded_steps.one_gpu()), 1.6),
    ("17", "from 1.5 to 50 GB", 49, lambda: max(step.memory_gb for step in recorded_steps.one_gpu()), 51),
    ("17", "predicted 2.3 ms for buckets of 25 MB where 5.3 were measured.", 5.25, lambda: at(
        "beside_h200", "bucketed, compiled", gpus=4, bucket_mb=25.0) - at("beside_h200", "none, compiled", gpus=4), 5.35),
    ("17", "It is about a third too long.", 0.2, lambda: statistics.mean(off(run, "half") for run in recorded_runs.runs()), 0.4),
    ("17", "Within a few percent on one GPU and with tensor parallelism", 0,
     lambda: max(abs(off(run, "told")) for run in ("one GPU", "tensor parallel")), 0.05),
    ("17", "is within 3% of the first two", 0, lambda: max(
        abs(recorded_runs.recorded_run_steps()[run].error) for run in ("one GPU", "tensor parallel")), 0.03),
    ("17", "The data sheet's own numbers were off by a third.", -0.38,
     lambda: statistics.mean(off(run, "sheet") for run in recorded_runs.runs()), -0.3),
    ("17", "The course has recorded more than a hundred steps", 101, lambda: len(step_errors()), 999),
    ("17", "a few between 0.7 and 0.9, two near 1.2", 0.69, lambda: 1 + step_errors()[0], 0.75),
    ("17", "most points lie between 0.9 and 1.15", 0.8, lambda: statistics.mean(
        0.9 <= 1 + error <= 1.15 for error in step_errors()), 1),
    ("17", "two near 1.2", 1.15, lambda: 1 + step_errors()[-2], 1.25),
    ("17", "two near 1.2", 1.15, lambda: 1 + step_errors()[-1], 1.25),
    ("17", "two near 1.2", 0, lambda: 1 + step_errors()[-3], 1.15),
    ("17", "from 3 to 2500", 3, lambda: min(step.ms for step in recorded_steps.steps()), 4),
    ("17", "from 3 to 2500", 2450, lambda: max(step.ms for step in recorded_steps.steps()), 2550),
    ("17", "with interleaving 2% would be left.", 0.015, lambda: study(4, 4, *CHUNKS) / study(8, 2, *CHUNKS) - 1, 0.025),
    ("17", "none is too long by more than half a percent.", 0, lambda: max(held(3, 2)), 0.5),
    ("17", "two are a quarter too short", 25, lambda: sorted(map(abs, held(4, 1)))[10], 30),
    ("17", "Ten of twelve predictions", 12, lambda: len(held(4, 1)), 12),
    ("17", "pp = 2, with it or alone, is within 3% of it.", 0, lambda: max(
        layout.time.step for layout in planned("a100-40", 64)[1:3]) / planned("a100-40", 64)[0].time.step - 1, 0.03),
    ("17", "not quite 5% would stay free.", 0.045, lambda: 1 - memory.predict(config.load("gpt-7b", [
        *FAST, "parallel.dp=64", "parallel.zero=true", "train.micro_batch=4"])).total / hardware.load("h100-80").memory, 0.05),
    ("17", "Two days;", 1.8, lambda: days(64), 2.2),
    ("17", "be done in three quarters of an hour?", 0.7, lambda: 24 * days(4096), 0.8),
    ("17", "at about 92 samples/s with ZeRO-1", 91, lambda: min(slid(tp, True) for tp in (1, 2)), 93),
    ("17", "at about 92 samples/s with ZeRO-1", 91, lambda: max(slid(tp, True) for tp in (1, 2)), 93),
    ("17", "and about 100 without", 98, lambda: min(slid(tp, False) for tp in (1, 2)), 102),
    ("17", "and about 100 without", 98, lambda: max(slid(tp, False) for tp in (1, 2)), 102),
    ("17", "(2) Within 5%, on one GPU, with tp alone", 0, lambda: max(
        abs(step.error) for step in recorded_steps.tensor()
        if any(word in step.name for word in ("one GPU", "plain", "overlap"))), 0.05),
    ("17", "attention half", 0.4, lambda: attention_of_table(256, 16384, 64) / 989, 0.6),
    ("17", "attention half", 0.4, lambda: attention_of_table(256, 16384, 128) / 989, 0.6),
    ("17", "the mean of six such pairs of steps there.", 6, lambda: len(beside()), 6),
    ("17", "beside the backward pass, which takes 50 ms?", 49, lambda: 2 / 3 * dp("none, compiled"), 51),
    ("17", "Steps of 3 or 4 ms consist of kernels", 3, lambda: vit("one sample: compiled, in a graph", "ms"), 4.5),
    ("17", "Steps of 3 or 4 ms consist of kernels", 3, lambda: vit("one sample: in a graph", "ms"), 4.5),
    ("17", "A quarter: everybody waits for the slowest.", 23, lambda: uneven(1, 1, 1, 1.3), 27),
    # 18
    ("18", "about 10% are lost: 3.7% saving, 3.7% doing again, 2.7% restarting.", 9.5, lambda: sum(young(30)), 10.5),
]


def missing(lesson: str, said: str) -> str:
    """Why a sentence, with its numbers as they should be, is not in a lesson; nothing if it is."""
    if re.search(rf"(?<![\w.,]){re.escape(said)}(?![\w]|[.,]\d)", prose(lesson)):
        return ""
    return f"lesson {lesson} does not say: {said}"


@pytest.mark.parametrize(("lesson", "sentence", "numbers"), SAID, ids=[f"{lesson} {said[:50]}" for lesson, said, _ in SAID])
def test_numbers(lesson: str, sentence: str, numbers: Numbers) -> None:
    assert missing(lesson, sentence.format(*numbers())) == ""


@pytest.mark.parametrize(("lesson", "words", "least", "number", "most"), WORDS, ids=[f"{row[0]} {row[1][:50]}" for row in WORDS])
def test_words(lesson: str, words: str, least: float, number: Callable[[], float], most: float) -> None:
    assert missing(lesson, words) == "" and least <= number() <= most
