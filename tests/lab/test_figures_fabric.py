"""Figures of lesson 09 on links, and what the lesson says of the cube mesh."""

import numpy as np
import pytest

from course.bench.results import load
from course.lab.exercises.lesson09_mesh import narrowest_link
from course.lab.figures import fabric

LINKS = {(a, b): narrowest_link(fabric.CUBE_MESH, [a, b]) for a in range(8) for b in range(8) if a != b}


def test_the_cube_mesh_has_six_links_to_four_others_for_each_gpu():
    for gpu in range(8):
        mine = [LINKS[gpu, other] for other in range(8) if other != gpu]
        assert sum(mine) == 6 and sorted(mine) == [0, 0, 0, 1, 1, 2, 2]
    assert all(LINKS[a, b] == LINKS[b, a] for a, b in LINKS)


def test_pairs_with_two_links_are_those_that_the_lesson_names():
    two = sorted(f"{a}-{b}" for (a, b), count in LINKS.items() if count == 2 and a < b)
    assert two == ["0-3", "0-4", "1-2", "1-5", "2-3", "4-7", "5-6", "6-7"]
    renumbered = [0, 3, 1, 2, 4, 7, 5, 6]            # as the lesson's CUDA_VISIBLE_DEVICES
    assert all(LINKS[renumbered[i], renumbered[i + 1]] == 2 for i in range(0, 8, 2))
    ring = [0, 3, 2, 1, 5, 6, 7, 4, 0]
    assert min(LINKS[ring[i], ring[i + 1]] for i in range(8)) == narrowest_link(fabric.CUBE_MESH, list(range(8))) == 2
    assert LINKS[0, 5] == 0


def test_the_picture_has_a_line_for_each_link():
    pairs = {pair: count for pair, count in LINKS.items() if pair[0] < pair[1] and count}
    axis = fabric.node(pairs, [[0, 1], [2, 3]], "links").axes[0]
    assert len(axis.lines) == sum(pairs.values()) == 24 and [text.get_text() for text in axis.texts] == list("01234567")
    colors = [circle.get_edgecolor() for circle in axis.patches]
    assert colors[0] == colors[1] != colors[2] == colors[3] and len(set(colors[4:])) == 1


def test_curves_are_drawn_with_their_fits():
    points = [(1000.0, 0.1), (1e6, 5.0)]
    axis = fabric.bandwidths({"a": points, "b": points}, {"a": (9.0, 1.0)}).axes[0]
    assert [line.get_linestyle() for line in axis.lines] == ["None", "--", "None"]
    assert axis.lines[1].get_ydata() == pytest.approx([0.1, 1e6 / (9000 + 1e6)])
    assert np.isclose(fabric.fitted(9000.0, 9.0, 1.0), 0.5)               # half the bandwidth at latency x bandwidth bytes


def test_recorded_links_differ_as_the_lesson_says():
    links = load("comms_cpu")["links"]
    largest = {name: [row for row in link["rows"] if row["operation"] == "all-reduce"][-1]["bus_gb_s"]
               for name, link in links.items()}
    assert 0.05 < largest["veth, 1 Gbit/s"] < 0.125 < min(largest["loopback"], largest["veth"])
    assert all(link["rows"][-1]["bytes"] == 2**26 and len(link["rows"]) == 45 for link in links.values())
