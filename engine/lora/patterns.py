"""Match PEFT's regular expressions of module names within a time limit.

`re` decides which expressions are valid, as in PEFT. `regex`, a dependency of transformers, matches them: it supports a
timeout and releases the interpreter's lock.
"""

import re
import time
from dataclasses import dataclass, field

import regex

from baton.engine.config.model_config import ModelError

MAX_CHARACTERS = 1000  # maximum length of an expression
MATCH_TIMEOUT_S = 2.0


@dataclass(slots=True)
class Patterns:
    """Regular expressions of one adapter. All its matches together may take MATCH_TIMEOUT_S."""

    file: str = "adapter_config.json"  # file name for error messages
    _left_s: float = MATCH_TIMEOUT_S
    _compiled: dict[str, "regex.Pattern[str]"] = field(default_factory=dict)

    def compile(self, name: str, expression: str) -> "regex.Pattern[str]":
        """Compile an expression. `name`: name of the field, for error messages. Raises: ModelError."""
        if expression not in self._compiled:
            if len(expression) > MAX_CHARACTERS:
                too_long = f"an expression of {len(expression)} characters; at most {MAX_CHARACTERS} are read"
                raise ModelError(f"{self.file}: {name} has {too_long}")
            try:
                re.compile(expression)
                self._compiled[expression] = regex.compile(expression)
            except (re.error, regex.error, RecursionError, OverflowError) as error:
                raise ModelError(
                    f"{self.file}: {name} has {expression!r}, which is no regular expression: {error}"
                ) from error
        return self._compiled[expression]

    def match(self, name: str, expression: str, module: str) -> "regex.Match[str] | None":
        """Match a complete module name. Raises: ModelError."""
        compiled, began = self.compile(name, expression), time.monotonic()
        try:
            return compiled.fullmatch(module, timeout=self._left_s, concurrent=True)
        except TimeoutError as error:
            raise ModelError(
                f"{self.file}: {name} has {expression!r}: matching takes more than {MATCH_TIMEOUT_S:g} s"
            ) from error
        finally:
            self._left_s = max(1e-3, self._left_s - (time.monotonic() - began))
