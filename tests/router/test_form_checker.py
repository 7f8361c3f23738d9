"""Forms are tried in processes that can be killed: what is hostile ends in bounds, and the next is served."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.generation.structured.library import Vocabulary
from baton.generation.structured.output import StructuredKind, StructuredOutput
from baton.router.model.form_checker import FormChecker
from baton.router.model.form_process import Setup, fault
from baton.service.errors import Unavailable
from tests.fixtures.checkpoints import make_tokenizer

LIMIT_S = 20.0  # no good form takes so long, on whatever machine
SHORT_S = 0.1  # the slow one takes a second, until the library gives it up by itself
GOOD = StructuredOutput(StructuredKind.REGEX, "[a-z]+")
SLOW = StructuredOutput(StructuredKind.REGEX, "(((a{1000}){1000}){1000}){1000}")


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(512, "byte_level", 2048).save_pretrained(folder)
    return Setup(str(folder), 512, (2,), memory_bytes=1 << 30)


@pytest.fixture
def checker(setup: Setup) -> Iterator[FormChecker]:
    checker = FormChecker(setup, processes=1, limit_s=LIMIT_S)
    yield checker
    checker.close()


def processes(checker: FormChecker) -> list[int]:
    return [each.pid for each in checker._processes if each.pid is not None]


async def test_a_form_that_takes_too_long_is_killed_and_the_next_is_served(
    checker: FormChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await checker.fault(GOOD) is None
    [first] = processes(checker)
    started = time.monotonic()
    with monkeypatch.context() as impatient:
        impatient.setattr(checker, "_limit_s", SHORT_S)
        assert await checker.fault(SLOW) == "takes more than 0.1 s to compile"
    assert time.monotonic() - started < SHORT_S + 8
    assert processes(checker) == []
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert await checker.fault(StructuredOutput(StructuredKind.REGEX, "[0-9]+")) is None


async def test_a_form_that_takes_too_much_memory_is_refused(setup: Setup) -> None:
    checker = FormChecker(replace(setup, memory_bytes=1 << 20), processes=1, limit_s=20.0)
    try:
        many = StructuredOutput(StructuredKind.REGEX, "|".join(f"{number}[a-z]{{99}}" for number in range(2000)))
        assert await checker.fault(many) == "takes more than 1 MiB to compile"
    finally:
        checker.close()


async def test_verdicts_are_remembered_bad_ones_too(checker: FormChecker) -> None:
    bad = StructuredOutput(StructuredKind.REGEX, "(a")
    first = await checker.fault(bad)
    assert first is not None and "unclosed group" in first
    assert await checker.fault(GOOD) is None
    assert (await checker.fault(bad), await checker.fault(GOOD), checker.checked) == (first, None, 2)


async def test_a_checker_that_cannot_read_the_tokenizer_says_so(setup: Setup, tmp_path: Path) -> None:
    checker = FormChecker(replace(setup, folder=str(tmp_path)), processes=1, limit_s=LIMIT_S)
    with pytest.raises(Unavailable, match="tokenizer cannot be read"):
        await checker.fault(GOOD)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (StructuredKind.JSON_SCHEMA, '{"type": "nothing"}', "Invalid type: nothing"),
        (StructuredKind.JSON_SCHEMA, '{"$ref": "#/nowhere"}', "does not exist"),
        (StructuredKind.JSON_SCHEMA, '{"$ref": "http://elsewhere/"}', "does not fetch"),
        (StructuredKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "Unimplemented keys"),
        (StructuredKind.JSON_SCHEMA, '{"$ref": "#"}', "cannot be followed"),
        (StructuredKind.REGEX, "(?=a)b", "look-around"),
        (StructuredKind.GRAMMAR, "begin x", "Expected token"),
        (StructuredKind.GRAMMAR, 'start: <|im_start|> "x"', "no token to go on"),
        (StructuredKind.GRAMMAR, 'start: "a" <|im_start|>', "no token to go on"),
        (StructuredKind.CHOICE, "[]", "is empty"),
    ],
)
def test_what_cannot_be_compiled_or_followed(kind: StructuredKind, text: str, reason: str) -> None:
    tokenizer = make_tokenizer(512, "byte_level", 2048).backend_tokenizer.to_str()
    found = fault(StructuredOutput(kind, text), Vocabulary(tokenizer, 512, [2]))
    assert found is not None and reason in found
    assert "\n" not in found and len(found) < 400
