"""`baton bench isolation`: the effect of prompts on running answers. Decode has a core of its own; router,
Redis, prefill and the client share another. Rounds are interleaved, and each starts every server anew.
"""

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from baton.benchmarks.isolation.figures import Figures, Objectives, figures_of
from baton.benchmarks.isolation.load import Load, Phase, run_phase
from baton.benchmarks.isolation.report import Report, as_json, as_picture, as_table
from baton.benchmarks.isolation.stack import (
    RunningProgram,
    ThreadTimes,
    baton_up,
    floor_program,
    read_steps,
    vllm_server,
    vllm_serves,
)
from baton.benchmarks.serve.load import Target
from baton.benchmarks.serve.targets import DEFAULT_VOCAB_SIZE, make_target
from baton.client import AsyncAdminClient, BatonClientError
from baton.launch.errors import CommandFailed
from baton.launch.model_source import ModelSource, find_model
from baton.launch.paths import ROOT
from baton.launch.process_plan import PREFILL_NICE
from baton.service.affinity import pin_process
from baton.service.registry.redis_server import free_port

START_TIMEOUT_S, VLLM_START_TIMEOUT_S, FLOOR_START_TIMEOUT_S = 180.0, 600.0, 120.0
CHUNK_ROWS = 512  # tokens of a prefill step, as `baton up` has it


class Variant(StrEnum):
    SPLIT = "1p1d"
    COLOCATED = "colocated"
    VLLM = "vllm"


WORKERS = {Variant.SPLIT: 2, Variant.COLOCATED: 1}
PHASES = {
    Variant.SPLIT: (Phase.QUIET, Phase.PACED, Phase.SATURATED, Phase.FLOOR),
    Variant.COLOCATED: (Phase.QUIET, Phase.PACED, Phase.SATURATED),
    Variant.VLLM: (Phase.QUIET, Phase.PACED, Phase.SATURATED),
}


