# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 11 · Context parallel
#
# One sample can be too long for one GPU: a book, an hour of video, a map of the whole earth in small patches. **Context
# parallelism** splits the sample itself: each rank keeps some of its *tokens* through the whole model. Most of a
# transformer works on each token alone. Attention does not, because every token looks at all others. There are three
# ways to compute it, and you write parts of two: a gather of keys and values, and a ring.
#
# **What you will learn**
#
# - how context parallelism divides the memory of long samples, and why only attention has to communicate;
# - how answers for separate blocks of keys merge into exact attention: the idea behind flash attention and ring attention;
# - how to balance causal attention over ranks, and how to choose between gather, ring and all-to-all.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 2 hours |
# | computing | 1 minute on two cores, most of it in checks |
# | you write | keys and values in order (3 lines), a merge (3), a zigzag (2), a round's work (3); optional: a ring (50) |
# | you measure | activations against tokens, bytes sent, the balance of causal rings |
#
# You should have done [lesson 10](10_tensor_parallel.ipynb). Work in a copy: *File → Save Notebook As…*,
# `11_context_parallel_mine.ipynb`.

# %% numbers=true
from course.bench.results import load, value


def efficiency_on_four(case):
    return value("cp_h200", case, "efficiency", gpus=4)


def attention_rates(shape):
    row, = (row for row in load("beginning_h200")["attention"] if row["shape"] == shape)
    return row


ring_16k, ring_64k = map(efficiency_on_four, ("16k full ring", "64k full ring"))
gather_16k, gather_64k = map(efficiency_on_four, ("16k full gather", "64k full gather"))
causal_gather = efficiency_on_four("64k causal gather")
causal_ring = efficiency_on_four("64k causal ring")


def whole_step(case, method="", graphs=True):
    """Milliseconds of a training step: on one GPU, or on two by this method."""
    gpus = 2 if method else 1
    return value("context_steps_2xh200", case, gpus=gpus, context=method, graphs=graphs)


SHORT, LONG = "DiT-XL/2, 256 px, 32 samples", "GPT 350M, 2 x 8,192 tokens"
long_rates = attention_rates([1, 32, 32768, 128])
flash_over_cudnn = long_rates["flash"] / long_rates["cudnn"]

# %%
import torch
from torch import Tensor

from course.training import assemble
from course.lab.instruments import tensor_memory
from course.lab.instruments import bytes_sent
from course.lab.instruments.forward_trace import trace
from course import config, parallel
from course.training import verify
from course.config import Parallel
from course.lab.figures import context_parallel, scaling_table, who_holds, widgets
from course.lab import notebook as lab
from course.lab.notebook import check
from course.ranks.notebook_ranks import ranks
from course.parallel import Axis, build_mesh
from course.parallel.context_parallel import block_attention, ring_attention
from course.parallel.token_split import (  # noqa: F401
    SplitTokens, permute_tokens
)

lab.begin("11")

# %% [markdown]
# ## Memory against tokens
#
# Tensor parallelism cuts a layer's width, and pipeline parallelism cuts the model's depth. Neither helps when the samples
# are long.
#
# > **Predict.** A GPT block keeps activations for its backward pass. How many times as much does it keep for a sample of 2048
# > tokens as for one of 512? (PyTorch's attention does not keep the tokens × tokens matrix of scores. It computes the scores
# > again in the backward pass.) And how much does each of two ranks keep, with half of the tokens each?

# %%
my_times = 16.0                  # your prediction: 2048 tokens over 512, one process
# your prediction: each of two ranks over one process, at 2048 tokens
my_share = 1.0


