"""Every layout of N GPUs against one, over NCCL: `torchrun --nproc-per-node N tests/gpu/parity.py [FILE [DEVICE [LAYOUT...]]]`.

In float64 equal up to rounding; in float32 and bf16 within four times the serial run's own rounding error, as `course verify`
measures it. "sp" exchanges tokens through symmetric memory where the GPUs allow it. Layouts "in a graph" are captured after three
steps and replayed after, NCCL included (only on GPUs); "compiled" ones go through torch.compile, whose version counts: 2.11's
gave wrong gradients; "one by one" is how NCCL gathers larger batches than these. Exits with 1 if a layout differs; FILE gets the
numbers.
"""

import json
import sys
from pathlib import Path

import torch

from course import config
from course.bench.timing import machine
from course.parallel import build_mesh, join, leave
from course.parallel.mesh import AXES
from course.parallel.tensor_parallel import overlapped_linear
from course.training import verify

SMALL = {"vit-demo": ["model.grid=[32,64]", "model.dim=64", "model.depth=5", "model.heads=4", "model.residual=false"],
         "gpt-demo": ["model.dim=64", "model.depth=5", "model.heads=4", "model.vocab=512", "model.context=126"],
         "dit-demo": ["model.dim=64", "model.depth=5", "model.heads=4"],
         "gpt-moe-demo": ["model.dim=64", "model.depth=3", "model.heads=4", "model.vocab=512", "model.context=126",
                          "model.head_dim=32", "model.qk_norm=true"]}
MUON = ("dp bucketed", "dp zero", "dp zero 2", "dp zero 3", "sp nccl", "pp 1f1b", "dp zero, in a graph", "dp zero 3, in a graph",
        "sp nccl, in a graph", "dp zero 3, compiled")
SMALL_BATCH = overlapped_linear.SMALL
STEPS = 5                                           # two of them replayed, where a graph is


def layouts(n: int) -> dict[str, list[str]]:
    """Each axis alone over n GPUs in all its ways, in a graph too; with four also products of two axes."""
    alone = {
        "dp bucketed": [f"dp={n}", "bucket_mb=0.1"], "dp ddp": [f"dp={n}", "data=ddp"],
        "dp zero": [f"dp={n}", "zero=true", "bucket_mb=0.1"], "dp zero 2": [f"dp={n}", "zero=2"],
        "dp zero 3": [f"dp={n}", "zero=3"], "dp zero 3, once a step": [f"dp={n}", "zero=3", "reshard_after=step"],
        "tp": [f"tp={n}"], "sp": [f"tp={n}", "sp=true"], "sp nccl": [f"tp={n}", "sp=true", "overlap=nccl"],
        "sp without overlap": [f"tp={n}", "sp=true", "overlap=none"],
        "sp symmetric": [f"tp={n}", "sp=true", "overlap=symmetric"],
        "sp one by one": [f"tp={n}", "sp=true", "overlap=nccl"],
        "cp gather": [f"cp={n}", "context=gather"], "cp ring": [f"cp={n}", "context=ring"],
        "cp all_to_all": [f"cp={n}", "context=all_to_all"],
        "pp gpipe": [f"pp={n}", "schedule=gpipe"], "pp 1f1b": [f"pp={n}"],
        "pp interleaved": ["pp=2", f"dp={n // 2}", "schedule=interleaved", "chunks=2"]}
    products = {
        "dp2 sp2 zero": ["dp=2", "tp=2", "sp=true", "zero=true"], "dp2 sp2 zero 3": ["dp=2", "tp=2", "sp=true", "zero=3"],
        "dp zero 3 in pairs": ["dp=4", "zero=3", "shard=2"],
        "dp2 sp2 symmetric": ["dp=2", "tp=2", "sp=true", "overlap=symmetric"], "cp2 sp2": ["cp=2", "tp=2", "sp=true"],
        "cp2 sp2 ring": ["cp=2", "tp=2", "sp=true", "context=ring"],
        "pp2 sp2": ["pp=2", "tp=2", "sp=true"], "pp2 cp2": ["pp=2", "cp=2"]} if n == 4 else {}
    found = {name: [f"parallel.{setting}" for setting in settings] + (["train.micro_batch=1"] if name.startswith("pp") else [])
             for name, settings in {**alone, **products}.items()}
    triton = {f"{name}, Triton": [*found[name], "kernels=triton"] for name in (
        "tp", "sp", "sp nccl", "sp one by one", "sp without overlap")}
    graphs = {f"{name}, in a graph": [*(found | triton)[name], "graphs=true"] for name in (
        "dp bucketed", "dp zero", "dp zero 2", "dp zero 3", "tp", "sp", "sp nccl", "sp, Triton", "sp nccl, Triton",
        "cp gather", "cp ring", "cp all_to_all",
        *["cp2 sp2"] * (n == 4))}
    compiled = {f"{name}, compiled": [*found[name], "compile=true"] for name in (
        "dp bucketed", "dp zero 3", "tp", "sp", "sp nccl", "sp one by one", "sp without overlap", "cp gather", "cp ring",
        "cp all_to_all", "pp 1f1b")}
    again = {f"{name}, {how}": [*found[name], f"train.recompute={how}"] for name in ("dp zero 3", "sp", "sp nccl", "cp ring")
             for how in ("full", "selective")}
    both = {f"{name}, compiled": [*given, "compile=true"] for name, given in (again | triton).items()}
    return found | compiled | again | triton | both | (graphs if torch.cuda.is_available() else {})


