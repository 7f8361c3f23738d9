"""Conversion between values of a KV transfer and its messages."""

from dataclasses import asdict, fields
from typing import TypeVar

from google.protobuf.message import Message

from baton.engine.request import EndReason, FirstToken, TokenLogprob
from baton.kvtransfer.description import DeviceMemoryHandle, NixlHandle, PoolDescription, SharedMemoryHandle
from baton.kvtransfer.source import SourceState
from baton.protos import kv_transfer_pb2, versions_pb2
from baton.versions import Versions, announced

Handle = TypeVar("Handle", SharedMemoryHandle, DeviceMemoryHandle, NixlHandle)


def description_to_wire(description: PoolDescription) -> kv_transfer_pb2.PoolDescription:
    """Convert a description. Its fields keep their names, except `checkpoint` and `layout`, which become `kv`."""
    values = asdict(description)
    kv = versions_pb2.KvContent(checkpoint=values.pop("checkpoint"), layout=values.pop("layout"))
    return kv_transfer_pb2.PoolDescription(**values, kv=kv)


def versions_message(versions: Versions) -> versions_pb2.Versions:
    return versions_pb2.Versions(**asdict(versions))


def description_from_wire(wire: kv_transfer_pb2.PoolDescription) -> PoolDescription:
    return PoolDescription(
        wire.fingerprint,
        wire.block_bytes,
        wire.num_blocks,
        wire.host_id,
        wire.pool_id,
        _handle(SharedMemoryHandle, wire.shared_memory) if wire.HasField("shared_memory") else None,
        tuple(_handle(DeviceMemoryHandle, part) for part in wire.device_memory),
        wire.group_backend,
        wire.parts or 1,
        wire.rows or 1,
        _handle(NixlHandle, wire.nixl) if wire.HasField("nixl") else None,
        wire.tcp_port,
        announced(wire.versions.release, wire.versions.protocol, wire.versions.oldest_protocol),
        wire.kv.checkpoint,
        wire.kv.layout,
    )


def _handle(kind: type[Handle], message: Message) -> Handle:
    """Convert a message to a handle of class `kind`, which has the same fields."""
    return kind(**{field.name: getattr(message, field.name) for field in fields(kind)})


def watermark_to_wire(state: SourceState[FirstToken], sent_blocks: int, now: float) -> kv_transfer_pb2.OpenResponse:
    """Build the next watermark for a reader that has received the first `sent_blocks` blocks. `now`: monotonic
    seconds.
    """
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
    """Convert a first token. The message says whether the choice ended, but not why: STOP is assumed."""
    top = tuple(TokenLogprob(*token) for token in zip(first.top_token_ids, first.top_logprobs, strict=False))
    return FirstToken(first.choice, first.token_id, first.logprob, EndReason.STOP if first.ended else None, top)
