#!/usr/bin/env bash
# All benchmarks of the parallel layouts on one node: bash submit/bench_parallel.sh FOLDER [KIND...]
# On 1, 2, 4 ... of the GPUs that this job sees: those in CUDA_VISIBLE_DEVICES, else all. Jobs of few GPUs run side by side.
set -u
out=$1; shift
kinds=${*:-tp tp_vit cp dp pp zero fsdp}
IFS=, read -ra gpus <<< "${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2> /dev/null | paste -sd,)}"
[ ${#gpus[@]} -gt 0 ] || { echo "there is no GPU here (nvidia-smi finds none): run it in a job with some"; exit 1; }
mkdir -p "$out"
bench() {  # GPUS COUNT PORT KIND
    CUDA_VISIBLE_DEVICES=$1 timeout 400 torchrun --nproc-per-node "$2" --master-port "$3" \
        -m course.bench.layouts "$4" "$out/$4_$2.json" 2> "$out/$4_$2.log" || { echo "$4 on $2 GPUs failed:"; grep -v Warning "$out/$4_$2.log" | grep -m4 Error; }
}
side_by_side() {  # COUNT
    local count=$1 places=$((${#gpus[@]} / $1)) job=0 kind
    for kind in $kinds; do
        [ "$count" = 1 ] && [ "$kind" = zero ] && continue
        bench "$(IFS=,; echo "${gpus[*]:job * count:count}")" "$count" $((29700 + 10 * count + job)) "$kind" &
        job=$(((job + 1) % places))
        [ $job = 0 ] && wait
    done
    wait
}
for ((count = 1; count <= ${#gpus[@]}; count *= 2)); do side_by_side "$count"; done
