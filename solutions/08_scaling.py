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
# With data parallelism, n GPUs process n times the samples per second if the batch grows with them. Does the model train n
# times faster? Only if a sample in a large batch teaches as much as a sample in a small batch. That is a question about
# learning, not about computers. In this lesson you measure how batch, learning rate and samples depend on one another.
#
# **What you will learn**
#
# - What the noise in a gradient says about useful batch sizes.
# - How the best learning rate depends on the batch, and why warm-up matters.
# - Up to which batch more GPUs save time, and why throughput alone does not tell you.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU. Lessons [00](00_start_here.ipynb), [01](01_baseline.ipynb) and [07](07_data_parallel.ipynb) |
# | reading and doing | about 90 minutes |
# | computing | 1.5 minutes on two cores |
# | you write | a gradient's noise (3 lines), scaling rules (4), a schedule (7), samples to a target (9); optional: a plan (60) |
# | you measure | the noise in a gradient; the best learning rate, and samples, steps and time to a target, against the batch |
#
# Work in a copy: *File → Save Notebook As…*, `08_scaling_mine.ipynb`. The curves of this lesson come from {result: runs | d}
# real runs. They would take your laptop a night, so their logs come with the course.

# %% numbers=true
from course.bench.results import load

recorded_runs = load("convergence")["runs"]
runs = len(recorded_runs)
tried_rates = sorted({run["lr"] for run in recorded_runs})

def run_at(batch, lr):
    run, = (run for run in recorded_runs if (run["batch"], run["lr"]) == (batch, lr)
            and (run["warmup"], run["schedule"]) == (20, "constant"))
    return run

def samples_of(batch, lr, goal=0.12):
    run = run_at(batch, lr)
    steps, losses = run["step"], run["valid_loss"]
    validated = zip(steps, steps[1:], losses, losses[1:], strict=False)
    for before, now, high, low in validated:
        if low is not None and low <= goal:
            return batch * (before + (now - before) * (high - goal) / (high - low))
    return float("inf")

def least_samples(batch):
    return min(samples_of(batch, lr) for lr in tried_rates)

def squared_norms(lr):
    run = run_at(4, lr)
    columns = zip(run["valid_loss"], run["grad_norm"], strict=True)
    near = [norm**2 for loss, norm in columns if abs(loss / 0.14 - 1) < 0.05]
    return sum(near) / len(near)

validations = len(run_at(4, 0.001)["step"])
norm_factor = squared_norms(0.00025) / squared_norms(0.004)
speeds = {int(batch): rate for batch, rate in load("convergence")["speed"].items()}   # per second
step_ms = [1e3 * batch / rate for batch, rate in speeds.items()]
shortest_ms, longest_ms = min(step_ms), max(step_ms)
seconds_of = {batch: least_samples(batch) / rate for batch, rate in speeds.items()}
batch_4_slower = seconds_of[4] / seconds_of[64]
batch_4_samples = least_samples(4) / least_samples(64)
two, eight, sixteen, thirty_two = (n * least_samples(4) / least_samples(4 * n)
                                   for n in (2, 8, 16, 32))

# %%
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from course.training import assemble
from course import config, data, parallel
from course.config import schema
from course.training import validation
from course.data.weather import simulation
from course.lab.figures import style, data_parallel, widgets
from course.lab import notebook as lab
from course.lab.notebook import check
from course.lab.instruments import recorded_curves

lab.begin("08")
simulation.make(schema.build(simulation.Weather, {"path": "data/weather-32x64"},
                             "weather"))

# %% [markdown]
# ## Fewer, larger steps
#
# Start with an experiment that fits on your machine: 640 samples, in 160 steps of 4 or in 40 steps of 16. Everything else is
# the same, including the learning rate of 0.002.
#
# > **Predict.** Which of the two ends at the lower validation loss? By what percentage?

# %%
my_percent = 0                   # your prediction: batch 16 over batch 4, in percent

# %%
cpu = torch.device("cpu")


def training_run(batch: int, lr: float, warmup: int = 20) -> Iterator[torch.nn.Module]:
    """Train vit-demo at a constant learning rate after a warm-up; the model after each
    step."""
    settings = config.load("vit-demo", [f"train.global_batch={batch}", f"optim.lr={lr}",
                                        "optim.schedule=constant",
                                        f"optim.warmup={warmup}"])
    mesh = parallel.build_mesh(settings.parallel, parallel.World(device=cpu))
    training = assemble.assemble(settings, mesh)
    loader = data.train_loader(settings, mesh.dp, cpu, 0, training.model.example)
    while True:
        training.step(next(loader))
        yield training.model


def after(steps: int, run: Iterator[torch.nn.Module]) -> torch.nn.Module:
    """The model when a run has gone on for so many steps."""
    for _ in range(steps):
        model = next(run)
    return model


