"""The check that workers free their pages uses their reports, and waits for the slowest."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from baton.lab.chaos.stack import PageWatch, ProcessPlace
from baton.protos import report_pb2, session_pb2, session_pb2_grpc
from tests.fixtures.session_client import WAIT_S, eventually

BOUND_S = WAIT_S


class Worker(session_pb2_grpc.SessionServiceServicer):
    """Worker that reports the pages it holds whenever the test changes them."""

    def __init__(self, held: int) -> None:
        self.held: asyncio.Queue[int] = asyncio.Queue()
        self.held.put_nowait(held)

    async def Connect(
        self, request_iterator: AsyncIterator[session_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[session_pb2.ConnectResponse]:
        assert len((await anext(request_iterator)).hello.router_id) == 16
        yield session_pb2.ConnectResponse(welcome=session_pb2.Welcome())
        while True:
            pages = report_pb2.PageCounts(held=await self.held.get())
            yield session_pb2.ConnectResponse(report=report_pb2.Report(pages=pages))


@asynccontextmanager
async def watched(workers: Sequence[Worker]) -> AsyncIterator[PageWatch]:
    places: list[ProcessPlace] = []
    servers: list[grpc.aio.Server] = []
    for at, worker in enumerate(workers):
        own = grpc.aio.server()
        session_pb2_grpc.add_SessionServiceServicer_to_server(worker, own)
        port = own.add_insecure_port("127.0.0.1:0")
        await own.start()
        servers.append(own)
        places.append(ProcessPlace(f"decode-{at}", port, "127.0.0.1"))
    watch = PageWatch(places)
    watch.start()
    try:
        yield watch
    finally:
        await watch.stop()
        await asyncio.gather(*(each.stop(None) for each in servers))


async def test_it_returns_when_the_last_worker_has_given_its_last_page_back() -> None:
    early, late = Worker(0), Worker(3)
    async with watched([early, late]) as watch:
        await eventually(lambda: "decode-0" in watch._free_since_s)
        waiting = asyncio.create_task(watch.free_since(0.01, BOUND_S))
        done, _ = await asyncio.wait({waiting}, timeout=0.2)
        assert not done, "one of them holds pages"
        late.held.put_nowait(0)
        since_s = await waiting
    assert since_s["decode-0"] is not None
    assert since_s["decode-1"] is not None
    assert since_s["decode-0"] < since_s["decode-1"]


async def test_worker_with_an_unfreed_page_is_reported() -> None:
    async with watched([Worker(1)]) as watch:
        assert await watch.free_since(0.01, 0.3) == {"decode-0": None}


async def test_free_time_restarts_after_pages_are_reused() -> None:
    worker = Worker(0)
    async with watched([worker]) as watch:
        first = (await watch.free_since(0.01, BOUND_S))["decode-0"]
        for held in (2, 0):
            worker.held.put_nowait(held)
        async with asyncio.timeout(BOUND_S):
            while (again := (await watch.free_since(0.01, BOUND_S))["decode-0"]) == first:
                await asyncio.sleep(0.005)
    assert first is not None and again is not None and again > first
