"""Forms are tried in processes that can be killed: what is hostile ends in bounds, and the next is served."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton.process.errors import Unavailable
from baton.router.model.form_checker import WALL_S, FormChecker
from baton.router.model.form_process import Setup, fault
from baton.text.structured.library import Vocabulary
from baton.text.structured.output import StructuredKind, StructuredOutput, json_schema
from tests.fixtures.checkpoints import make_tokenizer

SHORT_S = 0.3  # the slow one takes a second of CPU time, until the library gives it up by itself
GOOD = StructuredOutput(StructuredKind.REGEX, "[a-z]+")
SLOW = StructuredOutput(StructuredKind.REGEX, "(((a{1000}){1000}){1000}){1000}")


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(512, "byte_level", 2048).save_pretrained(folder)
    return Setup(str(folder), 512, (2,), memory_bytes=1 << 30)


@pytest.fixture
def checker(setup: Setup) -> Iterator[FormChecker]:
    checker = FormChecker(setup, processes=1)
    yield checker
    checker.close()


def processes(checker: FormChecker) -> list[int]:
    return [each.pid for each in checker._helper.processes if each.pid is not None]


async def test_form_over_the_cpu_bound_is_refused_by_name_and_the_next_is_served(setup: Setup) -> None:
    checker = FormChecker(replace(setup, cpu_s=SHORT_S), processes=1)
    try:
        assert await checker.fault(GOOD) is None
        [first] = processes(checker)
        assert await checker.fault(SLOW) == "takes more than 0.3 s of CPU time to compile"
        assert processes(checker) == []
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        assert await checker.fault(StructuredOutput(StructuredKind.REGEX, "[0-9]+")) is None
    finally:
        checker.close()


async def test_starved_form_check_is_unavailable_and_not_remembered(checker: FormChecker) -> None:
    assert await checker.fault(GOOD) is None
    [pid] = processes(checker)
    os.kill(pid, signal.SIGSTOP)  # the machine has no time for it
    other = StructuredOutput(StructuredKind.REGEX, "[0-9]+")
    checker._helper.limit_s = 0.2
    with pytest.raises(Unavailable, match="timed out after"):
        await checker.fault(other)
    checker._helper.limit_s = WALL_S
    assert await checker.fault(other) is None


async def test_killed_form_checker_is_unavailable_and_its_verdict_not_remembered(checker: FormChecker) -> None:
    assert await checker.fault(GOOD) is None
    [pid] = processes(checker)
    os.kill(pid, signal.SIGKILL)  # as a machine without memory does
    with pytest.raises(Unavailable):
        await checker.fault(SLOW)
    assert await checker.fault(StructuredOutput(StructuredKind.REGEX, "(a")) is not None


async def test_form_over_the_memory_bound_is_refused_by_name(setup: Setup) -> None:
    checker = FormChecker(replace(setup, memory_bytes=1 << 20), processes=1)
    try:
        many = StructuredOutput(StructuredKind.REGEX, "|".join(f"{number}[a-z]{{99}}" for number in range(2000)))
        assert await checker.fault(many) == "takes more than 1 MiB to compile"
    finally:
        checker.close()


async def test_verdicts_are_remembered_bad_ones_too(checker: FormChecker) -> None:
    bad = StructuredOutput(StructuredKind.REGEX, "(a")
    first = await checker.fault(bad)
    assert first is not None and "not a regular expression" in first
    assert await checker.fault(GOOD) is None
    assert (await checker.fault(bad), await checker.fault(GOOD), checker.checked) == (first, None, 2)


async def test_checker_that_cannot_read_the_tokenizer_says_so(setup: Setup, tmp_path: Path) -> None:
    checker = FormChecker(replace(setup, folder=str(tmp_path)), processes=1)
    with pytest.raises(Unavailable, match="tokenizer cannot be read"):
        await checker.fault(GOOD)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (StructuredKind.JSON_SCHEMA, '{"type": "nothing"}', "no answer satisfies it"),
        (StructuredKind.JSON_SCHEMA, '{"$ref": "#/nowhere"}', "no answer satisfies it"),
        (StructuredKind.JSON_SCHEMA, '{"$ref": "http://elsewhere/"}', "no answer satisfies it"),
        (StructuredKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "no answer satisfies it"),
        (StructuredKind.JSON_SCHEMA, '{"$ref": "#"}', "too ambiguous"),
        (StructuredKind.REGEX, "(?=a)b", "not a regular expression"),
        (StructuredKind.GRAMMAR, "begin x", "not a grammar that can be followed"),
        (StructuredKind.GRAMMAR, 'start: <|im_start|> "x"', "cannot be completed"),
        (StructuredKind.GRAMMAR, 'start: "a" <|im_start|>', "cannot be completed"),
        (StructuredKind.CHOICE, "[]", "is empty"),
    ],
)
def test_form_that_cannot_be_compiled_or_followed_has_a_short_reason(
    kind: StructuredKind, text: str, reason: str
) -> None:
    tokenizer = make_tokenizer(512, "byte_level", 2048).backend_tokenizer.to_str()
    found = fault(StructuredOutput(kind, text), Vocabulary(tokenizer, 512, [2]))
    assert found is not None and reason in found
    assert "\n" not in found and len(found) < 400


PERSON = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "age", "occupation", "country"],
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "occupation": {"type": "string"},
        "country": {"type": "string"},
    },
}


@pytest.mark.parametrize("vocab_size", [1 << 17, 1 << 18])
def test_form_check_on_a_large_vocabulary_costs_a_fraction_of_its_cpu_bound(vocab_size: int) -> None:
    vocabulary = Vocabulary(_tokenizer_of(vocab_size), vocab_size, [vocab_size - 1])
    for form in (json_schema(PERSON), StructuredOutput(StructuredKind.REGEX, "(?s:.*)")):
        started_s = time.process_time()
        assert fault(form, vocabulary) is None
        assert time.process_time() - started_s < Setup("", 0, ()).cpu_s / 4  # 20 ms; a step of Python per token: 4 s


def _tokenizer_of(vocab_size: int) -> str:
    """A tokenizer.json of so many tokens: all bytes, words and one special token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ("".join(word) for length in (3, 4) for word in product(ascii_lowercase, repeat=length))
    texts = (*letters, *islice((text for word in words for text in (word, f"Ġ{word}")), vocab_size - len(letters) - 1))
    tokenizer = Tokenizer(models.BPE(vocab={text: token_id for token_id, text in enumerate(texts)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return str(tokenizer.to_str())
