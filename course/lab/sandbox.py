"""Other people's code in a process of its own: cut off as far as this machine allows, watched, and gone afterwards.

Three layers, each used where the machine has it: bubblewrap (own files, processes and network), an unprivileged
user (where one is root), and a watchdog (time, memory, processes, output, disk). The watchdog alone keeps
mistakes in bounds, not malice; and files deleted while open, or written beside the scratch folder where
bubblewrap does not forbid it, escape its count.
"""

import functools
import grp
import math
import os
import pwd
import secrets
import select
import shutil
import signal
import site
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from course.errors import CourseError

T = TypeVar("T")
LINUX = sys.platform == "linux"
MARK = "COURSE_SANDBOX"                              # the environment variable that marks a run's processes
USERS = range(60800, 60864)                          # systemd's list of user numbers has these down as unused
GRACE = 3.0                                          # seconds that killing may take
LOOK = 0.05                                          # seconds between two looks of the watchdog
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/sys", "/nix/store")

# The first thing that runs inside: it limits itself, becomes the unprivileged user, and turns into the command.
# A program of its own, because a function between fork and exec (preexec_fn) can hang where there are threads.
# The order matters: a process that has changed its user may no longer write to its /proc, and no longer dies
# with its parent until it asks for that again.
SHIM = r"""
import ctypes, os, resource, sys
user, processes, size = map(int, sys.argv[1:4])
def limit(what, most):
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))
limit(resource.RLIMIT_CORE, 0)
limit(resource.RLIMIT_FSIZE, size)
linux = sys.platform == 'linux'
if linux:
    with open('/proc/self/oom_score_adj', 'w') as file:
        file.write('1000')
if user:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
if processes:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (processes if hard < 0 else min(processes, hard), hard))
    try:
        child = os.fork() or os._exit(0)
        os.waitpid(child, 0)
        limit(resource.RLIMIT_NPROC, processes)
    except OSError:                      # this user's processes in other containers count too
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
if linux:
    prctl = ctypes.CDLL(None).prctl
    prctl(36, 1, 0, 0, 0)                # its orphans become its children, where the watchdog sees them
    prctl(38, 1, 0, 0, 0)                # no_new_privs
    prctl(1, 9, 0, 0, 0)                 # SIGKILL when the parent dies
os.chdir(sys.argv[4])                    # only now: a root without capabilities may not be let in
os.execvp(sys.argv[5], sys.argv[5:])
"""


@dataclass(frozen=True)
class Limits:
    """What a run may use."""

    seconds: float = 60.0                            # wall clock
    gigabytes: float = 4.0                           # resident memory of all its processes together
    processes: int = 64                              # at any one time
    output: int = 1_000_000                          # bytes of stdout and stderr that are kept; 20 times that ends it
    disk: float = 1.0                                # gigabytes in the scratch folder, with what was there before


@dataclass(frozen=True)
class Outcome:
    """How a run went."""

    ok: bool                                         # it ended by itself, with status 0
    ended: str                                       # a sentence why not
    output: str                                      # what it printed, cut to the limit
    seconds: float


@dataclass(frozen=True)
class Layers:
    """Which layers of isolation work on this machine, and why the others do not."""

    namespaces: bool                                 # bubblewrap: own files, processes, network
    user: bool                                       # started as root, and another user can run Python and PyTorch
    why: Mapping[str, str] = field(default_factory=dict)        # a clause for each absent layer, by its name

    @property
    def isolates(self) -> bool:
        """Whether code in a run can neither alter this user's files nor read its private ones."""
        return self.namespaces or self.user

    def report(self) -> list[str]:
        """A line a layer, for people."""
        rows = [("namespaces", self.namespaces, "own files, processes and network (bubblewrap)"),
                ("user", self.user, "an unprivileged user, where there is no bubblewrap")]
        lines = [f"{text}: " + ("yes" if has else f"no, {self.why.get(name, 'switched off')}") for name, has, text in rows]
        return [*lines, "limits on time, memory, processes, output and disk (watchdog): yes"]


