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
# A GPU that waits for data is an expensive way to heat a room. Whether it waits is simple arithmetic, if you know how many
# bytes a sample has and how fast each station on its way is. In this lesson you do that arithmetic, find out why PyTorch's
# DataLoader often stays far below it, and write the two pieces of a loader that decide everything: *which* samples a
# process reads, and *when* it reads them.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 90 minutes |
# | computing | half a minute on two cores |
# | you write | a sharded sampler (4 lines), a reader that works ahead (9) |
# | you measure | loaders on your machine beside the least that reading costs; and read what they do on an H200 |
#
# You should have done [lesson 01](01_baseline.ipynb). Work in a copy: *File → Save Notebook As…*,
# `03_data_loading_mine.ipynb`.

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
torch.set_num_threads(1)         # in this lesson, readers are what runs in parallel

# %% [markdown]
# ## What a sample costs
#
# The reference data: a state of the weather has 20 channels on 360 × 720 points, in float32. A sample is a **pair**: the
# state now, and the state six hours later. A batch has 16.
#
# > **Predict.** How many megabytes does a pair have? The compiled model of lesson 01's last table trains about 180 samples
# > a second on one H200. How many gigabytes a second is that?

# %%
my_mb = 10                       # your prediction, for a pair
my_gb_per_second = 1.0           # your prediction, for 180 pairs a second

# %%
state_bytes = 20 * 360 * 720 * 4
pair_bytes = 2 * state_bytes
lab.beside("a pair", my_mb, pair_bytes / 1e6, "MB", "counted")
lab.beside("180 pairs a second", my_gb_per_second, 180 * pair_bytes / 1e9, "GB/s", "counted")

# %% [markdown]
# 41 MB a sample is much: an image for a classifier has a tenth of a megabyte, a text of 2048 tokens four kilobytes. Text
# never waits for a disk. Weather, video and medical volumes do.
#
# ## The way of a byte
#
# From a file to a matrix multiplication a byte passes these stations:
#
# 1. the **disk**, or a file system on the other side of a network: one to a few GB/s;
# 2. the **page cache**: memory in which the operating system keeps what was read from files, for as long as nobody else
#    needs that memory. The second epoch comes from here, if the data fit;
# 3. the program's **own memory**: `read` copies from the page cache into it;
# 4. **pinned memory**: memory that the operating system promises not to move. Only from there can a GPU fetch on its own;
# 5. the **link** (PCIe), and the GPU's memory at its end.
#
# The second one you can see. The next cell writes a file of two pairs and reads it again and again: first asking the
# operating system each time to forget the file, so that the bytes come from the disk, then without.
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
    np.random.default_rng(0).standard_normal((2, 2, 20, 360, 720), np.float32).tofile(out)
    out.flush()
    os.fsync(out.fileno())       # what is not on the disk yet cannot be forgotten
memory = np.ones(2 * pair_bytes, np.uint8)


def read_file(forget: bool) -> float:
    """Seconds to read the file into memory that is there already."""
    handle = os.open(file, os.O_RDONLY)
    if forget and hasattr(os, "posix_fadvise"):      # Linux; elsewhere it stays in the cache
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    begin, done = time.perf_counter(), 0
    while done < len(memory):
        done += os.preadv(handle, [memory[done:].data], done)
    seconds = time.perf_counter() - begin
    os.close(handle)
    return seconds


disk, cache = (sorted(read_file(forget) for _ in range(5))[2] for forget in (True, False))
print(f"from the disk {memory.nbytes / disk / 1e9:.1f} GB/s, from the page cache {memory.nbytes / cache / 1e9:.1f} GB/s")
lab.beside("the page cache over the disk", my_times, disk / cache, "times")

