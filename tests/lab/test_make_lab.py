"""`make lab`: JupyterLab on this machine alone, with its token, in the folder of the course."""

import json
import os
import re
import signal
import subprocess
import time
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from course.lab.authoring.lessons import ROOT


def answer(address: str) -> int:
    """The status of a request; the server says its address a moment before it answers there."""
    for _ in range(60):
        try:
            return urlopen(address, timeout=20).status
        except HTTPError as error:
            return error.code
        except URLError:
            time.sleep(0.5)
    raise TimeoutError(address)


@pytest.mark.slow
def test_make_lab_asks_for_its_token_and_shows_the_course():
    with subprocess.Popen(["make", "lab"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          start_new_session=True) as server:
        try:
            link = re.compile(r"(http://127\.0\.0\.1:\d+)/lab\S*\?token=(\w+)")
            found = next(match for line in server.stdout if (match := link.search(line)))
            address, token = found.groups()
            assert "00_start_here.ipynb" in found[0]
            assert answer(f"{address}/api/contents/notebooks") == 403
            listing = json.load(urlopen(f"{address}/api/contents/notebooks?token={token}", timeout=20))
            assert "00_start_here.ipynb" in {entry["name"] for entry in listing["content"]}
        finally:
            os.killpg(server.pid, signal.SIGKILL)
