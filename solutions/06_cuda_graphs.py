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
# A small step spends most of its time being launched: the host puts one kernel after another into the GPU's queue, and the
# GPU finishes each before the next is there. A **CUDA graph** is the whole list of launches, recorded once and then handed
# over at once, step after step. It makes small steps several times faster, and it asks for something in return: nothing in
# the step may be decided in Python any more, and everything has to stay where it was. In this lesson you write both sides of
# that bargain.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 90 minutes |
# | computing | half a minute on two cores |
# | you write | when a graph is worth it (6 lines), a step in static buffers (16), a step that decides nothing on the host (10) |
# | you measure | a step, launched piece by piece and replayed, against its batch |
#
# You should have done [lesson 02](02_profiling.ipynb); the end compares with what [lesson 05](05_compile_and_fuse.ipynb)
# measured. Work in a copy: *File → Save Notebook As…*, `06_cuda_graphs_mine.ipynb`.

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
from course.lab.exercises.lesson06_cuda_graphs import PEAK, RAMP, OnDevice, OnHost, eager_time, mean_square, on_host
from course.lab.notebook import check

lab.begin("06")

# %% [markdown]
# ## One launch for all
#
# In lesson 02 a launch took the host 5 µs. That was the launch alone. Before PyTorch comes to it, Python has run a line of
# the model, autograd has noted what the backward pass will need, and the dispatcher has looked for the right kernel. An
# operation of an eager step costs the host more like 20 µs.
#
# > **Predict.** 1,000 kernels, 20 µs of the host's time each, 3 µs on the GPU each, and 1 µs in which the GPU goes from one
# > to the next. Launched one after another they take 20 ms: the GPU waits for the host. A graph with all of them takes the
# > host 10 µs to launch. How many milliseconds does the step take then?

# %%
my_graphed_ms = 10.0             # your prediction

# %% [markdown]
# ## Exercise: when is a graph worth it?
#
# Write it down for any step.
#
# - `graphed_time` is the time of a step in a graph: the host launches all kernels at once, then the GPU works through them,
#   with a gap between one and the next.
# - `break_even` says from which batch on a graph gains too little: the smallest batch at which the eager step takes less than
#   `1 + least` times as long as the graphed one. The work of each kernel grows in proportion to the batch.
#
# `eager_time(launches, works, gap)` is given: `replay` of lesson 02, with gaps.

# %%
lab.show("course.lab.exercises.lesson06_cuda_graphs.eager_time")

# %% exercise="graph-gain"
from course.lab.exercises.lesson06_cuda_graphs import break_even, graphed_time

# %%
check("graph-gain")

# %%
lab.beside("1,000 kernels in a graph", my_graphed_ms, 1e3 * graphed_time([3e-6] * 1000, 10e-6, 1e-6), "ms", "computed")

# %% [markdown]
# Three for each kernel and one for each gap: four milliseconds, and the GPU is the one that sets the pace. Here are the first
# twelve kernels of a transformer with one sample, a matrix multiplication, a norm, an addition and a GELU three times over.

# %%
small = [8.0, 1.0, 1.0, 1.5]     # microseconds of each, for one sample
rows = {"eager": cuda_graphs.eager_bars([20.0] * 12, small * 3, 1.0),
        "graph": cuda_graphs.graph_bars(small * 3, 10.0, 1.0)}
lab.picture(cuda_graphs.timeline(rows, title="twelve kernels, 20 µs for each launch; and all of them in a graph"),
            "Four lanes. Eager: the host launches without a pause for 240 microseconds, and thin bars of work follow on the "
            "GPU, far apart. In a graph: one launch of 10 microseconds, then the same bars close together, done after 56")

# %% [markdown]
# > **Predict.** 400 such kernels. From which batch on does a graph gain less than a tenth? (Up to which batch does the eager
# > step take the same time, whatever the batch?)

# %%
my_break_even = 32               # your prediction

# %%
works, batches = [1e-6 * work for work in small] * 100, [1, 2, 3, 4, 6, 8, 12, 16]
scaled = {batch: [batch * work for work in works] for batch in batches}
curve = style.curves({"launched one by one": (batches, [1e3 * eager_time([20e-6] * 400, w, 1e-6) for w in scaled.values()]),
                        "as a graph": (batches, [1e3 * graphed_time(w, 10e-6, 1e-6) for w in scaled.values()])},
                       "samples", "ms", "400 kernels")
