"""From a checkpoint folder and a budget of bytes to a runner: what fits, and the error that says what would.

The storage of the pool comes from outside, since who may map it is not the engine's affair.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.kv_layout import KvLayout, kv_layout
from engine.model_config import ModelConfig, ModelError, read_model_config
from engine.runner import Runner
from engine.weights import load_model, model_fingerprint

LEAST_BLOCKS = 2  # one for a prompt, one to go on
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What a process was asked to serve. `dtype` is "auto" or a key of DTYPES."""

    folder: Path
    device: torch.device
    dtype: str
    block_tokens: int
    kv_memory_bytes: int
    max_model_len: int | None  # tokens; None: as long as the model and the memory allow


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A checkpoint that fits, before its weights are loaded."""

    options: ModelOptions
    config: ModelConfig
    dtype: torch.dtype
    layout: KvLayout
    total_blocks: int
    max_model_len: int  # tokens, prompt and answer together
    fingerprint: bytes  # 32 bytes over everything that two pools must share to exchange blocks

    @property
    def pool_bytes(self) -> int:
        return self.total_blocks * self.layout.block_bytes

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        pool = f"{self.total_blocks} KV blocks of {self.layout.block_tokens} tokens ({self.pool_bytes / 2**20:.0f} MiB)"
        at_once = self.total_blocks * self.layout.block_tokens / self.max_model_len
        return (
            f"{self.config.family} in {self.dtype_name} on {self.options.device}, {pool}, "
            f"requests of up to {self.max_model_len} tokens ({at_once:.1f} of that length at once)"
        )

    def load(self, storage: torch.Tensor, progress: bool) -> Runner:
        """Loads the weights and lays the pool over `storage` (uint8, [pool_bytes], on the options' device)."""
        model = load_model(self.options.folder, self.dtype, self.options.device, progress)
        return Runner(model, self.layout, self.layout.view(storage, self.total_blocks))


def prepare_model(options: ModelOptions) -> PreparedModel:
    """Reads the checkpoint's configuration and sizes the pool. Raises: ModelError, naming what would fit."""
    config = read_model_config(options.folder)
    dtype = resolve_dtype(options)
    layout = kv_layout(config, dtype, options.block_tokens)
    total_blocks = options.kv_memory_bytes // layout.block_bytes
    room_tokens = total_blocks * options.block_tokens
    longest = min(config.max_positions, room_tokens)
    wanted = longest if options.max_model_len is None else options.max_model_len
    if wanted > config.max_positions:
        raise ModelError(f"max-model-len is {wanted} tokens; the model has positions for {config.max_positions}")
    if total_blocks < LEAST_BLOCKS:
        raise ModelError(
            f"kv-memory of {options.kv_memory_bytes} bytes holds {total_blocks} blocks of {layout.block_bytes} bytes; "
            f"at least {LEAST_BLOCKS} are needed"
        )
    if wanted > room_tokens:
        needed_bytes = -(-wanted // options.block_tokens) * layout.block_bytes
        raise ModelError(
            f"max-model-len of {wanted} tokens needs {needed_bytes} bytes of kv-memory; "
            f"{options.kv_memory_bytes} bytes hold {room_tokens} tokens ({layout.token_bytes} bytes each)"
        )
    digest = hashlib.sha256(model_fingerprint(options.folder))
    digest.update(layout.describe().encode())
    return PreparedModel(options, config, dtype, layout, total_blocks, wanted, digest.digest())


def resolve_dtype(options: ModelOptions) -> torch.dtype:
    """The dtype asked for. "auto" is the checkpoint's own, but float32 on a CPU without bf16 arithmetic.

    Raises: ModelError for a name that is not known.
    """
    if options.dtype in DTYPES:
        return DTYPES[options.dtype]
    if options.dtype != "auto":
        raise ModelError(f"dtype is {options.dtype!r}; known are auto, {', '.join(DTYPES)}")
    if options.device.type == "cpu" and not has_bf16_arithmetic():
        return torch.float32
    stated = json.loads((options.folder / "config.json").read_text())
    name = stated.get("dtype") or stated.get("torch_dtype")
    return torch.float32 if name == "float32" else torch.bfloat16


def has_bf16_arithmetic() -> bool:
    """Whether this CPU multiplies bf16 natively; without it, float32 is both faster and more exact."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def thread_preparation(cores: frozenset[int] | None, device: torch.device, runner: Runner) -> Callable[[], None]:
    """What the engine's thread does first: stay on its cores, use as many threads as there are, warm the model."""

    def prepare() -> None:
        if cores is not None:
            os.sched_setaffinity(0, cores)
            torch.set_num_threads(len(cores))
        if device.type == "cuda":
            torch.cuda.set_device(device)  # kernels are launched on the thread's current device
        runner.warm_up()

    return prepare
