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
# Lesson 10 split every layer across several GPUs, which needs fast links: four all-reduces in every block. You can also cut a
# model **by depth**. The first GPU has the first blocks, the second GPU the next ones, and activations travel along like
# workpieces on an assembly line. Little is sent, but GPUs wait: this idle time is the **bubble**.
#
# **What you will learn**
#
# - how to write a pipeline schedule as a list of passes, and how to simulate it before anything runs;
# - how large the bubble is, and how micro-batches and interleaving shrink it;
# - how 1F1B saves memory, and how the order of messages can stop a pipeline or corrupt its gradients.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 90 minutes |
# | computing | 1 minute on two cores |
# | you write | GPipe (1 line), 1F1B (4 lines); optional: the executor of any schedule (25 lines) |
# | you measure | the bubble and the activations that each rank keeps, predicted and measured |
#
# You should have done [lesson 01](01_baseline.ipynb) (micro-batches) and [lesson 10](10_tensor_parallel.ipynb) (`Placement`).
# Work in a copy: *File → Save Notebook As…*, `12_pipeline_parallel_mine.ipynb`.

# %% numbers=true
from course.bench.results import value
from course.parallel.pipeline_parallel import schedules as orders


def step_takes(name, send):
    made = [orders.passes_of(name, 4, rank, 16) for rank in range(4)]
    return max(end for _, end in orders.timeline(made, send=send).values())


def waited_messages(name):
    return step_takes(name, 1) - step_takes(name, 0)


def share_lost(case):
    return 1 - value("pp_h200", "one GPU", gpus=1) / (4 * value("pp_h200", case, gpus=4))


def kept_by_last(chunks):
    return orders.alive(orders.interleaved(8, 7, 8, chunks)) / chunks


memory_ratio = (value("pp_h200", "1f1b", "memory_gb", gpus=4)
                / value("pp_h200", "gpipe", "memory_gb", gpus=4))
forward_ms = value("pp_h200", "one GPU", gpus=1) / 64 / 3

# %%
from inspect import getsource

import torch
import torch.distributed as dist

from course import config, models, parallel
from course.training import verify
from course.lab.figures import pipeline, who_holds, widgets
from course.lab.instruments import simulated_pipeline
from course.lab.instruments.forward_trace import trace
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
# A **stage** is a group of consecutive blocks. The first stage also has the embedding; the last has the head and the loss.
# The next cell puts the 5 blocks of a small model on 4 ranks. The number of blocks need not be a multiple of the ranks:
# the library splits like `tensor_split`, so the first ranks get one more block.
#
# > **Predict.** Which ranks get what?

# %%
FIVE = ["model.depth=5", "model.grid=[16,32]", "train.device=cpu"]


def stage() -> str:
    """What this rank keeps of the model."""
    c = config.load("vit-demo", [*FIVE, "parallel.pp=4"])
    model = models.build_model(c.model)
    parallel.parallelize(model, parallel.build_mesh(c.parallel, parallel.join("cpu")),
                         c.parallel)
    parts = [name for name in ("embed", "head") if getattr(model, name) is not None]
    return (f"blocks {', '.join(model.blocks)}; "
            f"{' and '.join(parts) or 'neither embedding nor head'}; "
            f"{sum(p.numel() for p in model.parameters()):,} parameters")


for rank, text in enumerate(ranks(4)(stage)):
    print(f"rank {rank}: {text}")

WEIGHTS = {"embedding": "embed.proj.weight",
           **{f"block {number}": f"blocks.{number}.mlp.up.weight"
              for number in range(5)},
           "head": "head.proj.weight"}
held = ranks(4)(trace, "vit-demo", "model.depth=5", "train.global_batch=4",
                "train.micro_batch=1", "parallel.pp=4")
lab.picture(who_holds.parameters(held, WEIGHTS, title="weights by rank, pp=4"),
            "Four rows, one for each rank. Rank 0 holds the embedding and blocks 0 "
            "and 1, rank 1 block 2, rank 2 block 3, rank 3 block 4 and the head.")

# %% [markdown]
# Rank 0 has blocks 0 and 1, and each other rank has one block. The slowest stage sets the pace. Here three of four ranks wait
# for the first one in every pass, so choose a depth divisible by the number of ranks.
#
# The model's own code did not change. A stage is the same model with some parts missing. Without an embedding, `forward`
# takes `x`, the output of the previous stage. Without a head, it returns its own output to the next stage:

