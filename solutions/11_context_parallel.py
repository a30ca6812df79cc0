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
# parallelism** cuts the sample itself: each rank has some of its *tokens*, through the whole model. Almost nothing in a
# transformer minds. Attention does, since every token looks at all others. There are three ways to make that possible,
# and you write the parts of two: gathering keys and values, and a ring that never holds more than two pieces. For the
# ring you need the trick behind flash attention, and a way to share out the work of causal attention that leaves nobody
# waiting.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 2 hours |
# | computing | 1 minute on two cores, most of it in checks |
# | you write | keys and values in order (3 lines), the merge of two answers (3), a zigzag (2), what a round computes (3) |
# | you measure | activations against tokens, bytes sent, the balance of causal rings; and read times of 4 H200s |
#
# You should have done [lesson 10](10_tensor_parallel.ipynb). Work in a copy: *File → Save Notebook As…*,
# `11_context_parallel_mine.ipynb`.

# %%
import torch
from torch import Tensor

from course.training import assemble
from course.lab.instruments import tensor_memory
from course.lab.instruments import bytes_sent
from course import config, parallel
from course.training import verify
from course.config import Parallel
from course.lab.figures import context_parallel, scaling_table, widgets
from course.lab import notebook as lab
from course.lab.notebook import check
from course.ranks.notebook_ranks import ranks
from course.parallel import Axis, build_mesh
from course.parallel.context_parallel import block_attention, ring_attention
from course.parallel.tensor_parallel.sequence import SplitTokens, permute_tokens        # noqa: F401

lab.begin("11")

# %% [markdown]
# ## Memory against tokens
#
# Tensor parallelism cuts a layer's width, pipelines cut its depth. With long samples neither is the problem.
#
# > **Predict.** For its backward pass, a GPT block keeps some megabytes of a sample of 512 tokens. How many times as
# > much does it keep of a sample of 2048? PyTorch's attention does not keep the scores, tokens × tokens of them; it
# > computes them again. And on two ranks with half of the tokens each?

# %%
my_times = 16.0                  # your prediction: 2048 tokens over 512, one process
my_share = 1.0                   # your prediction: each of two ranks over one process, at 2048 tokens


# %%
def kept_by_a_block(tokens: int, *overrides: str) -> int:
    """Bytes that one block of a GPT keeps of one sample for the backward pass, on this rank."""
    settings = config.load("gpt-demo", [f"model.context={tokens}", "train.device=cpu", "train.global_batch=1", *overrides])
    training = assemble.assemble(settings, build_mesh(settings.parallel, parallel.join("cpu")))
    model = training.model
    batch = model.prepare(model.example(1, torch.device("cpu")), training.progress.step)
    batch = training.layout.tokens.cut(batch)
    x = model.embed(batch)
    return tensor_memory.saved_for_backward(lambda: model.blocks["0"](x, batch), model.parameters())[1]


kept = {tokens: ranks(1)(kept_by_a_block, tokens)[0] for tokens in (512, 2048)}
halved = max(ranks(2)(kept_by_a_block, 2048, "parallel.cp=2", "parallel.context=ring"))
lab.beside("2048 tokens over 512", my_times, kept[2048] / kept[512], "times", "counted")
lab.beside("each of two ranks", my_share, halved / kept[2048], "of one process", "counted")

# %% [markdown]
# **What you should see:** four times as much for four times the tokens: memory is *linear* in the tokens, and half of
# the tokens take half of the memory, or almost. The work of attention is quadratic, so at some length it is nearly all
# the work there is.
#
# ## What does a piece need of the others?
#
# Give each rank a piece of the tokens, and all the weights. Go through a block: norms, linears, GELU, residual sums,
# dropout.
#
# > **Question.** Which of these need tokens of another rank? And what, besides attention, does at the very end?
#
# <details><summary>Answer</summary>
# None: they work on each token alone. Attention needs the <i>keys and values</i> of all tokens, and only these: queries
# stay where they are. And the loss: it is a sum over all tokens, so at the end the ranks' sums have to be added up.
# </details>
#
# So there are two **seams** in the model. One is attention's core, which is given this rank's queries, keys and values:
# there surgery puts a module that gets the keys and values of the other ranks. At the other, a loss's sum over tokens
# is completed. Nothing else in the model knows.

