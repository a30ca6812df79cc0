# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 10 · Tensor and sequence parallel
#
# A layer of a large model does not fit one GPU, or takes too long on it. **Tensor parallelism** cuts the matrices of a
# layer: each GPU has some of the heads and some of the hidden units, and works on all tokens. It takes two short mappings
# and two linears. You write all four, and the library trains its real model with them. **Sequence parallelism** then cuts
# what tensor parallelism has to leave whole.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 2 hours |
# | computing | 1 minute on two cores, most of it in checks |
# | you write | copy and reduce (5 lines), a rank's rows of qkv (3), column and row linear (4), gather and scatter (6) |
# | you measure | all-reduces and bytes of a step, activations kept for the backward pass; and read times of H200s and H100s |
#
# You should have done [lesson 09](09_mesh.ipynb). Work in a copy: *File → Save Notebook As…*,
# `10_tensor_parallel_mine.ipynb`.

# %%
import torch
import torch.nn.functional as F
from torch import Tensor

from course.training import assemble
from course.lab.instruments import tensor_memory
from course.lab.instruments import bytes_sent
from course import config, models, parallel
from course.training import verify
from course.lab.figures import scaling_table
from course.lab import notebook as lab
from course.lab.notebook import check
from course.ranks.notebook_ranks import ranks
from course.parallel import build_mesh, mappings
from course.training.step import build_compute

lab.begin("10")

# %% [markdown]
# ## Cut an MLP by hand
#
# An MLP is two matrices with GELU between them: $z = \mathrm{gelu}(x A^\top)\, B^\top$. No GPU yet, no processes: just two
# halves on one machine. There are two ways to cut a matrix. By its **output** features, the *rows* of PyTorch's weight,
# each half computes some of the outputs from all of the input. By its **input** features, the *columns* of the weight, each
# half takes some of the input and computes a *part of the sum* of every output.
#
# > **Predict.** Cut `A` by its outputs. Which way should `B` be cut, so that nothing has to be sent between the two? And
# > how many sums over the two halves does the MLP take?

# %%
generator = torch.Generator().manual_seed(0)
x = torch.randn(5, 8, generator=generator, dtype=torch.float64)         # 5 tokens of width 8
A = torch.randn(32, 8, generator=generator, dtype=torch.float64)        # 32 hidden units
B = torch.randn(8, 32, generator=generator, dtype=torch.float64)
serial = F.gelu(x @ A.T) @ B.T

halves = []
for part_of_A, part_of_B in zip(A.chunk(2, 0), B.chunk(2, 1), strict=True):
    hidden = F.gelu(x @ part_of_A.T)                                    # (5, 16), half of the hidden units
    halves.append(hidden @ part_of_B.T)                                 # (5, 8), a part of every output
print("the sum of both halves is the whole, to", (halves[0] + halves[1] - serial).abs().max().item())

# %% [markdown]
# Cut `B` by its inputs: half of the hidden units is just what it needs, and it is here already. GELU works on each unit
# alone, so it does not mind. **One** sum at the end, for two matrix multiplications. Attention works the same way: `qkv` is
# cut by its outputs such that each half has whole *heads*, every head attends on its own, and the output matrix is cut by
# its inputs.
#
# The first kind is called **column** parallel, the second **row** parallel, after the matrices of the paper (Shoeybi et al.
# 2019, arXiv:1909.08053), where inputs multiply from the left. Each model of the library says in a table which of its
# linears is which:

# %%
print(models.layers.TENSOR_PLAN)

# %% [markdown]
# > **Question.** Why not cut both by their outputs? Each half would have half of the result, and nothing to add up.
#
# <details><summary>Answer</summary>
# The second matrix needs <i>all</i> hidden units for each of its outputs. So they would have to be gathered in between: 32
# numbers a token to send, four times the width, where the sum at the end has 8. And the result is in halves, which the
# residual sum after it cannot use.
# </details>
#
# ## What about the gradient?
#
# Now let the halves be two ranks. The forward pass needs one all-reduce, at the exit of each pair of linears.
#
# > **Question.** Both ranks compute a part from the same `x`. In the backward pass, each rank gets a gradient of `x` by way
# > of *its* hidden units. What is the gradient of `x`? And what happens to the gradient of the output, on its way back
# > through the sum?
#
# <details><summary>Answer</summary>
# x went into both parts, so its gradient is the sum of both: another all-reduce, at the <i>entrance</i>, in the backward
# pass. The sum at the exit is z = z0 + z1, so dz0 = dz1 = dz: the gradient goes through as it is, and every rank has it
# already.
# </details>
#
# So the region in which ranks compute parts has a door on each side, and each door does something in one direction only:
#
# | | forward | backward | in Megatron-LM |
# |---|---|---|---|
# | **copy**, at the entrance | identity | all-reduce | *f* |
# | **reduce**, at the exit | all-reduce | identity | *g* |
#
# Each is the other one backwards. In the language of linear algebra, the backward pass of a linear map is its *transpose*.
# The transpose of "give everyone a copy" is "add up what everyone has", and the other way round.

