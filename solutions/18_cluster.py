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
# So far everything ran because you were there to start it. On a cluster nobody is there. A script waits in a queue and
# starts at night, on nodes that you did not choose. The scheduler ends it before it is done, and one of its nodes may fail.
# In this lesson the earlier ones come together. You write the script **from a blank page**, run it on two nodes, and take
# it through a preemption and a lost node. You show that its losses equal those of an undisturbed run, bit for bit.
#
# **What you will learn**
#
# - how a scheduler starts ranks on many nodes, and how the ranks find each other;
# - how a run survives a time limit, a preemption and a lost node without losing a number;
# - how often to save, and how to ask for the right nodes.
#
# | | |
# |---|---|
# | you need | a laptop; with Slurm installed (Debian, Ubuntu: `apt-get install slurm-wlm munge`) it runs real Slurm |
# | reading and doing | about 90 minutes |
# | computing | 2 minutes on two cores |
# | you write | where ranks meet (5 lines), a batch script (27), a loop (12), how often to save (3); optional: all of a run (40) |
# | you measure | steps lost to a preemption and to a lost node; your grader reads the report |
#
# Do [lesson 07](07_data_parallel.ipynb) (ranks), [lesson 16](16_checkpoints.ipynb) (checkpoints) and
# [lesson 17](17_performance_model.ipynb) (the planner) first. Work in a copy: *File → Save Notebook As…*,
# `18_cluster_mine.ipynb`.

# %% numbers=true
from math import sqrt


def lost_percent(save, restart=300, between=54 * 86_400 / 419):
    """Percent lost to saving, to repeated steps and to restarts, at the best interval.

    between: seconds between two failures of the job on 16,384 GPUs (Dubey et al. 2024).
    """
    interval = sqrt(2 * save * between)
    return 100 * save / interval, 100 * interval / 2 / between, 100 * restart / between


saving, repeating, restarting = lost_percent(30)

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
# True: jobs go to this machine's own cluster, if it has sbatch
my_cluster = False
cluster = places.find(my_cluster)
print(cluster.description)

# %% [markdown]
# The printed line says what *your* jobs run on in this notebook. If Slurm's programs are installed, it is a real Slurm with
# two nodes. Both are this machine, so only the speed is not real. Without Slurm, a stand-in replaces it, and your batch
# script still runs. Its ranks are real processes that meet through this machine's network.
#
# ## What a scheduler is for
#
# A cluster has a thousand nodes and a thousand users. A **scheduler** hands out the nodes. You say what you need and for how
# long. The scheduler finds a time and a place, keeps others away from your nodes, and takes everything back when the time is
# over. You write this request into a **batch script**, a shell script with a header that the scheduler reads. Here is a very
# small one.

