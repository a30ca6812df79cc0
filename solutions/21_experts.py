# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 21 · Experts
#
# The MLPs hold two thirds of a block's weights, and every token is multiplied by all of them. A **mixture of experts**
# (MoE) has many MLPs, the experts, and each token goes through a few. So the model grows while the work per token stays the
# same. Most of the largest language models are built like this. In this lesson you write what makes it work: the router,
# the loss that keeps experts busy, and the messages that bring tokens to experts on other ranks.
#
# **What you will learn**
#
# - how a router chooses experts, and where its gradient comes from;
# - why experts die without balancing, and what the balance loss does about it;
# - what expert parallelism sends, and why the busiest rank decides the time of a step.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 75 minutes |
# | computing | 2 minutes on two cores |
# | you write | a router (4 lines), a balance loss (4), exchanged rows (6), rows through experts (10); optional: placement (45) |
# | you measure | loads of experts over training, loss beside a dense model, bytes sent |
#
# You should have done [lesson 07](07_data_parallel.ipynb) (collectives) and [lesson 11](11_context_parallel.ipynb) (all-to-all).
# Work in a copy: *File → Save Notebook As…*, `21_experts_mine.ipynb`.

# %% numbers=true
import statistics

from course.bench.results import load
from course.bench.results.tables import of_experts

dense_ms = of_experts(2, "ms", "dense, as many active parameters")
python_loss = {case: {steps: statistics.mean(row["valid_loss"][steps] for row in load("gpt_moe_python_h200")["rows"]
                                             if row["case"] == case) for steps in ("500", "2000")}
               for case in ("dense", "experts")}

# %%
from pathlib import Path

import torch

from course import config, parallel
from course.config import schema
from course.data.text import bpe, python_corpus
from course.data.text.sequences import Sequences
from course.lab import notebook as lab
from course.lab.figures import experts as pictures
from course.lab.figures import who_holds
from course.lab.instruments.bytes_sent import Traffic
from course.lab.instruments.forward_trace import trace
from course.lab.instruments.tiny_experts import TinyExperts, evaluate, train
from course.lab.notebook import check
from course.ranks.notebook_ranks import ranks
from course.training import verify

lab.begin("21")
torch.set_num_threads(1)         # the models here are too small to share out

# %% [markdown]
# ## Many MLPs, few for each token
#
# Take E experts, each an MLP of width H. Each token goes through k of them. The model's **parameters** count all E experts. The
# **active** parameters of a token count only its k.
#
# > **Predict.** Mixtral 8x7B has 32 blocks of width 4096. Each block has 8 experts with three matrices of 4096 × 14,336, and
# > each token goes through 2. Everything else takes 1.6 billion parameters. How many billion parameters does it have, and how
# > many are active?

# %%
my_parameters = 56.0             # your predictions
my_active = 14.0

# %%
one_expert = 3 * 4096 * 14336
lab.beside("parameters", my_parameters, (32 * 8 * one_expert + 1.6e9) / 1e9, "billion")
lab.beside("active", my_active, (32 * 2 * one_expert + 1.6e9) / 1e9, "billion")

# %% [markdown]
# So it is not 8 times 7 billion: attention and embeddings exist once. A token costs as much as in a dense model of 13 billion
# parameters. But all 47 billion have to be in memory.
#
# ## The router
#
# Which experts should take a token? A small linear layer, the **router**, gives one logit for each expert. A softmax turns the
# logits into probabilities p. The token goes to the k experts with the largest probabilities. Its output is a weighted sum:
#
# $$y = \sum_{e \in \text{top } k} g_e \, \text{MLP}_e(x), \qquad g_e = \frac{p_e}{\sum_{j \in \text{top } k} p_j}$$
#
# The weights g are called **gates**.
#
# > **Question.** The choice itself has no gradient: a slightly larger logit either changes nothing or selects another expert.
# > How does the router learn? And what would go wrong with k = 1?
#
# <details><summary>Answer</summary>
# Through the gates. If an expert's output reduces the loss, the gradient increases its gate, hence its probability. With k =
# 1 the gate p / p is always 1 and has no gradient. So with k = 1 the gate is p itself.
# </details>
#
# ## Exercise: the router
#
# Write `route(logits, top_k)`. It returns the gates and the indices of each token's experts, both (N, top_k). With `top_k=1`
# the gate is the probability.

