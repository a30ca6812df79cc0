"""Refuse system calls that no answer needs (seccomp): ways around the limits, to other processes, into the kernel.

A filter is a BPF program: it sees a call's number and its arguments as numbers, but not memory that they point to. All child
processes inherit it. It refuses calls that work without root; other layers handle those that need root.
"""

import ctypes
import errno
import functools
import platform
import struct
import sys

# machine -> (the kernel's number for it in filters, its column below)
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
NONE = -1                                            # this architecture lacks that call
KEYCTL = (250, 219)

# A refused call looks like one that this kernel lacks, so programs use their fallback if they have one.
REFUSED = {
    # the keys of the user who started the run
    "keyctl": KEYCTL, "add_key": (248, 217), "request_key": (249, 218),
    # memory that counts for no process, or outlives all of them
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180),
    # calls that bypass this filter, and files that /proc does not show
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_setup": (206, 0),
    # namespaces, in which a user has root's rights; a filter cannot see the flags of clone3, and libraries fall back to clone
    "unshare": (272, 97), "setns": (308, 268), "clone3": (435, 435), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "open_tree_attr": (467, 467),
    # other processes of the same user
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    # large attack surface, needed by few programs
    "userfaultfd": (323, 282), "bpf": (321, 280), "perf_event_open": (298, 241), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "inotify_init": (253, NONE), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "quotactl": (179, 60), "quotactl_fd": (443, 443),
}
CLONE, SOCKET, SOCKETPAIR, IOCTL, CLOSE_RANGE = (56, 220), (41, 198), (53, 199), (16, 29), (436, 436)

NAMESPACES = 0x7E020000                              # the CLONE_NEW... flags of clone
THREAD, FILES = 0x10000, 0x400                       # CLONE_THREAD, and CLONE_FILES: it shares the open files of its process
OWN_FILES = 2                                        # the close_range flag that unshares a thread's open files
FAMILIES = (1, 2, 10, 16)                            # sockets: UNIX, IPv4, IPv6, and netlink, which lists interfaces
TERMINAL = (0x5412, 0x541C)                          # ioctls that insert characters into a terminal's input
X32 = 0x40000000                                     # calls from here on belong to the x32 ABI

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000


@functools.cache
def filter_program() -> bytes:
    """The filter for this machine; empty if there is none."""
    if why_absent():
        return b""
    architecture, column = ARCHITECTURES[platform.machine()]
    steps = [_step(LOAD, 4), _step(EQUAL, architecture, 1), _fail(errno.ENOSYS), _step(LOAD, 0)]
    if column == 0:
        steps += [_step(AT_LEAST, X32, 0, 1), _fail(errno.ENOSYS)]
    rules = [(numbers, [_fail(errno.ENOSYS)]) for numbers in REFUSED.values()]
    rules += [(CLONE, [_argument(0), _step(ANY_BIT, NAMESPACES, 0, 1), _fail(errno.EPERM), _step(ANY_BIT, THREAD, 0, 2),
                       _step(ANY_BIT, FILES, 1), _fail(errno.EPERM)]),
              (CLOSE_RANGE, [_argument(2), _step(ANY_BIT, OWN_FILES, 0, 1), _fail(errno.EPERM)]),
              (IOCTL, [_argument(1), _step(EQUAL, TERMINAL[0], 1), _step(EQUAL, TERMINAL[1], 0, 1), _fail(errno.EPERM)])]
    others = [_step(EQUAL, family, len(FAMILIES) - place) for place, family in enumerate(FAMILIES)]
    rules += [(numbers, [_argument(0), *others, _fail(errno.EAFNOSUPPORT)]) for numbers in (SOCKET, SOCKETPAIR)]
    for numbers, then in rules:
        if numbers[column] != NONE:
            steps += [_step(EQUAL, numbers[column], 0, len(then) + 1), *then, _step(RETURN, ALLOW)]
    return b"".join([*steps, _step(RETURN, ALLOW)])


@functools.cache
def why_absent() -> str:
    """Why there is no filter here; empty if there is one."""
    if sys.platform != "linux":
        return "this is for Linux"
    if platform.machine() not in ARCHITECTURES or sys.maxsize < 2**32:
        return f"the numbers of system calls are known for {' and '.join(ARCHITECTURES)} only"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(22, 2, None, 0, 0)                    # a null filter: EFAULT if the kernel supports filters
    return "" if ctypes.get_errno() == errno.EFAULT else "the kernel takes no filters (seccomp), or this container forbids them"


def keyctl_number() -> int:
    """The number of the keyctl call; 0 if unknown."""
    known = sys.platform == "linux" and platform.machine() in ARCHITECTURES and sys.maxsize > 2**32
    return KEYCTL[ARCHITECTURES[platform.machine()][1]] if known else 0


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """An instruction; for a comparison, `yes` and `no` are the instructions to skip if it holds or not."""
    return struct.pack("HBBI", code, yes, no, value)


def _argument(place: int) -> bytes:
    """Load the lower 32 bits of an argument, which hold a C int."""
    return _step(LOAD, 16 + 8 * place)


def _fail(number: int) -> bytes:
    """Make the call fail with this errno."""
    return _step(RETURN, FAIL | number)
