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
# Half the bits, half the bytes to move, and tensor cores that multiply two to four times as fast: no other change makes a
# model so much faster for so little work. But numbers with few bits run out of range at both ends, and small changes vanish
# in them. In this lesson you see where that happens, write what prevents it in 16 bits, and then go down to **8 bits**:
# what a scale is, where it comes from, and when FP8 pays.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU: FP8 is emulated, with the bits of a GPU |
# | reading and doing | about two hours |
# | computing | half a minute on two cores |
# | you write | a dynamic loss scaler (5 lines), a cast to FP8 (2), an amax history (1), the scale that follows from it (2) |
# | you measure | what vanishes in which format; loss curves in fp32, bf16 and FP8; and read the speeds of an H200 |
#
# You should have done [lesson 01](01_baseline.ipynb). Work in a copy: *File → Save Notebook As…*,
# `04_mixed_precision_mine.ipynb`.

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
torch.set_num_threads(1)         # the models of this lesson are too small to be shared by cores
simulation.make(schema.build(simulation.Weather, {"path": "data/weather-32x64"}, "weather"))          # there since lesson 01

# %% [markdown]
# ## Bits
#
# A floating-point number is $\pm\,1.m \times 2^e$. The bits of the **exponent** $e$ say how far the format reaches, those
# of the **mantissa** $m$ how fine its steps are. From one power of two to the next there are always $2^{\text{bits of
# mantissa}}$ numbers, so steps double with each power of two: precision is *relative*.
#
# | format | bits | exponent | mantissa | |
# |---|--:|--:|--:|---|
# | fp32 | 32 | 8 | 23 | float32, "single" |
# | tf32 | 19 of 32 | 8 | 10 | how tensor cores read float32, if one lets them |
# | fp16 | 16 | 5 | 10 | |
# | bf16 | 16 | 8 | 7 | the upper half of a float32 |
# | E5M2 | 8 | 5 | 2 | the upper half of an fp16 |
# | E4M3 | 8 | 4 | 3 | without infinities, so that it reaches 448 |
#
# > **Predict.** What is the largest number of fp16? And what is 256 + 1 in bf16?

# %%
my_largest = 1000.0              # your prediction
my_sum = 257.0

# %%
lab.beside("the largest fp16", my_largest, torch.finfo(torch.float16).max, how="exactly")
print(f"256 + 1 in bf16 is {(torch.tensor(256.0, dtype=torch.bfloat16) + 1).item():g}; you said {my_sum:g}")
lab.picture(format_figures.ranges(),
            "A bar for each format over powers of two. fp32, tf32 and bf16 reach from -126 to 128, and in pale another 23, 10 "
            "and 7 powers lower. fp16 reaches from -24 to 16, E5M2 from -16 to 16, E4M3 from -9 to 9")
lab.picture(format_figures.steps(),
            "The numbers from 1 to 8 as ticks: bf16 has 128 from each power of two to the next, E4M3 eight, E5M2 four")

# %% [markdown]
# 65,504 is not much: a sum of squares gets there fast. And 257 does not exist in bf16: from 256 to 512 its steps are 2.
#
# So **fp16** has fine steps and a narrow range, **bf16** the range of float32 and coarse steps. **tf32** has both, but
# saves no memory: it only makes multiplying faster. In the pale part at the left, numbers are *subnormal*: they lose one
# bit of the mantissa with each power of two, until nothing is left.
#
# ## What autocast does
#
# Nobody trains in 16 bits throughout. In **mixed precision** each operation has the format that it can bear: matrix
# multiplications in 16 bits, where the time goes; sums over many numbers (norms, softmax, the loss) in 32. PyTorch's
# `autocast` decides by a list of operations. It casts what goes *into* an operation; weights are cast again in each
# forward pass.
#
# > **Predict.** Inside `autocast` to bf16, in which format does each of these leave its result: the matrix multiplication
# > of queries, keys and values; a norm; the sum of the residual connection; the loss? And in which format are the weights'
# > gradients?

# %%
cpu = torch.device("cpu")


def assemble(*overrides: str) -> Training:
    """The model of `make demo` and what trains it."""
    settings = config.load("vit-demo", ["optim.schedule=constant", "train.device=cpu", *overrides])
    return assemble_training(settings, parallel.build_mesh(settings.parallel, parallel.World(device=cpu)))


training = assemble()
model, formats = training.model, dict[str, torch.dtype]()
parts = {"embed.proj": "embedding", "blocks.0.norm1": "norm", "blocks.0.attn.qkv": "queries, keys, values",
         "blocks.0.attn.core": "attention", "blocks.0.mlp.up": "MLP, first matrix", "blocks.0": "the residual sum after a block",
         "head.norm": "last norm", "head.proj": "head"}
