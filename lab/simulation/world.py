"""World of one seed: a cluster, its clients and their faults, run to the end and checked."""

import asyncio
import gc
import hashlib
import logging
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from baton.client import AsyncBatonClient
from baton.client.retry import RetryPolicy
from baton.engine.scheduler.drafts import PerSequenceDrafter
from baton.lab.protocol.trace_check import TraceCheck
from baton.lab.simulation.client import SimulatedHistory, SimulatedRequest, ask, draw_requests
from baton.lab.simulation.drafts import SometimesRight
from baton.lab.simulation.faults import (
    OF_FILES,
    Injector,
    SimulatedFault,
    SimulatedFaultKind,
    count_at_end,
    counting,
    draw_faults,
)
from baton.lab.simulation.files.disk import SimulatedDisk
from baton.lab.simulation.files.tier import TierShape
from baton.lab.simulation.host import Pace, SharedMemories
from baton.lab.simulation.invariants import (
    Violation,
    check_all,
    check_cache_contents,
    check_files,
    check_pages,
    check_prompt_blocks,
    check_quiet,
    unexpected_error_logs,
)
from baton.lab.simulation.model import CONTEXT_TOKENS
from baton.lab.simulation.network.calls import Internet
from baton.lab.simulation.network.links import Network
from baton.lab.simulation.network.loop import CURRENT, OutOfTurns, SimulatedLoop, SimulatedProcess, spawn
from baton.lab.simulation.processes import Factory, SimulatedMachine, WorkerShape, worker_record
from baton.lab.simulation.prompt_blocks import PromptBlocks
from baton.lab.simulation.recorder import recording
from baton.lab.simulation.redis import SimulatedRedis
from baton.lab.simulation.seams import installed
from baton.process.registry.worker_record import WorkerRole
from baton.text.block_groups import ONE_GROUP, BlockGroups

KEPT = 120  # number of last events that a report contains


class Trace:
    """Log of events. `show` receives every line; None discards them."""

    def __init__(self, now: Callable[[], float], show: Callable[[str], None] | None = None) -> None:
        self._now = now
        self._show = show
        self._digest = hashlib.sha256()
        self.last: deque[str] = deque(maxlen=KEPT)
        self.error_logs: list[str] = []
        """Log lines of level ERROR and above."""
        self.retried: list[str] = []
        """Routers' log lines of failed attempts that were retried."""

    def note(self, who: str, what: str) -> None:
        line = f"{self._now() - 1000.0:9.4f} {who:<10} {what}"
        self._digest.update(line.encode())
        self.last.append(line)
        if self._show is not None:
            self._show(line)

    def close(self) -> None:
        """Release the references to the world, so that it can be collected."""
        self._now, self._show = _never, None

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()[:16]


def _never() -> float:
    return 0.0


class TraceHandler(logging.Handler):
    """Handler that traces log records as events and collects errors."""

    def __init__(self, trace: Trace, who: Callable[[], str]) -> None:
        super().__init__()
        self._trace = trace
        self._who = who
        self._formatter = logging.Formatter("%(name)s: %(message)s")

    def emit(self, record: logging.LogRecord) -> None:
        who, line = self._who(), self._formatter.format(record)
        if record.levelno >= logging.ERROR:
            self._trace.error_logs.append(f"{who}: {line}")
        else:
            line = line.splitlines()[0]
        if record.name == "baton.router.request.run" and line.endswith("; retrying"):
            self._trace.retried.append(line)
        self._trace.note(who, line)


START_S = 10.0  # longest time until the routers are ready
QUIET_S = 16.0  # longest time from the last request until all resources are released (link grace period and lease)
WATCH_S = 0.25
ASKED_AGAIN = 3  # number of requests that are repeated after an eviction or bit flips
LONGEST_DRAIN_S = 60.0  # longest time from the last request to the end of all faults, drains included
LONGEST_S = 400.0  # longest virtual time of all requests


@dataclass(frozen=True, slots=True)
class WorldOptions:
    """Options of a world. `faults`: number of faults; None: the seed draws it. `kinds`: allowed kinds; empty: all."""

    requests: int = 6
    faults: int | None = None
    kinds: tuple[SimulatedFaultKind, ...] = ()