# %%
print(getsource(ViT.forward))

# %% [markdown]
# ## What travels
#
# One activation tensor, (B, T, D), travels from stage to stage, and its gradient travels back. In tensor parallelism every
# block does four all-reduces of this size, two forward and two backward. In an all-reduce over n GPUs, each GPU sends
# 2·(n − 1)/n times the tensor.
#
# > **Predict.** 16 blocks of width 4096 run on 4 GPUs, with 4096 tokens in bf16. How many times as much does a GPU send in
# > tensor parallelism as a GPU in the middle of a pipeline?

# %%
my_ratio = 10                    # your prediction

# %%
# (1, 4096, 4096) in bf16
tensor_bytes = 4096 * 4096 * 2
# 16 blocks, 4 all-reduces
by_tensor = 16 * 4 * tensor_bytes * 2 * (4 - 1) / 4
# one activation on, one gradient back
by_pipeline = 2 * tensor_bytes
print(f"tensor parallel {by_tensor / 1e9:.2f} GB, pipeline parallel "
      f"{by_pipeline / 1e9:.3f} GB")
lab.beside("sent by one GPU, tensor over pipeline parallel", my_ratio,
           by_tensor / by_pipeline, "times", "computed")

# %% [markdown]
# Nearly fifty times. This is why pipelines run *between* nodes, where links are slow, and tensor parallelism runs within
# one.
#
# ## One batch: one rank at a time
#
# Send one batch through. A forward pass takes a rank one unit of time and a backward pass two, because it does twice the
# matrix multiplications (lesson 01).
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
            "Four rows, one for each rank. Forward boxes go down from rank 0 to rank "
            "3 like stairs. Then backward boxes of twice the width go up again. The "
            "rest is gray: idle time.")

# %% [markdown]
# Three quarters: one rank works and three wait. The model now fits, but four GPUs are only as fast as one.
#
# The assembly line has the cure. While rank 1 works on one piece, rank 0 can start the next one. So cut the batch into
# **micro-batches**, as for gradient accumulation in lesson 01. The result is the same, and stages can overlap.
#
# ## A schedule is a list
#
# The order of a rank's passes is the only thing to decide. In this library a **schedule** is a function that returns this
# order as plain data: a list of `Pass(kind, chunk, micro)`.
#
# | field | |
# |---|---|
# | `kind` | `"F"`, a forward pass, or `"B"`, a backward pass |
# | `chunk` | which of this rank's pieces of the model; each rank has one piece, 0, until the section on interleaving |
# | `micro` | which micro-batch, from 0 |
#
# The list does not say *when* a pass runs. A pass starts as soon as the rank is free and its input has arrived. A forward
# pass needs the activations of the previous stage, a backward pass the gradient from the next stage. So messages and waiting
# follow from the order:

# %%
lab.show("course.parallel.pipeline_parallel.schedules.before")

# %% [markdown]
# Because a schedule is data, you can analyze it before anything runs. `schedules.timeline` computes when each pass starts
# and ends, and it detects ranks that wait for each other in a circle. Read it: it is the whole theory of pipelines.

# %%
lab.show("course.parallel.pipeline_parallel.schedules.timeline")

# %% [markdown]
# ## Exercise: GPipe
#
# This is the simplest schedule ([Huang et al. 2018](https://arxiv.org/abs/1811.06965)): run **all** micro-batches forward, then
# all of them backward, in the same order. All ranks have the same list. Write it for `m` micro-batches.
#
# All schedules take the same arguments: `p` ranks, this `rank` among them, `m` micro-batches, `v` chunks per rank. GPipe
# needs few of them.

# %% exercise="gpipe"
from course.parallel.pipeline_parallel.schedules import gpipe

# %% [markdown]
# The check first simulates your schedule on pipelines of several sizes and reports what fails. Then it replaces the
# library's schedule with yours and trains a model of 5 blocks on 2 and on 4 ranks.

# %%
check("gpipe")

# %% [markdown]
# ## The bubble
#
# Now run 8 micro-batches on 4 ranks.
#
# > **Predict** the share of idle time. How long does the first rank work? How long does it wait between its last forward
# > pass and its first backward pass?

# %%
my_bubble = 0.5                  # your prediction, 0 to 1

