"""Sampling's hot part as Python calls it. Logits are float32 with contiguous rows."""

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p

import torch

from baton.kernels.native.structs import pointers
from baton.kernels.native.threads import native_threads
from baton.kernels.types import RowStatistics, Sampled


class _Survey(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "allowed", "best", "log_totals", "finite")),
        *((name, c_int64) for name in ("rows", "size", "stride")),
        ("threads", c_int32),
    )


class _Sample(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "temperatures", "top_k", "top_p", "numbers")),
        *((name, c_void_p) for name in ("token_ids", "logprobs")),
        *((name, c_int64) for name in ("rows", "size", "stride")),
        ("threads", c_int32),
    )


class _Take(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "taken", "rows")),
        *((name, c_int64) for name in ("count", "size", "stride")),
    )


class NativeSampling:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._survey, self._sample = library.baton_survey_rows, library.baton_sample_tokens
        self._take = library.baton_take_rows
        for function, arguments in ((self._survey, _Survey), (self._sample, _Sample), (self._take, _Take)):
            function.argtypes, function.restype = (POINTER(arguments),), None

    def row_statistics(
        self, logits: torch.Tensor, allowed: Sequence[torch.Tensor | None] | None = None
    ) -> RowStatistics:
        rows, size = logits.shape
        found = RowStatistics(
            torch.empty(rows, dtype=torch.int64), torch.empty(rows), torch.empty(rows, dtype=torch.bool)
        )
        masks = array("q")  # of each row where its bits are, and their bytes
        for bits in allowed or ():
            masks.extend((0, 0) if bits is None else (bits.data_ptr(), bits.numel()))
        address = masks.buffer_info()[0] if allowed else None
        self._survey(
            _Survey(logits.data_ptr(), address, *pointers(found), rows, size, logits.stride(0), native_threads())
        )
        return found

    def sample_tokens(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> Sampled:
        rows, size = logits.shape
        found = Sampled(torch.empty(rows, dtype=torch.int64), torch.empty(rows))
        of_rows = [each.contiguous() for each in (temperature, top_k, top_p, uniform)]
        self._sample(_Sample(*pointers((logits, *of_rows, *found)), rows, size, logits.stride(0), native_threads()))
        return found

    def masked_rows(
        self, logits: torch.Tensor, places: Sequence[int], allowed: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        rows = array("q")  # of each its place, where its bits are, and their bytes
        for place, bits in zip(places, allowed, strict=True):
            rows.extend((place, 0, 0) if bits is None else (place, bits.data_ptr(), bits.numel()))
        count, size = len(places), logits.shape[1]
        taken = torch.empty(count, size)
        address, _ = rows.buffer_info()
        self._take(_Take(logits.data_ptr(), taken.data_ptr(), address, count, size, logits.stride(0)))
        return taken
