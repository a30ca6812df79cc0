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
# This course takes you from one processor to model parallelism. You train real models. Before you change something, you
# predict in numbers what the change will do. Then you measure. Where prediction and measurement disagree, you learn
# something.
#
# **What you will learn**
#
# - How to work with these notebooks: predict, write, check, measure.
# - How fast your machine computes and how fast it moves data.
# - How to predict the time of a matrix multiplication before you run it.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 30 minutes |
# | computing | half a minute on two cores |
# | you write | two short functions |
# | you measure | how many FLOPs your machine computes in a second, and how many bytes it moves |

# %% numbers=true
from course.bench.results import load

ceilings = load("ceilings_h200")["ceilings"]
bf16_balance = ceilings["matmul bf16"] / ceilings["copy"]             # FLOPs a byte
bf16_tokens = bf16_balance / (1 - bf16_balance * (1 / 384 + 1 / 1536))     # where a layer 384 -> 1536 reaches it

# %% [markdown]
# ## How to use a notebook of this course
#
# A notebook consists of cells. Click the first code cell below and press **Shift + Enter**: the cell runs, and Jupyter
# selects the next one. Work from top to bottom. If you get lost, choose *Kernel → Restart Kernel and Run All Cells*. A
# finished lesson runs to its end; an unfinished one stops at the first exercise that you have not solved.
#
# **Work in a copy.** Choose *File → Save Notebook As…* and append `_mine` to the name:
# `notebooks/00_start_here_mine.ipynb`. Then `git pull` updates the course's notebooks and leaves your copy alone. If you
# worked in the original by mistake, `git pull` stops with a message and you lose nothing. Save your notebook under the
# other name, run `git restore notebooks`, and pull again.

# %%
from course.lab import notebook as lab
from course.lab.notebook import check

lab.begin("00")

# %% [markdown]
# The line above names the machine that you run on. The lessons run on three kinds of machine:
#
# - **A laptop** runs everything on its CPU, with small data. A cell that needs a GPU shows a recorded result instead.
# - **One GPU** runs these cells itself.
# - **A cluster** runs your code unchanged, on as many GPUs as you ask for.

# %% [markdown]
# ## What is this machine?
#
# `course doctor` checks everything that the course uses, and tells you how to install what is missing. This lesson needs
# *ok* only for Python and PyTorch. Rows without a mark are facts or optional parts.

# %%
from course.cli import doctor

doctor.show(doctor.examine())

# %% [markdown]
# ## Two ceilings
#
# Every training step consists of two kinds of work: **arithmetic** on numbers, and **moving** numbers between memory
# and the arithmetic units. A machine has a ceiling for each: floating-point operations a second (FLOP/s), and bytes a
# second. You will measure both. Other programs make every measurement too slow, so close those that compute.
# `background_load.report()` tells you whether any are left.

# %%
from course.lab.instruments import background_load

background_load.report()

# %% [markdown]
# Most of the arithmetic in deep learning is matrix multiplication, so measure that first.
#
# > **Predict.** How many FLOP/s will your machine reach when it multiplies two 1024 × 1024 matrices of 32-bit floats?
# > Hint: a core runs at about 3 × 10⁹ cycles a second. In one cycle it does 16 to 64 operations on 32-bit floats. How
# > many cores do you have? Write your number below **before** you run the next cell.

# %%
my_flops_per_second = 100e9      # your prediction

# %%
import torch

from course.bench import timing

device = torch.device("cuda" if lab.gpu() else "cpu")
side = 1024
seconds = timing.matmul(side, side, side, torch.float32, device)
peak_flops = 2 * side**3 / seconds

lab.beside("matrix multiplication, 1024 x 1024, float32",
           my_flops_per_second / 1e9, peak_flops / 1e9, "GFLOP/s")

# %% [markdown]
# **What you should see:** a CPU that never waits reaches cores × cycles × operations. For instance,
# 2 × 3 × 10⁹ × 32 = 190 GFLOP/s. A large matrix multiplication comes close. (A GPU reaches tens of thousands of
# GFLOP/s.) If your number is much lower, your cores do fewer operations in a cycle, or they slow down when they get
# warm. From here on, your ceiling is what you *measured*.
#
# *How does the course measure?* One run proves little: its data are not in the caches yet, and the machine may be busy
# with something else. `timing.seconds` therefore warms up first, and then takes the **median** of seven laps. The
# course's benchmarks use this function. The next cell shows it, and the function for one lap.

