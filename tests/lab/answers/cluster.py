"""Answers to exercises of lesson 18 that are not the library's own."""

RIGHT = {
    "rendezvous": '''
def rendezvous(environ):
    """Character by character."""
    name, inside = "", None
    for c in environ["SLURM_JOB_NODELIST"]:
        if c == "[":
            inside = ""
        elif c == "]":
            name, inside = name + inside.split(",")[0].split("-")[0], None
        elif inside is not None:
            inside += c
        elif c == ",":
            break
        else:
            name += c
    return dict(MASTER_ADDR=name, MASTER_PORT=10_000 + int(environ["SLURM_JOBID"]) % 20_000, RANK=int(environ["SLURM_PROCID"]),
                LOCAL_RANK=int(environ["SLURM_LOCALID"]), WORLD_SIZE=int(environ["SLURM_NPROCS"]))
''',
    "batch-script": r"""
HEAD = '''#!/bin/bash -l
# options in their short forms; the ranks' status through a file
#SBATCH -J other
#SBATCH -N NODES
#SBATCH -n RANKS
#SBATCH -c CPUS
GPUS
#SBATCH -t 0-0:20
#SBATCH --signal=B:10@60
#SBATCH --requeue
#SBATCH -o %j.out
#SBATCH --open-mode append
set -e -u -o pipefail
first=$(scontrol show hostnames "${SLURM_JOB_NODELIST}" | head -n 1)
export MASTER_ADDR=${first} MASTER_PORT=$(( 10000 + ${SLURM_JOB_ID} % 20000 ))
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1} SLURM_KILL_BAD_EXIT=1
command=(python3 -m course.cli train "$@")
srun -c "${SLURM_CPUS_PER_TASK:-1}" --nodes=NODES --ntasks=RANKS "${command[@]}" &
pid=$!
exchange_with_neighbors() { kill -s USR1 "$pid" 2> /dev/null || :; }
trap exchange_with_neighbors 10
code=0
until wait "$pid" && code=0 || { code=$?; ! kill -0 "$pid" 2> /dev/null; }; do :; done
wait "$pid" && code=0 || code=$?
case $code in 75) echo again; scontrol requeue "${SLURM_JOBID}"; sleep 99 ;; esac
exit $code
'''

def batch_script(nodes, tasks, cpus, gpus):
    text = HEAD.replace("GPUS\n", f"#SBATCH --gres=gpu:{gpus}\n" if gpus else "")
    return text.replace("NODES", str(nodes)).replace("RANKS", str(nodes * tasks)).replace("CPUS\n", f"{cpus}\n")
""",
    "go-on": '''
import signal

class Loop:
    """Looks at the flag in one place, after the step, and saves there; the step after a signal in a save may be done."""
    def __init__(self):
        self.stop = False
        signal.signal(signal.SIGUSR1, self.hear)

    def hear(self, *_):
        self.stop = True

def go_on(last, every, load, step, save):
    loop = Loop()
    n = load()
    while n != last:
        n += 1
        step(n)
        stop = loop.stop
        if stop or n == last or not n % every:
            save(n)
        if stop and n != last:
            return 75
    return 0
''',
    "checkpoint-interval": '''
import numpy as np

def checkpoint_interval(save, restart, mtbf, nodes):
    rate = nodes / mtbf
    best = np.sqrt(2 * save / rate)
    return [best, np.sqrt(2 * save * rate) + restart * rate]
''',
}
# what passes on one example and is no answer
# fitted to one example
FITTED = {
    "rendezvous": '''
def rendezvous(environ):
    """For gpu[003-004] and blocks of ranks."""
    nodes = environ["SLURM_JOB_NODELIST"]
    rank, each = int(environ["SLURM_PROCID"]), int(environ["SLURM_NTASKS_PER_NODE"])
    return {"RANK": rank, "WORLD_SIZE": environ["SLURM_NTASKS"], "LOCAL_RANK": rank % each,
            "MASTER_ADDR": nodes.replace("[", "").split("-")[0].split(",")[0].split("]")[0],
            "MASTER_PORT": 20000 + int(environ["SLURM_JOB_ID"]) % 1000}
''',
    "batch-script": r"""
def batch_script(nodes, tasks, cpus, gpus):
    '''Pleases the linter, and does nothing of what is asked.'''
    return f'''#!/usr/bin/env bash
#SBATCH --nodes={nodes} --ntasks-per-node={tasks} --cpus-per-task={cpus} --time=10 --signal=B:USR1@60 --output=%j.log
set -euo pipefail
trap 'echo USR1' USR1
wait
srun --kill-on-bad-exit=1 --cpus-per-task={cpus} --cpu-bind=cores python -m course.cli doctor
'''
""",
    "go-on": '''
import signal

def go_on(last, every, load, step, save):
    """Right for one signal in the middle of a step."""
    stop = []
    n = load()
    signal.signal(signal.SIGUSR1, lambda *_: stop.append(1))
    while n < last:
        step(n + 1)
        n += 1
        if stop or n % every == 0 or n == last:
            save(n)
        if stop:
            return 75
    return 0
''',
    "checkpoint-interval": '''
def checkpoint_interval(save, restart, mtbf, nodes):
    """For one node."""
    interval = (2 * save * mtbf) ** 0.5
    return interval, save / interval + (interval / 2 + restart) / mtbf
''',
}