# %%
def kept_by_a_block(tokens: int, *overrides: str) -> int:
    """Bytes that one block of a GPT keeps of one sample for the backward pass, on this
    rank."""
    settings = config.load("gpt-demo", [f"model.context={tokens}", "train.device=cpu",
                                        "train.global_batch=1", *overrides])
    training = assemble.assemble(settings,
                                 build_mesh(settings.parallel, parallel.join("cpu")))
    model = training.model
    batch = model.prepare(model.example(1, torch.device("cpu")), training.progress.step)
    batch = training.layout.tokens.cut(batch)
    x = model.embed(batch)
    return tensor_memory.saved_for_backward(lambda: model.blocks["0"](x, batch),
                                            model.parameters())[1]


kept = {tokens: ranks(1)(kept_by_a_block, tokens)[0] for tokens in (512, 2048)}
halved = max(ranks(2)(kept_by_a_block, 2048, "parallel.cp=2", "parallel.context=ring"))
lab.beside("2048 tokens over 512", my_times, kept[2048] / kept[512], "times", "counted")
lab.beside("each of two ranks", my_share, halved / kept[2048], "times one process",
           "counted")

# %% [markdown]
# **What you should see:** four times as many tokens need four times the memory, so memory is *linear* in the tokens. Half
# of the tokens need about half of the memory. The work of attention grows with the square of the tokens, so in long
# samples it is nearly all of the work.
#
# ## What does a piece need from the others?
#
# Give each rank a piece of the tokens and all of the weights. Go through a block: norms, linears, GELU, residual sums,
# dropout.
#
# > **Question.** Which of these need tokens of another rank? Besides attention, which step at the very end does?
#
# <details><summary>Answer</summary>
# None of them: they work on each token alone. Attention needs the <i>keys and values</i> of all tokens; the queries stay
# where they are. At the end, the loss is a sum over all tokens, so the ranks add up their sums.
# </details>
#
# So the model has two **seams**. The first is the core of attention, which gets this rank's queries, keys and values.
# There, the library inserts a module (**surgery**) that fetches the other ranks' keys and values. The second completes the
# loss's sum over tokens. Nothing else in the model changes.

# %%
lab.show("course.parallel.context_parallel.attention.apply_context_parallel")

# %% [markdown]
# ## First way: gather keys and values
#
# The simplest way: all-gather the keys and values, so that every rank has all of them. Each rank then answers its own
# queries.
#
# You wrote a gather in lesson 10. Its backward pass is a reduce-scatter. What remains is the **order** of the tokens. The
# gather concatenates the pieces rank by rank, but the tokens of a rank need not be neighbors (you will see why).
#
# - `tokens.order(device)` is a tuple: for each rank, the positions of its tokens, in the order in which it has them.
# - `tokens.cp` is the axis, and `mappings.gather(x, dim, axis, n)` is your gather of lesson 10. Pieces may differ in
#   length; n is the number of all tokens.
# - `tokens.zigzag` says whether the gathered pieces are out of time order. If not, leave them as they are.
# - `permute_tokens(x, dim, index)` equals `x.index_select(dim, index)` for an index that has every position once. Either
#   is correct. On a GPU, the backward pass of `index_select` uses atomic additions, because an index may repeat.
#   `permute_tokens` copies the gradients back instead.
#
# > **Question, before you write.** Two ranks have the order `[0, 1, 6, 7]` and `[2, 3, 4, 5]`. The gathered keys are
# > 0 1 6 7 2 3 4 5. Which index puts them into time order?
#
# <details><summary>Answer</summary>
# Position 2 is in place 4, and position 6 is in place 2. So the index is 0 1 4 5 6 7 2 3. It is the <i>inverse</i> of the
# permutation, which <code>argsort</code> computes: the places, sorted by position.
# </details>
#
# ## Exercise: keys and values, in order

# %% exercise="gather-in-order"
from course.parallel.context_parallel.attention import gather_in_order  # noqa: F401

# %%
check("gather-in-order")

