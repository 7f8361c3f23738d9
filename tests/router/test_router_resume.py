"""The whole router over gRPC with fake workers: streams that are resumed, here and from another router that is gone."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from baton.process.registry.redis_routers import RedisJournal
from baton.process.registry.redis_server import RedisServer
from baton.protos import baton_pb2, journal_pb2, session_pb2
from baton.router.request.journal import journal_key
from tests.fixtures.waiting import eventually
from tests.router.conftest import READY_S, Stack, encode, text_of
from tests.router.test_router_failures import idle
from tests.router.test_router_refusals import INVALID, fields_of, refusal
from tests.router.test_traces import spans_of

DEAD = b"d" * 16
HER_ATTEMPT = 77
TEXT = "abcdefgh"


@pytest.fixture
def settings(module_redis: RedisServer, request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"redis_url": module_redis.url, "namespace": f"{abs(hash(request.node.name))}"}


@dataclass
class Broken:
    """A stream that another router served and that had its first tokens; `asks` makes what its client sends then."""

    stack: Stack
    started: baton_pb2.Started

    def asks(self, received: str = "a", **fields: Any) -> baton_pb2.ResumeRequest:
        choice = baton_pb2.ReceivedChoice(token_ids=encode(received), text_bytes=len(received))
        given = {"request_id": self.started.request_id, "resume_token": self.started.resume_token, "choices": [choice]}
        return baton_pb2.ResumeRequest(**(given | fields))

    def resume(self, received: str = "a", metadata: Any = None, **fields: Any) -> Any:
        return self.stack.stub.Resume(self.asks(received, **fields), timeout=READY_S, metadata=metadata)


async def begun(stack: Stack, **sampling: Any) -> tuple[Any, baton_pb2.Started, int]:
    """A call that has had its first token, what it was told, and its attempt's id."""
    await stack.complete()
    stack.pair.manual = True
    request = baton_pb2.GenerateRequest(text="hello", sampling=baton_pb2.SamplingParams(**{"max_tokens": 8} | sampling))
    call = stack.stub.Generate(request, timeout=READY_S)
    attempt_id = (await stack.prefill.received("prefill")).attempt_id
    stack.pair.first_step(attempt_id, encode("a") * request.sampling.n or encode("a"))
    started = (await call.read()).started
    assert (await call.read()).delta.text == "a"
    return call, started, attempt_id


@dataclass(frozen=True)
class Written:
    key: str
    value: bytes | None
    ttl_ms: int = 60_000
    seize: bool = True


@pytest.fixture
async def broken(stack: Stack, settings: dict[str, Any]) -> AsyncIterator[Broken]:
    """Begun here, and then given to a router that is dead: what its record says is what this one wrote."""
    call, started, _ = await begun(stack)
    journal = RedisJournal(settings["redis_url"], settings["namespace"], DEAD)
    key = journal_key("", started.request_id, started.resume_token)
    data = await eventually(lambda: journal.read(key))
    call.cancel()
    await idle(stack)
    record = journal_pb2.JournalRecord.FromString(data)
    record.router_id = DEAD
    record.places[0].attempt_id = HER_ATTEMPT
    await journal.write([Written(key, record.SerializeToString())])
    yield Broken(stack, started)
    await journal.close()


async def all_of(call: Any) -> list[Any]:
    return [response async for response in call]


async def test_an_answer_is_adopted_and_only_what_the_client_has_not_is_told(broken: Broken) -> None:
    stack = broken.stack
    call = broken.resume("ab")
    adopt = await stack.decode.received("adopt")
    assert (adopt.router_id, adopt.attempt_id) == (DEAD, HER_ATTEMPT)
    assert 0 < adopt.time_left_ms <= READY_S * 1.2e3  # gRPC rounds deadlines
    stack.pair.step(adopt.as_attempt_id, 0, encode(TEXT[:6]))
    stack.pair.step(adopt.as_attempt_id, 6, encode(TEXT[6:]), session_pb2.END_REASON_LENGTH)
    responses = await all_of(call)
    assert responses[0].started == broken.started
    told = [response.delta for response in responses if response.WhichOneof("event") == "delta"]
    assert [(delta.offset, delta.text) for delta in told] == [(2, "cdef"), (6, "gh")]
    finished = responses[-1].finished
    assert (finished.usage.completion_tokens, finished.usage.prompt_tokens) == (8, 5)
    await idle(stack)
    assert "baton.resumes" not in (await spans_of(stack, 2))["text_completion tiny"].attributes


async def test_an_answer_that_no_worker_keeps_is_made_on_from_what_the_client_has(broken: Broken) -> None:
    stack = broken.stack
    call = broken.resume("ab")
    adopt = await stack.decode.received("adopt")
    stack.decode.fail(adopt.as_attempt_id, session_pb2.FAILURE_REASON_UNKNOWN_ATTEMPT)
    prefill = await stack.prefill.received("prefill", 2)
    assert (list(prefill.token_ids), prefill.answered_tokens) == (encode("helloab"), 2)
    assert prefill.sampling.max_tokens == 8
    stack.pair.step(prefill.attempt_id, 2, encode(TEXT[2:]), session_pb2.END_REASON_LENGTH)
    assert text_of(await all_of(call)) == TEXT[2:]