def loss_of(model: torch.nn.Module, pairs: data.Pairs, ids: list[int]) -> float:
    """The mean loss of these samples."""
    output, batch = validation.forward_only(model, parallel.serial_layout(model),
                                            "fp32")(pairs.__getitems__(ids))
    total, weight = model.loss(output, batch)
    return (total / weight).item()


valid = data.open_pairs(config.load("vit-demo"), "valid")
some = list(range(0, len(valid), 6))
small = training_run(4, 0.002)
small_model = after(160, small)
losses = {"4": loss_of(small_model, valid, some),
          "16": loss_of(after(40, training_run(16, 0.002)), valid, some)}
print({f"batch {batch}": round(loss, 4) for batch, loss in losses.items()})
lab.beside("batch 16 ends higher than 4 by", my_percent,
           100 * (losses["16"] / losses["4"] - 1), "%")

# %% [markdown]
# Samples and arithmetic are the same, but the larger batch is behind. It took a quarter of the steps, and each of its steps
# moved the weights no further than a step of the small batch. Four times as many samples per step buy a *better direction*. Is
# it good enough for longer steps?
#
# > **Question.** Why is the direction better?
#
# <details><summary>Answer</summary>
# The gradient of a batch estimates the gradient over all data. The average of more samples is a better estimate: its variance
# is inversely proportional to the batch size.
# </details>
#
# ## How noisy is a gradient?
#
# Call the gradient over all data $G$. Let $\mathrm{tr}(\Sigma)$ be the variance of one sample's gradient, summed over its
# elements. The gradient $G_B$ of a batch of $B$ samples has on average the squared norm
#
# $$\mathbb{E}\,\lVert G_B\rVert^2 = \lVert G\rVert^2 + \frac{\mathrm{tr}(\Sigma)}{B}$$
#
# The quotient $\mathrm{tr}(\Sigma)/\lVert G\rVert^2$ is the **gradient noise scale**, in samples. For a batch of that size,
# signal and noise are equally large (McCandlish et al. 2018, *An Empirical Model of Large-Batch Training*, section 2.2). A
# batch far below it is almost all noise; a batch far above it has no noise left to average away.
#
# ## Exercise: the noise scale
#
# You do not know $G$, but two batch sizes give two equations for the two unknowns. `small` and `large` are the mean squared
# norms of gradients over `b` and over `B` samples. Data parallelism gives both for free: the norm of each rank's gradient
# before the all-reduce, and the norm of the mean after it.

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
# Measure the noise scale of the model that you trained with batches of 4. Use the gradients of 64 single samples, and the
# gradient of all 64. All are taken at the same weights, as the two equations assume.
#
# > **Predict.** At which batch size are signal and noise equal?

# %%
my_noise_scale = 16              # your prediction, in samples

# %%
pairs = data.open_pairs(config.load("vit-demo"), "train")


def gradient(model: torch.nn.Module, ids: list[int]) -> Tensor:
    """The gradient of the mean loss of these samples, all parameters end to end."""
    batch = model.prepare(pairs.__getitems__(ids), torch.tensor(0))
    total, weight = model.loss(model(batch), batch)
    return torch.cat([part.flatten()
                      for part in torch.autograd.grad(total / weight,
                                                      list(model.parameters()))])


def measure_noise(model: torch.nn.Module) -> float:
    """The noise scale of this model's gradient, from 64 samples spread over the years
    of training."""
    each = [gradient(model, [number]) for number in range(0, 64 * 22, 22)]
    one = sum(g.square().sum().item() for g in each) / 64
    mean = (sum(each) / 64).square().sum().item()
    print(f"squared norm of the gradient of one sample {one:.4f}, of the mean "
          f"of 64 {mean:.4f}")
    return noise_scale(one, mean, 1, 64)


early_noise = measure_noise(small_model)
lab.beside("noise scale after 640 samples", my_noise_scale, early_noise, "samples")

# %% [markdown]
# **What you should see:** about two samples. So soon after the start, all samples agree on what to learn first. The gradient
# is large, and four samples estimate its direction well. Sixteen estimate it a little better, at four times the price.
#
# Later, the model has learned what all samples agree on. Let the small batch continue to 2,560 samples, and measure again.
#
# > **Predict.** How large is the noise scale then?

# %%
my_later_noise = 5               # your prediction, in samples

# %%
late_noise = measure_noise(after(480, small))
lab.beside("noise scale after 2,560 samples", my_later_noise, late_noise, "samples")

