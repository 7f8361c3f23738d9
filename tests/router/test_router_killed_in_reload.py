"""A router that dies after any of its deeds of a reload: all others agree, and the same call again repairs the rest.

The workers' side is their own code, over an engine that only counts.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.process.errors import Aborted
from baton.process.registry.worker_record import WEIGHTS, WorkerRole, weights_digest
from baton.protos import session_pb2
from baton.router.fleet import wire
from baton.router.fleet.adapters import ClusterAdapters
from baton.router.fleet.wire import Command
from baton.router.placement.cluster import Cluster
from baton.router.types.worker import Adapter
from baton.worker.adapters.engine import Read
from baton.worker.adapters.keeper import AdapterKeeper, Surroundings
from baton.worker.adapters.table import AdapterKey, AdapterTable
from tests.fixtures.session_client import eventually
from tests.router.test_cluster_adapters import DESCRIPTION, Store, running

OWN, NEW, THIRD = (weights_digest(name) for name in (b"own", b"new", b"third"))
FOLDERS = {"/new": NEW, "/third": THIRD}
DEEDS = 7  # of a whole reload with Redis: two workers prepare, it is written, both get the list, and drop what is held


class Engine:
    """Loads all that it is asked for."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def read(self, name: str, folder: Path) -> Read:
        nothing: Any = None
        return Read(name, folder, FOLDERS[str(folder)], nothing)

    def load(self, read: Read, between_steps: Callable[..., None]) -> None: ...

    def add(self, read: Read) -> int:
        return next(self._numbers)

    def remove(self, number: int) -> None: ...

    def between_steps(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(function(*arguments))
        return done


class Worker:
    def __init__(self, name: str, role: WorkerRole) -> None:
        self.name, self._role = name, role
        self.table, self.routers, engine = AdapterTable(), list[Router](), Engine()
        self.table.add_own_weights(OWN)
        around = Surroundings(lambda: (), lambda: self.routers, self._answer, self._changed, self._fault)
        parts: Any = engine
        self.keeper = AdapterKeeper(self.table, parts, parts, around)

    def connect(self, router: "Router") -> None:
        self.routers.append(router)
        state = self.keeper.state
        usable, listed = wire.usable_adapters(state), wire.worker_adapters(state)
        described = replace(DESCRIPTION, worker_id=self.name, role=self._role, adapters=usable, adapter_list=listed)
        router.cluster.add(self.name, self._role)
        router.cluster.connected(self.name, described, 1)
        router.adapters.on_connected(self.name, described)

    def disconnect(self, router: "Router") -> None:
        """Its time to come back is over."""
        self.routers.remove(router)
        self.keeper.forget(router)  # type: ignore[arg-type]

    def take(self, router: "Router", message: session_pb2.ConnectRequest) -> None:
        session: Any = router
        if message.HasField("prepare_adapter"):
            self.keeper.prepare(session, message.prepare_adapter)
        else:
            self.keeper.take_list(session, message.adapter_list)

    @property
    def listed(self) -> str:
        return next((each.key.digest for each in self.table.listed), OWN)

    def has(self, digest: str) -> bool:
        return self.table.find(AdapterKey(WEIGHTS, digest)) is not None

    def _answer(self, session: Any, response: session_pb2.ConnectResponse) -> None:
        asyncio.get_running_loop().call_soon(session.hears, self.name, response)

    def _changed(self) -> None:
        for router in self.routers:
            self._answer(router, session_pb2.ConnectResponse(adapter_state=self.keeper.state))

    def _fault(self, error: BaseException) -> None:
        raise error


class Router:
    """It dies before the deed behind `most` ones; None: it lives."""

    def __init__(self, workers: list[Worker], store: Store | None, most: int | None = None) -> None:
        self.cluster = Cluster()
        self.adapters = ClusterAdapters(self.cluster, self._send, None if store is None else self)
        self._workers, self._store, self._most = {each.name: each for each in workers}, store, None
        self.dead, self._deeds = False, 0
        for worker in workers:
            worker.connect(self)
        self._most = most

    async def reload(self, folder: str = "/new") -> None:
        await self.adapters.reload(folder, 60.0, OWN, b"f")

    async def reload_to_death(self) -> None:
        task = asyncio.create_task(self.reload())
        await eventually(lambda: self.dead or task.done())
        self.dead = True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    @property
    def in_force(self) -> str:
        weights = self.adapters.open_requests.weights
        return OWN if weights is None else weights.digest

    def hears(self, endpoint: str, response: session_pb2.ConnectResponse) -> None:
        if self.dead:
            return
        if response.HasField("adapter_prepared"):
            self.adapters.on_prepared(endpoint, response.adapter_prepared)
        else:
            self.adapters.on_state(endpoint, response.adapter_state)

    async def read(self) -> bytes | None:
        assert self._store is not None
        return await self._store.read()

    async def write(self, version: int, value: bytes) -> bool:
        assert self._store is not None
        if not self._does():
            await asyncio.Event().wait()
        return await self._store.write(version, value)

    def _send(self, endpoint: str, command: Command) -> bool:
        if self._does():
            asyncio.get_running_loop().call_soon(self._workers[endpoint].take, self, command.message)
        return not self.dead

    def _does(self) -> bool:
        self.dead = self.dead or self._deeds == self._most
        self._deeds += not self.dead
        return not self.dead


def pair() -> list[Worker]:
    return [Worker("p", WorkerRole.PREFILL), Worker("d", WorkerRole.DECODE)]


@contextmanager
def stream(router: Router) -> Iterator[list[Aborted]]:
    """Of the weights that workers were started with."""
    ended: list[Aborted] = []
    with router.adapters.open_requests.using(None, OWN, ended.append):
        yield ended


@pytest.mark.parametrize("has_redis", [True, False])
@pytest.mark.parametrize("deeds", range(DEEDS + 1))
async def test_all_agree_and_a_second_call_repairs(
    deeds: int, has_redis: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.router.fleet.adapters.STORE_PERIOD_S", 0.001)
    workers, store = pair(), Store() if has_redis else None
    other, dying = Router(workers, store), Router(workers, store, most=deeds)
    async with running(other.adapters):
        with stream(other) as ended:
            await dying.reload_to_death()
            again = Router(workers, store)
            routers = (other, again)
            async with running(again.adapters):

                def agree() -> bool:
                    digests = {each.in_force for each in routers} | {each.listed for each in workers}
                    return len(digests) == 1 and all(each.has(other.in_force) for each in workers)

                await eventually(agree)
                for worker in workers:
                    worker.disconnect(dying)
                await again.reload()
                await eventually(lambda: agree() and other.in_force == NEW)
                assert all(each.has(OWN) for each in workers) and not ended, "the stream goes on"
                assert all(each.adapters.can_compute(Adapter(WEIGHTS, NEW)) for each in routers)
        await eventually(lambda: not any(each.has(OWN) for each in workers))


async def test_lists_of_two_routers_that_never_met_become_one() -> None:
    """Without Redis, the second one knows neither the first nor the worker that has its list."""
    prefill, decode = workers = pair()
    await Router([prefill], None).reload("/new")
    second = Router([decode], None)
    await second.reload("/third")
    second._workers["p"] = prefill
    prefill.connect(second)
    await eventually(lambda: len({second.in_force, *(each.listed for each in workers)}) == 1)
    await eventually(lambda: all(each.has(second.in_force) for each in workers))
