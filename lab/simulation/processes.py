"""Simulated routers and workers: the real processes, which can be started, killed, hung and drained."""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, cast

from baton.decode_worker.config import DecodeConfig
from baton.decode_worker.role import DecodeRole
from baton.elastic_worker.config import ElasticConfig
from baton.elastic_worker.elastic import ElasticWorker
from baton.lab.simulation.drafts import MOST_DRAFTED
from baton.lab.simulation.files.disk import SimulatedDisk
from baton.lab.simulation.files.tier import TierShape, make_tier
from baton.lab.simulation.host import (
    FOLDER,
    Pace,
    SharedMemories,
    SimulatedHost,
    SimulatedPullThread,
    SimulatedRunner,
    prepared_model,
)
from baton.lab.simulation.model import KvNumbers
from baton.lab.simulation.network.calls import Internet
from baton.lab.simulation.network.loop import SimulatedLoop, SimulatedProcess, spawn
from baton.lab.simulation.redis import URL
from baton.prefill_worker.config import PrefillConfig
from baton.prefill_worker.role import PrefillRole
from baton.process.config import read_config
from baton.process.registry.membership import Epoch
from baton.process.registry.worker_record import WorkerRecord, WorkerRole
from baton.process.serving.server import Running, serve
from baton.process.telemetry.spans import NoTelemetry
from baton.router.config import RouterConfig
from baton.router.process import RouterProcess
from baton.text.block_groups import ONE_GROUP, BlockGroups
from baton.worker.config import WorkerConfig
from baton.worker.process import WorkerProcess, take_worker_epoch
from baton.worker.role import RoleContext, ServingRole
from baton.worker.served import MakeRole, ServedWorker
from baton.worker.tier.tier import KvTier
from baton.worker.tier.writer import SumListener
from baton.worker.transfer.pool import PoolMemory

PORT = 1
DRAIN_S = 8.0
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """Settings of all workers of a world."""

    total_blocks: int
    block_tokens: int
    chunk_tokens: int
    max_sequences: int
    swap_blocks: int
    pace: Pace
    copy_s: float  # mean duration of a block's copy
    transport: str  # value of the workers' --transport
    checksum_share: float  # share of transferred blocks whose checksum is compared
    announced: bool  # workers announce themselves in Redis; False: routers have a static list
    kv_check_share: float  # share of cached blocks whose checksum is checked
    tier: TierShape | None  # settings of KV files; None: no files
    right_drafts: float | None  # acceptance rate of draft tokens; None: no speculation
    groups: BlockGroups = ONE_GROUP


@dataclass(eq=False)
class SimulatedLife:
    """One process of a machine, from its start to its end."""

    process: SimulatedProcess
    task: "asyncio.Task[Any]"
    running: Running | None = None
    role: ServingRole | None = None  # role of a worker process; None until its engine is constructed
    host: SimulatedHost | None = None
    pulls: SimulatedPullThread | None = None
    router: RouterProcess | None = None


