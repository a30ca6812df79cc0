# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 15 · DiT and FP8
#
# A diffusion transformer draws images out of noise. In this lesson you write the two ideas that it adds to a transformer,
# **adaLN-Zero** and **classifier-free guidance**, and let a small one draw digits. Then you ask three questions that come
# with every large training: how many FLOPs is a step, does it train the same in FP8, and is a loss curve that looks a
# little worse a matter of taste, or a bug?
#
# | | |
# |---|---|
# | you need | a laptop; no GPU: FP8 is emulated, with the bits of a GPU |
# | reading and doing | about two hours |
# | computing | 2 minutes on two cores |
# | you write | the adaLN block (4 lines), a guided prediction (8), the FLOPs of a step (6), whether curves agree (5) |
# | you measure | what guidance does; FP8 against bf16 and the spread of seeds; seven bugs of context parallelism |
#
# You should have done [lesson 04](04_mixed_precision.ipynb) (FP8), [lesson 05](05_compile_and_fuse.ipynb) (what fuses) and
# [lesson 11](11_context_parallel.ipynb) (context parallelism). Work in a copy: *File → Save Notebook As…*,
# `15_dit_fp8_mine.ipynb`.

# %%
from pathlib import Path

import torch
from torch import Tensor

from course.training.assemble import Training
from course.training.assemble import assemble as assemble_training
from course import config, data, parallel
from course.inference import diffusion_sampler
from course.training import verify
from course.data.latents import shards
from course.data.latents.digits import make_digits
from course.lab.figures import style, dit as figures_dit
from course.lab.instruments import emulated_context_parallel as emulated
from course.lab import notebook as lab
from course.lab.notebook import check
from course.models import DiTConfig, diffusion, dit
from course.planner import flops

lab.begin("15")
torch.set_num_threads(1)         # the models of this lesson are too small to be shared by cores
if not Path("data/digits/latents.json").is_file():
    make_digits(Path("data/digits"))                 # as `course data digits` does

# %% [markdown]
# ## Noise
#
# Take a clean sample and mix noise into it: a little, more, until nothing else is left. There are two recipes for it.
# **Diffusion** takes $x_t = \sqrt{a_t}\,x_0 + \sqrt{1 - a_t}\,\varepsilon$. The share $a_t$ of the signal falls from 1 to 0
# over a thousand steps of time. Sample and noise are independent, so the mean square of $x_t$ is $a_t v + 1 - a_t$, with $v$ that
# of the samples: it stays 1 where $v$ is 1, and otherwise goes from $v$ to 1. **Rectified flow** goes in a straight line, $x_t
# = (1 - t)\,x_0 + t\, \varepsilon$.
#
# > **Predict.** At half of the time, $t = 500$, how large is $\sqrt{a_t}$, what is left of the sample in diffusion? In
# > rectified flow it is one half.

# %%
my_left = 0.5                    # your prediction

# %%
cpu = torch.device("cpu")
digits = shards.Latents("data/digits", "train", (1, 8, 8), 10)
clean = digits.__getitems__([0])["latent"]                              # (1, 1, 8, 8)
noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
lab.beside("of the sample is left at t = 500", my_left, diffusion.signal_variance(cpu)[500].sqrt().item(), how="computed")
times = [0, 125, 250, 375, 500, 625, 750, 875, 999]
rows = {name: torch.cat([diffusion.noisy_example(name, clean, noise, torch.tensor([t]))[0] for t in times])[:, 0].numpy()
        for name in ("epsilon", "flow")}
many = digits.__getitems__(list(range(1000)))["latent"]
print("mean square of digits", f"{many.square().mean():.2f};", "of x_t at t = 0, 500, 999:", ", ".join(
    f"{diffusion.noisy_example('epsilon', many, torch.randn_like(many), torch.full((1000,), t))[0].square().mean():.2f}"
    for t in (0, 500, 999)))
lab.picture(figures_dit.images({"diffusion": rows["epsilon"], "rectified flow": rows["flow"]}, times,
                               "A digit on its way to noise"),
            "Two rows of the same digit at nine times. In the upper row it is lost in noise by 500, in the lower one by 750")

# %% [markdown]
# Diffusion's linear schedule destroys early: half of its times show next to nothing but noise.
#
# What should a model **predict**, given $x_t$ and $t$? In diffusion the noise $\varepsilon$; in flow the velocity of the
# line, $\varepsilon - x_0$. The loss is the mean squared error, in both. All of it is in two functions:

# %%
lab.show("course.models.diffusion.add_noise")
lab.show("course.models.diffusion.interpolate")

# %% [markdown]
# > **Question.** A model that says 0 for everything: what is its loss in diffusion, and what in rectified flow? Digits have
# > a mean square of about 0.7.
#
# <details><summary>Answer</summary>
# In diffusion 1, the mean square of the noise. In flow that of the noise plus that of the sample, about 1.7. Remember it:
# below you are going to predict the first loss of a real model.
# </details>
#
# ## The condition
#
# The model has to know the time, and the class that it should draw. Both become one vector for each sample, the
# **condition** $c$. How does it get into the blocks? The paper tried extra tokens and cross-attention, and found a third
# way best and cheapest: let $c$ decide how each norm scales and shifts (Peebles and Xie 2023, arXiv:2212.09748, section
# 3.2). In a block the LayerNorms have no weights of their own. One linear map makes six vectors of $c$: shift, scale and
# **gate** for attention, and the same for the MLP.
#
# That linear map, `ada`, starts at **zero**. This is the Zero of adaLN-Zero, and everything else follows from what it is for:
#
# - with all six vectors zero, a block hands on its tokens as they are, whatever its other weights;
# - with both gates one, shift and scale zero, it is an ordinary transformer block: each branch has a norm in front, and its input
#   is added behind;
# - the condition decides about each branch twice: what goes in, after the norm, and how much of what comes out counts.
#
# An example with numbers. Of one token the norm has made (1, −1). Let the scale be (0.5, 0) and the shift (0, 2). What goes into
# the branch is (1.5, 1): the first number has grown by half, and the second has moved by 2.
#
# > **Predict.** With `ada` at zero, and the output layer too: what is the model's output at the start, and what its first loss
# > on digits with rectified flow?

# %%
my_first_loss = 1.0              # your prediction

# %% [markdown]
# ## Exercise: modulate and the adaLN block
#
# `modulate(x, shift, scale)` works on tokens (B, T, D), with vectors (B, D) for each sample: every token of a sample gets the
# same ones. Zeros change nothing. Before you write the block, decide where each of the six has to act so that the three rules
# above hold. In the block, $c$ goes through SiLU (`F.silu`) before `ada`; its output is cut into six along
# dim 1, in the order shift, scale, gate, shift, scale, gate. `__init__` is given.

# %% exercise="adaln"
from course.models.dit import AdaLNBlock, modulate

# %%
check("adaln")


