"""Workers without a router: starts them, opens sessions with them, and sends requests in the router's place."""

import asyncio
import os
import secrets
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc

from baton import IMPORT_PATH
from baton.launch.paths import ROOT
from baton.process.registry.redis_server import free_port
from baton.process.security.tls import InternalTls, open_async_channel
from baton.process.serving.grpc_options import INTERNAL_CHANNEL_OPTIONS
from baton.protos import sampling_pb2, session_pb2, session_pb2_grpc
from baton.text.block_hash import HashChain

START_S, ANSWER_S, STOP_S = 180.0, 300.0, 30.0
BLOCK_TOKENS = 32
TIME_LEFT_MS = 600_000
NO_ROOT = bytes(32)  # start of the hash chain of a request without adapter and cache salt


@dataclass(frozen=True, slots=True)
class StartedWorker:
    role: str
    endpoint: str
    process: "subprocess.Popen[bytes]"


@contextmanager
def worker_process(
    role: str,
    model: Path,
    *flags: object,
    marks: Path | None = None,
    threads: int | None = None,
    host: str = "127.0.0.1",
    within: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    stop_s: float = STOP_S,
) -> Iterator[StartedWorker]:
    """Run a worker until the `with` block is left, then stop it; kill it if that takes longer than `stop_s`.

    `marks`: file for the stages of its hand-overs. `threads`: number of CPU threads. `within`: command prefix that
    runs it on another host, with address `host`. `environment`: variables in addition to those of this process.
    """
    port = free_port()
    module = (
        (f"baton.{role}_worker",) if marks is None else ("baton.lab.benchmarks.transfer.marked_worker", role, marks)
    )
    fixed = (
        "--worker-id",
        f"{role}-{port}",
        "--host",
        host,
        "--port",
        port,
        "--model",
        model,
        "--block-size",
        BLOCK_TOKENS,
    )
    command = [*within, sys.executable, "-P", "-m", *map(str, (*module, *fixed, "--log-level", "warning", *flags))]
    threaded = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    ours = {**os.environ, "PYTHONPATH": str(IMPORT_PATH), **threaded, **environment}
    process = subprocess.Popen(command, env=ours, cwd=ROOT)
    try:
        yield StartedWorker(role, f"{host}:{port}", process)
    finally:
        process.terminate()
        try:
            process.wait(stop_s)
        except subprocess.TimeoutExpired:
            print(f"the {role} worker did not stop in {stop_s:g} s: it is killed", file=sys.stderr, flush=True)
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # a GPU driver may delay the exit of a killed process
                process.wait(stop_s)


@dataclass(frozen=True, slots=True)
class Heard:
    at: float  # monotonic seconds
    event: Any


