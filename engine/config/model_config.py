"""The engine's configuration of a model; engine/config/config_file.py reads it."""

import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from baton.engine.weights.names import ELSEWHERE, text_name
from baton.kernels.types import Routing
from baton.text.host import files

CONFIG_FILE = "config.json"


class ModelError(files.FileRefused):
    """Checkpoint that cannot be served; the message names file, field or tensor, and supported values."""


class NotInDecoderError(ModelError):
    """Feature of a supported family that Baton's own decoder does not compute."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Configuration that models of every architecture have: the size of KV and the limits of requests."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # inner size of the feed-forward layers
    num_layers: int
    num_heads: int
    num_kv_heads: int  # KV heads in the pool
    head_dim: int  # size of a key, and of a value, in the pool
    max_positions: int
    eos_token_ids: frozenset[int]

    @property
    def makes_answers(self) -> bool:
        """Return whether the model generates tokens; other models return only vectors or scores."""
        return True

    @property
    def value_prefix(self) -> int | None:
        """Number of a stored key's leading numbers that are also the value; None: values are stored separately."""
        return None

    def tensor_name(self, stored: str) -> str | None:
        """Return the model's name of a tensor in a checkpoint; None for one that is not read."""
        return stored

    @property
    def kv_layers(self) -> int:
        return self.num_layers

    @property
    def kv_units(self) -> tuple[int, ...]:
        """Size of each layer's keys and values, one entry per layer with KV, in keys and values of the pool's shape."""
        return (1,) * self.kv_layers

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """Window of each layer with KV, None without a window; empty if windows do not release blocks."""
        return ()

    @property
    def state_numbers(self) -> int:
        """Number of float32 numbers in a block's recurrent state; 0 without one."""
        return 0

    @property
    def state_ranks(self) -> int:
        """Number of ranks among which a recurrent state is divided."""
        return 1


@dataclass(frozen=True, slots=True)
class EncoderConfig(ModelConfig):
    """Configuration of an encoder. Tokens attend to the complete prompt, so nothing is reusable and no KV is stored.

    Its pool stores one number per token, only to limit the prompts that are computed together.
    """

    labels: int | None  # outputs of the classification head; None without one
    text_types: int  # number of token types (first text, second text) with an embedding
    padding_id: int | None  # a prompt's first position is padding_id + 1; None: 0

    @property
    def makes_answers(self) -> bool:
        return False


class RopeKind(Enum):
    NONE = "none"  # layer without rotation
    DEFAULT = "default"
    PROPORTIONAL = "proportional"  # only the first `part` of all pairs rotate, at the frequencies of all pairs
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"  # used only within the original context


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of a layer. engine/models/rope.py shows which kind uses which fields."""

    kind: RopeKind
    theta: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    truncates: bool = True
    divisors: tuple[float, ...] = ()
    magnitude: float = 1.0  # factor of cosines and sines
    part: float = 1.0


class Activation(Enum):
    """Activation of the gates of feed-forward layers."""

    SILU = "silu"
    GELU = "gelu_pytorch_tanh"
    CLAMPED = "clamped"  # activation of gpt-oss, which its `hidden_act` does not name
    RELU2 = "relu2"  # square of ReLU, in feed-forward layers without a gate


class QkNorm(Enum):
    """RMSNorm of queries and keys, before rotation."""

    NONE = "none"
    HEADS = "heads"  # one norm per head
    WHOLE = "whole"  # one norm over all heads of a token
    LENGTH = "length"  # per head and without weights, in layers with rotation


@dataclass(frozen=True, slots=True)
class NormPlaces:
    """Names of a layer's norms in a checkpoint, in order of use; None for a missing norm."""

    attention: str | None = "input_layernorm"
    attention_end: str | None = None  # norm of attention's output
    feed_forward: str | None = "post_attention_layernorm"
    feed_forward_end: str | None = None  # norm of the feed-forward output


