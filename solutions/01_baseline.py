# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 01 · Baseline
#
# Before you make anything faster, you need something that works, with a known speed and a known quality: a
# **baseline**. In this lesson you build one, a small vision transformer that forecasts the weather six hours ahead.
#
# **What you will learn**
#
# - How to write a loss and a training step that later lessons can distribute over many GPUs.
# - How to measure speed: samples per second, and the share of your machine's FLOP/s that they use.
# - How to decide whether a model has learned anything: compare it with *persistence*.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 90 minutes |
# | computing | 2 minutes on two cores |
# | you write | a loss (6 lines), a training step (7), the loop's forward and backward (12) |
# | you measure | samples per second, the share of your machine that they use, and forecast skill against *persistence* |
#
# Do [lesson 00](00_start_here.ipynb) first. Work in a copy again: *File → Save Notebook As…*, `01_baseline_mine.ipynb`.

# %% numbers=true
from course import config
from course.bench import results
from course.planner import flops

step_tflops = flops.step(config.load("vit-short", []).model, 16) / 1e12
h200_tflops = results.load("ceilings_h200")["ceilings"]["matmul tf32"] / 1e12
reader = "tf32, read by the training process"
best_samples = 16 * h200_tflops / step_tflops
h200_samples = results.value("vit_h200", reader, "samples_per_s")
h200_mfu = results.value("vit_h200", reader, "mfu")
gain_8_workers = results.value("vit_h200", "tf32, 8 loader processes", "samples_per_s") / h200_samples - 1
demo = results.load("demo_cpu")["scores"]
long = results.load("vit_base_h200")["runs"]
of_state, of_change = (long[way]["u10_rmse"]["model"][0] for way in ("state", "change"))
of_persistence = long["state"]["u10_rmse"]["persistence"][0]

# %%
import time

import torch
from torch import Tensor, nn

from course import config, data, models, parallel
from course.inference import forecast_scores
from course.utils import plots
from course.training import run_log, trainer
from course.config import schema
from course.data.weather import layout, simulation
from course.lab.figures import style, widgets
from course.lab.instruments import background_load
from course.lab import notebook as lab
from course.lab.notebook import check

lab.begin("01")

# %% [markdown]
# ## The data: an atmosphere
#
# Real weather data (ERA5, 40 years) take terabytes. This course simulates its own atmosphere instead: two layers of air
# on a turning sphere, with continents and mountains. It has jet streams and traveling storms. Its files have the same
# layout as the real data, so everything that you build also works on ERA5. (`data/README.md` tells you how to get it.)
#
# The next cell simulates six years of 90 days on a grid of 32 × 64 points, unless you already have them. It takes half a
# minute. At the end it prints how far mass and energy have drifted. Do not trust a simulation that loses either.

# %%
simulation.make(schema.build(simulation.Weather, {"path": "data/weather-32x64"},
                             "weather"))

# %% [markdown]
# One **state** of the atmosphere is an array of 20 channels (winds, temperatures, pressures, humidity) on the grid. One
# **sample** is a pair: the state now, and the state six hours later. The library reads such pairs from the files and
# normalizes them: it subtracts the mean of each channel and divides by its standard deviation. So 0 is the average, and
# most numbers lie between −2 and 2.

# %%
settings = config.load("vit-demo")
pairs = data.open_pairs(settings, "train")
channels = layout.channel_names(pairs.years[0])
state = pairs.state(100)
print(f"{len(pairs)} training pairs; a state has the shape {state.shape}: "
      f"{', '.join(channels)}")

# %% [markdown]
# Look at one channel, `u10`: the eastward wind ten meters above the ground. The model does not look at single grid
# points. It cuts the map into **patches** of 4 × 4 points. Each patch, with all 20 channels, becomes one **token**.
#
# > **Predict.** How many tokens does a state have? And how many numbers does one token contain?

# %%
my_tokens = 100                  # your prediction
my_numbers = 100

# %%
u10 = channels.index("u10")
side = settings.model.patch
lab.beside("tokens", my_tokens, settings.model.tokens, how="counted")
lab.beside("numbers in a token", my_numbers, len(channels) * side**2, how="counted")
lab.picture(style.patches(state[u10], side, "u10 of one state, in patches; the marked "
                          "one becomes a token"),
            "A map of the eastward wind, bands of jet streams and storms, under a "
            "grid of 8 by 16 patches; one is marked")

