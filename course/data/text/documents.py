"""Documents of text out of files as people share them: JSON lines and archives, packed or not, as a stream.

What a file is, its first bytes tell: gzip, xz or zstandard, once or nested; in it a tar, whose members are again such
files, or text. Text is JSON lines, one document each, except for members of an archive that are not called .jsonl, which
are a document each. Of OpenWebText, an archive of packed archives, small packed members stay packed until `read` has
them, in a process that has time. No more is in memory than a few times `LONGEST`.
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
LONGEST = 16 << 20                                   # bytes of a document: more is no text
SMALL = 2 << 20                                      # bytes of a packed member that is handed on packed
MOST = 64 << 20                                      # bytes of text in one of those: 30 times as much, or somebody is joking
BLOCK = 1 << 20                                      # bytes read at once


class Item(NamedTuple):
    """Something in a file that should be a document, or packs some."""

    where: str                                       # line, member, or member:line
    raw: bytes
    line: bool = False                               # of JSON; else the content of a member
    bad: str = ""                                    # why there is nothing


class Text(NamedTuple):
    """A document, or why there is none."""

    where: str
    text: str
    data: bytes                                      # the same in UTF-8
    bad: str = ""


def items(path: Path, progress: Callable[[int], None] = lambda size: None) -> Iterator[Item]:
    """What a file holds, in order; `progress` is told of bytes as they are read. A damaged rest is one bad item."""
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
    """What an opened file holds: of an archive its members, of .jsonl the lines, else itself."""
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
    """The lines that are not blank."""
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
    """The files of a tar: small ones as they are, of others what is inside."""
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=Member) as archive:
        while member := archive.next():
            cast(Any, archive).members.clear()       # else it remembers millions of names
            place = f"{where}/{member.name}".lstrip("/")
            if member.isfile():
                content = cast(IO[bytes], archive.extractfile(member))
                if member.size <= SMALL and ".jsonl" not in member.name:
                    yield Item(place, content.read())
                else:
                    yield from with_read_errors(contents(content, place, member.name), place)


class Member(tarfile.TarInfo):
    """A member of an archive that ends with its mark: the package takes a damaged header, or none, for an end, too."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "Member":
        """The archive's next member. Raises `tarfile.ReadError` for a damaged header, and for an end without its mark."""
        try:
            return super().fromtarfile(archive)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError, tarfile.EmptyHeaderError) as error:     # type: ignore[attr-defined]
            raise tarfile.ReadError(f"the archive's end is missing: {error or 'nothing follows'}") from error


def with_read_errors(found: Iterator[Item], where: str) -> Iterator[Item]:
    """The items, and one bad item more if the rest cannot be read."""
    try:
        for item in found:
            where = item.where
            yield item
    except UNREADABLE as error:
        yield Item(where or "0", b"", bad=f"what follows is {reason(error)}")


def too_long(where: str) -> Item:
    """A document that is not read, because of its length."""
    return Item(where, b"", bad=f"longer than {LONGEST >> 20} MB")


def reason(error: BaseException) -> str:
    """What an exception of a library says, in a few words."""
    words = str(error).splitlines()
    return f"unreadable ({words[0] if words else type(error).__name__})"


def read(item: Item, key: str) -> Iterator[Text]:
    """The documents of an item: the text under `key` of a line of JSON, or what a member holds, unpacked."""
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
    """The text of a line of JSON, or the bytes themselves if there is no key."""
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
    """A stream of what is in the file: itself, or what it packs. It can `peek`, and holds little back of a damaged one."""
    stream = file if isinstance(file, io.BufferedReader) else io.BufferedReader(cast(Any, file), BLOCK)
    start = stream.peek(6)
    if start.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=stream)
    if start.startswith(b"\xfd7zXZ\0"):
        return io.BufferedReader(FrameReader(stream, lzma.LZMADecompressor, b"\0"), BLOCK)
    if start.startswith(b"\x28\xb5\x2f\xfd") or start[1:4] == b"\x2a\x4d\x18":     # the latter is skipped: pzstd begins so
        return io.BufferedReader(FrameReader(stream, lambda: zstandard.ZstdDecompressor().decompressobj()), BLOCK)
    return stream


class FrameReader(io.RawIOBase):
    """Unpacks zstandard's frames or xz's streams, one after another, between which may be `padding`.

    The packages' own readers take a truncated zstandard file for a whole one, and end without a word where what follows an xz
    stream does not begin like another.
    """

    def __init__(self, file: IO[bytes], begin: Callable[[], Any], padding: bytes = b""):
        self.file, self.begin, self.padding = file, begin, padding
        self.frame: Any = None                       # the one that is being unpacked
        self.rest, self.out = b"", memoryview(b"")   # not yet unpacked, not yet read

    def readable(self) -> bool:
        """Always: what `io.BufferedReader` asks before it reads."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill some of a buffer with unpacked bytes; how many, 0 at the end. Raises `EOFError` where the file ends within a
        frame, and the packages' own errors where a frame is damaged."""
        while not self.out:
            block = self.rest or self.file.read(4096)                   # little: it may unpack to 30,000 times as much
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
