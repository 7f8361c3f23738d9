"""API keys at rest, whose key a request shows, and the keys of a process as their file has them now.

A key is 256 random bits, too many to try them all: its SHA-256 is enough to keep. (Slow hashes with salt, such as
scrypt, are for passwords, which people choose; here they would only make every request slow.)
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

from baton.process.security.changing_files import ChangingFiles

KEY_PREFIX = "baton-"
_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CACHE_DOMAIN = b"baton.cache.v1:"


class KeyFormatError(ValueError):
    """Keys are malformed; the message names the place, and not its content."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of one key at the routers that share a Redis, or at a router without one. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and of answers
    concurrency: int | None = None  # requests at once
    max_context_tokens: int | None = None  # of prompt and answer


UNLIMITED = KeyLimits()
_LIMITS = tuple(field.name for field in fields(KeyLimits))


@dataclass(frozen=True, slots=True)
class ApiKey:
    """API key without its secret. `is_admin`: may also see all others' requests."""

    name: str
    sha256: bytes
    limits: KeyLimits = UNLIMITED
    is_admin: bool = False

    @property
    def key_salt(self) -> bytes:
        """Requests with another key share no cached prompt with this one. All routers derive the same salt from it."""
        return hmac.digest(self.sha256, _CACHE_DOMAIN + self.name.encode(), "sha256")

    @property
    def line(self) -> str:
        """Return the key's line in a key file, without the line end."""
        entry: dict[str, Any] = {"name": self.name, "sha256": self.sha256.hex()}
        entry |= {name: value for name in _LIMITS if (value := getattr(self.limits, name)) is not None}
        if self.is_admin:
            entry["admin"] = True
        return json.dumps(entry)


class KeyRing:
    """Ring of all valid keys."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        """Create a ring. Raises: KeyFormatError if two share a name, or one key has two."""
        self._keys = tuple(keys)
        for what, seen in (("name", {key.name for key in self._keys}), ("hash", {key.sha256 for key in self._keys})):
            if len(seen) != len(self._keys):
                raise KeyFormatError(f"two API keys have the same {what}")

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._keys)

    def find(self, secret: str) -> ApiKey | None:
        """Return the key with this secret, or None. Takes constant time: all are compared."""
        digest = digest_of(secret)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()


def new_secret() -> str:
    """A new key, to be shown once."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def parse_key_file(text: str) -> tuple[ApiKey, ...]:
    """A JSON object on each line; empty lines, and those that begin with #, are nothing. Raises: KeyFormatError."""
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            keys.append(_parse_line(line, f"line {number}"))
    return tuple(keys)


def parse_key_hashes(text: str) -> tuple[ApiKey, ...]:
    """Parse `NAME:SHA256,NAME:SHA256`, keys without limits. Raises: KeyFormatError."""
    keys = []
    for number, part in enumerate(filter(None, (part.strip() for part in text.split(","))), 1):
        name, _, digest = part.partition(":")
        keys.append(_key({"name": name, "sha256": digest}, f"key {number}"))
    return tuple(keys)


def _parse_line(line: str, where: str) -> ApiKey:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise KeyFormatError(f"{where}: not JSON") from None  # whose message may hold a part of the line
    if not isinstance(entry, dict):
        raise KeyFormatError(f"{where}: not a JSON object")
    return _key(entry, where)


def _key(entry: Mapping[str, Any], where: str) -> ApiKey:
    if entry.keys() - {"name", "sha256", "admin", *_LIMITS}:
        raise KeyFormatError(f"{where}: fields are name, sha256, admin, {', '.join(_LIMITS)}, and no others")
    name, digest, is_admin = entry.get("name"), entry.get("sha256"), entry.get("admin", False)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise KeyFormatError(f"{where}: name has 1 to 64 letters, digits, dots, dashes and underscores")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise KeyFormatError(f"{where}: sha256 has 64 hexadecimal digits, in lower case")
    if not isinstance(is_admin, bool):
        raise KeyFormatError(f"{where}: admin is true or false")
    limits = {limit: entry[limit] for limit in _LIMITS if entry.get(limit) is not None}
    for limit, value in limits.items():
        if type(value) is not int or value < 1:
            raise KeyFormatError(f"{where}: {limit} is a whole number from 1 on")
    return ApiKey(name, bytes.fromhex(digest), KeyLimits(**limits), is_admin)


POLL_S = 1.0
_MAX_FILE_BYTES = 16 << 20


class KeyStore:
    """Store whose `ring` has the present keys. A file that became invalid or vanished changes nothing: earlier keys
    stay valid.
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
        """Reads the file again where it has changed."""
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
            raise KeyFormatError("the file is not UTF-8") from None  # whose message has a part of the content
        return KeyRing((*self._fixed, *parse_key_file(text)))
