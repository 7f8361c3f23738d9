"""One attempt's outputs, in any order, cut and repeated at will: the same contiguous tokens come out."""

from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.request.tokens import InconsistentOutput, Lifecycle, NotRepeated
from baton.router.types.events import End, Released, SequenceOutput, TokenLogprob

ATTEMPT = 7


def output(offset: int, token_ids: list[int], end: End | None = None, choice: int = 0) -> SequenceOutput:
    return SequenceOutput(ATTEMPT, choice, offset, tuple(token_ids), end)


def begun(choices: int = 1) -> Lifecycle:
    lifecycle = Lifecycle(choices)
    lifecycle.begin(ATTEMPT)
    return lifecycle


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
                end = End.LENGTH if beyond == len(answer) else None
                messages.append(output(begin, answer[begin:beyond], end, choice))
    foreign = SequenceOutput(ATTEMPT + 1, 0, 0, (99,), End.STOP)
    return answers, draw(st.permutations([*messages, foreign]))


@settings(max_examples=300, deadline=None)
@given(interleavings())
def test_any_interleaving_gives_the_same_contiguous_answer(
    drawn: tuple[list[list[int]], list[SequenceOutput]],
) -> None:
    answers, messages = drawn
    lifecycle = begun(len(answers))
    got: list[list[int]] = [[] for _ in answers]
    ends: list[End | None] = [None for _ in answers]
    for message in messages:
        released = lifecycle.take(message)
        if released is not None:
            assert released.offset == len(got[released.choice])
            assert ends[released.choice] is None
            got[released.choice].extend(released.token_ids)
            ends[released.choice] = released.end
    assert got == answers
    assert ends == [End.LENGTH] * len(answers)
    assert lifecycle.done


@settings(max_examples=300, deadline=None)
@given(interleavings(), st.lists(st.integers(1, 5), max_size=10))
def test_any_number_of_messages_at_once_gives_the_same_answer(
    drawn: tuple[list[list[int]], list[SequenceOutput]], sizes: list[int]
) -> None:
    answers, messages = drawn
    lifecycle = begun(len(answers))
    got: list[list[int]] = [[] for _ in answers]
    for size in (*sizes, len(messages)):
        batch, messages = deque(messages[:size]), messages[size:]
        for released in lifecycle.take_all(batch):
            assert released.offset == len(got[released.choice])
            got[released.choice].extend(released.token_ids)
        assert not batch
    assert got == answers and lifecycle.done


def test_what_came_before_an_inconsistent_output_goes_out_before_the_error() -> None:
    lifecycle = begun()
    outputs = deque([output(0, [1, 2]), output(1, [9]), output(2, [3])])
    assert lifecycle.take_all(outputs) == (Released(0, 0, (1, 2), None),)
    for _ in range(2):
        with pytest.raises(InconsistentOutput):
            lifecycle.take_all(outputs)


def test_the_second_token_waits_for_the_first() -> None:
    lifecycle = begun()
    assert lifecycle.take(output(1, [11])) is None
    assert not lifecycle.begun
    assert lifecycle.take(output(0, [10])) == Released(0, 0, (10, 11), None)
    assert lifecycle.begun


def test_an_end_waits_for_the_tokens_before_it() -> None:
    lifecycle = begun()
    assert lifecycle.take(output(1, [11], End.STOP)) is None
    assert not lifecycle.done
    assert lifecycle.take(output(0, [10])) == Released(0, 0, (10, 11), End.STOP)
    assert lifecycle.done


def test_other_attempts_are_dropped() -> None:
    lifecycle = begun()
    assert lifecycle.take(SequenceOutput(ATTEMPT + 1, 0, 0, (10,))) is None
    assert not lifecycle.begun


