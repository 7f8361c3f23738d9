"""Tenants: calls with the same API key are one tenant. A key itself is kept nowhere."""

import hashlib
from collections.abc import Iterable

_SCHEME = "bearer"
_DIGITS = 32


def tenant_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """From `authorization: Bearer KEY`, a digest of the key; "" without one."""
    key = bearer_of(metadata)
    return tenant_of_key(key) if key else ""


def bearer_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The key itself; "" without one."""
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str):
            scheme, _, key = value.partition(" ")
            if scheme.lower() == _SCHEME and key.strip():
                return key.strip()
    return ""


def tenant_of_key(api_key: str) -> str:
    """The tenant that a key stands for, whichever way it came."""
    return hashlib.sha256(api_key.encode()).hexdigest()[:_DIGITS]