# %%
# all nodes see it: scripts, logs, data
work = Path("runs", "lesson18").resolve()
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
# Five: the script runs **once**, on the first of its nodes, and `srun` starts its command once for each **task**. That is
# the whole model:
#
# | | |
# |---|---|
# | `sbatch SCRIPT` | puts the script into the queue and returns at once |
# | the script | runs once, on the first node, as soon as all nodes are free |
# | `srun COMMAND` inside it | starts the command on all nodes, once for each task, and waits for all |
# | a task | one process: a rank |
# | `SLURM_PROCID`, `SLURM_LOCALID`, `SLURM_NTASKS` | this task's number, its number on its node, the number of tasks |
#
# Each GPU needs one process (lesson 07), so ask for **one task per GPU**. `python train.py` in a script, without `srun`, is
# a costly mistake: it trains on one GPU, and the project pays for eight.
#
# > **Question.** What is `--output` good for, and why does its name contain `%j`?
#
# <details><summary>Answer</summary>
# Nobody watches a screen, so Slurm writes all output to this file. %j is the job's number, %x its name. Without the number,
# the next job overwrites this log, and usually you want the log of the earlier job, which failed.
# </details>
#
# ## Where ranks meet
#
# Before a rank can talk to others, it has to know its own number and the number of ranks. It needs its number on its
# node, which selects its GPU. It also needs the address and the port where all meet. PyTorch looks for these five
# things in `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`. `torchrun` sets them. `srun` does
# not, but Slurm's variables contain the same information:
#
# | variable of a task | for example |
# |---|---|
# | `SLURM_JOB_ID` | `4711` |
# | `SLURM_PROCID` | `5` |
# | `SLURM_NTASKS` | `8` |
# | `SLURM_LOCALID` | `1` |
# | `SLURM_JOB_NODELIST` | `gpu[003-004]`, or `gpu[003,017-019]`, `login1,gpu[1-2]`, `gpu7` |
# | `SLURMD_NODENAME`, `SLURM_NODEID` | `gpu004`, `1`: the node of this task |
# | `SLURM_NNODES`, `SLURM_NTASKS_PER_NODE` | `2`, `4` |
#
# > **Question.** Slurm usually numbers ranks node by node: 0 to 3 on the first, 4 to 7 on the second. Then
# > `SLURM_PROCID % 4` is the number on the node. When is it not?
#
# <details><summary>Answer</summary>
# With <code>srun --distribution=cyclic</code> Slurm deals them out in turn: 0, 2, 4, 6 on the first node. A program that
# computes the GPU from the rank then gives two ranks the same GPU and leaves one idle. Ask the scheduler for what it knows
# instead of computing it.
# </details>
#
# The **port** is the trap. PyTorch's examples use 29500. Two jobs on one node cannot both listen there. The second one dies
# or, worse, joins the first. All ranks have to agree on the port without talking, and the only thing they share is the
# job's number. Ports go up to 65,535. The system gives those from 32,768 on to anybody who asks, and those below 1024
# belong to root.
#
# ## Exercise: the rendezvous
#
# Return the five variables, as strings, from the variables of a task. All ranks meet on the first node of the list.

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
# This library does the same in `course/parallel/mesh.py`, if `srun` started the rank and nobody set `MASTER_ADDR` and
# `MASTER_PORT`. A script that sets them has it easier. It runs on the first node, so it asks that node for its name,
# `$(hostname)`. (Other scripts expand the list: `scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1`. If both nodes
# are one machine, as here, only Slurm knows those names, and the network does not.)
#
# ## What else goes into a script
#
# | line | why |
# |---|---|
# | `#SBATCH --nodes=` `--ntasks-per-node=` `--gpus-per-node=` | a node has as many tasks as GPUs |
# | `#SBATCH --cpus-per-task=` | cores for a rank, its threads and its loaders; `srun` does not inherit it: set it **again** |
# | `#SBATCH --time=` | how long; a shorter job starts sooner, because it fits into gaps |
# | `#SBATCH --signal=B:USR1@60` | a warning 60 seconds before the limit: USR1 to the script (`B:`), not to the ranks |
# | `#SBATCH --requeue` | if a node dies, Slurm may put the job back into the queue |
# | `#SBATCH --open-mode=append` | a requeued job appends to its log instead of overwriting it |
# | `set -euo pipefail` | without it, a script goes on after an error and ends as if all went well |
# | `export OMP_NUM_THREADS=` | without it, each rank starts a thread for every core of the node |
# | `srun --kill-on-bad-exit=1` | if one rank fails, end the others; else they wait until the time limit |
# | `srun --cpu-bind=cores` | a rank keeps its cores and the memory next to them |
#
# `#SBATCH` lines are comments to the shell. `sbatch` reads them only up to the first command and expands no variables in
# them.
#
# ### The time limit
#
# A run of two weeks on a cluster with a limit of 24 hours is fourteen jobs. A preemption is the same, only sooner: somebody
# with a higher priority needs the nodes. In both cases the scheduler warns first and kills later. This should happen in
# between:

# %%
lab.picture(figures_cluster.time_limit(),
            "Four rows over time: Slurm, script, srun, ranks. Slurm starts the "
            "script, which starts srun and waits. Later Slurm sends USR1 to the "
            "script, the script passes it to srun, and srun to the ranks. The ranks "
            "save and end with status 75, and the script requeues the job. After some "
            "time in the queue it starts again and loads")

