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


def anomaly_correlation(forecast: Tensor, truth: Tensor, climatology: Tensor, weights: Tensor) -> Tensor:
    """Latitude-weighted correlation of forecast and true departures from the climatology, (C,), over all samples.

    forecast and truth (B, C, H, W), climatology (C, H, W), weights (H,). As in WeatherBench
    (Rasp et al. 2020), with the sums taken over samples and grid together.
    """
    a, b, w = forecast - climatology, truth - climatology, weights[:, None]
    dims = (0, 2, 3)
    return (a * b * w).sum(dims) / ((a * a * w).sum(dims) * (b * b * w).sum(dims)).sqrt()
