# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 07 · Data parallel
#
# Data parallelism is the simplest way to use many GPUs, and every other way is combined with it. Each rank holds the whole
# model and computes the gradient of its own samples. Then all ranks **average** their gradients. In this lesson you build it
# from single messages.
#
# **What you will learn**
#
# - How a ring all-reduce works, and why its cost hardly grows with the number of ranks.
# - How to average gradients so that training matches one process, even with padding.
# - How buckets hide communication behind the backward pass, and how to measure what stays exposed.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU. Lessons 00 and 01 |
# | reading and doing | about two hours |
# | computing | 1.5 minutes on two cores, most of it in checks |
# | you write | a ring (14 lines), averaged gradients (8), a timeline (7), buckets (9), overlap (8); optional: one class (30) |
# | you measure | bytes sent, what overlap hides, scaling efficiency |
#
# Work in a copy: *File → Save Notebook As…*, `07_data_parallel_mine.ipynb`.

# %% numbers=true
from course.bench.results import load, value

def bus(megabytes):
    return load("beginning_h200")["all_reduce"]["4"][str(megabytes)]

def step_ms(case, gpus=4, bucket_mb=25.0):
    return value("dp_h200", case, gpus=gpus, bucket_mb=bucket_mb)

bus_1_mb, bus_25_mb, bus_512_mb = bus(1), bus(25), bus(512)
small_us, ideal_us = 1.5e3 / bus_1_mb, 1.5e3 / bus_512_mb   # 1.5 MB at each bandwidth
latency_us = small_us - ideal_us
missed_mb = latency_us * bus_512_mb / 1.5e3
stack_ms = 1.5 * 4 * 24 * 12 * 1024**2 / bus_512_mb / 1e6   # all-reduce of its gradients
naive_ms = step_ms("naive") - step_ms("none")
hidden = (step_ms("naive") - step_ms("bucketed")) / naive_ms
compiled_one = step_ms("none, compiled", 1)
ddp_lost = 1 - compiled_one / step_ms("ddp, compiled")
ddp_lost_100_mb = 1 - compiled_one / step_ms("ddp, compiled", bucket_mb=100.0)

# %%
import statistics
import time
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from course.training import assemble
from course import config, parallel
from course.training import verify
from course.lab.figures import data_parallel, widgets
from course.lab.instruments import bucket_timeline, background_load
from course.lab.checks import tiny_training
from course.lab import notebook as lab
from course.lab.notebook import check
from course.lab.instruments.bytes_sent import Traffic
from course.ranks.notebook_ranks import RankError, ranks
from course.parallel.mesh import Axis

lab.begin("07")

# %% [markdown]
# ## Is the average right?
#
# Before you start several processes, let one process play two ranks. Cut a global batch of six samples, the last of them
# padding, into two halves of three. Each half gives a gradient. Suppose that each "rank" takes the mean over its own real
# samples: the first has three, the second two.
#
# > **Predict.** Average these two gradients. How far is the result from the gradient of the mean over all five real samples?
# > (Relative to that gradient's length: 0 means equal, 1 means that the difference is as long as the gradient itself.)

# %%
my_difference = 0.01             # your prediction

# %%
settings = tiny_training.settings("train.global_batch=6")
model, _ = tiny_training.model(settings, tiny_training.mesh(settings), seed=0)
whole = model.prepare(tiny_training.random_batch(torch.Generator().manual_seed(0),
                                                 settings, 6, padding=1),
                      torch.tensor(0))
halves = [{name: tensor[part] for name, tensor in whole.items()}
          for part in (slice(0, 3), slice(3, 6))]


def gradient(batch: dict[str, Tensor], factor: float) -> Tensor:
    """The gradient of factor x the sum of the samples' losses, all parameters end to
    end."""
    total, _ = model.loss(model(batch), batch)
    return torch.cat([part.flatten()
                      for part in torch.autograd.grad(factor * total,
                                                      list(model.parameters()))])


right = gradient(whole, 1 / 5)
own_means = (gradient(halves[0], 1 / 3) + gradient(halves[1], 1 / 2)) / 2
lab.beside("error of averaging each half's own mean", my_difference,
           ((own_means - right).norm() / right.norm()).item())

# %% [markdown]
# The average is wrong, here by a sixth, because each sample of the second half counts more than one of the first. A run
# trained like this looks healthy, but its result is worse than it should be.
#
# The cure is the one of lesson 01: add up, and divide once, by the weight $W$ of the **global** batch. This weight is the
# number of its real samples, here 5. At the end, averaging divides by the number of ranks `dp`, which is one division too
# many. So each rank back-propagates
#
# $$\text{sum of its losses}\cdot\frac{dp}{W}$$

# %%
shares = (gradient(halves[0], 2 / 5) + gradient(halves[1], 2 / 5)) / 2
print(f"difference with the rule sum x dp / W: "
      f"{((shares - right).norm() / right.norm()).item():.1e}")

