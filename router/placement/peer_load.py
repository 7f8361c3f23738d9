"""The other routers' load on the workers and where they have sent prompts, as far as this one knows. Pure.

Ages are measured here, on our own clock, from when a share arrived: one that does not change any more is of a router
that has gone, and counts no longer than MAX_AGE_S.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from baton.versions import OWN, Versions


@dataclass(frozen=True, slots=True)
class KeyUse:
    """Use of a key at one router."""

    active: int  # requests that have begun and not ended
    requests: int  # begun since the router started
    tokens: int  # of prompts and answers, since then


MAX_AGE_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The charges of others on one worker."""

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
    """A prompt's blocks are, or soon will be, in the cache of that worker. Numbers count within one router."""

    number: int
    endpoint: str
    block_hashes: tuple[bytes, ...]
    computed_tokens: int = 0  # of the prompt: tokens that the worker computes for it


@dataclass(frozen=True, slots=True)
class Takeover:
    """A stream of that router, by its number there, continues at another one."""

    router_id: bytes
    stream: int


@dataclass(frozen=True, slots=True)
class Share:
    """Share: one router's state at one time."""

    router_id: bytes
    number: int
    loads: Mapping[str, WorkerLoad]  # by endpoint
    predictions: Sequence[Prediction]
    takeovers: Sequence[Takeover] = ()
    keys: Mapping[str, KeyUse] = field(default_factory=dict)  # with limits, by name
    address: str = ""  # host:port of its public gRPC
    uptime_s: float = 0.0
    versions: Versions = OWN

    @property
    def tokens(self) -> int:
        """Return its load on the workers, counted from dispatch."""
        return sum(load.tokens for load in self.loads.values())


@dataclass(slots=True)
class _Other:
    share: Share
    received_s: float
    predictions_taken: int = 0


@dataclass(slots=True)
class PeerRouterLoads:
    """Loads of all other routers; `take` their shares, `forget_old` regularly."""

    _others: dict[bytes, _Other] = field(default_factory=dict)

    @property
    def routers(self) -> int:
        return len(self._others)

    @property
    def shares(self) -> tuple[Share, ...]:
        """The newest one of each."""
        return tuple(other.share for other in self._others.values())

    @property
    def router_ids(self) -> tuple[bytes, ...]:
        return tuple(self._others)

    def take(self, share: Share, now: float) -> Iterator[Prediction]:
        """Return those of its predictions that are new."""
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
        """Return the load of all others together, by endpoint."""
        total: dict[str, WorkerLoad] = {}
        for other in self._others.values():
            for endpoint, load in other.share.loads.items():
                total[endpoint] = total.get(endpoint, NOTHING).plus(load)
        return total


class RecentPredictions:
    """The predictions to send: each goes into a few shares, so that a router that misses a share misses nothing.

    Bounded in blocks and number: under a burst the oldest are sent less often, or not at all.
    """

    def __init__(self, shares: int = 3, max_blocks: int = 8192, max_predictions: int = 4096) -> None:
        self._shares = shares
        self._max_blocks = max_blocks
        self._max_predictions = max_predictions
        self._next = 1
        self._kept: list[tuple[Prediction, int]] = []  # with how many more shares they go into
        self._blocks = 0

    def add(self, endpoint: str, block_hashes: Sequence[bytes], computed_tokens: int) -> None:
        prediction = Prediction(self._next, endpoint, tuple(block_hashes), computed_tokens)
        self._kept.append((prediction, self._shares))
        self._next += 1
        self._blocks += len(block_hashes)
        first = 0
        while self._blocks > self._max_blocks or len(self._kept) - first > self._max_predictions:
            self._blocks -= len(self._kept[first][0].block_hashes)
            first += 1
        del self._kept[:first]

    def take(self) -> tuple[Prediction, ...]:
        """Return predictions for one share, oldest first."""
        announced = tuple(prediction for prediction, _ in self._kept)
        self._kept = [(prediction, left - 1) for prediction, left in self._kept if left > 1]
        self._blocks = sum(len(prediction.block_hashes) for prediction, _ in self._kept)
        return announced


class RecentTakeovers:
    """The streams that this router resumed, to be announced: each in a few shares. A repeated one changes nothing."""

    def __init__(self, shares: int = 3, most: int = 4096) -> None:
        self._shares = shares
        self._most = most
        self._kept: list[tuple[Takeover, int]] = []  # with how many more shares they go into

    def add(self, takeover: Takeover) -> None:
        self._kept.append((takeover, self._shares))
        del self._kept[: -self._most]

    def take(self) -> tuple[Takeover, ...]:
        """Return takeovers for one share, oldest first."""
        announced = tuple(takeover for takeover, _ in self._kept)
        self._kept = [(takeover, left - 1) for takeover, left in self._kept if left > 1]
        return announced
