"""Bounded store of responses by API key. A later turn can name a response instead of sending the conversation.

Each record has the complete conversation, so a newer record stays usable after an older one is evicted.
"""

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

from baton.process.registry.redis_registry import RegistryUnavailable
from baton.process.registry.redis_responses import ResponseBounds
from baton.router.http.edge.problem import Problem, retry_later
from baton.router.http.responses.items import Item

MAX_RECORD_BYTES = 1 << 20
"""Maximum size of a conversation, in bytes: parsing its JSON blocks the event loop for some milliseconds."""
_ITEM_BYTES = 200
_NO_ANSWER = "Redis, which stores the responses, does not answer"


class Records(Protocol):
    """Storage of records by owner and id (`name`). Evicts expired records, and above the bounds also the oldest."""

    async def put(self, owner: str, name: str, record: bytes) -> None:
        """Store a record under the owner and id. Raises: RegistryUnavailable."""

    async def get(self, owner: str, name: str) -> bytes | None:
        """Return a record; None if it is unknown or expired. Raises: RegistryUnavailable."""

    async def delete(self, owner: str, name: str) -> bool:
        """Delete a record, and return whether it existed. Raises: RegistryUnavailable."""

    async def close(self) -> None: ...


class MemoryRecords:
    """Storage of records in this process's memory."""

    def __init__(self, bounds: ResponseBounds, clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._clock = clock
        self._records: OrderedDict[tuple[str, str], tuple[float, bytes]] = OrderedDict()  # (expiry, record)
        self._sizes: dict[str, OrderedDict[str, int]] = {}  # bytes per record, oldest first
        self.all_bytes = 0

    async def put(self, owner: str, name: str, record: bytes) -> None:
        self._drop(owner, name)
        self._records[owner, name] = (self._clock() + self._bounds.ttl_s, record)
        self._sizes.setdefault(owner, OrderedDict())[name] = len(record)
        self.all_bytes += len(record)
        self._expire()
        bounds = self._bounds
        while sizes := self._sizes.get(owner):
            if len(sizes) <= bounds.per_owner and sum(sizes.values()) <= bounds.bytes_per_owner:
                break
            self._drop(owner, next(iter(sizes)))
        while self.all_bytes > bounds.all_bytes:
            self._drop(*next(iter(self._records)))

    async def get(self, owner: str, name: str) -> bytes | None:
        self._expire()
        _, record = self._records.get((owner, name), (0.0, None))
        return record

    async def delete(self, owner: str, name: str) -> bool:
        self._expire()
        return self._drop(owner, name)

    async def close(self) -> None:
        """Do nothing, since records in memory need no cleanup."""

    def _expire(self) -> None:
        now = self._clock()
        while self._records:
            oldest, (until, _) = next(iter(self._records.items()))
            if until > now:
                return
            self._drop(*oldest)

    def _drop(self, owner: str, name: str) -> bool:
        if self._records.pop((owner, name), None) is None:
            return False
        self.all_bytes -= self._sizes[owner].pop(name)
        if not self._sizes[owner]:
            del self._sizes[owner]
        return True


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response. `items`: the answered conversation, including the newest input."""

    response: dict[str, Any]
    items: Sequence[Item]

    @property
    def conversation(self) -> list[Item]:
        return [*self.items, *self.response["output"]]

    def packed(self) -> bytes:
        return json.dumps({"response": self.response, "items": self.items}, ensure_ascii=False).encode()


class ResponseStore:
    """Store of responses by tenant. Its errors are raised as Problem."""

    def __init__(self, records: Records, bounds: ResponseBounds) -> None:
        self._records = records
        self.bounds = bounds

    @property
    def keeps(self) -> bool:
        return self.bounds.per_owner > 0

    def refuses(self, items: Sequence[Item]) -> str | None:
        """Return why a conversation cannot be stored; None: it can be stored. The size excludes the answer."""
        if not self.keeps:
            return "this server stores no responses (--responses-per-key 0); set store to false"
        if sum(map(_text_bytes, items)) > MAX_RECORD_BYTES:
            return f"the conversation exceeds {MAX_RECORD_BYTES >> 20} MiB and cannot be stored; set store to false"
        return None

    async def put(self, tenant: str, kept: StoredResponse) -> bool:
        """Store a response. Return False if it is too long or Redis does not answer."""
        record = kept.packed()
        if len(record) > 2 * MAX_RECORD_BYTES:
            return False
        try:
            await self._records.put(owner_of(tenant), kept.response["id"], record)
        except RegistryUnavailable:
            return False
        return True

    async def get(self, tenant: str, name: str, param: str | None = None) -> StoredResponse:
        """Return a response. `param`: body field with the id; None: the path has it. Raises: Problem (404, 503)."""
        try:
            record = await self._records.get(owner_of(tenant), name) if self.keeps else None
        except RegistryUnavailable as error:
            raise retry_later(_NO_ANSWER, "responses_unavailable") from error
        if record is None:
            raise self._not_found(name, param)
        return StoredResponse(**json.loads(record))

    async def delete(self, tenant: str, name: str) -> None:
        """Delete a response. Raises: Problem (404, 503)."""
        try:
            was_there = self.keeps and await self._records.delete(owner_of(tenant), name)
        except RegistryUnavailable as error:
            raise retry_later(_NO_ANSWER, "responses_unavailable") from error
        if not was_there:
            raise self._not_found(name, None)

    async def close(self) -> None:
        await self._records.close()

    def _not_found(self, name: str, param: str | None) -> Problem:
        bounds = self.bounds
        reason = (
            f"responses are kept for {bounds.ttl_s:g} s, the newest {bounds.per_owner} of an API key with at most "
            f"{bounds.bytes_per_owner} bytes, and not with store: false"
            if self.keeps
            else "this server stores none (--responses-per-key 0)"
        )
        message = f"unknown response {name[:64]!r} of this API key; {reason}. Send the conversation as input"
        code = "response_not_found" if param is None else "previous_response_not_found"
        return Problem(HTTPStatus.NOT_FOUND, message, param, code)


def _text_bytes(item: Item) -> int:
    """Return the approximate size of an item's JSON, in bytes."""
    parts = [*item.get("content", ()), *item.get("summary", ())]
    texts = [part["text"] for part in parts] + [
        item.get(name, "") for name in ("arguments", "output", "name", "encrypted_content")
    ]
    return _ITEM_BYTES + sum(len(text.encode(errors="replace")) for text in texts)


def owner_of(tenant: str) -> str:
    """Return the owner of a tenant's records: a digest of the tenant, as 32 hexadecimal digits."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:32]
