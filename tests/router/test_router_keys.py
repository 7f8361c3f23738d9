"""A router with API keys over gRPC: nothing without one, limits, and caches of one's own."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from baton.process.objectives import RequestedObjectives
from baton.process.security.api_keys import ApiKey, KeyLimits, digest_of
from baton.protos import admin_pb2, baton_pb2
from tests.router.conftest import READY_S, Stack, tokens_of

LIMITED = ApiKey("limited", digest_of("baton-limited"), KeyLimits(requests_per_minute=2, max_context_tokens=24))
SINGLE = ApiKey("single", digest_of("baton-single"), KeyLimits(concurrency=1))
ONE = ApiKey("one", digest_of("baton-one"), objectives=RequestedObjectives(tbt_slo_ms=21.0))
OTHER = ApiKey("other", digest_of("baton-other"))
ADMIN = ApiKey("admin", digest_of("baton-admin"), is_admin=True)
SERVICE = baton_pb2.DESCRIPTOR.services_by_name["BatonService"]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "keys"
    file.write_text("".join(key.line + "\n" for key in (LIMITED, SINGLE, ONE, OTHER, ADMIN)))
    return {"api_keys": file}


@pytest.fixture
async def guarded(stack: Stack) -> AsyncIterator[Stack]:
    await stack.stub.ListModels(baton_pb2.ListModelsRequest(), timeout=READY_S, metadata=shown("baton-one"))
    yield stack


def shown(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def ask(stack: Stack, key: str, text: str = "hello", salt: str = "", **sampling: Any) -> list[Any]:
    message = baton_pb2.GenerateRequest(text=text, cache_salt=salt, sampling=baton_pb2.SamplingParams(**sampling))
    return [each async for each in stack.stub.Generate(message, timeout=READY_S, metadata=shown(key))]


async def status_of(call: Any) -> tuple[grpc.StatusCode, dict[str, Any]]:
    """The code of a call that fails, and its details by name."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    found = {}
    status = rpc_status.from_call(failed.value)  # type: ignore[arg-type]  # it has what is read
    for detail in status.details if status is not None else ():
        name = detail.TypeName().rpartition(".")[2]
        found[name] = getattr(error_details_pb2, name)()
        detail.Unpack(found[name])
    return failed.value.code(), found


