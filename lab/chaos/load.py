"""Concurrent clients of a chaos run, and the measurement of cancelled streams."""

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.client import (
    AsyncAdminClient,
    AsyncBatonClient,
    BatonClientError,
    Delta,
    Event,
    Finished,
    RequestExplanation,
    RequestWhy,
    RetryPolicy,
    Started,
)
from baton.lab.chaos.checker import ExpectedChoice, check
from baton.lab.chaos.history import (
    Behaviour,
    ChaosCase,
    ObservedAttempt,
    StreamEnd,
    StreamHistory,
    StreamPiece,
    make_cases,
)
from baton.lab.chaos.stack import ChaosStack, Layout, PageWatch
from baton.lab.report.statistics import percentile
from baton.launch.tiny_checkpoint import write_tiny_checkpoint

TIMEOUT_S = 60.0  # deadline of a stream
PAUSE_S = 0.4  # longest pause between two streams of one client
MOST_EXTRA = 24  # maximum number of concurrent extra streams, which `ask` starts
EXTRA_EVENTS = 20  # most events after which an extra stream is cancelled
SLOW_S = 0.02  # pause of a slow client between two events
EXPLAIN_S = 1.0
HISTORY_BYTES = 1500  # approximate memory of a stream's history without its token times
START_S = 120.0
REPORT_PERIOD_S = 0.02
SETTLED_S = 0.2  # time without held blocks after which a worker counts as free
WATCHED_S = 5.0  # longest observation after a cancel; blocks that are held longer count as held for this long
LONGEST_S = 0.5  # longest time from the start of a single stream to its cancel
MOST_BEGUN = 0.6  # a burst is cancelled once a random fraction of its streams, at most this one, has a token
BEGIN_S = 5.0  # longest wait until enough streams of a burst have a token
POLL_S = 0.005
BOUND_S = 0.1  # allowed time from a cancel until blocks are free, in addition to an engine step and a report period
AFTER = 20  # number of cancels between two requests whose answers are checked


@dataclass(frozen=True, slots=True)
class LoadTargets:
    """Addresses of the routers. `public`: for clients, through proxies. `admin`: for the harness, without proxies."""

    public: tuple[str, ...]
    admin: tuple[str, ...]


class ChaosLoad:
    """Concurrent clients, which start streams from `start` to `finish`. `histories`: histories of finished streams."""

    def __init__(
        self,
        cases: Sequence[ChaosCase],
        targets: LoadTargets,
        clients: int,
        seed: int,
        judge: Callable[[StreamHistory], None] = lambda history: None,
    ) -> None:
        """Create a load. `judge`: called with the history of each finished stream."""
        self._judge = judge
        self._cases = cases
        self._targets = targets
        self._clients = clients
        self._draw = random.Random(f"load {seed}")
        self._tasks: list[asyncio.Task[None]] = []
        self._explaining: set[asyncio.Task[None]] = set()
        self._extra: set[asyncio.Task[None]] = set()
        self._batons: list[AsyncBatonClient] = []  # client libraries of the running clients, one each
        self._admins: list[AsyncAdminClient] = []
        self._ending = asyncio.Event()
        self._begun = 0
        self.written_bytes = 0  # approximate memory of the histories
        self.histories: list[StreamHistory] = []
        self.open: dict[int, StreamHistory] = {}

    def start(self) -> None:
        once = RetryPolicy(attempts=1)
        self._admins = [AsyncAdminClient(each, timeout_s=EXPLAIN_S, retry=once) for each in self._targets.admin]
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self._clients)]

    def ask(self, count: int) -> None:
        """Start at most `count` extra streams with long prompts that are in no prefix cache.

        Only their prompts matter, so the streams are cancelled early; at most MOST_EXTRA are open at a time.
        """
        longest = sorted(self._cases, key=lambda case: len(case.prompt))[-len(self._cases) // 3 :]
        count = min(count, MOST_EXTRA - len(self._extra), len(self._batons))
        for baton in self._draw.sample(self._batons, max(0, count)):
            task = asyncio.create_task(self._stream(baton, self._draw.choice(longest), extra=True))
            self._extra.add(task)
            task.add_done_callback(self._extra.discard)

    async def finish(self, within_s: float) -> None:
        """Start no more streams and wait for open streams. Streams still open after `within_s` count as hanging."""
        self._ending.set()
        tasks = [*self._extra, *self._tasks]
        _, hanging = await asyncio.wait(tasks, timeout=within_s)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.histories += self.open.values()

    async def explained(self) -> None:
        """Wait until the histories of the last streams contain the routers' explanations."""
        await asyncio.gather(*self._explaining)
        for admin in self._admins:
            await admin.close()

    async def _client(self, number: int) -> None:
        """Run one client, with a separate connection as if it were on another machine."""
        first = number % len(self._targets.public)
        targets = (*self._targets.public[first:], *self._targets.public[:first])
        async with AsyncBatonClient(targets, timeout_s=TIMEOUT_S) as baton:
            self._batons.append(baton)
            while not self._ending.is_set():
                await self._stream(baton, self._draw.choice(self._cases))
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._draw.uniform(0.0, PAUSE_S)):
                        await self._ending.wait()
            self._batons.remove(baton)
            while self._extra:  # wait for extra streams, which may use this client's connection
                await asyncio.wait(self._extra)

    async def _stream(self, baton: AsyncBatonClient, case: ChaosCase, extra: bool = False) -> None:
        """Run one stream. `extra`: `ask` started the stream, and its prompt is in no prefix cache."""
        number, self._begun = self._begun, self._begun + 1
        behaviour = Behaviour.CANCELS if extra else self._draw.choices(list(Behaviour), (84, 8, 8))[0]
        name = f"chaos-{number}-{self._draw.randrange(2**40)}"
        history = StreamHistory(number, case.name, behaviour, name, time.monotonic())
        self.open[number] = history
        most_events = EXTRA_EVENTS if extra else 80
        patience = self._draw.randrange(1, most_events) if behaviour is Behaviour.CANCELS else None
        # Half of the streams may hit the prefix caches.
        salt = f"salt {number}" if extra else self._draw.choice(("", f"salt {number}"))
        await read_stream(baton, case, history, patience, salt)
        del self.open[number]
        self._judge(history)
        history.pack()
        self.written_bytes += HISTORY_BYTES + 8 * len(history.token_times)
        self.histories.append(history)
        asking = asyncio.create_task(self._explain(history))
        self._explaining.add(asking)
        asking.add_done_callback(self._explaining.discard)

    async def _explain(self, history: StreamHistory) -> None:
        await explain(self._admins, history)