# %% [markdown]
# It is larger, three or four samples, because the gradient shrinks faster than its noise. Remember that number. For the price
# of a backward pass, it forecasts up to which size a larger batch pays off. The forecast is rough: it treats all directions
# as equally important, and ignores Adam.
#
# ## How long may a step be?
#
# A longer step gains more along the gradient and loses more to noise. Consider plain gradient descent far below the noise
# scale. There the best learning rate is proportional to the batch, the **linear** rule (Goyal et al. 2017). Adam divides the
# gradient by its own size, and noise makes up most of that size. So for Adam the best rate grows with the **square root** of
# the batch (Malladi et al. 2022). Above the noise scale both rules end: the best rate then depends on the curvature of the
# loss, not on the batch.
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
# The reference model of this course trains with 0.0005 at 16 samples. NERSC's course, its origin, scales the rate with the
# square root of the batch, and so do the presets `vit-bs16` to `vit-bs2048`.
#
# > **Predict** the rate of `vit-bs2048`. What would the linear rule give?

# %%
my_rate = 0.005                  # your prediction

# %%
for batch in (16, 64, 256, 2048):
    preset = config.load(f"vit-bs{batch}")
    print(f"vit-bs{batch:<5} {preset.optim.lr:.5f}  root "
          f"{scaled_rate(5e-4, 16, batch, 'sqrt'):.5f}  "
          f"linear {scaled_rate(5e-4, 16, batch, 'linear'):.5f}")
lab.beside("\nvit-bs2048", my_rate, config.load("vit-bs2048").optim.lr, how="preset")

# %% [markdown]
# Back to the experiment: 40 steps of 16 samples, with the rate that each rule gives.
#
# > **Predict.** You measured the noise scale. Which of the three rates will be the best one for 16 samples? And how much of
# > the gap to the small batch will it close?

# %%
my_best_rule = "sqrt"            # your prediction: "same", "sqrt" or "linear"
my_share = 50                    # and of the distance, in percent

# %%
for rule in ("sqrt", "linear"):
    losses[f"16, {rule}"] = loss_of(after(40,
                                          training_run(16, scaled_rate(0.002, 4, 16,
                                                                       rule))), valid,
                                    some)
for name, loss in losses.items():
    print(f"batch {name:12} validation loss {loss:.4f}")
ends = {"same": losses["16"], "sqrt": losses["16, sqrt"],
        "linear": losses["16, linear"]}
print(f"the best at 16: {min(ends, key=lambda rule: ends[rule])}; you said "
      f"{my_best_rule}")
lab.beside("of the distance to batch 4 it makes up", my_share,
           100 * (losses["16"] - min(ends.values())) / (losses["16"] - losses["4"]),
           "%")

# %% [markdown]
# **What you should see:** it hardly matters. Rates from 0.002 to four times that end within about a percent of one another,
# and far behind the batch of 4. Neither rule makes up for 120 fewer steps. The noise scale predicted this. A batch of 4 is
# already above it, so little noise is left to average away, and a better direction does not help.
#
# The rules describe batches *below* the noise scale, and later in training your batches may be there. To see this, you have
# to train longer and try many rates with every batch. The reference runs do that.
#
# ## Warm-up and schedule
#
# The runs above began with a **warm-up**: 20 steps in which the rate rose from almost nothing. The first steps are dangerous.
# The weights are random. Adam divides each gradient by an estimate of its size, and at first that estimate rests on a single
# gradient. So Adam's first step moves *every* weight by the whole rate, however little its gradient says.
#
# > **Predict.** Use the linear rule's rate, 0.008, with 5 steps of warm-up instead of 20. How much higher is the loss after
# > 640 samples?

# %%
my_cold_percent = 5              # your prediction

# %%
hasty = loss_of(after(40, training_run(16, 0.008, warmup=5)), valid, some)
print(f"validation loss with 20 steps of warm-up {losses['16, linear']:.4f}, "
      f"with 5 {hasty:.4f}")
lab.beside("it is higher by", my_cold_percent, 100 * (hasty / losses["16, linear"] - 1),
           "%")

# %% [markdown]
# A few steps decide the whole run. With 5 steps of warm-up in all runs, you would have concluded that the linear rule ruins
# training. In fact the warm-up was too short. In a fair comparison of batches or rates, each one gets the warm-up that it
# needs.
#
# At the end of training, long steps do not help. Noise makes the weights jump around the minimum, at a loss that depends on
# the noise and the rate. So the rate falls, here along half a cosine (Loshchilov and Hutter 2017).
#
# ## Exercise: the schedule
#
# `step` is a tensor, the number of steps done so far. `config.optim` has `lr` (the peak), `warmup` (steps), `schedule`
# ("cosine" or "constant") and `min_lr` (where the cosine ends). `config.train.steps` is the total number of steps. Return the
# rate of the next step, a float32 tensor:
#
# - "constant": `lr`; "cosine": half a cosine from `lr`, at step `warmup`, to `min_lr`, at step `train.steps`, and `min_lr`
#   from then on;
# - while `step < warmup`, at most `lr · (step + 1) / warmup`.
#
# Use tensor operations only: no `if` on `step`, no `.item()`, so that the training step does not wait for the device.

# %% exercise="learning-rate"
from course.training.optimizer import learning_rate

