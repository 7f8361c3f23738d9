"""A stream cut anywhere: what came before and what comes after are together what it would have been."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.request.answer import BestOf, NotRepeated, RequestAnswer
from baton.router.request.resume import ReceivedAnswer, ReceivedChoice, ResumeFilter
from baton.router.trace.record import AnswerInProgress
from baton.router.types.events import NewTokens, SequenceEnd, TokenLogprob
from baton.router.types.response import AnswerEvent, ChoiceFinished, Delta
from baton.text.detokenizer import Detokenizer, silent_token_ids
from tests.router.tokenizers_for_tests import byte_level

TOKENIZER = byte_level()
SILENT = silent_token_ids(TOKENIZER)
STOPS = ("STOP", "OST")
# Characters of one to four bytes, each byte a token, and what stop strings begin with.
TEXTS = st.text(alphabet="SSTTOOP aé漢🙂", max_size=24)


def answer(choices: int = 1, stops: tuple[str, ...] = STOPS, min_tokens: int = 0) -> RequestAnswer:
    return RequestAnswer(choices, stops, min_tokens, lambda: Detokenizer(TOKENIZER, SILENT))


@dataclass
class Client:
    """What has come of each choice."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    ends: dict[int, ChoiceFinished] = field(default_factory=dict)

    def take(self, events: Sequence[AnswerEvent]) -> None:
        for event in events:
            if isinstance(event, ChoiceFinished):
                assert event.index not in self.ends
                self.ends[event.index] = event
                continue
            assert event.offset == len(self.tokens.setdefault(event.index, []))
            self.tokens[event.index] += event.token_ids
            self.text[event.index] = self.text.get(event.index, "") + event.text
            self.logprobs.setdefault(event.index, []).extend(event.logprobs)

    def received(self) -> ReceivedAnswer:
        """As the library has it: a choice may have ended without a token, all of them a stop string."""
        return ReceivedAnswer(
            {
                index: ReceivedChoice(
                    tuple(self.tokens.get(index, ())), len(self.text.get(index, "").encode()), index in self.ends
                )
                for index in self.tokens.keys() | self.ends.keys()
            }
        )


def steps(token_ids: Sequence[int], end: SequenceEnd, choice: int = 0) -> list[NewTokens]:
    """One token each, with its log-probability."""
    return [
        NewTokens(
            choice,
            offset,
            (token_id,),
            end if offset == len(token_ids) - 1 else None,
            (TokenLogprob(-float(offset), ()),),
        )
        for offset, token_id in enumerate(token_ids)
    ]


def together(released: Sequence[NewTokens], data: st.DataObject) -> Iterator[NewTokens]:
    """The same, a few tokens at a time: a worker tells what it has kept in one piece."""
    left = list(released)
    while left:
        size = data.draw(st.integers(1, len(left)))
        taken, left = left[:size], left[size:]
        token_ids = tuple(token_id for each in taken for token_id in each.token_ids)
        logprobs = tuple(logprob for each in taken for logprob in each.logprobs)
        yield taken[-1]._replace(offset=taken[0].offset, token_ids=token_ids, logprobs=logprobs)


def feed(made: AnswerInProgress, released: Iterable[NewTokens], client: Client) -> None:
    for each in released:
        client.take(made.take(each))


@given(text=TEXTS, min_tokens=st.integers(0, 4), data=st.data())
def test_parts_at_any_cut_join_to_the_complete_answer(text: str, min_tokens: int, data: st.DataObject) -> None:
    token_ids = TOKENIZER.encode(text + ".").ids
    released = steps(token_ids, SequenceEnd.LENGTH)
    whole = Client()
    feed(answer(min_tokens=min_tokens), released, whole)

    cut = Client()
    events = _all(answer(min_tokens=min_tokens), released)
    cut.take(events[: data.draw(st.integers(0, len(events) - 1))])
    received = cut.received()
    carried = received.of(0).token_ids
    resumed = ResumeFilter(answer(min_tokens=min_tokens), 1, received)
    if carried:  # as a router does that knows only what the client has
        untold = (TokenLogprob(float("nan"), ()),) * len(carried)
        cut.take(
            resumed.take(
                NewTokens(0, 0, carried, SequenceEnd.LENGTH if len(carried) == len(token_ids) else None, untold)
            )
        )
    if not resumed.done:
        feed(resumed, together(released[len(carried) :], data), cut)
    assert (cut.tokens, cut.text, cut.ends) == (whole.tokens, whole.text, whole.ends)
    assert cut.logprobs == whole.logprobs


def _all(made: AnswerInProgress, released: Sequence[NewTokens]) -> list[AnswerEvent]:
    return [event for each in released for event in made.take(each)]


@given(texts=st.lists(TEXTS, min_size=2, max_size=3), data=st.data())
def test_resent_choices_are_trimmed_separately(texts: list[str], data: st.DataObject) -> None:
    of_choices = [
        steps(TOKENIZER.encode(text + ".").ids, SequenceEnd.LENGTH, index) for index, text in enumerate(texts)
    ]
    first_order = [each for released in of_choices for each in released]
    again = data.draw(st.permutations(range(len(texts))))
    second_order = [each for index in again for each in together(of_choices[index], data)]
    whole = Client()
    feed(answer(len(texts)), first_order, whole)
    events = _all(answer(len(texts)), first_order)
    client = Client()
    client.take(events[: data.draw(st.integers(0, len(events) - 1))])
    before = len(client.ends)
    resumed = ResumeFilter(answer(len(texts)), len(texts), client.received())
    for each in second_order:
        client.take(resumed.take(each))
        assert len(client.ends) < len(texts) or resumed.done, "usage would be told too early"
    assert (client.tokens, client.text, client.ends) == (whole.tokens, whole.text, whole.ends)
    assert before < len(texts)


def test_another_answer_than_the_client_has_is_noticed() -> None:
    resumed = ResumeFilter(answer(), 1, ReceivedAnswer({0: ReceivedChoice((5, 6), 2)}))
    resumed.take(NewTokens(0, 0, (5,), None))
    with pytest.raises(NotRepeated):
        resumed.take(NewTokens(0, 1, (7,), None))


def test_answer_shorter_than_the_received_part_is_noticed() -> None:
    resumed = ResumeFilter(answer(stops=()), 1, ReceivedAnswer({0: ReceivedChoice((70, 71), 2)}))
    with pytest.raises(NotRepeated, match="ends before"):
        resumed.take(NewTokens(0, 0, (70,), SequenceEnd.STOP))


def test_delta_that_the_client_has_half_of_is_cut() -> None:
    token_ids = tuple(TOKENIZER.encode("abcd").ids)
    resumed = ResumeFilter(answer(stops=()), 1, ReceivedAnswer({0: ReceivedChoice(token_ids[:2], 2)}))
    assert resumed.take(NewTokens(0, 0, token_ids, None)) == [Delta(0, 2, token_ids[2:], "cd")]


class Ended:
    """An answer whose choices have all ended; what comes behind that says nothing."""

    done = True

    def take(self, released: NewTokens) -> tuple[Any, ...]:
        raise AssertionError("nothing is taken any more")


def test_tokens_behind_the_last_end_are_ignored() -> None:
    best = BestOf(cast(RequestAnswer, Ended()), 1, with_logprobs=False)
    assert best.take(cast(NewTokens, None)) == ()
