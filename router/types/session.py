"""Session (conversation) of a request. Workers keep a session's KV longer than that of other prompts."""

import hashlib
from dataclasses import dataclass

ID_BYTES = 16
OWNER_BYTES = 8


@dataclass(frozen=True, slots=True)
class KeptSession:
    """Session whose KV workers keep, and for how long. `id` also depends on the API key and the salt, unlike `name`."""

    name: str  # session_id that the client sent
    id: bytes  # digest of caller, salt and name, ID_BYTES long
    owner: bytes  # digest of the API key, or of the salt without keys, OWNER_BYTES long
    keep_for_s: float | None  # time to keep the KV after this turn; None: derived from measured pauses
    done: bool  # True: this is the last turn of the session


def kept_session(
    name: str,
    tenant: str,
    key_salt: bytes,
    cache_salt: str,
    keep_for_s: float | None = None,
    done: bool = False,
) -> KeptSession | None:
    """Return the retention of the session `name`; None without a name.

    The owner depends on the API key if there is one, otherwise on `cache_salt`.
    """
    if not name:
        return None
    salt = cache_salt.encode("utf-8", "surrogatepass")
    caller = (tenant.encode("utf-8", "surrogatepass"), key_salt)
    owner = _digest(*caller) if any(caller) else _digest(salt)
    session_id = _digest(*caller, salt, name.encode("utf-8", "surrogatepass"))
    return KeptSession(name, session_id[:ID_BYTES], owner[:OWNER_BYTES], keep_for_s, done)


def _digest(*parts: bytes) -> bytes:
    """Return the SHA-256 of the parts. Their lengths are hashed, too, so that different lists of parts differ."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
