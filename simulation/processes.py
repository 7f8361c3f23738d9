"""Simulated routers and workers: the real processes, started, killed, hung, drained and started again."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from router.config import RouterConfig
from router.process import RouterProcess
from service.config import read_config
from service.server import Running, serve
from service.telemetry import NoTelemetry
from service.worker_process import WorkerProcess
from service.worker_record import WorkerRecord, WorkerRole
from simulation.calls import Internet
from simulation.copying import SharedMemories, SimulatedPullThread
from simulation.host import FOLDER, SimulatedHost, prepared_model
from simulation.loop import SimulatedLoop, SimulatedProcess, spawn
from simulation.model import KvNumbers
from simulation.runner import Pace, SimulatedRunner

PORT = 1
DRAIN_S = 8.0


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """What workers of one role are given."""

    total_blocks: int
    block_tokens: int
    chunk_tokens: int
    max_sequences: int
    swap_blocks: int
    pace: Pace
    copy_s: float  # of a block
    transport: str  # as workers are told


@dataclass(eq=False)
class Life:
    """From a start of a process to its end."""

    process: SimulatedProcess
    task: "asyncio.Task[Any]"
    running: Running | None = None
    worker: PrefillWorker | DecodeWorker | None = None
    host: SimulatedHost | None = None
    router: RouterProcess | None = None


@dataclass(eq=False)
class Machine:
    """A name that processes come and go under; at most one at a time."""

    name: str
    begin: Callable[["Machine"], Coroutine[Any, Any, int]]
    loop: SimulatedLoop
    internet: Internet
    life: Life | None = None
    lives: list[Life] = field(default_factory=list)
    exits: list[int | BaseException] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"{self.name}:{PORT}"

    @property
    def is_up(self) -> bool:
        return self.life is not None and not self.life.task.done()

    def start(self) -> None:
        """Changes nothing where it runs."""
        if self.is_up:
            return
        process = SimulatedProcess(self.name)
        task = spawn(self.loop, process, self.begin(self), self.name)
        self.life = Life(process, task)
        self.lives.append(self.life)
        task.add_done_callback(self._ended, context=self.internet.network.process.context)

    def kill(self, told: bool) -> None:
        """`told`: its peers' kernels hear of it."""
        if self.life is None:
            return
        self.loop.kill(self.life.process)
        self.internet.network.process_died(self.life.process, told)
        self.life = None

    def hang(self) -> None:
        if self.life is not None:
            self.loop.hang(self.life.process)
            self.internet.network.process_hangs(self.life.process)

    def go_on(self) -> None:
        if self.life is not None:
            self.loop.go_on(self.life.process)

    def drain(self) -> None:
        """As SIGTERM does."""
        if self.life is not None and self.life.running is not None:
            self.loop.call_soon(self.life.running.on_signal, "SIGTERM", context=self.life.process.context)

    def _ended(self, task: "asyncio.Task[int]") -> None:
        """By itself: after a drain, or because of a fault."""
        error = None if task.cancelled() else task.exception()
        self.exits.append(error or (task.result() if not task.cancelled() else 1))
        if self.life is not None and self.life.task is task:
            self.loop.kill(self.life.process)
            self.internet.network.process_died(self.life.process, told=True)
            self.life = None


