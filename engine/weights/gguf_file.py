"""GGUF files, versions 2 and 3: tensor descriptions, names, and dequantisation of blocks.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and ggml-common.h for the blocks.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch

from baton.engine.config.model_config import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MOST_ENTRIES = 1 << 20  # maximum number of tensors or metadata, to reject invalid files early
MOST_DIMENSIONS = 4
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
SUB_BLOCKS = 8  # sub-blocks of 32 numbers in a block of Q4_K or Q5_K


class TensorType(IntEnum):
    """Supported tensor types of ggml."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q5_0 = 6
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30


PLAIN_TYPES = (TensorType.F32, TensorType.F16, TensorType.BF16)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Block of `numbers` consecutive numbers of a row, stored in `size_bytes` bytes."""

    numbers: int
    size_bytes: int


BLOCKS = {
    TensorType.F32: BlockShape(1, 4),
    TensorType.F16: BlockShape(1, 2),
    TensorType.BF16: BlockShape(1, 2),
    TensorType.Q4_0: BlockShape(32, 18),
    TensorType.Q5_0: BlockShape(32, 22),
    TensorType.Q8_0: BlockShape(32, 34),
    TensorType.Q4_K: BlockShape(256, 144),
    TensorType.Q5_K: BlockShape(256, 176),
    TensorType.Q6_K: BlockShape(256, 210),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Tensor description. `shape` is in torch's order: rows first."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    start: int  # byte offset in the file

    @property
    def row_bytes(self) -> int:
        block = BLOCKS[self.type]
        return self.shape[-1] // block.numbers * block.size_bytes

    @property
    def stored_bytes(self) -> int:
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    architecture: str
    tensors: dict[str, GgufTensor]
    size_bytes: int  # bytes before the first tensor


def read_header(path: Path) -> GgufHeader:
    """Read the header. Raises: ModelError if the file is not GGUF, is truncated, or has unsupported tensor types."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        reader = _Reader(content)
        try:
            return _header(reader, path)
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise ModelError(f"{path}: not a GGUF file, or cut short: {error}") from error


def map_file(path: Path) -> torch.Tensor:
    """Map the file's bytes as uint8 without reading them."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def _header(reader: "_Reader", path: Path) -> GgufHeader:
    if reader.take(4) != MAGIC or reader.number("I") not in VERSIONS:
        raise ModelError(f"{path}: not a GGUF file of version {' or '.join(map(str, VERSIONS))}, little-endian")
    tensor_count, metadata_count = reader.number("Q"), reader.number("Q")
    if max(tensor_count, metadata_count) > MOST_ENTRIES:
        raise ModelError(
            f"{path}: the header announces {tensor_count} tensors and {metadata_count} metadata; "
            f"at most {MOST_ENTRIES} of each are read"
        )
    metadata = {}
    for _ in range(metadata_count):
        key = reader.text()
        metadata[key] = reader.value(reader.number("I"))
    if int(metadata.get("split.count") or 1) > 1:
        raise ModelError(f"{path}: one part of a split model; join its parts with llama-gguf-split --merge")
    infos = [_tensor_info(reader, path) for _ in range(tensor_count)]
    alignment = int(metadata.get("general.alignment") or DEFAULT_ALIGNMENT)
    start = -(-reader.position // alignment) * alignment
    tensors = {}
    for info in infos:
        tensor = GgufTensor(info.name, info.type, info.shape, start + info.start)
        if tensor.start + tensor.stored_bytes > reader.size:
            raise ModelError(f"{path}: cut short: tensor {tensor.name} ends beyond the file")
        tensors[tensor.name] = tensor
    return GgufHeader(str(metadata.get("general.architecture")), tensors, start)


def _tensor_info(reader: "_Reader", path: Path) -> GgufTensor:
    """Read a tensor's description. Its `start` is a byte offset in the tensor data, not yet in the file."""
    name, dimensions = reader.text(), reader.number("I")
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise ModelError(f"{path}: tensor {name} has {dimensions} dimensions; supported are 1 to {MOST_DIMENSIONS}")
    shape = tuple(reversed([reader.number("Q") for _ in range(dimensions)]))
    number, start = reader.number("I"), reader.number("Q")
    try:
        kind = TensorType(number)
    except ValueError as error:
        known = ", ".join(kind.name for kind in TensorType)
        raise ModelError(f"{path}: tensor {name} has ggml type {number}; supported are {known}") from error
    if shape[-1] % BLOCKS[kind].numbers:
        raise ModelError(f"{path}: tensor {name} has rows of {shape[-1]} numbers, not complete {kind.name} blocks")
    return GgufTensor(name, kind, shape, start)


