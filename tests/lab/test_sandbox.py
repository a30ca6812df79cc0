"""Each set of layers that this machine has is put to the same tests; those that need bubblewrap follow, then `read`."""

import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from course.lab.sandbox import limits, namespaces, process_usage, sandbox, system_call_filter
from course.lab.sandbox.limits import Limits
from course.lab.sandbox.sandbox import Layers, Outcome
from course.lab.sandbox.scratch_folder import read_untrusted, remove
from course.utils.errors import CourseError

ROOT = os.geteuid() == 0
SLACK = 5.0                                          # seconds within which `run` returns once it has given up


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Not pytest's tmp_path, whose parents are closed to the unprivileged user."""
    folder = Path(tempfile.mkdtemp(prefix="course-test-"))
    yield folder
    remove(folder)


@pytest.fixture(params=["bubblewrap", "user", "watchdog"])
def layers(request: pytest.FixtureRequest) -> Layers:
    has = sandbox.layers()
    if request.param == "bubblewrap":
        return needed(has, "namespaces")
    if request.param == "user":
        return dataclasses.replace(needed(has, "user"), namespaces=False)
    return dataclasses.replace(has, namespaces=False, user=False)


@pytest.fixture
def bubblewrap() -> Layers:
    return needed(sandbox.layers(), "namespaces")


def needed(has: Layers, name: str) -> Layers:
    if not getattr(has, name):
        pytest.skip(f"{name}: {has.why[name]}")
    return has


def run(scratch: Path, source: str, layers: Layers, *arguments: object, readable: tuple[Path, ...] = (),
        environment: dict[str, str] | None = None, **limits: float) -> Outcome:
    """Run a script; it and its children have the scratch folder in their command line, by which `left` finds them."""
    (scratch / "job.py").write_text(textwrap.dedent(source))
    command = [sys.executable, str(scratch / "job.py"), *map(str, arguments)]
    return sandbox.run(command, scratch, readable, environment, Limits(**{"seconds": 20.0, **limits}), layers)


