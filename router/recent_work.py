"""How the newest work was shared out among workers. Pure: it ages with work that is given out, not with time."""

import math
from dataclasses import dataclass

WINDOW_S = 15.0
"""So much of every worker's time is the newest work: older work has faded by 1/e when as much has been given out."""


@dataclass(slots=True)
class _Share:
    tokens: float = 0.0
    age: float = 0.0  # when it was brought up to date


class RecentWork:
    """Workers are named by endpoint."""

    def __init__(self) -> None:
        self._shares: dict[str, _Share] = {}
        self.age = 0.0  # in windows, ever growing

    def add(self, worker: str, tokens: int, tokens_per_s: float) -> None:
        """It was given so many tokens to compute. `tokens_per_s`: the rate of all workers together."""
        self.age += tokens / (WINDOW_S * tokens_per_s)
        share = self._shares.setdefault(worker, _Share(age=self.age))
        share.tokens = share.tokens * math.exp(share.age - self.age) + tokens
        share.age = self.age

    def of(self, worker: str) -> float:
        share = self._shares.get(worker)
        return share.tokens * math.exp(share.age - self.age) if share is not None else 0.0

    def forget(self, worker: str) -> None:
        self._shares.pop(worker, None)
