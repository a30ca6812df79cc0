"""The rooms of `course/`: few, each with a line in the map, and imports that run one way."""

import ast
import re
from pathlib import Path

import course

PACKAGE = Path(str(course.__file__)).parent
ROOMS = re.findall(r"^    (\w+)  +\S", course.__doc__ or "", re.MULTILINE)      # in the order of the map
MODULES = {".".join(["course", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
           for path in PACKAGE.rglob("*.py")}


def imported(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every import of the package in a file, also within functions and of type checkers."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "course":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(node.lineno, name if name in MODULES else str(node.module)) for name in names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names if alias.name.startswith("course.")]
    return found


def upward(rooms: list[str], package: Path = PACKAGE) -> list[str]:
    """Every import from a room of one that is not above it in the map, as "file:line imports module"."""
    return [f"{path.relative_to(package.parent)}:{line} imports {module}, which is further down the map"
            for room in rooms for path in sorted((package / room).rglob("*.py")) for line, module in imported(path)
            if rooms.index(module.split(".")[1]) > rooms.index(room)]


def test_each_room_has_a_line_in_the_map():
    there = sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__")
    assert sorted(ROOMS) == there and len(ROOMS) <= 20
    assert sorted(path.name for path in PACKAGE.glob("*.py")) == ["__init__.py", "__main__.py"]


def test_imports_run_one_way():
    assert upward(ROOMS) == []


def test_an_import_that_points_up_is_found():
    swapped = [*ROOMS[:1], "training", *(room for room in ROOMS[1:] if room != "training")]
    assert any("course/training/" in line and "imports course.models" in line for line in upward(swapped))
