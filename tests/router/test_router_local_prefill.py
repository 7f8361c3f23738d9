"""The whole router over gRPC with fake workers: prompts that the decode worker computes itself, and second attempts."""

import time
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]

from baton.protos import baton_pb2, session_pb2
from baton.router.fleet.wire import versions_message
from baton.text.block_hash import block_hashes
from baton.versions import OWN
from tests.router.conftest import Stack, encode, text_of
from tests.router.fake_worker import FakePair
from tests.router.test_router_failures import begun, idle
from tests.router.test_router_refusals import detail, refusal
from tests.router.test_traces import spans_of

LOCAL = pytest.mark.parametrize("settings", [{"no_prefill_worker": "local"}], indirect=True)
SHORT_LOCAL = pytest.mark.parametrize("settings", [{"local_prefill_tokens": 8}], indirect=True)


@pytest.fixture
async def alone(pair: FakePair, settings: dict[str, Any]) -> None:
    """Membership names the decode worker only."""
    settings |= {"workers": f"decode@{pair.decode.endpoint}", "no_prefill_worker": "local"}


@pytest.fixture
async def late(pair: FakePair) -> None:
    """The prefill worker is not there yet; `stack.prefill.start(stack.prefill.port)` begins it."""
    await pair.prefill.stop()


@pytest.mark.usefixtures("alone")
async def test_a_decode_worker_alone_answers_everything(stack: Stack) -> None:
    await stack.ready()
    assert (await stack.status()).detail == "", "by design it lacks no prefill worker"
    responses = await stack.generate("hello", n=2, max_tokens=5)
    assert [text_of(responses, choice) for choice in range(2)] == ["hello", "elloh"]
    start = await stack.decode.received("start")
    assert (start.prefill_endpoint, len(start.cache_root)) == ("", 32)
    root = start.cache_root
    assert tuple(start.block_hashes) == block_hashes(root, encode("hello"), 4)
    timings = responses[-1].finished.timings
    assert (timings.prefill_pid, timings.transport, timings.transfer_bytes) == (timings.decode_pid, "", 0)
    await idle(stack)
    assert not [c for c in stack.decode.commands if c.WhichOneof("command") == "cancel"]


@pytest.mark.usefixtures("alone")
async def test_both_sums_hold_where_the_decode_worker_computes_the_prompt(stack: Stack) -> None:
    await stack.generate(max_tokens=5)
    spans = await spans_of(stack)
    root = spans["text_completion tiny"].attributes
    assert set(spans) == {
        "text_completion tiny", "router.tokenise", "router.queue", "route.select", "prefill.queue", "prefill.chunk",
        "return", "decode.first_step", "decode", "detokenize",
    }  # fmt: skip
    assert spans["route.select"].attributes["baton.route.local_prefill"] == "no_prefill_worker"
    parts = ("router_queue", "route", "prefill_queue", "prefill", "return")
    assert sum(float(str(root[f"baton.{part}_ms"])) for part in parts) == pytest.approx(root["baton.ttft_ms"], abs=2.0)
    assert root["baton.first_step_ms"] == root["baton.token_gap_ms"]


@pytest.fixture
async def alone_with_vectors(pair: FakePair, alone: None) -> None:
    pair.decode.info.versions.CopyFrom(versions_message(OWN))


@pytest.mark.usefixtures("alone_with_vectors")
async def test_a_decode_worker_alone_makes_vectors_and_nothing_stays_charged(stack: Stack) -> None:
    await stack.ready()
    stack.pair.decode.on_command = lambda command: pooled_by(stack, command)
    inputs = [baton_pb2.EmbedInput(text=text) for text in ("hello", "there")]
    made = await stack.stub.Embed(baton_pb2.EmbedRequest(inputs=inputs), timeout=10)
    assert [list(each.values) for each in made.embeddings] == [pytest.approx([0.6, 0.8])] * 2
    await idle(stack)
    assert [len(worker.charges) for worker in stack.router.cluster.workers] == [0]
    assert not [c for c in stack.decode.commands if c.WhichOneof("command") == "cancel"]


def pooled_by(stack: Stack, command: session_pb2.ConnectRequest) -> None:
    if command.WhichOneof("command") == "start" and command.start.HasField("pooling"):
        timings = session_pb2.PrefillTimings(chunk_ms=[0.2], total_ms=0.3)
        first_step = session_pb2.FirstStep(attempt_id=command.start.attempt_id, pooled=[3.0, 4.0], timings=timings)
        stack.decode.say(first_step=first_step)


@pytest.mark.usefixtures("alone")
async def test_cancelling_reaches_the_decode_worker_that_computes_the_prompt(stack: Stack) -> None:
    await stack.ready()
    stack.pair.manual = True
    call = stack.stub.Generate(baton_pb2.GenerateRequest(text="hello"), timeout=10)
    attempt_id = (await stack.decode.received("start")).attempt_id
    call.cancel()
    assert (await stack.decode.received("cancel")).attempt_id == attempt_id
    await idle(stack)


