"""A request's real generation over workers that die, repeat themselves and speak late, as drawn; all in memory.

The model's next token is a hash of prompt, choice and all tokens before it, so one that is lost, repeated or made from
something else changes everything behind it.
"""

import asyncio
import functools
import hashlib
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from baton.process.registry.worker_record import WorkerRole
from baton.router.admission.queue import Admitted
from baton.router.fleet.fleet import Inbox, WakeUpLimiter
from baton.router.fleet.weights import OpenRequests
from baton.router.fleet.wire import Tag
from baton.router.placement.cluster import Cluster
from baton.router.placement.decide import Decision, Placement, Weighed
from baton.router.placement.policies import Costs
from baton.router.request.resume import ReceivedAnswer, ReceivedChoice, Resumption
from baton.router.request.run import RequestDeps, RequestRunner
from baton.router.trace.record import Timeline
from baton.router.types.events import (
    Alternative,
    Failed,
    FailureReason,
    FirstStep,
    KvReceived,
    PrefillTimings,
    SequenceEnd,
    SequenceOutput,
    TokenLogprob,
)
from baton.router.types.placement import WorkerView
from baton.router.types.request import Operation, PreparedRequest, Sampling, TokenPrompt
from baton.router.types.response import ChoiceFinished, Delta
from baton.text.detokenizer import Detokenizer, silent_token_ids
from baton.text.packed_tokens import TokenPacker
from tests.router.tokenizers_for_tests import byte_level

PROMPT = tuple(range(60, 71))
PLACEMENT = Placement("p", "d", 0, 0, 0, 0, 1, 1)
DECODE = WorkerView("d", WorkerRole.DECODE, b"f", 100, 8, 100, 8)
DECISION = Decision((DECODE,), (DECODE,), None, Weighed((DECODE,), Costs((0.0,), {}), DECODE), None)
BLOCK_TOKENS = 4
STOP_TOKEN = 256
TOKENIZER = byte_level()
SILENT = silent_token_ids(TOKENIZER)
ALPHABET = TOKENIZER.encode("abcdefgh7xy é€𝄞").ids  # characters of one byte to four, often cut in between


@dataclass(frozen=True)
class Fate:
    """What becomes of one attempt: decode's outputs in pieces of this size, so many of them, then this failure."""

    outputs: int
    reason: FailureReason | None = FailureReason.WORKER_LOST  # None: it ends well
    piece: int = 1
    with_first_step: bool = True
    gap: bool = False  # the last piece before the failure is missing one before it
    late: int = 0  # so many pieces are said again, and otherwise, when another attempt has begun


WELL = Fate(0, None)


def next_token(prefix: tuple[int, ...], choice: int) -> int:
    digest = hashlib.sha256(repr((prefix, choice)).encode()).digest()
    return STOP_TOKEN if digest[0] < 6 else ALPHABET[digest[1] % len(ALPHABET)]


@functools.cache
def whole_answer(sampling: Sampling, prompt: tuple[int, ...], choice: int) -> tuple[int, ...]:
    made: tuple[int, ...] = ()
    while len(made) < sampling.max_tokens:
        made += (next_token(prompt + made, choice),)
        if made[-1] in sampling.stop_token_ids:
            break
    return made


def logprob_of(token_id: int, offset: int) -> TokenLogprob:
    return TokenLogprob(-offset - token_id / 256, (Alternative(token_id, -offset - token_id / 256),))


def request_of(max_tokens: int = 20, n: int = 1, best_of: int = 1, stop: tuple[str, ...] = (), **more: Any) -> Any:
    stop_token_ids = more.pop("stop_token_ids", (STOP_TOKEN,))
    of_sampling = {name: more.pop(name) for name in tuple(more) if name in Sampling.__dataclass_fields__}
    sampling = Sampling(
        max_tokens=max_tokens, temperature=1.0, seed=7, stop_token_ids=stop_token_ids, n=max(n, best_of),
        **({"logprobs": 0 if best_of > n else None} | of_sampling),
    )  # fmt: skip
    return PreparedRequest(
        operation=Operation.GENERATE, prompt=TokenPrompt(PROMPT), request_id="r", sampling=sampling, stop=stop, n=n,
        logprobs=of_sampling.get("logprobs"), token_ids=PROMPT, packed_tokens=TokenPacker().pack(PROMPT),
        cache_root=b"root", block_hashes=(), fingerprint=b"f", block_tokens=BLOCK_TOKENS, **more,
    )  # fmt: skip


@dataclass
class OwnWeights:
    """Of workers that have those that they were started with, and no adapters."""

    open_requests: OpenRequests = field(default_factory=lambda: OpenRequests(lambda: None, lambda _: True))


