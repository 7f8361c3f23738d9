"""How tokens are chosen, with every default already resolved."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request; the same for all its choices.

    `stop_token_ids` holds the model's own end-of-sequence ids unless the caller wants to go on past them.
    """

    max_tokens: int
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # 1 keeps all
    min_p: float = 0.0  # 0 keeps all
    seed: int = 0  # 64 bits
    stop_token_ids: frozenset[int] = frozenset()
    n: int = 1

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
