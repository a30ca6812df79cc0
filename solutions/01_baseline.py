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
# Before anything is made faster there has to be something that works, with a speed and a quality that you know. That is
# a **baseline**. In this lesson you build one: a small vision transformer that looks at the weather and says what it
# will be six hours later. You write its loss, its training step, and the part of the library's training loop that all
# later lessons change. Then you train it with your own code in the library's place.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 90 minutes |
# | computing | 2 minutes on two cores |
# | you write | a loss (6 lines), a training step (7), the loop's forward and backward (12) |
# | you measure | samples per second, the share of your machine that they use, and forecast skill against *persistence* |
#
# You should have done [lesson 00](00_start_here.ipynb). Work in a copy, as there: *File → Save Notebook As…*,
# `01_baseline_mine.ipynb`.

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
# Real weather (ERA5, 40 years of it) is terabytes. This course brings an atmosphere of its own: the equations of
# two layers of air on a turning sphere, with continents and mountains, solved on your machine. It has jet streams and
# storms that travel, and files in the same layout as the real data, so all that you build works on ERA5 too
# (`data/README.md` says how to get it).
#
# The next cell simulates six years of 90 days on a grid of 32 × 64 points, if you have not got them yet: half a minute. At
# the end it says how far the mass and the energy of the air have drifted: a simulation that loses either is not to be trusted.

# %%
simulation.make(schema.build(simulation.Weather, {"path": "data/weather-32x64"}, "weather"))

# %% [markdown]
# One **state** of the atmosphere is an array of 20 channels (winds, temperatures, pressures, humidity) on the grid. One
# **sample** is a pair: the state now, and the state six hours later. The library reads such pairs from the files,
# normalised: each channel minus its mean, divided by its standard deviation. So 0 is the average, and most numbers lie
# between −2 and 2.

# %%
settings = config.load("vit-demo")
pairs = data.open_pairs(settings, "train")
channels = layout.channel_names(pairs.years[0])
state = pairs.state(100)
print(f"{len(pairs)} training pairs; a state has the shape {state.shape}: {', '.join(channels)}")

# %% [markdown]
# Here is one channel, `u10`: the eastward wind ten metres above the ground. The model will not look at single grid
# points. It cuts the map into **patches** of 4 × 4 points, and each patch, with all 20 channels, becomes one **token**.
#
# > **Predict.** How many tokens does a state have? And how many numbers go into one?

# %%
my_tokens = 100                  # your prediction
my_numbers = 100

# %%
u10 = channels.index("u10")
side = settings.model.patch
lab.beside("tokens", my_tokens, settings.model.tokens, how="counted")
lab.beside("numbers in a token", my_numbers, len(channels) * side**2, how="counted")
lab.picture(style.patches(state[u10], side, "u10 of one state, in patches; the marked one becomes a token"),
            "A map of the eastward wind, bands of jet streams and storms, under a grid of 8 by 16 patches; one is marked")

# %% [markdown]
# The map has 32 / 4 = 8 rows and 64 / 4 = 16 columns of patches: 128 tokens. Each takes 4 × 4 points of all 20 channels: 320
# numbers.
#
# ## A batch
#
# A training step looks at several samples at once, a **batch**: the machine is busier (more tokens for the same weights, as you
# saw in lesson 00), and the average over several samples is a better guide than one. In this library a batch is a dict
# of tensors, and the first dimension of each of them is the sample:
#
# | key | shape | type | what it is |
# |---|---|---|---|
# | `input` | (B, C, H, W) | float32 | B states now, of C channels on H latitudes and W longitudes, normalised |
# | `target` | (B, C, H, W) | float32 | the states six hours later |
# | `sample` | (B,) | int64 | the samples' ids: their positions in the data set, from 0 |
#
# What are the ids for? When the data do not fill the last batch, it is filled up with **padding**: samples of zeros,
# whose id is −1. Whatever computes a loss has to look at the ids, because padding must not count. And whatever is
# random in training, such as dropout, is drawn as a function of the sample's id, so that a sample meets the same
# randomness on whichever GPU it ends up (lesson 07).
#
# > **Predict** what the next cell prints for a batch of three samples and one of padding, before you run it.

# %%
batch = pairs.__getitems__([0, 7, 1435, -1])         # what a loader calls; -1 asks for padding
for key, tensor in batch.items():
    print(f"{key:8} {tuple(tensor.shape)!s:18} {tensor.dtype}")
