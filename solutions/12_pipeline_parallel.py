# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 12 · Pipeline parallel
#
# Lesson 10 cut every layer over several GPUs. That needs fast links: four all-reduces in every block. There is another way to
# cut a model: **by depth**. The first GPU has the first blocks, the next one the next, and activations travel from one to the
# other like a workpiece along an assembly line. Very little has to be sent. The price is time in which GPUs wait: the
# **bubble**. In this lesson you write the schedules that keep it small, predict it, and see it.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 90 minutes |
# | computing | 1 minute on two cores |
# | you write | GPipe (1 line), 1F1B (4 lines) |
# | you measure | the bubble and the activations that each rank keeps, predicted and seen |
#
# You should have done [lesson 01](01_baseline.ipynb) (micro-batches) and [lesson 10](10_tensor_parallel.ipynb) (`Placement`).
# Work in a copy: *File → Save Notebook As…*, `12_pipeline_parallel_mine.ipynb`.

# %%
from inspect import getsource

import torch
import torch.distributed as dist

from course import config, models, parallel
from course.training import verify
from course.lab.figures import pipeline, widgets
from course.lab.instruments import simulated_pipeline
from course.lab import notebook as lab
from course.lab.notebook import check
from course.ranks.notebook_ranks import RankError, ranks
from course.models.vit import ViT
from course.parallel.pipeline_parallel import schedules
from course.parallel.pipeline_parallel.runtime import Pipeline
from course.parallel.pipeline_parallel.schedules import Pass

lab.begin("12")

# %% [markdown]
# ## Cut by depth
#
# A **stage** is a run of neighbouring blocks; the first stage also has the embedding, the last one the head and the
# loss. Here are the 5 blocks of a small model on 4 ranks. Five is not a multiple of four, and need not be: the library
# shares blocks out as `tensor_split` does, so that the first ranks get one more.
#
# > **Predict.** Which ranks get what?

# %%
FIVE = ["model.depth=5", "model.grid=[16,32]", "train.device=cpu"]


def stage() -> str:
    """What this rank keeps of the model."""
    c = config.load("vit-demo", [*FIVE, "parallel.pp=4"])
    model = models.build_model(c.model)
    parallel.parallelize(model, parallel.build_mesh(c.parallel, parallel.join("cpu")), c.parallel)
    parts = [name for name in ("embed", "head") if getattr(model, name) is not None]
    return f"blocks {', '.join(model.blocks)}; {' and '.join(parts) or 'neither embedding nor head'}; " \
           f"{sum(p.numel() for p in model.parameters()):,} parameters"


for rank, text in enumerate(ranks(4)(stage)):
    print(f"rank {rank}: {text}")

# %% [markdown]
# Blocks 0 and 1 are on rank 0, one block on each of the others. The slowest stage sets the pace of a pipeline, so here three
# ranks of four would wait for the first one in every pass: choose a depth that divides where you can.
#
# The model's own code did not change. A stage is the same model with some of its parts missing. Without an embedding it takes
# `x`, what the stage before put out; without a head it hands its own output on:

# %%
print(getsource(ViT.forward))

# %% [markdown]
# ## What travels
#
# Between two stages goes one activation tensor, (B, T, D), and back comes its gradient. Compare that with tensor parallelism,
# where every block does four all-reduces of this size, two forward and two backward. In an all-reduce over n GPUs each of
# them sends 2·(n − 1)/n times the tensor.
#
# > **Predict.** 16 blocks of width 4096 on 4 GPUs, 4096 tokens in bf16. How many times as much does a GPU send in tensor
# > parallelism as one in the middle of a pipeline does?

# %%
my_ratio = 10                    # your prediction

# %%
tensor_bytes = 4096 * 4096 * 2                                          # (1, 4096, 4096) in bf16
by_tensor = 16 * 4 * tensor_bytes * 2 * (4 - 1) / 4                     # 16 blocks, 4 all-reduces
by_pipeline = 2 * tensor_bytes                                          # one activation on, one gradient back
print(f"tensor parallel {by_tensor / 1e9:.2f} GB, pipeline parallel {by_pipeline / 1e9:.3f} GB")
lab.beside("sent by one GPU, tensor over pipeline parallel", my_ratio, by_tensor / by_pipeline, "times", "computed")

