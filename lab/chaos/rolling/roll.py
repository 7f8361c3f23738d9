"""Upgrade of a cluster to another release and back, process by process, under load.

Upgrade and way back together pass through every mixture of releases of routers, prefill and decode workers. Clients
must get complete and exact answers all the time.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from signal import SIGKILL, SIGTERM

from baton.client import AsyncBatonClient
from baton.lab.chaos.checker import ExpectedChoice, Finding, FindingKind, check
from baton.lab.chaos.exactness.oracle import Oracle
from baton.lab.chaos.history import Behaviour, ChaosCase, StreamHistory, make_cases
from baton.lab.chaos.load import TIMEOUT_S, ChaosLoad, LoadTargets
from baton.lab.chaos.stack import HOST, WHOLE, ChaosStack, Layout, ProcessPlace
from baton.lab.chaos.watch import Life
from baton.launch.tiny_checkpoint import write_tiny_checkpoint

START_S = 180.0
ROLL_S = 90.0  # longest time from the signal until all routers are connected to the restarted process
SPARE_S = 5.0
POLL_S = 0.05
CLEAN_END, KILLED = "ended with exit code 0", "was ended by SIGKILL"
AT_ONCE = 4
ROLES = ("prefill", "decode")
KINDS = ("router", *ROLES)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two releases of a run: its version, and the PYTHONPATH of its code."""

    version: str
    code: Path


@dataclass(frozen=True, slots=True)
class RollingOptions:
    """Options of a rolling run. `dwell_s`: seconds of load between two restarts."""

    dwell_s: float = 3.0
    clients: int = 6
    seed: int = 1
    max_tokens: int = 160
    there_and_back: bool = True
    abruptly: bool = False  # SIGKILL instead of SIGTERM
    layout: Layout = WHOLE


@dataclass(frozen=True, slots=True)
class Rolled:
    """Restart of a process with the other release's code. Times are monotonic."""

    process: str
    version: str
    began_s: float
    whole_s: float  # time at which all routers were ready and connected to the restarted process

    @property
    def seconds(self) -> float:
        return self.whole_s - self.began_s


@dataclass(frozen=True, slots=True)
class Mixture:
    """Interval between two restarts, and the release or releases that run in each kind of process."""

    routers: str
    prefill: str
    decode: str
    began_s: float
    ended_s: float


@dataclass
class RollingOutcome:
    options: RollingOptions
    before: str
    after: str
    rolled: list[Rolled] = field(default_factory=list)
    mixtures: list[Mixture] = field(default_factory=list)
    histories: list[StreamHistory] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unclean: list[str] = field(default_factory=list)  # events of unexpected exits

    def of_kind(self, *kinds: FindingKind) -> int:
        return sum(finding.kind in kinds for finding in self.findings)

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind is not FindingKind.CLOSE]

    @property
    def tokens(self) -> int:
        return sum(history.tokens for history in self.histories)

    @property
    def went_on_elsewhere(self) -> int:
        """Number of streams that continued on another worker. Takeovers by another router are not counted."""
        return sum(len(each.attempts) > 1 for each in self.histories)

    def streams_in(self, mixture: Mixture) -> list[StreamHistory]:
        """Return the streams that began in the interval of `mixture`."""
        return [each for each in self.histories if mixture.began_s <= each.began_s < mixture.ended_s]

    def handed_over_in(self, mixture: Mixture) -> int:
        """Return the number of streams that began in `mixture` and whose KV was transferred, as far as routers know."""
        streams = self.streams_in(mixture)
        return sum(any(attempt.prefill and not attempt.failure for attempt in each.attempts) for each in streams)

    def open_at(self, rolled: Rolled) -> int:
        """Return the number of streams that were open when the restart began."""
        at_s = rolled.began_s
        return sum(each.began_s < at_s and (each.closed_s is None or each.closed_s > at_s) for each in self.histories)

    def longest_pause_s(self, rolled: Rolled) -> float:
        """Return the longest pause between two tokens of a stream during the restart."""
        pauses = (
            after_s - before_s
            for history in self.histories
            if history.behaviour is Behaviour.READS
            for before_s, after_s in pairwise(history.token_times)
            if after_s > rolled.began_s and before_s < rolled.whole_s
        )
        return max(pauses, default=0.0)

    @property
    def is_good(self) -> bool:
        mixed = all(self.streams_in(each) and self.handed_over_in(each) for each in self.mixtures)
        return bool(self.rolled) and mixed and not self.faults and not self.unclean


class NotRolled(Exception):
    """Error: a process did not restart with the other release's code in time."""


