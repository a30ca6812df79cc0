# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 18 · On the cluster
#
# Everything so far ran because you were there to start it. On a cluster nobody is there: a script waits in a queue, starts at
# night on nodes that you did not choose, is thrown out before it is done, and one of its nodes may die. This is the last
# lesson, and all of the others meet in it. You write the script **from a blank page**, run it on two nodes, take it through a
# preemption and a lost node, and show that its losses are those of a training that was left alone, bit for bit. Then you
# compute how often to save, let the planner choose a layout, and hand in a report.
#
# | | |
# |---|---|
# | you need | a laptop; with Slurm installed (Debian, Ubuntu: `apt-get install slurm-wlm munge`) two real nodes start on it |
# | reading and doing | about 90 minutes |
# | computing | 2 minutes on two cores |
# | you write | where ranks meet (5 lines), a batch script (27), a loop that loses nothing (12), how often to save (3) |
# | you measure | steps lost to a preemption and to a lost node; the report is read by whoever grades |
#
# You should have done [lesson 07](07_data_parallel.ipynb) (ranks), [lesson 16](16_checkpoints.ipynb) (checkpoints) and
# [lesson 17](17_performance_model.ipynb) (the planner). Work in a copy: *File → Save Notebook As…*, `18_cluster_mine.ipynb`.

# %%
import math
import random
import re
import shutil
import signal
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from course import config
from course.data.text.indexed_files import document_writer
from course.utils.errors import CourseError
from course.lab.grading import run_evidence
from course.lab.figures import checkpoints, cluster as figures_cluster
from course.lab.slurm import lint
from course.lab.slurm import job_backend as places
from course.lab import notebook as lab
from course.lab.notebook import check
from course.planner import hardware, search
from course.cli import plan

lab.begin("18")
my_cluster = False               # True: jobs go to the cluster that this machine belongs to, if it has sbatch
cluster = places.find(my_cluster)
print(cluster.description)

# %% [markdown]
# That line says what *your* jobs run on in this notebook. If Slurm's programs are installed, it is a real Slurm of two nodes.
# Both are this machine, so nothing about its speed is real, and everything else is. If not, your batch script runs all the
# same. Its ranks are real processes that meet through the network of this machine, and a stand-in takes the place of Slurm.
#
# ## What a scheduler is for
#
# A cluster has a thousand nodes and a thousand users. A **scheduler** hands out the nodes: you say what you need and for how
# long, it finds a time and a place, sees that nobody else computes there, and takes everything away again when the time is
# over. What you say is a **batch script**, a shell script with a header that the scheduler reads. Here is a very small one.

# %%
work = Path("runs", "lesson18").resolve()            # where all nodes see it, with scripts, logs and data
shutil.rmtree(work, ignore_errors=True)
work.mkdir(parents=True)
hello = work / "hello.sh"
_ = hello.write_text("""#!/usr/bin/env bash
#SBATCH --job-name=hello
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:01:00
#SBATCH --output=slurm-%x-%j.log
set -euo pipefail
echo "script: on $SLURMD_NODENAME, $SLURM_JOB_NUM_NODES nodes and $SLURM_NTASKS tasks are mine"
srun --kill-on-bad-exit=1 bash -c 'echo "task $SLURM_PROCID: number $SLURM_LOCALID on $SLURMD_NODENAME"'
""")

# %% [markdown]
# > **Predict.** How many lines will this job print?

# %%
my_lines = 2                     # your prediction

# %%
job = cluster.wait(cluster.submit(hello, []))
print(job, "\n")
print(job.log)
lab.beside("lines", my_lines, len(job.log.splitlines()), how="counted")

