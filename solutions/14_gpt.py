# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 14 · GPT, the Megatron way
#
# A language model is the transformer that you know, with a vocabulary at both ends. The vocabulary is what is new: its logits
# are the largest tensor of training. You compute a loss that never holds all of them, and split the vocabulary over GPUs as
# Megatron-LM does. Then you explain a published grid of data × tensor × pipeline parallelism by counting bytes. Last, you
# train a small GPT on Python code and read the files that store its tokens.
#
# **What you will learn**
#
# - how to compute the loss in chunks, and how to split embedding and loss over a tensor-parallel group;
# - how to predict which combination of data, tensor and pipeline parallelism is fast, from the bytes it sends;
# - how text becomes tokens, files, samples and a trained model, and why a key-value cache makes writing fast.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 3 hours |
# | computing | 2 minutes on two cores, half of it in checks |
# | you write | a loss in chunks (12 lines), a cut embedding (6) and its loss (10), a reader (7 and 3); optional: a writer (35) |
# | you measure | bytes of logits, bytes sent for each token, a key-value cache; and you explain timings of 8 to 32 GPUs |
#
# You should have done [lesson 10](10_tensor_parallel.ipynb) and [lesson 13](13_memory.ipynb). Part of the grid uses pipelines,
# which [lesson 12](12_pipeline_parallel.ipynb) explains. Work in a copy: *File → Save Notebook As…*, `14_gpt_mine.ipynb`.

# %% numbers=true
from course.bench.results import load, value


def gpt_row(name, field):
    return value("gpt_h200", name, field)


def tflops(file, case, part="rows"):
    return value(file, case, "tflops", part, by="course")


compiled = "bf16, compiled, narrow stream"
chunks, all_logits = f"124M: {compiled}", f"124M: {compiled}, all logits"
saved_gb = gpt_row(all_logits, "memory_gb") - gpt_row(chunks, "memory_gb")
faster_in_chunks = 1 - gpt_row(chunks, "ms") / gpt_row(all_logits, "ms")
mfu_124m, mfu_1b = gpt_row(chunks, "mfu"), gpt_row(f"1.3B: {compiled}", "mfu")

sixteen_samples = tflops("grid_h200", "1x1x1_16_1536x16")
two_samples = tflops("grid_h200", "1x1x1_2_1536x16")
slow_host = tflops("grid_h200", "1x1x1_2_1536x16", "again/rows")
over_two_gpus = tflops("grid_2xh200", "2x1x1_4_1536x16")
layers = "1536x16, layers"
two_gpus_ms = value("grid_2xh200", f"1x2x1_16_{layers}", by="course")
four_gpus_ms = value("grid_4xh200", f"1x4x1_16_{layers}", by="course")
four_sequence_ms = value(
    "grid_4xh200", f"1x4x1_16_{layers}", by="course, sequence parallel")
python_loss = load("gpt_python_cpu")["valid_loss"]["600"]

# %%
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from course.lab.instruments import bytes_sent
from course import config, models, parallel
from course.inference import sample_text
from course.config import schema
from course.training import trainer, verify
from course.data.text import bpe, python_corpus
from course.data import order
from course.data.text.indexed_files import Index
from course.data.text.sequences import Sequences
from course.utils.errors import CourseError
from course.inference.kv_cache_decoding import generate
from course.lab.instruments import background_load
from course.lab.instruments.forward_trace import trace
from course.lab.figures import gpt, who_holds, widgets
from course.lab import notebook as lab
from course.lab.instruments.tensor_memory import MemoryMeter
from course.lab.notebook import check
from course.ranks.notebook_ranks import ranks
from course.parallel import mappings
from course.bench.megatron_grid import CASES

lab.begin("14")

# %% [markdown]
# ## From the ViT to a GPT
#
# The blocks are the same: norm, attention, norm, MLP. The parts around them differ.
#
# | | the ViT of lesson 01 | a GPT |
# |---|---|---|
# | a sample | a state of the weather | a piece of text, as numbers of **tokens** |
# | input layer | a linear map of patches | a **look-up**: row *t* of a matrix for token *t* |
# | attention | all tokens see all | **causal**: a token sees itself and those before it |
# | output layer | a linear map to patches | a linear map to **logits**, one for each token of the vocabulary |
# | loss | relative L2 | **cross-entropy**: −log of the predicted probability of the next token |
# | what one sample teaches | one forecast | a prediction at *every* position |
#
# Input and output layer are both matrices of vocabulary × width, and GPT-2 uses one matrix for both: they are **tied**. With
# causal attention one pass trains all positions at once, because no position sees the token that it must predict.

# %%
lab.show("course.models.gpt.Embed")
lab.show("course.models.gpt.Head")

# %% [markdown]
# (`Head` computes the loss itself during training; the next section explains why.)
#
# > **Predict.** A new model knows nothing. What is its loss with a vocabulary of 512 tokens? And what percentage of the 124
# > million parameters of GPT-2 small is the token embedding, 50,304 rows of 768? (The vocabulary has 50,257 tokens. Unused rows
# > round it up to a multiple of 128, so that eight ranks get equal pieces and tensor cores whole tiles.)

# %%
my_loss = 1.0                    # your predictions
my_percent = 10

# %%
cpu = torch.device("cpu")


def new_model(settings: config.Config) -> nn.Module:
    """The serial model of a configuration, with fresh weights."""
    return parallel.initialize_serial(models.build_model(settings.model),
                                      settings.train.seed, cpu, torch.float32)


def loss_of(model: nn.Module, samples: int) -> float:
    """The mean loss of random tokens."""
    batch = model.prepare(model.example(samples, cpu),
                          torch.zeros((), dtype=torch.int64))
    total, weight = model.loss(model(batch), batch)
    return (total / weight).item()


lab.beside("loss of a new model", my_loss, loss_of(new_model(config.load("gpt-demo")),
                                                   8))
# on the meta device: shapes without memory
small = models.build_model(config.load("gpt-124m").model)
parameters = sum(p.numel() for p in small.parameters())
lab.beside("the embedding's part of GPT 124M", my_percent,
           100 * small.embed.token.weight.numel() / parameters, "%", "counted")

# %% [markdown]
# All 512 tokens are about equally probable, so the loss is log 512 = 6.24. If your training starts much higher, the initial
# weights are too large. So look at the first loss first. Nearly a third of the small GPT is vocabulary; untied it would be
# almost half.
#
# ## What the vocabulary costs
#
# Train GPT 124M on one GPU with 64 samples of 1024 tokens. A block keeps 16 activations of the shape (B, T, D) for its backward
# pass (lesson 13), in 16 bits.
#
# > **Predict.** How many GB does one block keep? How many GB are the logits, (B, T, V) in float32, in which a loss is computed?

# %%
my_block_gb = 1.0                # your predictions
my_logits_gb = 1.0

# %%
c = config.load("gpt-124m").model
lab.beside("a block keeps", my_block_gb, 16 * 64 * c.context * c.dim * 2 / 1e9, "GB",
           "counted")
