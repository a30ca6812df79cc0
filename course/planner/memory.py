"""How many bytes a training step needs on the fullest rank, predicted from the configuration alone.

`predict(config)` adds up what is alive at each moment at which a step can be at its fullest, and takes the largest:

    first        before there are optimizer states. In its first step FP8 with delayed scales multiplies in 16 bits; and the
                 stages of a pipeline get to know each other by more forward passes than will ever wait (`Pipeline._agree`)
    loss         the last micro-batch's forward pass is done: all that backward needs is there, and the head at work
    backward     the last block's backward pass: the head's is done, and what one block computes on the way is there
    end          the first block's: all gradients are there, and hardly any activations
    optimizer    gradients and states, no activations

It counts what `torch.cuda.max_memory_allocated` counts, from the start of the process. Every term is a function of its own, in
`parameter_memory.py` or `activation_memory.py`.

Units. n = B·T tokens of a micro-batch that a rank multiplies, s those of its norms and sums (with sequence parallelism s = n/tp,
else s = n), D the width, M the MLP's, both over tp where tp cuts. Bytes a number: `low` of the matmuls, `stream` of what flows
between blocks. A reader can check a block by counting tensors of n·D numbers: in 16 bits, without parallelism, a GELU block keeps

    eager                18        two inputs of norms, in float32: 2·2; what norms put out: 2; queries, keys, values: 3;
                                   attention's answer: 1; hidden units before and after GELU: 8
    compiled             17, 16    wide, narrow stream: the second norm's input is not kept but computed again, as the first plus
                                   what attention's branch added; the latter is kept instead, in 16 bits
    compiled, selective  11, 10    neither norms' results nor GELU's
    full                 2, 1      the block's input

and some statistics. The way to count is that of Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1, where a block keeps
34·n·D bytes with dropout; what is kept here is what this library's blocks keep, as the tests see it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from course.config import Config
from course.parallel.pipeline_parallel.schedules import alive, passes_of
from course.planner import activation_memory, parameter_memory
from course.planner.parameter_memory import Rank

MIB = 2**20
# cuBLAS's workspace, from PyTorch's allocator: its default on Hopper (PyTorch, CUDA semantics, "cuBLAS workspaces")
CUBLAS = 32 * MIB
# Not predictions but a margin, a rule of thumb that nothing here has measured yet: what the driver and the compiled code of a
# process take, and what the allocator holds in pieces that fit nobody
CONTEXT, FRAGMENTS = 512 * MIB, 0.03


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank at its fullest moment."""

    parameters: int                                 # what the rank computes with
    gradients: int
    states: int                                     # the optimizer's, with what it has of master weights
    average: int                                    # the weights' moving average
    copies: int                                     # of weights in 16 bits, cast for the matmuls and kept for their backward
    activations: int                                # what blocks, embedding and head's norm keep for backward
    logits: int                                     # what the head puts out, and what the loss makes of it
    batch: int                                      # the loader's, and as the model takes it
    buffers: int                                    # what goes between ranks: shares of gradients, messages of a pipeline
    workspace: int                                  # what is computed on the way and soon forgotten
    reserve: int                                    # beside tensors: the process's own, and the allocator's odd pieces
    moment: str                                     # which one: first, loss, backward, end or optimizer
    stage: int                                      # which rank along pp

    @property
    def allocated(self) -> int:
        """The bytes of all tensors, which `torch.cuda.max_memory_allocated` measures."""
        return sum(getattr(self, name) for name in TENSORS)

    @property
    def total(self) -> int:
        """What the device has to have."""
        return self.allocated + self.reserve


TENSORS = tuple(entry.name for entry in fields(Memory) if entry.name not in ("reserve", "moment", "stage"))


def predict(config: Config) -> Memory:
    """The memory of the fullest rank in training. parallel.dp=0 counts as 1: it depends on how many GPUs there will be.

    Of a pipeline only both ends are looked at: no other stage has more blocks or keeps more micro-batches than the first one.
    """
    pp = config.parallel.pp
    return max((of_rank(rank) for rank in ranks(config, sorted({0, pp - 1}))), key=lambda memory: memory.total)


def fits(config: Config, room: float) -> bool:
    """Whether `predict` is at most `room` bytes, which most often one moment tells."""
    return all(memory.total <= room for stage in sorted({0, config.parallel.pp - 1}) for rank in ranks(config, [stage])
               for memory in moments(rank))


