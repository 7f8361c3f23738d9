"""This machine's limits, measured beside the figures that are compared with them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

READ_BYTES = 256 << 20  # past every cache
ROW = 16384  # numbers; a matrix times a vector reads faster than most sums do
MATRIX_SIZE = 1024
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Limits:
    """With torch's threads, in the dtype that was asked for or in float32, which is faster where that is emulated."""

    read_bytes_per_s: float
    flop_per_s: float


def measure_limits(dtype: torch.dtype) -> Limits:
    """The best of a few rounds each: other processes can only have slowed them down."""
    with torch.inference_mode():
        numbers, ones = torch.ones(READ_BYTES // 4 // ROW, ROW), torch.ones(ROW)
        left, right = torch.randn(MATRIX_SIZE, MATRIX_SIZE), torch.randn(MATRIX_SIZE, MATRIX_SIZE)
        reading_s = min(shortest(lambda: numbers @ ones), shortest(numbers.sum))
        computing_s = min(
            shortest(partial(torch.matmul, left.to(each), right.to(each))) for each in {dtype, left.dtype}
        )
    return Limits(READ_BYTES / reading_s, 2 * MATRIX_SIZE**3 / computing_s)


def shortest(run: Callable[[], object]) -> float:
    """Seconds, after one run that is not counted."""
    run()
    return min(_seconds(run) for _ in range(ROUNDS))


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
