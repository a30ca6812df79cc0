"""How good a forecast is."""

import torch
from torch import Tensor


def latitude_weights(latitudes: Tensor) -> Tensor:
    """The relative area of each row of the grid, mean 1: (H,) from degrees."""
    weights = torch.cos(torch.deg2rad(latitudes))
    return weights / weights.mean()


def squared_error(forecast: Tensor, truth: Tensor, weights: Tensor) -> Tensor:
    """The latitude-weighted mean squared error of each sample and channel, (B, C), of (B, C, H, W) and (H,)."""
    return ((forecast - truth).square() * weights[:, None]).mean((-2, -1))
