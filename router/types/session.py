"""The session that a request is a turn of: whose KV workers keep longer than that of other prompts."""

import hashlib
from dataclasses import dataclass

ID_BYTES = 16
OWNER_BYTES = 8


@dataclass(frozen=True, slots=True)
class KeptSession:
    """Retention of a session. `id` and `owner` are digests: no session of another key, or under another salt, has the
    same id.
    """

    name: str  # as the client gave it
    id: bytes  # ID_BYTES
    owner: bytes  # OWNER_BYTES; the same for all sessions of one API key, and without keys of one salt
    keep_for_s: float | None  # after the end of this turn; None: by the pauses that were measured
    done: bool  # the last turn


def kept_session(
    name: str,
    tenant: str,
    key_salt: bytes,
    cache_salt: str,
    keep_for_s: float | None = None,
    done: bool = False,
) -> KeptSession | None:
    """Return the retention of a named session. One key is one owner whatever salts it gives, or it could pose as
    many.
    """
    if not name:
        return None
    salt = cache_salt.encode("utf-8", "surrogatepass")
    caller = (tenant.encode("utf-8", "surrogatepass"), key_salt)
    owner = _digest(*caller) if any(caller) else _digest(salt)
    session_id = _digest(*caller, salt, name.encode("utf-8", "surrogatepass"))
    return KeptSession(name, session_id[:ID_BYTES], owner[:OWNER_BYTES], keep_for_s, done)


def _digest(*parts: bytes) -> bytes:
    """SHA-256; lengths go in too, so that no two lists of parts run together to the same bytes."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.digest()