class StackedExperts(Enum):
    """Layout of weights that stack all experts of a layer, with gate outputs before up outputs in `gate_up_proj`."""

    ROWS = "rows"  # [experts, outputs, inputs]
    COLUMNS = "columns"  # [experts, inputs, outputs]
    INTERLEAVED = "interleaved"  # [experts, inputs, outputs]; gate and up outputs alternate (gpt-oss)


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Names of modules in a checkpoint: complete ones, those within a layer, and those within a part of a layer."""

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    attention: str = "self_attn"
    recurrent: str = "linear_attn"
    feed_forward: str = "mlp"
    experts: str = "mlp"  # part with router and experts
    shared: str = "mlp.shared_experts"
    output: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")  # or one that fuses both, or `up` alone without a gate
    down: str = "down_proj"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"


LLAMA_NAMES = ModuleNames()


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Mixture of experts that replaces the feed-forward layer."""

    layers: frozenset[int]  # layers with experts; the others are dense
    count: int
    inner_size: int  # inner size of one expert
    routing: Routing
    shared_size: int = 0  # inner size of the shared expert
    gates_shared: bool = False  # the shared expert's output is multiplied by a gate's sigmoid
    scales_inputs: bool = False  # an expert's weight multiplies its input instead of its output
    stacked: StackedExperts = StackedExperts.ROWS  # layout of experts that are not stored one by one
    biased: bool = False  # the experts' projections have biases


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (MLA, arXiv:2405.04434): one row per token is stored for all heads.

    The row has `rank` numbers, from which the keys and values of all heads are projected, then `rope_dim` rotated
    numbers of a key shared by all heads.
    """

    query_rank: int | None  # intermediate size of queries; None: queries are projected directly
    rank: int
    nope_dim: int  # unrotated numbers of a key, per head
    rope_dim: int
    value_dim: int  # numbers of a value, per head
    interleaved: bool  # rotated pairs are adjacent in the checkpoint
    norm_eps: float = 1e-6  # epsilon of q_a_layernorm and kv_a_layernorm


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Gated delta nets (arXiv:2412.06464) that replace attention in some layers by a recurrent state.

    A state has the last `kernel` inputs of a convolution, and per value head a matrix of key_dim x value_dim.
    """

    layers: frozenset[int]
    key_heads: int  # number of key heads, equal to that of query heads
    value_heads: int  # head h uses query and key of head h // (value_heads / key_heads)
    key_dim: int
    value_dim: int
    kernel: int  # tokens in the convolution, including the current one
    interleaved: bool  # the checkpoint groups a projection's outputs by key head
    ranks: int = 1  # ranks among which the heads are divided

    @property
    def channels(self) -> int:
        """Channels of the convolution: all queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_dim + self.value_size

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def layer_numbers(self) -> int:
        """Number of float32 numbers in one layer's state."""
        return math.prod(self.matrix_shape) + self.kernel * self.channels


@dataclass(frozen=True, slots=True)
class ConvolutionConfig:
    """Gated short convolutions (LFM2, arXiv:2511.23404) that replace attention in some layers.

    A state has the last `kernel` inputs of the convolution.
    """

    layers: frozenset[int]
    channels: int
    kernel: int  # tokens in the convolution, including the current one
    biased: bool  # projections and convolution have biases
    ranks: int = 1  # ranks among which the channels are divided

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return 0, 0, 0

    @property
    def layer_numbers(self) -> int:
        return self.kernel * self.channels


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Mamba2 layers (arXiv:2405.21060) that replace attention in some layers by a recurrent state.

    A state has the last `kernel` inputs of a convolution, and per head a matrix of state_dim x head_dim.
    """

    layers: frozenset[int]
    groups: int  # head h uses inputs and outputs of the state of group h // (heads / groups)
    heads: int
    head_dim: int
    state_dim: int
    kernel: int  # tokens in the convolution, including the current one
    biased: bool  # projections have biases
    convolution_biased: bool
    step_limits: tuple[float, float]  # smallest and largest time step
    ranks: int = 1

    @property
    def inner_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: all values, inputs and outputs of the state of a token."""
        return self.inner_size + 2 * self.groups * self.state_dim

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return self.heads, self.state_dim, self.head_dim

    @property
    def layer_numbers(self) -> int:
        return math.prod(self.matrix_shape) + self.kernel * self.channels


RecurrentConfig = DeltaConfig | ConvolutionConfig | MambaConfig