# %% [markdown]
# **What you should see:** a few times as fast; how many depends on your disk. (On a cloud machine "the disk" may itself
# be a cache on somebody else's computer, and on macOS this cell cannot make the system forget.) If you measure a loader
# in its second epoch, you measure the page cache. That is fine if the training will run from there, too: 10 years of
# this data are 300 GB, and a node such as NVIDIA's DGX H100 has 2 TB (its data sheet).
#
# `os.preadv` deserves a look: it reads so many bytes at such a place of a file, *into memory that you give it*. While it
# copies, it lets go of Python's lock, so several threads can do it at once.
#
# ## Floors
#
# Two stations are hard to avoid: the page cache's bytes have to be copied into memory, and memory has to be copied to
# the GPU. (NVIDIA's GPUDirect Storage goes from the disk straight to the GPU, where machine and file system allow it;
# then there is no page cache either.) How fast each can be at best is a **floor** (of the time; a ceiling of the
# speed). On the H200's machine they were measured with nothing else going on:

# %%
recorded = lab.results("loaders_h200")
floors = recorded["page cache to memory"]
rows = {f"page cache to memory, {n} thread{'s' * (n != '1')}": speed for n, speed in floors.items()}
rows["pinned memory to the GPU"] = recorded["pinned to GPU"]
lab.recorded("loaders_h200", {name: {"pairs/s": speed, "GB/s": speed * pair_bytes / 1e9} for name, speed in rows.items()},
             why="Nothing but copying, of pairs of 41 MB")

# %% [markdown]
# > **Question.** The model wants about 180 pairs a second. Which station is in the way?
#
# <details><summary>Answer</summary>
# With one thread that reads, the way out of the page cache; with several, none. Eight threads read four times as much
# as the model wants, and the link carries seven times as much. So a loader that is slower than this has only itself to blame.
# </details>
#
# ## Which sample, when, and by whom
#
# In training every sample comes once an epoch, in an order that looks random and differs from epoch to epoch. With n
# data-parallel ranks (lesson 07) each step's *global* batch is cut into n parts, a part for each rank. The usual way to
# get there is a random generator in each process, whose state one saves, restores, and keeps in step. There is a
# simpler one: make the order a **pure function**. `samples_at(seed, n, start, stop)` says which samples stand at the
# places `start` to `stop − 1` of the endless stream of shuffled epochs of n samples:

# %%
print("places 0 to 9:  ", order.samples_at(0, 10, 0, 10).tolist())
print("places 10 to 19:", order.samples_at(0, 10, 10, 20).tolist())
print("places 8 to 11: ", order.samples_at(0, 10, 8, 12).tolist())
lab.show("course.data.order.samples_at")

# %% [markdown]
# Global batch k consists of the places kB to (k + 1)B − 1, and each rank takes its contiguous part. Draw it, for 10
# samples, batches of 4 and two ranks:

# %%
lab.picture(data_loading.stream(0, samples=10, batch=4, ranks=2, steps=5),
            "Five rows of four tiles with sample numbers. The first two tiles of each row are rank 0's, the others rank 1's. "
            "After ten tiles, in the middle of the third row, the second epoch begins")

# %% [markdown]
# The third batch has the end of one epoch and the beginning of the next: nothing is left over, nothing is padded.
#
# > **Question.** A run has consumed 28 samples and dies. What has to be saved so that it goes on with just the samples that
# > it would have seen? And if it goes on with four ranks instead of two?
#
# <details><summary>Answer</summary>
# One number, 28. The order follows from the seed and from that. The number of ranks does not matter, because the stream
# belongs to the training and not to a rank: it is only cut differently.
# </details>
#
# ## Exercise: a sharded sampler
#
# Write `train_batches`, a generator without end: each `yield` is the list of this rank's sample ids for the next global
# batch. It begins after `consumed` samples, which need not be whole batches: the run may have had others before. You have
# `samples_at`, from above, and `my_slice(global_batch, ranks, rank)`, the slice of a global batch that is this rank's.
# (`array.tolist()` makes a list of an array.)

# %% exercise="sharded-sampler"
from course.data.order import train_batches

# %%
check("sharded-sampler")

# %% [markdown]
# What happens if somebody gets it wrong? A favourite mistake: every rank shuffles with *its own* seed and takes its part.
# No error, every batch has the right shape, the loss goes down.
#
# > **Predict.** With 4 ranks: how many percent of the samples does such a training see in its first epoch?

