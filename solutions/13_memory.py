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
# Everybody who trains large models knows "CUDA out of memory". Tensor, pipeline and context parallelism exist because
# something did not fit. In this lesson you find out where the bytes go, and write the two most common remedies. **ZeRO-1** splits
# the optimizer states, which all data-parallel ranks keep. **Activation checkpointing** discards activations and computes them
# again.
#
# **What you will learn**
#
# - how many bytes belong to each parameter, and how many activations a block keeps for each token;
# - how ZeRO divides weights, gradients and optimizer states over ranks, and which stages send no more bytes;
# - what recomputing activations saves and what it costs, and which remedy fits which problem.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 90 minutes |
# | computing | half a minute on two cores |
# | you write | a training run's bytes (8 lines), a ZeRO-1 optimizer (10), a recomputed block (9); optional: a sharded Adam (25) |
# | you measure | bytes per parameter and per token; what recomputing costs in FLOPs |
#
# You should have done [lesson 01](01_baseline.ipynb) (the training step), [lesson 07](07_data_parallel.ipynb) (data
# parallelism) and [lesson 10](10_tensor_parallel.ipynb) (what a block keeps). Work in a copy: *File → Save Notebook As…*,
# `13_memory_mine.ipynb`.

# %% numbers=true
from course.bench.results import value
from course.lab.figures.memory import footprint


def gigabytes(size, stage, *kinds):
    found = footprint(size, "bf16", 8, stage, "none")
    return sum(found[kind] for kind in kinds or ("weights", "gradients", "optimizer states"))


def step_ms(case):
    return value("zero_h200", case, gpus=4)


faster_with_copies = 1 - step_ms("ZeRO-1, 16-bit copies") / step_ms("ddp")
slower_without = step_ms("ZeRO-1") / step_ms("ddp") - 1

# %%
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from course import config, models, parallel
from course.training import verify
from course.lab.figures import style, memory, who_holds, widgets
from course.lab import notebook as lab
from course.lab.instruments.forward_trace import trace
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
# Take the model of lesson 01 in float32 and train it with Adam. There are four kinds of memory, and three grow with the
# number of parameters:
#
# - the **weights**;
# - their **gradients**, `.grad`;
# - the **optimizer states**: what the optimizer remembers between steps. Adam keeps a running mean of the gradient and one of
#   its square.
#
# > **Predict.** How many bytes does each parameter need, all three together?

# %%
my_bytes = 8                     # your prediction

# %%
settings = config.load("vit-demo")
cpu = torch.device("cpu")


def new_model(how: str = "none") -> nn.Module:
    """The model of the preset with fresh weights. `how`: see the second half of this
    lesson."""
    model = parallel.initialize_serial(models.build_model(settings.model), 0, cpu,
                                       torch.float32)
    return checkpoint_activations(model, how)