class _Reader:
    """Sequential reader of values. Raises struct.error past the end of the file."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self.position = 0
        self.size = len(content)

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > self.size:
            raise struct.error("truncated inside a value")
        taken = self._content[self.position : end]
        self.position = end
        return taken

    def number(self, code: str) -> int:
        return int(struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0])

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, kind: int) -> str | int | None:
        """Read a text or integer. Skip arrays and other numbers, which are not needed, and return None for them."""
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            self._skip_array()
            return None
        code = SCALARS[kind]
        if code in "fd":
            self.take(struct.calcsize(f"<{code}"))
            return None
        return self.number(code)

    def _skip_array(self) -> None:
        kind, count = self.number("I"), self.number("Q")
        if kind in SCALARS:
            self.take(count * struct.calcsize(f"<{SCALARS[kind]}"))
            return
        for _ in range(count):
            self.value(kind)


ARCHITECTURES = {"llama": ("llama",), "mistral": ("llama", "mistral3"), "qwen2": ("qwen2",), "qwen3": ("qwen3",)}
"""Architecture names in GGUF files, by model family."""

TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
UNUSED = {"rope_freqs.weight"}  # tensors that are not read, since config.json has the same numbers
INTERLEAVED_ARCHITECTURES = ("llama",)
INTERLEAVED_MODULES = ("self_attn.q_proj", "self_attn.k_proj")


def gguf_name(name: str) -> str | None:
    """Return the GGUF name of a tensor such as `model.layers.3.mlp.up_proj.weight`: `blk.3.ffn_up.weight`, or None."""
    module, _, kind = name.rpartition(".")
    if module in TOP:
        return f"{TOP[module]}.{kind}"
    _, _, rest = module.partition("model.layers.")
    layer, _, part = rest.partition(".")
    return f"blk.{layer}.{PARTS[part]}.{kind}" if part in PARTS else None


def is_interleaved(architecture: str, name: str) -> bool:
    """Return whether llama.cpp reordered the tensor's rows, so that the two rows of a rotated pair are adjacent."""
    return architecture in INTERLEAVED_ARCHITECTURES and name.rpartition(".")[0].endswith(INTERLEAVED_MODULES)


def halves_again(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Undo llama.cpp's reordering of rows `[heads * head_dim, ...]`: in each head, move the second row of every pair
    behind the first rows of all pairs.
    """
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def dequantise(stored: torch.Tensor, kind: TensorType) -> torch.Tensor:
    """Dequantise rows of stored bytes, uint8 `[rows, row bytes]`, to float32 `[rows, numbers]`.

    The functions in DEQUANTISERS take uint8 `[..., blocks, bytes of a block]` and return float32 `[..., blocks, numbers
    of a block]`; they may split the last dimension into sub-blocks.
    """
    blocks = stored.view(len(stored), -1, BLOCKS[kind].size_bytes)
    return DEQUANTISERS[kind](blocks).reshape(len(stored), -1)


def _plain(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks.contiguous().view(dtype).float()


def _halves(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the float16 at byte `start` of each block, as float32 [..., blocks, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor, run: int) -> torch.Tensor:
    """Unpack uint8 [..., bytes] to [..., 2 x bytes]: for every `run` bytes, all low nibbles, then all high nibbles."""
    runs = packed.unflatten(-1, (-1, 1, run))
    return torch.cat([runs & 15, runs >> 4], dim=-2).flatten(-3)


def _bits(packed: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """Split each byte into `count` numbers of `width` bits: uint8 [..., bytes] to [..., count x bytes].

    The numbers in the lowest bits of all bytes come first.
    """
    mask = (1 << width) - 1
    return torch.stack([(packed >> (width * index)) & mask for index in range(count)], dim=-2).flatten(-2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _halves(blocks, 0) * blocks[..., 2:].view(torch.int8)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _halves(blocks, 0) * (_nibbles(blocks[..., 2:], 16).float() - 8)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """Dequantise Q5_0. The fifth bits are one little-endian word: bit i belongs to number i."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = ((blocks[..., 2:6, None] >> shifts) & 1).flatten(-2)
    return _halves(blocks, 0) * ((_nibbles(blocks[..., 6:], 16) | (high << 4)).float() - 16)


def _sub_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and minima of the 8 sub-blocks of Q4_K and Q5_K, float32 [..., blocks, 8, 1].

    Scales and minima have 6 bits. The first four scales have one byte each, whose upper two bits belong to one of the
    last four scales. Minima are stored in the same way.
    """
    low, middle, last = blocks[..., 4:16].split(4, dim=-1)
    scales = torch.cat([low & 63, (last & 15) | ((low >> 2) & 48)], dim=-1)
    minima = torch.cat([middle & 63, (last >> 4) | ((middle >> 2) & 48)], dim=-1)
    return (_halves(blocks, 0) * scales)[..., None], (_halves(blocks, 2) * minima)[..., None]


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _sub_scales(blocks)
    codes: torch.Tensor = _nibbles(blocks[..., 16:], 32).unflatten(-1, (SUB_BLOCKS, -1))
    return codes * scales - minima


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _sub_scales(blocks)
    codes = _nibbles(blocks[..., 48:], 32) | (_bits(blocks[..., 16:48], 8, 1) << 4)
    spread: torch.Tensor = codes.unflatten(-1, (SUB_BLOCKS, -1))
    return spread * scales - minima


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """Dequantise Q6_K: 16 sub-blocks of 16 numbers. The upper two bits of four numbers share a byte."""
    low = _nibbles(blocks[..., :128], 64)
    high = _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 4, 2).flatten(-2)
    codes: torch.Tensor = (low | (high << 4)).unflatten(-1, (16, 16)).float() - 32
    scales = _halves(blocks, 208) * blocks[..., 192:208].view(torch.int8)
    return codes * scales[..., None]


DEQUANTISERS = {
    TensorType.F32: _plain(torch.float32),
    TensorType.F16: _plain(torch.float16),
    TensorType.BF16: _plain(torch.bfloat16),
    TensorType.Q8_0: _q8_0,
    TensorType.Q4_0: _q4_0,
    TensorType.Q5_0: _q5_0,
    TensorType.Q4_K: _q4_k,
    TensorType.Q5_K: _q5_k,
    TensorType.Q6_K: _q6_k,
}
