"""`course sample RUN --prompt "def "`: what a trained GPT writes after a prompt."""

from collections.abc import Callable
from pathlib import Path

import torch

from course.data import bpe
from course.errors import CourseError
from course.evaluate import device_of, load_model, read_config
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
    tokenizer = bpe.load(Path(settings.data.path) / "tokenizer.json")
    model, step = load_model(run, settings, device_of(settings))
    known = tokenizer.encode(prompt).ids
    tokens = torch.tensor([known] * samples, device=next(model.parameters()).device).view(samples, len(known))
    written = generate(model, tokens, count, temperature, top_k, seed)
    texts = [tokenizer.decode(row) for row in written.tolist()]
    for number, text in enumerate(texts, 1):
        say(f"--- {run}, step {step}, sample {number} of {samples}\n{text}")
    return texts
