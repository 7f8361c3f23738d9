"""Limits of this machine, measured in the same run as the figures, and the minimum work of a step."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from baton.engine.config.model_config import DecoderConfig, ModelConfig
from baton.engine.prepare import PreparedModel

READ_BYTES = 256 << 20  # larger than every cache
ROW = 16384  # columns of the matrix whose product with a vector is timed: few other sums read memory as fast
MATRIX_SIZE = 1024
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured limits with torch's threads; arithmetic in the requested dtype or float32, whichever is faster."""

    read_bytes_per_s: float
    flop_per_s: float

    @property
    def read_gb_per_s(self) -> float:
        return round(self.read_bytes_per_s / 1e9, 2)

    @property
    def gflop_per_s(self) -> float:
        return round(self.flop_per_s / 1e9, 1)

    def __str__(self) -> str:
        return f"limits: {self.read_gb_per_s:.1f} GB/s, {self.gflop_per_s:,.0f} GFLOP/s"


def measure_limits(dtype: torch.dtype) -> Limits:
    """Measure the limits: the best of ROUNDS, because other processes can only slow a round down."""
    with torch.inference_mode():
        numbers, ones = torch.ones(READ_BYTES // 4 // ROW, ROW), torch.ones(ROW)
        left, right = torch.randn(MATRIX_SIZE, MATRIX_SIZE), torch.randn(MATRIX_SIZE, MATRIX_SIZE)
        reading_s = min(shortest(lambda: numbers @ ones), shortest(numbers.sum))
        computing_s = min(
            shortest(partial(torch.matmul, left.to(each), right.to(each))) for each in {dtype, left.dtype}
        )
    return Limits(READ_BYTES / reading_s, 2 * MATRIX_SIZE**3 / computing_s)


def shortest(run: Callable[[], object]) -> float:
    """Return the seconds of the shortest of ROUNDS calls, after a warm-up call."""
    run()
    return min(seconds_of(run) for _ in range(ROUNDS))


def seconds_of(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def decode_step_bytes(prepared: PreparedModel, batch: int, context_tokens: float) -> int:
    """Return the bytes that a decode step must read: every weight once (all experts), and the KV of each sequence."""
    weights = prepared.weight_bytes - prepared.looked_up_bytes
    return weights + int(batch * context_tokens * prepared.layout.token_bytes)


def prefill_flop(config: ModelConfig, tokens: int) -> int:
    """Return the operations of one prompt: 2 per weight and token, and attention to earlier tokens.

    Counts every feed-forward layer as gated and leaves out the head, which computes the last token only.
    """
    heads_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    experts = config.experts if isinstance(config, DecoderConfig) else None
    inner = config.intermediate_size if experts is None else experts.inner_size * experts.routing.per_token
    weights = config.hidden_size * (2 * heads_size + 2 * kv_size + 3 * inner)
    attention = 2 * heads_size * tokens * (tokens + 1) // 2  # products with keys, and with values
    return 2 * config.num_layers * (weights * tokens + attention)


def decode_step_flop(config: ModelConfig, batch: int, context_tokens: int) -> int:
    """Return the operations of one more token for each sequence, with its logits."""
    layers = prefill_flop(config, context_tokens + 1) - prefill_flop(config, context_tokens)
    return batch * (layers + 2 * config.hidden_size * config.vocab_size)
