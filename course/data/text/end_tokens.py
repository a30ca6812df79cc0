"""Which tokens end a text: stored with the data and in a run, used in generation, and exported.

Documents in token files end with one token, `end` in their meta.json. A run stores it in generation_config.json, in Hugging
Face's format: `eos_token_id`, a number or a list. Conversion keeps the end tokens, from a Hugging Face folder to a run and back.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from course.config import Config
from course.data.text.bpe import END
from course.utils.atomic_files import atomic

NOTE = "generation_config.json"
# names of special tokens that end a text or a turn: GPT-2's, Llama 1 and 2's, Llama 3's, ChatML's, Gemma's
NAMES = (END, "</s>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<eos>", "<end_of_turn>")


def of_run(run: Path, settings: Config) -> list[int]:
    """The end tokens stored in a run and in its data, without duplicates; empty if neither has any."""
    data = of_data(Path(settings.data.path)) if settings.data.source == "files" else []
    return in_vocabulary([*read_note(run / NOTE), *data], settings.model)


def of_data(folder: Path) -> list[int]:
    """The token that ends each document in a folder of token files; empty if meta.json names none."""
    return whole_numbers(read_json(folder / "meta.json").get("end"))


def of_hub(folder: Path, tokenizer: Tokenizer | None, model: Any) -> list[int]:
    """The end tokens of a Hugging Face folder: from generation_config.json, or else config.json, and from its tokenizer."""
    found = read_note(folder / NOTE) or read_note(folder / "config.json")
    for name in ("tokenizer_config.json", "special_tokens_map.json") if tokenizer else ():
        token = read_json(folder / name).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and tokenizer:
            found += whole_numbers(tokenizer.token_to_id(token))
    return in_vocabulary(found, model)


def of_tokenizer(tokenizer: Tokenizer) -> list[int]:
    """The special tokens of a tokenizer that end a text, judged by their names."""
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    return [number for name in NAMES if name == END or name in special for number in whole_numbers(tokenizer.token_to_id(name))]


def write_note(folder: Path, ends: Iterable[int]) -> None:
    """Write a run's end tokens to generation_config.json, if there are any."""
    if text := as_text(ends):
        with atomic(folder / NOTE) as temporary:
            temporary.write_text(text, encoding="utf-8")


def as_text(ends: Iterable[int]) -> str:
    """The content of generation_config.json; "" if no end token is known."""
    found = as_value(ends)
    return "" if found is None else json.dumps({"eos_token_id": found}, indent=1) + "\n"


def as_value(ends: Iterable[int]) -> int | list[int] | None:
    """The end tokens in Hugging Face's format: None, a number, or a list."""
    some = list(ends)
    return some if len(some) > 1 else some[0] if some else None


def read_note(file: Path) -> list[int]:
    """Read the end tokens from a file in Hugging Face's format."""
    return whole_numbers(read_json(file).get("eos_token_id"))


def in_vocabulary(ends: Iterable[int], model: Any) -> list[int]:
    """The end tokens within a model's vocabulary, without duplicates."""
    return [end for end in dict.fromkeys(ends) if 0 <= end < model.words]


def whole_numbers(found: Any) -> list[int]:
    """The integers in a number or a list; anything else is dropped."""
    return [number for number in (found if isinstance(found, list) else [found]) if type(number) is int]


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file; {} if it is missing or damaged: then the tokenizer alone determines the end tokens."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