def left(scratch: Path) -> list[psutil.Process]:
    """Processes of a run that are still there."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(scratch) in word for word in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


# every set of layers


def test_output_and_files_come_back(scratch, layers):
    (scratch / "given.txt").write_text("given")
    outcome = run(scratch, """
        import os, sys, tempfile
        print("out", open("given.txt").read(), *sys.argv[1:], flush=True)
        print("err \\udcff", file=sys.stderr)
        open("made.txt", "w").write(os.environ["EXTRA"])
        open("given.txt", "a").write(" back")
        open(os.path.expanduser("~/file"), "w").close()
        tempfile.TemporaryFile().close()
        print(sys.stdin.read() == "", os.getcwd())
        """, layers, "argument", environment={"EXTRA": "extra"})
    assert outcome.ok and outcome.ended == "", outcome
    assert outcome.output == f"out given argument\nerr \\udcff\nTrue {scratch}\n"
    assert read_untrusted(scratch, "made.txt", 5) == b"extra"
    assert read_untrusted(scratch, "given.txt", 100) == b"given back"
    assert 0 < outcome.seconds < 10
    assert {path.name for path in scratch.iterdir()} == {"job.py", "given.txt", "made.txt"}


def test_bytes_that_are_not_text_are_shown_and_output_is_cut(scratch, layers):
    outcome = run(scratch, "import os; os.write(1, b'a\\xff' + 300 * b'x')", layers, output=100)
    assert outcome.ok and outcome.output == "a\N{REPLACEMENT CHARACTER}" + 98 * "x"


def test_time_counts_from_when_it_has_begun(scratch, layers):
    def timed(source: str, **limits: float) -> Outcome:
        command = [sys.executable, "-c", f"import time; {source}"]
        return sandbox.run(command, scratch, limits=Limits(**limits), layers=layers, begins="BEGUN")

    begin = "import os; os.write(int(os.environ['BEGUN']), b'.')"
    slow = timed(f"time.sleep(2); {begin}; time.sleep(0.1)", seconds=1.5)
    assert slow.ok and not slow.late and slow.seconds > 2
    endless = timed(f"{begin}; os.close(int(os.environ['BEGUN'])); time.sleep(60)", seconds=1)
    assert endless.late and endless.ended == "it ran for more than 1 seconds and was stopped"
    never = timed("time.sleep(60)", starting=1)
    assert never.late and never.ended.startswith("it had not started after 1 seconds")


def test_an_endless_loop_is_stopped(scratch, layers):
    start = time.monotonic()
    outcome = run(scratch, "print('begun')\nwhile True: pass", layers, seconds=1)
    assert not outcome.ok and outcome.ended == "it ran for more than 1 seconds and was stopped"
    assert outcome.output == "begun\n" and 1 < time.monotonic() - start < 1 + SLACK
    assert not left(scratch)


@pytest.mark.parametrize(("source", "ended"), [
    ("import sys; sys.exit(3)", "it ended by itself with exit status 3 (sys.exit or os._exit)"),
    ("import os; os._exit(4)", "it ended by itself with exit status 4 (sys.exit or os._exit)"),
    ("1 / 0", "it ended by itself with exit status 1 (an error that was not caught, sys.exit or os._exit)"),
    ("import os; os.abort()", "it crashed: aborted (signal 6)"),
    ("import ctypes; ctypes.string_at(0)", "it crashed: segmentation fault (signal 11)"),
    ("import os; os.kill(os.getpid(), 9)", "it crashed: killed (signal 9); perhaps this machine ran out of memory")])
def test_other_ends_have_their_sentence(scratch, layers, source, ended):
    outcome = run(scratch, source, layers)
    assert not outcome.ok and outcome.ended == ended
    assert ("ZeroDivisionError" in outcome.output) == (source == "1 / 0")


def test_too_many_processes(scratch, layers):
    outcome = run(scratch, """
        import os, time
        for _ in range(40):
            if os.fork() == 0:
                time.sleep(60)
        time.sleep(60)
        """, layers, processes=16)
    assert outcome.ended == "it started more than 16 processes and was stopped"
    assert not left(scratch)


def test_as_many_processes_as_allowed(scratch, layers):
    outcome = run(scratch, """
        import os, time
        children = [os.fork() or (time.sleep(0.5), os._exit(0)) for _ in range(15)]
        print(sum(os.waitpid(child, 0)[1] for child in children))
        """, layers, processes=16)
    assert outcome.ok and outcome.output == "0\n", outcome


def test_too_much_memory(scratch, layers):
    source = """
        import os, time
        for _ in range(3):
            os.fork()                    # eight processes, each within the limit
        mine = b"x" * int(1e8)
        time.sleep({seconds})
        """
    outcome = run(scratch, source.format(seconds=60), layers, gigabytes=0.5)
    assert outcome.ended == "it took more than 0.5 GB of memory and was stopped"
    assert not left(scratch)
    assert run(scratch, source.format(seconds=0.5), layers, gigabytes=3).ok


def test_endless_printing(scratch, layers):
    outcome = run(scratch, "while True: print(1000 * 'x')", layers, output=50_000)
    assert outcome.ended == "it printed more than 1 MB and was stopped"
    assert len(outcome.output) == 50_000
    assert not left(scratch)


@pytest.mark.parametrize(("where", "more"), [
    ("many", ""), (".", ""), ("/tmp", ""), ("/dev/shm", ""), ("one", ""), ("one", "done")])
def test_a_full_disk(scratch, layers, where, more):
    if where.startswith("/") and not layers.isolates:
        pytest.skip("of this user's own files only those in the scratch folder are the run's")
    outcome = run(scratch, """
        import os, sys, time
        where, more = sys.argv[1:]
        os.makedirs(where if where != "one" else "folder", exist_ok=True)
        for number in range(100):
            if where == "one":
                try:
                    open("folder/file", "ab").write(bytes(1_000_000))
                except OSError:          # the limit on a file's size
                    break
            else:
                open(f"{where}/{number}", "wb").write(bytes(1_000_000))
            time.sleep(0.001)
        time.sleep(0 if more else 60)
        """, layers, where, more, disk=0.02)
    assert outcome.ended.startswith("it wrote more than 0.02 GB to disk"), outcome
    size = sum(path.lstat().st_size for path in scratch.rglob("*"))
    assert size < 110e6 if where != "one" else size < 21e6
    assert not left(scratch)
    if where.startswith("/"):
        assert not any(path.name.isdigit() for path in Path(where).iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that tells what a process holds")
@pytest.mark.parametrize("how", ["open", "mapped", "cut", "thread", "sent", pytest.param("twice", marks=pytest.mark.slow)])
def test_deleted_files_count(scratch, layers, how):
    """Held open; only mapped, of each file a page; by a process whose first thread has ended; in a socket's buffer, or in that of
    a socket that is in one; shared memory without a name, of which a page is left."""
    program = """
        import ctypes, mmap, os, socket, sys, threading, time
        how, libc = sys.argv[1], ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        pairs = []
        for number in range(40):
            size = 5_000_000 // 4096 * 4096
            if how == "cut":
                place = libc.mmap(None, size, 3, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, -1, 0)
                ctypes.memset(place, 1, size)
                libc.munmap(place + 4096, size - 4096)
                continue
            file = os.open("file", os.O_RDWR | os.O_CREAT)
            os.unlink("file")
            os.write(file, bytes(size))
            if how == "mapped":
                libc.mmap(None, 4096, 1, mmap.MAP_SHARED, file, 0)
            if how in ("sent", "twice"):
                pairs.append(socket.socketpair())
                socket.send_fds(pairs[-1][0], [b"x"], [file])
            if how == "twice":
                outer = socket.socketpair()
                socket.send_fds(outer[0], [b"x"], [end.fileno() for end in pairs[-1]])
                pairs[-1] = outer
            if how not in ("open", "thread"):
                os.close(file)
        print("written")
        if how == "thread":
            threading.Thread(target=time.sleep, args=(60,)).start()
            libc.syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
        time.sleep(60)
        """
    for _ in range(3 if how in ("sent", "twice") else 1):        # of these the disk tells, unless others free as much meanwhile
        outcome = run(scratch, program, layers, how, disk=0.05)
        if not outcome.late:
            break
    assert outcome.ended.startswith("it wrote more than 0.05 GB to disk"), outcome
    assert outcome.seconds < 15 and not left(scratch)


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that tells what a process holds")
def test_deleted_files_within_the_limit_are_fine(scratch, layers):
    outcome = run(scratch, """
        import mmap, tempfile, time
        with tempfile.TemporaryFile() as file:
            file.write(bytes(10_000_000)), file.flush()
            kept = [mmap.mmap(file.fileno(), 0) for _ in range(10)]      # one file, however often it is mapped
            time.sleep(2.5)
        """, layers, disk=0.05)
    assert outcome.ok, outcome


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that tells what a process holds")
def test_page_tables_are_memory(scratch, layers):
    """Reading one byte of every 2 MB of nothing: no page is taken, and a table of 4 kB for each."""
    outcome = run(scratch, """
        import ctypes, mmap, time
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
        place = libc.mmap(None, 1 << 39, 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, -1, 0)
        read = ctypes.c_char.from_address
        for offset in range(0, 1 << 39, 1 << 21):
            read(place + offset).value
        time.sleep(60)
        """, layers, gigabytes=0.5)
    assert outcome.ended == "it took more than 0.5 GB of memory and was stopped", outcome


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that tells what a process holds")
def test_too_many_open_files(scratch, layers):
    outcome = run(scratch, """
        import os, resource, time
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[1] <= 1024, flush=True)
        pipes = [os.pipe() for _ in range(50)]
        os.fork(), os.fork()
        time.sleep(60)
        """, layers, files=300)
    assert outcome.ended == "it opened more than 300 files at the same time and was stopped"
    assert outcome.output == "True\n"


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that tells what a process holds")
def test_a_look_at_what_is_held_has_an_end(scratch, layers, monkeypatch):
    monkeypatch.setattr(process_usage, "SCAN_SECONDS", 0.1)
    outcome = run(scratch, """
        import ctypes, mmap, os, time
        libc, file = ctypes.CDLL(None), os.open("file", os.O_RDWR | os.O_CREAT)
        os.ftruncate(file, 1 << 20), os.unlink("file")
        for number in range(20_000):     # one page, and another one, so that no two make one piece
            libc.mmap(None, 4096, 1, mmap.MAP_SHARED, file, 4096 * (number % 2))
        for _ in range(4):
            os.fork()
        time.sleep(60)
        """, layers)
    assert outcome.ended == "it has more files and pieces of memory than can be looked through, and was stopped", outcome


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads are not seen so")
def test_a_process_whose_first_thread_ended_runs():
    program = ("import ctypes, os, threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); print(flush=True); "
               "ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)")
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        found = psutil.Process(process.pid)
        process.stdout.readline()
        wait_for(lambda: found.status() == psutil.STATUS_ZOMBIE)
        assert limits.is_running(found) and process_usage.memory_bytes(found.pid) > 1e6
        process.kill()
        wait_for(lambda: not limits.is_running(found))


filtered = pytest.mark.skipif(bool(system_call_filter.why_absent()), reason=system_call_filter.why_absent() or "-")


@filtered
def test_calls_are_refused(scratch, layers):
    """Each by its number, and what takes a part of a call's uses; what honest answers need is not among them."""
    column = ["x86_64", "aarch64"].index(os.uname().machine)
    numbers = {name: pair[column] for name, pair in system_call_filter.REFUSED.items() if pair[column] != system_call_filter.NONE}
    clone, close_range = system_call_filter.CLONE[column], system_call_filter.CLOSE_RANGE[column]
    outcome = run(scratch, f"""
        import ctypes, errno, fcntl, mmap, multiprocessing.shared_memory, os, platform, socket, subprocess, threading
        libc = ctypes.CDLL(None, use_errno=True)
        def call(*arguments):
            ctypes.set_errno(0)
            return errno.errorcode.get(ctypes.get_errno()) if libc.syscall(*map(ctypes.c_long, arguments)) < 0 else "done"
        for name, number in {numbers}.items():
            if (got := call(number, 0, 0, 0, 0, 0, 0)) != "ENOSYS":
                print(name, got)
        for flag in (17, 25, 26, 27, 28, 29, 30):
            print(call({clone}, 1 << flag | 17, 0, 0, 0, 0), end=" ")
        print(call({clone}, 0x10900, 0, 0, 0, 0), call({close_range}, 1000, 1001, 2))
        for family in (9, 17, 21, 30, 31, 38, 40, 44):
            for make in (socket.socket, socket.socketpair):
                try:
                    print(make(family, socket.SOCK_STREAM if family != 17 else socket.SOCK_DGRAM), end=" ")
                except OSError as error:
                    print(error.errno == errno.EAFNOSUPPORT, end=" ")
        try:
            fcntl.ioctl(0, 0x5412, b"x")
        except OSError as error:
            print(error.errno == errno.EPERM)
        if platform.machine() == "x86_64":       # a call by the numbers of 32-bit programs: getpid
            code = mmap.mmap(-1, 4096, prot=7)
            code.write(bytes.fromhex("b814000000cd80c3"))
            print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))() == -errno.ENOSYS)
        # and what is needed goes on working
        socket.socketpair(), socket.socket(socket.AF_INET6), socket.if_nameindex()
        (thread := threading.Thread(target=print, args=("thread",))).start(), thread.join()
        ended = subprocess.run(["echo", "process"], capture_output=True, text=True)
        print(ended.stdout.strip(), call({close_range}, 1000, 1001, 0))
        memory = multiprocessing.shared_memory.SharedMemory(create=True, size=10)
        memory.close(), memory.unlink()
        """, layers)
    assert outcome.ok, outcome
    lines = outcome.output.splitlines()
    assert lines[:2] == [" ".join(9 * ["EPERM"]), " ".join(17 * ["True"])], outcome
    assert set(lines[2:]) == {"thread", "process done", *(["True"] if column == 0 else [])}, outcome


