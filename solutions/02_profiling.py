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
# - How to read a timeline, and how to find the line of code that holds the memory.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 105 minutes |
# | computing | half a minute on two cores |
# | you write | named parts of a step (9 lines), busy and exposed time (5 and 1), who waits (6), what holds the memory (15) |
# | you measure | where a step's time and its memory go |
#
# Do [lesson 01](01_baseline.ipynb) first. Work in a copy: *File → Save Notebook As…*, `02_profiling_mine.ipynb`.

# %%
import math
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch

from course import config, parallel
from course.lab import notebook as lab
from course.lab.figures import profile, style
from course.lab.instruments.tensor_memory import MemoryHistory
from course.lab.notebook import check
from course.models import layers
from course.training import assemble, memory_snapshot, trace_breakdown
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
# > **Predict.** Add up the lengths of all operators of this step. What percentage of the step's length is that?

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
    """(seconds until the GPU is done, seconds of these in which it is idle).

    The host launches kernel after kernel, in launches[i] seconds each. The GPU runs them in this order, in works[i] seconds
    each, and begins none before its launch has ended. Both begin at 0.
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
# > **Predict.** What percentage of this step is exposed communication?

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
# ## Read a timeline
#
# Shares tell you *that* a step waits. The timeline tells you *why*. Look for four things, in this order:
#
# | what you see | what it means | where it is cured |
# |---|---|---|
# | one long gap on the GPU, in the part `data` | the step waits for its data | lesson 03 |
# | copies to the GPU, and no kernel beside them | the copy is not asynchronous, or it is started too late | lesson 03 |
# | many short gaps between kernels | the host launches too slowly | lessons 05 and 06 |
# | communication, and no kernel beside it | the GPUs wait for each other | lessons 07 and 10 |
#
# Here are three recorded steps of lesson 01's weather model. They differ in one thing: what reads the data, and how it reaches
# the GPU. The row *other streams* is work that the GPU does beside its main stream.

# %%
steps = {letter: profile.last_step(
             trace_breakdown.read(lab.recording(f"traces/{file}")))
         for letter, file in (("A", "dali.json.gz"),
                              ("B", "read_by_the_training_process.json.gz"),
                              ("C", "threads.json.gz"))}
for letter, rows in steps.items():
    shown = [row for row in rows if row[0] != "launches"]
    lab.picture(profile.timeline(shown, f"step {letter}: 16 samples on an H200"),
                {"A": "The GPU computes all the time. A copy and two kernels run "
                      "beside it on another stream, after a third of the step",
                 "B": "Nearly all of the step is the part named data; the GPU is "
                      "empty meanwhile. Then come two copies, and only then kernels",
                 "C": "The GPU computes all the time but for a short gap after a "
                      "copy, which runs beside the kernels on another stream"}[letter])

# %% [markdown]
# > **Question.** In which step does the training process itself read the files? Its copies take 12 ms. Which other step
# > has a copy as large, and why does that copy cost nothing?
#
# <details><summary>Answer</summary>
# It is B: while the process reads, nobody launches anything. A and C copy too, 13 ms each, but on another stream and beside
# the kernels of the step before. A is NVIDIA's DALI; its stream also has kernels of its own, which normalize the samples.
# C is the library's threads. Its main stream waits about a millisecond for the copied batch.
# </details>
#
# The next picture shows six milliseconds of a GPT's backward pass on two GPUs. Each holds the whole model and half of the
# batch. As soon as a few gradients are known, the two average them (lesson 07).
#
# > **Predict.** What does this step wait for: its data, its host or the other GPU?

# %%
my_cause = "the other GPU"       # or "its data", or "its host"

# %%
parallel_step = profile.last_step(trace_breakdown.read(
    lab.recording("traces/data_parallel.json.gz")))
lab.picture(profile.timeline([row for row in parallel_step if row[0] != "launches"],
                             "backward pass of GPT 350M on one of two H200s",
                             until=46_000, since=40_000),
            "Kernels of a block, then a gap in which three messages are sent one after "
            "the other, then kernels of the next block, and so on")
print("you said:", my_cause)

# %% [markdown]
# <details><summary>Answer</summary>
# It looks like the other GPU: each gap has messages in it. But look at the gaps <i>between</i> the messages, where the GPU
# does nothing at all. The host is late. It launches a block's kernels, then three messages, then the next block's kernels,
# and the GPU finishes each before the next arrives. The profiler makes the host slower still. Hiding the messages better
# would gain nothing here. A CUDA graph (lesson 06), which launches everything at once, would.
# </details>
#
# Open one of these files in [perfetto.dev](https://ui.perfetto.dev), and find the same gaps.
# `lab.recording("traces/dali.json.gz")` is its path.
#
# ## What holds the memory
#
# Time is half of the question. The other half is memory: *CUDA out of memory* names the line that asked last, not the
# lines that hold the rest. A **memory snapshot** lists every allocation and every free, with the line of code that asked.
#
# ```
# course profile gpt-124m profile.memory=true           # on a GPU: also writes memory-0.pickle
# course profile runs/gpt-124m/default/profile/memory-0.pickle
# ```
#
# The first picture is a step of GPT 124M on an H200. In the second, someone wrote attention as a textbook does.

# %%
snapshots = {name: memory_snapshot.read(
                 lab.recording(f"traces/memory_{name}.pickle.gz"))
             for name in ("library", "changed")}
lab.picture(profile.memory(snapshots["library"], "GPT 124M, 8 samples, on an H200"),
            "Memory rises during the forward pass and falls during the backward pass; "
            "the linear layers hold most of it")

# %% [markdown]
# Memory rises while the forward pass keeps what the backward pass will need, and falls while that is used up.
#
# > **Predict.** Attention has 12 heads and 1024 tokens; the batch has 8 samples. Its scores are one number for each pair of
# > tokens, in each head. How many MB are they in one of the 12 layers, in fp32?

# %%
my_scores = 100.0                # your prediction, MB

# %%
lab.beside("scores of one layer", my_scores, 8 * 12 * 1024**2 * 4 / 1e6, "MB",
           "counted")
lab.picture(profile.memory(snapshots["changed"], "the same with another attention"),
            "Memory rises three times as high; two lines of attend hold most of it")

# %% [markdown]
# ## Exercise: what is alive at the peak
#
# The picture needs one number for each line of code: the bytes that it holds when memory is at its highest. Write the
# function. An event is `(action, address, bytes, line)`.
#
# - When a block is freed, its address may be given to another block.
# - Some blocks were there before the recording began. You see only how they are freed.

# %% exercise="memory-peak"
from course.training.memory_snapshot import alive_at_peak

# %%
check("memory-peak")

# %% [markdown]
# Which lines hold most in the second snapshot? Your function says:

# %%
with lab.yours(alive_at_peak):
    print(memory_snapshot.text(snapshots["changed"]))

# %% [markdown]
# > **Question.** Two lines of `attend` hold more than the whole step did before. What do they hold, and does it have to stay in
# > memory?
#
# <details><summary>Answer</summary>
# One is the softmax of the scores in fp32, 403 MB in each of the 12 layers; the other its copy in bf16, half as large. The
# backward pass needs them. But it can compute them again from q and k, piece by piece: PyTorch's
# <code>scaled_dot_product_attention</code> does that, and never has all scores in memory. You write such a kernel in lesson 19.
# </details>
#
# Now your own. `MemoryHistory` records the same list on any device. The next cell trains one step of a small GPT, first
# with the library's attention, then with a textbook's.

# %%
def textbook(q, k, v, causal=False, mask=None):
    """Attention with all of its scores in memory, q, k, v: (B, h, T, d)."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return weights @ v


