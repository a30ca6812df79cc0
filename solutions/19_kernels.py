# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 19 · Write a kernel
#
# In [lesson 05](05_compile_and_fuse.ipynb) the compiler fused operations for you. Here you write the kernels yourself, in
# Triton: from a copy to FlashAttention with its backward pass. Your source runs in an interpreter on a laptop. Compiled, the
# same source runs on a GPU at full speed.
#
# **What you will learn**
#
# - how a kernel works: programs, tiles, masks and strides, and what stays in registers;
# - how to compute sums over rows in one pass, forward and backward, and attention without ever storing its scores;
# - what decides a kernel's speed: bytes, tile sizes, registers and shared memory.
#
# | | |
# |---|---|
# | you need | a Linux laptop, a container or WSL, with the extra `kernels` ([install.md](../docs/install.md)); no GPU |
# | reading and doing | about 240 minutes |
# | computing | 2 minutes on two cores, most of it in checks |
# | you write | a copy (8 lines), GELU (11), softmax (10), LayerNorm (22, 25), FlashAttention (38, 17); optional: a loss (30) |
# | you measure | bytes that your kernels load and store; on a GPU their speed, else recorded speeds of an H200 |
#
# Do [lesson 05](05_compile_and_fuse.ipynb) first. [Lesson 00](00_start_here.ipynb) explains the roofline. You can take
# parts 1 and 2 on one day, and parts 3 and 4 on another. Work in a copy: *File → Save Notebook As…*,
# `19_kernels_mine.ipynb`.

# %% numbers=true
from course.bench import results as recorded_results
from course.lab.figures import flash_attention as flash_tables
from course.lab.figures import kernels as kernel_tables


def kernel_speed(kernel, who, size="65,536 x 4,096"):
    """GB/s of a kernel between matmuls on an H200."""
    rows = recorded_results.load("triton_kernels_h200")["rows"]
    return kernel_tables.speeds(rows, kernel)[size][who]


def kernel_us(kernel, who, size):
    """Microseconds of a copy of a matrix in bf16, or of a kernel that moves as many bytes."""
    rows, columns = (int(side.replace(",", "")) for side in size.split(" x "))
    return 4 * rows * columns / kernel_speed(kernel, who, size) / 1e3


def flash_rows():
    """Attention forward and backward on an H200, by PyTorch, cuDNN, the library and this lesson."""
    return recorded_results.load("flash_attention_h200")["rows"]


bf16_matmul = recorded_results.load("ceilings_h200")["ceilings"]["matmul bf16"] / 1e12


def flash_ratios(kernel, who):
    """The speed of this lesson's attention over someone's, at each shape that was measured."""
    return [rates["lesson"] / rates[who] for rates in flash_tables.speeds(flash_rows(), kernel).values()]


def library_backward(D):
    """TFLOP/s of the library's backward pass with heads of D, at each shape that was measured."""
    speeds = flash_tables.speeds(flash_rows(), "backward").items()
    return [rates["library"] for shape, rates in speeds if f"heads of {D}," in shape]


def flash_tried(D):
    """TFLOP/s and the compiler's report of each configuration of the causal forward pass, the fastest first."""
    return flash_tables.configurations(flash_rows(), "forward", D, 4096, True)


def flash_best(D):
    """(configuration, TFLOP/s and report) of the fastest configuration."""
    return next(iter(flash_tried(D).items()))


def flash_worst(D):
    """(configuration, TFLOP/s and report) of the slowest configuration."""
    return list(flash_tried(D).items())[-1]


# %%
import torch
import torch.nn.functional as F

from course.lab import notebook as lab
from course.lab.figures import kernels as pictures
from course.lab.instruments.watched_memory import watched
from course.lab.notebook import check
from course.ops.triton_language import INTERPRETED, interpreted, triton

lab.begin("19")
runs = lab.kernels()
if runs:
    print("Kernels are", "interpreted on the CPU" if INTERPRETED
          else "compiled for the GPU")

# %% [markdown]
# Triton needs Linux. On a Mac, or on Windows without WSL, this notebook still runs: it skips the cells that launch kernels,
# and shows the recorded speeds. To write kernels there, use a container, WSL or a remote machine.
#
# ## 1. A copy
#
# A **kernel** is a function that a GPU runs many times. In Triton, one run is called a **program**. Each program does the
# same work on another piece of the data, a **tile**. It has three steps:
#
# 1. *Load* a tile from memory into registers.
# 2. Compute with it, in registers.
# 3. *Store* the result.
#
# A program finds its tile by its number, `tl.program_id(0)`. All programs together are the **grid**. The grid may have up
# to three dims, and then a program has a number in each: `tl.program_id(1)` is the second.
#
# > **Predict.** A matrix has 20 rows and 70 columns. One program copies a tile of 8 × 32 numbers. How many programs do
# > you launch? How many of them have a full tile?

# %%
my_programs = 6                  # your predictions
my_full_tiles = 6

# %% [markdown]
# Tiles have sizes that are powers of two, and few matrices do. So the last tiles reach beyond the matrix. The memory there
# holds other data. A **mask** says which elements of a tile exist: `tl.load` and `tl.store` leave the others out.
#
# A kernel gets no tensor. It gets a **pointer** to the first element, and the strides. `x.stride(0)` is the number of
# elements between two rows in memory, and `x.stride(1)` that between two columns. So element (row, column) is at
# `x + row * x.stride(0) + column * x.stride(1)`.
#
# > **Question.** What are the strides of a 2 × 3 matrix, and what are those of its transpose?

# %%
x = torch.arange(6).view(2, 3)
print("x:  ", x.stride(), "contiguous" if x.is_contiguous() else "not contiguous")
print("x.T:", x.T.stride(), "contiguous" if x.T.is_contiguous() else "not contiguous")

# %% [markdown]
# A transpose moves nothing: it is the same memory with other strides. The same holds for slices, such as the heads of a
# packed query-key-value tensor. A kernel that takes strides reads all of them in place.
#
# Pointers come in tiles, too. `tl.arange(0, ROWS)` holds 0, 1, … ROWS − 1. With `[:, None]` and `[None, :]`, as in
# PyTorch, rows and columns broadcast to a tile of pointers.
#
# ## Exercise: a copy
#
# Write a kernel and its launch:
#
# - `copy_kernel` copies one tile. Which rows and columns does this program have, and which of them exist?
# - `copy` launches it: `copy_kernel[grid](arguments)`. `triton.cdiv(a, b)` is a / b, rounded up.
#
# `tl.constexpr` marks what the compiler knows when it compiles: here the sizes of the tile.
#
# **Triton's grammar.** A kernel looks like Python, but is not:
#
# - Masks are joined by `&` and `|`, with parentheses: `(row < R) & (column < C)`. Python's `and` cannot join tiles: in the
#   interpreter only the second mask would count.
# - The grid is a tuple: `kernel[(9,)](...)`, `kernel[(rows, columns)](...)`.
# - A kernel knows its arguments, but no variables of the notebook. Compute constants inside, such as `math.sqrt(2 /
#   math.pi)`.
# - There is no `**`: write `z * z * z`. `tl.exp`, `tl.exp2`, `tl.log`, `tl.log2`, `tl.sqrt`, `tl.rsqrt`, `tl.maximum(a, b)`
#   and `tl.where(mask, a, b)` work element by element. `tl.sum(x, 1)` and `tl.max(x, 1)` go along a dim.
# - `tl.program_id(0)` has 32 bits, and so has what you compute from it. For tensors beyond 2³¹ elements, begin with
#   `tl.program_id(0).to(tl.int64)`, as our answers do.
# - `tl.zeros` and `tl.full` make tiles, `x.to(tl.float32)` casts, `x.T` transposes.
# - What a masked load leaves out has no defined value, unless you give one: `tl.load(pointers, mask=inside, other=0.0)`.
#   Here it is NaN, so that you notice if you use it.

