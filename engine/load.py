"""Load a checkpoint folder as a model: for one rank or several, with or without adapters.

Two stages: engine/weights/ reads a `Weight`, and engine/models/linear.py turns it into the fastest form for the device.
This file knows the tensor names of Hugging Face checkpoints. Query, key and value projections are fused into
one, and so are gate and up projections.
"""

import ctypes
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import (
    Activation,
    ConvolutionConfig,
    DecoderConfig,
    DeltaConfig,
    EncoderConfig,
    ExpertsConfig,
    MambaConfig,
    ModelConfig,
    ModelError,
    QkNorm,
    RopeKind,
)
from baton.engine.kv_cache.groups import LayerPlace, layer_places
from baton.engine.load_gemma import GemmaParts
from baton.engine.lora.adapters import WHOLE, AdapterSet, Part
from baton.engine.models.batch import Model
from baton.engine.models.decoder import DecoderModel, Layer, with_native_layers
from baton.engine.models.delta_net import DeltaNet
from baton.engine.models.feed_forward import (
    ExpertRouter,
    Experts,
    FeedForward,
    Gated,
    GatedExpert,
    Ungated,
    stacked,
    with_packed,
)
from baton.engine.models.gemma import GemmaBody
from baton.engine.models.latent import Latent
from baton.engine.models.linear import (
    DenseEmbedding,
    Embedding,
    Kernels,
    Linear,
    MatmulBackend,
    PackedEmbedding,
    PackedLinear,
    is_bfloat16,
    spelled_out,
)
from baton.engine.models.mamba import Mamba
from baton.engine.models.residual import Norm, WholeNorms
from baton.engine.models.rope import layer_tables
from baton.engine.models.short_convolution import ShortConvolution
from baton.engine.models.states import Recurrent
from baton.engine.on_device import made_on, mib
from baton.engine.parallel.collectives import Collectives
from baton.engine.parallel.model import parallel_part
from baton.engine.parallel.shard import ALONE, Shard, shard_config, shard_convolution, shard_delta
from baton.engine.weights.files import weight_files
from baton.engine.weights.formats import CUT, WITH_INT8_HEAD, WeightFormat, stored_format, weight_format
from baton.engine.weights.gguf_file import dequantise
from baton.engine.weights.gguf_names import apart
from baton.engine.weights.pairs import ROTATED, pair_slices
from baton.engine.weights.read import CUTS, Cut, Size, WeightSource, open_weights, parts_of
from baton.engine.weights.weight import GgufWeight, PlainWeight, quantise_int8
from baton.kernels.dispatch import uses_triton
from baton.kernels.linear import GATHERED
from baton.kernels.types import DeltaRates, Gate, HeadNorms, Scoring, StateRates
from baton.text.host.files import reading, reads

logger = logging.getLogger(__name__)


def check_format(config: ModelConfig, format: WeightFormat) -> None:
    """Reject weight formats that the model's code cannot compute with. Raises: ModelError."""
    expands = isinstance(config, EncoderConfig) and format is WeightFormat.GGUF
    if format is not WeightFormat.PLAIN and not isinstance(config, DecoderConfig) and not expands:
        raise ModelError(
            f"{config.family} runs through transformers' code, which needs plain weights; remove quantize or "
            "use a plain checkpoint"
        )


@reads(ModelError)
def load_model(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    adapters: AdapterSet | None = None,
    quantize: str = WeightFormat.PLAIN,
    packed: bool = False,
) -> Model:
    """Load the checkpoint in `folder`. Raises: ModelError for missing or surplus tensors, or if memory is short.

    `packed`: use the layout of the CPU's native kernels if they are built. `adapters`: the set that wraps
    the projections, so that adapters can be added later. `quantize`: a WeightFormat. A progress bar is shown on a
    terminal, and always with `progress`.
    """
    config = read_model_config(folder)
    format = weight_format(folder, quantize)
    check_format(config, format)
    with _made_on(device, folder):
        if isinstance(config, EncoderConfig):
            from baton.engine.models.encoder import load_encoder  # slow to import, rarely needed

            return load_encoder(folder, config, dtype, device, progress)
        if isinstance(config, DecoderConfig):
            backend = MatmulBackend(device, dtype, packed)
            return with_native_layers(_load_decoder(folder, config, format, backend, progress, ALONE, adapters))
        from baton.engine.models.transformers_checkpoint import load_transformers_model  # slow to import, rarely needed

        plain = load_transformers_model(folder, config, dtype, device, progress)
        if adapters is not None:
            adapters.adopt(plain.adaptable_modules)
        return plain


