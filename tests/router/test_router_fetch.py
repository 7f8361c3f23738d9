"""The second turn of a conversation through a real router: who is told what of the first answer's blocks."""

import asyncio

import pytest

from baton.protos import session_pb2
from tests.router.conftest import Stack, encode
from tests.router.test_traces import spans_of

FIRST = "abcdefgh"
ANSWER = "abcdefgha"  # nine tokens: with the prompt four complete blocks of four, since the last has no KV
SECOND = FIRST + ANSWER + "0123"


async def test_prefill_is_told_where_the_first_answers_blocks_are(stack: Stack) -> None:
    await stack.generate(FIRST, max_tokens=9)
    await stack.generate(SECOND, max_tokens=2)
    first, second = await stack.prefill.received("prefill"), await stack.prefill.received("prefill", 2)
    assert not first.HasField("fetch")
    assert (second.fetch.endpoint, second.fetch.blocks) == (stack.decode.endpoint, 4)
    assert len(second.fetch.transfer_id) == 16 and second.fetch.transfer_id != second.transfer_id


async def test_a_fetch_shows_in_the_trace_and_in_the_timings(stack: Stack) -> None:
    await stack.ready()
    stack.pair.manual = True
    answer = asyncio.create_task(stack.generate(SECOND, max_tokens=1))
    command = await stack.prefill.received("prefill")
    timings = session_pb2.PrefillTimings(
        queue_ms=0.4, chunk_ms=[0.2], total_ms=0.7, cached_tokens=16, fetch_ms=0.3, fetched_tokens=8, fetch_bytes=512,
        fetch_transport="grpc",
    )  # fmt: skip
    output = session_pb2.SequenceOutput(
        attempt_id=command.attempt_id, token_ids=encode("a"), end=session_pb2.END_REASON_LENGTH
    )
    stack.prefill.say(
        first_step=session_pb2.FirstStep(attempt_id=command.attempt_id, outputs=[output], timings=timings)
    )
    finished = (await answer)[-1].finished
    assert finished.usage.cached_tokens == 16
    assert finished.timings.prefill_fetch_ms == pytest.approx(0.3)
    spans = await spans_of(stack)
    assert spans["prefill.fetch"].attributes == {
        "baton.fetch.tokens": 8, "baton.fetch.bytes": 512, "baton.fetch.transport": "grpc",
    }  # fmt: skip
    assert spans["prefill.fetch"].end_ns <= spans["prefill.queue"].start_ns
    root = spans["text_completion tiny"].attributes
    parts = ("router_queue", "route", "prefill_fetch", "prefill_queue", "prefill", "return")
    assert sum(float(str(root[f"baton.{part}_ms"])) for part in parts) == pytest.approx(root["baton.ttft_ms"], abs=2.0)
