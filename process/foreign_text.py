"""Text that clients and other processes send: checks of identifiers, and escapes that make it safe to display. Pure."""

import re

MAX_ID_CHARACTERS = 128
IDENTIFIER = re.compile(r"[ -~]*")
"""Printable ASCII, required for ids of requests, sessions, models and workers, which appear in logs, headers and
terminals.
"""
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,127}")
_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal, end a line, change the text direction, or cannot be encoded in UTF-8."""


def identifier_fault(text: str, most: int = MAX_ID_CHARACTERS) -> str | None:
    """Return the reason why a text is not an identifier, for the end of an error message; None for an identifier."""
    if len(text) > most:
        return f"at most {most} characters, not {len(text)}"
    return None if IDENTIFIER.fullmatch(text) else "only printable ASCII characters are allowed"


def shown(text: str, keeps: str = "") -> str:
    """Return the text with escapes such as `\\x1b` for control characters, except those in `keeps`."""
    return _UNSHOWN.sub(lambda found: found[0] if found[0] in keeps else ascii(found[0])[1:-1], text)
