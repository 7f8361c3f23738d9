"""Rate limits of each API key, and its use at all routers. Pure: `now` is in monotonic seconds.

Requests and tokens have a token bucket each (Turner, "New directions in communications", 1986) with a capacity of one
minute's limit: after a pause, a key may use a minute's limit in one burst. Tokens of an answer are charged as they are
generated. No answer is cut off, but the next request is rejected until the debt is paid. Use at other routers is
charged when these routers report it (router/fleet/peers.py). So all routers together admit as much as one router would
alone, averaged over minutes.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from baton.process.errors import RateLimited
from baton.process.security.api_keys import KeyLimits
from baton.router.admission.queue import RETRY_AFTER_S
from baton.router.placement.peer_load import KeyUse

MINUTE_S = 60.0


class _PeerUse(NamedTuple):
    """Requests and tokens that another router reported as admitted, and the time of the report."""

    at_s: float
    requests: int
    tokens: int


class Bucket:
    """Token bucket with a capacity of `per_minute`; a negative level is a debt."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._filled_s = now

    def level(self, now: float) -> float:
        self._fill(now)
        return self._level

    def wait_s(self, amount: int, now: float) -> float:
        """Return the seconds until the bucket has `amount`, or is full if its capacity is less than `amount`."""
        self._fill(now)
        missing = min(amount, self._per_minute) - self._level
        return max(0.0, missing * MINUTE_S / self._per_minute)

    def take(self, amount: int, now: float) -> None:
        self._fill(now)
        self._level -= amount

    def change(self, per_minute: int, now: float) -> None:
        self._fill(now)
        self._per_minute = per_minute
        self._level = min(self._level, float(per_minute))

    def _fill(self, now: float) -> None:
        gained = max(0.0, now - self._filled_s) * self._per_minute / MINUTE_S
        self._level = min(float(self._per_minute), self._level + gained)
        self._filled_s = max(self._filled_s, now)


class KeyMeter:
    """Meter of one API key: its use at this router and others, charged against its limits."""

    def __init__(self, tenant: str, limits: KeyLimits, now: float) -> None:
        self.active = 0
        """Number of the key's in-flight requests at this router."""
        self.active_on_peers = 0
        self._begun = 0
        self._charged_tokens = 0
        self._tenant = tenant
        self._limits = KeyLimits()
        self._peer_use: deque[_PeerUse] = deque()  # use at other routers in the last minute
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.follow(limits, now)

    def follow(self, limits: KeyLimits, now: float) -> None:
        """Set the key's limits. Earlier use stays charged."""
        if limits != self._limits:
            self._forget_old(now)
            requests = sum(use.requests for use in self._peer_use)
            tokens = sum(use.tokens for use in self._peer_use)
            self._requests = _changed(self._requests, limits.requests_per_minute, now, requests)
            self._tokens = _changed(self._tokens, limits.tokens_per_minute, now, tokens)
            self._limits = limits

    @property
    def use(self) -> KeyUse:
        """The key's use at this router, excluding its use at other routers."""
        return KeyUse(self.active, self._begun, self._charged_tokens)

    def taken_elsewhere(self, requests: int, tokens: int, now: float) -> None:
        """Charge requests and tokens that another router admitted."""
        for bucket, amount in ((self._requests, requests), (self._tokens, tokens)):
            if bucket is not None and amount > 0:
                bucket.take(amount, now)
        self._forget_old(now)
        if requests > 0 or tokens > 0:
            self._peer_use.append(_PeerUse(now, requests, tokens))

    def _forget_old(self, now: float) -> None:
        while self._peer_use and self._peer_use[0].at_s <= now - MINUTE_S:
            self._peer_use.popleft()

    def begin(self, now: float) -> None:
        """Charge one request. Raises: RateLimited; then nothing is charged."""
        most = self._limits.concurrency
        if most is not None and self.active + self.active_on_peers >= most:
            raise self._refusal("concurrency", f"{most} concurrent requests", RETRY_AFTER_S)
        self._check_tokens(1, now)
        if self._requests is not None:
            wait_s = self._requests.wait_s(1, now)
            if wait_s > 0:
                allowed = f"{self._limits.requests_per_minute} requests per minute"
                raise self._refusal("requests_per_minute", allowed, wait_s)
            self._requests.take(1, now)
        self.active += 1
        self._begun += 1

    def charge_prompt(self, tokens: int, now: float) -> None:
        """Charge a prompt's tokens. A prompt longer than the limit needs a full bucket. Raises: RateLimited."""
        self._check_tokens(tokens, now)
        self.charge_answer(tokens, now)

    def charge_answer(self, tokens: int, now: float) -> None:
        if self._tokens is not None:
            self._tokens.take(tokens, now)
            self._charged_tokens += tokens

    def end(self) -> None:
        self.active -= 1

    def _check_tokens(self, tokens: int, now: float) -> None:
        """Raise RateLimited if the bucket lacks `tokens`."""
        if self._tokens is not None and (wait_s := self._tokens.wait_s(tokens, now)) > 0:
            raise self._refusal("tokens_per_minute", f"{self._limits.tokens_per_minute} tokens per minute", wait_s)

    def _refusal(self, limit: str, allowed: str, retry_after_s: float) -> RateLimited:
        return RateLimited(f"the API key {self._tenant} allows {allowed}", limit, retry_after_s)


class KeyMeters:
    """Meters of all API keys that have limits, by tenant."""

    def __init__(self) -> None:
        self._meters: dict[str, KeyMeter] = {}

    def begin(self, tenant: str, limits: KeyLimits, now: float) -> KeyMeter:
        """Charge a new request and return its key's meter, whose `end` must be called later. Raises: RateLimited."""
        meter = self._meters.get(tenant)
        if meter is None:
            meter = self._meters[tenant] = KeyMeter(tenant, limits, now)
        meter.follow(limits, now)
        meter.begin(now)
        return meter

    def uses(self) -> dict[str, KeyUse]:
        """Return each API key's use at this router, by tenant."""
        return {tenant: use for tenant, meter in self._meters.items() if (use := meter.use).requests > 0}

    def taken_elsewhere(self, tenant: str, requests: int, tokens: int, now: float) -> None:
        """Charge requests and tokens that another router admitted. The key may be unknown at this router."""
        if tenant not in self._meters:
            self._meters[tenant] = KeyMeter(tenant, KeyLimits(), now)
        self._meters[tenant].taken_elsewhere(requests, tokens, now)

    def active_on_peers(self, active: Mapping[str, int]) -> None:
        """Set the number of each key's in-flight requests at all other routers together."""
        for tenant, meter in self._meters.items():
            meter.active_on_peers = active.get(tenant, 0)


def _changed(bucket: Bucket | None, per_minute: int | None, now: float, taken: int) -> Bucket | None:
    """Return the bucket for a changed limit; None: no limit. `taken`: use at other routers, charged to a new bucket."""
    if per_minute is None:
        return None
    if bucket is None:
        bucket = Bucket(per_minute, now)
        bucket.take(min(taken, per_minute), now)
    else:
        bucket.change(per_minute, now)
    return bucket
