"""Activation checkpointing: keep less from the forward pass, compute it again in the backward pass.

    full        keep each block's input alone: a third more FLOPs (Chen et al. 2016, arXiv:1604.06174)
    selective   keep what matmuls, convolutions and attention put out, which is dear (`EXPENSIVE_OPS`); compute norms, GELU,
                dropout and sums again, which is cheap (in the spirit of Korthikanti et al. 2022, arXiv:2205.05198, section 5)

Dropout is a function of the sample's key, so the second pass drops the same without any saved generator state.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from course.models import Model

Forward = Callable[..., Any]
# by the beginning of the operator's name: matmuls, convolutions, fused attention, and those with communication beside them
EXPENSIVE_OPS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm", "aten::convolution", "aten::_scaled_dot_product",
        "course::product", "course::attention", "course::gather_linear", "course::linear_scatter", "course::ring")


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
    """Let blocks compute by `wrap` of the forward pass of their class: each gets a subclass of it, all of one class the same."""
    made: dict[type, type] = {}
    for block in blocks:
        kind = type(block)
        if kind not in made:
            made[kind] = type(kind.__name__, (kind,), {"forward": wrap(kind.forward)})
        block.__class__ = made[kind]


def checkpointed(forward: Forward, contexts: dict[str, Any]) -> Forward:
    """A forward pass that is run again in the backward pass. A function of this file, because torch.compile begins at none of
    PyTorch's own: with `partial(checkpoint, ...)` as its forward a block would silently stay uncompiled."""
    def run(*inputs: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **contexts)

    return run
