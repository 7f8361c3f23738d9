"""The requests of `baton bench serve`: random prompts, and when each of them arrives. Pure.

As in vLLM's `bench serve`: lengths are drawn evenly around their mean, a prefix is shared by all prompts, gaps between
arrivals are drawn from a gamma distribution and then scaled so that the last request arrives after requests / rate.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """One request: the prompt, how long the answer is to be, and when it is sent."""

    prompt: tuple[int, ...]
    output_tokens: int
    arrival_s: float = 0.0  # after the start; a closed loop does not look at it


@dataclass(frozen=True, slots=True)
class RandomJobs:
    """`range_ratio` r: lengths from the mean times 1 - r to the mean times 1 + r. Token ids are below `vocab_size`."""

    input_tokens: int
    output_tokens: int
    prefix_tokens: int
    range_ratio: float  # in [0, 1)
    vocab_size: int
    seed: int

    def draw(self, arrivals_s: Sequence[float]) -> list[Job]:
        """One job for each arrival."""
        chance = random.Random(self.seed)
        prefix = random_tokens(chance, self.prefix_tokens, self.vocab_size)
        jobs = []
        for arrival_s in arrivals_s:
            own = random_tokens(chance, draw_length(chance, self.input_tokens, self.range_ratio), self.vocab_size)
            jobs.append(Job(prefix + own, draw_length(chance, self.output_tokens, self.range_ratio), arrival_s))
        return jobs


def draw_length(chance: random.Random, mean: int, range_ratio: float) -> int:
    """Evenly among the whole numbers around `mean`, at least 1."""
    return chance.randint(max(1, math.floor(mean * (1 - range_ratio))), max(1, math.ceil(mean * (1 + range_ratio))))


FIRST_TOKEN_ID = 3
"""Below it lie the special tokens of most vocabularies."""


def random_tokens(chance: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(chance.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(count))


def poisson_arrivals_s(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start; 0 at an infinite rate. `burstiness` 1: Poisson, below: bunched, above: even."""
    if math.isinf(rate):
        return [0.0] * count
    chance = random.Random(seed)
    arrivals, now = [], 0.0
    for _ in range(count):
        now += chance.gammavariate(burstiness, 1 / (rate * burstiness))
        arrivals.append(now)
    scale = count / rate / now if now > 0 else 1.0
    return [arrival * scale for arrival in arrivals]
