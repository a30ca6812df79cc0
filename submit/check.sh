#!/usr/bin/env bash
# Check a lesson's notebook on real ranks, and write NOTEBOOK.result.json beside it, to hand in with it.
#
#     sbatch --nodes=2 --ntasks-per-node=2 --cpus-per-task=4 submit/check.sh notebooks/10_tensor_parallel_mine.ipynb
#     GPUS=2 bash submit/check.sh notebooks/10_tensor_parallel_mine.ipynb          without Slurm: two ranks of this machine
#
# Exercises with ranks run on all tasks of the job, two or four, each in a step of its own with three minutes; the others as
# `course check` runs them. Save the notebook first: the result is of the file as it is now. On ranks nothing isolates an answer:
# a notebook outside your course's notebooks folder is refused, unless --trust follows its name.
#SBATCH --job-name=check
#SBATCH --output=slurm-%x-%j.log
#SBATCH --open-mode=append
#SBATCH --time=00:30:00
#SBATCH --signal=B:USR1@60
set -euo pipefail

case ${1:-} in
    "") echo "submit: which notebook? sbatch --ntasks=4 submit/check.sh notebooks/10_tensor_parallel_mine.ipynb" >&2; exit 1 ;;
    -h | --help) sed -n '2,/^#SBATCH/{/^#SBATCH/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"; exit ;;
esac

# Slurm runs a copy of this file: the others lie where sbatch was called, or where it found this one
called=$(scontrol show job "${SLURM_JOB_ID:-none}" 2> /dev/null | sed -n 's/^ *Command=//p' || true)
while [[ $called == *.sh* && ! -f $(dirname "${called%.sh*}")/common.sh ]]; do called=${called%.sh*}; done       # its path, then words
for folder in "$(dirname "${BASH_SOURCE[0]}")" "${SLURM_SUBMIT_DIR:-.}"{/submit,} "$(dirname "${called%.sh*}")"; do
    [ ! -f "$folder/common.sh" ] || break
done
source "$folder/common.sh"

notebook=$1
shift                                                                        # what is left is for `course check`
[ -f "$notebook" ] || fail "there is no $notebook: give the path of your notebook"
found=$(mktemp -d "$(dirname "$notebook")/.check-XXXXXX")                    # where all nodes see it
trap 'rm -rf "$found"' EXIT
course=(${before[@]+"${before[@]}"} "$python" -m course.cli)
[ -z "${SLURM_JOB_ID:-}" ] || srun_options+=(--time=3)                       # minutes of a step: an answer may never end
names=$("${course[@]}" check "$notebook" "$@" --list-ranks)
for name in $names; do
    status=0
    course_on_ranks check "$notebook" "$@" --exercise "$name" --on-ranks "$found" || status=$?
    [ "$status" = 0 ] || echo "$name: its step failed; what it said is above"
    [ "$status" != 138 ] || fail "the time limit came before all was checked: sbatch --time=01:00:00"       # 128 + USR1
    trap - USR1                                      # of this step; the next one has its own
done
"${course[@]}" check "$notebook" "$@" --result "$found"
