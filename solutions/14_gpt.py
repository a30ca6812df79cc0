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
# A language model is the transformer that you know, with a vocabulary at both ends. The vocabulary is what is new: its
# logits are the largest tensors of training. In this lesson you compute a loss that never has all of them, cut the
# vocabulary over GPUs as Megatron-LM does, read the files in which the field keeps its tokens, and train a small GPT that
# writes Python, or nearly. Then you put all axes together, in the grid of data × tensor × pipeline parallelism of a published
# reproduction, and explain its surprises by counting bytes.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 3 hours |
# | computing | 2 minutes on two cores, half of it in checks |
# | you write | a loss in chunks (12 lines), the vocabulary's embedding (6) and its loss (10), a reader of token files (7 and 3) |
# | you measure | bytes of logits, bytes exchanged a token, a key-value cache; and read times of 8 to 32 GPUs |
#
# You should have done [lesson 10](10_tensor_parallel.ipynb) and [lesson 13](13_memory.ipynb); a part of the grid at the end is
# pipelines, which [lesson 12](12_pipeline_parallel.ipynb) explains. Work in a copy: *File → Save Notebook As…*,
# `14_gpt_mine.ipynb`.

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
from course.lab.figures import gpt, widgets
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
# The blocks are the same: norm, attention, norm, MLP. What differs lies around them.
#
# | | the ViT of lesson 01 | a GPT |
# |---|---|---|
# | a sample | a state of the weather | a piece of text, as numbers of **tokens** |
# | entrance | a linear map of patches | a **look-up**: row *t* of a matrix for token *t* |
# | attention | all tokens see all | **causal**: a token sees those before it, and itself |
# | exit | a linear map to patches | a linear map to **logits**, one for each token of the vocabulary |
# | loss | relative L2 | **cross-entropy**: −log of the probability that the next token got |
# | what one sample teaches | one forecast | a prediction at *every* position |
#
# Entrance and exit are both matrices of vocabulary × width, and GPT-2 uses one for both: they are **tied**. Causal attention is
# what makes one pass train all positions at once, since no position can see the token that it has to predict.

# %%
lab.show("course.models.gpt.Embed")
lab.show("course.models.gpt.Head")

# %% [markdown]
# (`Head` computes the loss itself while training: that is the next section.)
#
# > **Predict.** A model with fresh weights knows nothing. What is its loss, with a vocabulary of 512 tokens? And what
# > share of the 124 million parameters of GPT-2 small is the token embedding, 50,304 rows of 768? (Its vocabulary has
# > 50,257 tokens. Unused rows round it up to a multiple of 128, so that eight ranks get equal pieces, and tensor cores
# > whole tiles.)

# %%
my_loss = 1.0                    # your predictions
my_percent = 10

# %%
cpu = torch.device("cpu")


def new_model(settings: config.Config) -> nn.Module:
    """The serial model of a configuration, with fresh weights."""
    return parallel.initialize_serial(models.build_model(settings.model), settings.train.seed, cpu, torch.float32)


def loss_of(model: nn.Module, samples: int) -> float:
    """The mean loss of random tokens."""
    batch = model.prepare(model.example(samples, cpu), torch.zeros((), dtype=torch.int64))
    total, weight = model.loss(model(batch), batch)
    return (total / weight).item()


lab.beside("loss of a new model", my_loss, loss_of(new_model(config.load("gpt-demo")), 8))
small = models.build_model(config.load("gpt-124m").model)               # on the meta device: shapes without memory
parameters = sum(p.numel() for p in small.parameters())
lab.beside("the embedding's part of GPT 124M", my_percent, 100 * small.embed.token.weight.numel() / parameters, "%", "counted")

# %% [markdown]
# All 512 tokens are about equally probable, so the loss is log 512 = 6.24. Where a training begins much higher, its weights start
# too large: look at the first loss before you look at anything else. And nearly a third of the small GPT is vocabulary. Untied
# it would be almost half.
#
# ## What the vocabulary costs
#
# GPT 124M, a batch of 64 samples of 1024 tokens on one GPU. A block keeps 16 activations of the shape (B, T, D) for its backward
# pass (lesson 13), in 16 bits.
#
# > **Predict.** How many GB is that for one block? How many GB are the logits, (B, T, V) in float32, in which a loss is
# > computed?

# %%
my_block_gb = 1.0                # your predictions
my_logits_gb = 1.0

# %%
c = config.load("gpt-124m").model
lab.beside("a block keeps", my_block_gb, 16 * 64 * c.context * c.dim * 2 / 1e9, "GB", "counted")
lab.beside("the logits are", my_logits_gb, gpt.logits_bytes(64, c.context, c.vocab) / 1e9, "GB", "counted")

# %% [markdown]
# One tensor of 13 GB, as much as eight of the twelve blocks keep. And it does not come alone: autograd keeps the logarithms of
# the softmax, and makes a gradient of the same size. Out of memory at a batch that "should fit" can be just this.
#
# > **Question.** Each token's loss needs the logits of that token alone. So why not compute the loss for some tokens at a time,
# > in a loop, and let autograd do the rest?
#
# <details><summary>Answer</summary>
# Autograd keeps what the backward pass of each turn of the loop needs, the softmax of its tokens. After the loop all of it is
# there again. Recomputing each turn (lesson 13) would do, at the price of computing the logits twice.
# </details>
#
# There is a better way. The loss is the *end* of the network. All that the backward pass brings to it from behind is
# one number, the factor that the loss is scaled with. So there is nothing to wait for: as soon as a chunk's logits are
# there, compute their gradient too,
#
# $$\frac{\partial\,\text{loss}_t}{\partial\,s_{tv}} = p_{tv} - [v = \text{target}_t], \qquad p = \mathrm{softmax}(s),$$
#
# and from that, by two matrix multiplications, the gradients of the features $x$ and of the matrix $W$, where $s = xW^\top$.
# These are small. Then the chunk's logits can go. The backward pass has little left to do: multiply with that one number.
#
# > **Question.** What does this cost in FLOPs, beside a loss of all logits at once?
#
# <details><summary>Answer</summary>
# Nothing: three matrix multiplications of the same sizes, one forward and two backward. They only happen earlier.
# </details>
#
# ## Exercise: a loss in chunks
#
# Write it as an operation of autograd, as in lesson 13. `x.split(size)` gives pieces of `size` tokens, the last may have fewer.
# For the sake of clarity everything is in one format, and every token counts.
#
# - The loss of a token is minus its target's entry in `log_softmax` of its logits; return the **sum** over all tokens;
# - keep the gradient of `x`, one piece a chunk, and that of `weight`, a sum over the chunks;
# - in `backward`, `grad` is a scalar.

