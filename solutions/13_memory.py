# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 13 · Memory
#
# "CUDA out of memory" is the error that everybody who trains large models knows best. Memory is also what most of parallelism
# is about: tensor, pipeline and context parallelism were invented because something did not fit. In this lesson you find out
# where the bytes go, byte by byte, and write the two remedies that are used most: **ZeRO-1**, which stops data-parallel ranks
# from all keeping the same, and **activation checkpointing**, which throws away what can be computed again.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 90 minutes |
# | computing | half a minute on two cores |
# | you write | bytes of a training (8 lines), a ZeRO-1 optimizer (10), a block that is recomputed (9) |
# | you measure | bytes per parameter and per token; what recomputing costs in FLOPs |
#
# You should have done [lesson 01](01_baseline.ipynb) (the training step), [lesson 07](07_data_parallel.ipynb) (data
# parallelism) and [lesson 10](10_tensor_parallel.ipynb) (what a block keeps). Work in a copy: *File → Save Notebook As…*,
# `13_memory_mine.ipynb`.

# %%
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from course import config, models, parallel
from course.training import verify
from course.lab.figures import style, memory, widgets
from course.lab import notebook as lab
from course.lab.instruments.tensor_memory import MemoryMeter
from course.lab.notebook import check
from course.ranks.notebook_ranks import ranks
from course.parallel import Axis
from course.parallel.mappings import all_gather_single, reduce_scatter_single
from course.training.activation_checkpointing import checkpoint_activations

lab.begin("13")

# %% [markdown]
# ## What belongs to a parameter
#
# Take the model of lesson 01, float32, trained with Adam. Of four kinds of memory three grow with the number of parameters:
#
# - the **weights** themselves;
# - their **gradients**, `.grad`;
# - the **optimizer's states**: what it remembers from step to step. Adam keeps a running mean of the gradient and one of its
#   square.
#
# > **Predict.** How many bytes are there for each parameter, all three together?

# %%
my_bytes = 8                     # your prediction

# %%
settings = config.load("vit-demo")
cpu = torch.device("cpu")


def new_model(how: str = "none") -> nn.Module:
    """The model of the preset with fresh weights; `how` it keeps activations is the second half of this lesson."""
    model = parallel.initialize_serial(models.build_model(settings.model), 0, cpu, torch.float32)
    return checkpoint_activations(model, how)


def batch_of(model: nn.Module, samples: int) -> dict[str, Tensor]:
    """Random numbers in the shape of a batch, prepared for the model."""
    return model.prepare(model.example(samples, cpu), torch.zeros((), dtype=torch.int64))


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean loss of a batch."""
    total, weight = model.loss(model(batch), batch)
    return total / weight


model = new_model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
parameters = sum(p.numel() for p in model.parameters())


def count_bytes() -> dict[str, int]:
    """Of all tensors that belong to the model's parameters, by kind."""
    return {"weights": sum(p.nbytes for p in model.parameters()),
            "gradients": sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
            "optimizer states": sum(x.nbytes for state in optimizer.state.values() for x in state.values())}


before = count_bytes()
loss_of(model, batch_of(model, 4)).backward()
optimizer.step()
after = count_bytes()
for kind, size in after.items():
    print(f"{kind:17} {size:>12,} bytes, {size / parameters:5.2f} a parameter")
lab.beside("\nbytes a parameter", my_bytes, sum(after.values()) / parameters)

# %% [markdown]
# Sixteen: 4 for the weight, 4 for the gradient, 8 for Adam's two means. (A little above: Adam counts its steps, once for each
# tensor.) The weights are a *quarter* of what belongs to them.
#
# What had been there before the first step?

# %%
print(before)

# %% [markdown]
# > **Question.** Why does a training that runs out of memory often do so in its second step, not in its first?
#
# <details><summary>Answer</summary>
# At first there are weights alone. Gradients appear in the first backward pass, the states at the end of the first step, when the
# activations are gone. The second step is the first one in which everything is there at once. So test whether a setting fits
# with at least two steps.
# </details>
#
# **In 16 bits** it is no less. The usual recipe keeps weights and gradients in bf16, 2 + 2 bytes, and adds a float32 copy of
# the weights to the optimizer's states, because small updates would be rounded away: 4 + 8. Sixteen again ([Rajbhandari et
# al. 2020](https://arxiv.org/abs/1910.02054), section 3.1). Megatron-LM adds gradients up in float32: eighteen. What 16 bits
# save is activations and time.
#
# ## Activations
#
# The fourth kind does not belong to parameters: it is what the forward pass keeps for the backward pass. To compute the
# gradient of a matrix multiplication you need its input, for that of GELU too, and so on. PyTorch lets you watch: whatever
# autograd wants to keep goes through a hook (`saved_for_backward` of lesson 05 is one). Count the bytes, each piece of memory
# once, and leave out weights and the batch, which are there anyway.

