"""`course doctor --nccl`: each known cause in a log, written in the forms of NCCL's and PyTorch's messages."""

import re
import sys

import pytest

from course.cli import main, nccl_log
from course.utils.errors import CourseError

START = """\
node1:4242:4242 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.5<0>
node2:5151:5151 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.6<0>
node1:4242:4242 [0] NCCL INFO NCCL version 2.28.9+cuda13.0
"""
SOCKETS = """\
node1:4242:4301 [0] NCCL INFO NET/IB : No device found.
node1:4242:4301 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.5<0>
node1:4242:4301 [0] NCCL INFO Using network Socket
node1:4242:4301 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
node1:4242:4301 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
node1:4242:4301 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0
"""
GOOD = SOCKETS.replace("NET/IB : No device found.", "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.5<0>").replace(
    "via NET/Socket/0", "via NET/IB/0/GDRDMA")
DOCKER = START.replace("eth0:10.0.0.5", "docker0:172.17.0.1").replace("eth0:10.0.0.6", "docker0:172.17.0.1")


def warn(where: str, message: str) -> str:
    """A line of NCCL's, on node 1."""
    return f"node1:4242:4301 [0] {where} NCCL WARN {message}\n"


LOGS = {
    "unset MASTER_ADDR": "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable "
                         "MASTER_ADDR expected, but not set\n",
    "port in use": "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
                   "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use\n",
    "version mismatch": START + warn(
        "init.cc:771", "Mismatched NCCL version detected : rank 8 version 22005 rank 0 version 22809"),
    "duplicate GPU": START + warn(
        "init.cc:795", "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 19000"),
    "too few GPUs": "torch.AcceleratorError: CUDA error: invalid device ordinal\n",
    "shared memory too small": START + warn(
        "misc/shmutils.cc:72", "Error: failed to extend /dev/shm/nccl-H1dBqY to 9637892 bytes"),
    "network not there": START + warn("net.cc:912", "Error: network IB not found."),
    "memory lock limit": START + warn(
        "misc/ibvwrap.cc:160", "Call to ibv_create_cq failed with error Cannot allocate memory"),
    "InfiniBand error": GOOD + warn(
        "transport/net_ib.cc:1295", "NET/IB : Got completion from peer 10.0.0.6<42136> with status=12 opcode=0 len=0 vendor err "
        "129 (Send)"),
    "peer access": START + warn(
        "graph/paths.cc:308", "P2P is disabled between connected GPUs 1 and 0. You can repress this message with "
        "NCCL_IGNORE_DISABLED_P2P=1."),
    "old driver": START + warn(
        "init.cc:1787", "Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'"),
    "out of memory": START + warn("include/alloc.h:228", "Cuda failure 2 'out of memory'"),
    "rank missing": "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect "
                    "to (node1, 29500).\n",
    "collective timeout": GOOD + "[rank3]:[E1129 10:02:11.1 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective "
                          "operation timeout: WorkNCCL(SeqNum=17, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) "
                          "ran for 600012 milliseconds before timing out.\n",
    "wrong NCCL_SOCKET_IFNAME": "node1:4242:4242 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth9\n"
                                + warn("bootstrap.cc:120", "Bootstrap : no socket interface found"),
    "no interface": warn("bootstrap.cc:120", "Bootstrap : no socket interface found"),
    "no common interface": DOCKER + warn(
        "misc/socket.cc:541", "socketPollConnect: Connect to 172.17.0.1<41093> returned 111(Connection refused) errno "
        "115(Operation now in progress)"),
    "blocked connection": START + warn(
        "misc/socket.cc:484", "socketStartConnect: Connect to 10.0.0.5<57465> failed : No route to host"),
}


@pytest.mark.parametrize("name", LOGS)
def test_a_cause_is_found_alone_with_its_line_and_a_cure(name):
    finding, = nccl_log.read(LOGS[name])
    assert finding.name == name and not finding.slow and finding.cure
    assert finding.line == LOGS[name].splitlines()[-1].strip() and finding.number == len(LOGS[name].splitlines())
    assert not re.search(r"[{}]", finding.sentence)


def test_every_cause_has_a_log():
    assert {cause.name for cause in nccl_log.CAUSES} < LOGS.keys()


@pytest.mark.parametrize("prefix", ["", "0: ", "[rank1]: ", "2025-11-29 10:00:00 "])
def test_launchers_prefixes_hide_nothing(prefix):
    for name in ("no common interface", "duplicate GPU", "wrong NCCL_SOCKET_IFNAME"):
        log = "".join(prefix + line for line in LOGS[name].splitlines(keepends=True))
        assert [finding.name for finding in nccl_log.read(log)] == [name]


def test_what_a_line_says_is_in_the_sentence():
    said = {name: nccl_log.read(log)[0].sentence for name, log in LOGS.items()}
    assert said["version mismatch"] == "rank 8 has NCCL 22005 and rank 0 has 22809"
    assert "node1 docker0 (172.17.0.1), node2 docker0 (172.17.0.1)" in said["no common interface"]
    assert "eth9" in said["wrong NCCL_SOCKET_IFNAME"] and "ALLREDUCE number 17" in said["collective timeout"]
    assert "10.0.0.5 did not answer (No route to host)" in said["blocked connection"]
    assert said["unset MASTER_ADDR"].startswith("MASTER_ADDR is not set")


@pytest.mark.parametrize(("line", "why"), [
    ("NET/IB : No device found.", "it found no InfiniBand device"),
    ("Failed to open libibverbs.so[.1]", "libibverbs is missing"),
    ("NCCL_IB_DISABLE set by environment to 1.", "NCCL_IB_DISABLE is set"), ("", "it chose them")])
def test_a_fallback_to_sockets_is_slow_but_no_failure(line, why):
    finding, = nccl_log.read(START + SOCKETS.replace("NET/IB : No device found.", line))
    assert finding.slow and why in finding.sentence and finding.line.endswith("NET/Socket/0")


def test_a_failure_comes_before_the_fallback():
    found = nccl_log.read(START + SOCKETS + LOGS["duplicate GPU"])
    assert [finding.name for finding in found] == ["duplicate GPU", "fallback to sockets"]


def test_a_good_start_has_no_findings():
    assert nccl_log.read(START + GOOD) == [] and nccl_log.transports(GOOD) == {"P2P/CUMEM": 2, "NET/IB": 1}


@pytest.mark.parametrize(("log", "status", "words"), [
    (START + GOOD, 0, "2 channels via P2P/CUMEM, 1 channels via NET/IB"), (START + SOCKETS, 0, "fallback to sockets: "),
    (LOGS["duplicate GPU"], 1, "cure: call torch.cuda.set_device"),
    ("node1:1:1 [0] x.cc:1 NCCL WARN Something new\n", 1, "no cause that course doctor knows.*says: Something new. Run again")])
def test_the_command_prints_causes_and_cures(tmp_path, monkeypatch, capsys, log, status, words):
    (tmp_path / "nccl.log").write_text(log)
    monkeypatch.setattr(sys, "argv", ["course", "doctor", "--nccl", str(tmp_path / "nccl.log")])
    with pytest.raises(SystemExit) as ended:
        main.main()
    said = ended.value.code if isinstance(ended.value.code, str) else capsys.readouterr().out
    assert bool(ended.value.code) == bool(status) and re.search(words, said)


def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path):
    with pytest.raises(CourseError, match=r"cannot be read \(No such file.*NCCL_DEBUG=INFO"):
        nccl_log.main(tmp_path / "none.log")
