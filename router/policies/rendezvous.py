"""Rendezvous hashing: the owner of a key among several workers, without any state.

If one of them leaves, only its keys move; if one joins, it takes its share from all others (Thaler and Ravishankar,
1998).
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
