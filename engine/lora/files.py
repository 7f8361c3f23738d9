"""PEFT folder: the configuration of an adapter, and two factors for every module that it changes."""

import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open

from baton.engine.config.model_config import ModelError, read_json
from baton.engine.lora.patterns import Patterns
from baton.text.host.files import check_file, reading, reads
from baton.text.host.memory import available_bytes

logger = logging.getLogger(__name__)
Value = TypeVar("Value")
CONFIG_FILE = "adapter_config.json"
DESCRIPTIVE = frozenset(
    {"task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"}
)
TRAINING_ONLY = frozenset(
    {
        "lora_dropout",
        "megatron_config",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "runtime_config",
        "ensure_weight_tying",
        "fan_in_fan_out",  # layout of the base weight, not of the factors
    }
)
"""Fields that matter only during training."""
READ = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "init_lora_weights",
    }
)
HARMLESS_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that keep the base weights; pissa, olora and others change them."""
MAX_NUMBER = 1e30  # far below the maximum of float32
NOTHING: tuple[object, ...] = (None, False, "none", [], {})
ALL_LINEAR, ALL_BUT_HEAD = "all-linear", r"(?!(?:.*\.)?lm_head$).+"
ANY_LAYERS = r".*?\.[^.]*"
WEIGHTS_FILE = "adapter_model.safetensors"
STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DIGESTED = ("rank", "alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules")
OTHER_NAME = re.compile(r"base_model\.model\.(?P<module>.+?)\.lora_.+")
FACTOR_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class NarrowedTargets:
    """Choice of the modules that PEFT adapts, if a list of name endings cannot express it."""

    pattern: str | None = None  # regular expression of complete module names, used instead of target_modules
    exclude_modules: str | tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = (ANY_LAYERS,)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]  # LoRA rank by regular expression of a module name's end
    alpha_pattern: Mapping[str, float]
    target_modules: tuple[str, ...]  # endings of module names; empty if the folder has a pattern
    narrowed: NarrowedTargets | None = None
    patterns: Patterns = field(default_factory=Patterns, compare=False, repr=False)

    def rank_of(self, module: str) -> int:
        return self._by_pattern("rank_pattern", self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor by which the product of a module's two matrices is multiplied."""
        rank = self.rank_of(module)
        alpha = self._by_pattern("alpha_pattern", self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, module: str) -> bool:
        """Return whether PEFT adapts a module; tensors of other modules are ignored."""
        narrowed = self.narrowed or NarrowedTargets()
        if self._is_named("exclude_modules", narrowed.exclude_modules, module):
            return False
        if isinstance(narrowed.pattern, str):
            return self.patterns.match("target_modules", narrowed.pattern, module) is not None
        if module in self.target_modules:  # a complete name is in no other layer
            return True
        if self.target_modules and not self._is_named("target_modules", self.target_modules, module):
            return False
        return narrowed.layers_to_transform is None or self._layer_of(narrowed, module) in narrowed.layers_to_transform

    def _is_named(self, name: str, ends: str | tuple[str, ...], module: str) -> bool:
        """Return whether a module matches `ends`: endings of module names, or an expression for complete names."""
        if isinstance(ends, str):
            return self.patterns.match(name, ends, module) is not None
        return any(module == end or module.endswith(f".{end}") for end in ends)

    def _layer_of(self, narrowed: NarrowedTargets, module: str) -> int | None:
        """Return the first number behind a layers pattern: a later one may be an expert's. None without a match."""
        for pattern in narrowed.layers_pattern:
            found = self.patterns.match("layers_pattern", rf"{pattern}\.(?P<index>\d+)\..*", module)
            if found is not None:
                return int(found["index"])
        return None

    def _by_pattern(self, name: str, patterns: Mapping[str, Value], module: str, otherwise: Value) -> Value:
        """Return the value of the first pattern that matches the end of a module name, like PEFT's get_pattern_key."""
        for pattern, value in patterns.items():
            if self.patterns.match(name, _at_end(pattern), module):
                return value
        return otherwise