lab.picture(curve, "Launched one by one, a step takes 8 ms up to about 6 samples and then rises; as a graph it rises from 1.6 ms "
            "at once, and the two meet where launching no longer matters")
lab.beside("samples from which on a graph gains less than 10%", my_break_even, break_even(works, 20e-6, 10e-6, 1e-6, 0.1),
           how="computed")

# %% [markdown]
# So a graph makes no kernel faster. It takes the host out of the way, and gains exactly the time that the GPU would
# have waited for the host: a lot with one sample, nothing with many. (The gaps between kernels become a little shorter
# too, which this arithmetic leaves out.) Keep that in mind for the measurements.
#
# ## A graph that you can look into
#
# Where there is no GPU there are no CUDA graphs. But what makes them hard to use is not the GPU. It is that a list of
# launches holds *addresses*: where each kernel reads, where each writes. So the course has a **tape**: the list of PyTorch's
# operations in a block of code, with the very tensors that they read and write. It is used as a graph is, and the same holds
# for both.
#
# | on a GPU | on a tape |
# |---|---|
# | `graph = torch.cuda.CUDAGraph()` | `graph = cpu_graph.Graph()` |
# | `with torch.cuda.graph(graph): ...` | `with cpu_graph.capturing(graph): ...` |
# | `graph.replay()` | `graph.replay()` |
#
# (Where a tape is less than a graph, it says so itself: `help(cpu_graph)`. The main thing: a replay of a tape still calls PyTorch
# once for every operation.)
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
# No numbers: **capturing computes nothing**. It only writes down what is to be done. `y` and `z` exist, their memory is
# reserved, and nobody has written into it (the tape puts NaN there, so that you notice; on a GPU there is whatever was
# there before). What the tape holds is this:

# %%
def address(tensor: Tensor) -> str:
    """The last digits of where a tensor lies."""
    return f"…{tensor.data_ptr() % 16**5:05x}"


for call in graph.calls:
    print(f"{call.name:4} reads {', '.join(map(address, cpu_graph.find_tensors(call.arguments)))}, "
          f"writes {', '.join(map(address, call.new_tensors.values()))}")
print(f"x lies at {address(x)}, y at {address(y)}, z at {address(z)}")

# %% [markdown]
# How does the tape know? Below autograd, every operation of PyTorch passes through a place where a program may watch
# it. Skim this; the rest of the lesson does not need it.

# %%
lab.show("course.lab.instruments.cpu_graph.Recorder")

# %% [markdown]
# Now replay it.

# %%
graph.replay()
print("z after a replay:", z.tolist())

# %% [markdown]
# Now there are numbers. A replay does what is on the list; no line of your Python runs.
#
# > **Predict.** The next cell gives `x` new numbers and replays, in two ways. What will `z` be, each time?

# %%
captured_x = x
x = torch.tensor([10.0, 20.0, 30.0])
graph.replay()
print("after x = ...:          ", z.tolist())
captured_x.copy_(x)
graph.replay()
print("after captured_x.copy_: ", z.tolist())

# %% [markdown]
# The first replay knew nothing of the new tensor. `x = ...` makes the *name* point to other memory; the list has the old
# address, and what lies there has not changed. Nothing crashes, nothing warns: the step trains on the first batch forever.
# Whatever a replay is to read must be **copied to where it reads**.
#
# The same holds at the other end.
#
# > **Predict.** Three replays, and the result of each is kept in a list. What does the list hold?

# %%
kept = []
for value in (1.0, 2.0, 3.0):
    captured_x.fill_(value)
    graph.replay()
    kept.append(z)
print([result[0].item() for result in kept])

# %% [markdown]
# Three times the last one. The list has three names for one piece of memory, and every replay writes there. This is the bug
# of **reading a stale buffer**, once at each end: a batch that was there before, a result that has been written over. A loss
# that is logged ten steps later is another step's loss, all ten points of the curve are the same, and nobody is told. A
# result that is to last must be **copied away** before the next replay.

