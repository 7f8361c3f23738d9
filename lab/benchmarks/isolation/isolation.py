"""Effect of prompts on running answers: `baton bench isolation`. Decode has its own core; router, Redis, prefill and
the client share another. Variants alternate, and each round restarts the servers.
"""

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.lab.benchmarks.isolation.figures import (
    EngineTime,
    LoadObjectives,
    PhaseFigures,
    Report,
    Step,
    as_json,
    as_picture,
    as_table,
    figures_of,
)
from baton.lab.benchmarks.isolation.load import LoadPhase, PhaseLoad, run_phase
from baton.lab.benchmarks.serve.load import Target
from baton.lab.benchmarks.serve.targets import DEFAULT_VOCAB_SIZE, make_target
from baton.lab.commands.bench_options import IsolationOptions, Variant
from baton.lab.harness.processes import HOST, RunningCluster, RunningProgram, our_program, ports_of
from baton.lab.harness.vllm import is_healthy, vllm_server
from baton.launch import CommandFailed
from baton.launch.model_source import ModelSource, find_model
from baton.launch.paths import ROOT
from baton.launch.process_plan import PREFILL_NICE
from baton.process.affinity import pin_process
from baton.process.registry.redis_server import free_port, free_ports

START_TIMEOUT_S, VLLM_START_TIMEOUT_S, FLOOR_START_TIMEOUT_S = 180.0, 600.0, 120.0
KV_GIB = 1  # vLLM's KV cache, the maximum of `baton up`
CHUNK_ROWS = 512  # tokens of a prefill step, the default of `baton up`


WORKERS = {Variant.SPLIT: 2, Variant.COLOCATED: 1}
PHASES = {
    Variant.SPLIT: (LoadPhase.QUIET, LoadPhase.PACED, LoadPhase.SATURATED, LoadPhase.FLOOR),
    Variant.COLOCATED: (LoadPhase.QUIET, LoadPhase.PACED, LoadPhase.SATURATED),
    Variant.VLLM: (LoadPhase.QUIET, LoadPhase.PACED, LoadPhase.SATURATED),
}


def read_steps(path: Path) -> list[Step]:
    """Read the steps that a decode worker has written, in order."""
    steps = []
    for line in path.read_text().splitlines() if path.exists() else ():
        started, ended, tokens = line.split()
        steps.append(Step(float(started), float(ended), int(tokens)))
    return steps


