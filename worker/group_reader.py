"""Process groups on the wire, the reader's side: asks a source for one, and for messages. Protobuf stops here."""

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from kvtransfer.description import PoolDescription
from kvtransfer.errors import CopyRefused, LinkBroken, PeerUnreachable
from kvtransfer.group_transport import GroupTransport
from kvtransfer.messages import MessageLayout, blocks_per_message
from kvtransfer.parts import Storage
from kvtransfer.process_group import READER, GroupOptions
from protos import kv_transfer_pb2, kv_transfer_pb2_grpc
from worker.group_host import GROUP_ID_BYTES
from worker.group_meeting import meet
from worker.transfer_wire import description_to_wire

Stub = kv_transfer_pb2_grpc.KvTransferServiceStub
REFUSALS = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)  # before anything was sent
STORE_SLACK_S = 1.0


class RemoteKeyValues:
    """A `KeyValues` that the source keeps. Blocks; called from threads of torch."""

    def __init__(self, stub: Stub, group_id: bytes, timeout_s: float) -> None:
        self._stub = stub
        self._group_id = group_id
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes) -> None:
        self._ask(self._timeout_s, set=kv_transfer_pb2.StoreValue(key=key, value=value))

    def get(self, key: str, timeout_s: float) -> bytes:
        return self._ask(timeout_s, get=key).value

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        self._ask(timeout_s, wait=kv_transfer_pb2.StoreKeys(keys=keys))

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(self._timeout_s, check=kv_transfer_pb2.StoreKeys(keys=keys)).found

    def add(self, key: str, amount: int) -> int:
        return self._ask(self._timeout_s, add=kv_transfer_pb2.StoreAddition(key=key, amount=amount)).sum

    def delete(self, key: str) -> bool:
        return self._ask(self._timeout_s, delete=key).found

    def _ask(self, timeout_s: float, **what: Any) -> kv_transfer_pb2.StoreResponse:
        request = kv_transfer_pb2.StoreRequest(group_id=self._group_id, timeout_ms=int(timeout_s * 1e3), **what)
        try:
            response: kv_transfer_pb2.StoreResponse = self._stub.Store(request, timeout=timeout_s + STORE_SLACK_S)
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed
            raise LinkBroken(f"the source's store: {_text(error)}") from error
        return response


class RemoteSender:
    """A `SendControl` over gRPC. Blocks."""

    def __init__(self, stub: Stub, group_id: bytes, timeout_s: float) -> None:
        self._stub = stub
        self._group_id = group_id
        self._timeout_s = timeout_s

    def send(self, first_sequence: int, transfer_id: bytes, blocks: Sequence[int]) -> None:
        wanted = kv_transfer_pb2.TransferBlocks(transfer_id=transfer_id, blocks=blocks)
        self._ask(first_sequence, blocks=wanted)

    def probe(self, first_sequence: int, messages: int) -> None:
        self._ask(first_sequence, probe_messages=messages)

    def _ask(self, first_sequence: int, **what: Any) -> None:
        request = kv_transfer_pb2.SendRequest(group_id=self._group_id, first_sequence=first_sequence, **what)
        try:
            self._stub.Send(request, timeout=self._timeout_s)
        except (grpc.RpcError, ValueError) as error:
            refused = isinstance(error, grpc.Call) and error.code() in REFUSALS
            raise (CopyRefused if refused else LinkBroken)(f"asking for blocks: {_text(error)}") from error


async def join_group(
    stub: Stub,
    blocking_stub: Stub,
    mine: PoolDescription,
    source: PoolDescription,
    storage: Storage,
    options: GroupOptions,
) -> GroupTransport:
    """Blocks of `source` will land in `storage`, which `mine` describes. Raises: PeerUnreachable.

    `stub` belongs to this event loop, `blocking_stub` is for other threads.
    """
    group_id = secrets.token_bytes(GROUP_ID_BYTES)
    layout = MessageLayout(source.shape, mine.shape, blocks_per_message(source.shape))
    call = stub.Join(
        kv_transfer_pb2.JoinRequest(
            group_id=group_id,
            pool_id=source.pool_id,
            reader=description_to_wire(replace(mine, shared_memory=None, device_memory=(), nixl=None)),
            backend=options.backend,
            blocks_per_message=layout.blocks_per_message,
        )
    )
    try:
        await _read(call, options.timeout_s)  # its store answers
        with ExitStack() as undo:
            group = await meet(RemoteKeyValues(blocking_stub, group_id, options.timeout_s), READER, options)
            undo.callback(group.close)
            await _read(call, options.timeout_s)  # it has us
            undo.pop_all()
    except (grpc.aio.AioRpcError, LinkBroken, TimeoutError) as error:
        call.cancel()
        raise PeerUnreachable(f"no group by {options.backend}: {_text(error)}") from error
    except asyncio.CancelledError:
        call.cancel()
        raise
    control = RemoteSender(blocking_stub, group_id, options.timeout_s)
    transport = GroupTransport(options.backend, group, control, storage, layout, call.cancel)
    call.add_done_callback(partial(_lost, transport))
    return transport


async def _read(call: Any, timeout_s: float) -> None:
    """Raises: AioRpcError, TimeoutError, LinkBroken."""
    async with asyncio.timeout(timeout_s):
        if await call.read() is grpc.aio.EOF:
            raise LinkBroken("the source ended the group")


def _lost(transport: GroupTransport, call: object) -> None:
    transport.lost()


def _text(error: BaseException) -> str:
    return (
        f"{error.code().name} {error.details()}" if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else str(error)
    )
