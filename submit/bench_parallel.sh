#!/usr/bin/env bash
# All benchmarks of the parallel layouts on one node with 4 GPUs: bash submit/bench_parallel.sh FOLDER [KIND...]
# Jobs of one GPU run side by side, then those of two, then those of all four one after the other.
set -u
out=$1; shift
kinds=${*:-tp tp_vit cp dp pp zero fsdp}
mkdir -p "$out"
bench() {  # GPUS COUNT PORT KIND
    CUDA_VISIBLE_DEVICES=$1 timeout 400 torchrun --nproc-per-node "$2" --master-port "$3" \
        -m course.bench.layouts "$4" "$out/$4_$2.json" 2> "$out/$4_$2.log" || { echo "$4 on $2 GPUs failed:"; grep -v Warning "$out/$4_$2.log" | grep -m4 Error; }
}
side_by_side() {  # COUNT, then GPUS of each job
    local count=$1 job=0 kind; shift
    local groups=("$@")
    for kind in $kinds; do
        [ "$count" = 1 ] && [ "$kind" = zero ] && continue
        bench "${groups[job]}" "$count" $((29700 + 10 * count + job)) "$kind" &
        job=$(((job + 1) % ${#groups[@]}))
        [ $job = 0 ] && wait
    done
    wait
}
side_by_side 1 0 1 2 3
side_by_side 2 0,1 2,3
for kind in $kinds; do bench 0,1,2,3 4 29750 "$kind"; done
