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
# Sometimes a layer of a large model does not fit on one GPU, or takes too long on it. **Tensor parallelism** cuts the
# matrices of a layer: each GPU has some heads and some hidden units, and works on all tokens. You write two short mappings
# and two linears, and the library trains its real model with them. **Sequence parallelism** then cuts what tensor
# parallelism leaves whole.
#
# **What you will learn**
#
# - How to cut an MLP and attention so that each needs only one sum.
# - Why the gradient of a collective is another collective.
# - What sequence parallelism saves, and which gradients it leaves partial.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 2 hours |
# | computing | 1 minute on two cores, most of it in checks |
# | you write | copy and reduce (5 lines), rows of qkv (3), two linears (4), gather and scatter (6); optional: a block (20) |
# | you measure | all-reduces and bytes of a step, activations kept for the backward pass |
#
# Do [lesson 09](09_mesh.ipynb) first. Work in a copy: *File → Save Notebook As…*, `10_tensor_parallel_mine.ipynb`.

# %% numbers=true
from course.bench.results import load, value

def stack_on(gpus, case="one GPU"):
    return value("tp_h200", case, gpus=gpus)

def bus(gpus):
    return load("beginning_h200")["all_reduce"][str(gpus)]["134"]       # GB/s

def expected(gpus):
    sent = 8 * 4 * 2 * (gpus - 1) / gpus * 4 * 4096 * 4096 * 2
    return stack_on(1) / gpus + sent / bus(gpus) / 1e6                  # ms

def exchange_us(case):
    return 1e3 * value("symmetric_2xh100", case, size=[32, 256, 1152])

def dit_ms(way):
    return value("symmetric_2xh100", f"DiT-XL/2, 256 px, 32 samples, {way}, in a graph",
                 part="steps/rows")

gather_us, multiply_us = exchange_us("gather, NCCL"), exchange_us("matmul")
engine_adds_us = exchange_us("matmul beside gather, through memory") - multiply_us
def four_gpus(way, field):
    return value("sp_4xh200", f"DiT-XL/2, 256 px, 32 samples, Triton kernels, {way}, in a graph",
                 field)

NONE, MEMORY = "no sequence parallelism", "through memory"
dit_longer = four_gpus(MEMORY, "ms") / four_gpus(NONE, "ms") - 1
dit_memory = 1 - four_gpus(MEMORY, "memory_gb") / four_gpus(NONE, "memory_gb")
dit_saved = 1 - dit_ms("Triton kernels, through memory") / dit_ms("Triton kernels")

# %%
import torch
import torch.nn.functional as F
from torch import Tensor

from course.training import assemble
from course.lab.instruments import tensor_memory
from course.lab.instruments import bytes_sent
from course.lab.instruments.forward_trace import trace
from course import config, models, parallel
from course.training import verify
from course.lab.figures import scaling_table, who_holds
from course.lab import notebook as lab
from course.lab.notebook import check
from course.ranks.notebook_ranks import ranks
from course.parallel import build_mesh, mappings
from course.training.step import build_compute

lab.begin("10")

# %% [markdown]
# ## Cut an MLP in two
#
# An MLP is two matrices with GELU between them: $z = \mathrm{gelu}(x A^\top)\, B^\top$. Start without GPUs and processes: two
# halves on one machine. There are two ways to cut a matrix. If you cut it by its **output** features, the *rows* of PyTorch's
# weight, each half computes some outputs from all of the input. If you cut it by its **input** features, the *columns* of the
# weight, each half takes some of the input. It then computes a *part of the sum* of every output.
#
# > **Predict.** Cut `A` by its outputs. Which way should you cut `B`, so that nothing has to be sent between the two
# > matrices? And how many sums over the two halves does the MLP take?

# %%
generator = torch.Generator().manual_seed(0)
# 5 tokens of width 8
x = torch.randn(5, 8, generator=generator, dtype=torch.float64)
# 32 hidden units
A = torch.randn(32, 8, generator=generator, dtype=torch.float64)
B = torch.randn(8, 32, generator=generator, dtype=torch.float64)
serial = F.gelu(x @ A.T) @ B.T

