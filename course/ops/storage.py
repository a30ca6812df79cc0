"""Free and restore the memory of a tensor that other tensors, views of it, refer to."""

from torch import Tensor


def free_memory(x: Tensor) -> None:
    """Free a tensor's memory; it and all its views keep their shapes. Reading them is an error until `allocate`."""
    x.untyped_storage().resize_(0)


def allocate(x: Tensor) -> None:
    """Give a whole tensor that `free_memory` has freed its memory again, with arbitrary values."""
    if not has_memory(x):                           # on a GPU, resizing to the same size would also move the tensor
        x.untyped_storage().resize_(x.numel() * x.element_size())


def has_memory(x: Tensor) -> bool:
    """Whether a tensor's values are in memory."""
    return x.numel() == 0 or x.untyped_storage().nbytes() > 0