@reads(ModelError)
def check_tensors(folder: Path, config: ModelConfig) -> None:
    """Check the tensors as loading does, but read only headers and small tensors. Raises: ModelError."""
    if isinstance(config, EncoderConfig):
        from baton.engine.models.encoder import check_encoder  # slow to import, rarely needed

        check_encoder(folder, config)
    elif isinstance(config, DecoderConfig):
        backend = MatmulBackend(torch.device("meta"), torch.float32, packed=False)
        _load_decoder(folder, config, stored_format(folder), backend, progress=False, shard=ALONE)
    else:
        from transformers import AutoModelForCausalLM

        from baton.engine.models.transformers_checkpoint import check_whole  # slow to import, rarely needed

        check_whole(AutoModelForCausalLM, folder)


def load_part(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    quantize: str,
    collectives: Collectives,
    adapters: AdapterSet | None = None,
) -> DecoderModel:
    """Load one rank's part of a model; the ranks sum the outputs of their parts. See load_model."""
    shard = collectives.shard
    config = check_parallel(folder, quantize, shard.degree)
    backend = MatmulBackend(device, dtype, packed=True)
    format = weight_format(folder, quantize)
    with _made_on(device, folder):
        with reading(folder, ModelError):
            part = _load_decoder(folder, config, format, backend, progress, shard, adapters)
        return parallel_part(part, collectives)


def _made_on(device: torch.device, folder: Path) -> AbstractContextManager[None]:
    files_bytes = sum(path.stat().st_size for path in weight_files(folder))
    return made_on(device, f"the weights of {folder}, files of {mib(files_bytes)}")


def check_parallel(folder: Path, quantize: str, degree: int) -> DecoderConfig:
    """Return the configuration of the unsharded model. Raises: ModelError if `degree` ranks cannot compute it."""
    format = weight_format(folder, quantize)
    if format not in CUT:
        raise ModelError(f"tensor-parallel is {degree}, but weights in the format {format} run on one rank only")
    config = read_model_config(folder)
    shard_config(config, degree)
    if isinstance(config, DecoderConfig) and config.labels is not None:
        raise ModelError(f"tensor-parallel is {degree}, but a classification head runs on one rank only")
    if not isinstance(config, DecoderConfig):
        raise TypeError(f"{config.family} cannot be sharded")
    return config


def device_named(name: str) -> torch.device:
    """Return the device with an explicit index: `cuda` is the first GPU. Raises: RuntimeError for an unknown name."""
    device = torch.device(name)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def check_gpus(device: torch.device, degree: int) -> None:
    """Check that each rank has a GPU: `device` and the ones after it. Raises: ModelError."""
    if device.type != "cuda":
        return
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0  # device_count() may count unusable GPUs
    if device.index + degree > usable:
        raise ModelError(
            f"device is {device} and tensor-parallel is {degree}, but this build of torch can use {usable} GPUs here"
        )


def _load_decoder(
    folder: Path,
    config: DecoderConfig,
    format: WeightFormat,
    backend: MatmulBackend,
    progress: bool,
    shard: Shard,
    adapters: AdapterSet | None = None,
) -> DecoderModel:
    if format is WeightFormat.GGUF:
        config = apart(config)
    with open_weights(folder, config, format, backend.dtype, backend.device, shard, progress) as source:
        model = DecoderParts(source, backend, adapters, shard, format in WITH_INT8_HEAD).decoder(config)
    return_freed_memory()
    if backend.kernels is Kernels.TRITON and any(isinstance(layer.feed_forward, Experts) for layer in model.layers):
        logger.warning(
            "experts stored as %s have no GPU kernel: each step dequantises its experts one by one and waits "
            "for the host in each layer; plain weights are much faster",
            format,
        )
    return model