def ranks(config: Config, stages: Iterable[int] = ()) -> Iterator[Rank]:
    """The first rank along dp, cp and tp, which has the most samples and tokens, of these pipeline stages, or of each."""
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
    """The memory of one rank at each moment at which it may be at its fullest."""
    for moment in ("loss", "backward", "end", "optimizer"):
        yield memory_at(moment, rank)
    yield from beginning(rank)


def beginning(rank: Rank) -> Iterator[Memory]:
    """What the first step needs, where that is not what the others do: it has no states yet."""
    c = rank.config
    if c.precision == "fp8" and c.fp8.by == "native" and c.fp8.recipe == "delayed":
        # without ZeRO-1 and Adam, which in bf16 would keep 16-bit copies of the weights; there are no states yet anyway
        plain = replace(rank, config=replace(c, precision="bf16", parallel=replace(c.parallel, zero=0),
                                             optim=replace(c.optim, name="sgd")))
        yield from (first(memory_at(moment, plain), rank) for moment in ("loss", "backward"))
    if c.parallel.pp > 1:
        yield first(memory_at("rehearsal", rank), rank)


def first(memory: Memory, rank: Rank) -> Memory:
    """The same without states, at the first step of a rank."""
    without = replace(memory, states=0, average=round(parameter_memory.average(rank)), moment="first",
                      buffers=round(activation_memory.buffers(rank, 1, "first")))
    return replace(without, reserve=reserve(without.allocated, activation_memory.foreign(rank)))


def memory_at(moment: str, rank: Rank) -> Memory:
    """The memory of one rank at one moment."""
    done = 1.0 if moment in ("end", "optimizer") else 0.0               # of its gradients
    live, micros = under_way(rank, moment)
    parts = {"parameters": parameter_memory.parameters(rank), "gradients": parameter_memory.gradients(rank, done),
             "states": parameter_memory.states(rank),
             "average": parameter_memory.average(rank), "copies": parameter_memory.copies(rank, live),
             "activations": live * activation_memory.kept(rank) + activation_memory.ends(rank, micros, moment),
             "logits": activation_memory.logits(rank, micros, moment), "batch": activation_memory.batch(rank),
             "buffers": activation_memory.buffers(rank, micros, moment),
             "workspace": activation_memory.workspace(rank, moment) + CUBLAS}
    whole = {name: round(size) for name, size in parts.items()}
    return Memory(**whole, reserve=reserve(sum(whole.values()), activation_memory.foreign(rank)), moment=moment, stage=rank.stage)


def reserve(allocated: int, others: float) -> int:
    """A margin for what no tensor of PyTorch's holds, in bytes. others: what another library holds."""
    return round(CONTEXT + FRAGMENTS * allocated + others)


def under_way(rank: Rank, moment: str) -> tuple[float, float]:
    """(how many blocks' activations there are, of how many micro-batches) at a moment.

    With a pipeline, at the fullest moment of the rank's schedule.
    """
    p = rank.config.parallel
    if moment in ("end", "optimizer"):
        return (1, 1) if moment == "end" else (0, 0)
    if p.pp == 1:
        return rank.blocks, 1
    micros = rank.micros if p.schedule == "gpipe" else min(rank.micros, 4 * p.pp)      # the others then only repeat themselves
    blocks, passes = waiting(p.schedule, p.pp, rank.stage, micros, rank.shares)
    if moment == "rehearsal":
        each = passes // p.chunks + 1
        return rank.blocks * each, each
    return blocks, passes / p.chunks


@lru_cache(maxsize=65536)                           # a planner asks the same of many layouts
def waiting(schedule: str, pp: int, stage: int, micros: int, shares: tuple[int, ...]) -> tuple[int, int]:
    """The most blocks of a rank, and the most forward passes, whose backward pass is still to come, at a schedule's fullest
    moment. shares: blocks of each of its chunks."""
    if len(shares) == 1:                            # 1f1b fills the pipeline from here to its end, gpipe has all
        passes = micros if schedule == "gpipe" else min(pp - stage, micros)
        return passes * shares[0], passes
    work = passes_of(schedule, pp, stage, micros, len(shares))
    now = most = 0
    for work_item in work:
        now += shares[work_item.chunk] * (1 if work_item.kind == "F" else -1)
        most = max(most, now)
    return most, alive(work)
