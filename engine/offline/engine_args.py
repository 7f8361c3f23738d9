"""Options of an offline engine under vLLM's names, with their checks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, get_args

import torch

from baton.engine.load import device_named
from baton.engine.weights.formats import WeightFormat
from baton.text.host.files import FileRefused
from baton.text.model_folder import check_config, find_adapter_folder, find_model_folder
from baton.text.model_options import GPU_MEMORY_UTILIZATION, SPECULATIVE_TOKENS, KvCacheDtype
from baton.text.speculation import MOST_SPECULATIVE_TOKENS

MAX_SEQUENCES = 256
SPECULATIVE_CONFIGS = (
    '{"method": "ngram", "num_speculative_tokens": 1 to 64}, or {"method": "draft_model", "model": FOLDER} and as many'
)
QUANTIZATIONS = (None, *(format for format in WeightFormat if format is not WeightFormat.PLAIN))
KV_CACHE_DTYPES = get_args(KvCacheDtype)
STEP_TOKENS_CPU, STEP_TOKENS_CUDA = 512, 8192


class EngineOptions(TypedDict, total=False):
    """Keyword arguments of LLM and AsyncLLM; EngineArgs describes them."""

    tokenizer: str | None
    dtype: str
    seed: int
    device: str
    max_model_len: int | None
    block_size: int | None
    kv_cache_memory_bytes: int | None
    kv_memory: int | None
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int | None
    quiet: bool
    quantization: str | None
    kv_cache_dtype: str
    enable_lora: bool
    max_loras: int
    max_lora_rank: int | None
    tensor_parallel_size: int
    enforce_eager: bool
    disable_log_stats: bool
    speculative_config: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """Options of an offline engine. Raises ValueError, naming the field."""

    model: str  # a folder, or a Hugging Face id
    tokenizer: str | None = None  # folder or Hugging Face id; None: the model's tokenizer
    dtype: str = "auto"  # float32, bfloat16; auto: the checkpoint's dtype, or float32 on a CPU without bf16
    seed: int = 0  # seed from which requests without a seed derive theirs
    device: str = "auto"  # cpu, cuda, cuda:1; auto: a GPU if there is one
    max_model_len: int | None = None  # tokens of prompt plus answer; None: as many as model and memory allow
    block_size: int | None = None  # tokens; None: 32, or more if a recurrent state needs over half a block
    kv_cache_memory_bytes: int | None = None  # None: by gpu_memory_utilization, or at most 1 GiB on a CPU
    kv_memory: int | None = None  # Baton's name for kv_cache_memory_bytes
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION  # fraction of GPU memory that the engine may use
    enable_prefix_caching: bool = True
    max_num_seqs: int = MAX_SEQUENCES
    max_num_batched_tokens: int | None = None  # tokens per step; None: a default of the device
    quiet: bool = False  # print nothing on stderr at start
    quantization: str | None = None  # int8, int4, fp8: quantised while loading; awq, gptq, gguf: as in the checkpoint
    kv_cache_dtype: str = "auto"  # fp8, fp8_e4m3, fp8_e5m2, int8; auto: the same as dtype
    enable_lora: bool = False  # allow requests with lora_request
    max_loras: int = 1  # number of adapters to reserve GPU memory for; batches may use more adapters
    max_lora_rank: int | None = None  # None: no maximum, but memory is reserved for rank 16
    tensor_parallel_size: int = 1  # number of ranks, on consecutive GPUs that start at `device`
    enforce_eager: bool = False  # True: decode steps on a GPU are not recorded as CUDA graphs
    disable_log_stats: bool = True
    speculative_config: Mapping[str, Any] | None = None  # example: {"method": "ngram", "num_speculative_tokens": 8}
    """{"method": "draft_model", "model": FOLDER} drafts with a model: a folder, or a Hugging Face id."""

    def __post_init__(self) -> None:
        for name, good, wanted in (
            ("block_size", (1 if self.block_size is None else self.block_size) >= 1, "at least 1"),
            ("max_num_seqs", self.max_num_seqs >= 1, "at least 1"),
            ("max_num_batched_tokens", (self.max_num_batched_tokens or 1) >= 1, "at least 1"),
            ("gpu_memory_utilization", 0.0 < self.gpu_memory_utilization <= 1.0, "within (0, 1]"),
            ("quantization", self.quantization in QUANTIZATIONS, "None, int8, int4, fp8, awq, gptq or gguf"),
            ("kv_cache_dtype", self.kv_cache_dtype in KV_CACHE_DTYPES, f"one of {', '.join(KV_CACHE_DTYPES)}"),
            ("max_loras", self.max_loras >= 1, "at least 1"),
            ("max_lora_rank", (self.max_lora_rank or 1) >= 1, "at least 1"),
            ("tensor_parallel_size", self.tensor_parallel_size >= 1, "at least 1"),
            ("enable_lora", not self.enable_lora or self.tensor_parallel_size == 1, "False with several ranks"),
            ("speculative_config", self._knows_speculation(), SPECULATIVE_CONFIGS),
            ("kv_memory", self.kv_memory is None or self.kv_cache_memory_bytes is None, "given under one name"),
        ):
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")

    def torch_device(self) -> torch.device:
        """Return the device. Raises: ValueError if this machine or build of torch lacks it."""
        if self.device == "auto":
            return device_named("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = device_named(self.device)
        except RuntimeError as error:
            raise ValueError(f"device is {self.device!r}; it must be auto, cpu, cuda or cuda:N") from error
        if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
            raise ValueError(f"device is {self.device!r}; this machine or build of torch lacks it: use auto or cpu")
        return device

    def step_tokens(self, device: torch.device) -> int:
        return self.max_num_batched_tokens or (STEP_TOKENS_CPU if device.type == "cpu" else STEP_TOKENS_CUDA)

    @property
    def speculative_tokens(self) -> int | None:
        """Return the maximum number of drafts per sequence and step; None without speculative decoding."""
        config = self.speculative_config
        return None if config is None else config.get("num_speculative_tokens", SPECULATIVE_TOKENS)

    @property
    def draft_model(self) -> str | None:
        """Return the draft model's folder or Hugging Face id; None without a draft model."""
        return None if self.speculative_config is None else self.speculative_config.get("model")

    def _knows_speculation(self) -> bool:
        config = self.speculative_config
        if config is None:
            return True
        tokens = self.speculative_tokens
        wanted = {"ngram": {"method"}, "draft_model": {"method", "model"}}.get(config.get("method", ""))
        known = config.keys() - {"num_speculative_tokens"} == wanted and isinstance(config.get("model", ""), str)
        return known and isinstance(tokens, int) and 1 <= tokens <= MOST_SPECULATIVE_TOKENS

    @property
    def stated_kv_bytes(self) -> int | None:
        return self.kv_cache_memory_bytes if self.kv_memory is None else self.kv_memory


def model_folder(name: str, with_weights: bool = True) -> Path:
    """Return a checkpoint's folder. `name`: a folder, a GGUF file, or a Hugging Face id. Raises: ValueError."""
    try:
        return find_model_folder(name, with_weights)
    except FileRefused as error:
        raise ValueError(f"{name!r}: {error}") from error


def adapter_folder(name: str) -> Path:
    """Return a LoRA adapter's folder. `name`: a folder, or a Hugging Face id. Raises: ValueError."""
    try:
        return find_adapter_folder(name)
    except FileRefused as error:
        raise ValueError(f"{name!r}: {error}") from error


def checkpoint_folder(name: str) -> Path:
    """Return the folder of a model, as `model_folder` does, if it has a config.json. Raises: ValueError."""
    folder = model_folder(name)
    try:
        check_config(folder)
    except FileRefused as error:
        raise ValueError(str(error)) from error
    return folder
