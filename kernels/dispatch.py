"""Which implementation computes an operation: Triton's on a GPU, C++ on a CPU, and the reference wherever neither does.

All have the name and arguments of the operation in kernels/*.py, where its contract and its checks stand.
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
    """`reference`: of kernels/reference.py, by whose name the others are found. `tensor` is one of the arguments;
    `fits`: whether the native kernel takes them, where there is one.
    """
    found = None
    if uses_triton(tensor):
        found = getattr(launchers(), reference.__name__, None)
    if found is None and fits and tensor.device.type == "cpu":
        found = getattr(native_library(), reference.__name__, None)
    return reference if found is None else cast("Operation", found)


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether it is of a GPU, or the tests of the kernels have those of a CPU interpreted."""
    return tensor.is_cuda or _INTERPRETED.get()


@contextmanager
def on_the_interpreter() -> Iterator[None]:
    """Within it, tensors of a CPU go to the Triton kernels too, which Triton must interpret (TRITON_INTERPRET=1)."""
    before = _INTERPRETED.set(True)
    try:
        yield
    finally:
        _INTERPRETED.reset(before)


@functools.cache
def launchers() -> ModuleType:
    """Loaded at first use: on a CPU there may be no Triton."""
    return importlib.import_module("baton.kernels.triton.launchers")
