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
# In lesson 01 you counted a training step's floating-point operations and found that your machine reaches a part of its
# peak. Where does the rest of the time go? This lesson is about looking instead of guessing. You take a step
# apart with a profiler, learn why a clock around a line of code lies on a GPU, and write the arithmetic that turns a
# thousand little bars into one sentence: *this step waits for data*, or *for the host*, or *for other GPUs*.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 75 minutes |
# | computing | half a minute on two cores |
# | you write | named parts of a step (9 lines), busy and exposed time (5 and 1), who waits for whom (6) |
# | you measure | where a step's time goes |
#
# You should have done [lesson 01](01_baseline.ipynb). Work in a copy: *File → Save Notebook As…*, `02_profiling_mine.ipynb`.

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
# The obvious way: look at the clock before and after. Take the model of `make demo` and time the three parts of a step.
#
# > **Predict.** How many times as long as the forward pass does the backward pass take? (How many matrix multiplications are
# > there in each?)

# %%
my_ratio = 1.0                   # your prediction: backward over forward

# %%
settings = config.load("vit-demo", ["data.source=mock", "train.device=cpu"])
cpu = torch.device("cpu")
training = assemble.assemble(settings, parallel.build_mesh(settings.parallel, parallel.World(device=cpu)))
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


step_by_the_clock()              # the first step makes things that stay: it does not count
forward, backward, update = (sorted(times)[3] for times in zip(*(step_by_the_clock() for _ in range(7)), strict=True))
print(f"forward {forward * 1e3:.1f} ms, backward {backward * 1e3:.1f} ms, optimizer {update * 1e3:.1f} ms: medians of 7")
lab.beside("backward over forward", my_ratio, backward / forward, "times")

# %% [markdown]
# Two, if there were matrix multiplications alone: for each of the forward pass the backward pass has two, one for the gradient
# of the input and one for that of the weight. Here it comes out near two. Attention's backward pass computes its scores again,
# which adds; the first matrix needs no gradient of its input, and norms and sums cost about as much one way as the other, which
# takes away.
#
# On a CPU this clock is honest. On a GPU the same lines would have told you nonsense. Here is what a clock around `a @ a` showed
# on an H200, for matrices of 8192 x 8192, which take it more than a millisecond:

# %%
seen = lab.results("profile_h200")["clock"]
lab.recorded("profile_h200", {"a clock around the line": {"microseconds": seen["the line"]},
                              "the same, then waiting for the GPU": {"microseconds": seen["and waiting"]}})

# %% [markdown]
# > **Question.** How can the line be over before the multiplication is?
#
# <details><summary>Answer</summary>
# The line only <i>launches</i> the work: it puts a <b>kernel</b>, a program that runs on the GPU, into the GPU's queue
# and returns. Python goes on while the GPU computes. The clock shows how long launching took. To see the rest one has
# to wait, <code>torch.cuda.synchronize()</code>; but a program that waits after every line keeps the queue empty, and
# changes what it measures.
# </details>
#
# So there are two timelines, the host's and the GPU's, and neither says everything. A **profiler** records both, without waiting:
# it notes when each operation is launched, and the GPU itself notes when it begins and ends.
#
# ## What a profiler writes down
#
# Record two steps. `Window` is a few lines around `torch.profiler`; it leaves a file that you can also drop into
# [perfetto.dev](https://ui.perfetto.dev), to scroll and zoom.

# %%
with Window(Path("runs/lesson-02"), 0, cpu) as window:
    for _ in range(2):
        training.step(model.example(16, cpu))
events = trace_breakdown.read(window.trace)
print(f"{len(events):,} events in {window.trace}; three of them:\n")
for event in [event for event in events if event.get("name") in ("aten::addmm", "compute", "aten::gelu")][:3]:
    print({key: event[key] for key in ("cat", "name", "ts", "dur")})

# %% [markdown]
# An event has a category, a name, a begin (`ts`) and a length (`dur`), both in microseconds. Thousands of operators say little.
# What you want to know is which *part of the step* they belong to. So the step has to say it itself: the library's step has
# **named parts**. (Below, look for `with part(...)`.)

# %%
lab.show("course.training.step.train_step")

# %% [markdown]
# ## Exercise: name the parts
#
# Write `part`, which marks a block of code for two kinds of profilers at once:
#
# - PyTorch's own sees what happens inside `with record_function(name):`;
# - NVIDIA's `nsys`, which sees everything on a machine but knows nothing of Python, sees **NVTX ranges**:
#   `torch.cuda.nvtx.range_push("data")` begins one, `torch.cuda.nvtx.range_pop()` ends the innermost. Use them only
#   where CUDA is in use, that is, where `torch.cuda.is_initialized()` is true.
#
# The block may raise an exception. Even then its range has to end, or everything that follows would seem to lie within
# it. With `@contextmanager` (of `contextlib`) a function becomes something for `with`: the code before `yield` runs
# before the block, the code after it afterwards.

