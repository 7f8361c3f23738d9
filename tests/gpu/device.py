"""What tests on a GPU share."""

import pytest
import torch

CUDA = torch.device("cuda:0")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ATTENTION_ROUNDING = 0.03
"""How far apart the KV of a prompt may be by two bf16 attentions that add up in another order. Single numbers say
nothing: each layer enlarges what the one before has rounded."""


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Norm of the difference over the norm of `theirs`; NaN where either has one."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())
