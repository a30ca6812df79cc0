"""Run a real Slurm with several nodes on this machine, independent of any other: own configuration, key, ports and folders.

    cluster = start(Path(tempfile.mkdtemp()))
    job = cluster.submit(["--nodes=2", "submit/train.sh", "vit-demo"])
    cluster.wait(job)
    stop(cluster.folder)

`course cluster start` does the same from a shell. It needs Debian's packages slurm-wlm and munge (or equivalents), but neither
systemd nor root. The nodes share this machine's processors: jobs behave as on a cluster, but their speed does not.
Source for the configuration: slurm.conf(5) and munged(8) of Slurm 22.05.
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from course.utils.atomic_files import remove
from course.utils.errors import CourseError, describe_exit

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
DAEMONS = ("munged", "slurmctld", "slurmscriptd", "slurmd", "slurmstepd")
SYSTEM_PATH = os.pathsep.join(["/usr/local/sbin", "/usr/sbin", "/sbin"])  # where daemons are, outside a user's PATH
START_SECONDS, JOB_SECONDS = 60.0, 240.0             # time limits for nodes to start, and for a job
ANSWER_SECONDS = 10.0                                # time limit for a live controller to list its jobs
WAIT_NOTICE_SECONDS = 15.0                           # seconds until it prints why a job waits
POLL_SECONDS = 0.2                                   # seconds between polls
FINISHED_STATES = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL",
                   "DEADLINE")

# linuxproc and task/none need no cgroups. config_overrides allows nodes with more CPUs than the machine.
# A requeued job waits for cred_expire (120 s by default), a job that did not fit up to sched_interval.
# ReturnToService=2 takes a node back as soon as its slurmd registers. MinJobAge keeps finished jobs for `scontrol show job`.
# FirstJobId differs between Slurms on one machine, because a job's number determines its rendezvous port.
CONFIGURATION = """\
ClusterName=course
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=2,batch_sched_delay=0
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout={timeout}
MessageTimeout=30
KillWait=15
MinJobAge=86400
FirstJobId={first_job}
GresTypes=gpu
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs={cpus} {gres} State=UNKNOWN
PartitionName={partition} Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
PARTITION = "course"