@filtered
def test_the_parents_keys_are_out_of_reach(scratch, layers):
    """A key in the session keyring of whoever starts a run; skipped where this machine has no keys."""
    outer = f"""
        import ctypes, sys
        from pathlib import Path
        from course.lab.sandbox import sandbox
        libc = ctypes.CDLL(None, use_errno=True)
        add = {system_call_filter.REFUSED["add_key"]}[{["x86_64", "aarch64"].index(os.uname().machine)}]
        new = libc.syscall({system_call_filter.keyctl_number()}, 1, None)
        if new < 0 or libc.syscall(add, b"user", b"course-canary", b"abracadabra", 11, -3) < 0:
            sys.exit("no keys here")
        scratch, *flags = sys.argv[1:]
        print(sandbox.run([sys.executable, scratch + "/job.py"], Path(scratch), layers=sandbox.Layers(*map(int, flags))).output)
        """
    (scratch / "job.py").write_text(textwrap.dedent(f"""
        import ctypes
        libc, into = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(100)
        number = {system_call_filter.keyctl_number()}
        found = libc.syscall(number, 10, -3, b"user", b"course-canary", 0)
        print("reading", libc.syscall(number, 11, found, into, 100), into.value)
        try:
            print("course-canary" in open("/proc/keys").read())  # without isolation names can be seen, and nothing more
        except PermissionError:
            print(False)
        """))
    flags = [str(int(layers.namespaces)), str(int(layers.user))]
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(outer), str(scratch), *flags], capture_output=True, text=True,
                          cwd=Path(sandbox.__file__).parents[3], check=False)
    if "no keys here" in done.stderr:
        pytest.skip("this machine has no keys, or forbids them")
    assert done.stdout.split("\n")[0] == "reading -1 b''", done
    assert "False" in done.stdout or not layers.isolates, done


