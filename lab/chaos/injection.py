"""Injection of one fault: inject, prove, heal.

A fault that finds nothing to break counts as not made and is retried later. After any other fault the campaign waits
up to PROOF_S for evidence; a fault without evidence counts as not proven.
"""

import asyncio
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from baton.lab.chaos.faults import ALL_ROUTERS, DECODE, PREFILL, WORKERS, Fault, FaultKind
from baton.lab.chaos.proxy import LinkCounters, LinkWay, Proxy, Rule
from baton.lab.chaos.stack import ChaosStack, JumpingClock
from baton.lab.chaos.watch import Life, is_alive, pool_range, read_memory, state_of, write_memory

if TYPE_CHECKING:
    from baton.lab.chaos.disk.injections import TierScene

PROOF_S = 90.0  # longest wait for evidence of a fault, enough on a slow machine
MADE_S = 8.0  # longest wait until a fault affects a process; otherwise the fault counts as not made
POLL_S = 0.01
EVERYONE = (*ALL_ROUTERS, *WORKERS)
IN_USE_S = 1.5  # time since its last byte for which a link counts as in use; workers write to Redis every 1 s
_LINKED = frozenset({FaultKind.CUT, FaultKind.PARTITION, FaultKind.ONE_WAY, FaultKind.DELAY})


class NotProven(Exception):
    """Error: the fault left no evidence, so nothing was tested."""


class NotMade(Exception):
    """Error: there was nothing to break, and nothing was changed."""


class Injection(Protocol):
    async def inject(self) -> None:
        """Inject the fault. Raises: NotMade, NotProven."""

    async def prove(self) -> str:
        """Wait for evidence that the fault happened, and return it. Raises: NotProven, NotMade."""

    async def heal(self) -> None:
        """Undo the fault, except that the supervisor restarts processes. Called even if `prove` failed."""


async def shown(condition: Callable[[], bool], what: str, within_s: float | None = None) -> None:
    """Wait until `condition` holds. `what`: the expected effect, for the error message. Raises: NotProven."""
    within_s = PROOF_S if within_s is None else within_s
    loop = asyncio.get_running_loop()
    until = loop.time() + within_s
    while not condition():
        if loop.time() > until:
            raise NotProven(f"{what}: not seen within {within_s:g} s")
        await asyncio.sleep(POLL_S)


class Signalled:
    """Injection of a signal that ends a process."""

    def __init__(self, stack: ChaosStack, life: Life, number: signal.Signals) -> None:
        self._stack = stack
        self._life = life
        self._number = number

    async def inject(self) -> None:
        self._stack.send(self._life, self._number)

    async def prove(self) -> str:
        await shown(lambda: not is_alive(self._life), f"the end of {self._life.pid}")
        return f"pid {self._life.pid} is gone"

    async def heal(self) -> None:
        """Do nothing: the supervisor restarts the process."""


class Stopped:
    """Injection of SIGSTOP to a process, and SIGCONT later. In between, its connections are open but silent."""

    def __init__(self, stack: ChaosStack, life: Life, lasts_s: float) -> None:
        self._stack = stack
        self._life = life
        self._lasts_s = lasts_s

    async def inject(self) -> None:
        self._stack.send(self._life, signal.SIGSTOP)

    async def prove(self) -> str:
        await shown(lambda: state_of(self._life.pid) == "T", f"state T of {self._life.pid}")
        return f"pid {self._life.pid} in state T for {self._lasts_s:.1f} s"

    async def heal(self) -> None:
        await asyncio.sleep(self._lasts_s)
        self._stack.send(self._life, signal.SIGCONT)


class CutConnections:
    """Injection that cuts all connections of a link once. New connections may be opened."""

    def __init__(self, proxy: Proxy, source: str) -> None:
        self._proxy = proxy
        self._source = source
        self._before = replace(proxy.counts(source))

    async def inject(self) -> None:
        if self._proxy.cut(self._source) == 0:
            raise NotMade("there was no connection to cut")

    async def prove(self) -> str:
        cut = self._proxy.counts(self._source).cut - self._before.cut
        if cut < 1:
            raise NotProven("no connection was cut")
        return f"{cut} connections cut"

    async def heal(self) -> None:
        """Do nothing: the processes reconnect by themselves."""