# %%
check("learning-rate")

# %% [markdown]
# > **Question.** Why `step + 1`, and not `step`?
#
# <details><summary>Answer</summary>
# The first step is number 0. With a rate of 0 it would change nothing and waste a batch.
# </details>

# %%
def schedule_of(warmup: int, min_lr: float):
    """The learning rate of 200 steps."""
    settings = replace(config.load("vit-demo", ["train.steps=200"]),
                       optim=config.Optim(lr=2e-3, warmup=warmup, min_lr=min_lr))
    rates = [learning_rate(torch.tensor(at), settings).item() for at in range(200)]
    return style.curves({"learning rate": (range(200), rates)}, "step", "learning rate",
                        f"{warmup} steps of warm-up")


slider = widgets.explore(schedule_of, warmup=[20, 0, 50, 100], min_lr=[0.0, 2e-4],
                         alt="The learning rate over 200 steps: a straight rise, then "
                         "half a cosine.")

# %% [markdown]
# ## The reference runs
#
# The reference runs train `vit-demo` on 16 simulated years, 5,744 samples. Six batches from 4 to 128 and seven learning rates
# make 42 runs. Each has a warm-up of 20 steps and then a *constant* rate, so that a curve does not depend on where the run
# ends. A few more runs vary the warm-up or the schedule.
#
# Each run was validated {result: validations | d} times, always on the same 359 samples from a year outside the training
# data. There is one run of each kind, so differences of a percent or two mean nothing. To repeat the runs, use
# `python -m experiments.convergence`.

# %%
found = lab.results("convergence")
grid = {(run["batch"], run["lr"]): run for run in found["runs"] if run["schedule"]
        == "constant" and run["warmup"]}
batches = sorted({batch for batch, _ in grid})
rates = sorted({lr for _, lr in grid})
print(f"{len(found['runs'])} runs on {found['hardware']}, PyTorch {found['torch']}, "
      f"{found['date']}: {found['command']}")
print("batches", batches, "\nrates  ", rates)

# %% [markdown]
# TensorBoard shows them all, as it shows your own runs. Here its horizontal axis counts samples, so that you can compare
# batches. Filter the runs on the left by a part of their names, such as `b016` for a batch or `lr4.0e-03` for a rate.

# %%
logs = Path("runs/reference")
if not logs.is_dir():
    recorded_curves.to_tensorboard(found, logs)
address = lab.tensorboard(logs)

# %% [markdown]
# Look at one batch first, with all its rates.
#
# > **Predict.** The largest rate is 64 times the smallest. How will their curves differ? Which of the seven will be lowest at
# > the end?

# %%
def curves_of(batch: int):
    """Validation loss against samples, of all rates at a batch."""
    lines = {f"{lr:g}": ([at * batch for at in grid[batch, lr]["step"]],
                         numbers(grid[batch, lr]["valid_loss"])) for lr in rates}
    return data_parallel.logarithmic(lines, "samples", "validation loss",
                                     f"batch {batch}")


def numbers(column: list) -> list[float]:
    """A recorded column; None, a loss that was not finite, becomes infinity."""
    return [math.inf if value is None else value for value in column]


slider = widgets.explore(curves_of, batch=[16, *(batch for batch in batches
                                                 if batch != 16)],
                         alt="Validation loss against samples, a curve for each of "
                         "seven learning rates.")

# %% [markdown]
# **How to read it:** below the best rates, each halving of the rate costs more: the curve is smooth but slow, and falls
# further behind. The largest rate is beyond a cliff: for a long time it learns almost nothing. A factor of two below the
# cliff lies one of the best rates. Move the slider to 4: there, five rates from 0.0005 to 0.008 end close together. At 128
# only the two rates next to the cliff do well.
#
# > **Question.** A colleague compared two batches, both with a rate of 0.001. What did the colleague find out?
#
# <details><summary>Answer</summary>
# Only which batch suits a rate of 0.001: the small one. At batch 4 it is one of the good rates, at 128 one of the slow ones.
# To compare batches, search for the best rate of each.
# </details>
#
# ## Do short runs tell the truth?
#
# **Warm-up.** You compared five steps of warm-up with twenty in a run of 40 steps. Perhaps a long run forgets its beginning?
# Take batch 64 at its three highest rates, 688 steps, with 20 steps of warm-up and with none.
#
# > **Predict.** At the best rate, 0.008, by what percentage is the final loss higher without warm-up?

# %%
my_cold_start = 3                # your prediction


# %%
def last_loss(batch: int, lr: float, warmup: int, schedule: str) -> float:
    """The validation loss at the end of a run; infinity if it did not get there."""
    run, = [run for run in found["runs"]
            if (run["batch"], run["lr"], run["warmup"], run["schedule"])
            == (batch, lr, warmup, schedule)]
    return numbers(run["valid_loss"])[-1] if run["valid_loss"] else math.inf