async def test_a_client_that_has_everything_but_the_end_gets_the_end(broken: Broken) -> None:
    responses = await all_of(broken.resume(TEXT))
    assert [response.WhichOneof("event") for response in responses] == ["started", "finished"]
    assert responses[-1].finished.reason == baton_pb2.FINISH_REASON_LENGTH
    assert responses[-1].finished.usage.completion_tokens == 8


OTHERS: list[dict[str, Any]] = [
    {"metadata": (("authorization", "Bearer another"),)},
    {"resume_token": "0" * 32},
    {"request_id": "another"},
]


async def test_a_stream_of_another_caller_is_not_found(broken: Broken) -> None:
    for fields in OTHERS:
        assert (await refusal(broken.resume(**fields))).code() is grpc.StatusCode.NOT_FOUND, fields
    assert not any(command.WhichOneof("command") == "adopt" for command in broken.stack.decode.commands)


async def test_a_stream_that_is_not_known_goes_on_from_the_request(broken: Broken) -> None:
    stack = broken.stack
    request = baton_pb2.GenerateRequest(text="hello", sampling=baton_pb2.SamplingParams(max_tokens=8, seed=11))
    call = broken.resume("ab", resume_token="0" * 32, generate=request)
    prefill = await stack.prefill.received("prefill", 2)
    assert (list(prefill.token_ids), prefill.answered_tokens) == (encode("helloab"), 2)
    stack.pair.step(prefill.attempt_id, 2, encode(TEXT[2:]), session_pb2.END_REASON_LENGTH)
    responses = await all_of(call)
    assert (responses[0].started.request_id, responses[0].started.seed) == (broken.started.request_id, 11)
    assert text_of(responses) == TEXT[2:]


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"resume_token": ""}, "resume_token"),
    ({"request_id": ""}, "request_id"),
    ({"choices": [baton_pb2.ReceivedChoice(index=1)]}, "choices[0].index"),
    ({"choices": [baton_pb2.ReceivedChoice(), baton_pb2.ReceivedChoice()]}, "choices"),
    ({"choices": [baton_pb2.ReceivedChoice(token_ids=[257])]}, "choices[0].token_ids[0]"),
    ({"choices": [baton_pb2.ReceivedChoice(token_ids=[1] * 9)]}, "choices[0].token_ids"),
    ({"choices": [baton_pb2.ReceivedChoice(text_bytes=1)]}, "choices[0].text_bytes"),
    ({"choices": [baton_pb2.ReceivedChoice(finished=True)]}, "choices"),
    ({"prompt_tokens": 6}, "prompt_tokens"),
]


async def test_tokens_that_cannot_have_come_are_refused(broken: Broken) -> None:
    for fields, field in IMPOSSIBLE:
        error = await refusal(broken.resume(**fields))
        assert (error.code(), fields_of(error)) == (INVALID, [field]), fields


async def test_newer_of_two_streams_of_a_request_lives(stack: Stack) -> None:
    older, started, attempt_id = await begun(stack)
    newer = Broken(stack, started).resume("a")
    prefill = await stack.prefill.received("prefill", 2)
    assert prefill.answered_tokens == 1
    assert (await refusal(older)).code() is grpc.StatusCode.ABORTED
    assert (await stack.decode.received("cancel")).attempt_id == attempt_id
    stack.pair.step(prefill.attempt_id, 1, encode(TEXT[1:]), session_pb2.END_REASON_LENGTH)
    assert text_of(await all_of(newer)) == TEXT[1:]


async def test_a_stream_whose_answer_another_router_has_adopted_ends(stack: Stack) -> None:
    older, _, attempt_id = await begun(stack)
    stack.decode.fail(attempt_id, session_pb2.FAILURE_REASON_ADOPTED)
    assert (await refusal(older)).code() is grpc.StatusCode.ABORTED


async def test_each_choice_goes_on_from_its_own_place(stack: Stack, settings: dict[str, Any]) -> None:
    call, started, _ = await begun(stack, n=2)
    call.cancel()
    await idle(stack)
    choices = [baton_pb2.ReceivedChoice(index=1, token_ids=encode("xyz"), text_bytes=3)]
    request = baton_pb2.GenerateRequest(text="hello", sampling=baton_pb2.SamplingParams(max_tokens=4, n=2, seed=1))
    resumed = Broken(stack, started).resume(choices=choices, resume_token="1" * 32, generate=request)
    parts = [await stack.prefill.received("prefill", count) for count in (2, 3)]
    assert sorted((part.first_choice, part.answered_tokens, part.sampling.n) for part in parts) == [
        (0, 0, 1),
        (1, 3, 1),
    ]
    for part in parts:
        text = "abcd" if part.first_choice == 0 else "w"
        end = session_pb2.END_REASON_LENGTH
        stack.pair.step(part.attempt_id, part.answered_tokens, encode(text), end, part.first_choice)
    responses = await all_of(resumed)
    assert (text_of(responses, 0), text_of(responses, 1)) == ("abcd", "w")
    assert [bool(each.finished.HasField("usage")) for each in responses if each.HasField("finished")] == [False, True]
