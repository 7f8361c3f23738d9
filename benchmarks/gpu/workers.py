"""Prefill and decode as two processes on one GPU: real workers, and this process as their router."""

import asyncio
import importlib
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from baton.benchmarks.gpu.drawn import write_checkpoint
from baton.benchmarks.gpu.row import AbsentError, Figure, Row, Setting, at_most, copy_bytes_per_s
from baton.benchmarks.transfer.worker_pair import (
    BLOCK_TOKENS,
    Answered,
    Started,
    Workers,
    WorkerSession,
    worker_process,
)

WARM_UP_ROUNDS = 3


def require_packages() -> None:
    try:
        for role in ("prefill", "decode"):
            importlib.import_module(f"baton.worker.{role}.role")
    except ImportError as error:
        raise AbsentError(f"the workers cannot be started here: {error}") from error


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

    flags: tuple[str, ...] = ("--dtype", dtype, "--transport", transport or setting.size("cuda_ipc", "auto"))
    flags += ("--device", str(setting.device), "--kv-memory", setting.size("8GiB", "16MiB"))
    flags += ("--chunk-tokens", setting.size("2048", "64"))
    with ExitStack() as undo:
        started = [undo.enter_context(worker_process(role, model, *flags)) for role in roles]
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