def batch_of(model: nn.Module, samples: int) -> dict[str, Tensor]:
    """Random numbers in the shape of a batch, prepared for the model."""
    return model.prepare(model.example(samples, cpu),
                         torch.zeros((), dtype=torch.int64))


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean loss of a batch."""
    total, weight = model.loss(model(batch), batch)
    return total / weight


model = new_model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
parameters = sum(p.numel() for p in model.parameters())


def count_bytes() -> dict[str, int]:
    """The bytes of weights, gradients and optimizer states."""
    return {"weights": sum(p.nbytes for p in model.parameters()),
            "gradients": sum(p.grad.nbytes for p in model.parameters()
                             if p.grad is not None),
            "optimizer states": sum(x.nbytes for state in optimizer.state.values()
                                    for x in state.values())}


before = count_bytes()
loss_of(model, batch_of(model, 4)).backward()
optimizer.step()
after = count_bytes()
for kind, size in after.items():
    print(f"{kind:17} {size:>12,} bytes, {size / parameters:5.2f} a parameter")
lab.beside("\nbytes a parameter", my_bytes, sum(after.values()) / parameters)

# %% [markdown]
# Sixteen: 4 for the weight, 4 for the gradient, 8 for Adam's two means. The result is slightly higher, because Adam also
# stores a step count for each tensor. The weights are only a *quarter* of the total.
#
# What was there before the first step?

# %%
print(before)

# %% [markdown]
# > **Question.** Training often runs out of memory in the second step, not in the first. Why?
#
# <details><summary>Answer</summary>
# At the start there are only weights. The first backward pass adds gradients. The states appear at the end of the first step,
# when the activations are gone. The second step is the first with everything at once. So test a setting with at least two
# steps.
# </details>
#
# **16-bit training** needs as much. The usual recipe keeps weights and gradients in bf16: 2 + 2 bytes. It adds a float32 copy
# of the weights to the optimizer states, because bf16 would round small updates away: 4 + 8. That is sixteen again
# ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), section 3.1). Megatron-LM accumulates gradients in float32,
# which makes eighteen. 16-bit formats save activation memory and time.
#
# ## Activations
#
# The fourth kind does not belong to parameters: it is what the forward pass keeps for the backward pass. The gradient of a
# matrix multiplication needs its input, and so does that of GELU. PyTorch passes everything that autograd keeps through a
# hook (`saved_for_backward` of lesson 05 uses it). The next cell counts these bytes, each storage once. It leaves out weights
# and the batch, which are in memory anyway.

# %%
def kept_bytes(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """Bytes that autograd keeps from a forward pass, without the model and the
    batch."""
    known = {x.untyped_storage().data_ptr() for x in [*model.parameters(),
                                                      *batch.values()]}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = loss_of(model, batch)                 # it keeps all saved tensors alive
    assert loss.isfinite()
    return sum(kept.values())

# %% [markdown]
# This is what a block computes:

# %%
lab.show("course.models.layers.Attention")
lab.show("course.models.layers.MLP")
lab.show("course.models.layers.Block")

# %% [markdown]
# > **Predict.** A sample has 128 tokens of width 128, so one activation of the shape (1, T, D) has 128 · 128 · 4 = 65,536
# > bytes. How many of these does **one block** keep? Lesson 10 counted them; now find the number yourself. Which inputs does
# > each operation need again? The MLP is four times as wide.

# %%
my_activations = 8               # your prediction, in units of (B, T, D)

# %%
# bytes of (4, T, D) in float32
unit = 4 * settings.model.tokens * settings.model.dim * 4
sizes = {}
for depth in (4, 5):
    settings = config.load("vit-demo", [f"model.depth={depth}"])
    sizes[depth] = kept_bytes(new_model(), batch_of(new_model(), 4)) / unit
settings = config.load("vit-demo")
lab.beside("kept by one block", my_activations, sizes[5] - sizes[4], "(B, T, D)")

# %% [markdown]
# Sixteen, measured as what one more block adds. In units of (B, T, D):
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
# A few hundredths come from the norms' means and variances, and from one number for each query of attention. Attention keeps
# no T × T matrix of scores: its fused kernel computes the scores again in the backward pass. You will soon do the same with
# whole blocks.
#
# > **Predict.** How do the bytes grow with the number of samples: activations, and the other three kinds? From how many
# > samples on do activations need more bytes than the other three together?

# %%
samples = [1, 2, 4, 8, 16]
activations = [kept_bytes(model, batch_of(model, count)) / 1e6 for count in samples]
curve = style.curves({"activations": (samples, activations)}, "samples", "MB",
                     "What training keeps",
                       {"weights, gradients, states": sum(after.values()) / 1e6,
                        "weights alone": after["weights"] / 1e6})
lab.picture(curve,
            "Activations rise on a straight line through the origin. It crosses two "
            "horizontal lines, one for the weights and one for weights, gradients and "
            "states.")

# %% [markdown]
# Activations grow with the samples, or with the tokens of one long sample. The rest is constant. Here activations are the
# larger part from four samples on. Large models with small batches have a problem with optimizer states; large batches and
# long sequences have a problem with activations. The remedies differ, so always ask first **which bytes**.

# %% [markdown]
# ## Part one: what data-parallel ranks keep twice
#
# In data parallelism each of n ranks has all weights, gradients and states. After averaging they are *equal* on all ranks, so
# n − 1 copies are redundant. **ZeRO** (*zero redundancy optimizer*) divides them into n shares. It has three stages, and each
# stage includes the ones before:
#
# | stage | a rank keeps only its share of | |
# |---|---|---|
# | 0 | nothing: plain data parallelism | |
# | 1 | the optimizer states | |
# | 2 | and the gradients | |
# | 3 | and the weights | PyTorch calls it FSDP; you write it in lesson 20 |
#
# ## Exercise: the bytes of a training run
#
# Return how many bytes of weights, gradients and states a rank keeps, in float32 with Adam. Do not round: with 3 ranks a
# share may have a fraction.

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
# > **Predict.** A GPT of 7 billion parameters trains data parallel on 8 H200s. Which stages fit, activations aside? (The "141
# > GB" of the data sheet use 2³⁰ bytes for a GB. With 10⁹ bytes, as here, an H200 has 151 GB.)

# %%
bars = {}
for stage in range(4):
    weights, gradients, states = training_bytes(7 * 10**9, 8, stage)
    bars[f"ZeRO-{stage}"] = {"weights": weights / 1e9, "gradients": gradients / 1e9,
                             "optimizer states": states / 1e9}
lab.picture(style.stacked(bars, "GB", limits={"one H200": 151},
                          title="7 billion parameters on 8 ranks"),
            "Stacked bars for the stages 0 to 3: "
            + ", ".join(f"{sum(bar.values()):g} GB" for bar in bars.values())
            + ". Half of the first bar is optimizer states.")

# %% [markdown]
# All of them fit, but stage 0 leaves little for activations. Stage 1 removes nearly half: it is the largest single saving,
# and it is almost free. You will write it.
#
# > **Question.** Stages 1 and 2 move as many bytes as plain data parallelism, and stage 3 moves 1.5 times as many. How can
# > stage 1 cost nothing?
#
# <details><summary>Answer</summary>
# An all-reduce is a reduce-scatter and an all-gather (lesson 07). After the reduce-scatter, each rank has the sum of <i>its
# share</i>; the all-gather sends the shares to all ranks. ZeRO-1 puts the optimizer's step in between: reduce-scatter the
# gradients, update the share, all-gather the new <i>weights</i>. The bytes are the same, and each rank computes 1/n of the
# update. Stage 3 gathers the weights once more, for the backward pass.
# </details>
#
# ## Exercise: ZeRO-1
#
# To keep it simple, all weights lie end to end in one flat tensor, and the gradients in another. `axis.size` divides their
# length.
#
# - `__init__` makes a parameter of this rank's share (rank r has the r-th part) and gives it to an optimizer. `make` creates
#   the optimizer: `make([p])` may return `torch.optim.Adam([p], 0.1)`. Keep the optimizer as an attribute, because the check
#   counts what it holds.
# - `step(gradient)` does what the answer above says, with the **mean** of the ranks' gradients: reduce-scatter, update,
#   all-gather. It changes `weights` in place, because the model uses that tensor, and does not change `gradient`. Between
#   steps, keep nothing larger than a share.
#
# You need two collectives. Both take the output first, then the input:
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
# The check trains on 2 and on 4 ranks, each with its own loss, with gradient descent and with Adam. Then it trains in groups
# of two. It counts what your optimizer keeps and sends.
#
# > **Question.** Why with both optimizers? What would Adam alone not show?
#
# <details><summary>Answer</summary>
# A wrong factor (lesson 07). If you sum instead of averaging, the gradient is n times too large, but Adam's step is nearly the
# same. Gradient descent moves n times as far. So parity tests in this course use gradient descent.
# </details>

# %%
check("zero-optimizer")

# %% [markdown]
# ## The library's ZeRO-1
#
# A real model has many weight tensors, and communication should overlap computation. So the library lays parameters end to
# end in **buckets** (lesson 07). Here are four ranks that train one block of the weather model. Boxes are weights. A rank has
# Adam's states for the colored part.
#
# > **Question.** In which order are the weights in the bucket?

# %%
FOUR = ("vit-demo", "model.depth=1", "train.global_batch=4", "parallel.dp=4",
        "parallel.zero=1")
WEIGHTS = {name: f"blocks.0.{name}" for name in ("norm1.weight", "attn.qkv.weight",
                                                 "attn.out.weight", "mlp.up.weight",
                                                 "mlp.up.bias", "mlp.down.weight",
                                                 "mlp.down.bias")}
lab.picture(who_holds.parameters(ranks(4)(trace, *FOUR), WEIGHTS, of="states",
                                 title="whose states are where, ZeRO-1 over 4"),
            "Four rows of boxes, one for each rank. Rank 0 has the states of "
            "mlp.down.bias and of the first half of mlp.down.weight, rank 1 those of "
            "the rest, of mlp.up.bias and of most of mlp.up.weight, rank 2 those of "
            "the rest, of attn.out.weight and of most of attn.qkv.weight, rank 3 "
            "those of what remains and of norm1.weight. Each number is with one rank.")

# %% [markdown]
# <details><summary>Answer</summary>
# From the last weight to the first: backward finishes gradients in this order. A share ends wherever a quarter of the numbers
# ends, in the middle of a matrix too.
# </details>
#
# Each bucket does what you wrote:

# %%
lab.show("course.parallel.data_parallel.zero1.ZeRO1")

# %% [markdown]
# The backward pass calls `start` when the last gradient of a bucket is ready. `complete` runs before the optimizer's step and
# `after_optimizer_step` after it. Each block waits for its weights just before its forward pass. Clipping, checkpoints and
# `verify` read from the parameters' placements which segment a rank has. Nothing else changes.
#
# With `precision=bf16`, ZeRO-1 divides one more thing. The optimizer needs float32 weights, but the matrix multiplications
# use 16-bit casts of them (lesson 04). So each rank keeps float32 **master weights** only for its share (`masters` above),
# and 16-bit copies of all linear layers. The all-gather then sends half the bytes, and training gives the same bits as
# without these copies.
#
# > **Predict.** With 2 ranks, how many bytes of optimizer states does each rank keep for each parameter? Will the training
# > equal that of one process?

# %%
my_state_bytes = 8               # your prediction

# %%
def states_and_parity() -> tuple[float, Any]:
    """Bytes of states on this rank per parameter of the model, and the gaps to one
    process."""
    from course.training.assemble import assemble

    c = config.load("vit-demo", ["parallel.zero=1", "parallel.bucket_mb=1",
                                 "data.source=mock", "train.device=cpu"])
    training = assemble(c, parallel.build_mesh(c.parallel, parallel.join("cpu")))
    training.step(training.model.example(2, torch.device("cpu")))
    training.gradients.wait_parameters()
    states = sum(x.nbytes for state in training.optimizer.state.values()
                 for x in state.values())
    return states / sum(p.numel()
                        for p in training.model.parameters()), verify.compare(exact)


exact = config.load("vit-demo", [*verify.DEFAULTS, "model.grid=[16,32]",
                                 "parallel.zero=1", "parallel.dp=2",
                                 "parallel.bucket_mb=0.5", "train.device=cpu"])
(state_bytes, gaps), _ = ranks(2)(states_and_parity)
lab.beside("bytes of states a parameter, on each of 2 ranks", my_state_bytes,
           state_bytes)
assert verify.tell(exact, gaps)

# %% [markdown]
# Four: half of eight.
#
# ## Part two: keep less, compute again
#
# ZeRO does not touch activations. **Activation checkpointing** ([Chen et al. 2016](https://arxiv.org/abs/1604.06174)) keeps
# only each block's *input*. When the backward pass reaches the block, it computes the block again, this time with a graph.
#
# The library calls this *full* recomputing, and uses PyTorch's `checkpoint`. It also offers *selective* recomputing: keep
# what is expensive to compute (matrix multiplications and attention), and compute the rest again (norms, GELU, sums).

# %%
lab.show("course.training.activation_checkpointing.checkpoint_activations")
lab.show("course.training.activation_checkpointing.save_expensive_ops")

# %% [markdown]
# > **Predict**, in units of (B, T, D) for each block: what does *full* keep, and what does *selective* keep? (How large is the
# > output of each matrix multiplication?) And if a forward pass costs one unit of FLOPs and a backward pass two, by how much
# > do the FLOPs rise with *full*?

# %%
my_full = 1                      # your predictions
my_selective = 8

# %%
from torch.utils.flop_counter import FlopCounterMode


def costs(how: str) -> dict[str, float]:
    """One forward and backward pass: activations kept, the peak, and FLOPs of
    matmuls."""
    model = new_model(how)
    batch = batch_of(model, 4)
    with MemoryMeter() as meter:
        loss = loss_of(model, batch)
        after_forward = meter.now
        loss.backward()
    with FlopCounterMode(display=False) as counter:
        loss_of(model, batch).backward()
    return {"after forward, MB": after_forward / 1e6, "peak, MB": meter.peak / 1e6,
            "GFLOP": counter.get_total_flops() / 1e9}


measured = {how: costs(how) for how in ("none", "selective", "full")}
for how, values in measured.items():
    print(f"{how:10}", "   ".join(f"{name} {value:6.2f}"
                                  for name, value in values.items()))

depth = settings.model.depth
# embedding, head, loss: in units
ends = measured["none"]["after forward, MB"] * 1e6 / unit - depth * (
    sizes[5] - sizes[4])
each = {how: (values["after forward, MB"] * 1e6 / unit - ends) / depth
        for how, values in measured.items()}
lab.beside("\nfull: kept by each block", my_full, each["full"], "(B, T, D)")
lab.beside("selective: kept by each block", my_selective, each["selective"],
           "(B, T, D)")

# %% [markdown]
# `MemoryMeter` watches every operator and counts the bytes of all living tensors, like `torch.cuda.max_memory_allocated` on a
# GPU.
#
# **What you should see:** full keeps about 1, each block's input. Selective keeps about 11: 3 for the output of `qkv`, 1 for
# attention, 1 for `attn.out`, 4 for `mlp.up`, 1 for `mlp.down`, and 1 for the input. It does not keep the outputs of norms
# and GELU. With full, the *peak* falls less than what is kept after the forward pass. In the backward pass one block at a
# time has all of its 16, and at the end the gradients of all weights are there.
#
# > **Question.** With *full*, the FLOPs rise by a fifth and not by a third. Which matrix multiplications are not repeated? Why
# > does *selective* need no more FLOPs than *none*?
#
# <details><summary>Answer</summary>
# The last one of each block, <code>mlp.down</code>: the backward pass needs its input but not its <i>output</i>, so recomputing
# stops before it. It is a third of a block's matrix multiplications with weights, so a block repeats only two thirds of its
# forward FLOPs. Embedding and head are not recomputed. The counter does not see attention on a CPU; with long sequences the
# increase is closer to a third. Selective repeats no matrix multiplication at all. It costs memory traffic.
# </details>

# %%
bars = {how: {"activations": values["after forward, MB"]}
        for how, values in measured.items()}
lab.picture(style.stacked(bars, "MB", title="Activations after the forward pass, 4 "
                          "samples, 4 blocks"),
            "Three bars: none is the longest, selective keeps "
            + ", full keeps ".join(
                f"{measured[how]['after forward, MB'] / measured['none']['after forward, MB']:.0%} of it"
                for how in ("selective", "full")))

# %% [markdown]
# ## Combine the remedies
#
# The widget counts the bytes of GPTs of several sizes, with 4096 tokens on each rank and the numbers of this lesson. The upper
# bar saves nothing; the lower bar shows your choice.
#
# > **Predict, before you move the sliders:** what is the least you must do so that 13 billion parameters in bf16 fit into one
# > H200, with 8 ranks? And 70 billion?

# %%
slider = widgets.explore(memory.explore_memory, size=["7 B", "0.35 B", "1.3 B", "13 B",
                                                      "70 B"],
                         precision=["fp32", "bf16"],
                         dp=[8, 1, 2, 4, 16, 64], zero=[0, 1, 2, 3],
                         recompute=["none", "selective", "full"],
                         alt="Two stacked bars of weights, gradients, optimizer "
                         "states and activations: with "
                             "nothing saved, and as chosen. A line marks the "
                         "memory of one GPU.")

# %% [markdown]
# <details><summary>Answer</summary>
# With the widget's shapes, "13 B" has 12.6 billion parameters and "70 B" has 64 billion. 13 B needs
# {result: gigabytes("13 B", 0) | .0f} GB plus activations. ZeRO-1 over 8 ranks reduces that to
# {result: gigabytes("13 B", 1) | .0f} GB, and with {result: gigabytes("13 B", 0, "activations") | .0f} GB of activations it
# fits. For 70 B, stage 1 does not help: weights and gradients in bf16 alone need
# {result: gigabytes("70 B", 0, "weights", "gradients") | .0f} GB. Stage 2 still needs {result: gigabytes("70 B", 2) | .0f}
# GB. ZeRO-3 needs {result: gigabytes("70 B", 3) | .0f} GB over 8 ranks, and fits only with full recomputing. Over 64 ranks
# it fits easily. Or cut the model by tensor and pipeline parallelism: lesson 17 asks which is faster.
# </details>
#
# ## Exercise: compute it twice
#
# Now write full recomputing yourself, as a `torch.autograd.Function` like those of lessons 05 and 10. `forward` computes and
# stores in `ctx` what `backward` needs. `backward` gets the gradient of the output. It returns one gradient for each argument
# of `forward`, and `None` for the block.
#
# - PyTorch calls `forward` **without** building a graph, so it keeps nothing inside the block. Keep `x` with
#   `ctx.save_for_backward(x)`, and the block as an attribute of `ctx`.
# - PyTorch calls `backward` without a graph, too. Ask for one, `with torch.enable_grad():`. Compute the block on a copy of
#   `x` that is detached from earlier operations (`x.detach().requires_grad_()`). Then let autograd go through it, starting
#   from `grad`. Autograd adds the parameters' gradients to `.grad` itself, over several micro-batches too. Return the gradient
#   of `x`.
# - Change no tensor that you did not create, not even `grad`: a residual sum around the block uses the same tensor.

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
# > **Question.** The block has dropout. What goes wrong in the second pass, and how does PyTorch prevent it? And this library?
#
# <details><summary>Answer</summary>
# The second pass draws new random numbers, so it computes the gradient of a different network. PyTorch's
# <code>checkpoint</code> saves and restores the state of the random generator. In this library dropout is a function of the
# sample and the position (lesson 01), so it always drops the same values.
# </details>

# %% [markdown]
# ## Open task: an Adam that shards
#
# *Optional, about 40 minutes. Nothing later needs it.* Your ZeRO-1 had one flat tensor, its length a multiple of the
# number of ranks, and an optimizer from outside. Write Adam for real parameters: tensors of several shapes, whose sizes need
# not be such multiples. Ours has about 25 lines.
#
# **Contract**
#
# - `ShardedAdam(parameters, lr, axis)` gets the same float64 parameters on every rank. `step()` reads their `.grad`, which differ
#   from rank to rank, and leaves the same new parameters on all ranks.
# - It is Adam with betas (0.9, 0.999), eps 1e-8 and bias correction, on the mean gradients over `axis`.
# - A parameter may have no gradient in a step (`None`). That counts as zero, on this rank.
# - The axis need not have all ranks of the world: collectives take `group=axis.group`.
#
# **Levels.** Each one counts by itself, once the first is reached:
#
# | level | what the check counts |
# |---|---|
# | correct | the parameters after each of three steps |
# | byte budget | a step sends one reduce-scatter of the gradients and one all-gather of the parameters |
# | memory budget | between steps a rank keeps the parameters and its share of the two moments, and no more |
#
# Start with correct. `lab.hint("sharded-adam")` opens the first of three hints, and each further call opens the next one.

# %% exercise="sharded-adam"
from course.lab.exercises.lesson13_open_task import ShardedAdam  # noqa: F401

# %%
check("sharded-adam")

# %% [markdown]
# ## Summary
#
# - With Adam each parameter needs 16 bytes, in float32 and in the usual 16-bit recipe. In float32, half of that is optimizer
#   states.
# - A block keeps 16 activations of the shape (B, T, D), 11 with selective recomputing, and only its input with full.
# - ZeRO-1 does the optimizer's step between the two halves of the all-reduce: 1/n of the states, the same bytes to send.
# - Full recomputing costs less than a third more FLOPs; selective recomputing costs none.
# - Ask first which bytes, then choose the remedy.
#
# ## Questions
#
# 1. Training runs out of memory at step 2 with one sample. Which remedy do you try first, and why?
# 2. You double the context and halve the batch. Which of the four kinds of memory change?
# 3. You train with plain gradient descent instead of Adam. What does ZeRO-1 save then?
#
# **Check your work from a terminal.** Save the notebook, then run `course check notebooks/13_memory_mine.ipynb`.
# Next: [lesson 14](14_gpt.ipynb) trains the models that all of this was made for.
#
# ## Appendix (optional): on GPUs
#
# A model of GPT 350M's shape trains on four H200s with Adam, with 16 × 1024 tokens on each, in bf16 with float32 weights.
# PyTorch's own ZeRO-1 is `ZeroRedundancyOptimizer`: each rank updates whole parameters and then broadcasts them.
#
# > **Predict.** How many GB of states does ZeRO-1 keep on each rank? How does its step time compare with DDP's?

# %%
my_states_gb = 2.4               # your prediction; 300 million parameters
my_relative_time = 1.0           # ZeRO-1's time over that of DDP

# %%
rows = {row["case"]: row for row in lab.results("zero_h200")["rows"] if row["gpus"] == 4
        and "ms" in row}
lab.recorded("zero_h200", {case: {"ms": row["ms"], "GB at the peak": row["memory_gb"],
                                  "GB of states": row["optimizer_gb"],
                                  "in theory": row["theory_gb"]}
                           for case, row in rows.items()}, why="Four GPUs")
ours = rows["ZeRO-1, 16-bit copies"]
lab.beside("\nGB of states on each of 4 ranks", my_states_gb, ours["optimizer_gb"],
           "GB", "recorded")
lab.beside("ZeRO-1's step over DDP's", my_relative_time, ours["ms"] / rows["ddp"]["ms"],
           how="recorded")

# %% [markdown]
# **What you should see:** a quarter of the states, 8 bytes a parameter over 4 ranks. The step takes
# {result: faster_with_copies | .0%} less time than DDP's. Without the 16-bit copies it takes
# {result: slower_without | .0%} more than DDP's: the all-gather sends float32 weights, and the first layers wait for them.
