"""Detection of kernels that Triton compiles or loads during a run: in production a request would wait for them."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Yield a list that gets the names of kernels that Triton compiles inside the block; empty without Triton."""
    names: list[str] = []
    try:
        runtime: Any = importlib.import_module("triton").knobs.runtime
    except ImportError:
        yield names
        return
    before = runtime.jit_cache_hook

    def note(*, fn: Any, **rest: Any) -> Any:
        names.append(fn.name)
        return before(fn=fn, **rest) if before is not None else None  # None: Triton compiles the kernel

    runtime.jit_cache_hook = note
    try:
        yield names
    finally:
        runtime.jit_cache_hook = before
