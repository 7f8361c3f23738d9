"""What is made in a device's memory, on any thread: on that device, whole for every stream, or refused."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from baton.engine.config.model_config import ModelError


class NoMemoryLeft(ModelError):
    """A device has no room for what is allocated there."""


@contextmanager
def made_on(device: torch.device, what: str) -> Iterator[None]:
    """Kernels go to the thread's current device, and an engine's stream waits for no other.

    Raises: NoMemoryLeft.
    """
    on_gpu = device.type == "cuda"
    with torch.cuda.device(device) if on_gpu else nullcontext():
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise NoMemoryLeft(f"the memory of {device} has no room for {what}: {error}") from error
        if on_gpu:
            torch.cuda.current_stream(device).synchronize()


def mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"
