# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 06 · CUDA graphs
#
# A small step spends most of its time on launches. The host puts one kernel after another into the GPU's queue, and the GPU
# finishes each before the next one arrives. A **CUDA graph** is the whole list of launches, recorded once and then submitted at
# once, step after step. It makes small steps several times faster. In return, Python can no longer decide anything in the step,
# and every tensor has to stay at its address. You write both sides of this bargain.
#
# **What you will learn**
#
# - how to compute whether a graph makes a step faster, and at what batch size it stops helping;
# - how to capture and replay a step: warm-up, static buffers, copies in and out;
# - how to turn decisions in Python into decisions on the device.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 90 minutes |
# | computing | half a minute on two cores |
# | you write | when a graph is worth it (6 lines), static buffers (16), decisions on the device (10); optional: a trainer (45) |
# | you measure | a step, launched piece by piece and replayed, as a function of batch size |
#
# Do [lesson 02](02_profiling.ipynb) first; the appendix compares with [lesson 05](05_compile_and_fuse.ipynb). Work in a copy:
# *File → Save Notebook As…*, `06_cuda_graphs_mine.ipynb`.

# %% numbers=true
from course.bench import results


def of_step(case, field):
    """A field of a recorded training step on an H200."""
    return results.value("vit_h200", case, field)


def more_memory(case, graphed):
    """The memory of a step in a graph over the same step without."""
    return of_step(graphed, "memory_gb") / of_step(case, "memory_gb") - 1


kernels = of_step("one sample: eager", "kernels")
eager_us = 1e3 * of_step("one sample: eager", "ms") / kernels       # for each kernel
extra_small = more_memory("one sample: eager", "one sample: in a graph")
extra_large = more_memory("bf16, compiled", "bf16, compiled, in a graph")

# %%
import itertools
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from course.training import assemble
from course import config, parallel
from course.data import Batch
from course.utils.errors import CourseError
from course.lab.figures import style, cuda_graphs
from course.lab.instruments import tensor_memory, background_load, cpu_graph
from course.lab import notebook as lab
from course.lab.exercises.lesson06_cuda_graphs import (
    PEAK, RAMP, OnDevice, OnHost, eager_time, mean_square, on_host
)
from course.lab.notebook import check

lab.begin("06")

# %% [markdown]
# ## One launch for all
#
# In lesson 02 a launch took the host 5 µs. That was the launch alone. Before it, Python runs a line of the model, autograd
# notes what the backward pass needs, and the dispatcher finds the right kernel. An operation of an eager step costs the host
# about {result: round(eager_us, -1) | .0f} µs.
#
# > **Predict.** A step has 1,000 kernels. Each takes 20 µs of the host's time and 3 µs on the GPU. The GPU needs 1 µs to move
# > on to the next. Launched one after another they take 20 ms, because the GPU waits for the host. The host launches a
# > graph of all of them in 10 µs. How many milliseconds does the step take then?

# %%
my_graphed_ms = 10.0             # your prediction

# %% [markdown]
# Here are the first twelve kernels of a transformer with one sample: a matrix multiplication, a norm, an addition and a GELU,
# three times over.

# %%
small = [8.0, 1.0, 1.0, 1.5]     # microseconds of each, for one sample
rows = {"eager": cuda_graphs.eager_bars([20.0] * 12, small * 3, 1.0),
        "graph": cuda_graphs.graph_bars(small * 3, 10.0, 1.0)}
lab.picture(cuda_graphs.timeline(rows, title="twelve kernels: 20 µs for each launch, "
                                 "and all in a graph"),
            "Four lanes. Eager: the host launches for 240 microseconds without a "
            "pause, and thin bars of work follow on the GPU, far apart. In a graph: "
            "one launch of 10 microseconds, then the same bars close together, done "
            "after 56 microseconds")

# %% [markdown]
# ## Exercise: when is a graph worth it?
#
# Write two functions for any step:
#
# - `graphed_time` is the time of a step in a graph. The host launches all kernels at once. Then the GPU runs them, with a gap
#   between each two.
# - `break_even` is the batch size at which a graph stops being worth it. It is the smallest batch at which the eager step takes
#   less than `1 + least` times as long as the graphed step. The work of each kernel grows in proportion to the batch.
#
# `eager_time(launches, works, gap)` is given. It is `replay` of lesson 02, with gaps.

# %%
lab.show("course.lab.exercises.lesson06_cuda_graphs.eager_time")

# %% exercise="graph-gain"
from course.lab.exercises.lesson06_cuda_graphs import break_even, graphed_time