# %% [markdown]
# ## Exercise: copy and reduce
#
# PyTorch does not know that. Its collectives have no gradient that you could rely on, so you say what happens, in an
# `autograd.Function` for each: `forward` gets the tensor and the axis, and stores in `ctx` what `backward` needs;
# `backward` gets the gradient and returns one for each argument of `forward`, `None` for the axis.
#
# You get `all_reduce(x, axis)`, the sum over the axis in new memory. One rule holds for every mapping of the library: **the
# forward pass never writes into its input, the backward pass never into its gradient.** Both may be in use elsewhere: the
# residual connection has the same tensor. `dist.all_reduce` writes in place, which is why the library's helper clones first.
# `copy` may return its input as it is. Autograd then makes a view of it, which has a gradient of its own.

# %% exercise="copy-reduce"
from course.parallel.mappings import Copy, Reduce  # noqa: F401

# %%
check("copy-reduce")

# %% [markdown]
# The check has trained the library's vision transformer on 2 and on 4 ranks with your classes, and compared losses and
# weights. It has counted the bytes that each pass sends, too. The right sum is not enough: whoever gathers all tensors and adds
# them up gets it as well, for twice the bytes on 4 ranks.
#
# ## Does it train as one process does?
#
# "Is the difference between tp=1 and tp=8 rounding or a mistake?" is the question that users of large frameworks ask
# most. You need not guess: `course verify` trains the same model from the same weights twice, on one process and in the
# layout, in 64 bits and with plain gradient descent, and compares every parameter after every step.
# (`model.residual=false` does not touch the blocks' residual sums. It is about the end of the model: `vit-demo` adds
# its input to its output and has a head that starts at zero, so that in the first step nothing but the head would
# move.)
#
# > **Predict.** By how much will they differ, relative to how much training changed them? A 64-bit number has 16 digits.

# %%
equal = verify.main("vit-demo", ["model.depth=2", "model.residual=false", "parallel.tp=2", "train.steps=2"])

# %% [markdown]
# **12 digits, not 16:** a weight is rounded relative to its own size, and a step changes it by a small part of that.
#
# And what does it say of a mistake? Below, `copy` forgets the all-reduce of its backward pass. Nothing crashes, nothing
# hangs. Every shape is right.
#
# > **Predict.** Which parameters will be wrong after the first step: those inside the region, behind the door, or those in
# > front of it? And will the *loss* of the first step tell you?


# %%
def with_a_mistake() -> list[verify.Gap]:
    class Forgetful(mappings.Copy):
        """identity | identity"""

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    Forgetful.__name__ = "Copy"                      # whose place it takes
    with lab.yours(Forgetful):
        return verify.compare(settings)


settings = config.load("vit-demo", [*verify.DEFAULTS, "model.depth=2", "model.residual=false", "parallel.dp=1", "parallel.tp=2",
                                    "train.steps=2", "train.device=cpu"])
equal = verify.tell(settings, ranks(2)(with_a_mistake)[0])

# %% [markdown]
# <details><summary>Answer</summary>
# The first loss is right, since the forward pass is; the second is off by a hundred-millionth. The parameters in front of a
# door are wrong, because their gradients have come through it: norms, the embedding, the positions, all blocks below. The last
# MLP and the head are right: they lie behind the last door. Adam would hide a wrong <i>factor</i> (lesson 07). Here the other
# rank's part is missing, so directions are wrong, and the ranks' copies of a norm drift apart. Still the loss would go down, a
# little worse, and nobody would know why.
# </details>
#
# ## Which rows of qkv?
#
# The matrix of queries, keys and values is one linear. Its output features, and so the rows of its weight, are laid out as
# `(3, heads, head_dim)`: first all heads' queries, then all keys, then all values. A rank needs its heads' queries, keys
# *and* values.
#
# > **Predict.** 4 heads of 2 dims, 2 ranks: 24 rows. Which does rank 0 get?