# %% exercise="route"
from course.lab.exercises.lesson21_experts import route

# %%
check("route")

# %% [markdown]
# ## Training with your router
#
# A model of one block is enough to see what experts do: an embedding, attention, a mixture of experts, and a head. It reads
# Python source code, as in lesson 14.

# %%
lab.show("course.lab.instruments.tiny_experts.mixture")

# %%
data = Path("data/python-512")
python_corpus.make(schema.build(python_corpus.PythonCorpus,
                                {"path": str(data), "vocab": 512}, "tokens"))
training, validation = (Sequences(str(data), split, 64, 512)
                        for split in ("train", "valid"))
tokenizer = bpe.load(data / "tokenizer.json")

# %% [markdown]
# Each expert has width 64, and each token goes through two of eight. A dense model with an MLP of width 128 does the same work
# for a token.
#
# > **Predict.** Both train for 200 steps. On text that neither has seen, by how much is the mixture's loss lower than the
# > dense model's?

# %%
my_gain = 0.5                    # your prediction

# %%
STEPS = 200
dense = TinyExperts(route, experts=1, width=128)
train(dense, training, STEPS)
mixture = TinyExperts(route)
free = train(mixture, training, STEPS)
dense_loss, mixture_loss = (evaluate(model, validation) for model in (dense, mixture))
print(f"dense {dense_loss:.3f}   mixture {mixture_loss:.3f}")
lab.beside("\ngain", my_gain, dense_loss - mixture_loss)

# %% [markdown]
# The gain is small here, because the model is small and trains for seconds. It grows with training. `course train
# gpt-moe-python` learns the source of Python's library. Averaged over three seeds, its validation loss is {result:
# python_loss["experts"]["500"] | .3f} after 500 steps, and {result: python_loss["experts"]["2000"] | .3f} after 2000. A dense
# model with as many active parameters has {result: python_loss["dense"]["500"] | .3f} and {result:
# python_loss["dense"]["2000"] | .3f}. The gain also grows with the number of experts: Switch Transformer reached the loss of
# a dense model in a seventh of the steps ([Fedus et al. 2021](https://arxiv.org/abs/2101.03961), section 3.1).
#
# ## Experts die
#
# What if one expert is a little better at the beginning? It gets more tokens, so it learns faster, so it gets even more.
# Nothing stops this. Break the balance on purpose: before training, add 3 to the router's bias for the first two experts.
#
# > **Predict.** After 200 steps, what share of the choices do the other six experts get together?

# %%
my_others = 0.3                  # your prediction


# %%
def favor_two() -> TinyExperts:
    """A new model whose router favors experts 0 and 1."""
    model = TinyExperts(route)
    with torch.no_grad():
        model.router.bias[:2] += 3
    return model


broken_model = favor_two()
broken = train(broken_model, training, STEPS)
lab.beside("share of the other six", my_others, sum(broken.loads[-1][2:]))

# %% [markdown]
# Three quarters of the experts are nearly unused. You pay for their memory but get a smaller model.
#
# ## Exercise: the balance loss
#
# A second loss has to spread the choices. For one batch, let
#
# - $f_e$ be expert e's share of all choices (each token makes k of them),
# - $P_e$ be the mean of its probability over the tokens.
#
# The **balance loss** is $E \sum_e f_e P_e$. If all experts get equal shares, both are 1/E, and the loss is 1. If one expert
# gets everything, it is E.
#
# > **Question.** f counts choices and has no gradient. Through what does the router learn to balance, and which experts feel the
# > largest push?
#
# <details><summary>Answer</summary>
# Through P. The derivative with respect to P_e is E f_e: the more an expert is chosen, the harder its probability is pushed
# down, in every token.
# </details>
#
# Write `balance_loss(probabilities, experts)`. `torch.bincount(numbers, minlength=E)` counts.