# %% [markdown]
# > **Question.** This is correct, simple and fast. What is wrong with it for a million tokens?
#
# <details><summary>Answer</summary>
# Every rank holds the keys and values of <i>all</i> tokens, in every layer. Context parallelism divides all other
# activations by cp, but not these. With many ranks they take most of the memory.
# </details>
#
# ## Second way: a ring
#
# Let the keys and values travel around a ring of ranks. In each round, every rank computes attention of its queries with
# the block of keys it holds. Meanwhile it sends this block to the next rank and receives another. After as many rounds as
# there are ranks, every query has met every key. No rank ever holds more than two blocks.
#
# Four ranks of the library do this below, from left to right. Outlines show the whole activation, tokens downward and
# features across; the colored part is what a rank has. Arrows are messages.

# %%
ONE_BLOCK = ("vit-demo", "model.depth=1", "train.global_batch=2")
ATTENTION = {"norm": "blocks.0.norm1", "q, k, v": "blocks.0.attn.qkv",
             "attention": "blocks.0.attn.core",
             "out": "blocks.0.attn.out"}
whole_model = trace(*ONE_BLOCK)
in_a_ring = ranks(4)(trace, *ONE_BLOCK, "parallel.cp=4", "parallel.context=ring")
lab.picture(who_holds.forward(whole_model, in_a_ring, ATTENTION,
                              title="attention in a ring, cp=4"),
            "Norm and queries, keys, values: each of four ranks has a quarter of the "
            "tokens and all features. Then three rounds of arrows: rank 0 sends to 1, "
            "1 to 2, 2 to 3, and 3 to 0. Attention and out: each rank has its quarter "
            "again.")

# %% [markdown]
# But a softmax has a denominator: the sum over **all** keys. Can a rank answer for one block without knowing the others?

# %%
generator = torch.Generator().manual_seed(0)
# of one query with 6 keys
scores = torch.randn(1, 6, generator=generator, dtype=torch.float64) * 3
values = torch.randn(6, 2, generator=generator, dtype=torch.float64)
whole = scores.softmax(-1) @ values
first, second = scores[:,
                       :3].softmax(-1) @ values[:3], scores[:,
                                                            3:].softmax(-1) @ values[3:]
print("all six keys:   ", whole)
print("the first three:", first)
print("the last three: ", second)
print("their mean:     ", (first + second) / 2)

# %% [markdown]
# The mean is wrong. Each block's answer is a weighted mean of its values, divided by its own denominator
# $Z = \sum_j e^{s_j}$. For all keys the denominator is $Z_1 + Z_2$, so
#
# $$\text{out} = \frac{Z_1\,\text{out}_1 + Z_2\,\text{out}_2}{Z_1 + Z_2}$$
#
# This is a mean weighted by the denominators. So besides its answer, a block returns one number for each query: the
# *logarithm* of its denominator, the **log-sum-exp**, $\text{lse} = \log Z$. Why the logarithm?
#
# > **Predict** what the next cell prints.

# %%
big = torch.tensor([1000.0, 999.0])
print("exp, sum, log:", big.exp().sum().log().item(), "  logsumexp:",
      big.logsumexp(0).item())

# %% [markdown]
# Scores can be large, and $e^{1000}$ overflows in every floating-point format of a GPU. But only *ratios* of denominators
# matter, and these are differences of logarithms. `torch.logaddexp` computes
# $\text{lse} = \log(e^{\text{lse}_1} + e^{\text{lse}_2})$ safely. Then the weights are $e^{\text{lse}_1 - \text{lse}}$ and
# $e^{\text{lse}_2 - \text{lse}}$, and neither exponent is ever positive. This is the **online softmax** (Milakov and
# Gimelshein 2018, arXiv:1805.02867). Flash attention uses it block by block inside one GPU. Ring attention (Liu, Zaharia
# and Abbeel 2023, arXiv:2310.01889) uses it between GPUs.
#
# ## Exercise: merge
#
# `out` (B, h, T, d) and `lse` (B, h, T) are the attention output over some keys, `new_out` and `new_lse` the output over other
# keys. Change `out` and `lse` **in place** into the output over all of these keys. In place, because the ring passes views: some
# rows of its queries at a time.

