"""The tier of a worker process, whatever its role: files, threads, and what it reports."""

import asyncio
import hashlib
import resource
from pathlib import Path

from baton.engine.config.model_config import ModelError
from baton.engine.prepare import PreparedModel
from baton.engine.weights.files import weight_files
from baton.kvtransfer.tier.files import RealDisk
from baton.kvtransfer.tier.loader import TierLoader
from baton.kvtransfer.tier.records import SegmentFormat
from baton.kvtransfer.tier.staging import PoolBlocks
from baton.kvtransfer.tier.store import TierStore, least_bytes
from baton.service.worker_config import WorkerConfig
from baton.worker.tier.restorer import EngineView, RestoreOptions, TierRestorer
from baton.worker.tier.state import TierState
from baton.worker.tier.writer import Blocks, SumListener, TierWriter
from baton.worker.transfer.pool import PoolMemory

OPEN_TIMEOUT_S = 10.0  # a larger tier is searched on while the worker serves
FLUSH_S = 5.0
CLOSE_S = 1.0
MOST_OPEN_FILES = 65_536


class KvTier:
    """Made on the event loop, after the pool and before the engine; closed after both are done with."""

    def __init__(
        self, store: TierStore, pool: PoolBlocks, options: RestoreOptions, cores: frozenset[int] | None = None
    ) -> None:
        """`cores`: where its threads run; None: anywhere."""
        self._store = store
        self._writer = TierWriter(store, pool, cores)
        self._loader = TierLoader(store, pool, cores)
        self.restorer = TierRestorer(store, self._loader, options, cores)

    def start(self) -> None:
        """Begins to look what the files have."""
        self._writer.start()

    async def opened(self) -> None:
        """What the files have is known; or it is not for now, or takes longer than a start may wait."""
        await asyncio.to_thread(self._writer.opened.wait, OPEN_TIMEOUT_S)

    def attach(self, engine: EngineView, settle_s: float) -> None:
        """`settle_s`: see `TierWriter.attach`."""
        self._writer.attach(Blocks(engine.loop.watch_each, engine.loop.unwatch), settle_s)
        self.restorer.attach(engine)

    def tell_sums(self, listener: SumListener) -> None:
        """See `TierWriter.on_sums`."""
        self._writer.on_sums = listener

    def offer(self, names: tuple[bytes, ...]) -> None:
        """They are in the pool's cache from now on."""
        self._writer.offer(names)

    async def detach(self) -> None:
        """The engine is about to end: what it has published is written, within bounds."""
        await self.restorer.detach()
        await asyncio.to_thread(self._writer.detach, FLUSH_S)

    async def close(self) -> None:
        await asyncio.to_thread(self._writer.close, CLOSE_S)
        self.restorer.close()
        await asyncio.to_thread(self._loader.close)

    @property
    def state(self) -> TierState:
        store, writer, restorer = self._store, self._writer, self.restorer
        return TierState(
            blocks=len(store),
            size_bytes=store.own_bytes,
            reads=restorer.health.is_on and store.is_open,
            writes=writer.health.is_on and store.is_open,
            queried_blocks=restorer.counters.queried_blocks,
            hit_blocks=restorer.counters.hit_blocks,
            corrupt_blocks=store.counters.corrupt_blocks,
            loaded_bytes=store.counters.loaded_bytes,
            stored_bytes=store.counters.stored_bytes,
            dropped_blocks=writer.counters.dropped_blocks + writer.counters.gone_blocks,
            evicted_blocks=store.counters.evicted_blocks,
        )


def open_tier(directory: Path, config: WorkerConfig, prepared: PreparedModel, memory: PoolMemory) -> KvTier:
    """The one that `config` asks for, not started. Raises: ModelError where --kv-tier-size is too small."""
    allow_open_files()
    shape = memory.description.shape
    format = SegmentFormat(tier_identity(prepared), shape.block_bytes)
    size_bytes, least = int(config.kv_tier_size), least_bytes(format)
    if size_bytes < least:
        raise ModelError(f"kv-tier-size is {size_bytes}; with this model it is at least {least} bytes")
    store = TierStore(RealDisk(directory), config.worker_id, format, size_bytes)
    options = RestoreOptions(config.block_size, shape.block_bytes, config.kv_tier_load == "always")
    return KvTier(store, PoolBlocks(memory.storage, shape), options, config.transfer_cores)


def allow_open_files() -> None:
    """Each segment of each worker of the directory is an open file: 64 and more for each, where 1024 is a usual limit.

    The connections of this process would be the first to fail for it. Raises no limit that the system has set.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def tier_identity(prepared: PreparedModel) -> bytes:
    """Of KV that outlives the process, and so may meet edited weights and other kernels than those that computed it.

    The fingerprint takes samples of the weights, which their times make up for. It leaves out by which arithmetic KV
    was rounded: KV from files has the same bits as KV that is computed here.
    """
    digest = hashlib.sha256(b"baton.tier.v1" + prepared.fingerprint)
    digest.update(f" parts={prepared.options.tensor_parallel} arithmetic={prepared.arithmetic}".encode())
    for path in weight_files(prepared.options.folder):
        status = path.stat()
        digest.update(f" {path.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.digest()
