"""The type of the `ctx` of a `torch.autograd.Function`."""

from typing import Any, Protocol

from torch import Tensor


class Context(Protocol):
    """`ctx` of forward and backward. PyTorch's stub has neither `saved_tensors` nor custom attributes."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for `saved_tensors`."""

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None: ...