# %%
check("graph-gain")

# %%
lab.beside("1,000 kernels in a graph", my_graphed_ms,
           1e3 * graphed_time([3e-6] * 1000, 10e-6, 1e-6), "ms", "computed")

# %% [markdown]
# Now the GPU sets the pace: its work and its gaps are all that counts.
#
# > **Predict.** Take 400 kernels like the twelve above. At what batch size does a graph start to gain less than 10%? (Up to which
# > batch does the time of the eager step stay the same?)

# %%
my_break_even = 32               # your prediction

# %%
works, batches = [1e-6 * work for work in small] * 100, [1, 2, 3, 4, 6, 8, 12, 16]
scaled = {batch: [batch * work for work in works] for batch in batches}
curve = style.curves({"launched one by one": (batches,
                                              [1e3 * eager_time([20e-6] * 400, w, 1e-6)
                                               for w in scaled.values()]),
                        "as a graph": (batches, [1e3 * graphed_time(w, 10e-6, 1e-6)
                                                 for w in scaled.values()])},
                       "samples", "ms", "400 kernels")
lab.picture(curve, "Launched one by one, a step takes 8 ms up to about 6 samples and "
            "then rises; as a graph it rises from 1.6 ms at once, and the two meet "
            "where launching no longer matters")
lab.beside("batch size at which a graph gains less than 10%", my_break_even,
           break_even(works, 20e-6, 10e-6, 1e-6, 0.1),
           how="computed")

# %% [markdown]
# So a graph makes no kernel faster. It removes the host from the step and saves the time that the GPU would have waited for
# it: a lot with one sample, nothing with many. (The gaps between kernels become a little shorter too; this arithmetic ignores
# that.)
#
# ## A graph that you can inspect
#
# Without a GPU there are no CUDA graphs. But the GPU is not what makes them hard to use. The hard part is that a list of
# launches holds *addresses*: where each kernel reads and where it writes. So the course has a **tape**: the list of PyTorch
# operations in a block of code, with the tensors that they read and write. You use it like a graph, and the same rules hold.
#
# | on a GPU | on a tape |
# |---|---|
# | `graph = torch.cuda.CUDAGraph()` | `graph = cpu_graph.Graph()` |
# | `with torch.cuda.graph(graph): ...` | `with cpu_graph.capturing(graph): ...` |
# | `graph.replay()` | `graph.replay()` |
#
# (`help(cpu_graph)` lists the differences. The main one: a replay of a tape still calls PyTorch once for every operation.)
#
# > **Predict** what the next cell prints.

# %%
x = torch.tensor([1.0, 2.0, 3.0])
graph = cpu_graph.Graph()
with cpu_graph.capturing(graph):
    y = x * 2
    z = y + 1
print("z after the capture:", z.tolist())

# %% [markdown]
# No numbers: **a capture computes nothing**. It only records the operations. `y` and `z` exist and their memory is reserved,
# but nobody has written into it. (The tape fills it with NaN, so that you notice. On a GPU it holds whatever was there
# before.) Here are the contents of the tape:

# %%
def address(tensor: Tensor) -> str:
    """The last digits of a tensor's address."""
    return f"…{tensor.data_ptr() % 16**5:05x}"


for call in graph.calls:
    print(f"{call.name:4} reads "
          f"{', '.join(map(address, cpu_graph.find_tensors(call.arguments)))}, "
          f"writes {', '.join(map(address, call.new_tensors.values()))}")
print(f"x is at {address(x)}, y at {address(y)}, z at {address(z)}")

# %% [markdown]
# How does the tape know? Below autograd, PyTorch lets a program intercept every operation. Skim this class; the rest of the
# lesson does not need it.

# %%
lab.show("course.lab.instruments.cpu_graph.Recorder")

# %% [markdown]
# Now replay it.

# %%
graph.replay()
print("z after a replay:", z.tolist())

# %% [markdown]
# Now there are numbers. A replay executes the list; no line of your Python runs.
#
# > **Predict.** The next cell gives `x` new numbers and replays, in two ways. What is `z` each time?

# %%
captured_x = x
x = torch.tensor([10.0, 20.0, 30.0])
graph.replay()
print("after x = ...:          ", z.tolist())
captured_x.copy_(x)
graph.replay()
print("after captured_x.copy_: ", z.tolist())