@pytest.mark.parametrize(
    "second",
    [
        output(0, [99]),  # another token
        output(0, [10, 11], End.LENGTH),  # another end
        output(1, [11]),  # past the end
        output(0, [10], choice=1),  # no such choice
    ],
)
def test_a_worker_that_contradicts_itself_is_found_out(second: SequenceOutput) -> None:
    lifecycle = begun()
    lifecycle.take(output(0, [10], End.STOP))
    with pytest.raises(InconsistentOutput):
        lifecycle.take(second)


def test_logprobs_stay_with_their_tokens_in_any_order() -> None:
    told = [TokenLogprob(-float(offset), ()) for offset in range(3)]
    lifecycle = begun()
    assert lifecycle.take(output(1, [11, 12])._replace(logprobs=tuple(told[1:]))) is None
    released = lifecycle.take(output(0, [10])._replace(logprobs=(told[0],)))
    assert released == Released(0, 0, (10, 11, 12), None, tuple(told))


def test_a_repeat_without_logprobs_takes_none_away() -> None:
    told = TokenLogprob(-1.0, ())
    lifecycle = begun()
    assert lifecycle.take(output(1, [11])._replace(logprobs=(told,))) is None
    assert lifecycle.take(output(1, [11])) is None
    assert lifecycle.take(output(0, [10])._replace(logprobs=(told,))) == Released(0, 0, (10, 11), None, (told, told))


def test_another_attempt_goes_on_where_the_first_one_ended() -> None:
    lifecycle = begun()
    lifecycle.take(output(0, [10]))
    assert lifecycle.take(output(2, [99])) is None  # beyond a gap: forgotten with its attempt
    lifecycle.begin(ATTEMPT + 1)
    again = output(0, [10])._replace(attempt_id=ATTEMPT + 1)
    assert lifecycle.take(again) is None
    assert lifecycle.take(output(0, [77])) is None  # of the attempt that is over
    released = lifecycle.take(again._replace(offset=1, token_ids=(11, 12), end=End.LENGTH))
    assert released == Released(0, 1, (11, 12), End.LENGTH)
    assert lifecycle.answers == ((10, 11, 12),)


@pytest.mark.parametrize("other", [output(0, [99]), output(0, [10, 11])])
def test_another_attempt_must_repeat_what_was_given_out(other: SequenceOutput) -> None:
    lifecycle = begun(2)
    lifecycle.take(output(0, [10], End.STOP))
    lifecycle.begin(ATTEMPT + 1)
    assert lifecycle.take(output(0, [10], End.STOP)._replace(attempt_id=ATTEMPT + 1)) is None
    with pytest.raises(NotRepeated):
        lifecycle.take(other._replace(attempt_id=ATTEMPT + 1))


def test_an_end_that_was_not_reached_is_forgotten_with_its_attempt() -> None:
    lifecycle = begun()
    lifecycle.take(output(0, [10]))
    lifecycle.take(output(2, [12], End.STOP))
    lifecycle.begin(ATTEMPT + 1)
    assert lifecycle.take(output(0, [10, 11, 12, 13])._replace(attempt_id=ATTEMPT + 1)) == Released(
        0, 1, (11, 12, 13), None
    )


def test_each_choice_listens_to_its_own_attempt() -> None:
    lifecycle = begun(2)
    lifecycle.take(output(0, [10]))
    lifecycle.take(output(0, [20], choice=1))
    lifecycle.begin(ATTEMPT + 1, (1,))
    assert lifecycle.take(output(1, [11])) == Released(0, 1, (11,), None)
    assert lifecycle.take(output(1, [99], choice=1)) is None  # late
    later = output(1, [21], End.STOP, choice=1)._replace(attempt_id=ATTEMPT + 1)
    assert lifecycle.take(later) == Released(1, 1, (21,), End.STOP)
    assert lifecycle.answers == ((10, 11), (20, 21))


def test_an_end_that_nobody_told_comes_with_its_token() -> None:
    lifecycle = begun()
    lifecycle.take(output(0, [10, 11]))
    assert lifecycle.finish(0, End.STOP) == Released(0, 2, (), End.STOP, stop_token_id=11)
    assert lifecycle.done
