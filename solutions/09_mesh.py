# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 09 · The process mesh
#
# A launcher gives you ranks 0, 1, 2, ..., a plain list of processes. A large model needs several kinds of groups at once:
# GPUs that share one matrix, GPUs that share one sequence, GPUs that hold copies of the same weights. The **mesh** turns the
# list into a box with one axis for each kind. It takes one `reshape` and one `permute`. The order of the axes can make
# communication several times slower, and you will compute by how much.
#
# **What you will learn**
#
# - How to lay ranks out in a mesh, and how to form the groups of an axis.
# - How the order of the axes decides which axis uses NVLink.
# - How to predict the bytes that each axis sends in a training step.
# - How to read which path NCCL takes, and what latency and bandwidth a link has.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 80 minutes |
# | computing | half a minute on two cores |
# | you write | the layout (4 lines), groups (1), nodes (2), bytes (8), the best ring (5); optional: a placement (30) |
# | you measure | the bytes that a real training step sends along each axis |
#
# Do lesson 07 first: you need to know what an all-reduce is, and what it sends. Work in a copy: *File → Save Notebook As…*,
# `09_mesh_mine.ipynb`.

# %% numbers=true
from course.bench.results import load

nvlink_speed = load("beginning_h200")["all_reduce"]["4"]["512"]     # GB/s

# %%
from itertools import pairwise, permutations

import torch
import torch.distributed as dist
from torch import Tensor

from course.training import assemble
from course.lab.instruments.bytes_sent import collectives
from course.lab.instruments.forward_trace import trace
from course import config, parallel
from course.training import verify
from course.config import Parallel
from course.utils.errors import CourseError
from course.lab.figures import fabric, mesh, style, who_holds, widgets
from course.lab import notebook as lab
from course.lab.notebook import check
from course.ranks.notebook_ranks import ranks
from course.parallel import World, build_mesh
from course.parallel.mesh import AXES

lab.begin("09")

# %% [markdown]
# ## Four axes
#
# | axis | its ranks share | so each has | lesson |
# |---|---|---|---|
# | `dp`, data parallel | nothing: each has a copy of the weights | other samples | 07 |
# | `tp`, tensor parallel | every weight matrix of a layer | a part of the heads and hidden units | 10 |
# | `cp`, context parallel | every sample | a part of its tokens | 11 |
# | `pp`, pipeline parallel | the stack of layers | a few layers, a *stage* | 12 |
#
# You can use all of them at once. With `pp=2`, `dp=4`, `cp=2`, `tp=4` the world has 2 × 4 × 2 × 4 = 64 ranks, and every rank
# has four coordinates. Two ranks communicate along an axis if they differ in **that coordinate alone**.
#
# Begin with two axes. Here are eight ranks as a box of 2 × 4: `dp=2` down, `tp=4` across.

# %%
box = torch.arange(8).view(2, 4)
print(box)

# %% [markdown]
# > **Predict.** Which ranks does rank 5 communicate with along `tp`, and which along `dp`? Write down both groups, in order.

# %%
my_tp_group = [0, 1]             # your prediction
my_dp_group = [0, 1]

# %%
row, column = divmod(5, 4)
print("tp: the row of rank 5   ", box[row].tolist(), "- you said", my_tp_group)
print("dp: the column of rank 5", box[:, column].tolist(), "- you said", my_dp_group)

# %% [markdown]
# The rows are the groups along `tp`, the columns the groups along `dp`. Neighboring ranks, such as 4 and 5, are in the same
# row. So `tp` is the **fastest** axis, because it changes with every rank, and `dp` the **slowest**. This course writes an
# order slowest first, `dp-tp`, like the dims of a tensor.
#
# > **Question.** Which ranks would share a row if the order were `tp-dp`, with the same sizes?
#
# <details><summary>Answer</summary>
# <code>torch.arange(8).view(4, 2)</code> has tp down and dp across. Its tp groups are the columns, 0 2 4 6 and 1 3 5 7. Its
# dp groups are the rows: 0 1, 2 3, 4 5 and 6 7. The sizes are the same, the neighbors differ.
# </details>
#
# Conventions differ. Megatron-LM's default, `tp-cp-ep-dp-pp`, names the **fastest** axis first. torchtitan lists the dims of
# its mesh slowest first, as here. Read before you compare.

