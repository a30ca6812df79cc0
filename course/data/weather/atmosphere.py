"""A two-layer atmosphere on the rotating sphere: equations, forcing and time step.

The hydrostatic primitive equations of a dry gas in sigma = pressure / surface pressure, two layers of equal mass
(1 above, 2 below, at sigma 1/4 and 3/4), in vorticity-divergence form. With G = div v + v·grad(ln ps) for
each layer and S = (G2 - G1) / 4, the flow from the upper to the lower layer:

    d vorticity / dt    =  curl N,     d divergence / dt  =  div N - laplacian(|v|²/2 + geopotential),
    N                   =  (vorticity + f) (v, -u) - S (v2 - v1) - R T grad(ln ps) - drag v,
    d temperature / dt  =  -v·grad(T) - S (T2 - T1) + (R/cp) T (v·grad(ln ps) - A) + heating,
    d ps / dt           =  -div(ps (v1 + v2) / 2),
    geopotential1       =  ground + ln 2 R (T1 + T2),    A1 = ln 2 G1,
    geopotential2       =  ground + (1 - ln 2) R T2,     A2 = ln 2 G1 + (1 - ln 2) G2.

This choice of A conserves energy: A. J. Simmons and D. M. Burridge (1981), Mon. Wea. Rev. 109, 758, sections 2 and 3.
The prognostic variable is the surface pressure, not its logarithm, so mass is conserved up to rounding.

Heating relaxes the temperature towards warm tropics and cold poles, and drag slows the lower wind, as in I. M. Held
and M. J. Suarez (1994), Bull. Amer. Meteor. Soc. 75, 1825, with continents added. The temperature gradient is
unstable, and the eddies that grow on it are the weather. The lower wind transports water. Water evaporates from
warm seas and rains out where the air is nearly saturated, without heating the air. There are no seasons, no day
and night, and no random forcing: a state determines the next one.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from course.data.weather.sphere import RADIUS, Sphere, gaussian
from course.data.weather.time_step import apply_matrices, exponentials

OMEGA = 7.292e-5                                 # rotation of the Earth, rad/s
GRAVITY = 9.80616                                # m/s²
GAS = 287.0                                      # R of dry air, J/kg/K
HEAT = 1004.64                                   # cp of dry air, J/kg/K
DAY = 86400.0                                    # s
MEAN_PRESSURE = 98_500.0                         # mean surface pressure, Pa
REST = (215.0, 270.0)                            # temperatures (K) around which the linear waves are exact
WIND = 150.0                                     # m/s: the fastest wind plus the waves' nonlinear remainder
FIELDS = ("vorticity1", "vorticity2", "divergence1", "divergence2", "temperature1", "temperature2", "ps", "water")

# Latitude, longitude and radius in degrees, and height: for continents about 1, for mountains in meters.
CONTINENTS = ((52, 95, 32, 1.4), (52, 25, 18, 1.0), (8, 20, 22, 1.2), (-22, 22, 15, 1.1), (50, 255, 25, 1.3),
              (68, 300, 12, 0.9), (-8, 300, 18, 1.2), (-38, 290, 12, 0.9), (-25, 134, 15, 1.2), (-90, 0, 20, 2.0),
              (22, 80, 10, 0.9))
MOUNTAINS = ((34, 88, 14, 2600), (42, 250, 11, 1900), (-20, 291, 9, 1500), (-40, 290, 8, 900), (73, 320, 11, 1300),
             (-86, 60, 16, 2000), (8, 38, 9, 900), (46, 12, 8, 600))


@dataclass(frozen=True)
class Physics:
    """Forcing and damping; `Physics(forced=False, smooth_hours=0, calm_hours=0)` leaves only the conservative flow."""

    forced: bool = True              # False: no heating, drag, evaporation or rain
    mountains: float = 1.0           # factor on the mountains' height
    contrast: float = 62.0           # K, equator to pole, of the equilibrium temperature
    stability: float = 14.0          # K per unit of ln(pressure), of its potential temperature at the equator
    heating_days: float = 6.0        # relaxation time of the temperature
    drag_days: float = 2.5           # damping time of the lower wind over sea
    drag_land_days: float = 1.2      # ... and over land
    smooth_hours: float = 24.0       # decay time of the shortest waves at truncation 21, times (21/T)^4.5 at T; 0: off
    calm_hours: float = 6.0          # ... and of the divergence's shortest waves (gravity waves); 0: off


def bumps(shapes: tuple[tuple[float, float, float, float], ...], lat: Tensor, lon: Tensor) -> Tensor:
    """Sum Gaussian bumps on a grid: latitudes (lat, 1) and longitudes (lon,) in degrees -> (lat, lon) in the heights' unit.

    shapes: (latitude, longitude, radius in degrees, height) of each bump.
    """
    total = torch.zeros_like(lat + lon)
    lat = torch.deg2rad(lat)
    for north, east, radius, height in shapes:
        center = math.radians(north)
        cosine = lat.sin() * math.sin(center) + lat.cos() * math.cos(center) * torch.deg2rad(lon - east).cos()
        total += height * torch.exp(2 * (cosine - 1) / math.radians(radius) ** 2)
    return total


def land(lat: Tensor, lon: Tensor) -> Tensor:
    """Land fraction, 0 to 1 with smooth coasts, at latitudes (lat, 1) and longitudes (lon,) in degrees."""
    return torch.sigmoid(12 * (bumps(CONTINENTS, lat, lon) - 0.55))


def mountains(lat: Tensor, lon: Tensor) -> Tensor:
    """Geopotential of the ground in m²/s² at latitudes (lat, 1) and longitudes (lon,) in degrees."""
    return GRAVITY * bumps(MOUNTAINS, lat, lon)


def saturation(temperature: Tensor) -> Tensor:
    """Column water (kg/m²) of saturated air with this lower-layer temperature (K), after Clausius-Clapeyron."""
    return 62 * torch.exp(0.064 * (temperature - 290))


class Atmosphere:
    """The two-layer model on a Gaussian grid. A state is complex (years, 8, l, m), with the fields in the order of FIELDS."""

    def __init__(self, truncation: int, physics: Physics | None = None, dtype: torch.dtype = torch.float32,
                 device: torch.device | str = "cpu"):
        mu, weights, columns = gaussian(truncation)
        self.physics = physics = physics or Physics()
        self.sphere = Sphere(truncation, mu, columns, weights, dtype, device)
        lat = torch.rad2deg(torch.asin(self.sphere.mu))                                  # (lat, 1)
        lon = torch.arange(columns, dtype=dtype, device=device) * 360 / columns          # (lon,)
        self.land = land(lat, lon)                                                       # (lat, lon)
        self.ground = self.sphere.analyze(mountains(lat, lon) * physics.mountains)       # (l, m), m²/s²
        self.coriolis = 2 * OMEGA * self.sphere.mu                                       # (lat, 1)
        self.warmth = self.still_temperature()                                           # (layer, lat, lon), K
        drag = (1 - self.land) / physics.drag_days + self.land / physics.drag_land_days
        self.drag = torch.stack([0 * drag, drag]) * (physics.forced / DAY)               # (layer, lat, lon), 1/s
        self.waves = self.linear_waves()                                                 # (l, 5, 5), 1/s
        self.waves_here = self.waves.to(self.sphere.p)
        self.steppers: dict[float, tuple[Tensor, ...]] = {}                              # by step length, s

    def still_temperature(self) -> Tensor:
        """The equilibrium temperature of the heating, (layer, lat, lon) in K: Held and Suarez's, with hot deserts and cold
        polar land."""
        sine, physics = self.sphere.mu**2, self.physics                                  # sin²(latitude)
        slope = sine**2 * (3 - 2 * sine)                                                 # 0 to 1, steepest at 45 degrees
        layers = []
        for sigma, coast in ((0.25, 0.0), (0.75, 1.0)):
            potential = 317 - physics.contrast * slope - physics.stability * math.log(sigma) * (1 - sine)
            local = coast * self.land * (3 - 12 * sine**2)
            layers.append((potential * sigma ** (GAS / HEAT)).clamp(min=200) + local)
        return torch.stack(layers)

    def start(self, seed: int, years: list[int]) -> Tensor:
        """The initial state: jets in balance with the temperature, plus random eddies for each (seed, year): (years, 8, l, m)."""
        sphere, size = self.sphere, self.sphere.truncation + 1
        state = self.ground.new_zeros(len(years), len(FIELDS), size, size)
        state[:, 4:6] = sphere.analyze(self.warmth)
        state[:, 6] = sphere.analyze(MEAN_PRESSURE * torch.exp(-sphere.synthesize(self.ground) / (GAS * 270)))
        state[:, 6] *= MEAN_PRESSURE / state[:, 6, :1, :1]
        state[:, 7] = sphere.analyze(0.6 * saturation(self.warmth[1]))
        # Thermal wind over a lower layer at rest; 3e-5 limits it near the equator, where f vanishes.
        slope = GAS * math.log(2) * sphere.gradient(state[0, 4:6].mean(0) * 2)[1].mean(-1, keepdim=True)     # (lat, 1)
        jet = (-slope * self.coriolis / (self.coriolis**2 + 3e-5**2)).expand(-1, sphere.columns).contiguous()
        state[:, 0] = sphere.curl(jet, 0 * jet)
        l = np.arange(min(size, 24))[:, None]
        for i, year in enumerate(years):
            draw = np.random.default_rng([seed, year]).standard_normal((2, 24, 24))[:, :size, :size]
            eddies = np.tril(draw[0] + 1j * draw[1]) * np.exp(-(((l - 8) / 4) ** 2)) * 3e-6                  # 1/s
            eddies[:, 0] = 0                                                                                 # waves only
            state[i, 0:2, :len(l), :len(l)] += torch.as_tensor(eddies).to(state)
        return state

    def tendency(self, state: Tensor) -> Tensor:
        """d state / dt, (years, 8, l, m)."""
        sphere = self.sphere
        values = sphere.synthesize(state)                                                    # (years, 8, lat, lon)
        spin, spread, temperature = (values[:, i:i + 2] for i in (0, 2, 4))                  # (years, 2, lat, lon)
        ps, water = values[:, 6:7], values[:, 7:8]                                           # (years, 1, lat, lon)
        wind, slope = self.winds_and_slopes(state)                                           # (2, years, 2 and 3, lat, lon)
        slope_ps = slope[:, :, 2:] / ps                                                      # of ln ps
        along = (wind * slope_ps).sum(0)                                                     # v·grad(ln ps)
        inflow = spread + along                                                              # G
        sinking = (inflow[:, 1:] - inflow[:, :1]) / 4                                        # S

        u, v = wind
        spin = spin + self.coriolis
        force = torch.stack([spin * v, -spin * u]) - GAS * temperature * slope_ps - self.drag * wind
        force = force - sinking * (wind[:, :, 1:] - wind[:, :, :1])                          # (2, years, 2, lat, lon)
        flux = torch.cat([ps * wind.mean(2, keepdim=True), water * wind[:, :, 1:]], 2)       # mass and water
        # One transform for div N, the fluxes, and curl N, which is the divergence of (Nv, -Nu).
        curl, div, outflow = sphere.divergence(torch.cat([force[1], force[0], flux[0]], 1),
                                               torch.cat([-force[0], force[1], flux[1]], 1)).split(2, 1)

        squeeze = torch.cat([math.log(2) * inflow[:, :1],
                             math.log(2) * inflow[:, :1] + (1 - math.log(2)) * inflow[:, 1:]], 1)            # A
        warming = -(wind * slope[:, :, :2]).sum(0) - sinking * (temperature[:, 1:] - temperature[:, :1])
        warming = warming + GAS / HEAT * temperature * (along - squeeze)
        heating, rain = self.sources(temperature, water)
        scalars = sphere.analyze(torch.cat([(u**2 + v**2) / 2, warming + heating, rain], 1))                 # 2 + 2 + 1
        div = div - sphere.laplacian * (scalars[:, :2] + self.geopotential(state[:, 4:6], self.ground))
        return torch.cat([curl, div, scalars[:, 2:4], -outflow[:, :1], scalars[:, 4:] - outflow[:, 1:]], 1)

    def winds_and_slopes(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Winds (2, years, 2, lat, lon) and the gradients of both temperatures and ps (2, years, 3, lat, lon)."""
        carried = state[:, 4:7]
        both = self.sphere.wind(torch.cat([state[:, 0:2], torch.zeros_like(carried)], 1),
                                torch.cat([state[:, 2:4], carried * self.sphere.laplacian], 1))
        return both[:, :, :2], both[:, :, 2:]

    @staticmethod
    def geopotential(temperature: Tensor, ground: Tensor) -> Tensor:
        """Geopotential of the two layers (years, 2, ...) in m²/s², for spectra or grid values."""
        upper, lower = temperature.unbind(1)
        return torch.stack([ground + GAS * math.log(2) * (upper + lower), ground + GAS * (1 - math.log(2)) * lower], 1)

    def sources(self, temperature: Tensor, water: Tensor) -> tuple[Tensor, Tensor]:
        """Heating of both layers (K/s), and evaporation minus rain (kg/m²/s)."""
        if not self.physics.forced:
            return torch.zeros_like(temperature), torch.zeros_like(water)
        heating = (self.warmth - temperature) / (self.physics.heating_days * DAY)
        evaporation = (0.75 * saturation(self.warmth[1]) - water).clamp(min=0) * (1 - 0.75 * self.land) / (2 * DAY)
        rain = (water - 0.8 * saturation(temperature[:, 1:])).clamp(min=0) / (0.1 * DAY)
        return heating, evaporation - rain

    def linear_waves(self) -> Tensor:
        """The linear operator (l, 5, 5) of the fast waves on (divergence 1 2, temperature 1 2, ps), for air at rest at REST."""
        waves = torch.zeros(self.sphere.truncation + 1, 5, 5, dtype=torch.float64)
        stiff = -self.sphere.laplacian[:, 0].double().cpu() * GAS                            # (l,)
        (upper, lower), log2 = REST, math.log(2)
        waves[:, 0, 2] = waves[:, 0, 3] = stiff * log2
        waves[:, 1, 3] = stiff * (1 - log2)
        waves[:, 0, 4], waves[:, 1, 4] = stiff * upper / MEAN_PRESSURE, stiff * lower / MEAN_PRESSURE
        waves[:, 2, 0] = -GAS / HEAT * upper * log2
        waves[:, 3, 0] = -GAS / HEAT * lower * log2
        waves[:, 3, 1] = -GAS / HEAT * lower * (1 - log2)
        waves[:, 2:4, 0] += (lower - upper) / 4                                              # sinking, S
        waves[:, 2:4, 1] -= (lower - upper) / 4
        waves[:, 4, 0:2] = -MEAN_PRESSURE / 2
        return waves

    def advance(self, state: Tensor, hours: float) -> Tensor:
        """Integrate the state for `hours`, in equal steps short enough for the fastest winds."""
        fastest = WIND * (self.sphere.truncation + 1) / RADIUS                               # rad/s
        steps = math.ceil(3600 * hours * fastest / 2.3)                                      # Runge-Kutta's limit is 2.8
        seconds = 3600 * hours / steps
        if seconds not in self.steppers:
            self.steppers[seconds] = exponentials(self.waves, seconds, self.sphere.p)
        for _ in range(steps):
            state = self.step(state, seconds, self.steppers[seconds])
        return state

    def step(self, state: Tensor, seconds: float, matrices: tuple[Tensor, ...]) -> Tensor:
        """One step of the fourth-order exponential Runge-Kutta method, then the decay of the shortest waves.

        Matrix exponentials integrate the linear waves, the fastest part, exactly; the rest is as in the classical
        method. This allows steps twice as long. S. M. Cox and P. C. Matthews (2002), J. Comput. Phys. 176, 430,
        equations 26 to 29; `matrices` are their coefficients (`time_step.exponentials`).
        """
        half, whole, push, first, middle, last = matrices

        def rest(state: Tensor) -> Tensor:
            return self.tendency(state) - apply_matrices(state, self.waves_here, others=0)

        n1 = rest(state)
        moved = apply_matrices(state, half)
        a = moved + apply_matrices(n1, push, seconds / 2)
        n2 = rest(a)
        n3 = rest(moved + apply_matrices(n2, push, seconds / 2))
        n4 = rest(apply_matrices(a, half) + apply_matrices(2 * n3 - n1, push, seconds / 2))
        state = (apply_matrices(state, whole) + apply_matrices(n1, first, seconds / 6)
                 + apply_matrices(n2 + n3, middle, seconds / 3)
                 + apply_matrices(n4, last, seconds / 6))
        return state * self.decay(seconds)

    def decay(self, seconds: float) -> Tensor:
        """The factor by which smoothing damps each coefficient in `seconds`: (8, l, 1)."""
        physics, scale = self.physics, self.sphere.laplacian / self.sphere.laplacian[-1]     # (l, 1), 0 to 1
        rate = torch.zeros_like(scale).repeat(len(FIELDS), 1, 1)                             # (8, l, 1), 1/hour
        if physics.smooth_hours:
            rate += scale**3 / (physics.smooth_hours * (21 / self.sphere.truncation) ** 4.5)
        if physics.calm_hours:
            rate[2:4] += scale / physics.calm_hours
        return torch.exp(-rate * (seconds / 3600))

    def budget(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Area means of mass (kg/m²), total energy and kinetic energy (J/m²), each float64 (years,)."""
        values = self.sphere.synthesize(state).double()
        ground = self.sphere.synthesize(self.ground).double()
        wind = self.winds_and_slopes(state)[0].double()
        mass = values[:, 6] / GRAVITY                                                        # (years, lat, lon)
        kinetic = mass * (wind**2).sum(0).mean(1) / 2
        energy = kinetic + mass * (HEAT * values[:, 4:6].mean(1) + ground)
        weights = self.sphere.weights.double()
        mass, energy, kinetic = ((x * weights).sum(-2).mean(-1) for x in (mass, energy, kinetic))
        return mass, energy, kinetic
