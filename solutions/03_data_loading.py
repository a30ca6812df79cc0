# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 03 · Data loading
#
# A GPU that waits for data is an expensive way to heat a room. Simple arithmetic tells you whether it waits: you need the bytes
# of a sample, and the speed of each station on their way. In this lesson you do that arithmetic. You find out why PyTorch's
# DataLoader often stays far below the best rate. And you write the two pieces that make a loader: *which* samples a process
# reads, and *when* it reads them.
#
# **What you will learn**
#
# - How to compute the data rate that a model needs, and the best rate that a machine can give.
# - How to shuffle, shard and resume a data set with a pure function.
# - How to read ahead, and how to copy batches to the GPU while it computes.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 90 minutes |
# | computing | half a minute on two cores |
# | you write | a sharded sampler (4 lines), a reader that works ahead (9); optional: a loader for a slow disk (20) |
# | you measure | loaders on your machine, compared with the least time that reading takes |
#
# Do [lesson 01](01_baseline.ipynb) first. Work in a copy: *File → Save Notebook As…*, `03_data_loading_mine.ipynb`.

# %% numbers=true
from course.bench.results import load, value

pair_gb = 2 * 20 * 360 * 720 * 4 / 1e9
loaders = load("loaders_h200")
floor = loaders["page cache to memory"]


def trained(settings):
    """Samples per second of training steps on an H200."""
    return value("vit_h200", settings, "samples_per_s")


compiled = trained("bf16, compiled")
wanted = round(compiled, -1)                         # pairs per second that the text computes with
floor_8, link = floor["8"] / compiled, loaders["pinned to GPU"] / compiled
worker_gb, least_gb = 12 * wanted * pair_gb, 3 * wanted * pair_gb
dali_shares = [loaders["loaders"]["dali"][n] / floor[n] for n in ("8", "12", "16")]
native = loaders["loaders"]["native"]
waiting_cost = 1 - trained("tf32, read by the training process") / trained("tf32, on the device")
starved_cost = 1 - trained("bf16, compiled, 8 loader processes") / compiled
ahead_cost = 1 - trained("bf16, compiled, threads") / compiled

# %%
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from course.data import order
from course.lab.figures import style, data_loading
from course.lab.instruments import background_load
from course.lab import notebook as lab
from course.lab.notebook import check
from course.bench import loaders

lab.begin("03")
torch.set_num_threads(1)         # in this lesson, only the readers run in parallel

# %% [markdown]
# ## What a sample costs
#
# In the reference data, a state of the weather has 20 channels on 360 × 720 points, in float32. A sample is a **pair**:
# the state now, and the state six hours later. A batch has 16 pairs.
#
# > **Predict.** How many megabytes does a pair have? The compiled model of lesson 01 trains about
# > {result: wanted | .0f} samples a second on one H200. How many gigabytes a second is that?

# %%
my_mb = 10                       # your prediction, for a pair
my_gb_per_second = 1.0           # your prediction, for 180 pairs a second

# %%
state_bytes = 20 * 360 * 720 * 4
pair_bytes = 2 * state_bytes
lab.beside("a pair", my_mb, pair_bytes / 1e6, "MB", "counted")
lab.beside("180 pairs a second", my_gb_per_second, 180 * pair_bytes / 1e9, "GB/s",
           "counted")

# %% [markdown]
# 41 MB a sample is a lot. An image for a classifier has 0.1 MB, a text of 2048 tokens about 4 kB. Text never waits for
# a disk. Weather, video and medical volumes do.
#
# ## The path of a byte
#
# From a file to a matrix multiplication, a byte passes these stations:
#
# 1. the **disk**, or a file system across a network: one to a few GB/s;
# 2. the **page cache**: memory in which the operating system keeps what it has read from files, until that memory is needed for
#    something else. If the data fit, the second epoch comes from here;
# 3. the program's **own memory**: `read` copies from the page cache into it;
# 4. **pinned memory**: memory that the operating system promises not to move. Only from there can a GPU fetch data by itself;
# 5. the **link** (PCIe), and the GPU's memory at its end.
#
# You can observe the page cache. The next cell writes a file of two pairs and reads it several times. First it asks the
# operating system each time to forget the file, so the bytes come from the disk. Then it reads without asking.
#
# > **Predict.** How many times as fast is reading from the page cache?

# %%
my_times = 2.0                   # your prediction

# %%
background_load.report()
folder = Path("runs/lesson-03")
folder.mkdir(parents=True, exist_ok=True)
file = folder / "pairs.bin"
with open(file, "wb") as out:
    np.random.default_rng(0).standard_normal((2, 2, 20, 360, 720),
                                             np.float32).tofile(out)
    out.flush()
    os.fsync(out.fileno())       # the system cannot forget what is not on the disk yet
