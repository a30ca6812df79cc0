# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 20 · Fully sharded data parallelism
#
# In [lesson 13](13_memory.ipynb) you wrote ZeRO-1, which shards the optimizer states. Weights and gradients stayed whole on
# every rank. Stage 2 of ZeRO also shards the gradients, and stage 3 also shards the weights. PyTorch calls stage 3 **FSDP**
# (*fully sharded data parallelism*). Most large models train with it, because the model itself does not change. In this
# lesson you write its three parts.
#
# **What you will learn**
#
# - how a rank computes with weights that it does not keep: gather them, use them, free them;
# - how to hide the gathers behind computation, with at most two units of weights in memory;
# - what stage 3 sends, what it saves, and when it beats tensor parallelism.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 90 minutes |
# | computing | 2 minutes on two cores |
# | you write | a unit (5 lines), the reduce-scatter of its gradients (8), a step's order (12); optional: a better one (45) |
# | you measure | bytes sent, peak memory of weights, a timeline of gathers beside computation |
#
# You should have done [lesson 07](07_data_parallel.ipynb) (collectives, overlap), [lesson 10](10_tensor_parallel.ipynb)
# (tensor parallelism) and [lesson 13](13_memory.ipynb) (ZeRO-1). Work in a copy: *File → Save Notebook As…*,
# `20_fully_sharded_mine.ipynb`.

# %%
from typing import Any

import torch

from course import config, parallel
from course.lab import notebook as lab
from course.lab.exercises.lesson20_fully_sharded import views
from course.lab.figures import fully_sharded, style, who_holds
from course.lab.instruments.bytes_sent import Traffic
from course.lab.instruments.forward_trace import trace
from course.lab.instruments.fully_sharded_timeline import ShardedTimeline, record_step
from course.lab.notebook import check
from course.ops.storage import allocate, free_memory, has_memory
from course.planner import hardware
from course.ranks.notebook_ranks import ranks
from course.training import verify

lab.begin("20")

# %% [markdown]
# ## From stage 1 to stage 3
#
# After each step, n data-parallel ranks hold the same weights. So each rank can keep only one n-th of everything: its
# **share**. Each number has one owner:

# %%
FOUR = ("vit-demo", "model.depth=1", "train.global_batch=4", "parallel.dp=4")
WEIGHTS = {name: f"blocks.0.{name}"
           for name in ("norm1.weight", "attn.qkv.weight", "attn.out.weight",
                        "mlp.up.weight", "mlp.up.bias", "mlp.down.weight")}
held = ranks(4)(trace, *FOUR, "parallel.zero=3")
lab.picture(
    who_holds.parameters(held, WEIGHTS, of="states",
                         title="ZeRO-3 over 4: weights, gradients and states of a "
                         "block"),
    "Four rows of boxes, one for each rank. The colored parts are what a rank keeps "
    "between steps. Each number is with one rank, and a rank's part may end in the "
    "middle of a matrix.")

# %% [markdown]
# The rank that owns a number keeps its weight, its gradient and its optimizer states. The stages differ in what every rank
# keeps whole besides its share:
#
# | stage | whole on every rank | collectives of a step |
# |---|---|---|
# | 0, DDP | weights, gradients, states | all-reduce of the gradients |
# | 1 | weights, gradients | reduce-scatter of the gradients, all-gather of the weights |
# | 2 | weights | the same |
# | 3 | nothing | reduce-scatter of the gradients, all-gather of the weights *twice* |
#
# Stage 3 gathers once for the forward pass and once for the backward pass, because it frees the weights in between.
#
# > **Predict.** An all-reduce sends as many bytes as a reduce-scatter and an all-gather (lesson 07). How many bytes does a rank
# > send in a step with stage 2, and with stage 3? Give both in units of what DDP sends.

# %%
my_stage_2 = 1.0                 # your predictions
my_stage_3 = 1.0


