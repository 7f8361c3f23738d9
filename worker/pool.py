"""The memory of a worker's KV pool, where peers of this host may map it read-only if that is wanted and possible."""

import logging
import secrets
from dataclasses import dataclass

import torch

from engine.prepare import PreparedModel
from kvtransfer.description import POOL_ID_BYTES, PoolDescription, host_id
from kvtransfer.errors import SharedMemoryUnavailable
from kvtransfer.memory import SharedPool
from worker.peers import TransportChoice

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """To be closed by whoever made it, after the last step."""

    storage: torch.Tensor  # uint8, [blocks * block_bytes]
    description: PoolDescription  # what peers are told of it
    shared: SharedPool | None  # None: no other process can map it

    def close(self) -> None:
        if self.shared is not None:
            self.shared.close()


def make_pool(prepared: PreparedModel, transport: TransportChoice) -> PoolMemory:
    """A pool of zeros, sized for the model. `transport`: "grpc" keeps it private, "shared_memory" insists.

    Raises: SharedMemoryUnavailable, only where it was insisted on.
    """
    shared = _share(prepared, transport)
    storage = (
        torch.zeros(prepared.pool_bytes, dtype=torch.uint8, device=prepared.options.device)
        if shared is None
        else shared.tensor
    )
    description = PoolDescription(
        prepared.fingerprint,
        prepared.layout.block_bytes,
        prepared.total_blocks,
        host_id(),
        secrets.token_bytes(POOL_ID_BYTES),
        None if shared is None else shared.handle,
    )
    return PoolMemory(storage, description, shared)


def _share(prepared: PreparedModel, transport: TransportChoice) -> SharedPool | None:
    if prepared.options.device.type != "cpu" or transport == "grpc":
        return None
    try:
        return SharedPool.create(prepared.pool_bytes)
    except SharedMemoryUnavailable as error:
        if transport == "shared_memory":
            raise
        logger.warning("KV will leave over grpc, the slow way: %s", error)
        return None
