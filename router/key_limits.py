"""What each API key has had of its share, by this router. Pure: time comes in, in monotonic seconds.

Requests and tokens have a bucket each (token bucket: Turner, "New directions in communications", 1986): it holds a
minute's worth and is filled evenly, so that who has been away may take a minute's worth at once. Tokens of an answer
are charged as they are made; nobody is cut off for them, but the next request waits until the debt is paid.
"""

from service.api_keys import KeyLimits
from service.errors import RateLimited

MINUTE_S = 60.0
BUSY_RETRY_S = 1.0
"""What RetryInfo says to who has too many requests at once: nobody knows when one of them ends."""


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
        """Until so much is there, 0 where it is; more than it can hold is there when it is full."""
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


class Meter:
    """Of one key."""

    def __init__(self, tenant: str, limits: KeyLimits, now: float) -> None:
        self.active = 0
        """Requests that have begun and not ended."""
        self._tenant = tenant
        self._limits = KeyLimits()
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.follow(limits, now)

    def follow(self, limits: KeyLimits, now: float) -> None:
        """The key's limits are these by now; what was taken stays taken."""
        if limits != self._limits:
            self._requests = _changed(self._requests, limits.requests_per_minute, now)
            self._tokens = _changed(self._tokens, limits.tokens_per_minute, now)
            self._limits = limits

    def begin(self, now: float) -> None:
        """One more request. Raises: RateLimited, and then nothing was taken."""
        most = self._limits.concurrency
        if most is not None and self.active >= most:
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

    def charge_prompt(self, tokens: int, now: float) -> None:
        """Raises: RateLimited where they are more than is left; one that is too long for any minute needs all of it."""
        if self._tokens is None:
            return
        wait_s = self._tokens.wait_s(tokens, now)
        if wait_s > 0:
            raise self._refusal("tokens_per_minute", f"{self._limits.tokens_per_minute} tokens a minute", wait_s)
        self._tokens.take(tokens, now)

    def charge_answer(self, tokens: int, now: float) -> None:
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def end(self) -> None:
        self.active -= 1

    def _refusal(self, limit: str, allowed: str, retry_after_s: float) -> RateLimited:
        return RateLimited(f"the API key {self._tenant} allows {allowed}", limit, retry_after_s)


class KeyMeters:
    """The meters of all keys that have limits."""

    def __init__(self) -> None:
        self._meters: dict[str, Meter] = {}

    def begin(self, tenant: str, limits: KeyLimits, now: float) -> Meter | None:
        """The meter that this request has begun on, to be told its end; None without limits. Raises: RateLimited."""
        meter = self._meters.get(tenant)
        if limits == KeyLimits():
            if meter is not None and meter.active == 0:
                del self._meters[tenant]  # its limits were lifted
            return None
        if meter is None:
            meter = self._meters[tenant] = Meter(tenant, limits, now)
        meter.follow(limits, now)
        meter.begin(now)
        return meter


def _changed(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now)
    bucket.change(per_minute, now)
    return bucket
