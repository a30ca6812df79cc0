"""Every layout of 4 GPUs against one, over NCCL: `torchrun --nproc-per-node 4 tests/gpu/parity.py [FILE [DEVICE [LAYOUT...]]]`.

In float64 equal up to rounding; in float32 and bf16 within four times the serial run's own rounding error, as `course verify`
measures it. Exits with 1 if a layout differs; FILE gets the numbers.
"""

import json
import sys
from pathlib import Path

import torch

from course import config, verify
from course.parallel import join, leave
from course.perf.bench import machine

SMALL = {"vit-demo": ["model.grid=[32,64]", "model.dim=64", "model.depth=5", "model.heads=4", "model.residual=false"],
         "gpt-demo": ["model.dim=64", "model.depth=5", "model.heads=4", "model.vocab=512", "model.context=126"],
         "dit-demo": ["model.dim=64", "model.depth=5", "model.heads=4"]}
LAYOUTS = {
    "dp4 bucketed": ["parallel.dp=4", "parallel.bucket_mb=0.1"], "dp4 ddp": ["parallel.dp=4", "parallel.data=ddp"],
    "dp4 zero": ["parallel.dp=4", "parallel.zero=true", "parallel.bucket_mb=0.1"],
    "tp4": ["parallel.tp=4"], "sp4": ["parallel.tp=4", "parallel.sp=true"],
    "sp4 without overlap": ["parallel.tp=4", "parallel.sp=true", "parallel.overlap=none"],
    "sp4 symmetric": ["parallel.tp=4", "parallel.sp=true", "parallel.overlap=symmetric"],
    "cp4 gather": ["parallel.cp=4", "parallel.context=gather"], "cp4 ring": ["parallel.cp=4"],
    "cp4 all_to_all": ["parallel.cp=4", "parallel.context=all_to_all"],
    "pp4 gpipe": ["parallel.pp=4", "parallel.schedule=gpipe", "train.micro_batch=1"],
    "pp4 1f1b": ["parallel.pp=4", "train.micro_batch=1"],
    "pp2 interleaved": ["parallel.pp=2", "parallel.dp=2", "parallel.schedule=interleaved", "parallel.chunks=2",
                        "train.micro_batch=1"],
    "dp2 sp2 zero": ["parallel.dp=2", "parallel.tp=2", "parallel.sp=true", "parallel.zero=true"],
    "cp2 sp2": ["parallel.cp=2", "parallel.tp=2", "parallel.sp=true"],
    "pp2 sp2": ["parallel.pp=2", "parallel.tp=2", "parallel.sp=true", "train.micro_batch=2"],
    "pp2 cp2": ["parallel.pp=2", "parallel.cp=2", "train.micro_batch=2", "train.recompute=full"],
}
FEW = ("sp4", "cp4 ring", "cp2 sp2", "pp2 sp2", "dp4 zero")


def main() -> None:
    world, rows = join(sys.argv[2] if len(sys.argv) > 2 else "auto"), []
    for preset, small in SMALL.items():
        for precision in ("fp64", "fp32", "bf16"):
            common = [*verify.DEFAULTS, *small, f"precision={precision}", *(["optim.lr=0.01"] if preset == "dit-demo" else [])]
            known = verify.references(config.load(preset, common), world) if world.rank == 0 else None
            for name in sys.argv[3:] or (LAYOUTS if preset == "vit-demo" else FEW):
                gaps = verify.compare_in(config.load(preset, [*common, *LAYOUTS[name]]), world, known)
                if world.device.type == "cuda":
                    torch.cuda.empty_cache()
                if world.rank == 0:
                    worst = max(gaps, key=lambda gap: gap.size / gap.bound)
                    rows.append({"preset": preset, "layout": name, "precision": precision, "worst": worst.name,
                                 "gap": worst.size, "bound": worst.bound, "wrong": sum(gap.wrong for gap in gaps)})
                    print(f"{preset:9} {name:22} {precision:5} {worst.name:28} {worst.size:8.1e} of {worst.bound:8.1e} "
                          f"{'DIFFERENT' if rows[-1]['wrong'] else 'equal'}", flush=True)
                    if len(sys.argv) > 1:
                        Path(sys.argv[1]).write_text(json.dumps({**machine(world.device), "rows": rows}, indent=1))
    wrong = any(row["wrong"] for row in rows)
    leave()
    sys.exit(wrong)


if __name__ == "__main__":
    main()