# %%
def simulated(make, p: int, m: int, v: int = 1):
    """The timeline of a schedule."""
    return schedules.timeline([make(p, rank, m, v) for rank in range(p)], v)


eight = simulated(gpipe, 4, 8)
lab.beside("idle, 4 ranks, 8 micro-batches", my_bubble, schedules.idle_share(eight, 4),
           how="simulated")
lab.picture(pipeline.timelines({"GPipe, 8 micro-batches": eight}, 4),
            "Forward boxes 0 to 7 on each rank, each rank one box later than the rank "
            "above. Then backward boxes, starting on the last rank. Gray idle time in "
            "between and at the corners.")

# %% [markdown]
# <details><summary>How to find it</summary>
# Let <i>f</i> and <i>b</i> be the times of a forward and a backward pass. Each rank works for <i>m</i>·(<i>f</i> + <i>b</i>).
# Rank 0 waits (<i>p</i> − 1)·<i>f</i> while its last micro-batch travels to the end. Then it waits (<i>p</i> − 1)·<i>b</i>
# while the first gradient travels back. Every other rank waits as long in total, partly before it begins and partly after it
# ends. The share is (<i>p</i> − 1) / (<i>p</i> − 1 + <i>m</i>), here 3 / 11 = 27%. The times of the passes cancel.
# </details>
#
# Only two numbers matter, $p$ and $m$: $\displaystyle\text{bubble} = \frac{p-1}{p-1+m}$. Move the sliders.
#
# > **Predict, before you move them:** how many micro-batches do 4 ranks need for a bubble below 10%? And 8 ranks?

# %%
slider = widgets.explore(lambda p, m: pipeline.simulated("gpipe", p, m), p=[4, 2, 8],
                         m=[4, 1, 2, 8, 16, 28, 32, 64],
                         alt="The timeline of GPipe for p ranks and m micro-batches, "
                         "with the share of idle time.")

# %% [markdown]
# <details><summary>Answer</summary>
# 4 ranks: 3 / (3 + m) &lt; 0.1 from m = 28 on. 8 ranks: from m = 64 on. As a rule of thumb, use ten times as many
# micro-batches as ranks. So a pipeline needs a large global batch, and lesson 08 asked how large is too large.
# </details>
#
# ## Measure it
#
# A simulation only proves what you put into it. Does a real pipeline behave like that? Four stages that really compute need
# four GPUs, or at least four free cores. So the next cell cheats in one place: the stages **sleep** for as long as a pass
# takes (40 ms forward, 80 ms backward). Everything else is real: four processes, the library's pipeline, your schedule and
# the messages.
#
# > **Predict.** Will the bubble be larger or smaller than in theory? By how much?

# %%
my_seen = 0.30                   # your prediction; in theory 3/11 = 0.27

# %%
def with_gpipe():
    with lab.yours(gpipe):
        return simulated_pipeline.run_pipeline("gpipe", m=8)


seen = ranks(4)(with_gpipe)[0]
lab.beside("idle, measured", my_seen, schedules.idle_share(seen, 4))
lab.picture(pipeline.timelines({"GPipe, measured": seen}, 4, "seconds"),
            "The simulated picture again, as measured: small gaps separate the boxes")

# %% [markdown]
# **What you should see:** a little more than in theory. A message takes about a millisecond here, which leaves gaps between
# the boxes. The theory ignores messages. On a busy machine the gaps are longer.
#
# > **Question.** Micro-batches of half the size make the bubble smaller. Why not always take the smallest, one sample each?
#
# <details><summary>Answer</summary>
# For two reasons. Each pass adds a message with its latency. And small matrix multiplications do not reach the roof
# (lesson 00): below some size, half the samples take more than half the time.
# </details>
#
# ## Interleaved: a smaller bubble
#
# The bubble is the time until the first micro-batch reaches the last rank and its gradient returns. To shrink it, give each
# rank **v chunks** of the model instead of one piece. With 4 ranks and v = 2, rank 0 has stages 0 and 4 of 8, rank 1 has
# stages 1 and 5, and so on. A micro-batch travels through the ranks twice. Each pass takes half as long, so the pipeline
# fills twice as fast:
#
# $$\text{bubble} = \frac{p-1}{p-1+v\,m}$$
#
# > **Predict.** 4 ranks, 8 micro-batches, two chunks: what share of the time will the sleeping stages be idle? Will this be
# > closer to theory than GPipe, or farther away?