# %%
my_rows = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]     # your prediction

# %% [markdown]
# ## Exercise: the rows of a rank
#
# Return the numbers of the rows of `qkv.weight` that a rank has, in the order in which it has them: its queries, then its
# keys, then its values. `size` divides `heads`.

# %% exercise="qkv-rows"
def qkv_rows(heads: int, head_dim: int, size: int, rank: int) -> Tensor:
    """Which rows of qkv.weight, (3 * heads * head_dim, dim), a rank has: those of its heads in q, in k and in v."""
    ### BEGIN SOLUTION
    each = heads // size
    rows = torch.arange(3 * heads * head_dim).reshape(3, heads, head_dim)
    return rows[:, rank * each:(rank + 1) * each].reshape(-1)
    ### END SOLUTION

# %%
check("qkv-rows")

# %%
print("rank 0:", qkv_rows(4, 2, 2, 0).tolist(), "- you said", my_rows)

# %% [markdown]
# Three blocks, not one. A plain `chunk` gives rank 0 all queries and half of the keys. Nothing in the shapes would tell you,
# if the code behind it splits what it gets into three. Lesson 16 meets the same in checkpoints. In the library every
# parameter carries its *logical* shape: for qkv `(3, heads, head_dim, dim)`, in the `global_shape` of its `Placement`. So
# "cut dim 1 of it" is all there is to say, and checkpoints, clipping and `verify` read the same.
#
# > **Question.** Why may a rank not have half of every head instead?
#
# <details><summary>Answer</summary>
# A score is the product of a query and a key over <i>all</i> dims of a head, and then comes a softmax. Half of the dims
# gives a part of the sum, and the sum has to be complete before the softmax: tokens × tokens numbers a head to all-reduce.
# </details>

# %% [markdown]
# ## Exercise: column and row linear
#
# A linear stays the module that it is. Surgery leaves this rank's part of its weight and bias, and puts an object into its
# slot `communication`, which does what ranks have to exchange around the product. First the cut: it goes along a dim of a
# parameter's **logical** shape. A bias has the logical shape `(3, heads, head_dim)` for qkv and `(features,)` else, the `rows`
# of the linear; a weight has one dim more, the inputs, at the end.

# %%
lab.show("course.parallel.tensor_parallel.linear.cut_dims")

# %% [markdown]
# > **Question.** Along which dim does a column linear cut the weight of qkv, along which that of the MLP's `up`? And why
# > does a row linear not cut its bias?
#
# <details><summary>Answer</summary>
# qkv along dim 1, the heads; up along dim 0, the hidden units: the last dim but one of the bias, if there is more than one.
# A row linear's outputs are not cut, every rank has all of them once the parts are added up, so it needs the whole bias.
# </details>
#
# You write the two objects: each is called in the place of the product. `enter_region(x, axis, tokens)` and
# `leave_region(x, axis, tokens)` are the doors: your copy and reduce, as long as `tokens` is `None`. Pass `self.tokens` on; it is
# for sequence parallelism, below. A column linear goes through its door and multiplies; a row linear multiplies, and goes
# through its door. `multiply(x, weight, bias)` is the product: `F.linear`, or that of another number format, such as FP8. The
# bias may be left out.
#
# > **Question, before you write.** Where does the row linear's bias go: before the sum, or after it?
#
# <details><summary>Answer</summary>
# After it. Before it, each rank would add the bias to its part, and the sum would have it <code>tp</code> times. At
# first nothing shows it: biases start at zero, so the first loss is right. In bf16 the parts and their sum are in 16 bits and the
# bias is kept in 32: bring it to the format of the sum, or all that follows is in 32 as well.
# </details>

# %% exercise="column-row"
from course.parallel.tensor_parallel.linear import ColumnParallel, RowParallel  # noqa: F401

# %%
check("column-row")

# %% [markdown]
# ## Count
#
# > **Predict.** Lesson 09 has said how many all-reduces one training step takes **per block**, forward and backward together.
# > Where in the block are they? And how many kilobytes does each have? The model has 128 tokens of width 128 and a batch of 4,
# > in 32 bits.

