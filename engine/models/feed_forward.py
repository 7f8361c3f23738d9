"""Feed-forward layers: one gated layer, or a mixture of experts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from baton.engine.lora.adapters import AdaptedLinear, without_adapters
from baton.engine.models.batch import AdapterRows
from baton.engine.models.linear import DenseLinear, KernelLinear, Linear, packed_weight
from baton.kernels.experts import choose_experts, expert_linear, packed_experts
from baton.kernels.norms import gate_mul
from baton.kernels.packed_weight import PackedExperts, PackedGated, PackedWeight
from baton.kernels.reference import sigmoid
from baton.kernels.types import ExpertChoice, ExpertWeight, Gate, QuantisedWeight, Routing, sorted_pairs

FeedForward = Linear
"""Function of `[tokens, hidden]` to the same shape, row by row."""


@dataclass(frozen=True, slots=True)
class Gated:
    """SwiGLU layer (arXiv:2002.05202)."""

    gate_up: Linear  # gate projection, then up projection
    down: Linear
    gate: Gate = Gate.SILU

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        return self.down(gate_mul(self.gate_up(x, adapters), self.gate), adapters)


@dataclass(frozen=True, slots=True)
class Ungated:
    """Feed-forward layer whose inner numbers are squares of ReLU (arXiv:2109.08668)."""

    up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        return self.down(self.up(x, adapters).relu().square(), adapters)


@dataclass(frozen=True, slots=True)
class ExpertRouter:
    linear: Linear  # projection to one logit per expert
    routing: Routing
    correction: torch.Tensor | None = None  # float32 [experts], added to the scores that choose experts

    def __call__(self, x: torch.Tensor) -> ExpertChoice:
        numbers = self.linear(x.float() if self.routing.wide else x).float()
        return choose_experts(numbers, self.routing, self.correction)


@dataclass(frozen=True, slots=True)
class GatedExpert:
    """Shared expert, scaled by the sigmoid of its own gate."""

    expert: Gated
    gate: Linear  # projection to one logit

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        return sigmoid(self.gate(x).float()).to(x.dtype) * self.expert(x, None)


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts (arXiv:2401.04088). Rows are grouped by expert: one product per expert and step.

    `packed`: the layer for the CPU's native kernels, which compute it in one call without adapters. Adapters can change
    only the shared experts, and only if engine/lora/adapters.py accepts their names.
    """

    router: ExpertRouter
    experts: tuple[Gated | Ungated, ...]
    shared: FeedForward | None = None  # shared experts, whose output is added to every row
    packed: PackedExperts | None = None
    scales_inputs: bool = False  # an expert's weight multiplies its input instead of its output

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        if self.packed is not None and (adapters is None or not self._shares_adapted):
            return packed_experts(x.float(), self.packed).to(x.dtype)
        result = self.mixed(x, self.router(x))
        return result if self.shared is None else result + self.shared(x, adapters)

    def mixed(self, x: torch.Tensor, choice: ExpertChoice) -> torch.Tensor:
        """Return the sums of the chosen experts' outputs, without those of shared experts."""
        weights, chosen = choice
        result = torch.zeros_like(x)
        for index in torch.unique(chosen).tolist():
            rows, places = torch.where(chosen == index)
            inner, scale = x[rows], weights[rows, places, None]
            if self.scales_inputs:
                output = self.experts[index]((inner * scale).to(x.dtype), None)
            else:
                output = self.experts[index](inner, None) * scale
            result.index_add_(0, rows, output.to(x.dtype))
        return result

    @property
    def _shares_adapted(self) -> bool:
        return isinstance(self.shared, Gated) and isinstance(self.shared.gate_up, AdaptedLinear)


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Mixture of experts with stacked weights. CUDA graphs can include it: shapes depend only on the row count."""

    router: ExpertRouter
    gate_up: ExpertWeight  # per expert: gate projection, then up projection
    down: ExpertWeight
    shared: FeedForward | None = None
    gate: Gate = Gate.SILU
    gate_up_bias: torch.Tensor | None = None  # [experts, outputs]
    down_bias: torch.Tensor | None = None  # [experts, outputs]
    scales_inputs: bool = False  # an expert's weight multiplies its input instead of its output

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        choice, inputs = self.router(x), x
        if self.scales_inputs:  # one row per pair, of weight 1
            inputs = (x[:, None] * choice.weights[:, :, None]).to(x.dtype).flatten(0, 1)
            choice = ExpertChoice(torch.ones_like(choice.weights), choice.chosen)
        of_inputs = choice.chosen.view(len(inputs), -1)
        pairs, chosen = sorted_pairs(of_inputs, self.gate_up.experts), choice.chosen.flatten()
        inner = _plus(expert_linear(inputs, self.gate_up, pairs), self.gate_up_bias, chosen)
        made = _plus(expert_linear(gate_mul(inner, self.gate), self.down, pairs), self.down_bias, chosen)
        parts = made.view(len(x), self.router.routing.per_token, -1).float()
        result = (parts * choice.weights[:, :, None]).sum(1).to(x.dtype)
        return result if self.shared is None else result + self.shared(x, adapters)


def with_packed(experts: Experts) -> Experts:
    """Return the experts with a copy that is packed for native kernels; unchanged if a weight is not packed."""
    apart, router = [packed_gated(each) for each in experts.experts], packed_weight(experts.router.linear)
    whole, shared = tuple(each for each in apart if each is not None), _packed_shared(experts.shared)
    if router is None or shared is None or len(whole) < len(apart) or experts.scales_inputs:
        return experts
    routing, correction = experts.router.routing, experts.router.correction
    return replace(experts, packed=PackedExperts(router, routing, correction, whole, *shared))


class _PackedShared(NamedTuple):
    expert: PackedGated | None
    gate: PackedWeight | None


def _packed_shared(shared: FeedForward | None) -> _PackedShared | None:
    """Return the shared expert as native kernels read it; None if one of its weights is not packed."""
    if shared is None:
        return _PackedShared(None, None)
    if isinstance(shared, GatedExpert):
        own, gate = packed_gated(shared.expert), packed_weight(shared.gate)
        return None if own is None or gate is None else _PackedShared(own, gate)
    own = packed_gated(shared) if isinstance(shared, Gated | Ungated) else None
    return None if own is None else _PackedShared(own, None)


def packed_gated(layer: Gated | Ungated) -> PackedGated | None:
    """Return the layer, without adapters, as native kernels read it; None if one of its weights is not packed."""
    first, gate = (layer.gate_up, layer.gate) if isinstance(layer, Gated) else (layer.up, None)
    gate_up, down = (packed_weight(without_adapters(each)) for each in (first, layer.down))
    return None if gate_up is None or down is None else PackedGated(gate_up, down, gate)


def stacked(experts: Experts) -> Experts | ExpertStack:
    """Return the experts with stacked weights, or unchanged if no kernel reads their format."""
    gated = [each for each in experts.experts if isinstance(each, Gated)]
    gate_ups, downs = [each.gate_up for each in gated], [each.down for each in gated]
    gate_up, down = _together(gate_ups), _together(downs)
    if len(gated) < len(experts.experts) or gate_up is None or down is None:
        return experts
    gate, biases = gated[0].gate, (_biases(gate_ups), _biases(downs))
    return ExpertStack(experts.router, gate_up, down, experts.shared, gate, *biases, experts.scales_inputs)


def _plus(made: torch.Tensor, bias: torch.Tensor | None, chosen: torch.Tensor) -> torch.Tensor:
    """Add biases to the outputs of (row, expert) pairs. `chosen`: expert of each pair."""
    return made if bias is None else made + bias[chosen]


def _biases(linears: Sequence[Linear]) -> torch.Tensor | None:
    """Return the biases of linear layers as `[linears, outputs]`; None if they have none."""
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