# %% exercise="loss-in-chunks"
class LossInChunks(Function):
    """The sum of the tokens' cross-entropies, from what goes into the map to logits, `size` tokens at a time.

    `LossInChunks.apply(x, weight, target, size)`: (N, D), (V, D), (N,) -> (). What is kept for the backward pass are the
    gradients of x and of weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, size: int) -> Tensor:
        """The loss. The gradients are computed here too, chunk by chunk, while the logits are there."""
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
        """The gradients of x and weight, from that of the loss, a scalar."""
        ### BEGIN SOLUTION
        of_x, of_weight = ctx.saved_tensors
        return of_x * grad, of_weight * grad, None, None
        ### END SOLUTION

# %%
check("loss-in-chunks")

# %% [markdown]
# Now measure, with lesson 13's meter: 2048 tokens, a vocabulary of 8192, so all logits are 67 MB.
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
    """The most bytes at a time, forward and backward, in units of all logits, and seconds."""
    begin = time.perf_counter()
    with MemoryMeter() as meter:
        loss(x, weight).backward()
    seconds = time.perf_counter() - begin
    x.grad = weight.grad = None
    return meter.peak / logits_bytes, seconds


found = {"all at once": peak(whole)}
found |= {f"chunks of {size}": peak(lambda x, w, size=size: LossInChunks.apply(x, w, target, size)) for size in (512, 128, 32)}
lab.beside("all at once", my_whole, found["all at once"][0], "times the logits")
lab.beside("chunks of 128", my_chunked, found["chunks of 128"][0], "times the logits")
for name, (units, seconds) in found.items():
    print(f"{name:15} peak {units * logits_bytes / 1e6:6.1f} MB, {1000 * seconds:4.0f} ms")

# %% [markdown]
# **What you should see:** three times the logits at once: the logits, their log-softmax, its gradient. Chunks of 128 need less
# than a third of one: three or four tensors of a chunk's size, and the two gradients. Smaller chunks save
# little beside that. How long they take depends on the machine: on a GPU matrices of a few rows use tensor cores badly.
#
# The library's is the same idea, with what reality adds: matmuls in 16 bits while sums stay in float32, tokens that weigh
# nothing, and a cross-entropy that can be another one. The size is `model.loss_chunk`, 4096 tokens by default.

# %%
lab.show("course.models.gpt.ChunkedLoss")
lab.show("course.models.gpt.chunk_of_loss")

# %% [markdown]
# The widget shows the logits that a GPU holds at one time, beside what the 12 blocks of GPT 124M keep of the same
# tokens. `tp` is the next section.
#
# > **Predict, before you move the sliders:** with the vocabulary of Llama 3, 128,256 tokens, what is it that fills the GPU?

# %%
slider = widgets.explore(gpt.explore_logits, vocabulary=[50304, 512, 32000, 128256], batch=[64, 8, 16, 32],
                         tp=[1, 2, 4, 8], chunk=[0, 16384, 4096, 1024],
                         alt="Three bars: the logits of all tokens, those that are there at a time as chosen, and what 12 blocks "
                             "keep.")

# %% [markdown]
# <details><summary>Answer</summary>
# The logits, 34 GB, where all twelve blocks keep 19. In chunks of 4096 tokens they are 2 GB, and 0.3 GB if eight ranks share the
# vocabulary. In many a training of a small model with a large vocabulary nothing saves more.
# </details>
#
# ## A vocabulary over ranks
#
# Tensor parallelism cut the matrices of the blocks. Left alone, embedding and head would be whole on every rank: a third of the
# parameters of a small model, and the largest matrix multiplication. So cut them as well: each rank has `V / tp` **rows** of the
# embedding, and since it is tied, the same columns of the logits.

# %%
print(models.gpt.VOCABULARY_PLAN)

# %% [markdown]
# > **Predict.** A vocabulary of 16, 4 ranks. Which rank has the row of token 13, and which number does the row have there?

# %%
my_rank, my_row = 0, 13          # your prediction

# %%
print("rank", 13 // 4, "row", 13 % 4, "- you said", my_rank, "and", my_row)

# %% [markdown]
# All ranks get all tokens. A rank cannot look up a token whose row is elsewhere. It does not have to ask for it either: it puts
# **zeros** there, and what is left to do you know from lesson 10. Every rank has a part of the sum.
#
# > **Question.** What is the backward pass of that sum, and which rows of a rank's weight get a gradient?
#
# <details><summary>Answer</summary>
# The identity: every rank has the gradient of all vectors already (reduce: all-reduce | identity). The rows of the tokens that
# it looked up get it; where it put zeros, the product with zero stops it.
# </details>
#
# ## Exercise: the embedding
#
# Two parts. `own(tokens, rows, axis)` returns two tensors with an entry for every token: which of this rank's `rows`
# rows it is (or 0, a row that exists, if it is another rank's), and whether it is here at all. `forward` looks up
# (`F.embedding(row, self.weight)`), puts the zeros, and leaves the region where ranks compute parts: `leave_region(x, axis,
# tokens)` with `self.tokens`, as in lesson 10. `axis.rank` is this rank's place along the axis, from 0.

# %% exercise="vocabulary-embedding"
from course.parallel.tensor_parallel.vocabulary import VocabularyEmbedding, own

# %%
check("vocabulary-embedding")

# %% [markdown]
# ## A loss from pieces
#
# Behind the last block each rank multiplies all tokens with its columns: (B, T, V / tp) logits. The obvious next step is to
# gather them, and to go on as one GPU would.
#
# > **Predict.** GPT-2's vocabulary, tp=8, logits in 16 bits: how many bytes does each rank have to send for one **token** so
# > that all have all logits?

# %%
my_bytes_a_token = 1000          # your prediction

# %%
lab.beside("gathered logits, sent by each rank", my_bytes_a_token, 7 * 50304 / 8 * 2, "bytes a token", "counted")

# %% [markdown]
# 88 kB a token, where an all-reduce between two linears of GPT 124M sends 2.7 kB. And then every rank has all the logits, which
# we have just learned to avoid.
#
# But what does the loss need? With logits $s$ and a target $y$,
#
# $$\text{loss} = \log \sum_v e^{s_v} - s_y = \log \sum_v e^{s_v - m} - (s_y - m).$$
#
# The second form holds for any $m$; with the largest logit nothing overflows. The sum over the vocabulary is a sum over the ranks
# of sums over their columns.
#
# > **Question.** Which numbers do the ranks have to exchange for each token, and in how many steps? Which of them is a sum, and
# > which is not?
#
# <details><summary>Answer</summary>
# Three. First the largest logit, by an all-reduce that takes the maximum. Then, relative to it, the sum of exponentials and the
# target's logit: both are sums over the ranks (the target's has one part that is not zero), so one all-reduce does both.
# </details>
#
# For the gradient nothing has to be sent. A rank needs $p_v - [v = y]$ for its own columns, and has the sum by now.
#
# ## Exercise: cross-entropy from pieces
#
# `losses_and_softmax` gets this rank's columns of the logits, and of each target what `own` says: its `column` here, and
# whether it is `here`. It returns the loss of each token, the same on all ranks, and the softmax of this rank's columns.
# 16-bit logits are taken to float32 first. `minus_target` turns that softmax into the gradient
# (in its own memory, if you can: nothing here is larger; the check takes either).
#
# - `dist.all_reduce(x, group=axis.group)` adds up in place; with `dist.ReduceOp.MAX` as second argument it takes the maximum.
# - Leave the logits as they are: autograd may need them.
# - A chunk's tokens come end to end, so one dim is missing: (n, V / tp) and 2 x (n,). Count dims from the end, `-1`.

# %% exercise="vocabulary-loss"
from course.parallel.tensor_parallel.vocabulary import losses_and_softmax, minus_target

# %% [markdown]
# The check compares losses and gradients on 2 ranks, and on 4 that are two groups, with logits of ten thousands and with 16-bit
# ones, counts what is exchanged, and trains a GPT with it.

# %%
check("vocabulary-loss")

# %% [markdown]
# > **Predict.** Now count, forward and backward, on 2 ranks with a vocabulary of 4096 in float32: how many bytes does a rank send
# > for a token with your loss? How many with gathered logits? (An all-reduce over n ranks sends 2·(n − 1)/n of its bytes, an
# > all-gather n − 1 times its piece. What is the backward pass of a gather?)

# %%
my_three = 100.0                 # your predictions, bytes a token
my_gathered = 100.0


# %%
def bytes_a_token(how: str) -> float:
    """What this rank sends for the loss and the gradient of 64 tokens, for each of them."""
    from course.parallel.tensor_parallel.vocabulary import CrossEntropy

    axis = parallel.build_mesh(config.Parallel(tp=2), parallel.join("cpu")).tp
    target = torch.arange(64)[None] * 61
    mine = torch.randn(1, 64, 4096 // axis.size, requires_grad=True)

    def pieces() -> None:
        CrossEntropy.apply(mine, target, axis).sum().backward()

    def gathered() -> None:
        everything = mappings.gather(mine, 2, axis, 4096)
        loss = F.cross_entropy(everything.flatten(0, 1), target.flatten(), reduction="sum")
        (loss / axis.size).backward()               # a rank's share: the backward pass of the gather adds them up

    _, calls = bytes_sent.collectives(pieces if how == "pieces" else gathered)
    return sum(call.sent for call in calls) / 64


lab.beside("three numbers", my_three, ranks(2)(bytes_a_token, "pieces")[0], "bytes a token", "counted")
lab.beside("gathered logits", my_gathered, ranks(2)(bytes_a_token, "gathered")[0], "bytes a token", "counted")

# %% [markdown]
# **What you should see:** 12 bytes against 16,384: an all-gather forward, a reduce-scatter backward. (All ranks compute
# the same loss, so a program that uses this can take a slice of the gradient instead and send nothing back: 8,192.) And
# the 12 do not grow with the vocabulary.
#
# The chunked loss takes this cross-entropy as it takes the serial one, so with `tp=8` and chunks of 4096 tokens a rank
# has 0.1 GB of logits at a time, of the 13. Does all of it train as one process does? Here are both of your answers in
# the library's place:

# %%
def with_yours() -> list[verify.Gap]:
    """Train two steps on one process, and on all ranks with your four objects in the library's place; compare."""
    with lab.yours(own, VocabularyEmbedding, losses_and_softmax, minus_target):
        return verify.compare(exact)


