"""Count what processes hold outside any folder: memory, deleted files that are open or mapped, files sent over sockets."""

import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

MEMORY_FIELDS = ("VmRSS:", "VmSwap:", "VmPTE:",
                 "HugetlbPages:")        # page tables too: reading zero pages fills them
SCAN_SECONDS = 2.0                                   # CPU seconds; only hostile code takes so long
UNNAMED = (b"(deleted)", b"[anon_shmem")             # marks of nameless files in /proc/PID/maps


@dataclass
class OpenFiles:
    """The files that all processes of a run hold."""

    files: dict[tuple[int, int], int] = field(default_factory=dict)  # bytes of each deleted file, by device and inode
    descriptors: int = 0                                # open files, deleted or not
    uncounted: int = 0                                  # number of things that exist but cannot be counted
    incomplete: bool = False                            # the scan ran out of time

    @property
    def bytes(self) -> int:
        """Bytes of all deleted files, each counted once."""
        return sum(self.files.values())


def open_files(pids: Iterable[int]) -> OpenFiles:
    """Count the files that these processes hold. `uncounted` counts the gaps: files sent over a socket and not yet received,
    mapped files of unknown size (unless root asks), and processes that made themselves unreadable."""
    usage, until = OpenFiles(), time.thread_time() + SCAN_SECONDS
    for pid in pids:
        if time.thread_time() > until:
            usage.incomplete = True
            break
        try:
            folder = f"/proc/{pid}/task/{_live_thread(pid)}"
            with suppress(FileNotFoundError):        # its program; the process may have unmapped it, and kernel threads have none
                _count_deleted(usage, os.stat(f"{folder}/exe"))
            for name in os.listdir(f"{folder}/fd"):
                usage.descriptors += 1
                with suppress(FileNotFoundError):    # closed in the meantime
                    _count_open(usage, folder, name)
            _count_mapped(usage, pid, folder)
        except PermissionError:
            usage.uncounted += 1
        except OSError:                              # gone in the meantime
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
    """Count a file if it no longer has a name."""
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
        usage.files[status.st_dev, status.st_ino] = 512 * status.st_blocks


def _count_mapped(usage: OpenFiles, pid: int, folder: str) -> None:
    """Count nameless mapped files, which need not be open."""
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
        except FileNotFoundError:                    # unmapped in the meantime
            continue
        except PermissionError:                      # at least the mapped part, maybe more
            usage.files[key] = end - begin + int(offset, 16)
            usage.uncounted += 1


def memory_bytes(pid: int) -> int:
    """A process's memory in bytes: resident, swapped out, page tables and huge pages."""
    with open(f"/proc/{pid}/task/{_live_thread(pid)}/status", encoding="utf-8", errors="replace") as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith(MEMORY_FIELDS))


def _live_thread(pid: int) -> str:
    """A live thread of a process. If the first thread has ended, /proc shows a zombie although others run."""
    return next((thread for thread in os.listdir(f"/proc/{pid}/task") if _is_alive(pid, thread)), str(pid))


def _is_alive(pid: int, thread: str) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
        return file.read().rpartition(b") ")[2][:1] not in b"ZX"
    return False


def free_space(places: Iterable[str]) -> dict[str, int]:
    """Free bytes on the file systems of these folders, and under "memory" minus the machine's shared memory in bytes."""
    free = {}
    for place in places:
        with suppress(OSError):
            status = os.statvfs(place)
            free[place] = status.f_bfree * status.f_frsize
    with suppress(OSError), open("/proc/meminfo", "rb") as file:
        free["memory"] = -1024 * sum(int(line.split()[1]) for line in file if line.startswith(b"Shmem:"))
    return free
