"""The router finds the first token at which a prompt differs from the last turn of its session."""

from typing import Any

import pytest

from baton.router.trace.session_prompts import PER_SESSION, PromptChange, SessionPrompts
from baton.router.types.request import Operation, PreparedRequest, Sampling, TextPrompt
from baton.text.block_hash import block_hashes

BLOCK = 4
FIRST = tuple(range(40))


def prompt(token_ids: tuple[int, ...], **fields: Any) -> PreparedRequest:
    given: dict[str, Any] = {"session": "s", **fields}
    return PreparedRequest(
        operation=Operation.CHAT,
        prompt=TextPrompt(""),
        request_id="r",
        sampling=Sampling(max_tokens=1, seed=0, stop_token_ids=(), n=1),
        token_ids=token_ids,
        packed_tokens=b"",
        cache_root=b"",
        block_hashes=block_hashes(b"", token_ids, BLOCK),
        fingerprint=b"",
        block_tokens=BLOCK,
        **given,
    )


@pytest.mark.parametrize(
    ("second", "at"),
    [
        (FIRST, None),
        ((*FIRST, 90, 91), None),
        ((*FIRST[:38], 99, 99, 99), None),  # the end of a prompt is another in the next turn
        ((*FIRST[:9], 99, *FIRST[10:]), 9),
        ((99, *FIRST[1:]), 0),
    ],
)
def test_compare_finds_the_first_changed_token(second: tuple[int, ...], at: int | None) -> None:
    prompts = SessionPrompts()

    assert prompts.compare(prompt(FIRST)) is None
    assert prompts.compare(prompt(second)) == (None if at is None else PromptChange(at, second[at : at + 12]))


def test_compare_takes_the_most_similar_of_the_newest_prompts() -> None:
    prompts = SessionPrompts()
    other = tuple(range(100, 140))
    prompts.compare(prompt(FIRST))

    for _ in range(PER_SESSION - 1):
        prompts.compare(prompt(other))
    assert prompts.compare(prompt((*FIRST, 7))) is None

    for _ in range(PER_SESSION):
        prompts.compare(prompt(other))
    assert prompts.compare(prompt(FIRST)) == PromptChange(0, FIRST[:12])


def test_compare_separates_sessions_and_tenants_and_forgets_the_oldest() -> None:
    prompts = SessionPrompts(most_tokens=100)
    changed = tuple(reversed(FIRST))
    prompts.compare(prompt(FIRST))

    for fields in ({"session": ""}, {"session": "t"}, {"tenant": "b"}):
        assert prompts.compare(prompt(changed, **fields)) is None
    assert prompts.compare(prompt(changed)) is None, "forgotten: more than 100 tokens were newer"
