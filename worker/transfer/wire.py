"""Conversion between values of a KV transfer and its messages."""

from baton.engine.request import EndReason, FirstToken, TokenLogprob
from baton.kvtransfer.description import DeviceMemoryHandle, NixlHandle, PoolDescription, SharedMemoryHandle
from baton.kvtransfer.source import SourceState
from baton.protos import kv_transfer_pb2, versions_pb2
from baton.versions import Versions, announced


def description_to_wire(description: PoolDescription) -> kv_transfer_pb2.PoolDescription:
    handle = description.shared_memory
    shared_memory = (
        None
        if handle is None
        else kv_transfer_pb2.SharedMemoryHandle(
            pid=handle.pid, fd=handle.fd, inode=handle.inode, size_bytes=handle.size_bytes
        )
    )
    return kv_transfer_pb2.PoolDescription(
        fingerprint=description.fingerprint,
        block_bytes=description.block_bytes,
        num_blocks=description.num_blocks,
        host_id=description.host_id,
        pool_id=description.pool_id,
        shared_memory=shared_memory,
        device_memory=[
            kv_transfer_pb2.DeviceMemoryHandle(
                handle=part.handle, offset_bytes=part.offset_bytes, size_bytes=part.size_bytes
            )
            for part in description.device_memory
        ],
        group_backend=description.group_backend,
        parts=description.parts,
        rows=description.rows,
        nixl=_nixl_to_wire(description.nixl),
        tcp_port=description.tcp_port,
        versions=versions_message(description.versions),
        kv=versions_pb2.KvContent(checkpoint=description.checkpoint, layout=description.layout),
    )


def versions_message(versions: Versions) -> versions_pb2.Versions:
    return versions_pb2.Versions(
        release=versions.release, protocol=versions.protocol, oldest_protocol=versions.oldest_protocol
    )


def _nixl_to_wire(nixl: NixlHandle | None) -> kv_transfer_pb2.NixlHandle | None:
    if nixl is None:
        return None
    return kv_transfer_pb2.NixlHandle(
        metadata=nixl.metadata, address=nixl.address, device=nixl.device, memory=nixl.memory
    )


def description_from_wire(wire: kv_transfer_pb2.PoolDescription) -> PoolDescription:
    handle = wire.shared_memory
    shared_memory = SharedMemoryHandle(handle.pid, handle.fd, handle.inode, handle.size_bytes)
    return PoolDescription(
        wire.fingerprint,
        wire.block_bytes,
        wire.num_blocks,
        wire.host_id,
        wire.pool_id,
        shared_memory if wire.HasField("shared_memory") else None,
        tuple(DeviceMemoryHandle(part.handle, part.offset_bytes, part.size_bytes) for part in wire.device_memory),
        wire.group_backend,
        wire.parts or 1,
        wire.rows or 1,
        NixlHandle(wire.nixl.metadata, wire.nixl.address, wire.nixl.device, wire.nixl.memory)
        if wire.HasField("nixl")
        else None,
        wire.tcp_port,
        announced(wire.versions.release, wire.versions.protocol, wire.versions.oldest_protocol),
        wire.kv.checkpoint,
        wire.kv.layout,
    )


def watermark_to_wire(state: SourceState[FirstToken], sent_blocks: int, now: float) -> kv_transfer_pb2.OpenResponse:
    """Build the message with changes since the first `sent_blocks`, at `now` (monotonic seconds)."""
    response = kv_transfer_pb2.OpenResponse(
        watermark_blocks=len(state.blocks),
        blocks=state.blocks[sent_blocks:],
        checksums=[
            kv_transfer_pb2.BlockChecksum(block=logical, value=value)
            for logical, value in state.checksums
            if logical >= sent_blocks
        ],
    )
    if state.first_tokens is not None:
        response.end.first_tokens.extend(map(first_token_to_wire, state.first_tokens))
        response.end.age_ms = 0.0 if state.finished_at is None else (now - state.finished_at) * 1e3
        response.end.SetInParent()
    return response


def first_token_to_wire(first: FirstToken) -> kv_transfer_pb2.FirstToken:
    return kv_transfer_pb2.FirstToken(
        choice=first.choice,
        token_id=first.token_id,
        ended=first.end is not None,
        logprob=first.logprob,
        top_token_ids=[token.token_id for token in first.top],
        top_logprobs=[token.logprob for token in first.top],
    )


def first_token_from_wire(first: kv_transfer_pb2.FirstToken) -> FirstToken:
    """Convert a first token. The reason why a choice ended is not transferred, only that it did."""
    top = tuple(TokenLogprob(*token) for token in zip(first.top_token_ids, first.top_logprobs, strict=False))
    return FirstToken(first.choice, first.token_id, first.logprob, EndReason.STOP if first.ended else None, top)
