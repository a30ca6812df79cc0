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
                "SLURMD_NODENAME is the task's own node, so the ranks of the second node would wait for each other there: all "
                "ranks have to name the same node, the first of SLURM_JOB_NODELIST"),
        Mistake("its own address", FIRST, '"MASTER_ADDR": environ["SLURM_LAUNCH_NODE_IPADDR"]',
                "SLURM_LAUNCH_NODE_IPADDR is the node on which srun was called: the exercise asks for the first node of "
                "SLURM_JOB_NODELIST"),
        Mistake("up to the first comma", NAMES, NAMES[:-1] + '.split(",")[0])',
                "a comma inside brackets separates numbers, not names: gpu[003,017] is two nodes, and gpu[003 is none",
                stops="InvalidReturn"),
        Mistake("the list as it is", NAMES, '    names = environ["SLURM_JOB_NODELIST"]',
                "gpu[003-004] is a list, not the name of a node: its first node is gpu003", stops="InvalidReturn"),
        Mistake("zeros lost", NAMES, NAMES.replace("(\\w", "0*(\\w"),
                "the zeros belong to the name: gpu[003-004] begins with gpu003, and there may be no gpu3"),
        Mistake("the last node", NAMES, NAMES.replace("(\\w+)[^\\]]*", "[^\\]]*?(\\w+)"),
                "this is the last node in the brackets: rank 0 is on the first"),
        Mistake("rank modulo tasks", 'environ["SLURM_LOCALID"]',
                'str(int(environ["SLURM_PROCID"]) % int(environ["SLURM_NTASKS_PER_NODE"]))',
                "the rank modulo the tasks of a node is its local rank only if the ranks fill one node after another. With a "
                "cyclic distribution, two tasks of a node would take the same GPU: use SLURM_LOCALID"),
        Mistake("rank over nodes", 'environ["SLURM_LOCALID"]',
                'str(int(environ["SLURM_PROCID"]) // int(environ["SLURM_NNODES"]))',
                "the rank divided by the nodes is its number on the node only if Slurm deals ranks out in turn to nodes of equal "
                "size: use SLURM_LOCALID"),
        Mistake("nodes for ranks", '"WORLD_SIZE": environ["SLURM_NTASKS"]', '"WORLD_SIZE": environ["SLURM_NNODES"]',
                "WORLD_SIZE is the number of ranks, not of nodes: SLURM_NTASKS"),
        Mistake("nodes times tasks", '"WORLD_SIZE": environ["SLURM_NTASKS"]',
                '"WORLD_SIZE": str(int(environ["SLURM_NNODES"]) * int(environ["SLURM_NTASKS_PER_NODE"]))',
                "nodes may have different numbers of tasks: SLURM_NTASKS is the total"),
        Mistake("two ports for all jobs", "% 12000)", "% 2)",
                "every second job gets the same port, and two of them may run on one node: take the job's number modulo some "
                "thousands"),
        Mistake("the node's number for the rank", '"RANK": environ["SLURM_PROCID"]', '"RANK": environ["SLURM_NODEID"]',
                "SLURM_NODEID is the number of the node, which all its tasks share: SLURM_PROCID is the task's own number"),
        Mistake("a port that is written down", PORT, '"29500"',
                "29500 is every program's default, so a second job on the node cannot use it: compute the port from the job's "
                "number"),
        Mistake("a port of its own for each rank", PORT, 'str(20000 + int(environ["SLURM_PROCID"]))',
                "each rank uses another port, so they never meet: compute the port from what all ranks share, the job's number"),
        Mistake("a port beyond all ports", PORT, 'str(20000 + int(environ["SLURM_JOB_ID"]))',
                "job numbers go into the millions, but ports end at 65,535, and the system assigns those from 32,768 on to "
                "others: take the number modulo 12,000 or so", stops="InvalidReturn"),
        Mistake("Python's hash of a text", PORT, 'str(20000 + hash(environ["SLURM_JOB_ID"]) % 12000)',
                "Python's `hash` of a string differs in each process, so the ranks never meet: use "
                'int(environ["SLURM_JOB_ID"]) itself'),
    ),
    "batch-script": (
        Mistake("no srun", "srun --kill-on-bad-exit=1 --cpus-per-task=\"$SLURM_CPUS_PER_TASK\" --cpu-bind=cores python", "python",
                "the script itself runs once, on the first node: only srun starts the command for every task on every node"),
        Mistake("one CPU for all", '--cpus-per-task="$SLURM_CPUS_PER_TASK" ', "",
                "since Slurm 22.05, srun does not inherit --cpus-per-task from sbatch: each rank gets one core for itself, its "
                "threads and its loaders"),
        Mistake("threads unsaid", " OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK", "",
                "the ranks do not know how many threads to use: export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK"),
        Mistake("the address is kept", "export MASTER_ADDR MASTER_PORT OMP", "export MASTER_PORT OMP",
                "MASTER_ADDR is a variable of the script, but the ranks do not get it: export it"),
        Mistake("localhost", ADDRESS, "MASTER_ADDR=localhost\n",
                "localhost is another machine on each node: use the node on which the script runs, $(hostname), or the first "
                "of scontrol show hostnames"),
        Mistake("one port for all jobs", "MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))", "MASTER_PORT=29500",
                "two jobs that share a node cannot use the same port: compute it from the job's number"),
        Mistake("arguments without quotes", 'train "$@" &', "train $@ &",
                'without quotes, an argument with a space is split, and a star turns into file names: "$@"'),
        Mistake("one task", "--ntasks-per-node={tasks}", "--ntasks-per-node=1",
                "one task on a node is one rank: the other GPUs would be idle, and you would still pay for them"),
        Mistake("hours for minutes", "--time=00:20:00", "--time=20:00:00",
                "a time with three parts gives hours, minutes and seconds: twenty minutes are 00:20:00"),
        Mistake("a warning at another time", "USR1@60", "USR1@120",
                "the number after the @ is the number of seconds before the limit: 60 for a minute"),
        Mistake("GPUs not asked for", '*([f"--gpus-per-node={gpus}"] if gpus else []), ', "",
                "the script requests no GPUs, and Slurm gives a job only what it requests: add --gpus-per-node if gpus is not 0"),
        Mistake("GPUs where there are none", '*([f"--gpus-per-node={gpus}"] if gpus else [])', 'f"--gpus-per-node={gpus or 1}"',
                "if gpus is 0, the script still requests one: a cluster without GPUs refuses the job, or the job waits forever"),
        Mistake("a number that is not there yet", "ranks=$!\n" + TRAP, 'trap "kill -USR1 $ranks" USR1\nranks=$!\n',
                "in double quotes the shell replaces $ranks where the trap is set, and there it has no value: `set -u` ends the "
                "script. Use single quotes, in which it is replaced when the trap runs"),
        Mistake("in the foreground", SRUN + "ranks=$!\n" + TRAP + WAIT + AGAIN,
                TRAP.replace('"$ranks"', "%1") + "status=0\n" + SRUN.replace(" &\n", " || status=$?\n"),
                "bash runs a trap only when the command in the foreground has ended, and here that is srun, which ends at the "
                "time limit: start it in the background (srun ... &) and wait for it"),
        Mistake("nobody passes the warning on", TRAP, "trap 'echo soon' USR1\n",
                "the trap takes the signal and does not pass it on: add kill -USR1 to srun's process, which sends it to all "
                "ranks"),
        Mistake("one wait", AGAIN, "",
                "a signal ends `wait` with a status above 128, but the ranks still run: wait again. Otherwise the script ends, "
                "and Slurm stops the ranks while they save"),
        Mistake("requeued at once", TRAP, """trap 'kill -USR1 "$ranks"; scontrol requeue "$SLURM_JOB_ID"' USR1\n""",
                "the trap requeues the job while its ranks still save, and Slurm then stops them: wait for them first, then "
                "requeue if their status is 75"),
        Mistake("never requeued", REQUEUE, "",
                "nothing requeues the job when its ranks ended with 75: call scontrol requeue, and not in the background (`&`), "
                "where it ends with the script"),
        Mistake("requeued whatever happens", 'if [ "$status" = 75 ]; then', 'if [ "$status" != 0 ]; then',
                "a run that fails because of a mistake fails again each time: requeue only if the status is 75, which means "
                "that it was stopped and has saved"),
        Mistake("gone before it is put back", "    sleep 60\n", "",
                "scontrol only asks Slurm to requeue the job: sleep until Slurm ends the script, otherwise the job may finish "
                "first"),
        Mistake("any failure is 1", 'exit "$status"\n', '[ "$status" -eq 0 ] || exit 1\n',
                "a status of 1 hides why it failed, for example 137, for a rank that was killed: end with the status of srun, "
                'exit "$status"'),
        Mistake("all is well", 'exit "$status"\n', "echo done\n",
                "the script's status is that of its last command, so a failed job looks complete: end with srun's status"),
    ),
}
