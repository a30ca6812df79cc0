"""Data parallelism: gradient synchronization, ZeRO-1 to 3, master weights."""

from typing import TYPE_CHECKING

import torch

from course.models import Model
from course.parallel.data_parallel.fsdp import FSDP, Draw
from course.parallel.data_parallel.gradients import DDP, Bucketed, GradientSync, Naive, NoSync
from course.parallel.data_parallel.master_weights import MasterWeights
from course.parallel.data_parallel.zero1 import ZeRO1

if TYPE_CHECKING:
    from course.config import Parallel
    from course.parallel.layout import Layout

METHODS: dict[str, type[GradientSync]] = {          # by `parallel.data` or ZeRO's stage; for one rank none or master_weights
    "naive": Naive, "bucketed": Bucketed, "ddp": DDP, "none": NoSync, "zero1": ZeRO1, "master_weights": MasterWeights}


def build_gradient_sync(model: Model, layout: "Layout", settings: "Parallel", low: torch.dtype | None = None,
                        masters: bool = False, draw: Draw | None = None) -> GradientSync:
    """Build the gradient synchronization of a model over dp x cp. Call it after the parameters have their values.

    low: the 16-bit dtype of the matmuls, if the parameters are wider; ZeRO then computes with copies in it. masters: a single
    rank does so too, with an optimizer that writes the copies (`Config.masters`). draw: the initial values of a placement, where
    parameters have none yet (`initialize` with `later`).
    """
    if settings.zero >= 2:
        return FSDP(model, layout, settings, low, draw)
    if layout.mesh.dp_cp.size == 1:
        method = "master_weights" if low and masters else "none"
    else:
        method = "zero1" if settings.zero else settings.data
    return METHODS[method](model, layout.placements, settings.bucket_mb, low)
