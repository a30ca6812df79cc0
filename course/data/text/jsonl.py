"""`course data jsonl`: convert text files, such as OpenWebText, to token files.

One process reads and decompresses (`documents`); the others parse and encode. Their results are written in input order, so the
output does not depend on the number of processes. Only a few chunks are in flight. Finished parts are kept in PATH/parts, one
folder per `PART` bytes of an input file, until all are joined: a killed run resumes there.
"""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from course.data.text import bpe, documents, indexed_files
from course.data.text.indexed_files import Documents
from course.data.text.python_corpus import check_split_fractions, choose_split, is_made, summary, write_metadata
from course.data.weather.layout import SPLITS
from course.resilience.folder_lock import make_once
from course.utils.atomic_files import atomic, remove, sha256
from course.utils.errors import CourseError
from course.utils.machine import cores, short_sockets

CHUNK = 1 << 20                                      # bytes that a process encodes at a time
PART = 8 << 20                                       # bytes from the reader in a part: a killed run loses seconds of work
VERSION = 1                                          # of everything that determines the output: parts of two versions do not mix
SHOWN = 5                                            # how many bad documents are named
VOCAB = 32768                                        # default size of a learned vocabulary


@dataclass(frozen=True)
class Jsonl:
    """The settings of `course data jsonl`."""

    files: tuple[str, ...] = ()          # .jsonl or .tar files, plain, .gz, .xz or .zst
    path: str = "data/text"              # folder to fill
    text: str = "text"                   # the JSON key of the document's text
    tokenizer: str = ""                  # a tokenizer.json ...
    vocabulary: str = ""                 # ... or GPT-2's vocab.json ...
    merges: str = ""                     # ... and merges.txt; with none of these, one is learned from the input
    end: str = bpe.END                   # the token that ends a document
    vocab: int = 0                       # size of a learned vocabulary; 0: 32768
    sample: int = 64                     # megabytes of text to learn it from, in equal shares from all files
    valid: float = 0.005                 # fraction of the documents for validation ...
    test: float = 0.005                  # ... and for the final test
    jobs: int = 0                        # processes that encode; 0: one per core, 1: only this one


class Chunk(NamedTuple):
    """Some items of an input file."""

    file: int                                        # its number in the request
    part: int
    items: list[documents.Item]


class Encoded(NamedTuple):
    """The result of encoding a chunk."""

    file: int
    part: int
    tokens: dict[str, list[np.ndarray]]              # by split, one array per document
    sizes: dict[str, int]                            # bytes of text by split
    bad: list[str]                                   # the first few: where and why
    failed: int                                      # how many were bad


def make(config: Jsonl, say: Callable[[str], None] = print) -> None:
    """Write the token files of `config`, or resume a killed run. Raises `CourseError` for a bad request or input."""
    files = check(config)
    config = replace(config, vocab=config.vocab or VOCAB)
    path = Path(config.path)
    request = {"made by": "course data jsonl", "version": VERSION, **describe(config, files)}
    try:
        made = make_once(path, lambda: is_made(path, request), lambda: write(config, files, request, say))
    except KeyboardInterrupt:
        say("interrupted; the same command goes on where it stopped")
        raise
    if not made:
        say(f"{path} is there already")
        remove(path / "parts")


def write(config: Jsonl, files: list[Path], request: dict[str, Any], say: Callable[[str], None]) -> None:
    """Encode the missing parts, and join all parts into the token files."""
    began, path, parts = time.monotonic(), Path(config.path), Path(config.path) / "parts"
    begin_parts(parts, {**request, "part": PART})
    tokenizer = choose_tokenizer(config, files, parts / "tokenizer.json", say)
    end = bpe.end_token(tokenizer, config.end)
    vocab = bpe.size(tokenizer)
    encode_files(config, files, parts, vocab)
    counts, bad, failed = join(path, parts, vocab)
    documents = sum(count["documents"] for count in counts.values())
    if failed:
        say(f"{failed:,} of {failed + documents:,} documents were bad and are left out: {'; '.join(bad)}"
            f"{' ...' if failed > len(bad) else ''}")
    write_metadata(path, tokenizer.to_str(), {"vocab": vocab, "end": end, "splits": counts, "bad": failed, "request": request})
    remove(parts)
    say(f"{summary(path, counts)}, in {time.monotonic() - began:.0f} s")