# %% [markdown]
# Five: the script runs **once**, on the first node of those that it was given, and `srun` starts its command once for each
# **task**. That is the whole model:
#
# | | |
# |---|---|
# | `sbatch SCRIPT` | puts the script into the queue, and returns at once |
# | the script | runs once, on the first node, as soon as all nodes are free |
# | `srun COMMAND` inside it | starts the command on all nodes, once for each task, and waits for all |
# | a task | one process: a rank |
# | `SLURM_PROCID`, `SLURM_LOCALID`, `SLURM_NTASKS` | which task I am, which one on my node, how many there are |
#
# One GPU wants one process (lesson 07), so there is **a task for each GPU**. `python train.py` in a script, without `srun`, is
# a costly mistake: it trains on one GPU, and the project pays for eight.
#
# > **Question.** What is `--output` good for, and why with a `%j` in it?
#
# <details><summary>Answer</summary>
# Nobody looks at a screen: what is printed goes to a file, and this is its name. %j is the job's number, %x its name. Without a
# number the next job overwrites what this one has said, and it is the log of the one that failed that you will want.
# </details>
#
# ## Where ranks meet
#
# Each rank of a training has to know five things before it can talk to another one: its own number, how many there are, its
# number on its node (which is the number of its GPU), and an address and a port where all meet. PyTorch looks for them in
# `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`. `torchrun` sets them. Under `srun` nobody does, but
# Slurm's variables say it all in other words:
#
# | variable of a task | for example |
# |---|---|
# | `SLURM_JOB_ID` | `4711` |
# | `SLURM_PROCID` | `5` |
# | `SLURM_NTASKS` | `8` |
# | `SLURM_LOCALID` | `1` |
# | `SLURM_JOB_NODELIST` | `gpu[003-004]`, or `gpu[003,017-019]`, `login1,gpu[1-2]`, `gpu7` |
# | `SLURMD_NODENAME`, `SLURM_NODEID` | `gpu004`, `1`: the node that this task is on |
# | `SLURM_NNODES`, `SLURM_NTASKS_PER_NODE` | `2`, `4` |
#
# > **Question.** Ranks are usually dealt out node by node: 0 to 3 on the first, 4 to 7 on the second. Then `SLURM_PROCID % 4`
# > is the number on the node. When is it not?
#
# <details><summary>Answer</summary>
# With <code>srun --distribution=cyclic</code> they are dealt out in turn: 0, 2, 4, 6 on the first. A program that
# computes the GPU from the rank then gives two ranks the same GPU, and leaves one idle. Ask the scheduler for what it
# knows; do not compute it.
# </details>
#
# The **port** is the trap. PyTorch's examples say 29500. Two jobs on one node cannot both listen there, and the second one dies
# or, worse, joins the first. All ranks have to agree on the port without talking, and all that they have in common is the
# job's number. Ports go up to 65,535; from 32,768 on the system gives them to anybody who asks; below 1024 they are root's.
#
# ## Exercise: the rendezvous
#
# Make the five variables, as texts, from a task's own. All meet on the first node of the list.