# %% [markdown]
# The remaining difference is rounding. The rule holds for any number of ranks and any padding. Computing $W$ costs one
# all-reduce of a single number. The function `eager`, which you wrote in lesson 01, calls `global_weight` for it; there
# `dp` was 1.
#
# > **Question.** Each rank reports its share of the loss: its sum over $W$. What must you do with the shares to log the mean
# > over the global batch?
#
# <details><summary>Answer</summary>
# Add them up: the sum of all ranks' shares is the mean. A program that logs rank 0's loss alone shows the loss of a part of
# the batch. That number is noisier than it should be, and it changes with the number of ranks.
# </details>
#
# ## What each rank has
#
# Now start two real processes. Each builds the model and takes its slice of the global batch.
#
# > **Predict.** Which of these will be the same on both ranks: the ids of the samples, the weights, the gradients?

# %%
LAYOUT = ["data.source=mock", "train.device=cpu", "train.threads=1", "optim.warmup=0",
          "optim.schedule=constant"]


def look(settings):
    mesh = parallel.build_mesh(settings.parallel, parallel.join("cpu"))
    training = assemble.assemble(settings, mesh)
    mine = slice(4 * mesh.dp.rank, 4 * mesh.dp.rank + 4)
    batch = {name: tensor[mine]
             for name, tensor in training.model.example(8, torch.device("cpu")).items()}
    batch = training.model.prepare(batch, training.progress.step)
    total, _ = training.model.loss(training.model(batch), batch)
    (total * mesh.dp.size / 8).backward()
    gradients = torch.cat([p.grad.flatten() for p in training.model.parameters()])
    return (f"rank {mesh.dp.rank}: samples {batch['sample'].tolist()}, norm "
            f"of all weights "
            f"{tiny_training.flat_parameters(training.model).norm():.6f}, of all "
            f"gradients {gradients.norm():.6f}")


for line in ranks(2)(look, config.load("vit-demo",
                                       [*LAYOUT, "parallel.dp=2",
                                        "parallel.data=naive"])):
    print(line)

# %% [markdown]
# Samples and gradients differ; the weights are equal. Nobody sent the weights: the library draws each one as a pure function
# of the seed and the parameter's name. PyTorch's `DistributedDataParallel` (DDP) instead sends rank 0's weights to all ranks
# when you construct it.
#
# > **Question.** If the weights were *not* equal at the start, would averaged gradients make them so?
#
# <details><summary>Answer</summary>
# No. All ranks would take the same steps from different places and stay as far apart as they began. Their gradients would
# belong to different functions, and the average would be the gradient of nothing. The loss still goes down for a while, which
# hides the mistake. A training program should compare the weights of its ranks now and then; <code>course verify</code> does.
# </details>
#
# ## One message
#
# Two ranks have gradients, and each needs the sum. A rank can send a tensor to another rank, and it can receive one. Let
# every rank pass a number to its right neighbor, and the last rank to the first.
#
# > **Predict.** `dist.send` returns when the other rank has taken the message. What will this program do?

# %%
def pass_right():
    me, n = dist.get_rank(), dist.get_world_size()
    mine, from_left = torch.tensor([10.0 * me]), torch.empty(1)
    dist.send(mine, (me + 1) % n)
    dist.recv(from_left, (me - 1) % n)
    return from_left.item()


try:
    print(ranks(4)(pass_right))
except RankError as error:
    print(error)

# %% [markdown]
# Every rank waits for a rank that waits: a **deadlock**. On a cluster such a job hangs until its time limit. So start both
# operations, *then* wait for both: `isend` and `irecv` return at once, with an object that you `wait()` for.

# %%
def pass_right_at_once():
    me, n = dist.get_rank(), dist.get_world_size()
    mine, from_left = torch.tensor([10.0 * me]), torch.empty(1)
    for work in [dist.isend(mine, (me + 1) % n), dist.irecv(from_left, (me - 1) % n)]:
        work.wait()
    return from_left.item()


print(ranks(4)(pass_right_at_once))

# %% [markdown]
# > **Question.** What must you not do with `mine` and with `from_left` between `isend`, `irecv` and their `wait()`?
#
# <details><summary>Answer</summary>
# Do not write into <code>mine</code>, which may not have left yet. Do not read <code>from_left</code>, which may not have
# arrived. Nothing stops you, and most of the time it works. That makes the mistake hard to find.
# </details>
#
# ## All-reduce through rank 0
#
# The simplest all-reduce: all ranks send to rank 0, which adds up and sends the sum back.