@dataclass(frozen=True, slots=True)
class IsolationOptions:
    model: str | None  # folder or hub id; None: the demo model
    quantize: str
    variants: tuple[Variant, ...]
    rounds: int
    load: Load
    objectives: Objectives
    vllm_python: Path | None
    picture: Path | None
    up_flags: tuple[str, ...]  # more of them


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that runs. Values that only a worker of ours reports are None for others."""

    target: Target
    threads: ThreadTimes | None  # of the process that decodes
    steps: Path | None


def run_isolation_bench(options: IsolationOptions, json_wanted: bool) -> int:
    """Raises: CommandFailed."""
    cores = tuple(sorted(os.sched_getaffinity(0)))[:2]
    if len(cores) < 2:
        raise CommandFailed("two cores are needed: one for decode, one for everything else")
    if Variant.VLLM in options.variants and options.vllm_python is None:
        raise CommandFailed("--variants vllm needs --vllm-python")
    pin_process(frozenset(cores[-1:]))  # the client's place is beside the prefill worker
    with tempfile.TemporaryDirectory(prefix="baton-isolation-") as scratch:
        source = find_model(options.model, ROOT, Path(scratch))
        bench = _Bench(options, source, cores, Path(scratch))
        rounds = asyncio.run(bench.run())
    report = Report(source.name, options.quantize, cores, options.load, options.objectives, rounds)
    print(json.dumps(as_json(report)) if json_wanted else as_table(report))
    if options.picture is not None:
        options.picture.write_text(as_picture(report))
    return 0


def phases_of_round(variant: Variant, number: int) -> Sequence[Phase]:
    """Each round begins with another phase, so that none always comes first."""
    phases = PHASES[variant]
    first = number % len(phases)
    return (*phases[first:], *phases[:first])


class _Bench:
    def __init__(self, options: IsolationOptions, source: ModelSource, cores: tuple[int, ...], scratch: Path) -> None:
        self._options = options
        self._source = source
        self._cores = cores
        self._scratch = scratch

    async def run(self) -> dict[str, dict[Phase, list[Figures]]]:
        rounds: dict[str, dict[Phase, list[Figures]]] = {
            variant: {phase: [] for phase in PHASES[variant]} for variant in self._options.variants
        }
        for number in range(self._options.rounds):
            for variant in self._options.variants:
                async with self._serving(variant, number) as serving:
                    for phase in phases_of_round(variant, number):
                        rounds[variant][phase].append(await self._measure(serving, phase, seed=number))
        return rounds

    async def _measure(self, serving: Serving, phase: Phase, seed: int) -> Figures:
        if phase is Phase.FLOOR:
            ready = self._scratch / f"floor-{seed}"
            flags = ["--model", str(self._source.folder), "--quantize", self._options.quantize]
            flags += ["--rows", str(CHUNK_ROWS), "--nice", str(PREFILL_NICE), "--ready", str(ready)]
            program = floor_program(flags, self._cores[-1], self._scratch)
            async with RunningProgram(program) as floor:
                await floor.wait_until(lambda: _exists(ready), FLOOR_START_TIMEOUT_S)
                return await self._figures(serving, phase, seed)
        return await self._figures(serving, phase, seed)

    async def _figures(self, serving: Serving, phase: Phase, seed: int) -> Figures:
        threads = serving.threads
        on_window = (lambda: None) if threads is None else threads.look
        vocab_size = await serving.target.prepare() or DEFAULT_VOCAB_SIZE
        log = await run_phase(serving.target, self._options.load, phase, seed, vocab_size, on_window)
        steps = read_steps(serving.steps) if serving.steps else ()
        return figures_of(log, self._options.objectives, steps, threads.busiest() if threads else None)

    @asynccontextmanager
    async def _serving(self, variant: Variant, number: int) -> AsyncIterator[Serving]:
        name = f"{variant}-{number}"
        if variant is Variant.VLLM:
            async with self._vllm(name) as serving:
                yield serving
            return
        port, steps = free_port(), self._scratch / f"{name}.steps"
        admin_port = free_port()
        flags = ["--model", str(self._source.folder), "--quantize", self._options.quantize]
        flags += ["--port", str(port), "--admin-port", str(admin_port), *self._options.up_flags]
        if variant is Variant.COLOCATED:
            flags.append("--colocated")
        program = baton_up(name, flags, self._cores, self._scratch, steps)
        async with RunningProgram(program) as running:
            async with AsyncAdminClient(f"127.0.0.1:{admin_port}") as admin:
                await running.wait_until(lambda: _is_ready(admin, WORKERS[variant]), START_TIMEOUT_S)
                workers = (await admin.status()).workers
            decode_pid = next(worker.pid for worker in workers if worker.role == "decode")
            target = make_target(f"grpc://127.0.0.1:{port}", "", "", START_TIMEOUT_S, None)
            try:
                yield Serving(target, ThreadTimes(decode_pid), steps)
            finally:
                await target.close()

    @asynccontextmanager
    async def _vllm(self, name: str) -> AsyncIterator[Serving]:
        load, port = self._options.load, free_port()
        longest = max(load.answer_prompt_tokens + load.answer_tokens, load.prompt_tokens + 1)
        python = self._options.vllm_python
        if python is None:
            raise CommandFailed("vLLM's Python is not known")
        log = self._scratch / f"{name}.log"
        program = vllm_server(python, self._source.folder, longest, self._cores, port, log)
        async with RunningProgram(program) as running:
            await running.wait_until(lambda: vllm_serves(port), VLLM_START_TIMEOUT_S)
            target = make_target(f"http://127.0.0.1:{port}/v1", self._source.folder.name, "", START_TIMEOUT_S, None)
            try:
                yield Serving(target, None, None)
            finally:
                await target.close()


async def _is_ready(admin: AsyncAdminClient, workers: int) -> bool:
    try:
        status = await admin.status()
    except BatonClientError:
        return False
    connected = sum(worker.connected for worker in status.workers)
    return status.ready and not status.detail and connected == workers


async def _exists(path: Path) -> bool:
    return await asyncio.to_thread(path.exists)
