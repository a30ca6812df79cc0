"""Answers out of sight: how a copy that `course release --hide-answers` wrote still runs what its files no longer show.

In such a copy the objects that exercises ask for are blank in `course/`, and the known mistakes are not there. `ARCHIVE` holds
these modules as they were, and Python imports them from it, so that training and checking work as ever. That keeps answers
out of sight, not out of reach: who unpacks the file can read them.
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
ARCHIVE = "lab/authoring/answers.bin"                # in the package
INSTALL = ("\nfrom course.lab.authoring import hidden_answers as _hidden  # this copy hides its answers: docs/instructors.md\n\n"
           "_hidden.install()\n")


def pack(texts: Mapping[str, str]) -> bytes:
    """The archive of some modules, by their names."""
    return base64.encodebytes(zlib.compress(json.dumps(dict(texts)).encode()))


@cache
def hidden_texts() -> dict[str, str]:
    """The hidden modules of this copy as they were, by name; none in a copy that shows its answers."""
    path = PACKAGE / ARCHIVE
    texts: dict[str, str] = json.loads(zlib.decompress(base64.decodebytes(path.read_bytes()))) if path.is_file() else {}
    return texts


def original_text(module: str, file: Path) -> str:
    """A module's text, with its answers."""
    return hidden_texts().get(module) or file.read_text(encoding="utf-8")


def module_file(module: str) -> Path:
    """Where the library keeps a module that is no package."""
    return PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")


class Loader(SourceFileLoader):
    """Loads a module from the archive, under the name of its file: with the numbers of its lines, which blanks keep."""

    def get_data(self, path: str) -> bytes:
        """The module's text; bytecode is not kept, since it would lie beside the blank file."""
        if path != self.path:
            raise OSError(path)
        return hidden_texts()[self.name].encode()

    def path_stats(self, path: str) -> Mapping[str, object]:
        """None, so that no bytecode is looked for."""
        raise OSError(path)


class Finder(MetaPathFinder):
    """Finds the modules of the archive."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Where the module comes from; None of all that are not hidden."""
        if name not in hidden_texts():
            return None
        file = str(module_file(name))
        return spec_from_file_location(name, file, loader=Loader(name, file))


def install() -> None:
    """Let Python import the hidden modules of this copy, if it has any."""
    if hidden_texts() and not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
