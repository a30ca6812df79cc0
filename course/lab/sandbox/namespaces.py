"""Bubblewrap: which parts of this machine untrusted code can see."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/sys", "/nix/store")


def bubblewrap_arguments(scratch: Path, inner: Path, readable: Sequence[Path], root: bool) -> list[str]:
    """The arguments of bubblewrap: which folders are visible inside, and where. root: this process runs as root."""
    package = Path(__file__).resolve().parents[2]
    folders = interpreter_folders()
    installed = package.parent in [folder.resolve() for folder in folders]
    hidden = [package if installed else package.parent]
    hidden += [path for folder in folders if (path := folder / package.name).is_dir()]
    mounts = {"/proc": ["--proc", "/proc"], "/dev": ["--dev", "/dev"]}
    if os.path.exists("/proc/keys"):                 # lists this user's keys
        mounts["/proc/keys"] = ["--ro-bind", "/dev/null", "/proc/keys"]
    for name in filter(os.path.lexists, SYSTEM_FOLDERS):
        mounts[name] = ["--symlink", os.readlink(name), name] if os.path.islink(name) else ["--ro-bind", name, name]
    mounts |= {str(path): ["--tmpfs", str(path)] for path in hidden}
    mounts |= {(name := os.path.abspath(path)): ["--ro-bind", name, name] for path in [*folders, *readable]}
    mounts |= {name: ["--bind", str(source), name]
               for name, source in (("/tmp", inner / "tmp"), ("/dev/shm", inner / "shm"), (str(scratch), scratch))}
    ordered = sorted(mounts, key=lambda name: Path(name).parts)      # folders before their contents
    # bubblewrap would create the folders above a mount itself, but accessible to root alone
    above = {name: [part for folder in reversed(Path(name).parents[:-1]) for part in ("--dir", str(folder))] for name in ordered}
    parts = [part for name in ordered for part in above[name] + mounts[name]]
    ours = ["/", "/dev", *map(str, hidden)]          # file systems that bubblewrap made, in memory and still writable
    return ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try", "--die-with-parent",
            "--new-session", *parts, *(part for name in ours for part in ("--remount-ro", name)),
            *(("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID") if root else ())]


def interpreter_folders() -> list[Path]:
    """The folders that Python needs: its prefixes, the targets of its links, and those of installed packages."""
    program, folders = sys.executable, [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
    folders += [os.path.realpath(path) for path in folders]
    while os.path.islink(program):
        program = os.path.normpath(os.path.join(os.path.dirname(program), os.readlink(program)))
        folders.append(os.path.dirname(os.path.dirname(program)))
    folders += [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return [Path(path) for path in dict.fromkeys(folders) if path not in ("", "/") and os.path.isdir(path)]