# %% [markdown]
# Three things are hard about it, and all three concern the shell:
#
# - `bash` runs a `trap` only after the foreground command has ended. If that command is `srun`, the trap runs only at the
#   time limit. So put `srun` into the background, `srun ... &`. Its process number is `$!`, and the script waits for it
#   with `wait`.
# - A signal **ends `wait`**, with a status above 128, but not the ranks. If the script does not wait again, it ends while the
#   ranks are still saving, and Slurm kills them. (Killed ranks also end above 128, for example with 137. `wait` returns that
#   status as often as you ask, so do not loop until the status is small.)
# - Under `set -e`, a `wait` that reports a failure ends the script before it can look at the status. Write
#   `wait "$ranks" || status=$?`.
#
# If USR1 stops a run of this library, the run saves and ends with status **75** (`EX_TEMPFAIL` of `sysexits.h`: try again
# later). `srun` ends with the highest status of its ranks. Only after 75 should the job go back into the queue, with
# `scontrol requeue "$SLURM_JOB_ID"`. After any other failure it would fail again and again.
#
# > **Question.** Why not call `scontrol requeue` in the trap, right after `kill -USR1`?
#
# <details><summary>Answer</summary>
# Requeuing a running job <em>ends</em> it: Slurm sends its processes TERM, and a little later KILL. The ranks have just
# begun to save. With a small model this goes well every time; with a large one it does not.
# </details>
#
# ## Exercise: a batch script, from a blank page
#
# Return the text of a script that
#
# - runs `python -m course.cli train` in every task, with the arguments after the script's name in `sbatch` (`"$@"`);
# - asks for `nodes` nodes, `tasks` tasks on each node, `cpus` CPUs for each task and, unless `gpus` is 0, `gpus` GPUs on
#   each node;
# - asks for twenty minutes, and for a warning one minute before the end;
# - sets `MASTER_ADDR` and `MASTER_PORT`, where the ranks meet, and gives each rank as many threads as it has CPUs;
# - ends with the status of the ranks, however they end;
# - lets the ranks save after a warning, and then puts the job back into the queue. After `scontrol requeue`, sleep a minute:
#   Slurm ends the script during this time.
#
# (In an f-string, write the shell's `{` and `}` as `{{` and `}}`.)

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
# First run the linter. (In a terminal: `course lint-sbatch FILE`.) It finds mistakes that are visible in the script and
# that Slurm accepts without a word.

# %%
script = work / "mine.sh"
script.write_text(batch_script(2, 2, 1, 0))
clean = lint.main(script, [])

# %% [markdown]
# The check does more: it **runs** your script with stand-ins for Slurm's programs. It looks at which ranks would start, with
# which environment. It also looks at what the script does when the ranks end well, fail, are killed, or are warned.

# %%
check("batch-script")

# %% [markdown]
# ## Two nodes
#
# A small GPT learns the small language of lesson 16, with numbers from 0 to 11. Each is seven times the number two
# places before it, plus 1 or 2, modulo 12. This time the language is in a token file, because the run must not lose
# its position in the data either. Four data-parallel ranks train for 240 steps and save every 50.

# %%
def language(count: int, seed: int) -> np.ndarray:
    """`count` numbers of the language."""
    dice, words = random.Random(seed), [0, 1]
    while len(words) < count:
        words.append((7 * words[-2] + 1 + dice.randrange(2)) % 12)
    return np.array(words)


for split, count in (("train", 200_000), ("valid", 4_000)):
    with document_writer(work / "language" / split, 12) as writer:
        writer.add(language(count, seed=count))

TINY = ["gpt-demo", "model.vocab=12", "model.context=32", "model.dim=32",
        "model.depth=2", "data.source=files",
        f"data.path={work / 'language'}", "data.workers=0", "train.device=cpu",
        "train.global_batch=16", "train.steps=240",
        "optim.lr=1e-2", "checkpoint.every=50", "log.every=1", "log.tensorboard=false",
        f"log.dir={Path('runs').resolve()}"]


def folder(name: str) -> Path:
    """The folder of the run with this name."""
    return Path("runs", "gpt-demo", f"lesson18-{name}")


