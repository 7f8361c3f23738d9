"""Tensors of single experts, read from those that stack all experts."""

import pytest
import torch

from baton.engine.config.model_config import StackedExperts
from baton.engine.weights.experts import ExpertsApart

EXPERTS, OUTPUTS = 3, 4
MODULE = "model.layers.0.mlp.experts."


class OnceStored:
    """Tensors that can be loaded once each, like those of a checkpoint."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.left = {MODULE + name: tensor for name, tensor in tensors.items()}

    def has(self, name: str) -> bool:
        return name in self.left

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.left[name].shape)

    def take(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> torch.Tensor:
        assert self.shape(name) == shape
        return self.left.pop(name)

    read = take


@pytest.mark.parametrize("load", ["take", "read"])
@pytest.mark.parametrize("layout", [StackedExperts.ROWS, StackedExperts.INTERLEAVED])
def test_stacked_biases_are_loaded_expert_by_expert(layout: StackedExperts, load: str) -> None:
    whole = torch.arange(EXPERTS * 2 * OUTPUTS, dtype=torch.float32).reshape(EXPERTS, 2 * OUTPUTS)
    stored = OnceStored(gate_up_proj_bias=whole)
    apart = ExpertsApart(stored, EXPERTS, layout)
    for expert in range(EXPERTS):
        for part, projection in enumerate(("gate_proj", "up_proj")):
            name = f"{MODULE}{expert}.{projection}.bias"
            assert apart.has(name)
            rows = whole[expert].reshape(OUTPUTS, 2).T if layout is StackedExperts.INTERLEAVED else whole[expert]
            expected = rows.reshape(2, OUTPUTS)[part]
            assert torch.equal(getattr(apart, load)(name, (torch.float32,), OUTPUTS), expected)
    assert not stored.left and not apart.has(f"{MODULE}0.gate_proj.bias")
