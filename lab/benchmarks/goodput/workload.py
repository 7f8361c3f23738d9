"""Requests of `baton bench goodput`: drawn from a mix of lengths, or a stretch of a trace, scaled to a rate. Pure."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.lab.benchmarks.placement.traces import BLOCK_TOKENS, TraceArrival
from baton.lab.benchmarks.serve.load import Job, poisson_arrivals_s, random_tokens


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Number of tokens between two bounds, both included, at equal probability."""

    low: int
    high: int

    def draw(self, chance: random.Random) -> int:
        return chance.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class MixPart:
    """Share of the requests with the lengths of their prompts and answers."""

    share: float
    prompt: LengthRange
    answer: LengthRange


def read_mix(text: str) -> tuple[MixPart, ...]:
    """Parse a mix such as `0.75*96-256/64-160,0.25*512-768/16-48`. Raises: ValueError."""
    return tuple(_read_part(part.strip()) for part in text.split(","))


def _read_part(text: str) -> MixPart:
    share, star, lengths = text.rpartition("*")
    prompt, slash, answer = lengths.partition("/")
    try:
        part = MixPart(float(share) if star else 1.0, _read_range(prompt), _read_range(answer))
    except ValueError as error:
        raise ValueError(f"{text!r} is not SHARE*INPUT/OUTPUT, such as 0.75*96-256/64-160") from error
    if not slash or not part.share > 0:
        raise ValueError(f"{text!r}: a share is above 0, and lengths are INPUT/OUTPUT, such as 0.75*96-256/64-160")
    return part


def _read_range(text: str) -> LengthRange:
    low, dash, high = text.partition("-")
    lengths = LengthRange(int(low), int(high if dash else low))
    if not 1 <= lengths.low <= lengths.high:
        raise ValueError(f"{text!r} is no range of lengths of at least 1")
    return lengths


Workload = Callable[[float, int, str], list[Job]]
"""Function that returns requests in order of arrival for a rate per second, a number of requests and a seed."""


def mix_workload(mix: Sequence[MixPart], vocab_size: int) -> Workload:
    """Return a workload of random prompts with Poisson arrivals; at an infinite rate, all arrive at time 0."""

    def draw(rate: float, count: int, seed: str) -> list[Job]:
        chance = random.Random(seed)
        arrivals_s = poisson_arrivals_s(count, rate, burstiness=1.0, seed=chance.randrange(2**32))
        parts = chance.choices(mix, [part.share for part in mix], k=count)
        return [
            Job(random_tokens(chance, part.prompt.draw(chance), vocab_size), part.answer.draw(chance), arrival_s)
            for part, arrival_s in zip(parts, arrivals_s, strict=True)
        ]

    return draw


def trace_workload(trace: Sequence[TraceArrival], vocab_size: int, max_prompt: int, max_answer: int) -> Workload:
    """Return a workload that replays stretches of a trace; prompts and answers are cut to a maximum.

    The seed chooses where a stretch begins. Its arrival times are scaled to last count / rate seconds.
    Equal block ids stand for equal tokens, so that prompts share the prefixes that the trace records.
    """

    def draw(rate: float, count: int, seed: str) -> list[Job]:
        first = random.Random(seed).randrange(max(1, len(trace) - count + 1))
        stretch = [_cut(each, max_prompt, max_answer) for each in trace[first : first + count]]
        span_s = stretch[-1].at_s - stretch[0].at_s
        scale = len(stretch) / rate / span_s if span_s > 0 else 0.0
        return [
            Job(_tokens_of(each, vocab_size), each.output_tokens, (each.at_s - stretch[0].at_s) * scale)
            for each in stretch
        ]

    return draw


def _cut(arrival: TraceArrival, max_prompt: int, max_answer: int) -> TraceArrival:
    return replace(
        arrival,
        input_tokens=max(1, min(arrival.input_tokens, max_prompt)),
        output_tokens=max(1, min(arrival.output_tokens, max_answer)),
    )


def _tokens_of(arrival: TraceArrival, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens of the blocks of a prompt; a prompt with too few ids continues with its last block's tokens."""
    tokens: list[int] = []
    for index in range(-(-arrival.input_tokens // BLOCK_TOKENS)):
        block = arrival.blocks[min(index, len(arrival.blocks) - 1)] if arrival.blocks else b""
        tokens += random_tokens(random.Random(f"{block.hex()}/{index}"), BLOCK_TOKENS, vocab_size)
    return tuple(tokens[: arrival.input_tokens])
