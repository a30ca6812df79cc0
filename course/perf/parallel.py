"""How fast the parallel layouts are, beside what PyTorch offers: `torchrun --nproc-per-node N -m course.perf.parallel KIND FILE`.

Each run measures what its number of GPUs allows and adds rows to FILE (JSON); run it with 1, 2 and 4 processes. Medians after
warm-up, the slowest rank counts. KIND is tp, vit, cp, dp, pp or zero.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course.config import Config, Parallel, Train, load
from course.models.layers import TENSOR_PLAN, Block, Tokens
from course.parallel import Mesh, World, build_mesh, data_parallel, join, leave, parallelize, place_serial
from course.parallel.context import METHODS, SplitTokens
from course.perf import bench
from course.step import Progress, build_compute, build_optimizer
from course.train import assemble

Row = dict[str, Any]
LAPS, WARM = 10, 4


class Pick(nn.Module):
    """The embedding of a stack: the input as it is."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["input"]


class MeanSquare(nn.Module):
    """A loss that costs next to nothing."""

    def forward(self, output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return output.float().square().mean(), self.weight(batch).sum()

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["sample"] >= 0).float()


class Stack(nn.Module):
    """Transformer blocks and nothing else, (B, T, D) -> (B, T, D)."""

    tensor_plan = TENSOR_PLAN
    token_plan = {"input": "sequence", "target": "sequence", "position": "sequence"}    # noqa: RUF012

    def __init__(self, dim: int, depth: int, heads: int, causal: bool):
        super().__init__()
        self.embed: nn.Module | None = Pick()
        self.blocks = nn.ModuleDict({str(i): Block(dim, heads, 4 * dim, f"blocks.{i}", causal=causal) for i in range(depth)})
        self.head: nn.Module | None = nn.Identity()
        self.loss, self.tokens = MeanSquare(), Tokens()

    def forward(self, batch: dict[str, Tensor], x: Tensor | None = None) -> Tensor:
        if self.embed is not None:
            x = self.embed(batch)
        for block in self.blocks.values():
            x = block(x, batch)
        return x                                    # type: ignore[return-value]


def stack(mesh: Mesh, settings: Parallel, dtype: torch.dtype, size: tuple[int, int, int], causal: bool, cut: bool = True) -> Any:
    """A stack of (width, depth, heads) in a layout, with random weights."""
    with torch.device("meta"):
        model: Any = Stack(*size, causal)
    model = parallelize(model, mesh, settings) if cut else place_serial(model)
    return randomize(model, mesh.world.device, dtype)


def randomize(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Give a model on the meta device random weights."""
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            new = nn.Parameter(torch.randn(old.shape, device=device, dtype=dtype) * 0.02)
            new.placement = old.placement           # type: ignore[attr-defined]
            setattr(module, name, new)
    return model


def batch_of(samples: int, tokens: int, dim: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """A prepared batch of random tokens."""
    return {"input": torch.randn(samples, tokens, dim, device=device, dtype=dtype),
            "sample": torch.arange(samples, device=device),
            "position": torch.arange(tokens, device=device).expand(samples, tokens)}


def milliseconds(run: Callable[[], object], world: World, laps: int = LAPS) -> float:
    """Median over the laps of the slowest rank's time."""
    for _ in range(WARM):
        run()
    times = []
    for _ in range(laps):
        bench.wait(world.device)
        if world.size > 1:
            dist.barrier()
        begin = time.perf_counter()
        run()
        bench.wait(world.device)
        lap = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=world.device)
        if world.size > 1:
            dist.all_reduce(lap, dist.ReduceOp.MAX)
        times.append(lap.item())
    return statistics.median(times) * 1e3


