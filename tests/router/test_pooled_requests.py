"""A prompt that is computed for a vector: one prefill worker, charged once, tried again, and never an older one."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.protos import baton_pb2, session_pb2, versions_pb2
from baton.versions import POOLING_PROTOCOL
from tests.router.conftest import READY_S, Stack, encode
from tests.router.fake_worker import FakePair, FakeWorker

VECTOR = [3.0, 4.0, 0.0]
pytestmark = pytest.mark.usefixtures("no_pauses")


@pytest.fixture
def stopped_pair(stopped_pair: FakePair, tmp_path: Path, request: pytest.FixtureRequest) -> FakePair:
    """A test sets the protocol of the prefill worker with an `indirect` parameter."""
    (tmp_path / "tiny" / "config_sentence_transformers.json").write_text('{"prompts": {"query": "Find "}}')
    protocol = getattr(request, "param", POOLING_PROTOCOL)
    versions = versions_pb2.Versions(release="0.9.0", protocol=protocol, oldest_protocol=1)
    stopped_pair.prefill.info.versions.CopyFrom(versions)
    return stopped_pair


def answers(stack: Stack, failures: int = 0) -> list[Any]:
    """The prefill worker pools prompts from now on, after so many failures. Returns the commands, as they come."""
    commands: list[Any] = []

    def pool(command: session_pb2.ConnectRequest) -> None:
        if command.WhichOneof("command") != "prefill":
            return
        commands.append(command.prefill)
        attempt_id = command.prefill.attempt_id
        if len(commands) <= failures:
            stack.prefill.fail(attempt_id, session_pb2.FAILURE_REASON_TRANSFER, message="for this test")
            return
        timings = session_pb2.PrefillTimings(chunk_ms=[0.2], total_ms=0.3, cached_tokens=4)
        first_step = session_pb2.FirstStep(attempt_id=attempt_id, pooled=VECTOR, timings=timings)
        stack.prefill.say(first_step=first_step)

    stack.prefill.on_command = pool
    return commands


def embed(stack: Stack, *texts: str, **fields: Any) -> Any:
    inputs = [baton_pb2.EmbedInput(text=text) for text in texts]
    return stack.stub.Embed(baton_pb2.EmbedRequest(inputs=inputs, **fields), timeout=READY_S)


def charged(stack: Stack) -> list[int]:
    return [len(worker.charges) for worker in stack.router.cluster.workers]


def commands_of(worker: FakeWorker, kind: str) -> int:
    return sum(command.WhichOneof("command") == kind for command in worker.commands)


async def test_vector_is_computed_by_the_prefill_worker_alone(stack: Stack) -> None:
    await stack.ready()
    starts, commands = commands_of(stack.decode, "start"), answers(stack)
    made = await embed(stack, "hello there", "again", model="tiny")
    assert [list(each.values) for each in made.embeddings] == [pytest.approx([0.6, 0.8, 0.0])] * 2
    assert [command.pooling.kind for command in commands] == [session_pb2.POOLING_KIND_LAST] * 2
    assert made.model == "tiny" and made.usage.prompt_tokens == sum(len(each.token_ids) for each in commands)
    assert made.usage.cached_tokens == 8
    assert commands_of(stack.decode, "start") == starts
    assert charged(stack) == [0, 0] and commands_of(stack.prefill, "cancel") == 0


async def test_named_prompt_precedes_each_text(stack: Stack) -> None:
    await stack.ready()
    commands = answers(stack)
    await embed(stack, "hello", prompt_name="query")
    assert list(commands[-1].token_ids) == encode("Find hello")
    await embed(stack, "hello")
    assert list(commands[-1].token_ids) == encode("hello")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await embed(stack, "hello", prompt_name="")
    assert refused.value.details() == "prompt_name: the model has no prompt of that name; it has query"


async def test_dimensions_are_cut_and_checked(stack: Stack) -> None:
    await stack.ready()
    answers(stack)
    made = await embed(stack, "hello", dimensions=1)
    assert list(made.embeddings[0].values) == [1.0]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await embed(stack, "hello", dimensions=4)
    assert refused.value.details() == "dimensions: must be from 1 to 3, not 4"


@pytest.mark.parametrize("stopped_pair", [POOLING_PROTOCOL - 1], indirect=True)
@pytest.mark.parametrize("settings", [{"no_prefill_worker": "reject"}], indirect=True)
async def test_worker_of_an_older_release_is_never_asked(stack: Stack) -> None:
    await stack.ready()
    commands = answers(stack)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await embed(stack, "hello")
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert refused.value.details() == "no prefill worker whose release makes vectors is connected"
    assert commands == [] and charged(stack) == [0, 0]


async def test_attempt_that_failed_is_made_again_and_nothing_stays_charged(stack: Stack) -> None:
    await stack.ready()
    commands = answers(stack, failures=2)
    made = await embed(stack, "hello")
    assert len(made.embeddings) == 1 and len(commands) == 3
    assert len({command.attempt_id for command in commands}) == 3
    assert charged(stack) == [0, 0]


async def test_client_that_leaves_frees_the_worker(stack: Stack) -> None:
    await stack.ready()
    stack.pair.manual = True
    sent = commands_of(stack.prefill, "prefill")
    call = embed(stack, "hello")
    waiting = asyncio.ensure_future(call)
    command = await stack.prefill.received("prefill", sent + 1)
    assert charged(stack) == [1, 0]
    call.cancel()
    assert (await stack.prefill.received("cancel")).attempt_id == command.attempt_id
    await asyncio.gather(waiting, return_exceptions=True)
    assert charged(stack) == [0, 0]


async def test_first_invalid_input_is_named_and_ends_the_others(stack: Stack) -> None:
    await stack.ready()
    answers(stack)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await embed(stack, "hello", "", "there")
    assert refused.value.details() == "inputs[1]: the prompt is empty"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stack.stub.Embed(baton_pb2.EmbedRequest(), timeout=READY_S)
    assert refused.value.details() == "inputs: must be from 1 to 2048, not 0"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stack.stub.Embed(baton_pb2.EmbedRequest(inputs=[baton_pb2.EmbedInput()]), timeout=READY_S)
    assert refused.value.details() == "inputs[0]: text or token_ids is required"
    assert charged(stack) == [0, 0]


async def test_prompt_may_be_as_long_as_the_context(stack: Stack) -> None:
    await stack.ready()
    answers(stack)

    def tokens(count: int) -> Any:
        inputs = [baton_pb2.EmbedInput(token_ids=baton_pb2.TokenIds(ids=[5] * count))]
        return stack.stub.Embed(baton_pb2.EmbedRequest(inputs=inputs), timeout=READY_S)

    assert (await tokens(128)).usage.prompt_tokens == 128
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await tokens(129)
    assert refused.value.details() == "inputs[0]: 129 tokens; at most 128"


async def test_score_is_the_cosine_of_the_two_vectors(stack: Stack) -> None:
    await stack.ready()
    answers(stack)
    made = await stack.stub.Score(
        baton_pb2.ScoreRequest(queries=["query"], documents=["left", "right"]), timeout=READY_S
    )
    assert made.model_version == (await embed(stack, "query")).model_version != ""
    assert list(made.scores) == [pytest.approx(1.0)] * 2
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stack.stub.Score(baton_pb2.ScoreRequest(queries=["q"] * 2, documents=["a"] * 3), timeout=READY_S)
    assert refused.value.details() == "queries: must be 1, or one per document (3), not 2"