for lr in rates[-3:]:
    warm, cold = (last_loss(64, lr, warmup, "constant") for warmup in (20, 0))
    print(f"rate {lr:<6g} validation loss at the end: with warm-up {warm:.4f}, "
          f"without {cold:.4f}, "
          f"{100 * (cold / warm - 1):.0f}% higher")
warm, cold = (last_loss(64, 0.008, warmup, "constant") for warmup in (20, 0))
lab.beside("\nhigher without warm-up at 0.008", my_cold_start, 100 * (cold / warm - 1),
           "%", how="recorded")

# %% [markdown]
# A long run does not forget. No run stopped early, and no loss became infinite. The log of a cold start looks like training;
# the run is just worse. The damage grows with the rate, and larger batches use higher rates. That is why papers on large
# batches stress warm-up (Goyal et al. 2017).
#
# **The cosine.** Take the same number of steps, with a constant rate and with one that falls, at batches 16 and 64.
#
# > **Predict.** At batch 16, with the best rate for each schedule, by what percentage does the cosine lower the final loss?
# > And at 64?

# %%
my_gain_16, my_gain_64 = 5, 5    # your predictions

# %%
gain = {}
for batch in (16, 64):
    ends = {schedule: {lr: last_loss(batch, lr, 20, schedule) for lr in rates[-5:]}
            for schedule in ("constant", "cosine")}
    for lr in rates[-5:]:
        print(f"batch {batch}, rate {lr:<6g} validation loss at the end: constant "
              f"{ends['constant'][lr]:.4f}, "
              f"cosine {ends['cosine'][lr]:.4f}")
    gain[batch] = 100 * (1 - min(ends["cosine"].values())
                         / min(ends["constant"].values()))
print(f"\nthe cosine's best is lower by {gain[16]:.1f}% at batch 16 (you said "
      f"{my_gain_16}%), "
      f"by {gain[64]:.1f}% at batch 64 (you said {my_gain_64}%); a minus means higher")

# %% [markdown]
# **How to read it:** the gain is small. Half a cosine has half the mean rate, so it moves half as far. Where the rate is low,
# distance is the limit, and the cosine is *worse* at both batches. It pays off where the weights jump around: at batch 16, at
# the highest rates. At 64 there is little noise to remove, and the best constant run is about as good.
#
# These runs end while the loss is still falling fast. A much longer run reaches the lowest loss that noise and rate allow,
# and there a falling rate gains more. Its price: you have to know the end in advance, because half of a cosine run is not a
# cosine run.
#
# ## The noise scale for free?
#
# Every reference run recorded the norm of its gradient at each validation. Batch 4 and batch 128 give two batch sizes, so two
# equations.
#
# > **Predict.** Around the same loss, which batch has the longer gradients? What noise scale will you get?

# %%
def squared_norm(batch: int, lr: float) -> float:
    """The mean squared norm of a batch's gradient in the run of this rate, where the
    loss is within 5% of 0.14."""
    run = grid[batch, lr]
    squares = [norm**2 for loss, norm in zip(numbers(run["valid_loss"]),
                                             run["grad_norm"], strict=True)
               if abs(loss / 0.14 - 1) < 0.05]
    return sum(squares) / len(squares) if squares else math.nan


print("mean squared norm of the gradient near a loss of 0.14, x 1000\n\n  "
      "batch" + "".join(f"{lr:>9g}" for lr in rates))
for batch in batches:
    norms = [1000 * squared_norm(batch, lr) for lr in rates]
    print(f"{batch:7}" + "".join(f"{'-':>9}" if math.isnan(norm) else f"{norm:9.2f}"
                                 for norm in norms))
between_runs = noise_scale(squared_norm(4, 0.004), squared_norm(128, 0.004), 4, 128)
print(f"\n'noise scale' from batches of 4 and 128 at the rate 0.004: "
      f"{between_runs:.1f} samples")

# %% [markdown]
# The result is a negative number of samples. The formula is right, so something else is wrong.
#
# > **Question.** What do the two equations assume that is not true here? Look along a row.
#
# <details><summary>Answer</summary>
# That both batches are drawn at the <i>same weights</i>. These are different runs, and runs at the same loss can be at very
# different places. Along the row of batch 4 the squared norm falls by a factor of {result: norm_factor | .0f} from the rate
# 0.00025 to 0.004. A likely reason: long or noisy steps cannot stay in a narrow valley. They jump from wall to wall and out
# of it, so high rates and small batches end up in wide valleys, where gradients are short. That difference is far larger than
# the noise of a gradient. Data parallelism avoids this: one rank's gradient and the mean over all ranks belong to the same
# weights.
# </details>
#
# ## How samples and steps trade
#
# If a sample taught as much in a large batch, the samples to a given loss would not depend on the batch. The steps would be
# inversely proportional to it. McCandlish et al. (section 2.3) say what happens instead:
#
# $$\text{samples} = E_{min}\left(1 + \frac{B}{B_{crit}}\right),\qquad \text{steps} = S_{min}\left(1 + \frac{B_{crit}}{B}\right)$$
#
# At the **critical batch** $B_{crit} = E_{min} / S_{min}$ you need twice the minimum of samples and twice the minimum of
# steps. Far below it, a larger batch is free: as many samples, fewer steps. Far above it you pay in samples and save almost
# no steps. To find it, take each batch at its best rate.
#
# > **Predict** the critical batch of this model. You measured a noise scale above.

