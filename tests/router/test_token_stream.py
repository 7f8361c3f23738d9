"""One attempt's outputs, in any order, cut and repeated at will: the same contiguous tokens come out."""

from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.request.answer import InconsistentOutput, NotRepeated, TokenStream
from baton.router.types.events import NewTokens, SequenceEnd, SequenceOutput, TokenLogprob

ATTEMPT = 7


def output(offset: int, token_ids: list[int], end: SequenceEnd | None = None, choice: int = 0) -> SequenceOutput:
    return SequenceOutput(ATTEMPT, choice, offset, tuple(token_ids), end)


def begun(choices: int = 1) -> TokenStream:
    stream = TokenStream(choices)
    stream.begin(ATTEMPT)
    return stream


def take(stream: TokenStream, message: SequenceOutput) -> NewTokens | None:
    """The tokens that became contiguous with this output alone."""
    released = stream.take_all(deque((message,)))
    return released[0] if released else None


@st.composite
def interleavings(draw: st.DrawFn) -> tuple[list[list[int]], list[SequenceOutput]]:
    """Answers of up to three choices, and messages that together say all of them, some of it several times."""
    answers = draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), min_size=1, max_size=3))
    messages = []
    for choice, answer in enumerate(answers):
        cuts = sorted({0, len(answer), *draw(st.lists(st.integers(0, len(answer)), max_size=3))})
        spans = list(pairwise(cuts))
        spans += draw(st.lists(st.tuples(st.integers(0, len(answer) - 1), st.integers(1, len(answer))), max_size=3))
        for begin, beyond in spans:
            if begin < beyond:
                end = SequenceEnd.LENGTH if beyond == len(answer) else None
                messages.append(output(begin, answer[begin:beyond], end, choice))
    foreign = SequenceOutput(ATTEMPT + 1, 0, 0, (99,), SequenceEnd.STOP)
    return answers, draw(st.permutations([*messages, foreign]))


@settings(max_examples=120, deadline=None)
@given(interleavings(), st.lists(st.integers(1, 5), max_size=10))
def test_token_stream_gives_the_same_answer_for_any_interleaving_and_batches(
    drawn: tuple[list[list[int]], list[SequenceOutput]], sizes: list[int]
) -> None:
    answers, messages = drawn
    stream = begun(len(answers))
    got: list[list[int]] = [[] for _ in answers]
    ends: dict[int, SequenceEnd] = {}
    for size in (*sizes, len(messages)):
        batch, messages = deque(messages[:size]), messages[size:]
        for released in stream.take_all(batch):
            assert released.offset == len(got[released.choice])
            assert released.choice not in ends
            got[released.choice].extend(released.token_ids)
            ends |= {} if released.end is None else {released.choice: released.end}
        assert not batch
    assert got == answers
    assert ends == dict.fromkeys(range(len(answers)), SequenceEnd.LENGTH)


def test_tokens_before_an_inconsistent_output_go_out() -> None:
    stream = begun()
    outputs = deque([output(0, [1, 2]), output(1, [9]), output(2, [3])])
    assert stream.take_all(outputs) == (NewTokens(0, 0, (1, 2), None),)
    for _ in range(2):
        with pytest.raises(InconsistentOutput):
            stream.take_all(outputs)


@pytest.mark.parametrize(
    "second",
    [
        output(0, [99]),  # another token
        output(0, [10, 11], SequenceEnd.LENGTH),  # another end
        output(1, [11]),  # past the end
        output(0, [10], choice=1),  # no such choice
    ],
)
def test_a_worker_that_contradicts_itself_is_found_out(second: SequenceOutput) -> None:
    stream = begun()
    take(stream, output(0, [10], SequenceEnd.STOP))
    with pytest.raises(InconsistentOutput):
        take(stream, second)


def test_logprobs_stay_with_their_tokens_in_any_order() -> None:
    told = [TokenLogprob(-float(offset), ()) for offset in range(3)]
    stream = begun()
    assert take(stream, output(1, [11, 12])._replace(logprobs=tuple(told[1:]))) is None
    released = take(stream, output(0, [10])._replace(logprobs=(told[0],)))
    assert released == NewTokens(0, 0, (10, 11, 12), None, tuple(told))


def test_a_repeat_without_logprobs_takes_none_away() -> None:
    told = TokenLogprob(-1.0, ())
    stream = begun()
    assert take(stream, output(1, [11])._replace(logprobs=(told,))) is None
    assert take(stream, output(1, [11])) is None
    assert take(stream, output(0, [10])._replace(logprobs=(told,))) == NewTokens(0, 0, (10, 11), None, (told, told))


@pytest.mark.parametrize("other", [output(0, [99]), output(0, [10, 11])])
def test_another_attempt_must_repeat_what_was_given_out(other: SequenceOutput) -> None:
    stream = begun(2)
    take(stream, output(0, [10], SequenceEnd.STOP))
    stream.begin(ATTEMPT + 1)
    assert take(stream, output(0, [10], SequenceEnd.STOP)._replace(attempt_id=ATTEMPT + 1)) is None
    with pytest.raises(NotRepeated):
        take(stream, other._replace(attempt_id=ATTEMPT + 1))


def test_an_end_that_was_not_reached_is_forgotten_with_its_attempt() -> None:
    stream = begun()
    take(stream, output(0, [10]))
    take(stream, output(2, [12], SequenceEnd.STOP))
    stream.begin(ATTEMPT + 1)
    assert take(stream, output(0, [10, 11, 12, 13])._replace(attempt_id=ATTEMPT + 1)) == NewTokens(
        0, 1, (11, 12, 13), None
    )


def test_an_end_that_nobody_told_comes_with_its_token() -> None:
    stream = begun()
    take(stream, output(0, [10, 11]))
    assert stream.finish(0, SequenceEnd.STOP) == NewTokens(0, 2, (), SequenceEnd.STOP, stop_token_id=11)
