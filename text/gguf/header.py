"""Header of a GGUF file, versions 2 and 3: metadata and tensor descriptions.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and ggml-common.h for the blocks.
"""

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from pathlib import Path

from baton.text.host.files import FileRefused, check_fetched, reading

SUFFIX = ".gguf"
PATTERN = "*.[gG][gG][uU][fF]"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MOST_ENTRIES = 1 << 20  # maximum number of tensors or metadata, to reject invalid files early
MOST_NUMBERS = 1 << 14  # maximum length of a kept array of numbers; longer ones belong to the tokenizer
MOST_DIMENSIONS = 4
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
LAYER = re.compile(r"blk\.(\d+)\.")  # beginning of the names of a layer's tensors
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)  # llama.cpp's name of a part of a split model

Value = str | int | float | bool | tuple[int | float | bool, ...]


class TensorType(IntEnum):
    """Tensor types of ggml that hold weights. Their names are those that llama-quantize prints."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    IQ1_M = 29
    BF16 = 30
    MXFP4 = 39


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Block of `numbers` consecutive numbers of a row, stored in `size_bytes` bytes."""

    numbers: int
    size_bytes: int


BLOCKS: Mapping[TensorType, BlockShape] = {
    TensorType.F32: BlockShape(1, 4),
    TensorType.F16: BlockShape(1, 2),
    TensorType.BF16: BlockShape(1, 2),
    TensorType.Q4_0: BlockShape(32, 18),
    TensorType.Q4_1: BlockShape(32, 20),
    TensorType.Q5_0: BlockShape(32, 22),
    TensorType.Q5_1: BlockShape(32, 24),
    TensorType.Q8_0: BlockShape(32, 34),
    TensorType.IQ4_NL: BlockShape(32, 18),
    TensorType.MXFP4: BlockShape(32, 17),
    TensorType.Q2_K: BlockShape(256, 84),
    TensorType.Q3_K: BlockShape(256, 110),
    TensorType.Q4_K: BlockShape(256, 144),
    TensorType.Q5_K: BlockShape(256, 176),
    TensorType.Q6_K: BlockShape(256, 210),
    TensorType.IQ1_S: BlockShape(256, 50),
    TensorType.IQ1_M: BlockShape(256, 56),
    TensorType.IQ2_XXS: BlockShape(256, 66),
    TensorType.IQ2_XS: BlockShape(256, 74),
    TensorType.IQ2_S: BlockShape(256, 82),
    TensorType.IQ3_XXS: BlockShape(256, 98),
    TensorType.IQ3_S: BlockShape(256, 110),
    TensorType.IQ4_XS: BlockShape(256, 136),
}
UNREAD = {
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
"""Names of tensor types that are not read, for errors."""


class GgufRefused(FileRefused):
    """Error: a GGUF file is damaged, or contains what is not supported. The message names the file."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Tensor description. `shape` is in torch's order: rows first."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    path: Path  # file with the numbers
    start: int  # byte offset in the file

    @property
    def row_bytes(self) -> int:
        block = BLOCKS[self.type]
        return self.shape[-1] // block.numbers * block.size_bytes

    @property
    def stored_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Header of one file, or of all parts of a split model together.

    metadata: texts, numbers and arrays of numbers by key, without arrays of texts and without very long arrays.
    """

    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]
    size_bytes: int  # bytes before the first tensor of the first file

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    @property
    def used_tensors(self) -> dict[str, GgufTensor]:
        """Tensors without those of the layers for multi-token prediction, which follow the others."""
        count, unused = (
            self.metadata.get(f"{self.architecture}.{key}") for key in ("block_count", "nextn_predict_layers")
        )
        if not isinstance(count, int) or not isinstance(unused, int):
            return dict(self.tensors)
        predicting = range(count - unused, count)
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if (layer := LAYER.match(name)) is None or int(layer[1]) not in predicting
        }


def has_gguf_suffix(name: str) -> bool:
    return name.lower().endswith(SUFFIX)


def begins_as_gguf(path: Path) -> bool:
    """Return whether a regular file begins as a GGUF file does, whatever its name is."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return all files of the model that `path` belongs to, the first part first; usually `path` alone.

    Raises: GgufRefused if a part is missing.
    """
    named = PART.fullmatch(path.name)
    if named is None:
        return (path,)
    stem, _, count = named.groups()
    parts = tuple(path.with_name(f"{stem}-{number:05d}-of-{count}{path.suffix}") for number in range(1, int(count) + 1))
    for part in parts:
        if not part.is_file():
            raise GgufRefused(f"{path}: a part of a split model, of which {part.name} is missing")
    return parts


