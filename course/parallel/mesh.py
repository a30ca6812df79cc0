"""The process mesh: who this process is and whom it talks to.

Only this file reads ranks and sizes from a launcher's environment. It returns values, which are passed to whatever needs them.
(`course/ranks/rank_process.py` joins the ranks of a notebook before their function runs.)
"""

import atexit
import math
import os
import platform
import re
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from course.config.axes import AXES, check_shard
from course.parallel.rendezvous import telling
from course.utils.errors import CourseError
from course.utils.machine import end_with_parent

if TYPE_CHECKING:
    from course.config import Parallel


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh, as seen from this rank. An axis of size 1 makes every mapping the identity."""

    name: str
    size: int = 1
    rank: int = 0                                  # my position along the axis
    ranks: tuple[int, ...] = (0,)                  # the global ranks along it, ascending
    group: dist.ProcessGroup | None = None


def group_of(axis: Axis) -> dist.ProcessGroup:
    """The process group of an axis of more than one rank: its methods take lists of tensors, custom operators take its name."""
    assert axis.group is not None
    return axis.group


def axis_of(name: str) -> Axis:
    """An axis for the process group of this name."""
    group: Any = distributed_c10d._resolve_process_group(name)          # type: ignore[arg-type]  # GroupName is a str
    return Axis(name, group.size(), group.rank(), tuple(dist.get_process_group_ranks(group)), group)


@dataclass(frozen=True)
class World:
    """This process: its global rank, the number of processes, and the device it computes on."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True)
class Mesh:
    """The axes by name, the joint axis over which gradients are averaged, and the whole world as an axis."""

    world: World
    grid: Tensor                                    # the global ranks, (pp, dp, cp, tp) as in `AXES`
    axes: Mapping[str, Axis]
    dp_cp: Axis
    all: Axis
    shard: Axis                                     # the part of dp_cp over which ZeRO-2 and ZeRO-3 cut parameters
    replicate: Axis                                 # the ranks of dp_cp that hold the same share

    @property
    def pp(self) -> Axis:
        """Pipeline stages."""
        return self.axes["pp"]

    @property
    def dp(self) -> Axis:
        """Data-parallel ranks."""
        return self.axes["dp"]

    @property
    def cp(self) -> Axis:
        """Context-parallel ranks."""
        return self.axes["cp"]

    @property
    def tp(self) -> Axis:
        """Tensor-parallel ranks."""
        return self.axes["tp"]

    def first_along_all_but(self, *names: str) -> bool:
        """Whether this rank is the first along every axis but these: it stands for all ranks that hold the same."""
        return all(axis.rank == 0 for name, axis in self.axes.items() if name not in names)

    def lines(self, name: str) -> list[list[int]]:
        """The global ranks of every group along an axis, this rank's group and all others."""
        found: list[list[int]] = groups(self.grid, AXES.index(name)).tolist()
        return found


def lay_out(sizes: Mapping[str, int], order: str) -> Tensor:
    """The ranks 0, 1, 2, ..., laid out as (pp, dp, cp, tp). `order`, such as "pp-dp-cp-tp", names the axes slowest first."""
    names = order.split("-")
    ranks = torch.arange(math.prod(sizes.values()))
    ranks = ranks.view([sizes[name] for name in names])                 # as `order` says: the last axis joins neighbors
    return ranks.permute([names.index(name) for name in AXES])          # (pp, dp, cp, tp)


def groups(grid: Tensor, dim: int) -> Tensor:
    """The ranks that differ only along one dim of the grid, a row for each group: (groups, ranks in a group)."""
    return grid.movedim(dim, -1).reshape(-1, grid.shape[dim])


MEETING = "course-ranks-"                            # prefix of the folders where the ranks of one node meet
_kept: list[dist.Store] = []                         # the launcher's stores, kept alive: rank 0 may serve one to the others
FAILED = "course/failed"                             # the store's key by which a failing process tells the others


