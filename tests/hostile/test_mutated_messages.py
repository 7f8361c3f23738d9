"""Malformed messages, thousands per test, while requests run: answers stay right, memory bounded, and all pages free.

Servers, sessions, schedulers and pools are real; only the model is not. The messages are drawn with fixed seeds.
"""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError, Message

from baton.process.links.channel import LinkViolation
from baton.process.registry.worker_record import WorkerRole
from baton.process.serving.grpc_options import INTERNAL_CHANNEL_OPTIONS
from baton.protos import (
    cache_pb2,
    kept_session_pb2,
    kv_transfer_pb2,
    report_pb2,
    sampling_pb2,
    session_pb2,
    versions_pb2,
)
from baton.router.fleet.fleet import WorkerLinks
from baton.router.fleet.link import WorkerLink, _LinkBroken, _WorkerInvalid
from baton.router.fleet.received import ResponseCheck
from baton.router.fleet.wire import worker_description
from baton.router.placement.cluster import Cluster
from baton.worker.transfer.wire import description_to_wire
from tests.fixtures.held_runner import token
from tests.fixtures.mutated import mutated, readable, resident_bytes
from tests.fixtures.router_defaults import DEFAULT_TIMING
from tests.fixtures.session_client import SessionClient, eventually
from tests.fixtures.worker_stack import (
    DecodeStack,
    PrefillStack,
    describe,
    info,
    prompt_command,
    running,
    start_command,
)

MESSAGES = 10_000
MOST_S = 60.0  # for the least number of messages, on a busy machine
MEMORY_BYTES = 64 << 20
TOGETHER = 20  # in one message of the session, as routers send their cancels
HASH, ID = bytes(range(32)), bytes(range(16))
SESSION = kept_session_pb2.KeptSession(id=ID, owner=ID[:8], keep_for_s=60.0)


def commands(endpoint: str, draw: random.Random) -> list[session_pb2.ConnectRequest]:
    """Return a valid command of each kind, with attempt ids that no other request has."""
    number = draw.getrandbits(40)
    rich = {
        "temperature": 0.5,
        "logit_bias": {3: 1.0},
        "stop_token_ids": [5],
        "bad_words": [sampling_pb2.BadWord(token_ids=[4, 5])],
        "structured": sampling_pb2.StructuredOutput(kind=sampling_pb2.STRUCTURED_KIND_REGEX, text="a"),
    }
    fetch = session_pb2.Fetch(endpoint=endpoint, transfer_id=draw.randbytes(16), blocks=2)
    common: dict[str, Any] = {"time_left_ms": 2000, "block_hashes": [HASH, HASH[::-1]], "request_id": "hostile"}
    pooling = session_pb2.Pooling(kind=session_pb2.POOLING_KIND_LAST)
    adapter = session_pb2.Adapter(name="a", digest="d", path="/nowhere")
    return [
        session_pb2.ConnectRequest(**command)
        for command in (
            {"start": start_command(number, b"", "", kept_session=SESSION, **common)},
            {"start": start_command(number + 1, draw.randbytes(16), endpoint, cache_root=HASH, **common)},
            {"start": start_command(number + 2, b"", "", sampling=rich, **common)},
            {"start": start_command(number + 3, b"", "", pooling=pooling, max_tokens=1)},
            {"start": start_command(number + 4, b"", "", max_tokens=3, n=2, first_choice=1)},
            {"prefill": prompt_command(number + 5, draw.randbytes(16), fetch=fetch, **common)},
            {"prefill": prompt_command(number + 6, draw.randbytes(16), sampling=rich, **common)},
            {"prefill": prompt_command(number + 7, b"", pooling=pooling, max_tokens=1)},
            {"cancel": session_pb2.Cancel(attempt_id=number)},
            {"adopt": session_pb2.Adopt(router_id=ID, attempt_id=1, as_attempt_id=number + 8)},
            {"want": session_pb2.Want(blocks=3, slots=1)},
            {"bring": session_pb2.Bring(fetch=fetch, block_hashes=[HASH], session=SESSION)},
            {"change_role": session_pb2.ChangeRole(role=session_pb2.ROLE_DECODE)},
            {"snapshot_request": cache_pb2.SnapshotRequest()},
            {"prepare_adapter": session_pb2.PrepareAdapter(change_id=number, name="a", path="/nowhere")},
            {"adapter_list": session_pb2.AdapterList(version=1, adapters=[adapter])},
            {"clock": session_pb2.Clock(echo_us=5, kept_us=5, wall_us=5)},
        )
    ]