# %% [markdown]
# Nearly fifty times. This is why pipelines run *between* nodes, where links are slow, and tensor parallelism within one.
#
# ## One batch: one rank at a time
#
# Send a batch through. A forward pass takes a rank one unit of time, a backward pass two (lesson 01: it does twice the matrix
# multiplications).
#
# > **Predict.** What share of the time will the four ranks be idle, on average?

# %%
my_idle = 0.5                    # your prediction

# %%
def naive(p: int, rank: int, m: int, v: int = 1) -> list[Pass]:
    """One forward and one backward pass of the whole batch."""
    return [Pass("F", 0, 0), Pass("B", 0, 0)]


alone = schedules.timeline([naive(4, rank, 1) for rank in range(4)])
lab.beside("idle", my_idle, schedules.idle_share(alone, 4), how="simulated")
lab.picture(pipeline.timelines({"one batch": alone}, 4),
            "Four rows, one for each rank. Forward boxes go down from rank 0 to rank 3 like stairs, then backward boxes of twice "
            "the width up again. All else is grey, idle")

# %% [markdown]
# Three quarters: one rank works, three wait. Four GPUs are as fast as one. The model fits, and nothing else is gained.
#
# The cure is in the assembly line. While rank 1 works on one piece, rank 0 can begin the next, if there *are* several. So cut
# the batch into **micro-batches**, as for gradient accumulation in lesson 01: the result is the same, and now there is
# something to overlap.
#
# ## A schedule is a list
#
# What a rank does, and in which order, is all that there is to decide. In this library a **schedule** is a function that
# returns that order as plain data: a list of `Pass(kind, chunk, micro)`.
#
# | field | |
# |---|---|
# | `kind` | `"F"`, a forward pass, or `"B"`, a backward pass |
# | `chunk` | which of this rank's pieces of the model; until the section on interleaving each rank has one: 0 |
# | `micro` | which micro-batch, from 0 |
#
# Nothing in it says *when*. A pass starts as soon as the rank is free and what it needs has arrived: for a forward pass the
# activations of the stage before, for a backward pass the gradient from the stage behind. The order of the passes is the
# whole program; messages and waiting follow from it.

# %%
lab.show("course.parallel.pipeline_parallel.schedules.before")

# %% [markdown]
# Because a schedule is data, one can look at it before anything runs: `schedules.timeline` computes when each pass starts and
# ends, and finds ranks that wait for each other in a circle. Read it: it is the whole theory of pipelines.

# %%
lab.show("course.parallel.pipeline_parallel.schedules.timeline")

# %% [markdown]
# ## Exercise: GPipe
#
# The simplest schedule ([Huang et al. 2018](https://arxiv.org/abs/1811.06965)): **all** micro-batches forward, then all of
# them backward, the first micro-batch first both times. All ranks have the same list. Write it for `m` micro-batches.
#
# The arguments are the same for all schedules: `p` ranks, this `rank` among them, `m` micro-batches, `v` chunks a rank. This
# one needs few of them.

# %% exercise="gpipe"
from course.parallel.pipeline_parallel.schedules import gpipe

# %% [markdown]
# The check simulates your schedule on pipelines of several sizes first, and says what does not work. If all is well it puts
# it in the library's place and trains a model of 5 blocks with it on 2 and on 4 ranks.

# %%
check("gpipe")

# %% [markdown]
# ## The bubble
#
# Now with 8 micro-batches on 4 ranks.
#
# > **Predict** the share of idle time. To find it: how long does the first rank work? How long does it wait, from its last
# > forward pass to its first backward pass?

# %%
my_bubble = 0.5                  # your prediction, 0 to 1

# %%
def simulated(make, p: int, m: int, v: int = 1):
    """The timeline of a schedule."""
    return schedules.timeline([make(p, rank, m, v) for rank in range(p)], v)


eight = simulated(gpipe, 4, 8)
lab.beside("idle, 4 ranks, 8 micro-batches", my_bubble, schedules.idle_share(eight, 4), how="simulated")
lab.picture(pipeline.timelines({"GPipe, 8 micro-batches": eight}, 4),
            "Forward boxes 0 to 7 on each rank, each rank one box later than the one above; then backward boxes, starting on the "
            "last rank. Grey in between and at the corners")

