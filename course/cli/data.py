"""`course data`: the command line of the functions in `course/data` that make data sets."""

from pathlib import Path
from typing import Annotated

import typer

from course.cli.options import KEYS, numbers
from course.utils.errors import CourseError

OF_WEATHER = ("path=FOLDER, grid=[LATITUDES,LONGITUDES], train=, valid= and test=NUMBER of yearly files, times=ENTRIES in each, "
              "six hours apart, seed=, truncation=WAVES (0: what the grid can show), device=cpu or cuda")
OF_ERA5 = ("path=FOLDER, grid=[LATITUDES,LONGITUDES], train=, valid= and test=YEARS such as 1979-2015, "
           "chunk=TIMES in memory at once")
OF_TOKENS = "path=FOLDER, vocab=TOKENS, valid= and test=PART of the files, such as 0.05"
OF_JSONL = ("files, and then: path=FOLDER, text=KEY of a line that holds the document, tokenizer=TOKENIZER.JSON or "
            "vocabulary=VOCAB.JSON merges=MERGES.TXT (GPT-2's), else vocab=TOKENS learned from sample=MEGABYTES of the input, "
            "end=TOKEN that closes a document, valid= and test=PART of the documents (0: none), jobs=PROCESSES")
OverridesOfWeather = Annotated[list[str] | None, typer.Argument(metavar=KEYS, help=OF_WEATHER)]
OverridesOfEra5 = Annotated[list[str] | None, typer.Argument(metavar=KEYS, help=OF_ERA5)]
OverridesOfTokens = Annotated[list[str] | None, typer.Argument(metavar=KEYS, help=OF_TOKENS)]
FilesAndOverrides = Annotated[list[str], typer.Argument(metavar=f"FILE... {KEYS}", help=OF_JSONL)]

data = typer.Typer(help="Make or convert data sets.", no_args_is_help=True)


@data.command()
def weather(settings: OverridesOfWeather = None) -> None:
    """Simulate an atmosphere and write it in the layout of the ERA5 course data."""
    from course.config import schema
    from course.data.weather import simulation as maker

    maker.make(schema.build(maker.Weather, schema.parse(settings or []), "course data weather"))


@data.command()
def era5(source: Annotated[str, typer.Argument(help="a .nc file, a glob or folder of them, or a .zarr store")],
         settings: OverridesOfEra5 = None) -> None:
    """Convert ERA5 in NetCDF or Zarr (names of WeatherBench2 or CDS)."""
    from course.config import schema
    from course.data.weather import era5 as converter

    values = {**schema.parse(settings or []), "source": source}
    converter.convert(schema.build(converter.Era5, values, "course data era5"))


@data.command()
def tokens(settings: OverridesOfTokens = None) -> None:
    """Make token files from the source of Python's standard library, in seconds."""
    from course.config import schema
    from course.data.text import python_corpus as maker

    maker.make(schema.build(maker.PythonCorpus, schema.parse(settings or []), "course data tokens"))


@data.command()
def jsonl(arguments: FilesAndOverrides) -> None:
    """Make token files from text such as OpenWebText: JSON lines or archives of texts, plain, .gz, .xz or .zst.

    It uses all cores. After an interruption the same command continues, and keeps finished parts of 8 MB of input.
    It counts bad lines and leaves them out.
    """
    from course.config import schema
    from course.data.text import jsonl as maker

    files = [word for word in arguments if "=" not in word or Path(word).exists()]
    values = {**schema.parse(word for word in arguments if word not in files), "files": files}
    maker.make(schema.build(maker.Jsonl, values, "course data jsonl"))


@data.command()
def stats(path: Annotated[Path, typer.Argument(help="a folder with the layout in data/README.md")]) -> None:
    """Recompute the statistics of the training years, and search all years for entries that were never written."""
    from course.data.weather import layout

    layout.remake_statistics(path)
    print(f"wrote {path}/stats")


@data.command("numpy")
def numpy_files(path: Annotated[Path, typer.Argument(help="a folder with the layout in data/README.md")]) -> None:
    """Also write each state to a .npy file, for data.loader=dali_numpy."""
    from course.data.loaders import numpy_files as converter

    converter.convert(path)


@data.command()
def latents(folder: Annotated[Path, typer.Argument(help="a folder of class folders: 0000, 0001 ... or any names, numbered in "
                                                          "order; or of two folders, features and labels")],
            out: Annotated[Path, typer.Option(help="the data folder to make or to continue")],
            scale: Annotated[float | None, typer.Option(help="factor for the latents; 1 if they are already scaled",
                                                        show_default="the VAE's, 0.18215")] = None,
            valid: Annotated[int, typer.Option(min=0, help="one in this many samples is for validation; 0: none")] = 50,
            samples: Annotated[int, typer.Option(min=1, help="number of samples in a shard")] = 4096,
            vae: Annotated[str, typer.Option(help="for a FOLDER of pictures: name or folder of the VAE (diffusers)")] = "",
            pixels: Annotated[int, typer.Option(min=8, help="width and height of the VAE's input")] = 256) -> None:
    """Pack latents (.npy, .pt), or pictures encoded by a VAE, for a DiT. After an interruption the same command continues."""
    from course.data.latents import packing

    packing.pack(folder, out, scale, valid, samples, vae, pixels)


@data.command()
def digits(out: Annotated[Path, typer.Option(help="the data folder to make")] = Path("data/digits"),
           latent: Annotated[str, typer.Option(help="channels, height, width; 4,32,32 for ImageNet's models")] = "1,8,8") -> None:
    """Make a DiT's data set from scikit-learn's 1797 handwritten digits. A laptop learns it in minutes."""
    from course.data.latents.digits import make_digits

    shape = numbers(latent, "--latent")
    if len(shape) != 3:
        raise CourseError(f"--latent {latent} is wrong: give channels, height and width, such as 4,32,32")
    make_digits(out, (shape[0], shape[1], shape[2]))