def _as_is(data: bytes) -> bytes:
    return data


def continues(sent: int, least: int, began_s: float, seconds: float) -> bool:
    """Return whether to send more: in `seconds` up to MESSAGES, or without a limit if asked for long, and `least`."""
    spent_s = time.monotonic() - began_s
    if spent_s < seconds:
        return sent < MESSAGES or seconds > 10
    return sent < least and spent_s < seconds + MOST_S


async def feed_session(endpoint: str, draw: random.Random, seconds: float) -> int:
    """Connections that begin well and go on with what is wrong, one after another. Returns how many messages."""
    sent, began_s = 0, time.monotonic()
    async with grpc.aio.insecure_channel(endpoint, INTERNAL_CHANNEL_OPTIONS) as channel:
        connect = channel.stream_stream(
            "/baton.v1.SessionService/Connect", request_serializer=_as_is, response_deserializer=_as_is
        )
        while continues(sent, 401, began_s, seconds):
            call = connect()
            hello = session_pb2.ConnectRequest(hello=session_pb2.Hello(router_id=secrets.token_bytes(16)))
            try:
                await call.write(hello.SerializeToString())
                await call.read()
                sent += await _feed(call, endpoint, draw)
                await call.done_writing()
                async with asyncio.timeout(1.0):
                    while await call.read() is not grpc.aio.EOF:
                        pass
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                pass  # a message that is none ends the call
            finally:
                call.cancel()
    return sent


async def _feed(call: Any, endpoint: str, draw: random.Random) -> int:
    number = sent = 0
    while sent < 400:
        batch = []
        for command in draw.choices(commands(endpoint, draw), k=TOGETHER):
            data = mutated(command, draw)
            if not readable(session_pb2.ConnectRequest, data):
                continue
            inner = session_pb2.ConnectRequest.FromString(data)
            number += 1
            inner.number = number if draw.random() < 0.999 else draw.getrandbits(63)
            batch.append(inner)
        outer = session_pb2.ConnectRequest(commands=session_pb2.Commands(commands=batch))
        await call.write(outer.SerializeToString())
        sent += TOGETHER
    await call.write(mutated(draw.choice(commands(endpoint, draw)), draw))  # and something alone, readable or not
    return sent + 1


async def decodes(router: SessionClient, attempt_id: int) -> None:
    await router.send(start=start_command(attempt_id, b"", "", max_tokens=6))
    await eventually(lambda: len(router.outputs(attempt_id)) == 5)
    [first] = router.about("first_step", attempt_id)
    assert first.outputs[0].token_ids == [token(0, 10)]
    assert [id for each in router.outputs(attempt_id) for id in each.token_ids] == [token(0, 11 + i) for i in range(5)]


async def prefills(router: SessionClient, attempt_id: int) -> None:
    await router.send(prefill=prompt_command(attempt_id, secrets.token_bytes(16)))
    first = await router.one("first_step", attempt_id)
    assert first.outputs[0].token_ids == [token(0, 10)]
    await router.cancel(attempt_id)


@asynccontextmanager
async def beside(stack: Any, asks: Callable[[SessionClient, int], Awaitable[None]]) -> AsyncIterator[None]:
    """One request after another at another session, and one more when the rest is over; memory stays bounded."""
    async with SessionClient(stack.endpoint) as router:
        await asks(router, 1)
        asked, ending, before = 1, asyncio.Event(), resident_bytes()

        async def goes_on() -> None:
            nonlocal asked
            while not ending.is_set():
                asked += 1
                await asks(router, asked)
                router.heard.clear()

        neighbour = asyncio.create_task(goes_on())
        yield
        await eventually(lambda: asked > 2 or neighbour.done())
        ending.set()
        await neighbour
        await asks(router, asked + 1)
        assert resident_bytes() - before < MEMORY_BYTES
    assert not stack.faults