# %% [markdown]
# The first replay did not see the new tensor. `x = ...` points the *name* to other memory. The list still has the old address,
# and the numbers there have not changed. Nothing crashes and nothing warns: such a step trains on the first batch forever.
# **Copy every input to the address that a replay reads.**
#
# The same holds at the other end.
#
# > **Predict.** A list keeps the results of three replays. What does the list hold?

# %%
kept = []
for value in (1.0, 2.0, 3.0):
    captured_x.fill_(value)
    graph.replay()
    kept.append(z)
print([result[0].item() for result in kept])

# %% [markdown]
# Three times the last result. The list holds three references to the same memory, and every replay writes there. This bug is
# called **reading a stale buffer**, and it exists at both ends: an old batch, or an overwritten result. A loss that you log
# ten steps later belongs to another step, and there is no error. **Copy every result out** before the next replay.

# %%
lab.picture(cuda_graphs.buffers(),
            "Three batches on the left. An arrow labeled copy_ leads into a gray box, "
            "the graph. The box holds the captured batch, kernels and the captured "
            "loss. An arrow labeled clone leads to three losses on the right")

# %% [markdown]
# ## What must happen before a capture
#
# A capture records *everything*, including what should happen only once. On its first call, Adam creates its two averages,
# filled with zeros, and a step count.
#
# > **Predict.** The next cell captures a step that has never run, and replays it three times. How many steps does Adam count?

# %%
weight = torch.nn.Parameter(torch.ones(3))
adam = torch.optim.Adam([weight], torch.tensor(0.1), fused=True)


def one_step() -> None:
    """A step of gradient descent on the sum of squares."""
    adam.zero_grad()
    (weight**2).sum().backward()
    adam.step()


too_early = cpu_graph.Graph()
with cpu_graph.capturing(too_early):
    one_step()
for _ in range(3):
    too_early.replay()
print("Adam has counted", int(adam.state[weight]["step"]), "of 3 steps. On the tape:",
      ", ".join(call.name for call in too_early.calls))

# %% [markdown]
# One. The tape also recorded the creation of the states (`zeros`, `zeros_like`). So every replay starts with new ones: Adam
# without a memory. This is why real steps run before a capture, the **warm-up**. They create everything that is created once:
# the optimizer's states, the workspace of cuBLAS (NVIDIA's matrix multiplications), compiled kernels, and the connections of
# NCCL (lesson 07). Warm-up steps are ordinary training steps, each on its own batch.
#
# ## Exercise: static buffers
#
# Now combine these rules. `Captured(step, device)` is called like `step`, batch after batch, and returns what `step` would:
#
# - The first `warm` calls run the step `with warming(self.device):`. On a GPU this moves them to a separate stream, the one
#   that the capture needs. On a CPU it does nothing.
# - The next call **captures** the step `with capturing(self.graph):`, on tensors of *its own*. Keep what the step returns.
# - This call and all later ones **fill** the captured tensors with their batch, **replay**, and return results that no later
#   replay overwrites.
#
# One more rule. Refuse a batch that does not fit (other names, shapes or types) with a `CourseError`, before you copy
# anything. `kinds(batch)` returns all three.
#
# > **Question, before you write.** You captured four samples, and a batch of one sample arrives. Does `copy_` complain?
#
# <details><summary>Answer</summary>
# No. <code>copy_</code> broadcasts: all four rows become the one sample, and the step trains on it as if it were four. It
# also converts float64 to float32 silently. (The last batch of an epoch is the usual case. This course's loaders pad it to
# full size, with padding of weight zero.)
# </details>

# %%
lab.show("course.lab.exercises.lesson06_cuda_graphs.kinds")

# %% exercise="static-buffers"
from course.lab.exercises.lesson06_cuda_graphs import Captured

# %%
check("static-buffers")

# %% [markdown]
# Your class knows nothing about the step that it captures. So give it the library's step: a vision transformer, Adam with a
# learning rate that warms up, gradient clipping, dropout. Train once eagerly and once captured.

# %%
cpu = torch.device("cpu")
tiny = ["data.source=mock", "train.device=cpu", "train.steps=40", "optim.warmup=4",
        "model.grid=[8,16]", "model.dim=32",
        "model.heads=2"]


def assembled(*overrides: str) -> assemble.Training:
    """The library's training of a tiny model, always from the same weights."""
    settings = config.load("vit-demo", [*tiny, *overrides])
    return assemble.assemble(settings,
                             parallel.build_mesh(settings.parallel,
                                                 parallel.World(device=cpu)))