def test_a_deep_folder_and_its_removal(scratch, layers):
    outcome = run(scratch, """
        import os
        for _ in range(3000):
            os.mkdir("d")
            os.chdir("d")
        """, layers)
    assert outcome.ended.startswith("it wrote more than") and "cannot be looked through" in outcome.ended
    remove(scratch)
    assert not scratch.exists()


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("hold", [False, True])
def test_a_daemon_does_not_outlive_its_run(scratch, layers, hold, clean):
    """One that keeps stdout open, or not; that drops the mark from its environment, or not."""
    start = time.monotonic()
    outcome = run(scratch, """
        import os, sys, time
        hold, clean = map(int, sys.argv[1:])
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                if not hold:
                    os.close(1), os.close(2)
                if clean:
                    os.execve(sys.executable, ["python", "-c", "import time; time.sleep(60)", sys.argv[0]], {})
                time.sleep(60)
            os._exit(0)
        os.wait()
        print("parent")
        time.sleep(1.5 if clean else 0)
        """, layers, int(hold), int(clean))
    assert outcome.ok and outcome.output == "parent\n", outcome
    assert time.monotonic() - start < 2 + SLACK
    assert not left(scratch)


def test_the_time_limit_holds_for_a_family(scratch, layers):
    start = time.monotonic()
    outcome = run(scratch, """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
        while True:
            time.sleep(0.1)
            print("still here")
        """, layers, seconds=1)
    assert outcome.ended.startswith("it ran for more than 1 seconds")
    assert time.monotonic() - start < 1 + SLACK and not left(scratch)


