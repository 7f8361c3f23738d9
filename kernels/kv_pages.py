"""The paged KV pool as kernels see it: stored numbers, and their scales where the numbers are smaller than the model's.

A quantised pool keeps one float32 scale per token and KV head, for keys and for values: number = stored * scale.
"""

from dataclasses import dataclass

import torch

from kernels.check import check_dtype, check_shape

QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)  # what is stored with scales


@dataclass(frozen=True, slots=True)
class KvLayer:
    """One layer of the pool, by reference: writing to it writes the pool."""

    data: torch.Tensor  # [blocks, 2 (keys, values), kv_heads, block_tokens, head_dim]
    scales: torch.Tensor | None  # float32 [blocks, 2, kv_heads, block_tokens], exactly where data is one of QUANTISED

    @property
    def kv_heads(self) -> int:
        return self.data.shape[2]

    @property
    def block_tokens(self) -> int:
        return self.data.shape[3]

    @property
    def head_dim(self) -> int:
        return self.data.shape[4]


@dataclass(frozen=True, slots=True)
class KvPages:
    """All layers of the pool, by reference; `KvLayout.view` lays it over memory that others own."""

    data: torch.Tensor  # [blocks, layers, 2 (keys, values), kv_heads, block_tokens, head_dim]
    scales: torch.Tensor | None = None  # float32 [blocks, layers, 2, kv_heads, block_tokens]

    def __post_init__(self) -> None:
        if (self.data.dtype in QUANTISED) != (self.scales is not None):
            raise ValueError(f"KV in {self.data.dtype} {'needs' if self.scales is None else 'has no'} scales")
        if self.scales is not None and (self.scales.dtype, self.scales.shape) != (torch.float32, self.data.shape[:-1]):
            raise ValueError(f"scales must be float32 {list(self.data.shape[:-1])}, got {list(self.scales.shape)}")

    def layer(self, index: int) -> KvLayer:
        return KvLayer(self.data[:, index], None if self.scales is None else self.scales[:, index])

    @property
    def blocks(self) -> int:
        return self.data.shape[0]

    @property
    def layers(self) -> int:
        return self.data.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.data.shape[3]

    @property
    def block_tokens(self) -> int:
        return self.data.shape[4]

    @property
    def head_dim(self) -> int:
        return self.data.shape[5]

    @property
    def device(self) -> torch.device:
        return self.data.device


def check_kv(kv: KvLayer, query: torch.Tensor) -> None:
    """Whether attention of `query`, `[tokens, heads, head_dim]`, can read this layer."""
    check_shape("query", query, None, None, None)
    check_shape("kv", kv.data, None, 2, None, None, query.shape[2])
    if kv.scales is None:
        check_dtype("kv", kv.data, query.dtype)
    if query.shape[1] % kv.kv_heads:
        raise ValueError(f"{query.shape[1]} heads are not a multiple of {kv.kv_heads} KV heads")
