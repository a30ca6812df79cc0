# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 08 · Scaling and convergence
#
# With data parallelism n GPUs process n times the samples in a second, if the batch grows with them. Is the model trained n times
# sooner? Only if a sample in a large batch teaches as much as one in a small batch, and whether it does is not a question about
# computers. In this lesson you measure how batch, learning rate and the number of samples hang together, and find out up to which
# batch more GPUs buy time.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU. Lessons 00, 01 and 07 |
# | reading and doing | about 90 minutes |
# | computing | one to two minutes on two cores |
# | you write | two scaling rules (3 lines), a learning-rate schedule (7), the noise in a gradient (3), samples to a target (8) |
# | you measure | the noise in a gradient; the best learning rate, and time and samples to a target, against the batch |
#
# Work in a copy: *File → Save Notebook As…*, `08_scaling_mine.ipynb`. The curves of this lesson are of real runs, 55 of them,
# which would take your laptop a night: their logs come with the course, and the command that makes them stands at the end.

# %%
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from course import config, data, parallel, train, validate
from course.data import weather
from course.lab import figures, figures_data, widgets
from course.lab import notebook as lab
from course.lab.notebook import check
from course.perf import convergence

lab.begin("08")
weather.make(config.build(weather.Weather, {"path": "data/weather-32x64"}, "weather"))

# %% [markdown]
# ## Fewer, larger steps
#
# Start with an experiment that fits on your machine: 640 samples, in 160 steps of 4 or in 40 steps of 16. Everything else is
# the same, the learning rate of 0.002 as well.
#
# > **Predict.** Which of the two ends at the lower validation loss? By how many percent?

# %%
my_percent = 5                   # your prediction: how much higher the loss of the larger batch is

# %%
cpu = torch.device("cpu")


