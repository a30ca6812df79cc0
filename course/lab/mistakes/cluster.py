"""Known wrong answers of lesson 18."""

from course.lab.exercise import Mistake

NAMES = '    names = re.sub(r"\\[(\\w+)[^\\]]*\\]", r"\\1", environ["SLURM_JOB_NODELIST"])'
FIRST = '"MASTER_ADDR": names.split(",")[0]'
PORT = 'str(20000 + int(environ["SLURM_JOB_ID"]) % 12000)'
SRUN = 'srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --cpu-bind=cores python -m course.cli train "$@" &\n'
TRAP = """trap 'kill -USR1 "$ranks"' USR1\n"""
WAIT = 'status=0\nwait "$ranks" || status=$?\n'
AGAIN = """if [ "$status" -gt 128 ]; then
    status=0
    wait "$ranks" || status=$?
fi
"""
REQUEUE = """if [ "$status" = 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60
fi
"""
ADDRESS = "MASTER_ADDR=$(hostname)\n"
HANDLER = "        nonlocal asked\n        asked = True\n"
LOOP = "    while done < last and not asked:\n"
STOP = "    if saved < done:\n        save(done)\n"
STATUS = "    return 0 if done == last else 75\n"
LOST = "save / interval + (interval / 2 + restart) / between"

