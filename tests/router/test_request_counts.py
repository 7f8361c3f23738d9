"""started = answered + cancelled + refused + failed + running at any moment, and tokens as they are read, however
requests interleave.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.process.errors import Aborted, BatonError, InvalidArgument, NotFound
from baton.process.telemetry.spans import NoTelemetry
from baton.router.dispatcher import Dispatcher, DispatcherLimits
from baton.router.model.served_model import ChosenModel
from baton.router.request.journal import Beginning, Streams
from baton.router.trace.record import RequestOutcome, RequestRecord
from baton.router.trace.spans import Tracer
from baton.router.types.events import FailureReason, SequenceOutput
from baton.router.types.request import Operation
from baton.router.types.response import Delta, Finished
from tests.router.replay_world import PROMPT, Fate, World, new_detokenizer, request_of, scheduling_of

MAX_ACTIVE = 4
TURNS = 40  # of the event loop, for what an action sets off
REFUSALS: dict[str, BatonError] = {"invalid": InvalidArgument("prompt", "is bad"), "unknown": NotFound("model", "m")}
KINDS: dict[str, dict[str, Any]] = {
    "one": {},
    "two": {"n": 2, "max_tokens": 6},
    "best": {"best_of": 3, "max_tokens": 5},
    "short": {"max_tokens": 1},
}


class HangingWorld(World):
    """An attempt that is to fail for no reason falls silent instead."""

    def _speak(self, attempt_id: int, request: Any, fate: Fate) -> None:
        if fate.reason is not FailureReason.UNKNOWN:
            super()._speak(attempt_id, request, fate)
            return
        for output in self._pieces(attempt_id, request, request.first_choice, fate)[: fate.outputs]:
            self.inboxes[attempt_id].put(SequenceOutput(*output), 0.0)


class Rigged(Dispatcher):
    """Its requests are prepared already, or refused, or wait for what never comes: their model says which."""

    async def _begin(self, request: Any, deadline_s: float) -> Beginning:
        if request.model in REFUSALS:
            raise REFUSALS[request.model]
        if request.model == "fault":
            raise ValueError("a fault of ours")
        if request.model == "waits":
            await asyncio.Event().wait()
        served: Any = SimpleNamespace(
            name="m",
            weights="own",
            tokenizer=SimpleNamespace(detokenizer=lambda _shown_tokens: new_detokenizer()),
        )
        return Beginning(request_of(**KINDS[request.model]), ChosenModel(served), "", "token")


@dataclass
class Client:
    """Reads one answer, event by event, on request."""

    events: Any
    is_told_at_the_end: bool
    asking: "asyncio.Task[Any] | None" = None
    tokens: int = 0
    usage: int = 0
    outcome: RequestOutcome | None = None  # as this client saw it
    asked: bool = False  # a generator that was never read is no request yet
    begun: bool = False
    left: bool = False  # and reads no more

    def take(self) -> None:
        """What has come since."""
        if self.asking is None or not self.asking.done():
            return
        asking, self.asking = self.asking, None
        try:
            event = asking.result()
        except StopAsyncIteration:
            self.outcome = self.outcome or RequestOutcome.ANSWERED
        except (BatonError, ValueError) as error:
            refused = isinstance(error, BatonError) and not self.begun and error.code.name != "INTERNAL"
            adopted = isinstance(error, Aborted)  # another stream continues it
            self.outcome = (
                RequestOutcome.CANCELLED if adopted else RequestOutcome.REFUSED if refused else RequestOutcome.FAILED
            )
        else:
            self.begun = True
            self.tokens += len(event.token_ids) if isinstance(event, Delta) else 0
            if isinstance(event, Finished) and event.summary is not None:
                self.usage, self.outcome = event.summary.usage.completion_tokens, RequestOutcome.ANSWERED

    async def leave(self) -> None:
        """In the middle of a wait, or between two events."""
        if self.asking is not None:
            self.asking.cancel()
            await asyncio.gather(self.asking, return_exceptions=True)
            self.take_or_forget()
        await self.events.aclose()
        self.left = True
        self.outcome = self.outcome or (RequestOutcome.CANCELLED if self.asked else None)

    def take_or_forget(self) -> None:
        if self.asking is not None and self.asking.cancelled():
            self.asking = None
        self.take()


@dataclass
class Clients:
    dispatcher: Dispatcher
    records: list[RequestRecord] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    def ask(self, kind: str) -> None:
        request: Any = SimpleNamespace(
            model=kind, operation=Operation.GENERATE, tenant="", limits=None, is_streamed=True
        )
        events = self.dispatcher.answer(request, None, None)
        self.clients.append(Client(events, kind == "best"))

    async def settle(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
            for client in self.clients:
                client.take()

    def check(self) -> None:
        counts = self.dispatcher.accounts.counts
        ended = Counter(dict.fromkeys(RequestOutcome, 0))
        for (outcome, _), count in counts.ended.items():
            ended[outcome] += count
        assert counts.started == ended.total() + counts.running
        assert self.dispatcher.active == counts.running
        assert len(self.records) == ended.total(), "each leaves one record"
        read = sum(client.tokens for client in self.clients if not client.is_told_at_the_end)
        best = [record for record in self.records if record.prepared and not record.prepared.streams]
        made = counts.generated_tokens.total() - read
        assert made >= sum(record.completion_tokens for record in best)
        assert made >= sum(client.usage for client in self.clients if client.is_told_at_the_end)
        given = counts.prompt_tokens.total()
        assert given % len(PROMPT) == 0 and given <= counts.started * len(PROMPT)

    def check_ended(self) -> None:
        counts = self.dispatcher.accounts.counts
        seen = Counter(client.outcome for client in self.clients if client.outcome is not None)
        ended: Counter[RequestOutcome] = Counter()
        for (outcome, _), count in counts.ended.items():
            ended[outcome] += count
        assert (counts.running, ended) == (0, seen)
        best = [record for record in self.records if record.prepared and not record.prepared.streams]
        read = sum(client.tokens for client in self.clients if not client.is_told_at_the_end)
        assert counts.generated_tokens.total() == read + sum(record.completion_tokens for record in best)


pytestmark = pytest.mark.usefixtures("no_pauses")
FATES = st.lists(
    st.builds(
        Fate,
        outputs=st.integers(0, 8),
        reason=st.sampled_from(
            [FailureReason.WORKER_LOST, FailureReason.NONFINITE, FailureReason.UNKNOWN, FailureReason.ADOPTED, None]
        ),
        piece=st.integers(1, 3),
    ),
    max_size=8,
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from([*KINDS, *REFUSALS, "fault", "waits"])),
        st.tuples(st.sampled_from(["read", "read", "read", "leave"]), st.integers(0, 9)),
        st.just(("drain", 0)),
    ),
    min_size=8,
    max_size=60,
)


@settings(max_examples=80, deadline=None)
@given(fates=FATES, actions=ACTIONS)
def test_nothing_is_lost_and_nothing_counted_twice(
    runner: asyncio.Runner, fates: list[Fate], actions: list[tuple[str, Any]]
) -> None:
    async def act() -> None:
        scheduling = scheduling_of(HangingWorld(list(fates)))
        scheduling.queue.forecast = SimpleNamespace(retry_after_s=lambda: 1.0)  # type: ignore[assignment]
        records: list[RequestRecord] = []
        tracer = Tracer(NoTelemetry(), observers=[records.append])
        streams = Streams(b"r" * 16, None, lambda router_id, stream: None)
        readiness: Any = None
        meters: Any = SimpleNamespace(begin=lambda tenant, limits, now: None)
        dispatcher = Rigged(readiness, scheduling, tracer, DispatcherLimits(60.0, MAX_ACTIVE), streams, meters)
        world = Clients(dispatcher, records)
        for action, which in actions:
            if action == "ask":
                world.ask(which)
            elif action == "drain":
                dispatcher.draining = True
            elif world.clients:
                client = world.clients[which % len(world.clients)]
                if action == "leave":
                    await client.leave()
                elif client.asking is None and not client.left:
                    client.asking, client.asked = asyncio.ensure_future(anext(client.events)), True
            await world.settle()
            world.check()
        for client in world.clients:
            await client.leave()
            world.check()
        world.check_ended()

    runner.run(act())
