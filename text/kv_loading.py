"""Decision whether blocks of a prompt are loaded from files or computed. Pure.

A worker decides for its prompts, and a router predicts the decision, both with this function and the same rates.
"""

from dataclasses import dataclass

FIXED_S = 0.004  # fixed time per load: two calls on the engine's thread, and wake-ups of reading and copying threads


@dataclass(frozen=True, slots=True)
class LoadCosts:
    """Rates at which a worker computes and loads KV, measured before a prompt arrives. A rate is None if unknown."""

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
        """Return whether loading `blocks` blocks is faster than computing them; true if either rate is unknown."""
        load_s, compute_s = self.load_s(blocks), self.compute_s(blocks)
        return load_s is None or compute_s is None or load_s < compute_s