# %% [markdown]
# ## Exercise: lay the ranks out
#
# The library expects the box in one form, whatever the order: a tensor of ranks. Its dims are `(pp, dp, cp, tp)`, as `AXES`
# lists them. The order only decides **which** rank stands where. Nothing else in the library has to know the order.
#
# - `sizes` is a dict such as `{"pp": 2, "dp": 4, "cp": 2, "tp": 4}`.
# - `order` is a string such as `"cp-tp-pp-dp"`: all four axes, slowest first.
# - Return the ranks 0, 1, 2, ... with the shape (pp, dp, cp, tp).
#
# Look up `Tensor.permute`: for each dim of the *result*, its argument names the dim of the input.

# %% exercise="lay-out"
from course.parallel.mesh import lay_out

# %%
check("lay-out")

# %% [markdown]
# > **Question.** Why is a `view` not enough? `arange(8).view(2, 4)` and `arange(8).view(4, 2)` are both boxes of eight ranks.
#
# <details><summary>Answer</summary>
# A view never changes the order in which ranks are read: the last dim always has neighbors. The dims must come out as (pp,
# dp, cp, tp) even if an axis <i>other</i> than tp has the neighbors. So the dims have to change places together with their
# strides: that is what permute does. For tp-dp above, <code>arange(8).view(4, 2).permute(1, 0)</code> is [[0, 2, 4, 6], [1,
# 3, 5, 7]].
# </details>
#
# ## Exercise: the groups of an axis
#
# A collective runs in a **group**. Along an axis there is one group for each way to fix all other coordinates: with 64 ranks
# and `tp=4`, sixteen. Write `groups(grid, dim)`, which returns the groups along one dim of the box, one row for each. Within
# a row the ranks follow the order of the axis. The rows follow the order of the other dims.
#
# It is one line: move the dim to the end, and read the box in rows.

# %% exercise="groups"
from course.parallel.mesh import groups

# %%
check("groups")

# %%
for order in ("pp-dp-cp-tp", "tp-cp-dp-pp"):
    grid = lay_out({"pp": 1, "dp": 2, "cp": 1, "tp": 4}, order)
    print(f"{order}: tp {groups(grid, 3).tolist()}, dp {groups(grid, 1).tolist()}")

# %% [markdown]
# ## A real mesh
#
# This is the library's function around yours. It checks the sizes, lays the ranks out, and makes a process group for every
# row. NCCL keeps 0.7 to 1 GB of a GPU's memory for each group, so an axis of all ranks takes the group of all ranks. It
# returns **values**: `mesh.tp` is an `Axis` with a size, this rank's position along it, the ranks along it, and the group.
# Functions that communicate take an `Axis` as an argument. There is no global table of groups, so no code can read one that is
# not set up yet.

# %%
lab.show("course.parallel.mesh.build_mesh")
lab.show("course.parallel.mesh.Axis")

# %% [markdown]
# Start four ranks with `dp=2` and `tp=2`, with your two functions in place of the library's. Each rank contributes its own
# number. The program adds these numbers along `tp`, and separately along `dp`.
#
# > **Predict** both sums on every rank, for the order `pp-dp-cp-tp`. Then for `tp-pp-cp-dp`.

# %%
def add_up_along(order: str) -> str:
    with lab.yours(lay_out, groups):
        mesh = build_mesh(Parallel(dp=2, tp=2, order=order), parallel.join("cpu"))
    sums = []
    for axis in (mesh.tp, mesh.dp):
        mine = torch.tensor(float(mesh.world.rank))
        dist.all_reduce(mine, group=axis.group)
        sums.append(f"{axis.name} {list(axis.ranks)} adds up to {mine:.0f}")
    return f"rank {mesh.world.rank}: {', '.join(sums)}"


for order in ("pp-dp-cp-tp", "tp-pp-cp-dp"):
    print(order, *ranks(4)(add_up_along, order), sep="\n  ")

# %% [markdown]
# With `tp` last, ranks 0 and 1 are a tensor-parallel pair: 0 + 1 = 1. With `dp` last they hold copies of the same weights,
# and rank 0 shares its matrices with rank 2.
#
# Gradients need one more axis. They are averaged over all ranks with the **same weights and different data**. Ranks along
# `dp` have different samples, ranks along `cp` different tokens. In the box the two dims lie side by side, so the joint axis
# is `grid.flatten(1, 2)`. The library calls it `dp_cp`.
#
# > **Predict.** Eight ranks train a model of two blocks with `pp=2 dp=2 tp=2`. Which weights does rank 5 hold, and which
# > other rank holds the same ones?

# %%
EIGHT = ("vit-demo", "model.depth=2", "train.global_batch=4", "train.micro_batch=1",
         "parallel.pp=2", "parallel.dp=2",
         "parallel.tp=2")
