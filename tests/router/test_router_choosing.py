"""Prompt log-probabilities, echo, best_of and beam search over gRPC with scripted workers."""

from typing import Any

import pytest

from baton.protos import baton_pb2, sampling_pb2, session_pb2
from tests.router.conftest import READY_S, Stack, encode, text_of, tokens_of
from tests.router.test_router_refusals import refusal

LENGTH = session_pb2.END_REASON_LENGTH


def kinds(responses: list[Any]) -> list[str]:
    return [response.WhichOneof("event") for response in responses]


def prompt_of(responses: list[Any]) -> list[Any]:
    return [response.prompt for response in responses if response.WhichOneof("event") == "prompt"]


def scores(attempt_id: int, offset: int, tokens: int, top: int = 1) -> session_pb2.PromptScores:
    return session_pb2.PromptScores(
        attempt_id=attempt_id,
        offset=offset,
        logprobs=[-(offset + index) / 8 for index in range(tokens)],
        top_token_ids=[rank for _ in range(tokens) for rank in range(top)],
        top_logprobs=[-0.5] * (tokens * top),
    )


async def begun(stack: Stack, **request: Any) -> tuple[Any, int]:
    """A call whose workers the test speaks for, and its attempt."""
    await stack.ready()
    before = len([c for c in stack.prefill.commands if c.WhichOneof("command") == "prefill"])
    stack.pair.manual = True
    given = baton_pb2.SamplingParams(**request.pop("sampling", {}))
    call = stack.stub.Generate(baton_pb2.GenerateRequest(**request, sampling=given), timeout=READY_S)
    command = await stack.prefill.received("prefill", before + 1)
    return call, command.attempt_id


async def test_scores_come_before_tokens_that_overtook_them(stack: Stack) -> None:
    call, attempt_id = await begun(stack, text="hello", sampling={"max_tokens": 2, "prompt_logprobs": 1})
    assert (await stack.prefill.received("prefill")).sampling.prompt_logprobs == 1
    assert not (await stack.decode.received("start")).sampling.HasField("prompt_logprobs")
    stack.pair.landed(attempt_id)
    stack.pair.step(attempt_id, 0, [65, 66], LENGTH)
    stack.prefill.say(prompt_scores=scores(attempt_id, 1, 3))
    stack.prefill.say(prompt_scores=scores(attempt_id, 4, 1))
    stack.pair.first_step(attempt_id, [65])
    responses = [response async for response in call]
    assert kinds(responses)[0] == "started" and kinds(responses)[-1] == "finished"
    parts = prompt_of(responses)
    assert kinds(responses)[1 : 1 + len(parts)] == ["prompt"] * len(parts)
    assert [token_id for part in parts for token_id in part.token_ids] == encode("hello")
    assert [part.offset for part in parts] == [0, 1, 4]
    assert [each for part in parts for each in part.logprobs.chosen] == [-1 / 8, -2 / 8, -3 / 8, -4 / 8]
    assert not parts[0].HasField("logprobs") and all(part.text == "" for part in parts)
    assert tokens_of(responses) == [65, 66]


async def test_scores_with_a_gap_are_a_broken_protocol(stack: Stack) -> None:
    call, attempt_id = await begun(stack, text="hello", sampling={"max_tokens": 2, "prompt_logprobs": 0})
    stack.prefill.say(prompt_scores=scores(attempt_id, 2, 3, top=0))
    error = await refusal(call)
    assert error.code().name == "INTERNAL"


async def test_an_echo_is_the_text_as_it_was_given(stack: Stack) -> None:
    request = baton_pb2.GenerateRequest(text="hello", echo=True, sampling=baton_pb2.SamplingParams(max_tokens=2))
    responses = [response async for response in stack.stub.Generate(request, timeout=READY_S)]
    assert kinds(responses)[:2] == ["started", "prompt"]
    [part] = prompt_of(responses)
    assert (part.text, list(part.token_ids), part.HasField("logprobs")) == ("hello", encode("hello"), False)
    assert text_of(responses) == "he"