# %% exercise="balance-loss"
from course.lab.exercises.lesson21_experts import balance_loss

# %%
check("balance-loss")

# %% [markdown]
# Now train the unbalanced model again, and add a hundredth of this loss.

# %%
mended_model = favor_two()
mended = train(mended_model, training, STEPS, balance_loss)
lab.picture(
    pictures.loads({"nothing done": free.loads, "two favored": broken.loads,
                    "two favored, balance loss": mended.loads},
                   "Which experts get the tokens"),
    "Three panels with eight stacked colors over 200 steps. Left: eight shares that "
    "drift apart slowly. Middle: two colors fill nearly the whole panel. Right: two "
    "colors fill the panel at first; after some 30 steps six others share nearly all "
    "of it.")
for name, model in (("two favored", broken_model), ("with balance loss", mended_model)):
    print(f"{name:18} loss {evaluate(model, validation):.3f}")

# %% [markdown]
# **What you should see:** with the balance loss, the other six experts take over after some 30 steps. The two favored ones
# slowly come back. The weight of this loss is small, because it interferes: it asks for equal shares even where the text does
# not call for them.
#
# DeepSeek-V3 balances without a loss. It adds a bias to the router's scores, for the choice alone, and after every step the
# bias of a busy expert shrinks a little ([DeepSeek-AI 2024](https://arxiv.org/abs/2412.19437), section 2.1.2).
#
# ## Who takes what?
#
# > **Predict.** Look at a few lines of code. Do you expect an expert to specialize in a topic (files, numbers), or in kinds
# > of tokens (indentation, names, brackets)?

# %%
TEXT = """def read(self, size=-1):
    if self.closed:
        raise ValueError("read of closed file")
    data = self.buffer[:size]
    self.position += len(data)
    return data"""
ids = tokenizer.encode(TEXT).ids
with torch.no_grad():
    _, _, chosen = mended_model(torch.tensor([ids[:64]]))
pairs = [(tokenizer.decode([token]), int(expert))
         for token, expert in zip(ids, chosen[:, 0], strict=False)]
rows = [pairs[first:first + 22] for first in range(0, len(pairs), 22)]
lab.picture(pictures.tokens(rows, 8, "The first expert of each token"),
            "Lines of Python code, cut into tokens, each on the color of its expert. "
            "Equal tokens mostly have the same color.")

# %% [markdown]
# Experts specialize in kinds of tokens: the same token mostly goes to the same expert, whatever the text is about. Larger
# models do the same ([Jiang et al. 2024](https://arxiv.org/abs/2401.04088), section 5).
#
# ## Experts on other ranks
#
# All experts are in memory, and each token needs few. So spread the experts over ranks: rank r of n keeps the r-th of n equal
# shares. This is **expert parallelism**. Otherwise the ranks are data parallel: each has its own tokens. A token whose expert
# is on another rank travels there, and its output travels back. These are two all-to-alls, **dispatch** and **combine**.
#
# The library's axis for it is `parallel.ep`. It takes no ranks of its own: it divides the data-parallel ranks.

# %%
WEIGHTS = {name: f"blocks.0.{name}"
           for name in ("attn.qkv.weight", "mlp.router.weight", "mlp.experts.up",
                        "mlp.experts.down", "mlp.shared.up.weight")}
held = ranks(4)(trace, "gpt-moe-demo", "model.depth=1", "parallel.dp=4",
                "parallel.ep=2")
lab.picture(who_holds.parameters(held, WEIGHTS,
                                 title="Weights of a block, dp=4 with ep=2"),
            "Four rows of boxes, one for each rank. All ranks have attention, the "
            "router and the shared expert whole. Ranks 0 and 2 have the first half of "
            "the experts, ranks 1 and 3 the second half.")

# %% [markdown]
# > **Question.** Over which ranks are the router's gradients averaged? And those of expert 0?
#
# <details><summary>Answer</summary>
# The router is on all four ranks, so over all of them. Expert 0 is on ranks 0 and 2. Each has seen the tokens of two ranks, which
# traveled to it, so the average over ranks 0 and 2 counts all tokens.
# </details>
#
# > **Predict.** Each of 8 ranks has 8192 tokens of width 4096 in bf16, and each token goes to 2 experts. The experts are
# > balanced. How many megabytes does a rank send to *other* ranks in one dispatch?

