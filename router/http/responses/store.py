"""What is kept of responses, so that a later turn names one in place of its conversation. Bounded, and apart by key.

A record has the whole conversation: an older one may go without harm to a newer one.
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
from baton.process.registry.redis_responses import Bounds
from baton.router.http.edge.problem import Problem
from baton.router.http.responses.items import Item

MAX_RECORD_BYTES = 1 << 20
"""Reading so much JSON holds the event loop for some milliseconds."""
_ITEM_BYTES = 200
_RETRY_S = 1.0


class Records(Protocol):
    """Bytes by owner and id. What is too old, or too much, is gone: the oldest first."""

    async def put(self, owner: str, name: str, record: bytes) -> None:
        """Raises: RegistryUnavailable."""

    async def get(self, owner: str, name: str) -> bytes | None:
        """Raises: RegistryUnavailable."""

    async def delete(self, owner: str, name: str) -> bool:
        """Whether there was one. Raises: RegistryUnavailable."""

    async def close(self) -> None: ...


class MemoryRecords:
    """Those of one process."""

    def __init__(self, bounds: Bounds, clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._clock = clock
        self._records: OrderedDict[tuple[str, str], tuple[float, bytes]] = OrderedDict()  # the oldest first
        self._owners: dict[str, OrderedDict[str, None]] = {}
        self._bytes: dict[str, int] = {}
        self.all_bytes = 0

    async def put(self, owner: str, name: str, record: bytes) -> None:
        self._drop(owner, name)
        self._records[owner, name] = (self._clock() + self._bounds.ttl_s, record)
        self._owners.setdefault(owner, OrderedDict())[name] = None
        self._count(owner, len(record))
        self._expire()
        bounds = self._bounds
        while names := self._owners.get(owner):
            if len(names) <= bounds.per_owner and self._bytes[owner] <= bounds.bytes_per_owner:
                break
            self._drop(owner, next(iter(names)))
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
        """Nothing is open."""

    def _expire(self) -> None:
        now = self._clock()
        while self._records:
            oldest, (until, _) = next(iter(self._records.items()))
            if until > now:
                return
            self._drop(*oldest)

    def _drop(self, owner: str, name: str) -> bool:
        _, record = self._records.pop((owner, name), (0.0, None))
        if record is None:
            return False
        del self._owners[owner][name]
        self._count(owner, -len(record))
        if not self._owners[owner]:
            del self._owners[owner], self._bytes[owner]
        return True

    def _count(self, owner: str, size: int) -> None:
        self._bytes[owner] = self._bytes.get(owner, 0) + size
        self.all_bytes += size


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as its client got it, and the items that it answered: the whole conversation before it."""

    response: dict[str, Any]
    items: Sequence[Item]

    @property
    def conversation(self) -> list[Item]:
        return [*self.items, *self.response["output"]]

    def packed(self) -> bytes:
        return json.dumps({"response": self.response, "items": self.items}, ensure_ascii=False).encode()


class ResponseStore:
    """Responses by tenant. Everything that goes wrong is a Problem."""

    def __init__(self, records: Records, bounds: Bounds) -> None:
        self._records = records
        self.bounds = bounds

    @property
    def keeps(self) -> bool:
        return self.bounds.per_owner > 0

    def refuses(self, items: Sequence[Item]) -> str | None:
        """Why a conversation is not kept; None where it is. Its answer may make the record longer."""
        if not self.keeps:
            return "this server keeps no responses (--responses-per-key 0)"
        if sum(map(_text_bytes, items)) > MAX_RECORD_BYTES:
            return f"a conversation of more than {MAX_RECORD_BYTES >> 20} MiB is not kept"
        return None

    async def put(self, tenant: str, kept: StoredResponse) -> bool:
        """False where it could not be kept: the store does not answer, or it is too long with its answer."""
        record = kept.packed()
        if len(record) > 2 * MAX_RECORD_BYTES:
            return False
        try:
            await self._records.put(_owner(tenant), kept.response["id"], record)
        except RegistryUnavailable:
            return False
        return True

    async def get(self, tenant: str, name: str, param: str | None = None) -> StoredResponse:
        """`param`: the field that names it. Raises: Problem (404, 503)."""
        try:
            record = await self._records.get(_owner(tenant), name) if self.keeps else None
        except RegistryUnavailable as error:
            raise _unavailable() from error
        if record is None:
            raise self._not_found(name, param)
        return StoredResponse(**json.loads(record))

    async def delete(self, tenant: str, name: str) -> None:
        """Raises: Problem (404, 503)."""
        try:
            was_there = self.keeps and await self._records.delete(_owner(tenant), name)
        except RegistryUnavailable as error:
            raise _unavailable() from error
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
            else "this server keeps none"
        )
        message = f"there is no response {name[:64]!r} of this API key; {reason}. Send the conversation as input"
        code = "response_not_found" if param is None else "previous_response_not_found"
        return Problem(HTTPStatus.NOT_FOUND, message, param, code)


def _text_bytes(item: Item) -> int:
    """Its name and its place in a list included."""
    parts = [*item.get("content", ()), *item.get("summary", ())]
    texts = [part["text"] for part in parts] + [item.get(name, "") for name in ("arguments", "output", "name")]
    return _ITEM_BYTES + sum(len(text.encode(errors="replace")) for text in texts)


def _owner(tenant: str) -> str:
    """Of fixed length, and nothing but digits."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:32]


def _unavailable() -> Problem:
    message = "Redis, which keeps the responses, does not answer"
    return Problem(HTTPStatus.SERVICE_UNAVAILABLE, message, code="responses_unavailable", retry_after_s=_RETRY_S)
