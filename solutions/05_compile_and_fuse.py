# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 05 · Compile and fuse
#
# Matrix multiplications do nearly all of a model's arithmetic. Between them stand small operations: norms, activations, sums,
# scales. They compute next to nothing, and yet they take a good part of a step, because each of them carries whole
# activations from memory and back. The remedy is to **fuse** them: read once, do everything, write once. In this lesson you
# count what that saves, fuse one chain by hand with its backward pass, let `torch.compile` do the rest, and fix code that
# stops it.
#
# | | |
# |---|---|
# | you need | a laptop, if possible with a C++ compiler (`g++` or `clang++`); no GPU |
# | reading and doing | about 90 minutes |
# | computing | half a minute on two cores, a part of it compiling |
# | you write | bytes of a fused chain (4 lines), kernels of a block (7), a fused modulate (9), code without breaks (3) |
# | you measure | kernels and time of a block and of a step, uncompiled and compiled; and recorded steps of an H200 |
#
# You should have done [lesson 01](01_baseline.ipynb); the roofline is that of [lesson 00](00_start_here.ipynb). Work in a copy:
# *File → Save Notebook As…*, `05_compile_and_fuse_mine.ipynb`.

# %%
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course.training import assemble
from course.lab.instruments import tensor_memory
from course import config, models, parallel
from course.utils import random
from course.lab.instruments import kernel_counter
from course.lab.figures import style, fusion
from course.lab import notebook as lab
from course.lab.notebook import check
from course.models import dit
from course.bench import timing

lab.begin("05")
compiler = kernel_counter.compiler()
print(f"torch.compile writes C++ here and has it compiled by {compiler}" if compiler else
      "There is no C++ compiler here: cells that need one say so and go on. To have one: apt-get install g++, on a Mac "
      "xcode-select --install")

# %% [markdown]
# ## An operation that computes almost nothing
#
# A diffusion transformer normalises its tokens and then *modulates* them: it scales and shifts the features, by vectors that
# depend on the image's class and on how noisy it is. In three lines, each an operation of PyTorch:
#
#     n = layer_norm(x)              mean 0, variance 1, over the features of each token
#     m = n * (1 + scale)            one scale for each sample and feature
#     y = m + shift
#
# That is about eight floating-point operations for each number of `x`: a matrix multiplication does thousands.
#
# > **Predict.** `x` has 16 samples of 1024 tokens of width 768, 50 MB in float32. How many times as long as a *copy*,
# > `x.clone()`, does the chain take?

# %%
my_copies = 1.0                  # your prediction

# %%
cpu = torch.device("cpu")
B, T, D = 16, 1024, 768
x, shift, scale = torch.randn(B, T, D), torch.randn(B, D), torch.randn(B, D)


