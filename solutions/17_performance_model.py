# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 17 · A performance model
#
# A training run of a large model takes weeks on hundreds of GPUs. Nobody finds a good layout by trial and error. There are
# thousands of ways to cut a model over 64 GPUs, and most run out of memory. So engineers **compute before they launch**. They
# count FLOPs, bytes and messages, and divide each by the rate that the hardware really reaches. In this lesson you write such a
# model piece by piece.
#
# **What you will learn**
#
# - How to estimate the time and memory of a training step from its FLOPs, bytes and messages.
# - How accurate such an estimate is, and where it fails.
# - How to choose a layout for 64 GPUs before you launch anything.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 100 minutes |
# | computing | 1 minute on two cores |
# | you write | FLOPs, bytes of a block (6 lines), seconds of a ring (2), a pipeline (2), their sum (7); optional: planner (20) |
# | you predict | three recorded runs on H200s: on one GPU, tensor-parallel, in a pipeline |
#
# Do these lessons first: [07](07_data_parallel.ipynb) (rings), [10](10_tensor_parallel.ipynb) (tensor parallelism),
# [12](12_pipeline_parallel.ipynb) (pipelines) and [13](13_memory.ipynb) (memory). Work in a copy: *File → Save Notebook As…*,
# `17_performance_model_mine.ipynb`.
#
# > **Predict.** You train GPT 7B on 134 billion tokens (20 per parameter, Hoffmann et al. 2022) with 64 H100s. How many days
# > will that take? Guess now; later you ask a planner.

# %% numbers=true
from dataclasses import replace
from statistics import mean, median
from unittest import mock

from course import config
from course.bench import recorded_steps
from course.bench.results import load, value
from course.lab.exercises import lesson17_performance_model as answers
from course.lab.figures import performance_model as figures
from course.planner import block_time, collectives, flops, hardware, kernel_efficiency, peak_memory

h200 = hardware.load("h200")
peak = h200.peak("bf16")

# one GPU
flops_350m = flops.step(config.load("gpt-350m", []).model, 32)
peak_ms_350m = 1e3 * flops_350m / peak
ms_350m = value("gpt_h200", "350M: bf16, compiled, narrow stream")
large_matmul = load("ceilings_h200")["matmul"]["8192"]
short_large_matmul = load("beginning_h200")["matmul"]["8192x8192x8192"][0]
layers = [row["tflops"] for row in load("fp8_h200")["parts"] if row["case"].endswith(", bf16")]
layer_share = mean(layers) * 1e12 / peak


def attention(heads, tokens, width):
    """TFLOP/s of forward and backward in the table of kernels, full attention."""
    seconds = 0.0
    for way in ("forward", "backward"):
        table = load("kernels_h200")["attention"][way]
        index = 0
        for axis, size in zip(table["axes"], (heads, tokens, width), strict=True):
            index = index * len(axis) + axis.index(size)
        seconds += table["seconds"][index]
    return 14 * heads * tokens**2 * width / seconds / 1e12


attention_128, attention_64 = (attention(256, 16384, width) for width in (128, 64))
causal_2048, = (row["cudnn"] for row in load("beginning_h200")["attention"] if row["shape"] == [8, 16, 2048, 128])
causal_4096 = peak / 1e12 * kernel_efficiency.attention_share(4096, 128, True)

# messages
bus = {size: load("beginning_h200")["all_reduce"]["4"][str(size)] for size in (1, 25, 134, 512)}
bus_of_two = load("beginning_h200")["all_reduce"]["2"]["134"]
short_by = 1 - answers.all_reduce_seconds(1e6, 4, 2e-6, 0.78 * 450e9) / (1.5e6 / (bus[1] * 1e9))
all_reduce_ms = 1e3 * collectives.all_reduce(25e6, collectives.group_of([(1, 16384)], h200))


def data_parallel(case, bucket_mb=25.0):
    return value("dp_h200", f"{case}, compiled", gpus=4, bucket_mb=bucket_mb)


alone_ms, naive_ms, bucketed_ms = data_parallel("none"), data_parallel("naive"), data_parallel("bucketed", 100.0)
tensor = list(recorded_steps.tensor())
overlapped = [step for step in (*tensor, *recorded_steps.tensor_vit(), *recorded_steps.context())
              if step.gpus > 1 and ("overlap" in step.name or "ring" in step.name)]
overlap_error = median(abs(step.error) for step in overlapped)
with mock.patch.object(block_time, "BESIDE", 0.25):
    guess_error = median(abs(1e3 * recorded_steps.predicted(step.config, step.kind).step / step.ms - 1) for step in overlapped)
tensor_error = max(abs(step.error) for step in tensor if any(word in step.name for word in ("one GPU", "plain", "overlap")))


# held out
def held(number, gpus):
    """Errors of a list's predictions, as they were made."""
    return [row["predicted_ms"] / row["ms"] - 1 for row in load(f"heldout_{number}_h200")["rows"]
            if row["name"].startswith(f"{gpus}-")]


def half_off(errors):
    return median(map(abs, errors))


fourth = {gpus: held(4, gpus) for gpus in (1, 2, 4)}
plain_steps = [1e3 * row["plain_step"] for number in (3, 4) for row in load(f"heldout_{number}_h200")["rows"]]
tf32_gb = value("heldout_h200", "1-04", "memory_gb")
tf32_predicted_gb, = (peak_memory.predict(config.load(row["preset"], row["settings"])).allocated / 1e9
                      for row in load("heldout")["configurations"] if row["name"] == "1-04")

# the planner and its sliders
FAST = ["compile=true", "stream=narrow"]


def rate(tp, zero):
    """Samples/s of GPT 1.3B, batch 8, on eight H200s."""
    c = figures.config_of("GPT 1.3B", batch=8, micro_batch=8, sequence=figures.OWN, gpus=8, tp=tp, sp="no", cp=1, pp=1, zero=zero,
                          recompute="none", precision="bf16")
    return figures.time_of(c, h200, "step").samples_per_s


alone = config.load("gpt-7b", [*FAST, "parallel.dp=1", "train.global_batch=1", "train.micro_batch=0"])


def free(recompute, tokens):
    """The share of one H200 that GPT 7B with one sample leaves free."""
    c = replace(alone, model=replace(alone.model, context=tokens), train=replace(alone.train, recompute=recompute))
    return 1 - peak_memory.predict(c).total / h200.memory


def longest(recompute):
    return max(2**n for n in range(13, 18) if free(recompute, 2**n) >= figures.FREE)


rate_zero, rate_whole = rate(2, True), rate(2, False)
tokens_none, tokens_selective, tokens_full = map(longest, ("none", "selective", "full"))

# %%
my_days = 10.0                   # your guess

# %%
import statistics
from collections.abc import Sequence

from course import config
from course.lab.figures import style, performance_model, widgets
from course.lab.instruments import recorded_runs
from course.lab import notebook as lab
from course.lab.notebook import check
from course.lab.instruments.recorded_runs import Rates, Run
from course.planner import (
    activation_memory, collectives, flops, hardware, kernel_efficiency, peak_memory,
    search, step_time
)
from course.cli import plan
from course.bench import published_steps, recorded_steps

