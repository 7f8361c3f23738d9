"""Sampling of tokens from logits: allowed tokens, row statistics, and the draw."""

from collections.abc import Sequence

import torch

from baton.kernels import reference
from baton.kernels.dispatch import pick, uses_triton
from baton.kernels.native.library import native_library
from baton.kernels.types import RowStatistics, Sampled


def masked_rows(logits: torch.Tensor, places: Sequence[int], allowed: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Copy rows and ban tokens in them.

    logits: float32 `[rows, vocab]`. Returns float32 `[len(places), vocab]`, contiguous, of its own memory.

    places: rows of logits, in any order, also several times. allowed: for each of them None, where all tokens are, or
    uint8 `[any]` on the CPU, contiguous, one bit per token, the least significant first; the others become -inf, and so
    do tokens beyond the last bit.
    """
    _check_logits(logits)
    if places and not 0 <= min(places) <= max(places) < len(logits):
        raise ValueError(f"the rows {list(places)} of {len(logits)}")
    check_masks(allowed, len(places))
    return pick(reference.masked_rows, logits, logits.stride(1) == 1)(logits, places, allowed)


def _check_logits(logits: torch.Tensor) -> None:
    """Cheaper than the checks of kernels/types.py: these operations are started at every step."""
    if logits.dtype is not torch.float32 or logits.dim() != 2:
        raise ValueError(f"logits must be {torch.float32} [rows, vocab], got {logits.dtype} {list(logits.shape)}")


def check_masks(allowed: Sequence[torch.Tensor | None], rows: int) -> None:
    if len(allowed) != rows:
        raise ValueError(f"{len(allowed)} masks for {rows} rows")
    if any(bits is not None and (bits.dtype is not torch.uint8 or bits.dim() != 1) for bits in allowed):
        raise ValueError(f"masks must be {torch.uint8} [any]")


def row_statistics(logits: torch.Tensor, allowed: Sequence[torch.Tensor | None] | None = None) -> RowStatistics:
    """Compute the likeliest token, its log-probability and the total of each row.

    logits: float32 `[rows, vocab]`. Log-probabilities are `logits - log_totals[:, None]`, within 1e-5.

    The likeliest token is the first of several where the native kernel runs, and of those that are `allowed`, where
    that is given: for each row what `masked_rows` takes, with one token at least. Of a row that is not finite
    throughout only that is known. No row depends on others.
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
    """Draw one token per row.

    logits: `[rows, vocab]` of any float, which is widened to float32; -inf for tokens that are banned; a row without
    a token that is not, or with NaN or +inf, has NaN as its log-probability and no meaningful token. Unless logits
    `may_ban`, a row with -inf has too. out: where to write the result, each contiguous. The others are `[rows]`:

    temperature: float32, 0 takes the likeliest token, the first of several; top_k: int64, 0 is no limit, tokens that
    tie with the last stay; top_p: float32 in [0, 1], keeps the likeliest tokens until they have that share of the mass,
    later ids first where they tie; uniform: float64 in [0, 1). The token is the one, by order of id, whose share of
    the mass holds the uniform number. No row depends on others. Implementations differ where the number lies within
    1e-5 of a boundary between tokens.
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
    """Room for them."""
    token_ids = torch.empty(rows, dtype=torch.int64, device=device)
    return Sampled(token_ids, torch.empty(rows, dtype=torch.float32, device=device))


def samples_natively(logits: torch.Tensor) -> bool:
    """Return whether a CPU's native kernel samples such logits; the reference goes row by row, in Python."""
    return native_library() is not None and logits.device.type == "cpu" and logits.stride(1) == 1
