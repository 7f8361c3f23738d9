"""The simulated clients' requests, and their times: drawn from the seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from client.options import GenerateOptions
from simulation.model import Asked


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """`cancel_after_s`: the client goes away then, at any state of the answer."""

    number: int
    at_s: float  # from the beginning
    asked: Asked
    choices: int
    logprobs: bool
    deadline_s: float
    cancel_after_s: float | None
    salt: str = ""
    stop: str | None = None
    best_of: int = 0  # so many are made and the likeliest choices given out, all at the end; 0: all that are made

    @property
    def made(self) -> int:
        """Choices that are computed."""
        return max(self.best_of, self.choices)

    @property
    def options(self) -> GenerateOptions:
        asked = self.asked
        options: GenerateOptions = {
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "seed": asked.seed,
            "n": self.choices,
            "ignore_eos": asked.ignores_end,
            "timeout_s": self.deadline_s,
            "cache_salt": self.salt,
            "request_id": f"request-{self.number}",
        }
        if asked.looks_back:
            options["frequency_penalty"] = 0.5
        if self.logprobs:
            options["logprobs"] = 1
        if self.best_of:
            options["best_of"] = self.best_of
        if self.stop is not None:
            options["stop"] = self.stop
        return options

    def __str__(self) -> str:
        asked = self.asked
        kind = "sampled" if asked.temperature else "greedy"
        return f"{len(asked.token_ids)} + {asked.max_tokens} tokens, {self.choices} x {kind}"


def draw_requests(draw: random.Random, count: int, span_s: float, most_tokens: int) -> list[SimulatedRequest]:
    """Prompts share prefixes, and conversations continue: caches and fetches have work."""
    stems = [_tokens(draw, draw.randint(4, most_tokens // 2)) for _ in range(2)]
    requests: list[SimulatedRequest] = []
    bursts = draw.random() < 0.3
    for number in range(count):
        at_s = draw.random() * span_s * (0.1 if bursts else 1.0)
        requests.append(_request(draw, number, at_s, stems, most_tokens))
    return sorted(requests, key=lambda request: request.at_s)


def _request(
    draw: random.Random, number: int, at_s: float, stems: Sequence[tuple[int, ...]], most_tokens: int
) -> SimulatedRequest:
    stem = draw.choice(stems) if draw.random() < 0.6 else ()
    tokens = (*stem, *_tokens(draw, draw.randint(1, most_tokens // 2)))
    sampled = draw.random() < 0.5
    asked = Asked(
        token_ids=tokens,
        max_tokens=draw.choice((1, 2, 3, 6, 12, 24, 40)),
        temperature=1.0 if sampled else 0.0,
        seed=draw.getrandbits(32),
        ignores_end=draw.random() < 0.5,
        looks_back=draw.random() < 0.15,
    )
    choices = draw.choice((1, 1, 1, 1, 2, 3)) if sampled else 1
    return SimulatedRequest(
        number,
        at_s,
        asked,
        choices=choices,
        best_of=min(4, choices + draw.choice((1, 2))) if sampled and draw.random() < 0.15 else 0,
        logprobs=draw.random() < 0.2,
        deadline_s=draw.uniform(0.02, 2.0) if draw.random() < 0.05 else draw.uniform(20.0, 40.0),
        cancel_after_s=draw.random() ** 2 * 2.0 if draw.random() < 0.12 else None,
        salt=f"salt-{number}" if draw.random() < 0.1 else "",
        stop=chr(draw.randint(97, 122)) if draw.random() < 0.1 else None,
    )


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randbytes(count))