print("sample is", batch["sample"].tolist(), "and the largest number in the padding is", batch["input"][3].abs().max().item())

# %% [markdown]
# ## The model
#
# A **vision transformer** (ViT): embed the patches, let the tokens exchange information in a few transformer blocks, and
# map each token back to a patch. This is the embedding; the shapes stand at the ends of the lines.

# %%
lab.show("course.models.vit.Embed")

# %% [markdown]
# The whole model is built from a few numbers. They are in `settings`: `vit-demo`, which was loaded above, is a
# **preset**, a file of settings with a name. Weights come from a pure function of (seed, name of the parameter,
# position), so you and everybody else who runs this cell start from the same ones, on any machine and, later, on any
# number of GPUs.


# %%
def new_model(seed: int = 0) -> nn.Module:
    """The model of the preset with fresh weights."""
    return parallel.initialize_serial(models.build_model(settings.model, seed), seed, torch.device("cpu"), torch.float32)


model = new_model()
count = sum(p.numel() for p in model.parameters())
print(f"{count:,} parameters in {settings.model.depth} blocks of width {settings.model.dim}")

# %% [markdown]
# Before the model sees a batch, `model.prepare(batch, step)` makes of it what the model works on: it cuts fields into
# patches, (B, C, H, W) into (B, T, P), T tokens of P = C · patch² numbers each, and says where each token lies in the map.
# (The step is for what is random in training, such as dropout. This preset has none.)

# %%
step = torch.tensor(0)
for key, tensor in model.prepare(batch, step).items():
    print(f"{key:8} {tuple(tensor.shape)!s:18} {tensor.dtype}")

# %% [markdown]
# ## What must a forecast beat?
#
# The simplest forecast says that nothing changes: in six hours the weather is what it is now. It is called
# **persistence**, and it is not a bad one. A model that does not beat it has learned nothing.
#
# To compare forecasts you need a number, and training needs the same number to improve: the **loss**. The
# reference model of this course uses the *relative L2 error*. For one sample with the forecast $y$ and the truth $t$,
# each one state,
#
# $$\ell = \frac{\lVert y - t\rVert_2}{\lVert t\rVert_2},\qquad \lVert x\rVert_2=\sqrt{\textstyle\sum_i x_i^2}$$
#
# taken over **all** numbers of the sample at once, in whatever order they lie. A forecast of all zeros has the loss 1.
#
# > **Predict.** What loss will persistence have? 0 would be perfect, 1 is what a forecast of zeros gets.

# %%
my_persistence = 0.5             # your prediction

# %% [markdown]
# ## Exercise: the relative L2 loss
#
# In this library a loss is a module of the model, and returns **two** numbers: the *sum* of the losses of the batch's
# samples, and their *weight*, here how many there are. It does not divide one by the other. Why not will be clear at
# the end of this lesson: a batch may be cut into pieces, and one divides only once, at the end, by the weight of the whole.
#
# One complication is real and you should get it right from the start: padding, the samples whose id in `batch["sample"]`
# is −1, must weigh nothing.
#
# - `weight(batch)` returns 1 for each real sample and 0 for padding, shape (B,), in the dtype of `batch["target"]`;
# - `forward(output, batch)` returns the sum of the real samples' losses, and the sum of the weights. `output` and
#   `batch["target"]` are in patches, (B, T, P).
#
# The class has a part already: `self.norm(x)` gives the 2-norm of each sample of x, over all its tokens, as (B,). Use
# it, or write the norm yourself; from lesson 11 on, when a sample's tokens lie on several GPUs, `self.norm` takes care
# of that.
#
# > **Question, before you write.** The target of padding is all zeros. What is its relative error, and what does
# > multiplying *that* by a weight of 0 give?
#
# <details><summary>Answer</summary>
# Its norm is 0, so you divide by zero: the quotient is infinite or "not a number", and 0 times that is "not a number" as well.
# Replace the norm of padding by 1 before you divide (look up <code>torch.where</code> or <code>Tensor.where</code>).
# </details>

# %% exercise="relative-l2"
from course.models.vit import RelativeL2

# %%
check("relative-l2")

# %% [markdown]
# The check also put your class where the library has its own, and trained a small model with it for two steps: the losses and
# the weights in its last two lines are those of that run.
#
# Now measure persistence with it, on a batch of samples from all over the training years. Its forecast is the input itself.

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
# > **Predict.** The model of this preset computes `input + what its last layer says`, and that layer starts
# > at zero. What is its loss before it has learned anything?

