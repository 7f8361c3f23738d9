"""Use of the limits of each API key, here and at the other routers. Pure: `now` is in monotonic seconds.

Requests and tokens have a token bucket each (Turner, "New directions in communications", 1986): it holds a minute's
worth and fills evenly, so that an idle key may use a minute's worth immediately. Tokens of an answer are charged as
they are generated; no answer is cut off for them, but the next request waits until the debt is paid. Use at other
routers is charged when their report arrives (router/fleet/peers.py), as a debt if need be: over minutes, no more is
admitted than at one router.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from baton.process.errors import RateLimited
from baton.process.security.api_keys import KeyLimits
from baton.router.placement.peer_load import KeyUse

MINUTE_S = 60.0
BUSY_RETRY_S = 1.0
"""RetryInfo for a key with too many requests at once: it is not known when one of them ends."""


class _PeerUse(NamedTuple):
    """Use that other routers admitted, and the time of their report."""

    at_s: float
    requests: int
    tokens: int


class Bucket:
    """Holds at most `per_minute`; below zero is a debt."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._filled_s = now

    def level(self, now: float) -> float:
        self._fill(now)
        return self._level

    def wait_s(self, amount: int, now: float) -> float:
        """Return the time until `amount` is there, 0 if it is. More than the capacity is there when full."""
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
    """Use of the limits of one API key."""

    def __init__(self, tenant: str, limits: KeyLimits, now: float) -> None:
        self.active = 0
        """Requests that have begun here and not ended."""
        self.active_on_peers = 0
        self._begun = 0
        self._charged_tokens = 0
        self._tenant = tenant
        self._limits = KeyLimits()
        self._peer_use: deque[_PeerUse] = deque()  # of a minute
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.follow(limits, now)

    def follow(self, limits: KeyLimits, now: float) -> None:
        """The key's limits are these by now; earlier use stays charged."""
        if limits != self._limits:
            self._forget_old(now)
            requests = sum(use.requests for use in self._peer_use)
            tokens = sum(use.tokens for use in self._peer_use)
            self._requests = _changed(self._requests, limits.requests_per_minute, now, requests)
            self._tokens = _changed(self._tokens, limits.tokens_per_minute, now, tokens)
            self._limits = limits

    @property
    def use(self) -> KeyUse:
        """Use at this router alone."""
        return KeyUse(self.active, self._begun, self._charged_tokens)

    def taken_elsewhere(self, requests: int, tokens: int, now: float) -> None:
        """Charge what another router admitted."""
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
        """Charge one request. Raises: RateLimited, without a charge."""
        most = self._limits.concurrency
        if most is not None and self.active + self.active_on_peers >= most:
            raise self._refusal("concurrency", f"{most} requests at once", BUSY_RETRY_S)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1, now)) > 0:
            raise self._refusal("tokens_per_minute", f"{self._limits.tokens_per_minute} tokens a minute", wait_s)
        if self._requests is not None:
            wait_s = self._requests.wait_s(1, now)
            if wait_s > 0:
                allowed = f"{self._limits.requests_per_minute} requests a minute"
                raise self._refusal("requests_per_minute", allowed, wait_s)
            self._requests.take(1, now)
        self.active += 1
        self._begun += 1

    def charge_prompt(self, tokens: int, now: float) -> None:
        """Charge a prompt; one longer than a minute's worth needs a full bucket. Raises: RateLimited."""
        if self._tokens is None:
            return
        wait_s = self._tokens.wait_s(tokens, now)
        if wait_s > 0:
            raise self._refusal("tokens_per_minute", f"{self._limits.tokens_per_minute} tokens a minute", wait_s)
        self._tokens.take(tokens, now)
        self._charged_tokens += tokens

    def charge_answer(self, tokens: int, now: float) -> None:
        if self._tokens is not None:
            self._tokens.take(tokens, now)
            self._charged_tokens += tokens

    def end(self) -> None:
        self.active -= 1

    def _refusal(self, limit: str, allowed: str, retry_after_s: float) -> RateLimited:
        return RateLimited(f"the API key {self._tenant} allows {allowed}", limit, retry_after_s)


class KeyMeters:
    """The meters of all keys that have limits."""

    def __init__(self) -> None:
        self._meters: dict[str, KeyMeter] = {}

    def begin(self, tenant: str, limits: KeyLimits, now: float) -> KeyMeter:
        """The meter on which this request has begun; call its `end` later. Raises: RateLimited."""
        meter = self._meters.get(tenant)
        if meter is None:
            meter = self._meters[tenant] = KeyMeter(tenant, limits, now)
        meter.follow(limits, now)
        meter.begin(now)
        return meter

    def uses(self) -> dict[str, KeyUse]:
        """Return the use of keys with limits at this router, by name."""
        return {tenant: use for tenant, meter in self._meters.items() if (use := meter.use).requests > 0}

    def taken_elsewhere(self, tenant: str, requests: int, tokens: int, now: float) -> None:
        """Charge what another router admitted, for a key that may be unknown here."""
        if tenant not in self._meters:
            self._meters[tenant] = KeyMeter(tenant, KeyLimits(), now)
        self._meters[tenant].taken_elsewhere(requests, tokens, now)

    def active_on_peers(self, active: Mapping[str, int]) -> None:
        """Requests that are active at all other routers now, by name of the key."""
        for tenant, meter in self._meters.items():
            meter.active_on_peers = active.get(tenant, 0)


def _changed(bucket: Bucket | None, per_minute: int | None, now: float, taken: int) -> Bucket | None:
    """Return the bucket for a changed limit. `taken`: recent use elsewhere, which a new bucket has not seen."""
    if per_minute is None:
        return None
    if bucket is None:
        bucket = Bucket(per_minute, now)
        bucket.take(min(taken, per_minute), now)
    else:
        bucket.change(per_minute, now)
    return bucket
