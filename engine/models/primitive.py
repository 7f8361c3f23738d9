"""Which primitive multiplies a model's layers on a CPU: our kernels, or oneDNN from some number of rows on.

Measured once on the model's own first layer, and remembered in a file for this processor, these kernels and shapes.
"""

import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from engine.lora.rows import AdapterRows
from engine.models.linear import Linear
from engine.models.onednn import OnednnLinear, has_onednn
from kernels.native.build import library_path, processor_level
from kernels.packed_linear import packed_linear
from kernels.packed_weight import PackedWeight, Stored, unpacked

logger = logging.getLogger(__name__)

ROWS = (512, 64, 16, 1)  # that are measured; a number of rows in between goes with the next smaller one
ROUNDS = 3  # of which the best counts
BUDGET_S = 1.5  # begun rounds end
WORTH_CHANGING = 0.97  # of our own time, or less
LEAST_WEIGHT_BYTES = 64 << 20  # of all layers: what is smaller is left to our own kernels
USER_CACHE, CACHE_FILE = Path("~/.cache/baton"), "linear.json"
STORED = (Stored.FLOAT32, Stored.BFLOAT16, Stored.ROUNDING)  # what both can multiply


class Primitive(StrEnum):
    AUTO = "auto"
    NATIVE = "native"
    ONEDNN = "onednn"


@dataclass(frozen=True, slots=True)
class PrimitiveChoice:
    """What was asked for. `cache`: the folder that remembers measurements; None: nothing is remembered."""

    primitive: Primitive = Primitive.NATIVE
    cache: Path | None = None
    threads: int | None = None  # None: as many as torch uses

    @classmethod
    def of_user(cls, primitive: str, threads: int | None = None) -> "PrimitiveChoice":
        """Remembered among the user's own files. Raises: ValueError for what is no Primitive."""
        return cls(Primitive(primitive), USER_CACHE.expanduser(), threads)


@dataclass(frozen=True, slots=True)
class ChosenLinear:
    """A projection in two packings."""

    native: Linear
    onednn: OnednnLinear
    onednn_from_rows: int

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        return self.onednn(x) if len(x) >= self.onednn_from_rows else self.native(x)


def onednn_from_rows(
    choice: PrimitiveChoice, weights: Sequence[PackedWeight], layers: int, dtype: torch.dtype
) -> int | None:
    """The rows from which on oneDNN multiplies; None: it never does. `weights`: the projections of one of `layers`."""
    if choice.primitive is Primitive.NATIVE or not has_onednn() or any(each.stored not in STORED for each in weights):
        return None
    if choice.primitive is Primitive.ONEDNN:
        return 1
    if layers * sum(each.nbytes for each in weights) < LEAST_WEIGHT_BYTES:
        return None
    threads = choice.threads or torch.get_num_threads()
    key = _key(weights, dtype, threads)
    known = _remembered(choice.cache)
    if key not in known:
        started = time.perf_counter()
        known[key] = _measure_on(threads, weights, dtype)
        logger.info("linear layers measured in %.1f s: %s", time.perf_counter() - started, _spelled(known[key]))
        _remember(choice.cache, known)
    return known[key]


def in_onednn(weight: PackedWeight, dtype: torch.dtype) -> OnednnLinear:
    return OnednnLinear.of(unpacked(weight).to(dtype), weight.bias)


def _measure_on(threads: int, weights: Sequence[PackedWeight], dtype: torch.dtype) -> int | None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _measure(weights, dtype)
    finally:
        torch.set_num_threads(before)


def _measure(weights: Sequence[PackedWeight], dtype: torch.dtype) -> int | None:
    others = [in_onednn(each, dtype) for each in weights]
    end, chosen = time.perf_counter() + BUDGET_S, None
    with torch.inference_mode():
        for rows in ROWS:
            inputs = [torch.randn(rows, each.inputs) for each in weights]
            narrow = [each.to(dtype) for each in inputs]

            def ours(inputs: Sequence[torch.Tensor] = inputs) -> None:
                for x, weight in zip(inputs, weights, strict=True):
                    packed_linear(x, weight)

            def theirs(inputs: Sequence[torch.Tensor] = narrow) -> None:
                for x, linear in zip(inputs, others, strict=True):
                    linear(x)

            times = [
                (_seconds(ours), _seconds(theirs)) for round in range(ROUNDS) if not round or time.perf_counter() < end
            ]
            own_s, other_s = (min(each) for each in zip(*times, strict=True))
            if other_s > WORTH_CHANGING * own_s or time.perf_counter() > end:
                break
            chosen = rows
    return chosen


def _seconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _spelled(rows: int | None) -> str:
    return "our own kernels" if rows is None else f"oneDNN from {rows} rows on, below that our own kernels"


def _key(weights: Sequence[PackedWeight], dtype: torch.dtype, threads: int) -> str:
    shapes = [(each.outputs, each.inputs, each.stored.name) for each in weights]
    described = (_processor(), torch.__version__, library_path(processor_level()).name, threads, dtype)
    return hashlib.sha256(repr((described, shapes)).encode()).hexdigest()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), platform.processor())


def _remembered(folder: Path | None) -> dict[str, int | None]:
    if folder is None:
        return {}
    try:
        found = json.loads((folder / CACHE_FILE).read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s is not read: %s", folder / CACHE_FILE, error)
        return {}
    return found if isinstance(found, dict) else {}


def _remember(folder: Path | None, known: dict[str, int | None]) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f"{CACHE_FILE}.{time.monotonic_ns()}"
        made.write_text(json.dumps(known))
        made.replace(folder / CACHE_FILE)
    except OSError as error:
        logger.warning("%s is not written: %s", folder / CACHE_FILE, error)