# %%
with torch.no_grad():
    total, weight = model.loss(model(batch), batch)
print(f"untrained model {total / weight:.4f}, persistence {persistence:.4f}")

# %% [markdown]
# Its forecast is the input plus zero: it *is* persistence, and has the same loss. All that it learns comes on top. The
# reference model of this course has no such head start: it begins at a loss of about 1.
#
# ## Exercise: a training step by hand
#
# A step of gradient descent does this, in some order:
#
# 1. compute the forecast of a prepared batch, `model(batch)`, and the **mean** loss of its samples (`model.loss` gives sum and
#    weight);
# 2. clear the gradients of the step before;
# 3. compute the gradient of the mean loss with respect to every parameter;
# 4. let the optimizer move the parameters.
#
# > **Question.** Which of these may change places, and which may not? What happens if 2 is left out?
#
# <details><summary>Answer</summary>
# 1 comes before 3, 2 before 3, 3 before 4; clearing may come before or after the forecast. PyTorch <i>adds</i>
# each new gradient to <code>.grad</code>: without clearing, a step follows the sum of all gradients so far. That looks like
# a learning rate that grows, and is easily taken for one. The same addition is useful a little further down.
# </details>
#
# Return the mean loss, *detached*: a tensor that remembers how it was computed keeps every activation of that step in
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
# Now use it: 60 steps of 4 samples each, with the optimizer Adam. The library's loader hands out the batches, in an order
# that is a pure function of the seed. The cell makes a new model, so that it starts from the beginning each time you run it.
#
# > **Predict.** How many samples a second? A hint: the step needs about six FLOPs for each parameter and token (two
# > forward, four backward), a state has 128 tokens, and you know from lesson 00 how many FLOP/s your machine can do. (This
# > cell trains on the processor, also where there is a GPU.)

# %%
my_samples_per_second = 300      # your prediction

# %%
background_load.report()
cpu = torch.device("cpu")
alone = parallel.build_mesh(settings.parallel, parallel.World(device=cpu))      # a mesh of one process
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
lab.beside("training by hand", my_samples_per_second, samples_per_second, "samples/s")

# %% [markdown]
# **What you should see:** the hint gives 6 × 892,096 × 128 = 0.69 × 10⁹ FLOPs a sample. Your ceiling of lesson 00 over that is
# how many samples a second there would be if a step did nothing but large matrix multiplications; it stays below. Keep both
# numbers in mind: there is a name for their quotient.
#
# That was the speed. Did the model learn anything?
#
# > **Predict** the curve of the loss: where does it begin, and how smooth will it be?

# %%
curve = style.curves({"your training step": (range(1, 61), [loss.item() for loss in losses])}, "step", "relative L2 loss",
                       "The first 60 steps", {"persistence": persistence})
lab.picture(curve, "A rough curve that starts at the loss of persistence and sinks a little below it within 60 steps")

# %% [markdown]
# It begins at persistence, as it must, and comes down a little in these 240 samples.
#
# > **Question.** The curve is rough. Is that a mistake? What would make it smoother?
#
# <details><summary>Answer</summary>
# No. Each point is the loss of four samples, and some days are harder to forecast than others: this is the noise of
# the estimate. A larger batch averages over more of them (lesson 08 asks how large is worth it). To see whether the model
# gets better, look at the same samples each time: that is what a validation set is for.
# </details>

# %% [markdown]
# ## How much of the machine was that?
#
# A model's FLOPs over the time they took, compared with what the machine can do, is called **model FLOPs utilisation**,
# MFU. The numerator counts the multiplications of matrices that the model needs, and nothing else: a program does not become
# better by doing unnecessary work.
#
# > **Predict** the MFU of your training step, between 0 and 1. (The ceiling is what your machine reaches in a matrix
# > multiplication of 1024 × 1024, measured once more in the next cell.)

# %%
my_mfu = 0.9                     # your prediction

# %%
from course.bench import timing
from course.planner import flops

peak = 2 * 1024**3 / timing.matmul(1024, 1024, 1024, torch.float32, cpu)
per_sample = flops.step(settings.model, samples=1)
lab.beside("model FLOPs utilisation", my_mfu, per_sample * samples_per_second / peak)

