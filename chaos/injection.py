"""One fault on the stack: done, proved, undone.

What found nothing to break was not made, and counts as nothing. What was made and cannot show that it happened is a
failure of the run.
"""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from chaos.procfs import Life, is_alive, state_of
from chaos.proxy import Counts, Proxy, Rule, Way
from chaos.stack import Stack
from chaos.wall_clock import WallClock

PROOF_S = 5.0
END_S = 45.0  # of a process that drains
POLL_S = 0.01


class NotProven(Exception):
    """The fault left no mark where it must have: nothing was tested."""


class NotMade(Exception):
    """There was nothing to break, and nothing was changed."""


class Injection(Protocol):
    async def inject(self) -> None:
        """Raises: NotMade, NotProven."""

    async def prove(self) -> str:
        """What shows that it happened. Raises: NotProven, or NotMade where that turns out only now."""

    async def heal(self) -> None:
        """All as before; processes come back by themselves. Also where `prove` failed."""


async def shown(condition: Callable[[], bool], what: str, within_s: float | None = None) -> None:
    """Raises: NotProven."""
    within_s = PROOF_S if within_s is None else within_s
    loop = asyncio.get_running_loop()
    until = loop.time() + within_s
    while not condition():
        if loop.time() > until:
            raise NotProven(f"{what}: not seen within {within_s:g} s")
        await asyncio.sleep(POLL_S)


class Signalled:
    """A process gets a signal that ends it."""

    def __init__(self, stack: Stack, life: Life, number: signal.Signals) -> None:
        self._stack = stack
        self._life = life
        self._number = number

    async def inject(self) -> None:
        self._stack.send(self._life, self._number)

    async def prove(self) -> str:
        within_s = PROOF_S if self._number is signal.SIGKILL else END_S
        await shown(lambda: not is_alive(self._life), f"the end of {self._life.pid}", within_s)
        return f"pid {self._life.pid} is gone"

    async def heal(self) -> None:
        """The supervisor starts it again."""


class Stopped:
    """A process stands still for a while: it keeps its connections and answers nothing."""

    def __init__(self, stack: Stack, life: Life, lasts_s: float) -> None:
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


class Cut:
    """Every connection of a link breaks, once; new ones may be made."""

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
        """Whoever was cut off connects again."""


class Ruled:
    """A link has a rule for a while. `mark` reads from the counts how often the rule had something to do.

    Where nobody had anything to say meanwhile it was not made. Where something went by all the same, it does not work.
    """

    def __init__(
        self, links: list[tuple[Proxy, str]], rule: Rule, lasts_s: float, mark: Callable[[Counts], int], what: str
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
            await shown(lambda: self._marked() > self._before, f"something {self._what}")
        except NotProven as error:
            if self._went_by() > self._passed:
                raise NotProven(f"{error}, and {self._went_by() - self._passed} pieces went by") from error
            raise NotMade("nobody had anything to say on that link") from error
        await asyncio.sleep(self._lasts_s)
        return f"{self._marked() - self._before} pieces {self._what} in {self._lasts_s:.1f} s"

    async def heal(self) -> None:
        for proxy, source in self._links:
            proxy.set_rule(source, Rule())

    def _marked(self) -> int:
        return sum(self._mark(proxy.counts(source)) for proxy, source in self._links)

    def _went_by(self) -> int:
        """Pieces that should have met the rule and did not."""
        ways = self._rule.held or frozenset(Way)
        return sum(proxy.counts(source).passed(way) for proxy, source in self._links for way in ways)


class Flushed:
    """Redis forgets everything."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._before = 0
        self._said: list[bytes] = []

    async def inject(self) -> None:
        """In one go, so that no worker can announce itself in between."""
        self._said = await redis_says(self._port, [b"DBSIZE", b"FLUSHALL", b"DBSIZE"])

    async def prove(self) -> str:
        if len(self._said) != 3 or self._said[1] != b"+OK" or self._said[2] != b":0":
            raise NotProven(f"Redis answered {self._said}")
        return f"{int(self._said[0][1:])} keys before, none after"

    async def heal(self) -> None:
        """Whoever has something to say says it again."""


class ClockJump:
    def __init__(self, clock: WallClock, seconds: float, lasts_s: float) -> None:
        self._clock = clock
        self._seconds = int(seconds)
        self._lasts_s = lasts_s
        self._before = clock.told

    async def inject(self) -> None:
        self._clock.jump(self._seconds)

    async def prove(self) -> str:
        await shown(lambda: self._clock.told > self._before, "someone asking the time")
        await asyncio.sleep(self._lasts_s)
        return f"off by {self._seconds} s, {self._clock.told - self._before} times told so"

    async def heal(self) -> None:
        self._clock.jump(0)


async def redis_says(port: int, commands: list[bytes]) -> list[bytes]:
    """One line for each. Raises: NotProven where Redis does not answer."""
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
