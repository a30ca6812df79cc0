"""Alternatives to compare with: PyTorch's DTensor, context_parallel and pipelining on the same blocks; transformers' GPT-2."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course.bench.layout_harness import Row, stack
from course.config import Config, Parallel
from course.models import build_model
from course.models.experts import Experts, grouped_linear
from course.ops.number_formats import matmul_dtype
from course.parallel import World, build_mesh
from course.parallel.initialize import initialize_serial


def dtensor(world: World, size: tuple[int, int, int], batch: dict[str, Tensor], compiled: bool) -> Callable[[], object]:
    """Forward and backward of the stack, parallelized by PyTorch's parallelize_module."""
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
    model, = stack(build_mesh(Parallel(dp=world.size), world), Parallel(), torch.bfloat16, size, causal=True, cut=False).stages
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


def context(world: World, causal: bool) -> Callable[[list[Tensor]], Any]:
    """PyTorch's context_parallel over all ranks, load-balanced for causal attention."""
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


def pipeline(world: World, size: tuple[int, int, int], batch: dict[str, Tensor], micros: int, schedule: str,
                   chunks: int) -> Callable[[], object]:
    """A step of torch.distributed.pipelining over the same blocks."""
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
                             cut=False).stages[0].blocks.values())) for _ in range(chunks)]
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


def fully_sharded(config: Config, world: World, reduce: torch.dtype) -> Callable[[], object]:
    """A training step of the same model by PyTorch's fully_shard: bf16 weights and gradients reduced in `reduce`, clipping, Adam.

    Units are the blocks, each compiled if the configuration says so; embedding and head are the root's, as in torchtitan.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    grid = init_device_mesh(world.device.type, (world.size,))
    model: Any = initialize_serial(build_model(config.model), 0, world.device)
    how: Any = {"mesh": grid, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)}
    for block in model.blocks.values():
        if config.compile:
            block.compile()
        fully_shard(block, **how)
    fully_shard(model, **how)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4, fused=True)
    example = model.example(config.train.global_batch // world.size, world.device)
    batch = model.prepare(example, torch.zeros((), dtype=torch.int64, device=world.device))

    def run() -> None:
        total, weight = model.loss(model(batch), batch)
        (total / weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


class PlainExperts(Experts):
    """Experts in plain PyTorch, as torchtitan has them: sort, index, all_to_all_single, _grouped_mm, index_add. Softmax gates."""

    @torch._disable_dynamo
    def forward(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:              # (B, T, D), 2 x (B, T, k)
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        low, flat, k = matmul_dtype(x), x.flatten(0, 1), chosen.shape[-1]
        axis = getattr(self.route, "ep", None)
        order = chosen.flatten().argsort(stable=True)                   # (N·k,)
        token, counts = order // k, torch.bincount(chosen.flatten(), minlength=self.number)
        rows = flat[token].to(low)                                      # (N·k, D)
        if axis is None or axis.size == 1:
            out = self.mlp_of(rows, counts, low)
        else:
            coming = torch.empty_like(counts)
            dist.all_to_all_single(coming, counts, group=axis.group)
            sent, received = (part.view(axis.size, -1).sum(1).tolist() for part in (counts, coming))
            rows = all_to_all_single_autograd(rows, received, sent, axis.group)
            here = len(counts) // axis.size
            expert = torch.arange(here, device=x.device).repeat(axis.size).repeat_interleave(coming)
            by_expert = expert.argsort(stable=True)
            done = self.mlp_of(rows[by_expert], coming.view(axis.size, here).sum(0), low)
            out = all_to_all_single_autograd(torch.empty_like(done).index_copy(0, by_expert, done), sent, received, axis.group)
        weighted = out * gates.flatten()[order][:, None].to(low)
        return torch.zeros_like(flat, dtype=low).index_add(0, token, weighted).view_as(x)

    def mlp_of(self, rows: Tensor, counts: Tensor, low: torch.dtype) -> Tensor:
        """The outputs of rows that are sorted by expert, (n, D)."""
        up, down = (self.route.weight(weight).to(low) for weight in (self.up, self.down))
        return grouped_linear(F.gelu(grouped_linear(rows, up.flatten(1, 2), counts), approximate="tanh"), down, counts)


def plain_experts(model: nn.Module) -> None:
    """Have a model compute its experts in plain PyTorch."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.__class__ = PlainExperts


def transformers(config: Config, device: torch.device) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(training step of Hugging Face's GPT-2: compiled, bf16 autocast, fused AdamW; function that makes batches for it)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    c: Any = config.model
    kind = GPT2Config(vocab_size=c.vocab, n_positions=c.context, n_embd=c.dim, n_layer=c.depth, n_head=c.heads, resid_pdrop=0,
                      embd_pdrop=0, attn_pdrop=0, use_cache=False)
    with device:
        plain = GPT2LMHeadModel._from_config(kind, attn_implementation="sdpa").train()
        model: Any = torch.compile(plain, disable=device.type == "cpu")        # on a CPU the run is only a test
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def step(batch: dict[str, Tensor]) -> None:
        tokens = batch["tokens"][:, :-1].contiguous()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss          # the model shifts the labels
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, build_model(c).example
