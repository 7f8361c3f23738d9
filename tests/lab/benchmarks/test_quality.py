"""The quality benchmark runs on a few questions, and prints what it measured."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from baton.engine import LLM
from baton.engine.models.linear import DenseLinear
from baton.lab.benchmarks.engine.quality import (
    DEMO,
    QualitySetting,
    as_row,
    find_model,
    held_bytes,
    make_questions,
    measure,
    prose_logprobs,
)
from baton.text.gguf.folder import folder_of
from baton.text.named_models import NotFetched

FIXTURES = Path(__file__).parents[2] / "fixtures"


def test_measure_returns_answers_and_prose_of_the_demo_model() -> None:
    base, logprobs = measure(str(DEMO), QualitySetting("float32", "auto"), 600, None, None)
    assert (base.loss_percent, base.loss_error_percent, base.answers) == (0.0, 0.0, None)
    assert base.tokens == len(logprobs) == 600 - 2  # the first token of each window has no log-probability
    found, _ = measure(str(DEMO), QualitySetting("float32", "int8"), 600, logprobs, (2, 1))
    assert found.loss_percent == pytest.approx(100 * (found.perplexity / base.perplexity - 1))
    assert found.answers is not None
    assert (found.answers.exact, found.answers.asked) == (2, 2)
    assert 1.0 < found.answers.perplexity < 1.05
    assert found.kv_token_bytes == 5 * 2 * 2 * (64 + 4)  # layers, keys and values, heads, numbers and a scale
    assert "| int8 | 1,360 |" in as_row(found)


def test_find_model_without_a_model_to_fetch_returns_the_demo_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(name: str) -> Path:
        raise NotFetched(f"no index has {name}")

    monkeypatch.setattr("baton.lab.benchmarks.engine.quality.fetch_named", refuse)
    assert find_model("", tmp_path) == DEMO


def test_find_model_dequantises_a_gguf_file_exactly(tmp_path: Path) -> None:
    file = FIXTURES / "gguf" / "llama.gguf"
    folder = find_model(str(file), tmp_path)
    assert {each.dtype for each in load_file(folder / "model.safetensors").values()} == {torch.float32}
    stored, plain = (
        prose_logprobs(LLM(str(each), dtype="float32", kv_memory=1 << 20, quiet=True), 40)
        for each in (folder_of(file), folder)
    )
    assert plain == pytest.approx(stored, abs=1e-4)


def test_questions_are_the_same_each_time_and_their_answers_in_the_table() -> None:
    questions = make_questions(6)
    assert questions == make_questions(6)
    for question in questions:
        row = question.answer.splitlines()[0]
        assert row in question.messages[0]["content"]


def test_tensors_that_a_model_shares_are_counted_once() -> None:
    weight = torch.zeros(3, 5)
    assert held_bytes((DenseLinear(weight), DenseLinear(weight, torch.zeros(3)))) == (15 + 3) * 4
