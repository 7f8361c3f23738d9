"""Counts the kernels of a decode step's CUDA graph, and estimates the time of a step. Needs no GPU.

    .venv/bin/python -m baton.lab.benchmarks.triton.nodes [--json FILE]

Kernels are counted while the graph of a small model with the same kinds of layers is recorded; nothing is computed. The
estimate is a sum: the time to read the step's bytes at the GPU's memory bandwidth, and NODE_US for each kernel, which
is the time between small kernels of a graph on Hopper. No step is run.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from baton.engine.config.model_config import DecoderConfig
from baton.engine.kv_cache.layout import KvLayout
from baton.engine.runner.cuda_graphs import GraphSizes, RecordedSteps
from baton.kernels.dispatch import on_the_interpreter
from baton.kernels.triton import launch
from baton.kernels.triton.launch import KernelCall
from baton.lab.benchmarks.gpu.drawn import drawn_model, write_config
from baton.lab.benchmarks.gpu.row import RATED
from baton.lab.report.result import ENGINE, make_parser, make_result, write_result

NODE_US = 1.2
CONTEXT_BLOCKS = 128  # blocks of 32 tokens: enough that attention is split, as usual for one sequence
READ_BYTES_PER_S = {rates.gpu: rates.bytes_per_s for rates in RATED.values()}
ROWS = (1, 8)  # one row is computed by fused kernels, eight by the library's product
GOALS_MS = {"llama8b": 4.65, "qwen0.6b": 0.75}
NO_KERNEL = ("aten.empty", "aten.new_empty", "aten._unsafe_view", "aten.detach", "aten._reshape_alias")


class _Kernels(TorchDispatchMode):
    """Counts PyTorch operations that start a kernel, and starts of Baton's kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if not func.is_view and not name.startswith(NO_KERNEL):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    def start(self, call: KernelCall) -> None:
        if all(call.grid):
            self.counts[str(getattr(call.kernel, "__name__", call.kernel))] += 1


class _CountingRecorder:
    """Graph recorder that counts the kernels of what it records, without running them."""

    def __init__(self) -> None:
        self.recorded: list[Counter[str]] = []

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        with counted_kernels() as counts:
            hidden = compute()
        self.recorded.append(counts)
        return _nothing, hidden


def _nothing() -> None:
    pass


@contextmanager
def counted_kernels() -> Iterator[Counter[str]]:
    """Count the kernels that the block starts, by name, as on a Hopper GPU; Baton's own kernels are not run."""
    kernels = _Kernels()
    with (
        on_the_interpreter(),
        patch.object(launch, "INTERPRETED", launch.Device(90, 132, overlaps=True)),
        patch.object(KernelCall, "start", lambda call: kernels.start(call)),
        kernels,
    ):
        yield kernels.counts


def step_kernels(shape: str, layers: int, rows: int = 1) -> Counter[str]:
    """Return the number of kernels of a step by name, for `rows` sequences of a model with `layers` layers."""
    with tempfile.TemporaryDirectory() as folder, on_the_interpreter(), torch.inference_mode():
        model = drawn_model(Path(folder), shape, torch.device("cpu"), dry=True, num_hidden_layers=layers)
        config = model.config
        layout = KvLayout(config.num_layers, config.num_kv_heads, 32, config.head_dim, torch.bfloat16)
        kv = layout.view(torch.zeros(CONTEXT_BLOCKS * layout.block_bytes, dtype=torch.uint8), CONTEXT_BLOCKS)
        recorder = _CountingRecorder()
        RecordedSteps(model, kv, recorder, GraphSizes(rows, CONTEXT_BLOCKS))
    return recorder.recorded[0]  # the graph of the largest size


@dataclass(frozen=True, slots=True)
class StepEstimate:
    shape: str
    rows: int  # sequences
    layer_kernels: dict[str, int]
    other_kernels: dict[str, int]
    kernels: int  # kernels of a complete step
    read_bytes: int
    goal_ms: float  # goal for a step of one sequence
    estimate_ms: dict[str, float]  # estimated time of a step, by GPU

    def __str__(self) -> str:
        of_layer, others = sum(self.layer_kernels.values()), sum(self.other_kernels.values())
        named = ", ".join(f"{gpu} {ms:.2f} ms" for gpu, ms in self.estimate_ms.items())
        return (
            f"{self.shape} x{self.rows}: {of_layer} kernels per layer, {others} others, {self.kernels} in all; "
            f"{self.read_bytes / 1e9:.2f} GB read\n"
            f"  estimated: {named}{f'; goal on the H200: {self.goal_ms} ms' if self.rows == 1 else ''}\n"
            f"  layer:  {_listed(self.layer_kernels)}\n  others: {_listed(self.other_kernels)}"
        )


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def estimate(shape: str, rows: int = 1) -> StepEstimate:
    one, two = step_kernels(shape, 1, rows), step_kernels(shape, 2, rows)
    of_layer = two - one
    beside = one - of_layer
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(Path(folder), shape, dry=False)
    kernels = beside.total() + config.num_layers * of_layer.total()
    read_bytes = 2 * _parameters_read(config)
    took_ms = {
        gpu: round(read_bytes / rate * 1e3 + kernels * NODE_US / 1e3, 3) for gpu, rate in READ_BYTES_PER_S.items()
    }
    return StepEstimate(shape, rows, dict(of_layer), dict(beside), kernels, read_bytes, GOALS_MS[shape], took_ms)


def _parameters_read(config: DecoderConfig) -> int:
    """Return the parameters that a step of a few sequences with short contexts reads."""
    heads = config.num_heads + 2 * config.num_kv_heads
    attention = config.hidden_size * config.head_dim * (heads + config.num_heads)
    feed_forward = 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * (attention + feed_forward) + config.vocab_size * config.hidden_size


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser(__doc__).parse_args(arguments)
    estimates = [estimate(shape, rows) for shape in GOALS_MS for rows in ROWS]
    for each in estimates:
        print(each)
    steps = {f"{each.shape}, {each.rows} rows": asdict(each) for each in estimates}
    write_result(options.json, make_result(ENGINE, [steps], None, node_us=NODE_US))
    return 0


if __name__ == "__main__":
    sys.exit(main())
