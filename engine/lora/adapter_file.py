"""The tensors of a PEFT folder: two factors for every module that the adapter changes. Mapped, never unpickled."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.lora.adapter_config import AdapterConfig, read_adapter_config
from engine.model_config import ModelError

WEIGHTS_FILE = "adapter_model.safetensors"
STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FACTOR_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class LowRank:
    """`x` gains `scale * (x @ down.T) @ up.T`."""

    down: torch.Tensor  # [rank, in]
    up: torch.Tensor  # [out, rank]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter on the CPU, as stored."""

    factors: Mapping[str, LowRank]  # by the module's name in the base model

    @property
    def rank(self) -> int:
        """The largest of any module."""
        return max(factors.rank for factors in self.factors.values())


def adapter_digest(folder: Path) -> str:
    """Names the adapter's computation, in hex: equal for equal factors and scales. Raises: ModelError."""
    config = read_adapter_config(folder)
    digest = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode())
    try:
        with (folder / WEIGHTS_FILE).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise ModelError(f"{folder / WEIGHTS_FILE}: {error.strerror}; only safetensors files are read") from error
    return digest.hexdigest()


def read_adapter(folder: Path) -> Adapter:
    """Raises: ModelError for anything that would make this another computation than PEFT's."""
    config = read_adapter_config(folder)
    path = folder / WEIGHTS_FILE
    stored = _read_factors(path)
    factors: dict[str, LowRank] = {}
    for module in sorted({module for module, _ in stored}):
        if (module, "A") not in stored or (module, "B") not in stored:
            raise ModelError(f"{path}: {module} has only one of lora_A and lora_B")
        factors[module] = _low_rank(path, config, module, stored[module, "A"], stored[module, "B"])
    if not factors:
        raise ModelError(f"{path}: there is no adapter in it")
    for target in config.target_modules:
        if not any(module == target or module.endswith(f".{target}") for module in factors):
            raise ModelError(f"{path}: has nothing for {target}, which adapter_config.json names in target_modules")
    return Adapter(factors)


def _read_factors(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    """By module and factor, A or B."""
    stored: dict[tuple[str, str], torch.Tensor] = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 -- not a mapping
                match = FACTOR_NAME.fullmatch(name)
                if match is None:
                    raise ModelError(f"{path}: tensor {name} is neither lora_A nor lora_B of a linear module")
                stored[match["module"], match["factor"]] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: {error}") from error
    return stored


def _low_rank(path: Path, config: AdapterConfig, module: str, down: torch.Tensor, up: torch.Tensor) -> LowRank:
    rank = config.rank_of(module)
    if down.ndim != 2 or up.ndim != 2 or len(down) != rank or up.shape[1] != rank:
        raise ModelError(
            f"{path}: {module} has factors of {list(down.shape)} and {list(up.shape)}; its rank is to be {rank}"
        )
    for tensor in (down, up):
        if tensor.dtype not in STORED_DTYPES:
            raise ModelError(f"{path}: {module} is {tensor.dtype}; supported: {', '.join(map(str, STORED_DTYPES))}")
        if not torch.isfinite(tensor).all():
            raise ModelError(f"{path}: {module} has numbers that are not finite")
    return LowRank(down, up, config.scale_of(module))