# %% exercise="copy"
from course.lab.exercises.lesson19_kernels import copy, copy_kernel

# %%
check("copy")

# %% [markdown]
# The check ran your kernel in Triton's **interpreter**. It runs the programs one after another, in NumPy, and checks each
# address. The interpreter accepts some Python that no GPU runs. So the check also had Triton's compiler read your kernel.
# That takes milliseconds and no GPU, and it says which line does not compile. We watch loads and stores, too. Here is
# what your kernel touches in a matrix of 20 × 70:

# %%
if runs:
    x, y = torch.randn(20, 70), torch.zeros(20, 70)
    with lab.yours(copy_kernel, copy), watched(x, y) as accesses:
        copy(x, y, 8, 32)
    sizes = [visit.elements.size for visit in accesses.visits if visit.stored]
    lab.beside("programs", my_programs, len(accesses.programs), how="counted")
    lab.beside("full tiles", my_full_tiles, sizes.count(8 * 32), how="counted")
    lab.picture(pictures.tiles_of_programs(accesses, {"x": x, "y": y}),
                "Two matrices, x and y, each cut into nine tiles. A number in each "
                "tile says which program read it from x and wrote it to y. The tiles "
                "at the right and at the bottom are smaller")

# %% [markdown]
# **What you should see:** nine programs, four of them with a full tile. Each element is read once and written once.
#
# In which order did that happen?

# %%
if runs:
    lab.picture(pictures.accesses_over_time(accesses, ["x", "y"]),
                "Time goes to the right, and each program has a row. Each program "
                "reads a tile of x, then writes a tile of y. The programs run one "
                "after another")

# %% [markdown]
# > **Question.** The interpreter runs program 0, then program 1, and so on (the picture counts them row by row). A GPU runs
# > hundreds of programs at a time, in no guaranteed order. What may a program therefore never do?
#
# <details><summary>Answer</summary>
# Read what another program of the same launch writes. It might not be there yet. If programs need each other's results,
# launch a second kernel: it starts after the first has ended. You will do so in the backward pass of LayerNorm.
# </details>
#
# A copy computes nothing, so its speed is that of memory. According to its data sheet, an H200 moves at most 4800 GB/s.
#
# > **Predict.** A matrix of 65,536 × 4096 numbers in bf16 takes 537 MB. How many GB/s does your copy reach on an H200?
# > Count bytes read and bytes written.

# %%
my_copy_speed = 1000.0           # your prediction, in GB/s

# %%
kernel_rows = lab.results("triton_kernels_h200")["rows"]
copies = pictures.speeds(kernel_rows, "copy")
lab.beside("your copy", my_copy_speed, copies["65,536 x 4,096"]["this lesson"], "GB/s",
           "recorded")
lab.recorded("triton_kernels_h200", copies, why="A copy of matrices in bf16, GB/s")

# %% [markdown]
# **What you should see:** {result: kernel_speed("copy", "this lesson") | .0f} GB/s with the source that you wrote, and
# {result: kernel_speed("copy", "PyTorch") | .0f} with PyTorch's copy. Your copy does not win everywhere. At width 1152,
# PyTorch's reaches {result: kernel_speed("copy", "PyTorch", "65,536 x 1,152") | .0f} GB/s, and yours
# {result: kernel_speed("copy", "this lesson", "65,536 x 1,152") | .0f}. torch.compile's copy is ahead of yours at every
# size. The smallest matrix, 8 MB, fits into the GPU's cache
# of 50 MB. Its copy takes {result: kernel_us("copy", "this lesson", "4,096 x 1,024") | .0f} µs, and starting and ending a
# kernel is a good part of that.
#
# ## What stays in registers
#
# An MLP adds a bias and applies GELU between its two matrix products. In PyTorch that is two kernels:
#
#     z = x + bias
#     y = gelu(z)
#
# > **Predict.** How many trips between memory and the chip does each number make? A read or a write is one trip. How many
# > does it make in one fused kernel?

# %%
my_trips = 2                     # your predictions
my_fused_trips = 1

# %% [markdown]
# GELU's usual approximation is
#
# $$\mathrm{GELU}(z) = z \cdot \tfrac12 (1 + \tanh u), \qquad u = \sqrt{2/\pi}\,(z + 0.044715\, z^3)$$
#
# and $\tfrac12 (1 + \tanh u)$ is the sigmoid of $2u$, which `tl.sigmoid` computes.
#
# ## Exercise: a fused GELU
#
# One program computes a tile, as in the copy. Columns are adjacent in memory, so only rows have strides. Load the bias of
# the tile's columns once, and let it broadcast over the rows.
#
# bf16 has 8 bits of precision. So kernels load bf16, compute in float32, `.to(tl.float32)`, and round once, when they store:
# `.to(y.dtype.element_ty)`. The wider numbers exist only in registers, so they cost no memory traffic.

# %% exercise="fused-gelu"
from course.lab.exercises.lesson19_kernels import bias_gelu, bias_gelu_kernel

# %%
check("fused-gelu")

# %%
lab.beside("trips of each number in two kernels", my_trips, 4, how="counted")
if runs:
    x, bias, y = torch.randn(64, 96), torch.randn(96), torch.zeros(64, 96)
    with lab.yours(bias_gelu_kernel, bias_gelu), watched(x, bias, y) as accesses:
        bias_gelu(x, bias, y, 8, 32)
    trips = sum(accesses.loads + accesses.stores) / x.numel()
    lab.beside("trips in your kernel", my_fused_trips, trips, how="counted")
    print("loads of the bias, for each number of x:", accesses.loads[1] / x.numel())
    print("largest difference from PyTorch:",
          (y - F.gelu(x + bias, approximate="tanh")).abs().max().item())

# %% [markdown]
# **What you should see:** four trips for PyTorch, and a little more than two for yours. The extra is the bias: every program
# loads the bias of its 32 columns, once for 8 rows.
#
# > **Question.** On a GPU, those repeated loads of the bias cost even less than this count says. Why?
#
# <details><summary>Answer</summary>
# The bias has a few thousand numbers. After the first programs have loaded it, it is in the GPU's cache. Only the first
# load comes from memory.
# </details>
#
# > **Predict.** How many times as fast as PyTorch's two kernels is yours, on an H200?

# %%
my_gelu_gain = 1.0               # your prediction

# %%
gelus = pictures.speeds(kernel_rows, "fused-gelu")
large = gelus["65,536 x 4,096"]
lab.beside("fused over two kernels", my_gelu_gain,
           large["this lesson"] / large["PyTorch"], "times", "recorded")
lab.recorded("triton_kernels_h200", gelus,
             why="GELU(x + bias) in bf16. GB/s of the fewest bytes, one read and one "
             "write")

