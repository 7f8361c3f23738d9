"""Whether a prompt's blocks are loaded from files or computed, and how long a prompt may wait for them. Pure."""

from dataclasses import dataclass

DECAY = 0.8  # weight of a load against the one after it
FORGOTTEN_S = 60.0  # a rate that is so old is not known any more: the next prompt tries
FIXED_S = 0.004  # of a load: two turns on the engine's thread, and the threads that read and copy
LEAST_WAIT_S = 1.0
LONGEST_WAIT_S = 20.0


class LoadRate:
    """Bytes per second that loads brought, small ones counting little. `now`: monotonic seconds."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0
        self._observed = -FORGOTTEN_S

    def observe(self, size_bytes: int, seconds: float, now: float) -> None:
        self._bytes = DECAY * self._bytes + size_bytes
        self._seconds = DECAY * self._seconds + seconds
        self._observed = now

    def bytes_per_s(self, now: float) -> float | None:
        """None: not known, or too long ago."""
        if now - self._observed >= FORGOTTEN_S or self._seconds <= 0.0:
            return None
        return self._bytes / self._seconds


@dataclass(frozen=True, slots=True)
class LoadCosts:
    """As they are known when a prompt arrives. None: not known."""

    block_tokens: int
    block_bytes: int
    compute_tokens_per_s: float | None
    load_bytes_per_s: float | None

    def load_s(self, blocks: int) -> float | None:
        rate = self.load_bytes_per_s
        return None if not rate else FIXED_S + blocks * self.block_bytes / rate

    def compute_s(self, blocks: int) -> float | None:
        rate = self.compute_tokens_per_s
        return None if not rate else blocks * self.block_tokens / rate

    def favour_loading(self, blocks: int) -> bool:
        """Where either cost is not known, it is tried."""
        load_s, compute_s = self.load_s(blocks), self.compute_s(blocks)
        return load_s is None or compute_s is None or load_s < compute_s

    def longest_s(self, blocks: int) -> float:
        """So long a prompt waits: computing would be done by then. What was loaded until then is kept."""
        compute_s = self.compute_s(blocks)
        return LONGEST_WAIT_S if compute_s is None else min(LONGEST_WAIT_S, max(LEAST_WAIT_S, compute_s))