# %%
my_critical = 10                 # your prediction, in samples


# %% [markdown]
# > **Question.** Samples cost money, steps cost time. One person has a thousand GPUs and is in a hurry. Another has one GPU
# > and a week. Which batch would you recommend to each?
#
# <details><summary>Answer</summary>
# The second wants the fewest samples: a batch well below the critical one, just large enough to keep the GPU busy. The first
# pays for time: the critical batch costs twice the minimum of samples and takes twice the minimum of steps. Beyond it prices
# rise quickly, and a larger batch buys almost nothing.
# </details>
#
# ## What will the runs say?
#
# At a small batch, several rates need almost equally many samples, so chance decides which of them is "the best". Therefore
# take *all* rates that need at most a tenth more samples than the batch's best rate. Then take the middle of their range.
#
# > **Predict.** With which power of the batch does that middle grow? 1 is the linear rule, 0.5 the square root, 0 no growth.

# %%
my_power = 0.5                   # your prediction

# %% [markdown]
# What you wait for is neither samples nor steps, but time. One GPU made all runs, and lesson 06 showed what a GPU does with
# tiny models.
#
# > **Predict.** Which batch reaches the target first on this one GPU?

# %%
my_fastest = 16                  # your prediction

# %% [markdown]
# Now suppose a model so large that 4 samples fill a device. Many devices take 4 samples of the batch each, as in lesson 07,
# and communication is free. Then the scaling efficiency is perfect.
#
# > **Predict.** With 32 devices instead of one, how many times sooner do you reach the target?

# %%
my_speedup = 32                  # your prediction

# %% [markdown]
# ## Exercise: samples to a target
#
# To compare curves, ask how many samples each needs to reach a given loss. Find the first validation at or below `target`.
# Interpolate linearly between it and the validation before. If the first one is already low enough, return its own samples;
# if none is, return `math.inf`. `steps` counts optimizer steps, each of `batch` samples.

# %% exercise="samples-to-target"
def samples_to(target: float, steps: list[float], losses: list[float], batch: int) -> float:
    """Samples until the loss first reaches the target, interpolated linearly between validations; infinity if never."""
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
# The target is a validation loss of 0.12. Every batch reaches it with at least two rates.

# %%
target = 0.12
needed = {(batch, lr): samples_to(target, run["step"], numbers(run["valid_loss"]),
                                  batch) for (batch, lr), run in grid.items()}
print(f"samples to a validation loss of {target} (-: not reached)\n\n  "
      f"batch" + "".join(f"{lr:>9g}" for lr in rates))
for batch in batches:
    row = [needed[batch, lr] for lr in rates]
    print(f"{batch:7}" + "".join(f"{samples:9,.0f}" if samples < math.inf
                                 else f"{'-':>9}" for samples in row))

# %% [markdown]
# ## The best rate against the batch

# %%
fewest = {batch: min(needed[batch, lr] for lr in rates) for batch in batches}


def good_rates(batch: int, margin: float = 1.1) -> list[float]:
    """The rates that need at most `margin` times the samples of the batch's best
    rate."""
    return [lr for lr in rates if needed[batch, lr] <= margin * fewest[batch]]


middle = {batch: math.sqrt(min(good_rates(batch)) * max(good_rates(batch)))
          for batch in batches}
power = np.polyfit(np.log(batches), np.log(list(middle.values())), 1)[0]
for batch in batches:
    print(f"batch {batch:4}: good rates "
          f"{', '.join(f'{lr:g}' for lr in good_rates(batch))}")
lab.beside("\nthe middle grows with the batch to the power", my_power, power,
           how="computed")

# %%
rules = {rule: (batches, [scaled_rate(middle[4], 4, batch, rule) for batch in batches])
         for rule in ("sqrt", "linear")}
# rates were tried in factors of two
half = math.sqrt(2)
lab.picture(data_parallel.logarithmic({"good rates and their "
                                       "middle": (batches, list(middle.values()))},
                                      "batch", "learning rate",
                                     f"Rates that reach {target} with at most a tenth "
                                      f"more samples", rules,
                                     bars={"good rates and their "
                                           "middle": [(min(good_rates(batch)) / half,
                                                      max(good_rates(batch)) * half)
                                                     for batch in batches]}),
            "The good rates of each batch as a bar: its upper end stays, its lower "
            "end rises. The dashed root and linear rules both rise faster than the "
            "middles of the bars")