def join(device: str = "auto") -> World:
    """Identify this process (torchrun, srun, or alone), pick its device ("auto", "cpu" or "cuda"), and join the others.

    Raises `CourseError` if there is no GPU for it.
    """
    rank, size, local = _identity()
    end_with_torchrun()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        if not torch.cuda.is_available():
            raise CourseError("train.device=cuda, but PyTorch sees no GPU: use train.device=cpu, or see `course doctor`")
        if local >= torch.cuda.device_count():
            raise CourseError(f"this is process {local} of its node but PyTorch sees {torch.cuda.device_count()} GPU(s): "
                              "start as many processes per node as it has GPUs, or use train.device=cpu")
        torch.cuda.set_device(local)
        chosen = torch.device("cuda", local)
    else:
        chosen = torch.device("cpu")
    if size > 1 and not dist.is_initialized():
        # gloo for host tensors beside NCCL for GPU tensors: the ranks agree on stop signals on the host
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        # a pipeline's messages have one group per direction, as this warning asks
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        # PyTorch then remembers the newest collectives of gloo and NCCL, which a stalled run reports
        # (course/resilience/stall_watchdog.py)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        with telling(rank, size, launcher()):
            dist.init_process_group(backend, rank=rank, world_size=size,
                                    store=shared_store(rank, size) if on_one_node() else None,
                                    device_id=chosen if chosen.type == "cuda" else None)
    return World(rank, size, chosen)


def wait_at_most(seconds: float) -> None:
    """Set the timeout of collectives in all existing groups; after it they raise an error.

    PyTorch's defaults are 30 minutes, and 10 for NCCL-only groups. A group made later has the default again.
    """
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def on_one_node() -> bool:
    """Whether all ranks of the launcher are on this node; False if it does not say."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    return os.environ.get("SLURM_STEP_NUM_NODES") == "1"


def shared_store(rank: int, size: int) -> dist.Store:
    """Create the store of ranks on one node: a file that no other user can read or write. gloo uses the loopback network.

    The launcher's store listens on all addresses without authentication. So only the folder's name passes through it. A rank
    accepts the name only if this user owns the folder and it is closed to others; otherwise raises `CourseError`.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    key = f"course/file/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"           # torchrun's store outlives the ranks
    open_to_all, *_ = next(rendezvous("env://", rank, size))
    if rank == 0:
        folder = Path(tempfile.mkdtemp(prefix=MEETING))                 # closed to others
        open_to_all.set(key, str(folder))
    else:
        folder = Path(open_to_all.get(key).decode(errors="replace"))
        if not own_variables(folder):
            raise CourseError(f"rank 0 says that the ranks of this node meet in {folder}, which is not a folder of yours that is "
                              "closed to others: if each rank has a temporary folder of its own, set TMPDIR to one that all of "
                              "them see; else somebody else is writing to the place where the ranks meet")
    atexit.register(rmdir, folder)                   # the last rank to leave has removed the file
    _kept.append(open_to_all)
    return dist.FileStore(str(folder / "ranks"), size)


def rmdir(folder: Path) -> None:
    """Remove a folder if it is empty."""
    with suppress(OSError):
        folder.rmdir()


def own_variables(folder: Path) -> bool:
    """Whether a folder, not a link to one, is in the temporary folder under `shared_store`'s prefix, for this user alone."""
    with suppress(OSError, ValueError):
        found = folder.lstat()
        return (folder.name.startswith(MEETING) and folder.parent == Path(tempfile.gettempdir()) and ".." not in folder.parts
                and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077)
    return False


def launched() -> bool:
    """Whether torchrun, srun, or a notebook's `ranks` started this process as one of several."""
    return world_size() > 1


def world_size() -> int:
    """How many processes torchrun, srun or `ranks` started; 1 if none of them did."""
    return _identity()[1]


def by_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launcher() -> str:
    """What started this process as one of several: torchrun, slurm, pty (a shell of `srun --pty`), or "": a user's variables."""
    if by_torchrun():
        return "torchrun"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return ""
    return "pty" if "SLURM_PTY_PORT" in os.environ or "SLURM_PTY_WIN_COL" in os.environ else "slurm"


