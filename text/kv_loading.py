"""Whether blocks of a prompt are loaded from files or computed. Pure.

A worker decides so for its prompts, and a router expects it to: both by this function, of the same rates.
"""

from dataclasses import dataclass

FIXED_S = 0.004  # of a load: two turns on the engine's thread, and the threads that read and copy


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