# %% exercise="merge"
from course.parallel.context_parallel.ring_attention import merge

# %%
check("merge")

# %%
out, lse = first.clone(), scores[:, :3].logsumexp(-1)
merge(out, lse, second, scores[:, 3:].logsumexp(-1))
print("largest difference from the answer for all six keys:",
      (out - whole).abs().max().item())

# %% [markdown]
# The functions below are the whole ring, and `merge` is yours. `rounds` sends and receives: it yields each rank's keys and
# values in turn, its own first, while the next block is on its way. `block_attention.forward` computes attention with one
# block of keys. On GPUs it is a fused kernel, which returns the log-sum-exp because its own backward pass needs it.
#
# `custom_op` (here: `operator`) makes a function one opaque operation for PyTorch. `torch.compile` does not look into it,
# so communication still overlaps computation. Such an operator takes no Python objects, so it gets the group's name.

# %%
lab.show("course.parallel.context_parallel.ring_attention.ring")
lab.show("course.parallel.context_parallel.ring_attention.rounds")
lab.show("course.parallel.context_parallel.ring_attention.Ring")
lab.show("course.parallel.context_parallel.ring_attention.ring_backward")

# %% [markdown]
# > **Question.** Look at `save_for_backward`. What does the ring keep, and what does it repeat in the backward pass? What
# > travels back to its owner there?
#
# <details><summary>Answer</summary>
# It keeps its own queries, keys, values, answer and log-sum-exp, and nothing of other ranks. So in the backward pass the
# keys and values travel around the ring again. Each rank adds its part to the gradients of other ranks' keys and values.
# These gradients follow their keys around the ring until they reach their owner. No merging is needed: the <i>final</i>
# log-sum-exp gives the correct softmax for each block at once.
# </details>
#
# ## Third way: exchange tokens for heads
#
# Attention heads are independent. So change what is split, just for attention: an **all-to-all** gives each rank all
# tokens of *some heads*. Attention then runs unchanged, causal or not. Another all-to-all restores the split over tokens
# (Ulysses: Jacobs et al. 2023, arXiv:2309.14509).

# %%
exchanged = ranks(4)(trace, *ONE_BLOCK, "parallel.cp=4", "parallel.context=all_to_all")
lab.picture(who_holds.forward(whole_model, exchanged, ATTENTION,
                              title="attention after an exchange, cp=4"),
            "Norm and queries, keys, values: each of four ranks has a quarter of the "
            "tokens. Then two all-to-alls over all ranks, the first with three times "
            "the numbers of the second. Attention and out: each rank has its quarter "
            "again.")

# %% [markdown]
# Attention itself happens between the two exchanges: there each rank has all tokens of one head.

# %%
lab.show("course.parallel.context_parallel.attention.AllToAllAttend")

# %% [markdown]
# > **Question.** What limits the number of ranks here, and how does tensor parallelism change this limit?
#
# <details><summary>Answer</summary>
# The number of heads: each rank needs at least one whole head, and tp has already divided the heads. If 32 query heads
# share 8 heads of keys and values, the limit is lower still. The ring has no such limit. Also, an all-to-all cannot
# overlap attention, because attention cannot begin before it ends.
# </details>
#
# How many bytes does each way send? Call a rank's piece of the keys one **unit**: samples × tokens / n × width numbers.
# Its values, queries and answer are one unit each.
#
# > **Predict**, for n = 4, how many units one rank sends in one layer, forward and backward together:
# >
# > - gather: an all-gather of keys and values, then a reduce-scatter of their gradients;
# > - ring: n − 1 rounds of keys and values, twice, and n − 1 rounds of their gradients;
# > - all-to-all: three units before attention and one after, of which the share (n − 1) / n leaves the rank; and the same
# >   backward.

# %%
# your prediction
my_units = {"gather": 10.0, "ring": 10.0, "all_to_all": 10.0}