# %%
def kept_bytes(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """What autograd keeps of a forward pass, besides the model and the batch."""
    known = {x.untyped_storage().data_ptr() for x in [*model.parameters(), *batch.values()]}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = loss_of(model, batch)                 # while it lives, all that was kept does
    assert loss.isfinite()
    return sum(kept.values())


# %% [markdown]
# Here is what a block computes:

# %%
lab.show("course.models.layers.Attention")
lab.show("course.models.layers.MLP")
lab.show("course.models.layers.Block")

# %% [markdown]
# > **Predict.** One sample has 128 tokens of width 128, so one activation of the shape (1, T, D) has 128 · 128 · 4 = 65,536
# > bytes. How many of those does **one block** keep? Lesson 10 has counted; find it yourself now. Walk through the block: which
# > inputs does each operation need again? The MLP is four times as wide.

# %%
my_activations = 8               # your prediction, in units of (B, T, D)

# %%
unit = 4 * settings.model.tokens * settings.model.dim * 4                       # bytes of (4, T, D) in float32
sizes = {}
for depth in (4, 5):
    settings = config.load("vit-demo", [f"model.depth={depth}"])
    sizes[depth] = kept_bytes(new_model(), batch_of(new_model(), 4)) / unit
settings = config.load("vit-demo")
lab.beside("kept by one block", my_activations, sizes[5] - sizes[4], "(B, T, D)")

# %% [markdown]
# Sixteen, by counting what one more block adds. In units of (B, T, D):
#
# | operation | keeps | |
# |---|---|--:|
# | norm, twice | its input | 2 |
# | `attn.qkv` | its input, the norm's output | 1 |
# | attention | q, k and v; its output, which `attn.out` needs as well | 4 |
# | `mlp.up` | its input, the norm's output | 1 |
# | GELU | its input | 4 |
# | `mlp.down` | its input, GELU's output | 4 |
#
# The few hundredths above are the norms' means and variances, and one number for each query of attention. That attention
# keeps no matrix of T × T scores is thanks to its fused kernel, which computes them again in the backward pass: what you are
# going to do with whole blocks.
#
# > **Predict.** How do the bytes grow with the number of samples: the activations, and the other three kinds? At how many
# > samples are there more bytes of activations than of all the others?

# %%
samples = [1, 2, 4, 8, 16]
activations = [kept_bytes(model, batch_of(model, count)) / 1e6 for count in samples]
curve = style.curves({"activations": (samples, activations)}, "samples", "MB", "What training keeps",
                       {"weights, gradients, states": sum(after.values()) / 1e6, "weights alone": after["weights"] / 1e6})
lab.picture(curve, "Activations rise on a straight line through the origin; the others are horizontal lines, which it crosses")

# %% [markdown]
# Activations grow with the samples, or with the tokens of one long sample; the rest stays. From four samples on they
# are the larger part here. For small batches of large models the optimizer is the problem, for large batches or long
# sequences activations are. They need different remedies. Always ask first **which bytes**.

# %% [markdown]
# ## Part one: what data-parallel ranks keep twice
#
# In data parallelism each of n ranks has all weights, all gradients and all states, and they are *equal* on all ranks, after
# averaging. That is n − 1 copies too many. **ZeRO** (*zero redundancy optimizer*) cuts them into n shares, in three stages,
# each of which adds one to the one before:
#
# | stage | a rank keeps only its share of | |
# |---|---|---|
# | 0 | nothing: plain data parallelism | |
# | 1 | the optimizer's states | |
# | 2 | and the gradients | |
# | 3 | and the weights | PyTorch calls it FSDP |
#
# ## Exercise: the bytes of a training
#
# Write how many bytes a rank keeps of weights, gradients and states, in float32 with Adam. Do not round: with 3 ranks a share
# may have a fraction.

# %% exercise="training-bytes"
def training_bytes(parameters: int, ranks: int, stage: int) -> tuple[float, float, float]:
    """Bytes on each rank of (weights, gradients, optimizer states), in float32 with Adam, at a ZeRO stage from 0 to 3."""
    ### BEGIN SOLUTION
    weights, gradients, states = 4 * parameters, 4 * parameters, 8 * parameters
    if stage >= 1:
        states = states / ranks
    if stage >= 2:
        gradients = gradients / ranks
    if stage >= 3:
        weights = weights / ranks
    return weights, gradients, states
    ### END SOLUTION

# %%
check("training-bytes")

# %% [markdown]
# > **Predict.** A GPT of 7 billion parameters, data parallel on 8 H200s. Which stages fit, activations aside? (The data sheet's
# > "141 GB" count in 2³⁰ bytes. Of the GB used here, of 10⁹, an H200 has 151.)

# %%
bars = {}
for stage in range(4):
    weights, gradients, states = training_bytes(7 * 10**9, 8, stage)
    bars[f"ZeRO-{stage}"] = {"weights": weights / 1e9, "gradients": gradients / 1e9, "optimizer states": states / 1e9}
lab.picture(style.stacked(bars, "GB", limits={"one H200": 151}, title="7 billion parameters on 8 ranks"),
            "Bars of 112, 63, 38.5 and 14 GB for the stages 0 to 3. Half of the first is optimizer states")

# %% [markdown]
# All of them do, stage 0 barely: its 112 GB leave little for activations. Stage 1 takes away nearly half, the largest
# single saving, and it is almost free. You are going to write it.
#
# > **Question.** Stages 1 and 2 move as many bytes as plain data parallelism does, stage 3 half as many again. How can stage
# > 1 cost nothing?
#
# <details><summary>Answer</summary>
# An all-reduce is a reduce-scatter, after which each rank has the sum of <i>its share</i>, and an all-gather, which tells all
# others (lesson 07). ZeRO-1 puts the optimizer's step in between: reduce-scatter the gradients, update the share, all-gather
# the new <i>weights</i>. The same bytes; and each rank computes 1/n of the update. Stage 3 has to gather weights once more,
# for the backward pass.
# </details>
#
# ## Exercise: ZeRO-1
#
# To see nothing but the idea, let all weights lie end to end in one flat tensor, and the gradients in another of the same
# length n, of which `axis.size` is a divisor.
#
# - `__init__` cuts out this rank's share (rank r has the r-th part), as a parameter of its own, and gives it to an optimizer.
#   `make` makes one: `make([p])` returns, for instance, `torch.optim.Adam([p], 0.1)`. Keep it as an attribute: the check counts
#   what it holds;
# - `step(gradient)` does the three steps. Average: the **mean** over the ranks counts. It changes `weights` in place, since
#   the model uses it, and leaves `gradient` as it is. Between steps keep nothing larger than a share.
#
# Two collectives are all that you need, both with the output first, then the input:
#
# - `reduce_scatter_single(share, whole, group=self.axis.group)`: `share` becomes this rank's part of the sum of all ranks'
#   `whole`;
# - `all_gather_single(whole, share, group=self.axis.group)`: `whole` becomes all ranks' shares, one after the other.

# %% exercise="zero-optimizer"
class ZeroOptimizer:
    """ZeRO-1: every rank of an axis updates its share of the weights, and keeps the optimizer's states of that share alone.

    `weights` is one flat tensor, (n,), the same on every rank; `axis.size` divides n. `make` makes an optimizer for a list of
    parameters.
    """

    def __init__(self, weights: Tensor, axis: Axis, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]):
        ### BEGIN SOLUTION
        share = len(weights) // axis.size
        start = axis.rank * share
        self.weights, self.axis = weights, axis
        self.mine = nn.Parameter(weights[start:start + share].clone())      # (n / size,)
        self.optimizer = make([self.mine])
        ### END SOLUTION

    def step(self, gradient: Tensor) -> None:
        """Update `weights` in place with the mean of all ranks' gradients; `gradient`, (n,), is this rank's own."""
        ### BEGIN SOLUTION
        self.mine.grad = torch.empty_like(self.mine)                        # (n / size,)
        reduce_scatter_single(self.mine.grad, gradient, group=self.axis.group)
        self.mine.grad /= self.axis.size
        self.optimizer.step()
        all_gather_single(self.weights, self.mine.detach(), group=self.axis.group)
        ### END SOLUTION

