"""Simulated faults: drawn from the seed, injected, and counted."""

import asyncio
import errno
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from baton.decode_worker.request_table import Adoptions
from baton.engine.scheduler.batch import RunningBatch
from baton.kvtransfer.source import SourceTable
from baton.prefill_worker.fetch import PrefixFetcher
from baton.process.links.hub import LinkHub

if TYPE_CHECKING:
    from baton.lab.simulation.processes import SimulatedMachine
    from baton.lab.simulation.world import World

_CALLS: tuple[tuple[type, str, str], ...] = (
    (Adoptions, "send_again", "answers taken over by another router"),
    (RunningBatch, "preempt", "sequences preempted"),
    (PrefixFetcher, "fetch", "prefixes fetched from another worker"),
    (LinkHub, "end", "sessions ended by a worker"),
    (SourceTable, "confirm", "transfers confirmed"),
    (SourceTable, "drop", "transfers dropped by their source"),
)


@contextmanager
def counting(counts: Counter[str]) -> Iterator[None]:
    """Count the calls of the functions in _CALLS inside the block."""
    with ExitStack() as undo:
        for owner, name, what in _CALLS:
            undo.enter_context(patch.object(owner, name, _counted(getattr(owner, name), counts, what)))
        yield


def _counted(real: Callable[..., Any], counts: Counter[str], what: str) -> Callable[..., Any]:
    def counted(*arguments: Any, **more: Any) -> Any:
        counts[what] += 1
        return real(*arguments, **more)

    return counted


def has_work(machine: "SimulatedMachine") -> bool:
    """Return whether the machine's process has requests in flight."""
    life = machine.life
    if life is None:
        return False
    if life.router is not None:
        return life.router.dispatcher.active > 0
    return life.role is not None and life.role.service.busy


def count_at_end(world: "World", counts: Counter[str]) -> None:
    """Add to `counts` the counters that the network, disk and workers of a world keep."""
    counts["messages held back by a cut"] += world.network.cuts_felt
    counts["calls that a disk failed"] += world.disk.state.failed_calls
    counts["attempts that failed and were followed by another"] += len(world.trace.retried)
    for machine in world.workers:
        for life in machine.lives:
            if life.host is not None:
                counts["computations made not finite"] += life.host.runner.poison.done
                counts["bits of cached blocks flipped"] += life.host.flipped
                if life.host.at_rest is not None:
                    counts["cached blocks compared"] += life.host.at_rest.counters.checked_at_rest_blocks
                    counts["cached blocks that had changed"] += life.host.at_rest.counters.corrupt_at_rest_blocks
                if life.host.tier is not None:
                    in_files = life.host.tier.state
                    counts["bytes written to files"] += in_files.stored_bytes
                    counts["blocks of prompts loaded from files"] += in_files.hit_blocks
                    counts["damaged blocks found in files"] += in_files.corrupt_blocks
                    counts["blocks in files that made room"] += in_files.evicted_blocks
            if life.pulls is not None:
                counts["bits flipped"] += life.pulls.flipped
            loop: Any = getattr(life.role, "loop", None)
            if loop is not None:
                counts["tokens drafted"] += loop.load.speculated.drafted_tokens
                counts["drafted tokens that were drawn"] += loop.load.speculated.accepted_tokens
            fetcher: Any = getattr(life.role, "fetcher", None)
            reader: Any = getattr(life.role, "reader", None) if fetcher is None else fetcher.reader
            if reader is not None:
                counts["blocks compared with their source"] += reader.integrity.checked_blocks
                counts["checksums that differed"] += reader.integrity.checksum_mismatches


class SimulatedFaultKind(Enum):
    KILL = auto()  # SIGKILL; the process restarts, a worker with a new epoch and an empty cache
    VANISH = auto()  # loss of a worker's machine: no kernel closes its connections
    HANG = auto()  # SIGSTOP, then SIGCONT
    CUT = auto()  # partition between two processes, in both directions
    CUT_ONE_WAY = auto()
    FLAP = auto()  # repeated short partitions between two processes
    RESET = auto()  # reset of the connections between two processes
    SLOW = auto()  # slow link between two processes
    FLIP = auto()  # bit flip in a copied block
    POISON = auto()  # NaN in a worker's next step
    DRAIN = auto()  # SIGTERM, then a restart
    DAWDLE = auto()  # slow engine steps
    REDIS_GONE = auto()  # unreachable Redis
    REDIS_EMPTY = auto()  # loss of all data in Redis
    FILE_FLIP = auto()  # bit flips in KV files
    FILE_CUT = auto()  # truncated KV file
    FILES_GONE = auto()  # removed directory of KV files
    DISK_BAD = auto()  # failing disk calls
    DISK_FULL = auto()  # failing disk writes
    DISK_SLOW = auto()  # reads that take seconds
    FORGET = auto()  # eviction of a worker's cached blocks, so that prompts load from files


