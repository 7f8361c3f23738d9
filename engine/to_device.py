"""Numbers of a step from the host to a device: all of them in one copy that the host does not wait for."""

from array import array
from collections.abc import Sequence

import torch

DTYPES = {"q": torch.int64, "d": torch.float64, "f": torch.float32}  # by the type code of the array


def to_device(arrays: Sequence[array], device: torch.device) -> list[torch.Tensor]:  # type: ignore[type-arg]
    """One tensor each; wider numbers come first, so that all are aligned.

    On a GPU the bytes wait in pinned memory until they are copied: PyTorch's allocator does not reuse it before.
    """
    whole = torch.frombuffer(bytearray().join(arrays), dtype=torch.uint8)
    if device.type == "cuda":
        whole = whole.pin_memory().to(device, non_blocking=True)
    parts = whole.split([len(part) * part.itemsize for part in arrays])
    return [part.view(DTYPES[each.typecode]) for part, each in zip(parts, arrays, strict=True)]
