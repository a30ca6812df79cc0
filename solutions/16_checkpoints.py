# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 16 · Checkpoints
#
# A training run of several weeks depends on its checkpoints. They have to survive crashes, and move to another number of GPUs
# and to other libraries. In this lesson you find out what belongs in a checkpoint. You write the core of a **resharder** and
# of a **converter**, and a save that no crash can break.
#
# **What you will learn**
#
# - what a checkpoint has to contain, and how to prove that a restart is exact;
# - how one logical format lets any layout read the checkpoint of any other;
# - how to save so that no crash leaves you without a checkpoint, and how to convert to another library.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 2 hours |
# | computing | half a minute on two cores, half of it in checks |
# | you write | what boxes share (6 lines), a tensor from pieces (6), a save (8), a converter (9); optional: a second one (50) |
# | you measure | bitwise equality after each exercise; memory while resharding; a loss curve in another library |
#
# Do [lesson 10](10_tensor_parallel.ipynb) (how tensor parallelism cuts heads) and [lesson 13](13_memory.ipynb) (ZeRO-1)
# first. Work in a copy: *File → Save Notebook As…*, `16_checkpoints_mine.ipynb`.

# %%
import hashlib
import json
import math
import os
import random as dice
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from course.checkpoint import checkpoint
from course import config
from course.convert import reshard
from course.config import schema
from course.convert import command
from course.fp8.native import E5M2, LARGEST, scale_for
from course.lab.figures import checkpoints, style, widgets
from course.lab import notebook as lab
from course.lab.instruments.crash_disk import Disk
from course.lab.instruments.tensor_memory import MemoryMeter
from course.lab.notebook import check
from course.ranks.notebook_ranks import ranks
from course.parallel import World, build_mesh, join
from course.parallel.placement import Box
from course.checkpoint.shards import read_box
from course.training.assemble import assemble
from course.training.trainer import fit, run_folder

lab.begin("16")
cpu, work = torch.device("cpu"), Path(tempfile.mkdtemp(prefix="lesson16-"))

# %% [markdown]
# ## What has to be in it?
#
# A small GPT learns a small language of the numbers 0 to 11. Each number is seven times the number *two* places before it,
# plus 1 or 2, modulo 12. So the model has to attend to the right position. The best possible loss is 0.75: ln 2 for each
# predicted number except the first, which cannot be predicted. Batch number k is a function of k. The model trains for 240
# steps with Adam, and the learning rate falls along a cosine. After step 200 the model writes a checkpoint.

# %%
TINY = ["model.vocab=12", "model.context=32", "model.dim=32", "model.depth=2",
        "model.heads=4", "train.device=cpu",
        "train.global_batch=8", "train.steps=240", "optim.lr=1e-2", "optim.warmup=0",
        "precision=fp64", "log.tensorboard=false",
        "log.every=1", f"log.dir={work / 'runs'}"]


def language(number: int) -> dict[str, Tensor]:
    """Batch `number`: 8 texts of 33 numbers."""
    generator = torch.Generator().manual_seed(number)
    words = [torch.randint(12, (8,), generator=generator) for _ in range(2)]
    while len(words) < 33:
        words.append((7 * words[-2] + 1 + torch.randint(2, (8,), generator=generator))
                     % 12)
    return {"tokens": torch.stack(words, 1),
            "sample": torch.arange(8 * number, 8 * number + 8)}


def new_training(*settings: str) -> Any:
    """A model, its optimizer and its step, on the ranks that exist."""
    c = config.load("gpt-demo", [*TINY, *settings])
    return assemble(c, build_mesh(c.parallel, join("cpu")))


def go_on(training: Any, first: int, last: int) -> list[float]:
    """The losses of the steps from `first` up to `last`, each on the batch of its
    number."""
    return [training.step(language(number))[0].item() for number in range(first, last)]


training = new_training()
before = go_on(training, 0, 200)
progress = {**training.progress.state(), "samples": 8 * 200}
saved = checkpoint.save(work / "first", training.optimizer, progress,
                        schema.as_plain(training.config), training.layout)
after = go_on(training, 200, 240)
print(f"loss at the start {before[0]:.3f}, at the checkpoint {before[-1]:.3f}, at the "
      f"end {after[-1]:.3f}")
print(*(f"{file.stat().st_size:>8,} bytes  {file.name}"
        for file in sorted(saved.iterdir())), sep="\n")

# %% [markdown]
# (The loss at the end can be higher than at the checkpoint, because each is the loss of one batch.)
#
# Pretend that the machine failed at step 200. Continue from the checkpoint in three ways, on the same batches, so that you
# can compare the losses:
#
# 1. with the **weights** alone: what people share as "the model";
# 2. with the weights and **Adam's states**, but the step count and the learning rate start over;
# 3. with **everything** in the checkpoint.
#
# > **Predict.** Which of the three reproduce the losses of the uninterrupted run? How much too high is the loss of the
# > first way, in the steps after the restart?

# %%
# your prediction: the largest difference within ten steps
my_weights_alone = 0.1

# %%
def restart(optimizer: bool, state: bool) -> list[float]:
    """Continue at step 200 in a new training that loads part of the checkpoint."""
    index, other = checkpoint.read_index(saved), new_training()
    checkpoint.load(saved, index, other.model, other.layout, other.optimizer
                    if optimizer else None)
    if state:
        other.progress.restore(index["state"])
    return go_on(other, 200, 240)


