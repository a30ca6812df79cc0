"""16-bit weights on a single data-parallel rank, with float32 *master weights* in the optimizer, as in Megatron-LM.

In every forward pass autocast reads a linear's float32 weight and writes the 16-bit copy for the matmul; in the backward pass
it casts the weight's gradient back. Here the weight has 16 bits, and its gradient stays as the matmul wrote it. Fused Adam
(`course/ops/fused_adam.py`) reads that gradient, updates the master, and writes the weight in the same pass. This moves 14
bytes less per weight: 6 for the cast, 6 for the gradient's cast, 2 for the norm; Adam itself reads 2 fewer and writes 2 more.
Training is identical to the bit.

With several micro-batches in a step, the gradients are summed in float32 as they arrive. The first backward pass then moves 6
bytes less, each other one 14, and Adam writes 2 more. All micro-batches in flight in a pipeline share one 16-bit copy.
`course/parallel/data_parallel/zero1.py` does the same over ranks, in buckets.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from course.parallel.data_parallel.gradients import NoSync, fill_missing_gradients
from course.parallel.data_parallel.zero1 import castable_weights
from course.parallel.placement import Placements

AS_IT_IS = hasattr(torch.Tensor, "grad_dtype")      # whether this PyTorch lets a gradient have another dtype than its parameter


class MasterWeights(NoSync):
    """No averaging; `optimizer_parameters` holds float32 masters in place of the 16-bit weights.

    low: the 16-bit dtype of the matmuls. `copies`: master -> the model's weight, which the optimizer keeps equal.
    """

    def __init__(self, model: nn.Module, placements: Placements, bucket_mb: float = 25.0, low: torch.dtype | None = None):
        super().__init__(model, placements, bucket_mb, low)
        assert low is not None
        self.copies = {nn.Parameter(p.data): p for p in castable_weights(model, placements)}
        self.num_microbatches = 1
        for master, copy in self.copies.items():
            placements[master] = placements[copy]
            copy.data = master.to(low)
            if AS_IT_IS:
                master.grad_dtype = None            # any dtype
            copy.register_post_accumulate_grad_hook(accumulation_hook(weakref.ref(self), weakref.ref(master)))
        of = {copy: master for master, copy in self.copies.items()}
        self.optimizer_parameters = [of.get(p, p) for p in self.optimizer_parameters]
        self.trainable = [p for p in self.trainable if p not in of]

    def begin(self, num_microbatches: int) -> None:
        """Drop gradients. One backward pass leaves a copy's gradient in 16 bits; the master sums several, in float32."""
        super().begin(num_microbatches)
        self.num_microbatches = num_microbatches

    def finish(self) -> None:
        """Complete the gradients, and hand the copies' gradients to their masters."""
        super().finish()
        for master, copy in self.copies.items():
            if master.grad is None:                 # one pass, or no gradient
                fill_missing_gradients([copy])
                assert copy.grad is not None
                master.grad, copy.grad = copy.grad if AS_IT_IS else copy.grad.float(), None

    def clear(self) -> None:
        """Drop the gradients of parameters, masters and copies."""
        super().clear()
        for master, copy in self.copies.items():
            master.grad = copy.grad = None

    def full_master_weights(self) -> dict[nn.Parameter, Tensor]:
        """The model's 16-bit weight -> its float32 master, of the same shape: a view that the optimizer keeps changing."""
        return {copy: master.detach() for master, copy in self.copies.items()}


def accumulation_hook(there: weakref.ref[MasterWeights], of: weakref.ref[nn.Parameter]) -> Callable[[Tensor], None]:
    """The hook for a copy's new gradient: with several micro-batches, add it to the master's. It holds only weak references, as
    `gradient_hook` does."""
    def run(copy: Tensor) -> None:
        gradients, master = there(), of()
        if gradients is None or master is None or gradients.num_microbatches == 1 or copy.grad is None:
            return
        if master.grad is None:
            master.grad = copy.grad.to(master.dtype)
        else:
            master.grad += copy.grad
        copy.grad = None

    return run
