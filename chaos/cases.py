"""What is asked during a run: a fixed set of prompts and parameters, so that every answer is known beforehand. Pure."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

FIRST_TOKEN, LAST_TOKEN = 3, 258  # of the tiny checkpoint: its bytes
LENGTHS = (5, 31, 33, 64, 150, 400)
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
class Case:
    """`options` are those of the client library. A case with a form is also held to it."""

    name: str
    prompt: tuple[int, ...]
    options: Mapping[str, Any]

    @property
    def choices(self) -> int:
        return int(self.options.get("n", 1))

    @property
    def has_form(self) -> bool:
        return "json_schema" in self.options


def make_cases(seed: int, max_tokens: int, per_kind: int = 3) -> list[Case]:
    """The same for the same numbers. Some prompts share their first blocks."""
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
    cases: list[Case] = []
    for kind, options in kinds.items():
        for number in range(per_kind):
            length = LENGTHS[(number + len(cases)) % len(LENGTHS)]
            prompt = (*shared, *_prompt(draw, length)) if number % 3 == 2 else _prompt(draw, length)
            tokens = max_tokens // 2 if kind == "several" else max_tokens - draw.randrange(max_tokens // 4)
            told = {**options, "max_tokens": tokens, "seed": draw.randrange(2**32)}
            if kind != "schema":
                told["ignore_eos"] = True
            cases.append(Case(f"{kind} {number}", prompt, told))
    return cases


def stopped(case: Case, text: str) -> Case | None:
    """`case` ended by a text of its own answer, in the latter half of it; None where the answer has none to spare."""
    for at in range(len(text) // 2, len(text) - 2):
        stop = text[at : at + 2]
        if stop.isascii() and stop.isprintable() and text.find(stop) == at:
            return replace(case, name=case.name.replace("greedy", "stop text"), options={**case.options, "stop": stop})
    return None


def _prompt(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(FIRST_TOKEN, LAST_TOKEN + 1) for _ in range(length))
