"""Traces of requests: recorded ones, and generated ones in typical shapes of traffic.

Two formats are read and detected by the first line. Mooncake's has one JSON object per line with `timestamp` in ms,
`input_length`, `output_length` and `hash_ids`, one for each 512 tokens of the prompt. Azure's is CSV with TIMESTAMP,
ContextTokens and GeneratedTokens, and has no ids: no two prompts share a prefix.
"""

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from baton.launch import CommandFailed

BLOCK_TOKENS = 512
ID_BYTES = 8
DURATION_S = 900.0


@dataclass(frozen=True, slots=True)
class TraceArrival:
    """Request of a trace. A block's id stands for its tokens and all before it; the last block may be partial."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[bytes, ...]


def read_trace(path: Path) -> list[TraceArrival]:
    """Read a trace; return its requests in order of time, the first at 0. Raises: CommandFailed."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            first = lines.readline()
            lines.seek(0)
            arrivals = list(_mooncake(lines) if first.lstrip().startswith("{") else _azure(lines))
    except OSError as error:
        raise CommandFailed(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CommandFailed(f"{path} is neither a Mooncake nor an Azure trace: {error}") from error
    if not arrivals:
        raise CommandFailed(f"{path} has no requests")
    return from_zero(arrivals)


def from_zero(arrivals: Iterable[TraceArrival], speed: float = 1.0) -> list[TraceArrival]:
    """Return arrivals in order of time, the first at 0, with gaps divided by `speed`."""
    ordered = sorted(arrivals, key=lambda each: each.at_s)
    first_s = ordered[0].at_s
    return [
        TraceArrival((each.at_s - first_s) / speed, each.input_tokens, each.output_tokens, each.blocks)
        for each in ordered
    ]


def block_ids(numbers: Iterable[int]) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(ID_BYTES, "little") for number in numbers)


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def total_blocks(arrivals: Sequence[TraceArrival]) -> int:
    return sum(len(arrival.blocks) for arrival in arrivals)


def _mooncake(lines: Iterable[str]) -> Iterator[TraceArrival]:
    for line in lines:
        row = json.loads(line)
        yield TraceArrival(
            row["timestamp"] / 1e3, int(row["input_length"]), int(row["output_length"]), block_ids(row["hash_ids"])
        )


def _azure(lines: Iterable[str]) -> Iterator[TraceArrival]:
    numbers = count()
    for row in csv.DictReader(lines):
        tokens = int(row["ContextTokens"])
        ids = block_ids(next(numbers) for _ in range(blocks_of(tokens)))
        # Azure writes seven digits after the decimal point; datetime accepts only six.
        at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        yield TraceArrival(at_s, tokens, int(row["GeneratedTokens"]), ids)


class _Maker:
    """Generator of prompts from new blocks and blocks of earlier prompts."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self._numbers = count()

    def blocks(self, at_least: int, at_most: int | None = None) -> tuple[bytes, ...]:
        length = at_least if at_most is None else self.draw.randint(at_least, at_most)
        return block_ids(next(self._numbers) for _ in range(length))

    def moment_s(self) -> float:
        return self.draw.uniform(0, DURATION_S)

    def pause_s(self, mean: float) -> float:
        return self.draw.expovariate(1 / mean)

    def arrival(self, at_s: float, blocks: Sequence[bytes], output_tokens: int = 200) -> TraceArrival:
        """Return a request with these blocks, the last of which is filled to a random degree."""
        tokens = len(blocks) * BLOCK_TOKENS - self.draw.randint(0, BLOCK_TOKENS - 12)
        return TraceArrival(at_s, tokens, output_tokens, tuple(blocks))


def chat(make: _Maker) -> Iterator[TraceArrival]:
    """Yield conversations of a few turns that share a short system prompt; some begin with a long document."""
    system = make.blocks(2)
    for _ in range(1500):
        at_s, blocks = make.moment_s(), [*system, *make.blocks(make.draw.choice((1, 2, 4, 30)))]
        for _ in range(1 + int(make.pause_s(4))):
            yield make.arrival(at_s, blocks, 300)
            blocks += make.blocks(1, 3)
            at_s += 5 + make.pause_s(40)


def agents(make: _Maker) -> Iterator[TraceArrival]:
    """Yield agent loops of many steps with one of three long system prompts; each step adds a tool's output."""
    systems = [make.blocks(16) for _ in range(3)]
    for _ in range(150):
        at_s, blocks = make.moment_s(), list(make.draw.choice(systems))
        for _ in range(make.draw.randint(8, 40)):
            blocks += make.blocks(1, 5)
            yield make.arrival(at_s, blocks)
            at_s += 2 + make.pause_s(8)


def tenants(make: _Maker) -> Iterator[TraceArrival]:
    """Yield unrelated questions behind 400 system prompts, some much more popular than others."""
    prompts = [make.blocks(6, 20) for _ in range(400)]
    weights = [1 / (rank + 3) ** 0.8 for rank in range(len(prompts))]
    for prompt in make.draw.choices(prompts, weights, k=6000):
        yield make.arrival(make.moment_s(), [*prompt, *make.blocks(2)])


def documents(make: _Maker) -> Iterator[TraceArrival]:
    """Yield questions about long documents, a few in a row about each."""
    for _ in range(350):
        document, at_s = make.blocks(10, 120), make.moment_s()
        for _ in range(make.draw.randint(1, 20)):
            yield make.arrival(at_s, [*document, *make.blocks(1)], 150)
            at_s += make.pause_s(10)


def hot_document(make: _Maker) -> Iterator[TraceArrival]:
    """Yield requests; for a while, most of them are about the same long document."""
    document = make.blocks(100)
    for _ in range(5000):
        at_s = make.moment_s()
        if DURATION_S / 3 < at_s < 0.8 * DURATION_S and make.draw.random() < 0.6:
            yield make.arrival(at_s, [*document, *make.blocks(1)])
        else:
            yield make.arrival(at_s, make.blocks(3, 20))


def oversized_prefix(make: _Maker) -> Iterator[TraceArrival]:
    """Yield requests, some of which share a prefix that may exceed one worker's cache."""
    prefix = make.blocks(1500)
    for _ in range(4000):
        shares = make.draw.random() < 0.03
        blocks = [*prefix, *make.blocks(1)] if shares else make.blocks(3, 20)
        yield make.arrival(make.moment_s(), blocks)


SHAPES: Mapping[str, Callable[[_Maker], Iterator[TraceArrival]]] = {
    each.__name__: each for each in (chat, agents, tenants, documents, hot_document, oversized_prefix)
}


def make_trace(shape: str, seed: int = 0) -> list[TraceArrival]:
    """Generate a trace. Raises: KeyError for an unknown shape."""
    return from_zero(SHAPES[shape](_Maker(seed)))