# %% [markdown]
# **What you should see:** {result: kernel_speed("fused-gelu", "this lesson") / kernel_speed("fused-gelu", "PyTorch") | .1f}
# times as fast as two kernels. Half of the trips are gone: that is a factor of two. The rest is speed. PyTorch's two
# kernels make four trips at {result: 2 * kernel_speed("fused-gelu", "PyTorch") | .0f} GB/s, and yours makes two at
# {result: kernel_speed("fused-gelu", "this lesson") | .0f}.
#
# torch.compile reaches {result: kernel_speed("fused-gelu", "torch.compile") | .0f} GB/s. It generates Triton too. Set
# `TORCH_LOGS=output_code` to read its kernel, and you will recognize every line.
#
# The library's GELU reaches {result: kernel_speed("fused-gelu", "library") | .0f} GB/s. The comparison is not quite fair: it
# gets the sum with the bias, which the matmul before it has added, so it loads no bias. And it treats the matrix as one long
# row. Your tiles have 512 columns. At width 1152 the third tile of a row is three quarters empty, and you reach
# {result: kernel_speed("fused-gelu", "this lesson", "65,536 x 1,152") | .0f} GB/s against
# {result: kernel_speed("fused-gelu", "library", "65,536 x 1,152") | .0f}.

# %% [markdown]
# ## 2. Sums over a row
#
# So far, each number of a result came from one number of x. Softmax and LayerNorm need sums over a row:
#
# $$y_i = \frac{\exp(x_i - \max_j x_j)}{\sum_j \exp(x_j - \max_j x_j)}$$
#
# In separate operations this is
#
#     top = x.amax(1, keepdim=True)
#     d = x - top
#     e = d.exp()
#     total = e.sum(1, keepdim=True)
#     y = e / total
#
# > **Predict.** How many trips does each number make in these five operations? `top` and `total` have one number for each
# > row: leave them out.

# %%
my_softmax_trips = 4             # your prediction

# %%
softmax_trips = {"amax": 1, "subtract": 2, "exp": 2, "sum": 1, "divide": 2}
lab.beside("trips of each number", my_softmax_trips, sum(softmax_trips.values()),
           how="counted")

# %% [markdown]
# A kernel needs two trips if a whole row fits into one program's registers. Then maximum, sum and division all work on
# registers.
#
# `tl.max(numbers, 0)` and `tl.sum(numbers, 0)` are **reductions**. The numbers of a tile are spread over the threads of
# the program. For a reduction the threads exchange numbers, and then every thread has the result. You write one call, and
# the compiler writes the exchange.
#
# The size of a tile is a power of two; the length of a row rarely is. So some elements of the tile do not exist. `tl.load`
# with a mask gives them the value `other`.
#
# > **Question.** A row has 70 numbers, and each is −5. The tile has 128. You load `other=0.0`. What do you get in place of
# > 1/70? Which value must `other` have?
#
# <details><summary>Answer</summary>
# The maximum comes out as 0, from an element that does not exist. The sum is 70 · exp(−5) + 58 · exp(0) = 58.5, so each
# result is 0.0067 / 58.5 = 0.0001. The value must change neither maximum nor sum. Minus infinity does both: it is never
# the maximum, and its exponential is 0.
# </details>
#
# ## Exercise: softmax of rows
#
# - `softmax_kernel` computes one row. `BLOCK` is a power of two that is at least C. Load the row once, and store it once.
# - `softmax` launches it. `triton.next_power_of_2(C)` is the smallest power of two that is not less than C.
#
# `num_warps` is a launch option: how many groups of 32 threads share a program. `warps(block)` is given. A program for one
# row gets one thread for every 32 numbers, and at least 64 threads.

# %%
lab.show("course.lab.exercises.lesson19_kernels.warps")

# %% exercise="row-softmax"
from course.lab.exercises.lesson19_kernels import softmax, softmax_kernel

# %%
check("row-softmax")

# %%
if runs:
    x, y = torch.randn(20, 70), torch.zeros(20, 70)
    with lab.yours(softmax_kernel, softmax), watched(x, y) as accesses:
        softmax(x, y)
    trips = sum(accesses.loads + accesses.stores) / x.numel()
    print(f"{trips:.0f} trips, {len(accesses.programs)} programs")
    print("largest difference from PyTorch:", (y - x.softmax(1)).abs().max().item())

# %% [markdown]
# > **Predict.** PyTorch's own softmax is one fused kernel already. How many times as fast as that is yours on an H200, for
# > rows of 4096 numbers?

# %%
my_softmax_gain = 0.5            # your prediction

# %%
softmaxes = pictures.speeds(kernel_rows, "row-softmax")
large = softmaxes["65,536 x 4,096"]
lab.beside("yours over PyTorch's", my_softmax_gain,
           large["this lesson"] / large["PyTorch"],
           "times", "recorded")
lab.recorded("triton_kernels_h200", softmaxes, why="Softmax of rows in bf16, GB/s")

# %% [markdown]
# **What you should see:** {result: kernel_speed("row-softmax", "this lesson") | .0f} GB/s against PyTorch's
# {result: kernel_speed("row-softmax", "PyTorch") | .0f} and torch.compile's
# {result: kernel_speed("row-softmax", "torch.compile") | .0f}. Your copy reached
# {result: kernel_speed("copy", "this lesson") | .0f}: next to the bytes, exponentials and sums cost nothing here. The other
# kernels accept rows of any length. Yours relies on a row that fits into one program's registers.
#
# ## Residual add and LayerNorm
#
# A block of a transformer adds the output y of a branch to the residual stream x, and normalizes the sum for the next
# branch. For each token:
#
# $$z = x + y, \qquad \mu = \tfrac1C \sum_i z_i, \qquad r = \Big(\tfrac1C \sum_i (z_i - \mu)^2 + \epsilon\Big)^{-1/2},
# \qquad n = (z - \mu)\, r\, w + b$$
#
# Weight w and bias b have C numbers, shared by all tokens. The kernel also stores μ and r, two numbers for each token. The
# backward pass needs them.
#
# > **Predict.** The batch has 65,536 tokens of width 4096 in bf16. How many GB must a fused kernel read and write? How many
# > milliseconds does that take at the speed of your copy?

# %%
my_norm_gb = 1.0                 # your predictions
my_norm_ms = 1.0

# %%
norm_gb = 4 * 2 * 65536 * 4096 / 1e9                 # x and y come, z and n go
copy_speed = copies["65,536 x 4,096"]["this lesson"]
lab.beside("residual add and LayerNorm", my_norm_gb, norm_gb, "GB", "counted")
lab.beside("time for that", my_norm_ms, 1e3 * norm_gb / copy_speed, "ms", "counted")

# %% [markdown]
# > **Question.** The variance needs the mean, and the mean needs the whole row. Does a kernel therefore read the row twice?
# > A common trick computes both sums at once: the variance is the mean of $z^2$ minus $\mu^2$. Do you need it?
#
# <details><summary>Answer</summary>
# No and no. The row stays in registers, so a second sum reads no memory. And the trick subtracts two large numbers. If the
# mean is large compared with the deviation, few digits are left. The next cell shows it.
# </details>

# %%
z = 1000 + torch.randn(4096)                         # float32, variance 1
print("mean of squares minus squared mean:", (z.square().mean() - z.mean() ** 2).item())
print("mean of squared distances:         ", (z - z.mean()).square().mean().item())

