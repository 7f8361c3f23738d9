"""The GGUF container, version 2 and 3, little-endian: a file's description of its tensors, and their stored bytes.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch

from engine.model_config import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MOST_ENTRIES = 1 << 20  # tensors or metadata, to fail early on nonsense
MOST_DIMENSIONS = 4
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class TensorType(IntEnum):
    """Those of ggml's tensor types that are read here."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q5_0 = 6
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30


@dataclass(frozen=True, slots=True)
class BlockShape:
    """`numbers` consecutive numbers of a row take `size_bytes`."""

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
    """`shape` is in torch's order: rows before the numbers of a row."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file

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
    size_bytes: int  # up to where the tensors' bytes begin


def read_header(path: Path) -> GgufHeader:
    """Raises: ModelError for a file that is not GGUF, is cut short, or holds tensors of another type."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        reader = _Reader(content)
        try:
            return _header(reader, path)
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise ModelError(f"{path}: not a GGUF file, or cut short: {error}") from error


def map_file(path: Path) -> torch.Tensor:
    """Its bytes, uint8, mapped and not read."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def _header(reader: "_Reader", path: Path) -> GgufHeader:
    if reader.take(4) != MAGIC or reader.number("I") not in VERSIONS:
        raise ModelError(f"{path}: not a GGUF file of version {' or '.join(map(str, VERSIONS))}, little-endian")
    tensor_count, metadata_count = reader.number("Q"), reader.number("Q")
    if max(tensor_count, metadata_count) > MOST_ENTRIES:
        raise ModelError(f"{path}: says it has {tensor_count} tensors and {metadata_count} metadata")
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
    """Its `start` counts from where the tensors begin."""
    name, dimensions = reader.text(), reader.number("I")
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise ModelError(f"{path}: tensor {name} has {dimensions} dimensions")
    shape = tuple(reversed([reader.number("Q") for _ in range(dimensions)]))
    number, start = reader.number("I"), reader.number("Q")
    try:
        kind = TensorType(number)
    except ValueError as error:
        known = ", ".join(kind.name for kind in TensorType)
        raise ModelError(f"{path}: tensor {name} has ggml type {number}; read are {known}") from error
    if shape[-1] % BLOCKS[kind].numbers:
        raise ModelError(f"{path}: tensor {name} has rows of {shape[-1]}, no multiple of a block of {kind.name}")
    return GgufTensor(name, kind, shape, start)


class _Reader:
    """Reads values one after the other; struct.error past the end."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self.position = 0
        self.size = len(content)

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > self.size:
            raise struct.error("ends in the middle of a value")
        taken = self._content[self.position : end]
        self.position = end
        return taken

    def number(self, code: str) -> int:
        return int(struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0])

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, kind: int) -> str | int | None:
        """Texts and integers; None for arrays and other numbers, which are not needed here and only skipped."""
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
