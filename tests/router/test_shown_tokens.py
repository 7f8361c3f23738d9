"""Special tokens that are text of an answer, because its parts lie between them."""

from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from baton.router.model.served_model import TokenizerWorker
from tests.router.tokenizers_for_tests import byte_fallback, byte_level

MARK, OTHER = "[TOOL_CALLS]", "[ARGS]"


def with_special(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([MARK, OTHER])
    return tokenizer


@pytest.fixture(params=[byte_level, byte_fallback])
def worker(request: pytest.FixtureRequest) -> Iterator[TokenizerWorker]:
    worker = TokenizerWorker(with_special(request.param()), None)
    yield worker
    worker.close()


def ids(worker: TokenizerWorker, text: str) -> list[int]:
    return worker._tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (frozenset[str](), "abéb"),
        (frozenset({MARK}), f"{MARK}abéb"),
        (frozenset({MARK, OTHER}), f"{MARK}ab{OTHER}éb"),
        (frozenset({"<|not here|>"}), "abéb"),
    ],
)
def test_only_the_special_tokens_that_are_shown_have_a_text(
    worker: TokenizerWorker, shown: frozenset[str], text: str
) -> None:
    token_ids = ids(worker, f"{MARK}ab{OTHER}éb")
    one, all_at_once = worker.detokenizer(shown), worker.detokenizer(shown)
    assert ("".join(map(one.push, token_ids)) + one.finish()).replace(" ", "") == text
    assert (all_at_once.push_all(token_ids) + all_at_once.finish()).replace(" ", "") == text