one, other = assembled("model.dropout=0.2"), assembled("model.dropout=0.2")
captured = Captured(other.step, cpu)
pairs = [(one.step(batch)[0], captured(batch)[0])
         for batch in (one.model.example(4, cpu, 4 * number) for number in range(12))]
same = [torch.equal(p, q) for p, q in zip(one.model.parameters(),
                                          other.model.parameters(), strict=True)]
print(f"{sum(torch.equal(a, b) for a, b in pairs)} of {len(pairs)} losses and "
      f"{sum(same)} of {len(same)} parameters are equal, "
      f"bit for bit; Adam counts {int(other.progress.step)} steps")
print("most frequent on the tape:",
      Counter(call.name for call in captured.graph.calls).most_common(6))

# %% [markdown]
# They are bit-for-bit equal. The tape recorded forward pass, backward pass and optimizer as one list, and replaying it is
# training. The library's own class for a GPU (`graphs=true`) does a little more than yours. Read it and find the differences.

# %%
lab.show("course.training.cuda_graph.GraphedStep")

# %% [markdown]
# <details><summary>What is different</summary>
#
# - `wait_parameters`: a graph has to end *complete*. Work on another stream (ZeRO gathers parameters there) must finish
#   before the capture ends.
# - `record_stream`: one stream made the batch, another uses it. This tells the memory allocator not to reuse its memory too
#   early.
# - `capture_error_mode="thread_local"`: CUDA forbids some calls during a capture. PyTorch's NCCL watchdog makes such calls in
#   its own thread. This mode forbids them only in the capturing thread.
# - A failed capture raises a readable error and restores the state of the random number generator.
# - `symmetric_memory.new_graph`: ranks that write into each other's memory (lesson 10) wait once more where a graph begins.
# </details>
#
# PyTorch has graphs of its own: `torch.compile(model, mode="reduce-overhead")`. It captures each compiled **piece**, so a step
# has a few launches, and the optimizer runs as before. It copies inputs for you and captures new graphs for new shapes. It skips
# a piece that it cannot capture, with only a log message. It overwrites results too. If it reports *accessing tensor output of
# CUDAGraphs that has been overwritten*, you need a `clone`.
#
# ## What it costs: memory
#
# A replay writes to the addresses of the capture. So this memory belongs to the graph as long as the graph lives, *between*
# replays too. It comes from a **private pool** of PyTorch's allocator. Within one capture, freed memory is reused as usual.
# A second graph gets a second pool, unless you pass the first one's (`pool=graph.pool()`). Share a pool only between graphs
# that always replay in the order of their captures.
#
# A tape does not reuse memory: it keeps everything.
#
# > **Predict.** The tape of a step keeps how many times the peak memory (activations, gradients) of the eager step?

# %%
my_memory = 1.0                  # your prediction, times

# %%
one, other = assembled(), assembled()
batch = one.model.example(16, cpu)
for _ in range(3):
    one.step(batch)
with tensor_memory.MemoryMeter() as eager:
    one.step(batch)
captured = Captured(other.step, cpu)
for _ in range(4):
    captured(batch)
lab.beside("the tape's memory over an eager step's", my_memory,
           captured.graph.bytes / eager.peak, "times", "counted")

# %% [markdown]
# A CUDA graph reuses memory and costs far less. On an H200 the peak grows by {result: extra_small | .1%} for a small model
# with one sample, and by {result: extra_large | .0%} for the reference model.
#
# ## Measure it: your machine
#
# A replay of the tape skips the Python of the model, of autograd and of the optimizer. It only calls PyTorch once per
# operation. On a CPU nothing runs alongside the host: its time comes *on top of* the work. So a replay saves time here too.
#
# > **Predict.** Take the tiny model from above, one sample, on one core. How many times as long as a replay does the eager
# > step take? And with 64 samples?

# %%
my_gain = {1: 5.0, 64: 1.0}      # your prediction, times