lab.beside("the logits are", my_logits_gb, gpt.logits_bytes(64, c.context, c.vocab)
           / 1e9, "GB", "counted")

# %% [markdown]
# One tensor of 13 GB, as much as eight of the twelve blocks keep. It does not come alone: autograd keeps the log-softmax and
# creates a gradient of the same size. If a batch that "should fit" runs out of memory, this can be the reason.
#
# > **Question.** A token's loss needs only the logits of that token. So why not compute the loss for some tokens at a time in a
# > loop, and let autograd do the rest?
#
# <details><summary>Answer</summary>
# Autograd keeps the softmax of every turn of the loop for the backward pass. After the loop all of it is in memory again.
# You could recompute each turn (lesson 13), but then you compute the logits twice.
# </details>
#
# There is a better way. The loss is the *end* of the network. The backward pass brings only one number to it: the factor that
# scales the loss. So there is no reason to wait. As soon as a chunk's logits exist, compute their gradient,
#
# $$\frac{\partial\,\text{loss}_t}{\partial\,s_{tv}} = p_{tv} - [v = \text{target}_t], \qquad p = \mathrm{softmax}(s).$$
#
# Two matrix multiplications turn it into the gradients of the features $x$ and of the matrix $W$, where $s = xW^\top$. These are
# small. Then free the chunk's logits. The backward pass only multiplies by that one number.
#
# > **Question.** How many more FLOPs does this need than a loss of all logits at once?
#
# <details><summary>Answer</summary>
# None: the three matrix multiplications have the same sizes, one forward and two backward. They only happen earlier.
# </details>
#
# ## Exercise: a loss in chunks
#
# Write it as an autograd function, as in lesson 13. `x.split(size)` yields pieces of `size` tokens; the last may have fewer. To
# keep it simple, everything has one format and every token counts.
#
# - The loss of a token is minus its target's entry in the `log_softmax` of its logits. Return the **sum** over all tokens.
# - Keep the gradient of `x`, one piece for each chunk, and the gradient of `weight`, a sum over the chunks.
# - In `backward`, `grad` is a scalar.

