"""`baton bench attention`: the attention kernels alone, beside this machine's limits of reading and computing."""

import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from cli.bench.attention_work import Case, HeadShape
from cli.bench.limits import Limits, measure_limits

ROUNDS = 7


@dataclass(frozen=True, slots=True)
class AttentionBenchOptions:
    shapes: tuple[HeadShape, ...]
    kv_dtypes: tuple[str, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    chunk_tokens: int  # of prefill, at the end of each context; 0: no prefill
    threads: int


@dataclass(frozen=True, slots=True)
class AttentionSpeed:
    """Medians of interleaved rounds. Of decode the share of the limit is that of reading, of prefill of computing.

    `times_torch`: PyTorch's scaled_dot_product_attention over the same KV, gathered and not quantised, takes so many
    times as long.
    """

    shape: str
    kv_dtype: str
    phase: str  # decode, prefill
    batch: int
    context: int
    tokens: int  # of each sequence
    threads: int
    took_ms: float  # of one layer
    gb_per_s: float
    gflop_per_s: float
    of_limit: float
    times_torch: float
    limit_read_gb_per_s: float
    limit_gflop_per_s: float


def run_attention_bench(options: AttentionBenchOptions, as_json: bool) -> int:
    torch.set_num_threads(options.threads)
    limits = measure_limits(torch.float32)
    with torch.inference_mode():
        speeds = [measure(case, limits) for case in cases_of(options)]
    print(json.dumps([asdict(speed) for speed in speeds]) if as_json else as_table(speeds))
    return 0


def cases_of(options: AttentionBenchOptions) -> list[Case]:
    """Decode of every batch; chunks of one sequence."""
    found: list[Case] = []
    for shape, dtype in itertools.product(options.shapes, options.kv_dtypes):
        found += [
            Case(shape, dtype, *sizes, tokens=1) for sizes in itertools.product(options.batches, options.contexts)
        ]
        if options.chunk_tokens:
            chunks = [(context, min(context, options.chunk_tokens)) for context in options.contexts]
            found += [Case(shape, dtype, 1, context, tokens) for context, tokens in chunks if tokens > 1]
    return found


def measure(case: Case, limits: Limits) -> AttentionSpeed:
    rounds, layers = case.make(), case.layers()
    ours, torchs = rounds.ours(), rounds.torchs()
    pairs = [(_seconds(ours), _seconds(torchs)) for _ in range(ROUNDS + 1)][1:]  # the first ones allocate
    took_s = statistics.median(pair[0] for pair in pairs) / layers
    is_decode = case.tokens == 1
    limit_s = case.kv_bytes / limits.read_bytes_per_s if is_decode else case.flop / limits.flop_per_s
    return AttentionSpeed(
        shape=str(case.shape),
        kv_dtype=case.kv_dtype,
        phase="decode" if is_decode else "prefill",
        batch=case.batch,
        context=case.context,
        tokens=case.tokens,
        threads=torch.get_num_threads(),
        took_ms=round(took_s * 1e3, 3),
        gb_per_s=round(case.kv_bytes / took_s / 1e9, 2),
        gflop_per_s=round(case.flop / took_s / 1e9, 1),
        of_limit=round(limit_s / took_s, 3),
        times_torch=round(statistics.median(torch_s / own_s for own_s, torch_s in pairs), 2),
        limit_read_gb_per_s=round(limits.read_bytes_per_s / 1e9, 2),
        limit_gflop_per_s=round(limits.flop_per_s / 1e9, 1),
    )


def as_table(speeds: Sequence[AttentionSpeed]) -> str:
    lines = ["heads        KV          phase    batch  context  tokens   ms/layer    GB/s  GFLOP/s  of limit  x torch"]
    for each in speeds:
        lines.append(
            f"{each.shape:11}  {each.kv_dtype:10}  {each.phase:7}  {each.batch:5}  {each.context:7}  {each.tokens:6}"
            f"  {each.took_ms:9.3f}  {each.gb_per_s:6.1f}  {each.gflop_per_s:7.1f}  {each.of_limit:8.0%}"
            f"  {each.times_torch:7.2f}"
        )
    if speeds:
        last = speeds[-1]
        lines.append(
            f"{last.threads} threads; limits: {last.limit_read_gb_per_s:.1f} GB/s (decode), "
            f"{last.limit_gflop_per_s:,.0f} GFLOP/s (prefill)"
        )
    return "\n".join(lines)


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