# %% [markdown]
# Three more things decide how good the kernel is.
#
# **Masks.** Beyond the row, z is loaded as 0. But z − μ is not 0 there, and the variance would count it.
#
# **Rounding.** z is stored in bf16, and the backward pass reads it from there. So round z *before* you normalize it. Then
# both passes see the same numbers.
#
# **Rows per program.** Every program loads w and b. If it has only one row, w and b have as many numbers as x and y. So a
# program takes `ROWS` tokens, one after another, and loads w and b once. In the loop `for token in tl.range(first, end,
# num_stages=3)`, the compiler loads the next tokens while it computes with this one.
#
# ## Exercise: residual add and LayerNorm
#
# `add_norm_kernel` computes ROWS tokens. `add_norm` launches it. T need not be a multiple of ROWS.

# %% exercise="add-norm"
from course.lab.exercises.lesson19_kernels import add_norm, add_norm_kernel

# %%
check("add-norm")

# %% [markdown]
# > **Predict.** 10 tokens, 4 per program. How many times does your kernel load each number of the weight? Look for the answer
# > in the picture: in which order does a program load and store?

# %%
my_weight_loads = 10             # your prediction

# %%
if runs:
    x, y = torch.randn(2, 10, 96)
    weight, bias = torch.randn(2, 96)
    z, n, mean, rstd = (torch.empty(shape) for shape in ((10, 96), (10, 96), 10, 10))
    tensors = [t.clone() for t in (x, y, weight, bias, z, n, mean, rstd)]
    with lab.yours(add_norm_kernel, add_norm), watched(*tensors) as accesses:
        add_norm(*tensors, rows=4)
    lab.beside("loads of each weight", my_weight_loads, accesses.loads[2] / 96,
               how="counted")
    names = ["x", "y", "weight", "bias", "z", "n"]
    lab.picture(pictures.accesses_over_time(accesses, names),
                "Time goes to the right, and each of three programs has a row. A "
                "program reads weight and bias first. Then it reads x and y and "
                "writes z and n, for one token after another")

# %% [markdown]
# **What you should see:** three loads, one for each program. Between the load of x and the store of n, only z goes to memory,
# because the next block needs it.
#
# ## Its backward pass
#
# The loss depends on z in two ways: through the norm n, and through the residual stream itself. So two gradients arrive,
# dn and dz. With the normalized $u = (z - \mu)\, r$, the derivation has four lines:
#
# $$\begin{aligned}
# dw &= \textstyle\sum_t dn_t\, u_t, \qquad db = \sum_t dn_t && \text{from } n = u w + b \\
# g &= dn \cdot w && \text{the gradient of } u \\
# d(z - \mu) &= r\,\big(g - u \cdot \mathrm{mean}(g u)\big) && r \text{ depends on every } z_i \\
# dx = dy &= dz + r\,\big(g - \mathrm{mean}(g) - u \cdot \mathrm{mean}(g u)\big) && \text{so does } \mu
# \end{aligned}$$
#
# The last line needs two sums over a row. You know how to compute those. The first line is different: it sums over all
# *tokens*, and they belong to different programs.
#
# > **Question.** How can 2048 programs add to one sum? There are two ways. Each program adds its share to memory with
# > `tl.atomic_add`. Or each program stores its share in a row of its own, and another launch adds the rows. Why is the
# > second way better?
#
# <details><summary>Answer</summary>
# Programs finish in an order that changes from run to run. With atomic additions the order of the sum changes too, and so
# do its last bits: two runs of one training step differ. Rows of their own are added in a fixed order. Besides, 2048
# programs that add to the same addresses wait for each other.
# </details>
#
# > **Predict.** 65,536 tokens have width 4096, and a program takes 32 of them. The shares are in float32. How many bytes do
# > they take, in percent of the bytes that the kernel moves anyway? (It reads dz, dn and z and writes dx, in bf16.)

# %%
my_share_bytes = 50.0            # your prediction, in percent

# %%
programs = 65536 // 32
share_bytes, pass_bytes = 2 * programs * 4096 * 4, 4 * 65536 * 4096 * 2
lab.beside("shares of weight and bias", my_share_bytes, 100 * share_bytes / pass_bytes,
           "%",
           "counted")

# %% [markdown]
# ## Exercise: the backward pass with partial sums
#
# - `add_norm_backward_kernel` computes dx for ROWS tokens. It adds up `dweight` and `dbias` in registers, over its own
#   tokens, and stores them once, after the loop. `parts` has the shape (2, programs, C): first weight, then bias.
# - `add_norm_backward` launches it, adds the shares with PyTorch, and returns both sums, (2, C).

# %% exercise="add-norm-backward"
from course.lab.exercises.lesson19_kernels import (
    add_norm_backward, add_norm_backward_kernel)

# %%
check("add-norm-backward")

# %% [markdown]
# Forward and backward together, beside PyTorch's autograd, on 100 tokens of width 96:

# %%
if runs:
    x, y, dz, dn = torch.randn(4, 100, 96)
    weight, bias = torch.randn(2, 96)
    z, n, dx = (torch.empty(100, 96) for _ in range(3))
    mean, rstd = torch.empty(2, 100)
    parts = torch.empty(2, triton.cdiv(100, 32), 96)
    mine = add_norm_kernel, add_norm, add_norm_backward_kernel, add_norm_backward
    with lab.yours(*mine), interpreted():
        add_norm(x, y, weight, bias, z, n, mean, rstd)
        dweight, dbias = add_norm_backward(dz, dn, z, weight, mean, rstd, dx, parts)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    plain_z = leaves[0] + y
    plain_n = F.layer_norm(plain_z, (96,), *leaves[1:])
    plain = torch.autograd.grad((plain_z, plain_n), leaves, (dz, dn))
    pairs = zip((dx, dweight, dbias), plain, strict=True)
    for name, (ours, theirs) in zip(("dx", "dweight", "dbias"), pairs, strict=True):
        print(f"largest difference of {name}:", (ours - theirs).abs().max().item())

# %% [markdown]
# > **Predict.** torch.compile fuses this too. Forward, how many times as fast as its kernel is yours? And backward, where
# > it generates one kernel for the rows and others for the sums over tokens, which read dn and z again?

# %%
my_norm_gain = 0.5               # your predictions
my_norm_backward_gain = 0.5

# %%
my_gains = {"add-norm": my_norm_gain, "add-norm-backward": my_norm_backward_gain}
for name, predicted in my_gains.items():
    speeds = pictures.speeds(kernel_rows, name)
    large = speeds["65,536 x 4,096"]
    lab.beside(f"{name}, yours over torch.compile's", predicted,
               large["this lesson"] / large["torch.compile"], "times", "recorded")
    lab.recorded("triton_kernels_h200", speeds,
                 why=f"{name} in bf16. GB/s of the fewest bytes")

