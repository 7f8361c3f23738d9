"""Detection of an output head that config.json ties to the embedding although its weights differ.

transformers ties the two only if the checkpoint lacks one of them or both are equal.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from baton.engine.config.model_config import ModelError
from baton.engine.weights.names import text_name
from baton.text.host.files import reading
from baton.text.weight_files import has_weights, is_gguf, weight_files

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ROWS = 1 << 12  # rows compared at a time


def has_own_head(folder: Path) -> bool:
    """Return whether a checkpoint has both an embedding and a head with different weights.

    Raises: ModelError, WeightsRefused.
    """
    found: dict[str, tuple[Path, str]] = {}
    for path in weight_files(folder) if has_weights(folder) and not is_gguf(folder) else ():
        with reading(path, ModelError), safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 -- not a mapping
                if (own := text_name(name)) in (HEAD, EMBEDDING):
                    found.setdefault(own, (path, name))
    if len(found) < 2:
        return False
    (one, head), (other, embedding) = found[HEAD], found[EMBEDDING]
    with safe_open(one, framework="pt") as first, safe_open(other, framework="pt") as second:
        return not _are_equal(first.get_slice(head), second.get_slice(embedding))


def _are_equal(one: Any, other: Any) -> bool:
    shape = one.get_shape()
    if shape != other.get_shape() or one.get_dtype() != other.get_dtype() or not shape:
        return False
    return all(torch.equal(one[row : row + ROWS], other[row : row + ROWS]) for row in range(0, shape[0], ROWS))