# %% [markdown]
# <details><summary>How to find it</summary>
# Let <i>f</i> and <i>b</i> be the times of a forward and a backward pass. Each rank works <i>m</i>·(<i>f</i> + <i>b</i>).
# Rank 0 waits while its last micro-batch goes to the end, (<i>p</i> − 1)·<i>f</i>, and while the first gradient comes back,
# (<i>p</i> − 1)·<i>b</i>. Together it waits (<i>p</i> − 1)·(<i>f</i> + <i>b</i>), and so does every other rank, part of it
# before it begins and part after it has finished. The share is (<i>p</i> − 1) / (<i>p</i> − 1 + <i>m</i>): here 3 / 11 = 27%.
# The times of the passes have dropped out.
# </details>
#
# Only two numbers matter, $p$ and $m$: $\displaystyle\text{bubble} = \frac{p-1}{p-1+m}$. Move the sliders.
#
# > **Predict, before you move them:** how many micro-batches do 4 ranks need for a bubble of less than 10%? And 8 ranks?

# %%
slider = widgets.explore(lambda p, m: pipeline.simulated("gpipe", p, m), p=[4, 2, 8], m=[4, 1, 2, 8, 16, 28, 32, 64],
                         alt="The timeline of GPipe for p ranks and m micro-batches, and how much of it is idle.")

# %% [markdown]
# <details><summary>Answer</summary>
# 4 ranks: 3 / (3 + m) &lt; 0.1 from m = 28 on. 8 ranks: from m = 64 on. As a rule of thumb take ten times as many
# micro-batches as ranks for a bubble below 10%. So a pipeline needs a large global batch. That is its limit: lesson 08 asked
# how large is too large.
# </details>
#
# ## Seen
#
# A simulation proves what you put into it. Does a real pipeline behave like that? Four stages that really compute need four
# GPUs, or four free cores at least. So the next cell cheats in one place: the stages **sleep** for as long as a pass takes
# (40 ms forward, 80 ms backward). All else is real: the library's pipeline, four processes, your schedule, messages, waiting.
#
# > **Predict.** Will the bubble be larger or smaller than in theory? By how much?

# %%
my_seen = 0.30                   # your prediction; in theory 3/11 = 0.27

# %%
def with_gpipe():
    with lab.yours(gpipe):
        return simulated_pipeline.run_pipeline("gpipe", m=8)


seen = ranks(4)(with_gpipe)[0]
lab.beside("idle, seen", my_seen, schedules.idle_share(seen, 4))
lab.picture(pipeline.timelines({"GPipe, seen": seen}, 4, "seconds"),
            "The same picture as from the simulation, measured: the boxes lie a little apart")

# %% [markdown]
# **What you should see:** a little more than in theory. The boxes lie apart: a message takes about a millisecond here, and
# the theory has left that out. On a busy machine it is more.
#
# > **Question.** Micro-batches half as large make the bubble smaller. Why not always take the smallest, one sample each?
#
# <details><summary>Answer</summary>
# Two reasons. Each pass brings a message and its latency, and those are added up. And small matrix multiplications do not
# reach the roof (lesson 00): below some size, half the samples take more than half the time.
# </details>
#
# ## What has to be kept
#
# A backward pass needs the activations of its forward pass. From the one to the other they stay in memory.
#
# > **Predict.** GPipe with 16 micro-batches: the activations of how many does each rank keep at most?

# %%
my_kept = 4                      # your prediction

# %%
lab.beside("micro-batches kept by rank 0", my_kept, schedules.alive(gpipe(4, 0, 16)), how="counted")