# %%
def units_sent(method: str) -> float:
    """What this rank sends for the attention of one layer, forward and backward, in
    units of its piece of the keys."""
    settings = config.load("gpt-demo", ["train.device=cpu", "train.global_batch=2",
                                        "parallel.cp=4", f"parallel.context={method}",
                                        "model.depth=1", "precision=fp64"])
    training = assemble.assemble(settings,
                                 build_mesh(settings.parallel, parallel.join("cpu")))
    _, calls = bytes_sent.collectives(lambda: verify.one_step(training, 1))
    # not the all-reduces of loss and gradients
    moves = ("all-gather", "reduce-scatter", "all-to-all", "send")
    unit = 2 * settings.model.context / 4 * settings.model.dim * 8
    return sum(call.sent for call in calls if call.op.startswith(moves)) / unit


for method in my_units:
    lab.beside(method, my_units[method], ranks(4)(units_sent, method)[0], "units",
               "counted")

# %% [markdown]
# **What you should see:** 12, 18 and 6. All-to-all sends least, and with more ranks it sends less, because the pieces
# shrink. The bytes of gather and ring do not shrink: with many ranks, n − 1 pieces are nearly all tokens. The ring sends most,
# and in bf16 even more, because its gradients travel in float32. But the ring hides this behind computation. A round's work
# grows with the square of a piece's tokens, and its bytes grow linearly. So with enough tokens a round computes for longer than
# it sends.
#
# | | bytes | memory for keys and values | limit |
# |---|---|---|---|
# | gather | 4 (n − 1) units, not hidden | of all tokens, in each layer | memory |
# | ring | 6 (n − 1) units, hidden behind computation | its own, in each layer | pieces long enough to hide the sending |
# | all-to-all | 8 (n − 1) / n units, not hidden | of its heads | heads |
#
# ## One rule for all gradients
#
# All ranks of `cp` have the same weights, and each rank has seen some of the tokens. Two steps make the gradients correct:
#
# - The second seam sums the loss over `cp`, in *both* directions: an all-reduce forward and an all-reduce backward. So every rank
#   has the same loss, and its gradients are `cp` times too large.
# - The library averages **all** gradients over `dp × cp`, which divides them by `cp`. No parameter needs special
#   treatment.

# %%
lab.show("course.parallel.token_split.SumOverSplitTokens")

# %% [markdown]
# > **Question.** Suppose the seam's backward pass were the identity. By what factor would the gradients be wrong? Would
# > training with Adam show it?
#
# <details><summary>Answer</summary>
# They would be too small by a factor of cp. Adam hides such a factor (lesson 07); only gradient clipping would act at
# different times. Plain gradient descent, which <code>course verify</code> uses, shows the factor at once.
# </details>
#
# > **Predict:** does a GPT with causal ring attention train like a single process, and to how many digits? And with tensor
# > parallelism as well?

# %%
for layout in (["parallel.cp=2", "parallel.tp=2"], ["parallel.cp=4"]):
    ring = [*layout, "parallel.context=ring"]
    equal = verify.main("gpt-demo", [*ring, "model.depth=1", "train.steps=1"])

# %% [markdown]
# Ask this of every framework. In engineers' notes about a diffusion transformer (lesson 15), context parallelism changed the
# loss after 400 steps from 0.183 to 0.215. Nothing crashed, and nobody compared.
#
# ## Causal attention, and who waits for whom
#
# In a language model a token sees only itself and the tokens before it, so only about half of all scores are needed. Take 4 ranks
# and give each one a quarter of the tokens, in order. The picture shows the scores, with queries down and keys across. The
# color says which rank computes a score. The slider selects the round: in round t, rank r has the keys of rank r − t.
#
# > **Predict, before you move it.** A round lasts until the slowest rank is done. Over all four rounds, what percentage of
# > the time does an average rank work? And with many ranks?

# %%
my_percent = 100.0               # your prediction, for 4 ranks

# %%
def one_piece_each(turn: int):
    """A round of a causal ring in which every rank has neighboring tokens."""
    return context_parallel.ring(4, zigzag=False, turn=turn)


