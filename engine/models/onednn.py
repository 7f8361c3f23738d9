"""Projections by oneDNN, which PyTorch brings: weights packed once for it, in the dtype of the activations."""

from dataclasses import dataclass

import torch

from engine.lora.rows import AdapterRows

PACKED_ROWS = 512  # of inputs that the layout is best for; any number runs


def has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@dataclass(frozen=True, slots=True)
class OnednnLinear:
    weight: torch.Tensor  # [out, in], in a layout of oneDNN's own: good for nothing but this
    bias: torch.Tensor | None  # [out], like the weight

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> "OnednnLinear":
        """`weight`: `[out, in]`, float32 or bfloat16, on a CPU. A copy."""
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
        return cls(packed, None if bias is None else bias.to(weight.dtype))

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return product
