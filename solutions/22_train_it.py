# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 22 · Capstone: train it
#
# Everything at once. You get four ranks, a model that does not fit on one of them, a data set and sixty steps. You choose the
# layout with the planner, write a piece that every layout needs, and train. You kill the run, resume it, and read the result
# in one process. At the end, the check grades your settings on a separate run.
#
# **What you will learn**
#
# - how to go from a model and a machine to settings that fit and are fast;
# - which copies and pieces of a gradient a layout has, and how to count each number once;
# - what a report of a training run should say: predicted and measured memory and time, and what the model learned.
#
# | | |
# |---|---|
# | you need | a laptop; no GPU |
# | reading and doing | about 120 minutes |
# | computing | 3 minutes on two cores |
# | you write | the norm of a gradient that is spread over many ranks (7 lines), the settings of a run |
# | you predict | memory and step time of your layout, what a kill costs, how much the model learns |
#
# You should have done [lesson 13](13_memory.ipynb) (where the bytes go), [lesson 16](16_checkpoints.ipynb) (checkpoints),
# and [lesson 17](17_performance_model.ipynb) (the planner). Work in a copy: *File → Save Notebook As…*,
# `22_train_it_mine.ipynb`.

# %%
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from course.inference import forecast_scores
from course.inference.kv_cache_decoding import generate
from course.lab import notebook as lab
from course.lab.exercises import lesson22_train_it as capstone
from course.lab.exercises.lesson22_train_it import MEMORY, predict
from course.lab.figures import checkpoints
from course.lab.figures import train_it as figures
from course.lab.notebook import check
from course.ranks.notebook_ranks import ranks

lab.begin("22")

# %% [markdown]
# ## The task
#
# | | |
# |---|---|
# | model | a GPT with 4 blocks of width 64 and 4 heads, 0.2 million parameters |
# | data | a small language of 12 numbers. Each is seven times the one before it, plus 1 or 2, modulo 12 |
# | training | 60 steps of 16 sequences of 32 numbers, in float32 |
# | machine | 4 ranks. Each may use 3.6 MB for tensors |
# | goal | the model knows 96% of what can be known about the next number |
#
# The sizes suit a laptop: 3.6 MB for 0.2 million parameters stands for 80 GB and several billion. The questions are the same:
# where do the bytes go, what does each axis cut, and what does it cost?
#
# Two of the twelve numbers may come next. A model that guesses has a loss of ln 12 = 2.48; one that knows the rule has ln 2 =
# 0.69. *Skill* is how far a model has come from the first to the second:

# %%
lab.show("course.lab.exercises.lesson22_train_it.skill")
print(f"skill of a loss of 1.5: {capstone.skill(1.5):.0%}")

# %% [markdown]
# ## Does it fit one rank?
#
# `predict` asks lesson 17's planner about your settings: the bytes on the fullest rank, and the time of a step on ranks of a
# laptop.
#
# > **Predict.** The model has 0.21 million parameters, trained by Adam in float32 (lesson 13). How many MB does one rank
# > need, with the activations of 16 sequences?

# %%
my_megabytes = 5.0               # your prediction

# %%
alone = predict("parallel.dp=1")
lab.beside("MB on one rank", my_megabytes, alone.memory / 1e6, "MB", "the planner says")
print(f"a rank may use {MEMORY / 1e6} MB")

# %% [markdown]
# Weights, gradients and Adam's two moments take 16 bytes per parameter, 3.4 MB. Activations take the rest.
#
# Now the four ranks. The next cell asks the planner about every combination of dp, tp, pp, ZeRO stage and micro-batch.
#
# > **Predict.** Which kind of layout will be the fastest of those that fit, and which will need the least memory?

# %%
my_fastest = "tp=4"              # your predictions
my_smallest = "ZeRO-3"

# %%
found = capstone.candidates()
lab.picture(figures.candidates(found, MEMORY),
            "Predicted step time over predicted memory, a dot for each combination. "
            "Data parallelism alone is fastest and needs much memory. Tensor "
            "parallelism needs the least and is the slowest. A line marks the "
            "memory of a rank")
fits = {chosen: each for chosen, each in found.items() if each.memory <= MEMORY}
for title, key in (("fastest", lambda chosen: fits[chosen].seconds),
                   ("smallest", lambda chosen: fits[chosen].memory)):
    best = min(fits, key=key)
    print(f"{title}: {fits[best].memory / 1e6:.2f} MB, "
          f"{1e3 * fits[best].seconds:.0f} ms: {' '.join(best)}")

# %% [markdown]
# **What you should see:** plain data parallelism is fastest but does not fit. Two cheap changes bring it below the line:
# ZeRO-1 shards Adam's moments, and smaller micro-batches need fewer activations at a time. Tensor parallelism needs the least
# memory, and is slow here, because sockets carry its messages. Inside a node with NVLink, the planner would rank the layouts
# differently.
#
# ## The piece that every layout needs
#
# Gradients are clipped by the norm of *all* gradients: one number, the same in every layout. But where are they? For each of
# its parameters, a rank knows what part it holds: the **placement**. You met boxes and shares in lesson 16. Look at the
# fields:

# %%
lab.show("course.parallel.placement.Placement")


# %%
def held(*layout: str) -> list[tuple[str, int, bool]]:
    """Name, number of elements and `owner` of some of this rank's parameters."""
    from course.parallel import build_mesh, join
    from course.training.assemble import assemble

    c = capstone.configuration(layout, seed=0)
    training = assemble(c, build_mesh(c.parallel, join("cpu")))
    return [(where.name, parameter.numel(), where.owner)
            for parameter in training.gradients.optimizer_parameters
            if (where := training.layout.placements[parameter]).name.startswith(
                ("blocks.0.attn.out", "blocks.0.norm1.weight", "blocks.2.mlp.up.w"))]


for layout in (("parallel.tp=2", "parallel.dp=2"), ("parallel.pp=4",)):
    print("\n", *layout)
    for rank, rows in enumerate(ranks(4)(held, *layout)):
        print(f"  rank {rank}:", ", ".join(f"{name.removeprefix('blocks.')} {count}"
                                           + (" owner" if owner else "")
                                           for name, count, owner in rows))

# %% [markdown]
# With tp=2 and dp=2, `attn.out.weight` is in halves, and each half is on two ranks, one of which owns it. The bias and the
# norm are whole on all four ranks, and one rank owns them. In the pipeline each stage owns what it holds.
#
# > **Question.** Ranks 2 and 3 of the first layout own nothing. May they skip the collective?
#
# <details><summary>Answer</summary>
# No. All ranks of the group have to call it, or the others wait forever. They contribute a zero.
# </details>
#
# ## Exercise: the norm of all gradients
#
# Return the norm of all gradients, the same number on every rank. Count each number once. Use one all-reduce of one number,
# over `layout.mesh.all.group`; with one process, `layout.mesh.all.size` is 1 and there is no group. Sum in float64: a norm is a
# sum of millions of squares.

# %% exercise="gradient-norm"
from course.training.optimizer import gradient_norm  # noqa: F401

# %%
check("gradient-norm")

# %% [markdown]
# A wrong norm is a quiet bug. The run does not stop. It clips by a different number than one process would, so its losses
# differ slightly, in some layouts only.
#
# ## Choose, and predict
#
# Choose settings for the run: any keys of `parallel` and `optim`, `train.micro_batch`, `train.recompute` and
# `checkpoint.every`. The settings below are a start, not the best.
#
# > **Predict.** Write down what you expect: memory of the fullest rank and time of a step (ask the planner), and the skill
# > after 60 steps (guess).

# %%
chosen = ["parallel.dp=4", "parallel.zero=1", "train.micro_batch=1",
          "optim.lr=2e-3", "checkpoint.every=15"]
expected = predict(*chosen)
my_skill = 0.5                   # your prediction
print(f"{expected.memory / 1e6:.2f} MB, {1e3 * expected.seconds:.0f} ms a step")

# %% [markdown]
# ## Run it, and kill it
#
# The next cell starts the run as you would in a terminal: `torchrun` with four processes of `course train`. After step 30
# it kills all of them with SIGKILL, which no program can handle. Then it enters the same command again.
#
# > **Predict.** From which step will the second start continue? How many steps will run twice?

# %%
my_start, my_twice = 1, 30       # your predictions

# %%
work = Path("runs/capstone").resolve()
shutil.rmtree(work, ignore_errors=True)
capstone.write_language(work, seed=0)
run = work / "gpt-demo/capstone"


def launch() -> subprocess.Popen[str]:
    """Start the run, with four processes."""
    words = ["gpt-demo", *capstone.overrides(chosen, seed=0, folder=work)]
    print("torchrun --nproc-per-node=4 -m course.cli train gpt-demo ...", *chosen)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node=4"]
    return subprocess.Popen([*torchrun, "-m", "course.cli", "train", *words],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            start_new_session=True)


