# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 02 · Profiling
#
# In lesson 01 your machine reached only a part of its peak. Where does the rest of the time go? In this lesson you look
# instead of guessing: you take a training step apart with a profiler.
#
# **What you will learn**
#
# - Why a clock around a line of code misleads you on a GPU, and what a profiler records instead.
# - How to turn thousands of events into one sentence: *this step waits for data*, *for the host* or *for other GPUs*.
# - How to recognize a launch-bound step, and communication that nothing hides.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 75 minutes |
# | computing | half a minute on two cores |
# | you write | named parts of a step (9 lines), busy and exposed time (5 and 1), who waits for whom (6) |
# | you measure | where a step's time goes |
#
# Do [lesson 01](01_baseline.ipynb) first. Work in a copy: *File → Save Notebook As…*, `02_profiling_mine.ipynb`.

# %%
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from course.training import assemble
from course import config, parallel
from course.lab.figures import style, profile
from course.lab import notebook as lab
from course.lab.notebook import check
from course.training import trace_breakdown
from course.training.profiler import Window

lab.begin("02")

# %% [markdown]
# ## A clock around a line
#
# The obvious method: read the clock before and after. Take the model of `make demo` and time the three parts of a step.
#
# > **Predict.** How many times as long as the forward pass does the backward pass take? (How many matrix multiplications
# > does each of them have?)

# %%
my_ratio = 1.0                   # your prediction: backward over forward

# %%
settings = config.load("vit-demo", ["data.source=mock", "train.device=cpu"])
cpu = torch.device("cpu")
training = assemble.assemble(settings,
                             parallel.build_mesh(settings.parallel,
                                                 parallel.World(device=cpu)))
model, optimizer = training.model, training.optimizer
batch = model.prepare(model.example(16, cpu), torch.zeros((), dtype=torch.int64))


def step_by_the_clock() -> tuple[float, float, float]:
    """Seconds of the forward pass, the backward pass and the optimizer."""
    begin = time.perf_counter()
    total, weight = model.loss(model(batch), batch)
    forward = time.perf_counter()
    (total / weight).backward()
    backward = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad()
    return forward - begin, backward - forward, time.perf_counter() - backward


# warm-up: the first step allocates memory, so it does not count
step_by_the_clock()
forward, backward, update = (sorted(times)[3]
                             for times in zip(*(step_by_the_clock() for _ in range(7)),
                                              strict=True))
print(f"forward {forward * 1e3:.1f} ms, backward {backward * 1e3:.1f} ms, "
      f"optimizer {update * 1e3:.1f} ms: medians of 7")
lab.beside("backward over forward", my_ratio, backward / forward, "times")

# %% [markdown]
# **What you should see:** a ratio near two. For each matrix multiplication of the forward pass, the backward pass has two.
# One computes the gradient of the input, the other the gradient of the weight. Some parts differ. Attention's backward pass
# computes its scores again, which adds time. The first matrix needs no gradient of its input, and norms and sums cost
# about the same in both directions, which saves time.
#
# On a CPU this clock is honest. On a GPU the same lines mislead you. The next cell shows what a clock around `a @ a`
# measured on an H200, for matrices of 8192 x 8192.

# %%
seen = lab.results("profile_h200")["clock"]
lab.recorded("profile_h200",
             {"a clock around the line": {"microseconds": seen["the line"]},
              "the same, then waiting for the "
              "GPU": {"microseconds": seen["and waiting"]}})

# %% [markdown]
# > **Question.** How can the line end before the multiplication does?
#
# <details><summary>Answer</summary>
# The line only <i>launches</i> the work: it puts a <b>kernel</b>, a program that runs on the GPU, into the GPU's queue
# and returns. Python goes on while the GPU computes. The clock shows how long the launch took. To measure the rest you
# have to wait with <code>torch.cuda.synchronize()</code>. But a program that waits after every line keeps the queue
# empty, and so changes what it measures.
# </details>
#
# So there are two timelines, the host's and the GPU's, and neither tells the whole story. A **profiler** records both
# without waiting. It notes when the host launches each operation; the GPU itself notes when the operation begins and ends.
#
# ## What a profiler records
#
# Record two steps. `Window` is a few lines around `torch.profiler`. It writes a file that you can also open in
# [perfetto.dev](https://ui.perfetto.dev), to scroll and zoom.