def submit(name: str) -> int:
    """Submit your script for the run with this name; return the job's number."""
    return cluster.submit(script, [*TINY, f"log.name=lesson18-{name}"])


def completed(name: str, number: int) -> places.Job:
    """Wait for the job of the run with this name, which must complete; return the
    job."""
    job = cluster.wait(number)
    if job.state != "COMPLETED":
        raise CourseError(f"{job}; the end of its log:\n{job.log[-3000:]}")
    places.record_job(folder(name), job)                               # for your report
    return job


def resumed(job: places.Job) -> int:
    """The step from which a job continued the last time."""
    steps = re.findall(r"resuming .* at step (\d+)", job.log)
    if not steps:
        raise CourseError(f"{job}, and it continued from no checkpoint; the end of "
                          f"its log:\n{job.log[-3000:]}")
    return int(steps[-1])


for name in ("undisturbed", "preempted", "lost"):
    # an earlier run would continue
    shutil.rmtree(folder(name), ignore_errors=True)
job = completed("undisturbed", submit("undisturbed"))
print(job, "\n")
print("\n".join([*job.log.splitlines()[:3], "...", *job.log.splitlines()[-3:]]))

# %% [markdown]
# Your script ran on two nodes with two ranks each. All other runs have to reproduce these losses.
#
# ## A preemption
#
# Now the same again. After about 80 steps comes a warning, as before the time limit.
#
# > **Predict.** (1) How many of its steps will be done twice? (2) How many of its 240 losses will differ from those of the
# > undisturbed run? (3) How often will the job have started in the end?

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
print("\n".join(line for line in job.log.splitlines()
                if not re.match(r"(\d: )?step ", line)))

# %%
whole, preempted = places.losses(folder("undisturbed")), places.losses(
    folder("preempted"))
stopped_at = resumed(job)
lines = {"undisturbed": (list(whole), list(whole.values()))}
parts = {"before the warning": [s for s in preempted if s <= stopped_at],
         "requeued": [s for s in preempted if s > stopped_at]}
dots = {name: (steps[::6], [preempted[s] for s in steps[::6]])
        for name, steps in parts.items()}
lab.picture(checkpoints.lines_and_dots(lines, dots, "loss",
                                       f"A warning, and on from step {stopped_at}"),
            "The falling loss of the undisturbed run. The dots of the run before the "
            "warning lie on this curve, and so do the squares of the requeued run")
logged = [int(found) for found in re.findall(r"\bstep +(\d+)/240", job.log)]
print(f"done a second time: {len(logged) - len(set(logged))} steps, you said "
      f"{my_steps_again}")
print(f"losses that differ: "
      f"{sum(preempted.get(step) != loss for step, loss in whole.items())} "
      f"of {len(whole)}, "
      f"you said {my_losses_apart}")
print(f"starts: {1 + job.restarts}, you said {my_starts}")

# %% [markdown]
# (`srun` says that this toy cluster has no cores to bind. The `error` lines are no failure. 75 is the status of ranks that
# stopped and saved; Slurm logs each of them, and also that the script asked for a requeue.)
#
# **What you should see:** none, none, two. The job still has its number, and its log has both parts. The losses are the
# *same numbers*, to the last bit. This says more than a curve that looks right, and `==` checks it. It requires everything
# that belongs in a checkpoint (lesson 16): weights, Adam's states, the step, the position in the data.
#
# > **Question.** In another layout, say on one node instead of two, the losses would agree to about six digits in float32.
# > Why not to the last bit?
#
# <details><summary>Answer</summary>
# Sums over ranks would add in a different order, and floating-point addition is not associative. In float64 the difference
# is below 10⁻¹². Nothing is wrong with it, but "bit for bit" is then no longer the question.
# </details>
#
# ## Inside: a loop that loses nothing
#
# What did the run do when the signal came? A signal can come at *any* moment. It can interrupt a step, when half of
# the parameters have changed. It can interrupt a checkpoint, or come while the run still loads. Python calls the
# handler right there.
#
# > **Question.** What may a handler do? Save? Raise an exception? End the process?
#
# <details><summary>Answer</summary>
# None of these. At that moment no consistent state exists: half of it belongs to this step, half to the previous one, or a
# checkpoint is half written. A handler sets a flag. The loop looks at the flag where everything is in order: between two
# steps.
# </details>
#
# ## Exercise: survive
#
# You get the parts of a training run. `load()` restores the newest checkpoint and returns its step (0 if there is none).
# `step(n)` does step n. `save(n)` writes a checkpoint of the state after step n.
#
# - Train up to step `last`. Save after each multiple of `every` steps, and at the end.
# - At USR1 (`signal.signal(signal.SIGUSR1, handler)`) save and return 75, at the latest one step later.
# - Return 0 when step `last` is done, even if a signal came. Never save a state twice.
#
# The check sends real signals: during steps, during saves, while loading, two at once. It also kills the process without
# warning.

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
# With several ranks there is one more difficulty. The signal reaches each rank at a different moment. One would stop after
# step 80, another after step 81, and the second would wait for the first forever. So the ranks **agree**: after every step
# each contributes its flag to an all-reduce (the maximum), which travels while the next step computes. All stop after the
# same step, one step after the first rank got the signal. `course/resilience/preemption.py` does this:

