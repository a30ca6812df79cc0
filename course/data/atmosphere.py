"""An atmosphere of two layers of fluid on the rotating sphere: the equations, their forcing, and a time step.

Each layer (1 above, 2 below) has a vorticity, a divergence and a thickness, as gravity times depth (m²/s²); the lower
one flows over mountains and carries two tracers, temperature and column water. In vorticity-divergence
form (D. L. Williamson et al. 1992, J. Comput. Phys. 102, 211, equations 1 to 7, here twice), for each layer:

    d vorticity / dt  =  curl N,    d divergence / dt  =  div N - laplacian(p + |v|²/2),
    N = (vorticity + f) (v, -u) + drag,
    d thickness / dt  =  -div(thickness (u, v)) + exchange,
    p1 = thickness1 + thickness2 + mountains,    p2 = (1 - BUOYANCY) thickness1 + thickness2 + mountains.

Forcing: the boundary between the layers relaxes towards a slope that balances a jet in each hemisphere
(as in I. M. Held and M. J. Suarez 1994, Bull. Amer. Meteor. Soc. 75, 1825, whose boundary drag this is too);
the slope is unstable, and the eddies that grow on it are the weather. Relaxing moves mass between the layers but
makes none. Water evaporates from warm seas and falls out where the air is nearly saturated; it does not
heat the air. No seasons, no day and night, no randomness: the next state follows from this one.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from course.data.sphere import RADIUS, Sphere, gaussian

OMEGA = 7.292e-5                                 # rotation of the Earth, rad/s
DAY = 86400.0                                    # s
BUOYANCY = 0.3                                   # relative difference in density of the layers
DEPTH = 42_000.0                                 # mean thickness of a layer, m²/s²: waves of 280 and 79 m/s
FIELDS = ("vorticity1", "vorticity2", "divergence1", "divergence2", "thickness1", "thickness2", "temperature", "water")

# Continents and mountains: latitude, longitude and radius in degrees, and height (1 makes land; metres).
CONTINENTS = ((52, 95, 32, 1.4), (52, 25, 18, 1.0), (8, 20, 22, 1.2), (-22, 22, 15, 1.1), (50, 255, 25, 1.3),
              (68, 300, 12, 0.9), (-8, 300, 18, 1.2), (-38, 290, 12, 0.9), (-25, 134, 15, 1.2), (-90, 0, 20, 2.0),
              (22, 80, 10, 0.9))
MOUNTAINS = ((34, 88, 14, 2600), (42, 250, 11, 1900), (-20, 291, 8, 1500), (-40, 290, 7, 900), (73, 320, 10, 1300),
             (-86, 60, 16, 2000), (8, 38, 8, 900), (46, 12, 6, 500))


@dataclass(frozen=True)
class Physics:
    """What drives and slows the flow; `Physics(forced=False)` leaves only the conserving equations."""

    forced: bool = True              # False: no relaxation, drag, evaporation or rain
    mountains: float = 1.0           # times the height of the mountains
    jet: float = 38.0                # m/s, shear of the balanced jets that the layers relax to
    relax_days: float = 8.0          # of the boundary between the layers
    temperature_days: float = 8.0    # of the lower air's temperature
    drag_days: float = 2.5           # of the lower wind over sea
    drag_land_days: float = 1.0      # ... and over land
    smooth_hours: float = 3.0        # time in which the shortest waves decay; 0: never


def bumps(shapes: tuple[tuple[float, float, float, float], ...], lat: Tensor, lon: Tensor) -> Tensor:
    """A sum of Gaussian bumps (latitude, longitude, radius in degrees, height) at points in degrees."""
    total = torch.zeros_like(lat + lon)
    for north, east, radius, height in shapes:
        a, b, c = torch.deg2rad(lat), math.radians(north), torch.deg2rad(lon - east)
        cosine = a.sin() * math.sin(b) + a.cos() * math.cos(b) * c.cos()
        total += height * torch.exp((cosine - 1) / math.radians(radius) ** 2 * 2)
    return total


def land(lat: Tensor, lon: Tensor) -> Tensor:
    """Fraction of land, 0 to 1 with smooth coasts, at latitudes (..., 1) and longitudes (lon,) in degrees."""
    return torch.sigmoid(12 * (bumps(CONTINENTS, lat, lon) - 0.55))


def mountains(lat: Tensor, lon: Tensor) -> Tensor:
    """Geopotential of the ground in m²/s² at latitudes (..., 1) and longitudes (lon,) in degrees."""
    return 9.81 * bumps(MOUNTAINS, lat, lon)


def still_temperature(lat: Tensor, ground: Tensor) -> Tensor:
    """Temperature near 850 hPa to which still air tends (K): warm tropics and deserts, cold polar lands."""
    cosine = torch.deg2rad(lat).cos()
    return 248 + 45 * cosine**2.5 + ground * (5 - 16 * (1 - cosine**2) ** 2)


def sea_temperature(lat: Tensor) -> Tensor:
    """Temperature of the sea's surface in K: 301 at the equator, 271 at the poles."""
    return 271 + 30 * torch.deg2rad(lat).cos() ** 3


