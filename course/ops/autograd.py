"""The type of what a `torch.autograd.Function` keeps between its passes."""

from typing import Any, Protocol

from torch import Tensor


class Context(Protocol):
    """`ctx` of forward and backward. PyTorch's stub of it has neither `saved_tensors` nor what one puts there oneself."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for `saved_tensors`."""

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None: ...