# %% [markdown]
# **What you should see:** on a CPU, between a third and three quarters. The rest of the time went into matrix multiplications too
# small to reach the roof, into all that is not matrix multiplication (norms, softmax, activations, the optimizer), and into
# reading data. On a GPU the first version of a model does far worse, as you will see at the end.

# %% [markdown]
# ## From your step to the library's
#
# Your step works for one process and batches that fit into memory. Look at the one that runs everything in this course,
# from a laptop to tensor parallelism in FP8. You need not understand every line yet; look for the four parts of your own.

# %%
lab.show("course.training.step.train_step")

# %% [markdown]
# Your parts 1 and 3, forward and backward, have become a function, `compute`. It is what changes from one kind of
# parallelism to the next, while the rest stays. Three things are new around it:
#
# - **`gradients`** completes what `compute` leaves in `.grad` when several processes each have a part of it (lesson
#   07), and clears it at the end; in a single process it only clears;
# - **skipping**: if the loss or the gradient is not finite, a flag on the device makes the optimizer keep its old
#   state. Nothing is decided in Python, so Python never waits for the device (lesson 02 shows what waiting costs);
# - **clipping**: a gradient that is too long is scaled down.
#
# > **Question.** Where are the gradients cleared?
#
# <details><summary>Answer</summary>
# At the end, after the optimizer's step, so that every step begins with none. Before or after makes no difference as
# long as it is once a step.
# </details>

# %% [markdown]
# ## Exercise: accumulate
#
# `eager` makes the `compute` of a model that is not cut into pieces. Often a batch does not fit into memory, so it is
# processed in **micro-batches**, one after another; their gradients add up in `.grad`, because that is what
# PyTorch does if you do not clear them. The result must be the gradient of the mean over the *global* batch, the same
# whether or how it was cut. That is why the loss returns sums.
#
# Write it: `eager` defines a function `compute(batch)` and returns it. You get:
#
# - `layout.mesh.dp`: the data-parallel ranks, and `dp.size`, how many there are;
# - `global_weight(model, batch, dp)`: the weight $W$ of the global batch. Call it once, before you cut;
# - `split_microbatches(batch, config.train.micro_batch)`: yields micro-batches of so many samples; the last may be smaller.
#   0 means not to cut, as in the run below; the check tries several;
# - `autocast(config.precision, weight.device)`: run the forward pass inside `with autocast(...)`: lesson 04 needs it there;
# - `layout.tokens.cut(micro)`: the micro-batch with the tokens that are on this rank. That is all of them until lesson 10, so
#   you may leave it out here;
# - `model.loss(output, micro)`: (sum, weight), as you wrote it.
#
# For each micro-batch, call `backward` on
#
# $$\text{sum}\cdot\frac{\texttt{dp.size}}{W}\cdot\texttt{progress.loss\_scale}$$
#
# Two of these factors are 1 in this lesson. `dp.size` is the number of data-parallel ranks: each computes the
# gradient of its own samples, and then they take the **average** over the ranks, though what we want is the sum.
# `loss_scale` keeps small gradients from vanishing in 16 bits (lesson 04); the step divides by it. The check tries
# both.
#
# `compute(batch)` returns this rank's share of the mean loss, the sum over its micro-batches of sum / $W$: detached, without
# either factor. Let it have the format of what you are given, of `weight` say: the check runs in float64 too, and
# `torch.zeros(())` is float32.

# %% exercise="accumulate"
from course.training.step import eager

# %%
check("accumulate")

# %% [markdown]
# > **Question.** Six samples, one of them padding, in micro-batches of four: the second has one real sample and one of
# > padding. What is wrong with averaging the means of the two micro-batches?
#
# <details><summary>Answer</summary>
# The mean of four samples and the mean of one would count the same, so the lonely sample would have four times the
# weight of each of the others. Sums, divided once by <i>W</i> = 5, give every sample the same. The mistake
# is hard to see: training works, only a little worse than it should.
# </details>

# %% [markdown]
# ## Train
#
# Everything is there. `lab.yours(...)` puts your loss and your `eager` in the library's place, and `trainer.main` is what
# `course train` calls. 500 steps of 4 samples.
#
# > **Predict.** How many seconds will they take? The next cell computes the steps alone, from your speed above.
# > Validation and saving come on top: correct the number by what you expect of them.

# %%
my_seconds = settings.train.global_batch * 500 / samples_per_second              # your prediction: correct it

# %%
name = time.strftime("lesson01-%Y%m%d-%H%M%S")
settings = config.load("vit-demo", ["train.steps=500", "train.device=cpu", "train.eval_every=125", "log.every=5",
                                    "checkpoint.every=250", f"log.name={name}"])
