"""Conversations of several turns, many at once, drawn from a seed: what a prefix cache lives on."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from baton.client import AsyncBatonClient, BatonClientError

FIRST_TOKEN, LAST_TOKEN = 10, 200


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths in tokens, drawn between two ends."""

    conversations: int
    at_once: int
    turns: tuple[int, int] = (2, 5)
    systems: int = 6  # different beginnings that conversations share
    system_tokens: int = 100
    question_tokens: tuple[int, int] = (20, 150)
    answer_tokens: tuple[int, int] = (8, 60)
    pause_s: float = 0.2  # at most, between two turns
    longest_tokens: int = 900


@dataclass
class Outcome:
    requests: int = 0
    failed: int = 0
    ended_conversations: int = 0


async def converse(target: str, shape: Shape, seed: int, on_ended: Callable[[int], None]) -> Outcome:
    """All of them; `on_ended` is told how many have ended, each time that one has."""
    outcome, drawn = Outcome(), random.Random(seed)
    systems = [_tokens(drawn, shape.system_tokens) for _ in range(shape.systems)]
    seeds = iter([drawn.randrange(2**32) for _ in range(shape.conversations)])

    async def talk(baton: AsyncBatonClient) -> None:
        for own_seed in seeds:
            await _conversation(baton, shape, random.Random(own_seed), systems, outcome)
            outcome.ended_conversations += 1
            on_ended(outcome.ended_conversations)

    async with AsyncBatonClient(target, timeout_s=60.0) as baton, asyncio.TaskGroup() as tasks:
        for _ in range(shape.at_once):
            tasks.create_task(talk(baton))
    return outcome


async def _conversation(
    baton: AsyncBatonClient, shape: Shape, drawn: random.Random, systems: list[list[int]], outcome: Outcome
) -> None:
    history = list(drawn.choice(systems))
    for _ in range(drawn.randint(*shape.turns)):
        history += _tokens(drawn, drawn.randint(*shape.question_tokens))
        if len(history) > shape.longest_tokens:
            return
        outcome.requests += 1
        try:
            answer = await baton.complete(history, max_tokens=drawn.randint(*shape.answer_tokens), ignore_eos=True)
        except BatonClientError:
            outcome.failed += 1  # its worker was killed: the conversation ends here
            return
        history += answer.choices[0].token_ids
        await asyncio.sleep(drawn.uniform(0.0, shape.pause_s))


def _tokens(drawn: random.Random, count: int) -> list[int]:
    return [drawn.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]
