"""A PEFT folder's configuration of its adapter. A field that this engine would compute otherwise is refused by name."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.model_config import ModelError, read_json

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
