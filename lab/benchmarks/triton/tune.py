"""Finds launch parameters of the Triton kernels on the GPU at hand and prints the rows of kernels/triton/launch.py.

    .venv/bin/python -m baton.lab.benchmarks.triton.tune [--kernel decode prefill linear few_rows] [--json FILE]

Each candidate is timed at a few shapes of Llama-3.1-8B, in a CUDA graph over more layers than fit the GPU's cache, so
that neither launches nor cache hits are timed. The best candidate has the smallest product of times. Candidates are
compiled first, on all cores. A candidate that fails is printed and skipped. An error of the device ends the run, since
every later call would fail too.
"""

import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import triton

from baton.kernels.triton.launch import Device, FewRows, KernelCall, Tile, device_of
from baton.kernels.triton.linear import linear_calls
from baton.kernels.triton.paged_decode import decode_call
from baton.kernels.triton.paged_prefill import prefill_calls
from baton.kernels.types import PrefillChunks, QuantisedWeight
from baton.lab.benchmarks.gpu.attention import COLD_BYTES, HEAD_DIM, HEADS, SCORING, TOKEN_BYTES, contexts
from baton.lab.benchmarks.gpu.row import Setting, seconds_each
from baton.lab.benchmarks.gpu.run import settled
from baton.lab.benchmarks.triton import few_rows
from baton.lab.report.result import make_parser, make_result, write_result

DECODE_SHAPES = ((1, 8192), (8, 4096), (32, 4096), (128, 1024))  # sequences, context
PREFILL_TOKENS = (512, 2048, 8192)
LINEAR_SHAPES = ((1, 4096, 4096), (1, 4096, 28672), (16, 14336, 4096))  # rows, inputs, outputs
Shape = Callable[[Any, Device], list[list[KernelCall]]]
"""Function that returns the kernel calls of each layer for a candidate."""


COMPILERS = max(1, min(12, (os.cpu_count() or 1) - 1))


class DeviceLost(Exception):
    """Error: a candidate broke the CUDA context, so nothing more can run."""


def candidates(kernel: str) -> Iterator[Tile | FewRows]:
    if kernel == "decode":
        for tokens, warps, stages, filling in product((32, 64, 128), (4, 8), (2, 3, 4), (1, 2, 3, 4)):
            yield Tile(16, tokens, warps, stages, filling)
    elif kernel == "prefill":
        for rows, tokens, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
            yield Tile(rows, tokens, warps, stages)
    elif kernel == "few_rows":
        yield from few_rows.candidates()
    else:
        for outputs, warps, stages in product((32, 64, 128), (2, 4, 8), (2, 3, 4, 5)):
            yield Tile(16, outputs, warps, stages)