memory = np.ones(2 * pair_bytes, np.uint8)


def read_file(forget: bool) -> float:
    """Seconds to read the file into existing memory."""
    handle = os.open(file, os.O_RDONLY)
    # Linux; elsewhere it stays in the cache
    if forget and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    begin, done = time.perf_counter(), 0
    while done < len(memory):
        done += os.preadv(handle, [memory[done:].data], done)
    seconds = time.perf_counter() - begin
    os.close(handle)
    return seconds


disk, cache = (sorted(read_file(forget) for _ in range(5))[2]
               for forget in (True, False))
print(f"from the disk {memory.nbytes / disk / 1e9:.1f} GB/s, from the page cache "
      f"{memory.nbytes / cache / 1e9:.1f} GB/s")
lab.beside("the page cache over the disk", my_times, disk / cache, "times")

# %% [markdown]
# **What you should see:** a few times as fast, depending on your disk. (On a cloud machine, "the disk" may itself be a
# cache on another computer. On macOS this cell cannot make the system forget.) If you measure a loader in its second
# epoch, you measure the page cache. That is fine if the training will also read from there. Ten years of this data are
# 300 GB; a node such as NVIDIA's DGX H100 has 2 TB of memory.
#
# Look at `os.preadv`: it reads a number of bytes at a position of a file, *into memory that you give it*. While it
# copies, it releases Python's lock, so several threads can read at once.
#
# ## Floors
#
# Two copies are hard to avoid: from the page cache into memory, and from memory to the GPU. (NVIDIA's GPUDirect Storage
# copies from the disk straight to the GPU, where machine and file system allow it.) The best possible time of each is a
# **floor**: no loader can be faster. The next table gives the floors of an H200's machine, as speeds.

# %%
recorded = lab.results("loaders_h200")
floors = recorded["page cache to memory"]
rows = {f"page cache to memory, {n} thread{'s' * (n != '1')}": speed
        for n, speed in floors.items()}
rows["pinned memory to the GPU"] = recorded["pinned to GPU"]
lab.recorded("loaders_h200", {name: {"pairs/s": speed, "GB/s": speed * pair_bytes / 1e9}
                              for name, speed in rows.items()},
             why="Only copying, of pairs of 41 MB")

# %% [markdown]
# > **Question.** The model needs about {result: wanted | .0f} pairs a second. Which station limits it?
#
# <details><summary>Answer</summary>
# With one reading thread, the copy out of the page cache. With several, none: eight threads read about
# {result: floor_8 | .0f} times as much as the model needs, and the link carries about {result: link | .0f} times as much.
# So a loader that is slower than the model has only itself to blame.
# </details>
#
# ## Which sample, when, and by whom
#
# In training every sample comes once an epoch, in an order that looks random and differs from epoch to epoch. With n
# data-parallel ranks (lesson 07), each rank takes one of n parts of every *global* batch. The usual method is a random
# generator in each process: you save its state, restore it, and keep all generators in step. A simpler method makes the order a
# **pure function**. Imagine an endless sequence of shuffled epochs of n samples. `samples_at(seed, n, start, stop)` returns the
# samples at positions `start` to `stop − 1` of this sequence:

# %%
print("positions 0 to 9:  ", order.samples_at(0, 10, 0, 10).tolist())
print("positions 10 to 19:", order.samples_at(0, 10, 10, 20).tolist())
print("positions 8 to 11: ", order.samples_at(0, 10, 8, 12).tolist())
lab.show("course.data.order.samples_at")

# %% [markdown]
# Global batch k has the positions kB to (k + 1)B − 1, and each rank takes its contiguous part. The picture shows 10
# samples, batches of 4 and two ranks.

# %%
lab.picture(data_loading.stream(0, samples=10, batch=4, ranks=2, steps=5),
            "Five rows of four tiles with sample numbers. The first two tiles of each "
            "row belong to rank 0, the others to rank 1. After ten tiles, in the "
            "middle of the third row, the second epoch begins")

# %% [markdown]
# The third batch has the end of one epoch and the beginning of the next. So no samples are left over, and no batch needs
# padding.
#
# > **Question.** A run has consumed 28 samples and dies. What do you have to save, so that it continues with exactly the
# > samples that it would have seen? And if it continues with four ranks instead of two?
#
# <details><summary>Answer</summary>
# One number, 28. The order follows from the seed and this number. The number of ranks does not matter: the sequence
# belongs to the training, not to a rank, and you only cut it differently.
# </details>
#
# ## Exercise: a sharded sampler
#
# Write `train_batches`, a generator without end. Each `yield` is the list of this rank's sample ids for the next global
# batch. It begins after `consumed` samples. This need not be a multiple of the batch, because the run may have used
# another batch size before. Use `samples_at` from above, and `my_slice(global_batch, ranks, rank)`, which returns this
# rank's slice of a global batch. (`array.tolist()` makes a list of an array.)

