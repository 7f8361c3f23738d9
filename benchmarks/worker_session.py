"""A router's session with one worker process, for benchmarks: commands out, events by kind and attempt, with times."""

import asyncio
import secrets
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import grpc

from protos import session_pb2, session_pb2_grpc
from service.grpc_options import INTERNAL_CHANNEL_OPTIONS

START_S, ANSWER_S = 180.0, 60.0


@dataclass(frozen=True, slots=True)
class Heard:
    at: float  # monotonic seconds
    event: Any


class WorkerSession:
    """`async with` connects, waiting until the worker has loaded."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._heard: defaultdict[tuple[str, int], asyncio.Queue[Heard]] = defaultdict(asyncio.Queue)
        self._sent = self._received = 0
        self._sending = asyncio.Lock()

    async def __aenter__(self) -> "WorkerSession":
        self._channel = grpc.aio.insecure_channel(self.endpoint, INTERNAL_CHANNEL_OPTIONS)
        await asyncio.wait_for(self._channel.channel_ready(), START_S)
        async with asyncio.timeout(START_S):
            while True:
                self._call = session_pb2_grpc.SessionServiceStub(self._channel).Connect()
                hello = session_pb2.Hello(router_id=secrets.token_bytes(16))
                try:
                    await self._call.write(session_pb2.ConnectRequest(hello=hello))
                    self.worker = (await self._call.read()).welcome.worker
                    break
                except grpc.aio.AioRpcError:  # still loading
                    await asyncio.sleep(0.2)
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        self._call.cancel()
        await self._channel.close()

    async def send(self, **command: Any) -> None:
        async with self._sending:  # a call takes one message at a time
            self._sent += 1
            message = session_pb2.ConnectRequest(number=self._sent, acknowledged=self._received, **command)
            await self._call.write(message)

    async def hear(self, kind: str, attempt_id: int) -> Heard:
        """The next event of that kind about an attempt; of a step's outputs, the one output."""
        return await asyncio.wait_for(self._heard[kind, attempt_id].get(), ANSWER_S)

    async def _read(self) -> None:
        while message := await self._call.read():
            at = time.monotonic()
            self._received = max(self._received, message.number)
            kind = message.WhichOneof("event")
            if kind == "failed":
                sys.stderr.write(f"{self.worker.worker_id}: {message.failed.message}\n")
            if kind == "step_outputs":
                for output in message.step_outputs.outputs:
                    self._heard["output", output.attempt_id].put_nowait(Heard(at, output))
            elif kind in ("first_step", "landed"):
                event = getattr(message, kind)
                self._heard[kind, event.attempt_id].put_nowait(Heard(at, event))
