"""When a failed call is made again: pure, given the time and a random number."""

from dataclasses import dataclass, replace

from client.errors import BatonClientError, Busy, Cancelled, Unavailable


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Waits double from `first_wait_s` to `longest_wait_s`, each drawn between half and all of its value.

    A server that asks for more than `longest_wait_s` is not waited for: the caller gets its error at once. A stream
    that has begun is not made again but resumed where it broke, `resumes` times until something comes: with the
    defaults a router that restarts is waited for some 15 s.
    """

    attempts: int = 4  # in all, at each router of a cluster; 1: never again, nor resumed
    resumes: int = 16
    first_wait_s: float = 0.05
    longest_wait_s: float = 2.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.resumes < 0 or not 0 <= self.first_wait_s <= self.longest_wait_s:
            raise ValueError(f"attempts must be at least 1, resumes 0, and the waits ordered: {self}")

    def among(self, routers: int) -> "RetryPolicy":
        """For a client that takes another router where one is gone, and may find that one just coming back."""
        return self if self.attempts == 1 else replace(self, attempts=self.attempts * routers)


class Attempts:
    """The attempts of one call. `timeout_s` None: no deadline of the client's own."""

    def __init__(self, policy: RetryPolicy, timeout_s: float | None, now: float) -> None:
        self._policy = policy
        self._deadline = None if timeout_s is None else now + timeout_s
        self._failed = 0

    def remaining_s(self, now: float) -> float | None:
        return None if self._deadline is None else self._deadline - now

    def wait_s(self, error: BatonClientError, now: float, uniform: float) -> float | None:
        """How long to wait before the next attempt; None: there is none. `uniform` is in [0, 1)."""
        self._failed += 1
        if self._failed >= self._policy.attempts:
            return None
        asked_s = _asked_wait_s(error)
        if asked_s is None or asked_s > self._policy.longest_wait_s:
            return None
        doubled_s = min(self._policy.first_wait_s * 2 ** (self._failed - 1), self._policy.longest_wait_s)
        wait_s = asked_s + doubled_s * (0.5 + uniform / 2)
        remaining_s = self.remaining_s(now)
        return wait_s if remaining_s is None or wait_s < remaining_s else None


def _asked_wait_s(error: BatonClientError) -> float | None:
    """The wait that the server asks for, 0 where it leaves that to us; None: the call is not to be repeated."""
    match error:
        case Unavailable(retry_after_s=after):
            return after or 0.0
        case Cancelled():  # by a server that stops; closing the client does not come here
            return 0.0
        case Busy(retry_after_s=after):  # without a time to come back it is a limit, not a rush
            return after
        case _:
            return None