# %%
def assemble(*overrides: str) -> Training:
    """A small DiT for digits, and what trains it: rectified flow."""
    settings = config.load("dit-digits", ["model.dim=64", "model.depth=3", "train.steps=700", "optim.lr=3e-3", "optim.warmup=50",
                                          "optim.ema=0", "train.device=cpu", *overrides])
    return assemble_training(settings, parallel.build_mesh(settings.parallel, parallel.World(device=cpu)))


with lab.yours(AdaLNBlock, modulate):
    digit_run = assemble()
loader = data.train_loader(digit_run.config, digit_run.mesh.dp, cpu, 0, digit_run.model.example)
found = [digit_run.step(next(loader))[0].item() for _ in range(digit_run.config.train.steps)]
loader.close()
lab.beside("the first loss", my_first_loss, found[0])
means = torch.tensor(found).unfold(0, 25, 25).mean(1)
lab.picture(style.curves({"your blocks": (range(25, 701, 25), means.tolist())}, "step", "loss, means of 25",
                           "A DiT of a quarter million parameters learns digits"), "A curve that falls from 1.7 below 0.6")

# %% [markdown]
# **What you should see:** about 1.7, the loss of a model that says 0. Each block hands its tokens on as they are, so
# that a DiT of any depth starts as no depth at all, and no layer is in the way of another's gradient. (The gates open
# together, from the second step on: in the first the output layer is still zero, and lets no gradient through.)
#
# > **Question.** All of `ada` is zero, so the gates are, so the branches add nothing. Does the gradient of `ada` not
# > vanish, too, forever?
#
# <details><summary>Answer</summary>
# The gradient of a <i>gate</i> is the branch's output times what comes from above, which is not zero, once the output layer
# has moved in the first step. What vanishes at first is the gradient of everything <i>inside</i> the branches: the weights
# of attention and MLP begin to learn when the gates have opened, from the third step on. Keep that in mind for FP8.
# </details>
#
# ## Guidance
#
# The model has learned what digits look like, and roughly which belongs to which class. Samples get much better with
# **classifier-free guidance** (Ho and Salimans 2022, arXiv:2207.12598). In training a tenth of the labels are hidden:
# replaced by an extra class, *unknown*. So one model makes two predictions, with the class and without. Their difference
# points to where samples look more like the class. Go further that way than the model says:
#
# $$\text{unknown} + s \cdot (\text{known} - \text{unknown})$$
#
# With $s = 1$ that is the prediction of the class, no guidance; with $s = 0$ the class is ignored.
#
# > **Question.** Two predictions for each step. Would you call the model twice, or once with both in one batch?
#
# <details><summary>Answer</summary>
# Once: the weights are read once for both, half as many kernels are launched, and a larger batch uses a GPU better. The samples
# of a batch do not see one another, so the predictions are the same.
# </details>
#
# ## Exercise: a guided prediction
#
# `predictor(model, labels, precision)` makes a function of latents (B, C, H, W) and times (B,), which asks the model
# with these labels. Return such a function, guided. Ask **once**, with a batch of two halves: the samples with their
# class, and again with `model.c.classes`, the unknown one. Where the scale is 1, ask for the class alone. `channels`
# comes from the paper's released code, which guides three of the four channels: if it is not 0, only the first so many
# channels are guided, and the others stay as predicted with the class.

# %% exercise="guidance"
from course.inference.diffusion_sampler import guided

# %%
check("guidance")

# %% [markdown]
# > **Predict.** From $s = 1$ to 2, 4 and 8: will digits keep getting better? Will they get more alike?

# %%
digit_run.model.eval()
labels = torch.arange(10).repeat_interleave(12)                         # 12 of each
drawn = {}
with lab.yours(guided):
    for scale in (1, 2, 4, 8):
        drawn[scale] = diffusion_sampler.sample_latents(digit_run.model, labels,
                                              diffusion_sampler.SamplerSettings(steps=20, guidance=scale, batch=120))
digit_run.model.train()
lab.picture(figures_dit.images({f"scale {scale}": x[::12, 0].clamp(-1, 1).numpy() for scale, x in drawn.items()}, range(10),
                               "One sample of each class, from the same noise"),
            "Four rows of the digits 0 to 9. With scale 1 some are hard to read, with larger scales they become clearer, with 8 "
            "too black and white")

# %% [markdown]
# Look at them, and count. For each sample take the real digit that is nearest to it: is it of the class that was asked for?
# And how far do the samples of one class scatter?

# %%
real = digits.__getitems__(list(range(len(digits))))


def recognised(x: Tensor) -> float:
    """Percent of the samples whose nearest real digit is of their class."""
    nearest = torch.cdist(x.flatten(1), real["latent"].flatten(1)).argmin(1)
    return 100 * (real["label"][nearest] == labels).double().mean().item()


def scatter(x: Tensor) -> float:
    """The standard deviation within a class, mean over pixels and classes."""
    return torch.stack([x[labels == label].std(0).mean() for label in range(10)]).mean().item()


for scale, x in drawn.items():
    beyond = 100 * (x.abs() > 1.1).double().mean().item()
    print(f"scale {scale}: {recognised(x):5.1f}% recognised, scatter {scatter(x):.2f}, {beyond:4.1f}% of the pixels beyond +-1.1")
print(f"real digits: scatter {torch.stack([real['latent'][real['label'] == n].std(0).mean() for n in range(10)]).mean():.2f}")

# %% [markdown]
# **What you should see:** guidance makes samples typical: more of them are recognised, and up to 4 they scatter less. At 8 nearly
# everything is recognised, and the pictures are no digits any more: pixels are driven beyond black and white, further than
# in any that the model has seen. Where real samples should be matched in their variety, the scale is small (the paper's
# best FID has 1.5); for pretty pictures it is 4.
#
# This was a model trained for seconds. `course train dit-digits`, then `course generate runs/dit-digits/default --guidance
# 2`, takes minutes, and is recognised every time.
#
# ## The FLOPs of a step
#
# MFU is model FLOPs over time, over the peak. So somebody has to count, and if the count is off, so is every MFU in the
# report. A matrix multiplication of (m, k) by (k, n) has $2mkn$. Norms, GELU and sums do not count.
#
# > **Predict.** DiT-XL/2 on 256 pixels: 256 tokens, width 1152, 28 blocks. What share of the FLOPs is in attention's scores
# > (queries times keys, weights times values)? And what share in the modulation?

# %%
my_scores = 20.0                 # your predictions, percent
my_modulation = 20.0

# %% [markdown]
# ## Exercise: the FLOPs of a DiT step
#
# For **one sample**, forward and backward. Walk through the model: patches in (`patch` values each: 16, of 2 x 2 points in 4
# channels); the time, 256 waves through two maps of width `dim`; in each block the modulation, attention, the MLP; at the head
# a modulation with two vectors, and patches out. Looking a class up multiplies nothing. Two things to decide:
#
# - which maps work for each **token**, and which once for each **sample**?
# - backward a map has two products: the gradient of its weight, and that of its input. Which maps need no gradient of their
#   input?

