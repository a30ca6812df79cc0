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
# Matrix multiplications do nearly all of a model's arithmetic. Between them come small operations: norms, activations,
# sums, scales. They compute next to nothing, but each one reads and writes whole activations, so they take a good part of
# a step. The remedy is to **fuse** them: read once, do everything, write once.
#
# **What you will learn**
#
# - how to count the bytes that an operation moves, and what fusing saves in time and memory;
# - what `torch.compile` fuses, what it cannot fuse, and what makes it compile again;
# - how to find and fix the graph breaks that stop it.
#
# | | |
# |---|---|
# | you need | a laptop, if possible with a C++ compiler (`g++` or `clang++`); no GPU |
# | reading and doing | about 90 minutes |
# | computing | half a minute on two cores, part of it compiling |
# | you write | bytes of a chain (4 lines), kernels (7), a fused modulate (9), code without breaks (3); optional: a block (14) |
# | you measure | kernels and time of a block and of a step, uncompiled and compiled; and you read recorded steps of an H200 |
#
# Do [lesson 01](01_baseline.ipynb) first; [lesson 00](00_start_here.ipynb) explains the roofline. Work in a copy:
# *File → Save Notebook As…*, `05_compile_and_fuse_mine.ipynb`.

# %% numbers=true
from course.bench import results


def step_ms(case):
    """Milliseconds of a training step on an H200."""
    return results.value("vit_h200", case)


# of lessons 03 to 05: samples per second
rungs = [results.value("vit_h200", case, "samples_per_s") for case in (
    "tf32, read by the training process", "tf32, 8 loader processes", "bf16, on the device", "bf16, compiled")]


def attention_tflops(backend):
    """Of the reference model's attention, forward and backward."""
    rows = results.load("beginning_h200")["attention"]
    row, = (row for row in rows if row["shape"] == [16, 8, 4050, 48])
    return row[backend]


cudnn, flash = attention_tflops("cudnn"), attention_tflops("flash")
account = results.load("profile_h200")["accounts"]["16 samples, bf16, compiled"]
attention_share = account["kinds"]["attention"] / account["step"]
flash_by_arithmetic = attention_share * (cudnn / flash - 1)
flash_measured = step_ms("bf16, compiled, flash attention") / step_ms("bf16, compiled") - 1
kernels_eager = results.value("vit_h200", "one sample: eager", "kernels")
kernels_compiled = results.value("vit_h200", "one sample: compiled", "kernels")

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
from course.lab.figures import fusion, profile, style
from course.lab import notebook as lab
from course.lab.notebook import check
from course.models import dit
from course.bench import timing

lab.begin("05")
compiler = kernel_counter.compiler()
print(f"torch.compile writes C++ here, and {compiler} compiles it" if compiler else
      "There is no C++ compiler here. Cells that need one say so and go on. To "
      "install one, run apt-get install g++, or on a Mac xcode-select --install")

# %% [markdown]
# ## An operation that computes almost nothing
#
# A diffusion transformer normalizes its tokens and then *modulates* them. It scales and shifts the features by vectors
# that depend on the image's class and noise level. In three lines, each one PyTorch operation:
#
#     n = layer_norm(x)              mean 0, variance 1, over the features of each token
#     m = n * (1 + scale)            one scale for each sample and feature
#     y = m + shift
#
# That is about eight floating-point operations for each element of `x`. A matrix multiplication does thousands.
#
# > **Predict.** `x` has 16 samples of 1024 tokens of width 768, 50 MB in float32. How many times as long as a *copy*,
# > `x.clone()`, does the chain take?

# %%
my_copies = 1.0                  # your prediction

# %%
cpu = torch.device("cpu")
B, T, D = 16, 1024, 768
x, shift, scale = torch.randn(B, T, D), torch.randn(B, D), torch.randn(B, D)