@LOCAL
async def test_decode_workers_take_over_while_there_is_no_prefill_worker(stack: Stack) -> None:
    await stack.until(lambda status: all(worker.connected for worker in status.workers) and not status.detail)
    await stack.prefill.stop()
    await stack.until(lambda status: not all(worker.connected for worker in status.workers))
    assert text_of(await stack.generate(max_tokens=3)) == "hel"
    status = await stack.status()
    assert (status.ready, status.detail) == (True, "no prefill worker is connected")


@LOCAL
@pytest.mark.usefixtures("late")
async def test_a_prefill_worker_that_comes_later_gets_a_probe_of_its_own(stack: Stack) -> None:
    await stack.ready()
    await stack.prefill.start(stack.prefill.port)
    await stack.until(lambda status: bool(stack.prefill.probes) and not status.detail)


@LOCAL
@pytest.mark.usefixtures("late")
async def test_a_router_without_decode_workers_is_not_ready_though_a_probe_is_under_way(stack: Stack) -> None:
    await stack.ready()
    stack.pair.manual = True
    before = len(stack.prefill.probes + stack.decode.probes)
    await stack.prefill.start(stack.prefill.port)
    await stack.until(lambda status: len(stack.prefill.probes + stack.decode.probes) > before)
    await stack.decode.stop()
    status = await stack.until(lambda status: not status.ready)
    assert "a required role has no worker" in status.detail


@LOCAL
@pytest.mark.usefixtures("late")
async def test_between_probes_that_no_prefill_worker_answers_there_is_a_pause(stack: Stack) -> None:
    answer, alone_s = stack.decode.on_command, list[float]()

    def refuse(command: session_pb2.ConnectRequest) -> None:
        if command.WhichOneof("command") == "prefill":
            stack.prefill.fail(command.prefill.attempt_id, session_pb2.FAILURE_REASON_TRANSFER)

    def answer_alone(command: session_pb2.ConnectRequest) -> None:
        if command.WhichOneof("command") == "start" and not command.start.prefill_endpoint:
            alone_s.append(time.monotonic())
            answer(command)

    await stack.ready()
    stack.prefill.on_command, stack.decode.on_command = refuse, answer_alone
    await stack.prefill.start(stack.prefill.port)
    await stack.until(lambda status: len(alone_s) >= 3)
    assert alone_s[2] - alone_s[0] >= 1.0


@SHORT_LOCAL
async def test_a_second_turn_goes_where_the_answer_lies_and_its_rest_is_computed_there(stack: Stack) -> None:
    """Blocks of 4: turn 1 leaves 8 tokens of 'hell' 'ohel' complete, the last token of the answer has no KV."""
    first = text_of(await stack.generate("hello", max_tokens=4))
    await idle(stack)
    second = await stack.generate("hello" + first + " more", max_tokens=2)
    assert text_of(second) == "he"
    start = await stack.decode.received("start", 2)
    assert start.prefill_endpoint == ""
    route = (await spans_of(stack, 2))["route.select"].attributes
    assert (route["baton.route.local_prefill"], route["baton.route.decode_hit_tokens"]) == ("short_suffix", 8)


async def test_a_first_token_that_went_out_survives_its_prefill_worker(stack: Stack) -> None:
    call, first = await begun(stack)
    stack.decode.fail(first, session_pb2.FAILURE_REASON_TRANSFER)
    second = (await stack.decode.received("start", 2)).attempt_id
    stack.pair.first_step(second, encode("a"))
    stack.pair.landed(second)
    stack.pair.step(second, 0, encode("ab"), end=session_pb2.END_REASON_LENGTH)
    delta = (await call.read()).delta
    assert (delta.offset, delta.text) == (1, "b")
    assert (await call.read()).finished.usage.completion_tokens == 2
    spans = await spans_of(stack)
    root = spans["text_completion tiny"].attributes
    assert "recovery" in spans
    assert float(str(root["baton.recovery_ms"])) >= 100.0  # the pause before a second attempt
    assert float(str(root["baton.ttft_ms"])) < float(str(root["baton.total_ms"])) - 100.0
    parts = ("router_queue", "route", "prefill_queue", "prefill", "return")
    assert sum(float(str(root[f"baton.{part}_ms"])) for part in parts) == pytest.approx(root["baton.ttft_ms"], abs=2.0)


async def test_a_second_attempt_with_another_first_token_ends_the_request(stack: Stack) -> None:
    call, first = await begun(stack)
    stack.decode.fail(first, session_pb2.FAILURE_REASON_TRANSFER)
    stack.pair.first_step((await stack.decode.received("start", 2)).attempt_id, encode("x"))
    error = await refusal(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert detail(error, error_details_pb2.ErrorInfo).reason == "NOT_REPEATED"
    await idle(stack)
