"""What processes hold that no folder shows: memory, deleted files that are open or mapped, files on their way between them."""

import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

MEMORY_FIELDS = ("VmRSS:", "VmSwap:", "VmPTE:",
                 "HugetlbPages:")        # page tables as well: reading nothing but zeros fills them
SCAN_SECONDS = 2.0                                   # seconds of computing; only who means to keep us busy takes so long
UNNAMED = (b"(deleted)", b"[anon_shmem")             # how /proc/PID/maps shows files without a name


@dataclass
class OpenFiles:
    """What all processes of a run hold."""

    files: dict[tuple[int, int], int] = field(default_factory=dict)  # bytes of each deleted file, by its device and inode
    descriptors: int = 0                                # open files, deleted or not
    uncounted: int = 0                                  # what is there and cannot be counted
    incomplete: bool = False                            # there was too much to look at

    @property
    def bytes(self) -> int:
        """Bytes of all deleted files, each once."""
        return sum(self.files.values())


def open_files(pids: Iterable[int]) -> OpenFiles:
    """What these processes hold. Not all can be counted: files that were sent over a socket and not yet received; the size of
    mapped files, unless root asks; a process that made itself unreadable. Each of these is a doubt."""
    usage, until = OpenFiles(), time.thread_time() + SCAN_SECONDS
    for pid in pids:
        if time.thread_time() > until:
            usage.incomplete = True
            break
        try:
            folder = f"/proc/{pid}/task/{_live_thread(pid)}"
            with suppress(FileNotFoundError):        # its program, which a process can unmap: a kernel's process has none
                _count_deleted(usage, os.stat(f"{folder}/exe"))
            for name in os.listdir(f"{folder}/fd"):
                usage.descriptors += 1
                with suppress(FileNotFoundError):    # closed meanwhile
                    _count_open(usage, folder, name)
            _count_mapped(usage, pid, folder)
        except PermissionError:
            usage.uncounted += 1
        except OSError:                              # gone meanwhile
            continue
    return usage


def _count_open(usage: OpenFiles, folder: str, name: str) -> None:
    """Count one open file."""
    status = os.stat(f"{folder}/fd/{name}")
    _count_deleted(usage, status)
    if stat.S_ISSOCK(status.st_mode):
        with open(f"{folder}/fdinfo/{name}", "rb") as file:
            usage.uncounted += sum(int(line.split()[1]) for line in file if line.startswith(b"scm_fds:"))


def _count_deleted(usage: OpenFiles, status: os.stat_result) -> None:
    """Count a file if it has no name any more."""
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
        usage.files[status.st_dev, status.st_ino] = 512 * status.st_blocks


def _count_mapped(usage: OpenFiles, pid: int, folder: str) -> None:
    """Count files without a name that are mapped, which need not be open."""
    with open(f"{folder}/maps", "rb") as file:
        lines = [line.split(None, 5) for line in file if any(word in line for word in UNNAMED)]
    for place, _, offset, device, inode, *_ in lines:
        major, minor = (int(part, 16) for part in device.split(b":"))
        begin, end = (int(part, 16) for part in place.split(b"-"))
        key = os.makedev(major, minor), int(inode)
        if key in usage.files or not key[1]:
            continue
        try:
            _count_deleted(usage, os.stat(f"/proc/{pid}/map_files/{begin:x}-{end:x}"))
        except FileNotFoundError:                    # unmapped meanwhile
            continue
        except PermissionError:                      # it has at least what is mapped, and may have more
            usage.files[key] = end - begin + int(offset, 16)
            usage.uncounted += 1


def memory_bytes(pid: int) -> int:
    """Bytes of memory of a process: resident, swapped out, in page tables and in huge pages."""
    with open(f"/proc/{pid}/task/{_live_thread(pid)}/status", encoding="utf-8", errors="replace") as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith(MEMORY_FIELDS))


def _live_thread(pid: int) -> str:
    """A thread of a process that has not ended. The first may have: then /proc shows a dead process, and the others go on."""
    return next((thread for thread in os.listdir(f"/proc/{pid}/task") if _is_alive(pid, thread)), str(pid))


def _is_alive(pid: int, thread: str) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
        return file.read().rpartition(b") ")[2][:1] not in b"ZX"
    return False


def free_space(places: Iterable[str]) -> dict[str, int]:
    """Free bytes of the file systems of these folders, and minus what the machine has of shared memory."""
    free = {}
    for place in places:
        with suppress(OSError):
            status = os.statvfs(place)
            free[place] = status.f_bfree * status.f_frsize
    with suppress(OSError), open("/proc/meminfo", "rb") as file:
        free["memory"] = -1024 * sum(int(line.split()[1]) for line in file if line.startswith(b"Shmem:"))
    return free
