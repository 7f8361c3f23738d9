"""Convert transformers' fields of layers with a recurrent state to a RecurrentConfig."""

from collections.abc import Mapping
from typing import Any

from baton.engine.config.families import Recurrence
from baton.engine.config.limits import positive_sizes
from baton.engine.config.model_config import (
    ConvolutionConfig,
    DeltaConfig,
    MambaConfig,
    ModelError,
    NotInDecoderError,
    RecurrentConfig,
)

FULL, LINEAR, CONVOLUTION, FEED_FORWARD = "full_attention", "linear_attention", "conv", "mlp"
DELTA_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
MAMBA_SIZES = ("mamba_n_groups", "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_d_conv")


def recurrent_config(fields: Mapping[str, Any], kind: Recurrence) -> RecurrentConfig | None:
    """Convert the fields of config.json; None if no layer has a recurrent state. Raises: ModelError."""
    match kind:
        case Recurrence.CONVOLUTION:
            [kernel] = positive_sizes(fields, "conv_L_cache")
            layers = _layers(fields, CONVOLUTION)
            return ConvolutionConfig(layers, int(fields["hidden_size"]), kernel, bool(fields["conv_bias"]))
        case Recurrence.MAMBA:
            layers = _layers(fields, LINEAR)
            return _mamba(fields, layers) if layers else None
        case _:
            return _delta(fields, _layers(fields, LINEAR), kind is Recurrence.DELTA_INTERLEAVED)


def _layers(fields: Mapping[str, Any], recurrent: str) -> frozenset[int]:
    kinds, layers = fields["layer_types"], int(fields["num_hidden_layers"])
    known = (FULL, recurrent, FEED_FORWARD) if fields.get("parts_apart") else (FULL, recurrent)
    if len(kinds) != layers or not set(kinds) <= set(known):
        raise ModelError(f"config.json: layer_types must name {layers} layers, each one of {', '.join(known)}")
    if FULL not in kinds:
        raise ModelError(f"config.json: layer_types must have at least one {FULL} layer")
    return frozenset(index for index, kind in enumerate(kinds) if kind == recurrent)


def _delta(fields: Mapping[str, Any], layers: frozenset[int], interleaved: bool) -> DeltaConfig:
    key_heads, value_heads, key_dim, value_dim, kernel = positive_sizes(fields, *DELTA_SIZES)
    if value_heads % key_heads:
        raise ModelError(
            f"config.json: linear_num_value_heads {value_heads} is no multiple of linear_num_key_heads {key_heads}"
        )
    return DeltaConfig(layers, key_heads, value_heads, key_dim, value_dim, kernel, interleaved)


def _mamba(fields: Mapping[str, Any], layers: frozenset[int]) -> MambaConfig:
    groups, heads, head_dim, state_dim, kernel = positive_sizes(fields, *MAMBA_SIZES)
    if heads % groups:
        raise ModelError(f"config.json: the number of Mamba heads {heads} is no multiple of that of groups {groups}")
    if fields["mamba_hidden_act"] != "silu":
        raise NotInDecoderError(
            f"config.json: mamba_hidden_act {fields['mamba_hidden_act']!r} is not supported; supported: 'silu'"
        )
    least, most = map(float, fields["time_step_limit"])
    biased, convolution_biased = bool(fields["mamba_proj_bias"]), bool(fields["mamba_conv_bias"])
    return MambaConfig(layers, groups, heads, head_dim, state_dim, kernel, biased, convolution_biased, (least, most))