# %%
lab.picture(cuda_graphs.buffers(),
            "Three batches on the left, an arrow labelled copy_ into a grey box, the graph. In it: captured batch, kernels, "
            "captured loss. An arrow labelled clone leads to three losses on the right")

# %% [markdown]
# ## What must have happened before
#
# A capture writes down *everything* that happens in it, including what was meant to happen only once. Adam makes its
# two averages when it is first called, filled with zeros, and a count of its steps beside them.
#
# > **Predict.** The step below is captured without having run before, and replayed three times. How many steps has Adam
# > counted?

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
# One. Making the states has been recorded too (`zeros`, `zeros_like`), so every replay begins with new ones: Adam
# without a memory. That is why real steps come before a capture, the **warm-up**. In them, everything that is made once
# is made: the optimizer's states, the work space of cuBLAS (NVIDIA's matrix multiplications), the connections of NCCL (the
# library that sends between GPUs, lesson 07), compiled kernels. They are steps of the training like all others, each on a batch
# of its own.
#
# ## Exercise: static buffers
#
# Now put it together. `Captured(step, device)` is called as `step` is, batch after batch, and returns what `step` would:
#
# - the first `warm` calls run the step, `with warming(self.device):` (on a GPU this puts them on a stream of their own, as
#   the capture will be; on a CPU it does nothing);
# - the next call **captures** the step: on tensors of *your own*, `with capturing(self.graph):`. Keep what it returns;
# - this call and all others **fill** the captured tensors with their batch, **replay**, and return results that nobody writes
#   over.
#
# One more rule. A batch that does not fit has to be refused with a `CourseError`, before anything is copied: other names,
# other shapes or other types. `kinds(batch)` gives all three.
#
# > **Question, before you write.** A batch of one sample, where four were captured. Does `copy_` complain?
#
# <details><summary>Answer</summary>
# No. <code>copy_</code> broadcasts: all four rows become the one sample, and the step trains on it as if it were four. It
# also converts float64 to float32 without a word. (The last batch of an epoch is the usual case. This course's loaders never
# give a shorter one: they fill it up with padding, which weighs nothing.)
# </details>

# %%
lab.show("course.lab.exercises.lesson06_cuda_graphs.kinds")

# %% exercise="static-buffers"
from course.lab.exercises.lesson06_cuda_graphs import Captured

# %%
check("static-buffers")

# %% [markdown]
# Your class knows nothing of the step that it captures. So give it the library's: a vision transformer, Adam with a learning
# rate that warms up, clipping, dropout. Once as it is, once captured.


# %%
cpu = torch.device("cpu")
tiny = ["data.source=mock", "train.device=cpu", "train.steps=40", "optim.warmup=4", "model.grid=[8,16]", "model.dim=32",
        "model.heads=2"]


def assembled(*overrides: str) -> assemble.Training:
    """The library's training of a tiny model, always from the same weights."""
    settings = config.load("vit-demo", [*tiny, *overrides])
    return assemble.assemble(settings, parallel.build_mesh(settings.parallel, parallel.World(device=cpu)))


one, other = assembled("model.dropout=0.2"), assembled("model.dropout=0.2")
captured = Captured(other.step, cpu)
pairs = [(one.step(batch)[0], captured(batch)[0]) for batch in (one.model.example(4, cpu, 4 * number) for number in range(12))]
same = [torch.equal(p, q) for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True)]
print(f"{sum(torch.equal(a, b) for a, b in pairs)} of {len(pairs)} losses and {sum(same)} of {len(same)} parameters are equal, "
      f"bit for bit; Adam counts {int(other.progress.step)} steps")
print("most frequent on the tape:", Counter(call.name for call in captured.graph.calls).most_common(6))

# %% [markdown]
# Not nearly equal: equal. Forward pass, backward pass and optimizer were recorded as one list, and replaying it is training.
# The library's own class for a GPU is yours with some more thoughts in it. Read it and find them.

# %%
lab.show("course.training.cuda_graph.GraphedStep")

