"""What every launcher checks about its arguments, in one wording."""

import torch


def check_shape(name: str, tensor: torch.Tensor, *shape: int | None) -> None:
    """`None` stands for any size."""
    actual = tensor.shape
    if len(actual) != len(shape) or any(want not in (None, size) for want, size in zip(shape, actual, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must be [{wanted}], got {list(actual)}")


def check_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")


def check_index(name: str, tensor: torch.Tensor, length: int | None = None) -> None:
    """int64, since an offset into a pool of pages passes 2**31 elements early; one dimension."""
    check_shape(name, tensor, length)
    check_dtype(name, tensor, torch.int64)
