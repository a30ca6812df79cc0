"""Run untrusted code in a separate process, isolated as far as this machine allows, and clean up afterwards.

It uses each layer that the machine has: bubblewrap (own files, processes and network), an unprivileged user (when started as
root), a system call filter, and a watchdog (time, memory, processes, output, disk). The last two alone contain mistakes, not
attacks. Some kernel memory escapes the count: that of pipes and of sockets (at most 4096).
"""

import fcntl
import functools
import grp
import os
import pwd
import secrets
import shutil
import signal
import site
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from course.lab.sandbox import system_call_filter
from course.lab.sandbox.limits import RUN_VARIABLE, Limits, Watchdog, is_running, runs_as
from course.lab.sandbox.namespaces import bubblewrap_arguments
from course.lab.sandbox.process_usage import free_space
from course.lab.sandbox.scratch_folder import SHARED_FOLDERS, files_elsewhere, remove, walk
from course.utils.errors import CourseError

LINUX = sys.platform == "linux"
SANDBOX_USERS = range(60800, 60864)                  # unused according to systemd's list of user IDs
STALE_SECONDS = 86400                                # seconds after which leftovers of a run are stale
LOCK_PLACES = (Path("/run"), Path("/var/lib"))       # possible parents of the lock folder, writable by root alone

# The first program inside: it limits itself, becomes the unprivileged user, and execs the command. It is a separate
# program because a function between fork and exec (preexec_fn) can hang if there are threads.
# The order matters. A process that has changed its user may not write to its /proc any more, and no longer dies with
# its parent until it asks for that again. The filter would refuse some of the calls before it.
SHIM = r"""
import ctypes, os, resource, sys
user, processes, size, keyctl = map(int, sys.argv[1:5])
folder, steps, *command = sys.argv[5:]
def limit(what, most):
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))
limit(resource.RLIMIT_CORE, 0)
limit(resource.RLIMIT_FSIZE, size)
limit(resource.RLIMIT_NOFILE, 1024)
linux = sys.platform == 'linux'
if linux:
    libc = ctypes.CDLL(None)
    limit(resource.RLIMIT_MSGQUEUE, 0)
    keyctl and libc.syscall(keyctl, 1, None)         # a new session keyring; where that is refused, so are the old one's keys
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
    libc.prctl(36, 1, 0, 0, 0)           # its orphans become its children, where the watchdog sees them
    libc.prctl(38, 1, 0, 0, 0)           # no_new_privs
    libc.prctl(1, 9, 0, 0, 0)            # SIGKILL when the parent dies
os.chdir(folder)                         # only now: a root without capabilities may not be let in
if steps:
    class Program(ctypes.Structure):
        _fields_ = [('length', ctypes.c_ushort), ('steps', ctypes.c_char_p)]
    steps = bytes.fromhex(steps)
    if libc.prctl(22, 2, ctypes.byref(Program(len(steps) // 8, steps)), 0, 0):
        sys.exit('the filter of system calls was refused')
os.execvp(command[0], command)
"""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run."""

    ok: bool                                         # it exited with status 0
    ended: str                                       # a sentence why not; "" if ok
    output: str                                      # its output, cut to the limit
    seconds: float
    late: bool = False                               # it exceeded a time limit


@dataclass(frozen=True)
class Layers:
    """The layers of isolation that work on this machine, and why the others do not."""

    namespaces: bool                                 # bubblewrap: own files, processes, network
    user: bool                                       # started as root, and another user can run Python and PyTorch
    why: Mapping[str, str] = field(default_factory=dict)        # absent layer -> why, as a clause

    @property
    def isolates(self) -> bool:
        """Whether code in a run can neither change this user's files nor read the private ones."""
        return self.namespaces or self.user

    def report(self) -> list[str]:
        """A line for each layer."""
        rows = [("namespaces", self.namespaces, "own files, processes and network (bubblewrap)"),
                ("user", self.user, "an unprivileged user, where there is no bubblewrap")]
        lines = [f"{text}: " + ("yes" if has else f"no, {self.why.get(name, 'switched off')}") for name, has, text in rows]
        calls = f"no, {why}" if (why := system_call_filter.why_absent()) else "yes"
        return [*lines, f"a filter of system calls (seccomp): {calls}",
                "limits on time, memory, processes, output and disk (watchdog): yes"]


