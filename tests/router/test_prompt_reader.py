"""Prompts that begin like earlier ones have the tokens and block names of a fresh tokenisation, always."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from baton.router.model.chat_template import ChatTemplate, chat_template_of
from baton.router.model.marks import UNCUT, find_marks
from baton.router.model.prompt_reader import AT_ONCE_CHARACTERS, PromptReader, ReadPrompt, TextTooLong, encode
from baton.router.types.request import Message, ToolCall
from baton.text.block_hash import block_hashes
from baton.text.packed_tokens import TokenPacker
from baton.text.tokenizer.checkpoint_tokenizer import read_tokenizer
from tests.fixtures.trained_tokenizers import ADDED, BEGIN, DEMO, END, SAMPLES, TURN, trained
from tests.router.http.conftest import HERMES_TEMPLATE
from tests.router.tokenizers_for_tests import TEMPLATE, rendered

ROOT = bytes(32)
BLOCK_TOKENS = 4
ENOUGH_BYTES = 1 << 24

MARKS = [TURN, END, BEGIN, "<|endoftext|>", *(token.content for token in ADDED)]
PIECES = [
    *MARKS, "<|im_", "|>", "<|", "im_end|>", "[ab][ab]{", "ababa", "a word", "sword", "words",
    "word.", " ", "  ", "\n", "\t",
    "\u00a0", "\u2003", "\u200b", "\u200d", "\ufeff", "e\u0301", "\u0301", "\u0308\u0301",
    "é", "ß", "İ", "ﬁ", "Å", "\u212b", "가", "\u1100\u1161",
    "🙂", "👩‍👩‍👧", "🇩🇪", "日本", "مرحبا", "\u202e", "\ud7ff", "\ue000", "\uffff", "\U0010ffff", "\x00", "\x1c", "\x85",
    "the", " the", "The quick brown fox", "it's", "12345", "▁", "▁the", "##s", "[CLS]", "naïve",
    "Normal\u0301", "normal",
]  # fmt: skip
FRAGMENTS = st.sampled_from(PIECES) | st.text(max_size=6)
TEXTS = st.lists(FRAGMENTS, min_size=1, max_size=30).map("".join)


def reader_of(name: str, part_characters: int = 8, most_bytes: int = ENOUGH_BYTES) -> PromptReader:
    """Cuts texts wherever it may, nearly."""
    found = find_marks(trained(name), None)
    marks = replace(found, part_characters=part_characters, window_characters=2 * part_characters)
    return PromptReader(trained(name), marks, most_bytes)


def read(
    reader: PromptReader,
    text: str,
    add_special_tokens: bool = False,
    root: bytes = ROOT,
    most_tokens: int | None = None,
) -> ReadPrompt:
    """In as many steps as it takes."""
    reading = reader.read(text, add_special_tokens, root, BLOCK_TOKENS, most_tokens)
    step = next(reading)
    while not isinstance(step, ReadPrompt):
        step = reading.send(step and encode(reader._tokenizer, step.text, step.add_special_tokens))
    assert next(reading, None) is None
    return step


def fresh(tokenizer: Tokenizer, text: str, add_special_tokens: bool, root: bytes = ROOT) -> ReadPrompt:
    ids = tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
    return ReadPrompt(ids, block_hashes(root, ids, BLOCK_TOKENS), TokenPacker().pack(ids))


@st.composite
def histories(draw: st.DrawFn) -> list[str]:
    """Texts of which each is an edit of an earlier one."""
    texts = [draw(TEXTS)]
    for _ in range(draw(st.integers(1, 6))):
        text = draw(st.sampled_from(texts))
        place = draw(st.integers(0, len(text)) | st.just(len(text)))  # mostly it goes on
        gone = draw(st.integers(0, 10) | st.just(len(text)))
        texts.append(text[:place] + draw(TEXTS) + text[place + gone :])
    return texts


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=60, deadline=None)
@given(histories(), st.booleans(), st.sampled_from([0, 2_000, ENOUGH_BYTES]), st.sampled_from([1, 8, 40]))
def test_edited_prompt_reads_like_a_new_one(
    name: str, texts: list[str], add_special_tokens: bool, most_bytes: int, part_characters: int
) -> None:
    reader = reader_of(name, part_characters, most_bytes)
    for text in texts:
        expected = fresh(trained(name), text, add_special_tokens)
        assert read(reader, text, add_special_tokens) == expected


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=20, deadline=None)
@given(histories())
def test_every_prefix_of_a_prompt_reads_like_a_new_one(name: str, texts: list[str]) -> None:
    reader = reader_of(name)
    text = "".join(texts)[:120]
    for size in range(1, len(text) + 1):
        assert read(reader, text[:size]) == fresh(trained(name), text[:size], False)


TEMPLATES = (
    TEMPLATE,
    HERMES_TEMPLATE,
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }} [INST] {{ m.content }} [/INST]{% else %}"
    " {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"city": {}}}}}
    for name in ("weather", "time")
]
CALLS = st.builds(ToolCall, st.just("call"), st.sampled_from(["weather", "time"]), TEXTS.map(lambda text: f'{{"{text}'))
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
MESSAGES = st.builds(Message, ROLES, TEXTS, tool_calls=st.lists(CALLS, max_size=2).map(tuple))


@cache
def template_of(source: str | None) -> ChatTemplate:
    """None: the demo model's."""
    if source is not None:
        return ChatTemplate(source, {"bos_token": BEGIN, "eos_token": END})
    demo = chat_template_of(read_tokenizer(DEMO))
    assert demo is not None
    return demo