# %% [markdown]
# **How to read it:** neither rule holds. The *upper* end is the same for all batches, so curvature probably sets it, not
# noise. The *lower* end rises: a small batch tolerates a low rate, a large batch needs long steps. A rule tells you where to
# *begin* a search.
#
# ## The critical batch

# %%
def fit(fewest: dict[int, float]) -> tuple[float, float]:
    """The fewest samples and the fewest steps of the law closest to these samples by
    batch, in relative error."""
    measured = np.array(list(fewest.values()))
    s_min, e_min = np.polyfit(list(fewest), measured, 1, w=1 / measured)
    return e_min, s_min


e_min, s_min = fit(fewest)
critical = e_min / s_min
law = [e_min + s_min * batch for batch in batches]
lab.picture(data_parallel.logarithmic({"samples": (batches, list(fewest.values())),
                                      "steps": (batches, [fewest[batch] / batch
                                                          for batch in batches])},
                                     "batch", "to the target", f"Samples and steps to "
                                      f"a validation loss of {target}",
                                     {"law, samples": (batches, law),
                                      "law, steps": (batches, [e_min / batch + s_min
                                                               for batch in batches])}),
            "Samples rise with the batch, slowly and then faster; steps fall, fast "
            "and then slowly; the fitted law is dashed")
for batch, samples in zip(batches, law, strict=True):
    print(f"batch {batch:4}: {fewest[batch]:7,.0f} samples, "
          f"{fewest[batch] / batch:6,.0f} steps; "
          f"by the law {samples:7,.0f} and {samples / batch:6,.0f}")
misses = [100 * abs(samples / fewest[batch] - 1)
          for batch, samples in zip(batches, law, strict=True)]
print(f"the law misses the measured samples by up to {max(misses):.0f}%")
lab.beside("critical batch", my_critical, critical, "samples", "computed")

# %% [markdown]
# Both regimes appear. From batch 4 to 8, the samples stay the same and the steps halve. From 64 to 128, the samples almost
# double and the steps hardly change. How certain is the number? Leave out one batch at a time, and choose other targets.
#
# > **Predict.** For an easier target, 0.15: a smaller critical batch, a larger one, or the same?

# %%
my_easier = "same"               # your prediction: "smaller", "larger" or "same"

# %%
for other in (0.15, 0.14, 0.13, 0.12):
    least = {batch: min(samples_to(other, grid[batch, lr]["step"],
                                   numbers(grid[batch, lr]["valid_loss"]), batch)
                        for lr in rates)
             for batch in batches}
    fits = [fit({batch: least[batch] for batch in batches if batch != left_out})
            for left_out in (None, *batches)]
    every, *others = [e_least / s_least for e_least, s_least in fits]
    print(f"validation loss {other}: critical batch {every:.0f}, one batch left out "
          f"{min(others):.0f} to {max(others):.0f}")
print(f"you said {my_easier}")

# %% [markdown]
# It is smaller: the further training goes, the larger the useful batch. (GPT-3's batch grew during training; Brown et al.
# 2020, appendix B.)

# %%
print(f"noise scale after 640 samples {early_noise:.1f}, after 2,560 {late_noise:.1f}; "
      f"critical batch for a loss of {target} {critical:.1f}")

# %% [markdown]
# The critical batch is several times the noise scale. The theory that equates them assumes plain gradient descent and equal
# curvature in all directions. Trust the forecast's order of magnitude.
#
# ## Time to the target

# %%
speed = {int(batch): value for batch, value in found["speed"].items()}
seconds = {batch: fewest[batch] / speed[batch] for batch in batches}
table = {f"batch {batch}": {"samples/s": speed[batch], "ms a step": 1000 * batch
                            / speed[batch],
                            "samples to the target": fewest[batch],
                            "steps": fewest[batch] / batch,
                            "s to the target": seconds[batch]} for batch in batches}
lab.recorded("convergence", table, why="One device")
lab.beside("\nfastest batch", my_fastest,
           min(seconds, key=lambda batch: seconds[batch]), "samples", how="recorded")

# %% [markdown]
# **How to read it:** a step takes {result: shortest_ms | .0f} to {result: longest_ms | .0f} ms at every batch, because this
# tiny model leaves the GPU waiting for launches. So batch 4 takes {result: batch_4_slower | .1f} times as long as 64,
# although it needs only {result: batch_4_samples | .0%} of the samples. Fill one device first.
#
# Now give 4 samples to each device, at full speed:

