"""Spherical harmonics: between values on a grid of the sphere and coefficients up to a triangular truncation.

A field is f(longitude, mu) = sum over l, m of f[m, l] P[m, l](mu) exp(i m longitude), with mu = sin(latitude),
l = 0 ... T and |m| <= l; a real field needs only m >= 0. The associated Legendre functions P are scaled to
a mean square of one over the sphere, so that f[0, 0] is the global mean. Derivatives are exact: along
longitude a factor i m, along latitude the functions

    H[m, l] = (1 - mu²) dP[m, l]/dmu = (l + 1) e[m, l] P[m, l - 1] - l e[m, l + 1] P[m, l + 1],
    e[m, l] = sqrt((l² - m²) / (4 l² - 1)),

and the Laplacian a factor -l (l + 1) / a². On a Gaussian grid, with at least (3 T + 1) / 2 latitudes and
3 T + 1 longitudes, products of two fields are transformed back exactly, free of aliasing.

Source: J. J. Hack and R. Jakob (1992), "Description of a global shallow water model based on the spectral
transform method", NCAR/TN-343+STR, sections 3 to 5.
"""

import numpy as np
import torch
from torch import Tensor

RADIUS = 6.37122e6                               # of the Earth, m


def legendre(truncation: int, mu: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """P and H at the sines of latitude `mu`, both float64 (m, l, latitude), zero where l < m."""
    size = truncation + 2                        # H at l = T needs P at T + 1
    m, l = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    e = np.sqrt(np.maximum(l**2 - m**2, 0) / (4.0 * l**2 - 1) * (l > 0))
    p = np.zeros((size, size, len(mu)))
    p[0, 0] = 1
    for k in range(1, size):                     # the diagonal, then upwards in l
        p[k, k] = np.sqrt(1 + 0.5 / k) * np.sqrt(1 - mu**2) * p[k - 1, k - 1]
    for k in range(1, size):
        below = p[:k, k - 2] * e[:k, k - 1, None] if k > 1 else 0
        p[:k, k] = (mu * p[:k, k - 1] - below) / e[:k, k, None]
    h = np.zeros_like(p)
    h[:, 1:-1] = ((l + 1) * e)[:, 1:-1, None] * p[:, :-2] - (l[:, 1:-1] * e[:, 2:])[..., None] * p[:, 2:]
    keep = truncation + 1
    return p[:keep, :keep], h[:keep, :keep]


def gaussian(truncation: int) -> tuple[np.ndarray, np.ndarray, int]:
    """The smallest alias-free grid: sines of latitude north to south, weights of sum 1, number of longitudes."""
    mu, weights = np.polynomial.legendre.leggauss((3 * truncation + 2) // 2)
    columns = 3 * truncation + 1
    while any(columns % prime and columns > 1 for prime in (2,)) or not smooth(columns):
        columns += 1                             # the fast Fourier transform likes small factors
    return mu[::-1].copy(), weights / 2, columns


def smooth(number: int) -> bool:
    """Whether 2, 3 and 5 are the only prime factors."""
    for prime in (2, 3, 5):
        while number % prime == 0:
            number //= prime
    return number == 1


class Sphere:
    """Transforms on one grid. Spectra are complex (..., m, l), fields real (..., latitude, longitude).

    `mu` are the sines of the latitudes. With quadrature `weights` (those of `gaussian`) fields can be analysed;
    without them the grid can only be synthesised on. Lengths in metres, derivatives per metre.
    """

    def __init__(self, truncation: int, mu: np.ndarray, columns: int, weights: np.ndarray | None = None,
                 dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"):
        p, h = legendre(truncation, mu)                                     # (m, l, lat)
        slope = np.concatenate([p, h], 1) / (RADIUS * np.sqrt(1 - mu**2))   # (m, 2 l, lat): d/dx, d/dy

        def constant(value: np.ndarray) -> Tensor:
            return torch.as_tensor(np.ascontiguousarray(value), dtype=dtype, device=device)

        wavenumbers = np.arange(truncation + 1)
        self.truncation, self.columns = truncation, columns
        self.mu = constant(mu[:, None])                                     # (lat, 1)
        self.cosine = constant(np.sqrt(1 - mu**2)[:, None])                 # (lat, 1)
        self.i_m = 1j * constant(wavenumbers[:, None])                      # (m, 1)
        self.laplacian = constant(-wavenumbers * (wavenumbers + 1) / RADIUS**2)            # (l,)
        self.inverse_laplacian = constant(np.append(0, -RADIUS**2 / (wavenumbers * (wavenumbers + 1))[1:]))
        self.p, self.slope = constant(p), constant(slope)
        if weights is not None:
            self.weights = constant(weights[:, None])                       # (lat, 1), sum 1
            self.p_weighted = constant((p * weights).transpose(0, 2, 1))    # (m, lat, l)
            back = np.concatenate(np.split(slope * weights, 2, 1), 2)       # (m, l, 2 lat)
            self.slope_weighted = constant(back.transpose(0, 2, 1))         # (m, 2 lat, l)

    def synthesise(self, spectra: Tensor) -> Tensor:
        """Coefficients (..., m, l) to values (..., lat, lon)."""
        return self.to_grid(along_latitude(spectra, self.p))

    def analyse(self, fields: Tensor) -> Tensor:
        """Values (..., lat, lon) to coefficients (..., m, l), dropping what lies beyond the truncation."""
        return along_latitude(self.to_waves(fields), self.p_weighted)

    def wind(self, vorticity: Tensor, divergence: Tensor) -> tuple[Tensor, Tensor]:
        """Eastward and northward wind (m/s) on the grid from coefficients of vorticity and divergence (1/s)."""
        stream, potential = vorticity * self.inverse_laplacian, divergence * self.inverse_laplacian
        u = torch.cat([self.i_m * potential, -stream], -1)                  # (..., m, 2 l)
        v = torch.cat([self.i_m * stream, potential], -1)
        return self.to_grid(along_latitude(torch.stack([u, v]), self.slope)).unbind(0)  # type: ignore[return-value]

    def gradient(self, spectra: Tensor) -> tuple[Tensor, Tensor]:
        """Eastward and northward derivative on the grid, per metre."""
        zero = torch.zeros_like(spectra)
        both = torch.stack([torch.cat([self.i_m * spectra, zero], -1), torch.cat([zero, spectra], -1)])
        return self.to_grid(along_latitude(both, self.slope)).unbind(0)     # type: ignore[return-value]

    def divergence(self, u: Tensor, v: Tensor) -> Tensor:
        """Coefficients of du/dx + dv/dy of a vector field on the grid; the mean (0, 0) is zero to the bit."""
        u_waves, v_waves = self.to_waves(torch.stack([u, v]))               # (..., lat, m)
        return self.slope_back(u_waves, v_waves)

    def curl(self, u: Tensor, v: Tensor) -> Tensor:
        """Coefficients of dv/dx - du/dy of a vector field on the grid."""
        return self.divergence(v, -u)

    def mean(self, fields: Tensor) -> Tensor:
        """Area mean (...,) of values (..., lat, lon)."""
        return (fields * self.weights).sum(-2).mean(-1)
