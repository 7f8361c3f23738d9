"""The layers between attentions: a gated layer, or several as experts of which each token takes a few."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from engine.lora.rows import AdapterRows
from engine.models.linear import Linear
from kernels.silu_mul import silu_mul


class FeedForward(Protocol):
    """`[tokens, hidden]` to the same, each row by itself."""

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Gated:
    """SwiGLU (arXiv:2002.05202)."""

    gate_up: Linear  # gate, then up
    down: Linear

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        return self.down(silu_mul(self.gate_up(x, adapters)), adapters)


class ExpertChoice(NamedTuple):
    """`[tokens, per_token]`."""

    weights: torch.Tensor  # float32
    chosen: torch.Tensor  # int64


def choose_experts(x: torch.Tensor, router: torch.Tensor, per_token: int, normalised: bool) -> ExpertChoice:
    """The likeliest experts of each row, and the share of its result that each makes."""
    odds = F.linear(x, router).float().softmax(-1)
    weights, chosen = odds.topk(per_token, dim=-1)
    return ExpertChoice(weights / weights.sum(-1, keepdim=True) if normalised else weights, chosen)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts (arXiv:2401.04088). Rows are grouped by expert: each does one product per step.

    Adapters do not reach inside (engine/lora/adapters.py refuses those that would).
    """

    router: torch.Tensor  # [experts, hidden]
    experts: tuple[Gated, ...]
    per_token: int
    normalised: bool

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        weights, chosen = choose_experts(x, self.router, self.per_token, self.normalised)
        result = torch.zeros_like(x)
        for index in torch.unique(chosen).tolist():
            rows, places = torch.where(chosen == index)
            output = self.experts[index](x[rows], None) * weights[rows, places, None]
            result.index_add_(0, rows, output.to(x.dtype))
        return result
