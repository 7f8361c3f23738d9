"""What a worker tells the router: its description and its reports. Plain values without protobuf."""

from dataclasses import dataclass

from baton.process.registry.worker_record import WorkerRole
from baton.text.block_groups import ONE_GROUP, BlockGroups
from baton.versions import UNANNOUNCED, Versions, differing


@dataclass(frozen=True, slots=True)
class CacheSum:
    """Checksum of a worker's set of cached blocks after message `sequence`; see PrefixIndex.digest."""

    sequence: int
    digest: int
    blocks: int


__all__ = ["Adapter", "ModelDescription", "PoolBlocks", "WorkerDescription", "WorkerReport", "WorkerRole"]


@dataclass(frozen=True, slots=True)
class ModelDescription:
    name: str
    path: str  # folder of the checkpoint on the worker
    max_model_len: int  # maximum number of tokens of prompt and answer together
    vocab_size: int
    dtype: str  # "float32" or "bfloat16"
    block_tokens: int
    makes_answers: bool = True  # False: the model only computes vectors or scores, on prefill workers
    groups: BlockGroups = ONE_GROUP


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA adapter that a worker has loaded; or, with the name WEIGHTS, weights that replace the model's own."""

    name: str  # model name by which requests choose it
    digest: str


@dataclass(frozen=True, slots=True)
class ListedAdapter:
    """Adapter, or weights, that the cluster loads at runtime."""

    adapter: Adapter
    path: str  # folder of the adapter on the workers
    grace_s: float = 0.0  # time for which requests with the previous weights may run


@dataclass(frozen=True, slots=True)
class WorkerAdapters:
    """Adapters that one worker has loaded, or was told to load."""

    version: int  # version of the newest adapter list that the worker has received
    listed: tuple[ListedAdapter, ...]
    started: tuple[Adapter, ...]  # adapters that the worker was started with
    refused: tuple[tuple[str, str], ...] = ()  # listed adapters that the worker could not load: name and reason
    own_weights_freed: bool = False  # the weights that the worker was started with were replaced and released


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """Description that a worker sends when a link opens. Within an epoch only the adapters change."""

    worker_id: str
    role: WorkerRole
    pid: int
    fingerprint: bytes
    model: ModelDescription
    total_blocks: int
    total_slots: int  # 0 for a prefill worker
    adapters: tuple[Adapter, ...] = ()  # adapters that requests can use now
    roles: tuple[WorkerRole, ...] = ()  # roles to which the worker can change; empty: its role is fixed
    pool_id: bytes = b""  # random id of the worker's process; empty: an older release
    arithmetic: str = ""  # how the worker rounds results; empty: an older release
    versions: Versions = UNANNOUNCED
    checkpoint: bytes = b""  # digest of the worker's weights; empty: an older release
    kv_layout: str = ""  # description of the KV layout; empty: an older release
    adapter_list: WorkerAdapters | None = None  # None: the worker loads adapters only at its start

    @property
    def started_adapters(self) -> tuple[Adapter, ...]:
        return self.adapters if self.adapter_list is None else self.adapter_list.started

    @property
    def has_own_weights(self) -> bool:
        return self.adapter_list is None or not self.adapter_list.own_weights_freed

    def is_same_process(self, other: "WorkerDescription") -> bool:
        """Return whether both describe the same process, perhaps in different roles. False without a pool id."""
        return bool(self.pool_id) and self.pool_id == other.pool_id

    def differs_from(self, served: "WorkerDescription") -> str:
        """Return the difference from `served`'s model that keeps the worker from serving; empty if there is none."""
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
    """Numbers of blocks in a worker's KV pool, by state: free + cached + held = total."""

    total: int
    free: int
    cached: int
    held: int
    held_by_sequences: int
    held_by_transfers: int


@dataclass(frozen=True, slots=True)
class KvLink:
    """Transport by which a worker reads KV from another worker."""

    endpoint: str
    transport: str
    gb_per_s: float  # read rate, measured when the two workers connected
    fallback: str  # why no faster transport was chosen; empty: this is the fastest


@dataclass(frozen=True, slots=True)
class TierReport:
    """State of a worker's KV tier (files and host memory). Counts of events are since the worker's start."""

    blocks: int
    size_bytes: int
    reads: bool
    writes: bool
    queried_blocks: int  # number of prompt blocks that the pool lacked
    hit_blocks: int  # number of queried blocks that the tier loaded
    corrupt_blocks: int
    loaded_bytes: int
    stored_bytes: int
    dropped_blocks: int
    evicted_blocks: int
    directory_id: bytes = b""  # workers with the same id can read each other's files; empty: not announced
    load_bytes_per_s: float = 0.0  # rate of loading from files; 0: not measured
    block_bytes: int = 0
    sequence: int = 0  # number of the worker's newest message about its files
    memory_blocks: int = 0  # number of blocks in host memory, the level above the files
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SessionReport:
    """Sessions whose KV a worker keeps. The first two values are current; the others count since the worker's start."""

    known: int = 0
    protected_blocks: int = 0
    evicted_done_blocks: int = 0
    evicted_other_blocks: int = 0
    evicted_protected_blocks: int = 0
    prefetched_blocks: int = 0  # blocks loaded from files before the session's next prompt
    prefetched_used_blocks: int = 0  # prefetched blocks that a prompt used
    taken_over_blocks: int = 0  # kept blocks received from workers that left


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Periodic report of a worker. Counts of events are since the worker's start."""

    limit_blocks: int  # maximum number of blocks that this router may charge on the worker
    limit_slots: int
    pages: PoolBlocks
    waiting_requests: int
    running_sequences: int
    pending_tokens: int
    draining: bool
    steps: int
    cache_query_tokens: int = 0  # prompt tokens looked up in the prefix cache
    cache_hit_tokens: int = 0  # prompt tokens found in the prefix cache
    preemptions: int = 0
    unfilled_slots: int = 0  # number of empty token slots in held blocks
    links: tuple[KvLink, ...] = ()
    cache: CacheSum | None = None  # None: the worker does not report its cache
    checked_blocks: int = 0  # blocks read from other workers whose checksums were compared
    checksum_mismatches: int = 0  # checked blocks whose checksum differed
    checked_at_rest_blocks: int = 0  # cached blocks whose checksums were compared before use
    corrupt_at_rest_blocks: int = 0  # checked cached blocks whose checksum differed
    alone_tokens_per_s: float | None = None  # prompt rate of a decode worker without running answers
    beside_tokens_per_s: float | None = None  # prompt rate of a decode worker while answers run
    drafts: int = 0  # number of drafts of speculative decoding
    drafted_tokens: int = 0
    accepted_tokens: tuple[int, ...] = ()  # number of accepted tokens, by position in a draft
    drafts_gained_s: float = 0.0  # step time saved by accepted tokens, summed over answers
    drafts_lost_s: float = 0.0  # additional time of steps with drafts, summed over answers
    tier: TierReport | None = None  # None: the worker has no KV tier
    sessions: SessionReport = SessionReport()

    @property
    def loads_files(self) -> bool:
        """Return whether the worker loads prompt KV from files. False while its disk fails, and for older releases."""
        tier = self.tier
        return tier is not None and tier.reads and bool(tier.directory_id) and tier.block_bytes > 0
