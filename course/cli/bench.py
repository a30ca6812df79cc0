"""`course bench`: the command line of the measurements in `course/bench`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from course.cli.options import Overrides, numbers
from course.utils.errors import CourseError

Out = Annotated[Path | None, typer.Option(help="also write the numbers to this JSON file")]

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)


@bench.command()
def ceilings(device: Annotated[str, typer.Option(help="cpu or cuda. Default: cuda if there is a GPU")] = "",
             out: Out = None) -> None:
    """Measure the highest FLOP/s of a matrix multiplication and the highest bytes/s of a copy on this machine."""
    import json

    from course.bench import timing as measure

    found = measure.record_ceilings(measured_device(device))
    print(json.dumps(found, indent=1))
    record(found, out)


@bench.command("kernels")
def bench_kernels(out: Annotated[Path, typer.Option(help="the JSON file for the table")] = Path("kernels.json"),
                  small: Annotated[bool, typer.Option("--small", help="tiny sizes, only to test it")] = False,
                  device: Annotated[str, typer.Option(help="cpu or cuda. Default: cuda if there is a GPU")] = "") -> None:
    """Measure the inputs of a performance model of this GPU: matmuls, attention, memory, norms, collectives. Five minutes."""
    from course.bench import kernel_table as measure

    where = measured_device("cpu" if small and not device else device)
    if where.type == "cpu" and not small:
        raise CourseError("course bench kernels measures a GPU, and PyTorch sees none: --small tries it on the CPU")
    found = measure.main(where, small)
    record(found, out)
    print(f"wrote {out}, measured in {found['took_s']} s")


@bench.command("host")
def bench_host(out: Annotated[Path, typer.Option(help="the JSON file for the table")] = Path("host.json"),
               small: Annotated[bool, typer.Option("--small", help="three rows on the CPU, only to test it")] = False
               ) -> None:
    """Measure the host time of a step while the GPU waits, by model, format, compiler and layout. Four minutes."""
    from course.bench import host_overhead_table as measure

    found = measure.main(small)
    record(found, out)
    print(f"wrote {out}, measured in {found['took_s']} s")


@bench.command("loaders")
def bench_loaders(settings: Overrides = None,
                  small: Annotated[bool, typer.Option("--small", help="states of 32x64 points, which take seconds")] = False,
                  loader: Annotated[list[str] | None, typer.Option(help="measure only this loader; can be repeated")] = None,
                  workers: Annotated[str, typer.Option(help="processes or threads, such as 1,8. Default: 1,2,4 ... cores")] = "",
                  seconds: Annotated[float, typer.Option(help="seconds of each of five repeats; their median counts")] = 1.0,
                  device: Annotated[str, typer.Option(help="cpu or cuda. Default: cuda if there is a GPU")] = "",
                  out: Out = None) -> None:
    """Measure each loader's pairs per second, and the cost of reading and copying. Without data.path=FOLDER it makes data."""
    from course.bench import loaders as measure

    counts = numbers(workers, "--workers") if workers else measure.doubling()
    record(measure.main(settings or [], small, loader or [], counts, seconds, measured_device(device)), out)


@bench.command("comms")
def bench_comms(ranks: Annotated[int, typer.Option(min=0, help="processes to start. Default: one per GPU, or 2. Under torchrun: "
                                                   "those that it started")] = 0,
                largest: Annotated[float, typer.Option(min=0, help="MiB of the largest message. Default: 64, on GPUs 256")]
                = 0,
                small: Annotated[bool, typer.Option("--small", help="few and small messages, only to test it")] = False,
                device: Annotated[str, typer.Option(help="cpu or cuda. Default: cuda if there is a GPU")] = "",
                out: Out = None) -> None:
    """Measure collectives over message sizes: time, bus bandwidth, and a link's latency and bandwidth for the planner."""
    from course.bench import comms as measure

    measure.command(ranks, measured_device(device).type, largest, small, out, record)


def measured_device(name: str) -> Any:
    """The device that --device names; else the GPU, if there is one."""
    import torch

    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def record(found: dict[str, Any], out: Path | None) -> None:
    """Write the measurements to a JSON file, if one is named."""

    from course.utils.atomic_files import write_json

    if out:
        write_json(out, found)


MODELS = {"vit": "the weather ViT", "gpt": "GPT-2's architecture, 124M to 1.3B", "dit": "DiT-XL/2 at 256 and 512 pixels"}


def bench_model(kind: str, words: str) -> None:
    """Add `course bench KIND`."""
    def measure(names: Annotated[list[str] | None, typer.Argument(help="configurations, such as 'bf16, compiled'")] = None,
                out: Annotated[Path, typer.Option(help="the JSON file for the rows")] = Path(f"{kind}.json"),
                small: Annotated[bool, typer.Option("--small", help="tiny sizes on the CPU, only to test it")] = False) -> None:
        from course.bench import one_gpu

        one_gpu.main(kind, out, names or [], small)

    bench.command(kind, help="Measure configurations of one GPU, from a plain training loop to a fast one: samples/s, memory "
                             f"and seconds to the first step of {words}.")(measure)


for kind, words in MODELS.items():
    bench_model(kind, words)


LAYOUTS = {"tp": "Tensor and sequence parallelism on layers of width 4096, compared with DTensor.",
           "tp_vit": "Tensor-parallel training of the weather ViT with width 1024.",
           "sp": "Training steps with sequence parallelism: eager, in a CUDA graph, and with the course's kernels.",
           "exchange": "Gathers and scatters of sequence parallelism, with NCCL and through symmetric memory.",
           "cp": "Context-parallel attention, compared with PyTorch's context_parallel.",
           "dp": "Data parallelism on the layers of GPT 350M, compared with PyTorch's DDP.",
           "pp": "Pipeline schedules, compared with torch.distributed.pipelining.",
           "zero": "ZeRO-1, compared with ZeroRedundancyOptimizer.",
           "fsdp": "ZeRO's stages on steps of GPT 1.3B, compared with PyTorch's fully_shard.",
           "experts": "Steps of GPT 350M with experts, compared with plain PyTorch and with a dense model.",
           "grid": "GPTs in dp x tp x pp layouts of a Megatron-LM reproduction; their layers compared with megatron-core."}


def bench_layout(kind: str, words: str) -> None:
    """Add `course bench KIND`."""
    def measure(out: Annotated[Path, typer.Option(help="the JSON file for the rows")] = Path(f"{kind}.json"),
                small: Annotated[bool, typer.Option("--small", help="tiny sizes on CPU processes, only to test it")] = False,
                profile: Annotated[bool, typer.Option("--profile", help="also print where the GPU time goes")] = False) -> None:
        from course.bench import layouts

        layouts.everywhere(kind, out, small, profile)

    bench.command(kind, help=f"{words} Runs on 1, 2, 4 ... of this machine's GPUs in turn.")(measure)


for kind, words in LAYOUTS.items():
    bench_layout(kind, words)
