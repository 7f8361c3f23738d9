"""Recorded arrivals, lengths and shared prefixes: Azure's LLM inference trace (CSV) and Mooncake's (JSON lines).

Neither has the prompts themselves. Random tokens stand in; where Mooncake's rows share block hashes, their prompts
share those tokens, so that a prefix cache finds the same hits.
"""

import csv
import datetime
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

from baton.benchmarks.serve.load import Job, random_tokens
from baton.launch.errors import CommandFailed

MOONCAKE_BLOCK_TOKENS = 512
AZURE_COLUMNS = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}


@dataclass(frozen=True, slots=True)
class TraceRow:
    at_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()  # equal ones stand for equal blocks of MOONCAKE_BLOCK_TOKENS tokens


@dataclass(frozen=True, slots=True)
class TraceJobs:
    """Rows as requests. Arrivals count from the first row's and are `speed` times as fast; long ones are cut."""

    speed: float
    most_input_tokens: int | None
    most_output_tokens: int | None
    vocab_size: int
    seed: int

    def make(self, rows: Sequence[TraceRow]) -> list[Job]:
        chance = random.Random(self.seed)
        start_s = min(row.at_s for row in rows)
        return [
            Job(
                self._prompt(row, chance),
                max(1, _at_most(row.output_tokens, self.most_output_tokens)),
                (row.at_s - start_s) / self.speed,
            )
            for row in sorted(rows, key=lambda row: row.at_s)
        ]

    def _prompt(self, row: TraceRow, chance: random.Random) -> tuple[int, ...]:
        count = max(1, _at_most(row.input_tokens, self.most_input_tokens))
        tokens: tuple[int, ...] = ()
        for block_id in row.block_ids[: -(-count // MOONCAKE_BLOCK_TOKENS)]:
            # the same id makes the same tokens in any row, and other ones under another seed
            tokens += random_tokens(random.Random(f"{self.seed}/{block_id}"), MOONCAKE_BLOCK_TOKENS, self.vocab_size)
        return tokens[:count] + random_tokens(chance, max(0, count - len(tokens)), self.vocab_size)


def read_trace(path: Path, first: int | None) -> list[TraceRow]:
    """The `first` so many rows; None: all. A name that ends in .csv is Azure's. Raises: CommandFailed."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = _azure(file) if path.suffix == ".csv" else map(_mooncake, filter(str.strip, file))
            read = list(islice(rows, first))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandFailed(f"{path} is no trace of Azure's (.csv) or Mooncake's (.jsonl): {error}") from error
    if not read:
        raise CommandFailed(f"{path} has no requests")
    return read


def _azure(file: TextIO) -> Iterator[TraceRow]:
    table = csv.DictReader(file)
    if AZURE_COLUMNS - set(table.fieldnames or ()):
        raise ValueError(f"its columns are not {', '.join(sorted(AZURE_COLUMNS))}")
    for line in table:
        # seven digits of a second; Python reads six
        at = datetime.datetime.fromisoformat(line["TIMESTAMP"][:26]).replace(tzinfo=datetime.UTC)
        yield TraceRow(at.timestamp(), int(line["ContextTokens"]), int(line["GeneratedTokens"]))


def _mooncake(line: str) -> TraceRow:
    row = json.loads(line)
    return TraceRow(row["timestamp"] / 1e3, row["input_length"], row["output_length"], tuple(row.get("hash_ids", ())))


def _at_most(tokens: int, most: int | None) -> int:
    return tokens if most is None else min(tokens, most)