handles = [model.get_submodule(name).register_forward_hook(lambda m, given, out, name=name: formats.update({name: out.dtype}))
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
print(f"{'weights, and their gradients':32} {next(model.parameters()).dtype}, {next(model.parameters()).grad.dtype}")

# %% [markdown]
# Everything that is large and multiplied is in 16 bits, what is added up stays in 32: the residual stream, which every
# block adds to, the norms, the loss, the weights and their gradients.
#
# > **Question.** Weights in float32 are cast in every forward pass. Why not keep them in bf16, and save the casts and
# > half of the memory? Say what you think; the next section measures it.
#
# ## What vanishes
#
# Near 1 the steps of bf16 are 1/128. Add 0.003 to 1.0, a thousand times:

# %%
x = {kind: torch.ones((), dtype=kind) for kind in (torch.float32, torch.bfloat16)}
for _ in range(1000):
    for value in x.values():
        value += 0.003
print({str(kind): round(value.item(), 3) for kind, value in x.items()})

# %% [markdown]
# In bf16 it stays 1 forever. An addend smaller than **half a step** is rounded away, each time. Training consists of such
# additions: a weight of 0.1 and an update of 0.0001.
#
# Train the model for 60 steps on the weather, and look at the last update of each weight. Adam's update is the learning
# rate times a number near 1, so you can ask what would have been lost with *another* learning rate.
#
# > **Predict.** With a learning rate of 0.0001, usual for large models: what percentage of all weights would not change at
# > all if they were kept in bf16?

# %%
my_lost = 10                     # your prediction, percent

# %%
training = assemble()
gradients: dict[str, Tensor] = {}                    # of each linear's output in the last step: what FP8 would have to cast
amaxes: dict[str, list[float]] = {}                  # the largest magnitude of each, step by step


def watch(name: str):
    """A hook that looks at the gradient of a linear's output."""
    def look(grad: Tensor) -> None:
        gradients[name] = grad.detach()
        amaxes.setdefault(name, []).append(grad.abs().max().item())

    def hook(module, given, out) -> None:
        out.register_hook(look)
    return hook


for name, module in training.model.named_modules():
    if name.startswith("blocks.") and isinstance(module, Linear):
        module.register_forward_hook(watch(name))
loader = data.train_loader(training.config, training.mesh.dp, cpu, 0, training.model.example)
for number in range(60):
    if number == 59:
        before = torch.cat([p.detach().flatten().clone() for p in training.model.parameters()])
    training.step(next(loader))
loader.close()
after = torch.cat([p.detach().flatten() for p in training.model.parameters()])
direction = (after - before) / training.config.optim.lr


def lost(lr: float) -> float:
    """Percent of the weights that an update with this learning rate leaves as they are, in bf16."""
    weights = before.bfloat16()
    return 100 * ((weights.float() + lr * direction).bfloat16() == weights).float().mean().item()


rates = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2]
lab.beside("weights that do not move", my_lost, lost(1e-4), "%")
lab.picture(style.curves({"weights kept in bf16": ([f"{rate:g}" for rate in rates], [lost(rate) for rate in rates])},
                           "learning rate", "% that do not move", "One step of Adam"),
            "A falling curve: nearly all weights stay where they are with a learning rate of 0.00001, about half with 0.0003, "
            "few with 0.01")

# %% [markdown]
# **What you should see:** about four fifths. And such updates do not add up: one that is rounded away leaves no trace,
# however often it comes. When a schedule lets the learning rate fall, training in bf16 weights comes to a halt.
#
# So the weights stay in float32, the **master weights**, and the 16-bit copy is made of them when it is needed.
# Autocast does just that (Micikevicius et al. 2018, *Mixed precision training*, arXiv:1710.03740). Other frameworks,
# such as Megatron-LM, keep bf16 weights beside a float32 copy in the optimizer. The idea is the same, and so is the
# memory: 16 bytes a parameter, or 18 where gradients are added up in float32 (lesson 13). (Rounding up or down at
# random, in proportion, is another way out: then small updates count on average.)
#
# Does it matter for the loss? Train a small model twice from the same weights, in bf16 with a small learning rate, and the
# second time round the weights to bf16 after each step.
#
# > **Predict.** By how many percent will its loss be higher after 160 steps?

# %%
my_worse = 50.0                  # your prediction, percent


# %%
def small_run(rounded: bool, steps: int = 160) -> Tensor:
    """Losses of the small task of `course.lab.instruments.loss_curves`, in means of 20, without the first."""
    small = loss_curves.assemble(("precision=bf16", "optim.lr=3e-4", "optim.schedule=constant", "optim.warmup=1"), cpu)
    found = []
    for batch in loss_curves.batches(steps + 1):
        found.append(small.step(batch)[0])
        for p in small.model.parameters() if rounded else ():
            p.data = p.data.bfloat16().float()
    return loss_curves.means(torch.stack(found[1:]))


ends, master, rounded = range(20, 161, 20), small_run(False), small_run(True)
lab.beside("higher without master weights", my_worse, 100 * (rounded[-1] / master[-1] - 1).item(), "%")
lab.picture(style.curves({"master weights in float32": (ends, master.tolist()),
                            "weights rounded to bf16": (ends, rounded.tolist())}, "step", "loss, means of 20",
                           "The same model, the same batches"),
            "Two falling curves; the one of rounded weights stays above the other, by a few percent at the end")

# %% [markdown]
# **What you should see:** it learns, a few percent worse, and the gap grows. No error, no NaN: the loss is merely not what
# it could be. That is how most mistakes with precision look, and why in this lesson everything is compared with a curve
# that is known to be right.
#
# ## fp16: gradients underflow
#
# Weights are about 0.1, activations about 1. Where are the gradients? Here are those of all the linears' outputs in the
# step you just trained, beside what the formats hold.
#
# > **Predict.** If these gradients are cast to fp16, how many percent of them become zero?

