"""Which tokens end a text: noted with the data and in a run, read where a GPT writes, and written for others.

The documents of token files end with one token, `end` in their meta.json. A run notes it in a generation_config.json, in
Hugging Face's form: `eos_token_id`, a number or a list. A run that is converted notes the end tokens of the folder that it was
made of, and a folder that is made of a run has them again.
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
# special tokens that end a text or a turn by their name: GPT-2's, Llama 1 and 2's, Llama 3's, ChatML's, Gemma's
NAMES = (END, "</s>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<eos>", "<end_of_turn>")


def of_run(run: Path, settings: Config) -> list[int]:
    """The end tokens that a run notes, and those of its data, each once; none if neither says any."""
    data = of_data(Path(settings.data.path)) if settings.data.source == "files" else []
    return in_vocabulary([*read_note(run / NOTE), *data], settings.model)


def of_data(folder: Path) -> list[int]:
    """The token that closes each document of a folder of token files, if it says that."""
    return whole_numbers(read_json(folder / "meta.json").get("end"))


def of_hub(folder: Path, tokenizer: Tokenizer | None, model: Any) -> list[int]:
    """The end tokens of a Hugging Face folder: of its generation_config.json, or else its config.json, and of its tokenizer."""
    found = read_note(folder / NOTE) or read_note(folder / "config.json")
    for name in ("tokenizer_config.json", "special_tokens_map.json") if tokenizer else ():
        token = read_json(folder / name).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and tokenizer:
            found += whole_numbers(tokenizer.token_to_id(token))
    return in_vocabulary(found, model)


def of_tokenizer(tokenizer: Tokenizer) -> list[int]:
    """The special tokens of a tokenizer that end a text by their name."""
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    return [number for name in NAMES if name == END or name in special for number in whole_numbers(tokenizer.token_to_id(name))]


def write_note(folder: Path, ends: Iterable[int]) -> None:
    """Write down a run's end tokens, if there are any."""
    if text := as_text(ends):
        with atomic(folder / NOTE) as temporary:
            temporary.write_text(text, encoding="utf-8")


def as_text(ends: Iterable[int]) -> str:
    """What stands in a generation_config.json; "" if no end token is known."""
    found = as_value(ends)
    return "" if found is None else json.dumps({"eos_token_id": found}, indent=1) + "\n"


def as_value(ends: Iterable[int]) -> int | list[int] | None:
    """The end tokens as Hugging Face's files have them: nothing, a number, or a list."""
    some = list(ends)
    return some if len(some) > 1 else some[0] if some else None


def read_note(file: Path) -> list[int]:
    """The end tokens of a file of Hugging Face's form."""
    return whole_numbers(read_json(file).get("eos_token_id"))


def in_vocabulary(ends: Iterable[int], model: Any) -> list[int]:
    """Those that are tokens of a model, each once."""
    return [end for end in dict.fromkeys(ends) if 0 <= end < model.words]


def whole_numbers(found: Any) -> list[int]:
    """Whole numbers of a number or a list; what is something else is none."""
    return [number for number in (found if isinstance(found, list) else [found]) if type(number) is int]


def read_json(file: Path) -> dict[str, Any]:
    """The values of a JSON file; none of one that is not there, or damaged: a text then ends where the tokenizer says."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
