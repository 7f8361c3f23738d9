"""Failures that another attempt may mend, the client's errors for the others, and requests that kill workers.

`Tries` in attempt.py counts the deaths. Suspected requests are attempted one at a time (`Suspects`), and deadly ones
are rejected for a while (`Quarantine`).
"""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace

from baton.process.errors import (
    Aborted,
    BatonError,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from baton.router.admission.queue import RETRY_AFTER_S
from baton.router.types.events import Failed, FailureReason
from baton.router.types.request import PreparedRequest

RETRYABLE = frozenset(
    {
        FailureReason.TRANSFER,
        FailureReason.CORRUPT,
        FailureReason.DRAINING,
        FailureReason.WORKER_LOST,
        FailureReason.WORKER_DIED,
        FailureReason.NO_ROOM,
        FailureReason.UNKNOWN_ATTEMPT,
    }
)
"""Failures after which another attempt, on other workers or a little later, may succeed."""
ABOUT_A_PAIR = frozenset({FailureReason.TRANSFER, FailureReason.CORRUPT})
"""Reported by a decode worker about reads from its prefill worker, whose loss it may notice first."""


PREFILL_GONE = frozenset({FailureReason.WORKER_LOST, FailureReason.WORKER_DIED, FailureReason.DRAINING})
"""Failures of a prefill worker that leave its results correct: another prefill worker continues."""


def error_of(failed: Failed, request_id: str) -> BatonError:
    """The status that the client gets."""
    match failed.reason:
        case FailureReason.INVALID:
            return InvalidArgument("request", failed.message)
        case FailureReason.TRANSFER:
            return Unavailable(f"the KV transfer failed: {failed.message}", "TRANSFER_FAILED", RETRY_AFTER_S)
        case FailureReason.DRAINING:
            return Unavailable("the worker is draining", "DRAINING", RETRY_AFTER_S)
        case FailureReason.CORRUPT:
            return Unavailable(f"the KV failed its checksum: {failed.message}", "TRANSFER_FAILED", RETRY_AFTER_S)
        case FailureReason.WORKER_LOST | FailureReason.WORKER_DIED:
            return Unavailable(f"a worker was lost: {failed.message}", "WORKER_LOST", RETRY_AFTER_S)
        case FailureReason.ADOPTED:
            return Aborted("another stream continues this request", "SUPERSEDED")
        case FailureReason.NO_ROOM:
            return ResourceExhausted(failed.message, RETRY_AFTER_S)
        case FailureReason.DEADLINE:
            return DeadlineExceeded()
        case FailureReason.NONFINITE:
            return Internal("NONFINITE_LOGITS", request_id, "the model computed values that are not finite")
        case FailureReason.UNKNOWN | FailureReason.UNKNOWN_ATTEMPT:
            return Internal("WORKER_FAILED", request_id, failed.message)


QUARANTINE_S = 600.0
MOST_KEPT = 1024


def request_digest(request: PreparedRequest) -> bytes:
    """Return the digest of the computation: prompt, adapter, sampling. The seed is left out: it may be drawn."""
    adapter = "" if request.adapter is None else request.adapter.digest
    digest = hashlib.sha256(repr((adapter, replace(request.sampling, seed=0))).encode())
    digest.update(array("Q", request.token_ids).tobytes())
    return digest.digest()


class Quarantine:
    """Requests, by their digest, that are refused for a while; of more than `MOST_KEPT` the newest.

    Pure: readings of a clock. A router knows only its own requests; each of several learns by itself.
    """

    def __init__(self) -> None:
        self.until_s: OrderedDict[bytes, float] = OrderedDict()
        """Monotonic, by digest, the oldest first. While it is empty nothing is refused, as is usual."""

    def __len__(self) -> int:
        return len(self.until_s)

    def add(self, found: bytes, now: float) -> None:
        self.until_s.pop(found, None)
        self.until_s[found] = now + QUARANTINE_S
        if len(self.until_s) > MOST_KEPT:
            self.until_s.popitem(last=False)

    def holds(self, request: PreparedRequest, now: float) -> bool:
        """Return whether an equal request is rejected now."""
        while self.until_s and next(iter(self.until_s.values())) <= now:
            self.until_s.popitem(last=False)
        return bool(self.until_s) and request_digest(request) in self.until_s


class Suspects:
    """Suspected requests are attempted one at a time, in the order in which they came.

    Each is alone until it makes progress: if its worker dies then, it was this request.
    """

    def __init__(self) -> None:
        self._locks: deque[SuspectLock] = deque()  # the first one is held

    def lock(self, on_held: Callable[[], None]) -> "SuspectLock":
        """Queue for the lock. `on_held` is called once the lock is held, perhaps before this returns."""
        lock = SuspectLock(self._locks, on_held)
        self._locks.append(lock)
        if self._locks[0] is lock:
            on_held()
        return lock


class SuspectLock:
    """Lock of a suspected request. The first call of `release` releases it, held or not."""

    def __init__(self, locks: "deque[SuspectLock]", on_held: Callable[[], None]) -> None:
        self._locks = locks
        self._on_held = on_held

    def release(self) -> None:
        if self not in self._locks:
            return
        was_held = self._locks[0] is self
        self._locks.remove(self)
        if was_held and self._locks:
            self._locks[0]._on_held()


def poisonous(request_id: str) -> Internal:
    return Internal("POISON", request_id, "each worker that computed this request died; it is refused for a while")