# %%
my_zeros = 1.0                   # your prediction, percent

# %%
last = torch.cat([grad.flatten() for grad in gradients.values()])


def zeros(x: Tensor) -> float:
    """Percent of the numbers that fp16 rounds to zero."""
    return 100 * ((x.half() == 0) & (x != 0)).float().mean().item()


lab.beside("gradients that become zero in fp16", my_zeros, zeros(last), "%")
lab.picture(format_figures.magnitudes({"gradients of the linears' outputs": last, "weights": after},
                                     {"bf16": 1.0, "fp16": 1.0, "fp16, loss times 65536": 2.0**16},
                                     "Numbers of one training step"),
            "Two humps over powers of two: weights around -5, gradients around -22, from -34 to -14. Below, three bars: bf16 "
            "covers all; fp16 ends at -24, among the gradients, with its pale part; with the loss scaled it ends at -40")

# %% [markdown]
# A quarter or so, and all the others are subnormal, with a few bits left. There is an elegant way out. All gradients are
# proportional to the loss: multiply the **loss** by 65,536, and every gradient is larger by 16 powers of two. Divide before
# the optimizer's step, in float32. Since it is a power of two, nothing is rounded.

# %%
print(f"with the loss times 65536: {zeros(last * 2.0**16):.4f}% become zero")

# %% [markdown]
# > **Question.** Why not multiply by 2¹⁰⁰ and be safe?
#
# <details><summary>Answer</summary>
# The other end: whatever exceeds 65,504 becomes infinite, and one infinity in a gradient spoils the whole step. The best
# scale is as large as possible without overflow; and the size of gradients changes in the course of training.
# </details>
#
# ## Exercise: a dynamic loss scaler
#
# So the scale looks for its place by itself. It starts high. After a step in which a gradient was not finite (which was
# skipped, as you saw in `train_step` in lesson 01) it is **halved**. After `GROW_AFTER` = 2000 good steps *in a row* it
# is **doubled**, as a trial, and the count starts again.
#
# `next_scale(precision, scale, good, bad)` returns the scale and the count of good steps after a step. `bad` is 1.0 if the
# step was bad, else 0.0. All three are tensors on the device: an `if bad:` would make the host wait for the GPU in each
# step. Compute both outcomes, and choose with `torch.where(condition, this, that)`. Return new tensors, or write into the
# scale and the count that you are given and return these: both will do. Formats other than `"fp16"` keep their scale and
# their count.

# %% exercise="loss-scaler"
from course.ops.number_formats import next_scale

# %%
check("loss-scaler")

# %% [markdown]
# Watch it at work, on gradients whose largest number shrinks in the course of training, and jumps now and then.
#
# > **Predict** the scale's curve: in 20,000 steps, how often will a step be skipped: a dozen, hundreds or thousands of
# > times?

# %%
my_skipped = 500                 # your prediction

# %%
generator = torch.Generator().manual_seed(0)
largest = 0.3 * torch.exp(-torch.arange(20_000) / 6000) * torch.exp(0.25 * torch.randn(20_000, generator=generator))
scale, good = torch.tensor(2.0**24), torch.tensor(0)
scales, skipped = [], 0
for amax in largest:
    bad = (amax * scale > torch.finfo(torch.float16).max).float()
    scale, good = next_scale("fp16", scale, good, bad)
    scales.append(scale.log2().item())
    skipped += int(bad)
lab.beside("skipped steps", my_skipped, skipped, how="counted")
lab.picture(style.curves({"loss scale": (range(0, 20_000, 20), scales[::20]),
                            "the largest that would not overflow": (range(0, 20_000, 20),
                                                                    (65504 / largest[::20]).log2().tolist())},
                           "step", "power of two", "It falls at once, and follows by trial and error"),
            "A noisy rising curve, the largest scale that would not overflow, and below it a staircase that falls from 24 within "
            "a few steps and then climbs slowly after it; now and then it goes up a step and at once down again")

# %% [markdown]
# **What you should see:** a few at the beginning, then one for each time that it tries too much: a dozen. The price of fp16
# is far below a percent of the steps. (`torch.amp.GradScaler` has the same numbers: it begins at 65,536 and doubles after
# 2000 good steps.)
#
# > **Question.** Why does bf16 need none of this?
#
# <details><summary>Answer</summary>
# It has the exponent of float32: what float32 holds, bf16 holds, only coarser. This is why bf16 has replaced fp16 in
# training wherever the hardware has it.
# </details>
#
# ## FP8
#
# Eight bits: 256 patterns, the signs included. The tensor cores of Ada, Hopper and Blackwell multiply them twice as fast as
# bf16. Look at the ranges once more: E4M3 has 18 powers of two from its smallest number to its largest, E5M2 32. Gradients
# spread over 20 and more of them, in places that differ from layer to layer. One loss scale for everything will not do any
# more. So each *tensor* gets a scale of its own, before it is cast:
#
# 1. take the tensor's largest magnitude, its **amax**;
# 2. multiply the tensor by a **scale** that brings amax to the format's largest number;
# 3. cast; what lies beyond the largest number is cut off at it;
# 4. multiply the matrices; divide the result by both scales.
#
# ## Exercise: the cast
#
# Steps 2 and 3. `torch.finfo(kind).max` is a format's largest number. Cut off *before* you cast: what lies beyond the
# largest number becomes infinity, NaN or that number, depending on format, device and version.

