"""The prompt told back: contiguous parts of bounded size, whatever is repeated."""

from baton.router.request.answer import PART_TOKENS, PromptEcho
from baton.router.types.events import Alternative, PromptScores, TokenLogprob
from baton.router.types.response import PromptPart

TOKENS = tuple(range(100, 100 + 2 * PART_TOKENS + 7))


def scores(begin: int, end: int) -> PromptScores:
    told = tuple(TokenLogprob(-float(place), (Alternative(place, 0.0),)) for place in range(begin, end))
    return PromptScores(1, begin, told)


def check(parts: list[PromptPart], tokens: tuple[int, ...]) -> None:
    """Everything once and in order; each token but the first with the score of its place."""
    assert tuple(token_id for part in parts for token_id in part.token_ids) == tokens
    assert max(len(part.token_ids) for part in parts) <= PART_TOKENS
    offset = 0
    for part in parts:
        assert part.offset == offset
        offset += len(part.token_ids)
    told = [token.logprob for part in parts for token in part.logprobs]
    assert told == [-float(place) for place in range(1, len(tokens))]
    assert parts[0].logprobs == () and len(parts[0].token_ids) == 1


def test_prompt_scores_are_sent_in_parts_after_the_first_token() -> None:
    echo = PromptEcho(TOKENS, "text", scored=True)
    parts = [*echo.take(scores(1, 9)), *echo.take(scores(9, 1500)), *echo.take(scores(1500, len(TOKENS))), *echo.rest()]
    check(parts, TOKENS)
    assert [part.text for part in parts][:2] == ["text", ""]


def test_prompt_repeated_by_another_attempt_is_sent_once() -> None:
    echo = PromptEcho(TOKENS[:20], "", scored=True)
    parts = [*echo.take(scores(1, 9)), *echo.take(scores(1, 5)), *echo.take(scores(5, 20)), *echo.rest()]
    check(parts, TOKENS[:20])


def test_prompt_without_scores_is_sent_immediately() -> None:
    echo = PromptEcho(TOKENS, "text", scored=False)
    parts = echo.rest()
    assert [len(part.token_ids) for part in parts] == [PART_TOKENS, PART_TOKENS, 7]
    assert [part.text for part in parts] == ["text", "", ""]
    assert echo.rest() == ()


def test_prompt_of_one_token_has_no_scores() -> None:
    echo = PromptEcho(TOKENS[:1], "t", scored=True)
    assert echo.rest() == (PromptPart(0, TOKENS[:1], "t"),)
    assert echo.rest() == ()
