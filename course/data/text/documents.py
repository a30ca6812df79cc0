"""Stream text documents from files as people share them: JSON lines and tar archives, compressed or not.

The first bytes of a file show its format: gzip, xz or zstandard, possibly nested. The content is text, or a tar archive whose
members are such files again. Text is JSON lines, one document per line. An archive member without .jsonl in its name is one
document. Small compressed members, as in OpenWebText (an archive of compressed archives), stay compressed until `read`
decompresses them in a worker process. At most a few times `LONGEST` bytes are in memory.
"""

import gzip
import io
import json
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import zstandard

UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError, tarfile.TarError)
LONGEST = 16 << 20                                   # bytes of a document; longer ones are rejected
SMALL = 2 << 20                                      # archive members up to this size are passed on compressed
MOST = 64 << 20                                      # bytes of text in one of them: guards against decompression bombs
BLOCK = 1 << 20                                      # bytes read at once


class Item(NamedTuple):
    """A part of a file that should be a document, or a compressed member that contains some."""

    where: str                                       # line, member, or member:line
    raw: bytes
    line: bool = False                               # a line of JSON; else the content of a member
    bad: str = ""                                    # why it is unusable


class Text(NamedTuple):
    """A document, or why it is unusable."""

    where: str
    text: str
    data: bytes                                      # the text in UTF-8
    bad: str = ""


def items(path: Path, progress: Callable[[int], None] = lambda size: None) -> Iterator[Item]:
    """Yield a file's items in order and report the bytes read to `progress`. If the rest is damaged, it is one bad item."""
    position = 0
    try:
        with open(path, "rb", BLOCK) as file:
            for item in with_read_errors(contents(file, "", "x.jsonl"), ""):
                progress(file.tell() - position)
                position = file.tell()
                yield item
    except OSError as error:
        yield Item("0", b"", bad=reason(error))


def contents(file: IO[bytes], where: str, name: str) -> Iterator[Item]:
    """Yield the items of an opened file: an archive's members, the lines of .jsonl, or else the whole file."""
    stream = decompressed(file)
    if stream.peek(512)[257:262] == b"ustar":
        yield from members(stream, where)
        return
    if ".jsonl" in name:
        yield from lines(stream, where)
    elif len(raw := stream.read(LONGEST + 1)) > LONGEST:
        yield too_long(where)
    else:
        yield Item(where, raw)


def lines(stream: Any, where: str) -> Iterator[Item]:
    """Yield the lines that are not blank."""
    number = 0
    while raw := stream.readline(LONGEST + 1):
        number += 1
        place = f"{where}:{number}".lstrip(":")
        if len(raw) > LONGEST:
            while raw and not raw.endswith(b"\n"):
                raw = stream.readline(LONGEST)
            yield too_long(place)
        elif not raw.isspace():
            yield Item(place, raw, line=True)


def members(stream: IO[bytes], where: str) -> Iterator[Item]:
    """Yield the files of a tar: small ones unopened, for the others (and .jsonl) the items inside."""
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=Member) as archive:
        while member := archive.next():
            cast(Any, archive).members.clear()       # otherwise it keeps millions of entries
            place = f"{where}/{member.name}".lstrip("/")
            if member.isfile():
                content = cast(IO[bytes], archive.extractfile(member))
                if member.size <= SMALL and ".jsonl" not in member.name:
                    yield Item(place, content.read())
                else:
                    yield from with_read_errors(contents(content, place, member.name), place)


class Member(tarfile.TarInfo):
    """An archive member that detects truncation: `tarfile` treats a damaged or missing header as the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "Member":
        """The archive's next member. Raises `tarfile.ReadError` for a damaged header or a missing end marker."""
        try:
            return super().fromtarfile(archive)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError, tarfile.EmptyHeaderError) as error:     # type: ignore[attr-defined]
            raise tarfile.ReadError(f"the archive's end is missing: {error or 'nothing follows'}") from error


def with_read_errors(found: Iterator[Item], where: str) -> Iterator[Item]:
    """Yield the items, and one more bad item if the rest cannot be read."""
    try:
        for item in found:
            where = item.where
            yield item
    except UNREADABLE as error:
        yield Item(where or "0", b"", bad=f"what follows is {reason(error)}")