# %%
lab.show("course.bench.timing.seconds")
lab.show("course.bench.timing._lap")

# %% [markdown]
# > **Question.** What does `wait` do, and why would every GPU look infinitely fast without it?
#
# <details><summary>Answer</summary>
# A call that gives work to a GPU returns before the GPU has done the work. Without waiting for the device, you would
# measure how long it takes to <i>submit</i> the work. On a CPU the call returns when the work is done, so there is
# nothing to wait for.
# </details>

# %% [markdown]
# Now measure the other ceiling. Copying 64 MB reads 64 MB from memory and writes 64 MB to another place.
#
# > **Predict.** How many bytes a second? One memory channel of a laptop moves 20 to 40 GB/s; most laptops have two or
# > more.

# %%
my_bytes_per_second = 40e9       # your prediction

# %%
megabytes = 1000 if lab.gpu() else 64
peak_bytes = 2 * megabytes * 1e6 / timing.copy(megabytes, device)

lab.beside(f"copy of {megabytes} MB", my_bytes_per_second / 1e9, peak_bytes / 1e9,
           "GB/s")
print(f"\nWhile this machine moves one byte, it can do {peak_flops / peak_bytes:.1f} "
      "floating-point operations.")

# %% [markdown]
# **What you should see:** less than the memory's data sheet promises. The data sheet multiplies the clock rate by the
# width of the bus, as if every cycle moved data. Again, use what you *measured*.
#
# Remember the last number: it is the **balance** of your machine. If an operation does fewer FLOPs than this for each
# byte that it moves, the arithmetic units wait for memory. The best GPUs have a balance above 100, so much of this course
# is about moving less data.
#
# If you doubt a measurement, run its cell again. If the two results differ by more than a few percent, other programs
# disturb your machine.

# %% [markdown]
# ## A large GPU
#
# > **Predict.** An NVIDIA H200 has 132 processors, each with units that multiply small matrices in 16-bit formats. How
# > many times your machine's FLOP/s does it reach in bf16? How many times your machine's bytes a second? What is the H200's
# > balance?
#
# (A number in **bf16** has 16 bits. In **TF32** these units read 19 of the 32 bits of a float32. Lesson 04 explains both.)

# %%
# your prediction: H200's bf16 FLOP/s over this machine's float32 FLOP/s
my_flops_ratio = 1000
# your prediction: H200's bytes a second over this machine's
my_bytes_ratio = 100

# %%
h200 = lab.results("ceilings_h200")["ceilings"]
if lab.gpu():
    mine = timing.ceilings(device, largest=8192)
    print({name: lab.number(value / 1e12) for name, value in mine.items()},
          "TFLOP/s; copy: TB/s")
lab.recorded("ceilings_h200",
             {name: {"TFLOP/s": h200[f"matmul {name}"] / 1e12,
                     "FLOPs for each byte moved": h200[f"matmul {name}"] / h200["copy"]}
              for name in ("fp32", "tf32", "bf16")},
             why="For comparison: matrices of 8192 x 8192")
lab.beside("\nH200 in bf16 over this machine in float32", my_flops_ratio,
           h200["matmul bf16"] / peak_flops, "times", how="computed")
lab.beside("memory traffic, H200 over this machine", my_bytes_ratio,
           h200["copy"] / peak_bytes, "times", how="computed")

# %% [markdown]
# **What you should see:** compared with a laptop's CPU, thousands of times the arithmetic, but only about a hundred
# times the memory traffic.
#
# > **Question.** The GPU gains more in arithmetic than in memory traffic, and more again with every smaller format.
# > What does that do to its balance, and to the work of its programmers?
#
# <details><summary>Answer</summary>
# The balance rises from a few FLOPs a byte to well over a hundred, so memory limits more operations. On every machine it
# limits additions, normalizations and activations, which touch each number once. On the GPU it also limits small matrix
# multiplications. Programmers have to move less data: lessons 04 and 05 are about that.
# </details>

# %% [markdown]
# ## Several processes on one machine
#
# From lesson 07 on, several **ranks** train a model together. A rank is a process; on a cluster each rank has its own GPU.
# Ranks send tensors to one another. You do not need several GPUs to learn this. `ranks(4)` runs a function in four
# processes on your laptop, with the same calls as on a cluster.
#
# Ranks communicate through **collectives**. Every rank of a group calls the collective with its own tensor, and the
# collective ends when every rank has called it. You will use the **all-reduce** most: it adds the tensors of all ranks
# and gives the sum to every rank. Below, each rank brings its own number: rank 0 brings 0, rank 1 brings 1, and so on.
#
# > **Predict** the four results before you run the cell.

