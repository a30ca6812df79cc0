"""Lesson 17: the pieces of a performance model, and their sum.

The functions here are the answers to the exercises written inside a cell of the lesson.
"""

from collections.abc import Sequence

import torch

from course.lab.checks import random_inputs, return_values
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.instruments.recorded_runs import Rates, Run
from course.lab.sandbox.limits import Limits

QUICK = Limits(seconds=60)


def block_flops(tokens: int, dim: int, hidden: int, kv_dim: int, causal: bool) -> tuple[float, float]:
    """FLOPs that a step executes for one sample in one block: (linear maps, attention), forward and backward.

    Queries have `dim` features, keys and values `kv_dim` each. Fused attention computes its scores again in the backward pass,
    and with a causal mask only half of everything.
    """
    weights = dim * (dim + 2 * kv_dim) + dim * dim + 2 * dim * hidden
    forward, backward = 4.0 * tokens**2 * dim, 10.0 * tokens**2 * dim
    return 6.0 * tokens * weights, (forward + backward) * (0.5 if causal else 1.0)


def activation_bytes(tokens: int, dim: int, hidden: int, tp: int, sp: bool) -> float:
    """Bytes that one eager bf16 block, cut over tp ranks, keeps for backward on one rank; sp: with sequence parallelism.

    Norms' inputs are float32. With sequence parallelism the linears gather their input again in the backward pass.
    """
    around = 2 * dim * 4 + 2 * dim * 2                                  # two norms: what they are given, what they put out
    within = 3 * dim * 2 + dim * 2 + 2 * hidden * 2                     # qkv, attention's answer, before and after GELU
    return tokens * ((around / tp if sp else around) + within / tp)


def all_reduce_seconds(size: float, ranks: int, latency: float, bandwidth: float) -> float:
    """Seconds of a ring all-reduce of `size` bytes: its steps in turn, each `latency` and the time of a piece."""
    steps = 2 * (ranks - 1)
    return steps * (latency + size / ranks / bandwidth)


def pipeline_seconds(stages: Sequence[float], micros: int, chunks: int) -> float:
    """Seconds of a step of a pipeline: `stages` are the ranks' seconds for one micro-batch, forward and backward.

    The slowest rank runs all its micro-batches, and waits once for the others, less with `chunks` on each rank.
    """
    slowest = max(stages)
    return micros * slowest + (sum(stages) - slowest) / chunks


def step_seconds(run: Run, rates: Rates) -> float:
    """Seconds of a step: what the pieces of this lesson add up to. Nothing overlaps; the last rank of a pipeline has the head."""
    n = run.samples * run.tokens
    linears, attention = block_flops(run.tokens, run.dim, run.hidden, run.dim, run.causal)
    computing = run.samples * (linears / rates.matmul + attention / rates.attention) / run.tp
    reducing = 4 * all_reduce_seconds(2 * n * run.dim, run.tp, rates.latency, rates.bandwidth)
    block = computing + run.moved / rates.memory + reducing
    stages = [run.depth / run.pp * block] * run.pp
    stages[-1] += 6 * n * run.dim * run.vocab / run.tp / rates.matmul
    return pipeline_seconds(stages, run.micros, 1) + run.update / rates.memory


