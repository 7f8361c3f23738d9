"""Storage formats of weights, in a checkpoint and in memory. Unknown formats are rejected."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from baton.engine.config.model_config import ModelError, read_json
from baton.text.gguf.header import SUFFIX as GGUF_SUFFIX
from baton.text.gguf.header import parts_of
from baton.text.host.files import reads

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


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


MADE_WHILE_LOADING = (WeightFormat.INT8, WeightFormat.INT4, WeightFormat.FP8)
WITH_INT8_HEAD = (WeightFormat.INT8, WeightFormat.INT4)  # formats whose head a CPU's native kernels keep in int8
GROUPED = (WeightFormat.INT4, WeightFormat.FP8, WeightFormat.MXFP4)  # formats of groups of 32 inputs
STORED_ALONE = (WeightFormat.FP8_TENSORS, WeightFormat.COMPRESSED, WeightFormat.BITSANDBYTES)
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
    block: tuple[int, int] = (1, 1)  # outputs and inputs per scale, for FP8_BLOCKS


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
    packed = packed_format(read_json(folder / "config.json"))
    if packed is not None:
        return packed.format
    return WeightFormat.GGUF if is_gguf(folder) else WeightFormat.PLAIN


def is_gguf(folder: Path) -> bool:
    """Return whether the weights are in a GGUF file; safetensors files take precedence."""
    if (folder / SINGLE_FILE).exists() or (folder / INDEX_FILE).exists():
        return False
    return any(folder.glob(f"*{GGUF_SUFFIX}"))


def gguf_files(folder: Path) -> tuple[Path, ...]:
    """Return the GGUF file in `folder`, or all parts of a split one. Raises: ModelError if there are several models."""
    files = sorted(folder.glob(f"*{GGUF_SUFFIX}"))
    parts = parts_of(files[0])
    if set(files) != set(parts):
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{folder}: has {len(files)} GGUF files ({names}), not one model; give the file itself")
    return parts


def quantization_fields(config: Mapping[str, Any]) -> Any:
    """Return config.json's quantization_config, which may be that of the text part; None without any."""
    text = config.get("text_config")
    return config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)


def packed_format(config: Mapping[str, Any]) -> PackedFormat | None:
    """Return the quantisation that config.json states; None without any. Raises: ModelError if it is unsupported."""
    fields = quantization_fields(config)
    if fields is None:
        return None
    method = fields.get("quant_method") if isinstance(fields, dict) else fields
    if method == "fp8" and isinstance(fields, dict):
        return (
            PackedFormat(WeightFormat.FP8_TENSORS) if fields.get("weight_block_size") is None else _fp8_blocks(fields)
        )
    if method in (WeightFormat.MXFP4, WeightFormat.BITSANDBYTES):
        return PackedFormat(WeightFormat(method))
    if method == WeightFormat.COMPRESSED and isinstance(fields, dict):
        return _compressed(fields)
    if method not in (WeightFormat.AWQ, WeightFormat.GPTQ):
        raise ModelError(
            f"config.json: quantization_config of method {method!r} is not supported; supported: awq and gptq of "
            f"4 bits, mxfp4, fp8, compressed-tensors, bitsandbytes, GGUF files, and a plain checkpoint with --quantize "
            f"{', '.join(MADE_WHILE_LOADING)}"
        )
    bits = fields.get("bits", fields.get("w_bit"))
    if str(bits) != "4":
        raise ModelError(f"config.json: quantization_config: {method} of {bits} bits is not supported; supported: 4")
    return _awq(fields) if method == WeightFormat.AWQ else _gptq(fields)


COMPRESSED_FORMATS = (
    *("dense", "naive-quantized", "int-quantized", "float-quantized", "pack-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized"),
)


def _compressed(fields: Mapping[str, Any]) -> PackedFormat:
    groups = fields.get("config_groups")
    stated = [each.get("format") for each in groups.values()] if isinstance(groups, dict) else []
    for name in (fields.get("format") or "dense", *filter(None, stated)):
        if name not in COMPRESSED_FORMATS:
            raise ModelError(
                f"config.json: quantization_config: compressed-tensors of format {name!r} is not supported; "
                f"supported: {', '.join(COMPRESSED_FORMATS)}"
            )
    sparsity = fields.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise ModelError(f"config.json: sparsity_config of format {sparsity['format']!r} is not supported, only dense")
    return PackedFormat(WeightFormat.COMPRESSED)


def _fp8_blocks(fields: Mapping[str, Any]) -> PackedFormat:
    block, kind = fields.get("weight_block_size"), fields.get("fmt", "e4m3")
    if kind != "e4m3" or fields.get("activation_scheme", "dynamic") != "dynamic":
        raise ModelError(
            f"config.json: quantization_config: fp8 of fmt {kind!r} and activation_scheme "
            f"{fields.get('activation_scheme')!r} is not supported, only e4m3 and dynamic"
        )
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(each, int) and each > 0 for each in block):
        raise ModelError(
            f"config.json: quantization_config: fp8 of weight_block_size {block!r} is not supported, only two integers"
        )
    return PackedFormat(WeightFormat.FP8_BLOCKS, block=(block[0], block[1]))


def _awq(fields: Mapping[str, Any]) -> PackedFormat:
    version = str(fields.get("checkpoint_format") or fields.get("version") or fields.get("format") or "gemm").lower()
    if version != "gemm":
        raise ModelError(f"config.json: quantization_config: awq of version {version!r} is not supported, only gemm")
    return PackedFormat(WeightFormat.AWQ)


def _gptq(fields: Mapping[str, Any]) -> PackedFormat:
    layout = fields.get("checkpoint_format") or fields.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise ModelError(
            f"config.json: quantization_config: checkpoint_format {layout!r} is not supported, only gptq and gptq_v2"
        )
    return PackedFormat(WeightFormat.GPTQ, zeros_less_one=layout == "gptq")
