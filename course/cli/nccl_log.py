"""`course doctor --nccl FILE`: the known causes for which NCCL does not start, or starts slowly, in a log of NCCL_DEBUG=INFO.

A cause is a pattern of one line, as NCCL or PyTorch prints it, with a sentence and a cure. Causes that only several lines show
together (interfaces that cannot reach each other, a silent fallback to sockets) have a function each.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from course.utils.errors import CourseError

INTERFACES = ("`ip -brief address` on each node lists the interfaces; set NCCL_SOCKET_IFNAME to the one that joins the "
              "nodes")


@dataclass(frozen=True)
class Cause:
    """A known cause: the pattern of its line, a sentence that may use the pattern's named groups, and the cure."""

    name: str
    pattern: str
    sentence: str
    cure: str


@dataclass(frozen=True)
class Finding:
    """A cause found in a log, and the line that shows it. slow: NCCL starts nevertheless, but slowly."""

    name: str
    sentence: str
    cure: str
    number: int                                      # of the line, from 1
    line: str
    slow: bool = False


CAUSES = [
    Cause("unset MASTER_ADDR",
          r"environment variable (?P<name>MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE) expected, but not set",
          "{name} is not set, so this process does not know where the ranks meet, or which one it is",
          "start with torchrun or srun, which set it; in your own script: export MASTER_ADDR=FIRST_NODE MASTER_PORT=29500"),
    Cause("port in use",
          r"EADDRINUSE|errno: 98|[Aa]ddress already in use",
          "the port where ranks meet is taken, often by an earlier run that has not ended",
          "end that run, or take another port: export MASTER_PORT=29501, or torchrun --standalone, which finds one"),
    Cause("version mismatch",
          r"Mismatched NCCL version detected : rank (?P<a>\d+) version (?P<x>\d+) rank (?P<b>\d+) version (?P<y>\d+)",
          "rank {a} has NCCL {x} and rank {b} has {y}",
          "use the same image or environment on every node; unset LD_LIBRARY_PATH where it names another libnccl.so"),
    Cause("duplicate GPU",
          r"Duplicate GPU detected : rank (?P<a>\d+) and rank (?P<b>\d+) both on CUDA device (?P<gpu>\w+)",
          "ranks {a} and {b} use the same GPU ({gpu})",
          "call torch.cuda.set_device(LOCAL_RANK) before the process group starts; start one process per GPU; in Slurm ask "
          "for GPUs per node (--gpus-per-node)"),
    Cause("too few GPUs",
          r"invalid device ordinal",
          "a rank asks for a GPU that this node does not have, or that CUDA_VISIBLE_DEVICES hides",
          "start as many processes per node as `nvidia-smi -L` lists, and unset CUDA_VISIBLE_DEVICES"),
    Cause("shared memory too small",
          r"failed to extend /dev/shm/\S+ to \d+ bytes|[Ee]rror while creating shared memory segment|"
          r"/dev/shm/nccl.*No space left on device",
          "/dev/shm is too small for NCCL's buffers; a container has 64 MB by default",
          "start the container with --shm-size=8g or --ipc=host; remove files nccl-* that a killed run left in /dev/shm"),
    Cause("network not there",
          r"network (?P<name>\w+) not found",
          "NCCL_NET={name} asks for a network that NCCL did not find here",
          "unset NCCL_NET to use sockets, or bring the devices in: a container needs /dev/infiniband and libibverbs"),
    Cause("memory lock limit",
          r"ibv_(?:reg_mr|create_cq|create_qp)\w* failed with error Cannot allocate memory",
          "InfiniBand may not lock enough memory",
          "say `ulimit -l unlimited` before the start; start a container with --ulimit memlock=-1"),
    Cause("InfiniBand error",
          r"Got completion from peer .* with status=\d+|Got completion with error \d+",
          "an InfiniBand message failed; status 12 means that the other side does not answer: cable, port, switch, or GID",
          "`ibstat` on both nodes must say Active; on RoCE set NCCL_IB_GID_INDEX=3; NCCL_IB_HCA=NAME picks another card"),
    Cause("peer access",
          r"P2P is disabled between connected GPUs \d+ and \d+|peer access is not supported between",
          "two GPUs of a node may not reach each other's memory: PCIe access control, a virtual machine, or one GPU per task",
          "disable ACS in the BIOS or the hypervisor; with Slurm use --gpu-bind=none; NCCL_P2P_DISABLE=1 works, but slowly"),
    Cause("old driver",
          r"driver version is insufficient for CUDA runtime version",
          "the driver is older than this PyTorch's CUDA needs",
          "update the driver, or install a PyTorch for an older CUDA"),
    Cause("out of memory",
          r"Cuda failure.*out of memory",
          "no GPU memory is left for NCCL's buffers",
          "end other processes on the GPU (`nvidia-smi` lists them), or leave NCCL some hundred MB"),
    Cause("rank missing",
          r"(?:client socket has timed out|timed out after).*(?:trying to connect|waiting for clients)",
          "ranks waited for others that never came: not started, another address or port, or a firewall",
          "see the first error of each rank; `nc -vz FIRST_NODE 29500` from another node tests the way"),
    Cause("collective timeout",
          r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<op>\w+)",
          "all ranks met, but {op} number {number} did not end: a rank died, or called another collective",
          "look at that rank's last lines; a longer timeout does not help"),
]
UNREACHABLE = re.compile(r"[Cc]onnect to (?P<address>\S+?)(?:<\d+>)? (?:failed|returned).*?"
                         r"(?P<reason>Connection refused|Connection timed out|No route to host|Network is unreachable)|"
                         r"client socket has failed to connect to .*?(?P<peer>\[?[\w.:]+\]?):\d+.*?"
                         r"(?P<why>timed out|refused|No route)")
