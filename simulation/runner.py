"""Carries out plans over a simulated pool. A step's writes are seen when the step has ended."""

import random
from dataclasses import dataclass

import numpy as np

from engine.plan import Chunk, ChunkResult, Computed, Drawn, NonFinite, Plan, Sample, TokenLogprob
from simulation.loop import SimulatedLoop
from simulation.model import Draw, KvNumbers, add, attend, kv_number, next_token

POISON = 0xDEAD


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a step takes."""

    fixed_s: float
    token_s: float
    jitter: float  # share of the whole


@dataclass(slots=True)
class Poison:
    """Computations that come out not finite; armed by a fault."""

    steps: int = 0  # so many more
    done: int = 0


class SimulatedRunner:
    """A `PlanRunner` over `numbers`, the KV as [block][token]."""

    launches_ahead = False
    followers = None

    def __init__(self, loop: SimulatedLoop, draw: random.Random, numbers: KvNumbers, pace: Pace) -> None:
        self._loop = loop
        self._draw = draw
        self._numbers = numbers
        self._block_tokens = numbers.shape[1]
        self._pace = pace
        self._swapped: dict[int, KvNumbers] = {}
        self.poison = Poison()
        self.slowness = 1.0

    def warm_up(self) -> None:
        """Nothing to be done."""

    def close(self) -> None:
        """Nothing to be closed."""

    def run(self, plan: Plan) -> tuple[ChunkResult, ...]:
        self._move(plan)
        written: list[tuple[Chunk, list[int]]] = []
        results = tuple([self._compute(chunk, written) for chunk in plan.chunks])
        pace = self._pace
        step_s = (pace.fixed_s + pace.token_s * plan.tokens) * (1.0 + pace.jitter * self._draw.random())
        self._loop.ahead_s = step_s * self.slowness
        self._loop.call_at(self._loop.time(), self._write, written)
        return results

    def _move(self, plan: Plan) -> None:
        numbers = self._numbers
        for swap in plan.swaps_out:
            self._swapped[swap.host_slot] = numbers[swap.block].copy()
        for swap in plan.swaps_in:
            numbers[swap.block] = self._swapped[swap.host_slot]
        for copy in plan.copies:
            numbers[copy.destination] = numbers[copy.source]

    def _compute(self, chunk: Chunk, written: list[tuple[Chunk, list[int]]]) -> ChunkResult:
        if self.poison.steps > 0:
            self.poison.steps -= 1
            self.poison.done += 1
            written.append((chunk, [POISON] * len(chunk.token_ids)))
            return NonFinite()
        attended = self._attended(chunk)
        new: list[int] = []
        for position, token_id in enumerate(chunk.token_ids, start=chunk.start):
            number = kv_number(attended, token_id, position)
            attended = add(attended, number, position)
            new.append(number)
        written.append((chunk, new))
        return Computed(tuple([_drawn(attended, chunk.end, sample) for sample in chunk.samples]))

    def _attended(self, chunk: Chunk) -> int:
        """Over the blocks' real content."""
        if chunk.start == 0:
            return 0
        blocks = np.array(chunk.block_table[: -(-chunk.start // self._block_tokens)])
        return attend(self._numbers[blocks].reshape(-1)[: chunk.start])

    def _write(self, written: list[tuple[Chunk, list[int]]]) -> None:
        size, numbers = self._block_tokens, self._numbers
        for chunk, new in written:
            for position, number in enumerate(new, start=chunk.start):
                numbers[chunk.block_table[position // size], position % size] = number


def _drawn(attended: int, position: int, sample: Sample) -> Drawn:
    params = sample.params
    history = sample.history[:position] if params.needs_history else None
    prompt_tokens = sample.prompt_tokens if params.needs_history else 0
    draw = Draw(params.temperature, params.seed, sample.choice, history, prompt_tokens)
    token_id, logprob = next_token(attended, position, draw)
    return Drawn(token_id, logprob, (TokenLogprob(token_id, logprob),) * min(1, params.logprobs))
