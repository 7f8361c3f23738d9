from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Report(_message.Message):
    __slots__ = ("limit_blocks", "limit_slots", "pages", "waiting_requests", "running_sequences", "pending_tokens", "draining", "steps", "cache_query_tokens", "cache_hit_tokens", "preemptions", "unfilled_slots", "links", "cache", "checked_blocks", "checksum_mismatches", "alone_tokens_per_s", "beside_tokens_per_s", "now_us", "drafts", "drafted_tokens", "accepted_tokens", "drafts_gained_s", "drafts_lost_s", "tier", "sessions")
    LIMIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CACHE_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    UNFILLED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    CHECKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    ALONE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    BESIDE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    NOW_US_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_GAINED_S_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_LOST_S_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    limit_blocks: int
    limit_slots: int
    pages: PageCounts
    waiting_requests: int
    running_sequences: int
    pending_tokens: int
    draining: bool
    steps: int
    cache_query_tokens: int
    cache_hit_tokens: int
    preemptions: int
    unfilled_slots: int
    links: _containers.RepeatedCompositeFieldContainer[LinkReport]
    cache: CacheSum
    checked_blocks: int
    checksum_mismatches: int
    alone_tokens_per_s: float
    beside_tokens_per_s: float
    now_us: int
    drafts: int
    drafted_tokens: int
    accepted_tokens: _containers.RepeatedScalarFieldContainer[int]
    drafts_gained_s: float
    drafts_lost_s: float
    tier: TierReport
    sessions: SessionReport
    def __init__(self, limit_blocks: _Optional[int] = ..., limit_slots: _Optional[int] = ..., pages: _Optional[_Union[PageCounts, _Mapping]] = ..., waiting_requests: _Optional[int] = ..., running_sequences: _Optional[int] = ..., pending_tokens: _Optional[int] = ..., draining: bool = ..., steps: _Optional[int] = ..., cache_query_tokens: _Optional[int] = ..., cache_hit_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., unfilled_slots: _Optional[int] = ..., links: _Optional[_Iterable[_Union[LinkReport, _Mapping]]] = ..., cache: _Optional[_Union[CacheSum, _Mapping]] = ..., checked_blocks: _Optional[int] = ..., checksum_mismatches: _Optional[int] = ..., alone_tokens_per_s: _Optional[float] = ..., beside_tokens_per_s: _Optional[float] = ..., now_us: _Optional[int] = ..., drafts: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[_Iterable[int]] = ..., drafts_gained_s: _Optional[float] = ..., drafts_lost_s: _Optional[float] = ..., tier: _Optional[_Union[TierReport, _Mapping]] = ..., sessions: _Optional[_Union[SessionReport, _Mapping]] = ...) -> None: ...

class SessionReport(_message.Message):
    __slots__ = ("known", "protected_blocks", "evicted_done_blocks", "evicted_other_blocks", "evicted_protected_blocks", "prefetched_blocks", "prefetched_used_blocks", "taken_over_blocks")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_DONE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_OTHER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_PROTECTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFETCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFETCHED_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_OVER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    known: int
    protected_blocks: int
    evicted_done_blocks: int
    evicted_other_blocks: int
    evicted_protected_blocks: int
    prefetched_blocks: int
    prefetched_used_blocks: int
    taken_over_blocks: int
    def __init__(self, known: _Optional[int] = ..., protected_blocks: _Optional[int] = ..., evicted_done_blocks: _Optional[int] = ..., evicted_other_blocks: _Optional[int] = ..., evicted_protected_blocks: _Optional[int] = ..., prefetched_blocks: _Optional[int] = ..., prefetched_used_blocks: _Optional[int] = ..., taken_over_blocks: _Optional[int] = ...) -> None: ...

class TierReport(_message.Message):
    __slots__ = ("blocks", "size_bytes", "reads", "writes", "queried_blocks", "hit_blocks", "corrupt_blocks", "loaded_bytes", "stored_bytes", "dropped_blocks", "evicted_blocks", "directory_id", "load_bytes_per_s", "block_bytes", "sequence", "memory_blocks", "memory_bytes")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    QUERIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    size_bytes: int
    reads: bool
    writes: bool
    queried_blocks: int
    hit_blocks: int
    corrupt_blocks: int
    loaded_bytes: int
    stored_bytes: int
    dropped_blocks: int
    evicted_blocks: int
    directory_id: bytes
    load_bytes_per_s: float
    block_bytes: int
    sequence: int
    memory_blocks: int
    memory_bytes: int
    def __init__(self, blocks: _Optional[int] = ..., size_bytes: _Optional[int] = ..., reads: bool = ..., writes: bool = ..., queried_blocks: _Optional[int] = ..., hit_blocks: _Optional[int] = ..., corrupt_blocks: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., dropped_blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., directory_id: _Optional[bytes] = ..., load_bytes_per_s: _Optional[float] = ..., block_bytes: _Optional[int] = ..., sequence: _Optional[int] = ..., memory_blocks: _Optional[int] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class LinkReport(_message.Message):
    __slots__ = ("endpoint", "transport", "gb_per_s", "fallback")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    GB_PER_S_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    transport: str
    gb_per_s: float
    fallback: str
    def __init__(self, endpoint: _Optional[str] = ..., transport: _Optional[str] = ..., gb_per_s: _Optional[float] = ..., fallback: _Optional[str] = ...) -> None: ...

class PageCounts(_message.Message):
    __slots__ = ("total", "free", "cached", "held", "held_by_sequences", "held_by_transfers")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    HELD_BY_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    HELD_BY_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    cached: int
    held: int
    held_by_sequences: int
    held_by_transfers: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., held: _Optional[int] = ..., held_by_sequences: _Optional[int] = ..., held_by_transfers: _Optional[int] = ...) -> None: ...

class CacheSum(_message.Message):
    __slots__ = ("sequence", "digest", "blocks")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    digest: int
    blocks: int
    def __init__(self, sequence: _Optional[int] = ..., digest: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...
