"""Process groups on the wire, the source's side: one for each reader that asks to join. Protobuf stops here.

Rank 0 is ours. A group lives as long as the reader's Join, and no longer than the first failure of a message.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from kvtransfer.description import PoolDescription, check_compatible
from kvtransfer.errors import LinkBroken, PairingRefused
from kvtransfer.group_sender import GroupSender
from kvtransfer.group_store import LocalKeyValues
from kvtransfer.group_transport import MAX_PROBE_MESSAGES
from kvtransfer.messages import MessageLayout, blocks_per_message
from kvtransfer.parts import Storage
from kvtransfer.process_group import SOURCE, GroupOptions
from protos import kv_transfer_pb2
from service.errors import FailedPrecondition, InvalidArgument, Unavailable
from worker.group_meeting import meet
from worker.transfer_wire import description_from_wire

logger = logging.getLogger(__name__)
GROUP_ID_BYTES = 16
MAX_GROUPS = 64
RETRY_S = 0.5


@dataclass(slots=True, eq=False)
class _Hosted:
    values: LocalKeyValues
    layout: MessageLayout
    sender: GroupSender | None = None  # None: not met yet
    broken: asyncio.Event = field(default_factory=asyncio.Event)


class GroupHost:
    """Sends blocks of `storage`, which `description` describes. Lives on the event loop."""

    def __init__(self, description: PoolDescription, storage: Storage, options: GroupOptions) -> None:
        self._description = description
        self._storage = storage
        self._options = options
        self._groups: dict[bytes, _Hosted] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._groups)

    async def join(self, request: kv_transfer_pb2.JoinRequest) -> AsyncGenerator[kv_transfer_pb2.JoinResponse, None]:
        """Lasts as long as the group does. Raises the error that the reader gets."""
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
        """Physical blocks, which the reader may read. FAILED_PRECONDITION: the group is of no use any more."""
        try:
            self._sender(group_id).submit(first_sequence, blocks)
        except LinkBroken as error:
            raise FailedPrecondition("first_sequence", str(error)) from error

    def probe(self, group_id: bytes, first_sequence: int, messages: int) -> None:
        if not 0 < messages <= MAX_PROBE_MESSAGES:
            raise InvalidArgument("probe_messages", f"1 to {MAX_PROBE_MESSAGES}")
        try:
            self._sender(group_id).probe(first_sequence, messages)
        except LinkBroken as error:
            raise FailedPrecondition("first_sequence", str(error)) from error

    async def close(self) -> None:
        """Ends every group; their readers get an error. Bounded by the groups' timeout."""
        for hosted in self._groups.values():
            hosted.broken.set()
            hosted.values.close()
            if hosted.sender is not None:
                self._close_soon(hosted.sender)
                hosted.sender = None
        await asyncio.gather(*self._closing)

    def _layout(self, request: kv_transfer_pb2.JoinRequest) -> MessageLayout:
        if len(request.group_id) != GROUP_ID_BYTES or request.group_id in self._groups:
            raise InvalidArgument("group_id", f"must be {GROUP_ID_BYTES} bytes, unused so far")
        if request.pool_id != self._description.pool_id:
            raise FailedPrecondition("pool_id", "the pool that the reader paired with is gone")
        if request.backend != self._options.backend:
            raise FailedPrecondition("backend", f"{self._options.backend} is offered here")
        if len(self._groups) >= MAX_GROUPS:
            raise Unavailable(f"{MAX_GROUPS} groups are open", "GROUPS", RETRY_S)
        reader = description_from_wire(request.reader)
        try:
            check_compatible(self._description, reader)
        except PairingRefused as refused:
            raise FailedPrecondition(f"reader.{refused.field}", str(refused)) from refused
        most = blocks_per_message(self._description.shape)
        if not 0 < request.blocks_per_message <= most:
            raise InvalidArgument("blocks_per_message", f"1 to {most}")
        return MessageLayout(self._description.shape, reader.shape, request.blocks_per_message)

    async def _meet(self, hosted: _Hosted) -> GroupSender:
        try:
            group = await meet(hosted.values, SOURCE, self._options)
        except LinkBroken as error:
            raise Unavailable(f"the process group could not be formed: {error}", "GROUP_BROKEN", RETRY_S) from error
        loop = asyncio.get_running_loop()

        def on_broken(error: BaseException) -> None:
            logger.warning("a %s process group failed: %s", self._options.backend, error)
            loop.call_soon_threadsafe(hosted.broken.set)

        return GroupSender(group, self._storage, hosted.layout, on_broken)

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