# %%
my_dispatch = 67.0               # your prediction, in MB

# %%
lab.beside("sent in a dispatch", my_dispatch, 8192 * 2 * 4096 * 2 * 7 / 8 / 1e6, "MB",
           "computed")

# %% [markdown]
# A block needs four such all-to-alls in a step: dispatch and combine, in forward and in backward. A tensor-parallel MLP
# needs one all-reduce in each direction instead (lesson 10), whose bytes do not grow with k.
#
# The number of rows between two ranks is known only after the router has chosen. So the ranks first exchange these numbers.
# Then one all-to-all sends pieces of different lengths: `dist.all_to_all_single(output, input, received, sent,
# group=axis.group)` sends the first `sent[0]` rows of `input` to rank 0, the next `sent[1]` to rank 1. `output` gets
# `received[0]` rows from rank 0, then `received[1]` rows from rank 1.
#
# > **Question.** The backward pass of dispatch gets a gradient for each *received* row. Where do these belong?
#
# <details><summary>Answer</summary>
# To the rank that sent the row. So the backward pass is an all-to-all with the two lists of numbers swapped. This is exactly
# what combine does with the outputs: dispatch and combine are each other's backward pass.
# </details>
#
# ## Exercise: exchange rows
#
# Write both passes of `ExchangeRows`. PyTorch calls `forward` with the rows, the two lists and the axis. `backward` returns
# one gradient for each of the four arguments, `None` for each that is not a tensor.

# %% exercise="exchange-rows"
from course.lab.exercises.lesson21_experts import ExchangeRows

# %%
check("exchange-rows")

# %% [markdown]
# Try it: rank r sends its number to rank 0 once, to rank 1 twice, and so on.


# %%
def numbers() -> list[float]:
    """The numbers that arrive at this rank."""
    world = parallel.join("cpu")
    axis = parallel.build_mesh(config.Parallel(dp=4), world).dp
    rows = torch.full((10, 1), float(world.rank))
    arrived = ExchangeRows.apply(rows, [1, 2, 3, 4], [1 + world.rank] * 4, axis)
    return arrived.flatten().tolist()


for rank, arrived in enumerate(ranks(4)(numbers)):
    print(f"rank {rank} gets", arrived)

# %% [markdown]
# ## Exercise: rows through experts
#
# Now put it together. `through_experts(rows, experts, number, compute, axis)` gets rows (n, D) and the expert of each row,
# (n,); `number` says how many experts there are. It returns the outputs in the order of the rows. `compute(rows, experts)`
# computes rows of experts that *this rank* keeps. Call it once, with all rows that arrived and the number of each row's expert.
#
# 1. Sort the rows by expert. Then the rows for rank 0 come first.
# 2. Count the rows for each expert. Exchange the counts, so that each rank knows how many rows arrive from each rank, for
#    each of its experts.
# 3. Send the rows with `ExchangeRows.apply(rows, sent, received, axis)`. They arrive by sender, and for each sender by expert.
# 4. Compute, and send the outputs back.
# 5. Undo the sorting.

# %% exercise="through-experts"
from course.lab.exercises.lesson21_experts import through_experts

# %%
check("through-experts")

# %% [markdown]
# ## The busiest rank
#
# Let four ranks keep two of the eight experts each, and send them the tokens of both of your models.