# %% exercise="dit-flops"
def dit_flops(tokens: int, dim: int, hidden: int, depth: int, patch: int) -> int:
    """Model FLOPs of one sample of DiT, forward and backward: matmuls alone, (m, k) by (k, n) has 2·m·k·n.

    hidden: the MLP's width; patch: values of a patch, in and out; the time comes in as 256 waves.
    """
    ### BEGIN SOLUTION
    maps = 2 * tokens * (4 * dim * dim + 2 * dim * hidden)              # qkv, out, up, down
    scores = 2 * 2 * tokens * tokens * dim                              # queries with keys, weights with values
    blocks = depth * (maps + scores + 2 * dim * 6 * dim)                # and the modulation, once a sample
    head = 2 * dim * 2 * dim + 2 * tokens * dim * patch
    first = 2 * tokens * patch * dim + 2 * 256 * dim                    # their inputs need no gradient
    return 3 * (blocks + head + 2 * dim * dim) + 2 * first
    ### END SOLUTION

# %%
check("dit-flops")

# %%
xl = DiTConfig()
total, parts = dit_flops(xl.tokens, xl.dim, 4 * xl.dim, xl.depth, 16), flops.dit_parts(xl)
lab.beside("scores", my_scores, 100 * parts["scores"] / total, "%", "computed")
lab.beside("modulation", my_modulation, 100 * parts["modulation"] / total, "%", "computed")
print(f"DiT-XL/2, 256 pixels: {total / 1e9:.1f} GFLOP a sample; at 512 pixels (1024 tokens) "
      f"{dit_flops(1024, xl.dim, 4 * xl.dim, xl.depth, 16) / 1e9:.0f}")

# %% [markdown]
# The modulation has a third of a block's *weights*, and next to none of its FLOPs: 6 D² weights that work once for 256
# tokens. So "6 FLOPs a parameter and token", the rule for GPT, gives almost half as much again as there is here.
#
# ## Two formulas, one of them wrong?
#
# Engineers' notes on training DiT with Megatron-LM, which have no address that could be linked to here, give the FLOPs of a
# step with $s$ tokens, $l$ layers, width $h$, $h_2$ of the MLP, patches of $p \times p$ points (so `patch` above is $4p^2$) and
# global batch $gbs$ as
#
# $$gbs \cdot s\,l\,h^2 \left( 24 + \frac{12 s}{h} + \frac{12 h_2}{h} + \frac{36}{s} + \frac{12 + 24\,p^2/h}{l} +
# \frac{512 + 2\,l}{s\,h\,l} \right)$$
#
# and in another place with $2h$ where this has $2l$. Which is right? Multiply a term by $s\,l\,h^2$, and see which map it
# is. The first: $24\,s\,l\,h^2 = l \cdot 3 \cdot 2 s \cdot 4h^2$, forward and backward through four maps of $h \times h$:
# attention's.
#
# > **Predict.** Do the same with $36/s$, with $12/l$, and with $2h$ and $2l$ in the last term. What do they stand for?

# %%
ours = dict(parts)
scale = xl.tokens * xl.depth * xl.dim**2
theirs = {name: term * scale for name, term in flops.source_terms(xl, "h").items()}
print(f"{'GFLOP a sample':22}{'counted':>12}{'formula':>12}{'formula / counted':>20}")
for name, value in ours.items():
    other = theirs.get(name, 0.0)
    print(f"{name:22}{value / 1e9:12.4f}{other / 1e9:12.4f}{other / value:20.4g}")
with_l = flops.source_terms(xl, "l")["time, second map"] * scale
print(f"{'... and with 2l':22}{'':12}{with_l / 1e9:12.4f}{with_l / ours['time, second map']:20.4g}")
print(f"all: {sum(ours.values()) / 1e9:.2f} counted, {sum(theirs.values()) / 1e9:.2f} by the formula with 2h, "
      f"{(sum(theirs.values()) - theirs['time, second map'] + with_l) / 1e9:.2f} with 2l")

# %% [markdown]
# Term by term:
#
# | term | times $s\,l\,h^2$ | stands for | |
# |---|---|---|---|
# | $24$ | $l \cdot 3 \cdot 2s \cdot 4h^2$ | attention's four maps | right |
# | $12s/h$ | $l \cdot 3 \cdot 2 \cdot 2 s^2 h$ | scores | right |
# | $12h_2/h$ | $l \cdot 3 \cdot 2s \cdot 2 h h_2$ | the MLP | right |
# | $36/s$ | $l \cdot 3 \cdot 2 \cdot 6h^2$ | the modulation, once a sample | right |
# | $12/l$ | $3 \cdot 2s \cdot 2h^2$ | the head's modulation | as if for each token: $12/(s\,l)$ is right |
# | $24p^2/(h\,l)$ | $3 \cdot 2s \cdot 4p^2 \cdot h$ | patches of 4 channels *out* | right; *in*, $16p^2/(h\,l)$, is missing |
# | $512/(s\,h\,l)$ | $2 \cdot 256 \cdot h$ | the time's first map | forward alone: 1024 is right |
# | $2h/(s\,h\,l)$ | $2 \cdot h^2$ | the time's second map | forward alone: $6h$ is right |
# | $2l/(s\,h\,l)$ | $2\,l\,h$ | nothing: no map has $l\,h$ weights | a slip |
#
# So of the two **2h** is the one that was meant, though without the backward pass, and it hardly matters: the last term
# is less than a thousandth of a percent. Both versions count the head's modulation $s$ times, which makes the step half
# a percent too large, and leave out a few small products. A formula for a report should be tested against a counter,
# module by module; this library's is (`tests/planner/test_flops.py`, to the last digit).
#
# > **Question.** With `train.recompute=full` the GPU executes a third more. Does MFU rise?
#
# <details><summary>Answer</summary>
# No: it counts what the model needs, <code>flops.step</code>. What a run executes, <code>flops.executed</code>, is another
# number (some call its ratio HFU). It includes recomputed blocks, and the scores that fused attention computes twice.
# </details>

# %%
for how in ("none", "selective", "full"):
    settings = config.load("dit-xl", [f"train.recompute={how}"])
    print(f"recompute={how:9} model {flops.step(xl, 1) / 1e9:.1f}, executed {flops.executed(settings, 1) / 1e9:.1f} GFLOP")

# %% [markdown]
# With `none`, too, more is executed than the model needs: fused attention computes its scores again in every backward pass.
# `selective` adds nothing to that: it keeps what matrix multiplications have computed, and repeats only what lies between them.

# %% [markdown]
# ## Does it train the same in FP8?
#
# "Our FP8 curve follows bf16's" is easily said: on a slide any two curves lie on each other. What would convince you?
#
# - The **same start**: both from the same weights, with the same batches, the same noise, the same times. Then the number
#   format is all that differs.
# - **Windows**: a loss of one step is mostly the luck of its times and noise. Compare means of many steps.
# - A **yardstick**: bf16 differs from itself, with another seed. What FP8 changes should be less than that.
# - A **bound**, said before; and a **control**: something that is known to be bad, and that the method has to fail. Ours is
#   FP8 with **frozen** scales, those of the first step forever.
#
# > **Question.** Why compare FP8 with the bf16 run of the *same* seed, and not with the mean of several?
#
# <details><summary>Answer</summary>
# The two share everything but the format, so that most of the noise cancels in their difference: a small effect can be
# seen. Beside the mean of other seeds the luck of this one seed would be part of the gap.
# </details>
#
# ## Exercise: do two curves agree?
#
# Return three scalar tensors: the **gap**, the **spread**, and whether the candidate agrees, gap ≤ spread.
#
# - Take means over windows of `length` steps, one window after another; steps at the end that fill none are left out.
#   (`unfold` makes windows: `x.unfold(0, 5, 5)`.)
# - gap: in each window, how far the candidate is from the first reference, in magnitude, over the first reference; then the
#   mean over the windows.
# - spread: in each window the standard deviation over the references (`std`, as it comes), over the first reference; then
#   the mean.

