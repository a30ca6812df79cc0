"""16-bit weights on one data-parallel rank, and their float32 values, the *master weights*, in the optimizer, as in Megatron-LM.

Autocast reads a linear's float32 weight and writes the 16 bits that the matmul multiplies, in every forward pass; backward it
casts the weight's gradient the other way. Here the weight is in 16 bits, and its gradient stays as the matmul has written it.
Adam by hand (`course/adam.py`) reads that, updates the master, and writes the weight in the same pass. Of each number 14 bytes
fewer move: 6 of the cast, 6 of the gradient's, 2 of the norm; Adam itself reads two fewer and writes two more. Training is the
same to the bit.

Only where a step has one backward pass: gradients of several are added up in float32. `course/parallel/zero.py` does the same
over ranks, in buckets.
"""

import torch
from torch import Tensor, nn

from course.errors import CourseError
from course.parallel.data import Naive
from course.parallel.mesh import Axis
from course.parallel.placement import place, placement
from course.parallel.zero import castable

AS_IT_IS = hasattr(torch.Tensor, "grad_dtype")      # whether a parameter may have a gradient in another format, in this PyTorch


class Masters(Naive):
    """No averaging; `parameters` are masters in the place of the weights that are in 16 bits.

    low: the 16 bits of the matmuls. Each master's `copy` is the model's weight, which the optimizer has to keep equal.
    """

    def __init__(self, model: nn.Module, axis: Axis, low: torch.dtype):
        super().__init__(model, axis)
        self.copies = {place(nn.Parameter(p.data), placement(p)): p for p in castable(model)}
        for master, copy in self.copies.items():
            copy.data = master.to(low)
            master.copy = copy                      # type: ignore[attr-defined]
            if AS_IT_IS:
                master.grad_dtype = low
        of = {copy: master for master, copy in self.copies.items()}
        self.parameters = [of.get(p, p) for p in self.parameters]

    def begin(self, passes: int) -> None:
        """Backward passes of a step are about to begin. Raises `CourseError` for more than one."""
        if passes != 1:
            raise CourseError(f"{passes} backward passes in a step add up gradients, which would be sums in 16 bits: give "
                              "batches of train.global_batch samples, or set kernels=pytorch, with which weights stay in float32")

    def finish(self) -> None:
        """Complete the gradients, and hand those of the copies to their masters."""
        super().finish()
        for master, copy in self.copies.items():
            assert copy.grad is not None
            master.grad, copy.grad = copy.grad if AS_IT_IS else copy.grad.float(), None

    def clear(self) -> None:
        super().clear()
        for master in self.copies:
            master.grad = None

    def values(self) -> dict[nn.Parameter, Tensor]:
        return {copy: master.detach() for master, copy in self.copies.items()}
