"""Known wrong answers of lesson 18, of what Slurm asks for."""

from course.lab.checks.exercise import Mistake

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

MISTAKES = {
    "rendezvous": (
        Mistake("its own node", FIRST, '"MASTER_ADDR": environ["SLURMD_NODENAME"]',
                "SLURMD_NODENAME is the task's own node: ranks of the second node would wait for one another there; all have "
                "to name the same node, the first of SLURM_JOB_NODELIST"),
        Mistake("its own address", FIRST, '"MASTER_ADDR": environ["SLURM_LAUNCH_NODE_IPADDR"]',
                "SLURM_LAUNCH_NODE_IPADDR is where srun was called; the exercise asks for the first node of SLURM_JOB_NODELIST"),
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
        Mistake("nodes times tasks", '"WORLD_SIZE": environ["SLURM_NTASKS"]',
                '"WORLD_SIZE": str(int(environ["SLURM_NNODES"]) * int(environ["SLURM_NTASKS_PER_NODE"]))',
                "nodes need not have equally many tasks: SLURM_NTASKS is how many there are"),
        Mistake("two ports for all jobs", "% 12000)", "% 2)",
                "the job after the next has the same port, and may run beside it on the node: take the number modulo thousands"),
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
        Mistake("gone before it is put back", "    sleep 60\n", "",
                "scontrol only asks Slurm to put the job back: sleep until that ends it, or the job may be over before"),
        Mistake("any failure is 1", 'exit "$status"\n', '[ "$status" -eq 0 ] || exit 1\n',
                "that it failed is not how: 137 says that a rank was killed. End with the status of srun, exit \"$status\""),
        Mistake("all is well", 'exit "$status"\n', "echo done\n",
                "the script's status is that of its last command, so that a failed job looks complete: end with srun's status"),
    ),
}