# %%
def assembled(*settings: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A training of this rank in float32, and its part of a batch."""
    from course.training.assemble import assemble

    torch.set_num_threads(1)
    chosen = config.load("vit-demo", ["data.source=mock", "train.device=cpu",
                                      "model.depth=6", "parallel.dp=4", *settings])
    training = assemble(chosen, parallel.build_mesh(chosen.parallel,
                                                    parallel.join("cpu")))
    return training, training.model.example(2, torch.device("cpu"))


def bytes_sent(*settings: str) -> dict[str, float]:
    """The bytes that this rank sends in one step, by kind of collective."""
    training, batch = assembled(*settings)
    training.step(batch)
    with Traffic() as traffic:
        training.step(batch)
    return {kind: sum(call.sent for call in traffic.calls if call.kind == kind)
            for kind in ("all-reduce", "reduce-scatter", "all-gather")}


sent = {name: ranks(4)(bytes_sent, *settings)[0] for name, settings in {
    "DDP": ("parallel.data=bucketed",), "ZeRO-1": ("parallel.zero=1",),
    "ZeRO-2": ("parallel.zero=2",), "ZeRO-3": ("parallel.zero=3",)}.items()}
for name, kinds in sent.items():
    print(f"{name:7}", "   ".join(f"{kind} {size / 1e6:5.2f} MB"
                                  for kind, size in kinds.items()))
total = {name: sum(kinds.values()) for name, kinds in sent.items()}
lab.beside("\nstage 2", my_stage_2, total["ZeRO-2"] / total["DDP"], "x DDP")
lab.beside("stage 3", my_stage_3, total["ZeRO-3"] / total["DDP"], "x DDP")

# %% [markdown]
# **What you should see:** stage 2 sends as much as DDP. Stage 3 sends one and a half times as much, or slightly less: you will
# soon see which weights it need not gather twice.
#
# So the price of stage 3 is half an all-reduce. Its gain is the memory of lesson 13: all 16 bytes of a parameter are divided
# by n.
#
# ## Units
#
# If a rank gathered all weights at once, it would need the memory of all weights. So stage 3 works in **units**: the
# embedding, each block and the head. A unit's weights are whole only while the unit computes.
#
# A unit's weights lie end to end in one flat tensor, so that one collective moves them. The parameters are *views* of this
# tensor. The flat tensor is padded with zeros until n divides its length:

# %%
lab.show("course.lab.exercises.lesson20_fully_sharded.views")

# %% [markdown]
# How does a rank free the memory of weights that the model still refers to? The rank keeps the tensor and resizes the
# **storage** behind it to zero bytes:

# %%
lab.show("course.ops.storage.free_memory")
lab.show("course.ops.storage.allocate")
lab.show("course.ops.storage.has_memory")

# %%
whole = torch.arange(6.0)
weight = torch.nn.Parameter(torch.zeros(2, 2))
weight.data = views(whole, [weight])[0]
print(weight.shape, has_memory(weight), weight.data.tolist())
free_memory(whole)
print(weight.shape, has_memory(weight))
allocate(whole)
whole.copy_(10 + torch.arange(6.0))
print(weight.shape, has_memory(weight), weight.data.tolist())

# %% [markdown]
# > **Question.** The forward pass of a linear layer saves its weight for the backward pass. Why must the second gather fill the
# > *same* storage, and not a new tensor?
#
# <details><summary>Answer</summary>
# Autograd keeps a reference to the tensor that the forward pass used, often a transposed view of it. It does not look the
# weight up in the module again. If the gather makes a new tensor, autograd still reads the old one, whose memory is gone. If
# the gather fills the same storage, all views are valid again.
# </details>
#
# ## Exercise: a unit that is gathered and freed
#
# `__init__` is there: it makes the flat tensor, turns the parameters into views of it, keeps a share, and frees the rest.
#
# - `part` returns this rank's part of a flat tensor: rank r has the r-th of `axis.size` equal pieces.
# - `gather` makes the weights readable. `share` changes with every optimizer step, so each gather brings the ranks' new
#   shares. Gather straight into `whole`: shares that arrive in separate tensors would put the weights in memory twice.
# - `free` frees the memory of the weights.
#
# You need `all_gather_single(whole, share, group=self.axis.group)`, and two of the functions above. The share is a parameter:
# pass `self.share.detach()`.

# %% exercise="sharded-unit"
from course.lab.exercises.lesson20_fully_sharded import ShardedUnit

# %% [markdown]
# The check trains a chain of three units for three steps; each unit is whole only while it computes. It compares the outputs
# and the weights with serial training, checks what a unit keeps between uses and what `gather` allocates, and counts the
# bytes.

# %%
check("sharded-unit")

# %% [markdown]
# ## Exercise: the gradients of a unit
#
# The backward pass of a unit leaves a whole gradient in `.grad` of each parameter. DDP would all-reduce it. Stages 2 and 3
# need less: each rank gets the mean of *its share*, and the whole gradients are freed at once.
#
# > **Predict.** A rank trains 7 billion parameters in float32, in 32 equal units, over 8 ranks. How many GB of gradients does
# > it hold at the peak, with stage 1 and with stage 2? Assume that one unit's gradients are whole at a time.

# %%
my_gradients_1 = 10.0            # your predictions, in GB
my_gradients_2 = 10.0

# %%
all_gradients = 4 * 7e9 / 1e9
lab.beside("gradients with stage 1", my_gradients_1, all_gradients, "GB", "computed")
lab.beside("gradients with stage 2", my_gradients_2,
           all_gradients / 8 + all_gradients / 32, "GB", "computed")

# %% [markdown]
# Write `reduce_gradients`. It adds this rank's part of the **mean** gradient to `unit.share.grad`, which may be `None`. So the
# gradients of several micro-batches add up in the share, and no rank ever accumulates whole gradients.
#
# - The flat gradient is laid out like `unit.whole`, with the padding at its end. A parameter without a gradient counts as zero
#   and keeps its place.
# - `reduce_scatter_single(share, flat, group=unit.axis.group)` fills `share` with this rank's part of the *sum*.
# - Set `.grad` of each parameter to `None`, and keep no other whole gradient.

# %% exercise="reduce-gradients"
from course.lab.exercises.lesson20_fully_sharded import reduce_gradients

# %%
check("reduce-gradients")

# %% [markdown]
# Now put both together. Four ranks run one training step of a linear layer with 64 × 64 weights and a bias.
#
# > **Predict.** How many bytes of weights and of gradients does a rank hold at the end?

# %%
# your prediction; the layer has 4160 numbers of 4 bytes
my_bytes_left = 16640


# %%
def one_step() -> dict[str, tuple[int, int]]:
    """Bytes of weights and of gradients on this rank, after each part of a step."""
    torch.manual_seed(0)
    axis = parallel.build_mesh(config.Parallel(dp=4), parallel.join("cpu")).dp
    layer = torch.nn.Linear(64, 64)
    unit = ShardedUnit(list(layer.parameters()), axis)
    found = {}

    def count(when: str) -> None:
        grads = [p.grad for p in [unit.share, *unit.parameters] if p.grad is not None]
        found[when] = (unit.share.nbytes + unit.whole.untyped_storage().nbytes(),
                       sum(grad.nbytes for grad in grads))

    count("at the start")
    unit.gather()
    count("gather")
    layer(torch.randn(8, 64)).square().sum().backward()
    count("backward")
    unit.free()
    count("free")
    reduce_gradients(unit)
    count("reduce")
    return found


for when, (weight_bytes, grad_bytes) in ranks(4)(one_step)[0].items():
    print(f"{when:13} weights {weight_bytes:6,}   gradients {grad_bytes:6,}")
lab.beside("\nat the end", my_bytes_left, weight_bytes + grad_bytes, "bytes")

# %% [markdown]
# ## The order of a step
#
# Now every computation needs a gather first. If a rank begins a gather only when it needs the weights, it waits for each one.
# So it begins the gather of the *next* unit while it computes the current one. This is **prefetching**.
#
# The forward pass goes through the units 0, 1, 2, … and the backward pass goes back. The reduce-scatter of a unit's gradients
# overlaps with the backward pass of the next unit.
#
# > **Predict.** A model has 8 units. With prefetching one unit ahead, at most how many units are whole at once? How many
# > gathers does a step need? (Which unit's weights need not be freed between forward and backward?)

# %%
my_whole = 1                     # your predictions
my_gathers = 16

# %% [markdown]
# ## Exercise: gather, compute, free, reduce
#
# Write `step_events(units)`: the list of what a rank does in one step. Each entry is a pair, such as `("gather", 2)`:
#
# | event | what it does |
# |---|---|
# | `"gather"` | begins an all-gather of the unit's weights |
# | `"forward"`, `"backward"` | waits for the unit's gather, then computes |
# | `"free"` | frees the unit's weights |
# | `"reduce"` | begins the reduce-scatter of the unit's gradients |
#
# - Begin a unit's gather just before the pass that *precedes* its own pass, in the backward direction too.
# - At most two units are whole at once: the one that computes and the next one.
# - The last unit's backward pass follows its forward pass, so it stays whole in between.
# - Begin each reduce right after its unit's backward pass. At the end no unit is whole.

# %% exercise="step-events"
from course.lab.exercises.lesson20_fully_sharded import step_events

# %% [markdown]
# The check runs your events on real ranks, with asynchronous all-gathers, and trains chains of several lengths.

# %%
check("step-events")

# %% [markdown]
# Does the library do the same? Four ranks train a model of six blocks with stage 3: eight units, including the embedding and
# the head. The next cell records what rank 0 does in one step.


# %%
def record(*settings: str) -> ShardedTimeline:
    """The second step of this rank."""
    training, batch = assembled(*settings)
    training.step(batch)
    return record_step(training, batch)


WIDER = "model.dim=256"
timeline = ranks(4)(record, "parallel.zero=3", WIDER)[0]
print("the library's events are yours:", timeline.events == step_events(8))
print(timeline.events[:10], "...")
lab.beside("\nunits whole at once", my_whole, max(timeline.whole), how="counted")
lab.beside("gathers", my_gathers, len(timeline.gathers), how="counted")

# %% [markdown]
# ## Gathers beside computation
#
# > **Predict.** The model has 20 MB of weights, nearly all in the six blocks. How many MB of weights does a rank hold at the
# > peak? Count its share and the whole units.

# %%
my_peak = 20.0                   # your prediction, in MB

# %%
all_bytes = 4 * timeline.share_bytes
lab.picture(
    fully_sharded.timeline(timeline, all_bytes,
                           "A step of rank 0, ZeRO-3 over 4 ranks"),
    "Two panels over time. Above: bars of all-gathers, of forward and backward passes, "
    "and of reduce-scatters, each with the number of its unit. The all-gather of the "
    "next unit lies beside the forward or backward pass of a unit. Below: the bytes of "
    "weights on the rank rise and fall with each gather, and stay far "
            "below all weights.")
lab.beside("peak of weights", my_peak, timeline.peak / 1e6, "MB")

# %% [markdown]
# **What you should see:** the gather of unit i + 1 begins before the forward pass of unit i. In the backward pass the numbers
# count down. The peak memory is the share plus at most two units.
#
# The bar of a reduce-scatter ends when the rank stops waiting for it, because gloo does not report when the operation itself
# ends. The library waits for one reduce-scatter before it begins the next, so that one unit's whole gradients are in memory
# at a time.
#
# > **Question.** Here the gathers take longer than the computation, so the rank waits. Which two changes would hide them?
#
# <details><summary>Answer</summary>
# More samples on each rank, because computation grows with the number of tokens and a gather does not. And a faster link.
# Four ranks on two cores also compete for the processor, which copies the bytes; on GPUs, a gather uses few of the
# multiprocessors.
# </details>
#
# ## What to free, and when
#
# A pipeline runs many micro-batches in a step. Stage 3 then gathers every unit twice *for each of them*. `reshard_after` says
# how long units stay whole:
#
# | `parallel.reshard_after` | a unit's weights are freed | gathers of a unit, m micro-batches | weights in memory |
# |---|---|---|---|
# | `forward` | after each forward and each backward pass | 2 m | share, two units |
# | `backward` | after each backward pass | m to 2 m | share, all units that wait for their backward pass |
# | `step` | after the optimizer's step | 1 | share, all units of the stage |
#
# Freeing units only after the step makes the weights as large as with stage 2. But between steps they are freed, and the
# pipeline has already cut the model into stages.
#
# > **Predict.** Two micro-batches without a pipeline, 8 units. How many gathers does a step need with each of the three
# > settings?

# %%
my_gathers_of = {"forward": 16, "backward": 16, "step": 16}      # your predictions

# %%
measured = {}
for when in ("forward", "backward", "step"):
    measured[when] = ranks(4)(record, "parallel.zero=3", WIDER, "train.micro_batch=1",
                              f"parallel.reshard_after={when}")[0]
    lab.beside(f"gathers with reshard_after={when}", my_gathers_of[when],
               len(measured[when].gathers), how="counted")
bars = {when: {"share": found.share_bytes / 1e6,
               "whole units": (found.peak - found.share_bytes) / 1e6}
        for when, found in measured.items()}
lab.picture(style.stacked(bars, "MB", limits={"all weights": all_bytes / 1e6},
                          title="Peak of weights on a rank"),
            "Three bars, each of the rank's share and the whole units at the peak: "
            + ", ".join(f"{when} {sum(bar.values()):.1f} MB"
                        for when, bar in bars.items()) + ".")

# %% [markdown]
# The bars of `backward` and `step` exceed all weights, because the share stays in memory beside the whole units: the
# optimizer updates the share in float32, even if the units are gathered in 16 bits.
#
# ## Copies of the model: HSDP
#
# Sharding over 1024 ranks means that every gather crosses the whole network. **HSDP** (*hybrid sharding*) shards the model over
# the GPUs of one node, and each node holds one copy. `parallel.shard` is the number of ranks that share a copy:

# %%
held = ranks(4)(trace, *FOUR, "parallel.zero=3", "parallel.shard=2")
lab.picture(
    who_holds.parameters(held, WEIGHTS, of="states", title="ZeRO-3 over 2, two copies"),
    "Four rows of boxes, one for each rank. Two ranks hold the first half of a "
    "block's numbers, and two ranks hold the second half.")

# %% [markdown]
# Gathers and reduce-scatters stay within a copy. Then an all-reduce averages each share's gradient over the copies.
#
# > **Question.** 8 nodes with 8 GPUs each. What does a rank send between nodes in a step: with stage 3 over all 64, and with
# > `parallel.shard=8`? And what does HSDP cost?
#
# <details><summary>Answer</summary>
# With stage 3 over all ranks, the weights pass between nodes twice and the gradients once. With HSDP only the all-reduce of an
# eighth of the gradients crosses nodes: 2 · 7/8 of an eighth of the model. A rank keeps an eighth of the 16 bytes for each
# parameter, instead of a 64th.
# </details>
#
# ## Stage 3 or tensor parallelism?
#
# Both divide the weights over n ranks. They send different things:
#
# - Stage 3 sends **weights**: for a block of width D with 12 D² weights, three times (n − 1)/n of them.
# - Tensor parallelism sends **activations**: four all-reduces for each block (lesson 10), each of 2 (n − 1)/n · T · D numbers.
#   T counts the tokens of the whole group, because each of its ranks computes with all of them.
#
# > **Predict.** Width 4096, 16 bits. From how many tokens in the group's batch does stage 3 send fewer bytes?

# %%
my_tokens = 4096                 # your prediction


# %%
def weights_sent(width: int, n: int) -> float:
    """Bytes that a rank sends for a block and a step in stage 3, in 16 bits."""
    return 3 * (n - 1) / n * 12 * width**2 * 2


def activations_sent(width: int, tokens: float, n: int) -> float:
    """Bytes that a rank sends for a block and a step in tensor parallelism."""
    return 4 * 2 * (n - 1) / n * tokens * width * 2


width, n = 4096, 8
crossing = weights_sent(width, n) / activations_sent(width, 1, n)
lab.beside("tokens from which stage 3 sends less", my_tokens, crossing, how="computed")
tokens = [1024 * count for count in (1, 4, 8, 12, 16, 20, 24, 32)]
lines = {"stage 3": (tokens, [weights_sent(width, n) / 1e6 for _ in tokens]),
         "tensor parallel": (tokens, [activations_sent(width, each, n) / 1e6
                                      for each in tokens])}
lab.picture(style.curves(lines, "tokens of the group", "MB for each block",
                         "Bytes that a rank sends in a step, width 4096, 8 ranks"),
            "Stage 3 is a horizontal line. Tensor parallelism rises in proportion to "
            "the "
            f"tokens and crosses it at {crossing:,.0f} tokens.")

# %% [markdown]
# The crossing is at 4.5 D tokens, for any n. Below it, tensor parallelism sends less; this is the case with few, short
# samples. Above it, stage 3 sends less, and the gap grows with the batch.
#
# Bytes are not time. Tensor parallelism waits for its all-reduces, because the next matmul needs the sum. Stage 3 knows early
# which weights come next, so its gathers can hide behind computation. They are hidden if computing a block takes at least as
# long as gathering the next one. In the forward pass, a rank with t tokens computes 2 · 12 D² · t FLOPs. It receives (n−1)/n
# of 2 · 12 D² bytes. So the width drops out:
#
# $$t \ge \frac{n-1}{n} \cdot \frac{\text{FLOP/s}}{\text{bytes/s of the link}}$$
#
# > **Predict.** How many tokens does each H100 need, within a node (NVLink) and between nodes? Use the data sheet.

# %%
my_tokens_within = 1000          # your predictions
my_tokens_between = 1000

# %%
h100 = hardware.load("h100-80")
for link, mine in zip(h100.links, (my_tokens_within, my_tokens_between), strict=False):
    needed = (n - 1) / n * h100.peak("bf16") / link.bandwidth
    lab.beside(f"tokens on each GPU, {link.name}", mine, needed, how="computed")

# %% [markdown]
# Data sheets are optimistic for both numbers, so take these as orders of magnitude. Most training runs have thousands of
# tokens on each GPU, so within a node the gathers hide easily. Between nodes you need large batches, HSDP, or tensor
# parallelism within each node and stage 3 between nodes.
#
# A limit remains: stage 3 needs at least one sample on each rank. If the global batch has fewer samples than there are GPUs,
# use tensor, context or pipeline parallelism for the rest.
#
# ## The library's stage 3
#
# A real model adds three things to yours: weights in two number formats, parameters that several units share, and gradients
# that tensor-parallel ranks hold in parts. So a unit may need several flat tensors. `FlatParameters` in
# `course/parallel/data_parallel/fsdp.py` is such a tensor, with its share and its collectives. This is a unit:

# %%
lab.show("course.parallel.data_parallel.fsdp.Unit")

# %% [markdown]
# The library wraps the call of each unit. `enter_forward` waits for the unit's weights and begins the next gather;
# `leave_forward` frees. Autograd calls `enter_backward` and `leave_backward`, through two functions that do nothing to the
# numbers:

# %%
lab.show("course.parallel.data_parallel.fsdp.sharded_call")
lab.show("course.parallel.data_parallel.fsdp.EnterBackward")

# %% [markdown]
# > **Question.** Read `FlatParameters` in `fsdp.py`. Where is a micro-batch's gradient added, and where does HSDP average over
# > the copies?
#
# <details><summary>Answer</summary>
# <code>finish_reduce</code> waits for the reduce-scatter, and <code>add</code> adds its result to the share's gradient.
# <code>start_average</code> begins the all-reduce over the copies, once all micro-batches of the step are in.
# </details>
#
# Does it train like one process? `verify` compares every parameter after each step, in float64:

# %%
exact = config.load("vit-demo", [*verify.DEFAULTS, "model.grid=[16,32]",
                                 "parallel.zero=3", "parallel.dp=4",
                                 "train.micro_batch=1", "train.device=cpu"])
gaps, *_ = ranks(4)(lambda: verify.compare(exact))
assert verify.tell(exact, gaps)

# %% [markdown]
# ## Open task: the order of a step
#
# *Optional, about 60 minutes. Nothing later needs it.* Your `step_events` treats all units alike, and gathers nearly all of
# them twice. Real units differ: an embedding is large and computes little. With memory to spare, some units can stay whole, and
# a gather can begin earlier. With less memory, even two whole units are too many. Our solution has about 45 lines.
#
# The step runs on simulated clocks, with one link for gathers and reduces. A unit's whole gradients also need memory, from its
# backward pass until its reduce ends. `simulate` says what a list of events gives:

# %%
from course.lab.instruments.simulated_sharding import Unit, simulate

lab.show("course.lab.instruments.simulated_sharding.simulate")
units = [Unit(90_000_000, 0.004), *[Unit(40_000_000, 0.008)] * 4,
         Unit(60_000_000, 0.006)]
LIMIT, BANDWIDTH = 300_000_000, 5e9
usual = simulate(units, LIMIT, BANDWIDTH, step_events(len(units)))
lab.picture(fully_sharded.simulated(usual, LIMIT, "Your order of the exercise"),
            "Two panels over time. Above: gathers and reduces on the link, forward and "
            "backward passes on the rank, with gaps between passes. Below: the bytes "
            "of whole weights and gradients, under a dashed limit.")
print(f"{usual.seconds * 1e3:.0f} ms, {usual.gathered / 1e6:.0f} MB gathered")

# %% [markdown]
# > **Question.** Where does the rank wait for the link? Which units could stay whole until their backward passes?
#
# <details><summary>Answer</summary>
# It waits where a pass ends before the next gather does, or where this gather itself waits for a reduce on the link. During a
# backward pass memory holds the unit twice (weights and gradients), and all earlier units that stayed. Beside the last unit
# twice, 120 MB, there is room for the embedding and two of the blocks.
# </details>
#
# **Contract**
#
# - `order_step(units, limit, bandwidth)` returns the events of a step, as in the exercise.
# - `units[u].bytes` and `units[u].forward` are its weights and the seconds of its forward pass. A backward pass takes twice as
#   many seconds, and makes as many bytes of gradients.
# - `limit` is what whole weights and gradients may take at any time. `bandwidth` is in bytes/s.
# - The passes keep their order. Each unit is whole during both of its passes. At the end all units are freed and all gradients
#   reduced.
# - `simulate` is free to call. Its result has `wrong`, which is empty if the events are possible, and the `seconds` and
#   `gathered` bytes that count.
#
# **Levels.** The check has five cases or more, of 5 to 9 units. In some of them two neighboring units do not fit into memory
# together while one computes. Each level counts by itself, once the first is reached:
#
# | level | what the check counts |
# |---|---|
# | correct | `wrong` is empty |
# | fewest bytes | no order gathers fewer bytes within the limit |
# | overlapped | the step takes at most 10% longer than a lower bound |
#
# The bound is the larger of two times. One is that of all passes, with unit 0's gather before them and its reduce after
# them. The other is the link's time for the fewest gathered bytes and all reduces.
#
# Start with correct. `lab.hint("order-step")` opens the first of three hints, and each further call opens the next one.

# %% exercise="order-step"
from course.lab.exercises.lesson20_open_task import order_step  # noqa: F401

# %%
check("order-step")

# %% [markdown]
# ## Summary
#
# - Stage 2 shards gradients, stage 3 also weights. Stage 3 sends 1.5 times as many bytes as DDP, the other stages as many as
#   DDP.
# - A unit is gathered before it computes and freed afterwards. Its storage shrinks to zero; its views stay valid.
# - With prefetching, at most two units are whole. Gathers run in forward order, then in backward order.
# - `reshard_after` trades memory for gathers, which matters with many micro-batches; HSDP keeps gathers within a node.
# - Stage 3 sends weights, tensor parallelism sends activations. From 4.5 D tokens on, stage 3 sends less.
#
# ## Questions
#
# 1. Why does the backward pass need the weights again, and which layer of your model would not need them?
# 2. A model has one unit that is as large as all others together. What is the peak memory of weights, and what would you
#    change?
# 3. You double the GPUs and keep the global batch. Does stage 3 hide its gathers more easily, or less?
#
# **Check your work from a terminal.** Save the notebook, then run `course check notebooks/20_fully_sharded_mine.ipynb`.
#
# ## Appendix (optional): on GPUs
#
# This lesson shows bytes, memory and times of four processes on one CPU. It makes no claim about seconds on several GPUs. With
# GPUs, compare the step time and the memory yourself, DDP first:
#
#     torchrun --standalone --nproc-per-node=4 -m course.cli train gpt-124m parallel.dp=4 data.source=mock
#     torchrun --standalone --nproc-per-node=4 -m course.cli train gpt-124m parallel.dp=4 data.source=mock parallel.zero=3