FEW = ("sp", "sp nccl", "sp one by one", "tp, Triton", "sp, Triton", "sp, Triton, compiled", "sp nccl, Triton",
       "sp, Triton, in a graph", "sp nccl, Triton, in a graph",
       "cp ring", "cp2 sp2", "pp2 sp2", "pp 1f1b", "dp zero", "dp zero 3", "tp, compiled", "cp gather, compiled",
       "sp, compiled", "cp ring, compiled", "sp, selective", "sp, selective, compiled")


def expert_layouts(n: int) -> dict[str, list[str]]:
    """Experts spread over n GPUs, alone and beside other axes."""
    alone = {"ep": [f"dp={n}"], "ep zero 1": [f"dp={n}", "zero=1"], "ep zero 3": [f"dp={n}", "zero=3"], "ep in cp": [f"cp={n}"],
             "tp of experts": [f"tp={n}", "sp=true", "ep=1"]}
    products = {"ep2 sp2": ["dp=2", "tp=2", "sp=true", "ep=2"], "ep2 pp2": ["dp=2", "pp=2", "ep=2"],
                "ep2 dp2 zero 3": ["dp=4", "ep=2", "zero=3"]} if n == 4 else {}
    found = {name: [f"parallel.{setting}" for setting in [f"ep={n}", *settings]] + ["train.micro_batch=1"] * ("pp" in name)
             for name, settings in {**alone, **products}.items()}
    more = {"compiled": ["compile=true"], "full": ["train.recompute=full"]}
    return found | {f"ep, {name}": [*found["ep"], *settings] for name, settings in more.items()}


def main() -> None:
    world, rows = join(sys.argv[2] if len(sys.argv) > 2 else "auto"), []
    known_layouts, experts, meshes = layouts(world.size), expert_layouts(world.size), {}
    with_muon = {"gpt-demo with Muon": [*SMALL["gpt-demo"], "optim.name=muon", "optim.weight_decay=0.1"]}
    for model, small in (SMALL | with_muon).items():
        preset = model.split()[0]
        for precision in ("fp64", "fp32", "bf16"):
            common = [*verify.DEFAULTS, *small, f"train.steps={STEPS}", f"precision={precision}",
                      *(["optim.lr=0.01"] if preset == "dit-demo" else [])]
            known = verify.references(config.load(preset, common), world) if world.rank == 0 else None
            fitting = list(experts) if "moe" in preset else [n for n in known_layouts if preset == "vit-demo" or n in FEW]
            fitting = list(MUON) if model in with_muon else fitting
            for name in sys.argv[3:] or fitting:
                if (name in experts) != ("moe" in preset) or (model in with_muon and name not in MUON):
                    continue
                overlapped_linear.SMALL = 0 if "one by one" in name else SMALL_BATCH
                torch._dynamo.reset()                # 2.11 fails where sizes become symbols because another layout had others
                asked = config.load(preset, [*common, *(known_layouts | experts)[name]])
                sizes = tuple(getattr(asked.parallel, axis) for axis in AXES)
                # One for all layouts of these sizes: NCCL keeps memory for each group. And to part from them is no way: new ones
                # of the same ranks have the old ones' names, and sometimes find the old addresses (PyTorch 2.11)
                if sizes not in meshes:
                    meshes[sizes] = build_mesh(asked.parallel, world)
                gaps = verify.compare_in(asked, world, known, meshes[sizes])
                if world.device.type == "cuda":
                    torch.cuda.empty_cache()
                if world.rank == 0:
                    worst = max([gap for gap in gaps if gap.judged] or gaps, key=lambda gap: gap.size / gap.bound)
                    rows.append({"preset": model, "layout": name, "precision": precision, "worst": worst.name,
                                 "gap": worst.size, "bound": worst.bound, "wrong": sum(gap.wrong for gap in gaps),
                                 "judged": sum(gap.judged for gap in gaps) / len(gaps)})
                    print(f"{model:18} {name:22} {precision:5} {worst.name:28} {worst.size:8.1e} of {worst.bound:8.1e} "
                          f"{'DIFFERENT' if rows[-1]['wrong'] else 'equal'}", flush=True)
                    if len(sys.argv) > 1:
                        Path(sys.argv[1]).write_text(json.dumps({**machine(world.device), "rows": rows}, indent=1))
    wrong = any(row["wrong"] for row in rows)
    leave()
    sys.exit(wrong)


if __name__ == "__main__":
    main()
