# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 04 · Mixed precision
#
# 16-bit numbers halve the bytes that a model moves, and tensor cores multiply them several times as fast. No other
# change makes a model so much faster for so little work. But formats with few bits have a narrow range, and small
# updates vanish in them. You find out where that happens and write what prevents it. Then you go down to 8 bits.
#
# **What you will learn**
#
# - which numbers fp16, bf16 and FP8 can hold, and what `autocast` does with them;
# - why weights stay in float32, and how a loss scale rescues the gradients of fp16;
# - what an FP8 scale is, where it comes from, and when FP8 pays.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU: the CPU emulates FP8, with the same bits as a GPU |
# | reading and doing | about two hours |
# | computing | 1 minute on two cores |
# | you write | a loss scaler (5 lines), a cast to FP8 (2), an amax history (1), its scale (2); optional: float16 training (35) |
# | you measure | what vanishes in which format; loss curves in fp32, bf16 and FP8; and read the speeds of an H200 |
#
# Do [lesson 01](01_baseline.ipynb) first. Work in a copy: *File → Save Notebook As…*, `04_mixed_precision_mine.ipynb`.

# %% numbers=true
from course.bench import results

LINEARS = ("qkv", "out", "up", "down")           # of a layer of width 4096


def step_speed(case):
    """Samples a second of the weather model on an H200."""
    return results.value("vit_h200", case, "samples_per_s")


def layer_ms(*kinds):
    """Milliseconds over the four linears of a layer."""
    cases = [f"{linear}: {kind}" for linear in LINEARS for kind in kinds]
    return sum(results.value("fp8_h200", case, part="parts") for case in cases)


def pays_from_width(passes=1):
    """The width from which FP8 pays, if a cast costs so many passes."""
    products = layer_ms("y, bf16", "dx, bf16", "dW, bf16") - layer_ms("y", "dx", "dW")
    gain = products - passes * layer_ms("cast W")
    return 4096 * passes * layer_ms("cast x", "cast dy") / gain


def linears_share(width, tokens=4050):
    """Of a layer's FLOPs."""
    return 24 * width**2 / (24 * width**2 + 4 * tokens * width)


def fp8_speedup(shape):
    """FP8 over bf16 in a short run of matmuls."""
    bf16, fp8 = results.load("beginning_h200")["matmul"][shape]
    return fp8 / bf16


curve_gaps = results.load("curves_h200")["gap"]
native_cases = ("native fp8, delayed", "native fp8, current")
renewed_gaps = [gap for case, gap in curve_gaps.items()
                if case.startswith("TE") or case in native_cases]
fp8_small, fp8_large = fp8_speedup("64800x384x1536"), fp8_speedup("8192x8192x8192")

# %%
import torch
from torch import Tensor

from course.training.assemble import Training
from course.training.assemble import assemble as assemble_training
from course import config, data, parallel
from course.fp8 import native
from course.models.layers import Linear
from course.ops import number_formats
from course.config import schema
from course.data.weather import simulation
from course.lab.figures import number_formats as format_figures
from course.lab.figures import style
from course.lab import notebook as lab
from course.lab.notebook import check
from course.bench import timing
from course.lab.instruments import loss_curves

lab.begin("04")
torch.set_num_threads(1)         # these models are too small for several cores
weather = schema.build(simulation.Weather, {"path": "data/weather-32x64"}, "weather")
simulation.make(weather)         # lesson 01 made it already

# %% [markdown]
# ## Bits
#
# A floating-point number is $\pm\,1.m \times 2^e$. The **exponent** bits ($e$) set the range of a format. The
# **mantissa** bits ($m$) set its resolution. Between two neighboring powers of two there are always
# $2^{\text{mantissa bits}}$ numbers. The step size doubles with each power of two, so precision is *relative*.
#
# | format | bits | exponent | mantissa | |
# |---|--:|--:|--:|---|
# | fp32 | 32 | 8 | 23 | float32, "single" |
# | tf32 | 19 of 32 | 8 | 10 | how tensor cores read float32, if you allow it |
# | fp16 | 16 | 5 | 10 | |
# | bf16 | 16 | 8 | 7 | the upper half of a float32 |
# | E5M2 | 8 | 5 | 2 | the upper half of an fp16 |
# | E4M3 | 8 | 4 | 3 | has no infinities, so it reaches 448 |
#
# > **Predict.** What is the largest number in fp16? And what is 256 + 1 in bf16?

# %%
my_largest = 1000.0              # your prediction
my_sum = 257.0

# %%
lab.beside("the largest fp16", my_largest, torch.finfo(torch.float16).max,
           how="exactly")
sum_in_bf16 = (torch.tensor(256.0, dtype=torch.bfloat16) + 1).item()
print(f"256 + 1 in bf16 is {sum_in_bf16:g}; you predicted {my_sum:g}")
lab.picture(format_figures.ranges(),
            "A bar for each format over powers of two. fp32, tf32 and bf16 reach from "
            "-126 to 128. Their pale subnormal parts add 23, 10 and 7 powers below. "
            "fp16 reaches from -24 to 16, E5M2 from -16 to 16, E4M3 from -9 to 9")
lab.picture(format_figures.steps(),
            "The numbers from 1 to 8 as ticks: bf16 has 128 between two powers of "
            "two, E4M3 eight, E5M2 four")

# %% [markdown]
# A sum of squares soon exceeds 65,504. And bf16 has no 257: its steps between 256 and 512 are 2.
#
# So **fp16** has fine steps and a narrow range. **bf16** has the range of float32 and coarse steps. **tf32** has both,
# but saves no memory: it only makes multiplication faster. In the pale parts of the picture, numbers are *subnormal*.
# They lose one mantissa bit with each power of two, until nothing is left.
#
# ## What autocast does
#
# Nobody trains in 16 bits throughout. **Mixed precision** gives each operation the format that it tolerates. Matrix
# multiplications, which take most of the time, run in 16 bits. Sums over many numbers (norms, softmax, the loss) run in
# 32. PyTorch's `autocast` decides by a list of operations. It casts the *inputs* of an operation, and it casts the
# weights again in each forward pass.
#
# > **Predict.** Take a forward pass inside `autocast` to bf16. In which format do these return their results: the product for
# > queries, keys and values; a norm; the residual sum; the loss? And in which format are the gradients of the weights?