# %% exercise="named-parts"
from course.training.profiler import part

# %%
check("named-parts")

# %% [markdown]
# Now the library's step runs with your `part`. Draw what it left: the parts above, and below them the operators, in colours by
# what they do.

# %%
with lab.yours(part), Window(Path("runs/lesson-02"), 0, cpu) as window:
    for _ in range(2):
        with part("data"):
            batch = model.example(16, cpu)
        training.step(batch)
rows = profile.last_step(trace_breakdown.read(window.trace))
lab.picture(profile.timeline(rows, "one step of vit-demo, 16 samples"),
            "Two lanes over the time. Above, a part named data, a long one named compute and a short one, the optimizer. Below, "
            "hundreds of operators, in compute most of the time matrix multiplications")

# %% [markdown]
# ## Exercise: busy time
#
# > **Predict.** Add up the lengths of all operators of this step. How many percent of the step's length will that be?

# %%
my_percent = 100                 # your prediction

# %%
operators = [(begin / 1e6, end / 1e6) for lane, _, _, begin, end in rows if lane == "operators"]
length = max(end for *_, end in rows) / 1e6
lab.beside("all operators over the step", my_percent, 100 * sum(end - begin for begin, end in operators) / length, "%")

# %% [markdown]
# More than the whole: operators call operators (`aten::linear` calls `aten::addmm`), and each is an event of its own. On a GPU
# it happens for another reason, kernels run side by side. Lengths must not be added; what counts is the time in which *at least
# one* is under way, the length of the **union** of the intervals.

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
print(f"operators are under way for {busy(operators) / length:.1%} of the step")

# %% [markdown]
# The rest is Python between the operators. On a CPU that is little. Remember the number, and compare it with a GPU's below.
#
# ## Who waits for whom
#
# On a GPU the host and the device run at the same time: the host launches kernel after kernel, the GPU works them off. A launch
# takes the host some microseconds, whatever the kernel does.
#
# > **Question.** 1,000 kernels, 5 µs to launch each, 3 µs to run each. How long does the step take, and what share of it is the
# > GPU idle? And if each ran for 8 µs?
#
# <details><summary>Answer</summary>
# 5,003 µs, and the GPU is idle for 40% of it: it has finished a kernel before the next one arrives. The step is
# <b>launch-bound</b>, and a faster GPU would not make it faster. With 8 µs it takes 8,005 µs: after the first launch the queue is
# never empty, and launching costs nothing.
# </details>
#
# ## Exercise: launch-bound
#
# Write this as a program, for kernels that differ.

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
# Kernels of a transformer differ: matrix multiplications take long, additions and norms are short. Use your function to
# see at which batch a step stops being launch-bound: the work of each kernel grows with the batch, its launch does not.

# %%
batches = [1, 2, 4, 8, 16, 32, 64]
small = [2.0, 0.25, 0.25, 0.5]   # microseconds of a matmul, a norm, an addition, a GELU, for one sample
steps = {n: replay([5e-6] * 400, [1e-6 * n * work for work in small] * 100) for n in batches}
curve = style.curves({"the model's step": (batches, [total * 1e3 for total, _ in steps.values()])}, "samples", "ms",
                       "400 kernels, 5 µs to launch each", {"launching alone": 2.0})
lab.picture(curve, "The time of a step is flat at 2 ms up to about 4 samples, and rises in proportion from about 8 on")

# %% [markdown]
# Now the real thing: one step of a small transformer (12 layers of width 768, 256 tokens, one sample, bf16) on an H200, its first
# two milliseconds. Above what the host does, below the GPU.

# %%
recorded = lab.results("profile_h200")
one = recorded["timelines"]["small batch of 1, bf16"]
lab.picture(profile.timeline(one, "12 layers of width 768, one sample, bf16, on an H200", until=2000),
            "A launch every 40 microseconds or so, Python between them. The GPU's lane is mostly empty, with thin bars where "
            "kernels run; the wide one at the left is the last step's optimizer")

# %% [markdown]
# > **Predict.** With how many samples will the GPU be busy for more than nine tenths of the step?

# %%
my_batch = 8                     # your prediction

# %%
times = {name: found["time"] for name, found in recorded["accounts"].items()}
lab.picture(profile.shares({name: each for name, each in times.items() if name.startswith("small")},
                                   "12 layers of width 768, 256 tokens, on an H200"),
            "Bars for 1, 4, 16 and 64 samples: most of the first is idle while the host launches, of the last almost none")