# %% exercise="sharded-sampler"
from course.data.order import train_batches

# %%
check("sharded-sampler")

# %% [markdown]
# A common mistake: every rank shuffles with *its own* seed and takes its part. There is no error, every batch has the
# right shape, and the loss goes down.
#
# > **Predict.** With 4 ranks, what percentage of the samples does such a run see in its first epoch?

# %%
my_percent = 95                  # your prediction

# %%
def seen(own_seeds: bool, samples: int = 1200, batch: int = 24, size: int = 4) -> float:
    """The percentage of samples that at least one rank reads in one epoch."""
    found = set()
    for rank in range(size):
        mine = train_batches(rank if own_seeds else 0, samples, batch, size, rank, 0)
        for _ in range(samples // batch):
            found.update(next(mine))
    return 100 * len(found) / samples


print(f"one seed for all: {seen(False):.0f}%")
lab.beside("a seed for each rank", my_percent, seen(True), "%", "counted")

# %% [markdown]
# **What you should see:** about two thirds. Each rank reads a quarter of its own order, and these quarters overlap. A
# sample is in none of them with probability $(3/4)^4 = 32\%$; others come two, three or four times. Over many epochs
# it evens out. The only symptom is a validation loss that is a little worse.
#
# PyTorch's `DistributedSampler` uses one seed, so it does not make this mistake. Know two things about it. It repeats the
# same order in every epoch unless you call `set_epoch(epoch)`. And it starts each epoch at the beginning, so a run that
# resumes in the middle has to skip what it has seen. The stateful loaders of `torchdata` and this course's pure function
# both solve that.
#
# Now resume your sampler on another number of ranks:

# %%
straight = train_batches(7, 100, 8, 2, 0, 0)
for _ in range(20):
    next(straight)
print("rank 0 of 2, the 21st batch:       ", next(straight))
print("resumed after 20 batches:          ", next(train_batches(7, 100, 8, 2, 0, 160)))
print("resumed on 4 ranks, ranks 0 and 1: ",
      *(next(train_batches(7, 100, 8, 4, rank, 160)) for rank in (0, 1)))

# %% [markdown]
# ## Workers
#
# PyTorch's `DataLoader` reads in the training process itself (`num_workers=0`), and then training waits. Or it reads in
# worker processes, each of which reads whole batches while the model trains. The library's baseline loader uses it:

# %%
lab.show("course.data.loaders.native.loader")

# %% [markdown]
# Everybody tunes the number of workers. NERSC's course "Deep Learning at Scale" measured it on an A100 in TF32, with the
# same model and pairs of the same size:
#
# | | samples/s |
# |---|--:|
# | no workers: the training process reads | 8.8 |
# | 4 workers | 12.5 |
# | 8 workers | 12.1 |
# | 16 workers | 10.6 |
# | NVIDIA DALI, 8 threads | 13.2 |
#
# There is a best number, and it is small. Why are 16 workers not faster than 4? Because a worker does more than reading.
# It is a *process* with its own memory. So it
#
# 1. reads a state from the page cache into fresh memory,
# 2. normalizes it: one pass for the mean, one for the standard deviation,
# 3. copies it to its place in the batch,
# 4. copies the batch into *shared* memory, where the training process finds it.
#
# Then a thread of the training process
#
# 5. copies it into pinned memory.
#
# > **Predict.** What percentage of the total time is reading?

# %%
my_reading = 70                  # your prediction, percent

# %%
background_load.report()
mean, std = np.zeros((20, 1, 1), np.float32), np.ones((20, 1, 1), np.float32)
# in place of pinned memory, which the loader reuses
ready = torch.ones(2, 20, 360, 720)


def like_a_worker(number: int) -> dict[str, float]:
    """Milliseconds of each step for one pair."""
    marks = [time.perf_counter()]
    states = np.empty((2, 20, 360, 720), np.float32)
    handle = os.open(file, os.O_RDONLY)
    os.preadv(handle, [states.reshape(-1).view(np.uint8).data],
              (number % 2) * pair_bytes)
    os.close(handle)
    marks.append(time.perf_counter())
    states -= mean
    states /= std
    marks.append(time.perf_counter())
    batch = np.zeros_like(states)
    batch[:] = states
    marks.append(time.perf_counter())
    shared = torch.from_numpy(batch).share_memory_()
    marks.append(time.perf_counter())
    ready.copy_(shared)
    marks.append(time.perf_counter())
    parts = ("read", "normalize", "into the batch", "into shared memory",
             "into pinned memory")
    return {part: 1e3 * (end - begin)
            for part, begin, end in zip(parts, marks, marks[1:], strict=False)}


laps = [like_a_worker(number) for number in range(7)][2:]
worker = {part: sorted(lap[part] for lap in laps)[2] for part in laps[0]}
for part, ms in worker.items():
    print(f"{part:20} {ms:6.1f} ms")
lab.beside("reading", my_reading, 100 * worker["read"] / sum(worker.values()), "%")

# %% [markdown]
# **What you should see:** a fifth to a third. The fourth step is often the most expensive. The operating system has to
# provide new shared memory for every batch, page by page, and clear it.
#
# All five steps use one resource that more workers do not multiply: the machine's **memory bandwidth**. Count in units of
# a pair's bytes. Each step reads them once and writes them once, and normalizing does both twice. That makes 12 passes,
# or 0.5 GB for a pair of 41 MB.
#
# > **Question.** How many GB/s is that for {result: wanted | .0f} pairs a second? And how much must the best loader move?
#
# <details><summary>Answer</summary>
# {result: worker_gb | .0f} GB/s, a large part of what all cores of a server together can move. The best loader reads and
# writes each byte once, from the page cache straight into pinned memory, and the GPU reads it once:
# {result: least_gb | .0f} GB/s.
# </details>
#
# A worker also prepares a whole batch by itself. A batch of 16 pairs is 0.7 GB. A worker that needs 60 ms for a pair
# needs a second for a batch. More workers deliver more batches, but each batch still takes as long. Each worker also
# keeps two batches waiting (`prefetch_factor`): 21 GB of memory for 16 workers.
#
# ## To the GPU
#
# The batch is in memory; now it has to cross the link. In the next pictures a copy takes a third of a step.

# %%
lab.picture(data_loading.streams(data_loading.copy_and_compute(1.0, 3.0, 3,
                                                               ahead=False),
                                 "Copy, compute, copy, compute"),
            "One row in which a short copy and a long step alternate, three times")
lab.picture(data_loading.streams(data_loading.copy_and_compute(1.0, 3.0, 3, ahead=True),
                                 "The next copy beside the step"),
            "Two rows. Above: the copies, the second during the first step, the third "
            "during the second step. Below: three steps with no gap between them")

# %% [markdown]
# A GPU has *copy engines* beside its multiprocessors, so it can copy and compute at once. This takes three things:
#
# - **Pinned memory.** A GPU fetches by physical addresses, and the operating system may move or swap out ordinary memory at
#   any moment. So a copy from ordinary memory goes through a small pinned buffer of the driver, piece by piece. The host
#   has to take part, even with `non_blocking=True`.
# - **A second stream.** A stream is a queue of work for the GPU, executed in order. A copy in the computing stream would
#   wait for the previous step. A copy in another stream does not.
# - **Events.** Two streams know nothing of each other. An event marks a point in one stream, and the other stream can wait
#   for it.
#
# The library has two classes for this. `Buffer` is the memory that a batch is read into. On a CPU there is nothing to copy
# away, so the batch stays where it was read.

# %%
lab.show("course.data.loaders.threads.Buffer")

# %% [markdown]
# `DeviceStage` brings a batch to the GPU. Its method `send` receives a `BatchRead`: a batch that threads are reading into
# such a buffer, piece by piece. `reading.wait()` waits for all pieces, `reading.memory` is the buffer's memory with the
# batch, and `reading.samples` are its sample ids.

# %%
lab.show("course.data.loaders.threads.DeviceStage")

# %% [markdown]
# > **Question.** What goes wrong without each of these lines, and would you notice?
# >
# > 1. `stream.wait_event(ready)`
# > 2. `tensor.record_stream(stream)`
# > 3. `reading.buffer.copied = ...`; `Buffer.take` waits for this event before anybody may write into the buffer
#
# <details><summary>Answer</summary>
# 1. The step starts before its batch is there, and computes with whatever the memory held. Often this is the previous
#    batch, so the loss looks good.
# 2. PyTorch's allocator believes that the memory belongs to the copying stream. When Python drops the batch, the step
#    that reads it is queued but perhaps not done. The allocator gives the memory to the next copy, which overwrites it.
#    <code>record_stream</code> says that the computing stream uses the memory too. So the allocator waits until that
#    stream has reached this point.
# 3. The threads read the next batch into pinned memory that the GPU is still fetching from: half of one batch, half of
#    another. <br>None of these mistakes crashes, none happens each time, and all look like noise in the loss. To find
#    them, keep the GPU busy with a long kernel. Then compare the batches, bit for bit, with a loader that does one thing
#    at a time.
# </details>
#
# You can see the third mistake without a GPU. In the next cell a thread plays the copy engine. It fetches a batch from a
# buffer, slowly, while the loader goes on.
#
# > **Predict.** Of 20 batches, how many arrive damaged, if nobody waits for the copy before writing the buffer again?

# %%
my_torn = 3                      # your prediction


# %%
def torn(wait: bool, batches: int = 20) -> int:
    """How many batches arrive damaged when another thread fetches them from one
    buffer."""
    buffer, arrived = np.zeros(64), list[np.ndarray]()

    def fetch() -> None:
        there = np.empty_like(buffer)
        for start in range(0, 64, 8):
            there[start:start + 8] = buffer[start:start + 8]
            time.sleep(0.0005)
        arrived.append(there)

    with ThreadPoolExecutor(1) as engine:
        for number in range(batches):
            # read the next batch into the buffer
            buffer[:] = number
            copied = engine.submit(fetch)
            if wait:
                copied.result()                      # the event's job
            time.sleep(0.002)                        # reading takes a while
    return sum(bool((there != number).any()) for number, there in enumerate(arrived))


lab.beside("damaged batches", my_torn, torn(False), how="counted")
print(f"and if the loader waits for the copy: {torn(True)}")

# %% [markdown]
# **What you should see:** nearly all are damaged, some are whole batches in the wrong place, and there is no error
# message. With a single buffer and waiting, reading and copying take turns. So the loader has a ring of buffers, and
# waits only for the one that it is about to reuse.
#
# `send` also normalizes **on the GPU**: the states cross the link exactly as the file has them.
#
# > **Question.** Normalizing a pair took your machine some milliseconds. A GPU reads and writes its memory at 3 TB/s or
# > more. How long does it take there? And can the result differ?
#
# <details><summary>Answer</summary>
# Two passes that read and write 41 MB each are 0.17 GB: about 50 microseconds. Float32 subtraction and division round the
# same way everywhere (IEEE 754). So the bits are the same, unless somebody replaces the division by a multiplication with
# the reciprocal. The library's tests compare the loaders bit for bit.
# </details>
#
# ## Threads instead of processes
#
# A loader does not need worker processes. Threads share memory, so nothing has to be copied between them. Python's
# lock keeps threads from *computing* at the same time, but reading releases it. HDF5, the format of the weather files,
# needs a library with a lock of its own, which reads one thing at a time. So the loader asks this library only *where* in
# the file a state lies, and reads the bytes with `preadv`.

# %%
lab.show("course.data.loaders.threads.loader")

# %% [markdown]
# Your sampler provides its `batches`. `free`, a ring of `ahead` buffers, limits how many batches it reads ahead. The bytes go
# from the page cache straight into pinned memory, and from there to the GPU. A core moves each byte once.
#
# ## DALI
#
# NVIDIA's **DALI** is a library of data pipelines. You describe a graph of operators, and DALI runs it ahead of the
# training, on CPU threads or on the GPU. It has readers for images, video, audio and NumPy files, but not for HDF5. For
# everything else it has a **parallel external source**: worker processes that call your Python function. They write into
# a ring of shared memory *that stays*, so no batch needs new memory.

# %%
lab.show("course.data.loaders.dali.hdf5_pipeline")

# %% [markdown]
# DALI is strongest at decoding JPEG and video on the GPU. Weather needs no decoding, so only its queue and its shared
# memory help here.
#
# ## Measure
#
# `course bench loaders` measures all loaders: it takes batches and throws them away. Run it on your machine first, on small
# pairs (32 × 64 points, 0.33 MB), which it makes. It leaves out DALI if DALI is not installed.
#
# > **Predict** three speeds on your machine: the training process itself (0 workers), DataLoader with 2 worker processes,
# > and two threads. Give each as a share of what one thread reads from the page cache.

# %%
# your prediction, percent
my_share = {"native, 0": 50.0, "native, 2": 100.0, "threads, 2": 90.0}

# %%
background_load.report()
found = loaders.main(["train.global_batch=16"], True,
                     ["native", "threads", "dali", "dali_numpy"], [1, 2], 0.1,
                     torch.device("cpu"))

# %%
mine = {f"{kind}, {n}": speed for kind, speeds in found["loaders"].items()
        for n, speed in speeds.items()}
floor = found["page cache to memory"]["1"]
for name, predicted in my_share.items():
    lab.beside(f"{name} workers, of the floor", predicted, 100 * mine[name] / floor,
               "%")

# %% [markdown]
# **What you should see:** on small pairs, worker processes are *slower* than no workers. There is little to read, and
# passing a batch between processes costs more. Workers can still help: with them, reading and computing overlap. A loader
# is fast enough if it keeps up with the model. Your model of lesson 01 takes a hundred samples a second or so, and every
# loader in the table gives far more. (With two cores, reader and caller share the machine, so two readers do not read
# twice as much.)
#
# > **Question.** Threads stay below the floor too, though they move each byte once. What else do they do here?
#
# <details><summary>Answer</summary>
# On a CPU they also normalize. And they read into new memory for each batch, because the batch stays in it; the floor
# reads into the same memory again and again. On a GPU neither applies.
# </details>
#
# ## On an H200's machine
#
# Here pairs have 41 MB and batches 16 pairs. The machine has 16 cores. All data are in the page cache, and the loader
# copies them to the GPU.
#
# > **Predict.** With 8 workers: how many pairs a second does the DataLoader give, and how many do threads?

# %%
my_native, my_threads = 200.0, 400.0                 # your prediction, pairs/s

# %%
speeds = recorded["loaders"]
lab.recorded("loaders_h200", {kind: {f"{n}": row.get(n, "") for n in ("0", *floors)}
                              for kind, row in
                              {"floor: page cache to memory": floors,
                               **speeds}.items()},
             why="Pairs per second; columns: worker processes or threads")
lab.beside("\nnative, 8 processes", my_native, speeds["native"]["8"], "pairs/s",
           "recorded")
lab.beside("8 threads", my_threads, speeds["threads"]["8"], "pairs/s", "recorded")

# %%
recorded_rows = {row["configuration"]: row for row in lab.results("vit_h200")["rows"]
                 if "samples_per_s" in row}
needs = {"the model in bf16, "
         "compiled": recorded_rows["bf16, compiled"]["samples_per_s"],
         "the model in TF32": recorded_rows["tf32, on the device"]["samples_per_s"]}
lab.picture(data_loading.speeds_by_workers(speeds, {"floor": floors}, needs,
                                           "Loaders on an H200's machine, pairs of "
                                           "41 MB"),
            f"Pairs per second against workers. The floor rises from "
            f"{floors['1']:.0f} with one thread to "
            f"{floors['16']:,.0f} with 16. DALI over .npy files and threads lie close "
            f"to it, threads up to 12. "
            "DALI over HDF5 is lower, and the DataLoader is the lowest. A horizontal "
            "line for the compiled model lies between them, one for TF32 near the "
            "bottom")

# %% [markdown]
# **What you should see:** three kinds of loaders.
#
# - Threads, and DALI over `.npy` files, move each byte once. They are close to the floor. But on 16 cores, 16 threads are
#   slower than 12.
# - DALI with 8 or more processes reaches {result: min(dali_shares) | .0%} to {result: max(dali_shares) | .0%} of the floor,
#   because it must copy each batch out of shared memory.
# - The DataLoader stays far below: {result: native["8"] | .0f} pairs a second with 8 workers,
#   {result: native["12"] | .0f} with 12.
#
# The two horizontal lines are what the model needs. A loader that reads ahead and lies *above* the line costs nothing,
# however much faster another loader is. In TF32 all of them lie above it, so there only reading ahead matters. When the
# model gets faster (lessons 04 and 05), the same loader becomes the bottleneck.
#
# ## Together
#
# > **Predict.** 12 threads feed the compiled model. How many samples a second will the run process? Start with the lower of two
# > numbers. Then think of what the two have to share.

# %%
# your prediction: correct it
my_rate = min(needs["the model in bf16, compiled"], speeds["threads"]["12"])

# %%
lab.beside("bf16, compiled, threads", my_rate,
           recorded_rows["bf16, compiled, threads"]["samples_per_s"], "samples/s",
           "recorded")

# %%
fed = {"TF32": {"random data on the device": "tf32, on the device",
                "the training process reads": "tf32, read by the training process",
                "8 processes of a DataLoader": "tf32, 8 loader processes"},
       "bf16, compiled": {"random data on the device": "bf16, compiled",
                          "8 processes of a DataLoader": "bf16, compiled, 8 "
                          "loader processes",
                          "12 threads": "bf16, compiled, threads",
                          "DALI, 12 processes": "bf16, compiled, DALI",
                          "DALI on .npy files": "bf16, compiled, DALI on .npy files"}}
bars = {kind: {way: recorded_rows[name]["samples_per_s"] for way, name in ways.items()}
        for kind, ways in fed.items()}
lab.picture(style.grouped_bars(bars, "samples/s", "Training steps of the weather "
                               "model on one H200"),
            "Bars of samples per second. Those in TF32 are short: reading in the "
            "training process is slower than data on the device, 8 processes are "
            "about as fast. In bf16, 8 processes of a DataLoader are much slower than "
            "data on the device; threads and both kinds of DALI are nearly as fast")

# %% [markdown]
# **What you should see:** in TF32 the step itself is slow. Even a loader that makes it wait costs only
# {result: waiting_cost | .0%}, and eight processes win most of that back. In bf16 the same eight processes starve the
# model: they cost {result: starved_cost | .0%}. Threads, which read ahead, cost {result: ahead_cost | .0%}.
#
# The lower of the two speeds is a good prediction if they are far apart. It ignores that copies and normalization share the
# GPU's memory bandwidth with the model.
#
# ## In practice
#
# ```
# course bench loaders                                        # all loaders on this machine, with the floors
# course bench loaders --workers 4,8 --loader threads data.path=data/my-weather
# course train vit-opt data.loader=threads data.workers=8     # native, threads, dali, dali_numpy: the same bits
# course data numpy data/my-weather                           # one .npy file a state, for dali_numpy
# course profile vit-opt data.workers=8                       # does the step wait for data? (lesson 02)
# ```
#
# - First ask whether the step waits for data at all. Train on `data.source=mock`, on the same device. If that is not
#   faster, stop here.
# - Then compute the floors. If the model needs more, make the data smaller: store 16 bits, crop, compress.
# - Then look at the loader. Count how often it copies a byte, and where it asks for new memory.
# - `num_workers` has an optimum. Measure it on the machine that you will train on, with all of its GPUs at work.
# - On a file server, chunk your files so that a sample is one contiguous read of a megabyte or more.
#
# ## Reading ahead
#
# Whichever process reads, it should read *while* the GPU computes. So read the next batch before the training asks for it, and
# put it into a **queue** between the reader and the training. How long should the queue be?
#
# In the next picture a step takes 1, and there are three cases. In the first, each read takes 0.8. In the second, reading
# also takes 0.8 on average, but one read in twenty takes 6, because a file server was busy. In the third, each read takes
# 1.2.
#
# > **Predict,** for each case: from which depth on does the training no longer wait?

# %%
depths = [0, 1, 2, 4, 8, 16, 32]
cases = {"always 0.8": [0.8] * 600,
         "0.8 on average, one in 20 takes 6": data_loading.read_times(0.8, 6.0, 20),
         "always 1.2": [1.2] * 600}
lab.picture(style.curves({name: (depths,
                                 [100 * data_loading.waiting_share(times, 1.0, depth)
                                  for depth in depths])
                            for name, times in cases.items()},
                           "batches read ahead", "% of the time spent waiting",
                         "A step takes 1; one reader"),
            "Without reading ahead all three wait for about half of the time. Always "
            "0.8 drops to zero with one batch ahead. The second falls slowly, to 3% "
            "with 16 batches. Always 1.2 stays at a sixth, at any depth")

# %% [markdown]
# **What you should see:**
#
# - **One** batch ahead helps most: reading and computing overlap.
# - **More** batches hide occasional slow reads. The queue has to cover as many steps as the slowest read takes, and more if
#   slow reads come in groups. (The last 3% are two slow reads at the very start, when the queue is empty.)
# - **No** depth helps if reading is too slow on average. Use more readers.
#
# > **Question.** What does depth cost?
#
# <details><summary>Answer</summary>
# Memory: 0.7 GB for each batch here. The library's <code>data.ahead</code> is 2 by default. Long queues also hide a problem
# while they are full. If a run is fast for its first hundred steps and slow from then on, it has emptied its queue.
# </details>
#
# ## Exercise: read ahead
#
# Write `ahead(batches, depth)`: a generator that yields what `batches` yields, in the same order. Meanwhile a thread reads
# up to `depth` of them before the caller asks for them.
#
# - `ThreadPoolExecutor(1)` of `concurrent.futures` is one thread with a queue of jobs. `pool.submit(next, source, END)`
#   asks it to read one more batch, and returns a `Future` at once. Its `.result()` waits for the batch.
# - `next(source, END)` returns `END` after the last batch. `next` needs an iterator, and `batches` may be a list, so write
#   `source = iter(batches)`.
# - A `deque` holds the futures of the batches on their way, oldest first.
# - An error in reading must come out of the generator when that batch's turn comes: `.result()` does that by itself.
# - When a caller leaves the loop early, Python closes the generator. Then the thread has to end. A `with` block around the
#   executor does that.
#
# > **Question, before you write.** When should you ask for the next read: before or after the `yield` that hands out a
# > batch?
#
# <details><summary>Answer</summary>
# Before. A generator stops at <code>yield</code> until the caller asks for the next batch, and then the training has
# finished with this one. Code after the <code>yield</code> runs too late to overlap with the training.
# </details>

# %% exercise="read-ahead"
from course.lab.exercises.lesson03_data_loading import ahead

# %%
check("read-ahead")

# %% [markdown]
# Try it on a reader that takes 6 ms for most batches, and 40 ms for one in ten. A step takes 12 ms.
#
# > **Predict.** 60 steps without waiting take 0.72 s. How long do they take with a depth of 1, and how long with 4?

# %%
# your prediction for 1 and 4; for 0 just add
my_seconds = {0: 1.3, 1: 0.72, 4: 0.72}

# %%
def slow_batches(count: int = 60) -> Iterator[int]:
    """Numbers from a reader that is sometimes late."""
    for number in range(count):
        time.sleep(0.040 if number % 10 == 9 else 0.006)
        yield number


def train_on(batches: Iterable[Any]) -> float:
    """Seconds of as many steps as there are batches."""
    begin = time.perf_counter()
    for _ in batches:
        time.sleep(0.012)
    return time.perf_counter() - begin


for depth in (0, 1, 4):
    with closing(ahead(slow_batches(), depth) if depth else slow_batches()) as source:
        lab.beside(f"{depth} ahead", my_seconds[depth], train_on(source), "s")

# %% [markdown]
# **What you should see:** about 1.3 s without reading ahead. With one batch ahead it takes about 0.9 s, because the training
# still waits for most of each slow read. With four it takes nearly 0.75 s.

# %%
file.unlink(missing_ok=True)     # 83 MB that you no longer need

# %% [markdown]
# ## Open task: a loader for a slow disk
#
# *Optional, about 40 minutes. Nothing later needs it.* Your `ahead` has one thread, and a run that ends loses its place. A file
# server serves several reads at once, and sometimes one of them takes long. Put the pieces of this lesson together: an order, a
# position, threads, a bounded queue. Our solution has about 20 lines.
#
# **Contract**
#
# - `Loader(read, order, threads, depth, position=0)`: `read(i)` returns sample `i`. Any thread may call it, and several may
#   call it at once, but never more than `threads`. `order` is a list of numbers, as your sampler gives them.
# - `iter(loader)` is a generator of the samples from `position` on, in the order of the list.
# - `loader.position` counts the samples that were handed out. A new loader with this position continues with the next sample.
# - If a read fails, the generator raises its error when that sample's turn comes. The samples before it are good. `position`
#   does not count the failed one, so a new loader tries it again.
# - When the generator is closed early, no further read begins, and no thread is left.
#
# **Levels.** The check has a simulated disk that counts reads, and on which single reads can take long. Each level counts by
# itself, once the first is reached:
#
# | level | what the check counts |
# |---|---|
# | correct | the contract, with or without threads |
# | overlapped | `threads` reads run at once; during a slow read, earlier samples come out, later ones are read ahead |
# | memory budget | no read begins more than `depth` samples ahead; of the samples handed out, only the last is kept |
#
# Start with correct. `lab.hint("loader")` opens the first of three hints, and each further call opens the next one.

# %% exercise="loader"
from course.lab.exercises.lesson03_open_task import Loader  # noqa: F401

# %%
check("loader")

# %% [markdown]
# ## Summary
#
# - Bytes of a sample times samples a second: every station must carry this. The page cache and the link set the floors.
# - The order of samples can be a pure function of seed and position. One number is enough to resume, on any number of
#   ranks.
# - Read ahead: one batch overlaps reading and computing, more hide slow reads, none helps if the average is too slow.
# - Pinned memory, a second stream and events bring a batch to the GPU during the step. Without the events the data are
#   wrong, and nothing tells you.
# - A loader is fast enough if it is faster than the model, and models get faster.
#
# ## Questions
#
# 1. Your GPUs wait for data, and eight more workers do not help. What do you measure next?
# 2. You change the global batch in the middle of a run. Which samples come next, and does any come twice in its epoch?
# 3. Which loader would you choose for text, and why does it hardly matter?
#
# **Check your work** from a terminal: `course check notebooks/03_data_loading_mine.ipynb`.
#
# Next: [lesson 04](04_mixed_precision.ipynb), where the model becomes several times as fast with fewer bits.
