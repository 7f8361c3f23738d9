"""Which files of a folder hold a model's weights, and the digest that identifies them."""

import hashlib
import json
from pathlib import Path

from baton.engine.config.model_config import ModelError, read_json
from baton.engine.weights.formats import GGUF_SUFFIX, INDEX_FILE, SINGLE_FILE, gguf_file, is_gguf
from baton.engine.weights.gguf_file import read_header

SAMPLE_BYTES = 64 * 1024
SAMPLES_PER_FILE = 64
MAX_HEADER_BYTES = 100 * 1024 * 1024  # of safetensors, the format's own limit
UNINFORMATIVE_FIELDS = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The checkpoint's safetensors files: those that its index names, else the single one; else its GGUF file."""
    index = folder / INDEX_FILE
    if not index.exists():
        if (folder / SINGLE_FILE).is_file():
            return (folder / SINGLE_FILE,)
        if is_gguf(folder):
            return (gguf_file(folder),)
        raise ModelError(
            f"{folder}: neither {SINGLE_FILE}, {INDEX_FILE} nor a *{GGUF_SUFFIX}; only safetensors and GGUF are read"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index}: weight_map is missing")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ModelError(f"{index}: names {name!r}, which is not a file in this folder")
    return tuple(folder / name for name in names)


def model_fingerprint(folder: Path) -> bytes:
    """32 bytes that are equal for equal checkpoints, from the configuration and a sample of the weights.

    Per file: its header (names, shapes, dtypes), its size, and up to 4 MiB spread evenly over it. Cheap for any size of
    model; finds another model or another training run, not a single changed weight in a large file.
    """
    config = read_json(folder / "config.json")
    described = {key: value for key, value in config.items() if key not in UNINFORMATIVE_FIELDS}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, separators=(",", ":")).encode())
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
    """Where the numbers begin. Raises: ModelError."""
    if path.suffix == GGUF_SUFFIX:
        return read_header(path).size_bytes
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > min(path.stat().st_size, MAX_HEADER_BYTES):
        raise ModelError(f"{path}: not a safetensors file")
    return 8 + header_bytes
