"""Model families that Baton's own decoder computes: one entry each, with its differences from Llama.

transformers reads their configurations, so entries use its field names. DecoderConfig (model_config.py) explains each
field; config_file.py combines both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from baton.engine.config.model_config import LLAMA_NAMES, ModuleNames, NormPlaces, QkNorm
from baton.kernels.types import GatingFunction


class Bias(Enum):
    """Choice of attention's projections that have biases."""

    STATED = auto()  # all four, if `attention_bias` is true
    NOT_OUTPUT = auto()  # queries, keys and values, if `attention_bias` is true
    OUTPUT_APART = auto()  # output if `attention_out_bias`; queries, keys and values if `attention_bias`
    QKV = auto()  # queries, keys and values, always


class Windows(Enum):
    NONE = auto()
    ALL = auto()  # `sliding_window` in every layer
    BY_LAYER = auto()  # `sliding_window` in the layers named by `layer_types`


class Rotating(Enum):
    """Choice of layers that rotate queries and keys."""

    ALL = auto()
    STATED = auto()  # layers whose entry in `no_rope_layers` is not 0
    WINDOWED = auto()  # layers with a window; all layers if the model has no window


class QueryScaling(Enum):
    """Choice of layers whose queries are scaled by position, and of the fields that say how."""

    YARN = auto()  # all layers, by `llama_4_scaling_beta` of rope_parameters
    UNROTATED = auto()  # layers without rotation, by `attn_scale` and `floor_scale` if `attn_temperature_tuning`


class Recurrence(Enum):
    """Kind of the layers with a recurrent state."""

    DELTA_INTERLEAVED = auto()  # gated delta nets of two modules, whose outputs are grouped by key head
    DELTA_APART = auto()  # queries, keys and values share a module; each other projection has its own
    CONVOLUTION = auto()  # gated short convolutions
    MAMBA = auto()  # Mamba2


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
    """Routing to grouped experts, which are used in addition to shared experts.

    A string names a field of config.json.
    """

    odds: GatingFunction
    judged_by: int
    corrected: bool
    normalised: str | None  # field that says whether routing weights are normalised; None: they are not
    methods: str | None = None  # field whose value "greedy" disables groups


SIGMOID_GROUPS = GroupedExperts(GatingFunction.SIGMOID, judged_by=2, corrected=True, normalised="norm_topk_prob")


@dataclass(frozen=True, slots=True)
class Family:
    """Differences of a family from Llama. A string names a field of config.json."""

    norms: NormPlaces = BEFORE
    norm_offset: float = 0.0
    wide_norms: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    qk_norm_flag: str | None = None  # field that turns `qk_norm` on; None: always on
    bias: Bias = Bias.STATED
    windows: Windows = Windows.BY_LAYER
    rotating: Rotating = Rotating.ALL
    fused: bool = False
    latent: bool = False  # DeepSeek's multi-head latent attention
    sinks: bool = False  # each head has a learned score that every query sees
    clamped: bool = False  # clamped feed-forward layers, as in gpt-oss
    grouped_experts: GroupedExperts | None = None
    recurrence: Recurrence | None = None
    modules: ModuleNames = LLAMA_NAMES
    gated_attention: bool = False
    gemma: bool = False  # structure of Gemma 3n and Gemma 4, see GemmaConfig
    activation: str = "hidden_act"
    scales_embedding_by_root: bool = False  # the factor is the square root of hidden_size
    embedding_scale: str | None = None
    residual_scale: str | None = None
    logits_divisor: str | None = None
    logits_softcap: str | None = None
    attention_scale: str | None = None  # field with the scale of scores; None: 1 / sqrt(head_dim)
    attention_scale_of: str | None = None  # field whose inverse square root is the scale of scores
    attention_softcap: str | None = None
    query_scaling: QueryScaling | None = None
    chunked: bool = False  # layers of kind chunked_attention attend within chunks of `attention_chunk_size`
    rotates_pairs: bool = False  # rotated numbers are adjacent in queries and keys
    rotates_part: bool = False  # `partial_rotary_factor` counts; transformers' code of other families ignores it


