"""Safetensors files to a model in memory, and what identifies them. Files are mapped, never unpickled."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from engine.model_config import ModelError, read_json, read_model_config
from engine.models.checkpoint import build_decoder
from engine.models.decoder import DecoderModel
from engine.models.linear import DenseLinear, Linear

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SAMPLE_BYTES = 64 * 1024
SAMPLES_PER_FILE = 64
MAX_HEADER_BYTES = 100 * 1024 * 1024  # the format's own limit
UNINFORMATIVE_FIELDS = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")


def load_model(folder: Path, dtype: torch.dtype, device: torch.device, progress: bool) -> DecoderModel:
    """Reads the checkpoint in `folder`; raises ModelError for what it lacks or has too much of.

    A progress bar goes to stderr when that is a terminal, and with `progress` in any case.
    """
    config = read_model_config(folder)
    files = weight_files(folder)
    total = sum(file.stat().st_size for file in files)
    with ExitStack() as stack:
        bar = tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=False if progress else None)
        stack.enter_context(bar)
        source = CheckpointTensors(files, stack, dtype, device, bar)
        model = build_decoder(config, source, device)
        bar.update(total - bar.n)  # headers
        source.check_all_taken(ignore={"lm_head.weight"} if config.tie_word_embeddings else set())
    return model


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The checkpoint's safetensors files: those that its index names, else the single one."""
    index = folder / INDEX_FILE
    if not index.exists():
        if not (folder / SINGLE_FILE).is_file():
            raise ModelError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors files are read")
        return (folder / SINGLE_FILE,)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index}: weight_map is missing")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ModelError(f"{index}: names {name!r}, which is not a file in this folder")
    return tuple(folder / name for name in names)


class CheckpointTensors:
    """Tensors of open safetensors files by name, each taken at most once. The files stay open as long as `stack`."""

    def __init__(
        self, files: tuple[Path, ...], stack: ExitStack, dtype: torch.dtype, device: torch.device, bar: "tqdm[Any]"
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._bar = bar
        self._files: dict[str, Any] = {}  # tensor name -> its open file; a name is removed when taken
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file}: {error}") from error
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def take(self, name: str, *shape: int) -> torch.Tensor:
        file = self._files.pop(name, None)
        if file is None:
            raise ModelError(f"the checkpoint has no tensor {name}")
        stored: torch.Tensor = file.get_tensor(name)
        if stored.shape != shape:
            raise ModelError(f"tensor {name} is {list(stored.shape)}, config.json implies {list(shape)}")
        if stored.dtype not in STORED_DTYPES:
            raise ModelError(f"tensor {name} is {stored.dtype}; supported: {', '.join(map(str, STORED_DTYPES))}")
        self._bar.update(stored.nbytes)
        return stored.to(self._device, self._dtype)

    def linear(self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool = False) -> Linear:
        weights = [self.take(f"{name}.weight", size, inputs) for name, size in zip(names, sizes, strict=True)]
        biases = [self.take(f"{name}.bias", size) for name, size in zip(names, sizes, strict=True)] if bias else []
        return DenseLinear(_stack(weights), _stack(biases) if bias else None)

    def check_all_taken(self, ignore: set[str]) -> None:
        """A tensor that nobody asked for means another architecture: refuse rather than compute something else."""
        left = sorted(name for name in self._files.keys() - ignore if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise ModelError(f"the checkpoint has {len(left)} tensors this model does not use, among them {left[0]}")


def _stack(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def model_fingerprint(folder: Path) -> bytes:
    """32 bytes that are equal for equal checkpoints, from the configuration and a sample of the weights.

    Per file: its safetensors header (names, shapes, dtypes), its size, and up to 4 MiB spread evenly over it. Cheap for
    any size of model; finds another model or another training run, not a single changed weight in a large file.
    """
    config = read_json(folder / "config.json")
    described = {key: value for key, value in config.items() if key not in UNINFORMATIVE_FIELDS}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, separators=(",", ":")).encode())
    for path in weight_files(folder):
        digest.update(_file_digest(path))
    return digest.digest()


def _file_digest(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > min(size, MAX_HEADER_BYTES):
            raise ModelError(f"{path}: not a safetensors file")
        digest.update(file.read(header_bytes))
        start = 8 + header_bytes
        stride = max((size - start) // SAMPLES_PER_FILE, SAMPLE_BYTES)
        for offset in range(start, size, stride):
            file.seek(offset)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
