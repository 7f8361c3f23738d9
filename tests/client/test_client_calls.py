"""What both clients promise, each test run once with either."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2  # type: ignore[import-untyped]

from baton.client import (
    AdminClient,
    AsyncAdminClient,
    AsyncBatonClient,
    BatonClient,
    Cancelled,
    DeadlineExceeded,
    Delta,
    Finished,
    FinishReason,
    InvalidRequest,
    Message,
    ModelNotFound,
    ProtocolError,
    RetryPolicy,
    Started,
    Unavailable,
)
from tests.client.conftest import Answer, Events, FakeBaton

QUICK = RetryPolicy(attempts=3, first_wait_s=0.001, longest_wait_s=0.5)


class Blocking:
    """An asyncio client used like the sync one."""

    def __init__(self, client: AsyncBatonClient | AsyncAdminClient) -> None:
        self._client = client
        self._runner = asyncio.Runner()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._run(getattr(self._client, name)(*args, **kwargs))

    def _run(self, call: Coroutine[Any, Any, Any] | AsyncIterator[Any]) -> Any:
        return self._runner.run(_collect(call) if isinstance(call, AsyncIterator) else call)

    def close(self) -> None:
        self._run(self._client.close())
        self._runner.close()


async def _collect(events: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in events]


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes a client of the one kind or the other."""
    made: list[Any] = []

    def make(target: str, retry: RetryPolicy = QUICK, **options: Any) -> Any:
        sync = request.param == "sync"
        made.append(
            BatonClient(target, retry=retry, **options)
            if sync
            else Blocking(AsyncBatonClient(target, retry=retry, **options))
        )
        return made[-1]

    yield make
    for client in made:
        client.close()


def test_events_are_typed_and_in_order(baton: FakeBaton, connect: Any) -> None:
    started, first, second, finished = connect(baton.target).generate("hi", max_tokens=3)
    assert started == Started("r-1", "tiny", 3, 2**63 + 1)
    assert (first, second) == (Delta(0, 0, (5,), "he"), Delta(0, 1, (6, 7), "llo"))
    assert isinstance(finished, Finished) and finished.reason is FinishReason.LENGTH
    assert finished.timings is not None and finished.timings.transfer_bytes == 4096
    assert (baton.requests[0].text, baton.requests[0].sampling.max_tokens) == ("hi", 3)


def test_complete_collects(baton: FakeBaton, connect: Any) -> None:
    completion = connect(baton.target).complete([1, 2, 3])
    assert (completion.text, completion.choices[0].token_ids) == ("hello", (5, 6, 7))
    assert completion.usage.completion_tokens == 3
    assert list(baton.requests[0].token_ids.ids) == [1, 2, 3]


def test_chat_sends_the_conversation(baton: FakeBaton, connect: Any) -> None:
    client = connect(baton.target)
    assert [type(event) for event in client.chat([Message("user", "hi")])] == [Started, Delta, Delta, Finished]
    assert client.complete_chat([{"role": "user", "content": "hi"}]).text == "hello"
    assert baton.requests[0] == baton.requests[1]


def test_small_calls(baton: FakeBaton, connect: Any) -> None:
    client = connect(baton.target)
    assert client.embed(["ab", [5, 6, 7]], dimensions=2, model="m").vectors == ((2.0, 2.0), (3.0, 3.0))
    named = client.embed("ab", prompt_name="query")
    assert named.vectors == ((8.0, 8.0, 8.0),)  # "query", a space and the text
    scored = client.score("q", ["ab", "abcd"], model="m")
    assert (scored.scores, scored.model, scored.usage.prompt_tokens) == ((0.5, 0.25), "m", 9)
    assert scored.model_version == "0a1b"
    assert client.tokenize("ab cde") == (2, 3)
    assert client.detokenize([4, 5]) == "4 5"
    assert [model.name for model in client.models()] == ["tiny"]
    assert client.model("tiny").name == "tiny"
    with pytest.raises(ModelNotFound) as missing:
        client.model("big")
    assert missing.value.name == "big"


@pytest.mark.parametrize("kind", [AdminClient, lambda target: Blocking(AsyncAdminClient(target))])
def test_operator_sees_the_status(baton: FakeBaton, kind: Any) -> None:
    admin = kind(baton.target)
    try:
        assert (admin.status().ready, admin.status().active_requests) == (True, 2)
    finally:
        admin.close()


def test_trace_context_travels(baton: FakeBaton, connect: Any) -> None:
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    connect(baton.target).complete("hi", traceparent=traceparent)
    assert baton.metadata[0]["traceparent"] == traceparent


