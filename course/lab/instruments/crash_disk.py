"""A disk that can lose power: what a program did to it, and what is left of that after a crash at any moment."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

Files = dict[str, bytes]                             # path, such as "step_000100/index.json" -> contents
MAX_FILES, MAX_PATH = 200, 255                       # files that a program sees at a time, and letters of a path: renaming a
                                                     # folder that is in two moments makes two of it, and so on


@dataclass
class File:
    """The bytes that were written, and how many of them have reached the disk for certain."""

    data: bytes = b""
    flushed: bool = False


@dataclass
class Folder:
    """The entries that there are, and those that have reached the disk for certain."""

    current: dict[str, "File | Folder"] = field(default_factory=dict)
    flushed: dict[str, "File | Folder"] = field(default_factory=dict)


class Disk:
    """Files and folders in memory; `crashes` has what could be found if the power had failed after each operation.

    A disk may delay and reorder what is not flushed, so of each moment there are four extremes. *Late*: no change of a name
    that was not flushed has happened. *Early*: every one has. *Unlucky*: what was taken away is gone, what was added is not yet
    there. *Outer*: the folder that all is in has changed, those in it have not. Of a file whose bytes were not flushed there is
    the first half.
    """

    def __init__(self) -> None:
        self.root = Folder()
        self.crashes: list[Files] = []

    def write(self, path: str, data: bytes) -> None:
        """Make a file, and the folder that it is in. Half of it may be there in a crash until it is flushed."""
        folder, name = self._parent(path, make=True)
        folder.current[name] = File(data)
        self._note()

    def flush(self, path: str = "") -> None:
        """Wait until a file's bytes, or the names in a folder, are on the disk. "": the folder that all is in."""
        folder, name = self._parent(path)
        node = find_entry(folder, name, path) if name else folder
        if isinstance(node, File):
            node.flushed = True
        else:
            node.flushed = dict(node.current)
        self._note()

    def rename(self, old: str, new: str) -> None:
        """Give a file or a folder, with all that is in it, another name, at once; what had that name is gone."""
        (source, name), (target, other) = self._parent(old), self._parent(new)
        target.current[other] = find_entry(source, name, old)
        del source.current[name]
        self._note()

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it. If it is not there, nothing happens."""
        folder, name = self._parent(path)
        folder.current.pop(name, None)
        self._note()

    def files(self) -> Files:
        """What a program sees."""
        return {path: file.data for path, file in list_files(self.root, "early")}

    def _parent(self, path: str, make: bool = False) -> tuple[Folder, str]:
        *folders, name = path.split("/")
        here = self.root
        for part in folders:
            if make and part not in here.current:
                here.current[part] = Folder()
            inner = here.current.get(part)
            if not isinstance(inner, Folder):
                raise FileNotFoundError(f"there is no folder {part}, for {path}")
            here = inner
        return here, name

    def _note(self) -> None:
        for kind in CRASH_KINDS:
            self.crashes.append({path: file.data if file.flushed else file.data[:len(file.data) // 2]
                                 for path, file in list_files(self.root, kind)})


CRASH_KINDS = ("late", "early", "unlucky", "outer")


def find_entry(folder: Folder, name: str, path: str) -> File | Folder:
    """A file or folder, which has to be there."""
    if name not in folder.current:
        raise FileNotFoundError(f"there is no {path} on the disk")
    return folder.current[name]


def list_files(folder: Folder, kind: str) -> list[tuple[str, File]]:
    """What `walk` finds; ValueError if that is more than anybody writes."""
    files = list(islice(walk(folder, kind), MAX_FILES + 1))
    if len(files) > MAX_FILES or any(len(path) > MAX_PATH for path, _ in files):
        raise ValueError(f"this disk takes {MAX_FILES} files with paths of {MAX_PATH} letters")
    return files


def walk(folder: Folder, kind: str, before: str = "") -> Iterator[tuple[str, File]]:
    """Every file below a folder with its path, by the entries of one of the extremes; an empty folder as `name/`."""
    if len(before) > MAX_PATH:                        # no need to look further
        yield before, File()
        return
    entries = folder.current if kind == "early" or (kind == "outer" and not before) else folder.flushed
    for name, node in entries.items():
        if kind == "unlucky" and folder.current.get(name) is not node:
            continue
        if isinstance(node, Folder):
            inside = walk(node, kind, f"{before}{name}/")
            yield from chain([next(inside, (f"{before}{name}/", File(flushed=True)))], inside)
        else:
            yield f"{before}{name}", node
