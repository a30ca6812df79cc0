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
# One processor trains a model on a batch. Several can share the batch: each has the whole model, computes the gradient of its
# own samples, and then all take the **average**. That is data parallelism, the simplest way to use many GPUs and the one that
# every other way is combined with. In this lesson you build it from the ground up: the all-reduce from single messages, the
# averaging of gradients, and the trick that makes it cheap, sending gradients while others are still being computed.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU. Lessons 00 and 01 |
# | reading and doing | about two hours |
# | computing | 1.5 minutes on two cores, most of it in checks |
# | you write | a ring all-reduce (14 lines), averaged gradients (8), a timeline (7), buckets (9), their overlap (8) |
# | you measure | bytes sent, what overlap hides, scaling efficiency |
#
# Work in a copy: *File → Save Notebook As…*, `07_data_parallel_mine.ipynb`.

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
# Before there are several processes, let one play two. A global batch of six samples, the last of them padding, is
# cut in two halves of three, and each half gives a gradient. Every "rank" could take the mean over the samples that it has:
# the first has three real samples, the second two.
#
# > **Predict.** Take the average of these two gradients. How far is it from the gradient of the mean over all five real
# > samples? (Relative to that gradient's length: 0 means equal, 1 that the difference is as long as the gradient
# > itself.)

# %%
my_difference = 0.01             # your prediction

# %%
settings = tiny_training.settings("train.global_batch=6")
model, _ = tiny_training.model(settings, tiny_training.mesh(settings), seed=0)
whole = model.prepare(tiny_training.random_batch(torch.Generator().manual_seed(0), settings, 6, padding=1), torch.tensor(0))
halves = [{name: tensor[part] for name, tensor in whole.items()} for part in (slice(0, 3), slice(3, 6))]


def gradient(batch: dict[str, Tensor], factor: float) -> Tensor:
    """The gradient of factor x the sum of the samples' losses, all parameters end to end."""
    total, _ = model.loss(model(batch), batch)
    return torch.cat([part.flatten() for part in torch.autograd.grad(factor * total, list(model.parameters()))])


right = gradient(whole, 1 / 5)
own_means = (gradient(halves[0], 1 / 3) + gradient(halves[1], 1 / 2)) / 2
lab.beside("difference of the average of own means", my_difference, ((own_means - right).norm() / right.norm()).item())

# %% [markdown]
# Each sample of the second half counts for more than one of the first, so the average is wrong, here by a sixth. A run
# trained like this looks healthy, and is worse than it should be.
#
# The cure is the one of lesson 01: add up, and divide once, by the weight $W$ of the **global** batch, here 5. Ranks take the
# average at the end, which divides by their number `dp` once more than wanted, so each back-propagates
#
# $$\text{sum of its losses}\cdot\frac{dp}{W}$$

# %%
shares = (gradient(halves[0], 2 / 5) + gradient(halves[1], 2 / 5)) / 2
print(f"difference with the rule sum x dp / W: {((shares - right).norm() / right.norm()).item():.1e}")

# %% [markdown]
# That is rounding. The rule holds for any number of ranks and any padding, and $W$ costs one all-reduce of a single number. It is
# `global_weight` in `eager`, which you wrote in lesson 01; there `dp` was 1.
#
# > **Question.** Each rank reports its share of the loss: its sum over $W$. What must be done with the shares to get the mean
# > over the global batch, the number that a log shows?
#
# <details><summary>Answer</summary>
# Add them up: the sum over ranks of (sum / <i>W</i>) is the mean. A program that logs the loss of rank 0 alone shows the loss
# of a part of the batch, noisier than it should be, and different when the number of ranks changes.
# </details>
#
# ## What each rank has
#
# Now real processes, two of them. Each builds the model, and takes its slice of the global batch.
#
# > **Predict.** Which of these will be the same on both ranks: the ids of the samples, the weights, the gradients?

# %%
LAYOUT = ["data.source=mock", "train.device=cpu", "train.threads=1", "optim.warmup=0", "optim.schedule=constant"]


