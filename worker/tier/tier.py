"""KV tier of a worker process: levels in host memory and files, their threads, the reported state."""

import asyncio
import hashlib
import logging

from baton.engine.config.model_config import ModelError
from baton.engine.prepare import PreparedModel
from baton.engine.weights.files import weight_files
from baton.kvtransfer.tier.files import RealDisk, TierDisk
from baton.kvtransfer.tier.levels import TierLevels
from baton.kvtransfer.tier.loader import TierLoader
from baton.kvtransfer.tier.memory import MemoryDisk
from baton.kvtransfer.tier.records import SegmentFormat
from baton.kvtransfer.tier.staging import BlockCopier
from baton.kvtransfer.tier.store import TierStore, least_bytes
from baton.protos import report_pb2
from baton.worker.config import WorkerConfig
from baton.worker.tier.restorer import EngineView, RestoreOptions, TierRestorer
from baton.worker.tier.writer import IGNORE_SUMS, Blocks, SumListener, TierWriter
from baton.worker.transfer.pool import PoolMemory

OPEN_TIMEOUT_S = 10.0  # longest wait for the index; a larger tier is indexed while the worker serves
FLUSH_S = 5.0
CLOSE_S = 1.0

logger = logging.getLogger(__name__)


class KvTier:
    """Storage levels below the KV pool: host memory and files. Create it on the event loop after the pool and before
    the engine; close it after both.
    """

    def __init__(
        self,
        store: TierStore,
        pool: BlockCopier,
        options: RestoreOptions,
        cores: frozenset[int] | None = None,
        memory: TierStore | None = None,
        on_sums: SumListener = IGNORE_SUMS,
    ) -> None:
        """Create a tier. `store`: the level whose state is reported to routers. `memory`: the level in host memory;
        equal to `store` if there are no files. `cores`: CPU cores of the threads; None: any. `on_sums`: see
        `TierWriter`.
        """
        self.files = store
        self._memory = memory
        self._options = options
        self._stores = [store] if memory is None or memory is store else [memory, store]
        first, *others = self._stores
        self._writers = [TierWriter(first, pool, cores, on_sums), *(TierWriter(each, pool, cores) for each in others)]
        levels = TierLevels(self._stores)
        self._loader = TierLoader(levels, pool, cores)
        self.restorer = TierRestorer(levels, self._loader, options, cores)

    def start(self) -> None:
        """Start the writer threads, which first index the files."""
        for writer in self._writers:
            writer.start()

    async def opened(self) -> None:
        """Wait, for OPEN_TIMEOUT_S at most, until the files are indexed or cannot be read."""
        await asyncio.to_thread(self._writers[-1].opened.wait, OPEN_TIMEOUT_S)
        skipped = self.files.counters.foreign_segments
        if skipped:
            text = "%d segments of --kv-tier-dir are skipped: of other weights, another layout of KV, or other kernels"
            logger.info(text, skipped)

    def attach(self, engine: EngineView, settle_s: float) -> None:
        """Connect the engine. `settle_s`: see `TierWriter.attach`; the level in host memory writes immediately."""
        blocks = Blocks(engine.loop.watch_each, engine.loop.unwatch)
        for store, writer in zip(self._stores, self._writers, strict=True):
            writer.attach(blocks, 0.0 if store is self._memory else settle_s)
        self.restorer.attach(engine)

    def offer(self, names: tuple[bytes, ...]) -> None:
        """Queue the blocks that have entered the prefix cache, so that they are written."""
        for writer in self._writers:
            writer.offer(names)

    async def detach(self) -> None:
        """Write the queued blocks, for a bounded time, before the engine stops."""
        await self.restorer.detach()
        await asyncio.gather(*(asyncio.to_thread(writer.detach, FLUSH_S) for writer in self._writers))

    async def close(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(writer.close, CLOSE_S) for writer in self._writers))
        self.restorer.close()
        await asyncio.to_thread(self._loader.close)

    @property
    def outlives_process(self) -> bool:
        """Return whether evicted blocks are in files, which other workers can read after this process has ended."""
        return self.files is not self._memory and self.files.is_open and self._writers[-1].health.is_on

    @property
    def state(self) -> report_pb2.TierReport:
        """Return the state for reports to routers, without the sequence number of announced changes."""
        store, writer, memory, restorer = self.files, self._writers[-1], self._memory, self.restorer
        return report_pb2.TierReport(
            blocks=len(store),
            size_bytes=0 if store is memory else store.own_bytes,
            reads=restorer.health.is_on and store.is_open,
            writes=writer.health.is_on and store.is_open,
            queried_blocks=restorer.counters.queried_blocks,
            hit_blocks=restorer.counters.hit_blocks,
            corrupt_blocks=sum(each.counters.corrupt_blocks for each in self._stores),
            loaded_bytes=sum(each.counters.loaded_bytes for each in self._stores),
            stored_bytes=store.counters.stored_bytes,
            dropped_blocks=writer.counters.dropped_blocks + writer.counters.gone_blocks,
            evicted_blocks=store.counters.evicted_blocks,
            directory_id=_shared_id(store),
            load_bytes_per_s=restorer.load_bytes_per_s or 0.0,
            block_bytes=self._options.column_bytes,
            memory_blocks=0 if memory is None else len(memory),
            memory_bytes=0 if memory is None else memory.own_bytes,
        )


