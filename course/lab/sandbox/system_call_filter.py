"""System calls that no answer needs, refused by the kernel (seccomp): ways past the limits, to other processes, into the kernel.

A filter is a program for the kernel's packet filter (BPF): it looks at a call's number and at the numbers among its arguments.
It stays on all that the process starts. What takes only a user's rights is refused; what takes root's is left to other layers.
"""

import ctypes
import errno
import functools
import platform
import struct
import sys

# the kernel's name of the architecture for filters, and its column below
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
NONE = -1                                            # this architecture does not have that call
KEYCTL = (250, 219)

# A program takes a refused call for one that this kernel lacks, and goes another way where it has one.
REFUSED = {
    # the keys of whoever started it
    "keyctl": KEYCTL, "add_key": (248, 217), "request_key": (249, 218),
    # memory that no process's size shows, and what stays when all have ended
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180),
    # calls that go past this filter, and files held where /proc does not show them
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_setup": (206, 0),
    # namespaces, in which a user has root's rights; the flags of clone3 are out of a filter's sight, and libraries then use clone
    "unshare": (272, 97), "setns": (308, 268), "clone3": (435, 435), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "open_tree_attr": (467, 467),
    # other processes of the same user
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    # much of the kernel, for few programs
    "userfaultfd": (323, 282), "bpf": (321, 280), "perf_event_open": (298, 241), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "inotify_init": (253, NONE), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "quotactl": (179, 60), "quotactl_fd": (443, 443),
}
CLONE, SOCKET, SOCKETPAIR, IOCTL, CLOSE_RANGE = (56, 220), (41, 198), (53, 199), (16, 29), (436, 436)

NAMESPACES = 0x7E020000                              # the flags CLONE_NEW... of clone
THREAD, FILES = 0x10000, 0x400                       # a thread, and that it shares the open files of its process
OWN_FILES = 2                                        # the flag of close_range that gives a thread open files of its own
FAMILIES = (1, 2, 10, 16)                            # sockets: UNIX, IPv4, IPv6, and netlink, by which interfaces are listed
TERMINAL = (0x5412, 0x541C)                          # put characters into a terminal's input
X32 = 0x40000000                                     # from here on calls have other numbers

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000


@functools.cache
def filter_program() -> bytes:
    """The filter for this machine; empty where there is none."""
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
    libc.prctl(22, 2, None, 0, 0)                    # a filter at no address: the kernel complains of that if it takes filters
    return "" if ctypes.get_errno() == errno.EFAULT else "the kernel takes no filters (seccomp), or this container forbids them"


def keyctl_number() -> int:
    """The number of the call that manages keys; 0 where it is not known."""
    known = sys.platform == "linux" and platform.machine() in ARCHITECTURES and sys.maxsize > 2**32
    return KEYCTL[ARCHITECTURES[platform.machine()][1]] if known else 0


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """An instruction; of a comparison, how many are left out if it holds and if not."""
    return struct.pack("HBBI", code, yes, no, value)


def _argument(place: int) -> bytes:
    """Load the lower half of an argument, which is all of a C int."""
    return _step(LOAD, 16 + 8 * place)


def _fail(number: int) -> bytes:
    """Let the call fail with this error."""
    return _step(RETURN, FAIL | number)
