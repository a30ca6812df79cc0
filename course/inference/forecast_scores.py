"""`course evaluate RUN`: score a trained model on years that it never saw."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

from course import config
from course.checkpoint import checkpoint
from course.config import Config
from course.data import Pairs, open_pairs
from course.data.weather import layout
from course.data.weather.baselines import Regression
from course.data.weather.metrics import squared_error
from course.models import Model, ViTConfig, build_model, family_of
from course.ops.number_formats import parameter_dtype, set_matmul_precision
from course.parallel import initialize, serial_layout
from course.planner import free_memory
from course.training.validation import forward_only, headline, row_weights
from course.utils import plots
from course.utils.atomic_files import write_json
from course.utils.errors import CourseError

DAYS = 5                                             # how far the model is rolled forward, at least one step
State = Callable[[Tensor], Tensor]                   # normalized state -> normalized state one step later


@dataclass
class Scores:
    """RMSE of every method in each channel's unit, (leads, C), and one example forecast."""

    hours: list[int]
    rmse: dict[str, np.ndarray]
    truth: np.ndarray                                # (1 + leads, H, W) of the pictured channel, in its unit
    forecast: np.ndarray


def score_run(run: Path, split: str = "test", samples: int = 64, animate: bool = False, average: bool = False) -> dict[str, Any]:
    """Score the newest checkpoint of a run; write scores.json and pictures to `run/evaluation`, print the table.

    average: use the weights' moving average.

    Raises `CourseError` if the run is not a ViT's on weather or has no checkpoint, or if no file of the split is long enough.
    """
    settings = read_config(run)
    if not isinstance(settings.model, ViTConfig):
        what = {"dit": "DiT, which forecasts nothing: draw its samples with `course generate",
                "gpt": "GPT, which forecasts no weather: let it write with `course sample"}[family_of(settings.model)]
        raise CourseError(f"{run} is of a {what} {run}`")
    if settings.data.source == "mock":
        raise CourseError(f"{run} was trained on mock data, which has no weather to forecast: train with data.source=files")
    device = device_of(settings)
    print(f"{run}: forecasts of {DAYS} days from up to {samples} times in the {split} years, on {device.type}, compared with "
          "persistence, climatology and a linear regression", flush=True)
    model, step = load_model(run, settings, device, average)
    settings = replace(settings, data=replace(settings.data, pairs="all"))              # a forecast may start at any entry
    pairs, training = open_pairs(settings, split), open_pairs(settings, "train")
    channels = layout.channel_names(pairs.years[0])
    pictured = channels.index(headline(channels))
    methods: dict[str, State] = {"model": state_to_state(model, settings), "regression": Regression(training)}
    scores = score(methods, pairs, starts(pairs, samples, DAYS), settings, device, pictured)
    result = write(run, scores, channels, pictured, step, split, animate)
    show(run, scores, channels, pictured, result)
    return result


def read_config(run: Path) -> Config:
    """The configuration of a run. Raises `CourseError` for a folder of anything else."""
    if not (run / "config.yaml").is_file():
        preset = str(run) if str(run) in config.presets() else ""
        what = ("is not the folder of a run (it has no config.yaml)" if run.exists() else
                "is a preset, not a run" if preset else "does not exist")
        raise CourseError(f"{run} {what}: give the folder of a run, such as runs/{preset or 'vit-demo'}/default, or train one "
                          "first")
    return config.load(str(run / "config.yaml"))


def device_of(settings: Config) -> torch.device:
    """The device for a run's model: a GPU if there is one and the run did not refuse it."""
    return torch.device("cuda" if torch.cuda.is_available() and settings.train.device != "cpu" else "cpu")


def load_model(run: Path, settings: Config, device: torch.device, average: bool | None = False) -> tuple[Model, int]:
    """The model of the newest intact checkpoint, and the step at which it was written.

    average: load the moving average of the weights; None: if the checkpoint has one. Raises `CourseError` if there is no intact
    checkpoint, or no average.
    """
    found = checkpoint.newest(run / "checkpoints", print)
    if found is None:
        raise CourseError(f"{run} has no checkpoint yet: let it train to its first one, or lower checkpoint.every")
    free_memory.check_weights(settings, device)
    set_matmul_precision(settings.precision)
    model = build_model(settings.model, settings.train.seed)
    layout = serial_layout(model)
    initialize(model, layout.placements, settings.train.seed, device, parameter_dtype(settings.precision))
    averaged = any(name.endswith(".ema") for name in found[1]["tensors"])
    checkpoint.load(*found, model, layout, average=averaged if average is None else average)
    return model, int(found[1]["state"]["step"])


def state_to_state(model: Model, settings: Config) -> State:
    """The model as a function of the normalized state alone, (B, C, H, W)."""
    forward = forward_only(model, serial_layout(model), settings.precision)
    dtype = parameter_dtype(settings.precision)

    def one_step(x: Tensor) -> Tensor:
        output, _ = forward({"input": x.to(dtype), "sample": torch.arange(len(x), device=x.device)})
        assert output is not None                   # there is no pipeline
        return model.fields(output)

    return one_step


