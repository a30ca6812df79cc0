import json

import pytest

from course.utils.errors import CourseError
from experiments import comms_links


@pytest.mark.slow
def test_links_are_measured_at_small_sizes(tmp_path, monkeypatch):
    """Loopback everywhere, and a limited cable where namespaces may be made."""
    links = {"loopback": None, "veth, 1 Gbit/s": "1gbit"}
    try:
        with comms_links.cable("1gbit"):
            pass
    except CourseError:
        del links["veth, 1 Gbit/s"]
    monkeypatch.setattr(comms_links, "LINKS", links)
    comms_links.main(tmp_path / "links.json", small=True)
    found = json.loads((tmp_path / "links.json").read_text())
    assert found["command"] == "python -m experiments.comms_links FILE" and found["links"].keys() == links.keys()
    assert all(len(link["rows"]) == 15 and link["link"]["bandwidth"] > 0 for link in found["links"].values())


def test_a_link_that_cannot_be_made_is_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CourseError, match=r"`ip netns add .*` failed.*iproute2"), comms_links.cable(""):
        pass
