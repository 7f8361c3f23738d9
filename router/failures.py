"""Why an attempt failed, as the client sees it, and whether another attempt may do better. The one mapping."""

from router.events import Failed, FailureReason
from router.refusals import RETRY_AFTER_S
from service.errors import (
    Aborted,
    BatonError,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)

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
"""Another attempt, on other workers or a little later, may succeed."""
ABOUT_A_PAIR = frozenset({FailureReason.TRANSFER, FailureReason.CORRUPT})
"""Reported by a decode worker about reads from its prefill worker, whose loss it may notice first."""


PREFILL_GONE = frozenset({FailureReason.WORKER_LOST, FailureReason.WORKER_DIED, FailureReason.DRAINING})
"""Of a prefill worker: nothing is wrong with what it computed, and another prefill worker continues."""


class AttemptFailed(Exception):
    """One attempt at a request ended without an answer."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(f"{failed.reason.name} at {failed.endpoint}: {failed.message}")
        self.failed = failed


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