# %%
lab.show("course.parallel.context_parallel.attention.apply_context_parallel")

# %% [markdown]
# ## First way: gather keys and values
#
# The simplest: all-gather keys and values, so that every rank has all of them, and answer one's own queries.
#
# You wrote a gather in lesson 10; it knows its backward pass, a reduce-scatter. What is left is a matter of **order**. A
# rank need not have neighbouring tokens (you will soon see why), and the gather puts the pieces together rank by rank.
#
# - `tokens.order(device)` is a tuple: for each rank the positions of its tokens, in the order in which it has them;
# - `tokens.cp` is the axis, and `mappings.gather(x, dim, axis, n)` your gather of lesson 10. Pieces need not be equally long:
#   n is the number of all tokens;
# - `tokens.zigzag` says whether the pieces are in another order than that of time. If not, leave them as they come;
# - `permute_tokens(x, dim, index)` is `x.index_select(dim, index)` for an index that has every place once. Either is right. But
#   `index_select` cannot know that no place comes twice, so on a GPU it adds gradients up, atomically, number by number;
#   `permute_tokens` copies them back by the inverse.
#
# > **Question, before you write.** Two ranks, order `[0, 1, 6, 7]` and `[2, 3, 4, 5]`. The gathered keys stand as 0 1 6 7 2
# > 3 4 5. Which index brings them into the order of time?
#
# <details><summary>Answer</summary>
# Position 2 stands in place 4, position 6 in place 2: the index is 0 1 4 5 6 7 2 3. It is the <i>inverse</i> of the
# permutation, which <code>argsort</code> gives: the places, sorted by position.
# </details>
#
# ## Exercise: keys and values, in order

# %% exercise="gather-in-order"
from course.parallel.context_parallel.attention import gather_in_order  # noqa: F401

# %%
check("gather-in-order")

# %% [markdown]
# > **Question.** This is right, simple, and fast. What is wrong with it for a million tokens?
#
# <details><summary>Answer</summary>
# Every rank holds the keys and values of <i>all</i> tokens, in every layer. The rest of the activations is cut by cp; these
# are not. With many ranks they are what memory goes to.
# </details>
#
# ## Second way: a ring
#
# Let the keys and values go round instead. In each round every rank answers its queries for the block of keys that is
# there, passes it on, and gets the next. After as many rounds as there are ranks every query has met every key. No rank
# ever holds more than two blocks, and while it computes with one, the next is under way.
#
# But a softmax has a denominator, the sum over **all** keys. Can one answer for a block, not knowing the others?

# %%
generator = torch.Generator().manual_seed(0)
scores = torch.randn(1, 6, generator=generator, dtype=torch.float64) * 3         # of one query with 6 keys
values = torch.randn(6, 2, generator=generator, dtype=torch.float64)
whole = scores.softmax(-1) @ values
first, second = scores[:, :3].softmax(-1) @ values[:3], scores[:, 3:].softmax(-1) @ values[3:]
print("all six keys:   ", whole)
print("the first three:", first)
print("the last three: ", second)
print("their mean:     ", (first + second) / 2)

# %% [markdown]
# Not the mean. Each block's answer is a weighted mean of its values, divided by its own denominator $Z = \sum_j e^{s_j}$.
# For all keys the denominator is $Z_1 + Z_2$, so
#
# $$\text{out} = \frac{Z_1\,\text{out}_1 + Z_2\,\text{out}_2}{Z_1 + Z_2}$$
#
# A mean again, weighed by the denominators. So a block returns, besides its answer, one number for each query: the
# *logarithm* of its denominator, the **log-sum-exp**, $\text{lse} = \log Z$. Why the logarithm?
#
# > **Predict** what the next cell prints.

# %%
big = torch.tensor([1000.0, 999.0])
print("exp, sum, log:", big.exp().sum().log().item(), "  logsumexp:", big.logsumexp(0).item())

