"""`make lab`: JupyterLab on this machine alone, with its token, in the folder of the course."""

import json
import os
import re
import signal
import subprocess
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from course.lab.lessons import ROOT


@pytest.mark.slow
def test_make_lab_asks_for_its_token_and_shows_the_course():
    with subprocess.Popen(["make", "lab"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          start_new_session=True) as server:
        try:
            link = re.compile(r"(http://127\.0\.0\.1:\d+)/lab\S*\?token=(\w+)")
            found = next(match for line in server.stdout if (match := link.search(line)))
            address, token = found.groups()
            assert "00_start_here.ipynb" in found[0]
            with pytest.raises(HTTPError) as refused:
                urlopen(f"{address}/api/contents/notebooks", timeout=20)
            assert refused.value.code == 403
            listing = json.load(urlopen(f"{address}/api/contents/notebooks?token={token}", timeout=20))
            assert "00_start_here.ipynb" in {entry["name"] for entry in listing["content"]}
        finally:
            os.killpg(server.pid, signal.SIGKILL)
