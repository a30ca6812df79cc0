"""`course bench tp`, `cp`, `dp`, `pp` and more: time the parallel layouts, and PyTorch's alternatives.

A run measures the cases for its number of GPUs and adds rows to a JSON file: medians after warmup, over the slowest rank's laps.
`torchrun --nproc-per-node N -m course.bench.layouts KIND FILE` is one run; `everywhere` starts runs on 1, 2, 4 ... GPUs.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from course.bench import baselines, megatron_grid, scaling_efficiency, timing
from course.bench.command_line import command
from course.bench.layout_harness import PROFILE, Row, batch_of, forward_backward, measure, stack
from course.config import Config, Parallel, Train, load
from course.parallel import World, build_gradient_sync, build_mesh, joined, mappings
from course.parallel.context_parallel.attention import METHODS, SplitTokens
from course.parallel.tensor_parallel import overlapped_linear, symmetric_memory
from course.planner import hardware, peak_memory, step_time
from course.training.assemble import assemble
from course.training.compile import compile_parts
from course.training.optimizer import build_optimizer
from course.training.step import Progress, build_compute
from course.utils.atomic_files import write_json
from course.utils.errors import CourseError


def tp(world: World, small: bool) -> Iterator[Row]:
    """Tensor parallelism: 8 layers of width 4096, 4 x 4096 tokens, bf16, forward and backward; the library and DTensor."""
    size, (samples, tokens) = ((64, 2, 4), (4, 32)) if small else ((4096, 8, 32), (4, 4096))
    n, dtype = world.size, torch.bfloat16
    batch = batch_of(samples, tokens, size[0], world.device, dtype)
    layouts = {"plain": Parallel(tp=n), "sequence": Parallel(tp=n, sp=True, overlap="none"),
               "overlap": Parallel(tp=n, sp=True, overlap="nccl"),
               "symmetric": Parallel(tp=n, sp=True, overlap="symmetric")} if n > 1 else {"one GPU": Parallel()}
    for name, settings in layouts.items():
        mesh = build_mesh(settings, world)
        layout = stack(mesh, settings, dtype, size, causal=True)
        yield measure(name, forward_backward(layout, batch, settings=settings), world)
        del layout
        if name != "plain":
            layout = stack(mesh, settings, dtype, size, causal=True)
            compile_parts(layout.stages)
            yield measure(f"{name}, compiled", forward_backward(layout, batch, settings=settings), world)
            del layout
            torch._dynamo.reset()
    if n > 1:
        for compiled in (False, True):
            theirs = baselines.dtensor(world, size, batch, compiled)
            yield measure("DTensor sequence parallel" + ", compiled" * compiled, theirs, world)


def tp_vit(world: World, small: bool) -> Iterator[Row]:
    """Training steps of the weather ViT with width 1024, batch 16, bf16 and Adam: eager, compiled, and in a CUDA graph."""
    extra = ["model.grid=[16,32]", "model.dim=64", "model.depth=2", "train.device=cpu"] if small else []
    n = world.size
    layouts = {"plain": ["parallel.sp=false"], "sequence": ["parallel.sp=true", "parallel.overlap=none"],
               "overlap": ["parallel.sp=true", "parallel.overlap=nccl"]} if n > 1 else {"one GPU": []}
    ways = {"": ["compile=false"], ", compiled": ["compile=true"], ", in a graph": ["compile=true", "graphs=true"]}
    for (name, settings), (way, more) in product(layouts.items(), ways.items()):
        if world.device.type == "cpu" and "graph" in way:
            continue
        config = load("vit-mp", ["data.source=mock", "precision=bf16", "train.global_batch=16", f"parallel.tp={n}", *more,
                                 *settings, *extra])
        training: Any = assemble(config, build_mesh(config.parallel, world))
        batch = training.model.example(16, world.device)
        yield measure(name + way, partial(training.step, batch), world, samples=16)
        del training
        megatron_grid.free(world)


def cp(world: World, small: bool) -> Iterator[Row]:
    """Context-parallel attention, 32 heads of 128, one sequence: forward and backward, each method, causal and full."""
    n, device = world.size, world.device
    for tokens in (64, 128) if small else (16384, 32768, 65536):
        for causal in (True, False):
            word = f"{tokens // 1024 if not small else tokens}k {'causal' if causal else 'full'}"
            if n == 1:
                yield measure(f"{word} one GPU", attention(sdpa(causal), tokens, device), world, tokens=tokens, causal=causal)
                continue
            mesh = build_mesh(Parallel(cp=n), world)
            for method, kind in METHODS.items():
                pieces = SplitTokens({"position": "context"}, mesh.cp, mesh.tp, zigzag=causal and method != "all_to_all")
                pieces.cut({"position": torch.arange(tokens, device=device)[None]})
                yield measure(f"{word} {method}", attention(kind(causal, pieces), tokens // n, device), world,
                              tokens=tokens, causal=causal)
            theirs = attention(sdpa(causal), tokens, device, baselines.context(world, causal))
            yield measure(f"{word} PyTorch context_parallel", theirs, world, tokens=tokens, causal=causal)


def sdpa(causal: bool) -> Callable[..., Tensor]:
    """PyTorch's attention, with the arguments that `attention` passes."""
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def attention(attend: Callable[..., Tensor], tokens: int, device: torch.device, context: Any = None) -> Callable[[], object]:
    """Forward and backward of one attention with queries, keys and values of shape (1, 32, tokens, 128)."""
    heads, width = (4, 8) if device.type == "cpu" else (32, 128)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    grads: dict[torch.Size, Tensor] = {}
    made = [torch.randn(1, heads, tokens, width, device=device, dtype=dtype).requires_grad_() for _ in range(3)]

    def run() -> None:
        inputs = made if context is None else [x.detach().clone() for x in made]     # context_parallel splits in place
        with nullcontext() if context is None else context(inputs):
            if context is not None:
                inputs = [x.requires_grad_() for x in inputs]
            out = attend(*inputs)
            grads.setdefault(out.shape, torch.randn_like(out))
            out.backward(grads[out.shape])
        for x in inputs:
            x.grad = None

    return run