# %%
cpu = torch.device("cpu")


def assemble(*overrides: str) -> Training:
    """The model of `make demo` with its optimizer and training step."""
    settings = config.load("vit-demo", ["optim.schedule=constant", "train.device=cpu",
                                        *overrides])
    return assemble_training(settings,
                             parallel.build_mesh(settings.parallel,
                                                 parallel.World(device=cpu)))


training = assemble()
model, formats = training.model, dict[str, torch.dtype]()
parts = {"embed.proj": "embedding", "blocks.0.norm1": "norm",
         "blocks.0.attn.qkv": "queries, keys, values",
         "blocks.0.attn.core": "attention", "blocks.0.mlp.up": "MLP, first matrix",
         "blocks.0": "the residual sum after a block",
         "head.norm": "last norm", "head.proj": "head"}
handles = [model.get_submodule(name).register_forward_hook(lambda m, given, out,
                                                           name=name: formats.update(
                                                               {name: out.dtype}))
           for name in parts]
batch = model.prepare(model.example(4, cpu), torch.tensor(0))
with number_formats.autocast("bf16", cpu):
    output = model(batch)
total, weight = model.loss(output, batch)
(total / weight).backward()
for handle in handles:
    handle.remove()
for name, what in parts.items():
    print(f"{what:32} {formats[name]}")
print(f"{'loss':32} {total.dtype}")
print(f"{'weights, and their gradients':32} {next(model.parameters()).dtype}, "
      f"{next(model.parameters()).grad.dtype}")

# %% [markdown]
# Large matrix products return 16 bits. Whatever is added up stays in 32: the residual stream, the norms, the loss, the
# weights and their gradients.
#
# > **Question.** Autocast casts float32 weights in every forward pass. Why not keep the weights in bf16? That saves the
# > casts and half of the memory. Write down what you think; the next section measures it.
#
# ## What vanishes
#
# Near 1 the steps of bf16 are 1/128. Add 0.003 to 1.0 a thousand times:

# %%
x = {kind: torch.ones((), dtype=kind) for kind in (torch.float32, torch.bfloat16)}
for _ in range(1000):
    for value in x.values():
        value += 0.003
print({str(kind): round(value.item(), 3) for kind, value in x.items()})

# %% [markdown]
# The bf16 number stays 1 forever. Rounding removes every addend smaller than **half a step**. Training consists of such
# additions: a weight of 0.1 plus an update of 0.0001.
#
# Train the model for 60 steps on the weather data and look at the last update of each weight. Adam's update is the
# learning rate times a number near 1. So you can compute what *another* learning rate would have lost.
#
# > **Predict.** Large models often use a learning rate of 0.0001. If you kept all weights in bf16, what percentage of
# > them would this update leave unchanged?

# %%
my_lost = 10                     # your prediction, percent

# %%
training = assemble()
# of each linear's output in the last step
gradients: dict[str, Tensor] = {}
# the largest magnitude of each, step by step
amaxes: dict[str, list[float]] = {}


def watch(name: str):
    """A hook that records the gradient of a linear's output."""
    def look(grad: Tensor) -> None:
        gradients[name] = grad.detach()
        amaxes.setdefault(name, []).append(grad.abs().max().item())

    def hook(module, given, out) -> None:
        out.register_hook(look)
    return hook


for name, module in training.model.named_modules():
    if name.startswith("blocks.") and isinstance(module, Linear):
        module.register_forward_hook(watch(name))
loader = data.train_loader(training.config, training.mesh.dp, cpu, 0,
                           training.model.example)
for number in range(60):
    if number == 59:
        before = torch.cat([p.detach().flatten().clone()
                            for p in training.model.parameters()])
    training.step(next(loader))
loader.close()
after = torch.cat([p.detach().flatten() for p in training.model.parameters()])
direction = (after - before) / training.config.optim.lr


def lost(lr: float) -> float:
    """Percent of the weights that an update leaves unchanged in bf16."""
    weights = before.bfloat16()
    return 100 * ((weights.float() + lr * direction).bfloat16()
                  == weights).float().mean().item()


rates = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2]
lab.beside("weights that do not move", my_lost, lost(1e-4), "%")
lab.picture(style.curves({"weights kept in bf16": ([f"{rate:g}" for rate in rates],
                                                   [lost(rate) for rate in rates])},
                           "learning rate", "% that do not move", "One step of Adam"),
            f"A falling curve: {lost(1e-5):.0f}% of the weights do not move with a "
            f"learning rate of 0.00001, {lost(3e-4):.0f}% with 0.0003, and "
            f"{lost(1e-2):.0f}% with 0.01")

# %% [markdown]
# **What you should see:** about four fifths. Lost updates do not add up: rounding removes each one, however often it
# comes. When the schedule lowers the learning rate, training with bf16 weights stalls.
#
# So the optimizer keeps float32 weights, the **master weights**, and makes 16-bit copies when they are needed. Autocast does
# just that (Micikevicius et al. 2018, *Mixed precision training*, arXiv:1710.03740). Other frameworks, such as Megatron-LM,
# keep bf16 weights and a float32 copy in the optimizer. Both need 16 bytes per parameter. bf16 weights whose gradients
# accumulate in float32 need 18 (lesson 13). Stochastic rounding is an alternative: small updates then count on average.
#
# Do lost updates change the loss? Train a small model twice from the same weights, in bf16 with a small learning rate. In the
# second run, round the weights to bf16 after each step.
#
# > **Predict.** By what percentage will the loss of the second run be higher after 160 steps?

# %%
my_worse = 50.0                  # your prediction, percent


