"""Prefill and decode as two processes on one GPU: real workers, and this process as their router."""

import asyncio
import importlib
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from baton import IMPORT_PATH
from baton.benchmarks.gpu.drawn import write_checkpoint
from baton.benchmarks.gpu.limits import copy_bytes_per_s
from baton.benchmarks.gpu.row import AbsentError, Figure, Row, Setting, at_most
from baton.launch.paths import ROOT

BLOCK_TOKENS = 32
TIME_LEFT_MS = 120_000
WARM_UP_ROUNDS = 3
STOP_S = 30


def require_packages() -> None:
    try:
        for role in ("prefill", "decode"):
            importlib.import_module(f"baton.worker.{role}.role")
    except ImportError as error:
        raise AbsentError(f"the workers cannot be started here: {error}") from error


@dataclass(frozen=True, slots=True)
class Started:
    role: str
    endpoint: str
    process: "subprocess.Popen[bytes]"


@contextmanager
def running_worker(role: str, model: Path, setting: Setting, *flags: str) -> Iterator["Started"]:
    """A process, until left."""
    from baton.service.registry.redis_server import free_port

    port = free_port()
    command = [sys.executable, "-P", "-m", f"baton.{role}_worker", "--worker-id", f"{role}-{port}", "--port", str(port)]
    command += ["--model", str(model), "--device", str(setting.device)]
    command += ["--block-size", str(BLOCK_TOKENS), "--kv-memory", setting.size("8GiB", "16MiB")]
    command += ["--log-level", "warning", "--chunk-tokens", setting.size("2048", "64"), *flags]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(IMPORT_PATH)}, cwd=ROOT)
    try:
        yield Started(role, f"127.0.0.1:{port}", process)
    finally:
        process.terminate()
        process.wait(STOP_S)


@dataclass(frozen=True, slots=True)
class Answered:
    prompt: list[int]
    token_ids: list[int]
    first_s: float  # from sending the prompt to its first token
    times: list[float]  # of the tokens after it, on the monotonic clock
    landed: Any  # what was copied; None where nothing was


class Workers:
    """Requests to a decode worker, whose prompts a prefill worker computes, or itself where there is none."""

    def __init__(self, decode: Any, prefill: Any | None) -> None:
        self._decode, self._prefill = decode, prefill
        self._attempts = count(1)

    async def answer(self, tokens: int, answer_tokens: int, pulled: bool = True) -> Answered:
        """A prompt of that many tokens that nobody has seen. `pulled`: whether decode takes it over."""
        from baton.protos import session_pb2

        common, now = self._command(tokens, answer_tokens), asyncio.get_running_loop().time
        sent, attempt_id = now(), common["attempt_id"]
        if pulled:
            endpoint = "" if self._prefill is None else self._prefill.endpoint
            await self._decode.send(start=session_pb2.Start(**common, prefill_endpoint=endpoint))
        if self._prefill is not None:
            await self._prefill.send(prefill=session_pb2.Prefill(**common))
        first = await (self._prefill or self._decode).hear("first_step", attempt_id)
        token_ids, landed = list(first.event.outputs[0].token_ids), None
        times: list[float] = []
        if not pulled and self._prefill is not None:
            await self._prefill.send(cancel=session_pb2.Cancel(attempt_id=attempt_id))
            return Answered(common["token_ids"], token_ids, first.at - sent, times, landed)
        if self._prefill is not None:
            landed = (await self._decode.hear("landed", attempt_id)).event
        while len(token_ids) < answer_tokens:
            heard = await self._decode.hear("output", attempt_id)
            fresh = heard.event.token_ids[len(token_ids) - heard.event.offset :]  # decode repeats the first
            token_ids += fresh
            times += [heard.at] * len(fresh)
        return Answered(common["token_ids"], token_ids, first.at - sent, times, landed)

    def _command(self, tokens: int, answer_tokens: int) -> dict[str, Any]:
        from baton.protos import sampling_pb2

        vocab = self._decode.worker.model.vocab_size
        return {
            "attempt_id": next(self._attempts),
            "transfer_id": secrets.token_bytes(16),
            "token_ids": [3 + secrets.randbelow(vocab - 3) for _ in range(tokens)],
            "sampling": sampling_pb2.Sampling(max_tokens=answer_tokens, n=1, top_p=1.0),
            "time_left_ms": TIME_LEFT_MS,
        }


