"""The function that transformers' models call for attention, so that it is ours.

It is registered under a name of ours and holds no state: our `Attention` travels as a keyword argument of the model's
forward, which models with the attention interface hand down to every layer. No cache and no mask of transformers takes
part; for a name without a mask function it makes none.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

NAME = "baton"
KEYWORD = "paged"
UNSUPPORTED = {
    "s_aux": "its attention has sinks",
    "position_bias": "its attention has a bias by position",
}


class UnsupportedAttentionError(Exception):
    """A model asks for a kind of attention that paged attention does not compute."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call. query: `[tokens, heads, head_dim]`; key, value: `[tokens, kv_heads, head_dim or fewer]`."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    window: int | None
    softcap: float | None


class Attention(Protocol):
    """Computes the attention of one forward pass."""

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """`[tokens, heads, head_dim of the values]`."""


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
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: tensors are `[1, heads, tokens, head_dim]`, the result `[1, tokens, heads, head_dim]`.

    Raises: UnsupportedAttentionError.
    """
    layer = getattr(module, "layer_idx", None)
    if paged is None or layer is None:
        raise UnsupportedAttentionError("its layers do not hand keyword arguments down to attention, or have no index")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedAttentionError("its attention is not causal")
    if attention_mask is not None:
        raise UnsupportedAttentionError("it makes a mask of its own")
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
    )
    return paged(call)[None], None
