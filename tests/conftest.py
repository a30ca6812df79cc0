"""What many tests share: a small data set, and settings for a model that trains on it in a second."""

import os
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from course.data.weather import layout
from course.ops import triton_language  # noqa: F401  # before anything imports Triton: it chooses the interpreter
from course.planner import kernel_efficiency
from course.ranks import notebook_ranks

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"                  # for the processes that tests start

GRID = (8, 16)
LONGEST = "tests/lab/test_lessons.py"                # one process takes minutes for each lesson
# of the slow tests whose names begin so, continuous integration runs one part each time; the first that fits counts
PARTS = {"tests/lab/test_lessons.py::test_masters_execute": 6, "tests/lab/test_sandbox.py": 1, "tests/lab/": 12,
         "tests/bench/": 12, "tests/experiments/": 12, "tests/test_docs.py": 12, "tests/planner/": 6, "tests/data/": 3,
         "tests/inference/": 3, "tests/training/test_verify": 3, "tests/convert/test_reshard.py": 12, "tests/parallel/": 6,
         "tests/training/": 2, "tests/ops/": 2, "tests/fp8/": 2}
TIMES = {"train/1979": 20, "train/1980": 20, "valid/1981": 11, "test/1982": 24}


@pytest.hookimpl(tryfirst=True)                      # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of a file share fixtures and ranks: of several processes (`-n 2 --dist loadgroup`) one takes all of them, if they
    do not say otherwise. Files of many tests come first, so that the processes end at about the same time.
    """
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(config.rootpath))))
    sizes = Counter(map(group, items))
    items.sort(key=lambda item: (group(item) != LONGEST, -sizes[group(item)], group(item)))
    if turn := os.environ.get("COURSE_TURN"):
        mine = names_of_turn([item.nodeid for item in items if item.get_closest_marker("slow")], int(turn))
        left_out = {item for item in items if item.get_closest_marker("slow") and item.nodeid not in mine}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def group(item: pytest.Item) -> str:
    """The name under which a test is kept together with others in one process."""
    mark = item.get_closest_marker("xdist_group")
    assert mark is not None
    return str(mark.args[0])


def names_of_turn(names: list[str], turn: int) -> set[str]:
    """Which slow tests run in this turn of continuous integration, a number that grows with each commit."""
    left = list(names)
    chosen = set()
    for start, parts in (PARTS | {"": 1}).items():
        kind = [name for name in left if name.startswith(start)]
        chosen.update(kind[turn % parts::parts])
        left = [name for name in left if name not in kind]
    return chosen


class Teller:
    """Failures in full when they happen: of a run that is cut short one would see no more than a letter F. And at the end why
    tests were skipped, a line a reason."""

    def __init__(self, terminal: "pytest.TerminalReporter"):
        self.terminal = terminal
        self.skipped: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.write_line(f"\n{report.when} of {report.nodeid} failed:\n{report.longreprtext}")
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_terminal_summary(self) -> None:
        for reason, count in self.skipped.most_common():
            self.terminal.write_line(f"{count} skipped: {reason}")


@pytest.hookimpl(trylast=True)                       # after the terminal's
def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False           # xdist's own order knows nothing of the longest
    if terminal := config.pluginmanager.get_plugin("terminalreporter"):      # processes of xdist's have none
        config.pluginmanager.register(Teller(terminal))


@pytest.fixture(scope="session", autouse=True)
def no_list_at_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lessons that tests begin are not noted in the list of whoever runs the tests (`course/lab/checks/own_notebooks.py`)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module", autouse=True)
def no_idle_ranks() -> Iterator[None]:
    """Ranks that wait for the next call keep threads of gloo's, which poll: they end with the file that used them."""
    yield
    notebook_ranks.close()


def worked() -> float:
    """Processor seconds of all processes that this one has started and that have ended: other tests may run beside them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def fields(times: int, seed: int) -> np.ndarray:
    """Waves that travel eastwards, each channel its own, and a little noise: (times, 20, 8, 16)."""
    rng = np.random.default_rng(seed)
    t, c, y, x = np.ogrid[:times, :20, :GRID[0], :GRID[1]]
    north = np.cos(np.pi * (y + 0.5) / GRID[0] - np.pi / 2)
    wave = np.sin(2 * np.pi * (x / GRID[1] * (1 + c % 3) - t / 12 + seed / 7) + c) * north
    return (10 * (c + 1) + (c + 1) * (wave + 0.05 * rng.standard_normal((times, 20, *GRID)))).astype("float32")


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 8x16 points; do not change it, copy it (`own_data`)."""
    path = tmp_path_factory.mktemp("data")
    for seed, (name, times) in enumerate(TIMES.items()):
        file = path / f"{name}.h5"
        file.parent.mkdir(exist_ok=True)
        with h5py.File(file, "w") as opened:
            made = layout.create_year(opened, times, layout.CHANNELS, layout.latitudes(GRID[0]), layout.longitudes(GRID[1]))
            made[:] = fields(times, seed)
    layout.write_statistics(path, layout.find_years(path, "train"))
    return path


@pytest.fixture
def own_data(small_data: Path, tmp_path: Path) -> Path:
    """A copy of the small data set that a test may damage."""
    return Path(shutil.copytree(small_data, tmp_path / "data"))


@pytest.fixture
def tiny(small_data: Path, tmp_path: Path) -> list[str]:
    """Overrides of vit-demo: a tiny model on the small data, writing under tmp_path."""
    return tiny_settings(small_data, tmp_path / "runs")


def tiny_settings(data: Path, runs: Path) -> list[str]:
    return ["model.grid=[8,16]", "model.dim=16", "model.depth=2", "model.heads=2", f"data.path={data}", f"log.dir={runs}",
            "train.steps=12", "train.global_batch=4", "train.device=cpu", "log.every=1", "log.tensorboard=false",
            "checkpoint.every=5", "optim.warmup=2"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what it puts in the background with interrupts ignored, and the tests with it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def rules(monkeypatch):
    """Without a measured table, whether there is one by now or not: these tests state what the rules give."""
    monkeypatch.setattr(kernel_efficiency, "REFERENCE", ("h200", "none.json"))
    kernel_efficiency.kernels_of.cache_clear()
    yield
    kernel_efficiency.kernels_of.cache_clear()


@pytest.fixture(params=["rules", "table"])
def rates(request):
    """Both that a prediction may stand on: rules, and the H200's table, by the data sheets, as `course plan` takes it."""
    if request.param == "rules":
        request.getfixturevalue("rules")
    return request.param
