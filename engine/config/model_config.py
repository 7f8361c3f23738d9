"""The engine's configuration of a model. engine/config/config_file.py reads it."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from baton.kernels.types import Routing
from baton.text.host import files

CONFIG_FILE = "config.json"


class ModelError(files.FileRefused):
    """This checkpoint cannot be served; the message names the file, field or tensor, and the supported values."""


class NotInDecoderError(ModelError):
    """A feature that the decoder lacks, though its family is known."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Of any architecture: the size of its KV and the bounds of its requests."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the feed-forward layers
    num_layers: int
    num_heads: int
    num_kv_heads: int  # heads of keys and values as they are stored
    head_dim: int  # of keys, and of values as they are stored
    max_positions: int
    eos_token_ids: frozenset[int]

    @property
    def makes_answers(self) -> bool:
        """Else vectors or scores alone."""
        return True

    @property
    def value_prefix(self) -> int | None:
        """Of a stored key, so many numbers at its beginning are the value too; None: values are stored apart."""
        return None

    @property
    def kv_layers(self) -> int:
        """Layers that have keys and values."""
        return self.num_layers

    @property
    def state_numbers(self) -> int:
        """Of what a block has beside keys and values, float32: 0 where a model keeps nothing else."""
        return 0

    @property
    def state_ranks(self) -> int:
        """Those numbers are the part of one of so many ranks."""
        return 1


@dataclass(frozen=True, slots=True)
class EncoderConfig(ModelConfig):
    """Each token attends to all of its prompt, so that nothing of one is of use to another: it keeps no KV.

    Its pool has one number a token, which stands for the room of the prompts that are computed at once.
    """

    labels: int | None  # of its classification head; None: it has none
    text_types: int  # that tokens have an embedding for; 0: none
    padding_id: int | None  # of families that count positions from behind it; None: from 0

    @property
    def makes_answers(self) -> bool:
        return False


class RopeKind(Enum):
    NONE = "none"  # a layer that does not rotate
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"  # of sequences up to the length of the first training alone


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of a layer. engine/models/rope.py says which kind uses which fields."""

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
    magnitude: float = 1.0  # of cosines and sines


class Activation(Enum):
    """What the gates of feed-forward layers go through."""

    SILU = "silu"
    GELU = "gelu_pytorch_tanh"
    CLAMPED = "clamped"  # gpt-oss's, which its `hidden_act` does not name


class QkNorm(Enum):
    """RMSNorm of queries and of keys, before rotation."""

    NONE = "none"
    HEADS = "heads"  # of each head by itself
    WHOLE = "whole"  # of all heads of a token together


@dataclass(frozen=True, slots=True)
class NormPlaces:
    """Names of a layer's norms in a checkpoint, in the order of their use; None where there is none."""

    attention: str | None = "input_layernorm"
    attention_end: str | None = None  # of what attention adds to the stream
    feed_forward: str | None = "post_attention_layernorm"
    feed_forward_end: str | None = None  # of what the feed-forward layer adds


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in place of the feed-forward layer."""

    layers: frozenset[int]  # that have experts; the others are dense
    count: int
    inner_size: int  # of each
    routing: Routing
    shared_size: int = 0  # inner size of what every token takes beside its experts
    gates_shared: bool = False  # by the sigmoid of a number of each token
    together: bool = False  # the checkpoint has those of a layer as one tensor for each projection, with biases


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (MLA, arXiv:2405.04434): of a token one row is kept for all heads.

    It is `rank` numbers, of which the keys and values of all heads are projections, and then `rope_dim` numbers of a
    key, rotated, which all heads share.
    """

    query_rank: int | None  # queries are projections of so many numbers; None: of the stream
    rank: int
    nope_dim: int  # numbers of a head's query and key that do not rotate
    rope_dim: int
    value_dim: int  # of a head
    interleaved: bool  # numbers that rotate together are side by side in the checkpoint
    norm_eps: float = 1e-6  # of both inner norms, whatever the others have


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Gated delta nets (arXiv:2412.06464) in place of some layers' attention: they keep a state of a sequence.

    A state has the last `kernel` inputs of a convolution, and of each value head a matrix of key_dim x value_dim.
    """

    layers: frozenset[int]
    key_heads: int  # of queries as of keys
    value_heads: int  # each takes query and key of head `head // (value_heads / key_heads)`
    key_dim: int
    value_dim: int
    kernel: int  # tokens that the convolution sees, the present one included
    interleaved: bool  # a projection has one key head after another, with all that belongs to it
    ranks: int = 1  # heads are the part of one of so many

    @property
    def channels(self) -> int:
        """Of the convolution: all queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_dim + self.value_size

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def layer_numbers(self) -> int:
        """Of one layer's state."""
        return self.value_heads * self.key_dim * self.value_dim + self.kernel * self.channels


@dataclass(frozen=True, slots=True)
class DecoderConfig(ModelConfig):
    """Of the families that engine/models/decoder.py computes itself."""

    rms_norm_eps: float
    ropes: tuple[RopeConfig, ...]  # per layer
    tie_word_embeddings: bool
    attention_bias: bool  # of the query, key and value projections
    output_bias: bool  # of attention's output projection
    qk_norm: QkNorm
    sliding_window: tuple[int | None, ...]  # per layer: tokens a query sees, itself included; None sees all
    rotary_dim: int  # of head_dim, so many numbers rotate
    attention_scale: float  # of products of queries and keys
    norms: NormPlaces
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    unused_layers: int = 0  # of the checkpoint, behind the last one: they predict tokens further ahead
    norm_offset: float = 0.0  # added to the weights of all norms
    wide_norms: bool = False  # norms round once, after their weight, which counts in a shorter dtype alone
    activation: Activation = Activation.SILU
    fused: bool = False  # the checkpoint has qkv_proj and gate_up_proj
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    logits_scale: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and feed-forward layers add to the stream
    sinks: bool = False  # attention has a learned score of each head beside those of tokens
    labels: int | None = None  # of a classification head in place of that of the vocabulary; None: that
    delta: DeltaConfig | None = None
    gated_attention: bool = False  # each query has a gate behind it, by whose sigmoid what it attended to is multiplied

    @property
    def makes_answers(self) -> bool:
        return self.labels is None

    @property
    def value_prefix(self) -> int | None:
        return None if self.latent is None else self.latent.rank

    @property
    def unused_tensors(self) -> tuple[str, ...]:
        """How names of tensors begin that a checkpoint may have, and that are not read."""
        beyond = range(self.num_layers, self.num_layers + self.unused_layers)
        drafting = ("mtp.",) if self.delta is not None else ()
        return (*(f"model.layers.{index}." for index in beyond), *drafting)

    @property
    def attended_size(self) -> int:
        """Numbers of a token that attention hands to its output projection."""
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def kv_layers(self) -> int:
        return self.num_layers - (0 if self.delta is None else len(self.delta.layers))

    @property
    def state_numbers(self) -> int:
        return 0 if self.delta is None else len(self.delta.layers) * self.delta.layer_numbers

    @property
    def state_ranks(self) -> int:
        return 1 if self.delta is None else self.delta.ranks


def read_json(path: Path) -> dict[str, Any]:
    """Raises: ModelError for a file that is not there or no JSON object."""
    return files.read_json(path, ModelError, dict)
