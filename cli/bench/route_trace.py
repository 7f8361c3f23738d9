"""Traces of requests: when each came, how long it is, and which blocks of tokens it begins with.

Two formats are read, recognized by their first line: Mooncake's, one JSON object a line with `timestamp` in ms,
`input_length`, `output_length` and `hash_ids`, one for each 512 tokens of the prompt; and Azure's, CSV with TIMESTAMP,
ContextTokens and GeneratedTokens, in which no two prompts share anything.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from cli.errors import CommandFailed

BLOCK_TOKENS = 512
ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class Arrival:
    """A block's id stands for its tokens and all before them. The last one may not be full."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[bytes, ...]


def read_trace(path: Path) -> list[Arrival]:
    """In order of time, the first at 0. Raises: CommandFailed."""
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


def from_zero(arrivals: Iterable[Arrival], speed: float = 1.0) -> list[Arrival]:
    """In order of time, the first at 0, so many times faster than they came."""
    ordered = sorted(arrivals, key=lambda each: each.at_s)
    first_s = ordered[0].at_s
    return [
        Arrival((each.at_s - first_s) / speed, each.input_tokens, each.output_tokens, each.blocks) for each in ordered
    ]


def block_ids(numbers: Iterable[int]) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(ID_BYTES, "little") for number in numbers)


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def total_blocks(arrivals: Sequence[Arrival]) -> int:
    return sum(len(arrival.blocks) for arrival in arrivals)


def _mooncake(lines: Iterable[str]) -> Iterator[Arrival]:
    for line in lines:
        row = json.loads(line)
        yield Arrival(
            row["timestamp"] / 1e3, int(row["input_length"]), int(row["output_length"]), block_ids(row["hash_ids"])
        )


def _azure(lines: Iterable[str]) -> Iterator[Arrival]:
    numbers = count()
    for row in csv.DictReader(lines):
        tokens = int(row["ContextTokens"])
        ids = block_ids(next(numbers) for _ in range(blocks_of(tokens)))
        # Seven digits of a second's fraction are one more than Python reads.
        at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        yield Arrival(at_s, tokens, int(row["GeneratedTokens"]), ids)
