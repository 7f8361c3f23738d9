"""Chaos run: start a stack, record undisturbed answers, inject faults under load, and check answers and leaks."""

import asyncio
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING

from baton.client import AsyncBatonClient, Completion
from baton.lab.chaos.campaign import (
    WHOLE_S,
    FaultCampaign,
    Make,
    Soundness,
    Unmade,
    make_injection,
    never_made,
    too_few_proven,
)
from baton.lab.chaos.checker import ExpectedChoice, Finding, FindingKind, Injected, check
from baton.lab.chaos.disk.injections import TierScene
from baton.lab.chaos.disk.shim import make_disk_shim
from baton.lab.chaos.faults import FaultKind, Planned
from baton.lab.chaos.history import Behaviour, ChaosCase, StreamHistory, make_cases, stopped
from baton.lab.chaos.hosts.stack import HostedStack
from baton.lab.chaos.injection import Scene
from baton.lab.chaos.load import TIMEOUT_S, ChaosLoad, LoadTargets, read_stream
from baton.lab.chaos.stack import HOST, WHOLE, ChaosStack, Layout, NotWhole, TierFolder, make_wall_clock
from baton.lab.chaos.watch import Look, MemoryGrowth, ProcessWatch, children_of, growth, shared_memory_files
from baton.launch.tiny_checkpoint import write_tiny_checkpoint

if TYPE_CHECKING:
    from baton.lab.chaos.exactness.oracle import Oracle

START_S = 120.0
UNDISTURBED_S = 600.0  # timeout of an undisturbed answer: generous, since its duration is not judged
IDLE_S = 20.0  # longest wait after the last stream until no worker holds a block
POLL_S = 0.02
_ENDED = re.compile(r"ended with exit code (\d+)")
_CLEAN_EXITS = frozenset({0, 128 + SIGTERM})  # exit codes after a drain, and on SIGTERM during start-up
SPARE_S = 5.0  # time after its deadline at which an open stream counts as hanging


def is_crash(event: str) -> bool:
    """Return whether an event of the supervisor is an exit that no fault caused."""
    exited = _ENDED.search(event)
    return exited is not None and int(exited[1]) not in _CLEAN_EXITS


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """Options of one run. `minutes`: duration of load and faults, which end early once `wanted` faults are proven."""

    minutes: float
    seed: int
    clients: int
    plan: tuple[Planned, ...]
    max_tokens: int = 480
    per_kind: int = 3
    wanted: int | None = None  # number of proven faults; None: as many as time allows
    layout: Layout = WHOLE
    speculate: str = "off"  # value of the workers' flag --speculate
    tier: bool = False  # whether workers have small pools and keep KV in files too
    hosts: int | None = None  # number of hosts; None: all processes run on this machine
    pages_free_s: float = 1.0  # longest allowed time from the end of the last stream until all blocks are free


@dataclass
class ChaosOutcome:
    """Observations of a run. Times are monotonic; reports count them from `began_s`."""

    options: ChaosOptions
    began_s: float = 0.0
    ended_s: float = 0.0
    expected: dict[str, tuple[ExpectedChoice, ...]] = field(default_factory=dict)
    injected: list[Injected] = field(default_factory=list)
    histories: list[StreamHistory] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    pages_free_after_s: float | None = None  # seconds after the last stream; None: more than IDLE_S
    held: str = ""  # workers that still hold blocks, with their numbers of blocks
    left_in_shared_memory: tuple[str, ...] = ()
    left_processes: tuple[int, ...] = ()
    harness_lag_s: float = 0.0  # longest delay of the event loop that runs proxies and clients
    crashes: list[str] = field(default_factory=list)  # events of exits that no fault caused
    after: list[Finding] = field(default_factory=list)  # findings in answers that were requested after the faults
    unmade: list[Unmade] = field(default_factory=list)
    missing: str = ""  # processes that did not serve again after the faults
    tier: Counter[str] = field(default_factory=Counter)  # counters of KV files, by metric
    tier_off: Counter[str] = field(default_factory=Counter)  # number of turn-offs of `reads` and of `writes`
    chosen: Counter[str] = field(default_factory=Counter)  # number of checked tokens of undisturbed answers, by checker
    close: Counter[str] = field(default_factory=Counter)  # number of tokens in `chosen` with another token within 1e-4

    @property
    def faults(self) -> list[Finding]:
        """Return all findings except those of kind CLOSE, which are no faults."""
        return [finding for finding in (*self.findings, *self.after) if finding.kind is not FindingKind.CLOSE]

    @property
    def unproven(self) -> list[Injected]:
        return [each for each in self.injected if each.proof is None]

    @property
    def growth(self) -> list[MemoryGrowth]:
        return growth(self.looks)

    @property
    def is_flat(self) -> bool:
        return all(each.is_flat for each in self.growth)

    @property
    def never_made(self) -> list[FaultKind]:
        return never_made(self.injected, self.unmade)

    @property
    def too_few_proven(self) -> list[FaultKind]:
        return too_few_proven(self.injected)

    @property
    def late(self) -> list[Injected]:
        """Return the proven faults from which processes did not recover in time."""
        return [each for each in self.injected if each.proof is not None and each.trouble]

    @property
    def is_good(self) -> bool:
        clean = not self.left_in_shared_memory and not self.left_processes and not self.missing
        freed = self.pages_free_after_s is not None and self.pages_free_after_s <= self.options.pages_free_s
        enough = len(self.injected) - len(self.unproven) >= (self.options.wanted or 1)
        proved = bool(self.histories) and enough and not self.too_few_proven and not self.never_made and not self.late
        speculated = self.options.speculate == "off" or any(each.accepted_tokens for each in self.histories)
        held = not self.faults and not self.crashes
        read = not self.options.tier or self.tier["hits"] > 0
        same = not self.tier["at_rest_corrupt_blocks"]
        return proved and clean and freed and self.is_flat and speculated and read and same and held