# %% [markdown]
# The check trains on 2 and on 4 ranks, each with a loss of its own, with gradient descent and with Adam, then in groups of
# two, and counts the numbers that your optimizer keeps, and what is sent and kept besides.
#
# > **Question.** Why with both? What would Adam alone not notice?
#
# <details><summary>Answer</summary>
# A factor (lesson 07): a gradient that is n times too large, a sum in place of a mean, gives nearly the same step. Gradient
# descent moves n times as far. This is why parity tests in this course use it.
# </details>

# %%
check("zero-optimizer")

# %% [markdown]
# ## The library's ZeRO-1
#
# A real model differs in two ways: its weights are many tensors, and nobody wants to wait for communication. The library lays
# parameters end to end in **buckets** (lesson 07), and each bucket does what you wrote, beside the computing:

# %%
lab.show("course.parallel.data_parallel.zero1.ZeRO1")

# %% [markdown]
# `start` is called in the backward pass, when the last gradient of a bucket is there; `complete` before the optimizer's step;
# `after_optimizer_step` after it; and each block waits for its weights just before its forward pass. All the rest of the training
# is as before: clipping, checkpoints and `verify` read the parameters' placements, which say which segment is here.
#
# With `precision=bf16` there is a third thing to share. The float32 weights are for the optimizer; what a rank multiplies with
# is their cast to 16 bits (lesson 04). So each rank keeps the float32 **master weights** of its share alone (`masters`, above),
# and of all linears a 16-bit copy. The all-gather carries half the bytes, and the training is the same to the bit.
#
# > **Predict.** 2 ranks: how many bytes of states a parameter does each keep? Will the training be equal to that of one
# > process?

