"""Convert transformers' fields of gated delta nets to a DeltaConfig."""

from collections.abc import Mapping
from typing import Any

from baton.engine.config.limits import positive_sizes
from baton.engine.config.model_config import DeltaConfig, ModelError

FULL, LINEAR = "full_attention", "linear_attention"
SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def delta_config(fields: Mapping[str, Any], interleaved: bool) -> DeltaConfig:
    """Convert the fields of config.json. Raises: ModelError."""
    kinds, layers = fields["layer_types"], int(fields["num_hidden_layers"])
    if len(kinds) != layers or not set(kinds) <= {FULL, LINEAR}:
        raise ModelError(f"config.json: layer_types must name {layers} layers, each one of {FULL}, {LINEAR}")
    if FULL not in kinds:
        raise ModelError(f"config.json: layer_types must have at least one {FULL} layer")
    key_heads, value_heads, key_dim, value_dim, kernel = positive_sizes(fields, *SIZES)
    if value_heads % key_heads:
        raise ModelError(
            f"config.json: linear_num_value_heads {value_heads} is no multiple of linear_num_key_heads {key_heads}"
        )
    linear = frozenset(index for index, kind in enumerate(kinds) if kind == LINEAR)
    return DeltaConfig(linear, key_heads, value_heads, key_dim, value_dim, kernel, interleaved)