def return_freed_memory() -> None:
    """Make glibc return freed memory to the system: reading a checkpoint frees about as much as the model keeps.

    Takes milliseconds. Does nothing with another C library.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class TokenMixer(NamedTuple):
    """Part of a layer that mixes tokens: attention, or a recurrent layer."""

    qkv: Linear
    head_norms: HeadNorms | WholeNorms | None
    output: Linear
    recurrent: Recurrent | None = None


GATES = {Activation.SILU: Gate.SILU, Activation.GELU: Gate.GELU, Activation.CLAMPED: Gate.CLAMPED}


class DecoderParts(GemmaParts):
    """Builder of a decoder's parts, tensor by tensor. Every `config` is that of the unsharded model."""

    def __init__(
        self,
        source: WeightSource,
        backend: MatmulBackend,
        adapters: AdapterSet | None = None,
        shard: Shard = ALONE,
        int8_head: bool = False,
    ) -> None:
        """Prepare the builder. `int8_head`: quantise the head, which every step reads fully, for native kernels."""
        self._source = source
        self._backend = backend
        self._adapters = adapters
        self._shard = shard
        self._int8_head = int8_head and backend.is_native
        self._pair_dim: int | None = None  # size of a head, if the rows of its queries and keys are reordered

    def decoder(self, config: DecoderConfig) -> DecoderModel:
        """Build one rank's decoder. Embedding and head are built first, while most memory is free to pack them."""
        self._pair_dim = config.head_dim if config.rotates_pairs else None
        embedding, head = self._ends(config)
        dtype, device = self._backend.dtype, self._backend.device
        rope, tables = layer_tables(config.ropes, config.rotary_dims, device)
        layers, gemma = self._layers(config, tables)
        norm = self._norm(config, config.modules.norm, config.hidden_size)
        own = shard_config(config, self._shard.degree)
        # Rounded to the model's dtype, as in training. The residual stream is stored divided by residual_scale.
        scale = float(torch.tensor(config.embedding_scale, dtype=dtype)) / config.residual_scale
        angles = None
        if uses_triton(rope.frequencies):
            angles = rope.rotation(torch.arange(config.max_positions, device=device), dtype)
        return DecoderModel(own, embedding, layers, norm, head, rope, dtype, scale, angles=angles, gemma=gemma)

    def _layers(self, config: DecoderConfig, tables: Sequence[int]) -> tuple[tuple[Layer, ...], GemmaBody | None]:
        if config.gemma is not None:
            return (), self._gemma_body(config, config.gemma, tables)
        places = layer_places(config)
        return tuple(self._layer(config, index, table, places) for index, table in enumerate(tables)), None

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._backend.keep(self._source.tensor(name, *shape))

    def _norm_weight(self, config: DecoderConfig, name: str, size: int) -> torch.Tensor:
        weight = self._tensor(f"{name}.weight", size)
        return weight.float() + config.norm_offset if config.wide_norms else weight

    def _norm(self, config: DecoderConfig, name: str, size: int) -> Norm:
        """Build a norm of the residual stream, which is stored divided by `residual_scale`."""
        return Norm(self._norm_weight(config, name, size), config.rms_norm_eps / config.residual_scale**2)

    def _linear(self, names: Sequence[str], sizes: Sequence[Size], inputs: int, bias: bool = False) -> Linear:
        made = self._backend.linear(self._source.weight(names, sizes, inputs, bias))
        if self._adapters is None:
            return made
        stacked_in = parts_of(names, sizes)
        parts = [self._part(name, inner, inputs) for name, inner in zip(names, stacked_in, strict=True)]
        return self._adapters.adapted(made, names, list(map(sum, stacked_in)), inputs, self._backend, parts)

    def _part(self, name: str, sizes: Sequence[int], inputs: int) -> Part:
        """Return this rank's part of a module's LoRA factors. `sizes`: outputs of each stacked projection."""
        if self._pair_dim is not None and name.endswith(ROTATED):
            own = self._shard.equal_parts(sizes)
            return replace(WHOLE, outputs=tuple(each for rows in own for each in pair_slices(rows, self._pair_dim)))
        cut = CUTS.get(name.rpartition(".")[2]) if self._shard.degree > 1 else None
        if cut is Cut.OUTPUTS:
            return replace(WHOLE, outputs=self._shard.equal_parts(sizes))
        return replace(WHOLE, inputs=self._shard.equal_part(inputs)) if cut is Cut.INPUTS else WHOLE

    def _ends(self, config: DecoderConfig) -> tuple[Embedding, Linear]:
        """Build the embedding and the head.

        A tied embedding and head share one weight, unless the head is quantised or sharded.
        """
        vocabulary, hidden, source = config.vocab_size, config.hidden_size, self._source
        if config.labels is not None:
            head = self._backend.linear(source.weight(["score"], [config.labels], hidden))
            return self._embedding(self._stored_embedding(config)), head
        tied = self._stored_embedding(config) if config.tie_word_embeddings else None
        if isinstance(tied, GgufWeight) and not self._backend.is_native:
            tied = dequantise(tied.rows, tied.type).to(self._backend.dtype)
        if tied is None:
            weight = source.weight(["lm_head"], [vocabulary], hidden)
        elif isinstance(tied, GgufWeight):
            weight = tied
        else:
            own = self._shard.vocabulary(vocabulary)
            weight = PlainWeight(tied[own.start : own.stop])
        if self._int8_head and isinstance(weight, PlainWeight):
            weight = quantise_int8(weight.numbers.float(), weight.bias)
        head = self._backend.linear(weight)
        packed = head.weight if tied is not None and isinstance(head, PackedLinear) else None
        if packed is not None and packed.stored in GATHERED and packed.outputs == vocabulary:
            return PackedEmbedding(packed), head
        return self._embedding(self._stored_embedding(config) if tied is None else tied), head

    def _stored_embedding(self, config: DecoderConfig) -> torch.Tensor | GgufWeight:
        name = f"{config.modules.embedding}.weight"
        return self._source.embedding(name, config.vocab_size, config.hidden_size)

    def _embedding(self, stored: torch.Tensor | GgufWeight) -> Embedding:
        """Build an embedding without a head. Native kernels look up rows of packed codes as well."""
        if isinstance(stored, GgufWeight):
            made = self._backend.linear(stored) if self._backend.is_native else None
            if isinstance(made, PackedLinear) and made.weight.stored in GATHERED:
                return PackedEmbedding(made.weight)
            stored = dequantise(stored.rows, stored.type).to(self._backend.dtype)
        return DenseEmbedding(_narrow(stored) if self._backend.is_native else stored)

    def _layer(self, config: DecoderConfig, index: int, table: int, places: Sequence[LayerPlace]) -> Layer:
        prefix, names = f"model.layers.{index}.", config.norms
        hidden, attention = config.hidden_size, f"{prefix}{config.modules.attention}."
        own_place, attends = LayerPlace(0, 0), index in config.attending_layers
        if attends:
            own_place = places[config.attending_layers.index(index)]
        feeds = config.feed_forward_layers is None or index in config.feed_forward_layers
        mixes = config.feed_forward_layers is None or not feeds

        def norm(name: str | None) -> Norm | None:
            return None if name is None else self._norm(config, prefix + name, hidden)

        def end_norm(name: str | None) -> Norm | None:
            return None if name is None else replace(self._norm(config, prefix + name, hidden), eps=config.rms_norm_eps)

        mixing = None
        if mixes:
            mixing = self._attention(config, index, attention) if attends else self._recurrent(config, index, prefix)
        return Layer(
            attention_norm=norm(names.attention if mixes else None),
            qkv=mixing and mixing.qkv,
            head_norms=mixing and mixing.head_norms,
            latent=self._latent(config, attention),
            output=mixing and mixing.output,
            attention_end_norm=end_norm(names.attention_end),
            feed_forward_norm=norm(names.feed_forward if feeds else None),
            feed_forward=self._feed_forward(config, index) if feeds else None,
            feed_forward_end_norm=end_norm(names.feed_forward_end),
            scoring=self._scoring(config, index, attention),
            table=table,
            place=own_place,
            gated=config.gated_attention,
            recurrent=mixing and mixing.recurrent,
            scales_queries=config.query_scale is not None and index in config.query_scale.layers,
            is_chunked=index in config.chunked_layers,
        )

    def _scoring(self, config: DecoderConfig, index: int, attention: str) -> Scoring:
        sinks = None
        if config.sinks:
            of_all = self._source.tensor(f"{attention}sinks", config.num_heads, dtype=torch.float32)
            sinks = self._backend.keep(of_all[self._shard.equal_part(config.num_heads)].clone())
        return Scoring(config.attention_scale, config.sliding_window[index], config.attention_softcap, sinks=sinks)

    def _qkv(self, config: DecoderConfig, attention: str) -> Linear:
        """Build attention's query, key and value projections as one linear layer."""
        latent, hidden, bias = config.latent, config.hidden_size, config.attention_bias
        if latent is not None:
            query, size = "q_proj", config.num_heads * (latent.nope_dim + latent.rope_dim)
            if latent.query_rank is not None:
                query, size = "q_a_proj", latent.query_rank
            names, sizes = [query, "kv_a_proj_with_mqa"], [size, latent.rank + latent.rope_dim]
        else:
            names = ["qkv_proj"] if config.fused else ["q_proj", "k_proj", "v_proj"]
            queries = 2 * config.num_heads if config.gated_attention else config.num_heads
            sizes = [heads * config.head_dim for heads in (queries, config.num_kv_heads, config.num_kv_heads)]
        return self._linear([attention + name for name in names], sizes, hidden, bias)

    def _latent(self, config: DecoderConfig, attention: str) -> Latent | None:
        latent = config.latent
        if latent is None:
            return None
        query_size, query_up, query_norm = config.num_heads * (latent.nope_dim + latent.rope_dim), None, None
        if latent.query_rank is not None:
            query_up = self._linear([f"{attention}q_b_proj"], (query_size,), latent.query_rank)
            query_norm = Norm(self._tensor(f"{attention}q_a_layernorm.weight", latent.query_rank), latent.norm_eps)
        expanded = config.num_heads * (latent.nope_dim + latent.value_dim)
        weight = self._source.weight([f"{attention}kv_b_proj"], (expanded,), latent.rank)
        own = spelled_out(weight, self._backend.dtype).view(-1, latent.nope_dim + latent.value_dim, latent.rank)
        return Latent(
            sizes=latent,
            query_norm=query_norm,
            query_up=query_up,
            norm=Norm(self._tensor(f"{attention}kv_a_layernorm.weight", latent.rank), latent.norm_eps),
            to_keys=self._backend.heads(own[:, : latent.nope_dim].transpose(1, 2)),
            to_values=self._backend.heads(own[:, latent.nope_dim :]),
        )

    def _attention(self, config: DecoderConfig, index: int, attention: str) -> TokenMixer:
        return TokenMixer(
            self._qkv(config, attention),
            self._head_norms(config, index, attention),
            self._linear(
                [attention + config.modules.output], (config.hidden_size,), config.attended_size, config.output_bias
            ),
        )

    def _recurrent(self, config: DecoderConfig, index: int, layer: str) -> TokenMixer:
        sizes, prefix = config.recurrent, f"{layer}{config.modules.recurrent}."
        if sizes is None:
            raise ValueError(f"layer {index} has no recurrent state")
        place = sorted(sizes.layers).index(index)
        match sizes:
            case ConvolutionConfig():
                return self._convolution(config, sizes, prefix, place)
            case MambaConfig():
                return self._mamba(config, sizes, prefix, place)
            case DeltaConfig():
                return self._delta(config, sizes, prefix, place)

    def _convolution(self, config: DecoderConfig, sizes: ConvolutionConfig, prefix: str, place: int) -> TokenMixer:
        hidden, channels = config.hidden_size, sizes.channels
        own = self._shard.equal_part(channels)
        weight = self._source.tensor(f"{prefix}conv.weight", channels, 1, sizes.kernel).squeeze(1)
        bias = self._source.tensor(f"{prefix}conv.bias", channels) if sizes.biased else None
        net = ShortConvolution(
            shard_convolution(sizes, self._shard.degree),
            place,
            weight=self._backend.keep(weight[own].clone()),
            bias=None if bias is None else self._backend.keep(bias[own].clone()),
        )
        qkv = self._linear([f"{prefix}in_proj"], ((channels, channels, channels),), hidden, sizes.biased)
        return TokenMixer(qkv, None, self._linear([f"{prefix}out_proj"], (hidden,), channels, sizes.biased), net)

    def _mamba(self, config: DecoderConfig, sizes: MambaConfig, prefix: str, place: int) -> TokenMixer:
        hidden, channels, heads = config.hidden_size, sizes.channels, sizes.heads
        rate, bias, skip = (
            self._source.tensor(f"{prefix}{name}", heads, dtype=torch.float32) for name in ("A_log", "dt_bias", "D")
        )
        rates = StateRates(-rate.exp(), self._backend.keep(bias), self._backend.keep(skip), *sizes.step_limits)
        net = Mamba(
            sizes,
            place,
            convolution=self._tensor(f"{prefix}conv1d.weight", channels, 1, sizes.kernel).squeeze(1),
            bias=self._tensor(f"{prefix}conv1d.bias", channels) if sizes.convolution_biased else None,
            rates=rates,
            norm=self._tensor(f"{prefix}norm.weight", sizes.inner_size),
            eps=config.rms_norm_eps,
        )
        qkv = self._linear([f"{prefix}in_proj"], (sizes.inner_size + channels + heads,), hidden, sizes.biased)
        return TokenMixer(
            qkv, None, self._linear([f"{prefix}out_proj"], (hidden,), sizes.inner_size, sizes.biased), net
        )

    def _delta(self, config: DecoderConfig, sizes: DeltaConfig, prefix: str, place: int) -> TokenMixer:
        keys, values, heads = sizes.key_heads * sizes.key_dim, sizes.value_size, sizes.value_heads
        inputs: dict[str, Size] = {"qkv": (keys, keys, values), "z": values, "b": heads, "a": heads}
        if sizes.interleaved:
            inputs = {"qkvz": sizes.channels + values, "ba": 2 * heads}
        names = [f"{prefix}in_proj_{name}" for name in inputs]
        kernel = self._source.tensor(f"{prefix}conv1d.weight", sizes.channels, 1, sizes.kernel).squeeze(1)
        of_heads, of_channels = self._shard.equal_part(heads), self._shard.equal_parts((keys, keys, values))
        rate, bias = (self._source.tensor(f"{prefix}{name}", heads)[of_heads].float() for name in ("A_log", "dt_bias"))
        net = DeltaNet(
            shard_delta(sizes, self._shard.degree),
            place,
            convolution=self._backend.keep(torch.cat([kernel[own] for own in of_channels])),
            rates=DeltaRates(-rate.exp(), self._backend.keep(bias.clone())),
            norm=self._tensor(f"{prefix}norm.weight", sizes.value_dim),
            eps=config.rms_norm_eps,
        )
        output = self._linear([f"{prefix}out_proj"], (config.hidden_size,), values)
        return TokenMixer(self._linear(names, tuple(inputs.values()), config.hidden_size), None, output, net)

    def _head_norms(self, config: DecoderConfig, index: int, attention: str) -> HeadNorms | WholeNorms | None:
        names = (attention + config.modules.query_norm, attention + config.modules.key_norm)
        if config.qk_norm is QkNorm.NONE:
            return None
        if config.qk_norm is QkNorm.LENGTH:
            if config.ropes[index].kind is RopeKind.NONE:
                return None
            ones = torch.ones(config.head_dim, dtype=self._backend.dtype, device=self._backend.device)
            return HeadNorms(ones, ones, config.rms_norm_eps)  # rotation keeps lengths, so it may follow
        if config.qk_norm is QkNorm.HEADS:
            query, key = (self._norm_weight(config, name, config.head_dim) for name in names)
            return HeadNorms(query, key, config.rms_norm_eps)
        sizes = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim)
        query, key = (
            self._norm_weight(config, name, size)[self._shard.equal_part(size)]
            for name, size in zip(names, sizes, strict=True)
        )
        return WholeNorms(query, key, config.rms_norm_eps)

    def _feed_forward(self, config: DecoderConfig, index: int) -> FeedForward:
        layer, names, experts = f"model.layers.{index}.", config.modules, config.experts
        if experts is None or index not in experts.layers:
            return self._inner(config, f"{layer}{names.feed_forward}.", config.intermediate_size)
        prefix = f"{layer}{names.experts}."
        apart = Experts(
            router=self._router(config, experts, prefix),
            experts=tuple(
                self._inner(config, f"{prefix}experts.{number}.", experts.inner_size, experts.biased)
                for number in range(experts.count)
            ),
            shared=self._shared(config, experts, layer),
            scales_inputs=experts.scales_inputs,
        )
        # Triton's kernels read all experts of a layer together, so the experts' weights must be stacked.
        return stacked(apart) if self._backend.kernels is Kernels.TRITON else with_packed(apart)

    def _router(self, config: DecoderConfig, experts: ExpertsConfig, prefix: str) -> ExpertRouter:
        source, routing = self._source, experts.routing
        dtype = torch.float32 if routing.wide else None
        name = prefix + config.modules.router
        weight = source.tensor(f"{name}.weight", experts.count, config.hidden_size, dtype=dtype)
        bias = source.tensor(f"{name}.bias", experts.count, dtype=dtype) if routing.biased else None
        correction = None
        if routing.corrected:
            stored = source.tensor(prefix + config.modules.correction, experts.count, dtype=torch.float32)
            correction = self._backend.keep(stored)
        return ExpertRouter(self._backend.linear(PlainWeight(weight, bias)), routing, correction)

    def _shared(self, config: DecoderConfig, experts: ExpertsConfig, layer: str) -> FeedForward | None:
        if not experts.shared_size:
            return None
        if not experts.gates_shared:
            return self._inner(config, f"{layer}{config.modules.shared}.", experts.shared_size)
        prefix = f"{layer}{config.modules.experts}."
        gate = self._backend.linear(
            PlainWeight(self._source.tensor(f"{prefix}shared_expert_gate.weight", 1, config.hidden_size), None)
        )
        return GatedExpert(self._gated(config, f"{prefix}shared_expert.", experts.shared_size), gate)

    def _dense(self, config: DecoderConfig, prefix: str, inner: int) -> Gated:
        return self._gated(config, prefix, inner)

    def _inner(self, config: DecoderConfig, prefix: str, inner: int, bias: bool = False) -> Gated | Ungated:
        """Build a feed-forward layer, or one expert, of this inner size."""
        if config.activation is not Activation.RELU2:
            return self._gated(config, prefix, inner, bias)
        [up], hidden = config.modules.gate_up, config.hidden_size
        return Ungated(
            self._linear([prefix + up], (inner,), hidden, bias),
            self._linear([prefix + config.modules.down], (hidden,), inner, bias),
        )

    def _gated(self, config: DecoderConfig, prefix: str, inner: int, bias: bool = False) -> Gated:
        names, hidden = config.modules, config.hidden_size
        return Gated(
            gate_up=self._linear([prefix + name for name in names.gate_up], (inner, inner), hidden, bias),
            down=self._linear([prefix + names.down], (hidden,), inner, bias),
            gate=GATES[config.activation],
        )


def _narrow(embedding: torch.Tensor) -> torch.Tensor:
    """Return a copy of the embedding, in bfloat16 if that is lossless."""
    wide = embedding.dtype == torch.float32 and is_bfloat16(embedding)
    return embedding.bfloat16() if wide else embedding.clone()
