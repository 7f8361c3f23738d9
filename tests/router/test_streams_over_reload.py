"""Streams that began before weights were replaced, and whose worker or router fails after it: they go on with the old
weights where a worker still has them, and else end by name. None goes on with the new.
"""

from typing import Any

import grpc
import pytest

from baton.process.registry.redis_server import RedisServer
from baton.process.registry.worker_record import WEIGHTS, version_of, weights_digest
from baton.protos import baton_pb2, session_pb2
from tests.router.conftest import Stack, encode, text_of
from tests.router.fake_worker import FakePair, FakeWorker
from tests.router.test_router_failures import idle
from tests.router.test_router_refusals import refusal
from tests.router.test_router_resume import TEXT, Broken, all_of, begun, broken

__all__ = ["broken", "settings"]
NEW = session_pb2.Adapter(name=WEIGHTS, digest=weights_digest(b"new"), path="/new", grace_s=60.0)
pytestmark = pytest.mark.usefixtures("no_pauses")


@pytest.fixture
def settings(module_redis: RedisServer, request: pytest.FixtureRequest) -> dict[str, Any]:
    namespace = f"{abs(hash(request.node.name))}"
    return {"redis_url": module_redis.url, "namespace": namespace, "no_prefill_worker": "local"}


@pytest.fixture
def pair(pair: FakePair) -> FakePair:
    for worker in (pair.prefill, pair.decode):
        worker.info.adapter_state.SetInParent()
    return pair


async def replaced(stack: Stack, *without_old: FakeWorker) -> None:
    """All workers have the new weights, and those of `without_old` have freed their own."""
    for worker in (stack.prefill, stack.decode):
        freed = worker in without_old
        state = session_pb2.AdapterState(version=1, listed=[NEW], usable=[NEW], own_weights_freed=freed)
        worker.say(adapter_state=state)
    await stack.until(lambda status: status.model_version == version_of(NEW.digest) and _freed(stack, without_old))


def _freed(stack: Stack, workers: tuple[FakeWorker, ...]) -> bool:
    """As the router knows it."""
    described = {each.endpoint: each.description for each in stack.router.cluster.workers}
    found = [described[worker.endpoint] for worker in workers]
    return all(each is not None and not each.has_own_weights for each in found)


async def test_failed_stream_resumes_on_old_weights_and_new_requests_use_new_ones(stack: Stack) -> None:
    call, started, attempt_id = await begun(stack)
    await replaced(stack)
    stack.decode.fail(attempt_id, session_pb2.FAILURE_REASON_TRANSFER)
    start = await stack.decode.received("start", 2)
    assert (list(start.token_ids), start.adapter, start.answered_tokens) == (encode("helloa"), "", 1)
    stack.pair.step(start.attempt_id, 1, encode(TEXT[1:]), session_pb2.END_REASON_LENGTH)
    assert await rest_of(call) == TEXT[1:]
    stack.pair.manual = False
    responses = await stack.generate("again", max_tokens=2)
    assert (await stack.decode.received("start", 3)).adapter_digest == NEW.digest
    assert responses[0].started.model_version == version_of(NEW.digest) != started.model_version


async def test_stream_without_a_worker_of_its_weights_ends_by_name(stack: Stack) -> None:
    call, _, attempt_id = await begun(stack)
    await replaced(stack, stack.prefill, stack.decode)
    stack.decode.fail(attempt_id, session_pb2.FAILURE_REASON_TRANSFER)
    await check_replaced(call, "no worker has them any more")
    await idle(stack)


async def test_resumed_stream_continues_on_old_weights(broken: Broken) -> None:
    stack = broken.stack
    await replaced(stack)
    call = broken.resume("ab")
    await not_adopted(stack)
    prefill = await stack.prefill.received("prefill", 2)
    assert (list(prefill.token_ids), prefill.adapter) == (encode("helloab"), "")
    stack.pair.step(prefill.attempt_id, 2, encode(TEXT[2:]), session_pb2.END_REASON_LENGTH)
    responses = await all_of(call)
    assert text_of(responses) == TEXT[2:]
    assert responses[0].started.model_version == broken.started.model_version


async def test_stream_continues_if_only_decode_has_the_old_weights(broken: Broken) -> None:
    stack = broken.stack
    await replaced(stack, stack.prefill)
    call = broken.resume("ab")
    await not_adopted(stack)
    start = await stack.decode.received("start", 2)
    assert (start.prefill_endpoint, start.adapter, start.answered_tokens) == ("", "", 2)
    stack.pair.step(start.attempt_id, 2, encode(TEXT[2:]), session_pb2.END_REASON_LENGTH)
    assert text_of(await all_of(call)) == TEXT[2:]


async def not_adopted(stack: Stack) -> None:
    """The decode worker does not keep the answer any more."""
    adopt = await stack.decode.received("adopt")
    stack.decode.fail(adopt.as_attempt_id, session_pb2.FAILURE_REASON_UNKNOWN_ATTEMPT)


async def test_resumed_stream_without_a_worker_of_its_weights_ends_by_name(broken: Broken) -> None:
    await replaced(broken.stack, broken.stack.prefill, broken.stack.decode)
    await check_replaced(broken.resume("ab"), "no worker has them any more")


async def test_restarted_stream_never_gets_the_end_of_another_models_answer(broken: Broken) -> None:
    await replaced(broken.stack)
    request = baton_pb2.GenerateRequest(text="hello", sampling=baton_pb2.SamplingParams(max_tokens=8))
    unknown = f"{int(broken.started.resume_token, 16) ^ 1:0{len(broken.started.resume_token)}x}"
    await check_replaced(broken.resume("ab", resume_token=unknown, generate=request), "its record has expired")


async def rest_of(call: Any) -> str:
    """Of one that was read from before."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return text_of(responses)


async def check_replaced(call: Any, why: str) -> None:
    error = await refusal(call)
    assert error.code() is grpc.StatusCode.ABORTED
    assert "were replaced" in error.details() and why in error.details()