def too_long(where: str) -> Item:
    """The bad item for a document that is too long."""
    return Item(where, b"", bad=f"longer than {LONGEST >> 20} MB")


def reason(error: BaseException) -> str:
    """The first line of a library's exception."""
    words = str(error).splitlines()
    return f"unreadable ({words[0] if words else type(error).__name__})"


def read(item: Item, key: str) -> Iterator[Text]:
    """Yield the documents of an item: the text under `key` of a JSON line, or a member's decompressed content."""
    if item.bad:
        yield Text(item.where, "", b"", item.bad)
    elif item.line:
        yield document(item.where, item.raw, key)
    else:
        total = 0
        for part in with_read_errors(contents(io.BytesIO(item.raw), item.where, ""), item.where):
            total += len(part.raw)
            if total > MOST:
                yield Text(item.where, "", b"", f"longer than {MOST >> 20} MB once unpacked")
                return
            yield Text(part.where, "", b"", part.bad) if part.bad else document(part.where, part.raw, None)


def document(where: str, raw: bytes, key: str | None) -> Text:
    """Decode one document: the text under `key` of a JSON line, or all of `raw` if `key` is None."""
    try:
        text: Any = raw.decode("utf-8-sig")
        if key is not None:
            text = json.loads(text)
            text = text.get(key) if isinstance(text, dict) else None
            if not isinstance(text, str):
                return Text(where, "", b"", f"no text under the key {key!r}")
        data = text.encode()
    except UnicodeDecodeError as error:
        return Text(where, "", b"", f"not UTF-8 at byte {error.start}")
    except UnicodeEncodeError:
        return Text(where, "", b"", "half a surrogate pair, which is no character")
    except RecursionError:
        return Text(where, "", b"", "nested too deeply")
    except ValueError as error:
        return Text(where, "", b"", f"not JSON ({error})")
    return Text(where, text, data, "" if text else "empty")


def decompressed(file: IO[bytes]) -> Any:
    """A decompressed stream of the file. It supports `peek`, and returns nearly all readable bytes of a damaged file."""
    stream = file if isinstance(file, io.BufferedReader) else io.BufferedReader(cast(Any, file), BLOCK)
    start = stream.peek(6)
    if start.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=stream)
    if start.startswith(b"\xfd7zXZ\0"):
        return io.BufferedReader(FrameReader(stream, lzma.LZMADecompressor, b"\0"), BLOCK)
    if start.startswith(b"\x28\xb5\x2f\xfd") or start[1:4] == b"\x2a\x4d\x18":     # skippable frame: pzstd starts so
        return io.BufferedReader(FrameReader(stream, lambda: zstandard.ZstdDecompressor().decompressobj()), BLOCK)
    return stream


class FrameReader(io.RawIOBase):
    """Decompresses a sequence of zstandard frames or xz streams, with optional `padding` between them.

    The packages' own readers accept a truncated zstandard file as complete. They also stop silently if the data after an xz
    stream is not another stream.
    """

    def __init__(self, file: IO[bytes], begin: Callable[[], Any], padding: bytes = b""):
        self.file, self.begin, self.padding = file, begin, padding
        self.frame: Any = None                       # the one being decompressed
        self.rest, self.out = b"", memoryview(b"")   # not yet decompressed, not yet read

    def readable(self) -> bool:
        """True, as `io.BufferedReader` requires."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Copy decompressed bytes into a buffer; return how many, 0 at the end. Raises `EOFError` if the file ends within a
        frame, and the packages' own errors if a frame is damaged."""
        while not self.out:
            block = self.rest or self.file.read(4096)                   # small: it may expand 30,000-fold
            if not block:
                if self.frame is not None:
                    raise EOFError("the file ends within what is packed")
                return 0
            self.rest = b""
            if self.frame is None:
                block = block.lstrip(self.padding) if self.padding else block
                if not block:
                    continue
                self.frame = self.begin()
            self.out = memoryview(self.frame.decompress(block))
            if self.frame.eof:
                self.frame, self.rest = None, self.frame.unused_data
        size = min(len(buffer), len(self.out))
        buffer[:size], self.out = self.out[:size], self.out[size:]
        return size