# %%
my_state_bytes = 8               # your prediction

# %%
def states_and_parity() -> tuple[float, Any]:
    """Bytes of states for each parameter of the model, on this rank; and how far this training is from that of one process."""
    from course.training.assemble import assemble

    c = config.load("vit-demo", ["parallel.zero=1", "parallel.bucket_mb=1", "data.source=mock", "train.device=cpu"])
    training = assemble(c, parallel.build_mesh(c.parallel, parallel.join("cpu")))
    training.step(training.model.example(2, torch.device("cpu")))
    training.gradients.wait_parameters()
    states = sum(x.nbytes for state in training.optimizer.state.values() for x in state.values())
    return states / sum(p.numel() for p in training.model.parameters()), verify.compare(exact)


exact = config.load("vit-demo", [*verify.DEFAULTS, "model.grid=[16,32]", "parallel.zero=1", "parallel.dp=2",
                                 "parallel.bucket_mb=0.5", "train.device=cpu"])
(state_bytes, gaps), _ = ranks(2)(states_and_parity)
lab.beside("bytes of states a parameter, on each of 2 ranks", my_state_bytes, state_bytes)
assert verify.tell(exact, gaps)

# %% [markdown]
# Four: half of eight.
#
# ## Part two: keep less, compute again
#
# ZeRO does nothing about activations. **Activation checkpointing** ([Chen et al. 2016](https://arxiv.org/abs/1604.06174))
# does: keep only each block's *input*, and when the backward pass comes to that block, compute it again, with a graph this
# time.
#
# > **Predict.** A block keeps 1 unit in place of 16. A forward pass costs one, a backward pass two, recomputing one more. By
# > how much does memory fall, and by how much do FLOPs rise?
#
# ## Exercise: compute it twice
#
# Write it as an operation of autograd, a `torch.autograd.Function`. Lessons 05 and 10 have such classes: `forward`
# computes, and leaves in `ctx` what `backward` needs; `backward` gets the gradient of the output and returns one for each
# argument of `forward`, `None` for the block.
#
# - PyTorch calls `forward` **without** building a graph, so nothing inside the block is kept. Keep `x`, with
#   `ctx.save_for_backward(x)`, and the block, as an attribute of `ctx`;
# - `backward` is called without a graph as well: ask for one, `with torch.enable_grad():`, and compute the block on a copy of
#   `x` that is cut off from what was before it (`x.detach().requires_grad_()`). Then let autograd go through it, starting
#   from `grad`. The parameters' gradients add up in `.grad` by themselves, over micro-batches too; that of `x` you return;
# - write into nobody's tensor, and so not into `grad`: a residual sum around the block has the same one.

