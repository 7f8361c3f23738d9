"""This router among others of its cluster: a few times a second it says through Redis what it has on the workers, and
hears what the others have. What another router did is known here within two periods and a round trip; without Redis
each router goes by what it knows itself.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from google.protobuf.message import DecodeError

from protos import replica_pb2
from router.cluster import Cluster
from router.shared_view import ElsewhereLoad, Prediction, RecentPredictions, Share, SharedView
from service.registry import RegistryUnavailable

logger = logging.getLogger(__name__)
PERIOD_S = 0.1
HASH_BYTES = 32
_UNHEARD_PAUSE_S = 0.5  # between tries while Redis does not answer


class ShareStore(Protocol):
    async def exchange(self, share: bytes) -> tuple[bytes, ...]:
        """Writes ours, returns the others'. Raises: RegistryUnavailable."""

    async def close(self) -> None: ...


class Replicas:
    """Keeps `cluster` informed of the other routers, until cancelled."""

    def __init__(
        self,
        cluster: Cluster,
        store: ShareStore,
        router_id: bytes,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._router_id = router_id
        self._period_s = period_s
        self._clock = clock
        self._number = 0
        self._recent = RecentPredictions()
        self._view = SharedView()
        self._connected = True
        cluster.on_predicted = self._recent.add

    @property
    def others(self) -> int:
        """Routers whose load is known now."""
        return self._view.routers

    async def run(self) -> None:
        while not is_cancelled():
            heard = await self.exchange()
            if not is_cancelled():
                await asyncio.sleep(self._period_s if heard else _UNHEARD_PAUSE_S)

    async def exchange(self) -> bool:
        """Once: says ours and takes in the others'. Whether Redis answered."""
        self._number += 1
        loads, told = self._cluster.own_loads(), self._recent.take()
        message = share_to_wire(Share(self._router_id, self._number, loads, told)).SerializeToString()
        try:
            answers = await self._store.exchange(message)
        except RegistryUnavailable as error:
            if self._connected:
                logger.warning("other routers are not heard, going on without: %s", error)
            self._connected, answers = False, ()
        else:
            if not self._connected:
                logger.info("other routers are heard again")
            self._connected = True
        self._take(answers)
        return self._connected

    def _take(self, answers: Sequence[bytes]) -> None:
        now = self._clock()
        for answer in answers:
            try:
                share = share_from_wire(replica_pb2.RouterShare.FromString(answer))
            except DecodeError:
                continue  # of another version, perhaps
            for prediction in self._view.take(share, now):
                self._cluster.predicted_elsewhere(
                    prediction.endpoint, prediction.block_hashes, prediction.computed_tokens
                )
        self._view.forget_old(now)
        self._cluster.others_have(self._view.loads())


def is_cancelled() -> bool:
    """Whether this task is to end. redis-py loses a cancellation that comes as its answer does: whoever has just
    awaited Redis has to look.
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
    )


def share_from_wire(share: replica_pb2.RouterShare) -> Share:
    return Share(
        share.router_id,
        share.number,
        {each.endpoint: ElsewhereLoad(each.requests, each.tokens, each.blocks, each.slots) for each in share.loads},
        tuple(
            Prediction(each.number, each.endpoint, _split(each.block_hashes), each.computed_tokens)
            for each in share.predictions
        ),
    )


def _split(hashes: bytes) -> tuple[bytes, ...]:
    return tuple(hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES))
