"""What greedy sampling, log-probabilities and the check for numbers that are not finite need to know of each row."""

from collections.abc import Sequence

import torch

from kernels import reference
from kernels.check import check_dtype, check_shape
from kernels.native.library import native_library
from kernels.sampled import Survey
from kernels.take_rows import check_masks


def survey_rows(logits: torch.Tensor, allowed: Sequence[torch.Tensor | None] | None = None) -> Survey:
    """logits: float32 `[rows, vocab]`. Log-probabilities are `logits - log_totals[:, None]`, within 1e-5.

    The likeliest token is the first of several where the native kernel runs, and of those that are `allowed`, where
    that is given: for each row what take_rows.py takes, with one token at least. Of a row that is not finite throughout
    only that is known. No row depends on others.
    """
    check_shape("logits", logits, None, None)
    check_dtype("logits", logits, torch.float32)
    if allowed:
        check_masks(allowed, len(logits))
    native = native_library()
    if native is None or logits.device.type != "cpu" or logits.stride(1) != 1:
        return reference.survey_rows(logits, allowed)
    return native.sampling.survey_rows(logits, allowed)
