"""Largest accepted numbers in a config.json, chosen by the field's name and checked before any use."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.engine.config.model_config import ModelError

LIMITS = {
    re.compile(r".*layers?"): 1024,
    re.compile(r".*(positions?|position_embeddings|_window|_ctx|_len|_length)"): 1 << 27,
    re.compile(r".*(size|dim|heads?|rank|experts|per_tok|embd|inner|groups?|kernel|d_model)"): 1 << 24,
    re.compile(r"(?s:.*)"): 1e30,
}
"""Largest accepted number of a field. The first expression that matches the field's name counts."""


def check_numbers(path: Path, fields: Mapping[str, Any], within: str = "") -> None:
    """Check that no number exceeds its limit. `path`: config.json. `within`: dotted names of the enclosing fields.

    Raises: ModelError.
    """
    for name, value in fields.items():
        if isinstance(value, dict):
            check_numbers(path, value, f"{within}{name}.")
        elif isinstance(value, int | float):
            most = next(most for expression, most in LIMITS.items() if expression.fullmatch(name))
            if not abs(value) <= most:
                raise ModelError(f"{path}: {within}{name} is {value!r}; numbers up to {most} are supported")


def positive_sizes(fields: Mapping[str, Any], *names: str) -> list[int]:
    """Return the named fields. Raises: ModelError unless each is a positive integer."""
    for name in names:
        if not isinstance(fields[name], int) or fields[name] < 1:
            raise ModelError(f"config.json: {name} {fields[name]!r} must be a positive integer")
    return [fields[name] for name in names]
