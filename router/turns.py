"""One pass over waiting requests: which is tried next, and which may overtake one that has no room. Pure.

A request that has no room lets smaller ones behind it go first, until they have taken OVERTAKING times what it takes
itself. From then on no request goes before it: the room that running requests free is kept for it. So a large request
holds up small ones for no longer than the workers need to make room for it, and waits for them no longer than for
another of its size.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

from router.fair_queue import Entry, FairQueue
from router.placement import PlacementRequest
from router.worker import Adapter

OVERTAKING = 1.0
LOOK_AHEAD = 64
"""How many entries are searched for one that has room; a full queue is not read from end to end for each answer."""


class Waiting(Protocol):
    """The fields of a waiting request that are needed here."""

    @property
    def request(self) -> PlacementRequest: ...

    overtaken_tokens: int


Item = TypeVar("Item", bound=Waiting)


@dataclass(frozen=True, slots=True)
class _Need:
    fingerprint: bytes
    adapter: Adapter | None
    blocks: int
    choices: int

    def covers(self, other: "_Need") -> bool:
        """Where there was no room for the other one, there is none for this."""
        same = self.fingerprint == other.fingerprint and self.adapter == other.adapter
        return same and self.blocks >= other.blocks and self.choices >= other.choices


class Turns(Generic[Item]):
    """An entry from `next` is then placed, taken out of the queue for another reason, or reported as without room."""

    def __init__(self, queue: FairQueue[Item]) -> None:
        self._queue = queue
        self._held: dict[int, Entry[Item]] = {}  # without room, by number, in the order of their turn
        self._unmet: list[_Need] = []
        self._unserved: set[tuple[bytes, Adapter | None]] = set()

    @property
    def some_without_workers(self) -> bool:
        return bool(self._unserved)

    def next(self) -> Entry[Item] | None:
        for entry in islice(self._queue.order(), LOOK_AHEAD):
            request = entry.item.request
            if (request.fingerprint, request.adapter) in self._unserved:
                continue
            if entry.number not in self._held:
                need = _need(request)
                if not any(need.covers(unmet) for unmet in self._unmet):
                    return entry
                self._held[entry.number] = entry
            if entry.item.overtaken_tokens >= OVERTAKING * entry.tokens:
                return None
        return None

    def without_room(self, entry: Entry[Item]) -> None:
        self._held[entry.number] = entry
        self._unmet.append(_need(entry.item.request))

    def without_workers(self, entry: Entry[Item]) -> None:
        """No worker could take it: it holds up no other request."""
        self._unserved.add((entry.item.request.fingerprint, entry.item.request.adapter))

    def served(self, entry: Entry[Item]) -> None:
        """Those that it went before have been overtaken."""
        for held in self._held.values():
            held.item.overtaken_tokens += entry.tokens


def charged_tokens(request: PlacementRequest, cached_tokens: int) -> int:
    """The tokens that a request is charged: the uncached part of its prompt, and answers of the usual length."""
    return request.prompt_tokens - cached_tokens + request.choices * request.charged_answer_tokens


def _need(request: PlacementRequest) -> _Need:
    return _Need(request.fingerprint, request.adapter, request.charged_blocks, request.choices)
