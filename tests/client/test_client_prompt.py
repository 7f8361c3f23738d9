"""The prompt told back: its place in the stream, what becomes of it, and the options that ask for it."""

from typing import Any

import pytest

from baton.client.answer import Continuity, completion_from
from baton.client.errors import InvalidRequest, ProtocolError
from baton.client.requests import chat_request, generate_request
from baton.client.responses import event_from
from baton.client.types import Delta, Event, Finished, FinishReason, PromptPart, Started, Timings, TokenLogprob, Usage
from baton.protos import baton_pb2

STARTED = Started("r", "tiny", 3, 11)
TIMINGS = Timings(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, transfer_bytes=0, transport="grpc", prefill_pid=1, decode_pid=2)
LAST = Finished(0, FinishReason.LENGTH, None, Usage(3, 1, 0), TIMINGS)
SCORES = (TokenLogprob(6, -0.5, ()), TokenLogprob(7, -1.5, ()))


def accept(events: list[Event]) -> None:
    continuity = Continuity(1)
    for event in events:
        continuity.accept(event)
    continuity.end()


def test_parts_become_the_prompt_and_begin_every_text() -> None:
    parts = [PromptPart(0, (5,), "say"), PromptPart(1, (6, 7), "", SCORES)]
    events: list[Event] = [STARTED, *parts, Delta(0, 0, (8,), " hi"), LAST]
    accept(events)
    answer = completion_from(events)
    assert answer.prompt is not None
    assert (answer.prompt.token_ids, answer.prompt.text, answer.prompt.logprobs) == ((5, 6, 7), "say", SCORES)
    assert answer.text == "say hi"


def test_an_answer_without_parts_has_no_prompt() -> None:
    answer = completion_from([STARTED, Delta(0, 0, (8,), "hi"), LAST])
    assert (answer.prompt, answer.text) == (None, "hi")


@pytest.mark.parametrize(
    "events",
    [
        [PromptPart(0, (5,), "")],
        [STARTED, PromptPart(1, (5,), "")],
        [STARTED, PromptPart(0, (5, 6), ""), PromptPart(1, (6,), "")],
        [STARTED, Delta(0, 0, (8,), "hi"), PromptPart(0, (5,), "")],
    ],
)
def test_parts_out_of_place_are_noticed(events: list[Event]) -> None:
    with pytest.raises(ProtocolError):
        accept(events)


def test_scores_of_some_tokens_only_are_no_whole_prompt() -> None:
    parts = [PromptPart(0, (5,), ""), PromptPart(1, (6, 7), "", SCORES), PromptPart(3, (9,), "")]
    with pytest.raises(ProtocolError, match="log-probabilities are missing"):
        completion_from([STARTED, *parts, LAST])


def test_a_part_is_read_from_its_message() -> None:
    logprobs = baton_pb2.Logprobs(chosen=[-1], top_token_ids=[5, 9], top_logprobs=[-1, -3])
    part = baton_pb2.PromptPart(offset=1, token_ids=[5], text="x", logprobs=logprobs)
    event = event_from(baton_pb2.GenerateResponse(prompt=part))
    assert isinstance(event, PromptPart)
    assert (event.offset, event.token_ids, event.text) == (1, (5,), "x")
    assert event.logprobs is not None
    assert [(each.token_id, each.logprob, len(each.top)) for each in event.logprobs] == [(5, -1.0, 2)]


def test_a_conversation_is_not_told_back() -> None:
    with pytest.raises(InvalidRequest, match="echo"):
        chat_request([{"role": "user", "content": "hi"}], {"echo": True})


@pytest.mark.parametrize(
    ("given", "wire"),
    [
        (False, baton_pb2.EARLY_STOPPING_UNSPECIFIED),
        (True, baton_pb2.EARLY_STOPPING_FULL),
        ("never", baton_pb2.EARLY_STOPPING_NEVER),
    ],
)
def test_early_stopping_is_that_of_transformers(given: Any, wire: int) -> None:
    assert generate_request("hi", {"early_stopping": given}).sampling.early_stopping == wire


@pytest.mark.parametrize("given", ["always", 2, None])
def test_an_unknown_early_stopping_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.early_stopping"):
        generate_request("hi", {"early_stopping": given})