@pytest.mark.parametrize("source", [None, *TEMPLATES])
@settings(max_examples=30, deadline=None)
@given(st.sampled_from(SAMPLES), st.lists(MESSAGES, min_size=1, max_size=8), st.booleans(), st.data())
def test_conversations_read_like_new_ones_at_each_turn(
    source: str | None, name: str, messages: Sequence[Message], with_tools: bool, data: st.DataObject
) -> None:
    template = template_of(source)
    reader = PromptReader(trained(name), replace(find_marks(trained(name), template), part_characters=8), ENOUGH_BYTES)
    for turn in range(1, len(messages) + 1):
        said = messages[:turn]
        if data.draw(st.integers(0, 4)) == 0:  # a client that shortens what was said before
            said = [replace(said[0], content=said[0].content[:3]), *said[1:]]
        text = rendered(template, said, TOOLS if with_tools else ())
        assert read(reader, text) == fresh(trained(name), text, False)


def turns(count: int) -> str:
    return "".join(f"{TURN}user\nthe quick brown fox {number}{END}\n" for number in range(count))


@pytest.mark.parametrize("name", SAMPLES)
def test_only_the_new_part_of_a_longer_prompt_is_read(name: str) -> None:
    reader = reader_of(name)
    first = read(reader, turns(100))
    assert (reader.known_tokens, reader.read_tokens) == (0, len(first.token_ids))
    longer = read(reader, turns(101))
    added = len(longer.token_ids) - len(first.token_ids)
    assert reader.read_tokens - len(first.token_ids) <= 2 * added
    assert reader.known_tokens + reader.read_tokens == len(first.token_ids) + len(longer.token_ids)


@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_nothing_is_known_under_another_root(add_special_tokens: bool) -> None:
    reader, tokenizer, other = reader_of("byte_level"), trained("byte_level"), hashlib.sha256(b"salt").digest()
    for root in (ROOT, other):
        found = read(reader, turns(9), add_special_tokens, root)
        assert found == fresh(tokenizer, turns(9), add_special_tokens, root)
        assert reader.known_tokens == 0


def test_without_marks_a_text_is_read_whole() -> None:
    reader = PromptReader(trained("demo"), UNCUT, ENOUGH_BYTES)
    for _ in range(2):
        assert read(reader, turns(100), True) == fresh(trained("demo"), turns(100), True)
    assert reader.known_tokens == 0


@pytest.mark.parametrize("add_special_tokens", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_too_long_prompt_is_counted_to_its_end(add_special_tokens: bool, known: bool) -> None:
    reader, text = reader_of("byte_level"), turns(50)
    expected = fresh(trained("byte_level"), text, add_special_tokens)
    tokens = len(expected.token_ids)
    if known:
        read(reader, text, add_special_tokens)
    assert read(reader, text, add_special_tokens, ROOT, tokens) == expected
    for most in (1, tokens // 2, tokens - 1):
        with pytest.raises(TextTooLong, match=rf"^{tokens} tokens$"):
            read(reader, text, add_special_tokens, ROOT, most)


def test_long_text_is_read_in_steps_and_a_known_one_in_three() -> None:
    reader, text = reader_of("demo"), turns(1000)
    steps = list(reader.read(text, False, ROOT, BLOCK_TOKENS))
    assert len(text) // AT_ONCE_CHARACTERS <= len(steps) <= len(text) // AT_ONCE_CHARACTERS + 1
    assert list(reader.read(text, False, ROOT, BLOCK_TOKENS)) == [None, None, steps[-1]]


def test_prompts_may_be_read_in_turns() -> None:
    reader = reader_of("demo")
    texts = [turns(1000), turns(900) + "!", turns(1100)]
    readings = {text: reader.read(text, False, ROOT, BLOCK_TOKENS) for text in texts}
    done = dict[str, ReadPrompt]()
    while readings:
        for text, reading in list(readings.items()):
            if (step := next(reading)) is not None:
                done[text] = step
                del readings[text]
    assert done == {text: fresh(trained("demo"), text, False) for text in texts}


@pytest.mark.parametrize("text", ["\ud800", f"{turns(3)}\udfff{turns(3)}"])
def test_half_a_character_is_refused_as_the_tokenizer_refuses_it(text: str) -> None:
    def error(work: Callable[[], object]) -> str:
        with pytest.raises(Exception) as refused:
            work()
        return repr(refused.type)

    reader = reader_of("byte_level")
    expected = error(lambda: trained("byte_level").encode(text))
    assert error(lambda: read(reader, text)) == expected
