"""The noise that a model learns to remove, with either of two objectives.

**epsilon**, diffusion. Take a clean sample x0 and mix a little Gaussian noise into it, a thousand times over, at time t with
the variance beta_t:

    x_t = sqrt(1 - beta_t) x_(t-1) + sqrt(beta_t) e_t

The signal shrinks as the noise grows, so that the variance stays 1, and after the last step almost nothing of x0 is
left. A sum of Gaussians is a Gaussian, so there is no need to go step by step. With a_t the product of all 1 - beta up to t,

    x_t = sqrt(a_t) x0 + sqrt(1 - a_t) noise                            (`add_noise`)

The model sees x_t and t and predicts the noise, with the mean squared error as its loss. With the prediction you can
remove some of the noise, and so turn pure noise into a sample, step by step.

Ho, Jain and Abbeel 2020, "Denoising diffusion probabilistic models" (arXiv:2006.11239): equation 4, its linear schedule
of betas (section 4), and the loss L_simple, equation 14. Times here are 0 .. STEPS - 1.

**flow**, rectified flow. Walk in a straight line from the sample, at t = 0, to the noise, at t = 1:

    x_t = (1 - t) x0 + t noise                                          (`interpolate`)

The model sees x_t and t and predicts the line's velocity, noise - x0. With the mean velocity at every point you can
walk back from noise to samples. Liu, Gong and Liu 2022 (arXiv:2209.03003), equation 1; t is uniform in (0, 1).

With both objectives the model gets times from 0 up to STEPS (t · STEPS for flow), because the sinusoids that encode a time
were made for this range (as in Esser et al. 2024, arXiv:2403.03206).
"""

import torch
from torch import Tensor

STEPS = 1000                                        # times; each adds a little noise
FIRST_BETA, LAST_BETA = 1e-4, 0.02                  # the variance of that noise rises linearly


def sample_times(objective: str, uniform: Tensor) -> Tensor:
    """Map uniform numbers in (0, 1), (B,), to times: whole ones, int64, for epsilon; any in (0, STEPS) for flow."""
    return uniform * STEPS if objective == "flow" else (uniform * STEPS).long()


def noisy_example(objective: str, clean: Tensor, noise: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """(model input, prediction target) at each sample's time: (B, ...), (B, ...), (B,) -> 2 x (B, ...)."""
    if objective == "flow":
        return interpolate(clean, noise, time), noise - clean
    return add_noise(clean, noise, time), noise


def signal_variance(device: torch.device) -> Tensor:
    """a_t, the signal's share of the variance, for every time, (STEPS,) float64: from 0.9999 down to 0.00004."""
    betas = torch.linspace(FIRST_BETA, LAST_BETA, STEPS, dtype=torch.float64, device=device)
    return (1 - betas).cumprod(0)


def add_noise(clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """Each sample with the noise of its time: (B, ...), (B, ...) and (B,) int64 -> (B, ...)."""
    a = signal_variance(time.device)[time].view(-1, *[1] * (clean.dim() - 1))           # (B, 1, ...)
    return a.sqrt().to(clean.dtype) * clean + (1 - a).sqrt().to(clean.dtype) * noise


def interpolate(clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """Each sample on the line to its noise, at time / STEPS: (B, ...), (B, ...) and (B,) -> (B, ...)."""
    t = (time.to(clean.dtype) / STEPS).view(-1, *[1] * (clean.dim() - 1))               # (B, 1, ...)
    return (1 - t) * clean + t * noise