@functools.cache
def layers() -> Layers:
    """What works here, found once a process by running Python and PyTorch in each layer (seconds)."""
    why = {"namespaces": "bubblewrap is for Linux", "user": "this is for Linux"}
    if LINUX:
        why["namespaces"] = "bubblewrap is not installed: apt-get install bubblewrap"
        if shutil.which("bwrap"):
            why["namespaces"] = _fault(Layers(True, False))
        why["user"] = "not started as root" if os.geteuid() else _fault(Layers(False, True))
    return Layers(not why["namespaces"], not why["user"], {name: clause for name, clause in why.items() if clause})


_layers = layers                                     # `run` has a parameter of this name


def _fault(chosen: Layers) -> str:
    """Why nothing runs in these layers; empty if it does."""
    with tempfile.TemporaryDirectory(prefix="course-probe-") as folder:
        try:
            outcome = run([sys.executable, "-c", "import os, torch; assert os.getuid()"], Path(folder), layers=chosen)
        except (CourseError, OSError) as error:
            return str(error)
    return "" if outcome.ok else f"it does not work here: {(outcome.output.strip() or outcome.ended).splitlines()[-1]}"


def run(command: list[str], scratch: Path, readable: Sequence[Path] = (), environment: Mapping[str, str] | None = None,
        limits: Limits = Limits(), layers: Layers | None = None) -> Outcome:
    """Run a command in the scratch folder, the only one that it may write to, until it ends or is beyond a limit.

    `readable` are further folders that it may read. Of the environment it gets `environment` and a few variables
    such as HOME, nothing of this process's own. Where one is root it runs as another user, to whom the scratch
    folder belongs meanwhile, and `readable` must be readable to all. A Ctrl-C kills the run. With bubblewrap a
    status of 129 or more counts as a signal. `CourseError`: a folder is not there, or not within that user's reach.
    """
    has = layers or _layers()
    scratch = Path(os.path.abspath(scratch))
    for folder in (scratch, *readable):
        if not folder.is_dir():
            raise CourseError(f"{folder}: there is no such folder to run other people's code with")
    with ExitStack() as stack:
        inner = Path(tempfile.mkdtemp(prefix=".run-", dir=scratch))     # new: an earlier run may have left symlinks
        stack.callback(remove, inner)
        for name in ("home", "tmp", "shm"):
            (inner / name).mkdir()
        user = 0
        if has.isolates and os.geteuid() == 0:
            user = stack.enter_context(_unprivileged())
            _hand_over(scratch, user, hidden=has.namespaces)
            stack.callback(os.chown, scratch, 0, 0)  # so that a later run of the same user has no way in
        whole = [sys.executable, "-I", "-S", "-c", SHIM, str(user), str(_threads(user, limits)),
                 str(round(limits.disk * 1e9)), str(scratch), *command]
        mark = secrets.token_hex(8)
        variables = _variables(inner, has) | dict(environment or {}) | {MARK: mark}
        if has.namespaces:
            whole = ["bwrap", *_namespaces(scratch, inner, readable, user > 0), "--", *whole]
        start = time.monotonic()
        process = subprocess.Popen(whole, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        watched = _Watched(process, scratch, limits, mark, user, start, spare=2 * has.namespaces)
        try:
            ended = watched.wait()
        finally:
            watched.stop()
        seconds = time.monotonic() - start
        watched.listen(1.0)
        ended = ended or watched.overflow() or _ending(process.returncode, has.namespaces)
        return Outcome(not ended, ended, watched.printed.decode(errors="replace"), seconds)


def _variables(inner: Path, has: Layers) -> dict[str, str]:
    """The environment of a run, with nothing of this process's own: that may hold passwords."""
    home, temporary = str(inner / "home"), "/tmp" if has.namespaces else str(inner / "tmp")
    found = {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8",
             "HOME": home, "TMPDIR": temporary, "MPLCONFIGDIR": home,
             "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if site.ENABLE_USER_SITE:                        # found through HOME otherwise
        found["PYTHONUSERBASE"] = site.getuserbase()
    return found


@contextmanager
def _unprivileged() -> Iterator[int]:
    """The number of a user and group that have no account and no process, and that no other run on this machine has."""
    for number in USERS:
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(f"\0course-sandbox-{number}")        # a name that the kernel gives once, and takes back
            except OSError:
                continue
            if _unused(number):
                yield number
                return
    raise CourseError(f"all of the users {USERS[0]} to {USERS[-1]} are busy on this machine: run fewer answers at a time")


def _unused(number: int) -> bool:
    for find in (pwd.getpwuid, grp.getgrgid):
        with suppress(KeyError):
            find(number)
            return False
    return not any(_of_user(process, number) and _running(process) for process in psutil.process_iter())


def _hand_over(scratch: Path, user: int, hidden: bool) -> None:
    """Give everything in the scratch folder to the user; files with a second name elsewhere stay whose they are."""
    shut = [folder for folder in scratch.parents if not folder.stat().st_mode & stat.S_IXOTH]
    if shut and not hidden:
        raise CourseError(f"{scratch}: user {user} cannot get there, {shut[-1]} is closed to others; set TMPDIR elsewhere")
    for path, found in _below(scratch):
        if stat.S_ISDIR(found.st_mode) or found.st_nlink == 1:
            os.chown(path, user, user, follow_symlinks=False)
    os.chown(scratch, user, user)
    scratch.chmod(0o700)


def _threads(user: int, limits: Limits) -> int:
    """The kernel's limit on the user's threads, a backstop to the watchdog; 0 for root, to whom it does not apply."""
    if user or os.geteuid() == 0:
        return user and 256 + 8 * limits.processes
    mine = [process for process in psutil.process_iter(["num_threads"]) if _of_user(process, os.getuid())]
    return 4096 + sum(process.info.get("num_threads") or 1 for process in mine)


def _namespaces(scratch: Path, inner: Path, readable: Sequence[Path], root: bool) -> list[str]:
    """The arguments of bubblewrap: what can be seen inside, and where."""
    package = Path(__file__).resolve().parents[1]
    folders = _interpreter()
    installed = package.parent in [folder.resolve() for folder in folders]
    hidden = [package if installed else package.parent]
    hidden += [path for folder in folders if (path := folder / package.name).is_dir()]
    mounts = {"/proc": ["--proc", "/proc"], "/dev": ["--dev", "/dev"]}
    for name in filter(os.path.lexists, SYSTEM):
        mounts[name] = ["--symlink", os.readlink(name), name] if os.path.islink(name) else ["--ro-bind", name, name]
    mounts |= {str(path): ["--tmpfs", str(path)] for path in hidden}
    mounts |= {(name := os.path.abspath(path)): ["--ro-bind", name, name] for path in [*folders, *readable]}
    mounts |= {name: ["--bind", str(source), name]
               for name, source in (("/tmp", inner / "tmp"), ("/dev/shm", inner / "shm"), (str(scratch), scratch))}
    ordered = sorted(mounts, key=lambda name: Path(name).parts)      # a folder before what lies in it
    # bubblewrap makes the folders above a mount too, but closed to all but root
    above = {name: [part for folder in reversed(Path(name).parents[:-1]) for part in ("--dir", str(folder))] for name in ordered}
    parts = [part for name in ordered for part in above[name] + mounts[name]]
    ours = ["/", "/dev", *map(str, hidden)]          # file systems that bubblewrap made: in memory, and writable so far
    return ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try", "--die-with-parent",
            "--new-session", *parts, *(part for name in ours for part in ("--remount-ro", name)),
            *(("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID") if root else ())]


def _interpreter() -> list[Path]:
    """The folders that Python runs from: its prefixes, the links that lead to it, and where packages are installed."""
    program, found = sys.executable, [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
    found += [os.path.realpath(path) for path in found]
    while os.path.islink(program):
        program = os.path.normpath(os.path.join(os.path.dirname(program), os.readlink(program)))
        found.append(os.path.dirname(os.path.dirname(program)))
    found += [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return [Path(path) for path in dict.fromkeys(found) if path not in ("", "/") and os.path.isdir(path)]


@dataclass
class _Watched:
    """A run, and what the watchdog knows of it."""

    process: subprocess.Popen[bytes]
    scratch: Path
    limits: Limits
    mark: str
    user: int                                        # 0: not one of its own
    start: float
    spare: int                                       # processes that are bubblewrap's
    family: set[psutil.Process] = field(default_factory=set)
    printed: bytearray = field(default_factory=bytearray)
    volume: int = 0                                  # bytes printed so far

    def __post_init__(self) -> None:
        assert self.process.stdout is not None
        self.pipe: int | None = self.process.stdout.fileno()
        self.poll = select.poll()                    # select.select fails where a notebook has a thousand files open
        self.poll.register(self.pipe, select.POLLIN)
        with suppress(psutil.Error):
            self.family.add(psutil.Process(self.process.pid))

    def wait(self) -> str:
        """Wait for the end of the run, or of our patience; the sentence for the latter."""
        looks = 0
        while self.process.poll() is None:
            began = time.monotonic()
            excess = self.excess(thorough=looks % 20 == 0)
            if excess:
                return excess
            looks += 1
            self.listen(max(LOOK, 3 * (time.monotonic() - began)))      # at most a quarter of a core, on large machines too
        return ""

    def listen(self, seconds: float) -> None:
        """Take what is printed for so long, or until the run ends."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.volume <= 20 * self.limits.output:
            if self.pipe is None:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(left)
                return
            if self.poll.poll(1000 * left):
                piece = os.read(self.pipe, 1 << 16)
                self.volume += len(piece)
                self.printed += piece[:max(0, self.limits.output - len(self.printed))]
                if not piece:
                    self.pipe = None                 # every writer has closed it, or is gone

    def excess(self, thorough: bool) -> str:
        """The sentence for a limit that the run is beyond, if any; the disk and strays only if `thorough`."""
        limits = self.limits
        if time.monotonic() - self.start > limits.seconds:
            return f"it ran for more than {limits.seconds:g} seconds and was stopped"
        self.gather(thorough)
        if len(self.family) - self.spare > limits.processes:
            return f"it started more than {limits.processes} processes and was stopped"
        if sum(map(_memory, self.family)) > limits.gigabytes * 1e9:
            return f"it took more than {limits.gigabytes} GB of memory and was stopped"
        return self.overflow(thorough)

    def overflow(self, disk: bool = True) -> str:
        """The sentence for too much printed or written."""
        limits = self.limits
        if self.volume > 20 * limits.output:
            return f"it printed more than {20 * limits.output / 1e6:g} MB and was stopped"
        if disk and _size(self.scratch, limits.disk * 1e9) > limits.disk * 1e9:
            return f"it wrote more than {limits.disk} GB to disk, or made folders that cannot be looked into"
        return ""

    def gather(self, thorough: bool) -> None:
        """Bring the family up to date: all descendants of those known so far; those that only the mark shows if `thorough`."""
        family = {process for process in self.family if process.is_running()}
        everyone = list(psutil.process_iter(["ppid"]))
        if thorough:
            family |= {process for process in everyone if self.ours(process)}
        born = family
        while born:
            parents = {process.pid for process in born}
            born = {process for process in everyone if process.info.get("ppid") in parents} - family
            family |= born
        # the list took a while: count only what still runs, and thus ran at the same time
        self.family = {process for process in family if process.is_running()}

    def ours(self, process: psutil.Process) -> bool:
        if self.user and _of_user(process, self.user):
            return _running(process)                 # the dead may be of this user's last run
        return _ask(lambda: bool(process.environ().get(MARK) == self.mark), False)

    def stop(self) -> None:
        """Kill every process of the run, again and again until none is left or `GRACE` seconds have passed."""
        until = time.monotonic() + GRACE
        while True:
            if self.process.poll() is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            if self.user:                            # all at once: from a list, one that keeps forking could escape
                subprocess.run(["/bin/sh", "-c", "kill -9 -1"], user=self.user, group=self.user, extra_groups=[], env={},
                               stderr=subprocess.DEVNULL, check=False)
            self.gather(thorough=True)
            left = [process for process in self.family if _running(process)]
            if not left or time.monotonic() > until:
                return
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(0.01)


def _ending(status: int | None, namespaces: bool) -> str:
    """The sentence for an exit status; empty if it is 0."""
    if namespaces and status is not None and 128 < status < 128 + signal.NSIG:
        status = 128 - status                        # bubblewrap reports signals as shells do
    if status is None:
        return "it could not be stopped"
    if status >= 0:
        how = "an error that was not caught, sys.exit or os._exit" if status == 1 else "sys.exit or os._exit"
        return f"it ended by itself with exit status {status} ({how})" if status else ""
    cause = "; perhaps this machine ran out of memory" if status == -signal.SIGKILL else ""
    return f"it crashed: {(signal.strsignal(-status) or 'unknown').lower()} (signal {-status}){cause}"


def _ask(question: Callable[[], T], otherwise: T) -> T:
    """What a process answers, or `otherwise` if it is gone or not ours to ask."""
    with suppress(psutil.Error, OSError):
        return question()
    return otherwise


def _of_user(process: psutil.Process, user: int) -> bool:
    return _ask(lambda: bool(process.uids().real == user), False)


def _running(process: psutil.Process) -> bool:
    return _ask(lambda: bool(process.status() != psutil.STATUS_ZOMBIE), False)


def _memory(process: psutil.Process) -> int:
    return _ask(lambda: int(process.memory_info().rss), 0)


def _below(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below a folder, without following symlinks. Unlike os.walk it does not recurse, so that depth is no trap."""
    todo = [str(folder)]
    while todo:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(todo.pop()) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):    # gone meanwhile
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(found.st_mode):
                        todo.append(entry.path)
                    yield entry.path, found


def _size(folder: Path, most: float) -> float:
    """Bytes below a folder, counted until they exceed `most`, a block for each name; infinite if not all can be seen."""
    total = 0
    try:
        for _, found in _below(folder):
            total += 4096 + max(found.st_size, 512 * found.st_blocks)
            if total > most:
                break
    except OSError:
        return math.inf
    return total


def remove(folder: Path) -> None:
    """Remove a folder that other people's code wrote to, however deep it made it (shutil.rmtree recurses)."""
    subprocess.run(["rm", "-rf", "--", str(folder)], check=False, stderr=subprocess.DEVNULL)


def read(scratch: Path, name: str, most: int) -> bytes:
    """The content of a file right in the scratch folder, of at most `most` bytes, that other people's code wrote.

    `CourseError` if it is absent, too large, or anything but a plain file of its own (a symlink, a pipe, a hard link).
    """
    if Path(name).name != name:
        raise CourseError(f"{name}: only files right in the scratch folder are read")
    try:
        # without O_NONBLOCK opening a pipe would wait for its writer
        opened = os.open(scratch / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CourseError(f"{name}: there is no such file, or it is not a plain one ({error.strerror})") from error
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise CourseError(f"{name}: this is not a plain file of its own")
        with open(opened, "rb", closefd=False) as file:
            content = file.read(most + 1)
    finally:
        os.close(opened)
    if len(content) > most:
        raise CourseError(f"{name}: the file has more than {most} bytes")
    return content
