"""Predict the memory of a training step on the fullest rank, from the configuration alone.

`predict(config)` adds up the live tensors at each moment at which memory can peak, and takes the largest sum:

    first        the first step, before optimizer states exist. FP8 with delayed scales multiplies in 16 bits in this step, and
                 pipeline stages run a rehearsal with more forward passes in flight than later (`Pipeline._agree`)
    loss         the last micro-batch's forward pass is done: all saved activations are alive, and the head is at work
    backward     the last block's backward pass: the head's is done, and one block's temporaries are alive
    end          the first block's backward pass: all gradients are alive, and few activations
    reduce       stages 2 and 3 of ZeRO: the first block's backward pass is done, and its gradients are copied to be reduced
    embedding    the same for the embedding's, or for those of a weight that it shares with the head
    optimizer    gradients, states, and the temporaries of Muon, no activations

The sum counts what `torch.cuda.max_memory_allocated` counts, from the start of the process. Each term has its own function, in
`parameter_memory.py` or `activation_memory.py`.

Units: a rank's matmuls see n = B·T tokens of a micro-batch; its norms and sums see s (s = n/tp with sequence parallelism, else
s = n). D is the model's width and M the MLP's, both divided by tp where tp splits them. `low` is the matmuls' bytes per number,
`stream` those of the residual stream. To check a block, count its saved tensors in units of 2·n·D bytes: in 16 bits, without
parallelism, a GELU block keeps

    eager                18        two norm inputs in float32: 2·2; norm outputs: 2; queries, keys, values: 3;
                                   attention output: 1; hidden units before and after GELU: 8
    compiled             17, 16    wide, narrow stream: backward recomputes the second norm's input as the first plus
                                   the output of attention's branch, which is kept in 16 bits
    compiled, selective  11, 10    neither norm outputs nor GELU's
    full                 2, 1      the block's input

and some statistics. The method follows Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1, where a block keeps 34·n·D bytes
with dropout. The terms here are what this library's blocks keep, and tests measure them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from course.config import Config
from course.parallel.pipeline_parallel.schedules import alive, passes_of
from course.planner import activation_memory, parameter_memory, sharded_memory
from course.planner.parameter_memory import Rank

MIB = 2**20
# cuBLAS workspace, in PyTorch's allocator: the default on Hopper (PyTorch, CUDA semantics, "cuBLAS workspaces")
CUBLAS = 32 * MIB
# bytes on an H200 that PyTorch does not count (results/gpt_h200.json, vit_h200.json, used_gb - reserved_gb): of a process with
# its CUDA context and compiled code, 0.79 to 0.80 GB; more of captured graphs, 0.06 to 0.08; of an NCCL communicator, 0.68 to
# 0.98, and of one between two stages of a pipeline 0.44 (communicators_2xh200.json)
CONTEXT, GRAPHS, COMMUNICATOR, WIRE = 804e6, 76e6, 0.93e9, 0.44e9
# what the allocator needs beyond the tensors that are predicted: 0.14 to 0.73 GB (least_memory_h200.json), which this covers
FRAGMENTS, SHARE = 0.5e9, 0.02


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank at its fullest moment."""

    parameters: int                                 # the weights that the rank computes with
    gradients: int
    states: int                                     # optimizer states, with master weights
    average: int                                    # moving average of the weights
    copies: int                                     # 16-bit casts of weights, kept for backward
    activations: int                                # what blocks, embedding and final norm keep for backward
    logits: int                                     # the head's output, and what the loss keeps
    batch: int                                      # the loader's batch, and its form as model input
    buffers: int                                    # communication: gradient shards, pipeline messages
    workspace: int                                  # temporaries
    reserve: int                                    # beyond tensors: CUDA context, NCCL, fragmentation
    moment: str                                     # as above
    stage: int                                      # rank along pp

    @property
    def allocated(self) -> int:
        """The bytes of all tensors, which `torch.cuda.max_memory_allocated` measures."""
        return sum(getattr(self, name) for name in TENSORS)

    @property
    def total(self) -> int:
        """Bytes that the device needs: `allocated` and `reserve`."""
        return self.allocated + self.reserve