# %% exercise="recompute"
class Recompute(torch.autograd.Function):
    """block(x), of which x alone is kept: the backward pass computes the block again, with a graph this time."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        """The block's output. PyTorch calls this without building a graph."""
        ### BEGIN SOLUTION
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        """The gradient of x; those of the block's parameters are added to their `.grad`."""
        ### BEGIN SOLUTION
        given, = ctx.saved_tensors
        x = given.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, grad)
        return None, x.grad
        ### END SOLUTION

# %%
check("recompute")

# %% [markdown]
# > **Question.** The block has dropout. What goes wrong in the second pass, and how does PyTorch prevent it? And this
# > library?
#
# <details><summary>Answer</summary>
# The second pass draws other random numbers, so the gradient is that of another network. PyTorch's <code>checkpoint</code>
# saves the generator's state and sets it back. In this library dropout is a function of the sample and the position (lesson
# 01), so it drops the same, however often one asks.
# </details>
#
# The library uses PyTorch's `checkpoint`, which does the same as yours with any arguments, and stops recomputing as
# soon as the last tensor that is needed is there. It has one more choice, **selective**: results that are expensive to
# compute, those of matrix multiplications and attention, are kept; what is cheap (norms, GELU, sums) is computed again.

# %%
lab.show("course.training.activation_checkpointing.checkpoint_activations")
lab.show("course.training.activation_checkpointing.save_expensive_ops")

# %% [markdown]
# > **Predict.** In units of (B, T, D) for each block: what does *full* keep, and what *selective*? (How much does each
# > matrix multiplication put out?)

# %%
my_full = 1                      # your predictions
my_selective = 8

# %%
from torch.utils.flop_counter import FlopCounterMode


def costs(how: str) -> dict[str, float]:
    """Of one forward and backward pass: activations after the forward pass, the peak, and FLOPs of matrix multiplications."""
    model = new_model(how)
    batch = batch_of(model, 4)
    with MemoryMeter() as meter:
        loss = loss_of(model, batch)
        after_forward = meter.now
        loss.backward()
    with FlopCounterMode(display=False) as counter:
        loss_of(model, batch).backward()
    return {"after forward, MB": after_forward / 1e6, "peak, MB": meter.peak / 1e6, "GFLOP": counter.get_total_flops() / 1e9}


measured = {how: costs(how) for how in ("none", "selective", "full")}
for how, values in measured.items():
    print(f"{how:10}", "   ".join(f"{name} {value:6.2f}" for name, value in values.items()))

depth = settings.model.depth
ends = measured["none"]["after forward, MB"] * 1e6 / unit - depth * (sizes[5] - sizes[4])     # embedding, head, loss: in units
each = {how: (values["after forward, MB"] * 1e6 / unit - ends) / depth for how, values in measured.items()}
lab.beside("\nfull: kept by each block", my_full, each["full"], "(B, T, D)")
lab.beside("selective: kept by each block", my_selective, each["selective"], "(B, T, D)")

# %% [markdown]
# `MemoryMeter` counts the bytes of all tensors that are alive, by watching every operator: what `torch.cuda.max_memory_allocated`
# does on a GPU.
#
# **What you should see:** full keeps about 1, each block's input. Selective about 11: `qkv` puts out 3, attention 1,
# `attn.out` 1, `mlp.up` 4, `mlp.down` 1, and the input is 1. What it saves are the outputs of norms and GELU. The *peak* with
# full does not fall as much as what is kept: in the backward pass one block has all of its 16 at a time, and by the end the
# gradients of all weights are there.
#
# > **Question.** FLOPs rise by a fifth with *full*, and not by the third that one expects. Which matrix multiplications are
# > not done again? And why does *selective* do no more than *none*?
#
# <details><summary>Answer</summary>
# The last one of each block, <code>mlp.down</code>: nobody needs its <i>output</i>, only its input, so recomputing stops
# before it. It is a third of a block's multiplications by weights, so 2/9 more are done; and embedding and head are not
# recomputed. (The counter does not see attention on a CPU; with long sequences attention is most of it, and the third comes
# nearer.) Selective recomputes no matrix multiplication at all: that is its idea. It costs memory traffic.
# </details>