def test_nothing_of_the_parents_environment(scratch, layers, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "abracadabra")
    outcome = run(scratch, """
        import glob, os
        print(*os.environ)
        print(os.environ["OMP_NUM_THREADS"], os.environ["MARKED"])
        for path in glob.glob("/proc/self/environ") + glob.glob("/proc/1/environ"):
            try:
                print(open(path).read())
            except OSError:
                pass
        """, layers, environment={"MARKED": "given", "COURSE_SANDBOX": "another"})
    assert outcome.ok and "1 given\n" in outcome.output
    names = set(outcome.output.splitlines()[0].split())
    assert names <= {"PATH", "LANG", "HOME", "USER", "TMPDIR", "MPLCONFIGDIR", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED",
                     "OMP_NUM_THREADS", "MKL_NUM_THREADS", "COURSE_SANDBOX", "MARKED", "PWD", "LC_CTYPE", "PYTHONUSERBASE"}
    assert "abracadabra" not in outcome.output and "COURSE_SANDBOX=another" not in outcome.output


def test_the_runs_user_has_a_name(scratch, layers):
    """PyTorch asks for it to name its cache, and an ID without an account has none."""
    assert run(scratch, "import getpass; print(getpass.getuser())", layers).output == "learner\n"


def test_two_at_once(scratch, layers):
    folders = [scratch / "a", scratch / "b"]
    scratch.chmod(0o755)
    for folder in folders:
        folder.mkdir()
    source = "import os, time; time.sleep(1.5); print(os.getuid())"
    start = time.monotonic()
    with ThreadPoolExecutor() as pool:
        outcomes = list(pool.map(lambda folder: run(folder, source, layers), folders))
    assert time.monotonic() - start < 2.8
    assert all(outcome.ok for outcome in outcomes), outcomes
    users = {int(outcome.output) for outcome in outcomes}
    assert len(users) == (2 if ROOT and layers.isolates else 1)
    assert (os.getuid() in users) == (not (ROOT and layers.isolates))


def test_one_of_two_is_stopped_and_the_other_goes_on(scratch, layers):
    folders = [scratch / "a", scratch / "b"]
    scratch.chmod(0o755)
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor() as pool:
        long = pool.submit(run, folders[0], "import time; time.sleep(2); print('whole')", layers)
        short = pool.submit(run, folders[1], "import time; time.sleep(60)", layers, seconds=0.5)
        assert "0.5 seconds" in short.result().ended and long.result().output == "whole\n"


