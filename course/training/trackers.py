"""Send a run's numbers to Weights & Biases (log.wandb=true) or MLflow (log.mlflow=URI)."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from course.config import Config, schema
from course.utils.atomic_files import atomic
from course.utils.errors import CourseError


class Tracker(NamedTuple):
    """An open run of a tracking service: its setting, a function that sends numbers of a step, and one that ends it."""

    setting: str
    send: Callable[[Mapping[str, float], int], object]
    close: Callable[[], object]


def check_installed(config: Config) -> None:
    """Raise `CourseError` if a wanted service's package is not installed."""
    for setting, wanted, package in (("log.wandb=true", config.log.wandb, "wandb"), ("log.mlflow", config.log.mlflow, "mlflow")):
        if wanted and importlib.util.find_spec(package) is None:
            raise CourseError(f"{setting} needs the package {package}, which is not installed: pip install 'course[trackers]'")


def open_trackers(config: Config, run: Path) -> list[Tracker]:
    """Begin, or continue, a run's record in each wanted service. The run's folder keeps its number there.

    Raises `CourseError` if a service refuses.
    """
    opened = []
    for setting, wanted, opener in (("log.wandb", config.log.wandb, open_wandb), ("log.mlflow", config.log.mlflow, open_mlflow)):
        try:
            opened += [opener(config, run)] if wanted else []
        except Exception as error:                   # a service has its own kinds
            raise CourseError(f"{setting} cannot begin ({type(error).__name__}: {error}): fix that, or leave the setting out"
                              ) from error
    return opened


def open_wandb(config: Config, run: Path) -> Tracker:
    """Weights & Biases: WANDB_PROJECT, WANDB_MODE=offline and other variables of it apply."""
    import wandb

    number = run / "wandb.id"
    opened = wandb.init(name=f"{config.preset}/{config.log.name}", dir=str(run), config=schema.as_plain(config), resume="allow",
                        id=number.read_text(encoding="utf-8") if number.is_file() else None)
    write(number, opened.id)
    return Tracker("log.wandb", lambda values, step: opened.log(dict(values), step=step), opened.finish)


def open_mlflow(config: Config, run: Path) -> Tracker:
    """MLflow: an address, or sqlite:///FILE (with the package mlflow); MLFLOW_EXPERIMENT_NAME applies."""
    import mlflow

    number = run / "mlflow.id"
    mlflow.set_tracking_uri(config.log.mlflow)
    known = number.read_text(encoding="utf-8") if number.is_file() else None
    opened = mlflow.start_run(run_id=known, run_name=f"{config.preset}/{config.log.name}")
    write(number, opened.info.run_id)
    if not known:
        mlflow.log_dict(schema.as_plain(config), "config.yaml")
    return Tracker("log.mlflow", lambda values, step: mlflow.log_metrics(dict(values), step=step), mlflow.end_run)


def write(path: Path, text: Any) -> None:
    """Write a text, whole or not at all."""
    with atomic(path) as temporary:
        temporary.write_text(str(text), encoding="utf-8")
