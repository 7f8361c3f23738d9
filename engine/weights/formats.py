"""Storage formats of weights, in a checkpoint and in memory. Unknown formats are rejected."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from baton.engine.config.model_config import CONFIG_FILE, ModelError, read_json
from baton.text.host.files import reads
from baton.text.weight_files import is_gguf

FIELDS = ("quantization_config", "compression_config", "quantization")
"""Fields of config.json with the quantisation: the usual one, that of early compressed-tensors, and that of MLX."""
SETTINGS_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files with the quantisation if config.json has none, and the method of each."""
STATING = ("bits", "w_bit", "quantization", "quant_algo")
"""Fields of which such a file has one; other tools give their own files the same names."""


class WeightFormat(StrEnum):
    """Format of weights: plain, quantised while loading (int8, int4, fp8), or as stored in a quantised checkpoint."""

    PLAIN = "none"
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
    AWQ = "awq"
    GPTQ = "gptq"
    MXFP4 = "mxfp4"  # experts of gpt-oss
    GGUF = "gguf"
    FP8_BLOCKS = "fp8_blocks"  # E4M3 with a scale per block of a matrix, as in DeepSeek's checkpoints
    FP8_TENSORS = "fp8_tensors"  # E4M3 with a scale per tensor or output
    COMPRESSED = "compressed-tensors"
    BITSANDBYTES = "bitsandbytes"
    MODELOPT = "modelopt"  # NVIDIA's FP8 with a scale per tensor or output, and NVFP4


MADE_WHILE_LOADING = (WeightFormat.INT8, WeightFormat.INT4, WeightFormat.FP8)
WITH_INT8_HEAD = (WeightFormat.INT8, WeightFormat.INT4)  # formats whose head a CPU's native kernels keep in int8
GROUPED = (WeightFormat.INT4, WeightFormat.FP8, WeightFormat.MXFP4)  # formats of groups of 32 inputs
STORED_ALONE = (
    *(WeightFormat.FP8_TENSORS, WeightFormat.COMPRESSED, WeightFormat.BITSANDBYTES),
    WeightFormat.MODELOPT,
)
"""Formats whose projections are recognised one by one, see compressed.py."""
STORED = (
    *(WeightFormat.AWQ, WeightFormat.GPTQ, WeightFormat.MXFP4, WeightFormat.GGUF, WeightFormat.FP8_BLOCKS),
    *STORED_ALONE,
)
CUT = (WeightFormat.PLAIN, *MADE_WHILE_LOADING, WeightFormat.MXFP4)  # formats whose weights can be split between ranks


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """Properties of a checkpoint's quantisation that tensor shapes do not show."""

    format: WeightFormat
    zeros_less_one: bool = False  # older GPTQ files store zero points minus one
    block: tuple[int, int] = (1, 1)  # outputs and inputs per scale of FP8 in blocks
    size_of: WeightFormat | None = None  # format of about the same size in memory, for plans without tensors


@reads(ModelError, "config.json")
def weight_format(folder: Path, quantize: str) -> WeightFormat:
    """Return the format of the weights in memory. `quantize`: "none" or a WeightFormat's value.

    Raises: ModelError if the checkpoint is quantised in an unsupported format, or not as `quantize` requests.
    """
    try:
        wanted = WeightFormat(quantize)
    except ValueError as error:
        known = ", ".join(WeightFormat)
        raise ModelError(f"quantize is {quantize!r}; choose one of {known}") from error
    stored = stored_format(folder)
    if wanted in (WeightFormat.PLAIN, stored):
        return stored
    if wanted in STORED:
        raise ModelError(f"quantize is {wanted}, but the checkpoint stores its weights as {stored}")
    if stored is not WeightFormat.PLAIN:
        raise ModelError(f"quantize is {wanted}, but the checkpoint is already quantised as {stored}")
    return wanted


def stored_format(folder: Path) -> WeightFormat:
    """Return the format of a checkpoint's files. Raises: ModelError."""
    packed = packed_format(folder)
    if packed is not None:
        return packed.format
    return WeightFormat.GGUF if is_gguf(folder) else WeightFormat.PLAIN


@dataclass(frozen=True, slots=True)
class QuantSettings:
    """Quantisation that a checkpoint states."""

    source: str  # file and field
    fields: Mapping[str, Any]

    @property
    def method(self) -> Any:
        if self.fields.get("load_in_4bit") or self.fields.get("load_in_8bit"):  # takes precedence in transformers
            return WeightFormat.BITSANDBYTES.value
        return self.fields.get("quant_method", "mlx" if {"bits", "group_size"} <= self.fields.keys() else None)

    def refusal(self, reason: str) -> ModelError:
        return ModelError(f"{self.source}: {reason}")


