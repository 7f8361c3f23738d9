"""Rotary position embeddings (RoFormer, arXiv:2104.09864): rotation frequency of each pair of head dimensions."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from baton.engine.config.model_config import RopeConfig, RopeKind
from baton.engine.models.batch import Rope


class LayerTables(NamedTuple):
    rope: Rope
    of_layers: tuple[int, ...]  # index of each layer's table in `rope`


def layer_tables(ropes: Sequence[RopeConfig], rotary_dims: Sequence[int], device: torch.device) -> LayerTables:
    """Return the tables of all layers. `rotary_dims`: rotated numbers of a head in each layer.

    All tables have the width of the widest one; pairs beyond a layer's rotated numbers have frequency 0.
    """
    of_layers = list(zip(ropes, rotary_dims, strict=True))
    ways, widest = list(dict.fromkeys(of_layers)), max(rotary_dims) // 2
    own = [inverse_frequencies(*way) for way in ways]
    frequencies = torch.stack([F.pad(each, (0, widest - len(each))) for each in own])
    magnitudes = None
    if any(rope.magnitude != 1.0 for rope, _ in ways):
        magnitudes = torch.tensor([rope.magnitude for rope, _ in ways], device=device)[:, None, None]
    return LayerTables(Rope(frequencies.to(device), magnitudes), tuple(map(ways.index, of_layers)))


def inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """Return each dimension pair's rotation in radians per position, float32 `[rotary_dim / 2]`."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    spans = rope.theta**exponents
    frequencies = 1.0 / spans
    match rope.kind:
        case RopeKind.NONE:
            return torch.zeros_like(frequencies)  # frequency 0: no rotation
        case RopeKind.DEFAULT:
            return frequencies
        case RopeKind.PROPORTIONAL:
            rotating = int(rope.part * rotary_dim // 2)
            return torch.where(torch.arange(len(frequencies)) < rotating, frequencies, 0.0) / rope.factor
        case RopeKind.LINEAR:
            return frequencies / rope.factor
        case RopeKind.LLAMA3:
            return _llama3(rope, frequencies)
        case RopeKind.YARN:
            return _yarn(rope, spans, rotary_dim)
        case RopeKind.LONGROPE:
            return 1.0 / (torch.tensor(rope.divisors) * spans)


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Scale frequencies as in Llama 3.1: divide low ones by `factor`, keep high ones, interpolate in between."""
    wavelengths = 2 * math.pi / frequencies  # unit: positions
    longest_kept = rope.original_max_positions / rope.high_freq_factor
    shortest_slowed = rope.original_max_positions / rope.low_freq_factor
    smooth = rope.original_max_positions / wavelengths - rope.low_freq_factor
    smooth = smooth / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    slowed = torch.where(wavelengths > shortest_slowed, frequencies / rope.factor, between)
    return torch.where(wavelengths < longest_kept, frequencies, slowed)


def _yarn(rope: RopeConfig, spans: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Scale each pair's frequency depending on its number of turns in the original context (YaRN, arXiv:2309.00071).

    A pair's frequency is kept if it makes at least `fast_turns` turns and divided by `factor` if it makes at most
    `slow_turns`. Between these limits, frequencies are interpolated by the pair's index.
    """

    def index(turns: float) -> float:
        """Return the fractional index of the pair that makes `turns` turns in the original context."""
        return rotary_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = index(rope.fast_turns), index(rope.slow_turns)
    if rope.truncates:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first if last != first else 0.001
    kept = 1 - ((torch.arange(rotary_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return 1.0 / (rope.factor * spans) * (1 - kept) + 1.0 / spans * kept