@dataclass
class World:
    """The fleet and the queue of one request. `fates` are those of its attempts, in the order of their dispatch."""

    fates: list[Fate]
    dispatched: list[PreparedRequest] = field(default_factory=list)
    inboxes: dict[int, Inbox[Any]] = field(default_factory=dict)
    late: list[tuple[int, SequenceOutput]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    admitted: int = 0
    ended: int = 0
    wake_ups: WakeUpLimiter = field(default_factory=WakeUpLimiter)
    cluster: Cluster = field(default_factory=Cluster)
    adapters: OwnWeights = field(default_factory=OwnWeights)
    on_dispatch: Callable[[PreparedRequest], None] = lambda request: None

    def open(self, attempt_id: int, placement: Placement, inbox: Inbox[Any]) -> None:
        self.inboxes[attempt_id] = inbox

    def close(self, attempt_id: int) -> None:
        del self.inboxes[attempt_id]

    def cancel(self, attempt_id: int, endpoint: str, keep_landed: bool = False) -> None:
        self.cancelled.append(attempt_id)

    def drains(self, endpoint: str) -> None:
        pass

    def submit(self, attempt_id: int, *rest: Any) -> object:
        """Settled in the next turn of the event loop."""
        self.admitted += 1
        asyncio.get_running_loop().call_soon(rest[-1], Admitted(PLACEMENT, time.monotonic(), DECISION))
        return attempt_id

    def withdraw(self, entry: object) -> None:
        self.ended += 1

    def ended_(self, attempt_id: int, answered: bool) -> None:
        self.ended += 1

    def dispatch(self, tag: Tag, request: PreparedRequest, placement: Placement) -> None:
        self.dispatched.append(request)
        self.on_dispatch(request)
        fate = self.fates.pop(0) if self.fates else WELL
        over = [late for late in self.late if late[0] not in self.inboxes]
        for attempt_id, output in over:  # whoever made it is not listened to any more
            for inbox in self.inboxes.values():
                inbox.put(output._replace(attempt_id=attempt_id), 0.0)
        self.late = [late for late in self.late if late not in over]
        self._speak(tag.attempt_id, request, fate)

    def _speak(self, attempt_id: int, request: PreparedRequest, fate: Fate) -> None:
        inbox = self.inboxes[attempt_id]
        pieces = [self._pieces(attempt_id, request, choice, fate) for choice in request.choices]
        if fate.with_first_step:
            first = tuple(first_of(each[0]) for each in pieces)
            inbox.put(FirstStep(attempt_id, first, PrefillTimings(0.0, (1.0,), 1.0, 0)), 0.0)
        said = [piece for step in itertools.zip_longest(*pieces) for piece in step if piece is not None]
        if fate.reason is not None:
            beyond = said[fate.outputs + 1 : fate.outputs + 2] if fate.gap else []
            said = said[: fate.outputs] + beyond
        inbox.put(KvReceived(attempt_id, 1, 1.0, 0.0, 0.0, 1.0, "grpc", 0), 0.0)
        for output in said:
            inbox.put(output, 0.0)
        wrong = [output._replace(token_ids=tuple(reversed(ALPHABET))[: len(output.token_ids)]) for output in said]
        self.late += [(attempt_id, output) for output in wrong[: fate.late]]
        if fate.reason is not None:
            inbox.put(Failed(attempt_id, "d", fate.reason, "drawn"), 0.0)

    def _pieces(self, attempt_id: int, request: PreparedRequest, choice: int, fate: Fate) -> list[SequenceOutput]:
        """Decode's outputs, from the first token of this attempt on."""
        begin, sampling = request.answered_tokens, request.sampling
        prompt = request.token_ids[: len(request.token_ids) - begin]
        answer = whole_answer(sampling, prompt, choice)
        assert request.token_ids[len(prompt) :] == answer[:begin], "the answer so far is not what was said"
        assert begin < len(answer), "it has ended already"
        pieces = []
        for offset in range(begin, len(answer), fate.piece):
            token_ids = answer[offset : offset + fate.piece]
            is_last = offset + len(token_ids) == len(answer)
            stopped = token_ids[-1] in sampling.stop_token_ids
            end = (SequenceEnd.STOP if stopped else SequenceEnd.LENGTH) if is_last else None
            told = tuple(logprob_of(token_id, offset + i) for i, token_id in enumerate(token_ids))
            logprobs = told if sampling.logprobs is not None else ()
            pieces.append(SequenceOutput(attempt_id, choice, offset, token_ids, end, logprobs))
        return pieces


def first_of(output: SequenceOutput) -> SequenceOutput:
    end = output.end if len(output.token_ids) == 1 else None
    return output._replace(token_ids=output.token_ids[:1], logprobs=output.logprobs[:1], end=end)


def new_detokenizer() -> Detokenizer:
    return Detokenizer(TOKENIZER, SILENT)


@dataclass
class Got:
    """One choice as its reader has it; offsets were contiguous."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: ChoiceFinished | None = None


def scheduling_of(world: World, attempts: int = 6) -> RequestDeps:
    queue: Any = SimpleNamespace(
        submit=world.submit, withdraw=world.withdraw, ended=world.ended_, pump_soon=lambda: None
    )
    fleet: Any = world
    return RequestDeps(world.cluster, fleet, queue, itertools.count(1), attempts)


def generation_of(
    request: PreparedRequest,
    scheduling: RequestDeps,
    received: Mapping[int, tuple[int, ...]] | None = None,
    deadline_s: float = 60.0,
    is_usual: bool = True,
) -> RequestRunner:
    now = time.monotonic()
    resumption = Resumption(ReceivedAnswer({choice: ReceivedChoice(ids) for choice, ids in (received or {}).items()}))
    return RequestRunner(
        request,
        scheduling,
        Timeline(now),
        new_detokenizer,
        now + deadline_s,
        is_usual=is_usual,
        resumption=resumption if received is not None else None,
    )


async def read(generation: RequestRunner, n: int, received: Mapping[int, tuple[int, ...]] | None = None) -> list[Got]:
    """Everything, behind the tokens that were `received`; checked on the way: offsets contiguous, one end each, nothing
    behind it."""
    got = [Got(list((received or {}).get(index, ()))) for index in range(n)]
    async for event in generation.events():
        assert isinstance(event, Delta | ChoiceFinished)
        each = got[event.index]
        assert each.end is None
        if isinstance(event, ChoiceFinished):
            each.end = event
            continue
        assert event.offset == len(each.token_ids) or (received and not event.token_ids)
        each.token_ids += event.token_ids
        each.text += event.text
        each.logprobs += event.logprobs
    assert all(each.end is not None for each in got)
    return got
