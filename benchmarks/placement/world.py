"""Simulated workers: their cached blocks, queues and computation. Knows no policy."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.benchmarks.placement.traces import BLOCK_TOKENS, Arrival


@dataclass(frozen=True, slots=True)
class Speeds:
    """Defaults: a model of 8 billion parameters on one H200, by reports of engines."""

    prefill_tokens_per_s: float = 20_000.0
    token_gap_ms: float = 8.0
    token_gap_ms_per_token: float = 3e-5  # for each token in flight: its KV is read at about 4 TB/s
    kv_bytes_per_token: float = 131_072.0
    link_gb_per_s: float = 40.0


class Changes(NamedTuple):
    stored: Sequence[bytes]
    evicted: Sequence[bytes]


class BlockCache:
    """Least recently used leaves first; the end of a prompt counts as older than its beginning."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def hit_blocks(self, blocks: Sequence[bytes]) -> int:
        known = self._blocks
        return next((place for place, block in enumerate(blocks) if block not in known), len(blocks))

    def insert(self, blocks: Sequence[bytes]) -> Changes:
        known = self._blocks
        stored = [block for block in blocks if block not in known]
        for block in reversed(blocks):
            known[block] = None
            known.move_to_end(block)
        evicted = [known.popitem(last=False)[0] for _ in range(len(known) - self._capacity_blocks)]
        return Changes(stored, evicted)


@dataclass(slots=True)
class Prompt:
    """One request on its way. Times in seconds since the trace began."""

    number: int
    arrival: Arrival
    prefill: int = 0
    decode: int = 0
    expected_hit_blocks: int = 0  # by the chooser
    hit_blocks: int = 0
    computed_tokens: int = 0
    started_s: float = 0.0
    first_token_s: float = 0.0

    @property
    def expected_tokens(self) -> int:
        return max(1, self.arrival.input_tokens - BLOCK_TOKENS * self.expected_hit_blocks)


@dataclass(slots=True)
class PrefillWorker:
    cache: BlockCache
    tokens_per_s: float
    waiting: deque[Prompt] = field(default_factory=deque)
    running: Prompt | None = None
    tokens_in_flight: int = 0
    requests_in_flight: int = 0

    def take(self, prompt: Prompt) -> None:
        """It counts with the tokens that the chooser expected it to compute."""
        self.waiting.append(prompt)
        self.tokens_in_flight += prompt.expected_tokens
        self.requests_in_flight += 1

    def start(self, now: float) -> Prompt | None:
        """The next prompt, unless one is running or none waits; its `first_token_s` is when it will be done."""
        if self.running is not None or not self.waiting:
            return None
        prompt = self.running = self.waiting.popleft()
        prompt.started_s = now
        prompt.hit_blocks = self.cache.hit_blocks(prompt.arrival.blocks)
        # The logits of the last token are needed, even if all is cached.
        prompt.computed_tokens = max(1, prompt.arrival.input_tokens - BLOCK_TOKENS * prompt.hit_blocks)
        prompt.first_token_s = now + prompt.computed_tokens / self.tokens_per_s
        return prompt

    def finish(self) -> Changes:
        """Of the prompt that was running."""
        prompt, self.running = self.running, None
        if prompt is None:
            raise RuntimeError("nothing was running")
        self.tokens_in_flight -= prompt.expected_tokens
        self.requests_in_flight -= 1
        return self.cache.insert(prompt.arrival.blocks)


@dataclass(slots=True)
class DecodeWorker:
    tokens_in_flight: int = 0


@dataclass(slots=True)
class World:
    """All workers, by number."""

    prefill: list[PrefillWorker]
    decode: list[DecodeWorker]
    speeds: Speeds

    @classmethod
    def of(cls, workers: int, blocks_per_worker: int, speeds: Speeds) -> "World":
        """As many decode workers as prefill workers."""
        prefill = [PrefillWorker(BlockCache(blocks_per_worker), speeds.prefill_tokens_per_s) for _ in range(workers)]
        return cls(prefill, [DecodeWorker() for _ in range(workers)], speeds)

    def hit_blocks(self, blocks: Sequence[bytes]) -> list[int]:
        """How many of them each prefill worker has now."""
        return [worker.cache.hit_blocks(blocks) for worker in self.prefill]


def pooled_hit_rate(arrivals: Sequence[Arrival], capacity_blocks: int | None) -> float:
    """Of one worker with the caches of all, on which each prompt is computed before the next comes; None: without end.

    By blocks. The bound for placing the same prompts on least-recently-used caches of that size together, though not
    a strict one: a placement that separates blocks that are used again from others may do better.
    """
    cache = BlockCache(sum(len(arrival.blocks) for arrival in arrivals) if capacity_blocks is None else capacity_blocks)
    hits = total = 0
    for arrival in arrivals:
        hits += cache.hit_blocks(arrival.blocks)
        total += len(arrival.blocks)
        cache.insert(arrival.blocks)
    return hits / total if total else 0.0
