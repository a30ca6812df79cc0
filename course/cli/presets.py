"""What `course presets` says of each preset: its model's size, the memory that one GPU needs for it, its data, its purpose."""

import re

from course import config as configuration
from course.config import Config
from course.planner import memory
from course.planner.search_space import changed

HEAD = ("preset", "parameters", "GB", "data", "what it is")


def main() -> None:
    """Print a line for each preset, and what the columns mean."""
    rows = [HEAD, *(row(preset) for preset in configuration.presets())]
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, size, needs, data, what in rows:
        print(f"{name:{wide[0]}}  {size:>{wide[1]}}  {needs:>{wide[2]}}  {data:{wide[3]}}  {what}")
    print("\nGB: what training needs on one GPU with the preset's own settings, as `course plan` predicts it. A smaller\n"
          "train.micro_batch and train.recompute=full need less.\n"
          "Data: random numbers, or a folder that has to be made first (data/README.md); data.path=FOLDER names yours.")


def row(preset: str) -> tuple[str, ...]:
    """The line of a preset."""
    config = configuration.load(preset)
    own = alone(config)
    data = "random" if config.data.source == "mock" else config.data.path
    size = sum(next(memory.ranks(own)).weights)
    return preset, count(size), f"{memory.predict(own).total / 1e9:.1f}", data, purpose(preset)


def alone(config: Config) -> Config:
    """A preset on one GPU."""
    return changed(config, {"parallel.dp": 1, "parallel.pp": 1, "parallel.cp": 1, "parallel.tp": 1})


def count(parameters: int) -> str:
    """Parameters with the field's letters: 124M, 6.66B."""
    size, unit = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    return f"{parameters / size:.3g}{unit}"


def purpose(preset: str) -> str:
    """The first words of the comment that its file begins with, up to the first stop, comma or parenthesis."""
    comment = []
    for line in configuration.preset_path(preset).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line[1:].strip())
    return re.split(r"[.,;:](?:\s|$)| \(", " ".join(comment), maxsplit=1)[0]
