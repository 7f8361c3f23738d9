"""Simulation of one cluster under one load in virtual time: when each call receives its tokens.

Router, workers, schedulers and transfers are the real code, except for what `lab/simulation/seams.py` replaces. The
model computes nothing, and its steps take as long as measured.
"""

import asyncio
import gc
import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

from baton.client import AsyncBatonClient
from baton.client.errors import BatonClientError
from baton.client.requests import GenerateOptions
from baton.client.retry import RetryPolicy
from baton.client.types import Delta
from baton.decode_worker.config import DecodeConfig
from baton.elastic_worker.config import ElasticConfig
from baton.engine.scheduler.drafts import PerSequenceDrafter
from baton.lab.simulation.files.disk import SimulatedDisk
from baton.lab.simulation.host import Pace, SharedMemories, SimulatedHost, SimulatedRunner, prepared_model
from baton.lab.simulation.model import KvNumbers
from baton.lab.simulation.network.calls import Internet
from baton.lab.simulation.network.links import Network
from baton.lab.simulation.network.loop import SimulatedLoop, SimulatedProcess, spawn
from baton.lab.simulation.processes import Factory, SimulatedMachine, WorkerShape, worker_record
from baton.lab.simulation.redis import SimulatedRedis
from baton.lab.simulation.seams import installed
from baton.lab.sizing.costs import Overheads, StepCosts
from baton.lab.sizing.runner import CostRunner, TimedPullThread
from baton.prefill_worker.config import PrefillConfig
from baton.process.registry.worker_record import WorkerRecord, WorkerRole
from baton.router.process import RouterProcess
from baton.router.trace.report import RequestReport
from baton.worker.config import REPORT_PERIOD_S
from baton.worker.transfer.reader import CONFIRM_PERIOD_S

READY_S = 30.0
SETTLE_S = 1.5  # virtual time until all workers are connected to each other
LOOK_S = 0.25
JITTER = 0.3  # largest extra delay of a message, as a fraction of the usual delay; most are much smaller


Decode = TypeVar("Decode", bound=DecodeConfig)
CostsOf = Callable[[WorkerRole], StepCosts]


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """Workers of each role and their settings, which are the flags of `baton up` and of workers."""

    prefill: int
    decode: int
    kv_tokens: int = 100_000  # size of one worker's KV pool
    context_tokens: int = 32_768
    max_sequences: int = 64
    chunk_tokens: int = 512
    tail_tokens: int = 64
    block_tokens: int = 32
    decode_chunk_tokens: int = 0  # of decode workers; 0: chunk_tokens
    tbt_s: float | None = None  # TBT objective of decode workers, 0: none; None: the default
    spare: int = 0  # further workers of each role, which do not run at first
    elastic: bool = False  # workers change their role
    report_s: float = REPORT_PERIOD_S

    def __str__(self) -> str:
        return f"{self.prefill}P+{self.decode}D"


@dataclass(frozen=True, slots=True)
class SizingCall:
    """Request to the simulated router. `prompt`: one byte for each token id."""

    at_s: float
    prompt: bytes
    answer_tokens: int
    request_id: str = ""  # empty: the router chooses it
    priority: int = 0


@dataclass(slots=True)
class CallResult:
    """Call as its client saw it. `pieces_s`: seconds from sending to each piece. `error`: empty on success."""

    sent_s: float  # seconds since the start of the load
    pieces_s: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = "it was not sent"

    @property
    def ttft_s(self) -> float:
        return self.pieces_s[0]

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.pieces_s, self.pieces_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float:
        """Return the mean time per token after the first; 0 if there is only one."""
        return (self.pieces_s[-1] - self.pieces_s[0]) / (self.tokens - 1) if self.tokens > 1 else 0.0