# %%
def small_run(rounded: bool, steps: int = 160) -> Tensor:
    """Losses of the small task of `course.lab.instruments.loss_curves`, in means of 20,
    without the first."""
    small = loss_curves.assemble(("precision=bf16", "optim.lr=3e-4",
                                  "optim.schedule=constant", "optim.warmup=1"), cpu)
    found = []
    for batch in loss_curves.batches(steps + 1):
        found.append(small.step(batch)[0])
        for p in small.model.parameters() if rounded else ():
            p.data = p.data.bfloat16().float()
    return loss_curves.means(torch.stack(found[1:]))


ends, master, rounded = range(20, 161, 20), small_run(False), small_run(True)
lab.beside("higher without master weights", my_worse,
           100 * (rounded[-1] / master[-1] - 1).item(), "%")
lab.picture(style.curves({"master weights in float32": (ends, master.tolist()),
                            "weights rounded to bf16": (ends, rounded.tolist())},
                         "step", "loss, means of 20",
                           "The same model, the same batches"),
            "Two falling curves. The curve of the rounded weights stays above the "
            "other, by a few percent at the end")

# %% [markdown]
# **What you should see:** the second model learns, but a few percent worse, and the gap grows. There is no error and no
# NaN: the loss is just higher than it could be. Most precision mistakes look like this. That is why this lesson compares
# everything with a curve that is known to be right.
#
# ## fp16: gradients underflow
#
# Weights are about 0.1, activations about 1. How large are gradients? The next picture shows the gradients of all linear
# outputs in your last training step, and the ranges of the formats.
#
# > **Predict.** If you cast these gradients to fp16, what percentage of them becomes zero?

# %%
my_zeros = 1.0                   # your prediction, percent

# %%
last = torch.cat([grad.flatten() for grad in gradients.values()])


def zeros(x: Tensor) -> float:
    """Percent of the numbers that fp16 rounds to zero."""
    return 100 * ((x.half() == 0) & (x != 0)).float().mean().item()


lab.beside("gradients that become zero in fp16", my_zeros, zeros(last), "%")
lab.picture(format_figures.magnitudes({"gradients of the linears' outputs": last,
                                       "weights": after},
                                     {"bf16": 1.0, "fp16": 1.0,
                                      "fp16, loss times 65536": 2.0**16},
                                     "Numbers of one training step"),
            "Two humps over powers of two: weights around -5, gradients around -22, "
            "from -34 to -14. Three bars lie below. bf16 covers all numbers. fp16 "
            "ends at -24, among the gradients. With the scaled loss, fp16 ends at -40")

# %% [markdown]
# About a quarter become zero. Nearly all others are subnormal, with a few bits left. There is an elegant way out. All
# gradients are proportional to the loss. Multiply the **loss** by 65,536, and every gradient grows by 16 powers of two.
# Divide by it before the optimizer's step, in float32. Multiplying by a power of two rounds nothing.

# %%
print(f"with the loss times 65536, {zeros(last * 2.0**16):.4f}% become zero")

# %% [markdown]
# > **Question.** Why not multiply by 2¹⁰⁰ and be safe?
#
# <details><summary>Answer</summary>
# Numbers beyond 65,504 become infinite, and one infinity in a gradient spoils the whole step. The best scale is as large
# as possible without overflow. And gradients change their size during training.
# </details>
#
# ## Exercise: a dynamic loss scaler
#
# A dynamic scaler finds its own scale. It starts high. If a gradient is not finite, `train_step` skips the step (lesson
# 01), and the scaler **halves** the scale. After `GROW_AFTER` = 2000 good steps *in a row* it **doubles** the scale, as a
# trial, and restarts the count.
#
# `next_scale(precision, scale, good, bad)` returns the scale and the count of good steps after a step. `bad` is 1.0 for a
# bad step, else 0.0. All three are tensors on the device. An `if bad:` would make the host wait for the GPU in each step.
# Compute both outcomes and choose with `torch.where(condition, this, that)`. Return new tensors, or update `scale` and
# `good` in place and return them. Formats other than `"fp16"` keep their scale and their count.

# %% exercise="loss-scaler"
from course.ops.number_formats import next_scale

# %%
check("loss-scaler")

# %% [markdown]
# Watch your scaler at work. In this simulation the largest gradient shrinks during training and jumps now and then.
#
# > **Predict** the curve of the scale. In 20,000 steps, how often does the scaler skip a step: a dozen, hundreds or
# > thousands of times?

# %%
my_skipped = 500                 # your prediction

# %%
generator = torch.Generator().manual_seed(0)
largest = 0.3 * torch.exp(-torch.arange(20_000)
                          / 6000) * torch.exp(0.25 * torch.randn(20_000,
                                                                 generator=generator))
scale, good = torch.tensor(2.0**24), torch.tensor(0)
scales, skipped = [], 0
for amax in largest:
    bad = (amax * scale > torch.finfo(torch.float16).max).float()
    scale, good = next_scale("fp16", scale, good, bad)
    scales.append(scale.log2().item())
    skipped += int(bad)
lab.beside("skipped steps", my_skipped, skipped, how="counted")
lab.picture(style.curves({"loss scale": (range(0, 20_000, 20), scales[::20]),
                            "the largest that would not "
                          "overflow": (range(0, 20_000, 20),
                                      (65504 / largest[::20]).log2().tolist())},
                         "step", "power of two",
                         "The scale falls at once, then follows by trial and error"),
            "The largest scale without overflow is a noisy rising curve. The loss "
            "scale below it is a staircase. It falls from 24 within a few steps and "
            "then climbs slowly. Now and then it steps up and at once down again")

# %% [markdown]
# **What you should see:** a few skipped steps at the beginning, then one for each failed trial. fp16 costs far less than
# one percent of the steps. (`torch.amp.GradScaler` starts at 65,536 and also doubles after 2000 good steps.)
#
# > **Question.** Why does bf16 need none of this?
#
# <details><summary>Answer</summary>
# It has the exponent of float32: bf16 holds whatever float32 holds, only more coarsely. This is why bf16 has replaced
# fp16 for training wherever the hardware supports it.
# </details>
#
# ## How much faster?
#
# First your machine. CPUs with bf16 instructions (AMX, AVX512-BF16, Arm's BFMMLA) multiply bf16 faster than float32.
# Other CPUs convert the numbers and are slower.
#
# > **Predict.** A multiplication of 1024 × 1024 matrices: how many times as fast is it in bf16?