# %%
import torch.distributed as dist

from course.ranks.notebook_ranks import ranks


def add_up():
    mine = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(mine)
    return (f"rank {dist.get_rank()} of {dist.get_world_size()} has the sum "
            f"{mine.item():.0f}")


ranks(4)(add_up)

# %% [markdown]
# Every rank has 0 + 1 + 2 + 3 = 6: that is the *all* in all-reduce.
#
# > **Question.** What happens if one rank does not call the collective?
#
# <details><summary>Answer</summary>
# The others wait for it. On a cluster they wait for minutes, until a time limit ends the job, and it is hard to find out
# which rank was missing. <code>ranks</code> notices at once, and reports which rank is missing and where it is. Try it:
# put <code>if dist.get_rank() &lt; 3:</code> before the all-reduce.
# </details>

# %% [markdown]
# ## Your first exercise: what a matrix multiplication costs
#
# To predict a time, you need to know the work. Multiply `a`, of shape (m, k), by `b`, of shape (k, n):
#
# - How many numbers does the result have? How many multiplications and additions does each of them take? Count each
#   multiplication and each addition as one **FLOP**. (A sum of k products needs k − 1 additions; by convention, count k.)
# - The machine reads every number of `a` and `b` at least once, and writes every number of the result once. One number
#   has `itemsize` bytes: 4 in float32, 2 in bf16, 1 in FP8.
#
# Replace the line that raises `NotImplementedError` with your code, and run the cell.

# %% exercise="matmul-cost"
def matmul_cost(m: int, k: int, n: int, itemsize: int) -> tuple[int, int]:
    """The FLOPs of (m, k) @ (k, n), and the fewest bytes that it can move, with `itemsize` bytes a number."""
    ### BEGIN SOLUTION
    flops = 2 * m * k * n
    moved = itemsize * (m * k + k * n + m * n)
    return flops, moved
    ### END SOLUTION

# %% [markdown]
# Now **check** your function. The check runs your code in its own process, on random numbers. It reports what is right,
# what is wrong, and often why. It is not an exam: check as often as you like. Make a mistake on purpose once (leave out
# the factor of two, say) and read the hint.

# %%
check("matmul-cost")

# %% [markdown]
# You can also check a whole notebook from a terminal. Save it, go to the folder of the course, and run:
#
# ```
# . .venv/bin/activate
# course check notebooks/00_start_here_mine.ipynb
# ```

# %% [markdown]
# ## How long must it take?
#
# A piece of work with a number of FLOPs and a number of bytes meets both ceilings. While the arithmetic units work on one
# piece, memory can already deliver the next one. So the two times overlap, and in the best case you wait only for **the
# longer one**.
#
# > **Question.** Which of your two ceilings limits the multiplication of two 1024 × 1024 matrices? And their addition?
#
# <details><summary>Answer</summary>
# The product does 2 × 1024³ ≈ 2.1 × 10⁹ FLOPs and moves 12.6 MB: 171 FLOPs a byte. That is more than the balance of any
# laptop, so arithmetic limits it. The sum moves the same 12.6 MB for 10⁶ FLOPs: one FLOP for every 12 bytes. Memory
# limits it, on every machine.
# </details>
#
# The next cell measures six multiplications. Four have shapes from the next lesson's model, (tokens × width) times (width × 4
# width), for small to large batches. Two are square.
#
# > **Predict.** Which of the six will come closest to your ceilings, and which will stay far below?

# %%
from course.lab.figures import style

shapes = {"1 token": (1, 128, 512), "16 tokens": (16, 128, 512),
          "128 tokens": (128, 128, 512),
          "2048 tokens": (2048, 128, 512), "64 x 64": (64, 64, 64),
          "768 x 768": (768, 768, 768)}
times, points = {}, {}
for name, (m, k, n) in shapes.items():
    flops, moved = matmul_cost(m, k, n, itemsize=4)
    times[name] = timing.matmul(m, k, n, torch.float32, device)
    points[name] = (flops / moved, flops / times[name])

lab.picture(style.roofline({"this machine": (peak_flops, peak_bytes)}, points,
                           "Matrix multiplications on this machine"),
            "A roof that rises with arithmetic intensity and then is flat. The two "
            "largest of six multiplications lie close to it; 128 tokens, 16 tokens "
            "and 64 x 64 lie below it; 1 token lies on its slope or above it")

