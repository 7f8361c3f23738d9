"""The interface that the runner needs of any model."""

from typing import Protocol

import torch

from baton.engine.models.batch import Batch
from baton.engine.config.model_config import ModelConfig
from baton.kernels.types import KvPages


class Model(Protocol):
    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""

    @property
    def device(self) -> torch.device: ...

    def hidden(self, batch: Batch, kv: KvPages) -> torch.Tensor:
        """Residual stream after the last layer, `[tokens, hidden]`, one row per token of `batch`, in its order.

        Writes the keys and values of these tokens into the pool `kv`, and reads from it those that precede them.
        Calls `batch.meanwhile` before its layers, once.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 `[rows, vocab]` of any rows of `hidden()`."""