@pytest.mark.parametrize("metadata", [(), shown("baton-wrong"), (("authorization", "baton-one"),)])
async def test_no_method_answers_without_a_key(guarded: Stack, metadata: Any) -> None:
    channel: Any = guarded.channel
    paths = [f"/{SERVICE.full_name}/{method.name}" for method in SERVICE.methods]
    paths += ["/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/baton.v1.AdminService/GetStatus"]
    paths += ["/there.is/None", "/grpc.health.v1.Healthy/Check"]
    for path in paths:
        for body in (b"", b"no message of any kind"):
            unary: Any = channel.unary_unary(path)(body, timeout=READY_S, metadata=metadata)
            stream: Any = channel.unary_stream(path)(body, timeout=READY_S, metadata=metadata)
            for call in (unary, stream.read()):
                code, details = await status_of(call)
                assert code is grpc.StatusCode.UNAUTHENTICATED, path
                assert details["ErrorInfo"].reason in ("MISSING_API_KEY", "INVALID_API_KEY")
    streams: Any = channel.stream_stream(paths[-1])(iter(()), timeout=READY_S, metadata=metadata)
    assert await streams.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_answers_all(guarded: Stack) -> None:
    health: Any = health_pb2_grpc.HealthStub(guarded.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=READY_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_admin_port_of_a_router_with_keys_asks_for_an_admin_key(guarded: Stack) -> None:
    codes = []
    for metadata in ((), shown("baton-none"), shown("baton-one"), shown("baton-admin")):
        call = guarded.admin.GetStatus(admin_pb2.GetStatusRequest(), metadata=metadata)
        codes.append(await call.code())
    unknown, denied = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
    assert codes == [unknown, unknown, denied, grpc.StatusCode.OK]


async def test_objectives_of_a_key_reach_workers_with_its_requests_alone(guarded: Stack) -> None:
    for key in ("baton-one", "baton-other"):
        await ask(guarded, key, max_tokens=2)
    starts = [await guarded.decode.received("start", count) for count in (1, 2)]
    assert [start.tbt_slo_ms for start in starts] == [21, 50]


async def test_with_a_key_reflection_is_off(guarded: Stack) -> None:
    channel: Any = guarded.channel
    reflect = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    call = reflect(iter((b"",)), timeout=READY_S, metadata=shown("baton-one"))
    assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_third_request_of_a_minute_is_told_when_to_come_back(guarded: Stack) -> None:
    for _ in range(2):
        assert len(tokens_of(await ask(guarded, "baton-limited", max_tokens=3))) == 3
    code, details = await status_of(ask(guarded, "baton-limited", max_tokens=3))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details["ErrorInfo"].reason == "RATE_LIMITED"
    assert details["ErrorInfo"].metadata["limit"] == "requests_per_minute"
    assert 20 < details["RetryInfo"].retry_delay.seconds <= 30
    await ask(guarded, "baton-one", max_tokens=3)  # another key goes on


async def test_one_at_a_time_means_those_that_have_not_ended(guarded: Stack) -> None:
    for _ in range(3):
        await ask(guarded, "baton-single", max_tokens=2)
    guarded.pair.manual = True
    count = len([c for c in guarded.prefill.commands if c.WhichOneof("command") == "prefill"])
    held = asyncio.create_task(ask(guarded, "baton-single", max_tokens=2))
    await guarded.prefill.received("prefill", count + 1)
    code, details = await status_of(ask(guarded, "baton-single", max_tokens=2))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details["ErrorInfo"].metadata["limit"] == "concurrency"
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)
    guarded.pair.manual = False
    async with asyncio.timeout(READY_S):
        while True:  # the cancelled call ends in its own time
            try:
                await ask(guarded, "baton-single", max_tokens=2)
                return
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_key_may_have_a_shorter_context(guarded: Stack) -> None:
    for text, tokens, field in (("x" * 24, None, "text"), ("x" * 20, 5, "sampling.max_tokens")):
        sampling: dict[str, Any] = {"max_tokens": tokens} if tokens else {}
        code, details = await status_of(ask(guarded, "baton-limited", text, **sampling))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details["BadRequest"].field_violations[0].field == field


async def test_keys_and_salts_name_the_same_blocks_differently(guarded: Stack) -> None:
    text = "the same words, again and again, in every one of these requests"
    callers = [
        ("baton-one", ""),
        ("baton-other", ""),
        ("baton-one", "salt"),
        ("baton-other", "salt"),
        ("baton-one", ""),
    ]
    for key, salt in callers:
        await ask(guarded, key, text, salt, max_tokens=2)
    commands = [c.prefill for c in guarded.prefill.commands if c.WhichOneof("command") == "prefill"][-len(callers) :]
    hashes = [tuple(command.block_hashes) for command in commands]
    assert hashes[0] == hashes[4] and len(hashes[0]) > 0
    assert len({block for blocks in hashes[:4] for block in blocks}) == 4 * len(hashes[0])


async def test_the_tenant_is_the_keys_name(guarded: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, tenants = guarded.router.queue, list[str]()
    submit = queue.submit

    def noted(attempt_id: int, request: Any, hashes: Any, request_class: Any, on_settled: Any) -> Any:
        tenants.append(request_class.tenant)
        return submit(attempt_id, request, hashes, request_class, on_settled)

    monkeypatch.setattr(queue, "submit", noted)
    await ask(guarded, "baton-one", max_tokens=2)
    assert tenants == ["one"]


async def test_no_key_is_in_a_trace(guarded: Stack) -> None:
    await ask(guarded, "baton-one", max_tokens=2)
    assert "baton-one" not in json.dumps([repr(span) for span in guarded.telemetry.spans])