@dataclass(frozen=True, slots=True)
class SimulatedFault:
    kind: SimulatedFaultKind
    at_s: float  # time of the fault since the start of the load
    target: str
    other: str  # second process of a fault between two processes; otherwise empty
    lasts_s: float

    def __str__(self) -> str:
        between = f" - {self.other}" if self.other else ""
        return f"{self.kind.name} {self.target}{between} at {self.at_s:.3f} s for {self.lasts_s:.2f} s"


_BETWEEN = frozenset(
    {
        SimulatedFaultKind.CUT,
        SimulatedFaultKind.CUT_ONE_WAY,
        SimulatedFaultKind.FLAP,
        SimulatedFaultKind.RESET,
        SimulatedFaultKind.SLOW,
    }
)

_OFTEN = (
    SimulatedFaultKind.KILL,
    SimulatedFaultKind.KILL,
    SimulatedFaultKind.HANG,
    SimulatedFaultKind.CUT,
    SimulatedFaultKind.DRAIN,
)
_OF_WORKERS = frozenset(
    {SimulatedFaultKind.POISON, SimulatedFaultKind.DAWDLE, SimulatedFaultKind.VANISH, SimulatedFaultKind.FORGET}
)
_OF_DECODE = frozenset({SimulatedFaultKind.FLIP})
OF_FILES = frozenset(
    {
        SimulatedFaultKind.FILE_FLIP,
        SimulatedFaultKind.FILE_CUT,
        SimulatedFaultKind.FILES_GONE,
        SimulatedFaultKind.DISK_BAD,
        SimulatedFaultKind.DISK_FULL,
        SimulatedFaultKind.DISK_SLOW,
        SimulatedFaultKind.FORGET,
    }
)
FLIPS = 12  # bits that one FILE_FLIP flips
SLOWEST_S = 8.0
TORN = 0.3  # share of killed workers that leave a torn write


def draw_faults(
    draw: random.Random, world: "World", count: int | None, kinds: Sequence[SimulatedFaultKind]
) -> list[SimulatedFault]:
    """Draw faults. `count`: None for a drawn number. `kinds`: empty for all possible kinds."""
    count = draw.choice((0, 1, 1, 2, 2, 3, 4)) if count is None else count
    possible = kinds or _possible(world)
    return [_fault(draw, world, draw.choice(possible)) for _ in range(count)]


def _possible(world: "World") -> list[SimulatedFaultKind]:
    """Return the possible kinds of fault; frequent kinds occur several times. FLIP needs verification of all copies."""
    flips = [SimulatedFaultKind.FLIP] * 4 if world.shape.checksum_share == 1.0 else []
    of_files = [*(kind for kind in SimulatedFaultKind if kind in OF_FILES), *[SimulatedFaultKind.FORGET] * 5]
    of_files = of_files if world.shape.tier is not None else []
    others = [kind for kind in SimulatedFaultKind if kind is not SimulatedFaultKind.FLIP and kind not in OF_FILES]
    return [*others, *_OFTEN, *flips, *of_files]


def _fault(draw: random.Random, world: "World", kind: SimulatedFaultKind) -> SimulatedFault:
    some = world.decode if kind in _OF_DECODE else world.workers if kind in _OF_WORKERS else world.machines
    target = draw.choice(some).name
    other = ""
    if kind in _BETWEEN:
        other = draw.choice([machine.name for machine in world.machines if machine.name != target])
        if draw.random() < 0.5:
            target, other = other, target
    lasts_s = draw.choice((0.05, 0.3, 1.0, 2.5, 6.0)) * draw.uniform(0.5, 1.5)
    struck = draw.choice(world.requests).at_s if draw.random() < 0.8 else draw.random() * world.span_s
    return SimulatedFault(kind, struck + draw.random() ** 2, target, other, lasts_s)


