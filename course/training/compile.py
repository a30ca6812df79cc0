"""torch.compile, part by part: embedding, blocks, head and loss each by itself, and in GPT's head the work on a chunk.

All blocks run the code of the first, so neither the compiler's work nor the time to the first step grows with depth. Compiled
as one graph, the reference model is as fast and starts after 29 s instead of 11 (on an H200). The constants of dropout and
stochastic depth differ from block to block; with them each block is compiled separately.
"""

from collections.abc import Sequence
from itertools import chain

import torch

from course.config import Config
from course.config.context_choice import attention_leaves_graph
from course.models import Model
from course.training.activation_checkpointing import wrap_forward

KINDS = 16                                          # versions of a block for other reasons, such as evaluation


def compiled_inside(config: Config) -> bool:
    """Whether blocks are compiled inside their checkpoint (`compile_within`): if attention leaves the compiler's graph, or with
    full recomputation of blocks with collectives. There PyTorch 2.11 compiles a checkpoint so that it keeps the outputs of an
    `autograd.Function` (2.13 does not)."""
    p, how = config.parallel, config.train.recompute
    return config.compile and how != "none" and (attention_leaves_graph(config) or (how == "full" and p.tp * p.cp > 1))


def compile_within(model: Model) -> None:
    """Compile the blocks' forward before `checkpoint_activations` wraps it. torch.compile treats a checkpoint as one operator,
    within which it cannot leave its graph: a block that has to would silently run uncompiled as a whole."""
    wrap_forward(model.blocks.values(), torch.compile)


def compile_parts(stages: Sequence[Model], attention: str = "default", blocks: bool = True) -> None:
    """Compile a model or its pipeline stages in place, after the cut. attention: the chosen backend. blocks: whether to compile
    the blocks, too; not if `compile_within` has."""
    # to the compiler, blocks that differ are versions of one function: past its limit it would silently stop compiling
    limit = KINDS + 2 * max(len(stage.blocks) for stage in stages)
    torch._dynamo.config.recompile_limit = max(limit, torch._dynamo.config.recompile_limit)
    if attention != "default":                      # its disk cache confuses graphs of different backends
        torch._functorch.config.enable_autograd_cache = False
    outer = chain(*(stage.compiled_parts() for stage in stages), [stages[-1].loss])
    for part in chain(*(stage.blocks.values() for stage in stages if blocks), outer):
        part.compile()
