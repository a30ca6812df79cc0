"""Number formats: the dtype of matmuls, and loss scaling, which keeps fp16 gradients from underflowing. FP8 is in
`course/fp8/native.py`."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from course.utils.errors import CourseError

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}  # fp8: all but its linears
FIRST_SCALE = {"fp16": 2.0**16}                     # other formats need no loss scaling: 1
GROW_AFTER = 2000                                   # good steps until fp16's scale doubles (Micikevicius et al. 2018)


def parameter_dtype(precision: str) -> torch.dtype:
    """The dtype of parameters, gradients and optimizer states."""
    return torch.float64 if precision == "fp64" else torch.float32


def working_dtype(precision: str) -> torch.dtype | None:
    """The dtype in which a copy of the weights gives the same matmuls as the weights; None if there is none.

    FP8 has none: it casts from float32.
    """
    return LOW_PRECISION[precision] if precision in ("bf16", "fp16") else None


def set_matmul_precision(precision: str) -> None:
    """Let float32 matmuls use TF32 tensor cores, or not. Process-wide, because PyTorch's switch is."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"


def check_capability(device: torch.device, least: tuple[int, int], what: str, chips: str, cure: str) -> None:
    """Raise `CourseError` if a GPU's compute capability is below `least`, which `what` needs and `chips` have. A CPU passes."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < least:
        name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        raise CourseError(f"{what} needs a GPU of compute capability {least[0]}.{least[1]} or more ({chips}), and {name} has "
                          f"{major}.{minor}: {cure}")


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """The autocast context for forward passes: matmuls and attention in 16 bits, sums and norms in 32."""
    if precision in LOW_PRECISION:
        return torch.autocast(device.type, LOW_PRECISION[precision])
    return nullcontext()


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matmul takes x: autocast's, or else x's own. Autocast does not change float64."""
    kind = x.device.type
    cast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if cast else x.dtype


def precision_of_weights(model: nn.Module, precision: str) -> str:
    """The precision, or that of the weights if these have 16 bits and the precision 32: no matmul takes such a pair.

    For 16-bit weights see `course/parallel/data_parallel/master_weights.py`.
    """
    kinds = {p.dtype for p in model.parameters()}
    return precision if precision in LOW_PRECISION else next((name for name, low in LOW_PRECISION.items() if low in kinds),
                                                             precision)


def cast_residual_stream(model: Any, precision: str) -> nn.Module:
    """Keep the residual stream in the 16-bit dtype of the matmuls, from the embedding on, as in Megatron-LM.

    With autocast alone it is float32, since position embeddings are. In 16 bits, every norm and every sum reads and writes half
    the bytes. Each block's output is rounded once more, in bf16 by up to 2^-9 of the sum.
    """
    def to_low(module: nn.Module, inputs: Any, output: Any) -> Any:
        x, *conditions = output if isinstance(output, tuple) else (output,)             # (B, T, D)
        return (x.to(LOW_PRECISION[precision]), *conditions) if conditions else x.to(LOW_PRECISION[precision])

    if model.embed is not None:                     # only the first pipeline stage has one
        model.embed.register_forward_hook(to_low)
    for block in model.blocks.values():
        for branch in block.children():
            if any(parameter.dim() > 1 for parameter in branch.parameters()):           # not a norm
                branch.register_forward_hook(to_low)
    return model


def next_scale(precision: str, scale: Tensor, good: Tensor, bad: Tensor) -> tuple[Tensor, Tensor]:
    """The loss scale and the count of good steps after a step: halve after a bad one, double after many good ones."""
    if precision != "fp16":
        return scale, good
    good = torch.where(bad > 0, 0, good + 1)
    scale = torch.where(bad > 0, scale / 2, torch.where(good == GROW_AFTER, scale * 2, scale))
    return scale, torch.where(good == GROW_AFTER, 0, good)
