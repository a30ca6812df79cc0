"""What is gained by choosing the algorithms of products, `course.products`: `python -m course.perf.products FILE`.

Each product of a layer and of the head by itself, by PyTorch's choice and by ours; then whole training steps in a CUDA graph,
captured with either, by turns in one process. On a CPU tiny, with --small, and there is nothing to choose.
"""

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from course import config as configuration
from course import cublaslt, trial
from course.data import train_loader
from course.files import atomic
from course.graphs import graphed
from course.models import DiTConfig
from course.parallel import build_mesh, joined
from course.perf import bench
from course.perf.command import command
from course.perf.ladder import speed, timed
from course.perf.lanes import Row
from course.perf.layouts import hidden
from course.perf.rungs import LADDERS, Rung
from course.products import product_plain, weight_gradient_plain
from course.train import assemble

HAND = "bf16, compiled, narrow stream, kernels by hand, in a graph"
RUNGS = (("gpt", f"124M: {HAND}"), ("gpt", f"124M: {HAND}, two micro-batches"), ("gpt", f"350M: {HAND}"),
         ("gpt", f"1.3B: {HAND}"), ("dit", f"256 px: {HAND}"), ("dit", f"512 px: {HAND}"))
TURNS = 2


def shapes(rung: Rung) -> dict[str, tuple[int, int, int]]:
    """(rows, features in, features out) of each linear of a rung's layer, and of a GPT's head, by its name."""
    c = configuration.load(rung.preset, rung.settings)
    m: Any = c.model
    rows = c.train.micro_batch or c.train.global_batch
    rows *= m.tokens
    found = {"qkv": (rows, m.dim, 3 * m.dim), "out": (rows, m.dim, m.dim), "up": (rows, m.dim, hidden(m)),
             "down": (rows, hidden(m), m.dim)}
    return found if isinstance(m, DiTConfig) else found | {"head": (m.loss_chunk, m.dim, m.vocab)}


def each(kind: str, name: str) -> Iterator[Row]:
    """A row for every product of a rung's layer that is chosen: forward, backward and for the weight."""
    for linear, (rows, inputs, outputs) in shapes(LADDERS[kind].rungs[name]).items():
        for which in ("forward", "backward", "weight")[:2 if linear == "head" else 3]:
            one, tensors, way = product_of(which, rows, inputs, outputs, which == "forward" and linear != "head")
            others = one.others()
            times = trial.compare(cublaslt.calls(one, [*one.offered, *others], tensors, way))
            best = trial.quickest(times)
            yield {"rung": name.split(":")[0], "product": f"{linear}, {which}", "rows, inputs, outputs": [rows, inputs, outputs],
                   "offered": len(one.offered), "others": len(others), "pytorch_us": 1e6 * times[0],
                   "chosen_us": 1e6 * times[best], "from_others": best > len(one.offered),
                   "tflops": 2e-12 * rows * inputs * outputs / times[best]}


def product_of(which: str, rows: int, inputs: int, outputs: int, bias: bool) -> tuple[cublaslt.Matmul, list[Tensor], Any]:
    """A product of a linear, tensors for it, whose numbers do not matter, and PyTorch's way to it."""
    first, second, size, turned, way = {
        "forward": ((rows, inputs), (outputs, inputs), (rows, outputs, inputs), "weight", cublaslt.plain(True)),
        "backward": ((rows, outputs), (outputs, inputs), (rows, inputs, outputs), "", cublaslt.plain(False)),
        "weight": ((rows, outputs), (rows, inputs), (outputs, inputs, rows), "x", weight_gradient_plain)}[which]
    one = cublaslt.matmul(*size, torch.bfloat16, cublaslt.ENOUGH, torch.cuda.current_device(), turned,
                          cublaslt.BIAS if bias else cublaslt.NOTHING)
    return one, [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in (first, second, *[(outputs,)] * bias)], way


@contextmanager
def as_pytorch_chooses() -> Iterator[None]:
    """Inside the block no algorithm is chosen: GELU's gradient is merged where what cuBLASLt thinks fastest is fast."""
    with (patch.object(cublaslt, "product", product_plain), patch.object(cublaslt, "weight_gradient", weight_gradient_plain),
          patch.object(cublaslt, "in_one_wave", lambda one: [by for by in one.offered[:1] if by.waves <= 1])):
        yield


def whole(kind: str, name: str, small: bool) -> Iterator[Row]:
    """Whole steps of a rung, by turns with PyTorch's choice and with ours; compiled once."""
    ladder = LADDERS[kind]
    tiny = (*ladder.tiny, "train.device=cpu", "compile=false", "graphs=false") if small else ()
    config = configuration.load(ladder.rungs[name].preset, [*ladder.rungs[name].settings, *tiny])
    with joined(config.train.device) as world:
        mesh = build_mesh(config.parallel, world)
        training: Any = assemble(config, mesh)
        with closing(train_loader(config, mesh.dp, world.device, 0, training.model.example)) as batches:
            for turn, chosen in enumerate([False, True] * TURNS):
                step = training.step if small else graphed(training.step.step, training.gradients, mesh)
                with nullcontext() if chosen else as_pytorch_chooses():
                    ms, driver = timed(step, batches, world.device, small)
                yield {"rung": name, "turn": turn // 2, "chosen": chosen, "ms": ms, **speed(config, ms), **driver}
                del step                            # and with it what its graph keeps


def forget() -> None:
    """Free what the rung before kept."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(file: Path, small: bool) -> None:
    """Measure, and write the rows as JSON, after each."""
    device = torch.device("cpu" if small else "cuda")
    found: dict[str, Any] = {
        **bench.machine(device), "command": "python -m course.perf.products FILE" + " --small" * small,
        "meaning": "products: of random numbers, each alone until the clock has settled, by the algorithm that PyTorch takes and "
                   "by the fastest of those offered and others that gives its bits; steps: whole training steps in a CUDA graph, "
                   "where nothing is chosen and where products and GELU's gradient are, by turns in one process",
        "products": [], "steps": []}
    for kind, name in RUNGS:
        for row in () if small or "two micro" in name else each(kind, name):
            found["products"].append(row)
            print(f"{row['rung']:7s} {row['product']:15s} {row['pytorch_us']:7.1f} us, chosen {row['chosen_us']:7.1f} us, of "
                  f"{row['offered']} offered and {row['others']} others", flush=True)
        forget()
        for row in whole(kind, name, small):
            found["steps"].append(row)
            print(f"{row['rung']:80s} {'chosen' if row['chosen'] else 'PyTorch':8s} {row['ms']:8.2f} ms", flush=True)
            with atomic(file) as temporary:
                temporary.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with command("FILE [--small]") as words:
        main(Path(words[0]), "--small" in sys.argv)