# %%
with Window(Path("runs/lesson-02"), 0, cpu) as window:
    for _ in range(2):
        training.step(model.example(16, cpu))
events = trace_breakdown.read(window.trace)
print(f"{len(events):,} events in {window.trace}; three of them:\n")
for event in [event for event in events
              if event.get("name") in ("aten::addmm", "compute", "aten::gelu")][:3]:
    print({key: event[key] for key in ("cat", "name", "ts", "dur")})

# %% [markdown]
# An event has a category, a name, a begin (`ts`) and a length (`dur`), both in microseconds. Thousands of operators tell
# you little. You want to know which *part of the step* each belongs to, so the step has to name its parts. The library's
# step does: look for `with part(...)` below.

# %%
lab.show("course.training.step.train_step")

# %% [markdown]
# ## Exercise: name the parts
#
# Write `part`, which marks a block of code for two profilers at once:
#
# - PyTorch's profiler sees what happens inside `with record_function(name):`.
# - NVIDIA's `nsys` sees everything on a machine but knows nothing of Python. It sees **NVTX ranges**:
#   `torch.cuda.nvtx.range_push("data")` begins one, `torch.cuda.nvtx.range_pop()` ends the innermost one. Use them only
#   where CUDA is in use, that is, where `torch.cuda.is_initialized()` is true.
#
# The block may raise an exception. Even then its range has to end; otherwise everything that follows would seem to be
# inside it. `@contextmanager` (of `contextlib`) turns a function into something for `with`: the code before `yield` runs
# before the block, the code after it runs afterwards.

# %% exercise="named-parts"
from course.training.profiler import part

# %%
check("named-parts")

# %% [markdown]
# Now the library's step runs with your `part`. The next cell draws what it recorded: the parts above, and below them the
# operators, colored by what they do.

# %%
with lab.yours(part), Window(Path("runs/lesson-02"), 0, cpu) as window:
    for _ in range(2):
        with part("data"):
            batch = model.example(16, cpu)
        training.step(batch)
rows = profile.last_step(trace_breakdown.read(window.trace))
lab.picture(profile.timeline(rows, "one step of vit-demo, 16 samples"),
            "Two rows over time. Above: a part named data, a long part named compute "
            "and a short one, the optimizer. Below: hundreds of operators; most of "
            "compute is matrix multiplications")

# %% [markdown]
# ## Exercise: busy time
#
# > **Predict.** Add up the lengths of all operators of this step. How many percent of the step's length is that?

# %%
my_percent = 100                 # your prediction

# %%
operators = [(begin / 1e6, end / 1e6) for lane, _, _, begin, end in rows
             if lane == "operators"]
length = max(end for *_, end in rows) / 1e6
lab.beside("all operators over the step", my_percent,
           100 * sum(end - begin for begin, end in operators) / length, "%")

# %% [markdown]
# The sum is more than the whole step. Operators call operators (`aten::linear` calls `aten::addmm`), and each is its own
# event. On a GPU the reason is different: kernels run side by side. So do not add lengths. Measure the time in which *at
# least one* operator runs: the length of the **union** of the intervals.

# %% exercise="busy-time"
def busy(intervals: Sequence[tuple[float, float]]) -> float:
    """Seconds in which at least one of the intervals is under way. They come in any order and may overlap."""
    ### BEGIN SOLUTION
    total, reached = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
    ### END SOLUTION

# %%
check("busy-time")

# %%
print(f"operators run for {busy(operators) / length:.1%} of the step")

# %% [markdown]
# The rest is Python between the operators. On a CPU that is little. Remember the number, and compare it with a GPU's
# below.
#
# ## Who waits for whom
#
# On a GPU, the host and the device run at the same time. The host launches kernel after kernel, and the GPU executes them
# in order. A launch takes the host some microseconds, whatever the kernel does.
#
# > **Question.** Take 1,000 kernels: 5 µs to launch each, 3 µs to run each. How long does the step take, and for what
# > share of it is the GPU idle? And if each kernel ran for 8 µs?
#
# <details><summary>Answer</summary>
# 5,003 µs, and the GPU is idle for 40% of it: it finishes each kernel before the next one arrives. The step is
# <b>launch-bound</b>, and a faster GPU would not make it faster. With 8 µs the step takes 8,005 µs. After the first
# launch the queue is never empty, and launching costs nothing.
# </details>
#
# ## Exercise: launch-bound
#
# Write this calculation as a function, for kernels that differ.