# %%
my_all_reduces = 2               # for each block, if you remember
my_kilobytes = 100               # your prediction

# %%
small = ["data.source=mock", "train.device=cpu", "train.global_batch=4", "parallel.data=naive", "parallel.overlap=none",
         "model.residual=false"]                     # random numbers for data, nothing that hides a message, no sum at the end


def count_a_step(*overrides: str) -> list[bytes_sent.Collective]:
    """The collectives of one training step that move more than a few numbers."""
    settings = config.load("vit-demo", [*small, *overrides])
    training = assemble.assemble(settings, build_mesh(settings.parallel, parallel.join("cpu")))
    _, calls = bytes_sent.collectives(lambda: verify.one_step(training, 1))
    return [call for call in calls if call.bytes > 1000]


calls = ranks(2)(count_a_step, "parallel.tp=2")[0]
depth = config.load("vit-demo").model.depth
lab.beside("all-reduces of a block", my_all_reduces, len(calls) / depth, how="counted")
lab.beside("kilobytes of each", my_kilobytes, calls[0].bytes / 1000, "kB", "counted")

# %% [markdown]
# **What you should see:** four: forward at the exits of attention and MLP, backward at their entrances. Each has samples ×
# tokens × width numbers, whatever `tp` is. They lie *between* matrix multiplications that need their result, so nothing
# hides them unless one works at it. That is the price, and the reason why lesson 09 puts `tp` on the fastest links.

# %% [markdown]
# ## What is kept for the backward pass
#
# Weights are not all that takes memory in training. `saved_for_backward` counts the bytes that a forward pass keeps: it
# hooks into autograd wherever a tensor is saved.

# %%
lab.show("course.lab.instruments.tensor_memory.saved_for_backward")

# %% [markdown]
# Count in units of one activation, samples × tokens × width numbers. A block keeps: the inputs of the two norms and their
# outputs, **4**; queries, keys, values and the answer of attention, **4**; the hidden units before and after GELU, 4 times
# the width each, **8**. 16 together.
#
# > **Predict.** Which of these does tensor parallelism cut? How many are left on each rank, with `tp=2` and with `tp=4`?

# %%
my_units = {2: 8.0, 4: 4.0}      # your prediction, for tp=2 and tp=4


# %%
def kept_by_a_block(*overrides: str) -> float:
    """What one block keeps for its backward pass on this rank, in units of samples x tokens x width numbers."""
    settings = config.load("vit-demo", [*small, *overrides])
    training = assemble.assemble(settings, build_mesh(settings.parallel, parallel.join("cpu")))
    model, c = training.model, settings.model
    batch = model.prepare(model.example(4, torch.device("cpu")), training.progress.step)
    batch = training.layout.tokens.cut(batch)
    x = model.embed(batch)
    _, kept = tensor_memory.saved_for_backward(lambda: model.blocks["0"](x, batch), model.parameters())
    return kept / (4 * c.tokens * c.dim * 4)


units = {1: ranks(1)(kept_by_a_block)[0]} | {tp: ranks(tp)(kept_by_a_block, f"parallel.tp={tp}")[0] for tp in (2, 4)}
print(f"one process: {units[1]:.2f}")
for tp in (2, 4):
    lab.beside(f"tp={tp}", my_units[tp], units[tp], "activations a block", "counted")

# %% [markdown]
# **What you should see:** 4 + 12/tp. What lies inside the two regions is cut: 12 of the 16. What lies between them is not:
# every rank has the inputs and outputs of the norms for all tokens, computes the same norms, the same dropout, the same
# residual sums. With `tp=8` these 4 are nearly three quarters of all.
#
# ## Sequence parallelism
#
# Norms, dropout and residual sums work on each token alone. So between the regions, cut by **tokens**: each rank has tokens
# / tp of them. At the entrance the column linear needs all tokens: an all-gather. At the exit each rank needs the sum for
# its own tokens only: a reduce-scatter. (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.)
#
# | | forward | backward |
# |---|---|---|
# | **gather**, at the entrance | all-gather | reduce-scatter |
# | **scatter**, at the exit | reduce-scatter | all-gather |
#
# > **Question.** What does this cost in bytes, compared with copy and reduce? (Lesson 07: how does a ring do an
# > all-reduce?)
#
# <details><summary>Answer</summary>
# Nothing. An all-reduce <i>is</i> a reduce-scatter and an all-gather, one after the other. Forward: one all-gather and one
# reduce-scatter for each region, where there was one all-reduce. Backward the same.
# </details>
#
# > **Question.** Why is the backward pass of this all-gather a reduce-scatter, and not just each rank's slice of the
# > gradient?
#
# <details><summary>Answer</summary>
# Behind the door every rank used <i>all</i> tokens, each for its own heads or hidden units. So every rank has a part of
# every token's gradient: add them up, and give each rank the sum for its tokens. A slice would be right if all ranks
# computed the same from the gathered tensor: some libraries offer both, and taking the wrong one trains without an error
# message.
# </details>
#
# ## Exercise: gather and scatter
#
# The same form as before, with a dim. You get `all_gather(x, dim, axis, n)`, which joins the ranks' pieces, equally
# long or not, into a tensor of n rows along `dim`, and `reduce_scatter(x, dim, axis)`, this rank's piece of the sum.

