"""Spread experts over the axis ep, which is carved out of dp x cp: elsewhere in the model its ranks are data parallel.

    forward     each rank sends its tokens to the ranks of their experts (dispatch), and their outputs return (combine)
    backward    the gradients of outputs go to the experts (combine's transpose), those of tokens return (dispatch's)

Or, with `parallel.dispatch=gather`, each rank gathers all tokens, and returns its part of every output.

So an expert's weights get the gradient of the tokens of all ep ranks (Lepikhin et al. 2020, arXiv:2006.16668). All other
gradients are means over dp x cp. The experts' are means over the dp x cp / ep ranks that hold the same experts, and sums over ep.
Dividing these by ep makes them means over dp x cp as well.

tp cuts the width of each expert, as it cuts an MLP. With sequence parallelism the tokens of all tp ranks are gathered first.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from course.config.axes import check_ep
from course.models import Model
from course.models.experts import Compute, Experts, MoE, Route
from course.ops.autograd import Context
from course.parallel import mappings
from course.parallel.layout import Layout
from course.parallel.mesh import Axis, Mesh, split_joint
from course.parallel.placement import Placements, cut
from course.parallel.token_split import SplitTokens, enter_region, leave_region, modules_at_seam, permute_tokens

if TYPE_CHECKING:
    from course.config import Parallel


class DivideGradient(Function):
    """Forward: identity. Backward: division by a number."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, number: int) -> Tensor:
        ctx.number = number
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.number, None


class ExpertRoute(Route):
    """The way to experts that are spread over ep, their widths cut over tp. tokens: how sequence parallelism cuts them."""

    def __init__(self, ep: Axis, tp: Axis, tokens: SplitTokens | None):
        self.ep, self.tp, self.tokens = ep, tp, tokens

    def enter(self, x: Tensor) -> Tensor:                               # (B, T, ...), with sp (B, T / tp, ...)
        """Gather the tokens of all tp ranks with sequence parallelism; else their gradients are summed over tp."""
        return enter_region(x, self.tp, self.tokens)                    # (B, T, ...)

    def leave(self, x: Tensor) -> Tensor:                               # (B, T, D)
        """Sum the parts over tp, with sequence parallelism for this rank's own tokens."""
        return leave_region(x, self.tp, self.tokens)                    # (B, T, D), with sp (B, T / tp, D)

    def weight(self, weight: Tensor) -> Tensor:
        """The weight itself; its gradient, a sum over ep, is divided by ep."""
        return weight if self.ep.size == 1 else DivideGradient.apply(weight, self.ep.size)

    def run(self, rows: Tensor, counts: Tensor, compute: Compute) -> Tensor:        # (n, D), (E,) -> (n, D)
        """Exchange rows over ep around `compute`."""
        return compute(rows, counts) if self.ep.size == 1 else self.exchange(rows, counts, compute)

    @torch._disable_dynamo                          # the compiler would compile again for each number of rows
    def exchange(self, rows: Tensor, counts: Tensor, compute: Compute) -> Tensor:   # (n, D), (E,) -> (n, D)
        """`run` over several ranks. The host waits for the numbers of rows, which it needs for the all-to-all."""
        counts = counts.view(self.ep.size, -1)                          # (ep, E / ep)
        coming = torch.empty_like(counts)                               # (ep, E / ep): from each rank for each expert here
        dist.all_to_all_single(coming, counts.contiguous(), group=self.ep.group)
        sent, received = torch.stack([counts.sum(1), coming.sum(1)]).tolist()
        if sum(sent) < len(rows):
            rows = rows[:sum(sent)]
        rows = mappings.dispatch(rows, sent, received, self.ep)         # (m, D), by sender, then by expert
        expert = torch.arange(coming.shape[1], device=rows.device).repeat(self.ep.size)
        order = expert.repeat_interleave(coming.flatten(), output_size=sum(received)).argsort(stable=True)      # (m,)
        rows = compute(permute_tokens(rows, 0, order), coming.sum(0))   # (m, D), by expert
        rows = permute_tokens(rows, 0, order.argsort())                 # (m, D), by sender again
        return mappings.combine(rows, sent, received, self.ep)          # (n, D)


