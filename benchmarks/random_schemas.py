"""Random JSON schemas, every answer to which is short: what `.venv/bin/python -m benchmarks.structured` asks for."""

import random
from collections.abc import Callable
from typing import Any

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
