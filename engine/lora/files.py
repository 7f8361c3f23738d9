"""A PEFT folder: the configuration of its adapter, and two factors for every module that it changes."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from baton.engine.config.model_config import ModelError, read_json

Value = TypeVar("Value")
CONFIG_FILE = "adapter_config.json"
DESCRIPTIVE = frozenset(
    {"task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"}
)
TRAINING_ONLY = frozenset(
    {
        "lora_dropout",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "megatron_config",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "runtime_config",
        "ensure_weight_tying",
        "fan_in_fan_out",  # of the weight that is left as it is
    }
)
"""Which modules were trained and how: the tensors show the same, or it does not matter afterwards."""
READ = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "init_lora_weights",
    }
)
HARMLESS_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base weights as they are; pissa, olora and others change them."""
NOTHING: tuple[object, ...] = (None, False, "none", [], {})
WEIGHTS_FILE = "adapter_model.safetensors"
STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FACTOR_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]  # by regular expression of the end of a module's name
    alpha_pattern: Mapping[str, float]
    target_modules: tuple[str, ...]  # ends of module names; empty where the folder gives a pattern instead

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The number that the product of the two factors is multiplied by."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Raises: ModelError, naming the field."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ModelError(f"{folder}: there is no {CONFIG_FILE}; an adapter is a folder as PEFT saves it")
    stated = read_json(path)
    _refuse_others(path, stated)
    targets = stated.get("target_modules")
    return AdapterConfig(
        rank=_positive_int(path, "r", stated.get("r")),
        alpha=_number(path, "lora_alpha", stated.get("lora_alpha")),
        use_rslora=bool(stated.get("use_rslora")),
        rank_pattern={
            key: _positive_int(path, "rank_pattern", value) for key, value in _patterns(path, stated, "rank_pattern")
        },
        alpha_pattern={
            key: _number(path, "alpha_pattern", value) for key, value in _patterns(path, stated, "alpha_pattern")
        },
        target_modules=tuple(sorted(map(str, targets))) if isinstance(targets, list) else (),
    )


def _refuse_others(path: Path, stated: Mapping[str, Any]) -> None:
    if stated.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type is {stated.get('peft_type')!r}; only LORA is supported")
    start = stated.get("init_lora_weights")
    if start not in HARMLESS_STARTS:
        raise ModelError(
            f"{path}: init_lora_weights is {start!r}, which changes the base weights; save the adapter with"
            " path_initial_model_for_weight_conversion to convert it to a plain one"
        )
    for name in sorted(stated.keys() - DESCRIPTIVE - TRAINING_ONLY - READ):
        if stated[name] not in NOTHING:
            raise ModelError(f"{path}: {name} is {stated[name]!r}; adapters with it are not supported")


def _patterns(path: Path, stated: Mapping[str, Any], field: str) -> list[tuple[str, Any]]:
    patterns = stated.get(field) or {}
    if not isinstance(patterns, dict):
        raise ModelError(f"{path}: {field} is not a mapping")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ModelError(f"{path}: {field} has {pattern!r}, which is no regular expression: {error}") from error
    return list(patterns.items())


def _by_pattern(patterns: Mapping[str, Value], module: str, otherwise: Value) -> Value:
    """The first pattern that a module's name ends in, as PEFT's get_pattern_key chooses."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise


def _positive_int(path: Path, field: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{path}: {field} is {value!r}, not a positive integer")
    return value


def _number(path: Path, field: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ModelError(f"{path}: {field} is {value!r}, not a number")
    return float(value)


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


@dataclass(frozen=True, slots=True)
class DigestedAdapter:
    """An adapter with the digest of the very files that it was read from."""

    digest: str
    adapter: Adapter


def read_named(name: str, folder: Path) -> DigestedAdapter:
    """`name`: for messages. Raises: ModelError, also where the files change meanwhile."""
    digest = adapter_digest(folder)
    adapter = read_adapter(folder)
    if adapter_digest(folder) != digest:
        raise ModelError(f"adapter {name!r} has changed while it was read")
    return DigestedAdapter(digest, adapter)


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
