"""Random requests of all kinds, for the client library and for the offline engine. Pure."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.engine import SamplingParams
from baton.engine.offline.params import StructuredOutputsParams

LETTERS = "abcdefghijklmnopqrstuvwxyz ,.0123456789"
PROMPT_LETTERS, ANSWER_TOKENS = 300, 80  # maximum lengths of prompts and answers
SHARED = 4  # number of prefixes that several prompts share
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer"},
        "kind": {"enum": ["block", "page", "table"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
FORMS: tuple[dict[str, Any], ...] = (
    {"regex": r"[a-f]{3,12}(-[0-9]{2,5}){1,4}"},
    {"choice": ["yes, as ever", "yes, but not today", "no"]},
    {"json_schema": json.dumps(SCHEMA)},
)


@dataclass(frozen=True, slots=True)
class ExactRequest:
    """Random request. `options`: keyword arguments for the client library."""

    prompt: str
    options: dict[str, Any]


def random_requests(seed: int, count: int) -> list[ExactRequest]:
    draw = random.Random(f"exactness {seed}")
    shared = [_text(draw, 160) for _ in range(SHARED)]
    return [ExactRequest(_prompt(draw, shared), _options(draw)) for _ in range(count)]


def _prompt(draw: random.Random, shared: Sequence[str]) -> str:
    own = _text(draw, draw.randint(1, 60))
    repeated = own * draw.choice((1, 1, 2, 4))  # repetitions, from which n-gram drafts are made
    return ((draw.choice(shared) if draw.random() < 0.4 else "") + repeated)[:PROMPT_LETTERS]


def _text(draw: random.Random, length: int) -> str:
    return "".join(draw.choices(LETTERS, k=length))


def _options(draw: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"max_tokens": draw.randint(1, ANSWER_TOKENS), "seed": draw.randrange(2**32)}
    options["temperature"] = 0.0 if draw.random() < 0.4 else draw.uniform(0.2, 1.2)
    if options["temperature"] and draw.random() < 0.5:
        options |= draw.choice(({"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"typical_p": 0.9}))
    if draw.random() < 0.25:
        options |= {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.3}
    if draw.random() < 0.1:
        options["logit_bias"] = {draw.randrange(3, 259): draw.uniform(-5, 5) for _ in range(4)}
    if draw.random() < 0.4:
        options["logprobs"] = draw.randint(0, 5)
    if draw.random() < 0.2:
        options["n"] = draw.randint(2, 4)
    if draw.random() < 0.2:
        return options | draw.choice(FORMS)
    if draw.random() < 0.25:
        options["stop"] = [draw.choice(LETTERS) for _ in range(draw.randint(1, 3))]
    options["ignore_eos"] = draw.random() < 0.7
    return options


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """Convert the client's options to the engine's parameters."""
    forms = {"regex": "regex", "choice": "choice", "json_schema": "json"}
    form = {forms[name]: value for name, value in options.items() if name in forms}
    others = {name: value for name, value in options.items() if name not in forms}
    return SamplingParams(**others, structured_outputs=StructuredOutputsParams(**form) if form else None)
