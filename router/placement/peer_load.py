"""Load of the other routers on the workers, and their placements, as their shares report them. Pure.

The age of a share is measured on this router's clock from its arrival. A share that has not changed for MAX_AGE_S
belongs to a router that is gone, and no longer counts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.versions import OWN, Versions


@dataclass(frozen=True, slots=True)
class KeyUse:
    """Use of an API key at one router."""

    active: int  # requests in flight
    requests: int  # started since the router started
    tokens: int  # charged since the router started


MAX_AGE_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Charges of a router's requests on one worker."""

    requests: int = 0
    tokens: int = 0
    blocks: int = 0
    slots: int = 0

    def plus(self, other: "WorkerLoad") -> "WorkerLoad":
        return WorkerLoad(
            self.requests + other.requests,
            self.tokens + other.tokens,
            self.blocks + other.blocks,
            self.slots + other.slots,
        )


NOTHING = WorkerLoad()


@dataclass(frozen=True, slots=True)
class Prediction:
    """Placement of a prompt, whose blocks are or soon will be in a cache. Numbers count within one router."""

    number: int
    endpoint: str
    block_hashes: tuple[bytes, ...]
    computed_tokens: int = 0  # uncached tokens of the prompt


@dataclass(frozen=True, slots=True)
class Takeover:
    """Stream of `router_id`, by its number there, that continues at another router."""

    router_id: bytes
    stream: int


@dataclass(frozen=True, slots=True)
class Share:
    """State that one router shares with the others at one time."""

    router_id: bytes
    number: int
    loads: Mapping[str, WorkerLoad]  # by endpoint
    predictions: Sequence[Prediction]
    takeovers: Sequence[Takeover] = ()
    keys: Mapping[str, KeyUse] = field(default_factory=dict)  # keys with limits, by name
    address: str = ""  # host:port of its public gRPC port
    uptime_s: float = 0.0
    versions: Versions = OWN

    @property
    def tokens(self) -> int:
        """Tokens of the router's dispatched requests."""
        return sum(load.tokens for load in self.loads.values())


@dataclass(slots=True)
class _Other:
    share: Share
    received_s: float
    predictions_taken: int = 0


@dataclass(slots=True)
class PeerRouterLoads:
    """Loads of all other routers. Call `take` with each share, and `forget_old` regularly."""

    _others: dict[bytes, _Other] = field(default_factory=dict)

    @property
    def routers(self) -> int:
        return len(self._others)

    @property
    def shares(self) -> tuple[Share, ...]:
        """Newest share of each router."""
        return tuple(other.share for other in self._others.values())

    @property
    def router_ids(self) -> tuple[bytes, ...]:
        return tuple(self._others)

    def take(self, share: Share, now: float) -> Iterator[Prediction]:
        """Apply a share and yield its new predictions."""
        other = self._others.get(share.router_id)
        if other is None:
            other = self._others[share.router_id] = _Other(share, now)
        elif share.number <= other.share.number:
            return
        other.share, other.received_s = share, now
        for prediction in share.predictions:
            if prediction.number > other.predictions_taken:
                other.predictions_taken = prediction.number
                yield prediction

    def forget_old(self, now: float) -> None:
        for router_id, other in tuple(self._others.items()):
            if now - other.received_s > MAX_AGE_S:
                del self._others[router_id]

    def loads(self) -> dict[str, WorkerLoad]:
        """Return the sum of all loads, by endpoint."""
        total: dict[str, WorkerLoad] = {}
        for other in self._others.values():
            for endpoint, load in other.share.loads.items():
                total[endpoint] = total.get(endpoint, NOTHING).plus(load)
        return total


News = TypeVar("News")


class Announcements(Generic[News]):
    """News for the other routers. Each item goes into a few shares, so that a router may miss one of them.

    Bounded in number and size: under a burst the oldest items are sent less often, or not at all.
    """

    def __init__(self, shares: int = 3, most: int = 4096, most_size: int = 0) -> None:
        """Create an empty list. `most_size`: maximum sum of the sizes."""
        self._shares = shares
        self._most, self._most_size = most, most_size
        self._kept: list[tuple[News, int, int]] = []  # with size and number of remaining shares
        self._size = 0

    def add(self, item: News, size: int = 0) -> None:
        self._kept.append((item, size, self._shares))
        self._size += size
        first = 0
        while self._size > self._most_size or len(self._kept) - first > self._most:
            self._size -= self._kept[first][1]
            first += 1
        del self._kept[:first]

    def take(self) -> tuple[News, ...]:
        """Return the items for one share, oldest first."""
        announced = tuple(item for item, _, _ in self._kept)
        self._kept = [(item, size, left - 1) for item, size, left in self._kept if left > 1]
        self._size = sum(size for _, size, _ in self._kept)
        return announced


class RecentPredictions:
    """Placements of this router to be announced, numbered from 1."""

    def __init__(self, shares: int = 3, max_blocks: int = 8192, max_predictions: int = 4096) -> None:
        self._next = 1
        self._announced = Announcements[Prediction](shares, max_predictions, max_blocks)

    def add(self, endpoint: str, block_hashes: Sequence[bytes], computed_tokens: int) -> None:
        prediction = Prediction(self._next, endpoint, tuple(block_hashes), computed_tokens)
        self._announced.add(prediction, len(block_hashes))
        self._next += 1

    def take(self) -> tuple[Prediction, ...]:
        """Return the predictions for one share, oldest first."""
        return self._announced.take()
