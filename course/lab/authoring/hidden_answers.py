"""Import the hidden answers of a copy written by `course release --hide-answers`.

In such a copy the objects that exercises ask for are blank in `course/`, and the known mistakes are missing. `ARCHIVE` holds the
original modules, and Python imports them from there, so training and checking still work. Answers are out of sight, not out of
reach: anyone who unpacks the archive can read them.
"""

import base64
import json
import sys
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parents[2]
ARCHIVE = "lab/authoring/answers.bin"                # path inside the package
INSTALL = ("\nfrom course.lab.authoring import hidden_answers as _hidden  # this copy hides its answers: docs/instructors.md\n\n"
           "_hidden.install()\n")


def pack(texts: Mapping[str, str]) -> bytes:
    """Pack module texts, by module name, into the bytes of an archive."""
    return base64.encodebytes(zlib.compress(json.dumps(dict(texts)).encode()))


@cache
def hidden_texts() -> dict[str, str]:
    """The original texts of this copy's hidden modules, by name; empty if the copy shows its answers."""
    path = PACKAGE / ARCHIVE
    texts: dict[str, str] = json.loads(zlib.decompress(base64.decodebytes(path.read_bytes()))) if path.is_file() else {}
    return texts


def original_text(module: str, file: Path) -> str:
    """A module's text with its answers, from the archive or the file."""
    return hidden_texts().get(module) or file.read_text(encoding="utf-8")


def module_file(module: str) -> Path:
    """The file of a library module (not of a package)."""
    return PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")


class Loader(SourceFileLoader):
    """Load a module from the archive under its file's name. Line numbers match the file, because blanks keep them."""

    def get_data(self, path: str) -> bytes:
        """The module's text. Raises OSError for any other path, such as bytecode, which would belong to the blank file."""
        if path != self.path:
            raise OSError(path)
        return hidden_texts()[self.name].encode()

    def path_stats(self, path: str) -> Mapping[str, object]:
        """Raise OSError, so that Python looks for no bytecode."""
        raise OSError(path)


class Finder(MetaPathFinder):
    """Find the modules of the archive."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a hidden module; None for all others."""
        if name not in hidden_texts():
            return None
        file = str(module_file(name))
        return spec_from_file_location(name, file, loader=Loader(name, file))


def install() -> None:
    """Make Python import this copy's hidden modules, if it has any, from the archive."""
    if hidden_texts() and not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
