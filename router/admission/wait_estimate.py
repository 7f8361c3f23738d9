"""How long a request will wait: the tokens ahead, by the rate at which room became free while others waited. Pure.

Tokens are what requests are charged: the uncached part of the prompt, and an answer of the usual length. Time in which
no request waited does not show what the workers can do and is left out. Until enough time with waiting requests has
passed, Little's law stands in: the tokens on the workers, by how long a request stays there.
"""

import math

RECENT_S = 10.0
"""Of waiting time: time that lies further back counts e times less."""
GUESS_S = 1.0
"""The rate that Little's law gives counts as much as so many seconds of measurement."""
MOST_COUNTED_S = 1.0
"""At a time. Workers report several times a second: a longer time is one in which this process was stopped."""
RETRY_LEAST_S, RETRY_MOST_S = 0.1, 60.0
RETRY_UNKNOWN_S = 1.0
_KEPT = 0.98  # of the earlier knowledge of stays, by each further one


class WaitEstimate:
    """Notified of every request that is dispatched and that ends. `now` is a reading of the monotonic clock."""

    def __init__(self) -> None:
        self._in_flight_tokens = 0
        self._some_wait = False
        self._counted_to_s = 0.0
        self._freed_tokens = 0.0  # while some waited, the recent ones
        self._waiting_s = 0.0  # and how long that was
        # Of requests that were answered, decaying:
        self._stays = 0.0
        self._stayed_s = 0.0
        self._stayed_tokens = 0.0
        self._stayed_token_s = 0.0

    def dispatched(self, tokens: int) -> None:
        self._in_flight_tokens += tokens

    def ended(self, tokens: int, stayed_s: float | None, now: float) -> None:
        """Its room is free again. `stayed_s`: since it was dispatched; None where it was not answered to its end."""
        self._count(now)
        self._in_flight_tokens -= tokens
        if self._some_wait:
            self._freed_tokens += tokens
        if stayed_s is not None:
            self._stays = _KEPT * self._stays + 1.0
            self._stayed_s = _KEPT * self._stayed_s + stayed_s
            self._stayed_tokens = _KEPT * self._stayed_tokens + tokens
            self._stayed_token_s = _KEPT * self._stayed_token_s + tokens * stayed_s

    def some_wait(self, some: bool, now: float) -> None:
        self._count(now)
        self._some_wait = some

    def tokens_per_s(self, now: float) -> float | None:
        """None while nothing is known."""
        self._count(now)
        if self._stayed_token_s > 0.0 and self._in_flight_tokens > 0:
            little = self._in_flight_tokens * self._stayed_tokens / self._stayed_token_s
            return (self._freed_tokens + GUESS_S * little) / (self._waiting_s + GUESS_S)
        if self._waiting_s >= GUESS_S and self._freed_tokens > 0.0:
            return self._freed_tokens / self._waiting_s
        return None

    def wait_s(self, tokens: float, now: float) -> float | None:
        """Until so many tokens' room has become free; None while nothing is known."""
        rate = self.tokens_per_s(now)
        return None if rate is None else tokens / rate

    def stay_s(self, tokens: int) -> float:
        """How long such a request takes from being dispatched to its end; 0 while nothing is known."""
        return tokens * self._stayed_s / self._stayed_tokens if self._stayed_tokens > 0.0 else 0.0

    @property
    def usual_tokens(self) -> int:
        return round(self._stayed_tokens / self._stays) if self._stays > 0.0 else 0

    def retry_after_s(self, tokens: float, now: float) -> float:
        """When to come back where so many tokens wait: never earlier for more of them."""
        wait_s = self.wait_s(tokens, now)
        return RETRY_UNKNOWN_S if wait_s is None else min(max(wait_s, RETRY_LEAST_S), RETRY_MOST_S)

    def _count(self, now: float) -> None:
        passed_s, self._counted_to_s = max(0.0, now - self._counted_to_s), max(now, self._counted_to_s)
        passed_s = min(passed_s, MOST_COUNTED_S)
        if self._some_wait:
            kept = math.exp(-passed_s / RECENT_S)
            self._freed_tokens *= kept
            self._waiting_s = self._waiting_s * kept + RECENT_S * (1.0 - kept)