def look(settings):
    mesh = parallel.build_mesh(settings.parallel, parallel.join("cpu"))
    training = assemble.assemble(settings, mesh)
    mine = slice(4 * mesh.dp.rank, 4 * mesh.dp.rank + 4)
    batch = {name: tensor[mine] for name, tensor in training.model.example(8, torch.device("cpu")).items()}
    batch = training.model.prepare(batch, training.progress.step)
    total, _ = training.model.loss(training.model(batch), batch)
    (total * mesh.dp.size / 8).backward()
    gradients = torch.cat([p.grad.flatten() for p in training.model.parameters()])
    return (f"rank {mesh.dp.rank}: samples {batch['sample'].tolist()}, norm of all weights "
            f"{tiny_training.flat_parameters(training.model).norm():.6f}, of all gradients {gradients.norm():.6f}")


for line in ranks(2)(look, config.load("vit-demo", [*LAYOUT, "parallel.dp=2", "parallel.data=naive"])):
    print(line)

# %% [markdown]
# Different samples, different gradients, equal weights. Nobody sent the weights: the library draws each one as a pure
# function of the seed and the parameter's name, so all ranks have the same. PyTorch's `DistributedDataParallel` sends rank
# 0's weights to all when it is made.
#
# > **Question.** If the weights were *not* equal at the start, would averaged gradients make them so?
#
# <details><summary>Answer</summary>
# No. All ranks would take the same steps from different places, and stay as far apart as they began. Their gradients
# would be those of different functions, and the average of those is the gradient of nothing. The loss still goes down
# for a while, which makes it hard to see. A training program should compare the weights of its ranks now and then;
# <code>course verify</code> does.
# </details>
#
# ## One message
#
# Two ranks have gradients, and each needs the sum. What can a rank do? Send a tensor to another one, and receive one.
# Let every rank pass a number to its right neighbour, the last one to the first.
#
# > **Predict.** `dist.send` returns when the other has taken the message. What will this do?

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
# Everybody waits for somebody who waits: a **deadlock**. On a cluster such a job stands still until its time is up. So
# one begins both, *and then* waits for both: `isend` and `irecv` return at once, with something to `wait()` for.

# %%
def pass_right_at_once():
    me, n = dist.get_rank(), dist.get_world_size()
    mine, from_left = torch.tensor([10.0 * me]), torch.empty(1)
    for work in [dist.isend(mine, (me + 1) % n), dist.irecv(from_left, (me - 1) % n)]:
        work.wait()
    return from_left.item()


print(ranks(4)(pass_right_at_once))

# %% [markdown]
# > **Question.** What may you not do with `mine` and with `from_left` between `isend`, `irecv` and their `wait()`?
#
# <details><summary>Answer</summary>
# Write into <code>mine</code>, which may not have left yet, or read <code>from_left</code>, which may not have come. Nothing
# stops you, and it goes well most of the time. That is what makes it a bad mistake.
# </details>
#
# ## Through one rank
#
# The simplest all-reduce: all send to rank 0, which adds up and sends the sum back.

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
# Rank 0 sends the whole tensor to each of the others: (n − 1) times its size, and receives as much. With 64 ranks that is 225
# MB while 63 networks lie idle. The time grows with the number of ranks, and that is the end of scaling.
#
# ## A ring
#
# Everybody should send all the time, and nobody more than the others. Cut the tensor into n pieces. In every step each
# rank sends **one piece** to the right and receives another from the left:
#
# - **reduce-scatter**, n − 1 steps: what comes is *added* to what the rank has of that piece, and goes on in the next step.
#   In the end every rank has the whole sum of one piece;
# - **all-gather**, n − 1 steps: these sums go round, and what comes is *put in the place* of what was there.
#
# The picture shows how many ranks' numbers are in each piece of each rank; an arrow marks the piece that leaves next, to the
# rank below, from the last rank to the first.
#
# > **Predict, before you move the slider:** which piece will be the first that is complete on rank 0? After how many steps?

# %%
slider = widgets.explore(lambda step: data_parallel.ring(4, step), step=list(range(7)),
                         alt="A table: how many ranks' numbers are in each piece of each rank. One piece of each rank is marked.")

# %% [markdown]
# <details><summary>Answer</summary>
# Piece 1, after three steps. It set out from rank 1, for which rank 0 is the end of the way round, and every rank that it came
# through has added its own numbers.
# </details>
#
# Which piece does a rank send in which step? Everything follows from one rule: **a rank sends what it received in the step
# before**. A piece that stays behind would not grow. In the first step, every rank sends the piece of its own number. With three
# ranks, rank 0 first sends piece 0 to rank 1, and receives piece 2 from rank 2. So piece 2 is what it sends next.
#
# > **Derive it on paper.** Three ranks take four steps. Write down what each rank sends and receives in each of them, in
# > both halves. Then find the rule for rank *r* of *n* in step *s*. Does it change where the second half begins?
#
# > **Predict.** How many bytes does each of four ranks send for the 3.57 MB?

