"""A router's session with single workers, and one prefill and one decode worker whose stages are recorded."""

import argparse
import asyncio
import json
import os
import random
import secrets
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import grpc

from baton import IMPORT_PATH
from baton.generation.block_hash import HashChain
from baton.launch.paths import ROOT
from baton.protos import sampling_pb2, session_pb2, session_pb2_grpc
from baton.service.registry.redis_server import free_port
from baton.service.serving.grpc_options import INTERNAL_CHANNEL_OPTIONS

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


BLOCK_TOKENS = 32
TIME_LEFT_MS = 120_000


@dataclass(frozen=True, slots=True)
class Marks:
    """Of one worker, in order: (name, begin, end)."""

    path: Path

    def since(self, moment: float) -> list[tuple[str, float, float]]:
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [(name, begin, end) for name, begin, end in lines if begin >= moment]


class Pair:
    """Both workers, seen from a router."""

    def __init__(self, prefill: WorkerSession, decode: WorkerSession, marks: tuple[Marks, Marks]) -> None:
        self.prefill, self.decode = prefill, decode
        self.marks = marks
        self._attempts = count(1)
        self._chance = random.Random(1)

    def prompt(self, tokens: int) -> list[int]:
        return [self._chance.randrange(3, self.prefill.worker.model.vocab_size) for _ in range(tokens)]

    def command(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        chain = HashChain(bytes(32), BLOCK_TOKENS)
        return {
            "attempt_id": next(self._attempts),
            "transfer_id": secrets.token_bytes(16),
            "token_ids": prompt,
            "sampling": sampling_pb2.Sampling(max_tokens=max_tokens, n=1, top_p=1.0),
            "block_hashes": chain.first(len(prompt) // BLOCK_TOKENS, prompt),
            "time_left_ms": TIME_LEFT_MS,
        }

    async def compute(self, prompt_tokens: int) -> float:
        """Seconds to the first token of a prompt that nobody pulls."""
        common = self.command(self.prompt(prompt_tokens), max_tokens=1)
        sent = asyncio.get_running_loop().time()
        await self.prefill.send(prefill=session_pb2.Prefill(**common))
        first = await self.prefill.hear("first_step", common["attempt_id"])
        await self.prefill.send(cancel=session_pb2.Cancel(attempt_id=common["attempt_id"]))
        return first.at - sent

    async def hand_over(self, prompt_tokens: int, max_tokens: int) -> tuple[float, Heard]:
        """(seconds to the first token, Landed) of a prompt that decode takes over."""
        common = self.command(self.prompt(prompt_tokens), max_tokens)
        attempt_id = common["attempt_id"]
        sent = asyncio.get_running_loop().time()
        start = session_pb2.Start(**common, prefill_endpoint=self.prefill.endpoint, cache_root=bytes(32))
        await self.decode.send(start=start)
        await self.prefill.send(prefill=session_pb2.Prefill(**common))
        first = await self.prefill.hear("first_step", attempt_id)
        landed = await self.decode.hear("landed", attempt_id)
        await self._rest(attempt_id, max_tokens)
        return first.at - sent, landed

    async def pull_only(self, prompt_tokens: int) -> None:
        """A prompt of one token of answer: decode copies it, and makes nothing of it."""
        common = self.command(self.prompt(prompt_tokens), max_tokens=1)
        await self.decode.send(start=session_pb2.Start(**common, prefill_endpoint=self.prefill.endpoint))
        await self.prefill.send(prefill=session_pb2.Prefill(**common))
        await self.prefill.hear("first_step", common["attempt_id"])

    async def long_answer(self, max_tokens: int, ready: asyncio.Event) -> list[float]:
        """Times of its steps; `ready` is set once it runs."""
        common = self.command(self.prompt(BLOCK_TOKENS), max_tokens)
        start = session_pb2.Start(**common, prefill_endpoint=self.prefill.endpoint)
        await self.decode.send(start=start)
        await self.prefill.send(prefill=session_pb2.Prefill(**common))
        times = []
        for _ in range(max_tokens - 1):
            times.append((await self.decode.hear("output", common["attempt_id"])).at)
            ready.set()
        return times

    async def _rest(self, attempt_id: int, max_tokens: int) -> None:
        for _ in range(max_tokens - 1):
            await self.decode.hear("output", attempt_id)


@contextmanager
def worker(role: str, options: argparse.Namespace, marks: Path, cores: str, transfer: str) -> Iterator[str]:
    """A process, until left; its endpoint."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "baton.benchmarks.transfer.marked_worker",
        role,
        str(marks),
        "--worker-id",
        f"{role}-0",
    ]
    command += ["--port", str(port), "--model", str(options.model), "--cores", cores, "--transfer-cores", transfer]
    command += ["--block-size", str(BLOCK_TOKENS), "--kv-memory", "1GiB", "--log-level", "warning"]
    command += ["--dtype", options.dtype, "--kv-cache-dtype", options.kv_cache_dtype, "--transport", options.transport]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(IMPORT_PATH)}
    process = subprocess.Popen(command, env=environment, cwd=ROOT)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)
