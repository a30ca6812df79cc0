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
# A training of weeks lives in its checkpoints. They have to outlive crashes; they have to move to another number of GPUs, when
# the cluster has other plans; and they have to move to other libraries, where the model is evaluated, compared or served. In
# this lesson you find out what has to be in one, write the heart of a **resharder** and of a **converter**, and a save that no
# crash can break.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 2 hours |
# | computing | half a minute on two cores, half of it in checks |
# | you write | what two boxes share (6 lines), a tensor from pieces (6), a save (8), a converter both ways (9) |
# | you measure | equality, bit for bit, after each; memory while resharding; a loss curve in another library |
#
# You should have done [lesson 10](10_tensor_parallel.ipynb) (how tensor parallelism cuts heads) and
# [lesson 13](13_memory.ipynb) (ZeRO-1). Work in a copy: *File → Save Notebook As…*, `16_checkpoints_mine.ipynb`.

# %%
import hashlib
import json
import math
import os
import random as dice
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
# A small GPT and a small language of the numbers 0 to 11: each is seven times the one *two* places before it, plus 1 or 2, around
# the clock. So the model has to attend to the right place. The best possible loss is 0.75: ln 2 for each number but the first,
# which nobody can know. Batch number k is a function of k. The model trains for 240 steps, with Adam and a learning rate that
# falls along a cosine; after 200 it writes a checkpoint.

# %%
TINY = ["model.vocab=12", "model.context=32", "model.dim=32", "model.depth=2", "model.heads=4", "train.device=cpu",
        "train.global_batch=8", "train.steps=240", "optim.lr=1e-2", "optim.warmup=0", "precision=fp64", "log.tensorboard=false",
        "log.every=1", f"log.dir={work / 'runs'}"]


def language(number: int) -> dict[str, Tensor]:
    """Batch `number`: 8 texts of 33 words."""
    generator = torch.Generator().manual_seed(number)
    words = [torch.randint(12, (8,), generator=generator) for _ in range(2)]
    while len(words) < 33:
        words.append((7 * words[-2] + 1 + torch.randint(2, (8,), generator=generator)) % 12)
    return {"tokens": torch.stack(words, 1), "sample": torch.arange(8 * number, 8 * number + 8)}


def new_training(*settings: str) -> Any:
    """A model, its optimizer and its step, on the ranks that there are."""
    c = config.load("gpt-demo", [*TINY, *settings])
    return assemble(c, build_mesh(c.parallel, join("cpu")))


def go_on(training: Any, first: int, last: int) -> list[float]:
    """The losses of the steps from `first` up to `last`, on the batches of these numbers."""
    return [training.step(language(number))[0].item() for number in range(first, last)]


training = new_training()
before = go_on(training, 0, 200)
progress = {**training.progress.state(), "samples": 8 * 200}
saved = checkpoint.save(work / "first", training.optimizer, progress, schema.as_plain(training.config), training.layout)
after = go_on(training, 200, 240)
print(f"loss at the start {before[0]:.3f}, at the checkpoint {before[-1]:.3f}, at the end {after[-1]:.3f}")
print(*(f"{file.stat().st_size:>8,} bytes  {file.name}" for file in sorted(saved.iterdir())), sep="\n")

# %% [markdown]
# (The loss at the end can be above that at the checkpoint: each is that of one batch.)
#
# Now pretend that the machine has failed at step 200, and go on from the checkpoint in three ways, each on the same batches, so
# that their losses can be compared:
#
# 1. with the **weights** alone: what people share as "the model";
# 2. with the weights and **Adam's states**, but counting steps, and so the learning rate, from the start;
# 3. with **everything** that the checkpoint has.
#
# > **Predict.** Which of the three give the losses of the training that was never interrupted? By how much is the loss of the
# > first too high, in the steps after the restart?

# %%
my_weights_alone = 0.1           # your prediction: the largest difference within ten steps

# %%
def restart(optimizer: bool, state: bool) -> list[float]:
    """The steps from 200 on of a new training that has got some of the checkpoint."""
    index, other = checkpoint.read_index(saved), new_training()
    checkpoint.load(saved, index, other.model, other.layout, other.optimizer if optimizer else None)
    if state:
        other.progress.restore(index["state"])
    return go_on(other, 200, 240)


