"""`baton bench linear`: one projection by every primitive that this machine has for it, beside the machine's limits.

Rounds of all primitives are interleaved. Each has copies of its weight beyond every cache, as the layers of a model
take turns: so that few rows read from memory, as they do while decoding.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from baton.engine.models.batch import AdapterRows
from baton.engine.models.linear import DenseLinear, Linear, MatmulBackend, PackedLinear, packs
from baton.engine.weights.weight import GROUP_INPUTS, PlainWeight, quantise_int4, quantise_int8
from baton.lab.benchmarks.report.limits import Limits, measure_limits
from baton.lab.benchmarks.report.result import Columns, show

PRIMITIVES = ("torch", "onednn", "native", "native_bf16", "native_int8", "native_int4")
COLD_BYTES = 96 << 20  # of copies of one weight
ROUND_S = 0.02  # at least, of one primitive
ROUNDS = 5
ONEDNN_ROWS = 512  # of inputs that its layout is made for; any number runs


@dataclass(frozen=True, slots=True)
class LinearBenchOptions:
    shapes: tuple[tuple[int, int], ...]  # outputs, inputs
    rows: tuple[int, ...]
    threads: int
    dtype: str  # float32 or bfloat16: of inputs; native kernels of float32 keep a bfloat16 weight as it is


@dataclass(frozen=True, slots=True)
class LinearSpeed:
    """Medians. Quantised weights may take the fraction of the arithmetic past 1."""

    outputs: int
    inputs: int
    rows: int
    primitive: str
    threads: int
    dtype: str
    time_us: float
    gflop_per_s: float
    read_gb_per_s: float
    flop_fraction: float
    read_bandwidth_fraction: float
    limit_read_gb_per_s: float
    limit_gflop_per_s: float


COLUMNS: Columns[LinearSpeed] = {
    "outputs x inputs": lambda speed: f"{speed.outputs} x {speed.inputs}",
    "rows": lambda speed: speed.rows,
    "primitive": lambda speed: speed.primitive,
    "time us": lambda speed: f"{speed.time_us:,.0f}",
    "GFLOP/s": lambda speed: f"{speed.gflop_per_s:,.0f}",
    "of its limit": lambda speed: f"{speed.flop_fraction:.0%}",
    "GB/s": lambda speed: f"{speed.read_gb_per_s:.1f}",
    "of that limit": lambda speed: f"{speed.read_bandwidth_fraction:.0%}",
}


@dataclass(frozen=True, slots=True)
class OnednnLinear:
    """A peer: oneDNN as PyTorch brings it, a weight packed once."""

    weight: torch.Tensor  # [out, in], in a layout of oneDNN's own: good for nothing but this

    @staticmethod
    def is_there(dtype: torch.dtype) -> bool:
        """In bfloat16 only where the processor has instructions for that."""
        if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            return False
        return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

    @classmethod
    def of(cls, weight: torch.Tensor) -> "OnednnLinear":
        """`weight`: `[out, in]`, float32 or bfloat16, on a CPU. A copy."""
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight, ONEDNN_ROWS))

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")
        return product


@dataclass(frozen=True, slots=True)
class Candidate:
    primitive: str
    copies: tuple[Linear, ...]
    weight_bytes: int  # of one


def run_linear_bench(options: LinearBenchOptions, as_json: bool) -> int:
    torch.set_num_threads(options.threads)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
    with torch.inference_mode():
        limits = measure_limits(dtype)
        speeds = [
            speed for outputs, inputs in options.shapes for speed in _measure(options, dtype, limits, outputs, inputs)
        ]
    show(speeds, as_json, COLUMNS, f"{options.threads} threads, inputs {options.dtype}; {limits}")
    return 0


def candidates(outputs: int, inputs: int, dtype: torch.dtype) -> Iterator[Candidate]:
    """In the order of PRIMITIVES, those that there are. The weight is of numbers of bfloat16."""
    weight = torch.randn(outputs, inputs).bfloat16().to(dtype)
    wide = weight.float()
    makers: dict[str, Callable[[], Linear]] = {"torch": lambda: DenseLinear(weight.clone())}
    if OnednnLinear.is_there(dtype):
        makers["onednn"] = lambda: OnednnLinear.of(weight)
    if packs(weight.device):
        native = MatmulBackend(weight.device, dtype, packed=True)
        # With one small number added the weight has to be kept in float32.
        makers["native"] = lambda: native.linear(PlainWeight(wide + 1e-7))
        makers["native_bf16"] = lambda: native.linear(PlainWeight(weight))
        makers["native_int8"] = lambda: native.linear(quantise_int8(wide))
        if inputs % GROUP_INPUTS == 0:
            makers["native_int4"] = lambda: native.linear(quantise_int4(wide))
    for primitive, make in makers.items():
        first = make()
        size = _weight_bytes(first)
        copies = 1 + COLD_BYTES // size
        yield Candidate(primitive, (first, *(make() for _ in range(copies - 1))), size)


def _weight_bytes(linear: Linear) -> int:
    if isinstance(linear, PackedLinear):
        return linear.weight.nbytes
    if isinstance(linear, DenseLinear | OnednnLinear):
        return linear.weight.numel() * linear.weight.element_size()
    raise TypeError(f"{type(linear)} has no size")


def _measure(
    options: LinearBenchOptions, dtype: torch.dtype, limits: Limits, outputs: int, inputs: int
) -> Iterator[LinearSpeed]:
    found = list(candidates(outputs, inputs, dtype))
    for rows in options.rows:
        x = torch.randn(rows, inputs).to(dtype)
        times: dict[str, list[float]] = {each.primitive: [] for each in found}
        for _, each in itertools.product(range(ROUNDS), found):
            times[each.primitive].append(_seconds(each, x))
        for each in found:
            time_s = statistics.median(times[each.primitive])
            flop = 2 * rows * outputs * inputs
            yield LinearSpeed(
                outputs=outputs,
                inputs=inputs,
                rows=rows,
                primitive=each.primitive,
                threads=options.threads,
                dtype=options.dtype,
                time_us=round(time_s * 1e6, 1),
                gflop_per_s=round(flop / time_s / 1e9, 1),
                read_gb_per_s=round(each.weight_bytes / time_s / 1e9, 2),
                flop_fraction=round(flop / time_s / limits.flop_per_s, 3),
                read_bandwidth_fraction=round(each.weight_bytes / time_s / limits.read_bytes_per_s, 3),
                limit_read_gb_per_s=limits.read_gb_per_s,
                limit_gflop_per_s=limits.gflop_per_s,
            )


def _seconds(candidate: Candidate, x: torch.Tensor) -> float:
    """Of one product, the copies taking turns."""
    turns, started, elapsed = itertools.cycle(candidate.copies), time.perf_counter(), 0.0
    count = 0
    while elapsed < ROUND_S:
        next(turns)(x)
        count, elapsed = count + 1, time.perf_counter() - started
    return elapsed / count
