"""Which tensors the Triton kernels compute on: those of a GPU, and in the tests of the kernels those of a CPU."""

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

import torch

_INTERPRETED = ContextVar("interpreted", default=False)


def triton_kernels(tensor: torch.Tensor) -> ModuleType | None:
    """`kernels.triton.launchers`, whose functions have the names and arguments of kernels/*.py; None off a GPU."""
    return _launchers() if tensor.is_cuda or _INTERPRETED.get() else None


@contextmanager
def on_the_interpreter() -> Iterator[None]:
    """Within it, tensors of a CPU go to the Triton kernels too, which Triton must interpret (TRITON_INTERPRET=1)."""
    before = _INTERPRETED.set(True)
    try:
        yield
    finally:
        _INTERPRETED.reset(before)


@functools.cache
def _launchers() -> ModuleType:
    """Loaded at first use: on a CPU there may be no Triton."""
    return importlib.import_module("baton.kernels.triton.launchers")
