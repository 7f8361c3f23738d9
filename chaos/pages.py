"""When workers hold no page any more, as they tell it themselves: past the proxies, and past busy routers."""

import asyncio
import secrets
import time
from collections.abc import Sequence

import grpc

from chaos.stack import HOST, Place
from protos import session_pb2, session_pb2_grpc

POLL_S = 0.002


class PageWatch:
    """From `start` to `stop` a session with each worker in which nothing is asked of it."""

    def __init__(self, workers: Sequence[Place]) -> None:
        self._workers = workers
        self._tasks: list[asyncio.Task[None]] = []
        self._free_since_s: dict[
            str, float
        ] = {}  # by worker; not of those that held pages when they last said something

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._follow(worker)) for worker in self._workers]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def free_since(self, settle_s: float, within_s: float) -> dict[str, float | None]:
        """When each worker last gave its last page back, monotonic; None for one that holds some after `within_s`.

        Returns as soon as all have been free for `settle_s`.
        """
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s and not self._are_free_for(settle_s):  # noqa: ASYNC110 -- time alone ends it
            await asyncio.sleep(POLL_S)
        return {worker.name: self._free_since_s.get(worker.name) for worker in self._workers}

    def _are_free_for(self, settle_s: float) -> bool:
        since_s = self._free_since_s.values()
        return len(since_s) == len(self._workers) and max(since_s) < time.monotonic() - settle_s

    async def _follow(self, worker: Place) -> None:
        async with grpc.aio.insecure_channel(f"{HOST}:{worker.port}") as channel:
            call = session_pb2_grpc.SessionServiceStub(channel).Connect()
            await call.write(session_pb2.ConnectRequest(hello=session_pb2.Hello(router_id=secrets.token_bytes(16))))
            while isinstance(message := await call.read(), session_pb2.ConnectResponse):
                if message.WhichOneof("event") != "report":
                    continue
                if message.report.pages.held:
                    self._free_since_s.pop(worker.name, None)
                else:
                    self._free_since_s.setdefault(worker.name, time.monotonic())