idle = {n: sum(times[f"small batch of {n}, bf16"][key] for key in ("launch", "idle", "data")) for n in (1, 4, 16, 64)}
enough = min(n for n, waiting in idle.items() if waiting < 0.1 * sum(times[f"small batch of {n}, bf16"].values()))
lab.beside("samples that keep the GPU busy for nine tenths of the step, of these", my_batch, enough, how="recorded")

# %% [markdown]
# ## Communication: exposed or hidden
#
# With several GPUs there is a third reason to wait. Sending between GPUs runs beside computing, if the program lets it;
# then it costs (almost) nothing. Only the **exposed** part counts: the time in which something is sent and nothing is
# computed.
#
# ## Exercise: exposed time

# %% exercise="exposed-time"
def exposed(communication: Sequence[tuple[float, float]], computation: Sequence[tuple[float, float]]) -> float:
    """Seconds in which something is sent and nothing is computed. Call `busy`."""
    ### BEGIN SOLUTION
    return busy([*communication, *computation]) - busy(computation)
    ### END SOLUTION

# %%
check("exposed-time")

# %% [markdown]
# Use it on a recorded step of the wider weather model (width 1024), on two H200 GPUs that share its matrices: each has
# one half of every matrix, and multiplies by that half. So each gets only a part of every result, and the two have to
# exchange their parts eight times in every block, forward and backward together. (This is *tensor parallelism* with
# *sequence parallelism*, where a sum takes two exchanges; lesson 10 builds both.)
#
# > **Predict.** How many percent of this step are exposed communication?

# %%
my_exposed = 10                  # your prediction

# %%
rows = recorded["timelines"]["tensor parallel"]
sent = [(begin, end) for lane, _, _, begin, end in rows if lane == "communication"]
done = [(begin, end) for lane, _, kind, begin, end in rows if lane == "GPU" and kind != "copy"]
length = max(end for *_, end in rows)
print(f"a step of {length / 1e3:.0f} ms, {busy(sent) / 1e3:.1f} ms of communication, "
      f"{exposed(sent, done) / 1e3:.1f} ms of it exposed")
lab.beside("exposed communication", my_exposed, 100 * exposed(sent, done) / length, "%", "recorded")

# %% [markdown]
# All of it is exposed: this program multiplies, then sends, then multiplies again, and each waits for the other. What could run
# beside the sending? Lessons 07 and 10 find something.
#
# ## All of it in one command
#
# You have written the pieces of `course profile`, which counts every microsecond of a step once: while the device computes, it
# belongs to the forward pass, the backward pass or the optimizer; else to exposed communication or copies; else the device is
# idle, and the host says why: it waits for data, or it launches.

# %%
lab.show("course.training.trace_breakdown.claim")

# %%
found = trace_breakdown.account(trace_breakdown.read(window.trace))
print(trace_breakdown.text(found))
lab.picture(trace_breakdown.picture(found, "vit-demo on this machine"),
            "One bar: forward and backward nearly half each, the rest is narrow")

# %% [markdown]
# Forward has a larger share than by the clock at the beginning. In the step that was profiled the CPU also made the
# batch, and the account, which sees nothing but operators, counts that as forward.
#
# > **Predict.** The reference model (width 384, 16 samples) on an H200, in TF32, then in bf16, then compiled: will the step wait
# > for the host?

# %%
lab.picture(profile.shares({name: each for name, each in times.items() if name.startswith("16")},
                                   "the weather model of lesson 01 on an H200"),
            "Three bars, in TF32, in bf16 and compiled: nearly all of each is computing")

# %% [markdown]
# It does not, which is why the next lessons look elsewhere: at the data (03), at the format of the numbers (04), at the kernels
# themselves (05), and, for small batches, at the launches (06).
#
# ## In practice
#
# ```
# course profile vit-short                              # a preset, three steps of it
# course train vit-short profile.steps=3                # in the middle of a run: after ten steps
# course profile runs/vit-short/default/profile/trace-0.json.gz
# bash submit/profile.sh vit-short                      # with nsys where it is installed: your NVTX ranges, on its timeline
# course train vit-short profile.steps=3 profile.memory=true      # who allocated what, for pytorch.org/memory_viz
# ```
#
# - These presets read `data/era5`. Without it say `data.source=mock`, random data, which are as good for measuring speed.
# - Leave out the first steps: they allocate, choose algorithms, compile.
# - A profiler slows the host down. If a step is launch-bound, it looks worse than it is: compare `step_ms` with and without.
# - Look at the share first, at single kernels last.
#
# ## What you know now
#
# - A clock around a line shows its launch. A profiler shows both timelines.
# - Lengths of events must not be added up: what counts is the union.
# - A step waits for data, for the host, or for other GPUs; or it computes. Each has its own cure.
#
# **Check your work once more, from outside.** Save the notebook; then, in a terminal: `course check
# notebooks/02_profiling_mine.ipynb`.
#
# Next: [lesson 03](03_data_loading.ipynb), where you feed the GPU.
