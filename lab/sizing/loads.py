"""Load of each seed: calls drawn at a rate, or a busy stretch of a recorded trace."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from baton.lab.benchmarks.placement.traces import BLOCK_TOKENS, TraceArrival, from_zero, read_trace
from baton.lab.benchmarks.serve.load import draw_length
from baton.lab.sizing.cluster import SizingCall
from baton.launch import CommandFailed

Stretch = tuple[SizingCall, ...]


def drawn(
    seed: int, calls: int, rate_per_s: float, prompt_tokens: int, answer_tokens: int, range_ratio: float
) -> Stretch:
    """Draw the calls of a Poisson process; no two prompts share a prefix."""
    chance, now, made = random.Random(seed), 0.0, list[SizingCall]()
    for _ in range(calls):
        now += chance.expovariate(rate_per_s)
        prompt = chance.randbytes(draw_length(chance, prompt_tokens, range_ratio))
        made.append(SizingCall(now, prompt, draw_length(chance, answer_tokens, range_ratio)))
    return tuple(made)


def busiest(path: Path, seeds: int, calls: int, speed: float) -> list[Stretch]:
    """Cut a trace into stretches of `calls` calls; return one per seed, the stretches with the most tokens/s first.

    If there are fewer stretches than seeds, stretches are used repeatedly. Raises: CommandFailed.
    """
    arrivals = from_zero(read_trace(path), speed)
    parts = [arrivals[begin : begin + calls] for begin in range(0, len(arrivals), calls)]
    whole = [part for part in parts if len(part) == calls] or [arrivals]
    ranked = sorted(whole, key=_tokens_per_s, reverse=True)
    return [_calls(ranked[seed % len(ranked)]) for seed in range(seeds)]


def _tokens_per_s(arrivals: Sequence[TraceArrival]) -> float:
    tokens = sum(each.input_tokens + each.output_tokens for each in arrivals)
    return tokens / max(1e-3, arrivals[-1].at_s - arrivals[0].at_s)


def _calls(arrivals: Sequence[TraceArrival]) -> Stretch:
    return tuple(
        SizingCall(each.at_s, _prompt(each, number), max(1, each.output_tokens))
        for number, each in enumerate(from_zero(arrivals))
        if each.input_tokens > 0
    )


def _prompt(arrival: TraceArrival, number: int) -> bytes:
    """Return a prompt's tokens: equal for blocks with equal ids, and random beyond the last block."""
    return b"".join(_pieces(arrival, number))[: arrival.input_tokens]


def _pieces(arrival: TraceArrival, number: int) -> Iterator[bytes]:
    for block in arrival.blocks:
        yield random.Random(block).randbytes(BLOCK_TOKENS)
    beyond = arrival.input_tokens - BLOCK_TOKENS * len(arrival.blocks)
    if beyond > 0:
        yield random.Random(f"call {number}").randbytes(beyond)


def longest_tokens(stretches: Sequence[Stretch]) -> int:
    """Return the largest number of tokens of a prompt with its answer. Raises: CommandFailed without a call."""
    longest = max((len(call.prompt) + call.answer_tokens for calls in stretches for call in calls), default=0)
    if not longest:
        raise CommandFailed("the trace has no request with a prompt")
    return longest