def shapes(kernel: str) -> Iterator[tuple[str, Shape]]:
    if kernel == "decode":
        for sequences, context in DECODE_SHAPES:
            yield f"{sequences} x {context}", _decode(sequences, context)
    elif kernel == "prefill":
        for tokens in PREFILL_TOKENS:
            yield str(tokens), _prefill(tokens)
    elif kernel == "few_rows":
        yield from few_rows.shapes()
    else:
        for rows, inputs, outputs in LINEAR_SHAPES:
            yield f"{rows} x {inputs} x {outputs}", _linear(rows, inputs, outputs)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def _layers(nbytes: int) -> int:
    """Return a number of layers that together exceed the GPU's cache, if each reads `nbytes`."""
    return max(2, -(-COLD_BYTES // nbytes))


def _decode(sequences: int, context: int) -> Shape:
    layers = _layers(sequences * context * TOKEN_BYTES)
    asked = contexts(sequences, context, layers, Setting(torch.device("cuda"), dry=False))
    query, rows, output = asked.query, asked.rows, torch.empty_like(asked.query)
    pools = [asked.kv.layer(layer) for layer in range(layers)]
    return lambda tile, device: [[decode_call(query, kv, rows, SCORING, output, device, tile=tile)] for kv in pools]


def _prefill(tokens: int) -> Shape:
    asked = contexts(1, tokens, 2, Setting(torch.device("cuda"), dry=False))
    query, pools = _random(tokens, HEADS, HEAD_DIM), [asked.kv.layer(layer) for layer in range(2)]
    output, prefills = torch.empty_like(query), PrefillChunks.one(tokens, 0, asked.rows.block_ids)
    return lambda tile, device: [prefill_calls(query, kv, prefills, SCORING, output, device, tile=tile) for kv in pools]


def _linear(rows: int, inputs: int, outputs: int) -> Shape:
    x, output = _random(rows, inputs), _random(rows, outputs)
    weights = [
        QuantisedWeight(
            torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device="cuda"),
            torch.ones(outputs, device="cuda"),
        )
        for _ in range(_layers(inputs * outputs))
    ]
    return lambda tile, device: [linear_calls(x, weight, None, output, device, tile) for weight in weights]


def compiled(kernel: str, tile: Tile | FewRows) -> None:
    """Compile a candidate's calls into Triton's cache; runs in a process of its own."""
    try:
        device = device_of(torch.empty(0, device="cuda"))
        for _, shape in shapes(kernel):
            for call in shape(tile, device)[0]:
                call.compile()
    except Exception as error:  # noqa: BLE001 -- whatever Triton raises; a bad candidate must not end the others
        print(f"  {tile}: does not compile ({type(error).__name__})", flush=True)


def compile_all(kernel: str) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(COMPILERS, mp_context=context) as compilers, suppress(BrokenProcessPool):
        tuple(compilers.map(partial(compiled, kernel), candidates(kernel)))  # skipped candidates compile later


def tuned(kernel: str, device: Device, time_layer: Callable[[list[list[KernelCall]]], float]) -> Tile | FewRows | None:
    """Return the best candidate; None if none runs. Raises: DeviceLost."""
    best, least = None, math.inf
    prepared = list(shapes(kernel))
    for tile in candidates(kernel):
        try:
            times_us = [1e6 * time_layer(shape(tile, device)) for _, shape in prepared]
        except Exception as error:  # whatever Triton raises; the other candidates are still timed
            print(f"  {tile}: fails ({type(error).__name__}: {error})", flush=True)
            if not settled(torch.device("cuda")):
                raise DeviceLost(str(tile)) from error
            continue
        score = math.prod(times_us)
        said = ", ".join(f"{name}: {time:.1f} us" for (name, _), time in zip(prepared, times_us, strict=True))
        print(f"  {tile}: {said}{'  <- best so far' if score < least else ''}", flush=True)
        if score < least:
            best, least = tile, score
    return best


def _layer_seconds(layers: list[list[KernelCall]]) -> float:
    def starting(calls: list[KernelCall]) -> Callable[[], None]:
        def start() -> None:
            for call in calls:
                call.start()

        return start

    return seconds_each([starting(calls) for calls in layers], Setting(torch.device("cuda"), dry=False))


def _projection_seconds(shape: few_rows.LayerShape, rows: int) -> float:
    return seconds_each(few_rows.layers_of(shape, rows), Setting(torch.device("cuda"), dry=False))


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser(__doc__, kernel=["decode", "prefill", "linear", "few_rows"]).parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU was found: there is nothing to tune", file=sys.stderr)
        return 1
    device = device_of(torch.empty(0, device="cuda"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    rows: dict[str, Tile | FewRows | None] = {}
    try:
        for kernel in options.kernel:
            compile_all(kernel)
            best = tuned(kernel, device, _layer_seconds)
            if isinstance(best, FewRows):
                best = replace(best, rows=few_rows.most_rows(best, device, _projection_seconds))
            rows[kernel] = best
    finally:  # print what was found even if the device is lost
        for kernel, tile in rows.items():
            print(f"{kernel}: {device.row}: {tile},")
        found = {name: str(tile) for name, tile in rows.items()}
        write_result(options.json, make_result(["kernels/triton"], [found], None, gpu=torch.cuda.get_device_name()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
