"""Rotary position embedding: frequencies of a model, angles of positions. Rotating is kernels/rotary.py."""

import math
from typing import NamedTuple

import torch

from engine.model_config import RopeConfig, RopeKind


class Rotation(NamedTuple):
    """Cosine and sine of each token's angles, `[tokens, head_dim / 2]` in the model's dtype."""

    cos: torch.Tensor
    sin: torch.Tensor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position, float32 `[head_dim / 2]` (RoFormer, arXiv:2104.09864)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.kind:
        case RopeKind.DEFAULT:
            return frequencies
        case RopeKind.LINEAR:
            return frequencies / rope.factor
        case RopeKind.LLAMA3:
            return _llama3(rope, frequencies)


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies  # positions
    longest_kept = rope.original_max_positions / rope.high_freq_factor
    shortest_slowed = rope.original_max_positions / rope.low_freq_factor
    smooth = rope.original_max_positions / wavelengths - rope.low_freq_factor
    smooth = smooth / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    slowed = torch.where(wavelengths > shortest_slowed, frequencies / rope.factor, between)
    return torch.where(wavelengths < longest_kept, frequencies, slowed)


def rotation(frequencies: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
    """Angles in float32 for any dtype of the model: bfloat16 cannot distinguish position 256 from 257."""
    angles = positions.to(torch.float32)[:, None] * frequencies[None, :]
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))
