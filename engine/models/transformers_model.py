"""Run causal language models of transformers on paged attention: correct, but slower than native models.

Models call an attention function that is registered with transformers and has no state. The state is in our `Attention`
object: the forward pass gets it as a keyword argument, which models pass to every layer. The cache of transformers is
off, and transformers creates no mask for an attention name without a mask function.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.pytorch_utils import Conv1D

from baton.engine.config.model_config import ModelConfig
from baton.engine.lora.adapters import StackedFactors
from baton.engine.models.attend import store_and_attend
from baton.engine.models.batch import AdapterRows, Batch
from baton.kernels.types import KvPages, Scoring

NAME = "baton"
KEYWORD = "paged"
UNSUPPORTED = {"position_bias": "its attention has a bias by position"}


class UnsupportedAttentionError(Exception):
    """Feature of a model's attention that paged attention does not compute."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's attention call. query: `[tokens, heads, head_dim]`; key, value: `[tokens, kv_heads, size]`."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # [heads]


Attention = Callable[[AttentionCall], torch.Tensor]
"""Attention of one forward pass: returns `[tokens, heads, head_dim of the values]` for each call."""


def register_attention() -> None:
    AttentionInterface.register(NAME, _attention)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    paged: Attention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for transformers: inputs `[1, heads, tokens, head_dim]`, result `[1, tokens, heads, head_dim]`.

    Raises: UnsupportedAttentionError.
    """
    layer = getattr(module, "layer_idx", None)
    if paged is None or layer is None:
        raise UnsupportedAttentionError("its layers do not pass keyword arguments to attention, or have no index")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedAttentionError("its attention is not causal")
    if attention_mask is not None:
        raise UnsupportedAttentionError("it builds its own mask")
    for name, reason in UNSUPPORTED.items():
        if others.get(name) is not None:
            raise UnsupportedAttentionError(reason)
    call = AttentionCall(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return paged(call)[None], None


class TransformersModel:
    """`Model` that runs transformers' code. `causal`: loaded model that uses the attention function NAME."""

    def __init__(self, config: ModelConfig, causal: Any) -> None:
        self.config = config
        self.causal = causal
        self.dtype: torch.dtype = causal.dtype
        self.device: torch.device = causal.device
        self._head = _without_body(causal)
        self._adapters: AdapterRows | None = None  # rows with adapters in the running forward pass
        self._tokens = 0  # number of tokens in the running forward pass

    def adaptable_modules(self) -> dict[str, StackedFactors]:
        """Return the linear modules' LoRA factors by module name, and hook the modules to apply them. Call it once."""
        body = {id(module) for module in self.causal.base_model.modules()}
        return {
            name: self._hook(module)
            for name, module in self.causal.named_modules()
            if isinstance(module, torch.nn.Linear | Conv1D) and id(module) in body and "expert" not in name
        }

    def hidden(self, batch: Batch, kv: KvPages) -> torch.Tensor:
        """Compute hidden states. The batch is passed as one sequence with all chunks' positions. Not reentrant."""
        batch.on_layers_start()
        self._adapters, self._tokens = batch.adapters, len(batch.token_ids)
        try:
            output = self.causal.base_model(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                **{KEYWORD: PagedAttention(batch, kv)},
            )
        finally:
            self._adapters = None
        hidden: torch.Tensor = output[0][0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()

    def normal(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `hidden` as float32: transformers has already applied the final norm."""
        return hidden.float()

    def own_hidden(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Compute hidden states of one sequence, int64 `[tokens]`, with transformers' own attention."""
        self.causal.set_attn_implementation("eager")
        try:
            hidden: torch.Tensor = self.causal.base_model(input_ids=token_ids[None], use_cache=False)[0][0]
        finally:
            self.causal.set_attn_implementation(NAME)
        return hidden

    def _hook(self, module: torch.nn.Linear | Conv1D) -> StackedFactors:
        weight = module.weight
        inputs, outputs = weight.shape if isinstance(module, Conv1D) else weight.shape[::-1]
        factors = StackedFactors(slice(0, outputs), (outputs, inputs), weight.dtype, weight.device)

        def add(module: torch.nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
            """Add the adapters' output in place. Input and output: `[..., size]`, with the batch's rows in order."""
            if self._adapters is None:
                return
            x, y = arguments[0].reshape(-1, inputs), output.view(-1, outputs)
            if len(x) != self._tokens:
                raise RuntimeError(
                    f"a module got {len(x)} rows, but the batch has {self._tokens}: its adapters cannot be applied"
                )
            factors.add_to(y[self._adapters.rows], x[self._adapters.rows], self._adapters)

        module.register_forward_hook(add)
        return factors


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Paged attention of one forward pass: the `Attention` that a model's layers call."""

    batch: Batch
    kv: KvPages

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """Compute attention for one layer's call. Values narrower than keys (arXiv:2405.04434) are padded."""
        width = call.value.shape[-1]
        value = F.pad(call.value, (0, call.key.shape[-1] - width))
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        scoring = Scoring(call.scale, call.window, call.softcap, sinks=sinks)
        query, key = call.query.contiguous(), call.key.contiguous()
        [rows] = self.batch.groups
        own = self.kv.layer(call.layer)
        return store_and_attend(query, key, value.contiguous(), rows, own, scoring)[..., :width]


class _Output:
    """Output of a model's body, read by name or as the first element of a tuple. All other fields are None."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Body(torch.nn.Module):
    """Replacement of a model's body that returns its input."""

    @property
    def decoder(self) -> "_Body":
        return self  # some models call `body.decoder` instead of the body

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Output:
        return _Output(inputs_embeds)


def _without_body(causal: Any) -> Any:
    """Return a copy of the model without its body, sharing its weights. It only computes logits from hidden states."""
    head = copy.copy(causal)
    head._modules = {**causal._modules, causal.base_model_prefix: _Body()}
    return head
