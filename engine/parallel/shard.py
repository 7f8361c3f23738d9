"""Arithmetic of sharding: which part of a model each rank stores (Megatron-LM, arXiv:1909.08053, section 3).

Attention heads, delta-net heads and the inner size of feed-forward layers are divided equally. The head's vocabulary is
divided into ranges whose sizes differ by at most one. Embedding, norms, routers and the shared rows of latent attention
are complete on every rank.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.engine.config.model_config import (
    ConvolutionConfig,
    DecoderConfig,
    DeltaConfig,
    MambaConfig,
    ModelConfig,
    ModelError,
    RecurrentConfig,
)
from baton.engine.kv_cache.layout import KvLayout


@dataclass(frozen=True, slots=True)
class Shard:
    rank: int
    degree: int  # number of ranks

    def equal_part(self, size: int) -> slice:
        """Return this rank's slice of `size`, which must be a multiple of the number of ranks."""
        part = size // self.degree
        return slice(self.rank * part, (self.rank + 1) * part)

    def equal_parts(self, sizes: Sequence[int]) -> tuple[slice, ...]:
        """Return this rank's slice of each section of a tensor. `sizes`: the sections' sizes, in order."""
        starts = itertools.accumulate(sizes, initial=0)
        own = ((start, self.equal_part(size)) for start, size in zip(starts, sizes, strict=False))
        return tuple(slice(start + part.start, start + part.stop) for start, part in own)

    def vocabulary(self, size: int) -> range:
        return range(self.rank * size // self.degree, (self.rank + 1) * size // self.degree)


ALONE = Shard(0, 1)


def shard_config(config: ModelConfig, degree: int) -> DecoderConfig:
    """Return a model's configuration on one rank, with the complete vocabulary. Raises: ModelError if not shardable."""
    if not isinstance(config, DecoderConfig):
        raise ModelError(
            f"tensor-parallel is {degree}, but {config.family} runs in transformers' code on one rank only"
        )
    if config.gemma is not None and degree > 1:
        raise ModelError(f"tensor-parallel is {degree}, but {config.family} runs on one rank only")

    def part(name: str, size: int) -> int:
        return _part(degree, name, size)

    experts, kv_heads = config.experts, config.num_kv_heads
    return replace(
        config,
        num_heads=part("num_attention_heads", config.num_heads),
        num_kv_heads=kv_heads if config.latent is not None else part("num_key_value_heads", kv_heads),
        intermediate_size=part("intermediate_size", config.intermediate_size),
        experts=experts
        and replace(
            experts,
            inner_size=part("moe_intermediate_size", experts.inner_size),
            shared_size=part("n_shared_experts x moe_intermediate_size", experts.shared_size),
        ),
        recurrent=config.recurrent and shard_recurrent(config.recurrent, degree),
    )


def shard_recurrent(sizes: RecurrentConfig, degree: int) -> RecurrentConfig:
    """Return the sizes of recurrent layers on one rank. Raises: ModelError if not shardable."""
    match sizes:
        case ConvolutionConfig():
            return shard_convolution(sizes, degree)
        case DeltaConfig():
            return shard_delta(sizes, degree)
        case MambaConfig() if degree > 1:
            raise ModelError(f"tensor-parallel is {degree}, but Mamba layers run on one rank only")
    return sizes


def shard_convolution(sizes: ConvolutionConfig, degree: int) -> ConvolutionConfig:
    return replace(sizes, channels=_part(degree, "hidden_size", sizes.channels), ranks=degree)


def shard_delta(sizes: DeltaConfig, degree: int) -> DeltaConfig:
    return replace(
        sizes,
        key_heads=_part(degree, "linear_num_key_heads", sizes.key_heads),
        value_heads=_part(degree, "linear_num_value_heads", sizes.value_heads),
        ranks=degree,
    )


def _part(degree: int, name: str, size: int) -> int:
    if size % degree:
        raise ModelError(f"tensor-parallel is {degree}, but {name} of this model is {size}, not a multiple of it")
    return size // degree


def copies_of(layout: KvLayout, degree: int) -> int:
    """Return the number of ranks that store the same KV: all ranks if all heads share one KV row, otherwise one."""
    return degree if layout.value_prefix is not None else 1


def shard_layout(layout: KvLayout, degree: int) -> KvLayout:
    """Return the layout of one rank's pool: the same number of blocks, each with one rank's heads and part of a state.

    KV that all heads share is complete on every rank. Raises: ModelError if a state cannot be divided.
    """
    if copies_of(layout, degree) == degree:
        return layout
    heads, numbers = layout.num_kv_heads // degree, layout.state_numbers // degree
    own = replace(layout, num_kv_heads=heads, state_numbers=numbers, state_ranks=degree if numbers else 1)
    if own.block_bytes * degree != layout.block_bytes:
        raise ModelError(
            f"tensor-parallel is {degree}, but a state of {layout.state_bytes} bytes cannot be split into "
            f"{degree} parts"
        )
    return own
