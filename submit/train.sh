#!/usr/bin/env bash
# Train a preset on one GPU, one node or many, as sbatch's own options say: a task for each GPU, or as many as asked for on CPUs.
#
#     sbatch --gpus-per-node=1 submit/train.sh vit-short                                       one GPU
#     sbatch --nodes=2 --gpus-per-node=4 --ntasks-per-node=4 --cpus-per-task=16 submit/train.sh vit-mp parallel.tp=4
#     sbatch --nodes=2 --ntasks-per-node=2 --cpus-per-task=4 submit/train.sh vit-demo           CPUs
#     bash submit/train.sh vit-short                                   without Slurm: all GPUs of this machine, or GPUS=2
#
# A minute before the time limit the run saves and the job goes back into the queue; it then goes on where it stopped.
#SBATCH --job-name=train
#SBATCH --output=slurm-%x-%j.log
#SBATCH --open-mode=append
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@60
#SBATCH --requeue
set -euo pipefail

# Slurm runs a copy of this file: the others lie where sbatch was called, or where it found this one
called=$(scontrol show job "${SLURM_JOB_ID:-none}" 2> /dev/null | sed -n 's/^ *Command=//p' || true)
while [[ $called == *.sh* && ! -f $(dirname "${called%.sh*}")/common.sh ]]; do called=${called%.sh*}; done       # its path, then words
for folder in "$(dirname "${BASH_SOURCE[0]}")" "${SLURM_SUBMIT_DIR:-.}"{/submit,} "$(dirname "${called%.sh*}")"; do
    [ ! -f "$folder/common.sh" ] || break
done
source "$folder/common.sh"

preset=${1:?"which preset? \`course presets\` lists them: sbatch submit/train.sh vit-demo"}
shift
course_on_ranks train "$preset" ${site_settings[@]+"${site_settings[@]}"} "$@"
to_be_continued
