"""Up to how many tokens is packed attention faster than PyTorch's? `python -m experiments.packed_attention FILE` on one GPU.

Forward and backward in bf16. The library's kernels write one packed gradient of queries, keys and values, and its sum over
tokens, a bias's gradient. PyTorch's attention returns three gradients; that they are then packed and summed is counted by its
bytes. --small tries it on a CPU.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from course.bench import timing
from course.bench.command_line import command
from course.bench.gpu_clock import clock_and_power
from course.ops import packed_attention  # noqa: F401 (registers the operators)
from course.parallel import joined
from course.utils.atomic_files import write_json

WIDTHS, TOKENS, HEADS, IN_ALL = (48, 64, 72, 96), (256, 512, 1024, 1536, 2048, 4096, 8192), 16, 32768
BANDWIDTH = 4e12                                     # bytes/s of an H200's memory in a kernel that copies
Row = dict[str, Any]


def packed(qkv: Tensor, dy: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The gradient of qkv (B, T, 3, h, d), and its sum (3, h, d), by the library's kernels. dy: (B, T, h, d)."""
    y, lse = torch.ops.course.attention(qkv, causal)
    return torch.ops.course.attention_backward(dy, qkv, y, lse, causal)


def pytorch(qkv: Tensor, dy: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """The gradients of queries, keys and values, 3 x (B, h, T, d), by PyTorch's attention and its own choice of a backend."""
    q, k, v = (x.detach().requires_grad_() for x in qkv.permute(2, 0, 3, 1, 4))
    y = scaled_dot_product_attention(q, k, v, is_causal=causal)
    return torch.autograd.grad(y, (q, k, v), dy.transpose(1, 2))


def row(device: torch.device, width: int, tokens: int, causal: bool, small: bool) -> Row:
    """Milliseconds of both, replayed from a CUDA graph, and how far their gradients differ."""
    samples, heads = (2, 2) if small else (IN_ALL // tokens, HEADS)
    torch.manual_seed(0)
    qkv = torch.randn(samples, tokens, 3, heads, width, dtype=torch.bfloat16, device=device)
    dy = torch.randn(samples, tokens, heads, width, dtype=torch.bfloat16, device=device)
    one, other = partial(packed, qkv, dy, causal), partial(pytorch, qkv, dy, causal)
    got, want = one()[0].float(), torch.stack(other()).permute(1, 3, 0, 2, 4).float()
    found = {"samples": samples, "heads": heads, "tokens": tokens, "head_dim": width, "causal": causal,
             "packed_ms": 1e3 * timing.graphed_seconds(one, device), "pytorch_ms": 1e3 * timing.graphed_seconds(other, device),
             "packing_ms": 1e3 * 3 * qkv.nbytes / BANDWIDTH,
             "difference": ((got - want).norm() / want.norm()).item()}
    print(f"{tokens} tokens, heads of {width}, causal={causal!s:5s} packed {found['packed_ms']:.3f} ms "
          f"PyTorch {found['pytorch_ms']:.3f} + {found['packing_ms']:.3f} ms", flush=True)
    return found


def main(file: Path, small: bool) -> None:
    """Measure and write the rows as JSON."""
    with joined("cpu" if small else "auto") as world:
        with clock_and_power(world.device) as clock:
            rows = [row(world.device, width, tokens, causal, small) for width in ((16,) if small else WIDTHS)
                    for causal in (False, True) for tokens in ((32,) if small else TOKENS)]
        write_json(file, {**timing.machine(world.device), **clock,
                          "command": "python -m experiments.packed_attention FILE" + " --small" * small,
                          "meaning": "forward and backward of attention in bf16; packed_ms: course.ops.packed_attention; "
                                     "pytorch_ms: scaled_dot_product_attention, packing_ms: reading its gradients twice and "
                                     "writing them once at 4 TB/s, calculated; difference: of the gradients, relative",
                          "rows": rows})


if __name__ == "__main__":
    with command("FILE [--small]") as words:
        main(Path(words[0]), "--small" in sys.argv)
