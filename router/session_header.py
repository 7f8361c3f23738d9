"""The session of a call, where its client names one: requests of one session go to the same workers."""

from collections.abc import Iterable

SESSION_HEADER = "x-session-id"
MAX_SESSION_CHARACTERS = 256


def session_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Empty where none is named."""
    return next((value for name, value in metadata if name == SESSION_HEADER and isinstance(value, str)), "")