# %% [markdown]
# The horizontal axis is the **arithmetic intensity**: FLOPs for each byte that must move. The vertical axis is FLOP/s. The
# roof is the best that your two ceilings allow. On the left is the slope of memory, on the right the flat ceiling of
# arithmetic. The dotted line between them is the balance of your machine. The marks are your measurements.
#
# > **Question.** Small multiplications, such as 64 x 64, lie below the roof. They compute little and move little. What
# > are they waiting for? And why can a mark on the *left*, such as 1 token, lie **above** the slope?
#
# <details><summary>Answer</summary>
# They wait for Python to start them. Calling an operation costs a few microseconds, whatever its size. Lesson 06 removes this
# <i>launch overhead</i> with CUDA graphs. They also wait for one another: all cores that share a multiplication wait for the
# slowest. Call <code>torch.set_num_threads(1)</code> and run the cell again: a single core waits for nobody. Which marks
# move?<br> Above the slope: the measurement multiplies the same small matrices again and again, so they stay in the caches.
# Caches are faster than the memory that the copy measured.
# </details>
#
# ## Exercise: the roofline
#
# Write the least time in seconds that a machine with these two ceilings needs for a piece of work.

# %% exercise="roofline"
def roofline_seconds(flops: float, moved: float, peak_flops: float, peak_bytes: float) -> float:
    """The least time, in seconds, for this work on a machine with these ceilings, per second."""
    ### BEGIN SOLUTION
    computing = flops / peak_flops
    moving = moved / peak_bytes
    return max(computing, moving)
    ### END SOLUTION

# %%
check("roofline")

# %% [markdown]
# Now compare your predictions with the measurements.

# %%
print(f"{'':12} {'predicted':>12} {'measured':>12}   measured / predicted")
for name, (m, k, n) in shapes.items():
    predicted = roofline_seconds(*matmul_cost(m, k, n, itemsize=4), peak_flops,
                                 peak_bytes)
    measured = times[name]
    print(f"{name:12} {predicted * 1e6:9.1f} us {measured * 1e6:9.1f} us   "
          f"{measured / predicted:5.2f}")

# %% [markdown]
# **What you should see:** your prediction is closest for the two largest. The smaller ones take up to several times as long.
#
# ## How many tokens does it take?
#
# A layer of width 384 → 1536 must read its weights whether one token uses them or 64,800. (A batch of lesson 01's reference
# model has that many tokens.)
#
# > **Predict, before you move the slider:** at about how many tokens will the mark reach the arithmetic ceiling?

# %%
from course.lab.figures import widgets


def layer_on_the_roof(tokens: int):
    """Where a layer of width 384 -> 1536 lies on this machine's roofline."""
    flops, moved = matmul_cost(tokens, 384, 1536, itemsize=4)
    best = flops / roofline_seconds(flops, moved, peak_flops, peak_bytes)
    return style.roofline({"this machine": (peak_flops, peak_bytes)},
                          {f"{tokens} tokens": (flops / moved, best)},
                          "A layer of width 384 to 1536, at best")


slider = widgets.explore(layer_on_the_roof, tokens=[1, 4, 16, 64, 256, 1024, 4096,
                                                    16384, 64800],
                         alt="This machine's roof, and on it the layer with the "
                         "number of tokens of the slider.")

# %% [markdown]
# <details><summary>Answer</summary>
# At roughly twice your machine's balance: t tokens do 2·t operations for each weight of 4 bytes. Up to there, more tokens
# cost almost <i>no</i> time. In bf16 an H200, with a balance of {result: bf16_balance | .0f}, needs about
# {result: bf16_tokens | .0f} tokens. So we train in batches.
# </details>

# %% [markdown]
# ## Summary
#
# - A machine has two ceilings: FLOP/s and bytes a second.
# - Their ratio, the balance, tells you which ceiling limits an operation.
# - The least time of an operation is the longer of its two times.
# - Small operations reach neither ceiling: they wait to be started.
# - A collective ends when every rank has called it.
#
# ## Questions
#
# 1. Your next machine computes twice as fast with the same memory. Which operations become faster?
# 2. Why does a language model that writes one token at a time leave a GPU idle?
# 3. When would a measured time be shorter than its "least time"?
#
# Next: in [lesson 01](01_baseline.ipynb) you train a model that forecasts the weather.