# %% exercise="agrees"
def agrees(candidate: Tensor, references: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """(gap, spread, whether the candidate agrees): its losses (steps,) beside those of several seeds (seeds, steps).

    Means of `length` losses each. gap: how far the candidate is from the first reference, which has its seed; spread: the
    standard deviation over the seeds; both relative to the first reference, and then the mean over the windows.
    """
    ### BEGIN SOLUTION
    means = references.unfold(1, length, length).mean(2)                # (seeds, windows)
    own = candidate.unfold(0, length, length).mean(1)                   # (windows,)
    gap = ((own - means[0]).abs() / means[0]).mean()
    spread = (means.std(0) / means[0]).mean()
    return gap, spread, gap <= spread
    ### END SOLUTION

# %%
check("agrees")

# %% [markdown]
# Now the experiment. The task is small: sums of four plane waves, which a DiT of two blocks learns to free from noise in
# seconds (`course/lab/instruments/emulated_context_parallel.py`). Three seeds of bf16; native FP8 with delayed scaling; the
# control.
#
# > **Predict** in percent: the spread of bf16's seeds, the gap of FP8, that of frozen scales.

# %%
my_spread, my_fp8, my_frozen = 5.0, 5.0, 5.0         # your predictions, percent

# %%
STEPS, LENGTH = 200, 25
references = torch.stack([emulated.losses(STEPS, "precision=bf16", seed=seed) for seed in range(3)])
candidates = {"FP8, delayed": emulated.losses(STEPS, "precision=fp8"),
              "FP8, frozen scales": emulated.losses(STEPS, "precision=fp8", frozen=True)}
outcome = {name: agrees(curve, references, LENGTH) for name, curve in candidates.items()}
lab.beside("spread of the seeds", my_spread, 100 * float(outcome["FP8, delayed"][1]), "%")
lab.beside("gap of FP8", my_fp8, 100 * float(outcome["FP8, delayed"][0]), "%")
lab.beside("gap with frozen scales", my_frozen, 100 * float(outcome["FP8, frozen scales"][0]), "%")
for name, (_, _, verdict) in outcome.items():
    print(f"{name:20}", "agrees with bf16" if verdict else "does not agree with bf16")
windows = range(LENGTH, STEPS + 1, LENGTH)
lab.picture(figures_dit.curves_beside_seeds(windows, references.unfold(1, LENGTH, LENGTH).mean(2).numpy(),
                                     {name: curve.unfold(0, LENGTH, LENGTH).mean(1).tolist()
                                      for name, curve in candidates.items()},
                                     "% above bf16 of the same seed", "A small DiT, in means of 25 losses"),
            "A grey band of a few percent around zero. FP8 with delayed scaling stays within it; with frozen scales it rises "
            "out of it, to tens of percent")

# %% [markdown]
# **What you should see:** FP8 is within a percent of bf16, less than bf16 differs from itself; frozen scales are off by
# several times the spread, and more and more. (The dotted lines are the other two seeds of bf16.)
#
# > **Question.** Frozen scales are those of the *first* step. Remember what adaLN-Zero does in that step: which amaxes are
# > zero in it?
#
# <details><summary>Answer</summary>
# All those of gradients inside the blocks: gates and output layer are zero, so nothing comes down. A tensor of zeros gets
# the scale 1 (lesson 04), and real gradients, about a hundred-thousandth, then fall below the smallest number of E5M2.
# Delayed scaling is right again as soon as the first real gradient has been seen. Weights and activations grow, besides,
# beyond what the first step saw.
# </details>
#
# What does "agrees" prove? That over so many steps of this model FP8 changes less than luck does. Not that nothing will go
# wrong after a hundred thousand: watch the amaxes there. And a mistake that hurts less than the seeds scatter is not seen:
# more seeds, longer windows, and the same-seed difference itself, window by window, are the finer instruments.
#
# The same on an H200, in models that people train: DiT-XL/2 on 256 and on 512 pixels and GPT 1.3B, all runs of a model
# from the same fresh weights; GPT with frozen scales comes after.
#
# > **Predict.** Which of the recipes is nearest to bf16: delayed with a history of 1024 and its maximum, delayed with the
# > last step alone, or current scaling? And is flash attention in place of cuDNN's, in bf16, nearer than any of them?

# %%
REFERENCE = "bf16, seed 0"
for model, about in lab.results("alignment_h200")["models"].items():
    runs, length = about["runs"], about["steps"] // 20
    seeds = torch.tensor([runs[name]["losses"] for name in runs if name.startswith("bf16, seed")])
    table = {}
    for name, run in runs.items():
        gap, spread, verdict = agrees(torch.tensor(run["losses"]), seeds, length)
        table[name] = {"gap, %": "" if name == REFERENCE else 100 * float(gap), "GB": run["memory_gb"],
                       "agrees": "" if name.startswith("bf16, seed") else "yes" if verdict else "no"}
    lab.recorded("alignment_h200", table, f"{model}, {about['steps']} steps of {about['batch']} samples; the seeds of bf16 "
                                          f"spread by {100 * float(spread):.2g}%")
    shown = [name for name in runs if name.startswith("fp8") and "frozen" not in name]
    curves = {name: torch.tensor(runs[name]["losses"]).unfold(0, length, length).mean(1).tolist() for name in shown}
    lab.picture(figures_dit.curves_beside_seeds(range(length, about["steps"] + 1, length),
                                         seeds.unfold(1, length, length).mean(2).numpy(), curves,
                                         "% above bf16 of the same seed", f"{model}, in means of {length} losses"),
                f"{model}: lines of {len(shown)} FP8 recipes around zero, and a grey band, bf16's seeds, "
                f"{100 * float(spread):.2g}% in the mean, which single windows leave now and then")

# %% [markdown]
# **What you see.** In the mean over its windows every recipe stays within what seeds do, and frozen scales, tried in DiT, do
# not: they are off by 320% on 256 pixels, by 460% on 512. Single windows leave the band, as other seeds do. (The gap of another
# seed is larger than the spread: the difference of two seeds scatters more than each of them.) In GPT 1.3B, whose losses are
# means over 8192 tokens a step, the instrument is fine enough to rank them: another attention kernel, which is nothing but
# rounding, makes 0.07%; FP8 0.2 to 0.3%; other seeds more than 1%. The recipes hardly differ: a maximum over 1024 steps is as
# near as the newest amax alone. DiT's curves differ more, since a step's loss depends on the times that it draws: rounding
# alone makes 1.3%. With 16 images a step (512 pixels) it makes 3.4%, and the seeds spread by 14%: there the test would let a
# real fault of ten percent pass. *State the spread.* Without it "FP8 agrees" says nothing.
#
# And a test should be seen to fail. In DiT frozen scales fail it, hundreds of percent off.
#
# > **Predict** how far GPT 1.3B is from bf16 after 500 steps with the scales of its first step. (You know what DiT's first
# > gradients are. What are GPT's?)

# %%
my_gpt = 100.0                  # your prediction, percent

# %%
runs = lab.results("alignment_h100")["models"]["gpt-1.3b"]["runs"]
frozen, same = (torch.tensor(runs[name]["losses"]).unfold(0, 25, 25).mean(1) for name in ("fp8 frozen scales", REFERENCE))
lab.beside("gap with frozen scales, GPT 1.3B", my_gpt, 100 * float((frozen / same - 1).abs().mean()), "%", "recorded on an H100")

# %% [markdown]
# A tenth of a percent: nearer than any recipe. Nothing in a GPT starts at zero but biases, so its first gradients are of the
# size that later ones have; norms keep the activations where they are; and 500 steps change weights little. So the first
# scales will do, and this test, in this model, cannot tell scaling from none. It says that FP8's *rounding* does no harm here.
# That *scales follow* is shown by DiT, where what is wrong is seen. When a test passes, ask what it would take to fail.
#
# The same instrument serves for a *layout*. Context parallelism cuts each sample's tokens over two GPUs: the same sums in another
# order. So its gap has to be rounding's.

# %%
for model, about in lab.results("alignment_cp_h200")["models"].items():
    one, two = (about["runs"][name] for name in (REFERENCE, "bf16, cp=2"))
    print(f"{model:9} in bf16: one GPU ends at {one['losses'][-1]:.4f}, two that share each sample's tokens at "
          f"{two['losses'][-1]:.4f}; gap {100 * about['gap']['bf16, cp=2']:.2g}%")

# %% [markdown]
# GPT's 0.05% is no more than another attention kernel makes. DiT's 2% is more than the 1.3% of another attention kernel, and
# less than half of what its seeds spread by.

# %%
starts = lab.results("alignment_h200")["models"]["gpt-1.3b"]["runs"]
for name in (REFERENCE, "fp8 delayed, 1024 max", "fp8 current", "fp8 Transformer Engine"):
    print(f"{name:24} first losses of GPT 1.3B:", ", ".join(f"{loss:.2f}" for loss in starts[name]["losses"][:5]))

# %% [markdown]
# One curve begins differently: Transformer Engine's second loss is 11.15, all others' is 10.3. Its delayed scaling
# starts with scales of 1, so that the first gradients are lost; ours looks at the first step before it casts. Two steps
# later it has caught up. A comparison of the first steps alone would have found a difference between two *libraries*,
# and called it one of FP8.

# %% [markdown]
# ## Am I really running FP8?
#
# People ask this with good reason: a setting that is ignored gives a perfect loss curve. The bf16 one. Three answers, from
# cheap to sure: the loss is **not** bit for bit that of bf16; the linears have an FP8 product in their place; and a profile
# of the step has kernels with `e4m3` or `f8` in their names, or, where FP8 is emulated, the operator that casts.
#
# > **Predict.** A block has five linears: qkv, out, up, down, ada. How many of them run in FP8 by default, and how many
# > casts does one take, forward and backward? (`fp8.keep` says what stays in bf16.)

# %%
my_casts = 15                    # casts in a step, for each block

# %%
from torch.profiler import ProfilerActivity, profile

small = ["model.latent=[1,8,8]", "train.device=cpu", "precision=fp8", "model.depth=2"]
settings = config.load("dit-demo", small)
eight = assemble_training(settings, parallel.build_mesh(settings.parallel, parallel.World(device=cpu)))
batch = eight.model.example(8, cpu)
first = eight.step(batch)                            # the first step measures; there are no scales yet
with profile(activities=[ProfilerActivity.CPU]) as trace:
    second = eight.step(batch)
casts = sum(event.count for event in trace.key_averages() if event.key == "course::quantize")
lab.beside("casts of a block in a step", my_casts, casts / settings.model.depth, how="counted")
print("in bf16 stay:", ", ".join(settings.fp8.keep))

# %% [markdown]
# **What you should see:** 12. Four linears, three casts each: its input, its weight, and the gradient of its output. `ada`
# stays: it has one row for each sample, too few to be worth a cast.
#
# ## What it brings
#
# Two measurements from the same notes (H20 GPUs, micro-batch 32): 1316 ms in bf16 and 1093 ms in FP8, 1.2 times as
# fast; and flash attention 1522 ms against cuDNN's 1483, a gain of 3%.
#
# > **Predict.** On an H200, DiT-XL/2 with 256 tokens and with 1024: how many times as fast is FP8 as bf16? And where does
# > the choice of the attention kernel matter more?

# %%
rows = {row["rung"]: row for row in lab.results("dit_h200")["rows"] if "Triton kernels" not in row["rung"]}
lab.recorded("dit_h200", {name: {"samples/s": row["samples_per_s"], "GB": row["memory_gb"], "MFU, %": 100 * row["mfu"]}
                          for name, row in rows.items()}, "Whole training steps of DiT-XL/2 (`course bench dit`)")

# %% [markdown]
# **What you see.** native FP8, compiled, is 1.16 times as fast as bf16 at 256 pixels and 1.18 times at 512: less than the
# twofold peak, since only the four linears of a block gain, and each pays for its casts (the MFU halves: its denominator is
# FP8's peak). Transformer Engine is *slower* than compiled bf16 here. Its linears are as fast, but what lies between them, three
# adaLN steps a block, stays unfused, and its 3,600 kernels a step are more than the host can launch in time: lesson 06. Flash
# attention costs 4% at 256 tokens and 10% at 1024. And the average of the weights, a kernel more over all parameters, is 1%.

# %% [markdown]
# ## Three fused steps
#
# Between its matrix multiplications a DiT block does three things, each of which reads and writes tensors of the size of
# `x`:
#
# 1. a **modulated LayerNorm**: normalise, times 1 + scale, plus shift;
# 2. **scale-residual and modulated LayerNorm**: gate times branch, plus `x`, and then the same again for the MLP;
# 3. **scale-add**: gate times branch, plus `x`.
#
# Fused into one kernel each step reads what comes in and writes what goes out, once (lesson 05).
#
# > **Predict** the traffic of all three together, in units of `x` read or written once: operator by operator, and fused.

# %%
my_eager, my_fused = 20, 10      # your predictions

# %%
from torch.utils._python_dispatch import TorchDispatchMode

x, branch = torch.randn(2, 4, 64, 48)
shift, scaling, gate = torch.randn(3, 4, 48)
unit = x.nbytes


class Traffic(TorchDispatchMode):
    """Counts the bytes of large tensors that operators read and write."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            ends = [*args, *(out if isinstance(out, tuple) else [out])]
            self.total += sum(t.nbytes for t in ends if isinstance(t, Tensor) and t.nbytes >= unit)
        return out


def norm_and_modulate(x: Tensor) -> Tensor:
    """Step 1."""
    return dit.modulate(torch.nn.functional.layer_norm(x, x.shape[-1:]), shift, scaling)


def scale_add(x: Tensor, branch: Tensor) -> Tensor:
    """Step 3."""
    return x + gate[:, None] * branch


steps = {"modulated LayerNorm": (lambda: norm_and_modulate(x), 2),
         "scale-residual + modulated LayerNorm": (lambda: norm_and_modulate(scale_add(x, branch)), 4),
         "scale-add": (lambda: scale_add(x, branch), 3)}
bars, eager_units, fused_units = {}, 0.0, 0.0
for name, (function, ends) in steps.items():
    with Traffic() as traffic:
        function()
    bars[f"{name}, eager"], bars[f"{name}, fused"] = {"passes": traffic.total / unit}, {"passes": float(ends)}
    eager_units, fused_units = eager_units + traffic.total / unit, fused_units + ends
lab.beside("operator by operator", my_eager, eager_units, "times x", "counted")
lab.beside("fused", my_fused, fused_units, "times x", "counted")
lab.picture(style.stacked(bars, "tensors of the size of x, read or written", "The three steps of a block, forward"),
            "Tensors of the size of x, read or written, eager and fused: modulated LayerNorm 6 and 2, scale-residual with "
            "modulated LayerNorm 11 and 4, scale-add 5 and 3")

# %% [markdown]
# 22 against 9. What is bound by memory gets as much faster as it moves less: 2.4 times at best. Of a block of DiT-XL that
# is a part: lesson 02's question, how large a part, comes before the kernel.

# %%
fused = lab.results("dit_fused_h200")["rows"]
lab.recorded("dit_fused_h200", {f"{row['case']}, {row['samples']} x {row['tokens']} tokens of {row['dim']}": {
    "eager, ms": row["eager_ms"], "compiled, ms": row["compiled_ms"], "times as fast": row["eager_ms"] / row["compiled_ms"],
    "TB/s, compiled": row["gb_per_s"] / 1e3, "Triton, ms": row["hand_ms"], "TB/s, Triton": row["hand_gb_per_s"] / 1e3}
    for row in fused}, "The three steps, forward and backward (`python -m experiments.fused_kernels FILE`)")
gains, more = ([row[one] / row[two] for row in fused]
               for one, two in (("eager_ms", "compiled_ms"), ("compiled_ms", "hand_ms")))
print(f"compiled {min(gains):.1f} to {max(gains):.1f} times as fast as eager; Triton {min(more):.1f} to {max(more):.1f} times "
      "as fast as that")

# %% [markdown]
# (More than 2.4 is no contradiction: backward has passes of its own to save.) Each step is replayed from a CUDA graph, in
# which the host has no part (lesson 06). Called one by one, the smallest would show what the host takes to call a compiled
# function forward and backward, and nothing of its kernels.
#
# TB/s are those of the bytes that *have* to move. The third step compiled reaches 3.6 to 3.8, near the 4.3 of a copy on this
# GPU, and in Triton nothing is left to gain. In the first two, the compiler's kernels are not the last word: for a width that is
# no power of two, such as 1152, they read a row twice, and each sum over tokens, for the gradients of shift, scale and gate,
# reads the tensors once more. `kernels=triton` puts kernels in their place that read each tensor once
# (`course/ops/fused_add_norm.py`, and GELU and Adam with the weights' average besides).
#
# It replaces attention, too. DiT-XL's 1152 numbers are 16 heads of 72; tensor cores want sides that are powers of two,
# or nearly, and PyTorch's kernel, cuDNN's, pads a head with zeros to 128. `course/ops/packed_attention_triton.py` takes a head as
# 64 and 16 numbers. It also writes the gradients of queries, keys and values to where the linear before them will read
# them, with the sum for its bias.
#
# > **Predict** what share of the multiplications is with zeros, if a head is padded to 128, and if it is taken as 64 +
# > 16.

# %%
my_padding, my_parts = 0.3, 0.05       # your predictions

# %%
lab.beside("zeros, padded to 128", 100 * my_padding, 100 * (1 - 72 / 128), "%", "counted")
lab.beside("zeros, as 64 + 16", 100 * my_parts, 100 * (1 - 72 / 80), "%", "counted")

# %% [markdown]
# Seven numbers in sixteen are zeros there, one in ten here. Not all of that difference is gained: in the backward pass
# two of this kernel's seven products repeat others. To spare them, many programs would have to add to the queries'
# gradient in memory, in no fixed order. On the other hand some work is no longer needed at all: putting the three
# gradients side by side, and summing them for the bias.
#
# > **Predict.** A step of DiT-XL/2 at 256 pixels took 116 ms with the compiler's kernels. How long does it take with these?

# %%
my_step = 108.0                  # your prediction, ms

# %%
beside = next(row for row in lab.results("gelu_h200")["before"] if row["rung"].startswith("256 px"))
lab.beside("a step with Triton kernels", my_step, beside["ms"], "ms", "recorded on an H200")
print(f"{beside['compilers_ms'] / beside['ms']:.2f} times as fast, both measured on one machine")

# %% [markdown]
# The matrix multiplications are two thirds of that step and were left as they are; they only lost their casts: Adam by
# hand reads gradients in 16 bits and writes 16-bit weights beside its float32 masters
# (`course/parallel/data_parallel/master_weights.py`).
#
# One step between matmuls can go *into* one. A matmul has its result in registers before it writes it, and what it does
# there, its **epilogue**, costs no pass over memory. So backward, GELU's gradient is computed by the matmul before it:
# cuBLASLt, NVIDIA's library, has kernels for that, which PyTorch does not use; we called them through its C interface. It has
# one that takes even the next step, too, the sum over tokens that is the gradient of the bias.
#
# > **Predict.** In DiT-XL's MLP that matmul alone takes 275 us, and with GELU's gradient and the sum in a kernel after it
# > 407 us. What is left of these 132 us with GELU's gradient in the epilogue, and what with both?

# %%
my_dgelu, my_both = 40.0, 10.0         # your predictions, us more than the matmul alone

# %%
kernels = lab.results("gelu_h200")["kernels_us"]["dit-xl"]
alone = kernels["backward: matmul alone"]
lab.beside("GELU's gradient in the epilogue", my_dgelu, kernels["backward: DGELU"] - alone, "us", "recorded on an H200; no sum")
lab.beside("the sum in it, too", my_both, kernels["backward: DGELU_BGRAD"] - alone, "us", "recorded on an H200")
print(f"a kernel for the sum alone: {kernels['backward: sum over tokens']} us")

# %% [markdown]
# The kernel that does most is by far the slowest, slower than all three apart: an option that exists is not yet one that
# is fast. With the first, and a kernel of 50 us for the sum, a step of 100 ms, with 28 blocks, was shorter by
# 0.9 ms: less than 28 times what the kernels say, since power bounds this step, as you see next, and a GPU that
# waits less for memory has to lower its clock. Less than 2% of a step is not worth 300 lines of code, so the library
# no longer has it. The steps that follow were recorded with it.

# %%
hand = {row["rung"]: row for row in lab.results("dit_h200")["rows"] if "Triton kernels" in row["rung"]}
lab.recorded("dit_h200", {name: {"samples/s": row["samples_per_s"], "GB": row["memory_gb"], "MFU, %": 100 * row["mfu"]}
                          for name, row in hand.items()}, "The same steps with Triton kernels, in a CUDA graph")
for pixels in ("256 px", "512 px"):
    wide, narrow = (hand[f"{pixels}: {how}, compiled, narrow stream, Triton kernels, in a graph"] for how in ("bf16", "fp8"))
    print(f"{pixels}: FP8 is {wide['ms'] / narrow['ms']:.2f} times as fast as bf16")

# %% [markdown]
# At 256 pixels FP8 gains more now than the 1.16 times from before: it makes the multiplications shorter and nothing else, so the
# less there is besides them, the more of the step becomes faster (Amdahl). At 512 pixels hardly: there bf16 has gained as
# much, by GELU's gradient in the epilogue, which the FP8 product did not have.
#
# An MFU of 46% in bf16: what keeps it from more? Not only code.
#
# > **Predict.** The GPU may clock up to 1980 MHz, and the 989 TFLOP/s of its data sheet are those of 1830. At which clock does it
# > run this step, again and again?

# %%
my_clock = 1900                  # your prediction, MHz

# %%
rows = [row for file in ("power_h200", "gelu_h200", "dit_h200") for row in lab.results(file)["rows"]
        if row["rung"].startswith("256 px: bf16") and "clock_mhz" in row]
clocks, watts = ([row[name] for row in rows] for name in ("clock_mhz", "power_w"))
lab.beside("the clock meanwhile", my_clock, min(clocks), "MHz", "recorded on an H200, the slowest of several")
print(f"clocks of {min(clocks):.0f} to {max(clocks):.0f} MHz in {len(rows)} runs, which draw {min(watts):.0f} to "
      f"{max(watts):.0f} of the {rows[0]['power_limit_w']:.0f} W that they may")

# %% [markdown]
# Tensor cores at work take more power than the board may draw, so the clock goes down until they no longer do. (Watts are
# medians of readings that come ten times a second; the peaks between them are not seen.) The peak that MFU divides by is 132
# multiprocessors times 4096 operations in a cycle times 1830 MHz; at 1635 MHz it would be a tenth less, whatever the code. Two
# GPUs of one make differ in this by a few percent, and so does one GPU from itself in its first, cool second. So compare two
# versions in one run, by turns; and when a kernel that saves bytes saves no time, look at the clock: what it saved may have
# been power that the next multiplication takes.
#
# Even a faster multiplication may save nothing. For each shape cuBLAS has many algorithms, and a rule of thumb for which
# is the fastest. We tried them out. At first we timed them by turns, a few milliseconds each: on an H100,
# of 46 products of GPT's and DiT's layers, each by itself, the best takes 4% less time than the one that the rule says, in the
# median, and 20% less at most, with the same bits.
#
# > **Predict.** Matmuls are two thirds of a step. By how much is a step of GPT 1.3B shorter with the best ones on an H200, and
# > one of DiT-XL/2 at 256 pixels?

# %%
my_gpt_step, my_dit_step = 3.0, 3.0     # your predictions, percent

# %%
found = lab.results("products_h200")
by_rule, by_turns, alone = ([row for row in rows if row.get("chosen", True) == chosen] for rows, chosen in (
    (found["steps"], False), (found["by_turns"], True), (found["steps"], True)))


def mean(rows, model, what="ms"):
    """The mean of a model's two runs."""
    return sum(row[what] for row in rows if row["rung"].startswith(model)) / 2


for model, mine in (("1.3B", my_gpt_step), ("256 px", my_dit_step)):
    saved = 100 * (1 - mean(by_turns, model) / mean(by_rule, model))
    lab.beside(f"saved of a step, {model}", mine, saved, "%", "recorded on an H200, by turns")
    print(f"its clock: {mean(by_rule, model, 'clock_mhz'):.0f} MHz by the rule, "
          f"{mean(by_turns, model, 'clock_mhz'):.0f} MHz with the best")

# %% [markdown]
# GPT 1.3B became *slower* by multiplications that are faster. An algorithm that keeps more of the chip busy takes more power,
# and the clock goes down for it. The trial did not see this: by turns all algorithms ran at one clock, which the mean of their
# powers sets. On a GPU at its power limit the time of a step is its energy, divided by 700 W: what helps is to move fewer bytes
# and multiply fewer numbers, and to choose what takes the least energy.
#
# > **Question.** You have a stopwatch and no meter. How do you find out which of two algorithms takes less energy?
#
# <details><summary>Answer</summary>
# Repeat one alone until the clock has settled, some 50 ms: then it draws the 700 W, and its seconds are its joules.
# </details>
#
# So we tried it again in this way, also with tiles that cuBLAS does not offer, and for the gradients of weights.

# %%
for model in ("124M", "350M", "1.3B", "256 px", "512 px"):
    saved = [100 * (1 - mean(rows, model) / mean(by_rule, model)) for rows in (by_turns, alone)]
    print(f"{model:7s} a step is shorter by {saved[0]:5.1f}% if products are chosen at one clock, "
          f"by {saved[1]:4.1f}% if each is tried at its own")

# %% [markdown]
# That is 1.5% of a step in the mean of these five, for 20 s of trials in each run's first step. The library does without it.

# %% [markdown]
# ## A curve that is a little worse
#
# Now a case for a detective. The notes that the formula is from print the loss of DiT on ImageNet latents, with one rank
# and with **context parallelism** over two, `cp2`:
#
# | iteration | 200 | 300 | 400 |
# |---|---|---|---|
# | cp1 | 0.1926 | 0.1921 | 0.1830 |
# | cp2 | 0.2171 | 0.2170 | 0.2151 |
#
# The notes discuss the times, and say nothing about the losses. Yet context parallelism changes *where* things are
# computed, and nothing of what (lesson 11).
#
# > **Question.** How large is the gap, in percent? Could it be rounding? Could it be another seed? Use what you have
# > learned in this lesson.

# %%
cp1, cp2 = torch.tensor([0.1926, 0.1921, 0.1830]), torch.tensor([0.2171, 0.2170, 0.2151])
print("cp2 is higher by", ", ".join(f"{100 * (b / a - 1):.1f}%" for a, b in zip(cp1.tolist(), cp2.tolist(), strict=True)))

# %% [markdown]
# 13 to 18%, on the same side each time, and growing. Between two *seeds* that would prove nothing: DiT-XL's are 5 to 19%
# apart above. But context parallelism changes neither the seed nor the data, so the yardstick is rounding: a tenth of a percent
# between flash and fused attention in the same notes, 3.4% at most above. If both runs had one seed, something is computed
# wrongly, and it did not crash: a silent failure.
#
# First, ours. The same weights and batches, one process beside two ranks, float64:

# %%
equal = verify.main("dit-demo", ["model.depth=2", "parallel.cp=2", "train.steps=5"])

# %% [markdown]
# So it can be right. What might be wrong in theirs? Nobody can look. But you can make suspects, one at a time, and see
# which of them leaves such a trace. Each of these has happened to somebody:
#
# | suspect | how it happens |
# |---|---|
# | positions begin at 0 on each rank | the embedding counts the tokens that it sees |
# | each rank draws its own noise and time | a generator seeded with the rank |
# | each rank draws the same noise for its half | a generator seeded equally, asked for half the shape |
# | attention to the own half alone | the attention kernel was never told of cp |
# | no gradient through gathered keys and values | `all_gather` of torch.distributed has none |
# | gradients not averaged over cp | the data-parallel group was used, without cp |
# | the condition's gradients not averaged over cp | the same, for the parameters that see no tokens |
#
# > **Predict** for each: will the loss be *higher*, the *same* (within 3%) or *lower*?

# %%
my_guess = {emulated.POSITIONS: "higher", emulated.OWN_NOISE: "higher",
            emulated.SAME_NOISE: "higher", emulated.OWN_HALF: "higher",
            emulated.NO_GRADIENT: "higher", emulated.NOT_AVERAGED: "higher",
            emulated.CONDITION: "higher"}

# %% [markdown]
# Seven trainings on two ranks take a while, so we imitate them in one process: a rank is a slice of the batch, with
# half of each sample's tokens; attention gathers keys and values from the slices. The numbers are those of two ranks
# (`tests/lab/test_pretend.py` compares them).

# %%
lab.show("course.lab.instruments.emulated_context_parallel.GatheredAttention")

# %%
right = emulated.loss_curve(STEPS)
curves = {bug: emulated.loss_curve(STEPS, bug) for bug in emulated.BUGS}
late = {bug: 100 * (curve[STEPS // 2:].mean() / right[STEPS // 2:].mean() - 1).item() for bug, curve in curves.items()}
for bug, percent in late.items():
    word = "higher" if percent > 3 else "lower" if percent < -3 else "same"
    print(f"{bug:48} {percent:+6.1f}%  {word:7} you said {my_guess[bug]}")
spread = 100 * float(outcome["FP8, delayed"][1])
print(f"{'(the spread of seeds)':48} {spread:6.1f}%")
shown = (emulated.POSITIONS, emulated.OWN_HALF, emulated.SAME_NOISE,
         emulated.OWN_NOISE, emulated.NOT_AVERAGED)
above = {bug: (100 * (curves[bug].unfold(0, LENGTH, LENGTH).mean(1) / right.unfold(0, LENGTH, LENGTH).mean(1) - 1)).tolist()
         for bug in shown}
lab.picture(style.curves({bug: (windows, curve) for bug, curve in above.items()}, "step", "% above the right curve",
                         "Five suspects, by steps of this small training",
                         {"the source's gap, least": 12.7, "and largest": 17.5}),
            "Two level lines, the source's smallest and largest gap: its steps are those of another training. Lines that "
            "begin at zero. Positions rise highest, the own half and the same noise to between ten and twenty "
            "percent, own noise and gradients that are not averaged fall below zero")

# %% [markdown]
# **What you should see.** (The two level lines show the size of the source's gap alone. Its 200 to 400 steps are those of a
# far larger model on other data, so there is no place for them on this axis.)
#
# Three suspects leave a gap of this kind, higher in the second half of the training and there to stay, while the loss goes on
# falling: **positions that begin at 0**, **attention to the own half alone**, and **the same noise on each rank**. In these the
# model lacks *information*: it cannot see, or cannot tell apart, what would help it. No training makes up for it.
#
# The others do not fit. Gradients that are not averaged make the loss a little *lower* here, hardly more than seeds do: each
# rank's weights learn their own half of the picture. A lower loss, and a broken model: its checkpoint has the weights of one
# rank. Noise and time of its own for each rank make the task easier, since the other half may be cleaner. Missing gradients
# through keys and values, and a condition that each rank learns for itself, cost next to nothing in so short a training: they are
# bugs that a loss curve does not show at all.
#
# > **Question.** What does this prove about the source? And what would you ask its authors for?
#
# <details><summary>Answer</summary>
# It proves nothing about their code. It shows that such a gap <i>can</i> come from these three, in a small model on another
# task, where sizes are others: it narrows the search. Several mistakes at once, or another data order with cp, are not ruled
# out. Ask for one step in float32 from one checkpoint, cp1 beside cp2: whether the <i>first</i> loss differs already says on
# which side of the loss to look. Then for the first parameter whose gradient differs. That is <code>course verify</code>.
# </details>
#
# The first loss tells two families apart, those that are wrong going forward and those that are wrong going backward, and
# it costs nothing. Compute it in float64 for each suspect: from the weights of the start, and from weights that are *not
# trivial*, random numbers in every one.
#
# > **Predict.** Of how many of the seven will the first loss differ, from the weights of the start? And from the others?

# %%
my_caught = {0.0: 7, 0.1: 7}                         # your prediction, for weights as they start, and shaken by 0.1

# %%
for shake, words in ((0.0, "from the start"), (0.1, "from shaken weights")):
    right_loss = emulated.first_loss(shake=shake)
    caught = [bug for bug in emulated.BUGS
              if abs(emulated.first_loss(bug, shake) / right_loss - 1) > 1e-10]
    lab.beside(f"suspects caught by the first loss, {words}", my_caught[shake], len(caught), how="counted")
    for bug in caught:
        print("   ", bug)

# %% [markdown]
# > **Question.** From the start even attention to the own half goes unseen. Why? And why did `course verify` above train five
# > steps?
#
# <details><summary>Answer</summary>
# adaLN-Zero: the gates and the output layer are zero, so that nothing that blocks compute reaches the loss, and at first no
# gradient reaches them. A comparison of first steps from fresh weights would pass nearly anything. After a few steps the
# gates are open. Better still are weights that are not trivial: a checkpoint that has trained a while, or random numbers in
# every weight, gates included.
# </details>
#
# ## What you know now
#
# - adaLN-Zero: the condition shifts, scales and gates; at zero, a network of any depth starts as none.
# - Guidance: one model, asked with the class and without, in one batch; go further along the difference.
# - Count FLOPs by walking through the maps: for each token or for each sample, with a gradient of the input or without; and
#   test the count against a counter.
# - FP8 trains the same if its difference from bf16, in windows and from the same seed, is less than bf16's own spread, and
#   if the method fails a control.
# - A layout that trains a little worse is a bug. Look at the first step, from weights that are not trivial.
#
# **Check your work once more, from outside.** Save the notebook; then, in a terminal: `course check
# notebooks/15_dit_fp8_mine.ipynb`.
#
# Next: [lesson 16](16_checkpoints.ipynb), where what has been trained is saved, converted, and cut up for another layout.
