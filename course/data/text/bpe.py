"""Byte-level byte-pair encoding (BPE), as in GPT-2: text to tokens and back.

Radford et al. 2019, section 2.2; Sennrich et al. 2016, arXiv:1508.07909. The vocabulary starts with the 256 bytes, which can
write any text. Training repeatedly merges the most frequent pair of adjacent tokens into a new token, until the vocabulary has
its size. The `tokenizers` package does the work.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from course.utils.atomic_files import read_text
from course.utils.errors import CourseError

END = "<|endoftext|>"                                # ends each document
OTHER = "give another tokenizer.json, one that knows every text, such as those of bytes do"


def train(texts: Iterator[str], vocab: int) -> Tokenizer:
    """Train a tokenizer of at most `vocab` tokens on the texts; `END` is token 0."""
    if vocab < 257:
        raise CourseError(f"vocab={vocab} is too small: 256 bytes and {END} are 257 tokens")
    tokenizer = byte_level(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet,
                                                             show_progress=False))
    return tokenizer


@contextmanager
def tokenizer_errors(fails: str, cure: str) -> Iterator[None]:
    """Turn any error of the `tokenizers` package into a `CourseError`: what `fails`, the reason and the cure.

    The package raises plain `Exception`s. When its Rust code panics, as for some damaged files, it raises a `BaseException`.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise                                    # such as Ctrl-C
        raise CourseError(f"{fails} ({error}): {cure}") from error


def gpt2(vocab: Path, merges: Path) -> Tokenizer:
    """Build GPT-2's tokenizer from its two files, vocab.json and merges.txt."""
    with tokenizer_errors(f"{vocab} and {merges} cannot be read as GPT-2's vocabulary and merges",
                 "give vocab.json and merges.txt of one model"):
        lines = [line for line in read_text(merges).replace("\r", "").split("\n") if line and not line.startswith("#version")]
        pairs = [(left, right) for left, right in (line.split(" ") for line in lines)]
        tokenizer = byte_level(models.BPE(json.loads(read_text(vocab)), pairs))
    if tokenizer.token_to_id(END) is not None:
        tokenizer.add_special_tokens([END])          # an existing token keeps its id
    return tokenizer


def byte_level(model: models.BPE) -> Tokenizer:
    """A byte-level tokenizer that splits text into words as GPT-2 does."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def load(path: Path) -> Tokenizer:
    """Load a tokenizer.json, with the truncation and padding that some files ask for switched off."""
    with tokenizer_errors(f"{path} cannot be read as a tokenizer",
                 "give a tokenizer.json of the tokenizers package, such as Hugging Face models have"):
        tokenizer = Tokenizer.from_str(read_text(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_token(tokenizer: Tokenizer, end: str = END) -> int:
    """The id of the token that ends a document. Raises `CourseError` if the tokenizer lacks it."""
    if (number := tokenizer.token_to_id(end)) is None:
        raise CourseError(f"the tokenizer has no token {end}, which closes each document: set end=TOKEN to one that it has")
    return int(number)


def size(tokenizer: Tokenizer) -> int:
    """The vocabulary size that a model needs: the largest token id plus one."""
    numbers = tokenizer.get_vocab(with_added_tokens=True).values()
    if not numbers:
        raise CourseError("the tokenizer has no tokens at all: give a tokenizer.json with tokens")
    return 1 + max(numbers)


def encode(tokenizer: Tokenizer, texts: Sequence[str], end: int) -> list[np.ndarray]:
    """Encode each text and append `end`, (length,) int64. Text that looks like a special token is encoded as text."""
    tokenizer.encode_special_tokens = True
    with tokenizer_errors("the tokenizer cannot turn a text into tokens", OTHER):
        return [np.array([*found.ids, end]) for found in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Encode a prompt, including special tokens in it or added by the tokenizer. Raises `CourseError` if that fails."""
    with tokenizer_errors("the tokenizer cannot turn the prompt into tokens", OTHER):
        return list(tokenizer.encode(prompt).ids)


def text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Decode tokens to text, without special tokens. Raises `CourseError` if that fails."""
    with tokenizer_errors("the tokenizer cannot turn tokens into text", OTHER):
        return str(tokenizer.decode(tokens))
