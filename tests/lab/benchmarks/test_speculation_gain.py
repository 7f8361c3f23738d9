"""The gain of drafts: rounds are compared token for token, and requests for rows of tables fit into the engine."""

import pytest

from baton.engine.scheduler.speculation import Speculated
from baton.lab.benchmarks.engine.speculation import (
    TABLE_QUESTIONS,
    TABLE_TOKENS,
    TABLES,
    Answered,
    TableQuestion,
    Turns,
    table_prompts,
)
from baton.lab.benchmarks.report.result import DEMO
from baton.launch import CommandFailed


def test_a_gain_is_of_all_requests_of_a_round_and_the_median_of_rounds() -> None:
    turns = Turns("looked up")
    for seconds in (1.0, 2.0, 4.0):
        plain = [Answered([[1, 2]], 30, 1.0), Answered([[1, 3]], 10, 3.0)]
        drafted = [Answered([[1, 2]], 30, seconds / 2), Answered([[1, 3]], 10, seconds / 2)]
        turns.add(plain, drafted, Speculated().and_one(4, 3))
    gain = turns.gain(streams=1)
    assert (gain.plain_tokens_per_s, gain.times, gain.least, gain.most) == (10.0, 2.0, 1.0, 4.0)
    assert gain.accepted_share == 0.75


def test_an_answer_that_drafts_changed_fails_the_run() -> None:
    with pytest.raises(CommandFailed, match="looked up changed an answer"):
        Turns("looked up").add([Answered([[1, 2]], 1, 1.0)], [Answered([[1, 3]], 1, 1.0)], Speculated())


@pytest.mark.parametrize("question", TABLE_QUESTIONS, ids=lambda question: question.copied)
def test_requests_for_rows_of_tables_fit_and_differ(question: TableQuestion) -> None:
    batches = list(table_prompts(DEMO, question, streams=2, seed=5))
    prompts = [tuple(prompt) for batch in batches for prompt in batch]
    assert len(batches) == TABLES and len(set(prompts)) == 2 * TABLES
    assert max(map(len, prompts)) + question.answer_tokens <= TABLE_TOKENS
