"""Process groups (NCCL, Gloo) of two workers: rendezvous of the ranks over gRPC, the source's side and the reader's
side.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc

from baton.kvtransfer.description import PoolDescription, check_compatible
from baton.kvtransfer.group_messages import (
    MAX_PROBE_MESSAGES,
    GroupSender,
    GroupTransport,
    MessageLayout,
    blocks_per_message,
)
from baton.kvtransfer.process_group import (
    READER,
    SOURCE,
    GroupOptions,
    GroupStore,
    KeyValues,
    LocalKeyValues,
    ProcessGroup,
)
from baton.kvtransfer.slices import Storage
from baton.kvtransfer.transport import CopyRefused, LinkBroken, PairingRefused, PeerUnreachable
from baton.process.errors import FailedPrecondition, InvalidArgument, Unavailable
from baton.protos import kv_transfer_pb2, kv_transfer_pb2_grpc
from baton.worker.late_results import run_on_thread
from baton.worker.transfer.wire import description_from_wire, description_to_wire

logger = logging.getLogger(__name__)
GROUP_ID_BYTES = 16
MAX_GROUPS = 64
RETRY_S = 0.5
Stub = kv_transfer_pb2_grpc.KvTransferServiceStub
# Statuses with which a source refuses a request for blocks before it sends any block.
REFUSALS = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)
STORE_SLACK_S = 1.0


async def meet(values: KeyValues, rank: int, options: GroupOptions) -> ProcessGroup:
    """Form the group of two ranks, within the group's timeout. Raises: LinkBroken.

    If this is cancelled, a group that is formed afterwards is closed.
    """
    store = GroupStore(values, options.timeout_s)
    return await run_on_thread(partial(ProcessGroup, store, rank, options), ProcessGroup.close)


@dataclass(slots=True, eq=False)
class _Hosted:
    values: LocalKeyValues
    layout: MessageLayout
    sender: GroupSender | None = None  # None: the ranks have not met yet
    broken: asyncio.Event = field(default_factory=asyncio.Event)


class GroupHost:
    """Source's side of all process groups: sends blocks of `storage`, which `description` describes. Lives on the event
    loop.

    Each reader has its own group, in which this worker is rank 0. A group ends when the reader's Join call ends or a
    message fails.
    """

    def __init__(self, description: PoolDescription, storage: Storage, options: GroupOptions) -> None:
        self._description = description
        self._storage = storage
        self._options = options
        self._groups: dict[bytes, _Hosted] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._groups)

    async def join(self, request: kv_transfer_pb2.JoinRequest) -> AsyncGenerator[kv_transfer_pb2.JoinResponse, None]:
        """Answer a reader's Join call, which lasts as long as the group; errors go to the reader."""
        hosted = _Hosted(LocalKeyValues(), self._layout(request))
        self._groups[request.group_id] = hosted
        try:
            yield kv_transfer_pb2.JoinResponse(met=False)
            hosted.sender = await self._meet(hosted)
            yield kv_transfer_pb2.JoinResponse(met=True)
            await hosted.broken.wait()
            raise Unavailable("the process group failed", "GROUP_BROKEN", RETRY_S)
        finally:
            del self._groups[request.group_id]
            hosted.values.close()
            if hosted.sender is not None:
                self._close_soon(hosted.sender)

    async def store(self, request: kv_transfer_pb2.StoreRequest) -> kv_transfer_pb2.StoreResponse:
        values = self._hosted(request.group_id).values
        timeout_s = min(request.timeout_ms / 1e3, self._options.timeout_s)
        response = kv_transfer_pb2.StoreResponse()
        try:
            match request.WhichOneof("what"):
                case "set":
                    values.set(request.set.key, request.set.value)
                case "get":
                    response.value = await asyncio.to_thread(values.get, request.get, timeout_s)
                case "wait":
                    await asyncio.to_thread(values.wait, list(request.wait.keys), timeout_s)
                case "check":
                    response.found = values.check(list(request.check.keys))
                case "add":
                    response.sum = values.add(request.add.key, request.add.amount)
                case "delete":
                    response.found = values.delete(request.delete)
        except LinkBroken as error:
            raise Unavailable(str(error), "GROUP_BROKEN", RETRY_S) from error
        return response

    def send(self, group_id: bytes, first_sequence: int, blocks: Sequence[int]) -> None:
        """Send physical blocks that the reader may read. Raises: FailedPrecondition if the group is broken."""
        try:
            self._sender(group_id).submit(first_sequence, blocks)
        except LinkBroken as error:
            raise FailedPrecondition("first_sequence", str(error)) from error

    def probe(self, group_id: bytes, first_sequence: int, messages: int) -> None:
        if not 0 < messages <= MAX_PROBE_MESSAGES:
            raise InvalidArgument("probe_messages", f"must be from 1 to {MAX_PROBE_MESSAGES}")
        try:
            self._sender(group_id).probe(first_sequence, messages)
        except LinkBroken as error:
            raise FailedPrecondition("first_sequence", str(error)) from error

    async def close(self) -> None:
        """Close every group; its reader receives an error. Takes the groups' timeout at most."""
        for hosted in self._groups.values():
            hosted.broken.set()
            hosted.values.close()
            if hosted.sender is not None:
                self._close_soon(hosted.sender)
                hosted.sender = None
        await asyncio.gather(*self._closing)

    def _layout(self, request: kv_transfer_pb2.JoinRequest) -> MessageLayout:
        if len(request.group_id) != GROUP_ID_BYTES or request.group_id in self._groups:
            raise InvalidArgument("group_id", f"must be {GROUP_ID_BYTES} bytes that no other group uses")
        if request.pool_id != self._description.pool_id:
            raise FailedPrecondition("pool_id", "the pool that the reader paired with is gone")
        if request.backend != self._options.backend:
            raise FailedPrecondition("backend", f"this worker offers {self._options.backend}")
        if len(self._groups) >= MAX_GROUPS:
            raise Unavailable(f"{MAX_GROUPS} groups are open, the maximum", "GROUPS", RETRY_S)
        reader = description_from_wire(request.reader)
        try:
            check_compatible(self._description, reader)
        except PairingRefused as refused:
            raise FailedPrecondition(f"reader.{refused.field}", str(refused)) from refused
        most = blocks_per_message(self._description.shape)
        if not 0 < request.blocks_per_message <= most:
            raise InvalidArgument("blocks_per_message", f"must be from 1 to {most}")
        return MessageLayout(self._description.shape, reader.shape, request.blocks_per_message)

    async def _meet(self, hosted: _Hosted) -> GroupSender:
        try:
            group = await meet(hosted.values, SOURCE, self._options)
        except LinkBroken as error:
            raise Unavailable(f"the process group could not be formed: {error}", "GROUP_BROKEN", RETRY_S) from error
        loop = asyncio.get_running_loop()

        def on_broken(error: BaseException) -> None:
            logger.warning("%s process group failed: %s; its reader pairs again", self._options.backend, error)
            loop.call_soon_threadsafe(hosted.broken.set)

        with ExitStack() as undo:
            undo.callback(group.close)
            make = partial(GroupSender, group, self._storage, hosted.layout, on_broken)
            sender = await run_on_thread(make, GroupSender.close)
            undo.pop_all()
        return sender

    def _hosted(self, group_id: bytes) -> _Hosted:
        hosted = self._groups.get(group_id)
        if hosted is None:
            raise FailedPrecondition("group_id", "the process group does not exist any more")
        return hosted

    def _sender(self, group_id: bytes) -> GroupSender:
        sender = self._hosted(group_id).sender
        if sender is None:
            raise FailedPrecondition("group_id", "the ranks of this group have not met")
        return sender

    def _close_soon(self, sender: GroupSender) -> None:
        task = asyncio.get_running_loop().create_task(asyncio.to_thread(sender.close))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class RemoteKeyValues:
    """A `KeyValues` whose values the source stores. Blocks; called from threads of torch."""

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
            raise LinkBroken(f"rendezvous store of the source failed: {_text(error)}") from error
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
            raise (CopyRefused if refused else LinkBroken)(f"request for blocks failed: {_text(error)}") from error


