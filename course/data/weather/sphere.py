"""Spherical harmonic transforms: grid values on the sphere <-> coefficients up to a triangular truncation.

A field is f(longitude, mu) = sum over l, m of f[l, m] P[l, m](mu) exp(i m longitude), with mu = sin(latitude),
l = 0 ... T and |m| <= l; a real field needs only m >= 0. The associated Legendre functions P are normalized to
a mean square of one over the sphere, so f[0, 0] is the global mean. Derivatives are exact: along longitude a
factor i m, along latitude the functions

    H[l, m] = (1 - mu²) dP[l, m]/dmu = (l + 1) e[l, m] P[l - 1, m] - l e[l + 1, m] P[l + 1, m],
    e[l, m] = sqrt((l² - m²) / (4 l² - 1)),

and for the Laplacian a factor -l (l + 1) / a². On a Gaussian grid with at least (3 T + 1) / 2 latitudes and
3 T + 1 longitudes, products of two fields are transformed back exactly, without aliasing.

Source: J. J. Hack and R. Jakob (1992), "Description of a global shallow water model based on the spectral
transform method", NCAR/TN-343+STR, sections 3 to 5.
"""

import numpy as np
import torch
from torch import Tensor

RADIUS = 6.37122e6                               # of the Earth, m


def legendre(truncation: int, mu: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(P, H) at the sines of latitude `mu`, both float64 (m, l, latitude), zero where l < m."""
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
    """The smallest alias-free grid: (sines of latitude north to south, weights with sum 1, number of longitudes)."""
    mu, weights = np.polynomial.legendre.leggauss((3 * truncation + 2) // 2)
    columns = 3 * truncation + 1
    while not smooth(columns):                   # the FFT is fast for small prime factors
        columns += 1
    return mu[::-1].copy(), weights / 2, columns


def smooth(number: int) -> bool:
    """Whether 2, 3 and 5 are the only prime factors."""
    for prime in (2, 3, 5):
        while number % prime == 0:
            number //= prime
    return number == 1


class Sphere:
    """Transforms on one grid. Spectra are complex (..., l, m), fields real (..., latitude, longitude).

    `mu`: sines of the latitudes. `weights`: quadrature weights (from `gaussian`); `analyze`, `divergence`, `curl` and
    `mean` need them. Lengths are in meters, derivatives per meter.
    """

    def __init__(self, truncation: int, mu: np.ndarray, columns: int, weights: np.ndarray | None = None,
                 dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"):
        def constant(value: np.ndarray) -> Tensor:
            return torch.as_tensor(np.ascontiguousarray(value), dtype=dtype, device=device)

        p, h = legendre(truncation, mu)
        metric = RADIUS * np.sqrt(1 - mu**2)     # a cos(latitude): meters per radian of longitude
        m = np.arange(truncation + 1)
        l = m[:, None]
        self.truncation, self.columns = truncation, columns
        self.mu = constant(mu[:, None])                                              # (lat, 1)
        self.i_m = 1j * constant(m)                                                  # (m,)
        self.laplacian = constant(-l * (l + 1) / RADIUS**2)                          # (l, 1)
        self.inverse_laplacian = constant(np.where(l > 0, -RADIUS**2 / np.maximum(l * (l + 1), 1), 0))  # (l, 1)
        self.p = constant(p)                                                         # (m, l, lat)
        self.slope = constant(np.concatenate([p, h], 1) / metric)                    # (m, 2 l, lat)
        if weights is not None:
            back = np.concatenate([p, h], 2) * np.tile(weights / metric, 2)          # (m, l, 2 lat)
            self.weights = constant(weights[:, None])                                # (lat, 1), sum 1
            self.p_back = constant((p * weights).transpose(0, 2, 1))                 # (m, lat, l)
            self.slope_back = constant(back.transpose(0, 2, 1))                      # (m, 2 lat, l)

    def synthesize(self, spectra: Tensor) -> Tensor:
        """Transform coefficients (..., l, m) to values (..., lat, lon)."""
        return self.along_longitude(per_wave(spectra, self.p))

    def analyze(self, fields: Tensor) -> Tensor:
        """Transform values (..., lat, lon) to coefficients (..., l, m), dropping waves beyond the truncation."""
        return per_wave(self.waves(fields), self.p_back)

    def wind(self, vorticity: Tensor, divergence: Tensor) -> Tensor:
        """Eastward and northward wind (2, ..., lat, lon) in m/s, from coefficients of vorticity and divergence (1/s)."""
        stream, potential = vorticity * self.inverse_laplacian, divergence * self.inverse_laplacian
        u = torch.cat([self.i_m * potential, -stream], -2)                           # (..., 2 l, m)
        v = torch.cat([self.i_m * stream, potential], -2)
        return self.along_longitude(per_wave(torch.stack([u, v]), self.slope))

    def gradient(self, spectra: Tensor) -> Tensor:
        """Eastward and northward derivative (2, ..., lat, lon), per meter: the wind of that velocity potential."""
        return self.wind(torch.zeros_like(spectra), spectra * self.laplacian)

    def divergence(self, u: Tensor, v: Tensor) -> Tensor:
        """Coefficients of du/dx + dv/dy of a vector field (..., lat, lon); the mean, (0, 0), is exactly zero."""
        both = torch.cat([self.i_m * self.waves(u), -self.waves(v)], -2)             # (..., 2 lat, m)
        return per_wave(both, self.slope_back)

    def curl(self, u: Tensor, v: Tensor) -> Tensor:
        """Coefficients of dv/dx - du/dy of a vector field (..., lat, lon)."""
        return self.divergence(v, -u)

    def mean(self, fields: Tensor) -> Tensor:
        """Area mean (...) of values (..., lat, lon)."""
        return (fields * self.weights).sum(-2).mean(-1)

    def waves(self, fields: Tensor) -> Tensor:
        """Transform values (..., lat, lon) to amplitudes (..., lat, m) of exp(i m longitude), 0 <= m <= T."""
        return torch.fft.rfft(fields, norm="forward")[..., :self.truncation + 1]

    def along_longitude(self, waves: Tensor) -> Tensor:
        """Transform amplitudes (..., lat, m) to values (..., lat, lon)."""
        return torch.fft.irfft(waves, self.columns, norm="forward")


def per_wave(x: Tensor, matrices: Tensor) -> Tensor:
    """Multiply complex vectors by one real matrix per wave number m: (..., j, m), (m, j, k) -> (..., k, m)."""
    m, j, k = matrices.shape
    rows = torch.view_as_real(x.reshape(-1, j, m)).permute(2, 0, 3, 1)               # (m, n, 2, j)
    product = torch.bmm(rows.reshape(m, -1, j), matrices).view(m, -1, 2, k)          # (m, n, 2, k)
    return torch.view_as_complex(product.permute(1, 3, 0, 2).contiguous()).view(*x.shape[:-2], k, m)