# %% exercise="gather-scatter"
from course.parallel.mappings import Gather, Scatter  # noqa: F401

# %%
check("gather-scatter")

# %% [markdown]
# > **Predict.** What does a block keep now, with `tp=4`? One thing to decide: the column linear multiplies *gathered*
# > tokens, and keeps its input for the gradient of its weight. And which collectives does a block make in a step, how many
# > of each?

# %%
my_units_sp = 4.0                # your prediction, for tp=4 with sequence parallelism

# %%
sequence = ranks(4)(kept_by_a_block, "parallel.tp=4", "parallel.sp=true")[0]
lab.beside("tp=4 with sequence parallelism", my_units_sp, sequence, "activations a block", "counted")
with_sp = ranks(2)(count_a_step, "parallel.tp=2", "parallel.sp=true")[0]
for op in sorted({call.op for call in with_sp}):
    print(f"{op:15} {sum(call.op == op for call in with_sp) / depth:5.2f} for each block")
print(f"bytes sent by a rank, sequence parallel over tensor parallel: "
      f"{sum(call.sent for call in with_sp) / sum(call.sent for call in calls):.3f}")

# %% [markdown]
# **What you should see:** the inputs of the two norms are cut, so 2 + 2/tp + 12/tp = 5.5 where there were 7. The two that
# are left are the gathered inputs of the column linears. They need not be kept: gather them *again* in the backward pass,
# beside a matrix multiplication that has to be done anyway. Then all is cut, 16/tp.
# `course/parallel/tensor_parallel/overlapped_linear.py` does that: more bytes, less memory. Whether they are hidden, we measure
# below.
#
# Four all-gathers and four reduce-scatters a block, where there were four all-reduces: the same bytes. And yet the step
# sends a tenth more: there is one more all-reduce in it.
#
# ## Partial gradients
#
# > **Question.** Whose gradients does that last all-reduce complete? Look at a norm's weight: it is whole on every rank,
# > and now each rank normalises its own tokens with it.

# %%
def norm_gradients() -> tuple[Tensor, Tensor]:
    """The gradient of the first norm's weight on this rank, before and after the library has completed the gradients."""
    settings = config.load("vit-demo", [*small, *layout])
    training = assemble.assemble(settings, build_mesh(settings.parallel, parallel.join("cpu")))
    model, weight = training.model, training.model.blocks["0"].norm1.weight
    compute = build_compute(model, training.progress, settings, training.layout)
    training.gradients.begin(1)
    compute(model.prepare(model.example(4, torch.device("cpu")), training.progress.step))
    before = weight.grad.clone()
    training.gradients.finish()
    return before, weight.grad


layout: list[str] = []
(_, whole), = ranks(1)(norm_gradients)
layout = ["parallel.tp=2", "parallel.sp=true"]
(first, done), (second, _) = ranks(2)(norm_gradients)
found = {"rank 0 alone": first, "rank 1 alone": second, "their sum": first + second, "after finish()": done}
for label, gradient in found.items():
    print(f"{label:15} differs from one process by {((gradient - whole).norm() / whole.norm()).item():.1e}")

# %% [markdown]
# Each rank has seen half of the tokens, so its gradient is a **part**: it must be added up over `tp`, besides being averaged
# over `dp`. That goes for every parameter that `tp` does not cut and that works on cut tokens: norms, the biases of row
# linears, the embedding, the head. The library marks them, `partial_over` in their placements, from one rule and
# without naming any, and adds all of them up in one all-reduce at the end.

