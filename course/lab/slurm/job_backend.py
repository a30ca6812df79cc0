"""Two nodes for lesson 18: of your cluster, of a Slurm that the course starts on this machine, or emulated.

    nodes = find(mine=False)
    job = nodes.submit(Path("mine.sh"), ["gpt-demo", "log.name=whole"])
    nodes.send_warning(job)                                  # as Slurm does before the time limit
    print(nodes.wait(job))

Without Slurm a batch script still runs, with stand-ins for srun and scontrol (`course.lab.slurm.fake_slurm`). Its ranks are real
processes on two addresses of this machine, and `EmulatedSlurm` requeues its jobs.
"""

import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from course.lab.authoring import stubs
from course.lab.slurm import fake_slurm, local_cluster, script_parser
from course.lab.slurm.local_cluster import FINISHED_STATES, Cluster, wait_until
from course.training.run_log import read_metrics
from course.utils.atomic_files import write_json
from course.utils.errors import CourseError

ROOT = stubs.PACKAGE.parent
JOB_SECONDS = 600.0                                  # time limit for waiting on a job
JOB_FILE = "job.json"                                # next to a run's metrics: the job that wrote it


@dataclass(frozen=True)
class Job:
    """A job's state at one moment."""

    id: int
    state: str                                       # Slurm's word: PENDING, RUNNING, COMPLETED, FAILED ...
    restarts: int
    nodes: str                                       # "n[1-2]"
    user: str
    by: str                                          # "Slurm", or "" for emulated nodes
    log: str = ""                                    # its output so far

    def __str__(self) -> str:
        again = f", requeued {self.restarts} times" if self.restarts > 1 else ", requeued once" if self.restarts else ""
        return f"job {self.id} on {self.nodes}: {self.state}{again}"


class SiteCluster(Cluster):
    """The Slurm whose programs are on the PATH."""

    def environment(self, **more: str) -> dict[str, str]:
        """This shell's environment, including job variables, because its programs know their Slurm. `more` takes precedence."""
        return {**os.environ, **more}


class Slurm:
    """Jobs on a real Slurm: the site's own or one started on this machine."""

    def __init__(self, slurm: Cluster, guard: "subprocess.Popen[bytes] | None" = None):
        self.slurm, self.guard = slurm, guard        # stops it at the end; None: the site's own
        self.description = ("a real Slurm, started for this notebook, with two nodes n1 and n2; both are this "
                            "machine" if guard else
                     "jobs go into the queue of the Slurm that this machine belongs to")

    def submit(self, script: Path, words: Sequence[str]) -> int:
        """Run `sbatch SCRIPT WORDS...` in the script's folder, with this Python first on the PATH; returns the job's number."""
        return self.slurm.submit([script, *words], cwd=script.parent, **python_variables(self.slurm.environment()))

    def status(self, job: int) -> Job:
        """The job's current state from Slurm."""
        fields = self.slurm.describe(job)
        return Job(job, fields["JobState"], int(fields.get("Restarts", 0)), fields.get("NodeList", ""),
                   fields["UserId"].split("(")[0],
                   "Slurm", self.slurm.log(job))

    def wait(self, job: int) -> Job:
        """Wait until the job is over. Raises `CourseError` after `JOB_SECONDS`."""
        self.slurm.wait(job, seconds=JOB_SECONDS)
        return self.status(job)

    def send_warning(self, job: int) -> None:
        """Send USR1 to the batch script, as --signal=B:USR1@60 does before the time limit."""
        self.slurm.run("scancel", "--batch", "--signal=USR1", str(job))

    def kill_second_node(self, job: int) -> None:
        """Kill the ranks on the job's second node. On the site's Slurm it kills all ranks, since none runs on this machine."""
        if not self.guard:
            self.slurm.run("scancel", "--signal=KILL", f"{job}.0")
            return
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                told: Mapping[str, str] = process.environ()
                if (told.get("SLURM_CONF") == str(self.slurm.configuration) and told.get("SLURM_JOB_ID") == str(job)
                        and told.get("SLURM_NODEID") == "1" and process.name() != "slurmstepd"):
                    process.kill()

    def close(self) -> None:
        """Stop the Slurm that was started for this notebook, if any."""
        if self.guard:
            self.guard.communicate()                 # closes its input, at which it stops that Slurm