# %% [markdown]
# Scores can be large, and $e^{1000}$ is no number in any format. But only *ratios* of denominators matter, and these are
# differences of logarithms: with $\text{lse} = \log(e^{\text{lse}_1} + e^{\text{lse}_2})$, which `torch.logaddexp` computes
# safely, the weights are $e^{\text{lse}_1 - \text{lse}}$ and $e^{\text{lse}_2 - \text{lse}}$. Neither exponent is ever
# above zero. This is the **online softmax** (Milakov and Gimelshein 2018, arXiv:1805.02867); flash attention does it inside
# one GPU, block by block, and the ring (Liu, Zaharia and Abbeel 2023, arXiv:2310.01889) from GPU to GPU.
#
# ## Exercise: merge
#
# `out` (B, h, T, d) and `lse` (B, h, T) are the answer for some keys, `new_out` and `new_lse` that for others. Change
# `out` and `lse` into the answer for all of these keys, **in place**: the ring passes views, a part of its queries at a
# time.

# %% exercise="merge"
from course.parallel.context_parallel.ring_attention import merge

# %%
check("merge")

# %%
out, lse = first.clone(), scores[:, :3].logsumexp(-1)
merge(out, lse, second, scores[:, 3:].logsumexp(-1))
print("merged, differs from all six keys by", (out - whole).abs().max().item())

# %% [markdown]
# With your merge in it, this is all of the ring's forward pass. `rounds` does the sending: it yields the keys and values of
# one rank after the other, its own first, while the next are under way. `blocks.forward` is attention with one block of
# keys: on GPUs a fused kernel, which returns the log-sum-exp because its own backward pass needs it.
#
# `register_operator` makes the function one operation to PyTorch, such as a matrix multiplication is: `torch.compile` does not
# look into it, so what is sent beside what is computed stays so. An operator takes no objects, so the group goes by its name.

# %%
lab.show("course.parallel.context_parallel.ring_attention.ring")
lab.show("course.parallel.context_parallel.ring_attention.rounds")
lab.show("course.parallel.context_parallel.ring_attention.Ring")
lab.show("course.parallel.context_parallel.ring_attention.ring_backward")

# %% [markdown]
# > **Question.** Look at `save_for_backward`. What does the ring keep, and what does it do again in the backward pass? What
# > travels home there?
#
# <details><summary>Answer</summary>
# It keeps its own queries, keys, values, answer and log-sum-exp, nothing of other ranks. So the keys go round a second
# time. Each rank adds its part to the gradients of keys that are not its own, and these travel after their keys until they
# are back where they belong. Backward, the <i>final</i> log-sum-exp gives the right softmax for each block at once: no
# merging.
# </details>

# %% [markdown]
# ## Causal attention, and who waits for whom
#
# In a language model a token sees only tokens before it: half of all scores. Take 4 ranks and give each one a quarter of
# the tokens, in order. The picture shows the scores, queries down, keys across, in the colour of the rank that computes
# them. The slider goes through the rounds: in round t rank r meets the keys of rank r − t.
#
# > **Predict, before you move it.** A round lasts until the slowest rank is done. What share of its time does an average
# > rank work, over all four rounds? And with many ranks?

# %%
my_percent = 100.0               # your prediction, for 4 ranks

# %%
def one_piece_each(turn: int):
    """A round of a causal ring in which every rank has neighbouring tokens."""
    return context_parallel.ring(4, zigzag=False, turn=turn)


slider = widgets.explore(one_piece_each, turn=[0, 1, 2, 3],
                         alt="The triangle of causal scores, by rank and round; beside it the work of each rank in this round.")

# %%
at_work = context_parallel.efficiency(context_parallel.ring_work(4, zigzag=False))
lab.beside("4 ranks, one piece each", my_percent, 100 * at_work, "%", "computed")

# %% [markdown]
# <details><summary>Answer</summary>
# 57%. In round 0 each rank has a triangle, half of a square. After that, in each round some ranks have a whole square and
# the others nothing, as keys that lie ahead are of no use to them; and the round lasts as long as a square. n ranks have
# n²/2 squares to do in n − ½ rounds: n / (2 n − 1), so almost half of the machine waits. On 8 GPUs
# this rule says 53%, and <a href="https://github.com/zhuzilin/ring-flash-attention">ring-flash-attention</a> reports 54% on 8
# H800s, forward and backward.
# </details>
#
# The work is there, it is only badly shared: rank 0 has the beginning, which sees little, rank 3 the end, which sees
# everything. So give everyone some of each. Cut the tokens into **2 n** pieces, and give rank r the piece r from the front
# and piece r from the back: a **zigzag**.
#
# ## Exercise: the zigzag
#
# `total` is a multiple of `2 * size`. Return a tuple: for each rank the positions of its tokens, the front piece first.