def end_with_torchrun() -> None:
    """End this process when its parent torchrun ends, in whatever way: a killed torchrun cannot stop its ranks any more.

    Does nothing if the parent is something else, such as a profiler or a container: that may end early.
    """
    with suppress(OSError):
        if by_torchrun() and re.search(rb"torchrun|torch\.distributed", Path(f"/proc/{os.getppid()}/cmdline").read_bytes()):
            end_with_parent()


def node() -> str:
    """The name of this node: Slurm's, else the host's."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def job() -> tuple[str, str]:
    """(Slurm's job ID, how often the job was requeued), both empty without Slurm."""
    return os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "")


def leave() -> None:
    """Leave the process groups; does nothing in a process that is alone."""
    from course.parallel.tensor_parallel import symmetric_memory  # its buffers are shared by the groups

    symmetric_memory.double_buffer.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def joined(device: str = "auto") -> Iterator[World]:
    """Join the other processes for the block: `leave` them at its end, or `abandon` them on an exception."""
    world = join(device)
    try:
        yield world
    except BaseException:
        abandon(world)
        raise
    leave()


def abandon(world: World) -> None:
    """After an exception: tell the other processes, and end this one as soon as the exception has been printed.

    An orderly `leave` could wait for collectives that never complete, and so would the whole job.
    """
    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    if world.size > 1 and launched():
        fail(world)
        atexit.register(end)


def fail(world: World) -> None:
    """Tell the other processes that this one cannot go on."""
    with suppress(RuntimeError, ValueError):         # the store may be gone with its process, or there is none
        distributed_c10d._get_default_store().set(FAILED, str(world.rank))


def abandoned() -> bool:
    """Whether another process has failed, or the process that serves the store is gone."""
    try:
        return bool(distributed_c10d._get_default_store().check([FAILED]))
    except RuntimeError:
        return True