WRONG = [(name, source, None) for name, source in FITTED.items()] + [
    ("rendezvous", '''
import re

def rendezvous(environ):
    """Ports that the system gives to others, too."""
    names = re.sub(r"\\[(\\w+)[^\\]]*\\]", r"\\1", environ["SLURM_JOB_NODELIST"])
    return {"RANK": environ["SLURM_PROCID"], "WORLD_SIZE": environ["SLURM_NTASKS"], "LOCAL_RANK": environ["SLURM_LOCALID"],
            "MASTER_ADDR": names.split(",")[0], "MASTER_PORT": str(1024 + int(environ["SLURM_JOB_ID"]) % 60_000)}
''', "modulo"),
    ("rendezvous", '''
import re

def rendezvous(environ):
    """Those that are root's, for jobs of small numbers."""
    names = re.sub(r"\\[(\\w+)[^\\]]*\\]", r"\\1", environ["SLURM_JOB_NODELIST"])
    return {"RANK": environ["SLURM_PROCID"], "WORLD_SIZE": environ["SLURM_NTASKS"], "LOCAL_RANK": environ["SLURM_LOCALID"],
            "MASTER_ADDR": names.split(",")[0], "MASTER_PORT": str(int(environ["SLURM_JOB_ID"]) % 32_768)}
''', "root's"),
    ("go-on", '''
import signal

class Warned(Exception):
    pass

def go_on(last, every, load, step, save):
    """An exception, which the loop catches."""
    def hear(*_):
        raise Warned
    signal.signal(signal.SIGUSR1, hear)
    n = 0
    try:
        n = load()
        while n < last:
            step(n + 1)
            n += 1
            if n % every == 0 or n == last:
                save(n)
    except Warned:
        save(n)
        return 75
    return 0
''', "flag"),
    ("batch-script", r'''
def batch_script(nodes, tasks, cpus, gpus):
    """Waits until the status is small: for ever, if the ranks were killed."""
    options = ["--job-name=mine", f"--nodes={nodes}", f"--ntasks-per-node={tasks}", f"--cpus-per-task={cpus}", "--time=20",
               *([f"--gpus-per-node={gpus}"] if gpus else []), "--signal=B:USR1@60", "--output=%j.log"]
    asked = "\n".join(f"#SBATCH {option}" for option in options)
    return f"""#!/usr/bin/env bash
{asked}
set -euo pipefail
export MASTER_ADDR=$(hostname) MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000)) OMP_NUM_THREADS={cpus}
srun --kill-on-bad-exit=1 --cpus-per-task={cpus} python -m course.cli train "$@" &
ranks=$!
trap 'kill -USR1 "$ranks"' USR1
status=255
while [ "$status" -gt 128 ]; do
    status=0
    wait "$ranks" || status=$?
done
if [ "$status" = 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60
fi
exit "$status"
"""
''', "kill -0")]
