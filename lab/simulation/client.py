"""Simulated clients: they send requests drawn from the seed, and compare the answers with the model's."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.client import AsyncBatonClient
from baton.client.errors import BatonClientError
from baton.client.requests import GenerateOptions
from baton.client.types import Delta, Event, Finished, FinishReason
from baton.lab.protocol.state import ClientPhase
from baton.lab.protocol.trace_check import TraceCheck
from baton.lab.simulation.host import detokenizer, text_of
from baton.lab.simulation.model import ExpectedAnswer, ModelRequest, expected_answer
from baton.text.stop_strings import StopFilter


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """Request of a simulated client. `cancel_after_s`: time after which the client disconnects; None: it does not."""

    number: int
    at_s: float  # time of the request since the start of the load
    asked: ModelRequest
    choices: int
    logprobs: bool
    deadline_s: float
    cancel_after_s: float | None
    salt: str = ""
    stop: str | None = None
    best_of: int = 0  # number of computed choices, of which the likeliest are returned; 0: all choices are returned

    @property
    def made(self) -> int:
        """Number of computed choices."""
        return max(self.best_of, self.choices)

    @property
    def options(self) -> GenerateOptions:
        asked = self.asked
        options: GenerateOptions = {
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "seed": asked.seed,
            "n": self.choices,
            "ignore_eos": asked.ignores_end,
            "timeout_s": self.deadline_s,
            "cache_salt": self.salt,
            "request_id": f"request-{self.number}",
        }
        if asked.looks_back:
            options["frequency_penalty"] = 0.5
        if self.logprobs:
            options["logprobs"] = 1
        if self.best_of:
            options["best_of"] = self.best_of
        if self.stop is not None:
            options["stop"] = self.stop
        return options

    def __str__(self) -> str:
        asked = self.asked
        kind = "sampled" if asked.temperature else "greedy"
        return f"{len(asked.token_ids)} + {asked.max_tokens} tokens, {self.choices} x {kind}"


def draw_requests(draw: random.Random, count: int, span_s: float, most_tokens: int) -> list[SimulatedRequest]:
    """Draw requests. Many prompts share a prefix, so that prefix caches and fetches of KV are used."""
    stems = [_tokens(draw, draw.randint(4, most_tokens // 2)) for _ in range(2)]
    requests: list[SimulatedRequest] = []
    bursts = draw.random() < 0.3
    for number in range(count):
        at_s = draw.random() * span_s * (0.1 if bursts else 1.0)
        requests.append(_request(draw, number, at_s, stems, most_tokens))
    return sorted(requests, key=lambda request: request.at_s)


def _request(
    draw: random.Random, number: int, at_s: float, stems: Sequence[tuple[int, ...]], most_tokens: int
) -> SimulatedRequest:
    stem = draw.choice(stems) if draw.random() < 0.6 else ()
    tokens = (*stem, *_tokens(draw, draw.randint(1, most_tokens // 2)))
    sampled = draw.random() < 0.5
    asked = ModelRequest(
        token_ids=tokens,
        max_tokens=draw.choice((1, 2, 3, 6, 12, 24, 40)),
        temperature=1.0 if sampled else 0.0,
        seed=draw.getrandbits(32),
        ignores_end=draw.random() < 0.5,
        looks_back=draw.random() < 0.15,
    )
    choices = draw.choice((1, 1, 1, 1, 2, 3)) if sampled else 1
    return SimulatedRequest(
        number,
        at_s,
        asked,
        choices=choices,
        best_of=min(4, choices + draw.choice((1, 2))) if sampled and draw.random() < 0.15 else 0,
        logprobs=draw.random() < 0.2,
        deadline_s=draw.uniform(0.02, 2.0) if draw.random() < 0.05 else draw.uniform(20.0, 40.0),
        cancel_after_s=draw.random() ** 2 * 2.0 if draw.random() < 0.12 else None,
        salt=f"salt-{number}" if draw.random() < 0.1 else "",
        stop=chr(draw.randint(97, 122)) if draw.random() < 0.1 else None,
    )


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randbytes(count))


class RequestEnding(Enum):
    """End of a request as its client saw it."""

    ANSWERED = auto()
    FAILED = auto()
    CANCELLED = auto()  # the client cancelled the request


@dataclass(eq=False, slots=True)
class SimulatedHistory:
    """Record of what a client saw of one request. Times are monotonic seconds."""

    request: SimulatedRequest
    begun_s: float = 0.0
    ended_s: float | None = None
    end: RequestEnding | None = None
    cause: str = ""  # reason of a failure
    message: str = ""
    events: list[Event] = field(default_factory=list)
    longest_gap_s: float = 0.0  # longest time between two tokens


_PHASES = {
    RequestEnding.ANSWERED: ClientPhase.ANSWERED,
    RequestEnding.CANCELLED: ClientPhase.LEFT,
    RequestEnding.FAILED: ClientPhase.FAILED,
}


async def ask(clients: Sequence[AsyncBatonClient], history: SimulatedHistory, check: TraceCheck) -> None:
    """Send the request to the first router that accepts it, and read its answer to the end. `check` follows it."""
    loop = asyncio.get_running_loop()
    history.begun_s = loop.time()
    request = history.request
    client, request_id = clients[request.number % len(clients)], request.options["request_id"]
    check.asked_by_client(request_id, request.made, in_order=not request.best_of)
    try:
        async with asyncio.timeout(request.cancel_after_s):
            last_s = None
            async with aclosing(client.generate(request.asked.token_ids, **request.options)) as events:
                async for event in events:
                    history.events.append(event)
                    if isinstance(event, Delta):
                        check.delivered(request_id, event.index, event.offset, len(event.token_ids))
                        now = loop.time()
                        history.longest_gap_s = max(history.longest_gap_s, now - (now if last_s is None else last_s))
                        last_s = now
        history.end = RequestEnding.ANSWERED
    except TimeoutError:
        history.end = RequestEnding.CANCELLED
    except BatonClientError as error:
        history.end, history.cause, history.message = (
            RequestEnding.FAILED,
            error.reason or error.code.name,
            error.message,
        )
    history.ended_s = loop.time()
    check.ended(request_id, _PHASES[history.end])


def wrong_answer(history: SimulatedHistory) -> str | None:
    """Describe the error in a complete or partial answer; None if it is right."""
    for choice in range(history.request.choices):
        fault = _wrong_choice(history, choice)
        if fault is not None:
            return f"choice {choice}: {fault}"
    return None


def _wrong_choice(history: SimulatedHistory, choice: int) -> str | None:
    request = history.request
    deltas = [event for event in history.events if isinstance(event, Delta) and event.index == choice]
    tokens = [token_id for delta in deltas for token_id in delta.token_ids]
    offsets = [delta.offset for delta in deltas]
    expected = _expected(request, choice)
    wanted = list(expected.token_ids)
    begins, at = [], 0
    for delta in deltas:
        begins.append(at)
        at += len(delta.token_ids)
    if offsets != begins:
        return f"offsets are {offsets}, not {begins}"
    if tokens != wanted[: len(tokens)]:
        return f"tokens are {tokens}, not {wanted}"
    if request.logprobs:
        logprobs = [logprob.logprob for delta in deltas for logprob in delta.logprobs or ()]
        if logprobs != list(expected.logprobs[: len(tokens)]):
            return f"log-probabilities are {logprobs}, not {expected.logprobs}"
    finished = next((each for each in history.events if isinstance(each, Finished) and each.index == choice), None)
    text = "".join(delta.text for delta in deltas)
    if finished is None:
        return "the answer has no end event" if history.end is RequestEnding.ANSWERED else None
    if len(tokens) != len(wanted):
        return f"ended after {len(tokens)} of {len(wanted)} tokens"
    if text != expected.text:
        return f"the text is {text!r}, not {expected.text!r}"
    reason = FinishReason.STOP if expected.stopped else FinishReason.LENGTH
    return None if finished.reason is reason else f"ended by {finished.reason}"


def _expected(request: SimulatedRequest, choice: int) -> "_CutText":
    if not request.best_of:
        return _cut(expected_answer(request.asked, choice), request)
    made = [_cut(expected_answer(request.asked, each), request) for each in range(request.best_of)]
    return sorted(made, key=lambda each: -each.mean_logprob)[choice]  # stable: of equal choices, the first wins


@dataclass(frozen=True, slots=True)
class _CutText:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    stopped: bool

    @property
    def mean_logprob(self) -> float:
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else -float("inf")


def _cut(expected: ExpectedAnswer, request: SimulatedRequest) -> _CutText:
    """Cut the expected text at the stop string, if it contains one."""
    if request.stop is None:
        return _CutText(expected.token_ids, expected.logprobs, text_of(expected.token_ids), expected.stopped)
    made, stops = detokenizer(), StopFilter((request.stop,))
    pieces = [stops.push(token_id, made.push(token_id)) for token_id in expected.token_ids]
    pieces.append(stops.finish(made.finish()))
    tokens = sum(len(piece.token_ids) for piece in pieces)
    text, stopped = "".join(piece.text for piece in pieces), stops.matched is not None or expected.stopped
    return _CutText(expected.token_ids[:tokens], expected.logprobs[:tokens], text, stopped)