lab.begin("17")
h200 = hardware.load("h200")

# %% [markdown]
# ## FLOPs
#
# Two kinds of matrix multiplication do nearly all the arithmetic of a transformer.
#
# **Linear maps.** Each weight takes one multiplication and one addition per token: 2 FLOPs. The backward pass needs two more
# such products: one for the gradient of the input, one for the gradient of the weight. That makes 6 FLOPs per weight and token.
# A block of width D, with M hidden units in its MLP, has these weights:
#
# | map | weights |
# |---|---|
# | queries | D·D |
# | keys and values: K features each, because heads may share them (lesson 14) | 2·D·K |
# | output | D·D |
# | up and down | 2·D·M |
#
# **Attention** multiplies queries by keys, then weights by values. Each product takes D multiplications and D additions for
# every pair of tokens; T tokens take 4·T²·D FLOPs for both. The backward pass has four such products, and one more: fused
# attention does not keep the scores, so it computes them *again*. With a causal mask the kernel skips half of everything.
#
# > **Predict.** Attention grows with T², linear maps with T. GPT 1.3B has D = 2048, M = 4·D and a causal mask. From how many
# > tokens on does attention execute more FLOPs than the linear maps?

# %%
my_crossover = 8192              # your prediction, in tokens

# %% [markdown]
# ## Exercise: the FLOPs of a block
#
# Return two numbers, because the two kinds run at different rates: the FLOPs of the linear maps, and the FLOPs of attention.
# Count what one training step *executes* for one sample in one block, forward and backward.

# %% exercise="block-flops"
def block_flops(tokens: int, dim: int, hidden: int, kv_dim: int, causal: bool) -> tuple[float, float]:
    """FLOPs that a step executes for one sample in one block: (linear maps, attention), forward and backward.

    Queries have `dim` features, keys and values `kv_dim` each. Fused attention computes its scores again in the backward pass,
    and with a causal mask only half of everything.
    """
    ### BEGIN SOLUTION
    per_token = 2 * dim * dim + 2 * dim * kv_dim + 2 * dim * hidden
    products = 7 if causal else 14                  # two matmuls forward and five backward, 2·T²·D each; a mask spares half
    return 6 * tokens * per_token, products * tokens**2 * dim
    ### END SOLUTION

# %%
check("block-flops")

# %%
contexts = [2**n for n in range(10, 17)]
share = {T: block_flops(T, 2048, 8192, 2048, True) for T in contexts}
lines = {"linear maps": (contexts, [share[T][0] / T / 1e6 for T in contexts]),
         "attention": (contexts, [share[T][1] / T / 1e6 for T in contexts])}
lab.picture(style.curves(lines, "tokens of a sample", "MFLOPs a token and block",
                         "GPT 1.3B: what a block executes"),
            "FLOPs per token against the number of tokens: a level line for the "
            "linear maps, and a rising line for attention that crosses it")
linear, attention = block_flops(1, 2048, 8192, 2048, True)
lab.beside("attention executes more from", my_crossover, linear / attention, "tokens",
           "counted")

# %% [markdown]
# 72·D² = 7·T·D, so T is about 10·D: 21,000 tokens. At the usual 2048 or 4096 tokens, attention is a small part of the *FLOPs*.
# Its share of the time is larger, as you will see.
#
# > **Question.** MFU is the share of the peak that everybody quotes. It counts 12·T²·D for attention, causal or not, and
# > nothing that is computed again. Why does it count FLOPs that nobody executes?
#
# <details><summary>Answer</summary>
# MFU counts <i>model</i> FLOPs: what the mathematics asks for. So it compares runs with different kernels, and computing
# something twice earns no credit. Counting causal attention in full is a convention (Chowdhery et al. 2022, appendix B). To
# predict a <i>time</i>, count what is executed.
# </details>

# %%
for name in ("gpt-1.3b", "gpt-7b", "dit-xl", "vit-mp"):
    c = config.load(name, ["train.recompute=full"])
    print(f"{name:9} model FLOPs of a sample {flops.step(c.model, 1):.3e}, executed "
          f"with train.recompute=full "
          f"{flops.executed(c, 1) / flops.step(c.model, 1):.2f} times as many")

# %% [markdown]
# ## From FLOPs to seconds
#
# The data sheet of an H200 promises {result: peak / 1e12 | .0f} TFLOP/s for bf16. GPT 350M with 32 × 1024 tokens needs
# {result: flops_350m / 1e12 | .0f} TFLOPs per step.
#
# > **Predict.** At the peak that would take {result: peak_ms_350m | .0f} ms. How long does a step really take, compiled and
# > with everything that you have learned so far?

# %%
my_350m = 100.0                  # your prediction, in ms

# %%
c = config.load("gpt-350m", ["train.global_batch=32", "train.micro_batch=0",
                             "compile=true", "stream=narrow", "parallel.dp=1"])
at_peak = flops.step(c.model, 32) / h200.peak("bf16") * 1e3
row = next(row for row in lab.results("gpt_h200")["rows"] if row["configuration"]
           == "350M: bf16, compiled, narrow stream")
print(f"at the peak: {at_peak:.1f} ms")
lab.beside("a step of GPT 350M", my_350m, row["ms"], "ms", "recorded")

# %% [markdown]
# {result: ms_350m / peak_ms_350m | .1f} times as long. The peak is what the tensor cores could do if nothing else existed.
# Three things keep a program below it, and a model has to know them all.
#
# **One: matmuls do not reach the peak.** Large ones sustain {result: large_matmul / peak | .0%} of it. At the full rate the
# chip would exceed its power limit, so it lowers its clock. Small ones do not fill its 132 multiprocessors.
#
# > **Predict.** What percentage of the peak does the product of two 1024 × 1024 matrices reach?

# %%
my_small_percent = 50.0          # your prediction

# %%
ceilings = lab.results("ceilings_h200")
reached = {f"{size}³": rate / 1e12 for size, rate in ceilings["matmul"].items()}
lab.picture(style.bars(reached, "TFLOP/s", "bf16 matmuls of square matrices, one "
                       "H200, sustained"),
            "Bars, in TFLOP/s: " + ", ".join(f"{size} {rate:.0f}"
                                             for size, rate in reached.items()))
lab.beside("1024³, percent of 989 TFLOP/s", my_small_percent,
           100 * ceilings["matmul"]["1024"] / 989e12, "%", "recorded")
layers = {part["case"].removesuffix(", bf16"): part["tflops"]
          for part in lab.results("fp8_h200")["parts"]
          if part["case"].endswith("bf16")}
print("\nlayers of width 4096 and 16,384 tokens, TFLOP/s:",
      {name: round(rate) for name, rate in layers.items()})