async def read_stream(
    baton: AsyncBatonClient, case: ChaosCase, history: StreamHistory, patience: int | None = None, salt: str = ""
) -> None:
    """Send a request and record its stream in `history`.

    `patience`: number of events after which the client cancels; None: it never does.
    """
    options: dict[str, Any] = {**case.options, "request_id": history.request_id, "cache_salt": salt}
    events = baton.generate(case.prompt, **options)
    seen = 0
    try:
        async with aclosing(events):
            async for event in events:
                _note(history, event)
                seen += 1
                if patience is not None and seen > patience:
                    break
                if history.behaviour is Behaviour.SLOW:
                    await asyncio.sleep(SLOW_S)
    except BatonClientError as error:
        history.failure = f"{error.code.name} {error.reason or ''}: {error}"
    history.closed_s = time.monotonic()


def _note(history: StreamHistory, event: Event) -> None:
    now = time.monotonic()
    match event:
        case Started():
            history.starts += 1
        case Delta():
            logprobs = tuple(each.logprob for each in event.logprobs or ())
            history.pieces.append(StreamPiece(now, event.index, event.offset, event.token_ids, event.text, logprobs))
        case Finished():
            history.ends.append(StreamEnd(now, event.index, event.reason.value, event.matched_stop))


async def explain(admins: Sequence[AsyncAdminClient], history: StreamHistory) -> None:
    """Add attempts and numbers of drafted tokens to `history`, from all routers that still know the request."""
    for found in await asyncio.gather(*(_why(admin, history.request_id) for admin in admins)):
        if found is None:
            continue
        history.attempts += _attempts(found.placed)
        if found.drafts is not None:
            history.drafted_tokens += found.drafts.drafted_tokens
            history.accepted_tokens += found.drafts.accepted_tokens


async def _why(admin: AsyncAdminClient, request_id: str) -> RequestWhy | None:
    try:
        return await admin.why(request_id)
    except BatonClientError:
        return None


def _attempts(explanation: RequestExplanation) -> list[ObservedAttempt]:
    found = []
    for attempt in explanation.attempts:
        chosen: Mapping[str, str] = {each.role: each.worker_id for each in attempt.candidates if each.chosen}
        found.append(ObservedAttempt(chosen.get("prefill", ""), chosen.get("decode", ""), attempt.failure))
    return found


@dataclass
class Cancels:
    """Times from a client's cancel until no worker of a role holds a block, in seconds, by role.

    `single_s`: one per stream that was cancelled alone. `burst_s`: one per burst of streams.
    """

    burst: int = 0  # number of streams of a burst
    single_s: dict[str, list[float]] = field(default_factory=lambda: {"prefill": [], "decode": []})
    burst_s: dict[str, list[float]] = field(default_factory=lambda: {"prefill": [], "decode": []})
    before_first_token: int = 0
    exact: int = 0
    inexact: int = 0
    longest_step_s: dict[str, float] = field(default_factory=dict)  # longest engine step during the run, by role
    nothing_held: int = 0  # number of cancels that measured nothing, since no worker held a block afterwards

    @property
    def count(self) -> int:
        return len(self.single_s["decode"]) + self.burst * len(self.burst_s["decode"])

    def bound_s(self, role: str) -> float:
        return BOUND_S + self.longest_step_s[role] + REPORT_PERIOD_S

    @property
    def is_good(self) -> bool:
        in_time = (
            max(*self.single_s[role], *self.burst_s[role], 0.0) <= self.bound_s(role) for role in self.longest_step_s
        )
        return not self.inexact and self.count > 0 and all(in_time)