# %%
def through_rank_0(x: Tensor, axis: Axis) -> Tensor:
    """The sum of x over the axis, in new memory."""
    total = x.clone()
    for rank in axis.ranks[1:]:
        if axis.rank == 0:
            coming = torch.empty_like(x)
            dist.recv(coming, rank)
            total += coming
        elif axis.rank == rank:
            dist.send(x, 0)
    for rank in axis.ranks[1:]:
        if axis.rank == 0:
            dist.send(total, rank)
        elif axis.rank == rank:
            dist.recv(total, 0)
    return total


# %% [markdown]
# > **Predict.** The model of `vit-demo` has 892,096 parameters, 3.57 MB in float32. With four ranks, how many MB does rank 0
# > send? And with 64?

# %%
my_megabytes = 3.57              # your prediction, for four ranks

# %%
def sent_by(all_reduce, numel):
    axis = tiny_training.mesh(tiny_training.settings()).dp
    x = torch.full((numel,), float(axis.rank))
    with Traffic() as traffic:
        total = all_reduce(x, axis)
    assert total.eq(axis.size * (axis.size - 1) / 2).all(), "the sum is wrong"
    return traffic.sent


one_way = ranks(4)(sent_by, through_rank_0, 892_096)
lab.beside("rank 0 sends", my_megabytes, one_way[0] / 1e6, "MB")
print("MB sent by each rank:", [round(count / 1e6, 2) for count in one_way])

# %% [markdown]
# Rank 0 sends the whole tensor to each of the others: (n − 1) times its size, and it receives as much. With 64 ranks that is
# 225 MB, while the other 63 network links are idle. The time grows with the number of ranks, so this does not scale.
#
# ## A ring
#
# All ranks should send all the time, and all should send equally much. Cut the tensor into n pieces. In every step each rank
# sends **one piece** to the right and receives another from the left:
#
# - **reduce-scatter**, n − 1 steps: a rank *adds* the arriving piece to its own numbers and passes the sum on in the next
#   step. At the end every rank has the complete sum of one piece.
# - **all-gather**, n − 1 steps: the complete sums go around the ring, and each *replaces* the rank's own numbers.
#
# The picture shows how many ranks' numbers each piece contains. An arrow marks the piece that a rank sends next, to the rank
# below; the last rank sends to the first.
#
# > **Predict, before you move the slider:** which piece will be the first that is complete on rank 0? After how many steps?

# %%
slider = widgets.explore(lambda step: data_parallel.ring(4, step), step=list(range(7)),
                         alt="A table of ranks and pieces: how many ranks' numbers "
                         "each piece contains. "
                             "An arrow marks the piece that each rank sends next.")

# %% [markdown]
# <details><summary>Answer</summary>
# Piece 1, after three steps. It started from rank 1, so rank 0 is the last rank on its way. Every rank on the way has added
# its own numbers.
# </details>
#
# Which piece does a rank send in which step? Everything follows from one rule: **a rank sends what it received in the step
# before**. A piece that stays behind would not grow. In the first step, every rank sends the piece with its own number. With
# three ranks, rank 0 first sends piece 0 to rank 1 and receives piece 2 from rank 2. So rank 0 sends piece 2 next.
#
# > **Derive it on paper.** Three ranks take four steps. Write down what each rank sends and receives in each step, first of
# > the reduce-scatter and then of the all-gather. Then find the rule for rank *r* of *n* in step *s*. Does it change where
# > the all-gather begins?
#
# > **Predict.** How many MB does each of four ranks send for the 3.57 MB?

# %%
my_ring_megabytes = 3.57         # your prediction

# %% [markdown]
# ## Exercise: all-reduce from sends and receives
#
# Write it for any number of ranks, and for tensors of any shape, even if n does not divide their size. `axis` says who you
# are: `axis.rank` of `axis.size`. `axis.ranks` holds the rank numbers that `dist.isend` and `dist.irecv` want; their third
# argument is `axis.group`. Leave `x` unchanged.
#
# Useful: `tensor_split(n)` cuts a flat tensor into n pieces of nearly equal size. The pieces are *views*: writing into a
# piece writes into the tensor. Pieces differ in size, so receive into a tensor of the right size.

