"""Adapters on a model of transformers: its linear modules stay; hooks add the output of each row's adapter."""

from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from baton.engine.config.model_config import ModelConfig
from baton.engine.lora.adapters import StackedFactors
from baton.engine.models.batch import AdapterRows, Batch, Model
from baton.kernels.types import KvPages


class HookedModel:
    """A `Model` of which `causal`, of transformers, does the work. One forward pass at a time."""

    def __init__(self, model: Model, causal: torch.nn.Module) -> None:
        self._model = model
        self._adapters: AdapterRows | None = None  # of the forward pass that runs
        self._tokens = 0  # likewise
        self.modules: dict[str, StackedFactors] = {}
        body = {id(module) for module in causal.base_model.modules()}  # type: ignore[union-attr]
        for name, module in causal.named_modules():
            if isinstance(module, torch.nn.Linear | Conv1D) and id(module) in body and "expert" not in name:
                self.modules[name] = self._hook(module)

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    @property
    def device(self) -> torch.device:
        return self._model.device

    def hidden(self, batch: Batch, kv: KvPages) -> torch.Tensor:
        self._adapters, self._tokens = batch.adapters, len(batch.token_ids)
        try:
            return self._model.hidden(batch, kv)
        finally:
            self._adapters = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)

    def _hook(self, module: torch.nn.Linear | Conv1D) -> StackedFactors:
        weight = module.weight
        inputs, outputs = weight.shape if isinstance(module, Conv1D) else weight.shape[::-1]
        factors = StackedFactors(slice(0, outputs), inputs, weight.dtype, weight.device)

        def add(module: torch.nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
            """Input and output are `[..., size]`, the rows of the batch in order."""
            if self._adapters is None:
                return
            x, y = arguments[0].reshape(-1, inputs), output.view(-1, outputs)
            if len(x) != self._tokens:
                raise RuntimeError(f"a module was given {len(x)} rows of a batch of {self._tokens}")
            factors.add_to(y[self._adapters.rows], x[self._adapters.rows], self._adapters)

        module.register_forward_hook(add)
        return factors
