"""Choice of the implementation of an operation: Triton on a GPU, C++ on a CPU, otherwise the reference.

All have the name and arguments of the operation in kernels/*.py, where its contract and its checks are.
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
    """Return the implementation for `tensor`, one of the arguments. `reference`: of kernels/reference.py, by whose name
    the others are found. `fits`: whether the native kernel, if there is one, accepts the arguments.
    """
    found = None
    if uses_triton(tensor):
        found = getattr(launchers(), reference.__name__, None)
    if found is None and fits and tensor.device.type == "cpu":
        found = getattr(native_library(), reference.__name__, None)
    return reference if found is None else cast("Operation", found)


def uses_triton(tensor: torch.Tensor) -> bool:
    """Return whether Triton computes it: a tensor of a GPU, or of a CPU while tests interpret the kernels."""
    return tensor.is_cuda or _INTERPRETED.get()


@contextmanager
def on_the_interpreter() -> Iterator[None]:
    """Send CPU tensors to the Triton kernels inside the block, which Triton must interpret (TRITON_INTERPRET=1)."""
    before = _INTERPRETED.set(True)
    try:
        yield
    finally:
        _INTERPRETED.reset(before)


@functools.cache
def launchers() -> ModuleType:
    """Loaded at first use: on a CPU there may be no Triton."""
    return importlib.import_module("baton.kernels.triton.launchers")