def unforeseen(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Exceptions that a boundary had to catch: each is a bound that is missing."""
    ours = (each for each in caplog.records if each.exc_info and each.name.startswith("baton."))
    return [f"{each.getMessage()}: {each.exc_info[1]!r}" for each in ours if each.exc_info]


@pytest.mark.parametrize(
    ("make", "asks"), [(DecodeStack, decodes), (PrefillStack, prefills)], ids=["decode", "prefill"]
)
async def test_worker_serves_on_while_a_router_sends_mutated_messages(
    make: Callable[..., Any],
    asks: Callable[[SessionClient, int], Awaitable[None]],
    hostile_s: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    async with running(make(grace_s=0.3)) as stack:
        async with beside(stack, asks):
            assert await feed_session(stack.endpoint, random.Random(5), hostile_s) > 400
        await stack.all_free()
    assert unforeseen(caplog) == []


TRANSFER_CALLS: Sequence[tuple[str, Message]] = (
    ("Pair", kv_transfer_pb2.PairRequest(reader=kv_transfer_pb2.PoolDescription(fingerprint=HASH, block_bytes=64))),
    ("Open", kv_transfer_pb2.OpenRequest(transfer_id=ID, pool_id=ID, block_hashes=[HASH])),
    ("Read", kv_transfer_pb2.ReadRequest(range=kv_transfer_pb2.TransferRange(transfer_id=ID, num_blocks=3))),
    ("Read", kv_transfer_pb2.ReadRequest(probe_bytes=1000)),
    ("Close", kv_transfer_pb2.CloseRequest(transfer_id=ID, gpu="GPU-1", slow_down=2.0, corrupt=True)),
    ("Confirm", kv_transfer_pb2.ConfirmRequest(transfer_id=ID)),
    ("Join", kv_transfer_pb2.JoinRequest(group_id=ID, pool_id=ID, backend="gloo")),
    ("Store", kv_transfer_pb2.StoreRequest(group_id=ID, get="key", timeout_ms=5)),
    ("Send", kv_transfer_pb2.SendRequest(group_id=ID, blocks=kv_transfer_pb2.TransferBlocks(blocks=[1]))),
)
STREAMS = frozenset({"Open", "Read", "Join"})


async def feed_transfers(endpoint: str, pool_id: bytes, draw: random.Random, seconds: float) -> int:
    sent, began_s = 0, time.monotonic()
    async with grpc.aio.insecure_channel(endpoint, INTERNAL_CHANNEL_OPTIONS) as channel:

        async def one(method: str, request: Message) -> None:
            data = mutated(request, draw)
            make = channel.unary_stream if method in STREAMS else channel.unary_unary
            call: Any = make(f"/baton.v1.KvTransferService/{method}", _as_is, _as_is)(data, timeout=0.5)
            try:
                if method in STREAMS:
                    await call.read()
                    call.cancel()
                else:
                    await call
            except grpc.aio.AioRpcError as error:
                assert error.code() is not grpc.StatusCode.UNKNOWN or "DecodeError" in str(error.details())

        while continues(sent, 120, began_s, seconds):
            chosen = draw.choices(TRANSFER_CALLS, k=TOGETHER)
            for _, request in chosen:
                if isinstance(request, kv_transfer_pb2.OpenRequest):
                    request.pool_id = pool_id
            await asyncio.gather(*(one(*each) for each in chosen))
            sent += TOGETHER
    return sent


async def test_worker_serves_on_while_a_worker_sends_mutated_transfers(
    hostile_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with running(PrefillStack(lease_s=0.2, park_s=0.2)) as stack:
        async with beside(stack, prefills):
            pool_id = stack.transfers._description.pool_id
            assert await feed_transfers(stack.endpoint, pool_id, random.Random(6), hostile_s) > 100
        await stack.all_free()
    assert unforeseen(caplog) == []


class HostileSource(grpc.GenericRpcHandler):
    """Transfer service of a worker whose answers are malformed."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._description = description_to_wire(describe(None, None))

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method.rpartition("/")[2]
        if method in STREAMS:
            return grpc.unary_stream_rpc_method_handler(self._stream(method), _as_is, _as_is)
        return grpc.unary_unary_rpc_method_handler(self._answer(method), _as_is, _as_is)

    def _spoilt(self, message: Message, often: float = 0.5) -> bytes:
        return mutated(message, self._draw) if self._draw.random() < often else message.SerializeToString()

    def _answer(self, method: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def answer(request: bytes, context: object) -> bytes:
            if method == "Pair":
                return self._spoilt(kv_transfer_pb2.PairResponse(source=self._description))
            return self._spoilt(kv_transfer_pb2.CloseResponse(valid=True))

        return answer

    def _stream(self, method: str) -> Callable[[bytes, Any], AsyncIterator[bytes]]:
        async def read(request: bytes, context: object) -> AsyncIterator[bytes]:
            asked = kv_transfer_pb2.ReadRequest.FromString(request)
            size = asked.probe_bytes or 64 * asked.range.num_blocks
            yield self._spoilt(kv_transfer_pb2.ReadResponse(data=bytes(size)), 0.1)

        async def open_(request: bytes, context: object) -> AsyncIterator[bytes]:
            checksum = kv_transfer_pb2.BlockChecksum(block=1, value=5)
            yield self._spoilt(kv_transfer_pb2.OpenResponse(watermark_blocks=2, blocks=[4, 5], checksums=[checksum]))
            first = kv_transfer_pb2.FirstToken(token_id=7, logprob=-1.0, top_token_ids=[7], top_logprobs=[-1.0])
            end = kv_transfer_pb2.TransferEnd(first_tokens=[first], age_ms=1.0)
            yield self._spoilt(kv_transfer_pb2.OpenResponse(watermark_blocks=3, blocks=[6], end=end))

        return read if method == "Read" else open_


async def test_worker_serves_on_while_a_source_answers_with_mutated_transfers(
    hostile_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((HostileSource(random.Random(7)),))
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with running(DecodeStack(grace_s=0.3, transport="grpc")) as stack, SessionClient(stack.endpoint) as hostile:
        async with beside(stack, decodes):
            began_s, number = time.monotonic(), 0
            while continues(number, 11, began_s, hostile_s):
                number += 1
                await hostile.send(start=start_command(number, secrets.token_bytes(16), endpoint, time_left_ms=1000))
                await eventually(lambda: hostile.of_kind("failed") or hostile.of_kind("step_outputs"))
                await hostile.cancel(number)
                hostile.heard.clear()
            assert number > 10
        await stack.all_free()
    await server.stop(0)
    assert unforeseen(caplog) == []


def responses(draw: random.Random) -> list[session_pb2.ConnectResponse]:
    """Return a valid message of each kind that a worker sends."""
    output = session_pb2.SequenceOutput(
        attempt_id=1, token_ids=[3, 4], logprobs=[-1.0, -2.0], top_token_ids=[3, 4], top_logprobs=[-1.0, -2.0]
    )
    cause = session_pb2.GapCause(cause=session_pb2.STALL_CAUSE_NETWORK, ms=2.0, request_id="r", detail="d")
    step = session_pb2.StepOutputs(
        outputs=[output],
        made_us=5,
        held=[cause],
        since=[cause],
        gaps=[session_pb2.Gap(usual_ms=1.0, causes=[cause])],
        drafts=[session_pb2.Drafts(drafted_tokens=2, accepted_tokens=1, saved_ms=1.0)],
        attempt_ids=[2, 3],
        choices=[0, 1],
        offsets=[5, 6],
        token_ids=[3, 4],
    )
    report = report_pb2.Report(
        limit_blocks=9,
        limit_slots=3,
        pages=report_pb2.PageCounts(total=32, free=32),
        links=[report_pb2.LinkReport(endpoint="h:1", transport="grpc", gb_per_s=1.0)],
        cache=report_pb2.CacheSum(sequence=1, digest=5, blocks=1),
        alone_tokens_per_s=10.0,
        accepted_tokens=[1, 2],
        tier=report_pb2.TierReport(directory_id=ID, sequence=1, load_bytes_per_s=1e9),
        sessions=report_pb2.SessionReport(known=1),
    )
    adapter = session_pb2.Adapter(name="a", digest="d", path="/p")
    piece = cache_pb2.TierPiece(segment=1, names=HASH)
    timings = session_pb2.PrefillTimings(chunk_ms=[1.0], total_ms=2.0)
    return [
        session_pb2.ConnectResponse(**event)
        for event in (
            {"first_step": session_pb2.FirstStep(attempt_id=1, outputs=[output], timings=timings, pooled=[0.5])},
            {"step_outputs": step},
            {"landed": session_pb2.Landed(attempt_id=1, bytes=5, copy_ms=1.0, transport="grpc")},
            {"failed": session_pb2.Failed(attempt_id=1, message="m")},
            {"report": report},
            {"prompt_scores": session_pb2.PromptScores(attempt_id=1, offset=1, logprobs=[-1.0])},
            {"cache_events": cache_pb2.CacheEvents(sequence=1 + draw.randrange(3), stored=HASH)},
            {"cache_snapshot": cache_pb2.CacheSnapshot(sequence=1, parts=1, hashes=HASH)},
            {"tier_events": cache_pb2.TierEvents(sequence=1 + draw.randrange(3), stored=[piece], removed_segments=[1])},
            {"tier_snapshot": cache_pb2.TierSnapshot(sequence=1, parts=1, stored=[piece])},
            {"hand_over": session_pb2.HandOver(session=SESSION, block_hashes=[HASH])},
            {"adapter_prepared": session_pb2.AdapterPrepared(change_id=1, digest="d")},
            {"adapter_state": session_pb2.AdapterState(version=1, listed=[adapter], usable=[adapter])},
        )
    ]


async def test_router_takes_or_refuses_every_mutated_message_of_a_worker(hostile_s: float) -> None:
    """Any exception other than those that are caught here would mean that a check of the router is missing."""
    draw, cluster, timing = random.Random(8), Cluster(), DEFAULT_TIMING
    fleet = WorkerLinks(cluster, timing)
    cluster.add("h:1", WorkerRole.DECODE, "w-0")
    described = info(session_pb2.ROLE_DECODE)
    described.versions.CopyFrom(versions_pb2.Versions(release="0.2.0", protocol=2, oldest_protocol=1))
    welcome = session_pb2.ConnectResponse(welcome=session_pb2.Welcome(worker=described))
    fleet.on_connected("h:1", worker_description(described), 7)
    session = WorkerLink("h:1", bytes(16), fleet, timing)
    session._check = ResponseCheck(described.model.vocab_size)
    before, fed, began_s = resident_bytes(), 0, time.monotonic()
    while continues(fed, 301, began_s, hostile_s):
        if fed % 100 == 0:
            said = responses(draw)
        fed += 1
        try:
            message = session_pb2.ConnectResponse.FromString(mutated(draw.choice(said), draw))
            greeting = session_pb2.ConnectResponse.FromString(mutated(welcome, draw))
        except DecodeError:
            continue
        message.number = 0 if message.WhichOneof("event") in UNNUMBERED else session._channel.last_received + 1
        try:
            session._check_bounds(message)
            session._take(message)
            session._check_bounds(greeting)
            worker_description(greeting.welcome.worker)
        except (_LinkBroken, _WorkerInvalid, LinkViolation, ValueError):
            continue
    assert fed > 300
    assert resident_bytes() - before < MEMORY_BYTES
    session._take(said[4])
    assert cluster.find("h:1") is not None


UNNUMBERED = ("report", "cache_events", "cache_snapshot", "tier_events", "tier_snapshot", "hand_over")
