"""16-bit weights on one data-parallel rank, and their float32 values, the *master weights*, in the optimizer, as in Megatron-LM.

Autocast reads a linear's float32 weight and writes the 16 bits that the matmul multiplies, in every forward pass; backward it
casts the weight's gradient the other way. Here the weight is in 16 bits, and its gradient stays as the matmul has written it.
Fused Adam (`course/ops/fused_adam.py`) reads that, updates the master, and writes the weight in the same pass. Of each number
14 bytes fewer move: 6 of the cast, 6 of the gradient's, 2 of the norm; Adam itself reads two fewer and writes two more. Training
is the same to the bit.

Of several backward passes in a step (micro-batches) the gradients are added up in float32, as they come: the first moves 6 bytes
fewer, each other 14, Adam writes 2 more; and all that a pipeline has under way share one copy.
`course/parallel/data_parallel/zero1.py` does the same over ranks, in buckets.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from course.parallel.data_parallel.gradients import NoSync, fill_missing_gradients
from course.parallel.data_parallel.zero1 import castable_weights
from course.parallel.placement import Placements

AS_IT_IS = hasattr(torch.Tensor, "grad_dtype")      # whether a parameter may have a gradient in another format, in this PyTorch


class MasterWeights(NoSync):
    """No averaging; `optimizer_parameters` are masters in the place of the weights that are in 16 bits.

    low: the 16 bits of the matmuls. `copies`: of each master the model's weight, which the optimizer has to keep equal.
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
                master.grad_dtype = None            # any
            copy.register_post_accumulate_grad_hook(accumulation_hook(weakref.ref(self), weakref.ref(master)))
        of = {copy: master for master, copy in self.copies.items()}
        self.optimizer_parameters = [of.get(p, p) for p in self.optimizer_parameters]
        self.trainable = [p for p in self.trainable if p not in of]

    def begin(self, num_microbatches: int) -> None:
        """Forget gradients. Of one pass a copy's gradient stays in 16 bits; of several the master adds them up, in float32."""
        super().begin(num_microbatches)
        self.num_microbatches = num_microbatches

    def finish(self) -> None:
        """Complete the gradients, and hand those of the copies to their masters."""
        super().finish()
        for master, copy in self.copies.items():
            if master.grad is None:                 # of one pass, or none
                fill_missing_gradients([copy])
                assert copy.grad is not None
                master.grad, copy.grad = copy.grad if AS_IT_IS else copy.grad.float(), None

    def clear(self) -> None:
        """Forget the gradients of members, masters and copies."""
        super().clear()
        for master, copy in self.copies.items():
            master.grad = copy.grad = None

    def full_master_weights(self) -> dict[nn.Parameter, Tensor]:
        """The model's 16-bit weight -> its float32 master, of the same shape: a view that the optimizer goes on changing."""
        return {copy: master.detach() for master, copy in self.copies.items()}


def accumulation_hook(there: weakref.ref[MasterWeights], of: weakref.ref[nn.Parameter]) -> Callable[[Tensor], None]:
    """What a copy does when a backward pass has written its gradient: of several passes the master adds them up. It holds neither
    of them, as `data.hook` does not."""
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