exact = config.load("gpt-demo", [*verify.DEFAULTS, "model.depth=1", "model.loss_chunk=48", "parallel.dp=1", "parallel.tp=2",
                                 "parallel.sp=true", "train.steps=2", "train.device=cpu"])
assert verify.tell(exact, ranks(2)(with_yours)[0])

# %% [markdown]
# ## Text as numbers
#
# Any text is bytes, so 256 tokens would do. **Byte-pair encoding** makes pieces that are longer: of a sample of text, take the
# pair of neighbouring tokens that is most frequent, make it a new token, and again, until the vocabulary is full. `course data
# tokens` does so for a corpus that every machine has, the source text of Python's standard library. GPT-2 has 50,257 tokens, the
# preset `gpt-python` 4096. For a training of seconds, take 512.

# %%
data = Path("data/python-512")
python_corpus.make(schema.build(python_corpus.PythonCorpus, {"path": str(data), "vocab": 512}, "tokens"))
tokenizer = bpe.load(data / "tokenizer.json")
for text in ("    def read(self, size=-1):", "xylophone"):
    print([tokenizer.decode([token]) for token in tokenizer.encode(text).ids])

# %% [markdown]
# What is frequent in Python is one token: the indentation, `self`, even `):`. A rare word is spelled. Every document ends
# with a token of its own, `<|endoftext|>`.
#
# ## Token files
#
# A corpus of billions of tokens is not read into memory, and not opened a million times. Megatron-LM's answer is what most of the
# field uses: **one** file with all tokens end to end, `.bin`, and one that says where everything lies, `.idx`. Both are mapped
# into memory: the operating system reads what is touched.
#
# | `.idx` | | |
# |---|---|---|
# | magic | 9 bytes | `MMIDIDX`, two zeros |
# | version | uint64 | 1 |
# | code | uint8 | the kind of number in the `.bin`: 8 is uint16, 4 is int32 |
# | S | uint64 | how many **sequences** |
# | D | uint64 | how many numbers the part *documents* has: one more than there are **documents** |
# | lengths | S × int32 | tokens of each sequence |
# | pointers | S × int64 | the **byte** of the `.bin` at which each begins |
# | documents | D × int64 | the sequence with which each document begins, and S at the end |
#
# A document may have several sequences (paragraphs, say), so the file says which belong together. Everything is little-endian,
# and nothing lies between the parts.
#
# > **Predict.** How many bytes does the `.idx` of our training split have? It has 471 documents (a few more or less,
# > depending on your Python's files) with one sequence each.

