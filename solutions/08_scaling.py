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
# With data parallelism n GPUs process n times the samples in a second, if the batch grows with them. Is the model
# trained n times sooner? Only if a sample in a large batch teaches as much as one in a small batch, and whether it does
# is not a question about computers. In this lesson you measure how batch, learning rate and the number of samples
# depend on one another, and find out up to which batch more GPUs buy time.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU. Lessons [00](00_start_here.ipynb), [01](01_baseline.ipynb) and [07](07_data_parallel.ipynb) |
# | reading and doing | about 90 minutes |
# | computing | 1.5 minutes on two cores |
# | you write | the noise in a gradient (3 lines), two scaling rules (4), a learning-rate schedule (7), samples to a target (9) |
# | you measure | the noise in a gradient; the best learning rate, and samples, steps and time to a target, against the batch |
#
# Work in a copy: *File → Save Notebook As…*, `08_scaling_mine.ipynb`. The curves of this lesson are of real runs, 55 of them,
# which would take your laptop a night: their logs come with the course, and the command that makes them stands at the end.

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
simulation.make(schema.build(simulation.Weather, {"path": "data/weather-32x64"}, "weather"))

# %% [markdown]
# ## Fewer, larger steps
#
# Start with an experiment that fits on your machine: 640 samples, in 160 steps of 4 or in 40 steps of 16. Everything else is
# the same, the learning rate of 0.002 as well.
#
# > **Predict.** Which of the two ends at the lower validation loss? By how many percent?

# %%
my_percent = 0                   # your prediction: by how many percent batch 16 ends higher than 4; if lower, with a minus

# %%
cpu = torch.device("cpu")