def check(config: Jsonl) -> list[Path]:
    """Validate the request and return the input files. Raises `CourseError` if it makes no sense."""
    files = [Path(file).expanduser() for file in config.files]
    if not files:
        raise CourseError("no files are named: give .jsonl files or archives of text, plain, .gz, .xz or .zst")
    for file in files:
        if file.is_dir():
            raise CourseError(f"{file} is a folder: give files (a shell expands folder/*)")
        if not file.is_file():
            raise CourseError(f"the input file {file} does not exist: check its name and folder")
    for key, name in (("tokenizer", config.tokenizer), ("vocabulary", config.vocabulary), ("merges", config.merges)):
        if name and not Path(name).is_file():
            raise CourseError(f"{key}={name} {'is a folder, not a' if Path(name).is_dir() else 'does not exist: give a'} file")
    if len({file.resolve() for file in files}) < len(files):
        raise CourseError("a file is named twice: its documents would count double; name each once")
    if bool(config.vocabulary) != bool(config.merges) or (config.tokenizer and config.merges):
        raise CourseError("give tokenizer=tokenizer.json, or vocabulary=vocab.json with merges=merges.txt, or neither")
    if config.vocab and (config.tokenizer or config.vocabulary):
        raise CourseError(f"vocab={config.vocab} sets the size of a vocabulary to learn, but you give one: leave out vocab, or "
                          "tokenizer, vocabulary and merges")
    if config.jobs < 0 or config.sample < 1:
        raise CourseError(f"jobs={config.jobs} and sample={config.sample}: jobs is at least 0, sample at least 1 (megabyte)")
    check_split_fractions(config.valid, config.test)
    return files


def describe(config: Jsonl, files: list[Path]) -> dict[str, Any]:
    """Everything that determines the output, as JSON values."""
    of_data = {key: value for key, value in asdict(config).items() if key not in ("path", "jobs")}
    given = {key: sha256(Path(of_data[key])) for key in ("tokenizer", "vocabulary", "merges") if of_data[key]}
    return of_data | given | {"files": [[file.name, file.stat().st_size] for file in files]}


def begin_parts(parts: Path, request: dict[str, Any]) -> None:
    """Record the request of the parts. Raises `CourseError` if there are finished parts of another request."""
    note = parts / "request.json"
    found = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else {}
    differ = [key for key in {**found, **request} if found.get(key) != request.get(key)]
    if not differ:
        return
    if found and any(sum(counts["bytes"].values()) for counts in finished(parts).values()):
        raise CourseError(f"{parts} holds what was finished with other settings ({', '.join(differ)}): "
                          "run again with the old ones, give another path, or move that folder away")
    remove(parts)
    write_json(note, request)


def finished(parts: Path) -> dict[Path, dict[str, Any]]:
    """The finished parts in order: folder -> counts. Names are sorted as numbers: beyond 99,999 they have more digits."""
    folders = sorted(parts.glob("[0-9]*/[0-9]*"), key=lambda folder: (int(folder.parent.name), int(folder.name)))
    return {folder: json.loads((folder / "counts.json").read_text(encoding="utf-8")) for folder in folders}


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(values), encoding="utf-8")


# ---- the tokenizer ----

def choose_tokenizer(config: Jsonl, files: list[Path], kept: Path, say: Callable[[str], None]) -> Tokenizer:
    """The requested tokenizer, or one learned from a sample. It is stored with the parts, so a resumed run uses the same one."""
    if not kept.is_file():
        if config.tokenizer:
            tokenizer = bpe.load(Path(config.tokenizer))
        elif config.vocabulary:
            tokenizer = bpe.gpt2(Path(config.vocabulary), Path(config.merges))
        else:
            say(f"learning a vocabulary of {config.vocab:,} tokens from up to {config.sample} MB of text")
            tokenizer = bpe.train(sample(config, files), config.vocab)
        bpe.end_token(tokenizer, config.end)
        with atomic(kept) as temporary:
            temporary.write_text(tokenizer.to_str(), encoding="utf-8")
        tokenizer_of.cache_clear()                   # it may hold another run's tokenizer
    return bpe.load(kept)