# %%
my_speedup = 2.0                 # your prediction

# %%
device = torch.device("cuda" if lab.gpu() else "cpu")
seconds = {kind: timing.matmul(1024, 1024, 1024, kind, device)
           for kind in (torch.float32, torch.bfloat16)}
lab.beside("bf16 over float32, here", my_speedup, seconds[torch.float32]
           / seconds[torch.bfloat16], "times")

# %% [markdown]
# The data sheet of an H200 gives bf16 twice the peak of TF32. The reference model `vit-short` (4050 tokens) trains at
# {result: step_speed("tf32, on the device") | .0f} samples a second in TF32 and at
# {result: step_speed("bf16, on the device") | .0f} in bf16.
#
# > **Question.** bf16 gains far more than a factor of two. Where does the rest come from? What takes time in this model
# > besides its linears?
#
# <details><summary>Answer</summary>
# The fast fused attention kernels (cuDNN's and FlashAttention) exist for 16 bits only. In float32 PyTorch uses another kernel,
# which is several times slower. With 4050 tokens attention is most of the arithmetic. Norms, GELU and sums also move half the
# bytes. To see it, run <code>course profile vit-short</code> (lesson 02) with both formats.
# </details>
#
# ## FP8
#
# Eight bits give 256 patterns, including the signs. The tensor cores of Ada, Hopper and Blackwell GPUs multiply them
# twice as fast as bf16. Compare the ranges: E4M3 spans 18 powers of two from its smallest to its largest number, E5M2
# spans 32. Gradients spread over 20 powers and more, and each layer's gradients occupy a different range. One loss scale for
# everything is not enough. So each *tensor* gets its own scale before it is cast:
#
# 1. find the largest magnitude of the tensor, its **amax**;
# 2. multiply the tensor by a **scale** that maps amax to the largest number of the format;
# 3. cast, and clip whatever lies beyond the largest number;
# 4. multiply the matrices, and divide the result by both scales.
#
# ## Exercise: the cast
#
# Write steps 2 and 3. `torch.finfo(kind).max` is the largest number of a format. Clip *before* you cast. Otherwise a
# number that is too large becomes infinity, NaN or the largest number, depending on format, device and version.

# %% exercise="fp8-cast"
from course.lab.exercises.lesson04_mixed_precision import to_fp8

# %%
check("fp8-cast")

# %% [markdown]
# > **Question.** Your function turns an infinity into the largest number. Why is that dangerous in training?
#
# <details><summary>Answer</summary>
# It hides an earlier overflow. The step would not be skipped, and the weights would follow a meaningless gradient. The
# library's cast turns every number that is not finite into NaN, so the training step notices it.
# </details>

# %%
lab.show("course.fp8.native.quantize_plain")

# %% [markdown]
# This function does what yours does. It also records the amax and writes a transposed copy for the backward pass. On a
# GPU one kernel does all of it.
#
# > **Predict.** Cast normally distributed numbers to E4M3 with the right scale, then divide by the scale. How large is
# > the error in the 2-norm, in percent? (With three mantissa bits, the step is an eighth of the power of two.) And in
# > E5M2?

# %%
my_error = {"E4M3": 10.0, "E5M2": 20.0}              # your prediction, percent


# %%
def there_and_back(x: Tensor, scale: Tensor | float, kind: torch.dtype) -> Tensor:
    """x after a cast to FP8 and back."""
    return to_fp8(x, torch.as_tensor(scale), kind).float() / scale


def error(x: Tensor, seen: Tensor) -> float:
    """Percent, in the 2-norm."""
    return 100 * ((seen - x).norm() / x.norm()).item()


bell = torch.randn(100_000, generator=generator)
for name, kind in (("E4M3", native.E4M3), ("E5M2", native.E5M2)):
    lab.beside(name, my_error[name], error(bell,
                                           there_and_back(bell, torch.finfo(kind).max
                                                          / bell.abs().max(), kind)),
               "%")
print(f"bf16 for comparison: {error(bell, bell.bfloat16().float()):.2f}%")

# %% [markdown]
# That sounds bad. Does the error shrink when you add up thousands of such numbers?
#
# > **Predict.** Multiply two matrices of normally distributed numbers, both cast to E4M3. How large is the error of the
# > product, in percent, if each entry is a sum of 16 terms? And if it is a sum of 4096?

# %%
my_product = {16: 3.0, 4096: 0.2}                    # your prediction, percent


# %%
def rounded(x: Tensor) -> Tensor:
    """x after a cast to E4M3 with the right scale, and back."""
    return there_and_back(x, 448 / x.abs().max(), native.E4M3)


for inner, predicted in my_product.items():
    a, b = torch.randn(256, inner,
                       generator=generator), torch.randn(inner, 256,
                                                         generator=generator)
    off = error(a @ b, rounded(a) @ rounded(b))
    lab.beside(f"product, sums of {inner} terms", predicted, off, "%")

# %% [markdown]
# The error does not depend on the number of terms. Here is why. Each of K terms has the size $t$ and a random sign, with
# an error of size $\delta t$ and a random sign. The sum of the terms grows as $\sqrt{K}\,t$, the sum of the errors as
# $\sqrt{K}\,\delta t$. Their ratio stays $\delta$. Both operands are rounded, so
# $\delta = \sqrt{2} \cdot 2.65\% = 3.7\%$.
#
# What does this error do to training? Compare it with an error that every step has anyway: its gradient comes from a few
# random samples.
#
# > **Predict.** Take a small model after 60 training steps. How far is its FP8 gradient from its float32 gradient, for
# > the same batch? And how far are the float32 gradients of two *different* batches?

# %%
my_fp8_gradient, my_other_batch = 4.0, 4.0           # your predictions, percent


