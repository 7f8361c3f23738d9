"""Rendezvous hashing: who of several a key belongs to, without any state.

Where one of them goes, only its keys move; where one comes, it takes its share from all others (Thaler and
Ravishankar, 1998).
"""

import hashlib
from collections.abc import Sequence

from router.candidates import WorkerView


def home_of(key: bytes, workers: Sequence[WorkerView]) -> WorkerView:
    """The same one for the same key and endpoints, in whatever order they come."""
    return max(workers, key=lambda worker: _weight(key, worker.endpoint))


def _weight(key: bytes, endpoint: str) -> bytes:
    digest = hashlib.blake2b(key, digest_size=8)
    digest.update(endpoint.encode())
    return digest.digest()