# %%
bars = {how: {"activations": values["after forward, MB"]} for how, values in measured.items()}
lab.picture(style.stacked(bars, "MB", title="Activations after the forward pass, 4 samples, 4 blocks"),
            "Three bars: none the longest, selective about seven tenths of it, full about an eighth")

# %% [markdown]
# ## Put together
#
# The widget counts for GPTs of several sizes, 4096 tokens on each rank, with the numbers of this lesson. Above: nothing
# saved. Below: as you choose.
#
# > **Predict, before you move the sliders:** 13 billion parameters in bf16. What is the least that you have to do so that it
# > fits into one H200 with 8 ranks? And 70 billion?

# %%
slider = widgets.explore(memory.explore_memory, size=["7 B", "0.35 B", "1.3 B", "13 B", "70 B"], precision=["fp32", "bf16"],
                         dp=[8, 1, 2, 4, 16, 64], zero=[0, 1, 2, 3], recompute=["none", "selective", "full"],
                         alt="Two bars, with nothing saved and as chosen, in pieces: weights, gradients, optimizer states and "
                             "activations; a line marks the memory of one GPU.")

# %% [markdown]
# <details><summary>Answer</summary>
# The model called 7 B has 6.4 billion parameters in this shape, 13 B has 12.6, and 70 B has 64. At 16 bytes each, 12.6
# billion need 201 GB, plus activations. ZeRO-1 over 8 ranks brings that to 69 GB, and with 27 GB of activations it fits.
# 70 billion: weights and gradients in bf16 alone are 258 GB, so stage 1 does not help; in stage 2 the weights' 129 GB are still
# whole, and with shares of all else over 8 ranks it is 241; ZeRO-3 over 8 needs 129 GB, and
# fits only with full recomputing, over 64 ranks with ease. Or one cuts the model by tensor and pipeline parallelism: lesson
# 17 asks which is faster.
# </details>
#
# ## On four GPUs
#
# A model of GPT 350M's shape, 16 × 1024 tokens on each H200, bf16 over float32 weights: whole training steps with Adam.
# PyTorch brings a ZeRO-1 of its own, `ZeroRedundancyOptimizer`, which updates whole parameters on one rank each and
# broadcasts them afterwards.
#
# > **Predict.** Compared with DDP on four GPUs: how many GB of states does ZeRO-1 keep on each rank, and how much slower or
# > faster is a step?

# %%
my_states_gb = 2.4               # your prediction; 300 million parameters
my_relative_time = 1.0           # ZeRO-1's time over that of DDP

# %%
rows = {row["case"]: row for row in lab.results("zero_h200")["rows"] if row["gpus"] == 4 and "ms" in row}
lab.recorded("zero_h200", {case: {"ms": row["ms"], "GB at the peak": row["memory_gb"], "GB of states": row["optimizer_gb"],
                                  "in theory": row["theory_gb"]} for case, row in rows.items()}, why="Four GPUs")
ours = rows["ZeRO-1, 16-bit copies"]
lab.beside("\nGB of states on each of 4 ranks", my_states_gb, ours["optimizer_gb"], "GB", "recorded")
lab.beside("ZeRO-1's step over DDP's", my_relative_time, ours["ms"] / rows["ddp"]["ms"], how="recorded")

# %% [markdown]
# **What you should see:** a quarter of the states, 8 bytes a parameter over 4 ranks, and a step that takes 2% less time than
# DDP's. Without the 16-bit copies of the section above it takes 2% more. New weights are gathered in float32 then: the same
# bytes move as in DDP, and each rank updates a quarter of the weights; but the gather begins only after the optimizer, and the
# first layers wait for theirs. With the copies it has half as many bytes.
#
# ## What you know now
#
# - 16 bytes a parameter with Adam, in float32 and in the usual 16-bit recipe: a quarter for the weights in float32, half for
#   the states.
# - A block keeps 16 activations of the shape (B, T, D), 11 if what is cheap is computed again, 1 if all is.
# - ZeRO-1 is data parallelism with the optimizer's step between the two halves of the all-reduce: 1/n of the states, the same
#   bytes to move.
# - Recomputing everything costs less than a third more FLOPs; recomputing what is cheap costs none.
# - First ask which bytes, then choose the remedy.
#
# **Check your work once more, from outside.** Save the notebook; then, in a terminal: `course check
# notebooks/13_memory_mine.ipynb`.
#
# Next: [lesson 14](14_gpt.ipynb), the models that all of this was made for.
