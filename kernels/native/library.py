"""The native kernels as Python calls them: loaded once for this processor, arguments handed over as C structs."""

import ctypes
import functools
from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

from baton.kernels.native.build import best_library, processor_level
from baton.kernels.native.decoder import MOST_PIECES, NativeDecoder
from baton.kernels.native.layers import NativeLayers
from baton.kernels.native.sampling import NativeSampling
from baton.kernels.native.structs import ELEMENTS, PagesStruct, ScoringStruct, pages_struct, pointers, scoring_struct
from baton.kernels.native.threads import NativeThreads, native_threads
from baton.kernels.types import KvLayer, Scoring

LANES = 16  # head_dim is a multiple of it
MAX_HEAD_DIM = 256
MAX_HEADS = 256


class _PrefillArguments(Structure):
    _fields_ = (
        ("pages", PagesStruct),
        ("scoring", ScoringStruct),
        *((name, c_void_p) for name in ("query", "output", "block_ids")),
        *((name, c_int64) for name in ("tokens", "heads", "kv_heads", "head_dim", "start")),
        ("threads", c_int32),
    )


class _DecodeArguments(Structure):
    _fields_ = (
        ("pages", PagesStruct),
        ("scoring", ScoringStruct),
        *((name, c_void_p) for name in ("query", "output", "parts", "block_ids", "block_starts", "context_tokens")),
        *((name, c_int64) for name in ("sequences", "heads", "kv_heads", "head_dim")),
        ("threads", c_int32),
    )


class NativeLibrary:
    """The kernels of one shared library. Calls let go of the interpreter's lock."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.layers = NativeLayers(library)
        self.decoder = NativeDecoder(library)
        self.sampling = NativeSampling(library)
        self.threads = NativeThreads(library)
        self._prefill = library.baton_paged_prefill
        self._decode = library.baton_paged_decode
        for function, arguments in ((self._prefill, _PrefillArguments), (self._decode, _DecodeArguments)):
            function.argtypes, function.restype = (POINTER(arguments),), None

    @staticmethod
    def takes(query: torch.Tensor, kv: KvLayer) -> bool:
        """Whether these kernels compute attention of such tensors; what they do not, the reference does."""
        heads, head_dim = query.shape[1:]
        return (
            query.device.type == "cpu"
            and kv.data.dtype in ELEMENTS
            and kv.data.stride(4) == 1
            and head_dim % LANES == 0
            and head_dim <= MAX_HEAD_DIM
            and heads <= MAX_HEADS
        )

    def paged_prefill(
        self, query: torch.Tensor, kv: KvLayer, block_ids: torch.Tensor, start: int, scoring: Scoring
    ) -> torch.Tensor:
        wide = query.float().contiguous()
        output = torch.empty_like(wide)
        tokens, heads, head_dim = wide.shape
        arguments = _PrefillArguments(
            pages_struct(kv),
            scoring_struct(scoring),
            *pointers((wide, output, block_ids)),
            tokens,
            heads,
            kv.kv_heads,
            head_dim,
            start,
            native_threads(),
        )
        self._prefill(arguments)
        return output.to(query.dtype)

    def paged_decode(
        self,
        query: torch.Tensor,
        kv: KvLayer,
        block_ids: torch.Tensor,
        block_starts: torch.Tensor,
        context_tokens: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        wide = query.float().contiguous()
        output = torch.empty_like(wide)
        sequences, heads, head_dim = wide.shape
        parts = torch.empty(sequences * MOST_PIECES * heads * (head_dim + 2))
        arguments = _DecodeArguments(
            pages_struct(kv),
            scoring_struct(scoring),
            *pointers((wide, output, parts, block_ids, block_starts, context_tokens)),
            sequences,
            heads,
            kv.kv_heads,
            head_dim,
            native_threads(),
        )
        self._decode(arguments)
        return output.to(query.dtype)


@functools.cache
def native_library() -> NativeLibrary | None:
    """The best library for this processor, or None where none has been built."""
    path = best_library(processor_level())
    return None if path is None else NativeLibrary(path)