def starts(pairs: Pairs, samples: int, days: int) -> list[int]:
    """Evenly spaced samples from which `days` days of forecast, or one step, fit in the same file; all, if they are fewer.

    Raises `CourseError` if there is none.
    """
    entries = max(days * 24 // layout.HOURS, pairs.lead)
    fits = [int(first) + i for first, year in zip(pairs.first, pairs.years, strict=False)
            for i in range(max(0, year.shape[0] - entries))]
    if not fits:
        raise CourseError(f"no file in {pairs.years[0].path.parent} is {entries * layout.HOURS // 24} days long: "
                          f"evaluation needs {entries + 1} entries in a file")
    return [fits[i] for i in np.linspace(0, len(fits) - 1, min(samples, len(fits))).astype(int)]


def score(methods: dict[str, State], pairs: Pairs, first: list[int], settings: Config, device: torch.device,
          pictured: int) -> Scores:
    """Roll every method forward from each start; take the RMSE over the starts and, weighted by area, over the globe."""
    leads = max(1, DAYS * 24 // layout.HOURS // settings.data.lead)
    climate = layout.read_climatology(Path(settings.data.path), pairs.shape)
    average = torch.from_numpy((climate - pairs.mean) / pairs.std).to(device)
    weights = row_weights(pairs, device)
    squares = {name: torch.zeros(leads, pairs.shape[0], device=device) for name in (*methods, "persistence", "climatology")}
    movie: list[tuple[np.ndarray, np.ndarray]] = []
    for begin in range(0, len(first), 8):
        group = first[begin:begin + 8]

        def truth_at(lead: int, group: list[int] = group) -> Tensor:
            return torch.from_numpy(np.stack([pairs.state(s, lead * settings.data.lead) for s in group])).to(device)

        start = truth_at(0)
        states = {**dict.fromkeys(methods, start), "persistence": start, "climatology": average.expand_as(start)}
        if not movie:
            movie.append((start[0, pictured].cpu().numpy(),) * 2)
        for lead in range(1, leads + 1):
            truth = truth_at(lead)
            states |= {name: method(states[name]) for name, method in methods.items()}
            for name, state in states.items():
                squares[name][lead - 1] += squared_error(state, truth, weights).sum(0)
            if begin == 0:
                movie.append((truth[0, pictured].cpu().numpy(), states["model"][0, pictured].float().cpu().numpy()))
    hours = [layout.HOURS * settings.data.lead * lead for lead in range(1, leads + 1)]
    rmse = {name: (sums / len(first)).sqrt().cpu().numpy() * pairs.std[:, 0, 0] for name, sums in squares.items()}
    shown = [np.stack(fields) * pairs.std[pictured] + pairs.mean[pictured] for fields in zip(*movie, strict=True)]
    return Scores(hours, rmse, *shown)


def write(run: Path, scores: Scores, channels: list[str], pictured: int, step: int, split: str, animate: bool) -> dict[str, Any]:
    """Write scores.json and the pictures; return the content of scores.json."""
    folder, name = run / "evaluation", channels[pictured]
    unit = layout.CHANNELS.get(name, "")
    first, last = scores.hours[0], len(scores.hours) - 1
    one_day = max(1, min(24 // first, len(scores.hours)))               # or the first lead, if that is longer
    title = f"{name} ({unit}), forecast of {scores.hours[one_day - 1]} hours"
    maps = plots.truth_forecast_error(scores.truth[one_day], scores.forecast[one_day], title, scores.truth[0])
    files = [plots.save(maps, folder / "forecast.png")]
    curves = {method: values[:, pictured].tolist() for method, values in scores.rmse.items()}
    files.append(plots.save(plots.skill(scores.hours, {k: v for k, v in curves.items() if k != "regression"},
                                              f"{name}: forecast error against lead time", unit), folder / "skill.png"))
    if animate:
        files.append(plots.animate(scores.truth, scores.forecast, [0, *scores.hours], f"{name} ({unit})",
                                      folder / "forecast.gif"))
    model, persistence = (scores.rmse[method][0, pictured] for method in ("model", "persistence"))
    result = {"step": step, "split": split, "channel": name, "unit": unit, "hours": scores.hours, "channels": channels,
              "rmse": {method: values.tolist() for method, values in scores.rmse.items()},
              "better_than_persistence": float(1 - model / persistence), "lead_days": scores.hours[last] / 24,
              "files": sorted(map(str, files))}
    write_json(folder / "scores.json", result)
    return result


def show(run: Path, scores: Scores, channels: list[str], pictured: int, result: dict[str, Any]) -> None:
    """Print the table of all channels, and the headline."""
    first = scores.hours[0]
    later = [h for h in (24, 72, 120) if h in scores.hours]
    table = Table(title=f"RMSE on the {result['split']} years: the model of step {result['step']} and others", box=SIMPLE)
    heads = [f"{name}\n{first} h" for name in ("model", "linear", "persist.")]
    for head in ("channel\n(unit)", *heads, "climat-\nology", *(f"model\n{h} h" for h in later)):
        table.add_column(head, justify="left" if head.startswith("channel") else "right", no_wrap=True)
    for i, name in enumerate(channels):
        now = [scores.rmse[method][0, i] for method in ("model", "regression", "persistence", "climatology")]
        table.add_row(f"{name} ({layout.CHANNELS.get(name, '')})",
                      *three_digits([*now, *(scores.rmse["model"][scores.hours.index(h), i] for h in later)]))
    Console().print(table)
    model, regression, persistence = (scores.rmse[method][0, pictured] for method in ("model", "regression", "persistence"))
    print(f"linear regression on neighboring grid points: {result['channel']} RMSE {first} h {regression:.3g}")
    for file in result["files"]:
        print(f"picture: {file}")
    print(f"curves: tensorboard --logdir {run / 'tensorboard'}")
    print(f"{result['channel']} RMSE {first} h: model {model:.3g}, persistence {persistence:.3g}, "
          f"{100 * result['better_than_persistence']:.0f}% better", flush=True)


def three_digits(values: Iterable[float]) -> list[str]:
    """Numbers with three significant digits, large ones whole."""
    return [f"{v:.0f}" if abs(v) >= 100 else f"{v:.3g}" for v in values]
