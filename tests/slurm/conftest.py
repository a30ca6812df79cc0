"""Tests on real Slurm: two nodes on this machine, started once for all of them. Where Slurm is not installed they are skipped,
unless COURSE_NEED_SLURM says that it has to be."""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from course.lab.slurm import local_cluster as starter
from course.lab.slurm.local_cluster import Cluster
from tests.conftest import tiny_settings
from tests.faults import python_path

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All that need Slurm are slow: starting Python and PyTorch on four ranks takes its time."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


def needed() -> None:
    """Skip where Slurm is missing; fail where it must not be."""
    if reason := starter.why_unavailable():
        (pytest.fail if os.environ.get("COURSE_NEED_SLURM") else pytest.skip)(reason)


def kill_node(cluster: Cluster, name: str) -> None:
    """Kill a node's slurmd, as a crash would. What its jobs started goes on; after SlurmdTimeout the node counts as lost."""
    os.kill(int((cluster.folder / f"{name}.pid").read_text(encoding="utf-8")), signal.SIGKILL)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for one more Slurm, which is stopped in the end. Its path is short: sockets lie in it."""
    needed()
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    yield folder
    starter.stop(folder)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes, n1 and n2, of 8 CPUs each; gone when the tests are over, or dead."""
    needed()
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    guard = starter.start_guard(folder)
    try:
        yield starter.start(folder)
    finally:
        guard.communicate()                          # its input ends: it stops the Slurm, as it would after a crash
    assert not starter.find_processes(str(folder / "slurm.conf")) and not folder.exists()


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path):
    """submit(*words, **environment): `sbatch` in the repository with one of its own scripts; its log lies in tmp_path/jobs."""
    def call(*words: str | Path, **environment: str) -> int:
        python = {"COURSE_PYTHON": sys.executable, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1", **environment}
        return cluster.submit([f"--output={tmp_path}/jobs/%x-%j.log", *words], cwd=ROOT, **python)

    (tmp_path / "jobs").mkdir()
    return call


@pytest.fixture
def tiny_run(small_data: Path, tmp_path: Path):
    """tiny_run(NAME): the settings of a tiny model that writes tmp_path/runs/vit-demo/NAME."""
    return lambda name: [*tiny_settings(small_data, tmp_path / "runs"), "data.workers=0", f"log.name={name}"]