# %% exercise="ring-all-reduce"
def ring_all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum of x over the axis, in new memory, made of sends to the right neighbor and receives from the left one."""
    ### BEGIN SOLUTION
    total = x.clone()
    pieces = total.view(-1).tensor_split(axis.size)
    right, left = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]
    for step in range(2 * (axis.size - 1)):
        leaving = pieces[(axis.rank - step) % axis.size]
        home = pieces[(axis.rank - step - 1) % axis.size]
        coming = torch.empty_like(home)
        for work in [dist.isend(leaving, right, axis.group), dist.irecv(coming, left, axis.group)]:
            work.wait()
        if step < axis.size - 1:
            home += coming
        else:
            home.copy_(coming)
    return total
    ### END SOLUTION

# %%
check("ring-all-reduce")

# %% [markdown]
# Now count.

# %%
around = ranks(4)(sent_by, ring_all_reduce, 892_096)
lab.beside("each rank sends", my_ring_megabytes, around[0] / 1e6, "MB")
print("MB sent by each rank:", [round(count / 1e6, 2) for count in around])

# %% [markdown]
# Each rank sends $2\,(n-1)/n$ times the tensor: 1.5 times for four ranks, and never more than twice, **however many there
# are**. So the time for the bytes does not grow with the number of ranks. The number of steps grows, and each step costs a
# *latency*, the time until the first byte arrives.
#
# No all-reduce in which the ranks do the additions can send less (Patarasuk and Yuan 2009). If the switches add (NVIDIA's
# SHARP), each rank sends its tensor only once. Data sheets and `nccl-tests` quote the *bus bandwidth* of an all-reduce:
# $2\,(n-1)/n$ × bytes / time, which is what each link of a ring carried.
#
# On GPUs, NVIDIA's library **NCCL** runs the collectives; your processes here use **gloo**, which does the same on CPUs.
# NVLink connects the GPUs of one machine. On four H200s the bus bandwidth was {result: bus_1_mb | .0f} GB/s for 1 MB,
# {result: bus_25_mb | .0f} for 25 MB and {result: bus_512_mb | .0f} for 512 MB.
#
# > **Question.** How long did 1 MB take, and how long would it have taken at {result: bus_512_mb | .0f} GB/s? What does the
# > difference say?
#
# <details><summary>Answer</summary>
# Each of four ranks sends 1.5 times the tensor: 1.5 MB / {result: bus_1_mb | .0f} GB/s = {result: small_us | .0f}
# microseconds instead of {result: ideal_us | .0f}. The other {result: latency_us | .0f} or so are latency: starting the
# collective, and six steps. In that time the ring could all-reduce {result: missed_mb | .0f} MB more. Many small messages
# are slow, so put gradients together before you send them.
# </details>
#
# ## Exercise: average the gradients
#
# From here on `dist.all_reduce(tensor, group=axis.group)` does the work: in place, on every rank of the axis. Make the
# gradient of each parameter its mean over the axis, with **one** all-reduce. Lay all gradients end to end in one tensor, and
# take it apart again afterwards.
#
# The cell imports two PyTorch functions for that. `_flatten_dense_tensors(tensors)` makes one tensor of a list.
# `_unflatten_dense_tensors(flat, tensors)` cuts it into pieces shaped like those of the list. Leave out parameters without a
# gradient (`p.grad is None`). Along an axis of one rank there is nothing to do.

# %% exercise="average-gradients"
from course.parallel.data_parallel.gradients import average_gradients

# %%
check("average-gradients")

# %% [markdown]
# The check trained a model on two and on four ranks, with the library's own training step around your function. It compared
# the weights with single-process training: they match up to rounding. The library calls this method `parallel.data=naive`.
#
# ## What if nobody averages?
#
# `parallel.data=none` leaves the communication out. It is wrong, of course, but as a *measurement* it is useful. Its time is
# the computing alone, so naive minus none is the cost of communication.
#
# > **Predict.** Train `vit-demo` for five steps on two ranks, once averaged and once not. How far apart are the weights of
# > the two ranks afterwards, at most, in units of the learning rate (0.002)? With Adam, a step moves a weight by about one
# > such unit.

# %%
my_distance = 1.0                # your prediction, for none

# %%
def distance(settings, steps):
    """The largest difference between the two ranks' weights after these steps, in
    learning rates."""
    mesh = parallel.build_mesh(settings.parallel, parallel.join("cpu"))
    training = assemble.assemble(settings, mesh)
    everyone = training.model.example(8, torch.device("cpu"))
    batch = {name: tensor[4 * mesh.dp.rank:4 * mesh.dp.rank + 4]
             for name, tensor in everyone.items()}
    for _ in range(steps):
        training.step(batch)
    mine = tiny_training.flat_parameters(training.model)
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    apart = (mine - theirs).abs().max()
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    return apart.item() / settings.optim.lr


apart = {}
for method in ("naive", "none"):
    settings = config.load("vit-demo", [*LAYOUT, "parallel.dp=2",
                                        f"parallel.data={method}",
                                        "train.global_batch=8"])
    apart[method] = ranks(2)(distance, settings, 5)[0]
print(f"naive: the weights of the two ranks differ by {apart['naive']:.1e} "
      f"learning rates")
lab.beside("none: they differ by", my_distance, apart["none"], "learning rates")

# %% [markdown]
# With averaging, the weights are equal to the last bit: equal weights and equal gradients make equal updates. Without it, the
# ranks drift apart. In five steps a rank moves a weight by up to five learning rates, so two ranks can end up to ten apart.
#
# ## Send while backward runs
#
# `naive` first computes all gradients and then sends them. While it computes, the network is idle; while it sends, the
# processor is idle. But backward has the gradients of the *last* layers early. They could travel while backward works on the
# other layers.
#
# Sending each gradient alone would pay the latency for each. So put gradients into **buckets** of some megabytes, and send a
# bucket when its last gradient is there (Li et al. 2020, *PyTorch Distributed*, section 4.2). Communication that continues
# after backward ends is **exposed**: all ranks wait for it. How much is exposed depends on the size of the buckets, on when
# they are ready, and on the speed of the network.
#
# ## Exercise: a timeline
#
# Bucket $i$ is ready at `ready[i]`, and its all-reduce lasts `seconds[i]`. All-reduces run in order, one at a time, because
# they share one network. Return when each one begins and ends.

# %% exercise="collective-times"
def collective_times(ready: list[float], seconds: list[float]) -> list[tuple[float, float]]:
    """When the all-reduce of each bucket begins and ends: in order, one at a time, none before its bucket is ready."""
    ### BEGIN SOLUTION
    times = []
    network_free = 0.0
    for at, lasts in zip(ready, seconds, strict=True):
        starts = max(at, network_free)
        network_free = starts + lasts
        times.append((starts, network_free))
    return times
    ### END SOLUTION

# %%
check("collective-times")

# %% [markdown]
# With your function you can examine a model that you cannot run: a stack of 24 transformer blocks of width 1024, as in GPT
# 350M. Its 302 million parameters have 1.2 GB of gradients in float32. Assume that backward takes 62 ms, about what an H200
# needs. On four GPUs, let an all-reduce take 20 µs plus 1.5 times its bytes over the bandwidth.
#
# > **Predict.** At {result: bus_512_mb | .0f} GB/s (NVLink), which bucket size is best: 1 MB, 25 MB, or all in one? How
# > many ms remain exposed? And what changes at 12.5 GB/s, a 100-gigabit network between machines?

# %%
def gpt(backward: float = 0.062) -> list[tuple[float, float]]:
    """(seconds, bytes) of each gradient in the order of backward: 24 blocks of four
    matrices each."""
    # second and first of the MLP, attention's out, its QKV
    matrices = [4 * 1024**2, 4 * 1024**2, 1024**2, 3 * 1024**2]
    return 24 * [(backward / 24 * size / sum(matrices), 4.0 * size)
                 for size in matrices]


def overlap_at(bucket_mb: float, gigabytes_per_s: float):
    """The timeline of backward and the all-reduces of its buckets."""
    ready, loads = data_parallel.fill_buckets(gpt(), bucket_mb * 1e6)
    spans = collective_times(ready,
                             [data_parallel.all_reduce_seconds(load, 4, gigabytes_per_s
                                                               * 1e9, 20e-6)
                              for load in loads])
    exposed = 1e3 * (spans[-1][1] - ready[-1])
    buckets = f"{len(loads)} bucket{'s' * (len(loads) > 1)} of {bucket_mb} MB"
    return data_parallel.timeline({"backward": list(pairwise([0.0, *ready])),
                                   "network": spans}, ready[-1],
                                 f"{buckets} at {gigabytes_per_s} GB/s: {exposed:.2f} "
                                  f"ms exposed")


nvlink = lab.results("beginning_h200")["all_reduce"]["4"]["512"]      # GB/s
slider = widgets.explore(overlap_at, bucket_mb=[1300, 400, 100, 25, 5, 1],
                         gigabytes_per_s=[nvlink, 50, 12.5],
                         alt="Two rows of bars over time, backward and network; "
                             "network bars after the dotted line are exposed")

# %% [markdown]
# <details><summary>Answer</summary>
# One bucket of everything is naive: it exposes the whole {result: stack_ms | .1f} ms, because nothing can leave before the
# last gradient is there. With 25 MB only the last bucket is exposed, less than 0.1 ms: there is nothing left to hide it
# behind. (No bucket cuts a parameter. So with 1 MB and with 5 MB each matrix travels alone, and the same last matrix is
# exposed.) Buckets of 100 MB expose more time than buckets of 400 MB: here their last bucket happens to be larger.<br> At
# 12.5 GB/s all the all-reduces together take 145 ms, longer than backward. The network is the bottleneck, and even the best
# buckets leave more than half of these 145 ms exposed. Then send less often (accumulation), or send fewer bits. The default
# bucket is 25 MB in PyTorch and in this library.
# </details>
#
# > **Question.** Why do the *first* buckets come from the *last* layers? And which bucket should be small?
#
# <details><summary>Answer</summary>
# Backward goes from the loss to the input, so the last layers' gradients come first. The last bucket holds the first layers
# and stays exposed, so a small one is over sooner. (DDP makes the first bucket small, 1 MB, so that the network starts early.
# In the first step DDP also learns in which order the gradients really come.)
# </details>
#
# ## Scaling efficiency
#
# How much faster are n ranks than one? There are two ways to ask:
#
# - **weak scaling**: each rank keeps its batch, so the global batch grows with n. Efficiency is the time of one rank over the
#   time of n ranks, which do n times the work.
# - **strong scaling**: the global batch stays. Efficiency is the time of one rank over n times the time of n ranks. This is
#   harder, because each rank has less to compute and as much to send.
#
# > **Predict** the weak scaling efficiency of two ranks on your machine, one thread each, with the library's buckets. How
# > many cores does your machine have? And what else do the ranks share?
#
# The speed of a machine changes from second to second, so the program alternates. Rank 0 takes a few steps alone while rank 1
# waits; then both take the same number of steps together. The efficiency is the median over these turns.

# %%
my_efficiency = 0.95             # your prediction

# %%
def by_turns(alone, together, turns=8, steps=3):
    """Seconds of a step for each turn: (by rank 0 alone, by all ranks together)."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    trainings = [assemble.assemble(alone,
                                   parallel.build_mesh(alone.parallel,
                                                       parallel.World(device=cpu))),
                 assemble.assemble(together,
                                   parallel.build_mesh(together.parallel,
                                                       parallel.join("cpu")))]
    batch = trainings[0].model.example(4, cpu)
    times = []
    for _ in range(turns + 1):
        times.append([])
        for training in trainings:
            dist.barrier()
            begin = time.perf_counter()
            if dist.get_rank() == 0 or training is trainings[1]:
                for _ in range(steps):
                    training.step(batch)
            times[-1].append((time.perf_counter() - begin) / steps)
    return times[1:]                                 # the first turn fills the caches