halves = []
for part_of_A, part_of_B in zip(A.chunk(2, 0), B.chunk(2, 1), strict=True):
    # (5, 16), half of the hidden units
    hidden = F.gelu(x @ part_of_A.T)
    # (5, 8), a part of every output
    halves.append(hidden @ part_of_B.T)
print("the sum of both halves differs from the whole by at most",
      (halves[0] + halves[1] - serial).abs().max().item())

# %% [markdown]
# Cut `B` by its inputs: each half needs exactly the hidden units that it already has. GELU works on each unit alone, so the
# cut does not affect it. Two matrix multiplications need **one** sum, at the end. Attention works the same way. Cut `qkv` by
# its outputs such that each half has whole *heads*; every head attends on its own. Cut the output matrix by its inputs.
#
# The first kind of cut is called **column** parallel, the second **row** parallel. The names come from the paper (Shoeybi et
# al. 2019, arXiv:1909.08053), where inputs multiply from the left. Each model of the library has a table that says which
# linear is which:

# %%
print(models.layers.TENSOR_PLAN)

# %% [markdown]
# Two ranks now run the library's vision transformer with `tp=2`, and report what they hold. Each box is a weight of one
# block. The colored part is what a rank has.
#
# > **Question.** Why is the bias of `up` cut, and the bias of `down` not?

# %%
ONE_BLOCK = ("vit-demo", "model.depth=1", "train.global_batch=2")
WEIGHTS = {name: f"blocks.0.{name}" for name in (
    "norm2.weight", "mlp.up.weight", "mlp.up.bias", "mlp.down.weight", "mlp.down.bias")}
MLP = {"norm": "blocks.0.norm2", "up": "blocks.0.mlp.up", "down": "blocks.0.mlp.down",
       "+ residual": "blocks.0"}

whole_model = trace(*ONE_BLOCK)
two = ranks(2)(trace, *ONE_BLOCK, "parallel.tp=2")
lab.picture(who_holds.parameters(two, WEIGHTS, title="weights of an MLP and the norm "
                                 "before it, tp=2"),
            "Five boxes for each of two ranks. Both have the whole norm. Rank 0 has "
            "the upper half of mlp.up.weight, the first half of its bias and the left "
            "half of mlp.down.weight; rank 1 has the other halves. Both have the "
            "whole bias of down.")

# %% [markdown]
# <details><summary>Answer</summary>
# The bias of <code>up</code> belongs to hidden units, and each rank has half of them. The bias of <code>down</code> is added
# once, after the sum. If both ranks added it to their parts, the sum would have it twice.
# </details>
#
# The same two ranks compute the MLP, from left to right. Outlines show the whole activation, tokens downward and features
# across; the colored part is what a rank has. The bar is a collective.

# %%
lab.picture(who_holds.forward(whole_model, two, MLP,
                              title="forward pass of the MLP, tp=2"),
            "Norm: both ranks have all of it. Up: rank 0 has the left half of the "
            "hidden units, rank 1 the right half. Then one all-reduce over both "
            "ranks. Down and residual sum: both ranks have all of it.")

