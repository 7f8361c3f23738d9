"""Choice of an operation's implementation: Triton on a GPU, C++ on a CPU, otherwise the reference in PyTorch.

All implementations of an operation have the same name and arguments. The operation's contract and checks are in
kernels/*.py.
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
    """Return the implementation of an operation for the device of `tensor`, one of the operation's arguments.

    `reference`: the operation's function in kernels/reference.py. `fits`: whether the native kernel accepts the
    arguments.
    """
    found = None
    if uses_triton(tensor):
        found = getattr(launchers(), reference.__name__, None)
    if found is None and fits and tensor.device.type == "cpu":
        found = getattr(native_library(), reference.__name__, None)
    return reference if found is None else cast("Operation", found)


def uses_triton(tensor: torch.Tensor) -> bool:
    """Return whether Triton kernels compute on this tensor: on a GPU, or if a test uses Triton's interpreter."""
    return tensor.is_cuda or _INTERPRETED.get()


@contextmanager
def on_the_interpreter() -> Iterator[None]:
    """Use the Triton kernels for CPU tensors. Triton must interpret them (TRITON_INTERPRET=1)."""
    before = _INTERPRETED.set(True)
    try:
        yield
    finally:
        _INTERPRETED.reset(before)


@functools.cache
def launchers() -> ModuleType:
    """Load the Triton launchers at first use, since Triton may not be installed on machines without a GPU."""
    return importlib.import_module("baton.kernels.triton.launchers")
