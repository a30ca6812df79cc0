"""Workloads of other implementations, to compare predictions with published measurements."""

from dataclasses import fields

from course.config import Config
from course.planner.hardware import Hardware
from course.planner.rank_workload import RankWorkload, workload_of


class Workload16Bit(RankWorkload):
    """Everything in 16 bits, weights and norms too, without casts: the stacks of `course bench tp` and `pp`."""

    @property
    def wide(self) -> int:
        """Two bytes: norms read and write 16 bits."""
        return self.low

    @property
    def casts(self) -> bool:
        """Never: weights are in 16 bits."""
        return False


class MegatronWorkload(Workload16Bit):
    """Megatron-LM of 2021: 16-bit weights and gradients, and a softmax kernel between attention's matmuls. Each tensor-parallel
    rank sends its share of a pipeline message (Narayanan et al. 2021, arXiv:2104.04473, section 4.1)."""

    @property
    def message(self) -> float:
        """Bytes of the share that each tensor-parallel rank sends."""
        return super().message / self.p.tp

    @property
    def gradient(self) -> int:
        """Two bytes: gradients are averaged in 16 bits."""
        return 2

    @property
    def backend(self) -> str:
        """The kernel tables' name for attention by two matmuls with a softmax kernel between them."""
        return "unfused"


def workload_as(kind: type[RankWorkload], config: Config, hardware: Hardware, gpus: int = 0) -> RankWorkload:
    """`workload_of` as a workload of another class."""
    local = workload_of(config, hardware, gpus)
    return kind(**{entry.name: getattr(local, entry.name) for entry in fields(RankWorkload)})