# %% [markdown]
# > **Question.** Why not cut both by their outputs? Each half would have half of the result, and nothing to add up.
#
# <details><summary>Answer</summary>
# The second matrix needs <i>all</i> hidden units for each of its outputs. So the ranks would have to gather them in between:
# 32 numbers a token, four times the width, where the sum at the end has 8. And the result would be in halves, which the
# residual sum after it cannot use.
# </details>
#
# ## What about the gradient?
#
# Now let the halves be two ranks. The forward pass needs one all-reduce, at the exit of each pair of linears.
#
# > **Question.** Both ranks compute a part from the same `x`. In the backward pass, each rank gets a gradient of `x` through
# > *its* hidden units. What is the gradient of `x`? And what happens to the gradient of the output, on its way back through
# > the sum?
#
# <details><summary>Answer</summary>
# x went into both parts, so its gradient is the sum of both: another all-reduce, at the <i>entrance</i>, in the backward
# pass. The sum at the exit is z = z0 + z1, so dz0 = dz1 = dz. The gradient passes unchanged, and every rank already has it.
# </details>
#
# So the region in which ranks compute parts has an entrance and an exit. Each of them communicates in one direction only:
#
# | | forward | backward | in Megatron-LM |
# |---|---|---|---|
# | **copy**, at the entrance | identity | all-reduce | *f* |
# | **reduce**, at the exit | all-reduce | identity | *g* |
#
# Each is the other one backwards. In linear algebra, the backward pass of a linear map is its *transpose*. The transpose of
# "give everyone a copy" is "add up what everyone has", and vice versa.

# %% [markdown]
# ## Exercise: copy and reduce
#
# PyTorch's collectives have no gradients that you can rely on. So you define each pair in an
# `autograd.Function`. `forward` gets the tensor and the axis, and stores in `ctx` what `backward` needs. `backward` gets the
# gradient and returns one for each argument of `forward`, `None` for the axis.
#
# You get `all_reduce(x, axis)`, the sum over the axis in new memory. One rule holds for every mapping of the library: **the
# forward pass never writes into its input, the backward pass never into its gradient.** Both may be in use elsewhere: the
# residual connection has the same tensor. `dist.all_reduce` writes in place, so the library's helper clones first. `copy` may
# return its input as it is. Autograd then makes a view of it, which has a gradient of its own.

# %% exercise="copy-reduce"
from course.parallel.mappings import Copy, Reduce  # noqa: F401

# %%
check("copy-reduce")

# %% [markdown]
# The check trained the library's vision transformer on 2 and on 4 ranks with your classes, and compared losses and weights.
# It also counted the bytes that each pass sends, because the right sum is not enough. Gathering all tensors and adding them
# up gives the same sum, for twice the bytes on 4 ranks.
#
# ## Does it match one process?
#
# "Is the difference between tp=1 and tp=8 rounding or a mistake?" Users of large frameworks ask this most. You need not
# guess. `course verify` trains the same model from the same weights twice, on one process and in the layout. It uses 64 bits
# and plain gradient descent, and compares every parameter after every step. (`model.residual=false` leaves the blocks'
# residual sums as they are. By default `vit-demo` also adds its input to its output, and its head starts at zero. Then only
# the head would move in the first step.)
#
# > **Predict.** By how much will the parameters differ, relative to how much training changed them? A 64-bit number has 16
# > digits.

# %%
equal = verify.main("vit-demo", ["model.depth=2", "model.residual=false",
                                 "parallel.tp=2", "train.steps=2"])

# %% [markdown]
# **12 digits, not 16:** the comparison is with the *change*. A step changes a weight by a small part of its size, and the
# weight is rounded relative to its whole size.
#
# How does a mistake look? Below, `copy` forgets the all-reduce of its backward pass. Nothing crashes, nothing hangs, and
# every shape is right.
#
# > **Predict.** Which parameters will be wrong after the first step: those inside the region, behind its entrance, or those
# > in front of it? And will the *loss* of the first step tell you?

# %%
def with_a_mistake() -> list[verify.Gap]:
    class Forgetful(mappings.Copy):
        """identity | identity"""

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    Forgetful.__name__ = "Copy"                      # it replaces the library's Copy
    with lab.yours(Forgetful):
        return verify.compare(settings)


settings = config.load("vit-demo", [*verify.DEFAULTS, "model.depth=2",
                                    "model.residual=false", "parallel.dp=1",
                                    "parallel.tp=2",
                                    "train.steps=2", "train.device=cpu"])
equal = verify.tell(settings, ranks(2)(with_a_mistake)[0])