# %%
my_ring_megabytes = 3.57         # your prediction

# %% [markdown]
# ## Exercise: all-reduce from sends and receives
#
# Write it for any number of ranks, and for tensors of any shape, even if n does not divide their size. `axis` says who
# you are: `axis.rank` of `axis.size`, and `axis.ranks` are the numbers that `dist.isend` and `dist.irecv` want (their
# third argument is `axis.group`). `x` stays as it is. Useful: `tensor_split(n)` cuts a flat tensor into n pieces as equal as
# possible, which are *views*: what you write into a piece stands in the tensor. Pieces differ in size, so receive into
# a tensor of the right size.

# %% exercise="ring-all-reduce"
def ring_all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum of x over the axis, in new memory, made of sends to the right neighbour and receives from the left one."""
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
# are**. So the time that bytes take does not grow with the number of ranks. What grows is the number of steps, each of which
# costs a *latency*, the time until the first byte arrives. No all-reduce among ranks that add for themselves can send less
# (Patarasuk and Yuan 2009); switches that add, as NVIDIA's can (SHARP), need each rank's tensor only once. When a data sheet or
# `nccl-tests` gives the *bus bandwidth* of an all-reduce, it is $2\,(n-1)/n$ × bytes / time: what each link of a ring carried.
#
# On GPUs, collectives are the work of **NCCL**, NVIDIA's library for them; your processes here use **gloo**, which does
# the same on CPUs. On four H200s joined by NVLink, the fast links between the GPUs of one machine, the bus bandwidth
# was 60 GB/s for 1 MB, 280 for 25 MB, 328 for 134 MB and 347 for 512 MB (PyTorch 2.11, NCCL 2.28, 2026-11-21).
#
# > **Question.** How long did 1 MB take, and how long would it have taken at 347 GB/s? What does the difference say?
#
# <details><summary>Answer</summary>
# 1.5 MB / 60 GB/s = 25 microseconds instead of 4. The other 20 are latency: starting the collective, and six steps. In
# that time an all-reduce of 5 MB more would be done. So many small messages are bad, and one puts gradients together
# before one sends them.
# </details>
#
# ## Exercise: average the gradients
#
# From here on `dist.all_reduce(tensor, group=axis.group)` does it: in place, on every rank of the axis. Make the gradient of
# each parameter its mean over the axis, with **one** all-reduce: lay all gradients end to end in one tensor, and take it
# apart again afterwards. PyTorch has two functions for that, which the cell imports: `_flatten_dense_tensors(tensors)` makes one
# of a list, `_unflatten_dense_tensors(flat, tensors)` makes pieces of it in the sizes of the list. Parameters without a gradient
# (`p.grad is None`) are left out, and along an axis of one rank there is nothing to do.

# %% exercise="average-gradients"
from course.parallel.data_parallel.gradients import average_gradients

# %%
check("average-gradients")

# %% [markdown]
# The check trained a model on two and on four ranks, with the library's own training step around your function, and compared
# weights with those of one process: they are equal to rounding. This way is called `parallel.data=naive` here.
#
# ## What if nobody averages?
#
# `parallel.data=none` leaves the communication out. It is wrong, of course. But as a *measurement* it is useful: its time is what
# computing alone takes, so naive minus none is what communication costs.
#
# > **Predict.** Five steps of `vit-demo` on two ranks, once averaged and once not. How far apart are the weights of
# > the two ranks afterwards, at most, in units of the learning rate (0.002)? With Adam, a step moves a weight by about one
# > of these.

# %%
my_distance = 1.0                # your prediction, for none

# %%
def distance(settings, steps):
    """The largest difference between weights of two ranks after so many steps, in learning rates."""
    mesh = parallel.build_mesh(settings.parallel, parallel.join("cpu"))
    training = assemble.assemble(settings, mesh)
    everyone = training.model.example(8, torch.device("cpu"))
    batch = {name: tensor[4 * mesh.dp.rank:4 * mesh.dp.rank + 4] for name, tensor in everyone.items()}
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
    settings = config.load("vit-demo", [*LAYOUT, "parallel.dp=2", f"parallel.data={method}", "train.global_batch=8"])
    apart[method] = ranks(2)(distance, settings, 5)[0]
print(f"naive: the weights of the two ranks differ by {apart['naive']:.1e} learning rates")
lab.beside("none: they differ by", my_distance, apart["none"], "learning rates")

# %% [markdown]
# Averaged, they are equal to the last bit: equal weights and equal gradients make equal updates. Not averaged, the
# ranks drift apart by as much as they move: in five steps a rank moves a weight by up to five learning rates, so two
# ranks can end up to ten apart.
#
# ## While backward runs
#
# `naive` first computes all gradients and then sends them. While it computes, the network is idle; while it sends, the processor
# is. But backward has the gradients of the *last* layers early, and they could travel while it works on the others.
#
# Sending each gradient alone would pay the latency for each. So gradients are put into **buckets** of some megabytes, and a
# bucket is sent when its last gradient is there (Li et al. 2020, *PyTorch Distributed*, section 4.2). What is still under way
# when backward ends is **exposed**: everybody waits for it. Three questions decide how much that is: how large are the
# buckets, when are they ready, and how fast is the network?
#
# ## Exercise: a timeline
#
# Bucket $i$ is ready at `ready[i]` and its all-reduce lasts `seconds[i]`. All-reduces run in order, one at a time: the network
# is one. Return begin and end of each.

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
# With it you can look at a model that you cannot run: a stack of 24 transformer blocks of width 1024, 302 million parameters,
# as in GPT 350M. Their gradients are 1.2 GB in float32, and backward takes about 62 ms on an H200. Four GPUs; an all-reduce lasts
# 20 µs and 1.5 times its bytes over the bandwidth.
#
# > **Predict.** At 347 GB/s (NVLink), which bucket is best: 1 MB, 25 MB, or all in one? How many ms remain exposed? And what
# > changes at 12.5 GB/s, a 100-gigabit network between machines?

# %%
def gpt(backward: float = 0.062) -> list[tuple[float, float]]:
    """(seconds, bytes) of each gradient in the order of backward: 24 blocks of four matrices each."""
    matrices = [4 * 1024**2, 4 * 1024**2, 1024**2, 3 * 1024**2]         # second and first of the MLP, attention's out, its QKV
    return 24 * [(backward / 24 * size / sum(matrices), 4.0 * size) for size in matrices]


def overlap_at(bucket_mb: float, gigabytes_per_s: float):
    """The timeline of backward and the all-reduces of its buckets."""
    ready, loads = data_parallel.fill_buckets(gpt(), bucket_mb * 1e6)
    spans = collective_times(ready, [data_parallel.all_reduce_seconds(load, 4, gigabytes_per_s * 1e9, 20e-6) for load in loads])
    exposed = 1e3 * (spans[-1][1] - ready[-1])
    buckets = f"{len(loads)} bucket{'s' * (len(loads) > 1)} of {bucket_mb} MB"
    return data_parallel.timeline({"backward": list(pairwise([0.0, *ready])), "network": spans}, ready[-1],
                                 f"{buckets} at {gigabytes_per_s} GB/s: {exposed:.2f} ms exposed")


slider = widgets.explore(overlap_at, bucket_mb=[1300, 400, 100, 25, 5, 1], gigabytes_per_s=[347, 50, 12.5],
                         alt="Two rows of bars over time, backward and network; behind the dotted line the network is exposed")

# %% [markdown]
# <details><summary>Answer</summary>
# One bucket of everything is naive: it exposes the whole 5.2 ms, because nothing can leave before the last gradient is there.
# With 25 MB less than 0.1 ms is exposed, the last bucket: there is nothing left to hide it behind. (Matrices here are up to
# 17 MB, so 1 and 5 MB both send one matrix at a time, no parameter is cut; and 1 MB exposes as little as 25 MB: what is left is
# the same last matrix.) Why does 100 MB expose more than 400? What is exposed is the last bucket, and that holds what is left
# over: 63 MB in the one case and 34 in the other. At 12.5 GB/s all the all-reduces take 145 ms,
# longer than backward: the network is the bottleneck, and even the best buckets leave 85 ms exposed. Then one sends less
# often (accumulation), or fewer bits. PyTorch's default is 25 MB, and this library's too.
# </details>
#
# > **Question.** Why do the *first* buckets come from the *last* layers? And which bucket should be small?
#
# <details><summary>Answer</summary>
# Backward goes from the loss to the input, so the last layers' gradients come first. The last bucket, that of the first
# layers, is what remains exposed: a small one is over sooner. (DDP makes the first bucket small, 1 MB, so that the network begins
# to work early, and learns the order in which gradients really come in the first step.)
# </details>
#
# ## Exercise: buckets
#
# `partition_into_buckets(parameters, size)` puts neighbours together, up to `size` **bytes** in each (`parameter.nbytes`), all of
# the same dtype, because they are going to lie end to end in one tensor. A parameter larger than a bucket gets one of its own.
# The order stays.

# %% exercise="in-buckets"
from course.parallel.data_parallel.gradients import partition_into_buckets

# %%
check("in-buckets")

# %% [markdown]
# ## Exercise: overlap
#
# This is a bucket. Its tensor `flat` is what is sent. `take(index)` moves a parameter's gradient into it: from then on
# `parameter.grad` *is* a view of the bucket, so nothing has to be copied back.

# %%
lab.show("course.parallel.data_parallel.gradients.Bucket")

# %% [markdown]
# And this is what holds the buckets. `register_post_accumulate_grad_hook` makes PyTorch call a function each time a backward
# pass has added to a parameter's gradient. `early` are the buckets that may be sent during backward. (`partial`, those that are
# sent at the end, is for tensor parallelism, lesson 10, and empty here.)

# %%
lab.show("course.parallel.data_parallel.gradients.Bucketed")

# %% [markdown]
# Three functions are missing, and they are the heart of it:
#
# - `gradient_ready(ddp, bucket, index)` is called when a backward pass has added to the gradient of parameter `index` of
#   `bucket`.
#   Move it into the bucket, and count: `bucket.waiting[index]` says how many passes of this step the gradient still waits
#   for. Then start (`ddp.start(...)`) what is complete: the bucket `ddp.early[ddp.started]` if none of its gradients waits,
#   and the next, and so on. `ddp.started` is how many have been started: counting it up is yours to do, too;
# - `start_mean(bucket, axis)` begins the all-reduce of `bucket.flat` with `async_op=True`, which returns at once, and keeps what
#   it returns in `bucket.work`;
# - `finish_mean(bucket, axis)` waits for `bucket.work`, and makes the sum the mean. (NCCL can average by itself,
#   `ReduceOp.AVG`; gloo can only add. `mean_op(x)` is the operation to ask for, and `divide_by_size(x, axis)` does what is left
# to
#   do after it. To add and then divide yourself is right as well.)
#
# > **Question, before you write.** With micro-batches, a step has several backward passes, and gradients add up. When may a
# > bucket be sent? And why must all ranks start buckets in the same order, whichever is complete first?
#
# <details><summary>Answer</summary>
# In the last pass: before, its gradients are not complete, and sending them each time would cost as much for every micro-batch.
# Ranks meet in collectives by order alone: if one starts bucket 2 while another starts bucket 3, they add up different things, or
# wait forever. In which order gradients come may depend on a rank's data; the order of the buckets must not.
# </details>

# %% exercise="overlap"
from course.parallel.data_parallel.gradients import gradient_ready, start_mean, finish_mean

# %%
check("overlap")

# %% [markdown]
# The check trained with your functions on two and four ranks, with micro-batches too, watched when each all-reduce was
# started, and gave the ranks a model whose gradients come in another order on every second rank.
#
# > **Question.** What does `finish` do for a parameter that had no gradient on this rank, and why?
#
# <details><summary>Answer</summary>
# It counts as zero: another rank may have used the parameter, waits for this rank in the bucket's all-reduce, and needs the
# average. DDP has <code>find_unused_parameters</code> for this, which looks through the graph in every step, and without it stops
# with an error.
# </details>
#
# ## Look at it
#
# Here is a step of `vit-demo` on two ranks, with *your* functions, as rank 0 saw it. Buckets of 0.5 MB, so that there are a few.
#
# > **Predict.** Two processes on your machine send through memory. Will the all-reduces be shorter than the pieces of backward
# > between them? Will the last one be exposed?

# %%
def watched_step(settings):
    with lab.yours(partition_into_buckets, gradient_ready, start_mean, finish_mean):
        training = assemble.assemble(settings, parallel.build_mesh(settings.parallel, parallel.join("cpu")))
        torch.set_num_threads(1)
        batch = training.model.example(4, torch.device("cpu"))
        return [bucket_timeline.record_step(training, batch) for _ in range(4)][-1]  # the first ones find nothing in the caches


settings = config.load("vit-demo", [*LAYOUT, "parallel.dp=2", "parallel.bucket_mb=0.5", "train.global_batch=8"])
seen = ranks(2)(watched_step, settings)[0]
rows = {"backward": list(pairwise([0.0, *seen.gradients])), "network": seen.spans}
lab.picture(data_parallel.timeline(rows, seen.backward, f"{len(seen.spans)} buckets of vit-demo on two CPU ranks"),
            "Pieces of backward in one row and all-reduces in the other; most begin before the dotted line where backward ends")

# %%
early = sum(begin < seen.backward for begin, _ in seen.spans)
print(f"{early} of {len(seen.spans)} all-reduces begin before backward ends, when this much of it is done:",
      ", ".join(f"{begin / seen.backward:.0%}" for begin, _ in seen.spans))
print(f"backward takes {1e3 * seen.backward:.1f} ms, and {1e3 * (seen.finished - seen.backward):.1f} ms are exposed behind it")

# %% [markdown]
# **What you should see:** all of them begin before backward ends, spread over it, the last one just before. (Were they all to
# begin at the end, they would begin before it, too, and hide nothing.) How long they are depends on
# your machine: on a CPU the ranks compute and send with the same cores, so sending slows computing down. On GPUs the network has
# hardware of its own, and yet not quite: NCCL's kernels take a few of the GPU's processors and some of its memory traffic.
#
# ## Scaling efficiency
#
# With n ranks, how many times faster is it? Two questions hide in this one:
#
# - **weak scaling**: each rank keeps its batch, so the global batch grows with n. Efficiency is the time of one rank over that
#   of n: they do n times the work;
# - **strong scaling**: the global batch stays. Efficiency is the time of one rank over n times that of n ranks. Harder,
#   because each rank has less to compute and as much to send.
#
# > **Predict** the weak scaling efficiency of two ranks on your machine, one thread each, with `bucketed`. How many cores has
# > it? And what else do they share?
#
# A machine is faster in one second than in the next. So both are timed by turns, in the same two processes: rank 0 takes a few
# steps alone while rank 1 waits, and then both take as many together. The efficiency is the median over the turns.

# %%
my_efficiency = 0.95             # your prediction

# %%
def by_turns(alone, together, turns=8, steps=3):
    """Seconds of a step that rank 0 takes alone and of one that all ranks take together, in each of so many turns."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    trainings = [assemble.assemble(alone, parallel.build_mesh(alone.parallel, parallel.World(device=cpu))),
                 assemble.assemble(together, parallel.build_mesh(together.parallel, parallel.join("cpu")))]
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
    return times[1:]                                 # the first turn finds nothing in the caches


