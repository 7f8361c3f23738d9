"""The residual stream of a decoder, and the projections that read it and add to it.

Of few rows each projection is one kernel with the norm, the gate or the addition that stands beside it. Of more, a
library multiplies, and an addition waits for the norm that follows it: those two are one kernel then.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from baton.engine.lora.adapters import AdaptedLinear
from baton.engine.models.batch import AdapterRows
from baton.engine.models.linear import DenseLinear, KernelLinear, Linear
from baton.kernels.linear import fused_linear, takes_fused
from baton.kernels.norms import add_rms_norm, rms_norm, silu_mul
from baton.kernels.types import QuantisedWeight


@dataclass(frozen=True, slots=True)
class Norm:
    weight: torch.Tensor  # [size]
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def after_adding(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Of `residual`, after `x` is added to it in place."""
        return add_rms_norm(x, residual, self.weight, self.eps)


class Stream:
    """Of one batch: `[tokens, hidden]`, owned, and written in place."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x
        self._waiting: torch.Tensor | None = None  # what is still to be added

    def normal(self, norm: Norm) -> torch.Tensor:
        waiting, self._waiting = self._waiting, None
        return norm(self._x) if waiting is None else norm.after_adding(waiting, self._x)

    def through(
        self,
        norm: Norm,
        linear: Linear,
        adapters: AdapterRows | None = None,
        is_gated: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A projection of the normalised stream, in `out` where it is given; `is_gated`: of gates and their factors,
        which it then multiplies.
        """
        fused = _fused(linear, self._x, adapters) if self._waiting is None else None
        if fused is not None:
            return fused_linear(self._x, *fused, norm=norm.weight, eps=norm.eps, is_gated=is_gated, out=out)
        normal = self.normal(norm)
        if out is not None and isinstance(linear, DenseLinear) and linear.bias is None and not is_gated:
            return torch.mm(normal, linear.weight.T, out=out)  # a copy of many logits takes as long as a layer
        made = linear(normal, adapters)
        made = silu_mul(made) if is_gated else made
        return made if out is None else out.copy_(made)

    def add(self, x: torch.Tensor, linear: Linear, adapters: AdapterRows | None = None) -> None:
        """A projection of `x`. It is in the stream at the latest when that is read."""
        fused = _fused(linear, x, adapters)
        if fused is None:
            self._waiting = linear(x, adapters)
        else:
            fused_linear(x, *fused, out=self._x, adds=True)

    def end(self) -> torch.Tensor:
        if self._waiting is not None:
            self._x.add_(self._waiting)
        return self._x


class _Fused(NamedTuple):
    weight: torch.Tensor | QuantisedWeight
    bias: torch.Tensor | None


def _fused(linear: Linear, x: torch.Tensor, adapters: AdapterRows | None) -> _Fused | None:
    """What a projection multiplies with, if rows like these go through it and what is beside it in one kernel."""
    if isinstance(linear, AdaptedLinear) and adapters is None:
        linear = linear.base
    if isinstance(linear, KernelLinear) and linear.column_order is not None:
        return None
    if not isinstance(linear, DenseLinear | KernelLinear) or not takes_fused(x, linear.weight):
        return None
    return _Fused(linear.weight, linear.bias)
