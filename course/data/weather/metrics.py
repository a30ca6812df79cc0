"""Forecast metrics."""

import torch
from torch import Tensor


def latitude_weights(latitudes: Tensor) -> Tensor:
    """The relative area of each grid row, with mean 1: latitudes (H,) in degrees -> (H,)."""
    weights = torch.cos(torch.deg2rad(latitudes))
    return weights / weights.mean()


def squared_error(forecast: Tensor, truth: Tensor, weights: Tensor) -> Tensor:
    """Latitude-weighted mean squared error per sample and channel: 2 x (B, C, H, W), (H,) -> (B, C)."""
    return ((forecast - truth).square() * weights[:, None]).mean((-2, -1))