def dp(world: World, small: bool) -> Iterator[Row]:
    """Data parallelism: forward, backward, averaging of a stack like GPT 350M, 16 x 1024 tokens per GPU, bf16 over float32."""
    size, (samples, tokens) = ((64, 2, 4), (4, 32)) if small else ((1024, 24, 16), (16, 1024))
    for compiled in (False, True):
        for method, size_mb in (("none", 25.0), ("naive", 25.0), ("bucketed", 25.0), ("bucketed", 100.0), ("ddp", 25.0),
                                ("ddp", 100.0)) if world.size > 1 else (("none", 25.0),):
            settings = Parallel(dp=world.size, data=method, bucket_mb=size_mb)      # type: ignore[arg-type]
            mesh = build_mesh(settings, world)
            layout = stack(mesh, settings, torch.float32, size, causal=True)
            model, = layout.stages
            if compiled:
                for block in model.blocks.values():
                    block.compile()
            gradients = build_gradient_sync(model, layout, settings)
            batch = batch_of(samples, tokens, size[0], world.device, torch.bfloat16)
            config = Config(train=Train(), precision="bf16", parallel=settings)
            compute = build_compute(gradients.trained(model), Progress.start(config, world.device), config, layout)

            def run(compute: Any = compute, gradients: Any = gradients, batch: Any = batch) -> None:
                gradients.begin(1)
                compute(batch)
                gradients.finish()
                gradients.clear()

            yield measure(method + ", compiled" * compiled, run, world, bucket_mb=size_mb)
            del model, layout, gradients, compute, run
            torch._dynamo.reset()


