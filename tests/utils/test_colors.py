"""One color for one concept in all figures, and no color that a figure makes up."""

import re
from pathlib import Path

import pytest

from course.utils import colors

ROOT = Path(__file__).parents[2]
FIGURES = [path for folder in ("course", "experiments", "solutions") for path in sorted((ROOT / folder).rglob("*.py"))
           if path.name != "colors.py" and re.search(r"matplotlib|lab\.figures", path.read_text())]
NEUTRAL = {"white", "black", "none", "gray"}         # gray: pictures without color
OWN = re.compile(r"[\"'](#[0-9A-Fa-f]{3,8})[\"']|\b(?:color|facecolor|edgecolor|cmap|c)[\"']?[=:] ?[\"'](\w+)[\"']")


def own_colors(text: str) -> list[str]:
    return [name for found in OWN.findall(text) for name in found if name and name not in NEUTRAL]


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.name)
def test_a_figure_takes_its_colors_from_the_palette(path):
    assert not own_colors(path.read_text())


def test_colors_of_a_figure_are_found():
    assert own_colors('bar(color="#123456"), plot(color="red"), {"color": "blue"}, imshow(cmap="jet")') == [
        "#123456", "red", "blue", "jet"]
    assert len(FIGURES) > 30 and not own_colors('bar(color="white", edgecolor=GRAY)')


@pytest.mark.parametrize("group", ["AXES", "KERNELS", "COLLECTIVES", "MEMORY", "FORMATS", "STEP"])
def test_the_concepts_of_a_group_differ(group):
    found = dict(getattr(colors, group))
    if group == "STEP":                              # a pipeline's figure has the one, a trace's the other
        assert found.pop("weight gradients") == colors.AMBER
    assert len(set(found.values())) == len(found) and len(set(colors.RANKS)) == len(colors.RANKS)


@pytest.mark.parametrize(("low", "high", "drawn"), [(-1.0, 3.0, ("PuOr", -3.0, 3.0)), (-4.0, 2.0, ("PuOr", -4.0, 4.0)),
                                                    (250.0, 300.0, ("viridis", 250.0, 300.0)), (0.0, 1.0, ("viridis", 0.0, 1.0)),
                                                    (-2.0, -1.0, ("viridis", -2.0, -1.0))])
def test_a_field_with_both_signs_diverges_from_zero(low, high, drawn):
    assert colors.field_map(low, high) == drawn
