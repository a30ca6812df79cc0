"""Vocabulary parallelism: each tensor-parallel rank has some rows of the token embedding and some columns of the logits.

The embedding and the logits are the largest tensors of a small language model: 50,304 logits per token, in float32 for the
loss, take more memory than all that a block keeps of the token. So no rank ever has the logits of the whole vocabulary. From
its own columns each rank computes the largest logit, the sum of exponentials and, if the target is there, the target's logit.
The ranks exchange only these three numbers per token (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
"""


import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from course.ops.autograd import Context
from course.parallel.mesh import Axis
from course.parallel.placement import Placements, cut
from course.parallel.token_split import SplitTokens, enter_region, leave_region
from course.utils.errors import CourseError


class VocabularyEmbedding(nn.Module):
    """Look up the tokens whose rows are here, use zeros for all others, and add up over the ranks."""

    def __init__(self, embedding: nn.Embedding, axis: Axis, tokens: SplitTokens | None = None):
        super().__init__()
        self.axis, self.tokens = axis, tokens
        self.weight = embedding.weight                                  # this rank's rows, (V / tp, D)

    def forward(self, tokens: Tensor) -> Tensor:                        # (B, T)
        row, here = own(tokens, len(self.weight), self.axis)            # 2 x (B, T)
        part = F.embedding(row, self.weight) * here[..., None]          # (B, T, D)
        return leave_region(part, self.axis, self.tokens)               # (B, T, D), sequence parallel (B, T / tp, D)


class VocabularyEnter(nn.Module):
    """Enter the region where each rank computes its part of the logits. The loss needs all tokens; it takes some at a time."""

    def __init__(self, axis: Axis, tokens: SplitTokens | None = None):
        super().__init__()
        self.axis, self.tokens = axis, tokens

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, D), sequence parallel (B, T / tp, D)
        return enter_region(x, self.axis, self.tokens)                  # (B, T, D)


class VocabularyCrossEntropy(nn.Module):
    """-log softmax(logits)[target] of each token, in float32 or float64, from each rank's columns of the logits."""

    def __init__(self, axis: Axis):
        super().__init__()
        self.axis = axis

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:        # (B, T, V / tp), (B, T)
        return CrossEntropy.apply(logits, target, self.axis)            # (B, T)

    def with_gradient(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:   # (N, V / tp), (N,)
        """(the losses, (N,); their gradients with respect to this rank's logits, (N, V / tp), in new memory)."""
        column, here = own(target, logits.shape[-1], self.axis)         # 2 x (N,)
        losses, softmax = losses_and_softmax(logits, column, here, self.axis)
        return losses, minus_target(softmax, column, here)

    def in_place(self, logits: Tensor, target: Tensor, weights: Tensor) -> Tensor:      # (N, V / tp), 2 x (N,)
        """The losses on a GPU, (N,) in float32, in two kernels; the logits become their gradients times the weights."""
        from course.ops import cross_entropy_triton  # Triton comes with PyTorch for GPUs alone

        column, here = own(target, logits.shape[-1], self.axis)         # 2 x (N,)
        column = column.where(here, -1)                                 # (N,)
        mine, *sums = cross_entropy_triton.summarize(logits, column)             # 3 x (N,)
        largest = mine.clone()                                          # (N,)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.axis.group)
        total = torch.stack([sums[0] * (mine - largest).exp(), sums[1]])                # (2, N)
        dist.all_reduce(total, group=self.axis.group)
        logs, wanted = total[0].log() + largest, total[1]               # 2 x (N,)
        cross_entropy_triton.differentiate_(logits, column, weights, logs)
        return logs - wanted                                            # (N,)


class CrossEntropy(Function):
    """log(sum exp s) - s[target], the same on every rank | softmax(s) minus 1 at the target, each rank's own columns."""

    @staticmethod
    def forward(ctx: Context, logits: Tensor, target: Tensor, axis: Axis) -> Tensor:    # (..., V / tp), (...) -> (...)
        column, here = own(target, logits.shape[-1], axis)              # 2 x (B, T)
        losses, softmax = losses_and_softmax(logits, column, here, axis)
        ctx.save_for_backward(softmax, column, here)
        ctx.dtype = logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        softmax, column, here = ctx.saved_tensors
        # in the softmax's memory, which nothing else uses; a second backward raises an autograd error, not a wrong number
        return minus_target(softmax, column, here).mul_(grad[..., None]).to(ctx.dtype), None, None


def losses_and_softmax(logits: Tensor, column: Tensor, here: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """(losses of all tokens, softmax of this rank's columns): (..., V / tp), 2 x (...) -> (...), (..., V / tp).

    column: the target's column on this rank. here: whether this rank has it. Both results are in float32 or
    float64, in new memory.
    """
    s = logits.to(torch.promote_types(logits.dtype, torch.float32))     # (..., V / tp)
    largest = s.amax(-1)                                                # (...)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=axis.group)
    s = s - largest[..., None]                                          # new memory: from here on in place
    wanted = s.gather(-1, column[..., None]).squeeze(-1) * here         # (...)
    sums = torch.stack([wanted, s.exp_().sum(-1)])                      # (2, ...)
    dist.all_reduce(sums, group=axis.group)
    wanted, total = sums
    return total.log() - wanted, s.div_(total[..., None])


def minus_target(softmax: Tensor, column: Tensor, here: Tensor) -> Tensor:
    """The softmax, in place, minus 1 at the target: the gradient of the losses with respect to the logits."""
    return softmax.scatter_add_(-1, column[..., None], -here[..., None].to(softmax.dtype))


def own(tokens: Tensor, rows: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Which of this rank's `rows` belongs to each token (0 for tokens of other ranks), and whether the token is here."""
    row = tokens - axis.rank * rows
    here = (row >= 0) & (row < rows)
    return row.where(here, 0), here


def cut_vocabulary(placements: Placements, weight: Tensor, axis: Axis) -> None:    # (V, D) -> (V / tp, D)
    """Keep only this rank's rows. Raises `CourseError` if the axis does not divide V."""
    vocab = placements[weight].global_shape[0]
    if vocab % axis.size:
        raise CourseError(f"parallel.{axis.name}={axis.size} does not divide the vocabulary of {vocab} tokens: pad it, with "
                          f"model.vocab={vocab + -vocab % axis.size}")
    cut(placements, weight, 0, axis)
