"""torch.compile: part by part, or the whole model as one graph.

    true     embedding, blocks, head and loss each by itself. All blocks run the code of the first: the compiler's work, and the
             time to the first step, do not grow with depth
    whole    the model as one graph, and the loss as another: sums at the end of a block join the norm that begins the next,
             for the price of compiling every block

Dropout's and stochastic depth's constants differ from block to block, so with them every block is compiled either way.
"""

from itertools import chain
from typing import Any

import torch
from torch import nn

KINDS = 16                                          # versions of a block for other reasons, such as evaluation


def compile_parts(model: Any, how: bool | str) -> nn.Module:
    """Compile a model in place, after it is cut; `how` is False, True or "whole"."""
    if not how:
        return model
    chunks = getattr(model, "chunks", [model])      # of a pipeline, stage by stage
    # blocks that differ are versions of one function to the compiler: past its limit it would silently stop compiling
    limit = KINDS + 2 * max(len(chunk.blocks) for chunk in chunks)
    torch._dynamo.config.recompile_limit = max(limit, torch._dynamo.config.recompile_limit)
    pieces = [(chunk.embed, *chunk.blocks.values(), chunk.head) for chunk in chunks] if how != "whole" else [tuple(chunks)]
    for part in chain(*pieces, [model.loss]):
        if part is not None:
            part.compile()
    return model
