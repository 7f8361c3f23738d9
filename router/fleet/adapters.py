"""LoRA adapters loaded at runtime, as a versioned list that every worker receives.

An adapter is loaded on all workers before it enters the list: requests can choose it only once all workers have it.
Workers, Redis and each router keep a list; the list of highest rank is valid. Routers learn of each other's
changes from the workers, a new worker gets the list, and a restarted router reads it from the first connected worker.

If the weights that the workers were started with are replaced, the new weights are an entry of the list, named WEIGHTS.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from baton.process.errors import Aborted, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from baton.process.registry.redis_registry import RegistryUnavailable
from baton.process.registry.worker_record import (
    MOST_GRACE_S,
    MOST_LISTED,
    WEIGHTS,
    ListRank,
    is_adapter_name,
    list_fault,
    list_rank,
    newest_version,
    version_of,
)
from baton.protos import session_pb2
from baton.router.fleet import wire
from baton.router.fleet.peers import is_cancelled
from baton.router.fleet.weights import OpenRequests
from baton.router.fleet.wire import Command
from baton.router.placement.cluster import Cluster, Worker
from baton.router.types.worker import Adapter, ListedAdapter, WorkerAdapters, WorkerDescription

logger = logging.getLogger(__name__)
PREPARE_TIMEOUT_S = 60.0  # timeout of loading an adapter on all workers
WEIGHTS_TIMEOUT_S = 600.0  # timeout of loading a checkpoint on all workers
TELL_TIMEOUT_S = 10.0  # timeout of applying a list on all workers, which have already loaded its adapters
STORE_PERIOD_S = 1.0
RETRY_S = 1.0


class AdapterStore(Protocol):
    """Storage of the adapter list that survives all processes. Each call may raise RegistryUnavailable."""

    async def read(self) -> tuple[int, bytes] | None:
        """Return the stored list and its version; None if none is stored. Raises: ValueError for an invalid version."""

    async def discard(self) -> str:
        """Delete an unreadable list and return its key in the store."""

    async def write(self, version: int, value: bytes) -> bool:
        """Write the list. Return False if the stored list has that version or a newer one."""


@dataclass(frozen=True, slots=True)
class AdapterList:
    """Immutable list of adapters; each change creates the next version."""

    version: int = 0
    listed: Mapping[str, ListedAdapter] | None = None  # by adapter name

    @property
    def by_name(self) -> Mapping[str, ListedAdapter]:
        return self.listed or {}

    @property
    def rank(self) -> ListRank:
        return list_rank(self.version, ((each.adapter.name, each.adapter.digest) for each in self.by_name.values()))

    def next(self, name: str, listed: ListedAdapter | None) -> "AdapterList":
        """Return the next version, in which `listed` replaces the entry `name`. None: the entry is removed."""
        others = {known: each for known, each in self.by_name.items() if known != name}
        return AdapterList(self.version + 1, others if listed is None else {**others, name: listed})

    def to_bytes(self) -> bytes:
        entries = [[each.adapter.name, each.adapter.digest, each.path, each.grace_s] for each in self.by_name.values()]
        return json.dumps({"version": self.version, "adapters": entries}).encode()

    @classmethod
    def of_bytes(cls, value: bytes) -> "AdapterList":
        """Parse the bytes of `to_bytes`. Raises: ValueError."""
        try:
            read = json.loads(value)
            version, entries = int(read["version"]), [(*each, 0.0)[:4] for each in read["adapters"]]
            fault = list_fault(version, entries)
        except (KeyError, TypeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"not a list of adapters: {error!r}") from error
        if fault:
            raise ValueError(f"not a list of adapters: {fault}")
        listed = (ListedAdapter(Adapter(name, digest), path, grace_s) for name, digest, path, grace_s in entries)
        return cls(version, {each.adapter.name: each for each in listed})


@dataclass(frozen=True, slots=True)
class AdapterView:
    """Adapter as operators see it."""

    adapter: Adapter
    path: str  # folder on the workers; empty for an adapter that workers were started with
    started: bool
    retired: bool
    worker_ids: tuple[str, ...]  # ids of the workers that have it
    missing: tuple[tuple[str, str], ...]  # worker id and why it lacks the adapter; empty reason while it loads it


class ClusterAdapters:
    """Adapters of one router's cluster. All methods run on the event loop."""

    def __init__(
        self, cluster: Cluster, send: Callable[[str, Command], bool], store: AdapterStore | None = None
    ) -> None:
        """Begin with an empty list. `store`: None without Redis.

        `send`: sends a command to the worker at an endpoint; returns False if the link is closed.
        """
        self._cluster = cluster
        self._send = send
        self._store = store
        self._list = AdapterList()
        self.listed: frozenset[Adapter] = frozenset()
        self.open_requests = OpenRequests(self._tell_all, self.can_compute)
        self._change_ids = itertools.count(1)
        self._answers: dict[tuple[int, str], asyncio.Future[session_pb2.AdapterPrepared | None]] = {}
        self._told = asyncio.Condition()
        self._turn = asyncio.Lock()
        self._wakers: set[asyncio.Task[None]] = set()

    def can_compute(self, adapter: Adapter | None) -> bool:
        """Return whether any worker has the adapter (listed or not), or for None, the weights it was started with."""
        described = self._described()
        if adapter is None:
            return any(each.has_own_weights for each in described)
        return any(adapter in each.adapters for each in described)

    async def load(
        self, name: str, path: str, replaces: bool, model: str, fingerprint: bytes
    ) -> tuple[Adapter, list[str]]:
        """Load an adapter on all workers. Return it and the ids of the workers that have it.

        `replaces`: the adapter may replace another one of its name. `model`: name of the served model.
        Raises: InvalidArgument, FailedPrecondition naming the worker that refuses the adapter, Aborted, Unavailable.
        """
        if not is_adapter_name(name) or name == model:
            raise InvalidArgument("name", "must be 1 to 128 letters, digits and _ . : / -, and not the model's name")
        if not path.startswith("/"):
            raise InvalidArgument("path", "must be the absolute path of a PEFT adapter folder on the workers")
        if self.open_requests.weights is not None:
            version = version_of(self.open_requests.weights.digest)
            raise FailedPrecondition(
                "adapter", f"the weights were replaced by version {version} at runtime; restart the workers with them"
            )
        async with self._turn:
            before = self._list.by_name.get(name)
            if before is None and len(self._list.by_name) >= MOST_LISTED:
                raise FailedPrecondition("name", f"{MOST_LISTED} adapters are loaded, the maximum; unload one first")
            only = before.adapter if before is not None and not replaces else None
            workers = self._workers(fingerprint)
            self._check_not_started(name, workers)
            return await self._bring(ListedAdapter(Adapter(name, ""), path), workers, PREPARE_TIMEOUT_S, only)

    async def reload(
        self, path: str, grace_s: float, own_weights: str, fingerprint: bytes
    ) -> tuple[Adapter, list[str]]:
        """Replace the weights for all new requests. Return the new weights and the ids of the workers that have them.

        `own_weights`: digest of the weights that workers were started with, in force while no weights are listed.
        Raises: InvalidArgument, FailedPrecondition, Aborted, Unavailable.
        """
        if not path.startswith("/"):
            raise InvalidArgument("path", "must be the absolute path of a checkpoint folder on the workers")
        if not 0 <= grace_s <= MOST_GRACE_S:
            raise InvalidArgument("grace_s", f"must be from 0 to {MOST_GRACE_S:g}, got {grace_s:g}")
        async with self._turn:
            names = sorted(name for name in self._list.by_name if name != WEIGHTS)
            if names:
                message = f"adapters of the current weights are loaded: {', '.join(names)}; unload them first"
                raise FailedPrecondition("adapter", message)
            workers = self._workers(fingerprint)
            wanted = ListedAdapter(Adapter(WEIGHTS, ""), path, grace_s)
            return await self._bring(wanted, workers, WEIGHTS_TIMEOUT_S, own_weights=own_weights)

    async def _bring(
        self,
        wanted: ListedAdapter,
        workers: Sequence[Worker],
        timeout_s: float,
        only: Adapter | None = None,
        own_weights: str = "",
    ) -> tuple[Adapter, list[str]]:
        """Load `wanted`, which has no digest yet, on all workers, then list it.

        `only`: reject the loaded adapter if it is not this one; None: accept any.
        """
        change_id, name = next(self._change_ids), wanted.adapter.name
        try:
            digest = await self._prepare(change_id, name, wanted.path, workers, timeout_s)
            adapter = Adapter(name, digest)
            before = self._list.by_name.get(name)
            if before is None and digest == own_weights:
                return adapter, [_name(each) for each in workers if each.held]
            if before is None or before.adapter != adapter:
                if only is not None and only != adapter:
                    raise FailedPrecondition("name", f"another adapter has the name {name!r}; unload or replace it")
                listed = ListedAdapter(adapter, wanted.path, wanted.grace_s)
                await self._commit(self._list.next(name, listed))
            await self._until(lambda: all(self._has(each, adapter) for each in workers), TELL_TIMEOUT_S)
        finally:
            for worker in workers:
                self._send(worker.endpoint, wire.drop_adapter(change_id))
        return adapter, [_name(each) for each in self._keeping(adapter)]

    def why_without_weights(self, description: WorkerDescription) -> str:
        """Return why a worker without the weights in force gets no new requests.

        Empty if the worker has the weights, or has not yet applied the current list.
        """
        weights, listed = self.open_requests.weights, description.adapter_list
        if weights is None or weights in description.adapters:
            return ""
        if listed is not None and listed.version < self._list.version:
            return ""
        return (
            f"weights: {version_of(weights.digest)} is served, {_why_missing(description, WEIGHTS) or 'it loads them'}"
        )

    async def unload(self, name: str, wait_s: float) -> list[str]:
        """Remove an adapter from the list. Return ids of workers that still keep it for open requests after `wait_s`.

        Raises: NotFound, FailedPrecondition, Aborted, Unavailable.
        """
        async with self._turn:
            before = self._list.by_name.get(name)
            if before is None or name == WEIGHTS:
                self._check_not_started(name, self._cluster.workers)
                raise NotFound("adapter", name)
            await self._commit(self._list.next(name, None))
        await self._until(lambda: not self._keeping(before.adapter), wait_s)
        return [_name(each) for each in self._keeping(before.adapter)]

    def views(self) -> list[AdapterView]:
        started = {each for worker in self._described() for each in worker.started_adapters}
        had = {each for worker in self._described() for each in worker.adapters}
        paths = {each.adapter: each.path for each in self._list.by_name.values()}
        every = sorted(started | had | paths.keys(), key=lambda each: (each.name, each.digest))
        return [self._view(each, paths.get(each), each in started) for each in every if each.name != WEIGHTS]

    def _view(self, adapter: Adapter, path: str | None, started: bool) -> AdapterView:
        described = self._described()
        missing = [] if path is None else [each for each in described if adapter not in each.adapters]
        return AdapterView(
            adapter,
            path or "",
            started,
            retired=path is None and not started,
            worker_ids=tuple(each.worker_id for each in described if adapter in each.adapters),
            missing=tuple((each.worker_id, _why_missing(each, adapter.name)) for each in missing),
        )

    def on_connected(self, endpoint: str, description: WorkerDescription) -> None:
        if description.adapter_list is not None:
            self._take_from(description.adapter_list)
            self._tell(endpoint)

    def on_state(self, endpoint: str, state: session_pb2.AdapterState) -> None:
        theirs = wire.worker_adapters(state)
        self._cluster.has_adapters(endpoint, wire.usable_adapters(state), theirs)
        self._take_from(theirs)
        self._notify()

    def on_prepared(self, endpoint: str, prepared: session_pb2.AdapterPrepared) -> None:
        self._answered((prepared.change_id, endpoint), prepared)

    def on_lost(self, endpoint: str) -> None:
        """Handle a lost worker: stop waiting for its answers. It gets the list when it reconnects."""
        for waiting in [each for each in self._answers if each[1] == endpoint]:
            self._answered(waiting, None)
        self._notify()

    async def run(self) -> None:
        """Keep this router's list and the stored list equal, until cancelled. Without a store, return immediately."""
        while self._store is not None and not is_cancelled():
            try:
                await self._compare(self._store)
            except RegistryUnavailable:
                pass  # the reader of the membership logs this error
            except ValueError as error:
                with suppress(RegistryUnavailable):  # an invalid list would block every later change
                    key = await self._store.discard()
                    logger.warning("invalid adapter list in Redis deleted, key %s: %s", key, error)
            await asyncio.sleep(STORE_PERIOD_S)

    async def _compare(self, store: AdapterStore) -> None:
        found = await store.read()
        stored = AdapterList() if found is None else AdapterList.of_bytes(found[1])
        if found is not None and found[0] != stored.version:
            raise ValueError(f"version {found[0]} is stored with a list of version {stored.version}")
        self._take(stored)
        if stored.version < self._list.version:
            await store.write(self._list.version, self._list.to_bytes())

    def _take_from(self, theirs: WorkerAdapters) -> None:
        if theirs.version <= newest_version():  # a version in the future would block every later change
            self._take(AdapterList(theirs.version, {each.adapter.name: each for each in theirs.listed}))
        else:
            logger.warning("adapter list of a worker ignored: its version %d is in the future", theirs.version)

    def _take(self, newest: AdapterList) -> None:
        if newest.rank > self._list.rank:
            self._list = newest
            self.listed = frozenset(each.adapter for each in newest.by_name.values())
            self.open_requests.take(newest.by_name.get(WEIGHTS))
            self._tell_all()

    async def _commit(self, changed: AdapterList) -> None:
        """Store the changed list and put it in force. Raises: Aborted, Unavailable; the old list then stays valid."""
        try:
            written = self._store is None or await self._store.write(changed.version, changed.to_bytes())
        except RegistryUnavailable as error:
            raise Unavailable(f"Redis does not answer, retry: {error}", "REGISTRY", RETRY_S) from error
        if not written or changed.version <= self._list.version:
            raise Aborted("another router changed the adapter list at the same time; retry", "CHANGED_MEANWHILE")
        self._take(changed)

    async def _prepare(self, change_id: int, name: str, path: str, workers: Sequence[Worker], timeout_s: float) -> str:
        """Load the adapter on all workers and return its digest. Raises: FailedPrecondition, Unavailable."""
        loop = asyncio.get_running_loop()
        waiting = {each.endpoint: loop.create_future() for each in workers}
        self._answers |= {(change_id, endpoint): future for endpoint, future in waiting.items()}
        digests: dict[str, str] = {}  # by worker id
        try:
            for worker in workers:
                if not self._send(worker.endpoint, wire.prepare_adapter(change_id, name, path)):
                    self._answered((change_id, worker.endpoint), None)
            await asyncio.wait(waiting.values(), timeout=timeout_s)
            for worker in workers:
                future = waiting[worker.endpoint]
                if not future.done():
                    raise Unavailable(
                        f"{_name(worker)} did not load {path} within {timeout_s:g} s", "ADAPTER_TIMEOUT", RETRY_S
                    )
                prepared = future.result()
                if prepared is not None and prepared.refusal:
                    raise FailedPrecondition("adapter", f"{_name(worker)} cannot load {path}: {prepared.refusal}")
                if prepared is not None:
                    digests[_name(worker)] = prepared.digest
        finally:
            for endpoint in waiting:
                self._answers.pop((change_id, endpoint), None)
        if not digests:
            raise Unavailable("the links to all workers were lost during loading; retry", "NO_WORKER", RETRY_S)
        if len(set(digests.values())) > 1:
            which = ", ".join(f"{worker} {digest[:16]}" for worker, digest in digests.items())
            raise FailedPrecondition(
                "path", f"workers have different files at {path}: {which}; copy the same files to all"
            )
        return next(iter(digests.values()))

    def _workers(self, fingerprint: bytes) -> list[Worker]:
        """Return all workers of the model. Raises: FailedPrecondition if one cannot load adapters, Unavailable."""
        found = [
            each
            for each in self._cluster.workers
            if each.held and each.description is not None and each.description.fingerprint == fingerprint
        ]
        if not found:
            raise Unavailable("no worker of the model is connected", "NO_WORKER", RETRY_S)
        for worker in found:
            if worker.description is not None and worker.description.adapter_list is None:
                versions = worker.description.versions
                message = f"{_name(worker)} loads adapters only at its start: {versions}"
                raise FailedPrecondition("adapter", message)
        return found

    def _check_not_started(self, name: str, workers: Sequence[Worker]) -> None:
        """Raise FailedPrecondition if a worker was started with an adapter of that name."""
        for worker in workers:
            started = () if worker.description is None else worker.description.started_adapters
            if any(each.name == name for each in started):
                message = f"{_name(worker)} was started with adapter {name!r}, which it keeps until it stops"
                raise FailedPrecondition("name", message)

    def _has(self, worker: Worker, adapter: Adapter) -> bool:
        """Return whether the worker has the adapter. Also true for a lost worker, so that nothing waits for it."""
        description = worker.description
        return not worker.held or (description is not None and adapter in description.adapters)

    def _keeping(self, adapter: Adapter) -> list[Worker]:
        return [each for each in self._cluster.workers if each.held and self._has(each, adapter)]

    def _described(self) -> list[WorkerDescription]:
        return [each.description for each in self._cluster.workers if each.held and each.description is not None]

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until the condition is true, at most `timeout_s`; log a timeout."""
        try:
            async with asyncio.timeout(timeout_s), self._told:
                await self._told.wait_for(condition)
        except TimeoutError:
            logger.warning("timed out after %g s waiting for workers to apply the adapter list", timeout_s)

    def _notify(self) -> None:
        async def wake() -> None:
            async with self._told:
                self._told.notify_all()

        task = asyncio.get_running_loop().create_task(wake())
        self._wakers.add(task)
        task.add_done_callback(self._wakers.discard)

    def _answered(self, key: tuple[int, str], prepared: session_pb2.AdapterPrepared | None) -> None:
        future = self._answers.get(key)
        if future is not None and not future.done():
            future.set_result(prepared)

    def _tell_all(self) -> None:
        for worker in self._cluster.workers:
            if worker.held and worker.description is not None and worker.description.adapter_list is not None:
                self._tell(worker.endpoint)

    def _tell(self, endpoint: str) -> None:
        listed = self._list.by_name.values()
        known = {each.adapter.digest for each in listed}
        in_use = [digest for digest in self.open_requests.digests if digest not in known]
        self._send(endpoint, wire.adapter_list(self._list.version, listed, in_use))


def _name(worker: Worker) -> str:
    return worker.endpoint if worker.description is None else worker.description.worker_id


def _why_missing(description: WorkerDescription, name: str) -> str:
    if description.adapter_list is None:
        return f"it loads adapters only at its start: {description.versions}"
    return dict(description.adapter_list.refused).get(name, "")
