"""Conversations of the agents benchmark have the published shares and pauses, and branch as configured."""

import random
import statistics
from itertools import pairwise

import pytest

from baton.lab.benchmarks.cluster.agent_work import (
    LONGEST_PAUSE_S,
    AgentTurn,
    AgentWork,
    IdealCache,
    agent,
    draw_pause_s,
    new_tokens,
)

WORK = AgentWork(context_tokens=8_192, vocab_size=200, seed=7)
Conversations = list[list[tuple[AgentTurn, tuple[int, ...]]]]


def conversation(name: str, work: AgentWork = WORK) -> list[tuple[AgentTurn, tuple[int, ...]]]:
    """Return the turns of a conversation with their answers."""
    chance = random.Random(name)
    turns, held = agent(work, name), list[tuple[AgentTurn, tuple[int, ...]]]()
    turn = next(turns)
    while True:
        answer = work.text(chance, turn.answer_tokens)
        held.append((turn, answer))
        try:
            turn = turns.send(answer)
        except StopIteration:
            return held


@pytest.fixture(scope="module")
def conversations() -> Conversations:
    return [conversation(str(number)) for number in range(40)]


def test_pauses_have_the_published_median_and_99th_percentile() -> None:
    chance = random.Random(1)
    pauses_s = [draw_pause_s(chance) for _ in range(50_000)]
    assert statistics.median(pauses_s) == pytest.approx(2.0, rel=0.05)
    assert statistics.quantiles(pauses_s, n=100)[-1] == pytest.approx(LONGEST_PAUSE_S, rel=0.1)


def test_96_of_100_turns_reuse_nine_tenths_of_their_prompt() -> None:
    chance = random.Random(2)
    shares = [new_tokens(chance, 10_000) / (10_000 + new_tokens(chance, 10_000)) for _ in range(50_000)]
    assert sum(share <= 0.1 for share in shares) / len(shares) == pytest.approx(0.96, abs=0.01)


def test_prompt_and_its_answer_fit_into_the_context(conversations: Conversations) -> None:
    lengths = [len(turn.prompt) + turn.answer_tokens for turns in conversations for turn, _ in turns]
    assert max(lengths) <= WORK.context_tokens
    assert statistics.median(lengths) > WORK.context_tokens / 3


def test_turns_of_a_session_continue_the_one_before_or_take_it_back_or_are_summarised(
    conversations: Conversations,
) -> None:
    ways = {"continued": 0, "taken back": 0, "summarised": 0}
    for turns in conversations:
        of_agent = [(turn, answer) for turn, answer in turns if "/" not in turn.session]
        for (before, answer), (after, _) in pairwise(of_agent):
            if after.prompt == before.prompt:
                ways["taken back"] += 1
            elif after.prompt[: len(before.prompt) + len(answer)] == (*before.prompt, *answer):
                ways["continued"] += 1
            else:
                assert len(after.prompt) < len(before.prompt)
                ways["summarised"] += 1
    assert min(ways.values()) > 0
    assert ways["continued"] > 10 * ways["taken back"]


def test_sub_agent_begins_with_the_conversation_of_its_agent(conversations: Conversations) -> None:
    begins = [
        (parent, answer, first)
        for turns in conversations
        for (parent, answer), (first, _) in pairwise(turns)
        if "/" in first.session and "/" not in parent.session
    ]
    assert len(begins) > 10
    for parent, answer, first in begins:
        assert first.prompt[: len(parent.prompt) + len(answer)] == (*parent.prompt, *answer)


def test_last_answer_of_a_sub_agent_comes_back_to_its_agent(conversations: Conversations) -> None:
    summarised_tokens = 2 * round(0.1 * WORK.context_tokens)
    ends = [
        (last, answer, parent)
        for turns in conversations
        for (last, answer), (parent, _) in pairwise(turns)
        if "/" in last.session and "/" not in parent.session and len(parent.prompt) != summarised_tokens
    ]
    assert len(ends) > 10
    for last, answer, parent in ends:
        assert last.is_last
        assert bytes(answer) in bytes(parent.prompt)


def test_agents_of_a_kind_share_their_instructions_and_tasks_differ(conversations: Conversations) -> None:
    begins = [turns[0][0].prompt for turns in conversations]
    shared = round(0.1 * WORK.context_tokens)
    assert len({prompt[:shared] for prompt in begins}) == 4
    assert len({prompt[: shared + 20] for prompt in begins}) == len(begins)


def test_seed_is_a_workload(conversations: Conversations) -> None:
    assert conversation("3") == conversations[3]
    assert conversation("3", AgentWork(8_192, 200, seed=8)) != conversations[3]


def test_ideal_cache_has_whole_blocks_of_whatever_was_seen_but_never_the_last_token() -> None:
    cache = IdealCache(block_tokens=4)
    assert cache.cached_tokens(tuple(range(12))) == 0
    cache.add(tuple(range(12)))  # the KV of the last token was not computed
    assert cache.blocks == 2
    assert cache.cached_tokens(tuple(range(20))) == 8
    assert cache.cached_tokens(tuple(range(8))) == 4
    assert cache.cached_tokens((0, 1, 2, 3, 9, 9, 9, 9, 9)) == 4
