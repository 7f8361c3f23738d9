"""LoRA adapters of an offline engine, under vLLM's names. Adapters are loaded at first use and stay loaded."""

from dataclasses import dataclass
from pathlib import Path

import torch

from baton.engine.config.model_config import DecoderConfig, ModelConfig
from baton.engine.lora.adapters import AdapterSet
from baton.engine.lora.files import LoraWeights, adapter_digest, read_adapter
from baton.engine.offline.engine_args import adapter_folder

USUAL_RANK = 16  # default of vLLM's max_lora_rank


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Adapter of a request; names are vLLM's.

    An adapter is identified by its files: requests with equal files share one adapter, even under different names.
    """

    lora_name: str
    lora_int_id: int  # at least 1
    lora_path: str  # folder in PEFT's format, or a Hugging Face id

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id is {self.lora_int_id}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    name: str
    digest: str  # digest of the adapter's factors and scales
    adapter: LoraWeights | None  # None if the adapter is already loaded


@dataclass(frozen=True, slots=True)
class ChosenAdapter:
    number: int = 0  # the engine's number of the adapter, as in Chunk; 0: no adapter
    digest: str = ""


NO_ADAPTER = ChosenAdapter()


class OfflineAdapters:
    def __init__(self, max_rank: int | None) -> None:
        """Start without adapters. `max_rank`: maximum LoRA rank of an adapter; None: no maximum."""
        self.adapters = AdapterSet()
        self._max_rank = max_rank
        self._digests: dict[Path, str] = {}
        self._numbers: dict[str, int] = {}  # adapter numbers by digest

    def read(self, request: LoRARequest) -> ReadAdapter:
        """Read an adapter's files unless they were read before. Not thread-safe. Raises: ValueError, ModelError."""
        folder = adapter_folder(request.lora_path)
        digest = self._digests.get(folder) or adapter_digest(folder)
        if digest in self._numbers:
            return ReadAdapter(request.lora_name, digest, None)
        adapter = read_adapter(folder)
        if self._max_rank is not None and adapter.rank > self._max_rank:
            raise ValueError(
                f"the LoRA rank of {request.lora_name!r} is {adapter.rank}, greater than max_lora_rank {self._max_rank}"
            )
        self._digests[folder] = digest
        return ReadAdapter(request.lora_name, digest, adapter)

    def add(self, read: ReadAdapter) -> ChosenAdapter:
        """Add a new adapter to the model. Call it on the engine's thread, between steps. Raises: ModelError."""
        if read.digest not in self._numbers:
            if read.adapter is None:
                raise ValueError(f"adapter {read.name!r} has no factors: it was read for an engine that had it already")
            self._numbers[read.digest] = self.adapters.add(read.name, read.adapter)
        return ChosenAdapter(self._numbers[read.digest], read.digest)


def adapter_bytes(config: ModelConfig, rank: int, dtype: torch.dtype) -> int:
    """Return the size in bytes of an adapter of LoRA rank `rank` that changes every projection."""
    attention = _attention_sizes(config)
    feed_forward = 3 * (config.hidden_size + config.intermediate_size)
    return config.num_layers * rank * (attention + feed_forward) * dtype.itemsize


def _attention_sizes(config: ModelConfig) -> int:
    """Return the summed input and output sizes of one layer's attention projections that an adapter may change."""
    latent = config.latent if isinstance(config, DecoderConfig) else None
    if latent is None:
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return 4 * config.hidden_size + 2 * heads + 2 * kv_heads
    queries, attended = (config.num_heads * size for size in (latent.nope_dim + latent.rope_dim, latent.value_dim))
    of_ranks = 2 * (latent.query_rank or 0) + latent.rank + latent.rope_dim
    return 3 * config.hidden_size + queries + attended + of_ranks