# %%
def gradient(training: Training, kind: str, batch: dict[str, Tensor]) -> Tensor:
    """The gradient of all parameters for a batch."""
    batch = training.model.prepare(dict(batch), torch.tensor(0))
    with number_formats.autocast(kind, cpu):
        output = training.model(batch)
    total, weight = training.model.loss(output, batch)
    return torch.cat([x.flatten()
                      for x in torch.autograd.grad(total / weight,
                                                   list(training.model.parameters()))])


exact = loss_curves.assemble(("precision=fp32",), cpu)
coarse = loss_curves.assemble(("precision=fp8", "fp8.recipe=current"), cpu)
in_fp32, in_fp8 = [], []
for number, batch in enumerate(loss_curves.batches(125)):
    # 64 steps, each from the weights of that step
    if number > 60:
        coarse.model.load_state_dict(exact.model.state_dict())
        in_fp32.append(gradient(exact, "fp32", batch))
        in_fp8.append(gradient(coarse, "fp8", batch))
    exact.step(batch)
of_fp8 = [error(a, b) for a, b in zip(in_fp32, in_fp8, strict=True)]
of_batch = [error(a, b) for a, b in zip(in_fp32[1:], in_fp32[:-1], strict=True)]
lab.beside("gradient in FP8", my_fp8_gradient, sum(of_fp8) / len(of_fp8), "% off")
lab.beside("gradient of the batch before", my_other_batch,
           sum(of_batch) / len(of_batch), "% off")
differences = torch.stack(in_fp8) - torch.stack(in_fp32)
each = differences.norm(dim=1).mean()
of_mean = (differences.mean(0).norm() / each).item()
print(f"the mean of 64 FP8 errors is {of_mean:.2f} times as large as a single error")

# %% [markdown]
# **What you should see:** FP8 changes the gradient by five or six percent. The gradients of two batches differ by more
# than their own size. So the FP8 error is small beside the noise of random batches.
#
# Most of the FP8 error has no fixed direction, so it averages out over steps: the mean of 64 errors is about a third of a
# single one. (For purely random errors it would be $1/\sqrt{64}$, an eighth.) What training does *not* forgive is an error
# that always points in the same direction, or a number that is lost.
#
# ## Three products
#
# A linear $y = xW^\top$ needs three matrix multiplications in training. Each has two operands to cast:
#
# | | operands | formats |
# |---|---|---|
# | forward | $x$, $W$ | E4M3, E4M3 |
# | gradient of the input, $\mathrm{d}x = \mathrm{d}y\,W$ | $\mathrm{d}y$, $W$ | E5M2, E4M3 |
# | gradient of the weight, $\mathrm{d}W = \mathrm{d}y^\top x$ | $\mathrm{d}y$, $x$ | E5M2, E4M3 |
#
# Weights and activations use the format with finer steps, gradients the format with the wider range. This is called the
# *hybrid* format. Here is the library's linear:

# %%
lab.show("course.fp8.native.FP8Linear")

# %% [markdown]
# Everything else (norms, softmax, residual sums, the optimizer) stays as in bf16 mixed precision.
#
# ## Why E5M2 for gradients?
#
# Measure it on your recorded gradients. Cast each linear's gradient to both formats, with the scale for its own amax.
#
# > **Predict.** Which format has the smaller error for gradients, and by what factor?

# %%
my_ratio = 2.0                   # your prediction: the error of E4M3 over that of E5M2

# %%
def mean_error(kind: torch.dtype, headroom: float = 1.0) -> tuple[float, float]:
    """Mean percent of error and of zeros; the scale is for `headroom` times the
    amax."""
    errors, gone = [], []
    for x in gradients.values():
        seen = there_and_back(x, torch.finfo(kind).max / (headroom * x.abs().max()),
                              kind)
        errors.append(error(x, seen))
        gone.append(100 * ((seen == 0) & (x != 0)).float().mean().item())
    return sum(errors) / len(errors), sum(gone) / len(gone)


lab.beside("error of E4M3 over that of E5M2", my_ratio, mean_error(native.E4M3)[0]
           / mean_error(native.E5M2)[0])
print("\nscale chosen for an amax of            E4M3: error, zeros       "
      "E5M2: error, zeros")
for headroom in (1.0, 1e2, 1e4, 1e6):
    found = [f"{value:8.2f}%" for kind in (native.E4M3, native.E5M2)
             for value in mean_error(kind, headroom)]
    print(f"{headroom:>10,.0f} times the tensor's amax      "
          f"{found[0]} {found[1]}      {found[2]} {found[3]}")
qkv = gradients["blocks.2.attn.qkv"]
scale = {name: largest / qkv.abs().max().item()
         for name, largest in (("E4M3", 448), ("E5M2", 57344))}
lab.picture(format_figures.magnitudes({"gradients of queries, keys and values": qkv},
                                     {"E5M2, right scale": scale["E5M2"],
                                      "E5M2, 10,000 times": scale["E5M2"] / 1e4,
                                      "E4M3, right scale": scale["E4M3"],
                                      "E4M3, 10,000 times": scale["E4M3"] / 1e4},
                                      "One linear's gradients, and the range of each "
                                      "format",
                                      -55, 0),
            "A hump from about -38 to -19. With the right scale both formats end at "
            "its right edge and cover it. With a scale for an amax 10,000 times as "
            "large, both bars lie 13 powers further right. E5M2 still covers the "
            "whole hump, E4M3 only its right part")

# %% [markdown]
# **What you should see:** with the right scale E4M3 is *better*, by its extra mantissa bit. The other lines show a scale made
# for larger numbers, as after an unusually hard sample or a spike in the loss. E5M2 does not notice. E4M3 tolerates a factor of
# 100, loses most numbers at 10,000, and all at a million.
#
# So the wide range is *insurance* against a wrong scale. Large models need it more, because their tensors spread more
# widely. Block scaling has one scale per 128 numbers and needs less insurance: it uses E4M3 throughout.
#
# ## When does FP8 pay off?
#
# Casts cost time. Each cast reads 16 or 32 bits per number and writes 8 bits twice, because the backward pass needs the
# transpose. Take a linear of width $h$ (inputs and outputs) and $M$ tokens. Its three products are $6Mh^2$ FLOPs.
# Casting $x$ and $\mathrm{d}y$ moves $8Mh$ bytes. The first grows with $h^2$, the second with $h$. These are the four
# linears of a layer of width 4096 on an H200:

