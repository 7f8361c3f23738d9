"""Load a checkpoint as a transformers model with paged attention, and verify that its results are unchanged."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from baton.engine.config.model_config import ModelConfig, ModelError
from baton.engine.config.resolved_config import read_transformers_config
from baton.engine.kv_cache.layout import kv_layout
from baton.engine.models.batch import make_batch
from baton.engine.models.transformers_config import forget_padding
from baton.engine.models.transformers_model import NAME, TransformersModel, register_attention
from baton.engine.request import Chunk
from baton.engine.weights.files import read_safetensors_header, weight_files

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 4
CHUNKS = ((1, 3), (2, 1), (5, 2), (1, 1), (3, 4))  # per step: number of tokens of the first and of the second sequence
MOST_IMPLIED = 2  # maximum ratio of parameters implied by config.json to parameters in the files
MOST_EXACT, MOST_ROUNDED = 0.01, 0.2  # maximum relative error: per token in float32, mean in shorter dtypes


def load_transformers_model(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: bool
) -> TransformersModel:
    """Load a model and check its results. Raises: ModelError for missing or surplus tensors, or if results differ."""
    logger.info(
        "%s has no native implementation: running transformers' code on paged attention, which is slower", config.family
    )
    register_attention()
    with progress_bar(progress):
        causal = load_whole(AutoModelForCausalLM, folder, dtype, NAME)
    forget_padding(causal.config)
    model = TransformersModel(config, causal.to(device))
    try:
        with torch.inference_mode():
            _check_against_itself(model)
    except RuntimeError as error:
        raise ModelError(f"{config.family} does not run: {error}") from error
    return model


def load_whole(kind: Any, folder: Path, dtype: torch.dtype, attention: str, optional: tuple[str, ...] = ()) -> Any:
    """Load a model of class `kind`. Tensors whose names start with an `optional` prefix may be missing or unused.

    Raises: ModelError.
    """
    _check_size(kind, folder)
    loaded, report = kind.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation=attention,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # or an error of transformers would not name the tensor
        output_loading_info=True,
    )
    _check_report(folder, report, optional)
    return loaded


def check_whole(kind: Any, folder: Path, optional: tuple[str, ...] = ()) -> None:
    """Check tensors as `load_whole` does, but only read the headers of the files. Raises: ModelError."""
    _check_size(kind, folder)
    with torch.device("meta"):
        model: Any = kind.from_config(read_transformers_config(folder))
    renamed: Any = get_model_conversion_mapping(model)
    options = LoadStateDictConfig(
        pretrained_model_name_or_path=str(folder),
        ignore_mismatched_sizes=True,
        device_map={"": torch.device("meta")},
        weight_mapping=renamed,
    )
    with progress_bar(False):
        read, _ = model._load_pretrained_model(model, None, list(map(str, weight_files(folder))), options)
        report = model._finalize_model_loading(model, options, read)
    _check_report(folder, report.to_dict(), optional)


def _check_report(folder: Path, report: Mapping[str, Any], optional: tuple[str, ...]) -> None:
    """Raises: ModelError for missing, surplus and differently shaped tensors, except those of an `optional` prefix."""
    for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(key[0] if isinstance(key, tuple) else key) for key in report[keys])
        if found := [name for name in names if not name.startswith(optional)]:
            raise ModelError(f"{folder}: {len(found)} {keys.replace('_', ' ')}, among them {found[0]}")


def _check_size(kind: Any, folder: Path) -> None:
    """Check that config.json does not imply far more parameters than the files contain. Raises: ModelError."""
    with torch.device("meta"):
        implied = kind.from_config(read_transformers_config(folder)).num_parameters()
    shapes = (tensor.shape for path in weight_files(folder) for tensor in read_safetensors_header(path).values())
    stored = sum(map(math.prod, shapes))
    if implied > MOST_IMPLIED * stored:
        raise ModelError(f"{folder}: config.json implies {implied} parameters, far more than the {stored} in the files")


def _check_against_itself(model: TransformersModel) -> None:
    """Check that paged attention, computing in chunks, gives the same hidden states as transformers' own attention.

    Detects features that the configuration does not name, such as ignored positions or convolutions over tokens.
    Raises: ModelError.
    """
    config = model.config
    layout = kv_layout(config, model.dtype, BLOCK_TOKENS)
    lengths = [sum(of_sequence) for of_sequence in zip(*CHUNKS, strict=True)]
    blocks = [-(-length // BLOCK_TOKENS) for length in lengths]
    storage = torch.full((sum(blocks) * layout.block_bytes,), 0xFF, dtype=torch.uint8, device=model.device)  # all NaN
    kv = layout.view(storage, sum(blocks))
    tables = [list(range(blocks[0])), list(range(blocks[0], sum(blocks)))]
    token_ids = [[(5 + 7 * index) % config.vocab_size for index in range(length)] for length in lengths]
    done = [0, 0]
    parts: list[list[torch.Tensor]] = [[], []]
    for counts in CHUNKS:
        chunks = [
            Chunk(index, token_ids[index][done[index] : done[index] + count], done[index], tables[index])
            for index, count in enumerate(counts)
        ]
        batch = make_batch(chunks, BLOCK_TOKENS, model.device)
        hidden = model.hidden(batch, kv)
        for index, chunk in enumerate(chunks):
            parts[index].append(hidden[batch.chunk_rows[index]])
            done[index] = chunk.end
    expected = [model.own_hidden(torch.tensor(ids, device=model.device)) for ids in token_ids]
    paged, own = torch.cat([*parts[0], *parts[1]]).float(), torch.cat(expected).float()
    error = (paged - own).norm(dim=-1) / own.norm(dim=-1).clamp_min(1e-6)  # [tokens]
    is_exact = error.max() <= MOST_EXACT if model.dtype == torch.float32 else error.mean() <= MOST_ROUNDED
    if not is_exact:
        raise ModelError(
            f"{config.family} cannot be served: on paged attention it computes other results (relative error "
            f"{error.mean():.2g}); tokens may interact outside of attention, or positions may be ignored"
        )


@contextmanager
def progress_bar(shown: bool) -> Iterator[None]:
    """Show or hide all progress bars of transformers in the body, then restore the previous setting."""
    before = transformers_logging.is_progress_bar_enabled()
    _switch_progress_bar(shown)
    try:
        yield
    finally:
        _switch_progress_bar(before)


def _switch_progress_bar(on: bool) -> None:
    switch: Any = transformers_logging.enable_progress_bar if on else transformers_logging.disable_progress_bar
    switch()
