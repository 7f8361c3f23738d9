"""Any causal language model of transformers that has its attention interface, on our pages: slower but right."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from baton.engine.config.model_config import ModelConfig
from baton.engine.models.attention import store_and_attend
from baton.engine.models.batch import Batch
from baton.engine.models.transformers_attention import KEYWORD, NAME, AttentionCall
from baton.kernels.types import KvPages, Scoring


class TransformersModel:
    """`causal` is a model of transformers whose attention is `NAME`."""

    def __init__(self, config: ModelConfig, causal: Any) -> None:
        self._config = config
        self._causal = causal
        self._head = _without_body(causal)

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._causal.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self._causal.device
        return device

    @property
    def causal(self) -> Any:
        """The model of transformers itself."""
        return self._causal

    def hidden(self, batch: Batch, kv: KvPages) -> torch.Tensor:
        """As in `Model`. To transformers the batch is one sequence, in which positions begin anew."""
        batch.meanwhile()
        output = self._causal.base_model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            **{KEYWORD: PagedAttention(batch, kv)},
        )
        hidden: torch.Tensor = output[0][0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()

    def own_hidden(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Of one sequence from its start, int64 `[tokens]`, as transformers computes it without us."""
        self._causal.set_attn_implementation("eager")
        try:
            hidden: torch.Tensor = self._causal.base_model(input_ids=token_ids[None], use_cache=False)[0][0]
        finally:
            self._causal.set_attn_implementation(NAME)
        return hidden


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Attention of one forward pass."""

    batch: Batch
    kv: KvPages

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """Values narrower than keys (latent attention, arXiv:2405.04434) are stored with zeros behind them."""
        width = call.value.shape[-1]
        value = F.pad(call.value, (0, call.key.shape[-1] - width))
        scoring = Scoring(call.scale, call.window, call.softcap)
        query, key = call.query.contiguous(), call.key.contiguous()
        return store_and_attend(query, key, value.contiguous(), self.batch, self.kv.layer(call.layer), scoring)[
            ..., :width
        ]


class _Output:
    """A body's output, as models read it: by name, or the first of a tuple. All its other fields are None."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Body(torch.nn.Module):
    """Stands where the layers stood: its output is its input."""

    @property
    def decoder(self) -> "_Body":
        return self  # some models call it directly

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Output:
        return _Output(inputs_embeds)


def _without_body(causal: Any) -> Any:
    """The same model, weights shared, with only the part after its layers: head, scaling, capping of logits."""
    head = copy.copy(causal)
    head._modules = {**causal._modules, causal.base_model_prefix: _Body()}
    return head