def test_an_interrupt_ends_the_run(scratch, layers, interruptible):
    seen = []

    def interrupt() -> None:
        wait_for((scratch / "running").exists)
        seen.extend(left(scratch))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run(scratch, """
            import os, time
            os.fork()
            open("running", "w").close()
            time.sleep(60)
            """, layers)
    assert len(seen) >= 2, "the test itself: the run's processes were not found"
    assert not left(scratch)
    assert {path.name for path in scratch.iterdir()} == {"job.py", "running"}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_the_run_dies_with_its_parent(scratch, layers):
    parent = """
        import sys
        from pathlib import Path
        from course.lab.sandbox import sandbox
        program = f"open('running', 'w').close(); import time; time.sleep(60); '{sys.argv[1]}'"
        sandbox.run([sys.executable, "-c", program], Path(sys.argv[1]), layers=sandbox.Layers(*map(int, sys.argv[2:])))
        """
    flags = [str(int(layers.namespaces)), str(int(layers.user))]
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(parent), str(scratch), *flags],
                               cwd=Path(sandbox.__file__).parents[3])
    wait_for((scratch / "running").exists)
    assert len(left(scratch)) >= 2, "the test itself: the run's processes were not found"
    process.kill()
    process.wait()
    wait_for(lambda: not left(scratch))


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_scratch_folder_serves_twice(scratch, layers):
    """What one run left, symlinks for the next to stumble over included, the next can change but not pass by."""
    first = run(scratch, """
        import os
        os.mkdir("folder")
        open("folder/file", "w").write("one")
        os.symlink("/etc", "link")
        os.symlink("/etc/passwd", "tmp")
        """, layers)
    owner = os.stat("/etc/passwd").st_uid
    second = run(scratch, "open('folder/file', 'a').write(' two'); print(open('folder/file').read())", layers)
    assert first.ok and second.ok and second.output == "one two\n"
    assert os.stat("/etc").st_uid == os.stat("/etc/passwd").st_uid == owner
    assert scratch.stat().st_uid == os.getuid()


def test_an_unknown_command_and_absent_folders(scratch, layers):
    outcome = sandbox.run(["no-such-program"], scratch, layers=layers)
    assert not outcome.ok and "FileNotFoundError" in outcome.output
    for folder, readable in ((scratch / "absent", ()), (scratch, (scratch / "absent",))):
        with pytest.raises(CourseError, match=r"absent: there is no such folder"):
            sandbox.run([sys.executable, "-c", ""], folder, readable, layers=layers)


def test_privileges_are_gone_and_the_kernel_limits_stand(scratch, layers):
    outcome = run(scratch, """
        import resource
        status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
        print(status["NoNewPrivs"], *[int(status[name], 16) for name in ("CapPrm", "CapEff", "CapAmb")])
        print(open("/proc/self/oom_score_adj").read().strip(), resource.getrlimit(resource.RLIMIT_CORE)[1],
              resource.getrlimit(resource.RLIMIT_FSIZE)[1], resource.getrlimit(resource.RLIMIT_NPROC)[1])
        """, layers, disk=0.5, processes=10)
    first, second = outcome.output.splitlines()
    assert first.startswith("1 ")
    if layers.isolates or not ROOT:
        assert first == "1 0 0 0"
        assert second.startswith("1000 0 500000000 ")
    if ROOT and layers.isolates:
        assert second.endswith(" 336")


def works(command: list[str], **options: Any) -> bool:
    try:
        return not subprocess.run(command, capture_output=True, timeout=60, **options).returncode
    except PermissionError:
        return False


