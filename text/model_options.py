"""Allowed values and defaults of a model's options, the same for workers and offline use."""

from typing import Literal

ComputeDtype = Literal["auto", "float32", "bfloat16"]
KvCacheDtype = Literal["auto", "float32", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"]
Quantize = Literal["none", "int8", "int4", "fp8"]  # formats that loading can create
GPU_MEMORY_UTILIZATION = 0.9
SPECULATIVE_TOKENS = 8  # maximum drafts per sequence and step
DRAFT_KV_BYTES = 128 << 20  # memory for the KV of a draft model
