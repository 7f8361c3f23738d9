"""The layers between attentions: a gated layer, or several as experts of which each token takes a few."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from baton.engine.models.batch import AdapterRows
from baton.engine.models.linear import DenseLinear, KernelLinear, Linear
from baton.kernels.linear import expert_linear
from baton.kernels.norms import silu_mul
from baton.kernels.types import ExpertWeight, QuantisedWeight, sorted_pairs

FeedForward = Linear
"""`[tokens, hidden]` to the same, each row by itself."""


@dataclass(frozen=True, slots=True)
class Gated:
    """SwiGLU (arXiv:2002.05202)."""

    gate_up: Linear  # gate, then up
    down: Linear

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
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

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        weights, chosen = choose_experts(x, self.router, self.per_token, self.normalised)
        result = torch.zeros_like(x)
        for index in torch.unique(chosen).tolist():
            rows, places = torch.where(chosen == index)
            output = self.experts[index](x[rows], None) * weights[rows, places, None]
            result.index_add_(0, rows, output.to(x.dtype))
        return result


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """As `Experts`. All shapes follow from the number of rows, so that a step of it can be recorded."""

    router: torch.Tensor  # [experts, hidden]
    gate_up: ExpertWeight  # of each expert gate, then up
    down: ExpertWeight
    per_token: int
    normalised: bool

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        choice = choose_experts(x, self.router, self.per_token, self.normalised)
        pairs = sorted_pairs(choice.chosen, self.gate_up.experts)
        made = expert_linear(silu_mul(expert_linear(x, self.gate_up, pairs)), self.down, pairs)
        parts = made.view(len(x), self.per_token, -1).float()
        return (parts * choice.weights[:, :, None]).sum(1).to(x.dtype)


def stacked(experts: Experts) -> Experts | ExpertStack:
    """The same with its weights together; as it is where they are of a kind that no kernel reads."""
    gate_up = _together([expert.gate_up for expert in experts.experts])
    down = _together([expert.down for expert in experts.experts])
    if gate_up is None or down is None:
        return experts
    return ExpertStack(experts.router, gate_up, down, experts.per_token, experts.normalised)


def _together(linears: Sequence[Linear]) -> ExpertWeight | None:
    plain = [each.weight for each in linears if isinstance(each, DenseLinear) and each.bias is None]
    if len(plain) == len(linears):
        return ExpertWeight(torch.cat(plain), len(linears))
    read = [each.weight for each in linears if isinstance(each, KernelLinear) and _is_bare(each)]
    if len(read) < len(linears) or len({(each.data.dtype, each.scales.shape) for each in read}) > 1:
        return None
    zeros = [each.zeros for each in read if each.zeros is not None]
    data, scales = torch.cat([each.data for each in read]), torch.cat([each.scales for each in read])
    return ExpertWeight(QuantisedWeight(data, scales, torch.cat(zeros) if zeros else None), len(linears))


def _is_bare(linear: KernelLinear) -> bool:
    return linear.bias is None and linear.column_order is None
