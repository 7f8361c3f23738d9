"""Residual stream of a decoder, and projections that read it and add to it.

For few rows, one kernel computes a projection with its norm, gate or addition. For more rows, a library multiplies,
and an addition is deferred to the following norm: one kernel computes both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from baton.engine.lora.adapters import without_adapters
from baton.engine.models.batch import AdapterRows
from baton.engine.models.linear import DenseLinear, KernelLinear, Linear
from baton.kernels.linear import fused_linear, takes_fused
from baton.kernels.norms import add_rms_norm, gate_mul, rms_norm
from baton.kernels.types import Gate, QuantisedWeight


@dataclass(frozen=True, slots=True)
class Norm:
    weight: torch.Tensor  # [size], in the model's dtype or float32
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def after_adding(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add `x` to `residual` in place, and return the normalised residual."""
        return add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class WholeNorms:
    """RMSNorm of a token's queries over all heads together, and likewise of its keys, before rotation (OLMo 2)."""

    query: torch.Tensor  # [heads * head_dim], like the weight of a Norm
    key: torch.Tensor  # [kv_heads * head_dim]
    eps: float
    ranks: int = 1
    total: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums  # adds up the sums of all ranks

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """Normalise qkv, `[tokens, all heads]`, in place."""
        sizes = (len(self.query), len(self.key), qkv.shape[1] - len(self.query) - len(self.key))
        query, key, _ = qkv.split(sizes, dim=1)
        if self.ranks == 1:
            query.copy_(rms_norm(query, self.query, self.eps))
            key.copy_(rms_norm(key, self.key, self.eps))
            return qkv
        wide = (query.float(), key.float())
        sums = self.total(torch.stack([part.square().sum(1) for part in wide], dim=1))
        for part, numbers, weight, column in zip((query, key), wide, (self.query, self.key), sums.T, strict=True):
            inverse = torch.rsqrt(column / (part.shape[1] * self.ranks) + self.eps)[:, None]
            part.copy_((numbers * inverse).to(weight.dtype) * weight)
        return qkv


class Stream:
    """Residual stream of one batch: `[tokens, hidden]`, owned and changed in place."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x
        self._waiting: torch.Tensor | None = None  # output whose addition to the stream is deferred

    def normal(self, norm: Norm | None) -> torch.Tensor:
        """Return the normalised stream. Without a norm, return the stream itself: the next addition changes it."""
        if norm is None:
            return self.end()
        waiting, self._waiting = self._waiting, None
        return norm(self._x) if waiting is None else norm.after_adding(waiting, self._x)

    def through(
        self,
        norm: Norm | None,
        linear: Linear,
        adapters: AdapterRows | None = None,
        gate: Gate | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Project the normalised stream, into `out` if given. `gate`: apply it to the two halves of the output."""
        fused = _fused(linear, self._x, adapters) if self._waiting is None else None
        if fused is not None:
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return fused_linear(self._x, *fused, norm=weight, eps=eps, gate=gate, out=out)
        normal = self.normal(norm)
        if out is not None and isinstance(linear, DenseLinear) and linear.bias is None and gate is None:
            return torch.mm(normal, linear.weight.T, out=out)  # no copy: copying many logits is as slow as a layer
        made = linear(normal, adapters)
        made = made if gate is None else gate_mul(made, gate)
        return made if out is None else out.copy_(made)

    def add(
        self, x: torch.Tensor, linear: Linear, adapters: AdapterRows | None = None, norm: Norm | None = None
    ) -> None:
        """Add a projection of `x` to the stream. `norm`: norm of the projection's output, if any."""
        fused = _fused(linear, x, adapters) if norm is None else None
        if fused is None:
            made = linear(x, adapters)
            self._waiting = made if norm is None else norm(made)
        else:
            fused_linear(x, *fused, out=self._x, adds=True)

    def end(self) -> torch.Tensor:
        if self._waiting is not None:
            self._x.add_(self._waiting)
            self._waiting = None
        return self._x


class _Fused(NamedTuple):
    weight: torch.Tensor | QuantisedWeight
    bias: torch.Tensor | None


def _fused(linear: Linear, x: torch.Tensor, adapters: AdapterRows | None) -> _Fused | None:
    """Return the weight and bias of a projection if a fused kernel can compute it for `x`, else None."""
    if adapters is None:
        linear = without_adapters(linear)
    if isinstance(linear, KernelLinear) and linear.column_order is not None:
        return None
    if not isinstance(linear, DenseLinear | KernelLinear) or not takes_fused(x, linear.weight):
        return None
    return _Fused(linear.weight, linear.bias)