# %%
my_idx_bytes = 1000              # your prediction

# %%
counts = json.loads((data / "meta.json").read_text())["splits"]["train"]
print(counts)
lab.beside("bytes of train.idx", my_idx_bytes, (data / "train.idx").stat().st_size, "bytes")

# %% [markdown]
# A header of 34 bytes, 20 for each document, 8 at the end. (Why int32 for lengths and int64 for pointers? No sequence has two
# billion tokens, but a file soon has two billion bytes.)
#
# ## Exercise: read the index
#
# `np.memmap(path, np.uint8, "r")` gives the bytes of the file as an array, `raw` say, and reads none of them yet. Then
# `HEADER.unpack_from(raw.data)` gives the five values of the header, `np.frombuffer(raw, "<i4", count, offset)` an array of
# so many little-endian int32 from a byte on, without copying, and `DTYPES[code]` the name of a kind of number. Return
# `Index(dtype, lengths, pointers, documents)`, the dtype little-endian, too.
#
# Files are cut off, when a disk is full or a copy was stopped. `check_header(path)` raises a `CourseError` for a file that is not
# an index, or not all of one: call it before you believe a number.

# %% exercise="read-index"
from course.data.text.indexed_files import read_index

# %%
check("read-index")

# %% [markdown]
# What a damaged file gets is a sentence. The check above tries six kinds of damage; here are three.

# %%
good = (data / "train.idx").read_bytes()
folder = Path("runs/lesson-14")
folder.mkdir(parents=True, exist_ok=True)
for what, raw in {"cut off": good[:-100], "a zip file": b"PK" + good[2:], "fractions": good[:17] + b"\6" + good[18:]}.items():
    (folder / "damaged.idx").write_bytes(raw)
    try:
        read_index(folder / "damaged.idx")
    except CourseError as error:
        print(f"{what}: {error}\n")

# %% [markdown]
# ## Exercise: one document
#
# `tokens` are those of the whole `.bin`, as an array of numbers. Return those of document `i`. It may have several sequences,
# which lie one after the other, or none.

# %% exercise="one-document"
def document(index: Index, tokens: np.ndarray, i: int) -> np.ndarray:
    """The tokens of document i, of the `tokens` of the whole .bin, (n,)."""
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
# ## Samples across documents
#
# Documents have all lengths; a GPU wants samples of one length. Padding the short ones would waste computing, cutting
# the long ones would waste text. So all documents are laid end to end and cut every `context` tokens. A sample takes
# one token more, the target of its last one, which is the first of the next sample.

# %%
lab.picture(gpt.packed_samples([7, 4, 13, 2, 9], 8),
            "A row of 35 boxes, a colour for each of five documents; below, four samples of 8 boxes each and a ninth, hatched, "
            "the first of the next sample. Samples begin and end in the middle of documents")

# %% [markdown]
# > **Predict.** How many samples of 128 tokens does our training split give? Its number of tokens stands above.

# %%
my_samples = 471                 # your prediction

# %%
samples = Sequences(str(data), "train", 128, 512)
lab.beside("samples", my_samples, len(samples), how="counted")

# %% [markdown]
# One token less than there are, divided by 128. Only two kinds of tokens are never predicted: the very first one, and
# those after the last whole sample, fewer than 128.
#
# > **Question.** A sample may hold the end of one file and the beginning of another. What does a token of the second see of the
# > first? Is that a mistake?
#
# <details><summary>Answer</summary>
# All of it: causal attention knows no documents. The token between them tells the model that what was before does not matter,
# and it learns that. GPT-3 does the same (<a href="https://arxiv.org/abs/2005.14165">Brown et al. 2020</a>, appendix B), and
# so does Megatron-LM; <code>--reset-attention-mask</code> is the option that forbids it, for a more expensive attention.
# </details>
#
# **The epoch's shuffle.** Samples are drawn in a random order. That order must not depend on the layout, or eight ranks of
# dp and eight of tp would train on other batches, and nobody could compare them (lesson 03).

# %%
for dp in (1, 2, 4):
    parts = [next(order.train_batches(0, len(samples), 8, dp, rank, 0)) for rank in range(dp)]
    print(f"dp={dp}:", "   ".join(" ".join(map(str, part)) for part in parts))

# %% [markdown]
# The same eight samples, dealt in slices. The order is a function of seed and epoch; where a run stands is one number.
#
# ## Train
#
# A GPT of half a million parameters, 2 blocks of width 128, 200 steps of 16 samples. That is a tenth of an epoch.
#
# > **Predict.** It begins at log 512 = 6.24. What will the loss of text that it has never seen be at the end?

# %%
my_final_loss = 5.0              # your prediction

# %%
background_load.report()
name = time.strftime("lesson14-%Y%m%d-%H%M%S")
settings = config.load("gpt-python", [f"data.path={data}", "model.vocab=512", "model.dim=128", "model.depth=2", "model.heads=4",
                                      "optim.lr=4e-3", "optim.warmup=20", "train.steps=200", "train.eval_every=0", "log.every=50",
                                      "train.device=cpu", f"log.name={name}"])
run = trainer.main(settings)
record = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
lab.beside("\nloss of the validation split", my_final_loss, record["valid_loss"])