class EmulatedSlurm:
    """Two addresses of this machine; batch scripts run with stand-ins for Slurm's programs."""

    NAMES = ("127.0.0.1", "127.0.0.2")

    def __init__(self, why: str):
        self.description = (f"{why}. So your script runs with stand-ins for srun and scontrol: four real ranks, all on this "
                            "machine, two for each of two nodes that are pretended")
        self.folder = Path(tempfile.mkdtemp(prefix="course-nodes-"))
        fake_slurm.write_programs(self.folder / "bin", fake_slurm.REAL_RANKS)
        self.last = os.getpid() % 10_000 * 10
        self.jobs: dict[int, Any] = {}               # job number -> [process, function that starts it, restarts]

    def submit(self, script: Path, words: Sequence[str]) -> int:
        """Start the script as sbatch would; returns the job's number."""
        self.last += 1
        place = self.folder / str(self.last)
        place.mkdir()
        own = fake_slurm.job_environment(script_parser.read_script(script), self.last, self.NAMES) | {
            "STANDIN": str(place), "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SRUN_"))}
        environ = python_variables(mine | own)
        environ = mine | own | environ | {"PATH": f"{self.folder / 'bin'}{os.pathsep}{environ['PATH']}"}

        def start(restarts: int) -> "subprocess.Popen[bytes]":
            with open(place / "log", "ab") as log:
                return subprocess.Popen(["bash", str(script), *words], cwd=script.parent, stdin=subprocess.DEVNULL, stdout=log,
                                        stderr=log, start_new_session=True,
                                        env=environ | ({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}))

        self.jobs[self.last] = [start(0), start, 0]
        return self.last

    def status(self, job: int) -> Job:
        """The job's current state. This call also restarts a job that was requeued."""
        process, start, restarts = self.jobs[job]
        place = self.folder / str(job)
        if (place / "requeued").exists():
            kill_script(process)
            for name in ("requeued", "step.json", "ranks.json"):
                (place / name).unlink(missing_ok=True)
            restarts += 1
            self.jobs[job] = [start(restarts), start, restarts]
            process = self.jobs[job][0]
        state = {None: "RUNNING", 0: "COMPLETED"}.get(process.poll(), "FAILED")
        log = (place / "log").read_text(encoding="utf-8", errors="replace")
        return Job(job, state, restarts, "two pretended nodes", getpass.getuser(), "", log)

    def wait(self, job: int) -> Job:
        """Wait until the job is over. Raises `CourseError` after `JOB_SECONDS`."""
        if not wait_until(lambda: self.status(job).state in FINISHED_STATES, JOB_SECONDS):
            raise CourseError(f"job {job} is not over after {JOB_SECONDS:g} s; the end of its "
                              f"log:\n{self.status(job).log[-3000:]}")
        return self.status(job)

    def send_warning(self, job: int) -> None:
        """Send USR1 to the batch script."""
        self.jobs[job][0].send_signal(signal.SIGUSR1)

    def kill_second_node(self, job: int) -> None:
        """Kill the ranks on the second node."""
        started = self.folder / str(job) / "ranks.json"
        wait_until(started.is_file, JOB_SECONDS)         # ranks may print before srun has noted all of them
        for pid, node in json.loads(started.read_text(encoding="utf-8")):
            if node == self.NAMES[1]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill all jobs and remove their files."""
        for process, *_ in self.jobs.values():
            kill_script(process)
        shutil.rmtree(self.folder, ignore_errors=True)


def kill_script(process: "subprocess.Popen[bytes]") -> None:
    """Kill a script and everything in its process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def python_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """PATH and PYTHONPATH with which `python` in a job is this Python and finds this course."""
    path = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    return {"PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH", "")]))}


def find(mine: bool = False) -> Slurm | EmulatedSlurm:
    """Two nodes: with `mine` of the site's Slurm; else of a Slurm started on this machine; else emulated."""
    if mine:
        if not shutil.which("sbatch"):
            raise CourseError("there is no sbatch here: open the notebook on the machine that submits jobs, or pass mine=False")
        return Slurm(SiteCluster(Path()))
    if why := local_cluster.why_unavailable():
        return EmulatedSlurm(why)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    guard = local_cluster.start_guard(folder)                    # stops the new Slurm when this process ends
    try:
        return Slurm(local_cluster.start(folder), guard)
    except CourseError as error:
        guard.communicate()
        return EmulatedSlurm(f"Slurm is installed here and did not start ({str(error).splitlines()[0]})")


def losses(run: Path) -> dict[int, float]:
    """Step -> loss, as far as the run has logged them."""
    return {record["step"]: record["loss"] for record in read_metrics(run / "metrics.jsonl")}


def wait_for_step(run: Path, step: int, nodes: Slurm | EmulatedSlurm, job: int) -> int:
    """Wait until a run has logged `step`; returns its latest step. Raises `CourseError` with the log if the job ends before."""
    latest: list[Job] = []

    def there() -> bool:
        latest[:] = [nodes.status(job)]
        return max(losses(run), default=0) >= step or latest[0].state in FINISHED_STATES

    if not wait_until(there, JOB_SECONDS) or max(losses(run), default=0) < step:
        raise CourseError(f"{latest[0]}, and step {step} was not reached; the end of its log:\n{latest[0].log[-3000:]}")
    return max(losses(run))


def record_job(run: Path, job: Job) -> None:
    """Save the job that wrote a run in the run's folder, for the report."""
    fields = {name: value for name, value in asdict(job).items() if name != "log"}
    write_json(run / JOB_FILE, fields)