# %%
timed = {row["case"]: row for row in lab.results("fp8_h200")["parts"]}


def total_ms(*kinds: str) -> float:
    """Milliseconds over the four linears of a layer."""
    return sum(timed[f"{linear}: {kind}"]["ms"]
               for linear in ("qkv", "out", "up", "down") for kind in kinds)


sixteen, eight = total_ms("y, bf16", "dx, bf16", "dW, bf16"), total_ms("y", "dx", "dW")
casts, weight_casts = total_ms("cast x", "cast dy"), total_ms("cast W")
lab.recorded("fp8_h200", {"three products in bf16": {"ms": sixteen},
                          "three products in FP8": {"ms": eight},
                          "casts of x and dy": {"ms": casts},
                          "casts of W": {"ms": weight_casts}},
             why="Four linears of width 4096, 16,384 tokens")

# %% [markdown]
# > **Predict.** Below which width do the casts cost more than FP8 gains?

# %%
my_width = 100                   # your prediction

# %%
# of time, for each h^2
gain = (sixteen - eight - weight_casts) / 4096**2
break_even = casts / 4096 / gain
lab.beside("FP8 pays from width", my_width, break_even, how="computed")
bars = {}
for width in (384, 1024, 4096):
    ratio = width / 4096
    bars[f"width {width}, bf16"] = {"products": 100.0}
    bars[f"width {width}, FP8"] = {
        "products": 100 * eight / sixteen,
        "casts": 100 * (casts * ratio + weight_casts * ratio**2) / (sixteen * ratio**2)}
sums = {name: sum(parts.values()) for name, parts in bars.items() if "FP8" in name}
lab.picture(style.stacked(bars, "% of the time in bf16", "A layer's linears, by the "
                          "arithmetic of this cell"),
            f"Pairs of bars for three widths, with bf16 at 100%. The FP8 products take "
            f"{100 * eight / sixteen:.0f}%. With casts: "
            + ", ".join(f"{name} {total:.0f}%" for name, total in sums.items()))

# %% [markdown]
# **What you should see:** a few hundred, close to the 384 of the reference model. The real limit is higher, because
# small products gain less. On an H200 a product of 64,800 × 384 × 1536 is {result: fp8_small | .1f} times as fast in FP8 as in
# bf16. A large one is {result: fp8_large | .1f} times as fast.
#
# Casts built from plain tensor operations take five passes over memory. By the same arithmetic, FP8 would then pay only
# from about width {result: round(pays_from_width(passes=5), -2) | .0f}. So the library has a kernel for the cast
# (`course/ops/fp8_cast_triton.py`), and NVIDIA's library Transformer Engine fuses it into the norm before it.
#
# Now whole training steps of the weather model, compiled, on an H200.
#
# > **Predict.** How many times as fast is a step in FP8 as one in bf16, at width 384 and at 1024?

# %%
my_fp8 = {384: 2.0, 1024: 2.0}   # your prediction, times

# %%
speeds = {row["configuration"]: row["samples_per_s"]
          for row in lab.results("vit_h200")["rows"] if "samples_per_s" in row}
print(f"bf16 over TF32: "
      f"{speeds['bf16, on the device'] / speeds['tf32, on the device']:.1f} times")
lab.beside("FP8 over bf16, width 384", my_fp8[384], speeds["fp8, compiled"]
           / speeds["bf16, compiled"], "times", "recorded")
lab.beside("FP8 over bf16, width 1024", my_fp8[1024],
           speeds["width 1024: fp8, compiled"] / speeds["width 1024: bf16, compiled"],
           "times", "recorded")

# %%
groups = {"fp32, on the device": "width 384", "tf32, on the device": "width 384",
          "fp16, on the device": "width 384",
          "bf16, on the device": "width 384", "bf16, compiled": "width 384, compiled",
          "fp8, compiled": "width 384, compiled",
          "width 1024: bf16, compiled": "width 1024, compiled",
          "width 1024: fp8, compiled": "width 1024, compiled"}
panels = {panel: {name: speeds[name] for name, its in groups.items() if its == panel}
          for panel in dict.fromkeys(groups.values())}
lab.picture(style.grouped_bars(panels, "samples/s", "Training steps of the weather "
                               "model on one H200"),
            "Bars of samples per second. "
            + "; ".join(f"{name}: {speeds[name]:.0f}" for name in groups))

# %% [markdown]
# > **Question.** FP8 loses at width 384 and gains little at 1024. What share of the arithmetic is in the linears?
#
# <details><summary>Answer</summary>
# A layer costs 24 h² FLOPs per token in its linears and 4 T h in attention, forward. With T = 4050 tokens the linears'
# share is {result: linears_share(384) | .0%} at width 384 and {result: linears_share(1024) | .0%} at width 1024. FP8
# speeds up only the linears. At width 384 the casts cost more than that gains.
# </details>
#
# **In practice**
#
# - **Start with bf16.** Keep the float32 curve of a short run for comparison.
# - Use fp16 only where there is no bf16. If `loss_scale` in `metrics.jsonl` keeps falling, something overflows in every
#   step: look at the logits.
# - Use FP8 for wide layers and many tokens, compiled. Keep the first and the last linear in bf16 (`fp8.keep`).
# - *Does FP8 really run?* Look in a profile for kernels with `e4m3` or `f8f8` in their names.
# - *Do curves differ between libraries?* Start both from the same weights first. Their layers are initialized differently.
#
# ## Where the scale comes from
#
# **Current scaling** takes the amax of the tensor itself. It has to read the tensor once before the pass that casts it.
#
# **Delayed scaling** takes the largest amax of the previous steps, from a **history**. It knows the scale in advance: one
# pass casts the tensor and records its amax for later. It bets that a tensor does not grow suddenly.
#
# > **Question.** In parallel training (lessons 07 to 10), each rank holds a different part of a tensor. What has to happen to the
# > amaxes?
#
# <details><summary>Answer</summary>
# An all-reduce with MAX, of one small tensor for all linears, once a step. Then every rank has the same scales as a
# single process, and FP8 training gives the same eight bits in any layout. Current scaling would need an all-reduce for
# each cast, and the next kernel would wait for it. So the library shares current scales only where tp cuts a tensor.
# Each data-parallel rank has its own.
# </details>
#
# ## Does it train?
#
# Your CPU can answer this, because it computes with the same eight bits as a GPU. The cast is identical
# (`tests/gpu/test_gpu_fp8.py` compares them), and products of two FP8 numbers are exact in float32. Only the rounding of
# sums may differ.
#
# The task is small and has a trap: in the **first** batch, one sample has a gradient a million times as large as the
# others. Train five times from the same weights, with the same batches:
#
# - **fp32** and **bf16**;
# - **FP8** with delayed scaling, over a history of 1024 steps;
# - FP8 with gradients in **E4M3**;
# - FP8 with **frozen** scales: the scales after the first step, forever.
#
# > **Predict.** By what percentage do the last three differ from bf16 after 120 steps?

