"""Secret shared by all processes of a cluster, and the keys derived from it. Pure.

The secret is never sent. Each call between two processes and its response carry a proof: an HMAC over a nonce, the
method and the destination port. A process that impersonates a server gets only proofs for its own port. An admin port
accepts a token that is derived from its port number, over loopback. Records in Redis are signed.
"""

import hmac
import secrets
from collections.abc import Iterable
from typing import NamedTuple

PROOF_KEY = "baton-proof"
"""Metadata key with which both sides of a call prove that they know the secret."""
MIN_CHARACTERS = 16
_SECRET_BYTES = 32
_NONCE_DIGITS = 32
_MARK_DIGITS = 8
_SIGNATURE_DIGITS = 64

Metadata = Iterable[tuple[str, str | bytes]]


class CallProof(NamedTuple):
    """Proof that a caller sends, and the proof that it expects from the server."""

    shown: str
    expected: str

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((PROOF_KEY, self.shown),)

    def is_answered_by(self, metadata: Metadata | None) -> bool:
        return hmac.compare_digest(_proof_in(metadata or ()), self.expected.encode())


class ClusterSecret:
    """Cluster secret. Each purpose has a separate derived key, so that a leaked key is useless for other purposes."""

    def __init__(self, text: str) -> None:
        """Check the secret. Raises: ValueError."""
        if len(text) < MIN_CHARACTERS:
            raise ValueError(f"the secret must have at least {MIN_CHARACTERS} characters (openssl rand -hex 32)")
        self._secret = text.encode()
        self._call_key, self._record_key = self._derive("call"), self._derive("record")

    def call_proof(self, method: str, port: int) -> CallProof:
        """Create the proof of a call to `method` (/package.Service/Method) at the process that listens on `port`."""
        nonce = secrets.token_hex(_NONCE_DIGITS // 2)
        return CallProof(nonce + self._proof("caller", method, port, nonce), self._proof("server", method, port, nonce))

    def answer(self, method: str, port: int, metadata: Metadata) -> str | None:
        """Return the server's proof for a call; None if the caller's proof is missing or wrong."""
        shown = _proof_in(metadata).decode()
        nonce, proof = shown[:_NONCE_DIGITS], shown[_NONCE_DIGITS:]
        if not hmac.compare_digest(proof, self._proof("caller", method, port, nonce)):
            return None
        return self._proof("server", method, port, nonce)

    def admin_token(self, port: int) -> str:
        """Return the bearer token for the admin port with that number."""
        return self._derive(f"admin {port}").hex()

    @property
    def mark(self) -> str:
        """Return the part of Redis key names that separates clusters with different secrets."""
        return self._derive("mark").hex()[:_MARK_DIGITS]

    def seal(self, name: str, value: bytes) -> bytes:
        """Return `value` with a signature for the record `name`."""
        return self._signature(name, value) + value

    def unseal(self, name: str, sealed: bytes) -> bytes | None:
        """Return the value of a signed record; None without a valid signature by this secret for the record `name`."""
        signature, value = sealed[:_SIGNATURE_DIGITS], sealed[_SIGNATURE_DIGITS:]
        return value if hmac.compare_digest(signature, self._signature(name, value)) else None

    def _signature(self, name: str, value: bytes) -> bytes:
        named = len(name.encode()).to_bytes(8, "little") + name.encode()
        return hmac.digest(self._record_key, named + value, "sha256").hex().encode()

    def _proof(self, side: str, method: str, port: int, nonce: str) -> str:
        return hmac.digest(self._call_key, f"{side} {method} {port} {nonce}".encode(), "sha256").hex()

    def _derive(self, purpose: str) -> bytes:
        return hmac.digest(self._secret, f"baton.v1 {purpose}".encode(), "sha256")


def new_secret() -> str:
    return secrets.token_hex(_SECRET_BYTES)


def _proof_in(metadata: Metadata) -> bytes:
    """Return the proof in the metadata as ASCII bytes, empty if there is none."""
    shown = next((value for key, value in metadata if key == PROOF_KEY), "")
    return shown.encode(errors="replace") if isinstance(shown, str) and shown.isascii() else b""
