"""Pairs of workers whose transfers fail are set aside; the placement request of an attempt. Pure.

Both may serve well with others. A pair that fails again at once when its time is over is set aside for twice as long;
only several transfers in a row that succeed make it as good as any.
"""

from dataclasses import dataclass

from baton.router.placement.policies import early_block
from baton.router.placement.views import PlacementRequest
from baton.router.types.request import PreparedRequest

FAILURES = 3
SUCCESSES = 3
FIRST_S, LAST_S = 5.0, 80.0

Pair = tuple[str, str]
"""The endpoints of a prefill and of a decode worker."""


@dataclass(slots=True)
class _Trouble:
    failures: int = 0  # in a row
    successes: int = 0  # in a row
    aside_s: float = 0.0  # how long it was set aside, the last time
    until_s: float = 0.0


class PairCircuitBreaker:
    """Only of those that had trouble."""

    def __init__(self) -> None:
        self._troubles: dict[Pair, _Trouble] = {}

    def failed(self, pair: Pair, now: float) -> None:
        trouble = self._troubles.setdefault(pair, _Trouble())
        trouble.successes = 0
        trouble.failures += 1
        if now >= trouble.until_s and (trouble.failures >= FAILURES or trouble.aside_s):
            trouble.aside_s = min(LAST_S, 2 * trouble.aside_s or FIRST_S)
            trouble.until_s = now + trouble.aside_s

    def succeeded(self, pair: Pair) -> None:
        trouble = self._troubles.get(pair)
        if trouble is None:
            return
        trouble.failures = 0
        trouble.successes += 1
        if trouble.successes >= SUCCESSES or not trouble.aside_s:
            del self._troubles[pair]

    def forget(self, endpoint: str) -> None:
        """A worker's process is gone, and with it its troubles."""
        for pair in [pair for pair in self._troubles if endpoint in pair]:
            del self._troubles[pair]

    def broken(self, now: float) -> frozenset[Pair]:
        """Those that are set aside."""
        if not self._troubles:
            return _NONE
        return frozenset(pair for pair, trouble in self._troubles.items() if now < trouble.until_s)


_NONE: frozenset[Pair] = frozenset()


def placement_request(
    request: PreparedRequest,
    attempt_id: int,
    avoided_prefill: frozenset[str] = frozenset(),
    broken_pairs: frozenset[Pair] = frozenset(),
    preferred_decode: str | None = None,
) -> PlacementRequest:
    return PlacementRequest(
        fingerprint=request.fingerprint,
        block_tokens=request.block_tokens,
        prompt_tokens=len(request.token_ids),
        max_tokens=request.sampling.max_tokens - request.answered_tokens,
        choices=request.sampling.places,
        turn=attempt_id,
        avoided_prefill=avoided_prefill,
        broken_pairs=broken_pairs,
        preferred_decode=preferred_decode,
        adapter=request.adapter,
        prefix=early_block(request.block_hashes, request.block_tokens),
        session=request.valid.session or None,
    )
