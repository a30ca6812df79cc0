"""Figures of lesson 09."""

import pytest

from course.lab.figures import mesh


@pytest.mark.parametrize(("order", "expected"), [
    ("pp-dp-cp-tp", {"pp": "network", "dp": "NVLink", "cp": "", "tp": "NVLink"}),
    ("tp-dp-cp-pp", {"pp": "NVLink", "dp": "NVLink", "cp": "", "tp": "network"}),
    ("dp-pp-cp-tp", {"pp": "NVLink", "dp": "network", "cp": "", "tp": "NVLink"}),
])
def test_the_slowest_axis_leaves_the_node(order, expected):
    assert mesh.links({"pp": 2, "dp": 2, "cp": 1, "tp": 4}, order, 8) == expected


def test_an_axis_is_on_nvlink_only_if_all_its_groups_are():
    assert mesh.links({"pp": 1, "dp": 4, "cp": 1, "tp": 3}, "pp-dp-cp-tp", 8)["tp"] == "network"      # ranks 6, 7 | 8


def test_every_gpu_has_its_rank_and_its_groups_letter():
    axis = mesh.mesh({"pp": 2, "dp": 2, "cp": 1, "tp": 4}, "pp-dp-cp-tp", 8, "dp").axes[0]
    words = [text.get_text() for text in axis.texts]
    assert words[:16:2] == list("ABCDABCD") and words[1:6:2] == ["rank 0", "rank 1", "rank 2"]
    assert words[-2:] == ["node 0", "node 1"] and "8 groups of 2" in axis.get_title()