begin = time.perf_counter()
with lab.yours(RelativeL2, eager):
    run = trainer.main(settings)
lab.beside("\n500 steps", my_seconds, time.perf_counter() - begin, "s")

# %% [markdown]
# **What you should see:** a tenth to a half more than the steps alone. Validation goes through a year of data four times, and
# the library's step does more than yours: it clips, checks for numbers that are not finite, and writes records. If it took
# many times as long, the machine was busy: PyTorch's threads wait for the slowest of them.
#
# A run writes down what it does. `metrics.jsonl` has a line for each logged step:

# %%
records = run_log.read_metrics(run / "metrics.jsonl")
last = {key: value for key, value in records[-1].items() if not isinstance(value, dict)}     # less the error of each channel
if last["mfu"] is None:
    last["mfu"] = "not known: there is no data sheet's peak for this device, so measure one, as you did above"
for key, value in last.items():
    print(f"{key:15} {lab.number(value) if isinstance(value, float) else value}")

# %% [markdown]
# ## Read the curves
#
# > **Question.** A training loss is that of four samples, so it jumps up and down by some percent; a printed line shows one such
# > jump. Look at the middle of its band instead: it lies close to the validation loss at first, and about five percent below at
# > the end. Why? And why do both drop fastest at the beginning?

# %%
steps = [record["step"] for record in records]
validated = [record for record in records if "valid_loss" in record]
curve = style.curves({"training, 4 samples": (steps, [record["loss"] for record in records]),
                        "validation": ([r["step"] for r in validated], [r["valid_loss"] for r in validated])},
                       "step", "relative L2 loss", "500 steps", {"persistence": persistence})
lab.picture(curve, "Training and validation loss fall together, fast at first and then slowly, well below persistence")

# %%
curve = style.curves({"learning rate": (steps, [record["lr"] for record in records])}, "step", "learning rate",
                       "A short warm-up, then half a cosine")
lab.picture(curve, "The learning rate rises within 20 steps and then falls along half a cosine to zero")

# %% [markdown]
# <details><summary>Answer</summary>
# 500 steps of 4 samples see 2000 samples, not even one and a half passes over 1436 pairs. In the first pass no sample comes
# twice: the training loss is of samples as new as those of validation, though of other years. From step 360 on they come again,
# the model begins to know them, and the gap grows. In the beginning much can be learned from every sample. At the end the
# learning rate has dropped to almost nothing (it follows half a cosine) and the weights hardly move; the noise that is left is
# that of the samples.
# </details>
#
# The same curves, and a forecast drawn at each validation, are in **TensorBoard**. Here it opens inside the notebook,
# for as long as the notebook runs, if your browser runs on the same machine; in a terminal it is `tensorboard --logdir runs`.

# %%
address = lab.tensorboard(run)

# %% [markdown]
# ## Is it any good?
#
# A loss is for training. What a forecaster asks is: by how many metres per second is the wind wrong? `evaluate` forecasts
# a year that the model has never seen, and compares with **persistence**, with **climatology** (always the average of the
# training years, point by point), and with a **linear** regression on the neighbouring grid
# points, which is what one could do without deep learning. RMSE is the root of the mean squared error.
#
# > **Predict.** By how many percent will the error of the wind, `u10`, after six hours be below that of persistence?

# %%
my_percent = 10                  # your prediction

# %%
scores = forecast_scores.score_run(run)
lab.beside("\nu10, error below that of persistence", my_percent, 100 * scores["better_than_persistence"], "%")

# %% [markdown]
# **What you should see:** more than a third, after 500 steps. `make demo` takes 1200, and reaches almost a half.
#
# For more than six hours the model is fed its own forecast, again and again. Each time it adds an error to the ones before.
#
# > **Question.** Which of the other forecasts is the hardest to beat after six hours, and which after five days? And
# > why does climatology, the dotted line in the next picture, not rise?

# %%
from IPython.display import Image, display

display(Image(run / "evaluation" / "skill.png", alt="RMSE of u10 against lead time, for the model, persistence and climatology",
              width=560))

