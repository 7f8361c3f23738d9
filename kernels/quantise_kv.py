"""Keys and values in one byte per number: each row of one token and KV head shares a float32 scale.

Scale = largest magnitude of the row / largest number of the format, so that nothing is clipped (per-token symmetric
quantisation, as in arXiv:2303.06865 and vLLM's dynamic scales). No calibration, and no row depends on another.
"""

import torch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # a row of zeros divides by this, not by zero


def quantise(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`[..., head_dim]` of any floating dtype as `dtype` and float32 scales `[...]`; rows ~ stored * scale.

    A row with anything in it that is not finite gets the scale NaN: it reads back as NaN throughout, never clamped.
    """
    wide = rows.to(torch.float32)
    scales = (wide.abs().amax(-1) / LARGEST[dtype]).clamp(min=SMALLEST_SCALE)
    scales = scales.masked_fill(scales.isinf(), torch.nan)
    ratio = (wide / scales[..., None]).clamp_(-LARGEST[dtype], LARGEST[dtype])
    if dtype == torch.int8:
        ratio.round_()  # an integer has no NaN and becomes anything: the scale says what it is
    return ratio.to(dtype), scales


def dequantise(stored: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse: `[..., head_dim]` and `[...]` to `[..., head_dim]` in `dtype`; the product is in float32."""
    return (stored.to(torch.float32) * scales[..., None]).to(dtype)