@functools.cache
def layers() -> Layers:
    """The layers that work here, found once per process by running Python and PyTorch in each (takes seconds)."""
    why = {"namespaces": "bubblewrap is for Linux", "user": "this is for Linux"}
    if LINUX:
        why["namespaces"] = "bubblewrap is not installed: apt-get install bubblewrap"
        if shutil.which("bwrap"):
            why["namespaces"] = _probe(Layers(True, False))
        why["user"] = "not started as root" if os.geteuid() else _probe(Layers(False, True))
    return Layers(not why["namespaces"], not why["user"], {name: clause for name, clause in why.items() if clause})


_layers = layers                                     # `run` has a parameter of this name


def _probe(chosen: Layers) -> str:
    """Why nothing runs in these layers; "" if it does."""
    with tempfile.TemporaryDirectory(prefix="course-probe-") as folder:
        try:
            outcome = run([sys.executable, "-c", "import os, torch; assert os.getuid()"], Path(folder), layers=chosen)
        except (CourseError, OSError) as error:
            return str(error)
    return "" if outcome.ok else f"it does not work here: {(outcome.output.strip() or outcome.ended).splitlines()[-1]}"


def run(command: list[str], scratch: Path, readable: Sequence[Path] = (), environment: Mapping[str, str] | None = None,
        limits: Limits = Limits(), layers: Layers | None = None, begins: str = "") -> Outcome:
    """Run a command in the scratch folder, the only folder that it may write to, until it ends or exceeds a limit.

    begins: an environment variable that gives the command a file descriptor. The command writes a byte there when it has
    started. Its time counts from then on; starting has a separate limit.

    `readable` are further folders that it may read. Its environment is `environment` and a few variables such as HOME, but
    nothing from this process. Started as root, it runs as an unprivileged user, who owns the scratch folder meanwhile; then
    `readable` must be readable by all. Ctrl-C kills the run. With bubblewrap an exit status of 129 or more counts as a signal.
    Raises `CourseError` if a folder is missing or out of that user's reach.
    """
    active_layers = layers or _layers()
    scratch = Path(os.path.abspath(scratch))
    for folder in (scratch, *readable):
        if not folder.is_dir():
            raise CourseError(f"{folder}: there is no such folder to run other people's code with")
    with ExitStack() as stack:
        inner = Path(tempfile.mkdtemp(prefix=".run-", dir=scratch))     # a new one: an earlier run may have left symlinks
        stack.callback(remove, inner)
        for name in ("home", "tmp", "shm"):
            (inner / name).mkdir()
        user = 0
        if active_layers.isolates and os.geteuid() == 0:
            user = stack.enter_context(_unprivileged())
            if not active_layers.namespaces:
                stack.callback(_remove_shared_files, user, scratch)
            _chown_scratch(scratch, user, hidden=active_layers.namespaces)
            stack.callback(os.chown, scratch, 0, 0)  # lock out later runs of the same user
        full_command = [sys.executable, "-I", "-S", "-c", SHIM, str(user), str(_thread_limit(user, limits)),
                 str(round(limits.disk * 1e9)), str(system_call_filter.keyctl_number()), str(scratch),
                 system_call_filter.filter_program().hex(), *command]
        mark = secrets.token_hex(8)
        variables = _variables(inner, active_layers) | dict(environment or {}) | {RUN_VARIABLE: mark}
        start_pipe, child_end = _pipe(stack) if begins else (None, None)
        if child_end is not None:
            variables[begins] = str(child_end)
        free_before = free_space([str(scratch), *(SHARED_FOLDERS if user and not active_layers.namespaces else [])])
        if active_layers.namespaces:
            full_command = ["bwrap", *bubblewrap_arguments(scratch, inner, readable, user > 0), "--", *full_command]
        start = time.monotonic()
        process = subprocess.Popen(full_command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, start_new_session=True,
                                   pass_fds=[] if child_end is None else [child_end])
        assert process.stdout
        pipe = stack.enter_context(process.stdout).fileno()
        watchdog = Watchdog(process, pipe, scratch, limits, mark, user, start, 2 * active_layers.namespaces,
                           {psutil.Process(process.pid)},
                          start_pipe, free_before=free_before)
        try:
            stop_reason = watchdog.wait()
        finally:
            watchdog.stop()
        seconds = time.monotonic() - start
        watchdog.read_output(1.0)
        stop_reason = stop_reason or watchdog.exceeded_output() or _describe_exit(process.returncode, active_layers.namespaces)
        return Outcome(not stop_reason, stop_reason, watchdog.output.decode(errors="replace"), seconds, watchdog.late)


