"""Mamba2 layers (arXiv:2405.21060), with a recurrent state instead of keys and values."""

from dataclasses import dataclass

import torch

from baton.engine.config.model_config import MambaConfig
from baton.engine.models.states import layer_states
from baton.kernels.delta import causal_convolution, state_space_scan
from baton.kernels.native.layers import PackedMamba
from baton.kernels.norms import gate_mul, rms_norm
from baton.kernels.types import KvPages, StateRates, StateRuns


@dataclass(frozen=True, slots=True)
class Mamba:
    """Mamba2 layer without its projections."""

    sizes: MambaConfig
    place: int  # index of the layer's state in a block
    convolution: torch.Tensor  # [channels, kernel]
    bias: torch.Tensor | None  # [channels], of the convolution
    rates: StateRates
    norm: torch.Tensor  # [inner_size]
    eps: float

    def __call__(self, projected: torch.Tensor, kv: KvPages, runs: StateRuns) -> torch.Tensor:
        """Return `[tokens, inner_size]`. projected: each token's gates, convolution inputs and time steps."""
        sizes, tokens = self.sizes, len(projected)
        gate, mixed, steps = projected.split((sizes.inner_size, sizes.channels, sizes.heads), dim=1)
        matrices, inputs = layer_states(sizes, self.place, kv)
        mixed = causal_convolution(mixed, self.convolution, inputs, runs, self.bias)
        own = sizes.groups * sizes.state_dim
        value, key, query = mixed.split((sizes.inner_size, own, own), dim=1)
        made = state_space_scan(
            query.view(tokens, sizes.groups, sizes.state_dim),
            key.view(tokens, sizes.groups, sizes.state_dim),
            value.view(tokens, sizes.heads, sizes.head_dim),
            steps,
            self.rates,
            matrices,
            runs,
        )
        gated = gate_mul(torch.cat((gate.float(), made.view(tokens, -1)), dim=1)).view(tokens, sizes.groups, -1)
        normal = rms_norm(gated, torch.ones_like(gated[0, 0]), self.eps).view(tokens, -1)
        return self.norm * normal.to(projected.dtype)

    def packed(self) -> PackedMamba:
        sizes = self.sizes
        return PackedMamba(
            convolution=self.convolution.float().contiguous(),
            bias=None if self.bias is None else self.bias.float(),
            rates=self.rates,
            norm=self.norm.float(),
            groups=sizes.groups,
            state_dim=sizes.state_dim,
            first_number=self.place * sizes.layer_numbers,
            eps=self.eps,
        )