def sample(config: Jsonl, files: list[Path]) -> Iterator[str]:
    """Yield each file's first training documents, the same number of bytes per file. Raises `CourseError` if there are none."""
    some = good = False                              # whether a training document exists; a readable one
    bad: list[str] = []
    for file in files:
        left = config.sample * 1_000_000 // len(files)
        for found in (text for item in documents.items(file) for text in documents.read(item, config.text)):
            good = good or not found.bad
            if found.bad:
                bad += [f"{file}:{found.where} ({found.bad})"][:SHOWN - len(bad)]
            elif choose_split(found.data, config.valid, config.test) == "train":
                some, left = True, left - len(found.data)
                yield found.text
            if left <= 0:
                break
    if good and not some:
        raise CourseError(f"no document is left for training with valid={config.valid} and test={config.test}: choose smaller "
                          "ones")
    if not some:
        raise no_documents_error(bad)


def no_documents_error(bad: list[str]) -> CourseError:
    """The error for input without training documents."""
    why = f"; what is there is bad: {'; '.join(bad)}" if bad else ""
    return CourseError(f"the files hold no documents to train on{why}; give .jsonl files, in UTF-8 and with a document on each "
                       "line, or archives of text, and text=KEY if their key is not 'text'")


# ---- the work ----

def encode_files(config: Jsonl, files: list[Path], parts: Path, vocab: int) -> None:
    """Write the missing parts of all files."""
    begun = [begin_file(parts / f"{number:05d}", file) for number, file in enumerate(files)]
    todo = [number for number, done in enumerate(begun) if done is not None]
    work = partial(encode, str(parts / "tokenizer.json"), indexed_files.smallest_dtype(vocab), config)
    with tqdm(total=sum(files[number].stat().st_size for number in todo), unit="B", unit_scale=True) as bar:
        chunks = (chunk for number in todo for chunk in read_chunks(files[number], number, begun[number] or set(), bar))
        with closing(map_in_order(work, chunks, config.jobs)) as found:     # its processes end first, even on errors
            for number, of_file in groupby(found, lambda encoded: encoded.file):
                for part, of_part in groupby(of_file, lambda encoded: encoded.part):
                    write_part(parts / f"{number:05d}" / f"{part:05d}", of_part, vocab)
                write_json(parts / f"{number:05d}" / "whole.json", {})


def begin_file(folder: Path, file: Path) -> set[int] | None:
    """The finished parts of an input file; None if all are. The parts of a file that has changed are removed."""
    stat = file.stat()
    stamp = {"size": stat.st_size, "changed": stat.st_mtime_ns}
    note = folder / "file.json"
    if not note.is_file() or json.loads(note.read_text(encoding="utf-8")) != stamp:
        remove(folder)
        write_json(note, stamp)
    if (folder / "whole.json").is_file():
        return None
    return {int(part.name) for part in folder.glob("[0-9]*")}


def read_chunks(file: Path, number: int, done: set[int], bar: Any) -> Iterator[Chunk]:
    """Yield the chunks of a file, except those of finished parts. The last may be empty: every file has at least one part."""
    part, size, total = 0, 0, 0
    some: list[documents.Item] = []
    for item in documents.items(file, bar.update):
        some.append(item)
        size += len(item.raw)
        if size >= CHUNK or len(some) >= 10_000:
            total += size
            if part not in done:
                yield Chunk(number, part, some)
            some, size = [], 0
            if total >= PART:
                part, total = part + 1, 0
    if part not in done:
        yield Chunk(number, part, some)