# %%
my_interleaved = 0.2             # your prediction of what you will measure

# %%
def with_two_chunks():
    return simulated_pipeline.run_pipeline("interleaved", m=8, v=2)


twice = ranks(4)(with_two_chunks)[0]
share, interleaved = schedules.idle_share(twice,
                                          4), simulated(schedules.interleaved, 4, 8, 2)
lab.beside("idle, interleaved, measured", my_interleaved, share)
print(f"in theory {schedules.bubble(4, 8, 2):.3f}, "
      f"without interleaving {schedules.bubble(4, 8):.3f}")
lab.picture(pipeline.timelines({"simulated": interleaved}, 4),
            "Simulated: forward boxes of chunk 0 and chunk 1 alternate in groups of "
            "four")
lab.picture(pipeline.timelines({"measured": twice}, 4, "seconds"),
            "The same as measured, with gaps between the boxes")

# %% [markdown]
# **What you should see:** theory says 3 / 19 = 16%, and the measurement is farther above it than GPipe's was. There are
# twice as many messages, and each costs as much as before. Interleaving also keeps activations of a few more micro-batches.
# It pays off where $m$ is small compared with $p$.
#
# ## Weights at both ends
#
# A GPT often uses one matrix twice: as the token embedding on the first stage, and to compute logits on the last. These are
# **tied weights**. In a pipeline two ranks hold copies of this matrix.
#
# > **Question.** Each copy gets a gradient from its own use of the matrix. What has to happen before the optimizer's step?
#
# <details><summary>Answer</summary>
# The gradient of a matrix that is used twice is the <i>sum</i> over both uses. An all-reduce between the first and the last
# stage adds the two gradients. Then both copies take the same step and stay equal. Without it they silently drift apart.
# </details>
#
# In this library, the parameter's placement says so in one line, `partial_over`: the gradient is complete only when summed
# over that axis. Norms under sequence parallelism use the same mechanism (lesson 10).

# %%
lab.show("course.parallel.pipeline_parallel.runtime.tie_ends")

# %%
tied = config.load("gpt-demo", [*verify.DEFAULTS, "model.tied=true", "parallel.pp=2",
                                "parallel.dp=1", "train.micro_batch=2",
                                "train.device=cpu"])
equal = verify.tell(tied, ranks(2)(verify.compare, tied)[0])
assert equal

# %% [markdown]
# ## Messages, and how a pipeline deadlocks
#
# Soon ranks will alternate forward and backward passes. Then two neighbors exchange tensors at the same time: one sends an
# activation forward, the other a gradient back. Suppose each sends first and then receives. Lesson 07 did this in a ring:

# %%
def neighbors() -> str:
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
    print(ranks(2)(neighbors))
except RankError as error:
    print(error)

# %% [markdown]
# It is the same **deadlock**. (`ranks` records what each rank is about to call, so it sees that each waits for the other.)
# There are two cures. In Megatron-LM, one call sends and receives at once (`batch_isend_irecv`). This library starts both
# operations and waits where it needs the data, as you did in the ring:

# %%
def neighbors_at_ease() -> str:
    """The same exchange, but each rank starts both messages before it waits."""
    other = 1 - dist.get_rank()
    mine, theirs = torch.ones(4, 128), torch.empty(4, 128)
    coming, going = dist.irecv(theirs, other), dist.isend(mine, other)
    coming.wait()
    going.wait()
    return "exchanged"


print(ranks(2)(neighbors_at_ease))

# %% [markdown]
# Another danger is silent. A message has no label: the receiver assumes that the next message from a sender is the one it
# needs. If two ranks disagree on the order of their passes, the shapes still fit and nothing stops. The model trains with
# wrong gradients. `schedules.crossed` counts such messages before anything runs, and your check used it.

# %%
# rank 1: other order
lost = [gpipe(2, 0, 4), [*gpipe(2, 1, 4)[:4], *reversed(gpipe(2, 1, 4)[4:])]]
right = [gpipe(2, rank, 4) for rank in range(2)]
times = [max(end for _, end in schedules.timeline(each).values())
         for each in (right, lost)]
print(f"{schedules.crossed(lost)} messages reach the wrong pass, and nothing stops. "
      f"If each message waited for "
      f"its own pass, the step would take {times[1]:g} units instead of {times[0]:g}.")