# %%
devices = [batch // 4 for batch in batches]
sooner = [fewest[4] / fewest[batch] * count
          for count, batch in zip(devices, batches, strict=True)]
lab.picture(data_parallel.logarithmic({"measured samples": (devices, sooner)},
                                      "devices, 4 samples each", "times sooner",
                                     "Target reached, against one device; "
                                      "communication is free",
                                     {"if samples did not depend on the "
                                      "batch": (devices, devices)}),
            "Times sooner against devices: on the dashed line at first, then far "
            "below it, flat at the end")
print("devices, times sooner:", ", ".join(f"{count}: {times:.1f}"
                                          for count, times in zip(devices, sooner,
                                                                  strict=True)))
lab.beside("32 devices, times sooner", my_speedup, sooner[-1], how="computed")

# %% [markdown]
# Two devices reach the target {result: two | .1f} times sooner, eight {result: eight | .1f}, sixteen {result: sixteen | .1f},
# and 32 only {result: thirty_two | .1f} times. Throughput grew 32 times. With more GPUs than the critical batch can use, cut
# the *model*: lessons 09 to 14.

# %% [markdown]
# ## Open task: plan a training run
#
# *Optional, about 60 minutes. Nothing later needs it.* You have a machine for a given time. Which batches and which learning
# rates reach the lowest loss by then? You may train to find out, but every trial costs time as well. Our solution has about 60
# lines.
#
# To keep trials cheap, the loss is a quadratic bowl, and training is gradient descent with noise in each direction. A small
# batch takes more steps in the same time. A large one has less noise.

# %%
from course.lab.instruments.noisy_bowl import Bowl, Job, Phase, expected_losses

lab.show("course.lab.instruments.noisy_bowl.Bowl")
lab.show("course.lab.instruments.noisy_bowl.Job")
job = Job(latency=0.01, per_sample=0.001, seconds=10.0)
bowl = Bowl(steepest=1.0, flattest=0.01, noise=1.0)


def bowl_curve(batch: int, rate: float) -> tuple[list[float], list[float]]:
    """Seconds and expected losses of a plan with one batch and one rate."""
    steps = int(job.seconds / 50 / job.step_seconds(batch))
    curve = [Phase(batch, rate, steps)] * 50
    return ([job.seconds * (number + 1) / 50 for number in range(50)],
            expected_losses(bowl, curve))


bowl_curves = {f"batch {batch}, rate {rate:g}": bowl_curve(batch, rate)
               for batch, rate in ((1, 0.5), (10, 0.5), (10, 0.05), (80, 0.5))}
lab.picture(data_parallel.logarithmic(bowl_curves, "seconds", "expected loss",
                                      "One bowl, one job, four constant plans"),
            "Four falling curves. After ten seconds "
            + ", ".join(f"{name} is at {curve[-1]:.2g}"
                        for name, (_, curve) in bowl_curves.items()))

# %% [markdown]
# **Contract**
#
# - `plan_training(job, train)` returns a plan: a list of phases, `Phase(batch, rate, steps)`. It may take at most `job.seconds`.
#   A step takes `job.step_seconds(batch)`.
# - `train(plan)` trains once and returns the loss after each phase. Noise is different in each run. The cliff is at a rate of 2
#   / steepest. From there on a run diverges, and its losses are NaN.
# - The bowl is hidden, and each job has a different one. All bowls have the form that you see above.
# - All calls of `train` for a job take at most 200 times `job.seconds`, by the same clock.
# - `expected_losses(bowl, plan)` is free to call, for any bowl that you make up. It is the mean over many runs.
#
# **Levels.** The check has two jobs or more, and looks at your plan's *expected* loss. Each level counts by itself, once the
# first is reached:
#
# | level | what the check counts |
# |---|---|
# | correct | at most 1.5 times the loss of the best plan with one batch and one rate |
# | half the loss | at most half of that plan's loss |
# | near the best | at most 1.3 times the loss of the best plan of ten phases whose batches and rates grow by constant factors |
# | 5 runs | all calls of `train` for a job take at most 5 times `job.seconds` |
#
# Start with correct. `lab.hint("plan-training")` opens the first of three hints, and each further call opens the next one.

# %% exercise="plan-training"
from course.lab.exercises.lesson08_open_task import plan_training  # noqa: F401

# %%
check("plan-training")

# %% [markdown]
# ## Summary
#
# - A gradient is an estimate; its noise scale, measured at fixed weights, forecasts the useful batch roughly.
# - A larger batch narrows the range of good rates from below; curvature limits it from above.
# - A scaling rule starts a search; each batch needs its own search and enough warm-up.
# - Around the critical batch, more samples stop saving steps.
# - Time to a target counts: throughput can scale perfectly while that time does not.
#
# ## Questions
#
# 1. Your throughput doubles with twice the GPUs. What else must you report?
# 2. When in training would you increase the batch?
# 3. Which batch would you try first for a new model, and how would you choose its rate?
#
# **Check your work from a terminal.** Save the notebook, then run `course check notebooks/08_scaling_mine.ipynb`.
# Next: [lesson 09](09_mesh.ipynb) arranges processes in groups.