WEIGHTS = {"embedding": "embed.proj.weight", "block 0: up": "blocks.0.mlp.up.weight",
           "block 0: down": "blocks.0.mlp.down.weight",
           "block 1: up": "blocks.1.mlp.up.weight",
           "block 1: down": "blocks.1.mlp.down.weight", "head": "head.proj.weight"}
lab.picture(who_holds.parameters(ranks(8)(trace, *EIGHT), WEIGHTS,
                                 title="weights by rank, pp=2 dp=2 tp=2"),
            "Eight rows, one for each rank. Ranks 0 to 3 hold the embedding and block "
            "0, ranks 4 to 7 block 1 and the head. Even ranks have the upper half of "
            "up and the left half of down, odd ranks the other halves. Ranks 0 and 2 "
            "hold the same, and so do 1 and 3, 4 and 6, 5 and 7.")

# %% [markdown]
# The picture is drawn from eight real processes. Along `pp`, ranks hold different blocks; along `tp`, different parts of the
# same matrices; along `dp`, the same parts. Rank 5 holds what rank 7 holds: the second half of block 1's matrices, and the
# head.
#
# ## What `build_mesh` refuses
#
# The product of the sizes must be the number of processes; otherwise the library refuses the mesh and shows the arithmetic.
# It also refuses an order that leaves an axis out.

# %%
attempts = {"tp=3 on 4 processes": lambda: build_mesh(Parallel(tp=3), World(size=4)),
            "an order without cp": lambda: config.load("vit-demo",
                                                       ["parallel.order=pp-dp-tp"])}
for what, attempt in attempts.items():
    try:
        attempt()
    except CourseError as error:
        print(f"{what}: {error}")

# %% [markdown]
# > **Question.** With `tp=2`, 8 processes and `dp` not set, the library refuses nothing. What does `dp=0`, the default, mean?
#
# <details><summary>Answer</summary>
# "What the other axes leave": 8 / 2 = 4. A job on more GPUs needs no new configuration, and the global batch stays the same.
# </details>
#
# ## Which link does an axis use?
#
# GPUs come in **nodes**, usually of 8. NVLink connects the GPUs inside a node. A network connects the nodes, with one network
# card for each GPU:
#
# | link | bandwidth of each GPU | source |
# |---|--:|---|
# | NVLink, all-reduce of 512 MB over 4 H200s | {result: nvlink_speed | .0f} GB/s | measured for this course |
# | network, 400 Gb/s InfiniBand | 50 GB/s | the card's data sheet, an upper limit |
#
# That is a factor of {result: nvlink_speed / 50 | .0f}. Launchers number ranks node by node: 0 to 7 on the first, 8 to 15 on
# the second. So **the order decides which axis stays inside a node**.
#
# A collective is as fast as its slowest link. The groups of an axis all work at the same time and wait for one another in the
# next layer. So an axis uses NVLink only if *every* group of it is within one node.
#
# ## Exercise: the nodes that a group touches
#
# `groups` has a row of ranks for each group of an axis. Count the nodes that each group touches, and return the largest
# count.

# %% exercise="nodes-touched"
def nodes_touched(groups: Tensor, per_node: int) -> int:
    """The most nodes that one group of an axis touches; `groups` has a row of ranks for each group."""
    ### BEGIN SOLUTION
    nodes = groups // per_node
    return max(len(set(row.tolist())) for row in nodes)
    ### END SOLUTION

# %%
check("nodes-touched")

# %% [markdown]
# Now explore. The picture shows 16 GPUs on two nodes; squares with the same letter are a group along the chosen axis. Below
# the squares you see which link each axis uses in the chosen order.
#
# > **Predict, before you move anything:** with `pp=2, dp=2, tp=4`, which order puts *only* `pp` on the network? Is there one
# > that puts only `tp` there? And with `tp=16`, can any order keep it off the network?

# %%
shapes = {"pp=2 dp=2 tp=4": {"pp": 2, "dp": 2, "cp": 1, "tp": 4},
          "dp=2 cp=2 tp=4": {"pp": 1, "dp": 2, "cp": 2, "tp": 4},
          "dp=2 tp=8": {"pp": 1, "dp": 2, "cp": 1, "tp": 8},
          "tp=16": {"pp": 1, "dp": 1, "cp": 1, "tp": 16}}


def sixteen_gpus(sizes: str, order: str, axis: str):
    """Who talks to whom along an axis, on two nodes of eight GPUs."""
    return mesh.mesh(shapes[sizes], order, 8, axis)


slider = widgets.explore(sixteen_gpus, sizes=list(shapes),
                         order=["pp-dp-cp-tp", "tp-dp-cp-pp", "tp-pp-cp-dp",
                                "dp-pp-cp-tp"],
                         axis=["tp", "dp", "cp", "pp"],
                         alt="Two nodes of eight GPUs, each with its rank and the "
                         "letter of its group along "
                             "the chosen axis; below, the link that every axis uses "
                         "in this order.")

