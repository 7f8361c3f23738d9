"""Life of the adapters that routers request: loaded before they are listed, freed when no request needs them.

Replacement weights of the model have the same life; at most two sets of weights are loaded at a time. Adapters are read
on a thread and added between two steps.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from baton.engine.config.model_config import ModelError
from baton.engine.runner.loop import EngineLoop
from baton.engine.runner.thread import EngineStopped
from baton.process.registry.worker_record import WEIGHTS, ListRank, version_of
from baton.protos import session_pb2
from baton.worker.adapters.engine import EngineAdapters, Read
from baton.worker.adapters.table import AdapterKey, AdapterOrigin, AdapterTable, Listed, Loaded, rank_of
from baton.worker.request import Link

logger = logging.getLogger(__name__)
READ_TIMEOUT_S = 50.0  # timeout of reading an adapter folder; routers wait longer
WEIGHTS_TIMEOUT_S = 570.0  # timeout of reading a checkpoint; routers wait longer
CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class RouterList:
    """Last report of a router: the rank of its adapter list, and the adapters that its requests use."""

    rank: ListRank
    in_use: frozenset[str]  # digests of the adapters that the router's requests use


NO_LIST = RouterList(ListRank(), frozenset())


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Functions of the session service that the adapter keeper calls."""

    in_use: Callable[[], Iterable[int]]  # adapter numbers of open requests, 0 for none
    routers: Callable[[], Iterable[Link]]  # links of routers that report which adapters they need
    answer: Callable[[Link, session_pb2.ConnectResponse], None]
    changed: Callable[[], None]  # called after each change of `AdapterKeeper.state`
    fault: Callable[[BaseException], None]