def saturation(temperature: Tensor) -> Tensor:
    """Column water in kg/m² that saturates air whose temperature near 850 hPa is given (K): after Clausius-Clapeyron."""
    return 62 * torch.exp(0.062 * (temperature - 290))


class Atmosphere:
    """The two layers on a Gaussian grid. A state is complex (years, 8, l, m), fields in the order of FIELDS."""

    def __init__(self, truncation: int, physics: Physics = Physics(), dtype: torch.dtype = torch.float32,  # noqa: B008
                 device: torch.device | str = "cpu"):
        mu, weights, columns = gaussian(truncation)
        self.physics = physics
        self.sphere = Sphere(truncation, mu, columns, weights, dtype, device)
        lat = torch.rad2deg(torch.asin(self.sphere.mu))                                  # (lat, 1)
        lon = torch.arange(columns, dtype=dtype, device=device) * 360 / columns          # (lon,)
        ground = land(lat, lon)                                                          # (lat, lon)
        self.coriolis = 2 * OMEGA * self.sphere.mu                                       # (lat, 1)
        self.mountains = self.sphere.analyse(mountains(lat, lon) * physics.mountains)    # (l, m)
        drag = (1 - ground) / physics.drag_days + ground / physics.drag_land_days
        self.drag = torch.stack([torch.zeros_like(drag), drag]) / DAY                    # (layer, lat, lon), 1/s
        self.jet = (physics.jet * torch.sin(2 * torch.deg2rad(lat)) ** POW).expand_as(ground).contiguous()
        self.slope = self.balance()                                                      # (l, m), m²/s²
        self.warmth = still_temperature(lat, ground)                                     # (lat, lon), K
        self.evaporation = (1 - 0.75 * ground) / (2 * DAY)                               # (lat, lon), 1/s
        self.damping = (self.sphere.laplacian / self.sphere.laplacian[-1]) ** 3          # (l, 1)

    def balance(self) -> Tensor:
        """Upper thickness, as a spectrum (l, m), that keeps the jet above in balance over a lower layer at rest."""
        sphere, still = self.sphere, torch.zeros_like(self.jet)
        spin = sphere.synthesise(sphere.curl(self.jet, still)) + self.coriolis
        slope = sphere.divergence(still, -spin * self.jet) * sphere.inverse_laplacian - sphere.analyse(self.jet**2 / 2)
        slope = slope / BUOYANCY
        slope[0, 0] = DEPTH
        return slope

    def start(self, seed: int, years: list[int]) -> Tensor:
        """Balanced jets with random eddies of some 1000 km, another draw for each (seed, year): (years, 8, l, m)."""
        sphere, size = self.sphere, self.sphere.truncation + 1
        state = torch.zeros(len(years), len(FIELDS), size, size, dtype=self.mountains.dtype, device=self.mountains.device)
        upper = sphere.curl(self.jet, torch.zeros_like(self.jet))
        for i, year in enumerate(years):
            draw = np.random.default_rng([seed, year]).standard_normal((2, 40, 40))[:, :size, :size]
            l = np.arange(draw.shape[1])[:, None]
            eddies = np.tril(draw[0] + 1j * draw[1]) * np.exp(-((l - 8) / 4.0) ** 2) * 2.5e-6    # 1/s
            eddies[:, 0] = 0                                                                  # zonal waves only
            state[i, 0:2, :len(l), :len(l)] = torch.as_tensor(eddies).to(state)
        state[:, 0] += upper
        state[:, 4] = self.slope
        state[:, 5] = -(1 - BUOYANCY) * self.slope - self.mountains
        state[:, 5, 0, 0] = DEPTH - self.mountains[0, 0]
        state[:, 6] = sphere.analyse(self.warmth)
        state[:, 7] = sphere.analyse(0.6 * saturation(self.warmth))
        return state

    def pressure(self, thickness: Tensor) -> Tensor:
        """Geopotential-like pressure of both layers (years, 2, ...) from their thicknesses, as spectra."""
        lower = (1 - BUOYANCY) * thickness[:, 0] + thickness[:, 1] + self.mountains
        return torch.stack([lower + BUOYANCY * thickness[:, 0], lower], 1)

    def tendency(self, state: Tensor) -> Tensor:
        """d state / dt, (years, 8, l, m)."""
        sphere = self.sphere
        thickness = state[:, 4:6]
        spin, depth, tracers = sphere.synthesise(state[:, [0, 1, 4, 5, 6, 7]]).split(2, 1)   # (years, 2, lat, lon) each
        spin = spin + self.coriolis
        u, v = sphere.wind(state[:, 0:2], state[:, 2:4])                                     # (years, 2, lat, lon)
        force_u, force_v = spin * v - self.drag * u, -spin * u - self.drag * v
        water = tracers[:, 1:]
        out_u = torch.cat([depth * u, water * u[:, 1:]], 1)                                  # mass and water on the move
        out_v = torch.cat([depth * v, water * v[:, 1:]], 1)
        # One transform: curl of the force as the divergence of (v, -u), its divergence, and the divergence of the fluxes.
        rotation, expansion, outflow = sphere.divergence(torch.cat([force_v, force_u, out_u], 1),
                                                         torch.cat([-force_u, force_v, out_v], 1)).split((2, 2, 3), 1)
        warming, rain = self.sources(tracers)
        slope_u, slope_v = sphere.gradient(state[:, 6])                                      # (years, lat, lon)
        warming = warming - u[:, 1] * slope_u - v[:, 1] * slope_v
        kinetic, warming, rain = sphere.analyse(torch.cat([(u**2 + v**2) / 2, warming[:, None], rain[:, None]], 1)
                                                ).split((2, 1, 1), 1)
        expansion = expansion - sphere.laplacian * (kinetic + self.pressure(thickness))
        return torch.cat([rotation, expansion, self.exchange(thickness) - outflow[:, :2], warming, rain - outflow[:, 2:]], 1)

    def exchange(self, thickness: Tensor) -> Tensor:
        """Mass that passes from one layer to the other as their boundary relaxes: spectra (years, 2, l, m), of sum zero."""
        upward = (self.slope - thickness[:, 0]) * (self.physics.forced / (self.physics.relax_days * DAY))
        return torch.stack([upward, -upward], 1)

    def sources(self, tracers: Tensor) -> tuple[Tensor, Tensor]:
        """Heating (K/s) and evaporation less rain (kg/m²/s), each (years, lat, lon), of temperature and water."""
        temperature, water = tracers.unbind(1)
        if not self.physics.forced:
            return torch.zeros_like(temperature), torch.zeros_like(water)
        full = saturation(temperature)
        moist = self.evaporation * (0.75 * saturation(self.warmth) - water).clamp(min=0)
        rain = (water - 0.8 * full).clamp(min=0) / (0.25 * DAY)
        return (self.warmth - temperature) / (self.physics.temperature_days * DAY), moist - rain

    def step(self, state: Tensor, seconds: float) -> Tensor:
        """One Runge-Kutta step of fourth order, then the decay of the shortest waves."""
        k1 = self.tendency(state)
        k2 = self.tendency(state + k1 * (seconds / 2))
        k3 = self.tendency(state + k2 * (seconds / 2))
        k4 = self.tendency(state + k3 * seconds)
        state = state + (k1 + 2 * (k2 + k3) + k4) * (seconds / 6)
        if self.physics.smooth_hours:
            state = state * torch.exp(-self.damping * (seconds / (3600 * self.physics.smooth_hours)))
        return state

    def advance(self, state: Tensor, hours: float) -> Tensor:
        """The state `hours` later, in equal steps short enough for the fastest wave (RK4 is stable up to 2.8)."""
        fastest = (math.sqrt(2 * DEPTH) + 60) * (self.sphere.truncation + 1) / RADIUS        # rad/s
        steps = math.ceil(3600 * hours * fastest / 2.4)
        for _ in range(steps):
            state = self.step(state, 3600 * hours / steps)
        return state

    def budget(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Mass (m²/s², mean thickness of all) and energy above rest (m⁶/s⁶... per unit area): float64 (years,) each."""
        sphere = self.sphere
        upper, lower = sphere.synthesise(state[:, 4:6]).double().unbind(1)                   # (years, lat, lon)
        u, v = sphere.wind(state[:, 0:2], state[:, 2:4]).double()
        hills = sphere.synthesise(self.mountains).double()
        kinetic = (u**2 + v**2) / 2
        light = 1 - BUOYANCY
        level = lower + hills
        potential = light * ((upper + level) ** 2 - level**2) / 2 + (level**2 - hills**2) / 2
        rest = light * (4 * DEPTH**2 - DEPTH**2) / 2 + DEPTH**2 / 2 - hills.new_tensor(0)
        weights = sphere.weights.double()
        mean = [(x * weights).sum((-2, -1)) / sphere.columns for x in
                (upper + lower, light * upper * kinetic[:, 0] + lower * kinetic[:, 1] + potential - rest)]
        return mean[0], mean[1]
