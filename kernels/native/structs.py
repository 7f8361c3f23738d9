"""C structs and constants that the native library and Python both define, and the check that they agree.

C++ defines the structs in arguments.h, decoder.h, sampling.h and headers that these include, and the constants in
limits.h.
"""

from ctypes import CDLL, POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p, sizeof

from baton.kernels.types import MIN_WEIGHT_SUM, SWIGLU_ALPHA, SWIGLU_LIMIT

HEAD_DIM_MULTIPLE = 16  # head_dim and value_dim must be multiples of this, for vectors of every processor
MAX_HEAD_DIM = 576
MAX_HEADS = 256
MAX_GROUP = 144  # maximum number of query heads per KV head
PIECE_TOKENS = 256  # tokens of the smallest piece into which a context is split
MOST_PIECES = 16  # maximum number of pieces of a context


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
    _fields_ = (
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int64),
        ("sinks", c_void_p),
    )


class WeightStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("data", "scales", "zeros", "offsets", "bias")),
        *((name, c_int64) for name in ("outputs", "inputs", "group_inputs")),
        ("stored", c_int32),
    )


class RoutingStruct(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("per_token", "groups", "kept_groups", "judged_by")),
        ("scale", c_float),
        *((name, c_int32) for name in ("is_sigmoid", "is_normalised")),
    )


class GatedWeightsStruct(Structure):
    _fields_ = (*((name, WeightStruct) for name in ("gate_up", "down")), ("gate", c_int32))


class ExpertsStruct(Structure):
    _fields_ = (
        ("router", WeightStruct),
        ("correction", c_void_p),
        *((name, POINTER(GatedWeightsStruct)) for name in ("experts", "shared")),
        ("shared_gate", POINTER(WeightStruct)),
        ("routing", RoutingStruct),
    )


class PrefillArgumentsStruct(Structure):
    _fields_ = (
        ("pages", PagesStruct),
        ("scoring", ScoringStruct),
        *((name, c_void_p) for name in ("query", "output", "block_ids")),
        *((name, c_int64) for name in ("tokens", "heads", "kv_heads", "head_dim", "value_dim", "start")),
        ("threads", c_int32),
    )


class DecodeArgumentsStruct(Structure):
    _fields_ = (
        ("pages", PagesStruct),
        ("scoring", ScoringStruct),
        *((name, c_void_p) for name in ("query", "output", "parts", "block_ids", "block_starts", "context_tokens")),
        *((name, c_int64) for name in ("sequences", "heads", "kv_heads", "head_dim", "value_dim")),
        ("threads", c_int32),
    )


class LinearArgumentsStruct(Structure):
    _fields_ = (
        ("weight", WeightStruct),
        ("x", c_void_p),
        ("output", c_void_p),
        ("rows", c_int64),
        ("threads", c_int32),
        ("gate", c_int32),
    )


class HeadLinearArgumentsStruct(Structure):
    _fields_ = (
        ("weight", WeightStruct),
        *((name, c_void_p) for name in ("x", "output")),
        *((name, c_int64) for name in ("rows", "heads")),
        ("threads", c_int32),
    )


class GatherArgumentsStruct(Structure):
    _fields_ = (
        ("weight", WeightStruct),
        ("token_ids", c_void_p),
        ("rows", c_void_p),
        ("count", c_int64),
        ("threads", c_int32),
    )


class RotateStoreStruct(Structure):
    _fields_ = (
        ("pages", PagesStruct),
        *((name, c_void_p) for name in ("qkv", "query", "cos", "sin", "slots", "query_norm", "key_norm")),
        *((name, c_int64) for name in ("rows", "heads", "kv_heads", "head_dim", "query_stride", "rotary_dim")),
        ("eps", c_float),
        *((name, c_int32) for name in ("norms_are_whole", "threads")),
    )


class StateRunsStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("starts", "sources", "destinations", "begins")),
        ("runs", c_int64),
    )


class ConvolutionStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "bias", "output", "states")),
        ("runs", StateRunsStruct),
        *((name, c_int64) for name in ("row_stride", "block_stride", "channels", "kernel")),
        *((name, c_int32) for name in ("activates", "threads")),
    )


class DeltaRuleStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value", "decay", "beta", "rate", "bias", "output", "states")),
        ("runs", StateRunsStruct),
        *((name, c_int64) for name in ("query_stride", "key_stride", "value_stride", "block_stride")),
        *((name, c_int64) for name in ("key_heads", "value_heads", "key_dim", "value_dim")),
        ("threads", c_int32),
    )


class StateScanStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value", "steps", "rate", "bias", "skip", "output", "states")),
        ("runs", StateRunsStruct),
        *((name, c_int64) for name in ("query_stride", "key_stride", "value_stride", "step_stride", "block_stride")),
        *((name, c_int64) for name in ("groups", "heads", "state_dim", "head_dim")),
        *((name, c_float) for name in ("least_step", "most_step")),
        ("threads", c_int32),
    )


class SurveyArgumentsStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "allowed", "best", "log_totals", "finite")),
        *((name, c_int64) for name in ("rows", "size", "stride")),
        ("threads", c_int32),
    )


class SampleArgumentsStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "temperatures", "top_k", "top_p", "numbers")),
        *((name, c_void_p) for name in ("token_ids", "logprobs")),
        *((name, c_int64) for name in ("rows", "size", "stride")),
        ("threads", c_int32),
    )


class TakeArgumentsStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "taken", "rows")),
        *((name, c_int64) for name in ("count", "size", "stride")),
    )


class LatentStruct(Structure):
    _fields_ = (
        ("query_up", POINTER(WeightStruct)),
        *((name, c_void_p) for name in ("query_norm", "norm")),
        *((name, WeightStruct) for name in ("to_keys", "to_values")),
        *((name, c_int64) for name in ("rank", "nope_dim", "rope_dim", "value_dim", "groups")),
        ("eps", c_float),
        ("is_interleaved", c_int32),
    )


class DeltaNetStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("convolution", "rate", "bias", "norm")),
        *((name, c_int64) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "kernel", "first_number")),
        ("eps", c_float),
        ("is_interleaved", c_int32),
    )


class ShortConvolutionStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "bias")),
        *((name, c_int64) for name in ("channels", "kernel", "first_number")),
    )


class MambaStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("convolution", "convolution_bias", "rate", "bias", "skip", "norm")),
        *((name, c_int64) for name in ("groups", "heads", "state_dim", "head_dim", "kernel", "first_number")),
        *((name, c_float) for name in ("least_step", "most_step", "eps")),
    )


class DecoderLayerStruct(Structure):
    _fields_ = (
        *((name, WeightStruct) for name in ("qkv", "output")),
        ("feed_forward", GatedWeightsStruct),
        ("experts", POINTER(ExpertsStruct)),
        *((name, c_void_p) for name in ("attention_norm", "feed_forward_norm")),
        *((name, c_void_p) for name in ("attention_end_norm", "feed_forward_end_norm", "query_norm", "key_norm")),
        ("latent", POINTER(LatentStruct)),
        ("delta", POINTER(DeltaNetStruct)),
        ("convolution", POINTER(ShortConvolutionStruct)),
        ("mamba", POINTER(MambaStruct)),
        ("scoring", ScoringStruct),
        *((name, c_void_p) for name in ("pages", "scales")),
        *((name, c_int32) for name in ("table", "norms_are_whole", "is_gated", "group")),
    )


class PrefillChunkStruct(Structure):
    _fields_ = (("block_ids", c_void_p), *((name, c_int64) for name in ("first_row", "tokens", "start")))


class GroupRowsStruct(Structure):
    _fields_ = tuple((name, c_void_p) for name in ("slots", "block_ids", "block_starts", "chunks"))


class DecoderArgumentsStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("layers", "groups")),
        ("pages", PagesStruct),
        *((name, c_void_p) for name in ("residual", "cos", "sin", "context_tokens")),
        ("runs", StateRunsStruct),
        ("states", c_void_p),
        *((name, c_int64) for name in ("state_stride", "layer_count", "chunk_count", "rows", "decode_rows")),
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "head_dim", "rotary_dim")),
        ("eps", c_float),
        ("threads", c_int32),
    )


STRUCTS = {
    struct.__name__.removesuffix("Struct"): struct
    for struct in Structure.__subclasses__()
    if struct.__module__ == __name__
}
"""All structs of this module, by their names in C++."""


class _Limit(Structure):
    _fields_ = (("name", c_char_p), ("value", c_double))


CONSTANTS = {
    "MAX_HEAD_DIM": MAX_HEAD_DIM,
    "MAX_HEADS": MAX_HEADS,
    "MAX_GROUP": MAX_GROUP,
    "PIECE_TOKENS": PIECE_TOKENS,
    "MOST_PIECES": MOST_PIECES,
    "SWIGLU_LIMIT": SWIGLU_LIMIT,
    "SWIGLU_ALPHA": SWIGLU_ALPHA,
    "MIN_WEIGHT_SUM": MIN_WEIGHT_SUM,
}


class LimitMismatch(Exception):
    """Error: the native library was built with other constants or structs than those in Python."""


def check_limits(library: CDLL) -> None:
    """Compare all shared constants and struct sizes with those of the library. Raises: LimitMismatch."""
    expected = {name: c_float(value).value for name, value in CONSTANTS.items()}
    expected |= {f"sizeof {name}": float(sizeof(struct)) for name, struct in STRUCTS.items()}
    library.baton_limits.restype = POINTER(_Limit)
    found: dict[str, float] = {}
    for limit in library.baton_limits():
        if limit.name is None:
            break
        found[limit.name.decode()] = limit.value
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise LimitMismatch(
                f"{name} is {expected.get(name)} in kernels/native/structs.py and {found.get(name)} in the native "
                "library; change both and build it again: python -m baton.kernels.native.build"
            )