class CostFactory(Factory):
    """Creates workers that compute nothing and take as long as the measured curves say."""

    def __init__(self, *arguments: Any, costs_of: CostsOf, overheads: Overheads, cluster: ClusterShape) -> None:
        super().__init__(*arguments)
        self._costs_of, self._overheads, self._cluster = costs_of, overheads, cluster
        self._prepared_model = prepared_model(
            cluster.kv_tokens // cluster.block_tokens, cluster.block_tokens, cluster.context_tokens
        )

    def _host(self, name: str) -> SimulatedHost:
        costs = self._costs_of(WorkerRole(name.partition("-")[0]))

        def runner(numbers: KvNumbers) -> SimulatedRunner:
            return CostRunner(self._loop, self._draw, numbers, costs, self._overheads.step_s)

        return SimulatedHost(self._prepared_model, self._memories, runner)

    def _pulls(self, host: SimulatedHost) -> TimedPullThread:
        return TimedPullThread(self._draw, self._overheads, self._cluster.block_tokens)

    def _prefill_config(self, name: str) -> PrefillConfig:
        cluster = self._cluster
        return super()._prefill_config(name).but(tail_tokens=cluster.tail_tokens, report_period_s=cluster.report_s)

    def _decode_config(self, name: str) -> DecodeConfig:
        return self._of_decode(super()._decode_config(name))

    def _elastic_config(self, name: str) -> ElasticConfig:
        return self._of_decode(super()._elastic_config(name)).but(tail_tokens=self._cluster.tail_tokens)

    def _of_decode(self, config: Decode) -> Decode:
        cluster = self._cluster
        chunk_tokens = cluster.decode_chunk_tokens or cluster.chunk_tokens
        config = config.but(chunk_tokens=chunk_tokens, report_period_s=cluster.report_s)
        if cluster.tbt_s is None:
            return config
        return config.but(strict_tbt=True) if not cluster.tbt_s else config.but(tbt_slo_ms=1e3 * cluster.tbt_s)


def _worker_shape(cluster: ClusterShape, overheads: Overheads) -> WorkerShape:
    return WorkerShape(
        total_blocks=cluster.kv_tokens // cluster.block_tokens,
        block_tokens=cluster.block_tokens,
        chunk_tokens=cluster.chunk_tokens,
        max_sequences=cluster.max_sequences,
        swap_blocks=0,
        pace=Pace(0.0, 0.0, 0.0),
        copy_s=overheads.copy_s,
        transport="auto",
        checksum_share=0.0,
        announced=False,
        kv_check_share=0.0,
        tier=None,
        right_drafts=None,
    )


