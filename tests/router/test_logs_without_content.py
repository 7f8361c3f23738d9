"""No prompt and no answer goes into a log, whatever fails."""

import logging
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from baton.protos import baton_pb2, session_pb2
from tests.router.conftest import Stack
from tests.router.test_router_failures import idle

PROMPT = "a secret of mine"
ANSWER, OTHER = (201, 202, 203), (211, 212, 213)  # no port, no offset and no attempt has such a number
FORBIDDEN = re.compile("|".join((r"\b2[01][123]\b", "secret", "mine")))


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What was logged, tracebacks and all, but for the numbers of lines."""
    caplog.set_level(logging.INFO)
    lines: list[str] = []
    yield lines
    lines += [re.sub(r"(line |\.py:)\d+", "", caplog.handler.format(record)) for record in caplog.get_records("call")]
    assert lines, "something is logged of what fails"
    assert not [line for line in lines if FORBIDDEN.search(line)]


async def ends(stack: Stack, call: Any, code: grpc.StatusCode) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await call.read() is not grpc.aio.EOF:
            continue
    assert caught.value.code() is code
    await idle(stack)


async def begun(stack: Stack, **sampling: Any) -> tuple[Any, int]:
    """A call whose first tokens are out, and its attempt."""
    await stack.ready()
    stack.pair.manual = True
    asked = baton_pb2.SamplingParams(max_tokens=50, **sampling)
    call = stack.stub.Generate(baton_pb2.GenerateRequest(text=PROMPT, sampling=asked), timeout=10.0)
    attempt_id = (await stack.prefill.received("prefill")).attempt_id
    stack.pair.first_step(attempt_id, list(ANSWER[:1]) * int(sampling.get("n", 1)))
    assert (await call.read()).WhichOneof("event") == "started"
    return call, attempt_id


async def test_worker_that_says_another_token_than_before(stack: Stack) -> None:
    call, attempt_id = await begun(stack)
    stack.pair.step(attempt_id, 1, list(ANSWER[1:]))
    stack.pair.step(attempt_id, 0, list(OTHER))
    await ends(stack, call, grpc.StatusCode.INTERNAL)


async def test_worker_that_contradicts_earlier_tokens_is_logged_without_content(stack: Stack) -> None:
    call, attempt_id = await begun(stack)
    stack.decode.fail(attempt_id, session_pb2.FAILURE_REASON_DRAINING)
    again = (await stack.decode.received("start", 2)).attempt_id
    stack.pair.step(again, 0, list(OTHER))
    await ends(stack, call, grpc.StatusCode.UNAVAILABLE)


async def test_tokens_past_the_end_of_one_of_two_choices(stack: Stack) -> None:
    call, attempt_id = await begun(stack, n=2)
    stack.pair.step(attempt_id, 1, list(ANSWER[1:]), session_pb2.END_REASON_LENGTH, choice=1)
    stack.pair.step(attempt_id, 3, list(OTHER), choice=1)
    await ends(stack, call, grpc.StatusCode.INTERNAL)


async def test_worker_error_quoting_the_answer_is_logged_without_content(stack: Stack) -> None:
    call, attempt_id = await begun(stack)
    message = 'grammar: token "secret" does not fit'
    stack.decode.fail(attempt_id, session_pb2.FAILURE_REASON_INVALID, message)
    await ends(stack, call, grpc.StatusCode.INVALID_ARGUMENT)


async def test_prompt_with_an_unknown_token_is_logged_without_content(stack: Stack) -> None:
    await stack.ready()
    message = baton_pb2.GenerateRequest(token_ids=baton_pb2.TokenIds(ids=[1, 203_000_213]))
    await ends(stack, stack.stub.Generate(message, timeout=10.0), grpc.StatusCode.INVALID_ARGUMENT)


async def test_chat_that_the_template_refuses(stack: Stack) -> None:
    await stack.ready()
    message = baton_pb2.ChatRequest(messages=[baton_pb2.ChatMessage(role="bad", content=PROMPT)])
    await ends(stack, stack.stub.Chat(message, timeout=10.0), grpc.StatusCode.INVALID_ARGUMENT)
