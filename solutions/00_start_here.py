# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 00 · Start here
#
# This course takes you from one processor to model parallelism. You will train real models, and before you change
# something you will say what the change should do, in numbers. Then you measure. Where the two disagree there is
# something to learn, and that is where most of this course happens.
#
# **In this lesson** you meet the parts that every lesson is made of, find out what your machine can do, and predict
# the speed of work that it has never done before.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 30 minutes |
# | computing | half a minute on two cores |
# | you write | two short functions |
# | you measure | the most arithmetic and the most memory traffic that your machine manages in a second |

# %% [markdown]
# ## How to use a notebook of this course
#
# A notebook is made of cells. Click the one below and press **Shift + Enter**: it runs, and the next one is selected.
# Work from top to bottom. If you get lost, choose *Kernel → Restart Kernel and Run All Cells*: a finished lesson runs
# through, an unfinished one stops at the first exercise you have not solved.
#
# **Work in a copy**: *File → Save Notebook As…*, and append `_mine` to the name: `notebooks/00_start_here_mine.ipynb`. When
# the course is updated, `git pull` brings a new version of its own notebooks and leaves yours alone. (Did you
# work in the original? Then `git pull` stops and says so; nothing is lost. Save your notebook under the other name,
# run `git restore notebooks`, and pull again.)

# %%
from course.lab import notebook as lab
from course.lab.notebook import check

lab.begin("00")

# %% [markdown]
# The line above says where you are running. You will meet the same lessons on three kinds of machine:
#
# - a **laptop**: everything runs on its CPU with small data. Where a cell needs a GPU it says so, shows what was
#   measured on one, and goes on;
# - **one GPU**: the same cells measure it;
# - a **cluster**: what you developed here runs there unchanged, on as many GPUs as you ask for.

# %% [markdown]
# ## What is this machine?
#
# `course doctor` looks at everything that the course uses, and says how to get what is missing. Nothing in this lesson
# needs more than an *ok* for Python and PyTorch. Rows without a mark are plain facts, or things you can do without.

# %%
from course.cli import doctor

doctor.show(doctor.examine())

# %% [markdown]
# ## Two ceilings
#
# Whatever a model is called, a training step comes down to two kinds of work: **arithmetic** on numbers, and **moving**
# numbers between memory and the units that do the arithmetic. A machine has a ceiling for each: so many floating-point
# operations a second (FLOP/s), so many bytes a second. You are going to measure both. On a busy machine every
# measurement comes out too slow, so close other programs that compute; `background_load.report()` says whether any are left.

# %%
from course.lab.instruments import background_load

background_load.report()

# %% [markdown]
# The arithmetic of deep learning is almost all matrix multiplication, so that is what we measure first.
#
# > **Predict.** How many FLOP/s will your machine reach when it multiplies two 1024 × 1024 matrices of 32-bit floats?
# > A hint of scale: a core runs at about 3 × 10⁹ cycles a second, and in one cycle does 16 to 64 operations on
# > 32-bit floats. How many cores have you got? Write your number below **before** you run the cell after it.

# %%
my_flops_per_second = 100e9      # your prediction

# %%
import torch

from course.bench import timing

device = torch.device("cuda" if lab.gpu() else "cpu")
side = 1024
seconds = timing.matmul(side, side, side, torch.float32, device)
peak_flops = 2 * side**3 / seconds

lab.beside("matrix multiplication, 1024 x 1024, float32", my_flops_per_second / 1e9, peak_flops / 1e9, "GFLOP/s")

# %% [markdown]
# **What you should see:** cores × cycles × operations, for instance 2 × 3 × 10⁹ × 32 = 190 GFLOP/s, is what a CPU could
# do if nothing ever waited, and a large matrix multiplication comes close to it. (A GPU reaches tens of thousands of
# GFLOP/s.) If yours is well below, it does fewer operations in a cycle than you thought, or runs slower when it is
# warm. From here on the ceiling is what you *measured*.
#
# *How was this measured?* One run proves little: the first one finds nothing in the caches, and at any moment your
# machine may be busy with something else. `bench.seconds` runs the work a few times without counting, then takes the
# **median** of seven laps. Every time in this course is measured like this. Here is all there is to it, the measurement and
# one lap of it:

# %%
lab.show("course.bench.timing.seconds")
lab.show("course.bench.timing._lap")

