"""The families that Baton's own decoder computes: of each one entry, with what it has beside or in place of Llama's.

transformers reads their configurations, so that an entry names fields as transformers does. What a field is for stands
beside it in DecoderConfig (model_config.py); config_file.py brings the two together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from baton.engine.config.model_config import NormPlaces, QkNorm
from baton.kernels.types import GatingFunction


class Bias(Enum):
    """Of attention's projections."""

    STATED = auto()  # `attention_bias`: of all four
    NOT_OUTPUT = auto()  # `attention_bias`: of all but the output
    OUTPUT_APART = auto()  # `attention_bias`, and `attention_out_bias` of the output
    QKV = auto()  # of queries, keys and values, always


class Windows(Enum):
    NONE = auto()
    ALL = auto()  # `sliding_window` in every layer
    BY_LAYER = auto()  # `sliding_window` in the layers that `layer_types` says


class Rotating(Enum):
    """Which layers rotate queries and keys."""

    ALL = auto()
    STATED = auto()  # `no_rope_layers`, where 0 stands for a layer that does not
    WINDOWED = auto()  # those with a window, where any has one


class Delta(Enum):
    """How the projections of gated delta nets lie."""

    INTERLEAVED = auto()  # by key head, in two modules
    APART = auto()  # queries, keys and values in one module, gates and the rest in one each


BEFORE = NormPlaces()
AROUND = NormPlaces(
    attention_end="post_attention_layernorm",
    feed_forward="pre_feedforward_layernorm",
    feed_forward_end="post_feedforward_layernorm",
)
AFTER = NormPlaces(
    attention=None,
    attention_end="post_attention_layernorm",
    feed_forward=None,
    feed_forward_end="post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """How a token chooses among experts that stand in groups, beside experts that it always takes.

    A string names a field of config.json.
    """

    odds: GatingFunction
    judged_by: int
    corrected: bool
    normalised: str | None  # without it: they are not
    methods: str | None = None  # whether groups count at all: what "greedy" means


SIGMOID_GROUPS = GroupedExperts(GatingFunction.SIGMOID, judged_by=2, corrected=True, normalised="norm_topk_prob")


@dataclass(frozen=True, slots=True)
class Family:
    """Llama's values are the defaults. A string names a field of config.json."""

    norms: NormPlaces = BEFORE
    norm_offset: float = 0.0
    wide_norms: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    qk_norm_flag: str | None = None  # without it: always
    bias: Bias = Bias.STATED
    windows: Windows = Windows.BY_LAYER
    rotating: Rotating = Rotating.ALL
    fused: bool = False
    latent: bool = False  # attention is DeepSeek's
    sinks: bool = False  # attention has a learned score of each head beside those of tokens
    clamped: bool = False  # feed-forward layers are gpt-oss's
    grouped_experts: GroupedExperts | None = None
    delta: Delta | None = None
    gated_attention: bool = False
    activation: str = "hidden_act"
    scales_embedding_by_root: bool = False  # of hidden_size
    embedding_scale: str | None = None
    residual_scale: str | None = None
    logits_divisor: str | None = None
    logits_softcap: str | None = None
    attention_scale: str | None = None  # without it: 1 / sqrt(head_dim)
    attention_scale_of: str | None = None  # 1 / sqrt of this field
    attention_softcap: str | None = None


QWEN_HYBRID = Family(
    norm_offset=1.0,
    wide_norms=True,
    qk_norm=QkNorm.HEADS,
    bias=Bias.STATED,
    windows=Windows.NONE,
    delta=Delta.APART,
    gated_attention=True,
)
FAMILIES: Mapping[str, Family] = {
    "llama": Family(windows=Windows.NONE),
    "mistral": Family(windows=Windows.ALL),
    "mixtral": Family(windows=Windows.ALL),
    "qwen2": Family(bias=Bias.QKV),
    "qwen3": Family(qk_norm=QkNorm.HEADS),
    "qwen3_moe": Family(qk_norm=QkNorm.HEADS, windows=Windows.ALL),
    "qwen3_next": replace(QWEN_HYBRID, delta=Delta.INTERLEAVED),
    "qwen3_5_text": QWEN_HYBRID,
    "qwen3_5_moe_text": QWEN_HYBRID,
    "gemma2": Family(
        norms=AROUND,
        norm_offset=1.0,
        wide_norms=True,
        activation="hidden_activation",
        scales_embedding_by_root=True,
        attention_scale_of="query_pre_attn_scalar",
        attention_softcap="attn_logit_softcapping",
        logits_softcap="final_logit_softcapping",
    ),
    "gemma3_text": Family(
        norms=AROUND,
        norm_offset=1.0,
        wide_norms=True,
        qk_norm=QkNorm.HEADS,
        activation="hidden_activation",
        scales_embedding_by_root=True,
        attention_scale_of="query_pre_attn_scalar",
        logits_softcap="final_logit_softcapping",
    ),
    "phi3": Family(fused=True, windows=Windows.ALL),
    "olmo2": Family(norms=AFTER, wide_norms=True, qk_norm=QkNorm.WHOLE, windows=Windows.NONE),
    "olmo3": Family(norms=AFTER, wide_norms=True, qk_norm=QkNorm.WHOLE),
    "granite": Family(
        windows=Windows.NONE,
        embedding_scale="embedding_multiplier",
        residual_scale="residual_multiplier",
        attention_scale="attention_multiplier",
        logits_divisor="logits_scaling",
    ),
    "smollm3": Family(rotating=Rotating.STATED),
    "exaone4": Family(norms=AFTER, qk_norm=QkNorm.HEADS, rotating=Rotating.WINDOWED),
    "gpt_oss": Family(wide_norms=True, sinks=True, clamped=True),
    "seed_oss": Family(bias=Bias.OUTPUT_APART, windows=Windows.NONE),
    "deepseek_v2": Family(
        windows=Windows.NONE,
        latent=True,
        grouped_experts=GroupedExperts(
            GatingFunction.SOFTMAX, judged_by=1, corrected=False, normalised=None, methods="topk_method"
        ),
    ),
    "deepseek_v3": Family(windows=Windows.NONE, latent=True, grouped_experts=SIGMOID_GROUPS),
    "glm4_moe": Family(
        bias=Bias.NOT_OUTPUT,
        windows=Windows.NONE,
        qk_norm=QkNorm.HEADS,
        qk_norm_flag="use_qk_norm",
        grouped_experts=SIGMOID_GROUPS,
    ),
}