# %% exercise="zigzag"
from course.parallel.tensor_parallel.sequence import zigzag

# %%
check("zigzag")

# %%
for rank, positions in enumerate(zigzag(16, 4, torch.device("cpu"))):
    print(f"rank {rank}: {positions.tolist()}")

# %% [markdown]
# > **Predict.** In a round after the first, rank r has the keys of another rank s: a front piece and a back piece, as it
# > has a front and a back piece of queries. Of the four pairs of pieces, how many have to be computed if s < r? And if s >
# > r? Draw them.

# %%
my_pairs = {"s < r": 4, "s > r": 4}                  # your prediction, of four

# %% [markdown]
# ## Exercise: what a round computes
#
# Return two slices: which rows (of this rank's queries) and which columns (of the keys from `source`) see each other.
# If attention is not causal, everything sees everything. If it is, each rank has a zigzag: `queries` is the number of
# both pieces' rows together. The rank's own keys are done already, so `source` differs from `rank`.

# %% exercise="visible"
from course.parallel.context_parallel.ring_attention import visible

# %%
check("visible")

# %%
print("of four pairs of pieces, you said, have to be computed:", my_pairs)

# %% [markdown]
# <details><summary>Answer</summary>
# s < r: the front piece of s lies before both pieces of r, and its back piece behind both: all rows, the first half of the
# columns. s > r: the front piece of r lies before all that s has, its back piece behind all of it: the second half of the
# rows, all columns. Two pairs of four, either way.
# </details>
#
# Two of four, for every rank in every round. And no mask: each of them is a full rectangle, for which attention is fastest.
# Only the rank's own keys, round 0, need the triangle.

# %%
def in_a_zigzag(turn: int):
    """A round of a causal ring in which every rank has a piece from the front and one from the back."""
    return context_parallel.ring(4, zigzag=True, turn=turn)


slider = widgets.explore(in_a_zigzag, turn=[0, 1, 2, 3],
                         alt="The same triangle, shared in a zigzag; beside it the work of each rank in this round.")

# %% [markdown]
# ## Seen, not only drawn
#
# Pictures can be wrong too. Count what the library computes: how many scores each rank asks `blocks.forward` for, in each
# round, when a real ring of 4 ranks answers 64 tokens. Once with your zigzag, once with one piece each, for which `zigzag`
# and `visible` have to be others.
#
# > **Predict** both tables, in squares of 16 × 16 scores. (Round 0 counts as a whole square here: a fused kernel leaves out
# > half of it, this one does not.)

# %%
def pieces_in_a_row(total: int, size: int, device: torch.device) -> tuple[Tensor, ...]:
    return torch.arange(total, device=device).chunk(size)


def all_or_nothing(causal: bool, rank: int, source: int, queries: int, keys: int) -> tuple[slice, slice]:
    return (slice(None), slice(None)) if source < rank else (slice(0, 0), slice(None))


pieces_in_a_row.__name__, all_or_nothing.__name__ = "zigzag", "visible"          # whose place they take


