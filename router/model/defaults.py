"""A model's own sampling defaults: generation_config.json, and config.json for the end-of-sequence tokens."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ModelFolderError(Exception):
    """A file of the checkpoint that the router needs is missing or malformed."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Values for the sampling fields that a client leaves out."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    eos_token_ids: frozenset[int] = frozenset()
    typical_p: float = 1.0
    repetition_penalty: float = 1.0


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Reads the defaults of the checkpoint in `folder`.

    As in transformers, the sampling values count only where `do_sample` is true, and anything else is greedy; but a
    repetition penalty always counts.
    Raises: ModelFolderError.
    """
    generation = read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = read_json(folder / "config.json").get("eos_token_id")
    eos_token_ids = _token_ids(eos, folder)
    repetition_penalty = float(_stated(generation, "repetition_penalty", 1.0))
    if repetition_penalty <= 0.0:
        raise ModelFolderError(f"generation_config.json: repetition_penalty is {repetition_penalty:g}, not above 0")
    if not generation.get("do_sample"):
        return GenerationDefaults(eos_token_ids=eos_token_ids, repetition_penalty=repetition_penalty)
    return GenerationDefaults(
        temperature=float(_stated(generation, "temperature", 1.0)),
        top_k=int(_stated(generation, "top_k", 0)),
        top_p=float(_stated(generation, "top_p", 1.0)),
        min_p=float(_stated(generation, "min_p", 0.0)),
        eos_token_ids=eos_token_ids,
        typical_p=float(_stated(generation, "typical_p", 1.0)),
        repetition_penalty=repetition_penalty,
    )


def read_json(path: Path) -> dict[str, Any]:
    """Raises: ModelFolderError."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path} cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise ModelFolderError(f"{path} does not hold a JSON object")
    return loaded


def _stated(generation: dict[str, Any], name: str, otherwise: float) -> float:
    value = generation.get(name)
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelFolderError(f"generation_config.json: {name} is {value!r}, not a number")
    return value


def _token_ids(value: Any, folder: Path) -> frozenset[int]:
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in listed):
        raise ModelFolderError(f"{folder}: eos_token_id is {value!r}, not token ids")
    return frozenset(listed)