# %% [markdown]
# ## What has to be kept
#
# A backward pass needs the activations of its forward pass. They stay in memory until then.
#
# > **Predict.** GPipe runs 16 micro-batches. What is the largest number of micro-batches whose activations a rank keeps at
# > once?

# %%
my_kept = 4                      # your prediction

# %%
lab.beside("micro-batches kept by rank 0", my_kept, schedules.alive(gpipe(4, 0, 16)),
           how="counted")

# %% [markdown]
# All of them: no backward pass starts before the last forward pass ends. With more micro-batches GPipe saves time but no
# memory, and this limits it in practice.
#
# > **Question.** The last rank could start its first backward pass right after its first forward pass. Why would that help
# > all other ranks?
#
# <details><summary>Answer</summary>
# Its gradient would travel back while later micro-batches still travel forward. Every rank could free the first
# micro-batch's activations early.
# </details>
#
# That is **1F1B**, *one forward, one backward* ([Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), section 2.2). The
# next cell simulates the library's 1F1B.
#
# > **Predict.** With 4 ranks and 8 micro-batches, how much faster than GPipe will 1F1B be?

# %%
my_speedup = 1.2                 # your prediction, GPipe's time over that of 1F1B

# %%
both = {"GPipe": simulated(gpipe, 4, 8),
        "1F1B": simulated(schedules.one_forward_one_backward, 4, 8)}
ends = {name: max(end for _, end in when.values()) for name, when in both.items()}
lab.beside("GPipe's time over that of 1F1B", my_speedup, ends["GPipe"] / ends["1F1B"],
           "times", "simulated")
lab.picture(pipeline.timelines(both, 4),
            "Above GPipe, below 1F1B. Both end at the same time. In 1F1B, forward and "
            "backward boxes alternate from early on, and the idle time is in other "
            "places.")

# %% [markdown]
# It is no faster: the bubble is the same. Many people expect otherwise. What 1F1B saves is memory:

# %%
made = {name: [make(4, rank, 16) for rank in range(4)] for name, make in
        (("GPipe", gpipe), ("1F1B", schedules.one_forward_one_backward))}
lab.picture(pipeline.activations_kept(made),
            "Bars: GPipe keeps 16 micro-batches on every rank; 1F1B keeps 4, 3, 2 and "
            "1")

# %% [markdown]
# What 1F1B keeps does not grow with $m$. So $m$ can be large, and *that* makes the bubble small.
#
# > **Question.** Now the ranks are unequal: the first keeps four times as much as the last. How could you use that?
#
# <details><summary>Answer</summary>
# Checkpoint activations on the first ranks only (lesson 13), or give these ranks fewer blocks. Or use the free memory of the
# last rank for the head, whose logits are large in a language model. All of these are common.
# </details>
#
# ## When messages take time
#
# So far the simulated messages took no time. `timeline` has an argument for that, `send`, in units of a forward pass.
#
# > **Predict.** Each message takes half as long as a forward pass, with 4 ranks and 16 micro-batches. Without messages both
# > schedules take the time of 57 forward passes. How long does each take now? How many messages does GPipe wait for?

# %%
# your predictions, in forward passes
my_gpipe, my_alternating = 57.0, 57.0


# %%
def takes(make, send: float) -> float:
    """Time of a step, 16 micro-batches on 4 ranks, in forward passes; a message takes
    `send`."""
    made = [make(4, rank, 16) for rank in range(4)]
    return max(end for _, end in schedules.timeline(made, send=send).values())


alternating = schedules.one_forward_one_backward
unit = "forward passes"
lab.beside("GPipe, send=0.5", my_gpipe, takes(gpipe, 0.5), unit, "simulated")
lab.beside("1F1B, send=0.5", my_alternating, takes(alternating, 0.5), unit, "simulated")
for send in (0, 0.01, 0.1, 0.5):
    print(f"send={send:<4}  GPipe {takes(gpipe, send):5.2f}   "
          f"1F1B {takes(alternating, send):5.2f}")

