"""Session (conversation) of a request, whose KV workers keep longer than that of other prompts."""

import hashlib
from dataclasses import dataclass

ID_BYTES = 16
OWNER_BYTES = 8


@dataclass(frozen=True, slots=True)
class KeptSession:
    """Retention of a session. Its `id` differs between API keys and between salts."""

    name: str  # the client's name of the session
    id: bytes  # digest of ID_BYTES
    owner: bytes  # digest of OWNER_BYTES, equal for all sessions of one API key, or of one salt without keys
    keep_for_s: float | None  # retention after this turn; None: by measured pauses
    done: bool  # last turn of the session


def kept_session(
    name: str,
    tenant: str,
    key_salt: bytes,
    cache_salt: str,
    keep_for_s: float | None = None,
    done: bool = False,
) -> KeptSession | None:
    """Return the retention of a named session; None without a name. All salts of one API key have the same owner."""
    if not name:
        return None
    salt = cache_salt.encode("utf-8", "surrogatepass")
    caller = (tenant.encode("utf-8", "surrogatepass"), key_salt)
    owner = _digest(*caller) if any(caller) else _digest(salt)
    session_id = _digest(*caller, salt, name.encode("utf-8", "surrogatepass"))
    return KeptSession(name, session_id[:ID_BYTES], owner[:OWNER_BYTES], keep_for_s, done)


def _digest(*parts: bytes) -> bytes:
    """Return the SHA-256 of the parts with their lengths, so that no two lists of parts are equal."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