# %% [markdown]
# > **Question.** The same library with a vocabulary of 4096 tokens, `course train gpt-python` (three minutes), ends at 4.27,
# > which is *more*. Is it the worse model?
#
# <details><summary>Answer</summary>
# A loss is for each token, and its tokens are longer. Divide by the bytes of a token.
# </details>

# %%
valid = json.loads((data / "meta.json").read_text())["splits"]["valid"]
each = valid["bytes"] / valid["tokens"]
print(f"vocabulary  512: {each:.2f} bytes a token, {record['valid_loss'] / each / math.log(2):.2f} bits a byte")
print(f"vocabulary 4096: 3.62 bytes a token, {4.27 / 3.62 / math.log(2):.2f} bits a byte")

# %% [markdown]
# Never compare losses of different tokenizers. Bits a byte compare: they are what the text would take if the model compressed it.
#
# ## Let it write
#
# To write, draw the next token from the probabilities, append it, and go on. First with fresh weights, then trained.

# %%
prompt = torch.tensor([tokenizer.encode("def").ids])
untrained = new_model(settings)
print(tokenizer.decode(generate(untrained, prompt, 40, 0.7)[0].tolist()))

# %%
texts = sample_text.sample_run(run, "def", count=100, temperature=0.7, top_k=0, seed=1, samples=2)

# %% [markdown]
# **What you should see:** soup before; after seconds of training indentation, brackets that often close, `self.` and strings. It
# has no idea what it is saying. `gpt-python` knows some words more, and GPT-2 is the same code with other numbers.
#
# ## The key-value cache
#
# To draw token number 100 the model computed 99 positions. To draw number 101 it computes 100, of which 99 are the same as
# before: in a causal model a token's keys and values never change when others follow. So keep them, and compute one position.
#
# > **Predict.** A prompt of 1 token and 100 new ones: how many positions go through the model without the cache, and with it? How
# > many times as fast will writing be?

# %%
my_without, my_with = 1000, 100  # your predictions
my_speedup = 10.0

# %%
model = new_model(settings)
positions: list[int] = []
hook = model.embed.register_forward_hook(lambda module, given, out: positions.append(out.shape[1]))


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
# 5050 = 1 + 2 + … + 100 against 100. And yet it is only two or three times as fast: with a model so small a pass takes as long as
# starting its operators does, be it for one position or for fifty. With 7 billion parameters one position at a time has another
# limit: every weight is read from memory, for two FLOPs each (lesson 00's roofline). That is why servers write for many at once.
#
# > **Predict.** How many MB is the cache of GPT 7B (32 blocks of width 4096, 16 bits) for one text of 2048 tokens?

# %%
my_cache_mb = 10                 # your prediction

# %%
big = config.load("gpt-7b").model
lab.beside("cache", my_cache_mb, 2 * big.depth * big.dim * 2 * big.context / 1e6, "MB", "counted")

# %% [markdown]
# Two vectors of width `dim` for each block and token: half a megabyte a token. 100 texts of 2048 at once would fill three
# quarters of an H200. Hence **grouped heads** (`model.kv_heads`): several heads of queries share one of keys and values. Llama
# 3 has 8 for 32 heads, a quarter of the cache.
#
# ## The Megatron way
#
# By now you have every piece. Megatron-LM's recipe is to combine them, with three numbers whose product is the number of GPUs:
#
# - **tp** cuts each matrix, column then row, and the vocabulary: two all-reduces a block forward and two backward, which nothing
#   hides. Within a node.
# - **pp** cuts the blocks into stages: few bytes, and a bubble of (p − 1) / (m + p − 1) with m micro-batches. Between nodes.
# - **dp** cuts the batch: one all-reduce of the gradients a step, beside the backward pass. Whatever is left.
#
# OneFlow's engineers published how much time and memory Megatron-LM took on their cluster, V100 GPUs of 16 GB, 8 in a
# node, with 100 Gb/s between nodes, and samples of 2048 tokens. A case is named *dp* x *tp* x *pp* _ *global batch* _
# *width* x *depth*. For instance, one GPU with a batch of 2, `1x1x1_2_1536x16`: 464 ms, 14,362 MiB.
#
# ### Eight GPUs
#
# The same model on 8 GPUs, global batch 16. Either **8x1x1**: every GPU has the whole model and 2 samples. Or **1x8x1**: every
# GPU has an eighth of the model and all 16 samples.
#
# > **Predict.** The arithmetic is the same. What does each take, in ms? And which layout of 8x1x1, 4x2x1, 2x4x1, 1x8x1 needs the
# > **least** memory?

# %%
my_dp_ms, my_tp_ms = 464.0, 464.0                    # your predictions, for 8x1x1 and 1x8x1
my_least = "1x8x1"

# %%
cases = {case.name: case for case in CASES}
eight = [cases[f"{layout}_16_1536x16"] for layout in ("8x1x1", "4x2x1", "2x4x1", "1x8x1")]
lab.beside("8x1x1", my_dp_ms, eight[0].ms, "ms", "recorded")
lab.beside("1x8x1", my_tp_ms, eight[-1].ms, "ms", "recorded")
print("least memory:", min(eight, key=lambda case: case.mib).name, "- you said", my_least)
lab.picture(gpt.grid([cases["1x1x1_2_1536x16"], *eight], "The same work for a GPU: V100, 8 in a node"),
            "Five cases in three panels. Milliseconds: 464 on one GPU, 481 for 8x1x1, then 594, 576 and 692 as tp grows. MiB: "
            "14362, 14938, 9642, 9104, 12684. TFLOP/s of a GPU: 33, 32, 26, 27, 22")

# %% [markdown]
# Data parallelism is nearly free; tensor parallelism costs 44% more. Count what a GPU sends in a step, in 16 bits.

# %%
def sent(tp: int, dp: int, batch: int, width: int, depth: int) -> tuple[float, float]:
    """GB that a GPU sends in a step: (activations over tp, gradients over dp)."""
    activation = batch / dp * 2048 * width * 2
    parameters = (12 * depth * width**2 + 50304 * width) / tp
    return 4 * depth * activation * 2 * (tp - 1) / tp / 1e9, parameters * 2 * 2 * (dp - 1) / dp / 1e9