def _shared_id(store: TierStore) -> bytes:
    """Return an id derived from the tier's directory and the blocks' identity: only workers of the same model share it.
    Empty without a directory.
    """
    known = store.directory_id
    return hashlib.sha256(b"baton.tier.directory" + known + store.format.identity).digest()[:16] if known else b""


def open_tier(config: WorkerConfig, prepared: PreparedModel, memory: PoolMemory, on_sums: SumListener) -> KvTier | None:
    """Build the configured tier without starting it. Raises: ModelError if a level is too small for the model."""
    shape = memory.description.shape
    format = SegmentFormat(tier_identity(prepared), shape.block_bytes)
    levels = list[TierStore]()
    if config.kv_tier_memory:
        levels.append(_open_store(MemoryDisk(), config, "kv-tier-memory", config.kv_tier_memory, format))
    if config.kv_tier_dir is not None:
        disk = RealDisk(config.kv_tier_dir)
        levels.append(_open_store(disk, config, "kv-tier-size", config.kv_tier_size, format))
    if not levels:
        return None
    options = RestoreOptions(
        prepared.layout.block_tokens, shape.block_bytes, config.kv_tier_load == "always", prepared.layout.groups
    )
    pool = BlockCopier(memory.storage, shape, memory.copies)
    fastest = levels[0] if config.kv_tier_memory else None
    return KvTier(levels[-1], pool, options, config.transfer_cores, fastest, on_sums)


def _open_store(disk: TierDisk, config: WorkerConfig, flag: str, size_bytes: int, format: SegmentFormat) -> TierStore:
    """Create one level of the tier. Raises: ModelError if `size_bytes` is too small for the model."""
    least = least_bytes(format)
    if size_bytes < least:
        raise ModelError(f"{flag}: {size_bytes} bytes are too few for this model; give at least {least} bytes")
    return TierStore(disk, config.worker_id, format, int(size_bytes))


def tier_identity(prepared: PreparedModel) -> bytes:
    """Return the identity of stored KV, which changes with the weights and with the kernels. A worker reads only KV of
    its own identity.

    The model's fingerprint covers only a sample of the weights, so sizes and times of their files are added. The
    arithmetic is added because KV from files must have the same bits as KV computed here.
    """
    digest = hashlib.sha256(b"baton.tier.v1" + prepared.fingerprint)
    digest.update(f" parts={prepared.options.tensor_parallel} arithmetic={prepared.arithmetic}".encode())
    for path in weight_files(prepared.options.folder):
        status = path.stat()
        digest.update(f" {path.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.digest()
