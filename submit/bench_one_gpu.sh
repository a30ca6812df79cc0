#!/usr/bin/env bash
# Most of what the lessons and the README say of one GPU, measured again on yours, with .venv activated:
#     bash submit/bench_one_gpu.sh FOLDER [PART...]
# Parts: ceilings ladder gpt dit loaders fp8_speed fused_kernels loss_curves loss_alignment recorded_profiles convergence; an hour on an H200, less on several. Each leaves FOLDER/PART.json and PART.log.
set -u
out=$1; shift
parts=${*:-ceilings ladder gpt dit loaders fp8_speed fused_kernels loss_curves loss_alignment recorded_profiles convergence}
nvidia-smi -L > /dev/null 2>&1 || { echo "there is no GPU here (nvidia-smi finds none): run it in a job with one"; exit 1; }
mkdir -p "$out"
for part in $parts; do
    case $part in
        ladder) command=(course bench vit --out "$out/ladder.json") ;;
        gpt | dit) command=(course bench "$part" --out "$out/$part.json") ;;
        ceilings) command=(course bench ceilings --out "$out/ceilings.json") ;;
        loaders) command=(course bench loaders --out "$out/loaders.json") ;;
        fp8_speed | fused_kernels | loss_curves | loss_alignment | recorded_profiles) command=(python -m "experiments.$part" "$out/$part.json") ;;
        convergence) command=(python -m experiments.convergence jobs=15 device=cuda "out=$out/convergence.json") ;;
        *) echo "$part is none of: ceilings ladder gpt dit loaders fp8_speed fused_kernels loss_curves loss_alignment recorded_profiles convergence"; exit 1 ;;
    esac
    echo "== ${command[*]}"
    "${command[@]}" > "$out/$part.log" 2>&1 || { echo "$part failed:"; tail -n 3 "$out/$part.log"; }
done
