"""Files with a model's weights, the digest that identifies them, and their size when loaded."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

from baton.engine.config.model_config import CONFIG_FILE, ModelError, read_json
from baton.engine.weights.formats import (
    MADE_WHILE_LOADING,
    SETTINGS_FILES,
    WeightFormat,
    packed_format,
    quantization_settings,
    weight_format,
)
from baton.engine.weights.gguf_file import CODED, PLAIN_DTYPES
from baton.engine.weights.names import text_name
from baton.engine.weights.weight import GROUP_INPUTS, is_quantisable
from baton.text.gguf.header import GgufTensor, TensorType, has_gguf_suffix, read_header, read_model_header
from baton.text.host.files import reading, reads
from baton.text.weight_files import has_weights, is_gguf
from baton.text.weight_files import weight_files as weight_files_of

SAMPLE_BYTES = 64 * 1024
SAMPLES_PER_FILE = 64
MAX_HEADER_BYTES = 100 * 1024 * 1024  # limit of the safetensors format
UNINFORMATIVE_FIELDS = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")


@reads(ModelError)
def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the files with the weights. Raises: ModelError."""
    return weight_files_of(folder)


@reads(ModelError)
def model_fingerprint(folder: Path) -> bytes:
    """Return a digest (32 bytes) of the configuration and a sample of the weights. Equal checkpoints have equal ones.

    Of each file, the header (names, shapes, dtypes), the size, and up to 4 MiB spread evenly over the file are hashed.
    This is cheap for any model size. The digest of another model or training run differs, but one changed weight in a
    large file may go unnoticed.
    """
    config = read_json(folder / "config.json")
    described = {key: value for key, value in config.items() if key not in UNINFORMATIVE_FIELDS}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, separators=(",", ":")).encode())
    settings = quantization_settings(folder)
    if settings is not None and not settings.source.startswith(str(folder / CONFIG_FILE)):
        digest.update(json.dumps(settings.fields, sort_keys=True).encode())
    for path in weight_files(folder):
        digest.update(_file_digest(path))
    return digest.digest()


def _file_digest(path: Path) -> bytes:
    size, start = path.stat().st_size, _header_bytes(path)
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        digest.update(file.read(start))
        stride = max((size - start) // SAMPLES_PER_FILE, SAMPLE_BYTES)
        for offset in range(start, size, stride):
            file.seek(offset)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


def _header_bytes(path: Path) -> int:
    """Return the offset of the tensor data in a file, after its header. Raises: ModelError."""
    if has_gguf_suffix(path.name):
        return read_header(path).size_bytes
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > min(path.stat().st_size, MAX_HEADER_BYTES):
        raise ModelError(f"{path}: not a safetensors file")
    return 8 + header_bytes


SCALE_BYTES = 4
GROUP_BYTES = 3  # bytes of a group's scale and zero point
NOT_PROJECTIONS = (
    *("embed_tokens", "embed_tokens_per_layer", "embeddings", "wte", "wpe", "embed_positions"),
    *("conv1d", "conv.conv", "_proj_bias"),
)
EMBEDDINGS = (
    *("embed_tokens.weight", "embeddings.weight", "token_embd.weight"),
    *("embed_tokens_per_layer.weight", "per_layer_token_embd.weight"),
)
HEADS = ("lm_head.weight", "output.weight")
WORD_BYTES = 4
PLAIN = ("F64", "F32", "F16", "BF16")  # dtypes of plain weights
CODES = ("F8_E4M3", "F8_E5M2", "I8", "U8", "I32", "U32")  # dtypes of quantised weights
WEIGHTS = (".weight", ".qweight", ".weight_packed")
STATES = " nor ".join((CONFIG_FILE, *SETTINGS_FILES))


@dataclass(frozen=True, slots=True)
class TensorShape:
    name: str
    shape: Sequence[int]

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def is_projection(self) -> bool:
        """Return whether the tensor is a weight that quantisation shrinks: of one projection, or of stacked experts."""
        module = self.name.removesuffix(".weight")
        return len(self.shape) > 1 and is_quantisable(module) and not module.endswith(NOT_PROJECTIONS)

    @property
    def is_experts(self) -> bool:
        """Return whether the tensor contains one projection's weights of all experts."""
        return len(self.shape) == 3 and self.is_projection

    def loaded_bytes(self, format: WeightFormat, number_bytes: int, group_inputs: int = GROUP_INPUTS) -> int:
        """Return the tensor's bytes in memory; not for GGUF. `number_bytes`: bytes of an unquantised number."""
        if format is WeightFormat.MXFP4 and self.is_experts:
            return self.numbers // 2 + self.numbers // GROUP_INPUTS * GROUP_BYTES
        if format in (WeightFormat.PLAIN, WeightFormat.MXFP4) or not self.is_projection:
            return self.numbers * number_bytes
        rows = self.numbers // self.shape[-1]
        if format is WeightFormat.FP8_BLOCKS:
            return self.numbers
        if format is WeightFormat.INT8:
            return self.numbers + rows * SCALE_BYTES
        if self.shape[-1] % group_inputs:
            return self.numbers * number_bytes
        if format is WeightFormat.FP8:
            return self.numbers + self.numbers // GROUP_INPUTS * SCALE_BYTES
        return self.numbers // 2 + self.numbers // group_inputs * GROUP_BYTES


class StoredTensor(NamedTuple):
    path: Path  # file
    shape: list[int]
    dtype: str  # safetensors name: F32, BF16, F8_E4M3, ...


@dataclass(frozen=True, slots=True)
class PlannedWeights:
    format: WeightFormat
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LoadedBytes:
    """Size in memory of each tensor of a checkpoint, in bytes, by name."""

    tensors: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.tensors.values())

    @property
    def embedding(self) -> int:
        return sum(size for name, size in self.tensors.items() if name.endswith(EMBEDDINGS))

    @property
    def head(self) -> int:
        """Bytes of the output head; 0 if the checkpoint has none of its own."""
        return max(self.tensors.get(name, 0) for name in HEADS)