def with_workers(
    setting: Setting,
    roles: tuple[str, ...],
    measure: Callable[[Workers], Awaitable[Any]],
    model: Path,
    dtype: str = "bfloat16",
    transport: str | None = None,
) -> Any:
    """What `measure` returns of workers that are started for it. The first role is decode. `transport`: else CUDA IPC.

    Raises: RuntimeError where one of them ends.
    """

    async def run(started: list[Started]) -> Any:
        from baton.benchmarks.transfer.worker_pair import WorkerSession

        async with AsyncExitStack() as sessions:
            joined = [await sessions.enter_async_context(WorkerSession(each.endpoint)) for each in started]
            return await measure(Workers(joined[0], joined[1] if len(joined) > 1 else None))

    async def watched(started: list[Started]) -> Any:
        running, watching = asyncio.create_task(run(started)), asyncio.create_task(_first_to_end(started))
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        for task in (running, watching):
            if not task.done():
                task.cancel()
        return watching.result() if watching.done() and not running.done() else await running

    flags = ("--dtype", dtype, "--transport", transport or setting.size("cuda_ipc", "auto"))
    with ExitStack() as undo:
        started = [undo.enter_context(running_worker(role, model, setting, *flags)) for role in roles]
        return asyncio.run(watched(started))


async def _first_to_end(started: list[Started]) -> None:
    """Raises: RuntimeError as soon as a worker has."""
    while True:
        for each in started:
            if (code := each.process.poll()) is not None:
                raise RuntimeError(f"the {each.role} worker ended with exit code {code}: its log is above")
        await asyncio.sleep(0.1)


def hand_over(setting: Setting) -> list[Figure]:
    require_packages()
    tokens, rounds = setting.size((4096, 21), (100, 1))

    async def measure(workers: Workers) -> tuple[list[float], list[Answered]]:
        alone, pulled = [], []
        for _ in range(WARM_UP_ROUNDS + rounds):
            alone.append((await workers.answer(tokens, 1, pulled=False)).first_s)
            pulled.append(await workers.answer(tokens, 4))
        return alone[WARM_UP_ROUNDS:], pulled[WARM_UP_ROUNDS:]

    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder), "qwen0.6b", setting.device, setting.dry)
        alone, pulled = with_workers(setting, ("decode", "prefill"), measure, model)
    added = statistics.median(one.first_s / base for one, base in zip(pulled, alone, strict=True)) - 1
    landed = pulled[-1].landed
    speed = statistics.median(one.landed.bytes / 1e6 / max(one.landed.copy_ms, 1e-3) for one in pulled)
    limit = f"copy {copy_bytes_per_s(setting) / 2e9:.0f} GB/s, one way"
    said = f"alone {statistics.median(alone) * 1e3:.2f} ms; {landed.transport}"
    return [
        Figure(f"added TTFT, {tokens} tokens", added, "share", at_most(0.01), said),
        Figure("pull", speed, "GB/s", None, limit),
    ]


class Beside(NamedTuple):
    p99_s: float  # between tokens of running answers
    prompts: int  # computed beside them
    transport: str  # that took their KV over; empty where nothing was


async def _beside_prompts(workers: Workers, answers: int, answer_tokens: int, prompt_tokens: int) -> Beside:
    first = await workers.answer(prompt_tokens, 2)
    running = [asyncio.create_task(workers.answer(BLOCK_TOKENS, answer_tokens)) for _ in range(answers)]
    prompts = 0
    while not all(task.done() for task in running):
        await workers.answer(prompt_tokens, 2)
        prompts += 1
    gaps = [later - earlier for task in running for earlier, later in pairwise(task.result().times)]
    transport = "" if first.landed is None else first.landed.transport
    return Beside(sorted(gaps)[int(0.99 * (len(gaps) - 1))], prompts, transport)


def one_gpu(setting: Setting) -> list[Figure]:
    require_packages()
    sizes = setting.size((16, 1024, 4096), (2, 6, 100))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder), "qwen0.6b", setting.device, setting.dry)
        for roles in (("decode",), ("decode", "prefill")):
            found[roles] = with_workers(
                setting, roles, lambda workers: _beside_prompts(workers, *sizes), model, transport="auto"
            )
    together, apart = found.values()
    limit = f"colocated, chunked: {together.p99_s * 1e3:.2f} ms, {together.prompts} prompts"
    return [
        Figure("p99 between tokens", apart.p99_s / together.p99_s, "x colocated", at_most(0.6), limit),
        Figure("p99 between tokens", apart.p99_s * 1e3, "ms", None, f"{apart.prompts} prompts, {apart.transport}"),
    ]


ROWS = (Row("hand_over", hand_over), Row("one_gpu", one_gpu))
