"""Sampling defaults of a model, from generation_config.json; its end-of-sequence tokens may be in config.json."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.text.generation_config import read_generation_config
from baton.text.host import files
from baton.text.host.files import reads
from baton.text.sampling import NUMBERS, SamplingNumbers


class ModelFolderError(files.FileRefused):
    """Error: a file of the checkpoint is missing or malformed."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults(SamplingNumbers):
    """A model's values of sampling fields that a client omits, and its end-of-sequence tokens."""

    eos_token_ids: frozenset[int] = frozenset()


@reads(ModelFolderError)
def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Read the defaults of the checkpoint in `folder`. Raises: ModelFolderError.

    As in transformers, sampling is greedy unless `do_sample` is true, but a repetition penalty applies in both cases.
    """
    generation = read_generation_config(folder, ModelFolderError)
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = read_json(folder / "config.json").get("eos_token_id")
    eos_token_ids = _token_ids(eos, folder)
    if not generation.get("do_sample"):
        return GenerationDefaults(eos_token_ids, **_numbers(generation, ["repetition_penalty"]))
    stated = [name for name, number in NUMBERS.items() if number.stated]
    return GenerationDefaults(eos_token_ids, **{"temperature": 1.0} | _numbers(generation, stated))


@reads(ModelFolderError, "config.json")
def read_family(folder: Path) -> str:
    """Return `model_type` of config.json; empty if it is absent. Raises: ModelFolderError."""
    path = folder / "config.json"
    family = read_json(path).get("model_type") if path.exists() else None
    return family if isinstance(family, str) else ""


def _numbers(generation: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        number, value = NUMBERS[name], generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelFolderError(f"generation_config.json: {name} is {value!r}, not a number")
        fault = number.range.fault(value)
        if fault is not None:
            raise ModelFolderError(f"generation_config.json: {name} {fault}")
        found[name] = type(number.default)(value)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a file with a JSON object. Raises: ModelFolderError."""
    return files.read_json(path, ModelFolderError, dict)


def _token_ids(value: Any, folder: Path) -> frozenset[int]:
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in listed):
        raise ModelFolderError(f"{folder}: eos_token_id is {value!r}, not token ids")
    return frozenset(listed)
