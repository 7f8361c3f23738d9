"""Events of an answer: their order, what is put together from them, and broken promises."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.client.answer import Continuity, completion_from
from baton.client.errors import ProtocolError
from baton.client.types import Delta, Event, Finished, FinishReason, PromptPart, Started, Timings, TokenLogprob, Usage

STARTED = Started("r", "tiny", 3, 11)
USAGE = Usage(3, 3, 0)
TIMINGS = Timings(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, transfer_bytes=0, transport="grpc", prefill_pid=1, decode_pid=2)


def finished(index: int, last: bool = True) -> Finished:
    return Finished(index, FinishReason.STOP, "END", USAGE if last else None, TIMINGS if last else None)


def check(events: Sequence[Event], choices: int = 1) -> None:
    continuity = Continuity(choices)
    for event in events:
        continuity.accept(event)
    continuity.end()


def answer(lengths: Sequence[Sequence[int]], order: Sequence[int]) -> list[Event]:
    """Deltas of `lengths[choice]` tokens each, choices taking turns as `order` says."""
    waiting = [list(choice) for choice in lengths]
    offsets = [0] * len(lengths)
    events: list[Event] = [STARTED]
    for turn in [*order, *(choice for choice, rest in enumerate(lengths) for _ in rest)]:
        choice = turn % len(lengths)
        if waiting[choice]:
            length = waiting[choice].pop(0)
            token_ids = tuple(range(offsets[choice], offsets[choice] + length))
            events.append(Delta(choice, offsets[choice], token_ids, "".join(f"{token}," for token in token_ids)))
            offsets[choice] += length
    return events + [finished(choice, last=choice == len(lengths) - 1) for choice in range(len(lengths))]


ANSWERS = st.builds(
    answer,
    lengths=st.lists(st.lists(st.integers(0, 4), max_size=5), min_size=1, max_size=3),
    order=st.lists(st.integers(0, 2), max_size=15),
)


@given(events=ANSWERS)
def test_answer_in_any_interleaving_is_accepted_and_put_together(events: list[Event]) -> None:
    check(events, choices=sum(isinstance(event, Finished) for event in events))
    for choice in completion_from(events).choices:
        assert choice.token_ids == tuple(range(len(choice.token_ids)))
        assert choice.text == "".join(f"{token}," for token in choice.token_ids)
        assert (choice.finish_reason, choice.matched_stop) == (FinishReason.STOP, "END")


@given(events=ANSWERS, data=st.data())
def test_tokens_sent_twice_are_noticed(events: list[Event], data: st.DataObject) -> None:
    full = [place for place, event in enumerate(events) if isinstance(event, Delta) and event.token_ids]
    if full:
        place = data.draw(st.sampled_from(full))
        events.insert(place + 1, events[place])
        with pytest.raises(ProtocolError, match="repeated"):
            check(events, choices=3)


def test_tokens_that_are_missing_are_noticed() -> None:
    with pytest.raises(ProtocolError, match=r"lost.*offset 2 after 1 "):
        check([STARTED, Delta(0, 0, (5,), "a"), Delta(0, 2, (6,), "b"), finished(0)])


def test_text_delta_without_tokens_is_accepted() -> None:
    check([STARTED, Delta(0, 0, (5,), ""), Delta(0, 1, (), "held back"), finished(0)])


@pytest.mark.parametrize(
    "events",
    [
        [],
        [STARTED],
        [STARTED, Delta(0, 0, (5,), "a")],
        [Delta(0, 0, (5,), "a"), finished(0)],
        [finished(0)],
        [STARTED, STARTED, finished(0)],
        [STARTED, finished(0), Delta(0, 0, (5,), "a")],
        [STARTED, finished(0), finished(0)],
        [STARTED, Delta(1, 0, (5,), "a"), finished(0)],
        [STARTED, finished(0, last=False)],
        [PromptPart(0, (5,), "")],
        [STARTED, PromptPart(1, (5,), "")],
        [STARTED, PromptPart(0, (5, 6), ""), PromptPart(1, (6,), "")],
        [STARTED, Delta(0, 0, (8,), "hi"), PromptPart(0, (5,), "")],
    ],
)
def test_events_out_of_order_are_a_protocol_error(events: list[Event]) -> None:
    with pytest.raises(ProtocolError):
        check(events)


def test_usage_is_sent_once_and_last() -> None:
    with pytest.raises(ProtocolError, match="usage"):
        check([STARTED, finished(0, last=True), finished(1, last=True)], choices=2)


@pytest.mark.parametrize("events", [[], [STARTED], [STARTED, finished(0, last=False)], [finished(0)]])
def test_incomplete_answer_is_no_completion(events: list[Event]) -> None:
    with pytest.raises(ProtocolError):
        completion_from(events)


def test_logprobs_are_collected_with_their_tokens() -> None:
    told = [TokenLogprob(token_id, -0.5, ()) for token_id in range(3)]
    deltas = [Delta(0, 0, (0, 1), "ab", tuple(told[:2])), Delta(0, 2, (), "c"), Delta(0, 2, (2,), "d", (told[2],))]
    assert completion_from([STARTED, *deltas, finished(0)]).choices[0].logprobs == tuple(told)


def test_partial_logprobs_are_a_protocol_error() -> None:
    deltas = [Delta(0, 0, (0,), "a", (TokenLogprob(0, -0.5, ()),)), Delta(0, 1, (1,), "b")]
    with pytest.raises(ProtocolError, match="log-probabilities are missing"):
        completion_from([STARTED, *deltas, finished(0)])


SCORES = (TokenLogprob(6, -0.5, ()), TokenLogprob(7, -1.5, ()))


def test_prompt_parts_become_the_prompt_and_prefix_of_every_text() -> None:
    parts = [PromptPart(0, (5,), "say"), PromptPart(1, (6, 7), "", SCORES)]
    events: list[Event] = [STARTED, *parts, Delta(0, 0, (8,), " hi"), finished(0)]
    check(events)
    answer = completion_from(events)
    assert answer.prompt is not None
    assert (answer.prompt.token_ids, answer.prompt.text, answer.prompt.logprobs) == ((5, 6, 7), "say", SCORES)
    assert answer.text == "say hi"


def test_answer_without_parts_has_no_prompt() -> None:
    answer = completion_from([STARTED, Delta(0, 0, (8,), "hi"), finished(0)])
    assert (answer.prompt, answer.text) == (None, "hi")


def test_partial_prompt_logprobs_are_a_protocol_error() -> None:
    parts = [PromptPart(0, (5,), ""), PromptPart(1, (6, 7), "", SCORES), PromptPart(3, (9,), "")]
    with pytest.raises(ProtocolError, match="log-probabilities are missing"):
        completion_from([STARTED, *parts, finished(0)])
