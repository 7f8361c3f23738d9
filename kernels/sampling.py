"""Sampling of tokens from logits: masks, statistics of rows, and the sampling itself."""

from collections.abc import Sequence

import torch

from baton.kernels import reference
from baton.kernels.dispatch import pick, uses_triton
from baton.kernels.native.library import native_library
from baton.kernels.types import RowStatistics, Sampled


def masked_rows(logits: torch.Tensor, places: Sequence[int], allowed: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return rows of `logits` with forbidden tokens at -inf, as a new contiguous float32 `[len(places), vocab]`.

    logits: float32 `[rows, vocab]`; places: indices of the wanted rows in any order, possibly repeated; allowed: one
    mask per wanted row, where None allows all tokens. A mask is contiguous uint8 `[any]` on the CPU with one bit per
    token, the least significant bit first; tokens after the last bit are forbidden.
    """
    _check_logits(logits)
    if places and not 0 <= min(places) <= max(places) < len(logits):
        raise ValueError(f"places must be in [0, {len(logits)}), the rows of logits, got {list(places)}")
    check_masks(allowed, len(places))
    return pick(reference.masked_rows, logits, logits.stride(1) == 1)(logits, places, allowed)


def _check_logits(logits: torch.Tensor) -> None:
    """Check dtype and shape of logits, in every step; therefore faster than the checks of kernels/types.py."""
    if logits.dtype is not torch.float32 or logits.dim() != 2:
        raise ValueError(f"logits must be {torch.float32} [rows, vocab], got {logits.dtype} {list(logits.shape)}")


def check_masks(allowed: Sequence[torch.Tensor | None], rows: int) -> None:
    if len(allowed) != rows:
        raise ValueError(f"one mask per row is needed, got {len(allowed)} for {rows} rows")
    if any(bits is not None and (bits.dtype is not torch.uint8 or bits.dim() != 1) for bits in allowed):
        found = [None if bits is None else (str(bits.dtype), list(bits.shape)) for bits in allowed]
        raise ValueError(f"masks must be {torch.uint8} of one dimension, got {found}")


def row_statistics(logits: torch.Tensor, allowed: Sequence[torch.Tensor | None] | None = None) -> RowStatistics:
    """Return statistics of `logits`, float32 `[rows, vocab]`. Log-probabilities are `logits - log_totals`, within 1e-5.

    allowed: one mask per row, as for `masked_rows`; each mask allows at least one token. None allows all tokens. `best`
    is the most likely allowed token; of equally likely tokens the native kernel takes the first. If a row has a
    non-finite logit, only `finite` is meaningful. No row's result depends on other rows.
    """
    _check_logits(logits)
    if allowed:
        check_masks(allowed, len(logits))
    return pick(reference.row_statistics, logits, logits.stride(1) == 1)(logits, allowed)


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    may_ban: bool = True,
    out: Sampled | None = None,
) -> Sampled:
    """Sample one token per row of `logits`, `[rows, vocab]` of any float dtype, which is widened to float32.

    A logit of -inf bans its token. A row is invalid if it has NaN or +inf, if it bans all tokens, or if it bans any
    token although `may_ban` is False. An invalid row gets NaN as log-probability and no meaningful token.

    out: contiguous result tensors. Parameters are `[rows]`. temperature: float32; 0 takes the first of the most likely
    tokens. top_k: int64; 0 is unlimited; tokens that tie with the last kept token are kept too. top_p: float32 in [0,
    1]; keeps the most likely tokens with this share of the probability; of equally likely tokens, those with higher
    ids. uniform: float64 in [0, 1). The kept probabilities form adjacent intervals in order of token ids; the sampled
    token is the one whose interval contains `uniform`. No row's result depends on other rows. Implementations may
    differ if `uniform` is within 1e-5 of a boundary.
    """
    if not logits.is_floating_point() or logits.dim() != 2:
        raise ValueError(f"logits must be floats [rows, vocab], got {logits.dtype} {list(logits.shape)}")
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int64),
        ("top_p", top_p, torch.float32),
        ("uniform", uniform, torch.float64),
    ):
        if tensor.dtype is not dtype or tensor.shape != (len(logits),):
            raise ValueError(f"{name} must be {dtype} [{len(logits)}], got {tensor.dtype} {list(tensor.shape)}")
    if logits.stride(1) != 1:
        raise ValueError(f"rows of logits must be contiguous, got strides {list(logits.stride())}")
    found = no_samples(len(logits), logits.device) if out is None else out
    wide = logits if uses_triton(logits) else logits.float()
    pick(reference.sample_tokens, wide)(wide, temperature, top_k, top_p, uniform, may_ban, found)
    return found


def no_samples(rows: int, device: torch.device) -> Sampled:
    token_ids = torch.empty(rows, dtype=torch.int64, device=device)
    return Sampled(token_ids, torch.empty(rows, dtype=torch.float32, device=device))


def samples_natively(logits: torch.Tensor) -> bool:
    """Return whether the native CPU kernel can sample from `logits`. The reference would loop over rows in Python."""
    return native_library() is not None and logits.device.type == "cpu" and logits.stride(1) == 1