# %% exercise="launch-bound"
def replay(launches: Sequence[float], works: Sequence[float]) -> tuple[float, float]:
    """(seconds until the GPU is done, seconds of these in which it has nothing to do).

    The host launches kernel after kernel, which takes it launches[i] seconds each. The GPU runs them in this order, works[i]
    seconds each, none before it has been launched. Both begin at 0.
    """
    ### BEGIN SOLUTION
    host = gpu = idle = 0.0
    for launch, work in zip(launches, works, strict=True):
        host += launch
        idle += max(0.0, host - gpu)
        gpu = max(host, gpu) + work
    return gpu, idle
    ### END SOLUTION

# %%
check("launch-bound")

# %% [markdown]
# The kernels of a transformer differ: matrix multiplications take long, additions and norms are short. The work of each
# kernel grows with the batch; its launch does not. Use your function to find the batch at which a step stops being
# launch-bound.

# %%
batches = [1, 2, 4, 8, 16, 32, 64]
# microseconds of a matmul, a norm, an addition, a GELU, for one sample
small = [2.0, 0.25, 0.25, 0.5]
steps = {n: replay([5e-6] * 400, [1e-6 * n * work for work in small] * 100)
         for n in batches}
curve = style.curves({"the model's step": (batches,
                                           [total * 1e3
                                            for total, _ in steps.values()])},
                     "samples", "ms",
                       "400 kernels, 5 µs to launch each", {"launching alone": 2.0})
lab.picture(curve, "The time of a step is flat at 2 ms up to about 4 samples, and "
            "rises in proportion from about 8 on")

# %% [markdown]
# Now look at a real step on an H200: a small transformer (12 layers of width 768, 256 tokens, one sample, bf16). The
# picture shows its first two milliseconds, with the host above and the GPU below.

# %%
recorded = lab.results("profile_h200")
one = recorded["timelines"]["small batch of 1, bf16"]
lab.picture(profile.timeline(one, "12 layers of width 768, one sample, bf16, on an "
                             "H200", until=2000),
            "The host launches kernels at intervals, with Python between them. The "
            "GPU's row is mostly empty, with thin bars where kernels run; the wide "
            "bar on the left is the previous step's optimizer")

# %% [markdown]
# > **Predict.** How many samples keep the GPU busy for more than nine tenths of the step?

# %%
my_batch = 8                     # your prediction

# %%
times = {name: found["time"] for name, found in recorded["accounts"].items()}
lab.picture(profile.shares({name: each for name, each in times.items()
                            if name.startswith("small")},
                                   "12 layers of width 768, 256 tokens, on an H200"),
            "Bars for 1, 4, 16 and 64 samples. Most of the first is idle time while "
            "the host launches; the last has almost none")
idle = {n: sum(times[f"small batch of {n}, bf16"][key]
               for key in ("launch", "idle", "data")) for n in (1, 4, 16, 64)}
enough = min(n for n, waiting in idle.items()
             if waiting < 0.1 * sum(times[f"small batch of {n}, bf16"].values()))
lab.beside("samples that keep the GPU busy for nine tenths of the step, of these",
           my_batch, enough, how="recorded")

# %% [markdown]
# > **Predict.** Now the reference model (width 384, 16 samples) on an H200: in TF32, in bf16, and compiled. Will the step
# > wait for the host?

# %%
lab.picture(profile.shares({name: each for name, each in times.items()
                            if name.startswith("16")},
                                   "the weather model of lesson 01 on an H200"),
            "Three bars, in TF32, in bf16 and compiled: nearly all of each is "
            "computing")

# %% [markdown]
# It does not. So the next lessons look elsewhere: at the data (03), at the format of the numbers (04) and at the kernels
# themselves (05). For small batches, lesson 06 returns to the launches.
#
# ## A whole step in one command
#
# `course profile` counts every microsecond of a step once. While the device computes, the time belongs to the forward
# pass, the backward pass or the optimizer. Otherwise it belongs to communication or copies. If there is none, the device
# is idle and the host tells you why: it waits for data, or it launches.

