"""Prepare a checkpoint folder for a runner: choose sizes within the memory budget, or name sizes that fit.

The caller provides the pool's storage: the engine does not decide which processes map this memory.
"""

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import torch

from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import (
    CONFIG_FILE,
    DecoderConfig,
    EncoderConfig,
    ModelConfig,
    ModelError,
    read_json,
)
from baton.engine.drafting.vocabulary import check_same_vocabulary
from baton.engine.kv_cache.layout import KV_DTYPE_ALIASES, KV_DTYPES, KvLayout, kv_layout
from baton.engine.kv_cache.sizing import KvSizing, PoolSize, size_pool
from baton.engine.load import check_gpus, check_parallel, load_model, load_part
from baton.engine.lora.adapters import AdapterSet
from baton.engine.models.batch import Model
from baton.engine.models.linear import packs
from baton.engine.parallel.collectives import Collectives
from baton.engine.parallel.model import ParallelModel
from baton.engine.parallel.other_ranks import OtherRanks
from baton.engine.parallel.shard import Shard, copies_of, shard_layout
from baton.engine.parallel.wire import RankOptions, RankPool, RankStart
from baton.engine.runner.cuda_graphs import GraphSizes
from baton.engine.runner.prefill_attention import PrefillAttention
from baton.engine.runner.runner import HostPool, Runner
from baton.engine.weights.files import loaded_bytes, model_fingerprint, stored_dtype
from baton.engine.weights.formats import MADE_WHILE_LOADING, WITH_INT8_HEAD, WeightFormat, weight_format
from baton.kernels.arithmetic import arithmetic
from baton.kernels.types import QUANTISED

