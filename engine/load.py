"""A checkpoint's folder to a model in memory: of one rank or of several, with or without adapters.

In two stages: engine/weights/ reads a `Weight`, and engine/models/linear.py makes of it what multiplies best here.
Below stands where a Hugging Face checkpoint keeps the decoder's tensors. Query, key, value are fused, gate and up too.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import DecoderConfig, ModelError
from baton.engine.lora.adapters import AdapterSet
from baton.engine.models.batch import Model
from baton.engine.models.decoder import (
    DecoderModel,
    Layer,
    inverse_frequencies,
    rotation,
    with_native_layers,
)
from baton.engine.models.feed_forward import Experts, FeedForward, Gated, stacked
from baton.engine.models.linear import (
    DenseEmbedding,
    Embedding,
    Kernels,
    Linear,
    MatmulBackend,
    PackedEmbedding,
    PackedLinear,
    is_bfloat16,
)
from baton.engine.models.residual import Norm
from baton.engine.parallel.collectives import Collectives
from baton.engine.parallel.model import parallel_part
from baton.engine.parallel.shard import ALONE, Shard, shard_config
from baton.engine.weights.formats import MADE_WHILE_LOADING, WITH_INT8_HEAD, WeightFormat, weight_format
from baton.engine.weights.read import WeightSource, open_weights
from baton.engine.weights.weight import PlainWeight, quantise_int8
from baton.kernels.dispatch import uses_triton
from baton.kernels.linear import GATHERED
from baton.kernels.types import HeadNorms, Scoring


def load_model(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    adapters: AdapterSet | None = None,
    quantize: str = WeightFormat.PLAIN,
    packed: bool = False,
) -> Model:
    """Reads the checkpoint in `folder`; raises ModelError for missing or surplus tensors.

    `packed`: projections in the layout of the CPU's native kernels, where those are there.
    With `adapters`, those that are added there later may change the model's projections. `quantize` is a WeightFormat.

    A progress bar goes to stderr when that is a terminal, and with `progress` in any case.
    """
    config = read_model_config(folder)
    format = weight_format(folder, quantize)
    if isinstance(config, DecoderConfig):
        backend = MatmulBackend(device, dtype, packed)
        return with_native_layers(_load_decoder(folder, config, format, backend, progress, ALONE, adapters))
    if format is not WeightFormat.PLAIN:
        raise ModelError(f"{config.family} runs through transformers' own code, which takes plain weights only")
    from baton.engine.models.transformers_checkpoint import load_transformers_model  # slow to import, seldom needed

    plain = load_transformers_model(folder, config, dtype, device, progress)
    if adapters is not None:
        adapters.adopt(plain.adaptable_modules())
    return plain


def load_part(
    folder: Path, dtype: torch.dtype, device: torch.device, progress: bool, quantize: str, collectives: Collectives
) -> DecoderModel:
    """One rank's part of a model, with the sums that make its outputs whole. Otherwise as `load_model`."""
    shard = collectives.shard
    config = check_parallel(folder, quantize, shard.degree)
    backend = MatmulBackend(device, dtype, packed=True)
    format = weight_format(folder, quantize)
    return parallel_part(_load_decoder(folder, config, format, backend, progress, shard), collectives)


def check_parallel(folder: Path, quantize: str, degree: int) -> DecoderConfig:
    """The configuration of the whole model. Raises: ModelError where it cannot be computed by `degree` ranks."""
    format = weight_format(folder, quantize)
    if format is not WeightFormat.PLAIN and format not in MADE_WHILE_LOADING:
        raise ModelError(f"tensor-parallel is {degree}; weights stored as {format} are read whole, on one rank")
    config = read_model_config(folder)
    shard_config(config, degree)
    if not isinstance(config, DecoderConfig):
        raise TypeError(f"{config.family} is cut")
    return config


def check_gpus(first: int, degree: int, count: int) -> None:
    """Ranks take GPUs side by side, from `first` on. Raises: ModelError."""
    if first + degree > count:
        raise ModelError(f"tensor-parallel is {degree}; from GPU {first} on there are {max(0, count - first)}")


def _load_decoder(
    folder: Path,
    config: DecoderConfig,
    format: WeightFormat,
    backend: MatmulBackend,
    progress: bool,
    shard: Shard,
    adapters: AdapterSet | None = None,
) -> DecoderModel:
    with open_weights(folder, config, format, backend.dtype, backend.device, shard, progress) as source:
        model = DecoderParts(source, backend, adapters, shard, format in WITH_INT8_HEAD).decoder(config)
    return_freed_memory()
    return model