# %% [markdown]
# <details><summary>What is different</summary>
#
# - `wait_parameters`: a graph has to end *complete*. Work that was put on another stream in the capture (ZeRO's gathering of
#   parameters) must have come back before it ends.
# - `record_stream`: the batch was made on one stream and is used on another. This tells the memory allocator not to give its
#   memory to somebody else while the other stream may be reading.
# - `capture_error_mode="thread_local"`: some CUDA calls are forbidden while anybody captures, and PyTorch watches NCCL from a
#   thread of its own, which makes such calls now and then. This forbids them to the capturing thread alone.
# - a failing capture is turned into a sentence, and gives back the state of the generator of random numbers, which it had
#   changed.
# - `symmetric.new_graph`: ranks that write into each other's memory (lesson 10) wait once more where a graph begins.
# </details>
#
# ## What was decided in the capture
#
# Why could the library's step be captured just like that? Because it was written for it. Most steps are more like this one.

# %%
lab.show("course.lab.exercises.lesson06_cuda_graphs.on_host")

# %% [markdown]
# > **Question.** It takes three decisions in Python: the learning rate, which inputs to drop, and whether to update at all.
# > Capture it in the step with the count 0. Which of the three stops the capture with an error, and which goes unnoticed?
#
# <details><summary>Answer</summary>
# The <code>if</code> stops it: Python wants to know a value that has not been computed. <code>torch.tensor(...)</code>
# stops it as well: it copies a number from the host's memory, which a graph does not hold on to. The learning rate goes
# unnoticed. A Python number goes into the graph as the number that it was, here 1/8 of the peak, and stays that for all
# steps. The count goes unnoticed too: it is 1 after the capture, and 1 after a thousand replays.
# </details>

# %%
def try_to_capture(step: Callable[..., Tensor], state: OnHost | OnDevice) -> None:
    """Capture a step on random numbers, and say what came of it."""
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
# On a GPU both stop with `operation not permitted when stream is capturing`, and a traceback whose last line of yours is the
# one to look at. (Without `device=...` the first would not even stop there: a CPU tensor of one number is taken as a number.)
# The errors are the kind part. Here is the other one.
#
# > **Predict.** Three replays. Which rate, which count?

# %%
count, frozen = 0, cpu_graph.Graph()
with cpu_graph.capturing(frozen):
    rate = torch.full((), PEAK * min(1.0, (count + 1) / RAMP))
    count += 1
for _ in range(3):
    frozen.replay()
print(f"rate {rate.item()}, count {count}; the rate of the third step is {PEAK * 3 / RAMP}")

# %% [markdown]
# Nothing ever told the graph that there was a count. No error points to what was quietly frozen, so you have to look
# for it: learning rates, loss scales, step counts, probabilities that change, seeds made in Python.
#
# ## Exercise: decided on the device
#
# Write the same step so that it can be captured. Everything that changes is a tensor in `state` now: `weight`, `count` and
# `skipped`.
#
# - What changes from step to step is **computed from tensors**. `dropout(x, step)` takes the count as a tensor already.
# - What changes is changed **in place**: the next replay reads the same memory.
# - Where Python would choose, compute **both outcomes** and let the device choose: `torch.where(condition, a, b)`.
#
# `PEAK`, `RAMP`, `dropout` and `mean_square` are those of the step above.
#
# > **Question, before you write.** Why not multiply the gradient by 0 where the loss is not finite?
#
# <details><summary>Answer</summary>
# The gradient of such a loss is NaN or infinite, and 0 times that is NaN. <code>torch.where</code> takes one of two numbers
# as it is, whatever the other one may be.
# </details>

# %% exercise="decided-on-device"
from course.lab.exercises.lesson06_cuda_graphs import on_device

# %%
check("decided-on-device")

# %% [markdown]
# See it skip a bad batch and go on, with nobody looking. (After the capture no Python of the step runs: who could have
# looked?) It regresses three weights, 1, −2 and 0.5, with dropout, which makes them smaller by the share that is dropped:
# they end near three quarters of that.

# %%
state = OnDevice(torch.zeros(3, requires_grad=True), torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64))
generator = torch.Generator().manual_seed(6)
truth = torch.tensor([1.0, -2.0, 0.5])
captured_batch = {"x": torch.zeros(64, 3), "y": torch.zeros(64)}
skipping = cpu_graph.Graph()
with cpu_graph.capturing(skipping):
    loss = on_device(state, captured_batch)
