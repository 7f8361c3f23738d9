"""Exchange of records between routers through Redis: load on workers, placements, and use of API keys.

Each router writes its record, called share, every PERIOD_S and reads the records of the other routers. All routers know
a change within two periods and a round trip (0.25 s). Without Redis, each router knows only its own state.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from google.protobuf.message import DecodeError

from baton.process.registry.redis_registry import RegistryUnavailable
from baton.process.telemetry.logs import SeldomLog
from baton.process.wire_bounds import Bounds, OutOfBounds, blob, entries
from baton.protos import replica_pb2
from baton.router.admission.key_limits import KeyMeters
from baton.router.fleet.wire import versions_message, versions_of
from baton.router.placement.cluster import Cluster
from baton.router.placement.peer_load import (
    Announcements,
    KeyUse,
    PeerRouterLoads,
    Prediction,
    Share,
    Takeover,
    WorkerLoad,
)

logger = logging.getLogger(__name__)
PERIOD_S = 0.1
HASH_BYTES = 32
_UNREACHABLE_PAUSE_S = 0.5  # retry interval while Redis does not answer


_BOUNDS = Bounds(
    {
        "SharedPrediction.block_hashes": blob(1 << 20),
        "RouterShare.predictions": entries(1 << 13),
        "RouterShare.takeovers": entries(1 << 13),
        "RouterShare.loads": entries(1 << 16),
        "RouterShare.keys": entries(1 << 16),
    }
)


class Taken(NamedTuple):
    """Increase of an API key's use at another router between its last two records. `tenant`: name of the key."""

    tenant: str
    requests: int
    tokens: int


class SharedLimits:
    """Use of API keys at the other routers. Pure state.

    Each router shares its totals since its start, and their increase is charged here. Requests that start at several
    routers within one period may exceed a key's limit; an excess of requests or tokens per minute becomes a debt.
    """

    def __init__(self) -> None:
        self._received: dict[bytes, dict[str, KeyUse]] = {}

    def take(self, router_id: bytes, uses: Mapping[str, KeyUse]) -> Iterator[Taken]:
        """Yield the increases of key use since a router's last record; none for its first record."""
        known = self._received.get(router_id)
        self._received[router_id] = dict(uses)
        if known is None:
            return
        for tenant, use in uses.items():
            before = known.get(tenant, KeyUse(0, 0, 0))
            if use.requests > before.requests or use.tokens > before.tokens:
                yield Taken(tenant, use.requests - before.requests, use.tokens - before.tokens)

    def keep(self, routers: Iterable[bytes]) -> None:
        """Forget all routers except `routers`."""
        received = set(routers)
        for router_id in self._received.keys() - received:
            del self._received[router_id]

    def active(self) -> dict[str, int]:
        """Return, by API key, the number of active requests at all other routers."""
        total: dict[str, int] = {}
        for uses in self._received.values():
            for tenant, use in uses.items():
                total[tenant] = total.get(tenant, 0) + use.active
        return total


class ShareStore(Protocol):
    async def exchange(self, share: bytes) -> tuple[bytes, ...]:
        """Write this router's record (share) and return the other routers' records. Raises: RegistryUnavailable."""

    async def close(self) -> None: ...