# %% [markdown]
# The matmuls of a real layer reach {result: min(layers) | .0f} to {result: max(layers) | .0f} TFLOP/s, on average
# {result: layer_share | .0%} of the peak. Use this rate in a model, not the peak. In a benchmark of a fraction of a second,
# while the chip is cool, the 8192³ product reaches {result: short_large_matmul | .0f} TFLOP/s instead of
# {result: large_matmul / 1e12 | .0f}. Which of the two rates describes your training?
#
# **Two: attention computes exponentials.** Each score needs one, and tensor cores do not compute them. For long sequences
# cuDNN's kernel reaches {result: round(attention_128, -1) | .0f} TFLOP/s with heads of 128, and
# {result: round(attention_64, -1) | .0f} with heads of 64. A causal mask costs speed on short sequences, because the kernel
# computes the blocks on the diagonal in full. With heads of 128 it reaches {result: round(causal_2048, -1) | .0f} TFLOP/s at
# 2048 tokens. For 4096 tokens the library assumes {result: round(causal_4096, -1) | .0f}.
#
# **Three: memory bandwidth limits the rest.** Norms, GELU, residual additions, casts and the optimizer do few FLOPs on many
# bytes (lessons 02 and 05). Their time is bytes over bandwidth, and again they do not reach the data sheet's bandwidth. The
# library assumes these shares of it:

# %%
for kind, part in kernel_efficiency.MEMORY.items():
    print(f"{kind:12} {part:.0%} of {h200.bandwidth / 1e12:.1f} TB/s = "
          f"{part * h200.bandwidth / 1e12:.1f} TB/s")

# %% [markdown]
# `fused` are the compiler's kernels; `elementwise` and `norm` are PyTorch's own. You counted their bytes in lesson 05. The
# library counts them in `block_time.forward_bytes` and `backward_bytes`.
#
# `course bench kernels` measures all these rates on your GPU in a few minutes and writes a table over sizes. With such a table,
# for example `course/bench/results/kernels_h200.json`, the library interpolates between its points. Without one it uses the
# shares above.
#
# ## Bytes: what fits
#
# A layout that does not fit has no step time. In lesson 13 you counted weights, gradients and optimizer states: 16 bytes per
# parameter, less what ZeRO-1 and the parallel axes shard. Now count the activations. For its backward pass an uncompiled bf16
# block keeps, per token:
#
# | tensor | numbers | bytes each | where |
# |---|---|---|---|
# | inputs of the two norms | 2·D | 4 | outside |
# | outputs of the two norms | 2·D | 2 | outside |
# | queries, keys, values | 3·D | 2 | inside |
# | attention's output | D | 2 | inside |
# | hidden units before and after GELU | 2·M | 2 | inside |
#
# *Inside* attention and MLP, tensor parallelism shards heads and hidden units: each rank keeps 1/tp. *Outside* them, without
# sequence parallelism, every rank keeps everything. With it, each rank keeps only its own tokens, both of the norms' inputs and
# of their outputs. The next linear map gathers these outputs. It does not keep the gathered tensor, but gathers it again in the
# backward pass.
#
# > **Predict.** GPT 7B (D = 4096, M = 4·D), tp = 8. By what factor does sequence parallelism reduce the bytes that a block
# > keeps?

# %%
my_times_fewer = 8.0             # your prediction

# %% [markdown]
# ## Exercise: the bytes of activations
#
# Return the bytes that one block keeps on one rank for this number of tokens. All sizes are multiples of tp.

# %% exercise="activation-bytes"
def activation_bytes(tokens: int, dim: int, hidden: int, tp: int, sp: bool) -> float:
    """Bytes that one eager bf16 block, cut over tp ranks, keeps for backward on one rank; sp: with sequence parallelism.

    Norms' inputs are float32. With sequence parallelism the linears gather their input again in the backward pass.
    """
    ### BEGIN SOLUTION
    outside = 12 * dim                              # bytes a token: 2·D in float32 and 2·D in bf16
    inside = (8 * dim + 4 * hidden) / tp            # 4·D and 2·M in bf16
    return tokens * (inside + (outside / tp if sp else outside))
    ### END SOLUTION

# %%
check("activation-bytes")

# %%
fewer = activation_bytes(4096, 4096, 16384, 8,
                         False) / activation_bytes(4096, 4096, 16384, 8, True)
lab.beside("times fewer bytes with sequence parallelism, tp = 8", my_times_fewer, fewer,
           "times", "counted")
for sp in ("false", "true"):
    c = config.load("gpt-7b", ["model.context=4096", "parallel.tp=8",
                               f"parallel.sp={sp}", "train.global_batch=1"])
    kept = activation_memory.block(next(peak_memory.ranks(c)))
    mine = activation_bytes(4096, 4096, 16384, 8, sp == "true")
    print(f"sp={sp:5}: you count {mine / 1e6:6.1f} MB a block, the library "
          f"{sum(kept.values()) / 1e6:6.1f} MB")

# %% [markdown]
# 3.3 times, not 8: at tp = 8, most of the bytes lie *outside* unless the tokens are sharded too. This is the second reason for
# sequence parallelism, beside faster norms, and it grows with tp. (The library also counts attention's log-sum-exp, one float32
# number per head and token.)
#
# `peak_memory.predict` counts everything that a step needs at its peak. Compare it with recorded peaks:

# %%
single = [step for step in recorded_steps.one_gpu() if step.config.precision != "fp8"]
gigabytes = {"ViT": [], "DiT": [], "GPT": []}
for step in single:
    group = {"vit": "ViT", "gpt": "GPT", "dit": "DiT"}[step.name[:3]]
    gigabytes[group].append((step.memory_gb, peak_memory.predict(step.config).allocated
                             / 1e9))
worst = max(abs(y / x - 1) for points in gigabytes.values() for x, y in points)
lab.picture(performance_model.scatter(gigabytes, "GB at the peak", "Memory of models "
                                      "on one H200: predicted over measured", 0.1),
            f"Predicted over measured memory against GB: all points lie within "
            f"{worst:.1%} of 1")
print(f"largest error: {worst:.1%}")

# %% [markdown]
# Predicting memory is counting, so the errors are small. The largest is GPT 124M with full recomputation.
#
# Memory alone can rule out a layout. Take a DiT with 3 billion parameters and 64k tokens per sample on 16 H20s with 96 GB each.
# Notes on its training describe three layouts: tp4 pp4, tp8 pp2 and tp2 pp8. Each uses sequence parallelism and one sample per
# micro-batch. One of them ran out of memory. (A data sheet's "96 GB" are GiB of 2³⁰ bytes: about 103 GB of 10⁹ bytes, as
# printed here.)
#
# > **Predict.** Which one? All of them cut the model into 16 parts.

# %%
my_misfit = "tp8 pp2"            # your prediction

# %%
h20 = hardware.load("h20")
for tp, pp in ((4, 4), (8, 2), (2, 8)):
    c = config.load("dit-3b", ["model.latent=[4,512,512]", "train.micro_batch=1",
                               "train.global_batch=8", f"parallel.tp={tp}",
                               f"parallel.pp={pp}", "parallel.dp=1",
                               "parallel.sp=true"])
    needs = peak_memory.predict(c)
    print(f"tp{tp} pp{pp}: {needs.total / 1e9:4.0f} GB of {h20.memory / 1e9:.0f}, "
          f"activations {needs.activations / 1e9:4.0f} GB, "
          f"{step_time.predict(c, h20).step:.1f} s" + ("   did not fit; you said "
                                                       + my_misfit if (tp, pp) == (2, 8)
                                                       else ""))