for number in range(20):
    captured_batch["x"].copy_(torch.randn(64, 3, generator=generator) if number != 10 else torch.full((64, 3), torch.nan))
    torch.mv(captured_batch["x"], truth, out=captured_batch["y"])
    skipping.replay()
    if number % 5 == 0:
        print(f"step {int(state.count):2}, loss {loss.item():8.4f}, skipped {int(state.skipped)}, "
              f"weight {[round(w, 2) for w in state.weight.tolist()]}")

# %% [markdown]
# ## The same in the library
#
# What changes between steps beside the weights stands in one place, as tensors on the device:

# %%
lab.show("course.training.step.Progress")

# %% [markdown]
# The learning rate is computed from `step`, a *tensor*, and so is its warm-up: with `torch.minimum` where you would write `min`
# (lesson 08 writes it). Adam gets
# it as a tensor and reads it on the device, and `capturable=True` tells PyTorch that Adam's own step count is to lie there as
# well. (PyTorch's learning-rate schedulers work too: they compute a number on the host, and where the optimizer was given a
# tensor they fill it in, *between* two replays.)
#
# And a skipped step? Look at how `train_step` ends (you have seen it in [lesson 01](01_baseline.ipynb)):
#
# - `bad` is a tensor, 1.0 if the loss or the gradient's norm is not finite on any rank;
# - it becomes the optimizer's `found_inf`. The fused kernels of Adam and SGD read it *on the device* and, where it is not 0,
#   leave weights and states alone;
# - what counts good and bad steps takes it as well:

# %%
lab.show("course.training.step.update_progress")

# %% [markdown]
# > **Question.** With fp16, PyTorch's `GradScaler` skips bad steps too. For most optimizers it does so with an `if` on the
# > host, which waits for the device. What would that do to a capture?
#
# <details><summary>Answer</summary>
# It reads <code>found_inf</code> with <code>.item()</code>, so the capture fails. To fused optimizers it hands
# <code>found_inf</code> and the scale as tensors and leaves the choice to them, as the library does.
# </details>
#
# **Random numbers.** PyTorch's own generator on a GPU knows of graphs: a capture lets kernels read seed and offset from the
# device's memory, and each replay moves on. So `nn.Dropout` draws new numbers in every replay; a generator that you made
# yourself does so only if it is registered with the graph. What Python or NumPy draw is frozen. This course's random numbers
# are a function of a step count that is a tensor ([lesson 01](01_baseline.ipynb)), so there is nothing to be done.
#
# **Several GPUs.** NCCL's collectives are kernels, and are captured like others: `bad` above is a maximum over all ranks,
# taken inside the graph. Three things follow. Every rank has to capture, and to replay equally often, or the others wait
# forever. The connections must be there before the capture: they come with the first collective, in the warm-up. And what
# decides whether there will be a collective must not be on one rank alone.
#
# **Pipelines** are refused. Their ranks run different programs that meet in sends and receives, in an order that the host
# keeps; the library does not capture that, and says so. (Frameworks that want both, such as Megatron-LM, can capture layer by
# layer, and leave the schedule to the host.)

# %%
try:
    config.load("vit-demo", ["graphs=true", "parallel.pp=2"])
except CourseError as error:
    print(error)

# %% [markdown]
# ## What it costs: memory
#
# A replay writes to the addresses of the capture. So this memory must belong to the graph as long as it lives, *between*
# replays too: it comes from a **private pool** of PyTorch's allocator, which gives nothing back to anybody else. Within one
# capture memory is used again as ever: when a tensor is freed, the next may take its place. An eager step shares what it
# frees with everybody; a second graph gets a second pool, unless it is told to use the first one's (`pool=graph.pool()`),
# which is right only if the two always replay one after the other, in the order of their captures.
#
# A tape does not use memory twice: it keeps whatever it made.
#
# > **Predict.** How many times the most that an eager step holds at once (activations, gradients) is what the tape of that
# > step keeps?

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
lab.beside("the tape's memory over an eager step's", my_memory, captured.graph.bytes / eager.peak, "times", "counted")

