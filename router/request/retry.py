"""Rules for retries, errors that clients get, and the quarantine of requests that kill workers.

`Tries` in attempt.py counts the workers that died with a request. Suspected requests are attempted one at a time
(`Suspects`), and deadly requests are rejected for a while (`Quarantine`).
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
"""Failures after which another attempt may succeed."""
ABOUT_A_PAIR = frozenset({FailureReason.TRANSFER, FailureReason.CORRUPT})
"""Failures of a decode worker's reads from a prefill worker, which may be gone."""
PREFILL_GONE = frozenset({FailureReason.WORKER_LOST, FailureReason.WORKER_DIED, FailureReason.DRAINING})
"""Failures of a prefill worker after which its results stay valid: the decode worker keeps the KV that it has read."""


def error_of(failed: Failed, request_id: str) -> BatonError:
    """Return the error that the client gets for an attempt's failure."""
    match failed.reason:
        case FailureReason.INVALID:
            return InvalidArgument("request", failed.message)
        case FailureReason.TRANSFER:
            return Unavailable(f"the KV transfer failed, retry: {failed.message}", "TRANSFER_FAILED", RETRY_AFTER_S)
        case FailureReason.DRAINING:
            return Unavailable("the worker is draining; retry", "DRAINING", RETRY_AFTER_S)
        case FailureReason.CORRUPT:
            return Unavailable(f"the KV failed its checksum, retry: {failed.message}", "TRANSFER_FAILED", RETRY_AFTER_S)
        case FailureReason.WORKER_LOST | FailureReason.WORKER_DIED:
            return Unavailable(f"the link to a worker was lost, retry: {failed.message}", "WORKER_LOST", RETRY_AFTER_S)
        case FailureReason.ADOPTED:
            return Aborted("another stream continues this request", "SUPERSEDED")
        case FailureReason.NO_ROOM:
            return ResourceExhausted(failed.message, RETRY_AFTER_S)
        case FailureReason.DEADLINE:
            return DeadlineExceeded()
        case FailureReason.NONFINITE:
            return Internal("NONFINITE_LOGITS", request_id, "the model computed non-finite logits")
        case FailureReason.UNKNOWN | FailureReason.UNKNOWN_ATTEMPT:
            return Internal("WORKER_FAILED", request_id, failed.message)


QUARANTINE_S = 600.0
MOST_KEPT = 1024


def request_digest(request: PreparedRequest) -> bytes:
    """Return a digest of prompt, adapter and sampling parameters. The seed is left out, because it may be random."""
    adapter = "" if request.adapter is None else request.adapter.digest
    digest = hashlib.sha256(repr((adapter, replace(request.sampling, seed=0))).encode())
    digest.update(array("Q", request.token_ids).tobytes())
    return digest.digest()


class Quarantine:
    """Digests of deadly requests, which are rejected for QUARANTINE_S. At most the newest MOST_KEPT are kept.

    Each router quarantines only requests that it served itself; other routers do not learn of these.
    """

    def __init__(self) -> None:
        self.until_s: OrderedDict[bytes, float] = OrderedDict()
        """End of each request's quarantine (monotonic seconds) by digest, earliest first."""

    def __len__(self) -> int:
        return len(self.until_s)

    def add(self, found: bytes, now: float) -> None:
        self.until_s.pop(found, None)
        self.until_s[found] = now + QUARANTINE_S
        if len(self.until_s) > MOST_KEPT:
            self.until_s.popitem(last=False)

    def holds(self, request: PreparedRequest, now: float) -> bool:
        """Return whether `request` equals a quarantined request."""
        while self.until_s and next(iter(self.until_s.values())) <= now:
            self.until_s.popitem(last=False)
        return bool(self.until_s) and request_digest(request) in self.until_s


class Suspects:
    """Queue in which suspected requests wait to be attempted one at a time.

    A suspected request runs without other suspected requests until it makes progress, so that a worker's death shows
    which of them is deadly.
    """

    def __init__(self) -> None:
        self._locks: deque[SuspectLock] = deque()  # in order of arrival; the first lock is held

    def lock(self, on_held: Callable[[], None]) -> "SuspectLock":
        """Queue for the lock. `on_held` is called when the lock is held, perhaps before this method returns."""
        lock = SuspectLock(self._locks, on_held)
        self._locks.append(lock)
        if self._locks[0] is lock:
            on_held()
        return lock


class SuspectLock:
    """Lock that a suspected request holds or waits for.

    `release` releases the lock or ends the wait; further calls do nothing.
    """

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
    return Internal(
        "POISON", request_id, f"every worker that computed this request died; it is rejected for {QUARANTINE_S:g} s"
    )
