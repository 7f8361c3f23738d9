"""Compiled forms are kept and shared; without the library every other request is served as ever."""

import sys
from pathlib import Path
from typing import Any

import pytest

from baton.engine.sampling import constraint as grammars
from baton.engine.sampling.constraint import Grammars
from baton.protos import sampling_pb2
from baton.text.structured.library import LibraryMissing
from baton.text.structured.output import FormRefused, StructuredKind, StructuredOutput
from baton.worker.wire import constraint_of
from tests.fixtures.checkpoints import make_tokenizer

END = 2
LETTERS = StructuredOutput(StructuredKind.REGEX, "[ab]{2}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(512, "byte_level", 2048).save_pretrained(folder)
    return folder


def asked(**fields: Any) -> sampling_pb2.Sampling:
    structured = sampling_pb2.StructuredOutput(**fields)
    return sampling_pb2.Sampling(structured=structured, stop_token_ids=[END])


def test_form_is_compiled_once_for_all_requests(folder: Path) -> None:
    kept = Grammars(folder, 512, [END])
    first, second = (kept.constraint(LETTERS, [END]) for _ in range(2))
    assert kept.compiled == 1
    assert first is not second
    kept.close()


def test_most_recent_forms_are_kept_up_to_a_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_GRAMMARS", 2)
    kept = Grammars(folder, 512, [END])
    other, third = (StructuredOutput(StructuredKind.REGEX, text) for text in ("x", "y"))
    for output in (LETTERS, other, LETTERS, third, LETTERS):
        kept.constraint(output, [END])
    assert kept.compiled == 3
    kept.constraint(other, [END])
    assert kept.compiled == 4
    kept.close()


def test_missing_tokenizer_is_reported_to_requests_with_a_form(tmp_path: Path) -> None:
    kept = Grammars(tmp_path, 512, [END])
    kept.prepare()
    with pytest.raises(FormRefused, match="tokenizer cannot be read"):
        kept.constraint(LETTERS, [END])
    kept.close()


async def test_without_the_library_only_requests_that_need_it_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    kept = Grammars(folder, 512, [END])
    kept.prepare()
    with pytest.raises(LibraryMissing):
        kept.constraint(LETTERS, [END])
    with pytest.raises(ValueError, match="regex: llguidance is not installed"):
        await constraint_of(kept, asked(kind=sampling_pb2.STRUCTURED_KIND_REGEX, text="a"))
    assert await constraint_of(kept, sampling_pb2.Sampling(stop_token_ids=[END])) is None
    kept.close()


async def test_kind_that_a_worker_does_not_know_is_refused(folder: Path) -> None:
    kept = Grammars(folder, 512, [END])
    with pytest.raises(ValueError, match="does not support this kind of structured output"):
        await constraint_of(kept, asked(kind=99, text="a"))
    kept.close()