def steps_done() -> dict[int, float]:
    """The losses so far, by step."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


process = launch()
while process.poll() is None and max(steps_done(), default=0) < 30:
    time.sleep(0.1)
os.killpg(process.pid, signal.SIGKILL)
process.wait()
before = steps_done()
print(f"killed after step {max(before)}; checkpoints:",
      *sorted(path.name for path in (run / "checkpoints").glob("step_*")))

# %%
log = launch().communicate()[0]
print("\n".join(line for line in log.splitlines()
                if "resuming" in line or " 60/60" in line))
after = steps_done()
start = int(log.split("at step ")[1].split()[0])
lab.beside("it goes on from step", my_start, start)
lab.beside("steps done twice", my_twice, max(before) - start)
twice = [step for step in before if step > start]
lab.picture(checkpoints.lines_and_dots(
    {"killed": (list(before), list(before.values()))},
    {"goes on": (list(after)[start::3], list(after.values())[start::3])},
    "loss", f"Killed after step {max(before)}, and on from step {start}"),
    "The falling loss of the run until the kill, and dots of the run that goes on. "
    "Where both did a step, the dots lie on the line")
print("largest difference between losses of steps done twice:",
      max((abs(before[step] - after[step]) for step in twice), default=0.0))

# %% [markdown]
# ## One process reads what four wrote
#
# The four ranks are gone. A checkpoint says which box of which tensor each piece is. So one process can read the whole
# checkpoint, or `course reshard` can rewrite it for another layout:

# %%
resharded = subprocess.run([sys.executable, "-m", "course.cli", "reshard", str(run),
                            "parallel.dp=1", "parallel.tp=2", "--name", "for-two"],
                           capture_output=True, text=True)
print(resharded.stdout.strip().splitlines()[0])
model, step = forecast_scores.load_model(run, capstone.configuration([], 0, work),
                                         torch.device("cpu"))
prompts = torch.arange(12)[:, None]
text = generate(model, prompts, 31, seed=1)
print(f"step {step} writes:", *text[5].tolist())

# %% [markdown]
# The rule of the language says which two numbers may follow. So the model's texts can be checked:

# %%
allowed = (text[:, 1:] - 7 * text[:, :-1]) % 12
lawful = ((allowed == 1) | (allowed == 2)).double().mean().item()
metrics = (run / "metrics.jsonl").read_text().splitlines()
records = [json.loads(line) for line in metrics]
learned = capstone.skill(records[-1]["valid_loss"])
print(f"{lawful:.0%} of {allowed.numel()} numbers follow the rule; a guess does in 17%")

# %% [markdown]
# ## The report
#
# A report compares prediction and measurement, and names the machine. This is what you would hand in for a real run:

# %%
def memory_of(*words: str) -> float:
    """Bytes of tensors on this rank at their peak, in three steps."""
    from course.parallel import join

    torch.set_num_threads(1)
    c = capstone.configuration([*words, "log.name=memory"], seed=0, folder=work)
    return capstone.train(c, join("cpu"), killed_at=4)


peak = max(ranks(4)(memory_of, *chosen))
step_ms = sorted(record["step_ms"] for record in records)[len(records) // 2]
lab.beside("memory of the fullest rank", expected.memory / 1e6, peak / 1e6, "MB")
lab.beside("time of a step", 1e3 * expected.seconds, step_ms, "ms")
lab.beside("skill", my_skill, learned)

# %% [markdown]
# **What you should see:** memory within a tenth of the prediction. Bytes can be counted, so a planner can be right about
# them. Time depends on this machine, which the planner knows only through four numbers: `capstone.LAPTOP`. Two cores serve
# four ranks, and on a busy machine a step takes twice as long. The *order* of the layouts is what you may trust.
#
# ## Open task: train it
#
# Write `settings`. The check runs them on four ranks with new initial weights and a new text. It kills the run at a step that
# you do not know, resumes it, and reads the last checkpoint in one process. It says what was predicted and what it measured.
#
# | level | what the check looks at |
# |---|---|
# | correct | four ranks start with the loss of one process; memory fits; the run resumes after the kill; one process reads it |
# | fast | no layout that fits is 10% faster, by the planner's prediction |
# | safe | no kill can cost more than 10 steps |
# | learned | 96% skill after 60 steps |
#
# A check takes about half a minute. Try settings in the cells above first. `lab.hint("train-it")` opens the first of three hints.

# %% exercise="train-it"
from course.lab.exercises.lesson22_train_it import settings  # noqa: F401

# %%
check("train-it")

# %% [markdown]
# ## With GPUs
#
# The same steps lead to a real model. Choose a layout with `course plan gpt-1.3b --gpus 2 --hardware h200`, or name your own
# GPUs. Start with the command that `--launch` prints. Compare memory, step time and loss with the prediction.
# `docs/results.md` has our results.
#
# ## Summary
#
# - Memory decides what is possible, and messages decide what is fast. Ask the planner for both before you start.
# - A number that several ranks hold has one owner. A sum over all ranks counts each number at its owner.
# - All ranks call a collective, even those with nothing to contribute.
# - A run is safe if a kill costs little, and if steps that run twice have the same losses.
# - A report puts the prediction beside the measurement, and names the machine.
#
# ## Questions
#
# 1. Your model grows to 10 billion parameters, on 8 GPUs of one node. Which of your settings stay, and which change?
# 2. The norm is right with tp=2 and wrong with tp=2, pp=2. Which mistake do you look for first?
# 3. Why does the check compare the steps that run twice, and not the final loss with that of an undisturbed run?
#
# **Check your work from a terminal.** Save the notebook, then run
# `course check notebooks/22_train_it_mine.ipynb`. This was the last lesson. `docs/using.md` says how to train your own model with
# the library.
