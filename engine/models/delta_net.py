"""Gated delta nets, layers with a recurrent state instead of keys and values."""

from dataclasses import dataclass

import torch

from baton.engine.config.model_config import DeltaConfig
from baton.engine.models.states import layer_states
from baton.kernels.delta import causal_convolution, gated_delta_rule
from baton.kernels.native.layers import PackedDelta
from baton.kernels.norms import gate_mul, rms_norm
from baton.kernels.types import DeltaRates, KvPages, StateRuns


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated delta net without its projections."""

    sizes: DeltaConfig
    place: int  # index of the layer's state in a block
    convolution: torch.Tensor  # [channels, kernel]
    rates: DeltaRates
    norm: torch.Tensor  # [value_dim]
    eps: float

    def __call__(self, projected: torch.Tensor, kv: KvPages, runs: StateRuns) -> torch.Tensor:
        """Return output `[tokens, value_size]`. projected: each token's queries, keys, values, gates, betas, decays."""
        sizes, tokens = self.sizes, len(projected)
        mixed, gate, beta, decay = self._split(projected)
        matrices, inputs = layer_states(sizes, self.place, kv)
        mixed = causal_convolution(mixed, self.convolution, inputs, runs)
        keys = sizes.key_heads * sizes.key_dim
        query, key, value = mixed.split((keys, keys, sizes.value_size), dim=1)
        made = gated_delta_rule(
            query.view(tokens, sizes.key_heads, sizes.key_dim),
            key.view(tokens, sizes.key_heads, sizes.key_dim),
            value.view(tokens, sizes.value_heads, sizes.value_dim),
            decay,
            beta,
            self.rates,
            matrices,
            runs,
        )
        normal = rms_norm(made.to(projected.dtype), self.norm, self.eps)
        gated = torch.cat((gate.float(), normal.view(tokens, -1).float()), dim=1)
        return gate_mul(gated).to(projected.dtype)

    def packed(self) -> PackedDelta:
        sizes = self.sizes
        return PackedDelta(
            convolution=self.convolution.float().contiguous(),
            rates=self.rates,
            norm=self.norm.float(),
            key_heads=sizes.key_heads,
            value_heads=sizes.value_heads,
            key_dim=sizes.key_dim,
            first_number=self.place * sizes.layer_numbers,
            eps=self.eps,
            is_interleaved=sizes.interleaved,
        )

    def _split(self, projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the convolution's inputs, the gates of values, and each value head's inputs of beta and of decay."""
        sizes = self.sizes
        if not sizes.interleaved:
            widths = [sizes.channels, sizes.value_size, sizes.value_heads, sizes.value_heads]
            return tuple(torch.split(projected, widths, dim=1))
        together = sizes.value_heads // sizes.key_heads
        values = together * sizes.value_dim
        rest = 2 * sizes.value_heads
        heads, numbers = projected.split((projected.shape[1] - rest, rest), dim=1)
        parts = heads.unflatten(1, (sizes.key_heads, -1)).split((sizes.key_dim, sizes.key_dim, values, values), dim=2)
        query, key, value, gate = (part.flatten(1) for part in parts)
        beta, decay = (part.flatten(1) for part in numbers.unflatten(1, (sizes.key_heads, -1)).chunk(2, dim=2))
        return torch.cat((query, key, value), dim=1), gate, beta, decay