def pp(world: World, small: bool) -> Iterator[Row]:
    """Pipelines: 16 layers of width 4096, 16 micro-batches of 4096 tokens, bf16; all schedules of the library and PyTorch."""
    size, (micros, tokens) = ((64, 8, 4), (8, 32)) if small else ((4096, 16, 32), (16, 4096))
    p, dtype = world.size, torch.bfloat16
    batch = batch_of(micros, tokens, size[0], world.device, dtype)
    if p == 1:
        mesh = build_mesh(Parallel(), world)
        yield measure("one GPU", forward_backward(stack(mesh, Parallel(), dtype, size, True), batch, 1), world, 5)
        return
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        settings = Parallel(pp=p, schedule=schedule, chunks=chunks)     # type: ignore[arg-type]
        mesh = build_mesh(settings, world)
        layout = stack(mesh, settings, dtype, size, causal=True)
        yield measure(schedule, forward_backward(layout, batch, 1, settings), world, 5, chunks=chunks)
        del layout
    for schedule, chunks in (("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2)):
        theirs = baselines.pipeline(world, size, batch, micros, schedule, chunks)
        yield measure(f"PyTorch {schedule}", theirs, world, 5, chunks=chunks)


def zero(world: World, small: bool) -> Iterator[Row]:
    """Whole steps of the `dp` stack with Adam: replicated states, ZeRO-1, and PyTorch's ZeroRedundancyOptimizer."""
    size, (samples, tokens) = ((64, 2, 4), (4, 32)) if small else ((1024, 24, 16), (16, 1024))
    if world.size == 1:
        return
    for name, settings in (("bucketed", Parallel(dp=world.size)), ("ddp", Parallel(dp=world.size, data="ddp")),
                           ("ZeRO-1", Parallel(dp=world.size, zero=1)),
                           ("ZeRO-1, 16-bit copies", Parallel(dp=world.size, zero=1)),
                           ("ZeroRedundancyOptimizer", Parallel(dp=world.size, data="ddp"))):
        mesh = build_mesh(settings, world)
        layout = stack(mesh, settings, torch.float32, size, causal=True)
        model, = layout.stages
        gradients = build_gradient_sync(model, layout, settings, torch.bfloat16 if "copies" in name else None)
        batch = batch_of(samples, tokens, size[0], world.device, torch.bfloat16)
        config = Config(train=Train(), precision="bf16", parallel=settings)
        progress = Progress.start(config, world.device)
        compute = build_compute(gradients.trained(model), progress, config, layout)
        if name == "ZeroRedundancyOptimizer":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-4, fused=True)
        else:
            optimizer = build_optimizer(gradients.optimizer_parameters, progress.lr, config)

        def run(compute: Any = compute, gradients: Any = gradients, batch: Any = batch, optimizer: Any = optimizer) -> None:
            gradients.begin(1)
            compute(batch)
            gradients.finish()
            optimizer.step()
            gradients.clear()
            gradients.after_optimizer_step()

        run()
        inner = optimizer.optim if name == "ZeroRedundancyOptimizer" else optimizer
        states = sum(x.nbytes for state in inner.state.values() for x in state.values() if torch.is_tensor(x))
        parameters = sum(p.numel() for p in model.parameters())
        yield measure(name, run, world, optimizer_gb=states / 1e9, theory_gb=8e-9 * parameters / (
            1 if name in ("bucketed", "ddp") else world.size))
        del model, layout, gradients, compute, run, optimizer, inner
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


def fsdp(world: World, small: bool) -> Iterator[Row]:
    """Whole compiled steps of GPT 1.3B, 8 x 2048 tokens per GPU, bf16, Adam: ZeRO's stages, and PyTorch's fully_shard.

    predicted_ms, predicted_gb: what `course plan` says for H200s.
    """
    tiny = ["model.vocab=64", "model.context=32", "model.dim=64", "model.depth=3", "model.heads=4"]
    base = ["data.source=mock", "precision=bf16", "train.micro_batch=0", f"train.global_batch={(2 if small else 8) * world.size}",
            "train.recompute=none", "stream=narrow", "optim.clip=1", "parallel.tp=1", "parallel.sp=false",
            f"parallel.dp={world.size}", f"train.device={world.device.type}", *(tiny if small else ["compile=true"])]
    ways = {"ZeRO-1": ["parallel.zero=1"], "ZeRO-2": ["parallel.zero=2"], "ZeRO-3": ["parallel.zero=3"],
            "ZeRO-3, gradients in bf16": ["parallel.zero=3", "parallel.reduce_in=matmul"],
            "ZeRO-3, weights kept for the step": ["parallel.zero=3", "parallel.reshard_after=step"],
            "ZeRO-3, weights kept for backward": ["parallel.zero=3", "parallel.reshard_after=backward"],
            "ZeRO-3, two micro-batches": ["parallel.zero=3", f"train.micro_batch={1 if small else 4}"],
            "ZeRO-3, recomputed": ["parallel.zero=3", "train.recompute=full"],
            "ZeRO-3, FP8": ["parallel.zero=3", "precision=fp8"]}
    if not small:                                   # a CPU has no graphs
        ways |= {f"{name}, in a graph": [*ways[name], "graphs=true"] for name in ("ZeRO-3", "ZeRO-3, FP8")}
    for name, settings in ways.items():
        config = load("gpt-1.3b", [*base, *settings])
        training: Any = assemble(config, build_mesh(config.parallel, world))
        batch = training.model.example(2 if small else 8, world.device)
        predicted = step_time.predict(config, hardware.load("h200"), world.size).step
        yield measure(name, partial(training.step, batch), world, predicted_ms=1e3 * predicted,
                      predicted_gb=peak_memory.predict(config).allocated / 1e9)
        del training
        megatron_grid.free(world)
    for reduce in ("float32", "bfloat16"):
        theirs = baselines.fully_sharded(config, world, getattr(torch, reduce))
        yield measure(f"fully_shard, gradients in {reduce}", theirs, world)
        del theirs
        megatron_grid.free(world)


def experts(world: World, small: bool) -> Iterator[Row]:
    """Compiled steps of GPT 350M with 8 experts in every other block, 16 x 1024 tokens per GPU, bf16, Adam, ZeRO-1.

    Its experts are spread over all GPUs, also in plain PyTorch; beside it a dense model of as many active parameters."""
    n, samples = world.size, 2 if small else 16
    tiny = ["model.vocab=64", "model.context=32", "model.dim=64", "model.depth=2", "model.heads=4", "model.mlp_width=96"]
    base = ["data.source=mock", "precision=bf16", "train.micro_batch=0", f"train.global_batch={samples * n}", "stream=narrow",
            "optim.clip=1", f"parallel.dp={n}", f"parallel.zero={int(n > 1)}", f"train.device={world.device.type}",
            f"compile={not small}", *(tiny if small else [])]
    width = 96 if small else 4096
    ways = {"dense, as many active parameters": ("gpt-350m", [f"model.mlp_width={width * 3 // 2}"], False),
            "experts": ("gpt-moe-8x350m", [f"model.expert_width={width}", f"parallel.ep={n}"], False),
            "experts in plain PyTorch": ("gpt-moe-8x350m", [f"model.expert_width={width}", f"parallel.ep={n}"], True),
            "experts, gathered": ("gpt-moe-8x350m", [f"model.expert_width={width}", f"parallel.ep={n}",
                                                     "parallel.dispatch=gather"], False)}
    if n == 1:                                      # nothing to gather
        del ways["experts, gathered"]
    if not small:
        for of in ("dense, as many active parameters", "experts" if n == 1 else "experts, gathered"):
            preset, settings, _ = ways[of]
            ways[f"{of.split(',')[0]}, in a graph"] = (preset, [*settings, "graphs=true"], False)
    for name, (preset, settings, plain) in ways.items():
        config = load(preset, [*base, *settings])
        training: Any = assemble(config, build_mesh(config.parallel, world))
        if plain:
            baselines.plain_experts(training.model)
        batch = training.model.example(samples, world.device)
        yield measure(name, partial(training.step, batch), world, tokens=samples * n * config.model.tokens)
        del training
        megatron_grid.free(world)


def sp(world: World, small: bool) -> Iterator[Row]:
    """Compiled training steps with sequence parallelism on all GPUs. Without a graph: samples sent one by one, and as one. In a
    graph, one by one: the compiler's kernels; Triton kernels with NCCL, with symmetric memory, and without sequence
    parallelism."""
    models = {"DiT-XL/2, 256 px, 32 samples": ["dit-xl", "train.global_batch=32"],
              "GPT 124M, 32 samples": ["gpt-124m", "train.global_batch=32"],
              "GPT 350M, 16 samples": ["gpt-350m", "train.global_batch=16"],
              "DiT-XL/2, 512 px, 16 samples": ["dit-xl", "train.global_batch=16", "model.latent=[4,64,64]"],
              "GPT 1.3B, 4 samples": ["gpt-1.3b", "train.global_batch=4"]}
    graph, triton = ["graphs=true"], ["graphs=true", "kernels=triton"]
    ways = {"one by one": (0, []), "as one": (sys.maxsize, []), "in a graph": (0, graph),            # limit, settings
            "Triton kernels, in a graph": (0, triton),
            "Triton kernels, through memory, in a graph": (0, [*triton, "parallel.overlap=symmetric"]),
            "Triton kernels, no sequence parallelism, in a graph": (0, [*triton, "parallel.sp=false"])}
    if small:
        models = {"small DiT": ["dit-demo", "train.device=cpu", "train.global_batch=4"]}
    if world.device.type == "cpu":
        ways = {way: given for way, given in ways.items() if "graph" not in way}
    if world.size == 1:
        return
    known, mesh = (overlapped_linear.SMALL, overlapped_linear.SHORT), build_mesh(Parallel(tp=world.size, sp=True), world)
    try:
        for (model, (preset, *settings)), (way, (limit, more)) in product(models.items(), ways.items()):
            overlapped_linear.SMALL = overlapped_linear.SHORT = limit
            config = load(preset, ["data.source=mock", "precision=bf16", "stream=narrow", f"compile={not small}",
                                   "train.micro_batch=0", "parallel.dp=1", "parallel.sp=true", f"parallel.tp={world.size}",
                                   "parallel.overlap=nccl", *settings, *more])
            c: Any = config.model
            training: Any = assemble(config, mesh)
            batch = training.model.example(config.train.global_batch, world.device)
            yield measure(f"{model}, {way}", partial(training.step, batch), world,
                          sample_mb=2e-6 * c.dim * c.tokens)
            del training
            megatron_grid.free(world)
    finally:
        overlapped_linear.SMALL, overlapped_linear.SHORT = known


def alone(begin: Callable[[], Callable[[], object]]) -> None:
    """Begin a communication, and wait for its end."""
    begin()()


def exchange(world: World, small: bool) -> Iterator[Row]:
    """The communication of sequence parallelism for one linear, by NCCL and symmetric memory, alone and beside the linear's
    matmul. On GPUs, a graph holds twenty calls."""
    if world.size == 1:
        return
    axis, dtype = build_mesh(Parallel(tp=world.size), world).tp, torch.float32 if small else torch.bfloat16
    sizes = ((32, 256, 1152), (16, 1024, 1024), (4, 2048, 2048), (16, 2048, 3072))
    for samples, tokens, width in ((4, 32, 64),) if small else sizes:
        x, y = (torch.randn(samples, t, width, device=world.device, dtype=dtype) for t in (tokens // world.size, tokens))
        grad = torch.randn(samples, tokens, 4 * width // world.size, device=world.device, dtype=dtype)
        weight = torch.randn(grad.shape[2], width, device=world.device, dtype=dtype)

        def beside(begin: Any, grad: Any = grad, weight: Any = weight) -> None:
            end = begin(hidden=True)
            grad @ weight
            end()

        calls: dict[str, Callable[[], object]] = {"matmul": partial(torch.matmul, grad, weight),
                                                  "all-reduce, NCCL": partial(mappings.all_reduce, y, axis)}
        for how, direct in (("NCCL", False), ("through memory", True)):
            for what, begin in (("gather", partial(overlapped_linear.gather, x, axis, tokens, direct)),
                                ("scatter", partial(overlapped_linear.scatter, y, axis, direct))):
                calls[f"{what}, {how}"] = partial(alone, begin)
                calls[f"matmul beside {what}, {how}"] = partial(beside, begin)
        for case, call in calls.items():
            run = twenty(call) if world.device.type == "cuda" else call
            row = measure(case, run, world, mb=1e-6 * y.nbytes, size=[samples, tokens, width])
            number = 20 if world.device.type == "cuda" else 1
            yield row | {key: row[key] / number for key in ("ms", "joules") if key in row}


def twenty(call: Callable[[], object]) -> Callable[[], object]:
    """Capture twenty calls in a CUDA graph, and return its replay."""
    call()                                          # allocations of the first call cannot be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    symmetric_memory.new_graph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(20):
            call()
    return graph.replay


KINDS = {"tp": tp, "tp_vit": tp_vit, "sp": sp, "exchange": exchange, "cp": cp, "dp": dp, "pp": pp, "zero": zero, "fsdp": fsdp,
         "experts": experts, "grid": megatron_grid.measure}


def everywhere(kind: str, file: Path, small: bool, profile: bool) -> None:
    """Run `main` on 1, 2, 4 ... GPUs and print the table. small: on CPU processes, as a test. `CourseError` for too few GPUs."""
    gpus = 2 if small else torch.cuda.device_count()
    if not gpus:
        raise CourseError(f"course bench {kind} needs GPUs, and this machine shows none: --small tries it on the CPU")
    flags = ["--small"] * small + [PROFILE] * profile
    for n in [2**i for i in range(gpus.bit_length())]:
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}",
                        "-m", "course.bench.layouts", kind, str(file), *flags], check=True)
    if not file.exists():                           # such as `zero` on one GPU
        raise CourseError(f"course bench {kind} compares several GPUs, and this machine shows one: run it on a machine with "
                          "more, or try it with --small")
    table = json.loads(file.read_text(encoding="utf-8"))
    rows = scaling_efficiency.judge(kind, table["rows"])
    write_json(file, table | {"rows": rows})
    for row in table["rows"]:
        result = row.get("error") or f"{row['ms']:9.2f} ms"
        share = f"  {row['joules']:.4g} J" if "joules" in row else ""
        share += f"  {row['efficiency']:4.0%} efficient" if "efficiency" in row else ""
        grid = f", micro-batch {row['micro_batch']}, {row['mib']:,.0f} MiB, {row['tflops']:.0f} TFLOP/s" if "mib" in row else ""
        print(f"{row['gpus']} x {row['case']:40s} {row.get('by', '')} {result}{grid}{share}")
    print(f"wrote {file}")


def main(kind: str, file: Path, small: bool) -> None:
    """Measure on the ranks of this job, and add the rows to the file."""
    torch.manual_seed(0)
    with joined("cpu" if small else "auto") as world:
        rows: list[Row] = []
        for row in KINDS[kind](replace(world), small):
            rows.append(row)
            if world.rank == 0:                     # after each row, to keep results after a crash
                write(kind, file, world, rows)


def write(kind: str, file: Path, world: World, rows: list[Row]) -> None:
    """Replace the file's rows for this number of GPUs."""
    command = f"course bench {kind} --out FILE"
    table: dict[str, Any] = {**timing.machine(world.device), "command": command, "rows": []}
    if file.exists():
        table = json.loads(file.read_text(encoding="utf-8"))
    table["rows"] = [row for row in table["rows"] if row["gpus"] != world.size] + rows
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(table, indent=1), encoding="utf-8")


if __name__ == "__main__":
    with command(f"{'|'.join(KINDS)} FILE [--small] [{PROFILE}]", least=2) as words:
        main(words[0], Path(words[1]), small="--small" in sys.argv)