class PeerRouters:
    """Exchange of records (shares) with the other routers. Their load is added to the cluster's load, and their
    use of API keys to the key meters.
    """

    def __init__(
        self,
        cluster: Cluster,
        store: ShareStore,
        router_id: bytes,
        on_taken_over: Callable[[int], None] = lambda stream: None,
        meters: KeyMeters | None = None,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] | None = None,
        address: str = "",
        on_served: Callable[[str, int], None] = lambda tenant, tokens: None,
    ) -> None:
        """Create the exchange. `on_served`: called with an API key's name and the tokens that another router served."""
        self._cluster = cluster
        self._store = store
        self._router_id = router_id
        self._on_taken_over = on_taken_over
        self._meters = meters or KeyMeters()
        self._on_served = on_served
        self._limits = SharedLimits()
        self._period_s = period_s
        self._clock = clock or time.monotonic
        self._address, self._began_s = address, self._clock()
        self._number = 0
        self._takeovers = Announcements[Takeover]()
        self._unreadable = SeldomLog(logger)
        self._peer_loads = PeerRouterLoads()
        self.problem = ""
        """Why the last exchange with Redis failed; empty if it succeeded."""

    def took_over(self, router_id: bytes, stream: int) -> None:
        """Announce to router `router_id`, in the next shares, that its stream continues here."""
        self._takeovers.add(Takeover(router_id, stream))

    @property
    def others(self) -> int:
        """Number of other routers whose record in Redis is recent."""
        return self._peer_loads.routers

    @property
    def shares(self) -> tuple[Share, ...]:
        """Newest record (share) of each other router."""
        return self._peer_loads.shares

    async def run(self) -> None:
        while not is_cancelled():
            received = await self.exchange()
            if not is_cancelled():
                await asyncio.sleep(self._period_s if received else _UNREACHABLE_PAUSE_S)

    async def exchange(self) -> bool:
        """Write this router's record (share), apply the other routers' records, and return whether Redis responded."""
        self._number += 1
        loads, recent = self._cluster.own_loads(), self._cluster.predictions.take()
        taken, uses, uptime_s = self._takeovers.take(), self._meters.uses(), self._clock() - self._began_s
        share = Share(self._router_id, self._number, loads, recent, taken, uses, self._address, uptime_s)
        message = share_to_wire(share).SerializeToString()
        try:
            answers = await self._store.exchange(message)
        except RegistryUnavailable as error:
            if not self.problem:
                logger.warning("exchange with other routers failed, their load is unknown: %s; retrying", error)
            self.problem, answers = str(error), ()
        else:
            if self.problem:
                logger.info("exchange with other routers works again")
            self.problem = ""
        self._take(answers)
        return not self.problem

    def _take(self, answers: Sequence[bytes]) -> None:
        now = self._clock()
        for answer in answers:
            try:
                message = replica_pb2.RouterShare.FromString(answer)
                _BOUNDS.check(message)
                share = share_from_wire(message)
            except (DecodeError, OutOfBounds) as error:  # perhaps written by another release
                self._unreadable.warning("share", "unreadable share of another router in Redis ignored: %s", error)
                continue
            for takeover in share.takeovers:
                if takeover.router_id == self._router_id:
                    self._on_taken_over(takeover.stream)
            for prediction in self._peer_loads.take(share, now):
                self._cluster.predicted_elsewhere(
                    prediction.endpoint, prediction.block_hashes, prediction.computed_tokens
                )
            for taken in self._limits.take(share.router_id, share.keys):
                self._meters.taken_elsewhere(taken.tenant, taken.requests, taken.tokens, now)
                self._on_served(taken.tenant, taken.tokens)
        self._peer_loads.forget_old(now)
        self._limits.keep(self._peer_loads.router_ids)
        self._meters.active_on_peers(self._limits.active())
        self._cluster.others_have(self._peer_loads.loads())


def is_cancelled() -> bool:
    """Return whether this task was cancelled. Check it after awaiting Redis: redis-py swallows a cancellation that
    arrives together with its response.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def share_to_wire(share: Share) -> replica_pb2.RouterShare:
    return replica_pb2.RouterShare(
        router_id=share.router_id,
        number=share.number,
        loads=[
            replica_pb2.SharedLoad(
                endpoint=endpoint, requests=load.requests, tokens=load.tokens, blocks=load.blocks, slots=load.slots
            )
            for endpoint, load in share.loads.items()
        ],
        predictions=[
            replica_pb2.SharedPrediction(
                number=each.number,
                endpoint=each.endpoint,
                block_hashes=b"".join(each.block_hashes),
                computed_tokens=each.computed_tokens,
            )
            for each in share.predictions
        ],
        takeovers=[
            replica_pb2.SharedTakeover(router_id=each.router_id, stream=each.stream) for each in share.takeovers
        ],
        keys=[
            replica_pb2.SharedKey(name=name, active=use.active, requests=use.requests, tokens=use.tokens)
            for name, use in share.keys.items()
        ],
        address=share.address,
        uptime_s=share.uptime_s,
        versions=versions_message(share.versions),
    )


def share_from_wire(share: replica_pb2.RouterShare) -> Share:
    return Share(
        share.router_id,
        share.number,
        {each.endpoint: WorkerLoad(each.requests, each.tokens, each.blocks, each.slots) for each in share.loads},
        tuple(
            Prediction(each.number, each.endpoint, _split(each.block_hashes), each.computed_tokens)
            for each in share.predictions
        ),
        tuple(Takeover(each.router_id, each.stream) for each in share.takeovers),
        {each.name: KeyUse(each.active, each.requests, each.tokens) for each in share.keys},
        share.address,
        share.uptime_s,
        versions_of(share.versions),
    )


def _split(hashes: bytes) -> tuple[bytes, ...]:
    return tuple(hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES))