# %%
lab.show("course.parallel.tensor_parallel.sequence.mark_partial")
lab.show("course.parallel.data_parallel.gradients.add_partial_gradients")

# %% [markdown]
# > **Question.** What happens if one norm is forgotten? (It has happened, in a course like this one.)
#
# <details><summary>Answer</summary>
# Every rank updates it with the gradient of its own tokens. The copies of one parameter drift apart, and nothing notices:
# the loss goes down, a little worse. <code>course verify</code> names the parameter after one step.
# </details>

# %%
equal = verify.main("vit-demo", ["model.depth=2", "model.residual=false", "parallel.tp=2", "parallel.sp=true", "train.steps=2"])

# %% [markdown]
# ## On GPUs
#
# From here on there is no exercise. *Compiled* is lesson 05's word, a *CUDA graph* lesson 06's, *Triton kernels* lesson 15's,
# and DiT-XL/2 is the model of that lesson. If you are in a hurry, read the tables and go on to *What you know now*.
#
# A stack of 8 blocks of width 4096, a batch of 4 × 4096 tokens, forward and backward in bf16, takes 304 ms on one
# H200. An activation is 4 × 4096 × 4096 × 2 bytes = 134 MB, and an all-reduce of that size runs at 287 GB/s over 2 GPUs and
# at 328 GB/s over 4 (bus bandwidth, PyTorch 2.11, NCCL 2.28.9).
#
# > **Predict** the times of PyTorch's own tensor parallelism, DTensor, on 2 and on 4 GPUs: arithmetic divided, communication
# > that nothing hides.

# %%
my_ms = {2: 152.0, 4: 76.0}      # your prediction: this one has no communication at all

# %%
rows = lab.results("tp_h200")["rows"]
ms = {(row["case"], row["gpus"]): row["ms"] for row in rows}
bandwidth = {2: 287e9, 4: 328e9}
activation = 4 * 4096 * 4096 * 2
for tp in (2, 4):
    talking = 8 * 4 * 2 * (tp - 1) / tp * activation / bandwidth[tp]
    divided = ms["one GPU", 1] / tp
    print(f"{tp} GPUs: arithmetic {divided:.0f} ms + communication {1000 * talking:.0f} ms = {divided + 1000 * talking:.0f} ms")
    lab.beside("DTensor", my_ms[tp], ms["DTensor sequence parallel", tp], "ms", "recorded")

# %% [markdown]
# **What you should see:** 167 and 96 ms by arithmetic, 176 and 116 recorded. The rest is smaller matrices, which are less
# efficient, and on 4 GPUs mostly DTensor itself: compiled it takes 98, as you will see, and this library's plain tensor
# parallelism 104. Communication alone is a fifth of that; what can be won is to run it *beside* the multiplications.

# %%
lab.recorded("tp_h200", scaling_table.table(rows, lambda case: "one GPU, compiled" if "compiled" in case else "one GPU"),
             why="The same stack: tensor parallelism without and with sequence parallelism and overlap, and DTensor")

# %% [markdown]
# **What you should see:** sequence parallelism alone saves memory (9.9 GB become 7.3 on 4 GPUs), not time. *Overlap*, in which
# NCCL runs beside the multiplications, takes 18 ms less than that on 2 GPUs, and 6 if both are compiled; on 4, compiled,
# nothing. And it needs fewer copies, too. So what does NCCL hide? *Symmetric*, in which it has no part, takes 95 ms on 4 GPUs,
# where plain tensor parallelism takes 104, and 168 on 2, where that takes 175. (It needs 0.5 GB more than the table says, which
# are not PyTorch's to count.) Whatever you have read about overlap, measure it: that is the rest of this lesson.
#
# Beside *which* multiplications? In its backward pass a column linear multiplies twice. While it computes the gradient of its
# input, it gathers that input again, which it needs for the gradient of its weight; and while it computes that one, it scatters
# the first result. A row linear has nothing to hide behind, and forward nothing has, unless you cut the batch: gather one half,
# then multiply it while the other is gathered.
#
# > **Predict.** DiT-XL/2 on two H100s, 32 samples of 0.6 MB, the whole step in a CUDA graph, so that no host counts (lesson 06).
# > In two parts it takes 72.8 ms. Whole, so that nothing is hidden forward, how long?

# %%
my_ms = 75.0                     # your prediction, of the whole step