# %% [markdown]
# tp2 pp8. With tensor parallelism each rank keeps 1/tp of each activation. The first rank of a 1F1B pipeline has an eighth of
# the blocks, but it keeps them for *eight* micro-batches (lesson 12). So pp does not reduce activations at all. Of the other
# two, tp4 pp4 is slower, mostly because its bubble is longer.
#
# ## Messages
#
# A collective consists of **steps**, one after another. Each step costs a **latency**, and its bytes pass a link at a
# **bandwidth**. In a ring of n ranks (lesson 07) an all-reduce is a reduce-scatter followed by an all-gather. In each of the
# two, every rank sends n − 1 pieces to its neighbor, each 1/n of the bytes.
#
# ## Exercise: the seconds of a ring

# %% exercise="all-reduce-seconds"
def all_reduce_seconds(size: float, ranks: int, latency: float, bandwidth: float) -> float:
    """Seconds of a ring all-reduce of `size` bytes: its steps in turn, each `latency` and the time of a piece."""
    ### BEGIN SOLUTION
    piece = size / ranks
    return 2 * (ranks - 1) * (latency + piece / bandwidth)
    ### END SOLUTION

# %%
check("all-reduce-seconds")

# %% [markdown]
# Four H200s joined by NVLink reached these *bus bandwidths* (lesson 07: bytes through each link over seconds):
# {result: bus[1] | .0f} GB/s for 1 MB, {result: bus[25] | .0f} for 25 MB, {result: bus[134] | .0f} for 134 MB and
# {result: bus[512] | .0f} for 512 MB. The data sheet says 450. Take 2 µs per step and {result: collectives.REACHED | .0%} of
# the data sheet's bandwidth, and predict.
#
# > **Predict.** Which of the four sizes will your formula get most wrong, and in which direction?

# %%
my_worst_mb = 512                # your prediction: 1, 25, 134 or 512

# %%
ring = {}
recorded_bus = lab.results("beginning_h200")["all_reduce"]["4"]        # GB/s
for megabytes in (1, 25, 134, 512):
    bus = recorded_bus[str(megabytes)]
    measured = 1.5 * megabytes * 1e6 / (bus * 1e9)
    ring[megabytes] = all_reduce_seconds(megabytes * 1e6, 4, 2e-6,
                                         0.78 * 450e9) / measured - 1
    library = collectives.all_reduce(megabytes * 1e6,
                                     collectives.group_of([(1, 4)],
                                                          h200)) / measured - 1
    print(f"{megabytes:4} MB: measured {measured * 1e6:6.0f} us, your ring "
          f"{ring[megabytes]:+5.0%}, the library {library:+5.0%}")
print("most wrong:", max(ring, key=lambda size: abs(ring[size])), "MB - you said",
      my_worst_mb)

# %% [markdown]
# The smallest: your formula is {result: short_by | .0%} too short. Every collective also takes
# {result: 1e6 * collectives.CALL | .0f} µs from the call to the first byte, whatever its size, and the library adds that. Large
# messages are right, because only bandwidth counts for them. A measured table, such as that of `course bench kernels`, does
# better than any formula.
#
# A ring needs 2(n − 1) steps, which is many for large n. An all-reduce can use a *tree* instead: up to the root, adding, and
# down again. That takes 2·log₂(n) steps for as many bytes. NCCL takes whichever is faster, and so does the library. But NCCL
# normally runs the all-gather and reduce-scatter of ZeRO-1 (lesson 13) as rings, in n − 1 steps.
#
# > **Predict.** You average a bucket of 25 MB of gradients over 16,384 H200s, 8 in a node. A step takes 2 µs within a node and
# > 5 µs between nodes. An all-reduce takes {result: all_reduce_ms | .1f} ms. How long does the reduce-scatter take, which moves
# > half the bytes?

# %%
my_scatter = 0.25                # your prediction, in ms

# %%
for size in (8, 64, 1024, 16384):
    group = collectives.group_of([(1, size)], h200)
    print(f"{size:6} GPUs, 25 MB: all-reduce "
          f"{collectives.all_reduce(25e6, group) * 1e3:5.2f} ms, "
          f"reduce-scatter {collectives.reduce_scatter(25e6, group) * 1e3:6.2f} ms")
lab.beside("the reduce-scatter", my_scatter, collectives.reduce_scatter(25e6, group)
           * 1e3, "ms", "the library's")

# %% [markdown]
# The ring takes 14,336 steps within nodes and 2047 between them, with almost no bytes in each. The cure is fewer collectives:
# the planner enlarges its buckets with the number of ranks, as Megatron-LM does.
#
# > **Question.** Two nodes have 8 GPUs each, and each GPU has a network port of 50 GB/s (400 Gb/s). What is the bandwidth of a
# > ring over all 16 ranks of tensor parallelism? And of a ring over *one* GPU in each of many nodes?
#
# <details><summary>Answer</summary>
# A ring is as fast as its narrowest link. The first ring enters and leaves each node once, and has 8 ports for that: 400 GB/s.
# The second has one port per node, 50 GB/s, while seven rings like it use the other ports. In a node with <i>one</i> port for
# all GPUs, as in lesson 14's table, both kinds share it. A model has to know where each rank sits: the rank order of lesson 09.
# </details>

# %%
for name, stride, size in (("16 neighbors, two nodes", 1, 16),
                           ("one GPU in each of 16 nodes", 8, 16)):
    for chip in ("h200", "v100-16"):
        group = collectives.group_of([(stride, size)], hardware.load(chip))
        print(f"{name:28} {chip:8} 200 MB: "
              f"{collectives.all_reduce(200e6, group) * 1e3:6.1f} ms")

# %% [markdown]
# ## What overlaps
#
# A step does not wait for every message. Data parallelism sends gradients *beside* the backward pass (lesson 07). Only the last
# bucket, and what outlasts the backward pass, adds time. Every all-reduce of tensor parallelism adds time, because the next
# operation needs the sum.
#
# Recorded on 4 GPUs: 24 layers of width 1024 (302 million parameters), compiled. Without communication a step takes
# {result: alone_ms | .1f} ms. With one all-reduce of all gradients at its end ("naive") it takes {result: naive_ms | .1f} ms.
#
# > **Predict.** How long does it take with buckets of 100 MB beside the backward pass, which is two thirds of the step?

# %%
my_bucketed = 75.0               # your prediction

# %%
steps = {step.name.removeprefix("dp 4: "): step for step in recorded_steps.data()
         if step.gpus == 4}
buckets = "bucketed, compiled, 100 MB"
lab.recorded("dp_h200", {case: {"ms": steps[case].ms,
                                "the library predicts": steps[case].time.step * 1e3}
                         for case in ("none, compiled, 25 MB", "naive, compiled, 25 MB",
                                      buckets)}, why="Four GPUs")
lab.beside("bucketed", my_bucketed, steps[buckets].ms, "ms", "recorded")

