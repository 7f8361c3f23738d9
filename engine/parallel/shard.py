"""Which part of a model one rank holds: arithmetic alone (the scheme of Megatron-LM, arXiv:1909.08053, section 3).

Heads and the inner size of feed-forward layers are cut into equal parts, the vocabulary of the head into ranges that
may differ by one. Embedding, norms and routers of experts are whole on every rank.
"""

from dataclasses import dataclass, replace

from baton.engine.config.model_config import DecoderConfig, ModelConfig, ModelError
from baton.engine.kv_cache.layout import KvLayout


@dataclass(frozen=True, slots=True)
class Shard:
    rank: int
    degree: int  # ranks in all

    def vocabulary(self, size: int) -> range:
        return range(self.rank * size // self.degree, (self.rank + 1) * size // self.degree)


ALONE = Shard(0, 1)


def shard_config(config: ModelConfig, degree: int) -> DecoderConfig:
    """The configuration of one rank; the vocabulary stays whole. Raises: ModelError where it cannot be cut so."""
    if not isinstance(config, DecoderConfig):
        raise ModelError(f"tensor-parallel is {degree}; {config.family} runs in transformers' own code, on one rank")

    def part(name: str, size: int) -> int:
        if size % degree:
            raise ModelError(f"tensor-parallel is {degree}; {name} of this model is {size}, not a multiple of it")
        return size // degree

    experts = config.experts
    return replace(
        config,
        num_heads=part("num_attention_heads", config.num_heads),
        num_kv_heads=part("num_key_value_heads", config.num_kv_heads),
        intermediate_size=part("intermediate_size", config.intermediate_size),
        experts=experts and replace(experts, inner_size=part("moe_intermediate_size", experts.inner_size)),
    )


def shard_layout(layout: KvLayout, degree: int) -> KvLayout:
    """Of one rank's pool: as many blocks, some of the heads."""
    return replace(layout, num_kv_heads=layout.num_kv_heads // degree)