# %%
def medians(*steps: Callable[[], object], rounds: int = 25) -> list[float]:
    """Median milliseconds of each step. They take turns, so a busy moment hits all
    alike."""
    times: list[list[float]] = [[] for _ in steps]
    for _, (step, taken) in itertools.product(range(rounds),
                                              zip(steps, times, strict=True)):
        begin = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begin)
    return [1e3 * sorted(taken)[rounds // 2] for taken in times]


def eager_and_replayed(samples: int) -> tuple[float, float]:
    """Milliseconds of the library's step, and of the same step in your class."""
    one, other = assembled(), assembled()
    captured, batch = Captured(other.step, cpu), one.model.example(samples, cpu)
    for _ in range(4):
        one.step(batch)
        captured(batch)
    first, second = medians(lambda: one.step(batch), lambda: captured(batch))
    return first, second


background_load.report()
threads = torch.get_num_threads()
# threads of such small operations mostly wait for one another
torch.set_num_threads(1)
found = {samples: eager_and_replayed(samples) for samples in (1, 4, 16, 64)}
torch.set_num_threads(threads)
gains = {samples: eager / replayed for samples, (eager, replayed) in found.items()}
curve = style.curves({"eager": (list(found), [eager for eager, _ in found.values()]),
                        "replayed": (list(found),
                                     [replayed for _, replayed in found.values()])},
                     "samples", "ms",
                       "a step of the tiny model on one core of this machine")
lab.picture(curve, "Two rising lines: the eager step lies above the replayed one for "
            "every batch. On Linux the distance grows with the batch")
for samples, predicted in my_gain.items():
    lab.beside(f"eager over replayed, {samples} sample{'s' if samples > 1 else ''}",
               predicted, gains[samples], "times")

# %% [markdown]
# **What you should see:** with one sample the eager step takes about one and a half times as long. The difference is the step's
# Python overhead. A graph on a GPU gains far more: it pays for one launch, where a tape still calls every operation.
#
# If Python were the only cost, every batch size would save the same time. On Linux the two lines part: larger batches save more.
#
# > **Question.** What else does an eager step do for every operation? A replay does not do it, and it takes longer for larger
# > tensors.
#
# <details><summary>Answer</summary>
# It allocates its result. A large piece of memory comes from the operating system, page by page on the first write. It goes
# back when the tensor is freed. Both happen in every step. A replay writes where it wrote before. The next cell counts the pages.
# </details>

# %%
import resource


def new_pages(step: Callable[[], object], rounds: int = 10) -> float:
    """Memory pages that the operating system provides for one step."""
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / rounds


torch.set_num_threads(1)         # as above: each thread allocates memory on its own
one, other = assembled(), assembled()
captured, batch = Captured(other.step, cpu), one.model.example(64, cpu)
for _ in range(4):
    captured(batch)
print(f"64 samples: {new_pages(lambda: one.step(batch)):,.0f} new pages in "
      f"an eager step, "
      f"{new_pages(lambda: captured(batch)):,.0f} in a replay; a page has "
      f"{resource.getpagesize()} bytes")
torch.set_num_threads(threads)

# %% [markdown]
# So the fixed addresses alone save time on a CPU. On a GPU they save nothing: PyTorch's **caching allocator** keeps freed
# memory and reuses it. A gain may hold only on the machine where you measured it, so find out where it comes from.
#
# ## What Python decided in the capture
#
# Why could you capture the library's step without a change? It was written for that. Most steps look more like this one.

# %%
lab.show("course.lab.exercises.lesson06_cuda_graphs.on_host")

# %% [markdown]
# > **Question.** It makes three decisions in Python: the learning rate, which inputs to drop, and whether to update at all.
# > Capture it at step 0, when the count is 0. Which of the three stops the capture with an error, and which goes unnoticed?
#
# <details><summary>Answer</summary>
# The <code>if</code> stops it: Python needs a value that has not been computed. <code>torch.tensor(...)</code> stops it as
# well: it copies a number from host memory, and a graph does not keep that memory. The learning rate goes unnoticed. A Python
# number enters the graph as a constant, here 1/8 of the peak, for all steps. The count goes unnoticed too: it is 1 after the
# capture, and 1 after a thousand replays.
# </details>

# %%
def try_to_capture(step: Callable[..., Tensor], state: OnHost | OnDevice) -> None:
    """Capture a step on random numbers, and print the outcome."""
    batch = {"x": torch.randn(4, 3), "y": torch.randn(4)}
    try:
        with cpu_graph.capturing(cpu_graph.Graph()):
            step(state, batch)
        print("captured")
    except CourseError as error:
        print("refused:", error)


try_to_capture(on_host, OnHost(torch.zeros(3, requires_grad=True)))


def without_the_first(state: OnHost, batch: Batch) -> Tensor:
    """As `on_host`, without dropout: what stops the capture next?"""
    loss = mean_square(batch["x"] @ state.weight - batch["y"])
    if loss.isfinite():
        state.count += 1
    return loss


try_to_capture(without_the_first, OnHost(torch.zeros(3, requires_grad=True)))

# %% [markdown]
# On a GPU both stop with `operation not permitted when stream is capturing`. Look at your own last line in the traceback.
# (Without `device=...` the first one would not stop: PyTorch treats a CPU tensor of one number as a number.) These errors are
# the lucky case. Here is the other one.
#
# > **Predict.** Three replays. Which rate, which count?

# %%
count, frozen = 0, cpu_graph.Graph()
with cpu_graph.capturing(frozen):
    rate = torch.full((), PEAK * min(1.0, (count + 1) / RAMP))
    count += 1
for _ in range(3):
    frozen.replay()
print(f"rate {rate.item()}, count {count}; the rate of the third step is "
      f"{PEAK * 3 / RAMP}")

# %% [markdown]
# The graph never learned that there was a count. No error points to frozen values, so look for them: learning rates, loss
# scales, step counts, changing probabilities, seeds made in Python.
#
# **When a capture fails or goes wrong:**
#
# 1. **Read the first error.** A forbidden call invalidates the capture, and every later call fails as well (`operation failed
#    due to a previous error during capture`).
# 2. **Find what waits.** `torch.cuda.set_sync_debug_mode("error")` stops an eager step at each operation that waits for the
#    GPU: `.item()`, `.cpu()`, an `if` on a tensor, `nonzero`, a boolean mask as an index.
# 3. **Find what is frozen.** Train eagerly and replayed, from the same weights on the same batches, and compare all
#    parameters. Compare ten replays, because the first one still uses the right values. Vary batches and learning rate, and
#    include a bad batch.
#
# > **Question.** You load a checkpoint into a run whose step is already captured. The losses continue as if nothing had been
# > loaded, or the optimizer continues with its old averages. How can that be?
#
# <details><summary>Answer</summary>
# The graph trains the tensors of the capture. A load that creates <i>new</i> tensors changes nothing that the graph reads.
# <code>load_state_dict</code> of a module copies in place; that of PyTorch's optimizers replaces the state tensors. So load
# first, then warm up and capture.
# </details>
#
# **Random numbers.** PyTorch's default GPU generator supports graphs: kernels read seed and offset from device memory, and each
# replay advances the offset. So `nn.Dropout` draws new numbers in every replay. Register your own generators with the graph.
# Random numbers from Python or NumPy are frozen. This course computes random numbers from a step count that is a tensor (lesson
# 01).
#
# **Several GPUs.** NCCL's collectives are kernels, and a graph captures them like others. Every rank has to capture, and to
# replay equally often, or the others wait forever. The first collective of the warm-up creates the connections. The decision to
# call a collective must be the same on all ranks.
#
# **Pipelines.** Their ranks run different programs, and the host orders their sends and receives. So the library refuses to
# capture them:

# %%
try:
    config.load("vit-demo", ["graphs=true", "parallel.pp=2"])
except CourseError as error:
    print(error)

# %% [markdown]
# Besides the weights, the library keeps everything that changes between steps as tensors on the device:

# %%
lab.show("course.training.step.Progress")

# %% [markdown]
# It computes the learning rate from `step`, with tensor operations (lesson 08). Adam gets the rate as a tensor and reads it on
# the device, and `capturable=True` keeps Adam's own step count there as well. (PyTorch's learning-rate schedulers also work.
# They compute a number on the host and fill it into that tensor *between* two replays.)
#
# ## Exercise: decided on the device
#
# Rewrite the step `on_host` so that it can be captured. Everything that changes is now a tensor in `state`: `weight`, `count`
# and `skipped`.
#
# - **Compute from tensors** what changes from step to step. `dropout(x, step)` takes the count as a tensor already.
# - Change it **in place**: the next replay reads the same memory.
# - Where Python would choose, compute **both outcomes** and let the device choose: `torch.where(condition, a, b)`.
#
# `on_host` uses `PEAK`, `RAMP`, `dropout` and `mean_square`; use them too.
#
# > **Question, before you write.** Why not multiply the gradient by 0 where the loss is not finite?
#
# <details><summary>Answer</summary>
# The gradient of such a loss is NaN or infinite, and 0 times that is NaN. <code>torch.where</code> takes one of two numbers
# as it is, whatever the other one is.
# </details>

# %% exercise="decided-on-device"
from course.lab.exercises.lesson06_cuda_graphs import on_device

# %%
check("decided-on-device")

# %% [markdown]
# Watch the step skip a bad batch and continue without the host. It fits three weights, 1, −2 and 0.5. Dropout shrinks them by
# the dropped share, so they end near three quarters of that.

# %%
state = OnDevice(torch.zeros(3, requires_grad=True), torch.zeros((), dtype=torch.int64),
                 torch.zeros((), dtype=torch.int64))
generator = torch.Generator().manual_seed(6)
truth = torch.tensor([1.0, -2.0, 0.5])
captured_batch = {"x": torch.zeros(64, 3), "y": torch.zeros(64)}
skipping = cpu_graph.Graph()
with cpu_graph.capturing(skipping):
    loss = on_device(state, captured_batch)
for number in range(20):
    captured_batch["x"].copy_(torch.randn(64, 3, generator=generator) if number != 10
                              else torch.full((64, 3), torch.nan))
    torch.mv(captured_batch["x"], truth, out=captured_batch["y"])
    skipping.replay()
    if number % 5 == 0:
        print(f"step {int(state.count):2}, loss {loss.item():8.4f}, skipped "
              f"{int(state.skipped)}, "
              f"weight {[round(w, 2) for w in state.weight.tolist()]}")

# %% [markdown]
# The library's step does the same. `bad` is a tensor, 1.0 if the loss or gradient norm is not finite on any rank. Fused Adam
# and SGD read it *on the device* as `found_inf` and skip the update. The counters take it as well:

# %%
lab.show("course.training.step.update_progress")

# %% [markdown]
# ## Open task: accumulate gradients in graphs
#
# *Optional, about 50 minutes. Nothing later needs it.* Your `Captured` takes a step as it is. Now write the step as well: a
# trainer with momentum, clipping and a changing learning rate. It adds up the gradients of several micro-batches, and their
# number differs from step to step. Our solution has about 45 lines.
#
# **Contract**
#
# - `GraphTrainer(loss_of, parameters, momentum, clip, device)`: `loss_of(micro)` returns the mean loss of a micro-batch, a dict
#   of tensors. All have the same shapes. Train the parameters in place. Between steps, a caller may load other values in place.
# - `step(micros, rate)` is one update. The gradient is the mean over the micro-batches. If the norm of all gradients together is
#   larger than `clip`, multiply them by `clip / norm`. Then velocity = momentum · velocity + gradient, and
#   parameter = parameter − rate · velocity. It returns nothing.
# - After `step` the loader reuses the memory of the micro-batches. So keep none of it, and write nothing into it.
# - `read_losses()` returns a list of numbers: the mean loss of each step since the last call.
# - The first two steps may run in Python, `with warming(device):`. Use `new_graph(device)`, `capturing(graph)` and
#   `graph.replay()` of `course.lab.instruments.cpu_graph`: they are tapes without a GPU, and CUDA graphs with one.
# - `run`, `accumulate` and `update` below are parts of our answer. Yours does not need them.
#
# **Levels.** Each counts by itself, once the first is reached. Operations inside a replay do not count:
#
# | level | what the check counts |
# |---|---|
# | correct | weights after every step, and all losses; relative differences up to 0.00001 are allowed |
# | captured | from step 4 on Python never runs `loss_of`, even if a step has more micro-batches than any before |
# | few launches | from step 4 on, for k micro-batches: k + 1 replays, a copy of each of their tensors, and at most 4 operations |
# | no stall | `step` reads no value on the host; `read_losses` waits once, not for each loss |
#
# Start with correct. `lab.hint("graph-trainer")` opens the first of three hints, and each further call opens the next one.

# %% exercise="graph-trainer"
from course.lab.exercises.lesson06_open_task import GraphTrainer  # noqa: F401

# %%
check("graph-trainer")

# %% [markdown]
# ## Summary
#
# - A graph removes the host from the step. It saves the time that the device would wait for the host, and nothing else.
# - Addresses are fixed: copy batches in, copy results out, change states in place.
# - A capture computes nothing and records everything. Warm up first.
# - Python decides once, for all replays. Learning rates, counts, scales and skipped steps must be tensors.
# - An error in a capture is the lucky case. Compare with eager steps to find frozen values.
#
# ## Questions
#
# 1. A profile shows an idle GPU while the host reads data. Does a graph help?
# 2. Your replayed loss is constant to the last digit. What are two possible reasons?
# 3. Which tensors of your own training step change between steps, and who changes them?
#
# **Check your work from a terminal.** Save the notebook, then run `course check notebooks/06_cuda_graphs_mine.ipynb`.
# Next: [lesson 07](07_data_parallel.ipynb), with more than one GPU.
#
# ## Appendix (optional): on GPUs
#
# Take 12 layers of width 768 with 256 tokens, **one** sample, in bf16. The number of operations does not depend on the width,
# so count them on a narrow model.

# %%
narrow = assembled("model.depth=12", "precision=bf16")
counted = Captured(narrow.step, cpu)
for _ in range(4):
    counted(narrow.model.example(1, cpu))
operations = len(counted.graph.calls)
print(f"{operations} operations in a step of 12 layers")

# %% [markdown]
# > **Predict.** On an H200, how many times as fast as the eager step is the same step in a graph?

# %%
my_times = 2.0                   # your prediction

# %%
recorded_rows = {row["configuration"]: row for row in lab.results("vit_h200")["rows"]}
SMALL = {"eager": "one sample: eager", "in a graph": "one sample: in a graph",
         "compiled": "one sample: compiled",
         "compiled, in a graph": "one sample: compiled, in a graph"}
LARGE = {"compiled": "bf16, compiled",
         "compiled, in a graph": "bf16, compiled, in a graph"}
speed = {label: recorded_rows[name]["samples_per_s"] for label, name in SMALL.items()}
lab.beside("one sample, in a graph, over eager", my_times,
           speed["in a graph"] / speed["eager"], "times", "recorded")
for label in ("eager", "in a graph"):
    print(f"{label}: {1e6 / speed[label] / operations:.0f} µs for each operation")

# %% [markdown]
# In the graph an operation takes as long as a small kernel and the gap after it. (Some operations are two or three kernels:
# the GPU runs {result: kernels | d}.) Compiled without a graph this step is *slower* (lesson 05).
#
# > **Predict.** How many times as fast is the compiled step in a graph as without one? And as the uncompiled step in a graph?

# %%
my_compiled_times = 2.0          # your predictions
my_fewer_kernels = 1.5

# %%
both = speed["compiled, in a graph"]
lab.beside("compiled, in a graph, over compiled", my_compiled_times,
           both / speed["compiled"], "times", "recorded")
lab.beside("compiled over uncompiled, both in a graph", my_fewer_kernels,
           both / speed["in a graph"], "times", "recorded")

# %% [markdown]
# The graph removes the host, and compiling reduces kernels and bytes.
#
# > **Predict.** The reference model (width 384, 4,050 tokens, 16 samples), in bf16 and compiled: by what percentage does a
# > graph speed it up?

# %%
my_percent = 10                  # your prediction

# %%
large = {label: recorded_rows[name]["samples_per_s"] for label, name in LARGE.items()}
more = 100 * (large["compiled, in a graph"] / large["compiled"] - 1)
print(f"predicted {my_percent}% faster, recorded {more:+.1f}%: "
      f"{1e3 * 16 / large['compiled']:.1f} ms a step, then "
      f"{1e3 * 16 / large['compiled, in a graph']:.1f} ms")

# %% [markdown]
# Its kernels run far longer than they take to launch. Before you use a graph, check that the device is idle *because the host
# launches*.

# %%
about = lab.results("vit_h200")
speeds = {"12 layers of width 768, 256 tokens, one sample": speed,
          "the reference model, 16 samples": large}
lab.picture(style.grouped_bars(speeds, "samples/s", f"training steps in bf16, "
                               f"{about['hardware']}, PyTorch {about['torch']}"),
            "Bars of samples per second. "
            + ". ".join(f"{model}: " + ", ".join(f"{label} {per_s:.0f}"
                                                 for label, per_s in bars.items())
                        for model, bars in speeds.items()))
lab.beside("\none sample of the tiny model, replayed from a tape on your machine",
           my_gain[1], gains[1], "times")

# %%
if lab.gpu():
    def milliseconds(*overrides: str) -> float:
        """Of a step on the GPU: the mean of twenty, after five warm-up steps."""
        settings = config.load("vit-demo", ["data.source=mock", "train.device=cuda",
                                            "precision=bf16", *overrides])
        training = assemble.assemble(settings,
                                     parallel.build_mesh(settings.parallel,
                                                         parallel.join("cuda")))
        batch = training.model.example(1, torch.device("cuda"))
        for _ in range(5):
            training.step(batch)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(20):
            training.step(batch)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin) / 20

    print(f"vit-demo, one sample: eager {milliseconds():.2f} ms, in a graph "
          f"{milliseconds('graphs=true'):.2f} ms")
else:
    print("There is no GPU here: the numbers above are from an H200.")

# %% [markdown]
# ```
# course train vit-short graphs=true precision=bf16 compile=true    # the whole step in one graph
# course bench vit --out results.json                               # these measurements, on your GPU
# ```
