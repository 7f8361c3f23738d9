"""The whole router over gRPC with scripted workers: a request chooses an adapter by the name of its model."""

from typing import Any

import grpc
import pytest

from baton.process.registry.worker_record import WorkerRole
from baton.protos import baton_pb2, session_pb2
from baton.router.model.served_model import served_adapters
from baton.router.placement.cluster import Worker
from baton.router.types.worker import Adapter, ModelDescription, WorkerDescription
from tests.fixtures.session_client import eventually
from tests.router.conftest import Stack
from tests.router.fake_worker import FakePair

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
SQL, OTHER_SQL, CHAT = Adapter("sql", "aa"), Adapter("sql", "bb"), Adapter("chat", "cc")


@pytest.fixture
def pair(pair: FakePair) -> FakePair:
    for worker, names in ((pair.prefill, ("sql", "chat", "here")), (pair.decode, ("chat", "sql", "there"))):
        worker.info.adapters.extend(session_pb2.Adapter(name=name, digest=f"d-{name}") for name in names)
    return pair


async def ask(stack: Stack, model: str, token_ids: range = range(1, 12)) -> Any:
    """The commands that prefill and decode were sent for it, and the name under which the answer came."""
    prompt = baton_pb2.TokenIds(ids=token_ids)
    sampling = baton_pb2.SamplingParams(max_tokens=2)
    request = baton_pb2.GenerateRequest(model=model, token_ids=prompt, sampling=sampling)
    asked = list(token_ids)  # the readiness probe has other tokens, and may come at any time

    def prefills() -> list[session_pb2.Prefill]:
        return [c.prefill for c in stack.prefill.commands if list(c.prefill.token_ids) == asked]

    before = len(prefills())
    events = [event async for event in stack.stub.Generate(request, timeout=10)]
    await eventually(lambda: len(prefills()) > before)  # an answer of the other worker's may be sooner
    start = next(c.start for c in reversed(stack.decode.commands) if list(c.start.token_ids) == asked)
    return prefills()[-1], start, events[0].started.model


async def test_workers_are_told_which_adapter_a_request_chose(stack: Stack) -> None:
    for model, adapter, answers_as in (("sql", "sql", "sql"), ("tiny", "", "tiny"), ("", "", "tiny")):
        prefill, start, name = await ask(stack, model)
        assert (prefill.adapter, start.adapter, name) == (adapter, adapter, answers_as)


async def test_blocks_of_another_adapter_have_other_names(stack: Stack) -> None:
    first, again = [(await ask(stack, "sql"))[0].block_hashes for _ in range(2)]
    base, chat = [(await ask(stack, model))[0].block_hashes for model in ("tiny", "chat")]
    assert list(first) == list(again)
    assert len(first) == 2
    assert set(first).isdisjoint(base)
    assert set(first).isdisjoint(chat)
    assert set(base).isdisjoint(chat)


async def test_models_are_listed_with_their_adapters(stack: Stack) -> None:
    models = (await stack.stub.ListModels(baton_pb2.ListModelsRequest(), timeout=10)).models
    assert [(model.name, model.parent) for model in models] == [("tiny", ""), ("chat", "tiny"), ("sql", "tiny")]
    got = await stack.stub.GetModel(baton_pb2.GetModelRequest(model="sql"))
    assert got.model == models[2]


@pytest.mark.parametrize("model", ["here", "there", "nowhere"])
async def test_an_adapter_that_not_both_workers_have_is_not_found(stack: Stack, model: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(stack, model)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert model in (caught.value.details() or "")


async def test_status_lists_the_adapters_of_every_worker(stack: Stack) -> None:
    await stack.ready()
    workers = (await stack.status()).workers
    assert [[adapter.name for adapter in each.worker.adapters] for each in workers] == [
        ["sql", "chat", "here"],
        ["chat", "sql", "there"],
    ]


def worker(endpoint: str, role: WorkerRole, *adapters: Adapter, held: bool = True, fingerprint: bytes = b"f") -> Worker:
    model = ModelDescription("tiny", "/m", 10, 10, "float32", 4)
    description = WorkerDescription(endpoint, role, 1, fingerprint, model, 9, 9, adapters)
    return Worker(endpoint, role, held=held, description=description)


def test_only_adapters_that_every_needed_role_has_are_served() -> None:
    workers = [worker("p", PREFILL, SQL), worker("d", DECODE, SQL, CHAT), worker("x", PREFILL, CHAT, held=False)]
    stranger = worker("y", PREFILL, CHAT, fingerprint=b"g")
    assert served_adapters([*workers, stranger], b"f", {PREFILL, DECODE}) == (SQL,)
    assert served_adapters(workers, b"f", {DECODE}) == (CHAT, SQL)


def test_workers_with_other_weights_under_a_name_do_not_make_a_pair() -> None:
    workers = [worker("p", PREFILL, SQL), worker("d", DECODE, OTHER_SQL)]
    assert served_adapters(workers, b"f", {PREFILL, DECODE}) == ()


def test_while_an_adapter_is_replaced_the_one_that_more_workers_have_is_served() -> None:
    old = [worker(f"{role}{number}", role, SQL) for role in (PREFILL, DECODE) for number in range(2)]
    new = [worker(f"new-{role}", role, OTHER_SQL) for role in (PREFILL, DECODE)]
    assert served_adapters([*new, *old], b"f", {PREFILL, DECODE}) == (SQL,)
    assert served_adapters([*new, *old[:1], *old[2:3]], b"f", {PREFILL, DECODE}) == (OTHER_SQL,)
    assert served_adapters(new, b"f", {PREFILL, DECODE}) == (OTHER_SQL,)