ways = {"weights": restart(False, False), "and Adam's states": restart(True, False),
        "everything": restart(True, True)}
lines = {"never interrupted": (list(range(181, 241)), before[180:] + after)}
lines |= {name: (list(range(201, 241)), ways[name])
          for name in ("weights", "and Adam's states")}
dots = {"everything": (list(range(201, 241, 3)), ways["everything"][::3])}
lab.picture(checkpoints.lines_and_dots(lines, dots, "loss", "Going on after step 200"),
            "With weights alone the loss jumps up after the restart and comes back "
            "slowly. With Adam's states it stays above the uninterrupted run. With "
            "everything the dots lie on the curve of the uninterrupted run")
lab.beside("weights alone: largest excess of the loss", my_weights_alone,
           max(a - b for a, b in zip(ways["weights"][:10], after, strict=False)))
print("with everything, equal to the last bit:", ways["everything"] == after)

# %% [markdown]
# Only the third way is enough, and its losses are equal to the last bit. Without its states, Adam takes its first steps in
# the direction of the *sign* of a single gradient, at the full rate for all parameters. A learning rate that starts again
# undoes the cosine's progress. If the data also started over, the run would see some samples twice and others perhaps never.
#
# So a checkpoint contains:
#
# | what | why |
# |---|---|
# | weights, in the precision that the optimizer updates | bf16 copies lose small updates (lesson 04) |
# | the optimizer's states | without them the loss jumps; for Adam, twice the bytes of the weights |
# | step, learning rate schedule, loss scale, FP8's amax histories | they change from step to step |
# | the position in the data | no sample is repeated, and none is left out |
# | the random generator's state | **not here**: randomness is a function of seed, step and sample |
# | the configuration | to show what has changed since |
#
# ## The trap: files named by layout
#
# The simplest thing that a rank can do is save what it has: `mp_rank_00/model.pt`, `mp_rank_01/model.pt`. Most frameworks
# began like that, and their users still ask whether the converter works on sharded checkpoints. If files are named by layout,
# it does not, and every layout needs its own converter. Write one: two tensor-parallel ranks each return their state dict.

# %%
def state_dict_here() -> dict[str, Tensor]:
    """The part of the model of step 200 that a tensor-parallel rank holds."""
    part = new_training("parallel.tp=2")
    checkpoint.load(saved, checkpoint.read_index(saved), part.model, part.layout)
    return {name: p.detach() for name, p in part.model.named_parameters()}


rank0, rank1 = ranks(2)(state_dict_here)
alone = new_training()
serial = alone.model
checkpoint.load(saved, checkpoint.read_index(saved), serial, alone.layout)
for name in ("blocks.0.norm1.weight", "blocks.0.attn.qkv.weight",
             "blocks.0.attn.out.weight", "blocks.0.mlp.up.weight"):
    one, half = tuple(serial.get_parameter(name).shape), tuple(rank0[name].shape)
    print(f"{name:26} one process {one!s:10} each of two ranks {half}")

# %% [markdown]
# Some tensors are the same on both ranks. The others are halves, along the dim that is shorter than the model's. So:
# concatenate along that dim.

# %%
def merged(part0: dict[str, Tensor], part1: dict[str, Tensor],
           model: nn.Module) -> dict[str, Tensor]:
    """The obvious converter from two tensor-parallel ranks to one process."""
    found = {}
    for name, parameter in model.named_parameters():
        differs = [dim for dim, (n, whole) in enumerate(zip(part0[name].shape,
                                                            parameter.shape,
                                                            strict=True)) if n != whole]
        found[name] = torch.cat([part0[name], part1[name]],
                                differs[0]) if differs else part0[name]
    return found


@torch.no_grad()
def loss_of(model: nn.Module, number: int = 100) -> float:
    """The mean loss of batch `number`."""
    batch = model.prepare(language(number), torch.zeros((), dtype=torch.int64))
    total, weight = model.eval().loss(model(batch), batch)
    return (total / weight).item()

# %% [markdown]
# > **Predict.** Every shape fits, and nothing complains. (`strict=False` below is for the head. It shares the embedding's
# > tensor and has none of its own.) What is the loss of the merged model? The right model has about 0.8, and a model that has
# > learned nothing has ln 12 = 2.5. How many of its 28 tensors are wrong?

# %%
my_merged_loss = 0.8             # your predictions
my_wrong_tensors = 1

# %%
right = loss_of(serial)
whole = merged(rank0, rank1, serial)
wrong = [name for name, p in serial.named_parameters()
         if not torch.equal(p, whole[name])]
other = new_training().model
other.load_state_dict(whole, strict=False)
print(f"loss of the saved model: {right:.3f}")
lab.beside("loss of the merged model", my_merged_loss, loss_of(other))
lab.beside("wrong tensors", my_wrong_tensors, len(wrong), f"of {len(whole)}")
print("they are", *wrong)