# %% [markdown]
# > **Question.** What does `wait` do, and why would every GPU look infinitely fast without it?
#
# <details><summary>Answer</summary>
# A call that gives work to a GPU returns before the work is done. Without waiting for the device you would measure how
# long it takes to <i>ask</i>. On a CPU the call returns when the work is done, and there is nothing to wait for.
# </details>

# %% [markdown]
# Now the other ceiling. Copying 64 MB to another place in memory reads 64 MB and writes 64 MB.
#
# > **Predict.** How many bytes a second? One bank of a laptop's memory moves 20 to 40 GB/s; most have two or more.

# %%
my_bytes_per_second = 40e9       # your prediction

# %%
megabytes = 1000 if lab.gpu() else 64
peak_bytes = 2 * megabytes * 1e6 / timing.copy(megabytes, device)

lab.beside(f"copy of {megabytes} MB", my_bytes_per_second / 1e9, peak_bytes / 1e9, "GB/s")
print(f"\nIn the time in which one byte moves, this machine does {peak_flops / peak_bytes:.1f} floating-point operations.")

# %% [markdown]
# **What you should see:** a good part of what the memory's data sheet says, and not all of it. The data sheet's number is the
# clock times the width of the bus, as if each cycle moved data. From here on, this ceiling too is what you *measured*.
#
# Remember that last number: it is the **balance** of your machine. Work that does fewer operations than this for each
# byte it moves leaves the arithmetic units waiting. On the best GPUs the balance is above 100, which is why so
# much of this course is about moving less.
#
# If you doubt a measurement, run its cell again: if the two results differ by more than a few percent, your machine is
# not quiet.

# %% [markdown]
# ## Your first exercise: what a matrix multiplication costs
#
# To predict a time you have to know the work. Multiply `a`, of shape (m, k), by `b`, of shape (k, n):
#
# - the result has how many numbers, and how many multiplications and additions does each of them take? Count a
#   multiplication and an addition as one **FLOP** each (k products need k − 1 additions; everybody counts k);
# - at the very least every number of `a` and `b` is read once, and every number of the result is written once. One
#   number has `itemsize` bytes: 4 in float32, 2 in bf16, 1 in FP8.
#
# Replace the line that raises `NotImplementedError` by your code, and run the cell.

# %% exercise="matmul-cost"
def matmul_cost(m: int, k: int, n: int, itemsize: int) -> tuple[int, int]:
    """FLOPs, and bytes moved at least, of (m, k) @ (k, n) with `itemsize` bytes a number."""
    ### BEGIN SOLUTION
    flops = 2 * m * k * n
    moved = itemsize * (m * k + k * n + m * n)
    return flops, moved
    ### END SOLUTION

# %% [markdown]
# Now **check** it. The check takes what you wrote, runs it in a process of its own on numbers drawn at random, and
# says what held, what did not, and often why. It is not an exam: check as often as you like. Get something wrong on
# purpose once (leave out the factor of two, say) and look at what it tells you.

# %%
check("matmul-cost")

# %% [markdown]
# ## How long must it take?
#
# A piece of work, so many FLOPs and so many bytes, meets both ceilings. While the arithmetic units are busy with one
# piece, the next can be on its way from memory, so the two times overlap, and in the best case **the longer one** is
# all you wait for.
#
# > **Question.** Multiplying two 1024 × 1024 matrices: which of your two ceilings bounds it? And adding them?
#
# <details><summary>Answer</summary>
# The product does 2 × 1024³ ≈ 2.1 × 10⁹ FLOPs and moves 12.6 MB: 171 FLOPs a byte, more than the balance of any
# laptop, so arithmetic bounds it. The sum moves the same 12.6 MB for 10⁶ FLOPs: one FLOP for every 12 bytes. Memory
# bounds it, on every machine there is.
# </details>
#
# ## Exercise: the roofline
#
# Write the least time in seconds that a machine with these two ceilings needs for a piece of work.

# %% exercise="roofline"
def roofline_seconds(flops: float, moved: float, peak_flops: float, peak_bytes: float) -> float:
    """The least seconds that a machine needs for so many FLOPs and bytes, at its ceilings per second."""
    ### BEGIN SOLUTION
    computing = flops / peak_flops
    moving = moved / peak_bytes
    return max(computing, moving)
    ### END SOLUTION

# %%
check("roofline")