class RollingRun:
    """Upgrade of a stack to another release and back, under load. `say`: called with a line per restarted process."""

    def __init__(self, before: Side, after: Side, options: RollingOptions, say: Callable[[str], None]) -> None:
        self._before, self._after, self._options, self._say = before, after, options, say
        self._outcome = RollingOutcome(options, before.version, after.version)
        self._expected: dict[str, tuple[ExpectedChoice, ...]] = {}

    async def run(self, folder: Path | None = None) -> RollingOutcome:
        """Start the stack, restart all processes, stop the stack. `folder`: for logs; None: they are not kept.

        Raises: NotWhole, NotRolled, OracleDisagrees.
        """
        with tempfile.TemporaryDirectory(prefix="baton-rolling-") as name:
            scratch = folder or Path(name)
            model = scratch / "tiny"
            write_tiny_checkpoint(model)
            oracle = Oracle(model)  # before the stack starts: the import blocks the event loop for seconds
            stack = ChaosStack(model, scratch, None, self._options.layout)
            stack.code = dict.fromkeys((place.name for place in (*stack.routers, *stack.workers)), self._before.code)
            try:
                await stack.start()
                took_s = await stack.wait_whole(START_S)
                stack.mark_ready()
                self._say(f"{len(stack.places)} processes of release {self._before.version} ready after {took_s:.1f} s")
                await self._under_load(stack, await self._undisturbed(stack, oracle))
            finally:
                expected = KILLED if self._options.abruptly else CLEAN_END
                self._outcome.unclean = [event for event in stack.events if expected not in event]
                await stack.stop()
        return self._outcome

    async def _undisturbed(self, stack: ChaosStack, oracle: Oracle) -> list[ChaosCase]:
        cases = make_cases(self._options.seed, self._options.max_tokens, per_kind=1)
        line = asyncio.Semaphore(AT_ONCE)
        async with AsyncBatonClient(public_addresses(stack.routers), timeout_s=TIMEOUT_S) as baton:

            async def ask(case: ChaosCase) -> None:
                async with line:
                    answer = await baton.complete(case.prompt, **case.options)
                self._expected[case.name] = await asyncio.to_thread(oracle.expect, case, answer.choices)

            await asyncio.gather(*map(ask, cases))
        return cases

    async def _under_load(self, stack: ChaosStack, cases: Sequence[ChaosCase]) -> None:
        admin = tuple(f"{HOST}:{router.admin_port}" for router in stack.routers)
        targets = LoadTargets(public_addresses(stack.routers), admin)
        load = ChaosLoad(cases, targets, self._options.clients, self._options.seed, self._judge)
        roles = (stack.routers, *([each for each in stack.workers if each.role == role] for role in ROLES))
        versions = dict.fromkeys(stack.code, self._before.version)
        load.start()
        try:
            await self._mix(versions)
            for side in (self._after, self._before) if self._options.there_and_back else (self._after,):
                for places in roles:
                    for place in places:
                        await self._roll(stack, place.name, side)
                        versions[place.name] = side.version
                        await self._mix(versions)
        finally:
            await load.finish(TIMEOUT_S + SPARE_S)
            await load.explained()
        self._outcome.histories = load.histories
        for history in load.open.values():
            self._judge(history)

    async def _mix(self, versions: Mapping[str, str]) -> None:
        """Keep the load on the present mixture of releases for `dwell_s`."""
        began_s = time.monotonic()
        await asyncio.sleep(self._options.dwell_s)
        routers, prefill, decode = (
            " and ".join(sorted({versions[name] for name in versions if kind in name})) for kind in KINDS
        )
        self._outcome.mixtures.append(Mixture(routers, prefill, decode, began_s, time.monotonic()))

    async def _roll(self, stack: ChaosStack, name: str, side: Side) -> None:
        """Signal a process and wait until its successor serves with the code of `side`. Raises: NotRolled, NotWhole."""
        life = stack.life(name)
        if life is None:
            raise NotRolled(f"{name} is not running")
        stack.code[name] = side.code
        began_s = time.monotonic()
        stack.send(life, SIGKILL if self._options.abruptly else SIGTERM)
        while (now := stack.life(name)) is None or now == life:
            if time.monotonic() - began_s > ROLL_S:
                raise NotRolled(f"{name} did not restart within {ROLL_S:g} s")
            await asyncio.sleep(POLL_S)
        await stack.wait_whole(ROLL_S)
        if str(side.code) not in environment_of(now):
            raise NotRolled(f"{name} restarted without the code of release {side.version}")
        rolled = Rolled(name, side.version, began_s, time.monotonic())
        self._outcome.rolled.append(rolled)
        self._say(f"{name} runs release {side.version} after {rolled.seconds:.1f} s")

    def _judge(self, history: StreamHistory) -> None:
        self._outcome.findings += check(history, self._expected[history.case], TIMEOUT_S + SPARE_S)


def public_addresses(routers: Sequence[ProcessPlace]) -> tuple[str, ...]:
    """Return the addresses at which clients reach the routers, without proxies: one if they share a port."""
    return tuple(dict.fromkeys(router.direct for router in routers))


def environment_of(life: Life) -> list[str]:
    """Return the entries of a process's PYTHONPATH; empty if the process is gone."""
    try:
        variables = Path(f"/proc/{life.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
    paths = [each.removeprefix(b"PYTHONPATH=") for each in variables if each.startswith(b"PYTHONPATH=")]
    return [path for each in paths for path in each.decode().split(":")]
