"""Which session a call belongs to, where its client says so: requests of one session go to the same workers."""

from collections.abc import Iterable

SESSION_HEADER = "x-session-id"
MAX_SESSION_CHARACTERS = 256


def session_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The empty one where nothing is said."""
    return next((value for name, value in metadata if name == SESSION_HEADER and isinstance(value, str)), "")