# %% [markdown]
# <details><summary>Answer</summary>
# pp-dp-cp-tp: the slowest axis steps from node to node. To put only tp on the network, make tp the slowest axis, as in
# tp-dp-cp-pp. Its neighbors are then 4 ranks apart, so each tp group touches both nodes, while dp and pp stay within four
# consecutive ranks. A group of 16 never fits into a node of 8: tp=16 is on the network in every order. That is why tensor
# parallelism rarely goes beyond 8.
# </details>
#
# ## How much does each axis send?
#
# To choose an order, you have to know what each axis sends in a step. Here, one **activation** is a rank's tensor between two
# layers, for one micro-batch: samples × tokens / cp × dim numbers. `tp` and `pp` cut the weights. You will build all of these
# axes in the next lessons. One GPU sends:
#
# - **tp**: in each layer two all-reduces of an activation in the forward pass, two in the backward pass (lesson 10).
# - **cp**, gathering keys and values: in each layer an all-gather of both forward, and a reduce-scatter of their gradients
#   backward. `tp` cuts the heads, so a rank's keys are as large as an activation divided by `tp`. So are its values.
# - **pp**, a stage in the middle: for each micro-batch, one activation to the next stage and one gradient to the stage
#   before.
# - **dp**: an all-reduce of all gradients that this GPU has, once a step, over dp × cp.
#
# Lesson 07 showed what the collectives send, for n ranks and a *whole* tensor of S bytes. An all-gather or a reduce-scatter
# sends (n − 1) / n · S. An all-reduce does both and sends 2 (n − 1) / n · S.
#
# The model: a GPT of 40 layers of width 5120, 12.6 billion parameters, sequences of 8192 tokens, on 64 GPUs.
#
# > **Predict** how many gigabytes one GPU sends along each axis in a step. At least say which axis sends most, which sends
# > least, and by what factor.

# %%
sizes = {"pp": 2, "dp": 4, "cp": 2, "tp": 4}
# tokens of one sample
work = {"layers": 40, "dim": 5120, "tokens": 8192,
        # samples of a micro-batch; micro-batches of a step
        "samples": 1, "micros": 16,
        # bytes of one number, of gradients as well
        "parameters": 12 * 40 * 5120**2, "itemsize": 2}

# your prediction
my_gigabytes = {"tp": 10.0, "cp": 10.0, "pp": 10.0, "dp": 10.0}

# %% [markdown]
# *How often* an axis sends matters most: `tp` sends four times in every layer for every micro-batch, `pp` twice for every
# micro-batch, `dp` once a step.
#
# You will use your formula in two ways. First you will compare it with a real step: do not trust an unchecked formula. The
# library records every collective before it starts (`course.ranks.collective_trace`); `ranks` uses this record to tell you who
# waits for whom.
#
# > **Predict.** How far will the formula be off, for a model of 4 layers, on `dp=2, tp=2` and on `pp=2, cp=2`? Exact, 1%,
# > 10%, worse?
#
# Then you will combine bytes and links. For each of the 24 orders, your functions find the axes that stay within a node and
# the seconds that each axis needs. The estimate adds up the axes and assumes no overlap with computation.
#
# > **Predict.** By what factor is the worst order slower than the best? For scale: the arithmetic of this step, 6 FLOPs for
# > each parameter and token at 400 TFLOP/s a GPU, takes 1.5 s.

# %%
# your prediction: seconds of the worst order over seconds of the best
my_factor = 2

# %% [markdown]
# ## Exercise: bytes sent
#
# Write the formula as a function. Count all layers on this GPU and all micro-batches of a step. An axis of size 1 sends
# nothing; the formulas say so by themselves, except for one.
#
# Be careful with the all-gather of keys: in (n − 1) / n · S, S is the *whole* tensor, the keys of all `cp` ranks.

# %% exercise="bytes-sent"
def bytes_sent(sizes: dict[str, int], work: dict[str, int]) -> dict[str, float]:
    """The bytes that one GPU sends along each axis in a training step: {"tp": ..., "cp": ..., "pp": ..., "dp": ...}."""
    ### BEGIN SOLUTION
    tp, cp, pp, n = sizes["tp"], sizes["cp"], sizes["pp"], sizes["dp"] * sizes["cp"]
    activation = work["samples"] * work["tokens"] / cp * work["dim"] * work["itemsize"]
    passes = work["layers"] / pp * work["micros"]
    keys_of_all = cp * activation / tp
    return {"tp": passes * 4 * 2 * (tp - 1) / tp * activation,
            "cp": passes * 2 * (cp - 1) / cp * 2 * keys_of_all,
            "pp": work["micros"] * 2 * activation if pp > 1 else 0.0,
            "dp": 2 * (n - 1) / n * work["parameters"] / (tp * pp) * work["itemsize"]}
    ### END SOLUTION