# %% exercise="rendezvous"
def rendezvous(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables of a task that srun has started."""
    ### BEGIN SOLUTION
    without_brackets = re.sub(r"\[([^],-]*).*?\]", r"\1", environ["SLURM_JOB_NODELIST"])       # gpu[003,017],x1 -> gpu003,x1
    first, *_ = without_brackets.split(",")
    port = 21_000 + int(environ["SLURM_JOB_ID"]) % 11_000
    return {"RANK": environ["SLURM_PROCID"], "WORLD_SIZE": environ["SLURM_NTASKS"], "LOCAL_RANK": environ["SLURM_LOCALID"],
            "MASTER_ADDR": first, "MASTER_PORT": f"{port}"}
    ### END SOLUTION

# %%
check("rendezvous")

# %% [markdown]
# This library does the same in `course/parallel/mesh.py`, if `srun` has started a rank and nobody has set `MASTER_ADDR` and
# `MASTER_PORT`. A script that does set them has it easier: it runs on the first node, so it can ask that node for its name,
# `$(hostname)`. (Others expand the list, `scontrol show hostnames
# "$SLURM_JOB_NODELIST" | head -n 1`. On two nodes that are one machine only Slurm knows those names, and no network does.)
#
# ## What else goes into a script
#
# | line | why |
# |---|---|
# | `#SBATCH --nodes=` `--ntasks-per-node=` `--gpus-per-node=` | tasks and GPUs of a node are the same number |
# | `#SBATCH --cpus-per-task=` | cores for a rank, its threads and its loaders; `srun` wants to be told the number **again** |
# | `#SBATCH --time=` | how long. What asks for less starts sooner: it fits into gaps |
# | `#SBATCH --signal=B:USR1@60` | a warning 60 seconds before the limit: the signal USR1 to the script (`B:`), not to the ranks |
# | `#SBATCH --requeue` | if a node dies, Slurm may put the job back into the queue |
# | `#SBATCH --open-mode=append` | a requeued job goes on in its log, and does not wipe it out |
# | `set -euo pipefail` | a script that goes on after an error ends as if all went well |
# | `export OMP_NUM_THREADS=` | else each rank starts a thread for every core of the node, and they fight |
# | `srun --kill-on-bad-exit=1` | one rank fails: end the others. Else they wait for it, on all nodes, until the time limit |
# | `srun --cpu-bind=cores` | a rank keeps its cores, and the memory beside them |
#
# `#SBATCH` lines are comments to the shell, and `sbatch` reads them only up to the first command; it expands no variables in
# them.
#
# ### The time limit
#
# A run of two weeks on a cluster whose limit is 24 hours is fourteen jobs. Preemption is the same thing, sooner: somebody with
# a higher priority needs the nodes. Both times the scheduler warns, then kills. This is what should happen in between:

# %%
lab.picture(figures_cluster.time_limit(),
            "Lanes of Slurm, script, srun and ranks over time. Slurm starts the script, which starts srun and waits. Later Slurm "
            "sends USR1 to the script, which passes it to srun, and srun to the ranks; they save and end with 75, the script "
            "requeues the job, and after a while in the queue all begins again with loading")

# %% [markdown]
# Three things are hard about it, and all three are about the shell:
#
# - `bash` runs a `trap` only when the command in the foreground has ended. If that is `srun`, the trap runs at the time limit.
#   So `srun ... &` goes into the background, its process number is `$!`, and the script waits for it with `wait`.
# - A signal **ends `wait`**, with a status above 128, and not the ranks. A script that does not wait again ends while
#   the ranks are still saving, and when the script ends, Slurm kills them. (Ranks that were killed end above 128 as well, 137
#   say, and that status `wait` gives as often as it is asked: do not wait until it is small.)
# - Under `set -e` a `wait` that reports a failure ends the script before it could look at the status: `wait "$ranks" ||
#   status=$?`.
#
# A run of this library that was stopped by USR1 and has saved ends with the status **75** (`EX_TEMPFAIL` of
# `sysexits.h`: try again later), `srun` with the highest status of its ranks. Only then should the job go back into the
# queue, `scontrol requeue "$SLURM_JOB_ID"`; after any other failure it would fail again, and again.
#
# > **Question.** Why not call `scontrol requeue` in the trap, right after `kill -USR1`?
#
# <details><summary>Answer</summary>
# Requeuing a job that runs <em>ends</em> it: Slurm sends its processes TERM, and a little later KILL. The ranks have just begun
# to save. With a small model it goes well each time, until the model is large.
# </details>
#
# ## Exercise: a batch script, from a blank page
#
# Return the text of a script that runs `python -m course.cli train` on every task, with the arguments that `sbatch` was
# given after the script's name (`"$@"`), on so many nodes, with so many tasks on each and so many CPUs for each; and,
# unless `gpus` is 0, so many GPUs on each node. Ask for twenty minutes and a warning a minute before. Ranks meet at
# `MASTER_ADDR` and `MASTER_PORT`, which the script sets, and compute with as many threads as they have CPUs. However
# the ranks end, the job ends with their status; after a warning they save, and then the job goes back into the queue.
# After `scontrol requeue` sleep a minute: Slurm ends the script meanwhile. (In an f-string the shell's `{` and `}` are
# written `{{` and `}}`.)

# %% exercise="batch-script"
def batch_script(nodes: int, tasks: int, cpus: int, gpus: int) -> str:
    """A batch script for `nodes` nodes with so many tasks, CPUs of each task, and GPUs (0: none) on each node."""
    ### BEGIN SOLUTION
    of_gpus = f"#SBATCH --gpus-per-node={gpus}\n" if gpus else ""
    return f"""#!/bin/bash
#SBATCH --job-name=lesson18
#SBATCH --nodes={nodes} --ntasks-per-node={tasks}
#SBATCH --cpus-per-task={cpus}
{of_gpus}#SBATCH --time=00:20:00
#SBATCH --signal=B:USR1@60
#SBATCH --requeue --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
MASTER_ADDR=$(hostname)
MASTER_PORT=$((21000 + SLURM_JOB_ID % 11000))
OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

srun --kill-on-bad-exit=1 --cpu-bind=cores python -m course.cli train "$@" &
step=$!
warned=
trap 'warned=yes; kill -USR1 "$step" || true' USR1
ended=0
wait "$step" || ended=$?
while [ -n "$warned" ]; do          # it was the signal that ended the wait
    warned= ended=0
    wait "$step" || ended=$?
done
if [ "$ended" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit "$ended"
"""
    ### END SOLUTION

# %% [markdown]
# First the linter, `course lint-sbatch FILE` on the command line: mistakes that one sees in the text, and that Slurm accepts in
# silence.

# %%
script = work / "mine.sh"
script.write_text(batch_script(2, 2, 1, 0))
clean = lint.main(script, [])

# %% [markdown]
# The check does more: it **runs** your script, with stand-ins for Slurm's programs, and looks at which ranks would be started
# with which environment, and at what the script does when they end well, fail, are killed, or are warned.

# %%
check("batch-script")

# %% [markdown]
# ## Two nodes
#
# A small GPT and the small language of lesson 16: numbers from 0 to 11, each seven times the one two places before it, plus 1
# or 2, around the clock. This time it lies in a token file, since the position in the data is a part of what must not be lost.
# Four ranks, data-parallel, 240 steps, a checkpoint every 50.

# %%
def language(count: int, seed: int) -> np.ndarray:
    """So many words in a row."""
    dice, words = random.Random(seed), [0, 1]
    while len(words) < count:
        words.append((7 * words[-2] + 1 + dice.randrange(2)) % 12)
    return np.array(words)


for split, count in (("train", 200_000), ("valid", 4_000)):
    with document_writer(work / "language" / split, 12) as writer:
        writer.add(language(count, seed=count))

TINY = ["gpt-demo", "model.vocab=12", "model.context=32", "model.dim=32", "model.depth=2", "data.source=files",
        f"data.path={work / 'language'}", "data.workers=0", "train.device=cpu", "train.global_batch=16", "train.steps=240",
        "optim.lr=1e-2", "checkpoint.every=50", "log.every=1", "log.tensorboard=false", f"log.dir={Path('runs').resolve()}"]


def folder(name: str) -> Path:
    """Where the run of this name is."""
    return Path("runs", "gpt-demo", f"lesson18-{name}")


def submit(name: str) -> int:
    """Put your script into the queue for the run of this name; the job's number."""
    return cluster.submit(script, [*TINY, f"log.name=lesson18-{name}"])


def completed(name: str, number: int) -> places.Job:
    """The job that trains the run of this name when it is over, if it has done so to the end."""
    job = cluster.wait(number)
    if job.state != "COMPLETED":
        raise CourseError(f"{job}; the end of its log:\n{job.log[-3000:]}")
    places.record_job(folder(name), job)                               # which job wrote it: for your report
    return job


def resumed(job: places.Job) -> int:
    """The step from which a job went on the last time."""
    steps = re.findall(r"resuming .* at step (\d+)", job.log)
    if not steps:
        raise CourseError(f"{job}, and it went on from no checkpoint; the end of its log:\n{job.log[-3000:]}")
    return int(steps[-1])


for name in ("undisturbed", "preempted", "lost"):
    shutil.rmtree(folder(name), ignore_errors=True)              # of an earlier time: it would go on
job = completed("undisturbed", submit("undisturbed"))
print(job, "\n")
print("\n".join([*job.log.splitlines()[:3], "...", *job.log.splitlines()[-3:]]))

# %% [markdown]
# Your script, on two nodes of two ranks. These are the losses that all others have to meet.
#
# ## A preemption
#
# Now the same again; and when it has done 80 steps or so, a warning comes, as it does before the time limit.
#
# > **Predict.** (1) How many of its steps will be done a second time? (2) How many of its 240 losses will differ from those of
# > the undisturbed run? (3) How often will the job have run in the end?

# %%
my_steps_again = 30              # your predictions
my_losses_apart = 10
my_starts = 2

# %%
number = submit("preempted")
places.wait_for_step(folder("preempted"), 80, cluster, number)
cluster.send_warning(number)
job = completed("preempted", number)
print(job, "\n")
print("\n".join(line for line in job.log.splitlines() if not re.match(r"(\d: )?step ", line)))

# %%
whole, preempted = places.losses(folder("undisturbed")), places.losses(folder("preempted"))
stopped_at = resumed(job)
lines = {"undisturbed": (list(whole), list(whole.values()))}
parts = {"before the warning": [s for s in preempted if s <= stopped_at], "requeued": [s for s in preempted if s > stopped_at]}
dots = {name: (steps[::6], [preempted[s] for s in steps[::6]]) for name, steps in parts.items()}
lab.picture(checkpoints.lines_and_dots(lines, dots, "loss", f"A warning, and on from step {stopped_at}"),
            "The curve of the undisturbed run falls from 2.5 to about 0.8; the dots of the run before the warning lie on it, and "
            "so do the squares of the run after it was requeued")
logged = [int(found) for found in re.findall(r"\bstep +(\d+)/240", job.log)]
print(f"done a second time: {len(logged) - len(set(logged))} steps, you said {my_steps_again}")
print(f"losses that differ: {sum(preempted.get(step) != loss for step, loss in whole.items())} of {len(whole)}, "
      f"you said {my_losses_apart}")
print(f"starts: {1 + job.restarts}, you said {my_starts}")

# %% [markdown]
# (`srun` says that this toy of a cluster has no cores to bind. The `error` lines are no failure: 75 is the status of ranks that
# were stopped and have saved, and Slurm logs each, and that the step was cancelled because its script asked for a requeue.)
#
# **What you should see:** none, none, two. The job has its number still, its log has both parts, and the losses are the *same
# numbers*, to the last bit. That is a stronger statement than a curve that looks right, and easier to check: `==`. It takes
# everything that lesson 16 found to belong into a checkpoint: weights, Adam's states, the step, the place in the data.
#
# > **Question.** In another layout, say on one node after two, they would agree to six digits or so in float32. Why not to the
# > last bit?
#
# <details><summary>Answer</summary>
# Sums over ranks would be added up in another order, and addition of floating-point numbers is not associative. In float64 the
# difference is below 10⁻¹². Nothing is wrong with that, but "bit for bit" is then no longer the question.
# </details>
#
# ## Inside: a loop that loses nothing
#
# What did the run do when the signal came? A signal can come at *any* moment: in the middle of a step, when half of the
# parameters are updated; in the middle of a checkpoint; while the run is still loading. Python calls the handler right there.
#
# > **Question.** What may a handler do? Save? Raise an exception? End the process?
#
# <details><summary>Answer</summary>
# None of these. At that moment there is no state that could be saved: half of it is of this step, half of the one before, or a
# checkpoint is half written. A handler sets a flag. The loop looks at it where all is in order: between two steps.
# </details>
#
# ## Exercise: survive
#
# You are given what a training consists of: `load()` restores the newest checkpoint and returns its step (0 if there is none),
# `step(n)` does step n, `save(n)` writes a checkpoint of the state after step n. Train up to step `last`; save after each step
# that `every` divides, and at the end. At USR1 (`signal.signal(signal.SIGUSR1, handler)`) save and return 75, at the latest one
# step later; return 0 when step `last` is done, even if a signal came. Never save twice what is saved already.
#
# The check sends real signals: in steps, in saves, while it loads, two at once; and it kills the process without a word.

# %% exercise="go-on"
def go_on(last: int, every: int, load: Callable[[], int], step: Callable[[int], None], save: Callable[[int], None]) -> int:
    """Train up to step `last` from the newest checkpoint on; returns 0 when it is done, and 75 when it was asked to stop."""
    ### BEGIN SOLUTION
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    saved = newest = load()
    while newest < last and not heard:
        newest += 1
        step(newest)
        if newest % every == 0:
            save(newest)
            saved = newest
    if newest > saved:                               # not "if heard": a signal may come between two looks at it
        save(newest)
    return 75 if newest < last else 0
    ### END SOLUTION

# %%
check("go-on")

# %% [markdown]
# With several ranks there is one more difficulty. The signal reaches each of them at another moment, so that one would stop
# after step 80 and another after step 81, and the second would wait for the first forever. So the ranks **agree**: after every
# step each contributes its flag to an all-reduce (the maximum), which travels while the next step computes. All stop after the
# same step, one later than the first has heard. `course/resilience/preemption.py` does that:

# %%
lab.show("course.resilience.preemption.StopSignal")

# %% [markdown]
# ## A lost node
#
# A warning is a courtesy. A node whose power supply fails sends none: its ranks are gone, and the others find out when a
# message does not come. Let us kill all ranks of one node with SIGKILL, which no process can hear, at step 120 or so.
#
# > **Predict.** (1) What becomes of the ranks on the *other* node? (2) A checkpoint is written every 50 steps. How many steps
# > will be done a second time? (3) And how many of the losses will differ in the end?

# %%
my_survivors = "they wait"       # your predictions
my_steps_lost = 25
my_losses_apart_then = 25

# %%
number = submit("lost")
places.wait_for_step(folder("lost"), 120, cluster, number)
cluster.kill_second_node(number)
job = cluster.wait(number)
before = places.losses(folder("lost"))
print(job, "\n")
told = [line for line in job.log.splitlines() if not re.match(r"(\d: )?step ", line)]
print("\n".join(textwrap.fill(line, 120, subsequent_indent="    ", break_on_hyphens=False) for line in told[1:9]))

# %% [markdown]
# The others have ended within seconds. One of them says which rank is gone, and the step that it last reported. (Ranks report
# every two seconds, in which this small model does dozens of steps: it had got further than that.) `--kill-on-bad-exit` does
# the rest: without these two, the nodes that are left would wait for the time limit, and be charged. The job has FAILED, and
# your script has rightly not put it back: nobody has ended with 75. (When a *real* node dies, Slurm itself notices, ends the
# job with `NODE_FAIL`, and puts it back: that is what `--requeue` allows.) Here, submit it again: the same words.

# %%
job = completed("lost", submit("lost"))
lost, resumed_at = places.losses(folder("lost")), resumed(job)
print(job, "\n")
print(next(line for line in job.log.splitlines() if "resuming" in line))

# %%
again = [step for step in before if step > resumed_at]
lines = {"undisturbed": (list(whole), list(whole.values()))}
dots = {"until the node was lost": (list(before)[::6], [before[s] for s in list(before)[::6]]),
        "submitted again": ([s for s in lost if s > resumed_at][::6], [lost[s] for s in lost if s > resumed_at][::6])}
lab.picture(checkpoints.lines_and_dots(lines, dots, "loss", f"Killed at step {max(before)}, and on from step {resumed_at}"),
            "The dots of the run until the node was lost lie on the curve of the undisturbed run, and so do the squares of the "
            "run that was submitted again, which begin earlier than the dots end")
print(f"done a second time: {len(again)} steps, you said {my_steps_lost}; {my_survivors!r}, you said of the survivors")
print(f"losses that differ: {sum(lost.get(step) != loss for step, loss in whole.items())} of {len(whole)}, "
      f"you said {my_losses_apart_then}")

# %% [markdown]
# Time is lost, and nothing else: the steps since the newest checkpoint are done again, on the same batches, to the same losses.
# On average that is half of `checkpoint.every`. So why not save after every step?
#
# ## How often to save
#
# Saving stops the training for `save` seconds. (Less than a checkpoint takes to be written, if it is written in the
# background.) After each interval of T seconds of training one is due. A failure comes every M seconds on average, at a moment
# that nobody knows, so it costs half an interval, and then the **restart**: until it is noticed, until there is a node, until
# all is loaded. Of each second, the share
#
# > save / T + (T/2 + restart) / M
#
# is lost (Young 1974; Daly 2006 has the terms that follow for short M). The first part falls with T, the second one rises.
#
# > **Question.** Where is the least? And what does it cost there?
#
# <details><summary>Answer</summary>
# The derivative, −save/T² + 1/(2M), is zero at T = √(2 · save · M). There saving costs as much as what is done again,
# √(save/2M) each. To lose half as much, save four times as fast.
# </details>
#
# **And M?** A job stops when *any* of its nodes fails. If one node fails once in m seconds, N nodes fail N times as often.
# Llama 3 405B was trained on 16,384 H100s, 8 in a node. Within 54 days the job was interrupted unexpectedly 419 times (Dubey et
# al. 2024, section 3.3.4).
#
# > **Predict.** How many hours were there between two failures of the job? And how many days between two failures of one
# > *node*?

# %%
my_hours, my_node_days = 24.0, 30.0      # your predictions

# %%
mtbf = 54 * 24 * 3600 * (16_384 // 8) / 419      # seconds between two failures of a node
lab.beside("hours between two failures of the job", my_hours, mtbf / 2048 / 3600, "h", "published")
lab.beside("days between two failures of a node", my_node_days, mtbf / 86_400, "days", "published")

# %% [markdown]
# A node runs for the better part of a year, and the job for three hours. Nobody's hardware is bad; there is so much of it.
#
# ## Exercise: the interval

# %% exercise="checkpoint-interval"
def checkpoint_interval(save: float, restart: float, mtbf: float, nodes: int) -> tuple[float, float]:
    """(seconds of training between two checkpoints that lose the least, the share of the time that is then lost).

    save: seconds that a checkpoint stops the training for; restart: from a failure to the next step; mtbf: seconds between two
    failures of a node.
    """
    ### BEGIN SOLUTION
    failures = nodes / mtbf                          # a second
    seconds = math.sqrt(2 * save / failures)
    return seconds, save / seconds + failures * (seconds / 2 + restart)
    ### END SOLUTION

# %%
check("checkpoint-interval")

# %% [markdown]
# A formula with "on average" in it deserves a test. Let failures come at random and count what is lost:

# %%
def simulated(interval: float, save: float, restart: float, between: float, failures: int = 4000) -> float:
    """The share of the time that is lost, of a training with so many failures at random moments."""
    running = np.random.default_rng(0).exponential(between, failures)            # seconds from a restart to the next failure
    kept = interval * np.floor(running / (interval + save))                      # what the checkpoints hold of it
    return 1 - kept.sum() / (running + restart).sum()


save, restart = 30.0, 300.0
seconds = np.geomspace(30, 30_000, 60)
curves, marks, least = {}, {}, {}
for count in (8, 256, 2048):
    name, between = f"{8 * count} GPUs", mtbf / count
    curves[name] = (seconds, save / seconds + (seconds / 2 + restart) / between)
    marks[name] = (seconds[::6], [simulated(interval, save, restart, between) for interval in seconds[::6]])
    least[name] = checkpoint_interval(save, restart, mtbf, count)
shown = {name: [(x, y) for x, y in zip(*line, strict=True) if y < 0.5] for name, line in {**curves}.items()}
dotted = {name: [(x, y) for x, y in zip(*line, strict=True) if y < 0.5] for name, line in marks.items()}
lab.picture(figures_cluster.shares({name: tuple(zip(*points, strict=True)) for name, points in shown.items()},
                                   {name: tuple(zip(*points, strict=True)) for name, points in dotted.items()}, least,
                                   "A save stops the training for 30 s, a restart takes 5 minutes"),
            "For 64, 2048 and 16384 GPUs a valley each, with a star at its lowest point: the more GPUs, the further to the left "
            "and the higher. The marks of the simulation lie on the lines in the valleys, and below them at both ends")
for name, (interval, share) in least.items():
    print(f"{name:>10}: save every {interval / 60:5.0f} minutes, and lose {share:.1%}")

# %% [markdown]
# The valleys are wide: half or twice the interval costs little more. So the *order of magnitude* counts, and it depends on the
# size of the job: what loses nothing on 64 GPUs loses a good part of the time on 16,384. (At both ends the simulation lies
# below the line. Saves cost save / (T + save), which is less than save / T where T is short. And where T comes near M, a
# failure often comes in the first interval, and cannot cost more time than has passed.)
#
# > **Question.** The paper reports more than 90% effective training time. Look at the numbers for 16,384 GPUs: which of the
# > three, saving, doing again, restarting, would you work on first?
#
# <details><summary>Answer</summary>
# With 30 s and 5 minutes about 10% are lost: 3.7% saving, 3.7% doing again, 2.7% restarting. A save that stops the training for
# 3 s (copy to the host's memory, write in the background) makes 1.2% of each of the first two. Then restarts are the most:
# spare nodes that wait, and a start that does not take minutes. The paper names the same two: job starts and checkpoints were
# made shorter (Dubey et al. 2024, section 3.3.4).
# </details>
#
# ## A layout for the job
#
# The planner of lesson 17 says what to ask `sbatch` for. GPT 7B, 134 billion tokens, on 64 H100s in nodes of 8:

# %% [markdown]
# > **Predict.** `course plan --launch` prints the line that starts the best layout. What stands after `--nodes=` and
# > `--ntasks-per-node=`? Which axis gets most of the GPUs?

# %%
my_nodes, my_tasks, my_axis = 2, 4, "tp"             # your predictions

# %%
FAST = ["compile=true", "stream=narrow"]
plan.main("gpt-7b", FAST, 64, "h100-80", top=3, tokens=134e9)
plan.main("gpt-7b", FAST, 64, "h100-80", launch=True)

# %% [markdown]
# Read the line as Slurm reads it. Eight nodes of eight tasks, one for each GPU, and what follows the script's name goes to
# every rank. The linter knows `submit/train.sh`, too: with these options it should find nothing, and something with one task.

# %%
for tasks in (8, 1):
    words = ["--nodes=8", "--gpus-per-node=8", f"--ntasks-per-node={tasks}", "--cpus-per-task=8"]
    print(*words)
    clean = lint.main(Path("submit/train.sh"), words)

# %%
seven = config.load("gpt-7b", FAST)
found = search.find_layouts(seven, hardware.load("h100-80"), 64)
best = found.layouts[0]
interval, share = checkpoint_interval(save, restart, mtbf, 8)
days = plan.training(found, best, 134e9 / seven.model.context)["days"]
print(f"the best layout: {best.sizes}; you said {my_nodes} nodes, {my_tasks} tasks, and most for {my_axis}")
print(f"{days:.2f} days without failures, {days / (1 - share):.2f} with those of eight such nodes")
print(f"checkpoint.every={interval / best.time.step:.0f}: every {interval / 60:.0f} minutes")

# %% [markdown]
# > **Predict.** In the middle of it a node dies, and there is no spare one. What percentage of the speed do the seven
# > nodes that are left reach, in the best layout for them? And six nodes?

# %%
my_seven, my_six = 87.0, 75.0    # your predictions, in percent

# %%
fewer = {gpus: search.find_layouts(seven, hardware.load("h100-80"), gpus).layouts[0] for gpus in (56, 48)}
for gpus, layout in fewer.items():
    print(f"{gpus} GPUs: {layout.sizes}, {layout.time.samples_per_s:.0f} samples/s; 64 have {best.time.samples_per_s:.0f}")
for name, said, layout in zip(("seven", "six"), (my_seven, my_six), fewer.values(), strict=True):
    speed = 100 * layout.time.samples_per_s / best.time.samples_per_s
    lab.beside(f"{name} nodes, of the speed of eight", said, speed, "%", "the library's")

# %% [markdown]
# Seven nodes are hardly better than six. 1024 samples and 32 heads are powers of two, and 56 has a 7 in it, which nothing but
# the pipeline can take: 32 blocks in 7 stages, so that some have five and others wait for them. Because checkpoints know no
# layout (lesson 16), the run can go on in any of them at once. Clusters that train large models keep spare nodes all the same:
# what one misses is not the node's computing power, it is the divisibility.
#
# ## Your report
#
# Here is what you hand in. `report` names the runs of this lesson, by their folders; `measured` has your own numbers.
# Both are plain values in a cell of code, since the notebook is graded by reading it, not by running it.

# %%
report = {"undisturbed": "runs/gpt-demo/lesson18-undisturbed", "preempted": "runs/gpt-demo/lesson18-preempted",
          "lost": "runs/gpt-demo/lesson18-lost"}
measured = {"layout": "", "checkpoint_minutes": 0.0, "share_lost": 0.0}     # what you found above, in your own notebook's numbers

# %% [markdown]
# Save the notebook. Then, in a terminal, in a job or without one:
#
#     sbatch --ntasks=1 submit/check.sh notebooks/18_cluster_mine.ipynb
#     bash submit/check.sh notebooks/18_cluster_mine.ipynb
#
# It checks all exercises and writes `18_cluster_mine.result.json` beside the notebook, with the losses of the three runs and
# the jobs that wrote them. Hand in both files. This is what `course grade` will say of the runs, on a machine where no Slurm
# knows them:

# %%
print(run_evidence.judge_runs(run_evidence.gather_runs(report, Path.cwd()), "", lambda number: ({}, None)).replace("; ", "\n"))

# %% [markdown]
# *Claimed* is what your files say, *confirmed* what Slurm says of the jobs: on a cluster that your instructor shares, that job
# 4711 was yours, ran on two nodes, and was requeued once. Of losses Slurm knows nothing. They stay your claim, and they are
# compared number by number.
#
# > **Question.** Why does the instructor's program not believe your log, in which all of this can be read?
#
# <details><summary>Answer</summary>
# A log is a file of yours, and you can write into it. What somebody else has recorded, independently, is evidence. The same
# holds for the benchmark results of papers.
# </details>
#
# ## What you know now
#
# - A script runs once, a task is a rank, and `srun` starts ranks. One task for each GPU.
# - Ask the scheduler what it knows. Derive from the job's number whatever two jobs must not share.
# - A warning has to pass three hands, script, srun and rank, and each can drop it. Only 75 goes back into the queue.
# - A signal's handler sets a flag. Ranks agree on the step after which they stop.
# - Nothing lost means the same numbers, and that can be tested with `==`.
# - Saving every √(2 · save · M) seconds loses the least, and M shrinks with every node.
#
# This was the last lesson. You began with the time of a matrix multiplication; now you can say how many days a model will take
# on how many GPUs, cut it over them, prove that it computes the same, and see it through a night in which somebody else needs
# your nodes. [submit/README.md](../submit/README.md) has the scripts for your own cluster,
# [submit/FAULTS.md](../submit/FAULTS.md) what else can break, and every file of `course/` was written to be read.

# %%
cluster.close()