# %% exercise="fp8-cast"
from course.lab.exercises.lesson04_mixed_precision import to_fp8

# %%
check("fp8-cast")

# %% [markdown]
# > **Question.** Your function turns an infinity into the largest number. Why is that dangerous in training?
#
# <details><summary>Answer</summary>
# An overflow elsewhere would pass for a large number: the step would not be skipped, and the weights would follow a
# gradient that means nothing. The library's cast turns whatever is not finite into NaN, so that it is noticed.
# </details>

# %%
lab.show("course.fp8.native.quantize_plain")

# %% [markdown]
# It does what yours does, notes the amax on the way, and writes a transposed copy for the backward pass. On a GPU one
# kernel does all of it.
#
# > **Predict.** Cast numbers from a bell curve to E4M3 with the right scale, and divide the scale out again. By how many
# > percent are they off, in the 2-norm? (Three bits of mantissa: the steps are an eighth of the power of two.) And in E5M2?

# %%
my_error = {"E4M3": 10.0, "E5M2": 20.0}              # your prediction, percent


# %%
def there_and_back(x: Tensor, scale: Tensor | float, kind: torch.dtype) -> Tensor:
    """x as FP8 sees it."""
    return to_fp8(x, torch.as_tensor(scale), kind).float() / scale


def error(x: Tensor, seen: Tensor) -> float:
    """Percent, in the 2-norm."""
    return 100 * ((seen - x).norm() / x.norm()).item()


bell = torch.randn(100_000, generator=generator)
for name, kind in (("E4M3", native.E4M3), ("E5M2", native.E5M2)):
    lab.beside(name, my_error[name], error(bell, there_and_back(bell, torch.finfo(kind).max / bell.abs().max(), kind)), "%")
print(f"bf16 for comparison: {error(bell, bell.bfloat16().float()):.2f}%")

# %% [markdown]
# 2.6 and 5 percent; bf16 has 0.17. That sounds bad. Does it get better where thousands of such numbers are added up?
#
# > **Predict.** Multiply two matrices of numbers from a bell curve, both cast to E4M3. By how many percent is the product
# > off if 16 numbers are added up for each of its entries? And if 4096 are?

# %%
my_product = {16: 3.0, 4096: 0.2}                    # your prediction, percent


# %%
def rounded(x: Tensor) -> Tensor:
    """x as E4M3 sees it, with the right scale."""
    return there_and_back(x, 448 / x.abs().max(), native.E4M3)


for inner, predicted in my_product.items():
    a, b = torch.randn(256, inner, generator=generator), torch.randn(inner, 256, generator=generator)
    lab.beside(f"product, {inner} added up", predicted, error(a @ b, rounded(a) @ rounded(b)), "%")

# %% [markdown]
# 3.7 percent, however many are added up. Here is why. Each of K terms has the size $t$, either sign, and an error of $\delta t$,
# either sign. The sum of the terms grows as $\sqrt{K}\,t$. The sum of the errors grows as $\sqrt{K}\,\delta t$, and the
# quotient stays $\delta$. Two operands are rounded, so $\delta = \sqrt{2} \cdot 2.65\% = 3.7\%$.
#
# So nothing vanishes in the product. What does it do to training? Compare it with what every step bears anyway: its gradient is
# that of a few samples, drawn at random.
#
# > **Predict.** Take a small model that has been trained for 60 steps. How far is its gradient in FP8 from that in float32, for
# > the same batch? And how far is that of *another* batch, in float32?

# %%
my_fp8_gradient, my_other_batch = 4.0, 4.0           # your predictions, percent


# %%
def gradient(training: Training, kind: str, batch: dict[str, Tensor]) -> Tensor:
    """The gradient of all parameters for a batch."""
    batch = training.model.prepare(dict(batch), torch.tensor(0))
    with number_formats.autocast(kind, cpu):
        output = training.model(batch)
    total, weight = training.model.loss(output, batch)
    return torch.cat([x.flatten() for x in torch.autograd.grad(total / weight, list(training.model.parameters()))])


exact = loss_curves.assemble(("precision=fp32",), cpu)
coarse = loss_curves.assemble(("precision=fp8", "fp8.recipe=current"), cpu)
in_fp32, in_fp8 = [], []
for number, batch in enumerate(loss_curves.batches(125)):
    if number > 60:                                  # 64 steps, each from the weights that training has reached
        coarse.model.load_state_dict(exact.model.state_dict())
        in_fp32.append(gradient(exact, "fp32", batch))
        in_fp8.append(gradient(coarse, "fp8", batch))
    exact.step(batch)
of_fp8 = [error(a, b) for a, b in zip(in_fp32, in_fp8, strict=True)]
of_batch = [error(a, b) for a, b in zip(in_fp32[1:], in_fp32[:-1], strict=True)]
lab.beside("gradient in FP8", my_fp8_gradient, sum(of_fp8) / len(of_fp8), "% off")
lab.beside("gradient of the batch before", my_other_batch, sum(of_batch) / len(of_batch), "% off")
differences = torch.stack(in_fp8) - torch.stack(in_fp32)
each = differences.norm(dim=1).mean()
print(f"the mean of 64 steps' FP8 errors is {(differences.mean(0).norm() / each).item():.2f} times as large as one of them")