# %% [markdown]
# The rows of the fused projection are laid out as (3, heads, head_dim): all queries, all keys, all values. A rank holds its
# heads *of each*, so the halves come in the order q₀ k₀ v₀ q₁ k₁ v₁. What the model takes for keys is v₀ q₁: values and
# queries. (You met this from the other side in lesson 10, in `qkv-rows`.) A converter that looks only at shapes cannot know
# this. Here the loss tells you. If you continue to train such a model, its loss falls again, and nobody ever notices what was
# lost.
#
# > **Question.** Now add ZeRO-1. Each rank holds a range of a long flat buffer, which contains the parameters end to end, in
# > buckets. What would a converter have to know to convert this from 8 ranks to 6?
#
# <details><summary>Answer</summary>
# The order of the parameters in the buckets, the bucket sizes and the padding at their ends. Also how tp and pp cut each
# parameter. None of this is in the file. So only the same code and the same layout can read such a checkpoint.
# </details>
#
# ## One logical format
#
# The remedy: write down *what a piece is*, not *who wrote it*. In this library's checkpoints, `index.json` lists each logical
# tensor under its name in the **serial** model, with its whole shape and its pieces. For each piece, it gives the **box** of
# the tensor that the piece holds: for each dim, the first index and one past the last. Here two layouts write the same tensor:

# %%
def saved_by(*layout: str) -> Path:
    """The checkpoint of step 200, written by the ranks of a layout."""
    def on_ranks() -> Path:
        here = new_training(*layout)
        index = checkpoint.read_index(saved)
        checkpoint.load(saved, index, here.model, here.layout, here.optimizer)
        here.progress.restore(index["state"])
        state = {**here.progress.state(), "samples": 8 * 200}
        return checkpoint.save(work / "-".join(layout), here.optimizer, state,
                               schema.as_plain(here.config), here.layout)

    return ranks(2)(on_ranks)[0]


by_tp, by_zero = saved_by("parallel.tp=2"), saved_by("parallel.zero=1",
                                                     "parallel.bucket_mb=0.01")
for folder in (by_tp, by_zero):
    entry = checkpoint.read_index(folder)["tensors"]["blocks.0.attn.qkv.weight"]
    print(f"\n{folder.parent.name}: blocks.0.attn.qkv.weight, shape {entry['shape']}, "
          f"{entry['dtype']}")
    for piece in entry["pieces"]:
        print(f"    {piece['file']}: box {piece['box']}" + (f", numbers {piece['flat']}"
                                                            if piece["flat"] else ""))

# %% [markdown]
# The logical shape of the fused projection is (3, heads, head_dim, dim), so half of the heads *is* a box. ZeRO-1's shares are
# not boxes, because a share may begin in the middle of a row. A piece of a ZeRO-1 run is therefore a **flat range** of the
# numbers of a box. (If one rank's share holds the whole tensor, there is one piece.)
#
# A reader knows from the placements of its parameters (lesson 10) which boxes *it* needs. It takes from each piece what the
# two boxes share. In the picture below, each color is a piece of the old layout. The framed box is what one rank of the new
# layout needs.
#
# > **Predict, before you move the sliders:** 2 old ranks and 3 new ranks, with rows cut in both layouts. How many pieces does
# > each new rank need? What if the new layout cuts columns? When does each new rank need exactly one piece?

# %%
slider = widgets.explore(checkpoints.layouts, old_rows=[2, 1, 3, 4, 6],
                         old_columns=[1, 2, 4], new_rows=[3, 1, 2, 4, 6],
                         new_columns=[1, 2, 4], rank=[1, 0, 2, 3, 4, 5],
                         alt="A matrix in colored pieces, one for each old rank, with "
                         "the boxes of the new ranks "
                             "on top. Below it, how many numbers the framed box needs "
                         "from each piece.")

# %% [markdown]
# <details><summary>Answer</summary>
# From halves to thirds: the first and the last rank need one piece, the middle rank needs both. With columns, every new box
# crosses every old piece, so each needs all. A new rank needs one piece when its box lies inside that piece, as after
# cutting halves into quarters. <code>course reshard</code> prepares this beforehand.
# </details>
#
# ## Exercise: what two boxes share
#
# A box has `(start, stop)` for each dim. Return what a wanted box and a piece share, in two ways:
#
# - as slices of a tensor that holds the *piece's* numbers;
# - as slices of a tensor that will hold the *wanted* numbers.
#
# Return `None` if they share nothing. A single number, such as Adam's step count, has a box without dims, `()`, and always
# counts as shared. This is a function of the library: the check reads a checkpoint with yours.

# %% exercise="box-overlap"
from course.checkpoint.shards import overlap

# %%
check("box-overlap")

# %% [markdown]
# ## Exercise: a tensor from pieces
#
# Now assemble a wanted box. Each piece comes as its box and a function `read(slices)`, which reads a part of the piece from
# disk and returns it. Use `overlap`. **Read only what you need**: a piece may be gigabytes large. Keep the numbers as they
# are, bit for bit. A single number, whose box is `()`, is handled the same way.

# %% exercise="put-together"
def put_together(pieces: list[tuple[Box, Callable[[tuple[slice, ...]], Tensor]]], wanted: Box, dtype: torch.dtype) -> Tensor:
    """Assemble the box `wanted` of a tensor. Each piece is its box and `read(slices)`, which reads a part of the piece."""
    ### BEGIN SOLUTION
    made = torch.empty([last - begin for begin, last in wanted], dtype=dtype)
    for box, read in pieces:
        common = overlap(wanted, box)
        if common is not None:
            made[common[1]] = read(common[0])
    return made
    ### END SOLUTION