# %% [markdown]
# <details><summary>Answer</summary>
# The first loss is right, because the forward pass is; the second is off by a hundred-millionth. The parameters in front of
# an entrance are wrong, because their gradients came through it: norms, the embedding, the positions, all blocks below. The
# last MLP and the head lie behind the last entrance and are right.<br> Adam would hide a wrong <i>factor</i> (lesson 07).
# Here the other rank's part is missing, so directions are wrong, and the ranks' copies of a norm drift apart. The loss would
# still go down, a little worse, and nobody would know why.
# </details>
#
# ## Which rows of qkv?
#
# One linear holds the matrices of queries, keys and values. Its output features, the rows of its weight, have the layout
# `(3, heads, head_dim)`: first all heads' queries, then all keys, then all values. A rank needs its heads' queries, keys
# *and* values.
#
# > **Predict.** 4 heads of 2 dims, 2 ranks: 24 rows. Which does rank 0 get?

# %%
my_rows = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]     # your prediction

# %% [markdown]
# ## Exercise: the rows of a rank
#
# Return the numbers of a rank's rows of `qkv.weight`, in the rank's order: its queries, then its keys, then its values.
# `size` divides `heads`.

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
# The picture shows the same in the library: the weights of attention on two ranks. `qkv` has its output features downward,
# and `out` has its input features across.

# %%
ATTENTION = {name: f"blocks.0.{name}" for name in ("attn.qkv.weight", "attn.qkv.bias",
                                                   "attn.out.weight", "attn.out.bias")}
lab.picture(who_holds.parameters(two, ATTENTION, title="weights of attention, tp=2"),
            "Of attn.qkv.weight and its bias each of two ranks has three stripes: "
            "half of the queries, of the keys and of the values. Rank 0 has the left "
            "half of attn.out.weight, rank 1 the right half. Both have the whole bias "
            "of out.")

# %% [markdown]
# The rank gets three blocks, not one. A plain `chunk` gives rank 0 all queries and half of the keys. Its part still splits
# into three, so the shapes would not reveal the mistake. Lesson 16 meets the same problem in checkpoints. In the library
# every parameter carries its *logical* shape, the `global_shape` of its `Placement`: for qkv `(3, heads, head_dim, dim)`. So
# "cut dim 1" says everything, and checkpoints, clipping and `verify` use the same description.
#
# > **Question.** Why may a rank not have half of every head instead?
#
# <details><summary>Answer</summary>
# A score is the product of a query and a key over <i>all</i> dims of a head, and then comes a softmax. Half of the dims gives
# a part of the sum, which must be complete before the softmax. That means an all-reduce of tokens × tokens numbers for each
# head.
# </details>

# %% [markdown]
# ## Exercise: column and row linear
#
# The linear module remains. The library keeps only this rank's part of its weight and bias, and puts an object into
# its slot `communication`. This object does the communication around the product. First the cut: it goes along a dim of a
# parameter's **logical** shape. The logical shape of a bias is the linear's `rows`: `(3, heads, head_dim)` for qkv,
# `(features,)` otherwise. A weight has one more dim at the end, the inputs.

# %%
lab.show("course.parallel.tensor_parallel.linear.cut_dims")

# %% [markdown]
# > **Question.** Along which dim does a column linear cut the weight of qkv, along which that of the MLP's `up`? And why does
# > a row linear not cut its bias?
#
# <details><summary>Answer</summary>
# qkv along dim 1, the heads of <code>(3, heads, head_dim)</code>; up along dim 0, the hidden units. Once the parts are
# added up, every rank has all outputs of a row linear, so it needs the whole bias.
# </details>
#
# You write the two objects; the library calls each in place of the product. `enter_region(x, axis, tokens)` and
# `leave_region(x, axis, tokens)` are the entrance and the exit: your copy and reduce, as long as `tokens` is `None`. Pass
# `self.tokens` on; sequence parallelism, below, uses it. A column linear enters the region and multiplies; a row linear
# multiplies and leaves the region. `multiply(x, weight, bias)` is the product: `F.linear`, or the product of another number
# format, such as FP8. The product's bias is optional.
#
# > **Question, before you write.** Where does the row linear's bias go: before the sum, or after it?
#
# <details><summary>Answer</summary>
# After it. Before it, each rank would add the bias to its part, and the sum would have it <code>tp</code> times. At first
# nothing shows this: biases start at zero, so the first loss is right. In bf16 the parts and their sum have 16 bits and the
# bias 32. Convert it to the format of the sum, or everything that follows is in 32 bits as well.
# </details>

