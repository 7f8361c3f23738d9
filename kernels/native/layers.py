"""The native kernels between attentions as Python calls them, one at a time. Tensors are float32 and contiguous."""

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch

from baton.kernels.native.structs import (
    ELEMENTS,
    PagesStruct,
    WeightStruct,
    pages_struct,
    pointer,
    pointers,
    weight_struct,
)
from baton.kernels.native.threads import native_threads
from baton.kernels.types import KvLayer

if TYPE_CHECKING:
    from baton.kernels.packed_weight import PackedWeight
    from baton.kernels.pages import HeadNorms


class _LinearArguments(Structure):
    _fields_ = (
        ("weight", WeightStruct),
        ("x", c_void_p),
        ("output", c_void_p),
        ("rows", c_int64),
        ("threads", c_int32),
        ("is_gated", c_int32),
    )


class _GatherArguments(Structure):
    _fields_ = (
        ("weight", WeightStruct),
        ("token_ids", c_void_p),
        ("rows", c_void_p),
        ("count", c_int64),
        ("threads", c_int32),
    )


class _RotateStore(Structure):
    _fields_ = (
        ("pages", PagesStruct),
        *((name, c_void_p) for name in ("qkv", "query", "cos", "sin", "slots", "query_norm", "key_norm")),
        *((name, c_int64) for name in ("rows", "heads", "kv_heads", "head_dim")),
        ("eps", c_float),
        ("threads", c_int32),
    )


class NativeLayers:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._linear = library.baton_linear
        self._linear.argtypes, self._linear.restype = (POINTER(_LinearArguments),), None
        self._gather_rows = library.baton_gather_rows
        self._gather_rows.argtypes, self._gather_rows.restype = (POINTER(_GatherArguments),), c_int32
        self._rms_norm = library.baton_rms_norm
        self._rms_norm.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p, c_int32)
        self._rms_norm.restype = None
        self._silu_mul = library.baton_silu_mul
        self._silu_mul.argtypes, self._silu_mul.restype = (c_void_p, c_int64, c_int64, c_void_p, c_int32), None
        self._rotate_and_store = library.baton_rotate_and_store
        self._rotate_and_store.argtypes, self._rotate_and_store.restype = (POINTER(_RotateStore),), None

    @staticmethod
    def takes(x: torch.Tensor) -> bool:
        return x.device.type == "cpu" and x.dtype == torch.float32

    def linear(self, x: torch.Tensor, weight: "PackedWeight") -> torch.Tensor:
        x = x.contiguous()
        output = torch.empty(len(x), weight.outputs)
        threads = native_threads()
        self._linear(_LinearArguments(weight_struct(weight), *pointers((x, output)), len(x), threads))
        return output

    def gated_linear(self, x: torch.Tensor, weight: "PackedWeight") -> torch.Tensor:
        x = x.contiguous()
        output = torch.empty(len(x), weight.outputs // 2)
        threads = native_threads()
        self._linear(_LinearArguments(weight_struct(weight), *pointers((x, output)), len(x), threads, is_gated=True))
        return output

    def gather_rows(self, token_ids: torch.Tensor, weight: "PackedWeight") -> torch.Tensor:
        """Raises: IndexError."""
        token_ids = token_ids.contiguous()
        rows = torch.empty(len(token_ids), weight.inputs)
        asked = _GatherArguments(weight_struct(weight), *pointers((token_ids, rows)), len(token_ids), native_threads())
        if not self._gather_rows(asked):
            raise IndexError(f"a row that is none of {weight.outputs}")
        return rows

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x, weight = x.contiguous(), weight.contiguous()  # held until the kernel is done with them
        output, size = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // size
        self._rms_norm(*pointers((x, weight)), rows, size, eps, output.data_ptr(), native_threads())
        return output

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty(rows, size)
        self._silu_mul(gate_up.data_ptr(), rows, size, output.data_ptr(), native_threads())
        return output

    @staticmethod
    def stores(kv: KvLayer) -> bool:
        """Whether keys and values can be written to such pages."""
        return kv.data.dtype in ELEMENTS and kv.data.stride(4) == 1

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        norms: "HeadNorms | None",
        kv: KvLayer,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        qkv, cos, sin, slots = (each.contiguous() for each in (qkv, cos, sin, slots))
        rows, all_heads, head_dim = qkv.shape
        heads = all_heads - 2 * kv.kv_heads
        query = torch.empty(rows, heads, head_dim)
        arguments = _RotateStore(
            pages_struct(kv),
            *pointers((qkv, query, cos, sin, slots)),
            pointer(None if norms is None else norms.query),
            pointer(None if norms is None else norms.key),
            rows,
            heads,
            kv.kv_heads,
            head_dim,
            0.0 if norms is None else norms.eps,
            native_threads(),
        )
        self._rotate_and_store(byref(arguments))
        return query