class PairSession:
    """A router's session with one worker. `async with` connects, waiting until the worker has loaded."""

    def __init__(self, endpoint: str, tls: InternalTls | None = None) -> None:
        self.endpoint = endpoint
        self._tls = tls
        self._heard: defaultdict[tuple[str, int], asyncio.Queue[Heard]] = defaultdict(asyncio.Queue)
        self._sent = self._received = 0
        self._sending = asyncio.Lock()

    async def __aenter__(self) -> "PairSession":
        self._channel = open_async_channel(self.endpoint, INTERNAL_CHANNEL_OPTIONS, self._tls)
        await asyncio.wait_for(self._channel.channel_ready(), START_S)
        async with asyncio.timeout(START_S):
            while True:
                self._call = session_pb2_grpc.SessionServiceStub(self._channel).Connect()
                hello = session_pb2.Hello(router_id=secrets.token_bytes(16))
                try:
                    await self._call.write(session_pb2.ConnectRequest(hello=hello))
                    self.worker = (await self._call.read()).welcome.worker
                    break
                except grpc.aio.AioRpcError:  # the worker is still loading
                    await asyncio.sleep(0.2)
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        self._call.cancel()
        await self._channel.close()

    async def send(self, **command: Any) -> None:
        async with self._sending:  # a gRPC call accepts one write at a time
            self._sent += 1
            message = session_pb2.ConnectRequest(number=self._sent, acknowledged=self._received, **command)
            await self._call.write(message)

    async def hear(self, kind: str, attempt_id: int) -> Heard:
        """Wait for the next event of a kind for an attempt. Kind `output`: the attempt's tokens from one step.

        Raises: RuntimeError if the attempt failed or the session ended; grpc.aio.AioRpcError if the session broke.
        """
        hearing = asyncio.create_task(self._heard[kind, attempt_id].get())
        await asyncio.wait((hearing, self._reader), timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
        if not hearing.done():
            hearing.cancel()
            await asyncio.wait_for(self._reader, 0)
            raise RuntimeError(f"the session with {self.endpoint} has ended")
        heard = hearing.result()
        if isinstance(heard.event, session_pb2.Failed):
            raise RuntimeError(f"{self.worker.worker_id}: {heard.event.message}")
        return heard

    async def prefill(self, command: session_pb2.Prefill) -> Heard:
        """Send a prompt whose KV no worker pulls, wait for its first step, cancel it, and return that step's event."""
        await self.send(prefill=command)
        first = await self.hear("first_step", command.attempt_id)
        await self.send(cancel=session_pb2.Cancel(attempt_id=command.attempt_id))
        return first

    async def _read(self) -> None:
        while message := await self._call.read():
            at = time.monotonic()
            self._received = max(self._received, message.number)
            kind = message.WhichOneof("event")
            if kind == "failed":
                for waited_for in ("first_step", "landed", "output"):
                    self._heard[waited_for, message.failed.attempt_id].put_nowait(Heard(at, message.failed))
            if kind == "step_outputs":
                for output in message.step_outputs.outputs:
                    self._heard["output", output.attempt_id].put_nowait(Heard(at, output))
            elif kind in ("first_step", "landed"):
                event = getattr(message, kind)
                self._heard[kind, event.attempt_id].put_nowait(Heard(at, event))


_attempts = count(1)


def make_command(tokens: list[int], answer_tokens: int, hashed: bool = True) -> dict[str, Any]:
    """Return the fields that the commands Prefill and Start share. `hashed`: add block hashes for the cache."""
    blocks = len(tokens) // BLOCK_TOKENS if hashed else 0
    return {
        "attempt_id": next(_attempts),
        "transfer_id": secrets.token_bytes(16),
        "token_ids": tokens,
        "sampling": sampling_pb2.Sampling(max_tokens=answer_tokens, n=1, top_p=1.0),
        "block_hashes": HashChain(NO_ROOT, BLOCK_TOKENS).first(blocks, tokens),
        "time_left_ms": TIME_LEFT_MS,
    }


def new_prompt(session: PairSession, tokens: int) -> list[int]:
    """Return a prompt that no worker has seen."""
    vocab = session.worker.model.vocab_size
    return [3 + secrets.randbelow(vocab - 3) for _ in range(tokens)]


@dataclass(frozen=True, slots=True)
class PairAnswer:
    prompt: list[int]
    token_ids: list[int]
    first_s: float  # from sending the prompt to its first token
    times: list[float]  # arrival of the later tokens, on the monotonic clock
    landed: Any  # decode worker's report of the finished copy; None if nothing was copied


class WorkerPair:
    """Sends requests to a decode worker; the prefill worker, if there is one, computes prompts."""

    def __init__(self, decode: PairSession, prefill: PairSession | None, hashed: bool = False) -> None:
        self._decode, self._prefill, self._hashed = decode, prefill, hashed

    async def answer(
        self, tokens: int, answer_tokens: int, pulled: bool = True, on_token: Callable[[], None] | None = None
    ) -> PairAnswer:
        """Answer a new random prompt. `pulled`: whether the decode worker pulls the prompt's KV.

        If `answer_tokens` is 1, the decode worker only copies the prompt, and `answer` does not wait for the copy.
        `on_token` is called for each message of the decode worker with tokens.
        """
        common = make_command(new_prompt(self._decode, tokens), answer_tokens, self._hashed)
        attempt_id, sent, landed = common["attempt_id"], time.monotonic(), None
        if not pulled and self._prefill is not None:
            first = await self._prefill.prefill(session_pb2.Prefill(**common))
            return PairAnswer(common["token_ids"], list(first.event.outputs[0].token_ids), first.at - sent, [], landed)
        endpoint = "" if self._prefill is None else self._prefill.endpoint
        root = NO_ROOT if self._hashed else b""
        await self._decode.send(start=session_pb2.Start(**common, prefill_endpoint=endpoint, cache_root=root))
        if self._prefill is not None:
            await self._prefill.send(prefill=session_pb2.Prefill(**common))
        first = await (self._prefill or self._decode).hear("first_step", attempt_id)
        token_ids, times = list(first.event.outputs[0].token_ids), list[float]()
        if self._prefill is not None and answer_tokens > 1:
            landed = (await self._decode.hear("landed", attempt_id)).event
        while len(token_ids) < answer_tokens:
            heard = await self._decode.hear("output", attempt_id)
            fresh = heard.event.token_ids[len(token_ids) - heard.event.offset :]  # decode repeats the first token
            token_ids += fresh
            times += [heard.at] * len(fresh)
            if on_token is not None:
                on_token()
        return PairAnswer(common["token_ids"], token_ids, first.at - sent, times, landed)
