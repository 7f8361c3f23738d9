"""Allocate device memory in any thread, for use by all streams. A failed allocation raises NoMemoryLeft."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from baton.engine.config.model_config import ModelError


class NoMemoryLeft(ModelError):
    """Lack of memory on a device; the message says what the memory was for."""


@contextmanager
def made_on(device: torch.device, what: str) -> Iterator[None]:
    """Run the body with `device` as the thread's current GPU, then wait for the GPU.

    Without this wait, other streams could use the memory before the body's work on it is complete.
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
