"""Long texts are tokenised in turns and hold up no other caller, whatever they are made of."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Encoding, Regex, Tokenizer, normalizers, pre_tokenizers

from baton.router.model import served_model
from baton.router.model.marks import Marks, find_marks
from baton.router.model.prompt_reader import LONG_BYTES, TextTooLong, encode
from baton.router.model.served_model import TokenizerWorker, load_tokenizer
from baton.router.types.request import TextPrompt
from tests.fixtures.trained_tokenizers import trained
from tests.router.tokenizers_for_tests import byte_level, write_model_folder

FAMILY = "👨‍👩‍👧‍👦‍"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PIECES = st.sampled_from(
    [
        "a",
        "B",
        " ",
        "  ",
        "\n",
        "\n\n",
        " \n",
        "é",
        "'s",
        "'",
        "1",
        ".",
        ")",
        "中",
        "한",
        "😀",
        "word",
        "Σ",
        "\u0301",
        "\t",
    ]
)


def split_by(pattern: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(trained("byte_level").to_str())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def joined(tokenizer: Tokenizer, marks: Marks, text: str) -> list[int]:
    """Tokens of a text in its parts."""
    token_ids = list[int]()
    for part in marks.parts(text):
        token_ids += encode(tokenizer, text[part.start : part.end], False).ids[part.has_mark :]
    return token_ids


@pytest.mark.parametrize("pattern", [GPT_2, LLAMA_3, O200K])
@settings(max_examples=60, deadline=None)
@given(st.lists(PIECES, max_size=60).map("".join))
def test_text_cut_between_words_has_the_tokens_of_the_whole(pattern: str, text: str) -> None:
    tokenizer = split_by(pattern)
    found = find_marks(tokenizer, None)
    assert found.cuts_words
    marks = replace(found, part_characters=1, window_characters=4)
    assert joined(tokenizer, marks, text) == encode(tokenizer, text, False).ids


@pytest.mark.parametrize("name", ["spaces_first", "spaces_always", "sentence_piece", "unigram"])
def test_tokenizer_with_patterns_across_words_is_not_cut_between_them(name: str) -> None:
    assert not find_marks(trained(name), None).cuts_words


@pytest.mark.parametrize("pattern", [r"(?<=a) b|\S+|\s+", r"\S+ \S+|\S+|\s+", r"^\S+|\S+|\s+", r"\S+$|\S+|\s+"])
def test_tokenizer_with_lookaround_is_not_cut_between_words(pattern: str) -> None:
    assert not find_marks(split_by(pattern), None).cuts_words


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("New York", normalized=False),
        AddedToken("\nHuman", normalized=False),
        AddedToken("word", rstrip=True, normalized=False),
        AddedToken("word", lstrip=True, normalized=False),
    ],
)
def test_tokenizer_with_tokens_across_words_is_not_cut_between_them(token: AddedToken) -> None:
    tokenizer = split_by(GPT_2)
    tokenizer.add_tokens([token])
    assert not find_marks(tokenizer, None).cuts_words


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[TokenizerWorker]:
    worker = load_tokenizer(write_model_folder(tmp_path))
    yield worker
    worker.close()


async def test_neighbour_is_served_while_texts_without_a_cut_are_tokenised(
    worker: TokenizerWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, started = threading.Event(), threading.Semaphore(0)

    def slow(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> Encoding:
        started.release()
        assert go_on.wait(60)
        return encode(tokenizer, text, add_special_tokens)

    monkeypatch.setattr(served_model, "encode", slow)
    long = FAMILY * (LONG_BYTES // len(FAMILY.encode()) + 1)
    attack = [asyncio.ensure_future(worker.encode(long, False, tenant="greedy")) for _ in range(10)]
    try:
        await asyncio.to_thread(started.acquire)
        async with asyncio.timeout(20):
            assert len(await worker.encode("hi", False, tenant="neighbour")) == 2
            assert len(await worker.encode("word " * 4000, False, tenant="neighbour")) == 20_000
        other = asyncio.ensure_future(worker.encode(long, False, tenant="neighbour"))
        async with asyncio.timeout(20):
            await asyncio.to_thread(started.acquire)  # the caller with ten has one thread of two
        assert not started.acquire(blocking=False)
    finally:
        go_on.set()
    assert {len(each) for each in await asyncio.gather(*attack, other)} == {len(long.encode())}


async def test_neighbour_waits_for_one_turn_of_each_long_text(
    worker: TokenizerWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, plain = list[int](), worker.reader._encode

    def counted(text: str, add_special_tokens: bool) -> Encoding:
        parts.append(len(text))
        return plain(text, add_special_tokens)

    monkeypatch.setattr(worker.reader, "_encode", counted)
    attack = [asyncio.ensure_future(worker.encode("word " * 200_000, False)) for _ in range(10)]
    while len(parts) < 20:
        await asyncio.sleep(0)
    before = len(parts)
    await worker.encode("hi", False)
    assert len(parts) - before < 40
    for each in attack:
        each.cancel()
    await asyncio.gather(*attack, return_exceptions=True)
    assert max(parts) < LONG_BYTES


@pytest.mark.parametrize("unit", [FAMILY, "😀", "x", "word "])
async def test_text_over_the_context_is_refused_by_its_beginning(
    worker: TokenizerWorker, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    seen, plain = list[int](), worker.reader._encode

    def counted(text: str, add_special_tokens: bool) -> Encoding:
        seen.append(len(text.encode()))
        return plain(text, add_special_tokens)

    monkeypatch.setattr(worker.reader, "_encode", counted)
    monkeypatch.setattr(served_model, "encode", None)
    with pytest.raises(TextTooLong):
        await worker.prompt_tokens(TextPrompt(unit * (1_000_000 // len(unit.encode()))), most_tokens=20_000)
    assert sum(seen) < 100_000


def test_byte_level_tokenizer_is_cut_between_words() -> None:
    assert find_marks(byte_level(), None).cuts_words