# %% [markdown]
# Hidden communication is not free: of {result: naive_ms - alone_ms | .1f} ms the buckets save only
# {result: naive_ms - bucketed_ms | .1f}. NCCL's kernels occupy up to 32 of the 132 multiprocessors, so you might expect the
# matmuls to lose a quarter of their speed. But a matmul is cut for all 132. With fewer, its last pieces wait for a second wave.
#
# So the library charges hidden communication {result: block_time.BESIDE | .0%} of its time. This is its only number that was
# fitted to whole steps: six pairs of them, on one machine. The six pairs prove nothing. Test the number on steps that it was
# *not* fitted to: overlapped tensor parallelism (lesson 10) and the ring of lesson 11. With a guessed quarter, the median error
# of these predictions is {result: guess_error | .0%}; with {result: block_time.BESIDE | .0%} it is
# {result: overlap_error | .0%}. Remember this: *performance models are too optimistic about overlap*.
#
# ## The bubble
#
# If all ranks take equally long, a pipeline of p ranks with m micro-batches idles for (p − 1) / (m + p − 1) of its time (lesson
# 12). But the last rank takes longer: it also computes the logits. Let rank i need s_i seconds for one micro-batch, forward and
# backward. The slowest rank works on all m micro-batches. It waits once, while the first micro-batch passes through the other
# ranks, there and back. With v chunks on each rank (interleaved), this wait is v times shorter.
#
# ## Exercise: the seconds of a pipeline

# %% exercise="pipeline-seconds"
def pipeline_seconds(stages: Sequence[float], micros: int, chunks: int) -> float:
    """Seconds of a step of a pipeline: `stages` are the ranks' seconds for one micro-batch, forward and backward.

    The slowest rank runs all its micro-batches, and waits once for the others, less with `chunks` on each rank.
    """
    ### BEGIN SOLUTION
    *others, slowest = sorted(stages)
    return micros * slowest + sum(others) / chunks
    ### END SOLUTION

# %%
check("pipeline-seconds")

# %% [markdown]
# > **Predict.** Four ranks of 8 blocks need 1 second each per micro-batch. The logits cost the last one 0.3 s more. There are
# > 16 micro-batches. How many percent longer does a step take than without logits? They are 7.5% more work.

# %%
my_percent_longer = 7.5          # your prediction

# %%
plain, uneven = pipeline_seconds([1, 1, 1, 1], 16,
                                 1), pipeline_seconds([1, 1, 1, 1.3], 16, 1)
moved_on = pipeline_seconds([1.125, 1.125, 1.0, 0.75 + 0.3], 16, 1)
lab.beside("percent longer", my_percent_longer, 100 * (uneven / plain - 1), "%",
           "counted")
print(f"with 9, 9, 8 and 6 blocks: {100 * (moved_on / plain - 1):.0f}%")

# %% [markdown]
# Everybody waits for the slowest rank. Giving two blocks of the last rank to the first two recovers more than half of the loss.
# A large vocabulary is one reason why a pipeline is slower than its bubble suggests.
#
# ## The library's model
#
# You now have all the pieces. `course/planner/block_time.py` and `step_time.py` add them up, with more terms:
#
# - each matmul by its own shape, forward and backward; causal blocks on the diagonal; autocast's casts; recomputation;
# - context parallelism, ZeRO-1, and the price of overlap;
# - the host, which may be slower than the GPU (lesson 06), and the data loader (lesson 03).
#
# One configuration takes about a millisecond.

# %%
lab.show("course.planner.rank_workload.linear_time")
lab.show("course.planner.step_time.pipeline_time")

# %% [markdown]
# ## Predicted and recorded steps
#
# The course has recorded many training steps, each with its configuration. On one GPU they cover three kinds of model in every
# precision; on two and four GPUs tensor, context and data parallelism, ZeRO-1 and pipelines. Apart from the
# {result: block_time.BESIDE | .0%} above, nothing was fitted to them. The rates come from kernels measured one by one. The
# host's time comes from models of width 64, for which the GPU always waits (`course bench host`).
#
# > **Predict.** What is the median error, in percent? And the worst?

# %%
my_median, my_worst = 15.0, 80.0                     # your predictions, in percent

# %%
all_steps = recorded_steps.steps()
words = {"vit": "ViT, one GPU", "gpt": "GPT, one GPU", "dit": "DiT, one GPU",
         "tp": "tensor parallel", "cp": "context parallel",
         "dp": "data parallel", "zero": "data parallel", "pp": "pipeline"}
groups = {}
for step in all_steps:
    groups.setdefault(words[step.file.split("_")[0]],
                      []).append((step.ms, step.time.step * 1e3))
lab.picture(performance_model.scatter(groups, "ms", f"{len(all_steps)} steps on H200s"),
            "Predicted over measured time, against measured milliseconds: most points "
            "lie near 1, and most of the others below it")
off = sorted(all_steps, key=lambda step: -abs(step.error))
lab.beside("median error", my_median,
           100 * statistics.median(abs(step.error) for step in all_steps), "%")
lab.beside("worst error", my_worst, 100 * abs(off[0].error), "%")
print("\nthe worst:")
for step in off[:8]:
    print(f"    {step.error:+4.0%}  {step.ms:7.1f} ms  {step.name}")

# %% [markdown]
# **What you should see:** a small median, and a tail with reasons.
#
# - *Context parallelism, 16k tokens on four ranks:* the kernels are so short that the GPU waits for the host.
# - *Read by the training process:* the step waits for files. Without a loader, the model treats data as free.
# - *Steps of a few milliseconds:* their kernels are so small that bytes over bandwidth no longer describes them.
# - *The ViT on four tensor-parallel ranks:* they cannot share its 4050 tokens evenly. No term counts the copies that this
#   needs.
# - *PyTorch's DDP, compiled:* it cuts the graph at every bucket, and no term accounts for that.
#
# All of these are *overheads*: what a model leaves out makes its prediction too short. The uncompiled ViT with one sample is
# predicted too long. It waits for its host; the model assumes a median host, and this one was faster.
#
# ## Held out
#
# The authors of the model knew all these steps. A model is worth what it says about configurations that its authors have never
# seen. So they drew thirty by seed, over all axes on 1, 2 and 4 GPUs, and committed the list *before* they measured any
# (`course/bench/results/heldout.json`). The errors of this list improved the model, so it was no longer held out. They repeated
# this with a second list (`heldout_2.json`) and a third (`heldout_3.json`). Chance draws odd configurations: TF32 with tensor
# parallelism, uncompiled pipelines, recomputation that nobody needs.
#
# > **Predict.** You saw the median error of the steps above. What is it for the third list? And what is the worst error?

# %%
my_held_median, my_held_worst = 8.0, 30.0            # your predictions, in percent

# %%
drawn = {row["name"]: row for row in lab.results("heldout_3")["configurations"]}
held: dict[str, list[tuple[float, float]]] = {"one GPU": [], "two GPUs": []}
misses, apart = [], []
for row in lab.results("heldout_3_h200")["rows"]:
    # predicted_ms: from before it was measured
    about = drawn[row["name"]]
    held["one GPU" if about["gpus"] == 1
         else "two GPUs"].append((row["ms"], row["predicted_ms"]))
    wanted = ("parallel.dp", "parallel.tp", "parallel.cp", "parallel.pp", "precision",
              "compile", "train.recompute")
    words = [word.split(".")[-1] for word in about["settings"]
             if word.startswith(wanted) and not word.endswith("=1")]
    misses.append((row["predicted_ms"] / row["ms"] - 1,
                   f"{about['preset']} {' '.join(words)}"))
    # of the timed steps and the first one
    peak = max(row["memory_gb"], row["first_gb"])
    apart.append(abs(row["predicted_gb"] / peak - 1))
