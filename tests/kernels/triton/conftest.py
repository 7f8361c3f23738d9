"""Tests of Triton kernels. Those in `interpreted_*.py` run in Triton's interpreter, in processes of their own.

`TRITON_INTERPRET=1 .venv/bin/pytest -o python_files='interpreted_*.py' tests/kernels/triton` runs them by hand.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def language_patched_once() -> Iterator[None]:
    """Triton's interpreter (3.9 too) patches the whole language anew whenever a function is called, thousands of times.

    Once for each function in a launch does: the end of the launch undoes it.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    launch, called = interpreter.InterpretedFunction.run, set[Any]()

    def launch_anew(self: Any, *arguments: Any, **named: Any) -> None:
        called.clear()
        launch(self, *arguments, **named)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.fn not in called:
            called.add(self.fn)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "run", launch_anew)
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        yield


@pytest.fixture(scope="session", autouse=True)
def exact_bfloat16() -> Iterator[None]:
    """Triton's interpreter (3.9 too) cuts bfloat16 instead of rounding it, and computes with its bits as integers."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def exact_cast(self: Any, source: Any, wanted: Any) -> Any:
        if wanted.scalar != tl.bfloat16:
            return cast(self, source, wanted)
        wide = np.ascontiguousarray(source.data, dtype=np.float32)
        bits = wide.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return TensorHandle(np.where(np.isnan(wide), 0x7FC0, rounded).astype(np.uint16), wanted.scalar)

    def exact_dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        return dot(self, widened(left), widened(right), *rest)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = exact_cast, exact_dot
    yield
    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast, dot
