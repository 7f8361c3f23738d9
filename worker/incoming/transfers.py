"""Bounds of all messages between workers about KV transfers."""

import math

from baton.process.wire_bounds import Bounds, anything, blob, entries, number, numbers, size
from baton.text.block_hash import HASH_BYTES
from baton.text.sampling import MAX_CHOICES

TRANSFER_ID_BYTES = POOL_ID_BYTES = GROUP_ID_BYTES = 16
MOST_BLOCKS = 1 << 20  # maximum number of blocks per prompt
MOST_HANDLES = 64  # maximum number of parts of a pool; each part has a handle
MOST_TOP = 1024  # maximum number of alternatives per first token, for many beams and stop tokens
MOST_OPAQUE_BYTES = 1 << 20
MOST_SLOW_DOWN = 1e6

TRANSFERS = Bounds(
    {
        "PoolDescription.pool_id": size(POOL_ID_BYTES),
        "PoolDescription.device_memory": entries(MOST_HANDLES),
        "PoolDescription.tcp_port": number(0, 65_535),
        "DeviceMemoryHandle.handle": blob(256),
        "NixlHandle.metadata": blob(MOST_OPAQUE_BYTES),
        "NixlHandle.address": anything,  # any address in the other process
        "SharedMemoryHandle.inode": anything,
        "KvContent.layout": lambda words: None if len(words) <= 4096 else "at most 4096 characters",
        "OpenRequest.transfer_id": size(TRANSFER_ID_BYTES),
        "OpenRequest.pool_id": size(POOL_ID_BYTES),
        "OpenRequest.block_hashes": entries(MOST_BLOCKS, size(HASH_BYTES)),
        "OpenResponse.blocks": numbers(MOST_BLOCKS),
        "OpenResponse.checksums": entries(MOST_BLOCKS),
        "BlockChecksum.value": anything,
        "TransferEnd.first_tokens": entries(MAX_CHOICES),
        "TransferEnd.age_ms": number(),
        "FirstToken.choice": number(0, MAX_CHOICES - 1),
        "FirstToken.logprob": number(-math.inf, 1.0),
        "FirstToken.top_token_ids": numbers(MOST_TOP),
        "FirstToken.top_logprobs": numbers(MOST_TOP, -math.inf, 1.0),
        "TransferRange.transfer_id": size(TRANSFER_ID_BYTES),
        "TransferBlocks.transfer_id": size(TRANSFER_ID_BYTES),
        "TransferBlocks.blocks": numbers(MOST_BLOCKS),
        "CloseRequest.transfer_id": size(TRANSFER_ID_BYTES),
        "CloseRequest.slow_down": number(0, MOST_SLOW_DOWN),
        "ConfirmRequest.transfer_id": size(TRANSFER_ID_BYTES),
        "JoinRequest.group_id": size(GROUP_ID_BYTES),
        "StoreRequest.group_id": size(GROUP_ID_BYTES),
        "StoreValue.value": blob(MOST_OPAQUE_BYTES),
        "SendRequest.group_id": size(GROUP_ID_BYTES),
    }
)
"""Bounds of requests and responses."""