# %% [markdown]
# The map has 32 / 4 = 8 rows and 64 / 4 = 16 columns of patches: 128 tokens. Each contains 4 × 4 points of all 20
# channels: 320 numbers.
#
# ## A batch
#
# A training step processes several samples at once, a **batch**. This keeps the machine busier, because more tokens
# share the same weights (lesson 00). The gradient also improves, because it averages over several samples. In this library
# a batch is a dict of tensors, and the first dimension of each tensor is the sample:
#
# | key | shape | type | meaning |
# |---|---|---|---|
# | `input` | (B, C, H, W) | float32 | B states now: C channels on H latitudes and W longitudes, normalized |
# | `target` | (B, C, H, W) | float32 | the states six hours later |
# | `sample` | (B,) | int64 | the samples' ids: their positions in the data set, from 0 |
#
# Why ids? If the data do not fill the last batch, **padding** fills it: samples of zeros with the id −1. A loss must look at
# the ids, because padding must not count. Random parts of training, such as dropout, also depend on the id. So a sample gets
# the same random numbers on every GPU (lesson 07).
#
# > **Predict** what the next cell prints for a batch of three samples and one of padding, before you run it.

# %%
# what a loader calls; -1 asks for padding
batch = pairs.__getitems__([0, 7, 1435, -1])
for key, tensor in batch.items():
    print(f"{key:8} {tuple(tensor.shape)!s:18} {tensor.dtype}")
print("sample is", batch["sample"].tolist(),
      "and the largest number in the padding is", batch["input"][3].abs().max().item())

# %% [markdown]
# ## The model
#
# A **vision transformer** (ViT) embeds the patches, lets the tokens exchange information in a few transformer blocks, and
# maps each token back to a patch. This is the embedding; comments give the shapes.

# %%
lab.show("course.models.vit.Embed")

# %% [markdown]
# A few settings define the whole model. The cell above loaded `vit-demo`, which is a **preset**: a named file of
# settings. Each initial weight is a pure function of the seed, the parameter's name and the position. So everybody who
# runs this cell starts from the same weights, on any machine and any number of GPUs.


# %%
def new_model(seed: int = 0) -> nn.Module:
    """The model of the preset with fresh weights."""
    return parallel.initialize_serial(models.build_model(settings.model, seed), seed,
                                      torch.device("cpu"), torch.float32)


model = new_model()
count = sum(p.numel() for p in model.parameters())
print(f"{count:,} parameters in {settings.model.depth} blocks of width "
      f"{settings.model.dim}")

# %% [markdown]
# `model.prepare(batch, step)` converts a batch into the model's inputs. It cuts the maps into patches: (B, C, H, W)
# becomes (B, T, P). These are T tokens of P = C · patch² numbers each. It also adds each token's position in the map. (The
# random parts of training, such as dropout, use the step. This preset has none.)

# %%
step = torch.tensor(0)
for key, tensor in model.prepare(batch, step).items():
    print(f"{key:8} {tuple(tensor.shape)!s:18} {tensor.dtype}")

# %% [markdown]
# ## What must a forecast beat?
#
# The simplest forecast says that nothing changes: in six hours the weather will be what it is now. This forecast is
# called **persistence**, and it is not bad. A model that does not beat it has learned nothing. Two more forecasts need no
# deep learning:
#
# - **climatology** is always the average of the training years, point by point;
# - a **linear** regression uses the neighboring grid points.
#
# To compare forecasts you need a number, and training needs a number to improve: the **loss**. The reference model of
# this course uses the *relative L2 error*. For one sample with the forecast $y$ and the truth $t$, each one state,
#
# $$\ell = \frac{\lVert y - t\rVert_2}{\lVert t\rVert_2},\qquad \lVert x\rVert_2=\sqrt{\textstyle\sum_i x_i^2}$$
#
# over **all** numbers of the sample at once, in any order. A forecast of all zeros has the loss 1.
#
# > **Predict.** What is the loss of persistence? A perfect forecast has 0, a forecast of zeros has 1.

# %%
my_persistence = 0.5             # your prediction