small = config.load("gpt-demo", ["model.context=512", "train.global_batch=4",
                                 "train.device=cpu"])
peaks = {}
for name, attend in (("library", layers.attend), ("textbook", textbook)):
    with mock.patch.object(layers, "attend", attend):
        gpt = assemble.assemble(small, parallel.build_mesh(small.parallel,
                                                           parallel.World(device=cpu)))
        tokens = gpt.model.example(4, cpu)
        gpt.step(tokens)
        with MemoryHistory() as history:
            gpt.step(tokens)
    peaks[name] = history.peak / 1e6
print({name: f"{peak:.0f} MB" for name, peak in peaks.items()})
lab.picture(profile.memory(history.events, "a small GPT with a textbook's attention"),
            "The line weights = scores.masked_fill of textbook holds most of the "
            "memory at the peak")

# %% [markdown]
# > **Question.** You find out that a run's memory grows by 300 MB with each step. Where would you look in the picture?
#
# <details><summary>Answer</summary>
# At the end of a step. Something keeps the blocks that this step allocated and that are still alive then. Often it is a list of
# losses or activations, with all that their backward passes need. Append <code>loss.item()</code> or <code>x.detach()</code>.
# </details>
#
# ## Summary
#
# - On a GPU, a clock around a line measures its launch.
# - A profiler records both timelines, the host's and the GPU's.
# - Do not add the lengths of events: measure their union. So communication costs time only where nothing hides it.
# - A step computes, or it waits for data, for the host or for other GPUs. Each has its own cure.
# - A memory snapshot says which lines hold memory at its peak.
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