def chain(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:           # (B, T, D), 2 x (B, D)
    n = F.layer_norm(x, x.shape[-1:], eps=1e-6)                         # (B, T, D)
    m = n * (1 + scale[:, None])                                        # (B, T, D)
    return m + shift[:, None]                                           # (B, T, D)


copy_seconds = timing.seconds(lambda: x.clone(), cpu, laps=5)
apart_seconds = timing.seconds(lambda: chain(x, shift, scale), cpu, laps=5)
lab.beside("the chain, in copies of x", my_copies, apart_seconds / copy_seconds, "copies")

# %% [markdown]
# **What you should see:** about three. A copy is two trips: `x` comes out of memory, and a copy of it goes in. The chain makes
# six. Each line reads what the line before has just written, 50 MB that no cache holds until then.
#
# On a CPU there is a second reason for the same three: each new result of this size comes fresh from the operating system,
# page by page, and that may take several times as long as a trip into memory that is already there, as the copy of lesson 00
# made it. `clone` makes one new result, the chain three. On a GPU, where PyTorch keeps what is freed, only trips are left.

# %%
kernels_apart = [("layer_norm", ["x"], ["n"]), ("multiply", ["n"], ["m"]), ("add", ["m"], ["y"])]
lab.picture(fusion.trips({"one after another": kernels_apart, "fused": [("all three", ["x"], ["y"])]}),
            "Above, three kernels with an arrow from memory and an arrow to memory each, six trips. Below, one kernel with "
            "one arrow from memory and one to it, two trips")

# %% [markdown]
# A **kernel** is a program that runs on the GPU as a whole: one launch, one pass over the data. The lower half of the picture is
# the same chain as one kernel. `n` and `m` exist in it, number by number, in registers, and never reach memory. (`shift` and
# `scale` are read too; they are a thousandth of `x`, so the picture leaves them out.)
#
# > **Question.** The fused kernel does the same arithmetic. Why is it three times as fast, and not just a little?
#
# <details><summary>Answer</summary>
# Because arithmetic was never what it waited for. Eight operations on a number of four bytes, read once and written once,
# are one FLOP a byte. Your machine can do several in the time in which a byte moves, and a GPU more, even without its matrix
# units (lesson 00: the balance). Left of the balance, time is bytes and nothing else. A third of the
# bytes is a third of the time.
# </details>
#
# ## Exercise: count the bytes
#
# Write this as a function, for any chain. An operator is a pair: the names of the tensors that it reads, and the name of the
# one that it writes. Return two numbers:
#
# - what the operators move **one after another**: each reads from memory all that it names, and writes its result there;
# - what **one kernel** in their place moves: it reads each tensor that comes from outside once, however many of its
#   operators use it; what it has computed itself it still holds. It writes the results that somebody needs afterwards,
#   and no others.

# %% exercise="fused-bytes"
Operator = tuple[Sequence[str], str]                 # the names of the tensors that it reads, and of the one that it writes


def fused_bytes(chain: Sequence[Operator], sizes: Mapping[str, int], kept: Collection[str]) -> tuple[int, int]:
    """(bytes that the operators of a chain move one after another, bytes that one kernel in their place moves).

    chain: of each operator the names of the tensors that it reads and the name of the one that it writes, in order. One that
    names a tensor twice, as x * x does, reads it once. sizes: the bytes of each tensor by its name. kept: which of the results
    somebody needs afterwards.
    """
    ### BEGIN SOLUTION
    apart = sum(sizes[name] for reads, written in chain for name in (*set(reads), written))
    made = {written for _, written in chain}
    read = {name for reads, _ in chain for name in reads} - made
    return apart, sum(sizes[name] for name in read | (made & set(kept)))
    ### END SOLUTION

# %%
check("fused-bytes")

# %% [markdown]
# Now three chains: two that a diffusion transformer has in every block, the modulated norm and the gated residual sum
# `x + gate * branch`; and one that most transformers have, GELU as its authors wrote it down,
#
# $$\mathrm{gelu}(x) \approx \tfrac{1}{2}\,x\left(1 + \tanh\left(0.798\,(x + 0.0447\,x^3)\right)\right)$$
#
# > **Predict.** How many times as many bytes does GELU move, written like that line by line, as fused into one kernel?

# %%
my_gelu = 3.0                    # your prediction

# %%
whole, vector = x.nbytes, shift.nbytes
modulated = [(["x"], "n"), (["scale"], "one_scale"), (["n", "one_scale"], "m"), (["m", "shift"], "y")]
gated = [(["branch", "gate"], "scaled"), (["x", "scaled"], "y")]
gelu = [(["x", "x"], "square"), (["square", "x"], "cube"), (["cube"], "a"), (["x", "a"], "b"), (["b"], "c"), (["c"], "tanh"),
        (["tanh"], "d"), (["x", "d"], "e"), (["e"], "y")]
ratios = {}
for name, operators in {"modulated norm": modulated, "gated residual": gated, "GELU by its formula": gelu}.items():
    names = {one for reads, written in operators for one in (*reads, written)}
    sizes = {one: vector if one in ("scale", "one_scale", "shift", "gate") else whole for one in names}
    apart, fused = fused_bytes(operators, sizes, kept=["y"])
    ratios[name] = apart / fused
    print(f"{name:20} {apart / 1e6:7.1f} MB one after another, {fused / 1e6:6.1f} MB fused: {ratios[name]:.1f} times as many")
lab.beside("\nGELU", my_gelu, ratios["GELU by its formula"], "times", "counted")

# %% [markdown]
# Nobody writes GELU like that any more: `F.gelu` is one kernel that somebody has fused by hand, and so are `F.layer_norm` and
# `scaled_dot_product_attention`. A library can do that for chains that it knows. It does not know yours.
#
# ## torch.compile
#
# `torch.compile` fuses what it meets. It works in two stages, and it pays to know them apart, because they fail apart:
#
# 1. **Dynamo** goes through your Python once, with stand-ins for tensors, and records which operations it calls: a **graph**.
#    It also notes what the record depends on (shapes, types, the Python values it saw) as *guards*. Whenever the guards hold,
#    the recorded graph runs in place of your Python.
# 2. **Inductor** makes kernels of the graph, and decides what to fuse. For a GPU it writes Triton, a language for
#    kernels, for a CPU C++, and has it compiled.
#
# Here is what Dynamo records of the chain:

# %%
print(kernel_counter.graphs(chain, (x, shift, scale)))

# %% [markdown]
# One graph. Now the second stage.
#
# > **Predict.** How many times as fast will the compiled chain be? You have counted the bytes.

# %%
my_speedup = 1.0                 # your prediction

# %%
if compiler:
    compiled_chain = torch.compile(chain)
    begin = time.perf_counter()
    written, = kernel_counter.generated(lambda: compiled_chain(x, shift, scale))
    print(f"the first call took {time.perf_counter() - begin:.1f} s; Inductor wrote {len(written)} kernel:", *written)
    print("largest difference:", (compiled_chain(x, shift, scale) - chain(x, shift, scale)).abs().max().item())
    fused_seconds = timing.seconds(lambda: compiled_chain(x, shift, scale), cpu, laps=5)
    lab.beside("uncompiled over compiled", my_speedup, apart_seconds / fused_seconds, "times")
else:
    print("This needs a C++ compiler, and there is none here")

# %% [markdown]
# **What you should see:** one kernel, whose name lists what it has swallowed, and a speed-up of between 1.4 and four.
# Three is what the bytes say; on a CPU the norm's arithmetic takes its part, on a GPU it does not. Values differ in the
# last digits, since sums are taken in another order. Compiling took seconds where the chain takes a fraction of one; it
# pays if the chain runs often. (If it took less than two seconds, the kernel was still on disk from an earlier run:
# Inductor has a cache.)
#
# On the roofline both lie near the slope of memory, as measured by `clone`, new pages and all, so that it lies below that of
# lesson 00. Fusing moves the mark to the right, the same FLOPs
# for fewer bytes, and so up the slope.

# %%
peak_flops = 2 * 1024**3 / timing.matmul(1024, 1024, 1024, torch.float32, cpu)
peak_bytes = 2 * x.nbytes / copy_seconds
flops, sizes = 8 * x.numel(), {name: vector if name in ("scale", "one_scale", "shift") else whole
                               for name in ("x", "n", "m", "y", "scale", "one_scale", "shift")}
apart, fused = fused_bytes(modulated, sizes, kept=["y"])
points = {"one after another": (flops / apart, flops / apart_seconds)}
if compiler:
    points["compiled"] = (flops / fused, flops / fused_seconds)
lab.picture(style.roofline({"this machine": (peak_flops, peak_bytes)}, points, "A modulated norm on this machine"),
            "A roof that rises with arithmetic intensity and then is flat. Two marks lie near its slope, far left of the flat "
            "part; the compiled one lies further right and higher than the other")

# %% [markdown]
# ## What does not fuse
#
# Now a whole block. What stands between two fused kernels?
#
# > **Question.** Why does a compiler not make one kernel of a whole block, matrix multiplications and all?
#
# <details><summary>Answer</summary>
# In a chain each number of the result needs one number of the input, or one token's. In a matrix product each number
# needs a whole row and a whole column: the next product cannot begin before the one before it is done. And a fast
# product fills the chip's registers and shared memory with tiles of its matrices. So products are calls of a library
# (cuBLAS, MKL), written for one purpose. Attention is, too: FlashAttention is two products and a softmax fused by hand.
# (A short chain can be appended to a product, as the bias is in <code>addmm</code>. Inductor does so with products that
# it writes itself, <code>mode="max-autotune"</code>.)
# </details>
#
# ## Exercise: kernels of a block
#
# So the rule is simple. Each matmul and each attention is a kernel of its own; everything else that stands between two of
# them becomes one, norms included, since a norm needs no more than its own token. Count the kernels of a list of operators.

# %% exercise="kernels"
def kernels(operators: Sequence[str]) -> int:
    """How many kernels these operators become: a "matmul" or "attention" is one by itself, neighbours of other kinds share."""
    ### BEGIN SOLUTION
    count, alone = 0, True
    for kind in operators:
        library = kind in ("matmul", "attention")
        if library or alone:
            count += 1
        alone = library
    return count
    ### END SOLUTION

# %%
check("kernels")

# %% [markdown]
# This is what a block of the diffusion transformer does (lesson 15 writes it):
#
# 1. from the condition of each sample, a SiLU and a linear make shift, scale and gate for both branches;
# 2. the first branch: a norm that only normalises; its result times the scale, to which 1 is added, plus the shift, the other two
#    lines of the chain above; the linear for queries, keys and values; attention; a linear; the result times the gate, plus what
#    came into the branch;
# 3. the second: norm, scale and shift as before; a linear, GELU, a linear; gate and sum as before.
#
# > **Predict.** How many operators does its forward pass start one after another, and how many kernels will be left? Count a
# > linear, a norm, attention, each sum and each product as one. Views, such as `chunk`, cost nothing.

# %%
my_operators = 10                # your prediction
my_kernels = 10

# %%
torch.manual_seed(0)
block = dit.AdaLNBlock(384, 6, 1536)
tokens, condition = torch.randn(4, 256, 384, requires_grad=True), torch.randn(4, 384, requires_grad=True)
started = kernel_counter.operators(lambda: block(tokens, condition))
kinds = ["matmul" if name == "addmm" else "attention" if "attention" in name else "pointwise" for name in started]
print(kernel_counter.format_counts(Counter(started)))
lab.beside("operators", my_operators, len(started), how="counted")
lab.beside("kernels, by your rule", my_kernels, kernels(kinds), how="counted")

# %% [markdown]
# Is the rule right? Ask Inductor, for forward and backward pass.
#
# > **Predict.** The arithmetic of this block is nearly all in its matrix multiplications. How many times as fast will forward
# > and backward pass be, compiled, on this CPU?

# %%
my_block_speedup = 2.0           # your prediction


# %%
gradient = torch.randn(4, 256, 384)


def there_and_back(block: nn.Module) -> None:
    """Forward and backward pass."""
    block(tokens, condition).backward(gradient)


both_ways = kernel_counter.operators(lambda: there_and_back(block))
print(f"uncompiled: {len(started)} operators forward, {len(both_ways) - len(started)} backward")
block_ms = 1e3 * timing.seconds(lambda: there_and_back(block), cpu, laps=5)
if compiler:
    compiled_block = torch.compile(block)
    forward, backward = kernel_counter.generated(lambda: there_and_back(compiled_block))
    print(f"compiled:   {len(forward)} kernels forward, {len(backward)} backward. Forward:\n")
    print("\n".join(forward))
    compiled_ms = 1e3 * timing.seconds(lambda: there_and_back(compiled_block), cpu, laps=5)
    print(f"\nuncompiled {block_ms:.0f} ms, compiled {compiled_ms:.0f} ms")
    lab.beside("uncompiled over compiled", my_block_speedup, block_ms / compiled_ms, "times")
else:
    print("This needs a C++ compiler, and there is none here")

# %% [markdown]
# **What you should see:** your rule's number of kernels, with names that say what went together: norm and modulation; then
# gate, residual sum, norm and modulation, across the border of the two branches; at the end gate and residual sum.
# Megatron-LM's diffusion transformer names the same three as its fused steps.
#
# And a speed-up far smaller than three, perhaps none: in this block matrix products take nearly all of the time, and
# its activations, 1.6 MB, stay in the CPU's cache. On a GPU the same chains weigh more, since it multiplies matrices
# thousands of times as fast as your machine, but moves bytes only a hundred times as fast; you will see how much below.
#
# > **Question.** In bf16 by autocast (lesson 04) weights and norms stay in float32, and matrix products want 16 bits. Which
# > operators come on top, and which of them can be fused away?

# %%
with torch.autocast("cpu", torch.bfloat16):
    in_bf16 = kernel_counter.operators(lambda: block(tokens, condition))
print(kernel_counter.format_counts(Counter(in_bf16) - Counter(started)), "more")

# %% [markdown]
# <details><summary>Answer</summary>
# Casts, <code>_to_copy</code>: of each weight and bias, and of activations on their way into a product. Those of activations
# are one more step in the chain before it, and fuse. Those of weights stand alone between memory and the library's product:
# somebody has to write the 16-bit copy. Uncompiled, the way to bf16 thus <i>adds</i> trips to memory, which is one reason
# why compiling and 16 bits go together.
# </details>
#
# ## Fused by hand: one product for three, and attention
#
# Two fusions are in the library's models already, whether compiled or not. The first: queries, keys and values are **one**
# linear, `qkv`, not three.
#
# > **Question.** What does that save, in launches and in bytes, if the FLOPs are the same?
#
# <details><summary>Answer</summary>
# Two launches, and two of three readings of the activations: 3 (T·D + D·D + T·D) numbers become T·D + 3 D·D + 3 T·D. A wider
# product also fills the GPU better. The price is the order of rows, (3, heads, head_dim), which lesson 10 has to know.
# </details>
#
# The second is **attention**. Its scores, tokens × tokens for each head, are an intermediate like any other, only larger.
# FlashAttention (Dao et al. 2022, arXiv:2205.14135) goes through keys and values in blocks, and carries along for each row
# no more than its largest score, the sum and the result so far: the scores never leave the chip. For the backward pass it
# computes them again.
#
# > **Predict.** The reference model has 4050 tokens and 8 heads, and a batch of 16. How many GB are the scores of *one* block,
# > in bf16? An H200 has 141 GB, for 12 blocks.

# %%
my_gb = 0.1                      # your prediction

# %%
reference = config.load("vit-short").model
score_bytes = 2 * 16 * reference.heads * reference.tokens**2
activation = 2 * 16 * reference.tokens * reference.dim
lab.beside("scores of a block", my_gb, score_bytes / 1e9, "GB", "computed")
print(f"queries, keys, values and result together: {4 * activation / 1e9:.2f} GB")

q, k, v = (torch.randn(2, 6, 512, 64, requires_grad=True) for _ in range(3))
for backend in (torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION):
    with torch.nn.attention.sdpa_kernel(backend):
        _, kept = tensor_memory.saved_for_backward(lambda: F.scaled_dot_product_attention(q, k, v), (q, k, v))
        calls = kernel_counter.operators(lambda: F.scaled_dot_product_attention(q, k, v))
    print(f"{backend.name.lower():15} {len(calls)} operators; keeps {kept / q.nbytes:4.1f} times q's bytes, besides q, k and v")

# %% [markdown]
# The plain one keeps the scores, here 512 / 64 = 8 times as large as `q`, and copies of `q` and `k`; the fused one no more
# than the result. Which implementation runs is the key `attention` of a configuration: `math` is the plain one, `flash`,
# `efficient` and `cudnn` are fused, and `default` lets PyTorch choose. They give the same numbers up to rounding, so choose
# by speed, and measure: the default on an H200 is cuDNN's, and below is how much that matters.
#
# ## What is kept for the backward pass
#
# Fusing saves memory as well. A chain of PyTorch's operators keeps for its backward pass what *each* of them needs.
#
# > **Predict.** How many tensors as large as `x` does the modulated norm keep? Go through its lines: what does the gradient of
# > each product need?

# %%
my_kept = 1.0                    # your prediction

# %%
x_small, shift_small, scale_small = (torch.randn(shape, requires_grad=True) for shape in ((4, 256, 384), (4, 384), (4, 384)))
_, kept_apart = tensor_memory.saved_for_backward(lambda: chain(x_small, shift_small, scale_small))
lab.beside("kept by the chain, in units of x", my_kept, kept_apart / x_small.nbytes, how="counted")

# %% [markdown]
# Two: the norm keeps `x`, and the product keeps `n`, which is the other factor in the gradient of `scale`. But `n` is
# `x` minus a mean, over a deviation: two numbers a token. From `x` and these two, `n` is there again in no time,
# *inside* the kernel of the backward pass, where it costs no trip at all.
#
# ## Exercise: a fused modulate
#
# Write the modulated norm as one `autograd.Function`, forward and backward: what a fused kernel computes, and what it keeps.
# It may keep **one** tensor as large as `x`, two numbers a token and two vectors a sample.
#
# Such a class has two static methods, and `Modulate.apply(x, shift, scale, eps)` runs them. PyTorch calls `forward` without
# building a graph of what is in it. What backward will need goes into `ctx.save_for_backward(a, b, ...)`, and comes out of
# `ctx.saved_tensors` there, in the same order. `backward` gets the gradient of what `forward` returned, and returns one for
# each of its arguments, in their order; `None` for what needs none.
#
# Forward is plain: with mean $\mu$ and variance $\sigma^2$ over the $D$ features of a token (the variance divides by $D$),
#
# $$n = r\,(x - \mu),\quad r = 1/\sqrt{\sigma^2 + \varepsilon},\qquad y = n\,(1 + \text{scale}) + \text{shift}.$$
#
# Backward, you get the gradient of $y$ and return those of `x`, `shift`, `scale` and `eps` (`None`). For those of `shift` and
# `scale`, note how many tokens share one. For `x`, let $g$ be the gradient of $n$. A number of $x$ acts on $n$ directly, and
# also through $\mu$ and $r$, which all features of the token share. Shifting all of $x$ changes nothing in $n$, nor does (but
# for $\varepsilon$) stretching it. So from $g$ two things are taken away, its mean and its part along $n$:
#
# $$\mathrm{d}x = r\,\bigl(g - \overline{g} - n\,\overline{g\,n}\bigr),$$
#
# where a bar is the mean over the features of a token. Do not write into the gradient that you are given.

# %% exercise="fused-modulate"
from course.lab.exercises.lesson05_compile_and_fuse import Modulate

# %%
check("fused-modulate")

# %% [markdown]
# Now count what yours keeps, and beside it what the compiler keeps of the plain chain. Nobody has told the compiler
# about this trick.
#
# > **Predict.** How many tensors as large as `x` will the *compiled* chain keep?

# %%
my_kept_compiled = 2.0           # your prediction

# %%
_, kept_mine = tensor_memory.saved_for_backward(lambda: Modulate.apply(x_small, shift_small, scale_small, 1e-6))
print(f"the chain {kept_apart / x_small.nbytes:.2f}, yours {kept_mine / x_small.nbytes:.2f} times x")
if compiler:
    _, kept_compiled = tensor_memory.saved_for_backward(lambda: torch.compile(chain)(x_small, shift_small, scale_small))
    lab.beside("kept by the compiled chain", my_kept_compiled, kept_compiled / x_small.nbytes, how="counted")
else:
    print("The compiled one needs a C++ compiler, and there is none here")

# %% [markdown]
# The compiler sees forward and backward pass as *one* graph, and cuts it where the least has to be carried across: it
# has found the same trick as you. (This is the partitioner of AOTAutograd, the stage between Dynamo and Inductor.)
#
# Does a real model get the same gradients with yours? Put it into the blocks of `dit-demo`. The library's block normalises
# first, with `norm1` or `norm2`, and then calls `modulate`, which you saw above. Yours does both in one go. So the next cell
# makes each norm hand `x` on as it is, and puts yours in the place of `modulate`.

# %%
settings = config.load("dit-demo")


def gradients_and_bytes(mine: bool) -> tuple[Tensor, int]:
    """All gradients of a batch, end to end, and what the forward pass keeps."""
    model = parallel.initialize_serial(models.build_model(settings.model), 0, cpu, torch.float64)
    for number, parameter in enumerate(model.parameters()):             # gates start at zero, and nothing would pass
        parameter.data += 0.1 * random.normal(number, torch.arange(parameter.numel())).view_as(parameter)
    batch = model.prepare(model.example(4, cpu), torch.zeros((), dtype=torch.int64))
    batch = {name: one.double() if one.is_floating_point() else one for name, one in batch.items()}

    def fused(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return Modulate.apply(x, shift, scale, 1e-6)

    if mine:
        for part in [*model.blocks.values(), model.head]:
            for name in [name for name, _ in part.named_children() if name.startswith("norm")]:
                setattr(part, name, nn.Identity())
    with mock.patch.object(dit, "modulate", fused if mine else dit.modulate):
        output, kept = tensor_memory.saved_for_backward(lambda: model(batch), model.parameters())
    total, weight = model.loss(output, batch)
    (total / weight).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), kept


(its, kept_its), (mine, kept_with_mine) = gradients_and_bytes(False), gradients_and_bytes(True)
print(f"gradients of all {len(its):,} parameters differ by {((mine - its).norm() / its.norm()).item():.1e}, relative")
print(f"kept for the backward pass: {kept_with_mine / kept_its:.0%} of what the library's keeps")

# %% [markdown]
# In float64 they agree to rounding. On the GPU your class alone would not be faster, as each of its lines is still a kernel:
# the fused kernel itself has to be written, in Triton or CUDA, or by a compiler. `torch.compile` takes your class as it is,
# and follows both of its methods. Libraries have such Triton kernels (Transformer Engine, Apex, Liger). Look for them
# before you write one. This course has some too, in `course/ops/fused_add_norm_triton.py`: `kernels=triton` puts them into a
# model's blocks, and lesson 15 shows what they buy.
#
# ## A graph with breaks
#
# Dynamo records tensors. What happens where the code asks for a *value*? The following guards a model against exploding
# activations. It is the kind of thing that is written in five minutes to find a problem, and stays for years.

# %%
def tame_with_breaks(x: Tensor, sample: Tensor, limit: float) -> Tensor:        # (B, T, D), (B,)
    real = x[sample >= 0]                                               # (real samples, T, D): padding has the id -1
    largest = real.abs().max().item()
    print(f"the largest number is {largest:.3g}")
    if largest > limit:
        x = x * (limit / largest)
    return x


# %% [markdown]
# Dynamo cannot guess which way the `if` goes. So it stops: it compiles what it has recorded, runs the line in Python, and
# begins a new graph behind it. That is a **graph break**. Nothing is wrong with the result, and nobody tells you. But nothing
# fuses across a break, and at each of these the host waits for the GPU, so the queue runs empty (lesson 02).
#
# > **Predict.** Call it with an `x` beyond the limit, and then with one within it. How many graphs does Dynamo record
# > in all?

# %%
my_graphs = 2                    # your prediction

# %%
example, ids = torch.randn(4, 8, 16), torch.tensor([3, 1, 4, -1])
recorded = kernel_counter.graphs(tame_with_breaks, (example, ids, 1.0), (0.1 * example, ids, 1.0))
print(*recorded, sep="\n")
lab.beside("graphs", my_graphs, len(recorded), how="counted")

# %% [markdown]
# Each piece between two breaks is a graph, if it computes anything: the comparison, the largest number, the product
# behind the `if`. No two of them can share a kernel.
#
# How do you *find* breaks? `fullgraph=True` turns the first break that Dynamo finds no way around into an error, which
# names the line:

# %%
with kernel_counter.fresh_compilation():
    try:
        torch.compile(tame_with_breaks, fullgraph=True, backend="eager")(example, ids, 1.0)
    except Exception as error:
        reason, _, place = str(error).partition("from user code:")
        print(reason.splitlines()[0])
        print(*[line.strip() for line in place.strip().splitlines()[1:2]])

# %% [markdown]
# Why the `print`, when there is a mask and an `.item()` before it? Asked for a single graph, Dynamo goes on with their results as
# unknowns, a size and a number; but to print one it would have to know it.
#
# In a run, `TORCH_LOGS=graph_breaks` prints each with its reason, and changes nothing else.
#
# ## Exercise: fix the breaks
#
# Write `tame` so that Dynamo records it whole, with the same results. Go through what breaks:
#
# - **`x[sample >= 0]`** has as many rows as there are real samples. A size that depends on the data cannot be known in
#   advance. Keep the shape, and make sure that padding does not count: anything may stand in it, infinities too;
# - **`.item()`** returns a Python number. Keep a tensor of one number, shape `()`;
# - **`print`** needs the value too. Return the number as a second result. The code that logs can look at it every
#   hundred steps;
# - **`if`** needs it as well. Compute both outcomes, and choose: `torch.where(condition, one, other)`.
#
# > **Question, before you write.** `.item()` did something more: what did it do to the *gradient*?
#
# <details><summary>Answer</summary>
# It cut it off. A Python number has no history, so the factor was a constant for autograd. A tensor has a history, and
# the gradient would go through the largest number too: another result, with no message. Say what you mean:
# <code>detach()</code>.
# </details>

# %% exercise="graph-break"
def tame(x: Tensor, sample: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """x, (B, T, D), multiplied so that no number of a real sample is beyond `limit`; and the largest of them before, ().

    Samples whose id in `sample`, (B,), is -1 are padding, in which anything may stand, infinities too: their numbers do not
    count, but are multiplied as well. The factor is 1 where the largest is within the limit, and for autograd it is a constant.
    """
    ### BEGIN SOLUTION
    real = (sample >= 0)[:, None, None]                                 # (B, 1, 1)
    largest = x.detach().abs().where(real, 0.0).amax()                  # ()
    return x * torch.where(largest > limit, limit / largest, 1.0), largest
    ### END SOLUTION

# %%
check("graph-break")

# %%
print(*kernel_counter.graphs(tame, (example, ids, 1.0), (0.1 * example, ids, 1.0)), sep="\n")

# %% [markdown]
# One graph for both. Inductor makes of it a reduction and one pass over `x`, and the host never waits. The library's own
# step obeys the same rule: look at lesson 01's `train_step`, where a flag on the device, not an `if`, makes the optimizer
# keep its old state.
#
# ## Recompiling
#
# A graph is good for what its guards allow. One of them is the shape.
#
# > **Predict.** Call the chain with batches of 16, 16, 12, 10 and 7 samples. How many graphs are there at the end?

# %%
my_graphs_of_sizes = 1           # your prediction

# %%
sizes_of_calls = [(torch.randn(n, 8, 16), torch.randn(n, 16), torch.randn(n, 16)) for n in (16, 16, 12, 10, 7)]
lab.beside("graphs", my_graphs_of_sizes, len(kernel_counter.graphs(chain, *sizes_of_calls)), how="counted")

# %% [markdown]
# Two. The first is for 16 samples and nothing else. When the size changes, Dynamo compiles once more, now with the size as a
# variable, and that one serves all others. It is cheap here; of a large model each compilation takes from seconds to
# minutes, and on a cluster *every rank waits* for the one that compiles. It happens at the last, smaller batch of an epoch.
# In this library all batches have one size, filled up with padding of weight zero (lesson 01); this is one of the reasons.
# `TORCH_LOGS=recompiles` says which guard failed.
#
# ## Block by block
#
# A transformer is the same block, again and again. Compile the model as a whole, and Dynamo records all of them into one
# graph, which Inductor then works through. Compile each block in its place, and the first one's graph is good for all: code
# is shared, weights are inputs. This is called **regional** compilation.
#
# > **Predict.** The library's `vit-demo`, 12 blocks deep. How many operations does Dynamo record if the model is compiled as a
# > whole, how many block by block?

# %%
my_whole, my_regional = 100, 100         # your predictions

# %%
deep = config.load("vit-demo", ["model.depth=12"])
model = parallel.initialize_serial(models.build_model(deep.model), 0, cpu, torch.float32)
batch = model.prepare(model.example(2, cpu), torch.zeros((), dtype=torch.int64))
taken = {}
with torch.no_grad():
    for name, modules in (("whole", ()), ("block by block", tuple(model.blocks.values()))):
        begin = time.perf_counter()
        found = kernel_counter.graphs(lambda: model(batch), modules=modules)
        taken[name] = sum(map(len, found))
        print(f"{name}: {len(found)} graph, recorded and run in {time.perf_counter() - begin:.1f} s")
lab.beside("\noperations, the model as a whole", my_whole, taken["whole"], how="counted")
lab.beside("block by block", my_regional, taken["block by block"], how="counted")

# %% [markdown]
# **What you should see:** about twelve times as many. Inductor's work, which takes most of the time, grows in the same way.
# So the library's `compile=true` compiles part by part: embedding, blocks, head and loss. Each block is compiled once, the
# same code serves all blocks, and compiling takes no longer for 48 layers than for 12.
#
# > **Question.** What is lost at the borders? (Think of the last operator of a block, and of the first of the next.) And why
# > is it worth compiling the loss, which has no matrix product at all?
#
# <details><summary>Answer</summary>
# A block ends with a residual sum and the next begins with a norm: a chain, which a compiler that sees both makes one
# kernel. Across the border it is two: one more launch and one more reading of x for each block, against the 11 that you
# counted. The loss is nothing <i>but</i> a chain: subtract, square, add up, over the whole output, 83 million numbers for 16
# samples of the reference model. Uncompiled it makes a handful of trips with them. (On an H200 the reference model was not
# faster compiled as a whole, and its first step came later.)
# </details>
#
# > **Question.** Stochastic depth drops a branch with a probability that rises from block to block, a Python number in each.
# > What does that do to "the same code"?
#
# <details><summary>Answer</summary>
# The number is part of the guards: every block is compiled again. By default Dynamo gives up on a function after eight versions
# and runs it uncompiled, with a warning that nobody reads. Where code is to be shared, what differs has to be a tensor; or else
# the limit has to be raised, as the library does, and every block be compiled.
# </details>
#
# ## The optimizer
#
# At the end of the step stands the longest chain of small operations: Adam, for each parameter. The reference model has more
# than a hundred tensors of parameters.
#
# > **Predict.** How many operators does Adam start for 100 of them, if it goes through them in a loop? And how many if it is
# > fused?

# %%
my_loop, my_fused = 100, 100     # your predictions

# %%
parameters = [torch.randn(16, 16, requires_grad=True) for _ in range(100)]
for parameter in parameters:
    parameter.grad = torch.randn(16, 16)
adams = {}
for name, options in {"a loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}.items():
    adam = torch.optim.Adam(parameters, 1e-3, **options)
    adam.step()                                      # the first makes its states
    adams[name] = len(kernel_counter.operators(adam.step))
    print(f"{name:8} {adams[name]:4} operators")
lab.beside("in a loop", my_loop, adams["a loop"], how="counted")
lab.beside("fused", my_fused, adams["fused"], how="counted")

# %% [markdown]
# The loop starts eight operators for each parameter. `foreach` (PyTorch's default on a GPU) starts eight for *lists* of
# parameters, and `fused` does all of Adam for all parameters in one, and counts steps in another: `torch.optim.Adam(...,
# fused=True)`. (A list of hundreds of tensors is a few kernels on a GPU, since only so many addresses fit into one launch.)
# It needs no compiler, and the library always uses it. It also takes the learning rate, and the flag that skips a step, as
# tensors: no value is asked for.
#
# ## A whole step
#
# You can now count the kernels of a step before any GPU has seen it. Take a diffusion transformer of 28 blocks, as deep as
# DiT-XL, and one step of the library's training, from the batch to the new weights.
#
# > **Predict.** How many operators does it start? And how many kernels are left, if its blocks are compiled?

# %%
my_step, my_compiled_step = 1000, 500    # your predictions


# %%
def started_in_a_step(depth: int) -> int:
    """Operators of one training step of a diffusion transformer of so many blocks."""
    settings = config.load("dit-demo", [f"model.depth={depth}", "train.device=cpu"])
    training = assemble.assemble(settings, parallel.build_mesh(settings.parallel, parallel.World(device=cpu)))
    batch = training.model.example(2, cpu)
    training.step(batch)                             # the first makes the optimizer's states
    return len(kernel_counter.operators(lambda: training.step(batch)))


of_28, of_27 = started_in_a_step(28), started_in_a_step(27)
print(f"{of_28} operators, {of_28 - of_27} of them for each block")
lab.beside("operators of a step", my_step, of_28, how="counted")
if compiler:
    left = of_28 - 28 * (len(both_ways) - len(forward) - len(backward))
    lab.beside("kernels, blocks compiled", my_compiled_step, left, how="counted")
else:
    print("Which kernels a compiled block has needs a C++ compiler, and there is none here")

# %% [markdown]
# On a GPU the counts differ a little: its backward pass of a norm is two or three kernels. More than half of what is left
# in a compiled block are matrix products, and those no fusing removes.
#
# ## On an H200
#
# Now time. These are whole training steps. First the reference model, 16 samples in bf16, random data on the device.
#
# > Compiled you have met it before, at 183 samples a second. **Predict** the time of a step whose stream between the blocks is
# > *narrow*, besides: what norms and residual sums read and write is then bf16, half of it. The next cell prints the other two.

# %%
rows = {row["rung"]: row for row in lab.results("vit_h200")["rows"]}


def step_ms(rung: str, samples: int = 16) -> float:
    """Milliseconds of a step of so many samples."""
    return 1e3 * samples / rows[rung]["samples_per_s"]


eager_ms, fast_ms = step_ms("bf16, on the device"), step_ms("bf16, compiled")
print(f"bf16, not compiled: {eager_ms:.1f} ms a step, compiled: {fast_ms:.1f} ms")

# %%
my_narrow_ms = 60.0              # your prediction

# %%
reference_rungs = ("bf16, on the device", "bf16, compiled", "bf16, compiled, narrow stream")
lab.recorded("vit_h200", {rung: {"ms a step": step_ms(rung), "samples/s": rows[rung]["samples_per_s"],
                                 "first step after, s": rows[rung]["first_s"]} for rung in reference_rungs},
             why="The reference model, whole training steps")
lab.beside("\na step, compiled, narrow", my_narrow_ms, step_ms("bf16, compiled, narrow stream"), "ms", "recorded")
lab.picture(style.grouped_bars({"16 samples": {rung: step_ms(rung) for rung in reference_rungs}}, "ms a step",
                               "vit-short on an H200",
                          {"bf16, compiled, narrow stream": my_narrow_ms}),
            "Three bars: bf16 uncompiled, compiled, which is shorter, and compiled with a narrow stream, a little shorter still; "
            "a diamond marks what was predicted for the last one")

# %% [markdown]
# **What you should see:** a gain worth having for one word in a configuration, and far from a factor of three. Matrix
# products and attention are the larger part of this step, and compiling leaves them alone. What shrinks is what lies between
# them.
#
# The third bar takes away bytes instead of trips. What flows from block to block is in float32, because autocast leaves sums
# so; `stream=narrow` keeps it in bf16, as Megatron-LM does. Every norm and every residual sum then moves half as much.
#
# And a choice of kernel can matter more than all of this. Attention is two thirds of the compiled step. cuDNN's, PyTorch's
# choice on this GPU, does 308 TFLOP/s with this model's heads (forward and backward); FlashAttention-2, `attention=flash`, does
# 184. Both are fused, and both keep the scores out of memory.
#
# > **Predict** the compiled step with FlashAttention-2, from these numbers.

# %%
my_flash_ms = 90.0               # your prediction

# %%
lab.beside("a step, compiled, attention=flash", my_flash_ms, step_ms("bf16, compiled, flash attention"), "ms", "recorded")

# %% [markdown]
# Two thirds of the step take 308/184 as long: 45% more by this arithmetic, 38% when it was measured, and nobody changed a line
# of the model. Which attention one gets is worth a look in the profile.
#
# > **Question.** Compiling takes time before the first step. After how many steps has it paid?

# %%
extra = rows["bf16, compiled"]["first_s"] - rows["bf16, on the device"]["first_s"]
print(f"{extra:.1f} s later at the first step, {eager_ms - fast_ms:.1f} ms less for each: it pays after "
      f"{1e3 * max(extra, 0) / (eager_ms - fast_ms):.0f} steps")

# %% [markdown]
# A training of thousands of steps hardly notices; a job that is restarted every ten minutes does. Inductor keeps what it
# compiled in a folder, `TORCHINDUCTOR_CACHE_DIR`, and reads it at the next start. On a cluster put it where it survives the
# job.
#
# In this regime compiling helps by fewer bytes. Small models on small batches have another. One sample of a small model (12
# layers of width 768, 256 tokens) is hundreds of kernels, each shorter than its launch, and the GPU waits for the host (lesson
# 02). Memory does not bound this step. But fewer kernels are fewer launches.
#
# > **Predict.** How many of 843 kernels are left when it is compiled, and how many times as fast is the step?

# %%
my_kernels = 400                 # your predictions
my_small_speedup = 2.0

# %%
small_rungs = ("one sample: eager", "one sample: compiled")
small, compiled_small = (rows[rung] for rung in small_rungs)
lab.beside("kernels of a compiled step", my_kernels, compiled_small["kernels"], how="recorded")
lab.beside("one sample, compiled over uncompiled", my_small_speedup, compiled_small["samples_per_s"] / small["samples_per_s"],
           "times", "recorded")
lab.recorded("vit_h200", {rung: {"kernels": rows[rung]["kernels"], "ms a step": step_ms(rung, 1),
                                 "µs for each kernel": 1e3 * step_ms(rung, 1) / rows[rung]["kernels"]} for rung in small_rungs},
             why="One sample of a small model")

# %% [markdown]
# **What you should see:** slower, not faster! One kernel in seven is gone; matrix products, attention and the casts of the
# weights are still there, one by one. And the host takes longer over each of those that are left: before a compiled part
# runs, its guards ask whether all inputs are what they were when it was compiled, and what then hands out memory and launches
# the kernels is Python that Inductor wrote, where PyTorch's own operators do it in C++. While the GPU is busy nobody notices, as
# in the large step above. Here the host is all that one waits for.
#
# Compile what is bound by memory. Against launches something else is needed: the host starts the same kernels in every step, in
# the same order as in the step before. Why again and again? That is the next lesson, and there compiled kernels come back.
#
# ## In practice
#
# ```
# course train vit-opt                                         # bf16 and compile=true
# course train vit-short compile=true attention=flash          # or cudnn, efficient, math
# TORCH_LOGS=graph_breaks,recompiles course train vit-short compile=true train.steps=3
# TORCH_LOGS=output_code course train vit-demo compile=true train.steps=1       # the kernels that Inductor wrote
# TORCHINDUCTOR_CACHE_DIR=$HOME/inductor course train vit-opt  # keep them from job to job
# course profile vit-opt                                       # which kernels are left, and what they take
# course bench vit --out FILE                                  # the ladder above, on your GPU
# ```
#
# - Make it work first, then compile. Errors in compiled code are harder to read.
# - Compile what repeats, a block, with `fullgraph=True` while you develop: breaks then cannot creep in.
# - Leave out the first steps when you measure: they compile.
# - Keep shapes the same from step to step, and values out of Python.
#
# ## What you know now
#
# - Between matrix products, time is bytes. Count trips to memory, not FLOPs.
# - A fused chain reads what comes from outside once, and writes what is needed afterwards; it also keeps less for the
#   backward pass.
# - Dynamo records graphs, Inductor writes kernels. Matrix products and attention stand alone, what lies between them is fused.
# - An `if`, an `.item()`, a `print` or a mask as an index breaks the graph, and makes the host wait.
# - A block is compiled once for all blocks; a new shape compiles again.
# - The gain is what lay between the products: large where kernels are small, modest where products are most of the step.
#
# **Check your work once more, from outside.** Save the notebook; then, in a terminal: `course check
# notebooks/05_compile_and_fuse_mine.ipynb`.
#
# Next: [lesson 06](06_cuda_graphs.ipynb), where a step's launches are recorded once and replayed as one.