def measure(case: str, run: Callable[[], object], world: World, laps: int = LAPS, **more: Any) -> Row:
    """A row: time and peak memory of a call, in which everything that it needs is made once."""
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        ms = milliseconds(run, world, laps)
    except Exception as error:                      # of PyTorch's own, on all ranks alike: the others' rows still count
        print(f"{case}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return {"case": case, "gpus": world.size, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    memory = torch.cuda.max_memory_allocated() / 1e9 if world.device.type == "cuda" else 0.0
    if world.rank == 0 and "--profile" in sys.argv:
        profile(case, run)
    elif "--profile" in sys.argv:
        run()
    row = {"case": case, "gpus": world.size, "ms": ms, "memory_gb": memory, **more}
    if world.rank == 0:
        print(f"{case:40s} {world.size} GPUs  {ms:9.2f} ms  {memory:6.2f} GB  {more or ''}", flush=True)
    return row


def profile(case: str, run: Callable[[], object]) -> None:
    """Where a call's time on the GPU goes, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]) as found:
        run()
        torch.cuda.synchronize()
    print(case, found.key_averages().table(sort_by="self_device_time_total", row_limit=14, max_name_column_width=60), flush=True)


def forward_backward(model: Any, mesh: Mesh, batch: dict[str, Tensor], micro: int = 0, settings: Parallel | None = None,
                     precision: Any = "fp32") -> Callable[[], object]:
    """One call of the library's compute, forward and backward, with the gradients dropped at the end."""
    config = Config(train=Train(micro_batch=micro, global_batch=len(batch["sample"])), precision=precision,
                    parallel=settings or Parallel())
    compute = build_compute(model, Progress.start(config, mesh.world.device), config, mesh)

    def run() -> None:
        compute(batch)
        model.zero_grad()

    return run


def tp(world: World, small: bool) -> Iterator[Row]:
    """8 layers of hidden 4096, 4 x 4096 tokens, bf16, forward and backward; with the library's layouts and with DTensor."""
    size, (samples, tokens) = ((64, 2, 4), (4, 32)) if small else ((4096, 8, 32), (4, 4096))
    n, dtype = world.size, torch.bfloat16
    batch = batch_of(samples, tokens, size[0], world.device, dtype)
    layouts = {"plain": Parallel(tp=n), "sequence": Parallel(tp=n, sp=True, overlap="none"), "overlap": Parallel(tp=n, sp=True),
               "symmetric": Parallel(tp=n, sp=True, overlap="symmetric")} if n > 1 else {"one GPU": Parallel()}
    for name, settings in layouts.items():
        mesh = build_mesh(settings, world)
        model = stack(mesh, settings, dtype, size, causal=True)
        yield measure(name, forward_backward(model, mesh, batch, settings=settings), world)
        del model
        if n == 1 or name == "sequence":
            model = stack(mesh, settings, dtype, size, causal=True)
            model.compile()
            yield measure(f"{name}, compiled", forward_backward(model, mesh, batch, settings=settings), world)
            del model
    if n > 1:
        for compiled in (False, True):
            yield measure("DTensor sequence parallel" + ", compiled" * compiled, dtensor(world, size, batch, compiled), world)


def dtensor(world: World, size: tuple[int, int, int], batch: dict[str, Tensor], compiled: bool) -> Callable[[], object]:
    """The same stack by PyTorch's parallelize_module."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    grid = init_device_mesh(world.device.type, (world.size,))
    model = stack(build_mesh(Parallel(dp=world.size), world), Parallel(), torch.bfloat16, size, causal=True, cut=False)
    whole: Row = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    plan = {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attn": PrepareModuleInput(**whole),
            "mlp": PrepareModuleInput(**whole), "attn.qkv": ColwiseParallel(), "mlp.up": ColwiseParallel(),
            "attn.out": RowwiseParallel(output_layouts=Shard(1)), "mlp.down": RowwiseParallel(output_layouts=Shard(1))}
    for block in model.blocks.values():
        parallelize_module(block, grid, plan)
    mine = {"input": batch["input"].chunk(world.size, 1)[world.rank].contiguous()}
    if compiled:
        for block in model.blocks.values():
            block.compile()

    def run() -> None:
        model(mine).float().square().mean().backward()
        model.zero_grad()

    return run


def vit(world: World, small: bool) -> Iterator[Row]:
    """The weather ViT of width 1024, batch 16, bf16: whole training steps with Adam."""
    extra = ["model.grid=[16,32]", "model.dim=64", "model.depth=2", "train.device=cpu"] if small else []
    n = world.size
    layouts = {"plain": ["parallel.sp=false"], "sequence": ["parallel.sp=true", "parallel.overlap=none"],
               "overlap": ["parallel.sp=true"]} if n > 1 else {"one GPU": []}
    for name, settings in layouts.items():
        for compiled in (False, True):
            config = load("vit-mp", ["data.source=mock", "precision=bf16", "train.global_batch=16", f"parallel.tp={n}",
                                     f"compile={compiled}", *settings, *extra])
            training: Any = assemble(config, build_mesh(config.parallel, world))
            batch = training.model.example(16, world.device)
            yield measure(name + ", compiled" * compiled, partial(training.step, batch), world, samples=16)
            del training
            torch._dynamo.reset()


def cp(world: World, small: bool) -> Iterator[Row]:
    """Attention of 32 heads of 128, one sequence: forward and backward, each method, causal and not."""
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
            theirs = attention(sdpa(causal), tokens, device, torch_context(world, causal))
            yield measure(f"{word} PyTorch context_parallel", theirs, world, tokens=tokens, causal=causal)


def sdpa(causal: bool) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def attention(attend: Callable[..., Tensor], tokens: int, device: torch.device, context: Any = None) -> Callable[[], object]:
    """Forward and backward of one attention with (1, 32, tokens, 128) queries, keys and values."""
    heads, width = (4, 8) if device.type == "cpu" else (32, 128)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    grads: dict[torch.Size, Tensor] = {}
    made = [torch.randn(1, heads, tokens, width, device=device, dtype=dtype).requires_grad_() for _ in range(3)]

    def run() -> None:
        given = made if context is None else [x.detach().clone() for x in made]     # PyTorch's cuts its buffers in place
        with nullcontext() if context is None else context(given):
            if context is not None:
                given = [x.requires_grad_() for x in given]
            out = attend(*given)
            grads.setdefault(out.shape, torch.randn_like(out))
            out.backward(grads[out.shape])
        for x in given:
            x.grad = None

    return run


def torch_context(world: World, causal: bool) -> Callable[[list[Tensor]], Any]:
    """PyTorch's context_parallel over all ranks, balanced for causal attention."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention, context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    grid = init_device_mesh(world.device.type, (world.size,))
    _attention._cp_options.enable_load_balance = causal

    def enter(given: list[Tensor]) -> Any:
        both = ExitStack()
        both.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION if world.device.type == "cuda" else SDPBackend.MATH))
        both.enter_context(context_parallel(grid, buffers=given, buffer_seq_dims=[2] * 3, no_restore_buffers=set(given)))
        return both

    return enter