# %%
lab.show("course.resilience.preemption.StopSignal")

# %% [markdown]
# ## A lost node
#
# A warning is a courtesy. A node whose power supply fails sends none. Its ranks are gone, and the others notice only when a
# message does not come. Let us kill all ranks of one node with SIGKILL, which no process can catch, at about step 120.
#
# > **Predict.** (1) What happens to the ranks on the *other* node? (2) The run saves every 50 steps. How many steps will be
# > done twice? (3) How many of the losses will differ in the end?

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
print("\n".join(textwrap.fill(line, 120, subsequent_indent="    ",
                              break_on_hyphens=False) for line in told[1:9]))

# %% [markdown]
# The others ended within seconds. One of them names the missing rank and the step that this rank last reported. (Ranks
# report every two seconds. In this time the small model does dozens of steps, so the rank had come further.)
# `--kill-on-bad-exit` does the rest. If the ranks did not notice, or without this option, the remaining nodes would wait for
# the time limit, and you would pay for them. The job has FAILED, and your script correctly did not requeue it, because
# nobody ended with 75. (When a *real* node dies, Slurm notices, ends the job with `NODE_FAIL`, and requeues it: `--requeue`
# allows this.) Here, submit it again with the same command.

# %%
job = completed("lost", submit("lost"))
lost, resumed_at = places.losses(folder("lost")), resumed(job)
print(job, "\n")
print(next(line for line in job.log.splitlines() if "resuming" in line))

# %%
again = [step for step in before if step > resumed_at]
lines = {"undisturbed": (list(whole), list(whole.values()))}
dots = {"until the node was lost": (list(before)[::6],
                                    [before[s] for s in list(before)[::6]]),
        "submitted again": ([s for s in lost if s > resumed_at][::6],
                            [lost[s] for s in lost if s > resumed_at][::6])}
lab.picture(checkpoints.lines_and_dots(lines, dots, "loss", f"Killed at step "
                                       f"{max(before)}, and on from step {resumed_at}"),
            "The dots of the run until it lost the node lie on the curve of the "
            "undisturbed run. So do the squares of the second submission, which begin "
            "before the dots end")
print(f"done twice: {len(again)} steps, you said {my_steps_lost}; {my_survivors!r}, "
      f"you said of the survivors")
print(f"losses that differ: "
      f"{sum(lost.get(step) != loss for step, loss in whole.items())} of {len(whole)}, "
      f"you said {my_losses_apart_then}")

# %% [markdown]
# You lose time and nothing else. The run repeats the steps since the newest checkpoint, on the same batches, with the same
# losses.
#
# ## A layout for the job
#
# The planner of lesson 17 says what to ask `sbatch` for. Take GPT 7B with 134 billion tokens on 64 H100s, in nodes of 8.
#
# > **Predict.** `course plan --launch` prints the line that starts the best layout. What follows `--nodes=` and
# > `--ntasks-per-node=`? Which axis gets most of the GPUs?

# %%
my_nodes, my_tasks, my_axis = 2, 4, "tp"             # your predictions