# %%
check("put-together")

# %% [markdown]
# That is a resharder. The rest is bookkeeping.
#
# > **Question.** What about flat ranges, from ZeRO-1 on 8 ranks to 6? What is the least that you would have to add?
#
# <details><summary>Answer</summary>
# A flat range is a box with one dim, [a, b), of the flattened tensor. If both layouts cut the same tensor into flat ranges
# only, your function already works. If a flat range meets a box, cut the range into boxes first: a part of a row, whole
# rows, a part of a row. Then your function works again. See <code>course.checkpoint.shards.boxes_of</code>.
# </details>
#
# ## Reshard a run
#
# `course reshard RUN parallel.tp=2 parallel.zero=1` does this for a whole run. For each rank of the new layout it builds the
# model *without memory* (the `meta` device). The placements show which boxes that rank will own, and the program writes these
# boxes to one file. Any layout can read any checkpoint without this. But if a thousand ranks each need a corner of every
# file, cut it up once beforehand.
#
# A tiny run makes two steps in one process. Then the library reshards it **with your `overlap`**.

# %%
def run_steps(last: int, name: str, *settings: str) -> list[float]:
    """Train a run up to step `last`, or continue it; return the losses that it
    logged."""
    c = config.load("gpt-demo", [*TINY, f"log.name={name}", f"train.steps={last}",
                                 "optim.schedule=constant", "optim.ema=0.9",
                                 *settings])
    fit(assemble(c, build_mesh(c.parallel, join("cpu"))))
    return [json.loads(line)["loss"]
            for line in (run_folder(c) / "metrics.jsonl").read_text().splitlines()]


home = work / "runs" / "gpt-demo"
undisturbed = run_steps(5, "undisturbed")
run_steps(2, "short")
with lab.yours(overlap):
    reshard.main(home / "short", ["parallel.tp=2", "parallel.zero=1", "parallel.dp=2"],
                 "resharded")


def everything(run: Path) -> dict[str, Tensor]:
    """Every tensor of the newest checkpoint of a run, whole."""
    folder = checkpoint.steps(run / "checkpoints")[-1]
    index = checkpoint.read_index(folder)
    return {name: read_box(folder, index, name, tuple((0, n) for n in found["shape"]))
            for name, found in index["tensors"].items()}


old, new = everything(home / "short"), everything(home / "resharded")
equal_tensors = sum(torch.equal(old[name], new[name]) for name in old)
print(f"{len(old)} tensors; {equal_tensors} of them are equal, bit for bit")

# %% [markdown]
# > **Question.** The run has 28 parameters. Why are there more than 28 tensors?
#
# <details><summary>Answer</summary>
# Each parameter comes with Adam's two means, its step count and, with optim.ema, a moving average: five tensors each.
# </details>
#
# > **Predict.** Four ranks, two by two, continue from the resharded checkpoint to step 5. To how many digits do their losses
# > agree with those of the single process, in float64?

# %%
my_digits = 6                    # your prediction

# %%
on_four, *_ = ranks(4)(run_steps, 5, "resharded", "parallel.tp=2", "parallel.zero=1",
                       "parallel.dp=2")
gap = max(abs(a / b - 1) for a, b in zip(on_four, undisturbed, strict=True))
print("alone  ", *(f"{loss:.12f}" for loss in undisturbed))
print("on four", *(f"{loss:.12f}" for loss in on_four))
lab.beside("equal digits", my_digits, min(16.0, -math.log10(max(gap, 1e-16))))

# %% [markdown]
# About fifteen (16 means that all agree): the rest comes from the order of additions. Users of large frameworks ask whether the
# difference between tp=1 and tp=8 is acceptable or a silent bug. This is how you find out. Load **one logical checkpoint** into
# both layouts, take a step in float64, and compare there. A bug then shows in the third digit, not in the fifteenth.
#
# ## Memory: one tensor at a time
#
# A checkpoint of 70 billion parameters with Adam's states takes 840 GB. The machine that reshards it has perhaps 64.
#
# > **Predict.** A model has 4.2 million parameters. Its weights and Adam's states take 50 MB, and the largest tensor, the
# > embedding, takes 4.2 MB. The library reshards it for 2 ranks. How many MB of tensors are alive at once?

# %%
my_peak = 50                     # your prediction, MB

# %%
larger = ["model.vocab=4096", "model.dim=256", "model.depth=4", "precision=fp32",
          "train.global_batch=2", "log.name=larger"]
c = config.load("gpt-demo", [*TINY, *larger, "train.steps=1"])
fit(assemble(c, build_mesh(c.parallel, World())))
with MemoryMeter() as meter:
    reshard.main(home / "larger", ["parallel.dp=2", "parallel.zero=1"], "larger2",
                 lambda text: None)
bytes_in_all = sum(file.stat().st_size
                   for file in (home / "larger" / "checkpoints").rglob("*.safetensors"))
