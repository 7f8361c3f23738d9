"""Tests of Triton kernels. Those in `interpreted_*.py` run in Triton's interpreter, in processes of their own.

`TRITON_INTERPRET=1 .venv/bin/pytest -o python_files='interpreted_*.py' tests/kernels/triton` runs them by hand.
"""

import os
from collections.abc import Iterator
from functools import cache
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
def cheaper_checks() -> Iterator[None]:
    """For each sum of integers Triton's interpreter (3.9 too) has seven more operations look for an overflow, and for
    each operation it makes a table of all types: a third of the time."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import numpy as np
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    exact: dict[str, Any] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def refuse_overflow(self: Any, left: Any, right: Any, operation: Any) -> None:
        scalar = left.type.scalar
        assert scalar == right.type.scalar and scalar.is_int()
        if scalar.int_bitwidth >= 64:
            return
        whole = exact[operation.__name__](left.handle.data.astype(np.int64), right.handle.data.astype(np.int64))
        fits = whole.size == 0 or (
            whole.max() <= scalar.get_int_max_value() and whole.min() >= scalar.get_int_min_value()
        )
        assert fits, f"int{scalar.int_bitwidth} overflow in {operation.__name__}"

    of_scalar = cache(interpreter._get_np_dtype)

    def numpy_type(of: Any) -> Any:
        scalar = of.scalar
        return np.dtype(np.uint64) if scalar.is_ptr() else of_scalar(scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", refuse_overflow)
        patch.setattr(interpreter, "_get_np_dtype", numpy_type)
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