background_load.report()
single = config.load("vit-demo", [*LAYOUT, "train.global_batch=4"])
efficiency = {}
for method in ("none", "naive", "bucketed", "ddp"):
    settings = config.load("vit-demo", [*LAYOUT, "parallel.dp=2",
                                        f"parallel.data={method}",
                                        "train.global_batch=8"])
    times = ranks(2)(by_turns, single, settings)[0]
    alone, together = (statistics.median(turn[which] for turn in times)
                       for which in (0, 1))
    efficiency[method] = statistics.median(alone / together
                                           for alone, together in times)
    print(f"{method:10} one rank {1e3 * alone:6.1f} ms a step of 4 samples, two "
          f"{1e3 * together:6.1f} ms of 8: "
          f"efficiency {100 * efficiency[method]:.0f}%")
lab.beside("\nweak scaling efficiency, bucketed", my_efficiency, efficiency["bucketed"])

# %% [markdown]
# **Read it with care.** On a laptop two ranks share memory, caches and the power limit of the processor. So even `none`,
# which sends only three numbers, is below 100%. On two cores, every other program takes its share too, and differences of a
# few percent between methods mean nothing. An efficiency above 100% is noise. But the table does show that sending 3.6 MB
# is not the bottleneck here. The appendix shows what overlap is worth on GPUs.
#
# ## Exercise: buckets
#
# `partition_into_buckets(parameters, size)` groups neighboring parameters, up to `size` **bytes** in each bucket
# (`parameter.nbytes`). A bucket has one dtype, because its gradients will lie end to end in one tensor. A parameter larger
# than a bucket gets one of its own. Keep the order.