print(f"on disk: {bytes_in_all / 1e6:.1f} MB")
lab.beside("most MB alive at once", my_peak, meter.peak / 1e6, "MB")

# %% [markdown]
# Three times the largest tensor: the box being assembled, the part just read from a piece, and the previous tensor before it
# is freed. A model of a thousand such tensors would need no more. The file format makes this possible. A `safetensors` file
# begins with a header that says where the bytes of each tensor are. So a reader can read a part of one tensor (`get_slice`).
# A writer that knows all shapes writes the header first, and then the tensors as they come:

# %%
lab.show("course.checkpoint.safetensors_writer.stream")

# %% [markdown]
# > **Question.** A `.pt` file is a pickle. This library never writes one, and it reads other libraries' `.pt` files with
# > `weights_only=True, mmap=True`. Give two reasons.
#
# <details><summary>Answer</summary>
# Unpickling may execute any code: a checkpoint from the internet is a program. <code>weights_only</code> accepts only
# tensors and plain containers. And <code>torch.load</code> reads the whole file into memory. With <code>mmap</code>, pages
# come when you touch them.
# </details>
#
# ## A crash in the middle
#
# Machines also fail while they write. Writing a large checkpoint takes minutes, and a job may reach its time limit *then*.
# The writer below writes a file of 8 MB with its checksum again and again, under the same name. We kill it ten times, at
# random moments, with SIGKILL, which no program can catch. One variant simply opens the file and writes. The other works like
# `course.utils.atomic_files.atomic`: it writes under another name, flushes, and renames.
#
# > **Predict.** After how many of the ten kills is the file damaged, with each variant?

# %%
my_plain = 5                     # your predictions, of 10
my_atomic = 1

# %%
WRITER = """
import hashlib, os, sys
path, how, number = sys.argv[1], sys.argv[2], 0
while True:
    data = bytes([number % 251]) * 8_000_000
    target = path if how == "plain" else path + ".partial"
    with open(target, "wb") as file:
        file.write(hashlib.sha256(data).digest())
        for start in range(0, len(data), 100_000):
            file.write(data[start:start + 100_000])
        file.flush()
        os.fsync(file.fileno())
    if how == "atomic":
        os.replace(target, path)
    number += 1
"""


def damaged(how: str) -> bool:
    """Kill the writer at a random moment; return whether its file is damaged."""
    file = work / f"{how}.bin"
    file.unlink(missing_ok=True)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(file), how])
    # until the first file is complete
    while not (file.is_file() and file.stat().st_size > 8_000_000):
        time.sleep(0.005)
    time.sleep(dice.uniform(0.05, 0.3))
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    found = file.read_bytes()
    return hashlib.sha256(found[32:]).digest() != found[:32]


plain, safe = (sum(damaged(how) for _ in range(10)) for how in ("plain", "atomic"))
print(f"opened and written: {plain} of 10 damaged (you said {my_plain})")
print(f"written under another name and renamed: {safe} of 10 damaged (you "
      f"said {my_atomic})")

# %% [markdown]
# Opening a file empties it. So a kill between opening and writing the last byte leaves a broken file, and the good checkpoint
# of that name is gone. The atomic writer never leaves a broken file: a rename has either happened or not.
#
# A **power cut** is worse than a kill. After a kill the operating system still writes what it has received. When the power
# fails, everything that it has not *flushed* (`fsync`) is lost. It flushes in its own order: the new name may reach the disk
# before the bytes. So an atomic save takes three flushes: first the bytes of the files, then the folder with their names. The
# third comes after the rename: the parent folder with the new name.
#
# ## Exercise: a save that no crash can break
#
# `Disk` is a simulated disk with four operations:
#
# - `write(path, data)` writes a file and creates its folder if needed;
# - `flush(path)` flushes a file or a folder (`flush("")` flushes the root folder);
# - `rename(old, new)` renames a file or a folder;
# - `remove(path)` removes it.
#
# After each operation the disk remembers what it could contain if the power failed at that moment.
#
# Write a checkpoint's files into the folder `name`. Then remove the folder `old`, the previous checkpoint. After a crash at
# **any** moment, a whole checkpoint has to exist, the old one or the new one. The name `name` must never hold an incomplete
# one. (A leftover under another name does no harm: the next save overwrites or removes it.)

# %% exercise="publish"
def publish(disk: Disk, name: str, files: dict[str, bytes], old: str) -> None:
    """Write the files of a checkpoint to the folder `name`, and remove the folder `old`, so that no crash loses both."""
    ### BEGIN SOLUTION
    beside = f"{name}.tmp"
    for file in files:
        disk.write(f"{beside}/{file}", files[file])
        disk.flush(f"{beside}/{file}")
    disk.flush(beside)
    disk.rename(beside, name)
    disk.flush("")
    disk.remove(old)
    ### END SOLUTION

# %%
check("publish")

# %% [markdown]
# The library does the same with many ranks. Each rank writes its file into a hidden folder. Rank 0 waits for all, writes
# `index.json` with the checksum of each file, and renames. A reader that finds a wrong checksum reports that checkpoint and
# uses the previous one.

# %%
lab.show("course.checkpoint.checkpoint.publish")