# %%
check("bytes-sent")

# %%
sent = bytes_sent(sizes, work)
for axis, guess in my_gigabytes.items():
    lab.beside(axis, guess, sent[axis] / 1e9, "GB", "computed")

# %% [markdown]
# **What you should see:** tensor parallelism sends 81 GB. That is six times as much as context parallelism, fifteen times as
# much as `dp`, and sixty times as much as the pipeline. Divide your formulas by one another to see what each ratio depends
# on.
#
# ## Is that what a real step sends?

# %%
def one_counted_step(overrides: list[str]) -> dict[str, float]:
    """Bytes that this rank sends along each axis in its second training step."""
    settings = config.load("vit-demo", ["data.source=mock", "train.device=cpu",
                                        "parallel.context=gather",
                                        "parallel.data=naive",
                                        "train.global_batch=8", *overrides])
    mesh = build_mesh(settings.parallel, parallel.join("cpu"))
    training = assemble.assemble(settings, mesh)
    # in a pipeline's first step the stages also agree on shapes
    verify.one_step(training, 1)
    _, calls = collectives(lambda: verify.one_step(training, 2))
    of = {"tp": (mesh.tp, ("all-reduce",)),
          "cp": (mesh.cp, ("all-gather", "reduce-scatter")), "pp": (mesh.pp, ("send",)),
          "dp": (mesh.dp_cp, ("all-reduce",))}
    return {name: sum(call.sent for call in calls if call.ranks == axis.ranks
                      and call.op.startswith(ops))
            for name, (axis, ops) in of.items()}


layouts = [({"pp": 1, "dp": 2, "cp": 1, "tp": 2}, 4, 1),
           ({"pp": 2, "dp": 1, "cp": 2, "tp": 1}, 2, 4)]
settings = config.load("vit-demo")
for sizes_of_4, samples, micros in layouts:
    small = {"layers": settings.model.depth, "dim": settings.model.dim,
             "tokens": settings.model.tokens, "samples": samples,
             "micros": micros, "parameters": 892_096, "itemsize": 4}
    formula = bytes_sent(sizes_of_4, small)
    counted = ranks(4)(one_counted_step, [*(f"parallel.{axis}={n}"
                                            for axis, n in sizes_of_4.items()),
                                          f"train.micro_batch={samples}"])[0]
    print(", ".join(f"{axis}={n}" for axis, n in sizes_of_4.items() if n > 1))
    for axis in sizes_of_4:
        if formula[axis]:
            print(f"   {axis}: formula {formula[axis] / 1e6:6.3f} MB, counted "
                  f"{counted[axis] / 1e6:6.3f} MB")

# %% [markdown]
# **What you should see:** `tp` and `cp` are exact; two are off.
#
# > **Question.** `dp` sends 11% more when `tp=2`, and about 2% more when `pp=2`. `pp` sends exactly half. Why?
#
# <details><summary>Answer</summary>
# tp leaves norms, embedding, positions and head whole, which make up a tenth of this small model. pp cuts everything, but not
# into equal halves: rank 0 has the embedding. With two stages, the first sends only activations, the last only gradients.
# </details>
#
# ## The best order

# %%
nvlink = 1e9 * lab.results("beginning_h200")["all_reduce"]["4"]["512"]
bytes_per_second = {"NVLink": nvlink, "network": 50e9}


def seconds(order: str) -> dict[str, float]:
    """What each axis takes for its bytes, on nodes of 8."""
    grid = lay_out(sizes, order)
    # dp x cp
    rows = {name: groups(grid, dim)
            for dim, name in enumerate(AXES)} | {"dp": groups(grid.flatten(1, 2), 1)}
    return {name: sent[name] / bytes_per_second["NVLink" if nodes_touched(rows[name], 8)
                                                == 1 else "network"] for name in sent}


orders = {"-".join(names): seconds("-".join(names)) for names in permutations(AXES)}
orders = dict(sorted(orders.items(), key=lambda entry: sum(entry[1].values())))
best, *_, worst = orders.values()
lab.beside("worst over best", my_factor, sum(worst.values()) / sum(best.values()),
           how="computed")