# %% [markdown]
# <details><summary>Answer</summary>
# After six hours the linear regression: it knows which way the wind blows and shifts the weather along. After five days
# climatology: errors have grown until the forecast is as good as the weather of any other day, and the average is the
# safest bet. It does not look at the start, so it is as wrong after six hours as after five days. Where the model's curve
# crosses it is how far the model can see.
# </details>
#
# Now look at one forecast of two days. The slider changes the hours since the start; colours mean the same for all of them.
#
# > **Predict, before you move it:** where will the forecast go wrong first: at the edges of storms, or inside them?

# %%
trained, _ = forecast_scores.load_model(run, settings, cpu)
one_step = forecast_scores.state_to_state(trained, settings)
test = data.open_pairs(settings, "test")
truths = [torch.from_numpy(test.state(40, ahead)) for ahead in range(9)]
forecasts = [truths[0]]
for _ in range(8):
    forecasts.append(one_step(forecasts[-1][None])[0])
colours = plots.scale_of(torch.stack(truths)[:, u10].numpy(), torch.stack(forecasts)[:, u10].numpy())


def forecast_at(hours: int):
    """Truth, forecast and their difference after so many hours, in standard deviations of u10."""
    ahead = hours // 6
    return plots.truth_forecast_error(truths[ahead][u10].numpy(), forecasts[ahead][u10].numpy(),
                                         f"u10 after {hours} hours (standard deviations)", scale=colours)


slider = widgets.explore(forecast_at, hours=[6, 12, 18, 24, 30, 36, 42, 48],
                         alt="Maps of the true wind, of the forecast, and of their difference, after so many hours.")

# %% [markdown]
# <details><summary>Answer</summary>
# At the edges, where the wind changes much from one point to the next: there a storm that is forecast a little too far east is
# a large error. After six hours the error on the steepest quarter of the map is about three times that on the flattest; strong
# and weak winds differ less. After two days whole storms are in the wrong place, and only the poles and the tropics, where
# little happens, stay pale. By then you can also see squares of 4 × 4 points in the forecast: the patches.
# </details>
#
# ## On a GPU
#
# The reference model of this course is larger: 360 × 720 points, patches of 8, width 384, 12 blocks, 16 samples a batch. One
# of its steps is 23 × 10¹² FLOPs, minutes of work for a laptop. `course train vit-short` trains it for 128 steps.
#
# > **Predict.** An H200 did 332 TFLOP/s in TF32 matmuls (lesson 00). If a step were as fast as that, how many samples a
# > second would it be? And what will it really do?

# %%
my_h200 = 100                    # your prediction, samples/s

# %%
runs = {row["rung"]: row for row in lab.results("vit_h200")["rows"]}
baseline = "tf32, read by the training process"
lab.recorded("vit_h200", {label: {"samples/s": runs[key]["samples_per_s"], "GB": runs[key]["memory_gb"],
                                  "MFU, %": 100 * runs[key]["mfu"]}
                          for label, key in (("float32 (TF32), data read by the training process", baseline),
                                             ("float32 (TF32), data read by 8 workers", "tf32, 8 loader processes"),
                                             ("bf16, random data, made on the GPU", "bf16, on the device"),
                                             ("bf16, compiled, the same", "bf16, compiled"))},
             why="The reference model" if lab.gpu() else "The reference model needs a GPU, and there is none here")
lab.beside("\nvit-short in TF32 on an H200", my_h200, runs[baseline]["samples_per_s"], "samples/s", how="recorded")

# %% [markdown]
# **What you should see:** 332 TFLOP/s over 23 TFLOPs are 14 steps, 230 samples a second. It did 17, one in fourteen.
#
# In the table MFU is against the peak of the data sheet, 495 TFLOP/s in TF32, as is usual for GPUs: the baseline uses **5%**
# of it. Nothing is broken, the loss goes down, and the units that multiply stand idle most of the time: that is how
# most first versions are. Workers that read the data help by a third, fewer bits help far more. Where does the
# time go? That is a question for measurement, and the subject of lesson 02.
#
# ## What you know now
#
# - A model has to beat persistence, and yours does.
# - A loss returns a sum and a weight, and one divides once, by the weight of the global batch. Then it does not matter how
#   the batch is cut: over micro-batches today, over GPUs from lesson 07 on.
# - A training step is compute, update, clear; `compute` is the part that parallelism will change.
# - Samples per second say how fast; MFU says how much of the machine that is.
#
# **Check your work once more, from outside.** Save the notebook; then, in a terminal:
# `course check notebooks/01_baseline_mine.ipynb`.
#
# Next: [lesson 02](02_profiling.ipynb), where you find out what a step spends its time on.