ways = {"weights": restart(False, False), "and Adam's states": restart(True, False), "everything": restart(True, True)}
lines = {"never interrupted": (list(range(181, 241)), before[180:] + after)}
lines |= {name: (list(range(201, 241)), ways[name]) for name in ("weights", "and Adam's states")}
dots = {"everything": (list(range(201, 241, 3)), ways["everything"][::3])}
lab.picture(checkpoints.lines_and_dots(lines, dots, "loss", "Going on after step 200"),
            "With weights alone the loss jumps up after the restart and comes back slowly, with Adam's states as well it stays "
            "above; with everything the dots lie on the curve of the training that was never interrupted")
lab.beside("weights alone: the loss is higher by up to", my_weights_alone,
           max(a - b for a, b in zip(ways["weights"][:10], after, strict=False)))
print("with everything, equal to the last bit:", ways["everything"] == after)

# %% [markdown]
# Only everything is enough, and then to the last bit. Adam without its states takes its first steps in the direction of
# the *sign* of a single gradient, all parameters at the full rate; and a learning rate that starts again undoes what
# the cosine had settled. Had the data begun from the start as well, some would be seen twice and the rest perhaps
# never.
#
# So a checkpoint has:
#
# | what | why |
# |---|---|
# | weights, in the precision that the optimizer updates | bf16 copies of them lose the small updates (lesson 04) |
# | the optimizer's states | else the loss jumps, as above; twice as many bytes as the weights, for Adam |
# | step, learning rate schedule, loss scale, FP8's amax histories | all that changes from step to step |
# | the position in the data | so that no sample is seen twice, none left out |
# | the random generator's state | **not here**: randomness is a function of seed, step and sample |
# | the configuration | so that it can be said what has changed since |
#
# ## The trap: files named by layout
#
# The simplest thing that a rank can do is to save what it has: `mp_rank_00/model.pt`, `mp_rank_01/model.pt`. Most frameworks
# began like that, and "can the converter run on a sharded checkpoint?" is asked in their issue threads again and again. Where
# files are named by layout the answer is no, and another layout needs a converter of its own. Let us write one! Two
# tensor-parallel ranks each give us their state dict.

# %%
def state_dict_here() -> dict[str, Tensor]:
    """What a tensor-parallel rank has of the model of step 200."""
    part = new_training("parallel.tp=2")
    checkpoint.load(saved, checkpoint.read_index(saved), part.model, part.layout)
    return {name: p.detach() for name, p in part.model.named_parameters()}


rank0, rank1 = ranks(2)(state_dict_here)
alone = new_training()
serial = alone.model
checkpoint.load(saved, checkpoint.read_index(saved), serial, alone.layout)
for name in ("blocks.0.norm1.weight", "blocks.0.attn.qkv.weight", "blocks.0.attn.out.weight", "blocks.0.mlp.up.weight"):
    one, half = tuple(serial.get_parameter(name).shape), tuple(rank0[name].shape)
    print(f"{name:26} one process {one!s:10} each of 2 ranks {half}")


# %% [markdown]
# Some tensors are the same on both ranks, others are halves along the dim that differs. So: concatenate along that dim.