async def join_group(
    stub: Stub,
    blocking_stub: Stub,
    mine: PoolDescription,
    source: PoolDescription,
    storage: Storage,
    options: GroupOptions,
) -> GroupTransport:
    """Join a group with `source`, for copies into `storage`, which `mine` describes. Raises: PeerUnreachable.

    `stub` belongs to this event loop, `blocking_stub` to other threads.
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
        await _read(call, options.timeout_s)  # arrives when the source's store is ready
        with ExitStack() as undo:
            group = await meet(RemoteKeyValues(blocking_stub, group_id, options.timeout_s), READER, options)
            undo.callback(group.close)
            control = RemoteSender(blocking_stub, group_id, options.timeout_s)
            make = partial(GroupTransport, options.backend, group, control, storage, layout, call.cancel)
            transport = await run_on_thread(make, GroupTransport.lost)
            await _read(call, options.timeout_s)  # arrives when the source has formed the group
            undo.pop_all()
    except (grpc.aio.AioRpcError, LinkBroken, TimeoutError, RuntimeError) as error:  # RuntimeError: by torch or Triton
        call.cancel()
        raise PeerUnreachable(f"{options.backend} group not formed: {_text(error)}") from error
    except asyncio.CancelledError:
        call.cancel()
        raise
    call.add_done_callback(lambda call: transport.lost())
    return transport


async def _read(call: Any, timeout_s: float) -> None:
    """Read one response of the call. Raises: AioRpcError, TimeoutError, LinkBroken."""
    async with asyncio.timeout(timeout_s):
        if await call.read() is grpc.aio.EOF:
            raise LinkBroken("the source closed the group")


def _text(error: BaseException) -> str:
    return (
        f"{error.code().name} {error.details()}" if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else str(error)
    )