# %% exercise="column-row"
from course.parallel.tensor_parallel.linear import ColumnParallel, RowParallel  # noqa: F401

# %%
check("column-row")

# %% [markdown]
# ## Count
#
# > **Predict.** Lesson 09 said how many all-reduces one training step takes **per block**, forward and backward together.
# > Where in the block are they? And how many kilobytes does each have? The model has 128 tokens of width 128 and a batch of
# > 4, in 32 bits.

# %%
my_all_reduces = 2               # for each block, if you remember
my_kilobytes = 100               # your prediction

# %%
small = ["data.source=mock", "train.device=cpu", "train.global_batch=4",
         "parallel.data=naive", "parallel.overlap=none",
         # random data, no hidden messages, no sum at the end
         "model.residual=false"]


def count_a_step(*overrides: str) -> list[bytes_sent.Collective]:
    """The collectives of one training step that move more than a few numbers."""
    settings = config.load("vit-demo", [*small, *overrides])
    training = assemble.assemble(settings,
                                 build_mesh(settings.parallel, parallel.join("cpu")))
    _, calls = bytes_sent.collectives(lambda: verify.one_step(training, 1))
    return [call for call in calls if call.bytes > 1000]


calls = ranks(2)(count_a_step, "parallel.tp=2")[0]
depth = config.load("vit-demo").model.depth
lab.beside("all-reduces of a block", my_all_reduces, len(calls) / depth, how="counted")
lab.beside("kilobytes of each", my_kilobytes, calls[0].bytes / 1000, "kB", "counted")

# %% [markdown]
# **What you should see:** four: forward at the exits of attention and MLP, backward at their entrances. Each has samples ×
# tokens × width numbers, whatever `tp` is. They lie *between* matrix multiplications that need their result, so nothing hides
# them by itself. That is the price of tensor parallelism, and the reason why lesson 09 puts `tp` on the fastest links.

# %% [markdown]
# ## What a block keeps for the backward pass
#
# Training needs memory for more than weights. `saved_for_backward` counts the bytes that a forward pass keeps: it hooks into
# autograd wherever a tensor is saved.

# %%
lab.show("course.lab.instruments.tensor_memory.saved_for_backward")

# %% [markdown]
# Count in units of one activation, samples × tokens × width numbers. A block keeps 16 of them:
#
# - **4**: the inputs of the two norms and their outputs;
# - **4**: queries, keys, values and the result of attention;
# - **8**: the hidden units before and after GELU, 4 times the width each.
#
# > **Predict.** Which of these does tensor parallelism cut? How many are left on each rank, with `tp=2` and with `tp=4`?

# %%
my_units = {2: 8.0, 4: 4.0}      # your prediction, for tp=2 and tp=4


# %%
def kept_by_a_block(*overrides: str) -> float:
    """What one block keeps for its backward pass on this rank, in units of samples x
    tokens x width numbers."""
    settings = config.load("vit-demo", [*small, *overrides])
    training = assemble.assemble(settings,
                                 build_mesh(settings.parallel, parallel.join("cpu")))
    model, c = training.model, settings.model
    batch = model.prepare(model.example(4, torch.device("cpu")), training.progress.step)
    batch = training.layout.tokens.cut(batch)
    x = model.embed(batch)
    _, kept = tensor_memory.saved_for_backward(lambda: model.blocks["0"](x, batch),
                                               model.parameters())
    return kept / (4 * c.tokens * c.dim * 4)