def counted_ring(*mine) -> tuple[list[float], float]:
    """Scores computed in each round on this rank, in squares, and how far the answer is from serial attention."""
    qkv = torch.randn(3, 1, 2, 64, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    serial = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
    squares, original = [], block_attention.forward

    def counting_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        squares.append(q.shape[2] * k.shape[2] / 16**2)
        return original(q, k, v, causal)

    with lab.yours(*mine):
        world = parallel.join("cpu")
        tokens = SplitTokens({}, build_mesh(Parallel(dp=1, cp=world.size), world).cp, Axis("tp"), zigzag=True)
        tokens.cut({"position": torch.zeros(1, 64)})
        order = tokens.order(qkv.device)[tokens.cp.rank]
        block_attention.forward = counting_forward
        try:
            answer = ring_attention.RingAttend(True, tokens)(*qkv.index_select(3, order))
        finally:
            block_attention.forward = original
    return squares, (answer - serial.index_select(2, order)).abs().max().item()


for label, mine in {"one piece each": (pieces_in_a_row, all_or_nothing), "zigzag": (zigzag, visible)}.items():
    found = ranks(4)(counted_ring, *mine)
    print(f"{label}; wrong by at most {max(error for _, error in found):.0e}")
    for rank, (squares, _) in enumerate(found):
        print(f"   rank {rank}: " + "  ".join(f"{square:.2f}" for square in squares) + "   squares, round by round")

# %% [markdown]
# **What you should see:** both are right. Round 0, a rank's own keys, is counted as a whole square in both. After it come whole
# squares and zeros with one piece each, and with the zigzag a half on every rank in every round.
#
# ## Third way: exchange tokens for heads
#
# Heads do not look at one another. So turn the cut round for the time of attention: an **all-to-all** sends each rank all
# tokens of *some heads*. Attention runs as it always does, causal or not, and another all-to-all brings tokens back
# together (Ulysses: Jacobs et al. 2023, arXiv:2309.14509).

# %%
lab.show("course.parallel.context_parallel.attention.AllToAllAttend")

# %% [markdown]
# > **Question.** What limits the number of ranks here, and what does tensor parallelism have to do with it?
#
# <details><summary>Answer</summary>
# The number of heads: each rank needs at least one whole head, of those that tp has left. A model with 32 query heads that
# share 8 heads of keys and values leaves even less. The ring has no such limit. And an all-to-all cannot hide behind
# attention: attention cannot begin before it.
# </details>
#
# How many bytes does each way send? Let a rank's piece of the keys be one **unit**, samples × tokens / n × width numbers;
# so are its values, queries and answer.
#
# > **Predict** for n = 4, forward and backward together, what one rank sends in one layer, in units. Gather: keys and
# > values, all-gathered, then reduce-scattered. Ring: n − 1 rounds of keys and values, twice, and n − 1 times their
# > gradients. All-to-all: three units and one, of which (n − 1) / n leave the rank, and the same backward.

# %%
my_units = {"gather": 10.0, "ring": 10.0, "all_to_all": 10.0}           # your prediction


# %%
def units_sent(method: str) -> float:
    """What this rank sends for the attention of one layer, forward and backward, in units of its piece of the keys."""
    settings = config.load("gpt-demo", ["train.device=cpu", "train.global_batch=2", "parallel.cp=4", f"parallel.context={method}",
                                        "model.depth=1", "precision=fp64"])
    training = assemble.assemble(settings, build_mesh(settings.parallel, parallel.join("cpu")))
    _, calls = bytes_sent.collectives(lambda: verify.one_step(training, 1))
    moves = ("all-gather", "reduce-scatter", "all-to-all", "send")      # not the all-reduces of loss and gradients
    unit = 2 * settings.model.context / 4 * settings.model.dim * 8
    return sum(call.sent for call in calls if call.op.startswith(moves)) / unit


for method in my_units:
    lab.beside(method, my_units[method], ranks(4)(units_sent, method)[0], "units", "counted")

# %% [markdown]
# **What you should see:** 12, 18 and 6. All-to-all sends least, and less with more ranks, as pieces get smaller. Gather and
# ring do not: (n − 1) pieces are nearly all tokens, however many ranks there are. The ring sends most (and more in bf16:
# gradients travel in float32), but hides it: with enough tokens a round computes longer than it sends, as computing grows
# with the square of a piece's tokens and sending with the tokens.
#
# | | bytes | memory for keys and values | limit |
# |---|---|---|---|
# | gather | 4 (n − 1) units, not hidden | all tokens', in each layer | memory |
# | ring | 6 (n − 1) units, hidden behind work | its own, in each layer; two at work | pieces long enough to hide the sending |
# | all-to-all | 8 (n − 1) / n units, not hidden | its heads' | heads |
#
# ## One rule for all gradients
#
# The weights are the same on all ranks of `cp`, and each rank has seen some of the tokens. What makes their gradients
# right?
#
# - The loss's sum over tokens passes through one seam. There it is added up over `cp`, in *both* directions: all-reduce |
#   all-reduce. So every rank has the same loss, and its gradient comes out `cp` times too large.
# - **All** gradients, of whatever parameter, are averaged over `dp × cp`, which divides by `cp`. No list of parameters that
#   need special care.

# %%
lab.show("course.parallel.tensor_parallel.sequence.SumOverSplitTokens")

# %% [markdown]
# > **Question.** Suppose the seam's backward pass were the identity, and everything else as it is. By what factor would the
# > gradients be wrong, and would training with Adam notice?
#
# <details><summary>Answer</summary>
# Too small by a factor of cp. Adam would hide that (lesson 07). Clipping would act at other times, and that is all that anybody
# could see. Plain gradient descent, which <code>course verify</code>
# uses, is wrong by that factor at once.
# </details>
#
# > **Predict:** does a GPT with causal ring attention over a zigzag train as one process does, to how many digits? With
# > tensor parallelism beside it?

# %%
for layout in (["parallel.cp=2", "parallel.tp=2"], ["parallel.cp=4"]):
    equal = verify.main("gpt-demo", [*layout, "model.depth=1", "train.steps=1"])

# %% [markdown]
# Ask this of every framework. In a table of a diffusion transformer from engineers' notes (lesson 15), the loss after 400 steps
# is 0.183 with flash and with fused attention, and 0.215 with context parallelism over 2 GPUs. Nothing crashed. Nobody
# compared.
#
# ## On GPUs
#
# Four H200s, 32 heads of 128, forward and backward in bf16, not causal. This library's ring is 60% efficient at 16,384 tokens
# and 88% at 65,536. Efficiency is the time on one GPU, over four times that on four.
#
# > **Predict** it for a plain gather of keys and values, at the same two lengths: better or worse than a ring, which hides
# > its sending?

# %%
my_gather = {"16k": 50.0, "64k": 80.0}               # your prediction, in percent

# %%
rows = lab.results("cp_h200")["rows"]                # cases such as "16k full ring"; "full" is not causal
efficiency = {row["case"]: 100 * row["efficiency"] for row in rows if row["gpus"] == 4}
for length, percent in my_gather.items():
    lab.beside(f"gather, {length} tokens", percent, efficiency[f"{length} full gather"], "%", "recorded")

# %% [markdown]
# **What you should see:** the plain gather wins, 77% and 92%. Its sending is not hidden, and still costs less than what the ring
# adds: four kernels in place of one, and three merges. Over slower links, or where memory runs out, the ring can win. So
# measure your own case; the library keeps all three, and `parallel.context` chooses.

# %%
lab.recorded("cp_h200", scaling_table.table(rows, lambda case: " ".join([*case.split()[:2], "one GPU"])),
             why="This library's three ways beside PyTorch's")

# %% [markdown]
# **What you should see:** all three gain with the length, because arithmetic grows with its square and bytes do not. On four
# GPUs of one node all-to-all is the fastest in every row: its bytes are few, and each head stays one large kernel. Causal, the
# plain gather falls behind: the two pieces of a zigzag need a mask that of the fused kernels only flash attention has, which
# here runs at about six tenths of cuDNN's rate: it is 52% efficient at 64k tokens, the ring 82%. The ring, which starts a kernel
# for each round and merges, is ahead of PyTorch's in every row.
#
# And the memory? Of the three the ring has the largest peak here. But this is *one* attention, and its peak counts what is on
# its way, blocks and their gradients in float32, which is gone when the layer is done. What counts in a model of many layers is
# what each keeps until its backward pass: with the gather everybody's keys and values, with the ring its own.

# %% [markdown]
# ## What you know now
#
# - Memory is linear in the tokens, and context parallelism divides it; attention is the only place where tokens meet.
# - Answers for blocks of keys merge if each brings its log-sum-exp. Subtract before you exponentiate.
# - A causal ring with neighbouring tokens waits almost half of the time; a zigzag makes every round the same work for all.
# - Gather, ring, all-to-all: memory, hiding, and heads decide.
# - The loss's sum passes through one seam, and all gradients are averaged over dp × cp.
#
# **Check your work once more, from outside.** Save the notebook; then, in a terminal: `course check
# notebooks/11_context_parallel_mine.ipynb`.
#
# Next: [lesson 12](12_pipeline_parallel.ipynb), where the layers themselves are spread over GPUs.