# %% [markdown]
# All of them: no backward pass starts before the last forward pass. So GPipe gains time from more micro-batches, but no
# memory: their activations together are those of the whole batch. This is what limits it in practice.
#
# > **Question.** The last rank could start its first backward pass at once after its first forward pass. Why would that help
# > all others?
#
# <details><summary>Answer</summary>
# Its gradient would travel back through the pipeline while later micro-batches are still on their way forward, and every rank
# could let go of the first micro-batch's activations early.
# </details>
#
# ## Exercise: 1F1B
#
# That is **1F1B**, *one forward, one backward* ([Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), section 2.2). Each
# rank
#
# 1. runs a few forward passes **ahead**, just as many as keep the ranks behind it busy until the first gradient comes back,
# 2. then does one forward and one backward pass **in turn**,
# 3. and when there are no forward passes left, the backward passes that are.
#
# Write two functions:
#
# - `alternate(forward, backward, ahead)` puts two lists of passes of the same length together in this way, and leaves both as
#   they are;
# - `one_forward_one_backward(p, rank, m)` calls it. By how many is a rank ahead? The last rank by none: its gradient is there
#   at once. And the rank before it? The first one? With few micro-batches it cannot be more than there are.
#
# `alternate` is used again for interleaving further down, so keep it general.

# %% exercise="1f1b"
from course.parallel.pipeline_parallel.schedules import alternate, one_forward_one_backward

# %%
check("1f1b")

# %% [markdown]
# > **Predict.** Compared with GPipe, 4 ranks, 8 micro-batches: will 1F1B be faster, and by how much?

# %%
my_speedup = 1.2                 # your prediction, GPipe's time over that of 1F1B

# %%
both = {"GPipe": simulated(gpipe, 4, 8), "1F1B": simulated(one_forward_one_backward, 4, 8)}
ends = {name: max(end for _, end in when.values()) for name, when in both.items()}
lab.beside("GPipe's time over that of 1F1B", my_speedup, ends["GPipe"] / ends["1F1B"], "times", "simulated")
lab.picture(pipeline.timelines(both, 4),
            "Above GPipe, below 1F1B. Both end at the same time. In 1F1B forward and backward boxes alternate from early on, and "
            "the idle time lies elsewhere")

# %% [markdown]
# Not at all: the bubble is the same. People who first read about 1F1B often expect otherwise. But the simulation left
# something out: its messages took no time. `timeline` has an argument for that, `send`, in forward passes.
#
# > **Predict.** Let each message take half as long as a forward pass, with 4 ranks and 16 micro-batches. By how much does
# > the step of each schedule grow? Without messages both take 57 forward passes. In GPipe, how many messages does everybody
# > wait for?

# %%
my_gpipe, my_alternating = 57.0, 57.0                # your predictions, in forward passes


# %%
def ahead(p: int, rank: int, m: int, v: int = 1) -> list[Pass]:
    """1F1B that runs twice as far ahead."""
    forward, backward = ([Pass(kind, 0, micro) for micro in range(m)] for kind in ("F", "B"))
    return alternate(forward, backward, min(2 * (p - rank - 1), m))


def takes(make, send: float) -> float:
    """Forward passes that a step of 16 micro-batches on 4 ranks takes, if each message takes as long as `send` of them."""
    return max(end for _, end in schedules.timeline([make(4, rank, 16) for rank in range(4)], send=send).values())


lab.beside("GPipe, send=0.5", my_gpipe, takes(gpipe, 0.5), "forward passes", "simulated")
lab.beside("1F1B, send=0.5", my_alternating, takes(one_forward_one_backward, 0.5), "forward passes", "simulated")
for send in (0, 0.01, 0.1, 0.5):
    print(f"send={send:<4}  GPipe {takes(gpipe, send):5.2f}   1F1B {takes(one_forward_one_backward, send):5.2f}   "
          f"1F1B, twice as far ahead {takes(ahead, send):5.2f}")

# %% [markdown]
# So 1F1B is as fast as GPipe *where messages are free*. GPipe waits for 2·(p − 1) messages in a step, 6 here: three on the way
# there and three on the way back. All others travel beside the work on other micro-batches. 1F1B waits for 28. The reason is
# what it saves: rank 0 has at most four micro-batches under way, so a fifth has to wait until the first is back. The way there
# and back takes 4 forward passes, 4 backward passes and 6 messages, 12 + 6·`send`. In that time rank 0 has the work of four
# micro-batches, 12. So it waits for 6 messages again with every four micro-batches. Who runs further ahead has work meanwhile, as
# the last column shows, but keeps more activations: 7 micro-batches on rank 0 instead of 4.
#
# Does it matter? Between GPUs of one machine a message is short beside a pass. In the recorded runs at the end of this lesson an
# activation of 34 MB takes 0.1 ms at 350 GB/s. A forward pass of a stage takes about 13 ms: a third of 2537 ms over 64. So `send`
# is less than 0.01, and the two schedules hardly differ. Over a slow network, or with small micro-batches, they do.
#
# What 1F1B gains is memory:

