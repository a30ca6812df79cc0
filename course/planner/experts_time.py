"""Predict the time of a block's router and experts on the rank whose experts take the most rows.

    parts = experts_time(local)          # for one micro-batch, in the form of `block_time.block_time`

Dispatch sends rows and combine returns as many; in the backward pass their gradients travel the other way. An all-to-all takes as
long as the fullest rank's rows take on its links (`collectives.all_to_all`). With parallel.dispatch=gather all tokens are
gathered, and a reduce-scatter returns the sums.

The host waits for numbers of rows (`parameter_memory.expert_waits`). In such a forward pass it cannot run ahead of the GPU.
"""

from course.models import GPTConfig
from course.planner import collectives
from course.planner.block_time import part, region_time
from course.planner.parameter_memory import expert_waits, expert_weights, gated, gathers
from course.planner.rank_workload import Moved, RankWorkload

WAIT = 20e-6                                        # seconds from the end of what the host waits for to the next kernel: assumed
SORT = 16 * 16                                      # bytes per index: 16 passes read and write a key and an index of 8 bytes


def experts_time(local: RankWorkload) -> dict[str, float]:
    """Part -> seconds of a block's router and experts for one micro-batch."""
    matmul, matmul_back = matmul_time(local)
    kept, gone = local.seconds(forward_bytes(local)), local.seconds(backward_bytes(local))
    there, back = exchange_time(local)
    comm, comm_back = region_time(local)
    how = local.config.train.recompute
    # selective keeps the outputs of matmuls
    again = 0.0 if how == "none" else kept + there + comm + (matmul if how == "full" else 0.0)
    return part(matmul=(matmul, matmul_back), memory=(kept, gone), dispatch=(there, back), tensor=(comm, comm_back),
                recompute=(0.0, again))


def matmul_time(local: RankWorkload) -> tuple[float, float]:
    """(forward, backward) seconds of the router's matmuls, in 32 bits, and the experts'. FP8 leaves experts in bf16."""
    m, p, c = local.m, local.p, local.config
    assert isinstance(m, GPTConfig)
    up, down = gated(local.config) * m.expert_hidden / p.tp, m.expert_hidden / p.tp
    groups, precision, kernels = m.experts / p.ep, "bf16" if c.precision == "fp8" else c.precision, local.kernels
    rest, D, E = local.rest, m.dim, m.experts
    routing = [kernels.matmul(rest, D, E, "fp32"), kernels.matmul(rest, E, D, "fp32"), kernels.matmul(E, rest, D, "fp32")]
    forward, backward, each = routing[0], sum(routing[1:]), local.rows / groups
    for k, n in ((D, up), (down, D)):
        forward += kernels.grouped(groups, each, k, n, precision)
        backward += kernels.grouped(groups, each, n, k, precision) + kernels.grouped(groups, n, each, k, precision)
    return forward, backward


def forward_bytes(local: RankWorkload) -> Moved:
    """The bytes that router and experts read and write in the forward pass, without matmuls: `course/ops/permutation.py`."""
    m, low, wide, n, (choices, rows) = local.m, local.low, local.wide, local.rest * local.m.dim, moved_rows(local)
    assert isinstance(m, GPTConfig)
    kind = kind_of(local)
    moved: Moved = [(kind, 2 * wide * local.rest * m.experts)] * 12     # softmax, choice, sums for the balance
    moved += [(kind, n * (wide + low) * (low < wide)), ("elementwise", SORT * choices), ("copy", 2 * low * choices * m.dim),
              (kind, rows * m.expert_hidden / local.p.tp * (1 + gated(local.config)) * low),
              ("fused", low * (choices + choices / m.top_k) * m.dim)]
    if local.casts:
        moved += [("elementwise", 6.0 * expert_weights(local.config))]
    if local.p.ep > gathers(local.config):          # by sender and by expert
        moved += [("elementwise", SORT * rows)] * 2 + [("copy", 2 * low * rows * m.dim)] * 2
    return moved


def backward_bytes(local: RankWorkload) -> Moved:
    """The same in the backward pass."""
    m, low, wide, n, (choices, rows) = local.m, local.low, local.wide, local.rest * local.m.dim, moved_rows(local)
    assert isinstance(m, GPTConfig)
    kind = kind_of(local)
    moved: Moved = [(kind, 2 * wide * local.rest * m.experts)] * 12
    moved += [("fused", low * (2 * choices + choices / m.top_k) * m.dim), ("fused", low * (choices + choices / m.top_k) * m.dim),
              (kind, rows * m.expert_hidden / local.p.tp * (5 if gated(local.config) == 2 else 3) * low),
              (kind, n * (wide + low) * (low < wide))]
    if local.casts:
        moved += [("elementwise", 6.0 * expert_weights(local.config))]
    if local.p.ep > gathers(local.config):
        moved += [("copy", 2 * low * rows * m.dim)] * 2
    return moved


def kind_of(local: RankWorkload) -> str:
    """The kind of kernels between matmuls: compiled unless the host waits for numbers of rows."""
    return "fused" if local.config.compile and not expert_waits(local.config) else "elementwise"


def moved_rows(local: RankWorkload) -> tuple[float, float]:
    """(choices that are brought into order; rows of the experts): with parallel.dispatch=gather those of all ep ranks' tokens."""
    ranks = gathers(local.config)
    return local.choices * ranks, local.choices * ranks if ranks > 1 else local.rows


def exchange_time(local: RankWorkload) -> tuple[float, float]:
    """(forward, backward) seconds of dispatch and combine, and of the host's waits. A rank receives its experts' rows and keeps
    those of its own tokens."""
    m, group, waiting = local.m, local.groups["ep"], expert_waits(local.config) * WAIT
    assert isinstance(m, GPTConfig)
    if gathers(local.config) > 1:
        whole = local.low * local.tokens * m.dim * local.p.ep
        both = collectives.all_gather(whole, group) + collectives.reduce_scatter(whole, group)
        return both + waiting, both
    both = 2 * collectives.all_to_all(local.low * local.rows * m.dim, group)
    return both + collectives.all_to_all(8 * m.experts, group) + waiting, both
