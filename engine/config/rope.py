"""Convert transformers' rotary parameters to a RopeConfig."""

import math
from collections.abc import Mapping
from typing import Any

from baton.engine.config.model_config import ModelError, NotInDecoderError, RopeConfig, RopeKind

DYNAMIC = "dynamic"  # frequencies change only beyond max_position_embeddings, which no request exceeds
SERVED = (*(kind.value for kind in RopeKind if kind is not RopeKind.NONE), DYNAMIC)
PER_SEQUENCE = {DYNAMIC, "longrope"}


def per_sequence_fault(parameters: Any) -> str | None:
    """Return why transformers' code cannot use `parameters`, else None. They may be nested by layer kind."""
    if not isinstance(parameters, dict):
        return None
    if (kind := parameters.get("rope_type")) in PER_SEQUENCE:
        return f"rope_type {kind!r} depends on the length of each sequence"
    return next(filter(None, map(per_sequence_fault, parameters.values())), None)


def rope_config(parameters: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Convert rotary parameters. Raises: NotInDecoderError if unsupported; ModelError if a field is missing."""
    name = parameters.get("rope_type", "default")
    if name not in SERVED:
        raise NotInDecoderError(f"config.json: rope_type {name!r} is not supported; supported: {', '.join(SERVED)}")
    kind = RopeKind.DEFAULT if name == DYNAMIC else RopeKind(name)
    try:
        theta = float(parameters["rope_theta"])
        match kind:
            case RopeKind.LINEAR:
                return RopeConfig(kind, theta, float(parameters["factor"]))
            case RopeKind.PROPORTIONAL:
                part = float(parameters.get("partial_rotary_factor", 1.0))
                return RopeConfig(kind, theta, float(parameters.get("factor", 1.0)), part=part)
            case RopeKind.LLAMA3:
                factor = float(parameters["factor"])
                low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
                return RopeConfig(kind, theta, factor, low, high, int(parameters["original_max_position_embeddings"]))
            case RopeKind.YARN:
                return _yarn(parameters, theta, max_positions)
            case RopeKind.LONGROPE:
                return _longrope(parameters, theta, max_positions)
            case _:
                return RopeConfig(kind, theta)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"config.json: rope_parameters of type {name!r}: missing or invalid: {error}") from error


def _yarn(parameters: Mapping[str, Any], theta: float, max_positions: int) -> RopeConfig:
    """Convert YaRN (arXiv:2309.00071), with the magnitudes of DeepSeek's variant if stated."""
    original = int(parameters["original_max_position_embeddings"])
    factor = _factor(parameters, max_positions, original)
    magnitude, own, of_all = (parameters.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if magnitude is None:
        pair = (own, of_all) if own and of_all else (1.0, 0.0)
        magnitude = yarn_magnitude(factor, pair[0]) / yarn_magnitude(factor, pair[1])
    return RopeConfig(
        RopeKind.YARN,
        theta,
        factor,
        original_max_positions=original,
        fast_turns=float(parameters.get("beta_fast") or 32.0),
        slow_turns=float(parameters.get("beta_slow") or 1.0),
        truncates=bool(parameters.get("truncate", True)),
        magnitude=float(magnitude),
    )


def yarn_magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(parameters: Mapping[str, Any], theta: float, max_positions: int) -> RopeConfig:
    """Convert LongRoPE (arXiv:2402.13753), only its short factors: DecoderConfig limits the context accordingly."""
    original = int(parameters["original_max_position_embeddings"])
    factor = _factor(parameters, max_positions, original)
    magnitude = parameters.get("attention_factor")
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    divisors = tuple(map(float, parameters["short_factor"]))
    return RopeConfig(
        RopeKind.LONGROPE,
        theta,
        factor,
        original_max_positions=original,
        divisors=divisors,
        magnitude=float(magnitude),
    )


def _factor(parameters: Mapping[str, Any], max_positions: int, original: int) -> float:
    stated = parameters.get("factor")
    return max_positions / original if stated is None else float(stated)