# %% [markdown]
# > **Question.** This function removes `final` before it renames, so for a moment no folder has that name. Is that a gap in
# > the protection?
#
# <details><summary>Answer</summary>
# No. A folder of that name exists only if it was damaged: the run continued from an <em>older</em> checkpoint and has come
# to this step again. The older one stays until the new one has its name.
# </details>
#
# ## Another library
#
# A model also moves to other libraries, where people evaluate, compare or serve it. `course convert` renames, transposes
# and reorders the tensors of a run for Hugging Face's GPT-2 and Llama, for facebookresearch/DiT, and for Transformer
# Engine's layers. Convert the tiny run to Transformer Engine's names and back. (In a terminal: `course convert RUN
# te.safetensors --to te`, then `course convert te.safetensors RUN2`.)

# %%
command.convert(World(), home / "short", work / "te.safetensors", to="te")
with safe_open(work / "te.safetensors", "pt") as opened:
    for name in sorted(opened.keys()):
        if name.startswith("blocks.0."):
            print(f"    {name:58} {opened.get_slice(name).get_shape()}")
command.convert(World(), work / "te.safetensors", home / "returned", [*TINY[:-1]])
back = everything(home / "returned")
print(f"\n{len(back)} tensors came back;", sum(torch.equal(old[name], x)
                                               for name, x in back.items()),
      "equal, bit for bit")

# %% [markdown]
# > **Question.** The run had 140 tensors, and 28 came back. What is lost on the way, and when does it matter?
#
# <details><summary>Answer</summary>
# Optimizer states, the moving average, the step, the position in the data: weight files contain none of them. To evaluate
# or compare, you do not need them. To <i>continue training</i> you do, as the beginning of this lesson showed.
# </details>
#
# ### FP8's scales
#
# One thing in a Transformer Engine checkpoint is not a tensor of the model. With delayed scaling (lesson 04) each linear
# layer has an amax history and scales that follow from it. They are stored in `_extra_state`, a *pickle*, which recent
# versions refuse to load. A converter drops it. Without a history, Transformer Engine's scales are 1.
#
# > **Predict.** What happens at scale 1? Take the gradients at the output of one projection, in a batch of 256 tokens. A mean
# > loss divides by the number of tokens, so in a usual batch of 500,000 tokens they are smaller. E5M2's smallest positive
# > number is 2⁻¹⁶. What share of the gradients becomes zero in each case?

# %%
my_lost_small = 0.1              # your predictions
my_lost_large = 0.5

# %%
seen: list[Tensor] = []
again = new_training()
model = again.model
checkpoint.load(saved, checkpoint.read_index(saved), model, again.layout)
model.train().blocks["0"].attn.qkv.register_full_backward_hook(lambda module, inputs,
                                                               outputs: seen.append(
                                                                   outputs[0]))
batch = model.prepare(language(100), torch.zeros((), dtype=torch.int64))
total, weight = model.loss(model(batch), batch)
(total / weight).backward()


def lost(gradients: Tensor, scale: float | Tensor) -> float:
    """The share of nonzero numbers that become zero in E5M2."""
    cast = (gradients * scale).float().to(E5M2).float()
    return ((cast == 0) & (gradients != 0)).double().mean().item()


gradients = seen[0]
large = gradients * 256 / 500_000
rebuilt = scale_for(large.abs().max(), LARGEST[E5M2], 0)
shares = {"256 tokens, scale 1": lost(gradients, 1.0),
          "500,000 tokens, scale 1": lost(large, 1.0),
          f"500,000 tokens, scale {rebuilt:.1e}": lost(large, rebuilt)}
lab.picture(style.bars({name: 100 * share for name, share in shares.items()}, "%",
                       "Gradients that vanish in E5M2"),
            "Three bars: at scale 1 a part vanishes for 256 tokens and nearly all for "
            "half a million. With a scale from the amax nearly none vanish")
lab.beside("share lost, 256 tokens", my_lost_small,
           max(shares["256 tokens, scale 1"], 1e-4))
lab.beside("share lost, 500,000 tokens", my_lost_large,
           shares["500,000 tokens, scale 1"])

# %% [markdown]
# At scale 1, FP8 training would get hardly any gradients. So when you convert *from* Transformer Engine to an FP8 run,
# `course convert` **rebuilds** the scales. It runs one forward *and backward* pass over a batch in bf16, records the amax of
# every tensor, and updates nothing. A forward pass alone would give the gradients no scales.

# %%
lab.show("course.convert.command.rebuild")

# %%
eight = ["precision=fp8", "fp8.history=8", "data.source=mock"]
c = config.load("gpt-demo", [*TINY, *eight, "log.name=eight", "train.steps=12",
                             "optim.lr=1e-3", "optim.schedule=constant"])
in_fp8 = assemble(c, build_mesh(c.parallel, World()))
fit(in_fp8)
command.convert(World(), home / "eight", work / "eight.safetensors", to="te")
command.convert(World(), work / "eight.safetensors", home / "eight_back",
                [*TINY[:-1], *eight], like="gpt-demo")
rebuilt_histories = {name: x for name, x in everything(home / "eight_back").items()
                     if name.endswith("amax_history")}
print("amax of input, weight and gradient: from the last 8 training steps, and "
      "rebuilt from one batch")