class Ruled:
    """Injection of a temporary rule on links. `mark`: returns the number of chunks on a link that the rule affected.

    Raises: NotMade if no process sent anything; NotProven if chunks passed that the rule should have affected.
    """

    def __init__(
        self, links: list[tuple[Proxy, str]], rule: Rule, lasts_s: float, mark: Callable[[LinkCounters], int], what: str
    ) -> None:
        self._links = links
        self._rule = rule
        self._lasts_s = lasts_s
        self._mark = mark
        self._what = what
        self._before = self._marked()
        self._passed = self._went_by()

    async def inject(self) -> None:
        self._before, self._passed = self._marked(), self._went_by()
        for proxy, source in self._links:
            proxy.set_rule(source, replace(self._rule))

    async def prove(self) -> str:
        try:
            await shown(lambda: self._marked() > self._before, f"something {self._what}", MADE_S)
        except NotProven as error:
            if self._went_by() > self._passed:
                raise NotProven(f"{error}; {self._went_by() - self._passed} chunks passed") from error
            raise NotMade("no process sent anything on that link") from error
        await asyncio.sleep(self._lasts_s)
        return f"{self._marked() - self._before} chunks {self._what} in {self._lasts_s:.1f} s"

    async def heal(self) -> None:
        for proxy, source in self._links:
            proxy.set_rule(source, Rule())

    def _marked(self) -> int:
        return sum(self._mark(proxy.counts(source)) for proxy, source in self._links)

    def _went_by(self) -> int:
        """Return the number of chunks that passed the links in the directions to which the rule applies."""
        ways = self._rule.held or frozenset(LinkWay)
        return sum(proxy.counts(source).passed(way) for proxy, source in self._links for way in ways)


