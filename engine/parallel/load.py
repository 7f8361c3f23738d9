"""One rank's part of a model, from the whole checkpoint's files: each rank reads them all and keeps its part."""

from contextlib import ExitStack
from pathlib import Path

import torch
from tqdm import tqdm

from engine.checkpoint_files import weight_files
from engine.config_file import read_model_config
from engine.model_config import DecoderConfig, ModelError
from engine.models.checkpoint import TensorSource, build_decoder
from engine.models.decoder import DecoderModel
from engine.models.packed import PackingTensors, packs, with_native_layers, with_onednn
from engine.models.primitive import PrimitiveChoice
from engine.parallel.collectives import Collectives
from engine.parallel.model import parallel_part
from engine.parallel.shard import shard_config
from engine.parallel.tensors import ShardedTensors
from engine.quantization.formats import MADE_WHILE_LOADING, WeightFormat, weight_format
from engine.weights import CheckpointTensors, as_kept


def load_part(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    quantize: str,
    collectives: Collectives,
    choice: PrimitiveChoice | None = None,
) -> DecoderModel:
    """As load_model of engine/weights.py. Raises: ModelError."""
    whole = read_model_config(folder)
    config = shard_config(whole, collectives.shard.degree)
    format = check_weights(folder, quantize, collectives.shard.degree)
    files = weight_files(folder)
    total = sum(file.stat().st_size for file in files)
    with ExitStack() as stack:
        bar = tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=False if progress else None)
        stack.enter_context(bar)
        stored = CheckpointTensors(files, stack, dtype, device, bar)
        kept = as_kept(ShardedTensors(stored, collectives.shard, dtype), folder, format, dtype, device)
        packing = packs(device)
        source: TensorSource = PackingTensors(kept) if packing else kept
        model = build_decoder(config, source, device)
        bar.update(total - bar.n)  # headers
        stored.check_all_taken({"lm_head.weight"} if config.tie_word_embeddings else set())
    if packing and choice is not None:
        model = with_onednn(model, choice)  # before sums come in between
    model = parallel_part(model, collectives)
    return with_native_layers(model) if packing else model


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
    """What each rank would compute. Raises: ModelError where the model cannot be computed by `degree` ranks."""
    check_weights(folder, quantize, degree)
    return shard_config(read_model_config(folder), degree)