# %% exercise="in-buckets"
from course.parallel.data_parallel.gradients import partition_into_buckets

# %%
check("in-buckets")

# %% [markdown]
# ## Exercise: overlap
#
# This is a bucket. Its tensor `flat` is what ranks send. `take(index)` moves a parameter's gradient into it: from then on
# `parameter.grad` *is* a view of the bucket, so nothing has to be copied back.

# %%
lab.show("course.parallel.data_parallel.gradients.Bucket")

# %% [markdown]
# The next class holds the buckets. `register_post_accumulate_grad_hook` makes PyTorch call a function each time a backward
# pass has added to a parameter's gradient. `early` holds the buckets that may leave during backward. (`partial` holds those
# that leave at the end. They are for tensor parallelism, lesson 10, and empty here.)

# %%
lab.show("course.parallel.data_parallel.gradients.Bucketed")

# %% [markdown]
# Three functions are missing, the core of the method:
#
# - `gradient_ready(ddp, bucket, index)` runs when a backward pass has added to the gradient of parameter `index` of `bucket`.
#   Move the gradient into the bucket, and count: `bucket.waiting[index]` says how many passes of this step the gradient still
#   waits for. Then start (`ddp.start(...)`) what is complete: the bucket `ddp.early[ddp.started]` if none of its gradients
#   waits, then the next one, and so on. `ddp.started` is the number of started buckets; you increment it.
# - `start_mean(bucket, axis)` begins the all-reduce of `bucket.flat` with `async_op=True`, which returns at once. Keep what
#   it returns in `bucket.work`.
# - `finish_mean(bucket, axis)` waits for `bucket.work` and makes the sum the mean. NCCL can average by itself
#   (`ReduceOp.AVG`); gloo can only add. `mean_op(x)` returns the operation to ask for, and `divide_by_size(x, axis)` does
#   what remains afterwards. Adding and then dividing yourself is right as well.
#
# > **Question, before you write.** With micro-batches, a step has several backward passes, and gradients add up. When may a
# > bucket be sent? And why must all ranks start buckets in the same order, whichever is complete first?
#
# <details><summary>Answer</summary>
# In the last pass. Before it, the gradients are not complete, and every micro-batch would pay for sending them. Ranks match
# collectives by order alone. If one rank starts bucket 2 while another starts bucket 3, they add up different things or wait
# forever. The order of gradients may depend on a rank's data; the order of buckets must not.
# </details>
#
# > **Question.** What does `Bucketed.finish`, above, do for a parameter that had no gradient on this rank, and why?
#
# <details><summary>Answer</summary>
# It counts the gradient as zero. Another rank may have used the parameter: it waits for this rank in the bucket's all-reduce
# and needs the average. DDP has <code>find_unused_parameters</code> for this, which searches the graph in every step. Without
# it, DDP stops with an error.
# </details>