# %% [markdown]
# A CUDA graph, which does use memory again, costs far less: a few percent on top of the eager step, or nothing. The
# most memory that tensors took on an H200, with and without:

# %%
rungs = {row["rung"]: row for row in lab.results("vit_h200")["rows"]}
SMALL = {"eager": "one sample: eager", "in a graph": "one sample: in a graph", "compiled": "one sample: compiled",
         "compiled, in a graph": "one sample: compiled, in a graph"}
LARGE = {"compiled": "bf16, compiled", "compiled, in a graph": "bf16, compiled, in a graph"}
lab.recorded("vit_h200", {f"{model}, {label}": {"GB": rungs[rung]["memory_gb"]}
                          for model, group in (("one sample", SMALL), ("the reference model", LARGE))
                          for label, rung in group.items()}, why="Peak of training")

# %% [markdown]
# ## Measure it: your machine
#
# A replay of the tape skips the Python of the model, of autograd and of the optimizer, and asks PyTorch for one operation
# after another. On a CPU nothing runs beside the host: host and device are the same cores, and what the host does comes *on
# top of* the work. So something can be saved here too, for a reason of its own.
#
# > **Predict.** The tiny model from above, one sample, on one core. How many times as long as a replay does the eager
# > step take? And with 64 samples?

# %%
my_gain = {1: 5.0, 64: 1.0}      # your prediction, times