QWEN_HYBRID = Family(
    norm_offset=1.0,
    wide_norms=True,
    qk_norm=QkNorm.HEADS,
    bias=Bias.STATED,
    windows=Windows.NONE,
    recurrence=Recurrence.DELTA_APART,
    gated_attention=True,
    rotates_part=True,
)
LFM2 = Family(
    norms=NormPlaces(attention="operator_norm", feed_forward="ffn_norm"),
    qk_norm=QkNorm.HEADS,
    windows=Windows.NONE,
    recurrence=Recurrence.CONVOLUTION,
    modules=ModuleNames(
        norm="model.embedding_norm",
        recurrent="conv",
        output="out_proj",
        query_norm="q_layernorm",
        key_norm="k_layernorm",
        feed_forward="feed_forward",
        experts="feed_forward",
        gate_up=("w1", "w3"),
        down="w2",
        correction="expert_bias",
    ),
)
GRANITE = Family(
    windows=Windows.NONE,
    embedding_scale="embedding_multiplier",
    residual_scale="residual_multiplier",
    attention_scale="attention_multiplier",
    logits_divisor="logits_scaling",
)
GEMMA = Family(
    norms=AROUND,
    wide_norms=True,
    qk_norm=QkNorm.HEADS,
    gemma=True,
    activation="hidden_activation",
    scales_embedding_by_root=True,
    logits_softcap="final_logit_softcapping",
)
FAMILIES: Mapping[str, Family] = {
    "llama": Family(windows=Windows.NONE),
    "llama4_text": Family(
        windows=Windows.NONE,
        rotating=Rotating.STATED,
        qk_norm=QkNorm.LENGTH,
        qk_norm_flag="use_qk_norm",
        query_scaling=QueryScaling.UNROTATED,
        chunked=True,
        rotates_pairs=True,
        modules=ModuleNames(
            feed_forward="feed_forward", experts="feed_forward", shared="feed_forward.shared_expert", router="router"
        ),
    ),
    "mistral": Family(windows=Windows.ALL),
    "ministral": Family(),
    "ministral3": Family(windows=Windows.ALL, query_scaling=QueryScaling.YARN),
    "mixtral": Family(
        windows=Windows.ALL,
        modules=ModuleNames(experts="block_sparse_moe", gate_up=("w1", "w3"), down="w2"),
    ),
    "qwen2": Family(bias=Bias.QKV),
    "qwen3": Family(qk_norm=QkNorm.HEADS),
    "qwen3_moe": Family(qk_norm=QkNorm.HEADS, windows=Windows.ALL),
    "qwen3_next": replace(QWEN_HYBRID, recurrence=Recurrence.DELTA_INTERLEAVED),
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
    "gemma3n_text": GEMMA,
    "gemma4_text": replace(GEMMA, modules=ModuleNames(router="router.proj")),
    "phi3": Family(fused=True, windows=Windows.ALL, rotates_part=True, modules=ModuleNames(gate_up=("gate_up_proj",))),
    "olmo2": Family(norms=AFTER, wide_norms=True, qk_norm=QkNorm.WHOLE, windows=Windows.NONE),
    "olmo3": Family(norms=AFTER, wide_norms=True, qk_norm=QkNorm.WHOLE),
    "granite": GRANITE,
    "granitemoehybrid": replace(
        GRANITE,
        rotating=Rotating.STATED,
        rotates_part=True,  # Bamba in GGUF files is of this family
        recurrence=Recurrence.MAMBA,
        modules=ModuleNames(
            recurrent="mamba",
            feed_forward="shared_mlp",
            experts="block_sparse_moe",
            shared="shared_mlp",
            gate_up=("input_linear",),
            down="output_linear",
            router="router.layer",
        ),
    ),
    "bamba": Family(
        norms=NormPlaces(feed_forward="pre_ff_layernorm"),
        windows=Windows.NONE,
        rotates_part=True,
        recurrence=Recurrence.MAMBA,
        modules=ModuleNames(norm="model.final_layernorm", recurrent="mamba", feed_forward="feed_forward"),
    ),
    "nemotron_h": Family(
        norms=NormPlaces(attention="norm", feed_forward="norm"),
        wide_norms=True,
        windows=Windows.NONE,
        rotating=Rotating.STATED,
        recurrence=Recurrence.MAMBA,
        grouped_experts=SIGMOID_GROUPS,
        modules=ModuleNames(
            embedding="model.embeddings",
            norm="model.norm_f",
            attention="mixer",
            recurrent="mixer",
            feed_forward="mixer",
            experts="mixer",
            shared="mixer.shared_experts",
            gate_up=("up_proj",),
        ),
    ),
    "lfm2": LFM2,
    "lfm2_moe": LFM2,
    "smollm3": Family(rotating=Rotating.STATED),
    "exaone4": Family(norms=AFTER, qk_norm=QkNorm.HEADS, rotating=Rotating.WINDOWED),
    "gpt_oss": Family(wide_norms=True, sinks=True, clamped=True, modules=ModuleNames(router="router")),
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
        rotates_part=True,
        grouped_experts=SIGMOID_GROUPS,
    ),
}