# %% [markdown]
# **What you should see:** five or six percent, where two batches' gradients differ by more than their own size. What FP8 does to
# a gradient is small beside what choosing a batch at random does. And most of it has no direction, so it averages out over the
# steps, as the noise of batches does: the mean of 64 errors is a third as large as one of them. (Errors without any direction
# would come to an eighth, $1/\sqrt{64}$.) What training does *not* forgive is a number that is always wrong in the same
# direction, or gone.
#
# ## Three products
#
# A linear $y = xW^\top$ is three matrix multiplications in training, and each has two operands to cast:
#
# | | operands | formats |
# |---|---|---|
# | forward | $x$, $W$ | E4M3, E4M3 |
# | gradient of the input, $\mathrm{d}x = \mathrm{d}y\,W$ | $\mathrm{d}y$, $W$ | E5M2, E4M3 |
# | gradient of the weight, $\mathrm{d}W = \mathrm{d}y^\top x$ | $\mathrm{d}y$, $x$ | E5M2, E4M3 |
#
# Weights and activations in the format with the finer steps, gradients in the one with the wider range. This is called the
# *hybrid* format. The library's:

# %%
lab.show("course.fp8.native.FP8Linear")

# %% [markdown]
# Everything else, norms, softmax, residual sums, the optimizer, stays as it is in bf16 mixed precision.
#
# ## Why E5M2 for gradients?
#
# Measure it, on the gradients you have. Cast each linear's to both formats, with the scale that its own amax asks for.
#
# > **Predict.** Which format is nearer to the truth for gradients, and by what factor?

# %%
my_ratio = 2.0                   # your prediction: the error of E4M3 over that of E5M2

# %%
def mean_error(kind: torch.dtype, headroom: float = 1.0) -> tuple[float, float]:
    """Over all linears: (percent of error, percent that becomes zero), with a scale for amaxes `headroom` times as large."""
    errors, gone = [], []
    for x in gradients.values():
        seen = there_and_back(x, torch.finfo(kind).max / (headroom * x.abs().max()), kind)
        errors.append(error(x, seen))
        gone.append(100 * ((seen == 0) & (x != 0)).float().mean().item())
    return sum(errors) / len(errors), sum(gone) / len(gone)


lab.beside("error of E4M3 over that of E5M2", my_ratio, mean_error(native.E4M3)[0] / mean_error(native.E5M2)[0])
print("\nthe scale made for an amax that is    E4M3: error, zeros       E5M2: error, zeros")
for headroom in (1.0, 1e2, 1e4, 1e6):
    found = [f"{value:8.2f}%" for kind in (native.E4M3, native.E5M2) for value in mean_error(kind, headroom)]
    print(f"{headroom:>10,.0f} times that of the tensor  {found[0]} {found[1]}      {found[2]} {found[3]}")
qkv = gradients["blocks.2.attn.qkv"]
scale = {name: largest / qkv.abs().max().item() for name, largest in (("E4M3", 448), ("E5M2", 57344))}
lab.picture(format_figures.magnitudes({"gradients of queries, keys and values": qkv},
                                     {"E5M2, right scale": scale["E5M2"], "E5M2, 10,000 times": scale["E5M2"] / 1e4,
                                      "E4M3, right scale": scale["E4M3"], "E4M3, 10,000 times": scale["E4M3"] / 1e4},
                                     "One linear's gradients, and what the formats hold with their scale", -55, 0),
            "A hump from about -38 to -19. With the right scale the bars of both formats end at its right edge and cover it. "
            "With a scale for an amax 10,000 times as large both bars lie 13 powers further right: that of E5M2 still reaches "
            "under the whole hump, that of E4M3 only under its right part")

# %% [markdown]
# **What you should see:** E4M3 is *better*, by its one bit, as long as the scale is right. Then come the lines in which
# the scale was made for something larger: a sample that is far harder than the others, a spike in the loss. E5M2 does
# not notice. E4M3 bears a factor of a hundred, loses most of its numbers at ten thousand, and all at a million. The
# wide range is not for every day: it is *insurance* against a wrong scale. (It matters more where a tensor's numbers
# spread more widely, as those of large models do.) With a scale for each 128 numbers, instead of one for a tensor, less
# insurance is needed: block scaling uses E4M3 throughout.
#
# ## Where the scale comes from
#
# **Current scaling** takes the amax of the tensor itself. That needs a pass over the tensor before the one that casts it.
#
# **Delayed scaling** takes the largest amax of the steps before, of which it keeps a **history**. So the scale is known in
# advance, one pass casts, and notes the amax for later. It is a bet that a tensor does not suddenly grow.
#
# ## Exercise: the history
#
# `remember(history, amax)`: the history after a step. Each row belongs to a tensor, newest first; the oldest goes. Leave
# what you are given as it is, since a step that is skipped keeps the old history.

# %% exercise="amax-history"
from course.lab.exercises.lesson04_mixed_precision import remember

# %%
check("amax-history")

# %% [markdown]
# ## Exercise: the delayed scale
#
# `delayed_scale(history, largest)`: what to multiply each tensor with, so that the largest amax of its history becomes
# `largest`, the format's largest number. Where a history has nothing but zeros, 1.

# %% exercise="delayed-scale"
from course.lab.exercises.lesson04_mixed_precision import delayed_scale