# %% exercise="loss-in-chunks"
class LossInChunks(Function):
    """The sum of the tokens' cross-entropies, from features and output matrix, `size` tokens at a time.

    `LossInChunks.apply(x, weight, target, size)`: (N, D), (V, D), (N,) -> (). It keeps only the gradients of x and
    of weight for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, size: int) -> Tensor:
        """The loss; also compute the gradients here, chunk by chunk, while the logits are in memory."""
        ### BEGIN SOLUTION
        total, of_x, of_weight = x.new_zeros(()), [], torch.zeros_like(weight)
        for rows, aims in zip(x.split(size), target.split(size), strict=True):
            column = aims[:, None]                                          # (n, 1)
            log = (rows @ weight.T).log_softmax(-1)                         # (n, V)
            total = total - log.gather(-1, column).sum()
            grad = log.exp().scatter_add(-1, column, -torch.ones_like(log[:, :1]))      # (n, V)
            of_x.append(grad @ weight)                                      # (n, D)
            of_weight += grad.T @ rows                                      # (V, D)
        ctx.save_for_backward(torch.cat(of_x), of_weight)
        return total
        ### END SOLUTION

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """The gradients of x and weight, from the gradient of the loss, a scalar."""
        ### BEGIN SOLUTION
        of_x, of_weight = ctx.saved_tensors
        return of_x * grad, of_weight * grad, None, None
        ### END SOLUTION

# %%
check("loss-in-chunks")

# %% [markdown]
# Now measure it with the meter of lesson 13. With 2048 tokens and a vocabulary of 8192, all logits are 67 MB.
#
# > **Predict** the peak, in units of all logits: with PyTorch's loss of all logits at once, and with yours in chunks of 128
# > tokens, a sixteenth.

# %%
my_whole = 2.0                   # your predictions
my_chunked = 0.2

# %%
generator = torch.Generator().manual_seed(0)
x = torch.randn(2048, 64, generator=generator).requires_grad_()
weight = torch.randn(8192, 64, generator=generator).requires_grad_()
target = torch.randint(8192, (2048,), generator=generator)
logits_bytes = 2048 * 8192 * 4


def whole(x: Tensor, weight: Tensor) -> Tensor:
    """The loss of all logits at once."""
    return F.cross_entropy(x @ weight.T, target, reduction="sum")


def peak(loss: Any) -> tuple[float, float]:
    """The peak memory of forward and backward, in units of all logits, and seconds."""
    begin = time.perf_counter()
    with MemoryMeter() as meter:
        loss(x, weight).backward()
    seconds = time.perf_counter() - begin
    x.grad = weight.grad = None
    return meter.peak / logits_bytes, seconds


found = {"all at once": peak(whole)}
found |= {f"chunks of {size}": peak(lambda x, w,
                                    size=size: LossInChunks.apply(x, w, target, size))
          for size in (512, 128, 32)}
lab.beside("all at once", my_whole, found["all at once"][0], "times the logits")
lab.beside("chunks of 128", my_chunked, found["chunks of 128"][0], "times the logits")
for name, (units, seconds) in found.items():
    print(f"{name:15} peak {units * logits_bytes / 1e6:6.1f} MB, "
          f"{1000 * seconds:4.0f} ms")

# %% [markdown]
# **What you should see:** all at once needs three times the logits: the logits, their log-softmax and its gradient. Chunks of
# 128 need less than a third of one: three or four tensors of a chunk's size, and the two gradients. Smaller chunks save little
# more. The time depends on the machine; on a GPU, matrices with few rows use tensor cores badly.
#
# The library uses the same idea and handles more cases. Matmuls run in 16 bits while sums stay in float32, tokens may have no
# weight, and you can replace the cross-entropy. `model.loss_chunk` sets the size, by default 4096 tokens.

# %%
lab.show("course.models.gpt.ChunkedLoss")
lab.show("course.models.gpt.chunk_of_loss")

# %% [markdown]
# The widget compares the logits in memory at one time with what the 12 blocks of GPT 124M keep for the same tokens. The next
# section explains `tp`.
#
# > **Predict, before you move the sliders:** with the vocabulary of Llama 3, 128,256 tokens, what fills the GPU?

# %%
slider = widgets.explore(gpt.explore_logits, vocabulary=[50304, 512, 32000, 128256],
                         batch=[64, 8, 16, 32],
                         tp=[1, 2, 4, 8], chunk=[0, 16384, 4096, 1024],
                         alt="Three bars: the logits of all tokens, the logits in "
                         "memory at one time with your "
                             "choice, and what 12 blocks keep.")

# %% [markdown]
# <details><summary>Answer</summary>
# The logits: 34 GB, where all twelve blocks keep 19. In chunks of 4096 tokens they need 2 GB, and 0.3 GB if eight ranks share
# the vocabulary. For a small model with a large vocabulary, this is often the largest saving.
# </details>
#
# ## A vocabulary over ranks
#
# Tensor parallelism cut the matrices of the blocks. Without further work, every rank would have all of the embedding and the
# head: a third of a small model's parameters, and its largest matrix multiplication. So cut them too. Each rank has `V / tp`
# **rows** of the embedding and, because it is tied, the same columns of the logits.

# %%
print(models.gpt.VOCABULARY_PLAN)

# %% [markdown]
# > **Predict.** The vocabulary has 16 tokens, and there are 4 ranks. Which rank has the row of token 13, and which row is it
# > there?

# %%
my_rank, my_row = 0, 13          # your prediction

# %%
print("rank", 13 // 4, "row", 13 % 4, "- you predicted", my_rank, "and", my_row)

# %%
FOUR = ("gpt-demo", "model.depth=1", "train.global_batch=2", "parallel.tp=4")
four_ranks = ranks(4)(trace, *FOUR)
CUT = {"token": "embed.token.weight", "position": "embed.pos",
       "block 0: up": "blocks.0.mlp.up.weight",
       "block 0: down": "blocks.0.mlp.down.weight", "last norm": "head.norm.weight"}
lab.picture(who_holds.parameters(four_ranks, CUT,
                                 title="weights of a GPT by rank, tp=4"),
            "Four rows of boxes, one for each rank. Each rank has a quarter of the "
            "rows of the token embedding and of up, a quarter of the columns of down, "
            "and the whole of the positions and of the last norm.")

# %% [markdown]
# Every rank gets all tokens. It cannot look up a token whose row is elsewhere, and it does not need to ask for it: it puts
# **zeros** there. Then every rank has a part of a sum, and you know from lesson 10 what to do.
#
# > **Question.** What is the backward pass of that sum, and which rows of a rank's weight get a gradient?
#
# <details><summary>Answer</summary>
# The identity: every rank already has the gradient of all vectors (reduce: all-reduce | identity). The rows of the tokens that
# the rank looked up get it. Where it put zeros, the multiplication by zero stops it.
# </details>
#
# ## Exercise: the embedding
#
# Write two parts. `own(tokens, rows, axis)` returns two tensors with an entry for every token. The first says which of this
# rank's `rows` rows belongs to the token. Use 0, a row that exists, if another rank has the token. The second says whether this
# rank has it. `axis.rank` is this rank's place along the axis, from 0.
#
# `forward` looks up the rows (`F.embedding(row, self.weight)`) and sets the zeros. Then it leaves the region where ranks
# compute parts: `leave_region(x, axis, tokens)` with `self.tokens`, as in lesson 10.

# %% exercise="vocabulary-embedding"
from course.parallel.tensor_parallel.vocabulary import VocabularyEmbedding, own

# %%
check("vocabulary-embedding")

# %% [markdown]
# ## A loss from pieces
#
# After the last block each rank multiplies all tokens with its columns, which gives (B, T, V / tp) logits. The obvious next
# step is to gather them and continue as on one GPU.
#
# > **Predict.** GPT-2's vocabulary, tp=8, logits in 16 bits: how many bytes must each rank send for one **token** so that all
# > ranks have all logits?

# %%
my_bytes_a_token = 1000          # your prediction

# %%
lab.beside("gathered logits, sent by each rank", my_bytes_a_token, 7 * 50304 / 8 * 2,
           "bytes a token", "counted")

# %% [markdown]
# 88 kB a token; an all-reduce between two linears of GPT 124M sends only 2.7 kB. And every rank would then have all logits,
# which you have just learned to avoid. But what does the loss need? With logits $s$ and a target $y$,
#
# $$\text{loss} = \log \sum_v e^{s_v} - s_y = \log \sum_v e^{s_v - m} - (s_y - m).$$
#
# The second form holds for any $m$. If $m$ is the largest logit, nothing overflows. The sum over the vocabulary is the sum over
# ranks of each rank's sum over its columns.
#
# > **Question.** Which numbers must the ranks exchange for each token, and in how many steps? Which of them is a sum, and which
# > is not?
#
# <details><summary>Answer</summary>
# Three. First the largest logit, by an all-reduce with the maximum. Then, relative to it, the sum of exponentials and the
# target's logit. Both are sums over the ranks (only one rank has a nonzero target's logit), so one all-reduce does both.
# </details>
#
# The gradient needs no communication. A rank needs $p_v - [v = y]$ for its own columns, and it has the sum by now.
#
# ## Exercise: cross-entropy from pieces
#
# `losses_and_softmax` gets this rank's columns of the logits. It also gets what `own` returns for each target: its `column`
# here, and whether it is `here`. It returns the loss of each token, the same on all ranks, and the softmax of this rank's
# columns. Convert 16-bit logits to float32 first. `minus_target` turns the softmax into the gradient. Do this in place if you
# can, because nothing here is larger; the check accepts both.
#
# - `dist.all_reduce(x, group=axis.group)` sums in place. With `dist.ReduceOp.MAX` as its second argument it takes the maximum.
# - Do not change the logits: autograd may need them.
# - A chunk's tokens are flat, so one dim is missing: (n, V / tp) and 2 x (n,). Count dims from the end, `-1`.

# %% exercise="vocabulary-loss"
from course.parallel.tensor_parallel.vocabulary import losses_and_softmax, minus_target

# %% [markdown]
# The check compares losses and gradients on 2 ranks, and on 4 ranks in two groups. It uses very large logits and 16-bit
# logits, counts what you send, and trains a GPT.

# %%
check("vocabulary-loss")

# %% [markdown]
# > **Predict.** Now count forward and backward on 2 ranks, with a vocabulary of 4096 in float32. How many bytes does a rank
# > send for a token with your loss, and how many with gathered logits? (An all-reduce over n ranks sends 2·(n − 1)/n of its
# > bytes, an all-gather n − 1 times its piece. What is the backward pass of a gather?)

# %%
my_three = 100.0                 # your predictions, bytes a token
my_gathered = 100.0



# %%
def bytes_a_token(how: str) -> float:
    """Bytes that this rank sends for each of 64 tokens, for the loss and its
    gradient."""
    from course.parallel.tensor_parallel.vocabulary import CrossEntropy

    axis = parallel.build_mesh(config.Parallel(tp=2), parallel.join("cpu")).tp
    target = torch.arange(64)[None] * 61
    mine = torch.randn(1, 64, 4096 // axis.size, requires_grad=True)

    def pieces() -> None:
        CrossEntropy.apply(mine, target, axis).sum().backward()

    def gathered() -> None:
        everything = mappings.gather(mine, 2, axis, 4096)
        loss = F.cross_entropy(everything.flatten(0, 1), target.flatten(),
                               reduction="sum")
        # the gather's backward pass adds up the shares
        (loss / axis.size).backward()

    _, calls = bytes_sent.collectives(pieces if how == "pieces" else gathered)
    return sum(call.sent for call in calls) / 64


lab.beside("three numbers", my_three, ranks(2)(bytes_a_token, "pieces")[0],
           "bytes a token", "counted")
lab.beside("gathered logits", my_gathered, ranks(2)(bytes_a_token, "gathered")[0],
           "bytes a token", "counted")

# %% [markdown]
# **What you should see:** 12 bytes, which do not grow with the vocabulary. Gathered logits need 16,384: an all-gather forward and
# a reduce-scatter backward. (All ranks compute the same loss, so a program could take a slice of the gradient instead and send
# nothing back: 8,192.)
#
# The chunked loss accepts this cross-entropy in place of the serial one. With `tp=8` and chunks of 4096 tokens, a rank holds
# 0.1 of the 13 GB of logits at a time. Does all of this train like a single process? In the next cell, both of your answers
# replace the library's:

# %%
def with_yours() -> list[verify.Gap]:
    """Compare two steps on one process with two on all ranks, which use your four
    objects."""
    with lab.yours(own, VocabularyEmbedding, losses_and_softmax, minus_target):
        return verify.compare(exact)


exact = config.load("gpt-demo", [*verify.DEFAULTS, "model.depth=1",
                                 "model.loss_chunk=48", "parallel.dp=1",
                                 "parallel.tp=2",
                                 "parallel.sp=true", "train.steps=2",
                                 "train.device=cpu"])
assert verify.tell(exact, ranks(2)(with_yours)[0])

# %% [markdown]
# ## The Megatron way
#
# Now you have every piece of Megatron-LM's recipe. It combines three numbers, whose product is the number of GPUs:
#
# - **tp** cuts each matrix, column then row, and the vocabulary. It needs two all-reduces in each block forward and two
#   backward, which nothing hides. Use it within a node.
# - **pp** cuts the blocks into stages. It sends few bytes, and has a bubble of (p − 1) / (m + p − 1) with m micro-batches. Use
#   it between nodes.
# - **dp** cuts the batch. It needs one all-reduce of the gradients in each step, which overlaps the backward pass. Use it for
#   the remaining factor.
#
# OneFlow's engineers published time and memory of Megatron-LM on V100 GPUs of 16 GB. A node has 8 of them, the network
# between nodes 100 Gb/s, and a sample 2048 tokens. A case is named *dp* x *tp* x *pp* _ *global batch* _ *width* x *depth*.
# For example, one GPU with a batch of 2 is `1x1x1_2_1536x16`, which took 464 ms.
#
# ### Eight GPUs
#
# Take the same model on 8 GPUs with a global batch of 16. In **8x1x1** every GPU has the whole model and 2 samples. In
# **1x8x1** every GPU has an eighth of the model and all 16 samples.
#
# > **Predict.** The arithmetic is the same. How many ms does each take? And which of 8x1x1, 4x2x1, 2x4x1, 1x8x1 needs the
# > **least** memory?

# %%
# your predictions, for 8x1x1 and 1x8x1
my_dp_ms, my_tp_ms = 464.0, 464.0
my_least = "1x8x1"

# %%
cases = {case.name: case for case in CASES}
eight = [cases[f"{layout}_16_1536x16"] for layout in ("8x1x1", "4x2x1", "2x4x1",
                                                      "1x8x1")]
lab.beside("8x1x1", my_dp_ms, eight[0].ms, "ms", "recorded")
lab.beside("1x8x1", my_tp_ms, eight[-1].ms, "ms", "recorded")
print("least memory:", min(eight, key=lambda case: case.mib).name, "- you predicted",
      my_least)
one_gpu = cases["1x1x1_2_1536x16"]
lab.picture(gpt.grid([one_gpu, *eight], "The same work for a GPU: V100, 8 in a node"),
            "Five cases in three panels, milliseconds, MiB and TFLOP/s of a GPU: "
            + "; ".join(f"{case.name} {case.ms}, {case.mib}, {gpt.tflops(case):.0f}"
                        for case in (one_gpu, *eight)))

# %% [markdown]
# Data parallelism is nearly free, and tensor parallelism is not. Count what a GPU sends in a step, in 16 bits.

# %%
def sent(tp: int, dp: int, batch: int, width: int, depth: int) -> tuple[float, float]:
    """GB that a GPU sends in a step: (activations over tp, gradients over dp)."""
    activation = batch / dp * 2048 * width * 2
    parameters = (12 * depth * width**2 + 50304 * width) / tp
    return 4 * depth * activation * 2 * (tp
                                         - 1) / tp / 1e9, parameters * 2 * 2 * (
                                             dp - 1) / dp / 1e9


for case in eight:
    dp, tp, _ = case.layout
    activations, gradients = sent(tp, dp, 16, 1536, 16)
    print(f"{case.name}: {activations:5.2f} GB of activations, {gradients:5.2f} GB of "
          f"gradients, {case.ms} ms")

# GB in a millisecond
rate = sent(1, 8, 16, 1536, 16)[1] / (eight[0].ms - one_gpu.ms)
wait = sent(8, 1, 16, 1536, 16)[0] / rate
print(f"If nothing hid the gradients of 8x1x1, the links carried {1e3 * rate:.0f} "
      f"GB/s.")
print(f"At that rate the activations of 1x8x1 take {wait:.0f} ms, with recomputation "
      f"{1.5 * wait:.0f} ms.")
print(f"1x8x1 took {eight[-1].ms - one_gpu.ms} ms more than one GPU.")

# %% [markdown]
# **What you should see:** 1x8x1 sends six times as many bytes as 8x1x1, and the matrix multiplications wait for them. This
# explains most of its extra time. Smaller matrices explain the rest.
#
# > **Question.** 4x2x1 sends a third of the activations that 2x4x1 sends, and is slower. What could be different about *two*
# > GPUs of such a node?
#
# <details><summary>Answer</summary>
# Probably their link. In typical nodes of that time each V100 had six NVLinks to four other GPUs: one or two for each pair. A
# ring over all GPUs uses them all; a pair uses only its own. Where a switch joins all GPUs, as in later nodes, a pair has the
# full rate.
# </details>
#
# Why is memory least in the *middle*? Count two kinds of bytes (lesson 13). Parameters need 18 bytes each in Megatron-LM, and tp
# divides them. The rest belongs to samples, and with a larger tp a GPU has more samples.

# %%
parameters = 12 * 16 * 1536**2 + 50304 * 1536
for case in eight:
    dp, tp, _ = case.layout
    of_parameters = 18 * parameters / tp / 1e9
    rest = case.mib * 2**20 / 1e9 - of_parameters
    print(f"{case.name}: {of_parameters:4.1f} GB of parameters, the rest for "
          f"{16 // dp:2} samples: {rest:4.1f} GB, "
          f"{rest / (16 // dp):.2f} GB each")

# %% [markdown]
# With eight times as many ranks, a sample's share shrinks by a factor of four, not eight. Norms, residual sums and their inputs
# are whole on every rank of tp (lesson 10). Sequence parallelism, which cuts them, came later.
#
# > **Question.** Did they recompute activations? A block that keeps everything, including the scores of attention, keeps
# > 34·T·D + 5·heads·T² bytes for each sample ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), eq. 2). Here there
# > are 16 heads.
#
# <details><summary>Answer</summary>
# That formula gives 442 MB for a block, and 7 GB for a sample with 16 blocks. 8x1x1 has 3 GB for a sample. So yes.
# </details>
#
# ### Beyond a node
#
# **1x16x1** runs a model twice as wide, 3072x16: four times the FLOPs of the blocks on twice the GPUs.
#
# > **Predict.** You saw what 1x8x1 took at width 1536. How many ms does 1x16x1 take at width 3072? Its sixteen GPUs are in two
# > nodes.

# %%
my_cliff_ms = 1400.0             # your prediction

# %%
lab.beside("1x16x1_16_3072x16", my_cliff_ms, cases["1x16x1_16_3072x16"].ms, "ms",
           "recorded")
activations, _ = sent(16, 1, 16, 3072, 16)
print(f"a GPU sends {activations:.1f} GB; one of each node sends them over the "
      f"network: {activations / 12.5:.1f} s at 100 Gb/s")
wide = [case for case in CASES if case.layout[1] >= 8 and case.layout[2] == 1]
lab.picture(gpt.grid(wide),
            "Five cases, TFLOP/s of a GPU, lowest where tp crosses nodes: "
            + ", ".join(f"{case.name} {gpt.tflops(case):.0f}" for case in wide))

# %% [markdown]
# A cliff. A ring over two nodes is only as fast as the network between them, and all 64 all-reduces cross it. Even at full rate
# they would take 2 s, or 3 s with recomputation, and nobody reaches the full rate. Compare 4x8x1 on *32* GPUs, with tp within a
# node and dp between nodes: it loses a third of its speed, not four fifths. This is the oldest rule of the trade: **tp never
# leaves the node.**
#
# ### Pipelines
#
# Now run 32 GPUs with batches of 512, in micro-batches.
#
# > **Predict** the bubble of 8x1x4_512, in percent, with micro-batches of 2. How many micro-batches has each pipeline? For the
# > model 2304x24, which is the fastest of 1x8x4 (micro-batch 16), 2x4x4 (8) and 2x8x2 (8)?

# %%
my_bubble = 25.0                 # your predictions, in percent
my_fastest = "1x8x4"

# %%
pipelines = [case for case in CASES if case.layout[2] > 1]
bubbles = {}
for case in pipelines:
    dp, tp, pp = case.layout
    micros = 512 // dp // case.micro_batch
    bubbles[case.name] = 100 * (pp - 1) / (micros + pp - 1)
    print(f"{case.name}: {micros} micro-batches, bubble {bubbles[case.name]:.1f}%, "
          f"{case.ms / 1e3:.1f} s, "
          f"{gpt.tflops(case):.1f} TFLOP/s")
lab.beside("bubble of 8x1x4", my_bubble, bubbles["8x1x4_512_1536x16"], "%", "counted")
print("fastest:", min(pipelines[1:], key=lambda case: case.ms).name, "- you predicted",
      my_fastest)

# %% [markdown]
# Each has 32 micro-batches, so the bubbles are small. 2x4x4 is the fastest of its model, although its bubble is not the smallest.
# With tp over 4 ranks and half of the samples, it sends 43% of the bytes of the other two. 1x8x4 and 2x8x2 send equally many
# bytes over tp, but 1x8x4 takes much longer.
#
# > **Question.** A stage of 1x8x4 is one node; a stage of 2x8x2 is two. Suppose that all 8 ranks of a tensor-parallel group
# > send the activation of a micro-batch to the next node, and each sends all of it. How many GB does a *node* in the middle
# > send in a step? (A micro-batch of 16 samples has 16 · 2048 · 2304 · 2 bytes, and gradients go back.)
#
# <details><summary>Answer</summary>
# 151 MB from 8 GPUs, 32 times, in two directions: 77 GB, or 6.2 s at 100 Gb/s. In 2x8x2 micro-batches are half as large and no
# stage is in the middle: 19 GB, or 1.5 s. These differ by 4.6 s, and the printed times differ by somewhat more. So it seems that
# they do. All eight copies are equal: each rank could send an eighth, and the other side could gather them over NVLink
# (<a href="https://arxiv.org/abs/2104.04473">Narayanan et al. 2021</a>, section 4.1).
# </details>

# %% [markdown]
# The widget shows the whole table, in groups.
#
# > **Question.** Choose *data parallel*. From 8 to 16 GPUs the time jumps. What happens from 16 to 32, and why? Count: a GPU
# > sends 2.0 GB of gradients at 100 Gb/s.

# %%
grid = widgets.explore(gpt.explore_cases, cases=list(gpt.GROUPS),
                       alt="For each case of the source: milliseconds of an "
                       "iteration, MiB and TFLOP/s of a GPU. The "
                           "color shows what is cut.")

# %% [markdown]
# <details><summary>Answer</summary>
# From 8 to 16 GPUs the ring crosses the network: 2.0 GB at 12.5 GB/s take 160 ms, which nothing hides. From 16 to 32 hardly
# anything changes: in a ring each rank sends 2·(n − 1)/n times its bytes, for any n (lesson 07).
# </details>
#
# ## Text as numbers
#
# Any text is bytes, so 256 tokens would do. **Byte-pair encoding** makes longer tokens. In a sample of text it finds the most
# frequent pair of neighboring tokens and makes it a new token. It repeats this until the vocabulary is full. `course data
# tokens` does this for a corpus that every machine has: the source code of Python's standard library. GPT-2 has 50,257
# tokens, and the preset `gpt-python` 4096. To train within seconds, take 512.

# %%
data = Path("data/python-512")
python_corpus.make(schema.build(python_corpus.PythonCorpus,
                                {"path": str(data), "vocab": 512}, "tokens"))
tokenizer = bpe.load(data / "tokenizer.json")
for text in ("    def read(self, size=-1):", "xylophone"):
    print([tokenizer.decode([token]) for token in tokenizer.encode(text).ids])

# %% [markdown]
# What is frequent in Python is one token: the indentation, `self`, even `):`. A rare word is spelled out. Every document ends
# with a special token, `<|endoftext|>`.
#
# ## Samples across documents
#
# Documents have different lengths, but a GPU wants samples of one length. Padding short documents wastes computation, and
# cutting long ones wastes text. So all documents are laid end to end and cut every `context` tokens. A sample has one token more:
# the target of its last token, which is also the first token of the next sample.

# %%
lab.picture(gpt.packed_samples([7, 4, 13, 2, 9], 8),
            "A row of 35 boxes, with one color for each of five documents. Below, "
            "four samples of 8 boxes and a hatched ninth box, the first of the next "
            "sample. Samples begin and end inside documents.")

# %%
counts = json.loads((data / "meta.json").read_text())["splits"]["train"]
print(counts)

# %% [markdown]
# > **Predict.** How many samples of 128 tokens does this training split give?

# %%
my_samples = 471                 # your prediction

# %%
samples = Sequences(str(data), "train", 128, 512)
lab.beside("samples", my_samples, len(samples), how="counted")

# %% [markdown]
# The number of tokens less one, divided by 128. The model never has to predict the very first token, nor the last few (fewer
# than 128) after the last whole sample.
#
# > **Question.** A sample may hold the end of one file and the beginning of another. What do tokens of the second file see of
# > the first? Is that a mistake?
#
# <details><summary>Answer</summary>
# All of it: causal attention knows no documents. The model learns that text before the special token does not matter. GPT-3 does
# the same (<a href="https://arxiv.org/abs/2005.14165">Brown et al. 2020</a>, appendix B), and so does Megatron-LM. Its option
# <code>--reset-attention-mask</code> forbids it, with a more expensive attention.
# </details>
#
# **The epoch's shuffle.** Samples are drawn in a random order. This order must not depend on the layout. Otherwise eight ranks of
# dp and eight of tp would train on different batches, and you could not compare them (lesson 03).

# %%
for dp in (1, 2, 4):
    parts = [next(order.train_batches(0, len(samples), 8, dp, rank, 0))
             for rank in range(dp)]
    print(f"dp={dp}:", "   ".join(" ".join(map(str, part)) for part in parts))

# %% [markdown]
# The same eight samples, dealt in slices. The order is a function of seed and epoch, and one number says where a run is.
#
# ## Train
#
# Train a GPT of half a million parameters, 2 blocks of width 128, for 200 steps of 16 samples. That is a tenth of an epoch.
#
# > **Predict.** It begins at log 512 = 6.24. What will be its final loss on text that it has never seen?

# %%
my_final_loss = 5.0              # your prediction

# %%
background_load.report()
name = time.strftime("lesson14-%Y%m%d-%H%M%S")
settings = config.load("gpt-python", [f"data.path={data}", "model.vocab=512",
                                      "model.dim=128", "model.depth=2", "model.heads=4",
                                      "optim.lr=4e-3", "optim.warmup=20",
                                      "train.steps=200", "train.eval_every=0",
                                      "log.every=50",
                                      "train.device=cpu", f"log.name={name}"])
run = trainer.main(settings)
record = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
lab.beside("\nloss of the validation split", my_final_loss, record["valid_loss"])

# %% [markdown]
# > **Question.** The same library with a vocabulary of 4096 tokens, `course train gpt-python` (three minutes), ends at
# > {result: python_loss | .2f}, which is *more*. Is it the worse model?
#
# <details><summary>Answer</summary>
# You cannot tell: its tokens are longer, and the loss is the mean over tokens. Divide by the bytes of a token.
# </details>

# %%
valid = json.loads((data / "meta.json").read_text())["splits"]["valid"]
each = valid["bytes"] / valid["tokens"]
print(f"vocabulary  512: {each:.2f} bytes a token, "
      f"{record['valid_loss'] / each / math.log(2):.2f} bits a byte")
recorded_loss = lab.results("gpt_python_cpu")["valid_loss"]["600"]
print(f"vocabulary 4096: 3.62 bytes a token, {recorded_loss / 3.62 / math.log(2):.2f} "
      f"bits a byte")

# %% [markdown]
# Never compare losses of different tokenizers. Compare bits per byte: the size of the text if the model compressed it.
#
# ## Let it write
#
# To write, draw the next token from the probabilities, append it, and repeat: first with new weights, then with trained ones.

# %%
prompt = torch.tensor([tokenizer.encode("def").ids])
untrained = new_model(settings)
print(tokenizer.decode(generate(untrained, prompt, 40, 0.7)[0].tolist()))

# %%
texts = sample_text.sample_run(run, "def", count=100, temperature=0.7, top_k=0, seed=1,
                               samples=2)

# %% [markdown]
# **What you should see:** nonsense before training. Afterwards you see indentation, brackets that often close, `self.` and
# strings, but no meaning. GPT-2 is the same code with other numbers.
#
# ## The key-value cache
#
# To draw token 100, the model computed 99 positions. To draw token 101 it computes 100, of which 99 are the same as before. In
# a causal model a token's keys and values never change when others follow. So keep them, and compute one position.
#
# > **Predict.** The prompt has 1 token, and the model writes 100 more. How many positions does it compute without the cache, and
# > with it? How many times as fast is it with the cache?

# %%
my_without, my_with = 1000, 100  # your predictions
my_speedup = 10.0

# %%
model = new_model(settings)
positions: list[int] = []
hook = model.embed.register_forward_hook(lambda module, given,
                                         out: positions.append(out.shape[1]))


def write(cache: bool) -> tuple[int, float]:
    """Positions that went through the model for 100 tokens, and seconds."""
    positions.clear()
    begin = time.perf_counter()
    generate(model, prompt[:, :1], 100, 0.7, cache=cache)
    return sum(positions), time.perf_counter() - begin


write(True)                                          # the first time is slower
(without, slow), (with_cache, fast) = write(False), write(True)
hook.remove()
lab.beside("positions without a cache", my_without, without, how="counted")
lab.beside("positions with it", my_with, with_cache, how="counted")
lab.beside("times as fast", my_speedup, slow / fast)

# %% [markdown]
# 5050 = 1 + 2 + … + 100 positions against 100. Yet writing is only two or three times as fast. In such a small model, a pass
# takes as long as starting its operators, for one position or for fifty. With 7 billion parameters one position at a time meets
# another limit: every weight is read from memory for only two FLOPs (lesson 00's roofline). So servers write many texts at
# once.
#
# > **Predict.** How many MB is the cache of GPT 7B (32 blocks of width 4096, 16 bits) for one text of 2048 tokens?

# %%
my_cache_mb = 10                 # your prediction

# %%
big = config.load("gpt-7b").model
lab.beside("cache", my_cache_mb, 2 * big.depth * big.dim * 2 * big.context / 1e6, "MB",
           "counted")

# %% [markdown]
# Each block keeps two vectors of width `dim` for each token: half a megabyte a token in all. 100 texts of 2048 tokens would fill
# three quarters of an H200. Hence **grouped heads** (`model.kv_heads`): several query heads share one head of keys and values.
# Llama 3 has 8 for 32 heads, so its cache is a quarter as large.
#
# ## A Llama by configuration
#
# Since GPT-2, the field has changed five things about the block and kept the rest:
#
# | setting | GPT-2 | Llama | why |
# |---|---|---|---|
# | `model.norm` | `layer` | `rms` | no mean to subtract, nothing lost |
# | `model.mlp` | `gelu` | `swiglu` | half of the hidden units gate the other half; better for the same FLOPs |
# | `model.position` | `learned` | `rotary` | the position rotates queries and keys, so a score knows the distance |
# | `model.kv_heads` | as many as heads | fewer: 8 of 32 in Llama 3 | a smaller cache |
# | `model.bias`, `model.tied` | true | false | |
#
# (RMS norm: arXiv:1910.07467. SwiGLU: arXiv:2002.05202. Rotary positions: arXiv:2104.09864. Grouped heads: arXiv:2305.13245.)
# All of them are settings here; layouts, loss and files stay the same.
#
# > **Predict.** Llama 2 7B has 32 blocks of width 4096, 32 heads, an MLP of width 11008 with three matrices, and 32,000 tokens,
# > untied. How many parameters is that? Attention has four matrices of 4096².

# %%
my_billions = 7.0                # your prediction, in billions

# %%
llama = ["model.norm=rms", "model.mlp=swiglu", "model.position=rotary",
         "model.bias=false", "model.tied=false"]
two = config.load("gpt-7b", [*llama, "model.vocab=32000", "model.dim=4096",
                             "model.depth=32", "model.heads=32",
                             "model.mlp_width=11008", "model.context=4096"])
three = config.load("gpt-7b", [*llama, "model.vocab=128256", "model.dim=4096",
                               "model.depth=32", "model.heads=32",
                               "model.kv_heads=8", "model.mlp_width=14336",
                               "model.context=8192", "model.rope_theta=5e5"])
for name, settings in {"Llama 2 7B": two, "Llama 3 8B": three}.items():
    count = sum(p.numel() for p in models.build_model(settings.model).parameters())
    print(f"{name}: {count:,} parameters")
    if settings is two:
        lab.beside("billions", my_billions, count / 1e9, how="counted")

# %% [markdown]
# 6,738,415,616 and 8,030,261,248: exactly the published models. `course.convert.huggingface.read(folder)` loads a checkpoint from
# Hugging Face. Tests compare the logits with those of `transformers` in float64.
#
# ## Token files
#
# Where do these tokens come from? A corpus of billions of tokens does not fit into memory, and should not be a million files.
# Most of the field uses Megatron-LM's answer. **One** file, `.bin`, has all tokens end to end, and a second one, `.idx`, says
# where everything is. Both are memory-mapped: the operating system reads only what a program touches.
#
# | `.idx` | | |
# |---|---|---|
# | magic | 9 bytes | `MMIDIDX`, two zeros |
# | version | uint64 | 1 |
# | code | uint8 | the number format of the `.bin`: 8 is uint16, 4 is int32 |
# | S | uint64 | how many **sequences** |
# | D | uint64 | the length of *documents*: one more than there are **documents** |
# | lengths | S × int32 | tokens of each sequence |
# | pointers | S × int64 | the **byte** of the `.bin` at which each begins |
# | documents | D × int64 | the first sequence of each document, and S at the end |
#
# A document may have several sequences (paragraphs, for example), so the file says which belong together. Everything is
# little-endian, without gaps between the parts.
#
# > **Predict.** How many bytes does the `.idx` of the training split have? You saw its number of documents above, and each
# > document has one sequence.

# %%
my_idx_bytes = 1000              # your prediction

# %%
lab.beside("bytes of train.idx", my_idx_bytes, (data / "train.idx").stat().st_size,
           "bytes")

# %% [markdown]
# A header of 34 bytes, 20 for each document, and 8 at the end. (Why int32 for lengths and int64 for pointers? No sequence has two
# billion tokens, but a file soon has two billion bytes.)
#
# ## Exercise: read the index
#
# - `np.memmap(path, np.uint8, "r")` returns the bytes of the file as an array, say `raw`, without reading them yet.
# - `HEADER.unpack_from(raw.data)` returns the five values of the header.
# - `np.frombuffer(raw, "<i4", count, offset)` returns `count` little-endian int32 numbers, from the byte `offset` on, without a
#   copy.
# - `DTYPES[code]` is the name of a number format.
#
# Return `Index(dtype, lengths, pointers, documents)`, with a little-endian dtype. A file may be truncated, by a full disk or an
# interrupted copy. So call `check_header(path)` before you use any number. It raises a `CourseError` for a file that is not a
# complete index.

# %% exercise="read-index"
from course.data.text.indexed_files import read_index

# %%
check("read-index")

# %% [markdown]
# Your reader reports a damaged file with a clear error message. The check tries six kinds of damage; here are three.

# %%
good = (data / "train.idx").read_bytes()
folder = Path("runs/lesson-14")
folder.mkdir(parents=True, exist_ok=True)
for what, raw in {"cut off": good[:-100], "a zip file": b"PK" + good[2:],
                  "fractions": good[:17] + b"\6" + good[18:]}.items():
    (folder / "damaged.idx").write_bytes(raw)
    try:
        read_index(folder / "damaged.idx")
    except CourseError as error:
        print(f"{what}: {error}\n")

# %% [markdown]
# ## Exercise: one document
#
# `tokens` is the whole `.bin` as an array of numbers. Return the tokens of document `i`. A document may have several sequences,
# which lie one after the other, or none.

# %% exercise="one-document"
def document(index: Index, tokens: np.ndarray, i: int) -> np.ndarray:
    """The tokens of document i, (n,). `tokens` is the whole .bin."""
    ### BEGIN SOLUTION
    first, last = index.documents[i:i + 2]
    start = index.pointers[first] // index.dtype.itemsize if first < last else 0
    return tokens[start:start + index.lengths[first:last].sum()]
    ### END SOLUTION

# %%
check("one-document")

# %%
index = read_index(data / "train.idx")
everything = np.memmap(data / "train.bin", index.dtype, "r")
print(tokenizer.decode(document(index, everything, 7)[:80].tolist()))

# %% [markdown]
# ## Open task: write over ranks
#
# *Optional, about 50 minutes. Nothing later needs it.* A model that is cut over ranks should also write. Each rank has its rows
# of the vocabulary, its heads and its hidden units, and the cache of its own heads. Draw each token without gathering the
# logits. Our solution has about 35 lines.
#
# This is what one process does. The model is small and has no biases. `gumbel` is a function of seed, position, sample and
# column, as all randomness in this course is a function of its place:

# %%
from course.lab.exercises.lesson14_open_task import DEPTH, gumbel, rms  # noqa: F401

lab.show("course.lab.exercises.lesson14_open_task.write_alone")
lab.show("course.lab.exercises.lesson14_open_task.gumbel")
print(gumbel(7, 12, 2, torch.tensor([0, 1, 500])))
print(gumbel(7, 12, 2, torch.tensor([500])), "is its last column")

# %% [markdown]
# **Contract**
#
# - `Writer(weights, most, words, temperature, seed, axis)` gets the weights of `write_alone` under the same names. This rank
#   has its part of some: rows of `token`, heads of `qkv` and `out`, hidden units of `up` and `down`. The others are whole.
#   `axis` has `size`, `rank`, `ranks` and `group`, as in lesson 10.
# - `writer.next(tokens)` takes the next tokens of each text, (B, t): a prompt, a piece of a prompt, or one token. It returns the
#   token that follows, (B,), the same on all ranks.
# - These are the tokens of `write_alone`, on any number of ranks. A text has at most `most` tokens.
# - Nothing needs gradients. `total` below is part of our answer. Yours does not need it.
#
# **Levels.** Each level counts by itself, once the first is reached:
#
# | level | what the check counts |
# |---|---|
# | correct | the tokens, on two ranks and on four, and along one axis of two |
# | byte budget | at most 64 bytes from each rank per token of a text, besides the sums over ranks of (B, t, D) |
# | memory budget | for one token: no new tensor larger than (B, V / n), and none that grows |
# | | for a prompt: no new tensor larger than this rank's scores, its cache, or (B, t, 3 D) |
# | | between calls: only the cache of this rank's heads |
#
# Start with correct. `lab.hint("write-text")` opens the first of three hints, and each further call opens the next one.

# %% exercise="write-text"
from course.lab.exercises.lesson14_open_task import Writer  # noqa: F401

# %%
check("write-text")

# %% [markdown]
# ## Summary
#
# - The logits are the largest tensor of training. A loss in chunks computes their gradient at once and frees them.
# - A vocabulary over ranks needs zeros and one sum to look up, three numbers a token for the loss, none for the gradient.
# - Use tp within the node, pp between nodes, dp for the rest. The bytes explain the grid.
# - All documents lie end to end in one file, and samples cross them in an order that does not depend on the layout.
# - Compare bits per byte, not losses of different tokenizers. A key-value cache turns n² positions into n.
#
# ## Questions
#
# 1. Your vocabulary grows from 50,000 to 250,000 tokens. What changes in memory, in FLOPs and in bytes sent?
# 2. You have 64 GPUs in 8 nodes and a model that fits into one node. Which dp, tp and pp do you try first?
# 3. A colleague reports a loss of 2.1 and you have 2.4. What do you ask first?
#
# **Check your work from a terminal.** Save the notebook, then run `course check notebooks/14_gpt_mine.ipynb`. Next:
# [lesson 15](15_dit_fp8.ipynb) draws images from noise, in eight bits.
#
# ## Appendix (optional): on GPUs
#
# ### The loss in chunks
#
# GPT 124M trains on one H200 with 64 samples of 1024 tokens.
#
# > **Predict.** By how many GB do chunks of 4096 tokens lower the peak? Here the logits are computed in 16 bits.

# %%
my_gb_saved = 13.2               # your prediction

# %%
recorded_rows = {row["configuration"]: row for row in lab.results("gpt_h200")["rows"]}
lab.recorded("gpt_h200", {name: {"tokens/s": row["tokens_per_s"], "ms": row["ms"],
                                 "GB": row["memory_gb"],
                                 "MFU, %": 100 * row["mfu"]}
                          for name, row in recorded_rows.items()},
             why="GPTs on one H200")
chunked = "124M: bf16, compiled, narrow stream"
saved = recorded_rows[f"{chunked}, all "
                      f"logits"]["memory_gb"] - recorded_rows[chunked]["memory_gb"]
lab.beside("GB that chunks save", my_gb_saved, saved, "GB", "recorded")

# %% [markdown]
# Chunks save {result: saved_gb | .1f} GB: all logits and their gradient, 6.6 GB each in 16 bits, less one chunk. The CPU above
# needed three such tensors, but here the compiler fuses the softmax. Chunks are also {result: faster_in_chunks | .0%}
# *faster*: a Triton kernel (`course/ops/cross_entropy_triton.py`) reads a chunk's logits once and writes the gradient in
# their place. The larger the model, the better it uses the GPU: {result: mfu_124m | .0%} of the peak with 124M,
# {result: mfu_1b | .0%} with 1.3B. Matrix multiplications grow with the square of the width, the rest with the width.
#
# ### The grid on H200s
#
# From V100 to H200, matrix multiplications became eight times as fast and NVLink three times. Two cases stand for 1x8x1 and
# 8x1x1: two H200s along tp with micro-batches of 16 samples, or along dp with 2.
#
# > **Predict** how much longer each takes than one H200 with the same micro-batch and a similar host.

# %%
# your predictions, for two H200s over one
my_tp_percent, my_dp_percent = 44.0, 4.0

# %%
both = lab.results("grid_2xh200")["rows"]
one, two = ({row["case"]: row["tflops"] for row in found if "tflops" in row}
            for found in (lab.results("grid_h200")["again"]["rows"], both))
for what, predicted, alone, cut in (("tp", my_tp_percent, "1x1x1_16_1536x16",
                                     "1x2x1_16_1536x16"),
                                    ("dp", my_dp_percent, "1x1x1_2_1536x16",
                                     "2x1x1_4_1536x16")):
    lab.beside(f"{what} over two H200s", predicted, 100 * (one[alone] / two[cut] - 1),
               "% longer than one", "recorded")
rows = [row for row in both if not row["case"].endswith("layers")]
lab.recorded("grid_2xh200", gpt.table(rows), why="The grid on two H200s, per GPU")
lab.picture(gpt.measured(rows), f"TFLOP/s of a GPU by case: "
            f"{gpt.describe_measured(rows)}")

# %% [markdown]
# > **Question.** The dp case reaches far *fewer* FLOP/s than the tp case, although tp communicates much more. Why?
#
# <details><summary>Answer</summary>
# Its micro-batch. With 2 samples instead of 16, one H200 falls from {result: sixteen_samples | .0f} to
# {result: two_samples | .0f} TFLOP/s: it is often done before the host launches the next kernel. With the slower host
# of the two GPUs it reaches only {result: slow_host | .0f}, and data parallelism lowers that to {result: over_two_gpus | .0f}.
# A V100 hid these launches behind slower work. A faster GPU does not make a small step faster. Larger micro-batches, CUDA
# graphs (lesson 06) and fewer launches do.
# </details>
#
# > **Predict.** On two GPUs, the layers of 1x2x1_16_1536x16 alone took {result: two_gpus_ms | .0f} ms. How many ms do four GPUs
# > take for the same 16 samples?

# %%
my_layers_ms = 62.0              # your prediction

# %%
four = [row for row in lab.results("grid_4xh200")["rows"]
        if row["case"].endswith("layers")]
lab.recorded("grid_4xh200", gpt.table(four), why="The layers of one micro-batch "
             "alone, on four H200s")
measured = next(row["ms"] for row in four
                if row["case"] == "1x4x1_16_1536x16, layers" and row["by"] == "course")
lab.beside("layers on four H200s", my_layers_ms, measured, "ms", "recorded")

# %% [markdown]
# **What you should see:** more than half. Four GPUs share the multiplications, but each rank's all-reduces grow from 1 to 1.5
# times the tensor (lesson 07). With sequence parallelism these narrow layers need {result: four_sequence_ms | .0f} ms instead of
# {result: four_gpus_ms | .0f}: it starts twice as many collectives, and the GPU waits for the host. At width 3072 it is slightly
# faster, because wide layers hide the starts.