# %% exercise="overlap"
from course.parallel.data_parallel.gradients import gradient_ready, start_mean, finish_mean

# %%
check("overlap")

# %% [markdown]
# The check trained with your functions on two and four ranks, also with micro-batches. It watched when each all-reduce
# started, and it gave every second rank a model whose gradients come in a different order.
#
# ## A step on a timeline
#
# Here is a step of `vit-demo` on two ranks, with *your* functions, as rank 0 saw it. The buckets have 0.5 MB, so that there
# are several.
#
# > **Predict.** Two processes on your machine communicate through memory. Will an all-reduce end before the next bucket is
# > ready? Will the last one be exposed?

# %%
def watched_step(settings):
    with lab.yours(partition_into_buckets, gradient_ready, start_mean, finish_mean):
        training = assemble.assemble(settings,
                                     parallel.build_mesh(settings.parallel,
                                                         parallel.join("cpu")))
        torch.set_num_threads(1)
        batch = training.model.example(4, torch.device("cpu"))
        steps = [bucket_timeline.record_step(training, batch) for _ in range(4)]
        return steps[-1]                             # the first ones fill the caches


settings = config.load("vit-demo", [*LAYOUT, "parallel.dp=2", "parallel.bucket_mb=0.5",
                                    "train.global_batch=8"])
seen = ranks(2)(watched_step, settings)[0]
rows = {"backward": list(pairwise([0.0, *seen.gradients])), "network": seen.spans}
lab.picture(data_parallel.timeline(rows, seen.backward, f"{len(seen.spans)} buckets "
                                   f"of vit-demo on two CPU ranks"),
            "Pieces of backward in one row, all-reduces in the other; most "
            "all-reduces begin before the dotted line, where backward ends")

# %%
early = sum(begin < seen.backward for begin, _ in seen.spans)
print(f"{early} of {len(seen.spans)} all-reduces begin before backward ends, "
      "after this part of it:",
      ", ".join(f"{begin / seen.backward:.0%}" for begin, _ in seen.spans))
print(f"backward takes {1e3 * seen.backward:.1f} ms; "
      f"{1e3 * (seen.finished - seen.backward):.1f} ms of communication are exposed")

# %% [markdown]
# **What you should see:** all all-reduces begin before backward ends, spread over it. Their length depends on your machine:
# CPU ranks compute and send with the same cores, so sending slows computing down. Even on a GPU, NCCL's kernels need some of
# its processors.
#
# ## Does it match one process?
#
# Ask this of every layout. `course verify` trains in one process and in the layout, in float64, and compares every parameter
# after every step. It uses plain gradient descent, because Adam divides a gradient by its size and would hide a wrong factor.
# Here it runs with your functions on four ranks, with micro-batches:

# %%
def verified(settings):
    with lab.yours(average_gradients, partition_into_buckets, gradient_ready,
                   start_mean, finish_mean):
        return verify.compare(settings)


settings = config.load("vit-demo", [*verify.DEFAULTS, "model.depth=2",
                                    "train.device=cpu", "train.steps=2",
                                    "train.micro_batch=1",
                                    "parallel.dp=4", "parallel.bucket_mb=0.5"])
equal = verify.tell(settings, ranks(4, timeout=600)(verified, settings)[0])