async def test_an_echo_of_tokens_is_what_they_spell(stack: Stack) -> None:
    prompt = baton_pb2.TokenIds(ids=encode("hello"))
    request = baton_pb2.GenerateRequest(token_ids=prompt, echo=True, sampling=baton_pb2.SamplingParams(max_tokens=2))
    responses = [response async for response in stack.stub.Generate(request, timeout=READY_S)]
    assert [part.text for part in prompt_of(responses)] == ["hello"]


async def test_an_echo_with_logprobs_asks_for_those_of_the_prompt(stack: Stack) -> None:
    call, _ = await begun(stack, text="hello", echo=True, sampling={"max_tokens": 2, "logprobs": 3})
    assert (await stack.prefill.received("prefill")).sampling.prompt_logprobs == 3
    call.cancel()


@pytest.mark.parametrize("with_logprobs", [False, True])
async def test_the_best_go_out_at_the_end_and_all_are_counted(stack: Stack, with_logprobs: bool) -> None:
    asked = {"max_tokens": 2, "n": 2, "best_of": 3, **({"logprobs": 0} if with_logprobs else {})}
    call, attempt_id = await begun(stack, text="hello", sampling=asked)
    told = (await stack.prefill.received("prefill")).sampling
    assert (told.n, told.HasField("logprobs"), told.logprobs) == (3, True, 0)
    stack.pair.landed(attempt_id)
    for choice, logprob in enumerate((-2.0, -0.5, -1.0)):
        output = session_pb2.SequenceOutput(
            attempt_id=attempt_id,
            choice=choice,
            token_ids=[65 + choice, 75 + choice],
            logprobs=[logprob] * 2,
            end=LENGTH,
        )
        stack.decode.say(step_outputs=session_pb2.StepOutputs(outputs=[output]))
    responses = [response async for response in call]
    assert kinds(responses) == ["started", "delta", "finished", "delta", "finished"]
    assert (tokens_of(responses, 0), tokens_of(responses, 1)) == ([66, 76], [67, 77])
    assert (text_of(responses, 0), text_of(responses, 1)) == ("cm", "dn")
    assert [response.delta.HasField("logprobs") for response in responses[1::2]] == [with_logprobs] * 2
    assert not responses[2].finished.HasField("usage")
    assert responses[-1].finished.usage.completion_tokens == 6


async def test_a_beam_search_is_told_to_workers_and_answered_at_its_end(stack: Stack) -> None:
    asked = {
        "max_tokens": 2,
        "n": 2,
        "beam_width": 4,
        "length_penalty": 0.5,
        "early_stopping": baton_pb2.EARLY_STOPPING_FULL,
    }
    call, attempt_id = await begun(stack, text="hello", sampling=asked)
    for each in ((await stack.prefill.received("prefill")).sampling, (await stack.decode.received("start")).sampling):
        assert (each.n, each.beam_width, each.length_penalty) == (2, 4, 0.5)
        assert (each.beam_stop, each.temperature) == (sampling_pb2.BEAM_STOP_FULL, 0.0)
    stack.pair.first_step(attempt_id, [])
    # Its timings are prefill's: decode, over another session, is not to end the answer before they are in.
    await stack.until(lambda status: sum(worker.in_flight_requests for worker in status.workers) == 1)
    stack.pair.landed(attempt_id)
    for choice in range(2):
        stack.pair.step(attempt_id, 0, [65 + choice, 75 + choice], LENGTH, choice)
    responses = [response async for response in call]
    assert (tokens_of(responses, 0), tokens_of(responses, 1)) == ([65, 75], [66, 76])
    finished = responses[-1].finished
    assert finished.usage.completion_tokens == 4
    timings = finished.timings
    parts = (
        timings.router_queue_ms + timings.route_ms + timings.prefill_queue_ms + timings.prefill_ms + timings.return_ms
    )
    assert timings.ttft_ms == pytest.approx(parts, abs=0.5)
