"""Convert lesson 08's training curves, recorded by `experiments/convergence.py`, to TensorBoard logs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def to_tensorboard(found: Mapping[str, Any], folder: Path) -> None:
    """Write a TensorBoard log per run; its step axis counts samples, so that batch sizes are comparable."""
    from torch.utils.tensorboard import SummaryWriter

    for run in found["runs"]:
        name = f"b{run['batch']:03}-lr{run['lr']:.1e}-warmup{run['warmup']}-{run['schedule']}"
        with SummaryWriter(str(folder / name)) as writer:
            for column in ("loss", "valid_loss", "grad_norm", "u10"):
                for step, value in zip(run["step"], run.get(column, []), strict=False):
                    if value is not None:
                        writer.add_scalar(column, value, step * run["batch"])
