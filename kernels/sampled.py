"""What sampling finds for each row of logits."""

from typing import NamedTuple

import torch


class Sampled(NamedTuple):
    token_ids: torch.Tensor  # int64 [rows]
    logprobs: torch.Tensor  # float32 [rows], of the model's own distribution: before temperature and filters


class Survey(NamedTuple):
    best: torch.Tensor  # int64 [rows], the likeliest tokens
    log_totals: torch.Tensor  # float32 [rows], logarithms of the sums of e^logit
    finite: torch.Tensor  # bool [rows], whether every number of the row is