units = {1: ranks(1)(kept_by_a_block)[0]} | {tp: ranks(tp)(kept_by_a_block,
                                                           f"parallel.tp={tp}")[0]
                                             for tp in (2, 4)}
print(f"one process: {units[1]:.2f}")
for tp in (2, 4):
    lab.beside(f"tp={tp}", my_units[tp], units[tp], "activations a block", "counted")

# %% [markdown]
# **What you should see:** 4 + 12/tp. Tensor parallelism cuts the 12 that lie inside the two regions. It does not cut the 4
# between them: every rank computes the same norms, the same dropout and the same residual sums for all tokens. With `tp=8`
# these 4 are nearly three quarters of all.
#
# ## Sequence parallelism
#
# Norms, dropout and residual sums work on each token alone. So between the regions, cut by **tokens**: each rank has tokens /
# tp of them. At the entrance the column linear needs all tokens: an all-gather. At the exit each rank needs the sum for its
# own tokens only: a reduce-scatter. (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.)
#
# | | forward | backward |
# |---|---|---|
# | **gather**, at the entrance | all-gather | reduce-scatter |
# | **scatter**, at the exit | reduce-scatter | all-gather |
#
# %%
split = ranks(2)(trace, *ONE_BLOCK, "parallel.tp=2", "parallel.sp=true")
lab.picture(who_holds.forward(whole_model, split, MLP, title="forward pass of the "
                              "MLP, tp=2 with sequence parallelism"),
            "Norm: rank 0 has the upper half of the tokens, rank 1 the lower half. An "
            "all-gather. Up: each rank has all tokens and half of the hidden units. A "
            "reduce-scatter. Down and residual sum: each rank has half of the tokens "
            "again.")

# %% [markdown]
# > **Question.** What does this cost in bytes, compared with copy and reduce? (Lesson 07: how does a ring do an all-reduce?)
#
# <details><summary>Answer</summary>
# Nothing. An all-reduce <i>is</i> a reduce-scatter followed by an all-gather. Forward, each region has one all-gather and one
# reduce-scatter in place of one all-reduce. Backward the same.
# </details>
#
# > **Question.** Why is the backward pass of this all-gather a reduce-scatter, and not just each rank's slice of the
# > gradient?
#
# <details><summary>Answer</summary>
# In the region every rank used <i>all</i> tokens, each for its own heads or hidden units. So every rank has a part of every
# token's gradient. Add the parts up, and give each rank the sum for its tokens. A slice would be right if all ranks computed
# the same from the gathered tensor. Some libraries offer both, and the wrong one trains without an error message.
# </details>
#
# ## Partial gradients
#
# Cutting by tokens has a consequence for the weights that stay whole. A norm's weight is the same on every rank, but now
# each rank normalizes only its own tokens with it.
#
# > **Question.** What does one rank's gradient of this weight lack? What must the ranks do with their gradients?

# %%
def norm_gradients() -> tuple[Tensor, Tensor]:
    """The gradient of the first norm's weight on this rank, before and after the
    library has completed the gradients."""
    settings = config.load("vit-demo", [*small, *layout])
    training = assemble.assemble(settings,
                                 build_mesh(settings.parallel, parallel.join("cpu")))
    model, weight = training.model, training.model.blocks["0"].norm1.weight
    compute = build_compute(model, training.progress, settings, training.layout)
    training.gradients.begin(1)
    compute(model.prepare(model.example(4, torch.device("cpu")),
                          training.progress.step))
    before = weight.grad.clone()
    training.gradients.finish()
    return before, weight.grad


layout: list[str] = []
(_, whole), = ranks(1)(norm_gradients)
layout = ["parallel.tp=2", "parallel.sp=true"]
(first, done), (second, _) = ranks(2)(norm_gradients)
found = {"rank 0 alone": first, "rank 1 alone": second, "their sum": first + second,
         "after finish()": done}