# %%
check("delayed-scale")

# %% [markdown]
# Now replay the training from above, for the gradient of one linear's output: you have its amax in each of the 60
# steps. Compare it with what the scale of the steps before lets through: `largest / scale`.
#
# In two of the 60 steps there is nothing to compare. In the first the gradient is zero: the head's weights start at zero, and
# nothing comes back through them. In the second no step before has had a gradient that a scale could be made for. That
# leaves 58.
#
# > **Predict.** With a history of 16 steps: in how many of these 58 is the tensor's largest number cut off? And with a
# > history of 1?

# %%
my_cut = {1: 5, 16: 5}           # your prediction, steps

# %%
one = amaxes["blocks.2.attn.qkv"][1:]                # the first is zero
largest_number = torch.finfo(native.E5M2).max


def allowed(length: int) -> list[float]:
    """What a history of so many steps lets through in each of the 58 steps."""
    history = torch.zeros(1, length, dtype=torch.float64)
    found = []
    for amax in one:
        found.append(largest_number / delayed_scale(history, largest_number).item())
        history = remember(history, torch.tensor([amax], dtype=torch.float64))
    return found[1:]                                 # the first of them was made for nothing yet


let_through = {length: allowed(length) for length in (1, 16)}
for length, level in let_through.items():
    cut = sum(amax > most for amax, most in zip(one[1:], level, strict=True))
    lab.beside(f"cut off with a history of {length}", my_cut[length], cut, f"of {len(level)} steps", "counted")
lab.picture(format_figures.amax_and_limits(one[1:], {f"let through by a history of {length}": level
                                                    for length, level in let_through.items()},
                                       "Gradients of queries, keys and values in one block"),
            "Dots that rise a hundredfold in 20 steps and then scatter. A staircase for a history of 16 follows the rise one "
            "step late and then stays above most dots; that for a history of 1 is just the dots, one step later")

# %% [markdown]
# **What you should see:** a history of 1 is too small half of the time: it is the step before, and the next amax is as
# likely larger as smaller. One of 16 is too small while gradients grow, at the beginning, and rarely later. What is cut
# off then is the largest number or a few of them, to a half or a third of their size, and training hardly notices. A
# long history has its price at the other end: after a spike the scale is too careful until the spike has left the
# history, and small numbers are rounded away. Transformer Engine, NVIDIA's library of FP8 layers, advises 1024 steps; a
# `margin` leaves powers of two free above.
#
# > **Question.** In data and tensor parallelism, each rank sees another part of a tensor. What has to happen to the amaxes?
#
# <details><summary>Answer</summary>
# An all-reduce with MAX, of one small tensor for all linears together, once a step: then every rank has the scales that one
# process would have, and an FP8 training in any layout gives the same eight bits. With current scaling that would be an
# all-reduce for each cast, in the way of the next kernel. So the library shares those scales only where tp cuts a tensor;
# each data-parallel rank has its own.
# </details>
#
# ## Does it train?
#
# On a CPU the library does all of this with the bits of a GPU: the cast gives the same eight bits as the GPU's kernel
# (`tests/gpu/test_gpu_fp8.py` compares them), products of two FP8 numbers are exact in float32, and only sums may be
# rounded otherwise. So you can ask on your laptop whether FP8 trains.
#
# The task is small, and has a trap: in the **first** batch one sample has a gradient a million times as large as the
# others'. Five trainings, from the same weights and batches:
#
# - **fp32** and **bf16**;
# - **FP8** with delayed scaling;
# - FP8 with gradients in **E4M3**;
# - FP8 with **frozen** scales: those after the first step, forever.
#
# > **Predict.** By how many percent is each of the last three off from bf16, after 120 steps?

# %%
my_gap = {"native fp8, delayed": 5.0, "native fp8, gradients in E4M3": 5.0, loss_curves.FROZEN: 5.0}        # your prediction, %

# %%
names = ["fp32", loss_curves.REFERENCE, *my_gap]
runs = {name: loss_curves.losses(loss_curves.CASES[name], cpu, 120, frozen=name == loss_curves.FROZEN) for name in names}
gaps = {name: 100 * loss_curves.gap(run, runs[loss_curves.REFERENCE]) for name, run in runs.items()}
for name, predicted in my_gap.items():
    lab.beside(name, predicted, gaps[name], "% from bf16, at most")
lab.picture(style.curves({name: (range(20, 121, 20), loss_curves.means(run).tolist()) for name, run in runs.items()},
                           "step", "loss, means of 20", "A small vision transformer on your machine"),
            "Three curves on each other: fp32, bf16 and FP8. Those with gradients in E4M3 and with frozen scales stay above, "
            "more and more")

# %% [markdown]
# **What you should see:** FP8 lies on bf16, within a percent or two. E4M3 and frozen scales learn at first, and then fall
# behind for good.
#
# > **Question.** Why does each of these two fail? Think of the first batch, and look at the table above, for an amax a
# > million times too large. And for the frozen ones: which tensors *grow* in the course of training?
#
# <details><summary>Answer</summary>
# E4M3: the history (of 1024 steps) remembers the gradient of the first batch, and everything after it is rounded to
# zero. The only parameters that still learn are those whose gradients pass through no FP8 product: the embedding, the
# head, a few biases. In E5M2 the same history leaves nearly all gradients above the smallest number. <br>Frozen:
# gradients in E5M2 survive that, too. But weights and activations grow, the input of attention's output matrix tenfold
# within 60 steps, and what exceeds the amax of the first step is cut off, more and more of it, always in the same
# direction.
# </details>
#
# The same over all 300 steps on an H200, where the products really are of eight bits, and beside them Transformer Engine's
# (TE), from the same weights. fp16 is a few percent off; its scaler skips the first step, in which a gradient overflows. FP8
# is off by 1 to 3%, farthest where it is native and delayed:

