#!/usr/bin/env bash
# One run for each line of a file of settings, as a job array; lines that are empty or begin with # do not count.
#
#     sbatch --array=1-12 --gpus-per-node=1 submit/sweep.sh submit/scaling.txt vit-short [KEY=VALUE ...]
#     bash submit/sweep.sh submit/scaling.txt vit-demo [KEY=VALUE ...]                without Slurm: one after another
#
# Run N is runs/PRESET/sweep-N, unless its line names it. What stands on the command line goes before the line's settings.
# --array=1-12%4 lets four run at a time. Each task of the array is warned, requeued and resumed by itself, as in train.sh.
#SBATCH --job-name=sweep
#SBATCH --output=slurm-%x-%A_%a.log
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

file=${1:?"which file of settings? sbatch --array=1-12 submit/sweep.sh submit/scaling.txt vit-short"}
preset=${2:?"which preset? sbatch --array=1-12 submit/sweep.sh $file vit-short"}
shift 2
mapfile -t lines < <(grep -vE '^[[:space:]]*(#|$)' "$file")
[ ${#lines[@]} -gt 0 ] || fail "$file has no settings: it needs a line for each run, such as optim.lr=1e-3"

run_line() {  # NUMBER SETTING...
    local number=$1 words
    shift
    if [ "$number" -lt 1 ] || [ "$number" -gt ${#lines[@]} ]; then
        fail "$file has ${#lines[@]} runs and no number $number: sbatch --array=1-${#lines[@]}"
    fi
    mapfile -t words < <(xargs -n 1 printf '%s\n' <<< "${lines[number - 1]}")      # split as by a shell, but nothing expanded
    echo "run $number of ${#lines[@]}: ${lines[number - 1]}"
    course_on_ranks train "$preset" ${site_settings[@]+"${site_settings[@]}"} "log.name=sweep-$number" "$@" "${words[@]}"
}

if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    run_line "$SLURM_ARRAY_TASK_ID" "$@"
    to_be_continued
else
    [ -z "${SLURM_JOB_ID:-}" ] || fail "this is one job: sbatch --array=1-${#lines[@]} makes one for each run"
    for ((number = 1; number <= ${#lines[@]}; number++)); do run_line "$number" "$@"; done
fi
