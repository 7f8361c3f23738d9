"""One rank's part of a model, from the whole checkpoint's files: each rank reads them all and keeps its part."""

from contextlib import ExitStack
from pathlib import Path

import torch
from tqdm import tqdm

from engine.checkpoint_files import weight_files
from engine.config_file import read_model_config
from engine.freed_memory import return_freed_memory
from engine.model_config import DecoderConfig, ModelError
from engine.models.decoder import DecoderModel
from engine.parallel.collectives import Collectives
from engine.parallel.model import parallel_part
from engine.parallel.shard import shard_config
from engine.parallel.tensors import ShardedTensors
from engine.quantization.formats import MADE_WHILE_LOADING, WeightFormat, weight_format
from engine.weights import CheckpointTensors, KeptAs, read_decoder


def load_part(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    quantize: str,
    collectives: Collectives,
) -> DecoderModel:
    """As load_model of engine/weights.py. Raises: ModelError."""
    shard = collectives.shard
    whole = read_model_config(folder)
    config = shard_config(whole, shard.degree)
    format = check_weights(folder, quantize, shard.degree)
    files = weight_files(folder)
    total = sum(file.stat().st_size for file in files)
    with ExitStack() as stack:
        bar = tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=False if progress else None)
        stack.enter_context(bar)
        stored = CheckpointTensors(files, stack, dtype, device, bar)
        cut = ShardedTensors(stored, shard, dtype)
        kept_as = KeptAs(folder, format, dtype, device, packed=True)
        model = read_decoder(cut, config, kept_as, head_rows=shard.vocabulary(config.vocab_size))
        bar.update(total - bar.n)  # headers
        stored.check_all_taken({"lm_head.weight"} if config.tie_word_embeddings else set())
    return_freed_memory()
    return parallel_part(model, collectives)


def check_weights(folder: Path, quantize: str, degree: int) -> WeightFormat:
    """Raises: ModelError for weights that cannot be cut."""
    format = weight_format(folder, quantize)
    if format is not WeightFormat.PLAIN and format not in MADE_WHILE_LOADING:
        raise ModelError(f"tensor-parallel is {degree}; weights stored as {format} are read whole, on one rank")
    return format


def check_gpus(first: int, degree: int, count: int) -> None:
    """Ranks take GPUs side by side, from `first` on. Raises: ModelError."""
    if first + degree > count:
        raise ModelError(f"tensor-parallel is {degree}; from GPU {first} on there are {max(0, count - first)}")


def check_parallel(folder: Path, quantize: str, degree: int) -> DecoderConfig:
    """The configuration of each rank. Raises: ModelError where the model cannot be computed by `degree` ranks."""
    check_weights(folder, quantize, degree)
    return shard_config(read_model_config(folder), degree)
