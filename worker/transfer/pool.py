"""The memory of a worker's KV pool, where peers of this host may map it read-only if that is wanted and possible."""

import logging
import secrets
from dataclasses import dataclass

import torch

from baton.engine.parallel.wire import RankOptions
from baton.engine.prepare import PreparedModel
from baton.kvtransfer.cuda_ipc import export_pool
from baton.kvtransfer.description import POOL_ID_BYTES, DeviceMemoryHandle, PoolDescription, TransportChoice, host_id
from baton.kvtransfer.nixl_memory import NixlAgent
from baton.kvtransfer.process_group import GroupBackend, GroupOptions, prepare_environment
from baton.kvtransfer.shared_memory import SharedPool, back
from baton.kvtransfer.slices import Storage, parts_of
from baton.kvtransfer.transport import SharedMemoryUnavailable
from baton.worker.transfer.process_groups import GroupHost
from baton.worker.transfer.rank import RANK_MODULE, write_handle

logger = logging.getLogger(__name__)
SHARED: tuple[TransportChoice, ...] = ("auto", "shared_memory")  # choices with which peers may map a pool


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """How KV may leave and come, as configured."""

    choice: TransportChoice
    interface: str | None  # network interface for process groups; None: there will be none
    timeout_s: float  # longest wait for the other rank of a process group


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """Closed by its maker, after the last step."""

    storage: Storage  # on CPU in one piece, on GPUs with each rank's part on its own
    description: PoolDescription  # as peers see it
    shared: SharedPool | None  # None: no other process can map it
    groups: GroupOptions | None  # None: its blocks are not sent over process groups
    nixl: NixlAgent | None  # None: NIXL does not know it
    exported: tuple[DeviceMemoryHandle, ...]  # of each part, for our own ranks; described to peers only where wanted

    @property
    def first_part(self) -> torch.Tensor:
        return parts_of(self.storage, self.description.shape)[0]

    def back(self) -> None:
        """Has the kernel put memory behind it, on a CPU. Blocks for up to a second per GiB."""
        if isinstance(self.storage, torch.Tensor) and self.storage.device.type == "cpu":
            back(self.storage)

    def rank_options(self, nice: int) -> RankOptions:
        """Where the other ranks find their parts, until `seal`."""
        if len(self.exported) > 1:
            return RankOptions(part_handles=tuple(map(write_handle, self.exported)), entry=RANK_MODULE, nice=nice)
        return RankOptions(None if self.shared is None else self.shared.handle.fd, nice=nice)

    def seal(self) -> None:
        """All ranks have mapped their parts. Raises: SharedMemoryUnavailable."""
        if self.shared is not None:
            self.shared.seal()

    def close(self) -> None:
        if self.nixl is not None:
            self.nixl.close()
        if self.shared is not None:
            self.shared.close()


def make_pool(prepared: PreparedModel, transfers: TransferOptions) -> PoolMemory:
    """A pool of zeros, sized for the model, which others may reach in the ways that `transfers.choice` allows.

    Raises: SharedMemoryUnavailable, only where it was insisted on.
    """
    pool_id = secrets.token_bytes(POOL_ID_BYTES)
    shared = _share(prepared, transfers.choice, pool_id)
    storage = _allocate(prepared) if shared is None else shared.tensor
    exported = _exported(storage, transfers.choice)
    groups = _groups(prepared.options.device, transfers)
    nixl = _nixl(storage, pool_id.hex(), transfers)
    description = PoolDescription(
        prepared.fingerprint,
        prepared.layout.block_bytes,
        prepared.total_blocks,
        host_id(),
        pool_id,
        None if shared is None or transfers.choice not in SHARED else shared.handle,
        exported if transfers.choice in ("auto", "cuda_ipc") else (),
        "" if groups is None else groups.backend,
        prepared.options.tensor_parallel,
        2 * prepared.layout.num_layers,
        None if nixl is None else nixl.handle,
        checkpoint=prepared.checkpoint,
        layout=prepared.kv_description,
    )
    return PoolMemory(storage, description, shared, groups, nixl, exported)


def _allocate(prepared: PreparedModel) -> Storage:
    """Zeros."""
    device, ranks = prepared.options.device, prepared.options.tensor_parallel
    if device.type == "cpu" or ranks == 1:
        return torch.zeros(prepared.pool_bytes, dtype=torch.uint8, device=device)
    first = device.index or 0
    parts = tuple(
        torch.zeros(prepared.storage_bytes, dtype=torch.uint8, device=torch.device(device.type, first + rank))
        for rank in range(ranks)
    )
    for part in parts:
        torch.cuda.synchronize(part.device)  # other processes write them, and wait for no stream of ours
    return parts


def _share(prepared: PreparedModel, choice: TransportChoice, pool_id: bytes) -> SharedPool | None:
    needed = prepared.options.tensor_parallel > 1  # the other ranks write their parts of it
    if prepared.options.device.type != "cpu" or (choice not in SHARED and not needed):
        return None
    try:
        return SharedPool.create(prepared.pool_bytes, not needed, pool_id)
    except SharedMemoryUnavailable as error:
        if choice == "shared_memory" or needed:
            raise
        logger.warning("KV of this worker is read over grpc, the slowest transport: %s", error)
        return None


def _exported(storage: Storage, choice: TransportChoice) -> tuple[DeviceMemoryHandle, ...]:
    parts = (storage,) if isinstance(storage, torch.Tensor) else storage
    needed = len(parts) > 1  # the other ranks open theirs
    if parts[0].device.type != "cuda" or (choice not in ("auto", "cuda_ipc") and not needed):
        return ()
    try:
        return tuple(map(export_pool, parts))
    except SharedMemoryUnavailable as error:
        if choice == "cuda_ipc" or needed:
            raise
        logger.warning("cuda_ipc is not available: %s", error)
        return ()


def _groups(device: torch.device, transfers: TransferOptions) -> GroupOptions | None:
    backend: GroupBackend = "nccl" if device.type == "cuda" else "gloo"
    if transfers.interface is None or transfers.choice not in ("auto", backend):
        return None
    prepare_environment(transfers.interface, transfers.timeout_s)
    return GroupOptions(backend, transfers.interface, device, transfers.timeout_s)


def _nixl(storage: Storage, name: str, transfers: TransferOptions) -> NixlAgent | None:
    if transfers.interface is None or transfers.choice not in ("auto", "nixl"):
        return None
    if not isinstance(storage, torch.Tensor):
        if transfers.choice == "nixl":
            raise SharedMemoryUnavailable("nixl: a pool on several GPUs is not registered with it")
        return None
    try:
        return NixlAgent(storage, name, transfers.interface)
    except SharedMemoryUnavailable as error:
        if transfers.choice == "nixl":
            raise
        logger.info("nixl is not available: %s", error)
        return None


def make_host(memory: PoolMemory) -> GroupHost | None:
    return None if memory.groups is None else GroupHost(memory.description, memory.storage, memory.groups)
