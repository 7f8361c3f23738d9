"""Check and load new weights for a model in service, from a checkpoint that differs only in its weights.

Configuration, tokenizer, chat template and defaults must be equal, since requests, caches and workers rely on them.
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
    "additional_chat_templates/tool_use.jinja",
    "tokenizer.model",
    "tiktoken.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)
FREE_SHARE = 0.1  # fraction of the free memory that a reload must leave, for steps and other processes


@dataclass(frozen=True, slots=True)
class CheckedWeights:
    """Checkpoint whose weights may replace those in service."""

    folder: Path
    checkpoint: bytes  # 32-byte digest, see PreparedModel
    size_bytes: int  # size in memory, over all ranks


def check_weights(served: PreparedModel, folder: Path) -> CheckedWeights:
    """Check that a checkpoint differs from the served one only in weights. Raises: ModelError, naming what differs."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder")
    for name in SAME_FILES:
        with reading(folder / name, ModelError):
            _check_same(served.options.folder / name, folder / name)
    format = weight_format(folder, served.options.quantize)
    if format is not served.weight_format:
        raise ModelError(f"{folder}: weights are stored as {format}, but those in service as {served.weight_format}")
    packed = served.options.device.type == "cpu"
    size_bytes = loaded_bytes(folder, format, served.dtype.itemsize, packed, served.config.tensor_name).total
    return CheckedWeights(folder, model_fingerprint(folder), size_bytes)


def _check_same(served: Path, other: Path) -> None:
    if not served.is_file() and not other.is_file():
        return
    for present, absent in ((served, other), (other, served)):
        if not absent.is_file():
            raise ModelError(f"{absent} is missing, but {present} exists; only weights may differ")
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
    """Return a JSON file's fields by name, or list entries by index, without fields that do not affect the model."""
    read = read_json(path, ModelError, list if path.name == "modules.json" else dict)
    named = dict(read if isinstance(read, dict) else enumerate(read))
    return {key: value for key, value in named.items() if key not in UNINFORMATIVE_FIELDS}


def _short(value: object) -> str:
    spelled = json.dumps(value)
    return spelled if len(spelled) <= 80 else f"{spelled[:80]}..."


def check_memory(needed_bytes: int, device: torch.device, ranks: int) -> None:
    """Check that the new weights fit in addition to the old ones. Raises: ModelError, naming the amounts."""
    if device.type == "cuda":
        free, needed_bytes = torch.cuda.mem_get_info(device)[0], needed_bytes // ranks
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = available_bytes()
    if needed_bytes > free * (1 - FREE_SHARE):
        raise ModelError(
            f"the new weights need {needed_bytes / 2**20:,.0f} MiB in addition to the old ones, but "
            f"{free / 2**20:,.0f} MiB are free on {device}, of which {FREE_SHARE:.0%} must stay free"
        )


def load_beside(served: PreparedModel, checked: CheckedWeights, running: Model) -> Model:
    """Load new weights, or the leader's part of them, while `running` computes. A blocking call for any thread.

    Raises: ModelError, also if memory is short.
    """
    options = served.options
    if isinstance(running, ParallelModel):
        part = load_part(checked.folder, served.dtype, options.device, False, options.quantize, running.collectives)
        return replace(running, part=part)
    return load_model(checked.folder, served.dtype, options.device, False, None, options.quantize, packed=True)
