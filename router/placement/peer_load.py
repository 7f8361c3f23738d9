"""Load that the other routers put on the workers, and their placements, from the messages they publish. Pure.

Such a message is called a share. Its age is measured from its arrival by this router's clock. If no newer share arrives
for MAX_AGE_S, the other router counts as gone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.versions import OWN, Versions


@dataclass(frozen=True, slots=True)
class KeyUse:
    """Use of an API key at one router."""

    active: int  # number of requests in flight
    requests: int  # number of requests started since the router's start
    tokens: int  # number of tokens charged since the router's start


MAX_AGE_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Sums of a router's charges on one worker."""

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
    """Placement of a prompt whose blocks a worker will soon cache. `number`: index among its router's placements."""

    number: int
    endpoint: str
    block_hashes: tuple[bytes, ...]
    computed_tokens: int = 0  # uncached tokens of the prompt


@dataclass(frozen=True, slots=True)
class Takeover:
    """Notice that stream number `stream` of router `router_id` continues at another router."""

    router_id: bytes
    stream: int


@dataclass(frozen=True, slots=True)
class Share:
    """Message by which one router tells the others its load, new placements and use of API keys."""

    router_id: bytes
    number: int
    loads: Mapping[str, WorkerLoad]  # the sender's load on each worker, by the worker's endpoint
    predictions: Sequence[Prediction]
    takeovers: Sequence[Takeover] = ()
    keys: Mapping[str, KeyUse] = field(default_factory=dict)  # use of API keys with limits, by key name
    address: str = ""  # host:port of the router's public gRPC port
    uptime_s: float = 0.0
    versions: Versions = OWN

    @property
    def tokens(self) -> int:
        """Sum of the router's tokens in flight on all workers."""
        return sum(load.tokens for load in self.loads.values())


@dataclass(slots=True)
class _Other:
    share: Share
    received_s: float
    predictions_taken: int = 0


@dataclass(slots=True)
class PeerRouterLoads:
    """Newest message (`Share`) of each other router. Call `take` with each new message, and `forget_old` regularly."""

    _others: dict[bytes, _Other] = field(default_factory=dict)

    @property
    def routers(self) -> int:
        return len(self._others)

    @property
    def shares(self) -> tuple[Share, ...]:
        """Newest share of each other router."""
        return tuple(other.share for other in self._others.values())

    @property
    def router_ids(self) -> tuple[bytes, ...]:
        return tuple(self._others)

    def take(self, share: Share, now: float) -> Iterator[Prediction]:
        """Record a share, and yield its predictions that earlier shares did not have."""
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
        """Return the sum of all other routers' loads, by the worker's endpoint."""
        total: dict[str, WorkerLoad] = {}
        for other in self._others.values():
            for endpoint, load in other.share.loads.items():
                total[endpoint] = total.get(endpoint, NOTHING).plus(load)
        return total


News = TypeVar("News")


class Announcements(Generic[News]):
    """Items to announce to the other routers. Each item is sent in several messages (shares): a router may miss one.

    The number and size of the items are bounded: in a burst, the oldest items are in fewer messages, or in none.
    """

    def __init__(self, shares: int = 3, most: int = 4096, most_size: int = 0) -> None:
        """Create an empty list.

        `shares`: number of messages in which each item is sent; `most_size`: maximum sum of item sizes.
        """
        self._shares = shares
        self._most, self._most_size = most, most_size
        self._kept: list[tuple[News, int, int]] = []  # item, its size, number of further messages that will contain it
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
        """Return the items for the next message to the other routers, oldest first."""
        announced = tuple(item for item, _, _ in self._kept)
        self._kept = [(item, size, left - 1) for item, size, left in self._kept if left > 1]
        self._size = sum(size for _, size, _ in self._kept)
        return announced


class RecentPredictions:
    """This router's placements that the other routers have yet to learn, numbered from 1."""

    def __init__(self, shares: int = 3, max_blocks: int = 8192, max_predictions: int = 4096) -> None:
        self._next = 1
        self._announced = Announcements[Prediction](shares, max_predictions, max_blocks)

    def add(self, endpoint: str, block_hashes: Sequence[bytes], computed_tokens: int) -> None:
        prediction = Prediction(self._next, endpoint, tuple(block_hashes), computed_tokens)
        self._announced.add(prediction, len(block_hashes))
        self._next += 1

    def take(self) -> tuple[Prediction, ...]:
        """Return the placements for the next message to the other routers, oldest first."""
        return self._announced.take()