@reads(ModelError, CONFIG_FILE)
def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read an adapter's configuration file. Raises: ModelError, naming the field."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ModelError(f"{folder}: there is no {CONFIG_FILE}; an adapter is a folder as PEFT saves it")
    stated = read_json(path)
    _refuse_others(path, stated)
    targets = stated.get("target_modules")
    read = AdapterConfig(
        rank=_positive_int(path, "r", stated.get("r")),
        alpha=_number(path, "lora_alpha", stated.get("lora_alpha")),
        use_rslora=bool(stated.get("use_rslora")),
        rank_pattern={
            key: _positive_int(path, "rank_pattern", value) for key, value in _patterns(path, stated, "rank_pattern")
        },
        alpha_pattern={
            key: _number(path, "alpha_pattern", value) for key, value in _patterns(path, stated, "alpha_pattern")
        },
        target_modules=tuple(sorted(_names(path, "target_modules", targets))) if isinstance(targets, list) else (),
        narrowed=_narrowed(path, stated),
        patterns=Patterns(str(path)),
    )
    with reading(path, ModelError):
        for name in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(read, name):
                read.patterns.compile(name, _at_end(pattern))
    return read


def _narrowed(path: Path, stated: Mapping[str, Any]) -> NarrowedTargets | None:
    targets, excluded, layers = (
        stated.get(name) for name in ("target_modules", "exclude_modules", "layers_to_transform")
    )
    pattern = targets if isinstance(targets, str) else None
    if pattern is not None and pattern.lower() == ALL_LINEAR:
        pattern = ALL_BUT_HEAD
    if pattern is None and not excluded and layers in (None, []):
        return None
    of_layers = stated.get("layers_pattern")
    if isinstance(layers, int):
        layers = [layers]
    if layers is not None and not (isinstance(layers, list) and all(type(each) is int for each in layers)):
        raise ModelError(f"{path}: layers_to_transform is {layers!r}, not numbers of layers")
    return NarrowedTargets(
        pattern,
        excluded if isinstance(excluded, str) else _names(path, "exclude_modules", excluded or []),
        tuple(layers) if layers else None,
        _layers_patterns(path, of_layers),
    )


def _layers_patterns(path: Path, stated: object) -> tuple[str, ...]:
    """Return expressions of all that precedes a layer's number in a module name."""
    if not stated:
        return (ANY_LAYERS,)
    named = (stated,) if isinstance(stated, str) else _names(path, "layers_pattern", stated)
    return tuple(rf"(?:.*?\.)?{each}" for each in named)


def _names(path: Path, name: str, listed: object) -> tuple[str, ...]:
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise ModelError(f"{path}: {name} is {listed!r}, not a list of names")
    return tuple(listed)


def _at_end(pattern: str) -> str:
    """Return a pattern for complete module names whose end matches `pattern`."""
    return rf"(.*\.)?({pattern})"


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
    return list(patterns.items())


