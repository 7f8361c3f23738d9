"""Structured output from a running cluster: is every answer valid?

    .venv/bin/python -m baton.benchmarks.cluster.structured [--target HOST:PORT] [--count 200] [--seed 0] [--json FILE]

Asks for an answer to each of so many random JSON schemas, streamed, collected, two choices at once, and with stop
strings, and checks each with jsonschema.
"""

import asyncio
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

import jsonschema

from baton.benchmarks.report.result import make_parser, write_result
from baton.client import AsyncBatonClient, Delta, FinishReason, GenerateOptions

Schema = dict[str, Any]
WORDS = ("red", "green", "blue", "north", "south", "blök", 'quo"te', "back\\slash", "", "two words")
PATTERNS = ("^[a-f]{1,6}$", "^[A-Z][a-z]{0,4}$", "^[0-9]{3}-[0-9]{2}$", "^(yes|no|may be)$", "^v[0-9]+\\.[0-9]$")
DEPTH = 3


class SchemaMaker:
    """The same seed, the same schema."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._defined: dict[str, Schema] = {}

    def schema(self) -> Schema:
        """An object, whose definitions are all used or not."""
        for name in ("item", "place")[: self._chance.randint(0, 2)]:
            self._defined[name] = self._any(DEPTH - 1)
        made = self._object(DEPTH)
        return made | {"$defs": self._defined} if self._defined else made

    def _any(self, depth: int) -> Schema:
        leaves: list[Callable[[], Schema]] = [self._enum, self._integer, self._number, self._text, self._pattern]
        leaves += [lambda: {"type": "boolean"}, lambda: {"type": "null"}, lambda: {"const": self._value()}]
        if self._defined:
            leaves.append(lambda: {"$ref": f"#/$defs/{self._chance.choice(sorted(self._defined))}"})
        if depth == 0:
            return self._chance.choice(leaves)()
        branches: list[Callable[[], Schema]] = [
            lambda: self._object(depth),
            lambda: self._array(depth),
            lambda: self._any_of(depth),
        ]
        return self._chance.choice(branches if self._chance.random() < 0.5 else leaves)()

    def _object(self, depth: int) -> Schema:
        names = self._chance.sample(("id", "name", "colour", "size", "when", "näme", "a b", "x-y"), self._up_to(4))
        required = [name for name in names if self._chance.random() < 0.6]
        properties = {name: self._any(depth - 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def _array(self, depth: int) -> Schema:
        least = self._chance.randint(0, 2)
        most = least + self._chance.randint(0, 2)
        return {"type": "array", "items": self._any(depth - 1), "minItems": least, "maxItems": max(1, most)}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth - 1) for _ in range(self._chance.randint(2, 3))]}

    def _enum(self) -> Schema:
        return {"enum": self._chance.sample([*WORDS, 0, 17, -3, True, None], self._chance.randint(1, 5))}

    def _integer(self) -> Schema:
        least = self._chance.randint(-500, 500)
        return {"type": "integer", "minimum": least, "maximum": least + self._chance.randint(0, 10_000)}

    def _number(self) -> Schema:
        least = self._chance.randint(-20, 20)
        name = self._chance.choice(("minimum", "exclusiveMinimum"))
        return {"type": "number", name: least, "maximum": least + self._chance.randint(1, 50)}

    def _text(self) -> Schema:
        least = self._chance.randint(0, 2)
        return {"type": "string", "minLength": least, "maxLength": least + self._chance.randint(0, 4)}

    def _pattern(self) -> Schema:
        return {"type": "string", "pattern": self._chance.choice(PATTERNS)}

    def _value(self) -> Any:
        return self._chance.choice([*WORDS, 5, -1.5, False, None, ["a", 1]])

    def _up_to(self, most: int) -> int:
        return self._chance.randint(1, most)


def random_schema(seed: int) -> Schema:
    return SchemaMaker(seed).schema()


PROMPT = "Answer in JSON, please: what do you know of it?"
AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Verdict:
    way: str  # it was asked for
    seed: int  # of the schema
    valid: bool
    text: str
    fault: str = ""


async def verdicts(client: AsyncBatonClient, seeds: Sequence[int], max_tokens: int = 1500) -> list[Verdict]:
    """Every schema in every way."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> list[Verdict]:
        async with places:
            return await _verdicts(client, seed, max_tokens)

    return [verdict for of_seed in await asyncio.gather(*map(one, seeds)) for verdict in of_seed]


async def _verdicts(client: AsyncBatonClient, seed: int, max_tokens: int) -> list[Verdict]:
    schema = random_schema(seed)
    options: GenerateOptions = {"json_schema": schema, "max_tokens": max_tokens, "temperature": 1.0, "seed": seed}
    text = ""
    async with aclosing(client.generate(PROMPT, **options)) as stream:
        async for event in stream:
            text += event.text if isinstance(event, Delta) else ""
    found = [_judge("streamed", seed, schema, text)]
    two: GenerateOptions = {**options, "n": 2}
    collected = await client.complete(PROMPT, **two)
    found += [_judge("two choices", seed, schema, choice.text) for choice in collected.choices]
    stopping: GenerateOptions = {**options, "stop": ["}}", "]}"]}
    [cut] = (await client.complete(PROMPT, **stopping)).choices
    whole = cut.text + (cut.matched_stop if isinstance(cut.matched_stop, str) else "")
    begins = text.startswith(whole) and cut.finish_reason is FinishReason.STOP
    found.append(Verdict("cut by a stop", seed, begins, whole, "" if begins else f"is no beginning of {text}"))
    return found


def _judge(way: str, seed: int, schema: Schema, text: str) -> Verdict:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return Verdict(way, seed, False, text, str(error).splitlines()[0])
    return Verdict(way, seed, True, text)


async def ask(target: str, seeds: Sequence[int], max_tokens: int) -> list[Verdict]:
    async with AsyncBatonClient(target, timeout_s=300) as client:
        return await verdicts(client, seeds, max_tokens)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--target", default=os.environ.get("BATON_TARGET", "127.0.0.1:50051"))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=1500)
    given = parser.parse_args()
    found = asyncio.run(ask(given.target, range(given.seed, given.seed + given.count), given.max_tokens))
    for way in dict.fromkeys(verdict.way for verdict in found):
        of_way = [verdict for verdict in found if verdict.way == way]
        print(f"{way:>14}: {sum(verdict.valid for verdict in of_way)} of {len(of_way)} valid")
    bad = [verdict for verdict in found if not verdict.valid]
    for verdict in bad:
        print(f"schema {verdict.seed}, {verdict.way}: {verdict.fault}: {verdict.text[:200]!r}")
    counts = {"answers": len(found), "valid": len(found) - len(bad), "bad": [asdict(verdict) for verdict in bad]}
    write_result(given.json, counts)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
