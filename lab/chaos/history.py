"""Requests of a run, and the events that a client observed of each stream. Plain values."""

import json
import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

FIRST_TOKEN, LAST_TOKEN = 3, 258  # smallest and largest token id of a byte in the tiny checkpoint
LENGTHS = (5, 31, 33, 64, 150, 400)  # lengths of prompts in tokens
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 24},
        "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 6, "maxItems": 12},
        "kind": {"enum": ["block", "page", "table"]},
    },
    "required": ["name", "numbers", "kind"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class ChaosCase:
    """Request of a run. `options`: keyword arguments for the client library."""

    name: str
    prompt: tuple[int, ...]
    options: Mapping[str, Any]

    @property
    def choices(self) -> int:
        return int(self.options.get("n", 1))


def make_cases(seed: int, max_tokens: int, per_kind: int = 3) -> list[ChaosCase]:
    """Generate the requests of a seed, `per_kind` of each kind. Some prompts share their first blocks."""
    draw = random.Random(f"cases {seed}")
    shared = _prompt(draw, 130)
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "seeded": {"temperature": 0.9, "top_k": 60, "top_p": 0.95},
        "seeded wide": {"temperature": 1.0},
        "several": {"temperature": 1.0, "top_p": 0.9, "n": 3},
        "penalties": {
            "temperature": 0.0,
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.2,
            "presence_penalty": 0.3,
        },
        "logprobs": {"temperature": 0.0, "logprobs": 2},
        "schema": {"temperature": 0.8, "json_schema": json.dumps(SCHEMA)},
    }
    cases: list[ChaosCase] = []
    for kind, options in kinds.items():
        for number in range(per_kind):
            length = LENGTHS[(number + len(cases)) % len(LENGTHS)]
            prompt = (*shared, *_prompt(draw, length)) if number % 3 == 2 else _prompt(draw, length)
            tokens = max_tokens // 2 if kind == "several" else max_tokens - draw.randrange(max_tokens // 4)
            sampling = {**options, "max_tokens": tokens, "seed": draw.randrange(2**32)}
            if kind != "schema":
                sampling["ignore_eos"] = True
            cases.append(ChaosCase(f"{kind} {number}", prompt, sampling))
    return cases


def stopped(case: ChaosCase, text: str) -> ChaosCase | None:
    """Return `case` with a stop string from the second half of its own answer; None if the answer is too short."""
    for at in range(len(text) // 2, len(text) - 2):
        stop = text[at : at + 2]
        if stop.isascii() and stop.isprintable() and text.find(stop) == at:
            return replace(case, name=case.name.replace("greedy", "stop text"), options={**case.options, "stop": stop})
    return None


def _prompt(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(FIRST_TOKEN, LAST_TOKEN + 1) for _ in range(length))


class Behaviour(StrEnum):
    """Behaviour of a client towards its stream."""

    READS = "reads"
    SLOW = "slow"  # reads, but pauses between events
    CANCELS = "cancels"


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """Tokens of one choice in one message."""

    at_s: float  # monotonic clock, like all times of this module
    choice: int
    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...] = ()  # one per token; empty if not requested


@dataclass(frozen=True, slots=True)
class StreamEnd:
    at_s: float
    choice: int
    reason: str
    matched_stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class ObservedAttempt:
    """Attempt of a request, as the router's `why` explains it."""

    prefill: str  # worker id; empty if none was chosen
    decode: str  # worker id; empty if none was chosen
    failure: str  # reason of the failure; empty if the attempt succeeded


@dataclass(slots=True)
class StreamHistory:
    """Events of a stream, as the client observed them. `closed_s`: None while the stream is open."""

    number: int
    case: str
    behaviour: Behaviour
    request_id: str
    began_s: float
    starts: int = 0
    pieces: list[StreamPiece] = field(default_factory=list)
    ends: list[StreamEnd] = field(default_factory=list)
    closed_s: float | None = None
    failure: str | None = None  # status and reason; None: OK or cancelled
    attempts: list[ObservedAttempt] = field(default_factory=list)
    drafted_tokens: int = 0  # sum over the routers that still know the request
    accepted_tokens: int = 0
    packed_times: "array[float] | None" = None
    packed_tokens: int = 0

    @property
    def token_times(self) -> list[float]:
        """Return the arrival times of all pieces, in order."""
        if self.packed_times is not None:
            return self.packed_times.tolist()
        return [piece.at_s for piece in self.pieces]

    @property
    def tokens(self) -> int:
        return self.packed_tokens + sum(len(piece.token_ids) for piece in self.pieces)

    def pack(self) -> None:
        """Replace the judged pieces by their arrival times and number of tokens, to save memory."""
        self.packed_times, self.packed_tokens = array("d", self.token_times), self.tokens
        self.pieces = []
