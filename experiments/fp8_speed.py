"""How fast is FP8 compared with bf16? `python -m experiments.fp8_speed FILE` on one GPU; --small tries it on a CPU.

A causal stack of 8 layers with hidden size 4096, 8 x 2048 tokens, float32 parameters. It times forward and backward with all
casts and the update of the scales: native FP8 with each recipe, eager and compiled, and Transformer Engine if it is installed.
It also times the stack's matmuls and casts separately, and compares the losses of each case with bf16's. Medians after warm-up.
--profile prints the kernels of each case: names of FP8 matmuls contain e4m3, e5m2 or `f8f8`.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from course.bench import timing
from course.bench.command_line import command
from course.bench.layout_harness import PROFILE, Row, Stack, batch_of, forward_backward, measure
from course.config import FP8, Config, Parallel, Train
from course.fp8 import native, transformer_engine
from course.parallel import Layout, World, build_mesh, joined, parallelize
from course.parallel.initialize import give_memory
from course.planner import flops
from course.training.step import Progress, build_compute

Size = tuple[int, int, int]                         # width, depth, heads
BF16 = Config(train=Train(), precision="bf16")


def cases(device: torch.device) -> dict[str, tuple[Config, bool, bool]]:
    """(configuration, compiled, Transformer Engine's FP8 enabled) for each case."""
    def eight(**settings: Any) -> Config:
        return replace(BF16, precision="fp8", fp8=FP8(**settings))

    found = {"bf16": (BF16, False, True), "bf16, compiled": (BF16, True, True)}
    for recipe in ("delayed", "current"):
        found |= {f"native, {recipe}": (eight(recipe=recipe), False, True),
                  f"native, {recipe}, compiled": (eight(recipe=recipe), True, True)}
    if device.type == "cuda" and importlib.util.find_spec("transformer_engine"):
        found["TE, bf16"] = (eight(by="te"), False, False)
        found |= {f"TE, {recipe}": (eight(by="te", recipe=recipe), False, True) for recipe in ("delayed", "current", "block")}
    return found


def build(config: Config, world: World, size: Size, enabled: bool) -> tuple[Layout, native.Scaling]:
    """(the stack's layout, its scales): the stack is the only stage, with the same random weights in every case."""
    mesh = build_mesh(Parallel(), world)
    with torch.device("meta"):
        model: Any = Stack(*size, causal=True)
    scaling = native.convert(model, config, mesh)
    layout = parallelize(model, mesh, config.parallel)
    native.prepare(model, layout, scaling)
    torch.manual_seed(0)
    for parameter in model.parameters():
        give_memory(parameter, torch.randn(parameter.shape, device=world.device) * 0.02)
    transformer_engine.convert(model, config, mesh, enabled)
    return layout, scaling


def stacks(world: World, size: Size, samples: int, tokens: int) -> Iterator[Row]:
    """Time forward and backward of the stack in every case."""
    dim, depth, _ = size
    batch = batch_of(samples, tokens, dim, world.device, torch.bfloat16)
    work = 3 * samples * flops.blocks(tokens, dim, 4 * dim, depth)
    good, first, base = torch.zeros((), device=world.device), 0.0, 0.0
    for name, (config, compiled, enabled) in cases(world.device).items():
        layout, scaling = build(config, world, size, enabled)
        model, = layout.stages
        losses = [loss_of(layout, config, world, batch, scaling) for _ in range(2)]      # the second uses the first's scales
        if compiled:
            model.compile()
        once = forward_backward(layout, batch, precision=config.precision)

        def run(once: Callable[[], object] = once, scaling: native.Scaling = scaling) -> None:
            once()
            scaling.update(good)

        row = measure(name, run, world, layers=depth, hidden=dim, tokens=samples * tokens)
        if "ms" in row:
            first, base = first or losses[1], base or row["ms"]
            row |= {"times bf16": base / row["ms"], "tflops": work / row["ms"] / 1e9, "loss off": losses[1] / first - 1}
            print("    {times bf16:.2f} x bf16, {tflops:.0f} TFLOP/s, loss off by {loss off:.1e}".format(**row), flush=True)
        yield row
        del model, layout, run, once, scaling
        torch._dynamo.reset()


def loss_of(layout: Layout, config: Config, world: World, batch: dict[str, Tensor], scaling: native.Scaling) -> float:
    """The loss of one forward and backward pass; also updates the scales."""
    model, = layout.stages
    compute = build_compute(model, Progress.start(config, world.device), config, layout)
    loss = compute(batch).item()
    model.zero_grad()
    scaling.update(torch.zeros((), device=world.device))
    return loss


def parts(world: World, dim: int, rows: int) -> Iterator[Row]:
    """Time the matmuls of a layer's four linears, each operand's cast, and a copy of the same bytes."""
    device = world.device
    one, amax = torch.ones((), device=device), torch.zeros((), device=device)
    for name, n, k in (("qkv", 3 * dim, dim), ("out", dim, dim), ("up", 4 * dim, dim), ("down", dim, 4 * dim)):
        x, dy = (torch.randn(rows, width, device=device, dtype=torch.bfloat16) for width in (k, n))
        w = torch.randn(n, k, device=device)
        w16 = w.bfloat16()
        x8, x8t = native.quantize(x, one, amax, native.E4M3, True, True)
        w8, w8t = native.quantize(w, one, amax, native.E4M3, True, True)
        g8, g8t = native.quantize(dy, one, amax, native.E5M2, True, True)

        runs: dict[str, Callable[[], object]] = {
            "y, bf16": partial(torch.mm, x, w16.t()), "dx, bf16": partial(torch.mm, dy, w16),
            "dW, bf16": partial(torch.mm, dy.t(), x),
            "y": partial(native.multiply, x8, w8.t(), one, one, torch.bfloat16, fast=True),
            "dx": partial(native.multiply, g8, w8t.t(), one, one, torch.bfloat16, fast=False),
            "dW": partial(native.multiply, g8t, x8t.t(), one, one, torch.float32, fast=False),
            "dx, fast": partial(native.multiply, g8, w8t.t(), one, one, torch.bfloat16, fast=True)}
        for what, run in runs.items():
            ms = timing.seconds(run, device) * 1e3
            yield {"case": f"{name}: {what}", "ms": ms, "tflops": 2 * rows * n * k / ms / 1e9}
        for what, tensor, kind in (("x", x, native.E4M3), ("W", w, native.E4M3), ("dy", dy, native.E5M2)):
            ms = timing.seconds(partial(native.quantize, tensor, one, amax, kind, True, True), device) * 1e3
            moved = tensor.numel() * (tensor.element_size() + 2)
            copied = timing.copy(moved / 2e6, device) * 1e3
            yield {"case": f"{name}: cast {what}", "ms": ms, "tb_per_s": moved / ms / 1e9, "copy_ms": copied}


def main(file: Path, small: bool) -> None:
    """Measure, print, and write the rows as JSON."""
    with joined("cpu" if small else "auto") as world:
        if world.device.type == "cuda":
            native.check_device(world.device)
        size, (samples, tokens) = ((64, 2, 4), (2, 24)) if small else ((4096, 8, 32), (8, 2048))
        found: dict[str, Any] = {**timing.machine(world.device), "command": "python -m experiments.fp8_speed FILE", "rows": [],
                                 "parts": []}
        for kind, rows in (("rows", stacks(world, size, samples, tokens)), ("parts", parts(world, size[0], samples * tokens))):
            for row in rows:
                found[kind].append(row)
                if kind == "parts":
                    print(row["case"], *(f"{key} {value:.3f}" for key, value in row.items() if key != "case"), flush=True)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(found, indent=1), encoding="utf-8")  # after each row: a crash keeps them


if __name__ == "__main__":
    with command(f"FILE [--small] [{PROFILE}]") as words:
        main(Path(words[0]), small="--small" in sys.argv)
