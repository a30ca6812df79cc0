"""The coefficients of the atmosphere's time step: matrix exponentials integrate the linear waves exactly.

S. M. Cox and P. C. Matthews (2002), "Exponential time differencing for stiff systems", J. Comput. Phys. 176, 430.
The tendency is A·state + rest, with a (5, 5) matrix A for each total wave number l. If A is zero, the method is the
classical fourth-order Runge-Kutta method; if the rest is constant, it is exact.
"""

import torch
from torch import Tensor


def apply_matrices(state: Tensor, matrices: Tensor, others: float = 1) -> Tensor:
    """Multiply (divergence 1 2, temperature 1 2, ps) of a state by (l, 5, 5) matrices, and its other fields by `others`."""
    years, _, size, _ = state.shape
    values = torch.view_as_real(state[:, 2:7]).permute(2, 1, 0, 3, 4).reshape(size, 5, -1)   # (l, 5, years m 2)
    values = torch.bmm(matrices, values).view(size, 5, years, size, 2).permute(2, 1, 0, 3, 4)
    return torch.cat([state[:, :2] * others, torch.view_as_complex(values.contiguous()), state[:, 7:] * others], 1)


def exponentials(waves: Tensor, seconds: float, like: Tensor) -> tuple[Tensor, ...]:
    """The six coefficient matrices (l, 5, 5) of `Atmosphere.step` for a linear part `waves` (l, 5, 5).

    The first row of the exponential of [[A, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]] contains exp(A) and
    the method's functions phi1, phi2 and phi3 of A.
    """
    def functions(time: float) -> tuple[Tensor, ...]:
        blocks = torch.zeros(len(waves), 20, 20, dtype=torch.float64)
        blocks[:, :5, :5] = waves * unit / unit[:, None] * time
        blocks[:, :15, 5:] += torch.eye(15, dtype=torch.float64)
        return tuple(x * unit[:, None] / unit for x in torch.linalg.matrix_exp(blocks)[:, :5].split(5, 2))

    unit = torch.tensor([1e-5, 1e-5, 1, 1, 500], dtype=torch.float64)                        # scales the fields to similar size
    half, push = functions(seconds / 2)[:2]
    whole, phi1, phi2, phi3 = functions(seconds)
    found = (half, whole, push * seconds / 2, (phi1 - 3 * phi2 + 4 * phi3) * seconds,
             (2 * phi2 - 4 * phi3) * seconds, (4 * phi3 - phi2) * seconds)
    return tuple(x.to(like) for x in found)