# %%
def medians(*steps: Callable[[], object], rounds: int = 25) -> list[float]:
    """Milliseconds of each step, the median of so many rounds by turns, so that a busy moment hits all alike."""
    times: list[list[float]] = [[] for _ in steps]
    for _, (step, taken) in itertools.product(range(rounds), zip(steps, times, strict=True)):
        begin = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begin)
    return [1e3 * sorted(taken)[rounds // 2] for taken in times]


def eager_and_replayed(samples: int) -> tuple[float, float]:
    """Milliseconds of the library's step and of your class around it."""
    one, other = assembled(), assembled()
    captured, batch = Captured(other.step, cpu), one.model.example(samples, cpu)
    for _ in range(4):
        one.step(batch)
        captured(batch)
    first, second = medians(lambda: one.step(batch), lambda: captured(batch))
    return first, second


background_load.report()
threads = torch.get_num_threads()
torch.set_num_threads(1)         # or the threads' waiting for one another would be most of such small operations
found = {samples: eager_and_replayed(samples) for samples in (1, 4, 16, 64)}
torch.set_num_threads(threads)
gains = {samples: eager / replayed for samples, (eager, replayed) in found.items()}
curve = style.curves({"eager": (list(found), [eager for eager, _ in found.values()]),
                        "replayed": (list(found), [replayed for _, replayed in found.values()])}, "samples", "ms",
                       "a step of the tiny model on one core of this machine")
lab.picture(curve, "Two rising lines: the eager step lies above the replayed one for every batch, on Linux by more for big ones")
for samples, predicted in my_gain.items():
    lab.beside(f"eager over replayed, {samples} sample{'s' if samples > 1 else ''}", predicted, gains[samples], "times")

# %% [markdown]
# **What you should see:** with one sample the eager step takes about one and a half times as long: that is the Python of a
# step. It is far from the five times of the arithmetic above, and it should be: a tape still pays for calling every
# operation, where a graph on a GPU pays once for all.
#
# If that were all, the same milliseconds would be saved for every batch, and the two lines would lie side by side. On Linux
# they part: the larger the batch, the more milliseconds are saved.
#
# > **Question.** What else does an eager step do for every operation, which a replay does not, and which takes longer for
# > larger tensors?
#
# <details><summary>Answer</summary>
# It makes its result, and for that it needs memory. A large piece comes from the operating system, page by page as it
# is first written to, and goes back when the tensor is freed, again in every step. A replay writes where it wrote
# before. The next cell counts the pages.
# </details>

# %%
import resource


def new_pages(step: Callable[[], object], rounds: int = 10) -> float:
    """Pages of memory that the operating system has to find for one step."""
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / rounds


torch.set_num_threads(1)         # as above: each thread asks for memory on its own
one, other = assembled(), assembled()
captured, batch = Captured(other.step, cpu), one.model.example(64, cpu)
for _ in range(4):
    captured(batch)
print(f"64 samples: {new_pages(lambda: one.step(batch)):,.0f} new pages in an eager step, "
      f"{new_pages(lambda: captured(batch)):,.0f} in a replay; a page has {resource.getpagesize()} bytes")
torch.set_num_threads(threads)

# %% [markdown]
# So the fixed addresses of a graph save something by themselves. On a GPU they would save nothing: asking the driver for
# memory is so slow there that PyTorch keeps what is freed and hands it out again, in its **caching allocator**. Measuring has
# shown a gain that nobody had predicted, and its reason says that it will not be there on the next machine. Both are worth
# knowing.
#
# ## Measure it: an H200
#
# A step of 12 layers of width 768, 256 tokens, **one** sample, in bf16. How many operations is that? The number does not
# depend on the width, so count them on a narrow model.

# %%
narrow = assembled("model.depth=12", "precision=bf16")
counted = Captured(narrow.step, cpu)
for _ in range(4):
    counted(narrow.model.example(1, cpu))
operations = len(counted.graph.calls)
print(f"{operations} operations in a step of 12 layers")

# %% [markdown]
# > **Predict.** How many times as fast as the eager step is the same step in a graph?

# %%
my_times = 2.0                   # your prediction

# %%
speed = {label: rungs[rung]["samples_per_s"] for label, rung in SMALL.items()}
lab.beside("one sample, in a graph, over eager", my_times, speed["in a graph"] / speed["eager"], "times", "recorded")
for label in ("eager", "in a graph"):
    print(f"{label}: {1e6 / speed[label] / operations:.0f} µs for each operation")

# %% [markdown]
# **What you should see:** the eager step is bound by its launches, tens of microseconds for each operation: Python, autograd
# and the dispatcher come with every launch. In the graph an operation takes a few microseconds, which is what a small kernel
# and the gap after it take: now the GPU sets the pace. (On a GPU some operations are two or three kernels: it ran the 843 of
# lesson 05.)
#
# Compiled, this step was slower (lesson 05): fewer kernels, but the host took longer over each. In a graph the host is out of
# the way.
#
# > **Predict.** The compiled step in a graph: how many times as fast as the compiled step, and as the uncompiled one in a graph?

# %%
my_compiled_times = 2.0          # your predictions
my_fewer_kernels = 1.5

# %%
both = speed["compiled, in a graph"]
lab.beside("compiled, in a graph, over compiled", my_compiled_times, both / speed["compiled"], "times", "recorded")
lab.beside("compiled over uncompiled, both in a graph", my_fewer_kernels, both / speed["in a graph"], "times", "recorded")

# %% [markdown]
# Each cures what the other leaves: the graph takes the host away, and compiling makes the kernels fewer and their bytes
# less. Only together do they make both the GPU's work and the wait for it as short as can be.
#
# > **Predict.** The reference model (width 384, 4,050 tokens, 16 samples), in bf16 and compiled: how many percent faster in a
# > graph?

# %%
my_percent = 10                  # your prediction

# %%
large = {label: rungs[rung]["samples_per_s"] for label, rung in LARGE.items()}
more = 100 * (large["compiled, in a graph"] / large["compiled"] - 1)
print(f"predicted {my_percent}% faster, recorded {more:+.1f}%: {1e3 * 16 / large['compiled']:.1f} ms a step, then "
      f"{1e3 * 16 / large['compiled, in a graph']:.1f} ms")

# %% [markdown]
# Next to nothing, as your `break_even` would have said: its kernels run for far longer than they take to launch, so the host
# is ahead all the time, and the GPU never waits for it. Lesson 02's picture of this model showed it: no idle time, nothing to
# gain. Before you reach for a graph, look whether the device is idle *because the host launches*.
#
# Here is the whole ladder, and after it your own rung.

# %%
about = lab.results("vit_h200")
speeds = {"12 layers of width 768, 256 tokens, one sample": speed, "the reference model, 16 samples": large}
lab.picture(style.grouped_bars(speeds, "samples/s", f"training steps in bf16, {about['hardware']}, PyTorch {about['torch']}"),
            "Bars of samples per second. One sample: in a graph the bar is several times as long as eager, compiled it is "
            "shorter, compiled and in a graph the longest. The reference model: two bars of the same length")
lab.beside("\none sample of the tiny model, replayed from a tape on your machine", my_gain[1], gains[1], "times")

# %% [markdown]
# If there is a GPU here, the next cell measures the library's own graph on it.

# %%
if lab.gpu():
    def milliseconds(*overrides: str) -> float:
        """Of a step on the GPU, of twenty, after five that do not count."""
        settings = config.load("vit-demo", ["data.source=mock", "train.device=cuda", "precision=bf16", *overrides])
        training = assemble.assemble(settings, parallel.build_mesh(settings.parallel, parallel.join("cuda")))
        batch = training.model.example(1, torch.device("cuda"))
        for _ in range(5):
            training.step(batch)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(20):
            training.step(batch)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin) / 20

    print(f"vit-demo, one sample: eager {milliseconds():.2f} ms, in a graph {milliseconds('graphs=true'):.2f} ms")
else:
    print("There is no GPU here: the numbers above are those of an H200.")

# %% [markdown]
# ## When a capture fails
#
# 1. **Look at the first error.** A forbidden call invalidates the capture, and whatever comes after it fails as well
#    (`operation failed due to a previous error during capture`).
# 2. **Find what waits.** `torch.cuda.set_sync_debug_mode("error")` makes an eager step stop at the operations that wait for
#    the GPU, one after another: `.item()`, `.cpu()`, an `if` on a tensor, `nonzero`, a boolean mask as an index.
# 3. **Find what was frozen.** No error tells. Train some steps eagerly and some replayed, from the same weights on the same
#    batches, and compare all parameters, as you did above. The first replay proves little, for what was frozen is still true
#    then: compare ten, with other batches, a learning rate that changes, and a bad batch among them.
#
# > **Question.** A checkpoint is loaded into a training that has been captured already. The losses go on as if nothing had
# > been loaded, or the optimizer starts again with the averages of before. How can that be?
#
# <details><summary>Answer</summary>
# The graph trains the tensors of the capture. Loading that makes <i>new</i> tensors changes nothing that the graph
# reads. <code>load_state_dict</code> of a module copies in place; that of PyTorch's optimizers puts other tensors in
# the place of the states. So load first, then warm up and capture.
# </details>
#
# ## In practice
#
# ```
# course train vit-short graphs=true precision=bf16 compile=true        # the whole step in one graph, after 3 warm-up steps
# course profile vit-short                                              # is the device idle while the host launches?
# course bench vit --out ladder.json                                    # all rungs of the ladder, on your GPU
# ```
#
# PyTorch has graphs of its own, without a line of yours: `torch.compile(model, mode="reduce-overhead")`. What it does
# differently:
#
# - it captures the compiled **pieces**, forward and backward each on its own, so there are a few launches a step; the
#   optimizer, and whatever stands between the pieces, is launched as ever. The library captures the **whole step** in one;
# - it copies inputs into static buffers for you (weights it takes to stay where they are), warms up by itself, and leaves out
#   a piece that cannot be captured, with a message in the logs, instead of refusing;
# - other shapes get graphs of their own, beside the first, all from one pool of memory;
# - results are overwritten by the next run here too. It notices when you read one too late: *accessing tensor output of
#   CUDAGraphs that has been overwritten by a subsequent run*. The cure is yours: `clone`.
#
# `torch.cuda.make_graphed_callables` is between the two: it captures forward and backward of the modules that you name.
#
# ## What you know now
#
# - A graph takes the host out of the way. It gains what the device would have waited for it, and nothing else.
# - Addresses are fixed: copy batches in, copy results out, change states in place.
# - A capture computes nothing and records everything: warm up first.
# - What Python decides is decided for good. Learning rates, counts, scales and skipped steps are tensors, and the device
#   chooses.
# - An error in a capture is the lucky case. Compare with eager steps to find what was frozen.
#
# **Check your work once more, from outside.** Save the notebook; then, in a terminal: `course check
# notebooks/06_cuda_graphs_mine.ipynb`.
#
# Next: [lesson 07](07_data_parallel.ipynb), with more than one GPU.
