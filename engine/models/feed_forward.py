"""The layers between attentions: a gated layer, or several as experts of which each token takes a few."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from baton.engine.config.model_config import Odds, Routing
from baton.engine.models.batch import AdapterRows
from baton.engine.models.linear import DenseLinear, KernelLinear, Linear
from baton.kernels.linear import expert_linear
from baton.kernels.norms import gate_mul
from baton.kernels.types import ExpertWeight, Gate, QuantisedWeight, sorted_pairs

FeedForward = Linear
"""`[tokens, hidden]` to the same, each row by itself."""


@dataclass(frozen=True, slots=True)
class Gated:
    """SwiGLU (arXiv:2002.05202)."""

    gate_up: Linear  # gate, then up
    down: Linear
    gate: Gate = Gate.SILU

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        return self.down(gate_mul(self.gate_up(x, adapters), self.gate), adapters)


class ExpertChoice(NamedTuple):
    """`[tokens, per_token]`."""

    weights: torch.Tensor  # float32
    chosen: torch.Tensor  # int64


@dataclass(frozen=True, slots=True)
class Router:
    linear: Linear  # to a number of each expert
    routing: Routing
    correction: torch.Tensor | None = None  # float32 [experts]

    def __call__(self, x: torch.Tensor) -> ExpertChoice:
        """The likeliest experts of each row, and the share of its result that each makes."""
        routing = self.routing
        numbers = self.linear(x.float() if routing.wide else x).float()
        odds = numbers.softmax(-1) if routing.odds is Odds.SOFTMAX else _sigmoid(numbers)
        judged = odds if self.correction is None else odds + self.correction
        if routing.groups > routing.kept_groups:
            judged = self._in_best_groups(judged)
        chosen = judged.topk(routing.per_token, dim=-1).indices
        weights = odds.gather(1, chosen)
        if routing.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
        return ExpertChoice(weights if routing.scale == 1.0 else weights * routing.scale, chosen)

    def _in_best_groups(self, judged: torch.Tensor) -> torch.Tensor:
        """`-inf` for experts of other groups."""
        routing = self.routing
        grouped = judged.unflatten(1, (routing.groups, -1))
        merits = grouped.topk(routing.judged_by, dim=-1).values.sum(-1)
        kept = merits.topk(routing.kept_groups, dim=-1).indices
        others = torch.ones_like(merits, dtype=torch.bool).scatter_(1, kept, False)
        kept_alone: torch.Tensor = grouped.masked_fill(others[:, :, None], -torch.inf).flatten(1)
        return kept_alone


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """As the softmax of x and 0: PyTorch's own rounds numbers at the end of a tensor in another way than others."""
    return torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(-1)[..., 0]


LEAST_SUM = 1e-20  # sigmoids may all be 0; beside any other sum it is nothing


@dataclass(frozen=True, slots=True)
class GatedExpert:
    """An expert that every token takes, by the sigmoid of a number of its own."""

    expert: Gated
    gate: Linear  # to one number

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        return _sigmoid(self.gate(x).float()).to(x.dtype) * self.expert(x, None)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts (arXiv:2401.04088). Rows are grouped by expert: each does one product per step.

    Adapters do not reach inside (engine/lora/adapters.py refuses those that would).
    """

    router: Router
    experts: tuple[Gated, ...]
    shared: FeedForward | None = None  # that every row takes beside its own

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        weights, chosen = self.router(x)
        result = torch.zeros_like(x)
        for index in torch.unique(chosen).tolist():
            rows, places = torch.where(chosen == index)
            output = self.experts[index](x[rows], None) * weights[rows, places, None]
            result.index_add_(0, rows, output.to(x.dtype))
        return result if self.shared is None else result + self.shared(x)


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """As `Experts`. All shapes follow from the number of rows, so that a step of it can be recorded."""

    router: Router
    gate_up: ExpertWeight  # of each expert gate, then up
    down: ExpertWeight
    shared: FeedForward | None = None
    gate: Gate = Gate.SILU
    gate_up_bias: torch.Tensor | None = None  # [experts, outputs]
    down_bias: torch.Tensor | None = None  # likewise

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        choice = self.router(x)
        pairs, chosen = sorted_pairs(choice.chosen, self.gate_up.experts), choice.chosen.flatten()
        inner = _plus(expert_linear(x, self.gate_up, pairs), self.gate_up_bias, chosen)
        made = _plus(expert_linear(gate_mul(inner, self.gate), self.down, pairs), self.down_bias, chosen)
        parts = made.view(len(x), self.router.routing.per_token, -1).float()
        result = (parts * choice.weights[:, :, None]).sum(1).to(x.dtype)
        return result if self.shared is None else result + self.shared(x)


def stacked(experts: Experts) -> Experts | ExpertStack:
    """The same with its weights together; as it is where they are of a kind that no kernel reads."""
    gate_ups, downs = [each.gate_up for each in experts.experts], [each.down for each in experts.experts]
    gate_up, down = _together(gate_ups), _together(downs)
    if gate_up is None or down is None:
        return experts
    gate, biases = experts.experts[0].gate, (_biases(gate_ups), _biases(downs))
    return ExpertStack(experts.router, gate_up, down, experts.shared, gate, *biases)


def _plus(made: torch.Tensor, bias: torch.Tensor | None, chosen: torch.Tensor) -> torch.Tensor:
    """`made`: of pairs, whose experts are `chosen`."""
    return made if bias is None else made + bias[chosen]


def _biases(linears: Sequence[Linear]) -> torch.Tensor | None:
    """`[linears, outputs]`; they all have one, or none has."""
    biases = [each.bias for each in linears if isinstance(each, DenseLinear | KernelLinear) and each.bias is not None]
    return torch.stack(biases) if biases else None


def _together(linears: Sequence[Linear]) -> ExpertWeight | None:
    plain = [each.weight for each in linears if isinstance(each, DenseLinear)]
    if len(plain) == len(linears):
        return ExpertWeight(torch.cat(plain), len(linears))
    read = [each.weight for each in linears if isinstance(each, KernelLinear) and each.column_order is None]
    if len(read) < len(linears) or len({(each.data.dtype, each.scales.shape) for each in read}) > 1:
        return None
    zeros = [each.zeros for each in read if each.zeros is not None]
    data, scales = torch.cat([each.data for each in read]), torch.cat([each.scales for each in read])
    return ExpertWeight(QuantisedWeight(data, scales, torch.cat(zeros) if zeros else None), len(linears))
