"""The `course` command: a thin door to the functions of the library. `course COMMAND --help` explains each."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from course.errors import CourseError

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings, such as train.steps=100")]

app = typer.Typer(help="Deep Learning at Scale: from one GPU to model parallelism.", no_args_is_help=True,
                  pretty_exceptions_enable=False, add_completion=False)
data = typer.Typer(help="Make or convert data sets.", no_args_is_help=True)
app.add_typer(data, name="data")


@app.command()
def train(preset: Annotated[str, typer.Argument(help="a preset, or the path of a YAML file")],
          settings: Overrides = None) -> None:
    """Train a model, or go on where the run of this name stopped. Also under torchrun and srun."""
    from course import config
    from course import train as training

    training.main(config.load(preset, settings or []))


@app.command()
def evaluate(run: Annotated[Path, typer.Argument(help="the folder of a run, such as runs/vit-demo/default")],
             split: Annotated[str, typer.Option(help="train, valid or test years")] = "test",
             samples: Annotated[int, typer.Option(min=1, help="how many forecasts to average over")] = 64,
             animate: Annotated[bool, typer.Option(help="also draw forecast.gif, truth beside forecast")] = False) -> None:
    """Forecast errors for five days against persistence and climatology, with pictures."""
    from course import evaluate as evaluation
    from course.data.layout import SPLITS

    if split not in SPLITS:
        raise CourseError(f"--split {split}: it is one of {', '.join(SPLITS)}")
    evaluation.main(run, split, samples, animate)


@app.command()
def presets() -> None:
    """The presets that `course train` knows."""
    from course import config

    for name in config.presets():
        print(name)


@app.command()
def doctor(need: Annotated[str, typer.Option(help="fail if one of these is missing, such as fp8,dali")] = "") -> None:
    """What this machine has: versions, GPUs, precisions, and the cure for what does not work."""
    from course import doctor as examination

    raise typer.Exit(examination.main(need))


@data.command()
def weather(settings: Overrides = None) -> None:
    """Simulate an atmosphere and write it in the layout of the ERA5 course data."""
    from course import config
    from course.data import weather as maker

    maker.make(config.build(maker.Weather, config.parse(settings or []), "course data weather"))


@data.command()
def era5(source: Annotated[str, typer.Argument(help="a .nc file, a glob or folder of them, or a .zarr store")],
         settings: Overrides = None) -> None:
    """Convert ERA5 in NetCDF or Zarr (names of WeatherBench2 or CDS)."""
    from course import config
    from course.data import era5 as converter

    values = {**config.parse(settings or []), "source": source}
    converter.convert(config.build(converter.Era5, values, "course data era5"))


@data.command()
def stats(path: Annotated[Path, typer.Argument(help="a folder laid out as data/README.md says")]) -> None:
    """Compute the statistics of the training years again."""
    from course.data import layout

    layout.write_statistics(path, layout.find_years(path, "train"))
    print(f"wrote {path}/stats")


def main() -> None:
    """Run the command; a `CourseError` becomes one sentence and exit status 1."""
    try:
        app()
    except CourseError as error:
        sys.exit(f"course: {last_words(error)}")


def last_words(error: CourseError) -> str:
    """The sentence itself: a loader's worker process wraps it in its traceback."""
    text = str(error).strip()
    return text.splitlines()[-1].removeprefix("course.errors.CourseError: ") if "Traceback" in text else text


if __name__ == "__main__":
    main()