# %% [markdown]
# ## Predict, then measure
#
# With your two functions you can say how long work should take that your machine has never done. These are the shapes
# of the model you will train in the next lesson: tokens × width, times width × 4 width, for batches from tiny to large;
# and two square ones.
#
# > **Predict.** Look at the list. For which rows will the prediction be best, and for which will the machine be slower
# > than predicted?

# %%
shapes = {"1 token": (1, 128, 512), "16 tokens": (16, 128, 512), "128 tokens": (128, 128, 512),
          "2048 tokens": (2048, 128, 512), "64 x 64": (64, 64, 64), "768 x 768": (768, 768, 768)}

print(f"{'':12} {'predicted':>12} {'measured':>12}   measured / predicted")
points = {}
for name, (m, k, n) in shapes.items():
    flops, moved = matmul_cost(m, k, n, itemsize=4)
    predicted = roofline_seconds(flops, moved, peak_flops, peak_bytes)
    measured = timing.matmul(m, k, n, torch.float32, device)
    points[name] = (flops / moved, flops / measured)
    print(f"{name:12} {predicted * 1e6:9.1f} us {measured * 1e6:9.1f} us   {measured / predicted:5.2f}")

# %% [markdown]
# **What you should see:** the two largest take what you predicted, give or take a fifth. Smaller ones take
# longer, up to five times as long. And one token may even be *faster* than predicted, which a least time should not
# allow.
#
# To see why, draw it. Across: **arithmetic intensity**, FLOPs for each byte that must move. Up: FLOP/s. The roof is your
# prediction: on the left the slope of memory, on the right the flat ceiling of arithmetic, and the dotted line between
# them is your machine's balance. The marks are what you measured.

# %%
from course.lab.figures import style

lab.picture(style.roofline({"this machine": (peak_flops, peak_bytes)}, points, "Matrix multiplications on this machine"),
            "A roof that rises with arithmetic intensity and then is flat. Of six marks the two largest multiplications lie "
            "close to it, 128 tokens, 16 tokens and 64 x 64 below it, and 1 token on its slope or above it")

# %% [markdown]
# > **Question.** Small multiplications, such as 64 x 64, lie below the roof. They neither compute much nor move much. What
# > are they waiting for? And why can a mark on the *left*, such as 1 token, lie **above** the slope?
#
# <details><summary>Answer</summary>
# For somebody to start them: calling an operation costs a few microseconds whatever its size. You will meet this
# <i>launch overhead</i> again in lesson 06, where CUDA graphs remove it. And for one another: all cores that share a
# multiplication wait for the last of them. Call <code>torch.set_num_threads(1)</code> and run the cell again: a single core
# waits for nobody. Which rows change?<br>
# Above the slope: the same small matrices are multiplied again and again while we measure, so they stay in the caches,
# which are faster than the memory that the copy measured.
# </details>

# %% [markdown]
# ## How many tokens does it take?
#
# The next picture shows one layer of the reference model of lesson 01, a map from width 384 to 1536, *at best*, on your roof.
# Its weights have to be read whether one token uses them or 64,800, which is a whole batch of that model: 16 samples of
# 45 × 90 = 4050 tokens. The slider changes how many tokens use them at once; it starts at one.
#
# > **Predict, before you move it:** at about how many tokens will the mark reach the ceiling of arithmetic?

# %%
from course.lab.figures import widgets


def layer_on_the_roof(tokens: int):
    """Where a layer of width 384 -> 1536 lies on this machine's roofline, at so many tokens."""
    flops, moved = matmul_cost(tokens, 384, 1536, itemsize=4)
    best = flops / roofline_seconds(flops, moved, peak_flops, peak_bytes)
    return style.roofline({"this machine": (peak_flops, peak_bytes)}, {f"{tokens} tokens": (flops / moved, best)},
                            "A layer of width 384 to 1536, at best")


slider = widgets.explore(layer_on_the_roof, tokens=[1, 4, 16, 64, 256, 1024, 4096, 16384, 64800],
                         alt="The roof of this machine, and on it the layer at as many tokens as the slider says.")

# %% [markdown]
# <details><summary>Answer</summary>
# At roughly twice your machine's balance: on a laptop, ten or twenty tokens. As long as the weights are most of what
# moves, t tokens do 2·t operations for each weight of 4 bytes: t/2 FLOPs a byte. Where that equals the balance, the
# mark reaches the ceiling. From there on more tokens cost more time; before, they cost next to <i>nothing</i>. In bf16
# on an H200, whose balance is about 160, it takes more than 300: by then the layer's inputs and outputs are as many
# bytes as its weights, and no longer small beside them. This is why one works in batches, and why a language model that
# writes one token at a time leaves a GPU idle.
# </details>