for label, gradient in found.items():
    print(f"{label:15} differs from one process by "
          f"{((gradient - whole).norm() / whole.norm()).item():.1e}")

# %% [markdown]
# Each rank has seen half of the tokens, so its gradient is a **part**. The ranks must add these parts up over `tp`, besides
# averaging over `dp`. This holds for every whole parameter that works on cut tokens: norms, the biases of row linears, the
# embedding, the head. The library marks them as `partial_over` in their placements, by one rule and without naming any. It
# adds all of them up in one all-reduce at the end.

# %%
lab.show("course.parallel.token_split.mark_partial")
lab.show("course.parallel.data_parallel.gradients.add_partial_gradients")

# %% [markdown]
# > **Question.** What happens if the library forgets one norm? (It has happened, in a course like this one.)
#
# <details><summary>Answer</summary>
# Every rank updates it with the gradient of its own tokens. The copies of one parameter drift apart, and nothing notices: the
# loss goes down, a little worse. <code>course verify</code> names the parameter after one step.
# </details>
#
# How much memory will a block still take? One thing to consider: the column linear multiplies *gathered* tokens, and keeps
# its input for the gradient of its weight.
#
# > **Predict.** What does a block keep with sequence parallelism and `tp=4`? And which collectives does a block make in a
# > step, how many of each?

# %%
my_units_sp = 4.0                # your prediction, for tp=4 with sequence parallelism

# %% [markdown]
# ## Exercise: gather and scatter
#
# The form is the same as before, with a dim as one more argument. You get `all_gather(x, dim, axis, n)`, which joins the
# ranks' pieces into a tensor of length n along `dim`; the pieces may differ in length. You also get
# `reduce_scatter(x, dim, axis)`, this rank's piece of the sum.

# %% exercise="gather-scatter"
from course.parallel.mappings import Gather, Scatter  # noqa: F401

# %%
check("gather-scatter")

# %%
sequence = ranks(4)(kept_by_a_block, "parallel.tp=4", "parallel.sp=true")[0]
lab.beside("tp=4 with sequence parallelism", my_units_sp, sequence,
           "activations a block", "counted")
with_sp = ranks(2)(count_a_step, "parallel.tp=2", "parallel.sp=true")[0]
for op in sorted({call.op for call in with_sp}):
    print(f"{op:15} {sum(call.op == op for call in with_sp) / depth:5.2f} "
          f"for each block")
print(f"bytes sent by a rank, sequence parallel over tensor parallel: "
      f"{sum(call.sent for call in with_sp) / sum(call.sent for call in calls):.3f}")

# %% [markdown]
# **What you should see:** the inputs of the two norms are cut, so 2 + 2/tp + 12/tp = 5.5 remain where there were 7. The uncut
# two are the gathered inputs of the column linears. The library can gather them *again* in the backward pass: more bytes,
# less memory. Four all-gathers and four reduce-scatters a block replace four all-reduces. The step sends a tenth more,
# because it also completes the partial gradients. Compare it with one process:

# %%
equal = verify.main("vit-demo", ["model.depth=2", "model.residual=false",
                                 "parallel.tp=2", "parallel.sp=true", "train.steps=2"])