class Injector:
    """Injector of a world's faults, which it also heals."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._by_name = {machine.name: machine for machine in world.machines}

    async def inject_all(self, faults: Sequence[SimulatedFault]) -> None:
        """Inject each fault at its time, then heal everything that can be healed."""
        await asyncio.gather(*(self._inject(fault) for fault in faults))
        self._mend()

    async def _inject(self, fault: SimulatedFault) -> None:
        await asyncio.sleep(fault.at_s)
        self._world.trace.note("fault", str(fault))
        machine = self._by_name[fault.target]
        if has_work(machine):
            self._world.exercised[f"{fault.kind.name.lower()} of one with work"] += 1
        match fault.kind:
            case SimulatedFaultKind.KILL | SimulatedFaultKind.VANISH:
                machine.kill(peers_notice=fault.kind is SimulatedFaultKind.KILL)
                if self._world.shape.tier is not None and self._world.disk_draw.random() < TORN:
                    self._world.disk.cut(machine.name)
                await asyncio.sleep(fault.lasts_s)
                machine.start()
            case SimulatedFaultKind.HANG:
                machine.hang()
                await asyncio.sleep(fault.lasts_s)
                machine.go_on()
            case SimulatedFaultKind.DRAIN:
                life = machine.life
                machine.drain()
                while machine.is_up and machine.life is life:  # noqa: ASYNC110 -- there is no event to wait for
                    await asyncio.sleep(0.1)
                machine.start()
            case SimulatedFaultKind.POISON:
                if machine.life is not None and machine.life.host is not None:
                    machine.life.host.runner.poison.steps += 1
            case SimulatedFaultKind.FLIP:
                if machine.life is not None and machine.life.pulls is not None:
                    machine.life.pulls.flips += 1
            case SimulatedFaultKind.REDIS_GONE:
                self._world.redis.gone = True
                await asyncio.sleep(fault.lasts_s)
                self._world.redis.gone = False
            case SimulatedFaultKind.REDIS_EMPTY:
                self._world.redis.flush()
            case SimulatedFaultKind.DAWDLE:
                await self._dawdle(machine, fault.lasts_s)
            case SimulatedFaultKind.FORGET:
                self.forget(machine)
            case _ if fault.kind in OF_FILES:
                await self._to_files(fault)
            case _:
                await self._between(fault)
        self._world.trace.note("fault", f"over: {fault.kind.name} {fault.target}")

    def _mend(self) -> None:
        self._world.mended_s = self._world.loop.time()
        self._world.redis.gone = False
        self._world.disk.state.mend()
        self._world.network.heal_all()
        for machine in self._world.machines:
            machine.go_on()
            machine.start()
            life = machine.life
            if life is not None and life.host is not None:
                life.host.runner.poison.steps = 0
            if life is not None and life.pulls is not None:
                life.pulls.flips = 0

    @staticmethod
    def forget(machine: "SimulatedMachine") -> None:
        """Evict the machine's cached blocks."""
        life = machine.life
        loop: Any = None if life is None else getattr(life.role, "loop", None)
        if life is not None and life.host is not None and loop is not None:
            pool = life.host.blocks

            def forget() -> None:
                for block in pool.allocate(pool.available):
                    pool.release(block)

            loop._thread.post(forget)

    async def _to_files(self, fault: SimulatedFault) -> None:
        disk = self._world.disk
        match fault.kind:
            case SimulatedFaultKind.FILE_FLIP:
                for _ in range(FLIPS):
                    self._world.exercised["bits flipped in files"] += disk.flip()
            case SimulatedFaultKind.FILE_CUT:
                disk.cut()
            case SimulatedFaultKind.FILES_GONE:
                disk.wipe()
            case SimulatedFaultKind.DISK_BAD:
                disk.state.read_error = disk.state.write_error = errno.EIO
            case SimulatedFaultKind.DISK_FULL:
                disk.state.write_error = errno.ENOSPC
            case SimulatedFaultKind.DISK_SLOW:
                disk.state.read_delay_s = min(SLOWEST_S, 2 * fault.lasts_s)
        if fault.kind in (SimulatedFaultKind.DISK_BAD, SimulatedFaultKind.DISK_FULL, SimulatedFaultKind.DISK_SLOW):
            await asyncio.sleep(fault.lasts_s)
            disk.state.mend()

    async def _dawdle(self, machine: "SimulatedMachine", lasts_s: float) -> None:
        host = None if machine.life is None else machine.life.host
        if host is not None:
            host.runner.slowness = 30.0
            await asyncio.sleep(lasts_s)
            host.runner.slowness = 1.0

    async def _between(self, fault: SimulatedFault) -> None:
        network, one, other = self._world.network, fault.target, fault.other
        match fault.kind:
            case SimulatedFaultKind.CUT | SimulatedFaultKind.CUT_ONE_WAY:
                await self._cut(one, other, fault.lasts_s, both=fault.kind is SimulatedFaultKind.CUT)
            case SimulatedFaultKind.FLAP:
                for _ in range(4):
                    await self._cut(one, other, fault.lasts_s / 8, both=True)
                    await asyncio.sleep(fault.lasts_s / 8)
            case SimulatedFaultKind.RESET:
                network.break_between(one, other, "connection reset")
            case SimulatedFaultKind.SLOW:
                network.slow_down(one, other, 30.0)
                await asyncio.sleep(fault.lasts_s)
                network.slow_down(one, other, 1.0)

    async def _cut(self, one: str, other: str, lasts_s: float, both: bool) -> None:
        network = self._world.network
        network.cut(one, other)
        if both:
            network.cut(other, one)
        await asyncio.sleep(lasts_s)
        network.heal(one, other)
        network.heal(other, one)