lab.picture(style.stacked(orders, "seconds of communication in a step",
                          "64 GPUs, pp=2 dp=4 cp=2 tp=4, nodes of 8"),
            "24 bars in three groups: orders with tp and cp within a node are the "
            "shortest; orders with tp within and cp across nodes are longer; orders "
            "with tp across nodes are by far the longest")

# %% [markdown]
# **What you should see:** three groups of orders, and almost a factor of five between them. `tp` on the network alone takes
# 1.6 s, as long as the arithmetic. So put `tp` last and `cp` before it, as far as they fit into a node. `pp` sends little,
# and backward can hide `dp`. That order, `pp-dp-cp-tp`, is the library's default.
#
# ## What joins the GPUs?
#
# "NVLink inside, a network outside" is the short version. `nvidia-smi topo -m` prints how each pair of GPUs is connected:
#
# | in the table | the path between two GPUs | bandwidth of one GPU, one direction |
# |---|---|--:|
# | `NV1`, `NV2`, ... | that many NVLinks, a direct wire or a switch | 25 GB/s a link up to H100; newer GPUs have more links |
# | `PIX`, `PXB` | one or several PCIe switches | 13 GB/s with PCIe 3.0 x16, 25 with 4.0 |
# | `PHB`, `NODE` | PCIe and the CPU | less |
# | `SYS` | also the link between two CPUs | less still |
#
# Between nodes there is InfiniBand or Ethernet. With RDMA, the network card reads GPU memory itself. With plain **sockets**,
# the data passes through the kernel's TCP.
#
# On newer nodes, a switch connects all links of all GPUs. On the eight V100s here, each GPU has six links to four others.

# %%
print(fabric.CUBE_MESH)

# %% [markdown]
# > **Question.** Which pairs share two NVLinks? How does data travel from GPU 0 to GPU 5?
#
# <details><summary>Answer</summary>
# 0-3, 0-4, 1-2, 1-5, 2-3, 4-7, 5-6 and 6-7. Between 0 and 5 the table says SYS: the data crosses both CPUs. NVLink reaches
# GPU 5 only through 1 or 4.
# </details>
#
# ## Exercise: the narrowest link
#
# NCCL sends an all-reduce around a **ring** of the group's GPUs, and chooses the order of the ring. A ring is as fast as its
# narrowest link. Write `narrowest_link`: for the best ring through the group's GPUs, the number of NVLinks between its worst
# neighbors. It is 0 if no ring uses NVLink alone. The rows may have more columns than GPUs, and the table more rows.

# %% exercise="narrowest-link"
def narrowest_link(topology: str, group: list[int]) -> int:
    """The NVLinks between the worst neighbors of the best ring through a group; topology: what `nvidia-smi topo -m` prints."""
    ### BEGIN SOLUTION
    rows = [line.split()[1:] for line in topology.splitlines() if line.startswith("GPU")]
    links = [[int(word[2:]) if word.startswith("NV") else 0 for word in row] for row in rows]
    first, *others = group
    rings = [(first, *order, first) for order in permutations(others)]
    return max(min(links[a][b] for a, b in pairwise(ring)) for ring in rings)
    ### END SOLUTION

# %%
check("narrowest-link")

# %% [markdown]
# > **Predict.** Which layouts of these eight GPUs keep both axes on NVLink? Think of `dp=2 tp=4` and `dp=4 tp=2`, each with
# > `tp` fastest and with `tp` slowest.

# %%
pairs = {(a, b): narrowest_link(fabric.CUBE_MESH, [a, b]) for a in range(8)
         for b in range(a)}


def narrowest(dp: int, tp: int, order: str, numbers: list[int]) -> dict[str, int]:
    """The NVLinks of each axis's narrowest ring, if rank r has GPU numbers[r]."""
    gpus = torch.tensor(numbers)[lay_out({"pp": 1, "dp": dp, "cp": 1, "tp": tp}, order)]
    return {axis: min(narrowest_link(fabric.CUBE_MESH, group)
                      for group in groups(gpus, AXES.index(axis)).tolist())
            for axis in ("dp", "tp")}


for dp, tp in ((2, 4), (4, 2)):
    for order in ("pp-dp-cp-tp", "tp-pp-cp-dp"):
        print(f"dp={dp} tp={tp}, order {order}: "
              f"{narrowest(dp, tp, order, list(range(8)))}")
print("dp=4 tp=2, renumbered:       ", narrowest(4, 2, "pp-dp-cp-tp",
                                                 [0, 3, 1, 2, 4, 7, 5, 6]))
print("dp=8:                        ", narrowest(8, 1, "pp-dp-cp-tp",
                                                 list(range(8)))["dp"])