# %% [markdown]
# ## Open task: a whole block
#
# *Optional, about 50 minutes. Nothing later needs it.* Write a transformer block that is tensor parallel and sequence
# parallel: each rank has some heads, some hidden units, and some tokens of the residual stream. Ours has about 20 lines.
#
# For one process the block is `x + attention(norm1(x))`, then `x + mlp(norm2(x))`. Attention is not causal, GELU is
# exact, and norms have PyTorch's default epsilon. There is no dropout.
#
# **Contract**
#
# - In: this rank's tokens and its part of the weights. Out: the block's output for the same tokens. The docstring has the shapes.
# - Tokens are cut by the `tensor_split` rule, so ranks may have unequal numbers.
# - After `backward`, every weight on every rank has the gradient of *all* tokens. This includes the norms and the biases of
#   row linears, whose gradients were left partial above.
# - You may use everything in `course.parallel.mappings`.
#
# **Levels.** Each one counts by itself, once the first is reached:
#
# | level | what the check counts |
# |---|---|
# | correct | output and gradients match one process |
# | byte budget | at most the bytes of four all-reduces of the activation, and of one all-reduce of each small weight |
# | memory budget | the backward pass needs two activations of all tokens and all channels, not more |
#
# Start with correct. `lab.hint("parallel-block")` opens the first of three hints, and each further call opens the next one.

# %% exercise="parallel-block"
from course.lab.exercises.lesson10_open_task import parallel_block  # noqa: F401

# %%
check("parallel-block")

# %% [markdown]
# ## Summary
#
# - Column, then row: two matrices, one sum. Attention and MLP each take one all-reduce forward and one backward.
# - A collective's gradient is its transpose: copy | reduce, gather | scatter.
# - Cut qkv by heads, add a row linear's bias once, and never overwrite an input.
# - Sequence parallelism cuts the rest for the same bytes; whole parameters then have partial gradients.
# - `course verify` tells whether a layout matches one process, and which parameters differ.
#
# ## Questions
#
# 1. Why does `tp` rarely exceed the GPUs of one node?
# 2. Which parameters of a new layer would need a sum over `tp`?
# 3. A timeline shows a gather and a multiplication at the same time. What proves that the gather is hidden?
#
# **Check your work from a terminal.** Save the notebook, then run
# `course check notebooks/10_tensor_parallel_mine.ipynb`. Next: [lesson 11](11_context_parallel.ipynb), for sequences too long
# for one GPU.
#
# ## Appendix (optional): on GPUs
#
# A stack of 8 blocks of width 4096 takes {result: stack_on(1) | .0f} ms on one H200: 4 × 4096 tokens in bf16, forward and
# backward. If the GPUs divide the arithmetic and nothing hides the all-reduces, it would take {result: expected(2) | .0f}
# ms on 2 GPUs and {result: expected(4) | .0f} ms on 4.

# %%
rows = lab.results("tp_h200")["rows"]
lab.recorded("tp_h200", scaling_table.table(
    rows, lambda case: "one GPU, compiled" if "compiled" in case else "one GPU"),
    why="Tensor parallelism without and with sequence parallelism and overlap, and "
             "DTensor")

# %% [markdown]
# **What you should see:** sequence parallelism saves memory, not time. *Overlap* runs NCCL beside multiplications; compiled
# on 4 GPUs, it gains nothing. *Symmetric* writes into the other GPUs' memory without NCCL and is fastest.
#
# > **Predict.** On two H100s, a gather by NCCL takes {result: gather_us | .0f} µs and a multiplication
# > {result: multiply_us | .0f} µs. How long do both take at once?

# %%
my_us = 80.0                     # your prediction

# %%
exchanged = lab.results("symmetric_2xh100")["rows"]
us = {row["case"]: 1e3 * row["ms"] for row in exchanged
      if row["size"] == [32, 256, 1152]}
lab.beside("gather and multiply at once, by NCCL", my_us,
           us["matmul beside gather, NCCL"],
           "µs", "recorded")

# %% [markdown]
# **What you should see:** as long as if one ran after the other. NCCL's gather needs multiprocessors, and the multiplication
# occupies them all. **Copy engines** do nothing but copy: gathering with one adds only {result: engine_adds_us | .0f} µs to the
# multiplication. `parallel.overlap=auto`, the default, uses them within a node. On two H100s this shortens a step of DiT-XL/2
# with sequence parallelism by {result: dit_saved | .0%}, compared with NCCL. On four H200s that step takes
# {result: dit_longer | .0%} longer than without sequence parallelism, and it needs {result: dit_memory | .0%} less memory.
