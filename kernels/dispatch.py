"""Choice of an operation's implementation: Triton on a GPU, C++ on a CPU, otherwise the reference.

All share the name and arguments of the operation in kernels/*.py, which has its contract and its checks.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, TypeVar, cast

import torch

from baton.kernels.native.library import native_library

Operation = TypeVar("Operation", bound=Callable[..., Any])
_INTERPRETED = ContextVar("interpreted", default=False)


def pick(reference: Operation, tensor: torch.Tensor, fits: bool = True) -> Operation:
    """Return the implementation for `tensor`, one of the arguments. `reference`: function of kernels/reference.py,
    whose name the others share. `fits`: whether the native kernel accepts the arguments.
    """
    found = None
    if uses_triton(tensor):
        found = getattr(launchers(), reference.__name__, None)
    if found is None and fits and tensor.device.type == "cpu":
        found = getattr(native_library(), reference.__name__, None)
    return reference if found is None else cast("Operation", found)


def uses_triton(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is on a GPU, or kernel tests interpret Triton on a CPU."""
    return tensor.is_cuda or _INTERPRETED.get()


@contextmanager
def on_the_interpreter() -> Iterator[None]:
    """Let CPU tensors use the Triton kernels, which Triton must interpret (TRITON_INTERPRET=1)."""
    before = _INTERPRETED.set(True)
    try:
        yield
    finally:
        _INTERPRETED.reset(before)


@functools.cache
def launchers() -> ModuleType:
    """Load the Triton launchers at first use: on a CPU Triton may be missing."""
    return importlib.import_module("baton.kernels.triton.launchers")