# %%
recorded = lab.results("curves_h200")
lab.recorded("curves_h200", {name: {"last loss": loss_curves.means(torch.tensor(recorded["curves"][name]))[-1].item(),
                                    "at most from bf16, %": 100 * gap} for name, gap in recorded["gap"].items()},
             why="The same task, 300 steps")
shown = [name for name in ("bf16", "native fp8, delayed", "TE, delayed", "TE, block", "native fp8, gradients in E4M3",
                           loss_curves.FROZEN) if name in recorded["curves"]]
points = range(loss_curves.MEAN, recorded["steps"] + 1, loss_curves.MEAN)
lab.picture(style.curves({name: (points, loss_curves.means(torch.tensor(recorded["curves"][name])).tolist()) for name in shown},
                           "step", "loss, means of 20", f"The same task on {recorded['hardware']}"),
            "bf16 and FP8 with renewed scales on each other, falling; gradients in E4M3 and frozen scales far above")

# %% [markdown]
# ## When does it pay?
#
# Casts are not free. Each reads 16 or 32 bits a number and writes 8, twice, since the backward pass needs the transposed
# order: memory traffic, beside arithmetic that has become cheap. For a linear of width $h$ (inputs and outputs) and $M$
# tokens, the three products are $6Mh^2$ FLOPs, and casting $x$ and $\mathrm{d}y$ moves $8Mh$ bytes. One grows with $h^2$,
# the other with $h$. Measured on an H200 for the four linears of a layer of width 4096:

# %%
timed = {row["case"]: row for row in lab.results("fp8_h200")["parts"]}


def total_ms(*kinds: str) -> float:
    """Milliseconds over the four linears of a layer."""
    return sum(timed[f"{linear}: {kind}"]["ms"] for linear in ("qkv", "out", "up", "down") for kind in kinds)


sixteen, eight = total_ms("y, bf16", "dx, bf16", "dW, bf16"), total_ms("y", "dx", "dW")
casts, weight_casts = total_ms("cast x", "cast dy"), total_ms("cast W")
lab.recorded("fp8_h200", {"three products in bf16": {"ms": sixteen}, "three products in FP8": {"ms": eight},
                          "casts of x and dy": {"ms": casts}, "casts of W": {"ms": weight_casts}},
             why="Four linears of width 4096, 16,384 tokens")

# %% [markdown]
# > **Predict.** Below which width do the casts cost more than FP8 gains?

# %%
my_width = 100                   # your prediction

# %%
gain = (sixteen - eight - weight_casts) / 4096**2                       # of time, for each h^2
break_even = casts / 4096 / gain
lab.beside("FP8 pays from width", my_width, break_even, how="computed")
bars = {}
for width in (384, 1024, 4096):
    ratio = width / 4096
    bars[f"width {width}, bf16"] = {"products": 100.0}
    bars[f"width {width}, FP8"] = {"products": 100 * eight / sixteen,
                                   "casts": 100 * (casts * ratio + weight_casts * ratio**2) / (sixteen * ratio**2)}
lab.picture(style.stacked(bars, "% of the time in bf16", "A layer's linears, by the arithmetic of this cell"),
            "Pairs of bars for widths 384, 1024 and 4096. The products in FP8 take about half of bf16's time; the casts are "
            "small at width 4096, larger at 1024, and at 384 the sum is about what bf16 takes")

# %% [markdown]
# **What you should see:** a few hundred, for so many tokens, which is where our model is, and in truth more: products of
# small matrices gain less. On the same machine one of 64,800 × 384 × 1536 was 1.6 times as fast in FP8 as in bf16; large
# ones are 1.9 times as fast. With casts in plain tensor operations, five passes in place of one, it would lie beyond 2000:
# this is why the library has a kernel for it (`course/ops/fp8_cast_triton.py`), and why Transformer Engine fuses the cast into
# the norm before it.
#
# A stack of 8 layers of width 4096, forward and backward, all casts included:

# %%
rows = lab.results("fp8_h200")["rows"]
lab.recorded("fp8_h200", {row["case"]: {"ms": row["ms"], "times bf16": row["times bf16"], "TFLOP/s": row["tflops"],
                                        "GB": row["memory_gb"]} for row in rows if "ms" in row},
             why="8 layers of width 4096, 16,384 tokens")

# %% [markdown]
# > **Question.** The products are nearly twice as fast. Why is the stack not? And why does delayed scaling beat current
# > scaling?
#
# <details><summary>Answer</summary>
# Attention, norms, GELU and the residual sums are what they were, and there are the casts: Amdahl's law. Current scaling
# reads each tensor once more, for its amax, before it can cast.
# </details>
#
# ## Speed, here and there
#
# First your machine. CPUs multiply bf16 faster than float32 if they have instructions for it (AMX, AVX512-BF16, Arm's
# BFMMLA), and slower if they have to convert.
#
# > **Predict.** A multiplication of 1024 × 1024 matrices: how many times as fast in bf16?

