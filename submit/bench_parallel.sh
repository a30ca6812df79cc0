#!/usr/bin/env bash
# All benchmarks of the parallel layouts on one node with 4 GPUs: bash submit/bench_parallel.sh FOLDER [KIND...]
# Jobs of one GPU run side by side, then those of two, then those of all four one after the other.
set -u
out=$1; shift
kinds=${*:-tp tp_vit cp dp pp zero}
mkdir -p "$out"
bench() {  # GPUS COUNT PORT KIND
    CUDA_VISIBLE_DEVICES=$1 timeout 200 torchrun --nproc-per-node "$2" --master-port "$3" \
        -m course.perf.parallel "$4" "$out/$4_$2.json" 2> "$out/$4_$2.log" || { echo "$4 on $2 GPUs failed:"; grep -v Warning "$out/$4_$2.log" | grep -m4 Error; }
}
gpu=0
for kind in $kinds; do
    [ "$kind" = zero ] && continue
    bench $gpu 1 $((29700 + gpu)) "$kind" &
    gpu=$(((gpu + 1) % 4))
    [ $gpu = 0 ] && wait
done
wait
for kind in $kinds; do
    case $kind in
        tp) bench 0,1 2 29710 tp & ;;
        tp_vit) bench 2,3 2 29711 tp_vit & ;;
    esac
done
wait
for kind in $kinds; do bench 0,1,2,3 4 29720 "$kind"; done
