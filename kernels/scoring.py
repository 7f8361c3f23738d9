"""How attention turns a query and the keys before it into scores: the same for every kernel, different by layer."""

from dataclasses import dataclass

import torch

from kernels.check import check_dtype, check_shape


@dataclass(frozen=True, slots=True)
class Scoring:
    """Softmax is over `softcap * tanh(query @ key * scale / softcap) + slope * (key position - query position)`.

    softcap: None leaves scores as they are (Gemma 2, arXiv:2408.00118). window: how many tokens a query sees, itself
    included; None sees all before it. alibi_slopes: float32 `[heads]` (ALiBi, arXiv:2108.12409); None is a slope of 0.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the softmax is over scaled products alone, as in `scaled_dot_product_attention`."""
        return self.softcap is None and self.alibi_slopes is None


def check_scoring(scoring: Scoring, query: torch.Tensor) -> None:
    """query: `[tokens, heads, head_dim]`."""
    if scoring.window is not None and scoring.window < 1:
        raise ValueError(f"window must be at least 1, got {scoring.window}")
    if scoring.softcap is not None and scoring.softcap <= 0:
        raise ValueError(f"softcap must be positive, got {scoring.softcap}")
    if scoring.alibi_slopes is not None:
        check_shape("alibi_slopes", scoring.alibi_slopes, query.shape[1])
        check_dtype("alibi_slopes", scoring.alibi_slopes, torch.float32)