def quantization_settings(folder: Path) -> QuantSettings | None:
    """Return the quantisation that config.json or a file next to it states; None without any. Raises: ModelError."""
    config = read_json(folder / CONFIG_FILE)
    parts = [("", config), ("text_config.", config.get("text_config"))]
    for prefix, part in parts:
        for name in FIELDS:
            if isinstance(part, dict) and (stated := part.get(name)):
                fields = stated if isinstance(stated, dict) else {"quant_method": stated}
                return QuantSettings(f"{folder / CONFIG_FILE}: {prefix}{name}", fields)
    prefix, last = next((prefix, part) for prefix, part in reversed(parts) if isinstance(part, dict))
    if last.get(FIELDS[0]) == {}:  # as for transformers, which otherwise reads the field of the text part
        return QuantSettings(f"{folder / CONFIG_FILE}: {prefix}{FIELDS[0]}", {})
    for name, method in SETTINGS_FILES.items():
        stated = read_json(folder / name) if (folder / name).is_file() else {}
        if not stated.keys().isdisjoint(STATING):
            return QuantSettings(str(folder / name), {"quant_method": "awq" if "w_bit" in stated else method, **stated})
    return None


@reads(ModelError)
def packed_format(folder: Path) -> PackedFormat | None:
    """Return the quantisation that a checkpoint states; None without any. Raises: ModelError if it is unsupported."""
    settings = quantization_settings(folder)
    if settings is None:
        return None
    match settings.method:
        case "awq":
            return _awq(settings)
        case "gptq":
            return _gptq(settings)
        case "auto-round":
            return _auto_round(settings)
        case "fp8" | "fbgemm_fp8":
            return _fp8(settings)
        case "compressed-tensors":
            return _compressed(settings)
        case "modelopt" | "modelopt_fp4":
            return _modelopt(settings)
        case "mxfp4":
            return PackedFormat(WeightFormat.MXFP4)
        case "bitsandbytes":
            expands = not settings.fields.get("load_in_8bit")
            return PackedFormat(WeightFormat.BITSANDBYTES, size_of=WeightFormat.PLAIN if expands else WeightFormat.INT8)
        case None if not settings.fields:
            raise settings.refusal("must not be empty; remove the field from a checkpoint of plain weights")
        case method:
            raise settings.refusal(
                f"method {method!r} is not supported; supported: awq, gptq and auto-round of 4 bits, mxfp4, fp8, "
                f"compressed-tensors, modelopt, bitsandbytes, GGUF files, and a plain checkpoint with --quantize "
                f"{', '.join(MADE_WHILE_LOADING)}"
            )


def _fp8(settings: QuantSettings) -> PackedFormat:
    fields = settings.fields
    block, kind, scheme = (fields.get(name) for name in ("weight_block_size", "fmt", "activation_scheme"))
    if kind not in (None, "e4m3"):
        raise settings.refusal(f"fp8 of fmt {kind!r} is not supported, only e4m3")
    if block is None:
        return PackedFormat(WeightFormat.FP8_TENSORS, size_of=WeightFormat.INT8)
    if scheme not in (None, "dynamic"):
        raise settings.refusal(f"fp8 in blocks of activation_scheme {scheme!r} is not supported, only dynamic")
    return PackedFormat(WeightFormat.FP8_BLOCKS, block=_block_of(settings, "weight_block_size", block))


def _block_of(settings: QuantSettings, name: str, block: Any) -> tuple[int, int]:
    """Return the outputs and inputs per scale that the field `name` states. Raises: ModelError."""
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(each, int) and each > 0 for each in block):
        raise settings.refusal(f"{name} {block!r} is not supported, only two integers")
    return (block[0], block[1])


MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4")


def _modelopt(settings: QuantSettings) -> PackedFormat:
    stated = settings.fields.get("quantization")
    algorithm = (stated if isinstance(stated, dict) else settings.fields).get("quant_algo")
    if algorithm is not None and algorithm not in MODELOPT_ALGORITHMS:  # None: only KV is quantised
        raise settings.refusal(
            f"quant_algo {algorithm!r} is not supported; supported: {', '.join(MODELOPT_ALGORITHMS)}"
        )
    expands = algorithm is None or "FP4" in algorithm
    return PackedFormat(WeightFormat.MODELOPT, size_of=WeightFormat.PLAIN if expands else WeightFormat.INT8)


def _check_bits(settings: QuantSettings, overrides: str = "") -> None:
    """Check that weights have 4 bits. `overrides`: field with other settings for some modules. Raises: ModelError."""
    own = settings.fields.get(overrides) or {}
    others = [each["bits"] for each in own.values() if isinstance(each, dict) and each.get("bits")]
    for bits in (settings.fields.get("bits", settings.fields.get("w_bit")), *(each for each in others if each < 16)):
        if str(bits) != "4":
            raise settings.refusal(f"{settings.method} of {bits} bits is not supported; supported: 4")


def _awq(settings: QuantSettings) -> PackedFormat:
    _check_bits(settings)
    stated = (settings.fields.get(name) for name in ("checkpoint_format", "version", "format"))
    version = str(next(filter(None, stated), "gemm")).lower()
    if version != "gemm":
        raise settings.refusal(f"awq of version {version!r} is not supported, only gemm")
    return PackedFormat(WeightFormat.AWQ)


