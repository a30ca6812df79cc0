"""`course data tokens`: tokenize a corpus that every machine has, the source code of Python's standard library.

Also the functions that all makers of token files share: choosing a document's split, and writing the metadata.
"""

import hashlib
import json
import platform
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from course.data.text import bpe, indexed_files
from course.data.weather.layout import SPLITS
from course.resilience.folder_lock import make_once
from course.utils.atomic_files import atomic, os_error_cure, read_text
from course.utils.errors import CourseError

# tests are repetitive, idlelib and turtledemo are programs, encodings are tables, and pydoc_data is text, not code
EXCLUDED = {"test", "tests", "idle_test", "idlelib", "turtledemo", "encodings", "pydoc_data", "site-packages", "dist-packages",
            "__pycache__"}
AT_ONCE = 1 << 20                                    # characters per batch, which the tokenizer spreads over the cores


@dataclass(frozen=True)
class PythonCorpus:
    """The settings of `course data tokens`."""

    path: str = "data/python"            # folder to fill
    vocab: int = 4096                    # tokens: enough for a small GPT on a laptop
    valid: float = 0.05                  # fraction of the files for validation ...
    test: float = 0.05                   # ... and for the final test


def make(config: PythonCorpus, say: Callable[[str], None] = print) -> None:
    """Train a tokenizer on the training files and write the tokens of all splits. The same Python gives the same bytes."""
    check_split_fractions(config.valid, config.test)
    path, request = Path(config.path), {"made by": "course data tokens", "python": platform.python_version(), **asdict(config)}
    del request["path"]                              # it does not affect the content
    if not make_once(path, lambda: is_made(path, request), lambda: write(config, request, say)):
        say(f"{path} is there already")


def write(config: PythonCorpus, request: dict[str, Any], say: Callable[[str], None]) -> None:
    """Train the tokenizer and write all files."""
    path = Path(config.path)
    texts = dict(library_files(Path(sysconfig.get_path("stdlib"))))
    splits: dict[str, list[str]] = {split: [] for split in SPLITS}
    for name, text in texts.items():
        splits[choose_split(name.encode(), config.valid, config.test)].append(text)
    say(f"{len(texts)} files of Python {request['python']}'s library, "
        f"{sum(map(len, texts.values())) / 1e6:.1f} million characters")
    tokenizer = bpe.train(iter(splits["train"]), config.vocab)
    end, vocab = bpe.end_token(tokenizer), bpe.size(tokenizer)
    counts = {}
    for split, found in splits.items():
        with indexed_files.document_writer(path / split, vocab) as writer:
            for some in text_batches(found):
                for tokens in bpe.encode(tokenizer, some, end):
                    writer.add(tokens)
        counts[split] = {"documents": len(found), "tokens": sum(writer.lengths), "bytes": sum(len(t.encode()) for t in found)}
    write_metadata(path, tokenizer.to_str(), {"vocab": vocab, "end": end, "splits": counts, "request": request})
    say(summary(path, counts))


def library_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of a Python library's files, sorted by name, without `EXCLUDED`, non-UTF-8 or machine-specific ones."""
    for file in sorted(folder.rglob("*.py"), key=lambda file: file.relative_to(folder).as_posix()):
        name = file.relative_to(folder)
        if EXCLUDED.isdisjoint(name.parts) and not name.name.startswith("_sysconfigdata"):
            try:
                text = file.read_bytes().decode("utf-8-sig")
            except UnicodeDecodeError:
                continue
            if text:
                yield name.as_posix(), text


def text_batches(texts: list[str]) -> Iterator[list[str]]:
    """Yield the texts in batches of about `AT_ONCE` characters."""
    some: list[str] = []
    for text in texts:
        some.append(text)
        if sum(map(len, some)) >= AT_ONCE:
            yield some
            some = []
    yield some


def check_split_fractions(valid: float, test: float) -> None:
    """Raise `CourseError` unless both fractions are at least 0 and leave some documents for training."""
    if not (valid >= 0 and test >= 0 and valid + test < 1):             # also refuses nan
        raise CourseError(f"valid={valid:g} and test={test:g} are parts of the documents: they are at least 0, and below 1 "
                          "together")


def choose_split(what: bytes, valid: float, test: float) -> str:
    """The split of a document, from a hash of its bytes: independent of all other documents; duplicates share a split."""
    place = int.from_bytes(hashlib.blake2b(what, digest_size=8).digest()) / 2**64        # uniform in [0, 1)
    return "valid" if place < valid else "test" if place < valid + test else "train"


def is_made(path: Path, request: dict[str, Any]) -> bool:
    """Whether the complete data set of this request exists. Raises `CourseError` if it is another request's, or damaged."""
    if not (meta := path / "meta.json").is_file():
        return False
    try:
        found = dict(json.loads(read_text(meta)).get("request", {}))
    except OSError as error:
        raise CourseError(f"{meta} cannot be read ({error.strerror}): {os_error_cure(error, 'run again')}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise CourseError(f"{meta} is damaged: give another path, or move that folder away") from error
    differ = [str(key) for key in {**found, **request} if found.get(key) != request.get(key)]
    if differ:
        raise CourseError(f"{path} holds a data set made with other settings ({', '.join(differ)}): give another path, "
                          "or move that folder away")
    return True


def write_metadata(path: Path, tokenizer: str, meta: dict[str, Any]) -> None:
    """Write tokenizer.json, then meta.json, which marks the data set as complete."""
    for name, text in (("tokenizer.json", tokenizer), ("meta.json", json.dumps(meta, indent=1) + "\n")):
        with atomic(path / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def summary(path: Path, counts: dict[str, dict[str, int]]) -> str:
    """One sentence with the tokens and documents of each split."""
    parts = [f"{split} {count['tokens']:,} tokens of {count['documents']:,} documents" for split, count in counts.items()]
    return f"wrote {path}: {', '.join(parts)}"