slider = widgets.explore(one_piece_each, turn=[0, 1, 2, 3],
                         alt="The triangle of causal scores, by rank and round; "
                         "beside it the work of each rank in this round.")

# %%
at_work = context_parallel.efficiency(context_parallel.ring_work(4, zigzag=False))
lab.beside("4 ranks, one piece each", my_percent, 100 * at_work, "%", "computed")

# %% [markdown]
# <details><summary>Answer</summary>
# 57%. In round 0 each rank has a triangle, half of a square. In every later round some ranks have a whole square. The others
# have nothing, because the keys they hold lie in the future. The round still lasts as long as a square. The n ranks have n²/2
# squares to compute in n − ½ rounds, so the share is n / (2 n − 1). With many ranks, half of the machine waits. For 8 GPUs this
# rule gives 53%, and <a href="https://github.com/zhuzilin/ring-flash-attention">ring-flash-attention</a> reports 54%.
# </details>
#
# The only problem is how the work is distributed. Rank 0 has the beginning, which sees little; rank 3 has the end, which sees
# everything. So give every rank some of both. Cut the tokens into **2 n** pieces. Rank r gets piece r from the front and
# piece r from the back: a **zigzag**.
#
# ## Exercise: the zigzag
#
# `total` is a multiple of `2 * size`. Return a tuple: for each rank the positions of its tokens, the front piece first.

# %% exercise="zigzag"
from course.parallel.token_split import zigzag

# %%
check("zigzag")

# %%
for rank, positions in enumerate(zigzag(16, 4, torch.device("cpu"))):
    print(f"rank {rank}: {positions.tolist()}")

# %% [markdown]
# > **Predict.** In a round after the first, rank r has the keys of another rank s. These are a front piece and a back
# > piece, and its own queries are a front piece and a back piece too. Of the four pairs of pieces, how many must be
# > computed if s < r? And if s > r? Draw them, then look at the picture.

# %%
my_pairs = {"s < r": 4, "s > r": 4}                  # your prediction, of four

# %%
def in_a_zigzag(turn: int):
    """A round of a causal ring in which every rank has a piece from the front and one
    from the back."""
    return context_parallel.ring(4, zigzag=True, turn=turn)


slider = widgets.explore(in_a_zigzag, turn=[0, 1, 2, 3],
                         alt="The same triangle of causal scores, distributed in a "
                         "zigzag, by rank and round. "
                             "Beside it, bars: in each round all ranks have the same "
                         "work.")

# %% [markdown]
# After round 0, each round computes a full rectangle without a mask, for which attention is fastest. Only round 0, a
# rank's own keys, needs the triangle.
#
# ## Count the work of a real ring
#
# A picture can be wrong, so count what the library computes. A ring of 4 ranks answers 64 tokens. In each round, how many
# scores does each rank request from `block_attention.forward`? The cell runs it twice: with one piece for each rank, and
# with your zigzag.
#
# > **Predict** both tables, in squares of 16 × 16 scores. Count round 0 as a whole square: unlike a fused kernel, the CPU
# > code computes the masked half too.

# %%
def pieces_in_a_row(total: int, size: int, device: torch.device) -> tuple[Tensor, ...]:
    return torch.arange(total, device=device).chunk(size)


def all_or_nothing(causal: bool, rank: int, source: int, queries: int,
                   keys: int) -> tuple[slice, slice]:
    return (slice(None), slice(None)) if source < rank else (slice(0, 0), slice(None))


# they replace these
pieces_in_a_row.__name__, all_or_nothing.__name__ = "zigzag", "visible"


