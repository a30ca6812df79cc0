"""Predict the time of a block's router and experts on the rank whose experts take the most rows.

    parts = experts_time(local)          # for one micro-batch, in the form of `block_time.block_time`

Experts leave compiled graphs, so PyTorch's operators move rows: into the order of the experts, over ep, and back. Dispatch sends
rows in the router's format, 32 bits; combine returns 16-bit outputs; in the backward pass, gradients of both kinds travel the
other way. An all-to-all takes as long as the fullest rank's rows take on its links (`collectives.all_to_all`).

The host waits for numbers of rows (`waits`), so in the forward pass it cannot run ahead of the GPU.
"""

from course.models import GPTConfig
from course.planner import collectives
from course.planner.block_time import part, region_time
from course.planner.parameter_memory import expert_weights
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
    up, down = gated(local) * m.expert_hidden / p.tp, m.expert_hidden / p.tp
    groups, precision, kernels = m.experts / p.ep, "bf16" if c.precision == "fp8" else c.precision, local.kernels
    rest, D, E = local.rest, m.dim, m.experts
    routing = [kernels.matmul(rest, D, E, "fp32"), kernels.matmul(rest, E, D, "fp32"), kernels.matmul(E, rest, D, "fp32")]
    forward, backward, each = routing[0], sum(routing[1:]), local.rows / groups
    for k, n in ((D, up), (down, D)):
        forward += kernels.grouped(groups, each, k, n, precision)
        backward += kernels.grouped(groups, each, n, k, precision) + kernels.grouped(groups, n, each, k, precision)
    return forward, backward


def gated(local: RankWorkload) -> int:
    """Matrices into an expert's hidden units."""
    return 2 if isinstance(local.m, GPTConfig) and local.m.mlp == "swiglu" else 1


def forward_bytes(local: RankWorkload) -> Moved:
    """The bytes that router and experts read and write in the forward pass, without matmuls."""
    m, low, wide, choices, rows = local.m, local.low, local.wide, local.choices * local.m.dim, local.rows * local.m.dim
    assert isinstance(m, GPTConfig)
    inner = local.rows * m.expert_hidden / local.p.tp
    scores = local.rest * m.experts
    moved: Moved = [("elementwise", 2 * wide * scores)] * 12            # softmax, choice, sums for the balance
    moved += [("elementwise", SORT * local.choices)] * 2 + [("copy", 2 * wide * choices)]               # into order
    moved += [("elementwise", rows * (wide + low) * (low < wide)), ("elementwise", inner * (5 if gated(local) == 2 else 2) * low)]
    moved += [("copy", 2 * low * choices)] * 2 + [("elementwise", 2 * low * choices)] * 2                # back, gates, sum
    if local.casts:
        moved += [("elementwise", 6.0 * expert_weights(local.config))]
    if local.p.ep > 1:                              # by sender and by expert
        moved += [("elementwise", SORT * local.rows)] * 2 + [("copy", 2 * wide * rows), ("copy", 2 * low * rows)]
    return moved


def backward_bytes(local: RankWorkload) -> Moved:
    """The same in the backward pass. Gradients of a gathered row are added to zeros, since it may have been gathered twice."""
    m, low, wide, choices, rows = local.m, local.low, local.wide, local.choices * local.m.dim, local.rows * local.m.dim
    assert isinstance(m, GPTConfig)
    inner = local.rows * m.expert_hidden / local.p.tp
    moved: Moved = [("elementwise", 2 * wide * local.rest * m.experts)] * 12
    moved += [("elementwise", 2 * low * choices), ("elementwise", 4 * low * choices)]                    # gates, and theirs
    moved += [("elementwise", SORT * local.choices)] * 2 + [("shuffle", 3 * low * choices), ("shuffle", 3 * wide * choices)]
    moved += [("copy", 2 * low * choices), ("elementwise", rows * (wide + low) * (low < wide)),
              ("elementwise", inner * (8 if gated(local) == 2 else 3) * low)]
    if local.casts:
        moved += [("elementwise", 6.0 * expert_weights(local.config))]
    if local.p.ep > 1:
        moved += [("copy", 2 * wide * rows), ("copy", 2 * low * rows)]
    return moved


def exchange_time(local: RankWorkload) -> tuple[float, float]:
    """(forward, backward) seconds of dispatch and combine, and of the host's waits. A rank receives its experts' rows and keeps
    those of its own tokens."""
    m, group = local.m, local.groups["ep"]
    sizes = collectives.all_to_all(8 * m.experts, group) if isinstance(m, GPTConfig) else 0.0
    both = sum(collectives.all_to_all(size * local.rows * m.dim, group) for size in (local.wide, local.low))
    return both + sizes + waits(local) * WAIT, both


def waits(local: RankWorkload) -> int:
    """How often the host waits for the GPU in one forward pass of a block's experts: for the numbers of rows by expert, and of
    all; with ep for those to send, and for the order of received ones; for the groups of formats other than bf16."""
    c = local.config
    grouped = c.precision in ("bf16", "fp8")
    return 2 + 2 * (local.p.ep > 1) + (0 if grouped else 2)
