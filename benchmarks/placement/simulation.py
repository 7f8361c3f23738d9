"""A trace on simulated workers, one event after the other: the result of every prompt.

A prefill worker computes one prompt after another at a constant rate. The hits of a prompt are determined when its
turn comes: the blocks, from the beginning, that are in the cache then. Its blocks enter the cache when it has been
computed. A decode worker makes all answers at once, each with the time between tokens that its load had at the start.
"""

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count

from baton.benchmarks.placement.policies import Chooser
from baton.benchmarks.placement.traces import Arrival
from baton.benchmarks.placement.world import (
    Prompt,
    World,
)
from baton.generation.charging import CHARGED_ANSWER_TOKENS


class _Kind(IntEnum):
    """In the order in which events of one moment happen."""

    ANSWERED = 0
    COMPUTED = 1


@dataclass(slots=True)
class Run:
    """The results of a trace."""

    prompts: list[Prompt] = field(default_factory=list)  # in the order of their arrival
    decisions_us: list[float] = field(default_factory=list)
    mispredicted: int = 0  # prompts with another number of hit blocks than the chooser expected
    token_gaps_ms: list[float] = field(default_factory=list)  # one an answer, as it was when the answer began


class Simulation:
    def __init__(self, world: World, chooser: Chooser) -> None:
        self._world = world
        self._chooser = chooser
        self._events: list[tuple[float, int, int, Prompt]] = []
        self._numbers = count()
        self._run = Run()

    def run(self, arrivals: Sequence[Arrival]) -> Run:
        """Once for each simulation."""
        for number, arrival in enumerate(arrivals):
            self._until(arrival.at_s)
            self._arrive(Prompt(number, arrival))
        self._until(float("inf"))
        return self._run

    def _arrive(self, prompt: Prompt) -> None:
        began = time.perf_counter()
        choice = self._chooser.choose(prompt, self._world)
        self._run.decisions_us.append(1e6 * (time.perf_counter() - began))
        prompt.prefill, prompt.decode = choice.prefill, choice.decode
        worker, answering = self._world.prefill[choice.prefill], self._world.decode[choice.decode]
        prompt.expected_hit_blocks = choice.expected_hit_blocks
        worker.take(prompt)
        answering.tokens_in_flight += _answer_tokens(prompt)
        self._run.prompts.append(prompt)
        self._start(choice.prefill, prompt.arrival.at_s)

    def _until(self, moment_s: float) -> None:
        while self._events and self._events[0][0] <= moment_s:
            now, kind, _, prompt = heapq.heappop(self._events)
            if kind is _Kind.COMPUTED:
                self._computed(prompt, now)
            else:
                self._world.decode[prompt.decode].tokens_in_flight -= _answer_tokens(prompt)
                self._chooser.answered(prompt)

    def _computed(self, prompt: Prompt, now: float) -> None:
        changes = self._world.prefill[prompt.prefill].finish()
        self._run.mispredicted += prompt.hit_blocks != prompt.expected_hit_blocks
        self._chooser.computed(prompt, changes)
        speeds = self._world.speeds
        load = self._world.decode[prompt.decode].tokens_in_flight
        gap_ms = speeds.token_gap_ms + speeds.token_gap_ms_per_token * load
        self._run.token_gaps_ms.append(gap_ms)
        self._add(now + prompt.arrival.output_tokens * gap_ms / 1e3, _Kind.ANSWERED, prompt)
        self._start(prompt.prefill, now)

    def _start(self, worker: int, now: float) -> None:
        prompt = self._world.prefill[worker].start(now)
        if prompt is not None:
            self._add(prompt.first_token_s, _Kind.COMPUTED, prompt)

    def _add(self, at_s: float, kind: _Kind, prompt: Prompt) -> None:
        heapq.heappush(self._events, (at_s, kind, next(self._numbers), prompt))


def _answer_tokens(prompt: Prompt) -> int:
    return prompt.arrival.input_tokens + min(prompt.arrival.output_tokens, CHARGED_ANSWER_TOKENS)