# %% [markdown]
# **What you should see:** at width 4096, forward, you reach {result: kernel_speed("add-norm", "this lesson") | .0f} GB/s and
# torch.compile {result: kernel_speed("add-norm", "torch.compile") | .0f}. Backward it is
# {result: kernel_speed("add-norm-backward", "this lesson") | .0f} against
# {result: kernel_speed("add-norm-backward", "torch.compile") | .0f}. PyTorch without a compiler needs several kernels and
# reaches {result: kernel_speed("add-norm", "PyTorch") | .0f} and
# {result: kernel_speed("add-norm-backward", "PyTorch") | .0f}.
#
# Width 1152 is no power of two. Your tile has 2048 columns, and the mask leaves 896 of them out: they cost no bytes. The
# compiler cuts such a row into pieces and reads it twice. So forward you reach
# {result: kernel_speed("add-norm", "this lesson", "65,536 x 1,152") | .0f} GB/s, and it reaches
# {result: kernel_speed("add-norm", "torch.compile", "65,536 x 1,152") | .0f}.
#
# > **Question.** The smallest matrix has 4096 tokens. There your forward kernel reaches
# > {result: kernel_speed("add-norm", "this lesson", "4,096 x 1,024") | .0f} GB/s and torch.compile
# > {result: kernel_speed("add-norm", "torch.compile", "4,096 x 1,024") | .0f}. A program takes 32 tokens, and an H200 has 132
# > multiprocessors. What is wrong, and what would you change?
#
# <details><summary>Answer</summary>
# Only 128 programs run, each with two warps: at most one for each multiprocessor, which has room for 64 warps. They wait
# for one token after another. Fewer tokens for each program would help: 8 in place of 32 make 512 programs. The price is
# that weight and bias are loaded, and shares stored, four times as often.
# </details>

# %%
import math

from course.lab.exercises.lesson19_flash_attention import (
    Tiles, flash_backward, flash_forward, fold_tiles, launch_forward)
from course.lab.figures import flash_attention as flash_pictures

# %% [markdown]
# ## 3. FlashAttention
#
# Attention is two matrix products with a softmax between them:
#
# $$S = \frac{Q K^\top}{\sqrt D}, \qquad P = \mathrm{softmax}(S), \qquad Y = P V$$
#
# $Q$, $K$, $V$ and $Y$ have T rows of D numbers for each head. $S$ and $P$ have T × T.
#
# > **Predict.** A sample has 16 heads and 16,384 tokens, in bf16. How many GB do the scores $S$ take? How many times as
# > much is that as $Q$, if D is 64?

# %%
my_scores_gb = 1.0               # your prediction
my_times = 10.0

# %%
H, T, D = 16, 16384, 64
lab.beside("scores of one sample", my_scores_gb, 2 * H * T * T / 1e9, "GB", "counted")
lab.beside("scores over queries", my_times, T / D, "times", "counted")

# %% [markdown]
# Three kernels would write these scores, read them, write $P$ and read it again. Your fused kernels keep such
# intermediates in registers. Here that seems impossible: a softmax needs its whole row, and a row has T scores.
#
# > **Question.** Cut the row into two tiles, and compute each tile's softmax and weighted sum of values on its own. Which
# > two numbers must each tile remember, so that you can merge both answers exactly?
#
# <details><summary>Answer</summary>
# The maximum of its scores, and the sum of exponentials relative to it. The merge rescales both answers to the larger
# maximum, and adds. ([Lesson 11](11_context_parallel.ipynb) merges answers of several GPUs in this way.) FlashAttention
# does it inside one GPU. It goes over the keys tile by tile, and a tile of scores never leaves the chip.
# </details>
#
# ## Exercise: online softmax
#
# A program keeps three things for each of its M queries: the largest score so far times `scale` (`top`), the sum of
# exponentials relative to it (`total`), and the weighted sum of values (`y`), not yet divided by the sum. Fold one more
# tile of N scores and values into them:
#
# 1. The new maximum is the larger of the old one and the tile's.
# 2. The tile's weights are exponentials relative to the new maximum.
# 3. What you have so far was relative to the *old* maximum. Multiply it by exp(old − new) before you add.
#
# GPUs have an instruction for powers of two and none for powers of e. So scores are in units of log2:
# `scale` is log2(e) / √D, and exp2(s · scale) is exp(s / √D). `tl.dot(a, b, c)` is a · b + c. It multiplies two tiles of
# one number format and adds in float32.

# %% exercise="online-softmax"
from course.lab.exercises.lesson19_flash_attention import online_softmax

# %%
check("online-softmax")

# %% [markdown]
# Now watch it. Two rows have 64 scores, in four tiles of 16. One row rises from tile to tile, and the other falls.
#
# > **Predict.** In which row does the maximum change after the first tile? In which can the sum go *down*?

# %%
torch.manual_seed(0)
noise, slope = torch.randn(2, 64), torch.linspace(-4, 4, 64)
scores, values = noise + torch.stack([slope, -slope]), torch.randn(64, 16)
if runs:
    with lab.yours(online_softmax), interpreted():
        y, lse, tops, totals = fold_tiles(scores, values, math.log2(math.e))
    weights = scores.softmax(-1)
    print("largest difference:", (y - weights @ values).abs().max().item())
    lab.picture(flash_pictures.running_softmax(tops, totals, ["rising", "falling"]),
                "Two panels over the number of tiles. Left, the running maximum: the "
                "rising row climbs, the falling row stays flat. Right, the running "
                "sum, relative to the maximum")

# %% [markdown]
# **What you should see:** the rising row has a new maximum after every tile. Each new maximum shrinks the sum so far, before
# the tile is added. The falling row has its maximum in the first tile, so its sum only grows. Both rows end with the
# exact softmax.
#
# ## A kernel of tiles
#
# One program computes a block of `ROWS` queries of one head. It loads its queries once, and loops over tiles of `COLUMNS`
# keys and values. The launch grid is (blocks of queries, samples × heads).
#
# Tensors are (B, H, T, D) with any strides between samples, heads and tokens; `steps` holds these three numbers. So the
# output of the query-key-value linear needs no copy into another order. Three small functions are given:

# %%
for name in ("head_offset", "load_tile", "store_tile"):
    lab.show(f"course.lab.exercises.lesson19_flash_attention.{name}")

# %% [markdown]
# With causality, query i sees the keys up to i. A tile of scores is one of three kinds: every query sees every key, no
# query sees any key, or the diagonal crosses the tile. Tiles of the second kind are never loaded. Tiles of the first
# kind need no mask.
#
# > **Predict.** A head has 128 tokens. Blocks have 16 queries, and tiles have 16 keys: 8 × 8 tiles of scores. How many
# > of them does a causal forward pass load? How many need a mask?

# %%
my_loaded = 64                   # your prediction
my_masked = 64

# %% [markdown]
# ## Exercise: FlashAttention forward
#
# Write three functions:
#
# - `key_range`: the key up to which all queries of a block see everything (in whole tiles), and where the block's last key
#   ends;
# - `attend_keys`: the loop over tiles. It computes scores, masks them if `masked`, and calls your `online_softmax`;
# - `flash_forward_kernel`: the program. It loads queries, calls the loop twice (without mask up to `clear`, with mask up to
#   `end`), divides, and stores `y` and the log-sum-exp `lse`, which the backward pass needs.
#
# `lse` is (B, H, T) in float32, contiguous. `tl.program_id(1)` is sample · H + head, so its head's numbers begin at
# `lse + tl.program_id(1) * T`. They are in units of log2, like `top`.
#
# T can be any number. `load_tile` with `masked` gives zeros beyond T. A score of zero is not minus infinity!

