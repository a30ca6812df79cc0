"""Steps recorded on H200s, each with its configuration and the planner's prediction.

    for step in steps():
        print(step.name, step.ms, step.time.step * 1e3)

The rows come from results/, without those of other libraries (PyTorch's own, Transformer Engine).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from course.bench import results
from course.bench.one_gpu_configs import BENCHMARKS
from course.config import Config, load
from course.planner import block_time, hardware, step_time
from course.planner.hardware import Hardware
from course.planner.other_implementations import Workload16Bit, workload_as
from course.planner.rank_workload import workload_of
from course.planner.step_time import Time

# name of a tensor-parallel case -> settings
WAYS = {"one GPU": ["parallel.sp=false"], "plain": ["parallel.sp=false"],
        "sequence": ["parallel.sp=true", "parallel.overlap=none"],
        "overlap": ["parallel.sp=true", "parallel.overlap=nccl"], "symmetric": ["parallel.sp=true", "parallel.overlap=symmetric"]}
Row = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A recorded row. kind: "step" (whole), "no update" (a model's forward and backward), "stack" (the same for blocks in
    16 bits) or "attention" (one attention)."""

    name: str                                       # "tp 4: plain"
    file: str                                       # in results/, without "h200.json"
    kind: str
    gpus: int
    ms: float                                       # measured
    memory_gb: float                                # measured peak of a rank, first step included
    config: Config
    time: Time                                      # predicted

    @property
    def error(self) -> float:
        """Relative error of the predicted time: 0.1 is 10% too long."""
        return self.time.step * 1e3 / self.ms - 1


def rows(name: str) -> list[Row]:
    """The measured rows of results/NAMEh200.json. Raises `CourseError` if there is no such file."""
    return [row for row in results.load(f"{name}h200")["rows"] if "ms" in row]


def steps() -> list[Step]:
    """All recorded steps that have a configuration."""
    return [step for part in (one_gpu, tensor_vit, tensor, pipelines, data, zero, context) for step in part()]


def h200() -> Hardware:
    """The hardware of all recorded steps."""
    return hardware.load("h200")


def step_of(file: str, name: str, row: Row, config: Config, kind: str = "step") -> Step:
    """Build a step with its prediction."""
    return Step(name, file, kind, row.get("gpus", 1), row["ms"], max(row["memory_gb"], row.get("first_gb", 0.0)), config,
                predicted(config, kind))


def predicted(config: Config, kind: str = "step") -> Time:
    """Predict a step of this kind on H200s."""
    if kind == "stack":
        return replace(step_time.time_of(workload_as(Workload16Bit, config, h200())), optimizer=0.0)
    if kind == "attention":
        forward, backward, around, back, _ = block_time.attention_time(workload_of(config, h200(), 0))
        return Time(attention=forward + backward, context=around + back)
    time = step_time.predict(config, h200())
    return time if kind == "step" else replace(time, optimizer=0.0)


def one_gpu() -> Iterator[Step]:
    """Models on one GPU: `course bench vit`, `gpt` and `dit`."""
    for kind, benchmark in BENCHMARKS.items():
        for row in rows(f"{kind}_"):
            name = row["configuration"]
            chosen = benchmark.configs[name]
            if chosen.by == "course" and "fp8.by=te" not in chosen.settings:
                yield step_of(f"{kind}_", f"{kind}: {name}", row, load(chosen.preset, [*chosen.settings, "parallel.dp=1"]))


def tensor_vit() -> Iterator[Step]:
    """`course bench tp_vit`: the ViT of width 1024."""
    for row, settings in tensor_rows("tp_vit_"):
        c = load("vit-mp", ["data.source=mock", "train.global_batch=16", "train.micro_batch=0", *settings])
        yield step_of("tp_vit_", f"tp_vit {row['gpus']}: {row['case']}", row, c)