# %%
def merged(part0: dict[str, Tensor], part1: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The obvious converter from two tensor-parallel ranks to one process."""
    found = {}
    for name, parameter in model.named_parameters():
        differs = [dim for dim, (n, whole) in enumerate(zip(part0[name].shape, parameter.shape, strict=True)) if n != whole]
        found[name] = torch.cat([part0[name], part1[name]], differs[0]) if differs else part0[name]
    return found


@torch.no_grad()
def loss_of(model: nn.Module, number: int = 100) -> float:
    """The mean loss of a batch that was not trained on."""
    batch = model.prepare(language(number), torch.zeros((), dtype=torch.int64))
    total, weight = model.eval().loss(model(batch), batch)
    return (total / weight).item()


# %% [markdown]
# > **Predict.** Every shape fits, and nothing complains. (`strict=False` below is for the head, which is the embedding, and has
# > no tensor of its own.) What is the loss of the merged model? The right one has about 0.8, and a
# > model that has learned nothing ln 12 = 2.5. How many of its 28 tensors are wrong?

# %%
my_merged_loss = 0.8             # your predictions
my_wrong_tensors = 1

# %%
right = loss_of(serial)
whole = merged(rank0, rank1, serial)
wrong = [name for name, p in serial.named_parameters() if not torch.equal(p, whole[name])]
other = new_training().model
other.load_state_dict(whole, strict=False)
print(f"the loss of the model that was saved: {right:.3f}")
lab.beside("of the merged one", my_merged_loss, loss_of(other))
lab.beside("wrong tensors", my_wrong_tensors, len(wrong), f"of {len(whole)}")
print("they are", *wrong)

# %% [markdown]
# The fused projection's rows are laid out as (3, heads, head_dim): all queries, all keys, all values. A rank has its heads *of
# each*, so the halves come in the order q₀ k₀ v₀ q₁ k₁ v₁, and what the model takes for keys are in part values of other heads.
# (You met this from the other side in lesson 10, in `qkv-rows`.) A converter by shapes cannot know it. Here the loss tells; in a
# model that is trained on, it comes down again, and nobody ever knows what was thrown away.
#
# > **Question.** Now think of ZeRO-1 on top: each rank has a range of a long flat buffer, in which parameters lie end to end in
# > buckets. What would a converter have to know to bring that from 8 ranks to 6?
#
# <details><summary>Answer</summary>
# The order of the parameters in the buckets, the size of the buckets, the padding at their ends, and how tp and pp had cut each
# parameter before. None of it is in the file. That is why such checkpoints can be read by the code and the layout that wrote
# them, and by nothing else.
# </details>
#
# ## One logical format
#
# The cure is to write down *what a piece is*, not *who wrote it*. In this library's checkpoints `index.json` says of each
# logical tensor, under its name in the **serial** model, its whole shape and its pieces; and a piece says which **box** of the
# tensor it is: for each dim the first row and one past the last. Here is the same tensor, written by two layouts:

# %%
def saved_by(*layout: str) -> Path:
    """The training of step 200, written by the ranks of a layout."""
    def on_ranks() -> Path:
        here = new_training(*layout)
        index = checkpoint.read_index(saved)
        checkpoint.load(saved, index, here.model, here.layout, here.optimizer)
        here.progress.restore(index["state"])
        state = {**here.progress.state(), "samples": 8 * 200}
        return checkpoint.save(work / "-".join(layout), here.optimizer, state, schema.as_plain(here.config), here.layout)

    return ranks(2)(on_ranks)[0]


by_tp, by_zero = saved_by("parallel.tp=2"), saved_by("parallel.zero=1", "parallel.bucket_mb=0.01")
for folder in (by_tp, by_zero):
    entry = checkpoint.read_index(folder)["tensors"]["blocks.0.attn.qkv.weight"]
    print(f"\n{folder.parent.name}: blocks.0.attn.qkv.weight, shape {entry['shape']}, {entry['dtype']}")
    for piece in entry["pieces"]:
        print(f"    {piece['file']}: box {piece['box']}" + (f", of it numbers {piece['flat']}" if piece["flat"] else ""))

# %% [markdown]
# Because the logical shape of the fused projection is (3, heads, head_dim, dim), half of the heads *is* a box. ZeRO-1's shares
# are no boxes: a share may begin in the middle of a row. A piece of a ZeRO-1 run is therefore a **flat range** of the numbers of
# a box. (If the tensor lies whole in one rank's share, there is one piece.)
#
# A reader, in whatever layout, knows from the placements of its parameters (lesson 10) which boxes *it* needs, and
# takes from each piece what the two boxes share. Colours are the pieces of an old layout; the framed box is what one
# rank of the new layout wants.
#
# > **Predict, before you move the sliders:** pieces of 2 ranks that cut rows, boxes of 3. How many pieces does each rank need?
# > And if the new ones cut columns? When does each new rank need exactly one piece?

# %%
slider = widgets.explore(checkpoints.layouts, old_rows=[2, 1, 3, 4, 6], old_columns=[1, 2, 4], new_rows=[3, 1, 2, 4, 6],
                         new_columns=[1, 2, 4], rank=[1, 0, 2, 3, 4, 5],
                         alt="A matrix in coloured pieces, one for each old rank, and over it the boxes of the new ranks; below, "
                             "how many numbers the framed one needs of which piece.")

# %% [markdown]
# <details><summary>Answer</summary>
# From halves to thirds: the first and the last need one piece, the middle one needs both. With columns every new box crosses
# every old piece: each needs all. A new rank needs one piece when its box lies inside one, as after cutting halves into
# quarters: this is what <code>course reshard</code> makes beforehand.
# </details>
#
# ## Exercise: what two boxes share
#
# A box has for each dim `(start, stop)`. Write what a wanted box and a piece share, in two ways: as slices of a tensor that has
# the *piece's* numbers, and as slices of a tensor that will have the *wanted* ones. `None` if they share nothing. (A single
# number, such as Adam's count of steps, has a box without dims, `()`, and is shared.) It is a function of the library: the
# check reads a checkpoint with yours.

# %% exercise="box-overlap"
from course.checkpoint.shards import overlap

# %%
check("box-overlap")

# %% [markdown]
# ## Exercise: a tensor from pieces
#
# Now put a wanted box together. Each piece is its box and a function `read(slices)`, which reads a part of the piece from the
# disk and returns it. Use `overlap`. **Read only what you need**: a piece may have gigabytes. The numbers are to stay as they
# are, bit for bit. A single number, whose box is `()`, comes in the same way.

# %% exercise="put-together"
def put_together(pieces: list[tuple[Box, Callable[[tuple[slice, ...]], Tensor]]], wanted: Box, dtype: torch.dtype) -> Tensor:
    """The part `wanted` of a tensor that lies in pieces: of each its box, and `read(slices)`, which reads a part of it."""
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
# > **Question.** And flat ranges, from ZeRO-1 on 8 ranks to 6? What is the least that you would have to add?
#
# <details><summary>Answer</summary>
# A flat range is a box with one dim, of the flattened tensor: [a, b). Between two layouts that cut the same tensor into flat
# ranges alone, your function does it already. Where a flat range meets a box, cut it into boxes first: a part of a row, whole
# rows, a part of a row. Then it is your function again: <code>course.checkpoint.shards.boxes_of</code>.
# </details>
#
# ## The real thing
#
# `course reshard RUN parallel.tp=2 parallel.zero=1` does it for a whole run: for each rank of the new layout it builds the
# model *without memory* (the `meta` device), reads off the placements which boxes that rank will own, and writes them to one
# file. Any layout reads any checkpoint without this; but when a thousand ranks each need a corner of every file, it is better
# to cut it up once.
#
# A tiny run, two steps in one process; then the library reshards it **with your `overlap`**.

# %%
def run_steps(last: int, name: str, *settings: str) -> list[float]:
    """Train a run up to step `last`, or go on with it: the losses that it logged."""
    c = config.load("gpt-demo", [*TINY, f"log.name={name}", f"train.steps={last}", "optim.schedule=constant", "optim.ema=0.9",
                                 *settings])
    fit(assemble(c, build_mesh(c.parallel, join("cpu"))))
    return [json.loads(line)["loss"] for line in (run_folder(c) / "metrics.jsonl").read_text().splitlines()]


home = work / "runs" / "gpt-demo"
undisturbed = run_steps(5, "undisturbed")
run_steps(2, "short")
with lab.yours(overlap):
    reshard.main(home / "short", ["parallel.tp=2", "parallel.zero=1", "parallel.dp=2"], "resharded")


def everything(run: Path) -> dict[str, Tensor]:
    """Every tensor of the newest checkpoint of a run, whole."""
    folder = checkpoint.steps(run / "checkpoints")[-1]
    index = checkpoint.read_index(folder)
    return {name: read_box(folder, index, name, tuple((0, n) for n in found["shape"]))
            for name, found in index["tensors"].items()}


old, new = everything(home / "short"), everything(home / "resharded")
print(f"{len(old)} tensors;", sum(torch.equal(old[name], new[name]) for name in old), "of them equal, bit for bit")

# %% [markdown]
# > **Question.** The run has 28 parameters. Why are there more than 28 tensors?
#
# <details><summary>Answer</summary>
# Beside each parameter itself there are Adam's two means, its count of steps and, with optim.ema, a moving average:
# five tensors for each.
# </details>
#
# > **Predict.** Now four ranks, two by two, go on from the resharded checkpoint to step 5. To how many digits will their losses
# > agree with those of the process that trained alone, in float64?

# %%
my_digits = 6                    # your prediction

# %%
on_four, *_ = ranks(4)(run_steps, 5, "resharded", "parallel.tp=2", "parallel.zero=1", "parallel.dp=2")
gap = max(abs(a / b - 1) for a, b in zip(on_four, undisturbed, strict=True))
print("alone  ", *(f"{loss:.12f}" for loss in undisturbed))
print("on four", *(f"{loss:.12f}" for loss in on_four))
lab.beside("equal digits", my_digits, min(16.0, -math.log10(max(gap, 1e-16))))

# %% [markdown]
# Fifteen or so (16 means all of them): the rest is the order of additions. This answers a question that users of
# large frameworks ask, "is the difference between tp=1 and tp=8 acceptable, or a silent failure?": load **one logical
# checkpoint** into both layouts, take a step in float64, and compare there. A failure is then a difference in the third digit,
# not in the fifteenth.
#
# ## Memory: one tensor at a time
#
# A checkpoint of 70 billion parameters with Adam's states has 840 GB. The machine that reshards it has perhaps 64.
#
# > **Predict.** A model of 4.2 million parameters: the weights and Adam's states have 50 MB, the largest tensor, the embedding,
# > 4.2 MB. How many MB of tensors are alive at once while it is resharded for 2 ranks?

# %%
my_peak = 50                     # your prediction, MB

# %%
larger = ["model.vocab=4096", "model.dim=256", "model.depth=4", "precision=fp32", "train.global_batch=2", "log.name=larger"]
c = config.load("gpt-demo", [*TINY, *larger, "train.steps=1"])
fit(assemble(c, build_mesh(c.parallel, World())))
with MemoryMeter() as meter:
    reshard.main(home / "larger", ["parallel.dp=2", "parallel.zero=1"], "larger2", lambda text: None)
bytes_in_all = sum(file.stat().st_size for file in (home / "larger" / "checkpoints").rglob("*.safetensors"))
print(f"on the disk {bytes_in_all / 1e6:.1f} MB")
lab.beside("most MB alive at once", my_peak, meter.peak / 1e6, "MB")

# %% [markdown]
# Three times the largest tensor: the box that is put together, the part that was just read from a piece, and the tensor before,
# which is being let go of. It would be the same for a model of a thousand such tensors. The trick is in the file format: a
# `safetensors` file begins with a header that says where each tensor's bytes are, so a reader can take a part of one
# (`get_slice`), and a writer that knows all shapes beforehand can write the header first and the tensors as they come:

# %%
lab.show("course.checkpoint.safetensors_writer.stream")

# %% [markdown]
# > **Question.** A `.pt` file is a pickle. What are the two reasons why nothing here writes one, and foreign ones are read with
# > `weights_only=True, mmap=True`?
#
# <details><summary>Answer</summary>
# Unpickling may execute any code: a checkpoint from the internet is a program. <code>weights_only</code> refuses everything but
# tensors and plain containers. And <code>torch.load</code> reads all of it into memory; mapped, pages come when they are touched.
# </details>
#
# ## A crash in the middle
#
# Machines fail while they write, too: writing a large checkpoint takes minutes, and a job that reaches its time limit is killed
# *then*. Here is a writer that writes a file of 8 MB with its checksum over and over, to one and the same name. We kill it
# ten times, at random moments, with SIGKILL, which no program can catch. One writer opens the file and writes. The other does
# what `course.utils.atomic_files.atomic` does: it writes to another name, flushes, and renames.
#
# > **Predict.** After how many of the ten kills is the file damaged, with each of the two?

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
    """Whether the file is damaged after its writer was killed at a random moment."""
    file = work / f"{how}.bin"
    file.unlink(missing_ok=True)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(file), how])
    while not (file.is_file() and file.stat().st_size > 8_000_000):            # until there is a first one
        time.sleep(0.005)
    time.sleep(dice.uniform(0.05, 0.3))
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    found = file.read_bytes()
    return hashlib.sha256(found[32:]).digest() != found[:32]


plain, safe = (sum(damaged(how) for _ in range(10)) for how in ("plain", "atomic"))
print(f"damaged of 10, opened and written: {plain} (you said {my_plain})")
print(f"damaged of 10, written beside it and renamed: {safe} (you said {my_atomic})")

# %% [markdown]
# The plain writer leaves a broken file whenever it is killed between opening the file, which empties it, and its last
# byte; and the good checkpoint that had that name is gone. The other leaves none: a rename either has happened or has
# not.
#
# A **power cut** is worse than a kill. After a kill the operating system still writes what it has been given. When the power
# goes, whatever it had not *flushed* (`fsync`) is lost, and it flushes in the order that suits it: the new name may be on the
# disk and the bytes not. So it takes three flushes: of the files' bytes; of the folder that has their names; and, after the
# rename, of the folder above it, which has the new name.
#
# ## Exercise: a save that no crash can break
#
# `Disk` is a simulated disk with four operations, `write(path, data)`, `flush(path)` for a file or a folder (`flush("")` for the
# one that all is in), `rename(old, new)` for a file or a folder, and `remove(path)`. It remembers after each what could be found
# if the power failed just then. Folders appear when a file is written into them.
#
# Write a checkpoint's files into the folder `name`, and then remove the folder `old`, the checkpoint before. After a crash at
# **any** moment there has to be a whole checkpoint, the old one or the new, and never half a one under the name `name`. (A
# leftover of another name does not matter: the next save writes over it, or clears it away first.)

# %% exercise="publish"
def publish(disk: Disk, name: str, files: dict[str, bytes], old: str) -> None:
    """Write the files of a checkpoint to the folder `name`, and remove the folder `old`, such that a crash loses nothing."""
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
# The library does the same with many ranks: each writes its file into the hidden folder, rank 0 waits for all, writes
# `index.json` with each file's checksum, and renames. A reader that finds a checksum wrong passes over that checkpoint, says so,
# and takes the one before.

# %%
lab.show("course.checkpoint.checkpoint.publish")

# %% [markdown]
# > **Question.** This function removes `final` before it renames, and for a moment there is none of that name. Is that a hole?
#
# <details><summary>Answer</summary>
# No. A folder of that name is there only if a run went on from an <em>older</em> checkpoint, because this one was damaged, and
# has come to its step again. The older one stands until the new one has its name.
# </details>
#
# ## Another library
#
# People's loss curves differ between two libraries, "with and without Transformer Engine", and they ask which of the two is
# broken. Often neither is. Here is an attention layer as another library might write it. It computes what ours does, but its
# names differ, it multiplies from the right, x W where ours has x W′, and the rows of its fused projection go **head by head**:
#
# | theirs | shape there | ours | shape here |
# |---|---|---|---|
# | `query_key_value.weight` | (D, heads · 3 · d) | `qkv.weight` | (3 · heads · d, D) |
# | `query_key_value.bias` | (heads · 3 · d,) | `qkv.bias` | (3 · heads · d,) |
# | `dense.weight` | (D, D), in × out | `out.weight` | (D, D), out × in |
# | `dense.bias` | (D,) | `out.bias` | (D,) |

# %%
class FromTheRight(nn.Module):
    """x W + b, multiplied from the right, as GPT-2's own code does; W begins as PyTorch draws a linear's, b at zero."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(inputs, outputs, dtype=torch.float64).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:                             # (..., K) -> (..., N)
        return x @ self.weight + self.bias


class TheirAttention(nn.Module):
    """Causal attention whose fused projection has its queries, keys and values head by head."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query_key_value, self.dense = FromTheRight(dim, 3 * dim), FromTheRight(dim, dim)

    def forward(self, x: Tensor, batch: Any = None) -> Tensor:          # (B, T, D)
        qkv = self.query_key_value(x).unflatten(-1, (self.heads, 3, -1))                # (B, T, h, 3, d)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)                            # 3 x (B, h, T, d)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)     # (B, h, T, d)
        return self.dense(y.transpose(1, 2).flatten(2))                 # (B, T, D)


# %% [markdown]
# ## Exercise: there and back
#
# Write both directions, with the tensors by name as in the table. Beware: two of the mistakes that are easily made here
# fit every shape.

# %% exercise="translate"
def to_ours(theirs: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """The other library's attention as ours: see the table."""
    ### BEGIN SOLUTION
    def by_part(x: Tensor) -> Tensor:                # head by head -> queries, keys, values
        return x.view(heads, 3, len(x) // heads // 3, *x.shape[1:]).movedim(1, 0).reshape(x.shape)

    return {"qkv.weight": by_part(theirs["query_key_value.weight"].T.contiguous()),
            "qkv.bias": by_part(theirs["query_key_value.bias"]),
            "out.weight": theirs["dense.weight"].T, "out.bias": theirs["dense.bias"]}
    ### END SOLUTION


def to_theirs(ours: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Our attention as the other library's: `to_ours` undone."""
    ### BEGIN SOLUTION
    def by_head(x: Tensor) -> Tensor:                # queries, keys, values -> head by head
        return x.view(3, heads, len(x) // heads // 3, *x.shape[1:]).movedim(1, 0).reshape(x.shape)

    return {"query_key_value.weight": by_head(ours["qkv.weight"]).T, "query_key_value.bias": by_head(ours["qkv.bias"]),
            "dense.weight": ours["out.weight"].T, "dense.bias": ours["out.bias"]}
    ### END SOLUTION

# %%
check("translate")

# %% [markdown]
# ## Why loss curves differ
#
# Now train three times on the same batches: our GPT; the same with *their* attention in every block, as it comes from their
# constructor; and the same with their attention and **our weights, converted by you**.
#
# > **Predict.** By how much does the second curve differ from the first in 80 steps? And the third?

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
dots = {"theirs, our weights": (list(range(1, 81, 4)), three["theirs, our weights"][::4])}
lab.picture(checkpoints.lines_and_dots(lines, dots, "loss", "One model, two libraries"),
            "The dots of theirs with our weights lie on the curve of ours; that of theirs runs with it, then falls faster")
for name, mine in (("theirs", my_difference), ("theirs, our weights", my_converted)):
    apart = max(abs(a - b) for a, b in zip(three[name], three["ours"], strict=True))
    lab.beside(f"{name}: the largest difference from ours", mine, max(apart, 1e-16))

# %% [markdown]
# **What you should see:** theirs learns much faster after a while, and one would think it the better library. But all of it is
# how the layers are *initialised*: ours with a standard deviation of 0.02, theirs with PyTorch's rule for linears. From the same
# weights the curves are the same, to rounding. This is the first thing to do when two libraries disagree: convert one checkpoint
# so that both start from the same weights. What then remains is a difference between the layers, and you can look for it in one
# forward pass.
#
# ## `course convert`
#
# The library's own converter has such a rule for each parameter of Hugging Face's GPT-2 and Llama, of facebookresearch/DiT, and
# of Transformer Engine's layers. Its rules are data, and pairs of functions that undo each other, as yours:

# %%
lab.show("course.convert.rules.Layout")
lab.show("course.convert.transformer_engine.interleave")
lab.show("course.convert.transformer_engine.table")

# %% [markdown]
# Convert the run to Transformer Engine's names and back. From a terminal: `course convert RUN te.safetensors --to te`, then
# `course convert te.safetensors RUN2`.

# %%
command.convert(World(), home / "short", work / "te.safetensors", to="te")
with safe_open(work / "te.safetensors", "pt") as opened:
    for name in sorted(opened.keys()):
        if name.startswith("blocks.0."):
            print(f"    {name:58} {opened.get_slice(name).get_shape()}")
command.convert(World(), work / "te.safetensors", home / "returned", [*TINY[:-1]])
back = everything(home / "returned")
print(f"\n{len(back)} tensors came back;", sum(torch.equal(old[name], x) for name, x in back.items()), "equal, bit for bit")

# %% [markdown]
# > **Question.** 140 tensors were in the run, 28 came back. What is lost by way of another library, and when does it matter?
#
# <details><summary>Answer</summary>
# Optimizer states, the moving average, the step, the position in the data: files of weights have none of them. To evaluate or
# to compare it does not matter. To <i>go on training</i> it does, as you saw at the beginning of this lesson.
# </details>
#
# ## FP8's scales
#
# One thing in a Transformer Engine checkpoint is not a tensor of the model: with delayed scaling (lesson 04) each linear has an
# amax history, and scales that follow from it. They lie in `_extra_state`, a *pickle*, which recent versions refuse to load. A
# converter drops it. Without a history that library's scales are 1.
#
# > **Predict.** What happens at scale 1? Below, the gradients that reach the outputs of one projection, in a batch of 256 tokens
# > as here; and what they would be in a batch of 500,000, a usual size: a mean loss divides by the number of tokens. E5M2's
# > smallest number is 2⁻¹⁶. What share of the gradients becomes zero in each case?

# %%
my_lost_small = 0.1              # your predictions
my_lost_large = 0.5

# %%
seen: list[Tensor] = []
again = new_training()
model = again.model
checkpoint.load(saved, checkpoint.read_index(saved), model, again.layout)
model.train().blocks["0"].attn.qkv.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
batch = model.prepare(language(100), torch.zeros((), dtype=torch.int64))
total, weight = model.loss(model(batch), batch)
(total / weight).backward()


def lost(gradients: Tensor, scale: float | Tensor) -> float:
    """The share of numbers that are not zero and become zero in E5M2."""
    cast = (gradients * scale).float().to(E5M2).float()
    return ((cast == 0) & (gradients != 0)).double().mean().item()


gradients = seen[0]
large = gradients * 256 / 500_000
rebuilt = scale_for(large.abs().max(), LARGEST[E5M2], 0)
shares = {"256 tokens, scale 1": lost(gradients, 1.0), "500,000 tokens, scale 1": lost(large, 1.0),
          f"500,000 tokens, scale {rebuilt:.1e}": lost(large, rebuilt)}
lab.picture(style.bars({name: 100 * share for name, share in shares.items()}, "%", "Gradients that vanish in E5M2"),
            "Bars: a part vanishes for 256 tokens, nearly all for half a million, nearly none with a scale from the amax")
lab.beside("lost of 256 tokens", my_lost_small, max(shares["256 tokens, scale 1"], 1e-4))
lab.beside("lost of 500,000 tokens", my_lost_large, shares["500,000 tokens, scale 1"])

# %% [markdown]
# At scale 1 training in FP8 would get hardly any gradients. So converting *from* Transformer Engine to a run in FP8 **rebuilds**
# the scales: one forward *and backward* pass over a batch, in bf16, which notes every tensor's amax, and no update. Forward alone
# would do for inputs and weights, and leave gradients with nothing.

# %%
lab.show("course.convert.command.rebuild")

# %%
eight = ["precision=fp8", "fp8.history=8", "data.source=mock"]
c = config.load("gpt-demo", [*TINY, *eight, "log.name=eight", "train.steps=12", "optim.lr=1e-3", "optim.schedule=constant"])
in_fp8 = assemble(c, build_mesh(c.parallel, World()))
fit(in_fp8)
command.convert(World(), home / "eight", work / "eight.safetensors", to="te")
command.convert(World(), work / "eight.safetensors", home / "eight_back", [*TINY[:-1], *eight], like="gpt-demo")
rebuilt_histories = {name: x for name, x in everything(home / "eight_back").items() if name.endswith("amax_history")}
print("amax of input, weight and gradient: training's own over its last 8 steps, and rebuilt from one batch")
for name, own in in_fp8.scaling.state().items():
    pairs = torch.stack([own.amax(1), rebuilt_histories[name].amax(1)], 1).tolist()
    print(f"    {name.removesuffix('.amax_history'):18}", "   ".join(f"{a:8.3g} {b:8.3g}" for a, b in pairs))

# %% [markdown]
# Weights agree to a few percent, inputs to about ten, gradients within a small factor: it is another batch. A scale may be
# wrong by a power of two or so: E5M2 has thirty of them. After a few steps the histories are those of the training itself.
#
# ## What you know now
#
# - A checkpoint is all that changes from step to step: with the weights alone the loss jumps.
# - A file should say *what it holds*, boxes of logical tensors, not who wrote it. Then any layout reads any other's.
# - Resharding is the intersection of boxes; one tensor in memory at a time is enough.
# - Write beside it, flush, rename, flush: a reader that finds the name finds all of it.
# - Converting is renaming, transposing and reordering rows. What fits every shape may still be wrong: compare *outputs*.
# - Libraries initialise differently. From one checkpoint their curves are the same.
# - FP8's scales are not worth carrying over, since one pass makes them anew; but without any there are no gradients.
#
# **Check your work once more, from outside.** Save the notebook; then, in a terminal: `course check
# notebooks/16_checkpoints_mine.ipynb`.
#
# Next: [lesson 17](17_performance_model.ipynb), which computes how long all of this takes before it is launched.

# %%
shutil.rmtree(work)