class CoreTimes:
    """Time that each thread of a process spent on a core, and time that it waited for one (`/proc`, schedstat)."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._looks: list[dict[str, tuple[int, int]]] = []

    def look(self) -> None:
        self._looks.append(self._read())

    def busiest(self) -> EngineTime | None:
        """Return the times of the thread that computed most between the last two samples; None without schedstat."""
        before, after = self._looks[-2:]
        spent = []
        for thread, (on_core, waiting) in after.items():
            core_before, waiting_before = before.get(thread, (0, 0))
            spent.append(EngineTime((on_core - core_before) / 1e9, (waiting - waiting_before) / 1e9))
        return max(spent, key=lambda time: time.on_core, default=None)

    def _read(self) -> dict[str, tuple[int, int]]:
        """Return nanoseconds on a core and nanoseconds of waiting for a core, by thread id."""
        found = {}
        for task in self._tasks.iterdir() if self._tasks.exists() else ():
            try:
                on_core, waiting, _ = (task / "schedstat").read_text().split()
            except (OSError, ValueError):
                continue  # the thread has exited, or the kernel lacks schedstat
            found[task.name] = (int(on_core), int(waiting))
        return found


@dataclass(frozen=True, slots=True)
class Serving:
    """Running server. `threads` and `steps` are None for vLLM."""

    target: Target
    threads: CoreTimes | None  # threads of the decode worker
    steps: Path | None


def run_isolation_bench(options: IsolationOptions) -> int:
    """Run the benchmark and print it. Raises: CommandFailed."""
    variants = options.chosen
    cores = tuple(sorted(os.sched_getaffinity(0)))[:2]
    if len(cores) < 2:
        raise CommandFailed("two cores are needed: one for decode, one for everything else")
    pin_process(frozenset(cores[-1:]))  # the client shares the core of the prefill worker
    load = PhaseLoad(
        options.seconds,
        options.answers,
        options.answer_prompt_tokens,
        options.answer_tokens,
        options.prompt_tokens,
        options.prompts_per_s,
        options.in_flight,
    )
    objectives = LoadObjectives(options.slo_ttft_ms, options.slo_tbt_ms)
    with tempfile.TemporaryDirectory(prefix="baton-isolation-") as scratch:
        source = find_model(options.model, ROOT, Path(scratch))
        bench = _Bench(options, load, objectives, source, cores, Path(scratch))
        rounds = asyncio.run(bench.run(variants))
    report = Report(source.name, options.dtype, options.quantize, cores, load, objectives, rounds)
    print(json.dumps(as_json(report)) if options.json else as_table(report))
    if options.picture is not None:
        options.picture.write_text(as_picture(report))
    return 0


def phases_of_round(variant: Variant, number: int) -> Sequence[LoadPhase]:
    """Return the phases of a round; each round begins with another phase."""
    phases = PHASES[variant]
    first = number % len(phases)
    return (*phases[first:], *phases[:first])


class _Bench:
    def __init__(
        self,
        options: IsolationOptions,
        load: PhaseLoad,
        objectives: LoadObjectives,
        source: ModelSource,
        cores: tuple[int, ...],
        scratch: Path,
    ) -> None:
        self._options, self._load, self._objectives = options, load, objectives
        self._source = source
        self._cores = cores
        self._scratch = scratch

    async def run(self, variants: Sequence[Variant]) -> dict[str, dict[LoadPhase, list[PhaseFigures]]]:
        rounds: dict[str, dict[LoadPhase, list[PhaseFigures]]] = {
            variant: {phase: [] for phase in PHASES[variant]} for variant in variants
        }
        for number in range(self._options.rounds):
            for variant in variants:
                async with self._serving(variant, number) as serving:
                    for phase in phases_of_round(variant, number):
                        rounds[variant][phase].append(await self._measure(serving, phase, seed=number))
        return rounds

    async def _measure(self, serving: Serving, phase: LoadPhase, seed: int) -> PhaseFigures:
        if phase is LoadPhase.FLOOR:
            ready = self._scratch / f"floor-{seed}"
            flags = ["--model", str(self._source.folder), "--dtype", self._options.dtype]
            flags += ["--quantize", self._options.quantize]
            flags += ["--rows", str(CHUNK_ROWS), "--nice", str(PREFILL_NICE), "--ready", str(ready)]
            module = "baton.lab.benchmarks.isolation.floor"
            program = our_program("floor", self._scratch, module, *flags, cores=self._cores[-1:])
            async with RunningProgram(program) as floor:
                await floor.wait_until(lambda: _exists(ready), FLOOR_START_TIMEOUT_S)
                return await self._figures(serving, phase, seed)
        return await self._figures(serving, phase, seed)

    async def _figures(self, serving: Serving, phase: LoadPhase, seed: int) -> PhaseFigures:
        threads = serving.threads
        on_window = (lambda: None) if threads is None else threads.look
        vocab_size = await serving.target.prepare() or DEFAULT_VOCAB_SIZE
        log = await run_phase(serving.target, self._load, phase, seed, vocab_size, on_window)
        steps = read_steps(serving.steps) if serving.steps else ()
        return figures_of(log, self._objectives, steps, threads.busiest() if threads else None)

    @asynccontextmanager
    async def _serving(self, variant: Variant, number: int) -> AsyncIterator[Serving]:
        name = f"{variant}-{number}"
        if variant is Variant.VLLM:
            async with self._vllm(name) as serving:
                yield serving
            return
        public, admin = free_ports(2)
        cluster = RunningCluster(f"{HOST}:{public}", f"{HOST}:{admin}", WORKERS[variant])
        steps = self._scratch / f"{name}.steps"
        flags: tuple[object, ...] = ("up", "--device", "cpu", *ports_of(cluster), "--model", self._source.folder)
        flags += ("--dtype", self._options.dtype, "--quantize", self._options.quantize)
        flags += ("--trace-file", self._scratch / f"{name}.jsonl")
        flags += (*self._options.more_up_flags, *(["--colocated"] if variant is Variant.COLOCATED else []))
        writing = {"BATON_STEP_FILE": str(steps)}  # makes the decode worker write its steps to this file
        program = our_program(name, self._scratch, "baton.cli", *flags, cores=self._cores, environment=writing)
        async with RunningProgram(program) as running:
            await running.wait_until(cluster.is_ready, START_TIMEOUT_S)
            status = await cluster.status()
            decode_pid = next(worker.pid for worker in (status.workers if status else ()) if worker.role == "decode")
            target = make_target(f"grpc://{cluster.target}", "", "", START_TIMEOUT_S, None)
            try:
                yield Serving(target, CoreTimes(decode_pid), steps)
            finally:
                await target.close()

    @asynccontextmanager
    async def _vllm(self, name: str) -> AsyncIterator[Serving]:
        load, port = self._load, free_port()
        longest = max(load.answer_prompt_tokens + load.answer_tokens, load.prompt_tokens + 1)
        python = self._options.vllm_python
        if python is None:
            raise CommandFailed("--variants vllm needs --vllm-python")
        log = self._scratch / f"{name}.log"
        # No prefix cache: prompts are unique.
        flags = ("--max-model-len", str(longest), "--dtype", self._options.dtype, "--no-enable-prefix-caching")
        program = vllm_server(python, self._source.folder, flags, KV_GIB, self._cores, port, log)
        async with RunningProgram(program) as running:
            await running.wait_until(lambda: is_healthy(port), VLLM_START_TIMEOUT_S)
            target = make_target(f"http://127.0.0.1:{port}/v1", self._source.folder.name, "", START_TIMEOUT_S, None)
            try:
                yield Serving(target, None, None)
            finally:
                await target.close()


async def _exists(path: Path) -> bool:
    return await asyncio.to_thread(path.exists)
