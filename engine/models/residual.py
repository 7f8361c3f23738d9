"""The residual stream of a decoder, and the projections that read it and add to it.

Of few rows each projection is one kernel with the norm, the gate or the addition that stands beside it. Of more, a
library multiplies, and an addition waits for the norm that follows it: those two are one kernel then.
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
    weight: torch.Tensor  # [size], of the model's dtype or float32
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def after_adding(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Of `residual`, after `x` is added to it in place."""
        return add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class WholeNorms:
    """RMSNorm of all queries of a token together, and of all its keys, before they are rotated (OLMo 2)."""

    query: torch.Tensor  # [heads * head_dim], as the weight of a Norm
    key: torch.Tensor  # [kv_heads * head_dim]
    eps: float
    ranks: int = 1
    total: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums  # over the ranks that have parts of the heads

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """qkv: `[tokens, all heads]`, which is overwritten."""
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
    """Of one batch: `[tokens, hidden]`, owned, and written in place."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x
        self._waiting: torch.Tensor | None = None  # what is still to be added

    def normal(self, norm: Norm | None) -> torch.Tensor:
        """Without a norm the stream itself: to be read before anything is added."""
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
        """A projection of the normalised stream, in `out` where it is given; `gate`: of gates and their factors, which
        it then multiplies.
        """
        fused = _fused(linear, self._x, adapters) if self._waiting is None else None
        if fused is not None:
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return fused_linear(self._x, *fused, norm=weight, eps=eps, gate=gate, out=out)
        normal = self.normal(norm)
        if out is not None and isinstance(linear, DenseLinear) and linear.bias is None and gate is None:
            return torch.mm(normal, linear.weight.T, out=out)  # a copy of many logits takes as long as a layer
        made = linear(normal, adapters)
        made = made if gate is None else gate_mul(made, gate)
        return made if out is None else out.copy_(made)

    def add(
        self, x: torch.Tensor, linear: Linear, adapters: AdapterRows | None = None, norm: Norm | None = None
    ) -> None:
        """A projection of `x`, normalised if there is a norm. It is in the stream at the latest when that is read."""
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
    """What a projection multiplies with, if rows like these go through it and what is beside it in one kernel."""
    if adapters is None:
        linear = without_adapters(linear)
    if isinstance(linear, KernelLinear) and linear.column_order is not None:
        return None
    if not isinstance(linear, DenseLinear | KernelLinear) or not takes_fused(x, linear.weight):
        return None
    return _Fused(linear.weight, linear.bias)
