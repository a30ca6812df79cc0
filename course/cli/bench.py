"""`course bench`: the command line of the measurements in `course/bench`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from course.cli.options import Overrides, numbers
from course.utils.errors import CourseError

Out = Annotated[Path | None, typer.Option(help="also write the numbers to this JSON file")]

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)


@bench.command()
def ceilings(device: Annotated[str, typer.Option(help="cpu or cuda")] = "",
             out: Out = None) -> None:
    """The most FLOP/s of a matrix multiplication and the most bytes/s of a copy that this machine reaches."""
    import json

    from course.bench import timing as measure

    found = measure.record_ceilings(measured_device(device))
    print(json.dumps(found, indent=1))
    record(found, out)


@bench.command("kernels")
def bench_kernels(out: Annotated[Path, typer.Option(help="the JSON file that gets the table")] = Path("kernels.json"),
                  small: Annotated[bool, typer.Option("--small", help="tiny sizes: only to see that it works")] = False,
                  device: Annotated[str, typer.Option(help="cpu or cuda")] = "") -> None:
    """What a performance model of this GPU is made of: matmuls, attention, memory, norms, collectives; five minutes."""
    from course.bench import kernel_table as measure

    where = measured_device("cpu" if small and not device else device)
    if where.type == "cpu" and not small:
        raise CourseError("course bench kernels measures a GPU, and PyTorch sees none: --small tries it on the CPU")
    found = measure.main(where, small)
    record(found, out)
    print(f"wrote {out}, measured in {found['took_s']} s")


@bench.command("host")
def bench_host(out: Annotated[Path, typer.Option(help="the JSON file that gets the table")] = Path("host.json"),
               small: Annotated[bool, typer.Option("--small", help="three rows on the CPU: only to see that it works")] = False
               ) -> None:
    """What the host of this machine needs for a step while its GPU waits: by model, format, compiler, layout; four minutes."""
    from course.bench import host_overhead_table as measure

    found = measure.main(small)
    record(found, out)
    print(f"wrote {out}, measured in {found['took_s']} s")


@bench.command("loaders")
def bench_loaders(settings: Overrides = None,
                  small: Annotated[bool, typer.Option("--small", help="states of 32x64 points, in seconds anywhere")] = False,
                  loader: Annotated[list[str] | None, typer.Option(help="only this one; may be repeated")] = None,
                  workers: Annotated[str, typer.Option(help="processes or threads: 1,8; else 1,2,4 ... up to the cores")] = "",
                  seconds: Annotated[float, typer.Option(help="of each of the five laps whose median counts")] = 1.0,
                  device: Annotated[str, typer.Option(help="cpu or cuda")] = "",
                  out: Out = None) -> None:
    """Each loader's pairs per second, beside what reading and copying cost; data.path=FOLDER, else data is made."""
    from course.bench import loaders as measure

    counts = numbers(workers, "--workers") if workers else measure.doubling()
    record(measure.main(settings or [], small, loader or [], counts, seconds, measured_device(device)), out)


def measured_device(name: str) -> Any:
    """The device that --device names; else the GPU, if there is one."""
    import torch

    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def record(found: dict[str, Any], out: Path | None) -> None:
    """Write the measurements to a JSON file, if one is named."""
    import json

    from course.utils.atomic_files import atomic

    if out:
        with atomic(out) as temporary:
            temporary.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


MODELS = {"vit": "the weather ViT", "gpt": "GPT-2's architecture, 124M to 1.3B", "dit": "DiT-XL/2 at 256 and 512 pixels"}


def bench_model(kind: str, words: str) -> None:
    """Add `course bench KIND`."""
    def measure(names: Annotated[list[str] | None, typer.Argument(help="only these, such as 'bf16, compiled'")] = None,
                out: Annotated[Path, typer.Option(help="the JSON file that gets the rows")] = Path(f"{kind}.json"),
                small: Annotated[bool, typer.Option("--small", help="tiny, on the CPU, to see that it works")] = False) -> None:
        from course.bench import one_gpu

        one_gpu.main(kind, out, names or [], small)

    bench.command(kind, help="From a plain training loop to a fast one, on one GPU: samples/s, memory, seconds to "
                             f"the first step of {words}.")(measure)


for kind, words in MODELS.items():
    bench_model(kind, words)


LAYOUTS = {"tp": "Tensor and sequence parallelism on a stack of hidden 4096, and DTensor's.",
           "tp_vit": "Tensor parallel training of the weather ViT of width 1024.",
           "sp": "Training steps with sequence parallelism: left to the host, in a graph, and by kernels of our own.",
           "exchange": "Gathers and scatters of sequence parallelism, by NCCL and through each other's memory.",
           "cp": "Context-parallel attention, and PyTorch's context_parallel.",
           "dp": "Data parallelism on the stack of GPT 350M, and PyTorch's DDP.",
           "pp": "Pipeline schedules, and torch.distributed.pipelining's.",
           "zero": "ZeRO-1, and ZeroRedundancyOptimizer.",
           "fsdp": "ZeRO's stages on steps of GPT 1.3B, and PyTorch's fully_shard.",
           "grid": "GPTs in layouts of dp x tp x pp, the cases of a Megatron-LM reproduction; the layers beside megatron-core's."}


def bench_layout(kind: str, words: str) -> None:
    """Add `course bench KIND`."""
    def measure(out: Annotated[Path, typer.Option(help="the JSON file that gets the rows")] = Path(f"{kind}.json"),
                small: Annotated[bool, typer.Option("--small", help="tiny, on CPU processes: only to see that it works")] = False,
                profile: Annotated[bool, typer.Option("--profile", help="also print where the GPU's time goes")] = False) -> None:
        from course.bench import layouts

        layouts.everywhere(kind, out, small, profile)

    bench.command(kind, help=f"{words} On 1, 2, 4 ... of this machine's GPUs, one after another.")(measure)


for kind, words in LAYOUTS.items():
    bench_layout(kind, words)