def short_run(batch: int, lr: float, samples: int = 640) -> torch.nn.Module:
    """vit-demo, trained on so many samples at a constant learning rate after five steps of warm-up."""
    settings = config.load("vit-demo", [f"train.global_batch={batch}", f"optim.lr={lr}", "optim.schedule=constant",
                                        "optim.warmup=5"])
    mesh = parallel.build_mesh(settings.parallel, parallel.World(device=cpu))
    training = train.assemble(settings, mesh)
    loader = data.train_loader(settings, mesh.dp, cpu, 0, training.model.example)
    for _ in range(samples // batch):
        training.step(next(loader))
    loader.close()
    return training.model


def loss_of(model: torch.nn.Module, pairs: data.Pairs, ids: list[int]) -> float:
    """The mean loss of these samples."""
    output, batch = validate.forward_only(model, "fp32")(pairs.__getitems__(ids))
    total, weight = model.loss(output, batch)
    return (total / weight).item()


valid = data.open_pairs(config.load("vit-demo"), "valid")
some = list(range(0, len(valid), 6))
small = short_run(4, 0.002)
losses = {"4": loss_of(small, valid, some), "16": loss_of(short_run(16, 0.002), valid, some)}
print({f"batch {batch}": round(loss, 4) for batch, loss in losses.items()})
lab.beside("the larger batch's loss is higher by", my_percent, max(0.01, 100 * (losses["16"] / losses["4"] - 1)), "%")

# %% [markdown]
# The same samples, the same arithmetic, and the larger batch is behind: it took a quarter of the steps, and each was no
# longer than the small batch's. What did it get for four times as many samples in a step? A *better direction*. Is it so much
# better that a step may be longer?
#
# > **Question.** Why is the direction better?
#
# <details><summary>Answer</summary>
# The gradient of a batch is an estimate of the gradient over all data, and the average of more samples is a better estimate: its
# variance falls as one over the batch.
# </details>
#
# ## How noisy is a gradient?
#
# Call the gradient over all data $G$, and the sum of the variances of one sample's gradient's elements $\mathrm{tr}(\Sigma)$.
# The gradient $G_B$ of a batch of $B$ samples has on average the squared norm
#
# $$\mathbb{E}\,\lVert G_B\rVert^2 = \lVert G\rVert^2 + \frac{\mathrm{tr}(\Sigma)}{B}$$
#
# The quotient $\mathrm{tr}(\Sigma)/\lVert G\rVert^2$ is the **gradient noise scale**, in samples: for a batch of that size
# signal and noise are equally large (McCandlish et al. 2018, *An Empirical Model of Large-Batch Training*, section 2.2). A
# batch far below it is almost all noise; far above it there is no noise left to average away.
#
# ## Exercise: the noise scale
#
# $G$ is not known, but two equations for two batch sizes have two unknowns. `small` and `large` are the mean squared norms of
# gradients over `b` and over `B` samples. Data parallelism gives both for nothing: the norm of each rank's gradient before
# the all-reduce, and that of the mean after it.

# %% exercise="noise-scale"
def noise_scale(small: float, large: float, b: int, B: int) -> float:
    """tr(S) / |G|^2 in samples, from the mean squared norms of gradients over b and over B samples, b < B."""
    ### BEGIN SOLUTION
    true_square = (B * large - b * small) / (B - b)
    trace = (small - large) / (1 / b - 1 / B)
    return trace / true_square
    ### END SOLUTION

# %%
check("noise-scale")

# %% [markdown]
# Measure it on the model that you just trained, with the gradients of 64 samples, one by one, and of all of them.
#
# > **Predict.** At which batch are signal and noise equal?

# %%
my_noise_scale = 16              # your prediction, in samples

# %%
pairs = data.open_pairs(config.load("vit-demo"), "train")


def gradient(model: torch.nn.Module, ids: list[int]) -> Tensor:
    """The gradient of the mean loss of these samples, all parameters end to end."""
    batch = model.prepare(pairs.__getitems__(ids), torch.tensor(0))
    total, weight = model.loss(model(batch), batch)
    return torch.cat([part.flatten() for part in torch.autograd.grad(total / weight, list(model.parameters()))])


each = [gradient(small, [number]) for number in range(0, 64 * 22, 22)]
one_norm = sum(g.square().sum().item() for g in each) / 64
all_norm = (sum(each) / 64).square().sum().item()
print(f"squared norm of the gradient of one sample {one_norm:.4f}, of 64 samples {all_norm:.4f}")
measured_noise_scale = noise_scale(one_norm, all_norm, 1, 64)
lab.beside("noise scale", my_noise_scale, measured_noise_scale, "samples")

# %% [markdown]
# **What you should see:** two or three samples. So soon after the start all samples agree on what is to be learned first: the
# gradient is long, and four samples know its direction well. Sixteen know it a little better, at four times the price.
#
# The noise scale grows while a model learns, because the gradient gets shorter and the noise does not. And it is a rough
# measure: it takes all directions as equally important, and knows nothing of Adam. Still it is a forecast of the batch up to
# which a larger one is worth having, for the price of one backward pass. Remember your number, and see what it says of the
# experiment.
#
# ## How long may a step be?
#
# A longer step gains more along the gradient, and loses more to noise. For plain gradient descent far below the noise scale
# the best learning rate is proportional to the batch, the **linear** rule (Goyal et al. 2017). Adam divides the gradient by
# its own size, and noise makes up most of that size: there the best rate goes with the **root** of the batch (Malladi et al.
# 2022). Above the noise scale both end: then the best rate depends no longer on the batch, but on how curved the loss is.
#
# ## Exercise: two rules

# %% exercise="scaled-rate"
def scaled_rate(lr: float, batch: int, new_batch: int, rule: str) -> float:
    """The learning rate for `new_batch`, if `lr` is right for `batch`; the rule is "linear" or "sqrt"."""
    ### BEGIN SOLUTION
    times = new_batch / batch
    if rule == "sqrt":
        times = times**0.5
    return lr * times
    ### END SOLUTION

# %%
check("scaled-rate")

# %% [markdown]
# The reference model of this course is trained with 0.0005 at 16 samples, and NERSC's course, where it comes from, scales with
# the root of the batch. The presets `vit-bs16` to `vit-bs2048` do so.
#
# > **Predict** the rate of `vit-bs2048`. What would the linear rule give?

# %%
my_rate = 0.005                  # your prediction

# %%
for batch in (16, 64, 256, 2048):
    preset = config.load(f"vit-bs{batch}")
    print(f"vit-bs{batch:<5} {preset.optim.lr:.5f}  root {scaled_rate(5e-4, 16, batch, 'sqrt'):.5f}  "
          f"linear {scaled_rate(5e-4, 16, batch, 'linear'):.5f}")
lab.beside("\nvit-bs2048", my_rate, config.load("vit-bs2048").optim.lr)

# %% [markdown]
# Back to the experiment: 16 samples a step, with the rate that each rule gives.
#
# > **Predict.** You measured the noise scale. Which of the three rates will be the best one for 16 samples?

# %%
my_best_rule = "sqrt"            # your prediction: "same", "sqrt" or "linear"

# %%
for rule in ("sqrt", "linear"):
    losses[f"16, {rule}"] = loss_of(short_run(16, scaled_rate(0.002, 4, 16, rule)), valid, some)
for name, loss in losses.items():
    print(f"batch {name:12} validation loss {loss:.4f}")
best = min((name for name in losses if name != "4"), key=lambda name: losses[name])
print(f"the best at 16: {best}; you said {my_best_rule}")

# %% [markdown]
# **What you should see:** the rate of the small batch, and the higher the rate, the worse. Both rules are wrong here, and the
# noise scale foretold it: above it there is little noise to average away, and how long a step may be depends on how curved
# the loss is. A batch of 4 is above it already. Rules for the rate hold where noise rules, and that is later in training. To
# see it one has to train for longer, and to try many rates with every batch: that is what the reference runs did.
#
# ## Warm-up and schedule
#
# At the beginning a long step is dangerous: weights are random, gradients are long, and Adam's estimates of their size come
# from a few steps. So the rate rises in the first steps, the **warm-up**. At the end a long step is of no use: the weights
# jump about the valley's floor, at a height that the noise and the rate decide. So the rate falls, here along half a cosine
# (Loshchilov and Hutter 2017).
#
# ## Exercise: the schedule
#
# `step` is a tensor, the number of steps done so far, and `config.optim` has `lr` (the peak), `warmup` (steps), `schedule`
# ("cosine" or "constant") and `min_lr` (where the cosine ends); `config.train.steps` is the number of all steps. Return the
# rate of the next step, a float32 tensor:
#
# - "constant": `lr`; "cosine": half a cosine from `lr`, at step `warmup`, to `min_lr`, at step `train.steps`, and
#   `min_lr` ever after;
# - while `step < warmup` at most `lr · (step + 1) / warmup`.
#
# Use tensor operations only: no `if` on `step`, no `.item()`. The step of training does not wait for the device.

# %% exercise="learning-rate"
from course.step import learning_rate

# %%
check("learning-rate")

# %% [markdown]
# > **Question.** Why `step + 1`, and not `step`?
#
# <details><summary>Answer</summary>
# The first step is number 0. With a rate of 0 it would change nothing, and a batch would be thrown away.
# </details>

# %%
def schedule_of(warmup: int, min_lr: float):
    """The learning rate of 200 steps."""
    settings = replace(config.load("vit-demo", ["train.steps=200"]), optim=config.Optim(lr=2e-3, warmup=warmup, min_lr=min_lr))
    rates = [learning_rate(torch.tensor(at), settings).item() for at in range(200)]
    return figures.curves({"learning rate": (range(200), rates)}, "step", "learning rate", f"{warmup} steps of warm-up")


slider = widgets.explore(schedule_of, warmup=[20, 0, 50, 100], min_lr=[0.0, 2e-4],
                         alt="The learning rate over 200 steps: a straight rise, then half a cosine.")

# %% [markdown]
# ## The reference runs
#
# `vit-demo` on 16 simulated years, 5744 samples, with six batches from 4 to 128 and seven learning rates: 42 runs, each with
# a warm-up of 20 steps and then a *constant* rate, so that a curve does not depend on where it was going to end. Some more show
# what that leaves out. The model has 892,096 parameters and was validated 32 times a run, always on the same 359 samples.

# %%
found = lab.results("convergence")
grid = {(run["batch"], run["lr"]): run for run in found["runs"] if run["schedule"] == "constant" and run["warmup"]}
batches = sorted({batch for batch, _ in grid})
rates = sorted({lr for _, lr in grid})
print(f"{len(found['runs'])} runs on {found['hardware']}, PyTorch {found['torch']}, {found['date']}: {found['command']}")
print("batches", batches, "\nrates  ", rates)

# %% [markdown]
# TensorBoard shows them all, as it shows runs of yours. Its horizontal axis counts samples here, so that batches compare.

# %%
logs = Path("runs/reference")
if not logs.is_dir():
    convergence.to_tensorboard(found, logs)
address = lab.tensorboard(logs)

# %% [markdown]
# Look at one batch first, with all its rates.
#
# > **Predict.** The smallest rate is 64 times below the largest. How will their curves differ, and which will be the lowest
# > at the end?

# %%
def curves_of(batch: int):
    """Validation loss against samples, of all rates at a batch."""
    lines = {f"{lr:g}": ([at * batch for at in grid[batch, lr]["step"]], numbers(grid[batch, lr]["valid_loss"])) for lr in rates}
    return figures_data.logarithmic(lines, "samples", "validation loss", f"batch {batch}")


def numbers(column: list) -> list[float]:
    """A recorded column; what was not finite is None there, and as bad as can be."""
    return [math.inf if value is None else value for value in column]


slider = widgets.explore(curves_of, batch=[16, *(batch for batch in batches if batch != 16)],
                         alt="Validation loss against samples, a curve for each of seven learning rates.")

# %% [markdown]
# **How to read it:** a rate that is too small learns slowly, and its curve is smooth. One that is too large is unstable, or
# ends on a higher floor: it jumps about. In between there is a best rate, and which one that is depends on where you stop:
# the longer a run, the smaller its best constant rate. Move the slider to 128: the order of the curves changes.
#
# ## Exercise: samples to a target
#
# To compare curves, ask how many samples each needs to a given loss. Find the first validation at or below `target`, and take
# the point on the straight line between it and the validation before. If already the first is below, its own samples count;
# if none is, return `math.inf`. `steps` are counted in optimizer steps, each of `batch` samples.

# %% exercise="samples-to-target"
def samples_to(target: float, steps: list[float], losses: list[float], batch: int) -> float:
    """Samples after which the loss first reaches the target, by a straight line between two validations; infinity if never."""
    ### BEGIN SOLUTION
    reached = [number for number, loss in enumerate(losses) if loss <= target]
    if not reached:
        return math.inf
    first = reached[0]
    if first == 0:
        return batch * steps[0]
    high, low = losses[first - 1], losses[first]
    way = (high - target) / (high - low)
    return batch * (steps[first - 1] * (1 - way) + steps[first] * way)
    ### END SOLUTION

# %%
check("samples-to-target")

# %% [markdown]
# The target is the lowest loss that every batch reaches with at least one of its rates.

# %%
def lowest(run: dict) -> float:
    return min(numbers(run["valid_loss"]), default=math.inf)


target = max(min(lowest(grid[batch, lr]) for lr in rates) for batch in batches)
needed = {(batch, lr): samples_to(target, run["step"], numbers(run["valid_loss"]), batch) for (batch, lr), run in grid.items()}
print(f"samples to a validation loss of {target:.4f} (-: not reached)\n\n  batch" + "".join(f"{lr:>9g}" for lr in rates))
for batch in batches:
    row = [needed[batch, lr] for lr in rates]
    print(f"{batch:7}" + "".join(f"{samples:9,.0f}" if samples < math.inf else f"{'-':>9}" for samples in row))

# %% [markdown]
# ## The best rate against the batch
#
# > **Predict.** With which power of the batch does the best rate grow? 1 is the linear rule, 0.5 the root, 0 not at all.

# %%
my_power = 0.5                   # your prediction

# %%
best_rate = {batch: min(rates, key=lambda lr, batch=batch: needed[batch, lr]) for batch in batches}
power = np.polyfit(np.log(batches), np.log([best_rate[batch] for batch in batches]), 1)[0]
rules = {rule: (batches, [scaled_rate(best_rate[4], 4, batch, rule) for batch in batches]) for rule in ("sqrt", "linear")}
lab.picture(figures_data.logarithmic({"best of seven": (batches, [best_rate[batch] for batch in batches])}, "batch",
                                     "learning rate", "The learning rate that needs the fewest samples", rules),
            "The best learning rate of each batch, beside the root rule and the linear rule that start at the same point")
lab.beside("the best rate grows with the batch to the power", my_power, max(0.01, power))

# %% [markdown]
# **How to read it:** rates were tried in steps of two, so each point may be off by 1.4. The linear rule soon leaves the
# picture. What matters in practice: a rule is where you *begin* to search when the batch changes, and the search is worth its
# price.
#
# ## Samples and steps
#
# Now take each batch at its best. If a sample taught the same in a large batch, samples would not depend on the batch, and
# steps would fall as one over it. McCandlish et al. (section 2.3) say what happens instead:
#
# $$\text{samples} = E_{min}\left(1 + \frac{B}{B_{crit}}\right),\qquad \text{steps} = S_{min}\left(1 + \frac{B_{crit}}{B}\right)$$
#
# At the **critical batch** $B_{crit} = E_{min} / S_{min}$ one needs twice the fewest samples, and twice the fewest steps. Far
# below it a larger batch is free: as many samples, fewer steps. Far above it one pays in samples for almost no step less.
#
# > **Predict** the critical batch of this model. You measured a noise scale above.

# %%
my_critical = 30                 # your prediction, in samples

# %%
fewest = {batch: needed[batch, best_rate[batch]] for batch in batches}
per_batch, e_min = np.polyfit(batches, list(fewest.values()), 1, w=1 / np.array(list(fewest.values())))
critical = e_min / per_batch
lab.picture(figures_data.logarithmic({"samples": (batches, list(fewest.values())),
                                      "steps": (batches, [fewest[batch] / batch for batch in batches])},
                                     "batch", "to the target", f"Samples and steps to a validation loss of {target:.4f}",
                                     {"fitted samples": (batches, [e_min + per_batch * batch for batch in batches]),
                                      "fitted steps": (batches, [e_min / batch + per_batch for batch in batches])}),
            "Samples rise with the batch, slowly and then faster; steps fall, fast and then slowly; the fitted law is dashed")
lab.beside("critical batch", my_critical, critical, "samples")

# %% [markdown]
# Is that the noise scale? You measured it after 640 samples. The reference runs wrote down the norm of the gradient at each
# validation: take those close to the target, where the loss is within 5% of it, of the batches 4 and 128.

# %%
def squared_norm(batch: int) -> float:
    """The mean squared norm of the gradients of a batch, where the validation loss is close to the target."""
    squares = [norm**2 for lr in rates for loss, norm in zip(numbers(grid[batch, lr]["valid_loss"]), grid[batch, lr]["grad_norm"],
                                                            strict=True) if abs(loss / target - 1) < 0.05]
    return sum(squares) / len(squares)


late_noise_scale = noise_scale(squared_norm(4), squared_norm(128), 4, 128)
print(f"noise scale after 640 samples {measured_noise_scale:.1f}, near the target {late_noise_scale:.1f}; "
      f"critical batch {critical:.1f}")

# %% [markdown]
# > **Question.** Samples cost money, steps cost time. Somebody has a thousand GPUs and is in a hurry, somebody else one GPU
# > and a week. Which batch would you advise?
#
# <details><summary>Answer</summary>
# The second wants the fewest samples: a batch well below the critical one, just large enough to keep the GPU busy. The first
# pays for time: the critical batch costs twice the samples for twice the fewest steps, and beyond it prices rise quickly. A
# larger batch than that buys almost nothing.
# </details>
#
# ## Time
#
# What you wait for is neither samples nor steps. On one device a larger batch keeps the device busier, until it is busy all the
# time (lesson 00: how many tokens does it take?). These are samples/s of `vit-demo` on the machine that made the runs, and
# the time to the target that follows.
#
# > **Predict.** Which batch reaches the target first on one device?

# %%
my_fastest = 16                  # your prediction

# %%
speed = {int(batch): value for batch, value in found["speed"].items()}
seconds = {batch: fewest[batch] / speed[batch] for batch in batches}
table = {f"batch {batch}": {"best rate": best_rate[batch], "steps": fewest[batch] / batch, "samples": fewest[batch],
                            "samples/s": speed[batch], "s to the target": seconds[batch]} for batch in batches}
lab.recorded("convergence", table, why="One device")
lab.beside("\nfastest batch", my_fastest, min(seconds, key=lambda batch: seconds[batch]), "samples")

# %% [markdown]
# Now many devices, each with 4 samples of the batch, as in lesson 07, with communication for nothing. Samples a second grow
# with their number, a perfect scaling efficiency. The time to the target does not follow.
#
# > **Predict.** 32 devices instead of one: how many times sooner?

# %%
my_speedup = 32                  # your prediction

# %%
devices = [batch // 4 for batch in batches]
times = [fewest[batch] / (speed[4] * batch / 4) for batch in batches]
lab.picture(figures_data.logarithmic({"to the target": (devices, times)}, "devices, 4 samples each", "s",
                                     "Time to the target, communication for nothing",
                                     {"if samples did not depend on the batch": (devices, [times[0] / n for n in devices])}),
            "Time to the target against devices: it falls, and the more devices, the further it stays behind the dashed line")
lab.beside("32 devices, times sooner", my_speedup, times[0] / times[-1])

# %% [markdown]
# That is the end of data parallelism as a way to be done sooner, and no network is to blame. A larger model has a larger
# critical batch, hundreds of thousands to millions of tokens for language models, and it grows during training. But every
# model has one. Who has more GPUs than that must cut the *model*, not the batch: lessons 09 to 14.
#
# ## What the runs leave out
#
# **Warm-up.** Batch 64 at its three highest rates, with 20 steps of warm-up and with none.
#
# > **Predict.** What happens without? At which rate first?

# %%
def last_loss(batch: int, lr: float, warmup: int, schedule: str) -> float:
    """The validation loss at the end of a run; infinity if it did not get there."""
    run, = [run for run in found["runs"]
            if (run["batch"], run["lr"], run["warmup"], run["schedule"]) == (batch, lr, warmup, schedule)]
    return numbers(run["valid_loss"])[-1] if run["valid_loss"] else math.inf


for lr in rates[-3:]:
    warm, cold = (last_loss(64, lr, warmup, "constant") for warmup in (convergence.WARMUP, 0))
    print(f"rate {lr:<6g} validation loss at the end: with warm-up {warm:.4f}, without {cold:.4f}")

# %% [markdown]
# **How to read it:** where the two agree, the rate was not dangerous. Where the cold start is worse, its first steps threw
# the weights somewhere from where training takes long to come back, or does not. The higher the rate, the more warm-up
# matters, and a larger batch is trained with a higher rate.
#
# **The cosine.** The same number of steps, with a constant rate and with one that falls.
#
# > **Predict.** By how many percent is the loss lower in the end, at batch 16 and the best rate of each?

# %%
my_gain = 5                      # your prediction

# %%
ends = {schedule: {lr: last_loss(16, lr, convergence.WARMUP, schedule) for lr in rates[-5:]}
        for schedule in ("constant", "cosine")}
for lr in rates[-5:]:
    print(f"rate {lr:<6g} validation loss at the end: constant {ends['constant'][lr]:.4f}, cosine {ends['cosine'][lr]:.4f}")
best_constant, best_cosine = (min(end.values()) for end in ends.values())
lab.beside("\nthe cosine's best is lower by", my_gain, max(0.01, 100 * (1 - best_cosine / best_constant)), "%")

# %% [markdown]
# A falling rate takes long steps while there is far to go, and short ones at the end, when noise is what is left. So it can
# afford a higher peak. Its price is that one has to know the end in advance: half of a cosine run is not a cosine run. The
# end of a schedule also averages noise away, as a larger batch does, and therefore moves the critical batch.
#
# ## Make these runs yourself
#
# On a GPU it takes minutes, on a machine with many cores an hour; finished runs are kept, so the same command goes on:
#
# ```
# python -m course.perf.convergence jobs=8 out=runs/convergence.json
# python -m course.perf.convergence out=runs/convergence.json tensorboard=runs/mine
# ```
#
# ## What you know now
#
# - A gradient is an estimate. Its noise scale says, roughly, up to which batch averaging helps.
# - A larger batch wants a higher learning rate: the root of the ratio with Adam, as a place to start, and a warm-up.
# - Samples to a target rise with the batch, steps fall, and at the critical batch each is twice its least.
# - Time to a target is what counts. Samples a second can scale perfectly while it does not.
#
# **Check your work once more, from outside.** Save the notebook; then, in a terminal:
# `course check notebooks/08_scaling_mine.ipynb`.
