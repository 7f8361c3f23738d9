"""One rank's part of a model, from the whole checkpoint's files: each rank reads them all and keeps its part."""

from collections.abc import Sequence
from contextlib import ExitStack
from enum import Enum
from pathlib import Path

import torch
from tqdm import tqdm

from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import DecoderConfig, ModelError
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.linear import DenseLinear, Linear
from baton.engine.parallel.collectives import Collectives
from baton.engine.parallel.model import parallel_part
from baton.engine.parallel.shard import Shard, shard_config
from baton.engine.weights.files import weight_files
from baton.engine.weights.formats import MADE_WHILE_LOADING, WeightFormat, weight_format
from baton.engine.weights.load import CheckpointTensors, KeptAs, read_decoder, return_freed_memory
from baton.engine.weights.sources import DenseTensors, Rows


class Cut(Enum):
    OUTPUTS = "outputs"  # of queries, keys, values, gates and ups: every rank computes some of them
    INPUTS = "inputs"  # of the layers after those: every rank computes a summand of all outputs
    VOCABULARY = "vocabulary"


CUTS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3"), Cut.OUTPUTS),
    **dict.fromkeys(("o_proj", "down_proj", "w2"), Cut.INPUTS),
    "lm_head": Cut.VOCABULARY,
}


class ShardedTensors:
    """`sizes` and `inputs` are those of this rank; of the head, `sizes` is the whole vocabulary."""

    def __init__(self, tensors: DenseTensors, shard: Shard, dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._shard = shard
        self._dtype = dtype

    def has(self, name: str) -> bool:
        return self._tensors.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(name)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return self._tensors.take(name, *shape)

    def take_stored(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> torch.Tensor:
        return self._tensors.take_stored(name, dtypes, *shape)

    def linear(self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool = False) -> Linear:
        return DenseLinear(*self.take_parts(names, sizes, inputs, bias, self._dtype))

    def take_parts(
        self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, columns, own_bias = self.take_rows(names, sizes, inputs, bias, dtype)
        return weight if columns is None else weight[:, columns].clone(), own_bias

    def take_rows(
        self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool, dtype: torch.dtype
    ) -> Rows:
        shard, cuts = self._shard, {CUTS[name.rpartition(".")[2]] for name in names}
        if cuts == {Cut.INPUTS} and shard.degree > 1:
            weight, _, whole = self._tensors.take_rows(names, sizes, inputs * shard.degree, bias, dtype)
            columns = slice(shard.rank * inputs, (shard.rank + 1) * inputs)
            return Rows(weight, columns, whole if shard.rank == 0 else None)  # the bias is added once
        parts = [self._outputs(name, size, inputs, bias, dtype) for name, size in zip(names, sizes, strict=True)]
        biases = [each for _, each in parts if each is not None]
        return Rows(torch.cat([weight for weight, _ in parts]), None, torch.cat(biases) if biases else None)

    def _outputs(
        self, name: str, size: int, inputs: int, bias: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copies, so that nothing keeps the whole tensor alive."""
        shard = self._shard
        if CUTS[name.rpartition(".")[2]] is Cut.VOCABULARY:
            part, whole_size = shard.vocabulary(size), size
        else:
            part, whole_size = range(shard.rank * size, (shard.rank + 1) * size), size * shard.degree
        weight, whole = self._tensors.take_parts([name], [whole_size], inputs, bias, dtype)
        rows = slice(part.start, part.stop)
        return weight[rows].clone(), None if whole is None else whole[rows].clone()


def load_part(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    quantize: str,
    collectives: Collectives,
) -> DecoderModel:
    """As load_model of engine/weights/load.py. Raises: ModelError."""
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
