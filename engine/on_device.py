"""Allocate a device's memory from any thread, visible to all streams; a lack of memory raises ModelError."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from baton.engine.config.model_config import ModelError


class NoMemoryLeft(ModelError):
    """Lack of memory on a device; the message says what the memory was for."""


@contextmanager
def made_on(device: torch.device, what: str) -> Iterator[None]:
    """Run the body with `device` as the thread's current GPU, then wait for the GPU.

    The wait is needed because other streams would not wait for the body's work.
    Raises: NoMemoryLeft; its message says that there is no memory for `what`.
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