@dataclass(slots=True)
class WorldResult:
    seed: int
    violation: str | None = None
    refusal: str | None = None  # event that the specification of the protocol does not allow
    histories: list[SimulatedHistory] = field(default_factory=list)
    faults: list[SimulatedFault] = field(default_factory=list)
    resumed: int = 0  # number of Resume calls from clients
    virtual_s: float = 0.0
    callbacks: int = 0
    trace: Trace | None = None
    exercised: Counter[str] = field(default_factory=Counter)

    @property
    def found(self) -> str | None:
        """Description of all that is wrong; None if nothing is."""
        refused = None if self.refusal is None else f"refused by the specification: {self.refusal}"
        return "; ".join(filter(None, (self.violation, refused))) or None


def draw_tier(draw: random.Random, kinds: Sequence[SimulatedFaultKind]) -> TierShape | None:
    """Draw the settings of KV files. Half of the worlds get None (no files), never worlds with only file faults."""
    shape = TierShape(draw.choice((24, 200, 2000)), always=draw.random() < 0.9)
    return shape if draw.random() < 0.5 or (kinds and OF_FILES.issuperset(kinds)) else None


def draw_groups(draw: random.Random, block_tokens: int) -> BlockGroups:
    """Draw the layer groups: in a third of the worlds, some layers have a window, shorter or longer than a block."""
    if draw.random() < 2 / 3:
        return ONE_GROUP
    return BlockGroups(draw.choice((1, 2)), draw.choice((1, 3)), draw.choice((1, 5, 12, 20)), block_tokens)