@dataclass(eq=False)
class SimulatedMachine:
    """Machine that runs at most one process at a time, always under the same name."""

    name: str
    begin: Callable[["SimulatedMachine"], Coroutine[Any, Any, int]]
    loop: SimulatedLoop
    internet: Internet
    life: SimulatedLife | None = None
    lives: list[SimulatedLife] = field(default_factory=list)
    exits: list[int | BaseException] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"{self.name}:{PORT}"

    @property
    def is_up(self) -> bool:
        return self.life is not None and not self.life.task.done()

    def start(self) -> None:
        """Start a new process unless one is running."""
        if self.is_up:
            return
        process = SimulatedProcess(self.name)
        self.internet.network.gone.discard(self.name)
        task = spawn(self.loop, process, self.begin(self), self.name)
        self.life = SimulatedLife(process, task)
        self.lives.append(self.life)
        task.add_done_callback(self._ended, context=self.internet.network.process.context)

    def kill(self, peers_notice: bool) -> None:
        """End the process as SIGKILL does. `peers_notice`: its kernel closes its connections."""
        if self.life is None:
            return
        self.loop.kill(self.life.process)
        self.internet.network.process_died(self.life.process, peers_notice)
        self.life = None

    def hang(self) -> None:
        if self.life is not None:
            self.loop.hang(self.life.process)
            self.internet.network.process_hangs(self.life.process)

    def go_on(self) -> None:
        if self.life is not None:
            self.loop.go_on(self.life.process)

    def drain(self) -> None:
        """Drain the process as SIGTERM does."""
        if self.life is not None and self.life.running is not None:
            self.loop.call_soon(self.life.running.on_signal, "SIGTERM", context=self.life.process.context)

    def _ended(self, task: "asyncio.Task[int]") -> None:
        """Record the exit of a process."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("%s ended with %r", self.name, error)
        self.exits.append(error or (task.result() if not task.cancelled() else 1))
        if self.life is not None and self.life.task is task:
            self.loop.kill(self.life.process)
            self.internet.network.process_died(self.life.process, peers_notice=True)
            self.life = None


class Factory:
    """Factory of the processes that machines run."""

    def __init__(
        self,
        loop: SimulatedLoop,
        internet: Internet,
        memories: SharedMemories,
        disk: SimulatedDisk,
        draw: random.Random,
        shape: WorkerShape,
    ) -> None:
        self._loop = loop
        self._internet = internet
        self._memories = memories
        self._disk = disk
        self._draw = draw
        self._shape = shape
        self._epochs = 0

    def machine(self, name: str, begin: Callable[[SimulatedMachine], Coroutine[Any, Any, int]]) -> SimulatedMachine:
        return SimulatedMachine(name, begin, self._loop, self._internet)

    async def prefill(self, machine: SimulatedMachine) -> int:
        config, host = self._prefill_config(machine.name), self._host(machine.name)
        pulls = SimulatedPullThread(self._draw, self._shape.copy_s)
        return await self._serve(machine, config, WorkerRole.PREFILL, partial(PrefillRole, config), host, pulls)

    async def decode(self, machine: SimulatedMachine) -> int:
        config, host = self._decode_config(machine.name), self._host(machine.name)
        pulls = self._pulls(host)
        if machine.life is not None:
            machine.life.pulls = pulls
        return await self._serve(machine, config, WorkerRole.DECODE, partial(DecodeRole, config), host, pulls)

    async def _serve(
        self,
        machine: SimulatedMachine,
        config: WorkerConfig,
        role: WorkerRole,
        make: MakeRole,
        host: SimulatedHost,
        pulls: SimulatedPullThread,
    ) -> int:
        life = machine.life
        if life is None:
            raise RuntimeError(f"{machine.name} runs no process")

        def make_noted(context: RoleContext) -> ServingRole:
            life.role = make(context)
            return life.role

        epoch = await self._epoch(config)
        life.host = host
        worker = ServedWorker(config, host.as_host(), epoch.number, role, {role: make_noted}, cast(Any, pulls))
        return await serve(_Observed(WorkerProcess(config, worker, epoch), life), DRAIN_S)

    async def elastic(self, machine: SimulatedMachine) -> int:
        """Run a worker that changes its role; its name begins with the first one."""
        config, host, life = self._elastic_config(machine.name), self._host(machine.name), machine.life
        if life is None:
            raise RuntimeError(f"{machine.name} runs no process")
        worker = _SimulatedElastic(config, host, await self._epoch(config), self._pulls(host), self._epoch)
        return await serve(_Observed(WorkerProcess(config, worker, worker.first_epoch), life), DRAIN_S)

    def router(
        self, workers: tuple[WorkerRecord, ...], flags: tuple[str, ...] = ()
    ) -> Callable[[SimulatedMachine], Coroutine[Any, Any, int]]:
        async def begin(machine: SimulatedMachine) -> int:
            life = machine.life
            if life is None:
                raise RuntimeError(f"{machine.name} runs no process")
            config = _router_config(machine.name, () if self._shape.announced else workers, flags)
            life.router = RouterProcess(config, NoTelemetry())
            return await serve(_Observed(life.router, life), DRAIN_S)

        return begin

    def _prefill_config(self, name: str) -> PrefillConfig:
        return _prefill_config(name, self._shape)

    def _decode_config(self, name: str) -> DecodeConfig:
        return _decode_config(name, self._shape)

    def _elastic_config(self, name: str) -> ElasticConfig:
        return _elastic_config(name, self._shape)

    def _pulls(self, host: SimulatedHost) -> SimulatedPullThread:
        return SimulatedPullThread(self._draw, self._shape.copy_s, host.numbers)

    def _host(self, name: str) -> SimulatedHost:
        shape = self._shape
        prepared = _prepared(shape.total_blocks, shape.block_tokens, groups=shape.groups)

        def tier(memory: PoolMemory, on_sums: SumListener) -> KvTier | None:
            if shape.tier is None:
                return None
            return make_tier(self._disk, shape.tier, name, memory, shape.block_tokens, shape.groups, on_sums)

        return SimulatedHost(prepared, self._memories, self._runner, tier, shape.kv_check_share, self._draw)

    def _runner(self, numbers: KvNumbers) -> SimulatedRunner:
        return SimulatedRunner(self._loop, self._draw, numbers, self._shape.pace, self._shape.groups)

    async def _epoch(self, config: WorkerConfig) -> Epoch:
        if config.redis_url is not None:
            return await take_worker_epoch(config)
        self._epochs += 1
        return Epoch(self._epochs)


class _SimulatedElastic(ElasticWorker):
    def __init__(
        self,
        config: ElasticConfig,
        host: SimulatedHost,
        epoch: Epoch,
        pulls: SimulatedPullThread,
        next_epoch: Callable[[WorkerConfig], Coroutine[Any, Any, Epoch]],
    ) -> None:
        super().__init__(config, host.prepared, epoch.number, partial(next_epoch, config), host.as_host())
        self.first_epoch = epoch
        self._pulls = cast(Any, pulls)


class _Observed:
    """Wrapper of a process. At the start it stores the process's `Running` in `life`."""

    def __init__(self, process: WorkerProcess | RouterProcess, life: SimulatedLife) -> None:
        self._process = process
        self._life = life
        self.drain, self.stop = process.drain, process.stop

    @property
    def listeners(self) -> Any:
        return self._process.listeners

    async def start(self, running: Running) -> None:
        self._life.running = running
        await self._process.start(running)


