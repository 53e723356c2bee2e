"""Reads and writes memory as a kernel does: from a tensor's data pointer on, in order, without its strides.

Unlike a kernel, nothing here leaves the storage: what lies outside belongs to somebody else. Works on both devices, and no
version counter moves.
"""

import torch
from torch import Tensor


def read(tensor: Tensor, count: int | None = None) -> Tensor:
    """The first `count` elements at `tensor`'s data pointer, strides ignored: what a kernel sees that was given none.

    Args:
        tensor: any shape and strides.
        count: elements; tensor.numel() for None.

    Returns:
        [count], a copy, dtype and device of `tensor`.

    Raises:
        ValueError: the storage ends before.

    Cost: reads and writes count elements.
    """
    return _memory(tensor, tensor.numel() if count is None else count, "read").clone()


def write(tensor: Tensor, values: Tensor) -> None:
    """Write `values`, in order, from `tensor`'s data pointer on, strides ignored and no version counter moved.

    Args:
        tensor: any shape and strides.
        values: any shape; as many elements are written as it has, converted to tensor's dtype.

    Raises:
        ValueError: the storage ends before.
    """
    _memory(tensor, values.numel(), "write").copy_(values.detach().reshape(-1))


def flat(tensor: Tensor) -> Tensor:
    """An alias of `tensor`'s shape that starts at its data pointer and is contiguous: what a kernel that computes
    row * columns + column takes `tensor` for.

    Raises:
        ValueError: the storage ends before.
    """
    if tensor.numel() > elements_left(tensor):
        raise ValueError(
            f"taken for contiguous, {tuple(tensor.shape)} needs {tensor.numel()} elements, and the storage has "
            f"{elements_left(tensor)} from there on; lay it in a larger one first: scenarios.staged(y)"
        )
    return _memory(tensor, tensor.numel(), "flat").view(tensor.shape)


def elements_left(tensor: Tensor) -> int:
    """How many elements fit between `tensor`'s data pointer and the end of its storage."""
    return tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()


def _memory(tensor: Tensor, count: int, what: str) -> Tensor:
    """[count] over the storage itself, with a version counter of its own."""
    left = elements_left(tensor)
    if not 0 <= count <= left:
        raise ValueError(
            f"raw.{what} stays inside the storage: {count} elements from offset {tensor.storage_offset()} on, "
            f"but {left} are left there; ask for at most {left}"
        )
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), (count,), (1,))
