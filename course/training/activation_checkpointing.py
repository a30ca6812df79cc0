"""Activation checkpointing: keep less from the forward pass, recompute it in the backward pass.

    full        keep only each block's input: a third more FLOPs (Chen et al. 2016, arXiv:1604.06174)
    selective   keep the outputs of matmuls, convolutions and attention, which are expensive (`EXPENSIVE_OPS`); recompute norms,
                GELU, dropout and sums, which are cheap (in the spirit of Korthikanti et al. 2022, arXiv:2205.05198, section 5)

Dropout is a function of the sample's key, so the second pass drops the same without any saved generator state.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from course.models import Model

Forward = Callable[..., Any]
# prefixes of operator names: matmuls, convolutions, fused attention, and operators that overlap these with communication
EXPENSIVE_OPS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm", "aten::_scaled_mm", "aten::convolution",
        "aten::_scaled_dot_product", "course::product", "course::attention", "course::gather_linear",
        "course::linear_scatter", "course::ring")


def save_expensive_ops(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """The policy of `selective`: results that are dear in FLOPs are kept, unless they are written into a tensor that is there."""
    name = operator.name()
    dear = name.startswith(EXPENSIVE_OPS) and not name.endswith(".out")
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_activations(model: Model, how: str) -> Model:
    """Let every block of the model keep less; `how` is none, selective or full."""
    if how == "none":
        return model
    contexts: dict[str, Any] = {}
    if how == "selective":
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, save_expensive_ops)
    wrap_forward(model.blocks.values(), partial(checkpointed, contexts=contexts))
    return model


def wrap_forward(blocks: Iterable[nn.Module], wrap: Callable[[Forward], Forward]) -> None:
    """Replace the blocks' `forward` by `wrap(forward)`: each block gets a subclass of its class, one for all of that class."""
    made: dict[type, type] = {}
    for block in blocks:
        kind = type(block)
        if kind not in made:
            made[kind] = type(kind.__name__, (kind,), {"forward": wrap(kind.forward)})
        block.__class__ = made[kind]


def checkpointed(forward: Forward, contexts: dict[str, Any]) -> Forward:
    """A forward pass that runs again in the backward pass. It is a function of this file, because torch.compile starts at none
    of PyTorch's own: with `partial(checkpoint, ...)` as its forward, a block would silently stay uncompiled."""
    def run(*inputs: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **contexts)

    return run