def counted_ring(*mine) -> tuple[list[float], float]:
    """Scores computed in each round on this rank, in squares, and how far the answer is
    from serial attention."""
    qkv = torch.randn(3, 1, 2, 64, 8, generator=torch.Generator().manual_seed(1),
                      dtype=torch.float64)
    serial = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
    squares, original = [], block_attention.forward

    def counting_forward(q: Tensor, k: Tensor, v: Tensor,
                         causal: bool) -> tuple[Tensor, Tensor]:
        squares.append(q.shape[2] * k.shape[2] / 16**2)
        return original(q, k, v, causal)

    with lab.yours(*mine):
        world = parallel.join("cpu")
        tokens = SplitTokens({}, build_mesh(Parallel(dp=1, cp=world.size), world).cp,
                             Axis("tp"), zigzag=True)
        tokens.cut({"position": torch.zeros(1, 64)})
        order = tokens.order(qkv.device)[tokens.cp.rank]
        block_attention.forward = counting_forward
        try:
            answer = ring_attention.RingAttend(True,
                                               tokens)(*qkv.index_select(3, order))
        finally:
            block_attention.forward = original
    return squares, (answer - serial.index_select(2, order)).abs().max().item()


ways = {"one piece each": (pieces_in_a_row, all_or_nothing), "zigzag": (zigzag,)}
for label, mine in ways.items():
    found = ranks(4)(counted_ring, *mine)
    print(f"{label}; largest error {max(error for _, error in found):.0e}")
    for rank, (squares, _) in enumerate(found):
        print(f"   rank {rank}: " + "  ".join(f"{square:.2f}" for square in squares)
              + "   in rounds 0 to 3")

# %% [markdown]
# **What you should see:** both answers are correct. Round 0 is a whole square in both. After that, one piece for each rank
# gives whole squares and zeros. The zigzag gives half a square to every rank in every round.
#
# ## Exercise: what a round computes
#
# Above, the library decided which half to compute in each round. Now write that function. Return two slices: which rows (of this
# rank's queries) and which columns (of the keys from `source`) see each other. If attention is not causal, everything sees
# everything. If it is causal, the tokens are split in a zigzag. `queries` and `keys` count both pieces together. The rank has
# already handled its own keys, so `source` differs from `rank`.

# %% exercise="visible"
from course.parallel.context_parallel.ring_attention import visible

# %%
check("visible")

# %%
print("your prediction, pairs to compute out of four:", my_pairs)
for source in (0, 2):
    print(f"rank 1, keys of rank {source}: rows, columns",
          visible(True, 1, source, 8, 8))

# %% [markdown]
# <details><summary>Answer</summary>
# Two of four, either way. If s < r, the front piece of s lies before both pieces of r, and its back piece after both: all
# rows, the first half of the columns. If s > r, the front piece of r lies before both pieces of s, and its back piece
# after both: the second half of the rows, all columns.
# </details>
#
# ## Open task: causal attention with its backward pass
#
# *Optional, about 60 minutes. Nothing later needs it.* The library's ring needs a zigzag for causal attention. Write one for
# tokens in order: rank 0 has the first tokens, the last rank has the last ones. It stays unbalanced, but keys and values need
# to travel in one direction only. Our solution has about 50 lines, half of them in the backward pass.
#
# **Contract**
#
# - `CausalAttention` is a `torch.autograd.Function`. Write `forward` and `backward`. The docstrings have the shapes.
# - Each query sees its own key and all keys before it. Scores are multiplied by d^-0.5.
# - `lengths` holds each rank's number of tokens, which may be unequal. `axis.ranks[i]` is the global rank at position i, and
#   messages travel in `axis.group`. The axis need not have all ranks of the world.
# - After the backward pass, each rank has the gradients of its own q, k and v from the queries of *all* ranks.
# - When `forward` or `backward` returns, every send has completed.
#
# **Levels.** Each one counts by itself, once the first is reached:
#
# | level | what the check counts |
# |---|---|
# | correct | the output and three gradients match one process |
# | byte budget | each piece of keys and values reaches each later rank once per pass, and its gradients return once |
# | memory budget | no tensor has the keys or the scores of all tokens; between the passes a rank keeps its own tokens only |
# | overlapped | in the forward pass, a block is computed between each receive and the wait for it |
#
# Start with correct. `lab.hint("causal-attention")` opens the first of three hints, and each further call opens the next one.