# %% exercise="flash-forward"
from course.lab.exercises.lesson19_flash_attention import (
    attend_keys, flash_forward_kernel, key_range)

# %%
check("flash-forward")

# %% [markdown]
# The check runs your kernel in Triton's interpreter, on 37 tokens in float32 and bf16, with tensors in four different
# layouts. It also counts what your kernel loads, and what it loads with a mask. Here is the
# same count as a picture: 128 tokens, causal, from a run of your kernel.

# %%
forward = online_softmax, key_range, attend_keys, flash_forward_kernel
if runs:
    q, k, v = (torch.randn(1, 1, 128, 16) for _ in range(3))
    y, lse = torch.empty_like(q), torch.empty(1, 1, 128)
    with lab.yours(*forward), watched(q, k, v, y, lse) as accesses:
        launch_forward(q, k, v, y, lse, True, Tiles(16, 16))
    order = flash_pictures.tile_order(accesses, 16, 16, 16)
    lab.beside("tiles loaded", my_loaded, int((order > 0).sum()), how="counted")
    lab.beside("tiles with a mask", my_masked, accesses.masked_loads(1) // (16 * 16),
               how="counted")
    lab.picture(flash_pictures.tiles_read(order, 16, 16),
                "A grid of 8 by 8 tiles of scores. Each row is a program, and numbers "
                "say in which order it loads its tiles. The tiles above the diagonal "
                "are empty. The 8 tiles on the diagonal have another color, because "
                "they need a mask")

# %% [markdown]
# **What you should see:** 36 of 64 tiles, 8 of them with a mask. With more tiles, the ratio approaches one half. The last
# program has eight times as much work as the first. A GPU starts programs in the order of their numbers, and should not wait
# for a few long ones at the end. So our kernel counts blocks from the end: `tl.num_programs(0) - 1 - tl.program_id(0)`. The
# check accepts either order.
#
# ## The backward pass
#
# The forward pass kept $Y$ and one number for each query, the log-sum-exp $L$. It did not keep $P$. The backward pass
# computes it again, tile by tile, and needs no running maximum, because $L$ is known:
#
# $$\begin{aligned}
# P_{ij} &= \exp(S_{ij} - L_i) && \text{a softmax with a known sum} \\
# dV &= P^\top dY, \qquad dP = dY\, V^\top && \text{from } Y = P V \\
# dS_{ij} &= P_{ij}\,(dP_{ij} - \delta_i), \qquad \delta_i = \textstyle\sum_j P_{ij}\, dP_{ij} && \text{the softmax} \\
# dQ &= dS\, K / \sqrt D, \qquad dK = dS^\top Q / \sqrt D && \text{from } S = Q K^\top / \sqrt D
# \end{aligned}$$
#
# > **Question.** $\delta_i$ is a sum over the whole row, so over all tiles. That would take one more pass over the keys.
# > How do you get it from $Y_i$ and $dY_i$ alone?
#
# <details><summary>Answer</summary>
# Put in dP<sub>ij</sub> = dY<sub>i</sub> · V<sub>j</sub>: the sum is dY<sub>i</sub> · (Σ<sub>j</sub> P<sub>ij</sub>
# V<sub>j</sub>) = dY<sub>i</sub> · Y<sub>i</sub>. One dot product for each query.
# </details>
#
# dQ sums over keys, and dK and dV sum over queries. So there are two kernels. In one a program holds a block of queries and
# loops over keys, like the forward pass. In the other it holds a block of keys and values, and loops over queries. Both
# compute $S$ and $dP$: seven products instead of five. In return, no two programs add to the same number, and every sum has a
# fixed order.
#
# > **Predict.** Forward has two products of T × T scores. How many times as long does the backward pass take, if only
# > products count?

# %%
my_backward = 2.0                # your prediction
lab.beside("backward over forward", my_backward, 7 / 2, "times", "counted")

# %% [markdown]
# The two kernels are given, and call what you write. Here is the one that holds keys and values. Its three loops handle the
# queries on the diagonal, those that see all of its keys, and a last tile that ends at T:

# %%
for name in ("sum_over_queries", "keys_backward_kernel"):
    lab.show(f"course.lab.exercises.lesson19_flash_attention.{name}")

# %% [markdown]
# ## Exercise: FlashAttention backward
#
# Write the heart of both kernels, and the range of the second one:
#
# - `query_gradient` adds what one tile of keys contributes to dQ;
# - `key_gradients` adds what one tile of queries contributes to dK and dV. Its scores have a row for each *key*, so
#   $P^\top$ comes out without a transpose;
# - `query_range`: the first query that sees any key of a block, and the query from which on all see all its keys.
#
# The kernels multiply dQ and dK by 1/√D at the end, so leave that out. `seen` is True in a tile that needs no mask;
# `tl.where(True, p, 0.0)` costs nothing, because the compiler removes it.

# %% exercise="flash-backward"
from course.lab.exercises.lesson19_flash_attention import (
    key_gradients, query_gradient, query_range)

# %%
check("flash-backward")

# %% [markdown]
# The whole kernel beside PyTorch's autograd, on 100 tokens:

# %%
mine = (*forward, query_gradient, key_gradients, query_range)
if runs:
    q, k, v, dy = torch.randn(4, 1, 2, 100, 16)
    with lab.yours(*mine), interpreted():
        y, lse = flash_forward(q, k, v, True, Tiles(32, 32))
        gradients = flash_backward(q, k, v, y, lse, dy, True, Tiles(32, 32),
                                   Tiles(32, 32))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    plain_y = F.scaled_dot_product_attention(*leaves, is_causal=True)
    plain = torch.autograd.grad(plain_y, leaves, dy)
    pairs = zip((y, *gradients), (plain_y, *plain), strict=True)
    for name, (ours, theirs) in zip(("y", "dq", "dk", "dv"), pairs, strict=True):
        print(f"largest difference of {name}:", (ours - theirs).abs().max().item())

# %% [markdown]
# ## 4. What decides speed
#
# The source is right. How fast it runs on a GPU depends on four numbers that you have not chosen so far: queries of a
# block, keys of a tile, warps, and stages. Two limits decide. Both lie inside a **multiprocessor** (SM). An H200 has 132
# of them, and each program runs on one.
#
# **Registers.** An SM has 65,536 registers of 32 bits, and a thread can use at most 255. The output of a block,
# `ROWS × D` numbers in float32, stays in registers for the whole loop. So does a tile of scores. If they do not fit, the
# compiler **spills**: it writes registers to memory and reads them back in each pass of the loop.
#
# **Shared memory.** An SM has 228 KB. Tiles of keys and values wait there. With three *stages*, two tiles are being loaded
# while the program computes with a third.
#
# A program that needs little of both leaves room for others on its SM. Then one program computes exponentials while another
# one's matrix products run. The number of warps on an SM, divided by the maximum (64), is its **occupancy**.
#
# > **Predict.** Heads of 64: a block of 128 queries and a tile of 64 keys. The program has 4 warps, which is 128 threads.
# > How many registers of each thread hold the output and the scores? How many with 8 warps?

# %%
my_registers = {4: 32, 8: 16}    # your prediction: warps -> registers of a thread

# %%
for count, predicted in my_registers.items():
    counted = (128 * 64 + 128 * 64) / (32 * count)
    lab.beside(f"output and scores, {count} warps", predicted, counted, "registers",
               "counted")