# %%
by_case = {row["case"]: row["ms"] for row in lab.results("sp_2xh100")["rows"]}
models = ["DiT-XL/2, 256 px, 32 samples", "GPT 124M, 32 samples", "GPT 350M, 16 samples", "DiT-XL/2, 512 px, 16 samples",
          "GPT 1.3B, 4 samples"]
lab.beside("a step that is not cut in two", my_ms, by_case[f"{models[0]}, in a graph"], "ms", "recorded")
table = {model: {"two parts": by_case[f"{model}, in two parts, in a graph"], "whole": by_case[f"{model}, in a graph"]}
         for model in models}
lab.recorded("sp_2xh100", table, why="Whole steps with sequence parallelism on two H100s, in a graph, in ms")

# %% [markdown]
# **What you should see:** hiding is not free. It was meant to save what the collectives take, and cost more than it saved, in
# every model. The section after this one measures a reason: NCCL's kernels need multiprocessors, and the multiplication
# beside them has all of them. So `overlapped_linear.py` cuts nothing. In the backward pass it still starts collectives beside
# multiplications.
#
# One question is left. A collective puts pieces one after the other: all samples' *first* pieces, then all their second ones,
# where you want each sample's tokens together. Either gather the samples **one by one**, a call for each, all in one kernel; or
# gather the batch **as one** and put it in order by a copy.
#
# > **Question.** A call costs the host some microseconds, a copy the GPU. Which is faster in a graph? And without one, if the
# > host needs longer for a step than the GPU does?

# %%
found = lab.results("sp_2xh100")
again = {row["case"]: row["ms"] for row in found["again"]["rows"]}
table = {model: {"one by one, graph": by_case[f"{model}, in a graph"], "as one, graph": by_case[f"{model}, as one, in a graph"],
                 "one by one, host": by_case[f"{model}, one by one"], "as one, host": by_case[f"{model}, as one"],
                 "one by one, another host": again[f"{model}, one by one"], "as one, another host": again[f"{model}, as one"]}
         for model in models}
lab.recorded("sp_2xh100", table, why="The same steps, in a graph and left to their hosts, in ms")

# %% [markdown]
# **What you should see:** in a graph, one by one: calls that are replayed cost less than a copy. Left to these hosts, which need
# 1.4 to 3.7 times as long as the GPU, samples of up to 2.4 MB are mostly faster as one: the host makes one call in place of many,
# and the GPU, which waits for it, has time for the copy. For samples of 8.4 MB the results are mixed: host times vary,
# and only a difference well beyond that says something. `overlapped_linear.py` asks whether a graph is being recorded; if not, a
# batch below 64 MB of samples below 4 MB goes as one.
#
# ## Who moves the bytes
#
# What runs beside a multiplication is not hidden for that reason alone. Ask the simplest question: how long do a gather and a
# multiplication that need nothing of each other take, each alone and both at once?
#
# > **Predict.** Two H100s, in a graph: the gather of that DiT's 32 samples takes 75 µs, the multiplication beside which it is
# > done backward 60. And both at once?

# %%
my_us = 80.0                     # your prediction

# %%
exchanged = lab.results("symmetric_2xh100")
us = {row["case"]: 1e3 * row["ms"] for row in exchanged["rows"] if row["size"] == [32, 256, 1152]}
lab.beside("gather and multiply at once, by NCCL", my_us, us["matmul beside gather, NCCL"], "µs", "recorded")
lab.recorded("symmetric_2xh100", {what: {"µs": us[case]} for what, case in (
    ("multiplication", "matmul"), ("gather, NCCL", "gather, NCCL"), ("both at once", "matmul beside gather, NCCL"),
    ("gather, a kernel writes", "gather, through memory"),
    ("gather, a copy engine writes", "gather, through memory, by an engine"),
    ("multiplication beside a copy engine", "matmul beside gather, through memory"))},
    why="The same gather in three ways, on two H100s")

# %% [markdown]
# **What you should see:** 134, the sum of both. NCCL's gather is a kernel: it needs multiprocessors, the multiplication has
# all of them. A timeline may show both at once; the sum says that nothing is won. (Lesson 17 finds that gradients which are
# averaged beside the backward pass on H200s, without a graph, cost 74% of their time.) To hide it, something else has to move
# the bytes: a GPU has **copy engines**, which do nothing but that. An engine's gather takes 52 µs, and adds 19 to the
# multiplication beside it.
#
# So let each rank *write into the others' memory*, over NVLink. PyTorch maps memory of one GPU into another's process
# (symmetric memory); then a copy is all it takes, by a kernel (44 µs) where nothing runs beside it, else by an engine.
#
# > **Question.** Nobody calls the other rank now. How does it know that its tokens have come? And how do you know that it has
# > read the last ones, before you write over them?

