"""A DiT's operations between matmuls in PyTorch's, torch.compile's and our kernels: `python -m experiments.fused_kernels FILE`.

    modulated LayerNorm                     norm(x) · (1 + scale) + shift
    gate, add and modulated LayerNorm       x + gate · y, then the same norm of it
    gate and add                            x + gate · y

Each forward and backward in bf16: eager, compiled, and with `course.ops.fused_add_norm`, compiled; --small runs tiny sizes on a
CPU. Bytes: the least that forward and backward must read and write. Timed in a CUDA graph, to exclude launch overhead.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from course.bench import timing
from course.bench.command_line import command
from course.models.dit import modulate, plain_norm
from course.ops import fused_add_norm
from course.parallel import joined
from course.utils.atomic_files import write_json

SIZES = ((64, 256, 1152), (32, 1024, 1152), (4, 4096, 3072))            # samples, tokens, width: DiT-XL/2 at 256 and 512 px, 3B
Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def steps(width: int) -> dict[str, tuple[Step, int]]:
    """Each step as a function of (x, y, shift, scale, gate), and how many (B, T, D) tensors forward and backward move."""
    norm = plain_norm(width)

    def first(x: Tensor, y: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        return (modulate(norm(x), shift, scale),)

    def second(x: Tensor, y: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        x = x + gate[:, None] * y
        return x, modulate(norm(x), shift, scale)

    def third(x: Tensor, y: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        return (x + gate[:, None] * y,)

    # forward: inputs and outputs; backward: output gradients, the inputs that it needs, input gradients
    return {"modulated LayerNorm": (first, 2 + 3), "gate, add, modulated LayerNorm": (second, 4 + 6), "gate, add": (third, 3 + 3)}


def by_hand(width: int) -> dict[str, Step]:
    """The same steps with `course.ops.fused_add_norm`."""
    eps = plain_norm(width).eps

    def first(x: Tensor, y: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        return fused_add_norm.add_norm(x, None, None, scale, shift, eps, 1.0)[1:]

    def second(x: Tensor, y: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        return fused_add_norm.add_norm(x, y, gate, scale, shift, eps, 1.0)

    def third(x: Tensor, y: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        return (fused_add_norm.Add.apply(x, y, gate, None),)

    return dict(zip(steps(width), (first, second, third), strict=True))


def both_ways(step: Step, inputs: list[Tensor]) -> Callable[[], object]:
    """A function without arguments that runs a step forward and backward, with random gradients of its outputs."""
    grads = [torch.randn_like(out) for out in step(*inputs)]
    wanted = [x for x in inputs if x.requires_grad]

    def run() -> None:
        torch.autograd.grad(step(*inputs), wanted, grads, allow_unused=True)

    return run


def measure(device: torch.device, small: bool) -> list[dict[str, Any]]:
    """Measure each step at each size."""
    rows, backend = [], "aot_eager" if small else "inductor"             # small: only to see that it works
    for samples, tokens, width in ((2, 16, 32),) if small else SIZES:
        for name, (step, moves) in steps(width).items():
            inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
                      for shape in [(samples, tokens, width)] * 2 + [(samples, width)] * 3]
            eager, found = timing.graphed_seconds(both_ways(step, inputs), device), []
            for way in (step, by_hand(width)[name]):
                torch._dynamo.reset()
                found.append(timing.graphed_seconds(both_ways(torch.compile(way, backend=backend), inputs), device))
            compiled, hand = found
            size = 2 * samples * tokens * width * moves
            rows.append({"case": name, "samples": samples, "tokens": tokens, "dim": width, "eager_ms": 1e3 * eager,
                         "compiled_ms": 1e3 * compiled, "hand_ms": 1e3 * hand, "bytes": size, "gb_per_s": size / compiled / 1e9,
                         "hand_gb_per_s": size / hand / 1e9})
            print(f"{name:32s} {samples} x {tokens} x {width}: {1e3 * eager:7.3f} ms, compiled {1e3 * compiled:7.3f} ms, "
                  f"{rows[-1]['gb_per_s']:6.0f} GB/s, by hand {1e3 * hand:7.3f} ms, "
                  f"{rows[-1]['hand_gb_per_s']:6.0f} GB/s", flush=True)
    return rows


def main(file: Path, small: bool) -> None:
    """Measure and write the rows as JSON."""
    with joined("cpu" if small else "auto") as world:
        found = {**timing.machine(world.device), "command": "python -m experiments.fused_kernels FILE" + " --small" * small,
                 "meaning": "steps of a DiT's block between matmuls, forward and backward, bf16, in a CUDA graph; bytes: the "
                            "least to be moved",
                 "rows": measure(world.device, small)}
    write_json(file, found)


if __name__ == "__main__":
    with command("FILE [--small]") as words:
        main(Path(words[0]), "--small" in sys.argv)
