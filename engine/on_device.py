"""Allocation in a device's memory from any thread: on that device, visible to every stream, or rejected."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from baton.engine.config.model_config import ModelError


class NoMemoryLeft(ModelError):
    """Out of memory on a device."""


@contextmanager
def made_on(device: torch.device, what: str) -> Iterator[None]:
    """Run the body with the device as the thread's current one, then synchronise, since other streams do not wait.

    Raises: NoMemoryLeft, naming `what`.
    """
    on_gpu = device.type == "cuda"
    with torch.cuda.device(device) if on_gpu else nullcontext():
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise NoMemoryLeft(f"out of memory on {device} for {what}: {error}") from error
        if on_gpu:
            torch.cuda.current_stream(device).synchronize()


def mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"
