"""Memory of a worker's KV pool, and the transports over which peers may read it."""

import logging
import secrets
import sys
from dataclasses import dataclass

import torch

from baton.engine.on_device import made_on, mib
from baton.engine.parallel.wire import RankOptions
from baton.engine.prepare import PreparedModel
from baton.kvtransfer.cuda_ipc import export_pool
from baton.kvtransfer.description import POOL_ID_BYTES, DeviceMemoryHandle, PoolDescription, TransportChoice, host_id
from baton.kvtransfer.nixl_memory import NixlAgent
from baton.kvtransfer.process_group import GroupBackend, GroupOptions, prepare_environment
from baton.kvtransfer.shared_memory import SharedPool, back
from baton.kvtransfer.slices import PoolShape, Storage, parts_of
from baton.kvtransfer.tcp.server import TcpServer, listen
from baton.kvtransfer.transport import SharedMemoryUnavailable
from baton.process.security.tls import TlsError
from baton.worker.config import WorkerConfig
from baton.worker.transfer.process_groups import GroupHost
from baton.worker.transfer.rank import RANK_MODULE, write_handle
from baton.worker.transfer.tcp_links import secure_accepted

logger = logging.getLogger(__name__)
SHARED: tuple[TransportChoice, ...] = ("auto", "shared_memory")  # --transport values that let peers map the pool


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """Memory of a KV pool, and the transports over which other workers read it. Its creator closes it after the last
    step.
    """

    storage: Storage  # CPU: one tensor; GPUs: one per rank, or only the first if `copies` has the others
    description: PoolDescription  # size, layout and handles of the pool, sent to peers
    shared: SharedPool | None  # None: other processes cannot map the pool
    groups: GroupOptions | None  # None: no process groups
    nixl: NixlAgent | None  # None: not registered with NIXL
    exported: tuple[DeviceMemoryHandle, ...]  # handle of each part, for the other ranks and for peers
    tcp: TcpServer | None = None  # None: no TCP server
    copies: tuple[torch.Tensor, ...] = ()  # complete copies of `storage` on other ranks

    @property
    def first_part(self) -> torch.Tensor:
        return parts_of(self.storage, self.description.shape)[0]

    def back(self) -> None:
        """Make the kernel back a pool in CPU memory with pages before its first use. Blocks for up to 1 s per GiB."""
        for part in (self.storage, *self.copies):
            if isinstance(part, torch.Tensor) and part.device.type == "cpu":
                back(part)

    def rank_options(self, nice: int) -> RankOptions:
        """Return the options by which the other ranks find their parts of the pool; valid until `seal`."""
        if len(self.exported) > 1:
            return RankOptions(part_handles=tuple(map(write_handle, self.exported)), entry=RANK_MODULE, nice=nice)
        return RankOptions(None if self.shared is None else self.shared.handle.fd, nice=nice)

    def seal(self) -> None:
        """Seal the pool after all ranks have mapped their parts. Raises: SharedMemoryUnavailable."""
        if self.shared is not None:
            self.shared.seal()

    def close(self) -> None:
        if self.tcp is not None:
            self.tcp.close()
        if self.nixl is not None:
            self.nixl.close()
        if self.shared is not None:
            self.shared.close()


def prepare_groups(config: WorkerConfig) -> None:
    """Set the environment variables of NCCL, which reads them once. Call it before NCCL is first used."""
    groups = _groups(torch.device(config.device), config)
    if groups is not None and groups.backend == "nccl":
        prepare_environment(groups.interface, groups.timeout_s)


def make_pool(prepared: PreparedModel, config: WorkerConfig) -> PoolMemory:
    """Allocate a zeroed pool for the model, readable over the transports that `--transport` allows.

    Call it after `prepare_groups`. Raises: SharedMemoryUnavailable if a required transport is not available;
    ModelError; TlsError.
    """
    pool_id = secrets.token_bytes(POOL_ID_BYTES)
    shared = _share(prepared, config.transport, pool_id)
    whole = _allocate(prepared) if shared is None else shared.tensor
    exported = _exported(whole, config.transport)
    storage, copies = _copies_apart(whole, prepared)
    parts = prepared.options.tensor_parallel // prepared.copies
    groups = _groups(prepared.options.device, config)
    nixl = _nixl(storage, pool_id.hex(), config)
    shape = PoolShape(prepared.total_blocks, prepared.layout.block_bytes, prepared.layout.rows, parts)
    tcp = _serve_tcp(storage, shape, pool_id, config)
    description = PoolDescription(
        prepared.fingerprint,
        shape.block_bytes,
        shape.num_blocks,
        host_id(),
        pool_id,
        None if shared is None or config.transport not in SHARED else shared.handle,
        exported[:parts] if config.transport in ("auto", "cuda_ipc") else (),
        "" if groups is None else groups.backend,
        shape.parts,
        shape.rows,
        None if nixl is None else nixl.handle,
        0 if tcp is None else tcp.port,
        checkpoint=prepared.checkpoint,
        layout=prepared.kv_description,
    )
    return PoolMemory(storage, description, shared, groups, nixl, exported, tcp, copies)


