import errno
import os
from pathlib import Path

import pytest

from course.utils import atomic_files
from course.utils.atomic_files import atomic
from course.utils.errors import CourseError


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "folder" / "file.txt"
    with atomic(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    with pytest.raises(ValueError), atomic(path) as temporary:
        temporary.write_text("half")
        raise ValueError
    assert path.read_text() == "new" and os.listdir(path.parent) == ["file.txt"]


def test_a_folder_appears_whole(tmp_path):
    with atomic(tmp_path / "a") as temporary:
        temporary.mkdir()
        (temporary / "b").write_text("c")
    assert (tmp_path / "a" / "b").read_text() == "c"


@pytest.mark.parametrize(("error", "words"), [
    (OSError(28, "No space left on device"), "disk is full"),
    (OSError("Unable to write (errno = 28, error message = 'No space left on device')"), "disk is full"),   # HDF5's way
    (RuntimeError("Can't decrement id ref count (file write failed: ... 'No space left on device')"), "disk is full"),
    (PermissionError(13, "Permission denied"), "cannot write"),
])
def test_what_the_system_refuses_is_explained(tmp_path, error, words):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(CourseError, match=words), atomic(path) as temporary:
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("place", ["file/a", "file/folder/a", "file/folder/deep/a"])
def test_a_path_through_a_file_is_explained(tmp_path, place):
    (tmp_path / "file").write_text("old")
    with pytest.raises(CourseError, match=r"cannot write .*: a part of that path is a file; choose"), atomic(tmp_path / place):
        raise AssertionError("nothing can be written")
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="only Linux has /proc")
@pytest.mark.parametrize("place", ["a", "folder/a"])
def test_a_folder_that_takes_no_files_is_explained(place):
    path = Path("/proc") / place
    with pytest.raises(CourseError, match=f"cannot write {path}: .*; choose"), atomic(path) as temporary:
        temporary.write_text("new")


def test_an_input_that_is_missing_is_not_taken_for_the_output(tmp_path):
    with pytest.raises(FileNotFoundError), atomic(tmp_path / "a"):
        (tmp_path / "b").read_text()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
def test_a_disk_that_is_really_full(tmp_path):
    with pytest.raises(CourseError, match="disk is full"), atomic(tmp_path / "file"), open("/dev/full", "w") as full:
        full.write("x" * 100_000)


@pytest.mark.parametrize(("error", "cure"), [
    (OSError(errno.EACCES, "Permission denied"), "see to what the system says"),
    (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"), (OSError(errno.EIO, "I/O"), "see to what the system says"),
    (OSError("/blocks/a: errno = 13, error message = 'Permission denied'"), "see to what the system says"),
    (OSError(-101, "NetCDF: HDF error"), "as before"), (ValueError("whatever"), "as before")])
def test_the_cure_follows_the_reason(error, cure):
    assert cure in (told := atomic_files.os_error_cure(error, "as before")) and "remove" not in told
