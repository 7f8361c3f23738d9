"""Seconds that a device takes, without what it takes to tell it."""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from baton.benchmarks.gpu.row import Setting

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