def _gptq(settings: QuantSettings) -> PackedFormat:
    _check_bits(settings, "dynamic")
    layout = settings.fields.get("checkpoint_format") or settings.fields.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise settings.refusal(f"checkpoint_format {layout!r} is not supported, only gptq and gptq_v2")
    return PackedFormat(WeightFormat.GPTQ, zeros_less_one=layout == "gptq")


AUTO_ROUND = {
    "auto_round:auto_gptq": PackedFormat(WeightFormat.GPTQ, zeros_less_one=True),
    "auto_round:auto_awq": PackedFormat(WeightFormat.AWQ),
}


def _auto_round(settings: QuantSettings) -> PackedFormat:
    _check_bits(settings, "extra_config")
    kind, packing = settings.fields.get("data_type", "int"), settings.fields.get("packing_format")
    if kind != "int" or packing not in AUTO_ROUND:
        raise settings.refusal(
            f"auto-round of data_type {kind!r} and packing_format {packing!r} is not supported, only int and "
            f"{', '.join(AUTO_ROUND)}"
        )
    return AUTO_ROUND[packing]


FLOAT8 = {("float", 8): ("tensor", "channel", "block"), ("int", 8): ("tensor", "channel")}
SCHEMES: Mapping[str, Mapping[tuple[str, int], tuple[str, ...]]] = {
    "naive-quantized": FLOAT8,
    "float-quantized": FLOAT8,
    "int-quantized": FLOAT8 | {("int", 4): ("tensor", "channel")},
    "pack-quantized": {("int", bits): ("channel", "group") for bits in (4, 8)},
    "nvfp4-pack-quantized": {("float", 4): ("tensor_group",)},
    "mxfp4-pack-quantized": {("float", 4): ("group",)},
}
"""Formats of compressed-tensors, and for each the types and bits of weights and the parts of a matrix with a scale."""
UNCOMPRESSED, MIXED = "dense", "mixed-precision"


def _compressed(settings: QuantSettings) -> PackedFormat:
    """Return the format of compressed-tensors' weights. Raises: ModelError for what tensors alone do not show."""
    fields = settings.fields
    sparsity, transforms = (fields.get(name) or {} for name in ("sparsity_config", "transform_config"))
    if sparsity.get("format", UNCOMPRESSED) != UNCOMPRESSED:
        raise settings.refusal(f"sparsity_config of format {sparsity['format']!r} is not supported, only dense")
    if transforms.get("config_groups"):
        raise settings.refusal("transform_config is not supported: inputs are not transformed")
    stated = fields.get("format") or UNCOMPRESSED
    if stated not in (UNCOMPRESSED, MIXED, *SCHEMES):
        raise _unknown_format(settings, stated)
    groups = fields.get("config_groups") or {}
    found = [_scheme(settings, name, group, stated) for name, group in groups.items()]
    blocks = {each.block for each in found} - {(1, 1)}
    if len(blocks) > 1:
        raise settings.refusal(f"config_groups with {len(blocks)} values of block_structure are not supported")
    sizes = [each.size_of for each in found]
    size_of = next((each for each in BY_SIZE if each in sizes), WeightFormat.PLAIN)
    return PackedFormat(WeightFormat.COMPRESSED, block=next(iter(blocks), (1, 1)), size_of=size_of)


BY_SIZE = (WeightFormat.PLAIN, WeightFormat.INT8, WeightFormat.INT4)


def _scheme(settings: QuantSettings, name: str, group: Any, stated: str) -> PackedFormat:
    """Check how a group of modules is quantised. `stated`: format of groups without one. Raises: ModelError."""
    at = f"config_groups.{name}"
    if not isinstance(group, dict):
        raise settings.refusal(f"{at} {group!r} is not supported, only an object")
    if (weights := group.get("weights")) is None:
        return PackedFormat(WeightFormat.COMPRESSED)
    if "Embedding" in (group.get("targets") or ()):
        raise settings.refusal(f"{at}.targets 'Embedding' is not supported: embeddings must be plain")
    format, strategy = group.get("format") or stated, weights.get("strategy")
    if format not in SCHEMES:
        raise _unknown_format(settings, format)
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    strategies = SCHEMES[format].get((kind, bits), ())
    if strategy not in strategies and (strategy is not None or not strategies):
        raise settings.refusal(
            f"{at}.weights of type {kind!r}, num_bits {bits} and strategy {strategy!r} are not supported in {format}"
        )
    is_packed, is_kept = "pack" in format, (format, bits) == ("pack-quantized", 4)
    is_expanded = not is_kept if is_packed else kind == "int" and weights.get("symmetric") is False
    kept_as = WeightFormat.INT4 if is_packed else WeightFormat.INT8
    size_of = WeightFormat.PLAIN if is_expanded else kept_as
    if strategy != "block":
        return PackedFormat(WeightFormat.COMPRESSED, size_of=size_of)
    block = _block_of(settings, f"{at}.weights.block_structure", weights.get("block_structure"))
    return PackedFormat(WeightFormat.COMPRESSED, block=block, size_of=size_of)


def _unknown_format(settings: QuantSettings, format: Any) -> ModelError:
    return settings.refusal(
        f"compressed-tensors of format {format!r} is not supported; supported: {', '.join(SCHEMES)}, {MIXED}"
    )