# %%
# your prediction, %
my_gap = {"native fp8, delayed": 5.0, "native fp8, gradients in E4M3": 5.0,
          loss_curves.FROZEN: 5.0}

# %%
names = ["fp32", loss_curves.REFERENCE, *my_gap]
runs = {name: loss_curves.losses(loss_curves.CASES[name], cpu, 120,
                                 frozen=name == loss_curves.FROZEN) for name in names}
gaps = {name: 100 * loss_curves.gap(run, runs[loss_curves.REFERENCE])
        for name, run in runs.items()}
for name, predicted in my_gap.items():
    lab.beside(name, predicted, gaps[name], "% off bf16, at most")
lab.picture(style.curves({name: (range(20, 121, 20), loss_curves.means(run).tolist())
                          for name, run in runs.items()},
                           "step", "loss, means of 20", "A small vision transformer "
                         "on your machine"),
            "The curves of fp32, bf16 and FP8 coincide. The curves with E4M3 "
            "gradients and with frozen scales stay above them, more and more")

# %% [markdown]
# **What you should see:** FP8 follows bf16 within about two percent. E4M3 gradients and frozen scales learn at first,
# and then fall behind for good.
#
# > **Question.** Why does each of these two fail? For E4M3, think of the first batch and read the table above for an amax
# > a million times too large. For the frozen scales: which tensors *grow* during training?
#
# <details><summary>Answer</summary>
# E4M3: the history remembers the gradient of the first batch, and the cast rounds everything after it to zero. Only
# parameters whose gradients pass through no FP8 product still learn: the embedding, the head, a few biases. In E5M2 the
# same history leaves nearly all gradients above the smallest number. <br>Frozen scales: E5M2 gradients survive them. But
# weights and activations grow: the input of attention's output matrix grows tenfold within 60 steps. The cast clips
# whatever exceeds the amax of the first step, more and more of it, and always in the same direction.
# </details>
#
# ## Exercise: the history
#
# Now write delayed scaling. `remember(history, amax)` returns the history after a step. Each row belongs to a tensor,
# newest amax first; the oldest one drops out. Do not modify the given history: a skipped step keeps it.

# %% exercise="amax-history"
from course.lab.exercises.lesson04_mixed_precision import remember

# %%
check("amax-history")

# %% [markdown]
# ## Exercise: the delayed scale
#
# `delayed_scale(history, largest)` returns the factor for each tensor. It maps the largest amax of the tensor's history
# to `largest`, the largest number of the format. Where a history holds only zeros, return 1.

# %% exercise="delayed-scale"
from course.lab.exercises.lesson04_mixed_precision import delayed_scale

# %%
check("delayed-scale")

# %% [markdown]
# Replay your training of 60 steps for the gradient of one linear's output. Compare its amax in each step with the largest
# number that the delayed scale lets through, `largest / scale`. Two steps drop out, which leaves 58. In the first step the
# gradient is zero, because the head's weights start at zero. In the second, the history holds no amax yet.
#
# > **Predict.** With a history of 16 steps, in how many of the 58 steps is the tensor's largest number clipped? And with
# > a history of 1?

# %%
my_cut = {1: 5, 16: 5}           # your prediction, steps

# %%
one = amaxes["blocks.2.attn.qkv"][1:]                # the first is zero
largest_number = torch.finfo(native.E5M2).max


def allowed(length: int) -> list[float]:
    """The largest number that a history of this length lets through, in each step."""
    history = torch.zeros(1, length, dtype=torch.float64)
    found = []
    for amax in one:
        found.append(largest_number / delayed_scale(history, largest_number).item())
        history = remember(history, torch.tensor([amax], dtype=torch.float64))
    # the first scale came from an empty history
    return found[1:]


let_through = {length: allowed(length) for length in (1, 16)}
for length, level in let_through.items():
    cut = sum(amax > most for amax, most in zip(one[1:], level, strict=True))
    lab.beside(f"clipped with a history of {length}", my_cut[length], cut,
               f"of {len(level)} steps", "counted")
lab.picture(format_figures.amax_and_limits(one[1:],
                                           {f"let through by a history of "
                                            f"{length}": level
                                           for length, level in let_through.items()},
                                       "Gradients of queries, keys and values in one "
                                           "block"),
            "Dots that rise a hundredfold in 20 steps and then scatter. The staircase "
            "of a history of 16 follows the rise one step late and then stays above "
            "most dots. The line of a history of 1 repeats the dots one step later")

# %% [markdown]
# **What you should see:** a history of 1 is too small about half of the time. A history of 16 is too small only while gradients
# grow, and rarely later. Then the cast clips a few numbers to a half or a third of their size, and training hardly notices. A
# long history has its own price. After a spike the scale stays too small until the spike leaves the history, and small numbers
# round to zero. Transformer Engine's default is 1024 steps.