ENCODER_TOKENS = 1 << 20  # maximum tokens of an encoder's pool
INT8_SCALE_BYTES = 4  # bytes per output row of an int8 LM head, in addition to its integers
Loaded = TypeVar("Loaded")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WIDE = ("float32", "float64", "F32", "F64")  # names in config.json and in safetensors of types computed in float32


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of a process's model. `dtype`: "auto" or a key of DTYPES. `kv_cache_dtype`: see resolve_kv_dtype.
    `quantize`: WeightFormat of the checkpoint, or the one to create while loading.
    """

    folder: Path
    device: torch.device  # device of the first rank; see device_named
    dtype: str
    block_tokens: int | None  # tokens per KV block; None: chosen by kv_layout
    kv_memory_bytes: int
    max_model_len: int | None  # tokens; None: as long as model and memory allow
    kv_cache_dtype: str = "auto"
    quantize: str = WeightFormat.PLAIN
    tensor_parallel: int = 1  # number of ranks
    cores: tuple[int, ...] | None = None  # CPU cores, divided among ranks; None: ranks run on any core
    prefill_attention: str = PrefillAttention.AUTO  # value of a PrefillAttention
    draft: "ModelOptions | None" = None  # options of the draft model, see engine/drafting/
    speculates: bool = False  # steps compute draft tokens, which may be discarded


@dataclass(frozen=True, slots=True)
class LoadedRanks:
    """Model loaded on all ranks, without a pool yet."""

    model: ParallelModel  # the first rank's part of the model
    other_ranks: OtherRanks  # the caller must close them


class HandedOver(Generic[Loaded]):
    """Weights loaded before the pool exists, to be passed to one runner, which then owns them alone."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded: Loaded | None = loaded

    def take(self) -> Loaded | None:
        """Return the weights at the first call, and None at later calls."""
        taken, self._loaded = self._loaded, None
        return taken


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """Checkpoint whose pool and context length fit into memory. Usually its weights are not loaded yet."""

    options: ModelOptions
    config: ModelConfig
    dtype: torch.dtype
    layout: KvLayout
    total_blocks: int
    max_model_len: int  # maximum tokens of prompt and answer together
    weight_format: WeightFormat
    weight_bytes: int  # size of the weights in memory
    looked_up_bytes: int  # bytes of an untied embedding, part of weight_bytes; a step reads few of its rows
    checkpoint: bytes  # 32-byte digest, see model_fingerprint
    kv_description: str  # layout and arithmetic of KV, equal for pools that exchange blocks
    model: HandedOver[Model] | None = None  # weights loaded early, see engine/kv_cache/memory.py
    adapters: AdapterSet | None = None  # set that `model`, or this rank's part of it, was loaded with
    ranks: HandedOver[LoadedRanks] | None = None  # weights of several ranks, loaded early
    draft: "PreparedModel | None" = None  # the draft model; None without one

    @property
    def fingerprint(self) -> bytes:
        """32-byte digest of everything that must be equal in pools that exchange blocks."""
        return hashlib.sha256(self.checkpoint + self.kv_description.encode()).digest()

    @property
    def arithmetic(self) -> str:
        """Name of the arithmetic: processes with equal names round equally, see kernels/arithmetic.py."""
        return arithmetic(self.options.device, self.options.tensor_parallel)

    @property
    def copies(self) -> int:
        """Number of copies of each block in the ranks' pools; 1 if each rank stores a different part of the block."""
        return copies_of(self.layout, self.options.tensor_parallel)

    @property
    def pool_bytes(self) -> int:
        return self.total_blocks * self.layout.block_bytes * self.copies

    @property
    def storage_bytes(self) -> int:
        """Size of `load`'s storage: the first rank's part of the pool."""
        return self.pool_bytes // self.options.tensor_parallel

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def kv_dtype_name(self) -> str:
        """Stored dtype of KV, as a key of KV_DTYPES."""
        return self.layout.dtype_name

    def __str__(self) -> str:
        pool = (
            f"{self.total_blocks} KV blocks of {self.layout.block_tokens} tokens in {self.kv_dtype_name} "
            f"({self.pool_bytes / 2**20:.0f} MiB)"
        )
        kept = "" if self.weight_format is WeightFormat.PLAIN else f" ({self.weight_format})"
        weights = f"weights of {self.weight_bytes / 2**20:,.1f} MiB{kept}"
        at_once = KvSizing.of(self.layout, self.pool_bytes // self.copies, self.max_model_len).concurrency
        drafted = "" if self.draft is None else f"; drafts by {self.draft.options.folder.name}: {self.draft}"
        return (
            f"{self.config.family} in {self.dtype_name} on {self.options.device}, {weights}, {pool}, "
            f"requests of up to {self.max_model_len} tokens ({at_once:.1f} of that length at once){drafted}"
        )

    def load(
        self,
        storage: torch.Tensor,
        progress: bool,
        adapters: AdapterSet | None = None,
        host_slots: int = 0,
        ranks: RankOptions | None = None,
        decode_rows: int = 0,
    ) -> Runner:
        """Load the weights, and create the KV pool in `storage` (uint8, [storage_bytes], on the options' device).

        `storage` has the pool of all ranks in equal parts, [rank][block]; so has each of the `host_slots` slots of host
        memory for swapped blocks, which are allocated at the first swap. `ranks`: options of the other ranks.
        `decode_rows`: maximum number of sequences of a decode step; on a GPU, the warm-up records CUDA graphs up to it.

        Raises: ModelError, RankLost.
        """
        options = self.options
        columns = -(-self.max_model_len // self.layout.block_tokens)
        graphs = GraphSizes(decode_rows, columns) if decode_rows else None
        if options.tensor_parallel > 1:
            how = ranks or RankOptions()
            loaded = (self.ranks and self.ranks.take()) or self.load_ranks(progress, how, adapters)
            return self._on_ranks(loaded, storage, host_slots, how, graphs)
        model = (self.model and self.model.take()) or self.load_model(progress, adapters)
        blocks = storage[: self.storage_bytes].view(self.total_blocks, self.layout.block_bytes)
        kv, host = self.layout.view(storage, self.total_blocks), HostPool(blocks, host_slots)
        attention = PrefillAttention(options.prefill_attention)
        return Runner(model, self.layout, kv, host, graphs=graphs, prefill_attention=attention)

    def load_ranks(self, progress: bool, options: RankOptions, adapters: AdapterSet | None = None) -> LoadedRanks:
        """Load all ranks' parts in parallel, and wait for all. Raises: ModelError, RankLost."""
        asked = self.options
        start = RankStart(
            folder=str(asked.folder.resolve()),
            device=str(asked.device),
            dtype=self.dtype_name,
            quantize=asked.quantize,
            degree=asked.tensor_parallel,
            cores=asked.cores,
            entry=options.entry,
            nice=options.nice,
        )
        other_ranks = OtherRanks(start)

        def load_own(meeting: Path) -> ParallelModel:
            collectives = Collectives(Shard(0, asked.tensor_parallel), meeting, asked.device)
            part = load_part(asked.folder, self.dtype, asked.device, progress, asked.quantize, collectives, adapters)
            return ParallelModel(part, collectives, other_ranks.announce_logits)

        model = other_ranks.load(load_own)
        other_ranks.abort = model.collectives.abort
        return LoadedRanks(model, other_ranks)

    def _on_ranks(
        self,
        ranks: LoadedRanks,
        storage: torch.Tensor,
        host_slots: int,
        options: RankOptions,
        graphs: GraphSizes | None,
    ) -> Runner:
        """Create a runner that owns all ranks; a failure closes the ranks. See `load`. Raises: ModelError, RankLost."""
        with ExitStack() as undo:
            undo.callback(ranks.other_ranks.close)
            pool = RankPool(self.kv_dtype_name, self.layout.block_tokens, self.total_blocks, host_slots)
            ranks.other_ranks.lay_pool(pool, options)
            layout = shard_layout(self.layout, ranks.other_ranks.degree)
            own = storage[: self.total_blocks * layout.block_bytes]
            host = HostPool(own.view(self.total_blocks, layout.block_bytes), host_slots)
            kv = layout.view(own, self.total_blocks)
            runner = Runner(ranks.model, layout, kv, host, ranks.other_ranks, graphs)
            undo.pop_all()
        return runner

    def load_model(self, progress: bool, adapters: AdapterSet | None = None) -> Model:
        """Load the model on one rank. Raises: ModelError."""
        options = self.options
        folder, device, quantize = options.folder, options.device, options.quantize
        return load_model(folder, self.dtype, device, progress, adapters, quantize, packed=True)

    def resized(self, kv_memory_bytes: int) -> "PreparedModel":
        """Return the model with another pool size. Raises: ModelError."""
        options = replace(self.options, kv_memory_bytes=kv_memory_bytes)
        own_bytes = kv_memory_bytes // self.copies
        pool = _pool_size(self.config, self.layout, own_bytes, options.max_model_len)
        return replace(self, options=options, total_blocks=pool.blocks, max_model_len=pool.max_model_len)


def prepare_model(options: ModelOptions) -> PreparedModel:
    """Read the checkpoint's configuration and size the pool. Raises: ModelError, naming the size that would fit."""
    config = read_model_config(options.folder)
    if options.tensor_parallel > 1:
        check_parallel(options.folder, options.quantize, options.tensor_parallel)
    check_gpus(options.device, options.tensor_parallel)
    if options.speculates and config.state_numbers:
        raise ModelError(
            f"{config.family} has a recurrent state that cannot be rolled back after a rejected draft; disable "
            "speculative decoding"
        )
    dtype = resolve_dtype(options)
    format = weight_format(options.folder, options.quantize)
    layout = resolve_layout(options, config)
    shard_layout(layout, options.tensor_parallel)  # raises ModelError if the layout cannot be sharded
    kv_memory_bytes = options.kv_memory_bytes // copies_of(layout, options.tensor_parallel)
    pool = _pool_size(config, layout, kv_memory_bytes, options.max_model_len)
    described = layout.describe()
    if layout.is_quantised:
        described += f" computed_in={dtype}"  # an unquantised layout's description already has the dtype
    if format in MADE_WHILE_LOADING:
        described += f" weights={format}"
    if layout.state_numbers and options.tensor_parallel > 1:
        described += f" ranks={options.tensor_parallel}"  # a rank's part of a state depends on the number of ranks
    weights = weights_of(options, config, format, dtype)
    draft = None if options.draft is None else _prepare_draft(options, options.draft, config)
    return PreparedModel(
        options,
        config,
        dtype,
        layout,
        *pool,
        format,
        weights.size_bytes,
        weights.looked_up_bytes,
        model_fingerprint(options.folder),
        described,
        draft=draft,
    )


def _pool_size(config: ModelConfig, layout: KvLayout, kv_memory_bytes: int, max_model_len: int | None) -> PoolSize:
    """Choose the pool's size. An encoder's pool caches nothing: ENCODER_TOKENS are enough. Raises: ModelError."""
    if isinstance(config, EncoderConfig):
        kv_memory_bytes = min(kv_memory_bytes, ENCODER_TOKENS * layout.token_bytes)
    return size_pool(layout, config.max_positions, kv_memory_bytes, max_model_len)


def _prepare_draft(options: ModelOptions, draft: ModelOptions, config: ModelConfig) -> PreparedModel:
    """Prepare the draft model. Raises: ModelError, naming both models if they are incompatible."""
    if options.tensor_parallel > 1:
        raise ModelError(f"tensor-parallel is {options.tensor_parallel}; a draft model requires 1")
    try:
        prepared = prepare_model(draft)
    except ModelError as error:
        raise ModelError(f"the draft model {draft.folder}: {error}") from error
    check_same_vocabulary(options.folder, config.vocab_size, draft.folder, prepared.config.vocab_size)
    return prepared


class LoadedWeights(NamedTuple):
    size_bytes: int
    looked_up_bytes: int


def weights_of(options: ModelOptions, config: ModelConfig, format: WeightFormat, dtype: torch.dtype) -> LoadedWeights:
    """Return the sizes in memory of all weights, and of an untied embedding (part of them, only looked up by row)."""
    packed = packs(options.device) and isinstance(config, DecoderConfig)
    expands = isinstance(config, EncoderConfig)
    loaded = loaded_bytes(options.folder, format, dtype.itemsize, packed, config.tensor_name, expands)
    tied = isinstance(config, DecoderConfig) and config.tie_word_embeddings
    head_bytes, is_one = 0 if tied else loaded.head, tied
    if packed and format in WITH_INT8_HEAD:
        head_bytes, is_one = config.vocab_size * (config.hidden_size + INT8_SCALE_BYTES), False
    elif packed and tied and options.tensor_parallel > 1:
        # Each rank packs its part of the head and keeps the complete embedding: head and embedding share no memory.
        head_bytes, is_one = loaded.embedding, False
    return LoadedWeights(loaded.total - loaded.head + head_bytes, 0 if is_one else loaded.embedding)


def resolve_dtype(options: ModelOptions) -> torch.dtype:
    """Return the compute dtype. "auto" is the checkpoint's dtype, or float32 on a CPU without bf16 arithmetic.

    Raises: ModelError for an unknown name.
    """
    if options.dtype in DTYPES:
        return DTYPES[options.dtype]
    if options.dtype != "auto":
        raise ModelError(f"dtype is {options.dtype!r}; choose auto, {', '.join(DTYPES)}")
    if options.device.type == "cpu" and not has_bf16_arithmetic():
        return torch.float32
    stated = read_json(options.folder / CONFIG_FILE)
    if isinstance(text := stated.get("text_config"), dict):
        stated = text | stated
    name = stated.get("dtype") or stated.get("torch_dtype") or stored_dtype(options.folder)
    return torch.float32 if name in WIDE else torch.bfloat16


def resolve_layout(options: ModelOptions, config: ModelConfig) -> KvLayout:
    """Return the layout of a KV block before its division among ranks. Raises: ModelError."""
    return kv_layout(config, resolve_kv_dtype(options.kv_cache_dtype, resolve_dtype(options)), options.block_tokens)


def resolve_kv_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of KV: "auto" is the model's; otherwise a key of KV_DTYPES, or "fp8" for fp8_e4m3, as in vLLM.

    Raises: ModelError for an unknown name, and for an unquantised dtype other than the model's.
    """
    dtype = model_dtype if name == "auto" else KV_DTYPES.get(KV_DTYPE_ALIASES.get(name, name))
    if dtype is None:
        raise ModelError(f"kv-cache-dtype is {name!r}; choose auto, {', '.join([*KV_DTYPES, *KV_DTYPE_ALIASES])}")
    if dtype not in QUANTISED and dtype != model_dtype:
        model = str(model_dtype).removeprefix("torch.")
        raise ModelError(
            f"kv-cache-dtype is {name}, but the compute dtype is {model}; set --dtype {name}, or kv-cache-dtype auto"
        )
    return dtype


def has_bf16_arithmetic() -> bool:
    """Return whether this CPU multiplies bf16 natively. On other CPUs float32 is both faster and more exact."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