def _copies_apart(whole: Storage, prepared: PreparedModel) -> tuple[Storage, tuple[torch.Tensor, ...]]:
    """Split the memory of all ranks into the pool and its copies."""
    if prepared.copies == 1:
        return whole, ()
    block_bytes = prepared.copies * prepared.layout.block_bytes
    first, *others = parts_of(whole, PoolShape(prepared.total_blocks, block_bytes, parts=prepared.copies))
    return first, tuple(others)


def _allocate(prepared: PreparedModel) -> Storage:
    """Allocate zeroed memory for the pool on every rank's device. Raises: ModelError."""
    device, ranks = prepared.options.device, prepared.options.tensor_parallel
    if device.type == "cpu" or ranks == 1:
        return _zeros(prepared.pool_bytes, device)
    first = device.index or 0
    devices = [torch.device(device.type, first + rank) for rank in range(ranks)]
    return tuple(_zeros(prepared.storage_bytes, each) for each in devices)


def _zeros(size_bytes: int, device: torch.device) -> torch.Tensor:
    with made_on(device, f"a KV pool of {mib(size_bytes)}"):
        return torch.zeros(size_bytes, dtype=torch.uint8, device=device)


def _share(prepared: PreparedModel, choice: TransportChoice, pool_id: bytes) -> SharedPool | None:
    needed = prepared.options.tensor_parallel > 1  # True if other ranks must map the pool, to write their parts
    if prepared.options.device.type != "cpu" or (choice not in SHARED and not needed):
        return None
    try:
        return SharedPool.create(prepared.pool_bytes, not needed, pool_id)
    except SharedMemoryUnavailable as error:
        if choice == "shared_memory" or needed:
            raise
        logger.warning("peers read KV of this worker over grpc, the slowest transport: %s", error)
        return None


def _exported(storage: Storage, choice: TransportChoice) -> tuple[DeviceMemoryHandle, ...]:
    parts = (storage,) if isinstance(storage, torch.Tensor) else storage
    needed = len(parts) > 1  # True if other ranks must open their parts of the pool
    if parts[0].device.type != "cuda" or (choice not in ("auto", "cuda_ipc") and not needed):
        return ()
    try:
        return tuple(map(export_pool, parts))
    except SharedMemoryUnavailable as error:
        if choice == "cuda_ipc" or needed:
            raise
        logger.warning("cuda_ipc is not available to peers: %s", error)
        return ()


def _groups(device: torch.device, config: WorkerConfig) -> GroupOptions | None:
    backend: GroupBackend = "nccl" if device.type == "cuda" else "gloo"
    if config.transfer_interface is None or config.transport not in ("auto", backend):
        return None
    return GroupOptions(backend, config.transfer_interface, device, config.pair_timeout_s)


def _nixl(storage: Storage, name: str, config: WorkerConfig) -> NixlAgent | None:
    if config.transfer_interface is None or config.transport not in ("auto", "nixl"):
        return None
    if not isinstance(storage, torch.Tensor):
        if config.transport == "nixl":
            raise SharedMemoryUnavailable("nixl: pools on several GPUs are not supported")
        return None
    try:
        return NixlAgent(storage, name, config.transfer_interface)
    except SharedMemoryUnavailable as error:
        if config.transport == "nixl":
            raise
        logger.info("nixl is not available: %s", error)
        return None


def _serve_tcp(storage: Storage, shape: PoolShape, pool_id: bytes, config: WorkerConfig) -> TcpServer | None:
    if config.transport not in ("auto", "tcp") or not isinstance(storage, torch.Tensor) or storage.is_cuda:
        return None
    try:
        if sys.platform != "linux":
            raise SharedMemoryUnavailable("KV over tcp needs Linux")
        listener = listen(config.host, config.transfer_port)
    except SharedMemoryUnavailable as error:
        if config.transport == "tcp" or config.transfer_port:
            raise
        logger.warning("peers do not read KV of this worker over tcp: %s", error)
        return None
    try:
        return TcpServer(listener, storage, shape, pool_id, secure_accepted(config.internal_tls), config.transfer_cores)
    except TlsError:
        listener.close()
        raise


def make_host(memory: PoolMemory) -> GroupHost | None:
    return None if memory.groups is None else GroupHost(memory.description, memory.storage, memory.groups)