every = [abs(error) for error, _ in misses]
lab.picture(performance_model.scatter(held, "ms",
                                      "Configurations that nobody had seen"),
            "Predicted over measured time of held-out configurations, against "
            "milliseconds: on one GPU near 1, on two GPUs often below")
lab.beside(f"median error of {len(every)} steps", my_held_median,
           100 * statistics.median(every), "%")
lab.beside("worst error", my_held_worst, 100 * max(every), "%")
for name, points in held.items():
    print(f"{name}: {len(points)} steps, median error "
          f"{statistics.median(abs(y / x - 1) for x, y in points):.0%}")
print(f"their memory: median error {statistics.median(apart):.1%}, worst "
      f"{max(apart):.1%}\n\nthe worst times:")
for error, words in sorted(misses, key=lambda miss: -abs(miss[0]))[:6]:
    print(f"    {error:+4.0%}  {words}")

# %% [markdown] **What you should see:** on one GPU all predictions are within {result: max(map(abs, held(3, 1))) | .0%}. On two
# GPUs the median error is {result: half_off(held(3, 2)) | .0%}, and almost every prediction is too short. What one GPU does
# alone, kernel after kernel, is arithmetic. What two do *together* is not: they wait for each other's hosts, and a collective
# beside a matmul slows both. The third list improved the model, and a fourth followed. Its median error is
# {result: half_off(fourth[1]) | .0%} on one GPU, {result: half_off(fourth[2]) | .0%} on two and
# {result: half_off(fourth[4]) | .0%} on four. Its worst prediction is {result: -min(map(min, fourth.values())) | .0%} too
# short. Most of the worst cases wait for their host.
#
# Hosts differ, too. On machines of the same type, one small PyTorch step took {result: min(plain_steps) | .1f} to {result:
# max(plain_steps) | .1f} ms. A GPU's speed is a number; a host's is a wide distribution. If a step waits for its host, do not
# refine the formula. Launch fewer kernels (`graphs=true`), or put more work into each.
#
# Large errors also find bugs. A GPT in TF32 took {result: tf32_gb | .0f} GB instead of {result: tf32_predicted_gb | .0f}: in
# float32 PyTorch has no fused attention for grouped heads, so it kept every score. Another step was slow because
# `torch.compile` had silently skipped every block that leaves the compiler within a checkpoint. Both were bugs of the program,
# not of the model.
#
# ## Published measurements
#
# The rates come from H200s. On other GPUs the library assumes the same *efficiencies*: the same shares of their data sheets'
# numbers. That is a bet. Published numbers test it: V100s in 2021, A100s, H20s and H100s, other libraries, other authors.

# %%
by_group: dict[str, dict[str, float]] = {}
for case in published_steps.CASES:
    by_group.setdefault(case.group,
                        {})[f"{case.name} ({case.unit})"] = published_steps.error(case)
far = [case for case in published_steps.CASES if abs(published_steps.error(case)) > 0.2]
lab.picture(performance_model.errors(by_group, "Published measurements: the library's "
                                     "prediction, in the source's unit",
                                     limit=0.2),
            f"{len(published_steps.CASES)} dots, most within 20 percent of "
            f"zero. The others: "
            + ", ".join(f"{published_steps.error(case):+.0%} for {case.group}, "
                        f"{case.name}" for case in far))
errors_of = [abs(published_steps.error(case)) for case in published_steps.CASES]
print(f"{len(errors_of)} measurements: median error "
      f"{statistics.median(errors_of):.0%}; over 20%:")
for case in far:
    print(f"    {published_steps.error(case):+4.0%}  {case.group}, {case.name}: "
          f"{case.why or 'not explained'}")

# %% [markdown]
# > **Question.** In ms, a positive error means that the prediction is too long; in samples/s, that it is too fast. Which kind
# > of large error would you rather explain to your manager?
#
# <details><summary>Answer</summary>
# Neither, but too fast is the dangerous one: the budget is gone before the model is trained. torchtitan's FSDP does work that
# the library's ZeRO-1 does not. Nobody here can explain all of the difference, nor that of the ViT on A100s. So the list says
# what is not explained.
# </details>
#
# ## Where such models fail
#
# - **Overlap.** Two kernels at a time share multiprocessors, memory and power. No formula says how.
# - **Clocks.** A chip's rate depends on its power, and its power on the *values* that it multiplies (zeros are cheap) and on
#   its neighbors.
# - **Networks.** The formula assumes an empty network, without other people's jobs.
# - **The slowest of many.** A step on 10,000 GPUs ends with the last of them. One GPU in a thousand that is 10% slow costs
#   everybody 10%.
# - **What is not modeled.** Today's host, fragmented memory, checkpoints, restarts.
# - **New code.** The model describes the code that it was written for. After a new kernel for GPT's loss, every prediction of
#   GPT was too slow until the model knew of it.
#
# So use a model for what it does well. It *ranks* layouts better than it times them, because most errors are common to all of
# them. It tells you what a step should take, so that you notice when it takes 30% longer. And it names the term to look at
# first.
#
# ## The planner
#
# You can ask a model that takes a millisecond about every layout. `course plan` tries all ways to write 64 GPUs as pp × dp × cp
# × tp. For each it tries all micro-batches and rank orders, with and without recomputation, sequence parallelism and ZeRO-1. It
# drops what the library refuses and what does not fit, and sorts the rest by time. In a terminal: `course plan gpt-7b --gpus 64
# --hardware h100-80 compile=true stream=narrow`. The cell below calls the same function.
#
# > **Predict.** GPT 7B, 1024 samples of 2048 tokens in a batch, on 64 H100s with 80 GB, 8 in a node. Which tp and pp will be
# > the fastest (dp is what remains), and what will the MFU be?

# %%
my_tp, my_pp = 8, 1              # your predictions
my_mfu = 40.0                    # in percent

# %%
FAST = ["compile=true", "stream=narrow"]
plan.main("gpt-7b", FAST, 64, "h100-80", top=6)

# %%
seven = config.load("gpt-7b", FAST)
fastest = search.find_layouts(seven, hardware.load("h100-80"), 64).layouts[0]
print(f"the fastest: tp={fastest.config.parallel.tp} pp={fastest.config.parallel.pp}; "
      f"you said tp={my_tp} pp={my_pp}")
lab.beside("MFU", my_mfu, 100 * fastest.time.mfu, "%", "the library's")