# %%
def count_rows(choices: torch.Tensor) -> tuple[int, float]:
    """Rows that this rank computes, and bytes that it sends for them."""
    world = parallel.join("cpu")
    axis = parallel.build_mesh(config.Parallel(dp=4), world).dp
    mine = choices.chunk(4)[world.rank].flatten()
    computed = []

    def compute(rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        computed.append(len(experts))
        return rows

    with Traffic() as traffic:
        through_experts(torch.zeros(len(mine), 64), mine, 8, compute, axis)
    return computed[0], traffic.sent


@torch.no_grad()
def choices_of(model: TinyExperts) -> torch.Tensor:
    """The experts of 1024 tokens, (1024, 2)."""
    tokens = validation.__getitems__(list(range(16)))["tokens"][:, :-1]
    return model(tokens)[2]


# %% [markdown]
# > **Predict.** Balanced, each rank computes 512 of the 2048 choices. How many does the busiest rank compute for the model with
# > two favored experts? They are both on rank 0.

# %%
my_busiest = 1024                # your prediction

# %%
for name, model in (("two favored", broken_model), ("with balance loss", mended_model)):
    found = ranks(4)(count_rows, choices_of(model))
    rows_computed = [rows for rows, _ in found]
    print(f"{name:18} rows on each rank {rows_computed}, slowest / mean "
          f"{max(rows_computed) / 512:.2f}, rank 0 sends {found[0][1] / 1e3:.0f} kB")
    if model is broken_model:
        lab.beside("rows of the busiest", my_busiest, max(rows_computed), how="counted")

# %% [markdown]
# Every rank waits for the busiest one at the combine. So the step takes as long as if all ranks had as many rows. Balance is
# not only about using all weights: it also decides the speed.
#
# Some implementations set a limit. With a **capacity factor** c and N tokens, an expert takes at most c · N · k / E rows and
# drops the others, which then pass only through the residual connection. All shapes are known in advance. Without a limit,
# the mixture is **dropless**.
#
# ## In the library
#
# `course/models/experts.py` is the model and `course/parallel/expert_parallel/experts.py` spreads its experts over ranks.
# Both use what you wrote:

# %%
lab.show("course.models.experts.auxiliary_loss")
lab.show("course.parallel.mappings.exchange_rows")

# %% [markdown]
# The balance loss there belongs to one *sample*, not to a batch. Sums over samples do not depend on how samples are spread
# over ranks and micro-batches, so every layout trains like one process. `verify` compares all parameters, in float64:

# %%
exact = config.load("gpt-moe-demo", [*verify.DEFAULTS, "model.depth=2", "parallel.dp=4",
                                     "parallel.ep=2", "train.device=cpu"])
gaps, *_ = ranks(4)(lambda: verify.compare(exact))
assert verify.tell(exact, gaps)

# %% [markdown]
# ## What it costs on GPUs
#
# Take GPT 350M with 8 experts in every other block, of which each token uses 2. A dense model with MLPs 1.5 times as wide
# does the same work for a token: on average, a token goes through 1.5 MLPs in a block. On a GPU one kernel multiplies the
# rows of every expert by its weights, a **grouped matmul**.
#
# > **Predict.** On two H200s a step of the dense model takes {result: dense_ms | .0f} ms. How many ms does it take with
# > experts, four on each GPU?

# %%
my_experts_ms = 120              # your prediction

# %%
step_ms = {row["case"]: row["ms"] for row in lab.results("experts_h200")["rows"]
           if row["gpus"] == 2}
lab.beside("ms with experts", my_experts_ms, step_ms["experts"], how="recorded")
for case, ms in step_ms.items():
    print(f"{case:34} {ms:6.1f} ms")

# %% [markdown]
# The step with experts takes longer. Matmuls and messages are not the reason. Before each dispatch the **host** has to know
# how many rows go to which rank, so it waits for the GPU. It cannot prepare the next kernels meanwhile, and then the GPU
# waits for the host, block after block.
#
# `parallel.dispatch=gather` sends each token to *all* ranks instead. Each computes the rows of its own experts, and a
# reduce-scatter adds up the outputs. All shapes are known in advance, so nobody waits, and a CUDA graph (lesson 06) can hold
# the step. The price is ep / k times the bytes of the all-to-all, and memory for the choices of all ranks.

# %% [markdown]
# ## Open task: place the experts
#
# *Optional, about 50 minutes. Nothing later needs it.* A balance loss works slowly, and it interferes. A model that serves users
# has no loss at all. There is another way: count the tokens of each expert, and from time to time move experts between ranks.
# DeepSeek-V3 does so about every 10 minutes when it serves ([DeepSeek-AI 2024](https://arxiv.org/abs/2412.19437), section 3.4).
# Our solution has about 45 lines.
#
# Each rank has a few **slots**, each with memory for one expert's weights. If there are more slots than experts, a hot expert
# can have **copies** on several ranks, which share its tokens equally. Moving an expert to a rank that did not hold it
# costs a **transfer** of its weights.
#
# > **Predict.** Take your model with two favored experts, and give each of the four ranks three slots. How many transfers do you
# > need until all ranks have about as many tokens?

# %%
my_transfers = 6                 # your prediction

# %%
from course.lab.instruments.expert_placement import rank_tokens, transfers

lab.show("course.lab.instruments.expert_placement.rank_tokens")
lab.show("course.lab.instruments.expert_placement.transfers")
tokens = torch.bincount(choices_of(broken_model).flatten(), minlength=8).tolist()
before = [[0, 1], [2, 3], [4, 5], [6, 7]]
after = [[0], [2, 3, 1], [4, 5, 0], [6, 7, 1]]
print("tokens of the experts", tokens)
print("of the ranks before  ", rank_tokens(tokens, before))
print("and after            ", rank_tokens(tokens, after))
lab.beside("\ntransfers", my_transfers, transfers(before, after), how="counted")
lab.picture(
    pictures.placements(tokens, {"before": before, "after": after},
                        "Tokens of each rank, and the experts that it holds"),
    "Two panels with a bar for each of four ranks, made of the shares of its experts. "
    "Before, rank 0 has nearly all tokens, those of experts 0 and 1. After, each of "
    "these two has a copy on two ranks, and all bars reach the mean.")

# %% [markdown]
# Two hot experts are easy. With dozens of experts, each with a different number of tokens, you need a program.
#
# **Contract**
#
# - `place_experts(tokens, slots, before)` returns a list for each rank: the experts that it holds, in any order.
# - `tokens[e]` counts the tokens that expert e got lately. Some got none.
# - `slots` is the number of experts that a rank can hold. A slot may stay free.
# - `before` lists the experts that each rank holds now. This placement is valid, and most experts can stay.
# - Each expert is on at least one rank, also one without tokens. Its copies are on different ranks.
#
# **Levels.** The check has six cases or more, with 3 to 16 ranks. The best placement is known: each rank has exactly the mean.
# Each level counts by itself, once the first is reached:
#
# | level | what the check counts |
# |---|---|
# | correct | a valid placement; the busiest rank has at most 25% more tokens than in the best placement |
# | balanced | it has at most 5% more |
# | few transfers | transfers to at most 40% of all slots, and the busiest rank has at most 10% more |
#
# Start with correct. `lab.hint("place-experts")` opens the first of three hints, and each further call opens the next one.

# %% exercise="place-experts"
from course.lab.exercises.lesson21_open_task import place_experts  # noqa: F401

# %%
check("place-experts")

# %% [markdown]
# ## Summary
#
# - A mixture of experts has many MLPs and sends each token through k of them: more weights for the same work.
# - The router learns through the gates. The choice has no gradient.
# - Without balancing, favored experts get ever more tokens and the others die. The balance loss is E Σ f P, 1 when balanced.
# - Expert parallelism spreads experts over data-parallel ranks. Dispatch and combine are all-to-alls and each other's backward
#   pass.
# - The busiest rank decides the time of a step, so balance is speed.
# - An all-to-all whose sizes are known only during the step makes the host wait. Gathering all tokens avoids the wait but
#   sends more bytes.
#
# ## Questions
#
# 1. Why do experts' gradients need no all-reduce over the ranks that divide the experts, while the router's do?
# 2. With 64 small experts and k = 8 instead of 8 large ones and k = 1: what changes in parameters, work and bytes sent?
# 3. Where would you put the ranks of expert parallelism, within a node or across nodes? How does tensor parallelism affect
#    the choice?
#
# **Check your work from a terminal.** Save the notebook, then run `course check notebooks/21_experts_mine.ipynb`.
