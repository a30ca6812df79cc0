"""Figures of forecasts. Each function returns a matplotlib figure; the palettes are safe for color-blind readers."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from course.utils.atomic_files import atomic
from course.utils.colors import BLUE, GRAY, GREEN, ORANGE, SIGNED, field_map

EXTENT = (0.0, 360.0, -90.0, 90.0)


Scale = tuple[float, float, float]                   # the lowest and highest value with a color, the largest error


def scale_of(truth: np.ndarray, forecast: np.ndarray) -> Scale:
    """The color scale for these fields, of any equal shape. Take it from a whole forecast, so that its maps can be compared."""
    low, high = np.percentile(truth, [1, 99])
    return float(low), float(high), max(float(np.percentile(abs(forecast - truth), 99)), 1e-6)


def truth_forecast_error(truth: np.ndarray, forecast: np.ndarray, title: str, start: np.ndarray | None = None,
                         scale: Scale | None = None) -> Figure:
    """Maps of truth, forecast and their difference, (H, W) each, and of the start if it is given.

    Colors suit these fields, unless `scale` is given: use one for several maps to compare them by eye.
    """
    maps = [("truth", truth), ("forecast", forecast)]
    if start is not None:
        maps.insert(0, ("start", start))
    figure = Figure(figsize=(4.2 * (len(maps) + 1), 2.9), layout="constrained")
    axes = figure.subplots(1, len(maps) + 1)
    low, high, most = scale or scale_of(truth, forecast)
    for axis, (name, field) in zip(axes, maps, strict=False):
        image = draw(axis, field, name, *field_map(low, high))
    figure.colorbar(image, ax=axes[:-1].tolist(), orientation="horizontal", shrink=0.4, aspect=40)
    image = draw(axes[-1], forecast - truth, "forecast - truth", SIGNED, -most, most)
    figure.colorbar(image, ax=axes[-1], orientation="horizontal", shrink=0.9)
    figure.suptitle(title)
    return figure


def draw(axis: Any, field: np.ndarray, name: str, palette: str, low: float, high: float) -> Any:
    """One (H, W) field as a map, north at the top."""
    axis.set_title(name, fontsize=10)
    axis.set_xticks([0, 90, 180, 270, 360])
    axis.set_yticks([-90, -45, 0, 45, 90])
    axis.tick_params(labelsize=7)
    return axis.imshow(field, cmap=palette, vmin=low, vmax=high, extent=EXTENT, aspect="auto", interpolation="nearest")


def skill(hours: list[int], curves: dict[str, list[float]], title: str, unit: str) -> Figure:
    """RMSE against lead time, one curve per method."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    styles = [("o", "-", BLUE), ("s", "--", ORANGE), ("", ":", GRAY), ("^", "-.", GREEN)]
    for (name, values), (marker, dash, color) in zip(curves.items(), styles, strict=False):
        axis.plot(hours[:len(values)], values, marker=marker, linestyle=dash, color=color, label=name, markersize=4)
    axis.set_xlabel("lead time (hours)")
    axis.set_ylabel(f"RMSE ({unit})")
    axis.set_xticks(hours[3::4] or hours)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()
    axis.set_title(title)
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG."""
    with atomic(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return path


def animate(truth: np.ndarray, forecast: np.ndarray, hours: list[int], title: str, path: Path) -> Path:
    """Truth beside forecast, (times, H, W) each, as an animated GIF with four frames a second."""
    from matplotlib.animation import FuncAnimation, PillowWriter

    figure = Figure(figsize=(9, 3), layout="constrained")
    low, high, _ = scale_of(truth, forecast)
    images = [draw(axis, fields[0], name, *field_map(low, high))
              for axis, fields, name in zip(figure.subplots(1, 2), (truth, forecast), ("truth", "forecast"), strict=True)]

    def show(frame: int) -> list[Any]:
        figure.suptitle(f"{title}, {hours[frame]} h")
        for image, fields in zip(images, (truth, forecast), strict=True):
            image.set_data(fields[frame])
        return images

    with atomic(path) as temporary:
        movie = temporary.with_suffix(".gif")                           # Pillow goes by the ending
        FuncAnimation(figure, show, frames=len(hours)).save(movie, PillowWriter(fps=4), dpi=90)
        movie.rename(temporary)
    return path