@pytest.mark.parametrize("call", ["complete", "tokenize"])
def test_briefly_unavailable_server_is_retried(
    baton: FakeBaton, connect: Any, aborting: Any, hello: Answer, call: str
) -> None:
    away = aborting(grpc.StatusCode.UNAVAILABLE, "not ready")
    baton.answers = [away, away, hello]
    getattr(connect(baton.target), call)("hi")
    assert len(baton.requests) == 3


@pytest.mark.parametrize("call", ["complete", "tokenize"])
def test_trying_again_ends(baton: FakeBaton, connect: Any, aborting: Any, call: str) -> None:
    baton.answers = [aborting(grpc.StatusCode.UNAVAILABLE, "not ready")]
    with pytest.raises(Unavailable, match="not ready"):
        getattr(connect(baton.target), call)("hi")
    assert len(baton.requests) == 3


def test_busy_server_is_tried_again_when_it_says_when(
    baton: FakeBaton, connect: Any, aborting: Any, hello: Answer
) -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(nanos=150_000_000))
    baton.answers = [aborting(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry), hello]
    began = time.monotonic()
    assert connect(baton.target).complete("hi").text == "hello"
    assert time.monotonic() - began >= 0.15


def test_bad_input_is_not_tried_again_and_names_the_field(baton: FakeBaton, connect: Any, aborting: Any) -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="not in (0, 1]")
    bad = error_details_pb2.BadRequest(field_violations=[violation])
    baton.answers = [aborting(grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p: not in (0, 1]", bad)]
    with pytest.raises(InvalidRequest) as refused:
        connect(baton.target).complete("hi", top_p=2.0)
    assert refused.value.field == "sampling.top_p"
    assert len(baton.requests) == 1


def test_started_answer_is_never_repeated(baton: FakeBaton, connect: Any, events: Events, aborting: Any) -> None:
    lost = aborting(grpc.StatusCode.UNAVAILABLE, "worker lost")

    def breaks_off(request: Any, context: grpc.ServicerContext) -> Any:
        yield events.started()
        yield from lost(request, context)

    baton.answers = [breaks_off]
    with pytest.raises(Unavailable, match="worker lost"):
        connect(baton.target).complete("hi")
    assert len(baton.requests) == 1


def test_gap_in_the_answer_is_an_error_and_ends_the_call(baton: FakeBaton, connect: Any, events: Events) -> None:
    def skips(request: Any, context: grpc.ServicerContext) -> Any:
        yield events.started()
        yield events.delta(1, [6], "llo")
        baton.ended.wait(timeout=20)

    baton.answers = [skips]
    with pytest.raises(ProtocolError, match="lost"):
        connect(baton.target).complete("hi")
    assert baton.ended.wait(timeout=20)


def test_answer_that_stops_short_is_an_error(baton: FakeBaton, connect: Any, events: Events) -> None:
    baton.answers = [lambda request, context: iter([events.started(), events.delta(0, [5], "he")])]
    with pytest.raises(ProtocolError, match="0 of 1"):
        list(connect(baton.target).generate("hi"))


def test_clients_deadline_ends_a_call_and_reaches_the_server(baton: FakeBaton, connect: Any) -> None:
    def silent(request: Any, context: grpc.ServicerContext) -> Any:
        assert context.time_remaining() < 2.0
        baton.ended.wait(timeout=20)
        return ()

    baton.answers = [silent]
    client = connect(baton.target, timeout_s=60.0)
    with pytest.raises(DeadlineExceeded):
        client.complete("hi", timeout_s=1.0)
    assert baton.ended.wait(timeout=20)


def test_retries_end_with_the_deadline(baton: FakeBaton, connect: Any, aborting: Any) -> None:
    baton.answers = [aborting(grpc.StatusCode.UNAVAILABLE, "not ready")]
    client = connect(baton.target, retry=RetryPolicy(attempts=1000, first_wait_s=0.05, longest_wait_s=0.05))
    began = time.monotonic()
    with pytest.raises((Unavailable, DeadlineExceeded)):
        client.complete("hi", timeout_s=0.3)
    assert time.monotonic() - began < 10.0


def test_call_that_the_server_cancels_says_so(baton: FakeBaton, connect: Any, aborting: Any) -> None:
    baton.answers = [aborting(grpc.StatusCode.CANCELLED, "shutting down")]
    client = connect(baton.target)
    for call in (client.complete, client.tokenize):
        with pytest.raises(Cancelled, match="shutting down"):
            call("hi")


def test_missing_server_is_unavailable(connect: Any) -> None:
    with pytest.raises(Unavailable):
        connect("127.0.0.1:1").complete("hi")
