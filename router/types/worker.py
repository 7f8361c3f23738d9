"""A worker as the router knows it: its description, and its newest report. Plain values, no protobuf."""

from dataclasses import dataclass

from baton.process.registry.worker_record import WorkerRole
from baton.text.block_groups import ONE_GROUP, BlockGroups
from baton.versions import UNANNOUNCED, Versions, differing


@dataclass(frozen=True, slots=True)
class CacheSum:
    """The sum of the worker's changes: see PrefixIndex.digest."""

    sequence: int
    digest: int
    blocks: int


__all__ = ["Adapter", "ModelDescription", "PoolBlocks", "WorkerDescription", "WorkerReport", "WorkerRole"]


@dataclass(frozen=True, slots=True)
class ModelDescription:
    name: str
    path: str  # folder of the checkpoint, as the worker sees it
    max_model_len: int  # prompt plus answer, in tokens
    vocab_size: int
    dtype: str  # "float32" or "bfloat16"
    block_tokens: int
    makes_answers: bool = True  # else vectors or scores alone, by prefill workers
    groups: BlockGroups = ONE_GROUP


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that a worker has loaded, or weights in place of its own, called WEIGHTS. Equal ones compute the
    same."""

    name: str  # by which requests choose it, as they do a model
    digest: str


@dataclass(frozen=True, slots=True)
class ListedAdapter:
    """Adapter that a cluster has loaded at runtime."""

    adapter: Adapter
    path: str  # of its folder, as workers see it
    grace_s: float = 0.0  # of weights: how long requests of those before may run on


@dataclass(frozen=True, slots=True)
class WorkerAdapters:
    """State of adapters at a worker."""

    version: int  # of the list that it got last
    listed: tuple[ListedAdapter, ...]
    started: tuple[Adapter, ...]  # that it was started with
    refused: tuple[tuple[str, str], ...] = ()  # names of listed ones that it could not load, and why
    own_weights_freed: bool = False  # those that it was started with were replaced, and no request needs them


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """A worker's own description when a session begins; but for adapters it holds for the whole epoch."""

    worker_id: str
    role: WorkerRole
    pid: int
    fingerprint: bytes
    model: ModelDescription
    total_blocks: int
    total_slots: int  # 0 for a prefill worker
    adapters: tuple[Adapter, ...] = ()  # that requests can be computed with
    roles: tuple[WorkerRole, ...] = ()  # that it can change to; none: it has one for life
    pool_id: bytes = b""  # drawn when its process began; empty: an older worker, which does not send it
    arithmetic: str = ""  # by which its results are rounded; empty: likewise
    versions: Versions = UNANNOUNCED
    checkpoint: bytes = b""  # digest of its weights; empty: a release that does not announce it, as is the next
    kv_layout: str = ""  # in words
    adapter_list: WorkerAdapters | None = None  # None: its adapters come with its start alone

    @property
    def started_adapters(self) -> tuple[Adapter, ...]:
        return self.adapters if self.adapter_list is None else self.adapter_list.started

    @property
    def has_own_weights(self) -> bool:
        return self.adapter_list is None or not self.adapter_list.own_weights_freed

    def is_same_process(self, other: "WorkerDescription") -> bool:
        """The process may have another role by now. False for workers without a pool id."""
        return bool(self.pool_id) and self.pool_id == other.pool_id

    def differs_from(self, served: "WorkerDescription") -> str:
        """Return why it takes no requests of the model that another worker describes; empty if the two may pair."""
        if self.fingerprint == served.fingerprint:
            return ""
        if self.kv_layout and served.kv_layout and self.kv_layout != served.kv_layout:
            what, (own, other) = "KV layout", differing(self.kv_layout, served.kv_layout)
        elif self.checkpoint and served.checkpoint and self.checkpoint != served.checkpoint:
            what, own, other = "weights", self.checkpoint.hex()[:16], served.checkpoint.hex()[:16]
        else:
            what, own, other = "fingerprint", self.fingerprint.hex()[:16], served.fingerprint.hex()[:16]
        return f"{what}: {own} of {self.versions} there, {other} of {served.versions} is served"


@dataclass(frozen=True, slots=True)
class PoolBlocks:
    """Blocks of a worker by state; free + cached + held = total."""

    total: int
    free: int
    cached: int
    held: int
    held_by_sequences: int
    held_by_transfers: int


@dataclass(frozen=True, slots=True)
class KvLink:
    """Link over which a worker reads KV from another one."""

    endpoint: str
    transport: str
    gb_per_s: float  # measured when the two met
    fallback: str  # why no faster way was taken; empty where the fastest was


@dataclass(frozen=True, slots=True)
class TierReport:
    """KV in files, below a worker's pool. Counts are since its start."""

    blocks: int  # that can be found
    size_bytes: int
    reads: bool
    writes: bool
    queried_blocks: int  # of prompts, that the pool lacked
    hit_blocks: int  # of those
    corrupt_blocks: int
    loaded_bytes: int
    stored_bytes: int
    dropped_blocks: int
    evicted_blocks: int
    directory_id: bytes = b""  # workers with the same one read each other's files; empty: none that it announces
    load_bytes_per_s: float = 0.0  # 0: not measured
    block_bytes: int = 0
    sequence: int = 0  # of the worker's last message about its own files
    memory_blocks: int = 0  # in host memory before the files
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SessionReport:
    """Conversations whose KV is kept. Counts are since the worker's start, but for the first two."""

    known: int = 0
    protected_blocks: int = 0
    evicted_done_blocks: int = 0
    evicted_other_blocks: int = 0
    evicted_protected_blocks: int = 0
    prefetched_blocks: int = 0  # from files
    prefetched_used_blocks: int = 0  # of those
    taken_over_blocks: int = 0  # from workers that left


@dataclass(frozen=True, slots=True)
class WorkerReport:
    limit_blocks: int  # most that this router may have charged there at once
    limit_slots: int
    pages: PoolBlocks
    waiting_requests: int
    running_sequences: int
    pending_tokens: int
    draining: bool
    steps: int
    cache_query_tokens: int = 0  # looked up in the prefix cache since the worker's start
    cache_hit_tokens: int = 0  # and found
    preemptions: int = 0  # since the worker's start
    unfilled_slots: int = 0  # tokens that held blocks have room for and do not hold
    links: tuple[KvLink, ...] = ()
    cache: CacheSum | None = None  # None: the worker does not report its cache
    checked_blocks: int = 0  # read from other workers and compared by checksum, since the worker's start
    checksum_mismatches: int = 0  # of those
    checked_at_rest_blocks: int = 0  # cached ones that prompts were about to use, compared since the worker's start
    corrupt_at_rest_blocks: int = 0  # of those
    alone_tokens_per_s: float | None = None  # prompt tokens that a decode worker computes while no answer runs
    beside_tokens_per_s: float | None = None  # and while answers run, as its bound on their steps allows now
    drafts: int = 0  # of speculative decoding, since the worker's start
    drafted_tokens: int = 0
    accepted_tokens: tuple[int, ...] = ()  # of those, by their place in a draft
    drafts_gained_s: float = 0.0  # of answers, added up: steps that accepted tokens saved
    drafts_lost_s: float = 0.0  # and by which steps with drafts took longer
    tier: TierReport | None = None  # None: it has none
    sessions: SessionReport = SessionReport()

    @property
    def loads_files(self) -> bool:
        """Return whether prompts have their KV loaded from files there: not while its disk fails, and by no worker that
        reports less.
        """
        tier = self.tier
        return tier is not None and tier.reads and bool(tier.directory_id) and tier.block_bytes > 0
