#!/usr/bin/env bash
# JupyterLab and TensorBoard on a compute node; the log says what to type on your own machine to reach them.
#
#     sbatch --gpus-per-node=1 --cpus-per-task=16 --time=02:00:00 submit/lab.sh [FOLDER]
#
# Both listen on the node itself alone, and ssh takes you there through the login node. Where ssh to compute nodes is not allowed,
# COURSE_LISTEN=0.0.0.0 lets JupyterLab, which asks for the token, listen to the network, and leaves out TensorBoard, which asks for
# none.
# The token is the same every time, in a file that only you can read; neither the log nor the process list has it.
#SBATCH --job-name=lab
#SBATCH --output=slurm-%x-%j.log
#SBATCH --open-mode=append
#SBATCH --time=02:00:00
#SBATCH --signal=B:USR1@60
set -euo pipefail

# Slurm runs a copy of this file: the others lie where sbatch was called, or where it found this one
called=$(scontrol show job "${SLURM_JOB_ID:-none}" 2> /dev/null | sed -n 's/^ *Command=//p' || true)
while [[ $called == *.sh* && ! -f $(dirname "${called%.sh*}")/common.sh ]]; do called=${called%.sh*}; done       # its path, then words
for folder in "$(dirname "${BASH_SOURCE[0]}")" "${SLURM_SUBMIT_DIR:-.}"{/submit,} "$(dirname "${called%.sh*}")"; do
    [ ! -f "$folder/common.sh" ] || break
done
source "$folder/common.sh"

folder=${1:-$root}
listen=${COURSE_LISTEN:-127.0.0.1}
secret=${XDG_STATE_HOME:-$HOME/.local/state}/course/lab-token
(
    umask 077
    mkdir -p "$(dirname "$secret")"
    [ -s "$secret" ] || od -An -N24 -tx1 /dev/urandom | tr -d ' \n' > "$secret"
)
JUPYTER_TOKEN=$(cat "$secret")
export JUPYTER_TOKEN

run=(${before[@]+"${before[@]}"} "$python")
read -r lab board < <("${run[@]}" -c 'import socket
ports = [socket.socket() for _ in range(2)]
for port in ports: port.bind(("", 0))
print(*(port.getsockname()[1] for port in ports))')
settings=$("${run[@]}" -c 'from importlib.util import find_spec
print(find_spec("course.lab").submodule_search_locations[0])')/jupyterlab
extra=()
[ "$(id -u)" != 0 ] || extra=(--allow-root)
"${run[@]}" -m jupyter lab --no-browser --ip="$listen" --port="$lab" --ServerApp.port_retries=0 \
    --ServerApp.root_dir="$folder" --LabApp.app_settings_dir="$settings" ${extra[@]+"${extra[@]}"} &
servers=($!)
if [ "$listen" = 127.0.0.1 ]; then
    "${run[@]}" -m tensorboard.main --logdir "$folder/runs" --host 127.0.0.1 --port "$board" &
    servers+=($!)
fi
trap 'kill "${servers[@]}" 2> /dev/null || true' EXIT
trap 'echo "one minute to the time limit: save your notebooks"' USR1

node=$(hostname) login=${SLURM_SUBMIT_HOST:-LOGIN-NODE}
echo
echo "On your own machine:"
if [ "$listen" = 127.0.0.1 ]; then
    echo "    ssh -N -J $USER@$login -L 8888:127.0.0.1:$lab -L 6006:127.0.0.1:$board $USER@$node"
    echo "then http://127.0.0.1:8888 is JupyterLab and http://127.0.0.1:6006 TensorBoard."
else
    echo "    ssh -N -L 8888:$node:$lab $USER@$login"
    echo "then http://127.0.0.1:8888 is JupyterLab."
fi
echo "The token that it asks for once:  ssh $USER@$login cat '$secret'"
echo "If 8888 is taken on your machine, write another number there. To end both: scancel ${SLURM_JOB_ID:-}"
echo
until wait -n "${servers[@]}"; do                    # a signal ends the wait, too; then all servers are still there
    for server in "${servers[@]}"; do
        kill -0 "$server" 2> /dev/null || fail "a server has ended by itself: its last words are above"
    done
done
