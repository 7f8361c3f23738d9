"""Summary of the agents benchmark."""

import pytest

from baton.lab.benchmarks.cluster.agent_work import AgentWork
from baton.lab.benchmarks.cluster.agents import AgentsSetup, AskedTurn, Log, as_picture, summarise
from baton.launch import CommandFailed

SETUP = AgentsSetup(AgentWork(8_192, 259, 0), sessions=2, kv_memory="64MiB", seconds=10.0)


def log() -> Log:
    """Make a log whose warm-up ends at second 5; earlier turns are not measured."""
    return Log(
        asked=[
            AskedTurn(sent_s=1.0, prompt_tokens=1_000, ideal_tokens=0, first_s=4.0, ended_s=5.0),
            AskedTurn(6.0, 1_000, 900, first_s=6.1, ended_s=7.0, cached_tokens=800, answer_tokens=20),
            AskedTurn(8.0, 3_000, 2_700, first_s=8.3, ended_s=9.0, cached_tokens=1_900, answer_tokens=30),
            AskedTurn(13.0, 2_000, 1_000),
        ],
        first_turns=2,
        warm_s=5.0,
    )


def test_turns_after_the_first_of_all_agents_are_measured() -> None:
    measured = summarise("files", SETUP, log(), 15.0, working_set_blocks=100, pool_blocks=10)
    assert (measured.turns, measured.unanswered) == (2, 1)
    assert measured.prompt_tokens_per_s == 400
    assert measured.answer_tokens_per_s == 5
    assert measured.of_ideal == pytest.approx(2_700 / 3_600)


def test_unanswered_turn_counts_with_the_time_that_it_has_waited() -> None:
    measured = summarise("files", SETUP, log(), 15.0, 100, 10)
    assert measured.ttft_p50_ms == pytest.approx(300)
    assert measured.ttft_p99_ms == pytest.approx(2_000, rel=0.05)


def test_unanswered_turns_have_waiting_times_and_no_shares() -> None:
    measured = summarise("files", SETUP, Log([AskedTurn(13.0, 2_000, 1_000)], 2, warm_s=5.0), 15.0, 100, 10)
    assert measured.ttft_p50_ms == pytest.approx(2_000)
    assert measured.turns == 0
    assert measured.cached_share is measured.of_ideal is None


def test_summary_without_turns_has_no_figures() -> None:
    with pytest.raises(CommandFailed, match="no turn was sent"):
        summarise("files", SETUP, Log(warm_s=5.0), 15.0, 100, 10)


def test_picture_has_a_bar_for_each_variant() -> None:
    rows = [summarise(variant, SETUP, log(), 15.0, 100, 10) for variant in ("pools alone", "files")]
    picture = as_picture(rows)
    assert "pools alone" in picture and "2 agents" in picture
