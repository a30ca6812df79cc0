"""What is found on a simulated disk after a crash."""

import time

import pytest

from course.lab.instruments.crash_disk import CRASH_KINDS, Disk


def last(disk):
    """What could be found after the last operation, by extreme."""
    return dict(zip(CRASH_KINDS, disk.crashes[-len(CRASH_KINDS):], strict=True))


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


def test_a_folder_that_doubles_at_every_level_is_refused_at_once():
    """Renamed between folders that are flushed at different moments, a folder is in both; so is what is in it, level by level."""
    disk, path, begin = Disk(), "r", time.monotonic()
    disk.write("r/x", b"1")
    disk.flush()
    with pytest.raises(ValueError, match="this disk takes"):
        for _ in range(40):
            disk.write(f"{path}/A/C/l", b"2")
            disk.flush(f"{path}/A")
            disk.write(f"{path}/B/x", b"3")
            disk.rename(f"{path}/A/C", f"{path}/B/C")
            disk.flush(f"{path}/B")
            disk.flush(path)
            path += "/B/C"
    assert time.monotonic() - begin < 10


def test_a_disk_takes_so_many_files_and_such_long_names():
    disk = Disk()
    with pytest.raises(ValueError, match="200 files"):
        for number in range(300):
            disk.write(f"{number}", b"")
    with pytest.raises(ValueError, match="255 letters"):
        Disk().write(300 * "x", b"")