class ChaosRun:
    """Run of a stack under load and faults. `say`: called with each line of progress. `make`: creates injections.

    Tests replace `make` to check that a fault without effect is reported as not proven.
    """

    def __init__(self, options: ChaosOptions, say: Callable[[str], None], make: Make = make_injection) -> None:
        self._options = options
        self._say = say
        self._make = make
        self._outcome = ChaosOutcome(options)
        self._draw = random.Random(f"run {options.seed}")

    async def run(self, folder: Path | None = None) -> ChaosOutcome:
        """Start the stack, inject faults under load, stop the stack. `folder`: for logs; None: they are not kept.

        Raises: NotWhole, OracleDisagrees.
        """
        shared, children = shared_memory_files(), set(children_of(os.getpid()))
        with tempfile.TemporaryDirectory(prefix="baton-chaos-") as name:
            scratch = folder or Path(name)
            await self._run(scratch)
        self._outcome.left_in_shared_memory = tuple(sorted(shared_memory_files() - shared))
        self._outcome.left_processes = tuple(sorted(set(children_of(os.getpid())) - children))
        return self._outcome

    async def _run(self, folder: Path) -> None:
        model = folder / "tiny"
        write_tiny_checkpoint(model)
        # Opened before the stack starts: importing transformers blocks this process, and so its proxies, for seconds.
        oracle = _open_oracle(model)
        clock = make_wall_clock(folder) if self._options.hosts is None else None
        shim, tier = None, None
        if self._options.tier:
            directory = folder / "kv"
            shim = make_disk_shim(folder, directory)
            tier = TierFolder(directory) if shim is None else TierFolder(directory, shim.environment)
        flags = ("--speculate", self._options.speculate)
        if self._options.hosts is None:
            stack = ChaosStack(model, folder, clock, self._options.layout, flags, tier=tier)
        else:
            stack = HostedStack(model, folder, self._options.hosts, flags)
        try:
            await stack.start()
            took_s = await stack.wait_whole(START_S)
            stack.mark_ready()
            self._say(f"stack of {len(stack.places)} processes ready after {took_s:.1f} s")
            cases = await self._undisturbed(stack, oracle)
            scene = Scene(stack, clock, self._draw)
            if tier is not None and stack.tiers is not None:
                scene = replace(scene, tier=TierScene(tier.directory, shim, stack.tiers.counts))
            await self._disturbed(scene, cases)
            await self._aftermath(stack, cases)
        finally:
            self._outcome.crashes = list(filter(is_crash, stack.events))
            await stack.stop()
            if stack.tiers is not None:
                self._outcome.tier, self._outcome.tier_off = stack.tiers.counts.totals, stack.tiers.counts.turned_off
            for page in (clock, shim):
                if page is not None:
                    page.close()

    async def _undisturbed(self, stack: ChaosStack, oracle: "Oracle") -> list[ChaosCase]:
        """Send every request once without faults and check the answers with the oracle."""
        cases = make_cases(self._options.seed, self._options.max_tokens, self._options.per_kind)
        answers = await self._ask(stack, cases)
        plain = [case for case in cases if case.name.startswith("greedy")]
        endings = [ended for case in plain if (ended := stopped(case, answers[case.name].text)) is not None]
        answers |= await self._ask(stack, endings)
        cases += endings

        def expect() -> None:
            for case in cases:
                self._outcome.expected[case.name] = oracle.expect(case, answers[case.name].choices)

        await asyncio.to_thread(expect)
        self._outcome.chosen, self._outcome.close = oracle.tally.tokens, oracle.tally.close
        self._say(f"{len(cases)} undisturbed answers are right: {oracle.tally}")
        return cases

    async def _ask(self, stack: ChaosStack, cases: list[ChaosCase]) -> dict[str, Completion]:
        async with AsyncBatonClient(stack.routers[0].advertised, timeout_s=UNDISTURBED_S) as baton:
            line = asyncio.Semaphore(4)

            async def ask(case: ChaosCase) -> Completion:
                async with line:
                    return await baton.complete(case.prompt, **case.options)

            return dict(zip((case.name for case in cases), await asyncio.gather(*map(ask, cases)), strict=True))

    async def _disturbed(self, scene: Scene, cases: list[ChaosCase]) -> None:
        stack = scene.stack
        admin = tuple(f"{HOST}:{router.admin_port}" for router in stack.routers)
        targets = LoadTargets(tuple(router.advertised for router in stack.routers), admin)
        load = ChaosLoad(cases, targets, self._options.clients, self._options.seed, self._judge)
        watch = ProcessWatch(stack.pids, lambda: load.written_bytes)
        self._outcome.began_s = time.monotonic()
        watch.start()
        load.start()
        try:
            await self._faults(replace(scene, ask=load.ask))
            try:
                await stack.wait_whole(WHOLE_S)
            except NotWhole as error:
                self._outcome.missing = str(error)
            await load.finish(TIMEOUT_S + SPARE_S)
            self._outcome.ended_s = max((each.closed_s or 0.0 for each in load.histories), default=time.monotonic())
            await self._pages(stack)
            await load.explained()
        finally:
            await watch.stop()
        self._outcome.histories, self._outcome.looks = load.histories, watch.looks
        self._outcome.harness_lag_s = watch.longest_lag_s
        for history in load.open.values():
            self._judge(history)

    def _judge(self, history: StreamHistory) -> None:
        self._outcome.findings += check(history, self._outcome.expected[history.case], TIMEOUT_S + SPARE_S)

    async def _faults(self, scene: Scene) -> None:
        """Inject the planned faults; without `wanted`, return only after `minutes`."""
        options, outcome = self._options, self._outcome
        until_s = outcome.began_s + 60 * options.minutes
        soundness = Soundness(scene.stack)
        campaign = FaultCampaign(scene, soundness, options.plan, self._make, self._say, outcome.began_s, options.wanted)
        soundness.start()
        try:
            await campaign.run(until_s)
        finally:
            await soundness.stop()
            outcome.injected, outcome.unmade = sorted(campaign.injected, key=lambda each: each.at_s), campaign.unmade
        if options.wanted is None:
            await asyncio.sleep(max(0.0, until_s - time.monotonic()))

    async def _pages(self, stack: ChaosStack) -> None:
        """Measure the time from the end of the last stream until no worker holds a block any more."""
        while time.monotonic() - self._outcome.ended_s < IDLE_S:
            statuses = await stack.statuses()
            loads = [(worker.worker_id, worker.load) for each in statuses if each for worker in each.workers]
            holding = [f"{name}: {load and load.pages.held}" for name, load in loads if load is None or load.pages.held]
            if loads and not holding:
                self._outcome.pages_free_after_s, self._outcome.held = time.monotonic() - self._outcome.ended_s, ""
                return
            self._outcome.held = ", ".join(holding)
            await asyncio.sleep(POLL_S)

    async def _aftermath(self, stack: ChaosStack, cases: list[ChaosCase]) -> None:
        """Send every request again after the faults and check the answers, which must still be exact."""
        async with AsyncBatonClient(stack.routers[-1].advertised, timeout_s=TIMEOUT_S) as baton:
            for number, case in enumerate(cases):
                history = StreamHistory(number, case.name, Behaviour.READS, f"after-{number}", time.monotonic())
                await read_stream(baton, case, history)
                self._outcome.after += check(history, self._outcome.expected[case.name], TIMEOUT_S)


def _open_oracle(model: Path) -> "Oracle":
    from baton.lab.chaos.exactness.oracle import Oracle

    return Oracle(model)