BOOTSTRAP = re.compile(r"(?P<host>[\w.-]+):\d+:\d+ \[\d+\] NCCL INFO Bootstrap ?: Using (?:\[\d+\])?"
                       r"(?P<name>[\w.-]+):(?P<address>\S+?)<")
BRIDGES = re.compile(r"lo|docker\d*|virbr\d*|veth\w*|br-\w+|cni\d*|podman\d*")


def read(text: str) -> list[Finding]:
    """Every known cause in a log, each once, with its first line: failures first, then what is only slow."""
    lines = text.splitlines()
    found = [finding for finding in (*interfaces(lines), *patterns(lines), *fallback(lines)) if finding]
    return sorted(found, key=lambda finding: finding.slow)


def patterns(lines: list[str]) -> Iterator[Finding]:
    """The causes that one line shows."""
    for cause in CAUSES:
        for number, line in enumerate(lines, 1):
            if match := re.search(cause.pattern, line):
                words = {name: value or "" for name, value in match.groupdict().items()}
                yield Finding(cause.name, cause.sentence.format(**words), cause.cure, number, line.strip())
                break


def interfaces(lines: list[str]) -> Iterator[Finding]:
    """A wrong NCCL_SOCKET_IFNAME, no interface, interfaces that cannot reach each other, or a blocked way."""
    settings = (re.search(r"NCCL_SOCKET_IFNAME set (?:by environment )?to (\S+)", line) for line in lines)
    named = next((match[1] for match in settings if match), "")
    for number, line in enumerate(lines, 1):
        if re.search(r"no socket interface found|No usable listening interface found|[Nn]o interface found", line):
            name, sentence = (("wrong NCCL_SOCKET_IFNAME", f"no interface here is called {named}, as NCCL_SOCKET_IFNAME asks")
                              if named else ("no interface", "NCCL found no network interface that it may use"))
            yield Finding(name, sentence, INTERFACES, number, line.strip())
            return
    blocked = next(((number, line, match) for number, line in enumerate(lines, 1) if (match := UNREACHABLE.search(line))), None)
    if not blocked:
        return
    number, line, match = blocked
    chosen = {match["host"]: (match["name"], match["address"]) for match in map(BOOTSTRAP.search, lines) if match}
    if len(chosen) > 1 and (any(BRIDGES.fullmatch(name) for name, _ in chosen.values())
                            or len({address for _, address in chosen.values()}) < len(chosen)):
        where = ", ".join(f"{host} {name} ({address})" for host, (name, address) in chosen.items())
        yield Finding("no common interface", f"the nodes chose interfaces that do not join them: {where}", INTERFACES, number,
                      line.strip())
    else:
        target, reason = match["address"] or match["peer"], match["reason"] or match["why"]
        yield Finding("blocked connection",
                      f"{target} did not answer ({reason}): a firewall, a wrong address, or a rank that ended",
                      "open all ports between the nodes, or set NCCL_SOCKET_IFNAME to the inner network; see the other "
                      "rank's first error too", number, line.strip())


def fallback(lines: list[str]) -> Iterator[Finding]:
    """Messages between ranks that go through sockets, and why InfiniBand is not used."""
    used = [(number, line) for number, line in enumerate(lines, 1) if re.search(r"Channel \d+.* via NET/Socket", line)]
    if not used:
        return
    text = "\n".join(lines)
    why = ("NCCL_IB_DISABLE is set" if re.search(r"NCCL_IB_DISABLE set (?:by environment )?to 1", text) else
           "libibverbs is missing" if "Failed to open libibverbs" in text else
           "it found no InfiniBand device" if re.search(r"NET/IB ?: No device found", text) else "it chose them")
    yield Finding("fallback to sockets",
                  f"NCCL sends between nodes through TCP sockets, since {why}; with InfiniBand this is slow",
                  "if `ibstat` shows a device on the host, start the container with --device=/dev/infiniband --ulimit "
                  "memlock=-1 and libibverbs inside; NCCL_NET=IB makes it an error; on Ethernet alone this is right",
                  *used[0], slow=True)


def transports(text: str) -> dict[str, int]:
    """How many channels use each transport, such as {"P2P/CUMEM": 16, "NET/IB": 4}."""
    counts: dict[str, int] = {}
    for kind in re.findall(r"Channel \d+.* via (P2P/\w+|SHM|NET/\w+)", text):
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def main(file: Path) -> int:
    """Print what a log shows. Returns exit status 1 for a cause of failure. Raises `CourseError` if it shows nothing known."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CourseError(f"--nccl {file} cannot be read ({error.strerror}): give the output of a run with "
                          "NCCL_DEBUG=INFO") from error
    found, used = read(text), transports(text)
    for finding in found:
        print(f"{finding.name}: {finding.sentence}\n  cure: {finding.cure}\n  line {finding.number}: {finding.line[:200]}")
    if used:
        print("NCCL set up: " + ", ".join(f"{count} channels via {kind}" for kind, count in used.items()))
    if found or used:
        return int(any(not finding.slow for finding in found))
    warning = re.search(r"NCCL WARN (.{1,200})", text)
    raise CourseError(f"{file} shows no cause that course doctor knows, and no channel of NCCL's"
                      + (f"; NCCL says: {warning[1].strip()}" if warning else "") + ". Run again with NCCL_DEBUG=INFO and "
                      "NCCL_DEBUG_SUBSYS=INIT,NET,ENV, and keep the output of every rank")