# %% [markdown]
# ## Exercise: the relative L2 loss
#
# In this library a loss is a module of the model. It returns **two** numbers: the *sum* of the losses of the batch's
# samples, and their *weight*, here the number of samples. It does not divide one by the other. The end of this lesson
# shows why: training may cut a batch into pieces. Then it divides only once, by the weight of the whole batch.
#
# Handle padding from the start: samples whose id in `batch["sample"]` is −1 must have no weight.
#
# - `weight(batch)` returns 1 for each real sample and 0 for padding, shape (B,), in the dtype of `batch["target"]`.
# - `forward(output, batch)` returns the sum of the real samples' losses, and the sum of the weights. `output` and
#   `batch["target"]` are in patches, (B, T, P).
#
# The class already has one part: `self.norm(x)` returns the 2-norm of each sample of x, over all its tokens, as (B,). Use
# it, or write the norm yourself. From lesson 11 on, several GPUs share a sample's tokens, and `self.norm` handles that.
#
# > **Question, before you write.** The target of padding is all zeros. What is its relative error, and what do you get
# > when you multiply *that* by a weight of 0?
#
# <details><summary>Answer</summary>
# Its norm is 0, so you divide by zero. The quotient is infinite or "not a number", and 0 times that is "not a number".
# Replace the norm of padding by 1 before you divide (look up <code>torch.where</code> or <code>Tensor.where</code>).
# </details>

# %% exercise="relative-l2"
from course.models.vit import RelativeL2

# %%
check("relative-l2")

# %% [markdown]
# The check also put your class into the library and trained a small model with it for two steps. The last two lines of
# the check report the losses and the weights of that run.
#
# Now measure persistence on a batch of samples from all training years. Its forecast is the input itself.

# %%
sample_ids = list(range(0, len(pairs), 20))
batch = model.prepare(pairs.__getitems__(sample_ids), step)
total, weight = RelativeL2()(batch["input"], batch)
persistence = (total / weight).item()
lab.beside("loss of persistence", my_persistence, persistence)

# %% [markdown]
# In six hours a state changes by about a quarter of its distance from the average. Persistence is hard to beat because
# most of the weather does stay.
#
# ## The model before training
#
# > **Predict.** The model of this preset computes `input + output of its last layer`, and that layer starts at zero. What
# > is the model's loss before it has learned anything?

# %%
with torch.no_grad():
    total, weight = model.loss(model(batch), batch)
print(f"untrained model {total / weight:.4f}, persistence {persistence:.4f}")

# %% [markdown]
# Its forecast is the input plus zero: it *is* persistence, with the same loss. Training improves on that. The reference
# model of this course has no such head start: it begins at a loss of about 1.
#
# ## Exercise: a training step by hand
#
# A step of gradient descent has these parts, in some order:
#
# 1. Compute the forecast of a prepared batch, `model(batch)`, and the **mean** loss of its samples. (`model.loss` returns
#    sum and weight.)
# 2. Clear the gradients of the previous step.
# 3. Compute the gradient of the mean loss with respect to every parameter.
# 4. Let the optimizer update the parameters.
#
# > **Question.** Which of these may change places, and which may not? What happens if you leave out 2?
#
# <details><summary>Answer</summary>
# 1 comes before 3, 2 before 3, 3 before 4. Clearing may come before or after the forecast. PyTorch <i>adds</i> each new
# gradient to <code>.grad</code>: without clearing, a step follows the sum of all gradients so far. That looks like a
# learning rate that grows. The same addition will be useful later in this lesson.
# </details>
#
# Return the mean loss, *detached*. A tensor that remembers how it was computed keeps every activation of its step in
# memory for as long as you keep it.

# %% exercise="training-step"
def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
    """One step of training on a batch; returns the mean loss of its samples, detached from the graph."""
    ### BEGIN SOLUTION
    output = model(batch)
    total, weight = model.loss(output, batch)
    loss = total / weight
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()
    ### END SOLUTION

# %%
check("training-step")

# %% [markdown]
# Now use it: 60 steps of 4 samples each, with the optimizer Adam. The library's loader delivers the batches; their order
# is a pure function of the seed. The cell makes a new model, so it starts from the beginning each time you run it.
#
# > **Predict.** How many samples a second? Hint: a step needs about six FLOPs for each parameter and token (two forward,
# > four backward), and a state has 128 tokens. You know your machine's FLOP/s from lesson 00. (This cell trains on the
# > CPU, even if there is a GPU.)

