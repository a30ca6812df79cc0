"""A simulated disk that can lose power: it records what could be left after a crash at any moment."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

Files = dict[str, bytes]                             # path, such as "step_000100/index.json" -> contents
MAX_FILES, MAX_PATH = 200, 255                       # visible files, and letters of a path: renaming a
                                                     # folder that exists in two states doubles it, and so on


@dataclass
class File:
    """The bytes written to a file, and whether they are safely on the disk."""

    data: bytes = b""
    flushed: bool = False


@dataclass
class Folder:
    """A folder's current entries, and those that are safely on the disk."""

    current: dict[str, "File | Folder"] = field(default_factory=dict)
    flushed: dict[str, "File | Folder"] = field(default_factory=dict)


class Disk:
    """Files and folders in memory; `crashes` lists the possible contents if the power had failed after each operation.

    A disk may delay and reorder unflushed changes, so it records four extremes for each moment. *Late*: no unflushed change of a
    name has happened. *Early*: all have. *Unlucky*: removed names are gone, added ones are missing. *Outer*: the root folder
    has its changes, folders inside it do not. An unflushed file has the first half of its bytes.
    """

    def __init__(self) -> None:
        self.root = Folder()
        self.crashes: list[Files] = []

    def write(self, path: str, data: bytes) -> None:
        """Create a file, and its folders. Until it is flushed, a crash may leave half of it."""
        folder, name = self._parent(path, make=True)
        folder.current[name] = File(data)
        self._note()

    def flush(self, path: str = "") -> None:
        """Wait until a file's bytes, or the names in a folder, are on the disk. "" is the root folder."""
        folder, name = self._parent(path)
        node = find_entry(folder, name, path) if name else folder
        if isinstance(node, File):
            node.flushed = True
        else:
            node.flushed = dict(node.current)
        self._note()

    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder atomically, and replace whatever had the new name."""
        (source, name), (target, other) = self._parent(old), self._parent(new)
        target.current[other] = find_entry(source, name, old)
        del source.current[name]
        self._note()

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its contents, if it exists."""
        folder, name = self._parent(path)
        folder.current.pop(name, None)
        self._note()

    def files(self) -> Files:
        """The files that a running program sees."""
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
    """A file or folder. Raises FileNotFoundError if it does not exist."""
    if name not in folder.current:
        raise FileNotFoundError(f"there is no {path} on the disk")
    return folder.current[name]


def list_files(folder: Folder, kind: str) -> list[tuple[str, File]]:
    """The files that `walk` finds. Raises ValueError beyond `MAX_FILES` or `MAX_PATH`."""
    files = list(islice(walk(folder, kind), MAX_FILES + 1))
    if len(files) > MAX_FILES or any(len(path) > MAX_PATH for path, _ in files):
        raise ValueError(f"this disk takes {MAX_FILES} files with paths of {MAX_PATH} letters")
    return files


def walk(folder: Folder, kind: str, before: str = "") -> Iterator[tuple[str, File]]:
    """(path, file) of every file below a folder after a crash of this kind; an empty folder as `name/`."""
    if len(before) > MAX_PATH:                        # too long already
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