# %%
my_speedup = 2.0                 # your prediction

# %%
device = torch.device("cuda" if lab.gpu() else "cpu")
seconds = {kind: timing.matmul(1024, 1024, 1024, kind, device) for kind in (torch.float32, torch.bfloat16)}
lab.beside("bf16 over float32, here", my_speedup, seconds[torch.float32] / seconds[torch.bfloat16], "times")

# %% [markdown]
# Now the weather model on an H200, whole training steps. In the data sheet bf16 has twice the peak of TF32, and FP8 twice
# that of bf16. Two rows you know from lesson 01: with bf16 154 samples a second, and with TF32 22, there with eight loader
# processes, here with the data on the device.
#
# > **Predict.** How many times as fast is a compiled step in FP8 as one in bf16, at width 384 and at 1024?

# %%
my_fp8 = {384: 2.0, 1024: 2.0}   # your prediction, times

# %%
rungs = {row["rung"]: row["samples_per_s"] for row in lab.results("vit_h200")["rows"] if "samples_per_s" in row}
print(f"bf16 over TF32: {rungs['bf16, on the device'] / rungs['tf32, on the device']:.1f} times")
lab.beside("FP8 over bf16, width 384", my_fp8[384], rungs["fp8, compiled"] / rungs["bf16, compiled"], "times", "recorded")
lab.beside("FP8 over bf16, width 1024", my_fp8[1024], rungs["width 1024: fp8, compiled"] / rungs["width 1024: bf16, compiled"],
           "times", "recorded")

# %%
groups = {"fp32, on the device": "width 384", "tf32, on the device": "width 384", "fp16, on the device": "width 384",
          "bf16, on the device": "width 384", "bf16, compiled": "width 384, compiled", "fp8, compiled": "width 384, compiled",
          "width 1024: bf16, compiled": "width 1024, compiled", "width 1024: fp8, compiled": "width 1024, compiled"}
panels = {panel: {name: rungs[name] for name, its in groups.items() if its == panel} for panel in dict.fromkeys(groups.values())}
lab.picture(style.grouped_bars(panels, "samples/s", "Training steps of the weather model on one H200"),
            "Bars of samples per second: fp32 and TF32 are short, fp16 and bf16 several times as long and equal. Compiled bf16 "
            "is longer still, FP8 a little shorter than that. At width 1024 FP8 is a little longer than bf16")

# %% [markdown]
# > **Question.** bf16 gains far more than the factor of two of the data sheet. Where does the rest come from? (4050
# > tokens; think of what else than linears there is.) And FP8 even loses a little at width 384, and gains little at
# > 1024: what share of the arithmetic is in its linears?
#
# <details><summary>Answer</summary>
# The fast fused kernels for attention, cuDNN's and flash, exist for 16 bits only. In float32 PyTorch takes another, several
# times slower, and with 4050 tokens attention is most of the arithmetic. Besides, norms, GELU and sums move half the bytes.
# Lesson 02's profiler shows it: run <code>course profile vit-short</code> with both. <br>A token costs 24 h² FLOPs a layer
# in linears, and 4 T h in attention, forward. With T = 4050 the linears' share is 36% at width 384, and 60% at a width of
# 1024. FP8 makes only these faster, and at 384 the casts cost more than that gains.
# </details>
#
# ## In practice
#
# ```
# course train vit-short precision=bf16                       # fp32, tf32, fp16, bf16, fp8
# course train vit-mp precision=fp8 compile=true              # native, delayed
# course train vit-mp precision=fp8 fp8.recipe=current
# course train vit-mp precision=fp8 fp8.by=te                 # by Transformer Engine; fp8.recipe=block too
# python -m experiments.loss_curves FILE                           # loss curves in all formats of your machine
# python -m experiments.fp8_speed FILE                              # the speeds above, on your GPU
# ```
#
# - **bf16 first.** Keep the float32 curve of a short run, and compare.
# - fp16 only where there is no bf16. If `loss_scale` in `metrics.jsonl` falls and falls, something overflows for good: look
#   at logits.
# - FP8 for wide layers and many tokens, compiled, and with the first and the last linear in bf16 (`fp8.keep`).
# - *Am I really running FP8?* Look for kernels with `e4m3` or `f8f8` in their names in a profile.
# - *My curves differ*: start both from the same weights, before you blame the format. Another library's layers are
#   initialised differently.
#
# ## What you know now
#
# - Exponent bits are range, mantissa bits are steps; bf16 has float32's range, fp16 finer steps.
# - An update below half a step is lost: master weights stay in float32.
# - fp16's gradients underflow; a loss scale lifts them, and finds its own size.
# - FP8 needs a scale for each tensor. Delayed scaling takes it from a history of amaxes, current scaling from the tensor.
# - E5M2's range is insurance against a wrong scale; scales that are not renewed, or a range without insurance, fail in
#   silence.
# - FP8 pays where products cost much more than casts: wide layers.
#
# **Check your work once more, from outside.** Save the notebook; then, in a terminal: `course check
# notebooks/04_mixed_precision_mine.ipynb`.
#
# Next: [lesson 05](05_compile_and_fuse.ipynb), where the operations between the matrix multiplications get faster.