lab.picture(fabric.node({pair: count for pair, count in pairs.items() if count},
                        [[0, 1, 2, 3], [4, 5, 6, 7]],
                        "eight V100s; blue: two NVLinks, gray: one; colors: tp=4 in "
                        "the order pp-dp-cp-tp"),
            "Two squares of four GPUs with diagonals, 0 to 3 and 4 to 7. Four lines "
            "join them: 0 and 4, 1 and 5, with two NVLinks each, 2 and 6, 3 and 7, "
            "with one each.")

# %% [markdown]
# **What you should see:** NVLink serves every layout here, but not at full width. Rank r gets GPU r, and
# `CUDA_VISIBLE_DEVICES=0,3,1,2,4,7,5,6` renumbers the GPUs: then each `tp=2` pair has two NVLinks. All eight GPUs form a ring
# with two NVLinks everywhere, 0-3-2-1-5-6-7-4.
#
# One more environment variable decides what overlaps. Megatron-LM asks for `CUDA_DEVICE_MAX_CONNECTIONS=1` on GPUs before
# Blackwell: with one hardware queue, kernels start in the order of their launches. So an all-reduce that is launched before a
# matmul starts before it, and overlaps. With the default of 8 queues, the matmul may fill the GPU first.
#
# ## Which path did NCCL take?
#
# With `NCCL_DEBUG=INFO`, each rank prints what it finds. These are the lines to look for:
#
# | line, after `node:pid:tid [gpu] NCCL INFO` | meaning |
# |---|---|
# | `Bootstrap : Using eth0:10.0.0.5<0>` | the interface where ranks meet; `lo` or `docker0` cannot reach another node |
# | `NET/IB : Using [0]mlx5_0:1/IB` | it found InfiniBand |
# | `NET/IB : No device found.` | it found none, and continues with sockets **without an error** |
# | `Using network Socket` | the choice for messages between nodes |
# | `Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM` | rank 0 writes into rank 1's memory: NVLink or PCIe |
# | `Channel 00 : 0[0] -> 1[1] via SHM/direct/direct` | through the host's memory: no peer access |
# | `Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0` | through TCP; you want `NET/IB/0`, best with `GDRDMA` at its end |
#
# In a container without `/dev/infiniband`, NCCL finds no device. Training runs, with much slower all-reduces between nodes.
# `NCCL_NET=IB` turns this fallback into an error. When NCCL does not start at all, save the output and run
# `course doctor --nccl FILE`: it names the cause and the cure.
#
# ## Latency and bandwidth
#
# `course bench comms` measures collectives over message sizes, and fits them to latency + bytes / bandwidth. **Bus bandwidth**
# counts the bytes through each rank's link, so that you can compare it with the link's speed. The recorded runs used gloo
# between two processes on one machine, over three links. These are the loopback interface, a virtual cable (`veth`) between two
# network namespaces, and the same cable limited to 1 Gbit/s.
#
# > **Predict.** A link of 1 Gbit/s carries 0.125 GB/s. What bus bandwidth does an all-reduce of 64 MB reach? How many
# > microseconds does one of 1 kB take there? And on two H200s, whose NVLink carries 450 GB/s in each direction?

# %%
# GB/s, us, us: your predictions
my_bandwidth, my_latency, my_h200 = 0.01, 10.0, 1.0

# %%
links = {**lab.results("comms_cpu")["links"], "2 H200s": lab.results("comms_2xh200")}
rows = {name: [row for row in link["rows"] if row["operation"] == "all-reduce"]
        for name, link in links.items()}
curves = {name: [(row["bytes"], row["bus_gb_s"]) for row in found]
          for name, found in rows.items()}
fits = {name: tuple(link["fits"]["all-reduce"].values())
        for name, link in links.items()}
four = lab.results("kernels_h200")["all_reduce"]["4"]
curves["4 H200s"] = [(size, 2e-9 * 3 / 4 * size / seconds) for size, seconds in four]
slow, fast = rows["veth, 1 Gbit/s"], rows["2 H200s"]
lab.beside("64 MB, 1 Gbit/s", my_bandwidth, slow[-1]["bus_gb_s"], "GB/s", "recorded")
lab.beside("1 kB, 1 Gbit/s", my_latency, slow[0]["us"], "us", "recorded")
lab.beside("1 kB, 2 H200s", my_h200, fast[0]["us"], "us", "recorded")
lab.picture(fabric.bandwidths(curves, fits),
            "Bus bandwidth over message size, both logarithmic. All curves rise in "
            "proportion to the size and then level off. The cable of 1 Gbit/s levels "
            "off lowest, the H200s' NVLink more than a thousand times as high.")

