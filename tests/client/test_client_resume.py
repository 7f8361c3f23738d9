"""A stream that breaks is resumed behind what has come, at whichever router answers; sync and async alike."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import grpc
import pytest

from baton.client import (
    AsyncBatonClient,
    BatonClient,
    Completion,
    ModelNotFound,
    ProtocolError,
    RetryPolicy,
    Unavailable,
)
from baton.client.channel import CHANNEL_OPTIONS, targets_of
from baton.protos import baton_pb2
from tests.client.conftest import TOKEN, Answer, Events, FakeBaton

QUICK = RetryPolicy(attempts=3, resumes=5, first_wait_s=0.001, longest_wait_s=0.01)
Complete = Callable[..., Completion]


@pytest.fixture(params=["sync", "async"])
def complete(request: pytest.FixtureRequest) -> Complete:
    """`complete(target, prompt, **options)` with the client of either kind."""

    def with_sync(target: Any, prompt: Any, retry: RetryPolicy = QUICK, **options: Any) -> Completion:
        with BatonClient(target, retry=retry) as baton:
            return baton.complete(prompt, **options)

    def with_async(target: Any, prompt: Any, retry: RetryPolicy = QUICK, **options: Any) -> Completion:
        async def run() -> Completion:
            async with AsyncBatonClient(target, retry=retry) as baton:
                return await baton.complete(prompt, **options)

        return asyncio.run(run())

    return with_sync if request.param == "sync" else with_async


def test_broken_stream_resumes_at_the_next_router_after_received_tokens(
    complete: Complete, baton: FakeBaton, other: FakeBaton, breaks: Answer
) -> None:
    baton.answers = [breaks]
    answer = complete(f"{baton.target},{other.target}", "hi", max_tokens=3)
    assert (answer.text, answer.choices[0].token_ids) == ("héllö", (5, 6, 7))
    (asked,) = other.requests
    assert (asked.request_id, asked.resume_token, asked.WhichOneof("request")) == ("r-1", TOKEN, None)
    received = baton_pb2.ReceivedChoice(index=0, token_ids=[5], text_bytes=3)
    assert list(asked.choices) == [received]


def test_router_without_the_stream_receives_the_request(
    complete: Complete, baton: FakeBaton, other: FakeBaton, breaks: Answer, rest: Answer, aborting: Any
) -> None:
    baton.answers = [breaks]
    other.resumed = [aborting(grpc.StatusCode.NOT_FOUND, "no such stream"), rest]
    assert complete([baton.target, other.target], "hi", max_tokens=3).text == "héllö"
    request = other.requests[1].generate
    assert (request.text, request.sampling.max_tokens, request.request_id) == ("hi", 3, "r-1")
    assert request.sampling.seed == 2**63 + 1, "the seed in effect"


def test_unknown_stream_is_not_found(
    complete: Complete, baton: FakeBaton, other: FakeBaton, breaks: Answer, aborting: Any
) -> None:
    baton.answers, other.resumed = [breaks], [aborting(grpc.StatusCode.NOT_FOUND, "no such stream")]
    with pytest.raises(ModelNotFound, match="no such stream"):
        complete([baton.target, other.target], "hi")
    assert len(other.requests) == 2


def test_resuming_stops_when_no_router_answers(
    complete: Complete, baton: FakeBaton, other: FakeBaton, breaks: Answer, aborting: Any
) -> None:
    baton.answers, other.resumed = [breaks], [aborting(grpc.StatusCode.UNAVAILABLE, "gone")]
    with pytest.raises(Unavailable):
        complete([baton.target, other.target], "hi")


def test_stream_may_break_any_number_of_times_while_something_comes(
    complete: Complete, baton: FakeBaton, other: FakeBaton, events: Events, breaks: Answer, aborting: Any
) -> None:
    def one_more(request: Any, context: grpc.ServicerContext) -> Iterable[baton_pb2.GenerateResponse]:
        have = len(request.choices[0].token_ids)
        yield events.started(resume_token=TOKEN)
        yield events.delta(have, [have], ".")
        if have == 20:
            yield events.finished()
        else:
            yield from aborting(grpc.StatusCode.UNAVAILABLE, "gone again")(request, context)

    baton.answers, other.resumed = [breaks], [one_more]
    answer = complete([baton.target, other.target], "hi")
    assert answer.choices[0].token_ids == (5, *range(1, 21))


def test_finished_answer_is_complete_despite_a_later_break(
    complete: Complete, baton: FakeBaton, hello: Answer, aborting: Any
) -> None:
    def broken_at_the_end(request: Any, context: grpc.ServicerContext) -> Iterable[baton_pb2.GenerateResponse]:
        yield from hello(request, context)
        yield from aborting(grpc.StatusCode.UNAVAILABLE, "Socket closed")(request, context)

    baton.answers = [broken_at_the_end]
    assert complete(baton.target, "hi").text == "hello"


@pytest.mark.parametrize("begun", [False, True])
def test_call_cancelled_by_a_stopping_router_resumes_at_the_next(
    complete: Complete,
    baton: FakeBaton,
    other: FakeBaton,
    events: Events,
    hello: Answer,
    aborting: Any,
    begun: bool,
) -> None:
    def cancelled(request: Any, context: grpc.ServicerContext) -> Iterable[baton_pb2.GenerateResponse]:
        if begun:
            yield events.started(resume_token=TOKEN)
            yield events.delta(0, [5], "hé")
        yield from aborting(grpc.StatusCode.CANCELLED, "CANCELLED")(request, context)

    baton.answers = [cancelled, hello]
    targets = [baton.target, other.target] if begun else [baton.target]
    assert complete(targets, "hi", max_tokens=3).text == ("héllö" if begun else "hello")


def test_another_answer_in_its_place_is_a_fault(
    complete: Complete, baton: FakeBaton, other: FakeBaton, events: Events, breaks: Answer
) -> None:
    baton.answers = [breaks]
    other.resumed = [lambda request, context: iter([events.started(resume_token=TOKEN, seed=1)])]
    with pytest.raises(ProtocolError, match="another answer"):
        complete([baton.target, other.target], "hi")


@pytest.mark.parametrize("retry", [RetryPolicy(attempts=1), RetryPolicy(resumes=0, first_wait_s=0.001)])
def test_break_is_an_error_without_retries(
    complete: Complete, baton: FakeBaton, other: FakeBaton, breaks: Answer, retry: RetryPolicy
) -> None:
    baton.answers = [breaks]
    with pytest.raises(Unavailable, match="Socket closed"):
        complete([baton.target, other.target], "hi", retry=retry)
    assert other.requests == []


def test_router_that_cannot_be_reached_is_left_for_the_next(complete: Complete, baton: FakeBaton) -> None:
    assert complete(f"127.0.0.1:1, {baton.target}", "hi").text == "hello"


def test_mute_router_times_out() -> None:
    options = dict(CHANNEL_OPTIONS)
    assert options["grpc.min_reconnect_backoff_ms"] <= 5_000, "gRPC's own bound is 20 s"
    assert options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"] <= 20_000
    assert options["grpc.http2.ping_timeout_ms"] <= 5_000, "of pings that measure the way; gRPC's own bound is 60 s"
    assert options["grpc.http2.max_pings_without_data"] == 0, "a stream only reads: pings would cease after two"


def test_targets_are_separated_by_commas_or_listed() -> None:
    assert targets_of("ipv4:127.0.0.1:1,127.0.0.1:2") == ("ipv4:127.0.0.1:1", "127.0.0.1:2")
    assert targets_of(["a:1", "b:2"]) == ("a:1", "b:2")
    with pytest.raises(ValueError, match="target: empty"):
        targets_of(" , ")
