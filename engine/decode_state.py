"""What the decode scheduler keeps of a request: what it may come to need, and how far each of its choices is."""

from dataclasses import dataclass

from engine.block_table import BlockTable
from engine.sequence import Request, blocks_for


@dataclass(frozen=True, slots=True)
class WorstCase:
    """Blocks of a request at its longest: the prompt's full blocks once, and the rest for every choice."""

    shared_blocks: int
    tail_blocks: int  # per choice

    def total(self, choices: int) -> int:
        return self.shared_blocks + choices * self.tail_blocks


def worst_case(request: Request, block_tokens: int) -> WorstCase:
    shared = len(request.token_ids) // block_tokens
    longest = blocks_for(len(request.token_ids) + request.params.max_tokens, block_tokens)
    return WorstCase(shared, longest - shared)


@dataclass(slots=True)
class Choice:
    """One answer being made. `last_token` is its newest token, whose KV is not written yet."""

    index: int
    table: BlockTable
    last_token: int
    tokens: int  # made so far, token 0 included
    history: list[int]  # prompt and answer; empty unless the request's sampling needs it


@dataclass(slots=True)
class Reserved:
    request: Request
    worst_case: WorstCase
    table: BlockTable  # the prompt's blocks and one more

    @property
    def live_choices(self) -> int:
        return self.request.params.n


@dataclass(slots=True)
class Running:
    request: Request
    worst_case: WorstCase
    choices: dict[int, Choice]  # those that have not ended, by index; never empty

    @property
    def live_choices(self) -> int:
        return len(self.choices)