class AdapterKeeper:
    """Loader of the adapters that routers request, for one role of a worker. `table` and `engine` outlive it. Lives on
    the event loop.
    """

    def __init__(self, table: AdapterTable, engine: EngineAdapters, loop: EngineLoop, around: Surroundings) -> None:
        self._table = table
        self._engine = engine
        self._loop = loop
        self._around = around
        self._lists: dict[Link, RouterList] = {}
        self._held: dict[tuple[Link, int], AdapterKey | None] = {}  # adapter by link and change id; None: not read yet
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> session_pb2.AdapterState:
        table = self._table
        started = [each for each in table.of(AdapterOrigin.STARTED) if each.key.name != WEIGHTS]
        usable = [*started, *table.of(AdapterOrigin.LISTED, AdapterOrigin.RETIRED)]
        return session_pb2.AdapterState(
            version=table.version,
            listed=[
                session_pb2.Adapter(name=each.key.name, digest=each.key.digest, path=each.path, grace_s=each.grace_s)
                for each in table.listed
            ],
            started=map(_message, started),
            usable=map(_message, usable),
            refusals=[session_pb2.AdapterRefusal(name=name, why=why) for name, why in table.refused.items()],
            own_weights_freed=table.own_weights_freed,
        )

    @property
    def choosable(self) -> list[session_pb2.Adapter]:
        """Return the adapters that requests may choose, for routers whose protocol lacks the field `adapter_state`."""
        return [
            _message(each)
            for each in self._table.adapters
            if each.kept in (AdapterOrigin.STARTED, AdapterOrigin.LISTED)
        ]

    @property
    def awaits_last(self) -> bool:
        """Return whether an unlisted adapter is still loaded because requests use it."""
        return bool(self._table.of(AdapterOrigin.RETIRED))

    def number(self, command: session_pb2.Prefill | session_pb2.Start) -> int:
        """Return the engine's number of the adapter that a request names. Raises: ValueError."""
        return self._table.number(command.adapter, command.adapter_digest)

    def prepare(self, link: Link, asked: session_pb2.PrepareAdapter) -> None:
        change = (link, asked.change_id)
        if asked.drop:
            self._held.pop(change, None)
            self.free()
        else:
            self._held[change] = None
            self._begin(self._prepare(link, asked))

    def take_list(self, link: Link, message: session_pb2.AdapterList) -> None:
        listed = [Listed(AdapterKey(each.name, each.digest), each.path, each.grace_s) for each in message.adapters]
        rank = rank_of(message.version, listed)
        self._lists[link] = RouterList(rank, frozenset(message.digests_in_use))
        if self._table.take_list(message.version, listed):
            self._around.changed()
        self.free()
        if self._table.missing and rank == self._table.rank:
            self._begin(self._load_missing())

    def forget(self, link: Link) -> None:
        """Forget the list and the changes of a closed link, and free adapters that only it needed."""
        self._lists.pop(link, None)
        for change in [change for change in self._held if change[0] is link]:
            del self._held[change]
        self.free()

    def free(self) -> None:
        """Free adapters that nothing needs any more. Call it when a request with an adapter has finished."""
        kept = {key for key in self._held.values() if key is not None}
        idle = [each for each in self._table.of(AdapterOrigin.PREPARED) if each.key not in kept]
        retired = [
            each for each in self._table.of(AdapterOrigin.RETIRED) if each.key not in kept and self._has_successor(each)
        ]
        if retired:
            used = set(self._around.in_use())
            lists = [self._lists.get(each, NO_LIST) for each in self._around.routers()]
            if all(each.rank >= self._table.rank for each in lists):
                wanted = frozenset().union(*(each.in_use for each in lists))
                idle += [each for each in retired if each.number not in used and each.key.digest not in wanted]
        for loaded in idle:
            self._remove(loaded)
        if idle:
            self._around.changed()
            if self._table.missing:
                self._begin(self._load_missing())  # the freed memory may suffice for missing adapters

    def _has_successor(self, retired: Loaded) -> bool:
        """Return whether `retired` may be freed: adapters always, weights only if loaded weights replace them."""
        return retired.key.name != WEIGHTS or self._table.replaces_weights

    async def close(self) -> None:
        """Wait for running loads, for a bounded time: the table, which outlives this object, must record their
        results.
        """
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work, name="adapter")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._on_ended)

    def _on_ended(self, task: "asyncio.Task[None]") -> None:
        fault = None if task.cancelled() else task.exception()
        if fault is not None and not isinstance(fault, EngineStopped):
            logger.error("adapter not loaded: unexpected error", exc_info=fault)
            self._around.fault(fault)

    async def _prepare(self, link: Link, asked: session_pb2.PrepareAdapter) -> None:
        prepared = session_pb2.AdapterPrepared(change_id=asked.change_id)
        change = (link, asked.change_id)
        try:
            key = await self._loaded(asked.name, asked.path, change)
            prepared.digest = key.digest
        except ModelError as error:
            self._held.pop(change, None)
            prepared.refusal = str(error)
        self._around.answer(link, session_pb2.ConnectResponse(adapter_prepared=prepared))

    async def _load_missing(self) -> None:
        rank = self._table.rank
        for listed in self._table.missing:
            try:
                key = await self._loaded(listed.key.name, listed.path)
                why = "" if key == listed.key else f"{listed.path} has other contents than those that are listed"
            except ModelError as error:
                why = str(error)
            if self._table.rank != rank:
                break  # a newer list has arrived, and has its own task
            if why:
                logger.warning("%s is listed but could not be loaded: %s", _spoken(listed.key), why)
                self._table.refused[listed.key.name] = why
            else:
                self._table.refused.pop(listed.key.name, None)
            self._around.changed()
        self.free()

    async def _loaded(self, name: str, path: str, change: tuple[Link, int] | None = None) -> AdapterKey:
        """Load an adapter or weights unless they are loaded, keep them for `change`, and return their key.

        Raises: ModelError.
        """
        async with self._turn:
            timeout_s = WEIGHTS_TIMEOUT_S if name == WEIGHTS else READ_TIMEOUT_S
            try:
                async with asyncio.timeout(timeout_s):
                    read = await asyncio.to_thread(self._engine.read, name, Path(path))
                    key = AdapterKey(name, read.digest)
                    if change in self._held:
                        self._held[change] = key
                    if self._table.find(key) is None:
                        self._check_room(key)
                        await asyncio.to_thread(self._engine.load, read, self._wait_between_steps)
            except TimeoutError as error:
                raise ModelError(f"timed out after {timeout_s:g} s reading {path}") from error
            if self._table.find(key) is None:
                await self._add(key, read)
        if change is not None and change not in self._held:
            self.free()  # the router dropped the change during the load
        return key

    def _check_room(self, key: AdapterKey) -> None:
        """Check that the adapter or weights may be added now. Raises: ModelError."""
        table = self._table
        if key.name != WEIGHTS:
            if any(each.key.name == WEIGHTS for each in table.listed):
                raise ModelError("the model's weights were replaced; adapters fit only the original weights")
            return
        if table.adapters:
            names = ", ".join(sorted({each.key.name for each in table.adapters}))
            raise ModelError(f"adapters of the present weights are loaded: {names}; unload them first")
        if len(table.weights) > 1:
            versions = ", ".join(version_of(each.key.digest) for each in table.weights)
            raise ModelError(
                f"two sets of weights are loaded already ({versions}); retry when no request uses the older set"
            )

    def _wait_between_steps(self, function: Callable[[], None]) -> None:
        """Run `function` between two steps and wait for it. Call it on a thread other than the engine's."""
        self._loop.between_steps(function).result()

    async def _add(self, key: AdapterKey, read: Read) -> None:
        number = await asyncio.wrap_future(self._loop.between_steps(self._engine.add, read))
        is_listed = any(each.key == key for each in self._table.listed)
        self._table.add(key, number, AdapterOrigin.LISTED if is_listed else AdapterOrigin.PREPARED)
        logger.info("%s loaded: %s", _spoken(key), key.digest[:24])

    def _remove(self, loaded: Loaded) -> None:
        self._table.drop(loaded)
        logger.info("%s freed: %s", _spoken(loaded.key), loaded.key.digest[:24])
        try:
            removed = self._loop.between_steps(self._engine.remove, loaded.number)
        except EngineStopped:
            return
        events = asyncio.get_running_loop()
        removed.add_done_callback(partial(_report, events, self._around.fault))


def _report(events: asyncio.AbstractEventLoop, fault: Callable[[BaseException], None], removed: "Future[None]") -> None:
    error = removed.exception()
    if error is not None and not isinstance(error, EngineStopped):
        events.call_soon_threadsafe(fault, error)


def _spoken(key: AdapterKey) -> str:
    return "set of weights" if key.name == WEIGHTS else f"adapter {key.name!r}"


def _message(loaded: Loaded) -> session_pb2.Adapter:
    return session_pb2.Adapter(name=loaded.key.name, digest=loaded.key.digest)
