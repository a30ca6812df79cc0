"""JupyterLab in headless Chromium. Where Chromium or Selenium is missing its tests are skipped, unless COURSE_NEED_BROWSER says
that they have to run."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from course.lab.authoring.lessons import ROOT
from tests.browser.lab import LONGEST, Lab

LINK = re.compile(r"(http://127\.0\.0\.1:\d+)/lab\S*\?token=(\w+)")
SETTINGS = {"notebook-extension/tracker": '{"windowingMode": "none"}'}          # all cells are in the page, not only those seen
OWN = {"JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces", "JUPYTER_CONFIG_DIR": "config",
       "JUPYTER_DATA_DIR": "share", "JUPYTER_RUNTIME_DIR": "runtime", "IPYTHONDIR": "ipython"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All that need a browser are slow: each starts kernels, which import PyTorch."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


def needed() -> None:
    """Skip where the browser or what drives it is missing; fail where it must not be."""
    missing = [name for name, there in (("Chromium", shutil.which("chromium")), ("chromedriver", shutil.which("chromedriver")),
                                        ("Selenium", find_spec("selenium"))) if not there]
    if missing:
        reason = f"{' and '.join(missing)} not installed: apt-get install chromium chromium-driver, and pip install selenium"
        (pytest.fail if os.environ.get("COURSE_NEED_BROWSER") else pytest.skip)(reason)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course's folder whose notebooks are copies, which a test may change."""
    needed()
    folder = tmp_path_factory.mktemp("home") / "course"
    shutil.copytree(ROOT / "notebooks", folder / "notebooks", ignore=shutil.ignore_patterns(".*"))
    (folder / "course").symlink_to(ROOT / "course")
    return folder


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[tuple[str, str]]:
    """`make lab` in that folder, with nobody's settings: its address and its token."""
    for name, text in SETTINGS.items():
        file = home.parent / f"settings/@jupyterlab/{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    with socket.socket() as probe:                   # another JupyterLab may start at the same moment, on the same usual port
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = home.parent / "config/jupyter_server_config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"ServerApp": {"port": port}, "LabApp": {"expose_app_in_browser": True}}))
    environment = os.environ | {name: str(home.parent / folder) for name, folder in OWN.items()}
    log = home.parent / "server.log"
    command = ["make", "lab", "--assume-old=.venv/.lab", f"CURDIR={home}"]     # it installs nothing: what is there is tested
    with log.open("w") as written, subprocess.Popen(command, cwd=ROOT, env=environment, stdout=written, stderr=subprocess.STDOUT,
                                                    start_new_session=True) as process:
        try:
            end = time.monotonic() + LONGEST
            while not (found := LINK.search(log.read_text())) or not answers(port):
                assert process.poll() is None and time.monotonic() < end, f"make lab gives no address: {log.read_text()}"
                time.sleep(0.2)
            yield found[1], found[2]
        finally:
            stop(process)


def answers(port: int) -> bool:
    """Whether a server is there; JupyterLab prints its address before it is."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def stop(process: subprocess.Popen) -> None:
    """End a process and all that it has started, kernels too, which have sessions of their own."""
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGTERM)       # JupyterLab ends its kernels
        for one in psutil.wait_procs(family, timeout=20)[1]:
            one.kill()


@pytest.fixture
def lab(server: tuple[str, str], tmp_path: Path) -> Iterator[Lab]:
    """A browser of its own for each test."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("headless=new", "disable-dev-shm-usage", "disable-gpu", "window-size=1200,1000", "no-first-run",
                     f"user-data-dir={tmp_path / 'profile'}", *(["no-sandbox"] if os.getuid() == 0 else [])):
        options.add_argument(f"--{argument}")
    browser = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield Lab(browser, *server, tmp_path / "failed.png")
    finally:
        browser.quit()