# %%
FAST = ["compile=true", "stream=narrow"]
plan.main("gpt-7b", FAST, 64, "h100-80", top=3, tokens=134e9)
plan.main("gpt-7b", FAST, 64, "h100-80", launch=True)

# %% [markdown]
# Read the line as Slurm reads it: eight nodes with eight tasks, one for each GPU. What follows the script's name goes to
# every rank. The linter also knows `submit/train.sh`. With these options it should find nothing, and with one task it should
# complain.

# %%
for tasks in (8, 1):
    words = ["--nodes=8", "--gpus-per-node=8", f"--ntasks-per-node={tasks}",
             "--cpus-per-task=8"]
    print(*words)
    clean = lint.main(Path("submit/train.sh"), words)

# %%
seven = config.load("gpt-7b", FAST)
found = search.find_layouts(seven, hardware.load("h100-80"), 64)
best = found.layouts[0]
days = plan.training(found, best, 134e9 / seven.model.context)["days"]
print(f"the best layout: {best.sizes}; you said {my_nodes} nodes, {my_tasks} tasks, "
      f"and most for {my_axis}")
print(f"{days:.2f} days without failures")

# %% [markdown]
# > **Predict.** In the middle of the run a node dies, and there is no spare one. What percentage of the speed do seven nodes
# > reach, in the best layout for them? And six nodes?

# %%
my_seven, my_six = 87.0, 75.0    # your predictions, in percent

# %%
fewer = {gpus: search.find_layouts(seven, hardware.load("h100-80"), gpus).layouts[0]
         for gpus in (56, 48)}
for gpus, layout in fewer.items():
    print(f"{gpus} GPUs: {layout.sizes}, {layout.time.samples_per_s:.0f} samples/s; "
          f"64 GPUs: {best.time.samples_per_s:.0f}")
for name, said, layout in zip(("seven", "six"), (my_seven, my_six), fewer.values(),
                              strict=True):
    speed = 100 * layout.time.samples_per_s / best.time.samples_per_s
    lab.beside(f"speed of {name} nodes, relative to eight", said, speed, "%", "planned")

# %% [markdown]
# Seven nodes are hardly better than six. 1024 samples and 32 heads are powers of two, but 56 GPUs contain a factor of 7. Only
# the pipeline can take it: 32 blocks in 7 stages, so some stages have five blocks and the others wait for them. Checkpoints
# know no layout (lesson 16), so the run can continue in any of these layouts at once. Still, clusters that train large
# models keep spare nodes: they miss the divisibility more than the node's computing power.
#
# ## How often to save
#
# After a failure, a run repeats half of `checkpoint.every` steps on average. So why not save after every step?
#
# Saving stops the training for `save` seconds. If the run writes in the background, this is less than the time to
# write a checkpoint. The run saves after each interval of T seconds of training. A failure comes every M seconds on
# average, at a moment that nobody knows. It costs half an interval, and then the **restart**: until somebody notices,
# until there is a node, until everything is loaded. Of each second, the run loses the share
#
# > save / T + (T/2 + restart) / M
#
# (Young 1974; Daly 2006 adds terms for short M). The first part falls with T, the second one rises.
#
# > **Question.** Where is the minimum? What is the loss there?
#
# <details><summary>Answer</summary>
# The derivative, −save/T² + 1/(2M), is zero at T = √(2 · save · M). There, saving costs as much as repeated steps:
# √(save/(2M)) each. To halve both, save four times as fast. The restart adds restart/M.
# </details>
#
# **And M?** A job stops when *any* of its nodes fails. If one node fails once in m seconds, N nodes fail N times as often.
# Llama 3 405B was trained on 16,384 H100s, 8 per node. Within 54 days the job had 419 unexpected interruptions (Dubey et al.
# 2024, section 3.3.4).
#
# > **Predict.** How many hours passed between two failures of the job? How many days between two failures of one *node*?

# %%
my_hours, my_node_days = 24.0, 30.0      # your predictions