@dataclass(frozen=True)
class Cluster:
    """A running Slurm, identified by its folder."""

    folder: Path

    @property
    def configuration(self) -> Path:
        """The slurm.conf that Slurm's programs get as `SLURM_CONF`."""
        return self.folder / "slurm.conf"

    def environment(self, **more: str) -> dict[str, str]:
        """This process's environment with this Slurm's configuration, without the variables of any Slurm job."""
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
        return {**mine, "PATH": f"{mine.get('PATH', os.defpath)}{os.pathsep}{SYSTEM_PATH}",
                "SLURM_CONF": str(self.configuration), **more}

    def run(self, *command: str | Path, cwd: Path | None = None, seconds: float = JOB_SECONDS, **environment: str) -> str:
        """Run one of Slurm's commands; returns its output. Raises `CourseError` with its message if it fails or does not end.

        The command and its children ignore SIGPIPE, as under systemd: Python ignores it, and `restore_signals=False` keeps
        that. munged closes connections of clients that take more than 2 s, which happens on a busy machine. libmunge then
        retries, unless SIGPIPE has silently killed the process.
        """
        try:
            done = subprocess.run(list(map(str, command)), cwd=cwd, env=self.environment(**environment), capture_output=True,
                                  text=True, encoding="utf-8", errors="replace", timeout=seconds, restore_signals=False)
        except subprocess.TimeoutExpired as error:
            raise CourseError(f"{command[0]} did not answer in {seconds:g} s: see whether this Slurm still runs; {self.folder} "
                              "has the daemons' logs") from error
        if done.returncode:
            complaint = (done.stderr or done.stdout).strip() or "it said nothing"
            raise CourseError(f"{command[0]} {describe_exit(done.returncode)}: {complaint}; {self.folder} has the daemons' logs")
        return done.stdout.strip()

    def submit(self, words: Sequence[str | Path], cwd: Path | None = None, **environment: str) -> int:
        """Run `sbatch WORDS...` in the folder `cwd`; returns the job's number."""
        return int(self.run("sbatch", "--parsable", *words, cwd=cwd, seconds=JOB_SECONDS, **environment).split(";")[0])

    def describe(self, job: int) -> dict[str, str]:
        """The fields of `scontrol show job`: JobState, ExitCode, Restarts, NodeList, StdOut ..."""
        return parse_fields(self.run("scontrol", "--oneliner", "show", "job", str(job)).splitlines()[0])

    def state(self, job: int) -> str:
        """The job's state: PENDING, RUNNING, COMPLETED, FAILED ..."""
        return self.describe(job)["JobState"]

    def wait(self, job: int, states: Sequence[str] = FINISHED_STATES, seconds: float = JOB_SECONDS) -> str:
        """Wait until a job is in one of these states; returns it. Raises `CourseError` with the job's log after `seconds`."""
        if not wait_until(lambda: self.state(job) in states, seconds, lambda: self.queued(job)):
            job_fields = self.describe(job)
            raise CourseError(f"job {job} is {job_fields['JobState']} ({job_fields.get('Reason', '')}) after {seconds:g} s, not "
                              f"yet {' or '.join(states)}; the end of its log:\n{self.log(job)[-3000:]}")
        return self.state(job)

    def queued(self, job: int) -> str:
        """A sentence on why a job is pending; "" if it is not."""
        job_fields = self.describe(job)
        reason = job_fields.get("Reason", "no reason given")
        return f"job {job} waits in the queue ({reason})" if job_fields["JobState"] == "PENDING" else ""

    def log(self, job: int) -> str:
        """A job's standard output so far, with standard error if both go to the same file."""
        path = Path(self.describe(job)["StdOut"])
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def nodes(self) -> dict[str, str]:
        """Node -> state: idle, mixed, allocated, down ..., with a mark if the node does not answer (`idle*`)."""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(line.split()[:2] for line in lines)

    def start_node(self, name: str) -> None:
        """Start a node's slurmd, for the first time or again."""
        self.run("slurmd", "-f", self.configuration, "-N", name)


def parse_fields(line: str) -> dict[str, str]:
    """Parse `JobId=4 JobName=a b JobState=RUNNING` into a dict; a value extends to the next `Name=`."""
    job_name = re.search(r"\sJobName=(.*?)(?=\sUserId=)",
                         line)              # user-chosen, may look like other fields
    rest = line[:job_name.start()] + line[job_name.end():] if job_name else line
    pairs = re.findall(r"(?:^|\s)([A-Za-z][\w:/]*)=(.*?)(?=\s[A-Za-z][\w:/]*=|\s*$)", rest)
    name_field = {"JobName": job_name[1]} if job_name else {}
    return dict(reversed(pairs)) | name_field              # the first of repeated names wins: users can forge later ones


def why_unavailable() -> str:
    """Why Slurm cannot start here, as a sentence; "" if all programs are installed."""
    path = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{SYSTEM_PATH}"
    absent = [program for program in PROGRAMS if not shutil.which(program, path=path)]
    return f"Slurm is not installed here (no {', '.join(absent)}): apt-get install slurm-wlm munge" if absent else ""