# %% [markdown]
# Queries, weights, running sums and pointers need registers too. So 4 warps come close to the limit of 255.
#
# The best configuration cannot be computed in advance. You try a list of configurations and keep the fastest. In Triton you
# write
#
#     @triton.autotune([triton.Config({"ROWS": 128, "COLUMNS": 64}, num_warps=8, num_stages=3),
#                       triton.Config({"ROWS": 64, "COLUMNS": 64}, num_warps=4, num_stages=3)], key=["T", "D"])
#     @triton.jit
#     def flash_forward_kernel(...):
#
# and at the first launch with a new T or D it times each configuration. The next two functions do the same, and they keep
# the times and the compiler's report. Read them: what does a thread's number of registers say about an SM?

# %%
for name in ("compiler_report", "tune"):
    lab.show(f"course.lab.instruments.kernel_tuning.{name}")

# %% [markdown]
# > **Predict.** Heads of 64, 4096 tokens, causal, bf16 on an H200. Which configuration of the forward pass is the fastest:
# > blocks of 64 or 128 queries, 4 or 8 warps?

# %%
my_rows, my_warps = 64, 4        # your prediction

# %%
rows = lab.results("flash_attention_h200")["rows"]
lab.recorded("flash_attention_h200",
             flash_pictures.configurations(rows, "forward", 64, 4096, True),
             why="Heads of 64, blocks of queries x tiles of keys")
print(f"you predicted blocks of {my_rows} queries and {my_warps} warps")

# %% [markdown]
# **What you should see:** the fastest one is {result: flash_best(64)[0] | }, with
# {result: flash_best(64)[1]["TFLOP/s"] | .0f} TFLOP/s. The slowest one, {result: flash_worst(64)[0] | }, reaches
# {result: flash_worst(64)[1]["TFLOP/s"] | .0f}. It is the same source.
#
# Read the table by pairs that differ in one number:
#
# - *Stages.* 128 × 64, 4 warps: two stages instead of three. The tiles arrive late.
# - *Tile of keys.* 128 × 128 instead of 128 × 64, 8 warps, 3 stages. Only one program fits on an SM.
# - *Warps.* 128 × 64, 3 stages: 4 or 8 warps make little difference here, because nothing spills.
#
# > **Predict.** Heads of 128 double the output of a block and the tiles of keys and values. Take blocks of 128 queries, tiles
# > of 64 keys and 3 stages. How many times as fast as 4 warps are 8?

# %%
my_warp_gain = 1.0               # your prediction

# %%
tried = flash_pictures.configurations(rows, "forward", 128, 4096, True)
rates = [tried[f"128 x 64, {count} warps, 3 stages"]["TFLOP/s"] for count in (8, 4)]
lab.beside("8 warps over 4 warps", my_warp_gain, rates[0] / rates[1], "times",
           "recorded")
lab.recorded("flash_attention_h200", tried,
             why="Heads of 128, blocks of queries x tiles of keys")

# %% [markdown]
# **What you should see:** with 4 warps the compiler needs all 255 registers and spills
# {result: flash_tried(128)["128 x 64, 4 warps, 3 stages"]["spilled"] | d} more, in the inner loop. Eight warps share the
# same block, and nothing spills.
#
# If you have a GPU, try your own kernel. Without one, this cell does nothing.

# %%
if runs and not INTERPRETED:
    from course.lab.instruments.kernel_tuning import tune

    q, k, v = (torch.randn(4, 16, 4096, 64, device="cuda").bfloat16() for _ in range(3))
    y, lse = torch.empty_like(q), torch.empty(4, 16, 4096, device="cuda")
    candidates = [Tiles(64, 64, 4, 3), Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3)]
    with lab.yours(*forward):
        tried = tune(lambda tiles: launch_forward(q, k, v, y, lse, True, tiles),
                     candidates,
                     q.device)
    for tiles, report in tried.items():
        print(tiles, report)

# %% [markdown]
# ## Beside the best
#
# PyTorch's flash attention is FlashAttention-2, in CUDA C++, written for the GPU generation before this one. cuDNN's
# attention is written for this one. The library's packed attention is Triton too.
#
# > **Predict.** What percentage of flash attention's speed does your forward pass reach? And of cuDNN's?

# %%
my_shares = {"flash": 50.0, "cuDNN": 50.0}           # your predictions, in percent

# %%
forward_speeds = flash_pictures.speeds(rows, "forward")
for who, predicted in my_shares.items():
    shares = [100 * rates["lesson"] / rates[who] for rates in forward_speeds.values()]
    lab.beside(f"of {who}", predicted, sum(shares) / len(shares), "%", "recorded")
lab.recorded("flash_attention_h200", forward_speeds, why="Forward, TFLOP/s")

# %%
lab.recorded("flash_attention_h200", flash_pictures.speeds(rows, "backward"),
             why="Backward, TFLOP/s. A rate counts five products; your "
             "kernels do seven")

# %% [markdown]
# **What you should see:** forward, your kernel runs at {result: min(flash_ratios("forward", "flash")) | .0%} to
# {result: max(flash_ratios("forward", "flash")) | .0%} of the speed of PyTorch's flash attention. Backward, it is
# {result: min(flash_ratios("backward", "flash")) | .0%} to {result: max(flash_ratios("backward", "flash")) | .0%}. Beside
# cuDNN, it is {result: min(flash_ratios("forward", "cuDNN")) | .0%} to
# {result: max(flash_ratios("forward", "cuDNN")) | .0%} forward, and
# {result: min(flash_ratios("backward", "cuDNN")) | .0%} to {result: max(flash_ratios("backward", "cuDNN")) | .0%} backward.
#
# With heads of 128, the library's backward pass is slow: it reaches {result: min(library_backward(128)) | .0f} to
# {result: max(library_backward(128)) | .0f} TFLOP/s, less than half of yours. Its tiles were chosen for narrower heads, such as
# DiT's 72. Training uses it where it beats PyTorch's attention: for heads below 128 and samples of up to 512
# tokens, 1024 if causal.
#
# ## What separates the rest
#
# A matrix product alone reaches {result: bf16_matmul | .0f} TFLOP/s on an H200. Your forward pass reaches {result:
# flash_best(128)[1]["TFLOP/s"] | .0f}. Products are not its only work. In one clock cycle, the tensor cores of an SM do 4096
# bf16 FLOPs. Its special function units compute 16 exponentials.
#
# > **Predict.** A tile has 128 × 64 scores, and heads have 64 numbers. How many cycles do its two products take, and how
# > many its exponentials? And with heads of 128?

# %%
my_cycles = {64: (500, 50), 128: (1000, 50)}         # D -> products, exponentials

# %%
for D, (products, exponentials) in my_cycles.items():
    lab.beside(f"products, heads of {D}", products, 2 * 2 * 128 * 64 * D / 4096,
               "cycles",
               "counted")
    lab.beside(f"exponentials, heads of {D}", exponentials, 128 * 64 / 16, "cycles",
               "counted")

