"""Conversations of agents: long contexts that grow by tool results, branch, and pause. Pure, drawn from a seed.

Reuse and pauses follow published figures of a coding agent (Claude Code, llm-d blog of 22 July 2026): 96 % of turns
reuse 90 % or more of their prompt; pauses between turns have a median of 2 s and a 99th percentile of 11.4 minutes.
The agent's median prompt (195 000 tokens) and its answers (317 tokens) are scaled to the measured model's context.

An agent begins with the instructions of its kind, shared by all agents of that kind, and a task. Each turn appends the
answer and a tool result. Some turns start a sub-agent, which continues the conversation and whose last answer is the
tool result; some turns are undone and repeated. A full context is replaced by a summary.
"""

import math
import random
from collections.abc import Generator
from dataclasses import dataclass

Tokens = tuple[int, ...]

KINDS = 4  # kinds of agents, each with its own instructions
SHARE_OF_INSTRUCTIONS = 0.1  # fraction of the longest context
SHARES_OF_TASK = (0.02, 0.8)  # range, in fractions of the longest context; wide, so that agents begin in mid-task
SHARE_OF_SUMMARY = 0.1  # fraction of the longest context
MEDIAN_GROWTH, GROWTH_SPREAD = 0.02, 0.92  # new tokens over reused tokens, log-normal; above 0.1 in 4 % of turns
MEDIAN_PAUSE_S, PAUSE_SPREAD, LONGEST_PAUSE_S = 2.0, 2.51, 684.0  # log-normal; the longest 1 % are cut to 684 s
SUB_AGENT_SHARE, SUB_AGENT_TURNS = 0.05, (2, 5)
TAKEN_BACK_SHARE = 0.03
MEAN_TURNS = 60
ANSWERS_BY_CONTEXT = 317 / 195_000
FEWEST_ANSWER_TOKENS = 8
FIRST_TOKEN_ID = 3


@dataclass(frozen=True, slots=True)
class AgentWork:
    """Common properties of all agents. Token ids are from 3 to below `vocab_size`."""

    context_tokens: int  # maximum number of tokens of a prompt with its answer
    vocab_size: int
    seed: int

    @property
    def answer_tokens(self) -> int:
        """Return the mean number of answer tokens."""
        return max(FEWEST_ANSWER_TOKENS, round(ANSWERS_BY_CONTEXT * self.context_tokens))

    def instructions(self, kind: int) -> Tokens:
        chance = random.Random(f"{self.seed} instructions {kind}")
        return self.text(chance, round(SHARE_OF_INSTRUCTIONS * self.context_tokens))

    def text(self, chance: random.Random, tokens: int) -> Tokens:
        return tuple(chance.choices(range(FIRST_TOKEN_ID, self.vocab_size), k=tokens))


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """Request of an agent, to be sent `pause_s` after the previous answer."""

    session: str  # session id; a sub-agent has its own session
    prompt: Tokens
    answer_tokens: int
    pause_s: float
    is_last: bool  # last turn of its session


Turns = Generator[AgentTurn, Tokens, Tokens]
"""Generator that yields turns, is sent the answer to each, and returns the last answer."""


def agent(work: AgentWork, name: str) -> Turns:
    """Yield the turns of an agent from the middle of its task to the end."""
    chance = random.Random(f"{work.seed} agent {name}")
    instructions = work.instructions(chance.randrange(KINDS))
    low, high = SHARES_OF_TASK
    task = round(chance.uniform(low, high) * work.context_tokens)
    turns = 1 + int(chance.expovariate(1 / MEAN_TURNS))
    return _converse(work, chance, name, instructions + work.text(chance, task), turns, is_sub_agent=False)


def _converse(
    work: AgentWork, chance: random.Random, name: str, context: Tokens, turns: int, *, is_sub_agent: bool
) -> Turns:
    answer: Tokens = ()
    sub_agents = 0
    for number in range(turns):
        if len(context) > _longest_prompt(work):
            context = _summarised(work, chance, context)
        answer_tokens = chance.randint(work.answer_tokens // 2, work.answer_tokens * 3 // 2)
        pause_s = draw_pause_s(chance) if number else 0.0
        answer = yield AgentTurn(name, context, answer_tokens, pause_s, is_last=number == turns - 1)
        if chance.random() < TAKEN_BACK_SHARE:
            continue  # the turn is undone: the next one repeats its prompt
        context += answer
        result = work.text(chance, new_tokens(chance, len(context)))
        starts_another = not is_sub_agent and chance.random() < SUB_AGENT_SHARE
        if starts_another and len(context) + len(result) <= _longest_prompt(work):
            sub_agents += 1
            own_name, own_turns = f"{name}/{sub_agents}", chance.randint(*SUB_AGENT_TURNS)
            result = yield from _converse(work, chance, own_name, context + result, own_turns, is_sub_agent=True)
        context += result
    return answer


def draw_pause_s(chance: random.Random) -> float:
    return min(chance.lognormvariate(math.log(MEDIAN_PAUSE_S), PAUSE_SPREAD), LONGEST_PAUSE_S)


def new_tokens(chance: random.Random, reused_tokens: int) -> int:
    """Draw the number of tokens of a tool's result that follows `reused_tokens` of context."""
    return max(1, round(reused_tokens * chance.lognormvariate(math.log(MEDIAN_GROWTH), GROWTH_SPREAD)))


def _longest_prompt(work: AgentWork) -> int:
    return work.context_tokens - 2 * work.answer_tokens


def _summarised(work: AgentWork, chance: random.Random, context: Tokens) -> Tokens:
    kept = context[: round(SHARE_OF_INSTRUCTIONS * work.context_tokens)]
    return kept + work.text(chance, round(SHARE_OF_SUMMARY * work.context_tokens))


class IdealCache:
    """Unbounded cache of all prompts and answers so far: the upper bound of any other cache's hits."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._names: set[int] = set()

    @property
    def blocks(self) -> int:
        return len(self._names)

    def cached_tokens(self, prompt: Tokens) -> int:
        """Return the cached tokens of a prompt in complete blocks, except its last token, which must be computed."""
        found = 0
        for name in self._chain(prompt[:-1]):
            if name not in self._names:
                break
            found += self._block_tokens
        return found

    def add(self, tokens: Tokens) -> None:
        """Cache a prompt with its answer, except the answer's last token, whose KV was not computed."""
        self._names.update(self._chain(tokens[:-1]))

    def _chain(self, tokens: Tokens) -> Generator[int]:
        name = 0
        for end in range(self._block_tokens, len(tokens) + 1, self._block_tokens):
            name = hash((name, tokens[end - self._block_tokens : end]))
            yield name