# %%
lab.show("course.parallel.tensor_parallel.symmetric_memory.DoubleBuffer")
lab.show("course.parallel.tensor_parallel.symmetric_memory.Gather")

# %% [markdown]
# <details><summary>Answer</summary>
# A <b>barrier</b> after the copies answers the first. It answers the second, too, if exchanges take turns with two places, A and
# B. Whoever is at the barrier of an exchange in B has read what lay in A, since its stream does one thing after the other. So the
# next exchange may write into A again. One barrier an exchange, 4.4 µs, is enough. (The first exchange in a CUDA graph cannot
# know what ran before, and has one more.)
# </details>

# %%
steps = {row["case"]: row["ms"] for row in exchanged["steps"]["rows"]}
ways = {"NCCL": "Triton kernels", "through memory": "Triton kernels, through memory"}
table = {model: {way: steps[f"{model}, {words}, in a graph"] for way, words in ways.items()}
         for model in (models[0], models[2])}
lab.recorded("symmetric_2xh100", table, why="Whole steps with sequence parallelism, in a graph, Triton kernels, in ms")

# %% [markdown]
# **What you should see:** one step is a sixth shorter, the other a seventh: by the times above about half of it by hiding, half
# because writing is faster than NCCL. `parallel.overlap=symmetric` does that, on GPUs of one node; over a network NCCL is what
# there is. (By NCCL this DiT took 66 ms above: here its kernels are Triton, and tensor parallelism cuts its modulation, too.)
#
# On these two GPUs sequence parallelism is even faster through memory than none: that DiT takes 48.7 ms without.
#
# > **Predict.** The same on *four* H200s. Each rank multiplies half as much as on two, and receives 3/4 of all tokens in place of
# > half. Is it still faster than none, with its four all-reduces a block, forward and backward?

# %%
four = {row["case"]: row for row in lab.results("sp_4xh200")["rows"]}
ways = {"NCCL": "Triton kernels", "through memory": "Triton kernels, through memory",
        "no sequence parallelism": "Triton kernels, no sequence parallelism"}
table = {f"{model}, {way}": {"ms": row["ms"], "GB": row["memory_gb"]} for model in (models[0], models[-1])
         for way, words in ways.items() for row in [four[f"{model}, {words}, in a graph"]]}
lab.recorded("sp_4xh200", table, why="Whole steps on four H200s, in a graph")

# %% [markdown]
# **What you should see:** the DiT takes 3% longer than with none, the GPT of 1.3 billion 3% less, in 30 and 23% less memory; by
# NCCL they take a third and a quarter longer. Forward nothing hides a gather, and with the scatter it takes as long as the
# all-reduce that both replace. Backward, this DiT's multiplications of 33 µs are too short now to hide a gather of 56; those of
# the GPT take 93, and hide most of one of 90 ([exchange_h200.json](../course/bench/results/exchange_h200.json) has all of them).
# So on four the memory costs little or nothing. (On two H200s, [sp_2xh200.json](../course/bench/results/sp_2xh200.json), it takes
# 2 to 5% less time than none.)

# %% [markdown]
# ## What you know now
#
# - Column, then row: two matrices, one sum. Attention and MLP take one all-reduce each forward, and one each backward.
# - A collective's gradient is another collective, its transpose: copy | reduce, gather | scatter.
# - Cut qkv by heads, add a row linear's bias once, write into nobody's tensor.
# - Sequence parallelism cuts what is left, for the same bytes; then parameters that are whole have gradients that are
#   partial.
# - Beside a multiplication that fills the GPU, NCCL hides little or nothing: measure it. Copy engines hide more.
# - `course verify` says whether a layout trains as one process does, and if not, which parameters differ most.
#
# **Check your work once more, from outside.** Save the notebook; then, in a terminal: `course check
# notebooks/10_tensor_parallel_mine.ipynb`.
#
# Next: [lesson 11](11_context_parallel.ipynb), where the sequence itself is too long for one GPU.