# %% [markdown]
# ## Open task: train in float16
#
# *Optional, about 50 minutes. Nothing later needs it.* Your scaler is one piece of float16 training. Now write the whole step,
# without `autocast`. It has master weights in float32, float16 copies for the loss and a loss scale. It accumulates gradients,
# clips, and skips steps. Our solution has about 35 lines.
#
# **Contract**
#
# - `HalfTrainer(loss_of, weights, momentum, clip, scale, grow_after)`: `weights` is a dict of float32 tensors. Change them in
#   place.
# - `loss_of(halves, micro)` returns the mean loss of a micro-batch, in float32. `halves` has the names of `weights`, with
#   float16 tensors.
# - `step(micros, rate)` is one update. The gradient is the mean over the micro-batches, with the scale divided out. If the norm
#   of all gradients together is larger than `clip`, multiply them by `clip / norm`. Then velocity = momentum · velocity +
#   gradient, and weight = weight − rate · velocity. It returns the mean loss without the scale, a float32 tensor.
# - If any gradient is not finite, the step changes no weight and no velocity. It halves the scale. After `grow_after` good steps
#   in a row the scale doubles, and the count starts again at 0.
# - `scale` is an attribute of your trainer, a number or a tensor: the scale of the next step. It starts as the `scale` that you
#   are given.
# - `update` below is part of our answer. Yours does not need it.
#
# **Levels.** Each counts by itself, once the first is reached:
#
# | level | what the check counts |
# |---|---|
# | correct | how each step moves the weights (up to 1%, since float16 rounds), all losses, all scales |
# | no stall | `step` waits for no value: it has no `.item()`, and no `if` on a tensor |
# | one cast | a step casts each weight to float16 once, however many micro-batches it has |
# | memory budget | at any time, at most 18 bytes per parameter, weights and velocities included |
#
# Each check uses a new random order of steps. In one, large gradients of two micro-batches cancel. In others, one
# number of one gradient overflows. Even in a good step, the scaled loss or the norm of the scaled gradients may exceed 65,504:
# compute both in float32.
#
# Start with correct. `lab.hint("half-trainer")` opens the first of three hints, and each further call opens the next one.

# %% exercise="half-trainer"
from course.lab.exercises.lesson04_open_task import HalfTrainer  # noqa: F401

# %%
check("half-trainer")

# %% [markdown]
# ## Summary
#
# - Exponent bits set the range, mantissa bits the step size. bf16 has float32's range; fp16 has finer steps.
# - An update below half a step is lost, so master weights stay in float32.
# - Gradients underflow in fp16. A dynamic loss scale lifts them and finds its own size.
# - FP8 needs a scale per tensor: from the tensor itself (current) or from earlier amaxes (delayed).
# - FP8 pays off where products cost much more than casts: in wide layers.
#
# ## Questions
#
# 1. Your fp16 run skips every tenth step. What do you look at first?
# 2. Why does a constant 3% error in each weight gradient hurt less than a lost update?
# 3. Your model has width 2048 and 512 tokens per sample. What decides whether FP8 pays?
#
# **Check your work from a terminal.** Save the notebook, then run `course check notebooks/04_mixed_precision_mine.ipynb`.
# Next: [lesson 05](05_compile_and_fuse.ipynb) makes the operations between the matrix multiplications faster.
#
# ## Appendix (optional): on GPUs
#
# The same task ran for 300 steps on an H200, also with Transformer Engine (TE), from the same weights. The gap of fp16 is
# {result: curve_gaps["fp16"] | .0%}; its scaler skips the first step. FP8 differs by
# {result: min(renewed_gaps) | .0%} to {result: max(renewed_gaps) | .0%}:

# %%
recorded = lab.results("curves_h200")
lab.recorded("curves_h200",
             {name: {"last loss": loss_curves.means(torch.tensor(
                 recorded["curves"][name]))[-1].item(),
                     "at most from bf16, %": 100 * gap}
              for name, gap in recorded["gap"].items()},
             why="The same task, 300 steps")
shown = [name for name in ("bf16", "native fp8, delayed", "TE, delayed", "TE, block",
                           "native fp8, gradients in E4M3",
                           loss_curves.FROZEN) if name in recorded["curves"]]
points = range(loss_curves.MEAN, recorded["steps"] + 1, loss_curves.MEAN)
lab.picture(style.curves({name: (points,
                                 loss_curves.means(torch.tensor(
                                     recorded["curves"][name])).tolist())
                          for name in shown},
                           "step", "loss, means of 20",
                         f"The same task on {recorded['hardware']}"),
            "bf16 and FP8 with renewed scales coincide and fall. The curves "
            "with E4M3 gradients and with frozen scales lie far above")

# %% [markdown]
# A stack of 8 layers of width 4096, forward and backward, including all casts:

# %%
rows = lab.results("fp8_h200")["rows"]
lab.recorded("fp8_h200", {row["case"]: {"ms": row["ms"],
                                        "times bf16": row["times bf16"],
                                        "TFLOP/s": row["tflops"],
                                        "GB": row["memory_gb"]} for row in rows
                          if "ms" in row},
             why="8 layers of width 4096, 16,384 tokens")

# %% [markdown]
# > **Question.** The products are nearly twice as fast. Why is the stack not? Why is delayed scaling faster than current
# > scaling?
#
# <details><summary>Answer</summary>
# Attention, norms, GELU and residual sums take as long as before, and casts come on top: Amdahl's law. Current scaling
# reads each tensor once more for its amax.
# </details>
#
# ```
# course train vit-short precision=bf16                # fp32, tf32, fp16, bf16, fp8
# course train vit-mp precision=fp8 compile=true       # native FP8, delayed scaling
# course train vit-mp precision=fp8 fp8.recipe=current
# course train vit-mp precision=fp8 fp8.by=te          # Transformer Engine; also fp8.recipe=block
# python -m experiments.loss_curves FILE               # these loss curves, on your machine
# python -m experiments.fp8_speed FILE                 # these speeds, on your GPU
# ```
