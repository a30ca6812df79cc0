# What the scripts of this folder share; they source it. It knows of no site: what differs between sites is in sites/NAME.sh.
#
# Sets: root (the course), gpus and tasks (of a node, at most), nodes, ranks (of the job), cpus (of a task), python, before and
# srun_options (what a container needs), and gives: fail SENTENCE, course_on_ranks COMMAND ARGUMENT..., to_be_continued.
set -euo pipefail

fail() {
    echo "submit: $*" >&2
    exit 1
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# --- the site: COURSE_SITE (a name or a file), else submit/site (a link to a file, or a file with a name in it), else generic
site_file() {
    local name=${COURSE_SITE:-}
    if [ -z "$name" ] && [ -L "$root/submit/site" ]; then
        name=$root/submit/site
    elif [ -z "$name" ] && [ -f "$root/submit/site" ]; then
        read -r name < "$root/submit/site" || true
    fi
    case ${name:=generic} in */*) echo "$name" ;; *) echo "$root/submit/sites/$name.sh" ;; esac
}

site_prepare() { :; }                                # a site's own replaces this one
site_settings=()                                     # settings that all runs of a site have, such as log.dir
COURSE_CONTAINER=${COURSE_CONTAINER:-none}
site=$(site_file)
[ -f "$site" ] || fail "there is no site ${COURSE_SITE:-$site}: COURSE_SITE names one of" \
    "$(cd "$root/submit/sites" && basename -a -s .sh -- *.sh | tr '\n' ' '), or the path of a file (submit/README.md says how to write one)"
# shellcheck disable=SC1090
source "$site"
set +u                                               # modules and conda's hooks look at what may not be set
site_prepare
set -u

# --- the resources: as many tasks on a node as it has GPUs; without GPUs as many as were asked for
count() {  # GPUs, as Slurm writes them: 4, a100:4, gpu:a100:4, a100:2,h100:2 -> how many
    local part total=0
    for part in ${1//,/ }; do
        part=${part%%(*}                             # gpu:4(IDX:0-3)
        case ${part##*:} in *[!0-9]* | '') total=$((total + 1)) ;; *) total=$((total + ${part##*:})) ;; esac
    done
    echo "$total"
}

spread() {  # numbers of several nodes, as Slurm writes them: 2(x3),1 -> 2 2 2 1
    local part times
    for part in ${1//,/ }; do
        times=1
        case $part in *"(x"*) times=${part#*"(x"} times=${times%)} ;; esac
        for ((; times > 0; times--)); do printf '%s ' "${part%%(*}"; done
    done
}

each=()
if [ -n "${SLURM_JOB_ID:-}" ]; then
    [ "${SLURM_HET_SIZE:-1}" -le 1 ] || fail "this is a heterogeneous job, of which only the first component would train:" \
        "submit a job of one kind of nodes, without \`#SBATCH hetjob\` and without \` : \` among sbatch's options"
    nodes=${SLURM_JOB_NUM_NODES:-1}
    gpus=$(count "${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-0}}")             # of this node, the first one
    tasks=${SLURM_NTASKS_PER_NODE:-$((gpus > 0 ? gpus : 1))}
    ranks=${SLURM_NTASKS:-$((nodes * tasks))}        # beside --ntasks the number on a node is the most that it may have
    if [ -n "${SLURM_NTASKS:-}" ]; then read -r -a each <<< "$(spread "${SLURM_TASKS_PER_NODE:-}")"; fi
    if [ ${#each[@]} != "$nodes" ] || [ $((0$(printf '+%s' ${each[@]+"${each[@]}"}))) != "$ranks" ]; then
        each=()                                      # it does not say, or speaks of something else: evenly, the first have more
        for ((node = 0; node < nodes; node++)); do each+=($(((ranks + nodes - 1 - node) / nodes))); done
    fi
    tasks=${each[0]} same=yes
    for number in "${each[@]}"; do
        [ "$number" = "${each[0]}" ] || same=
        if [ "$number" -gt "$tasks" ]; then tasks=$number; fi
    done
    if [ "$gpus" -gt 0 ] && [ "${each[0]}" -ne "$gpus" ]; then
        fail "a node of this job has $gpus GPUs and ${each[0]} tasks, and each GPU needs one:" \
            "sbatch --gpus-per-node=$gpus --ntasks-per-node=$gpus"
    fi
    if [ "$gpus" -gt 0 ] && [ -z "$same" ] && [ "${SLURM_GPUS_PER_TASK:-}" != 1 ] && [ "$(count "${SLURM_GPUS:-0}")" != "$ranks" ]; then
        fail "the tasks of this job are spread unevenly over its nodes (${each[*]}), so that some have others than GPUs:" \
            "sbatch --nodes=$nodes --gpus-per-node=$gpus --ntasks-per-node=$gpus"
    fi
    read -r -a on_node <<< "$(spread "${SLURM_JOB_CPUS_PER_NODE:-}")"
    [ ${#on_node[@]} = "$nodes" ] || on_node=("${SLURM_CPUS_ON_NODE:-$tasks}")   # of this node alone: the others may have other
    cpus=
    for node in "${!on_node[@]}"; do
        if [ "${on_node[node]}" -lt "${each[node]}" ]; then
            fail "a node of this job has ${on_node[node]} CPUs for ${each[node]} tasks: ask for them, too," \
                "sbatch --ntasks-per-node=$tasks --cpus-per-task=NUMBER"
        fi
        share=$((on_node[node] / (each[node] > 0 ? each[node] : 1)))
        if [ -z "$cpus" ] || [ "$share" -lt "$cpus" ]; then cpus=$share; fi      # as many as every task can have
    done
    cpus=${SLURM_CPUS_PER_TASK:-$cpus}
    if [ "$same" ]; then shown=$tasks; else shown=$(IFS=,; echo "${each[*]}"); fi
    echo "job $SLURM_JOB_ID: nodes ${SLURM_JOB_NODELIST:-unknown}, tasks on each: $shown"
else
    nodes=1
    gpus=${GPUS:-$({ nvidia-smi -L 2> /dev/null || true; } | wc -l)}
    tasks=$((gpus > 0 ? gpus : 1))
    cpus=$(($(getconf _NPROCESSORS_ONLN) / tasks))
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cpus > 0 ? cpus : 1))}          # else each rank takes all cores, and all are slow
unset RANK WORLD_SIZE LOCAL_RANK SLURM_CPU_BIND      # of whatever shell this was submitted from

# --- the container: what goes in front of each rank's command, and srun's options for it
before=()
srun_options=()
python=${COURSE_PYTHON:-}
mounts=("$root" "$PWD")
[ -z "${COURSE_MOUNTS:-}" ] || IFS=: read -r -a more <<< "$COURSE_MOUNTS"
mounts+=(${more[@]+"${more[@]}"})
[ "$COURSE_CONTAINER" = none ] || [ -n "${COURSE_IMAGE:-}" ] || fail "COURSE_CONTAINER=$COURSE_CONTAINER needs COURSE_IMAGE"
case $COURSE_CONTAINER in
    none)
        python=${python:-$root/.venv/bin/python}
        command -v "$python" > /dev/null || fail "there is no $python: say \`make env\` in $root first, or set COURSE_PYTHON"
        ;;
    apptainer)
        before=(apptainer exec --pwd "$PWD")
        for folder in "${mounts[@]}"; do before+=(--bind "$folder"); done
        [ "$gpus" = 0 ] || before+=(--nv)
        before+=("$COURSE_IMAGE")
        ;;
    shifter)
        before=(shifter "--image=$COURSE_IMAGE" ${COURSE_SHIFTER_MODULES:+"--module=$COURSE_SHIFTER_MODULES"})
        ;;
    podman-hpc)
        before=(podman-hpc run --rm --ipc=host --network=host --env-host --workdir "$PWD")
        for folder in "${mounts[@]}"; do before+=(--volume "$folder:$folder"); done
        # shellcheck disable=SC2206
        before+=(${COURSE_PODMAN_OPTIONS:-} "$COURSE_IMAGE")
        ;;
    enroot)
        before=(enroot start)
        for folder in "${mounts[@]}"; do before+=(--mount "$folder:$folder"); done
        before+=("$COURSE_IMAGE")
        ;;
    pyxis)                                           # NVIDIA's plugin of srun for Enroot
        list=$(for folder in "${mounts[@]}"; do printf '%s:%s,' "$folder" "$folder"; done)
        srun_options=("--container-image=$COURSE_IMAGE" "--container-mounts=${list%,}" "--container-workdir=$PWD")
        ;;
    *) fail "COURSE_CONTAINER=$COURSE_CONTAINER is none of: none, apptainer, shifter, podman-hpc, enroot, pyxis" ;;
esac
python=${python:-python3}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

# --- where ranks meet: the first node, at a port that this job has for itself
address() {
    local first found
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    if getent hosts "$first" > /dev/null; then echo "$first"; return; fi
    found=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')     # as Slurm reaches it
    if getent hosts "$found" > /dev/null; then echo "$found"; else echo 127.0.0.1; fi
}

# --- once on each rank: `course ARGUMENTS`, in front of which "${tool[@]}" stands; the exit status is the worst of the ranks
tool=()
stopped=
course_on_ranks() {
    if [ -z "${SLURM_JOB_ID:-}" ]; then
        local many=()
        # torchrun unpickles what is in its store: at a file of its own no other user writes to it
        [ "$tasks" = 1 ] || many=("$python" -m torch.distributed.run --rdzv-backend=c10d --rdzv-conf=store_type=file
                                  --local-addr=127.0.0.1 --nproc-per-node "$tasks" --no-python)
        # --no-python: so that "${tool[@]}" stands in front of each rank, not of all
        ${before[@]+"${before[@]}"} ${many[@]+"${many[@]}"} ${tool[@]+"${tool[@]}"} "$python" -m course.cli "$@"
        return
    fi
    MASTER_ADDR=$(address)
    MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))    # below the ports that systems give away
    while (: > "/dev/tcp/127.0.0.1/$MASTER_PORT") 2> /dev/null; do MASTER_PORT=$((MASTER_PORT + 1)); done    # somebody listens
    export MASTER_ADDR MASTER_PORT
    [ "$gpus" = 0 ] || srun_options+=(--gpu-bind=none)                           # ranks of a node reach each other's GPUs
    local step filter told status
    told=$(command -v python3 || echo "$python")
    exec 3> >(exec "$told" "$root/submit/causes.py")                             # of several tracebacks, first the cause
    filter=$!
    srun --kill-on-bad-exit=1 --label --export=ALL --nodes="$nodes" --ntasks="$ranks" --ntasks-per-node="$tasks" \
        --cpus-per-task="$cpus" --cpu-bind=cores ${srun_options[@]+"${srun_options[@]}"} \
        ${before[@]+"${before[@]}"} ${tool[@]+"${tool[@]}"} "$python" -m course.cli "$@" >&3 2>&3 &
    step=$!
    exec 3>&-
    # Slurm warns this shell (--signal=B:USR1@...), and srun passes the signal on to all ranks, which save and end
    trap 'again=yes; kill -USR1 "$step" || true' USR1
    while :; do
        again= status=0
        wait "$step" || status=$?
        [ -n "$again" ] || break                     # else it was the signal that ended the wait
    done
    trap '' USR1
    wait "$filter" || true
    if [ "$status" = 75 ]; then stopped=yes status=0; fi                         # all is saved (course/resilience/preemption.py)
    return "$status"
}

# --- if a signal stopped the ranks before their end: back into the queue, to go on from what was saved
to_be_continued() {
    [ -n "$stopped" ] || return 0
    echo "stopped before its end: job $SLURM_JOB_ID goes back into the queue, and on from its checkpoint"
    job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}        # by its own number one task is the whole array
    scontrol requeue "${job:-$SLURM_JOB_ID}" || fail "it may not: submit the same command again, which goes on from the checkpoint"
    sleep 60                                         # Slurm ends this shell meanwhile
}