class Factory:
    """Makes what the machines run."""

    def __init__(
        self, loop: SimulatedLoop, internet: Internet, memories: SharedMemories, draw: random.Random, shape: WorkerShape
    ) -> None:
        self._loop = loop
        self._internet = internet
        self._memories = memories
        self._draw = draw
        self._shape = shape
        self._epochs = 0

    def machine(self, name: str, begin: Callable[[Machine], Coroutine[Any, Any, int]]) -> Machine:
        return Machine(name, begin, self._loop, self._internet)

    async def prefill(self, machine: Machine) -> int:
        shape = self._shape
        config = _prefill_config(machine.name, shape.block_tokens, shape.transport, shape.chunk_tokens)
        host = self._host()
        epoch = self._epoch()
        worker = PrefillWorker(config, host.prepared, epoch, host.as_host())
        return await self._serve(machine, worker, host, WorkerProcess(config, worker, epoch))

    async def decode(self, machine: Machine) -> int:
        shape = self._shape
        block_bytes = 8 * shape.block_tokens
        config = _decode_config(
            machine.name,
            shape.block_tokens,
            shape.transport,
            shape.chunk_tokens,
            shape.max_sequences,
            shape.swap_blocks * block_bytes,
        )
        host = self._host()
        epoch = self._epoch()
        pulls: Any = SimulatedPullThread(self._draw, shape.copy_s)
        worker = DecodeWorker(config, host.prepared, epoch, pulls, host.as_host())
        return await self._serve(machine, worker, host, WorkerProcess(config, worker, epoch))

    async def _serve(
        self, machine: Machine, worker: PrefillWorker | DecodeWorker, host: SimulatedHost, process: WorkerProcess
    ) -> int:
        life = machine.life
        if life is None:
            raise RuntimeError("nobody lives here")
        life.worker, life.host = worker, host
        return await serve(_Observed(process, life), DRAIN_S)

    def router(self, workers: tuple[WorkerRecord, ...]) -> Callable[[Machine], Coroutine[Any, Any, int]]:
        async def begin(machine: Machine) -> int:
            life = machine.life
            if life is None:
                raise RuntimeError("nobody lives here")
            life.router = RouterProcess(_router_config(machine.name, workers), NoTelemetry())
            return await serve(_Observed(life.router, life), DRAIN_S)

        return begin

    def _host(self) -> SimulatedHost:
        shape = self._shape
        return SimulatedHost(_prepared(shape.total_blocks, shape.block_tokens), self._memories, self._runner)

    def _runner(self, numbers: KvNumbers) -> SimulatedRunner:
        return SimulatedRunner(self._loop, self._draw, numbers, self._shape.pace)

    def _epoch(self) -> int:
        self._epochs += 1
        return self._epochs


class _Observed:
    """Tells the machine what a process is told when it starts."""

    def __init__(self, process: WorkerProcess | RouterProcess, life: Life) -> None:
        self._process = process
        self._life = life
        self.drain, self.stop = process.drain, process.stop

    @property
    def listeners(self) -> Any:
        return self._process.listeners

    async def start(self, running: Running) -> None:
        self._life.running = running
        await self._process.start(running)


_prepared = lru_cache(maxsize=64)(prepared_model)


@lru_cache(maxsize=64)
def _prefill_config(name: str, block_tokens: int, transport: str, chunk_tokens: int) -> PrefillConfig:
    chunks = ("--chunk-tokens", str(chunk_tokens), "--tail-tokens", str(block_tokens))
    return read_config(PrefillConfig, (*_worker_flags(name, block_tokens, transport), *chunks))


@lru_cache(maxsize=64)
def _decode_config(
    name: str, block_tokens: int, transport: str, chunk_tokens: int, max_sequences: int, swap_bytes: int
) -> DecodeConfig:
    sizes = ("--chunk-tokens", str(chunk_tokens), "--max-sequences", str(max_sequences))
    return read_config(
        DecodeConfig, (*_worker_flags(name, block_tokens, transport), *sizes, "--swap-memory", str(swap_bytes))
    )


def _worker_flags(name: str, block_tokens: int, transport: str) -> tuple[str, ...]:
    model = ("--model", str(FOLDER), "--model-name", "simulated", "--block-size", str(block_tokens))
    return ("--worker-id", name, "--host", name, "--port", str(PORT), "--transport", transport, *model)


@lru_cache(maxsize=64)
def _router_config(name: str, workers: tuple[WorkerRecord, ...]) -> RouterConfig:
    listed = ",".join(f"{worker.role}@{worker.endpoint}" for worker in workers)
    ports = ("--host", name, "--port", str(PORT), "--admin-port", str(PORT + 1))
    return read_config(RouterConfig, (*ports, "--workers", listed, "--insecure", "--no-reflection", "--planner", "off"))


def worker_record(name: str, role: WorkerRole) -> WorkerRecord:
    return WorkerRecord(name, role, f"{name}:{PORT}", 0, "")