TENSORS = tuple(entry.name for entry in fields(Memory) if entry.name not in ("reserve", "moment", "stage"))


def predict(config: Config) -> Memory:
    """Predict the memory of the fullest rank. parallel.dp=0 counts as 1, since the number of GPUs is unknown.

    In a pipeline only the first two stages and the last one count: no other has more blocks or micro-batches than these, and the
    second already talks to two neighbors. Experts in some of the blocks are an exception.
    """
    return max((of_rank(rank) for rank in ranks(config, fullest(config))), key=lambda memory: memory.total)


def fullest(config: Config) -> list[int]:
    """The stages of a pipeline that may be the fullest."""
    pp = config.parallel.pp
    return [*range(pp)] if getattr(config.model, "moe_every", 1) > 1 else sorted({0, min(1, pp - 1), pp - 1})


def fits(config: Config, room: float) -> bool:
    """Whether `predict` is at most `room` bytes. Stops at the first moment that is not."""
    return all(memory.total <= room for stage in fullest(config) for rank in ranks(config, [stage]) for memory in moments(rank))


def ranks(config: Config, stages: Iterable[int] = ()) -> Iterator[Rank]:
    """Yield the first rank along dp, cp and tp, which has the most samples and tokens, of these pipeline stages; (): of all."""
    p, t, m = config.parallel, config.train, config.model
    samples = -(-t.global_batch // max(p.dp, 1))
    micro = min(t.micro_batch or samples, samples)
    whole, tokens = m.tokens, parameter_memory.tokens_of(config)
    local = -(-tokens // p.tp) if p.sp else tokens
    parts = p.pp * p.chunks
    for stage in stages or range(p.pp):
        shares = tuple(m.depth // parts + (chunk * p.pp + stage < m.depth % parts) for chunk in range(p.chunks))
        yield Rank(config, stage, shares, micro, -(-samples // micro), whole, tokens, local)


def of_rank(rank: Rank) -> Memory:
    """The memory of one rank at its fullest moment."""
    return max(moments(rank), key=lambda memory: memory.total)


def moments(rank: Rank) -> Iterator[Memory]:
    """Yield the memory of one rank at each moment at which it may peak."""
    sharded = parameter_memory.stage(rank.config) >= 2
    for moment in ("loss", "backward", "end", "optimizer", *(sharded_memory.MOMENTS if sharded else ())):
        yield memory_at(moment, rank)
    yield from beginning(rank)


def beginning(rank: Rank) -> Iterator[Memory]:
    """Yield the moments of the first step that can exceed later ones, although there are no optimizer states yet."""
    c = rank.config
    if c.precision == "fp8" and c.fp8.by == "native" and c.fp8.recipe == "delayed":
        # no ZeRO but stage 3, and SGD, because in bf16 they would count 16-bit weights; there are no states yet
        parallel = c.parallel if c.parallel.zero == 3 else replace(c.parallel, zero=0)
        plain = replace(rank, config=replace(c, precision="bf16", parallel=parallel,
                                             optim=replace(c.optim, name="sgd")))
        yield from (first(memory_at(moment, plain), rank) for moment in ("loss", "backward"))
    if c.parallel.pp > 1:
        yield first(memory_at("rehearsal", rank), rank)


def first(memory: Memory, rank: Rank) -> Memory:
    """Turn a rank's memory into that of its first step: without optimizer states."""
    without = replace(memory, states=0, average=round(parameter_memory.average(rank)), moment="first",
                      buffers=round(activation_memory.buffers(rank, 1, "first")))
    return replace(without, reserve=reserve(without.allocated, rank))


def memory_at(moment: str, rank: Rank) -> Memory:
    """The memory of one rank at one moment."""
    done = 1.0 if moment in ("end", "optimizer") else 0.0               # share of the gradients that exist
    live, micros = under_way(rank, moment)
    if parameter_memory.stage(rank.config) >= 2:
        parameters, gradients = sharded_memory.weights(rank, moment), sharded_memory.gradients(rank, moment)
    else:
        parameters, gradients = parameter_memory.parameters(rank), parameter_memory.gradients(rank, done)
    parts = {"parameters": parameters, "gradients": gradients,
             "states": parameter_memory.states(rank),
             "average": parameter_memory.average(rank), "copies": parameter_memory.copies(rank, live),
             "activations": live * activation_memory.kept(rank) + activation_memory.ends(rank, micros, moment),
             "logits": activation_memory.logits(rank, micros, moment), "batch": activation_memory.batch(rank),
             "buffers": activation_memory.buffers(rank, micros, moment),
             "workspace": activation_memory.workspace(rank, moment) + CUBLAS}
    whole = {name: round(size) for name, size in parts.items()}
    return Memory(**whole, reserve=reserve(sum(whole.values()), rank), moment=moment, stage=rank.stage)


def reserve(allocated: int, rank: Rank) -> int:
    """Bytes that a GPU needs beyond so many bytes of tensors: what PyTorch's allocator wastes, and what it never sees."""
    c = rank.config
    nccl = COMMUNICATOR * communicators(c, rank.stage) + WIRE * wires(c, rank.stage)
    others = activation_memory.foreign(rank) + c.graphs * GRAPHS + nccl
    return round(CONTEXT + others + FRAGMENTS + SHARE * allocated)


def communicators(c: Config, stage: int) -> int:
    """The number of process groups in which a rank communicates, a pipeline's messages aside: NCCL keeps buffers for each.

    All ranks; each axis that has not all of them; cp and ep in any case (`parallel.mesh.new_axis`); dp x cp, and its parts; a
    pipeline's ends, if they share a weight."""
    p = c.parallel
    dp = max(p.dp, 1)
    joint, everyone = dp * p.cp, dp * p.cp * p.tp * p.pp
    ends = p.pp > 2 and stage in (0, p.pp - 1) and getattr(c.model, "tied", False)
    alone = [p.pp, dp, p.tp, joint if p.cp > 1 else 1]
    parts = [p.shard, joint // p.shard] if 1 < p.shard < joint else []
    experts = [joint // p.ep] if p.ep > 1 else []
    return (everyone > 1) + sum(1 < size < everyone for size in alone + parts + experts) + (p.cp > 1) + (p.ep > 1) + ends


def wires(c: Config, stage: int) -> int:
    """The number of process groups through which a pipeline's rank sends and receives: two for each of its neighbors."""
    p = c.parallel
    if p.pp == 1:
        return 0
    return 4 if p.chunks > 1 or 0 < stage < p.pp - 1 else 2


def under_way(rank: Rank, moment: str) -> tuple[float, float]:
    """(number of blocks with live activations, over all micro-batches; number of micro-batches) at a moment.

    With a pipeline, at the peak of the rank's schedule.
    """
    p = rank.config.parallel
    if moment == "optimizer":
        return 0, 0
    if moment in ("end", *sharded_memory.MOMENTS):
        return int(moment == "end"), 1
    if p.pp == 1:
        return rank.blocks, 1
    micros = rank.micros if p.schedule == "gpipe" else min(rank.micros, 4 * p.pp)      # more would only repeat
    blocks, passes = waiting(p.schedule, p.pp, rank.stage, micros, rank.shares)
    if moment == "rehearsal":
        each = passes // p.chunks + 1
        return rank.blocks * each, each
    return blocks, passes / p.chunks


@lru_cache(maxsize=65536)                           # the planner asks the same for many layouts
def waiting(schedule: str, pp: int, stage: int, micros: int, shares: tuple[int, ...]) -> tuple[int, int]:
    """The largest numbers of (blocks, forward passes) of a rank that wait for their backward pass in a schedule.

    shares: blocks of each chunk of the rank."""
    if len(shares) == 1:                            # 1f1b fills the pipeline from this stage on; gpipe keeps all
        passes = micros if schedule == "gpipe" else min(pp - stage, micros)
        return passes * shares[0], passes
    work = passes_of(schedule, pp, stage, micros, len(shares))
    now = most = 0
    for work_item in work:
        now += shares[work_item.chunk] * (1 if work_item.kind == "F" else -1)
        most = max(most, now)
    return most, alive(work)
