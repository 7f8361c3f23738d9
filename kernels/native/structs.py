"""Twins of the C structs that several kernels share, made from tensors. They borrow: keep the tensors alive."""

from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch

from baton.kernels.types import KvLayer, Scoring

if TYPE_CHECKING:
    from baton.kernels.packed_weight import PackedWeight

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3, torch.int8: 4}


class PagesStruct(Structure):
    _fields_ = (
        ("data", c_void_p),
        *((name, c_int64) for name in ("block_stride", "kind_stride", "head_stride", "token_stride")),
        ("scales", c_void_p),
        *((name, c_int64) for name in ("scale_block_stride", "scale_kind_stride", "scale_head_stride")),
        ("block_tokens", c_int64),
        ("element", c_int32),
    )


class ScoringStruct(Structure):
    _fields_ = (("scale", c_float), ("softcap", c_float), ("slopes", c_void_p), ("window", c_int64))


class WeightStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("data", "scales", "sums", "zeros", "bias")),
        *((name, c_int64) for name in ("outputs", "inputs", "group_inputs")),
        ("stored", c_int32),
    )


def pages_struct(kv: KvLayer) -> PagesStruct:
    scales = kv.scales
    scale_strides = (0, 0, 0) if scales is None else scales.stride()[:3]
    return PagesStruct(
        kv.data.data_ptr(),
        *kv.data.stride()[:4],
        pointer(scales),
        *scale_strides,
        kv.block_tokens,
        ELEMENTS[kv.data.dtype],
    )


def scoring_struct(scoring: Scoring) -> ScoringStruct:
    return ScoringStruct(scoring.scale, scoring.softcap or 0.0, pointer(scoring.alibi_slopes), scoring.window or 0)


def weight_struct(weight: "PackedWeight") -> WeightStruct:
    return WeightStruct(
        *pointers((weight.data, weight.scales, weight.sums, weight.zeros, weight.bias)),
        weight.outputs,
        weight.inputs,
        weight.group_inputs,
        weight.stored,
    )


def pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def pointers(tensors: Sequence[torch.Tensor | None]) -> list[int | None]:
    return [pointer(tensor) for tensor in tensors]