@reads(ModelError)
def planned_weights(folder: Path, tensors: Iterable[TensorShape], quantize: str, number_bytes: int) -> PlannedWeights:
    """Return the format and size that a model's weights will have in memory. Raises: ModelError.

    `folder` needs only config.json, but for GGUF also the weights.
    """
    format = weight_format(folder, quantize)
    if format is WeightFormat.GGUF:
        return PlannedWeights(format, loaded_bytes(folder, format, number_bytes).total)
    group_inputs, packed = _stored_group_inputs(folder) or GROUP_INPUTS, packed_format(folder)
    kept = format if packed is None or packed.size_of is None else packed.size_of
    return PlannedWeights(format, sum(each.loaded_bytes(kept, number_bytes, group_inputs) for each in tensors))


@reads(ModelError)
def loaded_bytes(
    folder: Path,
    format: WeightFormat,
    number_bytes: int,
    packed: bool = False,
    name_of: Callable[[str], str | None] = str,
    expands: bool = False,
) -> LoadedBytes:
    """Return the size in memory of each tensor of a checkpoint; reads only the files' headers. Raises: ModelError.

    `packed`: whether weights are packed for a CPU's native kernels, which keep bfloat16 numbers in two bytes.
    `name_of`: returns the decoder's name of a stored tensor, None for one that is not read. `expands`: whether all
    tensors of a GGUF file become plain numbers.
    """
    files = weight_files(folder)
    if format is WeightFormat.GGUF:
        tensors = read_model_header(files[0]).used_tensors
        return LoadedBytes({name: _gguf_bytes(each, number_bytes, packed, expands) for name, each in tensors.items()})
    stored: dict[str, StoredTensor] = {}
    for path in files:
        stored |= read_safetensors_header(path)
    found = {}
    for own, tensor in stored.items():
        if (name := name_of(own)) is None:
            continue
        if format in (WeightFormat.PLAIN, *MADE_WHILE_LOADING) and tensor.dtype in CODES and name.endswith(WEIGHTS):
            raise ModelError(f"{tensor.path}: {own} is {tensor.dtype}, but neither {STATES} says how it is quantised")
        kept_bytes = _kept_bytes(own, name, stored, number_bytes, packed)
        found[name] = _safetensor_bytes(TensorShape(name, tensor.shape), format, kept_bytes)
    if HEADS[0] in found and not any(name.endswith(EMBEDDINGS) for name in found):
        found[EMBEDDINGS[0]] = found.pop(HEADS[0])  # a tied embedding, stored under the name of the head
    return LoadedBytes(found)


