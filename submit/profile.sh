#!/usr/bin/env bash
# Look into some steps of a preset: with nsys where it is installed, else with PyTorch's profiler.
#
#     sbatch --gpus-per-node=4 --ntasks-per-node=4 --cpus-per-task=16 submit/profile.sh vit-opt [KEY=VALUE ...]
#     bash submit/profile.sh vit-opt [KEY=VALUE ...]       without Slurm: all GPUs of this machine, or GPUS=2
#
# nsys leaves runs/nsys/PRESET*.nsys-rep for Nsight Systems: kernels, launches, and the parts of each step as NVTX ranges. Under Slurm
# there is one for each rank and job; without it one for all ranks, which replaces that of the last call. The run itself is runs/PRESET/nsys-DATE-TIME, a new one each time. Samples of the host's call stack (-s) are left out, since they slow down what is measured.
#SBATCH --job-name=profile
#SBATCH --output=slurm-%x-%j.log
#SBATCH --open-mode=append
#SBATCH --time=00:20:00
#SBATCH --signal=B:USR1@60
set -euo pipefail

# Slurm runs a copy of this file: the others lie where sbatch was called, or where it found this one
called=$(scontrol show job "${SLURM_JOB_ID:-none}" 2> /dev/null | sed -n 's/^ *Command=//p' || true)
while [[ $called == *.sh* && ! -f $(dirname "${called%.sh*}")/common.sh ]]; do called=${called%.sh*}; done       # its path, then words
for folder in "$(dirname "${BASH_SOURCE[0]}")" "${SLURM_SUBMIT_DIR:-.}"{/submit,} "$(dirname "${called%.sh*}")"; do
    [ ! -f "$folder/common.sh" ] || break
done
source "$folder/common.sh"

preset=${1:?"which preset? \`course presets\` lists them: sbatch submit/profile.sh vit-opt"}
shift
if ${before[@]+"${before[@]}"} sh -c 'command -v nsys' > /dev/null; then
    mkdir -p runs/nsys
    report=$(basename "$preset" .yaml) report=runs/nsys/${report//%/_}${SLURM_JOB_ID:+-$SLURM_JOB_ID-rank}
    tool=(nsys profile -s none -t nvtx,cuda --force-overwrite=true -o "$report${SLURM_JOB_ID:+%q{SLURM_PROCID\}}")
    name=nsys-${SLURM_JOB_ID:+$SLURM_JOB_ID-}$(date +%Y%m%d-%H%M%S)            # of a run of its own each time
    course_on_ranks train "$preset" train.steps=20 "log.name=$name" checkpoint.resume=false \
        ${site_settings[@]+"${site_settings[@]}"} "$@"
    ${before[@]+"${before[@]}"} nsys stats --report nvtx_sum,cuda_gpu_kern_sum "$report${SLURM_JOB_ID:+0}.nsys-rep"
else
    echo "nsys is not installed here: PyTorch's profiler instead"
    course_on_ranks profile "$preset" ${site_settings[@]+"${site_settings[@]}"} "$@"
fi
