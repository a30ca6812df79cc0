"""`course sample RUN --prompt "def "`: let a trained GPT continue a prompt."""

from collections.abc import Callable, Container
from pathlib import Path

import torch

from course.config import Config
from course.data.text import bpe, end_tokens
from course.inference.forecast_scores import device_of, load_model, read_config
from course.inference.kv_cache_decoding import generate
from course.models import GPT, GPTConfig
from course.utils.errors import CourseError


def sample_run(run: Path, prompt: str, count: int, temperature: float, top_k: int, seed: int, samples: int,
         say: Callable[[str], None] = print, tokenizer: Path | None = None) -> list[str]:
    """Print `samples` continuations of the prompt by a run's newest checkpoint, and return them.

    tokenizer: a tokenizer.json; None: the run's own, else that of its data.

    Raises `CourseError` if the run is not a GPT's, its tokenizer is missing, or the text exceeds the model's context.
    """
    settings = read_config(run)
    if not isinstance(settings.model, GPTConfig):
        raise CourseError(f"{run} is a run of a {settings.model.kind}, which writes no text: give the run of a GPT, such as "
                          "runs/gpt-python/default")
    words = bpe.load(find_tokenizer(run, settings, tokenizer))
    last = set(end_tokens.of_run(run, settings) + end_tokens.of_tokenizer(words))
    model, step = load_model(run, settings, device_of(settings))
    if not isinstance(model, GPT):
        raise CourseError(f"{run} has your own model, {type(model).__name__}, which writes no text: derive it from "
                          "course.models.GPT, whose blocks keep keys and values")
    known = bpe.ids(words, prompt)
    if max(known, default=0) >= settings.model.words:
        raise CourseError(f"the prompt has token {max(known)}, and the model knows {settings.model.words}: the tokenizer is not "
                          "its own; give that with --tokenizer FILE")
    tokens = torch.tensor([known] * samples, device=next(model.parameters()).device).view(samples, len(known))
    written = generate(model, tokens, count, temperature, top_k, seed, True, last)
    texts = [bpe.text(words, until_end_token(row, len(known), last)) for row in written.tolist()]
    for number, text in enumerate(texts, 1):
        say(f"--- {run}, step {step}, sample {number} of {samples}\n{text}")
    return texts


def until_end_token(tokens: list[int], start: int, last: Container[int]) -> list[int]:
    """The tokens up to the first end token from index `start` on: after it another text begins."""
    return tokens[:next((at for at in range(start, len(tokens)) if tokens[at] in last), len(tokens))]


def tokenizer_files(run: Path, settings: Config) -> list[Path]:
    """Where a run's tokenizer may be; the first that exists counts. A converted run has it, for others their data has it."""
    return [run / "tokenizer.json", Path(settings.data.path) / "tokenizer.json"]


def find_tokenizer(run: Path, settings: Config, given: Path | None) -> Path:
    """The tokenizer file of a run. Raises `CourseError` if there is none."""
    if given and not given.is_file():
        raise CourseError(f"there is no {given}: give a tokenizer.json with --tokenizer FILE")
    for file in [given] if given else tokenizer_files(run, settings):
        if file.is_file():
            return file
    raise CourseError(f"{run} has no tokenizer: neither {' nor '.join(map(str, tokenizer_files(run, settings)))} is there; give "
                      "the tokenizer.json of the model's tokens with --tokenizer FILE")
