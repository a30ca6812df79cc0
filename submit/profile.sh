#!/usr/bin/env bash
# Look into some steps of a preset on the GPUs of this machine: with nsys where it is installed, else with PyTorch's profiler.
#
#     bash submit/profile.sh PRESET [KEY=VALUE ...]             GPUS=4 in front: on four of them
#
# nsys leaves runs/nsys/PRESET.nsys-rep for Nsight Systems: kernels, launches, and the parts of each step as NVTX ranges. Samples
# of the host's call stack (-s) are left out, since they slow down what is measured.
set -euo pipefail
preset=${1:?which preset? \`course presets\` lists them}
shift
gpus=${GPUS:-1}
run=(course)
if [ "$gpus" -gt 1 ]; then
    run=(torchrun --standalone --nproc-per-node "$gpus" -m course.cli)
fi
if command -v nsys > /dev/null; then
    mkdir -p runs/nsys
    nsys profile -s none -t nvtx,cuda --force-overwrite=true -o "runs/nsys/$preset" \
        "${run[@]}" train "$preset" train.steps=20 log.name=nsys checkpoint.resume=false "$@"
    nsys stats --report nvtx_sum,cuda_gpu_kern_sum "runs/nsys/$preset.nsys-rep"
else
    echo "nsys is not installed here: PyTorch's profiler instead"
    "${run[@]}" profile "$preset" "$@"
fi