# %%
my_percent = 95                  # your prediction

# %%
def seen(own_seeds: bool, samples: int = 1200, batch: int = 24, size: int = 4) -> float:
    """Percent of the samples that at least one rank reads in one epoch."""
    found = set()
    for rank in range(size):
        mine = train_batches(rank if own_seeds else 0, samples, batch, size, rank, 0)
        for _ in range(samples // batch):
            found.update(next(mine))
    return 100 * len(found) / samples


print(f"one seed for all: {seen(False):.0f}%")
lab.beside("a seed for each rank", my_percent, seen(True), "%", "counted")

# %% [markdown]
# **What you should see:** about two thirds. Each rank reads a quarter, but quarters of different orders overlap: a sample
# is in none with the probability $(3/4)^4 = 32\%$. Others come two, three or four times. Over many epochs it evens out;
# nobody would notice but for a validation loss that is a little worse.
#
# PyTorch's own `DistributedSampler` shuffles with one seed, so it is safe from that. Two things about it are worth knowing:
# it repeats the same order in every epoch unless you call `set_epoch(epoch)`, and it starts each epoch at the beginning, so
# a run that is resumed in mid-epoch has to skip what it has seen. `torchdata`'s stateful loaders and this course's pure
# function are two cures.
#
# Now resume yours, on another number of ranks:

# %%
straight = train_batches(7, 100, 8, 2, 0, 0)
for _ in range(20):
    next(straight)
print("rank 0 of 2, the 21st batch:       ", next(straight))
print("resumed after 20 batches:          ", next(train_batches(7, 100, 8, 2, 0, 160)))
print("resumed on 4 ranks, ranks 0 and 1: ", *(next(train_batches(7, 100, 8, 4, rank, 160)) for rank in (0, 1)))

# %% [markdown]
# ## Workers
#
# PyTorch's `DataLoader` reads in the training process itself (`num_workers=0`), so that training waits, or in worker
# processes, each of which reads whole batches. This is the library's loader over it, the baseline of all others:

# %%
lab.show("course.data.loaders.native.loader")

# %% [markdown]
# The number of workers is the knob that everybody turns. The course that this one follows turned it on an A100, with the
# same model and pairs of the same size, in samples per second of training:
#
# | | samples/s |
# |---|--:|
# | no workers: the training process reads | 8.8 |
# | 4 workers | 12.5 |
# | 8 workers | 12.1 |
# | 16 workers | 10.6 |
# | NVIDIA DALI, 8 threads | 13.2 |
#
# (NERSC, "Deep Learning at Scale", TF32.) There is a best number, and it is small. Why do 16 not read faster than 4?
# Because of what a worker has to do besides reading. It is another *process*: its memory is not the trainer's. So it
#
# 1. reads a state from the page cache into fresh memory,
# 2. normalises it: a pass for the mean, a pass for the standard deviation,
# 3. copies it into its place in the batch,
# 4. copies the batch into *shared* memory, where the trainer finds it;
#
# and a thread of the training process
#
# 5. copies it into pinned memory.
#
# > **Predict.** Of the time that all this takes, how many percent is reading?

# %%
my_reading = 70                  # your prediction, percent

# %%
background_load.report()
mean, std = np.zeros((20, 1, 1), np.float32), np.ones((20, 1, 1), np.float32)
ready = torch.ones(2, 20, 360, 720)                  # stands for pinned memory, which is kept and used again


def like_a_worker(number: int) -> dict[str, float]:
    """Milliseconds of what happens to one pair."""
    marks = [time.perf_counter()]
    states = np.empty((2, 20, 360, 720), np.float32)
    handle = os.open(file, os.O_RDONLY)
    os.preadv(handle, [states.reshape(-1).view(np.uint8).data], (number % 2) * pair_bytes)
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
    parts = ("read", "normalise", "into the batch", "into shared memory", "into pinned memory")
    return {part: 1e3 * (end - begin) for part, begin, end in zip(parts, marks, marks[1:], strict=False)}


laps = [like_a_worker(number) for number in range(7)][2:]
worker = {part: sorted(lap[part] for lap in laps)[2] for part in laps[0]}
for part, ms in worker.items():
    print(f"{part:20} {ms:6.1f} ms")
lab.beside("reading", my_reading, 100 * worker["read"] / sum(worker.values()), "%")

# %% [markdown]
# **What you should see:** a fifth, more or less. The expensive part is often the fourth: new shared memory for every
# batch has to be handed out by the operating system page by page, and cleared.
#
# And all of it is traffic on one resource that more workers do not multiply: the machine's **memory bandwidth**. Count
# it in units of a pair's bytes. Each of the five steps reads them once and writes them once, and normalising does both
# twice: 12 passes in all, 0.5 GB for a pair of 41 MB.
#
# > **Question.** 180 pairs a second of that is how many GB/s? And what does the smallest loader have to move?
#
# <details><summary>Answer</summary>
# 90 GB/s, a good part of what all cores of a server together can move. At least one read and one write, from the page cache
# straight into pinned memory, and a read by the GPU: 22 GB/s.
# </details>
#
# A worker also prepares a batch by itself, from its first byte to its last. A batch of 16 pairs is 0.7 GB; a worker
# that needs 60 ms for a pair has it ready after a second. More workers give more batches, but each still takes as long.
# And each takes memory: every worker keeps two batches waiting (`prefetch_factor`), which is 21 GB for 16 workers.
#
# ## Reading ahead
#
# Whoever does the reading, it should happen *while* the GPU computes. So read the next batch before it is asked for: a
# **queue** between one who reads and one who computes. How long should it be?
#
# Below, a step takes 1 and reading takes 0.8 on average. In the first case each read takes just that. In the second one
# read in twenty takes 6, because a file server was busy, and the others less. In the third, reading takes 1.2 on average.
#
# > **Predict,** for each case: from which depth on does the training no longer wait?

# %%
depths = [0, 1, 2, 4, 8, 16, 32]
cases = {"always 0.8": [0.8] * 600, "0.8 on average, one in 20 takes 6": data_loading.read_times(0.8, 6.0, 20),
         "always 1.2": [1.2] * 600}
lab.picture(style.curves({name: (depths, [100 * data_loading.waiting_share(times, 1.0, depth) for depth in depths])
                            for name, times in cases.items()},
                           "batches read ahead", "% of the time spent waiting", "A step takes 1; one reader"),
            "Without reading ahead all three wait for about half of the time. Always 0.8 drops to zero with one batch ahead; the "
            "second falls slowly, until 16 batches are read ahead, to 3%; always 1.2 stays at a sixth, however many")

# %% [markdown]
# Three lessons. **One** batch ahead is worth the most: it makes reading and computing simultaneous. **More** batches
# hide reads that are late now and then: the queue has to hold as many steps as the slowest read takes, and more where
# slow reads come in groups. (The 3% that no depth spares are two slow reads at the very start, before anything is in the
# queue.) And **no** depth helps if reading is too slow on average; more readers do.
#
# > **Question.** What does depth cost?
#
# <details><summary>Answer</summary>
# Memory: 0.7 GB for each batch here. The library's <code>data.ahead</code> is 2 by default. Longer queues also hide a
# problem for as long as they are full: a run that is fast for its first hundred steps and slow from then on has emptied its
# queue.
# </details>
#
# ## Exercise: read ahead
#
# Write `ahead(batches, depth)`: a generator that yields just what `batches` yields, in the same order, while a thread reads
# up to `depth` of them before they are asked for.
#
# - `ThreadPoolExecutor(1)` of `concurrent.futures` is one thread with a queue of jobs. `pool.submit(next, source, END)`
#   asks it to read one more batch, and returns at once with a `Future`, whose `.result()` waits for it. (`next(source,
#   END)` returns `END` after the last batch.) `next` asks an iterator: `source = iter(batches)`, since `batches` may be a list.
# - A `deque` holds the futures of the batches that are on their way, oldest first.
# - What reading raises must come out of the generator when that batch's turn comes: `.result()` does that by itself.
# - Leaving a loop early closes the generator: then the thread has to end. A `with` block around the executor sees to
#   that.
#
# > **Question, before you write.** When should the next read be asked for: before a batch is handed out by `yield`, or
# > after it?
#
# <details><summary>Answer</summary>
# Before. A generator stops at <code>yield</code> until the next batch is asked for, and that is when the training has
# finished with this one. What stands after it runs too late to be done meanwhile.
# </details>

# %% exercise="read-ahead"
from course.lab.exercises.lesson03_data_loading import ahead

# %%
check("read-ahead")

# %% [markdown]
# Try it on a reader that is late now and then: 6 ms for a batch, and 40 ms for one in ten. A step takes 12 ms.
#
# > **Predict.** 60 steps with nothing to wait for take 0.72 s. How long do they take with a depth of 1, how long with 4?

# %%
my_seconds = {0: 1.3, 1: 0.72, 4: 0.72}              # your prediction for 1 and 4; for 0 just add

# %%
def slow_batches(count: int = 60) -> Iterator[int]:
    """Numbers from a reader that is late now and then."""
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
# **What you should see:** about 1.3 s without reading ahead; about 0.9 s with one batch ahead, since every late read is
# still late by most of what it takes; nearly 0.75 s with four.
#
# ## To the GPU
#
# The batch lies in memory; now it has to cross the link. In the picture a copy takes a third of a step.

# %%
lab.picture(data_loading.streams(data_loading.copy_and_compute(1.0, 3.0, 3, ahead=False), "Copy, compute, copy, compute"),
            "One lane in which a short copy and a long step alternate, three times")
lab.picture(data_loading.streams(data_loading.copy_and_compute(1.0, 3.0, 3, ahead=True), "The next copy beside the step"),
            "Two lanes. Above, the copies, the second one while the first step is under way, the third while the second is. "
            "Below, three steps with no gap between them")

# %% [markdown]
# A GPU has *copy engines* beside its multiprocessors, so both can happen at once. It takes three things:
#
# - **pinned memory.** A GPU fetches by physical addresses, and the operating system may move or swap out ordinary memory at
#   any moment. So a copy from ordinary memory goes through a small pinned buffer of the driver, piece by piece, and the
#   host has to take part, even with `non_blocking=True`;
# - **a stream of its own.** A stream is a queue of work for the GPU. What stands in one stream is done in order, so a copy
#   in the stream that computes waits for the step before it. Another stream has an order of its own;
# - **events.** Two streams know nothing of each other. An event is a mark in one, at which another can be told to wait.
#
# The library has a class for each of two things: the memory that a batch is read into, and the way from there to the GPU.
# This is the memory. On a CPU there is nothing to copy away, and the batch simply stays where it was read.

# %%
lab.show("course.data.loaders.threads.Buffer")

# %% [markdown]
# And this brings a batch to the GPU. What `send` is given, a `BatchRead`, is a batch on its way from the files into such a
# buffer. Threads read it, piece by piece; `reading.wait()` waits until all pieces are there, `reading.memory` is the buffer's
# memory with the batch in it, and `reading.samples` are its sample ids.

# %%
lab.show("course.data.loaders.threads.DeviceStage")

# %% [markdown]
# > **Question.** What goes wrong without each of these lines, and would you notice?
# >
# > 1. `stream.wait_event(ready)`
# > 2. `tensor.record_stream(stream)`
# > 3. `reading.buffer.copied = ...`, which `Buffer.take` waits for before it lets anybody write into that buffer
#
# <details><summary>Answer</summary>
# 1. The step starts before its batch is there, and computes with whatever the memory held: often the batch before, so the
#    loss looks good.
# 2. PyTorch's allocator knows that the memory belongs to the copying stream. When Python lets go of the batch, the step
#    that reads it is queued but perhaps not done; the allocator hands the memory to the next copy, which overwrites it.
#    <code>record_stream</code> says that the other stream uses it, too, so that it is given away only when that one has got
#    so far.
# 3. The threads read the next batch into pinned memory that the GPU is still fetching from: half of one batch, half of
#    another. <br>None of them crashes, none happens each time, and all of them look like noise in the loss. So they are not
#    found by looking at curves: compare the bits of batches with those of a loader that copies one after the other, while a
#    long kernel keeps the GPU busy.
# </details>
#
# The third one you can see without a GPU, with a thread in the place of the copy engine. It fetches a batch from a buffer,
# slowly, while the loader goes on.
#
# > **Predict.** Of 20 batches, how many arrive spoilt, if nobody waits for the copy before the buffer is written again?

# %%
my_torn = 3                      # your prediction


# %%
def torn(wait: bool, batches: int = 20) -> int:
    """How many batches arrive with something else in them, when an engine of its own fetches them from one buffer."""
    buffer, arrived = np.zeros(64), list[np.ndarray]()

    def fetch() -> None:
        there = np.empty_like(buffer)
        for start in range(0, 64, 8):
            there[start:start + 8] = buffer[start:start + 8]
            time.sleep(0.0005)
        arrived.append(there)

    with ThreadPoolExecutor(1) as engine:
        for number in range(batches):
            buffer[:] = number                       # the next batch is read into it
            copied = engine.submit(fetch)
            if wait:
                copied.result()                      # what the event is for
            time.sleep(0.002)                        # reading takes a while
    return sum(bool((there != number).any()) for number, there in enumerate(arrived))


lab.beside("spoilt batches", my_torn, torn(False), how="counted")
print(f"and when the copy is waited for: {torn(True)}")

# %% [markdown]
# **What you should see:** nearly all, mixtures or even whole batches in the place of others, and not one error message.
# With a single buffer that is waited for, reading and copying take turns. So the loader has a ring of buffers, and
# waits only for the one that it is about to use again.
#
# One more look at `send`: it normalises **on the GPU**. The states cross the link as they stand in the file.
#
# > **Question.** Normalising a pair took your machine some milliseconds, above. A GPU reads and writes its memory at 3 TB/s
# > or more. What does it take there? And may the result differ?
#
# <details><summary>Answer</summary>
# Two passes that read and write 41 MB each are 0.17 GB: 50 microseconds. Subtraction and division in float32 are rounded in
# the same way everywhere (IEEE 754), so the bits are the same, as long as nobody replaces the division by a multiplication
# with the reciprocal. The library's tests compare the loaders bit for bit.
# </details>
#
# ## Threads in place of processes
#
# Put it together, and a loader needs no worker process at all. Threads share memory, so nothing is copied between them;
# Python's lock, which keeps threads from *computing* at the same time, is let go of while bytes are read. HDF5, the format
# of the weather's files, comes with a library that has a lock of its own and reads one thing at a time; so the loader asks
# it only *where* in the file the bytes of a state lie, and reads them with `preadv`.

# %%
lab.show("course.data.loaders.threads.loader")

# %% [markdown]
# Find your own two exercises in it: `batches` come from your sampler; `free`, a ring of `ahead` buffers, limits how far it
# reads ahead. From the page cache straight into pinned memory, from there to the GPU: each byte is moved by a core once.
#
# ## DALI
#
# NVIDIA's **DALI** is a library of pipelines for data: you describe what happens to a batch as a graph of operators,
# and it runs ahead by itself, on CPU threads or on the GPU. It has readers for images, video, audio and NumPy files,
# and none for HDF5. What it cannot read, Python does, in a **parallel external source**: worker processes that call
# your function and put what it returns into shared memory *that stays*, a ring of it, so that no batch needs new
# memory.

# %%
lab.show("course.data.loaders.dali.hdf5_pipeline")

# %% [markdown]
# Where DALI shines is decoding: JPEG and video on the GPU. Here there is nothing to decode. What is left is its queue, and
# a better way between processes.
#
# ## Measure
#
# `course bench loaders` runs all of them, on nothing but reading: a caller takes batches and throws them away. First on
# your machine, on small pairs (32 × 64 points, 0.33 MB), which it makes. DALI is left out if it is not installed.
#
# > **Predict,** for your machine, as a share of what one thread reads from the page cache: the training process itself (0
# > workers), DataLoader with 2 worker processes, two threads.

# %%
my_share = {"native, 0": 50.0, "native, 2": 100.0, "threads, 2": 90.0}          # your prediction, percent

# %%
background_load.report()
found = loaders.main(["train.global_batch=16"], True, ["native", "threads", "dali", "dali_numpy"], [1, 2], 0.1,
                     torch.device("cpu"))

# %%
mine = {f"{kind}, {n}": speed for kind, speeds in found["loaders"].items() for n, speed in speeds.items()}
floor = found["page cache to memory"]["1"]
for name, predicted in my_share.items():
    lab.beside(f"{name} workers, of the floor", predicted, 100 * mine[name] / floor, "%")

# %% [markdown]
# **What you should see:** on small pairs worker processes are *slower* than no workers: there is little to read, and
# handing a batch from process to process costs more. That is no reason to use none. Without workers reading and computing
# take turns, with them they overlap; a loader is fast enough when it keeps up with the model, and yours of lesson 01 takes
# a hundred samples a second or so. Every loader in the table gives far more. (Two cores are also shared by reader and
# caller here: do not expect two of anything to read twice as much.)
#
# > **Question.** Threads stay below the floor too, though they move each byte once. What else do they do here?
#
# <details><summary>Answer</summary>
# On a CPU they also normalise, and they read into memory that is new for each batch, since the batch stays in it; the floor
# reads into the same memory again and again. On a GPU both are gone.
# </details>
#
# ## On an H200's machine
#
# Pairs of 41 MB, batches of 16, 16 cores, everything in the page cache, copied to the GPU.
#
# > **Predict.** With 8 workers: how many pairs a second does the DataLoader give, and how many do threads?

# %%
my_native, my_threads = 200.0, 400.0                 # your prediction, pairs/s

# %%
speeds = recorded["loaders"]
lab.recorded("loaders_h200", {kind: {f"{n}": row.get(n, "") for n in ("0", *floors)} for kind, row in
                              {"floor: page cache to memory": floors, **speeds}.items()},
             why="Pairs per second; columns: worker processes or threads")
lab.beside("\nnative, 8 processes", my_native, speeds["native"]["8"], "pairs/s", "recorded")
lab.beside("8 threads", my_threads, speeds["threads"]["8"], "pairs/s", "recorded")

# %%
rungs = {row["rung"]: row for row in lab.results("vit_h200")["rows"] if "samples_per_s" in row}
needs = {"the model in bf16, compiled": rungs["bf16, compiled"]["samples_per_s"],
         "the model in TF32": rungs["tf32, on the device"]["samples_per_s"]}
lab.picture(data_loading.speeds_by_workers(speeds, {"floor": floors}, needs, "Loaders on an H200's machine, pairs of 41 MB"),
            "Pairs per second against workers. The floor rises from about 130 with one thread to about 1050 with 16; DALI over "
            ".npy files and threads lie close to it, the latter up to 12; DALI over HDF5 below, at about 280, and the DataLoader "
            "lowest, at 25 to 80. A horizontal line for the compiled model lies between them, one for TF32 near the bottom")

# %% [markdown]
# **What you should see:** three kinds of loader. Those that move each byte once, threads and DALI over `.npy` files, lie on the
# floor or close to it; but 16 threads on 16 cores are slower than 12. DALI with its processes reaches a quarter to a third of
# it: what they read has still to come out of their shared memory. The DataLoader gets half as fast again from 1 to 8
# workers and twice as fast once more with 12, and stays far below.
#
# And two lines for what the model wants. A loader that reads ahead and lies *above* the line costs nothing, however
# much faster another one is. In TF32 all of them lie above it: there, nothing in this lesson matters but reading ahead.
# It is when the model gets faster (lessons 04 and 05) that the loader becomes the bottleneck, at some moment, without
# having changed.
#
# ## Together
#
# > **Predict.** The compiled model, fed by 12 threads: how many samples a second will the training do? Take the lower of two
# > numbers, and then think of what the two have to share.

# %%
my_rate = min(needs["the model in bf16, compiled"], speeds["threads"]["12"])    # a prediction from what you know; yours?

# %%
lab.beside("bf16, compiled, threads", my_rate, rungs["bf16, compiled, threads"]["samples_per_s"], "samples/s", "recorded")

# %%
fed = {"TF32": {"random data on the device": "tf32, on the device",
                "the training process reads": "tf32, read by the training process",
                "8 processes of a DataLoader": "tf32, 8 loader processes"},
       "bf16, compiled": {"random data on the device": "bf16, compiled",
                          "8 processes of a DataLoader": "bf16, compiled, 8 loader processes",
                          "12 threads": "bf16, compiled, threads", "DALI, 12 processes": "bf16, compiled, DALI",
                          "DALI on .npy files": "bf16, compiled, DALI on .npy files"}}
bars = {kind: {name: rungs[rung]["samples_per_s"] for name, rung in ways.items()} for kind, ways in fed.items()}
lab.picture(style.grouped_bars(bars, "samples/s", "Training steps of the weather model on one H200"),
            "Bars of samples per second. Those in TF32 are short; read by the training process a quarter shorter than on the "
            "device, by 8 processes as long. In bf16 8 processes of a DataLoader reach a good third; threads and both "
            "kinds of DALI come within a few percent of random data on the device")

# %% [markdown]
# **What you should see:** in TF32 even a loader that makes the step wait costs only a quarter, since the step itself is
# so slow, and eight processes win that back. In bf16 the same eight processes starve the model. Threads and DALI, which
# read far ahead, cost a few percent. The lower of the two speeds is a good prediction where they are far apart. What it
# leaves out: copies to the GPU, and what normalises there, share the GPU's memory with the model. And a loader's speed
# belongs to its machine: the DataLoader, which gave 37 pairs a second on 16 cores, gives 67 in these steps, on a
# machine with 32.
#
# ## In practice
#
# ```
# course bench loaders                                        # all loaders on this machine, beside the floors
# course bench loaders --workers 4,8 --loader threads data.path=data/my-weather
# course train vit-opt data.loader=threads data.workers=8     # native, threads, dali, dali_numpy: the same bits
# course data numpy data/my-weather                           # one .npy file a state, for dali_numpy
# course profile vit-opt data.workers=8                       # does the step wait for data? (lesson 02)
# ```
#
# - First ask whether the step waits for data at all: train on `data.source=mock`, on the same device. If it is not faster,
#   stop here.
# - Then the floors. If the model wants more than they give, the data have to become smaller: store 16 bits, crop, compress.
# - Then the loader. Count how often it copies a byte, and where it asks for new memory.
# - `num_workers` has an optimum; find it by measuring, on the machine that you will train on, with all of its GPUs at work.
# - On a file server chunk your files so that a sample is one contiguous read of a megabyte or more.
#
# ## What you know now
#
# - Bytes of a sample times samples a second is what every station on the way has to carry; page cache and link are floors.
# - The order of samples can be a pure function of (seed, place): shuffled anew each epoch, cut for any number of ranks,
#   resumed from one number.
# - Read ahead: one batch makes reading and computing simultaneous, more hide what is late, none helps where the average
#   is too slow.
# - Pinned memory, a stream of its own and events bring a batch to the GPU beside the step; without the events it is wrong
#   in silence.
# - A loader is fast enough when it is faster than the model, and which one is faster changes with every lesson.
#
# **Check your work once more, from outside.** Save the notebook; then, in a terminal: `course check
# notebooks/03_data_loading_mine.ipynb`.
#
# Next: [lesson 04](04_mixed_precision.ipynb), where the model becomes several times as fast by using fewer bits.

# %%
file.unlink()                    # 83 MB, which nobody needs any more