async def run_cancels(
    singles: int, bursts: int, burst: int, seed: int, layout: Layout, say: Callable[[str], None]
) -> Cancels:
    """Cancel streams and bursts one after another, and measure how long workers hold the blocks of each.

    Only one stream or burst runs at a time, so that all held blocks belong to it. Every prompt is new. Measured times
    are at most 20 ms too long, since workers report every 20 ms.

    Raises: NotWhole if the stack does not become ready.
    """
    with tempfile.TemporaryDirectory(prefix="baton-cancels-") as name:
        folder = Path(name)
        write_tiny_checkpoint(folder / "tiny")
        flags = ("--report-period-s", str(REPORT_PERIOD_S))
        stack = ChaosStack(folder / "tiny", folder, None, layout, flags, records_steps=True)
        watch = PageWatch(stack.workers)
        try:
            await stack.start()
            await stack.wait_whole(START_S)
            stack.mark_ready()
            watch.start()
            say("stack ready")
            began_s = time.monotonic()
            found = await _cancel(stack, watch, singles, bursts, burst, random.Random(f"cancels {seed}"), say)
            for role in found.single_s:
                steps_s = (s for since, s in stack.steps(role) if since >= began_s)
                found.longest_step_s[role] = max(steps_s, default=0.0)
            return found
        finally:
            await watch.stop()
            await stack.stop()


async def _cancel(
    stack: ChaosStack,
    watch: PageWatch,
    singles: int,
    bursts: int,
    burst: int,
    draw: random.Random,
    say: Callable[[str], None],
) -> Cancels:
    found = Cancels(burst)
    [case] = [case for case in make_cases(0, 40, 1) if case.name == "greedy 0"]
    async with AsyncBatonClient(stack.routers[0].direct, timeout_s=TIMEOUT_S) as baton:
        answer = await baton.complete(case.prompt, **case.options)
        choice = answer.choices[0]
        expected = [ExpectedChoice(choice.token_ids, choice.text, choice.finish_reason.value, choice.matched_stop)]
        for number in range(singles + bursts):
            together = 1 if number < singles else burst
            held_s = await _give_up(watch, baton, [_prompt(draw) for _ in range(together)], draw, found)
            for role, seconds in (found.single_s if number < singles else found.burst_s).items():
                seconds.append(held_s[role])
            if number % AFTER == 0 or together > 1:
                await _ask_again(baton, case, expected, found)
            if (number + 1) % 100 == 0:
                p99_ms = 1e3 * percentile(found.single_s["decode"], 99)
                say(f"{number + 1} of {singles + bursts}: p99 on decode workers {p99_ms:.0f} ms")
    return found


async def _give_up(
    watch: PageWatch, baton: AsyncBatonClient, prompts: Sequence[list[int]], draw: random.Random, found: Cancels
) -> dict[str, float]:
    """Start streams and cancel all of them together. Return the seconds for which each role held blocks afterwards."""
    tokens = [0] * len(prompts)

    async def stream(place: int) -> None:
        async with aclosing(baton.generate(prompts[place], max_tokens=1000, ignore_eos=True)) as events:
            async for _ in events:
                tokens[place] += 1

    tasks = [asyncio.create_task(stream(place)) for place in range(len(prompts))]
    if len(prompts) == 1:
        await asyncio.sleep(draw.uniform(0.0, LONGEST_S))
    else:
        await _begun(tokens, draw.uniform(0.0, MOST_BEGUN))
    cancelled_s = time.monotonic()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    found.before_first_token += tokens.count(0)
    held_s = {"prefill": 0.0, "decode": 0.0}
    for name, free_s in (await watch.free_since(SETTLED_S, WATCHED_S)).items():
        role, seconds = name.partition("-")[0], WATCHED_S if free_s is None else free_s - cancelled_s
        held_s[role] = max(held_s[role], seconds)
    found.nothing_held += not any(held_s.values())
    return held_s


async def _begun(tokens: Sequence[int], share: float) -> None:
    """Wait until more than `share` of a burst's streams have a token, or BEGIN_S have passed."""
    until_s = time.monotonic() + BEGIN_S
    while sum(map(bool, tokens)) <= share * len(tokens) and time.monotonic() < until_s:  # noqa: ASYNC110 -- counts notify nothing
        await asyncio.sleep(POLL_S)


async def _ask_again(
    baton: AsyncBatonClient, case: ChaosCase, expected: Sequence[ExpectedChoice], found: Cancels
) -> None:
    history = StreamHistory(0, case.name, Behaviour.READS, "", time.monotonic())
    await read_stream(baton, case, history)
    if check(history, expected, TIMEOUT_S):
        found.inexact += 1
    else:
        found.exact += 1


def _prompt(draw: random.Random) -> list[int]:
    return [draw.randrange(3, 259) for _ in range(draw.choice((5, 60, 300, 900)))]