def dp(world: World, small: bool) -> Iterator[Row]:
    """A causal stack of GPT 350M's shape, 16 x 1024 tokens on each GPU, bf16 over fp32 parameters: forward, backward, average."""
    size, (samples, tokens) = ((64, 2, 4), (4, 32)) if small else ((1024, 24, 16), (16, 1024))
    for compiled in (False, True):
        for method, size_mb in (("none", 25.0), ("naive", 25.0), ("bucketed", 25.0), ("bucketed", 100.0), ("ddp", 25.0),
                                ("ddp", 100.0)) if world.size > 1 else (("none", 25.0),):
            settings = Parallel(dp=world.size, data=method, bucket_mb=size_mb)      # type: ignore[arg-type]
            mesh = build_mesh(settings, world)
            model = stack(mesh, settings, torch.float32, size, causal=True)
            if compiled:
                for block in model.blocks.values():
                    block.compile()
            gradients = data_parallel(model, mesh, settings)
            batch = batch_of(samples, tokens, size[0], world.device, torch.bfloat16)
            config = Config(train=Train(), precision="bf16", parallel=settings)
            compute = build_compute(model, Progress.start(config, world.device), config, mesh)

            def run(compute: Any = compute, gradients: Any = gradients, batch: Any = batch) -> None:
                gradients.begin(1)
                compute(batch)
                gradients.finish()
                gradients.clear()

            yield measure(method + ", compiled" * compiled, run, world, bucket_mb=size_mb)
            del model, gradients, compute, run
            torch._dynamo.reset()