background_load.report()
single = config.load("vit-demo", [*LAYOUT, "train.global_batch=4"])
efficiency = {}
for method in ("none", "naive", "bucketed", "ddp"):
    settings = config.load("vit-demo", [*LAYOUT, "parallel.dp=2", f"parallel.data={method}", "train.global_batch=8"])
    times = ranks(2)(by_turns, single, settings)[0]
    alone, together = (statistics.median(turn[which] for turn in times) for which in (0, 1))
    efficiency[method] = statistics.median(alone / together for alone, together in times)
    print(f"{method:10} one rank {1e3 * alone:6.1f} ms a step of 4 samples, two {1e3 * together:6.1f} ms of 8: "
          f"efficiency {100 * efficiency[method]:.0f}%")
lab.beside("\nweak scaling efficiency, bucketed", my_efficiency, efficiency["bucketed"])

# %% [markdown]
# **An honest word.** On a laptop this measures the laptop: two ranks share memory, caches and the power that a warm processor
# may use, so even `none`, which sends nothing but three numbers, is below 100%. On two cores everything else that runs, this
# notebook included, takes its part as well, and differences of a few percent between methods mean nothing. An efficiency above
# 100% is noise, too: something else ran while rank 0 was alone. What the numbers do tell: communication of 3.6 MB is not what
# is slow here. To see what overlap is worth you need GPUs.
#
# ## On GPUs
#
# The stack of the timeline, 302 million parameters, 16 × 1024 tokens on each GPU, bf16 with gradients in float32: forward,
# backward and averaging, on one H200 and on several joined by NVLink. All links carry 347 GB/s.
#
# > **Predict** the efficiency of `naive` on four GPUs from the time of one, 92 ms, and from what you know of the
# > all-reduce. And that of `bucketed`?

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
    case, one = row["case"], alone["none, compiled" if "compiled" in row["case"] else "none"]
    if row["gpus"] == most:
        buckets = f", buckets of {row['bucket_mb']:.0f} MB" if case.startswith(("bucketed", "ddp")) else ""
        table[f"{most} GPUs, {case}{buckets}"] = {"ms": row["ms"], "efficiency, %": 100 * one / row["ms"]}
        measured.setdefault(case, one / row["ms"])