for case in eight:
    dp, tp, _ = case.layout
    activations, gradients = sent(tp, dp, 16, 1536, 16)
    print(f"{case.name}: {activations:5.2f} GB of activations, {gradients:5.2f} GB of gradients, {case.ms} ms")

# %% [markdown]
# **What you should see:** 11.3 GB against 1.9. Data parallelism took 17 ms more than one GPU did: if nothing hid its 1.9 GB, the
# links carried 109 GB/s, and less if something did. So 11.3 GB take at least 103 ms, and 155 ms if the forward pass's are sent
# once more, when it is recomputed (see below). Matrices wait for them. That is most of the 228 ms that 1x8x1 took more than one
# GPU; smaller matrices are the rest.
#
# > **Question.** 4x2x1 sends a third of the activations that 2x4x1 does, and is slower. What could be different about *two* GPUs
# > of such a node?
#
# <details><summary>Answer</summary>
# Probably their link. In the usual nodes of that time each V100 had six NVLinks, to four others: one or two for each pair. A ring
# over all GPUs uses them all, a pair only its own. Where a switch joins all GPUs, as in later nodes, a pair has the full rate.
# </details>
#
# Why is memory least in the *middle*? Two kinds of bytes (lesson 13): what belongs to parameters, 18 bytes each in
# Megatron-LM, is divided by tp. The rest belongs to samples, and with a larger tp a GPU has more samples.

# %%
parameters = 12 * 16 * 1536**2 + 50304 * 1536
for case in eight:
    dp, tp, _ = case.layout
    of_parameters = 18 * parameters / tp / 1e9
    rest = case.mib * 2**20 / 1e9 - of_parameters
    print(f"{case.name}: {of_parameters:4.1f} GB of parameters, the rest for {16 // dp:2} samples: {rest:4.1f} GB, "
          f"{rest / (16 // dp):.2f} GB each")

# %% [markdown]
# Eight times as many ranks make a sample's share four times smaller, not eight: norms, residual sums and their inputs are
# whole on every rank of tp (lesson 10; sequence parallelism, which cuts them, came later).
#
# > **Question.** Did they recompute activations? A block that keeps everything, with the scores of attention written down as it
# > was done then, keeps 34·T·D + 5·heads·T² bytes a sample ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), eq. 2).
# > Here there are 16 heads.
#
# <details><summary>Answer</summary>
# That is 442 MB a block, 7 GB a sample with 16 blocks. 8x1x1 has 3 GB a sample. So yes.
# </details>
#
# ### Beyond a node
#
# **1x16x1** with a model twice as wide, 3072x16: four times the FLOPs of the blocks on twice the GPUs.
#
# > **Predict.** 1x8x1 took 692 ms at width 1536. How many does 1x16x1 take at width 3072? Its sixteen GPUs are in two nodes.

# %%
my_cliff_ms = 1400.0             # your prediction

# %%
lab.beside("1x16x1_16_3072x16", my_cliff_ms, cases["1x16x1_16_3072x16"].ms, "ms", "recorded")
activations, _ = sent(16, 1, 16, 3072, 16)
print(f"a GPU sends {activations:.1f} GB; one of each node sends them over the network: {activations / 12.5:.1f} s at 100 Gb/s")
lab.picture(gpt.grid([case for case in CASES if case.layout[1] >= 8 and case.layout[2] == 1]),
            "Five cases. TFLOP/s of a GPU: 22 for 1x8x1, 17 and 15 with dp over nodes, but 5 and 2 where tp goes over nodes")

# %% [markdown]
# A cliff: 5610 ms, 4.7 TFLOP/s of a GPU where there were 22. A ring over two nodes is as fast as the network between
# them, and all 64 all-reduces go through it. At its full rate they would take 2 s, or 3 s with those of the recomputed
# blocks. Nobody reaches the full rate. Beside it 4x8x1 on *32* GPUs, tp within a node and dp between nodes, loses a
# third, not four fifths. This is the oldest rule of the trade: **tp never leaves the node.**
#
# ### Pipelines
#
# Now 32 GPUs with batches of 512, in micro-batches.
#
# > **Predict** the share of bubble of 8x1x4_512 with micro-batches of 2: how many micro-batches has each pipeline? And for the
# > model 2304x24: which is the fastest of 1x8x4 (micro-batch 16), 2x4x4 (8) and 2x8x2 (8)?

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
    print(f"{case.name}: {micros} micro-batches, bubble {bubbles[case.name]:.1f}%, {case.ms / 1e3:.1f} s, "
          f"{gpt.tflops(case):.1f} TFLOP/s")
lab.beside("bubble of 8x1x4", my_bubble, bubbles["8x1x4_512_1536x16"], "%", "counted")
print("fastest:", min(pipelines[1:], key=lambda case: case.ms).name, "- you said", my_fastest)

# %% [markdown]
# All have 32 micro-batches, so bubbles are small. 2x4x4 is the fastest of its model although its bubble is not the smallest: with
# tp over 4 ranks and half of the samples it sends 43% of the bytes that the other two do. 1x8x4 and 2x8x2 send equally many bytes
# over tp, and yet one takes 36% longer.
#
# > **Question.** Each stage of 1x8x4 is one node, each of 2x8x2 two. Suppose that all 8 ranks of a tensor-parallel group send the
# > activation of a micro-batch to the next node, each the whole of it. How many GB does a *node* in the middle send in a step?
# > (A micro-batch of 16 samples is 16 · 2048 · 2304 · 2 bytes; gradients go back.)
#
# <details><summary>Answer</summary>
# 151 MB, from 8 GPUs, 32 times, in two directions: 77 GB, 6.2 s at 100 Gb/s. In 2x8x2 micro-batches are half as large and no
# stage is in the middle: 19 GB, 1.5 s. That is 4.6 s apart, and the iterations, 22.2 and 16.3 s, are 5.9 s: so it seems that they
# do. All eight copies are the same: each rank can send an eighth, and the other side gathers them over NVLink
# (<a href="https://arxiv.org/abs/2104.04473">Narayanan et al. 2021</a>, section 4.1).
# </details>

