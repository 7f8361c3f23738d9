"""The quality benchmark runs on a few questions, and prints what it measured."""

import torch

from baton.engine.models.linear import DenseLinear
from baton.lab.benchmarks.engine.quality import DEMO, QualitySetting, as_row, held_bytes, make_questions, measure


def test_a_setting_is_measured_whole() -> None:
    found = measure(str(DEMO), QualitySetting("float32", "int8"), questions=2, dialogues=1)
    assert (found.exact, found.asked) == (2, 2)
    assert 1.0 < found.answer_perplexity < 1.05
    assert found.kv_token_bytes == 5 * 2 * 2 * (64 + 4)  # layers, keys and values, heads, numbers and a scale
    assert "| int8 | 1,360 |" in as_row(found)


def test_questions_are_the_same_each_time_and_their_answers_in_the_table() -> None:
    questions = make_questions(6)
    assert questions == make_questions(6)
    for question in questions:
        row = question.answer.splitlines()[0]
        assert row in question.messages[0]["content"]


def test_tensors_that_a_model_shares_are_counted_once() -> None:
    weight = torch.zeros(3, 5)
    assert held_bytes((DenseLinear(weight), DenseLinear(weight, torch.zeros(3)))) == (15 + 3) * 4