class GatherRoute(ExpertRoute):
    """Each rank gathers the samples of all ep ranks and computes those of its experts; each sample's parts are summed.

    The host has to know no numbers, so a CUDA graph can hold it. Memory: there is room for all choices of all ep ranks. Bytes: as
    of the all-to-all with ep = top_k; ep / top_k times as many with more ranks.
    """

    def enter(self, x: Tensor) -> Tensor:                               # (B, T, ...) -> (B · ep, T, ...)
        """Also gather the samples of all ep ranks."""
        return mappings.gather(super().enter(x), 0, self.ep)

    def leave(self, x: Tensor) -> Tensor:                               # (B · ep, T, D) -> (B, T, D)
        """Also sum the parts of this rank's samples."""
        return super().leave(mappings.scatter(x, 0, self.ep))

    def local(self, chosen: Tensor, number: int) -> tuple[Tensor, int]:
        """Choices of other ranks' experts become choices of none."""
        number //= self.ep.size
        chosen = chosen - self.ep.rank * number
        return chosen.masked_fill((chosen < 0) | (chosen > number), number), number

    def run(self, rows: Tensor, counts: Tensor, compute: Compute) -> Tensor:        # (n, D), (E / ep,) -> (n, D)
        """The outputs of this rank's experts; nothing travels."""
        return compute(rows, counts)


def carve(mesh: Mesh, size: int) -> tuple[Axis, Axis]:
    """The axes ep, of `size` neighbors along dp x cp, and expert_dp, of the ranks that hold the same experts.

    Raises `CourseError` if `size` does not divide dp x cp. All ranks call it together.
    """
    check_ep(size, mesh.dp_cp.size)
    return (Axis("ep"), mesh.dp_cp) if size == 1 else split_joint(mesh.grid, size, ("ep", "expert_dp"), mesh.world, own=True)


def apply_expert_parallel(model: Model, placements: Placements, mesh: Mesh, settings: "Parallel",
                          tokens: SplitTokens | None) -> None:
    """Cut the experts of a model on the meta device over ep and tp, and give them their route. tokens: with sequence parallelism,
    how tokens are cut. Raises `CourseError` if ep does not divide dp x cp or the experts, or tp their width."""
    ep, expert_dp = carve(mesh, settings.ep)
    for experts in modules_at_seam(model, "experts").values():
        assert isinstance(experts, Experts)
        for parameter, width in ((experts.up, 2), (experts.down, 2)):
            if ep.size > 1:
                cut(placements, parameter, 0, ep)
            if mesh.tp.size > 1:
                placements[parameter] = replace(placements[parameter], axis=None)       # a second cut
                cut(placements, parameter, width, mesh.tp)
            # with ZeRO each of the ranks that hold the same experts owns its share
            first = mesh.first_along_all_but("pp", "tp", "dp", "cp") and (settings.zero > 0 or expert_dp.rank == 0)
            placements[parameter] = replace(placements[parameter], average_over=expert_dp, owner=first)
        experts.route = (GatherRoute if settings.dispatch == "gather" else ExpertRoute)(ep, mesh.tp, tokens)


class LoadBalance:
    """Balances the load of experts by the biases of their routers, after each of an optimizer's steps."""

    def __init__(self, model: Model, layout: Layout, optimizer: torch.optim.Optimizer):
        self.dp = layout.mesh.dp
        self.mixtures = [module for module in model.modules() if isinstance(module, MoE) and module.router.bias is not None]
        for mixture in self.mixtures:               # exact in float64: these are numbers of tokens
            mixture.router.load = torch.zeros(mixture.c.experts, dtype=torch.float64, device=layout.mesh.world.device)
        if self.mixtures:
            optimizer.register_step_post_hook(self.after)

    @torch.no_grad()
    def after(self, optimizer: Any, *_: Any) -> None:
        """Move each bias by the load of the global batch, unless the optimizer skipped its update (`found_inf`)."""
        load = torch.stack([mixture.router.load for mixture in self.mixtures])          # (mixtures, E)
        if self.dp.size > 1:                        # a rank counts all tokens of its samples, those of other cp ranks included
            dist.all_reduce(load, group=self.dp.group)
        directions = (load.mean(1, keepdim=True) - load).sign() * (optimizer.found_inf == 0)        # (mixtures, E)
        for mixture, direction in zip(self.mixtures, directions, strict=True):
            bias = mixture.router.bias
            assert bias is not None
            bias.add_(mixture.c.balance_rate * direction.to(bias.dtype))
            mixture.router.load.zero_()