for name, own in in_fp8.scaling.state().items():
    pairs = torch.stack([own.amax(1), rebuilt_histories[name].amax(1)], 1).tolist()
    print(f"    {name.removesuffix('.amax_history'):18}",
          "   ".join(f"{a:8.3g} {b:8.3g}" for a, b in pairs))

# %% [markdown]
# Scales of weights agree to a few percent, of inputs to about ten, of gradients within a small factor, because the batch is
# different. A scale may be off by a power of two or so: E5M2 has thirty of them. After a few steps, the histories come from the
# training itself.
#
# ### Their attention and ours
#
# What does a converter do inside? Here is an attention layer as another library might write it. It computes the same as ours,
# but its names differ. It computes x W where ours computes x Wᵀ. And the rows of its fused projection go **head by head**:
#
# | theirs | shape there | ours | shape here |
# |---|---|---|---|
# | `query_key_value.weight` | (D, heads · 3 · d) | `qkv.weight` | (3 · heads · d, D) |
# | `query_key_value.bias` | (heads · 3 · d,) | `qkv.bias` | (3 · heads · d,) |
# | `dense.weight` | (D, D), in × out | `out.weight` | (D, D), out × in |
# | `dense.bias` | (D,) | `out.bias` | (D,) |

# %%
class FromTheRight(nn.Module):
    """x W + b, as in GPT-2's own code; W starts as in PyTorch's linear layers, b at
    zero."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(inputs, outputs,
                                               dtype=torch.float64).uniform_(-bound,
                                                                             bound))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=torch.float64))

    # (..., K) -> (..., N)
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class TheirAttention(nn.Module):
    """Causal attention; its fused projection has queries, keys and values head by
    head."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query_key_value, self.dense = FromTheRight(dim,
                                                        3 * dim), FromTheRight(dim, dim)

    def forward(self, x: Tensor, batch: Any = None) -> Tensor:          # (B, T, D)
        # (B, T, h, 3, d)
        qkv = self.query_key_value(x).unflatten(-1, (self.heads, 3, -1))
        # 3 x (B, h, T, d)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)     # (B, h, T, d)
        return self.dense(y.transpose(1, 2).flatten(2))                 # (B, T, D)

# %% [markdown]
# ## Exercise: there and back
#
# Write both directions. Both take and return dicts of tensors, with the names of the table. Beware: two of the easy mistakes
# here fit every shape.