def build_mesh(parallel: "Parallel", world: World) -> Mesh:
    """Lay the ranks out along the axes in the configured order.

    `parallel.order` names the axes slowest first: in `pp-dp-cp-tp` neighboring ranks differ in tp, so
    tensor-parallel groups sit on neighboring GPUs. dp=0 takes whatever the other axes leave.

    Raises `CourseError` if the product of the sizes is not the number of processes, or if ranks that shall reach into each
    other's memory are not on one node.
    """
    sizes = {name: getattr(parallel, name) for name in AXES}
    others = math.prod(size for name, size in sizes.items() if name != "dp")
    sizes["dp"] = sizes["dp"] or max(1, world.size // others)
    product = others * sizes["dp"]
    if product != world.size:
        arithmetic = " x ".join(f"{name}={size}" for name, size in sizes.items())
        there = "there is 1 process" if world.size == 1 else f"there are {world.size} processes"
        raise CourseError(f"parallel: {arithmetic} = {product}, but {there}: start {product} with torchrun (`torchrun "
                          f"--standalone --nproc-per-node={product} -m course.cli train ...`) or srun, or change an axis")
    if world.size == 1:
        return single(world)
    ranks = lay_out(sizes, parallel.order)
    if parallel.symmetric and world.device.type == "cuda":           # CPUs do without it
        check_nodes(groups(ranks, AXES.index("tp")).tolist(), nodes(world.size), parallel.order)
    # cp has groups of its own: its messages must not queue behind the averages of gradients over the same ranks
    axes = {name: new_axis(name, groups(ranks, dim), world, own=name == "cp") for dim, name in enumerate(AXES)}
    dp_cp = replace(axes["dp"], name="dp_cp") if sizes["cp"] == 1 else new_axis("dp_cp", joint_groups(ranks), world)
    whole = Axis("all", world.size, world.rank, tuple(range(world.size)), dist.group.WORLD)
    return Mesh(world, ranks, axes, dp_cp, whole, *split_replicas(ranks, dp_cp, parallel.shard, world))


def split_replicas(grid: Tensor, dp_cp: Axis, size: int, world: World) -> tuple[Axis, Axis]:
    """Split dp x cp into groups of `size` neighbors, which share one copy of the parameters (0: all of them), and the groups of
    ranks that hold the same share: the axes `shard` and `replicate`. Raises `CourseError` if `size` does not divide dp x cp."""
    if size in (0, dp_cp.size):
        return dp_cp, Axis("replicate")
    check_shard(size, dp_cp.size)
    return split_joint(grid, size, ("shard", "replicate"), world)


def split_joint(grid: Tensor, size: int, names: tuple[str, str], world: World, own: bool = False) -> tuple[Axis, Axis]:
    """Split dp x cp into groups of `size` neighbors, which divides it, and into the groups of ranks at the same place of theirs:
    two axes of these names. own: whether the first must not share a process group. All ranks call it together."""
    lines = joint_groups(grid).unflatten(1, (-1, size))                 # (pp x tp, groups, ranks of a group)
    return (new_axis(names[0], lines.flatten(0, 1), world, own),
            new_axis(names[1], lines.transpose(1, 2).flatten(0, 1), world))


def joint_groups(grid: Tensor) -> Tensor:
    """The ranks of each group along dp x cp, (pp x tp, dp x cp), in ascending order: that is the order of a process group."""
    return grid.permute(0, 3, 1, 2).flatten(2).flatten(0, 1).sort(1).values


def new_axis(name: str, lines: Tensor, world: World, own: bool = False) -> Axis:
    """This rank's axis of several, one for each row of ascending global ranks; an axis of size 1 for a rank in none of the rows.
    All ranks make all groups, in the same order.

    NCCL keeps buffers for each process group. So an axis of all ranks takes the group of all, unless it is to have its `own`."""
    if lines.shape[1] == 1:
        return Axis(name, ranks=(world.rank,))
    made = Axis(name)
    for line in lines.tolist():
        group = dist.group.WORLD if len(line) == world.size and not own else dist.new_group(line)
        if world.rank in line:
            made = Axis(name, len(line), line.index(world.rank), tuple(line), group)
    return made


def single(world: World) -> Mesh:
    """The mesh of one process."""
    axes = {name: Axis(name) for name in AXES}
    dp_cp = Axis("dp_cp")
    return Mesh(world, torch.zeros([1] * len(AXES), dtype=torch.long), axes, dp_cp, Axis("all"), dp_cp, Axis("replicate"))


def nodes(size: int) -> list[str]:
    """The node of each rank, as the rank reports it: options like `srun -m cyclic` assign ranks in any order."""
    names: list[str] = [""] * size
    dist.all_gather_object(names, node())
    return names


def check_nodes(together: list[list[int]], names: list[str], order: str) -> None:
    """Raise `CourseError` on all ranks if a tensor-parallel group spans several nodes."""
    for line in together:
        if len({names[rank] for rank in line}) > 1:
            where = ", ".join(f"rank {rank} on {names[rank]}" for rank in line)
            raise CourseError(f"parallel.overlap=symmetric joins GPUs of one node, and some of parallel.tp={len(line)} are on "
                              f"several ({where}; parallel.order={order}): start a multiple of {len(line)} on each node, block "
                              "by block (srun --distribution=block), or use parallel.overlap=nccl")


def _first_node() -> str:
    """The node of the step's rank 0, where all ranks meet; if its Slurm name does not resolve, the node that called srun."""
    nodes = os.environ.get("SLURM_STEP_NODELIST", "")
    first = re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]                      # gpu[003-004,017],x1 -> gpu003
    if first == nodes:                               # the only node is this one
        return "127.0.0.1"
    try:
        socket.getaddrinfo(first, None)
    except OSError:                                  # several Slurm nodes on one machine have names that do not resolve
        return os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    return first


def _identity() -> tuple[int, int, int]:
    """(rank, number of processes, rank on this node) from torchrun's or srun's variables, else (0, 1, 0)."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0))
    # only srun sets SLURM_STEP_NUM_TASKS; SLURM_NTASKS is also set in the batch script, which is one process
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        env.setdefault("MASTER_ADDR", _first_node())
        # below the ephemeral ports
        env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", 0)) % 12000))
        return int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_LOCALID"])
    return 0, 1, 0
