"""Conversion of link messages about prefix caches and KV in files from protobuf to plain values."""

from collections.abc import Iterable

from baton.protos import cache_pb2, report_pb2
from baton.router.cache.replica import CacheSnapshotPart, CacheUpdate
from baton.router.cache.tiers import TierChanges, TierPiece, TierSnapshotPart
from baton.router.types.worker import CacheSum
from baton.text.block_hash import HASH_BYTES


def tier_changes(events: cache_pb2.TierEvents) -> TierChanges:
    return TierChanges(events.sequence, _pieces(events.stored), tuple(events.removed_segments))


def tier_snapshot_part(snapshot: cache_pb2.TierSnapshot) -> TierSnapshotPart:
    return TierSnapshotPart(snapshot.sequence, snapshot.part, snapshot.parts, _pieces(snapshot.stored))


def changes(events: cache_pb2.CacheEvents) -> CacheUpdate:
    return CacheUpdate(events.sequence, _hashes(events.stored), _hashes(events.evicted))


def snapshot_part(snapshot: cache_pb2.CacheSnapshot) -> CacheSnapshotPart:
    return CacheSnapshotPart(snapshot.sequence, snapshot.part, snapshot.parts, _hashes(snapshot.hashes))


def cache_sum(message: report_pb2.CacheSum) -> CacheSum:
    return CacheSum(message.sequence, message.digest, message.blocks)


def _pieces(pieces: Iterable[cache_pb2.TierPiece]) -> tuple[TierPiece, ...]:
    return tuple(TierPiece(each.segment, each.first_slot, each.names) for each in pieces)


def _hashes(packed: bytes) -> tuple[bytes, ...]:
    """Split concatenated block hashes. An incomplete last hash is ignored: the worker's checksum will then differ."""
    end = len(packed) // HASH_BYTES * HASH_BYTES
    return tuple(packed[begin : begin + HASH_BYTES] for begin in range(0, end, HASH_BYTES))
