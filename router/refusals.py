"""Errors for a request that has no place, now or ever. Pure."""

from router.placement import NoRoom, PlacementRequest
from service.errors import InvalidArgument, Unavailable

RETRY_AFTER_S = 1.0
"""RetryInfo's time where no better one is known."""


def no_workers(reason: NoRoom) -> Unavailable:
    missing = "prefill" if reason is NoRoom.NO_PREFILL_WORKER else "decode"
    return Unavailable(f"no {missing} worker is connected", "NO_WORKERS", RETRY_AFTER_S)


def never_fits(request: PlacementRequest, reason: NoRoom) -> InvalidArgument:
    if reason is NoRoom.TOO_MANY_CHOICES:
        return InvalidArgument(
            "sampling.n", f"no decode worker has batch slots for {request.choices} sequences", reason="NEVER_FITS"
        )
    return InvalidArgument(
        "sampling.max_tokens",
        f"prompt and answer may need {request.longest_blocks} KV blocks, more than any decode worker has",
        reason="NEVER_FITS",
    )
