"""Tuning of matrix products with few rows: the fastest tile, and up to how many rows it beats the library's product.

To find that number of rows, all projections of a layer are timed as the engine computes them, with norms and gates.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch

from baton.engine.models.linear import DenseLinear
from baton.engine.models.residual import Norm, Stream
from baton.kernels.triton.few_rows import fused_call
from baton.kernels.triton.launch import FEW_ROWS, Device, FewRows, KernelCall
from baton.kernels.types import Gate
from baton.lab.benchmarks.gpu.attention import COLD_BYTES

MOST_ROWS = (1, 2, 4, 8, 16)
TILED_ROWS = 4


class LayerShape(NamedTuple):
    hidden: int
    attended: int  # heads * head_dim
    qkv: int
    inner: int


SHAPES = {
    "qwen0.6b": LayerShape(hidden=1024, attended=2048, qkv=4096, inner=3072),
    "llama8b": LayerShape(hidden=4096, attended=4096, qkv=6144, inner=14336),
}
Calls = Callable[[FewRows, Device], list[list[KernelCall]]]


def candidates() -> Iterator[FewRows]:
    for tile_bytes, inputs, warps in product((1 << 13, 1 << 14, 1 << 15), (1024, 2048, 4096), (2, 4, 8)):
        yield FewRows(TILED_ROWS, tile_bytes, inputs, warps)


def shapes() -> Iterator[tuple[str, Calls]]:
    for name, shape in SHAPES.items():
        for rows in (1, TILED_ROWS):
            yield f"{name} x{rows}", _projections(shape, rows)


def _drawn(*shape: int) -> torch.Tensor:
    drawn: torch.Tensor = torch.randn(*shape, dtype=torch.bfloat16, device="cuda") * shape[-1] ** -0.5
    return drawn


def _weights(shape: LayerShape) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Draw the weights (qkv, output, gate and up, down) of enough layers to exceed the GPU's cache."""
    sizes = ((shape.qkv, shape.hidden), (shape.hidden, shape.attended), (2 * shape.inner, shape.hidden))
    numbers = sum(outputs * inputs for outputs, inputs in sizes) + shape.hidden * shape.inner
    layers = max(2, -(-COLD_BYTES // (2 * numbers)))
    return [(*(_drawn(*size) for size in sizes), _drawn(shape.hidden, shape.inner)) for _ in range(layers)]  # type: ignore[misc]


def _projections(shape: LayerShape, rows: int) -> Calls:
    x, norm, attended = _drawn(rows, shape.hidden), torch.ones_like(_drawn(shape.hidden)), _drawn(rows, shape.attended)
    qkv, inner, weights = _drawn(rows, shape.qkv), _drawn(rows, shape.inner), _weights(shape)

    def calls(few: FewRows, device: Device) -> list[list[KernelCall]]:
        return [
            [
                fused_call(x, into_qkv, None, norm, 1e-6, None, qkv, device, few=few),
                fused_call(attended, into_output, None, None, 0.0, None, x, device, adds=True, few=few),
                fused_call(x, into_inner, None, norm, 1e-6, Gate.SILU, inner, device, few=few),
                fused_call(inner, down, None, None, 0.0, None, x, device, adds=True, few=few),
            ]
            for into_qkv, into_output, into_inner, down in weights
        ]

    return calls


def layers_of(shape: LayerShape, rows: int) -> list[Callable[[], None]]:
    """Return one function per layer, which computes the layer's projections. All layers share one residual stream."""
    stream, attended = Stream(_drawn(rows, shape.hidden)), _drawn(rows, shape.attended)
    norm = Norm(torch.ones_like(_drawn(shape.hidden)), 1e-6)

    def layer(weights: tuple[torch.Tensor, ...]) -> Callable[[], None]:
        qkv, output, gate_up, down = map(DenseLinear, weights)

        def compute() -> None:
            stream.through(norm, qkv)
            stream.add(attended, output)
            stream.add(stream.through(norm, gate_up, gate=Gate.SILU), down)

        return compute

    return [layer(each) for each in _weights(shape)]


def most_rows(few: FewRows, device: Device, seconds: Callable[[LayerShape, int], float]) -> int:
    """Return the largest of MOST_ROWS for which every shape is faster with this tile than with the library; 0 if none.

    `seconds`: returns the time of a layer as the engine computes it. FEW_ROWS is changed during the measurement.
    """
    before, most = FEW_ROWS[device.row], 0
    try:
        for rows in MOST_ROWS:
            for name, shape in SHAPES.items():
                FEW_ROWS[device.row] = replace(few, rows=0)
                library_us = 1e6 * seconds(shape, rows)
                FEW_ROWS[device.row] = replace(few, rows=rows)
                fused_us = 1e6 * seconds(shape, rows)
                print(f"  {name} x{rows}: {fused_us:.1f} us, library {library_us:.1f} us", flush=True)
                if fused_us >= library_us:
                    return most
            most = rows
    finally:
        FEW_ROWS[device.row] = before
    return most
