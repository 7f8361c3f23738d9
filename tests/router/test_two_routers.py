"""Two routers in this process, over the same fake workers and Redis: a stream moves from one to the other,
for the same API key and no other."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.process.registry.redis_routers import RedisJournal
from baton.process.registry.redis_server import RedisServer
from baton.process.telemetry.spans import NoTelemetry
from baton.protos import baton_pb2, baton_pb2_grpc, session_pb2
from baton.router.request.journal import journal_key
from tests.fixtures.routed import ObservedRouter
from tests.fixtures.waiting import eventually
from tests.router.conftest import READY_S, Stack, encode, running_router, text_of
from tests.router.fake_worker import Session
from tests.router.test_router_keys import ONE, OTHER, shown
from tests.router.test_router_refusals import refusal

TEXT = "abcdefgh"
NOT_FOUND = grpc.StatusCode.NOT_FOUND


@pytest.fixture
def settings(module_redis: RedisServer, tmp_path: Path) -> dict[str, Any]:
    keys = tmp_path / "keys"
    keys.write_text("".join(key.line + "\n" for key in (ONE, OTHER)))
    return {"redis_url": module_redis.url, "namespace": "two", "planner": "off", "api_keys": keys}


@pytest.fixture
async def other(stack: Stack, settings: dict[str, Any]) -> AsyncIterator[Any]:
    """The stub of a second router."""
    async with (
        running_router(ObservedRouter, stack.pair, settings, NoTelemetry()) as router,
        grpc.aio.insecure_channel(f"127.0.0.1:{router.running.ports[0]}") as channel,
    ):
        stub: Any = baton_pb2_grpc.BatonServiceStub(channel)
        await ready(stub)
        yield stub


async def test_the_stream_at_the_router_that_lost_its_answer_ends(
    stack: Stack, other: Any, settings: dict[str, Any]
) -> None:
    await ready(stack.stub)
    stack.pair.manual = True
    prompts = sum(command.WhichOneof("command") == "prefill" for command in stack.prefill.commands)
    request = baton_pb2.GenerateRequest(text="hello", sampling=baton_pb2.SamplingParams(max_tokens=8))
    older = stack.stub.Generate(request, timeout=READY_S, metadata=shown("baton-one"))
    attempt_id = (await stack.prefill.received("prefill", prompts + 1)).attempt_id
    stack.pair.first_step(attempt_id, encode("a"))
    started = (await older.read()).started
    await written(settings, journal_key("one", started.request_id, started.resume_token))

    choices = [baton_pb2.ReceivedChoice(token_ids=encode("a"), text_bytes=1)]
    names = {"request_id": started.request_id, "resume_token": started.resume_token}
    asked = baton_pb2.ResumeRequest(**names, choices=choices)
    for metadata, code in ((shown("baton-other"), NOT_FOUND), ((), grpc.StatusCode.UNAUTHENTICATED)):
        refused = other.Resume(asked, timeout=READY_S, metadata=metadata)
        assert (await refusal(refused)).code() is code
    adopting = sessions_of(stack, "adopt")
    newer = other.Resume(asked, timeout=READY_S, metadata=shown("baton-one"))
    adopt = await stack.decode.received("adopt")
    assert adopt.attempt_id == attempt_id
    stack.decode.session = adopting[0]  # the router that lost the answer may have said something since
    stack.pair.step(adopt.as_attempt_id, 1, encode(TEXT[1:]), session_pb2.END_REASON_LENGTH)
    assert (await refusal(older)).code() is grpc.StatusCode.ABORTED
    responses = [response async for response in newer]
    assert responses[0].started == started
    assert text_of(responses) == TEXT[1:]


def sessions_of(stack: Stack, kind: str) -> list[Session | None]:
    """By which commands of a kind come to the decode worker from now on."""
    found: list[Session | None] = []

    def noted(command: session_pb2.ConnectRequest) -> None:
        if command.WhichOneof("command") == kind:
            found.append(stack.decode.session)

    stack.decode.on_command = noted
    return found


async def ready(stub: Any) -> None:
    await stub.ListModels(baton_pb2.ListModelsRequest(), timeout=READY_S, metadata=shown("baton-one"))


async def written(settings: dict[str, Any], key: str) -> None:
    journal = RedisJournal(settings["redis_url"], settings["namespace"], bytes(16))
    await eventually(lambda: journal.read(key))
    await journal.close()
