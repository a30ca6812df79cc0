"""Ranks that do not compute as the library's do, to compare predictions with what others measured."""

from dataclasses import fields

from course.config import Config
from course.planner.hardware import Hardware
from course.planner.rank_workload import RankWorkload, workload_of


class Workload16Bit(RankWorkload):
    """All in 16 bits, weights too: nothing is cast, norms read and write 16 bits. The stacks of `course bench tp` and `pp`."""

    @property
    def wide(self) -> int:
        """Two bytes: norms read and write 16 bits, too."""
        return self.low

    @property
    def casts(self) -> bool:
        """Never: weights are in 16 bits."""
        return False


class MegatronWorkload(Workload16Bit):
    """Megatron-LM of 2021: 16-bit weights and gradients, a softmax kernel between the matmuls of attention, and messages of a
    pipeline of which each tensor-parallel rank sends its part (Narayanan et al. 2021, arXiv:2104.04473, section 4.1)."""

    @property
    def message(self) -> float:
        """Bytes of each tensor-parallel rank's part."""
        return super().message / self.p.tp

    @property
    def gradient(self) -> int:
        """Two bytes: gradients are averaged in 16 bits."""
        return 2

    @property
    def backend(self) -> str:
        """The name in tables of kernels of attention by two matmuls, between which a kernel takes the softmax."""
        return "unfused"


def workload_as(kind: type[RankWorkload], config: Config, hardware: Hardware, gpus: int = 0) -> RankWorkload:
    """A rank of this kind instead of the library's."""
    local = workload_of(config, hardware, gpus)
    return kind(**{entry.name: getattr(local, entry.name) for entry in fields(RankWorkload)})