def training_run(batch: int, lr: float, warmup: int = 20) -> Iterator[torch.nn.Module]:
    """Train vit-demo at a constant learning rate after a warm-up; the model after each step."""
    settings = config.load("vit-demo", [f"train.global_batch={batch}", f"optim.lr={lr}", "optim.schedule=constant",
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
    output, batch = validation.forward_only(model, parallel.serial_layout(model), "fp32")(pairs.__getitems__(ids))
    total, weight = model.loss(output, batch)
    return (total / weight).item()


valid = data.open_pairs(config.load("vit-demo"), "valid")
some = list(range(0, len(valid), 6))
small = training_run(4, 0.002)
small_model = after(160, small)
losses = {"4": loss_of(small_model, valid, some), "16": loss_of(after(40, training_run(16, 0.002)), valid, some)}
print({f"batch {batch}": round(loss, 4) for batch, loss in losses.items()})
lab.beside("batch 16 ends higher than 4 by", my_percent, 100 * (losses["16"] / losses["4"] - 1), "%")

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
# Measure it on the model that you trained with batches of 4, with the gradients of 64 samples, one by one, and of all of them.
# All are taken at the same weights: that is what the two equations assume.
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


def measure_noise(model: torch.nn.Module) -> float:
    """The noise scale of this model's gradient, from 64 samples spread over the years of training."""
    each = [gradient(model, [number]) for number in range(0, 64 * 22, 22)]
    one = sum(g.square().sum().item() for g in each) / 64
    mean = (sum(each) / 64).square().sum().item()
    print(f"squared norm of the gradient of one sample {one:.4f}, of the mean of 64 {mean:.4f}")
    return noise_scale(one, mean, 1, 64)


early_noise = measure_noise(small_model)
lab.beside("noise scale after 640 samples", my_noise_scale, early_noise, "samples")

# %% [markdown]
# **What you should see:** about two samples. So soon after the start all samples agree on what is to be learned first: the
# gradient is long, and four samples know its direction well. Sixteen know it a little better, at four times the price.
#
# And later, when what all agree on has been learned? Let the small batch go on, to 2,560 samples, and measure again.
#
# > **Predict.** How large is it then?

# %%
my_later_noise = 5               # your prediction, in samples

# %%
late_noise = measure_noise(after(480, small))
lab.beside("noise scale after 2,560 samples", my_later_noise, late_noise, "samples")

# %% [markdown]
# Larger, about three. The gradient gets shorter faster than its noise does. Remember that number: it is a forecast, for the
# price of a backward pass, of the batch up to which a larger one is worth having. It is a rough one. It takes all directions as
# equally important, and knows nothing of Adam.
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
lab.beside("\nvit-bs2048", my_rate, config.load("vit-bs2048").optim.lr, how="preset")

# %% [markdown]
# Back to the experiment: 40 steps of 16 samples, with the rate that each rule gives.
#
# > **Predict.** You measured the noise scale. Which of the three rates will be the best one for 16 samples? And how
# > much of the distance to the small batch will it make up?

# %%
my_best_rule = "sqrt"            # your prediction: "same", "sqrt" or "linear"
my_share = 50                    # and of the distance, in percent

# %%
for rule in ("sqrt", "linear"):
    losses[f"16, {rule}"] = loss_of(after(40, training_run(16, scaled_rate(0.002, 4, 16, rule))), valid, some)
for name, loss in losses.items():
    print(f"batch {name:12} validation loss {loss:.4f}")
ends = {"same": losses["16"], "sqrt": losses["16, sqrt"], "linear": losses["16, linear"]}
print(f"the best at 16: {min(ends, key=lambda rule: ends[rule])}; you said {my_best_rule}")
lab.beside("of the distance to batch 4 it makes up", my_share,
           100 * (losses["16"] - min(ends.values())) / (losses["16"] - losses["4"]), "%")

# %% [markdown]
# **What you should see:** it hardly matters. Rates of 0.002 and of four times that end within a percent of one another,
# and far behind the batch of 4. Neither rule makes up for 120 fewer steps. The noise scale predicted it: a batch of 4
# is above it already, so there is little noise left to average away, and a better direction is not what was missing.
# The rules speak of batches *below* the noise scale, and that is where these batches may be later on. To see it, one
# has to train for longer, and to try many rates with every batch: that is what the reference runs did.
#
# ## Warm-up and schedule
#
# The runs above began with 20 steps in which the rate rose from almost nothing, the **warm-up**. The first steps are the
# dangerous ones. Weights are random; and Adam divides each gradient by an estimate of its size that at first rests on that one
# gradient, so its first step moves *every* weight by the whole rate, however little its gradient says.
#
# > **Predict.** The rate of the linear rule, 0.008, with 5 steps of warm-up instead of 20. How much higher is the loss after 640
# > samples?

# %%
my_cold_percent = 5              # your prediction

# %%
hasty = loss_of(after(40, training_run(16, 0.008, warmup=5)), valid, some)
print(f"validation loss with 20 steps of warm-up {losses['16, linear']:.4f}, with 5 {hasty:.4f}")
lab.beside("it is higher by", my_cold_percent, 100 * (hasty / losses["16, linear"] - 1), "%")

# %% [markdown]
# A few steps decide over the whole run. Had all runs had 5 steps of warm-up, you would have concluded that the linear
# rule ruins training, when it was the warm-up that was too short. A fair comparison of batches or rates gives each of
# them everything else that it needs.
#
# At the end a long step is of no use: noise makes the weights jump about the floor of the valley, at a height that the noise and
# the rate decide. So the rate falls, here along half a cosine (Loshchilov and Hutter 2017).
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
from course.training.optimizer import learning_rate

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
    return style.curves({"learning rate": (range(200), rates)}, "step", "learning rate", f"{warmup} steps of warm-up")


slider = widgets.explore(schedule_of, warmup=[20, 0, 50, 100], min_lr=[0.0, 2e-4],
                         alt="The learning rate over 200 steps: a straight rise, then half a cosine.")

# %% [markdown]
# ## The reference runs
#
# `vit-demo` on 16 simulated years, 5,744 samples, with six batches from 4 to 128 and seven learning rates: 42 runs, each with
# a warm-up of 20 steps and then a *constant* rate, so that a curve does not depend on where it was going to end. Some more show
# what that leaves out. Each was validated 33 times, always on the same 359 samples, on a year that is not among the 16. There is
# one run of each kind, so do not read anything into differences of a percent or two.

# %%
found = lab.results("convergence")
grid = {(run["batch"], run["lr"]): run for run in found["runs"] if run["schedule"] == "constant" and run["warmup"]}
batches = sorted({batch for batch, _ in grid})
rates = sorted({lr for _, lr in grid})
print(f"{len(found['runs'])} runs on {found['hardware']}, PyTorch {found['torch']}, {found['date']}: {found['command']}")
print("batches", batches, "\nrates  ", rates)

# %% [markdown]
# TensorBoard shows them all, as it shows runs of yours. Its horizontal axis counts samples here, so that batches compare. Choose
# some of the runs on the left by a part of their names, such as `b016` for a batch, or `lr4.0e-03` for a rate.

# %%
logs = Path("runs/reference")
if not logs.is_dir():
    recorded_curves.to_tensorboard(found, logs)
address = lab.tensorboard(logs)

# %% [markdown]
# Look at one batch first, with all its rates.
#
# > **Predict.** The largest rate is 64 times the smallest. How will their curves differ? Which of the seven will be the lowest in
# > the end?

# %%
def curves_of(batch: int):
    """Validation loss against samples, of all rates at a batch."""
    lines = {f"{lr:g}": ([at * batch for at in grid[batch, lr]["step"]], numbers(grid[batch, lr]["valid_loss"])) for lr in rates}
    return data_parallel.logarithmic(lines, "samples", "validation loss", f"batch {batch}")


def numbers(column: list) -> list[float]:
    """A recorded column; what was not finite is None there, and as bad as can be."""
    return [math.inf if value is None else value for value in column]


slider = widgets.explore(curves_of, batch=[16, *(batch for batch in batches if batch != 16)],
                         alt="Validation loss against samples, a curve for each of seven learning rates.")

# %% [markdown]
# **How to read it:** below the best rates each halving costs more: the curve is smooth, and slow, and its distance to the others
# grows. The largest rate is beyond a cliff: at 16 samples it learns next to nothing for most of the run, at 128 for the
# first 15,000 samples. A factor of two below it lies one of the best rates. Move the slider to 4: there five rates, from
# 0.0005 to 0.008, end close together. At 128 only the two next to the cliff do well, and the highest of them has a spike.
#
# > **Question.** Somebody tells you that they compared two batches, both with a rate of 0.001. What did they find out?
#
# <details><summary>Answer</summary>
# Which batch suits a rate of 0.001, and it is the small one. At 4 that is one of the good rates, at 128 one of the slow ones.
# A comparison of batches needs the best rate of each, and that means a search for each.
# </details>
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
# The target is a validation loss of 0.12. Higher, and it is met so early that it says little of training; at 0.116 all that is
# left of batch 4 is one rate, and it gets there in the very last validation. At 0.12 every batch has at least two rates
# to choose from.

# %%
target = 0.12
needed = {(batch, lr): samples_to(target, run["step"], numbers(run["valid_loss"]), batch) for (batch, lr), run in grid.items()}
print(f"samples to a validation loss of {target} (-: not reached)\n\n  batch" + "".join(f"{lr:>9g}" for lr in rates))
for batch in batches:
    row = [needed[batch, lr] for lr in rates]
    print(f"{batch:7}" + "".join(f"{samples:9,.0f}" if samples < math.inf else f"{'-':>9}" for samples in row))

# %% [markdown]
# ## The best rate against the batch
#
# At batch 4 four rates are within 7% of one another. Which of them is "the best" is chance, and a law fitted to chance is one
# as well. So take for each batch *all* rates that need at most a tenth more samples than its best one, and the middle of
# their range.
#
# > **Predict.** With which power of the batch does that middle grow? 1 is the linear rule, 0.5 the root, 0 not at all.

# %%
my_power = 0.5                   # your prediction

# %%
fewest = {batch: min(needed[batch, lr] for lr in rates) for batch in batches}


def good_rates(batch: int, margin: float = 1.1) -> list[float]:
    """The rates that need at most `margin` times the samples of the batch's best rate."""
    return [lr for lr in rates if needed[batch, lr] <= margin * fewest[batch]]


middle = {batch: math.sqrt(min(good_rates(batch)) * max(good_rates(batch))) for batch in batches}
power = np.polyfit(np.log(batches), np.log(list(middle.values())), 1)[0]
for batch in batches:
    print(f"batch {batch:4}: good rates {', '.join(f'{lr:g}' for lr in good_rates(batch))}")
lab.beside("\nthe middle grows with the batch to the power", my_power, power, how="computed")

# %%
rules = {rule: (batches, [scaled_rate(middle[4], 4, batch, rule) for batch in batches]) for rule in ("sqrt", "linear")}
half = math.sqrt(2)                                  # rates were tried in steps of two: each stands for half a step around it
lab.picture(data_parallel.logarithmic({"good rates and their middle": (batches, list(middle.values()))}, "batch", "learning rate",
                                     f"Rates that reach {target} with at most a tenth more samples", rules,
                                     bars={"good rates and their middle": [(min(good_rates(batch)) / half,
                                                                            max(good_rates(batch)) * half)
                                                                           for batch in batches]}),
            "The range of good rates for each batch as a bar: its upper end stays, its lower end rises; beside it the root rule "
            "and the linear rule, which both rise faster than the middles of the bars")

# %% [markdown]
# **How to read it:** neither rule. The middle grows with about a quarter power here, and the ends of the bars say why. The
# *upper* end is the same for all batches: 0.016 is too much at every one of them. If noise set that limit, it would be further
# out at 128; so it is rather how curved the loss is. The *lower* end rises by a factor of four to eight while the batch grows
# by 32. A small batch forgives: it seems that its noise slows long steps down about as much as their length speeds them up.
# A large batch has only its long steps to live on. So the range closes from below.
#
# The textbook's powers are about batches well below the noise scale and rates well below the cliff. Here both limits are near,
# and both rules would have sent batch 128 to the cliff or beyond it. What matters in practice: a rule says where you *begin* to
# search when the batch changes. And the power depends on what you call good: with `margin=1.05` it is another one (try it).
#
# ## Samples and steps
#
# Now take each batch at its best. If a sample taught the same in a large batch, samples would not depend on the batch, and
# steps would fall as one over it. McCandlish et al. (section 2.3) say what happens instead:
#
# $$\text{samples} = E_{min}\left(1 + \frac{B}{B_{crit}}\right),\qquad \text{steps} = S_{min}\left(1 + \frac{B_{crit}}{B}\right)$$
#
# At the **critical batch** $B_{crit} = E_{min} / S_{min}$ one needs twice the fewest samples, and twice the fewest
# steps. Far below it a larger batch is free: as many samples, fewer steps. Far above it one pays in samples and saves
# almost no steps.
#
# > **Predict** the critical batch of this model. You measured a noise scale above.

# %%
my_critical = 10                 # your prediction, in samples


# %%
def fit(fewest: dict[int, float]) -> tuple[float, float]:
    """The fewest samples and the fewest steps of the law closest to these samples by batch, in relative error."""
    measured = np.array(list(fewest.values()))
    s_min, e_min = np.polyfit(list(fewest), measured, 1, w=1 / measured)
    return e_min, s_min


e_min, s_min = fit(fewest)
critical = e_min / s_min
law = [e_min + s_min * batch for batch in batches]
lab.picture(data_parallel.logarithmic({"samples": (batches, list(fewest.values())),
                                      "steps": (batches, [fewest[batch] / batch for batch in batches])},
                                     "batch", "to the target", f"Samples and steps to a validation loss of {target}",
                                     {"law, samples": (batches, law),
                                      "law, steps": (batches, [e_min / batch + s_min for batch in batches])}),
            "Samples rise with the batch, slowly and then faster; steps fall, fast and then slowly; the fitted law is dashed")
for batch, samples in zip(batches, law, strict=True):
    print(f"batch {batch:4}: {fewest[batch]:7,.0f} samples, {fewest[batch] / batch:6,.0f} steps; "
          f"by the law {samples:7,.0f} and {samples / batch:6,.0f}")
misses = [100 * abs(samples / fewest[batch] - 1) for batch, samples in zip(batches, law, strict=True)]
print(f"the law misses the measured samples by up to {max(misses):.0f}%")
lab.beside("critical batch", my_critical, critical, "samples", "computed")

# %% [markdown]
# **How to read it:** both regimes are there. From 4 to 8 the samples stay and the steps halve: free. From 64 to 128 the samples
# almost double, and the steps are almost as many as before: paid for nothing. The law is rough: batches in the middle do better
# than it says, those at both ends worse. (Batch 128 also sees each of the 5,744 samples ten times on its way, batch 4 twice. That
# may cost it some of what it lacks.)
#
# So how sure is the number? Leave out one batch at a time and fit again; and choose other targets.
#
# > **Predict.** A target that is met sooner, 0.15: a smaller critical batch, a larger one, or the same?

# %%
my_easier = "same"               # your prediction: "smaller", "larger" or "same"

# %%
for other in (0.15, 0.14, 0.13, 0.12):
    least = {batch: min(samples_to(other, grid[batch, lr]["step"], numbers(grid[batch, lr]["valid_loss"]), batch) for lr in rates)
             for batch in batches}
    fits = [fit({batch: least[batch] for batch in batches if batch != left_out}) for left_out in (None, *batches)]
    every, *others = [e_least / s_least for e_least, s_least in fits]
    print(f"validation loss {other}: critical batch {every:.0f}, one batch left out {min(others):.0f} to {max(others):.0f}")
print(f"you said {my_easier}")

# %% [markdown]
# Smaller: the further training has come, the larger a batch is worth having, as the noise scale grows. (GPT-3 was
# trained like that: with a small batch at first, which grew to its full size. Brown et al. 2020, appendix B.) And a number like
# this is known to within a quarter of its value, no better.
#
# ## Is that the noise scale?

# %%
print(f"noise scale after 640 samples {early_noise:.1f}, after 2,560 {late_noise:.1f}; "
      f"critical batch for a loss of {target} {critical:.1f}")

# %% [markdown]
# Not the same number: the critical batch is many times as large. The theory that equates them is about plain gradient
# descent, whose step is the best one at every moment, on a loss that curves alike in all directions. What the forecast
# is good for is the order of magnitude: a few, perhaps tens, and not thousands.
#
# It also grows on the way to the target. Could one not have it for nothing? Every run of the reference wrote down the norm of
# its gradient at each validation, batch 4 and batch 128 among them: two batch sizes, two equations.
#
# > **Predict.** Around the same loss, which batch has the longer gradients? What does the noise scale come out as?

# %%
def squared_norm(batch: int, lr: float) -> float:
    """The mean squared norm of a batch's gradient in the run of this rate, where the loss is within 5% of 0.14."""
    run = grid[batch, lr]
    squares = [norm**2 for loss, norm in zip(numbers(run["valid_loss"]), run["grad_norm"], strict=True)
               if abs(loss / 0.14 - 1) < 0.05]
    return sum(squares) / len(squares) if squares else math.nan


print("mean squared norm of the gradient near a loss of 0.14, x 1000\n\n  batch" + "".join(f"{lr:>9g}" for lr in rates))
for batch in batches:
    norms = [1000 * squared_norm(batch, lr) for lr in rates]
    print(f"{batch:7}" + "".join(f"{'-':>9}" if math.isnan(norm) else f"{norm:9.2f}" for norm in norms))
between_runs = noise_scale(squared_norm(4, 0.004), squared_norm(128, 0.004), 4, 128)
print(f"\n'noise scale' from batches of 4 and 128 at the rate 0.004: {between_runs:.1f} samples")

# %% [markdown]
# A negative number of samples. Something is wrong, and it is not the formula.
#
# > **Question.** What do the two equations assume that is not so here? Look along a row.
#
# <details><summary>Answer</summary>
# That both batches are drawn at the <i>same weights</i>. These are different runs, and runs at the same loss can be at very
# different places: along the row of batch 4 the squared norm falls by a factor of 60 from the rate 0.00025 to 0.004. A likely
# reason: a long step, or a noisy one, cannot stay in a narrow valley, it jumps from wall to wall and out of it. So high rates
# and small batches end up in wide valleys, where gradients are short. That difference is far larger than the noise of a
# gradient. With data parallelism there is no such trouble: the gradient of one rank and the mean over all are taken at the same
# weights.
# </details>
#
# ## Who should take which batch?
#
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
# What you wait for is neither samples nor steps. These are the samples/s of `vit-demo` on the GPU that made the runs, and the
# time to the target that follows. The model is tiny; lesson 06 told you what a GPU does with tiny models.
#
# > **Predict.** Which batch reaches the target first on this one device?

# %%
my_fastest = 16                  # your prediction

# %%
speed = {int(batch): value for batch, value in found["speed"].items()}
seconds = {batch: fewest[batch] / speed[batch] for batch in batches}
table = {f"batch {batch}": {"samples/s": speed[batch], "ms a step": 1000 * batch / speed[batch],
                            "samples to the target": fewest[batch], "steps": fewest[batch] / batch,
                            "s to the target": seconds[batch]} for batch in batches}
lab.recorded("convergence", table, why="One device")
lab.beside("\nfastest batch", my_fastest, min(seconds, key=lambda batch: seconds[batch]), "samples", how="recorded")

# %% [markdown]
# **How to read it:** a step takes 6 or 7 ms, whether it has 4 samples or 128. The GPU waits for launches, so a larger batch
# costs no time, and time to the target is simply the number of steps. Batch 128 is the first by the few percent that separate
# its steps from those of 64, for twice the samples. And 32 is not far behind.
#
# > **Question.** Batch 4 takes six times as long as 64 here. Is that the fault of the small batch?
#
# <details><summary>Answer</summary>
# No, of the empty GPU. Batch 4 needs about a third of the samples of 64, and on a device that is busy with 4 samples it
# would be done first. So the first question is how large a batch has to be to fill one device. Only then comes the question
# of this lesson, what to do with the second one.
# </details>
#
# Now suppose a model so large that 4 samples keep a device busy, and many devices, each with 4 samples of the batch, as in lesson
# 07, and communication for nothing. Samples a second grow with their number: a perfect scaling efficiency.
#
# > **Predict.** 32 devices instead of one: how many times sooner is the target reached?

# %%
my_speedup = 32                  # your prediction

# %%
devices = [batch // 4 for batch in batches]
sooner = [fewest[4] / fewest[batch] * count for count, batch in zip(devices, batches, strict=True)]
lab.picture(data_parallel.logarithmic({"measured samples": (devices, sooner)}, "devices, 4 samples each", "times sooner",
                                     "Target reached, against one device; communication for nothing",
                                     {"if samples did not depend on the batch": (devices, devices)}),
            "Times sooner against devices: it follows the dashed line for two devices, falls behind, and is flat from 16 to 32")
print("devices, times sooner:", ", ".join(f"{count}: {times:.1f}" for count, times in zip(devices, sooner, strict=True)))
lab.beside("32 devices, times sooner", my_speedup, sooner[-1], how="computed")

# %% [markdown]
# Two devices are worth two, eight are worth five, and the last sixteen are worth almost nothing. That is the end
# of data parallelism as a way to be done sooner, and no network is to blame. Samples a second grew 32 times, and a report that
# shows only them shows a success. The critical batch grows as the loss falls, for language models up to one or two million
# tokens (Kaplan et al. 2020, section 5.1). But there always is one. Whoever has more GPUs than that must cut the *model*, not
# the batch: lessons 09 to 14.
#
# ## What the runs leave out
#
# **Warm-up.** You saw what five steps do instead of twenty, in a run of 40 steps. Perhaps a long run forgets its beginning?
# Batch 64 at its three highest rates, 688 steps, with 20 steps of warm-up and with none.
#
# > **Predict.** By how many percent is the loss at the end higher without warm-up, at the best rate, 0.008?

# %%
my_cold_start = 3                # your prediction


# %%
def last_loss(batch: int, lr: float, warmup: int, schedule: str) -> float:
    """The validation loss at the end of a run; infinity if it did not get there."""
    run, = [run for run in found["runs"]
            if (run["batch"], run["lr"], run["warmup"], run["schedule"]) == (batch, lr, warmup, schedule)]
    return numbers(run["valid_loss"])[-1] if run["valid_loss"] else math.inf


for lr in rates[-3:]:
    warm, cold = (last_loss(64, lr, warmup, "constant") for warmup in (20, 0))
    print(f"rate {lr:<6g} validation loss at the end: with warm-up {warm:.4f}, without {cold:.4f}, "
          f"{100 * (cold / warm - 1):.0f}% higher")
warm, cold = (last_loss(64, 0.008, warmup, "constant") for warmup in (20, 0))
lab.beside("\nhigher without warm-up at 0.008", my_cold_start, 100 * (cold / warm - 1), "%", how="recorded")

# %% [markdown]
# It does not forget. No run broke off, no loss became infinite, and a log of a cold start alone looks like training: it is just
# worse, 668 steps later. The higher the rate, the worse, and larger batches are trained with higher rates. That is why one
# reads of warm-up wherever one reads of large batches (Goyal et al. 2017).
#
# **The cosine.** The same number of steps, with a constant rate and with one that falls, for a batch below the critical one and
# for one above it.
#
# > **Predict.** By how many percent is the loss lower in the end, at batch 16 and the best rate of each? And at 64?

# %%
my_gain_16, my_gain_64 = 5, 5    # your predictions

# %%
gain = {}
for batch in (16, 64):
    ends = {schedule: {lr: last_loss(batch, lr, 20, schedule) for lr in rates[-5:]}
            for schedule in ("constant", "cosine")}
    for lr in rates[-5:]:
        print(f"batch {batch}, rate {lr:<6g} validation loss at the end: constant {ends['constant'][lr]:.4f}, "
              f"cosine {ends['cosine'][lr]:.4f}")
    gain[batch] = 100 * (1 - min(ends["cosine"].values()) / min(ends["constant"].values()))
print(f"\nthe cosine's best is lower by {gain[16]:.1f}% at batch 16 (you said {my_gain_16}%), "
      f"by {gain[64]:.1f}% at batch 64 (you said {my_gain_64}%); a minus says that it is higher")

# %% [markdown]
# **How to read it:** less than one hears. Half a cosine has half the mean rate, so it comes half as far; where the rate is low,
# distance is what limits, and the cosine is *worse* at both batches. It pays where the weights jump about: at batch 16, at the
# highest rates. At 64 there is little noise to get rid of, and the best constant run is as good, or a little
# better. (Differences of one percent in single runs are no proof of either.)
#
# These runs end while the loss is still falling fast. A run that goes on for many times as long comes to the floor that noise and
# rate decide, and there the end of a schedule has more to gain. Its price is that one has to know the end in advance: half
# of a cosine run is not a cosine run.
#
# ## Make these runs yourself
#
# On a GPU it takes minutes, without one (leave out `device=cuda`) an hour on many cores. Finished runs are kept, so the same
# command goes on where it was stopped:
#
# ```
# python -m experiments.convergence jobs=8 device=cuda out=runs/convergence.json
# python -m experiments.convergence out=runs/convergence.json tensorboard=runs/mine
# ```
#
# ## What you know now
#
# - A gradient is an estimate. Its noise scale says, to an order of magnitude, up to which batch averaging helps. It has to be
#   measured at one and the same weights.
# - A larger batch narrows the choice of rates from below; curvature limits it from above. A rule for the rate is where a search
#   begins, and each batch deserves its own search, with enough warm-up.
# - Samples to a target rise with the batch, steps fall; around the critical batch more of it stops being worth its price.
# - Time to a target is what counts. Fill one device first; then samples a second can scale perfectly while the time does not.
#
# **Check your work once more, from outside.** Save the notebook; then, in a terminal:
# `course check notebooks/08_scaling_mine.ipynb`. Next: [lesson 09](09_mesh.ipynb), which puts
# processes into groups for whatever else can be cut.