class World:
    """Simulated cluster, clients and faults of one seed."""

    def __init__(self, seed: int, options: WorldOptions, show: Callable[[str], None] | None) -> None:
        self.draw = draw = random.Random(seed)
        self.loop = loop = SimulatedLoop(random.Random(draw.random()))
        self.trace = Trace(loop.time, show)
        self.network = Network(loop, random.Random(draw.random()), draw.choice((2e-4, 1e-3)), draw.choice((1e-3, 0.02)))
        self.internet = Internet(loop, self.network)
        self.memories = SharedMemories()
        self.redis = SimulatedRedis(loop, random.Random(draw.random()))
        self.disk_draw = random.Random(f"disk {seed}")  # own generator: files do not change other draws of a seed
        tier = draw_tier(self.disk_draw, options.kinds)
        self.disk = SimulatedDisk(self.disk_draw, self.disk_draw.choice((1 << 14, 1 << 30)))
        block_tokens, routers = draw.choice((4, 8)), draw.choice((1, 1, 2))
        # Own generator: windows do not change the other draws of a seed.
        groups = draw_groups(random.Random(f"windows {seed}"), block_tokens)
        self.shape = WorkerShape(
            # Each router's share of a worker's blocks must fit the largest request, or no router could place it.
            total_blocks=groups.blocks(int(routers * draw.choice((1.2, 1.2, 2, 4)) * CONTEXT_TOKENS) // block_tokens),
            block_tokens=block_tokens,
            chunk_tokens=draw.choice((16, 32, 64)),
            max_sequences=routers * draw.choice((4, 8, 32)),
            swap_blocks=draw.choice((0, 0, 16)),
            pace=Pace(draw.choice((0.002, 0.01, 0.03)), draw.choice((2e-5, 5e-4)), draw.choice((0.1, 1.0))),
            copy_s=draw.choice((1e-4, 1e-3, 5e-3)),
            transport=draw.choice(("auto", "auto", "grpc")),
            announced=draw.random() < 0.5,
            tier=tier,
            kv_check_share=self.disk_draw.choice((0.0, 0.2, 1.0)),
            right_drafts=draw.choice((None, None, 0.5, 0.95)),
            checksum_share=1.0 if SimulatedFaultKind.FLIP in options.kinds else draw.choice((0.001, 0.2, 1.0)),
            groups=groups,
        )
        self.factory = Factory(loop, self.internet, self.memories, self.disk, random.Random(draw.random()), self.shape)
        prefill = [f"prefill-{index}" for index in range(draw.choice((1, 1, 2)))]
        decode = [f"decode-{index}" for index in range(draw.choice((1, 2, 2)))]
        records = (
            *(worker_record(name, WorkerRole.PREFILL) for name in prefill),
            *(worker_record(name, WorkerRole.DECODE) for name in decode),
        )
        self.prefill = [self.factory.machine(name, self.factory.prefill) for name in prefill]
        self.decode = [self.factory.machine(name, self.factory.decode) for name in decode]
        begin = self.factory.router(records)
        self.routers = [self.factory.machine(f"router-{index}", begin) for index in range(routers)]
        self.clients = SimulatedProcess("client")
        self.mended_s = 0.0  # end of the last fault, in monotonic seconds
        self.span_s = draw.choice((0.3, 1.0, 3.0))
        self.requests = draw_requests(draw, options.requests, self.span_s, CONTEXT_TOKENS // 2)
        self.faults = draw_faults(draw, self, options.faults, options.kinds)
        self.drafter = SometimesRight(random.Random(draw.random()), self.requests, self.shape.right_drafts or 0.0)
        self.injector = Injector(self)
        self.exercised: Counter[str] = Counter()
        self.trace_check = TraceCheck()
        self.prompt_blocks = PromptBlocks()

    @property
    def workers(self) -> list[SimulatedMachine]:
        return [*self.prefill, *self.decode]

    @property
    def machines(self) -> list[SimulatedMachine]:
        return [*self.workers, *self.routers]

    def stalled(self, what: str, still_s: float) -> None:
        """Kill the current process, whose watchdog has fired, and restart it."""
        self.trace.note(self.now_in(), f"watchdog: {what} stalled for {still_s:.1f} s")
        for machine in self.machines:
            if machine.life is not None and machine.life.process is CURRENT.get():
                machine.kill(peers_notice=True)
                self.loop.call_later(1.0, machine.start, context=self.network.process.context)

    def now_in(self) -> str:
        process = CURRENT.get()
        return "-" if process is None else process.name


async def live(world: World, result: WorldResult) -> None:
    """Run a world from start to final checks. Raises: Violation."""
    draw = world.draw
    for machine in draw.sample(world.machines, len(world.machines)):
        machine.start()
        await asyncio.sleep(draw.random() * 0.05)
    await _until(world, lambda: all(_ready(router) for router in world.routers), START_S, "the routers are not ready")
    clients = [_client(world, first) for first in range(len(world.routers))]
    tasks: list[asyncio.Task[None]] = []
    for request in world.requests:
        tasks.append(_ask_later(world, clients, request, result))
    befalling = asyncio.create_task(world.injector.inject_all(world.faults))
    watching = asyncio.create_task(_watch(world))
    await _all_ended(tasks)
    await asyncio.wait([befalling], timeout=LONGEST_DRAIN_S)
    if not befalling.done():
        raise Violation("a draining process did not exit")
    befalling.result()
    await _until(world, lambda: all(_ready(router) for router in world.routers), START_S, "a router is not ready again")
    probes = [_ask_later(world, [client], _probe(world, 1000 + n), result) for n, client in enumerate(clients)]
    await _all_ended(probes)
    await _all_ended(_ask_again(world, clients, result))
    check_all(world, result.histories)
    await _until(world, lambda: check_quiet(world) is None, QUIET_S, lambda: str(check_quiet(world)))
    check_cache_contents(world, result.histories)
    check_files(world, result.histories)
    check_prompt_blocks(world)
    watching.cancel()
    await asyncio.wait([watching])
    if not watching.cancelled():
        watching.result()


def run_seed(seed: int, options: WorldOptions, show: Callable[[str], None] | None = None) -> WorldResult:
    """Simulate one seed. The result has its violation, if any."""
    collects = gc.isenabled()
    gc.disable()  # collections would close dropped coroutines at random times
    result = _run(World(seed, options, show), seed)
    # Collect the world's coroutines now, and ignore their errors: their clean-up must not run in the next world.
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    silenced = logging.root.manager.disable
    logging.disable()
    try:
        gc.collect()
    finally:
        logging.disable(silenced)
        sys.unraisablehook = hook
        if collects:
            gc.enable()
    return result


def _run(world: World, seed: int) -> WorldResult:
    result = WorldResult(seed, faults=world.faults, trace=world.trace, exercised=world.exercised)
    surroundings = installed(
        world.loop,
        world.internet,
        world.memories,
        world.redis,
        world.disk,
        world.disk_draw,
        random.Random(world.draw.random()),
        PerSequenceDrafter(lambda: world.drafter),
        world.stalled,
    )
    with _logging_to(world), surroundings, counting(world.exercised), watching(world):
        try:
            world.loop.run_until_complete(live(world, result))
            if error_logs := unexpected_error_logs(world):
                result.violation = f"an error was logged: {error_logs[0]}"
        except Violation as violation:
            result.violation = "; ".join((str(violation), *world.trace.error_logs[:1]))
        except OutOfTurns as error:
            result.violation = f"unbounded: {error}"
        result.refusal = world.trace_check.refusal
        if result.violation is None and result.refusal is None:
            result.refusal = world.trace_check.left_over()
    world.exercised["steps that the specification allowed"] += world.trace_check.steps
    count_at_end(world, world.exercised)
    world.exercised["innocents held for deadly"] += sum(each.cause == "POISON" for each in result.histories)
    result.resumed = world.internet.made["Resume"]
    result.virtual_s, result.callbacks = world.loop.now_s - 1000.0, world.loop.callbacks
    world.loop.set_exception_handler(lambda loop, context: None)
    world.loop.forget()
    world.loop.close()
    world.trace.close()
    return result


def _ready(router: SimulatedMachine) -> bool:
    return router.life is not None and router.life.router is not None and router.life.router.readiness.ready


def _client(world: World, first: int) -> AsyncBatonClient:
    """Create a client that knows all routers and first tries the one with index `first`."""
    endpoints = [router.endpoint for router in world.routers]
    targets = endpoints[first:] + endpoints[:first]
    return world.clients.context.run(AsyncBatonClient, targets, retry=RetryPolicy(attempts=16))


def _ask_later(
    world: World, clients: list[AsyncBatonClient], request: SimulatedRequest, result: WorldResult
) -> "asyncio.Task[None]":
    history = SimulatedHistory(request)
    result.histories.append(history)

    async def later() -> None:
        await asyncio.sleep(request.at_s)
        world.trace.note("client", f"request {request.number}: {request}")
        await ask(clients, history, world.trace_check)
        world.trace.note("client", f"request {request.number}: {history.end} {history.cause}")

    return spawn(world.loop, world.clients, later(), f"request {request.number}")


def _probe(world: World, number: int) -> SimulatedRequest:
    """Draw a request without cancellation, to be sent after all faults."""
    request = draw_requests(world.draw, 1, 0.0, 40)[0]
    return SimulatedRequest(number, 0.0, request.asked, request.choices, request.logprobs, 30.0, None)


def _ask_again(world: World, clients: list[AsyncBatonClient], result: WorldResult) -> "list[asyncio.Task[None]]":
    """Evict cached blocks or flip bits in them, then send some earlier requests again. Return their tasks."""
    draw = world.disk_draw
    flips = world.shape.kv_check_share == 1.0 and (world.shape.tier is None or draw.random() < 0.5)
    if world.shape.tier is None and not flips:
        return []
    for machine in world.workers:
        host = None if machine.life is None else machine.life.host
        if flips and host is not None:
            host.flip_cached(draw)
        else:
            world.injector.forget(machine)
    again = [
        replace(request, number=2000 + place, at_s=draw.random(), deadline_s=30.0, cancel_after_s=None)
        for place, request in enumerate(draw.sample(world.requests, min(ASKED_AGAIN, len(world.requests))))
    ]
    return [_ask_later(world, clients, request, result) for request in again]


async def _all_ended(tasks: "list[asyncio.Task[None]]") -> None:
    if not tasks:
        return
    ended, pending = await asyncio.wait(tasks, timeout=LONGEST_S)
    for task in ended:
        task.result()
    if pending:
        raise Violation(f"{len(pending)} requests never ended; the first is {next(iter(pending)).get_name()}")


async def _watch(world: World) -> None:
    """Check periodically the invariants that hold at any time. Raises: Violation."""
    while True:
        check_pages(world)
        check_prompt_blocks(world)
        await asyncio.sleep(WATCH_S)


async def _until(
    world: World, condition: Callable[[], bool], longest_s: float, otherwise: str | Callable[[], str]
) -> None:
    deadline_s = world.loop.time() + longest_s
    while not condition():
        if world.loop.time() > deadline_s:
            raise Violation(otherwise if isinstance(otherwise, str) else otherwise())
        await asyncio.sleep(0.25)


@contextmanager
def watching(world: World) -> Iterator[None]:
    """Check the protocol's events and the schedulers' plans inside the block."""
    with recording(world.trace_check), world.prompt_blocks.watching():
        yield


@contextmanager
def _logging_to(world: World) -> Iterator[None]:
    root = logging.getLogger()
    handler = TraceHandler(world.trace, world.now_in)
    level, before = root.level, root.handlers[:]
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers[:] = before
        root.setLevel(level)