def read_model_header(path: Path) -> GgufHeader:
    """Read the headers of all parts of a model. Raises: GgufRefused."""
    first, *others = (read_header(part) for part in parts_of(path))
    tensors = dict(first.tensors)
    for other in others:
        tensors.update(other.tensors)
    stated = first.metadata.get("split.tensors.count")
    if stated is not None and stated != len(tensors):
        raise GgufRefused(f"{path}: its parts have {len(tensors)} tensors, but {stated} are announced")
    return GgufHeader(first.metadata, tensors, first.size_bytes)


def read_header(path: Path) -> GgufHeader:
    """Read the header of one file. Raises: GgufRefused if it is not GGUF, is truncated, or has unsupported types."""
    with reading(path, GgufRefused):
        check_fetched(path)
    if not begins_as_gguf(path):
        raise GgufRefused(f"{path}: not a GGUF file: it does not begin with {MAGIC.decode()}")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            return _header(_HeaderReader(content), path)
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise GgufRefused(f"{path}: not a GGUF file, or cut short: {error}") from error


def _header(reader: "_HeaderReader", path: Path) -> GgufHeader:
    reader.take(len(MAGIC))
    if reader.number("I") not in VERSIONS:
        raise GgufRefused(f"{path}: not a GGUF file of version {' or '.join(map(str, VERSIONS))}, little-endian")
    tensor_count, metadata_count = int(reader.number("Q")), int(reader.number("Q"))
    if max(tensor_count, metadata_count) > MOST_ENTRIES:
        raise GgufRefused(
            f"{path}: the header announces {tensor_count} tensors and {metadata_count} metadata; "
            f"at most {MOST_ENTRIES} of each are read"
        )
    metadata: dict[str, Value] = {}
    for _ in range(metadata_count):
        key = reader.text()
        value = reader.value(int(reader.number("I")))
        if value is not None:
            metadata[key] = value
    parts = metadata.get("split.count")
    if isinstance(parts, int) and parts > 1 and PART.fullmatch(path.name) is None:
        raise GgufRefused(
            f"{path}: one of {parts} parts of a split model, without a name like NAME-00001-of-00003.gguf"
        )
    found = [_tensor_info(reader, path) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment") or DEFAULT_ALIGNMENT
    if not isinstance(alignment, int) or alignment <= 0:
        raise GgufRefused(f"{path}: general.alignment {alignment!r} must be a positive integer")
    start = -(-reader.position // alignment) * alignment
    tensors = {}
    for name, kind, shape, offset in found:
        tensor = GgufTensor(name, kind, shape, path, start + offset)
        if tensor.start + tensor.stored_bytes > reader.size:
            raise GgufRefused(f"{path}: cut short: tensor {name} ends beyond the file")
        tensors[name] = tensor
    return GgufHeader(metadata, tensors, start)


def _tensor_info(reader: "_HeaderReader", path: Path) -> tuple[str, TensorType, tuple[int, ...], int]:
    """Read name, type, shape, and byte offset in the file's tensor data."""
    name, dimensions = reader.text(), int(reader.number("I"))
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise GgufRefused(f"{path}: tensor {name} has {dimensions} dimensions; supported are 1 to {MOST_DIMENSIONS}")
    shape = tuple(reversed([int(reader.number("Q")) for _ in range(dimensions)]))
    number, offset = int(reader.number("I")), int(reader.number("Q"))
    try:
        kind = TensorType(number)
    except ValueError as error:
        known = ", ".join(kind.name for kind in TensorType)
        given = UNREAD.get(number, f"number {number}")
        raise GgufRefused(f"{path}: tensor {name} has ggml type {given}; supported are {known}") from error
    if shape[-1] % BLOCKS[kind].numbers:
        raise GgufRefused(f"{path}: tensor {name} has rows of {shape[-1]} numbers, not complete {kind.name} blocks")
    return name, kind, shape, offset


class _HeaderReader:
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

    def number(self, code: str) -> int | float | bool:
        found: int | float | bool = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]
        return found

    def text(self) -> str:
        return self.take(int(self.number("Q"))).decode()

    def value(self, kind: int) -> Value | None:
        """Read a value. Skip an array of texts, arrays or very many numbers, and return None for it."""
        if kind == STRING:
            return self.text()
        return self._array() if kind == ARRAY else self.number(SCALARS[kind])

    def _array(self) -> tuple[int | float | bool, ...] | None:
        kind, count = int(self.number("I")), int(self.number("Q"))
        if kind in SCALARS:
            packed = self.take(count * struct.calcsize(f"<{SCALARS[kind]}"))
            return struct.unpack(f"<{count}{SCALARS[kind]}", packed) if count <= MOST_NUMBERS else None
        for _ in range(count):
            if kind == STRING:
                self.take(int(self.number("Q")))
            else:
                self.value(kind)
        return None