def tensor() -> Iterator[Step]:
    """`course bench tp`: 8 layers of width 4096, forward and backward."""
    for row, settings in tensor_rows("tp_"):
        c = stack(4096, 8, 32, 4096, 4, "stream=narrow", *settings)
        yield step_of("tp_", f"tp {row['gpus']}: {row['case']}", row, c, "stack")


def tensor_rows(file: str) -> Iterator[tuple[Row, Sequence[str]]]:
    """(row, settings) of tensor-parallel cases on 1 to 4 GPUs."""
    for row in rows(file):
        way, _, how = row["case"].partition(", ")
        if way in WAYS:
            yield row, ["parallel.dp=1", f"parallel.tp={row['gpus']}", f"compile={bool(how)}",
                        f"graphs={how == 'in a graph'}", *WAYS[way]]


def pipelines() -> Iterator[Step]:
    """`course bench pp`: 16 layers of width 4096, 16 micro-batches of one sample, forward and backward."""
    for row in rows("pp_"):
        if "PyTorch" not in row["case"]:
            way = [f"parallel.schedule={row['case']}", f"parallel.chunks={row['chunks']}"] if row["gpus"] > 1 else []
            c = stack(4096, 16, 32, 4096, 16, "stream=narrow", "parallel.dp=1", f"parallel.pp={row['gpus']}",
                      "train.micro_batch=1", *way)
            yield step_of("pp_", f"pp {row['gpus']}: {row['case']}", row, c, "stack")


def data() -> Iterator[Step]:
    """`course bench dp`: 24 layers of width 1024; forward, backward and gradient averaging."""
    for row in rows("dp_"):
        way, _, compiled = row["case"].partition(", ")
        c = stack(1024, 24, 16, 1024, 16 * row["gpus"], f"parallel.dp={row['gpus']}", f"compile={compiled == 'compiled'}",
                  f"parallel.data={way}", f"parallel.bucket_mb={row['bucket_mb']}")
        yield step_of("dp_", f"dp {row['gpus']}: {row['case']}, {row['bucket_mb']:.0f} MB", row, c, "no update")


def zero() -> Iterator[Step]:
    """`course bench zero`: whole steps of the `dp` stack."""
    ways = {"bucketed": [], "ddp": ["parallel.data=ddp"], "ZeRO-1, 16-bit copies": ["parallel.zero=1"]}
    for row in rows("zero_"):
        if row["case"] in ways:
            c = stack(1024, 24, 16, 1024, 16 * row["gpus"], f"parallel.dp={row['gpus']}", *ways[row["case"]])
            yield step_of("zero_", f"zero {row['gpus']}: {row['case']}", row, c)


def context() -> Iterator[Step]:
    """`course bench cp`: one attention of 32 heads of 128."""
    for row in rows("cp_"):
        if "PyTorch" not in row["case"]:
            how = row["case"].split()[-1] if row["gpus"] > 1 else "ring"
            settings = ["model.dim=4096", "model.depth=1", "model.heads=32", "precision=bf16", "train.global_batch=1",
                        "train.micro_batch=1", "parallel.dp=1", f"parallel.cp={row['gpus']}", f"parallel.context={how}"]
            c = (load("gpt-124m", [*settings, f"model.context={row['tokens']}"]) if row["causal"] else
                 load("vit-short", [*settings, f"model.grid=[2048,{row['tokens'] // 32}]", "model.channels=1"]))
            yield step_of("cp_", f"cp {row['gpus']}: {row['case']}", row, c, "attention")


def stack(width: int, depth: int, heads: int, tokens: int, batch: int, *settings: str) -> Config:
    """A stack of `course bench`, as a GPT with a tiny vocabulary."""
    return load("gpt-124m", [f"model.dim={width}", f"model.depth={depth}", f"model.heads={heads}", f"model.context={tokens}",
                             "model.vocab=128", f"train.global_batch={batch}", "train.micro_batch=0", *settings])