# %%
# seconds between two failures of a node
mtbf = 54 * 24 * 3600 * (16_384 // 8) / 419
lab.beside("hours between two failures of the job", my_hours, mtbf / 2048 / 3600, "h",
           "published")
lab.beside("days between two failures of a node", my_node_days, mtbf / 86_400, "days",
           "published")

# %% [markdown]
# A node runs for most of a year, and the job for three hours. Nobody's hardware is bad; there is so much of it.
#
# ## Exercise: the interval
#
# Return the best interval and the share of the time that the run then loses.

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
# Test a formula that says "on average". Let failures come at random, and count what is lost:

# %%
def simulated(interval: float, save: float, restart: float, between: float,
              failures: int = 4000) -> float:
    """The share of the time that random failures and saves cost a run."""
    # seconds from restart to failure
    running = np.random.default_rng(0).exponential(between, failures)
    # what checkpoints keep
    kept = interval * np.floor(running / (interval + save))
    return 1 - kept.sum() / (running + restart).sum()


save, restart = 30.0, 300.0
seconds = np.geomspace(30, 30_000, 60)
curves, marks, least = {}, {}, {}
for count in (8, 256, 2048):
    name, between = f"{8 * count} GPUs", mtbf / count
    curves[name] = (seconds, save / seconds + (seconds / 2 + restart) / between)
    marks[name] = (seconds[::6], [simulated(interval, save, restart, between)
                                  for interval in seconds[::6]])
    least[name] = checkpoint_interval(save, restart, mtbf, count)
shown = {name: [(x, y) for x, y in zip(*line, strict=True) if y < 0.5]
         for name, line in {**curves}.items()}
dotted = {name: [(x, y) for x, y in zip(*line, strict=True) if y < 0.5]
          for name, line in marks.items()}
lab.picture(figures_cluster.shares({name: tuple(zip(*points, strict=True))
                                    for name, points in shown.items()},
                                   {name: tuple(zip(*points, strict=True))
                                    for name, points in dotted.items()}, least,
                                   f"A save stops the training for {save:.0f} s, a "
                                   f"restart takes {restart / 60:.0f} minutes"),
            "A valley for each of three numbers of GPUs, with a star at its lowest "
            "point. With more GPUs it moves left and up. The simulation lies on the "
            "lines in the valleys, and below them at both ends")
for name, (interval, share) in least.items():
    print(f"{name:>10}: save every {interval / 60:5.0f} minutes, and lose {share:.1%}")

# %%
interval, share = checkpoint_interval(save, restart, mtbf, 8)
print(f"GPT 7B on 8 nodes: checkpoint.every={interval / best.time.step:.0f}, every "
      f"{interval / 60:.0f} minutes")
print(f"{days:.2f} days without failures, {days / (1 - share):.2f} with them")

# %% [markdown]
# The valleys are wide: half or twice the interval costs little more. So the *order of magnitude* counts, and it depends on
# the size of the job. (At both ends the simulation lies below the line. Saves cost save / (T + save), which is less for
# short T. For T near M, a failure in the first interval costs only the time that has passed.)
#
# > **Question.** The paper reports more than 90% effective training time. Look at 16,384 GPUs: would you first improve
# > saving, repeated steps, or restarts?
#
# <details><summary>Answer</summary>
# With 30 s for a save and 5 minutes for a restart, saving costs {result: saving | .1f}%, repeated steps
# {result: repeating | .1f}%, restarts {result: restarting | .1f}%. If a save stops the training for 3 s (copy to host
# memory, write in the background), the first two cost {result: lost_percent(3)[0] | .1f}% each. Then improve restarts: spare
# nodes and a fast start.
# </details>
#
# ## Your report
#
# `report` names your runs by their folders; `measured` holds your numbers. Both are plain values, because the grader reads
# the notebook and does not run it.

# %%
report = {"undisturbed": "runs/gpt-demo/lesson18-undisturbed",
          "preempted": "runs/gpt-demo/lesson18-preempted",
          "lost": "runs/gpt-demo/lesson18-lost"}
# your own numbers
measured = {"layout": "", "checkpoint_minutes": 0.0, "share_lost": 0.0}

# %% [markdown]
# Save the notebook. Then, in a terminal, in a job (first line) or without one (second):
#
#     sbatch --ntasks=1 submit/check.sh notebooks/18_cluster_mine.ipynb
#     bash submit/check.sh notebooks/18_cluster_mine.ipynb
#
# This checks all exercises and writes `18_cluster_mine.result.json`, with the losses of the three runs and their jobs. Hand
# in both files. On a machine whose Slurm does not know these jobs, `course grade` will say:

# %%
print(run_evidence.judge_runs(run_evidence.gather_runs(report, Path.cwd()), "",
                              lambda number: ({}, None)).replace("; ", "\n"))

# %% [markdown]
# *Claimed* is what your files say. *Confirmed* is what Slurm says on a shared cluster: job 4711 was yours, ran on two nodes,
# and was requeued once. The losses stay your claim, and the grader compares them number by number.
#
# ## Open task: a run that survives
#
# *Optional, about 50 minutes. Nothing later needs it.* In your loop, `load` and `save` were given, and each file was whole. Now
# you write all of it: the file, how it gets onto the disk, which files stay, and what a new process makes of them. Ours has
# about 40 lines.
#
# **Contract**
#
# - `survive(job)` trains up to step `job.last`. It returns 0 if that step is done, and 75 if SIGUSR1 came before. A new process
#   calls it again, with a fresh training state and the disk as the last process left it.
# - `job.step(n)` does step n on the next samples, whose number differs from step to step. `job.position` counts the samples that
#   were read.
# - `job.state()` returns the weights and all other states, 4096 bytes. `job.restore(state, position)` takes them back.
# - `job.disk` has `names()`, `read(path)`, `write(path, data)`, `flush(path)`, `rename(old, new)` and `remove(path)`. What is not
#   flushed can be lost, as in [lesson 16](16_checkpoints.ipynb): flush a file to keep its bytes, its folder, `""`, to keep names.
#
# What happens to it, each in a run of its own:
#
# | what | when |
# |---|---|
# | the process is killed, or the power fails | in a step, and at *each* operation of the disk |
# | SIGUSR1, and the end 2 seconds later | in a step, while it saves or loads. A step takes 1 second, a write 0.4, a flush 0.2 |
# | the newest file is damaged | it is cut off, or one of its bits is flipped, when a new process starts |
# | the disk is full once | `write` leaves half a file and raises an `OSError` |
#
# **Levels.** Each level counts by itself, once the first is reached:
#
# | level | what the check counts |
# |---|---|
# | correct | in the end each step has the loss of an undisturbed run; the status is right |
# | few writes | bytes written: at most one checkpoint for every `job.every` steps and 4 more, of 1.1 states each |
# | few repeated | steps done again: none after a signal; after a kill at most `job.every`, twice as many with a damaged file |
# | tidy | at the end at most 2.5 states on the disk, in 4 files; at no time more than 3.5 |
#
# Start with correct. `lab.hint("survive")` opens the first of three hints, and each further call opens the next one.

# %% exercise="survive"
from course.lab.exercises.lesson18_open_task import survive  # noqa: F401

# %%
check("survive")

# %% [markdown]
# ## Summary
#
# - A script runs once, and `srun` starts one rank per task, one task per GPU.
# - Ask the scheduler for what it knows, and derive from the job's number what two jobs must not share.
# - A warning passes from script to `srun` to rank. A handler sets a flag, the ranks agree on a step, and only status 75
#   requeues the job.
# - "Nothing lost" means the same numbers, and `==` tests it.
# - Saving every √(2 · save · M) seconds loses the least, and M shrinks with every node.
#
# ## Questions
#
# 1. Why does the grader trust Slurm's records more than your log?
# 2. What happens if the ranks need 90 seconds to save and the warning comes 60 seconds before the limit?
# 3. Your cluster doubles the nodes of a job. How do the interval and the share lost change?
#
# You can now plan a training run, split it over GPUs, and prove that it computes the same. You can bring it through a night
# on a shared cluster. For your own runs, see [submit/README.md](../submit/README.md) and
# [submit/FAULTS.md](../submit/FAULTS.md). Next: [lesson 22](22_train_it.ipynb), the capstone, uses all of this.

# %%
cluster.close()