# %% [markdown]
# GPipe waits for 2·(p − 1) messages in a step, here {result: waited_messages("gpipe") | .0f}. All other messages overlap with
# work on other micro-batches. 1F1B waits for {result: waited_messages("1f1b") | .0f}. Rank 0 has at most four micro-batches
# in flight, so the fifth waits until the first is back. The round trip takes 4 forward passes, 4 backward passes and 6
# messages: 12 + 6·`send`. Rank 0 has only 12 units of work meanwhile, so it waits for 6 messages again, once in every four
# micro-batches.
#
# Between GPUs of one machine this hardly matters. At 350 GB/s an activation of 34 MB takes 0.1 ms. In the appendix's
# pipeline a stage's forward pass takes about {result: forward_ms | .0f} ms, so `send` is below 0.01. Over a slow network, or
# with small micro-batches, it does matter.
#
# Now compare all three schedules. *Activations kept* counts micro-batches through all layers of a rank.
#
# > **Predict, before you move the sliders:** with 8 ranks and 8 micro-batches, which schedule takes the least time? Which
# > keeps the least?

# %%
slider = widgets.explore(pipeline.simulated, schedule=["gpipe", "1f1b", "interleaved"],
                         p=[4, 2, 8], m=[8, 4, 16, 32],
                         v=[2, 3, 4],
                         alt="The timeline of a schedule with p ranks and m "
                         "micro-batches: which rank computes which "
                             "micro-batch when, and the share of idle time. Only the "
                         "interleaved schedule uses v.")

# %% [markdown]
# <details><summary>Answer</summary>
# Interleaved takes the least time: 30% idle with two chunks and 18% with four, and 47% for the other two schedules. 1F1B keeps
# the least: 8 micro-batches on the first rank, 1 on the last. GPipe keeps 8 on every rank. Interleaved is in between: its last
# rank keeps {result: kept_by_last(2) | .1f} with two chunks, and {result: kept_by_last(4) | .2f} with four. A smaller bubble
# costs memory.
# </details>
#
# ## Exercise: 1F1B
#
# In 1F1B each rank
#
# 1. runs a few forward passes **ahead**: just enough to keep the ranks behind it busy until the first gradient comes back;
# 2. then **alternates** one forward and one backward pass;
# 3. finally runs the remaining backward passes.
#
# Write two functions:
#
# - `alternate(forward, backward, ahead)` combines two lists of passes of the same length in this way, and does not change
#   them. The interleaved schedule calls it too, so keep it general;
# - `one_forward_one_backward(p, rank, m)` calls it. How many passes does a rank run ahead? The last rank runs none, because
#   its gradient is available immediately. And the rank before it? The first one? Remember that there may be few micro-batches.

# %% exercise="1f1b"
from course.parallel.pipeline_parallel.schedules import alternate, one_forward_one_backward

# %%
check("1f1b")

# %% [markdown]
# The interleaved schedule is your `alternate` again, with the passes of all chunks:

# %%
lab.show("course.parallel.pipeline_parallel.schedules.interleaved")

# %% [markdown]
# ## Does it train?
#
# Simulated times say nothing about correct gradients. Train 5 blocks on 4 ranks with your schedule, and compare every
# parameter with a single process, in float64:

# %%
layout = config.load("vit-demo", [*verify.DEFAULTS, *FIVE, "parallel.pp=4",
                                  "parallel.dp=1", "train.micro_batch=2"])


def compared():
    with lab.yours(alternate, one_forward_one_backward):
        return verify.compare(layout)


equal = verify.tell(layout, ranks(4)(compared)[0])
assert equal

# %% [markdown]
# ## Open task: run any schedule
#
# *Optional, about 40 minutes. Nothing later needs it.* A schedule is a list. Write the executor: the loop that runs this list
# on a rank. Our solution has about 25 lines. The docstring has the types; you write everything else.
#
# **Contract**
#
# - It runs whatever list it gets: GPipe, 1F1B, interleaved 1F1B with several chunks per rank, or a schedule that you have not
#   seen.
# - Rank and neighbors come from `axis`. `axis.ranks[i]` is the global rank at position i of the pipeline, and messages travel in
#   `axis.group`. `schedules.before` and `schedules.after` name the pass and the rank that a pass depends on.
# - All computation is done by `forward` and autograd. Each stage's parameters get their gradients from your backward passes.
# - When the function returns, every send has completed.
#
# **Levels.** Each one counts by itself, once the first is reached:
#
# | level | what the check counts |
# |---|---|
# | correct | losses and weights after two steps match the library's, and passes run in the order of the list |
# | byte budget | each result is sent once, to the rank that needs it, and nothing else is sent |
# | memory budget | a forward pass's activations and output are freed by its backward pass |
# | overlapped | no rank waits for its own message to leave before it begins the next pass |
#
# Start with correct. `lab.hint("run-schedule")` opens the first of three hints, and each further call opens the next one.