# %%
made = {name: [make(4, rank, 16) for rank in range(4)] for name, make in
        (("GPipe", gpipe), ("1F1B", one_forward_one_backward))}
lab.picture(pipeline.activations_kept(made), "Bars: GPipe keeps 16 micro-batches on every rank, 1F1B keeps 4, 3, 2 and 1")

# %% [markdown]
# At most $p - \text{rank}$ micro-batches instead of $m$, however large $m$ is. So $m$ can be large, and *that* makes the
# bubble small.
#
# > **Question.** Ranks are unequal now: the first keeps four times as much as the last. What could one do with that?
#
# <details><summary>Answer</summary>
# Checkpoint activations on the first ranks only (lesson 13), give them fewer blocks (the first has the embedding as well), or
# give the memory that the last one has left to the head, whose logits are large in a language model. All of these are done.
# </details>
#
# ## Does it train?
#
# Simulated times say nothing about gradients. Train the model of 5 blocks on 4 ranks with your schedule, and compare every
# parameter with one process, in float64, after three steps of plain gradient descent. This is `course verify`, with your
# functions in the library's place:

# %%
layout = config.load("vit-demo", [*verify.DEFAULTS, *FIVE, "parallel.pp=4", "parallel.dp=1", "train.micro_batch=2"])


def compared():
    with lab.yours(alternate, one_forward_one_backward):
        return verify.compare(layout)


equal = verify.tell(layout, ranks(4)(compared)[0])
assert equal

# %% [markdown]
# The order of the passes does not change the sum of the gradients, except in the last digit. What executes a schedule is
# short: for each pass, wait for what it needs, compute, send.

# %%
print(getsource(Pipeline.train))

# %% [markdown]
# > **Question.** In `train`, the receive for the *next* pass is begun at the end of each turn of the loop. On a CPU that is when
# > this pass is done. And on a GPU? Remember what a call to a GPU waits for (lesson 00).
#
# <details><summary>Answer</summary>
# For nothing. On a GPU the loop has only <i>given</i> it this pass's work, so the message for the next one arrives while the GPU
# still computes. If the loop asked for it only when the next pass begins to need it, every message would cost its full time.
# </details>
#
# ## Interleaved: a smaller bubble
#
# The bubble is the time that the first micro-batch takes to get to the last rank, and its gradient to get back. Make the
# *steps* smaller: give each rank not one piece of the model but **v chunks**. With 4 ranks and v = 2, rank 0 has stages 0 and
# 4 of 8, rank 1 stages 1 and 5, and so on; a micro-batch goes through the ranks twice. Each pass is half as long, so the line
# fills twice as fast:
#
# $$\text{bubble} = \frac{p-1}{p-1+v\,m}$$
#
# > **Predict.** 4 ranks, 8 micro-batches, two chunks: what share is idle? And what will the sleeping stages show: closer to
# > theory than GPipe, or farther away?

# %%
my_interleaved = 0.2             # your prediction of what will be seen

# %%
lab.show("course.parallel.pipeline_parallel.schedules.interleaved")

# %%
def with_mine():
    with lab.yours(alternate):
        return simulated_pipeline.run_pipeline("interleaved", m=8, v=2)


twice = ranks(4)(with_mine)[0]
lab.beside("idle, interleaved, seen", my_interleaved, schedules.idle_share(twice, 4))
print(f"in theory {schedules.bubble(4, 8, 2):.3f}, without interleaving {schedules.bubble(4, 8):.3f}")
lab.picture(pipeline.timelines({"simulated": simulated(schedules.interleaved, 4, 8, 2)}, 4),
            "Simulated: each rank's forward boxes of chunk 0 and chunk 1 alternate in groups of four")
lab.picture(pipeline.timelines({"seen": twice}, 4, "seconds"), "The same as measured, with gaps between the boxes")