# %% exercise="causal-attention"
from course.lab.exercises.lesson11_open_task import CausalAttention  # noqa: F401

# %%
check("causal-attention")

# %% [markdown]
# ## Summary
#
# - Activations grow linearly with the tokens, and context parallelism divides them. Tokens meet only in attention.
# - Answers for blocks of keys merge exactly if each brings its log-sum-exp.
# - A causal ring of neighboring tokens wastes almost half of the time. A zigzag balances every round.
# - Gather costs memory, the ring needs long pieces, and all-to-all needs enough heads.
# - One seam sums the loss over cp, and all gradients are averaged over dp × cp.
#
# ## Questions
#
# 1. A model has 8 heads of keys and values, and tp=4. Which ways allow cp=4?
# 2. You double both the sample length and cp. What happens to each rank's memory and attention time?
# 3. Each token sees only the 4096 tokens before it. Which rounds of a ring could you skip?
#
# **Check your work from a terminal.** Save the notebook, then run `course check
# notebooks/11_context_parallel_mine.ipynb`. Next: [lesson 12](12_pipeline_parallel.ipynb), which spreads the layers over
# GPUs.
#
# ## Appendix (optional): on GPUs
#
# Efficiency is the time on one GPU divided by four times the time on four. Here four H200s run attention with 32 heads of
# width 128, forward and backward, in bf16. Without a causal mask, the ring reaches {result: ring_16k | .0%} at 16,384
# tokens and {result: ring_64k | .0%} at 65,536.
#
# > **Predict** the efficiency of a plain gather: better or worse than the ring, which hides its sending?

# %%
my_gather = {"16k": 50.0, "64k": 80.0}               # your prediction, in percent

# %%
# cases such as "16k full ring"; "full" is not causal
rows = lab.results("cp_h200")["rows"]
efficiency = {row["case"]: 100 * row["efficiency"] for row in rows if row["gpus"] == 4}
for length, percent in my_gather.items():
    lab.beside(f"gather, {length} tokens", percent, efficiency[f"{length} full gather"],
               "%", "recorded")

# %%
lab.recorded("cp_h200", scaling_table.table(rows,
                                            lambda case: " ".join([*case.split()[:2],
                                                                   "one GPU"])),
             why="This library's three ways and PyTorch's")

# %% [markdown]
# **What you should see:** the gather wins, with {result: gather_16k | .0%} and {result: gather_64k | .0%}. Its exposed
# communication costs less than the ring's four smaller kernels and three merges. All-to-all is the fastest of all, in
# every row. With a causal mask and 64k tokens, the gather is {result: causal_gather | .0%} efficient and the ring
# {result: causal_ring | .0%}. The gather needs a mask that only flash attention supports here.
# Flash attention runs at {result: flash_over_cudnn | .0%} of cuDNN's speed.
#
# The ring has the largest peak memory of the three here, because the benchmark runs one layer and counts blocks in flight. In a
# deep model, the keys and values that each layer keeps matter more.
#
# **Whole training steps on two GPUs**, each in a CUDA graph. GPT 350M with samples of 8,192 tokens takes
# {result: whole_step(LONG) | .0f} ms on one GPU. On two it takes {result: whole_step(LONG, "all_to_all") | .0f} ms by
# all-to-all, {result: whole_step(LONG, "ring") | .0f} ms in a ring, and {result: whole_step(LONG, "gather") | .0f} ms by
# a gather. DiT-XL/2 has 256 tokens per image: {result: whole_step(SHORT) | .0f} ms on one GPU, and
# {result: whole_step(SHORT, "gather") | .0f} ms on two by a gather, the fastest of the three. Short samples gain nothing.
# Without a graph it is worse: {result: whole_step(SHORT, "gather", False) | .0f} ms. Each host launches as many kernels as
# before, for half the work.
