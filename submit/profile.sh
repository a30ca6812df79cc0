#!/usr/bin/env bash
# Look into some steps of a preset: with nsys where it is installed, else with PyTorch's profiler.
#
#     sbatch --gpus-per-node=4 --ntasks-per-node=4 --cpus-per-task=16 submit/profile.sh vit-opt [KEY=VALUE ...]
#     bash submit/profile.sh vit-opt [KEY=VALUE ...]       without Slurm: all GPUs of this machine, or GPUS=2
#
# It records profile.steps=3 steps after the first profile.after=10, of every rank; both are settings. The run saves no checkpoint.
# nsys leaves one report for each rank in runs/nsys, PRESET-rankN.nsys-rep, in a job PRESET-JOB-rankN.nsys-rep. Open it in Nsight
# Systems: the parts of each step are NVTX ranges named data, compute, gradients, optimizer. Reports without a job replace older ones.
# nsys does not sample the host's call stack (-s none), which would slow down what is measured; kernels of CUDA graphs are shown.
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
    report=$(basename "$preset" .yaml) report=runs/nsys/${report//%/_}${SLURM_JOB_ID:+-$SLURM_JOB_ID}-rank
    rank=0                                           # torchrun or srun, where there are several, tells nsys each one's
    if [ -n "${SLURM_JOB_ID:-}" ]; then rank='%q{SLURM_PROCID}'; elif [ "$tasks" -gt 1 ]; then rank='%q{RANK}'; fi
    tool=(nsys profile --capture-range=cudaProfilerApi --capture-range-end=stop -s none -t nvtx,cuda --cuda-graph-trace=node
          --force-overwrite=true -o "$report$rank")
    course_on_ranks profile "$preset" profile.tool=nsys ${site_settings[@]+"${site_settings[@]}"} "$@"
    ${before[@]+"${before[@]}"} nsys stats --report nvtx_sum,cuda_gpu_kern_sum "${report}0.nsys-rep"
else
    echo "nsys is not installed here: PyTorch's profiler instead"
    course_on_ranks profile "$preset" ${site_settings[@]+"${site_settings[@]}"} "$@"
fi