# %%
lab.show("course.training.trace_breakdown.claim")

# %%
found = trace_breakdown.account(trace_breakdown.read(window.trace))
print(trace_breakdown.text(found))
lab.picture(trace_breakdown.picture(found, "vit-demo on this machine"),
            "One bar: forward and backward nearly half each, the rest is narrow")

# %% [markdown]
# Forward has a larger share here than in your clock measurement. In the profiled step the CPU also made the batch. The
# account sees only operators, so it counts that as forward.
#
# ```
# course profile vit-short                              # three steps of a preset
# course train vit-short profile.steps=3                # in the middle of a run: after ten steps
# course profile runs/vit-short/default/profile/trace-0.json.gz
# bash submit/profile.sh vit-short                      # with nsys, if installed: shows your NVTX ranges
# course train vit-short profile.steps=3 profile.memory=true      # who allocated what, for pytorch.org/memory_viz
# ```
#
# - These presets read `data/era5`. If you do not have it, add `data.source=mock`: random data, as good for measuring
#   speed.
# - Leave out the first steps: they allocate, choose algorithms and compile.
# - A profiler slows the host down, so a launch-bound step looks worse than it is. Compare `step_ms` with and without it.
# - Look at the shares first and at single kernels last.

# %% [markdown]
# ## Communication: exposed or hidden
#
# With several GPUs there is a third reason to wait. GPUs can send and compute at the same time, if the program lets them.
# Then sending costs (almost) nothing. Only the **exposed** part counts: the time in which GPUs send and do not compute.
#
# Below you analyze a recorded step of a wider weather model (width 1024). Two H200 GPUs share its matrices: each GPU
# holds half of every matrix and multiplies by that half. So each gets only a part of every result. The two exchange their
# parts eight times in every block, in forward and backward together. (This is *tensor parallelism* with *sequence
# parallelism*, where a sum takes two exchanges. You build both in lesson 10.)
#
# > **Predict.** How many percent of this step are exposed communication?

# %%
my_exposed = 10                  # your prediction

# %% [markdown]
# ## Exercise: exposed time
#
# Write the function. It needs only one line.

# %% exercise="exposed-time"
def exposed(communication: Sequence[tuple[float, float]], computation: Sequence[tuple[float, float]]) -> float:
    """Seconds in which something is sent and nothing is computed. Call `busy`."""
    ### BEGIN SOLUTION
    return busy([*communication, *computation]) - busy(computation)
    ### END SOLUTION

# %%
check("exposed-time")

# %%
rows = recorded["timelines"]["tensor parallel"]
sent = [(begin, end) for lane, _, _, begin, end in rows if lane == "communication"]
done = [(begin, end) for lane, _, kind, begin, end in rows if lane == "GPU"
        and kind != "copy"]
length = max(end for *_, end in rows)
print(f"a step of {length / 1e3:.0f} ms, {busy(sent) / 1e3:.1f} ms of communication, "
      f"{exposed(sent, done) / 1e3:.1f} ms of it exposed")
lab.beside("exposed communication", my_exposed, 100 * exposed(sent, done) / length, "%",
           "recorded")

# %% [markdown]
# All of it is exposed. This program multiplies, then sends, then multiplies again, and each waits for the other. What
# could the GPUs compute while they send? Lessons 07 and 10 find something.
#
# ## Summary
#
# - On a GPU, a clock around a line measures its launch.
# - A profiler records both timelines, the host's and the GPU's.
# - Do not add the lengths of events: measure their union.
# - A step computes, or it waits for data, for the host or for other GPUs. Each has its own cure.
# - Communication costs time only where nothing hides it.
#
# ## Questions
#
# 1. A step takes 10 ms for 1 sample and for 4. What does that tell you?
# 2. How would you find out whether a step waits for data, without a profiler?
# 3. Which optimization would you not try on a launch-bound step?
#
# **Check your work** from a terminal: `course check notebooks/02_profiling_mine.ipynb`.
#
# Next: [lesson 03](03_data_loading.ipynb), where you feed the GPU.
