"""A mixture of experts whose weights lie together, each projection one launch: nothing of it waits for the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.lora.rows import AdapterRows
from engine.models.feed_forward import Experts, choose_experts
from engine.models.linear import DenseLinear, Linear
from engine.quantization.on_kernels import KernelLinear
from kernels.expert_linear import expert_linear
from kernels.expert_weight import ExpertWeight, sorted_pairs
from kernels.quantised_weight import QuantisedWeight
from kernels.silu_mul import silu_mul


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """As `Experts`. All shapes follow from the number of rows, so that a step of it can be recorded."""

    router: torch.Tensor  # [experts, hidden]
    gate_up: ExpertWeight  # of each expert gate, then up
    down: ExpertWeight
    per_token: int
    normalised: bool

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
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