# %% [markdown]
# **What you should see:** each curve has two ends. Small messages cost the latency, whatever their size, and large ones run at
# the link's bandwidth. Between the H200s, the bandwidth is a thousand times that of the slow cable. The latency does not shrink
# by such a factor: a call first has to start a kernel on each GPU. Where the two ends meet, at latency × bandwidth bytes, a
# message reaches half the bandwidth. So collectives are sent in buckets (lesson 07), and the planner needs two numbers for each
# link. `course bench comms` prints them in the form of a hardware file.
#
# ## Open task: place the ranks
#
# *Optional, about 50 minutes. Nothing later needs it.* An order of axes is not enough when pairs of GPUs are connected in
# many ways, or when GPUs are numbered arbitrarily. Choose a GPU for each rank, so that the messages of a step take the least
# time. Our solution has about 30 lines.
#
# Each axis says what a rank sends along it in a step, and whether the axis's groups are rings. `neighbors` gives the pairs of
# ranks that send to each other: here a ring follows the axis, while NCCL also looks for a better one. All groups of an axis
# wait for the slowest path among their pairs.

# %%
from course.lab.instruments.gpu_paths import PATHS, Axis, neighbors, slowest_paths

lab.show("course.lab.instruments.gpu_paths.step_seconds")
axes = [Axis("dp", 2, ring=True, messages=50, bytes=1e9),
        Axis("tp", 4, ring=True, messages=1000, bytes=4e9)]
words = [line.split()[1:] for line in fabric.CUBE_MESH.splitlines()[1:]]
paths = [[-1 if word == "X" else PATHS.index(word) for word in row] for row in words]
print("dp:", neighbors(axes)[0])
print("tp:", neighbors(axes)[1])
for placement in ([0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 4, 6, 1, 3, 5, 7]):
    slow = slowest_paths(axes, paths, placement)
    print("rank r on GPU", placement, "- slowest: dp", PATHS[slow[0]], "tp",
          PATHS[slow[1]])

# %% [markdown]
# **Contract**
#
# - `place_ranks(axes, paths, measure)` returns a list: the GPU of rank 0, of rank 1, and so on, each GPU once.
# - `axes` lists the layout's axes, the slowest first. `paths[a][b]` says how GPUs a and b are connected: an index into `PATHS`,
#   whose first entry is the fastest, or -1 if a is b. `RACK` leads to another node, `CORE` to one in another rack.
# - `measure(placement)` returns the seconds of a step on this machine. They are exactly what `step_seconds` gives, but the
#   speeds are hidden, and differ from machine to machine. You know only that `PATHS` lists the fastest first.
# - `neighbors` and `slowest_paths` are free to call.
#
# **Levels.** The check has five machines or more, of 8 and 16 GPUs. On one of them, placing the axis that sends most first is
# a mistake. Each level counts by itself, once the first is reached:
#
# | level | what the check counts |
# |---|---|
# | correct | with at most 3000 measurements, at most 25% slower than the best placement, and not slower than rank r on GPU r |
# | best placement | at most 2% slower than the best placement on each machine |
# | 200 measurements | at most 200 on each machine |
# | 15 measurements | at most 15 on each machine |
#
# Start with correct. `lab.hint("place-ranks")` opens the first of three hints, and each further call opens the next one.

# %% exercise="place-ranks"
from course.lab.exercises.lesson09_open_task import place_ranks  # noqa: F401

# %%
check("place-ranks")

# %% [markdown]
# ## Summary
#
# - A mesh is the list of ranks as a box: `arange`, `view`, `permute`.
# - The groups of an axis are the rows once its dim is the last.
# - The order decides which ranks are neighbors, and so which axis gets the fast links.
# - `tp` sends most and belongs within a node; then `cp`, `dp`, and `pp` outermost.
# - You can predict the bytes of a step and count them on a laptop.
# - `nvidia-smi topo -m` shows the paths, `NCCL_DEBUG=INFO` the one that NCCL took. A message takes latency + bytes / bandwidth.
#
# ## Questions
#
# 1. `pp-dp-cp-tp` and `dp-pp-cp-tp` take equally long here. Which would you choose if the network between groups of nodes is
#    slower?
# 2. A colleague needs `tp=8` on nodes of 4 GPUs, because the model does not fit otherwise. What would you try first?
# 3. What changes the ratio of `tp` to `dp`?
#
# **Check your work from a terminal.** Save the notebook, then run `course check notebooks/09_mesh_mine.ipynb`. Next:
# [lesson 10](10_tensor_parallel.ipynb) builds the axis that sends most.
