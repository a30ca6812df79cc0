"""The noise that a diffusion model learns to remove.

Take a clean sample x0 and mix a little Gaussian noise into it, a thousand times over, at time t with the variance beta_t:

    x_t = sqrt(1 - beta_t) x_(t-1) + sqrt(beta_t) e_t

The signal's part shrinks as fast as the noise's grows, so that the variance stays 1, and after the last step next to
nothing of x0 is left. A sum of Gaussians is a Gaussian: no need to go step by step. With a_t the product of all
1 - beta up to t,

    x_t = sqrt(a_t) x0 + sqrt(1 - a_t) noise                            (`add_noise`)

The model sees x_t and t and predicts the noise, with the mean squared error as its loss. Whoever can tell the noise can
take some of it away, and so turn pure noise into a sample, step by step backwards.

Ho, Jain and Abbeel 2020, "Denoising diffusion probabilistic models" (arXiv:2006.11239): equation 4, its linear schedule
of betas (section 4), and the loss L_simple, equation 14. Times here are 0 .. STEPS - 1.
"""

import torch
from torch import Tensor

STEPS = 1000                                        # times; at each a little noise is added
FIRST_BETA, LAST_BETA = 1e-4, 0.02                  # the variance of that noise rises linearly


def signal(device: torch.device) -> Tensor:
    """a_t, the part of the variance that is signal, of every time, (STEPS,) float64: from 0.9999 down to 0.00004."""
    betas = torch.linspace(FIRST_BETA, LAST_BETA, STEPS, dtype=torch.float64, device=device)
    return (1 - betas).cumprod(0)


def add_noise(clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """Each sample as it is at its time: (B, ...), (B, ...) and (B,) int64 -> (B, ...)."""
    a = signal(time.device)[time].view(-1, *[1] * (clean.dim() - 1))    # (B, 1, ...)
    return a.sqrt().to(clean.dtype) * clean + (1 - a).sqrt().to(clean.dtype) * noise
