"""Several nodes without Slurm: torchrun by hand on each, as submit/README.md says, between two addresses and two networks."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import tiny_settings

README = Path(__file__).parents[2] / "submit" / "README.md"
PAIR = [f"course-{os.getpid()}-{node}" for node in "ab"]


@pytest.fixture
def networks() -> Iterator[list[list[str]]]:
    """Commands that run a program in one of two network namespaces with nothing but a cable between them."""
    def ip(words: str) -> bool:
        return subprocess.run(["ip", *words.split()], capture_output=True).returncode == 0

    a, b = PAIR
    steps = [f"netns add {a}", f"netns add {b}", f"link add node0 netns {a} type veth peer name node0 netns {b}"]
    for name, address in ((a, "10.77.0.1"), (b, "10.77.0.2")):
        steps += [f"-n {name} addr add {address}/24 dev node0", f"-n {name} link set node0 up", f"-n {name} link set lo up"]
    try:
        if not shutil.which("ip") or not all(map(ip, steps)):
            pytest.skip("making network namespaces is not allowed here")
        yield [["ip", "netns", "exec", name] for name in PAIR]
    finally:
        if shutil.which("ip"):
            for name in PAIR:
                ip(f"netns del {name}")


def documented(**places: str) -> list[str]:
    """The README's command for node 0, with what stands for a place filled in."""
    block = re.search(r"```\n(torchrun --nnodes=2.+?)\n```", README.read_text(), re.DOTALL)
    words = block[1].replace("\\\n", " ").split()
    words[words.index("torchrun")] = f"{sys.executable} -m torch.distributed.run"
    words = " ".join(words).split()
    return [re.sub("|".join(places), lambda name: places[name[0]], word) for word in words]


def train(settings: list[str], commands: list[list[str]], address: str, port: int, **environment: str) -> None:
    """The documented command on two nodes at once."""
    nodes = [subprocess.Popen([*command, *documented(NODE=str(node), FIRST=address, PORT=str(port), GPUS="2"), *settings],
                              env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
             for node, command in enumerate(commands)]
    said = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)


def losses(runs: Path, name: str) -> list[float]:
    return [json.loads(line)["loss"] for line in (runs / "vit-demo" / name / "metrics.jsonl").read_text().splitlines()]


def close(one: list[float], other: list[float]) -> bool:
    return all(abs(a - b) <= 1e-5 * b for a, b in zip(one, other, strict=True))


@pytest.fixture
def alone(small_data, tmp_path) -> list[float]:
    """The losses of one process."""
    from course import config
    from course.training import trainer

    trainer.main(config.load("vit-demo", [*tiny_settings(small_data, tmp_path / "runs"), "data.workers=0", "log.name=alone"]))
    return losses(tmp_path / "runs", "alone")


@pytest.mark.slow
def test_two_nodes_in_networks_of_their_own_train_as_one_process(small_data, tmp_path, alone, networks):
    settings = [*tiny_settings(small_data, tmp_path / "runs"), "data.workers=0", "log.name=apart"]
    train(settings, networks, "10.77.0.1", 29400, GLOO_SOCKET_IFNAME="node0")
    assert close(losses(tmp_path / "runs", "apart"), alone)


@pytest.mark.slow
def test_two_nodes_at_addresses_of_one_machine_train_as_one_process(small_data, tmp_path, alone):
    if sys.platform != "linux":
        pytest.skip("only Linux answers at all of 127.0.0.0/8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = probe.getsockname()[1]
    settings = [*tiny_settings(small_data, tmp_path / "runs"), "data.workers=0", "log.name=beside"]
    train(settings, [[], []], "127.0.0.2", port, GLOO_SOCKET_IFNAME="lo")
    assert close(losses(tmp_path / "runs", "beside"), alone)
