"""The cases of a Megatron-LM reproduction: GPTs in layouts of dp x tp x pp, with their published time and memory.

OneFlow's reproduction measured Megatron-LM on 16 GB V100 GPUs, 8 per node, with 100 Gb/s InfiniBand and samples of 2048 tokens.
`course bench grid` measures the same cases on this machine. Cases for more GPUs are scaled down: same model, same micro-batch and
same samples per data-parallel rank.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from course import config as configuration
from course.bench import layout_harness, megatron_core
from course.bench.command_line import reason
from course.bench.layout_harness import Row, batch_of, forward_backward, stack
from course.config import Parallel
from course.parallel import World, build_mesh
from course.planner import flops
from course.training.assemble import assemble
from course.training.compile import compile_parts

TOKENS = 2048                                        # per sample
HEADS = {768: 12, 1536: 16, 2304: 24, 3072: 32}      # width -> heads


@dataclass(frozen=True)
class Case:
    """A row of the source: layout, model and batch, and the time and memory of one iteration."""

    name: str                                        # dp x tp x pp _ global batch _ width x depth, as in the source
    micro_batch: int
    ms: float
    mib: int

    @property
    def layout(self) -> tuple[int, int, int]:
        """Ranks along dp, tp and pp."""
        dp, tp, pp = map(int, self.name.split("_")[0].split("x"))
        return dp, tp, pp

    @property
    def gpus(self) -> int:
        """dp * tp * pp: there is no context parallelism."""
        dp, tp, pp = self.layout
        return dp * tp * pp

    @property
    def settings(self) -> list[str]:
        """Overrides for preset gpt-124m. Its vocabulary of 50,304 is divisible by all these tp."""
        (dp, tp, pp), (_, batch, shape) = self.layout, self.name.split("_")
        width, depth = map(int, shape.split("x"))
        return [f"model.context={TOKENS}", f"model.dim={width}", f"model.depth={depth}", f"model.heads={HEADS[width]}",
                f"train.global_batch={batch}", f"train.micro_batch={self.micro_batch}",
                f"parallel.dp={dp}", f"parallel.tp={tp}", f"parallel.pp={pp}"]


CASES = (
    Case("1x1x1_2_1536x16", 2, 464, 14362), Case("8x1x1_16_1536x16", 2, 481, 14938),
    Case("16x1x1_32_1536x16", 2, 664, 14508), Case("32x1x1_64_1536x16", 2, 684, 14508),
    Case("1x1x1_8_768x12", 8, 611, 9810), Case("1x8x1_16_1536x16", 16, 692, 12684),
    Case("1x16x1_16_3072x16", 16, 5610, 12150), Case("1x32x1_16_3072x32", 16, 13038, 8834),
    Case("2x4x1_16_1536x16", 8, 576, 9104), Case("4x2x1_16_1536x16", 4, 594, 9642),
    Case("2x8x1_16_2304x24", 8, 1314, 14928), Case("4x8x1_32_2304x24", 8, 1508, 15004),
    Case("8x1x4_512_1536x16", 2, 4894, 7130), Case("1x8x4_512_2304x24", 16, 22167, 14204),
    Case("2x4x4_512_2304x24", 8, 15331, 10018), Case("2x8x2_512_2304x24", 8, 16282, 10554),
)


def scaled(case: Case, gpus: int) -> Case | None:
    """A case on so many GPUs: its pp, as much of its tp as fits, the rest dp. None if the case is smaller or does not divide."""
    (dp, tp, pp), (_, batch, shape) = case.layout, case.name.split("_")
    if gpus > case.gpus or gpus % pp:
        return None
    new_tp = min(tp, gpus // pp)
    new_dp = gpus // pp // new_tp
    if new_dp > dp:
        return None
    return replace(case, name=f"{new_dp}x{new_tp}x{pp}_{int(batch) // dp * new_dp}_{shape}")


def measure(world: World, small: bool) -> Iterator[Row]:
    """Whole training steps of each case scaled to this number of GPUs. For cases with tp alone, also forward and backward of the
    layers with one micro-batch, ours and megatron-core's."""
    cases: dict[str, tuple[Case, Case]] = {}
    for source in CASES:
        case = scaled(source, world.size)
        if case and (case.name not in cases or case.name == source.name):
            cases[case.name] = case, source
    for case, source in cases.values():
        yield training(case, world, small) | {"source": source.name, "micro_batch": case.micro_batch, "by": "course"}
        free(world)
        if case.layout == (1, world.size, 1):
            for row in layers(case, world, small):
                yield row | {"source": source.name, "micro_batch": case.micro_batch}
                free(world)


