"""Detokenising one by one adds up to decoding all at once, for both ways of spelling bytes, garbage included."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from baton.text.detokenizer import Detokenizer, joins_bytes, silent_token_ids
from tests.router.tokenizers_for_tests import byte_fallback, byte_level

TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}
ALONE: dict[str, dict[int, str]] = {kind: {} for kind in TOKENIZERS}  # shared by all examples, as by all answers


def streamed(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, silent_token_ids(tokenizer))
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=120, deadline=None)
@given(st.data())
def test_pieces_add_up_to_the_whole(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=24))
    assert "".join(streamed(tokenizer, token_ids)) == tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=120, deadline=None)
@given(st.text(alphabet="ab é€😀\n", max_size=12))
def test_text_survives_the_way_there_and_back(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode(text).ids
    assert "".join(streamed(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_split_character_waits_until_it_is_complete() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert streamed(tokenizer, tokenizer.encode("a😀b").ids) == ["a", "", "", "", "😀", "b", ""]


def test_withheld_tail_is_flushed() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert streamed(tokenizer, tokenizer.encode("a😀").ids[:3]) == ["a", "", "", "\ufffd"]


def test_run_of_bytes_waits_for_its_end() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    assert streamed(tokenizer, [0xE2, 0x82, 0xAC, *tokenizer.encode("a").ids[1:]]) == ["", "", "", "€a", ""]


def test_where_decode_stream_fails_this_one_does_not() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    token_ids = [0xC3, 0xA9, 0xFF, *tokenizer.encode("a").ids[1:]]
    stream = DecodeStream(skip_special_tokens=True)
    with pytest.raises(Exception, match="Invalid prefix"):
        [stream.step(tokenizer, token_id) for token_id in token_ids]
    assert "".join(streamed(tokenizer, token_ids)) == tokenizer.decode(token_ids) == "\ufffd" * 3 + "a"


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=120, deadline=None)
@given(st.data())
def test_tokens_together_give_the_same_text_as_one_by_one(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = st.integers(0, tokenizer.get_vocab_size() - 1) | st.sampled_from(tokenizer.encode("a é€😀").ids)
    batches = data.draw(st.lists(st.lists(ids, max_size=5), max_size=8))
    alone, joins = ALONE[kind], joins_bytes(tokenizer)
    detokenizer = Detokenizer(tokenizer, silent_token_ids(tokenizer), alone=alone, joins=joins)
    text = "".join(detokenizer.push_all(batch) for batch in batches) + detokenizer.finish()
    assert text == tokenizer.decode([token_id for batch in batches for token_id in batch], skip_special_tokens=True)


class CountedTokenizer:
    """Counts the tokens that it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        self.decoded += len(token_ids)
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))


@pytest.mark.parametrize("period", [(1,), (0,), (0, 1), (0, 1, 2), (3, 1, 0), (0, 1, 2, 3, 2)])
def test_detokenizer_of_invalid_bytes_takes_linear_time(period: tuple[int, ...]) -> None:
    counted, tokens = CountedTokenizer(TOKENIZERS["byte_level"]), 2000
    face = TOKENIZERS["byte_level"].encode("😀").ids
    token_ids = [face[place] for place in period] * (tokens // len(period)) + face
    detokenizer = Detokenizer(counted, silent_token_ids(TOKENIZERS["byte_level"]))  # type: ignore[arg-type]
    text = "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()
    assert counted.decoded < 200 * tokens  # all of them again with each: 1000 * tokens
    assert text == TOKENIZERS["byte_level"].decode(token_ids)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*TOKENIZERS["byte_level"].encode("😀").ids, 0]), min_size=60, max_size=200))
def test_long_runs_of_broken_characters_add_up_to_the_whole(token_ids: list[int]) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert "".join(streamed(tokenizer, token_ids)) == tokenizer.decode(token_ids)
