"""Figures and targets of the GPU table, timing, and the device's own speed, measured in the same run."""

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
    dry: bool  # runs on a CPU at tiny sizes

    def size(self, real: Size, dry: Size) -> Size:
        return dry if self.dry else real


class Wanted(StrEnum):
    AT_LEAST = "at least"
    AT_MOST = "at most"


class DeviceRates(NamedTuple):
    """Rates from a GPU's data sheet."""

    gpu: str
    bytes_per_s: float
    flop_per_s: float  # dense bf16


H200 = DeviceRates("H200", 4.8e12, 989e12)
RATED = {"NVIDIA H200": H200, "NVIDIA H100 80GB HBM3": DeviceRates("H100", 3.35e12, 989e12)}
"""Rates by the name that CUDA reports: slices and slower cards have others."""


class Bound(StrEnum):
    """Hardware limit that determines an absolute target. Other targets are ratios of two figures of the same run."""

    MEMORY = "memory"
    PRODUCTS = "products"


class FigureTarget(NamedTuple):
    """Target of a figure. A target with a bound is for an H200 and is scaled by the data sheet for other GPUs."""

    wanted: Wanted
    value: float
    bound: Bound | None = None

    def on(self, device: str) -> float | None:
        """Return the target for a device; None if its rates are unknown."""
        if self.bound is None:
            return self.value
        if device not in RATED:
            return None
        rates, memory = RATED[device], self.bound is Bound.MEMORY
        share = rates.bytes_per_s / H200.bytes_per_s if memory else rates.flop_per_s / H200.flop_per_s
        return self.value * share if self.wanted is Wanted.AT_LEAST else self.value / share

    def said_on(self, device: str) -> str:
        here = self.on(device)
        if here is None:
            return f"{self.wanted} {self.value:g} on an H200"
        said = f"{float(f'{here:.4g}'):g}"
        return f"{self.wanted} {said}" + (f" (H200 {self.value:g})" if here != self.value else "")


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    unit: str
    target: FigureTarget | None = None
    limit: str = ""  # speed of the device itself, measured in the same run

    def is_met(self, device: str) -> bool | None:
        """Return whether the target is met on the device named `device`; None if the device has no target."""
        wanted = None if self.target is None else self.target.on(device)
        if self.target is None or wanted is None:
            return None
        return self.value >= wanted if self.target.wanted is Wanted.AT_LEAST else self.value <= wanted

    def as_dict(self, device: str) -> dict[str, Any]:
        target = "" if self.target is None else self.target.said_on(device)
        fields = {"name": self.name, "value": self.value, "unit": self.unit, "target": target, "limit": self.limit}
        return {**fields, "met": self.is_met(device)}


class AbsentError(Exception):
    """Error: something that a row needs is not installed; the message names it."""


class GpuRow(NamedTuple):
    name: str
    measure: Callable[[Setting], Sequence[Figure]]
    """Measurement of the row. Raises: AbsentError."""


def at_least(value: float, bound: Bound | None = None) -> FigureTarget:
    return FigureTarget(Wanted.AT_LEAST, value, bound)


def at_most(value: float, bound: Bound | None = None) -> FigureTarget:
    return FigureTarget(Wanted.AT_MOST, value, bound)


ROUNDS = 10  # minimum number of measured calls
WARM_UP_MS, MEASURED_MS = 50.0, 50.0  # minimum durations: an idle GPU starts at a fifth of its clock


def seconds_each(calls: Sequence[Callable[[], object]], setting: Setting) -> float:
    """Return the time of one call: the median time of a graph of all `calls`, divided by their number.

    Calls that read different memory find a cold cache, as the layers of a model do.
    """
    if setting.device.type != "cuda":
        return _on_host(lambda: [call() for call in calls]) / len(calls)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()  # compiles the kernel before the recording
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return seconds(graph.replay, setting) / len(calls)


def seconds(call: Callable[[], object], setting: Setting) -> float:
    """Return the median time of one call after a warm-up, measured with events on the device."""
    if setting.device.type != "cuda":
        return _on_host(call)
    _rounds_ms(call, WARM_UP_MS, 1)
    return statistics.median(_rounds_ms(call, MEASURED_MS, ROUNDS)) / 1e3


def _rounds_ms(call: Callable[[], object], least_ms: float, least_rounds: int) -> list[float]:
    found: list[float] = []
    while len(found) < least_rounds or sum(found) < least_ms:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(max(least_rounds, len(found)) + 1)]
        for mark in marks[:-1]:
            mark.record()
            call()
        marks[-1].record()
        torch.cuda.synchronize()
        found += [first.elapsed_time(then) for first, then in pairwise(marks)]
    return found


def _on_host(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@functools.cache
def copy_bytes_per_s(setting: Setting) -> float:
    """Measure bytes read and written per second by PyTorch's copy of a large tensor."""
    nbytes = setting.size(4 << 30, 1 << 20)
    source = torch.empty(nbytes, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * nbytes / seconds(lambda: target.copy_(source), setting)


@functools.cache
def flop_per_s(setting: Setting) -> float:
    """Measure the rate of a bf16 product of random numbers."""
    size = setting.size(8192, 64)
    left, right = torch.randn(2, size, size, device=setting.device, dtype=torch.bfloat16)
    return 2 * size**3 / seconds(lambda: left @ right, setting)


def said_copy(setting: Setting, bytes_per_s: float | None = None) -> str:
    """Return the measured copy rate as text, followed by `bytes_per_s` as a fraction of it."""
    limit = copy_bytes_per_s(setting)
    return f"copy {limit / 1e12:.2f} TB/s" + _share(bytes_per_s, limit)


def said_products(setting: Setting, reached: float | None = None) -> str:
    limit = flop_per_s(setting)
    return f"matmul {limit / 1e12:.0f} TFLOP/s" + _share(reached, limit)


def _share(reached: float | None, limit: float) -> str:
    return "" if reached is None else f", {reached / limit:.2f} of it"
