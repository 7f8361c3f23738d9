"""Rows of the GPU table: prefill and decode workers on one GPU, with this process as their router."""

import asyncio
import importlib
import os
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from baton.lab.benchmarks.gpu.drawn import write_checkpoint
from baton.lab.benchmarks.gpu.row import AbsentError, Figure, GpuRow, Setting, at_most, copy_bytes_per_s
from baton.lab.benchmarks.transfer.worker_pair import (
    BLOCK_TOKENS,
    PairAnswer,
    PairSession,
    StartedWorker,
    WorkerPair,
    worker_process,
)
from baton.launch.process_plan import GPU_CHUNK_TOKENS, PREFILL_GPU_PERCENT

WARM_UP_ROUNDS = 3
STOP_S = 10.0  # time limit for the exit of idle workers
SHARED_GPU = {"prefill": {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(PREFILL_GPU_PERCENT)}}
"""Environment of workers on one GPU by their role, as `baton up` starts them."""


def require_packages() -> None:
    try:
        for role in ("prefill", "decode"):
            importlib.import_module(f"baton.{role}_worker.role")
    except ImportError as error:
        raise AbsentError(f"workers need packages that are missing: {error}") from error


def with_workers(
    setting: Setting,
    roles: tuple[str, ...],
    measure: Callable[[WorkerPair], Awaitable[Any]],
    model: Path,
    dtype: str = "bfloat16",
    transport: str | None = None,
    chunk_tokens: int = 2048,
    environments: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> Any:
    """Start workers, run `measure` on them and return its result. `roles`: decode first. `transport`: CUDA IPC by
    default. `environments`: additional variables by role.

    Raises: RuntimeError if a worker ends.
    """

    async def run(started: list[StartedWorker]) -> Any:
        async with AsyncExitStack() as sessions:
            joined = [await sessions.enter_async_context(PairSession(each.endpoint)) for each in started]
            return await measure(WorkerPair(joined[0], joined[1] if len(joined) > 1 else None))

    async def watched(started: list[StartedWorker]) -> Any:
        running, watching = asyncio.create_task(run(started)), asyncio.create_task(_first_to_end(started))
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        for task in (running, watching):
            if not task.done():
                task.cancel()
        return watching.result() if watching.done() and not running.done() else await running

    flags: tuple[str, ...] = ("--dtype", dtype, "--transport", transport or setting.size("cuda_ipc", "auto"))
    flags += ("--device", str(setting.device), "--kv-memory", setting.size("8GiB", "16MiB"))
    flags += ("--chunk-tokens", str(setting.size(chunk_tokens, 64)))
    with ExitStack() as undo:
        started = []
        for role in roles:
            worker = worker_process(role, model, *flags, environment=environments.get(role, {}), stop_s=STOP_S)
            started.append(undo.enter_context(worker))
        return asyncio.run(watched(started))


async def _first_to_end(started: list[StartedWorker]) -> None:
    """Wait for the first worker to end. Raises: RuntimeError."""
    while True:
        for each in started:
            if (code := each.process.poll()) is not None:
                raise RuntimeError(f"the {each.role} worker exited with {code}: see its log above")
        await asyncio.sleep(0.1)


def hand_over(setting: Setting) -> list[Figure]:
    require_packages()
    tokens, rounds = setting.size((4096, 21), (100, 1))

    async def measure(workers: WorkerPair) -> tuple[list[float], list[PairAnswer]]:
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


class PairLoad(NamedTuple):
    answers: int
    answer_tokens: int
    prompt_tokens: int
    in_flight: int  # concurrent prompts, enough to saturate the GPU
    rounds: int


class Beside(NamedTuple):
    p99_s: float  # p99 time between tokens of running answers
    prompts: int  # number of prompts computed during these answers


async def _beside_prompts(workers: WorkerPair, load: PairLoad, in_flight: int) -> Beside:
    asked = [workers.answer(BLOCK_TOKENS, load.answer_tokens) for _ in range(load.answers)]
    running, prompts = [asyncio.create_task(answer) for answer in asked], 0

    async def ask() -> None:
        nonlocal prompts
        while not all(task.done() for task in running):
            await workers.answer(load.prompt_tokens, 2)
            prompts += 1

    await asyncio.gather(*running, *(ask() for _ in range(in_flight)))
    gaps = [later - earlier for task in running for earlier, later in pairwise(task.result().times)]
    return Beside(sorted(gaps)[int(0.99 * (len(gaps) - 1))], prompts)


def said_mps() -> str:
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    is_here = (Path(folder) / "control").exists()
    return f"MPS, prefill {PREFILL_GPU_PERCENT} %" if is_here else "no MPS: they take turns"


def one_gpu(setting: Setting) -> list[Figure]:
    """Measure the time between tokens, alternately without prompts and with prompts that saturate the GPU."""
    require_packages()
    load = setting.size(PairLoad(16, 512, 4096, 4, 3), PairLoad(2, 6, 100, 2, 1))

    async def apart(workers: WorkerPair) -> tuple[list[tuple[Beside, Beside]], str]:
        first = await workers.answer(load.prompt_tokens, 2)
        await _beside_prompts(workers, load._replace(answer_tokens=load.answer_tokens // 2), load.in_flight)
        rounds = []
        for _ in range(load.rounds):
            quiet = await _beside_prompts(workers, load, 0)
            rounds.append((quiet, await _beside_prompts(workers, load, load.in_flight)))
        return rounds, first.landed.transport

    async def together(workers: WorkerPair) -> Beside:
        await workers.answer(load.prompt_tokens, 2)
        return await _beside_prompts(workers, load, load.in_flight)

    shared: dict[str, Any] = {"transport": "auto", "chunk_tokens": GPU_CHUNK_TOKENS, "environments": SHARED_GPU}
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder), "qwen0.6b", setting.device, setting.dry)
        rounds, transport = with_workers(setting, ("decode", "prefill"), apart, model, **shared)
        colocated: Beside = with_workers(setting, ("decode",), together, model, **shared)
    quiet_s, busy_s = (statistics.median(each.p99_s for each in side) for side in zip(*rounds, strict=True))
    ratio = statistics.median(busy.p99_s / quiet.p99_s for quiet, busy in rounds)
    prompts = sum(busy.prompts for _, busy in rounds)
    chunked = f"colocated, chunked: {colocated.p99_s * 1e3:.2f} ms, {colocated.prompts} prompts"
    return [
        Figure("p99 saturated / quiet", ratio, "x", at_most(1.15), f"{said_mps()}; quiet {quiet_s * 1e3:.2f} ms"),
        Figure("p99 between tokens", busy_s * 1e3, "ms", None, f"{prompts} prompts, {transport}"),
        Figure("p99 between tokens", busy_s / colocated.p99_s, "x colocated", at_most(0.6), chunked),
    ]


ROWS = (GpuRow("hand_over", hand_over), GpuRow("one_gpu", one_gpu))