def map_in_order(work: Callable[[Chunk], Encoded], chunks: Iterable[Chunk], jobs: int) -> Generator[Encoded, None, None]:
    """Apply `work` to the chunks on several processes and yield the results in order; few chunks are in flight at a time."""
    jobs = jobs or cores()
    if jobs == 1:
        yield from map(work, chunks)
        return
    short_sockets()
    context = multiprocessing.get_context("forkserver")                 # fork would be unsafe: this process has threads
    context.set_forkserver_preload(["course.data.text.jsonl"])               # imported once for all
    pool = ProcessPoolExecutor(jobs, context, begin_worker)
    try:
        yield from map_bounded(pool, work, chunks, 3 * jobs)
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)                  # running chunks take seconds: do not wait
        raise
    except BrokenProcessPool as error:
        raise CourseError("a process that encodes was killed, perhaps because memory ran out: run again with a smaller jobs=; "
                          "it continues where it stopped") from error
    finally:
        pool.shutdown(cancel_futures=True)


def map_bounded(pool: Executor, work: Callable[[Chunk], Encoded], chunks: Iterable[Chunk], ahead: int) -> Iterator[Encoded]:
    """Like `map`, but reads at most `ahead` chunks in advance."""
    waiting: deque[Future[Encoded]] = deque()
    for chunk in chunks:
        waiting.append(pool.submit(work, chunk))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def begin_worker() -> None:
    """Set up a worker: it uses one core, leaves Ctrl-C to its parent, and ends when its parent does."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """End this worker when its parent ends: otherwise workers of a killed parent would wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


@lru_cache(maxsize=1)
def tokenizer_of(path: str) -> Tokenizer:
    """Load a tokenizer once per process."""
    return bpe.load(Path(path))


def encode(tokenizer_file: str, dtype: np.dtype[Any], config: Jsonl, chunk: Chunk) -> Encoded:
    """Parse, split and encode the documents of a chunk."""
    tokenizer = tokenizer_of(tokenizer_file)
    found: dict[str, list[documents.Text]] = {split: [] for split in SPLITS}
    bad: list[str] = []
    failed = 0
    for text in (text for item in chunk.items for text in documents.read(item, config.text)):
        if text.bad:
            failed += 1
            bad += [f"{config.files[chunk.file]}:{text.where} ({text.bad})"][:SHOWN - len(bad)]
        else:
            found[choose_split(text.data, config.valid, config.test)].append(text)
    end = bpe.end_token(tokenizer, config.end)
    tokens = {split: [document.astype(dtype) for document in bpe.encode(tokenizer, [text.text for text in some], end)]
              for split, some in found.items()}
    return Encoded(chunk.file, chunk.part, tokens, {split: sum(len(t.data) for t in some) for split, some in found.items()},
                   bad, failed)


def write_part(folder: Path, encoded: Iterable[Encoded], vocab: int) -> None:
    """Write a part's token files and counts atomically."""
    sizes, failed = dict.fromkeys(SPLITS, 0), 0
    bad: list[str] = []
    with atomic(folder) as temporary:
        with ExitStack() as stack:
            writers = {split: stack.enter_context(indexed_files.document_writer(temporary / split, vocab)) for split in SPLITS}
            for chunk in encoded:
                for split, documents in chunk.tokens.items():
                    for tokens in documents:
                        writers[split].add(tokens)
                    sizes[split] += chunk.sizes[split]
                bad += chunk.bad[:SHOWN - len(bad)]
                failed += chunk.failed
        (temporary / "counts.json").write_text(json.dumps({"bytes": sizes, "bad": bad, "failed": failed}), encoding="utf-8")


def join(path: Path, parts: Path, vocab: int) -> tuple[dict[str, dict[str, int]], list[str], int]:
    """Join all parts into the data set's token files; return (counts by split, the first bad documents, how many are bad).

    Raises `CourseError` if there are no documents.
    """
    notes = finished(parts)
    bad, failed = [line for note in notes.values() for line in note["bad"]][:SHOWN], sum(n["failed"] for n in notes.values())
    counts = {}
    for split in SPLITS:
        with indexed_files.document_writer(path / split, vocab) as writer:
            for folder in notes:
                writer.extend(Documents(folder / split))
        counts[split] = {"documents": len(writer.lengths), "tokens": sum(writer.lengths),
                         "bytes": sum(note["bytes"][split] for note in notes.values())}
    if not any(count["documents"] for count in counts.values()):
        raise no_documents_error(bad)
    return counts, bad, failed