def start(folder: Path, nodes: int = 2, cpus: int = 8, gpus: int = 0, timeout: int = 15, partition: str = PARTITION) -> Cluster:
    """Start nodes n1, n2, ... with `cpus` CPUs and `gpus` simulated GPUs each, in one partition; wait until all are idle.

    `folder` is for this Slurm alone, and `stop` removes it. `timeout` is SlurmdTimeout: seconds until a node that does not
    answer counts as lost. Raises `CourseError` if Slurm is not installed or does not start; then nothing is left running.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", partition):
        raise CourseError(f"{partition!r} cannot be a partition here: name one, with letters, digits, dots, - and _")
    if reason := why_unavailable():
        raise CourseError(reason)
    cluster = Cluster(folder.resolve())
    if cluster.configuration.exists():
        raise CourseError(f"{folder} has a Slurm already: stop it first (course cluster stop --folder {folder})")
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir())
                                                   or folder.stat().st_uid != os.getuid())):
        raise CourseError(f"{folder} is not an empty folder of yours: name an empty one, or none, because stopping this Slurm "
                          "removes all of it")
    write_configuration(cluster, nodes, cpus, gpus, timeout, partition)
    try:
        munge = cluster.folder / "munge"
        cluster.run("munged", "--force", "--num-threads=2", f"--key-file={munge}/key", f"--socket={munge}/socket",
                    f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed")
        cluster.run("slurmctld", "-f", cluster.configuration)
        names = [f"n{i}" for i in range(1, nodes + 1)]
        for name in names:
            cluster.start_node(name)
        if not wait_until(lambda: all_idle(cluster, names), START_SECONDS):
            files = sorted(cluster.folder.glob("*.log"))
            logs = "\n".join(file.read_text(encoding="utf-8", errors="replace")[-1000:] for file in files)
            raise CourseError(f"Slurm's nodes are not idle after {START_SECONDS:g} s; the ends of its logs:\n{logs}")
    except BaseException:
        stop(cluster.folder)
        raise
    return cluster


def write_configuration(cluster: Cluster, nodes: int, cpus: int, gpus: int, timeout: int, partition: str) -> None:
    """Write the folders, the key and the configuration."""
    folder = cluster.folder
    for name in ("munge", "state", *(f"n{i}" for i in range(1, nodes + 1))):
        (folder / name).mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    (folder / "munge" / "key").touch(0o600)
    (folder / "munge" / "key").write_bytes(os.urandom(128))
    controller = free_ports(1 + nodes)
    first = controller + 1
    devices = [folder / f"gpu{i}" for i in range(gpus)]
    for device in devices:
        device.touch()
    (folder / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in devices), encoding="utf-8")
    if newer_than_22():                              # 22.05 refuses this line; later versions need it, or they look for systemd
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n", encoding="utf-8")
    cluster.configuration.write_text(CONFIGURATION.format(
        host=socket.gethostname().split(".")[0], user=psutil.Process().username(), folder=folder, controller=controller,
        ports=f"{first}-{first + nodes - 1}", nodes=nodes, cpus=cpus, gres=f"Gres=gpu:{gpus}" if gpus else "", timeout=timeout,
        first_job=controller % 120 * 100 + 1, partition=partition))


def newer_than_22() -> bool:
    """Whether the installed Slurm is version 23 or later."""
    version = subprocess.run(["sbatch", "--version"], capture_output=True, text=True).stdout      # "slurm-wlm 22.05.8"
    match = re.search(r"(\d+)\.\d+", version)
    return match is not None and int(match[1]) >= 23


def free_ports(count: int) -> int:
    """The first of `count` consecutive free ports, outside the ephemeral range. Raises `CourseError` if none are free."""
    for first in range(17000 + os.getpid() % 500 * 20, 32000, count):
        with suppress(OSError):
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("", port))
            return first
    raise CourseError(f"no {count} neighboring ports are free between 17000 and 32000: stop the programs that listen there")


def all_idle(cluster: Cluster, names: Sequence[str]) -> bool:
    """Whether the controller answers and all these nodes are idle."""
    try:
        return cluster.nodes() == dict.fromkeys(names, "idle")
    except CourseError:
        return False


def wait_until(done: Callable[[], bool], seconds: float, tell: Callable[[], str] = str) -> bool:
    """Poll until `done()`; returns False if it does not hold after `seconds`. tell: called once after a while; it returns a
    sentence to print, or ""."""
    begin, silent = time.monotonic(), True
    while not done():
        passed = time.monotonic() - begin
        if passed > seconds:
            return False
        if silent and passed > WAIT_NOTICE_SECONDS:
            silent = False
            if sentence := tell():
                print(sentence, flush=True)
        time.sleep(POLL_SECONDS)
    return True


def stop(folder: Path) -> None:
    """Kill every process of the Slurm in this folder, jobs included, and remove the folder."""
    configuration = str(Cluster(folder.resolve()).configuration)
    for _ in range(5):                               # repeat for processes that were just starting
        running = find_processes(configuration)
        if not running:
            break
        for process in running:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(running, timeout=5)
    if os.path.exists(configuration):                # else it is not a Slurm's folder
        remove(folder)


def find_processes(configuration: str) -> list[psutil.Process]:
    """The daemons and jobs that belong to this slurm.conf alone, but not the shell that submits jobs.

    Daemons have the file in their command line or environment. slurmstepd overwrites both with its title, so it is found as
    the parent of a task that has the file.
    """
    processes: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment: Mapping[str, str] = process.environ()
            is_daemon = process.name() in DAEMONS and (environment.get("SLURM_CONF") == configuration
                                                   or configuration in process.cmdline())
            if is_daemon or (environment.get("SLURM_CONF") == configuration and "SLURM_JOB_ID" in environment):
                processes[process.pid] = process
                if (parent := process.parent()) and parent.name() == "slurmstepd":
                    processes[parent.pid] = parent
    return [process for pid, process in processes.items() if pid != os.getpid()]


def start_guard(folder: Path) -> "subprocess.Popen[bytes]":
    """Start a process that stops the Slurm in this folder when this process ends, for whatever reason."""
    return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read(); from pathlib import Path; from "
                             "course.lab.slurm.local_cluster import stop; stop(Path(sys.argv[1]))", str(folder)],
                            stdin=subprocess.PIPE, start_new_session=True)


def default_folder() -> Path:
    """The folder of `course cluster`: one per user, with a short path because it holds sockets."""
    return Path(tempfile.gettempdir()) / f"course-slurm-{os.getuid()}"


def start_command(folder: Path, nodes: int, cpus: int, gpus: int, partition: str = PARTITION) -> None:
    """`course cluster start`: start a Slurm and print shell code (for eval) that selects it."""
    cluster = start(folder, nodes, cpus, gpus, partition=partition)
    print(f"# Slurm runs on this machine: {nodes} nodes of {cpus} CPUs, partition {partition}. With the next line in a shell,\n"
          "# sbatch and squeue mean it; `course cluster stop` ends it.\n"
          f"export SLURM_CONF={shlex.quote(str(cluster.configuration))}")


def stop_command(folder: Path, force: bool = False) -> None:
    """`course cluster stop`: stop the Slurm in a folder. Raises `CourseError` if it has unfinished jobs, unless `force`."""
    cluster = Cluster(folder.resolve())
    if not cluster.configuration.exists():
        raise CourseError(f"there is no Slurm of the course in {folder}: nothing to stop, or it is in another --folder")
    jobs = [] if force else unfinished_jobs(cluster)
    if jobs:
        raise CourseError(f"{len(jobs)} {'job is' if len(jobs) == 1 else 'jobs are'} not over: {', '.join(jobs[:5])}"
                          f"{' ...' if len(jobs) > 5 else ''}; wait for them, or stop them too: course cluster stop --force")
    stop(folder)
    print(f"stopped the Slurm in {folder}")


def unfinished_jobs(cluster: Cluster) -> list[str]:
    """`7 train (running)` for each running or pending job; empty if the controller does not answer."""
    try:
        lines = cluster.run("squeue", "--noheader", "--format=%i %j (%T)", seconds=ANSWER_SECONDS).splitlines()
    except CourseError:
        return []
    return [f"{line.rpartition(' ')[0]} {line.rpartition(' ')[2].lower()}" for line in lines]