# %% [markdown]
# **What you should see:** no tensor parallelism, or only two ranks of it. Compiled and with ZeRO-1, a model of 7 billion
# parameters fits into 80 GB without being cut. The planner keeps 5% of the memory free (`--free`), because a prediction may err
# by that much, and a run that lacks a gigabyte stops. Micro-batches of 4 samples just miss these 5%, so the planner recomputes
# something. That costs less than micro-batches of 2, which add up gradients twice as often, and less than tp = 2.
#
# Do not cut what you need not cut: tp sends many messages that the step waits for; dp sends few, and hides most. The first
# layouts differ by a few percent, which is less than the model's error. Choose between them by what the model does not know:
# more memory to spare, or a layout that you have run before.
#
# > **Question.** How does the list change for A100s with 40 GB?

# %%
plan.main("gpt-7b", FAST, 64, "a100-40", top=3)

# %% [markdown]
# With tp = pp = 1 nothing fits, even with recomputation. ZeRO-1 shards only the optimizer states, so weights, gradients and
# work space alone are too much. Now tp = 2 is the fastest, and pp = 2 comes close. If a layout does not fit, the planner says
# what its nearest variant needs, and which term is the largest.
#
# ### How long?
#
# > **Predict** again, with the table in front of you: days for 134 billion tokens on 64 H100s.

# %%
my_days_now = 4.0                # your prediction

# %%
seconds = 134e9 / (seven.train.global_batch * seven.model.context) * fastest.time.step
lab.beside("days, your first guess", my_days, seconds / 86400, "days", "the library's")
lab.beside("days, now", my_days_now, seconds / 86400, "days", "the library's")
print("\nThe same by `course plan ... --tokens 134e9`:", plan.duration(
    search.find_layouts(seven, hardware.load("h100-80"),
                        64), fastest, 1, 134e9 / seven.model.context))

# %% [markdown]
# The largest error of this number is not in the model. It is everything that is not a step: broken GPUs, checkpoints, restarts,
# evaluation, a run that has to be done again. A good plan adds at least a fifth, and says so.
#
# > **Question.** Why not take 4096 GPUs, and finish within the hour?

# %%
counts = [64, 128, 256, 512, 1024, 2048, 4096]
rates = [seven.train.global_batch / search.find_layouts(seven, hardware.load("h100-80"),
                                                        gpus).layouts[0].time.step
         for gpus in counts]
ideal = [rates[0] * n / 64 for n in counts]
lab.picture(style.curves({"the fastest layout": (counts, rates),
                          "ideal": (counts, ideal)}, "GPUs", "samples/s",
                            "GPT 7B, 1024 samples a step: strong scaling"),
            "Samples per second against GPUs: near the ideal line at first, then "
            "further and further below it")
print({n: f"{rate / rates[0] / n * 64:.0%} efficient"
       for n, rate in zip(counts, rates, strict=True)})

# %% [markdown]
# <details><summary>Answer</summary>
# The batch stays at 1024 samples, or training changes (lesson 08). On 4096 GPUs, four share a sample. tp or pp have to cut what
# dp no longer can. The step waits for tp's messages, and bubbles grow as micro-batches become few. This is <b>strong
# scaling</b>, and every batch reaches its end.
# </details>
#
# ## Adding up
#
# Now write the sum yourself. A `Run` is a training step as numbers; `Rates` are what its kernels reach:

# %%
lab.show("course.lab.instruments.recorded_runs.Run")
lab.show("course.lab.instruments.recorded_runs.Rates")

# %% [markdown]
# ## Three runs
#
# All three are real, and were recorded on H200s with this course. You will predict their times with your own sum.
#
# - **one GPU**: GPT 1.3B, 8 × 2048 tokens, bf16, compiled: a whole step with Adam.
# - **tensor parallel**: 8 layers of width 4096 on 2 GPUs, 4 × 4096 tokens, uncompiled, forward and backward.
# - **pipeline**: 16 layers of width 4096 on 4 GPUs, 1F1B, 16 micro-batches of 4096 tokens, uncompiled, forward and backward.

# %%
runs = recorded_runs.runs()
for name, run in runs.items():
    print(f"{name}: {run}\n")

# %% [markdown]
# ## Exercise: the seconds of a step
#
# Use your functions. Keys and values have the full width, activations are bf16, and nothing overlaps. So all times add up,
# except those of pipeline ranks that work side by side. Decide three things about each term. Does it belong to one sample, or
# to the whole micro-batch? Does tp cut it, or does every rank have all of it? Does it occur once per block, per micro-batch or
# per step?
#
# - A rank **computes** at two rates, **moves** bytes to and from its memory, and **sends**. Lesson 10 says which messages a
#   block needs, forward and backward, and of which tensor.
# - The **ranks of the pipeline** share the blocks evenly, but they are not alike. One of them turns D numbers per token into
#   logits, forward and backward. This is a linear map like any other, and tp cuts it by the vocabulary.
# - The **optimizer** waits for the last micro-batch.
#
# Try it on paper first, with every rate 1 and no latency. `Run(samples=2, micros=1, tokens=1, dim=1, hidden=1, depth=1,
# vocab=1, causal=False, tp=1, pp=1, moved=3, update=5)` takes 120 seconds, and the linear maps in the block take 72 of them.
# Which five terms make up the 120? With `tp=2` it takes 80: two of these terms do not shrink, and a new one appears. With
# `pp=2, depth=2, micros=2` it takes 338.

# %% exercise="step-seconds"
def step_seconds(run: Run, rates: Rates) -> float:
    """Seconds of a step: what the pieces of this lesson add up to. Nothing overlaps; the last rank of a pipeline has the head."""
    ### BEGIN SOLUTION
    n = run.samples * run.tokens                    # of a micro-batch
    maps, scores = (run.samples * x / run.tp for x in block_flops(run.tokens, run.dim, run.hidden, run.dim, run.causal))
    messages = 4 * all_reduce_seconds(2.0 * n * run.dim, run.tp, rates.latency, rates.bandwidth)
    one = maps / rates.matmul + scores / rates.attention + run.moved / rates.memory + messages
    logits = 6 * n * run.dim * run.vocab / run.tp / rates.matmul
    ranks = [run.depth / run.pp * one + (logits if rank == run.pp - 1 else 0) for rank in range(run.pp)]
    return pipeline_seconds(ranks, run.micros, 1) + run.update / rates.memory
    ### END SOLUTION

# %%
check("step-seconds")

# %% [markdown]
# First predict the three runs as a salesperson would: with the rates of the data sheet.

# %%
sheet = Rates(matmul=h200.peak("bf16"), attention=h200.peak("bf16"),
              memory=h200.bandwidth, latency=0.0, bandwidth=450e9)
for name, run in runs.items():
    print(f"{name:16} {1e3 * step_seconds(run, sheet):6.0f} ms")

# %% [markdown]
# > **Predict.** Now choose the rates that you expect each run to reach, from what you have seen in this lesson. Compiled
# > kernels move bytes faster than PyTorch's own. An activation is 67 MB on one GPU, 134 MB with tensor parallelism and 34 MB in
# > the pipeline. At 134 MB the links of two GPUs carry {result: bus_of_two | .0f} GB/s. Do not go on before you would bet on
# > your prediction.

# %%
# of the data sheet
half = Rates(matmul=495e12, attention=495e12, memory=2.4e12, latency=2e-6,
             bandwidth=225e9)