def test_layers_that_work_are_found():
    """Or all tests of a layer would be skipped once it broke."""
    has = sandbox.layers()
    if shutil.which("bwrap"):
        plain = ["bwrap", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true"]
        assert has.namespaces == works(plain), has.why
    if ROOT and sys.platform == "linux":
        alone = works([sys.executable, "-c", "import torch"], user=60700, group=60700, extra_groups=[], cwd="/", env={})
        assert has.user == alone, has.why


def test_layers_say_what_is_there(monkeypatch):
    has = Layers(False, False, {"namespaces": "bubblewrap is not installed", "user": "not started as root"})
    assert not has.isolates
    assert dataclasses.replace(has, namespaces=True).isolates and dataclasses.replace(has, user=True).isolates
    first, second, third, fourth = has.report()
    assert "no, bubblewrap is not installed" in first and "no, not started as root" in second and fourth.endswith("yes")
    assert third.startswith("a filter of system calls (seccomp): ")
    assert Layers(True, True).report()[0].endswith("(bubblewrap): yes")
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    monkeypatch.setattr(sandbox.os, "geteuid", lambda: 1000)
    probed = sandbox.layers.__wrapped__()
    assert not probed.isolates and "apt-get install bubblewrap" in probed.why["namespaces"]
    assert probed.why["user"] == ("not started as root" if sys.platform == "linux" else "this is for Linux")


as_root = pytest.mark.skipif(not ROOT or sys.platform != "linux", reason="it takes root, on Linux, to run as another user")


@as_root
def test_a_user_serves_one_run_at_a_time(monkeypatch):
    monkeypatch.setattr(sandbox, "SANDBOX_USERS", range(60861, 60863))
    with sandbox._unprivileged() as first, sandbox._unprivileged() as second:
        assert {first, second} == {60861, 60862}
        with pytest.raises(CourseError, match="busy on this machine"), sandbox._unprivileged():
            pass
    monkeypatch.setattr(sandbox, "SANDBOX_USERS", range(2))
    with pytest.raises(CourseError), sandbox._unprivileged():        # root and daemon have accounts
        pass


@as_root
def test_a_users_files_are_removed_or_keep_it_busy(scratch, monkeypatch):
    """After a run all of them; those of a run that was killed when they are old; a busy user's never."""
    layers = dataclasses.replace(needed(sandbox.layers(), "user"), namespaces=False)
    monkeypatch.setattr(sandbox, "SANDBOX_USERS", range(60861, 60862))
    names = [f"{place}/{scratch.name}.left" for place in ("/tmp", "/var/tmp", "/dev/shm")]
    outcome = run(scratch, """
        import os, sys
        for name in sys.argv[1:]:
            os.mkdir(name)
            open(f"{name}/file", "w").close()
            os.chmod(name, 0)
        print(os.getuid())
        """, layers, *names)
    assert outcome.output == "60861\n" and not any(map(os.path.lexists, names)), outcome
    Path(names[0]).touch()
    os.chown(names[0], 60861, 60861)
    try:
        with pytest.raises(CourseError, match="busy on this machine"), sandbox._unprivileged():
            pass
        monkeypatch.setattr(sandbox, "STALE_SECONDS", -1)
        with sandbox._unprivileged():
            assert not os.path.lexists(names[0])
    finally:
        Path(names[0]).unlink(missing_ok=True)


@as_root
def test_others_cannot_take_all_users(monkeypatch, tmp_path):
    """Neither by names that every user may bind, nor by files in a folder that is not root's alone."""
    monkeypatch.setattr(sandbox, "SANDBOX_USERS", range(60861, 60862))
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind("\0course-sandbox-60861")
        with sandbox._unprivileged() as user:
            assert user == 60861
    tmp_path.chmod(0o755)
    (theirs := tmp_path / "theirs").mkdir(0o700)
    os.chown(theirs, 60862, 60862)
    (linked := tmp_path / "linked").mkdir(0o755)
    (linked / "course-sandbox").symlink_to(theirs)
    (opened := tmp_path / "opened").mkdir()
    opened.chmod(0o1777)
    (used := tmp_path / "used").mkdir(0o755)
    (used / "course-sandbox").mkdir()
    (used / "course-sandbox").chmod(0o755)
    monkeypatch.setattr(sandbox, "LOCK_PLACES", (theirs, linked, opened, used, tmp_path / "absent"))
    with pytest.raises(CourseError, match=r"no folder that only root can write to.*theirs or .*linked"), sandbox._unprivileged():
        pass
    monkeypatch.setattr(sandbox, "LOCK_PLACES", (opened, tmp_path))
    with sandbox._unprivileged():
        assert (tmp_path / "course-sandbox" / "60861").exists()


# bubblewrap


def test_no_network_but_loopback(scratch, layers):
    """Without bubblewrap the same connection succeeds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        outcome = run(scratch, """
            import socket, sys
            try:
                socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5).close()
                print("connected")
            except OSError as error:
                print(type(error).__name__)
            with socket.create_server(("127.0.0.1", 0)) as own:
                socket.create_connection(own.getsockname()).close()
                own.accept()[0].close()
            print(*[name for _, name in socket.if_nameindex()])
            """, layers, server.getsockname()[1])
    assert outcome.ok, outcome
    if layers.namespaces:
        assert outcome.output == "ConnectionRefusedError\nlo\n"
    else:
        assert outcome.output.startswith("connected\n")


def test_the_parents_files_are_not_there(scratch, layers):
    """Without bubblewrap, another user still reads what is open to all; the same user reads everything."""
    shared = Path(tempfile.mkdtemp(prefix="course-test-"))
    shared.chmod(0o755)
    try:
        for name, mode in (("private", 0o600), ("public", 0o644)):
            (shared / name).write_text(name)
            (shared / name).chmod(mode)
        outcome = run(scratch, """
            import os, sys
            repository, shared = sys.argv[1:]
            for path in (f"{shared}/private", f"{shared}/public", f"{repository}/pyproject.toml"):
                try:
                    print(len(open(path).read()) > 0)
                except OSError as error:
                    print(type(error).__name__)
            """, layers, Path(sandbox.__file__).parents[3], shared)
    finally:
        remove(shared)
    seen = outcome.output.split()
    if layers.namespaces:
        assert seen == 3 * ["FileNotFoundError"]
    elif ROOT and layers.user:
        assert seen[:2] == ["PermissionError", "True"]
    else:
        assert seen == 3 * ["True"]


def test_the_package_comes_from_where_it_is_readable(scratch, bubblewrap):
    look = "import importlib.util as u; found = u.find_spec('course'); print(found and found.origin)"
    assert run(scratch, look, bubblewrap).output == "None\n"
    copy = Path(tempfile.mkdtemp(prefix="course-test-"))
    try:
        (copy / "course").mkdir()
        (copy / "course" / "__init__.py").touch()
        for path in (copy, *copy.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        outcome = run(scratch, f"{look}\nimport sys; open(sys.argv[1] + '/new', 'w')", bubblewrap, copy, readable=(copy,),
                      environment={"PYTHONPATH": str(copy)})
        assert outcome.output.startswith(f"{copy}/course/__init__.py\n") and "Read-only file system" in outcome.output
    finally:
        remove(copy)


def test_a_package_among_others_is_masked(tmp_path, scratch, bubblewrap, monkeypatch):
    """As after `pip install .`: site-packages is there, the package in it is not."""
    packages = tmp_path / "site-packages"
    for name in ("course/lab", "other"):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").touch()
    monkeypatch.setattr(namespaces, "__file__", str(packages / "course" / "lab" / "sandbox" / "namespaces.py"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    outcome = run(scratch, "import os, sys; print(os.listdir(sys.argv[1]), os.listdir(sys.argv[1] + '/course'))", bubblewrap,
                  packages)
    assert outcome.output in ("['course', 'other'] []\n", "['other', 'course'] []\n"), outcome


def test_other_processes_cannot_be_reached(scratch, layers):
    """Signal 0 asks only whether one might."""
    outcome = run(scratch, """
        import os, sys
        try:
            os.kill(int(sys.argv[1]), 0)
            print("could")
        except OSError as error:
            print(type(error).__name__)
        print(len([name for name in os.listdir("/proc") if name.isdigit()]), os.getuid(), os.getgid(), os.getgroups())
        """, layers, os.getpid())
    could, count, user, group, *groups = outcome.output.split()
    if layers.namespaces:
        assert could == "ProcessLookupError" and int(count) <= 3
    else:
        assert could == ("PermissionError" if ROOT and layers.isolates else "could")
    if ROOT and layers.isolates:
        assert int(user) in sandbox.SANDBOX_USERS and user == group and groups == ["[]"]


def test_writes_outside_the_scratch_folder_fail(scratch, bubblewrap):
    places = ["/", "/etc", "/usr", "/dev", "/home", sys.prefix, str(Path(sandbox.__file__).parents[3]),
              "/proc/sys/kernel", "/sys", str(scratch.parent / "sub")]
    outcome = run(scratch, """
        import os, sys
        for place in sys.argv[1:]:
            try:
                open(f"{place}/course-test-file", "w")
                print("wrote", place)
            except OSError:
                pass
        open("/tmp/mine", "w").close(), open("/dev/shm/mine", "w").close(), open("mine", "w").close()
        print("end")
        """, bubblewrap, *places)
    assert outcome.output == "end\n" and (scratch / "mine").exists()
    assert not Path("/tmp/mine").exists() and not Path("/dev/shm/mine").exists()


@pytest.mark.slow
def test_ranks_meet_over_loopback(scratch, layers):
    outcome = run(scratch, """
        import torch, torch.distributed as dist, torch.multiprocessing as mp
        def work(rank, port):
            dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
            x = torch.ones(3) * (rank + 1)
            dist.all_reduce(x)
            if rank == 0:
                print(x.tolist(), flush=True)
            dist.destroy_process_group()
        if __name__ == "__main__":
            import socket
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            mp.spawn(work, (port,), nprocs=2)
            loader = torch.utils.data.DataLoader(torch.arange(8.), batch_size=4, num_workers=2)
            print([batch.sum().item() for batch in loader])
        """, layers, seconds=50)
    assert outcome.ok and "[3.0, 3.0, 3.0]\n[6.0, 22.0]\n" in outcome.output, outcome


# read


def test_read_takes_plain_files_only(tmp_path):
    (tmp_path / "plain").write_bytes(b"12345")
    assert read_untrusted(tmp_path, "plain", 5) == b"12345"
    with pytest.raises(CourseError, match="more than 4 bytes"):
        read_untrusted(tmp_path, "plain", 4)
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "link").symlink_to("plain")
    (tmp_path / "second").hardlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name in ("link", "second", "pipe", "folder", "absent", "socket", "folder/file", "..", ".", "", "/etc/passwd"):
            with pytest.raises(CourseError):
                read_untrusted(tmp_path, name, 100)


def test_read_of_an_endless_file_ends(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(10**12)
    with pytest.raises(CourseError, match="more than 1000 bytes"):
        read_untrusted(tmp_path, "sparse", 1000)
