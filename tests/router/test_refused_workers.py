"""A worker that does not fit is refused, with the versions of both named, and harms none of those that fit."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from baton.process.errors import FailedPrecondition
from baton.protos import session_pb2, versions_pb2
from baton.versions import RELEASE
from tests.router.conftest import Stack, text_of
from tests.router.fake_worker import FakePair, FakeWorker, worker_info

LATER = versions_pb2.Versions(release="9.1.0", protocol=9, oldest_protocol=8)
OTHER = versions_pb2.KvContent(checkpoint=b"c" * 32, layout="order=block layers=2 dtype=int8")
SERVED = versions_pb2.KvContent(checkpoint=b"c" * 32, layout="order=block layers=2 dtype=float32")


class RefusingWorker(FakeWorker):
    """A worker that no router of this release may use."""

    async def Connect(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION, "hello.versions: no protocol in common: 9 here, 1 there"
        )
        yield session_pb2.ConnectResponse()


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"no_prefill_worker": "local"}


@asynccontextmanager
async def in_its_place(stack: Stack, before: FakeWorker, other: FakeWorker) -> AsyncIterator[None]:
    """At the endpoint of `before`, as after a restart of its process."""
    port = before.port
    await before.stop()
    await other.start(port)
    try:
        yield
    finally:
        await other.stop()
        await before.start(port)


def of(status: Any, endpoint: str) -> Any:
    return next(worker for worker in status.workers if worker.endpoint == endpoint)


def is_refused(endpoint: str) -> Callable[[Any], bool]:
    return lambda status: bool(of(status, endpoint).refused)


def other_prefill(stack: Stack, **fields: Any) -> FakeWorker:
    info = worker_info(session_pb2.ROLE_PREFILL, stack.prefill.info.model.path, **fields)
    return FakeWorker(info, epoch=2)


async def answers_without(stack: Stack, refused: FakeWorker) -> None:
    """A request is answered, and the refused worker hears nothing of it."""
    async with asyncio.timeout(10):
        assert text_of(await stack.generate("hello", max_tokens=3))
    assert not [command for command in refused.commands if command.WhichOneof("command") == "prefill"]


@pytest.mark.parametrize("role", [session_pb2.ROLE_PREFILL, 7], ids=["other protocol", "unknown role"])
async def test_worker_of_another_protocol_is_listed_as_refused_and_gets_no_requests(stack: Stack, role: int) -> None:
    await stack.ready()
    other = other_prefill(stack, versions=LATER)
    other.info.role = role  # type: ignore[assignment]
    async with in_its_place(stack, stack.prefill, other):
        status = await stack.until(is_refused(other.endpoint))
        worker = of(status, other.endpoint)
        assert "9.1.0" in worker.refused and f"release {RELEASE}" in worker.refused
        assert not worker.connected and "is refused" in status.detail
        await answers_without(stack, other)
    status = await stack.until(lambda status: of(status, stack.prefill.endpoint).connected)
    assert not of(status, stack.prefill.endpoint).refused


async def test_worker_that_refuses_the_router_is_listed_with_its_reason(stack: Stack) -> None:
    await stack.ready()
    other = RefusingWorker(worker_info(session_pb2.ROLE_PREFILL, stack.prefill.info.model.path))
    async with in_its_place(stack, stack.prefill, other):
        status = await stack.until(is_refused(other.endpoint))
        assert "9 here, 1 there" in of(status, other.endpoint).refused
        await answers_without(stack, other)


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        (OTHER, ("KV layout", "dtype=int8", "dtype=float32")),
        (versions_pb2.KvContent(checkpoint=b"d" * 32, layout=SERVED.layout), ("weights", b"d".hex(), b"c".hex())),
        (None, ("fingerprint", b"g".hex(), b"f".hex())),
    ],
    ids=["layout", "weights", "a release that announces neither"],
)
async def test_prefill_worker_with_different_kv_is_not_paired(
    pair: FakePair, stack: Stack, theirs: versions_pb2.KvContent | None, named: tuple[str, ...]
) -> None:
    pair.decode.info.kv.CopyFrom(SERVED)
    await stack.ready()
    other = other_prefill(stack, fingerprint=b"g" * 32, kv=theirs)
    async with in_its_place(stack, stack.prefill, other):
        refused = of(await stack.until(is_refused(other.endpoint)), other.endpoint).refused
        assert all(word in refused for word in named)
        await answers_without(stack, other)


async def test_error_without_a_fitting_worker_names_the_mismatch(stack: Stack) -> None:
    await stack.ready()
    info = worker_info(session_pb2.ROLE_DECODE, stack.decode.info.model.path, versions=LATER)
    other = FakeWorker(info, epoch=2)
    async with in_its_place(stack, stack.decode, other):
        status = await stack.until(lambda status: not status.ready and is_refused(other.endpoint)(status))
        status = await stack.until(lambda status: "9.1.0" in status.detail)
        assert "decode-0 is refused" in status.detail


def test_rejection_reaches_the_router_as_the_expected_code() -> None:
    assert FailedPrecondition("hello.versions", "").code is grpc.StatusCode.FAILED_PRECONDITION
