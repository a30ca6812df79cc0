"""The grid of a Megatron-LM reproduction: GPTs in layouts of dp x tp x pp, with what they took there.

The source measured Megatron-LM on V100 GPUs of 16 GB, 8 in a node, nodes joined by 100 Gb/s InfiniBand, with samples of 2048
tokens; see the table of FACTS.md, section 1. These are its cases as data: what `course bench grid` measures on this machine.
"""

from dataclasses import dataclass

TOKENS = 2048                                        # of a sample
HEADS = {768: 12, 1536: 16, 2304: 24, 3072: 32}      # by width


@dataclass(frozen=True)
class Case:
    """A row of the table: a layout, a model and its batch, and what one iteration took there."""

    name: str                                        # dp x tp x pp _ global batch _ width x depth, as the source has it
    micro_batch: int
    ms: float
    mib: int

    @property
    def layout(self) -> tuple[int, int, int]:
        """Ranks along dp, tp and pp."""
        dp, tp, pp = map(int, self.name.split("_")[0].split("x"))
        return dp, tp, pp

    @property
    def gpus(self) -> int:
        dp, tp, pp = self.layout
        return dp * tp * pp

    @property
    def settings(self) -> list[str]:
        """Overrides of preset gpt-124m. The vocabulary stays 50,304, which all these tp divide."""
        (dp, tp, pp), (_, batch, shape) = self.layout, self.name.split("_")
        width, depth = map(int, shape.split("x"))
        return [f"model.context={TOKENS}", f"model.dim={width}", f"model.depth={depth}", f"model.heads={HEADS[width]}",
                f"train.global_batch={batch}", f"train.micro_batch={self.micro_batch}",
                f"parallel.dp={dp}", f"parallel.tp={tp}", f"parallel.pp={pp}"]


CASES = (
    Case("1x1x1_2_1536x16", 2, 464, 14362), Case("8x1x1_16_1536x16", 2, 481, 14938),
    Case("16x1x1_32_1536x16", 2, 664, 14508), Case("32x1x1_64_1536x16", 2, 684, 14508),
    Case("1x1x1_8_768x12", 8, 611, 9810), Case("1x8x1_16_1536x16", 16, 692, 12684),
    Case("1x16x1_16_3072x16", 16, 5610, 12150), Case("1x32x1_16_3072x32", 16, 13038, 8834),
    Case("2x4x1_16_1536x16", 8, 576, 9104), Case("4x2x1_16_1536x16", 4, 594, 9642),
    Case("2x8x1_16_2304x24", 8, 1314, 14928), Case("4x8x1_32_2304x24", 8, 1508, 15004),
    Case("8x1x4_512_1536x16", 2, 4894, 7130), Case("1x8x4_512_2304x24", 16, 22167, 14204),
    Case("2x4x4_512_2304x24", 8, 15331, 10018), Case("2x8x2_512_2304x24", 8, 16282, 10554),
)
