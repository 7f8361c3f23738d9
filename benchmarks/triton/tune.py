"""Finds launch parameters of the Triton kernels on the GPU at hand and prints the rows of kernels/triton/launch.py.

    .venv/bin/python -m baton.benchmarks.triton.tune [--kernel decode prefill linear] [--repeats 20] [--json FILE]

Each candidate is timed at a few shapes of Llama-3.1-8B, cold in the second-level cache; the best is the one whose
product of times is least. Candidates that do not fit into shared memory or registers are passed over, and said.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
import triton

from baton.benchmarks.gpu.attention import HEAD_DIM, HEADS, SCORING, contexts
from baton.benchmarks.gpu.row import Setting
from baton.benchmarks.report.result import make_parser, write_result
from baton.kernels.triton.launch import Device, KernelCall, Tile, device_of
from baton.kernels.triton.linear import linear_calls
from baton.kernels.triton.paged_decode import decode_calls
from baton.kernels.triton.paged_prefill import prefill_calls
from baton.kernels.types import PrefillChunks, QuantisedWeight

DECODE_SHAPES = ((1, 8192), (8, 4096), (32, 4096), (128, 1024))  # sequences, context
PREFILL_TOKENS = (512, 2048, 8192)
LINEAR_SHAPES = ((1, 4096, 4096), (1, 4096, 28672), (16, 14336, 4096))  # rows, inputs, outputs
Shape = Callable[[Tile, Device], list[KernelCall]]


def candidates(kernel: str) -> Iterator[Tile]:
    if kernel == "decode":
        for tokens, warps, stages, filling in product((32, 64, 128), (4, 8), (2, 3, 4), (1, 2, 3, 4)):
            yield Tile(16, tokens, warps, stages, filling)
    elif kernel == "prefill":
        for rows, tokens, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
            yield Tile(rows, tokens, warps, stages)
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
    else:
        for rows, inputs, outputs in LINEAR_SHAPES:
            yield f"{rows} x {inputs} x {outputs}", _linear(rows, inputs, outputs)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def _decode(sequences: int, context: int) -> Shape:
    asked = contexts(sequences, context, 1, Setting(torch.device("cuda"), dry=False))
    kv, output = asked.kv.layer(0), torch.empty_like(asked.query)
    return lambda tile, device: decode_calls(asked.query, kv, asked.rows, SCORING, output, device, tile=tile)


def _prefill(tokens: int) -> Shape:
    asked = contexts(1, tokens, 1, Setting(torch.device("cuda"), dry=False))
    query, kv = _random(tokens, HEADS, HEAD_DIM), asked.kv.layer(0)
    output, prefills = torch.empty_like(query), PrefillChunks.one(tokens, 0, asked.rows.block_ids)
    return lambda tile, device: prefill_calls(query, kv, prefills, SCORING, output, device, tile=tile)


def _linear(rows: int, inputs: int, outputs: int) -> Shape:
    x, output = _random(rows, inputs), _random(rows, outputs)
    data = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device="cuda")
    weight = QuantisedWeight(data, torch.ones(outputs, device="cuda"))
    return lambda tile, device: linear_calls(x, weight, None, output, device, tile)


def tuned(kernel: str, device: Device, repeats: int) -> Tile | None:
    """The best candidate; None where none runs."""
    best, least = None, math.inf
    prepared = list(shapes(kernel))
    for tile in candidates(kernel):
        try:
            times_us = [_time_us(shape(tile, device), repeats) for _, shape in prepared]
        except triton.runtime.errors.OutOfResources as error:
            print(f"  {tile}: does not fit ({error})", flush=True)
            continue
        score = math.prod(times_us)
        said = ", ".join(f"{name}: {time:.1f} us" for (name, _), time in zip(prepared, times_us, strict=True))
        print(f"  {tile}: {said}{'  <- best so far' if score < least else ''}", flush=True)
        if score < least:
            best, least = tile, score
    return best


def _time_us(calls: list[KernelCall], repeats: int) -> float:
    def run() -> None:
        for call in calls:
            call.start()

    return 1000 * float(triton.testing.do_bench(run, warmup=5, rep=repeats, return_mode="median"))


def main(arguments: Sequence[str] | None = None) -> int:
    repeats = (20, "milliseconds that a candidate is timed for")
    options = make_parser(__doc__, kernel=["decode", "prefill", "linear"], repeats=repeats).parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU here: there is nothing to tune", file=sys.stderr)
        return 1
    device = device_of(torch.empty(0, device="cuda"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    rows = {kernel: tuned(kernel, device, options.repeats) for kernel in options.kernel}
    for kernel, tile in rows.items():
        print(f"{kernel}: {device.row}: {tile},")
    write_result(
        options.json, {"gpu": torch.cuda.get_device_name(), **{name: str(tile) for name, tile in rows.items()}}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
