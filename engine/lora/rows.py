"""Which rows of a batch belong to which adapter. Knows no weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a batch that have an adapter: always one run, because of the order that `batch_order` gives."""

    rows: slice
    adapters: torch.Tensor  # int64 [rows.stop - rows.start], each at least 1
    lowest: int  # of `adapters`
    highest: int


def batch_order(is_long: bool, adapter: int) -> tuple[bool, int]:
    """Sort key of a chunk: single tokens first, and all rows with an adapter side by side.

    Single-token chunks go from no adapter upwards, longer ones back down to none.
    """
    return is_long, -adapter if is_long else adapter


def adapter_rows(adapters: Sequence[int], device: torch.device) -> AdapterRows | None:
    """Of the adapter of every row (0: none), in the order of `batch_order`; None where no row has one."""
    rows = [index for index, adapter in enumerate(adapters) if adapter]
    if not rows:
        return None
    run = slice(rows[0], rows[-1] + 1)
    chosen = adapters[run]
    if len(chosen) != len(rows):
        raise ValueError("rows with an adapter are not side by side")
    return AdapterRows(run, torch.tensor(chosen, device=device), min(chosen), max(chosen))