class SimulatedCluster:
    """Simulated cluster for one load. Its processes run only within `run`."""

    def __init__(
        self,
        cluster: ClusterShape,
        costs_of: CostsOf,
        overheads: Overheads,
        seed: int,
        router_flags: tuple[str, ...] = (),
        on_ready: Callable[[RouterProcess], None] = lambda router: None,
    ) -> None:
        """Build the processes. `on_ready` is called with the router before the load begins."""
        self._on_ready = on_ready
        self.reports: tuple[RequestReport, ...] = ()
        """The router's reports of the newest completed requests, once the load is over."""
        self._draw = draw = random.Random(seed)
        self.loop = loop = SimulatedLoop(random.Random(draw.random()))
        network = Network(loop, random.Random(draw.random()), overheads.message_s, overheads.message_s * JITTER)
        self._internet = Internet(loop, network)
        self._memories = SharedMemories()
        self._redis = SimulatedRedis(loop, random.Random(draw.random()))
        self._disk = SimulatedDisk(random.Random(draw.random()), 1 << 30)
        self._overheads = overheads
        factory = CostFactory(
            loop,
            self._internet,
            self._memories,
            self._disk,
            random.Random(draw.random()),
            _worker_shape(cluster, overheads),
            costs_of=costs_of,
            overheads=overheads,
            cluster=cluster,
        )
        counts = {WorkerRole.PREFILL: cluster.prefill, WorkerRole.DECODE: cluster.decode}
        records = {
            role: [worker_record(f"{role}-{n}", role) for n in range(count + cluster.spare)]
            for role, count in counts.items()
        }
        self.workers = {
            role: [_machine(factory, record, cluster.elastic) for record in of_role]
            for role, of_role in records.items()
        }
        self._first = [machine for role, count in counts.items() for machine in self.workers[role][:count]]
        self._router = factory.machine(
            "router", factory.router(tuple(chain.from_iterable(records.values())), router_flags)
        )
        self._client = SimulatedProcess("client")

    def run(self, calls: Sequence[SizingCall], on_done: Callable[[], object] = lambda: None) -> list[CallResult]:
        """Run all calls and return their results in the same order. May be called once."""
        with self._surroundings():
            try:
                return self.loop.run_until_complete(self._live(calls, on_done))
            finally:
                self.loop.set_exception_handler(lambda loop, context: None)
                self.loop.forget()
                self.loop.close()

    def _surroundings(self) -> Any:
        return installed(
            self.loop,
            self._internet,
            self._memories,
            self._redis,
            self._disk,
            random.Random(self._draw.random()),
            random.Random(self._draw.random()),
            PerSequenceDrafter(_no_drafter),
            _stalled,
            CONFIRM_PERIOD_S,
        )

    async def _live(self, calls: Sequence[SizingCall], on_done: Callable[[], object]) -> list[CallResult]:
        for machine in (*self._first, self._router):
            machine.start()
        until_s = self.loop.time() + READY_S
        while not _is_ready(self._router):
            if self.loop.time() > until_s:
                raise RuntimeError(f"the simulated router was not ready after {READY_S:g} s of virtual time")
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(SETTLE_S)
        router = self._router.life.router if self._router.life is not None else None
        if router is None:
            raise RuntimeError("the simulated router has ended")
        self._on_ready(router)
        client = self._client.context.run(
            AsyncBatonClient, [self._router.endpoint], timeout_s=3600.0, retry=RetryPolicy(attempts=1)
        )
        answers = [CallResult(call.at_s) for call in calls]
        tasks = [
            spawn(self.loop, self._client, self._ask(client, call, answered, on_done), "call")
            for call, answered in zip(calls, answers, strict=True)
        ]
        await asyncio.gather(*tasks)
        await asyncio.sleep(LOOK_S)  # reports are generated after the answers
        self.reports = tuple(router.tracer.recent.newest())
        return answers

    async def _ask(
        self, client: AsyncBatonClient, call: SizingCall, answered: CallResult, on_done: Callable[[], object]
    ) -> None:
        loop = self.loop
        await asyncio.sleep(call.at_s)
        sent_s = loop.time()
        options: GenerateOptions = {"max_tokens": call.answer_tokens, "temperature": 0.0, "ignore_eos": True}
        options |= {"request_id": call.request_id, "priority": call.priority}
        answer = client.generate(tuple(call.prompt), **options)
        try:
            async with aclosing(answer) as events:
                async for event in events:
                    if isinstance(event, Delta) and event.token_ids:
                        answered.pieces_s.append(loop.time() - sent_s)
                        answered.tokens += len(event.token_ids)
            answered.error = "" if answered.tokens else "the answer had no tokens"
        except BatonClientError as error:
            answered.error = error.reason or error.code.name
        on_done()


def _machine(factory: Factory, record: WorkerRecord, is_elastic: bool) -> SimulatedMachine:
    begin = factory.prefill if record.role is WorkerRole.PREFILL else factory.decode
    return factory.machine(record.worker_id, factory.elastic if is_elastic else begin)


def _is_ready(router: SimulatedMachine) -> bool:
    return router.life is not None and router.life.router is not None and router.life.router.readiness.ready


def _no_drafter() -> Any:
    raise RuntimeError("a simulated worker asked for a drafter, but sizing runs without speculation")


def _stalled(what: str, still_s: float) -> None:
    raise RuntimeError(f"the simulated {what} made no progress for {still_s:.1f} s")


def run_cluster(
    cluster: ClusterShape,
    costs: StepCosts,
    overheads: Overheads,
    calls: Sequence[SizingCall],
    seed: int,
    on_done: Callable[[], object] = lambda: None,
) -> list[CallResult]:
    """Run calls on a simulated cluster; `on_done` is called after each. Raises: RuntimeError if it gets stuck."""
    with quiet():
        return SimulatedCluster(cluster, lambda role: costs, overheads, seed).run(calls, on_done)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the logs of the simulated processes, and close their objects."""
    silenced, collects, hook = logging.root.manager.disable, gc.isenabled(), sys.unraisablehook
    logging.disable()
    gc.disable()
    try:
        yield
    finally:
        sys.unraisablehook = lambda unraisable: None
        gc.collect()
        sys.unraisablehook = hook
        logging.disable(silenced)
        if collects:
            gc.enable()
