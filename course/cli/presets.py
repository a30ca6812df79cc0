"""`course presets`: print each preset's model size, the memory that one GPU needs for it, its data, its purpose."""

import re

import torch

from course import config as configuration
from course.config import Config
from course.config.schema import as_plain, as_text, changed_leaves
from course.planner import flops, free_memory, peak_memory
from course.planner.search_space import changed

HEAD = ("preset", "parameters", "active", "GB", "data", "what it is")
LAPTOP = 2e9                                        # bytes: a laptop trains what needs fewer


def main(name: str = "") -> None:
    """Print a line for each preset, laptop-sized ones first, and what the columns mean; or one preset's settings."""
    if name:
        print(settings_of(name))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = [(preset, alone(configuration.load(preset))) for preset in configuration.presets()]
    needs = {preset: peak_memory.predict(config).total for preset, config in found}
    found.sort(key=lambda one: needs[one[0]] >= LAPTOP)
    rows = [HEAD, *(row(preset, config, needs[preset], free_memory.fits(config, free_memory.free(device), device))
                    for preset, config in found)]
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for preset, size, active, bytes_needed, data, what in rows:
        print(f"{preset:{wide[0]}}  {size:>{wide[1]}}  {active:>{wide[2]}}  {bytes_needed:>{wide[3]}}  {data:{wide[4]}}  {what}")
    print(f"\nGB: what training needs on one GPU with the preset's own settings, as `course plan` predicts it; * fits\n"
          f"{free_memory.where(device)}. A smaller train.micro_batch and train.recompute=full need less.\n"
          "Active: the parameters that a token uses.\n"
          "Data: random numbers, or a folder that has to be made first (data/README.md); data.path=FOLDER names yours.\n"
          "`course presets NAME` shows the settings of one, `course settings` all that there are.")


def row(preset: str, config: Config, needs: float, fits: bool) -> tuple[str, ...]:
    """The line of a preset; needs: bytes on one GPU."""
    data = "random" if config.data.source == "mock" else config.data.path
    return preset, *sizes(config), f"{needs / 1e9:.1f}{'*' if fits else ' '}", data, purpose(preset)


def settings_of(preset: str) -> str:
    """A preset's purpose, and its settings that are not the defaults, as the user types them."""
    config = configuration.load(preset)
    plain, default = as_plain(config), as_plain(Config())
    default["model"] = as_plain(type(config.model)())
    lines = [f"{key}={as_text(value)}" for key, _, value in changed_leaves(default, plain) if key != "preset"]
    return "\n".join([comment_of(preset), "", *lines, "", "All others are as `course settings` has them.",
                      f"next: course train {preset}"])


def alone(config: Config) -> Config:
    """A preset on one GPU."""
    return changed(config, {"parallel.dp": 1, "parallel.pp": 1, "parallel.cp": 1, "parallel.tp": 1, "parallel.ep": 1})


def sizes(config: Config) -> tuple[str, str]:
    """A model's parameters, and those that a token uses, in words: 46.7B, 12.9B."""
    size = sum(next(peak_memory.ranks(alone(config))).weights)
    return count(size), count(size - flops.idle_parameters(config.model))


def count(parameters: int) -> str:
    """Parameters with the field's letters: 124M, 6.66B."""
    size, unit = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    return f"{parameters / size:.3g}{unit}"


def purpose(preset: str) -> str:
    """The first words of a preset's purpose, up to the first stop, comma or parenthesis."""
    return re.split(r"[.,;:](?:\s|$)| \(", comment_of(preset), maxsplit=1)[0]


def comment_of(preset: str) -> str:
    """The comment at the top of a preset's file."""
    comment = []
    for line in configuration.preset_path(preset).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line[1:].strip())
    return " ".join(comment)
