"""Clients under load: each asks one thing after another and writes down what it saw. Judges nothing."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from chaos.cases import Case
from chaos.history import Attempt, Behaviour, End, History, Piece
from client import (
    AsyncAdminClient,
    AsyncBatonClient,
    BatonClientError,
    Delta,
    Event,
    Finished,
    RequestExplanation,
    RetryPolicy,
    Started,
)

TIMEOUT_S = 60.0  # of a stream: what a client asks for
PAUSE_S = 0.4  # the longest between two streams of one client
MOST_EXTRA = 24  # streams beside those that clients always have
EXTRA_EVENTS = 20  # of one of them, at most
SLOW_S = 0.02  # between two events, of a slow client
EXPLAIN_S = 1.0
HISTORY_BYTES = 1500  # beside the times of its tokens: names, end, attempts


@dataclass(frozen=True, slots=True)
class Targets:
    """`public` as clients reach the routers, through their proxies; `admin` as the harness does."""

    public: tuple[str, ...]
    admin: tuple[str, ...]


class Load:
    """So many clients from `start` to `finish`; `histories` grows meanwhile, by the end of each stream."""

    def __init__(
        self,
        cases: Sequence[Case],
        targets: Targets,
        clients: int,
        seed: int,
        judge: Callable[[History], None] = lambda history: None,
    ) -> None:
        """`judge` gets each history that ends, while it still has what was said."""
        self._judge = judge
        self._cases = cases
        self._targets = targets
        self._clients = clients
        self._draw = random.Random(f"load {seed}")
        self._tasks: list[asyncio.Task[None]] = []
        self._explaining: set[asyncio.Task[None]] = set()
        self._extra: set[asyncio.Task[None]] = set()
        self._batons: list[AsyncBatonClient] = []  # of the clients, while they are there
        self._admins: list[AsyncAdminClient] = []
        self._ending = asyncio.Event()
        self._begun = 0
        self.written_bytes = 0  # in histories, about
        self.histories: list[History] = []
        self.open: dict[int, History] = {}

    def start(self) -> None:
        once = RetryPolicy(attempts=1)
        self._admins = [AsyncAdminClient(each, timeout_s=EXPLAIN_S, retry=once) for each in self._targets.admin]
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self._clients)]

    def ask(self, count: int) -> None:
        """So many streams more, at once, of the longest prompts, each as nobody has asked it before.

        Their prompts are what is wanted: they are given up early, and few wait at any time.
        """
        longest = sorted(self._cases, key=lambda case: len(case.prompt))[-len(self._cases) // 3 :]
        count = min(count, MOST_EXTRA - len(self._extra), len(self._batons))
        for baton in self._draw.sample(self._batons, max(0, count)):
            task = asyncio.create_task(self._stream(baton, self._draw.choice(longest), extra=True))
            self._extra.add(task)
            task.add_done_callback(self._extra.discard)

    async def finish(self, within_s: float) -> None:
        """No new streams; what is open ends. Streams that do not are left open in their histories: they hang."""
        self._ending.set()
        tasks = [*self._extra, *self._tasks]
        _, hanging = await asyncio.wait(tasks, timeout=within_s)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.histories += self.open.values()

    async def explained(self) -> None:
        """What routers know of the last streams is in their histories too."""
        await asyncio.gather(*self._explaining)
        for admin in self._admins:
            await admin.close()

    async def _client(self, number: int) -> None:
        """Its own connection, as clients of different machines have."""
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
            while self._extra:  # some of them may be this client's
                await asyncio.wait(self._extra)

    async def _stream(self, baton: AsyncBatonClient, case: Case, extra: bool = False) -> None:
        """`extra`: a stream beside those that the client always has, with a prompt that no cache holds."""
        number, self._begun = self._begun, self._begun + 1
        behaviour = Behaviour.CANCELS if extra else self._draw.choices(list(Behaviour), (84, 8, 8))[0]
        name = f"chaos-{number}-{self._draw.randrange(2**40)}"
        history = History(number, case.name, behaviour, name, time.monotonic())
        self.open[number] = history
        most_events = EXTRA_EVENTS if extra else 80
        patience = self._draw.randrange(1, most_events) if behaviour is Behaviour.CANCELS else None
        # Half of them find what others left in the caches.
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

    async def _explain(self, history: History) -> None:
        history.attempts = await explain(self._admins, history.request_id)


async def read_stream(
    baton: AsyncBatonClient, case: Case, history: History, patience: int | None = None, salt: str = ""
) -> None:
    """Fills in `history`. `patience`: the client leaves after so many events; None: it stays to the end."""
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


def _note(history: History, event: Event) -> None:
    now = time.monotonic()
    match event:
        case Started():
            history.starts += 1
        case Delta():
            logprobs = tuple(each.logprob for each in event.logprobs or ())
            history.pieces.append(Piece(now, event.index, event.offset, event.token_ids, event.text, logprobs))
        case Finished():
            history.ends.append(End(now, event.index, event.reason.value, event.matched_stop))


async def explain(admins: Sequence[AsyncAdminClient], request_id: str) -> list[Attempt]:
    """Where the request went, by all routers that still know of it; none where nobody does."""
    told = await asyncio.gather(*(_explain(admin, request_id) for admin in admins))
    return [attempt for explanation in told if explanation is not None for attempt in _attempts(explanation)]


async def _explain(admin: AsyncAdminClient, request_id: str) -> RequestExplanation | None:
    try:
        return await admin.explain(request_id)
    except BatonClientError:
        return None


def _attempts(explanation: RequestExplanation) -> list[Attempt]:
    found = []
    for attempt in explanation.attempts:
        chosen: Mapping[str, str] = {each.role: each.worker_id for each in attempt.candidates if each.chosen}
        found.append(Attempt(chosen.get("prefill", ""), chosen.get("decode", ""), attempt.failure))
    return found