lab.recorded("dp_h200", table, why="Data parallelism on several GPUs" if lab.gpu() else "This needs several GPUs")
lab.beside("\nnaive", my_naive, measured["naive"], how="recorded")
lab.beside("bucketed", my_bucketed, measured["bucketed"], how="recorded")

# %% [markdown]
# **How to read it:** `none` is what computing takes when nobody speaks. What `naive` takes beyond it, 8 ms, is
# the whole communication: 5.2 ms at the full bandwidth, and the copies into one tensor and back. `bucketed` hides half of that.
# Why not all? NCCL's kernels run on the GPU's own processors and share its memory, so backward is slower while something is
# sent: lesson 17 measures by how much. `ddp` is PyTorch's own, the bar to clear. When the model is compiled it computes faster
# and sends as much, so the efficiency is lower: efficiency alone is no merit, and a slow program scales well. And measure what
# you run: `ddp` with compiled blocks loses nearly a quarter with its usual buckets, and a fifth with larger ones.
#
# ## Does it train as one process does?
#
# A question to ask of every layout in this course. `course verify` answers it: the same weights and batches, in float64 with
# plain gradient descent, once in one process and once in the layout, compared parameter by parameter after every step. (Adam
# divides a gradient by its size, so it would hide a wrong factor.) With your functions in the library's place, on four ranks
# and in micro-batches:

# %%
def verified(settings):
    with lab.yours(average_gradients, partition_into_buckets, gradient_ready, start_mean, finish_mean):
        return verify.compare(settings)


settings = config.load("vit-demo", [*verify.DEFAULTS, "model.depth=2", "train.device=cpu", "train.steps=2", "train.micro_batch=1",
                                    "parallel.dp=4", "parallel.bucket_mb=0.5"])
equal = verify.tell(settings, ranks(4, timeout=600)(verified, settings)[0])

# %% [markdown]
# In a terminal that is `course verify vit-demo parallel.dp=4 train.micro_batch=1`. And training itself, on two processes here or
# with one for each GPU there, is
#
# ```
# torchrun --standalone --nproc-per-node=2 -m course.cli train vit-demo log.name=two
# ```
#
# The global batch stays what the preset says, and the curve is that of one process.
#
# > **Question.** You have 64 GPUs, and a global batch of 64 keeps each of them busy with one sample. What do you gain by more
# > GPUs?
#
# <details><summary>Answer</summary>
# Nothing, unless the batch grows with them. Whether a larger batch learns more in a step is another matter, and the subject
# of the next lesson.
# </details>
#
# ## What you know now
#
# - Each rank back-propagates sum · dp / $W$, gradients are averaged, and the result is that of one process, padding or not.
# - A ring all-reduce sends $2\,(n-1)/n$ of the tensor, whatever n; what grows is latency. So one sends few large messages.
# - Gradients of the last layers come first; buckets of them travel while backward goes on. Where the network keeps up only the
#   last one is exposed; and on a GPU what is hidden slows backward a little.
# - With micro-batches one communicates once a step, in the last pass.
# - `none` measures what computing takes alone; efficiency compares with the time of one.
#
# **Check your work once more, from outside.** Save the notebook; then, in a terminal:
# `course check notebooks/07_data_parallel_mine.ipynb`.
#
# Next: do n times the samples a second train a model n times sooner? [Lesson 08](08_scaling.ipynb) asks that.