# your predictions: Rates(...)
my_rates = {"one GPU": half, "tensor parallel": half, "pipeline": half}
my_ms = {name: 1e3 * step_seconds(run, my_rates[name]) for name, run in runs.items()}
print({name: round(ms) for name, ms in my_ms.items()})

# %%
recorded_runs.compare_predictions(my_ms)

# %% [markdown]
# "Half of the data sheet", which the cell above starts with, is a popular rule. The steps that it predicts are much too long.
# Now take this lesson's rates: 670 TFLOP/s for matmuls, attention's at these numbers of tokens, memory's for compiled or
# PyTorch's kernels, and a link's at these sizes.

# %%
told = {"one GPU": Rates(matmul=670e12, attention=440e12, memory=2.6e12, latency=2e-6,
                         bandwidth=350e9),
        "tensor parallel": Rates(matmul=670e12, attention=500e12, memory=2.0e12,
                                 latency=2e-6, bandwidth=290e9),
        "pipeline": Rates(matmul=670e12, attention=500e12, memory=2.0e12, latency=2e-6,
                          bandwidth=350e9)}
recorded_runs.compare_predictions({name: 1e3 * step_seconds(run, told[name])
                                   for name, run in runs.items()})

# %% [markdown]
# A few lines of arithmetic, with nothing fitted to a step, are close on one GPU and with tensor parallelism. For the pipeline
# both your sum and the library's model are too long. The library's predictions, in pieces:

# %%
chosen = recorded_runs.recorded_run_steps()
milliseconds = {name: step.ms for name, step in chosen.items()}
lab.picture(performance_model.times({name: step.time for name, step in chosen.items()},
                                    milliseconds,
                               "Predicted steps in pieces; diamonds: recorded"),
            "Three bars: matmuls are the longest piece of each, then kernels bound by "
            "memory, attention, and at the end optimizer, tensor parallelism or "
            "bubble. The diamonds lie at the ends of the bars or a little before")

# %% [markdown]
# ## With sliders
#
# The bars show a layout's memory and time in pieces. Black diamonds are recorded. A layout that the library refuses shows the
# same message as a run.
#
# > **Try.** (1) GPT 1.3B, batch 8, on 8 H200s: dp alone, or tp = 2? (2) *8 layers of 4096*, batch 4, on 1, 2 and 4 GPUs with
# > tp: how far are the diamonds from the bars? (3) What is the longest sequence of GPT 7B that fits on one H200 with a batch of
# > 1? Which slider helps?

# %%
slider = widgets.explore(performance_model.explore_step, start=performance_model.START,
                         **performance_model.SLIDERS,
                         alt="Two bars in pieces: the memory of the fullest GPU, with "
                         "a line for its capacity, "
                             "and the time of a step. Beside them: samples per second "
                         "against the number "
                             "of GPUs. Black diamonds are measurements, where "
                         "there are any.")

# %% [markdown]
# <details><summary>Answers</summary>
# (1) They are about equal: {result: rate_zero | .0f} samples/s with ZeRO-1, {result: rate_whole | .0f} without. dp has more
# gradients than one sample can hide, and tp waits for its messages. With ZeRO-1 both wait for the host (gray). (2) Within
# {result: tensor_error | .0%}. (3) {result: tokens_none | ,} tokens; with <code>recompute</code> selective
# {result: tokens_selective | ,}, full {result: tokens_full | ,}.
# </details>
#
# ## Open task: plan for an unknown machine
#
# *Optional, about 50 minutes. Nothing later needs it.* You get a new machine. Nobody knows what its kernels and links reach,
# and each measurement is a real run that costs GPU-hours. Find the fastest layout of a model with few measurements. Our
# solution has about 20 lines.
#
# `layouts(model, machine)` lists all layouts. `needs` gives a layout's bytes, and is exact. `seconds` gives its time **if** you
# know the five speeds: it is your sum from this lesson, with the data-parallel all-reduce added. Both are free to call.

# %%
from course.lab.exercises.lesson17_open_task import needs, seconds
from course.lab.instruments.unknown_machine import Machine, Model, Speeds, layouts

lab.show("course.lab.instruments.unknown_machine.Speeds")
lab.show("course.lab.exercises.lesson17_open_task.seconds")
model = Model(tokens=2048, dim=4096, hidden=16384, depth=32, vocab=50304, batch=256)
machine = Machine(gpus=32, node=8, memory=80e9, latency=1e-5)
fitting = [one for one in layouts(model, machine)
           if needs(model, one) <= machine.memory]
print(len(layouts(model, machine)), "layouts,", len(fitting), "of them fit, such as",
      fitting[0])
print(seconds(model, machine, fitting[0], Speeds(6e14, 4e14, 2.5e12, 3e11, 4e10)),
      "seconds at the speeds of H200s with 400 Gbit/s for each GPU")

# %% [markdown]
# **Contract**
#
# - `plan_layout(model, machine, measure)` returns a layout that fits and is within 3% of the fastest, or `None` if none fits.
# - `measure(layout)` returns the seconds of a step on this machine. If the layout does not fit, it returns infinity. Such a
#   call counts too.
# - A machine's time is exactly what `seconds` says at its speeds. The speeds are hidden, and differ from machine to machine by
#   factors of 4 to 50.
#
# **Levels.** The check has six machines or more; one has too little memory. Each level counts by itself, once the first is
# reached:
#
# | level | what the check counts |
# |---|---|
# | correct | the layout of every machine, with at most 400 measurements of each |
# | 30 measurements | at most 30 of each machine |
# | 10 measurements | at most 10 of each machine |
#
# Start with correct. `lab.hint("plan-layout")` opens the first of three hints, and each further call opens the next one.

# %% exercise="plan-layout"
from course.lab.exercises.lesson17_open_task import plan_layout  # noqa: F401

# %%
check("plan-layout")

# %% [markdown]
# ## Summary
#
# - Linear maps execute 6 FLOPs per weight and token, attention 14·T²·D, or half of that with a causal mask.
# - Large matmuls reach {result: layer_share | .0%} of the peak. Everything but matmuls and attention is bytes over bandwidth.
# - Memory is counting: sequence parallelism shards what tensor parallelism leaves whole.
# - A message costs latency per step and bytes over the narrowest link, and hidden messages cost time too.
# - Compare predictions with measurements, explain the errors, and trust the *order* of layouts more than their seconds.
#
# ## Questions
#
# 1. Nothing in the pipeline run is slower than computed. What could be *faster*?
# 2. A fitted factor would remove the error of the pipeline run. Why does the library have no such factor?
# 3. A new GPU has twice the FLOP/s and the same memory bandwidth. By how much would the one-GPU run get faster?
#
# <details><summary>A guess about question 1</summary>
# The ranks rest during the bubble, and micro-batches come one by one. A cooler chip has a higher clock than one that never
# rests. Watch the clock to find out: <code>nvidia-smi --query-gpu=clocks.sm --format=csv -l 1</code>.
# </details>
#
# **Check your work from a terminal.** Save the notebook, then run `course check notebooks/17_performance_model_mine.ipynb` in a
# terminal. Next: [lesson 18](18_cluster.ipynb), in which all of this runs on a cluster while nobody watches.