def _positive_int(path: Path, field: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{path}: {field} is {value!r}, not a positive integer")
    return value


def _number(path: Path, field: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= MAX_NUMBER:
        raise ModelError(f"{path}: {field} is {value!r}, not a number up to {MAX_NUMBER:g}")
    return float(value)


@dataclass(frozen=True, slots=True)
class LowRank:
    """Factors of one module: `x` gains `scale * (x @ down.T) @ up.T`."""

    down: torch.Tensor  # [rank, in]
    up: torch.Tensor  # [out, rank]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Adapter in host memory, with factors as stored in its files."""

    factors: Mapping[str, LowRank]  # by module name in the base model

    @property
    def rank(self) -> int:
        """Largest LoRA rank of any module."""
        return max(factors.rank for factors in self.factors.values())


@reads(ModelError, WEIGHTS_FILE)
def adapter_digest(folder: Path) -> str:
    """Return a hex digest that is equal for adapters with equal factors and scales. Raises: ModelError."""
    config = read_adapter_config(folder)
    described = {name: getattr(config, name) for name in DIGESTED}
    if config.narrowed is not None:
        described["narrowed"] = asdict(config.narrowed)
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    if not (folder / WEIGHTS_FILE).is_file():
        raise ModelError(f"{folder / WEIGHTS_FILE} is missing; only safetensors files are read")
    size_bytes, free_bytes = check_file(folder / WEIGHTS_FILE), available_bytes()
    if size_bytes > free_bytes:
        raise ModelError(f"{folder / WEIGHTS_FILE}: has {size_bytes} bytes; {free_bytes} bytes of memory are free")
    with (folder / WEIGHTS_FILE).open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class DigestedAdapter:
    """Adapter with the digest of the files that it was read from."""

    digest: str
    adapter: LoraWeights


def read_named(name: str, folder: Path) -> DigestedAdapter:
    """Read an adapter and its digest. `name` is for messages. Raises: ModelError, also if files change in between."""
    digest = adapter_digest(folder)
    adapter = read_adapter(folder)
    if adapter_digest(folder) != digest:
        raise ModelError(f"adapter {name!r} changed while it was read; retry")
    return DigestedAdapter(digest, adapter)


@reads(ModelError, WEIGHTS_FILE)
def read_adapter(folder: Path) -> LoraWeights:
    """Read an adapter. Raises: ModelError for anything that PEFT would compute differently."""
    config = read_adapter_config(folder)
    path = folder / WEIGHTS_FILE
    stored = _read_factors(path, config)
    factors: dict[str, LowRank] = {}
    for module in sorted({module for module, _ in stored}):
        if (module, "A") not in stored or (module, "B") not in stored:
            raise ModelError(f"{path}: {module} has only one of lora_A and lora_B")
        factors[module] = _low_rank(path, config, module, stored[module, "A"], stored[module, "B"])
    if not factors:
        raise ModelError(f"{path}: there is no adapter in it for the modules that {CONFIG_FILE} targets")
    for target in config.target_modules if config.narrowed is None else ():
        if not any(module == target or module.endswith(f".{target}") for module in factors):
            raise ModelError(f"{path}: has nothing for {target}, which adapter_config.json names in target_modules")
    return LoraWeights(factors)


def _read_factors(path: Path, config: AdapterConfig) -> dict[tuple[str, str], torch.Tensor]:
    """Return the LoRA tensors of targeted modules, by module and factor (A or B)."""
    stored: dict[tuple[str, str], torch.Tensor] = {}
    left_aside = set[str]()
    with safe_open(path, framework="pt", device="cpu") as file:
        for name in file.keys():  # noqa: SIM118 -- not a mapping
            factor = FACTOR_NAME.fullmatch(name)
            match = factor or OTHER_NAME.fullmatch(name)
            if match is not None and not config.targets(match["module"]):
                left_aside.add(match["module"])
            elif factor is None:
                raise ModelError(f"{path}: tensor {name} is neither lora_A nor lora_B of a linear module")
            else:
                stored[factor["module"], factor["factor"]] = file.get_tensor(name)
    if left_aside:
        named = f"{len(left_aside)} modules that {CONFIG_FILE} does not target, among them {min(left_aside)}"
        logger.warning("%s: ignoring the tensors of %s", path, named)
    return stored


def _low_rank(path: Path, config: AdapterConfig, module: str, down: torch.Tensor, up: torch.Tensor) -> LowRank:
    rank = config.rank_of(module)
    if down.ndim != 2 or up.ndim != 2 or len(down) != rank or up.shape[1] != rank:
        raise ModelError(
            f"{path}: {module} has factors of {list(down.shape)} and {list(up.shape)}; its rank must be {rank}"
        )
    for tensor in (down, up):
        if tensor.dtype not in STORED_DTYPES:
            raise ModelError(f"{path}: {module} is {tensor.dtype}; supported: {', '.join(map(str, STORED_DTYPES))}")
        if not torch.isfinite(tensor).all():
            raise ModelError(f"{path}: {module} has numbers that are not finite")
    scale = config.scale_of(module)
    if not torch.isfinite(up.float() * scale).all():
        raise ModelError(f"{path}: {module} times lora_alpha over r, {scale:g}, has numbers that are not finite")
    return LowRank(down, up, scale)
