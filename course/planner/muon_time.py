"""Predict the seconds of Muon's update of the blocks' matrices (`course/ops/muon.py`): products, memory-bound passes, exchange.

A Newton-Schulz iteration of a matrix (m, n), m <= n, has three products: 2·m²·n FLOPs of x xᵀ, 2·m³ of its square, and 2·m²·n of
the polynomial's product with x. Five iterations take 5·(4·m²·n + 2·m³) FLOPs. The ranks that hold parts of a weight share this
work. Cost on the host is not measured: about 60 launches per weight, which a CUDA graph saves.
"""

from collections.abc import Iterator, Sequence

from course.models import GPTConfig, ModelConfig
from course.models.linears import Linear, linears
from course.ops.muon import ITERATIONS
from course.planner import collectives
from course.planner.rank_workload import RankWorkload

# bytes per number of a rank's own part: gradient over its scale, momentum (product, sum, choice, copy), look ahead (product, sum)
MOMENTUM = (8, 8, 12, 12, 8, 8, 12)
UPDATE = (8, 12, 8)                                  # decayed weight, choice, copy


def muon_time(local: RankWorkload, layers: int) -> float:
    """Seconds of the update on a rank with `layers` blocks. It shares the products equally, but has at least one weight's."""
    whole = [orthogonalize_time(local, *stack(linear, local.m)) for linear in linears(local.m)]
    ranks = local.dp * local.p.cp * local.p.tp
    return max(layers * sum(whole) / ranks, max(whole)) + own_time(local, layers) + exchange_time(local, layers)


def stack(linear: Linear, m: ModelConfig) -> tuple[int, int, int]:
    """(number of matrices, their rows, columns) of a linear's weight: its first logical dim numbers the matrices."""
    gates = 2 if isinstance(m, GPTConfig) and m.mlp == "swiglu" else 1
    number = {"blocks.attn.qkv": m.heads // m.groups + 2, "blocks.mlp.up": gates}.get(linear.name, 1)
    return number, linear.n // number, linear.k


def products(number: int, rows: int, columns: int) -> Iterator[tuple[int, int, int]]:
    """The (m, k) @ (k, n) of one iteration for all matrices of a weight; m counts the rows of all."""
    short, long = sorted((rows, columns))
    yield from ((number * short, long, short), (number * short, short, short), (number * short, short, long))


def orthogonalize_time(local: RankWorkload, number: int, rows: int, columns: int) -> float:
    """Seconds to orthogonalize a weight, and to copy it from its messages. With 16-bit matmuls all of this is in bf16."""
    size, square = number * rows * columns * local.low, number * min(rows, columns)**2 * local.low          # bytes
    precision = "bf16" if local.low == 2 else local.config.precision
    matmuls = sum(local.kernels.matmul(*sizes, precision) for sizes in products(number, rows, columns))
    around = [size, 2 * size, 2 * size, 2 * size, 2 * size]                 # norm, division, scale; two copies from messages
    within = [2 * square, 2 * square, 3 * square, 2 * size, 3 * size]       # B·s, C·s, sum; A·x, sum
    return ITERATIONS * (matmuls + passes(local, within)) + passes(local, around)


def own_time(local: RankWorkload, layers: int) -> float:
    """Seconds of momentum and update of a rank's own part of the weights."""
    each = [*MOMENTUM, 4 + local.low * (local.low < 4), 2 * local.low, 8 + local.low, *UPDATE]
    return layers * sum(passes(local, [size * number / sharers(local) for size in each]) for number in on_rank(local))


def exchange_time(local: RankWorkload, layers: int) -> float:
    """Seconds of the two all-to-alls and of the copies into their messages, as if each rank sent equally to all.

    A rank gathers an equal share of the weights, unless it has them whole, and receives the results of its own part.
    """
    held = local.low * layers * sum(on_rank(local))
    work, part = held / (local.dp * local.p.cp), held / sharers(local)
    apart = local.p.tp * sharers(local) > 1
    group = local.groups["all"]
    return (passes(local, [2 * work, 2 * part]) + collectives.all_to_all(work if apart else 0.0, group)
            + collectives.all_to_all(part, group))


def on_rank(local: RankWorkload) -> list[float]:
    """Numbers of the weights of a block on a rank, before ZeRO shards them."""
    return [linear.k * linear.n / (local.p.tp if linear.cut else 1) for linear in linears(local.m)]


def sharers(local: RankWorkload) -> int:
    """Ranks over which ZeRO shards what the optimizer updates; 1 without it."""
    return local.groups["shard"].size if local.p.zero else 1


def passes(local: RankWorkload, sizes: Sequence[float]) -> float:
    """Seconds of memory-bound kernels that read and write so many bytes."""
    return local.seconds([("elementwise", size) for size in sizes])
