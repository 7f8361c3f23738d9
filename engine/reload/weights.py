"""Other weights for a model that is being served: another checkpoint that differs from it in its weights alone.

Configuration, tokenizer, chat template and defaults stay, since requests, caches and workers rely on them.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from baton.engine.config.model_config import ModelError
from baton.engine.load import load_model, load_part
from baton.engine.models.batch import Model
from baton.engine.parallel.model import ParallelModel
from baton.engine.prepare import PreparedModel
from baton.engine.weights.files import UNINFORMATIVE_FIELDS, loaded_bytes, model_fingerprint
from baton.engine.weights.formats import weight_format
from baton.text.host.files import read_file, read_json, reading
from baton.text.host.memory import available_bytes

SAME_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "modules.json",
    "1_Pooling/config.json",
)
FREE_SHARE = 0.1  # of the memory that is free: steps, and what else runs there, take some too


@dataclass(frozen=True, slots=True)
class CheckedWeights:
    """A checkpoint whose weights may take the place of those that are served."""

    folder: Path
    checkpoint: bytes  # as PreparedModel has it
    size_bytes: int  # once loaded, over all ranks


def check_weights(served: PreparedModel, folder: Path) -> CheckedWeights:
    """Raises: ModelError, naming what differs."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder")
    for name in SAME_FILES:
        with reading(folder / name, ModelError):
            _check_same(served.options.folder / name, folder / name)
    format = weight_format(folder, served.options.quantize)
    if format is not served.weight_format:
        raise ModelError(f"{folder}: its weights are {format}, those that are served are {served.weight_format}")
    packed = served.options.device.type == "cpu"
    size_bytes = loaded_bytes(folder, format, served.dtype.itemsize, packed).total
    return CheckedWeights(folder, model_fingerprint(folder), size_bytes)


def _check_same(served: Path, other: Path) -> None:
    if not served.is_file() and not other.is_file():
        return
    for present, absent in ((served, other), (other, served)):
        if not absent.is_file():
            raise ModelError(f"{absent} is missing, and {present} is there")
    if served.suffix != ".json":
        if read_file(served) != read_file(other):
            raise ModelError(f"{other} is not equal to {served}; only weights may differ")
        return
    had, has = _informative(served), _informative(other)
    for field in sorted(had.keys() | has.keys(), key=str):
        if had.get(field) != has.get(field):
            raise ModelError(
                f"{other}: {field} is {_short(has.get(field))}, and {_short(had.get(field))} in {served}; "
                "only weights may differ"
            )


def _informative(path: Path) -> dict[object, object]:
    """Fields by name; the entries of a list by number."""
    read = read_json(path, ModelError, list if path.name == "modules.json" else dict)
    named = dict(read if isinstance(read, dict) else enumerate(read))
    return {key: value for key, value in named.items() if key not in UNINFORMATIVE_FIELDS}


def _short(value: object) -> str:
    spelled = json.dumps(value)
    return spelled if len(spelled) <= 80 else f"{spelled[:80]}..."


def check_memory(needed_bytes: int, device: torch.device, ranks: int) -> None:
    """Whether both sets of weights fit. Raises: ModelError, naming the amounts."""
    if device.type == "cuda":
        free, needed_bytes = torch.cuda.mem_get_info(device)[0], needed_bytes // ranks
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = available_bytes()
    if needed_bytes > free * (1 - FREE_SHARE):
        raise ModelError(
            f"the new weights take {needed_bytes / 2**20:,.0f} MiB beside the old ones, and {free / 2**20:,.0f} MiB of "
            f"memory are free on {device}, of which {FREE_SHARE:.0%} must stay so"
        )


def load_beside(served: PreparedModel, checked: CheckedWeights, running: Model) -> Model:
    """The leader's part, on any thread while `running` computes. Blocks.

    Raises: ModelError, also for want of memory.
    """
    options = served.options
    if isinstance(running, ParallelModel):
        part = load_part(checked.folder, served.dtype, options.device, False, options.quantize, running.collectives)
        return replace(running, part=part)
    return load_model(checked.folder, served.dtype, options.device, False, None, options.quantize, packed=True)
