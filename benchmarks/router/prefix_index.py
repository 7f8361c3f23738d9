"""What the index of all workers' caches costs a router: the walk, a whole decision, changes, and memory. No processes.

    .venv/bin/python -m baton.benchmarks.router.prefix_index [--workers 16] [--blocks 256] [--json FILE]

The prompt has `--blocks` blocks (8 192 tokens with 256), of which the workers hold beginnings of different lengths,
among as many other blocks as `--indexed` says. Hashes are fresh objects each time, as they are for a new request.
"""

import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence

from baton.benchmarks.report.result import make_parser, write_result
from baton.benchmarks.router.decision import BLOCK_TOKENS, FINGERPRINT, cluster_of, decide, half_of_each
from baton.engine.kv_cache.block_pool import CacheJournal
from baton.router.cache.index import PrefixIndex
from baton.router.placement.views import PlacementRequest

ROUNDS = 300


def hashes(drawn: random.Random, count: int) -> list[bytes]:
    return [drawn.randbytes(32) for _ in range(count)]


def microseconds(work: Callable[[Sequence[bytes]], object], make: Callable[[], Sequence[bytes]]) -> float:
    """Median; what `make` makes is fresh every time and not counted."""
    times = []
    for _ in range(ROUNDS):
        argument = make()
        began = time.perf_counter()
        work(argument)
        times.append(time.perf_counter() - began)
    return round(statistics.median(times) * 1e6, 2)


def measure(workers: int, blocks: int, indexed: int) -> dict[str, float]:
    drawn = random.Random(1)
    prompt = hashes(drawn, blocks)
    index, cluster = PrefixIndex(), cluster_of(half_of_each(workers))
    for number in range(workers):
        held = prompt[: drawn.choice([0, 1, 2, 4, 6, 8, 8]) * blocks // 8]
        for caches in (index.store, cluster.caches.expect_elsewhere):
            caches(f"w{number}", held)
        index.store(f"w{number}", hashes(drawn, indexed // workers))

    def fresh() -> list[bytes]:
        return [bytes(bytearray(each)) for each in prompt]

    def new() -> list[bytes]:
        return hashes(drawn, blocks)

    request = PlacementRequest(FINGERPRINT, BLOCK_TOKENS, blocks * BLOCK_TOKENS + 1, 100, 1)
    decide(cluster, request, prompt)  # once, uncounted
    attempts = iter(range(10**9))
    alone = memory(1)
    return {
        "walk_us": microseconds(index.hits, fresh),
        "walk_new_prompt_us": microseconds(index.hits, new),
        "decision_us": microseconds(lambda each: decide(cluster, request, each), fresh),
        "expect_new_prompt_us": microseconds(lambda each: index.expect("w0", next(attempts), each), new),
        "store_us_per_block": microseconds(lambda each: index.store("w1", each), new) / blocks,
        "bytes_per_block": alone,
        "bytes_per_further_worker": memory(2) - alone,
        "journal_ns_per_block": journal_ns(),
    }


def memory(holders: int) -> float:
    """Bytes per block of an index of 20 000 blocks that so many workers hold, the hashes included."""
    drawn, count = random.Random(2), 20_000
    tracemalloc.start()
    index = PrefixIndex()
    held = hashes(drawn, count)
    for number in range(holders):
        index.store(f"w{number}", held)
    del held
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return round(size / count)


def journal_ns() -> float:
    """What a worker pays for being listened to, per block that is published and evicted: written down and read."""
    names, journal = hashes(random.Random(3), 512), CacheJournal()
    best = float("inf")
    for _ in range(50):
        began = time.perf_counter()
        for each in names:
            journal.store(each)
        journal.take()
        for each in names:
            journal.evict(each)
        journal.take()
        best = min(best, time.perf_counter() - began)
    return round(best / len(names) * 1e9)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--indexed", type=int, default=80_000)
    arguments = parser.parse_args()
    figures = measure(arguments.workers, arguments.blocks, arguments.indexed)
    for name, value in figures.items():
        print(f"{name:28} {value:10.2f}")
    write_result(arguments.json, figures)


if __name__ == "__main__":
    main()
