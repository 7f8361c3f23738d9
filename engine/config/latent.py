"""Convert transformers' fields of latent attention to a LatentConfig."""

import math
from collections.abc import Mapping
from typing import Any

from baton.engine.config.limits import positive_sizes
from baton.engine.config.model_config import LatentConfig, NotInDecoderError
from baton.engine.config.rope import yarn_magnitude


def latent_config(fields: Mapping[str, Any]) -> LatentConfig:
    """Convert the fields of config.json. Raises: ModelError, NotInDecoderError."""
    query_rank = fields["q_lora_rank"]
    rank, nope_dim, rope_dim, value_dim = positive_sizes(
        fields, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    )
    if query_rank is None and fields.get("attention_bias"):
        raise NotInDecoderError("config.json: attention_bias without q_lora_rank is not supported")
    return LatentConfig(
        query_rank=None if query_rank is None else int(query_rank),
        rank=rank,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=value_dim,
        interleaved=bool(fields.get("rope_interleave", True)),
    )


def latent_scale(latent: LatentConfig, rope: Mapping[str, Any]) -> float:
    """Return the scale of attention scores, with the square of YaRN's magnitude if `rope` has `mscale_all_dim`."""
    scale = 1.0 / math.sqrt(latent.nope_dim + latent.rope_dim)
    of_all = rope.get("mscale_all_dim")
    if rope.get("rope_type", "default") == "default" or not of_all:
        return scale
    return scale * yarn_magnitude(float(rope["factor"]), of_all) ** 2
