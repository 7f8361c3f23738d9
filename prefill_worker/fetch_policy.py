"""Whether blocks are fetched from another worker rather than computed: pure, from rates that were measured.

benchmarks/fetch_break_even.py measures from how many blocks on fetching is sooner, and FIXED_S with it.
"""

from dataclasses import dataclass

DECAY = 0.95  # weight of a step against the one after it: about the last 20 count
FIXED_S = {"shared_memory": 0.004, "grpc": 0.009}
"""The fixed time of a fetch, by transport: its calls, and turns on the threads of both engines."""


class PrefillRate:
    """Tokens per second that this worker computes: least squares through the origin, older steps counting less.

    So a step of few tokens, which takes hardly less time than one of many, weighs next to nothing.
    """

    def __init__(self) -> None:
        self._tokens_squared = 0.0
        self._tokens_seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        self._tokens_squared = DECAY * self._tokens_squared + tokens * tokens
        self._tokens_seconds = DECAY * self._tokens_seconds + tokens * seconds

    @property
    def tokens_per_s(self) -> float | None:
        """None before the first step."""
        return self._tokens_squared / self._tokens_seconds if self._tokens_seconds > 0.0 else None


@dataclass(frozen=True, slots=True)
class FetchCosts:
    """The known costs when a prompt with a hint arrives."""

    block_tokens: int
    block_bytes: int
    prefill_tokens_per_s: float | None  # None: nothing was computed yet, and a first prompt is slow
    transport: str
    link_bytes_per_s: float

    def fetch_s(self, blocks: int) -> float:
        fixed_s = FIXED_S.get(self.transport, max(FIXED_S.values()))
        return fixed_s + blocks * self.block_bytes / self.link_bytes_per_s

    def compute_s(self, blocks: int) -> float | None:
        rate = self.prefill_tokens_per_s
        return None if rate is None else blocks * self.block_tokens / rate

    def favour_fetching(self, blocks: int) -> bool:
        """Whether that many blocks are fetched sooner than computed."""
        compute_s = self.compute_s(blocks)
        return compute_s is None or self.fetch_s(blocks) < compute_s