def return_freed_memory() -> None:
    """Reading a checkpoint frees about as much as it keeps; glibc holds on to it, in case it were needed again.

    Milliseconds. Does nothing with another C library.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class GatedNames(NamedTuple):
    gate: str
    up: str
    down: str


DENSE_NAMES = GatedNames("gate_proj", "up_proj", "down_proj")
MIXTRAL_NAMES = GatedNames("w1", "w3", "w2")


class DecoderParts:
    """Makes the parts of a decoder, tensor by tensor; each `config` is that of the whole model, whatever the shard."""

    def __init__(
        self,
        source: WeightSource,
        backend: MatmulBackend,
        adapters: AdapterSet | None = None,
        shard: Shard = ALONE,
        int8_head: bool = False,
    ) -> None:
        """`int8_head`: natively the head is made of integers, since a step reads all of it, and of small models it is a
        good part of the weights."""
        self._source = source
        self._backend = backend
        self._adapters = adapters
        self._shard = shard
        self._int8_head = int8_head and backend.is_native

    def decoder(self, config: DecoderConfig) -> DecoderModel:
        """One rank's. Embedding and head are read before the layers, while there is most room for packing."""
        embedding, head = self._ends(config)
        layers = tuple(self._layer(config, index) for index in range(config.num_layers))
        norm = Norm(self._tensor("model.norm.weight", config.hidden_size), config.rms_norm_eps)
        frequencies = inverse_frequencies(config.rope, config.head_dim).to(self._backend.device)
        own = shard_config(config, self._shard.degree)
        angles = None
        if uses_triton(frequencies):
            positions = torch.arange(config.max_positions, device=frequencies.device)
            angles = rotation(frequencies, positions, norm.weight.dtype)
        return DecoderModel(own, embedding, layers, norm, head, frequencies, angles=angles)

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._backend.keep(self._source.tensor(name, *shape))

    def _linear(self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool = False) -> Linear:
        made = self._backend.linear(self._source.weight(names, sizes, inputs, bias))
        return made if self._adapters is None else self._adapters.adapted(made, names, sizes, inputs, self._backend)

    def _ends(self, config: DecoderConfig) -> tuple[Embedding, Linear]:
        """The embedding of tokens, and the head that makes logits.

        Tied they are one weight, unless the head is made of integers, so that the numbers differ, or is cut.
        """
        vocabulary, hidden = config.vocab_size, config.hidden_size
        name = "model.embed_tokens.weight"
        tied = self._source.tensor(name, vocabulary, hidden) if config.tie_word_embeddings else None
        if tied is None:
            weight = self._source.weight(["lm_head"], [vocabulary], hidden)
        else:
            own = self._shard.vocabulary(vocabulary)
            weight = PlainWeight(tied[own.start : own.stop])
        if self._int8_head and isinstance(weight, PlainWeight):
            weight = quantise_int8(weight.numbers.float(), weight.bias)
        head = self._backend.linear(weight)
        packed = head.weight if tied is not None and isinstance(head, PackedLinear) else None
        if packed is not None and packed.stored in GATHERED and packed.outputs == vocabulary:
            return PackedEmbedding(packed), head
        embedding = self._source.tensor(name, vocabulary, hidden) if tied is None else tied
        return DenseEmbedding(_narrow(embedding) if self._backend.is_native else embedding), head

    def _layer(self, config: DecoderConfig, index: int) -> Layer:
        prefix = f"model.layers.{index}."
        attention = f"{prefix}self_attn."
        hidden, eps = config.hidden_size, config.rms_norm_eps
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        head_norms = None
        if config.qk_norm:
            query, key = (self._tensor(f"{attention}{name}_norm.weight", config.head_dim) for name in "qk")
            head_norms = HeadNorms(query, key, eps)
        return Layer(
            attention_norm=Norm(self._tensor(f"{prefix}input_layernorm.weight", hidden), eps),
            qkv=self._linear(
                [f"{attention}{name}_proj" for name in "qkv"],
                (query_size, kv_size, kv_size),
                hidden,
                config.attention_bias,
            ),
            head_norms=head_norms,
            output=self._linear([f"{attention}o_proj"], (hidden,), query_size, config.output_bias),
            feed_forward_norm=Norm(self._tensor(f"{prefix}post_attention_layernorm.weight", hidden), eps),
            feed_forward=self._feed_forward(config, index),
            scoring=Scoring(config.head_dim**-0.5, config.sliding_window[index]),
        )

    def _feed_forward(self, config: DecoderConfig, index: int) -> FeedForward:
        prefix, names, experts = f"model.layers.{index}.mlp.", DENSE_NAMES, config.experts
        if experts is None or index not in experts.layers:
            return self._gated(prefix, names, config.hidden_size, config.intermediate_size)
        if config.family == "mixtral":
            prefix, names = f"model.layers.{index}.block_sparse_moe.", MIXTRAL_NAMES
        apart = Experts(
            router=self._tensor(f"{prefix}gate.weight", experts.count, config.hidden_size),
            experts=tuple(
                self._gated(f"{prefix}experts.{number}.", names, config.hidden_size, experts.inner_size)
                for number in range(experts.count)
            ),
            per_token=experts.per_token,
            normalised=experts.normalised,
        )
        # Together for a kernel that reads them so.
        return stacked(apart) if self._backend.kernels is Kernels.TRITON else apart

    def _gated(self, prefix: str, names: GatedNames, hidden: int, inner: int) -> Gated:
        return Gated(
            gate_up=self._linear([prefix + names.gate, prefix + names.up], (inner, inner), hidden),
            down=self._linear([prefix + names.down], (hidden,), inner),
        )


def _narrow(embedding: torch.Tensor) -> torch.Tensor:
    """A copy, no wider than need be."""
    wide = embedding.dtype == torch.float32 and is_bfloat16(embedding)
    return embedding.bfloat16() if wide else embedding.clone()