# %% [markdown]
# **What you should see:** in theory 3 / 19 = 16%, and seen it is farther above the theory than GPipe was: passes are half as
# long, so there are twice as many messages, and each costs the same. More chunks, more messages: that is the price, besides
# activations of a few more micro-batches. It pays where $m$ is small compared with $p$.
#
# Try all of it. *Activations kept* counts in micro-batches of all of a rank's layers, so that schedules can be compared.
#
# > **Predict, before you move the sliders:** 8 ranks and 8 micro-batches. Which schedule needs the least time? Which keeps
# > the least?

# %%
slider = widgets.explore(pipeline.simulated, schedule=["gpipe", "1f1b", "interleaved"], p=[4, 2, 8], m=[8, 4, 16, 32],
                         v=[2, 3, 4],
                         alt="The timeline of a schedule with p ranks and m micro-batches: who computes which one when, and how "
                             "much is idle. v, the number of chunks, is for the interleaved schedule alone.")

# %% [markdown]
# <details><summary>Answer</summary>
# Interleaved takes the least time, and with four chunks less than with two: 18% idle against 30%, and 47% for the other two.
# GPipe keeps 8 micro-batches on every rank, 1F1B 8, 7, ... 1: the least. Interleaved lies between them: with two chunks the
# last rank keeps 4.5, with four 6.25. A smaller bubble is paid for in memory.
# </details>
#
# ## Messages, and how a pipeline stands still
#
# In the middle of 1F1B two neighbours exchange something at the same time: one sends an activation on, the other a gradient
# back. Each wants to send, and then to receive. You have met that in lesson 07, in a ring:

# %%
def neighbours() -> str:
    """Two ranks of a pipeline in the middle of 1F1B."""
    other = 1 - dist.get_rank()
    mine, theirs = torch.ones(4, 128), torch.empty(4, 128)
    dist.send(mine, other)
    dist.recv(theirs, other)
    return "exchanged"


# %% [markdown]
# > **Predict** again. What will happen?

# %%
try:
    print(ranks(2)(neighbours))
except RankError as error:
    print(error)

# %% [markdown]
# The same **deadlock**, in every 1F1B that is written down like this. (`ranks` writes down what each rank is about to call, and
# so sees that each waits for the other.) There are two cures. Megatron-LM lets neighbours agree: one
# call sends and receives at once (`batch_isend_irecv`). This library begins both and waits where the data is needed, as you did
# in the ring:

# %%
def neighbours_at_ease() -> str:
    """The same exchange; nobody waits before both messages are on their way."""
    other = 1 - dist.get_rank()
    mine, theirs = torch.ones(4, 128), torch.empty(4, 128)
    coming, going = dist.irecv(theirs, other), dist.isend(mine, other)
    coming.wait()
    going.wait()
    return "exchanged"


print(ranks(2)(neighbours_at_ease))

# %% [markdown]
# Another danger is silent. A message carries no name: the receiver assumes that whatever comes next from that sender is
# the one that it awaits. If two ranks disagree on the order of their passes, shapes still fit, nothing stops, and the
# model trains with the wrong gradients. `schedules.crossed` counts such messages before anything runs; your check used
# it.

# %%
lost = [gpipe(2, 0, 4), [*gpipe(2, 1, 4)[:4], *reversed(gpipe(2, 1, 4)[4:])]]       # rank 1 goes backward in the other order
right = [gpipe(2, rank, 4) for rank in range(2)]
times = [max(end for _, end in schedules.timeline(each).values()) for each in (right, lost)]
print(f"{schedules.crossed(lost)} messages are taken for others, and nothing stops: it would take {times[1]:g}, for {times[0]:g} "
      "in the right order, if each message waited for the pass that it is for")