class Flushed:
    """Injection of FLUSHALL, which deletes all keys in Redis."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._before = 0
        self._said: list[bytes] = []

    async def inject(self) -> None:
        """Send DBSIZE, FLUSHALL and DBSIZE together, so that no worker can write a key between them."""
        self._said = await redis_says(self._port, [b"DBSIZE", b"FLUSHALL", b"DBSIZE"])

    async def prove(self) -> str:
        if len(self._said) != 3 or self._said[1] != b"+OK" or self._said[2] != b":0":
            raise NotProven(f"FLUSHALL did not empty Redis: DBSIZE, FLUSHALL and DBSIZE returned {self._said}")
        return f"{int(self._said[0][1:])} keys before, none after"

    async def heal(self) -> None:
        """Do nothing: routers and workers write their keys again by themselves."""


class ClockJump:
    def __init__(self, clock: JumpingClock, seconds: float, lasts_s: float) -> None:
        self._clock = clock
        self._seconds = int(seconds)
        self._lasts_s = lasts_s
        self._before = clock.wrong_reads

    async def inject(self) -> None:
        self._clock.jump(self._seconds)

    async def prove(self) -> str:
        await shown(lambda: self._clock.wrong_reads > self._before, "someone asking the time")
        await asyncio.sleep(self._lasts_s)
        return f"wall clock off by {self._seconds} s, read {self._clock.wrong_reads - self._before} times"

    async def heal(self) -> None:
        self._clock.jump(0)


async def redis_says(port: int, commands: list[bytes]) -> list[bytes]:
    """Send commands to Redis and return one reply line per command. Raises: NotProven if Redis does not answer."""
    try:
        async with asyncio.timeout(PROOF_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"".join(command + b"\r\n" for command in commands))
                return [(await reader.readline()).strip() for _ in commands]
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        raise NotProven(f"Redis does not answer: {error}") from error


TRIES = 25  # maximum number of attempts to flip bits; three quarters of them find no unread blocks
PROMPTS = 8  # number of extra prompts that are sent for each attempt
OPENED_S = (0.02, 0.15)  # shortest and longest time between sending prompts and stopping the readers
UNREAD_S = 0.5  # longest time for which readers are stopped; after 1.2 s routers would count them as failed
READ_S = 0.5  # time in which readers copy flipped bits, while the source is stopped
PAUSE_S = 0.2  # time between two attempts
PAGE_BYTES = 4096
NOTICED_S = 0.8  # time after an attempt for reports of the readers, which report five times a second
FLIP_POLL_S = 0.02


class FlippedOnTheWay:
    """Injection of flipped bits in all KV blocks that decode workers (readers) are copying from `target` (source).

    Sends prompts, stops (SIGSTOP) the readers once they have opened their transfers, and stops the source once it has
    computed blocks that are unread. Flips a bit in each page of the source's pool through /proc/PID/mem, lets the
    readers copy, and restores the memory before the source continues, so that only copies are wrong. Evidence: changed
    bytes, and checksum mismatches that readers report.
    """

    def __init__(
        self, stack: ChaosStack, target: str, draw: random.Random, ask: Callable[[int], None] = lambda count: None
    ) -> None:
        self._stack = stack
        self._target = target
        self._draw = draw
        self._ask = ask
        self._flipped = 0
        self._found_before = 0
        self._differing = 0
        self._turned_over = False

    async def inject(self) -> None:
        """Flip bits until a reader reports a mismatch, at most TRIES times. Raises: NotMade, NotProven."""
        self._found_before = await self._found_out()
        for _ in range(TRIES):
            await self._try()
            if self._flipped:
                await self._notice(NOTICED_S)
            if self._differing:
                return
            await asyncio.sleep(PAUSE_S)
        if not self._turned_over:
            raise NotMade("no transfer was in progress")

    async def prove(self) -> str:
        if not self._flipped:
            raise NotProven("no bit of a block in transfer was flipped")
        await self._notice(PROOF_S)
        if not self._differing:
            raise NotProven(f"{self._flipped} bits flipped, but no reader reported a checksum mismatch")
        return f"{self._flipped} bits flipped, {self._differing} checksum mismatches"

    async def heal(self) -> None:
        """Do nothing: `inject` has restored the memory."""

    async def _notice(self, within_s: float) -> None:
        """Wait up to `within_s` for readers to report checksum mismatches found since `inject` began."""
        until_s = time.monotonic() + within_s
        while not self._differing and time.monotonic() < until_s:
            await asyncio.sleep(FLIP_POLL_S)
            self._differing = max(0, await self._found_out() - self._found_before)

    async def _try(self) -> None:
        source, readers = self._stack.life(self._target), self._readers()
        if source is None or not readers:
            raise NotMade(f"{self._target} or its readers are not running")
        self._ask(PROMPTS)
        await asyncio.sleep(self._draw.uniform(*OPENED_S))
        try:
            for reader in readers:
                self._stack.send(reader, signal.SIGSTOP)
            if await self._has_unread():
                self._stack.send(source, signal.SIGSTOP)
                await shown(lambda: state_of(source.pid) == "T", f"state T of {source.pid}")
                await self._turn_over_and_back(source, readers)
        except OSError as error:
            if is_alive(source):
                raise
            raise NotMade(f"another fault ended {self._target}: {error}") from error
        finally:
            for life in (*readers, source):
                self._stack.send(life, signal.SIGCONT)

    async def _turn_over_and_back(self, source: Life, readers: list[Life]) -> None:
        pool = pool_range(source.pid)
        if pool is None:
            raise NotMade(f"process {source.pid} of {self._target} has no KV pool in shared memory")
        before = read_memory(source.pid, pool.start, len(pool))
        wrong = bytearray(before)
        place, bit = self._draw.randrange(PAGE_BYTES), 1 << self._draw.randrange(8)
        for at in range(place, len(wrong), PAGE_BYTES):
            wrong[at] ^= bit
        self._turned_over = True
        try:
            write_memory(source.pid, pool.start, bytes(wrong))
            read_back = read_memory(source.pid, pool.start, len(pool))
            self._flipped = sum(read_back[at] != before[at] for at in range(place, len(before), PAGE_BYTES))
            for reader in readers:
                self._stack.send(reader, signal.SIGCONT)
            await asyncio.sleep(READ_S)
        finally:
            write_memory(source.pid, pool.start, before)

    async def _has_unread(self) -> bool:
        """Wait up to UNREAD_S for computed blocks on the source that no reader has copied."""
        until_s = time.monotonic() + UNREAD_S
        while time.monotonic() < until_s:
            await asyncio.sleep(FLIP_POLL_S)
            for status in await self._stack.statuses():
                for worker in status.workers if status else ():
                    load = worker.load if worker.worker_id == self._target else None
                    if load is not None and load.pages.held_by_transfers > 0:
                        return True
        return False

    async def _found_out(self) -> int:
        """Return the number of checksum mismatches of all readers. If routers differ, the highest number counts."""
        mismatches = [
            sum(worker.load.checksum_mismatches for worker in status.workers if worker.load)
            for status in await self._stack.statuses()
            if status
        ]
        return max(mismatches, default=0)

    def _readers(self) -> list[Life]:
        lives = [self._stack.life(place.name) for place in self._stack.workers if place.role == "decode"]
        return [life for life in lives if life is not None]


@dataclass(frozen=True, slots=True)
class Scene:
    """Processes, network and files that injections act on.

    `ask`: sends the given number of prompts that no client has sent before.
    """

    stack: ChaosStack
    clock: JumpingClock | None
    draw: random.Random
    ask: Callable[[int], None] = lambda count: None
    tier: "TierScene | None" = None


def in_use(fault: Fault, scene: Scene, may_begin: Callable[[Fault], bool]) -> Fault | None:
    """Return the link fault, on its own link or a link between the same roles that is in use; None if none is in use.

    Faults that are not of a link are returned unchanged.
    """
    if fault.kind not in _LINKED or not fault.source:
        return fault
    others = [each for each in _alike(fault) if each != fault]
    scene.draw.shuffle(others)
    return next((each for each in (fault, *others) if may_begin(each) and _is_used(each, scene.stack)), None)


def _alike(fault: Fault) -> list[Fault]:
    """Return one copy of this fault for each link between processes of the same two roles."""
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    if fault.target == "redis":
        sources, targets = EVERYONE, ("redis",)
    elif fault.source in ALL_ROUTERS:
        sources, targets = ALL_ROUTERS, WORKERS
    elif fault.source in DECODE:
        sources, targets = DECODE, PREFILL
    else:  # the source is a client
        sources, targets = (fault.source,), ALL_ROUTERS
    return [replace(fault, source=source, target=target) for source in sources for target in targets]


def _is_used(fault: Fault, stack: ChaosStack) -> bool:
    if fault.target not in stack.proxies:
        return False
    counts = stack.proxies[fault.target].counts(fault.source)
    return counts.connections > 0 and time.monotonic() - counts.moved_s < IN_USE_S


def injection_of(fault: Fault, scene: Scene) -> Injection:
    """Create the injection of a fault of a process, link, Redis or clock.

    Raises: NotMade if the stack lacks what the fault needs.
    """
    stack, draw = scene.stack, scene.draw
    match fault.kind:
        case FaultKind.CLOCK:
            if scene.clock is None:
                raise NotMade("clock jumps need a C compiler")
            return ClockJump(scene.clock, fault.amount, fault.lasts_s)
        case FaultKind.FLUSH:
            return Flushed(stack.redis.port)
        case FaultKind.BIT_FLIP:
            return FlippedOnTheWay(stack, fault.target, draw, scene.ask)
        case FaultKind.CUT | FaultKind.PARTITION | FaultKind.ONE_WAY | FaultKind.DELAY:
            return _on_link(fault, stack, draw)
    life = stack.life(fault.target)
    if life is None:
        raise NotMade(f"{fault.target} is not running")
    match fault.kind:
        case FaultKind.STOP:
            return Stopped(stack, life, fault.lasts_s)
        case FaultKind.RESTART:
            return Signalled(stack, life, signal.SIGTERM)
    return Signalled(stack, life, signal.SIGKILL)


def _on_link(fault: Fault, stack: ChaosStack, draw: random.Random) -> Injection:
    proxy = stack.proxies[fault.target]
    links = [(proxy, source) for source in ((fault.source,) if fault.source else EVERYONE)]
    if fault.kind is FaultKind.CUT:
        return CutConnections(proxy, fault.source)
    if fault.kind is FaultKind.DELAY:
        rule = Rule(delay_s=fault.amount)
        what = f"delayed by {fault.amount * 1e3:.0f} ms"
        return Ruled(links, rule, fault.lasts_s, lambda counts: counts.delayed, what)
    held = frozenset(LinkWay) if fault.kind is FaultKind.PARTITION else frozenset((draw.choice(list(LinkWay)),))
    what = "held" if len(held) > 1 else f"held {next(iter(held)).value}"
    return Ruled(links, Rule(held=held), fault.lasts_s, lambda counts: counts.held, what)