# %% exercise="run-schedule"
from course.lab.exercises.lesson12_open_task import run_schedule  # noqa: F401

# %%
check("run-schedule")

# %% [markdown]
# ## How the library runs a schedule
#
# The library's executor is a method. For each pass it waits for the input, computes, and sends:

# %%
print(getsource(Pipeline.train))

# %% [markdown]
# > **Question.** At the end of each turn of its loop, `train` starts the receive for the *next* pass. On a CPU, the current
# > pass has ended by then. And on a GPU? Remember what a call to a GPU waits for (lesson 00).
#
# <details><summary>Answer</summary>
# For nothing. The loop has only <i>queued</i> the current pass's work, so the next message arrives while the GPU still
# computes. If the loop started the receive only when the next pass needs it, every message would cost its full time.
# </details>
#
# > **Question.** NCCL runs the calls of one group strictly in order. A rank may wait for an activation from one side while it
# > should send a gradient to the other. What could go wrong with one group for all ranks of the pipeline? See `make_wires` in
# > `course/parallel/pipeline_parallel/runtime.py` for the cure.
#
# <details><summary>Answer</summary>
# A send queues behind a receive whose message is not there yet, so it goes out late. If that receive depends on this send,
# the pipeline deadlocks. The library creates a group for each pair of neighbors and each direction.
# </details>
#
# ## Summary
#
# - A pipeline cuts the model by depth. It sends little, and its bubble is (p − 1) / (p − 1 + v·m).
# - A schedule is a list: simulate its time, its memory and its messages before you run it.
# - 1F1B keeps p − rank micro-batches instead of m, and is as fast as GPipe while messages are short.
# - Interleaving divides the bubble by about v, at the cost of v times the messages and more memory.
# - Ranks that all send first deadlock, and a wrong receive order silently corrupts gradients.
#
# ## Questions
#
# 1. You run 1F1B twice as far ahead. Which waiting time shrinks, and what does rank 0 keep?
# 2. The last stage computes large logits and takes 30% longer. How much longer is a step?
# 3. When would you choose GPipe?
#
# **Check your work from a terminal.** Save the notebook, then run `course check
# notebooks/12_pipeline_parallel_mine.ipynb`. Next: [lesson 13](13_memory.ipynb) counts the bytes.
#
# ## Appendix (optional): on GPUs
#
# 16 blocks of width 4096 run on four H200s, with 16 micro-batches of 4096 tokens, in bf16. Ideally four GPUs need a quarter
# of one GPU's time. The share of their time beyond that is *lost*. The table includes PyTorch's
# `torch.distributed.pipelining`.
#
# > **Predict.** What share do 1F1B and two interleaved chunks lose? In theory: 3 / 19 = 15.8% and 3 / 35 = 8.6%.

# %%
my_1f1b = 0.16                   # your predictions
my_two_chunks = 0.09

# %%
rows = {(row["case"], row["gpus"]): row for row in lab.results("pp_h200")["rows"]
        if "ms" in row}
single = rows["one GPU", 1]["ms"]
lost_share = {case: 1 - single / (gpus * row["ms"])
              for (case, gpus), row in rows.items() if gpus == 4}
lab.recorded("pp_h200", {case: {"ms": rows[case, 4]["ms"], "lost, %": 100 * share,
                                "GB, largest rank": rows[case, 4]["memory_gb"]}
                         for case, share in lost_share.items()},
             why=f"Four GPUs; one GPU takes {single:.0f} ms")
lab.beside("\nlost in 1F1B", my_1f1b, lost_share["1f1b"], how="recorded")
lab.beside("lost in interleaved, two chunks", my_two_chunks, lost_share["interleaved"],
           how="recorded")

# %% [markdown]
# **What you should see:** GPipe loses {result: share_lost("gpipe") | .1%} and 1F1B {result: share_lost("1f1b") | .1%}.
# Interleaving loses {result: share_lost("interleaved") | .1%}. All lose less than in theory. The probable reason is the
# clock: the single GPU never rests, so it reaches its power limit and runs slower. 1F1B needs
# {result: memory_ratio | .0%} of GPipe's memory. PyTorch's interleaved schedule loses more than its 1F1B; the table does not
# say why.