# %%
my_samples_per_second = 300      # your prediction

# %%
background_load.report()
cpu = torch.device("cpu")
# a mesh of one process
alone = parallel.build_mesh(settings.parallel, parallel.World(device=cpu))
model = new_model()
loader = data.train_loader(settings, alone.dp, cpu, 0, model.example)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses, times = [], []
for _ in range(60):
    begin = time.perf_counter()
    losses.append(training_step(model, optimizer, model.prepare(next(loader), step)))
    times.append(time.perf_counter() - begin)
loader.close()
samples_per_second = settings.train.global_batch / sorted(times)[len(times) // 2]
lab.beside("your training step", my_samples_per_second, samples_per_second, "samples/s")

# %% [markdown]
# **What you should see:** the hint gives 6 × 892,096 × 128 ≈ 0.69 × 10⁹ FLOPs a sample. Divide your ceiling from lesson 00
# by this. You get the samples a second of a step that does nothing but large matrix multiplications. Your real step is
# slower. Keep both numbers in mind: the next section names their quotient.
#
# That was the speed. Did the model learn anything?
#
# > **Predict** the curve of the loss: where does it begin, and how smooth will it be?

# %%
curve = style.curves({"your training step": (range(1, 61),
                                             [loss.item() for loss in losses])}, "step",
                     "relative L2 loss",
                       "The first 60 steps", {"persistence": persistence})
lab.picture(curve, "A rough curve that starts at the loss of persistence and sinks a "
            "little below it within 60 steps")

# %% [markdown]
# It begins at persistence, as it must, and falls a little in these 240 samples.
#
# > **Question.** The curve is rough. Is that a mistake? What would make it smoother?
#
# <details><summary>Answer</summary>
# No. Each point is the loss of four samples, and some days are harder to forecast than others. A larger batch averages
# over more samples (lesson 08 asks how large a batch pays off). To see whether the model improves, evaluate the same
# samples each time: that is the purpose of a validation set.
# </details>

# %% [markdown]
# ## How much of the machine was that?
#
# Divide the model's FLOPs by the time they took, and compare with what the machine can do. This ratio is the **model
# FLOPs utilization**, MFU. It counts only the matrix multiplications that the model needs: a program does not become
# better by doing unnecessary work.
#
# > **Predict** the MFU of your training step, between 0 and 1. (The next cell measures the ceiling again, with a matrix
# > multiplication of 1024 × 1024.)

# %%
my_mfu = 0.9                     # your prediction

# %%
from course.bench import timing
from course.planner import flops

peak = 2 * 1024**3 / timing.matmul(1024, 1024, 1024, torch.float32, cpu)
per_sample = flops.step(settings.model, samples=1)
lab.beside("model FLOPs utilization", my_mfu, per_sample * samples_per_second / peak)

# %% [markdown]
# **What you should see:** on a CPU, often between a quarter and three quarters. Where does the rest of the time go? Some
# matrix multiplications are too small to reach the roof. Norms, softmax, activations and the optimizer are not matrix
# multiplications. And reading data takes time.
#
# A GPU does far worse at first. The reference model of this course has 360 × 720 points, patches of 8, width 384 and 12
# blocks. One step of 16 samples takes {result: step_tflops | .0f} × 10¹² FLOPs, minutes of work for a laptop.
# `course train vit-short` trains it for 128 steps.
#
# > **Predict.** An H200 reaches {result: h200_tflops | .0f} TFLOP/s in TF32 matrix multiplications (lesson 00). If a step
# > were as fast as that, how many samples a second would it process? And how many will it really process?

# %%
my_h200 = 100                    # your prediction, samples/s

# %%
runs = {row["configuration"]: row for row in lab.results("vit_h200")["rows"]}
baseline = "tf32, read by the training process"
lab.recorded("vit_h200", {label: {"samples/s": runs[key]["samples_per_s"],
                                  "GB": runs[key]["memory_gb"],
                                  "MFU, %": 100 * runs[key]["mfu"]}
                          for label, key in (("float32 (TF32), data read by the "
                                              "training process", baseline),
                                             ("float32 (TF32), data read by 8 workers",
                                              "tf32, 8 loader processes"),
                                             ("bf16, random data, made on the GPU",
                                              "bf16, on the device"),
                                             ("bf16, compiled, the same",
                                              "bf16, compiled"))},
             why="The reference model" if lab.gpu() else "The reference model needs a "
             "GPU, and there is none here")
lab.beside("\nvit-short in TF32 on an H200", my_h200, runs[baseline]["samples_per_s"],
           "samples/s", how="recorded")

# %% [markdown]
# **What you should see:** at {result: h200_tflops | .0f} TFLOP/s the H200 would process {result: best_samples | .0f}
# samples a second. It processed {result: h200_samples | .0f}.
#
# For GPUs, MFU compares with the peak of the data sheet, 495 TFLOP/s in TF32. The baseline uses
# **{result: h200_mfu | .0%}** of it. Nothing is broken, and the loss falls, but the matrix units are idle most of the
# time. Most first versions are like that. Workers that read the data make it {result: gain_8_workers | .0%} faster. Fewer
# bits help far more. Where does the time go? Lesson 02 measures it.

# %% [markdown]
# ## From your step to the library's
#
# Your step works for one process and for batches that fit into memory. The next cell shows the step that runs everything
# in this course, from a laptop to tensor parallelism in FP8. You do not need to understand every line yet; look for the
# four parts of your own.

# %%
lab.show("course.training.step.train_step")

# %% [markdown]
# Your parts 1 and 3, forward and backward, have become a function, `compute`. Each kind of parallelism replaces it, and
# the rest stays the same. Three things are new:
#
# - **`gradients`** combines the gradients of several processes (lesson 07), and clears them at the end. In a single
#   process it only clears.
# - **Skipping:** if the loss or the gradient is not finite, a flag on the device makes the optimizer keep its old state.
#   Python decides nothing, so it never waits for the device (lesson 02 shows what waiting costs).
# - **Clipping** scales down a gradient that is too long.
#
# > **Question.** Where does the step clear the gradients?
#
# <details><summary>Answer</summary>
# At the end, after the optimizer's step, so every step begins without gradients. Before or after makes no difference, as
# long as it happens once a step.
# </details>

# %% [markdown]
# ## Exercise: accumulate
#
# `eager` makes the `compute` of a model that is not cut into pieces. Often a batch does not fit into memory. Then the
# step processes **micro-batches**, one after another. Their gradients add up in `.grad`, because PyTorch adds them if you
# do not clear them. The result must be the gradient of the mean over the *global* batch, however you cut it. That is
# why the loss returns sums.
#
# Write it: `eager` defines a function `compute(batch)` and returns it. Use:
#
# - `layout.mesh.dp`: the data-parallel ranks, and `dp.size`, their number;
# - `global_weight(model, batch, dp)`: the weight $W$ of the global batch. Call it once, before you cut;
# - `split_microbatches(batch, config.train.micro_batch)`: yields micro-batches of that many samples; the last may be
#   smaller. 0 means not to cut, as in the run below. The check tries several;
# - `autocast(config.precision, weight.device)`: run the forward pass inside `with autocast(...)`; lesson 04 needs it;
# - `layout.tokens.cut(micro)`: the tokens of the micro-batch that are on this rank. Until lesson 10 these are all tokens,
#   so you may leave it out here;
# - `model.loss(output, micro)`: (sum, weight), as you wrote it.
#
# For each micro-batch, call `backward` on
#
# $$\text{sum}\cdot\frac{\texttt{dp.size}}{W}\cdot\texttt{progress.loss\_scale}$$
#
# Two of these factors are 1 in this lesson. `dp.size` is the number of data-parallel ranks. Each rank computes the
# gradient of its own samples. Then the library takes the **average** over the ranks, but you want the sum.
# `loss_scale` keeps small gradients from vanishing in 16 bits (lesson 04); the step divides by it. The check tries both.
#
# `compute(batch)` returns this rank's share of the mean loss: the sum over its micro-batches of sum / $W$, detached,
# without either factor. Give it the dtype of your inputs, of `weight` for example. The check also runs in float64, and
# `torch.zeros(())` is float32.
#
# > **Question.** Take six samples, one of them padding, in micro-batches of four. The second micro-batch has one real
# > sample and one of padding. What is wrong with averaging the means of the two micro-batches?
#
# <details><summary>Answer</summary>
# The mean of four samples and the mean of one would count the same. So the single sample would have four times the weight
# of each of the others. Sums, divided once by <i>W</i> = 5, give every sample the same weight. The mistake is hard to
# see: training works, only a little worse than it should.
# </details>

# %% exercise="accumulate"
from course.training.step import eager

# %%
check("accumulate")

# %% [markdown]
# ## Train
#
# `lab.yours(...)` puts your loss and your `eager` into the library, and `trainer.main` is what `course train` calls.
#
# > **Predict.** How many seconds will 500 steps take? Add time for validation and saving to the number below.

# %%
# your prediction: correct it
my_seconds = settings.train.global_batch * 500 / samples_per_second

# %%
name = time.strftime("lesson01-%Y%m%d-%H%M%S")
settings = config.load("vit-demo", ["train.steps=500", "train.device=cpu",
                                    "train.eval_every=125", "log.every=5",
                                    "checkpoint.every=250", f"log.name={name}"])
begin = time.perf_counter()
with lab.yours(RelativeL2, eager):
    run = trainer.main(settings)
lab.beside("\n500 steps", my_seconds, time.perf_counter() - begin, "s")

# %% [markdown]
# **What you should see:** a tenth to a half more than the steps alone. The run writes its records to `metrics.jsonl`:

# %%
records = run_log.read_metrics(run / "metrics.jsonl")
# without channels
last = {key: value for key, value in records[-1].items() if not isinstance(value, dict)}
if last["mfu"] is None:
    last["mfu"] = "unknown: this device has no data sheet peak here"
for key, value in last.items():
    print(f"{key:15} {lab.number(value) if isinstance(value, float) else value}")

# %% [markdown]
# > **Question.** The training loss begins close to the validation loss and ends a little below it. Why?

# %%
steps = [record["step"] for record in records]
validated = [record for record in records if "valid_loss" in record]
curve = style.curves({"training, 4 samples": (steps,
                                              [record["loss"] for record in records]),
                      "validation": ([r["step"] for r in validated],
                                     [r["valid_loss"] for r in validated])},
                     "step", "relative L2 loss", "500 steps",
                     {"persistence": persistence})
lab.picture(curve, "Training and validation loss fall together, fast at first and "
            "then slowly, well below persistence")

# %%
curve = style.curves({"learning rate": (steps, [record["lr"] for record in records])},
                     "step", "learning rate",
                     "A short warm-up, then half a cosine")
lab.picture(curve, "The learning rate rises within 20 steps and then falls along half "
            "a cosine to zero")

# %% [markdown]
# <details><summary>Answer</summary>
# During the first pass, every training sample is as new to the model as a validation sample. From step 360 on the samples
# repeat, and the model begins to know them.
# </details>
#
# **TensorBoard** shows these curves too; in a terminal, run `tensorboard --logdir runs`.

# %%
address = lab.tensorboard(run)

# %% [markdown]
# ## Is it any good?
#
# `evaluate` forecasts a year that the model has never seen. RMSE is the root mean squared error.
#
# > **Predict.** By what percentage will the error of `u10` be below that of persistence after six hours?

# %%
my_percent = 10                  # your prediction

# %%
scores = forecast_scores.score_run(run)
lab.beside("\nu10, error below that of persistence", my_percent,
           100 * scores["better_than_persistence"], "%")

# %% [markdown]
# **What you should see:** more than a third. `make demo` trains longer and reaches
# {result: demo["better_than_persistence"] | .0%}.
#
# For longer forecasts the model reads its own forecast, so errors add up.
#
# > **Question.** Which other forecast is hardest to beat after six hours, and which after five days?

# %%
from IPython.display import Image, display

display(Image(run / "evaluation" / "skill.png", alt="RMSE of u10 against lead time, "
              "for the model, persistence and climatology",
              width=560))

# %% [markdown]
# <details><summary>Answer</summary>
# First the linear regression, which shifts the weather along the wind; then climatology, whose error does not grow.
# </details>
#
# > **Predict, before you move the slider:** where will the forecast go wrong first: at the edges of storms, or inside?

# %%
trained, _ = forecast_scores.load_model(run, settings, cpu)
one_step = forecast_scores.state_to_state(trained, settings)
test = data.open_pairs(settings, "test")
truths = [torch.from_numpy(test.state(40, ahead)) for ahead in range(9)]
forecasts = [truths[0]]
for _ in range(8):
    forecasts.append(one_step(forecasts[-1][None])[0])
colors = plots.scale_of(torch.stack(truths)[:, u10].numpy(),
                        torch.stack(forecasts)[:, u10].numpy())


def forecast_at(hours: int):
    """Truth, forecast and error in standard deviations."""
    ahead = hours // 6
    return plots.truth_forecast_error(truths[ahead][u10].numpy(),
                                      forecasts[ahead][u10].numpy(),
                                      f"u10 after {hours} hours (standard deviations)",
                                      scale=colors)


slider = widgets.explore(forecast_at, hours=[6, 12, 18, 24, 30, 36, 42, 48],
                         alt="Maps of the true wind, the forecast, and "
                         "their difference.")

# %% [markdown]
# <details><summary>Answer</summary>
# At the edges: a storm forecast slightly too far east is a large error where the wind changes quickly.
# </details>
#
# ## The same at full size
#
# On an H200, `vit-base` trained for six minutes on three years of 360 x 720 points: 24 million parameters, 3,500 steps of
# 16 samples. It was trained twice. One model forecasts the next state, as the reference model does; the other forecasts
# the change in six hours, as yours does.
#
# > **Predict.** How many times larger is the first one's error after six hours? After how many days is climatology better?

# %%
my_times, my_days = 1.0, 5.0     # your predictions

# %%
recorded = lab.results("vit_base_h200")
days = [hours / 24 for hours in recorded["hours"]]
runs = recorded["runs"]
errors = {"forecasts the state": runs["state"]["u10_rmse"]["model"],
          "forecasts the change": runs["change"]["u10_rmse"]["model"],
          "persistence": runs["state"]["u10_rmse"]["persistence"],
          "climatology": runs["state"]["u10_rmse"]["climatology"]}
crossing = next(day for day, ours, theirs in zip(
    days, errors["forecasts the change"], errors["climatology"], strict=True)
    if ours > theirs)
lab.beside("error of the state's model / the change's, after 6 hours", my_times,
           errors["forecasts the state"][0] / errors["forecasts the change"][0],
           "times")
lab.beside("climatology is better than the change's model after", my_days, crossing,
           "days")
skill = style.curves({name: (days, values) for name, values in errors.items()},
                     "days ahead", "RMSE of u10 (m/s)",
                     "Two models of 24 million parameters")
lab.picture(skill, "Errors grow with lead time: for four days the model that forecasts "
            "the change is better; both models end above climatology and persistence")

# %% [markdown]
# **What you should see:** after six hours the errors are {result: of_state | .2f} and {result: of_change | .2f} m/s, and
# persistence's is {result: of_persistence | .1f} m/s. From the third day on, climatology is better than both models.
#
# > **Question.** A forecast need never be worse than guessing the mean, yet these are. Why?
#
# <details><summary>Answer</summary>
# They learned single steps from true states. From the second step on they read their own errors, which they never saw
# in training. Nothing tells them to return to the mean when they know nothing.
# </details>
#
# TensorBoard shows both runs' curves.

# %%
address = lab.tensorboard(lab.recording("tensorboard/vit-base"))

# %% [markdown]
# ## Summary
#
# - A model has to beat persistence, and yours does.
# - A loss returns a sum and a weight; divide once, by the global weight.
# - Then it does not matter how you cut the batch: into micro-batches, or over GPUs.
# - A training step computes, updates and clears; parallelism changes only `compute`.
# - Samples per second measure speed; MFU measures how much of the machine you use.
#
# ## Questions
#
# 1. Two runs have the same MFU. Do they train equally fast?
# 2. Which mistake in a loss would no curve show you?
# 3. Why is climatology's error independent of the lead time?
#
# Check from a terminal: `course check notebooks/01_baseline_mine.ipynb`.
#
# Next: in [lesson 02](02_profiling.ipynb) you find out where a step's time goes.
