"""What is found on a simulated disk after a crash."""

import pytest

from course.lab.disk import KINDS, Disk


def last(disk):
    """What could be found after the last operation, by extreme."""
    return dict(zip(KINDS, disk.crashes[-len(KINDS):], strict=True))


def test_what_is_not_flushed_is_half_there_or_not_at_all():
    disk = Disk()
    disk.write("a/b", b"abcd")
    assert disk.files() == {"a/b": b"abcd"}
    assert last(disk) == {"late": {}, "early": {"a/b": b"ab"}, "unlucky": {}, "outer": {"a/": b""}}
    disk.flush("a/b")
    assert last(disk)["early"] == {"a/b": b"abcd"} and last(disk)["late"] == {}
    disk.flush("")                                   # the name a, not the names in it
    assert last(disk)["late"] == {"a/": b""}
    disk.flush("a")
    assert set(map(str, last(disk).values())) == {str({"a/b": b"abcd"})}


def test_a_rename_may_have_happened_or_not_until_its_folder_is_flushed():
    disk = Disk()
    disk.write("old/f", b"1")
    for path in ("old/f", "old", ""):
        disk.flush(path)
    disk.rename("old", "new")
    assert last(disk) == {"late": {"old/f": b"1"}, "early": {"new/f": b"1"}, "unlucky": {}, "outer": {"new/f": b"1"}}
    disk.flush("")
    assert set(map(str, last(disk).values())) == {str({"new/f": b"1"})}
    disk.remove("new")
    assert last(disk) == {"late": {"new/f": b"1"}, "early": {}, "unlucky": {}, "outer": {}} and disk.files() == {}


def test_a_folder_may_have_its_new_name_before_the_names_in_it_are_there():
    disk = Disk()
    disk.write("new/f", b"1")
    disk.flush("new/f")
    disk.rename("new", "final")
    assert last(disk)["outer"] == {"final/": b""}
    disk.flush("final")
    assert last(disk)["outer"] == {"final/f": b"1"} and last(disk)["late"] == {}


@pytest.mark.parametrize("act", [lambda d: d.flush("no"), lambda d: d.flush("no/f"), lambda d: d.rename("no", "a"),
                                 lambda d: d.remove("no/f")])
def test_what_is_not_there_is_said(act):
    with pytest.raises(FileNotFoundError, match=r"there is no .*no"):
        act(Disk())


def test_what_is_not_there_may_be_removed():
    """As whoever clears away the leftovers of an earlier crash does, without a look whether there are any."""
    disk = Disk()
    disk.write("f", b"1")
    disk.remove("leftover")
    assert disk.files() == {"f": b"1"}
