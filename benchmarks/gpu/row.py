"""What a row of the table is: figures, each with its target, how they are timed, and what the device itself does.

The device's own speed is measured in the same run as everything that is held against it.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch

Size = TypeVar("Size")


@dataclass(frozen=True, slots=True)
class Setting:
    device: torch.device
    dry: bool  # on a CPU, at sizes of nothing: only whether it runs

    def size(self, real: Size, dry: Size) -> Size:
        return dry if self.dry else real


class Wanted(StrEnum):
    AT_LEAST = "at least"
    AT_MOST = "at most"


class Target(NamedTuple):
    wanted: Wanted
    value: float


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    unit: str
    target: Target | None = None
    limit: str = ""  # what the device itself does, measured in the same run

    @property
    def is_met(self) -> bool | None:
        if self.target is None:
            return None
        if self.target.wanted is Wanted.AT_LEAST:
            return self.value >= self.target.value
        return self.value <= self.target.value

    def as_dict(self) -> dict[str, Any]:
        target = "" if self.target is None else f"{self.target.wanted} {self.target.value:g}"
        fields = {"name": self.name, "value": self.value, "unit": self.unit, "target": target, "limit": self.limit}
        return {**fields, "met": self.is_met}


class AbsentError(Exception):
    """Something that a row is measured with, or against, is not here; the message says what."""


DEVICE_LOST = 75
"""Exit status of a process whose CUDA context a row has broken: after an illegal access every later call fails."""


class Row(NamedTuple):
    name: str
    measure: Callable[[Setting], Sequence[Figure]]
    """Raises: AbsentError."""


def at_least(value: float) -> Target:
    return Target(Wanted.AT_LEAST, value)


def at_most(value: float) -> Target:
    return Target(Wanted.AT_MOST, value)


ROUNDS = 10


def seconds_each(calls: Sequence[Callable[[], object]], setting: Setting) -> float:
    """Of one of `calls`, which are recorded as one graph, so that nothing stands between them: median of some rounds.

    Calls that read different memory find the cache cold, as layers of a model do.
    """
    if setting.device.type != "cuda":
        return _on_host(lambda: [call() for call in calls]) / len(calls)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return seconds(graph.replay, setting) / len(calls)


def seconds(call: Callable[[], object], setting: Setting) -> float:
    """Of one call, by events on the device: median of some rounds after two that are not counted."""
    if setting.device.type != "cuda":
        return _on_host(call)
    for _ in range(2):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
    for mark in marks[:-1]:
        mark.record()
        call()
    marks[-1].record()
    torch.cuda.synchronize()
    between_ms: list[float] = [first.elapsed_time(then) for first, then in pairwise(marks)]
    return statistics.median(between_ms) / 1e3


def _on_host(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@functools.cache
def copy_bytes_per_s(setting: Setting) -> float:
    """Read and written, by PyTorch's own copy of a large piece."""
    nbytes = setting.size(4 << 30, 1 << 20)
    source = torch.empty(nbytes, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * nbytes / seconds(lambda: target.copy_(source), setting)


@functools.cache
def flop_per_s(setting: Setting) -> float:
    """Of a bf16 product of random numbers."""
    size = setting.size(8192, 64)
    left, right = torch.randn(2, size, size, device=setting.device, dtype=torch.bfloat16)
    return 2 * size**3 / seconds(lambda: left @ right, setting)


def said_copy(setting: Setting) -> str:
    return f"copy {copy_bytes_per_s(setting) / 1e12:.2f} TB/s"


def said_products(setting: Setting) -> str:
    return f"matmul {flop_per_s(setting) / 1e12:.0f} TFLOP/s"