# %% [markdown]
# > **Question.** NCCL does the calls of one group strictly one after the other. In 1F1B a rank awaits an activation from one
# > side, while its own gradient should go the other way. What could go wrong with one group for all ranks of the pipeline?
# > Look at `make_wires` in `course/parallel/pipeline_parallel/runtime.py` for the cure.
#
# <details><summary>Answer</summary>
# A send queues behind a receive whose message is not there yet, although it could go at once: the rank that waits for it gets
# it late, or, if that receive depends on this very send, never. The library makes a group for each wire: each pair of
# neighbours, each direction.
# </details>
#
# ## Weights at both ends
#
# A GPT often uses the same matrix twice: as the embedding of tokens, on the first stage, and to compute logits, on the last.
# These are **tied weights**. In a pipeline there are two copies, on two ranks.
#
# > **Question.** Each copy gets a gradient, of its own use of the matrix. What has to happen before the optimizer's step?
#
# <details><summary>Answer</summary>
# The gradient of a matrix that is used twice is the <i>sum</i> over both uses. Add up the two gradients over the two ranks,
# an all-reduce between the first and the last stage. Then both copies take the same step and stay equal. Without it they
# drift apart, silently.
# </details>
#
# In this library that is a line in the parameter's placement, `partial_over`: its gradient is complete only when summed over
# that axis. It is the same mechanism as for norms under sequence parallelism (lesson 10).

# %%
lab.show("course.parallel.pipeline_parallel.runtime.tie_ends")

# %%
tied = config.load("gpt-demo", [*verify.DEFAULTS, "model.tied=true", "parallel.pp=2", "parallel.dp=1", "train.micro_batch=2",
                                "train.device=cpu"])
equal = verify.tell(tied, ranks(2)(verify.compare, tied)[0])
assert equal

# %% [markdown]
# ## On four GPUs
#
# 16 blocks of width 4096 on four H200, 16 micro-batches of 4096 tokens, bf16, causal attention; the same for PyTorch's
# own `torch.distributed.pipelining`. Four GPUs would ideally need a quarter of the time that one needs. The share of
# their time beyond that is *lost*: they are idle, or slower than alone.
#
# > **Predict.** What share will 1F1B lose, and interleaved with two chunks? In theory 3 / 19 = 15.8% and 3 / 35 = 8.6%.

# %%
my_1f1b = 0.16                   # your predictions
my_two_chunks = 0.09

# %%
rows = {(row["case"], row["gpus"]): row for row in lab.results("pp_h200")["rows"] if "ms" in row}
single = rows["one GPU", 1]["ms"]
lost_share = {case: 1 - single / (gpus * row["ms"]) for (case, gpus), row in rows.items() if gpus == 4}
lab.recorded("pp_h200", {case: {"ms": rows[case, 4]["ms"], "lost, %": 100 * share, "GB, largest rank": rows[case, 4]["memory_gb"]}
                         for case, share in lost_share.items()}, why=f"Four GPUs; one takes {single:.0f} ms")
lab.beside("\nlost in 1F1B", my_1f1b, lost_share["1f1b"], how="recorded")
lab.beside("lost in interleaved, two chunks", my_two_chunks, lost_share["interleaved"], how="recorded")

# %% [markdown]
# **What you should see:** GPipe and 1F1B lose 14.5 and 13.5%, less than in theory, and differ in memory: a third for 1F1B.
# Less, probably because the one GPU that they are measured by never rests: it draws all the power that it may, and lowers its
# clock for that. One that waits a sixth of the time runs faster in the rest (lesson 15 shows such clocks). Interleaving loses 8%:
# its bubble is half as large, and its messages hide behind the work. In PyTorch's interleaved schedule something costs more
# than the smaller bubble saves, and it loses more than 1F1B. The table does not say what it is.
#
# ## What you know now
#
# - A pipeline cuts by depth. It sends little, and it waits: (p − 1) / (p − 1 + v·m) of the time.
# - A schedule is a list. Simulate it before you run it: is it complete, does it end, how long is it, what does it keep?
# - 1F1B keeps p − rank micro-batches instead of m. It is as fast as GPipe where messages are short beside a pass; it waits for
#   more of them. Interleaving divides the bubble by about v, for v times the messages.
# - Order is everything: ranks that all send first may wait forever, and a rank that receives in another order gets the
#   wrong data in silence.
# - What is used on two stages has a gradient in two parts.
#
# **Check your work once more, from outside.** Save the notebook; then, in a terminal: `course check
# notebooks/12_pipeline_parallel_mine.ipynb`.
#
# Next: [lesson 13](13_memory.ipynb), where the bytes go.