def _variables(inner: Path, has: Layers) -> dict[str, str]:
    """The environment of a run. It takes nothing from this process's environment, which may hold passwords."""
    home, temporary = str(inner / "home"), "/tmp" if has.namespaces else str(inner / "tmp")
    found = {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8",
             "HOME": home, "TMPDIR": temporary, "MPLCONFIGDIR": home,
             "USER": "learner",                      # PyTorch asks for a name, and the run's user may have none
             "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if site.ENABLE_USER_SITE:                        # otherwise derived from HOME
        found["PYTHONUSERBASE"] = site.getuserbase()
    return found


@contextmanager
def _unprivileged() -> Iterator[int]:
    """Reserve a user and group ID without an account or process, that no other run on this machine uses."""
    folder = _lock_folder()
    for number in SANDBOX_USERS:
        with open(folder / str(number), "w") as claim:
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)        # released when this process ends
            except OSError:
                continue
            if _is_unused(number) and _remove_stale_files(number):
                yield number
                return
    raise CourseError(f"all of the users {SANDBOX_USERS[0]} to {SANDBOX_USERS[-1]} are busy on this machine, or have files of "
                      "today in /tmp or /dev/shm: run fewer answers at a time")


def _lock_folder() -> Path:
    """The folder with a lock file per user ID. Only root has access: others could lock them all."""
    for parent in LOCK_PLACES:
        folder = parent / "course-sandbox"
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            places = [path.lstat() for path in (folder, parent)]
            if all(stat.S_ISDIR(place.st_mode) and place.st_uid == 0 for place in places) and not (
                    places[0].st_mode & 0o077 or places[1].st_mode & 0o022):
                return folder
    raise CourseError(f"no folder that only root can write to could be made in {' or '.join(map(str, LOCK_PLACES))}, to tell "
                      "which users are taken: make one of them writable for root only")


def _remove_shared_files(user: int, scratch: Path) -> None:
    """Remove the user's files from shared folders such as /tmp."""
    remove(*files_elsewhere(user, scratch))


def _remove_stale_files(user: int) -> bool:
    """Remove a user's stale files from shared folders; returns False if newer files remain. Those may belong to a run in
    another container; a run whose watchdog was killed left the stale ones."""
    for path in files_elsewhere(user):
        with suppress(FileNotFoundError):
            if time.time() - path.lstat().st_ctime < STALE_SECONDS:
                return False
            remove(path)
    return True


def _pipe(stack: ExitStack) -> tuple[int, int]:
    """Open a pipe (reading end, writing end) that the stack closes."""
    ends = os.pipe()
    for end in ends:
        stack.callback(os.close, end)
    return ends


def _is_unused(number: int) -> bool:
    for find in (pwd.getpwuid, grp.getgrgid):
        with suppress(KeyError):
            find(number)
            return False
    return not any(runs_as(process, number) and is_running(process) for process in psutil.process_iter())


def _chown_scratch(scratch: Path, user: int, hidden: bool) -> None:
    """Give everything in the scratch folder to the user, except files with hard links elsewhere."""
    closed = [folder for folder in scratch.parents if not folder.stat().st_mode & stat.S_IXOTH]
    if closed and not hidden:
        raise CourseError(f"{scratch}: user {user} cannot enter it, because {closed[-1]} is closed to others: set TMPDIR to "
                          "another folder")
    for path, status in walk(scratch):
        if stat.S_ISDIR(status.st_mode) or status.st_nlink == 1:
            os.chown(path, user, user, follow_symlinks=False)
    os.chown(scratch, user, user)
    scratch.chmod(0o700)


def _thread_limit(user: int, limits: Limits) -> int:
    """The kernel's limit on the user's threads, a backstop to the watchdog; 0 for root, who has no such limit."""
    if user:
        return 256 + 8 * limits.processes
    if os.geteuid() == 0:
        return 0
    mine = [process for process in psutil.process_iter(["num_threads"]) if runs_as(process, os.getuid())]
    return 4096 + sum(process.info.get("num_threads") or 1 for process in mine)


def _describe_exit(status: int | None, namespaces: bool) -> str:
    """A sentence about an exit status; "" if it is 0."""
    if namespaces and status is not None and 128 < status < 128 + signal.NSIG:
        status = 128 - status                        # bubblewrap reports signals as shells do
    if status is None:
        return "it could not be stopped"
    if status >= 0:
        how = "an error that was not caught, sys.exit or os._exit" if status == 1 else "sys.exit or os._exit"
        return f"it ended by itself with exit status {status} ({how})" if status else ""
    cause = "; perhaps this machine ran out of memory" if status == -signal.SIGKILL else ""
    return f"it crashed: {(signal.strsignal(-status) or 'unknown').lower()} (signal {-status}){cause}"