# (B, T, D), 2 x (B, D)
def chain(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    n = F.layer_norm(x, x.shape[-1:], eps=1e-6)                         # (B, T, D)
    m = n * (1 + scale[:, None])                                        # (B, T, D)
    return m + shift[:, None]                                           # (B, T, D)


copy_seconds = timing.seconds(lambda: x.clone(), cpu, laps=5)
apart_seconds = timing.seconds(lambda: chain(x, shift, scale), cpu, laps=5)
lab.beside("the chain, in copies of x", my_copies, apart_seconds / copy_seconds,
           "copies")

# %% [markdown]
# **What you should see:** about three, or more. A copy makes two trips: `x` comes out of memory, and the copy goes in. The
# chain makes six. Each line reads the 50 MB that the previous line has just written, and most CPU caches do not hold that much.
#
# A CPU adds a second cost. Each large new tensor needs fresh pages from the operating system: one tensor for `clone`,
# three for the chain. On a GPU PyTorch reuses freed memory, so only the trips count.

# %%
kernels_apart = [("layer_norm", ["x"], ["n"]), ("multiply", ["n"], ["m"]),
                 ("add", ["m"], ["y"])]
lab.picture(fusion.trips({"one after another": kernels_apart,
                          "fused": [("all three", ["x"], ["y"])]}),
            "Above, three kernels. Each has an arrow from memory and an arrow to "
            "memory: six trips. Below, one kernel with one arrow from memory and one "
            "to it: two trips")

# %% [markdown]
# A **kernel** is one program that the GPU runs over all of the data: one launch, one pass. The lower half of the picture
# shows the same chain as one kernel. `n` and `m` exist only in registers, element by element, and never reach memory. (The
# picture omits `shift` and `scale`, which are a thousandth of `x`.)
#
# > **Question.** The fused kernel does the same arithmetic. Why is it three times as fast, and not just a little?
#
# <details><summary>Answer</summary>
# The chain never waited for arithmetic. Eight operations per number, four bytes read and four written, are one FLOP per
# byte. Your machine does several FLOPs while one byte moves, and a GPU does more (lesson 00: the balance). Left of the
# balance, time is proportional to bytes. A third of the bytes takes a third of the time.
# </details>
#
# ## Exercise: count the bytes
#
# Write this as a function for any chain. An operator is a pair: the names of the tensors that it reads, and the name of
# the tensor that it writes. Return two numbers:
#
# - the bytes that the operators move **one after another**: each reads all its inputs from memory and writes its result
#   there;
# - the bytes that **one kernel** in their place moves. It reads each outside tensor once, however many operators use it.
#   It keeps its own results on the chip. It writes only those results that are needed afterwards.

# %% exercise="fused-bytes"
Operator = tuple[Sequence[str], str]                 # the names of the tensors that it reads, and of the one that it writes


def fused_bytes(chain: Sequence[Operator], sizes: Mapping[str, int], kept: Collection[str]) -> tuple[int, int]:
    """(bytes that the operators move one after another, bytes that one kernel in their place moves).

    chain: the operators in order, each with the names of the tensors that it reads and the name of the one that it writes.
    An operator that names a tensor twice, as x * x does, reads it once. sizes: {name of a tensor: its bytes}. kept: the names
    of the results that are needed afterwards.
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
# Now three chains. Two occur in every block of a diffusion transformer: the modulated norm, and the gated residual sum
# `x + gate * branch`. The third is GELU, in the approximation from its paper:
#
# $$\mathrm{gelu}(x) \approx \tfrac{1}{2}\,x\left(1 + \tanh\left(0.798\,(x + 0.0447\,x^3)\right)\right)$$
#
# > **Predict.** Written line by line, GELU moves how many times the bytes of one fused kernel?

# %%
my_gelu = 3.0                    # your prediction

# %%
whole, vector = x.nbytes, shift.nbytes
modulated = [(["x"], "n"), (["scale"], "one_scale"), (["n", "one_scale"], "m"),
             (["m", "shift"], "y")]
gated = [(["branch", "gate"], "scaled"), (["x", "scaled"], "y")]
gelu = [(["x", "x"], "square"), (["square", "x"], "cube"), (["cube"], "a"),
        (["x", "a"], "b"), (["b"], "c"), (["c"], "tanh"),
        (["tanh"], "d"), (["x", "d"], "e"), (["e"], "y")]
ratios = {}
for name, operators in {"modulated norm": modulated, "gated residual": gated,
                        "GELU by its formula": gelu}.items():
    names = {one for reads, written in operators for one in (*reads, written)}
    sizes = {one: vector if one in ("scale", "one_scale", "shift", "gate") else whole
             for one in names}
    apart, fused = fused_bytes(operators, sizes, kept=["y"])
    ratios[name] = apart / fused
    print(f"{name:20} {apart / 1e6:7.1f} MB one after another, {fused / 1e6:6.1f} MB "
          f"fused: "
          f"{ratios[name]:.1f} times as many")
lab.beside("\nGELU", my_gelu, ratios["GELU by its formula"], "times", "counted")

# %% [markdown]
# Nobody writes GELU like that anymore. `F.gelu` is one hand-written fused kernel, and so are `F.layer_norm` and
# `scaled_dot_product_attention`. A library can fuse the chains that it knows. It does not know yours.
#
# ## torch.compile
#
# `torch.compile` fuses the chains of your own code. It has two stages. Learn to tell them apart, because they fail for
# different reasons:
#
# 1. **Dynamo** runs through your Python once, with stand-ins for tensors, and records the operations: a **graph**. It also
#    notes what the record depends on (shapes, types, Python values) as **guards**. While the guards hold, the recorded
#    graph replaces your Python code.
# 2. **Inductor** turns the graph into kernels and decides what to fuse. It generates Triton code for a GPU and C++ for a
#    CPU, and compiles it.
#
# Here is what Dynamo records of the chain:

# %%
print(kernel_counter.graphs(chain, (x, shift, scale)))

# %% [markdown]
# One graph. Now the second stage.
#
# > **Predict.** How many times as fast is the compiled chain? You have counted the bytes.

# %%
my_speedup = 1.0                 # your prediction

# %%
if compiler:
    compiled_chain = torch.compile(chain)
    begin = time.perf_counter()
    written, = kernel_counter.generated(lambda: compiled_chain(x, shift, scale))
    print(f"the first call took {time.perf_counter() - begin:.1f} s; Inductor wrote "
          f"{len(written)} kernel:", *written)
    print("largest difference:", (compiled_chain(x, shift, scale)
                                  - chain(x, shift, scale)).abs().max().item())
    fused_seconds = timing.seconds(lambda: compiled_chain(x, shift, scale), cpu, laps=5)
    lab.beside("uncompiled over compiled", my_speedup, apart_seconds / fused_seconds,
               "times")
else:
    print("This cell needs a C++ compiler, and there is none here")

# %% [markdown]
# **What you should see:** one kernel, whose name lists what it contains, and a speed-up between 1.4 and four. The bytes
# predict three. On a CPU the norm's arithmetic takes time as well; on a GPU it does not. The last digits differ, because
# sums run in another order.
#
# Compilation took seconds, and the chain takes a fraction of one. So compiling pays only for chains that run often. (If
# it took less than two seconds, Inductor found the kernel in its disk cache.)
#
# The next picture has both versions on the roofline, near the memory slope. This slope is lower than in lesson 00,
# because `clone` also pays for fresh memory pages. Fusing moves the point to the right, with the same FLOPs for fewer
# bytes, and so up the slope.

# %%
peak_flops = 2 * 1024**3 / timing.matmul(1024, 1024, 1024, torch.float32, cpu)
peak_bytes = 2 * x.nbytes / copy_seconds
flops, sizes = 8 * x.numel(), {name: vector if name in ("scale", "one_scale", "shift")
                               else whole
                               for name in ("x", "n", "m", "y", "scale", "one_scale",
                                            "shift")}
apart, fused = fused_bytes(modulated, sizes, kept=["y"])
points = {"one after another": (flops / apart, flops / apart_seconds)}
if compiler:
    points["compiled"] = (flops / fused, flops / fused_seconds)
lab.picture(style.roofline({"this machine": (peak_flops, peak_bytes)}, points,
                           "A modulated norm on this machine"),
            "A roof that rises with arithmetic intensity and then is flat. Two marks "
            "lie near its slope, far left of the flat part. The compiled one lies "
            "further right and higher")

# %% [markdown]
# ## What does not fuse
#
# Now take a whole block. What separates two fused kernels?
#
# > **Question.** Why does a compiler not make one kernel of a whole block, including the matrix multiplications?
#
# <details><summary>Answer</summary>
# In a chain, each output number needs one input number, or one token. In a matrix product it needs a whole row and a whole
# column. So the next product cannot begin before the previous one is done. A fast product also fills the chip's registers
# and shared memory with tiles of its matrices. So products are calls to specialized libraries (cuBLAS, MKL). Attention has
# its own kernel too: FlashAttention fuses two products and a softmax. (A short chain can be appended to a product, like
# the bias in <code>addmm</code>. Inductor does so with products that it generates itself, <code>mode="max-autotune"</code>.)
# </details>
#
# ## Exercise: kernels of a block
#
# So the rule is simple. Each matmul and each attention is its own kernel. Everything else between two of them becomes one
# kernel. That includes norms, because a norm needs only its own token. Count the kernels of a list of operators.

# %% exercise="kernels"
def kernels(operators: Sequence[str]) -> int:
    """How many kernels these operators become. Each "matmul" and each "attention" is one; neighbors of other kinds share one."""
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
# A block of the diffusion transformer does this (you write it in lesson 15):
#
# 1. A SiLU and a linear turn the condition of each sample into shift, scale and gate for both branches.
# 2. The first branch starts with the chain above: norm, multiply by 1 + scale, add the shift. Then come the linear for queries,
#    keys and values, attention, and another linear. Finally the block multiplies the result by the gate and adds it to the
#    branch's input.
# 3. The second branch starts and ends in the same way. In between it has a linear, GELU and another linear.
#
# > **Predict.** How many operators does its forward pass start one after another, and how many kernels remain? Count a
# > linear, a norm, attention, each sum and each product as one. Views, such as `chunk`, cost nothing.

# %%
my_operators = 10                # your prediction
my_kernels = 10

# %%
torch.manual_seed(0)
block = dit.AdaLNBlock(384, 6, 1536)
tokens, condition = torch.randn(4, 256, 384,
                                requires_grad=True), torch.randn(4, 384,
                                                                 requires_grad=True)
started = kernel_counter.operators(lambda: block(tokens, condition))
kinds = ["matmul" if name == "addmm" else "attention" if "attention" in name
         else "pointwise" for name in started]
print(kernel_counter.format_counts(Counter(started)))
lab.beside("operators", my_operators, len(started), how="counted")
lab.beside("kernels, by your rule", my_kernels, kernels(kinds), how="counted")

# %% [markdown]
# Is the rule right? Ask Inductor, for the forward and the backward pass.
#
# > **Predict.** Nearly all arithmetic of this block is in its matrix multiplications. How many times as fast are forward
# > and backward pass together on this CPU, when compiled?

# %%
my_block_speedup = 2.0           # your prediction

# %%
gradient = torch.randn(4, 256, 384)


def there_and_back(block: nn.Module) -> None:
    """Forward and backward pass."""
    block(tokens, condition).backward(gradient)


both_ways = kernel_counter.operators(lambda: there_and_back(block))
print(f"uncompiled: {len(started)} operators forward, {len(both_ways) - len(started)} "
      f"backward")
block_ms = 1e3 * timing.seconds(lambda: there_and_back(block), cpu, laps=5)
if compiler:
    compiled_block = torch.compile(block)
    forward, backward = kernel_counter.generated(lambda: there_and_back(compiled_block))
    print(f"compiled:   {len(forward)} kernels forward, {len(backward)} "
          f"backward. Forward:\n")
    print("\n".join(forward))
    compiled_ms = 1e3 * timing.seconds(lambda: there_and_back(compiled_block), cpu,
                                       laps=5)
    print(f"\nuncompiled {block_ms:.0f} ms, compiled {compiled_ms:.0f} ms")
    lab.beside("uncompiled over compiled", my_block_speedup, block_ms / compiled_ms,
               "times")
else:
    print("This cell needs a C++ compiler, and there is none here")

# %% [markdown]
# **What you should see:** your rule's number of kernels. Their names say what was fused: norm and modulation first. Then follow
# gate, residual sum, norm and modulation, across the boundary between the branches. Gate and residual sum come last.
# Megatron-LM's diffusion transformer names the same three fused steps.
#
# The speed-up is far smaller than three, perhaps none. Matrix products take nearly all of the time here, and the activations
# (1.6 MB) stay in the CPU's cache. On a GPU the same chains weigh more. It multiplies matrices thousands of times as fast as
# your machine, but moves bytes only about a hundred times as fast.
#
# > **Question.** In bf16 with autocast (lesson 04), weights and norms stay in float32, and matrix products want 16 bits.
# > Which operators does autocast add, and which of them can be fused away?

# %%
with torch.autocast("cpu", torch.bfloat16):
    in_bf16 = kernel_counter.operators(lambda: block(tokens, condition))
print(kernel_counter.format_counts(Counter(in_bf16) - Counter(started)), "more")

# %% [markdown]
# <details><summary>Answer</summary>
# Casts, <code>_to_copy</code>: of each weight and bias, and of activations on their way into a product. A cast of
# activations is one more step of the preceding chain, and fuses. A cast of a weight stands alone: some kernel has to write
# the 16-bit copy. Uncompiled, bf16 thus <i>adds</i> trips to memory. This is one reason to combine bf16 with compiling.
# </details>
#
# ## A whole step
#
# The longest chain of small operations comes last: Adam, for each parameter. The reference model has more than a hundred
# parameter tensors.
#
# > **Predict.** For 100 parameters, how many operators does Adam launch in a loop? And how many when it is fused?

# %%
my_loop, my_fused = 100, 100     # your predictions

# %%
parameters = [torch.randn(16, 16, requires_grad=True) for _ in range(100)]
for parameter in parameters:
    parameter.grad = torch.randn(16, 16)
adams = {}
for name, options in {"a loop": {"foreach": False}, "foreach": {"foreach": True},
                      "fused": {"fused": True}}.items():
    adam = torch.optim.Adam(parameters, 1e-3, **options)
    adam.step()                                      # the first step makes its states
    adams[name] = len(kernel_counter.operators(adam.step))
    print(f"{name:8} {adams[name]:4} operators")
lab.beside("in a loop", my_loop, adams["a loop"], how="counted")
lab.beside("fused", my_fused, adams["fused"], how="counted")

# %% [markdown]
# The loop starts eight operators for each parameter. `foreach` (PyTorch's default on a GPU) starts eight for the *list* of all
# parameters. `fused` updates all parameters in one operator and counts steps in another. It needs no compiler, and the library
# always uses it. The learning rate and the flag for skipped steps are tensors, so the host reads no value.
#
# Now you can count the kernels of a step before any GPU runs it. Take a diffusion transformer of 28 blocks, as deep as
# DiT-XL, and one training step, from the batch to the new weights.
#
# > **Predict.** How many operators does it start? And how many kernels remain when its blocks are compiled?

# %%
my_step, my_compiled_step = 1000, 500    # your predictions

# %%
def started_in_a_step(depth: int) -> int:
    """Operators of one training step of a diffusion transformer with `depth` blocks."""
    settings = config.load("dit-demo", [f"model.depth={depth}", "train.device=cpu"])
    training = assemble.assemble(settings,
                                 parallel.build_mesh(settings.parallel,
                                                     parallel.World(device=cpu)))
    batch = training.model.example(2, cpu)
    # the first step makes the optimizer's states
    training.step(batch)
    return len(kernel_counter.operators(lambda: training.step(batch)))


of_28, of_27 = started_in_a_step(28), started_in_a_step(27)
print(f"{of_28} operators, {of_28 - of_27} of them for each block")
lab.beside("operators of a step", my_step, of_28, how="counted")
if compiler:
    left = of_28 - 28 * (len(both_ways) - len(forward) - len(backward))
    lab.beside("kernels, blocks compiled", my_compiled_step, left, how="counted")
else:
    print("Counting a compiled block's kernels needs a C++ compiler, and "
          "there is none here")

# %% [markdown]
# On a GPU the counts differ a little: the backward pass of a norm takes two or three kernels there. More than half of the
# kernels in a compiled block are matrix products or attention. No fusing removes those.
#
# The next picture shows the backward pass of one block of the reference model on an H200, eager and compiled, 16 samples in
# bf16. Each box is a kernel.
#
# > **Predict.** Which color becomes shorter when you compile, and which cannot?

# %%
steps = lab.results("profile_compiled_h200")["timelines"]
lab.picture(profile.blocks({"eager": steps["16 samples, bf16"],
                            "compiled": steps["16 samples, bf16, compiled"]},
                           "Backward pass of one block on an H200 (recorded)"),
            "Two rows of boxes over the same time axis. Both begin with attention, "
            "which takes more than half of the time. Matrix products take about as "
            "long in both. Everything else takes less time in the compiled row, which "
            "ends earlier.")

# %% [markdown]
# Only the pale boxes shrink: norms, GELU, sums and casts. Attention is one kernel already, and matrix products do not change.
#
# Lessons 03 to 05 speed up one model step by step. NERSC's course did the same on an A100 with the same model, 16 samples a
# step:
#
# | | A100, samples/s | times the first | H200, samples/s | times the first |
# |---|--:|--:|--:|--:|
# | TF32, the training process reads the files itself | 8.8 | 1.0 | {result: rungs[0] | .1f} | 1.0 |
# | TF32, loaded ahead | 13.2 | 1.5 | {result: rungs[1] | .1f} | {result: rungs[1] / rungs[0] | .1f} |
# | 16 bits | 53.4 | 6.1 | {result: rungs[2] | .0f} | {result: rungs[2] / rungs[0] | .1f} |
# | 16 bits, compiled | 55.0 | 6.2 | {result: rungs[3] | .0f} | {result: rungs[3] / rungs[0] | .1f} |
#
# > **Question.** The compiler is worth 3% on the A100 and {result: 100 * (rungs[3] / rungs[2] - 1) | .0f}% on the H200. Give a
# > reason why, and say how you would test it.
#
# <details><summary>Answer</summary>
# By their data sheets both GPUs move 5 bytes for every 1000 operations in 16 bits, so saving reads and writes should be worth
# about as much. But the A100 read files, and the last two rows of the H200 are on random data: the A100's loader may set
# its limit. Random data on the A100 would show it.
# </details>
#
# ## Fusions that the model already has
#
# The library's models contain two fusions, compiled or not. First, queries, keys and values come from **one** linear,
# `qkv`, not three.
#
# > **Question.** What does that save, in launches and in bytes? The FLOPs are the same.
#
# <details><summary>Answer</summary>
# Two launches, and two of three reads of the activations: 3 (T·D + D·D + T·D) numbers become T·D + 3 D·D + 3 T·D. A wider
# product also fills the GPU better. The price is a fixed order of rows, (3, heads, head_dim), which matters in lesson 10.
# </details>
#
# The second is **attention**. Its scores are tokens × tokens for each head: an intermediate like any other, only larger.
# FlashAttention (Dao et al. 2022, arXiv:2205.14135) processes keys and values in blocks. For each row it keeps only the
# largest score, the running sum and the running result. The scores never leave the chip, and the backward pass recomputes
# them.
#
# > **Predict.** The reference model has 4050 tokens and 8 heads, and a batch of 16. How many GB are the scores of *one*
# > block in bf16? An H200 has 141 GB, for 12 blocks.

# %%
my_gb = 0.1                      # your prediction

# %%
reference = config.load("vit-short").model
score_bytes = 2 * 16 * reference.heads * reference.tokens**2
activation = 2 * 16 * reference.tokens * reference.dim
lab.beside("scores of a block", my_gb, score_bytes / 1e9, "GB", "computed")
print(f"queries, keys, values and result together: {4 * activation / 1e9:.2f} GB")

q, k, v = (torch.randn(2, 6, 512, 64, requires_grad=True) for _ in range(3))
for backend in (torch.nn.attention.SDPBackend.MATH,
                torch.nn.attention.SDPBackend.FLASH_ATTENTION):
    with torch.nn.attention.sdpa_kernel(backend):
        _, kept = tensor_memory.saved_for_backward(
            lambda: F.scaled_dot_product_attention(q, k, v), (q, k, v))
        calls = kernel_counter.operators(lambda: F.scaled_dot_product_attention(
            q, k, v))
    print(f"{backend.name.lower():15} {len(calls)} operators; keeps "
          f"{kept / q.nbytes:4.1f} times "
          "q's bytes, besides q, k and v")

# %% [markdown]
# The plain implementation keeps the scores, here 512 / 64 = 8 times as large as `q`, and copies of `q` and `k`. The fused
# one keeps only the result. The configuration key `attention` selects the implementation. `math` is the plain one; `flash`,
# `efficient` and `cudnn` are fused; `default` lets PyTorch choose. They match up to rounding, so measure and take the
# fastest.
#
# ## What the backward pass keeps
#
# Fusing saves memory as well. In a chain of PyTorch operators, *each* one keeps what its own backward pass needs.
#
# > **Predict.** How many tensors as large as `x` does the modulated norm keep? Go through its lines: what does the gradient
# > of each product need?

# %%
my_kept = 1.0                    # your prediction

# %%
x_small, shift_small, scale_small = (torch.randn(shape, requires_grad=True)
                                     for shape in ((4, 256, 384), (4, 384), (4, 384)))
_, kept_apart = tensor_memory.saved_for_backward(lambda: chain(x_small, shift_small,
                                                               scale_small))
lab.beside("kept by the chain, in units of x", my_kept, kept_apart / x_small.nbytes,
           how="counted")

# %% [markdown]
# Two: the norm keeps `x`. The product keeps `n`, the other factor in the gradient of `scale`. But `n` follows from `x`
# and two numbers per token, a mean and a deviation. The backward kernel can recompute it *inside*, without a trip to
# memory.
#
# ## Exercise: a fused modulate
#
# Write the modulated norm as one `autograd.Function`, forward and backward: what a fused kernel computes and what it keeps.
# It may keep **one** tensor as large as `x`, two numbers per token and two vectors per sample.
#
# Such a class has two static methods, and `Modulate.apply(x, shift, scale, eps)` runs them. PyTorch calls `forward` without
# building a graph of its operations. Save what `backward` needs with `ctx.save_for_backward(a, b, ...)`, and read it there
# from `ctx.saved_tensors`, in the same order. `backward` receives the gradient of the output. It returns one gradient for
# each argument of `forward`, in order, and `None` for an argument that needs none.
#
# Forward is simple. With mean $\mu$ and variance $\sigma^2$ over the $D$ features of a token (the variance divides by $D$),
#
# $$n = r\,(x - \mu),\quad r = 1/\sqrt{\sigma^2 + \varepsilon},\qquad y = n\,(1 + \text{scale}) + \text{shift}.$$
#
# Backward receives the gradient of $y$ and returns those of `x`, `shift`, `scale` and `eps` (`None`). For `shift` and
# `scale`, note how many tokens share one.
#
# For `x`, let $g$ be the gradient of $n$. An element of $x$ affects $n$ directly. It also acts through $\mu$ and $r$, which
# all features of the token share. Shifting all of $x$ does not change $n$. Stretching $x$ does not either, apart from
# $\varepsilon$. So subtract two parts from $g$, its mean and its component along $n$:
#
# $$\mathrm{d}x = r\,\bigl(g - \overline{g} - n\,\overline{g\,n}\bigr),$$
#
# where a bar is the mean over the features of a token. Do not modify the gradient that you receive.

# %% exercise="fused-modulate"
from course.lab.exercises.lesson05_compile_and_fuse import Modulate

# %%
check("fused-modulate")

# %% [markdown]
# Now count what your class keeps, and what the compiler keeps of the plain chain. The compiler does not know about this trick.
#
# > **Predict.** How many tensors as large as `x` does the *compiled* chain keep?

# %%
my_kept_compiled = 2.0           # your prediction

# %%
_, kept_mine = tensor_memory.saved_for_backward(lambda: Modulate.apply(x_small,
                                                                       shift_small,
                                                                       scale_small,
                                                                       1e-6))
print(f"the chain {kept_apart / x_small.nbytes:.2f}, yours "
      f"{kept_mine / x_small.nbytes:.2f} times x")
if compiler:
    _, kept_compiled = tensor_memory.saved_for_backward(lambda: torch.compile(chain)(
        x_small, shift_small, scale_small))
    lab.beside("kept by the compiled chain", my_kept_compiled,
               kept_compiled / x_small.nbytes, how="counted")
else:
    print("The compiled chain needs a C++ compiler, and there is none here")

# %% [markdown]
# The compiler sees forward and backward pass as *one* graph and cuts it where the least data crosses. It found the same
# trick as you. (AOTAutograd's partitioner does this, between Dynamo and Inductor.)
#
# Does a real model get the same gradients with your class? Put it into the blocks of `dit-demo`. The library's block
# normalizes first (`norm1` or `norm2`) and then calls `modulate`. Yours does both. So the next cell replaces each norm by
# the identity, and `modulate` by your class.

# %%
settings = config.load("dit-demo")


def gradients_and_bytes(mine: bool) -> tuple[Tensor, int]:
    """All gradients of a batch, end to end, and what the forward pass keeps."""
    model = parallel.initialize_serial(models.build_model(settings.model), 0, cpu,
                                       torch.float64)
    # gates start at zero and would block all gradients
    for number, parameter in enumerate(model.parameters()):
        parameter.data += 0.1 * random.normal(number,
                                              torch.arange(parameter.numel())).view_as(
                                                  parameter)
    batch = model.prepare(model.example(4, cpu), torch.zeros((), dtype=torch.int64))
    batch = {name: one.double() if one.is_floating_point() else one
             for name, one in batch.items()}

    def fused(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return Modulate.apply(x, shift, scale, 1e-6)

    if mine:
        for part in [*model.blocks.values(), model.head]:
            for name in [name for name, _ in part.named_children()
                         if name.startswith("norm")]:
                setattr(part, name, nn.Identity())
    with mock.patch.object(dit, "modulate", fused if mine else dit.modulate):
        output, kept = tensor_memory.saved_for_backward(lambda: model(batch),
                                                        model.parameters())
    total, weight = model.loss(output, batch)
    (total / weight).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()
                      if p.grad is not None]), kept


(its, kept_its), (mine,
                  kept_with_mine) = gradients_and_bytes(False), gradients_and_bytes(
                      True)
print(f"gradients of all {len(its):,} parameters differ by "
      f"{((mine - its).norm() / its.norm()).item():.1e}, relative")
print(f"kept for the backward pass: {kept_with_mine / kept_its:.0%} of what "
      f"the library keeps")

# %% [markdown]
# In float64 they match up to rounding. On a GPU your class alone would not be faster, because each of its lines is still a
# kernel. Somebody has to write the fused kernel, in Triton or CUDA, or a compiler does. `torch.compile` accepts your class
# and compiles both of its methods. Libraries such as Transformer Engine, Apex and Liger have such kernels; look there
# first. This course has some in `course/ops/fused_add_norm_triton.py`. Switch them on with `kernels=triton` (lesson 15).
#
# ## When Dynamo compiles again
#
# A graph is valid while its guards hold. One of them is the shape.
#
# > **Predict.** Call the chain with batches of 16, 16, 12, 10 and 7 samples. How many graphs exist at the end?

# %%
my_graphs_of_sizes = 1           # your prediction

# %%
sizes_of_calls = [(torch.randn(n, 8, 16), torch.randn(n, 16), torch.randn(n, 16))
                  for n in (16, 16, 12, 10, 7)]
lab.beside("graphs", my_graphs_of_sizes,
           len(kernel_counter.graphs(chain, *sizes_of_calls)), how="counted")

# %% [markdown]
# Two. The first graph is for 16 samples only. When the size changes, Dynamo compiles once more with a variable size, and
# that graph serves all other sizes. For a large model each compilation takes from seconds to minutes, and on a cluster
# *every rank waits* for the one that compiles. A smaller last batch of an epoch is the usual cause. So this library pads
# all batches to one size, with weight zero (lesson 01). `TORCH_LOGS=recompiles` names the guard that failed.
#
# **Block by block.** A transformer repeats one block. If you compile the whole model, Dynamo records all blocks into one
# graph. If you compile each block separately, the graph of the first one serves them all: they share the code, and
# weights are inputs. This is called **regional** compilation.
#
# > **Predict.** Take the library's `vit-demo`, 12 blocks deep. How many operations does Dynamo record for the whole model,
# > and how many block by block?

# %%
my_whole, my_regional = 100, 100         # your predictions

# %%
deep = config.load("vit-demo", ["model.depth=12"])
model = parallel.initialize_serial(models.build_model(deep.model), 0, cpu,
                                   torch.float32)
batch = model.prepare(model.example(2, cpu), torch.zeros((), dtype=torch.int64))
taken = {}
with torch.no_grad():
    for name, modules in (("whole", ()), ("block by block",
                                          tuple(model.blocks.values()))):
        begin = time.perf_counter()
        found = kernel_counter.graphs(lambda: model(batch), modules=modules)
        taken[name] = sum(map(len, found))
        print(f"{name}: {len(found)} graph, recorded and run in "
              f"{time.perf_counter() - begin:.1f} s")
lab.beside("\noperations, the model as a whole", my_whole, taken["whole"],
           how="counted")
lab.beside("block by block", my_regional, taken["block by block"], how="counted")

# %% [markdown]
# **What you should see:** about twelve times as many for the whole model. Inductor's work, most of the compile time, grows
# in the same way. So `compile=true` compiles part by part: embedding, blocks, head and loss. Compiling 48 layers takes no
# longer than 12.
#
# > **Question.** What do you lose at the borders? (Think of the last operator of a block and the first of the next.) And
# > why compile the loss, which has no matrix product at all?
#
# <details><summary>Answer</summary>
# A block ends with a residual sum, and the next begins with a norm: a chain. A compiler that sees both makes one kernel.
# Across the boundary it makes two: one more launch and one more read of x per block, on top of the 11 kernels that you counted.
# The loss is <i>only</i> a chain: subtract, square, add up. For 16 samples of the reference model it covers 83 million
# numbers, and uncompiled it makes a handful of trips with them.
# </details>
#
# > **Question.** Stochastic depth drops a branch with a probability that rises from block to block, a Python number in
# > each. What does that do to the shared code?
#
# <details><summary>Answer</summary>
# The number is part of the guards, so Dynamo compiles every block again. By default it gives up on a function after eight
# versions and runs it uncompiled, with only a warning. To share the code, make the number a tensor. Or raise the limit and
# compile every block, as the library does.
# </details>
#
# ## A graph with breaks
#
# Dynamo records operations on tensors. What happens where the code asks for a *value*? The next function protects a model
# against exploding activations. People write such code in five minutes to find a problem, and it stays for years.

# %%
# (B, T, D), (B,)
def tame_with_breaks(x: Tensor, sample: Tensor, limit: float) -> Tensor:
    # (real samples, T, D): padding has the id -1
    real = x[sample >= 0]
    largest = real.abs().max().item()
    print(f"the largest number is {largest:.3g}")
    if largest > limit:
        x = x * (limit / largest)
    return x

# %% [markdown]
# Dynamo cannot guess which way the `if` goes. So it compiles what it has recorded, runs the line in Python, and begins a new
# graph after it. That is a **graph break**. The result is right, and nobody tells you. But nothing fuses across a break. At each
# of these breaks the host also waits for the GPU, so the queue runs empty (lesson 02).
#
# > **Predict.** Call it with an `x` beyond the limit, and then with one within it. How many graphs does Dynamo record in
# > all?

# %%
my_graphs = 2                    # your prediction

# %%
example, ids = torch.randn(4, 8, 16), torch.tensor([3, 1, 4, -1])
recorded = kernel_counter.graphs(tame_with_breaks, (example, ids, 1.0),
                                 (0.1 * example, ids, 1.0))
print(*recorded, sep="\n")
lab.beside("graphs", my_graphs, len(recorded), how="counted")

# %% [markdown]
# Each piece between two breaks is a graph, if it computes anything: the comparison, the largest number, the product behind
# the `if`. No two of them can share a kernel.
#
# How do you *find* breaks? `fullgraph=True` turns the first unavoidable break into an error that names the line:

# %%
with kernel_counter.fresh_compilation():
    try:
        torch.compile(tame_with_breaks, fullgraph=True,
                      backend="eager")(example, ids, 1.0)
    except Exception as error:
        reason, _, place = str(error).partition("from user code:")
        print(reason.splitlines()[0])
        print(*[line.strip() for line in place.strip().splitlines()[1:2]])

# %% [markdown]
# Why does it name the `print`, and not the mask or the `.item()` before it? With `fullgraph=True` Dynamo treats their
# results as unknowns, a size and a number. But it cannot print an unknown number. In a run, `TORCH_LOGS=graph_breaks` prints
# each break with its reason.
#
# ## Exercise: fix the breaks
#
# Write `tame` so that Dynamo records it whole, with the same results. Fix each break:
#
# - **`x[sample >= 0]`** has as many rows as there are real samples. A size that depends on data is unknown in advance.
#   Keep the shape, and make sure that padding does not count: it may hold anything, including infinities.
# - **`.item()`** returns a Python number. Keep a tensor of one number, shape `()`.
# - **`print`** needs the value too. Return the number as a second result. The logging code can read it every hundred steps.
# - **`if`** needs it as well. Compute both outcomes and choose: `torch.where(condition, one, other)`.
#
# > **Question, before you write.** `.item()` did something more: what did it do to the *gradient*?
#
# <details><summary>Answer</summary>
# It cut the gradient off. A Python number has no history, so the factor was a constant for autograd. A tensor has a
# history: the gradient would flow through the largest number too and change the result, without a message. State what you
# mean: <code>detach()</code>.
# </details>

# %% exercise="graph-break"
def tame(x: Tensor, sample: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Scale x, (B, T, D), so that no number of a real sample is beyond `limit`; also return the largest before, ().

    Samples with the id -1 in `sample`, (B,), are padding. They may hold anything, even infinities. They do not count, but are
    scaled as well. The factor is 1 if the largest number is within the limit. For autograd the factor is a constant.
    """
    ### BEGIN SOLUTION
    real = (sample >= 0)[:, None, None]                                 # (B, 1, 1)
    largest = x.detach().abs().where(real, 0.0).amax()                  # ()
    return x * torch.where(largest > limit, limit / largest, 1.0), largest
    ### END SOLUTION

# %%
check("graph-break")

# %%
print(*kernel_counter.graphs(tame, (example, ids, 1.0), (0.1 * example, ids, 1.0)),
      sep="\n")

# %% [markdown]
# One graph for both calls. Inductor turns it into one reduction and one pass over `x`, and the host never waits. The
# library's `train_step` obeys the same rule: a flag on the device, not an `if`, makes the optimizer keep its old state
# (lesson 01).
#
# ## Open task: a block without breaks
#
# *Optional, about 45 minutes. Nothing later needs it.* `tame_with_breaks` had four breaks in six lines. Here is a whole block,
# of the kind that grows over time in a real project. Samples have different lengths, and nobody wants to compute padding.
# Attention fades in over the first steps of the training. Only tokens whose gate is open go through the MLP. Rewrite it. Our
# solution has 14 lines.

# %%
from course.lab.exercises.lesson05_open_task import (
    HEADS, SHAPES, WARM, block_with_breaks
)

lab.show("course.lab.exercises.lesson05_open_task.block_with_breaks")
weights = {name: 0.3 * torch.randn(shape) for name, shape in SHAPES.items()}
recorded = kernel_counter.graphs(block_with_breaks,
                                 *[(torch.randn(3, t, 8), torch.tensor([4, 2, t]),
                                    weights, step, [])
                                   for t, step in ((8, 0), (9, 1), (10, 2))])
print(f"{HEADS} heads, {WARM} steps of warm-up; recorded from three calls:", *recorded)

# %% [markdown]
# **What you should see:** hardly anything. Dynamo gives up at `.tolist()`, and leaves the loop and everything after it to
# Python.
#
# **Contract**
#
# - `whole_block(x, lengths, weights, step)` returns y, (B, T, D), and the largest absolute value in y, a tensor of shape ()
#   without a gradient.
# - y and the gradients of x and of the weights match those of `block_with_breaks`. In the padding, y and the gradient of x are
#   0.
# - The padding of x may hold anything, even NaN.
# - It prints nothing, and it does not change its inputs. `step` is a Python number that differs in every call.
#
# **Levels.** The check calls it with several numbers of samples and tokens, before and after the warm-up. Each level counts by
# itself, once the first is reached:
#
# | level | what the check counts |
# |---|---|
# | correct | values and gradients, not compiled |
# | one graph | the code reads no tensor's value, no shape depends on values, and Dynamo records one graph with the same results |
# | one recompilation | for all calls Dynamo records at most two graphs |
# | few kernels | at most 5 matrix products and attentions; no tensor has more numbers than q, k and v together |
#
# Start with correct. `lab.hint("whole-block")` opens the first of three hints, and each further call opens the next one.

# %% exercise="whole-block"
from course.lab.exercises.lesson05_open_task import whole_block  # noqa: F401

# %%
check("whole-block")

# %% [markdown]
# ## Summary
#
# - Between matrix products, time is bytes. Count trips to memory, not FLOPs.
# - A fused chain reads its outside inputs once, writes only what is needed afterwards, and keeps less for backward.
# - Dynamo records graphs and Inductor writes kernels. Matrix products and attention stay separate kernels.
# - An `if`, an `.item()`, a `print` or a mask as an index breaks the graph and makes the host wait.
# - A repeated block compiles once; a new shape compiles again. Leave the first steps out of every measurement.
#
# ## Questions
#
# 1. Your model has short sequences and wide layers. How much do you expect from `compile=true`?
# 2. Which tensors would a fused gated residual sum keep for its backward pass?
# 3. Compilation takes two minutes, and your cluster restarts the job every ten. What do you do?
#
# **Check your work from a terminal.** Save the notebook, then run `course check notebooks/05_compile_and_fuse_mine.ipynb`.
# Next: [lesson 06](06_cuda_graphs.ipynb) records the launches of a step once and replays them as one.
#
# ## Appendix (optional): on GPUs
#
# Whole training steps of the reference model on an H200, 16 samples in bf16. Autocast leaves the residual stream in float32;
# `stream=narrow` keeps it in bf16. Then every norm and every residual sum moves half the bytes.
#
# > **Predict** the time of a compiled step with a narrow residual stream. The next cell prints the other two times.

# %%
rows = {row["configuration"]: row for row in lab.results("vit_h200")["rows"]}


def step_ms(name: str, samples: int = 16) -> float:
    """Milliseconds of a step with this number of samples."""
    return 1e3 * samples / rows[name]["samples_per_s"]


eager_ms, fast_ms = step_ms("bf16, on the device"), step_ms("bf16, compiled")
print(f"bf16, not compiled: {eager_ms:.1f} ms a step, compiled: {fast_ms:.1f} ms")

# %%
my_narrow_ms = 60.0              # your prediction

# %%
compared = ("bf16, on the device", "bf16, compiled", "bf16, compiled, narrow stream")
lab.recorded("vit_h200", {name: {"ms a step": step_ms(name),
                                 "samples/s": rows[name]["samples_per_s"],
                                 "time to first step, s": rows[name]["first_s"]}
                          for name in compared},
             why="The reference model, whole training steps")
lab.beside("\na step, compiled, narrow", my_narrow_ms,
           step_ms("bf16, compiled, narrow stream"), "ms", "recorded")
lab.picture(style.grouped_bars({"16 samples": {name: step_ms(name)
                                               for name in compared}}, "ms a step",
                               "vit-short on an H200",
                          {"bf16, compiled, narrow stream": my_narrow_ms}),
            "Bars of milliseconds a step. "
            + "; ".join(f"{name}: {step_ms(name):.0f}" for name in compared)
            + ". A diamond marks your prediction for the last one")

# %% [markdown]
# The gain is worthwhile but far from a factor of three: attention alone takes {result: attention_share | .0%} of the
# compiled step. cuDNN's attention, PyTorch's choice on this GPU, reaches {result: cudnn | .0f} TFLOP/s here.
# FlashAttention-2 (`attention=flash`) reaches {result: flash | .0f}. Both are fused.
#
# > **Predict** the compiled step with FlashAttention-2.

# %%
my_flash_ms = 90.0               # your prediction

# %%
lab.beside("a step, compiled, attention=flash", my_flash_ms,
           step_ms("bf16, compiled, flash attention"), "ms", "recorded")

# %% [markdown]
# The arithmetic gives {result: flash_by_arithmetic | .0%} more time, the measurement {result: flash_measured | .0%}. Check
# in a profile which attention runs.
#
# > **Question.** Compiling delays the first step. After how many steps has it paid off?

# %%
extra = rows["bf16, compiled"]["first_s"] - rows["bf16, on the device"]["first_s"]
print(f"The first step comes {extra:.1f} s later, and each step saves "
      f"{eager_ms - fast_ms:.1f} ms: "
      f"compiling pays off after {1e3 * max(extra, 0) / (eager_ms - fast_ms):.0f} "
      "steps")

# %% [markdown]
# Small models on small batches are different. One sample of a small model (12 layers of width 768, 256 tokens) starts
# {result: kernels_eager | d} kernels, each shorter than its launch. The GPU waits for the host (lesson 02).
#
# > **Predict.** How many of these kernels remain when it is compiled, and how many times as fast is the step?

# %%
my_kernels = 400                 # your predictions
my_small_speedup = 2.0

# %%
small_names = ("one sample: eager", "one sample: compiled")
small, compiled_small = (rows[name] for name in small_names)
lab.beside("kernels of a compiled step", my_kernels, compiled_small["kernels"],
           how="recorded")
lab.beside("one sample, compiled over uncompiled", my_small_speedup,
           compiled_small["samples_per_s"] / small["samples_per_s"],
           "times", "recorded")
lab.recorded("vit_h200", {name: {"kernels": rows[name]["kernels"],
                                 "ms a step": step_ms(name, 1),
                                 "µs for each kernel": 1e3 * step_ms(name, 1)
                                 / rows[name]["kernels"]} for name in small_names},
             why="One sample of a small model")

# %% [markdown]
# Compiled, the step is slower! Only {result: 1 - kernels_compiled / kernels_eager | .0%} of the kernels are gone, and the
# host spends longer on each remaining one. It checks guards first. Then Python code from Inductor allocates memory and
# launches the kernels. PyTorch's own operators do both in C++. A busy GPU hides this cost. Here the GPU waits for the host.
#
# So compile what is bound by memory. Against launch overhead you need CUDA graphs, the topic of lesson 06.
#
# ```
# course train vit-opt                                      # bf16 and compile=true
# course train vit-short compile=true attention=flash       # or cudnn, efficient, math
# TORCH_LOGS=graph_breaks,recompiles course train vit-short compile=true train.steps=3
# TORCH_LOGS=output_code course train vit-demo compile=true train.steps=1    # the kernels from Inductor
# TORCHINDUCTOR_CACHE_DIR=$HOME/inductor course train vit-opt     # keep compiled kernels between jobs
# course profile vit-opt                                    # the remaining kernels and their times
# course bench vit --out FILE                               # these steps, on your GPU
# ```
