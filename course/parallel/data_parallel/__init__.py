"""Data parallelism: gradient synchronization, ZeRO-1, master weights."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from course.parallel.data_parallel.gradients import DDP, Bucketed, GradientSync, Naive, NoSync
from course.parallel.data_parallel.master_weights import MasterWeights
from course.parallel.data_parallel.zero1 import ZeRO1

if TYPE_CHECKING:
    from course.config import Parallel
    from course.parallel.layout import Layout

METHODS: dict[str, type[GradientSync]] = {          # `parallel.data`, or the stage of ZeRO; of one rank none, or 16-bit copies
    "naive": Naive, "bucketed": Bucketed, "ddp": DDP, "none": NoSync, "zero1": ZeRO1, "master_weights": MasterWeights}


def build_gradient_sync(model: nn.Module, layout: "Layout", settings: "Parallel", low: torch.dtype | None = None,
                        masters: bool = False) -> GradientSync:
    """The gradient synchronization of a model over dp x cp. Comes after the parameters have got their values.

    low: the 16 bits of the matmuls, if they have fewer than the parameters: ZeRO then computes with copies in these. masters:
    one rank alone does, too, with an optimizer that writes the copies (`Config.masters`).
    """
    if layout.mesh.dp_cp.size == 1:
        method = "master_weights" if low and masters else "none"
    else:
        method = f"zero{settings.zero}" if settings.zero else settings.data
    return METHODS[method](model, layout.placements, settings.bucket_mb, low)