# %% [markdown]
# ## The same on a large GPU
#
# > **Predict.** An NVIDIA H200 has 132 processors, each with units that multiply small matrices in 16-bit formats. How
# > many times your machine's FLOP/s will it reach in bf16? How many times its bytes a second? And its balance?
#
# (A number in **bf16** has 16 bits. In **TF32** these units read 19 of the 32 bits of a float32. Lesson 04 is about both.)

# %%
my_flops_ratio = 1000            # your prediction: H200's bf16 FLOP/s over this machine's float32 FLOP/s
my_bytes_ratio = 100             # and the same for bytes a second

# %%
h200 = lab.results("ceilings_h200")["ceilings"]
if lab.gpu():
    mine = timing.ceilings(device, largest=8192)
    print({name: lab.number(value / 1e12) for name, value in mine.items()}, "TFLOP/s; copy: TB/s")
lab.recorded("ceilings_h200", {name: {"TFLOP/s": h200[f"matmul {name}"] / 1e12,
                                      "FLOPs for each byte that moves": h200[f"matmul {name}"] / h200["copy"]}
                               for name in ("fp32", "tf32", "bf16")},
             why="For comparison, matrices of 8192 x 8192")
lab.beside("\nH200 in bf16 over this machine in float32", my_flops_ratio, h200["matmul bf16"] / peak_flops, "times",
           how="from both")
lab.beside("memory traffic, H200 over this machine", my_bytes_ratio, h200["copy"] / peak_bytes, "times", how="from both")

# %% [markdown]
# **What you should see:** against a laptop's CPU, thousands of times the arithmetic, and about a hundred times the memory
# traffic.
#
# > **Question.** The GPU gains more in arithmetic than in memory traffic, and more again with every smaller format.
# > What does that do to its balance, and to the work of its programmers?
#
# <details><summary>Answer</summary>
# The balance rises from a few FLOPs a byte to well over a hundred. Operations that were bounded by arithmetic on
# your laptop are bounded by memory there: additions, normalisations, activations, all that touches every number once.
# Lessons 04 and 05 are about those.
# </details>

# %% [markdown]
# ## Many processes on one machine
#
# From lesson 07 on, a model is trained by several **ranks**: processes, one for each GPU, that send tensors to one another.
# You do not need several GPUs to learn how that works: `ranks(4)` runs a function on four processes of your
# laptop, with the very calls that a cluster uses.
#
# Ranks talk in **collectives**: calls in which every rank of a group takes part, each with a tensor of its own, and
# which end when all have come. The one you will use most is the **all-reduce**: it adds up the tensors of all ranks and gives the
# sum to every one of them. Below, each rank brings its own number: rank 0 brings 0, rank 1 brings 1, and so on.
#
# > **Predict** the four results before you run it.

# %%
import torch.distributed as dist

from course.ranks.notebook_ranks import ranks


def add_up():
    mine = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(mine)
    return f"rank {dist.get_rank()} of {dist.get_world_size()} has the sum {mine.item():.0f}"


ranks(4)(add_up)

# %% [markdown]
# Everybody has 0 + 1 + 2 + 3 = 6: that is the *all* in all-reduce.
#
# > **Question.** A collective ends when all have come. What happens if one rank does not call it?
#
# <details><summary>Answer</summary>
# The others wait for it. On a cluster they wait for minutes, until a time limit ends the job, and it is not easy to find out
# whom they waited for. <code>ranks</code> notices at once, and says which rank is missing, and where. Try it: put
# <code>if dist.get_rank() &lt; 3:</code> before the all-reduce.
# </details>

# %% [markdown]
# ## What you know now
#
# - A machine has two ceilings, and their ratio, the balance, says which one a piece of work will meet.
# - The least time of a piece of work is the longer of its two times. You can compute it before you run it.
# - Small work waits for neither: it waits to be started.
# - Ranks talk in collectives, which end when every rank has called them.
#
# **Check your work once more, from outside.** Save the notebook; then, in a terminal, in the folder of the course:
#
# ```
# . .venv/bin/activate
# course check notebooks/00_start_here_mine.ipynb
# ```
#
# Next: [lesson 01](01_baseline.ipynb), where you write a training step, train a model that forecasts the weather, and
# find out how much of your machine it uses.
