"""Thoughts end when their budget is spent, and a form begins behind them: the same answer with drafts and without,
with little memory, and continued elsewhere after any of its tokens.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.engine.request import Request
from baton.engine.sampling.constraint import Constraint, Grammars
from baton.engine.sampling.params import SamplingParams
from baton.engine.sampling.thoughts import ThoughtConstraint, ThoughtTokens, thought_constraint
from baton.engine.scheduler.drafts import PerSequenceDrafter
from baton.engine.scheduler.speculation import Speculation
from baton.text.structured.output import FormRefused, StructuredKind, StructuredOutput
from baton.text.structured.thoughts import Thoughts, form_of, thoughts_of
from tests.engine.test_speculation_exactness import Knows
from tests.engine.test_speculation_grammars import ROOMY, TIGHT, answered
from tests.fixtures.paged import PagedModel, random_prompt

END, MOST = 2, 60
FORM = StructuredOutput(StructuredKind.REGEX, "[abc]{4,6}")
GREEDY = SamplingParams(max_tokens=MOST, stop_token_ids=frozenset({END}))
SAMPLED = replace(GREEDY, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def paged(checkpoint: Path) -> PagedModel:
    return PagedModel(checkpoint, 8, ROOMY, packed=True)


@pytest.fixture
def grammars(checkpoint: Path) -> Iterator[Grammars]:
    grammars = Grammars(checkpoint, 512, [END])
    yield grammars
    grammars.close()


def constraint(
    grammars: Grammars, budget: int | None, form: StructuredOutput | None = None, opening: str = ""
) -> ThoughtConstraint:
    asked = Thoughts(opening, ("</think>",), "\n</think>", budget, form)
    return thought_constraint(asked.output(), [END], grammars)


def tokens_of(
    paged: PagedModel, requests: list[Request], speculation: Speculation | None = None, blocks: int = ROOMY
) -> dict[tuple[int, int], list[int]]:
    answers, _ = answered(paged, requests, speculation, len(requests), blocks)
    return {key: [drawn.token_id for drawn in each] for key, each in answers.items()}


def request(number: int, params: SamplingParams, limit: Constraint | None, answered: tuple[int, ...] = ()) -> Request:
    prompt = tuple(random_prompt(20, seed=number))
    return Request(number, prompt + answered, replace(params, constraint=limit), (), answered_tokens=len(answered))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_when_the_budget_is_spent_the_thought_ends(
    paged: PagedModel, grammars: Grammars, params: SamplingParams, budget: int
) -> None:
    free = tokens_of(paged, [request(0, params, None)])[0, 0]
    bounded = tokens_of(paged, [request(0, params, constraint(grammars, budget))])[0, 0]
    forced = [*grammars.token_ids("\n"), *grammars.token_ids("</think>")]
    assert len(free) > 7, "the answer is long enough to be bounded"
    assert bounded[:budget] == free[:budget], "until then nothing changes"
    assert bounded[budget : budget + len(forced)] == forced
    assert len(bounded) > budget + len(forced), "and then it goes on"


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_unspent_budget_changes_nothing(paged: PagedModel, grammars: Grammars, params: SamplingParams) -> None:
    free = tokens_of(paged, [request(0, params, None)])
    assert tokens_of(paged, [request(0, params, constraint(grammars, MOST))]) == free


def test_form_begins_behind_the_thought(paged: PagedModel, grammars: Grammars) -> None:
    answer = tokens_of(paged, [request(0, SAMPLED, constraint(grammars, 9, FORM))])[0, 0]
    begin = 9 + len(grammars.token_ids("\n")) + len(grammars.token_ids("</think>"))
    text = paged_text(grammars, answer[begin:-1])
    assert 4 <= len(text) <= 6 and set(text) <= set("abc") and answer[-1] == END


def paged_text(grammars: Grammars, token_ids: list[int]) -> str:
    grammars.token_ids("")
    assert grammars._tokenizer is not None
    return str(grammars._tokenizer.decode(token_ids))


MIXED: list[tuple[SamplingParams, int | None, StructuredOutput | None, str]] = [
    (GREEDY, 5, None, ""),
    (SAMPLED, 11, FORM, ""),
    (replace(SAMPLED, n=3), 4, FORM, ""),
    (replace(SAMPLED, repetition_penalty=1.3), 17, None, ""),
    (SAMPLED, 6, FORM, "<think>"),
]


def mixed(grammars: Grammars) -> list[Request]:
    return [
        request(number, params, constraint(grammars, budget, form, opening))
        for number, (params, budget, form, opening) in enumerate(MIXED)
    ]


def test_little_memory_changes_no_token(paged: PagedModel, grammars: Grammars) -> None:
    assert tokens_of(paged, mixed(grammars), blocks=TIGHT) == tokens_of(paged, mixed(grammars))


@pytest.mark.parametrize("right", [1.0, 0.6])
def test_drafts_change_no_token(paged: PagedModel, grammars: Grammars, right: float) -> None:
    usual = tokens_of(paged, mixed(grammars))
    whole = [[*random_prompt(20, seed=number), *made] for (number, _), made in usual.items()]
    speculation = Speculation(5, drafter=PerSequenceDrafter(lambda: Knows(whole, right)))
    assert tokens_of(paged, mixed(grammars), speculation) == usual
    assert speculation.done.accepted_tokens > 20


@pytest.mark.parametrize("number", [0, 1, 4])
def test_resumed_answer_ends_its_thought_at_the_same_token(paged: PagedModel, grammars: Grammars, number: int) -> None:
    params, budget, form, opening = MIXED[number]
    make: Callable[[], ThoughtConstraint] = lambda: constraint(grammars, budget, form, opening)  # noqa: E731
    whole = tokens_of(paged, [request(number, params, make())])[number, 0]
    for cut in range(1, len(whole)):
        rest = tokens_of(paged, [request(number, params, make(), tuple(whole[:cut]))])[number, 0]
        assert whole[:cut] + rest == whole, cut


def allowed(limit: Constraint, answer: tuple[int, ...], drafted: int = 0) -> set[int]:
    words = limit.mask(0, [1, *answer], 1, drafted).result()
    return {8 * byte + bit for byte, value in enumerate(words.tolist()) for bit in range(8) if value >> bit & 1}


TOKENS = ThoughtTokens((7, 8), ((5, 6),), (9, 5, 6), 3)


def test_thought_that_the_model_begins_is_bounded_from_there() -> None:
    limit = ThoughtConstraint(TOKENS, 20, None)
    everything = set(range(20))
    for free in ((), (1,), (7,), (1, 7, 8), (1, 7, 8, 2, 2), (1, 2, 3, 4, 5), (7, 8, 5, 6), (7, 8, 2, 2, 2, 9, 5, 6)):
        assert allowed(limit, free) == everything, free
    assert allowed(limit, (1, 7, 8, 2, 2, 2)) == {9}
    assert allowed(limit, (7, 8, 2, 2, 5, 9)) == {5}
    assert allowed(limit, (7, 8, 2, 2, 5, 9, 5)) == {6}


def test_drafts_that_were_wrong_leave_no_trace() -> None:
    limit = ThoughtConstraint(replace(TOKENS, open=()), 20, None)
    assert allowed(limit, (1, 5, 6), drafted=2) == set(range(20)), "the drafts would end the thought"
    assert allowed(limit, (1, 2, 3)) == {9}


def test_drafts_end_with_the_thought_and_forced_text_is_drafted() -> None:
    limit = ThoughtConstraint(replace(TOKENS, open=(), budget=4), 20, None)
    assert limit.vet(0, [1, 2], 1, [3, 5, 6, 4], 4).token_ids == [3, 5, 6]
    assert limit.vet(0, [1, 2], 1, [3, 3, 3, 3], 4).token_ids == [3, 3, 3]
    forced = limit.vet(0, [1, 2, 2, 2, 2], 1, [], 4)
    assert (tuple(forced.token_ids), forced.bound) == ((9, 5, 6), 3)


@pytest.mark.parametrize("text", ["", "[]", '["", [], "x", 1, null]', '["", ["a"], "b", 1, null]',
                                  '["", ["a"], "a", -1, null]', '["", ["a"], "a", 1, ["no kind", ""]]'])  # fmt: skip
def test_invalid_reasoning_configuration_is_refused(text: str) -> None:
    with pytest.raises(FormRefused, match="invalid reasoning configuration"):
        thoughts_of(StructuredOutput(StructuredKind.THOUGHTS, text))


def test_description_of_thoughts_travels_whole() -> None:
    asked = Thoughts("<think>", ("</think>", "é"), "\n</think>", 5, FORM)
    assert thoughts_of(asked.output()) == asked and form_of(asked.output()) == FORM


def test_thought_constraint_on_a_large_vocabulary_takes_no_step_of_python_per_token() -> None:
    vocab_size, tokens = 1 << 18, ThoughtTokens((), ((1,),), (1,), 8)
    ThoughtConstraint(tokens, vocab_size, None)
    started_s = time.process_time()
    for _ in range(20):
        last = ThoughtConstraint(tokens, vocab_size, None)
    assert time.process_time() - started_s < 0.5  # 10 ms; one step of Python per token: 2 s
    assert int(last.mask(0, (), 0).result().min()) == 255