MISTAKES = {
    "rendezvous": (
        Mistake("its own node", FIRST, '"MASTER_ADDR": environ["SLURMD_NODENAME"]',
                "SLURMD_NODENAME is the task's own node: ranks of the second node would wait for one another there; all have "
                "to name the same node, the first of SLURM_JOB_NODELIST"),
        Mistake("its own address", FIRST, '"MASTER_ADDR": environ["SLURM_LAUNCH_NODE_IPADDR"]',
                "SLURM_LAUNCH_NODE_IPADDR is where srun was called; the exercise asks for the first node of "
                "SLURM_JOB_NODELIST"),
        Mistake("up to the first comma", NAMES, NAMES[:-1] + '.split(",")[0])',
                "a comma inside brackets parts numbers, not names: gpu[003,017] is two nodes, and has no node gpu[003"),
        Mistake("the list as it is", NAMES, '    names = environ["SLURM_JOB_NODELIST"]',
                "gpu[003-004] is a list, and no node is called so: its first node is gpu003"),
        Mistake("zeros lost", NAMES, NAMES.replace("(\\w", "0*(\\w"),
                "the zeros belong to the name: gpu[003-004] begins with gpu003, and there may be no gpu3"),
        Mistake("the last node", NAMES, NAMES.replace("(\\w+)[^\\]]*", "[^\\]]*?(\\w+)"),
                "this is the last node of the brackets: rank 0 is on the first"),
        Mistake("rank modulo tasks", 'environ["SLURM_LOCALID"]',
                'str(int(environ["SLURM_PROCID"]) % int(environ["SLURM_NTASKS_PER_NODE"]))',
                "the rank modulo the tasks of a node is its number there only if ranks fill one node after another; dealt out "
                "in turn (cyclic), two tasks of a node would take the same GPU. SLURM_LOCALID knows"),
        Mistake("nodes for ranks", '"WORLD_SIZE": environ["SLURM_NTASKS"]', '"WORLD_SIZE": environ["SLURM_NNODES"]',
                "WORLD_SIZE is the number of ranks, not of nodes: SLURM_NTASKS"),
        Mistake("the node's number for the rank", '"RANK": environ["SLURM_PROCID"]', '"RANK": environ["SLURM_NODEID"]',
                "SLURM_NODEID is the number of the node, which all its tasks share: SLURM_PROCID is the task's own"),
        Mistake("a port that is written down", PORT, '"29500"',
                "29500 is every program's default: a second job on the node cannot have it. Make it of the job's number"),
        Mistake("a port of its own for each rank", PORT, 'str(20000 + int(environ["SLURM_PROCID"]))',
                "each rank goes to another port, so that none meets another: make it of what all have in common, the job's "
                "number"),
        Mistake("a port beyond all ports", PORT, 'str(20000 + int(environ["SLURM_JOB_ID"]))',
                "numbers of jobs go into the millions and ports to 65,535, of which the system gives those from 32,768 on to "
                "others: take the number modulo 12,000 or so"),
        Mistake("Python's hash of a text", PORT, 'str(20000 + hash(environ["SLURM_JOB_ID"]) % 12000)',
                "in each process Python's `hash` of a text is another number, so that no rank meets another: take "
                "int(environ[\"SLURM_JOB_ID\"]) itself"),
    ),
    "batch-script": (
        Mistake("no srun", "srun --kill-on-bad-exit=1 --cpus-per-task=\"$SLURM_CPUS_PER_TASK\" --cpu-bind=cores python", "python",
                "the script itself runs once, on the first node: only srun starts the command on every task of every node"),
        Mistake("one CPU for all", '--cpus-per-task="$SLURM_CPUS_PER_TASK" ', "",
                "since Slurm 22.05 srun does not take --cpus-per-task over from sbatch: each rank has one core, for itself, "
                "its threads and its loaders"),
        Mistake("threads unsaid", " OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK", "",
                "nobody tells the ranks how many threads to compute with: export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK"),
        Mistake("the address is kept", "export MASTER_ADDR MASTER_PORT OMP", "export MASTER_PORT OMP",
                "MASTER_ADDR is a variable of the script, and not of the ranks: export it"),
        Mistake("localhost", ADDRESS, "MASTER_ADDR=localhost\n",
                "localhost is another machine on each node: name the one that the script runs on, $(hostname), or the first of "
                "scontrol show hostnames"),
        Mistake("one port for all jobs", "MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))", "MASTER_PORT=29500",
                "two jobs that share a node cannot have the same port: make it of the job's number"),
        Mistake("arguments without quotes", 'train "$@" &', "train $@ &",
                'without quotes an argument with a space falls apart and a star turns into file names: "$@"'),
        Mistake("one task", "--ntasks-per-node={tasks}", "--ntasks-per-node=1",
                "one task on a node is one rank: the other GPUs would do nothing, and be charged"),
        Mistake("hours for minutes", "--time=00:20:00", "--time=20:00:00",
                "a time in three parts is hours, minutes and seconds: twenty minutes are 00:20:00"),
        Mistake("a warning at another time", "USR1@60", "USR1@120",
                "the number after the @ is how many seconds before the limit the warning comes: 60 for a minute"),
        Mistake("GPUs not asked for", '*([f"--gpus-per-node={gpus}"] if gpus else []), ', "",
                "it asks for no GPUs, and Slurm gives a job only what it asks for: --gpus-per-node, where gpus is not 0"),
        Mistake("GPUs where there are none", '*([f"--gpus-per-node={gpus}"] if gpus else [])', 'f"--gpus-per-node={gpus or 1}"',
                "where gpus is 0 it still asks for one: on a cluster without GPUs such a job is refused, or waits for ever"),
        Mistake("in the foreground", SRUN + "ranks=$!\n" + TRAP + WAIT + AGAIN,
                TRAP.replace('"$ranks"', "%1") + "status=0\n" + SRUN.replace(" &\n", " || status=$?\n"),
                "bash runs a trap when the command in the foreground has ended, and here that is srun, at the time limit: "
                "start it in the background (srun ... &) and wait for it"),
        Mistake("nobody passes the warning on", TRAP, "trap 'echo soon' USR1\n",
                "the trap takes the signal and keeps it: pass it on, kill -USR1 to srun's process, which tells all ranks"),
        Mistake("one wait", AGAIN, "",
                "a signal ends `wait`, with a status above 128, and not the ranks: wait again, or the script ends, and Slurm "
                "ends the ranks while they save"),
        Mistake("requeued at once", TRAP, """trap 'kill -USR1 "$ranks"; scontrol requeue "$SLURM_JOB_ID"' USR1\n""",
                "the trap puts the job back while its ranks still save, and Slurm ends them for it: wait for them first, then "
                "requeue if their status is 75"),
        Mistake("never requeued", REQUEUE, "", "nobody puts the job back into the queue when its ranks ended with 75: scontrol "
                "requeue"),
        Mistake("requeued whatever happens", 'if [ "$status" = 75 ]; then', 'if [ "$status" != 0 ]; then',
                "a run that fails by a mistake fails again, and again: requeue only if the status is 75, which says that it "
                "was stopped and is saved"),
        Mistake("all is well", 'exit "$status"\n', "echo done\n",
                "the script's status is that of its last command, so that a failed job looks complete: end with srun's status"),
    ),
    "go-on": (
        Mistake("nobody listens", "    signal.signal(signal.SIGUSR1, hear)\n", "",
                "nobody listens for USR1, whose default is to end the process at once: signal.signal(signal.SIGUSR1, ...) "
                "first of all"),
        Mistake("listens after loading", "    signal.signal(signal.SIGUSR1, hear)\n    done = saved = load()\n",
                "    done = saved = load()\n    signal.signal(signal.SIGUSR1, hear)\n",
                "a signal may come while the checkpoint is loaded: begin to listen before"),
        Mistake("saves in the handler", HANDLER, HANDLER + "        save(done)\n",
                "the handler saves, in the middle of whatever the loop is at, a half-made step or another checkpoint: let it "
                "do no more than set a flag"),
        Mistake("leaves from the handler", HANDLER, HANDLER + "        raise SystemExit(75)\n",
                "the handler ends the process in the middle of a step or a save, and what was done since the newest checkpoint "
                "is lost: let it set a flag, and finish the step"),
        Mistake("stops without saving", STOP, STOP.replace("saved < done", "saved < done == last"),
                "it stops without saving, and the steps since the newest checkpoint are done again: save before you return"),
        Mistake("looks only when a checkpoint is due", LOOP, "    while done < last and not (asked and done == saved):\n",
                "it stops at the next regular checkpoint, for which the time may not be enough: look after every step, and "
                "save there"),
        Mistake("never stops", LOOP, "    while done < last:\n",
                "it hears the signal and goes on to the end: look at the flag after every step, and if the handler sets a "
                "variable of `go_on`, say `nonlocal` in it"),
        Mistake("from the start", "done = saved = load()", "done = saved = load() * 0",
                "load() says which step the checkpoint is of, and it begins with step 1 all the same: go on with the next one"),
        Mistake("the checkpoint's step again", LOOP, "    done = max(0, done - 1)\n" + LOOP,
                "the step that the checkpoint is of has been done: go on with the next one, load() + 1"),
        Mistake("saves every step", "        if done % every == 0:\n", "        if True:\n",
                "it saves after every step, which costs more than training: every `every` steps, and when it stops"),
        Mistake("saves twice", STOP, "    save(done)\n",
                "it may write a checkpoint that is there already: after a signal while it was saving, or while it loaded"),
        Mistake("always done", STATUS, "    return 0\n",
                "it says 0 when it was stopped, too, and nobody puts the job back into the queue: 75 unless step `last` is "
                "done"),
        Mistake("never done", STATUS, "    return 75 if asked else 0\n",
                "after a signal in the last step it says 75, and the job goes back into the queue for nothing: 0 when step "
                "`last` is done"),
    ),
    "checkpoint-interval": (
        Mistake("one node's failures", "mtbf / nodes", "mtbf", "the job stops when any of its nodes fails: so many times as "
                "often as one"),
        Mistake("more nodes fail less", "mtbf / nodes", "mtbf * nodes",
                "more nodes fail more often, not less: the time between failures of the job is mtbf / nodes"),
        Mistake("a whole interval is lost", "math.sqrt(2 * save * between)", "math.sqrt(save * between)",
                "a failure comes in the middle of an interval on average, so half of it is lost: with interval / 2 the minimum "
                "has a 2 under the root"),
        Mistake("no root", "math.sqrt(2 * save * between)", "2 * save * between", "the derivative is zero where interval² = 2 "
                "· save · between: take the root"),
        Mistake("restarts are free", LOST, "save / interval + interval / 2 / between",
                "each failure costs the restart, too, from the failure to the next step"),
        Mistake("the whole interval in the share", LOST, "save / interval + (interval + restart) / between",
                "a failure costs half an interval on average, not a whole one"),
        Mistake("saving is free", LOST, "(interval / 2 + restart) / between",
                "each interval costs one save, too: save / interval"),
        Mistake("the share of one node", LOST, "save / interval + (interval / 2 + restart) / mtbf",
                "the share counts the failures of one node: of the job there is one every mtbf / nodes seconds"),
        Mistake("hours", "return interval, ", "return interval / 3600, ", "the interval is to be in seconds, as what you are "
                "given"),
        Mistake("swapped", "return interval, " + LOST, f"return {LOST}, interval",
                "the two have changed places: first the seconds, then the share"),
        Mistake("percent", LOST, f"100 * ({LOST})", "the share is to be between 0 and 1, not in percent"),
    ),
}
