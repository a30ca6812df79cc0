"""A baseline that a forecast has to beat: linear regression on neighboring grid points."""

import torch
import torch.nn.functional as F
from torch import Tensor

from course.data import Pairs


def neighbors(state: Tensor) -> Tensor:
    """The values at each grid point and its eight neighbors, and a constant 1: (B, C, H, W) -> (B·H·W, 9·C + 1).

    Longitude is periodic; beyond a pole the outermost row is repeated.
    """
    wide = F.pad(F.pad(state, (1, 1, 0, 0), mode="circular"), (0, 0, 1, 1), mode="replicate")
    columns = F.unfold(wide, 3).transpose(1, 2).flatten(0, 1)          # (B·H·W, 9·C)
    return F.pad(columns, (0, 1), value=1.0)                           # (B·H·W, 9·C + 1)


class Regression:
    """Least-squares forecast of each channel from all channels at the point and its neighbors.

    One set of coefficients for the whole globe, fitted on training pairs with a small ridge penalty for stability.
    """

    def __init__(self, pairs: Pairs, samples: int = 200, ridge: float = 1e-4):
        chosen = torch.linspace(0, len(pairs) - 1, min(samples, len(pairs))).long().unique().tolist()
        inputs = 9 * pairs.shape[0] + 1
        normal, right = torch.zeros(inputs, inputs, dtype=torch.float64), torch.zeros(inputs, pairs.shape[0], dtype=torch.float64)
        for sample in chosen:
            batch = pairs.__getitems__([sample])
            x = neighbors(batch["input"])                             # (H·W, 9·C + 1)
            y = batch["target"].permute(0, 2, 3, 1).flatten(0, 2)      # (H·W, C)
            normal += (x.T @ x).double()
            right += (x.T @ y).double()
        normal.diagonal().add_(ridge * normal.diagonal().mean())
        self.coefficients = torch.linalg.solve(normal, right).float()  # (9·C + 1, C)

    def __call__(self, state: Tensor) -> Tensor:
        B, C, H, W = state.shape
        forecast = neighbors(state) @ self.coefficients.to(state.device)
        return forecast.view(B, H, W, C).permute(0, 3, 1, 2)