# %% [markdown]
# In a terminal: `course verify vit-demo parallel.dp=4 train.micro_batch=1`. To train on two processes:
#
# ```
# torchrun --standalone --nproc-per-node=2 -m course.cli train vit-demo log.name=two
# ```
#
# ## Open task: data parallelism from hooks
#
# *Optional, about 40 minutes. Nothing later needs it.* Above, the library held the parts together. Write the whole: a class
# that makes gradients the mean over the ranks, for any parameters. Ours has about 30 lines.
#
# **Contract**
#
# - `DataParallel(parameters, axis, bucket_bytes)` gets the same float64 parameters on every rank, in the order of the forward
#   pass. Some are frozen (`requires_grad=False`), and one is larger than `bucket_bytes`.
# - `backward(loss, last)` runs the backward pass of one micro-batch. After the call with `last=True`, each `.grad` is the
#   mean, over the axis, of the gradients that the ranks accumulated in this step.
# - A micro-batch may leave parameters out. If a rank has no gradient for a parameter in the whole step, that counts as zero.
#   Gradients may come in a different order on each rank.
# - Between steps, all gradients are set to `None`. The axis need not have all ranks of the world.
# - Use `dist.all_reduce`, not DDP, and no method of `course.parallel.data_parallel`.
#
# **Levels.** Each one counts by itself, once the first is reached:
#
# | level | what the check counts |
# |---|---|
# | correct | the gradients after each of three steps, with one or two micro-batches |
# | byte budget | each gradient is sent by one all-reduce per step, and neighbors share an all-reduce up to `bucket_bytes` |
# | memory budget | there is no second copy of all gradients |
# | overlapped | when the last gradient comes, all buckets but the last have started, and the code has waited for none |
#
# Start with correct. `lab.hint("data-parallel")` opens the first of three hints, and each further call opens the next one.

# %% exercise="data-parallel"
from course.lab.exercises.lesson07_open_task import DataParallel  # noqa: F401

# %%
check("data-parallel")

# %% [markdown]
# ## Summary
#
# - Each rank back-propagates sum · dp / $W$; averaged gradients then match single-process training, with or without padding.
# - A ring all-reduce sends $2\,(n-1)/n$ of the tensor for any n; latency grows, so send few large messages.
# - Buckets travel while backward continues. If the network keeps up, only the last one is exposed.
# - With micro-batches, communicate once a step, in the last pass.
# - `none` measures computing alone; efficiency compares n ranks with one.
#
# ## Questions
#
# 1. A global batch of 64 keeps 64 GPUs busy with one sample each. What would you gain from more GPUs?
# 2. Your job's efficiency drops after you compile the model. Is that bad news?
# 3. Which mistake in averaging would `course verify` find, but a falling loss hide?
#
# **Check your work from a terminal.** Save the notebook, then run
# `course check notebooks/07_data_parallel_mine.ipynb`. Next: [lesson 08](08_scaling.ipynb) asks whether n times the samples
# per second train a model n times sooner.
#
# ## Appendix (optional): on GPUs
#
# These steps train the stack of 24 blocks from the timeline exercise, with 16 × 1024 tokens on each H200, in bf16 with
# float32 gradients.
#
# > **Predict** the efficiency of `naive` and of `bucketed` on four GPUs. One GPU needs {result: step_ms("none", 1) | .0f} ms.

# %%
my_naive = 0.90                  # your predictions
my_bucketed = 0.99

# %%
rows = [row for row in lab.results("dp_h200")["rows"] if "ms" in row]
most = max(row["gpus"] for row in rows)
alone = {row["case"]: row["ms"] for row in rows if row["gpus"] == 1}
table = {"1 GPU": {"ms": alone["none"], "efficiency, %": 100.0}}
measured = {}
for row in rows:
    case, one = row["case"], alone["none, compiled" if "compiled" in row["case"]
                                   else "none"]
    if row["gpus"] == most:
        buckets = f", buckets of {row['bucket_mb']:.0f} MB" if case.startswith(
            ("bucketed", "ddp")) else ""
        table[f"{most} GPUs, {case}{buckets}"] = {"ms": row["ms"], "efficiency, %": 100
                                                  * one / row["ms"]}
        measured.setdefault(case, one / row["ms"])
lab.recorded("dp_h200", table, why="Data parallelism on several GPUs" if lab.gpu()
             else "This needs several GPUs")
lab.beside("\nnaive", my_naive, measured["naive"], how="recorded")
lab.beside("bucketed", my_bucketed, measured["bucketed"], how="recorded")

# %% [markdown]
# **What you should see:** `naive` adds {result: naive_ms | .0f} ms to `none`: {result: stack_ms | .1f} ms of all-reduce at
# full bandwidth, plus copies. `bucketed` hides {result: hidden | .0%} of it. NCCL's kernels slow backward down; lesson 17
# measures by how much. A compiled model computes faster and sends as much, so its efficiency is lower. Compiled `ddp` falls
# {result: ddp_lost | .0%} short of full efficiency, or {result: ddp_lost_100_mb | .0%} with buckets of 100 MB.