@reads(ModelError)
def has_head(folder: Path) -> bool:
    """Return whether the safetensors files of a checkpoint have an output head besides the embedding.

    Raises: ModelError.
    """
    if is_gguf(folder):
        return False
    names = {text_name(name) or "" for path in weight_files(folder) for name in read_safetensors_header(path)}
    return bool(names & set(HEADS)) and any(name.endswith(EMBEDDINGS) for name in names)


@reads(ModelError)
def stored_dtype(folder: Path) -> str | None:
    """Return the name in safetensors of the first plain number type in the weights; None without such weights.

    transformers chooses it if config.json has no dtype. Raises: ModelError.
    """
    if is_gguf(folder) or not has_weights(folder):
        return None
    tensors = read_safetensors_header(weight_files(folder)[0]).values()
    return next((tensor.dtype for tensor in tensors if tensor.dtype in PLAIN), None)


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """Return shape and dtype by tensor name. Raises: ModelError."""
    with reading(path, ModelError), safe_open(path, framework="pt", device="cpu") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 -- not a mapping
        return {name: StoredTensor(path, each.get_shape(), each.get_dtype()) for name, each in slices.items()}


def _kept_bytes(own: str, name: str, stored: Mapping[str, StoredTensor], number_bytes: int, packed: bool) -> int:
    """Return the bytes in memory of an element of a stored tensor: a number, or a byte or word with several codes.

    `own`: name in the checkpoint. `name`: the decoder's name. `packed`: see `loaded_bytes`.
    """
    tensor = stored[own]
    match tensor.dtype:
        case "BF16" if packed:
            return 2
        case "F8_E4M3" | "I8" if is_quantisable(name.removesuffix(".weight")):
            return number_bytes if f"{own}_zero_point" in stored else 1
        case "U8" if name.endswith((".weight", ".weight_packed")):
            return 2 * number_bytes  # two codes per byte, which are expanded
        case "I32" if name.endswith(".weight_packed"):
            is_expanded = WORD_BYTES * math.prod(tensor.shape) == _packed_codes(own, stored)
            return WORD_BYTES * number_bytes if is_expanded else WORD_BYTES
        case _:
            return number_bytes


def _packed_codes(own: str, stored: Mapping[str, StoredTensor]) -> int | None:
    """Return the number of codes in a tensor of compressed-tensors; None if the checkpoint does not state the shape."""
    name = own.removesuffix("packed") + "shape"
    if name not in stored:
        return None
    with reading(stored[name].path, ModelError), safe_open(stored[name].path, framework="pt", device="cpu") as file:
        shape: list[int] = file.get_tensor(name).tolist()
    return math.prod(shape)


def _stored_group_inputs(folder: Path) -> int | None:
    """Return the inputs per group of an AWQ or GPTQ checkpoint; None if it states none, or a row is one group."""
    settings = quantization_settings(folder)
    fields = {} if settings is None else settings.fields
    size = int(fields.get("group_size", fields.get("q_group_size")) or 0)
    return size if size > 0 else None


def _safetensor_bytes(tensor: TensorShape, format: WeightFormat, number_bytes: int) -> int:
    kind = tensor.name.rpartition(".")[2]
    if kind == "qweight":
        return tensor.numbers * WORD_BYTES
    if kind == "qzeros":
        return tensor.numbers * 2 * WORD_BYTES  # eight zero points per word, one byte each when loaded
    if kind == "g_idx":
        return 0
    if kind == "scales":
        return tensor.numbers * 2
    if kind.endswith("_blocks"):  # MXFP4: two codes per byte
        return tensor.numbers
    if kind.endswith("_scales"):
        return tensor.numbers * GROUP_BYTES
    kept = format if format in MADE_WHILE_LOADING else WeightFormat.PLAIN
    return tensor.loaded_bytes(kept, number_bytes)


def _gguf_bytes(tensor: GgufTensor, number_bytes: int, packed: bool, expands: bool) -> int:
    """Return a GGUF tensor's bytes in memory. `packed`: as the CPU's native kernels read it."""
    numbers, coded = math.prod(tensor.shape), CODED.get(tensor.type)
    if expands or len(tensor.shape) == 1 or tensor.type in PLAIN_DTYPES:
        return numbers * number_bytes
    if tensor.type is TensorType.MXFP4:
        return numbers // 2 + numbers // GROUP_INPUTS * GROUP_BYTES
    if packed:
        return numbers * number_bytes if coded is None else coded.packed_bytes(numbers)
    return numbers * number_bytes if tensor.name.endswith(EMBEDDINGS) else tensor.stored_bytes
