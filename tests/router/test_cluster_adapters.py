"""A change of adapters as one router makes it, with workers that a test speaks for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from baton.process.errors import Aborted, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from baton.process.registry.redis_registry import RegistryUnavailable
from baton.process.registry.worker_record import WorkerRole
from baton.process.wire_bounds import MAX_EXACT
from baton.protos import session_pb2
from baton.router.fleet.adapters import AdapterList, ClusterAdapters
from baton.router.fleet.wire import Command
from baton.router.placement.cluster import Cluster
from baton.router.types.worker import Adapter, ListedAdapter, ModelDescription, WorkerAdapters, WorkerDescription
from tests.fixtures.session_client import eventually

NO_LIST = WorkerAdapters(0, (), ())
DESCRIPTION = WorkerDescription(
    "p", WorkerRole.PREFILL, 1, b"f", ModelDescription("tiny", "/m", 10, 10, "float32", 4), 9, 9, adapter_list=NO_LIST
)


class Workers:
    """Of two, `p` and `d`: what they are sent; they prepare what `digests` has, and take every list in."""

    def __init__(self, store: Any = None) -> None:
        self.cluster = Cluster()
        self.adapters = ClusterAdapters(self.cluster, self.send, store)
        self.sent: list[tuple[str, session_pb2.ConnectRequest]] = []
        self.digests = {"p": "aa", "d": "aa"}  # empty: refused
        self.silent = {"p": False, "d": False}
        for endpoint, role in (("p", WorkerRole.PREFILL), ("d", WorkerRole.DECODE)):
            self.cluster.add(endpoint, role)
            self.connect(replace(DESCRIPTION, worker_id=endpoint, role=role))

    def connect(self, description: WorkerDescription) -> None:
        self.cluster.connected(description.worker_id, description, 1)
        self.adapters.on_connected(description.worker_id, description)

    def send(self, endpoint: str, command: Command) -> bool:
        message = command.message
        self.sent.append((endpoint, message))
        if not self.silent[endpoint]:
            asyncio.get_running_loop().call_soon(self.answer, endpoint, message)
        return True

    def answer(self, endpoint: str, message: session_pb2.ConnectRequest) -> None:
        asked = message.prepare_adapter
        if message.HasField("prepare_adapter") and not asked.drop:
            digest = self.digests[endpoint]
            refusal = "" if digest else "it is too large"
            prepared = session_pb2.AdapterPrepared(change_id=asked.change_id, digest=digest, refusal=refusal)
            self.adapters.on_prepared(endpoint, prepared)
        elif message.HasField("adapter_list"):
            sent = message.adapter_list
            state = session_pb2.AdapterState(version=sent.version, listed=sent.adapters, usable=sent.adapters)
            self.adapters.on_state(endpoint, state)

    def lists(self, endpoint: str) -> list[session_pb2.AdapterList]:
        return [each.adapter_list for to, each in self.sent if to == endpoint and each.HasField("adapter_list")]

    def drops(self) -> list[str]:
        return [endpoint for endpoint, each in self.sent if each.prepare_adapter.drop]

    async def load(self, name: str = "sql", path: str = "/a", replaces: bool = False) -> list[str]:
        return (await self.adapters.load(name, path, replaces, "tiny", b"f"))[1]

    @property
    def names(self) -> list[str]:
        return sorted(adapter.name for adapter in self.adapters.listed)


class Store:
    def __init__(self) -> None:
        self.value: tuple[int, bytes] | None = None
        self.answers = True

    async def read(self) -> tuple[int, bytes] | None:
        return self.value

    async def discard(self) -> str:
        self.value = None
        return "adapters"

    async def write(self, version: int, value: bytes) -> bool:
        if not self.answers:
            raise RegistryUnavailable("silence")
        if self.value is not None and self.value[0] >= version:
            return False
        self.value = version, value
        return True


@pytest.fixture
async def workers() -> Workers:
    return Workers()


async def test_all_workers_have_an_adapter_before_it_is_listed(workers: Workers) -> None:
    workers.silent["d"] = True
    loading = asyncio.create_task(workers.load())
    await eventually(lambda: len(workers.sent) >= 4)  # a list at the connection, and what is to be prepared
    await asyncio.sleep(0)
    assert workers.names == []
    workers.silent["d"] = False
    workers.answer("d", workers.sent[-1][1] if workers.sent[-1][0] == "d" else workers.sent[-2][1])
    assert await loading == ["p", "d"]
    assert workers.names == ["sql"]
    assert [workers.lists(each)[-1].version for each in "pd"] == [1, 1]


async def test_if_one_refuses_it_is_named_and_none_keeps_it(workers: Workers) -> None:
    workers.digests["d"] = ""
    with pytest.raises(FailedPrecondition, match=r"d cannot load \S+: it is too large"):
        await workers.load()
    assert workers.names == []
    assert workers.drops() == ["p", "d"]
    assert {each.version for each in workers.lists("p")} == {0}


async def test_workers_with_different_files_in_that_folder_are_named(workers: Workers) -> None:
    workers.digests["d"] = "bb"
    with pytest.raises(FailedPrecondition, match=r"different files at \S+: p aa, d bb"):
        await workers.load()
    assert workers.names == []


async def test_worker_of_an_older_release_is_named(workers: Workers) -> None:
    workers.connect(replace(DESCRIPTION, worker_id="d", role=WorkerRole.DECODE, adapter_list=None))
    with pytest.raises(FailedPrecondition, match=r"d loads adapters only at its start: .*protocol 1"):
        await workers.load()


async def test_worker_lost_during_a_change_is_updated_on_its_return(workers: Workers) -> None:
    workers.silent["d"] = True
    loading = asyncio.create_task(workers.load())
    await eventually(lambda: any(each.HasField("prepare_adapter") for to, each in workers.sent if to == "d"))
    workers.cluster.lost("d")
    workers.adapters.on_lost("d")
    assert await loading == ["p"]
    workers.connect(replace(DESCRIPTION, worker_id="d", role=WorkerRole.DECODE))
    assert [each.name for each in workers.lists("d")[-1].adapters] == ["sql"]


@pytest.mark.parametrize(
    ("name", "path", "field"),
    [("tiny", "/a", "name"), ("a b", "/a", "name"), ("", "/a", "name"), ("sql", "a", "path"), ("sql", "", "path")],
)
async def test_bad_name_or_path_is_refused_before_workers_are_asked(
    workers: Workers, name: str, path: str, field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await workers.load(name, path)
    assert caught.value.field == field
    assert not any(each.HasField("prepare_adapter") for _, each in workers.sent)


async def test_name_is_given_to_another_adapter_only_on_purpose(workers: Workers) -> None:
    await workers.load()
    await workers.load()  # the same again is no change
    assert workers.lists("p")[-1].version == 1
    workers.digests = {"p": "bb", "d": "bb"}
    with pytest.raises(FailedPrecondition, match="another adapter has the name 'sql'"):
        await workers.load()
    await workers.load(replaces=True)
    assert [each.digest for each in workers.lists("p")[-1].adapters] == ["bb"]


async def test_workers_receive_unlisted_adapters_of_running_requests(workers: Workers) -> None:
    await workers.load()
    [sql] = workers.adapters.listed
    with workers.adapters.open_requests.using(sql, "", lambda error: None):
        await workers.adapters.unload("sql", 0.0)
        assert list(workers.lists("p")[-1].digests_in_use) == [sql.digest]
    assert list(workers.lists("p")[-1].digests_in_use) == []
    with pytest.raises(NotFound):
        await workers.adapters.unload("sql", 0.0)


async def test_adapter_of_the_start_is_neither_replaced_nor_unloaded(workers: Workers) -> None:
    started = (Adapter("sql", "cc"),)
    with_it = replace(DESCRIPTION, worker_id="p", adapters=started, adapter_list=replace(NO_LIST, started=started))
    workers.connect(with_it)
    for change in (workers.load(), workers.adapters.unload("sql", 0.0)):
        with pytest.raises(FailedPrecondition, match="p was started with adapter 'sql'"):
            await change


async def test_router_takes_the_newest_list_that_a_worker_has(workers: Workers) -> None:
    entry = ListedAdapter(Adapter("chat", "dd"), "/c")
    workers.connect(replace(DESCRIPTION, worker_id="p", adapter_list=WorkerAdapters(5, (entry,), ())))
    assert workers.names == ["chat"]
    assert workers.lists("d")[-1].version == 5
    workers.connect(replace(DESCRIPTION, worker_id="d", role=WorkerRole.DECODE, adapter_list=WorkerAdapters(4, (), ())))
    assert workers.names == ["chat"]


async def test_list_of_a_future_version_from_a_worker_does_not_block_changes(workers: Workers) -> None:
    forged = WorkerAdapters(MAX_EXACT, (ListedAdapter(Adapter("chat", "dd"), "/c"),), ())
    workers.connect(replace(DESCRIPTION, worker_id="p", adapter_list=forged))
    assert workers.names == []
    assert await workers.load() == ["p", "d"]
    assert workers.names == ["sql"]


async def test_second_of_two_concurrent_changes_is_refused() -> None:
    workers = Workers(store := Store())
    await store.write(1, AdapterList(1).to_bytes())
    with pytest.raises(Aborted, match="another router"):
        await workers.load()
    assert workers.names == []


async def test_without_an_answer_from_redis_nothing_changes() -> None:
    workers = Workers(store := Store())
    store.answers = False
    with pytest.raises(Unavailable, match="silence"):
        await workers.load()
    assert workers.names == []
    assert workers.drops() == ["p", "d"]


@asynccontextmanager
async def running(adapters: ClusterAdapters) -> AsyncIterator[None]:
    task = asyncio.create_task(adapters.run())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_redis_and_router_converge_to_the_newer_list() -> None:
    entry = ListedAdapter(Adapter("chat", "dd"), "/c")
    store: Any = Store()
    workers = Workers(store)
    await store.write(3, AdapterList(3, {"chat": entry}).to_bytes())
    async with running(workers.adapters):
        await eventually(lambda: workers.names == ["chat"])
    store.value = None
    async with running(workers.adapters):
        await eventually(lambda: store.value is not None and store.value[0] == 3)


@pytest.mark.parametrize(
    "stored",
    [
        (1 << 62, b'{"version": 9223372036854775808, "adapters": []}'),
        (MAX_EXACT, AdapterList(MAX_EXACT).to_bytes()),
        (9, AdapterList(0).to_bytes()),
    ],
)
async def test_stored_list_that_blocks_later_changes_is_discarded(stored: tuple[int, bytes]) -> None:
    workers = Workers(store := Store())
    store.value = stored
    running = asyncio.create_task(workers.adapters.run())
    await eventually(lambda: store.value is None)
    running.cancel()
    assert await workers.load() == ["p", "d"]
    assert store.value is not None
    assert store.value[0] == 1