# %% [markdown]
# With heads of 64, exponentials take as long as products. (FlashAttention-3, Shah et al. 2024, arXiv:2407.08608, starts from
# this count.) A program that does one after the other keeps the tensor cores busy at most half of the time. So one program's
# exponentials must run *beside* another one's products.
#
# Now look at the report again. With heads of 64 the fastest configuration leaves room for
# {result: flash_best(64)[1]["programs on an SM"] | d} programs on an SM: one multiplies while another exponentiates. Your
# kernel comes close to cuDNN's. With heads of 128 and blocks of 128 queries, one thread needs
# {result: flash_tried(128)["128 x 64, 8 warps, 3 stages"]["registers"] | d} registers, and an SM has room for
# {result: flash_tried(128)["128 x 64, 8 warps, 3 stages"]["programs on an SM"] | d} program. Blocks of 64 queries leave
# room for {result: flash_tried(128)["64 x 64, 4 warps, 3 stages"]["programs on an SM"] | d}, but each reads keys and values
# for half as many queries. Both are equally fast, and cuDNN is further ahead.
#
# > **Question.** cuDNN's kernel does not need a second program for this. What could one program do with its warps?
#
# <details><summary>Answer</summary>
# Give them different jobs. A few warps only copy tiles into shared memory, and need few registers. Two groups of four warps
# take turns: while one computes exponentials, the other one's products run. This is <em>warp specialization</em>, and
# FlashAttention-3 also works like this. In your kernel all warps of a program run the same code.
# </details>
#
# Backward, a program of the second kernel holds two outputs, dK and dV, and two tiles of scores. With heads of 128 it takes
# all 255 registers of a thread and spills some, but it is still the fastest: configurations that do not spill have smaller
# tiles. The two extra products also cost time. FlashAttention-2 does five, and adds up dQ with atomic additions, in an order
# that changes from run to run.

# %% [markdown]
# ## Open task: a loss for a wide vocabulary
#
# *Optional, about 40 minutes. Nothing later needs it.* A language model ends with logits, one number for each token and each
# word of the vocabulary. With 8 samples of 2048 tokens and 50,304 words they take 1.6 GB in bf16. Cross-entropy needs the
# softmax of each row. Your softmax held a row in registers, but a block for 50,304 logits has 65,536 numbers, as many as an
# SM has registers. And PyTorch computes the loss in float32, with tensors as large as the logits.
#
# > **Predict.** How many bytes does PyTorch need at the peak for loss and gradient, as a multiple of the bf16 logits? Do not
# > count the logits themselves.

# %%
my_multiple = 2.0                # your prediction

# %%
from course.lab.instruments.tensor_memory import MemoryMeter

logits = torch.randn(64, 5000).bfloat16().requires_grad_()
targets = torch.randint(5000, (64,))
with MemoryMeter() as meter:
    F.cross_entropy(logits.float(), targets).backward()
lab.beside("bytes beside the logits", my_multiple, meter.peak / logits.nbytes,
           "times their bytes")

# %% [markdown]
# **What you should see:** six times. The log-softmax, its gradient, and the gradient of the float32 logits live at the same
# time, and each takes twice the bytes of the bf16 logits. For 1.6 GB of logits that is 10 GB.
#
# [Liger Kernel](https://arxiv.org/abs/2410.10989) and Unsloth need none of it. Their kernels go over each row in blocks, and
# overwrite the logits with their gradient. Write such a loss. Our solution has 30 lines.
#
# > **Question.** Your FlashAttention folds tiles into a running maximum and sum. What would this loss fold, and what does a
# > second pass need of the first one?
#
# <details><summary>Answer</summary>
# The same maximum and sum: the loss is maximum + log(sum) − the target's logit. The gradient is the softmax, minus 1 at the
# target. The second pass needs the row's maximum and sum, or maximum + log(sum), and the logits again.
# </details>
#
# **Contract**
#
# - `cross_entropy(logits, targets, ignored, scale, block)` returns the mean loss, and the gradient of `scale` times that loss
#   for the logits. The loss has the shape () and float32. The gradient has the shape and the format of the logits.
# - `logits` (T, V) are float32 or bf16. V may be less than `block`, or no multiple of it. Columns are adjacent in memory, rows
#   need not follow each other. You may overwrite them. Logits may be above 10,000, below −10,000, or -inf. A whole block may
#   be -inf, but not the target of a token that counts.
# - `targets` (T,) are int64, from 0 to V − 1, or `ignored`. A token whose target is `ignored` does not count: its loss and its
#   gradient are 0, whatever its logits, and the mean is over the other tokens. `ignored` may be any number, also that of a
#   word. If no token counts, the loss is 0.
# - Write `cross_entropy_kernel`, with arguments of your choice, and more kernels if you like. Sums are float32. No load or
#   store touches more than `block` numbers, a power of two. A program handles at most four tokens, and a call has at most
#   eight launches. No program reads what another one of the same launch writes.
# - The threads of one program wait for each other only in sums, maxima and `tl.debug_barrier()`. So one of these lies between
#   two lines that touch the same number, if one of them stores it. A tile that you load and store in its place needs none.
# - PyTorch may count targets and add up losses: it computes with at most 4 numbers of each token, and with no logit. Besides
#   the gradient you may make tensors with half as many numbers as there are logits.
#
# **Levels.** The check has six cases or more, with 1 to 5 blocks. Each level counts by itself, once the first is reached:
#
# | level | what the check counts |
# |---|---|
# | correct | the contract; loss and gradient match PyTorch's in float64 up to rounding |
# | two reads | a kernel reads each logit at most twice (the target's once more), and stores each element of the gradient once |
# | in place | the gradient is in the memory of the logits |
# | ignored tokens unread | no kernel reads a logit of an ignored token |
#
# Start with correct. `lab.hint("cross-entropy")` opens the first of three hints, and each further call opens the next one.

# %% exercise="cross-entropy"
from course.lab.exercises.lesson19_open_task import (  # noqa: F401
    cross_entropy, cross_entropy_kernel)

# %%
check("cross-entropy")

# %% [markdown]
# ## Summary
#
# - A kernel is one function that runs as many programs. Each program loads a tile, computes in registers, and stores.
# - Strides let a kernel read any layout in place. Masks keep it inside its tensors.
# - Between matrix products, bytes decide: load and store each number once. Sums over programs go through partial sums.
# - FlashAttention folds tiles into a running maximum and sum. Its backward pass computes the scores again.
# - Tile sizes, warps and stages decide how many programs fit on an SM. Try several, and read the compiler's report.
#
# ## Questions
#
# 1. Your copy writes the transpose of a matrix. Which of its sides is slow on a GPU, and which tiles would you try?
# 2. A row of 1152 numbers takes a tile of 2048, so 44% of the tile is masked. What does that cost, and what not?
# 3. You fuse dropout into the residual sum. How does the backward pass know what was dropped, without a stored mask?
#
# **Check your work from a terminal.** Save the notebook, then run `course check notebooks/19_kernels_mine.ipynb`. The
# library's own kernels are in `course/ops`. `tests/ops/test_interpreted_kernels.py` runs them in the interpreter, so you
# can change one without a GPU.
#
# ## Appendix (optional): on GPUs
#
# On a machine with a GPU, each check above has printed the speed of your kernel beside PyTorch's and the library's. From
# the root of a clone, these commands measure every kernel of this lesson:
#
# ```
# python -m experiments.kernels FILE
# python -m experiments.flash_attention FILE
# ```
#
# To interpret kernels on a machine with a GPU, set `TRITON_INTERPRET=1` before you start Jupyter. Then `print` and a
# debugger work inside a kernel.