# %% [markdown]
# The widget shows the whole table, in groups.
#
# > **Question.** Choose *data parallel*. 8 GPUs take hardly longer than one, 16 take 200 ms longer. And 32? Count: 2.0 GB of
# > gradients that a GPU sends, 100 Gb/s.

# %%
grid = widgets.explore(gpt.explore_cases, cases=list(gpt.GROUPS),
                       alt="For each case of the source: milliseconds of an iteration, MiB and TFLOP/s of a GPU, coloured by "
                           "what is cut.")

# %% [markdown]
# <details><summary>Answer</summary>
# From 8 to 16 the ring goes over the network: 2.0 GB at 12.5 GB/s are 160 ms, which nothing hid. From 16 to 32 hardly anything
# changes, because in a ring each rank sends 2·(n − 1)/n times its bytes however many there are (lesson 07): 664 and 684 ms.
# </details>
#
# ## On H200s
#
# > **Predict.** From V100 to H200 matrix multiplications became about eight times as fast by the data sheets (125 and
# > 989 TFLOP/s in 16 bits), NVLink three times (300 and 900 GB/s, both directions together). On eight V100s 1x8x1 took
# > 44% longer than 8x1x1. Two H200s were measured, with a case each that stands for these two: all ranks along tp with 16
# > samples at a time, and all along dp with 2. The micro-batch matters by itself, so compare each with *one* H200 that has as
# > many samples at a time, beside as slow a host. How much longer does each take, for the same work?

# %%
my_tp_percent, my_dp_percent = 44.0, 4.0             # your predictions, for two H200s over one

# %%
files = [name for name in ("grid_h200", "grid_2xh200") if (lab.RESULTS / f"{name}.json").is_file()]
steps, layers = ({file: [row for row in lab.results(file)["rows"] if row["case"].endswith("layers") == alone] for file in files}
                 for alone in (False, True))
if files:
    for file, rows in steps.items():
        lab.recorded(file, gpt.table(rows), why="The grid on H200s: an iteration, a GPU's peak and model TFLOP/s")
    rows = [row for of_file in steps.values() for row in of_file]
    lab.picture(gpt.measured(rows), f"TFLOP/s of a GPU for each case: {gpt.describe_measured(rows)}")
else:
    print("Not measured yet. On a machine with GPUs: course bench grid --out course/bench/results/grid_h200.json")

# %%
later = lab.results("grid_h200")["again"]
one, two = ({row["case"]: row["tflops"] for row in found if "tflops" in row}
            for found in (later["rows"], lab.results("grid_2xh200")["rows"]))
for what, predicted, alone, cut in (("tp", my_tp_percent, "1x1x1_16_1536x16", "1x2x1_16_1536x16"),
                                    ("dp", my_dp_percent, "1x1x1_2_1536x16", "2x1x1_4_1536x16")):
    lab.beside(f"{what} over two H200s", predicted, 100 * (one[alone] / two[cut] - 1), "% longer than one", "recorded")
    print(f"One H200 beside the slow host: {alone}, {one[alone]:.0f} TFLOP/s; two: {cut}, {two[cut]:.0f} TFLOP/s each")
again = {"grid_h200": [row for row in later["rows"] if row["case"].endswith("layers")]}
for words, tables in (("", layers), (f", again on {later['date']}, beside the slow host of the two GPUs", again)):
    for file, rows in tables.items():
        lab.recorded(file, gpt.table(rows), f"The layers of one micro-batch alone, forward and backward, tp only{words}")
        lab.picture(gpt.measured(rows), f"TFLOP/s of a GPU, a panel for each software: {gpt.describe_measured(rows)}")

# %% [markdown]
# > **Question.** Each is slower than one GPU by what it sends and by what more it has to launch. Compare the two with each other
# > now: the case that stands for 8x1x1 is far *slower* for its work than the one that stands for 1x8x1, which has all the
# > communication. Why?
#
# <details><summary>Answer</summary>
# Their micro-batches: 2 samples against 16, as in the cases that they stand for, where eight data-parallel ranks share 16
# samples, or tensor-parallel ones have all. On one H200 that alone takes the rate from 537 to 405 TFLOP/s: with 4096 tokens a
# step the GPU is often done before the host has launched the next kernel. And the host of the two GPUs was a slow one: beside
# it one H200 alone comes to 295. The rest, down to 245, is what data parallelism adds, which has more to launch as well. On a
# V100, eight times slower, the same launches were hidden behind the work. A faster GPU does not make a small step faster; a
# larger micro-batch, a CUDA graph (lesson 06) or fewer launches do.
# </details>
#
# The tables of *layers* have the time of the layers alone, ours and megatron-core's, on the same GPUs. Where they are
# wide (3072), all take the same time within 5%, that of the matrix multiplications. Where they are narrow and the samples few,
# the host is the limit, and whoever launches least wins. On one GPU that is the course, whose layers are compiled: the
# smallest take 84% to 87% of the time of megatron-core's, and beside the slow host 56% to 67%. On two GPUs it is plain tensor
# parallelism, which has half as many collectives as sequence parallelism: our two smallest take 67% and 74% of the time of
# megatron-core's. With Transformer Engine megatron-core's layers are sequence parallel, and ours, sequence parallel as well,
# take 78% to 100% of their time. Ours with *Triton kernels*, written in Triton, are the fastest where the GPU is the limit, and
# the slowest of ours where the host is: to launch a kernel from Python takes longer than from what the compiler wrote. They are
# made for a CUDA graph, which launches without Python; none of these layers is in one.
#
# Four H200s were measured, too.
#
# > **Predict.** 1x4x1 has the 16 samples of 1x2x1 above, on twice as many GPUs. At width 1536, 16 layers, ours took 126 ms
# > without sequence parallelism on two GPUs, in the tables above. And on four?

# %%
my_layers_ms = 62.0              # your prediction

# %%
four = lab.results("grid_4xh200")["rows"]
for alone, why in ((False, "The grid on four H200s"), (True, "Its layers alone")):
    rows = [row for row in four if row["case"].endswith("layers") == alone]
    lab.recorded("grid_4xh200", gpt.table(rows), why=why)
measured = next(row["ms"] for row in four if row["case"] == "1x4x1_16_1536x16, layers" and row["by"] == "course")
lab.beside("layers on four H200s", my_layers_ms, measured, "ms", "recorded")