def draw_blocks(seed: int, hidden: bool) -> Tensors:
    """Blocks of several shapes; every second one is causal, and some have fewer features of keys and values."""
    generator = random_inputs.generator(seed)
    count = 8 if hidden else 6
    tokens = torch.randint(100, 5000 if hidden else 3000, (count,), generator=generator)
    dim = 64 * torch.randint(3, 60, (count,), generator=generator)
    wide = dim * torch.randint(2, 6, (count,), generator=generator) + 16
    kv = torch.where(torch.arange(count) % 3 == 2, dim, dim // torch.randint(2, 9, (count,), generator=generator))
    return {"blocks": torch.stack([tokens, dim, wide, kv, torch.arange(count) % 2], 1)}


def run_block_flops(inputs: Tensors) -> Tensors:
    """Both numbers of each block, those of causal ones apart."""
    found = [return_values.pair(block_flops(tokens, dim, wide, kv, bool(causal)), "block_flops", "(linear maps, attention)")
             for tokens, dim, wide, kv, causal in inputs["blocks"].tolist()]
    numbers = torch.tensor([[return_values.number(value, "block_flops") for value in both] for both in found],
                           dtype=torch.float64)
    return {"linears": numbers[:, 0], "attention": numbers[:, 1]}


def blocks_asked(inputs: Tensors) -> list[str]:
    """Each block as a call."""
    return ["block_flops(tokens={}, dim={}, hidden={}, kv_dim={}, causal={})".format(*shape, bool(causal))
            for *shape, causal in inputs["blocks"].tolist()]


def draw_activations(seed: int, hidden: bool) -> Tensors:
    """Blocks and numbers of ranks; the first is not cut."""
    generator = random_inputs.generator(seed)
    count = 7 if hidden else 4
    tp = 2 ** torch.randint(1, 6 if hidden else 4, (count,), generator=generator)
    tp[0] = 1
    dim = 32 * tp * torch.randint(2, 20, (count,), generator=generator)
    wide = dim * torch.randint(2, 6, (count,), generator=generator) + 32 * tp
    return {"blocks": torch.stack([tp * torch.randint(10, 500, (count,), generator=generator), dim, wide, tp], 1)}


def run_activation_bytes(inputs: Tensors) -> Tensors:
    """The bytes of each block, without and with sequence parallelism."""
    blocks = inputs["blocks"].tolist()
    return {name: return_values.numbers((activation_bytes(tokens, dim, wide, tp, sp) for tokens, dim, wide, tp in blocks),
                                        "activation_bytes")
            for name, sp in (("tensor", False), ("sequence", True))}


def activations_asked(inputs: Tensors) -> dict[str, list[str]]:
    """Each block as a call."""
    return {name: ["activation_bytes(tokens={}, dim={}, hidden={}, tp={}, sp={})".format(*shape, sp)
                   for shape in inputs["blocks"].tolist()] for name, sp in (("tensor", False), ("sequence", True))}


def draw_rings(seed: int, hidden: bool) -> Tensors:
    """Messages from kilobytes to gigabytes over rings of several lengths; the first ring has one rank."""
    generator = random_inputs.generator(seed)
    count = 9 if hidden else 6
    ranks = torch.randint(2, 65 if hidden else 17, (count,), generator=generator).double()
    ranks[0] = 1
    size = 10 ** (3 + 6 * torch.rand(count, generator=generator, dtype=torch.float64))
    latency = 1e-6 + 2e-5 * torch.rand(count, generator=generator, dtype=torch.float64)
    bandwidth = 1e9 + 4e11 * torch.rand(count, generator=generator, dtype=torch.float64)
    return {"rings": torch.stack([size, ranks, latency, bandwidth], 1)}


def rings(inputs: Tensors) -> dict[str, list[tuple[float, int, float, float]]]:
    """The arguments of each ring, and those of the same bytes where a step takes no time, or a link any number of bytes."""
    given = [(size, int(n), latency, bandwidth) for size, n, latency, bandwidth in inputs["rings"].tolist()]
    return {"seconds": given, "bytes": [(size, n, 0.0, bandwidth) for size, n, _, bandwidth in given],
            "steps": [(0.0, n, latency, bandwidth) for _, n, latency, bandwidth in given]}


def run_all_reduce_seconds(inputs: Tensors) -> Tensors:
    """The seconds of each ring."""
    return {name: return_values.numbers((all_reduce_seconds(*ring) for ring in given), "all_reduce_seconds")
            for name, given in rings(inputs).items()}


def rings_asked(inputs: Tensors) -> dict[str, list[str]]:
    """Each ring as a call."""
    return {name: ["all_reduce_seconds(size={:.6g}, ranks={}, latency={:.4g}, bandwidth={:.4g})".format(*ring) for ring in given]
            for name, given in rings(inputs).items()}


def draw_stages(seed: int, hidden: bool) -> Tensors:
    """Seconds of each rank for one micro-batch, first alike and then not, with micro-batches and chunks.

    The slowest rank of the first pipeline is in the middle, of the second it is the first, of the third the last; the last
    pipeline has one rank.
    """
    generator = random_inputs.generator(seed)
    count, most = (6, 9) if hidden else (5, 6)
    p = torch.randint(3, most, (count,), generator=generator)
    p[-1] = 1
    seconds = 0.1 + torch.rand(count, most, generator=generator, dtype=torch.float64)
    for row, slowest in enumerate((1 + random_inputs.number(seed) % (int(p[0]) - 2), 0, int(p[2]) - 1)):
        seconds[row, slowest] += 1
    return {"ranks": p, "micros": p * torch.randint(1, 6, (count,), generator=generator),
            "chunks": torch.randint(2, 5, (count,), generator=generator), "seconds": seconds}


def pipelines(inputs: Tensors) -> dict[str, list[tuple[list[float], int, int]]]:
    """The arguments of each pipeline, with ranks that are alike, with ranks that are not, and interleaved."""
    rows = list(zip(*(inputs[name].tolist() for name in ("ranks", "micros", "chunks", "seconds")), strict=True))
    return {"alike": [(seconds[:1] * p, micros, 1) for p, micros, _, seconds in rows],
            "unequal": [(seconds[:p], micros, 1) for p, micros, _, seconds in rows],
            "interleaved": [(seconds[:p], micros, chunks) for p, micros, chunks, seconds in rows]}


def run_pipeline_seconds(inputs: Tensors) -> Tensors:
    """The seconds of each pipeline; and whether a list stays as it is."""
    found = {name: return_values.numbers((pipeline_seconds(*one) for one in given), "pipeline_seconds")
             for name, given in pipelines(inputs).items()}
    given = [3.0, 1.0, 2.0]
    pipeline_seconds(given, 4, 1)
    return found | {"kept": torch.tensor(float(given == [3.0, 1.0, 2.0]))}


def pipelines_asked(inputs: Tensors) -> dict[str, list[str]]:
    """Each pipeline as a call."""
    return {name: [f"pipeline_seconds(stages=[{', '.join(f'{x:.6g}' for x in stages)}], micros={micros}, chunks={chunks})"
                   for stages, micros, chunks in given] for name, given in pipelines(inputs).items()}


RATES = (6e14, 4e14, 2.5e12, 1e-5, 3e11)             # around which rates are drawn


def draw_runs(seed: int, hidden: bool) -> Tensors:
    """Runs as rows of numbers, and the rates of each: on one GPU, tensor-parallel ones, pipelines, and both, as many of each.

    Some of each kind have several micro-batches: gradients are added up without a pipeline, too.
    """
    generator = random_inputs.generator(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    each = 3 if hidden else 2
    rows = []
    for number in range(4 * each):
        tp, pp = (2 ** (draw(1, 4) if number % each else 2) if number // each in cut else 1 for cut in ((1, 3), (2, 3)))
        samples, tokens, dim, layers = draw(1, 9), draw(256, 3000), 64 * tp * draw(2, 12), draw(1, 7)
        wide, moved = (draw(2, 5), 100) if number % each else (3, 3000)                 # 3000: memory takes longest
        rows.append([samples, number % each + draw(1, 9), tokens, dim, wide * dim, layers * pp,
                     draw(1000, 60000) if number % 2 else 0, int(number % each != 0), tp, pp, moved * samples * tokens * dim,
                     400 * dim**2 * layers])
    spread = 0.5 + torch.rand(len(rows), 5, generator=generator, dtype=torch.float64)
    return {"runs": torch.tensor(rows, dtype=torch.float64), "rates": spread * torch.tensor(RATES, dtype=torch.float64)}


def runs(inputs: Tensors) -> dict[str, list[tuple[Run, Rates]]]:
    """The arguments of each run, kind by kind."""
    found = []
    for row, rates in zip(inputs["runs"].tolist(), inputs["rates"].tolist(), strict=True):
        whole = [int(value) for value in row[:10]]
        run = Run(*whole[:7], bool(whole[7]), *whole[8:], *row[10:])    # type: ignore[arg-type, call-arg]
        found.append((run, Rates(*(float(f"{rate:.4g}") for rate in rates))))           # as many digits as are shown
    each = len(found) // 4
    return {name: found[i * each:(i + 1) * each] for i, name in enumerate(("one", "tensor", "pipeline", "both"))}


def run_step_seconds(inputs: Tensors) -> Tensors:
    """The seconds of each run."""
    return {name: return_values.numbers((step_seconds(*one) for one in given), "step_seconds")
            for name, given in runs(inputs).items()}


def runs_asked(inputs: Tensors) -> dict[str, list[str]]:
    """Each run as a call."""
    return {name: [f"step_seconds({run}, {rates})" for run, rates in given] for name, given in runs(inputs).items()}


EXERCISES = [
    Exercise("block-flops", "17", (f"{__name__}.block_flops",), draw_blocks, run_block_flops, {
        "linears": "the FLOPs of the linear maps are right",
        "attention": "the FLOPs of attention are right, with a mask and without"}, cases=blocks_asked, limits=QUICK),
    Exercise("activation-bytes", "17", (f"{__name__}.activation_bytes",), draw_activations, run_activation_bytes, {
        "tensor": "the bytes are right with tensor parallelism alone (sp=False)",
        "sequence": "they are right with sequence parallelism (sp=True)"}, cases=activations_asked, limits=QUICK),
    Exercise("all-reduce-seconds", "17", (f"{__name__}.all_reduce_seconds",), draw_rings, run_all_reduce_seconds, {
        "seconds": "the seconds of a ring all-reduce are right, for any size and number of ranks",
        "bytes": "the seconds of the bytes alone are right (latency=0)",
        "steps": "the seconds of the steps alone are right (size=0)"}, cases=rings_asked, limits=QUICK),
    Exercise("pipeline-seconds", "17", (f"{__name__}.pipeline_seconds",), draw_stages, run_pipeline_seconds, {
        "alike": "the seconds of a pipeline are right where all ranks take equally long",
        "unequal": "they are right where one rank is slower than the others",
        "interleaved": "they are right with several chunks on each rank",
        "kept": "it does not change `stages`"}, flags={
        "kept": "the list has changed"}, cases=pipelines_asked, limits=QUICK),
    Exercise("step-seconds", "17", (f"{__name__}.step_seconds",), draw_runs, run_step_seconds, {
        "one": "the seconds of a step on one GPU are right",
        "tensor": "they are right with tensor parallelism",
        "pipeline": "they are right with a pipeline",
        "both": "they are right with both"}, cases=runs_asked, points=2, limits=QUICK),
]