_prepared = cache(prepared_model)


@cache
def _base_config(config_type: type[Any], transport: str, *flags: str) -> Any:
    """Return the configuration from which others are derived. Cached, since parsing flags takes long for each world."""
    model = ("--model", str(FOLDER), "--model-name", "simulated", "--port", str(PORT), "--transport", transport)
    return read_config(config_type, ("--worker-id", "named-later", *model, *flags))


def _prefill_config(name: str, shape: WorkerShape) -> PrefillConfig:
    differs = _differs(name, shape) | {"tail_tokens": shape.block_tokens}
    base: PrefillConfig = _base_config(PrefillConfig, shape.transport)
    return base.but(**differs)


def _decode_config(name: str, shape: WorkerShape) -> DecodeConfig:
    base: DecodeConfig = _base_config(DecodeConfig, shape.transport)
    return base.but(**_of_decode(name, shape))


def _elastic_config(name: str, shape: WorkerShape) -> ElasticConfig:
    role = name.partition("-")[0]
    base: ElasticConfig = _base_config(ElasticConfig, shape.transport, "--role", role)
    return base.but(**_of_decode(name, shape), tail_tokens=shape.block_tokens)


def _of_decode(name: str, shape: WorkerShape) -> dict[str, object]:
    swap_bytes = shape.swap_blocks * 8 * shape.block_tokens
    differs = _differs(name, shape) | {"max_sequences": shape.max_sequences, "swap_memory": swap_bytes}
    if shape.right_drafts is not None:
        differs |= {"speculate": "ngram", "speculative_tokens": MOST_DRAFTED}
    return differs


def _differs(name: str, shape: WorkerShape) -> dict[str, object]:
    return {
        "worker_id": name,
        "host": name,
        "block_size": shape.block_tokens,
        "chunk_tokens": shape.chunk_tokens,
        "checksum_share": shape.checksum_share,
        "redis_url": URL if shape.announced else None,
    }


@cache
def _router_config(name: str, workers: tuple[WorkerRecord, ...], flags: tuple[str, ...]) -> RouterConfig:
    listed = ",".join(f"{worker.role}@{worker.endpoint}" for worker in workers)
    ports = ("--host", name, "--port", str(PORT), "--admin-port", str(PORT + 1))
    members = ("--workers", listed) if workers else ("--redis-url", URL)
    return read_config(RouterConfig, (*ports, *members, "--insecure", "--no-reflection", "--planner", "off", *flags))


def worker_record(name: str, role: WorkerRole) -> WorkerRecord:
    return WorkerRecord(name, role, f"{name}:{PORT}", 0, "")