# %% [markdown]
# **What you should see:** more than half of the time that two took. The multiplications are shared by four, but the all-reduces
# are not: each rank sends 2·(n − 1)/n times the bytes of a sum, 1 time on two GPUs and 1.5 times on four (lesson 07).
#
# > **Question.** With sequence parallelism the same layers take *longer*, 118 ms, and with half as many samples only a fourth
# > less, 92. Those of width 3072 take a little less with it than without. What decides?
#
# <details><summary>Answer</summary>
# Whether the GPU waits for the host. Sequence parallelism has twice as many collectives to start, and the narrow layers, a
# fourth of each on every GPU, are done before the next is started. Wide ones hide the starts, and then it gains: norms and
# residuals work on a fourth of the tokens. For a model this narrow leave it out, 90 and 61 ms, as long as the memory allows.
# </details>
#
# On one H200: GPT 124M with 64 samples of 1024 tokens, whole training steps.
#
# > **Predict.** By how many GB is the peak lower with the loss in chunks of 4096 tokens than with all logits at once? Think of
# > the peaks that you measured above, in units of all logits; here these are computed in 16 bits.

# %%
my_gb_saved = 13.2               # your prediction

# %%
rungs = {row["rung"]: row for row in lab.results("gpt_h200")["rows"]}
lab.recorded("gpt_h200", {name: {"tokens/s": row["tokens_per_s"], "ms": row["ms"], "GB": row["memory_gb"],
                                 "MFU, %": 100 * row["mfu"]} for name, row in rungs.items()}, why="GPTs on one H200")
chunked = "124M: bf16, compiled, narrow stream"
saved = rungs[f"{chunked}, all logits"]["memory_gb"] - rungs[chunked]["memory_gb"]
lab.beside("GB that chunks save", my_gb_saved, saved, "GB", "recorded")

# %% [markdown]
# Chunks save 12.4 GB: all logits and their gradient, 6.6 GB each in 16 bits, less what one chunk takes. It is not three
# times all logits, as on the CPU above, because the compiler fuses the softmax, so that no copy in 32 bits is ever
# written.
#
# And chunks are 3% *faster*. That is not a law: as the compiler wrote them, they were slower. Now a kernel of the library's
# (`course/ops/cross_entropy_triton.py`, 60 lines of Triton) reads a chunk's logits from memory once and writes their gradient in
# their place, and the matrix multiplication of the weight's gradient adds to what is there, in float32, instead of writing a
# product that another kernel adds. Hugging Face's model, compiled, is 18% slower than ours by the same compiler, and takes 15 GB
# more. (In the rows "Triton kernels", what blocks do between their matmuls and Adam are this library's kernels too:
# `kernels=triton`.)
#
# The larger the model, the better the GPU is used: 48% of the peak with 124M, 57% with 1.3B; with Triton kernels 51% and 61%.
# Matrix multiplications grow with the square of the width; norms, GELU and residuals with the width alone. (FP8's MFU is a
# share of FP8's peak, which is twice as high: lesson 15.)

# %% [markdown]
# ## A Llama by configuration
#
# Since GPT-2 the field has changed five things about the block and kept the rest:
#
# | setting | GPT-2 | Llama | why |
# |---|---|---|---|
# | `model.norm` | `layer` | `rms` | no mean to subtract, nothing lost |
# | `model.mlp` | `gelu` | `swiglu` | one half of the hidden units is a gate for the other; better for the same FLOPs |
# | `model.position` | `learned` | `rotary` | queries and keys are turned by their position, so a score knows the distance |
# | `model.kv_heads` | as many | fewer, in Llama 3 8 of 32 | a smaller cache |
# | `model.bias`, `model.tied` | true | false | |
#
# (RMS norm: arXiv:1910.07467. SwiGLU: arXiv:2002.05202. Rotary positions: arXiv:2104.09864. Fewer heads of keys and values:
# arXiv:2305.13245.) All of them are settings here; the layouts, the loss and the files stay as they are.
#
# > **Predict.** Llama 2 7B has 32 blocks of width 4096, 32 heads, an MLP of width 11008 with three matrices, 32,000 tokens,
# > untied. How many parameters are that? Count blocks by hand: attention has four matrices of 4096².

# %%
my_billions = 7.0                # your prediction, in billions

# %%
llama = ["model.norm=rms", "model.mlp=swiglu", "model.position=rotary", "model.bias=false", "model.tied=false"]
two = config.load("gpt-7b", [*llama, "model.vocab=32000", "model.dim=4096", "model.depth=32", "model.heads=32",
                             "model.mlp_width=11008", "model.context=4096"])
three = config.load("gpt-7b", [*llama, "model.vocab=128256", "model.dim=4096", "model.depth=32", "model.heads=32",
                               "model.kv_heads=8", "model.mlp_width=14336", "model.context=8192", "model.rope_theta=5e5"])
for name, settings in {"Llama 2 7B": two, "Llama 3 8B": three}.items():
    count = sum(p.numel() for p in models.build_model(settings.model).parameters())
    print(f"{name}: {count:,} parameters")
    if settings is two:
        lab.beside("billions", my_billions, count / 1e9, how="counted")

# %% [markdown]
# 6,738,415,616 and 8,030,261,248: the numbers of the published models. A checkpoint from Hugging Face loads with
# `course.convert.huggingface.read(folder)`, and the logits are those of `transformers`; the tests compare them, in float64.
#
# ## What you know now
#
# - The logits are the largest tensor of training. A loss at the end of a network can compute its gradient at once, in chunks.
# - A vocabulary over ranks: zeros and a sum to look up, three numbers a token for the loss, nothing for the gradient.
# - `.bin` and `.idx`: all tokens end to end, and where they begin. Samples cross documents; their order does not know the layout.
# - Losses of different tokenizers do not compare; bits a byte do. A cache of keys and values turns n² positions into n.
# - tp within the node, pp between nodes, dp for the rest. Count the bytes, and the grid holds no surprises.
#
# **Check your work once more, from outside.** Save the notebook; then, in a terminal: `course check
# notebooks/14_gpt_mine.ipynb`.
#
# Next: [lesson 15](15_dit_fp8.ipynb), where images are drawn from noise, in eight bits.