def pp(world: World, small: bool) -> Iterator[Row]:
    """16 layers of hidden 4096 in 16 micro-batches of 4096 tokens, bf16: every schedule, the library's and PyTorch's."""
    size, (micros, tokens) = ((64, 8, 4), (8, 32)) if small else ((4096, 16, 32), (16, 4096))
    p, dtype = world.size, torch.bfloat16
    batch = batch_of(micros, tokens, size[0], world.device, dtype)
    if p == 1:
        mesh = build_mesh(Parallel(), world)
        yield measure("one GPU", forward_backward(stack(mesh, Parallel(), dtype, size, True), mesh, batch, 1), world, 5)
        return
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        settings = Parallel(pp=p, schedule=schedule, chunks=chunks)     # type: ignore[arg-type]
        mesh = build_mesh(settings, world)
        model = stack(mesh, settings, dtype, size, causal=True)
        yield measure(schedule, forward_backward(model, mesh, batch, 1, settings), world, 5, chunks=chunks)
        del model
    for schedule, chunks in (("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2)):
        theirs = torch_pipeline(world, size, batch, micros, schedule, chunks)
        yield measure(f"PyTorch {schedule}", theirs, world, 5, chunks=chunks)


def torch_pipeline(world: World, size: tuple[int, int, int], batch: dict[str, Tensor], micros: int, schedule: str,
                   chunks: int) -> Callable[[], object]:
    """torch.distributed.pipelining over the same blocks."""
    from torch.distributed import pipelining

    class Part(nn.Module):
        def __init__(self, blocks: list[nn.Module]):
            super().__init__()
            self.blocks = nn.ModuleList(blocks)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, {})
            return x

    p, stages = world.size, world.size * chunks
    dim, depth, heads = size
    parts = [Part(list(stack(build_mesh(Parallel(dp=p), world), Parallel(), torch.bfloat16, (dim, depth // stages, heads), True,
                             cut=False).blocks.values())) for _ in range(chunks)]
    made = [pipelining.PipelineStage(part, chunk * p + world.rank, stages, world.device) for chunk, part in enumerate(parts)]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.float().square().mean()

    kind = getattr(pipelining, f"Schedule{schedule}")
    plan = kind(made if chunks > 1 else made[0], micros, loss_fn=loss)
    x = batch["input"]

    def run() -> None:
        last = world.rank == p - 1
        plan.step(*([x] if world.rank == 0 else []), **({"target": x, "losses": []} if last else {}))
        for part in parts:
            part.zero_grad()

    return run


def zero(world: World, small: bool) -> Iterator[Row]:
    """The stack of `dp` with Adam: whole steps, with the states everywhere, cut by ZeRO-1, and by ZeroRedundancyOptimizer."""
    size, (samples, tokens) = ((64, 2, 4), (4, 32)) if small else ((1024, 24, 16), (16, 1024))
    if world.size == 1:
        return
    for name, settings in (("bucketed", Parallel(dp=world.size)), ("ddp", Parallel(dp=world.size, data="ddp")),
                           ("ZeRO-1", Parallel(dp=world.size, zero=True)),
                           ("ZeroRedundancyOptimizer", Parallel(dp=world.size, data="ddp"))):
        mesh = build_mesh(settings, world)
        model = stack(mesh, settings, torch.float32, size, causal=True)
        gradients = data_parallel(model, mesh, settings)
        batch = batch_of(samples, tokens, size[0], world.device, torch.bfloat16)
        config = Config(train=Train(), precision="bf16", parallel=settings)
        progress = Progress.start(config, world.device)
        compute = build_compute(model, progress, config, mesh)
        if name == "ZeroRedundancyOptimizer":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-4, fused=True)
        else:
            optimizer = build_optimizer(gradients.parameters, progress, config)

        def run(compute: Any = compute, gradients: Any = gradients, batch: Any = batch, optimizer: Any = optimizer) -> None:
            gradients.begin(1)
            compute(batch)
            gradients.finish()
            optimizer.step()
            gradients.clear()
            gradients.updated()

        run()
        inner = optimizer.optim if name == "ZeroRedundancyOptimizer" else optimizer
        states = sum(x.nbytes for state in inner.state.values() for x in state.values() if torch.is_tensor(x))
        parameters = sum(p.numel() for p in model.parameters())
        yield measure(name, run, world, optimizer_gb=states / 1e9, theory_gb=8e-9 * parameters / (
            1 if name in ("bucketed", "ddp") else world.size))
        del model, gradients, compute, run, optimizer, inner
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


KINDS = {"tp": tp, "vit": vit, "cp": cp, "dp": dp, "pp": pp, "zero": zero}


def main(kind: str, file: Path, small: bool) -> None:
    """Measure on the ranks that there are, and add the rows to the file."""
    torch.manual_seed(0)
    world = join("cpu" if small else "auto")
    rows: list[Row] = []
    try:
        for row in KINDS[kind](replace(world), small):
            rows.append(row)
            if world.rank == 0:                     # after each row, so that a crash leaves what there is
                write(kind, file, world, rows)
    finally:
        leave()


def write(kind: str, file: Path, world: World, rows: list[Row]) -> None:
    """Put the rows of this number of GPUs in the place of those that were there."""
    command = f"torchrun --nproc-per-node N -m course.perf.parallel {kind} FILE"
    found: dict[str, Any] = {**bench.machine(world.device), "command": command, "rows": []}
    if file.exists():
        found = json.loads(file.read_text())
    found["rows"] = [row for row in found["rows"] if row["gpus"] != world.size] + rows
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), small="--small" in sys.argv)
