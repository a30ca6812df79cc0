"""`course sample RUN --prompt "def "`: what a trained GPT writes after a prompt."""

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer

from course.errors import CourseError
from course.evaluate import load_model, read_config
from course.generate import generate


def main(run: Path, prompt: str, count: int, temperature: float, top_k: int, seed: int, samples: int,
         say: Callable[[str], None] = print) -> list[str]:
    """Print `samples` continuations of the prompt by the newest checkpoint of a run, and return them.

    Raises `CourseError` where the run is no GPT's, its tokenizer is missing, or the text is longer than the model's context.
    """
    settings = read_config(run)
    if settings.model.kind != "gpt":
        raise CourseError(f"{run} is a run of a {settings.model.kind}, which writes no text: give one of a GPT, such as "
                          "runs/gpt-python/default")
    tokenizer = read_tokenizer(Path(settings.data.path))
    device = torch.device("cuda" if torch.cuda.is_available() and settings.train.device != "cpu" else "cpu")
    model, step = load_model(run, settings, device)
    known = tokenizer.encode(prompt).ids
    tokens = torch.tensor([known] * samples, device=device).view(samples, len(known))
    written = generate(model, tokens, count, temperature, top_k, seed)
    texts = [tokenizer.decode(row) for row in written.tolist()]
    for number, text in enumerate(texts, 1):
        say(f"--- {run}, step {step}, sample {number} of {samples}\n{text}")
    return texts


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that made a folder of token files."""
    file = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:                       # the library raises no narrower one
        raise CourseError(f"{file} cannot be read ({' '.join(str(error).split())[:160]}): a prompt needs the tokenizer of the "
                          "run's data; restore it there, or set data.path in the run's config.yaml to where it is") from error
