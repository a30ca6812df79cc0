"""torch.compile, part by part: embedding, blocks, head and loss each by itself, and of GPT's head what it does with a chunk.

All blocks run the code of the first, so neither the compiler's work nor the time to the first step grows with depth. Compiled
as one graph the reference model is as fast and starts after 29 s instead of 11 (on an H200). Dropout's and stochastic depth's
constants differ from block to block; with them each block is compiled for itself.
"""

from itertools import chain
from typing import Any

import torch
from torch import nn

from course.config import Config
from course.config.validation import attention_leaves_graph

KINDS = 16                                          # versions of a block for other reasons, such as evaluation


def compiled_inside(config: Config) -> bool:
    """Whether blocks are compiled inside their checkpoint (`compile_within`): those that leave the compiler; and where all is
    computed again of blocks with collectives, since PyTorch 2.11 compiles a checkpoint such that it keeps what an
    `autograd.Function` puts out (2.13 does not)."""
    p, how = config.parallel, config.train.recompute
    return config.compile and how != "none" and (attention_leaves_graph(config) or (how == "full" and p.tp * p.cp > 1))


def compile_within(model: Any) -> None:
    """Compile what blocks compute, before `checkpoint_activations` is put around it. torch.compile takes a checkpoint as one
    operator, within which it cannot leave its graph: a block that must would silently run uncompiled, the whole of it."""
    for block in model.blocks.values():
        block.forward = torch.compile(block.forward)


def compile_parts(model: Any, attention: str = "default", blocks: bool = True) -> nn.Module:
    """Compile a model in place, after it is cut. `attention` is the chosen backend; blocks: not if they are `compile_within`."""
    chunks = getattr(model, "chunks", [model])      # of a pipeline, stage by stage
    # blocks that differ are versions of one function to the compiler: past its limit it would silently stop compiling
    limit = KINDS + 2 * max(len(chunk.blocks) for chunk in chunks)
    torch._dynamo.config.recompile_limit = max(limit, torch._dynamo.config.recompile_limit)
    if attention != "default":                      # its cache on disk takes graphs of another backend for the same
        torch._functorch.config.enable_autograd_cache = False
    inner = [getattr(chunk.head, "of_chunk", None) for chunk in chunks]             # the head leaves the compiler between these
    outer = chain(*((chunk.embed, chunk.head) for chunk in chunks), inner, [model.loss])
    for part in chain(*(chunk.blocks.values() for chunk in chunks if blocks), outer):
        if part is not None:
            part.compile()
    return model
