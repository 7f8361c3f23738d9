"""API keys: storage as hashes, limits, and lookup of the key in a request.

A key is 256 random bits, which cannot be guessed, so its SHA-256 is stored. Slow salted hashes such as scrypt protect
passwords that people choose; here they would only slow down requests.
"""

import asyncio
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from baton.process.objectives import LEAST_SLO_MS, MOST_SLO_MS, NONE_REQUESTED, RequestedObjectives
from baton.process.security.changing_files import ChangingFiles

KEY_PREFIX = "baton-"
_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CACHE_DOMAIN = b"baton.cache.v1:"


class KeyFormatError(ValueError):
    """Error: keys are malformed; the message names the line or position, not the content."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one key at all routers that share a Redis, or at a router without Redis. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # tokens of prompts and answers
    concurrency: int | None = None  # maximum number of requests in flight
    max_context_tokens: int | None = None  # tokens of prompt plus answer


UNLIMITED = KeyLimits()
_LIMITS = tuple(field.name for field in fields(KeyLimits))
_OBJECTIVES = tuple(field.name for field in fields(RequestedObjectives))


@dataclass(frozen=True, slots=True)
class ApiKey:
    """API key without its secret. `is_admin`: may also see the requests of all other keys. `objectives`: latency
    objectives of requests that have none of their own.
    """

    name: str
    sha256: bytes
    limits: KeyLimits = UNLIMITED
    is_admin: bool = False
    objectives: RequestedObjectives = NONE_REQUESTED

    @property
    def key_salt(self) -> bytes:
        """Return the salt of this key's prefix-cache hashes, equal on all routers. Because of the salt, requests with
        different API keys never share cached prompts.
        """
        return hmac.digest(self.sha256, _CACHE_DOMAIN + self.name.encode(), "sha256")

    @property
    def line(self) -> str:
        """Return the key's line in a key file, without line end."""
        entry: dict[str, Any] = {"name": self.name, "sha256": self.sha256.hex()}
        for names, values in ((_LIMITS, self.limits), (_OBJECTIVES, self.objectives)):
            entry |= {name: value for name in names if (value := getattr(values, name)) is not None}
        if self.is_admin:
            entry["admin"] = True
        return json.dumps(entry)


class KeyRing:
    """Set of all valid keys."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        """Create a set of keys. Raises: KeyFormatError if two keys share a name or a hash."""
        self._keys = tuple(keys)
        for what, seen in (("name", {key.name for key in self._keys}), ("hash", {key.sha256 for key in self._keys})):
            if len(seen) != len(self._keys):
                raise KeyFormatError(f"two API keys have the same {what}")

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._keys)

    def find(self, secret: str) -> ApiKey | None:
        """Return the key with this secret, or None. Compares all keys, so that the duration reveals nothing."""
        digest = digest_of(secret)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()


def new_secret() -> str:
    """Return a new random key."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def parse_key_file(text: str) -> tuple[ApiKey, ...]:
    """Parse a key file: one JSON object per line; empty lines and lines beginning with # are ignored. Raises:
    KeyFormatError.
    """
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            keys.append(_parse_line(line, f"line {number}"))
    return tuple(keys)


def parse_key_hashes(text: str) -> tuple[ApiKey, ...]:
    """Parse `NAME:SHA256,NAME:SHA256` as keys without limits. Raises: KeyFormatError."""
    keys = []
    for number, part in enumerate(filter(None, (part.strip() for part in text.split(","))), 1):
        name, _, digest = part.partition(":")
        keys.append(_key({"name": name, "sha256": digest}, f"key {number}"))
    return tuple(keys)


def _parse_line(line: str, where: str) -> ApiKey:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise KeyFormatError(f"{where}: not JSON") from None  # the JSON error's message may quote the line
    if not isinstance(entry, dict):
        raise KeyFormatError(f"{where}: not a JSON object")
    return _key(entry, where)


def _key(entry: Mapping[str, Any], where: str) -> ApiKey:
    optional = (*_LIMITS, *_OBJECTIVES)
    if entry.keys() - {"name", "sha256", "admin", *optional}:
        raise KeyFormatError(f"{where}: unknown field; the fields are name, sha256, admin, {', '.join(optional)}")
    name, digest, is_admin = entry.get("name"), entry.get("sha256"), entry.get("admin", False)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise KeyFormatError(f"{where}: name must have 1 to 64 letters, digits, dots, dashes and underscores")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise KeyFormatError(f"{where}: sha256 must have 64 hexadecimal digits, in lower case")
    if not isinstance(is_admin, bool):
        raise KeyFormatError(f"{where}: admin must be true or false")
    limits = {limit: entry[limit] for limit in _LIMITS if entry.get(limit) is not None}
    for limit, value in limits.items():
        if type(value) is not int or value < 1:
            raise KeyFormatError(f"{where}: {limit} must be a whole number, at least 1")
    objectives = {name: entry[name] for name in _OBJECTIVES if entry.get(name) is not None}
    for objective, value in objectives.items():
        if type(value) not in (int, float) or not LEAST_SLO_MS <= value <= MOST_SLO_MS:
            raise KeyFormatError(f"{where}: {objective} must be a number from {LEAST_SLO_MS:.0f} to {MOST_SLO_MS:.0f}")
    return ApiKey(name, bytes.fromhex(digest), KeyLimits(**limits), is_admin, RequestedObjectives(**objectives))


POLL_S = 1.0
_MAX_FILE_BYTES = 16 << 20


class KeyStore:
    """Keys of a process, reloaded when their file changes. An invalid or missing file is ignored: the earlier keys stay
    valid.
    """

    def __init__(self, file: Path | None, fixed: Sequence[ApiKey] = ()) -> None:
        """Read the keys. `fixed`: keys valid in addition to those of the file. Raises: KeyFormatError, OSError."""
        self._file = file
        self._fixed = tuple(fixed)
        self._files = ChangingFiles(() if file is None else (file,), self._read, KeyFormatError, "the API keys")
        self.ring = self._files.latest()

    def reload(self) -> None:
        self.ring = self._files.renewed()

    def poll(self) -> None:
        """Reload the file if it has changed."""
        self.ring = self._files.latest()

    async def run(self) -> None:
        """Watch the file until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            self.poll()

    def _read(self) -> KeyRing:
        if self._file is None:
            return KeyRing(self._fixed)
        try:
            with self._file.open(encoding="utf-8") as file:
                text = file.read(_MAX_FILE_BYTES)
        except UnicodeDecodeError:
            raise KeyFormatError("the file is not UTF-8") from None  # the original message may quote the content
        return KeyRing((*self._fixed, *parse_key_file(text)))