class HeadShape(NamedTuple):
    """Shape of a token's keys, and of its values, in one layer."""

    kv_heads: int
    head_dim: int

    @property
    def numbers(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class AltUpConfig:
    """Alternating updates (arXiv:2301.13310): several residual streams, of which each layer computes one."""

    streams: int
    active: int  # index of the stream that layers compute
    scales_output: bool  # whether the corrected stream is scaled before it reads the layer's token embedding
    laurel_rank: int  # rank of the learned residual connection around attention (arXiv:2411.07501)


@dataclass(frozen=True, slots=True)
class GemmaConfig:
    """Structure of Gemma 3n and Gemma 4. Tuples have one entry per layer.

    The last layers read the keys and values that an earlier layer of their kind has stored.
    """

    shapes: tuple[HeadShape, ...]
    sources: tuple[int, ...]  # index of the layer whose keys and values a layer reads, often its own
    keys_as_values: tuple[bool, ...]  # whether values are projected by `k_proj`
    inner_sizes: tuple[int, ...]  # inner sizes of the feed-forward layers
    sparsity: tuple[float, ...]  # share of gates that a feed-forward layer sets to zero
    embedding_size: int  # numbers of each layer's own token embedding; 0 without one
    embedding_vocab: int  # tokens with such an embedding; further tokens use that of token 0
    scales_layers: bool  # whether each layer's output has a learned factor
    altup: AltUpConfig | None = None


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Factor of queries in some layers: `1 + strength * ln(1 + floor((position + offset) / span))`."""

    strength: float
    span: int  # tokens
    offset: int  # tokens
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class DecoderConfig(ModelConfig):
    """Configuration of the families that engine/models/decoder.py computes."""

    rms_norm_eps: float
    ropes: tuple[RopeConfig, ...]  # one per layer
    tie_word_embeddings: bool
    attention_bias: bool  # query, key and value projections have biases
    output_bias: bool  # attention's output projection has a bias
    qk_norm: QkNorm
    sliding_window: tuple[int | None, ...]  # per layer: visible tokens including the query's own; None: all
    rotary_dim: int  # how many of a head's `head_dim` numbers are rotated
    attention_scale: float  # factor of attention scores
    norms: NormPlaces
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    unused_layers: int = 0  # layers for multi-token prediction, which follow the last used layer in the checkpoint
    norm_offset: float = 0.0  # added to the weights of all norms
    wide_norms: bool = False  # norms round to the model's dtype once, after multiplying by their weight
    activation: Activation = Activation.SILU
    fused: bool = False  # the checkpoint has qkv_proj and gate_up_proj
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    logits_scale: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # factor of the outputs of attention and feed-forward layers
    sinks: bool = False  # each head has a learned score that every query sees
    labels: int | None = None  # outputs of the classification head that replaces the vocabulary head; None: none
    recurrent: RecurrentConfig | None = None
    gated_attention: bool = False  # attention's output is multiplied by the sigmoid of a gate
    modules: ModuleNames = LLAMA_NAMES
    feed_forward_layers: frozenset[int] | None = None
    """Layers that only feed forward, while all others only mix tokens (Nemotron-H); None: each layer does both."""
    gemma: GemmaConfig | None = None
    query_scale: QueryScale | None = None
    attention_chunk: int | None = None  # tokens of a chunk, within which `chunked_layers` attend
    chunked_layers: frozenset[int] = frozenset()
    rotates_pairs: bool = False  # rotated numbers are adjacent in the checkpoint's queries and keys
    is_text_part: bool = False  # the checkpoint also has parts for images or sound, which are not read

    @property
    def rotary_dims(self) -> tuple[int, ...]:
        """Rotated numbers of a head, per layer."""
        if self.gemma is None:
            return (self.rotary_dim,) * self.num_layers
        return tuple(shape.head_dim for shape in self.gemma.shapes)

    @property
    def makes_answers(self) -> bool:
        return self.labels is None

    @property
    def value_prefix(self) -> int | None:
        return None if self.latent is None else self.latent.rank

    def tensor_name(self, stored: str) -> str | None:
        name = text_name(stored) if self.is_text_part or stored.startswith(ELSEWHERE) else stored
        beyond = range(self.num_layers, self.num_layers + self.unused_layers)
        others = ("mtp.", "model.visual.") if self.recurrent is not None else ()  # ignored by transformers too
        unused = (*(f"model.layers.{index}." for index in beyond), *others, *self.unused_projections)
        return None if name is None or name.startswith(unused) else name

    @property
    def unused_projections(self) -> tuple[str, ...]:
        """Name prefixes of the projections of layers that read the keys and values of another layer."""
        sources = () if self.gemma is None else self.gemma.sources
        readers = [index for index, source in enumerate(sources) if source != index]
        parts = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
        return tuple(f"model.layers.{index}.self_attn.{part}" for index in readers for part in parts)

    @property
    def attended_size(self) -> int:
        """Size of attention's output per token."""
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def kv_layers(self) -> int:
        if self.gemma is not None:
            return len(set(self.gemma.sources))
        return len(self.attending_layers)

    @property
    def attending_layers(self) -> tuple[int, ...]:
        """Layers with keys and values, in order."""
        others = frozenset() if self.recurrent is None else self.recurrent.layers
        others |= self.feed_forward_layers or frozenset()
        return tuple(index for index in range(self.num_layers) if index not in others)

    @property
    def kv_units(self) -> tuple[int, ...]:
        if self.gemma is None:
            return (1,) * self.kv_layers
        return tuple(
            shape.numbers // (self.num_kv_heads * self.head_dim) for shape in self.gemma.shapes[: self.kv_layers]
        )

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        return self.sliding_window[: self.kv_layers] if self.recurrent is None else ()

    @property
    def state_numbers(self) -> int:
        return 0 if self.recurrent is None else len(self.recurrent.layers) * self.recurrent.layer_numbers

    @property
    def state_ranks(self) -> int:
        return 1 if self.recurrent is None else self.recurrent.ranks


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises: ModelError if the file is missing or invalid."""
    return files.read_json(path, ModelError, dict)