# %% exercise="translate"
def to_ours(theirs: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Convert the other library's attention to ours; see the table."""
    ### BEGIN SOLUTION
    def by_part(x: Tensor) -> Tensor:                # head by head -> queries, keys, values
        return x.view(heads, 3, len(x) // heads // 3, *x.shape[1:]).movedim(1, 0).reshape(x.shape)

    return {"qkv.weight": by_part(theirs["query_key_value.weight"].T.contiguous()),
            "qkv.bias": by_part(theirs["query_key_value.bias"]),
            "out.weight": theirs["dense.weight"].T, "out.bias": theirs["dense.bias"]}
    ### END SOLUTION


def to_theirs(ours: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Convert our attention to the other library's: the inverse of `to_ours`."""
    ### BEGIN SOLUTION
    def by_head(x: Tensor) -> Tensor:                # queries, keys, values -> head by head
        return x.view(3, heads, len(x) // heads // 3, *x.shape[1:]).movedim(1, 0).reshape(x.shape)

    return {"query_key_value.weight": by_head(ours["qkv.weight"]).T, "query_key_value.bias": by_head(ours["qkv.bias"]),
            "dense.weight": ours["out.weight"].T, "dense.bias": ours["out.bias"]}
    ### END SOLUTION

# %%
check("translate")

# %% [markdown]
# The library writes its rules as data, and as pairs of functions that undo each other, like yours:

# %%
lab.show("course.convert.rules.Layout")
lab.show("course.convert.transformer_engine.interleave")
lab.show("course.convert.transformer_engine.table")

# %% [markdown]
# ## Why loss curves differ
#
# Loss curves of two libraries differ, "with and without Transformer Engine", and people ask which one is broken. Often
# neither is. Train three times on the same batches:
#
# 1. our GPT;
# 2. our GPT with *their* attention in every block, as its constructor initializes it;
# 3. our GPT with their attention and **our weights, converted by you**.
#
# > **Predict.** How much does the second curve differ from the first in 80 steps? And the third?

# %%
my_difference = 0.1              # your predictions
my_converted = 1e-3

# %%
def theirs_inside(convert: bool) -> nn.Module:
    """Our GPT with their attention in its blocks."""
    torch.manual_seed(1)
    model = new_training().model
    for block in model.blocks.values():
        ours = {name: p.detach() for name, p in block.attn.named_parameters()}
        block.attn = TheirAttention(32, 4)
        if convert:
            block.attn.load_state_dict(to_theirs(ours, 4))
    return model


def curve(model: nn.Module, count: int = 80) -> list[float]:
    """The losses of a plain training loop."""
    optimizer, losses = torch.optim.Adam(model.parameters(), 5e-3), []
    for number in range(count):
        batch = model.prepare(language(number), torch.zeros((), dtype=torch.int64))
        total, weight = model.loss(model(batch), batch)
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
        losses.append((total / weight).item())
    return losses


three = {"ours": curve(new_training().model), "theirs": curve(theirs_inside(False)),
         "theirs, our weights": curve(theirs_inside(True))}
lines = {name: (list(range(1, 81)), three[name]) for name in ("ours", "theirs")}
dots = {"theirs, our weights": (list(range(1, 81, 4)),
                                three["theirs, our weights"][::4])}
lab.picture(checkpoints.lines_and_dots(lines, dots, "loss", "One model, two libraries"),
            "The dots, theirs with our weights, lie on our curve. Their own curve "
            "runs with ours, then falls faster")
for name, mine in (("theirs", my_difference), ("theirs, our weights", my_converted)):
    apart = max(abs(a - b) for a, b in zip(three[name], three["ours"], strict=True))
    lab.beside(f"{name}: the largest difference from ours", mine, max(apart, 1e-16))

# %% [markdown]
# **What you should see:** theirs learns much faster after a while, and you might think that it is the better library. But the
# whole difference comes from how the layers are *initialized*: ours with a standard deviation of 0.02, theirs with PyTorch's
# rule for linear layers. From the same weights, the curves match up to rounding. So if two libraries disagree, first convert
# one checkpoint, and start both from the same weights. Any remaining difference is in the layers, and one forward pass
# reveals it.
#
# ## Open task: a model from an unknown library
#
# *Optional, about 60 minutes. Nothing later needs it.* You get a checkpoint of an unknown library, and a function that runs
# the model. You cannot see the library's code, and the tensors' names say nothing. Convert the checkpoint. Our solution has
# 50 lines.
#
# The model is a small Llama. Our GPT can represent it: RMSNorm, SwiGLU, rotary positions, no biases. `c` is its configuration.
# This is how our GPT computes its logits. It asks for each weight when it needs it:

# %%
from course.lab.exercises.lesson16_open_task import logits  # noqa: F401
from course.lab.instruments import foreign_model

lab.show("course.lab.exercises.lesson16_open_task.logits")
with foreign_model.ForeignModels([(7, 0, False, 6)]) as models:
    foreign, run = models.checkpoint(0), models.runner(0)
    for name, file in foreign.index.items():
        if not re.search("[1-9]", name):             # block 0, and what is in no block
            print(f"{file}  {name:22} {foreign.shapes(file)[name]}")
    print(models.config(0))
    print(run(torch.tensor([3, 1, 4])).shape, foreign.read(file, name).dtype)

# %% [markdown]
# **Contract**
#
# - `convert_foreign(checkpoint, run, c)` returns a dict with the serial names of `build_model(c).state_dict()`. Each tensor has
#   our shape and keeps its dtype from the files. With these weights our GPT computes the model's logits.
# - `checkpoint.index` says which file has a tensor. `checkpoint.shapes(file)` has the shapes in a file, and
#   `checkpoint.read(file, name)` reads a tensor. A file may also hold tensors that an earlier save left behind.
# - `run(tokens)` takes one text, (T,) int64, and returns the model's logits, (T, V) float64.
# - A number in a name is the number of the block. A part has the same name in every block.
#
# The layout differs from model to model. Look before you convert:
#
# | what | how it may be stored |
# |---|---|
# | linear maps | all (out, in), or all (in, out), including square ones and the head |
# | queries, keys, values | fused in any order, part by part or head by head; or three matrices |
# | gates and values of the MLP | fused in any order, or two matrices |
# | rotary positions | rotate elements i and i + d/2 of a head, as ours do; or 2i and 2i + 1 |
# | head | a matrix of its own, or the embedding |
# | also | buffers that our GPT does not have |
#
# **Levels.** The check has four models or more. Each level counts by itself, once the first is reached:
#
# | level | what the check counts |
# |---|---|
# | correct | every model's logits, with at most 1000 calls of `run` each |
# | one call | one call of `run` for each model |
# | memory budget | fewer bytes of tensors at once than two copies of the checkpoint |
#
# Start with correct. `lab.hint("convert-foreign")` opens the first of three hints, and each further call opens the next one.

# %% exercise="convert-foreign"
from course.lab.exercises.lesson16_open_task import convert_foreign  # noqa: F401

# %%
check("convert-foreign")

# %% [markdown]
# ## Summary
#
# - A checkpoint holds everything that changes from step to step. With the weights alone, the loss jumps.
# - A file should say *what it holds*, boxes of logical tensors. Then any layout reads it, one tensor in memory at a time.
# - Write under another name, flush, rename, flush. A reader that finds the name finds a whole checkpoint.
# - Tensors of the right shape may still be wrong. Compare *outputs*, and start two libraries from the same weights.
# - Converted weights come without FP8 scales. One forward and backward pass rebuilds them.
#
# ## Questions
#
# 1. A run has 1024 ranks, and each writes its own file. What limits the time of a save, and what would you change?
# 2. How would you test that a restart is exact, in a run that cannot be repeated bit for bit?
# 3. Why can no checksum show that a *converter* is wrong? What can?
#
# **Check your work from a terminal.** Save the notebook, then run `course check
# notebooks/16_checkpoints_mine.ipynb`.
#
# Next: [lesson 17](17_performance_model.ipynb) computes how long a run takes before you launch it.

# %%
shutil.rmtree(work)