def free(world: World) -> None:
    """Free memory and reset the compiler, so that each case has all memory and its own recompilation limit."""
    torch._dynamo.reset()
    gc.collect()                                     # models have reference cycles, also after running out of memory
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


TINY = ["model.vocab=64", "model.context=32", "model.dim=64", "model.depth=4", "model.heads=4", "train.device=cpu"]


def training(case: Case, world: World, small: bool) -> Row:
    """Training steps of a case: bf16, compiled, fused Adam, sequence parallelism with tp."""
    settings = [*case.settings, f"compile={not small}", "stream=narrow", f"parallel.sp={case.layout[1] > 1}",
                *([*TINY, f"train.global_batch={2 * case.layout[0] * case.micro_batch}"] if small else [])]
    config = configuration.load("gpt-124m", settings)
    laps = 3 if small or config.train.global_batch >= 64 else layout_harness.LAPS
    try:
        made: Any = assemble(config, build_mesh(config.parallel, world))
        batch = made.model.example(config.train.global_batch // config.parallel.dp, world.device)
        row = layout_harness.measure(case.name, partial(made.step, batch), world, laps)
    except torch.OutOfMemoryError as error:
        return {"case": case.name, "gpus": world.size, "error": str(error)[:200]}
    samples, c = config.train.global_batch, config.model
    return row | numbers(row, samples * c.tokens, flops.step(c, samples))


def numbers(row: Row, tokens: int, operations: float) -> Row:
    """MiB, tokens/s and TFLOP/s per GPU, from a row with milliseconds; nothing for an error."""
    if "error" in row:
        return {}
    return {"mib": row["memory_gb"] * 1e9 / 2**20, "tokens_per_s": tokens / row["ms"] * 1e3,
            "tflops": operations / row["ms"] / 1e9 / row["gpus"]}


def layers(case: Case, world: World, small: bool) -> Iterator[Row]:
    """The blocks alone, one micro-batch in bf16, forward and backward: the course's, compiled, and megatron-core's.

    Each without and with sequence parallelism; the course's also with Triton kernels, as megatron-core's with Transformer
    Engine."""
    c: Any = configuration.load("gpt-124m", [*case.settings, *(TINY if small else [])]).model
    size, device = (c.dim, c.depth, c.heads), world.device
    samples = case.micro_batch if not small else 1
    operations = 3 * samples * flops.blocks(c.context, c.dim, c.hidden, c.depth)

    def ours(sp: bool, triton: bool = False) -> Any:
        settings = Parallel(tp=world.size, sp=sp)
        mesh = build_mesh(settings, world)
        layout = stack(mesh, settings, torch.bfloat16, size, causal=True, triton=triton)
        if not small:
            compile_parts(layout.stages)
        return forward_backward(layout, batch_of(samples, c.context, c.dim, device, torch.bfloat16), settings=settings)

    makers = {"course": partial(ours, False)}
    if world.size > 1:                               # as megatron-core with Transformer Engine
        makers["course, sequence parallel"] = partial(ours, True)
    makers["course, Triton kernels"] = partial(ours, world.size > 1, True)
    for by, engine in (("megatron-core", False), ("megatron-core, Transformer Engine", True)):
        makers[by] = partial(megatron_core.layers, world, size, samples, c.context, engine)
    for by, make in makers.items():
        try:
            row = layout_harness.measure(f"{case.name}, layers", make(), world)
        except Exception as error:                  # such as a missing package, on all ranks alike
            row = {"case": f"{case.name}, layers", "gpus": world.size, "error": reason(error)}
        yield row | {"by": by} | numbers(row, samples * c.context, operations)
        free(world)
