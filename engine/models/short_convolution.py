"""Gated short convolutions (LFM2, arXiv:2511.23404), whose state is their last inputs."""

from dataclasses import dataclass

import torch

from baton.engine.config.model_config import ConvolutionConfig
from baton.engine.models.states import layer_states
from baton.kernels.delta import causal_convolution
from baton.kernels.native.layers import PackedConvolution
from baton.kernels.types import KvPages, StateRuns


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """Gated short convolution without its projections."""

    sizes: ConvolutionConfig
    place: int  # index of the layer's state in a block
    weight: torch.Tensor  # [channels, kernel]
    bias: torch.Tensor | None  # [channels]

    def __call__(self, projected: torch.Tensor, kv: KvPages, runs: StateRuns) -> torch.Tensor:
        """Return `[tokens, channels]`. projected: each token's gates of inputs, gates of outputs, inputs."""
        before, after, x = projected.chunk(3, dim=1)
        inputs = layer_states(self.sizes, self.place, kv).inputs
        return after * causal_convolution(before * x, self.weight, inputs, runs, self.bias, activates=False)

    def packed(self) -> PackedConvolution:
        return PackedConvolution(
            weight=self.weight.float().contiguous(),
            bias=None if self.bias is None else self.bias.float(),
            first_number=self.place * self.sizes.layer_numbers,
        )
